"""100,000 random sets of buffers: the checker accepts every plan, none is worse than the best textbook greedy or below
the bound, and a second run gives the same plan. A quick run takes 500 of them, another part each day.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from rlx.plan.bound import lower_bound
from rlx.plan.check import check
from rlx.plan.interval import Interval, round_up
from rlx.plan.pack import Search, pack

SETS = 500  # of one test
MOST = 20  # buffers of a set


def chain(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """Live ranges of a network: each value is read soon, some much later."""
    return [(i, i + 1 + (rng.randrange(1, 3) if rng.random() < 0.8 else rng.randrange(1, 12))) for i in range(count)]


def scattered(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """Live ranges of any place and length."""
    starts = sorted(rng.randrange(14) for _ in range(count))
    return [(start, start + rng.randrange(1, 9)) for start in starts]


def nested(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """Live ranges of a backward pass: what is made first is read last."""
    return [(i, 2 * count - i + rng.randrange(2)) for i in range(count)]


SHAPES: tuple[Callable[[random.Random, int], list[tuple[int, int]]], ...] = (chain, scattered, nested)
SIZES: tuple[Callable[[random.Random], int], ...] = (
    lambda rng: rng.randrange(1, 40),
    lambda rng: 64 * rng.choice((1, 2, 4, 8, 16, 32)),
    lambda rng: rng.choice((0, 1, 63, 64, 65, 1000, 4096)),
    lambda rng: int(rng.paretovariate(0.8)),
)


def random_set(rng: random.Random) -> tuple[list[Interval], int]:
    """A set and the base alignment that it is packed with."""
    base = rng.choice((1, 1, 64))
    size = rng.choice(SIZES)
    ranges = rng.choice(SHAPES)(rng, rng.randrange(1, MOST))
    own = rng.choice(((1,), (1, 64), (base,)))
    guard = rng.choice((0, 0, 32))
    return [
        Interval(f"b{i}", start, stop, size(rng), rng.choice(own), guard=guard)
        for i, (start, stop) in enumerate(ranges)
    ], base


def first_fit(intervals: Sequence[Interval], order: Sequence[int], base: int) -> int:
    """The height of first fit in an order, by trying every place where a buffer may sit."""
    placed: list[tuple[Interval, int]] = []
    for one in (intervals[number] for number in order):
        room, step = one.room(base), max(one.alignment, base)
        near = [(o, o + b.room(base)) for b, o in placed if b.start < one.stop and one.start < b.stop]
        spots = sorted({0} | {round_up(high, step) for _, high in near})
        placed.append((one, next(s for s in spots if all(s + room <= low or high <= s for low, high in near))))
    return max((o + b.room(base) for b, o in placed), default=0)


def best_greedy(intervals: Sequence[Interval], base: int) -> int:
    """The least height of first fit by size, by live range, by area and in program order."""
    kept = [number for number, one in enumerate(intervals) if one.size]
    kept.sort(key=lambda i: (intervals[i].start, -intervals[i].stop, -intervals[i].size, i))
    ranks: tuple[Callable[[Interval], int], ...] = (
        lambda b: -b.room(base),
        lambda b: b.start - b.stop,
        lambda b: b.room(base) * (b.start - b.stop),
        lambda b: 0,
    )
    return min(first_fit(intervals, sorted(kept, key=lambda i, r=rank: r(intervals[i])), base) for rank in ranks)  # type: ignore[misc]


@pytest.mark.parametrize("part", range(200))
@pytest.mark.sample(1)
def test_random_sets(part: int) -> None:
    for number in range(SETS):
        rng = random.Random(part * SETS + number)
        intervals, base = random_set(rng)
        search: Search = 2000 if number % 10 == 0 else "off"
        found = pack(intervals, base_alignment=base, effort=0.02, search=search)
        check(intervals, found.offsets, found.height, base_alignment=base)
        assert lower_bound(intervals, base_alignment=base) <= found.bound <= found.height
        assert found.height <= round_up(best_greedy(intervals, base), base), intervals
        if number % 5 == 0 or found.height > found.bound:
            assert pack(intervals, base_alignment=base, effort=0.02, search=search) == found
