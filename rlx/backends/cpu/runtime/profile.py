"""Times of kernels, and how often threads wait for one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlx.backends.base import Joins
from rlx.backends.timing import KernelTime, ThreadSpan, Timer, kernel_times
from rlx.ir.graph import Array

if TYPE_CHECKING:
    from rlx.backends.cpu.runtime.binding import Bound
    from rlx.backends.cpu.runtime.executable import CpuExecutable
    from rlx.kernels.program import Kernel

__all__ = ["joins", "profile"]


WAKES = 100_000  # ns in which a thread that sleeps is awake, on a machine that has a processor for it


def joins(bound: Bound) -> Joins:
    """The joins of threads in a run of this binding."""
    many = bound.table[:, 2] > 1
    inside = sum(int(many[job.first : job.first + job.count].sum()) for job in bound.jobs)
    serial, groups = int(many.sum()), len(bound.jobs)
    return Joins(serial - inside + groups, serial, sum(job.count for job in bound.jobs), groups)


def profile(executable: CpuExecutable, inputs: Sequence[Array], repeat: int) -> list[KernelTime]:
    """See `Executable.profile`; states are as before."""
    kernels, block = executable.profiled, executable.block
    with executable.held():
        ready = executable.compact(inputs)
        bound = executable.bind(ready)
        before = {root: executable.states.array(root).copy() for root in executable.states.memory}
        bound = executable.execute(bound, ready)
        timer = Timer(repeat)

        def restore() -> None:
            for root, array in before.items():
                executable.states.array(root)[...] = array

        def once() -> tuple[ArrayLike, ArrayLike]:
            nonlocal bound
            restore()
            block.enable_profile()
            bound = executable.execute(bound, ready)
            rows = block.profiled(len(kernels))
            return rows[:, 0] / 1e9, _waited(rows, block.threads_apart(len(kernels)), kernels) / 1e9

        try:
            timer.run(once)
            last = zip(block.profiled(len(kernels)), block.threads_apart(len(kernels)), strict=True)
            spans = [_spans(row, cells) for row, cells in last]
        finally:
            block.disable_profile()
            restore()
    return kernel_times(timer, [k.how for k in kernels], [f"{k.name} [{k.label}]" for k in kernels], spans)


def _waited(rows: NDArray[np.int64], cells: NDArray[np.int64], kernels: Sequence[Kernel]) -> NDArray[np.int64]:
    """ns in which a thread that had work was without a processor, as far as that is known.

    A thread that takes part late, or not at all, had no processor either, nor had a caller that ends a phase long after
    its last chunk. A host call may sleep of its own will, the caller waits for the other threads of a phase, and these
    do other phases between the visits of one in a loop. A run of one thread waits for nobody.
    """
    took, used, visits, began = rows.T
    if cells.shape[1] == 1:
        return np.where([k.host is not None for k in kernels], 0, took - used)
    first, last, _, chunks, used_first, used_last = np.moveaxis(cells, 2, 0)
    shared = chunks.any(axis=1)
    within = (last - first - (used_last - used_first)).max(axis=1)
    missing = (chunks > 0).sum(axis=1) < np.minimum(chunks.shape[1], chunks.sum(axis=1))
    late = np.where(missing, took, (first - began[:, None]).max(axis=1)) - WAKES
    tail = took - (last.max(axis=1) - began) - WAKES
    known = np.maximum(np.maximum(within, late), tail)
    waited = np.where(shared, np.where(visits == 1, known, 0), took - used)
    return np.where([k.host is not None for k in kernels], 0, waited)


def _spans(row: NDArray[np.int64], cells: NDArray[np.int64]) -> tuple[ThreadSpan, ...]:
    """What each thread did of a phase; of one with several visits, the time in chunks."""
    took, _, visits, began = row.tolist()
    found = []
    for thread, (first, last, busy, chunks, *_) in enumerate(cells.tolist()):
        if chunks:
            start, length = (first - began, last - first) if visits == 1 else (0, busy)
            found.append(ThreadSpan(thread, start / 1e9, length / 1e9, chunks))
    if not found and visits:
        found.append(ThreadSpan(0, 0.0, took / 1e9, visits))
    return tuple(found)
