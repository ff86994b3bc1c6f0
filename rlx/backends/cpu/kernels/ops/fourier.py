"""Fourier transforms of known length: passes of small radices, or a convolution with a chirp if a factor is large.

Long ones are made one by one, with the lanes of vectors along the transform; short ones, and those along another axis
than the last, side by side as lanes. A real signal of even length is transformed as half as many complex numbers.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.kernels.frame import Frame
from rlx.backends.cpu.kernels.ops.fourier_passes import (
    PAIRS,
    SPLIT,
    SWAPPED,
    Number,
    Parts,
    PassKind,
    complex_product,
    joined,
    parted,
    pass_function,
)
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Function, size_of, vec, width
from rlx.backends.cpu.schedule.arguments import KernelCode
from rlx.backends.cpu.strategy import Setting
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Node, TensorType
from rlx.ir.shape import ceildiv, size_product
from rlx.kernels.program import Buffer, Kernel
from rlx.ops.fourier.plan import FftPass, FftPlan, FftTable
from rlx.ops.signal import Dft
from rlx.records import replace

__all__ = ["accepts", "emit", "layout"]

SHORT = 64  # numbers from which on a transform is made by itself
FLOATS = (DTYPES["f32"], DTYPES["f64"])


def accepts(node: Node) -> bool:
    """f32 and f64, of a length that is known when the graph is compiled."""
    op = node.op
    assert isinstance(op, Dft)
    return node.inputs[0].dtype in FLOATS and isinstance(op.geometry(node.inputs[0].type).length, int)


def layout(kernel: Kernel, setting: Setting) -> list[Kernel]:
    """The table of factors first, in `prepare`."""
    assert kernel.special is not None
    x = kernel.operands[0]
    work = _Geometry(kernel, setting.target)
    op = FftTable(work.plan.length, work.plan.halved, work.plan.width, x.dtype)
    table = Buffer(f"{kernel.results[0].name}.factors", "prepared", (work.plan.total,), x.dtype)
    node = Node(op, (), (), kernel.special.provenance)
    factors = Kernel("fft factors", host=node, results=(table,), nodes=kernel.nodes)
    return [factors, replace(kernel, operands=(x, table))]


def emit(kernel: Kernel, target: Target) -> list[KernelCode]:
    """A row is a transform, or as many as there are lanes."""
    return [_Code(kernel, target).code()]


class _Geometry:
    """What is transformed, and in which of the two ways."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        assert kernel.special is not None
        op, x = kernel.special.op, kernel.operands[0]
        assert isinstance(op, Dft)
        g = op.geometry(TensorType(x.shape, x.dtype))
        assert isinstance(g.length, int)
        self.op, self.length = op, g.length
        self.used, self.made = g.used, g.made  # elements along the axis that are read, and made
        self.n = x.shape[g.axis]
        self.before, self.after = size_product(x.shape[: g.axis]), size_product(x.shape[g.axis + 1 : -1])
        self.parts, self.results = 1 if x.shape[-1] == 1 else 2, g.parts
        self.to_real = g.parts == 1
        halved = self.length % 2 == 0 and (self.to_real or self.parts == 1)
        core = self.length // 2 if halved else self.length
        self.lanes = target.vector_bytes // x.dtype.itemsize
        few = isinstance(self.after, int) and self.after < self.lanes // 2
        self.alone = core >= SHORT and few
        self.plan = FftPlan(self.length, halved, 1 if self.alone else self.lanes)


