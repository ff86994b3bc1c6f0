"""How matrix products are cut into chunks, and whether tile registers compute them: see `base`."""

from __future__ import annotations

import functools

from rlx.backends.cpu.schedule.arguments import FEW_THREADS, Extents, thread_count
from rlx.backends.cpu.schedule.balance import TURNS, shares, wants_shares
from rlx.backends.cpu.schedule.base import FEW_ROWS, MIN_CHUNKS, aligned
from rlx.backends.cpu.target import Rates, TileTimes
from rlx.ir.shape import Shape, Size, evaluate
from rlx.records import dataclass, replace

__all__ = [
    "Chunking",
    "MatmulSchedule",
    "by_tiles",
    "chunking",
    "decoded_room",
    "decoded_steps",
    "few_by_tiles",
    "in_pairs",
    "k_block",
    "row_limit",
    "tile_chunking",
    "tile_room",
]

FEW_BY_TILES = 14  # rows of a product from which on tiles are faster, up to TILE_ROWS
FEW_OF_BYTES = 6  # the same with weights of bytes, and of any number
COPY_PAD = 16  # elements after each copied row of A: keeps rows off the same cache sets
K_BLOCK = 384  # steps of k of which a sum is made at most before it is added to others
PRODUCT_BLOCK = 128  # the same in a matrix product: two panels of f32 then take 16 KB of L1
PANEL_BYTES = 64  # of a row of a panel
TILE_ROWS = 32  # of a square of sums in tile registers; see rlx.backends.cpu.gemm.amx_f32
TILE_STEP = 32  # steps of k of a tile of bf16
TILE_PART = 2048  # bytes of a part of 32 rows, or of two panels, for such a step
TILE_STEP_BYTES = 3 * TILE_PART
TILE_BLOCK = 768  # steps of k that parts are made for at most before they are used: they stay in L2
TILE_SPARE = 8192 + 128  # bytes: room for two squares of sums, and for the bits that are seen in two panels
WIDTH = 16  # columns of a panel of f32
MOST_BANDS = 8  # of 32 rows in a chunk, at most
NEAR = 2 << 20  # bytes of weights that stay in L2 from chunk to chunk
SPREAD = 0.1  # of a chunk's time by which some take longer
MIN_PANELS = 4  # of a chunk of a product that has enough of them


