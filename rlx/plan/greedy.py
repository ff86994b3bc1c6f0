"""The packers that the portfolio in `pack` runs: list placement in a given order, lowest floor first, and sweeps.

All of them work on a `Problem` in which the intervals that need space are numbered by (start, longest first, largest
first), and return one offset a number, or None once they can't get below `limit`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from rlx.records import cached_property, dataclass

_FAMILIAR = 4  # places of one size that are tried, from the latest on
_GAPS_A_BUFFER = 64  # a sweep that looks at more gaps than this on average is not near linear and gives up

__all__ = ["Problem", "place", "place_floors", "settled", "sweep", "sweep_two_ended"]

Offsets = list[int]


@dataclass(frozen=True)
class Problem:
    """The intervals that need space: sizes are rounded to the base alignment, `fixed` is -1 where free."""

    starts: list[int]
    stops: list[int]
    sizes: list[int]
    alignments: list[int]
    fixed: list[int]

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def has_fixed(self) -> bool:
        return any(offset >= 0 for offset in self.fixed)

    @cached_property
    def after(self) -> list[int]:
        """For each number the first one that starts when it is dead: it meets all of those between."""
        return [int(end) for end in np.searchsorted(np.array(self.starts), np.array(self.stops))]

    @cached_property
    def degrees(self) -> list[int]:
        """How many others each one meets."""
        dead = np.searchsorted(np.sort(np.array(self.stops)), np.array(self.starts), side="right")
        return [end - int(gone) - 1 for end, gone in zip(self.after, dead, strict=True)]

    @cached_property
    def breadths(self) -> list[int]:
        """The most bytes that are live at one step of each one's life."""
        steps = np.unique(np.array(self.starts + self.stops))
        first = np.searchsorted(steps, self.starts)
        last = np.searchsorted(steps, self.stops)
        change = np.zeros(len(steps), np.int64)
        np.add.at(change, first, self.sizes)
        np.subtract.at(change, last, self.sizes)
        spans = [np.cumsum(change)]  # level k: the maximum over 2**k steps
        while 2 ** len(spans) <= len(steps):
            half = 2 ** (len(spans) - 1)
            spans.append(np.maximum(spans[-1][:-half], spans[-1][half:]))
        levels = np.frexp(last - first)[1] - 1
        return [
            int(max(spans[level][low], spans[level][high - 2**level]))
            for level, low, high in zip(levels, first, last, strict=True)
        ]

    @cached_property
    def neighbours(self) -> list[list[int]]:
        """The others that each one meets. Its size is the number of meeting pairs: only for sparse problems."""
        lists: list[list[int]] = [[] for _ in self.starts]
        for one, end in enumerate(self.after):
            later = range(one + 1, end)
            for other in later:
                lists[other].append(one)
            lists[one].extend(later)  # those before `one` are in already: they were visited first
        return lists

    def reversed(self) -> tuple[Problem, list[int]]:
        """The same problem with time running backwards, and this problem's number of each of its intervals."""
        order = sorted(range(len(self)), key=lambda i: (-self.stops[i], self.starts[i], -self.sizes[i], i))
        mirrored = Problem(
            [-self.stops[i] for i in order],
            [-self.starts[i] for i in order],
            [self.sizes[i] for i in order],
            [self.alignments[i] for i in order],
            [self.fixed[i] for i in order],
        )
        return mirrored, order


def place(problem: Problem, order: Sequence[int], *, best_fit: bool, dense: bool, limit: int) -> Offsets | None:
    """Put one interval after the other at the lowest offset that is free for its whole life, or in the tightest gap.

    `dense` picks the implementation, not the result: arrays, for problems in which most intervals meet.
    """
    offsets = list(problem.fixed)
    gap_for = _dense_gaps(problem) if dense else _sparse_gaps(problem, offsets)
    for one in order:
        if offsets[one] >= 0:
            continue
        offset = gap_for(one, best_fit)
        if offset + problem.sizes[one] >= limit:
            return None
        offsets[one] = offset
    return offsets


