"""How convolutions by Winograd's transforms are cut into chunks: see `base`."""

from __future__ import annotations

from math import prod

from rlx.backends.cpu.schedule.arguments import Extents, thread_count
from rlx.backends.cpu.schedule.balance import shares, wants_shares
from rlx.backends.cpu.schedule.base import aligned, pieces
from rlx.backends.cpu.schedule.conv import even_panels
from rlx.backends.cpu.target import Rates
from rlx.ir.shape import Shape, evaluate
from rlx.records import dataclass

__all__ = ["WinogradSchedule"]


@dataclass(frozen=True)
class WinogradParts:
    """How the work is split: chunk = (block of tiles * groups + group) * panel blocks + block of panels."""

    tiles_h: int
    tiles_w: int
    tiles: int
    tile_chunk: int
    panel_chunk: int
    chunks: int
    lda: int
    ldc: int
    column_step: int
    product_step: int
    ends: tuple[int, ...]  # of the parts of a worker's scratch: zeros, columns, products, sums


@dataclass(eq=False, repr=False)
class WinogradSchedule:
    """The chunks of a convolution by tiles of m outputs of n positions; `sizes`: batch, channels, outputs, plane.

    Channels and outputs are those of a group.
    `kept`: the tiles whose results wait for their epilogue, 0 where it is computed in the place of the results.
    """

    m: tuple[int, int]
    n: tuple[int, int]
    sizes: Shape
    kept: int
    rates: Rates
    groups: int = 1

    WIDTH = 16  # outputs of a panel of weights
    MOST, LEAST = 100e-6, 20e-6 / 3  # seconds of a chunk at most, and at least where there are few
    PANELS = 6  # at least, of the weights in a chunk: each block of them transforms the image again
    TILES = (12, 48)  # of a chunk: fewer read the weights too often, more leave the caches
    MANY_WEIGHTS = 1024 * 1024  # bytes that are better read once

    def __call__(self, extents: Extents) -> WinogradParts:
        batch, channels, outputs, height, width = (evaluate(s, extents) for s in self.sizes)
        lanes, positions = self.WIDTH, prod(self.n)
        down, across = -(-height // self.m[0]), -(-width // self.m[1])
        tiles, panels = batch * down * across, -(-outputs // lanes)
        a_tile = positions * channels * panels
        longest, least = (seconds * self.rates.transforms for seconds in (self.MOST, self.LEAST))
        wanted = -(-pieces(tiles * a_tile * self.groups, longest, least) // self.groups)
        many = 64 * a_tile > self.MANY_WEIGHTS
        most = self.TILES[1] if many else min(max(int(longest) // max(a_tile, 1), self.TILES[0]), self.TILES[1])
        blocks = max(-(-tiles // most), 1)
        panel_blocks = max(min(-(-wanted // blocks), panels // self.PANELS), 1) if outputs % self.WIDTH == 0 else 1
        least = self.TILES[0] if many else self.TILES[0] // 2
        blocks = max(min(-(-wanted // panel_blocks), tiles // least), blocks)
        if blocks * panel_blocks == 1 < wanted and panels > 1 and outputs % self.WIDTH == 0:
            panel_blocks = 2  # each reads half of the weights; that both transform the image costs less than waiting
        if blocks * panel_blocks % 2 and 1 < blocks < tiles:
            blocks += 1
        tile_chunk = max(-(-tiles // blocks), 1)
        panel_chunk = even_panels(panels, panel_blocks, -(-tiles // tile_chunk))
        threads = thread_count(extents)
        if wants_shares(-(-tiles // tile_chunk) * self.groups * -(-panels // panel_chunk), threads):

            def cost(some: int, columns: int) -> float:  # products, transforms of the image, and weights read
                return positions * channels * (some * columns + some / 2 + 5 * columns) / self.rates.transforms

            least = 1 if outputs % self.WIDTH == 0 else panels
            copies, most = self.groups, tile_chunk
            tile_chunk, panel_chunk = shares(
                tiles, panels, threads, cost, copies=copies, most_rows=most, least_panels=least
            )
        blocks = -(-tiles // tile_chunk)
        panel_blocks = -(-panels // panel_chunk)
        lda = channels + 16 if channels % 128 == 0 else channels
        ldc = panel_chunk * lanes + (16 if panel_chunk % 8 == 0 else 0)
        column_step, product_step = (_odd_lines(tile_chunk * step) for step in (lda, ldc))
        sums = 4 * prod(self.m) * panel_chunk * lanes * self.kept
        ends, end = [], 0
        for size in (4 * channels, 4 * positions * column_step, 4 * positions * product_step, sums):
            end += aligned(size)
            ends.append(end)
        count = blocks * self.groups * panel_blocks
        split = (down, across, tiles, tile_chunk, panel_chunk, count)
        return WinogradParts(*split, lda, ldc, column_step, product_step, tuple(ends))


def _odd_lines(count: int) -> int:
    """At least so many elements, an odd number of cache lines: the positions of a tile are in different cache sets."""
    return (-(-count // 16) | 1) * 16
