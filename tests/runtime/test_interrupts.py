"""Ctrl-C in the midst of a run: seen within long kernels too, of many chunks or one, and nothing is left of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.native import runner
from rlx.backends.cpu.native.runner_ir import CHECK_NS, INTERRUPTED_STATUS, THREAD_STATE
from rlx.errors import ExecutionError
from rlx.ir.graph import Array, Graph, Value
from rlx.ops import OPS

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")

F32 = np.float32
OFTEN = 1_000_000  # ns between looks for signals
RNG = np.random.default_rng(0)
Build = Callable[..., Value]


def floats(*shape: int) -> Array:
    return RNG.random(shape, F32)


def op(name: str, **attributes: object) -> Build:
    return lambda g, *x: g.add(OPS[name](**attributes), *x)[0]  # type: ignore[call-arg]


def many(g: Graph, x: Value) -> Value:
    """Kernels that depend on each other, in a loop of many rounds."""
    return rlx.scan(lambda c, _: (rlx.sin(c) * 1.01, None), x, length=4000)[0]


N = 8_000_000
CASES: dict[str, tuple[Build, Callable[[], list[Array]]]] = {
    "elementwise": (lambda g, x: rlx.tanh(rlx.exp(rlx.sin(x))), lambda: [floats(2 * N)]),
    "product": (lambda g, a, b: a @ b, lambda: [floats(1500, 1500), floats(1500, 1500)]),
    "product along k": (lambda g, a, b: a @ b, lambda: [floats(4, N // 4), floats(N // 4, 4)]),
    "softmax of one row": (lambda g, x: rlx.softmax(x), lambda: [floats(3 * N)]),
    "norm of one row": (lambda g, x: op("rms_norm")(g, x, g.constant(np.ones(3 * N, F32))), lambda: [floats(1, 3 * N)]),
    "sum": (lambda g, x: rlx.sum(x * x), lambda: [floats(8 * N)]),
    "sum of rows": (lambda g, x: rlx.sum(x, axis=0), lambda: [floats(4 * N, 2)]),
    "largest": (lambda g, x: rlx.max(rlx.exp(x)), lambda: [floats(4 * N)]),
    "place of the largest": (lambda g, x: rlx.argmax(x, axis=0), lambda: [floats(8 * N)]),
    "running sum": (op("cum_sum", axis=0), lambda: [floats(4 * N)]),
    "sort": (op("top_k", k=N // 4, axis=-1), lambda: [floats(N // 4)]),
    "some of many": (op("top_k", k=1000, axis=-1), lambda: [floats(2 * N)]),
    "few of many": (op("top_k", k=8, axis=-1), lambda: [floats(8 * N)]),
    "scatter": (op("scatter_elements", axis=0), lambda: [floats(N), RNG.integers(0, N, N // 2), floats(N // 2)]),
    "scatter of sums": (
        op("scatter_elements", axis=0, reduction="add"),
        lambda: [floats(N), RNG.integers(0, N, N // 2), floats(N // 2)],
    ),
    "scatter of slices": (op("scatter_nd"), lambda: [floats(N), RNG.integers(0, N, (N // 2, 1)), floats(N // 2)]),
    "determinant": (op("det"), lambda: [floats(1, 700, 700)]),
    "attention over many keys": (
        lambda g, q, k, v: rlx.attention(q, k, v),
        lambda: [floats(1, 1, 4, 64), floats(1, 1, 500_000, 64), floats(1, 1, 500_000, 64)],
    ),
    "loop": (many, lambda: [floats(2000)]),
}


@contextmanager
def interrupts() -> Iterator[None]:
    """A signal every few milliseconds, whose handler raises once it finds itself in the midst of a run."""

    def handler(number: int, frame: object) -> None:
        if any(block.words[THREAD_STATE] for block in list(runner.blocks)):
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, 0.002)

    for block in runner.blocks:
        block.words[CHECK_NS] = OFTEN
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.002)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "CHECK_EVERY_NS", OFTEN)  # of the blocks to come
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def status(model: rlx.CompiledGraph) -> int:
    """That of the last run."""
    return model._executable.block.status  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(6)
def test_a_long_run_is_interrupted(name: str, threads: int) -> None:
    """The run ends before it is done, has no results, and the next one is right."""
    build, make = CASES[name]
    arrays, g = make(), rlx.Graph(name)
    leaves = [g.input(f"x{i}", a.shape, a.dtype) for i, a in enumerate(arrays)]
    g.output(build(g, *leaves), name="y")
    model = rlx.compile(g, device="cpu", threads=threads, over_budget="allow")
    want = np.array(model.run_slots(*arrays)[0])
    for call in (lambda: model.run(arrays), lambda: model.run_slots(*arrays)):
        with interrupts(), pytest.raises(KeyboardInterrupt):
            call()
        assert status(model) == INTERRUPTED_STATUS, "it was seen after the run only"
        with pytest.raises(ExecutionError, match="the last run failed"):
            model.read_output_row("y", 0)
    np.testing.assert_array_equal(model.run(arrays)[0], want)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_recurrence_is_interrupted(threads: int) -> None:
    """Members of a team wait for one another: all leave."""
    hidden, steps = 96, 3000
    g = rlx.Graph("recurrence")
    x = g.input("x", (steps, 4, 16))
    w, r = (g.constant(floats(1, 4 * hidden, n) - F32(0.5)) for n in (16, hidden))
    made = g.add(OPS["lstm"](), x, w, r)  # type: ignore[call-arg]
    g.output(made[0], name="y")
    model = rlx.compile(g, device="cpu", threads=threads)
    x_now = floats(steps, 4, 16)
    want = model.run([x_now])[0]
    for _ in range(3):
        with interrupts(), pytest.raises(KeyboardInterrupt):
            model.run([x_now])
        assert status(model) == INTERRUPTED_STATUS
        np.testing.assert_array_equal(model.run([x_now])[0], want)


def test_packing_is_interrupted() -> None:
    """The first run after params were set packs them; after an interrupt there the next one does."""
    g = rlx.Graph("packing")
    x, w = g.input("x", (4, 4000)), g.param("w", (4000, 4000))
    g.output(x @ w, name="y")
    model = rlx.compile(g, device="cpu", threads=1)
    w_now, x_now = floats(4000, 4000), floats(4, 4000)
    model.set_param("w", w_now)
    with interrupts(), pytest.raises(KeyboardInterrupt):
        model.run([x_now])
    assert not model._executable.shared.prepared  # type: ignore[attr-defined]
    np.testing.assert_allclose(model.run([x_now])[0], x_now @ w_now, rtol=1e-3)
