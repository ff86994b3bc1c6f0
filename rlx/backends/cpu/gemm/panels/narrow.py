"""Panels of f32 whose numbers are stored as f16 or bf16, and become f32 in registers.

Each of these is an f32 too, so nothing is rounded: results have the bits of the same weights in f32, and few rows,
which wait for memory, read half as much. bf16 is one part for tile registers, which multiply it as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.gemm.panels.format import PanelFormat
from rlx.backends.cpu.gemm.panels.operands import accumulates_in, panels_of
from rlx.backends.cpu.llvm.builder import Function, vec, width
from rlx.backends.cpu.strategy import Setting
from rlx.ir.dtype import DTYPES, DType
from rlx.kernels.expr import Cast, Expr
from rlx.kernels.lowering import Contract
from rlx.kernels.program import Kernel

__all__ = ["NARROW"]

F32 = DTYPES["f32"]


def _f16(f: Function, bits: str) -> str:
    return f.cast("fpext", f.cast("bitcast", bits, vec("half", width(f.type_of(bits)))), "float")


def _bf16(f: Function, bits: str) -> str:
    """Its bits are the upper half of those of f32."""
    return f.cast("bitcast", f.shl(f.cast("zext", bits, "i32"), 16), vec("float", width(f.type_of(bits))))


class Narrow(PanelFormat):
    """f32 times weights that stay in their narrower type, widened in registers."""

    def __init__(self, dtype: DType, widen: Callable[[Function, str], str]) -> None:
        self.dtype, self.name, self.widen = dtype, dtype.name, widen
        self.stored = "i16"
        # bf16 is widened by two instructions, between which LLVM would spill a sum in each step
        self.parts, self.spare = (1, 2) if dtype.name == "bf16" else (3, 0)

    def refuses(self, kernel: Kernel, anchor: Contract, setting: Setting) -> str | None:
        if accumulates_in(anchor) is not F32:
            return "its sums are not f32"
        if _narrow(anchor.b).dtype is not self.dtype:
            return f"its second operand is not {self.name}"
        return None if setting.target.has("f16c") or self.name == "bf16" else "the machine has no code for it"

    def packed(self, kernel: Kernel, anchor: Contract) -> tuple[Expr, Kernel]:
        return panels_of(kernel, anchor, _narrow(anchor.b), F32, self.dtype)

    def load(self, f: Function, p: str, v: str) -> str:
        return self.widen(f, f.load(vec(self.stored, width(v)), p))


def _narrow(b: Expr) -> Expr:
    """B before it was made f32."""
    return b.value if isinstance(b, Cast) and b.dtype is F32 else b


NARROW = (Narrow(DTYPES["f16"], _f16), Narrow(DTYPES["bf16"], _bf16))
