"""The one rule by which an element becomes one of another type; every device holds to it."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.ir.dtype import DTYPES, DType, dtype_of

__all__ = ["cast", "ends"]

Array = np.ndarray[Any, np.dtype[Any]]


def ends(dtype: DType) -> tuple[int, int]:
    """The least and the largest value of an integer type."""
    return (-(1 << dtype.bits - 1), (1 << dtype.bits - 1) - 1) if dtype.kind == "i" else (0, (1 << dtype.bits) - 1)


def cast(x: Array, to: DType) -> Array:
    """The elements as `to`.

    A float becomes the integer towards zero, the nearer end of the type's range where it is outside, and 0 where it is
    NaN. An integer becomes the one of the same low bits (two's complement). Anything but 0 is true, NaN too. To a float
    type it is the nearest value, of two the even one.
    """
    source = dtype_of(x.dtype)
    with np.errstate(all="ignore"):
        if source.is_float and source.bits < 16:
            x = x.astype(np.float32)  # ml_dtypes has no other conversions of all of its types
        if to.is_integer and source.is_float:
            return _whole(x.astype(np.float64), to)
        if to.kind == "b":
            return np.asarray(x != 0)
        if (source.is_integer and source.bits < 8) or (source.kind == "b" and not to.native):
            x = x.astype(np.int8)
        return x.astype(to.numpy)


def _whole(x: Array, to: DType) -> Array:
    low, high = ends(to)
    above, below = x >= float(high + 1), x <= low  # floats: the largest value itself may be none
    carrier = np.uint64 if to is DTYPES["u64"] else np.int64
    inside = np.where(above | below | np.isnan(x), 0, x).astype(carrier)
    made = np.where(above, carrier(high), np.where(below, carrier(low), inside))
    return np.asarray(made, carrier).astype(to.numpy)
