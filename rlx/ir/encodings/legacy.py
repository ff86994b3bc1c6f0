"""GGML's formats of 32 elements: one f16 scale d, in some a minimum m, and a whole number q for each element.

The numbers of 4 bits lie in 16 bytes, elements 0..15 in the low halves and 16..31 in the high ones; those of 5 bits
have their highest bits apart, in a word of 32. (ggml-common.h; encoders: ggml-quants.c, quantize_row_*_ref)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.ir.dtype import DTYPES
from rlx.ir.encoding import Array, Encoding, Part
from rlx.ir.encodings.bits import Byte, as_f16, best_scale, field, half, lookup, nearest, signed, stored_half
from rlx.ir.encodings.registry import register_encoding

__all__ = ["IQ4", "nibble", "paired"]

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # the numbers of iq4_nl and iq4_xs


def nibble(k: Any, byte: Byte, start: Any, within: Any) -> Any:
    """Number `within` (0..31) of the 4-bit ones in the 16 bytes from `start` on, as u8."""
    return field(k, byte(start + within % 16), within // 16 * 4, 4)


def paired(q: Array) -> Array:
    """Numbers of 4 bits [count, 32] as those bytes; further groups of 32 follow one another."""
    groups = q.astype(np.uint8).reshape(len(q), -1, 2, 16)
    return (groups[:, :, 0] | groups[:, :, 1] << 4).reshape(len(q), -1)


def _inverted(k: Any, scale: Any) -> Any:
    """`_inverse` of an expression."""
    return k.select(k.equal(scale, 0), 0, 1 / scale)


def _inverse(scale: Array) -> Array:
    """1 / scale, and 0 for 0."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _towards(blocks: Array, steps: float) -> Array:
    """The scale with which the element of largest magnitude becomes `-steps`."""
    at = np.abs(blocks).argmax(axis=1, keepdims=True)
    return (np.take_along_axis(blocks, at, axis=1) / np.float32(-steps)).astype(np.float32)


@register_encoding
class Q8_0(Encoding):
    """d, 32 signed bytes q; x = d * q."""

    name, block, block_bytes = "q8_0", 32, 34

    def of_block(self, k: Any, byte: Byte, i: Any) -> Any:
        return half(k, byte, 0) * signed(k, byte(2 + i))

    def bytes_of_block(self, k: Any, element: Callable[[Any], Any]) -> Sequence[Part]:
        scale = k.reduce("max", (self.block,), lambda i: k.call("abs", element(i))) / 127
        inverse = _inverted(k, scale)

        def number(n: Any) -> Any:
            scaled = element(n) * inverse
            size = k.call("abs", scaled)
            below = k.call("floor", size)
            rounded = below + k.cast(size - below >= 0.5, "f32")  # halves go away from zero
            return k.bitcast(k.cast(k.select(scaled < 0, -rounded, rounded), "i8"), DTYPES["u8"])

        return (0, 2, lambda n: stored_half(k, scale, n)), (2, self.block, number)

    def _encode_blocks(self, blocks: Array, weights: Array) -> Array:
        scale, quants = _bytes(blocks)
        return np.concatenate([as_f16(scale), quants.view(np.uint8)], axis=1)


def _bytes(blocks: Array) -> tuple[Array, Array]:
    """The scale with which the largest magnitude becomes 127, and the numbers; halves go away from zero."""
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float32)
    scaled = (blocks * _inverse(scale)).astype(np.float64)
    return scale, np.copysign(np.floor(np.abs(scaled) + 0.5), scaled).astype(np.int8)


@register_encoding
class Q8_1(Encoding):
    """d, s = d * (sum of q), 32 signed bytes q; x = d * q. The sum is for products with formats that have a minimum."""

    name, block, block_bytes = "q8_1", 32, 36

    def of_block(self, k: Any, byte: Byte, i: Any) -> Any:
        return half(k, byte, 0) * signed(k, byte(4 + i))

    def _encode_blocks(self, blocks: Array, weights: Array) -> Array:
        scale, quants = _bytes(blocks)
        sums = scale * quants.astype(np.float32).sum(axis=1, keepdims=True)
        return np.concatenate([as_f16(scale), as_f16(sums), quants.view(np.uint8)], axis=1)


