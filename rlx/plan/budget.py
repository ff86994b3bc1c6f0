"""Whether a program fits into a budget: arena, weights and inputs against what is allowed or free."""

from __future__ import annotations

import logging
from typing import Protocol

from rlx.errors import MemoryDeficit
from rlx.kernels.program import Program
from rlx.plan.plan import MemoryPlan

__all__ = ["Needs", "check_budget", "needs_of"]

log = logging.getLogger("rlx")


class Budget(Protocol):
    """The options that matter here."""

    @property
    def budget_bytes(self) -> int | None: ...

    @property
    def over_budget(self) -> str: ...


class Free(Protocol):
    """A device's memory."""

    @property
    def free(self) -> int | None: ...


class Needs:
    """Bytes by part; `arena` is None while a dim is unbounded."""

    def __init__(self, program: Program, plan: MemoryPlan | None) -> None:
        self.arena = None if plan is None else plan.arena
        self.params = sum(b.bound() or 0 for b in program.params)
        self.prepared = sum(b.bound() or 0 for b in program.buffers("prepared"))
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


def needs_of(program: Program, plan: MemoryPlan | None) -> Needs:
    """What a program takes in memory."""
    return Needs(program, plan)


def check_budget(program: Program, plan: MemoryPlan | None, memory: Free, options: Budget) -> None:
    """Raises `MemoryDeficit` (or warns, or does nothing, as `over_budget` says) when the program does not fit."""
    allowed = options.budget_bytes if options.budget_bytes is not None else memory.free
    needs = Needs(program, plan)
    if allowed is None or needs.total <= allowed or options.over_budget == "allow":
        return
    message = (
        f"{program.name!r} needs {needs.total:,} B, {needs.total - allowed:,} B more than the {allowed:,} B allowed: "
        f"{needs}. Lower the dims' upper bounds, raise budget=, or pass over_budget='allow'"
    )
    if options.over_budget == "warn":
        log.warning(message)
        return
    raise MemoryDeficit(message)
