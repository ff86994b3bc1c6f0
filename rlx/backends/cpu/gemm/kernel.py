"""Matrix product kernels: C[M, N] = A[M, K] @ B[K, N], batched, with an epilogue run on each block while in cache.

B is packed in panels of 64 bytes' width (16 columns of f32, 8 of f64), each laid out [K][width] and padded with zeros;
panels follow one another, so the layout is [ceil(N / width)][K][width] for one row and for many alike. A and C are read
and written in place with any row stride; nothing outside them is touched.

Every element of C is a chain of fma over k within a block of `k_block(K, most)` steps; blocks are added up in order.
That order depends on K only, so the bits of a row depend neither on M, nor on chunks, threads or tile heights. The same
is true of products by tile registers, in another order; `schedule.matmul` chooses by M, N and K.

In an "i32" product an element of A or B is a pair of i16, neighbours along k, and an element of C the i32 sum of the
products of both: one instruction on x86, exact for all values (the usual one for 8-bit operands saturates).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, cast

from rlx.backends.cpu.gemm import amx_f32, amx_f32_rows
from rlx.backends.cpu.gemm.chunk import Chunk, chunk_of
from rlx.backends.cpu.gemm.panels.format import PanelFormat
from rlx.backends.cpu.llvm.builder import Function, Module, Typed, size_of, vec
from rlx.backends.cpu.schedule.arguments import Address, Arguments, Number, Routine
from rlx.backends.cpu.schedule.matmul import COPY_PAD
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DType as Element
from rlx.records import dataclass, replace

__all__ = [
    "Block",
    "GemmArguments",
    "Tile",
    "block_routine",
    "gemm_block",
    "gemm_kernel",
    "kernel_function",
    "packed_elements",
    "tile_of",
]

DType = Literal["f32", "f64", "i32"]
SCALARS = {"f32": "float", "f64": "double", "i32": "i32"}
OPERANDS = [("ptr", "a"), ("i64", "lda"), ("ptr", "b"), ("i64", "stride"), ("ptr", "c"), ("i64", "ldc")]
BLOCK_ARGUMENTS = [*OPERANDS, *(("i64", i) for i in ("rows", "columns", "k", "most")), ("ptr", "copy")]
HALF = 0  # stands for half a panel, in counts of panels


class GemmArguments(Arguments):
    """The arguments of a product kernel; strides are in elements, `scratch_stride` and `copy_bytes` in bytes."""

    a: Address
    lda: Number
    a_batch: Number
    b: Address
    b_batch: Number
    c: Address
    ldc: Number
    c_batch: Number
    m: Number
    n: Number
    k: Number
    batch: Number
    row_chunk: Number
    panel_chunk: Number
    scratch: Address
    scratch_stride: Number
    copy_bytes: Number  # room at the start of a worker's scratch for a copy of its rows of A; 0 reads A in place
    steps: Number  # of k in a block, at most; 0: by tiles, with `copy_bytes` for what they need
    block: Address  # of `block_routine`


@dataclass(frozen=True)
class Tile:
    """The register tile: `rows` x `panels` panels of accumulators, of `lanes` elements a register of the target."""

    dtype: DType
    target: Target
    registers: int
    rows: int
    panels: int
    format: PanelFormat = PanelFormat()  # of the panels of B

    @property
    def lanes(self) -> int:
        return self.target.vector_bytes // size_of(self.scalar)

    @property
    def name(self) -> str:
        """What tells it from other tiles in the names of functions."""
        return f"{self.dtype}{self.format.name and '_' + self.format.name}x{self.lanes}"

    @property
    def b_scalar(self) -> str:
        """The type of an element of B in memory."""
        return self.format.scalar(self.scalar)

    @property
    def scalar(self) -> str:
        return SCALARS[self.dtype]

    @property
    def vector(self) -> str:
        return vec(self.scalar, self.lanes)

    @property
    def width(self) -> int:
        """Columns of a panel."""
        return 64 // size_of(self.scalar)

    @property
    def step_bytes(self) -> int:
        """Bytes of a step of a panel, on average."""
        return self.format.step_bytes(self.scalar)

    @property
    def unroll(self) -> int:
        """Steps of k a turn of the loop. LLVM regroups sums of integers of several steps until they spill."""
        return 1 if self.dtype == "i32" else 4

    def ordered(self, f: Function, x: str) -> str:
        """A sum in an unrolled loop, computed before what is below is read: LLVM would spill 512-bit tiles else."""
        return f.keep_order(x) if self.lanes * size_of(self.scalar) == 64 else x

    def unroll_of(self, rows: int, vectors: int) -> int:
        """Steps of k a turn of the loop of a tile: twice as many where all registers are in use."""
        return 2 * self.unroll if self.unroll > 1 and rows * vectors >= 12 and self.registers == 16 else self.unroll

    @property
    def fetched(self) -> int:
        """Bytes of the panels to come that a tile prefetches each step of k."""
        return self.step_bytes if self.lanes * size_of(self.scalar) == 64 else self.step_bytes // 4

    @property
    def fetches(self) -> int:
        """Tiles that prefetch a panel."""
        return self.step_bytes // self.fetched

    @property
    def single_rows(self) -> int:
        """Rows of a tile of one panel."""
        return min((self.registers - 1) // (self.width // self.lanes) - 1, 12)

    @property
    def triple_rows(self) -> int:
        """Rows of a tile of three panels of one vector each; 0 where none is used. Integers need registers besides."""
        needed = 4 if self.dtype == "i32" else 1
        return (self.registers - needed) // 3 - 1 if self.panels == 2 and self.lanes == self.width else 0

    @property
    def of_one_panel(self) -> Tile:
        """For AVX2 the tile of one panel, for kernels that hold its B vectors; for others, the same."""
        one = self.lanes * size_of(self.scalar) == 32
        return replace(self, rows=self.single_rows, panels=1) if one else self

    @property
    def half_rows(self) -> int:
        """Rows of a tile of half a panel; 0 where a panel is a single vector."""
        vectors = self.width // self.lanes // 2
        return min((self.registers - 1) // vectors - 1, 12) if vectors else 0

    def panels_for(self, rows: int) -> int:
        """Panels that a tile of few rows takes at once, so that enough fma chains are under way."""
        vectors = self.width // self.lanes
        for panels in (4, 2):
            # a single row needs no register for B: it is an operand in memory
            held = 1 if rows == 1 else panels * vectors + 1
            if panels >= self.panels and rows * panels * vectors + held <= self.registers and rows <= 2:
                return panels
        return self.panels


def tile_of(dtype: Element, target: Target, registers: int = 0, *, format: PanelFormat | None = None) -> Tile:
    """Chooses the tile for sums in a type, by the width of vectors and a register count (0: 32 for AVX-512, else 16).

    Accumulators, the operands that a step holds (the vectors of B or the splats of A, whichever are fewer) and one more
    never exceed the registers. Floats in AVX2 take 3 x 32: 7 loads for 12 products, where 6 x 16 needs 8. In AVX-512
    the 14 rows divide the 49 and 196 pixels of many nets for pictures well.
    """
    vector_bytes, name = target.vector_bytes, cast(DType, dtype.name)
    registers = registers or (32 if vector_bytes == 64 else 16)
    tile = Tile(name, target, registers, 0, 2 if vector_bytes == 64 else 1, format or PanelFormat())
    if vector_bytes == 32 and name != "i32":  # products of integers need a register of their own
        return replace(tile, rows=3, panels=2)
    most = 12 if name == "i32" else 14
    return replace(tile, rows=min((registers - 1) // (tile.panels * 64 // vector_bytes) - 1, most))


def packed_elements(k: int, n: int, dtype: DType = "f32") -> int:
    """Elements of one packed [K, N] matrix."""
    width = 64 // size_of(SCALARS[dtype])
    return -(-n // width) * width * k


@dataclass(frozen=True)
class Block:
    """What an epilogue gets, as SSA values: the block is that of chunk `at`.

    `c` is the address of its first element, `ldc` its row stride in elements; `word(i)` loads epilogue word i.
    """

    f: Function
    tile: Tile
    at: Chunk
    c: str
    ldc: str

    def word(self, index: int, ty: str = "i64") -> str:
        """Loads word `index` of those that follow the kernel's own."""
        return load_word(self.f, len(GemmArguments.names()) + index, ty)


