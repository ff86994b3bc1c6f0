"""Targets of fusion for tests that need no backend: one that takes no anchor, and one that takes all."""

from __future__ import annotations

from rlx.ir.dtype import DType
from rlx.ir.encoding import Encoding
from rlx.ir.graph import Node
from rlx.ir.shape import Shape
from rlx.kernels.affine import Affine
from rlx.kernels.analysis import Fusing
from rlx.kernels.lowering import Anchor


class Loops:
    """Takes no anchor: every op is plain loops."""

    fusing = Fusing()

    def accepts_dtype(self, dtype: DType) -> bool:
        return True

    def accepts_special(self, node: Node) -> bool:
        return False

    def encoded_operands(self, node: Node) -> tuple[int, ...]:
        return ()

    def accepts_anchor(self, anchor: Anchor, node: Node) -> bool:
        return False

    def accepts_operand(self, anchor: Anchor, role: str, shape: Shape, index: Affine) -> bool:
        return False

    def accepts_blocks(self, anchor: Anchor, role: str, encoding: Encoding) -> bool:
        return False


class Everything(Loops):
    """Takes every anchor, and reads every operand where it lies."""

    def accepts_anchor(self, anchor: Anchor, node: Node) -> bool:
        return True

    def accepts_operand(self, anchor: Anchor, role: str, shape: Shape, index: Affine) -> bool:
        return True
