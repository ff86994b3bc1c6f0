"""Products with weights that are encoded in blocks, which stay so in panels: see `block_formats`.

Where `block_formats` has a code for an encoding, the numbers of a block are multiplied as they are, and their sum by
the scale: a product reads what the encoding takes. (Such a sum overflows where 128 |x| is near 2^128.) Each number is
made once for a band of rows. Tile registers multiply numbers of blocks too (`amx_blocks`). Of other encodings two
panels at a time are decoded to memory that stays in a cache, and multiplied as others are: a decoded weight is exact in
f32.

Whether tiles compute a product depends on M; the order in which an element of C is added up depends on K only: blocks
of k are as those of other products (whole blocks of the encoding here), and where numbers are multiplied the steps that
a row of a panel holds follow one another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlx.backends.cpu.gemm import amx_blocks, amx_f32
from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.accumulators import Accumulators, Matrix
from rlx.backends.cpu.gemm.panels import block_formats
from rlx.backends.cpu.gemm.panels.block_formats import BLOCK, ROW, SCALE, BlockCode
from rlx.backends.cpu.gemm.panels.format import AS_SUMS, PanelFormat
from rlx.backends.cpu.gemm.panels.operands import DEPTH, accumulates_in
from rlx.backends.cpu.gemm.tile import Tile
from rlx.backends.cpu.llvm.builder import Function, Module, Typed, void
from rlx.backends.cpu.loops.emitter import Emitter, Scope
from rlx.backends.cpu.schedule.arguments import ArgumentTable, Routine
from rlx.backends.cpu.schedule.matmul import WIDTH, MatmulSchedule, decoded_steps
from rlx.backends.cpu.strategy import Setting
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES
from rlx.ir.encoding import Encoding
from rlx.ir.encodings import ENCODINGS
from rlx.ir.shape import Size, evaluate
from rlx.kernels.affine import affine
from rlx.kernels.encoded import encoded_element
from rlx.kernels.expr import I64, Expr, Load, Select, Var, const, guarded, size_expr
from rlx.kernels.lowering import Contract, Lowering, out_vars
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import dataclass, replace

__all__ = ["ENCODED", "EncodedBlocks", "blocks_of", "has_code", "multiplied_in_memory"]

F32 = DTYPES["f32"]
LANE = Var("lane")

AHEAD = 2048  # bytes: how far ahead is prefetched, of all panels that are read at a time
TOGETHER = 4  # rows of a panel that a turn of the loop reads: a line of memory


def most_rows(target: Target) -> int:
    """Rows of a band, at most."""
    return 12 if target.vector_bytes == 64 else 6


@dataclass(frozen=True)
class Blocks:
    """Weights [K, N] as they are stored: element k, n is number `start + n * column + k`, in the bytes of `stored`."""

    stored: Buffer
    encoding: Encoding
    start: int
    column: int

    def panels(self, name: str, n: int, k: int) -> Buffer:
        """Their panels [ceil(N / 16), blocks, bytes of a block, 16]."""
        shape = (-(-n // WIDTH), k // self.encoding.block, self.encoding.block_bytes, ROW)
        return Buffer(name, "prepared", shape, block_formats.BYTE)

    def byte(self, column: Expr, block: Expr, row: Expr) -> Load:
        """The byte of a panel: a load of the stored ones, as bytes."""
        size, steps = self.encoding.block_bytes, self.encoding.block
        at = column * (self.column // steps * size) + block * size + self.start // steps * size + row
        return Load(self.stored, (at,), block_formats.BYTE)


def find(b: Expr, n: Size, k: Size, depth: Var, column: Var) -> Blocks | None:
    """The blocks along k of which the elements of B are; None where they are others."""
    found = encoded_element(b)
    if found is None or not isinstance(n, int) or not isinstance(k, int) or k == 0:
        return None
    stored, encoding, flat = found
    walked = affine(flat)
    start, step = walked.constant, walked.coefs.get(column, 0)
    fits = (
        walked.coefs.get(depth) == 1
        and walked.coefs.keys() <= {depth, column}
        and isinstance(start, int)
        and isinstance(step, int)
        and not (k % encoding.block or start % encoding.block or step % encoding.block)
    )
    return Blocks(stored, encoding, start, step) if fits else None  # type: ignore[arg-type]


def has_code(target: Target) -> bool:
    """Whether products read encoded blocks on that machine."""
    return target.vector_bytes == 64 or (target.vector_bytes == 32 and target.has("f16c"))


# ---- code


def _product(tile: Tile, code: BlockCode, rows: int) -> Function:
    """A block of C of so many rows: as `gemm.gemm_block`, but for `stride`, which is in bytes."""
    lanes, halves = tile.lanes, WIDTH // tile.lanes
    f = Function(f"rlx_{code.name}_{tile.name}_{rows}", gemm.BLOCK_ARGUMENTS, internal=True, attrs="nounwind noinline")
    block = f.and_(f.add(gemm.block_steps(f), BLOCK - 1), -BLOCK)
    matrix = Matrix.of(f, tile, "%a", "%lda", "%k")

    def block_sums(vectors: int, step: str, at: list[str]) -> Accumulators:
        """The sums of a block, of its numbers without their scales."""
        sums = Accumulators(f, tile, rows, vectors)

        def some_rows(row: str, _: list[str]) -> list[str]:
            thirds = range(0, rows, 3)
            a = [f.opaque(f.gep("%a", f.add(f.add(step, row), f.mul("%lda", i)), tile.scalar)) for i in thirds]
            lines = matrix.lines(f, a, rows)
            own = [f.offset(p, f.add(f.mul(row, ROW), SCALE)) for p in at]
            for p in own:
                f.prefetch(f.offset(p, AHEAD // len(at)))
            for r in range(TOGETHER):
                numbers = [code.numbers(f, f.offset(p, r * ROW + h * lanes), lanes) for p in own for h in range(halves)]
                for s, weights in enumerate(zip(*numbers, strict=True)):

                    def element(i: int, place: int = 4 * (r + s * code.apart)) -> str:
                        return f.splat(f.load(tile.scalar, f.offset(lines[i], place)), lanes)

                    sums.add(element, weights.__getitem__, ordered=rows > 2)
            return []

        sums.loop(0, code.rows, TOGETHER, [], some_rows, runs=True)
        return sums

    def together(panels: int, column: str) -> None:
        vectors = panels * halves
        first = f.offset("%b", f.mul(f.lshr(column, WIDTH.bit_length() - 1), "%stride"))
        starts = [first]
        for _ in range(panels - 1):
            starts.append(f.offset(starts[-1], "%stride"))
        top = f.gep("%c", column, tile.scalar)
        c_rows = [f.gep(top, f.mul("%ldc", i), tile.scalar) for i in range(rows)]

        def k_block(k0: str, at: list[str]) -> list[str]:
            totals = Accumulators(f, tile, rows, vectors)

            def one_block(step: str, at: list[str]) -> list[str]:
                scales = [code.scale(f, f.offset(p, h * lanes), lanes) for p in at for h in range(halves)]
                # while a block is read, totals that find no register lie in memory
                totals.add_scaled(block_sums(vectors, step, at), scales)
                return [f.offset(p, code.block_bytes) for p in at]

            at = totals.loop(k0, f.min(f.add(k0, block), "%k"), BLOCK, at, one_block, runs=True)
            totals.put(c_rows, f.sub("%columns", column), f.cmp("gt", k0, 0))
            return at

        f.loop(0, "%k", block, [("ptr", p) for p in starts], k_block, runs=True)

    panels = _panels(tile, rows)
    whole = f.and_(f.add("%columns", WIDTH - 1), -panels * WIDTH)
    f.loop(0, whole, panels * WIDTH, [], lambda column, _: together(panels, column))
    if panels > 1:
        f.loop(whole, "%columns", WIDTH, [], lambda column, _: together(1, column))
    f.ret()
    return f


def _panels(tile: Tile, rows: int) -> int:
    """Panels at a time: sums, weights of a step with their scales and some more never exceed the registers."""
    halves = WIDTH // tile.lanes
    return next(p for p in (4, 2, 1) if (rows + 2) * p * halves + 2 <= tile.registers or p == 1)


def _in_registers(tile: Tile, code: BlockCode) -> Function:
    """Decodes in registers, for bands of up to `most_rows` rows, as even as can be."""
    f = Function(f"rlx_block_{tile.name}", gemm.BLOCK_ARGUMENTS, attrs="nounwind noinline")
    arguments = [f"%{name}" for _, name in gemm.BLOCK_ARGUMENTS]
    products = {rows: _product(tile, code, rows) for rows in range(1, most_rows(tile.target) + 1)}

    def given(row: str) -> list[Typed]:
        a, c = f.gep("%a", f.mul(row, "%lda"), tile.scalar), f.gep("%c", f.mul(row, "%ldc"), tile.scalar)
        return [{"%a": a, "%c": c}.get(x, x) for x in arguments]

    row_bands(f, products, given)
    f.ret()
    return f


def row_bands(f: Function, products: Mapping[int, Function], given: Callable[[str], list[Typed]]) -> None:
    """Emits calls for all of `%rows`, in bands that are as even as can be.

    `products` are the functions by the rows of a band, `given(row)` the arguments of a band from that row on.
    """
    most = max(products)
    bands = f.div(f.add("%rows", most - 1), most)

    def band(number: str, state: list[str]) -> list[str]:
        (row,) = state
        after = f.div(f.mul("%rows", f.add(number, 1)), bands)
        height, arguments = f.sub(after, row), given(row)

        def of_rows(rows: int) -> Callable[[], None]:
            return lambda: void(f.call(products[rows], arguments))

        f.switch(height, {rows: of_rows(rows) for rows in products})
        return [after]

    f.loop(0, bands, 1, [("i64", 0)], band)


def _decode(tile: Tile, encoding: Encoding) -> Function:
    """A panel as one of f32: each step of a block by the encoding's own expression, over rows of bytes."""
    f = Function(f"rlx_{encoding.name}_decode", [("ptr", "b"), ("ptr", "out"), ("i64", "k")], internal=True)
    lanes, steps = tile.lanes, encoding.block
    k, stored = Lowering(()), Buffer("block", "param", (encoding.block_bytes * ROW,), block_formats.BYTE)

    def one_block(_: str, state: list[str]) -> list[str]:
        at, out = state
        for h in range(0, WIDTH, lanes):
            emitter = Emitter(f, ArgumentTable(), lanes)
            emitter.loaded[stored] = f.offset(at, h)
            scope = Scope(lanes, LANE, {LANE: "0"})  # of the whole block: what its steps share is computed once

            def byte(number: Expr | int) -> Load:
                return Load(stored, (LANE + number * ROW,), block_formats.BYTE)

            for step in range(steps):
                value = emitter.lanes_of(encoding.of_block(k, byte, const(step, I64)), scope)
                f.store(value, f.offset(out, 4 * (WIDTH * step + h)))
        return [f.offset(at, encoding.block_bytes * ROW), f.offset(out, 4 * WIDTH * steps)]

    f.loop(0, "%k", steps, [("ptr", "%b"), ("ptr", "%out")], one_block)
    f.ret()
    return f


