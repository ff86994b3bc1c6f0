"""Depthwise convolutions of 8-bit images with VNNI, of up to 64 channels and several neighbouring pixels at once.

The bytes of four rows of a window are interleaved: one instruction multiplies those of 16 channels by their weights and
adds them up. Of a vector of 64 channels, that of sums number v then holds channels 16 q + 4 v + i in lanes 4 q + i,
which is the order that packing four of them to 8 bits wants; what sums start with, scales and shifts are brought into
it once a chunk.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.gemm import int8_ends
from rlx.backends.cpu.gemm.panels import int8_layout as int8_panels
from rlx.backends.cpu.kernels.conv.int8_depthwise_loops import Body, Pixels
from rlx.backends.cpu.llvm.builder import Function, vec
from rlx.backends.cpu.llvm.x86 import add_fours
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES
from rlx.kernels.expr import Expr, Select, const, guarded, size_expr
from rlx.kernels.lowering import out_vars
from rlx.kernels.program import Buffer, Store
from rlx.records import dataclass

__all__ = ["Fours", "pack", "scratch_bytes", "tails", "widest"]

I8 = DTYPES["i8"]
ARRAYS = 3  # of numbers of channels in scratch: what sums start with, scales, shifts


def widest(target: Target) -> int:
    """Channels of a whole vector."""
    return 4 * int8_panels.instructions(target).lanes


def tails(channels: int, target: Target) -> list[tuple[int, int]]:
    """The vectors behind whole ones: the first channel of each, counted from the last one back, and their number.

    The last one may overlap the one before it.
    """
    left, found = channels % widest(target), []
    while left > 0:
        size = next((s for s in (16, 32, 64) if left <= s <= min(channels, widest(target))), 0)
        if size:
            found.append((size, size))
            break
        size = next(s for s in (64, 32, 16) if s <= min(left, widest(target)))
        found.append((left, size))
        left -= size
    return found


def padded(channels: int, target: Target) -> int:
    """Channels of all vectors."""
    return channels // widest(target) * widest(target) + sum(size for _, size in tails(channels, target))


def scratch_bytes(channels: int, target: Target) -> int:
    """Of a worker: a pixel of padding, and the arrays."""
    return (channels + widest(target) + 63) // 64 * 64 * (1 + 4 * ARRAYS)


def pack(
    name: str,
    kind: str,
    channels: int,
    size: tuple[int, int],
    weight: Callable[[Expr, Expr, Expr], Expr],
    target: Target,
) -> list[Store]:
    """Weights as [vector of channels, column, four rows, vector of sums, channel and row]."""
    rows, columns = size
    fours = -(-rows // 4)
    buffer = Buffer(name, kind, (padded(channels, target) * columns * fours * 4,), I8)
    whole = channels // widest(target)
    parts = [(0, widest(target), whole)] if whole else []
    parts += [(channels - back, size, 1) for back, size in tails(channels, target)]
    made, before = [], 0
    for first, wide, count in parts:
        extents = (count, columns, fours, 4, wide // 4, 4)
        block, column, four, v, lane, r = own = out_vars(6)
        channel = block * wide + lane // 4 * 16 + v * 4 + lane % 4 + first
        row = four * 4 + r
        inside = row < rows
        element = weight(channel, row, column)
        element = Select(inside, guarded(element, inside), const(0, element.dtype))
        at: Expr = size_expr(before)
        for axis, step in zip(own, _steps(extents), strict=True):
            at = at + axis * step
        made.append(Store(buffer, extents, (at,), element))
        before += count * wide * columns * fours * 4
    return made


def _steps(extents: tuple[int, ...]) -> list[int]:
    steps = [1]
    for size in extents[:0:-1]:
        steps.insert(0, steps[0] * size)
    return steps


@dataclass(frozen=True)
class Fours(Body):
    """Emits the code of one chunk, by `widest` channels at a time; `tail` as `tails` gives it."""

    widest: int
    tail: list[tuple[int, int]]

    @property
    def at_once(self) -> int:
        return 4 if self.widest == 64 else 2

    @property
    def taps(self) -> int:
        """Bytes of weights of a channel."""
        return self.kernel[1] * -(-self.kernel[0] // 4) * 4

    def each(self, c0: str, c1: str, emit: Callable[[str, str, int], None]) -> None:
        """Calls `emit(channel, place, size)` for the vectors of these channels; places are without overlaps."""
        f, channels, wide = self.f, self.w.channels, self.widest
        whole = f.and_(channels, -wide)
        f.loop(c0, f.min(c1, whole), wide, [], lambda c, _: emit(c, c, wide))

        def last() -> None:
            place = whole
            for back, size in self.tail:
                emit(f.sub(channels, back), place, size)
                place = f.add(place, size)

        if self.tail:
            f.if_(f.cmp("eq", c1, channels), last)

    def array(self, number: int, place: str) -> str:
        """Where the numbers of a vector of channels lie in scratch."""
        f, channels = self.f, self.w.channels
        room = f.and_(f.add(channels, self.widest + 63), -64)  # of padding, more than of a number for each channel
        return f.offset(self.scratch(), f.add(room, f.mul(f.add(f.mul(room, number), place), 4)))

    def minus(self, lanes: int) -> str:
        f = self.f  # bytes with signs are multiplied as such without, 128 more
        shift = f.xor(self.fill, -128, "i8") if self.signed else self.fill
        return f.splat(f.sub(0, f.cast("zext", shift, "i32", "i8"), "i32"), lanes, "i32")

    def begin(self, c0: str, c1: str) -> None:
        f = self.f
        sources = [self.w.sums]
        if self.result:
            sources += [int8_panels.FinishArguments.load(f, name, self.finishing) for name in ("scale", "shift")]
        bias = self.bias() if self.biased else ""

        def move(c: str, place: str, size: int) -> None:
            for number, source in enumerate(sources):
                ty = "float" if number else "i32"
                quarter, q = vec(ty, 4), size // 16
                minus = self.minus(4)
                for v in range(4):
                    for i in range(q):
                        at = f.mul(f.add(c, 16 * i + 4 * v), 4)
                        value = f.load(quarter, f.offset(source, at))
                        if number == 0:
                            value = f.mul(value, minus)
                            value = f.add(value, f.load(quarter, f.offset(bias, at))) if self.biased else value
                        f.store(value, f.offset(self.array(number, place), 16 * (q * v + i)))

        self.each(c0, c1, move)

    def channels(self, c0: str, c1: str, pixels: Pixels) -> None:
        self.each(c0, c1, lambda c, place, size: self.vector(c, place, size, pixels))

    def vector(self, c: str, place: str, size: int, pixels: Pixels) -> None:
        """The results of `size` channels."""
        f, v = self.f, vec("i32", size // 4)

        def numbers(number: int) -> list[str]:
            ty, p = vec("float" if number else "i32", size // 4), self.array(number, place)
            return [f.load(ty, f.offset(p, size * i)) for i in range(4)]

        start = numbers(0)
        totals = [list(start) for _ in range(pixels.count)]
        weights = f.offset(self.w.weights, f.mul(place, self.taps))
        fours = -(-self.kernel[0] // 4)
        ty = vec("i8", size)
        for places, users in self.columns(pixels, c):
            rows = [f.load(ty, p, align=1) for p in places]
            if self.signed:
                rows = [f.xor(x, -128, ty) for x in rows]
            for four in range(fours):
                for i, mixed in enumerate(_mixed(f, rows[4 * four : 4 * four + 4], size)):
                    for r, j in users:
                        weight = f.load(v, f.offset(weights, ((j * fours + four) * 4 + i) * size))
                        totals[r][i] = add_fours(f, totals[r][i], mixed, weight, v)
        if not self.result:
            self.put_plain(c, size, pixels, totals)
            return
        limits = int8_ends.limits(f, self.finishing, self.clamped, size // 2)
        finish = int8_ends.Finish(numbers(1), numbers(2), limits)
        target, step = self.place(pixels, c)
        for total in totals:
            f.store(f.cast("bitcast", int8_ends.quantised(f, self.result, total, finish), ty), target, align=1)
            target = f.offset(target, step)

    def put_plain(self, c: str, size: int, pixels: Pixels, totals: list[list[str]]) -> None:
        """Computes and stores results from sums."""
        f = self.f
        scope, first = self.top.inner({}), f.add(pixels.row, pixels.ox)
        lanes = size // 4
        for r, total in enumerate(totals):
            here = self.epilogue.row(self.emitter, scope, f.add(first, r) if r else first)
            for q in range(size // 16):
                for j in range(2):  # channels in order
                    order = [k + 4 * q + i for k in (0, lanes) for i in range(4)]
                    sums = f.shuffle(total[2 * j], total[2 * j + 1], order)
                    self.epilogue.put(self.emitter, here, f.add(c, 16 * q + 8 * j), sums, 8)


def _mixed(f: Function, rows: list[str], size: int) -> list[str]:
    """The bytes of up to four rows next to each other, in four vectors of i32."""

    def unpacked(a: str, b: str, parts: int) -> list[str]:
        """Neighbours of both in the halves of each 16 bytes."""
        per = 16 // parts
        count = size // parts
        starts = [[per * q + per // 2 * h for q in range(size // 16)] for h in (0, 1)]
        return [f.shuffle(a, b, [k + x + i for x in s for i in range(per // 2) for k in (0, count)]) for s in starts]

    shorts = vec("i16", size // 2)
    none = f.xor(rows[0], rows[0])
    rows = [*rows, *[none] * (4 - len(rows))]
    upper, lower = ([f.cast("bitcast", x, shorts) for x in unpacked(rows[k], rows[k + 1], 1)] for k in (0, 2))
    mixed = [x for h in (0, 1) for x in unpacked(upper[h], lower[h], 2)]
    return [f.cast("bitcast", x, vec("i32", size // 4)) for x in mixed]
