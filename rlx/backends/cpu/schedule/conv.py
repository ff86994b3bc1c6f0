"""How convolutions, as products of gathered windows or of windows where they lie, are cut into chunks: see `base`."""

from __future__ import annotations

from rlx.backends.cpu.schedule.arguments import Extents, thread_count
from rlx.backends.cpu.schedule.balance import shares, wants_shares
from rlx.backends.cpu.schedule.base import aligned, pieces
from rlx.backends.cpu.schedule.matmul import (
    COPY_PAD,
    K_BLOCK,
    TILE_ROWS,
    ProductParts,
    by_tiles,
    k_block,
    low_chunks,
    row_limit,
    tile_chunking,
    tile_room,
)
from rlx.backends.cpu.target import Rates
from rlx.ir.shape import Shape, Size, evaluate
from rlx.records import dataclass

__all__ = [
    "ConvParts",
    "ConvSchedule",
    "DirectParts",
    "ImplicitGemmSchedule",
    "conv_by_tiles",
    "even_panels",
]

TURNED = 48  # pixels of a part whose results are put into planes: whole tiles, and whole lines of the cache


def conv_by_tiles(pixels: int, outputs: int, depth: int) -> bool:
    """Whether a convolution's product is computed by tile registers where there are any: fewer than by `by_tiles`.

    Where cores have used tile registers they run all code 8 to 10 % slower for some 100 us, which takes back what short
    kernels gain by them; and where rows are few, splitting all of them on each core, half of which come from another
    core's cache, takes as long as the products: many outputs of a small depth are worth tiles sooner, and those that
    are cut into chunks of few pixels, which are split beside the products.
    """
    if pixels > TILE_ROWS and outputs >= 96 and depth >= 128 and low_chunks(pixels, outputs, depth):
        return True
    enough = pixels >= 96 or pixels * outputs >= 96 * 1024
    least = 20e6 if outputs >= 4 * depth else 30e6  # operations
    return enough and outputs >= 96 and by_tiles(pixels, outputs, depth) and 2 * pixels * outputs * depth >= least


