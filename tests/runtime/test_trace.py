"""Traces of runs: the file that tracing pages read, and the command that writes it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import rlx
from rlx.cli.main import cli
from rlx.demo import DIGITS


def test_events_are_end_to_end(tmp_path: Path) -> None:
    """One event a kernel, each starts where the one before ends, and they sum to the time in kernels."""
    model = rlx.load(DIGITS, device="cpu", dims={"batch": 2})
    (spec,) = model.inputs
    inputs = [np.zeros((2, *spec.shape[1:]), np.float32)]
    made = model.trace(inputs, tmp_path / "run.json", repeat=2)
    every = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    events = [e for e in every if e["ph"] == "X" and e["tid"] == 0]
    assert [e["name"] for e in events] == [name for _, name, _ in model.profile(inputs, 1)]
    for first, second in itertools.pairwise(events):
        assert np.isclose(first["ts"] + first["dur"], second["ts"])
    assert np.isclose(sum(e["dur"] for e in events), made.seconds * 1e6)


@pytest.mark.parametrize("threads", [1, 2])
def test_every_thread_has_a_track(threads: int) -> None:
    """Tracks have names; what a thread did of a kernel lies within it, and the chunks are all there."""
    model = rlx.load(DIGITS, device="cpu", dims={"batch": 64}, threads=threads)
    (spec,) = model.inputs
    made = model.trace([np.zeros((64, *spec.shape[1:]), np.float32)])
    events = made.to_dict()["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[0] == "kernels"
    assert names[1] == "thread 0 (caller)"
    assert set(names) == {e["tid"] for e in events if e["ph"] == "X"} <= set(range(threads + 1))
    whole = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    for part in (e for e in events if e["ph"] == "X" and e["tid"]):
        kernel = whole[part["args"]["phase"]]
        assert kernel["ts"] <= part["ts"] + 1e-6
        assert part["ts"] + part["dur"] <= kernel["ts"] + kernel["dur"] + 1e-6
        assert part["args"]["chunks"] > 0
    for row in made.rows:
        assert sum(span.chunks for span in row.threads) >= 1


def test_command(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    result = CliRunner().invoke(cli, ["profile", str(DIGITS), "--device", "cpu", "--guess", "--trace", str(path)])
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["traceEvents"]
