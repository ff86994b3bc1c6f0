"""Products of pairs of bf16 by tile registers, computed by those of `tile_registers` on any machine with AVX-512."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from targets import machine
from tile_registers import TileRegisters, emulated

from rlx.backends.cpu.gemm.kernel import BLOCK_ARGUMENTS
from rlx.backends.cpu.gemm.panels.bf16 import BF16_PAIRS
from rlx.backends.cpu.gemm.tile import tile_of
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array

pytestmark = pytest.mark.needs("avx512")


def product(a: Array, b: Array) -> Array:
    """a @ b by the block routine, into the middle of a matrix that it must not touch beside."""
    target = machine(tiles=True, float_tiles=True)
    found = BF16_PAIRS.block_routine(tile_of(DTYPES["f32"], target, format=BF16_PAIRS))
    assert found is not None
    run = emulated(found.ir, found.symbol, len(BLOCK_ARGUMENTS), TileRegisters())
    (m, k), n = a.shape, b.shape[1]
    steps, panels = -(-k // 32) * 16, -(-n // 16)
    rows = np.full((m, 2 * steps + 32), np.nan, np.float32).astype(ml_dtypes.bfloat16)
    rows[:, : 2 * steps] = 0
    rows[:, :k] = a
    wide = np.zeros((2 * steps, 16 * panels), ml_dtypes.bfloat16)
    wide[:k, :n] = b
    packed = np.ascontiguousarray(wide.reshape(steps, 2, panels, 16).transpose(2, 0, 3, 1))
    c = np.full((m + 2, n + 5), 7, np.float32)
    lda, ldc = rows.shape[1] // 2, c.shape[1]
    first = c.ctypes.data + 4 * (ldc + 2)
    run(rows.ctypes.data, lda, packed.ctypes.data, 16 * steps, first, ldc, m, n, steps, 128, 0)
    assert (c[[0, -1]] == 7).all()
    assert (c[:, :2] == 7).all()
    assert (c[:, n + 2 :] == 7).all()
    return c[1:-1, 2 : n + 2]


def operands(m: int, k: int, n: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(m + k + n)
    return tuple(rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((m, k), (k, n)))  # type: ignore[return-value]


@pytest.mark.parametrize("m", [1, 2, 15, 16, 17, 31, 32, 33, 50])
def test_blocks(m: int) -> None:
    """Of any rows, columns at the ends of panels, and odd depths."""
    for k, n in ((1, 1), (32, 16), (45, 33), (96, 70), (64, 32)):
        a, b = operands(m, k, n)
        x, y = a.astype(np.float64), b.astype(np.float64)
        assert (np.abs(product(a, b) - x @ y) <= (k + 8) * 2.0**-24 * (np.abs(x) @ np.abs(y))).all()


def test_no_depth() -> None:
    a, b = operands(5, 0, 20)
    assert (product(a, b) == 0).all()


def test_a_row_has_its_bits_with_any_rows() -> None:
    a, b = operands(50, 77, 40)
    whole = product(a, b)
    for start, count in ((0, 1), (3, 5), (10, 16), (2, 33)):
        assert np.array_equal(product(a[start : start + count], b), whole[start : start + count])


def test_what_is_not_finite_stays_in_its_row_and_column() -> None:
    a, b = operands(20, 40, 35)
    plain = product(a, b)
    a[3, 7], a[17, 0], b[2, 34] = np.nan, np.inf, -np.inf
    y = product(a, b)
    assert np.isnan(y[3]).all()
    assert not np.isfinite(y[17]).any()
    assert not np.isfinite(y[:, 34]).any()
    rows, columns = [i for i in range(20) if i not in (3, 17)], range(34)
    assert np.array_equal(y[np.ix_(rows, columns)], plain[np.ix_(rows, columns)])
