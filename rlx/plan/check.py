"""An independent proof that a plan is right: it shares no code with the packers."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from rlx.errors import CompileError
from rlx.plan.interval import DEFAULT_ALIGNMENT, Interval

__all__ = ["check"]


def check(
    intervals: Sequence[Interval],
    offsets: Sequence[int],
    height: int,
    *,
    base_alignment: int = DEFAULT_ALIGNMENT,
    capacity: int | None = None,
) -> None:
    """Raise `CompileError` unless the offsets are a valid plan of an arena of `height` bytes.

    The rules:
    1. Every buffer has one offset.
    2. No live range is empty.
    3. No offset is negative.
    4. An offset is a multiple of its buffer's alignment and of the base alignment.
    5. A buffer and its guard end within `height`, which is at most `capacity` where that is given.
    6. A fixed buffer lies where it was pinned.
    7. No two buffers that are live at one step share a byte, their guards included.
    """
    if len(offsets) != len(intervals):
        raise CompileError(f"memory plan: {len(intervals)} buffers but {len(offsets)} offsets; plan again")
    if capacity is not None and height > capacity:
        raise CompileError(f"memory plan: the arena's height of {height} bytes is above the capacity of {capacity}")
    for interval, offset in zip(intervals, offsets, strict=True):
        _check_alone(interval, offset, height, base_alignment)
    _check_disjoint(intervals, offsets)


def _check_alone(interval: Interval, offset: int, height: int, base_alignment: int) -> None:
    where = f"memory plan: buffer {interval.name!r} at offset {offset}"
    if interval.stop <= interval.start:
        raise CompileError(f"{where}: the live range [{interval.start}, {interval.stop}) is empty")
    if offset < 0:
        raise CompileError(f"{where}: the offset is negative")
    for alignment in (interval.alignment, base_alignment):
        if offset % alignment:
            raise CompileError(f"{where}: the offset is misaligned, expected a multiple of {alignment} bytes")
    end = offset + _extent(interval)
    if end > height:
        raise CompileError(f"{where}: it ends at {end}, beyond the arena's height of {height} bytes")
    if interval.fixed is not None and offset != interval.fixed:
        raise CompileError(f"{where}: it is pinned at offset {interval.fixed} and was moved")


def _check_disjoint(intervals: Sequence[Interval], offsets: Sequence[int]) -> None:
    """Walk the steps with the live address ranges kept sorted; a newcomer may only meet its two neighbours."""
    events = []
    for index, interval in enumerate(intervals):
        if interval.size:
            events.append((interval.start, 1, index))
            events.append((interval.stop, 0, index))  # 0: a stop comes before a start at the same step
    live: list[tuple[int, int]] = []
    for step, is_start, index in sorted(events):
        entry = (offsets[index], index)
        if not is_start:
            del live[bisect_left(live, entry)]
            continue
        place = bisect_left(live, entry)
        for neighbour in live[max(place - 1, 0) : place + 1]:
            _check_pair(intervals, offsets, index, neighbour[1], step)
        insort(live, entry)


def _check_pair(intervals: Sequence[Interval], offsets: Sequence[int], one: int, other: int, step: int) -> None:
    low, high = sorted((one, other), key=lambda index: (offsets[index], index))
    low_end = offsets[low] + _extent(intervals[low])
    if low_end <= offsets[high]:
        return
    raise CompileError(
        f"memory plan: buffers {intervals[low].name!r} [{offsets[low]}, {low_end}) and {intervals[high].name!r} "
        f"[{offsets[high]}, {offsets[high] + _extent(intervals[high])}) overlap, and both are live at step {step}"
    )


def _extent(interval: Interval) -> int:
    return interval.size + interval.guard if interval.size else 0
