"""What results take, known before a run.

Who calls `y = model.run(x)` again and again still has the last results when the next are made: there are two sets of
them. What of the arena is never touched, as large results are not made there, is taken off.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlx.backends.cpu.runtime.results import DIRECT, is_movable
from rlx.kernels.program import Program
from rlx.plan.arena import MemoryPlan

__all__ = ["result_bytes"]

LARGE_PAGE = 2 << 20  # bytes that the system may give at once: where one byte is touched, all are there


def result_bytes(program: Program, plan: MemoryPlan, sizes: Iterable[int]) -> int:
    """Bytes that `run` takes for results of these sizes beside an arena that is full, also when called in a loop."""
    total = sum(sizes)
    if total < DIRECT or program.made:
        return 2 * total
    hosts = {b.base for k in program.run if k.host is not None for b in (*k.operands, *k.results)}
    moved = {b for _, b in program.outputs if is_movable(b, program.outputs, hosts)}
    spans = sorted(
        (plan.offsets[held[0]], plan.offsets[held[0]] + place.size)
        for place, held in zip(plan.intervals, plan.held, strict=True)
        if held and not moved.issuperset(held)
    )
    untouched, end = 0, 0
    for first, last in [*spans, (plan.arena, plan.arena)]:
        untouched += max((first - end) // LARGE_PAGE - 1, 0) * LARGE_PAGE
        end = max(end, last)
    return 2 * total - min(total, untouched)
