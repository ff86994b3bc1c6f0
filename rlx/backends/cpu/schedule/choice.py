"""Which of several ways to compute a kernel a run takes: its sizes decide.

Where only a run knows them, a kernel has the code of each way, and a run launches that of one: the others have no
chunks and no scratch, and their arguments are not computed. It is the way that a compile for these sizes would choose,
so results have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from rlx.backends.cpu.schedule.arguments import Computed, Extents, KernelCode, Product, once
from rlx.ir.shape import Size, evaluate
from rlx.records import dataclass, replace

__all__ = ["Choice", "Chosen", "Limit", "alternatives", "where_chosen"]


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


_once = lru_cache(256)(once)  # many kernels, as of all layers, have equal choices: a binding asks one of them


def where_chosen(code: KernelCode, choice: Choice, way: int) -> KernelCode:
    """The code, launched in runs that take this way."""
    here = _once(choice)
    words = (Computed(Chosen(here, way, w.fn)) if isinstance(w, Computed) else w for w in code.words)
    scratch = code.scratch
    if scratch != 0:
        number = scratch.fn if isinstance(scratch, Computed) else Product((scratch,))
        scratch = Computed(Chosen(here, way, number))
    return replace(code, words=tuple(words), chunks=Chosen(here, way, code.chunks), scratch=scratch)


def alternatives(choice: Choice, *ways: Sequence[KernelCode]) -> list[KernelCode]:
    """The code of a kernel that is computed in one of several ways, given that of each in the order of the choice."""
    return [where_chosen(code, choice, way) for way, codes in enumerate(ways) for code in codes]
