"""Encoded blocks of weights in panels, and how they become numbers in registers.

A panel holds the blocks of 16 columns as they are stored, the bytes of a block below each other: a row of 16 bytes
holds byte number r of the blocks of all columns, first the two bytes of their scales (f16), then those of their steps
of k. Blocks follow one another along k. So panels take the bytes that the encoding takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from rlx.backends.cpu.llvm.builder import Function, vec, width
from rlx.ir.dtype import DTYPES
from rlx.ir.encoding import Encoding, encoding_named

__all__ = ["BLOCK", "BYTE", "CODES", "ROW", "SCALE", "BlockCode"]

BLOCK = 32  # steps of k of a block
ROW = 16  # bytes of a row: a column each
SCALE = 2 * ROW  # bytes of the scales of a block
BYTE = DTYPES["u8"]


class BlockCode(ABC):
    """How the rows of a block are read; in f32, a weight is its number times the scale, without rounding."""

    name: str
    tiles_from: int  # rows of a product from which on tile registers compute it
    apart: int  # a row holds steps of k this far apart, the first of which is the row's number

    @property
    def encoding(self) -> Encoding:
        return encoding_named(self.name)

    @property
    def rows(self) -> int:
        """Rows of a block but for its scales."""
        return self.encoding.block_bytes - 2

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of a panel."""
        return self.encoding.block_bytes * ROW

    @property
    def steps(self) -> int:
        """Steps of k of a row."""
        return BLOCK // self.rows

    @abstractmethod
    def numbers(self, f: Function, p: str, lanes: int) -> list[str]:
        """The whole numbers, as f32, of the steps of so many columns of the row at `p`."""

    def scale(self, f: Function, p: str, lanes: int) -> str:
        """The scales, in f32, of so many columns of the block at `p`."""
        low, high = (f.cast("zext", f.load(vec("i8", lanes), q), "i16") for q in (p, f.offset(p, ROW)))
        halves = f.cast("bitcast", f.or_(low, f.shl(high, 8)), vec("half", lanes))
        return f.cast("fpext", halves, "float")


class _Bytes(BlockCode):
    name, tiles_from, apart = "q8_0", 10, 0

    def numbers(self, f: Function, p: str, lanes: int) -> list[str]:
        return [f.cast("sitofp", f.load(vec("i8", lanes), p), "float")]


class _Nibbles(BlockCode):
    name, tiles_from, apart = "q4_0", 7, 16

    def numbers(self, f: Function, p: str, lanes: int) -> list[str]:
        pairs = f.cast("zext", f.load(vec("i8", lanes), p), "i32")
        return [_less_eight(f, x) for x in (pairs, f.lshr(pairs, 4))]


CODES: dict[str, BlockCode] = {code.name: code for code in (_Bytes(), _Nibbles())}


def _less_eight(f: Function, x: str) -> str:
    """The lowest four bits less 8, as f32."""
    lanes = width(f.type_of(x))
    v = vec("float", lanes)
    if lanes == 16:  # AVX-512: looked up by the lowest four bits
        numbers = f.load(v, f.array("rlx_less_eight", "float", range(-8, 8)))
        name = "x86.avx512.permvar.sf.512"
        f.declare(f"llvm.{name}", v, [v, vec("i32", 16)])
        return f.op(f"call {v} @llvm.{name}({v} {numbers}, {vec('i32', 16)} {x})", v)
    return f.cast("sitofp", f.sub(f.and_(x, 15), 8), "float")
