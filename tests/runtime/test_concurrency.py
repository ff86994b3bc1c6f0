"""Threads, clones and forks: never a hang, never a wrong result; one graph runs in one thread at a time."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.granted import say_cut
from rlx.errors import BusyError
from rlx.ops.base import Op, register

Array = np.ndarray[Any, Any]
SECONDS = 1.0  # for how long threads hammer at something
HANG = 60  # seconds that nothing takes


@register
class Calls(Op):
    """x, after a call of `during`: a host call."""

    def infer(self, x: Any) -> Any:
        return x

    def reference(self, x: Array) -> Array:
        during()
        return x


def during() -> None:
    """What a run of `calling` does in its middle; tests set it."""


def network(width: int, **options: Any) -> rlx.CompiledGraph:
    """A few products, wide enough for several chunks."""
    g = rlx.Graph(f"network {width}")
    x, w = g.input("x", (rlx.Dim("n", 1, 64), width)), g.param("w", (width, width))
    y = x
    for _ in range(3):
        y = rlx.tanh(y @ w)
    g.output(y, name="y")
    model = rlx.compile(g, device="cpu", **options)
    model.set_param("w", weights(width))
    return model


def weights(width: int, scale: float = 1) -> Array:
    made = np.random.default_rng(width).standard_normal((width, width)) * scale / np.sqrt(width)
    return made.astype(np.float32)


def calling() -> rlx.CompiledGraph:
    g = rlx.Graph("calling")
    x, w = g.input("x", (2,)), g.param("w", (2,))
    g.output(rlx.ops.calls(x + w) * 2.0, name="y")
    model = rlx.compile(g, device="cpu")
    model.set_param("w", np.zeros(2, np.float32))
    return model


def hammer(model: rlx.CompiledGraph, seed: int, width: int) -> Callable[[], None]:
    """Runs of changing length, all compared with what the same run gave alone."""
    rng = np.random.default_rng(seed)
    inputs = [rng.standard_normal((n, width)).astype(np.float32) for n in (1, 7, 64, 30)]
    wants = [model.run([x])[0] for x in inputs]

    def job() -> None:
        stop = time.monotonic() + SECONDS
        while time.monotonic() < stop:
            for x, want in zip(inputs, wants, strict=True):
                np.testing.assert_array_equal(model.run_slots(x)[0], want)
                np.testing.assert_array_equal(model.run([x])[0], want)

    return job


def test_different_models_in_threads(together: Callable[..., None]) -> None:
    models = [network(width, threads=threads) for width, threads in ((64, 2), (96, 4), (128, 1), (160, 2))]
    together(*(hammer(m, i, m.inputs[0].shape[1]) for i, m in enumerate(models)))  # type: ignore[arg-type]


def test_clones_in_threads(together: Callable[..., None]) -> None:
    """Clones made and used in threads agree with the original, from the first run on."""
    model = network(128, threads=2)
    x = np.ones((30, 128), np.float32)
    want = network(128, threads=1).run([x])[0]
    clones = [model.clone() for _ in range(3)]

    def first_run(clone: rlx.CompiledGraph) -> Callable[[], None]:
        return lambda: np.testing.assert_array_equal(clone.run([x])[0], want)

    together(*map(first_run, clones))  # who comes first packs the weights
    together(*(hammer(clone, i, 128) for i, clone in enumerate(clones)))


def test_one_graph_in_two_threads_is_busy_or_right(together: Callable[..., None]) -> None:
    """Whatever a second thread calls gets BusyError or the right answer, at any length."""
    model = network(128, threads=2)
    inputs = {n: np.full((n, 128), 1 / n, np.float32) for n in (1, 3, 40, 64)}
    wants = {n: model.run([x])[0] for n, x in inputs.items()}
    counts = {"done": 0, "busy": 0}
    mine = {thread: np.zeros((64, 128), np.float32) for thread in range(3)}

    def job(thread: int) -> None:
        stop = time.monotonic() + SECONDS
        while time.monotonic() < stop:
            for n, x in inputs.items():
                out = {"y": mine[thread][:n]}
                for call in (lambda x=x: model.run([x]), lambda x=x, out=out: model.run([x], out=out)):
                    try:
                        got = call()[0]
                    except BusyError:
                        counts["busy"] += 1
                        continue
                    np.testing.assert_array_equal(got, wants[n])
                    counts["done"] += 1

    together(*(lambda t=t: job(t) for t in mine))  # type: ignore[misc]
    assert counts["done"]
    np.testing.assert_array_equal(model.run([inputs[3]])[0], wants[3])


def test_busy(together: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """While a run goes on, calls and changes of the graph raise BusyError and change nothing; a clone can run."""
    model = calling()
    clone = model.clone()
    x = np.float32([1, 2])
    model.run([x])
    clone.run([x])
    inside, over = threading.Event(), threading.Event()

    def first() -> None:
        monkeypatch.setattr(sys.modules[__name__], "during", lambda: (inside.set(), over.wait(HANG)))
        np.testing.assert_array_equal(model.run([x])[0], 2 * x)

    def second() -> None:
        assert inside.wait(HANG)
        monkeypatch.undo()
        try:
            others()
        finally:
            over.set()

    def others() -> None:
        for call in (
            lambda: model.run([x]),
            lambda: model.run_slots(x),
            lambda: model.run_views([x]),
            lambda: model.set_param("w", x),
        ):
            with pytest.raises(BusyError, match="clone"):
                call()
        np.testing.assert_array_equal(clone.run([x])[0], 2 * x)
        clone.set_param("w", x)  # its own
        np.testing.assert_array_equal(clone.run([x])[0], 4 * x)

    together(first, second)
    np.testing.assert_array_equal(model.run([x])[0], 2 * x)
    model.set_param("w", 2 * x)
    np.testing.assert_array_equal(model.run([x])[0], 6 * x)


def test_params_set_while_clones_run(together: Callable[..., None]) -> None:
    """A clone's params are its own: setting them changes no run of the others, and the results are those of one set."""
    model = network(96, threads=2)
    x = np.ones((8, 96), np.float32)
    scales = (1.0, 0.5, 0.25)
    wants = []
    for scale in scales:
        model.set_param("w", weights(96, scale))
        wants.append(model.run([x])[0])
    stop = time.monotonic() + SECONDS

    def setter(clone: rlx.CompiledGraph) -> Callable[[], None]:
        def job() -> None:
            number = 0
            while time.monotonic() < stop:
                number += 1
                clone.set_param("w", weights(96, scales[number % 3]))
                np.testing.assert_array_equal(clone.run([x])[0], wants[number % 3])

        return job

    def runner(clone: rlx.CompiledGraph) -> Callable[[], None]:
        def job() -> None:
            while time.monotonic() < stop:
                np.testing.assert_array_equal(clone.run([x])[0], wants[2])

        return job

    together(setter(model.clone()), setter(model.clone()), runner(model.clone()), runner(model))
    model.set_param("w", weights(96, 0.5))
    np.testing.assert_array_equal(model.run([x])[0], wants[1])


