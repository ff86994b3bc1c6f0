"""Parts of elements and of encoders that several families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.ir.dtype import DTYPES
from rlx.ir.encoding import Array

__all__ = [
    "as_f16",
    "as_u8",
    "best_scale",
    "field",
    "half",
    "lookup",
    "nearest",
    "rounded",
    "signed",
    "stored_half",
    "whole",
]

Byte = Callable[[Any], Any]


# ---- of elements: `k` makes expressions, `byte` gives stored bytes


def half(k: Any, byte: Byte, at: Any) -> Any:
    """The little-endian f16 at byte `at`, as f32."""
    return k.cast(k.bitcast(_pair(k, byte, at), DTYPES["f16"]), "f32")


def _pair(k: Any, byte: Byte, at: Any) -> Any:
    u16 = DTYPES["u16"]
    return k.cast(byte(at), u16) | k.call("shl", k.cast(byte(at + 1), u16), 8)


def stored_half(k: Any, value: Any, n: Any) -> Any:
    """Byte n (0 or 1) of an f32 rounded to f16, little-endian."""
    bits = k.bitcast(k.cast(value, "f16"), DTYPES["u16"])
    return k.cast(k.call("shr", bits, k.cast(n * 8, "u16")) & 255, "u8")


def whole(k: Any, byte: Byte, at: Any, dtype: str) -> Any:
    """The little-endian number of 16 or 32 bits at byte `at`."""
    low = _pair(k, byte, at)
    if DTYPES[dtype].bits == 16:
        return k.bitcast(low, DTYPES[dtype])
    u32 = DTYPES["u32"]
    return k.bitcast(k.cast(low, u32) | k.call("shl", k.cast(_pair(k, byte, at + 2), u32), 16), DTYPES[dtype])


def field(k: Any, value: Any, shift: Any, bits: int) -> Any:
    """So many bits of a u8 from bit `shift` (an index) on."""
    return k.call("shr", value, k.cast(shift, "u8")) & ((1 << bits) - 1)


def signed(k: Any, value: Any) -> Any:
    """A u8 read as i8, in f32."""
    return k.cast(k.bitcast(value, DTYPES["i8"]), "f32")


def lookup(k: Any, table: Sequence[int], number: Any) -> Any:
    """table[number] as f32: up to 16 whole numbers of 8 bits, `number` a u8 within the table.

    The table is two words of 64 bits, out of which a shift takes the entry: vectors can do that too.
    """
    u64 = DTYPES["u64"]
    words = [int.from_bytes(bytes(n & 255 for n in table[at : at + 8]), "little") for at in (0, 8)]
    shift = k.cast(k.call("shl", number & 7, 3), u64)
    word = k.select(number < 8, *(k.const(w, u64) for w in words)) if len(table) > 8 else k.const(words[0], u64)
    return signed(k, k.cast(k.call("shr", word, shift) & 255, "u8"))


# ---- of encoders


def rounded(x: Array, low: int, high: int) -> Array:
    """The nearest whole number of the range."""
    return np.asarray(np.clip(np.rint(np.nan_to_num(x, nan=0.0)), low, high))


def nearest(x: Array, table: Array) -> Array:
    """For each element the number of the nearest entry of an ascending table."""
    return np.searchsorted((table[1:] + table[:-1]) / 2, np.nan_to_num(x, nan=0.0)).astype(np.uint8)


def best_scale(x: Array, w: Array, peak: float, quantised: Callable[[Array], Array]) -> tuple[Array, Array]:
    """The scale d and the numbers q with the least sum of w * (x - d * q)^2 along the last axis, of those tried.

    `quantised` gives q for x / d; the element of largest magnitude becomes about `peak`, the end of the range that
    reaches farther. For each q the best scale is sum(w x q) / sum(w q^2).
    """
    at = np.abs(x).argmax(axis=-1, keepdims=True)
    largest = np.take_along_axis(x, at, axis=-1)
    best = np.full(largest.shape, np.inf)
    scale, numbers = np.zeros_like(largest), np.zeros_like(x)
    for stretch in np.linspace(0.85, 1.1, 11):
        inverse = np.divide(peak * stretch, largest, out=np.zeros_like(largest), where=largest != 0)
        q = quantised(x * inverse).astype(np.float32)
        squares = (w * q * q).sum(axis=-1, keepdims=True)
        tried = np.divide(
            (w * x * q).sum(axis=-1, keepdims=True), squares, out=np.zeros_like(squares), where=squares > 0
        )
        error = (w * np.square(x - tried * q)).sum(axis=-1, keepdims=True)
        better = error < best
        best, scale = np.where(better, error, best), np.where(better, tried, scale)
        numbers = np.where(better, q, numbers)
    return scale.astype(np.float32), numbers


def as_f16(x: Array) -> Array:
    """The bytes of the numbers as f16, along the last axis."""
    return np.ascontiguousarray(x.astype("<f2")).view(np.uint8)


def as_u8(x: Array) -> Array:
    """Whole numbers of 8 bits, signed or not, as bytes."""
    return x.astype(np.int16).astype(np.uint8)
