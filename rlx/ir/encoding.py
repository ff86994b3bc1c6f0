"""Encodings: how the elements of a tensor are stored when they are not stored one by one.

An encoding is a property of a tensor type. The logical shape and dtype stay what the graph computes with; the encoding
says which byte blocks hold them. The registry is open: one class each, registered by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from rlx.errors import OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.records import dataclass

__all__ = ["ENCODINGS", "Q4_0", "Q8_0", "Encoding", "encoding_named", "register_encoding"]

Array = np.ndarray[Any, np.dtype[Any]]
ENCODINGS: dict[str, Encoding] = {}


class Encoding(ABC):
    """A block format: `block` consecutive elements of the last axis are stored in `block_bytes` bytes."""

    name: ClassVar[str]
    block: ClassVar[int]
    block_bytes: ClassVar[int]

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return encoding_named, (self.name,)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Stored bytes of a tensor of this shape; `ShapeError` if the last axis is not a whole number of blocks."""
        if not shape or shape[-1] % self.block:
            raise ShapeError(
                f"encoding {self.name}: the last axis of {tuple(shape)} is not a multiple of the block of {self.block}"
            )
        return int(np.prod(shape, dtype=object)) // self.block * self.block_bytes

    def decode(self, data: Array, shape: Sequence[int]) -> Array:
        """Stored bytes (u8, any shape) -> f32 elements of `shape`."""
        stored = np.ascontiguousarray(data).view(np.uint8)
        if stored.size != self.nbytes(shape):
            raise ShapeError(
                f"encoding {self.name}: {tuple(shape)} needs {self.nbytes(shape)} bytes, {stored.size} given"
            )
        return self._decode_blocks(stored.reshape(-1, self.block_bytes)).reshape(shape)

    def encode(self, values: Array) -> Array:
        """f32 elements -> stored bytes (u8, 1-D), by the format's own rounding."""
        self.nbytes(values.shape)
        blocks = np.asarray(values, np.float32).reshape(-1, self.block)
        return self._encode_blocks(blocks).reshape(-1)

    @abstractmethod
    def element(self, k: Any, byte: Callable[[Any], Any], i: Any) -> Any:
        """Element number `i` as a scalar expression: `k` makes expressions, `byte(n)` is the stored byte number n."""

    @abstractmethod
    def _decode_blocks(self, blocks: Array) -> Array: ...

    @abstractmethod
    def _encode_blocks(self, blocks: Array) -> Array: ...


def _f16_at(k: Any, byte: Callable[[Any], Any], at: Any) -> Any:
    """The little-endian f16 at byte `at`, as f32."""
    u16 = DTYPES["u16"]
    bits = k.cast(byte(at), u16) | k.call("shl", k.cast(byte(at + 1), u16), 8)
    return k.cast(k.bitcast(bits, DTYPES["f16"]), "f32")


def register_encoding(cls: type[Encoding]) -> type[Encoding]:
    """Class decorator: makes the encoding known under its name."""
    ENCODINGS[cls.name] = cls()
    return cls


def encoding_named(name: object) -> Encoding:
    """The encoding registered under `name`; `OptionError` lists the known ones."""
    if not isinstance(name, str) or name not in ENCODINGS:
        raise OptionError(f"unknown encoding {name!r}: known are {', '.join(sorted(ENCODINGS))}")
    return ENCODINGS[name]


def _scale(blocks: Array, steps: float) -> tuple[Array, Array]:
    """f16 scale a block so that its largest magnitude is `steps`, and the f32 reciprocal used to quantise."""
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / steps).astype(np.float32)
    inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale != 0)
    return scale.astype(np.float16), inverse


@register_encoding
@dataclass(frozen=True)
class Q8_0(Encoding):
    """GGML Q8_0: 32 elements as one f16 scale d and 32 signed bytes q; x = d * q."""

    name: ClassVar[str] = "q8_0"
    block: ClassVar[int] = 32
    block_bytes: ClassVar[int] = 34

    def element(self, k: Any, byte: Callable[[Any], Any], i: Any) -> Any:
        start = i // 32 * 34
        quant = k.cast(k.bitcast(byte(start + 2 + i % 32), DTYPES["i8"]), "f32")
        return _f16_at(k, byte, start) * quant

    def _decode_blocks(self, blocks: Array) -> Array:
        scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
        return blocks[:, 2:].view(np.int8).astype(np.float32) * scale

    def _encode_blocks(self, blocks: Array) -> Array:
        scale, inverse = _scale(blocks, 127.0)
        scaled = (blocks * inverse).astype(np.float64)
        quants = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled).astype(np.int8)  # halves go away from zero
        return np.concatenate([scale.view(np.uint8), quants.view(np.uint8)], axis=1)


@register_encoding
@dataclass(frozen=True)
class Q4_0(Encoding):
    """GGML Q4_0: 32 elements as one f16 scale d and 16 bytes; x = d * (q - 8), low nibbles hold elements 0..15."""

    name: ClassVar[str] = "q4_0"
    block: ClassVar[int] = 32
    block_bytes: ClassVar[int] = 18

    def element(self, k: Any, byte: Callable[[Any], Any], i: Any) -> Any:
        start, within = i // 32 * 18, i % 32
        pair = byte(start + 2 + within % 16)
        nibble = k.select(within < 16, pair & 15, k.call("shr", pair, 4))
        return _f16_at(k, byte, start) * (k.cast(nibble, "f32") - 8)

    def _decode_blocks(self, blocks: Array) -> Array:
        scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
        nibbles = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
        return (nibbles.astype(np.float32) - 8) * scale

    def _encode_blocks(self, blocks: Array) -> Array:
        peak = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
        scale = (peak / -8.0).astype(np.float32)
        inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale != 0)
        quants = np.clip(np.floor(blocks * inverse + 8.5), 0, 15).astype(np.uint8)
        packed = quants[:, :16] | (quants[:, 16:] << 4)
        return np.concatenate([scale.astype(np.float16).view(np.uint8), packed], axis=1)
