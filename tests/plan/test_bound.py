"""The peak-live bound counts what is live at one step, at rounded sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlx.plan.bound import live_bytes, lower_bound, peak_live, peak_step
from rlx.plan.interval import Interval


def test_half_open_ranges_do_not_meet_where_they_touch() -> None:
    touching = [Interval("a", 0, 2, 64), Interval("b", 2, 4, 64)]
    assert peak_live(touching) == 64
    assert peak_live([*touching, Interval("c", 1, 3, 128)]) == 192


def test_sizes_round_up_to_the_base_alignment() -> None:
    pair = [Interval("a", 0, 1, 1), Interval("b", 0, 1, 65)]
    assert peak_live(pair) == 64 + 128
    assert peak_live(pair, base_alignment=1) == 66


def test_peak_step_is_the_first_at_the_peak() -> None:
    intervals = [Interval("a", 0, 9, 64), Interval("b", 4, 5, 64), Interval("c", 7, 8, 64)]
    assert peak_step(intervals) == 4
    assert live_bytes(intervals) == ((0, 64), (4, 128), (5, 64), (7, 128), (8, 64), (9, 0))


def test_nothing_needs_nothing() -> None:
    assert (peak_live([]), peak_step([]), lower_bound([])) == (0, 0, 0)


def test_a_fixed_buffer_raises_the_lower_bound_to_its_end() -> None:
    intervals = [Interval("pin", 0, 1, 10, fixed=640), Interval("b", 0, 1, 64)]
    assert peak_live(intervals) == 128
    assert lower_bound(intervals) == 704


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 200))))
def test_equals_the_sum_at_the_busiest_step(rows: list[tuple[int, int, int]]) -> None:
    intervals = [Interval(str(i), start, start + span, size) for i, (start, span, size) in enumerate(rows)]
    by_step = [sum(-(-b.size // 64) * 64 for b in intervals if b.start <= step < b.stop) for step in range(15)]
    assert peak_live(intervals) == max(by_step)
    assert not rows or by_step[peak_step(intervals)] == max(by_step)
