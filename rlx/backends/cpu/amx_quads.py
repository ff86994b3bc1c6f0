"""Products of bytes with packed weights (see `quads`) by AMX: 16 rows, 16 columns and 64 steps of k an instruction.

A tile of rows of A lies in memory as it is, 16 fours of a panel are one of weights. Results are blocks of 32 rows and
two panels, less at the ends: the last rows of a block that is not full are those of the one before, computed again.
"""

from __future__ import annotations

from rlx.backends.cpu import amx
from rlx.backends.cpu.builder import Function
from rlx.backends.cpu.quad_results import Finish, finishing, starting, store_bytes, store_sums
from rlx.backends.cpu.quads import BLOCK, DEPTH, HEAD, WIDTH, Tile, arguments_of, dot
from rlx.records import dataclass

__all__ = ["block"]

STEP = amx.ROW_BYTES // DEPTH  # eights of k of a tile
A, B, A_REST, B_REST = 4, 5, 6, 7  # tiles; those before are of sums
V = "<16 x i32>"
PAIR = (
    "ptr a0, ptr a1, i64 lda, ptr w, i64 panel, ptr more, i64 spare, i64 octets, i64 places, ptr c0, ptr c1, i64 ldc, "
    "i64 n, i64 zero, ptr finish, i64 column"
)