@register_encoding
class Q4_0(Encoding):
    """d, 32 numbers q of 4 bits; x = d * (q - 8)."""

    name, block, block_bytes = "q4_0", 32, 18

    def of_block(self, k: Any, byte: Byte, i: Any) -> Any:
        return half(k, byte, 0) * (k.cast(nibble(k, byte, 2, i), "f32") - 8)

    def bytes_of_block(self, k: Any, element: Callable[[Any], Any]) -> Sequence[Part]:
        largest = k.reduce("argmax", (self.block,), lambda i: k.call("abs", element(i)))
        scale = element(largest) / -8
        inverse = _inverted(k, scale)

        def number(n: Any) -> Any:
            scaled = k.call("floor", element(n) * inverse + 8.5)
            return k.cast(k.min(k.max(scaled, 0), 15), "u8")

        def pair(n: Any) -> Any:
            return number(n) | k.call("shl", number(n + 16), 4)

        return (0, 2, lambda n: stored_half(k, scale, n)), (2, 16, pair)

    def _encode_blocks(self, blocks: Array, weights: Array) -> Array:
        scale = _towards(blocks, 8)
        quants = np.clip(np.floor(blocks * _inverse(scale) + np.float32(8.5)), 0, 15)
        return np.concatenate([as_f16(scale), paired(quants)], axis=1)


@register_encoding
class Q4_1(Encoding):
    """d, m, 32 numbers q of 4 bits; x = d * q + m."""

    name, block, block_bytes = "q4_1", 32, 20

    def of_block(self, k: Any, byte: Byte, i: Any) -> Any:
        q = nibble(k, byte, 4, i)
        return half(k, byte, 0) * k.cast(q, "f32") + half(k, byte, 2)

    def _encode_blocks(self, blocks: Array, weights: Array) -> Array:
        scale, least, quants = _from_least(blocks, 15)
        return np.concatenate([as_f16(scale), as_f16(least), paired(quants)], axis=1)


def _from_least(blocks: Array, most: int) -> tuple[Array, Array, Array]:
    """Scale and minimum with which the elements become 0..most, and these numbers."""
    least, largest = blocks.min(axis=1, keepdims=True), blocks.max(axis=1, keepdims=True)
    scale = (largest - least) / np.float32(most)
    quants = np.clip(np.floor((blocks - least) * _inverse(scale) + np.float32(0.5)), 0, most)
    return scale, least, quants.astype(np.uint8)


def _fifth(k: Any, byte: Byte, start: Any, within: Any) -> Any:
    """The highest bit of a number of 5 bits, where it belongs, as u8."""
    return k.call("shl", field(k, byte(start + within // 8), within % 8, 1), 4)


def _fives(quants: Array) -> list[Array]:
    """Numbers of 5 bits as the bytes of their highest bits, and of the others."""
    q = quants.astype(np.uint8)
    return [np.packbits(q >> 4, axis=1, bitorder="little"), paired(q & 15)]


@register_encoding
class Q5_0(Encoding):
    """d, 32 numbers q of 5 bits; x = d * (q - 16)."""

    name, block, block_bytes = "q5_0", 32, 22

    def of_block(self, k: Any, byte: Byte, i: Any) -> Any:
        q = nibble(k, byte, 6, i) | _fifth(k, byte, 2, i)
        return half(k, byte, 0) * (k.cast(q, "f32") - 16)

    def _encode_blocks(self, blocks: Array, weights: Array) -> Array:
        scale = _towards(blocks, 16)
        quants = np.clip(np.floor(blocks * _inverse(scale) + np.float32(16.5)), 0, 31)
        return np.concatenate([as_f16(scale), *_fives(quants)], axis=1)


@register_encoding
class Q5_1(Encoding):
    """d, m, 32 numbers q of 5 bits; x = d * q + m."""

    name, block, block_bytes = "q5_1", 32, 24

    def of_block(self, k: Any, byte: Byte, i: Any) -> Any:
        q = nibble(k, byte, 8, i) | _fifth(k, byte, 4, i)
        return half(k, byte, 0) * k.cast(q, "f32") + half(k, byte, 2)

    def _encode_blocks(self, blocks: Array, weights: Array) -> Array:
        scale, least, quants = _from_least(blocks, 31)
        return np.concatenate([as_f16(scale), as_f16(least), *_fives(quants)], axis=1)


@register_encoding
class Iq4Nl(Encoding):
    """d, 32 numbers q of 4 bits; x = d * IQ4[q], whose steps are finer around zero."""

    name, block, block_bytes = "iq4_nl", 32, 18

    def of_block(self, k: Any, byte: Byte, i: Any) -> Any:
        return half(k, byte, 0) * lookup(k, IQ4, nibble(k, byte, 2, i))

    def _encode_blocks(self, blocks: Array, weights: Array) -> Array:
        table = np.array(IQ4, np.float32)
        scale, _ = best_scale(blocks, weights, table[0], lambda x: table[nearest(x, table)])
        stored = as_f16(scale)
        quants = nearest(blocks * _inverse(stored.view("<f2").astype(np.float32)), table)
        return np.concatenate([stored, paired(quants)], axis=1)
