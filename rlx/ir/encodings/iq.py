"""GGML's formats of 1 to 3 bits with tables of vectors of 8 or 4 elements: decoded when a file is loaded.

The tables have up to 2,048 entries that follow from no formula; the `gguf` package (MIT) has them and decodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import DTypeError, ModelFormatError
from rlx.install import install_package
from rlx.ir.encoding import Array, Encoding
from rlx.ir.encodings.bits import Byte
from rlx.ir.encodings.registry import register_encoding

__all__: list[str] = []


class _Tabled(Encoding):
    """Decoded by the `gguf` package; not encoded here."""

    block, native = 256, False

    def of_block(self, k: Any, byte: Byte, i: Any) -> Any:
        raise AssertionError(f"{self.name} has no expression")

    def _decode_blocks(self, blocks: Array) -> Array:
        try:
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize
        except ImportError:
            raise ModelFormatError(
                f"encoding {self.name} is decoded by the package gguf: {install_package('gguf')}"
            ) from None
        return np.asarray(dequantize(blocks, GGMLQuantizationType[self.name.upper()]))

    def _encode_blocks(self, blocks: Array, weights: Array) -> Array:
        raise DTypeError(f"encoding {self.name} is only read: encode as q2_k, q3_k or iq4_xs")


for _name, _bytes in {
    "iq1_s": 50, "iq1_m": 56, "iq2_xxs": 66, "iq2_xs": 74, "iq2_s": 82, "iq3_xxs": 98, "iq3_s": 110,
}.items():  # fmt: skip
    register_encoding(type(_name, (_Tabled,), {"name": _name, "block_bytes": _bytes}))
