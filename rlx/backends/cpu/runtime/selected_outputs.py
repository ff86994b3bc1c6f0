"""Selected outputs: the phases that only other outputs need are skipped for one run."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from rlx.backends.cpu.native.runner import RunBlock
from rlx.backends.cpu.native.runner_ir import JOB
from rlx.kernels.program import Buffer, Kernel, Program

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Selection"]


class Selection:
    """Which phases of a run a set of outputs takes; worked out once a set."""

    def __init__(self, program: Program, kernels: Sequence[Kernel]) -> None:
        self.program = program
        self.kernels = kernels  # by phase
        self.known: dict[frozenset[int], NDArray[np.bool_] | None] = {}

    def skipped(self, outputs: Collection[int]) -> NDArray[np.bool_] | None:
        """The phases to skip, None where every one is needed."""
        key = frozenset(outputs)
        if key not in self.known:
            needed = self._needed(key)
            skip = np.array([kernel not in needed for kernel in self.kernels], np.bool_)
            self.known[key] = skip if skip.any() else None
        return self.known[key]

    def _needed(self, outputs: Collection[int]) -> set[Kernel]:
        """The kernels that make the outputs or write a state, and those that make what these read."""
        wanted: set[Buffer] = {self.program.outputs[number][1].base for number in outputs}
        needed: set[Kernel] = set()
        while True:  # rounds of a loop hand buffers back to kernels that come before
            more = [k for k in self.program.run if k not in needed and self._is_needed(k, wanted)]
            if not more:
                return needed
            needed.update(more)
            wanted.update(b.base for k in more for b in k.reads())

    def _is_needed(self, kernel: Kernel, wanted: Collection[Buffer]) -> bool:
        writes = kernel.writes()
        return not writes or any(b.base in wanted or b.base.kind == "state" for b in writes)

    @contextmanager
    def only(self, block: RunBlock, outputs: Collection[int]) -> Iterator[None]:
        """Runs inside this make these outputs only."""
        every = len(outputs) == len(self.program.outputs) or self.program.made  # where runs set the counts themselves
        skip = None if every else self.skipped(outputs)
        if skip is None:
            yield
            return
        table = block.table[: len(skip)]
        before = table.copy()
        table[skip, 2] = 0
        for first in table[:, JOB].nonzero()[0]:
            if skip[first : first + ctypes.c_int64.from_address(int(table[first, JOB])).value].any():
                table[first, JOB] = 0
        block.note_parallel()
        try:
            yield
        finally:
            table[:] = before
            block.note_parallel()
