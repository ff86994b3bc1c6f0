"""The checker passes valid plans and names what is wrong with each kind of corruption."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.errors import CompileError
from rlx.plan.check import check
from rlx.plan.interval import Interval

PLAN = [
    Interval("a", 0, 3, 64),
    Interval("b", 1, 4, 100),
    Interval("c", 3, 6, 64, 128),
    Interval("d", 0, 6, 64, fixed=256),
    Interval("e", 0, 6, 0),
]
OFFSETS = (0, 64, 0, 256, 320)


def test_a_valid_plan_passes() -> None:
    check(PLAN, OFFSETS, 320)


@pytest.mark.parametrize(
    "offsets, height, message",
    [
        ((64, 64, 0, 256, 0), 320, r"'a' \[64, 128\) and 'b' \[64, 164\) overlap.*step 1"),
        ((0, 64, 128, 256, 0), 320, r"'b' \[64, 164\) and 'c' \[128, 192\) overlap.*step 3"),
        ((0, 192, 0, 256, 0), 320, r"'b' .*'d'"),
        ((0, 64, 64, 256, 0), 320, r"'c' at offset 64: .*misaligned.*128"),
        ((0, 65, 0, 256, 0), 320, r"'b' at offset 65: .*misaligned.*64"),
        ((0, -64, 0, 256, 0), 320, r"'b' at offset -64: .*negative"),
        (OFFSETS, 319, r"'d' at offset 256: it ends at 320, beyond .* 319"),
        ((0, 64, 0, 256, 384), 320, r"'e' at offset 384.*beyond"),
        ((0, 64, 0, 320, 0), 500, r"'d' at offset 320: it is pinned at offset 256"),
        (OFFSETS[:4], 320, "5 buffers but 4 offsets"),
    ],
)
def test_each_corruption_is_named(offsets: tuple[int, ...], height: int, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        check(PLAN, offsets, height)


def test_base_alignment_binds_buffers_that_ask_for_less() -> None:
    check([Interval("a", 0, 1, 8, 1)], [8], 64, base_alignment=1)
    with pytest.raises(CompileError, match="multiple of 64"):
        check([Interval("a", 0, 1, 8, 1)], [8], 64)


def test_an_empty_live_range_is_refused() -> None:
    with pytest.raises(CompileError, match=r"'a'.*empty"):
        check([Interval("a", 1, 1, 8)], [0], 64)


@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.integers(1, 6), st.integers(0, 6), st.integers(0, 20)), min_size=1, max_size=12
    )
)
@settings(max_examples=300, deadline=None)
def test_agrees_with_comparing_all_pairs(rows: list[tuple[int, int, int, int]]) -> None:
    """Arbitrary offsets, mostly invalid: the sweep says no exactly where some pair shares a byte and a step."""
    intervals = [Interval(str(i), start, start + span, size, 1) for i, (start, span, size, _) in enumerate(rows)]
    offsets = [row[3] for row in rows]
    clash = any(
        a.size and b.size and a.start < b.stop and b.start < a.stop and x < y + b.size and y < x + a.size
        for i, (a, x) in enumerate(zip(intervals, offsets, strict=True))
        for b, y in zip(intervals[:i], offsets[:i], strict=True)
    )
    if not clash:
        check(intervals, offsets, 100, base_alignment=1)
        return
    with pytest.raises(CompileError, match="overlap"):
        check(intervals, offsets, 100, base_alignment=1)
