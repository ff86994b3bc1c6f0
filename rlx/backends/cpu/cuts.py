"""How the work of kernels is cut into chunks: by their extents, and finer for many threads.

That of loop nests is here, and what all cuts share; those of other kernels are in `*_cut.py`.

Objects of these classes are all that is stored of such a choice, so that stored code needs nothing of what emits code.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from rlx.backends.cpu.shares import wants_shares
from rlx.backends.cpu.words import Computed, Extents, thread_count
from rlx.ir.shape import Shape, Size, evaluate, size_product
from rlx.records import dataclass

__all__ = ["FEW_ROWS", "MIN_CHUNKS", "Grid", "Part", "Product", "aligned", "part", "pieces"]

MIN_CHUNKS = 4
LOOP_COST = 400_000  # simple operations that one chunk of a nest should hold at least: some tens of microseconds
LEAST_LOOP_COST = 50_000  # and where work is cut into a few chunks for several threads: some 2 us, a join takes 1
FEW_ROWS = 4  # query rows that attention computes without panels


class Part:
    """A number that a cut tells: its field of that name, or its entry `index` where that is a tuple."""

    def __init__(self, cut: Callable[[Extents], Any], name: str, index: int | None = None) -> None:
        self.cut, self.name, self.index = cut, name, index

    def __call__(self, extents: Extents) -> int:
        found = getattr(self.cut(extents), self.name)
        return int(found if self.index is None else found[self.index])


def part(cut: Callable[[Extents], Any], name: str, index: int | None = None) -> Computed:
    """The word of a part of a cut."""
    return Computed(Part(cut, name, index))


@dataclass(eq=False, repr=False)
class Product:
    """A size that is the product of others, such as a number of chunks."""

    sizes: Shape

    def __call__(self, extents: Extents) -> int:
        return prod(evaluate(s, extents) for s in self.sizes)


# ---- loop nests


@dataclass(frozen=True)
class Grid:
    """How the work of a nest is cut into chunks."""

    outer: tuple[Size, ...]
    last: Size
    weight: Size  # of an element
    row_weight: Size  # of what its elements share
    whole_rows: bool  # a row is not split, because its reductions are shared by all its elements

    def rows(self, extents: Extents) -> int:
        return evaluate(size_product(self.outer), extents)

    def columns(self, extents: Extents) -> int:
        return evaluate(self.last, extents)

    def column_chunk(self, extents: Extents) -> int:
        """Columns of a chunk, a multiple of 64 unless it is the whole row."""
        columns = max(self.columns(extents), 1)
        if self.whole_rows:
            return columns
        parts = _parts(columns * evaluate(self.weight, extents), thread_count(extents))
        return columns if parts == 1 else -(-columns // (64 * parts)) * 64

    def column_chunks(self, extents: Extents) -> int:
        return max(-(-self.columns(extents) // self.column_chunk(extents)), 1)

    def row_chunk(self, extents: Extents) -> int:
        a_row = self.column_chunk(extents) * evaluate(self.weight, extents) + evaluate(self.row_weight, extents)
        rows = max(self.rows(extents), 1)
        return -(-rows // min(_parts(rows * a_row, thread_count(extents)), rows))

    def chunks(self, extents: Extents) -> int:
        rows = self.rows(extents)
        if rows == 0 or self.columns(extents) == 0:
            return 0
        return -(-rows // self.row_chunk(extents)) * self.column_chunks(extents)


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
