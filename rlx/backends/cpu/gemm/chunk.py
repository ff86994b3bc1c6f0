"""A chunk of a product: the rows and columns of one matrix of results that a call of a kernel computes.

    for each part of the chunk's rows:
        pack them into scratch                   unless they lie in memory as they are
        multiply them by the chunk's panels      into the results, or into scratch
        finish the results                       the epilogue

That is all of a kernel, of a matrix product (one part: all rows, which lie in A) and of a convolution, whose rows are
the windows of its pixels. `Product` has its pieces, `row_parts` the loop; what rows, a block and an epilogue are, the
kernels in `kernels/` say.

A chunk is told by its number:

    chunk = (block of rows * groups + group) * blocks of columns + block of columns      groups of a convolution
    chunk = (matrix * blocks of rows + block of rows) * blocks of columns + block of columns      a batch

Blocks of rows and of columns have the sizes that the schedule gives, the last one what is left, or they are even: as
many, but of sizes that differ by one (row or panel) at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from rlx.backends.cpu.gemm.tile import Tile
from rlx.backends.cpu.llvm.builder import Function, Typed
from rlx.backends.cpu.schedule.arguments import (
    Address,
    Argument,
    Arguments,
    ArgumentTable,
    Extents,
    Number,
    Scratch,
    ScratchStride,
    part,
)
from rlx.backends.cpu.schedule.matmul import ProductParts
from rlx.ir.shape import Shape, Size
from rlx.records import dataclass

__all__ = ["Chunk", "Product", "ProductArguments", "batch_indices", "chunk_of", "place_of", "row_parts"]


class ProductArguments(Arguments):
    """The arguments of a product of rows and panels; strides are in elements, places in scratch in bytes."""

    a: Address
    lda: Number  # from row to row, in memory or as they are packed
    b: Address
    c: Address
    ldc: Number
    m: Number  # rows of a matrix
    n: Number  # its columns
    k: Number
    row_chunk: Number
    panel_chunk: Number
    scratch: Address
    scratch_stride: Number  # bytes from a worker's to the next one's
    sums: Number  # where a block of sums starts in a worker's scratch
    copy: Number  # where a copy of rows of A starts there; negative: they are read where they are
    steps: Number  # of k in a block, at most; 0: by tiles, which use the room for a copy
    block: Address  # of `kernel.block_routine`

    @classmethod
    def cut_by(cls, cut: Callable[[Extents], ProductParts], **words: Argument) -> list[Argument]:
        """What they are, of a product that is cut so: those that the cut says, and the others, which are given."""
        names = ("row_chunk", "panel_chunk", "sums", "copy", "steps")
        places = {name: part(cut, name) for name in names if name not in words}
        return cls.given(scratch=Scratch(), scratch_stride=ScratchStride(), **places, **words)


@dataclass(frozen=True)
class Chunk:
    """SSA values: rows r0..r1 and columns n0..n1 of matrix number `matrix`, of a batch or of a convolution's groups.

    `room` is the most columns of a chunk, `panel` the number of the first panel.
    """

    matrix: str
    r0: str
    r1: str
    n0: str
    n1: str
    room: str
    panel: str


def chunk_of(
    f: Function,
    rows: str,
    row_chunk: str,
    columns: str,
    panel_chunk: str,
    width: int,
    *,
    groups: str | None = None,
    batch: bool = False,
    even_rows: bool = False,
    even_panels: bool = True,
) -> Chunk:
    """Emits what `%chunk` is, of `row_chunk` rows and `panel_chunk` panels of `width` columns at most.

    `batch`: of one matrix of a batch; `groups`: how many groups a convolution has. `even_rows`, `even_panels`: whether
    blocks are even.
    """

    def blocks_of(count: str, size: str) -> str:
        return f.div(f.sub(f.add(count, size), 1), size)

    def shares(number: str, count: str, of: str) -> tuple[str, str]:
        """Where one of so many even parts begins, and the next one."""
        return f.div(f.mul(number, of), count), f.div(f.mul(f.add(number, 1), of), count)

    room = f.mul(panel_chunk, width)
    column_blocks = blocks_of(columns, room)
    rest, column_block = f.div("%chunk", column_blocks), f.rem("%chunk", column_blocks)
    matrix, row_block = "0", rest
    if batch:
        row_blocks = blocks_of(rows, row_chunk)
        matrix, row_block = f.div(rest, row_blocks), f.rem(rest, row_blocks)
    elif groups is not None:
        row_block, matrix = f.div(rest, groups), f.rem(rest, groups)
    if even_rows:
        r0, r1 = shares(row_block, blocks_of(rows, row_chunk), rows)
    else:
        r0 = f.mul(row_block, row_chunk)
        r1 = f.min(f.add(r0, row_chunk), rows)
    if even_panels:
        panel, after = shares(column_block, column_blocks, f.div(f.add(columns, width - 1), width))
        n0, n1 = f.mul(panel, width), f.min(f.mul(after, width), columns)
    else:
        panel, n0 = f.mul(column_block, panel_chunk), f.mul(column_block, room)
        n1 = f.min(f.add(n0, room), columns)
    return Chunk(matrix, r0, r1, n0, n1, room, panel)


def batch_indices(f: Function, table: ArgumentTable, number: str, extents: Shape) -> list[str]:
    """The index along each batch axis of matrix `number`."""
    out: list[str] = []
    for size in reversed(extents[1:]):
        extent = table.load(f, size)
        out.insert(0, f.binary("urem", number, extent, "i64"))
        number = f.binary("udiv", number, extent, "i64")
    return [number, *out] if extents else []


def place_of(f: Function, table: ArgumentTable, at: list[str], strides: list[Size]) -> str:
    """The sum of indices times strides."""
    total = "0"
    for i, stride in zip(at, strides, strict=True):
        if stride != 0:
            total = f.add(total, f.mul(i, table.load(f, stride), "i64"), "i64")
    return total


@dataclass(frozen=True)
class Product:
    """The code of a chunk: `a`, `b` and `c` are where its matrix has rows, panels and results; `own` is scratch."""

    f: Function
    w: ProductArguments
    tile: Tile
    at: Chunk
    own: str
    a: str
    b: str
    c: str

    @classmethod
    def begin(
        cls, f: Function, w: ProductArguments, tile: Tile, at: Chunk, offsets: Callable[[str], tuple[str, str, str]]
    ) -> Self:
        """`offsets(number)`: where the rows, panels and results of a matrix start, in elements of memory."""
        own = f.offset(w.scratch, f.mul("%worker", w.scratch_stride))
        types = (tile.a_scalar, tile.b_scalar, tile.c_scalar)
        starts = zip((w.a, w.b, w.c), offsets(at.matrix), types, strict=True)
        return cls(f, w, tile, at, own, *(f.gep(base, start, ty) for base, start, ty in starts))

    @property
    def columns(self) -> str:
        """The columns of this chunk."""
        return self.f.sub(self.at.n1, self.at.n0)

    @property
    def stride(self) -> str:
        """Elements in memory from panel to panel."""
        return self.tile.format.panel(self.f, self.w.k, self.tile.scalar)

    def in_memory(self, r0: str, r1: str) -> str:
        """The address of row r0, as rows lie in A."""
        return self.f.gep(self.a, self.f.mul(r0, self.w.lda), self.tile.a_scalar)

    def panel(self, done: str = "0") -> str:
        """The address of the panel that the chunk's column number `done` is first in."""
        number = self.at.panel if done == "0" else self.f.add(self.at.panel, self.f.div(done, self.tile.width))
        return self.f.gep(self.b, self.f.mul(number, self.stride), self.tile.b_scalar)

    def place(self, in_place: bool, row: str, done: str = "0") -> tuple[str, str]:
        """The address and the row stride of a block of sums from there on: in the results, or in scratch."""
        f = self.f
        if not in_place:
            return f.offset(self.own, self.w.sums), self.at.room
        at = f.add(f.mul(row, self.w.ldc), f.add(self.at.n0, done))
        return f.gep(self.c, at, self.tile.c_scalar), self.w.ldc

    def block(self, a: str, panel: str, c: tuple[str, str], rows: str, columns: str, *more: Typed) -> None:
        """Multiplies rows at `a` by the panels from there on, into a block of sums at `c`; `more`: of the format.

        A block of a format that is `placed` gets all of B, and the number of its first panel as its stride.
        """
        f, w = self.f, self.w
        b, stride = (self.b, self.at.panel) if self.tile.format.placed else (panel, self.stride)
        copy = f.select(f.cmp("ge", w.copy, 0), f.offset(self.own, w.copy), "null", "ptr")
        f.call(w.block, [a, w.lda, b, stride, *c, rows, columns, w.k, w.steps, copy, *more])


def row_parts(
    f: Function,
    rows: tuple[str, str],
    part: str | int | None,
    packed: Callable[[str, str], str],
    body: Callable[[str, str, str], None],
) -> None:
    """Emits `body(a, q0, q1)` for one part of the rows after the other, of `part` rows at most (None: all at once).

    `packed(q0, q1)` emits what makes these rows ready, and is the address of the first one.
    """
    r0, r1 = rows

    def some_rows(q0: str, _: list[str]) -> None:
        q1 = r1 if part is None else f.min(f.add(q0, part), r1)
        body(packed(q0, q1), q0, q1)

    if part is None:
        some_rows(r0, [])
    else:
        f.loop(r0, r1, part, [], some_rows)
