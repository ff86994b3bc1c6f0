"""Runs that are submitted: order, own copies, errors, bounds, and what the futures promise."""

from __future__ import annotations

import asyncio
import gc
import linecache
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import BusyError, ClosedError, ExecutionError, MemoryDeficit, OptionError, ShapeError
from rlx.ops.base import Op, register

Array = np.ndarray[Any, Any]
DEVICES = ["cpu", "reference"]
SECONDS = 20  # no test waits longer


@register
class Gate(Op):
    """x, once the event named `key` is set: a host call. Raises for an x that begins with a negative number."""

    key: str = ""

    def infer(self, x: Any) -> Any:
        return x

    def reference(self, x: Array) -> Array:
        entered[self.key].set()
        assert gates[self.key].wait(SECONDS)
        if x.reshape(-1)[0] < 0:
            raise ValueError("negative")
        return x


gates: dict[str, threading.Event] = {}
entered: dict[str, threading.Event] = {}


def gated(*, is_open: bool = False, device: str = "cpu", **options: Any) -> tuple[rlx.CompiledGraph, threading.Event]:
    """A graph 2 x whose runs wait for the event."""
    key = f"gate {len(gates)}"
    gates[key], entered[key] = threading.Event(), threading.Event()
    if is_open:
        gates[key].set()
    g = rlx.Graph("gated")
    g.output(rlx.ops.gate(g.input("x", (2,)) * 2.0, key=key), name="y")
    return rlx.compile(g, device=device, **options), gates[key]


def count(device: str = "cpu", **options: Any) -> rlx.CompiledGraph:
    """x + a state that counts the runs; the runs so far as a second output."""
    g = rlx.Graph("count")
    x, runs = g.input("x", (rlx.Dim("n", 1, 64),)), g.state("runs", (1,))
    more = runs + 1.0
    g.update(runs, more)
    g.output(x * more, name="y")
    g.output(more * 1.0, name="runs_so_far")
    return rlx.compile(g, device=device, **options)


