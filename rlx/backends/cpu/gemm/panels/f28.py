"""Panels of f32 in 28 bits a number, without loss, for products of so few rows that they wait for memory.

The numbers of a panel lie within 16 powers of two, but for a few: four bits tell which, and eight steps of k take the
room of seven. A word holds the sign, these four bits and the mantissa of an element of the first seven where f32 has
them, and in the four bits that this leaves (27 to 30) a part of the eighth element. Steps in which a number is further
from the largest (zero is, too) are kept as they are: a byte for each eight of them says so. Numbers are unpacked in
registers, so a product has the bits that it has with plain panels.

A panel is, in bytes: what is added to words to make f32 of them (i32, in 64 bytes), a byte for each eight steps of k,
filled up to a multiple of 64, and the steps, 448 or 512 each eight. Panels follow one another, up to `TOGETHER` of
them; the next ones begin where they would if nothing were shortened. Before all lies where each begins (i64, bytes).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.accumulators import Accumulators
from rlx.backends.cpu.gemm.panels import plain
from rlx.backends.cpu.gemm.panels.format import PanelFormat
from rlx.backends.cpu.gemm.panels.operands import DEPTH, accumulates_in
from rlx.backends.cpu.gemm.tile import Tile
from rlx.backends.cpu.llvm.builder import Function, Module, vec, void
from rlx.backends.cpu.schedule.arguments import Routine
from rlx.backends.cpu.schedule.matmul import WIDTH, MatmulSchedule
from rlx.backends.cpu.strategy import Setting, Step
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import Size, evaluate, upper
from rlx.kernels.expr import Expr, Load, const
from rlx.kernels.lowering import Contract, out_vars
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import replace
from rlx.units import bytes_text

__all__ = ["F28_PANELS", "LARGE", "SHORTENING", "STREAMED", "elements", "most_rows", "unsuited"]

F32 = DTYPES["f32"]

GROUP = 8  # steps of k that are kept together
TOGETHER = 16  # panels without gaps between them
STREAMED = 8 << 20  # bytes of weights of a model from which on they are read from memory in every run
LEAST, LARGE = 1 << 18, 4 << 20  # bytes of the weights of a product
AHEAD = 4096  # bytes: how far ahead is prefetched, of all panels that are read at a time
HEAD = 64  # bytes of what is added to words
STEP = 4 * WIDTH  # bytes of a step of a panel
SIGN, EXPONENT, KEPT, FOREIGN = -(1 << 31), 0x7F800000, 0x87FFFFFF - (1 << 32), 27
SPAN = 16 << 23  # exponents within 16 of each other differ by less


def most_rows(target: Target, weights: int) -> int:
    """Rows of a product with so many bytes of weights, at most: with more, unpacking takes longer than it saves."""
    if target.vector_bytes < 64:
        return 4
    return 12 if weights >= LARGE else 8


def unsuited(m: Size, n: Size, k: Size, target: Target) -> str | None:
    """Why panels [K, N] for products of m rows are not shortened, in a model whose weights are streamed; None if so."""
    most = upper(m)
    if target.vector_bytes < 32:
        return "the machine's vectors are too short"
    if most is None:
        return "its rows have no bound"
    if not isinstance(k, int) or not isinstance(n, int) or k % GROUP:
        return f"its depth is no multiple of {GROUP}, or of open size"
    if 4 * k * n < LEAST:
        return f"it has less than {LEAST >> 10} KiB of weights"
    limit = most_rows(target, 4 * k * n)
    return None if most <= limit else f"it may have more than {limit} rows"


def elements(k: int, n: int) -> int:
    """Elements of f32 of [K, N] in such panels, at most."""
    panels = -(-n // WIDTH)
    return (-(-panels // 8) * 64 + panels * (HEAD + -(-k // (GROUP * 64)) * 64 + k * STEP)) // 4


def begin(f: Function, k: str) -> str:
    """Bytes of a panel before its steps."""
    flags = f.lshr(f.add(k, GROUP * 64 - 1), (GROUP * 64).bit_length() - 1)
    return f.add(f.mul(flags, 64), HEAD)


def room(f: Function, panels: str, panel: str, k: str) -> str:
    """Bytes before a panel if nothing were shortened; the places come first."""
    places = f.mul(f.lshr(f.add(panels, 7), 3), 64)
    return f.add(places, f.mul(panel, f.add(f.mul(k, STEP), begin(f, k))))


def pieces(row: int) -> list[tuple[int, int]]:
    """Which bits of the eighth element the word of a step holds: masks, and how far left they have to go there."""
    if row < 6:
        return [(0xF << 4 * row, FOREIGN - 4 * row)]
    return [(0x7 << 24, FOREIGN - 24), (1 << 31, -1)]


def shift(f: Function, x: str, left: int) -> str:
    return f.shl(x, left) if left >= 0 else f.lshr(x, -left)


def signed(bits: int) -> int:
    """The i32 of these bits."""
    return bits - (1 << 32) if bits >> 31 else bits


# ---- packing


def pack_panel(f: Function, lanes: int, source: str, panel: str, k: str, columns: str) -> str:
    """Emits the packing of a panel that lies at `source` as [K][16]; gives where the next one begins.

    `source` may be in the room of the panel, for which nothing is shortened: what is written lies before what is still
    to be read. Columns from `columns` on are padding.
    """
    v, words = vec("i32", lanes), range(0, WIDTH, lanes)

    def bits(step: str | int, j: int) -> str:
        return f.load(v, f.offset(source, f.add(f.mul(step, STEP), 4 * j)))

    def largest(step: str, state: list[str]) -> list[str]:
        exponents = [f.and_(bits(step, j), EXPONENT) for j in words]
        return [functools.reduce(f.max, exponents, state[0])]

    top = f.loop(0, k, 1, [(v, "zeroinitializer")], largest)[0]
    base = f.max(f.sub(f.reduce(top, f.max), SPAN - (1 << 23)), 0)
    f.store(base, panel)
    lowest = f.splat(base, lanes)
    inside = [f.mask_below(f.sub(columns, j), lanes) for j in words]

    def group(g: str, state: list[str]) -> list[str]:
        out = state[0]
        first = f.mul(g, GROUP)
        rows = [
            [f.select(inside[i], bits(f.add(first, r), j), lowest) for i, j in enumerate(words)] for r in range(GROUP)
        ]
        distance = [[f.sub(f.and_(x, EXPONENT | 0x7FFFFF), lowest) for x in row] for row in rows]
        far = functools.reduce(f.or_, [f.cmp("uge", x, SPAN) for row in distance for x in row])
        whole = f.cmp("ne", f.cast("bitcast", far, f"i{lanes}"), 0)
        f.store(f.cast("zext", whole, "i8"), f.offset(panel, f.add(g, HEAD)))

        def keep() -> None:
            for r in range(GROUP):
                for i, j in enumerate(words):
                    f.store(rows[r][i], f.offset(out, STEP * r + 4 * j))

        def pack() -> None:
            for i, j in enumerate(words):
                own = [f.or_(f.and_(rows[r][i], SIGN), distance[r][i]) for r in range(GROUP)]
                for r in range(GROUP - 1):
                    word = own[r]
                    for mask, left in pieces(r):
                        word = f.or_(word, shift(f, f.and_(own[-1], signed(mask)), left))
                    f.store(word, f.offset(out, STEP * r + 4 * j))

        f.if_(whole, keep, pack)
        return [f.offset(out, f.select(whole, GROUP * STEP, (GROUP - 1) * STEP))]

    first = f.offset(panel, begin(f, k))
    return f.loop(0, f.lshr(k, GROUP.bit_length() - 1), 1, [("ptr", first)], group)[0]


# ---- products


def product(tile: Tile, rows: int) -> Function:
    """A block of C of so many rows: as `gemm.gemm_block`, but `b` is all of B and `stride` the first panel's number."""
    halves = WIDTH // tile.lanes
    f = Function(f"rlx_short_{tile.name}_{rows}", gemm.BLOCK_ARGUMENTS, internal=True, attrs="nounwind noinline")
    block, before = gemm.block_steps(f), begin(f, "%k")
    a_rows = [f.gep("%a", f.mul("%lda", i), tile.scalar) for i in range(rows)]

    def together(panels: int, column: str) -> None:
        """So many panels at a time: two streams come from memory faster than one."""
        number = f.add("%stride", f.lshr(column, WIDTH.bit_length() - 1))
        starts = [f.offset("%b", f.load("i64", f.gep("%b", f.add(number, q), "i64"))) for q in range(panels)]
        bases = [f.splat(f.load("i32", start), tile.lanes) for start in starts]
        flags = [f.offset(start, HEAD) for start in starts]
        top = f.gep("%c", column, tile.scalar)
        c_rows = [f.gep(top, f.mul("%ldc", i), tile.scalar) for i in range(rows)]

        def k_block(k0: str, at: list[str]) -> list[str]:
            stop = f.min(f.add(k0, block), "%k")
            sums = Accumulators(f, tile, rows, panels * halves)

            def group(step: str, at: list[str]) -> list[str]:
                for q in range(panels):
                    plain = f.cmp("ne", f.load("i8", f.offset(flags[q], f.lshr(step, GROUP.bit_length() - 1))), 0)
                    for r in range(GROUP - 1):
                        f.prefetch(f.offset(at[q], AHEAD // panels + STEP * r))
                    a = [f.gep(row, step, tile.scalar) for row in a_rows]
                    at[q] = eight_steps(sums, q * halves, plain, at[q], a, bases[q])
                return at

            at = sums.loop(k0, stop, GROUP, at, group, runs=True)
            sums.put(c_rows, f.sub("%columns", column), f.cmp("gt", k0, 0))
            return at

        f.loop(0, "%k", block, [("ptr", f.offset(start, before)) for start in starts], k_block, runs=True)

    # sums have three quarters of the registers at most: words, what they are made of and splats take the rest
    panels = 2 if rows * 2 * halves <= tile.registers * 3 // 4 else 1
    whole = f.and_("%columns", -panels * WIDTH)
    f.loop(0, whole, panels * WIDTH, [], lambda column, _: together(panels, column))
    f.loop(whole, "%columns", WIDTH, [], lambda column, _: together(1, column))
    f.ret()
    return f


def eight_steps(sums: Accumulators, first: int, plain: str, p: str, a: list[str], base: str) -> str:
    """Adds the steps of a panel at `p`, of numbers (`plain`) or of words, to its sums: vectors from `first` on.

    `a` are the addresses of the elements of A, row by row. Gives where the next steps begin.
    """
    f, tile = sums.f, sums.tile
    v, words, halves = tile.vector, vec("i32", tile.lanes), range(WIDTH // tile.lanes)

    def load(ty: str, r: int) -> list[str]:
        return [f.load(ty, f.offset(p, STEP * r + 4 * tile.lanes * h)) for h in halves]

    def add(r: int, weights: list[str]) -> None:
        def element(i: int) -> str:
            return f.splat(f.load(tile.scalar, f.gep(a[i], r, tile.scalar)), tile.lanes)

        sums.add(element, weights.__getitem__, first=first, count=len(halves))

    def of_numbers() -> str:
        for r in range(GROUP):
            add(r, load(v, r))
        return f.offset(p, GROUP * STEP)

    def of_words() -> str:
        last = [""] * len(halves)
        for r in range(GROUP - 1):
            held = load(words, r)
            for mask, left in pieces(r):
                parts = [f.and_(shift(f, x, -left), signed(mask)) for x in held]
                last = [f.or_(x, y) if x else y for x, y in zip(last, parts, strict=True)]
            add(r, [f.cast("bitcast", f.add(f.and_(x, KEPT), base), v) for x in held])
        add(GROUP - 1, [f.cast("bitcast", f.add(x, base), v) for x in last])
        return f.offset(p, (GROUP - 1) * STEP)

    return sums.either(plain, of_numbers, of_words)[0]


# ---- the format


class F28(PanelFormat):
    """f32 weights in 28 bits each, without loss, for products of so few rows that they wait for memory."""

    by_tiles = False
    placed = True

    def refuses(self, kernel: Kernel, anchor: Contract, setting: Setting) -> str | None:
        if accumulates_in(anchor) is not F32:
            return "its sums are not f32"
        if setting.shared:
            return "packing='shared'"
        if not setting.streamed:
            return f"the model has less than {bytes_text(STREAMED)} of weights"
        why = unsuited(anchor.m, anchor.n, anchor.k, setting.target)
        if why is not None or _can_be_short(plain.PLAIN.packed(kernel, anchor)[1]):
            return why
        return "its second operand is not one matrix of weights in memory"

    def packed(self, kernel: Kernel, anchor: Contract) -> tuple[Expr, Kernel]:
        return _shortened(plain.PLAIN.packed(kernel, anchor)[1])

    def schedule(self, product: MatmulSchedule, target: Target) -> MatmulSchedule:
        return replace(product, pairs=True)

    def panel_bytes(self, nbytes: int) -> int:
        return nbytes * 7 // 8  # but for a few steps

    def block_routine(self, tile: Tile) -> Routine:
        """For up to `most_rows` rows."""
        f = Function(f"rlx_short_block_{tile.name}", gemm.BLOCK_ARGUMENTS, attrs="nounwind noinline")
        arguments = [f"%{name}" for _, name in gemm.BLOCK_ARGUMENTS]

        def of_rows(rows: int) -> Callable[[], None]:
            return lambda: void(f.call(product(tile, rows), arguments))

        f.switch("%rows", {rows: of_rows(rows) for rows in range(1, most_rows(tile.target, LARGE) + 1)})
        f.ret()
        return Routine(f.name, Module([f]).text())


F28_PANELS = F28()


def _can_be_short(pack: Kernel) -> bool:
    """Whether it packs one matrix of weights as it lies in memory."""
    buffer = pack.stores[0].buffer
    return pack.anchor is not None and buffer.kind == "prepared" and len(buffer.shape) == 3


def _shortened(pack: Kernel) -> tuple[Expr, Kernel]:
    """What reads the panels that a kernel packs, shortened, and the kernel that packs them so."""
    assert isinstance(pack.anchor, Contract)
    whole = pack.stores[0].buffer
    shape = (elements(evaluate(pack.anchor.k, {}), evaluate(pack.anchor.n, {})),)
    buffer = Buffer(whole.name, whole.kind, shape, F32)
    store = Store(buffer, shape, out_vars(1), const(0, F32))
    return Load(buffer, (DEPTH,), F32), replace(pack, stores=(store,), strategy=PACK)


class _Shortening(plain.Repacking):
    """Panels of 28 bits, in the room of plain ones."""

    together = TOGETHER

    def room(self, f: Function, panels: str, panel: str, k: str) -> str:
        return room(f, panels, panel, k)

    def begin(self, f: Function, k: str) -> str:
        return begin(f, k)

    def write(self, f: Function, lanes: int, source: str, panel: str, k: str, columns: str) -> str:
        return pack_panel(f, lanes, source, panel, k, columns)


SHORTENING = _Shortening()
PACK = Step("matmul.pack+f28", lambda kernel, target: plain.emit_pack(kernel, target, SHORTENING))
