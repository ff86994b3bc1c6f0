"""Rows of keys and values as they are stored, and how their elements become f32 in registers.

A format reads `unit` elements of a row at a time, as so many vectors as they fill: a vector of floats, or a block of an
encoding. Blocks lie along the depth, so a row is a whole number of them. No element is rounded on the way, but for
products of operands of 16 bits (`_Rounded`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from rlx.backends.cpu.gemm.panels.bf16 import rounded
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Function, vec
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.encoding import encoding_named
from rlx.kernels.affine import Affine, linear_index
from rlx.kernels.encoded import encoded_element
from rlx.kernels.expr import Cast, Expr, Load, Select
from rlx.kernels.program import Buffer
from rlx.records import dataclass, replace

__all__ = ["BLOCKS", "FLOATS", "RowFormat", "StoredRows", "Where", "in_place", "where_of"]

F32 = DTYPES["f32"]


class RowFormat(ABC):
    """How the elements of a row are stored: `block` of them take `nbytes`."""

    name: str
    block: int
    nbytes: int

    def unit(self, lanes: int) -> int:
        """Elements that are read at a time."""
        return max(self.block, lanes)

    def at(self, f: Function, d: str | int) -> str | int:
        """Where element `d` starts in a row, in bytes; d is a multiple of the block."""
        if isinstance(d, int):
            return d // self.block * self.nbytes
        return f.mul(f.lshr(d, self.block.bit_length() - 1), self.nbytes) if self.block > 1 else f.mul(d, self.nbytes)

    @abstractmethod
    def vectors(self, f: Function, p: str, lanes: int) -> list[str]:
        """The unit of elements at `p`, in vectors of f32."""

    @abstractmethod
    def some(self, f: Function, row: str, d: str | int, lanes: int) -> str:
        """`lanes` elements of a row from `d` on, a multiple of the lanes (which divide a block): f32."""

    @abstractmethod
    def masked(self, f: Function, p: str, lanes: int, mask: str) -> str:
        """The elements at `p` where the mask is set, else zeros; of formats that are stored one by one."""


class _Floats(RowFormat):
    """Elements one by one."""

    block = 1

    def __init__(self, dtype: DType) -> None:
        self.name, self.dtype, self.nbytes = dtype.name, dtype, dtype.itemsize

    def _wide(self, f: Function, x: str, lanes: int) -> str:
        return convert.convert(f, x, self.dtype, F32, lanes)

    def vectors(self, f: Function, p: str, lanes: int) -> list[str]:
        return [self._wide(f, f.load(vec(convert.memory_type(self.dtype), lanes), p), lanes)]

    def some(self, f: Function, row: str, d: str | int, lanes: int) -> str:
        p = f.offset(row, self.at(f, d))
        return self._wide(f, f.load(vec(convert.memory_type(self.dtype), lanes), p), lanes)

    def masked(self, f: Function, p: str, lanes: int, mask: str) -> str:
        ty = vec(convert.memory_type(self.dtype), lanes)
        return self._wide(f, f.masked_load(ty, p, mask), lanes)


class _Blocks(RowFormat):
    """Blocks of 32 elements: an f16 scale, and whole numbers; an element is its number times the scale."""

    block = 32

    def __init__(self) -> None:
        self.nbytes = encoding_named(self.name).block_bytes

    def scale(self, f: Function, p: str, lanes: int) -> str:
        half = f.splat(f.load("half", p, align=1), lanes) if lanes > 1 else f.load("half", p, align=1)
        return f.cast("fpext", half, vec("float", lanes))

    @abstractmethod
    def numbers(self, f: Function, p: str, within: str | int, lanes: int) -> str:
        """The whole numbers from number `within` on of the block at `p`, as f32."""

    def vectors(self, f: Function, p: str, lanes: int) -> list[str]:
        scale = self.scale(f, p, lanes)
        return [f.mul(self.numbers(f, p, at, lanes), scale) for at in range(0, self.block, lanes)]

    def some(self, f: Function, row: str, d: str | int, lanes: int) -> str:
        p = f.offset(row, self.at(f, d))
        within = d % self.block if isinstance(d, int) else f.and_(d, self.block - 1)
        return f.mul(self.numbers(f, p, within, lanes), self.scale(f, p, lanes))

    def masked(self, f: Function, p: str, lanes: int, mask: str) -> str:
        raise AssertionError(f"rows of {self.name} are whole blocks")


class _Bytes(_Blocks):
    name = "q8_0"

    def numbers(self, f: Function, p: str, within: str | int, lanes: int) -> str:
        at = f.offset(f.offset(p, 2), within)
        return f.cast("sitofp", f.load(vec("i8", lanes), at), vec("float", lanes))


class _Nibbles(_Blocks):
    name = "q4_0"

    def numbers(self, f: Function, p: str, within: str | int, lanes: int) -> str:
        ty = vec("i32", lanes)
        low = within % 16 if isinstance(within, int) else f.and_(within, 15)
        pairs = f.cast("zext", f.load(vec("i8", lanes), f.offset(f.offset(p, 2), low)), ty)
        if isinstance(within, int):
            half = f.lshr(pairs, 4) if within >= 16 else pairs
        else:
            shift = f.cast("trunc", f.lshr(f.and_(within, 16), 2), "i32")
            half = f.lshr(pairs, f.splat(shift, lanes) if lanes > 1 else shift)
        return f.cast("sitofp", f.sub(f.and_(half, 15), 8), vec("float", lanes))


FLOATS: dict[str, RowFormat] = {name: _Floats(DTYPES[name]) for name in ("f32", "f16", "bf16")}
BLOCKS: dict[str, RowFormat] = {made.name: made for made in (_Bytes(), _Nibbles())}


class _Rounded(RowFormat):
    """Elements as another format reads them, then rounded to a type of 16 bits."""

    def __init__(self, format: RowFormat, dtype: DType) -> None:
        self.format, self.dtype = format, dtype
        self.name, self.block, self.nbytes = f"{format.name}_{dtype.name}", format.block, format.nbytes

    def _rounded(self, f: Function, x: str, lanes: int) -> str:
        return convert.convert(f, convert.convert(f, x, F32, self.dtype, lanes), self.dtype, F32, lanes)

    def vectors(self, f: Function, p: str, lanes: int) -> list[str]:
        return [self._rounded(f, x, lanes) for x in self.format.vectors(f, p, lanes)]

    def some(self, f: Function, row: str, d: str | int, lanes: int) -> str:
        return self._rounded(f, self.format.some(f, row, d, lanes), lanes)

    def masked(self, f: Function, p: str, lanes: int, mask: str) -> str:
        return self._rounded(f, self.format.masked(f, p, lanes, mask), lanes)


class _Paired(RowFormat):
    """Words of two neighbours, rounded to bf16, as elements of f32 to what moves them; others read the elements."""

    block = 1

    def __init__(self, format: RowFormat) -> None:
        self.format = format.format if isinstance(format, _Rounded) else format
        self.name, self.nbytes = f"{self.format.name}_pairs", 2 * self.format.nbytes

    def vectors(self, f: Function, p: str, lanes: int) -> list[str]:
        raise AssertionError("words are read some at a time")

    def some(self, f: Function, row: str, d: str | int, lanes: int) -> str:
        first = 2 * d if isinstance(d, int) else f.mul(d, 2)
        if lanes > 1:
            after = f.add(first, lanes) if isinstance(first, str) else first + lanes
            return rounded(f, *(self.format.some(f, row, at, lanes) for at in (first, after)))
        two = "poison"
        for lane in (0, 1):
            element = self.format.some(f, row, f.add(first, lane), 1)
            two = f.insert(two, element, lane, vec("float", 2))
        return f.cast("bitcast", convert.convert(f, two, F32, DTYPES["bf16"], 2), "float")

    def masked(self, f: Function, p: str, lanes: int, mask: str) -> str:
        raise AssertionError("rows of words are whole")


@dataclass(frozen=True)
class StoredRows:
    """Rows in memory: the address of the first, the bytes from row to row, and the format of both."""

    start: str
    step: str
    format: RowFormat

    def row(self, f: Function, number: str | int) -> str:
        """The address of a row."""
        return f.offset(self.start, f.mul(self.step, number))

    def from_row(self, f: Function, number: str | int) -> StoredRows:
        """The rows from this one on."""
        return replace(self, start=self.row(f, number))

    def in_pairs(self) -> StoredRows:
        """The same rows, read as words of two neighbours in bf16."""
        return replace(self, format=_Paired(self.format))

    def floats(self, f: Function) -> tuple[str, str]:
        """The address, and the elements from row to row, of rows of f32."""
        return self.start, f.lshr(self.step, 2)


# ---- operands as expressions


@dataclass(frozen=True)
class Where:
    """Where an operand of attention lies: in `source`, at the element that `index` numbers."""

    source: Buffer
    index: Affine
    format: RowFormat


def in_place(operand: Expr) -> Expr:
    """How few rows read keys or values: as they are, without the choice between that and panels, and widening."""
    operand = operand.a if isinstance(operand, Select) else operand
    if isinstance(operand, Cast) and operand.dtype is F32 and operand.value.dtype.name in FLOATS:
        return operand.value
    return operand


def where_of(operand: Expr) -> Where | None:
    """Where an operand lies, in a format that is known here; None if it is nothing of the kind."""
    if isinstance(operand, Cast) and operand.dtype.name in ("f16", "bf16"):
        found_below = where_of(operand.value)
        return found_below and replace(found_below, format=_Rounded(found_below.format, operand.dtype))
    if isinstance(operand, Load) and isinstance(operand.source, Buffer):
        found = FLOATS.get(operand.dtype.name)
        return (
            None if found is None else Where(operand.source, linear_index(operand.indices, operand.source.shape), found)
        )
    stored = encoded_element(operand)
    if stored is None or stored[1].name not in BLOCKS:
        return None
    source, encoding, flat = stored
    return Where(source, linear_index((flat,), (source.shape[0],)), BLOCKS[encoding.name])
