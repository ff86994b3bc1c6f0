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

from rlx.backends.cpu import depthwise, gemm
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
TABLE = 64  # taps that are gathered at once
MIN_PANELS = 6  # a chunk's rows of weights are read for at least this many panels


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
    COLUMNS = 29  # routines
    BLOCK = 30


def accepts(anchor: Conv, dtype: DType) -> bool:
    """f32 and f64 in one or two spatial axes."""
    return dtype.name in ("f32", "f64") and len(anchor.x_shape) in (3, 4)


def accepts_operand(role: str, shape: Shape, index: Affine) -> bool:
    """Images may lie anywhere, with pixels of a row next to each other."""
    return index.is_linear and index.coefs.get(_last_axis(index), 1) == 1


def _last_axis(index: Affine) -> Expr:
    return max((t for t in index.coefs if isinstance(t, Var)), key=lambda v: int(v.name[1:]), default=Var("i0"))


def layout(kernel: Kernel) -> list[Kernel]:
    """The kernel, after one that makes a plain copy of the weights where they are not plain in memory."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    w, shape, dtype = anchor.w, anchor.w_shape, anchor.x.dtype
    vars = out_vars(len(shape))
    if isinstance(w, Load) and w.dtype is dtype and w.where is None and w.source.encoding is None:
        index = linear_index(w.indices, w.source.shape)
        wanted = {v: s for v, s, n in zip(vars, row_major(shape), shape, strict=True) if n != 1}
        have = {v: c for v, c in index.coefs.items() if v not in vars or shape[vars.index(v)] != 1}
        if have == wanted:
            return [kernel]
    static = all(x.source.kind in ("param", "const", "prepared") for x in loads(w))
    buffer = Buffer(f"{kernel.stores[0].buffer.name}.w", "prepared" if static else "arena", shape, dtype)
    store = Store(buffer, shape, vars, w if w.dtype is dtype else Cast(w, dtype))
    copied = replace(anchor, w=Load(buffer, vars, dtype))
    copy = Kernel("copy w", (store,), nodes=kernel.nodes)
    return [copy, Kernel(kernel.name, kernel.stores, copied, nodes=kernel.nodes, tag=kernel.tag)]


def emit(kernel: Kernel) -> KernelCode:
    """The convolution with its epilogue."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    geo = geometry(kernel)
    finish = finish_of(kernel, anchor.x.dtype)
    return depthwise.emit(anchor, geo, finish) if depthwise.suits(anchor, finish) else _emit_product(kernel, geo)


@dataclass(frozen=True)
class _Cut:
    """How the work is split: chunk = ((image, group) * pixel blocks + pixel block) * row blocks + row block."""

    row_chunk: int
    panel_chunk: int
    chunks: int
    tile: int
    copy: int
    scratch: int


