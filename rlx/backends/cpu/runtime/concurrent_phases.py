"""Phases side by side: those that touch none of each other's memory run as one job, with one join at its end.

A *span* is a row of phases that follow one another and of which none writes a byte that another reads or writes, as the
memory plan has them; it says what may run side by side, whatever the extents. Where a run is bound, and chunks can be
counted, spans that save time become *jobs*: a list of the chunks of all their phases, in the order of their shares, so
that each thread has the same part of every phase, as it has where phases run one after the other.

Phases that can stop a run with an error, control flow, host calls and experts run alone. What looks at single phases
(profiles, the NaN trap, a choice of outputs that leaves a phase out) has them run one by one.
"""

from __future__ import annotations

import functools
import sys
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlx.backends.codegen.arguments import FEW_THREADS, THREADS, Pointer, Scratch, ScratchStride
from rlx.backends.codegen.table import Phase, Table
from rlx.backends.cpu.native.pool import aligned_words
from rlx.errors import ExecutionError
from rlx.ir.shape import evaluate
from rlx.kernels.program import Buffer, Kernel, Program
from rlx.plan.arena import MemoryPlan
from rlx.records import dataclass, replace

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Job", "Span", "jobs", "priced", "spans"]

Span = tuple[int, int]  # the first phase, and how many there are
Range = tuple[object, int, int]  # a memory, the first byte in it, and the byte after the last

JOIN = 1_200  # ns that publishing a phase to workers, and waiting for the last of them, takes
LEAST_SAVED = 1_000  # ns that a job is to save
LEAST_ALONE = 20_000  # ns that jobs are to save together where workers would sleep otherwise, and have to be woken
MOST_CHUNKS = 1024  # of a job: phases of more are so long that a join is nothing
MOST_PHASES = 64  # of a span
# What one core does in a ns: of products, other operations and scattered loads; bytes in its cache, and in others'.
FLOPS, OPERATIONS, LOADS, BYTES, FETCHED = 100.0, 8.0, 2.0, 50.0, 8.0
FIELDS = 3  # of a chunk in a job: function, words, number in its phase


# ---- what may run side by side


def priced(phases: Sequence[Phase], program: Program) -> tuple[Phase, ...]:
    """The phases with what `spans` and `jobs` need to know of their kernels, which aren't kept."""
    pieces = functools.cache(_makes_pieces)  # phases share kernels
    made = tuple(replace(phase, piece=pieces(phase.kernel)) for phase in phases)
    near = [n for first, count in spans(made, None) for n in range(first, first + count)]
    if not near:
        return made
    prices = _Prices(made, program)
    costs = {n: prices.worth(n) for n in near}
    return tuple(replace(phase, cost=costs.get(n, 0)) for n, phase in enumerate(made))


def _makes_pieces(kernel: Kernel) -> bool:
    """Whether the phases of a kernel make disjoint parts of its result, and read nothing of it."""
    written = {b.base for b in kernel.writes()}
    return len(kernel.stores) > 1 and kernel.anchor is None and not any(b.base in written for b in kernel.reads())


