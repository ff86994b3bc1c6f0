"""Products of rounded activations with encoded weights: whole numbers, four at a time, and then their scales.

For each block of 32 steps of k and each result

    total += (sum of u * q over the first group, less zero * (sum of q)) * scale * d      (two groups of 16: their sum)
    total -= minimum * d * (sum of q)

with u, zero, scale and minimum of the weights (`q8_codes`) and q, d of the row (`q8_rows`). Sums of a group are exact
in i32, as f32 too, and totals are added up in the order of k. So a row's bits depend on K only. (They overflow where
the sums of a group times a scale do, or where x * scale * u does without the minimum.)
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.accumulators import Accumulators, Matrix
from rlx.backends.cpu.gemm.panels import blocks, q8_rows
from rlx.backends.cpu.gemm.panels.format import PanelFormat
from rlx.backends.cpu.gemm.panels.operands import DEPTH, is_whole, rows_in_place
from rlx.backends.cpu.gemm.panels.q8_codes import (
    BYTES,
    CODES,
    COLUMNS,
    SCALE,
    ZERO_POINT,
    Q8Code,
    Reader,
    fetched_lines,
)
from rlx.backends.cpu.gemm.panels.q8_rows import ROW_SCALE, SCALED_SUMS, SUMS
from rlx.backends.cpu.gemm.panels.rounded_rows import RECORD
from rlx.backends.cpu.gemm.tile import OPERANDS, Tile
from rlx.backends.cpu.llvm.builder import Function, Module, Operand, Typed, constant, vec
from rlx.backends.cpu.llvm.x86 import add_fours, byte_pair_sums, pair_sums
from rlx.backends.cpu.schedule.arguments import Routine
from rlx.backends.cpu.schedule.matmul import MatmulSchedule
from rlx.backends.cpu.strategy import Setting
from rlx.backends.cpu.target import Target
from rlx.ir.casting import ACTIVATION_BLOCK
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import evaluate
from rlx.kernels.expr import (
    I64,
    Apply,
    Cast,
    Const,
    Expr,
    Load,
    Select,
    Var,
    const,
    guarded,
    size_expr,
    substitute_vars,
    transform,
    walk,
)
from rlx.kernels.lowering import Contract, Lowering, out_vars
from rlx.kernels.prepared import is_fixed
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import replace

__all__ = ["Q8_FORMATS", "Q8Blocks", "Q8Bytes"]

F32, U8 = DTYPES["f32"], DTYPES["u8"]
AHEAD = 6000  # bytes: how far ahead is prefetched, of all panels that are read at a time
SPEED = 6  # products a second, of those of f32
OTHER_REGISTERS = 5  # than sums and totals: numbers of two panels, an activation, masks
PAIR_LIMIT = 128  # numbers up to which two products with activations add up within 16 bits

Stored = Callable[[Expr, Expr, "Expr | int"], Expr]  # a byte of B, by column, block and number within the block


class _Fours(PanelFormat):
    """Fours of numbers without sign, up to `most`, times fours of activations, added up in i32."""

    def __init__(self, most: int) -> None:
        self.most = most

    def multiply_add(self, f: Function, tile: Tile, a: str, b: str, total: str) -> str:
        v, lanes, target = tile.vector, tile.lanes, tile.target
        wide = target.has("avx512vnni") and target.has("avx512vl")
        if (wide and lanes == 16) or (lanes == 8 and (wide or target.has("avxvnni"))):
            return add_fours(f, total, b, a, v)
        shorts, octets = vec("i16", 2 * lanes), vec("i8", 4 * lanes)
        if self.most <= PAIR_LIMIT:
            x, y = f.cast("bitcast", a, octets), f.cast("bitcast", b, octets)
            return f.add(total, pair_sums(f, byte_pair_sums(f, y, x), constant(1, shorts)))
        x, y = f.cast("bitcast", a, shorts), f.cast("bitcast", b, shorts)
        total = f.add(total, pair_sums(f, f.ashr(f.shl(x, 8), 8), f.and_(y, 255)))
        return f.add(total, pair_sums(f, f.ashr(x, 8), f.lshr(y, 8)))


class Q8Format(PanelFormat, ABC):
    """Activations rounded to 8 bits times whole numbers in blocks along k, as a code reads them."""

    stored = "i8"
    by_tiles = False

    def __init__(self, code: Q8Code) -> None:
        self.code, self.name = code, f"q8_{code.name}"

    def refuses(self, kernel: Kernel, anchor: Contract, setting: Setting) -> str | None:
        if anchor.activations != "q8":
            return "its activations are not rounded"
        if self.stored_bytes(kernel, anchor) is None:
            return f"its second operand is not {self.code.what}"
        return None if blocks.has_code(setting.target) else "the machine has no code for it"

    @abstractmethod
    def stored_bytes(self, kernel: Kernel, anchor: Contract) -> Stored | None:
        """The bytes of B's blocks, if they are the code's."""

    def layout(self, kernel: Kernel) -> list[Kernel]:
        kernel = self.normal(kernel)
        anchor = kernel.anchor
        assert isinstance(anchor, Contract)
        a, copies = rows_in_place(kernel, anchor, F32)
        a, rounding = q8_rows.ROUND.rows(kernel, replace(anchor, a=a), const(0, I64))
        b, pack = self.packed(kernel, anchor)
        return [*copies, rounding, pack, kernel.with_anchor(replace(anchor, a=a, b=b))]

    def packed(self, kernel: Kernel, anchor: Contract) -> tuple[Expr, Kernel]:
        """Panels [ceil(N / 16), blocks, bytes of a block of 16 columns], field by field."""
        stored, code = self.stored_bytes(kernel, anchor), self.code
        assert stored is not None
        n, count = evaluate(anchor.n, {}), -(-evaluate(anchor.k, {}) // code.block)
        shape = (-(-n // COLUMNS), count, COLUMNS * code.nbytes)
        buffer = Buffer(f"{kernel.stores[0].buffer.name}.panels", "prepared", shape, U8)
        panel, block, turn, row, lane, j = out_vars(6)
        column, k, stores = panel * COLUMNS + lane, Lowering(()), []
        for start, field, in_body in code.places.values():
            turns = code.turns if in_body else 1
            rows = field.rows // turns

            def byte(number: Expr | int) -> Expr:
                return stored(column, block, number)

            element = field.element(k, byte, turn * rows + row, j)
            if n % COLUMNS:
                inside = column < size_expr(n)
                element = Select(inside, guarded(element, inside), const(0, U8))
            at = (row * COLUMNS + lane) * field.width + j + COLUMNS * (turn * code.turn_bytes + start)
            extents = (*shape[:2], turns, rows, COLUMNS, field.width)
            stores.append(Store(buffer, extents, (panel, block, at), element))
        pack = Kernel("pack b", tuple(stores), nodes=kernel.nodes)
        return Load(buffer, (const(0, I64),) * 3, U8), pack

    def schedule(self, product: MatmulSchedule, target: Target) -> MatmulSchedule:
        # reading counts as that of f32: chunks wait for memory, and two threads get more of it than one
        return replace(
            product, pairs=True, records=True, rates=replace(product.rates, flops=SPEED * product.rates.flops)
        )

    def sums(self, a: DType) -> DType:
        return F32

    def step_bytes(self, sums: str) -> int:
        return self.code.nbytes * COLUMNS // self.code.block

    def panel(self, f: Function, k: str, sums: str) -> str:
        blocks = f.div(f.add(k, self.code.block - 1), self.code.block)
        return f.mul(blocks, self.code.nbytes * COLUMNS)

    def block_routine(self, tile: Tile) -> Routine:
        """One panel after another, or two, and for each bands of a few rows, which find them in a cache."""
        f = Function(f"rlx_block_{tile.name}", gemm.BLOCK_ARGUMENTS, attrs="nounwind noinline")
        few, many, panels_of_many = _shapes(tile, self.code)
        shapes = dict.fromkeys([*few.items(), *((rows, panels_of_many) for rows in many)])
        products = {shape: _product(tile, self.code, *shape) for shape in shapes}

        def panels_at_a_time(panels: int, heights: Sequence[int]) -> None:
            made = {rows: products[rows, panels] for rows in heights}
            f.loop(0, "%columns", panels * COLUMNS, [], lambda column, _: _bands(f, tile, made, column, panels))

        def few_rows() -> None:
            one, two = ([rows for rows, panels in few.items() if panels == count] for count in (1, 2))
            if two:
                in_two = functools.reduce(f.or_, [f.cmp("eq", "%rows", rows) for rows in two])
                f.if_(in_two, lambda: panels_at_a_time(2, two), lambda: panels_at_a_time(1, one))
            else:
                panels_at_a_time(1, one)

        f.if_(f.cmp("le", "%rows", max(few)), few_rows, lambda: panels_at_a_time(panels_of_many, many))
        f.ret()
        return Routine(f.name, Module([f]).text())


def _shapes(tile: Tile, code: Q8Code) -> tuple[dict[int, int], Sequence[int], int]:
    """How many panels products of so many rows read at a time; the rows of the bands of more rows, and their panels.

    One or two rows wait for memory, which is read fastest one panel at a time. For 7 or 8 there are no registers for
    the sums of two and all totals (`_Columns.kept`), and two bands would make numbers of the weights twice. Where a
    block has one scale and no minimum, that takes less time than reading each activation for one panel only.
    """
    if tile.lanes < COLUMNS:
        return dict.fromkeys(range(1, 5), 1), range(2, 5), 1
    halves = code.group < ACTIVATION_BLOCK
    in_two = (3, 4) if halves else range(3, 7 if code.minima else 9)
    few = {rows: 2 if rows in in_two else 1 for rows in range(1, 9)}
    return (few, range(4, 9), 1) if halves else (few, range(4, 7), 2)


def _bands(f: Function, tile: Tile, products: Mapping[int, Function], column: str, panels: int) -> None:
    """All rows, in bands that are as even as can be, times so many panels from a column on."""
    b = f.offset("%b", f.mul(f.div(column, COLUMNS), "%stride"))
    top, left = f.gep("%c", column, tile.scalar), f.sub("%columns", column)
    # the second of two panels that does not exist is the first one again, of which no column is stored
    stride = "%stride" if panels == 1 else f.select(f.cmp("le", left, COLUMNS), 0, "%stride", "i64")

    def given(row: str) -> list[Typed]:
        a, c = f.gep("%a", f.mul(row, "%lda"), tile.scalar), f.gep(top, f.mul(row, "%ldc"), tile.scalar)
        return [a, "%lda", b, stride, c, "%ldc", left, "%k"]

    blocks.row_bands(f, products, given)


def _product(tile: Tile, code: Q8Code, rows: int, panels: int) -> Function:
    """So many rows of C and panels over all of K; rows of A are records, strides of panels in bytes."""
    arguments = [*OPERANDS, ("i64", "n"), ("i64", "k")]
    f = Function(f"rlx_{tile.name}_{rows}x{panels}", arguments, internal=True, attrs="nounwind noinline")
    _Columns(f, tile, code, rows, panels).emit()
    f.ret()
    return f


class _Columns:
    """The code of some rows and some panels."""

    def __init__(self, f: Function, tile: Tile, code: Q8Code, rows: int, panels: int) -> None:
        self.f, self.tile, self.code, self.rows, self.panels = f, tile, code, rows, panels
        self.lanes = tile.lanes
        self.firsts = range(0, COLUMNS, tile.lanes)
        self.vectors = panels * len(self.firsts)
        self.matrix = Matrix.of(f, tile, "%a", "%lda", "%k")
        self.whole = replace(tile, dtype="i32", format=_Fours(code.most))
        self.totals = Accumulators(f, tile, rows, self.vectors)
        # of the totals, those that stay in registers while sums of 32 steps do; the others wait on the stack
        count = rows * self.vectors
        free = tile.registers - count - OTHER_REGISTERS
        self.kept = free if panels > 1 and free < count else count
        self.waiting = f.alloca(tile.vector, count - self.kept) if self.kept < count else ""

    def emit(self) -> None:
        f, tile, code = self.f, self.tile, self.code
        starts = ["%b"]
        for _ in range(self.panels - 1):
            starts.append(f.offset(starts[-1], "%stride"))
        c_rows = [f.gep("%c", f.mul("%ldc", i), tile.scalar) for i in range(self.rows)]
        thirds = [self.matrix.at(f, tile, i) for i in range(0, self.rows, 3)]
        rooms = [f.alloca("i8", code.kept * self.lanes) if code.kept else "" for _ in range(self.vectors)]
        count, turns = len(thirds), code.turns

        self.put_aside()

        # from so many blocks before the end of a panel on, the panels to come are prefetched
        early = -(-AHEAD // self.panels // (code.nbytes * COLUMNS))
        beyond = f.mul("%stride", self.panels - 1)

        def one_block(k: str, state: list[str]) -> list[str]:
            lines, at = state[:count], state[count:]
            places = [(p, first) for p in at for first in self.firsts]
            readers = [Reader(f, code, p, first, self.lanes, r) for (p, first), r in zip(places, rooms, strict=True)]
            for reader in readers:
                code.begin(reader)
            last = f.cmp("ge", f.add(k, early * code.block), "%k")
            ahead = f.add(f.select(last, beyond, 0), early * code.nbytes * COLUMNS)

            def turn(number: Operand, lines: list[str]) -> list[str]:
                self.fetched = fetched_lines(f, code, [f.offset(p, ahead) for p in at], number)
                return self.turn(readers, number, lines)

            lines = self.totals.loop(0, turns, 1, lines, turn, runs=True) if turns > 1 else turn(0, lines)
            return [*lines, *(f.offset(p, code.nbytes * COLUMNS) for p in at)]

        self.totals.loop(0, "%k", code.block, [*thirds, *starts], one_block, runs=True)
        self.bring_back()
        self.totals.put(c_rows, "%n", None)

    def waiting_places(self) -> list[str]:
        """Where the totals are that wait, which LLVM is not to know of: it would choose other ones."""
        room = self.f.opaque(self.waiting) if self.waiting else ""
        count = self.rows * self.vectors - self.kept
        return [self.f.offset(room, 4 * self.lanes * number) for number in range(count)]

    def put_aside(self) -> None:
        """Leaves the totals in registers that stay there."""
        values, self.totals.values = self.totals.values, self.totals.values[: self.kept]
        for value, p in zip(values[self.kept :], self.waiting_places(), strict=True):
            self.f.store(value, p, ty=self.tile.vector)

    def bring_back(self) -> None:
        """All totals again."""
        self.totals.values += [self.f.load(self.tile.vector, p) for p in self.waiting_places()]

    def turn(self, readers: list[Reader], number: Operand, lines: list[str]) -> list[str]:
        """Adds a turn of the weights; the rows after it."""
        f, code, matrix = self.f, self.code, self.matrix
        lines = [f.opaque(p) for p in lines] if len(lines) > 1 else lines
        rows = matrix.lines(f, lines, self.rows)
        parts = code.turn // ACTIVATION_BLOCK
        for reader in readers:
            reader.begin_turn(number)
        for part in range(parts):
            if part:  # else LLVM would keep vectors of the part before, most of them in memory
                for reader in readers:
                    reader.body = f.opaque(reader.body)
            self.part(readers, part, [f.offset(p, part * RECORD) for p in rows])
        return [f.offset(p, parts * RECORD) for p in lines]

    def part(self, readers: list[Reader], part: int, records: list[str]) -> None:
        """Adds 32 steps of k, whose activations are at `records`."""
        f, code, size = self.f, self.code, self.code.group
        groups, fours = range(ACTIVATION_BLOCK // size), range(size // 4)
        # a few sums would wait for their own last products: those of two groups take turns, or two chains of one
        few = not code.minima and 4 * self.rows * self.vectors <= self.tile.registers
        chains = 2 if few and len(groups) == 1 else 1
        made = [
            Accumulators(f, self.whole, self.rows, self.vectors, self.less_zero(readers, records, g), chains)
            for g in groups
        ]
        for g, r in [(g, r) for r in fours for g in groups] if few else [(g, r) for g in groups for r in fours]:
            self.four(readers, part, records, made[g], g * len(fours) + r, r % chains)
        for sums in made:
            sums.join()
        scales = [[code.scale(reader, part * len(groups) + g) for reader in readers] for g in groups]
        own = [f.splat(f.load("float", f.offset(p, ROW_SCALE)), self.lanes) for p in records]
        by_group = [[scale for scale in some if scale is not None] for some in scales]
        self.bring_back()
        self.totals.add_groups(list(zip(made, by_group, strict=True)), own)
        for g in groups if code.minima else ():
            minima = [code.minimum(reader, part * len(groups) + g) for reader in readers]
            less = [self.sum(p, g, scaled=True) for p in records]
            self.totals.add(less.__getitem__, minima.__getitem__)
        if self.code.minima or self.code.group == 16:  # else LLVM would make them after the next part's, from memory
            self.totals.values = [self.tile.ordered(f, x) for x in self.totals.values]
        self.put_aside()

    def four(
        self, readers: list[Reader], part: int, records: list[str], sums: Accumulators, step: int, chain: int
    ) -> None:
        """Adds the products of a four of a part."""
        f, number = self.f, part * ACTIVATION_BLOCK // 4 + step
        for p, line in self.fetched[number]:
            f.prefetch(f.offset(p, line))
        fours = [self.code.four(reader, number) for reader in readers]

        def a(i: int) -> str:
            return f.splat(f.load("i32", f.offset(records[i], 4 * step)), self.lanes)

        sums.add(a, fours.__getitem__, ordered=True, chain=chain)

    def sum(self, record: str, group: int, *, scaled: bool = False) -> str:
        """Less the sum of a group of activations, in all lanes; `scaled`: times d."""
        f, place = self.f, (SCALED_SUMS if scaled else SUMS) + 4 * (group if self.code.group == 16 else 2)
        return f.splat(f.load("float" if scaled else "i32", f.offset(record, place)), self.lanes)

    def less_zero(self, readers: list[Reader], records: list[str], group: int) -> list[str] | None:
        """What sums of a group begin with."""
        if self.code.zeroed:
            zeros = [self.code.zeros(reader) for reader in readers]
            return [self.f.mul(z, less) for less in (self.sum(p, group) for p in records) for z in zeros]
        if not self.code.zero:
            return None
        first = []
        for p in records:
            value = self.f.shl(self.sum(p, group), self.code.zero.bit_length() - 1)
            first.extend([value] * self.vectors)
        return first


class Q8Blocks(Q8Format):
    """Activations rounded to 8 bits times weights in encoded blocks along k, multiplied as whole numbers."""

    def stored_bytes(self, kernel: Kernel, anchor: Contract) -> Stored | None:
        found = blocks.blocks_of(kernel, anchor)
        if found is None or found.encoding.name != self.code.name:
            return None

        def byte(column: Expr, block: Expr, number: Expr | int) -> Expr:
            return found.byte(column, block, const(number, I64) if isinstance(number, int) else number)

        return byte


class Q8Bytes(Q8Format):
    """Activations rounded to 8 bits times weights of bytes, less a zero point, scaled by column or by blocks of k."""

    def stored_bytes(self, kernel: Kernel, anchor: Contract) -> Stored | None:
        """Elements 32 * block ... of a column, and by numbers of their own its zero point and scale."""
        code, k, column_var = self.code, anchor.k, out_vars(len(kernel.stores[0].extents))[-1]
        b, scale = _scaled_by_blocks(anchor.b)
        read = _bytes_of(b)
        free = {x for x in walk(anchor.b) if isinstance(x, Var)}
        if read is None or not (
            free <= {DEPTH, column_var} and isinstance(k, int) and isinstance(anchor.n, int) and k > 0
        ):
            return None
        data, zero = read
        parts = {ZERO_POINT: zero, SCALE: scale}
        kind = "u4" if _is_nibble(data) else data.dtype
        name = f"{kind}{'_zero' if zero is not None else ''}{'_scaled' if scale is not None else ''}"
        if name != code.name or not all(_is_of_blocks(x) for x in parts.values() if x is not None):
            return None

        def byte(column: Expr, block: Expr, number: Expr | int) -> Expr:
            if isinstance(number, int):
                part = parts[number]
                assert part is not None
                made = substitute_vars(part, {column_var: column, DEPTH: block * code.block})
            else:
                depth = block * code.block + number
                made, inside = substitute_vars(data, {column_var: column, DEPTH: depth}), depth < size_expr(k)
                if k % code.block:
                    made = Select(inside, guarded(made, inside), const(0, made.dtype))
            return Apply("bitcast", (made,), U8) if made.dtype.name == "i8" else made

        return byte


def _is_nibble(data: Expr) -> bool:
    """Whether it is below 16 by how it is made: of one of two numbers in a byte."""
    match data:
        case Apply(fn="and", args=(_, Const(value=15))):
            return True
        case Select(a=a, b=Apply(fn="shr", args=(x, Const(value=4)))):
            return x.dtype is U8 and _is_nibble(a)
    return False


def _scaled_by_blocks(b: Expr) -> tuple[Expr, Expr | None]:
    """B without the scale that its blocks of k have, and that."""
    match b:
        case Apply(fn="mul", args=(value, scale)) if is_whole(value) and is_fixed(scale) and scale.dtype is F32:
            return value, scale
    return b, None


def _is_of_blocks(part: Expr) -> bool:
    """Whether it is the same for all steps of k of a block: k is in it as k // n only, with n whole blocks."""
    bare = transform(part, lambda x: const(0, I64) if _is_number_of_blocks(x) else None)
    return DEPTH not in set(walk(bare))


def _is_number_of_blocks(x: Expr) -> bool:
    match x:
        case Apply(fn="floordiv", args=(k, Const(value=n))):
            return k == DEPTH and isinstance(n, int) and n % ACTIVATION_BLOCK == 0
    return False


def _bytes_of(b: Expr) -> tuple[Expr, Expr | None] | None:
    """The bytes that are the elements of B, and those that are taken off them; None where it is no whole number."""
    match b:
        case Cast(value=data) if is_whole(b):
            return data, None
        case Apply(fn="sub", args=(Cast(value=data), Cast(value=zero))) if is_whole(b):
            return data, zero
        case Apply(fn="sub", args=(Cast(value=data), Const(value=number))) if is_whole(b):
            assert isinstance(number, float)
            return data, const(int(number), data.dtype)
    return None


Q8_FORMATS = (*(Q8Blocks(code) for code in CODES.values()), *(Q8Bytes(code) for code in BYTES.values()))
