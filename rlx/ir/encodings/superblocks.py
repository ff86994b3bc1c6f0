"""GGML's k-quants: blocks of 256 elements in groups of 16 or 32, each with a small scale of its own (and a minimum).

    x = d * scale(group) * q                                      q3_k, q6_k, iq4_xs
    x = d * scale(group) * q - dmin * minimum(group)              q2_k, q4_k, q5_k

d and dmin are f16, scales and minima of 4 to 8 bits. Numbers that are narrower than a byte are laid so that one byte
holds those of elements 32 (or 64) apart. (ggml-common.h)

The encoders are this project's own: for each group the scale (and minimum) with the least weighted squared error of
those tried, then all of a block on the grid of d (and dmin).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.ir.encoding import Array, Encoding
from rlx.ir.encodings.bits import Byte, as_f16, as_u8, best_scale, field, half, lookup, nearest, rounded, signed, whole
from rlx.ir.encodings.legacy import IQ4, nibble, paired
from rlx.ir.encodings.registry import register_encoding

__all__ = ["BLOCK"]

BLOCK = 256


# ---- encoding


def _best_range(x: Array, w: Array, most: int) -> tuple[Array, Array]:
    """Scale s and minimum m >= 0 with the least sum of w * (x - (s * q - m))^2 along the last axis, q of 0..most.

    For each q the best s and m solve two linear equations; where m would be negative it is 0.
    """
    low = np.minimum(x.min(axis=-1, keepdims=True), 0)
    span = x.max(axis=-1, keepdims=True) - low
    sums = (w * np.ones_like(x)).sum(axis=-1, keepdims=True)
    sx = (w * x).sum(axis=-1, keepdims=True)
    best = np.full(span.shape, np.inf)
    scale, minimum = np.zeros_like(span), np.zeros_like(span)
    for stretch in np.linspace(-0.9, 0.9, 13):
        inverse = np.divide(most + stretch, span, out=np.zeros_like(span), where=span > 0)
        q = rounded((x - low) * inverse, 0, most)
        sq, sqq, sxq = ((w * v).sum(axis=-1, keepdims=True) for v in (q, q * q, x * q))
        det = sums * sqq - sq * sq
        s = np.divide(sums * sxq - sx * sq, det, out=np.zeros_like(det), where=det > 0)
        m = np.divide(sq * sxq - sqq * sx, det, out=np.zeros_like(det), where=det > 0)
        only = np.divide(sxq, sqq, out=np.zeros_like(sqq), where=sqq > 0)
        s, m = np.where(m < 0, only, s), np.maximum(m, 0)
        error = (w * np.square(x - (s * q - m))).sum(axis=-1, keepdims=True)
        better = (error < best) & (s >= 0)
        best, scale, minimum = (np.where(better, a, b) for a, b in ((error, best), (s, scale), (m, minimum)))
    return scale.astype(np.float32), minimum.astype(np.float32)


def _grid(x: Array, most: float) -> tuple[Array, Array]:
    """The bytes of an f16 with which the largest magnitude along the last axis becomes `most`, and its value."""
    at = np.abs(x).argmax(axis=-1, keepdims=True)
    stored = as_f16(np.take_along_axis(x, at, axis=-1) / np.float32(most))
    return stored, stored.view("<f2").astype(np.float32)


def _over(x: Array, scale: Array) -> Array:
    """x / scale, and 0 where the scale is 0."""
    return np.divide(x, scale, out=np.zeros(np.broadcast_shapes(x.shape, scale.shape), np.float32), where=scale != 0)


def _with_minimum(blocks: Array, weights: Array, group: int, most: int, finest: int) -> tuple[Array, ...]:
    """Bytes of d and dmin, scales and minima (0..finest) [count, groups], and the numbers (0..most) [count, 256]."""
    x = blocks.reshape(len(blocks), -1, group)
    scale, minimum = (v[..., 0] for v in _best_range(x, weights.reshape(len(weights), -1, group), most))
    d_bytes, d = _grid(scale, finest)
    m_bytes, dmin = _grid(minimum, finest)
    scales, minima = rounded(_over(scale, d), 0, finest), rounded(_over(minimum, dmin), 0, finest)
    q = rounded(_over(x + (dmin * minima)[..., None], (d * scales)[..., None]), 0, most)
    return d_bytes, m_bytes, as_u8(scales), as_u8(minima), as_u8(q).reshape(blocks.shape)


def _signed_scales(
    blocks: Array, weights: Array, group: int, peak: float, finest: int, numbers: Callable[[Array], Array]
) -> tuple[Array, ...]:
    """Bytes of d, scales (-finest..finest-1) [count, groups], and `numbers(x / scale)` [count, 256]."""
    x = blocks.reshape(len(blocks), -1, group)
    scale = best_scale(x, weights.reshape(len(weights), -1, group), peak, numbers)[0][..., 0]
    d_bytes, d = _grid(scale, -finest)
    scales = rounded(_over(scale, d), -finest, finest - 1)
    return d_bytes, scales, numbers(_over(x, (d * scales)[..., None])).reshape(blocks.shape)


def _strided(q: Array, apart: int, bits: int) -> Array:
    """Numbers [count, 256] of so many bits as bytes of those `apart` elements from one another."""
    parts = q.reshape(len(q), -1, 8 // bits, apart).astype(np.uint8)
    shifted = parts << (bits * np.arange(8 // bits, dtype=np.uint8))[:, None]
    return np.asarray(np.bitwise_or.reduce(shifted, axis=2)).reshape(len(q), -1)


# ---- the formats


@register_encoding
class Q2_K(Encoding):
    """Groups of 16: scale in the low, minimum in the high half of a byte; q of 2 bits."""

    name, block, block_bytes = "q2_k", BLOCK, 84

    def of_block(self, k: Any, byte: Byte, i: Any) -> Any:
        q = field(k, byte(16 + i // 128 * 32 + i % 32), i // 32 % 4 * 2, 2)
        both = byte(i // 16)
        scale, minimum = k.cast(both & 15, "f32"), k.cast(k.call("shr", both, 4), "f32")
        return half(k, byte, 80) * scale * k.cast(q, "f32") - half(k, byte, 82) * minimum

    def _encode_blocks(self, blocks: Array, weights: Array) -> Array:
        d, dmin, scales, minima, q = _with_minimum(blocks, weights, 16, 3, 15)
        return np.concatenate([scales | minima << 4, _strided(q, 32, 2), d, dmin], axis=1)


@register_encoding
class Q3_K(Encoding):
    """Groups of 16: scales of 6 bits less 32; q of 3 bits less 4, their highest bits in 32 bytes of their own."""

    name, block, block_bytes = "q3_k", BLOCK, 110

    def of_block(self, k: Any, byte: Byte, i: Any) -> Any:
        low = field(k, byte(32 + i // 128 * 32 + i % 32), i // 32 % 4 * 2, 2)
        high = field(k, byte(i % 32), i // 32, 1)
        q = k.cast(low | k.call("shl", high, 2), "f32") - 4
        group = i // 16
        scale = field(k, byte(96 + group % 8), group // 8 * 4, 4)
        scale = scale | k.call("shl", field(k, byte(104 + group % 4), group // 4 * 2, 2), 4)
        return half(k, byte, 108) * (k.cast(scale, "f32") - 32) * q

    def _encode_blocks(self, blocks: Array, weights: Array) -> Array:
        d, scales, q = _signed_scales(blocks, weights, 16, -4, 32, lambda x: rounded(x, -4, 3))
        stored, numbers = as_u8(scales + 32), as_u8(q + 4)
        fours = stored.reshape(len(blocks), 4, 4) >> 4
        high = np.bitwise_or.reduce(fours << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=1)
        return np.concatenate(
            [
                _strided(numbers >> 2, 32, 1),
                _strided(numbers & 3, 32, 2),
                (stored[:, :8] & 15) | (stored[:, 8:] & 15) << 4,
                high,
                d,
            ],
            axis=1,
        )


def _sixes(k: Any, byte: Byte, start: Any, group: Any) -> tuple[Any, Any]:
    """Scale and minimum of group 0..7, of 6 bits each in 12 bytes, in f32.

    Bytes 0..3 and 4..7 hold scales and minima 0..3, and above them the highest bits of those of groups 4..7; bytes
    8..11 hold the other bits of these, scales in the low halves.
    """
    early, place = group < 4, group % 4
    first, second, third = (byte(start + n + place) for n in (0, 4, 8))
    scale = k.select(early, first & 63, (third & 15) | k.call("shl", k.call("shr", first, 6), 4))
    minimum = k.select(early, second & 63, k.call("shr", third, 4) | k.call("shl", k.call("shr", second, 6), 4))
    return k.cast(scale, "f32"), k.cast(minimum, "f32")


def _in_sixes(scales: Array, minima: Array) -> Array:
    """Those 12 bytes."""
    first, second = (v[:, :4] | v[:, 4:] >> 4 << 6 for v in (scales, minima))
    return np.concatenate([first, second, (scales[:, 4:] & 15) | minima[:, 4:] << 4], axis=1)


@register_encoding
class Q4_K(Encoding):
    """Groups of 32 with scales and minima of 6 bits; q of 4 bits."""

    name, block, block_bytes = "q4_k", BLOCK, 144

    def of_block(self, k: Any, byte: Byte, i: Any) -> Any:
        q = field(k, byte(16 + i // 64 * 32 + i % 32), i // 32 % 2 * 4, 4)
        scale, minimum = _sixes(k, byte, 4, i // 32)
        return half(k, byte, 0) * scale * k.cast(q, "f32") - half(k, byte, 2) * minimum

    def _encode_blocks(self, blocks: Array, weights: Array) -> Array:
        d, dmin, scales, minima, q = _with_minimum(blocks, weights, 32, 15, 63)
        return np.concatenate([d, dmin, _in_sixes(scales, minima), _strided(q, 32, 4)], axis=1)


@register_encoding
class Q5_K(Encoding):
    """As q4_k, with q of 5 bits, whose highest lie in 32 bytes of their own."""

    name, block, block_bytes = "q5_k", BLOCK, 176

    def of_block(self, k: Any, byte: Byte, i: Any) -> Any:
        low = field(k, byte(48 + i // 64 * 32 + i % 32), i // 32 % 2 * 4, 4)
        high = field(k, byte(16 + i % 32), i // 32, 1)
        scale, minimum = _sixes(k, byte, 4, i // 32)
        q = k.cast(low | k.call("shl", high, 4), "f32")
        return half(k, byte, 0) * scale * q - half(k, byte, 2) * minimum

    def _encode_blocks(self, blocks: Array, weights: Array) -> Array:
        d, dmin, scales, minima, q = _with_minimum(blocks, weights, 32, 31, 63)
        parts = [d, dmin, _in_sixes(scales, minima), _strided(q >> 4, 32, 1), _strided(q & 15, 32, 4)]
        return np.concatenate(parts, axis=1)


@register_encoding
class Q6_K(Encoding):
    """Groups of 16 with signed scales of 8 bits; q of 6 bits less 32, four of them in a byte and two halves."""

    name, block, block_bytes = "q6_k", BLOCK, 210

    def of_block(self, k: Any, byte: Byte, i: Any) -> Any:
        low = field(k, byte(i // 128 * 64 + i % 64), i // 64 % 2 * 4, 4)
        high = field(k, byte(128 + i // 128 * 32 + i % 32), i // 32 % 4 * 2, 2)
        q = k.cast(low | k.call("shl", high, 4), "f32") - 32
        return half(k, byte, 208) * signed(k, byte(192 + i // 16)) * q

    def _encode_blocks(self, blocks: Array, weights: Array) -> Array:
        d, scales, q = _signed_scales(blocks, weights, 16, -32, 128, lambda x: rounded(x, -32, 31))
        numbers = as_u8(q + 32)
        return np.concatenate([_strided(numbers & 15, 64, 4), _strided(numbers >> 4, 32, 2), as_u8(scales), d], axis=1)


@register_encoding
class Q8_K(Encoding):
    """f32 d, 256 signed bytes q, and the sums (i16) of each 16 of them; x = d * q."""

    name, block, block_bytes = "q8_k", BLOCK, 292

    def of_block(self, k: Any, byte: Byte, i: Any) -> Any:
        return whole(k, byte, 0, "f32") * signed(k, byte(4 + i))

    def _encode_blocks(self, blocks: Array, weights: Array) -> Array:
        scale = (np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)).astype("<f4")
        q = rounded(_over(blocks, scale), -127, 127).astype(np.int8)
        sums = q.reshape(len(q), 16, 16).sum(axis=2, dtype="<i2")
        return np.concatenate([scale.view(np.uint8), q.view(np.uint8), sums.view(np.uint8)], axis=1)


@register_encoding
class Iq4Xs(Encoding):
    """Groups of 32 with scales of 6 bits less 32; x = d * scale * IQ4[q], q of 4 bits."""

    name, block, block_bytes = "iq4_xs", BLOCK, 136

    def of_block(self, k: Any, byte: Byte, i: Any) -> Any:
        group = i // 32
        low = field(k, byte(4 + group // 2), group % 2 * 4, 4)
        high = field(k, byte(2 + group // 4), group % 4 * 2, 2)
        scale = k.cast(low | k.call("shl", high, 4), "f32") - 32
        return half(k, byte, 0) * scale * lookup(k, IQ4, nibble(k, byte, 8 + group * 16, i % 32))

    def _encode_blocks(self, blocks: Array, weights: Array) -> Array:
        table = np.array(IQ4, np.float32)
        d, scales, x = _signed_scales(blocks, weights, 32, table[0], 32, lambda x: table[nearest(x, table)])
        stored = as_u8(scales + 32)
        low = (stored[:, ::2] & 15) | (stored[:, 1::2] & 15) << 4
        high = np.bitwise_or.reduce((stored >> 4).reshape(-1, 2, 4) << np.array([0, 2, 4, 6], np.uint8), axis=2)
        return np.concatenate([d, high, low, paired(nearest(x, table))], axis=1)
