"""Depthwise convolutions of 8-bit images: direct sums in i32, of 16 channels and several neighbouring pixels at once.

Elements are widened to 16 bits, and those of two rows of a window interleaved: one instruction multiplies both by their
weights and adds them up, exactly. A vector of sums then holds channels 0-3 and 8-11 of 16, another 4-7 and 12-15, which
is the order that packing them to 8 bits wants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from rlx.backends.cpu import quad_results, quads
from rlx.backends.cpu.builder import Function, Module, vec
from rlx.backends.cpu.depthwise import Plane, chunk_parts, has_few_taps, image_words
from rlx.backends.cpu.gemm import kernel_function, load_word, void
from rlx.backends.cpu.jit import host
from rlx.backends.cpu.nest import PLACEHOLDER, Emitter, Scope, name_kernel
from rlx.backends.cpu.requantise import found, number, store_finishing
from rlx.backends.cpu.window import Finish, finish_of, geometry
from rlx.backends.cpu.words import KernelCode, Pointer, Scratch, WordTable
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import Shape, ceildiv
from rlx.kernels.expr import (
    Cast,
    Expr,
    Reduce,
    Select,
    Var,
    const,
    guarded,
    loads,
    size_expr,
    substitute_vars,
)
from rlx.kernels.lowering import Conv, out_vars
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import dataclass

__all__ = ["emit", "suits", "weights"]

I16, I32 = DTYPES["i16"], DTYPES["i32"]
CHANNELS = 16  # of a vector
AT_ONCE = 4  # pixels
V, SHORTS, BYTES = "<8 x i32>", "<16 x i16>", "<16 x i8>"
SUMS = 22  # words after those of `Plane`: where the sums of the weights are, and where results go
OUT, OUT_STEP, SCRATCH, SCRATCH_STRIDE = 23, 24, 25, 26


def suits(anchor: Conv) -> bool:
    """One channel a group and one output each, at least a vector of them, few taps."""
    return anchor.groups >= CHANNELS and has_few_taps(anchor)


def weights(kernel: Kernel) -> tuple[list[Kernel], tuple[Buffer, ...]]:
    """The kernels that arrange the weights, and add them up for each channel, in the buffer that is returned too."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    o, c, *taps = out_vars(len(anchor.w_shape))
    channels, size = anchor.groups, cast(tuple[int, ...], anchor.w_shape[2:])
    rows, columns = size if len(size) == 2 else (1, size[0])
    static = all(x.source.kind in ("param", "const", "prepared") for x in loads(anchor.w))
    kind, name = "prepared" if static else "arena", kernel.stores[0].buffer.name

    def weight(channel: Expr, row: Expr, column: Expr) -> Expr:
        at = {o: channel, c: size_expr(0), taps[-1]: column} | ({taps[0]: row} if len(taps) == 2 else {})
        return substitute_vars(anchor.w, at)

    shape: Shape = (-(-channels // CHANNELS), columns, -(-rows // 2), 2, CHANNELS)
    block, column, pair, half, lane = own = out_vars(5)
    first: Expr = block * CHANNELS  # the last vector overlaps the one before it
    first = Select(first > channels - CHANNELS, size_expr(channels - CHANNELS), first)
    place = lane // 2
    channel, row = first + half * 4 + place % 4 + place // 4 * 8, pair * 2 + lane % 2
    inside = row < rows
    element = Select(inside, guarded(weight(channel, row, column), inside), const(0, anchor.w.dtype))
    packed = Buffer(f"{name}.w", kind, shape, I16)
    store = Store(packed, shape, own, element if element.dtype is I16 else Cast(element, I16))
    sums = Buffer(f"{name}.sums", kind, (channels,), I32)
    y, x = Var("r0"), Var("r1")
    total = Reduce("add", (y, x), (rows, columns), Cast(weight(out_vars(1)[0], y, x), I32), I32)
    pack = Kernel("pack w", (store,), nodes=kernel.nodes)
    return [pack, Kernel("sums of w", (Store(sums, (channels,), out_vars(1), total),), nodes=kernel.nodes)], (sums,)


def emit(kernel: Kernel) -> KernelCode:
    """The depthwise convolution with its epilogue, which is computed in registers.

    Weights lie as [vector of channels, column, pair of rows, half of the vector, channel and row].
    """
    anchor, store = kernel.anchor, kernel.stores[0]
    assert isinstance(anchor, Conv)
    geo, finish = geometry(kernel), finish_of(kernel, I32)
    kernel_h, kernel_w = cast(tuple[int, int], geo.kernel)
    direct = found(kernel) if finish.pixel_step is not None and finish.channels_together else None

    words, chunks = image_words(anchor, geo, CHANNELS)
    words += [
        Pointer(kernel.operands[0]),
        Pointer(store.buffer, finish.constant * store.buffer.dtype.itemsize),
        0 if direct is None or finish.pixel_step is None else finish.pixel_step,
        Scratch(),
        ceildiv(geo.groups, 64) * 64,
    ]
    table = WordTable(words)
    f = kernel_function(PLACEHOLDER)
    emitter = Emitter(f, table, host().vector_bytes // 4)
    top = Scope(1, None, {})
    if direct is None:
        finish.prepare(emitter)
    finishing = f.alloca("i64", quads.FINISH)
    if direct is not None:
        store_finishing(emitter, direct, top, finishing, store.buffer.dtype)
    fill = f.cast("trunc", number(emitter, anchor.zero, top), "i8")
    w = {i: load_word(f, i, "ptr" if i in (Plane.X, Plane.WEIGHTS) else "i64") for i in Plane}
    body = _Body(
        f, emitter, finish, w, (kernel_h, kernel_w), geo.strides[1], geo.dilations[1],
        anchor.x.dtype.name == "i8",
        store.buffer.dtype.name if direct is not None else "", direct is not None and direct.bias is not None,
        direct is not None and direct.clamped, fill,
        finishing,
    )  # fmt: skip
    body.emit(top)
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    scratch = ceildiv(geo.groups, 64) * 64
    return KernelCode(symbol, ir, tuple(table.words), chunks, tuple(emitter.sites), scratch)


@dataclass(frozen=True)
class _Body:
    """Emits the code of one chunk."""

    f: Function
    emitter: Emitter
    finish: Finish
    w: dict[Plane, str]
    kernel: tuple[int, int]
    stride: int
    dilation: int
    signed: bool
    result: str  # "u8" or "i8" where results are requantised in registers, else ""
    biased: bool
    clamped: bool
    fill: str  # i8: what padding holds
    finishing: str

    def emit(self, top: Scope) -> None:
        f, w = self.f, self.w
        image, row0, row1, c0, c1 = chunk_parts(f, w)
        own = f.mul("%worker", load_word(f, SCRATCH_STRIDE))
        padding = f.offset(load_word(f, SCRATCH, "ptr"), own)  # a pixel of it
        f.loop(0, w[Plane.CHANNELS], 1, [], lambda i, _: f.store(self.fill, f.offset(padding, i), ty="i8"))
        x = f.offset(w[Plane.X], f.mul(image, w[Plane.X_N]))
        if not self.result:
            self.emitter.hoist(self.finish.expr, frozenset((self.finish.channel, *self.finish.space)), top)
        out = load_word(f, OUT, "ptr"), load_word(f, OUT_STEP)
        starting = self.starting()
        taps = self.kernel[1] * -(-self.kernel[0] // 2) * 64 // CHANNELS  # bytes of weights for a channel

        def row(oy: str, _: list[str]) -> None:
            first = f.mul(f.add(f.mul(image, w[Plane.OUT_HEIGHT]), oy), w[Plane.OUT_WIDTH])
            lines = self.lines(x, padding, oy)

            def pixels(ox: str, count: int, *, edge: bool) -> None:
                """Neighbouring pixels, all their channels: an image of many is read once, line by line."""
                places = [(f.offset(p, f.mul(f.mul(ox, w[Plane.STRIDE_W]), step)), step) for p, step in lines]

                def vectors(c: str, _: list[str]) -> None:
                    at = f.min(c, f.sub(w[Plane.CHANNELS], CHANNELS))
                    weights = f.offset(w[Plane.WEIGHTS], f.mul(c, taps))
                    own = f.offset(padding, at)
                    totals = self.sums(places, own, ox, at, weights, [starting(at) for _ in range(count)], edge=edge)
                    self.putting(at, top, first, out)(ox, totals)

                f.loop(c0, c1, CHANNELS, [], vectors)

            def group(ox: str, _: list[str]) -> None:  # the last one overlaps the one before it
                at = f.min(ox, f.sub(w[Plane.OUT_WIDTH], AT_ONCE))
                inside = f.and_(
                    f.cmp("ge", at, w[Plane.INNER_FROM]),
                    f.cmp("le", f.add(at, AT_ONCE), w[Plane.INNER_TO]),
                    "i1",
                )
                f.if_(inside, lambda: pixels(at, AT_ONCE, edge=False), lambda: pixels(at, AT_ONCE, edge=True))

            f.if_(
                f.cmp("ge", w[Plane.OUT_WIDTH], AT_ONCE),
                lambda: void(f.loop(0, w[Plane.OUT_WIDTH], AT_ONCE, [], group)),
                lambda: void(f.loop(0, w[Plane.OUT_WIDTH], 1, [], lambda ox, _: pixels(ox, 1, edge=True))),
            )

        f.loop(row0, row1, 1, [], row)

    def halves(self, array: str, channel: str, ty: str) -> list[str]:
        """16 numbers of 4 bytes from a channel on, in the order of the sums."""
        f = self.f
        p = f.offset(array, f.mul(channel, 4))
        low, high = (f.load(vec(ty, 8), f.offset(p, 32 * j), align=4) for j in range(2))
        return [f.shuffle(low, high, [4 * j + i + k for k in (0, 8) for i in range(4)]) for j in range(2)]

    def starting(self) -> Callable[[str], list[str]]:
        """What gives the sums of 16 channels to start with: what the zero point takes off, and the bias."""
        f = self.f
        sums = load_word(f, SUMS, "ptr")
        bias = f.load("ptr", f.gep(self.finishing, int(quads.Finishing.BIAS), "i64")) if self.biased else ""
        shift = f.cast("sext" if self.signed else "zext", self.fill, "i32", "i8")
        minus = f.splat(f.sub(0, shift, "i32"), 8, "i32")

        def start(c: str) -> list[str]:
            values = [f.mul(half, minus, V) for half in self.halves(sums, c, "i32")]
            more = self.halves(bias, c, "i32") if self.biased else values
            return [f.add(x, y) for x, y in zip(values, more, strict=True)] if self.biased else values

        return start

    def lines(self, x: str, padding: str, oy: str) -> list[tuple[str, str]]:
        """For each row of a window that starts in column 0: its first pixel, and the step from pixel to pixel.

        A row outside the image is one pixel of padding, over and over.
        """
        f, w = self.f, self.w
        y0 = f.sub(f.mul(oy, w[Plane.STRIDE_H]), w[Plane.PAD_H])
        found = []
        for k in range(self.kernel[0]):
            y = f.add(y0, f.mul(w[Plane.DILATION_H], k))
            inside = f.cmp("ult", y, w[Plane.HEIGHT])
            step = f.select(inside, w[Plane.X_W], 0)
            p = f.select(inside, f.offset(x, f.mul(y, w[Plane.X_H])), padding, "ptr")
            found.append((f.offset(p, f.sub(0, f.mul(w[Plane.PAD_W], step))), step))
        return found

    def sums(
        self,
        places: list[tuple[str, str]],
        padding: str,
        ox: str,
        c: str,
        weights: str,
        totals: list[list[str]],
        *,
        edge: bool,
    ) -> list[list[str]]:
        """The sums of 16 channels from c on of pixels from ox on; with `edge` columns may be outside the image."""
        f, w = self.f, self.w
        kernel_h, kernel_w = self.kernel
        pairs = -(-kernel_h // 2)
        users: dict[int, list[tuple[int, int]]] = {}
        for r in range(len(totals)):
            for j in range(kernel_w):
                users.setdefault(r * self.stride + j * self.dilation, []).append((r, j))
        at = [f.offset(p, c) for p, _ in places]
        before = 0
        for column in sorted(users):
            inside = ""
            if edge:
                there = f.add(f.sub(f.mul(ox, w[Plane.STRIDE_W]), w[Plane.PAD_W]), column)
                inside = f.cmp("ult", there, w[Plane.WIDTH])
            rows = []
            for k in range(kernel_h):
                if column > before:
                    at[k] = f.offset(at[k], f.mul(places[k][1], column - before))
                address = f.select(inside, at[k], padding, "ptr") if edge else at[k]
                rows.append(f.cast("sext" if self.signed else "zext", f.load(BYTES, address, align=1), "i16"))
            before = column
            for pair in range(pairs):
                for half, mixed in enumerate(self.mixed(rows[2 * pair : 2 * pair + 2])):
                    for r, j in users[column]:
                        place = ((j * pairs + pair) * 2 + half) * 32
                        weight = f.load(SHORTS, f.offset(weights, place), align=2)
                        totals[r][half] = f.add(totals[r][half], _pairs(f, mixed, weight))
        return totals

    def mixed(self, rows: list[str]) -> list[str]:
        """Elements of two rows next to each other, in both halves; of a lone one next to itself."""
        f = self.f
        a, b = rows[0], rows[-1]  # the weights of a row that is not there are zeros
        lanes = [[n + 8 * q + 4 * half + 16 * r for q in (0, 1) for n in range(4) for r in (0, 1)] for half in (0, 1)]
        return [f.shuffle(a, b, lanes[half]) for half in (0, 1)]

    def putting(self, c: str, top: Scope, first: str, out: tuple[str, str]) -> Callable[[str, list[list[str]]], None]:
        """What stores the results of pixels from `ox` on of the row, of 16 channels from c on, given their sums."""
        f = self.f
        if not self.result:
            scope = top.inner({})

            def plain(ox: str, sums: list[list[str]]) -> None:
                for r, (low, high) in enumerate(sums):
                    here = self.finish.pixel(self.emitter, scope, f.add(first, f.add(ox, r) if r else ox))
                    for j in range(2):  # channels in order
                        total = f.shuffle(low, high, [4 * j + i + k for k in (0, 8) for i in range(4)])
                        self.finish.put(self.emitter, here, f.add(c, 8 * j) if j else c, total, 8)

            return plain
        words = (quads.Finishing.SCALE, quads.Finishing.SHIFT)
        arrays = [f.load("ptr", f.gep(self.finishing, int(word), "i64")) for word in words]
        scales, shifts = (self.halves(p, c, "float") for p in arrays)
        ends = quad_results.limits(f, self.finishing, self.clamped)

        def packed(ox: str, sums: list[list[str]]) -> None:
            place = f.offset(out[0], f.add(f.mul(f.add(first, ox), out[1]), c))
            for total in sums:
                short = quad_results.rounded(f, total, scales, shifts, ends)
                f.store(quad_results.packed_in_order(f, self.result, short), place, align=1)
                place = f.offset(place, out[1])

        return packed


def _pairs(f: Function, x: str, y: str) -> str:
    """Products of i16, neighbours added up in i32."""
    f.declare("llvm.x86.avx2.pmadd.wd", V, [SHORTS, SHORTS])
    return f.op(f"call {V} @llvm.x86.avx2.pmadd.wd({SHORTS} {x}, {SHORTS} {y})", V)
