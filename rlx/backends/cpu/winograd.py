"""Convolutions of 3x3 windows with fewer products: Winograd's F(4x4, 3x3) and F(2x2, 3x3).

A tile of m x m results comes from (m + 2)^2 products instead of 9 m^2: tiles of the image and the weights are
transformed, one matrix product is made for each of the (m + 2)^2 positions, and its results are transformed back.
With normal inputs and 256 channels the largest error, relative to the largest result, is 5e-7 for F(2x2) and 3.5e-6
for F(4x4) in f32; plain sums in f32 have 1.2e-6. The usual points 0, 1, -1, 2, -2 would give three times the error of
those used here. An infinity or nan in the image spoils the results of its whole tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from fractions import Fraction
from functools import cache

from rlx.backends.cpu import gemm
from rlx.backends.cpu.builder import Function, Module, vec
from rlx.backends.cpu.jit import host
from rlx.backends.cpu.nest import PLACEHOLDER, Emitter, Scope, name_kernel
from rlx.backends.cpu.window import Geometry, finish_of, geometry
from rlx.backends.cpu.words import Computed, Extents, KernelCode, Pointer, Routine, Scratch, Word, WordTable
from rlx.ir.shape import Size, evaluate
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import Load, const
from rlx.kernels.lowering import Conv, out_vars
from rlx.kernels.program import Buffer, Kernel, Store

__all__ = ["TAGS", "WEIGHTS", "choose", "emit", "emit_weights", "layout", "possible", "transforms"]

TAGS = {"winograd2": 2, "winograd4": 4}
WEIGHTS = "winograd weights"
MIN_CHANNELS = 8
WIDTH = 16  # tiles of a panel
L2_BYTES = 384 * 1024
CHUNK_CYCLES = 400_000
MIN_CHUNKS = 4
MIN_ROWS = 64  # of the weights in a chunk: each block of rows transforms the image again
TRANSFORM = {2: 120, 4: 300}  # cycles for the tiles of one panel and one channel, there or back
IMAGE = 40  # height and width that the choice assumes: were it to depend on sizes, so would the bits of results

Matrix = tuple[tuple[Fraction, ...], ...]


@cache
def transforms(m: int) -> tuple[Matrix, Matrix, Matrix]:
    """The matrices (A, G, B) of F(m, 3) by Toom and Cook: y = A [(G g) * (B d)] for m + 2 inputs d and 3 weights g."""
    points = [Fraction(p) for p in (0, 1, -1, Fraction(1, 2), -2)[: m + 1]]
    n = m + 2

    def product(roots: Sequence[Fraction]) -> list[Fraction]:
        found = [Fraction(1)]
        for root in roots:
            shifted = [Fraction(0), *found]
            found = [s - root * c for s, c in zip(shifted, [*found, Fraction(0)], strict=True)]
        return found

    a = tuple(tuple([p**i for p in points] + [Fraction(i == m - 1)]) for i in range(m))
    g, b = [], []
    for j, p in enumerate(points):
        others = points[:j] + points[j + 1 :]
        scale = Fraction(1)
        for q in others:
            scale *= p - q
        lead = abs(next(c for c in product(others) if c))  # a coefficient of 1 needs no multiplication
        g.append(tuple(p**i / scale * lead for i in range(3)))
        b.append(tuple([c / lead for c in product(others)] + [Fraction(0)]))
    g.append((Fraction(0), Fraction(0), Fraction(1)))
    b.append(tuple(product(points)))
    assert len(b) == n
    return a, tuple(g), tuple(b)


class WinoWord(IntEnum):
    """The words of a kernel; strides and pitches are in elements, places in scratch in bytes."""

    X = 0
    X_N = 1
    X_C = 2
    X_H = 3
    HEIGHT = 4
    WIDTH = 5
    CHANNELS = 6
    PAD_H = 7
    PAD_W = 8
    OUT_HEIGHT = 9
    OUT_WIDTH = 10
    WEIGHTS = 11
    WEIGHT_ROW = 12  # elements from one output's weights to the next
    OUTPUTS = 13
    OUT = 14
    OUT_N = 15
    TILES_W = 16
    TILE_ROWS = 17  # rows of tiles of a chunk
    BLOCKS = 18  # of tile rows, in an image
    ROW_CHUNK = 19
    ROW_BLOCKS = 20
    COLUMN_STEP = 21  # from position to position of columns, and of products
    PITCH = 22  # from row to row of a strip of pixels
    SCRATCH = 23
    SCRATCH_STRIDE = 24
    OFFSETS = 25  # places in scratch: of each tile in the strip, in elements
    COLUMNS = 26
    PRODUCTS = 27
    SUMS = 28
    BLOCK = 29  # routines
    INPUT = 30
    OUTPUT = 31
    PRODUCT_STEP = 32
    PANELS = 33  # of a chunk


POINTERS = (
    WinoWord.X,
    WinoWord.WEIGHTS,
    WinoWord.OUT,
    WinoWord.SCRATCH,
    WinoWord.BLOCK,
    WinoWord.INPUT,
    WinoWord.OUTPUT,
)


@dataclass(frozen=True)
class _Cut:
    """How the work is split: chunk = (image * blocks + block of tile rows) * row blocks + row block of the weights."""

    tiles_w: int
    tile_rows: int
    blocks: int
    panels: int
    row_chunk: int
    row_blocks: int
    chunks: int
    cycles: float  # of all images, by the model


def _cut(m: int, geo: Geometry, extents: Extents) -> _Cut:
    sizes = (geo.batch, geo.channels, geo.outputs, geo.out_height, geo.out_width)
    return _cut_of(m, *(evaluate(s, extents) for s in sizes))


@cache
def _cut_of(m: int, batch: int, channels: int, rows: int, height: int, width: int) -> _Cut:
    down, across = max(-(-height // m), 1), max(-(-width // m), 1)
    positions = (m + 2) ** 2
    a_panel = positions * rows * channels  # one cycle for a vector of 16
    best: _Cut | None = None
    for tile_rows in range(1, down + 1):
        blocks = -(-down // tile_rows)
        if -(-down // blocks) != tile_rows:
            continue
        panels = -(-tile_rows * across // WIDTH)
        if best and panels > 1 and panels * a_panel > CHUNK_CYCLES:
            break
        missing = -(-MIN_CHUNKS // max(batch * blocks, 1))
        row_blocks = max(min(missing, rows // MIN_ROWS), 1)
        row_chunk = -(-rows // row_blocks)
        row_blocks = -(-rows // row_chunk)
        slow = 1.1 if positions * channels * WIDTH * panels * 4 > L2_BYTES else 1.0
        # a quarter of a cycle for each 4 bytes of weights read
        products = a_panel * (panels + 0.25) * slow
        cycles = batch * blocks * (products + TRANSFORM[m] * panels * (channels * row_blocks + rows))
        if best is None or cycles < best.cycles:
            chunks = batch * blocks * row_blocks if height and width else 0
            best = _Cut(across, tile_rows, blocks, panels, row_chunk, row_blocks, chunks, cycles)
    assert best is not None
    return best


def possible(kernel: Kernel) -> bool:
    """Whether it is a 3x3 convolution of f32 that these transforms can compute."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    plain = (*anchor.strides, *anchor.dilations, anchor.groups) == (1, 1, 1, 1, 1) and anchor.w_shape[2:] == (3, 3)
    fixed = all(isinstance(p, int) and p >= 0 for p in anchor.pads)
    sized = all(isinstance(s, int) and s >= MIN_CHANNELS for s in anchor.w_shape[:2])
    static = isinstance(anchor.w, Load) and anchor.w.source.kind in ("param", "const", "prepared")
    return plain and fixed and sized and static and anchor.x.dtype.name == "f32"


