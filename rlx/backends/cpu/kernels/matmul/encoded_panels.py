"""Products with weights in encoded blocks (q8_0, q4_0), which stay as they are stored."""

from __future__ import annotations

from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.panels import block_formats
from rlx.backends.cpu.gemm.panels import blocks as block_panels
from rlx.backends.cpu.kernels.matmul.product import (
    DEPTH,
    Product,
    accumulates_in,
)
from rlx.backends.cpu.schedule.arguments import Routine
from rlx.backends.cpu.schedule.matmul import MatmulSchedule
from rlx.backends.cpu.strategy import Setting
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import evaluate
from rlx.kernels.encoded import encoded_element
from rlx.kernels.expr import I64, Expr, Load, Select, const, guarded, size_expr
from rlx.kernels.lowering import Contract, out_vars
from rlx.kernels.program import Kernel, Store
from rlx.records import replace

__all__ = ["EncodedPanels"]

F32 = DTYPES["f32"]


class EncodedPanels(Product):
    """B stays in encoded blocks along k, as it is stored: decoded in registers, or multiplied by tile registers."""

    def __init__(self, encoding: str) -> None:
        super().__init__(f"matmul.panels+{encoding}")
        self.encoding = encoding

    def refuses(self, kernel: Kernel, setting: Setting) -> str | None:
        anchor = kernel.anchor
        assert isinstance(anchor, Contract)
        if accumulates_in(anchor) is not F32:
            return "its sums are not f32"
        stored = encoded_element(anchor.b)
        if stored is None or stored[1].name != self.encoding:
            return f"its second operand is not {self.encoding}"
        fits = _blocks(kernel, anchor, setting.target) is not None
        return None if fits else "its rows are no whole blocks along k, or the machine has no code for them"

    def normal(self, kernel: Kernel) -> Kernel:
        return kernel

    def packed(self, kernel: Kernel, anchor: Contract, target: Target) -> tuple[Expr, Kernel]:
        blocks = _blocks(kernel, anchor, target)
        assert blocks is not None
        return _pack_blocks(kernel, anchor, blocks)

    def stored(self, b: Expr, dtype: DType) -> str:
        return self.encoding

    def schedule(self, product: MatmulSchedule, target: Target) -> MatmulSchedule:
        code = block_formats.CODES[self.encoding]
        return replace(product, few=block_panels.few_rows(target), tiles_from=code.tiles_from)

    def block_routine(self, tile: gemm.Tile) -> Routine:
        return block_panels.block_routine(tile)


def _blocks(kernel: Kernel, anchor: Contract, target: Target) -> block_panels.Blocks | None:
    """The encoded blocks that B is read from, if it is."""
    column = out_vars(len(kernel.stores[0].extents))[-1]
    return block_panels.find(anchor.b, anchor.n, anchor.k, DEPTH, column, target)


def _pack_blocks(kernel: Kernel, anchor: Contract, blocks: block_panels.Blocks) -> tuple[Expr, Kernel]:
    """B as the blocks that it is stored in, those of 16 columns together."""
    n = evaluate(anchor.n, {})
    buffer = blocks.panels(f"{kernel.stores[0].buffer.name}.panels", n, evaluate(anchor.k, {}))
    panel, block, row, lane = own = out_vars(4)
    column = panel * buffer.shape[-1] + lane
    element: Expr = blocks.byte(column, block, row)
    if n % evaluate(buffer.shape[-1], {}):
        inside = column < size_expr(n)
        element = Select(inside, guarded(element, inside), const(0, element.dtype))
    pack = Kernel("pack b", (Store(buffer, buffer.shape, own, element),), nodes=kernel.nodes)
    return Load(buffer, (const(0, I64),) * 4, buffer.dtype), pack
