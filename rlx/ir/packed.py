"""Arrays of 4-bit elements as bytes: two elements a byte, the first in the low half, as DLPack and ONNX have them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlx.ir.dtype import DType, dtype_of
from rlx.ir.graph import Array

__all__ = ["pack", "unpack"]


def pack(array: Array) -> Array:
    """The bytes (u8) of 4-bit elements, which NumPy holds in a byte each; an odd count leaves the last half 0."""
    assert dtype_of(array.dtype).bits == 4
    halves = np.ascontiguousarray(array).reshape(-1).view(np.uint8) & 15
    if len(halves) % 2:
        halves = np.append(halves, np.uint8(0))
    return np.asarray(halves[::2] | halves[1::2] << 4, np.uint8)


def unpack(packed: Array, dtype: DType, shape: Sequence[int]) -> Array:
    """The elements in such bytes, a byte each."""
    count = math.prod(shape)
    halves = np.empty(2 * len(packed), np.uint8)
    halves[::2], halves[1::2] = packed & 15, packed >> 4
    return halves[:count].view(dtype.numpy).reshape(shape)