def choose(kernel: Kernel) -> str:
    """The tag of the transform that is thought to be fastest, "" for none."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    if not possible(kernel):
        return ""
    outputs, channels = (_guess(s, 0) for s in anchor.w_shape[:2])
    costs = {tag: _cut_of(m, 1, channels, outputs, IMAGE, IMAGE).cycles for tag, m in TAGS.items()}
    best = min(costs, key=lambda tag: costs[tag])
    direct = 9 * channels * outputs * (-(-IMAGE * IMAGE // WIDTH))
    return best if costs[best] < direct else ""


def _guess(size: Size, otherwise: int) -> int:
    return size if isinstance(size, int) else otherwise


def layout(kernel: Kernel, tag: str) -> list[Kernel]:
    """The kernel that transforms the weights, and the convolution that reads them."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    outputs, channels = anchor.w_shape[:2]
    assert isinstance(channels, int)
    # rows of weights are kept off the same cache sets
    row = channels + 16 if channels % 64 == 0 else channels
    shape = ((TAGS[tag] + 2) ** 2, outputs, row)
    buffer = Buffer(f"{kernel.stores[0].buffer.name}.winograd", "prepared", shape, anchor.x.dtype)
    vars = out_vars(3)
    store = Store(buffer, shape, vars, const(0, buffer.dtype))
    weights = Kernel(WEIGHTS, (store,), replace(anchor, x=const(0, buffer.dtype)), nodes=kernel.nodes, tag=WEIGHTS)
    made = replace(anchor, w=Load(buffer, vars, buffer.dtype))
    return [weights, Kernel(kernel.name, kernel.stores, made, nodes=kernel.nodes, tag=tag)]


