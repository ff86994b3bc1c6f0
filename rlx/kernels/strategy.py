"""Strategies: the ways in which a device computes kernels. Each kernel carries its own, which cost models ask.

How the CPU chooses one is in `rlx.backends.cpu.select`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.kernels.expr import Expr
    from rlx.kernels.program import Kernel

__all__ = ["Strategy"]


class Strategy:
    """One way to compute kernels of some kind.

    `name` is what explain, costs, traces and the report page show: the anchor, a dot and the way, and after a plus sign
    a variant of it, as in "matmul.panels+f28".
    """

    packs = False  # its kernels only bring what their anchor reads into a layout of the device: nothing is computed

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name

    @property
    def measured_as(self) -> str:
        """The kind of kernels by which measured corrections of predicted times are kept."""
        return self.name

    def panels(self, kernel: Kernel) -> tuple[Expr, ...]:
        """Operands in a layout of the device, which a run reads whole: their loads name where it starts."""
        return ()

    def read_at(self, kernel: Kernel, operand: Expr, extents: Mapping[str, int]) -> Expr:
        """How a run at these extents reads an operand of the anchor, where the kernel holds several ways to."""
        return operand

    def panel_bytes(self, nbytes: int) -> int:
        """How many bytes of a panel operand a run reads, of so many that it takes."""
        return nbytes