Epilogue = Callable[[Function, Block], None]
BatchOffsets = Callable[[Function, str], tuple[str, str, str]]


def kernel_function(name: str) -> Function:
    """A function with the signature of every kernel of the phase table."""
    return Function(name, [("ptr", "words"), ("i64", "chunk"), ("ptr", "ctx"), ("i64", "worker")])


def load_word(f: Function, index: int, ty: str = "i64") -> str:
    return f.load(ty, f.gep("%words", int(index), "i64"))


def multiply_add(f: Function, tile: Tile, a: str, b: str, total: str) -> str:
    """total + a * b, lane by lane; of i32 lanes the products of both halves are added."""
    v, lanes = tile.vector, tile.lanes
    if tile.dtype != "i32":
        return f.fma(a, b, total, v)
    halves = vec("i16", 2 * lanes)
    x, y = f.cast("bitcast", a, halves), f.cast("bitcast", b, halves)
    feature, name = {
        4: ("sse2", "sse2.pmadd.wd"),
        8: ("avx2", "avx2.pmadd.wd"),
        16: ("avx512bw", "avx512.pmaddw.d.512"),
    }[lanes]
    if tile.target.has(feature):
        f.declare(f"llvm.x86.{name}", v, [halves, halves])
        return f.add(total, f.op(f"call {v} @llvm.x86.{name}({halves} {x}, {halves} {y})", v))
    wide = f.mul(f.cast("sext", x, "i32"), f.cast("sext", y, "i32"))
    for parity in (0, 1):
        total = f.add(total, f.shuffle(wide, None, list(range(parity, 2 * lanes, 2))))
    return total


