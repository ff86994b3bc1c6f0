"""The order of a program's kernels as a lever of its peak memory: a beam search over topological orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from rlx.ir.shape import usual_size
from rlx.kernels.program import Buffer, Kernel, Program
from rlx.plan.bound import lower_bound
from rlx.plan.interval import DEFAULT_ALIGNMENT, round_up
from rlx.plan.liveness import lifetimes
from rlx.records import dataclass, replace

__all__ = ["peak_of", "reorder", "usual_extents"]

_WORK = 30_000  # partial orders that are looked at: some 0.2 s
_WIDEST = 16  # partial orders that are kept at each step


def reorder(program: Program, extents: Mapping[str, int]) -> Program:
    """The program with `run` in the topological order of least peak memory that was found; itself if none is lower.

    Nothing else changes. Sizes are taken at `extents`. An order costs no speed: as many kernels as before run right
    after one whose result they read, which is then still in cache. Deterministic: the search is bounded by a count,
    not by time.
    """
    if len(program.run) < 3 or any(kernel.kind == "control" or kernel.makes for kernel in program.run):
        return program  # control flow, and sizes that data decide, keep their order
    peak = peak_of(program, extents)
    work = _Work(program, extents)
    if peak <= max(work.needs):
        return program  # no order is lower than the kernel that needs the most
    best = program
    for order in (work.early(), work.search()):
        if work.breaks(order) > work.breaks(range(len(program.run))):
            continue
        found = replace(program, run=[program.run[number] for number in order])
        lowest = peak_of(found, extents)
        if lowest < peak:
            best, peak = found, lowest
    return best


def usual_extents(program: Program) -> dict[str, int]:
    """Every dim at the size that orders are compared at, see `usual_size`."""
    return {name: usual_size(symbol) for name, symbol in program.dims.items()}


def peak_of(program: Program, extents: Mapping[str, int]) -> int:
    """The lower bound in bytes of the program's arena in its present order."""
    return lower_bound(lifetimes(program, extents).intervals)


@dataclass(frozen=True)
class _Partial:
    """The first kernels of an order: which they are (as bits), and what they take."""

    done: int
    peak: int
    live: int
    broken: int  # kernels that do not read what the one before has made
    order: tuple[int, ...]
    waiting: tuple[int, ...]  # by kernel: how many of those that it needs are still to run
    readers: tuple[int, ...]  # by buffer: how many kernels still read it

    @property
    def score(self) -> tuple[int, int, int, tuple[int, ...]]:
        return self.peak, self.live, self.broken, self.order


def _before(kernels: Sequence[Kernel]) -> list[set[int]]:
    """By kernel, those that must run before it: who writes what it reads, and who touches what it writes over."""
    before: list[set[int]] = [set() for _ in kernels]
    wrote: dict[Buffer, int] = {}
    read: dict[Buffer, list[int]] = {}
    for number, kernel in enumerate(kernels):
        for buffer in kernel.reads():
            if buffer.base in wrote:
                before[number].add(wrote[buffer.base])
            read.setdefault(buffer.base, []).append(number)
        for buffer in kernel.writes():
            earlier = read.pop(buffer.base, [])
            before[number].update(n for n in (*earlier, wrote.get(buffer.base, number)) if n != number)
            wrote[buffer.base] = number
    hosts = [number for number, kernel in enumerate(kernels) if kernel.host is not None]
    for earlier_host, later_host in pairwise(hosts):  # host calls keep their order
        before[later_host].add(earlier_host)
    return before