class _Prices:
    """What it is worth that another thread than the caller's runs a phase of one chunk, at usual sizes.

    What phases of one chunk make, and others of one chunk read, is in the caller's cache; elsewhere it has to be
    fetched from there, which takes as long as some arithmetic. What several threads make or read moves in any case.
    """

    def __init__(self, phases: Sequence[Phase], program: Program) -> None:
        from rlx.plan.order import usual_extents

        self.phases = phases
        self.extents = {**usual_extents(program), THREADS: FEW_THREADS}
        self.own: dict[Kernel, list[int]] = {}  # by kernel: its phases
        self.makers: dict[Buffer, list[Kernel]] = {}
        self.readers: dict[Buffer, list[Kernel]] = {}
        self.shown = {b.base for _, b in program.outputs}
        self.moved = functools.cache(self._moved)
        for number, phase in enumerate(phases):
            self.own.setdefault(phase.kernel, []).append(number)
        for kernel in self.own:
            for users, buffers in ((self.makers, kernel.writes()), (self.readers, kernel.reads())):
                for root in {b.base for b in buffers}:
                    users.setdefault(root, []).append(kernel)

    def worth(self, number: int) -> int:
        """The ns that a thread takes for the phase, less those that moving it to another core takes; 0 at least.

        Copies wait for what they move: two cores are no faster at it.
        """
        if not self.is_single(number) or self.phases[number].kernel.kind == "copy":
            return 0
        try:
            return max(0, int(self.time(number) - self.moved(self.phases[number].kernel) / FETCHED))
        except ExecutionError:  # a size that a run decides
            return 0

    def is_single(self, number: int) -> bool:
        """Whether a phase is one chunk; host calls and control flow are."""
        code = self.phases[number].code
        try:
            return code is None or code.chunks(self.extents) <= 1
        except (ExecutionError, KeyError):
            return False

    def time(self, number: int) -> float:
        """The ns of a phase."""
        from rlx.kernels.work import SCATTERED, kernel_work

        kernel = self.phases[number].kernel
        own = self.own[kernel]
        if self.phases[number].piece:
            kernel = replace(kernel, stores=(kernel.stores[bisect_left(own, number)],))
        elif len(own) > 1:
            return 0.0  # nothing says which of them does how much
        work = kernel_work(kernel, {name: n for name, n in self.extents.items() if name != THREADS})
        scattered = work.calls.get(SCATTERED, 0)
        operations = sum(work.calls.values()) - scattered
        arithmetic = work.flops / FLOPS + operations / OPERATIONS + scattered / LOADS
        return max(arithmetic, (work.read + work.written) / BYTES)

    def _moved(self, kernel: Kernel) -> int:
        """The bytes that move from core to core only because a phase of the kernel does."""
        read = {b for b in kernel.reads() if b.base.kind == "input" or self.are_single(self.makers.get(b.base, ()))}
        written = {b for b in kernel.writes() if b.base in self.shown or self.has_single(self.readers.get(b.base, ()))}
        return sum(b.nbytes(self.extents) for b in (*read, *written)) // len(self.own[kernel])

    def are_single(self, kernels: Sequence[Kernel]) -> bool:
        return bool(kernels) and all(self.is_single(n) for kernel in kernels for n in self.own[kernel])

    def has_single(self, kernels: Sequence[Kernel]) -> bool:
        return any(self.is_single(n) for kernel in kernels for n in self.own[kernel])


def spans(phases: Sequence[Phase], plan: MemoryPlan | None) -> tuple[Span, ...]:
    """The spans of a run by its memory plan; without one, of buffers as if each had memory of its own."""
    memory = _Memory(plan)
    found: list[Span] = []
    first, inside = 0, list[tuple[Phase, list[Range], list[Range]]]()
    for number, phase in enumerate(phases):
        touched = memory.touched(phase)
        if (
            touched is not None
            and len(inside) < MOST_PHASES
            and all(_is_apart((phase, *touched), other) for other in inside)
        ):
            inside.append((phase, *touched))
            continue
        found.append((first, len(inside)))
        first, inside = (number, [(phase, *touched)]) if touched is not None else (number + 1, [])
    found.append((first, len(inside)))
    return tuple(span for span in found if span[1] > 1)


class _Memory:
    """Where the buffers of a run lie."""

    def __init__(self, plan: MemoryPlan | None) -> None:
        self.places: dict[Buffer, tuple[int, int]] = {}
        self.roots = functools.cache(self._roots)  # phases share kernels
        if plan is not None:
            for interval, held in zip(plan.intervals, plan.held, strict=True):
                for buffer in held:
                    self.places[buffer] = plan.offsets[buffer], interval.size

    @staticmethod
    def _roots(kernel: Kernel) -> tuple[set[Buffer], set[Buffer]]:
        """What owns the memory that a kernel writes, and that it reads."""
        return {b.base for b in kernel.writes()}, {b.base for b in kernel.reads()}

    def touched(self, phase: Phase) -> tuple[list[Range], list[Range]] | None:
        """What a phase reads and what it writes; None where it has to run alone."""
        code, kernel = phase.code, phase.kernel
        if code is None or code.sites or kernel.mark is not None or kernel.extents is not None or kernel.makes:
            return None
        buffers = [word.buffer for word in code.words if isinstance(word, Pointer)]
        if any(b.base.kind == "table" for b in buffers):  # experts that are packed as they are needed
            return None
        if Scratch() in code.words and ScratchStride() not in code.words:  # it lies where another worker's may
            return None
        written, read = self.roots(kernel)
        found: tuple[list[Range], list[Range]] = [], []
        for buffer in buffers:
            kept = buffer.base.kind in ("input", "param", "const", "prepared")
            changed = not kept and (buffer.base in written or buffer.base not in read)
            found[changed].append(self.range(buffer))
        return found

    def range(self, buffer: Buffer) -> Range:
        """The bytes of a buffer, or of the part of one that a view is where that is the same in all runs."""
        root = buffer.base
        start, size = self.places.get(root, (0, sys.maxsize))
        memory = None if root in self.places else root
        fixed = all(isinstance(n, int) for n in (buffer.offset, *buffer.shape))
        if buffer.root is not None and fixed and root.encoding is None:
            start, size = start + evaluate(buffer.offset, {}), buffer.nbytes({})
        return memory, start, start + size


