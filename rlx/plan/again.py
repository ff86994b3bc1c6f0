"""Less memory for more time: kernels that run again, so that what they make need not be kept until it is read last.

The backward pass of a gradient reads what the forward pass made, so most of that is in memory where the two meet. With
`budget=` (`rlx.grad` and its kin) the arena takes at most so many bytes: values are made, read, given up, and made
again where they are needed next, by copies of the kernels that made them. Copies compute the same, so all bits are
those of the program without a budget.

Which values these are is decided in rungs, each of which takes less memory and more time than the one before:

1. In the program so far, find the step at which most bytes are live.
2. A candidate is a kernel whose results are live there, made before, read after, and not used at that step. It would
   run again right before the first of the later readers, which then read the copy. What it reads itself is kept until
   then if it is live at the step anyway, or small; else what made that is run again, too.
3. The candidate that frees the most bytes of that step for a second of predicted time is taken: the larger of a
   kernel's arithmetic and its traffic (`rlx.kernels.work`), at the rates that the device declares. These are not
   measured, so the choice is the same on every machine.
4. A program whose most live bytes are lower than those of all before is a rung.

The rungs do not depend on the budget. The first one whose *planned arena* is within it is taken, so the arena is never
above the budget, and with a lower budget never larger. If none is, `MemoryDeficit` names the smallest arena of all.
Work: a rung costs some milliseconds; only those whose live bytes are within the budget are planned, mostly one or two.

`rlx.checkpoint` says the same by hand, and in the graph: what it marks is made again whatever the budget is.
Source: the greedy choice at the peak is that of rematerialisation in compilers (Briggs et al. 1992; XLA has it); that
recursion through what was given up too makes checkpoints of a chain is Chen et al. 2016, "Training deep nets with
sublinear memory cost".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from rlx.errors import MemoryDeficit, OptionError
from rlx.ir.graph import BACKWARD
from rlx.kernels.prepared import Replaced
from rlx.kernels.program import Buffer, Kernel, Program, loop_spans
from rlx.plan.interval import round_up
from rlx.plan.liveness import bound_extents
from rlx.records import dataclass, replace
from rlx.units import bytes_text

__all__ = ["kept_for_backward", "made_again", "mark_backward", "within"]

_LOWER = 1 / 256  # by what part of the memory before a rung is lower
_LONGEST = 64  # kernels that run again for one candidate
_SMALL = 16  # an operand that is so many times smaller than what is freed is kept
_LEVELS = 3
_PATIENCE = 64  # candidates in a row that bring no rung, after which the search ends


def mark_backward(program: Program) -> None:
    """Gives the kernels that compute cotangents the role "backward"."""
    for kernel in program.run:
        if any(source.startswith(BACKWARD) for node in kernel.nodes for source in node.provenance):
            kernel.role = "backward"


def kept_for_backward(kernels: Sequence[Kernel]) -> list[Buffer]:
    """The buffers of the arena that the forward pass makes and a kernel of the backward pass reads."""
    forward = {b.base for k in kernels if not k.role for b in k.writes() if b.base.kind == "arena"}
    read = (b.base for k in kernels if k.role == "backward" for b in k.reads())
    return [b for b in dict.fromkeys(read) if b in forward]


def made_again(kernels: Sequence[Kernel]) -> list[Buffer]:
    """The buffers that kernels make which run again."""
    return [b for k in kernels if k.role == "again" for b in k.writes()]


def within(
    program: Program, budget: int, arena_of: Callable[[Program], int], seconds_of: Callable[[Kernel], float], size: int
) -> Program:
    """The first rung whose arena takes at most `budget` bytes; the program itself if that does.

    `arena_of` plans a program and gives the bytes of its arena, `seconds_of` predicts a kernel, `size` is the
    alignment of buffers. Raises `OptionError` where a size has no upper bound, and `MemoryDeficit`.
    """
    extents = bound_extents(program)
    if extents is None:
        raise OptionError(
            f"a gradient of {program.name!r} has budget={bytes_text(budget)}, but its arena is planned at upper bounds "
            "of all sizes: give dims={name: (low, high)}, or leave the budget out"
        )
    known: list[tuple[int, int, _Line]] = []  # live bytes of rungs, which no arena is below
    for live, line in _rungs(program, extents, seconds_of, size):
        if live <= budget:
            made = line.program(program)
            arena = arena_of(made)
            if arena <= budget:
                return made
        known.append((live, len(known), line))
    smallest: int | None = None
    for live, _, line in sorted(known, key=lambda one: one[:2]):
        if smallest is None or live < smallest:
            arena = arena_of(line.program(program))
            smallest = arena if smallest is None else min(arena, smallest)
    assert smallest is not None
    raise MemoryDeficit(
        f"a gradient of {program.name!r} has budget={bytes_text(budget)} ({budget:,} bytes): the smallest arena that "
        f"computing values again reaches is {bytes_text(smallest)} ({smallest:,} bytes); give that, or a smaller batch",
        budget_bytes=budget,
        peak_bytes=smallest,
    )


def _rungs(
    program: Program, extents: Mapping[str, int], seconds_of: Callable[[Kernel], float], size: int
) -> Iterator[tuple[int, _Line]]:
    """The programs of the ladder with their most live bytes, the program itself first."""
    line = _Line.of(program, extents, seconds_of, size)
    lives = line.lives()
    lowest = lives.most
    yield lowest, line
    waited = 0
    while waited < _PATIENCE:
        choice = line.best(lives)
        if choice is None:
            return
        line = line.with_copies(choice, lives)
        lives = line.lives()
        waited += 1
        if lives.most <= lowest * (1 - _LOWER):
            lowest, waited = lives.most, 0
            yield lowest, line


@dataclass(frozen=True, eq=False)
class _Step:
    """A kernel of the program, or a copy of it that runs again.

    `own` are the buffers of the arena that the kernel reads and then those that it writes, `reads` and `writes` what
    stands for them here, `taken` those that its result may be written over. A copy of the program's kernel has level 1,
    one made in the place of that again 2.
    """

    kernel: Kernel
    own: tuple[Buffer, ...]
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    taken: tuple[Buffer, ...]
    seconds: float
    repeatable: bool
    level: int = 0

    def over(self, same: Mapping[Buffer, Buffer]) -> _Step:
        """The same step, reading other buffers."""
        if not any(b in same for b in self.reads):
            return self
        reads, taken = (tuple(same.get(b, b) for b in found) for found in (self.reads, self.taken))
        return replace(self, reads=reads, taken=taken)

    def copy(self, same: Mapping[Buffer, Buffer], level: int) -> _Step:
        """One that runs again: it writes other buffers, too."""
        return replace(self.over(same), writes=tuple(same[b] for b in self.writes), level=level)

    def made(self) -> Kernel:
        """The kernel of a program."""
        instead = {a: b for a, b in zip(self.own, (*self.reads, *self.writes), strict=True) if a is not b}
        if not self.level:
            return Replaced(instead).kernel(self.kernel)
        copy = Replaced(instead).kernel(self.kernel, written=True)
        return replace(copy, name=f"{copy.name}.again", role="again")


@dataclass(eq=False)
class _Lives:
    """When each buffer is live; `readers`: the steps that read it; `most` bytes are live at step `peak`."""

    first: dict[Buffer, int]
    last: dict[Buffer, int]
    readers: dict[Buffer, list[int]]
    most: int
    peak: int


@dataclass(frozen=True)
class _Choice:
    """Steps that run again before step `at`, in order, for what step `order[-1]` has made of `freed`."""

    order: tuple[int, ...]
    at: int
    freed: tuple[Buffer, ...]
    level: int


@dataclass(eq=False)
class _Line:
    """The steps of a program in order, and the sizes of buffers in bytes; `shown` are read after the run."""

    steps: list[_Step]
    sizes: dict[Buffer, int]
    shown: frozenset[Buffer]
    extents: Mapping[str, int]
    alignment: int
    names: Counter[str]

    @staticmethod
    def of(
        program: Program, extents: Mapping[str, int], seconds_of: Callable[[Kernel], float], alignment: int
    ) -> _Line:
        """The steps of a program that was not changed yet."""
        writers = Counter(b.base for kernel in program.run for b in kernel.writes())
        shown = {b.base for b in (*(b for _, b in program.outputs), *program.updates.values())}
        depth, steps, sizes = 0, [], {}
        for kernel in program.run:
            if kernel.mark is not None:
                depth += {"if": 1, "loop": 1, "end": -1}.get(kernel.mark.part, 0)
            free = depth == 0 and _is_repeatable(kernel) and all(writers[b] == 1 for b in kernel.writes())
            reads, writes, taken = (
                tuple(dict.fromkeys(b.base for b in found if b.base.kind == "arena"))
                for found in (kernel.reads(), kernel.writes(), kernel.in_place_operands())
            )
            seconds = seconds_of(kernel) if free else 0.0
            steps.append(_Step(kernel, (*reads, *writes), reads, writes, taken, seconds, free))
            for b in writes:
                bound = b.bound()
                sizes[b] = round_up(b.nbytes(dict(extents)) if bound is None else bound, alignment)
        return _Line(steps, sizes, frozenset(shown), extents, alignment, Counter())

    def program(self, before: Program) -> Program:
        """The program with these steps as its run."""
        return replace(before, run=[step.made() for step in self.steps])

    def lives(self) -> _Lives:
        """The live ranges, as `rlx.plan.liveness` has them."""
        first: dict[Buffer, int] = {}
        last: dict[Buffer, int] = {}
        readers: dict[Buffer, list[int]] = {}
        for number, step in enumerate(self.steps):
            for b in step.reads:
                readers.setdefault(b, []).append(number)
                last[b] = number
            for b in step.writes:
                first.setdefault(b, number)
                last[b] = number
        end = len(self.steps)
        last.update((b, end) for b in self.shown if b in first)
        for start, final in loop_spans([step.kernel for step in self.steps]):
            for b, begin in first.items():
                if begin < start <= last[b] < final:
                    last[b] = final
                elif start < begin <= final < last[b]:
                    first[b] = start
        change = [0] * (end + 2)
        for b, begin in first.items():
            change[begin] += self.sizes[b]
            change[last[b] + 1] -= self.sizes[b]
        for number, step in enumerate(self.steps):
            room = [t for t in step.taken if t in first and last[t] == number and step.writes]
            if any(self.sizes[t] == self.sizes[step.writes[0]] for t in room):  # one place for both
                change[number] -= self.sizes[step.writes[0]]
                change[number + 1] += self.sizes[step.writes[0]]
        most, peak, total = 0, 0, 0
        for number in range(end):
            total += change[number]
            if total > most:
                most, peak = total, number
        return _Lives(first, last, readers, most, peak)

    def best(self, lives: _Lives) -> _Choice | None:
        """The candidate that frees the most bytes of the peak for a second."""
        peak = lives.peak
        there = self.steps[peak]
        used = {*there.reads, *there.writes, *self.shown}
        makers: dict[int, list[Buffer]] = {}
        for b, made in lives.first.items():
            if made < peak < lives.last[b] and b not in used and self.may_repeat(made):
                makers.setdefault(made, []).append(b)
        outer = self.outer()
        found: tuple[float, _Choice] | None = None
        for number, freed in makers.items():
            at = min((outer[r] for b in freed for r in lives.readers[b] if r > peak), default=0)
            chain = None if at <= peak else self.chain(number, at, lives, sum(self.sizes[b] for b in freed))
            if chain is None:
                continue
            order, kept = chain
            gain = sum(self.sizes[b] for b in freed) - kept
            choice = _Choice(tuple(order), at, tuple(freed), self.steps[number].level + 1)
            score = gain / self.seconds(choice)
            if gain > 0 and (found is None or score > found[0]):
                found = score, choice
        return None if found is None else found[1]

    def may_repeat(self, number: int) -> bool:
        step = self.steps[number]
        return step.repeatable and step.level < _LEVELS

    def seconds(self, choice: _Choice) -> float:
        """How much longer a run takes with the copies of a choice."""
        spared = {step.kernel for step in self.replaced(choice).values()}
        last = self.steps[choice.order[-1]]
        new = sum(self.steps[n].seconds for n in choice.order if self.steps[n].kernel not in spared)
        return new + last.seconds / 100

    def replaced(self, choice: _Choice) -> dict[int, _Step]:
        """The later copies of kernels that a choice runs before them, by number."""
        kernels = {self.steps[n].kernel for n in choice.order} if choice.level == 1 else set()
        later = enumerate(self.steps[choice.at :], choice.at)
        return {n: step for n, step in later if step.level == 1 and step.kernel in kernels}

    def chain(self, number: int, at: int, lives: _Lives, bytes_freed: int) -> tuple[list[int], int] | None:
        """The steps that run again before `at` so that step `number` can, and the bytes of the peak kept for that."""
        makers = {b: n for n, step in enumerate(self.steps[: lives.peak]) for b in step.writes}
        order: list[int] = []
        kept: set[Buffer] = set()

        def needs(n: int, waiting: int) -> bool:
            for b in self.steps[n].reads:
                if lives.last[b] >= lives.peak or b in kept or makers[b] in order:
                    continue
                if _SMALL * self.sizes[b] <= bytes_freed or not self.steps[makers[b]].repeatable:
                    kept.add(b)
                elif waiting == _LONGEST or not needs(makers[b], waiting + 1):
                    return False
            order.append(n)
            return len(order) <= _LONGEST

        return (order, sum(self.sizes[b] for b in kept)) if needs(number, 1) else None

    def outer(self) -> list[int]:
        """By step: that where the outermost branch or loop around it begins, itself if there is none."""
        found, depth, start = [], 0, 0
        for number, step in enumerate(self.steps):
            mark = step.kernel.mark
            if mark is not None and mark.part in ("if", "loop"):
                start = start if depth else number
                depth += 1
            found.append(start if depth else number)
            if mark is not None and mark.part == "end":
                depth -= 1
        return found

    def with_copies(self, choice: _Choice, lives: _Lives) -> _Line:
        """The steps with copies of those that run again; later copies of the same kernels are no longer needed."""
        names, sizes = self.names.copy(), dict(self.sizes)
        made: dict[Buffer, Buffer] = {}
        copies: list[_Step] = []
        later: dict[Buffer, Buffer] = {}  # what readers from `at` on read instead
        gone = self.replaced(choice)
        for number in choice.order:
            step = self.steps[number]
            for b in step.writes:
                stem = b.name.partition(".again")[0]
                names[stem] += 1
                made[b] = replace(b, name=f"{stem}.again{names[stem]}")
                sizes[made[b]] = sizes[b]
            copies.append(step.copy(made, choice.level))
            for other in gone.values():
                if other.kernel is step.kernel:
                    later |= {b: made[own] for b, own in zip(other.writes, step.writes, strict=True)}
        later |= {b: made[b] for b in choice.freed}
        rest = [step.over(later) for n, step in enumerate(self.steps[choice.at :], choice.at) if n not in gone]
        steps = [*self.steps[: choice.at], *copies, *rest]
        return replace(self, steps=_read(steps), sizes=sizes, names=names)


def _read(steps: Sequence[_Step]) -> list[_Step]:
    """The steps without copies that nothing reads any more."""
    read: set[Buffer] = set()
    found = []
    for step in reversed(steps):
        if not step.level or not read.isdisjoint(step.writes):
            read.update(step.reads)
            found.append(step)
    return found[::-1]


def _is_repeatable(kernel: Kernel) -> bool:
    """Whether a copy of the kernel computes the same at any later time of a run."""
    plain = kernel.mark is None and kernel.extents is None and kernel.host is None and kernel.before is None
    if not plain or kernel.makes or kernel.queue or kernel.device:
        return False
    if any(b.base.kind in ("state", "table") for b in kernel.reads()):  # which may be another one by then
        return False
    return bool(kernel.writes()) and all(b.root is None and b.kind == "arena" for b in kernel.writes())
