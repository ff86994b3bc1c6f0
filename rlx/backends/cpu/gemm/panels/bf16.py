"""Products of operands rounded to bf16, in pairs along k: `vdpbf16ps` of AVX512-BF16 adds two of them to a sum in f32.

A row of A is rounded once, for all products that read it, to pairs of bf16; a panel has those of 16 columns for each
pair of steps, so weights take two bytes an element. Both end with zeros, up to a multiple of 32 steps of K.

    total = (total + a[1] * b[1]) + a[0] * b[0]        each multiplied and added with one rounding, as Intel defines it

Tile registers of AMX take 32 steps at a time (`gemm/amx_bf16.py`). Processors round and order sums differently, all to
the nearest even and with denormals taken for zeros, in operands and results; no flag of the processor changes that. An
element is a chain over blocks of k which depend on K only, so a row's bits depend neither on other rows nor on threads.
With finite operands its error is at most

    (K + 8) 2^-24 sum |a| |b|  +  K 2^-126 (1 + max |a| + max |b|)        of the operands rounded to bf16
"""

from __future__ import annotations

from rlx.backends.cpu.gemm import amx_bf16
from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.panels.format import PanelFormat
from rlx.backends.cpu.gemm.panels.operands import DEPTH, extents_of, rows_in_place
from rlx.backends.cpu.gemm.panels.rounded_rows import Rounding
from rlx.backends.cpu.gemm.tile import Tile
from rlx.backends.cpu.llvm.builder import Function, Module, vec
from rlx.backends.cpu.schedule.arguments import (
    Routine,
)
from rlx.backends.cpu.schedule.matmul import PANEL_BYTES, MatmulSchedule
from rlx.backends.cpu.strategy import Setting
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import Size, ceildiv, numel
from rlx.kernels.affine import Affine, index_expr, linear_index
from rlx.kernels.expr import I64, Cast, Expr, Load, Select, const, guarded, size_expr, substitute_vars, walk
from rlx.kernels.lowering import Contract, out_vars
from rlx.kernels.prepared import is_static
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import replace

__all__ = ["BF16_PAIRS", "ROUND_PAIRS", "added_pairs", "beside", "may_be_words", "rounded", "rounded_rows"]

F32, I32, BF16 = DTYPES["f32"], DTYPES["i32"], DTYPES["bf16"]
COLUMNS = PANEL_BYTES // F32.itemsize  # of a panel
LINE = 16  # pairs in a line of the cache
FLOATS, PAIRS = vec("float", 16), vec("bfloat", 32)


class Bf16Pairs(PanelFormat):
    """Operands rounded to bf16, multiplied in pairs along k and summed in f32 by an instruction of AVX512-BF16."""

    name = "bf16_pairs"
    by_tiles = False

    def refuses(self, kernel: Kernel, anchor: Contract, setting: Setting) -> str | None:
        if anchor.activations != "bf16":
            return "its operands are not rounded to bf16"
        return None if setting.target.multiplies_bf16 else "the machine has no AVX512-BF16"

    def layout(self, kernel: Kernel) -> list[Kernel]:
        anchor = kernel.anchor
        assert isinstance(anchor, Contract)
        a, made = rounded_rows(kernel, anchor)
        b, pack = self.packed(kernel, anchor)
        return [*made, pack, kernel.with_anchor(replace(anchor, a=a, b=b))]

    def packed(self, kernel: Kernel, anchor: Contract) -> tuple[Expr, Kernel]:
        """Panels [batch..., ceil(N / 16), 16 ceil(K / 32), 16, 2]."""
        store, b = kernel.stores[0], anchor.b
        *batch, _, column = out_vars(len(store.extents))
        used = [v for v in batch if v in set(walk(b))]
        shape = (*extents_of(used, store.extents), ceildiv(anchor.n, COLUMNS), self.steps(anchor.k), COLUMNS)
        kind = "prepared" if is_static(b, shape) else "arena"
        buffer = Buffer(f"{store.buffer.name}.panels", kind, (*shape, 2), BF16)
        *outer, panel, pair, lane, half = own = out_vars(len(shape) + 1)
        n, k = panel * COLUMNS + lane, pair * 2 + half
        element = substitute_vars(b, {**dict(zip(used, outer, strict=True)), DEPTH: k, column: n})
        tests = [
            i < size_expr(s) for i, s, of in ((n, anchor.n, COLUMNS), (k, anchor.k, 2 * LINE)) if not _divides(of, s)
        ]
        for inside in tests:
            element = Select(inside, guarded(element, inside), const(0.0, BF16))
        pack = Kernel("pack b", (Store(buffer, buffer.shape, own, element),), nodes=kernel.nodes)
        zero = const(0, I64)
        return Load(buffer.view(shape, I32), (*used, zero, DEPTH, zero), I32), pack

    def schedule(self, product: MatmulSchedule, target: Target) -> MatmulSchedule:
        return replace(product, records=True)  # a pair of steps takes as long as one of f32 does

    def steps(self, k: Size) -> Size:
        return ceildiv(k, 2 * LINE) * LINE  # as tile registers take them

    def sums(self, a: DType) -> DType:
        return F32

    def multiply_add(self, f: Function, tile: Tile, a: str, b: str, total: str) -> str:
        return added_pairs(f, a, b, total)

    def block_routine(self, tile: Tile) -> Routine | None:
        """Where there are tile registers that are fast, they compute blocks of any number of rows."""
        if not tile.target.float_tiles:
            return None
        block = amx_bf16.block(gemm.BLOCK_ARGUMENTS)
        return Routine(block.name, Module([block]).text())


