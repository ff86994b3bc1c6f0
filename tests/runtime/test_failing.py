"""What fails leaves no trace: after an error in any step, at any line, results and memory are as they were before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.native import pool
from rlx.backends.cpu.runtime import binding, executable, prepare, residency, results, shared, states
from rlx.backends.cpu.runtime.executable import CpuExecutable
from rlx.errors import MemoryDeficit, RlxError
from rlx.ir.graph import Array
from rlx.ir.shape import Dim
from rlx.ops.select import Arange, NonZero

F32 = np.float32
MODULES = [binding, executable, pool, prepare, residency, results, states, shared]
FILES = {str(Path(module.__file__)) for module in MODULES}  # type: ignore[arg-type]


class Injected(Exception):
    """What a step raises here."""


@contextmanager
def failing_allocation(number: int) -> Iterator[list[int]]:
    """The allocation of that number fails; gives how many there were."""
    count = [0]

    def wrapped(original: Callable[..., Array]) -> Callable[..., Array]:
        def allocate(*args: Any, **named: Any) -> Array:
            count[0] += 1
            if count[0] == number:
                raise MemoryError("injected")
            return original(*args, **named)

        return allocate

    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            for name in ("aligned_bytes", "aligned_words"):
                if hasattr(module, name):
                    patch.setattr(module, name, wrapped(getattr(module, name)))
        yield count


@contextmanager
def failing_line(number: int) -> Iterator[list[int]]:
    """The line of that number in `MODULES` is not executed, but raises; gives how many there were."""
    count = [0]

    def local(frame: FrameType, event: str, arg: object) -> Any:
        # where the error is raised in a `with` or `finally` itself, nothing can be promised
        if event == "line":
            count[0] += 1
            if count[0] == number:
                raise Injected
        return local

    def begin(frame: FrameType, event: str, arg: object) -> Any:
        return local if frame.f_code.co_filename in FILES and frame.f_code.co_name not in SKIPPED else None

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        yield count
    finally:
        sys.settrace(before)


SKIPPED = {
    "held",
    "acquire",
    "release",
    "only",
    "restoring",
    "changing",
}  # context managers, which Python enters itself


# ---- the models


def growing() -> rlx.CompiledGraph:
    """Dims without bounds, a weight that is packed, a state that the graph updates, and an input that may be kept."""
    g = rlx.Graph("growing")
    x, bias = g.input("x", (Dim("n"), 8)), g.input("bias", (6,))
    w, s = g.param("w", (8, 6)), g.state("s", (6,))
    y = rlx.softmax(rlx.tanh(x @ w) @ rlx.transpose(w, (1, 0))) @ w + bias
    g.output(y, name="y")
    g.output(y + s, name="z")
    g.output(rlx.sum(y, axis=0), name="total")
    g.update(s, s + 1.0)
    model = rlx.compile(g, device="cpu", threads=1)
    model.set_param("w", weight(0))
    return model


def weight(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((8, 6)).astype(F32)


def rows(n: int) -> Array:
    return np.random.default_rng(n).standard_normal((n, 8)).astype(F32)


BIAS = np.arange(6, dtype=F32)


def by_data(**options: Any) -> rlx.CompiledGraph:
    """Sizes that data decide, one of them without a bound."""
    g = rlx.Graph("by data")
    x, stop = g.input("x", (Dim("n", 0, 400),)), g.input("stop", (), "i64")
    (at,) = g.add(NonZero(Dim("count", 0, 400)), x)
    (steps,) = g.add(
        Arange(
            Dim("steps"),
        ),
        g.constant(0, dtype="i64"),
        stop,
        g.constant(1, dtype="i64"),
    )
    g.output(at * 3, name="at")
    g.output(rlx.softmax(rlx.cast(steps, "f32") * 0.01), name="soft")
    return rlx.compile(g, device="cpu", threads=1, **options)


def use_growing(model: rlx.CompiledGraph) -> list[bytes]:
    """The results of runs by all calls, from a state of zeros, at shapes of before."""
    model.states["s"].reset()
    made: list[bytes] = []
    kept = "bias" in model.states
    for n in (3, 5, 3):
        given: dict[str, Array] = {"x": rows(n), **({} if kept else {"bias": BIAS})}
        slots = [rows(n)] if kept else [rows(n), BIAS]
        made += [a.tobytes() for a in model.run(given)]
        made += [np.array(a).tobytes() for a in model.run_slots(*slots)]
        made += [
            a.tobytes() for a in model.run(given, out=[np.empty((n, 6), F32), np.empty((n, 6), F32), np.empty(6, F32)])
        ]
    return made


def use_by_data(model: rlx.CompiledGraph) -> list[bytes]:
    made: list[bytes] = []
    for n, stop in ((7, 3), (40, 12), (7, 3)):
        for _ in range(2):
            made += [a.tobytes() for a in model.run([np.arange(n, dtype=F32) % 3, np.array(stop)])]
        made += [np.array(a).tobytes() for a in model.run_slots(np.arange(n, dtype=F32) % 3, np.array(stop))]
    return made


STEPS: dict[str, tuple[Callable[[], rlx.CompiledGraph], Callable[[Any], list[bytes]], Callable[[Any], object]]] = {
    "a larger run": (growing, use_growing, lambda m: m.run([rows(4000), BIAS])),
    "a larger run by slots": (growing, use_growing, lambda m: m.run_slots(rows(4000), BIAS)),
    "a run of some outputs": (growing, use_growing, lambda m: m.run([rows(9), BIAS], outputs=["total"])),
    "a run into arrays": (
        growing,
        use_growing,
        lambda m: m.run([rows(9), BIAS], out=[np.empty((9, 6), F32), None, np.empty(6, F32)]),
    ),
    "set_params": (growing, use_growing, lambda m: (m.set_param("w", weight(1)), m.run([rows(3), BIAS]))),
    "set_params of a clone": (growing, use_growing, lambda m: m.clone().set_param("w", weight(1))),
    "bind": (growing, use_growing, lambda m: (m.states.bind("bias", BIAS), m.run([rows(3)]))),
    "feed": (growing, use_growing, lambda m: (m.states.bind("bias", BIAS), m.states["bias"].feed("total"))),
    "trim": (growing, use_growing, lambda m: m.trim()),
    "clone": (growing, use_growing, lambda m: m.clone().run([rows(3), BIAS])),
    "a larger size by data": (by_data, use_by_data, lambda m: m.run([np.ones(40, F32), np.array(100_000)])),
    "a larger size of known bound": (by_data, use_by_data, lambda m: m.run([np.ones(400, F32), np.array(3)])),
}


def outcomes(
    make: Callable[[], rlx.CompiledGraph], use: Callable[[Any], list[bytes]], step: Callable[[Any], object]
) -> list[list[bytes]]:
    """What runs give where the step was not taken, and where it was, or its first part."""
    plain, done = make(), make()
    step(done)
    found = [use(plain), use(done)]
    if "bias" in done.states:  # bound, and not fed yet
        part = make()
        part.states.bind("bias", BIAS)
        found.append(use(part))
    return found


@pytest.mark.parametrize("name", STEPS)
def test_every_allocation_may_fail(name: str) -> None:
    make, use, step = STEPS[name]
    want = outcomes(make, use, step)
    number = 1
    while True:
        model = make()
        use(model)
        arena, room = len(model.arena), dict(model._executable.room)  # type: ignore[attr-defined]
        bytes_of_scratch = model._executable.scratch.nbytes  # type: ignore[attr-defined]
        with failing_allocation(number) as count:
            try:
                step(model)
            except (MemoryError, RlxError):
                assert (len(model.arena), model._executable.room) == (arena, room)  # type: ignore[attr-defined]
                assert model._executable.scratch.nbytes == bytes_of_scratch  # type: ignore[attr-defined]
            else:
                assert count[0] < number
                break
        assert use(model) in want, f"after allocation {number} failed"
        number += 1
    assert number > 1 or name == "trim" or "outputs" in name


@pytest.mark.parametrize("name", STEPS)
def test_every_line_may_fail(name: str, full: bool, request: pytest.FixtureRequest) -> None:
    """In a quick run some of the lines."""
    make, use, step = STEPS[name]
    want = outcomes(make, use, step)
    model = make()
    use(model)
    with failing_line(0) as count:
        step(model)
    stride = 1 if full else max(count[0] // 6, 1)
    for number in range(1 + request.config.option.seed % stride, count[0] + 1, stride):
        model = make()
        use(model)
        with failing_line(number), suppress(Injected, RlxError):  # in a host call it becomes an `ExecutionError`
            step(model)
        assert use(model) in want, f"after line {number} of {count[0]}"


# ---- budgets


@pytest.mark.parametrize("make", [growing, by_data])
def test_a_run_beyond_the_budget_takes_nothing_from_others(make: Callable[..., rlx.CompiledGraph]) -> None:
    model = make()
    use = use_growing if make is growing else use_by_data
    want = use(model)
    arena = len(model.arena)

    def refuse(extents: object, nbytes: int) -> None:
        raise MemoryDeficit("refused")

    large: list[Array] = [rows(100_000), BIAS] if make is growing else [np.ones(3, F32), np.array(10_000_000)]
    model._executable.reserve = refuse  # type: ignore[method-assign]
    for call in (model.run, lambda x: model.run_slots(*x)):
        with pytest.raises(MemoryDeficit):
            call(large)
        assert use(model) == want
        assert len(model.arena) == arena


def test_a_size_that_data_decide_beyond_the_budget() -> None:
    """As a user sees it: the model runs at the sizes of before."""
    model = by_data(budget="24MB")
    want = use_by_data(model)
    for stop in (50_000_000, 2**40, 2**62):
        with pytest.raises((MemoryDeficit, RlxError, OverflowError, MemoryError)):
            model.run([np.ones(3, F32), np.array(stop)])
        assert use_by_data(model) == want


def test_trim_gives_room_back() -> None:
    model = by_data()
    use_by_data(model)
    small = len(model.arena)
    model.run([np.ones(3, F32), np.array(1_000_000)])
    assert len(model.arena) > 10 * small
    model.trim()
    use_by_data(model)
    assert len(model.arena) == small
    assert isinstance(model._executable, CpuExecutable)