def ones(n: int, value: float = 1) -> Array:
    return np.full(n, value, np.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_runs_keep_their_order_and_futures_their_own_outputs(device: str) -> None:
    """States flow from run to run in the order of submitting, whatever the lengths; inputs are taken at once."""
    model = count(device)
    buffer = np.empty(64, np.float32)
    futures = []
    for number in range(1, 31):
        n = 1 + number % 7
        buffer[:n] = number
        futures.append(model.submit({"x": buffer[:n]} if number % 2 else [buffer[:n]]))
        buffer[:] = np.nan
    model.sync()
    for number, future in enumerate(futures, 1):
        assert future.done()
        y, runs = future.result(0)
        np.testing.assert_array_equal(y, ones(1 + number % 7, number * number))
        assert runs[0] == number
    assert model.states["runs"].read()[0] == 30


def test_selected_outputs_by_name_or_position() -> None:
    model = count()
    assert [a.tolist() for a in model.submit([ones(2)], outputs=["runs_so_far"]).result(SECONDS)] == [[1]]
    assert [a.tolist() for a in model.submit([ones(2)], outputs=[1, 0]).result(SECONDS)] == [[2], [2, 2]]
    assert model.submit([ones(2)], outputs=[]).result(SECONDS) == []
    assert [r[0][0] for r in model.run_many([[ones(1)]] * 2, outputs=["runs_so_far"])] == [4, 5]


def test_what_is_wrong_with_the_inputs_is_said_at_once() -> None:
    model = count(queue=1)
    for _ in range(3):  # and takes no place in the queue
        with pytest.raises(ShapeError):
            model.submit([np.ones((2, 2), np.float32)])
        with pytest.raises(rlx.errors.NameNotFound):
            model.submit([ones(1)], outputs=["z"])
    with pytest.raises(ExecutionError):  # the bounds of dims are for the run to say
        model.submit([ones(65)]).result(SECONDS)
    assert model.submit([ones(1)]).result(SECONDS)[1][0] == 1


def test_an_error_goes_to_its_future_and_to_sync_once() -> None:
    model, _ = gated(is_open=True)
    good, bad, after = model.submit([ones(2)]), model.submit([ones(2, -1)]), model.submit([ones(2, 3)])
    assert good.result(SECONDS)[0].tolist() == [2, 2]
    with pytest.raises(ExecutionError, match="negative"):
        bad.result(SECONDS)
    assert isinstance(bad.exception(), ExecutionError)
    assert after.result(SECONDS)[0].tolist() == [6, 6]
    model.sync()  # somebody has seen it
    model.submit([ones(2, -1)])
    model.submit([ones(2)])
    with pytest.raises(ExecutionError, match="negative"):
        model.sync()
    model.sync()


def test_the_queue_is_bounded_and_first_come_first_served() -> None:
    model, gate = gated(queue=2)
    futures = [model.submit([ones(2, n)]) for n in range(2)]
    assert [f.running() or f.done() for f in futures][1] is False
    late: list[Any] = []
    thread = threading.Thread(target=lambda: late.append(model.submit([ones(2, 2)])), daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    assert not late
    gate.set()
    thread.join(SECONDS)
    model.sync()
    assert [f.result(0)[0][0] for f in (*futures, *late)] == [0, 2, 4]


@pytest.mark.parametrize("device", DEVICES)
def test_the_memory_of_a_queue_is_known_before(device: str) -> None:
    """A queue that is asked for is in the estimate; else it is asked for when the first run is submitted."""
    g = rlx.Graph("wide")
    g.output(g.input("x", (1 << 20,)).sum(), name="y")
    inputs = 4 << 20
    plain, queued = (rlx.estimate(g, device, overhead=0, **o) for o in ({}, {"queue": 3}))
    assert plain.input_bytes == inputs
    assert queued.input_bytes == 4 * inputs
    assert queued.peak_bytes == plain.peak_bytes + 3 * inputs
    rest = plain.peak_bytes - inputs + (1 << 20)  # what the compiler knows better of the code
    if device == "cpu":
        with pytest.raises(MemoryDeficit):
            rlx.compile(g, device=device, budget=rest + 3 * inputs, queue=3)
    model = rlx.compile(g, device=device, budget=rest + 4 * inputs)
    x = np.ones(1 << 20, np.float32)
    assert model.run([x])[0] == 1 << 20
    with pytest.raises(MemoryDeficit, match="input"):
        model.submit([x])  # four of them
    assert model.run([x])[0] == 1 << 20
    for options in ({"queue": 3, "budget": rest + 4 * inputs}, {"budget": rest + 5 * inputs}):
        other = rlx.compile(g, device=device, **options)
        assert [y for (y,) in other.run_many([[x]] * 5)] == [1 << 20] * 5


def test_cancel_before_the_start_only() -> None:
    model, gate = gated(queue=3)
    first, second, third = (model.submit([ones(2, n)]) for n in range(3))
    while not first.running():
        time.sleep(1e-3)
    assert not first.cancel()
    assert second.cancel()
    gate.set()
    assert third.result(SECONDS)[0][0] == 4
    assert first.result(0)[0][0] == 0
    with pytest.raises(CancelledError):
        second.result(0)
    model.sync()
    assert [model.submit([ones(2, n)]).result(SECONDS)[0][0] for n in range(5)] == [0, 2, 4, 6, 8]


def test_callbacks_may_submit_and_raise_and_not_wait(caplog: pytest.LogCaptureFixture) -> None:
    model = count(queue=1)
    chain: list[Any] = []
    over = threading.Event()

    def again(future: Any) -> None:
        if len(chain) == 5:
            try:
                model.submit([ones(1)])
                model.submit([ones(1)])  # the queue is full, and only this thread can empty it
            except BusyError as error:
                chain.append(error)
            over.set()
            raise KeyboardInterrupt  # ends nothing
        chain.append(model.submit([ones(1)]))
        chain[-1].add_done_callback(again)

    model.submit([ones(1)]).add_done_callback(again)
    assert over.wait(SECONDS)
    assert isinstance(chain.pop(), BusyError)
    assert [f.result(SECONDS)[1][0] for f in chain] == [2, 3, 4, 5, 6]
    model.sync()
    assert "callback" in caplog.text

    def waits(future: Any) -> None:
        with pytest.raises(BusyError, match="can't wait"):
            model.sync()
        over.set()

    over.clear()
    model.submit([ones(1)]).add_done_callback(waits)
    assert over.wait(SECONDS)


def test_a_run_of_another_thread_is_waited_for() -> None:
    """What was submitted is not refused because the graph is busy just then; a direct run is."""
    model, gate = gated()
    direct = threading.Thread(target=lambda: model.run([ones(2)]), daemon=True)
    direct.start()
    assert entered[f"gate {len(gates) - 1}"].wait(SECONDS)
    future = model.submit([ones(2, 5)])
    with pytest.raises(BusyError, match="sync"):
        model.run([ones(2)])
    gate.set()
    assert future.result(SECONDS)[0][0] == 10
    direct.join(SECONDS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_run_many(device: str, depth: int) -> None:
    """Results in order, as many as sets, from an iterator that reuses its buffer; states flow from set to set."""
    model = count(device, queue=depth)
    buffer = np.empty(5, np.float32)

    def sets() -> Iterator[list[Array]]:
        for number in range(1, 21):
            buffer[:] = number
            yield [buffer]

    results = list(model.run_many(sets()))
    assert [y[0] for y, _ in results] == [n * n for n in range(1, 21)]
    assert [runs[0] for _, runs in results] == list(range(1, 21))
    assert list(model.run_many([])) == []
    with pytest.raises(OptionError, match="run_many takes an iterable"):
        model.run_many({"x": ones(1)})
    with pytest.raises(OptionError, match="got int"):
        model.run_many(5)  # type: ignore[arg-type]


def test_run_many_takes_inputs_while_it_computes() -> None:
    """The second set is asked for although the first run has not ended."""
    model, gate = gated(queue=2)

    def sets() -> Iterator[list[Array]]:
        yield [ones(2, 1)]
        gate.set()
        yield [ones(2, 2)]

    assert [y[0] for (y,) in model.run_many(sets())] == [2, 4]


def test_run_many_ends_at_an_error_or_a_break() -> None:
    model, _ = gated(is_open=True)
    got = []
    with pytest.raises(ExecutionError, match="negative"):
        got += [y[0] for (y,) in model.run_many([[ones(2, n)] for n in (1, 2, -3, 4, 5)])]
    for (y,) in model.run_many([ones(2, n)] for n in range(1000)):
        got.append(y[0])
        if y[0] == 6:
            break
    assert got == [0, 2, 4, 6]
    assert model.run([ones(2)])[0][0] == 2  # nothing of it is still running

    def broken() -> Iterator[list[Array]]:
        yield [ones(2)]
        raise LookupError

    with pytest.raises(LookupError):
        list(model.run_many(broken()))
    model.sync()


def test_bound_inputs_and_feeds_are_those_of_the_run() -> None:
    """A value that is kept between runs is taken when the run is made, not when it is submitted."""
    g = rlx.Graph("average")
    mean, x = g.input("mean", (3,)), g.input("x", (3,))
    g.output(mean * 0.5 + x * 0.5, name="next")
    model = rlx.compile(g, device="cpu")
    model.states.bind("mean", ones(3, 0))
    model.states["mean"].feed("next")
    futures = [model.submit({"x": ones(3)}), model.submit([ones(3)]), model.submit({"x": ones(3), "mean": ones(3, 5)})]
    assert [f.result(SECONDS)[0][0] for f in futures] == [0.5, 0.75, 3]
    assert [y[0] for (y,) in model.run_many([{"x": ones(3, 0)}] * 2)] == [1.5, 0.75]


def test_clones_have_queues_of_their_own() -> None:
    model = count()
    model.submit([ones(1)]).result(SECONDS)
    clones = [model.clone() for _ in range(3)]
    futures = [clone.submit([ones(1)]) for clone in clones for _ in range(4)]
    assert sorted(f.result()[1][0] for f in as_completed(futures, SECONDS)) == [2] * 3 + [3] * 3 + [4] * 3 + [5] * 3
    assert model.submit([ones(1)]).result(SECONDS)[1][0] == 2


def test_closing_finishes_what_was_submitted() -> None:
    model = count()
    futures = [model.submit([ones(1)]) for _ in range(4)]
    model.close()
    assert [f.result(0)[1][0] for f in futures] == [1, 2, 3, 4]
    for call in (lambda: model.submit([ones(1)]), lambda: list(model.run_many([[ones(1)]])), model.clone):
        with pytest.raises(ClosedError):
            call()


def test_leaving_the_block_by_an_error_drops_what_has_not_begun() -> None:
    model, gate = gated()
    futures: list[Any] = []

    def block() -> None:
        with model:
            futures.extend(model.submit([ones(2)]) for _ in range(3))
            assert entered[f"gate {len(gates) - 1}"].wait(SECONDS)
            threading.Timer(0.05, gate.set).start()
            raise LookupError

    with pytest.raises(LookupError):
        block()
    assert model.closed
    assert [f.cancelled() for f in futures] == [False, True, True]
    assert futures[0].result(0)[0][0] == 2


def test_the_thread_goes_with_the_graph() -> None:
    model = count()
    future = model.submit([ones(1)])
    thread, alive = model._queue.thread, weakref.ref(model)
    assert thread is not None
    del model  # before the run has ended, perhaps: it is made all the same
    assert future.result(SECONDS)[1][0] == 1
    gc.collect()
    thread.join(SECONDS)
    assert not thread.is_alive()
    gc.collect()
    assert alive() is None


def test_submitting_from_many_threads_starts_one_thread(together: Callable[..., None]) -> None:
    model = count(queue=3)
    futures: list[Any] = []
    together(*[lambda: futures.extend(model.submit([ones(1)]) for _ in range(25))] * 4)
    assert sorted(f.result(SECONDS)[1][0] for f in futures) == list(range(1, 101))


def test_asyncio() -> None:
    """Many coroutines over a short queue: each gets its own result, and the event loop goes on meanwhile."""
    model, gate = gated(queue=2)
    ticks = 0

    async def main() -> list[Any]:
        nonlocal ticks
        tasks = [asyncio.create_task(model.arun({"x": ones(2, n)})) for n in range(10)]
        for _ in range(20):
            await asyncio.sleep(1e-3)
            ticks += 1
        assert not any(task.done() for task in tasks)
        gate.set()
        return await asyncio.wait_for(asyncio.gather(*tasks), SECONDS)

    results = asyncio.run(main())
    assert [y[0] for (y,) in results] == [2 * n for n in range(10)]
    assert ticks == 20


def test_asyncio_cancelling() -> None:
    """Cancelled before its place, in the queue, or while it runs: places are given back, and others are served."""
    model, gate = gated(queue=2)

    async def main() -> None:
        tasks = [asyncio.create_task(model.arun([ones(2, n)])) for n in range(6)]
        while not entered[f"gate {len(gates) - 1}"].is_set():
            await asyncio.sleep(1e-3)
        for number in (0, 1, 3, 4):  # the one that runs, one in the queue, two that wait for a place
            tasks[number].cancel()
        await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(tasks[2]), 0.01)
        gate.set()
        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), SECONDS)
        assert [isinstance(r, asyncio.CancelledError) for r in done] == [True, True, False, True, True, False]
        assert [done[n][0][0] for n in (2, 5)] == [4, 10]  # type: ignore[index]
        with pytest.raises(ExecutionError, match="negative"):
            await model.arun([ones(2, -1)])
        with pytest.raises(ShapeError):
            await model.arun([ones(3)])
        assert (await model.arun([ones(2)], outputs=["y"]))[0][0] == 2

    asyncio.run(main())
    model.sync()
    assert model._queue.free == 2