def in_child(check: Callable[[], None]) -> int:
    """The exit status of a forked child that runs `check`; 99 if it hangs."""
    pid = os.fork()
    if pid == 0:
        try:
            check()
        except BaseException as error:  # noqa: BLE001  # pytest must not go on in the child
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    stop = time.monotonic() + HANG
    while time.monotonic() < stop:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return 99


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_fork_during_runs(together: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The child can use every graph, also those that other threads of the parent were running or binding."""
    model, other = network(128, threads=2), calling()
    monkeypatch.setattr(sys.modules[__name__], "during", lambda: time.sleep(0.3))
    inputs = [np.full((n, 128), 1 / n, np.float32) for n in (40, 3, 64, 1)]
    wants = [model.run([x])[0] for x in inputs]
    pair = np.float32([1, 2])
    stop = threading.Event()

    def parent(call: Callable[[], Any]) -> Callable[[], None]:
        def job() -> None:
            while not stop.is_set():
                call()

        return job

    def check() -> None:
        for _ in range(3):
            for x, want in zip(inputs, wants, strict=True):
                np.testing.assert_array_equal(model.run([x])[0], want)
                np.testing.assert_array_equal(model.run_slots(x)[0], want)
        np.testing.assert_array_equal(other.run([pair])[0], 2 * pair)
        model.set_param("w", weights(128))
        np.testing.assert_array_equal(model.clone().run([inputs[0]])[0], wants[0])

    def forks() -> None:
        try:
            for _ in range(4):
                time.sleep(0.05)
                assert in_child(check) == 0
        finally:
            stop.set()

    together(forks, parent(lambda: [model.run([x]) for x in inputs]), parent(lambda: other.run([pair])))
    for x, want in zip(inputs, wants, strict=True):
        np.testing.assert_array_equal(model.run([x])[0], want)


def test_threads_option_takes_any_number(caplog: pytest.LogCaptureFixture) -> None:
    say_cut.cache_clear()  # another test may have met the warning, which is said once a process
    x = np.ones((64, 128), np.float32)
    wants = [network(128, threads=count).run([x])[0] for count in (1, 2, 3, 64)]
    assert not caplog.records
    wants += [network(128, threads=1000).run([x])[0] for _ in range(2)]
    assert [record.getMessage() for record in caplog.records] == [
        "threads=1000: a run has 64 threads at most: it gets these"
    ]
    for want in wants[1:]:
        np.testing.assert_array_equal(want, wants[0])


@pytest.mark.parametrize("name", ["states", "adapters"])
def test_threads_that_ask_first_get_the_same_object(
    name: str, together: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are made when first asked for, by whoever asks; only one of those made at once is kept."""
    model = network(8)
    kind = type(getattr(model, name))
    model = network(8)
    both, make, got = threading.Barrier(2), kind.__init__, list[Any]()

    def slow(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        both.wait(HANG)

    monkeypatch.setattr(kind, "__init__", slow)
    together(*[lambda: got.append(getattr(model, name))] * 2)
    assert got[0] is got[1] is getattr(model, name)