def emit_weights(kernel: Kernel) -> KernelCode:
    """The weights' transform: [position, output, channel], computed in f64 and rounded once; chunk = output."""
    anchor, buffer = kernel.anchor, kernel.stores[0].buffer
    assert isinstance(anchor, Conv)
    assert isinstance(anchor.w, Load)
    positions, outputs, row = buffer.shape
    m = next(m for m in TAGS.values() if (m + 2) ** 2 == positions)
    _, g, _ = transforms(m)
    index = linear_index(anchor.w.indices, anchor.w.source.shape)
    words: list[Word] = [
        Pointer(anchor.w.source, index.constant * 4),
        Pointer(buffer),
        anchor.w_shape[1],
        row,
        outputs,
    ]
    f = gemm.kernel_function(PLACEHOLDER)
    w, out = gemm.load_word(f, 0, "ptr"), gemm.load_word(f, 1, "ptr")
    channels, row_size, count = (gemm.load_word(f, i) for i in (2, 3, 4))
    w = f.gep(w, f.mul(f.mul("%chunk", channels), 9), "float")
    out = f.gep(out, f.mul("%chunk", row_size), "float")

    def channel(c: str, _: list[str]) -> None:
        p = f.gep(w, f.mul(c, 9), "float")
        taps = [
            [f.cast("fpext", f.load("float", f.gep(p, 3 * i + j, "float")), "double") for j in range(3)]
            for i in range(3)
        ]
        half = [_combine(f, g, line, "double") for line in taps]
        for j in range(m + 2):
            for i, value in enumerate(_combine(f, g, [line[j] for line in half], "double")):
                at = f.add(f.mul(f.mul(count, row_size), i * (m + 2) + j), c)
                f.store(f.cast("fptrunc", value, "float"), f.gep(out, at, "float"))

    f.loop(0, channels, 1, [], channel)
    f.loop(channels, row_size, 1, [], lambda c, _: _clear(f, out, c, f.mul(count, row_size), (m + 2) ** 2))
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    return KernelCode(symbol, ir, tuple(words), lambda e: evaluate(outputs, e))


def _clear(f: Function, out: str, at: str, step: str, count: int) -> None:
    for i in range(count):
        f.store(0.0, f.gep(out, f.add(f.mul(step, i), at), "float"), ty="float")


def _combine(f: Function, matrix: Matrix, values: list[str], ty: str) -> list[str]:
    """The matrix times a column of values."""
    found = []
    for line in matrix:
        terms = sorted(((c, x) for c, x in zip(line, values, strict=True) if c), key=lambda t: t[0] != 1)
        (c, x), *rest = terms
        total = x if c == 1 else f.mul(x, float(c), ty)
        for c, x in rest:
            if abs(c) == 1:
                total = f.add(total, x, ty) if c == 1 else f.sub(total, x, ty)
            else:
                total = f.fma(x, float(c), total, ty)
        found.append(total)
    return found


