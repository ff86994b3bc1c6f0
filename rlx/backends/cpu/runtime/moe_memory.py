"""The memory of one clone for mixture-of-experts layers: where each expert's weights are, and the routing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlx.backends.base import ExpertFigures
from rlx.backends.cpu.native.pool import aligned_words
from rlx.backends.cpu.runtime.residency import matrix_bytes, panel_bytes
from rlx.backends.cpu.runtime.shared import Shared
from rlx.backends.cpu.schedule.routing import CALLS, CAPACITY, RING, SLOTS, STATS
from rlx.ir.graph import Array
from rlx.ir.shape import evaluate
from rlx.kernels.experts import ExpertLayer
from rlx.kernels.program import Buffer, Program

__all__ = ["ExpertMemory"]


class ExpertMemory:
    """The tables and blocks of one clone, which never move, and the rings of calls that are captured."""

    def __init__(self, program: Program, calls: int = 0) -> None:
        self.layers: Sequence[ExpertLayer] = program.experts
        self.memory: dict[Buffer, Array] = {}
        self.rings: dict[Buffer, Array] = {}
        self.calls = calls  # how many of each layer are captured
        for layer in self.layers:
            for buffer in (layer.block, *(weight.table for weight in layer.weights)):
                (count,) = buffer.shape
                assert isinstance(count, int)
                self.memory[buffer] = aligned_words(count)

    def address(self, root: Buffer) -> int:
        """Where a table or block lies."""
        return int(self.memory[root].ctypes.data)

    def bind(self, shared: Shared, extents: Mapping[str, int]) -> None:
        """Writes where the weights are now into the tables; sees to it that rings have room for runs at `extents`."""
        for layer in self.layers:
            for weight in layer.weights:
                mask, table = shared.residency.mask(weight), self.memory[weight.table].reshape(-1, 2)
                places = np.cumsum(mask) - 1
                start = int(shared.memory[weight.panels].ctypes.data)
                table[:, 0] = np.where(mask, start + places * panel_bytes(weight), 0)
                held = shared.residency.matrices.get(weight.panels, {})
                for expert in np.flatnonzero(~mask):
                    matrix = held.get(int(expert))
                    matrix = shared.contents(weight.source)[expert] if matrix is None else matrix
                    table[expert, 1] = matrix.ctypes.data
            if self.calls:
                self.make_room(layer, max(evaluate(layer.rows, extents), 0))

    def make_room(self, layer: ExpertLayer, rows: int) -> None:
        """A ring whose slots hold that many numbers; what is in it stays."""
        block = self.memory[layer.block]
        if layer.block in self.rings and rows <= block[CAPACITY]:
            return
        ring = aligned_words(self.calls * (rows + 1)).reshape(self.calls, rows + 1)
        if layer.block in self.rings:
            old = self.rings[layer.block]
            ring[:, : old.shape[1]] = old
        self.rings[layer.block] = ring
        block[[RING, SLOTS, CAPACITY]] = ring.ctypes.data, self.calls, rows

    def capture(self, calls: int) -> None:
        """Starts rings of that many calls anew with the next binding; 0: none."""
        for layer in self.layers:
            self.memory[layer.block][:STATS] = 0
        self.calls = calls
        self.rings.clear()

    def captured(self, layer: ExpertLayer) -> list[Array]:
        """The captured calls of a layer, oldest first."""
        block, ring = self.memory[layer.block], self.rings.get(layer.block)
        if ring is None:
            return []
        count, total = min(int(block[CALLS]), self.calls), int(block[CALLS])
        slots = [ring[(total - count + n) % self.calls] for n in range(count)]
        return [slot[1 : 1 + slot[0]].reshape(-1, layer.top_k).copy() for slot in slots]

    def figures(self, layer: ExpertLayer) -> ExpertFigures:
        """What was counted since `drop_figures`."""
        tokens, hits, misses = self.memory[layer.block][STATS:].reshape(-1, 3).T.copy()
        return ExpertFigures(tokens, hits, misses, misses * sum(map(matrix_bytes, layer.weights)))

    def drop_captured(self) -> None:
        """Forgets the captured calls of all layers."""
        for layer in self.layers:
            self.memory[layer.block][CALLS] = 0

    def drop_figures(self) -> None:
        """Starts counting anew."""
        for layer in self.layers:
            self.memory[layer.block][STATS:] = 0
