"""Products of bytes with packed weights (`panels.int8`) by AMX: 16 rows, 16 columns and 64 steps of k an instruction.

A tile of rows of A lies in memory as it is, 16 fours of a panel are one of weights. Strips of up to four panels are
computed band by band of 16 rows, or two panels by bands of 32 where those of four would not stay in the first cache.
The last band overlaps the one before. Multiplying a band while vectors make results of the one before was slower, and
so was what came after it.
"""

from __future__ import annotations

from rlx.backends.cpu.gemm.int8_epilogue import Finish, finishing, limits, quantised, starting
from rlx.backends.cpu.gemm.panels.int8 import BLOCK, DEPTH, HEAD, WIDTH, Tile, dot
from rlx.backends.cpu.llvm import amx
from rlx.backends.cpu.llvm.builder import Function, arguments_of, vec, void
from rlx.records import dataclass

__all__ = ["block"]

STEP = amx.ROW_BYTES // DEPTH  # eights of k of a tile
MOST = 4  # panels of a strip
DEEP = 64  # eights of k from which on a strip has two panels: four take 32 KB then
BYTES = amx.ROWS * amx.ROW_BYTES  # of a tile
A, B, A_REST, B_REST = 4, 5, 6, 7  # tiles; those before are of sums
V = "<16 x i32>"
STRIP = (
    "ptr a, i64 lda, ptr w, i64 panel, ptr more, i64 spare, i64 octets, i64 places, ptr c, i64 ldc, i64 rows, i64 n, "
    "i64 zero, ptr finish, i64 column"
)


def block(tile: Tile) -> Function:
    """The code of a block of C of at least 16 rows; arguments: see `int8_panels.BLOCK`."""
    f = Function(f"rlx_quads_tiles_{tile.name}", arguments_of(BLOCK), shared=True, attrs="nounwind noinline")
    _configure(f)
    panel = f.add(f.mul("%octets", 128), HEAD)

    def strips(m: int, most: int) -> None:
        def strip(column: str, state: list[str]) -> list[str]:
            w, more = state
            left = f.sub("%columns", column)
            arguments = [
                "%a", "%lda", w, panel, more, "%spare", "%octets", "%places",
                f.offset("%c", f.mul(column, tile.item)), "%ldc", "%rows", left, "%zero", "%finish",
                f.add("%column", f.mul(column, 4)),
            ]  # fmt: skip
            count = f.min(f.div(f.add(left, WIDTH - 1), WIDTH), most)
            forms = {n: _strip(tile, m, n) for n in range(1, most + 1)}
            f.switch(count, {n: (lambda n=n: void(f.call(forms[n], arguments))) for n in forms})  # type: ignore[misc]
            return [f.offset(w, f.mul(panel, most)), f.offset(more, f.mul("%spare", most))]

        f.loop(0, "%columns", most * WIDTH, [("ptr", "%w"), ("ptr", "%more")], strip)

    f.if_(f.cmp("gt", "%octets", DEEP), lambda: strips(2, 2), lambda: strips(1, MOST))
    amx.release(f)
    f.ret()
    return f


