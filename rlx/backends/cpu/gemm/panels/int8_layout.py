"""How panels hold weights of bytes, for the format `int8`: C[M, N] = A[M, K] @ W[K, N] in i32, exact for all values.

A row of A is bytes as they lie in an image. Weights are packed in panels of 16 columns, each column's elements in fours
along k. With AVX2 one instruction multiplies 32 pairs of bytes and adds neighbours in 16 bits, another adds those up in
32. The first saturates, and two of its results are added up before the second, so a panel holds only weights whose sums
stay within 16 bits for every A. What that leaves out of a weight comes again, in further fours behind all panels, each
with the place along k that it belongs to: few for weights as networks have them, none for most.

VNNI multiplies fours and adds them up in 32 bits, in vectors of 32 or 64 bytes, AMX does so for 16 rows at once: panels
are the same, and only weights beyond 8 bits (a byte less a zero point) leave something out.

A panel is, in bytes: 16 sums of its columns (i32), the number of its further fours (i64, in 64 bytes), 128 for each 8
elements of k. Behind all panels there is for each the places of its further fours (i32), and these, 64 each.

i8 rows become u8 by adding 128, which the zero point takes off again; AMX takes them as they are.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.llvm.builder import Function
from rlx.backends.cpu.schedule.arguments import Address, Arguments, Number
from rlx.backends.cpu.target import Target
from rlx.ir.shape import Size, ceildiv
from rlx.records import dataclass

__all__ = [
    "DEPTH", "HEAD", "WIDTH", "EndArguments", "FinishArguments", "Instructions", "available", "further",
    "instructions", "pack_panel", "panel_bytes", "places_bytes", "spare_bytes",
]  # fmt: skip

WIDTH = 16  # columns of a panel
DEPTH = 8  # elements along k of a step
HEAD = 128
PAIR = 128  # what two weights of one sign may add up to: 255 * 128 fits in 16 bits


class FinishArguments(Arguments):
    """What is done to sums, at `finish`; arrays are padded to whole panels."""

    scale: Address  # f32 a column
    shift: Address  # f32 a column, added after the scale
    bias: Address  # i32 a column, added to the sums; may be null
    zero: Number  # of the result
    low: Number  # limits of the result
    high: Number


class EndArguments(FinishArguments):
    """The same for a block of results, and what its sums begin with."""

    point: Number  # the zero point of A, of u8: 128 more where elements are i8
    more: Address  # the first panel's further fours
    spare: Number  # bytes of a panel's
    places: Number  # bytes that their places take of these, which come first
    column: Number  # bytes of 4-byte arrays before the first panel's


@dataclass(frozen=True)
class Instructions:
    """What products of bytes are computed with: vectors of `lanes` sums (8 or 16), VNNI (`dots`), AMX (`tiles`)."""

    lanes: int
    dots: bool
    tiles: bool

    @property
    def rows(self) -> int:
        """Rows of A of a tile."""
        return 16 if self.tiles else self.lanes // 2

    @property
    def name(self) -> str:
        return f"{4 * self.lanes}{'d' if self.dots else ''}{'t' if self.tiles else ''}"


def instructions(target: Target) -> Instructions:
    """Those of a machine."""
    dots = target.has("avxvnni") or (target.has("avx512vnni") and target.has("avx512vl"))
    return Instructions(16 if target.wide_bytes else 8, dots, target.tiles and target.wide_bytes)


def available(target: Target) -> bool:
    """Whether a machine has the instructions."""
    return target.x86 and target.vector_bytes >= 32


def further(narrow: bool, target: Target) -> int:
    """The most further fours that 8 elements of k can need: of weights within -128..127, else -255..255."""
    if instructions(target).dots:
        return 0 if narrow else 4
    return 3 if narrow else 7


def _aligned(count: Size) -> Size:
    return ceildiv(count, 64) * 64


def panel_bytes(depth: Size, narrow: bool, target: Target) -> Size:
    """Bytes of a panel of `depth` rows and its further fours."""
    return HEAD + ceildiv(depth, DEPTH) * 128 + spare_bytes(depth, narrow, target)


def spare_bytes(depth: Size, narrow: bool, target: Target) -> Size:
    """Bytes that the further fours of a panel may take, with their places."""
    return places_bytes(depth, narrow, target) + ceildiv(depth, DEPTH) * further(narrow, target) * 64


def places_bytes(depth: Size, narrow: bool, target: Target) -> Size:
    """Bytes of the places of further fours."""
    return _aligned(ceildiv(depth, DEPTH) * further(narrow, target) * 4)


def pack_panel(
    f: Function,
    target: Target,
    out: str,
    place: str,
    octets: str,
    places: str,
    element: Callable[[str, str], str],
) -> None:
    """Emits the packing of one panel at `out`, of so many times 8 rows; `element(k, column)` gives an i32.

    Its further fours go to `place`: first their places, which take `places` bytes.
    """
    _Panel(f, target, out, place, places).emit(octets, element)


class _Panel:
    """The packing of one panel.

    Eight rows of its weights, an octet, are written to `rest`. The panel takes of each as much as sums of products have
    room for, further fours take more until `rest` is zeros.
    """

    def __init__(self, f: Function, target: Target, out: str, place: str, places: str) -> None:
        self.f, self.out, self.place = f, out, place
        self.dots = instructions(target).dots
        self.sums, self.rest = f.alloca("i32", WIDTH), f.alloca("i32", DEPTH * WIDTH)
        self.main = f.offset(out, HEAD)
        self.fours = f.offset(place, places)

    def emit(self, octets: str, element: Callable[[str, str], str]) -> None:
        """All of it; what is stored last are the number of further fours, and the sums of columns."""
        f, sums = self.f, self.sums
        self.loop(WIDTH, lambda lane: f.store(0, f.gep(sums, lane, "i32"), ty="i32"))

        def octet(o: str, state: list[str]) -> list[str]:
            self.fill(o, element)
            self.loop(WIDTH, lambda lane: self.main_fours(o, lane))
            count = state[0]
            for four in range(2):
                count = self.further_fours(o, four, count)
            return [count]

        count = f.loop(0, octets, 1, [("i64", 0)], octet)[0]
        f.store(count, f.offset(self.out, 64))
        self.loop(WIDTH, lambda lane: f.store(f.load("i32", f.gep(sums, lane, "i32")), f.gep(self.out, lane, "i32")))

    def fill(self, o: str, element: Callable[[str, str], str]) -> None:
        """Writes octet `o` to `rest`, and adds it to the sums of columns."""
        f = self.f

        def one(e: str, lane: str) -> None:
            value = element(f.add(f.mul(o, DEPTH), e), lane)
            value = f.max(f.min(value, 255, "i32"), -255, "i32")  # there is room for the rest of no more
            f.store(value, self.at(e, lane), ty="i32")
            total = f.gep(self.sums, lane, "i32")
            f.store(f.add(f.load("i32", total), value, "i32"), total)

        self.loop(DEPTH, lambda e: self.loop(WIDTH, lambda lane: one(e, lane)))

    def main_fours(self, o: str, lane: str) -> None:
        """Moves what the panel takes of a column's octet, two fours: a pair of each at a time."""
        f = self.f
        for pair in range(2):
            values = [f.load("i32", self.at(e, lane)) for e in (2 * pair, 2 * pair + 1, 4 + 2 * pair, 5 + 2 * pair)]
            all_fit, two_fit = self.fits(values), self.fits(values[:2])
            first = f.offset(self.main, f.mul(o, 128))
            self.take(0, pair, lane, first, self.part_of(values[:2], two_fit))
            if self.dots:
                others = self.part_of(values[2:], all_fit)
            else:
                others = [f.select(all_fit, v, 0, "i32") for v in values[2:]]
            self.take(1, pair, lane, f.offset(first, 64), others)

    def further_fours(self, o: str, four: int, count: str) -> str:
        """Moves what is left of one four of the octet to further fours; how many there are then, `count` before."""
        f = self.f

        def any_left(_: list[str]) -> str:
            def more(i: str, state: list[str]) -> list[str]:
                return [f.or_(state[0], f.load("i32", f.gep(self.rest, f.add(i, four * 4 * WIDTH), "i32")))]

            return f.cmp("ne", f.loop(0, 4 * WIDTH, 1, [("i32", 0)], more)[0], 0)

        def again(state: list[str]) -> list[str]:
            number = state[0]
            where = f.cast("trunc", f.add(f.mul(o, 2), four), "i32")
            f.store(where, f.gep(self.place, number, "i32"))
            own = f.offset(self.fours, f.mul(number, 64))

            def one(lane: str) -> None:
                for pair in range(2):
                    values = [f.load("i32", self.at(4 * four + 2 * pair + j, lane)) for j in range(2)]
                    self.take(four, pair, lane, own, self.part_of(values, self.fits(values)))

            self.loop(WIDTH, one)
            return [f.add(number, 1)]

        return f.while_([("i64", count)], any_left, again)[0]

    def loop(self, count: str | int, body: Callable[[str], None]) -> None:
        self.f.loop(0, count, 1, [], lambda i, _: body(i))

    def at(self, e: str | int, lane: str) -> str:
        """The address of what is left of row `e` of the octet."""
        f = self.f
        return f.gep(self.rest, f.add(f.mul(e, WIDTH, "i64"), lane, "i64"), "i32")

    def take(self, four: int, pair: int, lane: str, four_at: str, values: list[str]) -> None:
        """Moves two values from the rest to the panel."""
        f = self.f
        for j, value in enumerate(values):
            f.store(f.cast("trunc", value, "i8"), f.offset(four_at, f.add(f.mul(lane, 4), 2 * pair + j)))
            p = self.at(f.add(f.mul(four, 4, "i64"), 2 * pair + j), lane)
            f.store(f.sub(f.load("i32", p), value), p)

    def fits(self, values: list[str]) -> str:
        """Whether their products with bytes add up within 16 bits, where that is asked for."""
        f = self.f
        if self.dots:
            return "true"
        good = "true"
        total = ["0", "0"]
        for v in values:
            total = [f.add(total[0], f.max(v, 0, "i32"), "i32"), f.add(total[1], f.min(v, 0, "i32"), "i32")]
            good = f.and_(good, f.cmp("le", v, 127, "i32"), "i1")
        good = f.and_(good, f.cmp("le", total[0], PAIR, "i32"), "i1")
        return f.and_(good, f.cmp("ge", total[1], -PAIR, "i32"), "i1")

    def part_of(self, values: list[str], whole: str) -> list[str]:
        """What the panel takes of two values; `whole`: all, since they fit."""
        f = self.f
        if self.dots:
            return [f.max(f.min(v, 127, "i32"), -128, "i32") for v in values]
        half = PAIR // 2
        return [f.select(whole, v, f.max(f.min(v, half, "i32"), -half, "i32"), "i32") for v in values]
