"""Encoded blocks as products of whole numbers read them: for each encoding its panels, numbers and scales.

An element is x = scale * (u - zero) - minimum, with u a number of 8 bits without sign, `zero` a power of two, 0 or a
number of the column, and scale and minimum the same for a group of 16 or 32 elements. A panel holds the bytes of the
blocks of 16 columns as *fields*; a row of a field has `width` bytes of each column side by side. Numbers lie in rows of
width 4, neighbours along k, which one instruction multiplies by four activations and adds up. Panels take the bytes
that the encoding takes, but for what products don't read, and are read from end to end:

    block:  fields of the head | body of turn 0 | body of turn 1 | ...        body: of each field its rows of that turn
"""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rlx.backends.cpu.llvm.builder import Function, Operand, constant, vec, width
from rlx.ir.dtype import DTYPES
from rlx.ir.encodings.bits import field
from rlx.ir.encodings.legacy import IQ4
from rlx.ir.encodings.mx import TWICE
from rlx.kernels.expr import I64, Expr, const
from rlx.records import dataclass

__all__ = ["BYTES", "CODES", "COLUMNS", "SCALE", "ZERO_POINT", "Field", "Q8Code", "Reader", "fetched_lines"]

COLUMNS = 16  # of a panel
ZERO_POINT, SCALE = 32, 33  # the numbers of the zero point and the scale (f32) among the bytes of a block
NIBBLES, TWOS, FIFTHS = 0x0F0F0F0F, 0x03030303, 0x10101010

Bytes = Callable[[Any], Expr]  # a stored byte of a block


@dataclass(frozen=True)
class Field:
    """`rows` rows of `width` bytes a column: byte j of row r is byte start + r * width + j of the block, or `made`."""

    name: str
    rows: int
    width: int
    start: int = 0
    made: Callable[[Any, Bytes, Any, Any], Expr] | None = None  # of k, byte, r and j

    @property
    def nbytes(self) -> int:
        return self.rows * self.width

    def element(self, k: Any, byte: Bytes, r: Any, j: Any) -> Expr:
        return self.made(k, byte, r, j) if self.made else byte(r * self.width + j + self.start)


def _signed(start: int) -> Callable[[Any, Bytes, Any, Any], Expr]:
    """Bytes with a sign, as numbers without one: 128 more."""
    return lambda k, byte, r, j: byte(r * 4 + j + start) ^ 128


def _fifths(bit: Callable[[Any, Bytes, Any, Any], Expr]) -> Callable[[Any, Bytes, Any, Any], Expr]:
    """A row for 32 elements: bit r of byte j is that of element 4 r + j, so that those of a four lie alike.

    `bit(k, byte, group, element)` is 1 where the element of the group has its highest bit.
    """

    def made(k: Any, byte: Bytes, group: Any, j: Any) -> Expr:
        bits = [k.call("shl", bit(k, byte, group, j + 4 * r), r) for r in range(8)]
        total: Expr = functools.reduce(operator.or_, bits)
        return total

    return made