def even_panels(panels: int, parts: int, copies: int) -> int:
    """Panels of a chunk at most, for about so many parts: an even number of chunks, where it is split at all."""
    chunk = -(-panels // parts)
    if parts == 1:
        return chunk
    counts = {size: -(-panels // size) for size in range(chunk // 2 + 1, min(2 * chunk, panels))}
    even = [size for size, count in counts.items() if copies * count % 2 == 0]
    return min(even, key=lambda size: (abs(counts[size] - -(-panels // chunk)), counts[size], size), default=chunk)


def even_blocks(blocks: int, limit: int) -> int:
    """Blocks of pixels, one more if they are odd: two threads then have the same half of an image in all layers.

    What a core reads from the other one's cache takes several times as long as from its own.
    """
    return blocks + 1 if blocks % 2 and 1 < blocks < limit else blocks


@dataclass(frozen=True)
class ConvParts(ProductParts):
    """How a convolution is split: chunk = (pixel block * groups + group) * panel blocks + panel block.

    Rows are pixels. Windows that are gathered lie in scratch before the sums.
    """

    a_step: int  # from window to window
    part: int  # pixels that are computed from windows to results before the next ones


@dataclass(eq=False, repr=False)
class ConvSchedule:
    """The chunks of a convolution as a product, by tiles of `rows` pixels and panels of `width` elements of `size`.

    `in_image` is the step from window to window where all of them lie in the image, else None; `in_place`: sums are
    stored where the result is; `tiles`: there are tile registers for them.
    """

    outputs: Size
    depth: Size
    pixels: Size
    groups: int
    size: int
    width: int
    rows: int
    in_image: Size | None
    in_place: bool
    rates: Rates
    tiles: bool = False

    MOST = 100e-6  # seconds of products of a chunk at most
    LEAST = 7.5e-6  # and where there are few
    GATHERED = 384 * 1024  # bytes of windows of one chunk
    FEW_WEIGHTS = 128 * 1024  # bytes that are read again and again without leaving the caches
    MANY_WEIGHTS = 1024 * 1024  # bytes that are better read seldom: for PIXELS pixels
    PIXELS = 144
    PART = 20 * 1024  # bytes of the windows and results of a part, which stay in L1
    TILE_PART = 1024 * 1024  # bytes of the windows of a part that is computed by tiles

    def __call__(self, extents: Extents) -> ConvParts:
        outputs, depth, pixels = (evaluate(s, extents) for s in (self.outputs, self.depth, self.pixels))
        if self.tiles and conv_by_tiles(pixels, outputs, depth):
            return self._by_tiles(outputs, depth, pixels, extents)
        size, in_image, groups, rates = self.size, self.in_image, self.groups, self.rates
        panels = max(-(-outputs // self.width), 1)
        a_pixel = max(2.0 * depth * panels * self.width * size / 4, 1.0)
        wanted = pieces(a_pixel * pixels * groups, self.MOST * rates.flops, self.LEAST * rates.flops)
        least = 2 * self.rows
        if in_image is not None:
            most = row_limit(rates, depth, panels * self.width, size)
        else:
            many = depth * panels * self.width * size > self.MANY_WEIGHTS
            most = self.PIXELS if many else int(self.MOST * rates.flops / a_pixel)
            most = max(min(most, self.GATHERED // max(depth * size, 1)), least)
        limit = -(-pixels // least)
        blocks = even_blocks(max(-(-pixels // most), 1), limit)
        # the windows of pixels are gathered again for each block of panels
        panel_blocks = max(min(-(-wanted // (blocks * groups)), panels // (1 if in_image is not None else 8)), 1)
        blocks = even_blocks(max(min(-(-wanted // (panel_blocks * groups)), limit), blocks), limit)
        chunk = max(-(-pixels // blocks), 1)
        whole = -(-chunk // self.rows) * self.rows
        if blocks > 1 and whole - chunk <= chunk // 32:  # else some thread has more to do by that
            chunk = whole
        blocks = max(-(-pixels // chunk), 1)
        panel_chunk = even_panels(panels, panel_blocks, blocks * groups)
        threads = thread_count(extents)
        if wants_shares(blocks * groups * -(-panels // panel_chunk), threads):

            def cost(some: int, columns: int) -> float:
                gathered = 0 if in_image is not None else some * depth * size / rates.copy
                read = columns * self.width * (depth / rates.read + some / rates.write) * size
                return (some + 1) * a_pixel * columns / panels / rates.flops + gathered + read

            chunk, panel_chunk = shares(pixels, panels, threads, cost, copies=groups, most_rows=chunk)
            blocks = max(-(-pixels // chunk), 1)
        panel_blocks = -(-panels // panel_chunk)
        part = chunk
        columns = panel_chunk * self.width
        if depth * columns * size <= self.FEW_WEIGHTS:
            whole = least if self.in_place else TURNED
            part = min(max(self.PART // ((depth + columns) * size) // whole, 1) * whole, chunk)
        if in_image is None:
            a_step = depth + (COPY_PAD if depth * size % 2048 == 0 else 0)
            gathered = aligned(part * a_step * size + 64)
            copied = False
        else:
            a_step, gathered = evaluate(in_image, extents), 0
            copied = a_step * size % 4096 == 0 and depth > 0 and chunk > 12 and panel_chunk >= 16
        sums = 0 if self.in_place else aligned(part * columns * size)
        copy = aligned(part * (k_block(depth, K_BLOCK) + COPY_PAD) * size) if copied else 0
        count = blocks * groups * panel_blocks if pixels and outputs else 0
        place = gathered + sums if copied else -1
        return ConvParts(chunk, panel_chunk, count, gathered, place, gathered + sums + copy, K_BLOCK, a_step, part)

    def _by_tiles(self, outputs: int, depth: int, pixels: int, extents: Extents) -> ConvParts:
        """The chunks of a product by tile registers."""
        gathers, threads = self.in_image is None, thread_count(extents)
        made = tile_chunking(self.rates.tiles, pixels, outputs, depth, self.groups, threads, gathers=gathers)
        part, columns = made.row_chunk, made.panel_chunk * self.width
        if gathers:
            most = max(self.TILE_PART // (depth * self.size) // TILE_ROWS, 1) * TILE_ROWS
            part = -(-part // -(-part // most)) if part else 0
        a_step = depth if self.in_image is None else evaluate(self.in_image, extents)
        gathered = aligned(part * depth * self.size + 64) if gathers else 0
        sums = 0 if self.in_place else aligned(part * columns * self.size)
        scratch = gathered + sums + tile_room(part, depth)
        cut = (made.row_chunk, made.panel_chunk, made.chunks)
        return ConvParts(*cut, gathered, gathered + sums, scratch, 0, a_step, part)


@dataclass(frozen=True)
class DirectParts:
    """How a convolution is split: chunk = block of rows of results * panel blocks + panel block."""

    row_chunk: int
    panel_chunk: int
    chunks: int
    padded: int  # pixels of a copied row
    copied: int  # from copied row to copied row in elements; 0: none is copied
    piece_step: int  # between the pieces of a window of copied rows
    group: int  # pieces, and steps of each, of a block of sums
    steps: int
    part: int  # pixels that are computed to results before the next ones
    ends: tuple[int, ...]  # of the parts of a worker's scratch: offsets, copies, sums


@dataclass(eq=False, repr=False)
class ImplicitGemmSchedule:
    """The chunks of a convolution that reads its windows in rows; `sizes`: batch, channels, outputs, height, width.

    Channels and outputs are those of a group; chunk = (block of rows * groups + group) * panel blocks + panel block.
    `in_image`: no row is copied; `in_place`: sums are stored where the result is. Height and width are the results'.
    """

    sizes: Shape
    kernel: tuple[Size, Size]
    strides: tuple[int, int]
    dilation: int  # of rows
    size: int
    width: int
    in_image: bool
    in_place: bool
    rates: Rates
    groups: int = 1
    apart: int = 1  # dilation of columns: columns that far apart are copied next to each other

    MOST, LEAST = ConvSchedule.MOST, ConvSchedule.LEAST
    FEW_WEIGHTS = 128 * 1024  # bytes that are read again and again without leaving the caches
    MANY_WEIGHTS = 1024 * 1024  # bytes that are better read seldom
    COPIES = (192 * 1024, 512 * 1024)  # bytes of a chunk with fewer and with many weights
    PART = 16 * 1024  # bytes of the results of a part, which stay in L1
    TILES = 24  # a part

    def __call__(self, extents: Extents) -> DirectParts:
        batch, channels, outputs, height, width = (evaluate(s, extents) for s in self.sizes)
        kernel_h, kernel_w = (evaluate(s, extents) for s in self.kernel)
        stride_h, stride_w = self.strides
        size, run, rows = self.size, kernel_w * channels, batch * height
        reach = (kernel_h - 1) * self.dilation + 1
        padded = max((width - 1) * stride_w + (kernel_w - 1) * self.apart + 1, 0)
        padded = -(-padded // self.apart) * self.apart
        line = padded * channels + (COPY_PAD if padded * channels * size % 2048 == 0 else 0)
        more = max(reach - stride_h, 0)  # rows of an image beyond those that its first pixels step through
        panels = max(-(-outputs // self.width), 1)
        weights = kernel_h * run * panels * self.width * size
        a_row = max(2.0 * kernel_h * run * panels * self.width * width * size / 4, 1.0)
        most, least = (seconds * self.rates.flops for seconds in (self.MOST, self.LEAST))
        wanted = -(-pieces(a_row * rows * self.groups, most, least) // self.groups)
        limit = rows
        if not self.in_image:
            room = self.COPIES[weights > self.MANY_WEIGHTS] // max(line * size, 1)
            image = height * stride_h + more
            limit = max(room // image * height if room >= image > 0 else (room - more) // stride_h, 1)
        blocks = max(-(-rows // max(limit, 1)), 1)
        panel_blocks = 1
        if weights > 2 * self.FEW_WEIGHTS:
            panel_blocks = max(min(-(-wanted // blocks), panels // 2), 1)
        blocks = min(max(-(-wanted // panel_blocks), blocks), max(rows, 1))
        if blocks * panel_blocks % 2 and 1 < blocks < rows:
            blocks += 1
        row_chunk = max(-(-rows // blocks), 1)
        panel_chunk = even_panels(panels, panel_blocks, blocks)
        threads = thread_count(extents)
        if wants_shares(blocks * self.groups * -(-panels // panel_chunk), threads):

            def cost(some: int, columns: int) -> float:
                copied = 0 if self.in_image else (some * stride_h + more) * line * size / self.rates.copy
                read = weights * columns / panels / self.rates.read
                return some * a_row * columns / panels / self.rates.flops + copied + read

            row_chunk, panel_chunk = shares(rows, panels, threads, cost, copies=self.groups, most_rows=row_chunk)
        blocks = -(-rows // row_chunk)
        panel_blocks = -(-panels // panel_chunk)
        pixels, columns = row_chunk * width, panel_chunk * self.width
        taken = pixels
        if weights // panel_blocks <= self.FEW_WEIGHTS:
            whole = self.TILES if self.in_place else TURNED
            taken = max(self.PART // (columns * size) // whole, 1) * whole
        group = max(K_BLOCK // max(run, 1), 1)
        ends, end = [], 0
        images = min(-(-(row_chunk - 1) // max(height, 1)) + 1, max(batch, 1))
        copies = 0 if self.in_image else (row_chunk * stride_h + images * more) * line * size + 64
        for part in (8 * pixels, copies, 0 if self.in_place else min(taken, pixels) * columns * size):
            end += aligned(part)
            ends.append(end)
        count = blocks * self.groups * panel_blocks if rows and width and outputs else 0
        copied = 0 if self.in_image else line
        step = self.dilation * line
        steps = k_block(run, K_BLOCK) if run > K_BLOCK else max(run, 1)
        return DirectParts(row_chunk, panel_chunk, count, padded, copied, step, group, steps, taken, tuple(ends))
