"""Which of the ways that one kernel holds a run takes: its sizes decide. (Strategies are chosen before: see `select`.)

Where only a run knows them, a kernel has the code of each way, and a run launches that of one: the others have no
chunks and no scratch, and their arguments are not computed. It is the way that a compile for these sizes would choose,
so results have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.schedule.arguments import Extents
from rlx.ir.shape import Size, evaluate
from rlx.records import dataclass

__all__ = ["Choice", "Chosen", "Limit"]


@dataclass(frozen=True)
class Limit:
    """That a size is at least `least`, and at most `most` where that is given."""

    size: Size
    least: int = 0
    most: int | None = None

    def holds(self, extents: Extents) -> bool:
        """Whether it is in a run of these extents."""
        size = evaluate(self.size, extents)
        return self.least <= size and (self.most is None or size <= self.most)


@dataclass(frozen=True)
class Choice:
    """The number of the way that a run takes: the first of `ways` all of whose limits hold, `len(ways)` if none do."""

    ways: tuple[tuple[Limit, ...], ...]

    def __call__(self, extents: Extents) -> int:
        for number, limits in enumerate(self.ways):
            if all(limit.holds(extents) for limit in limits):
                return number
        return len(self.ways)


@dataclass(eq=False, repr=False)
class Chosen:
    """A number of chunks, bytes of scratch, or an argument, in runs that take this way; in others 0."""

    choice: Callable[[Extents], int]
    way: int
    number: Callable[[Extents], int]

    def __call__(self, extents: Extents) -> int:
        return self.number(extents) if self.choice(extents) == self.way else 0
