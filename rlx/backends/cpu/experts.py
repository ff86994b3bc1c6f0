"""What the CPU's runtime keeps for mixture-of-experts layers: where each expert's weights are, and the routing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np

from rlx.backends.base import Executable, ExpertFigures, ExpertLayerSpec
from rlx.backends.cpu.grouped_words import CALLS, CAPACITY, RING, SLOTS, STATS
from rlx.backends.cpu.pool import aligned_words
from rlx.backends.cpu.residency import Mask, matrix_bytes, panel_bytes
from rlx.backends.cpu.weights import Shared
from rlx.errors import OptionError
from rlx.ir.graph import Array
from rlx.ir.mapped import mapping_of
from rlx.ir.shape import evaluate
from rlx.kernels.experts import ExpertLayer
from rlx.kernels.program import Buffer, Program

__all__ = ["ExpertCalls", "ExpertMemory"]


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
        self.calls = calls
        self.rings.clear()
        for layer in self.layers:
            self.memory[layer.block][:STATS] = 0

    def taken(self, layer: ExpertLayer) -> list[Array]:
        """The captured calls of a layer, oldest first; they are dropped."""
        block, ring = self.memory[layer.block], self.rings.get(layer.block)
        if ring is None:
            return []
        count, total = min(int(block[CALLS]), self.calls), int(block[CALLS])
        block[CALLS] = 0
        slots = [ring[(total - count + n) % self.calls] for n in range(count)]
        return [slot[1 : 1 + slot[0]].reshape(-1, layer.top_k).copy() for slot in slots]

    def figures(self, layer: ExpertLayer) -> ExpertFigures:
        """What was counted since the last time."""
        counted = self.memory[layer.block][STATS:].reshape(-1, 3)
        tokens, hits, misses = counted.T.copy()
        counted[...] = 0
        return ExpertFigures(tokens, hits, misses, misses * sum(map(matrix_bytes, layer.weights)))


class ExpertCalls(Executable):
    """The calls on experts of `CpuExecutable`; each holds the state block meanwhile."""

    program: Program
    shared: Shared
    experts: ExpertMemory
    held: Callable[[], AbstractContextManager[None]]
    forget: Callable[[], None]

    @property
    def expert_layers(self) -> Sequence[ExpertLayerSpec]:
        return [
            ExpertLayerSpec(layer.name, layer.experts, layer.top_k, sum(map(panel_bytes, layer.weights)))
            for layer in self.program.experts
        ]

    @property
    def offloaded_bytes(self) -> int:
        return self.shared.residency.saved_bytes()

    def set_resident(self, masks: Sequence[Mask]) -> None:
        for layer, mask in zip(self.program.experts, masks, strict=True):
            for weight in layer.weights if not mask.all() else ():
                stored = self.shared.memory.get(weight.panels)
                if self.shared.prepared and weight.source.base not in self.shared.params and stored is not None:
                    self._check_file(layer, stored)
        with self.held():
            self.shared = self.shared.parted(self)  # type: ignore[arg-type]
            pairs = zip(self.program.experts, masks, strict=True)
            self.shared.place_experts({w.panels: mask for layer, mask in pairs for w in layer.weights})
            self.forget()

    def _check_file(self, layer: ExpertLayer, panels: Array) -> None:
        if mapping_of(panels) is not None:
            raise OptionError(
                f"set_resident_experts: layer {layer.name!r} was loaded from an artifact, which has its weights as "
                "they are packed, in pages that the system drops by itself; load the model file to choose experts"
            )

    def capture(self, calls: int) -> None:
        with self.held():
            self.experts.capture(calls)
            self.forget()

    def take_captured(self) -> Mapping[str, list[Array]]:
        with self.held():
            return {layer.name: self.experts.taken(layer) for layer in self.experts.layers}

    def take_figures(self) -> Mapping[str, ExpertFigures]:
        with self.held():
            return {layer.name: self.experts.figures(layer) for layer in self.experts.layers}
