"""The peak-live lower bound: no packing of the same schedule needs less."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.plan.interval import DEFAULT_ALIGNMENT, Interval

__all__ = ["live_bytes", "lower_bound", "peak_live", "peak_step"]


def live_bytes(
    intervals: Sequence[Interval], *, base_alignment: int = DEFAULT_ALIGNMENT
) -> tuple[tuple[int, int], ...]:
    """(step, bytes live from that step on) at each step where the total changes, sizes rounded up to `base_alignment`.

    Every offset is a multiple of `base_alignment`, so a buffer takes its rounded size whatever stands above it.
    """
    change: dict[int, int] = {}
    for interval in intervals:
        size = interval.room(base_alignment)
        change[interval.start] = change.get(interval.start, 0) + size
        change[interval.stop] = change.get(interval.stop, 0) - size
    total = 0
    curve = []
    for step in sorted(change):
        total += change[step]
        curve.append((step, total))
    return tuple(curve)


def peak_live(intervals: Sequence[Interval], *, base_alignment: int = DEFAULT_ALIGNMENT) -> int:
    """The most bytes that are live at one step; 0 for no intervals."""
    return max((total for _, total in live_bytes(intervals, base_alignment=base_alignment)), default=0)


def peak_step(intervals: Sequence[Interval], *, base_alignment: int = DEFAULT_ALIGNMENT) -> int:
    """The first step at which `peak_live` bytes are live; 0 for no intervals."""
    curve = live_bytes(intervals, base_alignment=base_alignment)
    return max(curve, key=lambda point: point[1])[0] if curve else 0


def lower_bound(intervals: Sequence[Interval], *, base_alignment: int = DEFAULT_ALIGNMENT) -> int:
    """The least height in bytes that any packing can have: `peak_live`, and the end of the highest fixed buffer."""
    fixed_ends = (
        interval.fixed + interval.room(base_alignment) for interval in intervals if interval.fixed is not None
    )
    return max(peak_live(intervals, base_alignment=base_alignment), max(fixed_ends, default=0))
