"""Matrix product kernels: C[M, N] = A[M, K] @ B[K, N], batched, with an epilogue run on each block while in cache.

B is packed in panels of 64 bytes' width (16 columns of f32, 8 of f64), each laid out [K][width] and padded with zeros;
panels follow one another, so the layout is [ceil(N / width)][K][width] for one row and for many alike. A and C are read
and written in place with any row stride; nothing outside them is touched.

Every element of C is a chain of fma over k within a block of `k_block(K, most)` steps; blocks are added up in order.
That order depends on K only, so the bits of a row depend neither on M, nor on chunks, threads or tile heights. The same
is true of products by tile registers, in another order; `schedule.matmul` chooses by M, N and K.

What differs from format to format of panels is asked of the format: how elements are read, how they are multiplied and
added up, and what sums begin with and become (`PanelFormat.ends`). Where sums are exact, as of bytes in i32, K is one
block. In a product of pairs an element of A or B is a pair of i16, neighbours along k, and an element of C the i32 sum
of the products of both: one instruction on x86, exact for all values (the usual one for bytes saturates).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from rlx.backends.cpu.gemm import amx_f32, amx_f32_rows
from rlx.backends.cpu.gemm.accumulators import Fetch, Matrix, Panels
from rlx.backends.cpu.gemm.chunk import Chunk, Product, ProductArguments, chunk_of, row_parts
from rlx.backends.cpu.gemm.tile import HALF, OPERANDS, Tile
from rlx.backends.cpu.llvm.builder import Function, Module, Operand, Typed, size_of
from rlx.backends.cpu.schedule.arguments import Routine
from rlx.backends.cpu.schedule.matmul import COPY_PAD
from rlx.records import dataclass, replace

__all__ = [
    "BLOCK_ARGUMENTS", "Block", "block_routine", "block_steps", "gemm_block", "gemm_kernel",
    "kernel_function", "micro_kernel",
]  # fmt: skip

FEW_ROWS = 8  # that read panels from end to end, at most
AHEAD = 6000  # bytes: how far ahead they are then prefetched, of all that are read at a time
BLOCK_ARGUMENTS = [*OPERANDS, *(("i64", i) for i in ("rows", "columns", "k", "most")), ("ptr", "copy")]


@dataclass(frozen=True)
class Block:
    """What an epilogue gets, as SSA values: the block is that of chunk `at`.

    `c` is the address of its first element, `ldc` its row stride in elements.
    """

    at: Chunk
    c: str
    ldc: str


Epilogue = Callable[[Function, Block], None]
BatchOffsets = Callable[[Function, str], tuple[str, str, str]]


def kernel_function(name: str) -> Function:
    """A function with the signature of every kernel of the phase table."""
    return Function(name, [("ptr", "words"), ("i64", "chunk"), ("ptr", "ctx"), ("i64", "worker")])


@functools.cache
def block_routine(tile: Tile) -> Routine:
    """The code of `gemm_block`, compiled once a machine; kernels call it through a word that holds its address.

    Where there are tile registers, products of f32 with a `most` of 0 are computed with them: see `amx_f32`.
    """
    found = tile.format.block_routine(tile)
    if found is not None:
        return found
    block = gemm_block(tile)
    if tile.target.multiplies_by_tiles(tile.dtype) and tile.lanes == tile.width:
        few = amx_f32_rows.block(block, tile.format)
        block = amx_f32.with_tiles(block, amx_f32.block(block, tile.format), few)
    return Routine(block.name, Module([block]).text())


def micro_kernel(tile: Tile, rows: int, panels: int, *, half: bool = False, streams: bool = False) -> Function:
    """Tiles of C one below another: rows x panels panels each, over `k` steps; with `half`, the first half of a panel.

    `(ptr a, i64 lda, ptr b, i64 stride, ptr c, i64 ldc, i64 k, i64 n, i64 add, ptr next, ptr later, i64 count)`:
    `stride` is from panel to panel, `n` the columns of C that exist, `add` whether C is added to or set, `next` and
    `later` two panels to prefetch, `count` >= 1 the tiles. Then come the arguments of the format and, if it has any,
    the number of the first panel. With `streams` all its panels are prefetched, from `next` on.
    """
    per_panel = tile.width // tile.lanes
    vectors = per_panel // 2 if half else per_panel * panels
    arguments = [
        *OPERANDS,
        *(("i64", i) for i in ("k", "n", "add")),
        ("ptr", "next"),
        ("ptr", "later"),
        ("i64", "count"),
    ]
    f = Function(
        f"rlx_tile_{tile.name}_{rows}x{'half' if half else panels}{'_streams' if streams else ''}",
        [*arguments, *_of_format(tile, ("i64", "panel"))],
        shared=True,
        attrs="nounwind noinline",
    )
    unroll = tile.unroll_of(rows, vectors)
    matrix = Matrix.of(f, tile, "%a", "%lda", "%k", unroll)
    line = f.mul("%ldc", size_of(tile.c_scalar))
    fetched = f.mul(f.and_("%k", -unroll), tile.fetched)
    b = Panels.of(f, tile, "%b", "%stride", vectors)
    ends = tile.format.ends(f, tile, rows, vectors)
    stride = f.mul("%stride", size_of(tile.b_scalar)) if streams else ""

    def one_tile(number: str, at: list[str]) -> list[str]:
        a, c, fetch = at
        c_rows = [c]
        for _ in range(rows - 1):
            c_rows.append(f.offset(c_rows[-1], line))
        for row in c_rows:
            f.prefetch(row, write=True)
        here = replace(matrix, a=a)
        coming = Fetch(fetch, 3, panels, stride, tile.step_bytes) if streams else Fetch(fetch)
        sums = here.sums(f, tile, 0, rows, b, coming, ends.first() if ends else None)
        if ends:
            ends.finish(sums, [here.at(f, tile, row) for row in range(rows)], c_rows)
        else:
            sums.put(c_rows, "%n", f.cmp("ne", "%add", 0))
        below = f.offset(a, f.mul(matrix.step, rows))
        # the panels to come, and once they are there the next rows of A
        past = f.add(number, 1)
        on = f.select(f.cmp("eq", past, tile.fetches), "%later", f.offset(fetch, fetched), "ptr")
        on = f.select(f.cmp("lt", past, 2 * tile.fetches), on, below, "ptr")
        return [below, f.offset(c, f.mul(line, rows)), on]

    f.loop(0, "%count", 1, [("ptr", "%a"), ("ptr", "%c"), ("ptr", "%next")], one_tile, runs=True)
    f.ret()
    return f


def _of_format(tile: Tile, *more: tuple[str, str]) -> list[tuple[str, str]]:
    """The arguments that the format of a tile adds; and these, if it adds any."""
    return [*tile.format.arguments, *(more if tile.format.arguments else ())]


def block_steps(f: Function) -> str:
    """The steps of a block of k, from the arguments `k` and `most`: as `schedule.matmul.k_block` has it."""
    blocks = f.max(f.div(f.sub(f.add("%k", "%most"), 1), "%most"), 1)
    block = f.div(f.sub(f.add("%k", blocks), 1), blocks)
    return f.max(f.and_(f.add(block, 7), -8), 8)


def gemm_block(tile: Tile, *, internal: bool = False, adds: bool = False) -> Function:
    """A block of C over all of K.

    `(ptr a, i64 lda, ptr b, i64 stride, ptr c, i64 ldc, i64 rows, i64 columns, i64 k, i64 most, ptr copy)`: a is at
    the first row, b at the first panel (`stride` elements from panel to panel), `most` limits the steps of a block of
    k, `copy` is null or room for rows * (k_block(k, most) + 16) elements. Then come the arguments of the format.
    `internal`: for the caller's module alone. `adds`: there is a last argument, whether C is added to or set.
    """
    width, a_ty, c_ty = tile.width, tile.a_scalar, tile.c_scalar
    f = Function(
        f"rlx_block_{tile.name}_{tile.rows}x{tile.panels}",
        [*BLOCK_ARGUMENTS, *_of_format(tile), *([("i64", "add")] if adds else [])],
        internal=internal,
        attrs="nounwind noinline",
    )
    kernels: dict[tuple[int, int, bool], Function] = {}

    def kernel(rows: int, panels: int, streams: bool = False) -> Function:
        if (rows, panels, streams) not in kernels:
            made = micro_kernel(tile, rows, max(panels, 1), half=panels == HALF, streams=streams)
            kernels[rows, panels, streams] = made
        return kernels[rows, panels, streams]

    block = f.max("%k", 8) if tile.format.turn else block_steps(f)
    copies = a_ty == tile.scalar
    copied = f.cmp("ne", "%copy", "null") if copies else "false"

    def added(k0: str) -> str:
        """Whether the block of k from a step on is added to C."""
        later = f.cast("zext", f.cmp("gt", k0, 0), "i64")
        return f.or_(later, "%add") if adds else later

    def place(panel: str, step: str | int) -> str:
        """The address of a step of k in a panel."""
        return f.gep("%b", f.add(f.mul(panel, "%stride"), f.mul(step, width)), tile.b_scalar)

    def besides(panel: str) -> list[Operand]:
        """What tiles of the format are given besides, from this panel on."""
        return [*(f"%{name}" for _, name in tile.format.arguments), *([panel] if tile.format.arguments else [])]

    def panel_of(column: str) -> str:
        return f.lshr(column, width.bit_length() - 1)

    def few_rows(rows: int) -> None:
        """All rows at once: several panels a tile, each read from end to end, then those left over one by one."""
        panels = tile.panels_for(rows)
        group = panels * width
        grouped = f.mul(f.div(f.add("%columns", width - 1), group), group)

        def turn(count: int) -> Callable[[str, list[str]], None]:
            def body(column: str, _: list[str]) -> None:
                n = f.min(f.sub("%columns", column), count * width)
                c, panel = f.gep("%c", column, c_ty), panel_of(column)

                def k_step(k0: str, _: list[str]) -> None:
                    k, more = f.min(block, f.sub("%k", k0)), added(k0)
                    a, b = f.gep("%a", k0, a_ty), place(panel, k0)
                    # from the last block of the panels on, those to come
                    last = f.cmp("ge", f.add(k0, block), "%k")
                    beyond = f.select(last, f.mul("%stride", (count - 1) * size_of(tile.b_scalar)), 0, "i64")
                    ahead = f.offset(b, f.add(beyond, AHEAD // count))
                    given: list[Typed] = [a, "%lda", b, "%stride", c, "%ldc", k, n, more, ahead, ahead, ("i64", 1)]
                    f.call(kernel(rows, count, True), [*given, *besides(panel)])

                f.loop(0, f.max("%k", 1), block, [], k_step)

            return body

        f.loop(0, grouped, group, [], turn(panels))
        if panels > 1:
            f.loop(grouped, "%columns", width, [], turn(1))

    def k_step(k0: str, _: list[str]) -> None:
        k = f.min(block, f.sub("%k", k0))
        more = added(k0)
        final = f.cmp("ge", f.add(k0, block), "%k")
        source = f.gep("%a", k0, a_ty)
        copy_stride = f.add(block, COPY_PAD)
        a, lda = source, "%lda"
        if copies:
            f.if_(copied, lambda: copy_rows(source, k, copy_stride))
            a, lda = f.select(copied, "%copy", source), f.select(copied, copy_stride, "%lda")

        def call(
            shape: tuple[int, int], row: str | int, column: str, n: Typed, ahead: tuple[str, str], count: Typed
        ) -> None:
            top, c = f.gep(a, f.mul(row, lda), a_ty), f.gep("%c", f.add(f.mul(row, "%ldc"), column), c_ty)
            panel = panel_of(column)
            given: list[Typed] = [top, lda, place(panel, k0), "%stride", c, "%ldc", k, n, more, *ahead, count]
            f.call(kernel(*shape), [*given, *besides(panel)])

        def sweep(count: int) -> Callable[[str, list[str]], None]:
            """One panel group for all rows: full tiles, the last two evened out so that none is very short."""

            def body(column: str, _: list[str]) -> None:
                n = f.min(f.sub("%columns", column), count * width)
                last = f.cmp("ge", f.add(column, count * width), "%columns")
                if count == 1 and tile.half_rows:
                    narrow = f.cmp("le", n, width // 2)
                    f.if_(
                        narrow,
                        lambda: rows_of(HALF, column, n, last),
                        lambda: rows_of(1, column, n, last),
                    )
                else:
                    rows_of(count, column, n, last)

            return body

        def rows_of(panels: int, column: str, n: str, last: str) -> None:
            heights = tile.heights(panels)
            height = heights[-1]
            # after the last panels come the first ones of the next block of k
            start = f.select(last, f.add(k0, block), k0)
            at = f.select(last, 0, f.add(panel_of(column), max(panels, 1)))
            coming = [place(f.add(at, p), start) for p in range(min(max(panels, 1), tile.panels))]
            over = f.and_(last, final)

            each = f.mul(f.and_(k, -tile.unroll), tile.fetched)

            def ahead(row: str | int, tiles: str | int) -> tuple[str, str]:
                """What is to be prefetched after so many tiles: the panels to come, else the rows of A after `row`."""
                below = f.gep(a, f.mul(row, lda), a_ty)
                second = f.cmp("ge", tiles, tile.fetches, "i64")
                panel = f.select(second, coming[-1], coming[0], "ptr")
                place = f.offset(panel, f.mul(f.and_(tiles, tile.fetches - 1, "i64"), each))
                there = f.cmp("ge", tiles, len(coming) * tile.fetches, "i64")
                return f.select(f.or_(over, there), below, place, "ptr"), f.select(over, below, coming[-1], "ptr")

            rest = f.rem("%rows", height)
            # the last two tiles are evened out
            whole = f.max(f.sub(f.div("%rows", height), f.cast("zext", f.cmp("ne", rest, 0), "i64")), 0)

            def tiles() -> None:
                call((height, panels), 0, column, n, ahead(0, 0), whole)

            f.if_(f.cmp("gt", whole, 0), tiles)

            def rows_left(state: list[str]) -> str:
                return f.cmp("lt", state[0], "%rows")

            def tile_rows(state: list[str]) -> list[str]:
                row, done = state
                left = f.sub("%rows", row)
                even = f.and_(f.cmp("gt", left, height), f.cmp("lt", left, 2 * height))
                take = f.select(even, f.lshr(f.add(left, 1), 1), f.min(left, height))
                if len(heights) < height:
                    take = functools.reduce(lambda x, h: f.select(f.cmp("ge", take, h), h, x, "i64"), heights[1:], "1")
                fetch = ahead(f.add(row, take), done)
                f.switch(
                    take,
                    {
                        r: (lambda r=r: call((r, panels), row, column, n, fetch, 1))  # type: ignore[misc]
                        for r in heights
                    },
                )
                return [f.add(row, take), f.add(done, 1)]

            f.while_([("i64", f.mul(whole, height)), ("i64", whole)], rows_left, tile_rows)

        group = tile.panels * width
        grouped = f.mul(f.div(f.add("%columns", width - 1), group), group)
        pairs = grouped
        if tile.triple_rows:  # three panels rather than two and one by itself, which two tiles couldn't prefetch
            odd = f.and_(f.cmp("lt", grouped, "%columns"), f.cmp("gt", grouped, 0))
            odd = f.and_(odd, f.cmp("gt", "%rows", 2 * tile.triple_rows))
            pairs = f.sub(grouped, f.select(odd, group, 0))
            grouped = f.select(odd, "%columns", grouped)
        f.loop(0, pairs, group, [], sweep(tile.panels))
        if tile.triple_rows:
            f.if_(odd, lambda: sweep(3)(pairs, []))
        if tile.panels > 1:
            f.loop(grouped, "%columns", width, [], sweep(1))

    def copy_rows(source: str, k: str, copy_stride: str) -> None:
        ty = tile.scalar

        def row(i: str, _: list[str]) -> None:
            p = f.gep(source, f.mul(i, "%lda"), ty)
            out = f.gep("%copy", f.mul(i, copy_stride), ty)
            whole = f.and_(k, -tile.lanes)

            def vectors(j: str, _: list[str]) -> None:
                f.store(f.load(tile.vector, f.gep(p, j, ty)), f.gep(out, j, ty))

            def scalars(j: str, _: list[str]) -> None:
                f.store(f.load(ty, f.gep(p, j, ty)), f.gep(out, j, ty))

            f.loop(0, whole, tile.lanes, [], vectors)
            f.loop(whole, k, 1, [], scalars)

        f.loop(0, "%rows", 1, [], row)

    def many_rows() -> None:
        f.loop(0, f.max("%k", 1), block, [], k_step)  # one turn for K = 0, which sets C to zero

    few = range(1, 3 if tile.format.few_shapes else min(FEW_ROWS, tile.rows) + 1)
    f.switch("%rows", {r: (lambda r=r: few_rows(r)) for r in few}, many_rows)  # type: ignore[misc]
    f.ret()
    return f


def gemm_kernel(
    tile: Tile,
    name: str = "rlx_gemm",
    epilogue: Epilogue | None = None,
    *,
    to_scratch: bool = False,
    batch_offsets: BatchOffsets | None = None,
) -> Module:
    """A kernel `name(words, chunk, ctx, worker)` of `ProductArguments`, for the chunks of `schedule.matmul.chunking`.

    `epilogue(f, block)` emits what happens to a block once it is complete. With `to_scratch` the block is computed in
    the worker's scratch (row stride panel_chunk * width), and the epilogue stores it. `batch_offsets(f, number)` gives
    the offsets of A, B and C, in elements of memory, where there are several matrices.
    """
    f = kernel_function(name)
    w = ProductArguments.loaded(f)
    at = chunk_of(f, w.m, w.row_chunk, w.n, w.panel_chunk, tile.width, batch=True, even_panels=False)
    product = Product.begin(f, w, tile, at, lambda number: batch_offsets(f, number) if batch_offsets else ("0",) * 3)

    def all_rows(a: str, r0: str, r1: str) -> None:
        c = product.place(not to_scratch, r0)
        product.block(a, product.panel(), c, f.sub(r1, r0), product.columns)
        if epilogue:
            epilogue(f, Block(at, *c))

    row_parts(f, (at.r0, at.r1), None, product.in_memory, all_rows)
    f.ret()
    return Module([f])
