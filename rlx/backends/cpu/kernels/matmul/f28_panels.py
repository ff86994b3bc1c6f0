"""Products of few rows with f32 weights in panels of 28 bits a number."""

from __future__ import annotations

from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.panels import f28
from rlx.backends.cpu.kernels.matmul.product import (
    DEPTH,
    Product,
    accumulates_in,
)
from rlx.backends.cpu.schedule.arguments import Routine
from rlx.backends.cpu.strategy import Setting
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import evaluate
from rlx.kernels.expr import Expr, Load, const
from rlx.kernels.lowering import Contract, out_vars
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import replace
from rlx.units import bytes_text

__all__ = ["F28Panels"]

F32 = DTYPES["f32"]


class F28Panels(Product):
    """f32 weights in 28 bits each, without loss, for products of so few rows that they wait for memory."""

    short = True

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        kernel = self.normal(kernel)
        anchor = kernel.anchor
        assert isinstance(anchor, Contract)
        if accumulates_in(anchor) is not F32:
            return "its sums are not f32"
        if setting.shared:
            return "packing='shared'"
        if not setting.streamed:
            return f"the model has less than {bytes_text(f28.STREAMED)} of weights"
        why = f28.unsuited(anchor.m, anchor.n, anchor.k, setting.target)
        if why is not None or _can_be_short(super().packed(kernel, anchor, setting.target)[1]):
            return why
        return "its second operand is not one matrix of weights in memory"

    def packed(self, kernel: Kernel, anchor: Contract, target: Target) -> tuple[Expr, Kernel]:
        return _shortened(*super().packed(kernel, anchor, target))

    def panel_bytes(self, nbytes: int) -> int:
        return nbytes * 7 // 8  # but for a few steps

    def block_routine(self, tile: gemm.Tile) -> Routine:
        return f28.block_routine(tile)


def _can_be_short(pack: Kernel) -> bool:
    """Whether it packs one matrix of weights as it lies in memory."""
    buffer = pack.stores[0].buffer
    return pack.anchor is not None and buffer.kind == "prepared" and len(buffer.shape) == 3


def _shortened(panels: Expr, pack: Kernel) -> tuple[Expr, Kernel]:
    """The same panels, shortened."""
    assert isinstance(pack.anchor, Contract)
    plain = pack.stores[0].buffer
    shape = (f28.elements(evaluate(pack.anchor.k, {}), evaluate(pack.anchor.n, {})),)
    buffer = Buffer(plain.name, plain.kind, shape, F32)
    store = Store(buffer, shape, out_vars(1), const(0, F32))
    return Load(buffer, (DEPTH,), F32), replace(pack, stores=(store,))
