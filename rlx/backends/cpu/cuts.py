"""How the work of kernels is cut into chunks: by their extents, and finer for many threads.

Objects of these classes are all that is stored of such a choice, so that stored code needs nothing of what emits code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from typing import Any

from rlx.backends.cpu.shares import SPREAD, TURNS, shares, wants_shares
from rlx.backends.cpu.words import FEW_THREADS, Computed, Extents, thread_count
from rlx.ir.shape import Shape, Size, evaluate, size_product
from rlx.records import dataclass

__all__ = [
    "AttentionCut", "ByteCut", "Chunking", "ConvCut", "DepthwiseCut", "DirectCut", "Grid", "InnerColumns", "KeyChunks",
    "Part", "Product", "ProductCut", "WinogradCut", "chunking", "k_block", "part",
]  # fmt: skip

COPY_PAD = 16  # elements after each copied row of A: keeps rows off the same cache sets
K_BLOCK = 384  # steps of k of which a sum is made at most before it is added to others
PRODUCT_BLOCK = 128  # the same in a matrix product: two panels of f32 then take 16 KB of L1
PANEL_BYTES = 64  # of a row of a panel
TILE_ROWS = 32  # of a square of sums in tile registers; see rlx.backends.cpu.tile_products
TILE_STEP = 32  # steps of k of a tile of bf16
TILE_PART = 2048  # bytes of a part of 32 rows, or of two panels, for such a step
TILE_STEP_BYTES = 3 * TILE_PART
TILE_BLOCK = 768  # steps of k that parts are made for at most before they are used: they stay in L2
WIDTH = 16  # columns of a panel of f32
MOST_BANDS = 8  # of 32 rows in a chunk, at most
# nanoseconds for a step of k: to split 32 rows, half of which come from another core's cache, for a square of sums, and
# to make parts of two panels beside that and of the first ones
SPLIT, SQUARE, PAIR, FIRST_PAIR = 700, 160, 400, 200
GATHER = 300  # and to gather 32 rows of windows
START_CHUNK = 1000  # nanoseconds
TILE_SPARE = 8192 + 128  # bytes: room for two squares of sums, and for the bits that are seen in two panels
MIN_CHUNKS = 4
MIN_PANELS = 4  # of a chunk of a product that has enough of them
LOOP_COST = 400_000  # simple operations that one chunk of a nest should hold at least: some tens of microseconds
LEAST_LOOP_COST = 100_000  # and where work is cut into a few chunks for several threads
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
    return max(min(even, 2 * cost // LEAST_LOOP_COST), parts)


def pieces(cost: float, most: float, least: float) -> int:
    """Chunks of work: of cost `most` at most, but four where each is `least` then; four or more are multiples of 2."""
    count = max(round(cost / most), min(MIN_CHUNKS, int(cost / least)), 1)
    return count if count <= 2 else -(-count // 2) * 2


# ---- products


def k_block(k: int, most: int = PRODUCT_BLOCK) -> int:
    """Steps of k in one block: about `most`, even blocks, a multiple of 8. The generated code computes the same."""
    blocks = max(-(-k // most), 1)
    return max((-(-k // blocks) + 7) // 8 * 8, 8)


def by_tiles(m: int, n: int, k: int) -> bool:
    """Whether a product of f32 is computed by tile registers where there are any, rather than by fma.

    Making parts of A pays off over many columns, of B over many rows. With fewer of both than this fma is faster, with
    weights in the cache and from memory.
    """
    return m >= 40 and n >= 4 * WIDTH and m * n >= 8192 and k >= 2 * TILE_STEP


def conv_by_tiles(pixels: int, outputs: int, depth: int) -> bool:
    """The same for a convolution's product, which has less of a weight to multiply where there are few pixels.

    Tile registers that were idle take some 20 us to come to their full rate, so short kernels gain nothing by them; and
    where panels are split for few pixels, that takes as long as the products unless the panels are many.
    """
    enough = pixels >= 96 or pixels * outputs >= 96 * 1024
    return enough and outputs >= 96 and by_tiles(pixels, outputs, depth) and 2 * pixels * outputs * depth >= 30e6


def tile_room(rows: int, k: int) -> int:
    """Bytes of scratch for the parts of so many rows of A, and of four panels, in products by tiles."""
    blocks = max(-(-k // TILE_BLOCK), 1)
    block = -(-k // blocks)
    steps = -(-block // TILE_STEP)
    return TILE_SPARE + (2 + -(-rows // TILE_ROWS)) * steps * TILE_STEP_BYTES


@dataclass(frozen=True)
class Chunking:
    """How a product is cut: chunk = (batch * row_blocks + row block) * panel_blocks + panel block."""

    row_chunk: int
    panel_chunk: int
    chunks: int
    copy_bytes: int  # for the COPY_BYTES word
    tile_bytes: int  # room for one block of C, if it goes to scratch
    steps: int = PRODUCT_BLOCK  # for the STEPS word


def row_limit(k: int, columns: int, size: int) -> int:
    """Rows of A in a chunk: 144, or more where those are little work (80 Gflop/s in f32, 10 GB/s of C)."""
    block_time = 144 * columns * (2.0 * k / 80e9 * (size / 4) + size / 10e9)
    return 144 * max(int(40e-6 / max(block_time, 1e-9)), 1)


@functools.lru_cache(1024)
def chunking(m: int, n: int, k: int, batch: int, size: int, threads: int = 1) -> Chunking:
    """Cuts a product of elements of `size` bytes into chunks of 20 to 120 us of one core, less for many threads."""
    width = PANEL_BYTES // size
    panels = max(-(-n // width), 1)
    # 144 rows, or more where those are little work (80 Gflop/s in f32, 10 GB/s of C)
    block_time = 144 * panels * (2.0 * width * k / 80e9 * (size / 4) + 64 / 10e9)
    row_limit = 144 * max(int(40e-6 / block_time), 1)
    row_blocks = max(-(-m // row_limit), 1)
    row_chunk = max(-(-m // row_blocks), 1)
    if row_blocks > 1:
        row_chunk = -(-row_chunk // 6) * 6
    row_blocks = max(-(-m // row_chunk), 1)
    # the same with 40 GB/s of B; some eight chunks, fewer of a small product, more of a large one
    per_panel = 2.0 * row_chunk * width * k / 80e9 * (size / 4) + width * k * size / 40e9
    blocks = row_blocks * batch
    target = min(max(per_panel * panels * blocks / 8, 20e-6), 120e-6)
    wanted = round(per_panel * panels / target)
    # each chunk reads all of A again and starts without prefetched panels, so it takes several of them
    panel_chunk = _panel_chunk(panels, min(wanted, max(panels // MIN_PANELS, MIN_CHUNKS)), blocks)
    if wants_shares(blocks * -(-panels // panel_chunk), threads):

        def cost(rows: int, some: int) -> float:
            read = (rows + some * width) * k * size / 40e9
            return 2.0 * rows * k * some * width / 80e9 * (size / 4) + read + rows * some * PANEL_BYTES / 20e9

        least = min(2, panels) if m > FEW_ROWS else 1  # tiles of two panels
        row_chunk, panel_chunk = shares(m, panels, threads, cost, copies=batch, most_rows=row_chunk, least_panels=least)
        row_blocks = max(-(-m // row_chunk), 1)
    panel_blocks = -(-panels // panel_chunk)
    copy = (k * size) % 4096 == 0 and k > 0 and row_chunk > 12 and panel_chunk >= 16  # else it costs more than it saves
    copy_bytes = -(-row_chunk * (k_block(k) + COPY_PAD) * size // 64) * 64 if copy else 0
    chunks = batch * row_blocks * panel_blocks if m and n else 0
    return Chunking(row_chunk, panel_chunk, chunks, copy_bytes, row_chunk * panel_chunk * 64)


def _panel_chunk(panels: int, parts: int, blocks: int) -> int:
    """Panels of a chunk for about so many parts: the number that leaves 2 and 4 threads the least idle at the end."""
    least = -(-panels // max(min(parts, panels), 1))

    def taken(size: int) -> float:
        count = blocks * -(-panels // size)
        return sum(-(-count // threads) * threads * size for threads in (2, 4))

    return min(range(least, min(max(least * 3 // 2, least), panels) + 1), key=taken)


@functools.lru_cache(1024)
def tile_chunking(m: int, n: int, k: int, batch: int, threads: int = 1, split: int = SPLIT) -> Chunking:
    """Cuts a product by tiles into the chunks with which the threads are soonest done.

    They are few and large: each splits its rows of A, and starts with panels that nothing is computed beside.
    `split` is the time in nanoseconds that 32 rows take for a step of k before they are used.
    """
    bands, pairs, steps = -(-m // TILE_ROWS), -(-n // (2 * WIDTH)), -(-k // TILE_STEP)
    best, found = float("inf"), (max(bands, 1), max(pairs, 1))
    for some in range(min(MOST_BANDS, bands), 0, -1):
        for across in range(1, min(pairs, TURNS * threads) + 1):
            columns = -(-pairs // across)
            count = batch * -(-bands // some) * -(-pairs // columns)
            a_step = some * split + FIRST_PAIR + columns * max(SQUARE * some, PAIR)
            time = (-(-count // threads) + SPREAD) * (START_CHUNK + steps * a_step)
            if time < best:
                best, found = time, (some, columns)
    row_chunk, panel_chunk = min(found[0] * TILE_ROWS, max(m, 1)), 2 * found[1]
    chunks = batch * -(-m // row_chunk) * -(-n // (panel_chunk * WIDTH)) if m and n else 0
    room = tile_room(row_chunk, k)
    return Chunking(row_chunk, panel_chunk, chunks, room, row_chunk * panel_chunk * PANEL_BYTES, 0)


@dataclass(frozen=True)
class ProductParts:
    row_chunk: int
    panel_chunk: int
    copy_bytes: int
    steps: int
    scratch: int
    chunks: int


@dataclass(eq=False, repr=False)
class ProductCut:
    """The chunks of a product [m, k] x [k, n], `count` of them, of elements of `size` bytes; `shape` is the result's.

    `to_scratch`: a block of the result goes there before it is stored. `tiles`: there are tile registers for it.
    """

    m: Size
    n: Size
    k: Size
    count: Size
    size: int
    shape: Shape
    to_scratch: bool
    tiles: bool = False

    def __call__(self, extents: Extents) -> ProductParts:
        rows, columns, depth, matrices = (evaluate(s, extents) for s in (self.m, self.n, self.k, self.count))
        threads = thread_count(extents)
        if self.tiles and by_tiles(rows, columns, depth):
            made = tile_chunking(rows, columns, depth, matrices, threads)
        else:
            threads = max(threads, FEW_THREADS)  # up to so many it is one entry of the table
            made = chunking(rows, columns, depth, matrices, self.size, threads)
        scratch = _aligned(made.copy_bytes + (made.tile_bytes if self.to_scratch else 0))
        chunks = made.chunks if all(evaluate(s, extents) for s in self.shape) else 0
        return ProductParts(made.row_chunk, made.panel_chunk, made.copy_bytes, made.steps, scratch, chunks)


def _aligned(count: int) -> int:
    return -(-count // 64) * 64


# ---- convolutions


def _even(panels: int, parts: int, copies: int) -> int:
    """Panels of a chunk at most, for about so many parts: an even number of chunks, where it is split at all."""
    chunk = -(-panels // parts)
    if parts == 1:
        return chunk
    counts = {size: -(-panels // size) for size in range(chunk // 2 + 1, min(2 * chunk, panels))}
    even = [size for size, count in counts.items() if copies * count % 2 == 0]
    return min(even, key=lambda size: (abs(counts[size] - -(-panels // chunk)), counts[size], size), default=chunk)


@dataclass(frozen=True)
class ConvParts:
    """How a convolution is split: chunk = (pixel block * groups + group) * panel blocks + panel block."""

    pixel_chunk: int
    panel_chunk: int
    chunks: int
    a_step: int
    part: int  # pixels that are computed from windows to results before the next ones
    sums: int  # ends of the parts of scratch: windows, sums, copy
    copy: int
    scratch: int
    steps: int = K_BLOCK  # of k in a block, at most; 0: by tiles, and `copy` is room for what they need


@dataclass(eq=False, repr=False)
class ConvCut:
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
    tiles: bool = False

    FLOPS = 8e6  # of a chunk at most: some 100 us of one core
    LEAST_FLOPS = 0.6e6  # of a chunk, where there are few
    GATHERED = 384 * 1024  # bytes of windows of one chunk
    FEW_WEIGHTS = 128 * 1024  # bytes that are read again and again without leaving the caches
    MANY_WEIGHTS = 1024 * 1024  # bytes that are better read seldom: for MOST pixels
    MOST = 144
    PART = 20 * 1024  # bytes of the windows and results of a part, which stay in L1
    TILE_PART = 1024 * 1024  # bytes of the windows of a part that is computed by tiles

    def __call__(self, extents: Extents) -> ConvParts:
        outputs, depth, pixels = (evaluate(s, extents) for s in (self.outputs, self.depth, self.pixels))
        if self.tiles and conv_by_tiles(pixels, outputs, depth):
            return self._by_tiles(outputs, depth, pixels, extents)
        size, in_image, groups = self.size, self.in_image, self.groups
        panels = max(-(-outputs // self.width), 1)
        a_pixel = max(2.0 * depth * panels * self.width * size / 4, 1.0)
        wanted = pieces(a_pixel * pixels * groups, self.FLOPS, self.LEAST_FLOPS)
        least = 2 * self.rows
        if in_image is not None:
            most = row_limit(depth, panels * self.width, size)
        else:
            many = depth * panels * self.width * size > self.MANY_WEIGHTS
            most = self.MOST if many else int(self.FLOPS / a_pixel)
            most = max(min(most, self.GATHERED // max(depth * size, 1)), least)
        blocks = max(-(-pixels // most), 1)
        # the windows of pixels are gathered again for each block of panels
        panel_blocks = max(min(-(-wanted // (blocks * groups)), panels // (1 if in_image is not None else 8)), 1)
        blocks = max(min(-(-wanted // (panel_blocks * groups)), -(-pixels // least)), blocks)
        if blocks * groups * panel_blocks % 2 and 1 < blocks < -(-pixels // least):
            blocks += 1
        chunk = max(-(-pixels // blocks), 1)
        if blocks > 1:
            chunk = -(-chunk // self.rows) * self.rows
        blocks = max(-(-pixels // chunk), 1)
        panel_chunk = _even(panels, panel_blocks, blocks * groups)
        threads = thread_count(extents)
        if wants_shares(blocks * groups * -(-panels // panel_chunk), threads):

            def cost(some: int, columns: int) -> float:
                gathered = 0 if in_image is not None else some * depth * size / 10e9
                read = columns * self.width * (depth / 40e9 + some / 20e9) * size
                return (some + 1) * a_pixel * columns / panels / 80e9 + gathered + read

            chunk, panel_chunk = shares(pixels, panels, threads, cost, copies=groups, most_rows=chunk)
            blocks = max(-(-pixels // chunk), 1)
        panel_blocks = -(-panels // panel_chunk)
        part = chunk
        columns = panel_chunk * self.width
        if depth * columns * size <= self.FEW_WEIGHTS:
            part = min(max(self.PART // ((depth + columns) * size) // least, 1) * least, chunk)
        if in_image is None:
            a_step = depth + (COPY_PAD if depth * size % 2048 == 0 else 0)
            gathered = _aligned(part * a_step * size + 64)
            copied = False
        else:
            a_step, gathered = evaluate(in_image, extents), 0
            copied = a_step * size % 4096 == 0 and depth > 0 and chunk > 12 and panel_chunk >= 16
        sums = 0 if self.in_place else _aligned(part * columns * size)
        copy = _aligned(part * (k_block(depth, K_BLOCK) + COPY_PAD) * size) if copied else 0
        count = blocks * groups * panel_blocks if pixels and outputs else 0
        parts = (chunk, panel_chunk, count, a_step, part, gathered)
        return ConvParts(*parts, gathered + sums if copied else -1, gathered + sums + copy)

    def _by_tiles(self, outputs: int, depth: int, pixels: int, extents: Extents) -> ConvParts:
        """The chunks of a product by tile registers."""
        gathers, threads = self.in_image is None, max(thread_count(extents), FEW_THREADS)
        made = tile_chunking(pixels, outputs, depth, self.groups, threads, SPLIT + GATHER if gathers else SPLIT)
        part, columns = made.row_chunk, made.panel_chunk * self.width
        if gathers:
            most = max(self.TILE_PART // (depth * self.size) // TILE_ROWS, 1) * TILE_ROWS
            part = min(part, most)
        a_step = depth if self.in_image is None else evaluate(self.in_image, extents)
        gathered = _aligned(part * depth * self.size + 64) if gathers else 0
        sums = 0 if self.in_place else _aligned(part * columns * self.size)
        scratch = gathered + sums + tile_room(part, depth)
        parts = (made.row_chunk, made.panel_chunk, made.chunks, a_step, part, gathered)
        return ConvParts(*parts, gathered + sums, scratch, 0)


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
class DirectCut:
    """The chunks of a convolution that reads its windows in rows; `sizes`: batch, channels, outputs, height, width.

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

    FLOPS = 8e6  # of a chunk at most: some 100 us of one core
    LEAST_FLOPS = 0.6e6
    FEW_WEIGHTS = 128 * 1024  # bytes that are read again and again without leaving the caches
    MANY_WEIGHTS = 1024 * 1024  # bytes that are better read seldom
    COPIES = (192 * 1024, 512 * 1024)  # bytes of a chunk with fewer and with many weights
    PART = 16 * 1024  # bytes of the results of a part, which stay in L1
    TILES = 24  # a part is a multiple of the pixels of all tiles

    def __call__(self, extents: Extents) -> DirectParts:
        batch, channels, outputs, height, width = (evaluate(s, extents) for s in self.sizes)
        kernel_h, kernel_w = (evaluate(s, extents) for s in self.kernel)
        stride_h, stride_w = self.strides
        size, run, rows = self.size, kernel_w * channels, batch * height
        reach = (kernel_h - 1) * self.dilation + 1
        padded = max((width - 1) * stride_w + kernel_w, 0)
        line = padded * channels + (COPY_PAD if padded * channels * size % 2048 == 0 else 0)
        more = max(reach - stride_h, 0)  # rows of an image beyond those that its first pixels step through
        panels = max(-(-outputs // self.width), 1)
        weights = kernel_h * run * panels * self.width * size
        a_row = max(2.0 * kernel_h * run * panels * self.width * width * size / 4, 1.0)
        wanted = pieces(a_row * rows, self.FLOPS, self.LEAST_FLOPS)
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
        panel_chunk = _even(panels, panel_blocks, blocks)
        threads = thread_count(extents)
        if wants_shares(blocks * -(-panels // panel_chunk), threads):

            def cost(some: int, columns: int) -> float:
                copied = 0 if self.in_image else (some * stride_h + more) * line * size / 10e9
                read = weights * columns / panels / 40e9
                return some * a_row * columns / panels / 80e9 + copied + read

            row_chunk, panel_chunk = shares(rows, panels, threads, cost, most_rows=row_chunk)
        blocks = -(-rows // row_chunk)
        panel_blocks = -(-panels // panel_chunk)
        pixels, columns = row_chunk * width, panel_chunk * self.width
        taken = pixels
        if weights // panel_blocks <= self.FEW_WEIGHTS:
            taken = max(self.PART // (columns * size) // self.TILES, 1) * self.TILES
        group = max(K_BLOCK // max(run, 1), 1)
        ends, end = [], 0
        images = min(-(-(row_chunk - 1) // max(height, 1)) + 1, max(batch, 1))
        copies = 0 if self.in_image else (row_chunk * stride_h + images * more) * line * size + 64
        for part in (8 * pixels, copies, 0 if self.in_place else min(taken, pixels) * columns * size):
            end += _aligned(part)
            ends.append(end)
        count = blocks * panel_blocks if rows and width and outputs else 0
        copied = 0 if self.in_image else line
        step = self.dilation * line
        steps = k_block(run, K_BLOCK) if run > K_BLOCK else max(run, 1)
        return DirectParts(row_chunk, panel_chunk, count, padded, copied, step, group, steps, taken, tuple(ends))


@dataclass(eq=False, repr=False)
class ByteCut:
    """The chunks of a convolution of bytes, by tiles of `rows` pixels and panels of `width` outputs.

    `depth` is in whole steps of k; `in_image` as in `ConvCut`; `direct`: results take no scratch. `speed` is that of
    products (a second), `result` the seconds that one result takes besides.
    """

    outputs: Size
    depth: Size
    pixels: Size
    groups: int
    rows: int
    width: int
    in_image: Size | None
    direct: bool
    speed: float
    result: float

    @property
    def fast(self) -> bool:
        """Whether starting a chunk and what cores read of each other weigh more than products."""
        return self.speed > 100e9

    MOST = 100e-6  # seconds of a chunk at most
    FEW_PIXELS, SOME_PIXELS = 256, 128
    PART = 24 * 1024  # bytes of the windows and sums of a part

    def __call__(self, extents: Extents) -> ConvParts:
        outputs, depth, pixels = (evaluate(s, extents) for s in (self.outputs, self.depth, self.pixels))
        groups, gathers = self.groups, self.in_image is None
        panels = max(-(-outputs // self.width), 1)

        def cost(some: int, columns: int) -> float:
            gathered = 0.13e-9 * depth * some if gathers else 0.0
            return some * columns * self.width * (depth / self.speed + self.result) + gathered

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
                return cost(some, columns) + columns * self.width * depth / 40e9

            chunk, panel_chunk = shares(pixels, panels, threads, read, copies=groups, most_rows=chunk)
            blocks, panel_blocks = max(-(-pixels // chunk), 1), -(-panels // panel_chunk)
        columns = panel_chunk * self.width
        part = chunk
        if gathers or not self.direct:
            line = (depth if gathers else 0) + (columns if self.direct else 4 * columns)
            part = min(max(self.PART // line // self.rows, 2) * self.rows, chunk)
        a_step = depth if self.in_image is None else evaluate(self.in_image, extents)
        gathered = _aligned(part * depth + 64) if gathers else 0
        sums = 0 if self.direct else _aligned(part * columns * 4)
        count = blocks * groups * panel_blocks if pixels and outputs else 0
        return ConvParts(chunk, panel_chunk, count, a_step, part, gathered, -1, gathered + sums)


@dataclass(frozen=True)
class DepthwiseParts:
    """How it is cut: chunk = (image * strips + strip of rows) * blocks + block of channels."""

    rows: int
    strips: int
    block: int
    blocks: int
    chunks: int


@dataclass(eq=False, repr=False)
class DepthwiseCut:
    """The chunks of a depthwise convolution of `taps` weights a channel; `sizes`: batch, channels, height, width."""

    sizes: Shape
    taps: int
    lanes: int

    COST = 100_000  # vector operations of one chunk at most: some 50 us
    LEAST_COST = 8_000
    LOW = 8  # rows of images that are cut by channels first

    def __call__(self, extents: Extents) -> DepthwiseParts:
        batch, channels, height, width = (evaluate(s, extents) for s in self.sizes)
        vectors = -(-channels // self.lanes)
        a_row = max(vectors * width * (self.taps + 4), 1)
        wanted = -(-pieces(a_row * height * batch, self.COST, self.LEAST_COST) // max(batch, 1))
        blocks = max(min(wanted, vectors // 8), 1) if height < self.LOW else 1
        block = -(-vectors // blocks) * self.lanes
        blocks = max(-(-channels // block), 1)
        strips = max(min(-(-wanted // blocks), height), 1)
        rows, blocks = self.balanced(batch, height, vectors, strips, blocks)
        block = -(-vectors // blocks) * self.lanes
        threads = thread_count(extents)
        if wants_shares(batch * -(-height // rows) * blocks, threads):

            def cost(some: int, columns: int) -> float:
                return some * columns * width * (self.taps + 4) / 2e9

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


@dataclass(frozen=True)
class WinogradParts:
    """How the work is split: chunk = block of tiles * panel blocks + block of panels of the weights."""

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
class WinogradCut:
    """The chunks of a convolution by tiles of m outputs of n positions; `sizes`: batch, channels, outputs, plane."""

    m: tuple[int, int]
    n: tuple[int, int]
    sizes: Shape
    in_place: bool

    WIDTH = 16  # outputs of a panel of weights
    CYCLES = 300_000  # of a chunk at most
    LEAST_CYCLES = 20_000
    PANELS = 6  # at least, of the weights in a chunk: each block of them transforms the image again
    TILES = (12, 48)  # of a chunk: fewer read the weights too often, more leave the caches
    MANY_WEIGHTS = 1024 * 1024  # bytes that are better read once

    def __call__(self, extents: Extents) -> WinogradParts:
        batch, channels, outputs, height, width = (evaluate(s, extents) for s in self.sizes)
        lanes, positions = self.WIDTH, prod(self.n)
        down, across = -(-height // self.m[0]), -(-width // self.m[1])
        tiles, panels = batch * down * across, -(-outputs // lanes)
        a_tile = positions * channels * panels
        wanted = pieces(tiles * a_tile, self.CYCLES, self.LEAST_CYCLES)
        many = 64 * a_tile > self.MANY_WEIGHTS
        most = self.TILES[1] if many else min(max(self.CYCLES // max(a_tile, 1), self.TILES[0]), self.TILES[1])
        blocks = max(-(-tiles // most), 1)
        panel_blocks = max(min(-(-wanted // blocks), panels // self.PANELS), 1) if outputs % 8 == 0 else 1
        least = self.TILES[0] if many else self.TILES[0] // 2
        blocks = max(min(-(-wanted // panel_blocks), tiles // least), blocks)
        if blocks * panel_blocks % 2 and 1 < blocks < tiles:
            blocks += 1
        tile_chunk = max(-(-tiles // blocks), 1)
        panel_chunk = _even(panels, panel_blocks, -(-tiles // tile_chunk))
        threads = thread_count(extents)
        if wants_shares(-(-tiles // tile_chunk) * -(-panels // panel_chunk), threads):

            def cost(some: int, columns: int) -> float:  # products, transforms of the image, and weights read
                return positions * channels * (some * columns + some / 2 + 5 * columns) / 3e9

            least = 1 if outputs % 8 == 0 else panels
            tile_chunk, panel_chunk = shares(tiles, panels, threads, cost, most_rows=tile_chunk, least_panels=least)
        blocks = -(-tiles // tile_chunk)
        panel_blocks = -(-panels // panel_chunk)
        lda = channels + 16 if channels % 128 == 0 else channels
        ldc = panel_chunk * lanes + (16 if panel_chunk % 8 == 0 else 0)
        column_step, product_step = (_odd_lines(tile_chunk * step) for step in (lda, ldc))
        sums = 0 if self.in_place else 4 * prod(self.m) * panel_chunk * lanes
        ends, end = [], 0
        for size in (4 * channels, 4 * positions * column_step, 4 * positions * product_step, sums):
            end += _aligned(size)
            ends.append(end)
        count = blocks * panel_blocks
        split = (down, across, tiles, tile_chunk, panel_chunk, count)
        return WinogradParts(*split, lda, ldc, column_step, product_step, tuple(ends))


def _odd_lines(count: int) -> int:
    """At least so many elements, an odd number of cache lines: the positions of a tile are in different cache sets."""
    return (-(-count // 16) | 1) * 16


# ---- attention


@dataclass(frozen=True)
class AttentionParts:
    """How query rows are cut: chunk = (batch * heads + head) * row blocks + row block."""

    rows: int
    part: int  # rows of a chunk that are computed to results before the next ones
    chunks: int
    score_stride: int
    sums: int
    results: int
    panels: int
    scratch: int


@dataclass(eq=False, repr=False)
class AttentionCut:
    """The chunks of attention: `q_shape` is [batch, heads, rows, depth].

    `packs`: each chunk brings its keys and values into panels itself.
    """

    q_shape: Shape
    keys: Size
    value_depth: Size
    to_scratch: bool
    packs: bool
    causal: bool

    WIDTH = 16  # columns of a panel
    MAX_ROWS = 128
    SCORE_BYTES = 192 * 1024  # of one block of rows
    FLOPS = 6.4e6  # of a chunk: some 80 us of one core
    MOST_ROWS = 256  # of a chunk that packs
    HEADS = 8  # that are chunks enough
    CAUSAL_ROWS = 24  # that are computed at a time if causal: keys that none of them sees cost nothing

    @classmethod
    def fits(cls, rows: Size, keys: Size) -> bool:
        """Whether all query rows of a head are one chunk, for which it packs keys and values itself."""
        if not isinstance(rows, int) or not isinstance(keys, int):
            return False
        return FEW_ROWS < rows <= cls.MOST_ROWS and 4 * rows * cls.stride(keys) <= cls.SCORE_BYTES

    @classmethod
    def stride(cls, keys: int) -> int:
        """Elements of a row of scores: not a power of two, and room to finish vectors."""
        return -(-keys // cls.WIDTH) * cls.WIDTH + cls.WIDTH

    def __call__(self, extents: Extents) -> AttentionParts:
        batch, heads, rows, depth = (evaluate(s, extents) for s in self.q_shape)
        keys, value_depth = evaluate(self.keys, extents), evaluate(self.value_depth, extents)
        stride = self.stride(keys)
        per_row = 2 * keys * (depth + value_depth) + 60 * keys + 1
        take = min(int(self.FLOPS / per_row), self.SCORE_BYTES // (4 * stride), self.MAX_ROWS)
        take = max(min(max(take // 6 * 6, 12), rows), 1)
        blocks = -(-rows // take)
        take = max(-(-rows // max(blocks, 1)), 1)
        if self.packs and batch * heads >= self.HEADS:
            take = max(rows, 1)
        packing = keys * (depth + value_depth) * 4 / 10e9 if self.packs else 0.0
        threads = thread_count(extents)
        if wants_shares(batch * heads * -(-rows // take), threads):

            def cost(some: int, _: int) -> float:
                return some * per_row / 80e9 + keys * (depth + value_depth) * 4 / 40e9 + packing

            take, _ = shares(rows, 1, threads, cost, copies=batch * heads, most_rows=take)
        part = min(self.CAUSAL_ROWS, take) if self.causal else take
        sums = (part + 1) * stride * 4  # a row more, for a bias that all have
        results = sums + _aligned(part * 8)
        panels = results + (part * -(-value_depth // self.WIDTH) * self.WIDTH * 4 if self.to_scratch else 0)
        padded = (-(-n // self.WIDTH) * self.WIDTH for n in (keys, value_depth))
        total = panels + (4 * sum(n * k for n, k in zip(padded, (depth, keys), strict=True)) if self.packs else 0)
        count = batch * heads * -(-rows // take) if value_depth else 0
        return AttentionParts(take, part, count, stride, sums, results, panels, _aligned(total))


@dataclass(eq=False, repr=False)
class KeyChunks:
    """The chunks that keys and values are packed in: one a batch and key head, none for few query rows."""

    rows: Size
    batch: Size
    heads: Size

    def __call__(self, extents: Extents) -> int:
        if evaluate(self.rows, extents) <= FEW_ROWS:
            return 0
        return evaluate(self.batch, extents) * evaluate(self.heads, extents)