def test_an_interrupt_at_any_line_of_submit() -> None:
    """Places are given back and nothing waits for a run that is not there, wherever Ctrl-C comes."""
    model, _ = gated(is_open=True)
    model.submit([ones(2)]).result(SECONDS)  # its thread runs
    files = tuple(str(Path(rlx.__file__).parent / "runtime" / name) for name in ("queued.py", "run_queue.py"))
    lines = 0

    def submit(number: int) -> bool:
        """Whether it was interrupted, at the line of that number."""
        left = number

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename not in files:
                return None
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if event == "line" and not line.lstrip().startswith("with "):  # where Python looks for no signal
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            model.submit([ones(2)])
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    while submit(lines):
        lines += 1
        model.sync()
        assert model._queue.free == 4
    assert lines > 10
    model.sync()
    assert model._queue.free == 4


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_that_was_queued_as_ctrl_c_came_is_dropped_or_waited_for(
    begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has its future: it is dropped, or, once it has begun, `sync` waits for it."""
    model, gate = gated()
    queue, has_begun = model._queue, entered[f"gate {len(gates) - 1}"]
    gate.set()
    model.submit([ones(2)]).result(SECONDS)  # its thread runs
    gate.clear()
    has_begun.clear()
    runs = []
    monkeypatch.setattr(type(queue), "unless_busy", lambda queue, call: runs.append(call) or call())
    if not begun:
        model.submit([ones(2)])

    class Interrupted:
        def put(self, job: Any) -> None:
            jobs.put(job)
            assert not begun or has_begun.wait(SECONDS)
            raise KeyboardInterrupt

    jobs, queue.jobs = queue.jobs, Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        model.submit([ones(2)])
    queue.jobs = jobs
    synced = threading.Thread(target=model.sync)
    synced.start()
    synced.join(0.05)
    assert synced.is_alive()
    gate.set()
    synced.join(SECONDS)
    assert not synced.is_alive()
    assert len(runs) == 1
    np.testing.assert_array_equal(model.run([ones(2)])[0], 2 * ones(2))
    assert queue.free == 4
