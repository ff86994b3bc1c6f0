"""The register tile of matrix products: its shape for a machine, and the code that computes one.

A tile is rows x panels of accumulators, which a loop over k adds products to; `gemm.kernel` makes blocks of them.
"""

from __future__ import annotations

from typing import Literal, cast

from rlx.backends.cpu.gemm.panels.format import AS_SUMS, PanelFormat
from rlx.backends.cpu.llvm.builder import Function, size_of, vec
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DType as Element
from rlx.records import dataclass, replace

__all__ = ["HALF", "OPERANDS", "SCALARS", "Tile", "micro_kernel", "put_tile", "tile_of", "transpose"]

DType = Literal["f32", "f64", "i32"]
SCALARS = {"f32": "float", "f64": "double", "i32": "i32"}
OPERANDS = [("ptr", "a"), ("i64", "lda"), ("ptr", "b"), ("i64", "stride"), ("ptr", "c"), ("i64", "ldc")]
HALF = 0  # stands for half a panel, in counts of panels


@dataclass(frozen=True)
class Tile:
    """The register tile: `rows` x `panels` panels of accumulators, of `lanes` elements a register of the target."""

    dtype: DType
    target: Target
    registers: int
    rows: int
    panels: int
    format: PanelFormat = AS_SUMS  # of the panels of B

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
    tile = Tile(name, target, registers, 0, 2 if vector_bytes == 64 else 1, format or AS_SUMS)
    if vector_bytes == 32 and name != "i32":  # products of integers need a register of their own
        return replace(tile, rows=3, panels=2)
    most = 12 if name == "i32" else 14
    return replace(tile, rows=min((registers - 1) // (tile.panels * 64 // vector_bytes) - 1, most))


# ---- code


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
