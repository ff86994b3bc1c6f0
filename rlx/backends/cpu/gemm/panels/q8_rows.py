"""Rows of activations rounded to 8 bits, as products of whole numbers read them.

A row is a record of 64 bytes for each 32 elements, the last filled up with zeros:

    0   q, 32 bytes with a sign      32  d, f32      36  -(sum of q 0..15), i32      40  -(q 16..31)      44  -(all)
    48  d times those three sums, f32

`rlx.ir.casting` says what q and d are.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.gemm.chunk import batch_indices, dot
from rlx.backends.cpu.gemm.kernel import kernel_function
from rlx.backends.cpu.gemm.panels.operands import DEPTH, extents_of
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
    once,
    part,
)
from rlx.backends.cpu.schedule.base import PackSchedule
from rlx.backends.cpu.strategy import Step
from rlx.backends.cpu.target import Target
from rlx.ir.casting import ACTIVATION_BLOCK, PEAK, TINY
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import ceildiv, size_product
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import I64, Expr, Load, const, substitute_vars, walk
from rlx.kernels.lowering import Contract, out_vars
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import replace

__all__ = ["RECORD", "ROUND", "ROW_SCALE", "SCALED_SUMS", "SUMS", "rounded_rows"]

RECORD, ROW_SCALE, SUMS, SCALED_SUMS = 64, 32, 36, 48  # bytes of a record; where its scale and its sums begin
WORDS = RECORD // 4
F32, I32 = DTYPES["f32"], DTYPES["i32"]


class RoundArguments(Arguments):
    """The arguments of the kernel; strides are in elements."""

    a: Address
    row_stride: Number
    out: Address
    m: Number
    k: Number
    row_chunk: Number


def rounded_rows(kernel: Kernel, anchor: Contract) -> tuple[Expr, Kernel]:
    """What reads the records of A, an operand in place, and the kernel that makes them."""
    a = anchor.a
    assert isinstance(a, Load)
    *batch, row, _ = out_vars(len(kernel.stores[0].extents))
    used = [v for v in batch if v in set(walk(a))]
    blocks = ceildiv(anchor.k, ACTIVATION_BLOCK) // 2 * 2 + 1
    shape = (*extents_of(used, kernel.stores[0].extents), anchor.m, blocks * WORDS)
    buffer = Buffer(f"{kernel.stores[0].buffer.name}.q8", "arena", shape, I32)
    own = out_vars(len(shape))
    renamed = substitute_vars(a, dict(zip((*used, row), own, strict=False)))
    read = substitute_vars(renamed, {DEPTH: own[-1] // WORDS * ACTIVATION_BLOCK})
    store = Store(buffer, shape, own, read)
    made = Kernel(
        "round a", (store,), replace(anchor, n=1, a=renamed, b=const(0, F32)), nodes=kernel.nodes, strategy=ROUND
    )
    return Load(buffer, (*used, row, const(0, I64)), I32), made


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
            m=anchor.m,
            k=anchor.k,
            row_chunk=part(cut, "step"),
        )
    )

    def matrix_at(f: Function, number: str) -> str:
        return dot(f, table, batch_indices(f, table, number, extents), [index.coefs.get(v, 0) for v in batch])

    symbol, ir = name_kernel(_rounding(target, matrix_at).text())
    return KernelCode(symbol, ir, tuple(table.words), Part(cut, "chunks"))


def _rounding(target: Target, matrix_at: Callable[[Function, str], str]) -> Module:
    """A kernel of `RoundArguments`: a chunk is `row_chunk` rows of a matrix, which `matrix_at` finds."""
    f = kernel_function(PLACEHOLDER)
    w = RoundArguments.loaded(f)
    blocks = f.div(f.add(w.k, ACTIVATION_BLOCK - 1), ACTIVATION_BLOCK)
    per_matrix = f.div(f.sub(f.add(w.m, w.row_chunk), 1), w.row_chunk)
    matrix, first = f.div("%chunk", per_matrix), f.mul(f.rem("%chunk", per_matrix), w.row_chunk)
    source = f.gep(w.a, matrix_at(f, matrix), "float")
    target_rows = f.offset(w.out, f.mul(f.mul(matrix, w.m), f.mul(f.or_(blocks, 1), RECORD)))
    lanes = target.lanes

    def row(number: str, _: list[str]) -> None:
        a = f.gep(source, f.mul(number, w.row_stride), "float")
        out = f.offset(target_rows, f.mul(number, f.mul(f.or_(blocks, 1), RECORD)))

        def whole(block: str, _: list[str]) -> None:
            p = f.gep(a, f.mul(block, ACTIVATION_BLOCK), "float")
            parts = [f.load(vec("float", lanes), f.gep(p, i, "float")) for i in range(0, ACTIVATION_BLOCK, lanes)]
            _record(f, parts, lanes, f.offset(out, f.mul(block, RECORD)))

        def rest() -> None:
            p, parts = f.gep(a, f.mul(full, ACTIVATION_BLOCK), "float"), []
            for i in range(0, ACTIVATION_BLOCK, lanes):
                mask = f.mask_below(f.sub(f.sub(w.k, f.mul(full, ACTIVATION_BLOCK)), i), lanes)
                parts.append(f.masked_load(vec("float", lanes), f.gep(p, i, "float"), mask))
            _record(f, parts, lanes, f.offset(out, f.mul(full, RECORD)))

        full = f.div(w.k, ACTIVATION_BLOCK)
        f.loop(0, full, 1, [], whole)
        f.if_(f.cmp("lt", full, blocks), rest)

    f.loop(first, f.min(f.add(first, w.row_chunk), w.m), 1, [], row)
    f.ret()
    return Module([f])


def _record(f: Function, parts: list[str], lanes: int, out: str) -> None:
    """Writes the record of a block, of which `parts` are the elements."""
    words = vec("i32", lanes)
    sizes = [f.and_(f.cast("bitcast", x, words), 0x7FFFFFFF) for x in parts]  # in the order of the magnitudes
    while len(sizes) > 1:
        sizes = [f.max(x, y) for x, y in zip(sizes[::2], sizes[1::2], strict=True)]
    bits = f.reduce(sizes[0], f.max)
    peak = f.cast("bitcast", bits, "float")
    finite = f.cmp("lt", bits, 0x7F800000)
    used = f.and_(finite, f.cmp("ge", peak, TINY))
    inverse = f.select(used, f.div(float(PEAK), peak), 0.0)
    scale = f.select(used, f.div(peak, float(PEAK)), f.select(finite, 0.0, float("nan"), "float"))
    by, sums = f.splat(inverse, lanes), []
    for i, x in enumerate(parts):
        safe = f.select(used, x, "zeroinitializer")
        q = f.cast("fptosi", f.intrinsic("rint", f.mul(safe, by)), "i32")
        f.store(f.cast("trunc", q, "i8"), f.offset(out, i * lanes))
        sums.append(q)
    f.store(scale, f.offset(out, ROW_SCALE))
    half = len(sums) // 2
    totals = [f.reduce(_sum(f, x), f.add) for x in (sums[:half], sums[half:])]
    for i, x in enumerate((*totals, f.add(*totals))):
        less = f.sub(0, x)
        f.store(less, f.offset(out, SUMS + 4 * i))
        f.store(f.mul(scale, f.cast("sitofp", less, "float")), f.offset(out, SCALED_SUMS + 4 * i))


def _sum(f: Function, vectors: list[str]) -> str:
    """Their sum, lane by lane."""
    total = vectors[0]
    for x in vectors[1:]:
        total = f.add(total, x)
    return total


ROUND = Step("matmul.round_rows", _emit)
