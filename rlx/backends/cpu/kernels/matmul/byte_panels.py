"""Products of f32 with weights of bytes, which become f32 in registers."""

from __future__ import annotations

from rlx.backends.cpu.gemm.panels import f28
from rlx.backends.cpu.kernels.matmul.product import (
    Product,
    accumulates_in,
    is_whole,
)
from rlx.backends.cpu.strategy import Setting
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import upper
from rlx.kernels.lowering import Contract
from rlx.kernels.program import Kernel

__all__ = ["BytePanels"]

F32 = DTYPES["f32"]


class BytePanels(Product):
    """f32 times weights kept as bytes (or i16, a byte less a byte, as of a zero point), converted in registers.

    Tile registers take bytes as they are; without them few rows wait for memory, and read a quarter of it.
    """

    of_bytes = True

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        anchor = self.normal(kernel).anchor
        assert isinstance(anchor, Contract)
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
