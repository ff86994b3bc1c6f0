"""Depthwise convolutions: direct sums, in vectors of channels of several neighbouring pixels at once."""

from __future__ import annotations

from enum import IntEnum
from typing import cast

from rlx.backends.cpu.builder import Function, Module, constant, vec
from rlx.backends.cpu.cuts import DepthwiseCut, InnerColumns, Part, part
from rlx.backends.cpu.gemm import kernel_function, load_word
from rlx.backends.cpu.jit import host
from rlx.backends.cpu.nest import PLACEHOLDER, Emitter, Scope, name_kernel
from rlx.backends.cpu.window import Finish, finish_of, geometry
from rlx.backends.cpu.words import KernelCode, Pointer, Word, WordTable, once
from rlx.kernels.expr import Cast, Load, loads, size_expr, substitute_vars
from rlx.kernels.lowering import Conv, out_vars
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import dataclass

__all__ = ["Plane", "emit", "has_few_taps", "suits", "weights"]

MAX_TAPS = 128
FEW_TAPS = 9


class Plane(IntEnum):
    """The words of a depthwise kernel; strides are in elements."""

    X = 0
    X_N = 1
    X_H = 2
    X_W = 3
    HEIGHT = 4
    WIDTH = 5
    STRIDE_H = 6
    STRIDE_W = 7
    DILATION_H = 8
    DILATION_W = 9
    PAD_H = 10
    PAD_W = 11
    OUT_HEIGHT = 12
    OUT_WIDTH = 13
    WEIGHTS = 14
    CHANNELS = 15
    ROWS = 16  # of a strip
    STRIPS = 17  # of an image
    BLOCK = 18  # channels of a chunk
    BLOCKS = 19
    INNER_FROM = 20  # columns [INNER_FROM, INNER_TO) have their whole windows inside the image
    INNER_TO = 21


def suits(kernel: Kernel) -> bool:
    """f32, one channel a group and one output each, few taps."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    return anchor.groups > 1 and anchor.x.dtype.name == "f32" and has_few_taps(anchor)


def has_few_taps(anchor: Conv) -> bool:
    """One channel a group and one output each, and a window of few taps whose sizes are fixed."""
    outputs, channels, *window = anchor.w_shape
    if channels != 1 or outputs != anchor.groups:
        return False
    taps = 1
    for size in window:
        if not isinstance(size, int):
            return False
        taps *= size
    return taps <= MAX_TAPS


def weights(kernel: Kernel) -> tuple[Buffer, Store]:
    """Weights [C, 1, *kernel] as [*kernel, C]."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    o, c, *taps = out_vars(len(anchor.w_shape))
    shape = (*anchor.w_shape[2:], anchor.w_shape[0])
    own = out_vars(len(shape))
    element = substitute_vars(anchor.w, {**dict(zip(taps, own[:-1], strict=True)), o: own[-1], c: size_expr(0)})
    static = all(x.source.kind in ("param", "const", "prepared") for x in loads(element))
    buffer = Buffer(f"{kernel.stores[0].buffer.name}.w", "prepared" if static else "arena", shape, anchor.x.dtype)
    return buffer, Store(buffer, shape, own, element if element.dtype is buffer.dtype else Cast(element, buffer.dtype))


