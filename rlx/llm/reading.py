"""What a run for one token reads: by that and its time the memory's bandwidth shows."""

from __future__ import annotations

import math

from rlx.records import dataclass
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.states import State

__all__ = ["Reading", "reading_of"]


@dataclass(frozen=True)
class Reading:
    """Bytes that a run reads: all `weights` once, and of caches `position` for each position before it.

    Each cache with its number of positions: one of a window is read as far as that reaches. Tables that runs look rows
    up in do not count, and of experts as many as are chosen for one token.
    """

    weights: int
    caches: tuple[tuple[int, int], ...]  # bytes of a position, and the most positions

    def at(self, positions: int) -> int:
        """The bytes of a run for a token after so many positions."""
        return self.weights + sum(size * min(positions, most) for size, most in self.caches)


def reading_of(model: CompiledGraph, caches: list[State]) -> Reading | None:
    """None where the device does not say which weights its kernels read."""
    program = model._executable.program
    if program is None:
        return None
    read = {b.base for kernel in program.run for b in kernel.reads()}
    whole = {b for kernel in program.run for b in kernel.read_whole()}
    weights = sum(b.nbytes({}) for b in whole if b.is_fixed)
    for layer in program.experts:
        panels = sum(weight.panels.nbytes({}) for weight in layer.weights if weight.panels in read)
        sources = {weight.source.base for weight in layer.weights} & read  # of experts without panels
        weights -= panels - panels * layer.top_k // layer.experts + sum(b.nbytes({}) for b in sources)
    rows = []
    for state in caches:
        shape, dtype = state.stored
        rows.append((math.prod(shape) * dtype.itemsize // (shape[0] * shape[2]), shape[2]))
    return Reading(weights, tuple(rows))
