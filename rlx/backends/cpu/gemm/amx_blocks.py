"""Products of f32 with weights that are encoded in blocks, by the tile registers of AMX: see `amx_f32`.

The numbers of a block are bf16 as they are, so three products are enough, those with the three parts of A. A step of
tiles is a block: its sums leave the tiles, and are added to those of the blocks before times the scale of their column,
by vectors, while tiles compute the next one. The tiles of B are made by vectors as well, two steps before they are
read, by the first rows that need them.

What tiles can't do, infinities, nans and rows of tiny numbers, is done anew by fma as in other products.
"""

from __future__ import annotations

from rlx.backends.cpu.gemm.amx_f32 import (
    ARGUMENTS,
    FLOATS,
    PANEL,
    WORDS,
    any_nonfinite,
    begin_tiles,
    copy_square,
    routine,
    split_rows,
    sums_anew,
)
from rlx.backends.cpu.gemm.panels.block_formats import ROW, SCALE, BlockCode
from rlx.backends.cpu.llvm import amx
from rlx.backends.cpu.llvm.builder import Function, void
from rlx.backends.cpu.schedule.matmul import TILE_PART, TILE_ROWS, TILE_SPARE, TILE_STEP_BYTES

__all__ = ["block"]

LANES = 16
AHEAD = 2048  # bytes of a panel by which it is fetched before its tiles are made
BEFORE = 2  # steps by which tiles of B are made before they are read
LINE = 4 * 2 * LANES  # bytes of a row of a square of sums
SQUARE = TILE_ROWS * LINE


def block(fma: Function, code: BlockCode) -> Function:
    """A block of C, in squares of up to 32 x 32; `fma` is the routine for what has to be done anew.

    `room` is for two times the sums of a step, the sums, the tiles of two panels, and the parts of A: it fits into
    that of `schedule.matmul.tile_room`.
    """
    f = routine(f"tile_block_{code.name}", f"{ARGUMENTS}, ptr room")
    split, check, anew = split_rows(), any_nonfinite(), sums_anew(fma)
    fetch, put = copy_square("fetch"), copy_square("put")
    steps_of = {(tall, make): _steps(code, tall=tall, make=make) for tall in (True, False) for make in (True, False)}
    depth, bands, high, twice = begin_tiles(f)
    size = f.mul(f.lshr(depth, 5), TILE_STEP_BYTES)
    sums = f.offset("%room", TILE_SPARE)
    right = f.offset(sums, SQUARE)
    parts = f.offset(sums, f.shl(size, 1))

    def some_steps(k0: str, _: list[str]) -> None:
        k = f.min(depth, f.sub("%k", k0))
        steps, more, final = f.lshr(k, 5), f.cmp("gt", k0, 0), f.cmp("ge", f.add(k0, k), "%k")
        place = f.mul(f.lshr(k0, 5), code.block_bytes)
        f.call(split, [f.gep("%a", k0, "float"), "%lda", "%rows", k, parts, high])

        def columns(column: str, _: list[str]) -> None:
            width = f.min(f.sub("%columns", column), 2 * LANES)
            panel = f.offset("%b", f.mul(f.lshr(column, 4), "%stride"))
            p0 = f.offset(panel, place)
            p1 = f.offset(p0, f.select(f.cmp("gt", width, LANES), "%stride", 0))

            def band(number: str, _: list[str]) -> None:
                row = f.mul(number, twice)
                height = f.min(f.sub("%rows", row), twice)
                tall = f.cmp("gt", height, high)
                c = f.gep("%c", f.add(f.mul(row, "%ldc"), column), "float")
                a = f.offset(parts, f.mul(number, f.mul(steps, TILE_STEP_BYTES)))
                clear(f, sums)
                f.if_(more, lambda: void(f.call(fetch, [c, "%ldc", sums, height, width])))
                args = [a, right, steps, p0, p1, sums, "%room", high]
                first = f.cast("zext", f.cmp("eq", number, 0), "i64")
                case = f.add(f.shl(f.cast("zext", tall, "i64"), 1), first)
                f.switch(
                    case,
                    {
                        2 * t + m: (lambda t=t, m=m: void(f.call(steps_of[bool(t), bool(m)], args)))  # type: ignore[misc]
                        for t in (0, 1)
                        for m in (0, 1)
                    },
                )

                def is_done() -> None:
                    def again() -> None:
                        top = f.gep("%a", f.mul(row, "%lda"), "float")
                        f.call(anew, [top, "%lda", panel, "%stride", sums, LINE, height, width, "%k", "%room"])

                    f.if_(f.cmp("ne", f.call(check, [sums, LINE, height]), 0), again)

                f.if_(final, is_done)
                f.call(put, [c, "%ldc", sums, height, width])

            f.loop(0, bands, 1, [], band)

        f.loop(0, "%columns", 2 * LANES, [], columns)

    f.loop(0, "%k", depth, [], some_steps)
    amx.release(f)
    f.ret()
    return f