def emit(kernel: Kernel) -> KernelCode:
    """The convolution with its epilogue."""
    anchor, store, m = kernel.anchor, kernel.stores[0], TAGS[kernel.tag]
    assert isinstance(anchor, Conv)
    assert isinstance(anchor.w, Load)
    assert isinstance(anchor.x, Load)
    geo = geometry(kernel)
    finish = finish_of(kernel, anchor.x.dtype)
    tile = gemm.tile_for("f32", host().vector_bytes)
    lanes, positions = tile.lanes, (m + 2) ** 2

    def cut(e: Extents) -> _Cut:
        return _cut(m, geo, e)

    def pitch(e: Extents) -> int:
        return -(-(m * cut(e).tiles_w + 4 + lanes) // 16) * 16

    def places(e: Extents) -> list[int]:
        """Where the parts of a worker's scratch end: strip, offsets, columns, products, sums."""
        c = cut(e)
        pixels = 0 if finish.in_place else c.tile_rows * m * evaluate(geo.out_width, e)
        parts = [
            4 * (c.tile_rows * m + m + 2) * pitch(e),
            8 * c.panels * WIDTH,
            64 * positions * _step(c.panels * evaluate(geo.channels, e)),
            64 * positions * _step(c.panels * c.row_chunk),
            4 * pixels,
        ]
        ends, end = [], 0
        for part in parts:
            end += -(-part // 64) * 64
            ends.append(end)
        return ends

    def place(i: int) -> Computed:
        return Computed(lambda e: places(e)[i])

    words: list[Word] = [
        Pointer(anchor.x.source, geo.x.constant * 4),
        geo.x_n,
        geo.x_c,
        geo.x_h,
        geo.height,
        geo.width,
        geo.channels,
        *geo.pads,
        geo.out_height,
        geo.out_width,
        Pointer(anchor.w.source),
        anchor.w.source.shape[2],
        geo.outputs,
        Pointer(store.buffer, geo.out.constant * store.buffer.dtype.itemsize),
        geo.out_n,
        Computed(lambda e: cut(e).tiles_w),
        Computed(lambda e: cut(e).tile_rows),
        Computed(lambda e: cut(e).blocks),
        Computed(lambda e: cut(e).row_chunk),
        Computed(lambda e: cut(e).row_blocks),
        Computed(lambda e: WIDTH * _step(cut(e).panels * evaluate(geo.channels, e))),
        Computed(pitch),
        Scratch(),
        place(4),
        place(0),
        place(1),
        place(2),
        place(3),
        gemm.block_routine(tile),
        _routine("input", m, tile),
        _routine("output", m, tile),
        Computed(lambda e: WIDTH * _step(cut(e).panels * cut(e).row_chunk)),
        Computed(lambda e: cut(e).panels),
    ]
    table = WordTable(words)
    f = gemm.kernel_function(PLACEHOLDER)
    emitter = Emitter(f, table, lanes)
    if not finish.plain:
        finish.prepare(emitter)
        finish.settle(emitter)
    w = _load_words(f, list(WinoWord))
    rest, row_block = f.div("%chunk", w[WinoWord.ROW_BLOCKS]), f.rem("%chunk", w[WinoWord.ROW_BLOCKS])
    image, block = f.div(rest, w[WinoWord.BLOCKS]), f.rem(rest, w[WinoWord.BLOCKS])
    m0 = f.mul(row_block, w[WinoWord.ROW_CHUNK])
    m1 = f.min(f.add(m0, w[WinoWord.ROW_CHUNK]), w[WinoWord.OUTPUTS])
    y0 = f.mul(f.mul(block, w[WinoWord.TILE_ROWS]), m)
    y1 = f.min(f.add(y0, f.mul(w[WinoWord.TILE_ROWS], m)), w[WinoWord.OUT_HEIGHT])
    rows = f.div(f.add(f.sub(y1, y0), m - 1), m)
    tiles = f.mul(rows, w[WinoWord.TILES_W])
    slots = f.and_(f.add(tiles, WIDTH - 1), -WIDTH)
    strip = f.offset(w[WinoWord.SCRATCH], f.mul("%worker", w[WinoWord.SCRATCH_STRIDE]))
    offsets, columns, products = (
        f.offset(strip, w[i]) for i in (WinoWord.OFFSETS, WinoWord.COLUMNS, WinoWord.PRODUCTS)
    )
    spare = f.mul(f.mul(rows, m), w[WinoWord.PITCH])  # lanes without a tile use the rows after the last

    def find(s: str, _: list[str]) -> None:
        down, across = f.div(s, w[WinoWord.TILES_W]), f.rem(s, w[WinoWord.TILES_W])
        at = f.mul(f.add(f.mul(down, w[WinoWord.PITCH]), across), m)
        f.store(f.select(f.cmp("lt", s, tiles), at, spare), f.gep(offsets, s, "i64"))

    f.loop(0, slots, 1, [], find)
    x = f.gep(w[WinoWord.X], f.mul(image, w[WinoWord.X_N]), "float")
    top = f.sub(y0, w[WinoWord.PAD_H])
    f.call(w[WinoWord.INPUT], [x, strip, offsets, columns, "%words", top, f.add(f.mul(rows, m), m + 2), slots])

    weight_step = f.mul(w[WinoWord.OUTPUTS], w[WinoWord.WEIGHT_ROW])
    panel = f.mul(w[WinoWord.CHANNELS], WIDTH)
    line = f.mul(w[WinoWord.PANELS], WIDTH)
    weights = f.gep(w[WinoWord.WEIGHTS], f.mul(m0, w[WinoWord.WEIGHT_ROW]), "float")

    def position(i: str, _: list[str]) -> None:
        a = f.gep(weights, f.mul(i, weight_step), "float")
        b = f.gep(columns, f.mul(i, w[WinoWord.COLUMN_STEP]), "float")
        c = f.gep(products, f.mul(i, w[WinoWord.PRODUCT_STEP]), "float")
        height, k = f.sub(m1, m0), w[WinoWord.CHANNELS]
        f.call(w[WinoWord.BLOCK], [a, w[WinoWord.WEIGHT_ROW], b, panel, c, line, height, slots, k, "null"])

    f.loop(0, positions, 1, [], position)
    top_scope = Scope(1, None, {finish.image: image})
    if not finish.plain:
        emitter.hoist(finish.expr, frozenset((finish.channel, *finish.space)), top_scope)
    p0, p1 = f.mul(y0, w[WinoWord.OUT_WIDTH]), f.mul(y1, w[WinoWord.OUT_WIDTH])
    pixels = f.mul(w[WinoWord.OUT_HEIGHT], w[WinoWord.OUT_WIDTH])

    def channel(o: str, _: list[str]) -> None:
        if finish.in_place:
            at = f.add(f.mul(image, w[WinoWord.OUT_N]), f.add(f.mul(o, pixels), p0))
            target = f.gep(w[WinoWord.OUT], at, "float")
        else:
            target = f.offset(strip, w[WinoWord.SUMS])
        source = f.gep(products, f.mul(f.sub(o, m0), line), "float")
        f.call(w[WinoWord.OUTPUT], [source, strip, offsets, target, "%words", f.sub(y1, y0), slots])
        if not finish.plain:
            scope = top_scope.inner({finish.channel: o})
            emitter.hoist(finish.expr, frozenset(finish.space), scope)
            finish.pixels(emitter, scope, p0, p1, target)

    f.loop(m0, m1, 1, [], channel)
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    return KernelCode(symbol, ir, tuple(table.words), lambda e: cut(e).chunks, tuple(emitter.sites), place(4))


def _step(count: int) -> int:
    """An odd number of cache lines, so that the positions of a tile are in different sets of the cache."""
    return count | 1


def _load_words(f: Function, wanted: list[WinoWord]) -> dict[WinoWord, str]:
    return {i: gemm.load_word(f, i, "ptr" if i in POINTERS else "i64") for i in wanted}


@cache
def _routine(which: str, m: int, tile: gemm.Tile) -> Routine:
    function = (_input if which == "input" else _output)(m, tile)
    return Routine(function.name, Module([function]).text())


@dataclass(frozen=True)
class _Lanes:
    """Vectors of pixels of four neighbours each, and vectors of one pixel of every tile."""

    f: Function
    lanes: int

    def pixels(self, places: list[str]) -> list[str]:
        """Four vectors: vector i holds, for each quad q of tiles, four pixels of tile 4 q + i."""
        found = []
        for i in range(4):
            parts = [self.f.load(vec("float", 4), p) for p in places[i::4]]
            while len(parts) > 1:
                pairs = zip(parts[::2], parts[1::2], strict=True)
                parts = [self.f.shuffle(a, b, list(range(2 * self._width(a)))) for a, b in pairs]
            found.append(parts[0])
        return found

    def _width(self, value: str) -> int:
        return int(self.f.type_of(value)[1:].split()[0])

    def turned(self, v: list[str], count: int = 4) -> list[str]:
        """Transposes 4 x 4 within quads; the first `count` (2 or 4) vectors of it."""
        quads = range(0, self.lanes, 4)
        found = []
        for half in range(count // 2):
            pairs = [q + 2 * half + i + k * self.lanes for q in quads for i in (0, 1) for k in (0, 1)]
            low, high = (self.f.shuffle(v[i], v[i + 1], pairs) for i in (0, 2))
            for part in (0, 2):
                picks = [q + part + i + k * self.lanes for q in quads for k in (0, 1) for i in (0, 1)]
                found.append(self.f.shuffle(low, high, picks))
        return found


def _input(m: int, tile: gemm.Tile) -> Function:
    """Transforms the tiles of all channels into panels [position][panel][channel][16].

    `(ptr x, ptr strip, ptr offsets, ptr columns, ptr words, i64 top, i64 rows, i64 slots)`: `top` is the image row of
    the strip's first of `rows`. The strip is a copy of the rows of one channel with zeros around the image.
    """
    lanes, n = tile.lanes, m + 2
    vector = tile.vector
    names = ("x", "strip", "offsets", "columns", "words")
    f = Function(
        f"rlx_winograd_input_{m}x{lanes}",
        [*(("ptr", i) for i in names), ("i64", "top"), ("i64", "rows"), ("i64", "slots")],
    )
    w = _load_words(f, [i for i in WinoWord if i not in POINTERS])
    shuffles = _Lanes(f, lanes)
    room = f.alloca(vector, n * n)
    pitch, cols = w[WinoWord.PITCH], w[WinoWord.WIDTH]
    f.loop(0, f.mul("%rows", pitch), lanes, [], lambda i, _: f.store(0.0, f.gep("%strip", i, "float"), ty=vector))
    first = f.max(f.sub(0, "%top"), 0)
    last = f.min("%rows", f.sub(w[WinoWord.HEIGHT], "%top"))
    whole = f.and_(cols, -lanes)
    tail = f.sub(cols, whole)
    mask = f.mask_below(tail, lanes)

    def channel(c: str, _: list[str]) -> None:
        source = f.gep("%x", f.mul(c, w[WinoWord.X_C]), "float")

        def copy(r: str, _: list[str]) -> None:
            p = f.gep(source, f.mul(f.add("%top", r), w[WinoWord.X_H]), "float")
            q = f.gep("%strip", f.add(f.mul(r, pitch), w[WinoWord.PAD_W]), "float")

            def move(i: str, _: list[str]) -> None:
                f.store(f.load(vector, f.gep(p, i, "float")), f.gep(q, i, "float"))

            def move_tail() -> None:  # its zeros fall on zeros, or on the row that is copied next
                f.store(f.masked_load(vector, f.gep(p, whole, "float"), mask), f.gep(q, whole, "float"))

            f.loop(0, whole, lanes, [], move)
            f.if_(f.cmp("ne", tail, 0), move_tail)

        f.loop(first, last, 1, [], copy)

        def group(s: str, _: list[str]) -> None:
            tiles = [
                f.gep("%strip", f.load("i64", f.gep("%offsets", f.add(s, i), "i64")), "float") for i in range(lanes)
            ]

            def across(r: str, _: list[str]) -> None:
                places = [f.gep(p, f.mul(r, pitch), "float") for p in tiles]
                d = shuffles.turned(shuffles.pixels(places))
                if m == 4:
                    d += shuffles.turned(shuffles.pixels([f.gep(p, 4, "float") for p in places]), 2)
                for j, value in enumerate(_combine(f, transforms(m)[2], d, vector)):
                    f.store(value, f.gep(room, f.add(f.mul(r, n), j), vector))

            f.loop(0, n, 1, [], across)
            panel = f.mul(f.lshr(s, 4), w[WinoWord.CHANNELS])
            at = f.add(f.mul(f.add(panel, c), WIDTH), f.and_(s, WIDTH - 1))

            def down(j: str, _: list[str]) -> None:
                d = [f.load(vector, f.gep(room, f.add(j, r * n), vector)) for r in range(n)]
                for i, value in enumerate(_combine(f, transforms(m)[2], d, vector)):
                    place = f.add(f.mul(f.add(j, i * n), w[WinoWord.COLUMN_STEP]), at)
                    f.store(value, f.gep("%columns", place, "float"))

            f.loop(0, n, 1, [], down)

        f.loop(0, "%slots", lanes, [], group)

    f.loop(0, w[WinoWord.CHANNELS], 1, [], channel)
    f.ret()
    return f


def _output(m: int, tile: gemm.Tile) -> Function:
    """Transforms the products of one channel back, and stores its rows of pixels one after the other at `target`.

    `(ptr products, ptr strip, ptr offsets, ptr target, ptr words, i64 rows, i64 slots)`
    """
    lanes, n, vector = tile.lanes, m + 2, tile.vector
    names = ("products", "strip", "offsets", "target", "words")
    f = Function(f"rlx_winograd_output_{m}x{lanes}", [*(("ptr", i) for i in names), ("i64", "rows"), ("i64", "slots")])
    w = _load_words(f, [i for i in WinoWord if i not in POINTERS])
    shuffles = _Lanes(f, lanes)
    room = f.alloca(vector, m * n)
    pitch, cols = w[WinoWord.PITCH], w[WinoWord.OUT_WIDTH]
    step = w[WinoWord.PRODUCT_STEP]
    back = transforms(m)[0]

    def put(value: str, q: int, half: int, place: str) -> None:
        """Stores four pixels of one tile, or two."""
        picks = list(range(4 * q, 4 * q + 4)) if half < 0 else [4 * q + 2 * half, 4 * q + 2 * half + 1]
        f.store(f.shuffle(value, None, picks), place)

    def group(s: str, _: list[str]) -> None:
        source = f.gep("%products", s, "float")

        def down(j: str, _: list[str]) -> None:
            d = [f.load(vector, f.gep(source, f.mul(f.add(j, i * n), step), "float")) for i in range(n)]
            for i, value in enumerate(_combine(f, back, d, vector)):
                f.store(value, f.gep(room, f.add(j, i * n), vector))

        f.loop(0, n, 1, [], down)
        tiles = [f.gep("%strip", f.load("i64", f.gep("%offsets", f.add(s, i), "i64")), "float") for i in range(lanes)]

        def line(i: int) -> list[str]:
            return _combine(f, back, [f.load(vector, f.gep(room, i * n + j, vector)) for j in range(n)], vector)

        for i in range(0, m, 4 // m):  # 4 x 4: a row; 2 x 2: both rows
            quads = shuffles.turned([value for k in range(4 // m) for value in line(i + k)])
            for t, p in enumerate(tiles):
                for k in range(4 // m):
                    place = f.gep(p, f.mul(pitch, i + k), "float")
                    put(quads[t % 4], t // 4, -1 if m == 4 else k, place)

    f.loop(0, "%slots", lanes, [], group)
    whole = f.and_(cols, -lanes)
    tail = f.sub(cols, whole)
    mask = f.mask_below(tail, lanes)

    def copy(r: str, _: list[str]) -> None:
        p = f.gep("%strip", f.mul(r, pitch), "float")
        q = f.gep("%target", f.mul(r, cols), "float")
        f.loop(0, whole, lanes, [], lambda i, _: f.store(f.load(vector, f.gep(p, i, "float")), f.gep(q, i, "float")))

        def copy_tail() -> None:
            f.masked_store(f.load(vector, f.gep(p, whole, "float")), f.gep(q, whole, "float"), mask)

        f.if_(f.cmp("ne", tail, 0), copy_tail)

    f.loop(0, "%rows", 1, [], copy)
    f.ret()
    return f
