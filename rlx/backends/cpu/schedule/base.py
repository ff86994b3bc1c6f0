"""How the work of kernels is cut into chunks: by their extents, and finer for many threads.

That of loop nests is here, and what all schedules share; those of other kernels are in the other files.

Objects of these classes are all that is stored of such a choice, so that stored code needs nothing of what emits code.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from rlx.backends.cpu.schedule.arguments import Extents, thread_count
from rlx.backends.cpu.schedule.balance import wants_shares
from rlx.ir.shape import Size, evaluate
from rlx.records import dataclass

__all__ = [
    "CHUNK",
    "FEW_ROWS",
    "MIN_CHUNKS",
    "Grid",
    "LineParts",
    "LineSchedule",
    "PackSchedule",
    "RowParts",
    "RowSchedule",
    "aligned",
    "pieces",
]  # fmt: skip

MIN_CHUNKS = 4
LOOP_COST = 400_000  # simple operations that one chunk of a nest should hold at least: some tens of microseconds
LEAST_LOOP_COST = 50_000  # and where work is cut into a few chunks for several threads: some 2 us, a join takes 1
CHUNK = 16384  # elementary steps in a chunk of a kernel for one op: some 20 us
NARROW = 64  # elements of a slice that a chunk takes at least, so that lines of cache are not shared
PACKED = 65536  # elements that a chunk packs
FEW_ROWS = 4  # query rows that attention computes without panels


# ---- kernels for one op, and packing


class RowParts(NamedTuple):
    """Rows of a chunk, and the chunks."""

    step: int
    chunks: int


@dataclass(eq=False, repr=False)
class RowSchedule:
    """Rows that take `cost` steps each."""

    count: Size
    cost: Size

    def __call__(self, extents: Extents) -> RowParts:
        return _rows(evaluate(self.count, extents), evaluate(self.cost, extents))


class LineParts(NamedTuple):
    """As `RowParts`, with the elements of a line that a row has, and the rows."""

    step: int
    chunks: int
    width: int
    rows: int


@dataclass(eq=False, repr=False)
class LineSchedule:
    """Rows are lines, cut into widths of `inner` where `times` updates of each element make them long."""

    lines: Size
    inner: Size
    times: Size

    def __call__(self, extents: Extents) -> LineParts:
        lines, inner, times = (evaluate(s, extents) for s in (self.lines, self.inner, self.times))
        width = max(1, min(inner, max(NARROW, CHUNK // max(1, times))))
        rows = lines * -(-inner // width)
        return LineParts(*_rows(rows, width * times), width, rows)


def _rows(count: int, cost: int) -> RowParts:
    step = max(1, CHUNK // max(1, cost))
    return RowParts(step, -(-count // step))


@dataclass(eq=False, repr=False)
class PackSchedule:
    """Panels of `elements` each, of `count` matrices; `together` go into one chunk, if that is given."""

    count: Size
    panels: Size
    elements: Size
    together: int | None

    def __call__(self, extents: Extents) -> RowParts:
        step = self.together or max(1, PACKED // max(evaluate(self.elements, extents), 1))
        return RowParts(step, evaluate(self.count, extents) * -(-evaluate(self.panels, extents) // step))


# ---- loop nests


class GridParts(NamedTuple):
    """Sizes of a nest and of its chunks."""

    rows: int
    row_chunk: int
    columns: int
    column_chunk: int
    column_chunks: int
    chunks: int


@dataclass(eq=False, repr=False)
class Grid:
    """How the work of a nest is cut into chunks: of some whole rows, or of columns (a multiple of 64) of them."""

    outer: tuple[Size, ...]
    last: Size
    weight: Size  # of an element
    row_weight: Size  # of what its elements share
    whole_rows: bool  # a row is not split, because its reductions are shared by all its elements

    def __call__(self, extents: Extents) -> GridParts:
        rows, columns = prod(evaluate(s, extents) for s in self.outer), evaluate(self.last, extents)
        weight, threads = evaluate(self.weight, extents), thread_count(extents)
        column_chunk = max(columns, 1)
        parts = 1 if self.whole_rows else _parts(column_chunk * weight, threads)
        if parts > 1:
            column_chunk = -(-column_chunk // (64 * parts)) * 64
        column_chunks = max(-(-columns // column_chunk), 1)
        a_row = column_chunk * weight + evaluate(self.row_weight, extents)
        row_chunk = -(-max(rows, 1) // min(_parts(max(rows, 1) * a_row, threads), max(rows, 1)))
        chunks = -(-rows // row_chunk) * column_chunks if rows and columns else 0
        return GridParts(rows, row_chunk, columns, column_chunk, column_chunks, chunks)


def _parts(cost: int, threads: int) -> int:
    """Into how many chunks work is cut: multiples of 4 where more than 2, so that 2 or 4 threads have equal shares."""
    parts = max(-(-cost // LOOP_COST), min(MIN_CHUNKS, cost // LEAST_LOOP_COST), 1)
    parts = parts if parts <= 2 else -(-parts // 4) * 4
    if not wants_shares(parts, threads):
        return parts
    even = -(-parts // threads) * threads
    return max(min(even, cost // LEAST_LOOP_COST), parts)


def pieces(cost: float, most: float, least: float) -> int:
    """Chunks of work: of cost `most` at most, but four where each is `least` then; four or more are multiples of 2."""
    count = max(round(cost / most), min(MIN_CHUNKS, int(cost / least)), 1)
    return count if count <= 2 else -(-count // 2) * 2


def aligned(count: int) -> int:
    """Bytes in whole lines of the cache."""
    return -(-count // 64) * 64
