"""What sums of products of bytes (see `panels.int8`) begin with, and what becomes of them.

They begin with what the zero point takes off and the bias. They are stored as they are, or requantised to 8 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.backends.cpu.gemm.accumulators import Accumulators
from rlx.backends.cpu.gemm.panels.format import Ends
from rlx.backends.cpu.gemm.panels.int8_layout import HEAD, WIDTH, EndArguments, FinishArguments
from rlx.backends.cpu.gemm.tile import Tile
from rlx.backends.cpu.llvm.builder import Function, constant, vec, width
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.backends.cpu.gemm.panels.int8 import Int8

__all__ = [
    "Finish", "Int8Ends", "finishing", "limits", "packed_in_order", "quantised", "rounded", "rows_of_bytes", "starting",
]  # fmt: skip

NAMES = {  # by lanes of i32: conversion, packing to i16, to u8, to i8
    16: (
        "llvm.x86.avx512.mask.cvtps2dq.512", "llvm.x86.avx512.packssdw.512", "llvm.x86.avx512.packuswb.512",
        "llvm.x86.avx512.packsswb.512",
    ),
    8: ("llvm.x86.avx.cvt.ps2dq.256", "llvm.x86.avx2.packssdw", "llvm.x86.avx2.packuswb", "llvm.x86.avx2.packsswb"),
    4: (
        "llvm.x86.sse2.cvtps2dq", "llvm.x86.sse2.packssdw.128", "llvm.x86.sse2.packuswb.128",
        "llvm.x86.sse2.packsswb.128",
    ),
}  # fmt: skip


def starting(f: Function, format: Int8, panel: str, point: str, bias: str, column: str) -> list[str]:
    """What sums of a panel, whose steps are at `panel`, begin with: what the zero point takes off, and the bias."""
    lanes = format.by.lanes
    v, size = vec("i32", lanes), 4 * lanes
    minus = f.splat(f.sub(0, f.cast("trunc", point, "i32")), lanes)
    first = [f.mul(f.load(v, f.offset(panel, size * j - HEAD)), minus) for j in range(WIDTH // lanes)]
    if format.stores == "i32":
        return first
    at = f.offset(bias, column)
    return f.if_(
        f.cmp("ne", bias, "null"),
        lambda: [f.add(x, f.load(v, f.offset(at, size * j))) for j, x in enumerate(first)],
        lambda: first,
    )


@dataclass(frozen=True)
class Finish:
    """The scales, shifts (by vector) and limits of panels."""

    scales: list[str]
    shifts: list[str]
    limits: list[str]


def finishing(f: Function, format: Int8, ends: EndArguments, columns: list[str], lanes: int) -> Finish:
    """Those of panels that start so many bytes into arrays of 4-byte numbers; limits in so many lanes of i16."""
    floats, size = vec("float", format.by.lanes), 4 * format.by.lanes
    scales, shifts = (
        [f.load(floats, f.offset(array, f.add(c, at)), align=4) for c in columns for at in range(0, 4 * WIDTH, size)]
        for array in (ends.scale, ends.shift)
    )
    return Finish(scales, shifts, limits(f, "%ends", format.clamped, lanes))


class Int8Ends(Ends):
    """Those of a tile of some rows and panels."""

    def __init__(self, f: Function, format: Int8, tile: Tile, rows: int, vectors: int) -> None:
        self.f, self.format, self.tile, self.rows = f, format, tile, rows
        self.per_panel = WIDTH // tile.lanes
        self.ends = ends = EndArguments.loaded(f, words="%ends")
        self.panels = ["%b"]
        self.columns = [f.add(ends.column, f.mul("%panel", 4 * WIDTH))]
        for _ in range(1, vectors // self.per_panel):
            self.panels.append(f.offset(self.panels[-1], "%stride"))
            self.columns.append(f.add(self.columns[-1], 4 * WIDTH))
        pairs = zip(self.panels, self.columns, strict=True)
        self.begun = [x for p, c in pairs for x in starting(f, format, p, ends.point, ends.bias, c)]
        if format.stores != "i32":
            self.with_ = finishing(f, format, ends, self.columns, 2 * tile.lanes)

    def first(self) -> list[str]:
        return self.begun * self.rows

    def finish(self, sums: Accumulators, a_rows: list[str], c_rows: list[str]) -> None:
        if self.format.rest:
            for number in range(len(self.panels)):
                self.further(sums, number, a_rows)
        if self.format.stores == "i32":
            sums.put(c_rows, "%n", None)
        elif self.tile.lanes == WIDTH:
            self.store_rows(sums, c_rows)
        else:
            for number in range(len(self.panels)):
                self.store_panel(sums, c_rows, number)

    def further(self, sums: Accumulators, number: int, a_rows: list[str]) -> None:
        """Adds the products with the further fours of a panel."""
        f, halves, format = self.f, self.per_panel, self.format
        places = f.offset(self.ends.more, f.mul(f.add("%panel", number), self.ends.spare))
        fours = f.offset(places, self.ends.places)
        own = [r * sums.vectors + number * halves + j for r in range(self.rows) for j in range(halves)]

        def more(i: str, state: list[str]) -> list[str]:
            at = f.mul(f.cast("zext", f.load("i32", f.gep(places, i, "i32")), "i64"), 4)
            w = f.offset(fours, f.mul(i, 64))
            found = []
            for r, row in enumerate(a_rows):
                value = format.four(f, f.offset(row, at))
                for j in range(halves):
                    weights = f.load(f.type_of(value), f.offset(w, 4 * self.tile.lanes * j))
                    found.append(format.add_four(f, value, weights, state[halves * r + j]))
            return found

        count = f.load("i64", f.offset(self.panels[number], 64 - HEAD))
        after = f.loop(0, count, 1, [(self.tile.vector, sums.values[at]) for at in own], more)
        for at, value in zip(own, after, strict=True):
            sums.values[at] = value

    def store_rows(self, sums: Accumulators, c_rows: list[str]) -> None:
        """Stores results with AVX-512: four vectors of sums at once, as many rows as that is."""
        f, panels = self.f, len(self.panels)
        some = 4 // (panels if panels != 3 else 4)
        rows = [sums.values[panels * r : panels * (r + 1)] for r in range(self.rows)]
        values: list[str] = []
        for r in range(0, len(rows), some):
            values += rows_of_bytes(f, self.format.stores, rows[r : r + some], self.with_)
        size = 16 * panels if panels != 3 else 64

        def full() -> None:
            for p, value in zip(c_rows, values, strict=True):
                f.store(value, p, align=1)

        def part() -> None:
            mask = f.mask_below("%n", size, "i8")
            for p, value in zip(c_rows, values, strict=True):
                f.masked_store(value, p, mask)

        f.if_(f.cmp("ge", "%n", size), full, part)

    def store_panel(self, sums: Accumulators, c_rows: list[str], number: int) -> None:
        """Stores the results of a panel with AVX2."""
        f = self.f
        n = f.sub("%n", WIDTH * number) if number else "%n"
        c = [f.offset(p, WIDTH * number) for p in c_rows]
        copy = f.alloca("i8", 16 * len(c))
        scales, shifts = (x[2 * number : 2 * number + 2] for x in (self.with_.scales, self.with_.shifts))
        pairs = [sums.values[at : at + 2] for at in range(2 * number, len(sums.values), sums.vectors)]
        shorts = [rounded(f, pair, scales, shifts, self.with_.limits) for pair in pairs]
        results: list[str] = []
        for r in range(0, len(c), 2):
            results += packed(f, self.format.stores, shorts[r : r + 2])

        def full() -> None:
            for p, value in zip(c, results, strict=True):
                f.store(value, p, align=1)

        def half() -> None:
            for p, value in zip(c, results, strict=True):
                f.store(f.extract(f.cast("bitcast", value, "<2 x i64>"), 0), p, align=1)

        def part() -> None:
            for r, value in enumerate(results):
                f.store(value, f.offset(copy, 16 * r), align=1)

            def row(r: str, _: list[str]) -> None:
                source, target = f.offset(copy, f.mul(r, 16)), f.offset(c[0], f.mul(r, "%ldc"))
                f.loop(0, n, 1, [], lambda i, _: f.store(f.load("i8", f.offset(source, i)), f.offset(target, i)))

            f.loop(0, len(c), 1, [], row)

        def less() -> None:
            f.if_(f.cmp("eq", n, 8), half, part)

        f.if_(f.cmp("ge", n, WIDTH), full, less)


def rows_of_bytes(f: Function, result: str, rows: list[list[str]], finish: Finish) -> list[str]:
    """Results ("u8" or "i8") of rows of sums of panels: one row of three or four panels, two of two, or four of one."""
    sums, panels = [x for row in rows for x in row], len(rows[0])
    sums += sums[-1:] * (4 - len(sums))
    scales, shifts = ([*x, *x[-1:] * (panels == 3)] for x in (finish.scales, finish.shifts))
    found = quantised(f, result, sums, Finish(scales, shifts, finish.limits))
    count = len(scales)  # vectors of a row
    orders = [[4 * q + v for v in range(count * i, count * (i + 1)) for q in range(4)] for i in range(len(rows))]
    return [f.cast("bitcast", f.shuffle(found, None, order), vec("i8", 16 * count)) for order in orders]


def quantised(f: Function, result: str, sums: list[str], finish: Finish) -> str:
    """Results ("u8" or "i8") of four vectors of sums: four lanes of each in turn, in vectors of i32.

    Scaled, shifted, rounded, limited as by `rounded`; scales and shifts are those of all vectors or one for each.
    """
    scales, shifts = (list(x) * (4 // len(x)) for x in (finish.scales, finish.shifts))
    pairs = [rounded(f, sums[i : i + 2], scales[i : i + 2], shifts[i : i + 2], finish.limits) for i in (0, 2)]
    return f.cast("bitcast", to_bytes(f, result, *pairs), f.type_of(sums[0]))


def limits(f: Function, finish: str, clamped: bool, lanes: int = 16) -> list[str]:
    """The zero point and, with `clamped`, the lowest and highest result, in lanes of i16."""
    names = ("zero", "low", "high") if clamped else ("zero",)
    return [f.splat(f.cast("trunc", FinishArguments.load(f, name, finish), "i16"), lanes) for name in names]


def rounded(f: Function, sums: list[str], scales: list[str], shifts: list[str], ends: list[str]) -> str:
    """Results in i16 of two vectors of i32 sums: scaled, shifted, rounded (halves to even), plus zero, limited.

    Four lanes of each vector in turn: of columns 0-3, 8-11, 4-7, 12-15 where they hold columns 0-7 and 8-15.
    """
    v = f.type_of(sums[0])
    lanes = width(v)
    floats, shorts = vec("float", lanes), vec("i16", 2 * lanes)
    convert, to_shorts, *_ = NAMES[lanes]
    more, tail = ([v, "i16", "i32 immarg"], f", {v} zeroinitializer, i16 -1, i32 4") if lanes == 16 else ([], "")
    f.declare(convert, v, [floats, *more])
    f.declare(to_shorts, shorts, [v, v])
    whole = []
    for total, scale, shift in zip(sums, scales, shifts, strict=True):
        value = f.add(f.mul(f.cast("sitofp", total, floats), scale), shift)
        value = f.min(value, constant(65536.0, floats), floats)  # what is below the range of i32 becomes its least
        whole.append(f.op(f"call {v} @{convert}({floats} {value}{tail})", v))
    short = f.op(f"call {shorts} @{to_shorts}({v} {whole[0]}, {v} {whole[1]})", shorts)
    short = f.intrinsic("sadd.sat", short, ends[0], ty=shorts)
    return f.min(f.max(short, ends[1]), ends[2]) if len(ends) > 1 else short


def to_bytes(f: Function, result: str, a: str, b: str) -> str:
    """Two vectors of i16 saturated to "u8" or "i8": 8 lanes of each in turn."""
    shorts = f.type_of(a)
    bytes = vec("i8", 2 * width(shorts))
    name = NAMES[width(shorts) // 2][3 if result == "i8" else 2]
    f.declare(name, bytes, [shorts, shorts])
    return f.op(f"call {bytes} @{name}({shorts} {a}, {shorts} {b})", bytes)


def packed(f: Function, result: str, shorts: list[str]) -> list[str]:
    """One or two vectors of `rounded` as vectors of 16 bytes, columns in order, saturated to "u8" or "i8"."""
    mixed = to_bytes(f, result, shorts[0], shorts[-1])
    order = [4 * q + i for q in (0, 4, 1, 5, 2, 6, 3, 7) for i in range(4)]
    both = f.shuffle(mixed, None, order)
    return [f.shuffle(both, None, list(range(16 * r, 16 * r + 16))) for r in range(len(shorts))]


def packed_in_order(f: Function, result: str, short: str) -> str:
    """16 bytes of a vector of `rounded` whose sums were columns 0-3 and 8-11, 4-7 and 12-15."""
    halves = [f.shuffle(short, None, list(range(8 * h, 8 * h + 8))) for h in range(2)]
    return to_bytes(f, result, *halves)