def micro_kernel(tile: Tile, rows: int, panels: int, *, half: bool = False) -> Function:
    """Tiles of C one below another: rows x panels panels each, over `k` steps; with `half`, the first half of a panel.

    `(ptr a, i64 lda, ptr b, i64 stride, ptr c, i64 ldc, i64 k, i64 n, i64 add, ptr next, ptr later, i64 count)`:
    `stride` is from panel to panel, `n` the columns of C that exist, `add` whether C is added to or set, `next` and
    `later` two panels to prefetch, `count` >= 1 the tiles.
    """
    ty, v, lanes = tile.scalar, tile.vector, tile.lanes
    size, b_size, per_panel = size_of(ty), size_of(tile.b_scalar), tile.width // lanes
    vectors = per_panel // 2 if half else per_panel * panels
    f = Function(
        f"rlx_tile_{tile.name}_{rows}x{'half' if half else panels}",
        [*OPERANDS, *(("i64", i) for i in ("k", "n", "add")), ("ptr", "next"), ("ptr", "later"), ("i64", "count")],
        shared=True,
        attrs="nounwind noinline",
    )
    unroll = tile.unroll_of(rows, vectors)
    step, line = f.mul("%lda", size), f.mul("%ldc", size)
    double_step = f.mul(step, 2)
    fetched = f.mul(f.and_("%k", -unroll), tile.fetched)
    b_pointers = ["%b"]
    for _ in range(panels - 1):
        b_pointers.append(f.gep(b_pointers[-1], "%stride", tile.b_scalar))

    def one_tile(number: str, at: list[str]) -> list[str]:
        a, c, fetch = at
        c_rows = [c]
        for _ in range(rows - 1):
            c_rows.append(f.offset(c_rows[-1], line))
        for row in c_rows:
            f.prefetch(row, write=True)
        # three rows to a pointer: pointer, pointer + step, pointer + 2 step are addressing modes
        a_pointers = [a]
        for _ in range((rows - 1) // 3):
            a_pointers.append(f.offset(a_pointers[-1], f.mul(step, 3)))
        na, nb = len(a_pointers), len(b_pointers)

        def steps(count: int, state: list[str]) -> list[str]:
            """`count` steps of k; state is the pointers, the prefetch address and the accumulators."""
            prefetches = count == unroll
            pa, pb, ahead, acc = state[:na], state[na : na + nb], state[na + nb], state[na + nb + 1 :]
            if na > 2:  # LLVM would keep a pointer for each row, most of them in memory
                pa, pb = [f.opaque(p) for p in pa], [f.opaque(p) for p in pb]
            row_pointers = [
                pa[i // 3] if i % 3 == 0 else f.offset(pa[i // 3], step if i % 3 == 1 else double_step)
                for i in range(rows)
            ]
            for k in range(count):
                if prefetches and k * tile.fetched % 64 == 0:
                    f.prefetch(f.offset(ahead, k * tile.fetched), locality=2)
                places = [
                    f.offset(pb[j // per_panel], (k * tile.width + j % per_panel * lanes) * b_size)
                    for j in range(vectors)
                ]
                if rows < vectors:  # the fewer of both are held in registers
                    held = [f.splat(f.load(ty, f.offset(p, k * size)), lanes) for p in row_pointers]
                    for j in range(vectors):
                        b = tile.format.load(f, places[j], tile.vector)
                        for i in range(rows):
                            acc[i * vectors + j] = multiply_add(f, tile, held[i], b, acc[i * vectors + j])
                    continue
                held = [tile.format.load(f, p, tile.vector) for p in places]
                for i in range(rows):
                    x = f.splat(f.load(ty, f.offset(row_pointers[i], k * size)), lanes)
                    for j in range(vectors):
                        total = multiply_add(f, tile, x, held[j], acc[i * vectors + j])
                        acc[i * vectors + j] = tile.ordered(f, total) if count > 1 else total
            pa = [f.offset(p, count * size) for p in pa]
            pb = [f.offset(p, count * tile.width * b_size) for p in pb]
            return [*pa, *pb, f.offset(ahead, tile.fetched * count) if prefetches else ahead, *acc]

        state: list[tuple[str, str]] = [("ptr", p) for p in [*a_pointers, *b_pointers, fetch]]
        state += [(v, "zeroinitializer")] * (rows * vectors)
        done: int | str = 0
        if unroll > 1:
            done = f.and_("%k", -unroll)
            after = f.loop(0, done, unroll, state, lambda _, s: steps(unroll, s))
            state = [(kind, value) for (kind, _), value in zip(state, after, strict=True)]
        acc = f.loop(done, "%k", 1, state, lambda _, s: steps(1, s))[na + nb + 1 :]
        put_tile(f, tile, acc, c_rows, "%n", f.cmp("ne", "%add", 0))
        below = f.offset(a, f.mul(step, rows))
        # the panels to come, and once they are there the next rows of A
        past = f.add(number, 1)
        on = f.select(f.cmp("eq", past, tile.fetches), "%later", f.offset(fetch, fetched), "ptr")
        on = f.select(f.cmp("lt", past, 2 * tile.fetches), on, below, "ptr")
        return [below, f.offset(c, f.mul(line, rows)), on]

    f.loop(0, "%count", 1, [("ptr", "%a"), ("ptr", "%c"), ("ptr", "%next")], one_tile, runs=True)
    f.ret()
    return f


def put_tile(f: Function, tile: Tile, acc: list[str], c_rows: list[str], n: str, added: str) -> None:
    """Sets or, where `added`, adds accumulators to rows of C (`ldc` apart, the argument), in columns below `n`."""
    ty, v, lanes, rows, size = tile.scalar, tile.vector, tile.lanes, len(c_rows), size_of(tile.scalar)
    vectors = len(acc) // rows
    places = [(i * vectors + j, f.gep(c_rows[i], j * lanes, ty)) for i in range(rows) for j in range(vectors)]

    def finish_whole() -> None:
        sums = f.if_(added, lambda: [f.add(acc[at], f.load(v, p)) for at, p in places], lambda: acc)
        for at, p in places:
            f.store(sums[at], p)

    def finish_masked() -> None:
        masks = [f.mask_below(f.sub(n, j * lanes), lanes, f"i{8 * size}") for j in range(vectors)]

        def add_old() -> list[str]:
            return [f.add(acc[at], f.masked_load(v, p, masks[at % vectors])) for at, p in places]

        sums = f.if_(added, add_old, lambda: acc)
        for at, p in places:
            f.masked_store(sums[at], p, masks[at % vectors])

    def finish_tail() -> None:
        # through a copy on the stack, so that the masked code is there once and not once a row
        masks = [f.mask_below(f.sub(n, j * lanes), lanes, f"i{8 * size}") for j in range(vectors)]
        copy = f.alloca(v, rows * vectors)
        for at, value in enumerate(acc):
            f.store(value, f.gep(copy, at * lanes, ty))

        def row(i: str, _: list[str]) -> None:
            source, target = f.gep(copy, f.mul(i, vectors * lanes), ty), f.gep(c_rows[0], f.mul(i, "%ldc"), ty)
            for j in range(vectors):
                p = f.gep(target, j * lanes, ty)
                value, old = f.load(v, f.gep(source, j * lanes, ty)), f.masked_load(v, p, masks[j])
                f.masked_store(f.select(added, f.add(value, old), value), p, masks[j])

        f.loop(0, rows, 1, [], row)

    # where a mask is a register of its own, a masked store is a store
    f.if_(f.cmp("ge", n, vectors * lanes), finish_whole, finish_masked if lanes * size == 64 else finish_tail)


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


def block_steps(f: Function) -> str:
    """The steps of a block of k, from the arguments `k` and `most`: as `schedule.matmul.k_block` has it."""
    blocks = f.max(f.div(f.sub(f.add("%k", "%most"), 1), "%most"), 1)
    block = f.div(f.sub(f.add("%k", blocks), 1), blocks)
    return f.max(f.and_(f.add(block, 7), -8), 8)


def gemm_block(tile: Tile, *, internal: bool = False) -> Function:
    """A block of C over all of K.

    `(ptr a, i64 lda, ptr b, i64 stride, ptr c, i64 ldc, i64 rows, i64 columns, i64 k, i64 most, ptr copy)`: a is at
    the first row, b at the first panel (`stride` elements from panel to panel), `most` limits the steps of a block of
    k, `copy` is null or room for rows * (k_block(k, most) + 16) elements. `internal`: for the caller's module alone.
    """
    ty, width = tile.scalar, tile.width
    f = Function(
        f"rlx_block_{tile.name}_{tile.rows}x{tile.panels}",
        BLOCK_ARGUMENTS,
        internal=internal,
        attrs="nounwind noinline",
    )
    kernels: dict[tuple[int, int], Function] = {}

    def kernel(rows: int, panels: int) -> Function:
        if (rows, panels) not in kernels:
            kernels[rows, panels] = micro_kernel(tile, rows, max(panels, 1), half=panels == HALF)
        return kernels[rows, panels]

    block = block_steps(f)
    copied = f.cmp("ne", "%copy", "null")

    def place(panel: str, step: str | int) -> str:
        """The address of a step of k in a panel."""
        return f.gep("%b", f.add(f.mul(panel, "%stride"), f.mul(step, width)), tile.b_scalar)

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
                c, panel = f.gep("%c", column, ty), panel_of(column)
                coming = place(f.add(panel, count), 0)

                def k_step(k0: str, _: list[str]) -> None:
                    k, more = f.min(block, f.sub("%k", k0)), f.cast("zext", f.cmp("gt", k0, 0), "i64")
                    ahead = f.offset(coming, f.mul(k0, tile.fetched))
                    a, b = f.gep("%a", k0, ty), place(panel, k0)
                    f.call(
                        kernel(rows, count), [a, "%lda", b, "%stride", c, "%ldc", k, n, more, ahead, ahead, ("i64", 1)]
                    )

                f.loop(0, f.max("%k", 1), block, [], k_step)

            return body

        f.loop(0, grouped, group, [], turn(panels))
        if panels > 1:
            f.loop(grouped, "%columns", width, [], turn(1))

    def k_step(k0: str, _: list[str]) -> None:
        k = f.min(block, f.sub("%k", k0))
        more = f.cast("zext", f.cmp("gt", k0, 0), "i64")
        final = f.cmp("ge", f.add(k0, block), "%k")
        source = f.gep("%a", k0, ty)
        copy_stride = f.add(block, COPY_PAD)
        f.if_(copied, lambda: copy_rows(source, k, copy_stride))
        a = f.select(copied, "%copy", source)
        lda = f.select(copied, copy_stride, "%lda")

        def call(
            shape: tuple[int, int], row: str | int, column: str, n: Typed, ahead: tuple[str, str], count: Typed
        ) -> None:
            top, c = f.gep(a, f.mul(row, lda), ty), f.gep("%c", f.add(f.mul(row, "%ldc"), column), ty)
            b = place(panel_of(column), k0)
            f.call(kernel(*shape), [top, lda, b, "%stride", c, "%ldc", k, n, more, *ahead, count])

        def sweep(count: int) -> Callable[[str, list[str]], None]:
            """One panel group for all rows: full tiles, the last two evened out so that none is very short."""

            def body(column: str, _: list[str]) -> None:
                n = f.min(f.sub("%columns", column), count * width)
                last = f.cmp("ge", f.add(column, count * width), "%columns")
                if count == 1 and tile.half_rows:
                    narrow = f.cmp("le", n, width // 2)
                    f.if_(
                        narrow,
                        lambda: rows_of(HALF, tile.half_rows, column, n, last),
                        lambda: rows_of(1, tile.single_rows, column, n, last),
                    )
                else:
                    height = {tile.panels: tile.rows, 1: tile.single_rows}.get(count, tile.triple_rows)
                    rows_of(count, height, column, n, last)

            return body

        def rows_of(panels: int, height: int, column: str, n: str, last: str) -> None:
            # after the last panels come the first ones of the next block of k
            start = f.select(last, f.add(k0, block), k0)
            at = f.select(last, 0, f.add(panel_of(column), max(panels, 1)))
            coming = [place(f.add(at, p), start) for p in range(min(max(panels, 1), tile.panels))]
            over = f.and_(last, final)

            each = f.mul(f.and_(k, -tile.unroll), tile.fetched)

            def ahead(row: str | int, tiles: str | int) -> tuple[str, str]:
                """What is to be prefetched after so many tiles: the panels to come, else the rows of A after `row`."""
                below = f.gep(a, f.mul(row, lda), ty)
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
                fetch = ahead(f.add(row, take), done)
                f.switch(
                    take,
                    {
                        r: (lambda r=r: call((r, panels), row, column, n, fetch, 1))  # type: ignore[misc]
                        for r in range(1, height + 1)
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

    f.switch("%rows", {r: (lambda r=r: few_rows(r)) for r in (1, 2)}, many_rows)  # type: ignore[misc]
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
    """A kernel `name(words, chunk, ctx, worker)` of `GemmArguments`, for the chunks of `schedule.matmul.chunking`.

    `epilogue(f, block)` emits what happens to a block once it is complete. With `to_scratch` the block is computed in
    the worker's scratch, after `copy_bytes` (row stride panel_chunk * width), and the epilogue stores it.
    `batch_offsets(f, batch)` gives the element offsets of A, B and C where one stride a matrix does not (several axes).
    A block of a format that is `placed` is given all of B, and the number of its first panel as its stride.
    """
    ty = tile.scalar
    f = kernel_function(name)
    w = GemmArguments.loaded(f)
    k, at = w.k, chunk_of(f, w.m, w.row_chunk, w.n, w.panel_chunk, tile.width, batch=True, even_panels=False)
    if batch_offsets:
        a_at, b_at, c_at = batch_offsets(f, at.matrix)
    else:
        a_at, b_at, c_at = (f.mul(at.matrix, step) for step in (w.a_batch, w.b_batch, w.c_batch))
    lda, ldc = w.lda, w.ldc
    own = f.offset(w.scratch, f.mul("%worker", w.scratch_stride))
    copy = f.select(f.cmp("ne", w.copy_bytes, 0), own, "null", "ptr")
    if to_scratch:
        out, ldc = f.offset(own, w.copy_bytes), at.room
    else:
        out = f.gep(w.c, f.add(c_at, f.add(f.mul(at.r0, ldc), at.n0)), ty)
    panel = f.mul(k, tile.step_bytes // size_of(tile.b_scalar))
    stride = at.panel if tile.format.placed else panel
    f.call(
        w.block,
        [
            f.gep(w.a, f.add(a_at, f.mul(at.r0, lda)), ty),
            lda,
            w.b if tile.format.placed else f.gep(w.b, f.add(b_at, f.mul(at.panel, panel)), tile.b_scalar),
            stride,
            out,
            ldc,
            f.sub(at.r1, at.r0),
            f.sub(at.n1, at.n0),
            k,
            w.steps,
            copy,
        ],
    )
    if epilogue:
        epilogue(f, Block(f, tile, at, out, ldc))
    f.ret()
    return Module([f])


def transpose(f: Function, rows: list[str]) -> list[str]:
    """Transposes a square of vectors by swapping off-diagonal blocks of halving size."""
    w, step = len(rows), len(rows) // 2
    while step:
        low = [j if j & step == 0 else w + j - step for j in range(w)]
        high = [j + step if j & step == 0 else w + j for j in range(w)]
        out = list(rows)
        for i in range(w):
            if i & step == 0:
                out[i] = f.shuffle(rows[i], rows[i + step], low)
                out[i + step] = f.shuffle(rows[i], rows[i + step], high)
        rows, step = out, step // 2
    return rows
