"""Floats of 4 bits (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, with a sign) with a scale that is a float of 8 bits.

(OCP Microscaling Formats 1.0; nvfp4: NVIDIA's, with finer scales; both as ggml-common.h lays them)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.ir.dtype import DTYPES
from rlx.ir.encoding import Array, Encoding
from rlx.ir.encodings.bits import Byte, field, lookup
from rlx.ir.encodings.legacy import nibble, paired
from rlx.ir.encodings.registry import register_encoding

__all__: list[str] = []

TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # the numbers of e2m1, doubled, by their bits


def _codes(x: Array) -> Array:
    """For each element the bits of the nearest number of `TWICE`; of two as near, the first."""
    return np.asarray(np.abs(x[..., None] - np.array(TWICE, np.float32)).argmin(axis=-1), np.uint8)


@register_encoding
class Mxfp4(Encoding):
    """e, 32 numbers of 4 bits; x = 2^(e - 127) * e2m1[q]."""

    name, block, block_bytes = "mxfp4", 32, 17

    def of_block(self, k: Any, byte: Byte, i: Any) -> Any:
        e = k.cast(byte(0), "u32")
        # half of 2^(e - 127), as e2m1 is doubled; below e = 2 a denormal number
        small = k.call("shl", k.const(1 << 21, DTYPES["u32"]), k.call("min", e, 1))
        bits = k.select(e < 2, small, k.call("shl", e - 1, 23))
        return k.bitcast(bits, DTYPES["f32"]) * lookup(k, TWICE, nibble(k, byte, 1, i))

    def _encode_blocks(self, blocks: Array, weights: Array) -> Array:
        peak = np.abs(blocks).max(axis=1, keepdims=True)
        e = np.where(peak > 0, np.floor(np.log2(np.where(peak > 0, peak, 1))) - 2 + 127, 0)
        e = np.clip(e, 0, 254)
        q = _codes(np.ldexp(blocks, (128 - e).astype(np.int32)))
        return np.concatenate([e.astype(np.uint8), paired(q)], axis=1)


@register_encoding
class Nvfp4(Encoding):
    """Four scales of 8 bits (e4m3 without a sign), 64 numbers of 4 bits in groups of 16; x = scale * e2m1[q].

    Of a group, elements 0..7 lie in the low halves of 8 bytes, 8..15 in the high ones.
    """

    name, block, block_bytes = "nvfp4", 64, 36

    def of_block(self, k: Any, byte: Byte, i: Any) -> Any:
        group, within = i // 16, i % 16
        s = k.cast(byte(group), "u32")
        exponent, mantissa = k.call("shr", s, 3) & 15, k.cast(s & 7, "f32")
        power = k.bitcast(k.call("shl", exponent + 120, 23), DTYPES["f32"])  # 2^(exponent - 7)
        # half of the scale, as e2m1 is doubled: 2^(exponent - 7) * (1 + mantissa / 8) / 2, and below exponent 1 linear
        scale = k.select(exponent < 1, mantissa * 2.0**-10, power * (mantissa * 0.0625 + 0.5))
        scale = k.select(s - 127 < 1, k.const(0, DTYPES["f32"]), scale)  # 127 is no number; it counts as 0
        q = field(k, byte(4 + group * 8 + within % 8), within // 8 * 4, 4)
        return scale * lookup(k, TWICE, q)

    def _encode_blocks(self, blocks: Array, weights: Array) -> Array:
        x = blocks.reshape(-1, 4, 16)
        wanted = np.minimum(np.abs(x).max(axis=2, keepdims=True) / np.float32(6), 448)
        scale = wanted.astype(DTYPES["f8e4m3"].numpy)
        value = scale.astype(np.float32)
        twice = np.divide(2 * x, value, out=np.zeros_like(x), where=value != 0)
        q = _codes(twice).reshape(-1, 4, 2, 8)
        codes = (q[:, :, 0] | q[:, :, 1] << 4).reshape(len(blocks), 32)
        return np.concatenate([scale[..., 0].view(np.uint8), codes], axis=1)
