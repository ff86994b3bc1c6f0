"""Convolutions on the CPU: an implicit matrix product, weights [O, K] times the pixels' columns [K, pixels].

A chunk gathers the columns of a block of pixels into panels in its worker's scratch, zeros for the padding, and
multiplies them with the weights, which are read in place. Depthwise convolutions have code of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from typing import Literal, cast

from rlx.backends.cpu import depthwise, gemm, winograd
from rlx.backends.cpu.builder import Function, Module, Typed, constant, size_of, vec
from rlx.backends.cpu.jit import host
from rlx.backends.cpu.nest import PLACEHOLDER, Emitter, Scope, name_kernel
from rlx.backends.cpu.window import Geometry, finish_of, geometry
from rlx.backends.cpu.words import Computed, Extents, KernelCode, Pointer, Routine, Scratch, Word, WordTable
from rlx.ir.dtype import DType
from rlx.ir.shape import Shape, evaluate
from rlx.kernels.affine import Affine, linear_index, row_major
from rlx.kernels.expr import Cast, Expr, Load, Var, loads
from rlx.kernels.lowering import Conv, out_vars
from rlx.kernels.program import Buffer, Kernel, Store

__all__ = ["accepts", "accepts_operand", "emit", "layout"]

FLOPS_PER_CHUNK = 8e6  # some 100 us of one core
PANEL_BYTES = 256 * 1024  # of one chunk: half of a small L2 cache
FEW_PIXELS = 4  # a last panel of no more pixels is summed as dot products, where they are long
LONG = 128
MIN_PANELS = 2  # a chunk's rows of weights are read for at least this many panels
MIN_CHUNKS = 4


class ConvWord(IntEnum):
    """The words of an implicit product; strides are in elements."""

    X = 0
    X_N = 1
    X_C = 2
    X_H = 3
    HEIGHT = 4
    WIDTH = 5
    CHANNELS = 6  # of a group
    KERNEL_H = 7
    KERNEL_W = 8
    STRIDE_H = 9
    STRIDE_W = 10
    DILATION_H = 11
    DILATION_W = 12
    PAD_H = 13
    PAD_W = 14
    OUT_WIDTH = 15
    PIXELS = 16
    WEIGHTS = 17
    OUTPUTS = 18  # of a group
    DEPTH = 19
    GROUPS = 20
    ROW_CHUNK = 21
    PANEL_CHUNK = 22
    OUT = 23
    OUT_N = 24
    SCRATCH = 25
    SCRATCH_STRIDE = 26  # bytes
    TILE = 27  # where a block of sums starts in scratch, in bytes
    COPY = 28  # where a copy of a chunk's weights starts in scratch, in bytes; 0: they are read in place
    FEW = 29  # pixels at the end of an image that are left to dot products
    FEW_COLUMNS = 30  # where their columns start in scratch, in bytes
    COLUMNS = 31  # routines
    BLOCK = 32
    DOTS = 33


def accepts(anchor: Conv, dtype: DType) -> bool:
    """f32 and f64 in one or two spatial axes."""
    return dtype.name in ("f32", "f64") and len(anchor.x_shape) in (3, 4)


def accepts_operand(role: str, shape: Shape, index: Affine) -> bool:
    """Images may lie anywhere, with pixels of a row next to each other."""
    return index.is_linear and index.coefs.get(_last_axis(index), 1) == 1


def _last_axis(index: Affine) -> Expr:
    return max((t for t in index.coefs if isinstance(t, Var)), key=lambda v: int(v.name[1:]), default=Var("i0"))


def layout(kernel: Kernel) -> list[Kernel]:
    """The kernel, after those that make plain copies of weights and images where they are not plain in memory."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    made: list[Kernel] = []
    if not _in_place(anchor.w, anchor.w_shape, anchor.x.dtype, whole=True):
        w, copy = _copied(kernel, "w", anchor.w, anchor.w_shape, anchor.x.dtype)
        anchor = replace(anchor, w=w)
        made.append(copy)
    if not _in_place(anchor.x, anchor.x_shape, anchor.x.dtype, whole=False):  # such as rows that repeat one element
        x, copy = _copied(kernel, "x", anchor.x, anchor.x_shape, anchor.x.dtype)
        anchor = replace(anchor, x=x)
        made.append(copy)
    plain = Kernel(kernel.name, kernel.stores, anchor, nodes=kernel.nodes, tag=kernel.tag)
    tag = winograd.choose(plain)
    return [*made, *(winograd.layout(plain, tag) if tag else [plain])]


