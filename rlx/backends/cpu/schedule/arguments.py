"""The arguments of the CPU's kernels: those that every code generator has, and how LLVM's code loads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

from rlx.backends.codegen import arguments
from rlx.backends.codegen.arguments import (
    FEW_THREADS,
    THREADS,
    Argument,
    Computed,
    Extents,
    KernelCode,
    Link,
    Literal,
    Part,
    Pointer,
    Product,
    Routine,
    Scratch,
    ScratchStride,
    once,
    part,
    routines,
    text_of,
    thread_count,
)

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
    "Literal",
    "Number",
    "Part",
    "Pointer",
    "Product",
    "Routine",
    "Scratch",
    "ScratchStride",
    "once",
    "part",
    "routines",
    "text_of",
    "thread_count",
]  # fmt: skip

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


class ArgumentTable(arguments.ArgumentTable):
    """Also emits the loads of the words at a kernel's entry."""

    def load(self, f: Function, word: Argument) -> str:
        """The SSA value of a word (a ptr for addresses, else i64), loaded where the builder stands."""
        ty = "ptr" if arguments.is_address(word) else "i64"
        return f.load(ty, f.gep("%words", self.slot(word), "i64"), align=8)