def _steps(code: BlockCode, *, tall: bool, make: bool) -> Function:
    """Adds to a square of `sums` what two tiles of rows (one, unless `tall`) have with some blocks of two panels.

    `a` are parts of A, `b` tiles of B, made here where `make` is set; `room` holds two times the sums of a step.
    """
    name = f"block_steps_{code.name}{'' if tall else '_low'}{'_made' if make else ''}"
    f = routine(name, "ptr a, ptr b, i64 steps, ptr p0, ptr p1, ptr sums, ptr room, i64 high")
    rows = (0, 1) if tall else (0,)
    panels = ("%p0", "%p1")

    def add(room: str, scales: list[str]) -> None:
        """Adds the sums of a step, times the scales of its columns."""

        def row(i: str, _: list[str]) -> None:
            for r in rows:
                line = f.offset("%sums", f.mul(f.add(i, f.mul("%high", r)), LINE))
                for j in (0, 1):
                    x = f.load(FLOATS, f.offset(room, f.add(f.shl(i, 6), (2 * r + j) * PANEL)))
                    p = f.offset(line, 64 * j)
                    f.store(f.fma(x, scales[j], f.load(FLOATS, p)), p)

        f.loop(0, "%high", 1, [], row)

    def scales_of(step: str) -> list[str]:
        return [code.scale(f, f.offset(p, f.mul(step, code.block_bytes)), LANES) for p in panels]

    def room_of(step: str) -> str:
        return f.offset("%room", f.mul(f.and_(step, 1), 4 * PANEL))

    def one_step(step: str, state: list[str]) -> list[str]:
        a, b, *scales = state
        for r in rows:
            for j in (0, 1):
                amx.zero(f, 2 * r + j)
        for part in (2, 1, 0):  # small ones first
            for r in rows:
                amx.load(f, 4 + r, f.offset(a, part * TILE_PART + r * PANEL), 64)
            for j in (0, 1) if part == 2 else ():
                amx.load(f, 6 + j, f.offset(b, j * PANEL), 64)
            for r in rows:
                for j in (0, 1):
                    amx.dot(f, "tdpbf16ps", 2 * r + j, 4 + r, 6 + j)
        add(room_of(f.add(step, 1)), scales)
        if make:
            coming = f.add(step, BEFORE)
            _tiles_of_b(f, code, f.min(coming, f.sub("%steps", 1)), coming)
        own = room_of(step)
        for r in rows:
            for j in (0, 1):
                amx.store(f, 2 * r + j, f.offset(own, (2 * r + j) * PANEL), 64)
        return [f.offset(a, TILE_STEP_BYTES), f.offset(b, 2 * PANEL), *scales_of(step)]

    if make:
        _tiles_of_b(f, code, 0, 0)
        _tiles_of_b(f, code, f.min(1, f.sub("%steps", 1), "i64"), 1)
    # there is nothing to add at the first step
    clear(f, f.offset("%room", 4 * PANEL))
    none = [(FLOATS, "zeroinitializer")] * 2
    scales = f.loop(0, "%steps", 1, [("ptr", "%a"), ("ptr", "%b"), *none], one_step, runs=True)[2:]
    add(room_of(f.sub("%steps", 1)), scales)
    f.ret()
    return f


def _tiles_of_b(f: Function, code: BlockCode, step: str | int, number: str | int) -> None:
    """Makes the tiles of a step of both panels, as those of step `number` of `b`."""
    for j, p in enumerate(("%p0", "%p1")):
        own = f.offset(p, f.mul(step, code.block_bytes))
        to = f.offset("%b", f.add(f.mul(number, 2 * PANEL), j * PANEL))
        for line in range(0, code.block_bytes, 64):
            # not into L1, whose buffers the lines on their way to the tiles need
            f.prefetch(f.offset(own, AHEAD + line), locality=2)
        for row in range(LANES):
            at = f.offset(own, SCALE + row * ROW)
            places = (at,) if code.apart else (at, f.offset(at, LANES * ROW))
            x, y = (f.cast("bitcast", n, WORDS) for q in places for n in code.numbers(f, q, LANES))
            f.store(f.or_(f.lshr(x, 16), y), f.offset(to, 64 * row))


def clear(f: Function, square: str) -> None:
    """Sets the sums of a square to zeros."""
    f.loop(0, SQUARE, 64, [], lambda at, _: f.store("zeroinitializer", f.offset(square, at), ty=FLOATS))
