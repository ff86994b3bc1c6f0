"""The table of phases: the kernels of a run in order, one entry for each launch, and the words that they take.

    program -> phases -> words, evaluated for the extents of a run -> launches

What is here knows no device: a phase is code with a list of arguments, and words are numbers of 64 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from rlx.backends.codegen.arguments import (
    THREADS,
    Argument,
    Computed,
    KernelCode,
    Link,
    Literal,
    Pointer,
    Routine,
    Scratch,
    ScratchStride,
)
from rlx.backends.codegen.kernel_facts import mentioned
from rlx.ir.shape import Dim, Size, symbols
from rlx.kernels.program import Buffer, Flow, Kernel
from rlx.records import dataclass

__all__ = ["Affected", "Marks", "Phase", "Table", "phases_of"]

Marks = Mapping[tuple[Flow, str], int]


@dataclass(frozen=True)
class Phase:
    """One entry of the phase table: code for a part of a kernel, or a host call (code None)."""

    kernel: Kernel
    code: KernelCode | None
    piece: bool = False  # one of those that make disjoint parts of the kernel's result
    cost: int = 0  # ns, about, of what may run beside others, see `rlx.backends.cpu.runtime.concurrent_phases`


def phases_of(
    kernels: Sequence[Kernel], emit: Callable[[Kernel], Sequence[KernelCode]]
) -> tuple[list[Phase], dict[tuple[Flow, str], int]]:
    """The phases of kernels, whose code `emit` makes, and the marks: the phases that control flow goes to.

    Those are "start", the phase that follows the "loop" of a flow, and those that follow its "else" and "end".
    """
    made: list[Phase] = []
    marks: dict[tuple[Flow, str], int] = {}
    for kernel in kernels:
        by_host = kernel.host is not None or kernel.extents is not None
        codes: Sequence[KernelCode | None] = [None] if by_host else emit(kernel)
        made.extend(Phase(kernel, code) for code in codes)
        if kernel.mark is not None:
            part = {"loop": "start"}.get(kernel.mark.part, kernel.mark.part)
            marks[kernel.mark.flow, part] = len(made)
    return made, marks


def _stacked(phases: Sequence[Phase], marks: Marks) -> dict[tuple[Kernel, str], list[Flow]]:
    """By kernel that decides a size, and by its name, the loops around it that stack rows of that size."""
    found: dict[tuple[Kernel, str], list[Flow]] = {}
    for flow in (flow for flow, part in marks if part == "start" and flow.stacked):
        for phase in phases[marks[flow, "start"] : marks[flow, "end"]]:
            kernel = phase.kernel
            sizes = kernel.extents.sizes if kernel.extents is not None else ()
            for symbol in {*kernel.makes, *(symbol for symbol, _ in sizes)}.intersection(flow.stacked):
                found.setdefault((kernel, symbol.name), []).append(flow)
    return found


class Table:
    """The words of some phases, whatever the extents: each distinct size is listed, and so evaluated, once.

    After the words of the phases come those of loops: counters, the bases of words that depend on one, and the lists by
    which loops bring these up to date (see `rlx.backends.codegen.control`). `marks` are the phases that control
    flow goes to.
    """

    def __init__(
        self, phases: Sequence[Phase], addresses: Mapping[str, int], marks: Marks | None = None, *, threads: int = 1
    ) -> None:
        self.phases = tuple(phases)
        self.threads = threads  # that work is cut for
        self.addresses = addresses
        self.marks = marks or {}
        self.fixed: list[int] = []  # the words, 0 where a binding fills them in
        self.starts: list[int] = []  # by phase: the number of its first word
        self.sizes: dict[Size, int] = {}  # size -> its number
        self.sized: list[tuple[int, int]] = []  # (word, size)
        self.pointers: list[tuple[int, Buffer, int]] = []  # (word, root buffer, size that is added to its address)
        self.computed: list[tuple[int, Callable[[Mapping[str, int]], int], int]] = []  # (word, function, phase)
        self.scratch: list[int] = []
        self.strides: list[int] = []  # words that hold how far the scratch of workers lies apart
        self.links: list[tuple[int, Link]] = []
        loops = [p.kernel.mark.flow for p in phases if p.kernel.mark is not None and p.kernel.mark.part == "loop"]
        self.stacked = _stacked(phases, self.marks)
        self.rounds = {flow.round.name: flow for flow in loops if flow.round is not None}
        self.moving: list[tuple[int, Argument, tuple[Flow, ...]]] = []  # (word, what it is, the loops it depends on)
        for number, phase in enumerate(phases):
            self.starts.append(len(self.fixed))
            for word in phase.code.words if phase.code else ():
                self._add(word, number)
        self._add_loops(loops)
        self.order = list(self.sizes)
        sizes_of = functools.cache(mentioned)  # phases share kernels
        self.mentions = [sizes_of(p.kernel) if p.kernel.kind != "control" else set() for p in phases]
        self.affected = functools.cache(self._affected)

    def _add(self, word: Argument, phase: int) -> None:
        number, value = len(self.fixed), 0
        match word:
            case Pointer(buffer=buffer, offset=offset):
                self._sized(number, word, buffer.offset + offset)
            case Computed(fn=fn):
                self.computed.append((number, fn, phase))
            case Routine(symbol=symbol):
                value = self.addresses[symbol]
            case Scratch():
                self.scratch.append(number)
            case ScratchStride():
                self.strides.append(number)
            case Link(flow=flow, what="start" | "else" | "end" as what):
                value = self.marks[flow, what]
            case Link():
                self.links.append((number, word))
            case int():
                value = word
            case Literal():
                raise AssertionError("a number of the kernel is missing: `filled` puts it in")
            case _:
                self._sized(number, word, word)
        self.fixed.append(value)

    def _sized(self, number: int, word: Argument, size: Size) -> None:
        loops = tuple(self.rounds[s] for s in dict.fromkeys(s.name for s in symbols(size)) if s in self.rounds)
        if loops:
            from rlx.kernels.affine import (
                is_linear,  # only where there are loops: reading a model from the cache is fast
            )

            assert is_linear(size, self.rounds), f"{size} is not linear in the number of a round"
            self.moving.append((number, word, loops))
        elif isinstance(word, Pointer):
            self.pointers.append((number, word.buffer.base, self._size(size)))
        else:
            self.sized.append((number, self._size(size)))

    def _add_loops(self, loops: Sequence[Flow]) -> None:
        self.counters = {flow: len(self.fixed) + n for n, flow in enumerate(loops)}
        self.fixed.extend(0 for _ in loops)
        self.lists: dict[Flow, tuple[int, int]] = {}  # where the list of a loop starts, and how many words it is for
        self.cells: list[tuple[int, int]] = []  # (word, the word whose address it holds)
        self.terms: list[tuple[int, int, str]] = []  # (word, size, the symbol that it is to be the coefficient of)
        # what "loop" and "next" bring up to date: (word, its base, words of the (coefficient, counter) pairs)
        self.updates: dict[Flow, list[tuple[int, int, list[tuple[int, int]]]]] = {flow: [] for flow in loops}
        places = {}
        for number, word, _ in self.moving:
            places[number] = base = len(self.fixed)
            self.fixed.append(0)
            if isinstance(word, Pointer):
                self.pointers.append((base, word.buffer.base, self._size(word.buffer.offset + word.offset)))
            else:
                assert isinstance(word, Dim)
                self.sized.append((base, self._size(word)))
        for flow in loops:
            mine = [(number, word, depends) for number, word, depends in self.moving if flow in depends]
            self.lists[flow] = (len(self.fixed), len(mine))
            for number, word, depends in mine:
                size = word.buffer.offset + word.offset if isinstance(word, Pointer) else word
                assert isinstance(size, Dim)
                at = len(self.fixed)
                self.fixed.extend((0, 0, len(depends)))
                self.cells.extend(((at, number), (at + 1, places[number])))
                pairs = [(at + 3 + 2 * n, self.counters[other]) for n, other in enumerate(depends)]
                self.updates[flow].append((number, places[number], pairs))
                for other in depends:
                    assert other.round is not None
                    self.terms.append((len(self.fixed), self._size(size), other.round.name))
                    self.cells.append((len(self.fixed) + 1, self.counters[other]))
                    self.fixed.extend((0, 0))

    def _size(self, size: Size) -> int:
        return self.sizes.setdefault(size, len(self.sizes))

    def _affected(self, name: str) -> Affected:
        sizes = {n for size, n in self.sizes.items() if any(s.name == name for s in symbols(size))}
        phases = frozenset(
            n for n, (phase, found) in enumerate(zip(self.phases, self.mentions, strict=True)) if name in found
        )
        return Affected(
            [entry for entry in self.sized if entry[1] in sizes],
            [entry for entry in self.pointers if entry[2] in sizes],
            [entry for entry in self.terms if entry[1] in sizes],
            [entry for entry in self.computed if entry[2] in phases],
            sorted(phases),
        )

    def scratch_bytes(self, extents: Mapping[str, int]) -> int:
        """Bytes of scratch that one worker needs."""
        known = extents if THREADS in extents else {**extents, THREADS: self.threads}
        return max((p.code.scratch_bytes(known) for p in self.phases if p.code), default=0)


@dataclass(frozen=True)
class Affected:
    """What a size that changes during a run changes: entries of a `Table`, and the numbers of phases."""

    sized: list[tuple[int, int]]
    pointers: list[tuple[int, Buffer, int]]
    terms: list[tuple[int, int, str]]
    computed: list[tuple[int, Callable[[Mapping[str, int]], int], int]]
    phases: list[int]
