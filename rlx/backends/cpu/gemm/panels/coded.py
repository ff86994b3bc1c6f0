"""Products of f32 with encoded weights, from panels as products of whole numbers have them (`q8_codes`).

A weight is made as its encoding says, scale * (u - zero) - minimum with one rounding each (before a minimum the product
is exact: of at most 17 and 5 bits). Up to four rows make the weights of a few panels in registers, more rows those of
two panels in memory that stays in L1, as `blocks` does. Sums are chains of fma over 128 steps of k, added up in order,
either way: the bits of a row depend on K only.

Where operands are rounded to bf16, two steps of weights become words of pairs (`bf16`), which are multiplied: chains
are over 128 steps, or over 256 where a block of the encoding has so many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.accumulators import Accumulators, Matrix
from rlx.backends.cpu.gemm.panels.bf16 import BF16_PAIRS, added_pairs, beside, rounded_rows
from rlx.backends.cpu.gemm.panels.blocks import ENCODED, EncodedBlocks, has_code, multiplied_in_memory
from rlx.backends.cpu.gemm.panels.format import AS_SUMS, PanelFormat
from rlx.backends.cpu.gemm.panels.operands import accumulates_in
from rlx.backends.cpu.gemm.panels.q8 import Q8Blocks, Q8Bytes
from rlx.backends.cpu.gemm.panels.q8_codes import BYTES, CODES, COLUMNS, Q8Code, Reader, fetched_lines
from rlx.backends.cpu.gemm.tile import Tile
from rlx.backends.cpu.llvm.builder import Function, Module, Operand, vec, void
from rlx.backends.cpu.schedule.arguments import Routine
from rlx.backends.cpu.schedule.matmul import PRODUCT_BLOCK, MatmulSchedule, decoded_steps
from rlx.backends.cpu.strategy import Setting
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.encoding import Encoding
from rlx.kernels.expr import Cast, Expr, const
from rlx.kernels.lowering import Contract
from rlx.kernels.program import Kernel
from rlx.records import replace

__all__ = ["IN_BLOCKS", "PAIRED", "SCALED", "CodedBlocks"]

F32 = DTYPES["f32"]

AHEAD = 6000  # bytes: how far ahead is prefetched, of all panels that are read at a time

Emit = Callable[[int, list[str]], None]  # of a step of a turn, and its weights in vectors


def _shapes(target: Target, pairs: bool = False) -> Mapping[int, int]:
    """Rows that make weights in registers, and the panels they read at a time, so that enough chains are under way.

    A step of pairs takes so many instructions that two chains suffice, and more panels would want more registers.
    """
    if target.vector_bytes < 64:
        return {1: 2, 2: 1}
    return {1: 2 if pairs else 4, 2: 2, 3: 2, 4: 2}


class _Coded(PanelFormat):
    """Base of formats whose panels are those of a code of whole numbers."""

    stored = "i8"
    by_tiles = False
    pairs = False  # weights are rounded to bf16, and multiplied two at a time
    whole: Q8Code

    def schedule(self, product: MatmulSchedule, target: Target) -> MatmulSchedule:
        return replace(product, few=max(_shapes(target)))

    def step_bytes(self, sums: str) -> int:
        return self.whole.nbytes * COLUMNS // self.whole.block

    def panel(self, f: Function, k: str, sums: str) -> str:
        return f.mul(f.div(k, self.whole.block), self.whole.nbytes * COLUMNS)

    def block_routine(self, tile: Tile) -> Routine:
        """Decodes in registers where `copy` is null, else to that room."""
        f = Function(f"rlx_block_{tile.name}", gemm.BLOCK_ARGUMENTS, attrs="nounwind noinline")
        arguments = [f"%{name}" for _, name in gemm.BLOCK_ARGUMENTS]
        code = self.whole
        sizes, decoded = (code.block, code.nbytes * COLUMNS), (BF16_PAIRS, 2) if self.pairs else (AS_SUMS, 1)
        many = multiplied_in_memory(tile, self.name, _decode(tile, code, self.pairs), *sizes, *decoded)
        shapes = _shapes(tile.target, self.pairs).items()
        few = {rows: _few_rows(tile, code, rows, panels, self.pairs) for rows, panels in shapes}

        def of_rows(rows: int) -> Callable[[], None]:
            return lambda: void(f.call(few[rows], arguments))

        f.if_(
            f.cmp("eq", "%copy", "null"),
            lambda: f.switch("%rows", {rows: of_rows(rows) for rows in few}),
            lambda: void(f.call(many, arguments)),
        )
        f.ret()
        return Routine(f.name, Module([f]).text())


class CodedBlocks(_Coded, EncodedBlocks):
    """B stays in encoded blocks along k, ordered as for products of whole numbers: decoded in registers or to L1."""

    def __init__(self, encoding: Encoding, code: Q8Code) -> None:
        super().__init__(encoding)
        self.whole = code

    def few(self, target: Target) -> int:
        return max(_shapes(target))

    def packed(self, kernel: Kernel, anchor: Contract) -> tuple[Expr, Kernel]:
        return Q8Blocks(self.whole).packed(kernel, anchor)


class CodedBytes(_Coded):
    """B stays in bytes, or two numbers to a byte, with scales by blocks of k: decoded in registers or to L1."""

    def __init__(self, code: Q8Code) -> None:
        self.whole, self.name = code, code.name

    def refuses(self, kernel: Kernel, anchor: Contract, setting: Setting) -> str | None:
        if accumulates_in(anchor) is not F32:
            return "its sums are not f32"
        if setting.target.multiplies_by_tiles("f32"):
            return "tile registers multiply panels of f32"
        if not isinstance(anchor.k, int) or anchor.k % self.whole.block:
            return f"its sums are not over whole blocks of {self.whole.block}"
        if Q8Bytes(self.whole).stored_bytes(kernel, anchor) is None:
            return f"its second operand is not {self.whole.what}"
        return None if has_code(setting.target) else "the machine has no code for it"

    def packed(self, kernel: Kernel, anchor: Contract) -> tuple[Expr, Kernel]:
        return Q8Bytes(self.whole).packed(kernel, anchor)


class CodedPairs(_Coded):
    """Operands rounded to bf16 and multiplied in pairs, of which B stays in encoded blocks along k, or in bytes."""

    pairs = True

    def __init__(self, of: CodedBlocks | CodedBytes) -> None:
        self.of_f32, self.whole, self.name = of, of.whole, f"{of.name}_pairs"

    def refuses(self, kernel: Kernel, anchor: Contract, setting: Setting) -> str | None:
        if anchor.activations != "bf16" or not isinstance(anchor.b, Cast):
            return "its operands are not rounded to bf16"
        if not setting.target.multiplies_bf16:
            return "the machine has no AVX512-BF16"
        if setting.target.float_tiles:
            return "tile registers multiply panels of pairs"
        unrounded = replace(anchor, a=const(0.0, F32), b=anchor.b.value, activations="")
        return self.of_f32.refuses(kernel, unrounded, setting)

    def normal(self, kernel: Kernel) -> Kernel:
        return kernel

    def layout(self, kernel: Kernel) -> list[Kernel]:
        anchor = kernel.anchor
        assert isinstance(anchor, Contract)
        assert isinstance(anchor.b, Cast)
        a, made = rounded_rows(kernel, anchor)
        b, pack = self.of_f32.packed(kernel, replace(anchor, b=anchor.b.value))
        return [*made, pack, kernel.with_anchor(replace(anchor, a=a, b=b))]

    def sums(self, a: DType) -> DType:
        return F32

    def multiply_add(self, f: Function, tile: Tile, a: str, b: str, total: str) -> str:
        return added_pairs(f, a, b, total)


# ---- weights


def _weights(f: Function, tile: Tile, readers: list[Reader], emit: Emit, fetched: list[list[tuple[str, int]]]) -> None:
    """Makes the weights of a turn that the readers have begun, step by step."""
    code, v = readers[0].code, vec("float", tile.lanes)
    scales: list[str | None] = []
    minima: list[str] = []
    for number in range(code.turn // 4):
        if 4 * number % code.group == 0:
            group = 4 * number // code.group
            scales = [code.scale(r, group) for r in readers]
            minima = [f.neg(code.minimum(r, group)) for r in readers] if code.minima else []
        for p, line in fetched[number] if fetched else ():
            f.prefetch(f.offset(p, line))
        fours = [code.numbers(r, number) for r in readers]
        for j in range(4):
            made = []
            for i, x in enumerate(fours):
                w, scale = x[j], scales[i]
                if scale is not None:  # scales of codes with minima have 17 bits: products are exact
                    w = f.fma(w, scale, minima[i], v) if minima else f.mul(w, scale, v)
                made.append(w)
            emit(4 * number + j, made)


def _in_pairs(f: Function, emit: Emit) -> Emit:
    """Has what takes steps take those that two steps become: words of a pair of bf16."""
    first: list[str] = []

    def step(number: int, weights: list[str]) -> None:
        if number % 2 == 0:
            first[:] = weights
        else:
            emit(number // 2, [beside(f, *both) for both in zip(first, weights, strict=True)])

    return step


def _readers(f: Function, tile: Tile, code: Q8Code, starts: list[str], rooms: list[str]) -> list[Reader]:
    """Those of the blocks at `starts`, begun."""
    places = [(p, first) for p in starts for first in range(0, COLUMNS, tile.lanes)]
    readers = [Reader(f, code, p, first, tile.lanes, room) for (p, first), room in zip(places, rooms, strict=True)]
    for reader in readers:
        code.begin(reader)
    return readers


def _rooms(f: Function, tile: Tile, code: Q8Code, panels: int) -> list[str]:
    vectors = panels * COLUMNS // tile.lanes
    return [f.alloca("i8", code.kept * tile.lanes) if code.kept else "" for _ in range(vectors)]


def _decode(tile: Tile, code: Q8Code, pairs: bool = False) -> Function:
    """A panel as one of f32, or of pairs of bf16."""
    f, each = (
        Function(f"rlx_{code.name}_decode", [("ptr", "b"), ("ptr", "out"), ("i64", "k")], internal=True),
        1 + pairs,
    )
    rooms = _rooms(f, tile, code, 1)

    def one_block(_: str, state: list[str]) -> list[str]:
        at, out = state
        readers = _readers(f, tile, code, [at], rooms)

        def turn(number: Operand, state: list[str]) -> list[str]:
            (out,) = state
            for reader in readers:
                reader.begin_turn(number)

            def store(step: int, weights: list[str]) -> None:
                for i, w in enumerate(weights):
                    f.store(w, f.offset(out, 4 * (COLUMNS * step + i * tile.lanes)))

            lines = fetched_lines(f, code, [f.offset(at, AHEAD)], number)
            _weights(f, tile, readers, _in_pairs(f, store) if pairs else store, lines)
            return [f.offset(out, 4 * COLUMNS * code.turn // each)]

        (out,) = f.loop(0, code.turns, 1, [("ptr", out)], turn, runs=True) if code.turns > 1 else turn(0, [out])
        return [f.offset(at, code.nbytes * COLUMNS), out]

    f.loop(0, "%k", code.block, [("ptr", "%b"), ("ptr", "%out")], one_block)
    f.ret()
    return f


# ---- few rows


def _few_rows(tile: Tile, code: Q8Code, rows: int, panels: int, pairs: bool) -> Function:
    """A block of C of so many rows: as `gemm.gemm_block`, but for `stride`, which is in bytes."""
    f = Function(f"rlx_{code.name}_{rows}", gemm.BLOCK_ARGUMENTS, internal=True, attrs="nounwind noinline")
    columns = _FewRows(f, tile, code, rows, panels, pairs)
    f.loop(0, "%columns", panels * COLUMNS, [], lambda column, _: columns.emit(column))
    f.ret()
    return f


class _FewRows:
    """The code of some rows and some panels."""

    def __init__(self, f: Function, tile: Tile, code: Q8Code, rows: int, panels: int, pairs: bool) -> None:
        self.pairs, self.chain = pairs, decoded_steps(code.block) if pairs else PRODUCT_BLOCK
        self.f, self.tile, self.code, self.rows, self.panels = f, tile, code, rows, panels
        self.vectors = panels * COLUMNS // tile.lanes
        self.matrix = Matrix.of(f, tile, "%a", "%lda", "%k")
        self.rooms = _rooms(f, tile, code, panels)

    def emit(self, column: str) -> None:
        """Panels from a column on, times all rows."""
        f, tile, code = self.f, self.tile, self.code
        self.left = f.sub("%columns", column)
        top = f.gep("%c", column, tile.scalar)
        self.c_rows = [f.gep(top, f.mul("%ldc", i), tile.scalar) for i in range(self.rows)]
        # those that do not exist are the last one again, of which no column is stored
        last = f.div(f.sub(self.left, 1), COLUMNS)
        first = f.offset("%b", f.mul(f.div(column, COLUMNS), "%stride"))
        starts = [first, *(f.offset(first, f.mul(f.min(i, last), "%stride")) for i in range(1, self.panels))]
        thirds = [self.matrix.at(f, tile, i) for i in range(0, self.rows, 3)]

        def some_steps(k0: str, state: list[str]) -> list[str]:
            if code.block < PRODUCT_BLOCK:
                return self.blocks(k0, f.min(f.add(k0, PRODUCT_BLOCK), "%k"), state)
            return self.parts(k0, state)

        state = [("ptr", p) for p in (*thirds, *starts)]
        f.loop(0, "%k", max(PRODUCT_BLOCK, code.block), state, some_steps)

    def begun(self, k: str, at: list[str]) -> tuple[list[Reader], list[str]]:
        """The readers of a block, and what is prefetched meanwhile."""
        f, code = self.f, self.code
        size = code.nbytes * COLUMNS
        early = -(-AHEAD // self.panels // size)
        last = f.cmp("ge", f.add(k, early * code.block), "%k")
        ahead = f.add(f.select(last, f.mul("%stride", self.panels - 1), 0), early * size)
        return _readers(f, self.tile, code, at, self.rooms), [f.offset(p, ahead) for p in at]

    def blocks(self, k0: str, stop: str, state: list[str]) -> list[str]:
        """Adds blocks of the encoding that are a block of k together."""
        f, code, count = self.f, self.code, len(state) - self.panels
        totals = Accumulators(f, self.tile, self.rows, self.vectors)

        def one_block(k: str, state: list[str]) -> list[str]:
            lines, at = state[:count], state[count:]
            readers, ahead = self.begun(k, at)
            lines = self.turn(totals, readers, ahead, 0, lines)
            return [*lines, *(f.offset(p, code.nbytes * COLUMNS) for p in at)]

        state = totals.loop(k0, stop, code.block, state, one_block, runs=True)
        totals.put(self.c_rows, self.left, f.cmp("gt", k0, 0))
        return state

    def parts(self, k0: str, state: list[str]) -> list[str]:
        """Adds a block of the encoding, which is some blocks of k."""
        f, code, count = self.f, self.code, len(state) - self.panels
        lines, at = state[:count], state[count:]
        readers, ahead = self.begun(k0, at)
        turns = self.chain // code.turn
        for part in range(code.block // self.chain):
            totals, begin = Accumulators(f, self.tile, self.rows, self.vectors), part * turns

            def turn(number: str, lines: list[str], totals: Accumulators = totals) -> list[str]:
                return self.turn(totals, readers, ahead, number, lines)

            lines = totals.loop(begin, begin + turns, 1, lines, turn, runs=True)
            totals.put(self.c_rows, self.left, f.cmp("gt", f.add(k0, part), 0))
        return [*lines, *(f.offset(p, code.nbytes * COLUMNS) for p in at)]

    def turn(
        self, totals: Accumulators, readers: list[Reader], ahead: list[str], number: Operand, lines: list[str]
    ) -> list[str]:
        """Adds a turn; the rows after it."""
        f, tile = self.f, self.tile
        lines = [f.opaque(p) for p in lines] if len(lines) > 1 else lines
        rows = self.matrix.lines(f, lines, self.rows)
        for reader in readers:
            reader.begin_turn(number)

        def add(step: int, weights: list[str]) -> None:
            def a(i: int) -> str:
                return f.splat(f.load(tile.scalar, f.offset(rows[i], 4 * step)), tile.lanes)

            totals.add(a, weights.__getitem__)
            if step % 4 == 3:  # else LLVM would make many weights before it uses them
                totals.values = [tile.ordered(f, x) for x in totals.values]

        emit = _in_pairs(f, add) if self.pairs else add
        _weights(f, tile, readers, emit, fetched_lines(f, self.code, ahead, number))
        return [f.offset(p, 4 * self.code.turn // (1 + self.pairs)) for p in lines]


def _in_blocks(format: EncodedBlocks) -> EncodedBlocks:
    """The format of an encoding: blocks whose sums are scaled stay as they are stored, also for tile registers."""
    code = CODES.get(format.name)
    return CodedBlocks(format.encoding, code) if code and format.decodes else format


SCALED = tuple(CodedBytes(code) for code in BYTES.values() if code.name.endswith("_scaled"))
IN_BLOCKS = tuple(_in_blocks(format) for format in ENCODED)
PAIRED = (
    *(CodedPairs(CodedBlocks(format.encoding, CODES[format.name])) for format in ENCODED if format.name in CODES),
    *(CodedPairs(format) for format in SCALED),
)
