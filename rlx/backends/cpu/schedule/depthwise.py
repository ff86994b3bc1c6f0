"""How depthwise convolutions are cut into chunks: see `base`."""

from __future__ import annotations

from rlx.backends.cpu.schedule.arguments import Extents, thread_count
from rlx.backends.cpu.schedule.balance import shares, wants_shares
from rlx.backends.cpu.schedule.base import pieces
from rlx.backends.cpu.target import Rates
from rlx.ir.shape import Shape, evaluate
from rlx.records import dataclass

__all__ = ["DepthwiseSchedule", "InnerColumns"]


@dataclass(frozen=True)
class DepthwiseParts:
    """How it is cut: chunk = (image * strips + strip of rows) * blocks + block of channels."""

    rows: int
    strips: int
    block: int
    blocks: int
    chunks: int


@dataclass(eq=False, repr=False)
class DepthwiseSchedule:
    """The chunks of a depthwise convolution of `taps` weights a channel; `sizes`: batch, channels, height, width."""

    sizes: Shape
    taps: int
    lanes: int
    rates: Rates

    MOST, LEAST = 50e-6, 4e-6  # seconds of a chunk at most, and at least where there are few
    LOW = 8  # rows of images that are cut by channels first

    def __call__(self, extents: Extents) -> DepthwiseParts:
        batch, channels, height, width = (evaluate(s, extents) for s in self.sizes)
        vectors = -(-channels // self.lanes)
        a_row = max(vectors * width * (self.taps + 4), 1)
        most, least = (seconds * self.rates.taps for seconds in (self.MOST, self.LEAST))
        wanted = -(-pieces(a_row * height * batch, most, least) // max(batch, 1))
        blocks = max(min(wanted, vectors // 8), 1) if height < self.LOW else 1
        block = -(-vectors // blocks) * self.lanes
        blocks = max(-(-channels // block), 1)
        strips = max(min(-(-wanted // blocks), height), 1)
        rows, blocks = self.balanced(batch, height, vectors, strips, blocks)
        block = -(-vectors // blocks) * self.lanes
        threads = thread_count(extents)
        if wants_shares(batch * -(-height // rows) * blocks, threads):

            def cost(some: int, columns: int) -> float:
                return some * columns * width * (self.taps + 4) / self.rates.taps

            rows, block = shares(height, vectors, threads, cost, copies=batch, most_rows=rows, least_panels=4)
            block *= self.lanes
            blocks = max(-(-channels // block), 1)
        strips = max(-(-height // rows), 1)
        return DepthwiseParts(rows, strips, block, blocks, batch * strips * blocks if height and width else 0)

    def balanced(self, batch: int, height: int, vectors: int, strips: int, blocks: int) -> tuple[int, int]:
        """Rows and blocks of channels for about so many chunks, with which 2 and 4 threads are soonest done."""
        found = []
        for split in (blocks, 2 * blocks):
            if split == blocks or (vectors % split == 0 and vectors // 8 >= split):
                most = -(-height // max(strips * blocks // split, 1))
                found += [(rows, split) for rows in range(most, most // 2, -1)]

        def taken(choice: tuple[int, int]) -> float:
            rows, split = choice
            count = batch * -(-height // rows) * split
            return sum(-(-count // threads) * rows / split for threads in (2, 4))

        return min(found, key=taken, default=(1, blocks))


@dataclass(frozen=True)
class Columns:
    first: int
    stop: int


@dataclass(eq=False, repr=False)
class InnerColumns:
    """The columns whose windows lie inside the image; `sizes`: padding, width, output's width, taps."""

    sizes: Shape
    stride: int
    dilation: int

    def __call__(self, extents: Extents) -> Columns:
        pad, width, out, taps = (evaluate(s, extents) for s in self.sizes)
        reach = (taps - 1) * self.dilation
        first = min(max(-(-pad // self.stride), 0), out)
        stop = min((width - 1 - reach + pad) // self.stride + 1, out)
        return Columns(first, max(stop, first))
