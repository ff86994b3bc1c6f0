"""The operand words of a kernel: what its code finds at `words[i]`, and how each is computed when a run is bound.

No size, stride or offset is an immediate in code: equal loops over different sizes are one kernel, and a change of
extents only rewrites words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Generic, Self, TypeVar

from rlx.ir.shape import Size, evaluate
from rlx.kernels.program import Buffer, Flow
from rlx.records import dataclass, field

if TYPE_CHECKING:
    from rlx.backends.cpu.llvm.builder import Function

__all__ = [
    "FEW_THREADS",
    "THREADS",
    "Address",
    "Argument",
    "ArgumentTable",
    "Arguments",
    "Computed",
    "Extents",
    "KernelCode",
    "Link",
    "Number",
    "Pointer",
    "Routine",
    "Scratch",
    "ScratchStride",
    "once",
    "thread_count",
]  # fmt: skip

THREADS = "\0threads"  # the number of threads of a run, among its extents: no dim has such a name
FEW_THREADS = 2  # up to so many, work is cut alike
Extents = Mapping[str, int]
T = TypeVar("T")


def thread_count(extents: Extents) -> int:
    """The threads of the run that is bound."""
    return extents[THREADS]


class Once(Generic[T]):
    """A function of the extents that keeps its result for the last ones; stored without it."""

    last: tuple[Extents, T] | None = None

    def __init__(self, fn: Callable[[Extents], T]) -> None:
        self.fn = fn

    def __call__(self, extents: Extents) -> T:
        if self.last is None or self.last[0] is not extents:
            self.last = (extents, self.fn(extents))
        return self.last[1]


def once(fn: Callable[[Extents], T]) -> Callable[[Extents], T]:
    """`fn`, which many words of a kernel are computed from, asked once a binding."""
    return Once(fn)


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
    for (-1: no limit), "host" the address of a function that takes in sizes.
    """

    flow: Flow
    what: str


Argument = Pointer | Computed | Scratch | ScratchStride | Routine | Link | Size


ADDRESSES = frozenset({"counter", "updates"})  # links that are


Address = str  # the SSA value of an argument, a pointer
Number = str  # the same of an i64


class Arguments:
    """The arguments of a kernel as a record: a subclass annotates their names in order, each `Address` or `Number`.

    `given` puts what they are into that order, for binding; `loaded` has the values in code as attributes. In code,
    that of number 0 is at `words[first]`.
    """

    kinds: ClassVar[dict[str, str]] = {}  # by name, in order; those of the record that it extends come first

    def __init_subclass__(cls) -> None:
        cls.kinds = cls.kinds | cls.__annotations__

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All names, in order."""
        return tuple(cls.kinds)

    @classmethod
    def given(cls, **words: Argument) -> list[Argument]:
        """The arguments in order; each has to be there."""
        if words.keys() != cls.kinds.keys():
            raise TypeError(f"{cls.__name__}: {sorted(words.keys() ^ cls.kinds.keys())} is missing or unknown")
        return [words[name] for name in cls.kinds]

    @classmethod
    def place(cls, f: Function, name: str, words: str = "%words", first: int = 0) -> str:
        """The address of one argument."""
        return f.gep(words, first + cls.names().index(name), "i64")

    @classmethod
    def load(cls, f: Function, name: str, words: str = "%words", first: int = 0) -> str:
        """The value of one argument, loaded where the builder stands."""
        return f.load("ptr" if cls.kinds[name] == "Address" else "i64", cls.place(f, name, words, first))

    @classmethod
    def loaded(cls, f: Function, *names: str, words: str = "%words", first: int = 0) -> Self:
        """Loads these arguments, or all, where the builder stands."""
        found = cls()
        for name in names or cls.kinds:
            setattr(found, name, cls.load(f, name, words, first))
        return found

    @classmethod
    def behind(cls, f: Function) -> str:
        """The address of the words that follow these."""
        return f.gep("%words", len(cls.kinds), "i64")


class ArgumentTable:
    """Hands out word numbers while a kernel is emitted, and emits the loads of the words at its entry."""

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

    def load(self, f: Function, word: Argument) -> str:
        """The SSA value of a word (a ptr for addresses, else i64), loaded where the builder stands."""
        ty = (
            "ptr"
            if isinstance(word, Pointer | Scratch | Routine) or (isinstance(word, Link) and word.what in ADDRESSES)
            else "i64"
        )
        return f.load(ty, f.gep("%words", self.slot(word), "i64"), align=8)


@dataclass(frozen=True)
class KernelCode:
    """One native function with the words it wants and the number of chunks that its work is split into."""

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
