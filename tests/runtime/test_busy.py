"""busy="wait": threads take turns on one graph, and nobody waits for itself."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import BusyError, ExecutionError
from rlx.ops.base import Op, register

Array = np.ndarray[Any, Any]
SECONDS = 20


@register
class CallsBack(Op):
    """x, after a call of what `key` names: a host call."""

    key: str = ""

    def infer(self, x: Any) -> Any:
        return x

    def reference(self, x: Array) -> Array:
        calls[self.key]()
        return x


calls: dict[str, Callable[[], Any]] = {}


def calling(key: str, device: str, **options: Any) -> rlx.CompiledGraph:
    """2 x + w, where a run calls `calls[key]`."""
    g = rlx.Graph(key)
    x, w = g.input("x", (2,)), g.param("w", (2,), data=np.zeros(2, np.float32))
    g.output(rlx.ops.calls_back(x * 2.0 + w, key=key), name="y")
    return rlx.compile(g, device=device, **options)


def product(**options: Any) -> rlx.CompiledGraph:
    g = rlx.Graph("product")
    x, w = g.input("x", (rlx.Dim("n", 1, 64), 96)), g.param("w", (96, 96))
    g.output(rlx.tanh(rlx.tanh(x @ w) @ w), name="y")
    model = rlx.compile(g, device="cpu", **options)
    model.set_param("w", np.random.default_rng(0).standard_normal((96, 96)).astype(np.float32) / 10)
    return model


@pytest.mark.parametrize("busy", ["wait", "error"])
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_calls_wait_for_the_run_of_another_thread(device: str, busy: str) -> None:
    """Runs, changes of params and of states all wait their turn, or all are refused."""
    x = np.float32([1, 2])
    key = f"slow {device} {busy}"
    inside, over = threading.Event(), threading.Event()
    calls[key] = lambda: None
    model = calling(key, device, busy=busy)
    model.run([x])

    def slow() -> None:
        inside.set()
        over.wait(SECONDS)

    calls[key] = slow
    first = threading.Thread(target=model.run, args=([x],), daemon=True)
    first.start()
    assert inside.wait(SECONDS)
    if busy == "wait":
        threading.Timer(0.1, over.set).start()
    expected: list[tuple[Callable[[], Any], Any]] = [
        (lambda: model.run([x])[0][0], 2),
        (lambda: model.run_slots(x)[0][0], 2),
        (lambda: model.run_views([x])[0][0], 2),
        (lambda: model.run([x], out={"y": np.zeros(2, np.float32)})[0][0], 2),
        (lambda: model.set_param("w", x), {}),
        (lambda: model.states.bind("x", x), None),
    ]
    for call, want in expected:
        if busy == "wait":
            assert call() == want
        else:
            with pytest.raises(BusyError, match="busy='wait'"):
                call()
    over.set()
    first.join(SECONDS)
    assert model.run([] if busy == "wait" else [x])[0][0] == (3 if busy == "wait" else 2)


def test_threads_on_one_graph_get_right_answers(together: Callable[..., None]) -> None:
    """Eight threads with inputs of their own, at changing lengths: every result is that of the run alone."""
    model = product(busy="wait", threads=2)
    inputs = {(t, n): np.full((n, 96), (t + 1) / 8, np.float32) for t in range(8) for n in (1, 5, 64)}
    wants = {key: model.run([x])[0] for key, x in inputs.items()}

    def job(thread: int) -> Callable[[], None]:
        def runs() -> None:
            for _ in range(25):
                for n in (1, 5, 64):
                    got = model.run([inputs[thread, n]])[0]
                    np.testing.assert_array_equal(got, wants[thread, n])

        return runs

    together(*map(job, range(8)))


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_run_that_calls_itself_is_told(device: str) -> None:
    """A host call that runs its own graph would wait for itself for ever."""
    x = np.float32([1, 2])
    key = f"itself {device}"
    calls[key] = lambda: None
    model = calling(key, device, busy="wait")
    model.run([x])
    for again in (lambda: model.run([x]), lambda: model.run_slots(x), lambda: model.set_param("w", x)):
        calls[key] = again
        with pytest.raises(ExecutionError, match="running in another thread"):
            model.run([x])
        with pytest.raises(ExecutionError, match="running in another thread"):  # not tried again and again
            model.submit([x]).result(SECONDS)
    calls[key] = lambda: None
    assert model.run([x])[0].tolist() == [2, 4]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
def test_a_signal_handler_that_runs_the_graph_is_told() -> None:
    """The handler runs in the thread that it interrupts: in the run, or while Python code has the graph."""
    g = rlx.Graph("long")
    x = g.input("x", (512, 512))
    for _ in range(150):  # longer than the 50 ms between looks for signals
        x = rlx.tanh(x @ g.param(f"w{len(g.params)}", (512, 512), data=np.eye(512, dtype=np.float32)))
    g.output(x, name="y")
    model = rlx.compile(g, device="cpu", threads=1, busy="wait")
    zeros = np.zeros((512, 512), np.float32)
    model.run([zeros])
    said, own = list[Any](), np.empty((512, 512), np.float32)

    def handler(number: int, frame: Any) -> None:
        try:
            model.run([zeros])
            said.append("ran")
        except BusyError:
            said.append("busy")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        stop = time.monotonic() + SECONDS
        while "busy" not in said and time.monotonic() < stop:
            signal.setitimer(signal.ITIMER_REAL, 0.004)  # far within a run
            assert not model.run([zeros], out=[own])[0].any()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert "busy" in said
