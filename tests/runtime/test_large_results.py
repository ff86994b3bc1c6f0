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


@pytest.mark.parametrize("n", [1 << 14, (1 << 15) + 1, 1 << 18])
def test_results_in_other_axes_are_written_where_the_caller_gets_them(n: int) -> None:
    """Just below, above and far above the size from which that is done: kept ones never change, and rows are read."""
    g = rlx.Graph("views")
    x = g.input("x", (n, 4))
    g.output(rlx.reshape(x * 2.0, (4, n)), name="y")
    g.output(rlx.sum(x, axis=0), name="total")
    g.output(rlx.reshape(x + 1.0, (2, n, 2)), name="z")
    m, kept = rlx.compile(g, device="cpu"), []
    for seed in range(6):
        given = data(seed, n)
        kept.append((m.run([given]), given))
        np.testing.assert_array_equal(m.read_output_row("y", 3), (2 * given).reshape(4, n)[3])
        if seed == 3:
            np.testing.assert_array_equal(m.run_slots(given)[0], (2 * given).reshape(4, n))
            m.run([given], outputs=["total"])
        out = [np.empty((4, n), np.float32), np.empty(4, np.float32), np.empty((2, n, 2), np.float32)]
        made = m.run([given], out=out)
        assert all(a is b for a, b in zip(made, out, strict=True))
        kept.append((made, given))
    for (y, total, z), given in kept:
        np.testing.assert_array_equal(y, (2 * given).reshape(4, n))
        np.testing.assert_array_equal(total, given.sum(0))
        np.testing.assert_array_equal(z, (given + 1).reshape(2, n, 2))


def test_an_array_to_write_into_that_is_the_input() -> None:
    """It gets the results once the input has been read, also where other arrays are written at once."""
    g = rlx.Graph("over")
    x = g.input("x", (ROWS, 4))
    g.output(rlx.reshape(rlx.flip(x, (0,)), (ROWS, 4)), name="y")
    m = rlx.compile(g, device="cpu")
    for seed in range(3):
        given = data(seed)
        expected = given[::-1].copy()
        np.testing.assert_array_equal(m.run([given])[0], expected)
        np.testing.assert_array_equal(m.run([given], out=[np.empty_like(given)])[0], expected)
        np.testing.assert_array_equal(m.run([given], out=[given])[0], expected)


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


def test_dropped_results_are_read_by_row_and_their_memory_serves_the_next_run(allocated: list[int]) -> None:
    m, x = model(), data(0)
    m.run({"x": x})
    made = len(allocated)
    for seed in range(4):
        np.testing.assert_array_equal(m.read_output_row("y", 7), 2 * x[7])
        with pytest.raises(rlx.errors.ShapeError):
            m.run({"x": x[:, :3]})
        np.testing.assert_array_equal(m.read_output_row("y", 8), 2 * x[8])
        x = data(seed)
        check(m.run({"x": x}), x)
    assert len(allocated) == made > 0
