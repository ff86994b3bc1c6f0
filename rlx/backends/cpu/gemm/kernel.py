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
from abc import ABC, abstractmethod
from collections.abc import Callable

from rlx.backends.cpu.gemm import amx_f32, amx_f32_rows
from rlx.backends.cpu.gemm.accumulators import Fetch, Matrix, Panels
from rlx.backends.cpu.gemm.chunk import Chunk, Product, ProductArguments, chunk_of, row_parts
from rlx.backends.cpu.gemm.tile import HALF, OPERANDS, Tile
from rlx.backends.cpu.llvm.builder import Function, Module, Operand, Typed, size_of
from rlx.backends.cpu.schedule.arguments import Routine, routines
from rlx.backends.cpu.schedule.matmul import COPY_PAD
from rlx.records import dataclass, replace

__all__ = [
    "BLOCK_ARGUMENTS", "Block", "PanelMaker", "block_routine", "block_steps", "gemm_block", "gemm_kernel",
    "kernel_function", "micro_kernel",
]  # fmt: skip

FEW_ROWS = 8  # that read panels from end to end, at most
AHEAD = 6000  # bytes: how far ahead they are then prefetched, of all that are read at a time
BLOCK_ARGUMENTS = [*OPERANDS, *(("i64", i) for i in ("rows", "columns", "k", "most")), ("ptr", "copy")]


class PanelMaker(ABC):
    """Code that makes `count` panels at a time, of which chunks of `arguments` have none."""

    arguments: type[ProductArguments]
    count: int

    @abstractmethod
    def made(self, product: Product, done: str, columns: str) -> str:
        """Emits what makes those of so many columns, after `done` ones of the chunk, and gives where the first is."""


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


@routines
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
    f = Function(
        f"rlx_block_{tile.name}_{tile.rows}x{tile.panels}",
        [*BLOCK_ARGUMENTS, *_of_format(tile), *([("i64", "add")] if adds else [])],
        internal=internal,
        attrs="nounwind noinline",
    )
    _Block(f, tile, adds).emit()
    f.ret()
    return f


@dataclass(frozen=True)
class _Steps:
    """A block of k, as SSA values: `k` steps from k0 on, of rows of A from `a` on that are `lda` elements apart."""

    k0: str
    k: str
    more: str  # whether C is added to
    final: str  # whether there is none after it
    a: str
    lda: str


