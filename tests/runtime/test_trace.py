"""Traces of runs: the file that tracing pages read, and the command that writes it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
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
    events = [e for e in json.loads((tmp_path / "run.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert [e["name"] for e in events] == [name for _, name, _ in model.profile(inputs, 1)]
    for first, second in itertools.pairwise(events):
        assert np.isclose(first["ts"] + first["dur"], second["ts"])
    assert np.isclose(sum(e["dur"] for e in events), made.seconds * 1e6)


def test_command(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    result = CliRunner().invoke(cli, ["profile", str(DIGITS), "--device", "cpu", "--guess", "--trace", str(path)])
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["traceEvents"]
