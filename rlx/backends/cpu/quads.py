"""Products of 8-bit rows with packed weights, in i32: C[M, N] = A[M, K] @ W[K, N], exact for all values.

A row of A is bytes as they lie in an image. Weights are packed in panels of 16 columns, each column's elements in fours
along k: one instruction multiplies 32 pairs of bytes and adds neighbours in 16 bits, another adds those up in 32. The
first saturates, and two of its results are added up before the second, so a panel holds only weights whose sums stay
within 16 bits for every A. What that leaves out of a weight comes again, in further fours behind all panels, each
with the place along k that it belongs to: few for weights as networks have them, none for most.

A panel is, in bytes: 16 sums of its columns (i32), the number of its further fours (i64, in 64 bytes), 128 for each 8
elements of k. Behind all panels there is for each the places of its further fours (i32), and these, 64 each.

i8 rows become u8 by adding 128, which the zero point takes off again.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from enum import IntEnum
from functools import cache

from rlx.backends.cpu.builder import Function, Module, constant
from rlx.backends.cpu.jit import host
from rlx.backends.cpu.words import Routine
from rlx.ir.shape import Size, ceildiv
from rlx.records import dataclass

__all__ = [
    "DEPTH", "FINISH", "HEAD", "ROWS", "WIDTH", "Finishing", "Tile", "available", "block_routine", "pack_panel",
    "panel_bytes", "places_bytes", "spare_bytes",
]  # fmt: skip

WIDTH = 16  # columns of a panel
ROWS = 4
DEPTH = 8  # elements along k of a step
HEAD = 128
LINES = 16 * 1024  # bytes of A and C that a sweep over all panels should stay within
PAIR = 128  # what two weights of one sign may add up to: 255 * 128 fits in 16 bits
V = "<8 x i32>"
SHORTS = "<16 x i16>"
BYTES = "<32 x i8>"
F8 = "<8 x float>"
TILE = (
    "ptr a, i64 lda, ptr w, ptr more, i64 octets, i64 places, i64 ldc, ptr c, i64 n, i64 zero, ptr finish, "
    "i64 column, i64 tiles"
)
BLOCK = (
    "ptr a, i64 lda, ptr w, ptr more, i64 spare, ptr c, i64 ldc, i64 rows, i64 columns, i64 octets, i64 places, "
    "i64 zero, ptr finish, i64 column"
)


def _arguments(text: str) -> list[tuple[str, str]]:
    return [(ty, name) for ty, name in (argument.split() for argument in text.split(", "))]


class Finishing(IntEnum):
    """The words of what is done to sums, all of 8 bytes; arrays are padded to whole panels."""

    SCALE = 0  # f32 a column
    SHIFT = 1  # f32 a column, added after the scale
    BIAS = 2  # i32 a column, added to the sums; may be null
    ZERO = 3  # of the result
    LOW = 4  # limits of the result
    HIGH = 5


FINISH = len(Finishing)


@dataclass(frozen=True)
class Tile:
    """What kinds of rows (u8 or i8) and results: "i32" sums, or "u8" and "i8", scaled, shifted, rounded, saturated.

    `clamped`: to limits of their own.
    """

    signed: bool
    result: str
    clamped: bool = False

    @property
    def name(self) -> str:
        return f"{'i8' if self.signed else 'u8'}_{self.result}{'_clamped' if self.clamped else ''}"

    @property
    def item(self) -> int:
        """Bytes of a result."""
        return 4 if self.result == "i32" else 1


def available() -> bool:
    """Whether this machine has the instructions."""
    return platform.machine() in ("x86_64", "AMD64") and host().vector_bytes >= 32


def _dots() -> str:
    """The instruction that multiplies fours of bytes and adds them to 32 bits, or "" where there is none."""
    features = host().features
    if "+avxvnni," in features + ",":
        return "avx512.vpdpbusd.256"
    return "avx512.vpdpbusd.256" if "+avx512vnni," in features + "," and "+avx512vl," in features + "," else ""


def further(narrow: bool) -> int:
    """The most further fours that 8 elements of k can need: of weights within -128..127, else -255..255."""
    return 3 if narrow else 7


def _aligned(count: Size) -> Size:
    return ceildiv(count, 64) * 64


def panel_bytes(depth: Size, narrow: bool) -> Size:
    """Bytes of a panel of `depth` rows and its further fours."""
    return HEAD + ceildiv(depth, DEPTH) * 128 + spare_bytes(depth, narrow)


def spare_bytes(depth: Size, narrow: bool) -> Size:
    """Bytes that the further fours of a panel may take, with their places."""
    return places_bytes(depth, narrow) + ceildiv(depth, DEPTH) * further(narrow) * 64


def places_bytes(depth: Size, narrow: bool) -> Size:
    """Bytes of the places of further fours."""
    return _aligned(ceildiv(depth, DEPTH) * further(narrow) * 4)


def _pairs(f: Function, x: str, y: str) -> str:
    """u8 times i8, neighbours added up in i16."""
    f.declare("llvm.x86.avx2.pmadd.ub.sw", SHORTS, [BYTES, BYTES])
    return f.op(f"call {SHORTS} @llvm.x86.avx2.pmadd.ub.sw({BYTES} {x}, {BYTES} {y})", SHORTS)


def _widened(f: Function, x: str) -> str:
    """Neighbours of i16 added up in i32."""
    f.declare("llvm.x86.avx2.pmadd.wd", V, [SHORTS, SHORTS])
    return f.op(f"call {V} @llvm.x86.avx2.pmadd.wd({SHORTS} {x}, {SHORTS} {constant(1, SHORTS)})", V)


def _dot(f: Function, total: str, x: str, y: str) -> str:
    name = f"llvm.x86.{_dots()}"
    f.declare(name, V, [V, V, V])
    y = f.cast("bitcast", y, V)
    return f.op(f"call {V} @{name}({V} {total}, {V} {f.cast('bitcast', x, V)}, {V} {y})", V)


def _tile(tile: Tile, rows: int) -> Function:
    """Tiles of C of `rows` rows and a panel, `tiles` of them below each other; arguments: see TILE.

    `lda` and `ldc` in bytes, `places` the bytes that the places of further fours take, `n` the columns that exist,
    `column` the bytes of 4-byte arrays before the panel's.
    """
    f = Function(
        f"rlx_quads_{tile.name}_{rows}",
        _arguments(TILE),
        shared=True,
        attrs="nounwind noinline",
    )
    double, triple = f.mul("%lda", 2), f.mul("%lda", 3)

    def four(p: str) -> str:
        value = f.cast("bitcast", f.splat(f.load("i32", p, align=1), 8), BYTES)
        return f.xor(value, -128, BYTES) if tile.signed else value

    def row_of(p: list[str], r: int) -> str:
        return p[r // 3] if r % 3 == 0 else f.offset(p[r // 3], "%lda" if r % 3 == 1 else double)

    start = f.offset("%w", HEAD)
    fours = f.offset("%more", "%places")
    count = f.load("i64", f.offset("%w", 64))
    first = _start(f, tile)
    finish = _finish(f, tile) if tile.result != "i32" else ()
    n = (rows - 1) // 3 + 1

    def step(_: str, state: list[str]) -> list[str]:
        p, w, acc = state[:n], state[n], list(state[n + 1 :])
        panel = [f.load(BYTES, f.offset(w, 32 * j)) for j in range(4)]
        for r in range(rows):
            here = row_of(p, r)
            low, high = four(here), four(f.offset(here, 4))
            for j in range(2):
                total = acc[2 * r + j]
                if _dots():
                    acc[2 * r + j] = _dot(f, _dot(f, total, low, panel[j]), high, panel[2 + j])
                else:
                    both = f.add(_pairs(f, low, panel[j]), _pairs(f, high, panel[2 + j]))
                    acc[2 * r + j] = f.add(total, _widened(f, both))
        return [*(f.offset(q, DEPTH) for q in p), f.offset(w, 128), *acc]

    def one(state: list[str]) -> list[str]:
        a, c = state
        pointers = [a]
        for _ in range((rows - 1) // 3):
            pointers.append(f.offset(pointers[-1], triple))
        carried: list[tuple[str, str]] = [("ptr", p) for p in [*pointers, start]]
        acc = f.loop(0, "%octets", 1, [*carried, *[(V, x) for _ in range(rows) for x in first]], step, runs=True)[
            n + 1 :
        ]

        def more(i: str, state: list[str]) -> list[str]:
            at = f.mul(f.cast("zext", f.load("i32", f.gep("%more", i, "i32")), "i64"), 4)
            w = f.offset(fours, f.mul(i, 64))
            p = [f.offset(q, at) for q in pointers]
            out = list(state)
            for r in range(rows):
                value = four(row_of(p, r))
                for j in range(2):
                    panel = f.load(BYTES, f.offset(w, 32 * j))
                    out[2 * r + j] = f.add(state[2 * r + j], _widened(f, _pairs(f, value, panel)))
            return out

        acc = f.loop(0, count, 1, [(V, x) for x in acc], more)
        lines = [c]
        for _ in range(rows):
            lines.append(f.offset(lines[-1], "%ldc"))
        if tile.result == "i32":
            _store_sums(f, acc, lines[:-1])
        else:
            _store_bytes(f, tile, acc, lines[:-1], *finish)
        return [f.offset(a, f.mul("%lda", rows)), lines[-1]]

    f.loop(0, "%tiles", 1, [("ptr", "%a"), ("ptr", "%c")], lambda _, state: one(state))
    f.ret()
    return f


def _start(f: Function, tile: Tile) -> list[str]:
    """What sums start with: what the zero point takes off, and the bias."""
    zero = f.splat(f.sub(0, f.cast("trunc", "%zero", "i32")), 8)
    first = [f.mul(f.load(V, f.offset("%w", 32 * j)), zero) for j in range(2)]
    if tile.result == "i32":
        return first
    bias = f.load("ptr", f.gep("%finish", int(Finishing.BIAS), "i64"))
    at = f.offset(bias, "%column")
    return f.if_(
        f.cmp("ne", bias, "null"),
        lambda: [f.add(x, f.load(V, f.offset(at, 32 * j))) for j, x in enumerate(first)],
        lambda: first,
    )


def _store_sums(f: Function, acc: list[str], c: list[str]) -> None:
    def full() -> None:
        for r, p in enumerate(c):
            for j in range(2):
                f.store(acc[2 * r + j], f.offset(p, 32 * j), align=4)

    def part() -> None:
        masks = [f.mask_below(f.sub("%n", 8 * j), 8, "i32") for j in range(2)]
        for r, p in enumerate(c):
            for j in range(2):
                f.masked_store(acc[2 * r + j], f.offset(p, 32 * j), masks[j])

    f.if_(f.cmp("ge", "%n", WIDTH), full, part)


def _finish(f: Function, tile: Tile) -> tuple[list[str], list[str], list[str]]:
    """The scales, shifts and limits of a panel."""
    arrays = [
        f.offset(f.load("ptr", f.gep("%finish", int(word), "i64")), "%column")
        for word in (Finishing.SCALE, Finishing.SHIFT)
    ]
    scales, shifts = ([f.load(F8, f.offset(p, 32 * j), align=4) for j in range(2)] for p in arrays)
    return scales, shifts, limits(f, "%finish", tile.clamped)


def _store_bytes(
    f: Function, tile: Tile, acc: list[str], c: list[str], scales: list[str], shifts: list[str], ends: list[str]
) -> None:
    copy = f.alloca("i8", 16 * len(c))
    shorts = [rounded(f, acc[2 * r : 2 * r + 2], scales, shifts, ends) for r in range(len(c))]
    results: list[str] = []
    for r in range(0, len(c), 2):
        results += packed(f, tile.result, shorts[r : r + 2])

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
            f.loop(0, "%n", 1, [], lambda i, _: f.store(f.load("i8", f.offset(source, i)), f.offset(target, i)))

        f.loop(0, len(c), 1, [], row)

    def less() -> None:
        f.if_(f.cmp("eq", "%n", 8), half, part)

    f.if_(f.cmp("ge", "%n", WIDTH), full, less)


def limits(f: Function, finish: str, clamped: bool) -> list[str]:
    """The zero point and, with `clamped`, the lowest and highest result, in 16 lanes of i16."""
    words = (Finishing.ZERO, Finishing.LOW, Finishing.HIGH) if clamped else (Finishing.ZERO,)
    return [f.splat(f.cast("trunc", f.load("i64", f.gep(finish, int(i), "i64")), "i16"), 16) for i in words]


def rounded(f: Function, sums: list[str], scales: list[str], shifts: list[str], ends: list[str]) -> str:
    """16 results in i16 of two vectors of i32 sums: scaled, shifted, rounded (halves to even), plus zero, limited.

    They are those of columns 0-3, 8-11, 4-7, 12-15 where the vectors hold columns 0-7 and 8-15.
    """
    f.declare("llvm.x86.avx.cvt.ps2dq.256", V, [F8])
    f.declare("llvm.x86.avx2.packssdw", SHORTS, [V, V])
    whole = []
    for total, scale, shift in zip(sums, scales, shifts, strict=True):
        value = f.add(f.mul(f.cast("sitofp", total, F8), scale), shift)
        value = f.min(value, constant(65536.0, F8), F8)  # what is below the range of i32 becomes its least number
        whole.append(f.op(f"call {V} @llvm.x86.avx.cvt.ps2dq.256({F8} {value})", V))
    short = f.op(f"call {SHORTS} @llvm.x86.avx2.packssdw({V} {whole[0]}, {V} {whole[1]})", SHORTS)
    short = f.intrinsic("sadd.sat", short, ends[0], ty=SHORTS)
    return f.min(f.max(short, ends[1]), ends[2]) if len(ends) > 1 else short


def packed(f: Function, result: str, shorts: list[str]) -> list[str]:
    """One or two vectors of `rounded` as vectors of 16 bytes, columns in order, saturated to "u8" or "i8"."""
    name = "llvm.x86.avx2.packuswb" if result == "u8" else "llvm.x86.avx2.packsswb"
    f.declare(name, BYTES, [SHORTS, SHORTS])
    mixed = f.op(f"call {BYTES} @{name}({SHORTS} {shorts[0]}, {SHORTS} {shorts[-1]})", BYTES)
    order = [4 * q + i for q in (0, 4, 1, 5, 2, 6, 3, 7) for i in range(4)]
    both = f.shuffle(mixed, None, order)
    return [f.shuffle(both, None, list(range(16 * r, 16 * r + 16))) for r in range(len(shorts))]


def packed_in_order(f: Function, result: str, short: str) -> str:
    """16 bytes of a vector of `rounded` whose sums were columns 0-3 and 8-11, 4-7 and 12-15."""
    halves = [f.shuffle(short, None, list(range(8 * h, 8 * h + 8))) for h in range(2)]
    name = "llvm.x86.sse2.packuswb.128" if result == "u8" else "llvm.x86.sse2.packsswb.128"
    f.declare(name, "<16 x i8>", ["<8 x i16>", "<8 x i16>"])
    return f.op(f"call <16 x i8> @{name}(<8 x i16> {halves[0]}, <8 x i16> {halves[1]})", "<16 x i8>")


@cache
def block_routine(tile: Tile) -> Routine:
    """The code of a block of C, compiled once a machine.

    Arguments: see BLOCK. `w` is at the first panel, `more` at its further fours, which take `spare` bytes a panel; the
    others: see `_tile`.
    """
    function = _block(tile)
    return Routine(function.name, Module([function]).text())


def _block(tile: Tile) -> Function:
    f = Function(
        f"rlx_quads_block_{tile.name}",
        _arguments(BLOCK),
        attrs="nounwind noinline",
    )
    tiles = {r: _tile(tile, r) for r in range(1, ROWS + 1)}
    step = f.add(f.mul("%octets", 128), HEAD)
    line = f.add(f.mul("%octets", DEPTH), f.mul("%columns", tile.item))
    some = f.mul(f.max(f.div(LINES, f.max(line, 1)), 4), ROWS)
    some = f.min(some, 20 * ROWS)

    def sweep(top: str, _: list[str]) -> None:
        end = f.min(f.add(top, some), "%rows")
        whole = f.div(f.sub(end, top), ROWS)

        def panel(column: str, state: list[str]) -> list[str]:
            w, more = state
            n = f.min(f.sub("%columns", column), WIDTH)
            c = f.offset("%c", f.mul(column, tile.item))
            at = f.add("%column", f.mul(column, 4))

            def call(rows: int, row: str, count: str | int) -> None:
                a, out = f.offset("%a", f.mul(row, "%lda")), f.offset(c, f.mul(row, "%ldc"))
                arguments = [a, "%lda", w, more, "%octets", "%places", "%ldc", out, n, "%zero", "%finish", at, count]
                f.call(tiles[rows], arguments)

            call(ROWS, top, whole)
            row = f.add(top, f.mul(whole, ROWS))
            f.switch(f.sub(end, row), {r: (lambda r=r: call(r, row, 1)) for r in range(1, ROWS)})  # type: ignore[misc]
            return [f.offset(w, step), f.offset(more, "%spare")]

        f.loop(0, "%columns", WIDTH, [("ptr", "%w"), ("ptr", "%more")], panel)

    f.loop(0, "%rows", some, [], sweep)
    f.ret()
    return f


def pack_panel(f: Function, out: str, place: str, octets: str, places: str, element: Callable[[str, str], str]) -> None:
    """Emits the packing of one panel at `out`, its further fours at `place`; `element(k, column)` gives an i32."""
    sums, rest = f.alloca("i32", WIDTH), f.alloca("i32", DEPTH * WIDTH)
    main = f.offset(out, HEAD)
    fours = f.offset(place, places)

    def at(e: str | int, lane: str) -> str:
        return f.gep(rest, f.add(f.mul(e, WIDTH, "i64"), lane, "i64"), "i32")

    def take(four: int | str, pair: int, lane: str, target: str, values: list[str]) -> None:
        """Moves two values from the rest to the panel."""
        for j, value in enumerate(values):
            f.store(f.cast("trunc", value, "i8"), f.offset(target, f.add(f.mul(lane, 4), 2 * pair + j)))
            p = at(f.add(f.mul(four, 4, "i64"), 2 * pair + j), lane)
            f.store(f.sub(f.load("i32", p), value), p)

    def fits(values: list[str]) -> str:
        """Whether their products with bytes add up within 16 bits."""
        good = "true"
        total = ["0", "0"]
        for v in values:
            total = [f.add(total[0], f.max(v, 0, "i32"), "i32"), f.add(total[1], f.min(v, 0, "i32"), "i32")]
            good = f.and_(good, f.cmp("le", v, 127, "i32"), "i1")
        good = f.and_(good, f.cmp("le", total[0], PAIR, "i32"), "i1")
        return f.and_(good, f.cmp("ge", total[1], -PAIR, "i32"), "i1")

    def part_of(values: list[str], whole: str) -> list[str]:
        half = PAIR // 2
        return [f.select(whole, v, f.max(f.min(v, half, "i32"), -half, "i32"), "i32") for v in values]

    def loop(count: str | int, body: Callable[[str], None]) -> None:
        f.loop(0, count, 1, [], lambda i, _: body(i))

    def octet(o: str, count: str) -> str:
        def fill(e: str) -> None:
            def one(lane: str) -> None:
                value = element(f.add(f.mul(o, DEPTH), e), lane)
                f.store(value, at(e, lane), ty="i32")
                total = f.gep(sums, lane, "i32")
                f.store(f.add(f.load("i32", total), value, "i32"), total)

            loop(WIDTH, one)

        def plain(lane: str) -> None:
            for pair in range(2):
                values = [f.load("i32", at(e, lane)) for e in (2 * pair, 2 * pair + 1, 4 + 2 * pair, 5 + 2 * pair)]
                all_fit, two_fit = fits(values), fits(values[:2])
                target = f.offset(main, f.mul(o, 128))
                take(0, pair, lane, target, part_of(values[:2], two_fit))
                take(1, pair, lane, f.offset(target, 64), [f.select(all_fit, v, 0, "i32") for v in values[2:]])

        loop(DEPTH, fill)
        loop(WIDTH, plain)
        for four in range(2):

            def any_left(_: list[str], four: int = four) -> str:
                def more(i: str, state: list[str]) -> list[str]:
                    return [f.or_(state[0], f.load("i32", f.gep(rest, f.add(i, four * 4 * WIDTH), "i32")))]

                return f.cmp("ne", f.loop(0, 4 * WIDTH, 1, [("i32", 0)], more)[0], 0)

            def again(state: list[str], four: int = four) -> list[str]:
                number = state[0]
                where = f.cast("trunc", f.add(f.mul(o, 2), four), "i32")
                f.store(where, f.gep(place, number, "i32"))
                target = f.offset(fours, f.mul(number, 64))

                def one(lane: str) -> None:
                    for pair in range(2):
                        values = [f.load("i32", at(4 * four + 2 * pair + j, lane)) for j in range(2)]
                        take(four, pair, lane, target, part_of(values, fits(values)))

                loop(WIDTH, one)
                return [f.add(number, 1)]

            count = f.while_([("i64", count)], any_left, again)[0]
        return count

    loop(WIDTH, lambda lane: f.store(0, f.gep(sums, lane, "i32"), ty="i32"))
    count = f.loop(0, octets, 1, [("i64", 0)], lambda o, state: [octet(o, state[0])])[0]
    f.store(count, f.offset(out, 64))
    loop(WIDTH, lambda lane: f.store(f.load("i32", f.gep(sums, lane, "i32")), f.gep(out, lane, "i32")))
