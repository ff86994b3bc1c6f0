"""Encodings: how the elements of a tensor are stored when they are not stored one by one.

An encoding is a property of a tensor type. The logical shape and dtype stay what the graph computes with; the encoding
says which byte blocks hold them. `rlx.ir.encodings` has the formats, one file a family; each is one class that says
once, in `of_block`, how an element is made of the bytes of its block. Kernels and `decode` both follow that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.errors import OptionError, ShapeError

__all__ = ["Encoding", "encoding_named"]

Array = np.ndarray[Any, np.dtype[Any]]
Part = tuple[int, int, Callable[[Any], Any]]
PART = 1 << 20  # elements that are decoded at a time: more would need several times their memory


class Encoding(ABC):
    """A block format: `block` consecutive elements of the last axis are stored in `block_bytes` bytes."""

    name: str
    block: int
    block_bytes: int
    native = True  # else it is decoded when it is loaded, and no value of a graph is stored in it

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
        blocks = stored.reshape(-1, self.block_bytes)
        made = np.empty((len(blocks), self.block), np.float32)
        step = max(1, PART // self.block)
        with np.errstate(over="ignore", invalid="ignore"):  # scales of hostile files
            for start in range(0, len(blocks), step):
                made[start : start + step] = self._decode_blocks(blocks[start : start + step])
        return made.reshape(shape)

    def encode(self, values: Array, importance: Array | None = None) -> Array:
        """f32 elements -> stored bytes (u8, 1-D), by the format's own rounding.

        `importance` (not negative, one number for each element of the last axis) weighs the squared errors that are
        made least, as the mean squares of what the elements are multiplied by do. Formats whose encoder is fixed
        (those of 32 elements and one scale, but for iq4_nl) have no use for it. Raises `ShapeError`, `OptionError`.
        """
        self.nbytes(values.shape)
        blocks = np.asarray(values, np.float32).reshape(-1, self.block)
        if importance is None:
            weights = np.ones((1, self.block), np.float32)
        else:
            weights = self._weights(np.asarray(importance, np.float32), values.shape)
        parts = []
        step = max(1, PART // self.block)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for start in range(0, len(blocks), step):
                part = slice(start, start + step)
                parts.append(self._encode_blocks(blocks[part], weights[part] if len(weights) > 1 else weights))
        return np.concatenate([p.reshape(-1) for p in parts]) if parts else np.empty(0, np.uint8)

    def _weights(self, importance: Array, shape: Sequence[int]) -> Array:
        """The importance of each element of each block."""
        if importance.shape != (shape[-1],):
            raise ShapeError(f"importance: expected {shape[-1]} numbers, one for each column, got {importance.shape}")
        if not (np.isfinite(importance).all() and (importance >= 0).all()):
            raise OptionError("importance: expected finite numbers that are not negative")
        return np.broadcast_to(importance, shape).reshape(-1, self.block)

    def element(self, k: Any, byte: Callable[[Any], Any], i: Any) -> Any:
        """Element number `i` as a scalar expression: `k` makes expressions, `byte(n)` is the stored byte number n."""
        start = i // self.block * self.block_bytes
        return self.of_block(k, lambda n: byte(start + n), i % self.block)

    @abstractmethod
    def of_block(self, k: Any, byte: Callable[[Any], Any], i: Any) -> Any:
        """The same within one block, whose elements and bytes are numbered from 0."""

    def _decode_blocks(self, blocks: Array) -> Array:
        """`of_block` at every place of the blocks (u8[count, block_bytes]), computed by NumPy."""
        from rlx.ir.encodings.arrays import Arrays

        def byte(n: Any) -> Array:
            at = np.ravel(n)
            return blocks[:, at[:1]] if (at == at[0]).all() else blocks[:, at]

        return np.asarray(self.of_block(Arrays, byte, np.arange(self.block)[None]))

    def bytes_of_block(self, k: Any, element: Callable[[Any], Any]) -> Sequence[Part]:
        """The bytes of a block whose elements (f32) are `element(0)` to `element(block - 1)`, as scalar expressions.

        Each part is where it starts, how many bytes it has, and a function that gives byte number n of it (u8). They
        are those of `encode`. Formats without it (`written` is false) are not made in a run.
        """
        raise OptionError(f"encoding {self.name}: no run makes blocks of it")

    @property
    def written(self) -> bool:
        """Whether runs can make blocks of it."""
        return type(self).bytes_of_block is not Encoding.bytes_of_block

    @abstractmethod
    def _encode_blocks(self, blocks: Array, weights: Array) -> Array:
        """The bytes of blocks (f32[count, block]); `weights` (of the same shape, or of one row) are not negative."""


def encoding_named(name: object) -> Encoding:
    """The encoding registered under `name`; `OptionError` lists the known ones."""
    from rlx.ir.encodings import ENCODINGS

    if not isinstance(name, str) or name not in ENCODINGS:
        raise OptionError(f"unknown encoding {name!r}: known are {', '.join(sorted(ENCODINGS))}")
    return ENCODINGS[name]