def k_block(k: int, most: int = PRODUCT_BLOCK) -> int:
    """Steps of k in one block: about `most`, even blocks, a multiple of 8. The generated code computes the same."""
    blocks = max(-(-k // most), 1)
    return max((-(-k // blocks) + 7) // 8 * 8, 8)


def by_tiles(m: int, n: int, k: int) -> bool:
    """Whether a product of f32 is computed by tile registers where there are any, rather than by fma.

    Making parts of A pays off over many columns, of B over many rows. With fewer of both than this fma is faster, with
    weights in the cache and from memory. For fewer rows see `few_by_tiles`.
    """
    return m >= 40 and n >= 4 * WIDTH and m * n >= 8192 and k >= 2 * TILE_STEP


def few_by_tiles(m: int, n: int, k: int, *, whole: bool = False) -> bool:
    """The same for so few rows that parts of B are made as they are needed (`amx_f32_rows`).

    Where B is `whole`, of numbers of 8 bits, there is less to be made, and fma has to convert them: it is slower for
    all that `by_tiles` leaves out, but for a few rows or columns.
    """
    if whole:
        return m >= FEW_OF_BYTES and n >= 12 * WIDTH and k >= 2 * TILE_STEP and m * n * k >= 1 << 19
    return FEW_BY_TILES <= m <= TILE_ROWS and m * n >= 6144 and k >= 4 * TILE_STEP


def low_chunks(m: int, n: int, k: int) -> bool:
    """Whether a product by tiles may be cut into chunks of up to TILE_ROWS rows, each of which makes parts of all of B.

    That hides behind the products of so many rows, so it costs nothing where there are few rows, or few columns for so
    many steps of k that splitting A takes longest; with more of both, making parts once for many rows is better.
    """
    near = 4 * n * k <= NEAR and (m <= 2 * TILE_ROWS or (m <= 8 * TILE_ROWS and k >= 4 * n))
    return k >= 2 * TILE_STEP and (m <= TILE_ROWS or near)


def tile_room(rows: int, k: int) -> int:
    """Bytes of scratch for the parts of so many rows of A, and of four panels, in products by tiles."""
    blocks = max(-(-k // TILE_BLOCK), 1)
    block = -(-k // blocks)
    steps = -(-block // TILE_STEP)
    return TILE_SPARE + (2 + -(-rows // TILE_ROWS)) * steps * TILE_STEP_BYTES


def decoded_steps(block: int) -> int:
    """Steps of k of encoded blocks of so many that are decoded before they are multiplied: two panels stay in L1.

    They are blocks of k of other products, or two of them.
    """
    return max(PRODUCT_BLOCK, block)


def decoded_room(k: int) -> int:
    """Bytes of scratch for so many steps of two panels of f32 as are decoded at a time, of blocks of 256 at most."""
    return 2 * PANEL_BYTES * min(k, decoded_steps(256))


@dataclass(frozen=True)
class Chunking:
    """How a product is cut: chunk = (batch * row_blocks + row block) * panel_blocks + panel block."""

    row_chunk: int
    panel_chunk: int
    chunks: int
    copy_bytes: int  # of a copy of rows of A; 0: they are read where they are
    tile_bytes: int  # room for one block of C, if it goes to scratch
    steps: int = PRODUCT_BLOCK  # for the argument `steps`


def row_limit(rates: Rates, k: int, columns: int, size: int) -> int:
    """Rows of A in a chunk: 144, or more where those are little work."""
    block_time = 144 * columns * (2.0 * k / rates.flops * (size / 4) + size / rates.copy)
    return 144 * max(int(40e-6 / max(block_time, 1e-9)), 1)


@functools.lru_cache(1024)
def chunking(rates: Rates, m: int, n: int, k: int, batch: int, size: int, threads: int = 1) -> Chunking:
    """Cuts a product of elements of `size` bytes into chunks of 20 to 120 us of one core, less for many threads."""
    width = PANEL_BYTES // size
    panels = max(-(-n // width), 1)
    row_blocks = max(-(-m // row_limit(rates, k, panels * width, size)), 1)
    row_chunk = max(-(-m // row_blocks), 1)
    if row_blocks > 1:
        row_chunk = -(-row_chunk // 6) * 6
    row_blocks = max(-(-m // row_chunk), 1)
    # the same with what is read of B; some eight chunks, fewer of a small product, more of a large one
    per_panel = 2.0 * row_chunk * width * k / rates.flops * (size / 4) + width * k * size / rates.read
    blocks = row_blocks * batch
    target = min(max(per_panel * panels * blocks / 8, 20e-6), 120e-6)
    # small products in two, but none that takes less than 18 us: nets of small ones then run without joins
    wanted = max(round(per_panel * panels / target), min(2, int(per_panel * panels / 9e-6)))
    wanted = wanted if wanted <= 2 else -(-wanted // 2) * 2  # of three, one thread would make two
    # each chunk reads all of A again and starts without prefetched panels, so it takes several of them
    panel_chunk = _panel_chunk(panels, min(wanted, max(panels // MIN_PANELS, MIN_CHUNKS)), blocks)
    if wants_shares(blocks * -(-panels // panel_chunk), threads):

        def cost(rows: int, some: int) -> float:
            read = (rows + some * width) * k * size / rates.read
            products = 2.0 * rows * k * some * width / rates.flops * (size / 4)
            return products + read + rows * some * PANEL_BYTES / rates.write

        least = min(2, panels) if m > FEW_ROWS else 1  # tiles of two panels
        row_chunk, panel_chunk = shares(m, panels, threads, cost, copies=batch, most_rows=row_chunk, least_panels=least)
        row_blocks = max(-(-m // row_chunk), 1)
    panel_blocks = -(-panels // panel_chunk)
    copy = (k * size) % 4096 == 0 and k > 0 and row_chunk > 12 and panel_chunk >= 16  # else it costs more than it saves
    copy_bytes = -(-row_chunk * (k_block(k) + COPY_PAD) * size // 64) * 64 if copy else 0
    chunks = batch * row_blocks * panel_blocks if m and n else 0
    return Chunking(row_chunk, panel_chunk, chunks, copy_bytes, row_chunk * panel_chunk * 64)


def in_pairs(cut: Chunking, m: int, n: int, batch: int) -> Chunking:
    """The cut of `batch` products of f32 with whole pairs of panels in a chunk."""
    panels = -(-cut.panel_chunk // 2) * 2
    chunks = batch * -(-m // cut.row_chunk) * -(-n // (panels * WIDTH)) if cut.chunks else 0
    return replace(cut, panel_chunk=panels, chunks=chunks, tile_bytes=cut.row_chunk * panels * PANEL_BYTES)


def _panel_chunk(panels: int, parts: int, blocks: int) -> int:
    """Panels of a chunk for about so many parts: the number that leaves 2 and 4 threads the least idle at the end."""
    least = -(-panels // max(min(parts, panels), 1))

    def taken(size: int) -> float:
        count = blocks * -(-panels // size)
        return sum(-(-count // threads) * threads * size for threads in (2, 4))

    return min(range(least, min(max(least * 3 // 2, least), panels) + 1), key=taken)


@functools.lru_cache(1024)
def tile_chunking(
    times: TileTimes,
    m: int,
    n: int,
    k: int,
    batch: int,
    threads: int = 1,
    *,
    of_blocks: bool = False,
    gathers: bool = False,
) -> Chunking:
    """Cuts a product by tiles into the chunks with which the threads are soonest done.

    They are few and large: each splits its rows of A, and starts with panels that nothing is computed beside.
    Where it `gathers` rows, that comes before they are split.
    """
    pairs, steps, before = -(-n // (2 * WIDTH)), -(-k // TILE_STEP), times.gather if gathers else 0
    low = not of_blocks and low_chunks(m, n, k)
    best, found = float("inf"), (max(m, 1), max(pairs, 1))
    blocks = [max(-(-m // (TILE_ROWS * bands)), 1) for bands in range(MOST_BANDS, 0, -1)]
    for count in dict.fromkeys([*blocks, *(-(-b // threads) * threads for b in blocks)]):  # also even for the threads
        rows = max(-(-m // count), 1)
        tiles = -(-rows // (TILE_ROWS // 2))
        bands = -(-rows // tiles) * tiles / TILE_ROWS  # of equally high tiles
        for across in range(1, min(pairs, TURNS * threads) + 1):
            columns = -(-pairs // across)
            chunks = batch * -(-m // rows) * -(-pairs // columns)
            if low and rows <= TILE_ROWS:
                a_step = bands * (before + times.split_few) + columns * max(times.square * bands, times.beside)
                start = times.start_few
            else:
                a_pair = times.square * bands + times.blocks if of_blocks else max(times.square * bands, times.pair)
                a_step = bands * (before + times.split) + times.first_pair + columns * a_pair
                start = times.start
            time = (-(-chunks // threads) + SPREAD) * (start + steps * a_step)
            if time < best:
                best, found = time, (rows, columns)
    row_chunk, panel_chunk = found[0], 2 * found[1]
    chunks = batch * -(-m // row_chunk) * -(-n // (panel_chunk * WIDTH)) if m and n else 0
    room = tile_room(row_chunk, k)
    return Chunking(row_chunk, panel_chunk, chunks, room, row_chunk * panel_chunk * PANEL_BYTES, 0)


@dataclass(frozen=True)
class ProductParts:
    """How a product is split into chunks, of that many rows and panels at most, and what they keep in scratch."""

    row_chunk: int
    panel_chunk: int
    chunks: int
    sums: int  # where a block of sums starts in a worker's scratch, in bytes
    copy: int  # where a copy of rows of A starts there; negative: they are read where they are
    scratch: int
    steps: int  # of k in a block, at most; 0: by tiles, and `copy` is room for what they need


@dataclass(frozen=True)
class InPlaceParts(ProductParts):
    """How a product is split whose chunks make panels, some at a time, in scratch at `room`."""

    room: int


@dataclass(eq=False, repr=False)
class InPlaceSchedule:
    """The chunks of a product, each of which makes `nbytes` bytes of panels at a time."""

    product: MatmulSchedule
    nbytes: int

    def __call__(self, extents: Extents) -> InPlaceParts:
        made = self.product(extents)
        room = aligned(made.scratch)
        scratch = room + aligned(self.nbytes)
        return InPlaceParts(
            made.row_chunk, made.panel_chunk, made.chunks, made.sums, made.copy, scratch, made.steps, room
        )


@dataclass(eq=False, repr=False)
class MatmulSchedule:
    """The chunks of a product [m, k] x [k, n], `count` of them, of elements of `size` bytes; `shape` is the result's.

    `to_scratch`: a block of the result goes there before it is stored. `tiles`: there are tile registers for it.
    `pairs`: panels are read in pairs. `whole`: B is numbers of up to 8 bits. `few`: of B two panels
    at a time are decoded for more rows than that (`blocks`). `tiles_from`: B is encoded blocks, which tiles multiply
    from so many rows on; such rows of A are not copied, nor `records`, which are no elements.
    """

    m: Size
    n: Size
    k: Size
    count: Size
    size: int
    shape: Shape
    to_scratch: bool
    rates: Rates
    tiles: bool = False
    pairs: bool = False
    whole: bool = False
    few: int | None = None
    tiles_from: int = 0
    records: bool = False

    def __call__(self, extents: Extents) -> ProductParts:
        rows, columns, depth, matrices = (evaluate(s, extents) for s in (self.m, self.n, self.k, self.count))
        threads = thread_count(extents)
        if self.tiles_from:
            worth = rows >= self.tiles_from
        else:
            worth = by_tiles(rows, columns, depth) or few_by_tiles(rows, columns, depth, whole=self.whole)
        if self.tiles and worth:
            blocks = self.tiles_from > 0
            made = tile_chunking(self.rates.tiles, rows, columns, depth, matrices, threads, of_blocks=blocks)
        else:
            threads = max(threads, FEW_THREADS)  # up to so many it is one entry of the table
            made = chunking(self.rates, rows, columns, depth, matrices, self.size, threads)
            made = replace(made, copy_bytes=0) if self.records or self.tiles_from else made
            made = in_pairs(made, rows, columns, matrices) if self.pairs or self.few is not None else made
            if self.few is not None:
                made = replace(made, copy_bytes=decoded_room(depth) if rows > self.few else 0)
        scratch = aligned(made.copy_bytes + (made.tile_bytes if self.to_scratch else 0))
        chunks = made.chunks if all(evaluate(s, extents) for s in self.shape) else 0
        copy = 0 if made.copy_bytes else -1
        return ProductParts(made.row_chunk, made.panel_chunk, chunks, made.copy_bytes, copy, scratch, made.steps)
