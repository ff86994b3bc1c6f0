"""Bitwise logic and shifts against NumPy and ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops_oracle import check, ort

from rlx.errors import DTypeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import TensorType
from rlx.ops.bitwise import BitShift, BitwiseAnd, BitwiseNot, BitwiseOr, BitwiseXor

DTYPES_TRIED = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


def anything(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Any:
    info = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(info.min, info.max, shape, dtype, endpoint=True)


@pytest.mark.parametrize("dtype", DTYPES_TRIED)
def test_logic_matches_onnx_runtime(dtype: Any) -> None:
    """Every bit of every width, with broadcasting."""
    a, b = anything((3, 1, 5), dtype), anything((4, 5), dtype, 1)
    for op in (BitwiseAnd(), BitwiseOr(), BitwiseXor()):
        np.testing.assert_array_equal(check(op, a, b)[0], ort(type(op).__name__, a, b)[0])
    np.testing.assert_array_equal(check(BitwiseNot(), a)[0], ort("BitwiseNot", a)[0])


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.uint64])
def test_shifts_match_onnx_runtime(dtype: Any, right: bool) -> None:
    """By fewer bits than the width they agree; by more everything is shifted out."""
    bits = 8 * np.dtype(dtype).itemsize
    a, b = anything((6, 1), dtype), np.array([0, 1, 3, bits - 1], dtype)
    (y,) = check(BitShift(right), a, b)
    np.testing.assert_array_equal(y, ort("BitShift", a, b, direction="RIGHT" if right else "LEFT")[0])
    (gone,) = check(BitShift(right), a, np.array([bits, bits + 9], dtype))
    assert not gone.any()


def test_signed_shifts_are_refused() -> None:
    """ONNX defines shifts of unsigned integers only."""
    t = TensorType((2,), DTYPES["i32"])
    with pytest.raises(DTypeError, match="unsigned"):
        BitShift().infer(t, t)
