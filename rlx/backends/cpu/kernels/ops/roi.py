"""Pooling of regions of interest whose bins have as many samples as they have elements.

The samples of a region along each axis are worked out once, for all channels. Those outside of the image count 0, so
only those near it are visited: a region may be as large as it likes.
"""

from __future__ import annotations

from itertools import product

from rlx.backends.cpu.kernels.frame import Frame
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import constant, suffix, vec
from rlx.backends.cpu.schedule.arguments import KernelCode
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Node
from rlx.ir.shape import Size
from rlx.kernels.lowering import accumulator
from rlx.kernels.program import Kernel
from rlx.ops.roi import MaxRoiPool, RoiAlignAdaptive
from rlx.records import dataclass

__all__ = ["accepts", "emit_align", "emit_max"]

I64 = DTYPES["i64"]
FAR = 2**40  # a place beyond every image
NARROW = 4  # elements of a row of a bin that are taken one by one
ENTRY = 32  # bytes of a sample's entry: two elements along the axis, and their weights as f64 or f32


def accepts(node: Node) -> bool:
    """Floats that the CPU computes with."""
    return node.inputs[0].dtype.name in ("f32", "f64", "f16", "bf16")


class _Regions:
    """What both have: images, regions, the result, and arithmetic in f32 or f64."""

    def __init__(self, kernel: Kernel) -> None:
        self.frame = Frame()
        self.x, self.rois = kernel.operands[:2]
        (self.out,) = kernel.results
        self.wide = accumulator(self.x.dtype)
        self.real = convert.llvm_type(self.wide)
        self.images, self.channels, self.height, self.width = self.x.shape
        _, _, self.rows, self.columns = self.out.shape
        self.image = self.frame.pointer(self.x)
        self.target = self.frame.pointer(self.out)

    def load(self, base: str, index: str) -> str:
        """An element of an image or of the regions, widened."""
        text = self.frame.element(base, index, convert.memory_type(self.x.dtype))
        return convert.convert(self.frame.f, text, self.x.dtype, self.wide, 1)

    def store(self, value: str, index: str) -> None:
        made = convert.convert(self.frame.f, value, self.wide, self.x.dtype, 1)
        self.frame.put(made, self.target, index, convert.memory_type(self.x.dtype))

    def whole(self, x: str, ty: str | None = None) -> str:
        """A float cut to an i64; NaN gives 0, what is too large the last."""
        ty = ty or self.real
        name = f"llvm.fptosi.sat.i64.{suffix(ty)}"
        self.frame.f.declare(name, "i64", [ty])
        return self.frame.f.op(f"call i64 @{name}({ty} {x})", "i64")

    def number(self, x: str) -> str:
        return self.frame.f.cast("sitofp", x, self.real, "i64")

    def clamp(self, x: str, low: str | int, high: str | int) -> str:
        f = self.frame.f
        return f.min(f.max(x, low, "i64"), high, "i64")

    def larger(self, a: str, b: str) -> str:
        return convert.apply(self.frame.f, "max", [a, b], self.wide, 1)

    def constant(self, value: float) -> str:
        return self.frame.f.value(value, self.real)

    def place(self, *at: str) -> str:
        """The element of the result."""
        f, index = self.frame.f, "0"
        for i, size in zip(at, self.out.shape, strict=True):
            index = f.add(f.mul(index, self.frame.size(size), "i64"), i, "i64")
        return index

    def region(self, image: str, channel: str) -> str:
        """The address of a channel's first element."""
        f = self.frame.f
        plane = f.mul(self.frame.size(self.height), self.frame.size(self.width), "i64")
        number = f.add(f.mul(image, self.frame.size(self.channels), "i64"), channel, "i64")
        return f.gep(self.image, f.mul(number, plane, "i64"), convert.memory_type(self.x.dtype))


# ---- MaxRoiPool


def emit_max(kernel: Kernel, target: Target) -> list[KernelCode]:
    """A row is a channel of a region."""
    assert kernel.special is not None
    op = kernel.special.op
    assert isinstance(op, MaxRoiPool)
    return [_MaxCode(kernel, op, target).code()]


