"""The order of a program's kernels as a lever of its peak memory: a beam search over topological orders."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from rlx.ir.shape import usual_size
from rlx.kernels.program import Buffer, Kernel, Program
from rlx.plan.bound import lower_bound
from rlx.plan.interval import DEFAULT_ALIGNMENT, round_up
from rlx.plan.liveness import lifetimes
from rlx.records import dataclass, replace

__all__ = ["peak_of", "reorder", "usual_extents"]

_WORK = 30_000  # partial orders that are looked at, as far as the search may choose: some 0.2 s
_WIDEST = 16  # partial orders that are kept at each step
_IN_CACHE = 256 << 10  # bytes that may be made between a result and its reader, which then still finds it in a cache
_NEAR_BY = 16  # kernels between them
_NEXT = 32  # kernels that are looked at as the next of a partial order, by each of two lists


def reorder(program: Program, extents: Mapping[str, int]) -> Program:
    """The program with `run` in the topological order of least peak memory that was found; itself if none is lower.

    Nothing else changes. Sizes are taken at `extents`. An order costs no speed: as many kernels as before run so soon
    after one whose result they read that it is still in cache. Deterministic: the search is bounded by a count,
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
        if work.far(order) > work.far(range(len(program.run))):
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


_Order = tuple["_Order", int] | None  # kernels by number: those before the last, and the last


@dataclass(eq=False)
class _Partial:
    """The first kernels of an order: which they are, what they take, and what is known of those that can come next.

    Only what lies between the kernels that have run and the others is kept: it costs what a program is wide, not what
    it is long.
    """

    done: int  # a bit for each kernel that has run
    peak: int
    live: int
    broken: int  # kernels that do not read what the one before has made
    order: _Order
    waiting: dict[int, int]  # by kernel that has some of those that it needs: how many are still to run
    readers: dict[int, tuple[int, int]]  # by buffer that is made or read: kernels that still read it, and their sum
    ready: dict[int, tuple[int, int]]  # by kernel that can come next: by what it changes `live`, the most it needs
    by_growth: list[tuple[int, int, int]]  # growth, need and number of those that are ready, in ascending order
    by_need: list[tuple[int, int, int]]  # need, growth, number
    place: int  # among the partial orders of its step, as the numbers of their kernels sort them