def multiplied_in_memory(
    tile: Tile, name: str, decode: Function, block: int, block_bytes: int, decoded: PanelFormat = AS_SUMS, each: int = 1
) -> Function:
    """Decodes two panels to `copy`, as many steps of k at a time as stay in L1, which other products then read.

    `decode(b, out, k)` decodes so many steps of a panel, in blocks of the encoding that take so many bytes of it: to
    panels of the format `decoded`, whose elements have `each` steps.
    """
    f = Function(f"rlx_{name}_many", gemm.BLOCK_ARGUMENTS, internal=True, attrs="nounwind noinline")
    plain = gemm.gemm_block(replace(tile, format=decoded), internal=True, adds=True)
    steps = decoded_steps(block)
    stride, nbytes = f.mul(f.div(f.min("%k", steps), each), WIDTH), steps // block * block_bytes

    def two_panels(column: str, _: list[str]) -> None:
        columns = f.min(f.sub("%columns", column), 2 * WIDTH)
        c, first = f.gep("%c", column, tile.scalar), f.mul(f.lshr(column, WIDTH.bit_length() - 1), "%stride")

        def some_steps(k0: str, state: list[str]) -> list[str]:
            (at,) = state
            k, panels = f.min(f.sub("%k", k0), steps), f.add(f.cast("zext", f.cmp("gt", columns, WIDTH), "i64"), 1)

            def one(i: str, _: list[str]) -> None:
                out = f.gep("%copy", f.mul(i, stride), tile.scalar)
                f.call(decode, [f.offset(at, f.mul(i, "%stride")), out, k])

            f.loop(0, panels, 1, [], one)
            a, more = f.gep("%a", f.div(k0, each), tile.scalar), f.cast("zext", f.cmp("gt", k0, 0), "i64")
            sizes = ["%rows", columns, f.div(k, each), "%most"]
            f.call(plain, [a, "%lda", "%copy", stride, c, "%ldc", *sizes, ("ptr", "null"), more])
            return [f.offset(at, nbytes)]

        f.loop(0, "%k", steps, [("ptr", f.offset("%b", first))], some_steps)

    f.loop(0, "%columns", 2 * WIDTH, [], two_panels)
    f.ret()
    return f