def _in_place(e: Expr, shape: Shape, dtype: DType, *, whole: bool) -> bool:
    """Whether the operand's rows are plain in memory; with `whole`, all of it."""
    if not isinstance(e, Load) or e.dtype is not dtype or e.where is not None or e.source.encoding is not None:
        return False
    index = linear_index(e.indices, e.source.shape)
    axes = list(zip(out_vars(len(shape)), row_major(shape), shape, strict=True))
    return all(index.coefs.get(v, 0) == stride for v, stride, n in (axes if whole else axes[-1:]) if n != 1)


def _copied(kernel: Kernel, role: str, e: Expr, shape: Shape, dtype: DType) -> tuple[Expr, Kernel]:
    static = all(x.source.kind in ("param", "const", "prepared") for x in loads(e))
    name = f"{kernel.stores[0].buffer.name}.{role}"
    buffer = Buffer(name, "prepared" if static else "arena", shape, dtype)
    vars = out_vars(len(shape))
    store = Store(buffer, shape, vars, e if e.dtype is dtype else Cast(e, dtype))
    return Load(buffer, vars, dtype), Kernel(f"copy {role}", (store,), nodes=kernel.nodes)


def emit(kernel: Kernel) -> KernelCode:
    """The convolution with its epilogue, or the transform of its weights."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    if kernel.tag == winograd.WEIGHTS:
        return winograd.emit_weights(kernel)
    if kernel.tag in winograd.TAGS:
        return winograd.emit(kernel)
    geo = geometry(kernel)
    finish = finish_of(kernel, anchor.x.dtype)
    return depthwise.emit(anchor, geo, finish) if depthwise.suits(anchor, geo, finish) else _emit_product(kernel, geo)


@dataclass(frozen=True)
class _Cut:
    """How the work is split: chunk = ((image, group) * pixel blocks + pixel block) * row blocks + row block."""

    row_chunk: int
    panel_chunk: int
    chunks: int
    tile: int
    copy: int
    few: int
    few_columns: int
    scratch: int


def _cut(geo: Geometry, tile: gemm.Tile, to_scratch: bool, extents: Extents) -> _Cut:
    sizes = (geo.batch, geo.outputs, geo.depth, geo.pixels, geo.groups)
    batch, rows, depth, pixels, groups = (evaluate(s, extents) for s in sizes)
    size = size_of(tile.scalar)
    few = pixels % tile.width
    few = few if few <= FEW_PIXELS and pixels > tile.width and depth >= LONG else 0
    panels = -(-(pixels - few) // tile.width)
    a_panel = max(2 * rows * depth * tile.width, 1)
    chunk = min(round(FLOPS_PER_CHUNK / a_panel), PANEL_BYTES // max(depth * tile.width * size, 1))
    chunk = max(min(max(chunk, MIN_PANELS), panels), 1)
    blocks = max(-(-panels // chunk), 1)
    chunk = max(-(-panels // blocks), 1)
    # rows are cut only where there would be few chunks, since each row block gathers the columns again
    missing = -(-MIN_CHUNKS // max(batch * groups * blocks, 1))
    row_blocks = max(min(missing, round(a_panel * chunk / FLOPS_PER_CHUNK), rows // 96), 1)
    row_chunk = max(-(-rows // row_blocks), 1)
    if row_blocks > 1:
        row_chunk = -(-row_chunk // tile.rows) * tile.rows
    row_blocks = -(-rows // row_chunk)
    at = _aligned((chunk + (few > 0)) * depth * tile.width * size)
    tile_bytes = _aligned(row_chunk * (chunk + 1) * tile.width * size) if to_scratch else 0
    copied = depth and depth * size % 4096 == 0 and row_chunk > 12 and chunk >= 4
    copy = _aligned(row_chunk * (gemm.k_block(depth) + gemm.COPY_PAD) * size) if copied else 0
    ends = (at, at + tile_bytes, at + tile_bytes + copy, at + tile_bytes + copy + _aligned(few * depth * size))
    count = batch * groups * blocks * row_blocks if pixels else 0
    return _Cut(row_chunk, chunk, count, ends[0], ends[1] if copied else 0, few, ends[2], ends[3])


def _aligned(count: int) -> int:
    return -(-count // 64) * 64


def _emit_product(kernel: Kernel, geo: Geometry) -> KernelCode:
    anchor, store = kernel.anchor, kernel.stores[0]
    assert isinstance(anchor, Conv)
    assert isinstance(anchor.w, Load)
    assert isinstance(anchor.x, Load)
    dtype = anchor.x.dtype
    tile = gemm.tile_for(cast(Literal["f32", "f64"], dtype.name), host().vector_bytes)
    finish = finish_of(kernel, dtype)
    to_scratch = not finish.in_place
    weights = linear_index(anchor.w.indices, anchor.w.source.shape)

    def cut(extents: Extents) -> _Cut:
        return _cut(geo, tile, to_scratch, extents)

    words: list[Word] = [
        Pointer(anchor.x.source, geo.x.constant * dtype.itemsize),
        geo.x_n,
        geo.x_c,
        geo.x_h,
        geo.height,
        geo.width,
        geo.channels,
        *geo.kernel,
        *geo.strides,
        *geo.dilations,
        *geo.pads,
        geo.out_width,
        geo.pixels,
        Pointer(anchor.w.source, weights.constant * dtype.itemsize),
        geo.outputs,
        geo.depth,
        geo.groups,
        Computed(lambda e: cut(e).row_chunk),
        Computed(lambda e: cut(e).panel_chunk),
        Pointer(store.buffer, geo.out.constant * store.buffer.dtype.itemsize),
        geo.out_n,
        Scratch(),
        Computed(lambda e: cut(e).scratch),
        Computed(lambda e: cut(e).tile),
        Computed(lambda e: cut(e).copy),
        Computed(lambda e: cut(e).few),
        Computed(lambda e: cut(e).few_columns),
        _columns_routine(tile, geo.strides[1]),
        gemm.block_routine(tile),
        _dots_routine(tile),
    ]
    table = WordTable(words)
    f = gemm.kernel_function(PLACEHOLDER)
    emitter = Emitter(f, table, host().vector_bytes // size_of(tile.scalar))
    if not finish.plain:
        finish.prepare(emitter)
        finish.settle(emitter)
    ty, width = tile.scalar, tile.width

    def word(index: ConvWord) -> str:
        pointers = ("X", "WEIGHTS", "OUT", "SCRATCH", "COLUMNS", "BLOCK", "DOTS")
        return gemm.load_word(f, index, "ptr" if index.name in pointers else "i64")

    rows, pixels, depth, groups = (
        word(i) for i in (ConvWord.OUTPUTS, ConvWord.PIXELS, ConvWord.DEPTH, ConvWord.GROUPS)
    )
    row_chunk = word(ConvWord.ROW_CHUNK)
    pixel_chunk = f.mul(word(ConvWord.PANEL_CHUNK), width)
    row_blocks = f.div(f.sub(f.add(rows, row_chunk), 1), row_chunk)
    few = word(ConvWord.FEW)
    many = f.sub(pixels, few)
    blocks = f.div(f.sub(f.add(many, pixel_chunk), 1), pixel_chunk)
    rest, row_block = f.div("%chunk", row_blocks), f.rem("%chunk", row_blocks)
    rest, block = f.div(rest, blocks), f.rem(rest, blocks)
    image, group = f.div(rest, groups), f.rem(rest, groups)
    m0 = f.mul(row_block, row_chunk)
    m1 = f.min(f.add(m0, row_chunk), rows)
    p0 = f.mul(block, pixel_chunk)
    stop = f.min(f.add(p0, pixel_chunk), many)
    ends = f.cmp("eq", stop, many)
    p1 = f.select(ends, pixels, stop)
    own = f.offset(word(ConvWord.SCRATCH), f.mul("%worker", word(ConvWord.SCRATCH_STRIDE)))
    channel = f.mul(f.mul(group, word(ConvWord.CHANNELS)), word(ConvWord.X_C))
    x = f.gep(word(ConvWord.X), f.add(f.mul(image, word(ConvWord.X_N)), channel), ty)
    f.call(word(ConvWord.COLUMNS), [x, own, "%words", p0, p1])

    first = f.add(f.mul(group, rows), m0)  # of the output channels
    copy_at = word(ConvWord.COPY)
    copy = f.select(f.cmp("ne", copy_at, 0), f.offset(own, copy_at), "null", "ptr")
    if to_scratch:
        c, ldc = f.offset(own, word(ConvWord.TILE)), f.add(pixel_chunk, width)
    else:
        at = f.add(f.mul(image, word(ConvWord.OUT_N)), f.add(f.mul(first, pixels), p0))
        c, ldc = f.gep(word(ConvWord.OUT), at, ty), pixels
    w = f.gep(word(ConvWord.WEIGHTS), f.mul(first, depth), ty)
    stride = f.mul(depth, width)
    f.call(
        word(ConvWord.BLOCK),
        [w, depth, own, stride, c, ldc, f.sub(m1, m0), f.sub(stop, p0), depth, copy],
    )

    def last_pixels() -> None:
        at = f.sub(stop, p0)
        panel = f.gep(own, f.mul(at, depth), ty)
        columns = f.offset(own, word(ConvWord.FEW_COLUMNS))
        f.call(word(ConvWord.DOTS), [panel, columns, w, f.gep(c, at, ty), ldc, f.sub(m1, m0), depth, few])

    f.if_(f.and_(ends, f.cmp("ne", few, 0)), last_pixels)
    if not finish.plain:
        top = Scope(1, None, {finish.image: image})
        emitter.hoist(finish.expr, frozenset((finish.channel, *finish.space)), top)

        def one(m: str, _: list[str]) -> None:
            scope = top.inner({finish.channel: f.add(first, m)})
            emitter.hoist(finish.expr, frozenset(finish.space), scope)
            finish.pixels(emitter, scope, p0, p1, f.gep(c, f.mul(m, ldc), ty))

        f.loop(0, f.sub(m1, m0), 1, [], one)
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    scratch = Computed(lambda e: cut(e).scratch)
    return KernelCode(symbol, ir, tuple(table.words), lambda e: cut(e).chunks, tuple(emitter.sites), scratch)


@cache
def _dots_routine(tile: gemm.Tile) -> Routine:
    function = _dots(tile)
    return Routine(function.name, Module([function]).text())


def _dots(tile: gemm.Tile) -> Function:
    """Sums for up to FEW_PIXELS pixels, as dot products of rows of weights and columns.

    `(ptr panel, ptr columns, ptr w, ptr c, i64 ldc, i64 rows, i64 depth, i64 count)`: the pixels are the first of the
    panel; `columns` is room for them one after the other.
    """
    ty, vector, lanes = tile.scalar, tile.vector, tile.lanes
    arguments = [("ptr", "panel"), ("ptr", "columns"), ("ptr", "w"), ("ptr", "c"), ("i64", "ldc"), ("i64", "rows")]
    f = Function(f"rlx_dots_{tile.dtype}", [*arguments, ("i64", "depth"), ("i64", "count")])

    def take_out(k: str, _: list[str]) -> None:
        def one(i: str, _: list[str]) -> None:
            value = f.load(ty, f.gep("%panel", f.add(f.mul(k, tile.width), i), ty))
            f.store(value, f.gep("%columns", f.add(f.mul(i, "%depth"), k), ty))

        f.loop(0, "%count", 1, [], one)

    f.loop(0, "%depth", 1, [], take_out)
    whole = f.and_("%depth", -lanes)
    rest = f.mask_below(f.sub("%depth", whole), lanes)

    def dots(count: int, rows: int) -> Callable[[str, list[str]], None]:
        def body(row: str, _: list[str]) -> None:
            lines = [f.gep("%w", f.mul(f.add(row, i), "%depth"), ty) for i in range(rows)]
            columns = [f.gep("%columns", f.mul("%depth", i), ty) for i in range(count)]

            def add(k: str, sums: list[str], load: Callable[[str], str]) -> list[str]:
                x = [load(f.gep(p, k, ty)) for p in columns]
                found = []
                for i, p in enumerate(lines):
                    y = load(f.gep(p, k, ty))
                    found += [f.fma(y, x[j], sums[i * count + j]) for j in range(count)]
                return found

            zeros: list[Typed] = [(vector, constant(0.0, vector))] * (rows * count)
            sums = f.loop(0, whole, lanes, zeros, lambda k, a: add(k, a, lambda p: f.load(vector, p)))
            sums = add(whole, sums, lambda p: f.masked_load(vector, p, rest))
            for i in range(rows):
                out = f.gep("%c", f.mul(f.add(row, i), "%ldc"), ty)
                for j in range(count):
                    f.store(f.reduce(sums[i * count + j], f.add), f.gep(out, j, ty))

        return body

    def case(count: int) -> Callable[[], None]:
        def body() -> None:
            rows = 8 // count  # enough sums under way, and few enough for the registers
            grouped = f.sub("%rows", f.rem("%rows", rows))
            f.loop(0, grouped, rows, [], dots(count, rows))
            f.loop(grouped, "%rows", 1, [], dots(count, 1))

        return body

    f.switch("%count", {count: case(count) for count in range(1, FEW_PIXELS + 1)})
    f.ret()
    return f


# ---- gathering columns


@cache
def _columns_routine(tile: gemm.Tile, stride: int) -> Routine:
    function = _columns(tile, stride if stride in (1, 2) else 0)
    return Routine(function.name, Module([function]).text())


def _columns(tile: gemm.Tile, kind: int) -> Function:
    """Gathers the columns of pixels [p0, p1) into panels [K][width]; `x` is at the group's first channel.

    `kind` is the column stride, 0 for any. A panel's pixels are taken one image row at a time. Which lanes of a load
    are inside the image depends on the tap and not on the channel, so channels are the inner loop. Nothing outside the
    image is read.
    """
    ty, lanes, width = tile.scalar, tile.lanes, tile.width
    f = Function(
        f"rlx_columns_{tile.dtype}_{kind}",
        [("ptr", "x"), ("ptr", "out"), ("ptr", "words"), ("i64", "p0"), ("i64", "p1")],
    )
    ity = "i32" if size_of(ty) == 4 else "i64"
    vectors = width // lanes
    wanted = [w for w in ConvWord if ConvWord.X_C <= w <= ConvWord.OUT_WIDTH] + [ConvWord.DEPTH]
    word = {w: gemm.load_word(f, w) for w in wanted}
    taps = f.mul(word[ConvWord.KERNEL_H], word[ConvWord.KERNEL_W])
    step_w = word[ConvWord.STRIDE_W]
    in_step, out_step = word[ConvWord.X_C], f.mul(taps, width)
    image_width = word[ConvWord.WIDTH]
    reach = f.add(f.mul(step_w, width - 1), int(kind == 2))  # pairs are loaded whole

    def splat(value: str) -> str:
        narrow = f.cast("trunc", value, ity) if ity != "i64" else value
        return f.splat(narrow, lanes, ity)

    def ramp(j: int) -> str:
        return constant(list(range(j * lanes, (j + 1) * lanes)), vec(ity, lanes))

    def every_channel(p: str, target: str, turn: Callable[[str, str], None]) -> None:
        def body(_: str, state: list[str]) -> list[str]:
            turn(state[0], state[1])
            return [f.gep(state[0], in_step, ty), f.gep(state[1], out_step, ty)]

        f.loop(0, word[ConvWord.CHANNELS], 1, [("ptr", p), ("ptr", target)], body)

    def pick(low: str, high: str) -> str:
        return f.shuffle(low, high, list(range(0, 2 * lanes, 2)))

    def load_all(p: str, j: int) -> str:
        if kind == 1:
            return f.load(tile.vector, f.gep(p, j * lanes, ty))
        if kind == 2:
            parts = [f.load(tile.vector, f.gep(p, (2 * j + i) * lanes, ty)) for i in (0, 1)]
            return pick(*parts)
        value = "poison"
        for i in range(lanes):
            at = f.mul(step_w, j * lanes + i)
            value = f.insert(value, f.load(ty, f.gep(p, at, ty)), i, tile.vector)
        return value

    def panel(p: str, _: list[str]) -> None:
        count = f.min(f.sub("%p1", p), width)
        target = f.gep("%out", f.mul(f.sub(p, "%p0"), word[ConvWord.DEPTH]), ty)

        def segment(state: list[str]) -> list[str]:
            lane, oh, ow = state
            taken = f.min(f.sub(count, lane), f.sub(word[ConvWord.OUT_WIDTH], ow))
            after = f.add(lane, taken)
            owned = []
            for j in range(vectors):
                low = f.cmp("ge", ramp(j), splat(lane), vec(ity, lanes))
                owned.append(f.and_(low, f.cmp("lt", ramp(j), splat(after), vec(ity, lanes))))
            top = f.sub(f.mul(oh, word[ConvWord.STRIDE_H]), word[ConvWord.PAD_H])
            left = f.sub(f.mul(f.sub(ow, lane), step_w), word[ConvWord.PAD_W])
            whole = f.cmp("eq", taken, width)
            start = f.cmp("eq", lane, 0)

            def tap(t: str, _: list[str]) -> None:
                kh, kw = f.div(t, word[ConvWord.KERNEL_W]), f.rem(t, word[ConvWord.KERNEL_W])
                y = f.add(top, f.mul(kh, word[ConvWord.DILATION_H]))
                at = f.add(left, f.mul(kw, word[ConvWord.DILATION_W]))
                inside = f.cmp("ult", y, word[ConvWord.HEIGHT])
                p = f.gep("%x", f.add(f.mul(y, word[ConvWord.X_H]), at), ty)
                out = f.gep(target, f.mul(t, width), ty)
                safe = f.and_(f.cmp("ge", at, 0), f.cmp("lt", f.add(at, reach), image_width))

                def plain() -> None:
                    def turn(source: str, place: str) -> None:
                        for j in range(vectors):
                            f.store(load_all(source, j), f.gep(place, j * lanes, ty))

                    every_channel(p, out, turn)

                def masked() -> None:
                    _masked(f, tile, kind, ity, owned, inside, at, step_w, image_width, start, (p, out), every_channel)

                f.if_(f.and_(f.and_(whole, safe), inside), plain, masked)

            f.loop(0, taps, 1, [], tap)
            return [after, f.add(oh, 1), "0"]

        first: list[Typed] = [("i64", 0), f.div(p, word[ConvWord.OUT_WIDTH]), f.rem(p, word[ConvWord.OUT_WIDTH])]
        f.while_(first, lambda s: f.cmp("lt", s[0], count), segment)

    f.loop("%p0", "%p1", width, [], panel)
    f.ret()
    return f


def _masked(
    f: Function,
    tile: gemm.Tile,
    kind: int,
    ity: str,
    owned: list[str],
    inside: str,
    at: str,
    step: str,
    width: str,
    start: str,
    where: tuple[str, str],
    every_channel: Callable[[str, str, Callable[[str, str], None]], None],
) -> None:
    """The lanes of one image row of a panel; the first row's vectors have zeros elsewhere, later rows are put in."""
    ty, lanes = tile.scalar, tile.lanes
    vity, vectors = vec(ity, lanes), len(owned)

    def narrow(value: str) -> str:
        return f.splat(f.cast("trunc", value, ity) if ity != "i64" else value, lanes, ity)

    shown, mine = [], []
    for j in range(vectors):
        ramp = constant(list(range(j * lanes, (j + 1) * lanes)), vity)
        column = f.add(narrow(at), f.mul(narrow(step), ramp, vity), vity)
        good = f.and_(f.cmp("ge", column, 0, vity), f.cmp("lt", column, narrow(width), vity))
        good = f.and_(f.and_(good, owned[j]), f.splat(inside, lanes, "i1"))
        # full-width masks: bits of a vector of i1 don't stay in vector registers across blocks
        shown.append(f.cast("sext", good, vity))
        mine.append(f.cast("sext", owned[j], vity))

    def gather(p: str, mask: str, j: int) -> str:
        if kind == 1:
            return f.masked_load(tile.vector, f.gep(p, j * lanes, ty), f.cmp("lt", mask, 0, vity))
        if kind == 2:
            parts = []
            for half in (0, 1):
                picks = [half * lanes // 2 + i // 2 if i % 2 == 0 else lanes for i in range(lanes)]
                spread = f.op(
                    f"shufflevector {vity} {mask}, {vity} zeroinitializer, "
                    f"<{lanes} x i32> <{', '.join(f'i32 {i}' for i in picks)}>",
                    vity,
                )
                address = f.gep(p, (2 * j + half) * lanes, ty)
                parts.append(f.masked_load(tile.vector, address, f.cmp("lt", spread, 0, vity)))
            return f.shuffle(parts[0], parts[1], list(range(0, 2 * lanes, 2)))
        value = constant(0.0, tile.vector)
        for i in range(lanes):
            address = f.gep(p, f.mul(step, j * lanes + i), ty)
            element = f.masked_load(ty, address, f.cmp("lt", f.extract(mask, i), 0))
            value = f.insert(value, element, i, tile.vector)
        return value

    def set_lanes(source: str, place: str) -> None:
        for j in range(vectors):
            f.store(gather(source, shown[j], j), f.gep(place, j * lanes, ty))

    def put_lanes(source: str, place: str) -> None:
        for j in range(vectors):
            spot = f.gep(place, j * lanes, ty)
            old = f.load(tile.vector, spot)
            f.store(f.select(f.cmp("lt", mine[j], 0, vity), gather(source, shown[j], j), old), spot)

    f.if_(
        start,
        lambda: every_channel(*where, set_lanes),
        lambda: every_channel(*where, put_lanes),
    )