def _configure(f: Function) -> None:
    """Whole tiles, but for those of what is left of k behind whole steps."""
    data = amx.configuration()
    room = f.alloca("i8", len(data))
    for i in range(0, len(data), 8):
        f.store(int.from_bytes(bytes(data[i : i + 8]), "little", signed=True), f.offset(room, i), ty="i64")
    rest = f.rem("%octets", STEP)
    rest = f.select(f.cmp("eq", rest, 0), STEP, rest, "i64")
    f.store(f.cast("trunc", f.mul(rest, DEPTH), "i16"), f.offset(room, amx.bytes_place(A_REST)))
    f.store(f.cast("trunc", f.mul(rest, DEPTH // 4), "i8"), f.offset(room, amx.rows_place(B_REST)))
    amx.configure(f, room)


def _strip(tile: Tile, m: int, n: int) -> Function:
    """All rows with `n` panels, by bands of `m` times 16."""
    f = Function(f"rlx_quads_tiles_{tile.name}_{m}x{n}", arguments_of(STRIP), shared=True, attrs="nounwind noinline")
    panels, mores, columns = ["%w"], ["%more"], ["%column"]
    for _ in range(1, n):
        panels.append(f.offset(panels[-1], "%panel"))
        mores.append(f.offset(mores[-1], "%spare"))
        columns.append(f.add(columns[-1], 4 * WIDTH))
    zero = f.sub("%zero", 128) if tile.signed else "%zero"
    first = f.alloca("i8", 64 * n)
    for j in range(n):
        f.store(starting(f, tile, panels[j], zero, "%finish", columns[j])[0], f.offset(first, 64 * j), align=64)
    weights = [f.offset(p, HEAD) for p in panels]
    finish = _finishing(f, tile, columns) if tile.result != "i32" else None
    counts = [f.load("i64", f.offset(p, 64)) for p in panels]
    if finish is None:
        mask = f.mask_below(f.sub("%n", WIDTH * (n - 1)), WIDTH, "i32")
    else:
        mask = f.mask_below("%n", WIDTH * len(finish.scales), "i8")
    end = _End(f, tile, f.alloca("i8", BYTES * m * n), n, mores, counts, finish, mask)
    last = f.sub("%rows", amx.ROWS)

    def rows_of(top: str) -> list[str]:
        if m == 1:
            return [f.min(top, last)]
        start = f.min(top, f.max(f.sub(last, amx.ROWS), 0))
        return [start, f.min(f.add(start, amx.ROWS), last)]

    def compute(top: str) -> None:
        lines = [f.offset("%a", f.mul(row, "%lda")) for row in rows_of(top)]
        for i in range(m):
            for j in range(n):
                amx.load(f, i * n + j, f.offset(first, 64 * j), 0)

        def step(_: str, state: list[str]) -> list[str]:
            _products(f, tile, state[:m], state[m:], A, B)
            return [*(f.offset(p, amx.ROW_BYTES) for p in state[:m]), *(f.offset(p, BYTES) for p in state[m:])]

        after = f.loop(0, f.div("%octets", STEP), 1, [("ptr", p) for p in [*lines, *weights]], step)
        rest = f.cmp("ne", f.rem("%octets", STEP), 0)
        f.if_(rest, lambda: _products(f, tile, after[:m], after[m:], A_REST, B_REST))

    def band(top: str, _: list[str]) -> None:
        compute(top)
        end.take(m)
        for i, row in enumerate(rows_of(top)):
            end.put(i, row)

    f.loop(0, "%rows", m * amx.ROWS, [], band, runs=True)
    f.ret()
    return f


def _products(f: Function, tile: Tile, lines: list[str], weights: list[str], left: int, right: int) -> None:
    """Of one step of k, from side to side: each tile that is loaded serves two products but one, or all of a band."""
    n, before = len(weights), (-1, -1)
    for i in range(len(lines)):
        for j in range(n) if i == 0 else reversed(range(n)):
            if before[0] != i:
                amx.load(f, left, lines[i], "%lda")
            if before[1] != j:
                amx.load(f, right, weights[j], amx.ROW_BYTES)
            before = (i, j)
            amx.dot(f, "tdpbssd" if tile.signed else "tdpbusd", i * n + j, left, right)


def _finishing(f: Function, tile: Tile, columns: list[str]) -> Finish:
    """The scales and shifts of panels, in the order of the vectors that `quantised` is given."""
    found = [finishing(f, tile, "%finish", column) for column in columns]
    found += found[-1:] if len(found) == 3 else []
    return Finish([x.scales[0] for x in found], [x.shifts[0] for x in found], limits(f, "%finish", tile.clamped, 32))


@dataclass(frozen=True)
class _End:
    """What is done to the sums of a band."""

    f: Function
    tile: Tile
    room: str  # for them
    n: int  # panels
    mores: list[str]  # their further fours
    counts: list[str]  # of those
    finish: Finish | None
    mask: str  # of the columns that exist: of the last panel for sums, else of all that are stored at once

    def take(self, m: int) -> None:
        """Moves the sums to memory."""
        for number in range(m * self.n):
            amx.store(self.f, number, self.f.offset(self.room, BYTES * number), amx.ROW_BYTES)

    def put(self, number: int, row: str) -> None:
        """Stores what is made of the `number`th 16 rows of the band, which start with `row` of A and C."""
        f = self.f
        room = f.offset(self.room, BYTES * self.n * number)
        for j in range(self.n):
            more = f.cmp("ne", self.counts[j], 0)
            f.if_(more, lambda j=j: self.further(j, f.offset(room, BYTES * j), row))  # type: ignore[misc]
        out = f.offset("%c", f.mul(row, "%ldc"))
        at_once = 4 // len(self.finish.scales) if self.finish is not None else 1

        def rows(r: str, state: list[str]) -> list[str]:
            source, target = state
            sums = [
                [f.load(V, f.offset(source, BYTES * j + amx.ROW_BYTES * i), align=64) for j in range(self.n)]
                for i in range(at_once)
            ]
            places = [target]
            for _ in range(at_once):
                places.append(f.offset(places[-1], "%ldc"))
            if self.finish is None:
                self.store_sums(sums[0], target)
            else:
                self.store_bytes(sums, places[:-1], self.finish)
            return [f.offset(source, amx.ROW_BYTES * at_once), places[-1]]

        f.loop(0, amx.ROWS, at_once, [("ptr", room), ("ptr", out)], rows)

    def store_sums(self, sums: list[str], target: str) -> None:
        f = self.f
        for j, value in enumerate(sums[:-1]):
            f.store(value, f.offset(target, 64 * j), align=4)
        last = f.offset(target, 64 * (self.n - 1))
        f.masked_store(sums[-1], last, self.mask)

    def store_bytes(self, sums: list[list[str]], places: list[str], finish: Finish) -> None:
        """Of one row of three or four panels, two of two, or four of one."""
        f = self.f
        given = [x for row in sums for x in row]
        given += given[-1:] * (4 - len(given))
        scales, shifts = (list(x) * (4 // len(x)) for x in (finish.scales, finish.shifts))
        found = quantised(f, self.tile.result, given, Finish(scales, shifts, finish.ends))
        width = 64 // len(sums)
        for i, place in enumerate(places):
            order = [4 * q + v for v in range(4 * i // len(places), 4 * (i + 1) // len(places)) for q in range(4)]
            value = f.cast("bitcast", f.shuffle(found, None, order), vec("i8", width))
            f.masked_store(value, place, self.mask)

    def further(self, j: int, room: str, row: str) -> None:
        """Adds the products with the further fours of a panel to its sums; rows of i8 are multiplied as u8."""
        f, signed, more = self.f, self.tile.signed, self.mores[j]
        a, fours = f.offset("%a", f.mul(row, "%lda")), f.offset(more, "%places")
        offset = f.splat("-2139062144", 16, "i32")  # 128 in each byte

        def one(i: str, _: list[str]) -> None:
            at = f.mul(f.cast("zext", f.load("i32", f.gep(more, i, "i32")), "i64"), 4)
            w = f.load(V, f.offset(fours, f.mul(i, 64)))
            excess = dot(f, "zeroinitializer", offset, w, V) if signed else ""

            def add(r: str, _: list[str]) -> None:
                x = f.splat(f.load("i32", f.offset(f.offset(a, f.mul(r, "%lda")), at), align=1), 16)
                place = f.offset(room, f.mul(r, amx.ROW_BYTES))
                total = f.load(V, place, align=64)
                if signed:
                    x, total = f.xor(x, offset, V), f.sub(total, excess)
                f.store(dot(f, total, x, w, V), place, align=64)

            f.loop(0, amx.ROWS, 1, [], add)

        f.loop(0, self.counts[j], 1, [], one)
