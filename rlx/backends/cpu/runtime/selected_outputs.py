"""Selected outputs: the phases that only other outputs need are skipped for one run."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlx.backends.cpu.native.entry import output_records
from rlx.backends.cpu.native.entry_ir import SOURCE
from rlx.backends.cpu.native.pool import aligned_words
from rlx.backends.cpu.native.runner import is_parallel
from rlx.backends.cpu.native.runner_ir import JOB
from rlx.backends.cpu.native.selected_ir import (
    SELECTED_OF,
    SELECTED_OUTPUT_COUNT,
    SELECTED_OUTPUTS,
    SELECTED_PARALLEL,
    SELECTED_PATCH_COUNT,
    SELECTED_PATCHES,
    SELECTED_PHASES,
    SELECTED_RANGE_COUNT,
    SELECTED_RANGES,
    SELECTED_RESULT,
    SELECTED_VALUE,
    SELECTED_WORDS,
)
from rlx.backends.cpu.runtime.results import WRITTEN_OUT
from rlx.ir.graph import Array
from rlx.kernels.program import Buffer, Kernel, Program

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Selected", "Selection", "selected"]


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

    def table(self, every: NDArray[np.int64], outputs: Collection[int]) -> NDArray[np.int64]:
        """A table of phases with those skipped that these outputs don't need: a copy, unless all are needed."""
        skip = self.skipped(outputs)
        if skip is None:
            return every
        table = aligned_words(every.size).reshape(every.shape)
        table[:] = every
        chosen = table[: len(skip)]  # a last phase may feed states
        chosen[skip, 2] = 0
        for first in chosen[:, JOB].nonzero()[0]:
            if skip[first : first + ctypes.c_int64.from_address(int(chosen[first, JOB])).value].any():
                chosen[first, JOB] = 0
        return table


class Selected(int):
    """What runs for some outputs need, prepared for the native entry: its value is the address of these words.

    `table` are the phases that make the outputs, `shown` what such a run leaves: an array for each output, or None.
    """

    table: NDArray[np.int64]
    shown: tuple[Array | None, ...]
    kept: object  # all that the words point to


def selected(
    every: NDArray[np.int64],
    table: NDArray[np.int64],
    asked: Sequence[int],
    arrays: Sequence[Array],
    used: Sequence[Array],
    moved: Sequence[tuple[int, int, int, int]] = (),
) -> Selected:
    """For runs that `every` is the table of, by another `table`, which makes the outputs asked for of all `arrays`.

    No array of `out` may lie in memory that is used. Outputs that are `moved` (patches, see `selected_ir`) are written
    into their arrays of `out`, which must be new ones.
    """
    words = aligned_words(SELECTED_WORDS)
    made = Selected(words.ctypes.data)
    shown = tuple(array if number in asked else None for number, array in enumerate(arrays))
    result = tuple(arrays[number] for number in asked)
    records = output_records(shown)
    records[[number for number, *_ in moved], SOURCE] = 0
    patches = aligned_words(4 * max(1, len(moved))).reshape(-1, 4)
    patches[: len(moved)] = [*moved] or np.empty((0, 4))
    ranges = aligned_words(2 * max(1, len(used))).reshape(-1, 2)
    for row, memory in zip(ranges, used, strict=False):
        row[:] = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    words[SELECTED_OF], words[SELECTED_PHASES] = every.ctypes.data, table.ctypes.data
    words[SELECTED_PARALLEL] = is_parallel(table)
    words[SELECTED_VALUE] = made if any(array is None for array in shown) else 0
    words[SELECTED_RESULT] = id(result)
    words[SELECTED_OUTPUTS], words[SELECTED_OUTPUT_COUNT] = records.ctypes.data, len(shown)
    words[SELECTED_RANGES], words[SELECTED_RANGE_COUNT] = ranges.ctypes.data, len(used)
    words[SELECTED_PATCHES], words[SELECTED_PATCH_COUNT] = patches.ctypes.data, len(moved)
    if moved:
        words[SELECTED_VALUE] = WRITTEN_OUT
    made.table, made.shown, made.kept = table, shown, (words, every, result, records, ranges, patches)
    return made