# ---- the format


class EncodedBlocks(PanelFormat):
    """B stays in encoded blocks along k, as it is stored: decoded to a cache."""

    stored = "i8"
    by_tiles = False
    decodes = True  # to the room of `copy`, for any number of rows

    def __init__(self, encoding: Encoding) -> None:
        self.encoding, self.name = encoding, encoding.name

    def refuses(self, kernel: Kernel, anchor: Contract, setting: Setting) -> str | None:
        if accumulates_in(anchor) is not F32:
            return "its sums are not f32"
        stored = encoded_element(anchor.b)
        if stored is None or stored[1].name != self.name:
            return f"its second operand is not {self.name}"
        fits = blocks_of(kernel, anchor) is not None and has_code(setting.target)
        return None if fits else "its rows are no whole blocks along k, or the machine has no code for them"

    def normal(self, kernel: Kernel) -> Kernel:
        return kernel

    def packed(self, kernel: Kernel, anchor: Contract) -> tuple[Expr, Kernel]:
        blocks = blocks_of(kernel, anchor)
        assert blocks is not None
        return _pack_blocks(kernel, anchor, blocks)

    def few(self, target: Target) -> int:
        """Rows up to which weights are decoded in registers."""
        return 0

    def schedule(self, product: MatmulSchedule, target: Target) -> MatmulSchedule:
        return replace(product, few=self.few(target))

    def step_bytes(self, sums: str) -> int:
        return self.encoding.block_bytes * ROW // self.encoding.block

    def panel(self, f: Function, k: str, sums: str) -> str:
        return f.mul(f.div(k, self.encoding.block), self.encoding.block_bytes * ROW)

    def block_routine(self, tile: Tile) -> Routine:
        size = self.encoding.block_bytes * ROW
        decode = _decode(tile, self.encoding)
        f = multiplied_in_memory(tile, self.name, decode, self.encoding.block, size)
        return Routine(f.name, Module([f]).text())