def _cut(geo: Geometry, tile: gemm.Tile, to_scratch: bool, extents: Extents) -> _Cut:
    sizes = (geo.batch, geo.outputs, geo.depth, geo.pixels, geo.groups)
    batch, rows, depth, pixels, groups = (evaluate(s, extents) for s in sizes)
    size = size_of(tile.scalar)
    panels = -(-pixels // tile.width)
    a_panel = max(2 * rows * depth * tile.width, 1)
    chunk = min(round(FLOPS_PER_CHUNK / a_panel), PANEL_BYTES // max(depth * tile.width * size, 1))
    chunk = max(min(max(chunk, MIN_PANELS), panels), 1)
    blocks = max(-(-panels // chunk), 1)
    chunk = max(-(-panels // blocks), 1)
    row_blocks = max(min(round(a_panel * chunk / (1.5 * FLOPS_PER_CHUNK)), rows // 120), 1)
    row_chunk = max(-(-rows // row_blocks), 1)
    if row_blocks > 1:
        row_chunk = -(-row_chunk // tile.rows) * tile.rows
    row_blocks = -(-rows // row_chunk)
    at = _aligned(chunk * depth * tile.width * size)
    tile_bytes = _aligned(row_chunk * chunk * tile.width * size) if to_scratch else 0
    copied = depth and depth * size % 4096 == 0 and row_chunk > 12 and chunk >= 4
    copy = _aligned(row_chunk * (gemm.k_block(depth) + gemm.COPY_PAD) * size) if copied else 0
    count = batch * groups * blocks * row_blocks if pixels else 0
    return _Cut(row_chunk, chunk, count, at, at + tile_bytes if copied else 0, at + tile_bytes + copy)


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
        _columns_routine(tile, geo.strides[1]),
        gemm.block_routine(tile),
    ]
    table = WordTable(words)
    f = gemm.kernel_function(PLACEHOLDER)
    emitter = Emitter(f, table, host().vector_bytes // size_of(tile.scalar))
    if not finish.plain:
        finish.prepare(emitter)
        finish.settle(emitter)
    ty, width = tile.scalar, tile.width

    def word(index: ConvWord) -> str:
        pointers = ("X", "WEIGHTS", "OUT", "SCRATCH", "COLUMNS", "BLOCK")
        return gemm.load_word(f, index, "ptr" if index.name in pointers else "i64")

    rows, pixels, depth, groups = (
        word(i) for i in (ConvWord.OUTPUTS, ConvWord.PIXELS, ConvWord.DEPTH, ConvWord.GROUPS)
    )
    row_chunk = word(ConvWord.ROW_CHUNK)
    pixel_chunk = f.mul(word(ConvWord.PANEL_CHUNK), width)
    row_blocks = f.div(f.sub(f.add(rows, row_chunk), 1), row_chunk)
    blocks = f.div(f.sub(f.add(pixels, pixel_chunk), 1), pixel_chunk)
    rest, row_block = f.div("%chunk", row_blocks), f.rem("%chunk", row_blocks)
    rest, block = f.div(rest, blocks), f.rem(rest, blocks)
    image, group = f.div(rest, groups), f.rem(rest, groups)
    m0 = f.mul(row_block, row_chunk)
    m1 = f.min(f.add(m0, row_chunk), rows)
    p0 = f.mul(block, pixel_chunk)
    p1 = f.min(f.add(p0, pixel_chunk), pixels)
    own = f.offset(word(ConvWord.SCRATCH), f.mul("%worker", word(ConvWord.SCRATCH_STRIDE)))
    channel = f.mul(f.mul(group, word(ConvWord.CHANNELS)), word(ConvWord.X_C))
    x = f.gep(word(ConvWord.X), f.add(f.mul(image, word(ConvWord.X_N)), channel), ty)
    f.call(word(ConvWord.COLUMNS), [x, own, "%words", p0, p1])

    first = f.add(f.mul(group, rows), m0)  # of the output channels
    copy_at = word(ConvWord.COPY)
    copy = f.select(f.cmp("ne", copy_at, 0), f.offset(own, copy_at), "null", "ptr")
    if to_scratch:
        c, ldc = f.offset(own, word(ConvWord.TILE)), pixel_chunk
    else:
        at = f.add(f.mul(image, word(ConvWord.OUT_N)), f.add(f.mul(first, pixels), p0))
        c, ldc = f.gep(word(ConvWord.OUT), at, ty), pixels
    w = f.gep(word(ConvWord.WEIGHTS), f.mul(first, depth), ty)
    stride = f.mul(depth, width)
    f.call(
        word(ConvWord.BLOCK),
        [w, depth, own, stride, c, ldc, f.sub(m1, m0), f.sub(p1, p0), depth, copy],
    )
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


# ---- gathering columns


@cache
def _columns_routine(tile: gemm.Tile, stride: int) -> Routine:
    function = _columns(tile, stride if stride in (1, 2) else 0)
    return Routine(function.name, Module([function]).text())


def _columns(tile: gemm.Tile, kind: int) -> Function:
    """Gathers the columns of pixels [p0, p1) into panels [K][width]; `x` is at the group's first channel.

    `kind` is the column stride, 0 for any. A panel's pixels are taken one image row at a time. Where a tap is found, and
    which lanes of it are inside the image, is the same in all channels: a table on the stack holds it for some taps,
    and then each channel is read and written in order. Nothing outside the image is read.
    """
    f = Function(
        f"rlx_columns_{tile.dtype}_{kind}",
        [("ptr", "x"), ("ptr", "out"), ("ptr", "words"), ("i64", "p0"), ("i64", "p1")],
    )
    wanted = [w for w in ConvWord if ConvWord.X_C <= w <= ConvWord.OUT_WIDTH] + [ConvWord.DEPTH]
    gather = _Gather(f, tile, kind, {w: gemm.load_word(f, w) for w in wanted})
    f.loop("%p0", "%p1", tile.width, [], gather.panel)
    f.ret()
    return f


class _Gather:
    """Emits the gathering of one panel."""

    def __init__(self, f: Function, tile: gemm.Tile, kind: int, word: dict[ConvWord, str]) -> None:
        self.f, self.tile, self.kind, self.word = f, tile, kind, word
        self.ty, self.lanes = tile.scalar, tile.lanes
        self.integer = "i32" if size_of(tile.scalar) == 4 else "i64"
        self.masks = vec(self.integer, tile.lanes)
        self.vectors = tile.width // tile.lanes
        self.loads = self.vectors * (2 if kind == 2 else 1)  # of one tap; with stride 2 every second element is picked
        self.taps = f.mul(word[ConvWord.KERNEL_H], word[ConvWord.KERNEL_W])
        self.places = f.alloca("i64", TABLE)
        self.shown = f.alloca(self.masks, TABLE * self.loads)  # full-width integers: negative where an element is read

    def panel(self, p: str, _: list[str]) -> None:
        f, word = self.f, self.word
        count = f.min(f.sub("%p1", p), self.tile.width)
        target = f.gep("%out", f.mul(f.sub(p, "%p0"), word[ConvWord.DEPTH]), self.ty)
        width = word[ConvWord.OUT_WIDTH]

        def row(state: list[str]) -> list[str]:
            lane, oh, ow = state
            after = f.add(lane, f.min(f.sub(count, lane), f.sub(width, ow)))
            self.segment(target, lane, after, oh, ow)
            return [after, f.add(oh, 1), "0"]

        first: list[Typed] = [("i64", 0), f.div(p, width), f.rem(p, width)]
        f.while_(first, lambda s: f.cmp("lt", s[0], count), row)

    def segment(self, target: str, lane: str, after: str, oh: str, ow: str) -> None:
        """Lanes [lane, after) of a panel: the pixels of image row `oh` from column `ow` on."""
        f, word = self.f, self.word
        step = word[ConvWord.STRIDE_W]
        top = f.sub(f.mul(oh, word[ConvWord.STRIDE_H]), word[ConvWord.PAD_H])
        left = f.sub(f.mul(f.sub(ow, lane), step), word[ConvWord.PAD_W])
        first = f.cmp("eq", lane, 0)
        below = f.add(top, f.mul(f.sub(word[ConvWord.KERNEL_H], 1), word[ConvWord.DILATION_H]))
        right = f.add(left, f.mul(f.sub(word[ConvWord.KERNEL_W], 1), word[ConvWord.DILATION_W]))
        right = f.add(right, f.add(f.mul(step, self.tile.width - 1), int(self.kind == 2)))  # pairs are loaded whole
        whole = f.and_(first, f.cmp("eq", after, self.tile.width))
        for inside in (
            f.cmp("ge", top, 0),
            f.cmp("ge", left, 0),
            f.cmp("lt", below, word[ConvWord.HEIGHT]),
            f.cmp("lt", right, word[ConvWord.WIDTH]),
        ):
            whole = f.and_(whole, inside)
        mine = [self.between([j * self.lanes + i for i in range(self.lanes)], lane, after) for j in range(self.vectors)]
        owned = [self.between(self.pixels_of(i), lane, after) for i in range(self.loads)]

        def some_taps(t0: str, _: list[str]) -> None:
            count = f.min(f.sub(self.taps, t0), TABLE)
            out = f.gep(target, f.mul(t0, self.tile.width), self.ty)

            def plain() -> None:
                f.loop(0, count, 1, [], lambda t, _: self.note(t, f.add(t, t0), top, left, None))
                self.channels(out, count, self.read_all)

            def partial() -> None:
                f.loop(0, count, 1, [], lambda t, _: self.note(t, f.add(t, t0), top, left, owned))
                f.if_(
                    first,
                    lambda: self.channels(out, count, self.read_some),
                    lambda: self.channels(out, count, self.read_some, mine),
                )

            f.if_(whole, plain, partial)

        f.loop(0, self.taps, TABLE, [], some_taps)

    def note(self, t: str, tap: str, top: str, left: str, owned: list[str] | None) -> None:
        """Puts a tap into the table: where it is in the first channel, and what may be read there."""
        f, word = self.f, self.word
        kh, kw = f.div(tap, word[ConvWord.KERNEL_W]), f.rem(tap, word[ConvWord.KERNEL_W])
        y = f.add(top, f.mul(kh, word[ConvWord.DILATION_H]))
        column = f.add(left, f.mul(kw, word[ConvWord.DILATION_W]))
        f.store(f.add(f.mul(y, word[ConvWord.X_H]), column), f.gep(self.places, t, "i64"))
        if owned is None:
            return
        row = f.splat(f.cmp("ult", y, word[ConvWord.HEIGHT]), self.lanes, "i1")
        for i, own in enumerate(owned):
            ramp = constant([i * self.lanes + j for j in range(self.lanes)], self.masks)
            if self.kind == 0:
                ramp = f.mul(self.spread(word[ConvWord.STRIDE_W]), ramp, self.masks)
            at = f.add(self.spread(column), ramp, self.masks)
            inside = f.and_(f.cmp("ge", at, 0, self.masks), f.cmp("lt", at, self.spread(word[ConvWord.WIDTH])))
            mask = f.cast("sext", f.and_(f.and_(inside, own), row), self.masks)
            f.store(mask, f.gep(self.shown, f.add(f.mul(t, self.loads), i), self.masks))

    def channels(
        self, out: str, count: str, read: Callable[[str, str], list[str]], mine: list[str] | None = None
    ) -> None:
        """Reads the taps of the table in every channel; `mine`: into these lanes only."""
        f = self.f
        kept = [f.cast("sext", m, self.masks) for m in mine] if mine else []

        def channel(_: str, state: list[str]) -> list[str]:
            def tap(t: str, _: list[str]) -> None:
                p = f.gep(state[0], f.load("i64", f.gep(self.places, t, "i64")), self.ty)
                place = f.gep(state[1], f.mul(t, self.tile.width), self.ty)
                for j, value in enumerate(read(t, p)):
                    spot = f.gep(place, j * self.lanes, self.ty)
                    if mine:
                        old = f.load(self.tile.vector, spot)
                        value = f.select(f.cmp("lt", kept[j], 0, self.masks), value, old)
                    f.store(value, spot)

            f.loop(0, count, 1, [], tap)
            step = f.mul(self.taps, self.tile.width)
            return [f.gep(state[0], self.word[ConvWord.X_C], self.ty), f.gep(state[1], step, self.ty)]

        f.loop(0, self.word[ConvWord.CHANNELS], 1, [("ptr", "%x"), ("ptr", out)], channel)

    def read_all(self, _: str, p: str) -> list[str]:
        """The pixels of a panel, all inside the image."""
        f = self.f
        if self.kind:
            return self.picked([f.load(self.tile.vector, f.gep(p, i * self.lanes, self.ty)) for i in range(self.loads)])
        return self.singly(lambda i: f.load(self.ty, f.gep(p, f.mul(self.word[ConvWord.STRIDE_W], i), self.ty)))

    def read_some(self, t: str, p: str) -> list[str]:
        """The pixels of a panel that the table shows, zeros for the others."""
        f = self.f
        masks = []
        for i in range(self.loads):
            mask = f.load(self.masks, f.gep(self.shown, f.add(f.mul(t, self.loads), i), self.masks))
            masks.append(f.cmp("lt", mask, 0, self.masks))
        if self.kind:
            places = [f.gep(p, i * self.lanes, self.ty) for i in range(self.loads)]
            loaded = [f.masked_load(self.tile.vector, q, m) for q, m in zip(places, masks, strict=True)]
            return self.picked(loaded)

        def single(i: int) -> str:
            place = f.gep(p, f.mul(self.word[ConvWord.STRIDE_W], i), self.ty)
            return f.masked_load(self.ty, place, f.extract(masks[i // self.lanes], i % self.lanes))

        return self.singly(single)

    def picked(self, loaded: list[str]) -> list[str]:
        """Every second element where the stride is 2."""
        if self.kind == 1:
            return loaded
        even = list(range(0, 2 * self.lanes, 2))
        return [self.f.shuffle(a, b, even) for a, b in zip(loaded[::2], loaded[1::2], strict=True)]

    def singly(self, load: Callable[[int], str]) -> list[str]:
        found = []
        for j in range(self.vectors):
            value = "poison"
            for i in range(self.lanes):
                value = self.f.insert(value, load(j * self.lanes + i), i, self.tile.vector)
            found.append(value)
        return found

    def pixels_of(self, load: int) -> list[int]:
        """The pixel that each element of a load belongs to; -1: to none."""
        at = [load * self.lanes + i for i in range(self.lanes)]
        return [a // 2 if a % 2 == 0 else -1 for a in at] if self.kind == 2 else at

    def between(self, numbers: list[int], low: str, high: str) -> str:
        f, ramp = self.f, constant(numbers, self.masks)
        return f.and_(f.cmp("ge", ramp, self.spread(low), self.masks), f.cmp("lt", ramp, self.spread(high), self.masks))

    def spread(self, value: str) -> str:
        narrow = self.f.cast("trunc", value, self.integer) if self.integer != "i64" else value
        return self.f.splat(narrow, self.lanes, self.integer)
