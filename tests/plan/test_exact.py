"""The exact search finds the least height of small sets, proves it, and is the same in Python and compiled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.errors import OptionError
from rlx.plan.bound import lower_bound
from rlx.plan.check import check
from rlx.plan.exact import improve, is_searchable
from rlx.plan.greedy import Problem
from rlx.plan.interval import Interval, Placement
from rlx.plan.pack import pack

Row = tuple[int, int, int]  # start, stop, size
ROWS = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=7)


def problem_of(rows: Sequence[Row]) -> Problem:
    rows = sorted(rows, key=lambda row: (row[0], -row[1], -row[2]))
    starts, stops, sizes = (list(column) for column in zip(*rows, strict=True))
    return Problem(starts, stops, sizes, [1] * len(rows), [-1] * len(rows))


def intervals_of(problem: Problem) -> list[Interval]:
    rows = zip(problem.starts, problem.stops, problem.sizes, strict=True)
    return [Interval(str(i), *row, 1) for i, row in enumerate(rows)]


def least_height(problem: Problem) -> int:
    """By brute force: some order of dropping buffers onto those before gives every bottom-left stacking."""
    starts, stops, sizes = problem.starts, problem.stops, problem.sizes
    best = sum(sizes)
    for order in permutations(range(len(problem))):
        tops = [0] * len(problem)
        for place, one in enumerate(order):
            under = [tops[o] for o in order[:place] if starts[o] < stops[one] and starts[one] < stops[o]]
            tops[one] = max(under, default=0) + sizes[one]
        best = min(best, max(tops))
    return best


def hard_set(seed: int, count: int, height: int = 64) -> list[Row]:
    """Rows cut out of a full rectangle, so that a stacking without any waste exists."""
    rng = random.Random(seed)
    boxes = [(0, 64, height)]
    while len(boxes) < count:
        number = max(range(len(boxes)), key=lambda i: ((boxes[i][1] - boxes[i][0]) * boxes[i][2], rng.random()))
        start, stop, size = boxes.pop(number)
        if rng.random() < 0.5 and stop - start > 1:
            cut = rng.randrange(start + 1, stop)
            boxes += [(start, cut, size), (cut, stop, size)]
        elif size > 1:
            cut = rng.randrange(1, size)
            boxes += [(start, stop, cut), (start, stop, size - cut)]
        else:
            boxes.append((start, stop, size))
    return boxes


@given(ROWS)
@settings(max_examples=60)
def test_finds_and_proves_the_least_height(rows: list[Row]) -> None:
    problem = problem_of([(start, start + span, size) for start, span, size in rows])
    intervals = intervals_of(problem)
    least = least_height(problem)
    found = improve(problem, sum(problem.sizes) + 1, lower_bound(intervals, base_alignment=1), 10**6, plain=True)
    assert found.offsets is not None
    check(intervals, found.offsets, found.height, base_alignment=1)
    assert (found.height, found.bound) == (least, least)


@given(ROWS)
@settings(max_examples=40)
def test_says_when_nothing_is_lower(rows: list[Row]) -> None:
    problem = problem_of([(start, start + span, size) for start, span, size in rows])
    least = least_height(problem)
    found = improve(problem, least, lower_bound(intervals_of(problem), base_alignment=1), 10**6, plain=True)
    assert (found.offsets, found.height, found.bound) == (None, least, least)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sample(4)
def test_sets_without_waste_are_solved(seed: int) -> None:
    """Cut from a rectangle of height 64: what no greedy packs, the search does."""
    problem = problem_of(hard_set(seed, 24))
    intervals = intervals_of(problem)
    placement = pack(intervals, base_alignment=1, search=100_000)
    check(intervals, placement.offsets, placement.height, base_alignment=1, capacity=64)
    assert placement.bound == lower_bound(intervals, base_alignment=1) == 64


def test_the_search_runs_where_greedy_falls_short() -> None:
    intervals = intervals_of(problem_of(hard_set(3, 40)))
    greedy = pack(intervals, base_alignment=1, effort=0, search="off")
    searched = pack(intervals, base_alignment=1, effort=0, search="auto")
    assert greedy.height > 64
    assert "search" not in greedy.method
    assert searched.height < greedy.height
    assert searched.method.startswith("exact search, ")


def test_a_height_that_is_enough_ends_the_search() -> None:
    """The first plan that is low enough is taken: greedy's, or what the search comes to before the least."""
    problem = problem_of(hard_set(3, 40))
    intervals = intervals_of(problem)
    greedy = pack(intervals, base_alignment=1, effort=0, search="off")
    assert pack(intervals, base_alignment=1, effort=0, enough=greedy.height) == greedy
    one_less = improve(
        problem, greedy.height, 64, 10**6, wanted=greedy.height - 1, enough=greedy.height - 1, plain=True
    )
    assert 64 <= one_less.height < greedy.height
    least = improve(problem, greedy.height, 64, 10**6, plain=True)
    assert one_less.visits <= least.visits
    assert least.height == 64