class _Block:
    """The code of `gemm_block`, and the tiles that it calls."""

    def __init__(self, f: Function, tile: Tile, adds: bool) -> None:
        self.f, self.tile, self.adds = f, tile, adds
        self.kernels: dict[tuple[int, int, bool], Function] = {}
        self.block = f.max("%k", 8) if tile.format.turn else block_steps(f)
        self.copies = tile.a_scalar == tile.scalar
        self.copied = f.cmp("ne", "%copy", "null") if self.copies else "false"

    def emit(self) -> None:
        """All of it: few rows at once, more in blocks of k."""
        f, tile = self.f, self.tile
        few = range(1, 3 if tile.format.few_shapes else min(FEW_ROWS, tile.rows) + 1)
        f.switch("%rows", {r: (lambda r=r: self.few_rows(r)) for r in few}, self.many_rows)  # type: ignore[misc]

    def kernel(self, rows: int, panels: int, streams: bool = False) -> Function:
        """The tile of that shape."""
        if (rows, panels, streams) not in self.kernels:
            made = micro_kernel(self.tile, rows, max(panels, 1), half=panels == HALF, streams=streams)
            self.kernels[rows, panels, streams] = made
        return self.kernels[rows, panels, streams]

    # ---- places

    def added(self, k0: str) -> str:
        """Whether the block of k from a step on is added to C."""
        f = self.f
        later = f.cast("zext", f.cmp("gt", k0, 0), "i64")
        return f.or_(later, "%add") if self.adds else later

    def place(self, panel: str, step: str | int) -> str:
        """The address of a step of k in a panel."""
        f, tile = self.f, self.tile
        return f.gep("%b", f.add(f.mul(panel, "%stride"), f.mul(step, tile.width)), tile.b_scalar)

    def besides(self, panel: str) -> list[Operand]:
        """What tiles of the format are given besides, from this panel on."""
        arguments = self.tile.format.arguments
        return [*(f"%{name}" for _, name in arguments), *([panel] if arguments else [])]

    def panel_of(self, column: str) -> str:
        """The number of the panel that a column is in."""
        return self.f.lshr(column, self.tile.width.bit_length() - 1)

    # ---- few rows

    def few_rows(self, rows: int) -> None:
        """All rows at once: several panels a tile, each read from end to end, then those left over one by one."""
        f, width = self.f, self.tile.width
        panels = self.tile.panels_for(rows)
        group = panels * width
        grouped = f.mul(f.div(f.add("%columns", width - 1), group), group)
        f.loop(0, grouped, group, [], lambda column, _: self.few_of(rows, panels, column))
        if panels > 1:
            f.loop(grouped, "%columns", width, [], lambda column, _: self.few_of(rows, 1, column))

    def few_of(self, rows: int, count: int, column: str) -> None:
        """The columns of so many panels."""
        f, tile, block = self.f, self.tile, self.block
        n = f.min(f.sub("%columns", column), count * tile.width)
        c, panel = f.gep("%c", column, tile.c_scalar), self.panel_of(column)

        def k_step(k0: str, _: list[str]) -> None:
            k, more = f.min(block, f.sub("%k", k0)), self.added(k0)
            a, b = f.gep("%a", k0, tile.a_scalar), self.place(panel, k0)
            # from the last block of the panels on, those to come
            last = f.cmp("ge", f.add(k0, block), "%k")
            beyond = f.select(last, f.mul("%stride", (count - 1) * size_of(tile.b_scalar)), 0, "i64")
            ahead = f.offset(b, f.add(beyond, AHEAD // count))
            given: list[Typed] = [a, "%lda", b, "%stride", c, "%ldc", k, n, more, ahead, ahead, ("i64", 1)]
            f.call(self.kernel(rows, count, True), [*given, *self.besides(panel)])

        f.loop(0, f.max("%k", 1), block, [], k_step)

    # ---- more rows

    def many_rows(self) -> None:
        """One block of k after the other; one turn for K = 0, which sets C to zero."""
        self.f.loop(0, self.f.max("%k", 1), self.block, [], self.k_step)

    def k_step(self, k0: str, _: list[str]) -> None:
        """All panels for a block of k, in groups of as many as a tile has."""
        f, tile, block, width = self.f, self.tile, self.block, self.tile.width
        k = f.min(block, f.sub("%k", k0))
        more = self.added(k0)
        final = f.cmp("ge", f.add(k0, block), "%k")
        source = f.gep("%a", k0, tile.a_scalar)
        copy_stride = f.add(block, COPY_PAD)
        a, lda = source, "%lda"
        if self.copies:
            f.if_(self.copied, lambda: self.copy_rows(source, k, copy_stride))
            a, lda = f.select(self.copied, "%copy", source), f.select(self.copied, copy_stride, "%lda")
        steps = _Steps(k0, k, more, final, a, lda)

        group = tile.panels * width
        grouped = f.mul(f.div(f.add("%columns", width - 1), group), group)
        pairs = grouped
        if tile.triple_rows:  # three panels rather than two and one by itself, which two tiles couldn't prefetch
            odd = f.and_(f.cmp("lt", grouped, "%columns"), f.cmp("gt", grouped, 0))
            odd = f.and_(odd, f.cmp("gt", "%rows", 2 * tile.triple_rows))
            pairs = f.sub(grouped, f.select(odd, group, 0))
            grouped = f.select(odd, "%columns", grouped)
        f.loop(0, pairs, group, [], lambda column, _: self.panels(steps, tile.panels, column))
        if tile.triple_rows:
            f.if_(odd, lambda: self.panels(steps, 3, pairs))
        if tile.panels > 1:
            f.loop(grouped, "%columns", width, [], lambda column, _: self.panels(steps, 1, column))

    def copy_rows(self, source: str, k: str, copy_stride: str) -> None:
        """Copies rows of A to where there is room for them."""
        f, tile, ty = self.f, self.tile, self.tile.scalar

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

    def panels(self, steps: _Steps, count: int, column: str) -> None:
        """So many panels from a column on, or half a one, for all rows."""
        f, tile = self.f, self.tile
        n = f.min(f.sub("%columns", column), count * tile.width)
        last = f.cmp("ge", f.add(column, count * tile.width), "%columns")
        if count == 1 and tile.half_rows:
            narrow = f.cmp("le", n, tile.width // 2)
            f.if_(
                narrow,
                lambda: self.all_rows(steps, HALF, column, n, last),
                lambda: self.all_rows(steps, 1, column, n, last),
            )
        else:
            self.all_rows(steps, count, column, n, last)

    def all_rows(self, steps: _Steps, panels: int, column: str, n: str, last: str) -> None:
        """Full tiles below one another, the last two evened out so that none is very short."""
        f, tile = self.f, self.tile
        heights = tile.heights(panels)
        height = heights[-1]
        # after the last panels come the first ones of the next block of k
        start = f.select(last, f.add(steps.k0, self.block), steps.k0)
        at = f.select(last, 0, f.add(self.panel_of(column), max(panels, 1)))
        coming = [self.place(f.add(at, p), start) for p in range(min(max(panels, 1), tile.panels))]
        over = f.and_(last, steps.final)
        each = f.mul(f.and_(steps.k, -tile.unroll), tile.fetched)

        def ahead(row: str | int, tiles: str | int) -> tuple[str, str]:
            """What is to be prefetched after so many tiles: the panels to come, else the rows of A after `row`."""
            below = f.gep(steps.a, f.mul(row, steps.lda), tile.a_scalar)
            second = f.cmp("ge", tiles, tile.fetches, "i64")
            panel = f.select(second, coming[-1], coming[0], "ptr")
            place = f.offset(panel, f.mul(f.and_(tiles, tile.fetches - 1, "i64"), each))
            there = f.cmp("ge", tiles, len(coming) * tile.fetches, "i64")
            return f.select(f.or_(over, there), below, place, "ptr"), f.select(over, below, coming[-1], "ptr")

        rest = f.rem("%rows", height)
        # the last two tiles are evened out
        whole = f.max(f.sub(f.div("%rows", height), f.cast("zext", f.cmp("ne", rest, 0), "i64")), 0)
        f.if_(f.cmp("gt", whole, 0), lambda: self.tiles(steps, (height, panels), (0, column), n, ahead(0, 0), whole))

        def tile_rows(state: list[str]) -> list[str]:
            row, done = state
            left = f.sub("%rows", row)
            even = f.and_(f.cmp("gt", left, height), f.cmp("lt", left, 2 * height))
            take = f.select(even, f.lshr(f.add(left, 1), 1), f.min(left, height))
            if len(heights) < height:
                take = functools.reduce(lambda x, h: f.select(f.cmp("ge", take, h), h, x, "i64"), heights[1:], "1")
            fetch = ahead(f.add(row, take), done)

            def of_height(rows: int) -> Callable[[], None]:
                return lambda: self.tiles(steps, (rows, panels), (row, column), n, fetch, 1)

            f.switch(take, {r: of_height(r) for r in heights})
            return [f.add(row, take), f.add(done, 1)]

        first: list[Typed] = [("i64", f.mul(whole, height)), ("i64", whole)]
        f.while_(first, lambda state: f.cmp("lt", state[0], "%rows"), tile_rows)

    def tiles(
        self,
        steps: _Steps,
        shape: tuple[int, int],
        at: tuple[str | int, str],
        n: Typed,
        ahead: tuple[str, str],
        count: Typed,
    ) -> None:
        """Calls a tile of a shape (rows, panels) at (row, column) for `count` tiles below one another."""
        f, tile, (row, column) = self.f, self.tile, at
        top = f.gep(steps.a, f.mul(row, steps.lda), tile.a_scalar)
        c = f.gep("%c", f.add(f.mul(row, "%ldc"), column), tile.c_scalar)
        panel = self.panel_of(column)
        b = self.place(panel, steps.k0)
        given: list[Typed] = [top, steps.lda, b, "%stride", c, "%ldc", steps.k, n, steps.more, *ahead, count]
        f.call(self.kernel(*shape), [*given, *self.besides(panel)])


def gemm_kernel(
    tile: Tile,
    name: str = "rlx_gemm",
    epilogue: Epilogue | None = None,
    *,
    to_scratch: bool = False,
    batch_offsets: BatchOffsets | None = None,
    panels: PanelMaker | None = None,
) -> Module:
    """A kernel `name(words, chunk, ctx, worker)` of `ProductArguments`, for the chunks of `schedule.matmul.chunking`.

    `epilogue(f, block)` emits what happens to a block once it is complete. With `to_scratch` the block is computed in
    the worker's scratch (row stride panel_chunk * width), and the epilogue stores it. `batch_offsets(f, number)` gives
    the offsets of A, B and C, in elements of memory, where there are several matrices. `panels` makes them in scratch,
    some at a time, where B is none.
    """
    f = kernel_function(name)
    w = (panels.arguments if panels else ProductArguments).loaded(f)
    at = chunk_of(f, w.m, w.row_chunk, w.n, w.panel_chunk, tile.width, batch=True, even_panels=False)
    product = Product.begin(f, w, tile, at, lambda number: batch_offsets(f, number) if batch_offsets else ("0",) * 3)

    def all_rows(a: str, r0: str, r1: str) -> None:
        c, rows = product.place(not to_scratch, r0), f.sub(r1, r0)

        def some_panels(done: str, _: list[str]) -> None:
            assert panels is not None
            columns = f.min(f.sub(product.columns, done), panels.count * tile.width)
            place = f.gep(c[0], done, tile.c_scalar)
            product.block(a, panels.made(product, done, columns), (place, c[1]), rows, columns)

        if panels:
            f.loop(0, product.columns, panels.count * tile.width, [], some_panels)
        else:
            product.block(a, product.panel(), c, rows, product.columns)
        if epilogue:
            epilogue(f, Block(at, *c))

    row_parts(f, (at.r0, at.r1), None, product.in_memory, all_rows)
    f.ret()
    return Module([f])
