"""What a launch is made of: the arguments of a kernel, as words, and the number of chunks of its work.

Both are functions of the extents of a run. No size, stride or offset is an immediate in code: equal loops over
different sizes are one kernel, and a change of extents only rewrites words. Objects of these classes are all that is
stored of such choices, so stored code needs nothing of what emits code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Generic, TypeVar

from rlx.ir.shape import Shape, Size, evaluate
from rlx.kernels.program import Buffer, Flow
from rlx.records import dataclass, field

__all__ = [
    "FEW_THREADS",
    "THREADS",
    "Argument",
    "ArgumentTable",
    "Computed",
    "Extents",
    "KernelCode",
    "Link",
    "Literal",
    "Once",
    "Part",
    "Pointer",
    "Product",
    "Routine",
    "Scratch",
    "ScratchStride",
    "is_address",
    "once",
    "part",
    "thread_count",
]  # fmt: skip

THREADS = "\0threads"  # the number of threads of a run, among its extents: no dim has such a name
FEW_THREADS = 2  # up to so many, work is cut alike
Extents = Mapping[str, int]
T = TypeVar("T")


def thread_count(extents: Extents) -> int:
    """The threads of the run that is bound."""
    return extents[THREADS]


@dataclass(frozen=True)
class Pointer:
    """The address of a buffer's first element, plus `offset` bytes."""

    buffer: Buffer
    offset: Size = 0


@dataclass(frozen=True)
class Computed:
    """A number computed from the extents at bind time."""

    fn: Callable[[Extents], int]


@dataclass(frozen=True)
class Literal:
    """Stands, in the words of kernels that are alike, for one of the numbers in which they differ: see `scalars`."""

    number: int


@dataclass(frozen=True)
class Scratch:
    """The address of the scratch memory of worker 0, `KernelCode.scratch` bytes or more."""


@dataclass(frozen=True)
class ScratchStride:
    """How many bytes after that of one worker the scratch memory of the next lies.

    The same for all kernels of a run: so a worker has the same memory in all of them, also while others run another.
    """


@dataclass(frozen=True)
class Routine:
    """The address of a function that many kernels call, such as the block of a matrix product: compiled once."""

    symbol: str
    ir: str


@dataclass(frozen=True)
class Link:
    """What binding knows of an If or a loop.

    "start", "else" and "end" are numbers of phases; "counter" is the address of the number of the round, "updates" that
    of the words that depend on it, "length" how long that list is; "most" is the number of rounds that there is room
    for.
    """

    flow: Flow
    what: str


Argument = Pointer | Computed | Literal | Scratch | ScratchStride | Routine | Link | Size


class ArgumentTable:
    """Hands out the numbers of words while a kernel is emitted; how code loads them is the code generator's affair."""

    def __init__(self, fixed: Sequence[Argument] = ()) -> None:
        self.words: list[Argument] = list(fixed)  # those at numbers that the code has agreed on
        self._slots: dict[object, int] = {}

    def slot(self, word: Argument) -> int:
        """The number of a word; equal pointers and sizes share one."""
        key: object = (type(word).__name__, word)
        if key not in self._slots:
            self._slots[key] = len(self.words)
            self.words.append(word)
        return self._slots[key]


def is_address(word: Argument) -> bool:
    """Whether the word is an address, and not a number."""
    if isinstance(word, Link):
        return word.what in ("counter", "updates")
    return isinstance(word, Pointer | Scratch | Routine)


@dataclass(frozen=True)
class KernelCode:
    """One compiled function: its text, the words it wants, and the number of chunks that its work is split into.

    `ir` is the text in the language of the code generator; `symbol` tells functions apart: equal ones are one.
    """

    symbol: str
    ir: str
    words: tuple[Argument, ...]
    chunks: Callable[[Extents], int]
    sites: tuple[str, ...] = ()  # what each error site of the code stands for
    scratch: Size | Computed = 0  # bytes a worker
    optimize: bool = False
    notes: dict[str, str] = field(default_factory=dict)  # shown by explain

    def scratch_bytes(self, extents: Extents) -> int:
        """Bytes of scratch for one worker, in whole lines of the cache."""
        own = self.scratch.fn(extents) if isinstance(self.scratch, Computed) else evaluate(self.scratch, extents)
        return -(-own // 64) * 64


# ---- functions of the extents


class Once(Generic[T]):
    """A function of the extents that keeps its result for the last ones; stored without it."""

    last: tuple[Extents, T] | None = None

    def __init__(self, fn: Callable[[Extents], T]) -> None:
        self.fn = fn

    def __call__(self, extents: Extents) -> T:
        last = self.last
        if last is None or last[0] is not extents:
            last = self.last = (extents, last[1] if last is not None and last[0] == extents else self.fn(extents))
        return last[1]


def once(fn: Callable[[Extents], T]) -> Callable[[Extents], T]:
    """`fn`, which many words of a kernel are computed from, asked once a binding."""
    return Once(fn)


class Part:
    """One number of what a schedule gives: its field of that name, or entry `index` of a field that is a tuple."""

    def __init__(self, cut: Callable[[Extents], Any], name: str, index: int | None = None) -> None:
        self.cut, self.name, self.index = cut, name, index

    def __call__(self, extents: Extents) -> int:
        found = getattr(self.cut(extents), self.name)
        return int(found if self.index is None else found[self.index])


@dataclass(eq=False, repr=False)
class Product:
    """A size that is the product of others, such as a number of chunks."""

    sizes: Shape

    def __call__(self, extents: Extents) -> int:
        return prod(evaluate(s, extents) for s in self.sizes)


def part(cut: Callable[[Extents], Any], name: str, index: int | None = None) -> Computed:
    """The same as an argument."""
    return Computed(Part(cut, name, index))
