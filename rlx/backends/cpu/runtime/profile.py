"""Times of kernels, and how often threads wait for one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlx.backends.base import Joins
from rlx.ir.graph import Array

if TYPE_CHECKING:
    from rlx.backends.cpu.runtime.executable import Bound, CpuExecutable

__all__ = ["joins", "profile"]


def joins(bound: Bound) -> Joins:
    """The joins of threads in a run of this binding."""
    many = bound.table[:, 2] > 1
    inside = sum(int(many[job.first : job.first + job.count].sum()) for job in bound.jobs)
    serial, groups = int(many.sum()), len(bound.jobs)
    return Joins(serial - inside + groups, serial, sum(job.count for job in bound.jobs), groups)


def profile(executable: CpuExecutable, inputs: Sequence[Array], repeat: int) -> list[tuple[str, str, float]]:
    """See `Executable.profile`: the median of some runs; states are as before."""
    with executable.held():
        ready = executable.compact(inputs)
        bound = executable.bind(ready)
        before = {root: executable.states.array(root).copy() for root in executable.states.memory}
        bound = executable.execute(bound, ready)
        taken = []  # nanoseconds of each run
        try:
            for _ in range(repeat):
                executable.block.enable_profile()
                bound = executable.execute(bound, ready)
                taken.append(executable.block.profiled(len(executable.profiled)))
        finally:
            executable.block.disable_profile()
            for root, array in before.items():
                executable.states.array(root)[...] = array
    seconds = np.median(taken, axis=0) / 1e9  # of one that was interrupted others say nothing
    pairs = zip(executable.profiled, seconds, strict=True)
    return [(k.how, f"{k.name} [{k.label}]", float(s)) for k, s in pairs]
