"""Panels of f32 that are whole numbers of 8 bits: bytes, which become f32 in registers.

A B of a byte less a byte, as of a zero point, has 9 bits: its panels hold i16. Such numbers are bf16 as they are, so
tile registers need a third of the products.
"""

from __future__ import annotations

from rlx.backends.cpu.gemm.panels import f28
from rlx.backends.cpu.gemm.panels.format import PanelFormat
from rlx.backends.cpu.gemm.panels.operands import accumulates_in, is_whole, panels_of
from rlx.backends.cpu.llvm.builder import Function, element, vec, width
from rlx.backends.cpu.schedule.matmul import MatmulSchedule
from rlx.backends.cpu.strategy import Setting
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import upper
from rlx.kernels.expr import Cast, Expr
from rlx.kernels.lowering import Contract
from rlx.kernels.program import Kernel
from rlx.records import replace

__all__ = ["BYTES"]

F32, I16 = DTYPES["f32"], DTYPES["i16"]


class Bytes(PanelFormat):
    """f32 times weights kept as bytes (or i16, a byte less a byte, as of a zero point), converted in registers.

    Tile registers take bytes as they are; without them few rows wait for memory, and read a quarter of it.
    """

    parts = 1

    def __init__(self, dtype: str, stored: str) -> None:
        self.name, self.stored = dtype, stored

    def refuses(self, kernel: Kernel, anchor: Contract, setting: Setting) -> str | None:
        if accumulates_in(anchor) is not F32:
            return "its sums are not f32"
        if not is_whole(anchor.b):
            return "its second operand is no byte, nor the difference of two"
        if setting.target.multiplies_by_tiles("f32"):
            return None
        most, few = upper(anchor.m), f28.most_rows(setting.target, f28.LARGE)
        if setting.shared or most is None or most > few:
            return f"without tile registers it needs at most {few} rows, and packing='fast'"
        return None

    def packed(self, kernel: Kernel, anchor: Contract) -> tuple[Expr, Kernel]:
        b = anchor.b.value if isinstance(anchor.b, Cast) else Cast(anchor.b, I16)
        return panels_of(kernel, anchor, b, F32, b.dtype)

    def of(self, dtype: DType) -> PanelFormat:
        return VARIANTS[dtype.name]

    def schedule(self, product: MatmulSchedule, target: Target) -> MatmulSchedule:
        return replace(product, whole=True)

    def load(self, f: Function, p: str, v: str) -> str:
        numbers = f.load(vec(self.stored, width(v)), p)
        return f.cast("uitofp" if self.name == "u8" else "sitofp", numbers, element(v))


BYTES = Bytes("i8", "i8")
VARIANTS = {"i8": BYTES, "u8": Bytes("u8", "i8"), "i16": Bytes("i16", "i16")}
