"""Large results are written where the caller gets them, in memory that nobody has any more."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.runtime import results as results_module
from rlx.backends.cpu.runtime.binding import aligned_bytes

ROWS = 1 << 19  # of 4 floats: 8 MiB


def model(n: Any = ROWS, **options: Any) -> rlx.CompiledGraph:
    g = rlx.Graph("large")
    x = g.input("x", (n, 4))
    y = x * 2.0
    g.output(y, name="y")
    g.output(rlx.sum(x, axis=0), name="total")
    g.output(rlx.reshape(y, (n * 4,)), name="flat")  # the same buffer again
    g.output(rlx.cast(x + 1.0, "bf16"), name="z")
    return rlx.compile(g, device="cpu", **options)


def data(seed: int, n: int = ROWS) -> Any:
    return np.random.default_rng(seed).integers(-64, 64, (n, 4)).astype(np.float32)


def check(results: Any, x: Any) -> None:
    y, total, flat, z = results
    np.testing.assert_array_equal(y, 2 * x)
    np.testing.assert_array_equal(flat, (2 * x).reshape(-1))
    np.testing.assert_array_equal(total, x.sum(0))
    np.testing.assert_array_equal(z.astype(np.float32), x + 1)


def test_results_that_are_kept_never_change() -> None:
    m, kept = model(), []
    for seed in range(4):
        x = data(seed)
        kept.append((m.run({"x": x}), x))
        check(m(x=x).values(), x)
    for results, x in kept:
        check(results, x)
        assert all(r.flags.writeable for r in results)
    for first, _ in kept:
        for second, _ in kept:
            assert first is second or not any(np.shares_memory(a, b) for a in first for b in second)


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of memory that is made for results; its addresses tell nothing, as systems give out the same again."""
    made: list[int] = []
    monkeypatch.setattr(results_module, "aligned_bytes", lambda size: made.append(size) or aligned_bytes(size))
    return made


def test_memory_is_used_again_once_no_view_is_left(allocated: list[int]) -> None:
    m, x = model(), data(0)
    for _ in range(3):
        m.run({"x": x})
    known = len(allocated)
    for _ in range(6):
        m.run({"x": x})
    assert 0 < len(allocated) == known
    part = m.run({"x": x})[3][5:7]  # a view keeps all of its result
    wanted = part.copy()
    for seed in range(6):
        m.run({"x": data(seed)})
        gc.collect()
    np.testing.assert_array_equal(part, wanted)


def test_the_callers_arrays_some_outputs_and_rows() -> None:
    m, x = model(), data(1)
    own = np.empty((ROWS, 4), np.float32)
    results = m.run({"x": x}, out={"y": own})
    assert results[0] is own
    check(results, x)
    (z,) = m.run({"x": x}, outputs=["z"])
    np.testing.assert_array_equal(z.astype(np.float32), x + 1)
    np.testing.assert_array_equal(m.read_output_row("z", 7).astype(np.float32), x[7] + 1)
    with pytest.raises(rlx.errors.OptionError, match="did not produce output 'y'"):
        m.read_output_row("y", 7)
    check(m.run({"x": x}), x)
    np.testing.assert_array_equal(m.read_output_row("y", -1), 2 * x[-1])


def test_sizes_that_change() -> None:
    """From small to large and back, and clones in threads of their own."""
    m = model(rlx.Dim("n", 1, ROWS))
    for n in (3, ROWS, 5, ROWS - 1, ROWS, 1):
        x = data(n, n)
        check(m.run({"x": x}), x)

    def runs(own: rlx.CompiledGraph, seed: int) -> None:
        kept = [(own.run({"x": x}), x) for x in (data(seed + i) for i in range(4))]
        for results, x in kept:
            check(results, x)

    with ThreadPoolExecutor() as pool:
        list(pool.map(runs, [m.clone() for _ in range(3)], (0, 10, 20)))


def test_memory_of_other_sizes_makes_room(allocated: list[int]) -> None:
    """Results of sizes that are no longer made don't keep those of today out."""
    m = model(rlx.Dim("n", 1, ROWS))
    for n in (ROWS // 4 * 3, ROWS // 2, ROWS):
        x = data(n, n)
        for _ in range(4):
            m.run({"x": x})
        known = len(allocated)
        for _ in range(4):
            m.run({"x": x})
        assert len(allocated) == known


def test_results_that_grow(allocated: list[int], full: bool) -> None:
    """As a cache does with each token: memory has room for some more."""
    m = model(rlx.Dim("n", 1, ROWS))
    for n in range(ROWS // 2 + 1, ROWS // 2 + (101 if full else 31)):
        x = data(0, n)
        check(m.run({"x": x}), x)
    assert 0 < len(allocated) <= 6


def test_results_go_while_others_are_made() -> None:
    """The collector may run at any allocation: also while memory is looked for."""
    memory, like = results_module.ResultMemory(), np.empty(1 << 16, np.uint8)
    memory.keep_for([like] * 2000)
    threshold = gc.get_threshold()
    pairs = [(i, -i) for i in range(5000)]  # no tuple is left to be used again
    try:
        for _ in range(3):
            kept = [memory.like(like) for _ in range(1500)][:300]
            gc.collect()
            gc.set_threshold(1000, 1, 1)
            for array in kept:
                cycle: list[Any] = [array]
                cycle.append(cycle)
            del kept, array, cycle
            memory.like(like)
            gc.set_threshold(*threshold)
    finally:
        gc.set_threshold(*threshold)
    assert len(pairs) == 5000


def test_closing_keeps_results() -> None:
    m, x = model(), data(2)
    results = m.run({"x": x})
    m.close()
    check(results, x)
