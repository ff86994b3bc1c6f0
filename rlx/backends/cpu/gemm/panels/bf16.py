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
from rlx.backends.cpu.gemm.chunk import batch_indices, dot
from rlx.backends.cpu.gemm.panels.format import PanelFormat
from rlx.backends.cpu.gemm.panels.operands import DEPTH, extents_of, rows_in_place
from rlx.backends.cpu.gemm.tile import Tile
from rlx.backends.cpu.llvm.builder import Function, Module, vec
from rlx.backends.cpu.loops.emitter import PLACEHOLDER, name_kernel
from rlx.backends.cpu.schedule.arguments import (
    Address,
    Arguments,
    ArgumentTable,
    KernelCode,
    Number,
    Part,
    Pointer,
    Routine,
    once,
    part,
)
from rlx.backends.cpu.schedule.base import PackSchedule
from rlx.backends.cpu.schedule.matmul import PANEL_BYTES, MatmulSchedule
from rlx.backends.cpu.strategy import Setting, Step
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import Size, ceildiv, size_product
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import I64, Cast, Expr, Load, Select, const, guarded, size_expr, substitute_vars, walk
from rlx.kernels.lowering import Contract, out_vars
from rlx.kernels.prepared import is_static
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import replace

__all__ = ["BF16_PAIRS", "ROUND_PAIRS"]

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
        a, copies = rows_in_place(kernel, replace(anchor, a=_unrounded(anchor.a)), F32)
        a, rounding = _rounded_rows(kernel, replace(anchor, a=a))
        b, pack = self.packed(kernel, anchor)
        return [*copies, rounding, pack, kernel.with_anchor(replace(anchor, a=a, b=b))]

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
        name, v = "llvm.x86.avx512bf16.dpbf16ps.512", tile.vector
        f.declare(name, v, [v, PAIRS, PAIRS])
        x, y = f.cast("bitcast", a, PAIRS), f.cast("bitcast", b, PAIRS)
        return f.op(f"call {v} @{name}({v} {total}, {PAIRS} {y}, {PAIRS} {x})", v)

    def block_routine(self, tile: Tile) -> Routine | None:
        """Where there are tile registers that are fast, they compute blocks of any number of rows."""
        if not tile.target.float_tiles:
            return None
        block = amx_bf16.block(gemm.BLOCK_ARGUMENTS)
        return Routine(block.name, Module([block]).text())


BF16_PAIRS = Bf16Pairs()


def _divides(count: int, size: Size) -> bool:
    return isinstance(size, int) and size % count == 0


def _unrounded(x: Expr) -> Expr:
    """An operand of f32 before it is rounded."""
    assert isinstance(x, Cast)
    return x.value


# ---- rows


class RoundArguments(Arguments):
    """The arguments of the kernel; strides are in elements, of what it writes in pairs."""

    a: Address
    row_stride: Number
    out: Address
    out_stride: Number
    m: Number
    k: Number
    row_chunk: Number


def _rounded_rows(kernel: Kernel, anchor: Contract) -> tuple[Expr, Kernel]:
    """What reads the pairs of A, an operand of f32 in place, and the kernel that makes them."""
    a = anchor.a
    assert isinstance(a, Load)
    *batch, row, _ = out_vars(len(kernel.stores[0].extents))
    used = [v for v in batch if v in set(walk(a))]
    lines = ceildiv(anchor.k, 2 * LINE) // 2 * 2 + 1  # an odd number, so that rows are not at one place in the cache
    shape = (*extents_of(used, kernel.stores[0].extents), anchor.m, lines * LINE)
    kind = "prepared" if is_static(a, shape) else "arena"
    buffer = Buffer(f"{kernel.stores[0].buffer.name}.bf16", kind, shape, I32)
    own = out_vars(len(shape))
    renamed = substitute_vars(a, dict(zip((*used, row), own, strict=False)))
    store = Store(buffer, shape, own, substitute_vars(renamed, {DEPTH: own[-1] * 2}))
    rounding = replace(anchor, n=1, a=renamed, b=const(0.0, F32))
    made = Kernel("round a", (store,), rounding, nodes=kernel.nodes, strategy=ROUND_PAIRS)
    return Load(buffer, (*used, row, DEPTH), I32), made


def _emit(kernel: Kernel, target: Target) -> KernelCode:
    anchor, out = kernel.anchor, kernel.stores[0].buffer
    assert isinstance(anchor, Contract)
    assert isinstance(anchor.a, Load)
    index = linear_index(anchor.a.indices, anchor.a.source.shape)
    *batch, row, _ = out_vars(len(out.shape))
    extents = out.shape[:-2]
    cut = once(PackSchedule(size_product(extents), anchor.m, anchor.k, None))
    table = ArgumentTable(
        RoundArguments.given(
            a=Pointer(anchor.a.source, index.constant * 4),
            row_stride=index.coefs.get(row, 0),
            out=Pointer(out),
            out_stride=out.shape[-1],
            m=anchor.m,
            k=anchor.k,
            row_chunk=part(cut, "step"),
        )
    )
    f = gemm.kernel_function(PLACEHOLDER)
    w = RoundArguments.loaded(f)
    chunks = f.div(f.sub(f.add(w.m, w.row_chunk), 1), w.row_chunk)
    matrix, first = f.div("%chunk", chunks), f.mul(f.rem("%chunk", chunks), w.row_chunk)
    place = dot(f, table, batch_indices(f, table, matrix, extents), [index.coefs.get(v, 0) for v in batch])
    top, own = f.gep(w.a, place, "float"), f.gep(w.out, f.mul(f.mul(matrix, w.m), w.out_stride), "i32")

    def row_of_pairs(i: str, _: list[str]) -> None:
        a, pairs = f.gep(top, f.mul(i, w.row_stride), "float"), f.gep(own, f.mul(i, w.out_stride), "i32")

        def line(k: str, _: list[str]) -> None:
            p = f.gep(a, k, "float")
            _store_pairs(f, [f.load(FLOATS, p), f.load(FLOATS, f.offset(p, 64))], f.offset(pairs, f.mul(k, 2)))

        def rest() -> None:
            p, left = f.gep(a, whole, "float"), f.sub(w.k, whole)
            masks = [f.mask_below(f.sub(left, j), 16) for j in (0, 16)]
            parts = [f.masked_load(FLOATS, f.offset(p, 64 * j), mask) for j, mask in enumerate(masks)]
            _store_pairs(f, parts, f.offset(pairs, f.mul(whole, 2)))

        whole = f.and_(w.k, -2 * LINE)
        f.loop(0, whole, 2 * LINE, [], line)
        f.if_(f.cmp("lt", whole, w.k), rest)

    f.loop(first, f.min(f.add(first, w.row_chunk), w.m), 1, [], row_of_pairs)
    f.ret()
    symbol, ir = name_kernel(Module([f]).text())
    return KernelCode(symbol, ir, tuple(table.words), Part(cut, "chunks"))


def _store_pairs(f: Function, parts: list[str], p: str) -> None:
    """Stores two vectors of f32, rounded."""
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    f.declare(name, PAIRS, [FLOATS, FLOATS])
    low, high = parts
    f.store(f.op(f"call {PAIRS} @{name}({FLOATS} {high}, {FLOATS} {low})", PAIRS), p)


ROUND_PAIRS = Step("matmul.round_pairs", _emit)
