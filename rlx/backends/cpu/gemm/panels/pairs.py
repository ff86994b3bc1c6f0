"""Panels of pairs of i16, neighbours along k, for products of i16 with i16 or i8 in i32: quantised nets of 16 bits."""

from __future__ import annotations

from rlx.backends.cpu.gemm.panels.format import PanelFormat
from rlx.backends.cpu.gemm.panels.operands import DEPTH, accumulates_in, compact, extents_of
from rlx.backends.cpu.llvm.builder import Function, vec, width
from rlx.backends.cpu.schedule.matmul import PANEL_BYTES
from rlx.backends.cpu.strategy import Setting
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import Size, ceildiv
from rlx.kernels.expr import I64, Expr, Load, Select, const, guarded, size_expr, substitute_vars, walk
from rlx.kernels.lowering import Contract, out_vars
from rlx.kernels.prepared import is_static
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import replace

__all__ = ["PAIRS"]

I16, I32 = DTYPES["i16"], DTYPES["i32"]


class Pairs(PanelFormat):
    """i16 times i16 or i8 in i32, by pairs of neighbours along k that an instruction multiplies and adds up."""

    def __init__(self, name: str = "", stored: str = "") -> None:
        self.name, self.stored = name, stored

    def refuses(self, kernel: Kernel, anchor: Contract, setting: Setting) -> str | None:
        return None if accumulates_in(anchor) is I32 else "its operands are floats"

    def layout(self, kernel: Kernel) -> list[Kernel]:
        anchor = kernel.anchor
        assert isinstance(anchor, Contract)
        store = kernel.stores[0]
        *batch, row, column = out_vars(len(store.extents))
        pairs, made = ceildiv(anchor.k, 2), []
        a = anchor.a
        even = isinstance(anchor.k, int) and anchor.k % 2 == 0
        if not (even and _has_pairs(a, anchor.k)):
            used = [v for v in batch if v in set(walk(a))]
            inside = size_expr(anchor.k) > DEPTH
            padded = a if even else Select(inside, guarded(a, inside), const(0, I16))
            extents = [*extents_of(used, store.extents), anchor.m, pairs * 2]
            a, copy = compact(kernel, padded, [*used, row, DEPTH], extents, I16)
            made.append(copy)
        assert isinstance(a, Load)
        source = a.source
        view = source.view((*source.shape[:-1], pairs), I32)
        width = PANEL_BYTES // I32.itemsize
        b = anchor.b
        used = [v for v in batch if v in set(walk(b))]
        shape = (*extents_of(used, store.extents), ceildiv(anchor.n, width), pairs, width)
        buffer = Buffer(
            f"{store.buffer.name}.panels", "prepared" if is_static(b, shape) else "arena", (*shape, 2), b.dtype
        )
        *outer, panel, depth, lane, half = own = out_vars(len(shape) + 1)
        n, k = panel * width + lane, depth * 2 + half
        element = substitute_vars(b, {**dict(zip(used, outer, strict=True)), DEPTH: k, column: n})
        inside = (n < size_expr(anchor.n)) & (k < size_expr(anchor.k))
        element = Select(inside, guarded(element, inside), const(0, b.dtype))
        made.append(Kernel("pack b", (Store(buffer, buffer.shape, own, element),), nodes=kernel.nodes))
        panels = buffer.view(shape, I32 if b.dtype is I16 else I16)
        zero = const(0, I64)
        left, right = Load(view, (*a.indices[:-1], DEPTH), I32), Load(panels, (*used, zero, DEPTH, zero), panels.dtype)
        made.append(kernel.with_anchor(replace(anchor, a=left, b=right, k=pairs)))
        return made

    def of(self, dtype: DType) -> PanelFormat:
        return PAIRS if dtype is I32 else PAIRS_OF_BYTES

    def load(self, f: Function, p: str, v: str) -> str:
        if not self.stored:
            return f.load(v, p)
        return f.cast("bitcast", f.cast("sext", f.load(vec("i8", 2 * width(v)), p), "i16"), v)


PAIRS = Pairs()
PAIRS_OF_BYTES = Pairs("i16", "i16")  # an element in memory is a pair of bytes


def _has_pairs(a: Expr, k: Size) -> bool:
    """Whether each row is one of the k elements of the last axis of a buffer."""
    if not isinstance(a, Load) or a.where is not None or a.indices[-1] != DEPTH or a.source.shape[-1] != k:
        return False
    return DEPTH not in {x for i in a.indices[:-1] for x in walk(i)}
