"""A chunk of a product: the rows and columns of one matrix of results that a call of a kernel computes.

    chunk = (block of rows * groups + group) * blocks of columns + block of columns      groups of a convolution
    chunk = (matrix * blocks of rows + block of rows) * blocks of columns + block of columns      a batch

Blocks of rows and of columns have the sizes that the schedule gives, the last one what is left, or they are even: as
many, but of sizes that differ by one (row or panel) at most.
"""

from __future__ import annotations

from rlx.backends.cpu.llvm.builder import Function
from rlx.backends.cpu.schedule.arguments import ArgumentTable
from rlx.ir.shape import Shape, Size
from rlx.records import dataclass

__all__ = ["Chunk", "batch_indices", "chunk_of", "dot"]


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


def dot(f: Function, table: ArgumentTable, at: list[str], strides: list[Size]) -> str:
    """The sum of indices times strides."""
    total = "0"
    for i, stride in zip(at, strides, strict=True):
        if stride != 0:
            total = f.add(total, f.mul(i, table.load(f, stride), "i64"), "i64")
    return total
