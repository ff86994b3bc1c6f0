"""The question of memory for code that was stored: mostly there is plenty, and nothing needs to be worked out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from rlx.backends.memory import DeviceMemory
from rlx.estimate.system import Budget
from rlx.options import CompileOptions
from rlx.records import cached_property

if TYPE_CHECKING:
    from rlx.compiler import Stages
    from rlx.estimate.admit import CarefulAdmission
    from rlx.estimate.memory import MemoryEstimate

__all__ = ["SMALL", "Device", "StoredAdmission"]

SMALL = 16 << 10  # bytes from which on it is worth the time to ask the system what it has


class Device(Protocol):
    """What is asked of a device here."""

    @property
    def name(self) -> str: ...

    def memory(self) -> DeviceMemory: ...


class StoredAdmission:
    """Asks as `rlx.estimate.admit.Admission` does, for code that was stored with the `figures` of its estimate.

    Where the sum of all figures is within every limit that there is, so is the peak. All else is left to `careful`,
    which goes through the stages of the compiler, by `stages`, only for estimates of other extents.
    """

    def __init__(
        self,
        device: Device,
        options: CompileOptions,
        model: str,
        figures: Mapping[str, Any],
        stages: Callable[[], Stages],
    ) -> None:
        self.backend, self.options, self.model, self.stages = device, options, model, stages
        self.figures = {k: v for k, v in figures.items() if k.endswith("_bytes") and type(v) is int and v >= 0}
        if "input_bytes" in self.figures:
            self.figures["input_bytes"] *= options.input_sets
        most = sum(self.figures.values()) - self.figures.get("overhead_bytes", 0)
        if not self.is_plenty(most):
            self.careful.ask_stored()

    def is_plenty(self, nbytes: int) -> bool:
        """Whether that many bytes are surely within what is allowed."""
        if self.options.over_budget == "allow":
            return True
        if self.options.budget_bytes is not None:
            return False
        if nbytes < SMALL:
            return True
        budget = Budget.of_process()
        rooms = (self.backend.memory().free, budget.soft_room, budget.headroom, *budget.figures.rooms.values())
        return all(room is not None and nbytes <= room for room in rooms)

    @cached_property
    def careful(self) -> CarefulAdmission:
        """What asks about each part."""
        from rlx.estimate.admit import CarefulAdmission

        return CarefulAdmission(self.backend, self.options, self.model, self.figures, self.stages)

    def predicted(self, extents: Mapping[str, int] | None) -> MemoryEstimate | None:
        """The estimate at the extents of a plan."""
        return self.careful.predicted(extents)

    def room(self, extents: Mapping[str, int], nbytes: int) -> None:
        """The question before an arena grows by that many bytes for a run at `extents`."""
        if not self.is_plenty(nbytes):
            self.careful.room(extents, nbytes)