def emit(kernel: Kernel) -> KernelCode:
    """The depthwise convolution with its epilogue, which is computed in registers."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    assert isinstance(anchor.x, Load)
    assert isinstance(anchor.w, Load)
    geo, finish = geometry(kernel), finish_of(kernel, anchor.x.dtype)
    lanes = host().vector_bytes // 4
    kernel_h, kernel_w = cast(tuple[int, int], geo.kernel)

    cut = once(DepthwiseCut((geo.batch, geo.groups, geo.out_height, geo.out_width), kernel_h * kernel_w, lanes))
    inner = once(InnerColumns((geo.pads[1], geo.width, geo.out_width, kernel_w), geo.strides[1], geo.dilations[1]))
    words: list[Word] = [
        Pointer(anchor.x.source, geo.x.constant * 4),
        geo.x_n,
        geo.x_h,
        geo.x_w,
        geo.height,
        geo.width,
        *geo.strides,
        *geo.dilations,
        *geo.pads,
        geo.out_height,
        geo.out_width,
        Pointer(anchor.w.source),
        geo.groups,
        part(cut, "rows"),
        part(cut, "strips"),
        part(cut, "block"),
        part(cut, "blocks"),
        part(inner, "first"),
        part(inner, "stop"),
    ]
    table = WordTable(words)
    f = kernel_function(PLACEHOLDER)
    emitter = Emitter(f, table, lanes)
    finish.prepare(emitter)
    w = {i: load_word(f, i, "ptr" if i in (Plane.X, Plane.WEIGHTS) else "i64") for i in Plane}
    body = _Body(f, emitter, finish, w, (kernel_h, kernel_w), geo.strides[1], geo.dilations[1], lanes)
    body.emit(geo.groups)
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    return KernelCode(symbol, ir, tuple(table.words), Part(cut, "chunks"), tuple(emitter.sites))


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
    lanes: int

    @property
    def at_once(self) -> int:
        """Pixels that are summed together."""
        return 4 if self.kernel[0] * self.kernel[1] <= FEW_TAPS else 8

    def emit(self, channels: int) -> None:
        f, w, lanes = self.f, self.w, self.lanes
        rest, block = f.div("%chunk", w[Plane.BLOCKS]), f.rem("%chunk", w[Plane.BLOCKS])
        image, strip = f.div(rest, w[Plane.STRIPS]), f.rem(rest, w[Plane.STRIPS])
        row0 = f.mul(strip, w[Plane.ROWS])
        row1 = f.min(f.add(row0, w[Plane.ROWS]), w[Plane.OUT_HEIGHT])
        c0 = f.mul(block, w[Plane.BLOCK])
        c1 = f.min(f.add(c0, w[Plane.BLOCK]), w[Plane.CHANNELS])
        zeros = f.alloca(vec("float", lanes))
        f.store(constant(0.0, vec("float", lanes)), zeros, ty=vec("float", lanes))
        x = f.gep(w[Plane.X], f.mul(image, w[Plane.X_N]), "float")
        top = Scope(1, None, {})
        self.emitter.hoist(self.finish.expr, frozenset((self.finish.channel, *self.finish.space)), top)

        def row(oy: str, _: list[str]) -> None:
            first = f.mul(f.add(f.mul(image, w[Plane.OUT_HEIGHT]), oy), w[Plane.OUT_WIDTH])

            def vectors(c: str, _: list[str]) -> None:
                # the last vector overlaps the one before it
                at = f.min(c, f.sub(w[Plane.CHANNELS], lanes)) if channels >= lanes and channels % lanes else c
                self.line(x, zeros, oy, first, at, top, lanes)

            if channels >= lanes:
                f.loop(c0, c1, lanes, [], vectors)
            else:
                f.loop(c0, c1, 1, [], lambda c, _: self.line(x, zeros, oy, first, c, top, 1))

        f.loop(row0, row1, 1, [], row)

    def line(self, x: str, zeros: str, oy: str, first: str, c: str, top: Scope, lanes: int) -> None:
        """A row of pixels of one vector of channels."""
        f, w = self.f, self.w
        kernel_h, kernel_w = self.kernel
        ty = vec("float", lanes)
        scope = top.inner({})
        weights = [
            f.load(ty, f.gep(w[Plane.WEIGHTS], f.add(f.mul(w[Plane.CHANNELS], i), c), "float"))
            for i in range(kernel_h * kernel_w)
        ]
        y0 = f.sub(f.mul(oy, w[Plane.STRIDE_H]), w[Plane.PAD_H])
        # a row outside the image is one pixel of zeros, over and over
        bases, steps = [], []
        for k in range(kernel_h):
            y = f.add(y0, f.mul(w[Plane.DILATION_H], k))
            inside = f.cmp("ult", y, w[Plane.HEIGHT])
            p = f.gep(x, f.add(f.mul(y, w[Plane.X_H]), c), "float")
            step = f.select(inside, w[Plane.X_W], 0)
            left = f.sub(0, f.mul(w[Plane.PAD_W], step))
            bases.append(f.gep(f.select(inside, p, zeros, "ptr"), left, "float"))
            steps.append(step)

        def sums(ox: str, count: int, *, edge: bool) -> None:
            totals: list[str | None] = [None] * count
            left = f.mul(ox, w[Plane.STRIDE_W])
            columns = sorted({r * self.stride + j * self.dilation for r in range(count) for j in range(kernel_w)})
            inside = {}
            if edge:
                at = f.sub(left, w[Plane.PAD_W])
                inside = {column: f.cmp("ult", f.add(at, column), w[Plane.WIDTH]) for column in columns}
            for k in range(kernel_h):
                p = f.gep(bases[k], f.mul(left, steps[k]), "float")
                loaded: dict[int, str] = {}
                for j in range(kernel_w):
                    for r in range(count):
                        column = r * self.stride + j * self.dilation
                        if column not in loaded:
                            address = f.gep(p, f.mul(steps[k], column), "float") if column else p
                            if edge:
                                address = f.select(inside[column], address, zeros, "ptr")
                            loaded[column] = f.load(ty, address)
                        value, old = loaded[column], totals[r]
                        weight = weights[k * kernel_w + j]
                        totals[r] = f.mul(value, weight) if old is None else f.fma(value, weight, old)
            for r, total in enumerate(totals):
                assert total is not None
                here = self.finish.pixel(self.emitter, scope, f.add(first, f.add(ox, r) if r else ox))
                self.finish.put(self.emitter, here, c, total, lanes)

        count, width = self.at_once, w[Plane.OUT_WIDTH]

        def groups() -> None:
            """All pixels, `count` at a time; groups that reach the borders may overlap others."""
            from_left = f.div(f.add(w[Plane.INNER_FROM], count - 1), count)
            start = f.mul(from_left, count)
            whole = f.max(f.div(f.sub(w[Plane.INNER_TO], start), count), 0)
            stop = f.add(start, f.mul(whole, count))
            f.loop(start, stop, count, [], lambda ox, _: sums(ox, count, edge=False))
            right = f.max(f.div(f.add(f.sub(width, stop), count - 1), count), 0)

            def border(e: str, _: list[str]) -> None:
                ox = f.select(
                    f.cmp("lt", e, from_left), f.mul(e, count), f.add(f.mul(f.sub(e, from_left), count), stop)
                )
                sums(f.min(ox, f.sub(width, count)), count, edge=True)

            f.loop(0, f.add(from_left, right), 1, [], border)

        def lone() -> None:
            f.loop(0, width, 1, [], lambda ox, _: sums(ox, 1, edge=True))

        def groups_and_lone() -> None:
            """Pixels at the borders one by one: few taps cost less than a group that looks at each column."""
            inner_from, inner_to = w[Plane.INNER_FROM], w[Plane.INNER_TO]
            grouped = f.sub(inner_to, f.rem(f.sub(inner_to, inner_from), count))
            f.loop(inner_from, grouped, count, [], lambda ox, _: sums(ox, count, edge=False))

            def rest(e: str, _: list[str]) -> None:
                sums(f.select(f.cmp("lt", e, inner_from), e, f.add(f.sub(e, inner_from), grouped)), 1, edge=True)

            f.loop(0, f.add(inner_from, f.sub(width, grouped)), 1, [], rest)

        if kernel_h * kernel_w <= FEW_TAPS:
            groups_and_lone()
        else:
            f.if_(f.cmp("ge", width, count), groups, lone)
