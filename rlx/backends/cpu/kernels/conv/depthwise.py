"""Depthwise convolutions: direct sums, in vectors of channels of several neighbouring pixels at once."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import cast

from rlx.backends.cpu.gemm.epilogue import Epilogue
from rlx.backends.cpu.gemm.kernel import kernel_function
from rlx.backends.cpu.kernels.conv.geometry import Geometry, conv_epilogue, geometry
from rlx.backends.cpu.kernels.conv.weights import PackedWeights
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Function, Module, Operand, constant, vec
from rlx.backends.cpu.loops.emitter import PLACEHOLDER, Emitter, Scope, name_kernel
from rlx.backends.cpu.schedule.arguments import (
    Address,
    Argument,
    Arguments,
    ArgumentTable,
    KernelCode,
    Number,
    Part,
    Pointer,
    once,
    part,
)
from rlx.backends.cpu.schedule.depthwise import DepthwiseSchedule, InnerColumns
from rlx.backends.cpu.strategy import Setting
from rlx.backends.cpu.target import Rates, Target
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import Shape
from rlx.kernels.expr import Apply, Cast, Expr, Load, size_expr, substitute_vars
from rlx.kernels.lowering import Conv, out_vars
from rlx.kernels.prepared import is_static
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.ops.conv import Conv as ConvOp
from rlx.records import dataclass

__all__ = [
    "Body", "Place", "PlaneArguments", "chunk_parts", "emit", "has_few_taps", "image_words", "inner_columns",
    "is_depthwise", "plane_words", "suits", "weights",
]  # fmt: skip

F32 = DTYPES["f32"]
MAX_TAPS = 128  # of a window that are written out; of larger ones those of a row, or so many of them:
TAPS_A_TURN = 32
FEW_TAPS = 9
LONE_COLUMNS = 5  # summed together where there are no others: a row of 7 pixels in windows of 3


class PlaneArguments(Arguments):
    """The arguments of a depthwise kernel; strides are in elements."""

    x: Address
    x_n: Number
    x_h: Number
    x_w: Number
    height: Number
    width: Number
    stride_h: Number
    stride_w: Number
    dilation_h: Number
    dilation_w: Number
    pad_h: Number
    pad_w: Number
    out_height: Number
    out_width: Number
    weights: Address
    channels: Number
    rows: Number  # of a strip
    strips: Number  # of an image
    block: Number  # channels of a chunk
    blocks: Number
    inner_from: Number  # columns [inner_from, inner_to) have their whole windows inside the image
    inner_to: Number


def suits(anchor: Conv) -> bool:
    """One channel a group and one output each, of f32, or of an image of 16 bits that is summed in f32."""
    return anchor.groups > 1 and anchor.x.dtype.name in ("f32", "f16", "bf16") and taps_of(anchor) is not None


def is_depthwise(op: ConvOp, w: Shape) -> bool:
    """Whether a convolution in one or two axes, by weights of a shape, is one that reads its image as it is stored."""
    return op.groups > 1 and len(w) < 5 and _taps(w, op.groups) is not None


def taps_of(anchor: Conv) -> int | None:
    """The taps of a window of a depthwise convolution: one channel a group and one output each. None: it is none."""
    return _taps(anchor.w_shape, anchor.groups)


def _taps(w: Shape, groups: int) -> int | None:
    outputs, channels, *window = w
    if channels != 1 or outputs != groups:
        return None
    taps = [size for size in window if isinstance(size, int)]
    return prod(taps) if len(taps) == len(window) else None


def has_few_taps(anchor: Conv) -> bool:
    """Whether it is depthwise, with so few taps that all are written out."""
    taps = taps_of(anchor)
    return taps is not None and taps <= MAX_TAPS


def weights(kernel: Kernel, target: Target) -> tuple[Buffer, Store]:
    """Weights [C, 1, *kernel] as [blocks, *kernel, lanes]; the last block of channels overlaps the one before."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    channels = anchor.groups
    lanes = _lanes(channels, target)
    o, c, *taps = out_vars(len(anchor.w_shape))
    shape = (-(-channels // lanes), *anchor.w_shape[2:], lanes)
    own = out_vars(len(shape))
    first: Expr = own[0] * lanes
    if channels % lanes:
        first = Apply("min", (first, size_expr(channels - lanes)), first.dtype)
    places = {**dict(zip(taps, own[1:-1], strict=True)), o: first + own[-1], c: size_expr(0)}
    element = substitute_vars(anchor.w, places)
    kind = "prepared" if is_static(element, shape) else "arena"
    buffer = Buffer(f"{kernel.stores[0].buffer.name}.w", kind, shape, F32)
    return buffer, Store(buffer, shape, own, element if element.dtype is buffer.dtype else Cast(element, buffer.dtype))


def _lanes(channels: int, target: Target) -> int:
    """Channels that are computed together: a vector, or where there are fewer, a power of two."""
    return min(target.lanes, 1 << max(channels.bit_length() - 1, 0))


def image_words(
    record: type[PlaneArguments], anchor: Conv, geo: Geometry, lanes: int, rates: Rates, **more: Argument
) -> tuple[list[Argument], Part]:
    """The arguments, of which `more` are a kernel's own, and the number of chunks; `lanes`: channels at once."""
    assert isinstance(anchor.x, Load)
    kernel_h, kernel_w = cast(tuple[int, int], geo.kernel)
    sizes = (geo.batch, geo.groups, geo.out_height, geo.out_width)
    cut = once(DepthwiseSchedule(sizes, kernel_h * kernel_w, lanes, rates))
    x = Pointer(anchor.x.source, geo.x.constant * anchor.x.dtype.itemsize)
    words = plane_words(record, anchor, geo, cut, x=x, x_n=geo.x_n, x_h=geo.x_h, x_w=geo.x_w, **more)
    return words, Part(cut, "chunks")


def plane_words(
    record: type[PlaneArguments], anchor: Conv, geo: Geometry, cut: Callable[..., object], **more: Argument
) -> list[Argument]:
    """The arguments; `cut` gives the chunks, `more` where the image lies, its strides, and a kernel's own."""
    assert isinstance(anchor.w, Load)
    inner = once(_inner(geo))
    own: dict[str, Argument] = {
        "weights": Pointer(anchor.w.source),
        "channels": geo.groups,
        "inner_from": part(inner, "first"),
        "inner_to": part(inner, "stop"),
    }
    own |= {name: part(cut, name) for name in ("rows", "strips", "block", "blocks")}
    return record.given(**{**geo.sizes(record), **own, **more})


def _inner(geo: Geometry) -> InnerColumns:
    return InnerColumns((geo.pads[1], geo.width, geo.out_width, geo.kernel[1]), geo.strides[1], geo.dilations[1])


def inner_columns(geo: Geometry) -> int | None:
    """The columns of results whose whole windows lie inside the image, where that does not depend on extents."""
    cut = _inner(geo)
    if not all(isinstance(s, int) for s in cut.sizes):
        return None
    made = cut({})
    return made.stop - made.first


def chunk_parts(f: Function, w: PlaneArguments) -> tuple[str, str, str, str, str]:
    """What `%chunk` is: the image, its rows of results from .. to, the channels from .. to."""
    rest, block = f.div("%chunk", w.blocks), f.rem("%chunk", w.blocks)
    image, strip = f.div(rest, w.strips), f.rem(rest, w.strips)
    row0 = f.mul(strip, w.rows)
    row1 = f.min(f.add(row0, w.rows), w.out_height)
    c0 = f.mul(block, w.block)
    return image, row0, row1, c0, f.min(f.add(c0, w.block), w.channels)


def emit(kernel: Kernel, target: Target) -> KernelCode:
    """The depthwise convolution with its epilogue, which is computed in registers."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    geo, epilogue = geometry(kernel), conv_epilogue(kernel, F32)
    lanes = target.lanes
    words, chunks = image_words(PlaneArguments, anchor, geo, lanes, target.rates)
    table = ArgumentTable(words)
    f = kernel_function(PLACEHOLDER)
    emitter = Emitter(f, table, lanes)
    epilogue.prepare(emitter)
    w = PlaneArguments.loaded(f)
    window = cast(tuple[int, int], geo.kernel)
    inner = inner_columns(geo)
    lanes = _lanes(geo.groups, target)
    Body(f, emitter, epilogue, w, window, geo.strides, geo.dilations, lanes, inner, anchor.x.dtype).emit()
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    return KernelCode(symbol, ir, tuple(table.words), chunks, tuple(emitter.sites))


@dataclass(frozen=True)
class Body:
    """Emits the code of one chunk.

    Windows inside the image are summed by blocks of neighbouring pixels, which share what they read and whose taps are
    unrolled, in large windows those of a part of a row; others leave out the taps that lie outside. Channels are the
    innermost loop: all is read in order.
    """

    f: Function
    emitter: Emitter
    epilogue: Epilogue
    w: PlaneArguments
    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    lanes: int
    inner: int | None  # columns whose whole windows lie inside the image, if that is known when code is made
    image: DType  # of its elements

    @property
    def few(self) -> bool:
        return self.kernel[0] * self.kernel[1] <= FEW_TAPS

    @property
    def columns(self) -> int:
        """Pixels of a row that are summed together."""
        return (LONE_COLUMNS if self.inner == LONE_COLUMNS else 4) if self.few else 8

    @property
    def rows(self) -> int:
        """Rows that are summed together: two share what they read where the window has several."""
        return 2 if self.few and self.kernel[0] > self.strides[0] else 1

    @property
    def rolled(self) -> bool:
        """Whether the rows of a window are a loop."""
        return prod(self.kernel) > MAX_TAPS

    def emit(self) -> None:
        f, w = self.f, self.w
        image, row0, row1, c0, c1 = chunk_parts(f, w)
        top = Scope(1, None, {})
        self.emitter.hoist(self.epilogue.expr, frozenset((self.epilogue.column, *self.epilogue.rows)), top)
        x = self.pixel(w.x, f.mul(image, w.x_n))
        place = Place(top, x, f.mul(image, w.out_height), c0, c1)
        # rows whose windows lie inside the image
        (inner0, inner1) = self.inner_rows()
        first = f.min(f.max(row0, inner0), row1)
        stop = f.max(f.min(row1, inner1), first)
        paired = f.sub(stop, f.rem(f.sub(stop, first), self.rows))
        f.loop(first, paired, self.rows, [], lambda oy, _: self.line(place, oy, 0 if self.rolled else self.rows))
        others = f.sub(f.sub(row1, row0), f.sub(paired, first))
        before = f.sub(first, row0)

        def other(e: str, _: list[str]) -> None:
            oy = f.select(f.cmp("lt", e, before), f.add(row0, e), f.add(paired, f.sub(e, before)))
            self.line(place, oy, 0)

        f.loop(0, others, 1, [], other)

    def inner_rows(self) -> tuple[str, str]:
        """The rows of results whose windows lie inside the image: first and one after the last."""
        f, w = self.f, self.w
        reach, stride = (self.kernel[0] - 1) * self.dilations[0], self.strides[0]
        pad = w.pad_h
        first = f.div(f.max(f.add(pad, stride - 1), 0), stride)
        last = f.sub(f.add(w.height, pad), 1 + reach)  # where the last window begins, from the padding's start
        return first, f.select(f.cmp("ge", last, 0), f.add(f.div(last, stride), 1), 0)

    def lines(self, place: Place, y0: str, x0: str) -> Callable[[str | int], str]:
        """Where pixel x0 of a row of the image is, of the one so many rows after y0."""
        f, w = self.f, self.w
        corner = self.pixel(place.x, f.add(f.mul(y0, w.x_h), f.mul(x0, w.x_w)))
        return lambda step: self.pixel(corner, f.mul(w.x_h, step))

    def pixel(self, p: str, elements: Operand) -> str:
        """The address so many elements of the image after `p`."""
        return self.f.gep(p, elements, convert.memory_type(self.image))

    def load(self, p: str) -> str:
        """A vector of channels of the image, in f32."""
        read = self.f.load(vec(convert.memory_type(self.image), self.lanes), p)
        return convert.convert(self.f, read, self.image, F32, self.lanes)

    def line(self, place: Place, oy: str, rows: int) -> None:
        """So many rows of pixels whose windows have all rows; with 0 one that may lack some."""
        f, w, count = self.f, self.w, self.columns
        inner_from, inner_to = w.inner_from, w.inner_to
        enough = f.cmp("ge", f.sub(inner_to, inner_from), count)
        groups = f.select(enough, f.div(f.add(f.sub(inner_to, inner_from), count - 1), count), 0)

        def group(i: str, _: list[str]) -> None:
            # the last one overlaps the one before it
            ox = f.min(f.add(inner_from, f.mul(i, count)), f.sub(inner_to, count))
            self.block(place, oy, ox, rows, count)

        f.loop(0, groups, 1, [], group)
        left = f.select(enough, inner_from, w.out_width)
        right = f.select(enough, f.sub(w.out_width, inner_to), 0)

        def lone(e: str, _: list[str]) -> None:
            ox = f.select(f.cmp("lt", e, left), e, f.add(f.sub(e, left), inner_to))
            self.block(place, oy, ox, rows, 0)

        f.loop(0, f.add(left, right), 1, [], lone)

    def taps(self, start: str, axis: int, extent: str) -> tuple[str, str]:
        """The taps of a window that begins at `start` which lie inside the image."""
        f, dilation = self.f, self.dilations[axis]
        first = f.min(f.div(f.max(f.add(f.sub(0, start), dilation - 1), 0), dilation), self.kernel[axis])
        last = f.div(f.max(f.add(f.sub(extent, start), dilation - 1), 0), dilation)
        return first, f.max(f.min(last, self.kernel[axis]), first)

    def block(self, place: Place, oy: str, ox: str, rows: int, columns: int) -> None:
        """Sums pixels for all channels. 0 rows or columns: one whose window may lie outside the image in part."""
        f, w, lanes = self.f, self.w, self.lanes
        y0 = f.sub(f.mul(oy, w.stride_h), w.pad_h)
        x0 = f.sub(f.mul(ox, w.stride_w), w.pad_w)
        line_at = self.lines(place, y0, x0)
        number = f.add(f.mul(f.add(place.first_row, oy), w.out_width), ox)
        pixels = []
        for r in range(max(rows, 1)):
            for i in range(max(columns, 1)):
                at = f.add(number, f.mul(w.out_width, r)) if r else number
                pixels.append(self.epilogue.row(self.emitter, place.top, f.add(at, i) if i else at))
        windows = _Windows(self, line_at, y0, x0, rows, columns)

        def vectors(c: str, _: list[str]) -> None:
            number = f.div(c, lanes) if lanes > 1 else c
            if lanes > 1:
                c = f.min(c, f.sub(w.channels, lanes))  # the last vector overlaps the one before it
            at = f.gep(w.weights, f.mul(number, self.kernel[0] * self.kernel[1] * lanes), "float")
            totals = windows.sums(c, at)
            shared = place.top.inner({self.epilogue.column: c}, lanes, self.epilogue.column if lanes > 1 else None)
            self.emitter.hoist(self.epilogue.expr, frozenset(self.epilogue.rows), shared)
            for pixel, total in zip(pixels, totals, strict=True):
                self.epilogue.put(self.emitter, pixel, c, total, lanes, shared)

        f.loop(place.c0, place.c1, lanes, [], vectors)


class _Windows:
    """The windows of `rows` x `columns` pixels of results; 0: of one, which may lie outside the image in part.

    The first one begins at pixel (y0, x0) of the image; `line_at(n)` is where that column is n rows below.
    """

    def __init__(
        self, body: Body, line_at: Callable[[str | int], str], y0: str, x0: str, rows: int, columns: int
    ) -> None:
        f, w = body.f, body.w
        self.body, self.f, self.line_at, self.rows, self.columns = body, f, line_at, rows, columns
        self.kernel, self.lanes, self.ty = body.kernel, body.lanes, vec("float", body.lanes)
        read: dict[int, list[tuple[int, int]]] = {}
        for r in range(rows):
            for k in range(self.kernel[0]):
                read.setdefault(r * body.strides[0] + k * body.dilations[0], []).append((r, k))
        # by line of the image, in order: rows of results, and of the window there
        self.read = {y: read[y] for y in sorted(read)}
        self.starts = {y: line_at(y) for y in self.read}
        # three columns to a pointer: pointer, pointer + step, pointer + 2 step are addressing modes
        self.step = f.mul(w.x_w, body.image.itemsize)
        self.double_step, self.triple_step = f.mul(self.step, 2), f.mul(self.step, 3)
        self.k0, self.k1 = ("0", "0") if rows else body.taps(y0, 0, w.height)
        self.j0, self.j1 = ("0", "0") if columns else body.taps(x0, 1, w.width)
        self.column_step = f.mul(w.x_w, body.dilations[1])

    def sums(self, c: str, at: str) -> list[str]:
        """Their sums, row by row, of a vector of channels from c on, whose weights are at `at`."""
        if not self.columns:
            return self.by_columns(c, at)
        return self.written_out(c, at) if self.rows else self.by_rows(c, at)

    def written_out(self, c: str, at: str) -> list[str]:
        """Line by line of the image, each element of which is read once."""
        f = self.f
        sums: list[list[str | None]] = [[None] * self.columns for _ in range(self.rows)]
        for y, places in self.read.items():
            p = self.body.pixel(self.starts[y], c)
            for r, k in places:
                weights = f.gep(at, k * self.kernel[1] * self.lanes, "float")
                self.add_taps(p, weights, self.kernel[1], sums[r])
        return [t for line in sums for t in line if t is not None]

    def by_rows(self, c: str, at: str) -> list[str]:
        """Row by row of the windows, of which some may lie outside the image."""
        f = self.f

        def some_line(k: str, state: list[str]) -> list[str]:
            p = self.body.pixel(self.line_at(f.mul(k, self.body.dilations[0])), c)
            here = f.gep(at, f.mul(k, self.kernel[1] * self.lanes), "float")
            return self.long_row(p, here, [(self.ty, t) for t in state])

        return f.loop(self.k0, self.k1, 1, [(self.ty, constant(0.0, self.ty))] * self.columns, some_line)

    def by_columns(self, c: str, at: str) -> list[str]:
        """Column by column of the window, whether all of its rows lie inside or not."""
        f, kernel_w, lanes, ty = self.f, self.kernel[1], self.lanes, self.ty

        def tap(j: str, state: list[str]) -> list[str]:
            here, column = f.gep(at, f.mul(j, lanes), "float"), f.mul(j, self.column_step)

            def product(line: str, weight: str, total: str) -> str:
                value = self.body.load(self.body.pixel(self.body.pixel(line, c), column))
                return f.fma(value, f.load(ty, weight), total)

            if self.rows:
                new = list(state)
                for y, places in self.read.items():
                    for r, k in places:
                        new[r] = product(self.starts[y], f.gep(here, k * kernel_w * lanes, "float"), new[r])
                return new

            def some_line(k: str, inner: list[str]) -> list[str]:
                line = self.line_at(f.mul(k, self.body.dilations[0]))
                return [product(line, f.gep(here, f.mul(k, kernel_w * lanes), "float"), inner[0])]

            return list(f.loop(self.k0, self.k1, 1, [(ty, state[0])], some_line))

        return list(f.loop(self.j0, self.j1, 1, [(ty, constant(0.0, ty))] * max(self.rows, 1), tap))

    def long_row(self, p: str, at: str, totals: list[tuple[str, str]]) -> list[str]:
        """Adds the products of a whole row of a window, which begins at `p`, with its weights at `at`, part by part."""
        f, lanes, width = self.f, self.lanes, self.kernel[1]

        def part(j: str | int, count: int, state: list[str]) -> list[str]:
            new: list[str | None] = list(state)
            first, weights = self.body.pixel(p, f.mul(self.column_step, j)), f.gep(at, f.mul(j, lanes, "i64"), "float")
            self.add_taps(first, weights, count, new)
            return [t for t in new if t is not None]

        rest = width % TAPS_A_TURN if width > MAX_TAPS else width
        state = [t for _, t in totals]
        if width > rest:
            state = f.loop(0, width - rest, TAPS_A_TURN, totals, lambda j, state: part(j, TAPS_A_TURN, state))
        return part(width - rest, rest, state) if rest else state

    def add_taps(self, p: str, at: str, count: int, totals: list[str | None]) -> None:
        """Adds the products of pixels of one row, which begin at `p`, with so many weights of a row at `at`."""
        f, ty, body = self.f, self.ty, self.body
        loaded: dict[int, str] = {}
        thirds = [p]

        def column(x: int) -> str:
            while len(thirds) <= x // 3:
                thirds.append(f.offset(thirds[-1], self.triple_step))
            return f.offset(thirds[x // 3], (0, self.step, self.double_step)[x % 3])

        for j in range(count):
            weight = f.load(ty, f.gep(at, j * self.lanes, "float"))
            for i in range(self.columns):
                x = i * body.strides[1] + j * body.dilations[1]
                if x not in loaded:
                    loaded[x] = body.load(column(x))
                old = totals[i]
                totals[i] = f.mul(loaded[x], weight) if old is None else f.fma(loaded[x], weight, old)


@dataclass(frozen=True)
class Place:
    """What the pixels of a chunk share: the image, the number of its first row among all, and the channels."""

    top: Scope
    x: str
    first_row: str
    c0: str
    c1: str


class Depthwise(PackedWeights):
    """One channel and one output a group, of an image of f32 or 16 bits: sums of vectors of channels in registers."""

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        assert isinstance(kernel.anchor, Conv)
        if kernel.anchor.groups == 1:
            return "it has one group"
        return None if suits(kernel.anchor) else "it is not of floats of 32 bits or fewer, or not depthwise"

    def packed(self, kernel: Kernel, target: Target) -> tuple[Buffer, Store]:
        return weights(kernel, target)

    def emit(self, kernel: Kernel, target: Target) -> list[KernelCode]:
        return [emit(kernel, target)]
