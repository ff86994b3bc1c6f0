"""The rule of casts, from any element type to any other, which is the same on every device.

And that of activations rounded to 8 bits, as products with `activations="q8"` are. A block is 32 consecutive elements
along the contracted axis, the last one what is left. With p its largest magnitude, in f32, each operation rounded to
nearest even:

    d = p / 127        q = round(x * (127 / p))        x becomes d * q, q of -127..127

A block with p < 2^-100 becomes 0, one with an element that isn't finite NaN: so is every result of that row.

With `activations` "bf16" or "f16" each operand becomes the nearest number of that type, as a cast has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.ir.dtype import DTYPES, DType, dtype_of

__all__ = [
    "ACTIVATION_BLOCK", "NARROWED", "TINY", "cast", "ends", "held", "narrowed", "quantised", "rounded_q8",
    "rounded_q8_element", "rounds_twice",
]  # fmt: skip

Array = np.ndarray[Any, np.dtype[Any]]
WIDE = frozenset(map(np.dtype, ("f8", "i4", "u4", "i8", "u8")))  # f32 doesn't hold all of their values


def ends(dtype: DType) -> tuple[int, int]:
    """The least and the largest value of an integer type."""
    return (-(1 << dtype.bits - 1), (1 << dtype.bits - 1) - 1) if dtype.kind == "i" else (0, (1 << dtype.bits) - 1)


def cast(x: Array, to: DType) -> Array:
    """The elements as `to`.

    From float to integer: rounded towards zero; outside of the type's range its nearer end; NaN gives 0.
    From integer to integer: the low bits are kept (two's complement), so it wraps.
    To bool: true unless 0; NaN is true. To a float type: the nearest value, ties to even. To f8e8m0, which has
    powers of two only: ties up; NaN for what is not above 0.
    """
    source = dtype_of(x.dtype)
    with np.errstate(all="ignore"):
        if source.is_float and source.bits < 16 and source is not to:
            x = x.astype(np.float32)  # ml_dtypes has no other conversions of all of its types
        if to.is_integer and source.is_float:
            return _whole(x.astype(np.float64), to)
        if to.kind == "b":
            return np.asarray(x != 0)
        if (source.is_integer and source.bits < 8) or (source.kind == "b" and not to.native):
            x = x.astype(np.int8)
        if rounds_twice(to) and x.dtype in WIDE:
            x = _odd_f32(_odd_f64(x))
        return x.astype(to.numpy)


def held(value: int | float | bool, dtype: DType) -> Any:
    """A number as an element of the type holds it (int, float or bool)."""
    wide = np.asarray(value)
    return cast(wide if wide.dtype != object else np.asarray(float(value)), dtype).item()


def rounds_twice(dtype: DType) -> bool:
    """Whether NumPy's own conversions to the type go through f32, so that `cast` has to make them."""
    return dtype.is_float and not dtype.native


def _odd_f64(x: Array) -> Array:
    """As f64; integers that it doesn't hold are rounded to odd, see `_odd_f32`."""
    if x.dtype.itemsize == 8 and x.dtype.kind in "iu":
        inexact = ((x > 2**53) | (x < -(2**53))) & (x % 2048 != 0)
        x = np.where(inexact, x // 4096 * 4096 + 2048, x)
    return x.astype(np.float64)


def _odd_f32(x: Array) -> Array:
    """f64 as f32, of the two next to what it doesn't hold the one whose last bit is 1.

    That is in no middle of two numbers of fewer bits, so rounding it to those gives what rounding once would have.
    """
    near = x.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.uint32)
    odd = (bits - (np.abs(back) > np.abs(x))) | 1
    return np.where((back == x) | np.isnan(x), bits, odd).astype(np.uint32).view(np.float32)


def _whole(x: Array, to: DType) -> Array:
    low, high = ends(to)
    above, below = x >= float(high + 1), x <= low  # floats: the largest value itself may be none
    carrier = np.uint64 if to is DTYPES["u64"] else np.int64
    inside = np.where(above | below | np.isnan(x), 0, x).astype(carrier)
    made = np.where(above, carrier(high), np.where(below, carrier(low), inside))
    return np.asarray(made, carrier).astype(to.numpy)


# ---- operands of products of 16 bits

NARROWED = ("bf16", "f16")  # values of `activations` that round both operands to a type


def narrowed(x: Array, activations: str) -> Array:
    """x, of f32, with each element rounded to the type that `activations` names, in f32; else x itself."""
    return cast(cast(x, DTYPES[activations]), DTYPES["f32"]) if activations in NARROWED else x


# ---- activations of 8 bits

ACTIVATION_BLOCK = 32
PEAK = 127  # the largest q
TINY = 2.0**-100  # below it 127 / p or d would leave the normal numbers


def quantised(x: Array) -> tuple[Array, Array]:
    """The numbers q, i8 [..., blocks, 32] filled up with zeros, and the scales d, f32 [..., blocks, 1]."""
    depth = x.shape[-1]
    blocks = -(-depth // ACTIVATION_BLOCK)
    padded = np.pad(x.astype(np.float32), [(0, 0)] * (x.ndim - 1) + [(0, blocks * ACTIVATION_BLOCK - depth)])
    padded = padded.reshape(*x.shape[:-1], blocks, ACTIVATION_BLOCK)
    peak = np.abs(padded).max(axis=-1, keepdims=True, initial=0)
    used = np.isfinite(peak) & (peak >= TINY)
    inverse = np.divide(np.float32(PEAK), peak, out=np.zeros_like(peak), where=used)
    numbers = np.rint(np.where(used, padded, 0) * inverse).astype(np.int8)
    scales = np.where(used, peak / np.float32(PEAK), np.where(np.isfinite(peak), 0, np.nan))
    return numbers, scales.astype(np.float32)


def rounded_q8(x: Array) -> Array:
    """The rounded activations, f32 of the shape of x; blocks lie along the last axis."""
    numbers, scales = quantised(x)
    made = numbers.astype(np.float32) * scales
    return np.asarray(made.reshape(*x.shape[:-1], made.shape[-2] * ACTIVATION_BLOCK)[..., : x.shape[-1]])


def rounded_q8_element(k: Any, element: Callable[[Any], Any], depth: Any, at: Any) -> Any:
    """Rounded element number `at` of a row of `depth` activations, which `element` gives; `k` makes expressions.

    Each looks at all of its block: for kernels that have no other way.
    """
    start = at // ACTIVATION_BLOCK * ACTIVATION_BLOCK

    def size(j: Any) -> Any:
        inside = start + j < k.size(depth)
        return k.select(inside, k.call("abs", element(k.select(inside, start + j, 0))), 0.0)

    peak = k.reduce("max", (ACTIVATION_BLOCK,), size)
    made = k.call("round", element(at) * (k.const(PEAK, "f32") / peak)) * (peak / PEAK)
    made = k.select(peak >= TINY, made, 0.0)
    return k.select(peak < float("inf"), made, float("nan"))
