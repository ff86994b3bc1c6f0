"""What the shared lowering needs of a library of array functions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.backends.array import MemorySpace
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Array, Node
from rlx.kernels.lowering import Conv

__all__ = ["Arrays", "Flat", "Native", "neutral", "table"]

Native = Callable[..., Any]  # (library, node with sizes as ints, check, *arrays) -> array or tuple of them
Flat = Callable[[Sequence[Any]], list[Any]]  # arrays -> arrays


class Arrays(MemorySpace):
    """A library: `xp` is its NumPy-like module, `functions` the scalar functions of expressions on whole arrays.

    `native` maps ops that it has a function for; `types` names the element types that it has.
    """

    xp: Any
    functions: Mapping[str, Callable[..., Any]]
    native: Mapping[str, Native]
    types: frozenset[str]

    def lacks(self, fn: str, dtype: DType) -> str | None:
        """Why it can't apply a scalar function to elements of that type; None when it can."""
        return None if fn in self.functions else f"it has no function {fn!r}"

    def refuses(self, node: Node) -> str | None:
        """Why it can't run an op of `native` on these types and attributes; None when it can."""
        return None

    @abstractmethod
    def dtype(self, dtype: DType) -> Any:
        """Its own name of an element type."""

    def type_of(self, held: Any) -> np.dtype[Any]:
        dtype: np.dtype[Any] = held.dtype
        return dtype

    def wait(self, x: Sequence[Any]) -> None:
        """Waits until arrays are computed."""

    def borrow(self, array: Array) -> Any:
        """As `put`, for an array that does not change before the end of the run."""
        return self.put(array)

    @abstractmethod
    def cast(self, x: Any, dtype: DType) -> Any: ...

    @abstractmethod
    def bitcast(self, x: Any, dtype: DType) -> Any: ...

    @abstractmethod
    def take(self, x: Any, index: Any, axis: int) -> Any:
        """Slices of x along an axis; every index is inside it."""

    @abstractmethod
    def reduce(self, kind: str, x: Any, axes: tuple[int, ...]) -> Any:
        """The reduction over axes that have elements, which keep size 1; the type stays."""

    @abstractmethod
    def search(self, kind: str, x: Any, axis: int) -> Any:
        """The i64 index of the first extremum ("argmax", "argmin") along an axis, which keeps size 1."""

    @abstractmethod
    def matmul(self, a: Any, b: Any, dtype: DType) -> Any:
        """Matrix product of operands of one type, accumulated in it."""

    @abstractmethod
    def conv(self, x: Any, w: Any, anchor: Conv) -> Any | None:
        """The convolution in the type of the operands; None for one that the library lacks."""

    @abstractmethod
    def host(self, fn: Callable[..., Sequence[Array]], results: Sequence[tuple[tuple[int, ...], DType]], x: Any) -> Any:
        """The results of a NumPy function on the arrays `x`, a list."""

    @abstractmethod
    def cond(self, test: Any, then: Flat, otherwise: Flat, x: Sequence[Any]) -> list[Any]: ...

    @abstractmethod
    def loop(
        self, test: Callable[[Sequence[Any]], Any], body: Flat, x: Sequence[Any], times: int | None = None
    ) -> list[Any]:
        """x replaced by body(x) for as long as test(x) holds; `times`: how often that is, where it is known."""

    @abstractmethod
    def set_row(self, x: Any, row: Any, at: Any) -> Any:
        """x with x[at] replaced; `at` is an i64 scalar of the library."""

    @abstractmethod
    def compile(self, fn: Flat, x: Sequence[Any], pure: bool) -> Flat:
        """The function for arrays of the types of x. `pure`: it makes no host call and asks no array for its value."""

    # ---- what follows from these

    def const(self, value: Any, dtype: DType, rank: int) -> Any:
        """One element, as an array of `rank` axes of size 1."""
        with np.errstate(all="ignore"):
            return self.put(np.asarray(value).astype(dtype.numpy).reshape((1,) * rank))

    def zeros(self, shape: Sequence[int], dtype: DType) -> Any:
        return self.xp.zeros(tuple(shape), self.dtype(dtype))

    def iota(self, n: int) -> Any:
        """0, 1, ... as i64."""
        return self.xp.arange(n, dtype=self.dtype(DTYPES["i64"]))


def neutral(kind: str, dtype: DType) -> Any:
    """The result of a reduction over no elements."""
    match kind:
        case "max" | "min":
            if dtype.is_float:
                return -np.inf if kind == "max" else np.inf
            info = np.iinfo(dtype.numpy)
            return info.min if kind == "max" else info.max
        case "mul" | "and":
            return 1
    return 0


def table(xp: Any, **more: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The scalar functions that a NumPy-like module has under the usual names, and `more`."""
    names = ["exp", "log", "sqrt", "sin", "cos", "tanh", "floor", "ceil", "round", "abs", "isnan", "isinf"]
    return {name: getattr(xp, name) for name in names} | {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "neg": lambda a: -a,
        "div": xp.divide,
        "pow": xp.power,
        "min": xp.minimum,
        "max": xp.maximum,
        "eq": lambda a, b: a == b,
        "ne": lambda a, b: a != b,
        "lt": lambda a, b: a < b,
        "le": lambda a, b: a <= b,
        "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "shl": xp.left_shift,
        "shr": xp.right_shift,
        **more,
    }
