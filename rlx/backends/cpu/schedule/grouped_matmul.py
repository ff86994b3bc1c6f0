"""How a product by groups of rows is cut into chunks: by its sizes only, never by where the rows go."""

from __future__ import annotations

from typing import NamedTuple

from rlx.backends.cpu.schedule.arguments import Extents
from rlx.backends.cpu.schedule.base import aligned
from rlx.backends.cpu.schedule.matmul import COPY_PAD, PANEL_BYTES
from rlx.backends.cpu.target import Rates
from rlx.ir.shape import Size, evaluate
from rlx.records import dataclass

__all__ = ["GroupParts", "GroupedMatmulSchedule"]

ROWS = 72  # of a group that are copied side by side
FETCHED = 2 << 20  # bytes of panels of a chunk, which stay in L2
SECONDS = 60e-6  # of a chunk
LEAST_SHARED = 16  # panels for which it pays to copy rows side by side


class GroupParts(NamedTuple):
    """Chunk = group * panel_blocks + panel block. Scratch holds rows of x, sums, panels, and some decoded."""

    panel_chunk: int
    panel_blocks: int
    chunks: int
    sums: int
    panels: int
    decoded: int
    scratch: int


@dataclass(eq=False, repr=False)
class GroupedMatmulSchedule:
    """The chunks of `rows` rows [k] times the matrices [k, n] of `experts`, of elements of `size` bytes.

    `decodes`: two panels at a time are decoded to scratch.
    """

    rows: Size
    experts: Size
    n: Size
    k: Size
    size: int
    rates: Rates
    decodes: bool = False

    def __call__(self, extents: Extents) -> GroupParts:
        rows, experts, n, k = (evaluate(s, extents) for s in (self.rows, self.experts, self.n, self.k))
        width, groups = PANEL_BYTES // self.size, min(rows, experts)
        panels, each = max(-(-n // width), 1), -(-rows // max(groups, 1))
        # weights are read once, as fast as they could be copied
        products = 2.0 * each * k * width / self.rates.flops * (self.size / 4)
        seconds = max(k * PANEL_BYTES / self.rates.copy, products, 1e-9)
        wanted = max(int(SECONDS / seconds), LEAST_SHARED if each > 1 else 1)
        most = max(FETCHED // max(k * PANEL_BYTES, 1), 1)
        blocks = -(-panels // min(wanted, most, panels))
        chunk = -(-panels // blocks)
        blocks = -(-panels // chunk)
        held = min(rows, ROWS)
        sums = aligned(held * (k + COPY_PAD) * self.size)
        fetched = sums + held * chunk * PANEL_BYTES
        chunks = groups * blocks if n else 0
        decoded = fetched + chunk * k * PANEL_BYTES
        return GroupParts(chunk, blocks, chunks, sums, fetched, decoded, decoded + 2 * k * PANEL_BYTES * self.decodes)
