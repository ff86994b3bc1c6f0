"""The commands about cost: what they print, and that their JSON and page can be used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlx.backends import backend_named
from rlx.cli.main import cli
from rlx.cost import kept
from rlx.cost.ceilings import Ceilings, guess_of
from rlx.demo import DIGITS


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No calibration of the machine is read or written."""
    monkeypatch.setattr(kept, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(kept, "_loaded", {})
    return tmp_path


def ran(*args: str) -> str:
    done = CliRunner().invoke(cli, list(args))
    assert done.exit_code == 0, done.output
    return done.output


def test_profile_prints_every_kernel() -> None:
    """Predicted and measured times, the part of the roofline, and the totals of the IO profile."""
    text = ran("profile", str(DIGITS), "--guess", "--device", "cpu")
    for word in ("predicted", "measured", "roofline", "conv1", "probabilities", "launches", "sync points", "a guess"):
        assert word in text
    facts = json.loads(ran("profile", str(DIGITS), "--guess", "--json", "--device", "cpu"))
    assert len(facts["kernels"]) == facts["io"]["totals"]["launches"] == len(facts["io"]["kernels"])
    for row in facts["kernels"]:
        assert row["predicted"] > 0
        assert row["measured"] > 0
        assert row["fraction"] > 0


def test_profile_learns_from_runs() -> None:
    """The calibration is corrected and kept; a guess can't be."""
    done = CliRunner().invoke(cli, ["profile", str(DIGITS), "--guess", "--learn", "--device", "cpu"])
    assert done.exit_code == 1
    assert "rlx calibrate" in done.output
    threads = 1
    kept.keep(replace(guess_of(backend_named("cpu"), threads), guessed=False))
    ran("profile", str(DIGITS), "--learn", "--threads", str(threads), "--device", "cpu")
    found = kept.kept_ceilings("cpu", threads)
    assert found is not None
    assert "conv" in found.corrections


def test_explain_prints_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device with its price or its obstacle."""
    monkeypatch.setenv("RLX_DEVICE_POLICY", "only=cpu")
    text = ran("explain", str(DIGITS), "--device", "auto")
    for word in ("the only one that can run it", "never chosen", "per run", "xla", "mlx"):
        assert word in text
    facts = json.loads(ran("explain", str(DIGITS), "--json"))
    assert facts["decision"]["device"] == "cpu"
    assert {c["device"] for c in facts["decision"]["candidates"]} >= {"cpu", "xla", "mlx", "reference"}


def test_devices_say_what_they_offer() -> None:
    """Capabilities are told beforehand, and whether a device is calibrated."""
    rows = {row["name"]: row for row in json.loads(ran("devices", "--json"))["devices"]}
    assert {"arena", "clone", "slots"} <= set(rows["cpu"]["capabilities"])
    assert "arena" not in rows["xla"]["capabilities"]
    assert rows["cpu"]["calibrated"] is False
    assert "cpu offers" in ran("devices")


def test_calibrate_keeps_what_it_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each device; afterwards it is calibrated."""

    def fake(device: str, *, threads: int, seconds: float) -> Ceilings:
        return replace(guess_of(backend_named(device), threads), guessed=False)

    monkeypatch.setattr("rlx.cost.measure.calibrate", fake)
    assert "Gflop/s" in ran("calibrate", "cpu", "--threads", "1")
    assert kept.kept_ceilings("cpu", 1) is not None
    assert json.loads(ran("calibrate", "cpu", "--json"))["ceilings"][0]["device"] == "cpu"