def block(tile: Tile) -> Function:
    """The code of a block of C of at least 16 rows; arguments: see `quads.BLOCK`."""
    f = Function(f"rlx_quads_tiles_{tile.name}", arguments_of(BLOCK), shared=True, attrs="nounwind noinline")
    pairs = {(m, n): _pair(tile, m, n) for m in (1, 2) for n in (1, 2)}
    _configure(f)
    panel = f.add(f.mul("%octets", 128), HEAD)
    last = f.sub("%rows", amx.ROWS)

    def band(top: str, _: list[str]) -> None:
        whole = f.cmp("ge", "%rows", 2 * amx.ROWS)
        first = f.min(top, f.select(whole, f.sub(last, amx.ROWS), 0, "i64"))
        both = f.cmp("gt", f.sub("%rows", top), amx.ROWS)
        first = f.select(both, first, last)
        second = f.min(f.add(first, amx.ROWS), last)

        def panels(m: int) -> None:
            rows = [first, second]
            a = [f.offset("%a", f.mul(row, "%lda")) for row in rows]
            c = [f.offset("%c", f.mul(row, "%ldc")) for row in rows]

            def some(column: str, state: list[str]) -> list[str]:
                w, more = state
                n = f.sub("%columns", column)
                out = [f.offset(p, f.mul(column, tile.item)) for p in c]
                at = f.add("%column", f.mul(column, 4))

                def call(count: int) -> None:
                    arguments = [*a, "%lda", w, panel, more, "%spare", "%octets", "%places", *out, "%ldc", n]
                    f.call(pairs[m, count], [*arguments, "%zero", "%finish", at])

                f.if_(f.cmp("gt", n, WIDTH), lambda: call(2), lambda: call(1))
                return [f.offset(w, f.mul(panel, 2)), f.offset(more, f.mul("%spare", 2))]

            f.loop(0, "%columns", 2 * WIDTH, [("ptr", "%w"), ("ptr", "%more")], some)

        f.if_(both, lambda: panels(2), lambda: panels(1))

    f.loop(0, "%rows", 2 * amx.ROWS, [], band)
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
    size = f.cast("trunc", f.mul(rest, DEPTH), "i16")
    f.store(size, f.offset(room, 16 + 2 * A_REST))
    f.store(f.cast("trunc", f.mul(rest, DEPTH // 4), "i8"), f.offset(room, 48 + B_REST))
    amx.configure(f, room)


def _pair(tile: Tile, m: int, n: int) -> Function:
    """`m` times 16 rows of A with `n` panels: sums, and what is made of them."""
    f = Function(f"rlx_quads_tiles_{tile.name}_{m}x{n}", arguments_of(PAIR), shared=True, attrs="nounwind noinline")
    room = f.alloca("i8", amx.ROWS * amx.ROW_BYTES)
    panels = ["%w", f.offset("%w", "%panel")][:n]
    columns = ["%column", f.add("%column", 4 * WIDTH)][:n]
    a, c = ["%a0", "%a1"][:m], ["%c0", "%c1"][:m]
    zero = f.sub("%zero", 128) if tile.signed else "%zero"
    for j in range(n):
        first = f.alloca("i8", 64)
        f.store(starting(f, tile, panels[j], zero, "%finish", columns[j])[0], first, align=64)
        for i in range(m):
            amx.load(f, i * n + j, first, 0)

    def products(lines: list[str], weights: list[str], left: int, right: int) -> None:
        """Of one step of k, from side to side: each tile that is loaded serves two products but one."""
        before = (-1, -1)
        for i in range(m):
            for j in range(n) if i == 0 else reversed(range(n)):
                if before[0] != i:
                    amx.load(f, left, lines[i], "%lda")
                if before[1] != j:
                    amx.load(f, right, weights[j], amx.ROW_BYTES)
                before = (i, j)
                amx.dot(f, "tdpbssd" if tile.signed else "tdpbusd", i * n + j, left, right)

    def step(_: str, state: list[str]) -> list[str]:
        products(state[:m], state[m:], A, B)
        return [*(f.offset(p, amx.ROW_BYTES) for p in state[:m]), *(f.offset(p, 1024) for p in state[m:])]

    steps = f.div("%octets", STEP)
    starts = [*a, *(f.offset(p, HEAD) for p in panels)]
    after = f.loop(0, steps, 1, [("ptr", p) for p in starts], step)
    rest = f.cmp("ne", f.rem("%octets", STEP), 0)
    f.if_(rest, lambda: products(after[:m], after[m:], A_REST, B_REST))
    for j in range(n):
        more = f.offset("%more", "%spare") if j else "%more"
        end = _End(
            f, tile, room, more, f.load("i64", f.offset(panels[j], 64)), f.sub("%n", WIDTH) if j else "%n",
            finishing(f, tile, "%finish", columns[j]) if tile.result != "i32" else None,
        )  # fmt: skip
        for i in range(m):
            end.emit(i * n + j, a[i], f.offset(c[i], WIDTH * tile.item) if j else c[i])
    f.ret()
    return f


@dataclass(frozen=True)
class _End:
    """What is done to tiles of sums of a panel."""

    f: Function
    tile: Tile
    room: str  # for 16 rows of sums
    more: str  # further fours
    count: str  # of them
    n: str  # columns that exist, or more
    finish: Finish | None

    def emit(self, number: int, a: str, out: str) -> None:
        """Stores what is made of the tile of that number, whose rows of A are at `a`."""
        f = self.f
        if self.finish is not None:
            self.by_rows(number, a, out)
            return
        at_once = f.and_(f.cmp("ge", self.n, WIDTH), f.cmp("eq", self.count, 0), "i1")
        f.if_(at_once, lambda: amx.store(f, number, out, "%ldc"), lambda: self.by_rows(number, a, out))

    def by_rows(self, number: int, a: str, out: str) -> None:
        f = self.f
        amx.store(f, number, self.room, amx.ROW_BYTES)
        f.if_(f.cmp("ne", self.count, 0), lambda: self.further(a))

        def rows(r: str, state: list[str]) -> list[str]:
            source, target = state
            found = [f.load(V, f.offset(source, amx.ROW_BYTES * i), align=64) for i in range(4)]
            places = [target]
            for _ in range(4):
                places.append(f.offset(places[-1], "%ldc"))
            if self.finish is None:
                store_sums(f, found, places[:4], self.n)
            else:
                store_bytes(f, self.tile, found, places[:4], self.n, self.finish)
            return [f.offset(source, 4 * amx.ROW_BYTES), places[4]]

        f.loop(0, amx.ROWS, 4, [("ptr", self.room), ("ptr", out)], rows)

    def further(self, a: str) -> None:
        """Adds the products with the further fours to the sums in memory; rows of i8 are multiplied as u8."""
        f, signed = self.f, self.tile.signed
        fours = f.offset(self.more, "%places")
        offset = f.splat("-2139062144", 16, "i32")  # 128 in each byte

        def one(i: str, _: list[str]) -> None:
            at = f.mul(f.cast("zext", f.load("i32", f.gep(self.more, i, "i32")), "i64"), 4)
            w = f.load(V, f.offset(fours, f.mul(i, 64)))
            excess = dot(f, "zeroinitializer", offset, w, V) if signed else ""

            def row(r: str, _: list[str]) -> None:
                x = f.splat(f.load("i32", f.offset(f.offset(a, f.mul(r, "%lda")), at), align=1), 16)
                place = f.offset(self.room, f.mul(r, amx.ROW_BYTES))
                total = f.load(V, place, align=64)
                if signed:
                    x, total = f.xor(x, offset, V), f.sub(total, excess)
                f.store(dot(f, total, x, w, V), place, align=64)

            f.loop(0, amx.ROWS, 1, [], row)

        f.loop(0, self.count, 1, [], one)