# what a partial order followed by a kernel comes to: the peak, what is live then, the breaks, the place of that order
# among those of its step, and the kernel; the least is the best
_Score = tuple[int, int, int, int, int]


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
        # by buffer: how many kernels read it, and the sum of their numbers; what is kept has a reader that never comes
        self.readers = [(1, len(kernels)) if buffer in kept else (0, 0) for buffer in makers]
        for number, read in enumerate(self.read):
            for buffer in read:
                count, total = self.readers[buffer]
                self.readers[buffer] = count + 1, total + number
        self.looked = 0  # partial orders that the search has looked at
        self.carried = 0  # entries of those that it has copied
        self.before = _before(kernels)
        self.after: list[list[int]] = [[] for _ in kernels]
        for number, earlier_ones in enumerate(self.before):
            for earlier in earlier_ones:
                self.after[earlier].append(number)
        self.reading: list[list[int]] = [[] for _ in self.sizes]
        for number, read in enumerate(self.read):
            for buffer in read:
                self.reading[buffer].append(number)

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

        So are those that one of these alone waits for: what packs operands of a weight's gradient. What they read can
        then end. The search does not look that far ahead in a long program.
        """
        count = len(self.before)
        end = list(range(count))  # by kernel the last of its chain, where that leads to an output and nowhere else
        ends = [False] * count
        for number in reversed(range(count)):
            after = self.after[number]
            ends[number] = not after or (len(after) == 1 and ends[after[0]])
            if after and ends[number]:
                end[number] = end[after[0]]
        place = list(range(count))
        for number in range(count):  # a chain as a whole: what its first kernels read may be there long before
            place[end[number]] = -1 if ends[number] else number
        for number in range(count):
            if ends[number]:
                others = (place[end[n]] for n in self.before[number] if end[n] != end[number])
                place[end[number]] = max(place[end[number]], *others, -1)
        return sorted(range(count), key=lambda number: (place[end[number]], ends[number], number))

    def breaks(self, order: Sequence[int]) -> int:
        """How many kernels of an order do not read what the one before has made."""
        return sum(not set(self.made[one]) & set(self.read[two]) for one, two in pairwise(order))

    def far(self, order: Sequence[int]) -> int:
        """How many kernels of an order read nothing that was made so shortly before that it is still in cache."""
        found = 0
        for place, number in enumerate(order):
            read, since = set(self.read[number]), 0
            for earlier in reversed(order[max(place - _NEAR_BY, 0) : place]):
                if not read.isdisjoint(self.made[earlier]):
                    break
                since += sum(self.sizes[b] for b in self.made[earlier])
                if since > _IN_CACHE:
                    found += 1
                    break
            else:
                found += place > 0
        return found

    def search(self) -> list[int]:
        """The best order that the beam finds."""
        count, beam = len(self.made), [self.start()]
        for step in range(count):
            best: dict[int, tuple[_Score, _Partial]] = {}
            for partial in beam:
                for score in self.following(partial):
                    done = partial.done | 1 << score[-1]
                    rival = best.get(done)
                    if rival is None or score < rival[0]:
                        best[done] = score, partial
            left = max(_WORK - self.looked, 0) // (count - step)  # spread evenly over what is to come
            width = max(1, min(_WIDEST, left * len(beam) // max(len(best), 1)))
            chosen = sorted(best.values(), key=lambda found: found[0])[:width]
            places = sorted(score[3:] for score, _ in chosen)
            followed = Counter(score[3] for score, _ in chosen)
            beam = []
            for score, partial in chosen:
                followed[partial.place] -= 1
                base = self._copy(partial) if followed[partial.place] else partial  # nobody needs it again
                beam.append(self.run(base, score, places.index(score[3:])))
        found, order = [], beam[0].order
        while order is not None:
            order, number = order
            found.append(number)
        return found[::-1]

    def start(self) -> _Partial:
        """The partial order of no kernel."""
        made = _Partial(0, 0, 0, 0, None, {}, {}, {}, [], [], 0)
        for number, earlier in enumerate(self.before):
            if not earlier:
                self._admit(made, number)
        return made

    def following(self, partial: _Partial) -> list[_Score]:
        """The partial order followed by each kernel that can come next, as far as they may be among the best.

        These are all where they are few; else those that let the least live, those that need the least, and those that
        read what the last one has made.
        """
        numbers: Collection[int] = partial.ready
        last_made = () if partial.order is None else self.made[partial.order[1]]
        follows = {n for b in last_made for n in self.reading[b] if n in partial.ready}
        if len(numbers) > _NEXT:
            few = (*partial.by_growth[:_NEXT], *partial.by_need[:_NEXT])
            numbers = {*(number for *_, number in few), *follows}
        self.looked += len(numbers)
        peak, live, broken = partial.peak, partial.live, partial.broken
        return [
            (max(peak, live + need), live + growth, broken + (n not in follows), partial.place, n)
            for n, (growth, need) in ((n, partial.ready[n]) for n in numbers)
        ]

    def _copy(self, partial: _Partial) -> _Partial:
        """One that can be changed for itself."""
        self.carried += len(partial.waiting) + len(partial.readers) + len(partial.ready)
        own = {name: getattr(partial, name).copy() for name in ("waiting", "readers", "ready", "by_growth", "by_need")}
        return replace(partial, **own)

    def run(self, made: _Partial, score: _Score, place: int) -> _Partial:
        """The same partial order with a kernel more, as `following` has it."""
        made.peak, made.live, made.broken, _, number = score
        made.order, made.place = (made.order, number), place
        made.done |= 1 << number
        self._dismiss(made, number)
        alone = []
        for buffer in self.read[number]:
            count, total = made.readers.get(buffer, self.readers[buffer])
            made.readers[buffer] = count - 1, total - number
            if count == 1:
                del made.readers[buffer]
            elif count == 2:
                alone.append(total - number)
        for reader in alone:  # the buffer ends with it now
            if reader in made.ready:
                self._dismiss(made, reader)
                self._admit(made, reader)
        for later in self.after[number]:
            made.waiting[later] = made.waiting.get(later, len(self.before[later])) - 1
            if not made.waiting[later]:
                del made.waiting[later]
                self._admit(made, later)
        return made

    def _admit(self, partial: _Partial, number: int) -> None:
        """Notes that a kernel can come next, with what it then does to the memory."""
        sizes = self.sizes
        dead = [b for b in self.read[number] if partial.readers.get(b, self.readers[b])[0] == 1]
        made = sum(sizes[b] for b in self.made[number])
        in_place = max((sizes[b] for b in self.taken[number] if b in dead), default=0)
        unread = sum(sizes[b] for b in self.made[number] if not self.readers[b][0])
        growth, need = made - unread - sum(sizes[b] for b in dead), made - in_place
        partial.ready[number] = growth, need
        insort(partial.by_growth, (growth, need, number))
        insort(partial.by_need, (need, growth, number))

    def _dismiss(self, partial: _Partial, number: int) -> None:
        """Takes a kernel off those that can come next."""
        growth, need = partial.ready.pop(number)
        del partial.by_growth[bisect_left(partial.by_growth, (growth, need, number))]
        del partial.by_need[bisect_left(partial.by_need, (need, growth, number))]
