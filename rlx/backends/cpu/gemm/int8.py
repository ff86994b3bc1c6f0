"""The code of products of bytes with packed weights (`panels.int8`): tiles of vectors, with AVX2, VNNI or AVX-512."""

from __future__ import annotations

from functools import cache

from rlx.backends.cpu.gemm import amx_int8
from rlx.backends.cpu.gemm.int8_epilogue import finishing, starting, store_bytes, store_sums
from rlx.backends.cpu.gemm.panels.int8 import BLOCK, DEPTH, HEAD, WIDTH, Tile, dot, pair_sums
from rlx.backends.cpu.llvm import amx
from rlx.backends.cpu.llvm.builder import Function, Module, arguments_of, constant, vec
from rlx.backends.cpu.schedule.arguments import Routine

__all__ = ["block_routine"]

SHORTS, BYTES = "<16 x i16>", "<32 x i8>"
LINES = 16 * 1024  # bytes of A and C that a sweep over all panels should stay within
TILE = (
    "ptr a, i64 lda, ptr w, ptr more, i64 octets, i64 places, i64 ldc, ptr c, i64 n, i64 zero, ptr finish, "
    "i64 column, i64 tiles"
)


def _pairs(f: Function, x: str, y: str) -> str:
    """u8 times i8, neighbours added up in i16."""
    f.declare("llvm.x86.avx2.pmadd.ub.sw", SHORTS, [BYTES, BYTES])
    return f.op(f"call {SHORTS} @llvm.x86.avx2.pmadd.ub.sw({BYTES} {x}, {BYTES} {y})", SHORTS)


def _widened(f: Function, x: str) -> str:
    """Neighbours of i16 added up in i32."""
    return pair_sums(f, x, constant(1, SHORTS))