def _sparse_gaps(problem: Problem, offsets: Offsets) -> Callable[[int, bool], int]:
    sizes, alignments, neighbours = problem.sizes, problem.alignments, problem.neighbours

    def gap_for(one: int, best_fit: bool) -> int:
        size, alignment = sizes[one], alignments[one]
        near = [other for other in neighbours[one] if offsets[other] >= 0]
        near.sort(key=offsets.__getitem__)
        top = 0  # from address 0, so that the gap before the first live block counts
        found, spare = -1, -1
        for other in near:
            low = offsets[other]
            if low > top:
                offset = -(-top // alignment) * alignment
                room = low - offset - size
                if room >= 0 and (found < 0 or room < spare):
                    found, spare = offset, room
                    if not best_fit:
                        return found
            top = max(top, low + sizes[other])
        return found if found >= 0 else -(-top // alignment) * alignment

    return gap_for


def _dense_gaps(problem: Problem) -> Callable[[int, bool], int]:
    """Placed blocks live in one table sorted by offset; a masked running maximum of their ends gives the gaps."""
    table = np.zeros((4, len(problem)), np.int64)  # start, stop, low, high
    count = 0

    def insert(one: int, offset: int) -> None:
        nonlocal count
        row = int(np.searchsorted(table[2, :count], offset))
        table[:, row + 1 : count + 1] = table[:, row:count]
        table[:, row] = problem.starts[one], problem.stops[one], offset, offset + problem.sizes[one]
        count += 1

    def gap_for(one: int, best_fit: bool) -> int:
        size, alignment = problem.sizes[one], problem.alignments[one]
        start, stop, low, high = table[:, :count]
        near = np.flatnonzero((start < problem.stops[one]) & (stop > problem.starts[one]))
        tops = np.zeros(len(near) + 1, np.int64)
        np.maximum.accumulate(high[near], out=tops[1:])
        tops = -(-tops // alignment) * alignment
        rooms = low[near] - tops[:-1] - size
        fits = np.flatnonzero(rooms >= 0)
        chosen = len(near)
        if len(fits):
            chosen = int(fits[np.argmin(rooms[fits])] if best_fit else fits[0])
        offset = int(tops[chosen])
        insert(one, offset)
        return offset

    for one, offset in enumerate(problem.fixed):
        if offset >= 0:
            insert(one, offset)
    return gap_for


def place_floors(problem: Problem, rank: Callable[[int], float], *, limit: int | None) -> Offsets | None:
    """Grow the plan from the ground: always place the interval whose floor (the top of what it meets) is lowest.

    Ties go to the highest `rank`. Leaves no gap to fill later, so fixed buffers are not supported.
    """
    sizes, alignments, neighbours = problem.sizes, problem.alignments, problem.neighbours
    floors = [0] * len(problem)
    offsets = [-1] * len(problem)
    heap = [(0, -rank(one), one) for one in range(len(problem))]
    heapify(heap)
    while heap:
        floor, tie, one = heappop(heap)
        if offsets[one] >= 0:
            continue
        if floor < floors[one]:
            heappush(heap, (floors[one], tie, one))
            continue
        top = floor + sizes[one]
        if limit is not None and top >= limit:
            return None
        offsets[one] = floor
        for other in neighbours[one]:
            if floors[other] < top:
                floors[other] = -(-top // alignments[other]) * alignments[other]
    return offsets


class _FreeList:
    """The free address ranges below `ceiling`, sorted; frees join their neighbours."""

    def __init__(self, ceiling: int) -> None:
        self.lows = [0]
        self.highs = [ceiling]

    def take(self, gap: int, low: int, high: int) -> None:
        gap_low, gap_high = self.lows[gap], self.highs[gap]
        left = [(gap_low, low)] if gap_low < low else []
        right = [(high, gap_high)] if high < gap_high else []
        self.lows[gap : gap + 1] = [part[0] for part in left + right]
        self.highs[gap : gap + 1] = [part[1] for part in left + right]

    def give(self, low: int, high: int) -> None:
        gap = bisect_left(self.lows, low)
        first, last = gap, gap
        if gap and self.highs[gap - 1] == low:
            first, low = gap - 1, self.lows[gap - 1]
        if gap < len(self.lows) and self.lows[gap] == high:
            last, high = gap + 1, self.highs[gap]
        self.lows[first:last] = [low]
        self.highs[first:last] = [high]


def _sweep(problem: Problem, ceiling: int, choose: Callable[[_FreeList, int], int], patient: bool) -> Offsets | None:
    """Walk the schedule as an allocator would: free what is dead, `choose` an offset for the new one (-1: none)."""
    free = _FreeList(ceiling)
    offsets = [-1] * len(problem)
    by_stop = sorted(range(len(problem)), key=problem.stops.__getitem__)
    dead = 0
    visits = 0
    for one, start in enumerate(problem.starts):
        while problem.stops[by_stop[dead]] <= start:
            gone = by_stop[dead]
            free.give(offsets[gone], offsets[gone] + problem.sizes[gone])
            dead += 1
        offsets[one] = choose(free, one)
        visits += len(free.lows)
        if offsets[one] < 0 or (visits > _GAPS_A_BUFFER * len(problem) and not patient):
            return None
    return offsets


def sweep(problem: Problem, *, best_fit: bool, limit: int, patient: bool = False) -> Offsets | None:
    """Place in program order, near linear in time unless `patient`; equal to `place` in that order.

    Fixed buffers are not supported.
    """
    infinite = limit * 2 + 1

    def choose(free: _FreeList, one: int) -> int:
        size, alignment = problem.sizes[one], problem.alignments[one]
        found, spare, gap = -1, -1, -1
        for index, low in enumerate(free.lows):
            offset = -(-low // alignment) * alignment
            room = free.highs[index] - offset - size
            if room >= 0 and (found < 0 or room < spare):
                found, spare, gap = offset, room, index
                if not best_fit:
                    break
        if found < 0 or found + size >= limit:
            return -1
        free.take(gap, found, found + size)
        return found

    return _sweep(problem, infinite, choose, patient)


def sweep_two_ended(problem: Problem, *, ceiling: int) -> Offsets | None:
    """Place in program order below a known ceiling, in the tightest gap, at the end whose neighbour lives longer.

    What dies early then keeps its free side, and joins it. Succeeds on any chain at its peak-live bound.
    Fixed buffers are not supported.
    """
    forever = max(problem.stops) + 1
    below = {0: forever}  # address -> when the block ending there dies; the ground and the ceiling never do
    above = {ceiling: forever}

    def choose(free: _FreeList, one: int) -> int:
        size, alignment = problem.sizes[one], problem.alignments[one]
        found, spare, gap = -1, -1, -1
        for index, low in enumerate(free.lows):
            offset = -(-low // alignment) * alignment
            room = free.highs[index] - offset - size
            if room >= 0 and (found < 0 or room < spare):
                found, spare, gap = offset, room, index
        if found < 0:
            return -1
        if above[free.highs[gap]] > below[free.lows[gap]]:
            found = (free.highs[gap] - size) // alignment * alignment
        free.take(gap, found, found + size)
        below[found + size] = above[found] = problem.stops[one]
        return found

    return _sweep(problem, ceiling, choose, patient=False)


def settled(problem: Problem, offsets: Sequence[int]) -> Offsets:
    """The same plan with intervals where others of their size were before, as far as each can move there alone.

    A thread that computes the same part of all of them then writes what is in its own cache, and in no other's.
    """
    found, sizes = list(offsets), problem.sizes
    known: dict[int, list[int]] = {}  # by size: offsets, the latest first
    for one, size in enumerate(sizes):
        places = known.setdefault(size, [])
        if problem.fixed[one] < 0:
            near = [(found[other], found[other] + sizes[other]) for other in problem.neighbours[one]]
            for place in places[:_FAMILIAR]:
                apart = all(low >= place + size or high <= place for low, high in near)
                if apart and place % problem.alignments[one] == 0:
                    found[one] = place
                    break
        if found[one] in places:
            places.remove(found[one])
        places.insert(0, found[one])
    return found
