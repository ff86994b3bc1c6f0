"""Depthwise convolutions on the CPU: one input plane for each output plane, summed in registers along image rows.

Vectors run along output columns. Those whose taps all lie inside the image load without masks; those at the edges
compute which columns exist once for all rows. A row above or below the image is a row of zeros in scratch, so rows need
no tests. With a stride of 2 pairs of vectors are loaded and every second element picked.

The last vector of a row may run over into the next row, which is written later; only where the memory of the chunk ends
is a store masked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from rlx.backends.cpu.builder import Function, Module, vec
from rlx.backends.cpu.gemm import kernel_function, load_word
from rlx.backends.cpu.jit import host
from rlx.backends.cpu.nest import PLACEHOLDER, Emitter, Scope, name_kernel
from rlx.backends.cpu.window import Finish, Geometry
from rlx.backends.cpu.words import Computed, Extents, KernelCode, Pointer, Scratch, Word, WordTable
from rlx.ir.shape import evaluate
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import Load
from rlx.kernels.lowering import Conv

__all__ = ["emit", "suits"]

MAX_TAPS = 64
CHUNK_COST = 100_000  # vector operations of one chunk: some 50 us
GROUP = 4  # vectors summed at once away from the edges
INT = "i32"


class Plane(IntEnum):
    """The words of a depthwise kernel; strides are in elements."""

    X = 0
    X_N = 1
    X_C = 2
    X_H = 3
    HEIGHT = 4
    WIDTH = 5
    STRIDE_H = 6
    DILATION_H = 7
    PAD_H = 8
    PAD_W = 9
    OUT_HEIGHT = 10
    OUT_WIDTH = 11
    WEIGHTS = 12
    OUTPUTS = 13  # of one input plane
    PLANES = 14  # of the output, in one image
    OUT = 15
    ROWS = 16  # of a strip
    STRIPS = 17  # of a plane
    UNITS = 18  # strips of a chunk
    ALL_UNITS = 19
    INNER_FROM = 20  # vectors [INNER_FROM, INNER_TO) of a row need no masks
    INNER_TO = 21
    SCRATCH = 22
    SCRATCH_STRIDE = 23  # bytes


def suits(anchor: Conv, geo: Geometry, finish: Finish) -> bool:
    """f32, one input channel a group, few taps, column strides of 1 or 2, and results that take their sums' place."""
    kernel = anchor.w_shape[2:]
    if anchor.w_shape[1] != 1 or anchor.groups == 1 or anchor.x.dtype.name != "f32" or not finish.in_place:
        return False
    taps = 1
    for size in kernel:
        if not isinstance(size, int):
            return False
        taps *= size
    return taps <= MAX_TAPS and geo.strides[1] in (1, 2)


