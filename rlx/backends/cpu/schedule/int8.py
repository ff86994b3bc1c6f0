"""How convolutions and products of bytes are cut into chunks: see `base`."""

from __future__ import annotations

from rlx.backends.cpu.schedule.arguments import Extents, thread_count
from rlx.backends.cpu.schedule.balance import shares, wants_shares
from rlx.backends.cpu.schedule.base import aligned, pieces
from rlx.backends.cpu.schedule.conv import ConvParts
from rlx.backends.cpu.target import Rates
from rlx.ir.shape import Size, evaluate
from rlx.records import dataclass

__all__ = ["Int8Schedule"]


@dataclass(eq=False, repr=False)
class Int8Schedule:
    """The chunks of a convolution of bytes, by tiles of `rows` pixels and panels of `width` outputs.

    `depth` is in whole steps of k; `in_image` as in `ConvSchedule`; `direct`: results take no scratch.
    """

    outputs: Size
    depth: Size
    pixels: Size
    groups: int
    rows: int
    width: int
    in_image: Size | None
    direct: bool
    rates: Rates

    @property
    def fast(self) -> bool:
        """Whether starting a chunk and what cores read of each other weigh more than products."""
        return self.rates.byte_products > 100e9

    MOST = 100e-6  # seconds of a chunk at most
    FEW_PIXELS, SOME_PIXELS = 256, 128
    PART = 24 * 1024  # bytes of the windows and sums of a part

    def __call__(self, extents: Extents) -> ConvParts:
        outputs, depth, pixels = (evaluate(s, extents) for s in (self.outputs, self.depth, self.pixels))
        groups, gathers, rates = self.groups, self.in_image is None, self.rates
        panels = max(-(-outputs // self.width), 1)

        def cost(some: int, columns: int) -> float:
            gathered = depth * some / rates.gather if gathers else 0.0
            return some * columns * self.width * (depth / rates.byte_products + rates.byte_result) + gathered

        wanted = pieces(cost(pixels, panels) * groups, self.MOST, 5e-6 if self.fast else 10e-6)
        # few pixels are not split: weights would be read again, but what each core reads and writes is its own
        few = pixels <= self.FEW_PIXELS and not (self.fast and pixels >= self.SOME_PIXELS)
        panel_blocks = 1 if gathers or not few else max(min(-(-wanted // groups), panels), 1)
        panel_chunk = -(-panels // panel_blocks)
        panel_blocks = -(-panels // panel_chunk)
        blocks = max(min(-(-wanted // (panel_blocks * groups)), -(-pixels // (2 * self.rows))), 1)
        chunk = max(-(-pixels // blocks), 1)
        if blocks > 1:
            chunk = -(-chunk // self.rows) * self.rows
        blocks = max(-(-pixels // chunk), 1)
        threads = thread_count(extents)
        if wants_shares(blocks * groups * panel_blocks, threads):

            def read(some: int, columns: int) -> float:
                return cost(some, columns) + columns * self.width * depth / rates.read

            chunk, panel_chunk = shares(pixels, panels, threads, read, copies=groups, most_rows=chunk)
            blocks, panel_blocks = max(-(-pixels // chunk), 1), -(-panels // panel_chunk)
        columns = panel_chunk * self.width
        part = chunk
        if gathers or not self.direct:
            line = (depth if gathers else 0) + (columns if self.direct else 4 * columns)
            part = min(max(self.PART // line // self.rows, 2) * self.rows, chunk)
        a_step = depth if self.in_image is None else evaluate(self.in_image, extents)
        gathered = aligned(part * depth + 64) if gathers else 0
        sums = 0 if self.direct else aligned(part * columns * 4)
        count = blocks * groups * panel_blocks if pixels and outputs else 0
        return ConvParts(chunk, panel_chunk, count, gathered, -1, gathered + sums, depth, a_step, part)
