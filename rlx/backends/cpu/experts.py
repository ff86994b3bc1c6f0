"""What the CPU's runtime keeps for mixture-of-experts layers: where each expert's weights are, and the routing."""

from __future__ import annotations

import numpy as np

from rlx.backends.cpu.pool import aligned_words
from rlx.backends.cpu.weights import Shared
from rlx.ir.graph import Array
from rlx.kernels.program import Buffer, Program

__all__ = ["ExpertMemory"]


class ExpertMemory:
    """The tables and blocks of one clone; they never move."""

    def __init__(self, program: Program) -> None:
        self.layers = program.experts
        self.memory: dict[Buffer, Array] = {}
        for layer in self.layers:
            for buffer in (layer.block, *(weight.table for weight in layer.weights)):
                (count,) = buffer.shape
                assert isinstance(count, int)
                self.memory[buffer] = aligned_words(count)

    def address(self, root: Buffer) -> int:
        """Where a table or block lies."""
        return int(self.memory[root].ctypes.data)

    def fill(self, shared: Shared) -> None:
        """Writes where the weights are now into the tables."""
        for layer in self.layers:
            for weight in layer.weights:
                panels = shared.contents(weight.panels)
                table = self.memory[weight.table].reshape(-1, 2)
                table[:, 0] = panels.ctypes.data + panels.strides[0] * np.arange(layer.experts)