def _in_word(start: int) -> Callable[[Any, Bytes, Any, Any], Expr]:
    """The highest bits of 32 elements in four bytes."""

    def bit(k: Any, byte: Bytes, _: Any, i: Any) -> Expr:
        found: Expr = field(k, byte(start + i // 8), i % 8, 1)
        return found

    return bit


Fields = tuple[Field, ...]


class Reader:
    """Reads the block of one vector of columns: `at` is the panel's block, `first` the first of its `lanes` columns.

    `room` is on the stack, for rows of bytes that `begin` keeps.
    """

    def __init__(self, f: Function, code: Q8Code, at: str, first: int, lanes: int, room: str) -> None:
        self.f, self.code, self.at, self.first, self.lanes, self.room = f, code, at, first, lanes, room
        self.body, self.turn_room = at, room
        self.points = ""  # zero points, once they are read

    def begin_turn(self, number: Operand) -> None:
        """Goes on with a turn, the number of which the run may tell."""
        f, code = self.f, self.code
        self.points = ""
        self.body = f.offset(self.at, f.mul(number, COLUMNS * code.turn_bytes))
        self.turn_room = f.offset(self.room, f.mul(number, self.lanes * code.kept_rows)) if self.room else ""

    def place(self, name: str, row: int = 0) -> str:
        """Where the row of a field (of those of the turn, in the body) begins for these columns."""
        start, own, in_body = self.code.places[name]
        at = COLUMNS * (start + row * own.width) + self.first * own.width
        return self.f.offset(self.body if in_body else self.at, at)

    def fours(self, name: str, row: int) -> str:
        """A row of fours, as i32."""
        return self.f.load(vec("i32", self.lanes), self.place(name, row))

    def bytes(self, name: str, row: int, *, signed: bool = False) -> str:
        """A row of bytes, as i32."""
        return self.wide(self.place(name, row), signed=signed)

    def wide(self, p: str, *, signed: bool = False) -> str:
        return self.f.cast("sext" if signed else "zext", self.f.load(vec("i8", self.lanes), p), "i32")

    def halves(self, name: str) -> str:
        """A row of f16, as f32."""
        return self.f.cast("fpext", self.f.load(vec("half", self.lanes), self.place(name)), "float")

    def floats(self, x: str) -> str:
        return self.f.cast("sitofp", x, "float")

    def shifted(self, x: str, right: int) -> str:
        """Dwords shifted to the right, or to the left where that is negative."""
        if right == 0:
            return x
        return self.f.lshr(x, right) if right > 0 else self.f.shl(x, -right)

    def values(self, table: Sequence[int], numbers: str) -> str:
        """f32 of a table of 16 or 32, by the lowest 4 or 5 bits of 16 dwords, whatever the others are."""
        f, v, words = self.f, vec("float", COLUMNS), vec("i32", COLUMNS)
        parts = [f"{v} {constant([float(x) for x in table[at : at + 16]], v)}" for at in range(0, len(table), 16)]
        name = "llvm.x86.avx512." + ("permvar.sf.512" if len(parts) == 1 else "vpermi2var.ps.512")
        f.declare(name, v, [v, words, v][: 1 + len(parts)])
        return f.op(f"call {v} @{name}({', '.join([parts[0], f'{words} {numbers}', *parts[1:]])})", v)

    def looked_up(self, table: Sequence[int], numbers: str) -> str:
        """Bytes of a table by numbers of 4 bits."""
        f, wide = self.f, 4 * self.lanes
        v, feature = vec("i8", wide), "avx512.pshuf.b.512" if wide == 64 else "avx2.pshuf.b"
        f.declare(f"llvm.x86.{feature}", v, [v, v])
        held = constant([b - 256 if b > 127 else b for b in table] * (wide // 16), v)
        x = f.cast("bitcast", numbers, v)
        return f.cast("bitcast", f.op(f"call {v} @llvm.x86.{feature}({v} {held}, {v} {x})", v), vec("i32", self.lanes))

    # ---- scales that are made once a block and kept on the stack, a row of bytes for each group

    def keep(self, row: int, x: str) -> None:
        """Rows of bytes from that number on."""
        self.f.store(x, self.f.offset(self.room, row * self.lanes))

    def kept(self, row: int, *, signed: bool = False) -> str:
        """A row of those, of the turn's, as i32."""
        return self.wide(self.f.offset(self.turn_room, row * self.lanes), signed=signed)

    def rows(self, name: str, row: int, count: int) -> str:
        """Rows of bytes that lie one after another, of these columns, as one vector."""
        f = self.f
        if self.lanes == COLUMNS:
            return f.load(vec("i8", count * COLUMNS), self.place(name, row))
        parts = [f.load(vec("i8", self.lanes), self.place(name, row + i)) for i in range(count)]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [f.shuffle(a, b, list(range(2 * width(f.type_of(a))))) for a, b in pairs]
        return parts[0]


class Q8Code(ABC):
    """How products of whole numbers read an encoding: `turn` elements at a time, in groups of `group`."""

    name: ClassVar[str]
    block: ClassVar[int] = 32
    head: ClassVar[Fields] = ()
    body: ClassVar[Fields]
    group: ClassVar[int] = 32
    turn: ClassVar[int] = 32
    zero: ClassVar[int] = 0
    most: ClassVar[int] = 255  # of u
    table: ClassVar[Sequence[int]] = ()  # u - zero (`zeroed`: u) by 4 or 5 bits, to be looked up in f32
    minima: ClassVar[bool] = False
    zeroed: ClassVar[bool] = False  # columns have zero points of their own, `zeros`, instead of `zero`
    kept: ClassVar[int] = 0  # rows of bytes that `begin` keeps
    kept_rows: ClassVar[int] = 0  # of them from turn to turn

    def __init__(self) -> None:
        self.turns = self.block // self.turn
        self.head_bytes = sum(own.nbytes for own in self.head)  # of a column
        self.turn_bytes = sum(own.nbytes for own in self.body) // self.turns
        self.nbytes = self.head_bytes + self.turns * self.turn_bytes
        self.places: dict[str, tuple[int, Field, bool]] = {}  # where they begin, and whether in the body
        start = 0
        for own in self.head:
            self.places[own.name] = start, own, False
            start += own.nbytes
        for own in self.body:
            self.places[own.name] = start, own, True
            start += own.nbytes // self.turns

    @property
    def what(self) -> str:
        """What it reads."""
        return f"whole blocks of {self.name} along k"

    def begin(self, r: Reader) -> None:
        """What is made once a block."""
        return

    @abstractmethod
    def four(self, r: Reader, number: int) -> str:
        """The numbers u of elements 4 * number ... of a turn, as fours."""

    def coded(self, r: Reader, number: int) -> tuple[str, int]:
        """(dwords, shift): after that shift the low bits of each byte are the indices of those elements in `table`."""
        return self.four(r, number), 0

    def numbers(self, r: Reader, number: int) -> list[str]:
        """The same four, less zero points, as f32."""
        f = r.f
        if self.zeroed:
            r.points = r.points or self.zeros(r)
        if self.table and r.lanes == COLUMNS:
            x, right = self.coded(r, number)
            found = [r.values(self.table, r.shifted(x, 8 * j + right)) for j in range(4)]
            return [f.binary("fsub", u, r.floats(r.points)) for u in found] if self.zeroed else found
        made, four = [], self.four(r, number)
        zero = r.points if self.zeroed else self.zero
        for j in range(4):
            u = f.and_(r.shifted(four, 8 * j), 255) if j < 3 else f.lshr(four, 24)
            made.append(r.floats(f.sub(u, zero) if zero else u))
        return made

    @abstractmethod
    def scale(self, r: Reader, group: int) -> str | None:
        """The scales of a group of a turn, f32; None: it has none."""

    def minimum(self, r: Reader, group: int) -> str:
        """Its minima, f32."""
        raise AssertionError(self.name)

    def zeros(self, r: Reader) -> str:
        """The zero points of columns, i32."""
        raise AssertionError(self.name)


def fetched_lines(f: Function, code: Q8Code, ahead: list[str], turn: Operand) -> list[list[tuple[str, int]]]:
    """What is prefetched beside each four of a turn, evenly: the lines of that turn of the blocks at `ahead`."""
    size = code.nbytes * COLUMNS // code.turns
    ahead = [f.offset(p, f.mul(turn, size)) for p in ahead]
    lines = [(p, line) for line in range(0, size, 64) for p in ahead]
    fours = code.turn // 4
    return [lines[i * len(lines) // fours : (i + 1) * len(lines) // fours] for i in range(fours)]


# ---- blocks of 32


class _Q8_0(Q8Code):
    name, zero = "q8_0", 128
    body: ClassVar[Fields] = (Field("d", 1, 2), Field("q", 8, 4, made=_signed(2)))

    def four(self, r: Reader, number: int) -> str:
        return r.fours("q", number)

    def scale(self, r: Reader, group: int) -> str:
        return r.halves("d")


class _Q8_1(_Q8_0):
    name = "q8_1"
    body: ClassVar[Fields] = (Field("d", 1, 2), Field("q", 8, 4, made=_signed(4)))


class _Q4_0(_Q8_0):
    name, zero, most = "q4_0", 8, 15
    table: ClassVar[Sequence[int]] = range(-8, 8)
    body: ClassVar[Fields] = (Field("d", 1, 2), Field("q", 4, 4, 2))

    def coded(self, r: Reader, number: int) -> tuple[str, int]:
        return r.fours("q", number % 4), number // 4 * 4

    def four(self, r: Reader, number: int) -> str:
        return r.f.and_(r.shifted(*_Q4_0.coded(self, r, number)), NIBBLES)


class _Q4_1(_Q4_0):
    name, zero, minima, table = "q4_1", 0, True, range(16)
    body: ClassVar[Fields] = (Field("d", 1, 2), Field("m", 1, 2, 2), Field("q", 4, 4, 4))

    def minimum(self, r: Reader, group: int) -> str:
        return r.f.neg(r.halves("m"))


class _Q5_0(_Q4_0):
    name, zero, most, table = "q5_0", 16, 31, range(-16, 16)
    coded = Q8Code.coded
    body: ClassVar[Fields] = (Field("d", 1, 2), Field("high", 1, 4, made=_fifths(_in_word(2))), Field("q", 4, 4, 6))

    def four(self, r: Reader, number: int) -> str:
        high = r.f.and_(r.shifted(r.fours("high", 0), number - 4), FIFTHS)
        return r.f.or_(super().four(r, number), high)


class _Q5_1(_Q5_0):
    name, zero, minima, table = "q5_1", 0, True, range(32)
    body: ClassVar[Fields] = (
        Field("d", 1, 2), Field("m", 1, 2, 2), Field("high", 1, 4, made=_fifths(_in_word(4))), Field("q", 4, 4, 8)
    )  # fmt: skip
    minimum = _Q4_1.minimum


class _Iq4Nl(_Q4_0):
    name, zero, most, table = "iq4_nl", 128, 255, IQ4

    def four(self, r: Reader, number: int) -> str:
        return r.looked_up([n + 128 for n in IQ4], super().four(r, number))


class _Mxfp4(_Q4_0):
    name, zero, most, table = "mxfp4", 16, 28, TWICE
    body: ClassVar[Fields] = (Field("e", 1, 1), Field("q", 4, 4, 1))

    def four(self, r: Reader, number: int) -> str:
        return r.looked_up([n + 16 for n in TWICE], super().four(r, number))

    def scale(self, r: Reader, group: int) -> str:
        f, e = r.f, r.bytes("e", 0)
        # half of 2^(e - 127), as e2m1 is doubled; below e = 2 a denormal number
        small = f.shl(f.splat(1 << 21, r.lanes, "i32"), f.min(e, 1))
        bits = f.select(f.cmp("lt", e, 2), small, f.shl(f.sub(e, 1), 23))
        return f.cast("bitcast", bits, vec("float", r.lanes))


class _Nvfp4(Q8Code):
    name, zero, most, group, turn, block = "nvfp4", 16, 28, 16, 64, 64
    body: ClassVar[Fields] = (Field("s", 4, 1), Field("q", 8, 4, 4))

    def four(self, r: Reader, number: int) -> str:
        row, high = number // 4 * 2 + number % 2, number % 4 // 2
        numbers = r.f.and_(r.shifted(r.fours("q", row), 4 * high), NIBBLES)
        return r.looked_up([n + 16 for n in TWICE], numbers)

    def scale(self, r: Reader, group: int) -> str:
        f, s = r.f, r.bytes("s", group)
        # e4m3 without a sign, halved: the bits of an f32 with 3 of its mantissa, times 2^(127 - 7) / 2
        bits = f.shl(f.and_(s, 127), 20)
        value = f.mul(f.cast("bitcast", bits, vec("float", r.lanes)), 2.0**119)
        return f.select(f.cmp("eq", s, 127), f.splat(0.0, r.lanes, "float"), value)


# ---- blocks of 256


class _OfTwos(Q8Code):
    """Numbers of 2 bits in bytes of those 32 elements apart, 128 a turn."""

    turn: ClassVar[int] = 128
    block: ClassVar[int] = 256

    def four(self, r: Reader, number: int) -> str:
        return r.f.and_(r.shifted(r.fours("q", number % 8), number // 8 * 2), TWOS)


class _Q2_K(_OfTwos):
    name, most, group, minima = "q2_k", 3, 16, True
    head: ClassVar[Fields] = (Field("d", 1, 2, 80), Field("m", 1, 2, 82))
    body: ClassVar[Fields] = (Field("s", 16, 1), Field("q", 16, 4, 16))

    def scale(self, r: Reader, group: int) -> str:
        return r.f.mul(r.halves("d"), r.floats(r.f.and_(r.bytes("s", group), 15)))

    def minimum(self, r: Reader, group: int) -> str:
        return r.f.mul(r.halves("m"), r.floats(r.f.lshr(r.bytes("s", group), 4)))


class _Q3_K(_OfTwos):
    name, most, zero, group, kept, kept_rows = "q3_k", 7, 4, 16, 16, 8
    head: ClassVar[Fields] = (Field("d", 1, 2, 108), Field("s", 12, 1, 96))
    body: ClassVar[Fields] = (
        Field("high", 8, 4, made=_fifths(lambda k, byte, group, i: field(k, byte(i), group, 1))), Field("q", 16, 4, 32)
    )  # fmt: skip

    def begin(self, r: Reader) -> None:
        f = r.f
        high = r.rows("s", 8, 4)
        for part in range(4):
            low = r.rows("s", part % 2 * 4, 4)
            low = f.and_(low, 15) if part < 2 else f.lshr(low, 4)
            bits = f.shl(f.and_(f.lshr(high, 2 * part), 3), 4)
            r.keep(4 * part, f.sub(f.or_(low, bits), 32))

    def four(self, r: Reader, number: int) -> str:
        high = r.shifted(r.fours("high", number // 8), number % 8 - 2)
        return r.f.or_(super().four(r, number), r.f.and_(high, 0x04040404))

    def scale(self, r: Reader, group: int) -> str:
        return r.f.mul(r.halves("d"), r.floats(r.kept(group, signed=True)))


class _Q4_K(Q8Code):
    name, most, turn, minima, kept, kept_rows, block = "q4_k", 15, 64, True, 16, 4, 256
    table: ClassVar[Sequence[int]] = range(16)
    head: ClassVar[Fields] = (Field("d", 1, 2), Field("m", 1, 2, 2), Field("s", 12, 1, 4))
    body: ClassVar[Fields] = (Field("q", 32, 4, 16),)

    def begin(self, r: Reader) -> None:
        """Scales and minima of 6 bits, as `superblocks` has them: of two groups the scales, then the minima."""
        f, two = r.f, 2 * r.lanes
        first, second, third = (r.rows("s", row, 4) for row in (0, 4, 8))
        scales = f.and_(first, 63), f.or_(f.and_(third, 15), f.and_(f.lshr(first, 2), 48))
        minima = f.and_(second, 63), f.or_(f.lshr(third, 4), f.and_(f.lshr(second, 2), 48))
        for i, (s, m) in enumerate(zip(scales, minima, strict=True)):
            for half in (0, 1):
                own = list(range(half * two, half * two + two))
                r.keep(8 * i + 4 * half, f.shuffle(s, m, [*own, *(n + 2 * two for n in own)]))

    def coded(self, r: Reader, number: int) -> tuple[str, int]:
        return r.fours("q", number % 8), number // 8 * 4

    def four(self, r: Reader, number: int) -> str:
        return r.f.and_(r.shifted(*_Q4_K.coded(self, r, number)), NIBBLES)

    def scale(self, r: Reader, group: int) -> str:
        return r.f.mul(r.halves("d"), r.floats(r.kept(group)))

    def minimum(self, r: Reader, group: int) -> str:
        return r.f.mul(r.halves("m"), r.floats(r.kept(2 + group)))


class _Q5_K(_Q4_K):
    name, most, table = "q5_k", 31, range(32)
    coded = Q8Code.coded
    body: ClassVar[Fields] = (
        Field("high", 8, 4, made=_fifths(lambda k, byte, group, i: field(k, byte(16 + i), group, 1))),
        Field("q", 32, 4, 48),
    )

    def four(self, r: Reader, number: int) -> str:
        high = r.f.and_(r.shifted(r.fours("high", number // 8), number % 8 - 4), FIFTHS)
        return r.f.or_(super().four(r, number), high)


def _sixes(k: Any, byte: Bytes, r: Any, j: Any) -> Expr:
    """A number of the first three quarters of 128, and above it two bits of that in the last one."""
    turn, quarter, i = r // 24, r % 24 // 8, r % 8 * 4 + j

    def number(quarter: Any) -> Expr:
        low = field(k, byte(turn * 64 + quarter % 2 * 32 + i), quarter // 2 * 4, 4)
        made: Expr = low | k.call("shl", field(k, byte(turn * 32 + i + 128), quarter * 2, 2), 4)
        return made

    made: Expr = number(quarter) | k.call("shl", field(k, number(const(3, I64)), quarter * 2, 2), 6)
    return made


class _Q6_K(Q8Code):
    name, most, zero, group, turn, block = "q6_k", 63, 32, 16, 128, 256
    head: ClassVar[Fields] = (Field("d", 1, 2, 208),)
    body: ClassVar[Fields] = (Field("s", 16, 1, 192), Field("q", 48, 4, made=_sixes))

    def four(self, r: Reader, number: int) -> str:
        f, quarter, i = r.f, number // 8, number % 8
        if quarter < 3:
            return f.and_(r.fours("q", number), 0x3F3F3F3F)
        parts = [r.shifted(r.fours("q", 8 * part + i), 6 - 2 * part) for part in range(3)]
        masked = [f.and_(x, 0x03030303 << 2 * part) for part, x in enumerate(parts)]
        return f.or_(f.or_(masked[0], masked[1]), masked[2])

    def scale(self, r: Reader, group: int) -> str:
        return r.f.mul(r.halves("d"), r.floats(r.bytes("s", group, signed=True)))


class _Q8_K(Q8Code):
    name, zero, block = "q8_k", 128, 256
    head: ClassVar[Fields] = (Field("d", 1, 4),)
    body: ClassVar[Fields] = (Field("q", 64, 4, made=_signed(4)),)

    def four(self, r: Reader, number: int) -> str:
        return r.fours("q", number)

    def scale(self, r: Reader, group: int) -> str:
        return r.f.load(vec("float", r.lanes), r.place("d"))


class _Iq4Xs(Q8Code):
    name, zero, turn, kept, kept_rows, block = "iq4_xs", 128, 64, 8, 2, 256
    head: ClassVar[Fields] = (Field("d", 1, 2), Field("high", 2, 1, 2), Field("low", 4, 1, 4))
    body: ClassVar[Fields] = (Field("q", 32, 4, 8),)

    def begin(self, r: Reader) -> None:
        """Scales of 6 bits less 32."""
        f, lanes = r.f, 4 * r.lanes
        low, high = r.rows("low", 0, 4), r.rows("high", 0, 2)
        own: list[str] = []
        for odd in (0, 1):  # groups 0, 2, 4, 6, then 1, 3, 5, 7
            both = f.shuffle(high, None, [i // 2 // r.lanes * r.lanes + i % r.lanes for i in range(lanes)])
            turned = constant([i // r.lanes % 2 * 4 + 2 * odd for i in range(lanes)], vec("i8", lanes))
            bits = f.shl(f.and_(f.lshr(both, turned), 3), 4)
            own.append(f.sub(f.or_(f.lshr(low, 4) if odd else f.and_(low, 15), bits), 32))
        for half in (0, 1):
            order = [n for group in range(4) for n in _row(group % 2 * 4 + 2 * half + group // 2, r.lanes)]
            r.keep(4 * half, f.shuffle(own[0], own[1], order))

    def four(self, r: Reader, number: int) -> str:
        numbers = r.fours("q", number // 8 * 4 + number % 4)
        return r.looked_up([n + 128 for n in IQ4], r.f.and_(r.shifted(numbers, number // 4 % 2 * 4), NIBBLES))

    def scale(self, r: Reader, group: int) -> str:
        return r.f.mul(r.halves("d"), r.floats(r.kept(group, signed=True)))


def _row(number: int, lanes: int) -> range:
    """The lanes of a row of bytes of several."""
    return range(number * lanes, number * lanes + lanes)


class _Tq2_0(_OfTwos):
    name, most, zero = "tq2_0", 3, 1
    head: ClassVar[Fields] = (Field("d", 1, 2, 64),)
    body: ClassVar[Fields] = (Field("q", 16, 4),)

    def scale(self, r: Reader, group: int) -> str:
        return r.halves("d")


# ---- bytes


class _Bytes(Q8Code):
    """Bytes with or without a sign, less a zero point of the column and times a scale of the block where they have one.

    A scale by column comes after the sums and is none of the block. "u4": bytes below 16, two to a byte of the panel.
    """

    def __init__(self, dtype: str, zeroed: bool, scaled: bool) -> None:
        self.name = f"{dtype}{'_zero' if zeroed else ''}{'_scaled' if scaled else ''}"  # type: ignore[misc]
        self.dtype, self.zeroed, self.scaled = dtype, zeroed, scaled  # type: ignore[misc]
        signed = dtype == "i8"
        self.zero = 128 if signed and not zeroed else 0  # type: ignore[misc]

        def point(k: Any, byte: Bytes, r: Any, j: Any) -> Expr:
            return byte(ZERO_POINT) ^ 128 if signed else byte(ZERO_POINT)

        def scale(k: Any, byte: Bytes, r: Any, j: Any) -> Expr:
            bits = k.bitcast(byte(SCALE), DTYPES["u32"])
            made: Expr = k.cast(k.call("shr", bits, k.cast(j * 8, "u32")) & 255, "u8")
            return made

        def two(k: Any, byte: Bytes, r: Any, j: Any) -> Expr:
            made: Expr = byte(r * 4 + j) | k.call("shl", byte(r * 4 + j + 16), 4)
            return made

        self.most = 15 if dtype == "u4" else 255  # type: ignore[misc]
        self.table = range(16) if dtype == "u4" else ()  # type: ignore[misc]
        self.body = (  # type: ignore[misc]
            *((Field("s", 1, 4, made=scale),) if scaled else ()),
            *((Field("z", 1, 1, made=point),) if zeroed else ()),
            Field("q", 4, 4, made=two) if dtype == "u4" else Field("q", 8, 4, made=_signed(0) if signed else None),
        )
        super().__init__()

    @property
    def what(self) -> str:
        less, times = (
            " less a zero point" if self.zeroed else "",
            " times a scale by blocks of k" if self.scaled else "",
        )
        return f"{self.dtype}{less}{times}"

    def coded(self, r: Reader, number: int) -> tuple[str, int]:
        return r.fours("q", number % 4), number // 4 * 4

    def four(self, r: Reader, number: int) -> str:
        if self.dtype != "u4":
            return r.fours("q", number)
        return r.f.and_(r.shifted(*self.coded(r, number)), NIBBLES)

    def scale(self, r: Reader, group: int) -> str | None:
        return r.f.load(vec("float", r.lanes), r.place("s")) if self.scaled else None

    def zeros(self, r: Reader) -> str:
        return r.bytes("z", 0)


BYTES: dict[str, Q8Code] = {
    made.name: made
    for made in (_Bytes(d, z, s) for d in ("i8", "u8", "u4") for z in (False, True) for s in (False, True))
}
CODES: dict[str, Q8Code] = {
    made.name: made()
    for made in (
        _Q8_0, _Q8_1, _Q4_0, _Q4_1, _Q5_0, _Q5_1, _Iq4Nl, _Mxfp4, _Nvfp4, _Q2_K, _Q3_K, _Q4_K, _Q5_K, _Q6_K, _Q8_K,
        _Iq4Xs, _Tq2_0,
    )
}  # fmt: skip