@dataclass(frozen=True)
class _Cut:
    """How the planes are cut: into strips of rows, one or several a chunk."""

    rows: int
    strips: int
    units: int
    all_units: int

    @property
    def chunks(self) -> int:
        return -(-self.all_units // self.units)


def _cut(geo: Geometry, taps: int, lanes: int, extents: Extents) -> _Cut:
    sizes = (geo.batch, geo.groups * geo.outputs, geo.out_height, geo.out_width)
    batch, planes, height, width = (evaluate(s, extents) for s in sizes)
    a_row = -(-width // lanes) * (taps + 4)
    strips = min(max(height * a_row // CHUNK_COST, 1), max(height, 1))
    rows = max(-(-height // strips), 1)
    strips = max(-(-height // rows), 1)
    units = max(CHUNK_COST // max(rows * a_row, 1), 1) if strips == 1 else 1
    return _Cut(rows, strips, units, batch * planes * strips if height and width else 0)


@dataclass(frozen=True)
class _Taps:
    """The loads of a row of the kernel, known when code is made. A tap is a load, or every second element of two."""

    stride: int
    starts: tuple[int, ...]  # first columns of the loads
    picks: tuple[tuple[int, int], ...]  # of each tap: which load, which of its elements first

    @property
    def reach(self) -> int:
        """Vectors that a load spans."""
        return self.stride


def _taps(count: int, stride: int, dilation: int) -> _Taps:
    at = [k * dilation for k in range(count)]
    starts = tuple(dict.fromkeys(a - a % stride for a in at))
    return _Taps(stride, starts, tuple((starts.index(a - a % stride), a % stride) for a in at))


def _inner(geo: Geometry, taps: _Taps, lanes: int, extents: Extents) -> tuple[int, int]:
    """The vectors of a row whose loads all lie inside the image, and that are whole."""
    pad, width, out = (evaluate(s, extents) for s in (geo.pads[1], geo.width, geo.out_width))
    step = lanes * taps.stride
    last = max(taps.starts) + step - 1  # the last column loaded for the first vector, before the pad
    count = -(-out // lanes)
    first = min(-(-max(pad, 0) // step), count)
    stop = min((width - 1 - last + pad) // step + 1, out // lanes)
    return first, max(stop, first)


def emit(anchor: Conv, geo: Geometry, finish: Finish) -> KernelCode:
    """The depthwise convolution with its epilogue, in registers where it is the same for all pixels of a channel."""
    assert isinstance(anchor.x, Load)
    assert isinstance(anchor.w, Load)
    lanes = host().vector_bytes // 4
    kernel_h, kernel_w = (evaluate(k, {}) for k in geo.kernel)
    taps = _taps(kernel_w, geo.strides[1], geo.dilations[1])
    weights = linear_index(anchor.w.indices, anchor.w.source.shape)
    single = (kernel_h, geo.pads[0], geo.height, geo.out_height) == (1, 0, 1, 1)
    needs_zeros = not single and (kernel_h > 1 or any(p != 0 for p in anchor.pads[::2]))

    def cut(extents: Extents) -> _Cut:
        return _cut(geo, kernel_h * kernel_w, lanes, extents)

    def scratch(extents: Extents) -> int:
        return -(-4 * (evaluate(geo.width, extents) + lanes) // 64) * 64 if needs_zeros else 0

    words: list[Word] = [
        Pointer(anchor.x.source, geo.x.constant * 4),
        geo.x_n,
        geo.x_c,
        geo.x_h,
        geo.height,
        geo.width,
        geo.strides[0],
        geo.dilations[0],
        *geo.pads,
        geo.out_height,
        geo.out_width,
        Pointer(anchor.w.source, weights.constant * 4),
        geo.outputs,
        geo.groups * geo.outputs,
        Pointer(finish.destination.source, geo.out.constant * 4),
        Computed(lambda e: cut(e).rows),
        Computed(lambda e: cut(e).strips),
        Computed(lambda e: cut(e).units),
        Computed(lambda e: cut(e).all_units),
        Computed(lambda e: _inner(geo, taps, lanes, e)[0]),
        Computed(lambda e: _inner(geo, taps, lanes, e)[1]),
        Scratch(),
        Computed(scratch),
    ]
    table = WordTable(words)
    f = kernel_function(PLACEHOLDER)
    emitter = Emitter(f, table, lanes)
    if not finish.plain:
        finish.prepare(emitter)
        finish.settle(emitter)
    pointers = (Plane.X, Plane.WEIGHTS, Plane.OUT, Plane.SCRATCH)
    w = {i: load_word(f, i, "ptr" if i in pointers else "i64") for i in Plane}
    zeros = ""
    if needs_zeros:
        zeros = f.offset(w[Plane.SCRATCH], f.mul("%worker", w[Plane.SCRATCH_STRIDE]))
        v = vec("float", lanes)
        f.loop(0, w[Plane.WIDTH], lanes, [], lambda i, _: f.store(0.0, f.gep(zeros, i, "float"), ty=v))
    unit = _Unit(f, emitter, finish, w, taps, (kernel_h, kernel_w), lanes, zeros)
    first = f.mul("%chunk", w[Plane.UNITS])
    f.loop(first, f.min(f.add(first, w[Plane.UNITS]), w[Plane.ALL_UNITS]), 1, [], unit.emit)
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    return KernelCode(symbol, ir, tuple(table.words), lambda e: cut(e).chunks, tuple(emitter.sites), Computed(scratch))


@dataclass(frozen=True)
class _Unit:
    """Emits the code of one strip of one plane."""

    f: Function
    emitter: Emitter
    finish: Finish
    w: dict[Plane, str]
    taps: _Taps
    kernel: tuple[int, int]
    lanes: int
    zeros: str

    @property
    def vector(self) -> str:
        return vec("float", self.lanes)

    def emit(self, unit: str, _: list[str]) -> None:
        f, w, lanes = self.f, self.w, self.lanes
        plane, strip = f.div(unit, w[Plane.STRIPS]), f.rem(unit, w[Plane.STRIPS])
        image, channel = f.div(plane, w[Plane.PLANES]), f.rem(plane, w[Plane.PLANES])
        row0 = f.mul(strip, w[Plane.ROWS])
        row1 = f.min(f.add(row0, w[Plane.ROWS]), w[Plane.OUT_HEIGHT])
        source = f.mul(f.div(channel, w[Plane.OUTPUTS]), w[Plane.X_C])
        x = f.gep(w[Plane.X], f.add(f.mul(image, w[Plane.X_N]), source), "float")
        x = f.gep(x, f.sub(0, w[Plane.PAD_W]), "float")
        zeros = f.gep(self.zeros, f.sub(0, w[Plane.PAD_W]), "float") if self.zeros else ""
        count = self.kernel[0] * self.kernel[1]
        taps = f.gep(w[Plane.WEIGHTS], f.mul(channel, count), "float")
        weights = [f.splat(f.load("float", f.gep(taps, i, "float")), lanes) for i in range(count)]
        out_width = w[Plane.OUT_WIDTH]
        pixels = f.mul(w[Plane.OUT_HEIGHT], out_width)
        out = f.gep(w[Plane.OUT], f.mul(plane, pixels), "float")

        scope = Scope(1, None, {self.finish.image: image, self.finish.channel: channel})
        at_once = self.finish.plain or self.finish.channel_only(self.emitter)
        if not self.finish.plain:
            self.emitter.hoist(self.finish.expr, frozenset(self.finish.space), scope)

        def result(value: str) -> str:
            if self.finish.plain or not at_once:
                return value
            here = scope.inner({}, lanes, self.finish.space[-1])
            self.emitter.acc = lambda _: (value, lanes)
            return self.emitter.lanes_of(self.finish.expr, here)

        def rows_of(row: str) -> list[str]:
            """The input rows under the kernel; a pointer is to where the first column, padding included, would be."""
            top = f.sub(f.mul(row, w[Plane.STRIDE_H]), w[Plane.PAD_H])
            found = []
            for k in range(self.kernel[0]):
                y = f.add(top, f.mul(w[Plane.DILATION_H], k)) if k else top
                p = f.gep(x, f.mul(y, w[Plane.X_H]), "float")
                found.append(f.select(f.cmp("ult", y, w[Plane.HEIGHT]), p, zeros, "ptr") if zeros else p)
            return found

        vectors = f.div(f.add(out_width, lanes - 1), lanes)
        inner_from, inner_to = w[Plane.INNER_FROM], w[Plane.INNER_TO]
        right = f.sub(vectors, inner_to)

        def edge(e: str, _: list[str]) -> None:
            # from the right to the left: a row's last vector may run over into the first of the next row
            at = f.sub(f.sub(vectors, 1), e)
            v = f.select(f.cmp("lt", e, right), at, f.sub(at, f.sub(inner_to, inner_from)))
            column = f.mul(v, lanes)
            masks = self.masks(column)

            def row(r: str, _: list[str]) -> None:
                found = rows_of(r)
                total = self.total([column], found, weights, masks)[0]
                value = result(total)
                left = f.sub(f.mul(f.sub(row1, r), out_width), column)
                address = f.gep(out, f.add(f.mul(r, out_width), column), "float")

                def at_end() -> None:
                    f.masked_store(value, address, f.mask_below(f.sub(out_width, column), lanes))

                f.if_(f.cmp("lt", left, lanes), at_end, lambda: f.store(value, address))

            f.loop(row0, row1, 1, [], row)

        f.loop(0, f.add(right, inner_from), 1, [], edge)
        grouped = f.sub(inner_to, f.rem(f.sub(inner_to, inner_from), GROUP))

        def inner(r: str, _: list[str]) -> None:
            found = rows_of(r)
            line = f.gep(out, f.mul(r, out_width), "float")

            def turn(count: int) -> Callable[[str, list[str]], None]:
                def body(v: str, _: list[str]) -> None:
                    columns = [f.mul(f.add(v, i) if i else v, lanes) for i in range(count)]
                    for column, total in zip(columns, self.total(columns, found, weights, None), strict=True):
                        f.store(result(total), f.gep(line, column, "float"))

                return body

            f.loop(inner_from, grouped, GROUP, [], turn(GROUP))
            f.loop(grouped, inner_to, 1, [], turn(1))

        f.if_(f.cmp("lt", inner_from, inner_to), lambda: f.loop(row0, row1, 1, [], inner) and None)
        if not at_once:
            start, stop = f.mul(row0, out_width), f.mul(row1, out_width)
            self.finish.pixels(self.emitter, scope, start, stop, f.gep(out, start, "float"))

    def masks(self, column: str) -> list[list[str]]:
        """For each load of a kernel row, which elements lie inside the image: full-width integers."""
        f, lanes = self.f, self.lanes
        left = f.sub(f.mul(column, self.taps.stride), self.w[Plane.PAD_W])
        width = self.narrow(self.w[Plane.WIDTH])
        ity = vec(INT, lanes)
        made = []
        for start in self.taps.starts:
            parts = []
            for part in range(self.taps.reach):
                at = f.add(self.narrow(f.add(left, start + part * lanes)), f.iota(lanes, INT), ity)
                inside = f.and_(f.cmp("ge", at, 0, ity), f.cmp("lt", at, width, ity))
                parts.append(f.cast("sext", inside, ity))
            made.append(parts)
        return made

    def narrow(self, value: str) -> str:
        return self.f.splat(self.f.cast("trunc", value, INT), self.lanes, INT)

    def total(
        self, columns: list[str], rows: list[str], weights: list[str], masks: list[list[str]] | None
    ) -> list[str]:
        """The sums for vectors of outputs that start at `columns`. A lone vector is summed in two halves."""
        f = self.f
        halves = 2 if len(columns) == 1 and len(weights) > 4 else 1
        sums: list[list[str | None]] = [[None] * halves for _ in columns]
        done = 0
        for k, p in enumerate(rows):
            loaded: dict[tuple[int, int], list[str]] = {}  # at the first use, so that few are held at once
            for j, (which, first) in enumerate(self.taps.picks):
                weight = weights[k * self.kernel[1] + j]
                for v, column in enumerate(columns):
                    if (v, which) not in loaded:
                        step = f.mul(column, self.taps.stride) if self.taps.stride > 1 else column
                        loaded[v, which] = self.load(f.gep(p, step, "float"), which, masks)
                    x = self.pick(loaded[v, which], first)
                    old = sums[v][done % halves]
                    sums[v][done % halves] = f.mul(x, weight) if old is None else f.fma(x, weight, old)
                done += 1
        totals = []
        for parts in sums:
            total = parts[0]
            assert total is not None
            for part in parts[1:]:
                assert part is not None
                total = f.add(total, part)
            totals.append(self.in_order(total))
        return totals

    def load(self, base: str, which: int, masks: list[list[str]] | None) -> list[str]:
        """The vectors of one load of a kernel row."""
        f, lanes = self.f, self.lanes
        found = []
        for part in range(self.taps.reach):
            address = f.gep(base, self.taps.starts[which] + part * lanes, "float")
            if masks is None:
                found.append(f.load(self.vector, address))
            else:
                mask = f.cmp("lt", masks[which][part], 0, vec(INT, lanes))
                found.append(f.masked_load(self.vector, address, mask))
        return found

    def pick(self, parts: list[str], first: int) -> str:
        """Every second element from `first` on, in the order that one shuffle within 128 bits gives (see in_order)."""
        if len(parts) == 1:
            return parts[0]
        order = [lane for g in range(0, self.lanes, 4) for lane in (g, g + 2, self.lanes + g, self.lanes + g + 2)]
        return self.f.shuffle(parts[0], parts[1], [lane + first for lane in order])

    def in_order(self, value: str) -> str:
        """Undoes the order of `pick`."""
        if self.taps.stride == 1 or self.lanes == 4:
            return value
        half = self.lanes // 2
        order = [j // 2 * 4 + j % 2 for j in range(half)] + [j // 2 * 4 + 2 + j % 2 for j in range(half)]
        return self.f.shuffle(value, None, order)