class MultipliedBlocks(EncodedBlocks):
    """B stays in encoded blocks along k, as it is stored: their numbers are multiplied, their sums scaled."""

    by_tiles = True
    decodes = False

    def __init__(self, code: BlockCode) -> None:
        super().__init__(code.encoding)
        self.code = code

    def schedule(self, product: MatmulSchedule, target: Target) -> MatmulSchedule:
        return replace(product, pairs=True, tiles_from=self.code.tiles_from)

    def block_routine(self, tile: Tile) -> Routine:
        f = _in_registers(tile, self.code)
        if tile.target.multiplies_by_tiles(tile.dtype) and tile.lanes == WIDTH:
            f = amx_f32.with_tiles(f, amx_blocks.block(f, self.code))
        return Routine(f.name, Module([f]).text())


def blocks_of(kernel: Kernel, anchor: Contract) -> Blocks | None:
    """The encoded blocks that B is read from, if it is."""
    column = out_vars(len(kernel.stores[0].extents))[-1]
    return find(anchor.b, anchor.n, anchor.k, DEPTH, column)


def _pack_blocks(kernel: Kernel, anchor: Contract, blocks: Blocks) -> tuple[Expr, Kernel]:
    """B as the blocks that it is stored in, those of 16 columns together."""
    n = evaluate(anchor.n, {})
    buffer = blocks.panels(f"{kernel.stores[0].buffer.name}.panels", n, evaluate(anchor.k, {}))
    panel, block, row, lane = own = out_vars(4)
    column = panel * buffer.shape[-1] + lane
    element: Expr = blocks.byte(column, block, row)
    if n % evaluate(buffer.shape[-1], {}):
        inside = column < size_expr(n)
        element = Select(inside, guarded(element, inside), const(0, element.dtype))
    pack = Kernel("pack b", (Store(buffer, buffer.shape, own, element),), nodes=kernel.nodes)
    return Load(buffer, (const(0, I64),) * 4, buffer.dtype), pack


MULTIPLIED = {code.name: MultipliedBlocks(code) for code in block_formats.CODES.values()}
ENCODED = tuple(
    MULTIPLIED.get(encoding.name) or EncodedBlocks(encoding) for encoding in ENCODINGS.values() if encoding.native
)