def _is_apart(one: tuple[Phase, list[Range], list[Range]], other: tuple[Phase, list[Range], list[Range]]) -> bool:
    """Whether neither phase writes what the other touches."""
    (a, a_read, a_written), (b, b_read, b_written) = one, other
    pieces = a.piece and a.kernel is b.kernel
    pairs = [(a_written, b_read), (b_written, a_read), *([] if pieces else [(a_written, b_written)])]
    return not any(x[0] is y[0] and x[1] < y[2] and y[1] < x[2] for xs, ys in pairs for x in xs for y in ys)


# ---- what does


@dataclass(frozen=True)
class Job:
    """Phases that run side by side: `words` are their number, that of their chunks, and the chunks."""

    first: int
    count: int
    words: NDArray[np.int64]


def jobs(table: Table, found: Sequence[Span], rows: Sequence[tuple[int, int, int]]) -> list[Job]:
    """The jobs of spans whose phases have these rows."""
    threads = table.threads
    if threads == 1:
        return []
    made, saved = [], 0.0
    for first, count in found:
        inside = range(first, first + count)
        counts, costs = [max(rows[n][2], 0) for n in inside], [table.phases[n].cost for n in inside]
        gain = _saved(counts, costs, threads)
        if gain >= LEAST_SAVED and sum(counts) <= MOST_CHUNKS:
            order = _in_shares(counts, costs, threads)
            words = aligned_words(2 + FIELDS * len(order))
            words[:2] = count, len(order)
            words[2:] = [w for n, chunk in order for w in (*rows[first + n][:2], chunk)]
            made.append(Job(first, count, words))
            saved += gain
    awake = any(count > 1 for _, _, count in rows)
    return made if awake or saved >= LEAST_ALONE else []


def _saved(counts: Sequence[int], costs: Sequence[int], threads: int) -> float:
    """The ns that a job saves: joins, and the time in which the caller works alone."""
    joins = sum(count > 1 for count in counts)
    single = [cost for count, cost in zip(counts, costs, strict=True) if count == 1]
    alone = sum(single) / threads if joins else max([*single, sum(single) / threads], default=0)
    return JOIN * (joins - 1) + sum(single) - alone


def _in_shares(counts: Sequence[int], costs: Sequence[int], threads: int) -> list[tuple[int, int]]:
    """The chunks of phases as (phase, chunk), so that each thread's share of them is its share of every phase.

    Where every phase is one chunk, each thread begins with one of the longest.
    """
    if max(counts) > 1:
        places = [((chunk + 0.5) / count, n, chunk) for n, count in enumerate(counts) for chunk in range(count)]
        return [(n, chunk) for _, n, chunk in sorted(places)]
    longest = sorted((n for n, count in enumerate(counts) if count), key=lambda n: -costs[n])
    total = len(longest)
    rooms = [(t + 1) * total // threads - t * total // threads for t in range(threads)]
    shares: list[list[int]] = [[] for _ in rooms]
    for n in longest:
        open_ = [share for share, room in zip(shares, rooms, strict=True) if len(share) < room]
        min(open_, key=lambda share: sum(costs[m] for m in share)).append(n)
    return [(n, 0) for share in shares for n in share]
