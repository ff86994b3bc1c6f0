"""Exact packing: searches for a stacking at a height, lower and lower, until one is proved to be the least.

Every height is tried in short runs that differ in which section comes first and in what order buffers are tried, each
round longer and more shuffled than the last; what one run has proved impossible the next ones know. The work is
counted, so the answer depends on the problem and the budget alone.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np

from rlx.plan.greedy import Problem
from rlx.plan.search import FOUND, FRAME, HELPERS, OUT_OF_WORK, PART, REFUTED, State, run_search
from rlx.records import dataclass

__all__ = ["Exact", "compiled_search", "improve", "is_searchable"]

_FIRST_RUN = 10  # of the first round, as multiples of what one descent visits at least
_GROWTH = 1.5  # of the runs from round to round
_SHUFFLE = 0.15  # how much one more round of shuffling may change a rank, as a part of it
_MOST_SHUFFLES = 4
_MOST_CHOICES = 1 << 22  # that wait on the stack
_MOST_SLOTS = 22  # of the memory of failures, as a power of two
_SEED = 2  # of the shuffles; any would do, this one is quick on the public hard set
_RUNS = ((0, "size"), (0, "width"), (1, "size"), (1, "width"), (2, "width"), (2, "size"), (0, "area"), (1, "area"))


@dataclass(frozen=True)
class Exact:
    """What a search came to: the best offsets (None: none below the height given), its height, and a proved bound."""

    offsets: tuple[int, ...] | None
    height: int
    bound: int
    visits: int
    nodes: int


@cache
def compiled_search() -> Callable[..., int]:
    """The search as machine code, made once a process: that takes some 0.3 s."""
    from rlx.plan.native import compile_functions

    return compile_functions([*HELPERS, run_search], State._fields)


def is_searchable(problem: Problem, budget: int) -> bool:
    """Whether a search makes sense: work for a descent, nothing fixed, one alignment, all sizes multiples of it."""
    if len(problem) ** 2 // 2 > budget:
        return False
    alignment = min(problem.alignments)
    return (
        not problem.has_fixed
        and max(problem.alignments) == alignment
        and all(size % alignment == 0 for size in problem.sizes)
    )


def improve(
    problem: Problem,
    height: int,
    bound: int,
    budget: int,
    *,
    wanted: int | None = None,
    enough: int = 0,
    plain: bool = False,
) -> Exact:
    """Lowers a known `height` towards `bound` with `budget` visits, all of them for `wanted` if it is lower.

    It ends at a height of `enough` bytes or less, be it the least or not. `plain` runs the search in Python, which pays
    where compiling would take longer than searching, and is done where there is no LLVM.
    """
    search = _Search(problem, budget, plain)
    unit = math.gcd(*problem.sizes)
    bound = -(-bound // unit) * unit
    offsets: tuple[int, ...] | None = None
    tried = bound - unit  # the highest height at which a search has ended without an answer, or the highest refuted one
    goal = height if wanted is None else max(wanted // unit * unit, bound)
    target = goal if goal < height else bound
    while max(bound, enough) < height and search.visits < budget:
        left = budget - search.visits
        share = left if target == goal else min(max(left // 4, search.first_run), left)
        status = search.at_height(target, share)
        if status == FOUND:
            offsets = search.offsets()
            height = max(offset + size for offset, size in zip(offsets, problem.sizes, strict=True))
        else:
            tried = target
        if status == REFUTED:
            bound = target + unit
        if height - tried <= unit:
            tried = bound - unit  # once more from below, with what is left
        target = bound if tried < bound else tried + max((height - tried) // (2 * unit), 1) * unit
    return Exact(offsets, height, bound, search.visits, search.nodes)


class _Search:
    """The arrays of a problem, and how far the runs have come at each height."""

    def __init__(self, problem: Problem, budget: int, plain: bool) -> None:
        times = _busy_times(problem)
        count, sections = len(problem), len(times)
        lo = [bisect_left(times, start) for start in problem.starts]
        hi = [bisect_left(times, stop) for stop in problem.stops]
        self.numbers = sorted(range(count), key=lambda i: (lo[i], -hi[i], -problem.sizes[i], i))
        lo, hi, sizes = ([column[i] for i in self.numbers] for column in (lo, hi, problem.sizes))
        self.rest, self.cross = [0] * sections, [0] * sections
        for first, end, size in zip(lo, hi, sizes, strict=True):
            for section in range(first, end):
                self.rest[section] += size
                self.cross[section] += section > first
        widths = [end - first for first, end in zip(lo, hi, strict=True)]
        self.orders = {
            "size": sizes,
            "width": [width * (max(sizes) + 1) + size for width, size in zip(widths, sizes, strict=True)],
            "area": [width * size for width, size in zip(widths, sizes, strict=True)],
        }
        plain = plain or find_spec("llvmlite") is None
        self.run: Callable[..., int] = run_search if plain else compiled_search()
        self.array: Callable[[Sequence[int]], Any] = list if plain else _int64
        self.zeros: Callable[[int], Any] = _zeros if plain else _int64_zeros
        self.random = random.Random(count)
        frames = 4 * count + sections
        together = max(self.cross, default=0) + 1  # nearly the largest live set
        room = {
            **dict.fromkeys(("rank", "placed", "offset"), count),
            **dict.fromkeys(("floor", "rest", "cross", "run", "left", "right", "options"), sections + 1),
            **dict.fromkeys(("inside", "over_left", "over_right", "lift", "weight"), sections + 1),
            "parts": PART * (frames + 2 * (count + sections)),
            "frames": FRAME * frames,
            "choices": min(frames * together, _MOST_CHOICES) + count,
            "trail": 2 * 64 * (frames + sections),
            "failed": 1 << min(max(budget // 64, 1 << 10).bit_length(), _MOST_SLOTS),
            "work": 2,
        }
        self.state = State(
            lo=self.array(lo),
            hi=self.array(hi),
            size=self.array(sizes),
            code=self.array([self.random.getrandbits(61) for _ in range(count)]),
            first=self.array([bisect_left(lo, section) for section in range(sections + 1)]),
            **{name: self.zeros(length) for name, length in room.items()},
        )
        self.sections = sections
        self.visits = self.nodes = 0
        self.first_run = _FIRST_RUN * count * (count + sections) // 2
        self.height = -1
        self.rounds: dict[int, int] = {}

    def at_height(self, height: int, budget: int) -> int:
        """Runs until the buffers fit below a height, or can't, or the budget is spent."""
        if height != self.height:
            self.height = height
            self.fill("failed", 0)
            self.fill("weight", 1)
        end = self.visits + budget
        while self.visits < end:
            number = self.rounds.get(height, 0)
            self.rounds[height] = number + 1
            turn, (mode, order) = number // len(_RUNS), _RUNS[number % len(_RUNS)]
            self.random = random.Random(f"{_SEED} {number}")  # a run does not depend on those at other heights
            self.prepare(order, turn)
            status = self.run(self.state, height, min(int(self.first_run * _GROWTH**turn), end - self.visits), mode)
            self.visits += int(self.state.work[0])
            self.nodes += int(self.state.work[1])
            if status != OUT_OF_WORK:
                return int(status)
        return OUT_OF_WORK

    def prepare(self, order: str, turn: int) -> None:
        """Empties the plan, and ranks the buffers by an order, shuffled more in later rounds."""
        spread = _SHUFFLE * min(turn, _MOST_SHUFFLES)
        values = [value * (1 + spread * (2 * self.random.random() - 1)) for value in self.orders[order]]
        for rank, buffer in enumerate(sorted(range(len(values)), key=values.__getitem__)):
            self.state.rank[buffer] = rank
        self.fill("placed", 0)
        self.fill("floor", 0)
        if turn % 2 == 0:  # every other round starts without the conflicts of those before
            self.fill("weight", 1)
        self.state.rest[: self.sections] = self.array(self.rest)
        self.state.cross[: self.sections] = self.array(self.cross)

    def offsets(self) -> tuple[int, ...]:
        """The offsets found, in the order of the problem."""
        found = [0] * len(self.numbers)
        for number, offset in zip(self.numbers, self.state.offset, strict=True):
            found[number] = int(offset)
        return tuple(found)

    def fill(self, name: str, value: int) -> None:
        """Sets all of an array."""
        target = getattr(self.state, name)
        target[:] = [value] * len(target) if isinstance(target, list) else value


def _busy_times(problem: Problem) -> list[int]:
    """The starts after which some buffer stops before another starts: there the live set is a maximal one."""
    steps = sorted([*((start, 1) for start in problem.starts), *((stop, 0) for stop in problem.stops)])
    return [start for (start, starts), (_, follows) in pairwise(steps) if starts and not follows]


def _zeros(length: int) -> list[int]:
    return [0] * length


def _int64_zeros(length: int) -> Any:
    return np.zeros(length, np.int64)


def _int64(values: Sequence[int]) -> Any:
    return np.array(values, np.int64)