class _MaxCode(_Regions):
    def __init__(self, kernel: Kernel, op: MaxRoiPool, target: Target) -> None:
        super().__init__(kernel)
        self.op = op
        self.lanes = target.vector_bytes * 8 // self.wide.bits

    def code(self) -> KernelCode:
        frame, f = self.frame, self.frame.f
        rois, channels = frame.pointer(self.rois), frame.size(self.channels)
        start, stop = frame.rows(self.rois.shape[0] * self.channels, self.height * self.width + 1)

        def row(n: str, _: list[str]) -> None:
            r, c = f.binary("udiv", n, channels, "i64"), f.binary("urem", n, channels, "i64")
            values = [self.load(rois, f.add(f.mul(r, 5, "i64"), k, "i64")) for k in range(5)]
            raw = self.whole(values[0])
            valid = f.cmp("ge", values[0], self.constant(0), self.real)  # not NaN
            inside = f.and_(valid, f.cmp("lt", values[0], self.number(frame.size(self.images)), self.real), "i1")
            frame.fail_unless(inside, "index", raw)
            plane = self.region(f.select(inside, raw, 0, "i64"), c)
            x1, y1, x2, y2 = map(self.nearest, values[1:])

            def line(i: str, _: list[str]) -> None:
                top, bottom = self.bin(y1, y2, i, self.rows, self.height)

                def cell(j: str, _: list[str]) -> None:
                    left, right = self.bin(x1, x2, j, self.columns, self.width)
                    self.store(self.best(plane, top, bottom, left, right), self.place(r, c, i, j))

                f.loop(0, frame.size(self.columns), 1, [], cell)

            f.loop(0, frame.size(self.rows), 1, [], line)

        f.loop(start, stop, 1, [], row)
        return frame.finish()

    def nearest(self, v: str) -> str:
        """The nearest whole number to v times the scale, halves away from zero."""
        f = self.frame.f
        scaled = f.mul(v, self.constant(self.op.scale), self.real)
        up = f.intrinsic("floor", f.add(f.intrinsic("fabs", scaled, ty=self.real), self.constant(0.5)), ty=self.real)
        return self.clamp(self.whole(f.intrinsic("copysign", up, scaled, ty=self.real)), -FAR, FAR)

    def bin(self, low: str, high: str, i: str, count: Size, size: Size) -> tuple[str, str]:
        """First and last (excluded) element of bin i along an axis."""
        f, frame = self.frame.f, self.frame
        length = f.max(f.add(f.sub(high, low, "i64"), 1, "i64"), 1, "i64")
        bins, ends = frame.size(count), []
        for number, more in ((i, "0"), (f.add(i, 1, "i64"), f.sub(bins, 1, "i64"))):  # rounded down, up
            edge = f.binary("udiv", f.add(f.mul(number, length, "i64"), more, "i64"), bins, "i64")
            ends.append(self.clamp(f.add(edge, low, "i64"), 0, frame.size(size)))
        return ends[0], ends[1]

    def best(self, plane: str, top: str, bottom: str, left: str, right: str) -> str:
        """The largest element of a bin; 0 of an empty one."""
        f = self.frame.f
        wide = f.cmp("gt", f.sub(right, left, "i64"), NARROW, "i64")
        (found,) = f.if_(
            wide,
            lambda: [(self.real, self.by_vectors(plane, top, bottom, left, right))],
            lambda: [(self.real, self.one_by_one(plane, top, bottom, left, right))],
        )
        some = f.and_(f.cmp("lt", top, bottom, "i64"), f.cmp("lt", left, right, "i64"), "i1")
        return f.select(some, found, self.constant(0), self.real)

    def one_by_one(self, plane: str, top: str, bottom: str, left: str, right: str) -> str:
        f = self.frame.f
        width = self.frame.size(self.width)

        def line(y: str, carried: list[str]) -> list[str]:
            base = f.mul(y, width, "i64")

            def element(x: str, carried: list[str]) -> list[str]:
                return [self.larger(self.load(plane, f.add(base, x, "i64")), carried[0])]

            return f.loop(left, right, 1, [(self.real, carried[0])], element)

        return f.loop(top, bottom, 1, [(self.real, self.constant(float("-inf")))], line)[0]

    def by_vectors(self, plane: str, top: str, bottom: str, left: str, right: str) -> str:
        """In vectors along the rows of the bin."""
        f, w = self.frame.f, self.lanes
        width, memory = self.frame.size(self.width), convert.memory_type(self.x.dtype)
        ty = vec(self.real, w)
        least = constant(float("-inf"), ty)

        def larger(a: str, b: str, w: int = w) -> str:
            return convert.apply(f, "max", [a, b], self.wide, w)

        def line(y: str, carried: list[str]) -> list[str]:
            row = f.gep(plane, f.mul(y, width, "i64"), memory)

            def some(x: str, carried: list[str]) -> list[str]:
                inside = f.mask_below(f.sub(right, x, "i64"), w)
                raw = f.masked_load(vec(memory, w), f.gep(row, x, memory), inside)
                values = convert.convert(f, raw, self.x.dtype, self.wide, w)
                return [larger(f.select(inside, values, least, ty), carried[0])]

            return f.loop(left, right, w, [(ty, carried[0])], some)

        (found,) = f.loop(top, bottom, 1, [(ty, least)], line)
        while w > 1:
            w //= 2
            parts = [list(range(w)), list(range(w, 2 * w))]
            halves = [f.shuffle(found, None, p) if w > 1 else f.extract(found, p[0]) for p in parts]
            found = larger(halves[0], halves[1], w)
        return found


