"""The memory of results, computed before a run.

`y = model.run(x)` in a loop holds two sets of results: `y` keeps the last ones while the next are made. Large results
are not made in the arena, so a part of the arena is never touched and takes no memory; it is subtracted.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlx.backends.cpu.runtime.results import DIRECT, is_movable
from rlx.kernels.program import Program
from rlx.plan.arena import MemoryPlan

__all__ = ["result_bytes"]

LARGE_PAGE = 2 << 20  # bytes; if one byte of such a page is touched, the whole page may take memory


def result_bytes(program: Program, plan: MemoryPlan, sizes: Iterable[int]) -> int:
    """Bytes that results of these sizes need in addition to a full arena, when `run` is called in a loop."""
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
