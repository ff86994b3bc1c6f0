"""Launch geometry: how many pieces the work of a kernel is cut into, as functions of the extents of a run.

Objects of these classes are all that is stored of such a choice, so stored code needs nothing of what emits code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Generic, TypeVar

from rlx.ir.shape import Shape, evaluate
from rlx.records import dataclass

__all__ = ["Blocks", "Extents", "Once", "Part", "Product", "once"]

Extents = Mapping[str, int]
T = TypeVar("T")


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


class Part:
    """A number that a cut tells: its field of that name, or its entry `index` where that is a tuple."""

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


@dataclass(eq=False, repr=False)
class Blocks:
    """The number of blocks of `block` elements, the last one perhaps not full, that cover a grid of these sizes."""

    sizes: Shape
    block: int

    def __call__(self, extents: Extents) -> int:
        return -(-prod(evaluate(s, extents) for s in self.sizes) // self.block)