def _tile(tile: Tile, rows: int) -> Function:
    """Tiles of C of `rows` rows and a panel, `tiles` of them below each other; arguments: see TILE.

    `lda` and `ldc` in bytes, `places` the bytes that the places of further fours take, `n` the columns that exist,
    `column` the bytes of 4-byte arrays before the panel's.
    """
    f = Function(
        f"rlx_quads_{tile.name}_{rows}",
        arguments_of(TILE),
        shared=True,
        attrs="nounwind noinline",
    )
    v, halves, dots = tile.vector, tile.halves, tile.by.dots
    size = 4 * tile.by.lanes
    bytes = vec("i8", size)
    chains = 2 if dots and rows * halves <= 4 else 1  # sums under way at once for each vector of results
    double, triple = f.mul("%lda", 2), f.mul("%lda", 3)

    def four(p: str) -> str:
        value = f.cast("bitcast", f.splat(f.load("i32", p, align=1), tile.by.lanes), bytes)
        return f.xor(value, -128, bytes) if tile.signed else value

    def row_of(p: list[str], r: int) -> str:
        return p[r // 3] if r % 3 == 0 else f.offset(p[r // 3], "%lda" if r % 3 == 1 else double)

    start = f.offset("%w", HEAD)
    fours = f.offset("%more", "%places")
    count = f.load("i64", f.offset("%w", 64))
    first = starting(f, tile, "%w", "%zero", "%finish", "%column")
    finish = finishing(f, tile, "%finish", "%column") if tile.result != "i32" else None
    n = (rows - 1) // 3 + 1

    def step(_: str, state: list[str]) -> list[str]:
        p, w, acc = state[:n], state[n], list(state[n + 1 :])
        panel = [f.load(bytes, f.offset(w, size * j)) for j in range(2 * halves)]
        for r in range(rows):
            here = row_of(p, r)
            low, high = four(here), four(f.offset(here, 4))
            for j in range(halves):
                at, other = halves * r + j, halves * (rows * (chains - 1) + r) + j
                if dots:
                    acc[at] = dot(f, acc[at], low, panel[j], v)
                    acc[other] = dot(f, acc[other], high, panel[halves + j], v)
                else:
                    both = f.add(_pairs(f, low, panel[j]), _pairs(f, high, panel[halves + j]))
                    acc[at] = f.add(acc[at], _widened(f, both))
        return [*(f.offset(q, DEPTH) for q in p), f.offset(w, 128), *acc]

    def one(state: list[str]) -> list[str]:
        a, c = state
        pointers = [a]
        for _ in range((rows - 1) // 3):
            pointers.append(f.offset(pointers[-1], triple))
        begun = [*first * rows, *["zeroinitializer"] * (halves * rows * (chains - 1))]
        carried = [*(("ptr", p) for p in [*pointers, start]), *((v, x) for x in begun)]
        acc = f.loop(0, "%octets", 1, carried, step, runs=True)[n + 1 :]
        if chains == 2:
            acc = [f.add(x, y) for x, y in zip(acc[: len(acc) // 2], acc[len(acc) // 2 :], strict=True)]

        def more(i: str, state: list[str]) -> list[str]:
            at = f.mul(f.cast("zext", f.load("i32", f.gep("%more", i, "i32")), "i64"), 4)
            w = f.offset(fours, f.mul(i, 64))
            p = [f.offset(q, at) for q in pointers]
            out = list(state)
            for r in range(rows):
                value = four(row_of(p, r))
                for j in range(halves):
                    panel, total = f.load(bytes, f.offset(w, size * j)), state[halves * r + j]
                    if dots:
                        out[halves * r + j] = dot(f, total, value, panel, v)
                    else:
                        out[halves * r + j] = f.add(total, _widened(f, _pairs(f, value, panel)))
            return out

        acc = f.loop(0, count, 1, [(v, x) for x in acc], more)
        lines = [c]
        for _ in range(rows):
            lines.append(f.offset(lines[-1], "%ldc"))
        if finish is None:
            store_sums(f, acc, lines[:-1], "%n")
        else:
            store_bytes(f, tile, acc, lines[:-1], "%n", finish)
        return [f.offset(a, f.mul("%lda", rows)), lines[-1]]

    f.loop(0, "%tiles", 1, [("ptr", "%a"), ("ptr", "%c")], lambda _, state: one(state))
    f.ret()
    return f


@cache
def block_routine(tile: Tile) -> Routine:
    """The code of a block of C, compiled once a machine; arguments: see `int8_panels.BLOCK`."""
    function = _block(tile)
    return Routine(function.name, Module([function]).text())


def _block(tile: Tile) -> Function:
    arguments = arguments_of(BLOCK)
    f = Function(f"rlx_quads_block_{tile.name}", arguments, attrs="nounwind noinline")

    def tiles() -> None:
        f.call(amx_int8.block(tile), [f"%{name}" for _, name in arguments])

    if tile.by.tiles:
        f.if_(f.cmp("ge", "%rows", amx.ROWS), tiles, lambda: _sweeps(f, tile))
    else:
        _sweeps(f, tile)
    f.ret()
    return f


def _sweeps(f: Function, tile: Tile) -> None:
    """Tiles of vectors, below each other for each panel."""
    most = tile.by.lanes // 2
    counts = [most, *(range(most - 1, 0, -1) if most == 4 else (4, 2, 1))]  # rows of tiles
    tiles = {r: _tile(tile, r) for r in counts}
    step = f.add(f.mul("%octets", 128), HEAD)
    line = f.add(f.mul("%octets", DEPTH), f.mul("%columns", tile.item))
    some = f.mul(f.max(f.div(LINES, f.max(f.mul(line, most // 4), 1)), 4), most)
    some = f.min(some, 20 * most)

    def sweep(top: str, _: list[str]) -> None:
        end = f.min(f.add(top, some), "%rows")
        whole = f.div(f.sub(end, top), most)

        def panel(column: str, state: list[str]) -> list[str]:
            w, more = state
            n = f.min(f.sub("%columns", column), WIDTH)
            c = f.offset("%c", f.mul(column, tile.item))
            at = f.add("%column", f.mul(column, 4))

            def call(rows: int, row: str, count: str | int) -> None:
                a, out = f.offset("%a", f.mul(row, "%lda")), f.offset(c, f.mul(row, "%ldc"))
                arguments = [a, "%lda", w, more, "%octets", "%places", "%ldc", out, n, "%zero", "%finish", at, count]
                f.call(tiles[rows], arguments)

            call(most, top, whole)
            row = f.add(top, f.mul(whole, most))
            left = f.sub(end, row)
            if most == 4:
                f.switch(left, {r: (lambda r=r: call(r, row, 1)) for r in range(1, most)})  # type: ignore[misc]
                return [f.offset(w, step), f.offset(more, "%spare")]
            for r in counts[1:]:
                there = f.cmp("ge", left, r)
                f.if_(there, lambda r=r, row=row: call(r, row, 1))  # type: ignore[misc]
                taken = f.select(there, r, 0, "i64")
                row, left = f.add(row, taken), f.sub(left, taken)
            return [f.offset(w, step), f.offset(more, "%spare")]

        f.loop(0, "%columns", WIDTH, [("ptr", "%w"), ("ptr", "%more")], panel)

    f.loop(0, "%rows", some, [], sweep)
