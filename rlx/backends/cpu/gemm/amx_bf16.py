"""Products of pairs of bf16 (`panels.bf16`) by the tile registers of AMX, for any number of rows.

Rows of pairs are tiles of A where they lie, and 16 steps of a panel are one of B, so nothing is brought into another
layout: K is a whole number of such steps, the last of which ends with zeros. Squares of up to two tiles by two panels
are summed over all of K in the registers. Tiles of A and C are equally high; the last one overlaps the one before.

An element is a chain of sums over K, in an order and with roundings of the processor's own: its bits depend on K only,
its error is within the bound that `panels.bf16` states, and denormals count as zeros, in operands and results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cpu.gemm.amx_f32 import PANEL, routine, tile_shapes
from rlx.backends.cpu.llvm import amx
from rlx.backends.cpu.llvm.builder import Function, vec

__all__ = ["STEPS", "block"]

STEPS = 16  # pairs along k of a tile
COLUMNS = 16  # of a panel
AHEAD = 4096  # bytes of a panel by which it is fetched where few rows wait for it
FLOATS = vec("float", COLUMNS)


def block(arguments: Sequence[tuple[str, str]]) -> Function:
    """A block of C; arguments: those of `kernel.gemm_block`, with strides and K in pairs."""
    f = Function("rlx_block_bf16_tiles", list(arguments), attrs="nounwind noinline")
    squares = {(m, n): _square(m, n) for m in (1, 2) for n in (1, 2)}
    tiles = f.lshr(f.add("%rows", amx.ROWS - 1), 4)
    high = f.div(f.sub(f.add("%rows", tiles), 1), tiles)
    last = f.sub("%rows", high)
    amx.configure(f, f.offset(tile_shapes(f), f.shl(f.sub(high, 1), 6)))
    a_line, c_line, steps = f.shl("%lda", 2), f.shl("%ldc", 2), f.div("%k", STEPS)
    room = f.alloca("i8", 2 * PANEL)

    def bands(column: str, n: int) -> None:
        """All rows with `n` panels; one panel goes through a room, since its columns may not all be there."""
        b = f.gep("%b", f.mul(f.div(column, COLUMNS), "%stride"), "float")
        following = f.gep(b, "%stride", "float") if n == 2 else b
        top = f.gep("%c", column, "float")
        mask = f.mask_below(f.sub("%columns", column), COLUMNS)

        def band(number: str, _: list[str]) -> None:
            rows = [f.min(f.mul(f.add(number, i), high), last) for i in range(2)]
            a = [f.offset("%a", f.mul(row, a_line)) for row in rows]
            c = [f.offset(top, f.mul(row, c_line)) for row in rows]
            sums, line = (c, c_line) if n == 2 else ([room, f.offset(room, PANEL)], str(amx.ROW_BYTES))

            def of_tiles(m: int) -> Callable[[], None]:
                def run() -> None:
                    f.call(squares[m, n], [*a, a_line, b, following, steps, *sums, ("i64", line)])
                    for i in range(m if n == 1 else 0):
                        _put(f, sums[i], c[i], c_line, high, mask)

                return run

            f.if_(f.cmp("lt", f.add(number, 1), tiles), of_tiles(2), of_tiles(1))

        f.loop(0, tiles, 2, [], band)

    whole = f.and_("%columns", -2 * COLUMNS)
    f.loop(0, whole, 2 * COLUMNS, [], lambda column, _: bands(column, 2))
    f.loop(whole, "%columns", COLUMNS, [], lambda column, _: bands(column, 1))
    amx.release(f)
    f.ret()
    return f


def _square(m: int, n: int) -> Function:
    """Sums of `m` tiles of A by `n` panels; lines are in bytes."""
    f = routine(
        f"bf16_square_{m}x{n}",
        "ptr a0, ptr a1, i64 a_line, ptr b0, ptr b1, i64 steps, ptr c0, ptr c1, i64 c_line",
    )
    tiles = [(i, j) for i in range(m) for j in range(n)]
    for i, j in tiles:
        amx.zero(f, 2 * i + j)

    def step(_: str, state: list[str]) -> list[str]:
        a, b = state[:m], state[m:]
        for i, p in enumerate(a):
            amx.load(f, 4 + i, p, "%a_line")
        for j, p in enumerate(b):
            amx.load(f, 6 + j, p, amx.ROW_BYTES)
            for line in range(0, PANEL if m == 1 else 0, 64):
                f.prefetch(f.offset(p, AHEAD + line))
        for i, j in tiles:
            amx.dot(f, "tdpbf16ps", 2 * i + j, 4 + i, 6 + j)
        return [*(f.offset(p, amx.ROW_BYTES) for p in a), *(f.offset(p, PANEL) for p in b)]

    f.loop(0, "%steps", 1, [("ptr", p) for p in (*("%a0", "%a1")[:m], *("%b0", "%b1")[:n])], step)
    for i, j in tiles:
        amx.store(f, 2 * i + j, f.offset(f"%c{i}", 64 * j), "%c_line")
    f.ret()
    return f


def _put(f: Function, source: str, target: str, line: str, rows: str, mask: str) -> None:
    """Copies the columns that there are of so many rows of sums."""

    def row(i: str, _: list[str]) -> None:
        x = f.load(FLOATS, f.offset(source, f.mul(i, amx.ROW_BYTES)))
        f.masked_store(x, f.offset(target, f.mul(i, line)), mask)

    f.loop(0, rows, 1, [], row)
