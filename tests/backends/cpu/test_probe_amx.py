"""Whether products of f32 are made by tile registers: measured once, kept, and without effect on what is right."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from targets import pretend

import rlx
from rlx.backends.cpu.jit import cpuid, probe_amx
from rlx.disk import write_kept


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing is known of this machine: its folder, and answers are forgotten before and after."""
    monkeypatch.setattr(probe_amx, "cache_folder", lambda: tmp_path)
    probe_amx.floats_by_tiles.cache_clear()
    yield tmp_path
    probe_amx.floats_by_tiles.cache_clear()


@pytest.mark.parametrize("pace, worth", [(14.0, True), (9.0, True), (5.0, False)])
def test_it_is_measured_once_a_machine(fresh: Path, monkeypatch: pytest.MonkeyPatch, pace: float, worth: bool) -> None:
    asked = []
    monkeypatch.setattr(probe_amx, "measured", lambda: asked.append(1) or pace)
    for _ in range(2):
        assert probe_amx.floats_by_tiles() == worth
        probe_amx.floats_by_tiles.cache_clear()  # as in another process
    assert len(asked) == 1
    monkeypatch.setattr(cpuid, "identity", lambda: "another processor")
    assert probe_amx.floats_by_tiles() == worth
    assert len(asked) == 2


@pytest.mark.parametrize("text", ["", "{", '{"key": [], "value": true}', "null", "[" * 100_000])
def test_what_is_kept_may_be_damaged(fresh: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (fresh / "tiles.json").write_text(text)
    monkeypatch.setattr(probe_amx, "measured", lambda: 5.0)
    assert not probe_amx.floats_by_tiles()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_kept_may_be_no_file(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    """A pipe that nobody writes to is not waited for."""
    make(fresh / "tiles.json")
    monkeypatch.setattr(probe_amx, "measured", lambda: 5.0)
    assert not probe_amx.floats_by_tiles()


def test_a_value_of_another_kind_is_measured_anew(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kept(fresh / "tiles.json", [probe_amx.FORMAT, cpuid.identity()], "yes")
    monkeypatch.setattr(probe_amx, "measured", lambda: 20.0)
    assert probe_amx.floats_by_tiles()


@pytest.mark.needs("amx")
def test_the_measurement() -> None:
    """Takes no CPU from its caller; what it finds is the machine's own affair."""
    cpus = os.sched_getaffinity(0)
    assert 0 < probe_amx.measured() < np.inf
    assert os.sched_getaffinity(0) == cpus


@pytest.mark.needs("amx")
def test_products_are_right_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """By tiles where they are worth it, by fma where not: each is as exact as f32, and the bits differ."""
    rng = np.random.default_rng(3)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((130, 200), (200, 300)))
    exact, found = x.astype(np.float64) @ w.astype(np.float64), []
    for worth in (True, False):
        pretend(monkeypatch, float_tiles=worth)
        g = rlx.Graph("product")
        g.output(g.input("x", (130, 200)) @ g.param("w", data=w), "y")
        found.append(rlx.compile(g, device="cpu").run({"x": x})[0])
        np.testing.assert_allclose(found[-1], exact, rtol=0, atol=1e-6 * np.abs(exact).max())
    assert found[0].tobytes() != found[1].tobytes()