class _Code:
    """The code of one kernel. In scratch, number t of `width` transforms lies at t * width of two arrays of parts."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        self.g = _Geometry(kernel, target)
        self.plan, self.w = self.g.plan, self.g.plan.width
        self.x, self.table_buffer = kernel.operands
        (self.y,) = kernel.results
        self.frame = Frame()
        self.f = self.frame.f
        self.real = convert.llvm_type(self.x.dtype)
        self.size = size_of(self.real)
        self.functions: dict[PassKind, Function] = {}
        self.zeros: dict[int, str] = {}
        self.inverse = self.g.op.inverse
        self.swaps = self.inverse and (self.g.to_real or not self.plan.halved)  # parts, see `fourier_passes`

    def code(self) -> KernelCode:
        g, f, frame = self.g, self.f, self.frame
        room = max(self.plan.size, g.length if not g.plan.halved else g.length // 2 + 1) * self.w
        count = size_product((g.before, g.after))
        rows = ceildiv(count, self.w)
        start, stop = frame.rows(rows, g.length * self.w * 4)
        self.table = frame.pointer(self.table_buffer)
        self.source, self.result = frame.pointer(self.x), frame.pointer(self.y)
        self.count, self.inner = frame.size(count), frame.size(g.after)
        self.n, self.made = frame.size(g.n), frame.size(g.made)
        self.used = frame.size(g.used)
        part = -(-room * self.size // 64) * 64
        scratch = frame.scratch(4 * part)
        areas = [f.offset(scratch, k * part) for k in range(4)]
        self.areas = (Parts(SPLIT, areas[0], areas[1]), Parts(SPLIT, areas[2], areas[3]))
        f.loop(start, stop, 1, [], self.row)
        return frame.finish(optimize=False)

    # ---- where elements lie

    def row(self, row: str, _: list[str]) -> None:
        """All of one row."""
        f, g = self.f, self.g
        first = f.mul(row, self.w, "i64")
        at = [f.min(f.add(first, lane, "i64"), f.sub(self.count, 1, "i64"), "i64") for lane in range(self.w)]
        if g.after == 1:
            outer, column = at, ["0"] * self.w
        else:
            outer = [f.binary("udiv", u, self.inner, "i64") for u in at]
            column = [f.sub(u, f.mul(o, self.inner, "i64"), "i64") for u, o in zip(at, outer, strict=True)]

        def places(n: str, parts: int) -> list[str]:
            line = f.mul(n, self.inner, "i64")
            return [
                f.mul(f.add(f.mul(o, line, "i64"), c, "i64"), parts, "i64") for o, c in zip(outer, column, strict=True)
            ]

        self.reads = [f.gep(self.source, p, self.real) for p in places(self.n, g.parts)]
        self.writes = [f.gep(self.result, p, self.real) for p in places(self.made, g.results)]
        beside = f.and_(
            f.cmp("eq", outer[0], outer[-1], "i64"),
            f.cmp("eq", f.sub(column[-1], column[0], "i64"), self.w - 1, "i64"),
            "i1",
        )
        if self.w == 1 or g.after == 1:
            self.transform(False)
        else:
            f.if_(beside, lambda: self.transform(True), lambda: self.transform(False))

    def place(self, t: str, parts: int) -> str:
        """Where element t of a transform lies, from its first one on."""
        return self.f.mul(t if self.g.after == 1 else self.f.mul(t, self.inner, "i64"), parts, "i64")

    def read(self, t: str, beside: bool) -> Number:
        """Element t of the transforms of a row, as it is given."""
        f, g, w = self.f, self.g, self.w
        at = self.place(t, g.parts)
        ty = vec(self.real, w)
        if g.parts == 1:
            if beside:
                return f.load(ty, f.gep(self.reads[0], at, self.real)), self.zero(w)
            made = "poison"
            for lane, base in enumerate(self.reads):
                made = f.insert(made, f.load(self.real, f.gep(base, at, self.real)), lane, ty)
            return made, self.zero(w)
        if beside:
            return parted(f, f.load(vec(self.real, 2 * w), f.gep(self.reads[0], at, self.real)))
        return self.read_pairs(at)

    def read_pairs(self, at: str) -> Number:
        """The two neighbours at `at` of each transform."""
        f, both = self.f, vec(self.real, 2)
        pairs = [f.load(both, f.gep(base, at, self.real)) for base in self.reads]
        while len(pairs) > 1:
            wide = range(2 * width(f.type_of(pairs[0])))
            pairs = [f.shuffle(a, b, wide) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
        return parted(f, pairs[0])

    def write(self, x: Number, t: str, beside: bool) -> None:
        """Makes x element t of the transforms of a row."""
        f, g = self.f, self.g
        at = self.place(t, g.results)
        if g.results == 1:
            if beside:
                f.store(x[0], f.gep(self.writes[0], at, self.real))
                return
            for lane, base in enumerate(self.writes):
                f.store(f.extract(x[0], lane), f.gep(base, at, self.real))
        elif beside:
            f.store(joined(f, x), f.gep(self.writes[0], at, self.real))
        else:
            self.write_pairs(x, at)

    def write_pairs(self, x: Number, at: str) -> None:
        """Stores two neighbours of each transform."""
        f, both = self.f, joined(self.f, x)
        for lane, base in enumerate(self.writes):
            pair = both if self.w == 1 else f.shuffle(both, None, [2 * lane, 2 * lane + 1])
            f.store(pair, f.gep(base, at, self.real))

    def zero(self, w: int) -> str:
        """Zeros as a value that has a type."""
        if w not in self.zeros:
            ty = vec(self.real, w)
            self.zeros[w] = self.f.fresh(ty)
            self.f.slots.append(f"  {self.zeros[w]} = bitcast {ty} zeroinitializer to {ty}")
        return self.zeros[w]

    # ---- stages

    @property
    def whole(self) -> bool:
        """Whether a transform is read where it lies, by the first pass."""
        g = self.g
        full = not self.plan.chirped and g.after == 1 and g.alone
        pairs = self.plan.halved if g.parts == 1 else not g.to_real
        return full and pairs and isinstance(g.n, int) and g.n >= g.length

    @property
    def direct(self) -> bool:
        """Whether the last pass writes a transform where it belongs."""
        g = self.g
        full = not self.plan.chirped and g.after == 1 and g.alone
        complex_whole = not self.plan.halved and g.results == 2 and g.made == g.length
        return full and (complex_whole or (g.to_real and self.plan.halved))

    def transform(self, beside: bool) -> None:
        """Reads, transforms and writes one row."""
        g = self.g
        now, other = self.areas
        if self.whole:
            now = Parts(SWAPPED if self.swaps else PAIRS, self.reads[0])
        else:
            self.gathered(now, beside)
        end = None
        scale = 1 / g.length if self.inverse else 1.0
        if self.direct:
            end = Parts(SWAPPED if self.swaps else PAIRS, self.writes[0])
        if self.plan.chirped:
            now, other = self.convolved(now, other)
        elif self.plan.size > 1:
            now, other = self.passes(now, other, end, scale)
        elif end is not None:
            raise AssertionError("a transform of one number is not made by itself")
        if end is None:
            self.spread(now, scale, beside)

    def passes(self, now: Parts, other: Parts, end: Parts | None = None, scale: float = 1.0) -> tuple[Parts, Parts]:
        """Runs the passes; returns where the numbers are, and the other area."""
        for number, one in enumerate(self.plan.passes):
            last = end is not None and number == len(self.plan.passes) - 1
            to = end if last and end is not None else other
            self.run_pass(one, now, to, scale if last else 1.0)
            now, other = to, now if now.kind == SPLIT else self.areas[0]
        return now, other

    def run_pass(self, one: FftPass, source: Parts, target: Parts, scale: float) -> None:
        f = self.f
        kind = PassKind.of(one, self.real, self.g.lanes, source.kind, target.kind, scale != 1.0)
        if kind not in self.functions:
            self.functions[kind] = pass_function(kind)
        table = f.gep(self.table, self.number(one.table), self.real)
        sizes = [self.number(one.stride), self.number(one.rest)]
        places = [source.real, source.imaginary, target.real, target.imaginary]
        f.call(self.functions[kind], [*places, table, *sizes, scale])

    def number(self, n: int) -> str:
        """A number as a word of the kernel, so that kernels for other lengths have the same code."""
        return self.frame.size(n)

    def each(self, count: str, body: Callable[[str, int], None], start: str = "0") -> None:
        """Runs the body for t in start..count: one by one, or where lanes lie along the transform for as many t."""
        f, v = self.f, self.g.lanes if self.g.alone else 1
        if v > 1:
            steps = f.binary("sdiv", f.max(f.sub(count, start, "i64"), 0, "i64"), v, "i64")
            whole = f.add(start, f.mul(steps, v, "i64"), "i64")
            f.loop(start, whole, v, [], lambda t, _: body(t, v))
            start = whole
        f.loop(start, count, 1, [], lambda t, _: body(t, 1))

    def at(self, t: str) -> str:
        return t if self.w == 1 else self.f.mul(t, self.w, "i64")

    def type_for(self, v: int) -> str:
        return vec(self.real, v if self.g.alone else self.w)

    def factor(self, at: int, size: int, t: str, v: int) -> Number:
        """Numbers t, t + 1, .. of a table of `size`, for all lanes of a row or one each."""
        f = self.f
        made = []
        for part in (0, 1):
            place = f.gep(self.table, f.add(t, self.number(at + part * size), "i64"), self.real)
            ty = vec(self.real, v) if self.g.alone else self.real
            value = f.load(ty, place)
            made.append(value if self.g.alone else f.splat(value, self.w))
        return made[0], made[1]

    def cleared(self, area: Parts, start: str, stop: str) -> None:
        """Zeros from start to stop."""
        self.each(stop, lambda t, v: area.store(self.f, (self._zeros(v),) * 2, self.at(t)), start)

    def _zeros(self, v: int) -> str:
        return self.zero(v if self.g.alone else self.w)

    def gathered(self, area: Parts, beside: bool) -> None:
        """Brings the numbers to transform into scratch, with zeros for those that are not there."""
        f, g, plan = self.f, self.g, self.plan
        to = area.swapped if self.swaps else area
        if g.to_real:
            self.hermitian(to, beside)
            return
        if plan.halved:
            pairs = f.binary("sdiv", self.used, 2, "i64") if not isinstance(g.used, int) else self.number(g.used // 2)

            def two(t: str, _: list[str]) -> None:
                if g.after == 1:
                    value = self.read_pairs(f.shl(t, 1, "i64"))
                else:
                    first = f.shl(t, 1, "i64")
                    value = self.read(first, beside)[0], self.read(f.add(first, 1, "i64"), beside)[0]
                to.store(f, value, self.at(t))

            f.loop(0, pairs, 1, [], two)
            odd = f.cmp("ne", f.and_(self.used, 1, "i64"), 0, "i64")

            def single() -> None:
                value = self.read(f.shl(pairs, 1, "i64"), beside)[0]
                to.store(f, (value, self.zero(self.w)), self.at(pairs))

            f.if_(odd, single)
            filled = f.add(pairs, f.and_(self.used, 1, "i64"), "i64")
            self.cleared(to, filled, self.number(plan.core))
            return
        f.loop(0, self.used, 1, [], lambda t, _: to.store(f, self.read(t, beside), self.at(t)))
        if g.used != g.length:
            self.cleared(to, self.used, self.number(g.length))

    def hermitian(self, to: Parts, beside: bool) -> None:
        """The numbers whose inverse transform is the real signal of one half of a spectrum."""
        f, g, plan = self.f, self.g, self.plan
        h = g.length // 2
        bins = h + 1
        if not plan.halved:

            def both(t: str, _: list[str]) -> None:
                a, b = self.read(t, beside)
                to.store(f, (a, b), self.at(t))
                to.store(f, (a, f.neg(b)), self.at(f.sub(self.number(g.length), t, "i64")))

            f.if_(
                f.cmp("gt", self.used, 0, "i64"),
                lambda: to.store(f, (self.read("0", beside)[0], self.zero(self.w)), "0"),
            )
            f.loop(1, self.used, 1, [], both)
            rest = f.sub(self.number(g.length + 1), self.used, "i64")
            self.cleared(to, self.used, f.min(rest, self.number(g.length), "i64"))
            return
        spectrum = self.areas[1]
        f.loop(0, self.used, 1, [], lambda t, _: spectrum.store(f, self.read(t, beside), self.at(t)))
        if g.used != bins:
            self.cleared(spectrum, self.used, self.number(bins))
        first, last = (spectrum.load(f, self.at(t), vec(self.real, self.w))[0] for t in ("0", self.number(h)))
        to.store(f, (f.add(first, last), f.sub(first, last)), "0")

        def two(t: str, v: int, x: Number, y: Number) -> tuple[Number, Number]:
            w = self.factor(plan.half, h // 2 + 1, t, v)
            (a, b), (c, d) = x, y
            even = f.add(a, c), f.sub(b, d)
            odd = complex_product(f, (f.sub(a, c), f.add(b, d)), (w[0], f.neg(w[1])))
            return (f.sub(even[0], odd[1]), f.add(even[1], odd[0])), (f.add(even[0], odd[1]), f.sub(odd[0], even[1]))

        self.mirrored(spectrum, to, two)

    def mirrored(
        self,
        source: Parts,
        to: Parts,
        two: Callable[[str, int, Number, Number], tuple[Number, Number]],
    ) -> None:
        """For 0 < t <= h / 2: `two` makes numbers t and h - t of `to` of those of `source`."""
        f, h = self.f, self.plan.core

        def body(t: str, v: int) -> None:
            alone = self.g.alone and v > 1
            u = f.sub(self.number(h - v + 1), t, "i64") if alone else f.sub(self.number(h), t, "i64")
            back = list(range(v - 1, -1, -1))

            def turned(x: Number) -> Number:
                return (f.shuffle(x[0], None, back), f.shuffle(x[1], None, back)) if alone else x

            ty = self.type_for(v)
            x, y = source.load(f, self.at(t), ty), turned(source.load(f, self.at(u), ty))
            first, second = two(t, v, x, y)
            to.store(f, first, self.at(t))
            to.store(f, turned(second), self.at(u))

        self.each(self.number(h // 2 + 1), body, "1")

    def convolved(self, now: Parts, other: Parts) -> tuple[Parts, Parts]:
        """The transform by a convolution with a chirp."""
        f, plan = self.f, self.plan

        def times(at: int, size: int, area: Parts) -> None:
            def body(t: str, v: int) -> None:
                x = area.load(f, self.at(t), self.type_for(v))
                area.store(f, complex_product(f, x, self.factor(at, size, t, v)), self.at(t))

            self.each(self.number(size), body)

        times(plan.chirp, plan.core, now)
        self.cleared(now, self.number(plan.core), self.number(plan.size))
        now, other = self.passes(now, other)
        times(plan.filter, plan.size, now)
        now, other = self.passes(now.swapped, other.swapped)
        now, other = now.swapped, other.swapped
        times(plan.chirp, plan.core, now)
        return now, other

    def spread(self, area: Parts, scale: float, beside: bool) -> None:
        """Brings results out of scratch."""
        f, g, plan = self.f, self.g, self.plan
        area = area.swapped if self.swaps else area
        if plan.halved and not g.to_real:
            to = self.areas[1] if area.real in (self.areas[0].real, self.areas[0].imaginary) else self.areas[0]
            self.of_real(area, to, scale)
            bins = g.length // 2 + 1
            f.loop(
                0,
                self.number(bins),
                1,
                [],
                lambda t, _: self.write(to.load(f, self.at(t), vec(self.real, self.w)), t, beside),
            )
            if g.made != bins:
                self.mirror(to, bins, beside)
            return

        def scaled(x: Number) -> Number:
            return x if scale == 1.0 else (f.mul(x[0], scale), f.mul(x[1], scale))

        def one(t: str, _: list[str]) -> None:
            x = scaled(area.load(f, self.at(t), vec(self.real, self.w)))
            if g.to_real and plan.halved:
                if g.after == 1:
                    self.write_pairs(x, f.shl(t, 1, "i64"))
                    return
                self.write((x[0], x[0]), f.shl(t, 1, "i64"), beside)
                self.write((x[1], x[1]), f.add(f.shl(t, 1, "i64"), 1, "i64"), beside)
                return
            self.write(x, t, beside)

        f.loop(0, self.number(plan.core) if plan.halved else self.made, 1, [], one)

    def of_real(self, area: Parts, to: Parts, scale: float) -> None:
        """The first half of a real signal's spectrum, from the transform of its pairs taken as complex numbers."""
        f, plan = self.f, self.plan
        h = plan.core
        a, b = area.load(f, "0", vec(self.real, self.w))
        zero = self.zero(self.w)
        ends = [f.add(a, b), f.sub(a, b)]
        if scale != 1.0:
            ends = [f.mul(e, scale) for e in ends]
        to.store(f, (ends[0], zero), "0")
        to.store(f, (ends[1], zero), self.at(self.number(h)))

        def two(t: str, v: int, x: Number, y: Number) -> tuple[Number, Number]:
            w = self.factor(plan.half, h // 2 + 1, t, v)
            (a, b), (c, d) = x, y
            even = [f.mul(e, 0.5 * scale) for e in (f.add(a, c), f.sub(b, d))]
            odd = complex_product(f, (f.add(b, d), f.sub(c, a)), w)
            odd = f.mul(odd[0], 0.5 * scale), f.mul(odd[1], 0.5 * scale)
            if self.inverse:  # of a real signal: the conjugate
                return (f.add(even[0], odd[0]), f.neg(f.add(even[1], odd[1]))), (
                    f.sub(even[0], odd[0]),
                    f.sub(even[1], odd[1]),
                )
            return (f.add(even[0], odd[0]), f.add(even[1], odd[1])), (f.sub(even[0], odd[0]), f.sub(odd[1], even[1]))

        self.mirrored(area, to, two)

    def mirror(self, spectrum: Parts, bins: int, beside: bool) -> None:
        """The second half of the spectrum of a real signal."""
        f = self.f

        def one(t: str, _: list[str]) -> None:
            a, b = spectrum.load(f, self.at(t), vec(self.real, self.w))
            self.write((a, f.neg(b)), f.sub(self.number(self.g.length), t, "i64"), beside)

        f.loop(1, self.number(self.g.length - bins + 1), 1, [], one)