BF16_PAIRS = Bf16Pairs()


def rounded_rows(kernel: Kernel, anchor: Contract) -> tuple[Expr, list[Kernel]]:
    """What reads the rows of A in pairs, and the kernels that make them."""
    if isinstance(anchor.a, Load):
        return _words(anchor.a), []
    a, copies = rows_in_place(kernel, replace(anchor, a=_unrounded(anchor.a)), F32)
    a, rounding = ROUND_PAIRS.rows(kernel, replace(anchor, a=a), DEPTH, prepares=True)
    return a, [*copies, rounding]


def may_be_words(k: Size) -> bool:
    """Whether rows of so many bf16, one after the other, are read in pairs where they lie.

    They have as many pairs as panels do, and do not all lie at one place in the cache.
    """
    return isinstance(k, int) and k % (2 * LINE) == 0 and k * BF16.itemsize % 4096 != 0


def _words(a: Load) -> Load:
    """What reads rows that are stored rounded, of which `may_be_words` is true, in pairs."""
    index, size = linear_index(a.indices, a.source.shape), numel(a.source.shape)
    steps = {term: _known(step) for term, step in index.coefs.items() if term != DEPTH}
    halves = {term: step // 2 for term, step in steps.items() if step % 2 == 0}  # an axis of one has any step
    at = index_expr(Affine(_known(index.constant) // 2, {**halves, DEPTH: 1}))
    return Load(a.source.view((_known(size) // 2,), I32), (at,), I32)


def _known(size: Size) -> int:
    assert isinstance(size, int)
    return size


def _divides(count: int, size: Size) -> bool:
    return isinstance(size, int) and size % count == 0


def _unrounded(x: Expr) -> Expr:
    """An operand of f32 before it is rounded."""
    assert isinstance(x, Cast)
    return x.value


def added_pairs(f: Function, a: str, b: str, total: str) -> str:
    """The 16 sums with the products of words of two bf16 added."""
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    f.declare(name, FLOATS, [FLOATS, PAIRS, PAIRS])
    x, y = f.cast("bitcast", a, PAIRS), f.cast("bitcast", b, PAIRS)
    return f.op(f"call {FLOATS} @{name}({FLOATS} {total}, {PAIRS} {y}, {PAIRS} {x})", FLOATS)


def rounded(f: Function, low: str, high: str) -> str:
    """The bf16 of two vectors of 16 f32, one after the other, as 16 words of two."""
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    f.declare(name, PAIRS, [FLOATS, FLOATS])
    made = f.op(f"call {PAIRS} @{name}({FLOATS} {high}, {FLOATS} {low})", PAIRS)
    return f.cast("bitcast", made, FLOATS)


def beside(f: Function, first: str, second: str) -> str:
    """The bf16 of two vectors of 16 f32 as words that have one of each."""
    halves = f.cast("bitcast", rounded(f, first, second), vec("i16", 32))
    return f.cast("bitcast", f.shuffle(halves, None, [16 * (i % 2) + i // 2 for i in range(32)]), FLOATS)


def _record(f: Function, parts: list[str], lanes: int, out: str) -> None:
    """Stores two vectors of f32, rounded."""
    f.store(rounded(f, *parts), out)


ROUND_PAIRS = Rounding("matmul.round_pairs", "bf16", _record)
