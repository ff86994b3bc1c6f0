"""What the buffers of a program take in memory."""

from __future__ import annotations

from rlx.kernels.program import Program
from rlx.plan.arena import MemoryPlan

__all__ = ["Needs", "needs_of"]


class Needs:
    """Bytes by part; `arena` is None while a dim is unbounded."""

    def __init__(self, program: Program, plan: MemoryPlan | None, offloaded: int = 0) -> None:
        self.arena = None if plan is None else plan.arena
        self.params = sum(b.bound() or 0 for b in program.params)
        self.prepared = sum(b.bound() or 0 for b in program.buffers("prepared")) - offloaded
        self.constants = sum(b.bound() or 0 for b in program.constants)
        self.states = sum(b.bound() or 0 for b in program.states)

    @property
    def total(self) -> int:
        """The known parts added up."""
        return (self.arena or 0) + self.params + self.prepared + self.constants + self.states

    def __str__(self) -> str:
        arena = "unbounded (give dims)" if self.arena is None else f"{self.arena:,} B"
        return (
            f"params {self.params:,} B, packed weights {self.prepared:,} B, constants {self.constants:,} B, "
            f"states {self.states:,} B, activations and outputs {arena}"
        )


def needs_of(program: Program, plan: MemoryPlan | None, offloaded: int = 0) -> Needs:
    """What a program takes in memory; `offloaded` bytes of packed weights are not there."""
    return Needs(program, plan, offloaded)