# ---- RoiAlign


def emit_align(kernel: Kernel, target: Target) -> list[KernelCode]:
    """A row is a region."""
    assert kernel.special is not None
    op = kernel.special.op
    assert isinstance(op, RoiAlignAdaptive)
    return [_AlignCode(kernel, op).code()]


@dataclass
class _Axis:
    """The samples of a region along an axis: entries, where those of each bin start, and how many each bin has."""

    entries: str
    starts: str
    count: Size
    size: Size
    stride: Size
    each: str = ""


class _AlignCode(_Regions):
    def __init__(self, kernel: Kernel, op: RoiAlignAdaptive) -> None:
        super().__init__(kernel)
        self.op, self.batch = op, kernel.operands[2]

    def most(self, axis: tuple[Size, Size]) -> Size:
        """Samples near an image: they lie more than half an element apart; four more at the ends of each bin."""
        count, size = axis
        return 2 * (size + 2) + 5 * count + 8

    def code(self) -> KernelCode:
        frame, f = self.frame, self.frame.f
        rois, batch = frame.pointer(self.rois), frame.pointer(self.batch)
        axes = ((self.rows, self.height), (self.columns, self.width))
        sizes = [8 * (count + 1) + ENTRY * self.most((count, size)) for count, size in axes]

        start, stop = frame.rows(self.rois.shape[0], 16 * self.channels * self.rows * self.columns + 1)
        scratch = frame.scratch(sizes[0] + sizes[1])
        ends = f.offset(scratch, frame.size(sizes[0]))
        ys = _Axis(f.offset(scratch, frame.size(8 * (self.rows + 1))), scratch, *axes[0], self.width)
        xs = _Axis(f.offset(ends, frame.size(8 * (self.columns + 1))), ends, *axes[1], 1)

        def row(r: str, _: list[str]) -> None:
            ty = convert.memory_type(self.batch.dtype)
            raw = convert.convert(f, frame.element(batch, r, ty), self.batch.dtype, I64, 1)
            inside = f.cmp("ult", raw, frame.size(self.images), "i64")
            frame.fail_unless(inside, "index", raw)
            image = f.select(inside, raw, 0, "i64")
            x1, y1, x2, y2 = (self.load(rois, f.add(f.mul(r, 4, "i64"), k, "i64")) for k in range(4))
            self.sample(ys, y1, y2)
            self.sample(xs, x1, x2)
            self.pool(r, image, ys, xs)

        f.loop(start, stop, 1, [], row)
        return frame.finish()

    def sample(self, axis: _Axis, start: str, end: str) -> None:
        """Fills the entries of an axis, bin by bin."""
        frame, f, real, op = self.frame, self.frame.f, self.real, self.op
        shift = self.constant(0.5 if op.half_pixel else 0.0)
        scale = self.constant(op.scale)
        low = f.sub(f.mul(start, scale, real), shift, real)
        length = f.sub(f.sub(f.mul(end, scale, real), shift, real), low, real)
        if not op.half_pixel:
            length = self.larger(length, self.constant(1))
        step = f.div(length, self.number(frame.size(axis.count)), real)
        each = f.max(self.whole(f.intrinsic("ceil", step, ty=real)), 0, "i64")
        axis.each = each
        apart = f.div(step, self.number(f.max(each, 1, "i64")), real)
        extent = self.number(frame.size(axis.size))

        def first_at(edge: str, base: str) -> str:
            """The number of the sample at an edge, roughly."""
            return self.clamp(self.whole(f.div(f.sub(edge, base, real), apart, real)), -FAR, FAR)

        def bin_(i: str, carried: list[str]) -> list[str]:
            frame.put(carried[0], axis.starts, i, "i64")
            base = f.add(f.mul(self.number(i), step, real), low, real)
            near = self.clamp(f.sub(first_at(self.constant(-1), base), 2, "i64"), 0, each)
            far = self.clamp(f.add(first_at(extent, base), 2, "i64"), near, each)
            far = f.min(far, f.add(near, self.left(axis, carried[0]), "i64"), "i64")

            def one(s: str, carried: list[str]) -> list[str]:
                half = f.add(self.number(s), self.constant(0.5), real)
                part = f.div(f.mul(half, step, real), self.number(f.max(each, 1, "i64")), real)
                at = f.add(base, part, real)
                seen = f.cmp("ge", at, self.constant(-1), real)
                seen = f.and_(seen, f.cmp("le", at, extent, real), "i1")
                self.put_entry(axis, carried[0], at)
                return [f.add(carried[0], f.cast("zext", seen, "i64", "i1"), "i64")]

            return f.loop(near, far, 1, [("i64", carried[0])], one)

        (total,) = f.loop(0, frame.size(axis.count), 1, [("i64", "0")], bin_)
        frame.put(total, axis.starts, frame.size(axis.count), "i64")

    def left(self, axis: _Axis, used: str) -> str:
        """How many entries there is still room for, without the one that is written and not kept."""
        f = self.frame.f
        return f.sub(self.frame.size(self.most((axis.count, axis.size)) - 1), used, "i64")

    def put_entry(self, axis: _Axis, number: str, at: str) -> None:
        """The elements next to a place, as offsets, and their weights."""
        frame, f, real = self.frame, self.frame.f, self.real
        last = f.sub(frame.size(axis.size), 1, "i64")
        zero, top = self.constant(0), self.number(last)
        at = f.select(f.cmp("gt", at, zero, real), at, zero, real)
        at = f.select(f.cmp("lt", at, top, real), at, top, real)
        floor = f.intrinsic("floor", at, ty=real)
        low = self.clamp(self.whole(floor), 0, last)
        high = f.min(f.add(low, 1, "i64"), last, "i64")
        part = f.sub(at, floor, real)
        entry = f.offset(axis.entries, f.mul(number, ENTRY, "i64"))
        stride = frame.size(axis.stride)
        frame.put(f.mul(low, stride, "i64"), entry, 0, "i64")
        frame.put(f.mul(high, stride, "i64"), entry, 1, "i64")
        frame.put(f.sub(self.constant(1), part, real), f.offset(entry, 16), 0, real)
        frame.put(part, f.offset(entry, 24), 0, real)

    def entry(self, axis: _Axis, number: str) -> list[tuple[str, str]]:
        """(offset, weight) of both elements."""
        frame, f = self.frame, self.frame.f
        at = f.offset(axis.entries, f.mul(number, ENTRY, "i64"))
        return [(frame.element(at, n, "i64"), f.load(self.real, f.offset(at, 16 + 8 * n))) for n in range(2)]

    def pool(self, r: str, image: str, ys: _Axis, xs: _Axis) -> None:
        frame, f, real = self.frame, self.frame.f, self.real
        average = self.op.mode == "avg"
        count = f.mul(self.number(ys.each), self.number(xs.each), real)
        none = f.cmp("eq", count, self.constant(0), real)

        def channel(c: str, _: list[str]) -> None:
            plane = self.region(image, c)

            def line(i: str, _: list[str]) -> None:
                y0, y1 = (frame.element(ys.starts, n, "i64") for n in (i, f.add(i, 1, "i64")))

                def cell(j: str, _: list[str]) -> None:
                    x0, x1 = (frame.element(xs.starts, n, "i64") for n in (j, f.add(j, 1, "i64")))
                    found = self.samples(plane, ys, xs, (y0, y1), (x0, x1))
                    if average:
                        found = f.div(found, count, real)
                    else:
                        seen = f.mul(self.number(f.sub(y1, y0, "i64")), self.number(f.sub(x1, x0, "i64")), real)
                        more = f.cmp("lt", seen, count, real)
                        found = f.select(more, self.larger(found, self.constant(0)), found, real)
                    self.store(f.select(none, self.constant(0), found, real), self.place(r, c, i, j))

                f.loop(0, frame.size(self.columns), 1, [], cell)

            f.loop(0, frame.size(self.rows), 1, [], line)

        f.loop(0, frame.size(self.channels), 1, [], channel)

    def samples(self, plane: str, ys: _Axis, xs: _Axis, y: tuple[str, str], x: tuple[str, str]) -> str:
        """The sum, or the largest weighted element, of the samples of a bin."""
        f, real, average = self.frame.f, self.real, self.op.mode == "avg"
        start = self.constant(0.0 if average else float("-inf"))

        def line(m: str, carried: list[str]) -> list[str]:
            rows = self.entry(ys, m)

            def one(n: str, carried: list[str]) -> list[str]:
                terms = [
                    f.mul(self.load(plane, f.add(oy, ox, "i64")), f.mul(wy, wx, real), real)
                    for (oy, wy), (ox, wx) in product(rows, self.entry(xs, n))
                ]
                value = terms[0]
                for term in terms[1:]:
                    value = f.add(value, term, real) if average else self.larger(value, term)
                return [f.add(carried[0], value, real) if average else self.larger(carried[0], value)]

            return f.loop(x[0], x[1], 1, [(real, carried[0])], one)

        return f.loop(y[0], y[1], 1, [(real, start)], line)[0]
