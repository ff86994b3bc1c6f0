"""How a depthwise convolution whose image is made on the way is cut into chunks."""

from __future__ import annotations

from rlx.backends.cpu.schedule.arguments import FEW_THREADS, Extents, thread_count
from rlx.backends.cpu.schedule.base import aligned
from rlx.backends.cpu.schedule.conv import ImplicitGemmSchedule
from rlx.backends.cpu.schedule.matmul import PANEL_BYTES
from rlx.backends.cpu.target import Rates
from rlx.ir.shape import Shape, Size, evaluate
from rlx.records import dataclass

__all__ = ["FusedDepthwiseSchedule", "RingParts"]

ROOM = 192 * 1024  # bytes of a ring of rows that has several panels of channels
MOST = 400e-6  # seconds of a chunk of several rows
SPREAD = 0.15  # of a chunk's time by which some take longer
START = 1e-6
LONE = 0.3  # of its time that a panel takes longer by itself, where tiles of products take several
WIDTH = PANEL_BYTES // 4  # channels of a panel of f32


@dataclass(frozen=True)
class RingParts:
    """Chunk = (image * strips + strip of rows) * blocks + block of channels."""

    rows: int
    strips: int
    block: int  # channels
    blocks: int
    chunks: int
    line: int  # elements of a row of the ring
    offsets: int  # places in scratch after the ring, for windows that are read in rows
    copies: int
    scratch: int


@dataclass(eq=False, repr=False)
class FusedDepthwiseSchedule:
    """The chunks of a depthwise convolution; `sizes`: batch, channels, height and width of the image and the results.

    An element of the image sums `depth` products; `windows` is how they are read, where they are those of windows. A
    window on the image covers `reach` rows, `stride` from one to the next; a ring holds `ring` rows. Tiles of products
    take `together` panels.
    """

    sizes: Shape
    depth: Size
    taps: int
    reach: int
    stride: int
    ring: int
    together: int
    rates: Rates
    windows: ImplicitGemmSchedule | None = None

    def __call__(self, extents: Extents) -> RingParts:
        batch, channels, height, width, out_height, out_width = (evaluate(s, extents) for s in self.sizes)
        depth, panels = evaluate(self.depth, extents), max(channels // WIDTH, 1)
        threads, rates = thread_count(extents), self.rates

        def cost(rows: int, some: int) -> float:
            """Seconds of a chunk: each block of channels reads the source again, rows between strips are made twice.

            The last block may have fewer panels than `some`: a chunk is the mean of all.
            """
            blocks = -(-panels // some)
            lone = (some % self.together * (blocks - 1) + (panels - some * (blocks - 1)) % self.together) / blocks
            mean = panels / blocks
            lines = min((rows - 1) * self.stride + self.reach, height)
            made = lines * width
            copied = 0 if self.windows is None else lines * self.windows.strides[0] * self.windows(extents).copied
            tiled = mean + LONE * lone
            products = made * tiled * WIDTH * (2.0 * depth / rates.flops + 4 / rates.read)
            read = made * depth * 4 / rates.near + copied * 4 / rates.copy
            return products + read + rows * out_width * mean * (self.taps + 4) / rates.taps + START

        def taken(rows: int, some: int) -> float:
            count, each = batch * -(-out_height // rows) * -(-panels // some), cost(rows, some)
            over = max(each - MOST, 0.0) if rows > 1 else 0.0
            turns = (threads,) if threads > FEW_THREADS else (2, 4)
            return sum((-(-count // n) + SPREAD) * n * each for n in turns) / len(turns) + count * over

        most = max(ROOM // max(self.ring * width * PANEL_BYTES, 1), 1)
        sizes = [-(-panels // n) for n in range(1, panels + 1)]
        blocks = dict.fromkeys((*sizes, *(-(-n // self.together) * self.together for n in sizes)))
        strips = dict.fromkeys(-(-out_height // n) for n in range(1, max(out_height, 1) + 1))
        choices = [(rows, some) for some in blocks if some <= most for rows in strips if rows]
        # so that two threads have the same half of the image in all layers
        choices = [c for c in choices if batch * -(-out_height // c[0]) % 2 == 0] or choices
        rows, some = min(choices, key=lambda c: taken(*c), default=(1, 1))
        count = (-(-out_height // rows), -(-panels // some))
        line = width * some * WIDTH
        chunks = batch * count[0] * count[1] if out_height and out_width else 0
        offsets = copies = scratch = aligned(4 * self.ring * line)
        if self.windows is not None:
            extent = (evaluate(self.windows.kernel[0], extents) - 1) * self.windows.dilation + 1
            lines = (self.ring - 1) * self.windows.strides[0] + extent
            copies = offsets + aligned(8 * self.ring * width)
            scratch = copies + aligned(4 * lines * self.windows(extents).copied + 64)
        return RingParts(rows, count[0], some * WIDTH, count[1], chunks, line, offsets, copies, scratch)
