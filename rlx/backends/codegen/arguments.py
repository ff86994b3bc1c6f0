"""What a launch is made of: the arguments of a kernel, as words, and the number of chunks of its work.

Both are functions of the extents of a run. No size, stride or offset is an immediate in code: equal loops over
different sizes are one kernel, and a change of extents only rewrites words. Objects of these classes are all that is
stored of such choices, so stored code needs nothing of what emits code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Generic, ParamSpec, TypeVar, cast

from rlx.disk import content_key
from rlx.ir.shape import Shape, Size, evaluate
from rlx.kernels.program import Buffer, Flow
from rlx.records import dataclass, field, replace

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
    "forget_texts",
    "is_address",
    "once",
    "part",
    "routines",
    "scratch_bytes",
    "text_key",
    "text_of",
    "thread_count",
]  # fmt: skip

THREADS = "\0threads"  # the number of threads of a run, among its extents: no dim has such a name
FEW_THREADS = 2  # up to so many, work is cut alike
Extents = Mapping[str, int]
T = TypeVar("T")
P = ParamSpec("P")


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
    """The address of a function that many kernels call, such as the block of a matrix product: compiled once.

    `ir` is its text, and of one made by `routines` the `text_key` of that, for which `text_of` gives the text.
    """

    symbol: str
    ir: str


class Text:
    """The text of a routine, some MB: made again when it is asked for after `forget_texts`."""

    def __init__(self, text: str, make: Callable[[], str]) -> None:
        self.text: str | None = text
        self.make = make

    def __call__(self) -> str:
        text = self.text
        if text is None:
            text = self.text = self.make()
        return text


_texts: dict[str, Text] = {}  # by key


def routines(make: Callable[P, Routine]) -> Callable[P, Routine]:
    """Has a function make a routine once a process for the same arguments."""

    @functools.cache
    def made(*args: P.args, **kwargs: P.kwargs) -> Routine:
        own = make(*args, **kwargs)
        key = text_key(own.symbol, own.ir, False)
        _texts.setdefault(key, Text(own.ir, lambda: make(*args, **kwargs).ir))
        return replace(own, ir=key)

    return functools.wraps(make)(cast("Callable[P, Routine]", made))


def text_key(name: str, ir: str, optimize: bool) -> str:
    """What tells the text of a function from others, and how it is to be compiled."""
    return content_key(name, ir, str(optimize))


def text_of(routine: Routine) -> str:
    """The text of a routine that `routines` has made."""
    return _texts[routine.ir]()


def forget_texts() -> None:
    """Lets go of the texts of all routines."""
    for text in list(_texts.values()):
        text.text = None


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
        return scratch_bytes(self.scratch, extents)


# ---- functions of the extents


def scratch_bytes(scratch: Size | Computed, extents: Extents) -> int:
    """The same of the scratch that some code takes."""
    own = scratch.fn(extents) if isinstance(scratch, Computed) else evaluate(scratch, extents)
    return -(-own // 64) * 64


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
