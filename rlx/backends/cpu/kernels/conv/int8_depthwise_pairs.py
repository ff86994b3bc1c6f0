"""Depthwise convolutions of 8-bit images by products of 16 bits, of 16 channels and several pixels at once.

Elements are widened to 16 bits, and those of two rows of a window interleaved: one instruction multiplies both by their
weights and adds them up, exactly. A vector of sums then holds channels 0-3 and 8-11 of 16, another 4-7 and 12-15, which
is the order that packing them to 8 bits wants.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.gemm import int8_ends
from rlx.backends.cpu.gemm.panels import int8_layout as int8_panels
from rlx.backends.cpu.kernels.conv.int8_depthwise_loops import Body, Pixels
from rlx.backends.cpu.llvm.builder import Function, vec
from rlx.backends.cpu.llvm.x86 import pair_sums
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import Shape
from rlx.kernels.expr import Cast, Expr, Select, const, guarded, size_expr
from rlx.kernels.lowering import out_vars
from rlx.kernels.program import Buffer, Store
from rlx.records import dataclass

__all__ = ["CHANNELS", "Pairs", "pack"]

I16 = DTYPES["i16"]
CHANNELS = 16  # of a vector
V, SHORTS, BYTES = "<8 x i32>", "<16 x i16>", "<16 x i8>"


def pack(
    name: str, kind: str, channels: int, size: tuple[int, int], weight: Callable[[Expr, Expr, Expr], Expr]
) -> list[Store]:
    """Weights as [vector of channels, column, pair of rows, half of the vector, channel and row]."""
    rows, columns = size
    shape: Shape = (-(-channels // CHANNELS), columns, -(-rows // 2), 2, CHANNELS)
    block, column, pair, half, lane = own = out_vars(5)
    first: Expr = block * CHANNELS  # the last vector overlaps the one before it
    first = Select(first > channels - CHANNELS, size_expr(channels - CHANNELS), first)
    place = lane // 2
    channel, row = first + half * 4 + place % 4 + place // 4 * 8, pair * 2 + lane % 2
    inside = row < rows
    element = weight(channel, row, column)
    element = Select(inside, guarded(element, inside), const(0, element.dtype))
    return [Store(Buffer(name, kind, shape, I16), shape, own, element if element.dtype is I16 else Cast(element, I16))]


@dataclass(frozen=True)
class Pairs(Body):
    """Emits the code of one chunk with AVX2."""

    def channels(self, c0: str, c1: str, pixels: Pixels) -> None:
        f, channels = self.f, self.w.channels
        taps = self.kernel[1] * -(-self.kernel[0] // 2) * 64 // CHANNELS  # bytes of weights for a channel
        starting = self.starting()

        def vectors(c: str, _: list[str]) -> None:
            at = f.min(c, f.sub(channels, CHANNELS))
            weights = f.offset(self.w.weights, f.mul(c, taps))
            start = starting(at)
            self.put(pixels, at, self.sums(pixels, at, weights, [list(start) for _ in range(pixels.count)]))

        f.loop(c0, c1, CHANNELS, [], vectors)

    def halves(self, array: str, channel: str, ty: str) -> list[str]:
        """16 numbers of 4 bytes from a channel on, in the order of the sums."""
        f = self.f
        p = f.offset(array, f.mul(channel, 4))
        low, high = (f.load(vec(ty, 8), f.offset(p, 32 * j), align=4) for j in range(2))
        return [f.shuffle(low, high, [4 * j + i + k for k in (0, 8) for i in range(4)]) for j in range(2)]

    def starting(self) -> Callable[[str], list[str]]:
        """What gives the sums of 16 channels to start with: what the zero point takes off, and the bias."""
        f = self.f
        sums = self.w.sums
        bias = self.bias() if self.biased else ""
        minus = self.minus(8)

        def start(c: str) -> list[str]:
            values = [f.mul(half, minus, V) for half in self.halves(sums, c, "i32")]
            more = self.halves(bias, c, "i32") if self.biased else values
            return [f.add(x, y) for x, y in zip(values, more, strict=True)] if self.biased else values

        return start

    def sums(self, pixels: Pixels, c: str, weights: str, totals: list[list[str]]) -> list[list[str]]:
        """The sums of 16 channels from c on."""
        f = self.f
        pairs = -(-self.kernel[0] // 2)
        for places, users in self.columns(pixels, c):
            kind = "sext" if self.signed else "zext"
            rows = [f.cast(kind, f.load(BYTES, p, align=1), "i16") for p in places]
            for pair in range(pairs):
                for half, mixed in enumerate(_mixed(f, rows[2 * pair : 2 * pair + 2])):
                    for r, j in users:
                        place = ((j * pairs + pair) * 2 + half) * 32
                        weight = f.load(SHORTS, f.offset(weights, place), align=2)
                        totals[r][half] = f.add(totals[r][half], pair_sums(f, mixed, weight))
        return totals

    def put(self, pixels: Pixels, c: str, sums: list[list[str]]) -> None:
        """Stores the results of 16 channels from c on, given their sums."""
        f = self.f
        if not self.result:
            scope, first = self.top.inner({}), f.add(pixels.row, pixels.ox)
            for r, (low, high) in enumerate(sums):
                here = self.epilogue.row(self.emitter, scope, f.add(first, r) if r else first)
                for j in range(2):  # channels in order
                    total = f.shuffle(low, high, [4 * j + i + k for k in (0, 8) for i in range(4)])
                    self.epilogue.put(self.emitter, here, f.add(c, 8 * j) if j else c, total, 8)
            return
        arrays = int8_panels.FinishArguments.loaded(f, "scale", "shift", words=self.finishing)
        scales, shifts = (self.halves(p, c, "float") for p in (arrays.scale, arrays.shift))
        ends = int8_ends.limits(f, self.finishing, self.clamped)
        place, step = self.place(pixels, c)
        for both in sums:
            short = int8_ends.rounded(f, both, scales, shifts, ends)
            f.store(int8_ends.packed_in_order(f, self.result, short), place, align=1)
            place = f.offset(place, step)


def _mixed(f: Function, rows: list[str]) -> list[str]:
    """Elements of two rows next to each other, in both halves; of a lone one next to itself."""
    a, b = rows[0], rows[-1]  # the weights of a row that is not there are zeros
    lanes = [[n + 8 * q + 4 * half + 16 * r for q in (0, 1) for n in range(4) for r in (0, 1)] for half in (0, 1)]
    return [f.shuffle(a, b, lanes[half]) for half in (0, 1)]
