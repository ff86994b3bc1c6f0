"""Rows of A that are rounded once, for all products that read them.

    row    record | record | ... | record

A record is 64 bytes for 32 elements: what is in them, `q8_rows` and `bf16` say. The last elements of a row are filled
up with zeros. A row has an odd number of records, so that rows do not lie at one place in the cache.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.gemm.chunk import batch_indices, place_of
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
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import ceildiv, size_product
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import Expr, Load, const, substitute_vars, walk
from rlx.kernels.lowering import Contract, out_vars
from rlx.kernels.prepared import is_static
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import replace

__all__ = ["BLOCK", "RECORD", "Rounding"]

Record = Callable[[Function, list[str], int, str], None]
BLOCK, RECORD = 32, 64  # elements and bytes of a record
WORDS = RECORD // 4
F32, I32 = DTYPES["f32"], DTYPES["i32"]


class RowArguments(Arguments):
    """The arguments of the kernel; strides are in elements."""

    a: Address
    row_stride: Number
    out: Address
    m: Number
    k: Number
    row_chunk: Number


class Rounding(Step):
    """A kernel that rounds rows: `record(f, parts, lanes, out)` emits what writes the record of a block's elements.

    `parts` are vectors of f32, `lanes` elements each. `suffix` ends the names of what is written.
    """

    def __init__(self, name: str, suffix: str, record: Record) -> None:
        super().__init__(name, self._code)
        self.suffix = suffix
        self.record = record

    def rows(self, kernel: Kernel, anchor: Contract, word: Expr, *, prepares: bool = False) -> tuple[Expr, Kernel]:
        """What reads word number `word` of the rows of A, f32 in place, and the kernel that makes them.

        `prepares`: those of rows that no run changes are made before any run.
        """
        a = anchor.a
        assert isinstance(a, Load)
        *batch, row, _ = out_vars(len(kernel.stores[0].extents))
        used = [v for v in batch if v in set(walk(a))]
        records = ceildiv(anchor.k, BLOCK) // 2 * 2 + 1
        shape = (*extents_of(used, kernel.stores[0].extents), anchor.m, records * WORDS)
        kind = "prepared" if prepares and is_static(a, shape) else "arena"
        buffer = Buffer(f"{kernel.stores[0].buffer.name}.{self.suffix}", kind, shape, I32)
        own = out_vars(len(shape))
        renamed = substitute_vars(a, dict(zip((*used, row), own, strict=False)))
        store = Store(buffer, shape, own, substitute_vars(renamed, {DEPTH: own[-1] // WORDS * BLOCK}))
        rounding = replace(anchor, n=1, a=renamed, b=const(0, F32))
        made = Kernel("round a", (store,), rounding, nodes=kernel.nodes, strategy=self)
        return Load(buffer, (*used, row, word), I32), made

    def _code(self, kernel: Kernel, target: Target) -> KernelCode:
        anchor, out = kernel.anchor, kernel.stores[0].buffer
        assert isinstance(anchor, Contract)
        assert isinstance(anchor.a, Load)
        index = linear_index(anchor.a.indices, anchor.a.source.shape)
        *batch, row, _ = out_vars(len(out.shape))
        extents = out.shape[:-2]
        cut = once(PackSchedule(size_product(extents), anchor.m, anchor.k, None))
        table = ArgumentTable(
            RowArguments.given(
                a=Pointer(anchor.a.source, index.constant * 4),
                row_stride=index.coefs.get(row, 0),
                out=Pointer(out),
                m=anchor.m,
                k=anchor.k,
                row_chunk=part(cut, "step"),
            )
        )

        def matrix_at(f: Function, number: str) -> str:
            return place_of(f, table, batch_indices(f, table, number, extents), [index.coefs.get(v, 0) for v in batch])

        symbol, ir = name_kernel(_rows(target.lanes, matrix_at, self.record).text())
        return KernelCode(symbol, ir, tuple(table.words), Part(cut, "chunks"))


def _rows(lanes: int, matrix_at: Callable[[Function, str], str], record: Record) -> Module:
    """A kernel of `RowArguments`: a chunk is `row_chunk` rows of a matrix, which `matrix_at` finds."""
    f = kernel_function(PLACEHOLDER)
    w = RowArguments.loaded(f)
    blocks = f.div(f.add(w.k, BLOCK - 1), BLOCK)
    per_matrix = f.div(f.sub(f.add(w.m, w.row_chunk), 1), w.row_chunk)
    matrix, first = f.div("%chunk", per_matrix), f.mul(f.rem("%chunk", per_matrix), w.row_chunk)
    source = f.gep(w.a, matrix_at(f, matrix), "float")
    target_rows = f.offset(w.out, f.mul(f.mul(matrix, w.m), f.mul(f.or_(blocks, 1), RECORD)))

    def row(number: str, _: list[str]) -> None:
        a = f.gep(source, f.mul(number, w.row_stride), "float")
        out = f.offset(target_rows, f.mul(number, f.mul(f.or_(blocks, 1), RECORD)))

        def whole(block: str, _: list[str]) -> None:
            p = f.gep(a, f.mul(block, BLOCK), "float")
            parts = [f.load(vec("float", lanes), f.gep(p, i, "float")) for i in range(0, BLOCK, lanes)]
            record(f, parts, lanes, f.offset(out, f.mul(block, RECORD)))

        def rest() -> None:
            p, parts = f.gep(a, f.mul(full, BLOCK), "float"), []
            for i in range(0, BLOCK, lanes):
                mask = f.mask_below(f.sub(f.sub(w.k, f.mul(full, BLOCK)), i), lanes)
                parts.append(f.masked_load(vec("float", lanes), f.gep(p, i, "float"), mask))
            record(f, parts, lanes, f.offset(out, f.mul(full, RECORD)))

        full = f.div(w.k, BLOCK)
        f.loop(0, full, 1, [], whole)
        f.if_(f.cmp("lt", full, blocks), rest)

    f.loop(first, f.min(f.add(first, w.row_chunk), w.m), 1, [], row)
    f.ret()
    return Module([f])