class _Work:
    """The kernels by number: what each makes and reads, and which must run before it."""

    def __init__(self, program: Program, extents: Mapping[str, int]) -> None:
        kernels = program.run
        makers = {
            buffer: number
            for number, kernel in enumerate(kernels)
            for buffer in kernel.writes()
            if buffer.kind == "arena"
        }
        self.buffers = {buffer: index for index, buffer in enumerate(makers)}
        self.sizes = [round_up(buffer.nbytes(dict(extents)), DEFAULT_ALIGNMENT) for buffer in makers]
        kept = {buffer.base for buffer in (*(b for _, b in program.outputs), *program.updates.values())}
        self.made = [self._arena(kernel.writes()) for kernel in kernels]
        self.read = [self._arena(kernel.reads()) for kernel in kernels]
        self.taken = [self._taken(kernel) for kernel in kernels]
        self.readers = [int(buffer in kept) for buffer in makers]  # what is kept has a reader that never comes
        for read in self.read:
            for buffer in read:
                self.readers[buffer] += 1
        self.before = _before(kernels)
        self.after: list[list[int]] = [[] for _ in kernels]
        for number, earlier_ones in enumerate(self.before):
            for earlier in earlier_ones:
                self.after[earlier].append(number)

    @property
    def needs(self) -> list[int]:
        """The bytes that each kernel needs at once, whatever the order."""
        return [
            sum(self.sizes[b] for b in {*made, *read}) - max((self.sizes[b] for b in taken), default=0)
            for made, read, taken in zip(self.made, self.read, self.taken, strict=True)
        ]

    def _arena(self, buffers: Sequence[Buffer]) -> list[int]:
        return list(dict.fromkeys(self.buffers[b.base] for b in buffers if b.base in self.buffers))

    def _taken(self, kernel: Kernel) -> list[int]:
        """The operands that the kernel's result can take the place of, if it is the last to read them."""
        made = self._arena(kernel.writes())
        return [b for b in self._arena(kernel.in_place_operands()) if made and self.sizes[b] == self.sizes[made[0]]]

    def early(self) -> list[int]:
        """The order with kernels that none waits for, such as copies to outputs, right behind the last they wait for.

        What they copy from can then end. The search does not look that far ahead in a long program.
        """
        place = [number if self.after[number] else max(b, default=-1) for number, b in enumerate(self.before)]
        return sorted(range(len(place)), key=lambda number: (place[number], place[number] != number, number))

    def breaks(self, order: Sequence[int]) -> int:
        """How many kernels of an order do not read what the one before has made."""
        return sum(not set(self.made[one]) & set(self.read[two]) for one, two in pairwise(order))

    def search(self) -> tuple[int, ...]:
        """The best order that the beam finds."""
        count = len(self.made)
        waiting = tuple(len(earlier) for earlier in self.before)
        beam = [_Partial(0, 0, 0, 0, (), waiting, tuple(self.readers))]
        looked = 0
        for step in range(count):
            best: dict[int, _Partial] = {}
            for partial in beam:
                ready = [n for n in range(count) if not partial.waiting[n] and not partial.done >> n & 1]
                looked += len(ready)
                for number in ready:
                    following = self._run(partial, number)
                    rival = best.get(following.done)
                    if rival is None or following.score < rival.score:
                        best[following.done] = following
            left = max(_WORK - looked, 0) // (count - step)  # spread evenly over what is to come
            width = max(1, min(_WIDEST, left * len(beam) // max(len(best), 1)))
            beam = sorted(best.values(), key=lambda partial: partial.score)[:width]
        return beam[0].order

    def _run(self, partial: _Partial, number: int) -> _Partial:
        readers, waiting = list(partial.readers), list(partial.waiting)
        dead = []
        for buffer in self.read[number]:
            readers[buffer] -= 1
            if not readers[buffer]:
                dead.append(buffer)
        for later in self.after[number]:
            waiting[later] -= 1
        made = sum(self.sizes[b] for b in self.made[number])
        in_place = max((self.sizes[b] for b in self.taken[number] if b in dead), default=0)
        unread = sum(self.sizes[b] for b in self.made[number] if not readers[b])
        live = partial.live + made - unread - sum(self.sizes[b] for b in dead)
        follows = bool(partial.order) and any(b in self.read[number] for b in self.made[partial.order[-1]])
        return _Partial(
            done=partial.done | 1 << number,
            peak=max(partial.peak, partial.live + made - in_place),
            live=live,
            broken=partial.broken + (not follows),
            order=(*partial.order, number),
            waiting=tuple(waiting),
            readers=tuple(readers),
        )
