"""`progress=`: what a load or compile tells while it goes on, and what a function that raises does."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import OptionError
from rlx.progress import STAGES, Progress, reporting

MODEL = Path(rlx.__file__).parent / "demo" / "digits.onnx"


def network(layers: int = 30) -> rlx.Graph:
    """Kernels of many kinds, with 4 MiB of weights each."""
    g = rlx.Graph("network")
    x = g.input("x", (4, 1024))
    for n in range(layers):
        w = np.full((1024, 1024), (n + 1) / 1024, np.float32)
        x = rlx.tanh(x @ g.param(f"w{n}", (1024, 1024), data=w))
    g.output(x, "y")
    return g


class Told:
    """All that was told, by which thread."""

    def __init__(self) -> None:
        self.events: list[Progress] = []
        self.threads: set[threading.Thread] = set()

    def __call__(self, event: Progress) -> None:
        self.events.append(event)
        self.threads.add(threading.current_thread())

    def check(self, stages: list[str]) -> None:
        """In order, never falling, once done, by the calling thread."""
        assert list(dict.fromkeys(e.stage for e in self.events)) == stages
        fractions = [e.fraction for e in self.events]
        assert fractions == sorted(fractions)
        assert fractions[0] == 0
        assert [f for f in fractions if f >= 1] == [1]
        assert self.events[-1].stage == "done"
        seconds = [e.seconds for e in self.events]
        assert seconds == sorted(seconds)
        assert self.threads == {threading.current_thread()}


def test_stages_of_a_load(tmp_path: Path) -> None:
    """From a file all of them; from the cache, nothing is compiled."""
    told = Told()
    first = rlx.load(MODEL, device="cpu", cache_dir=tmp_path, progress=told)
    told.check([*STAGES, "done"])
    assert len([e for e in told.events if e.stage == "code"]) > 3
    again = Told()
    second = rlx.load(MODEL, device="cpu", cache_dir=tmp_path, progress=again)
    again.check(["read", "done"])
    x = np.zeros((1, 1, 8, 8), np.float32)
    np.testing.assert_array_equal(first.run([x])[0], second.run([x])[0])


@pytest.mark.parametrize("device", ["cpu", "interp", "reference"])
def test_stages_of_a_compile(device: str) -> None:
    told = Told()
    rlx.compile(network(3), device=device, progress=told)
    between = [] if device == "reference" else ["passes", "plan"]
    told.check(["read", *between, "code", "done"])
    session = Told()
    rlx.Session(device=device).compile(network(2), progress=session)
    assert session.events[-1].fraction == 1


def test_packing_in_parts_gives_the_same_weights(tmp_path: Path) -> None:
    """With a function it is told how far packing is; what is kept has the same bits."""
    graph, x = network(), np.ones((4, 1024), np.float32)
    path = tmp_path / "network.rlxart"
    told = Told()
    model = rlx.compile(graph, device="cpu")
    want = model.run([x])[0]
    fresh = rlx.compile(network(), device="cpu")
    with reporting(told):
        fresh.save(path)
    assert len([e for e in told.events if e.stage == "pack"]) > 2
    np.testing.assert_array_equal(fresh.run([x])[0], want)
    np.testing.assert_array_equal(rlx.load(path, device="cpu").run([x])[0], want)


@pytest.mark.parametrize(
    "stage, error",
    [(stage, KeyError("mine")) for stage in (*STAGES, "done")]
    + [("pack", OSError("mine")), ("pack", OptionError("mine")), ("code", KeyboardInterrupt("mine"))],
)
def test_what_the_function_raises_ends_the_load(stage: str, error: BaseException, tmp_path: Path) -> None:
    """It comes out as it is; the next load is whole."""

    def watcher(event: Progress) -> None:
        if event.stage == stage:
            raise error

    with pytest.raises(type(error)) as caught:
        rlx.load(MODEL, device="cpu", cache_dir=tmp_path, progress=watcher)
    assert caught.value is error
    model = rlx.load(MODEL, device="cpu", cache_dir=tmp_path)
    assert np.isfinite(model.run([np.zeros((1, 1, 8, 8), np.float32)])[0]).all()


def test_only_the_call_that_was_asked_tells() -> None:
    """A load within the function, or after it, is not told; nor is anybody without one."""
    told = Told()

    def watcher(event: Progress) -> None:
        told(event)
        if event.stage == "passes" and len(told.events) < 50:
            rlx.compile(network(1), device="reference", progress=lambda inner: None)

    rlx.load(MODEL, device="cpu", cache=False, progress=watcher)
    told.check(["read", "passes", "plan", "code", "done"])
    count = len(told.events)
    rlx.compile(network(1), device="reference")
    assert len(told.events) == count


@pytest.mark.parametrize("wrong", [3, "bar", True])
def test_what_is_no_function_is_refused(wrong: Any) -> None:
    with pytest.raises(OptionError, match=r"progress=.*: expected a function that is called with"):
        rlx.load(MODEL, device="reference", progress=wrong)
    with pytest.raises(OptionError, match="unknown option 'progres': did you mean 'progress'"):
        rlx.load(MODEL, progres=print)
