"""GGML's formats of -1, 0 and 1, times one f16 scale for 256 elements. (ggml-common.h)"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.ir.dtype import DTYPES
from rlx.ir.encoding import Array, Encoding
from rlx.ir.encodings.bits import Byte, as_f16, field, half
from rlx.ir.encodings.registry import register_encoding

__all__: list[str] = []


def _ternary(blocks: Array) -> tuple[Array, Array]:
    """Bytes of the scale, which is the largest magnitude, and the numbers plus 1."""
    peak = np.abs(blocks).max(axis=1, keepdims=True)
    scaled = blocks * np.divide(np.float32(1), peak, out=np.zeros_like(peak), where=peak > 0)
    return as_f16(peak), (np.sign(scaled) * (np.abs(scaled) >= 0.5) + 1).astype(np.uint8)


@register_encoding
class Tq2_0(Encoding):
    """64 bytes of four numbers each, 32 elements apart, then d; x = d * (q - 1)."""

    name, block, block_bytes = "tq2_0", 256, 66

    def of_block(self, k: Any, byte: Byte, i: Any) -> Any:
        q = field(k, byte(i // 128 * 32 + i % 32), i // 32 % 4 * 2, 2)
        return half(k, byte, 64) * (k.cast(q, "f32") - 1)

    def _encode_blocks(self, blocks: Array, weights: Array) -> Array:
        d, q = _ternary(blocks)
        parts = q.reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
        return np.concatenate([np.bitwise_or.reduce(parts, axis=2).reshape(-1, 64), d], axis=1)


@register_encoding
class Tq1_0(Encoding):
    """Five numbers to a byte: 32 bytes for elements 0..159, 16 for 160..239, then four bytes of four; then d.

    A byte is the fraction q0/3 + q1/9 + ... in units of 1/256, rounded up; number n is the whole part of 3 times the
    fraction after n multiplications by 3.
    """

    name, block, block_bytes = "tq1_0", 256, 54

    def of_block(self, k: Any, byte: Byte, i: Any) -> Any:
        middle, last = i - 160, i - 240
        at = k.select(i < 160, i % 32, k.select(i < 240, middle % 16 + 32, last % 4 + 48))
        number = k.select(i < 160, i // 32, k.select(i < 240, middle // 16, last // 4))
        powers = k.const(int.from_bytes([1, 3, 9, 27, 81], "little"), DTYPES["u64"])
        power = k.call("shr", powers, k.cast(number * 8, "u64"))  # 3^number in its lowest byte
        fraction = k.cast(byte(at), "u32") * k.cast(k.cast(power & 255, "u8"), "u32") & 255
        q = k.call("shr", fraction * 3, 8)
        return half(k, byte, 52) * (k.cast(q, "f32") - 1)

    def _encode_blocks(self, blocks: Array, weights: Array) -> Array:
        d, q = _ternary(blocks)
        parts = [q[:, :160].reshape(-1, 5, 32), q[:, 160:240].reshape(-1, 5, 16), q[:, 240:].reshape(-1, 4, 4)]
        stored = []
        for part in parts:
            powers = np.array([81, 27, 9, 3, 1][: part.shape[1]], np.uint32)[:, None]
            total = (part * powers).sum(axis=1, dtype=np.uint32)
            stored.append(((total * 256 + 242) // 243).astype(np.uint8))
        return np.concatenate([*stored, d], axis=1)
