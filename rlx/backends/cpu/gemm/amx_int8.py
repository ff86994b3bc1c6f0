"""Products of bytes with packed weights (`panels.int8`) by AMX: 16 rows, 16 columns and 64 steps of k an instruction.

A tile of rows of A lies in memory as it is, 16 fours of a panel are one of weights. Strips of up to four panels are
computed band by band of 16 rows, or two panels by bands of 32 where those of four would not stay in the first cache.
The last band overlaps the one before. Multiplying a band while vectors make results of the one before was slower, and
so was what came after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.backends.cpu.gemm.int8_ends import Finish, finishing, rows_of_bytes, starting
from rlx.backends.cpu.gemm.panels.int8_layout import HEAD, WIDTH, EndArguments
from rlx.backends.cpu.llvm import amx
from rlx.backends.cpu.llvm.builder import Function, arguments_of, size_of, void
from rlx.backends.cpu.llvm.x86 import add_fours
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.backends.cpu.gemm.panels.int8 import Int8

__all__ = ["block"]

STEP = amx.ROW_BYTES  # elements of k of a tile
MOST = 4  # panels of a strip
DEEP = 512  # elements of k from which on a strip has two panels: four take 32 KB then
BYTES = amx.ROWS * amx.ROW_BYTES  # of a tile
A, B, A_REST, B_REST = 4, 5, 6, 7  # tiles; those before are of sums
V = "<16 x i32>"
STRIP = "ptr a, i64 lda, ptr b, i64 stride, ptr c, i64 ldc, i64 rows, i64 n, i64 k, ptr ends, i64 panel"


def block(format: Int8, arguments: list[tuple[str, str]]) -> Function:
    """A block of C of at least 16 rows; arguments: those of `kernel.gemm_block`."""
    f = Function(f"rlx_int8_tiles_{format.name}", arguments, internal=True, attrs="nounwind noinline")
    _configure(f)
    item = size_of(format.result("i32"))

    def strips(m: int, most: int) -> None:
        def strip(column: str, _: list[str]) -> None:
            left, panel = f.sub("%columns", column), f.lshr(column, WIDTH.bit_length() - 1)
            c = f.offset("%c", f.mul(column, item))
            b = f.offset("%b", f.mul(panel, "%stride"))
            given = ["%a", "%lda", b, "%stride", c, f.mul("%ldc", item), "%rows", left, "%k", "%ends", panel]
            count = f.min(f.div(f.add(left, WIDTH - 1), WIDTH), most)
            forms = {n: _strip(format, m, n) for n in range(1, most + 1)}
            f.switch(count, {n: (lambda n=n: void(f.call(forms[n], given))) for n in forms})  # type: ignore[misc]

        f.loop(0, "%columns", most * WIDTH, [], strip)

    f.if_(f.cmp("gt", "%k", DEEP), lambda: strips(2, 2), lambda: strips(1, MOST))
    amx.release(f)
    f.ret()
    return f


def _configure(f: Function) -> None:
    """Whole tiles, but for those of what is left of k behind whole steps."""
    data = amx.configuration()
    room = f.alloca("i8", len(data))
    for i in range(0, len(data), 8):
        f.store(int.from_bytes(bytes(data[i : i + 8]), "little", signed=True), f.offset(room, i), ty="i64")
    rest = f.rem("%k", STEP)
    rest = f.select(f.cmp("eq", rest, 0), STEP, rest, "i64")
    f.store(f.cast("trunc", rest, "i16"), f.offset(room, amx.bytes_place(A_REST)))
    f.store(f.cast("trunc", f.lshr(rest, 2), "i8"), f.offset(room, amx.rows_place(B_REST)))
    amx.configure(f, room)


def _strip(format: Int8, m: int, n: int) -> Function:
    """All rows with `n` panels, by bands of `m` times 16; `ldc` in bytes."""
    f = Function(f"rlx_int8_tiles_{format.name}_{m}x{n}", arguments_of(STRIP), internal=True, attrs="nounwind noinline")
    ends = EndArguments.loaded(f, words="%ends")
    weights, columns = ["%b"], [f.add(ends.column, f.mul("%panel", 4 * WIDTH))]
    for _ in range(1, n):
        weights.append(f.offset(weights[-1], "%stride"))
        columns.append(f.add(columns[-1], 4 * WIDTH))
    point = f.sub(ends.point, 128) if format.signed else ends.point
    first = f.alloca("i8", 64 * n)
    for j in range(n):
        f.store(starting(f, format, weights[j], point, ends.bias, columns[j])[0], f.offset(first, 64 * j), align=64)
    finish = finishing(f, format, ends, columns, 32) if format.stores != "i32" else None
    if finish is None:
        mask = f.mask_below(f.sub("%n", WIDTH * (n - 1)), WIDTH, "i32")
    else:
        mask = f.mask_below("%n", 16 * n if n != 3 else 64, "i8")
    end = _End(f, format, f.alloca("i8", BYTES * m * n), n, ends, weights, finish, mask)
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
            _products(f, format, state[:m], state[m:], A, B)
            return [*(f.offset(p, amx.ROW_BYTES) for p in state[:m]), *(f.offset(p, BYTES) for p in state[m:])]

        after = f.loop(0, f.div("%k", STEP), 1, [("ptr", p) for p in [*lines, *weights]], step)
        rest = f.cmp("ne", f.rem("%k", STEP), 0)
        f.if_(rest, lambda: _products(f, format, after[:m], after[m:], A_REST, B_REST))

    def band(top: str, _: list[str]) -> None:
        compute(top)
        end.take(m)
        for i, row in enumerate(rows_of(top)):
            end.put(i, row)

    f.loop(0, "%rows", m * amx.ROWS, [], band, runs=True)
    f.ret()
    return f


def _products(f: Function, format: Int8, lines: list[str], weights: list[str], left: int, right: int) -> None:
    """Of one step of k, from side to side: each tile that is loaded serves two products but one, or all of a band."""
    n, before = len(weights), (-1, -1)
    for i in range(len(lines)):
        for j in range(n) if i == 0 else reversed(range(n)):
            if before[0] != i:
                amx.load(f, left, lines[i], "%lda")
            if before[1] != j:
                amx.load(f, right, weights[j], amx.ROW_BYTES)
            before = (i, j)
            amx.dot(f, "tdpbssd" if format.signed else "tdpbusd", i * n + j, left, right)


@dataclass(frozen=True)
class _End:
    """What is done to the sums of a band."""

    f: Function
    format: Int8
    room: str  # for them
    n: int  # panels
    ends: EndArguments
    panels: list[str]  # their first steps
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
        for j in range(self.n if self.format.rest else 0):
            self.further(j, f.offset(room, BYTES * j), row)
        out = f.offset("%c", f.mul(row, "%ldc"))
        at_once = {1: 4, 2: 2}.get(self.n, 1) if self.finish is not None else 1

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
        for place, value in zip(places, rows_of_bytes(self.f, self.format.stores, sums, finish), strict=True):
            self.f.masked_store(value, place, self.mask)

    def further(self, j: int, room: str, row: str) -> None:
        """Adds the products with the further fours of a panel to its sums; rows of i8 are multiplied as u8."""
        f, signed, ends = self.f, self.format.signed, self.ends
        more = f.offset(ends.more, f.mul(f.add("%panel", j), ends.spare))
        count = f.load("i64", f.offset(self.panels[j], 64 - HEAD))
        a, fours = f.offset("%a", f.mul(row, "%lda")), f.offset(more, ends.places)
        offset = f.splat("-2139062144", 16, "i32")  # 128 in each byte

        def one(i: str, _: list[str]) -> None:
            at = f.mul(f.cast("zext", f.load("i32", f.gep(more, i, "i32")), "i64"), 4)
            w = f.load(V, f.offset(fours, f.mul(i, 64)))
            excess = add_fours(f, "zeroinitializer", offset, w, V) if signed else ""

            def add(r: str, _: list[str]) -> None:
                x = f.splat(f.load("i32", f.offset(f.offset(a, f.mul(r, "%lda")), at), align=1), 16)
                place = f.offset(room, f.mul(r, amx.ROW_BYTES))
                total = f.load(V, place, align=64)
                if signed:
                    x, total = f.xor(x, offset, V), f.sub(total, excess)
                f.store(add_fours(f, total, x, w, V), place, align=64)

            f.loop(0, amx.ROWS, 1, [], add)

        f.loop(0, count, 1, [], one)