def test_no_search_at_the_bound() -> None:
    intervals = [Interval("a", 0, 2, 64), Interval("b", 1, 3, 64)]
    assert "search" not in pack(intervals, search=10**6).method


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sample(2)
def test_compiled_and_plain_search_are_one(seed: int) -> None:
    problem = problem_of(hard_set(seed, 30))
    plain = improve(problem, 200, 64, 30_000, plain=True)
    assert improve(problem, 200, 64, 30_000) == plain


def test_equal_calls_give_equal_answers() -> None:
    problem = problem_of(hard_set(11, 36))
    assert len({improve(problem, 200, 60, 20_000, plain=True) for _ in range(3)}) == 1


def test_what_the_search_can_take() -> None:
    assert is_searchable(Problem([0], [1], [64], [64], [-1]), 100)
    assert not is_searchable(Problem([0], [1], [64], [64], [0]), 100)
    assert not is_searchable(Problem([0, 0], [1, 1], [64, 64], [64, 128], [-1, -1]), 100)
    assert not is_searchable(problem_of(hard_set(0, 24)), 100)


def test_auto_searches_on_where_the_plan_would_not_fit() -> None:
    """Without a capacity the short search is all; with one that it misses, the long one goes on until it fits."""
    intervals = intervals_of(problem_of(hard_set(1, 120)))
    short = pack(intervals, base_alignment=1, effort=0)
    assert short.height > 64
    fitting = pack(intervals, base_alignment=1, effort=0, capacity=64)
    check(intervals, fitting.offsets, fitting.height, base_alignment=1, capacity=64)
    assert fitting.method.startswith("exact search, ")


@pytest.mark.parametrize("search", ["on", -1, True, 1.5])
def test_bad_budgets_are_named(search: object) -> None:
    with pytest.raises(OptionError, match="search="):
        pack([], search=search)  # type: ignore[arg-type]


def random_rows(seed: int) -> list[Interval]:
    rng = random.Random(seed)
    steps, most = rng.choice([4, 12, 40]), rng.choice([3, 20, 300])
    return [
        Interval(
            str(i), s := rng.randrange(steps), s + rng.randrange(1, steps), rng.randrange(most), rng.choice([1, 64])
        )
        for i in range(rng.randrange(1, 20))
    ]


@pytest.mark.parametrize("block", range(1000))
@pytest.mark.sample(3)
def test_random_sets(block: int) -> None:
    """100 sets a block: accepted by the checker, never above the best greedy, never below the bound, repeatable."""
    for seed in range(100 * block, 100 * block + 100):
        intervals = random_rows(seed)
        greedy = pack(intervals, base_alignment=64, effort=0.02, search="off")
        found = pack(intervals, base_alignment=64, effort=0.02, search=3000)
        check(intervals, found.offsets, found.height)
        assert lower_bound(intervals) <= found.bound <= found.height <= greedy.height
        assert isinstance(found, Placement)
        assert found == pack(intervals, base_alignment=64, effort=0.02, search=3000)
