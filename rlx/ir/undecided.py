"""Sizes that only a run decides, used as Python numbers (`n < 4`, `int(n)`): answered if bounds tell, else an error.

In a function that is being traced, arithmetic beyond that of sizes (`1 / n`, `np.sqrt(n)`) makes a graph value of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import numpy as np

from rlx.errors import OptionError

__all__ = ["NUMBERS", "Undecided"]

NUMBERS: list[Callable[[str, tuple[Any, ...]], Any]] = []  # by rlx.ops: (name of a ufunc, inputs) -> a graph value


class Undecided:
    """Base of `Dim`: comparisons, conversions and arithmetic with what is no size."""

    __slots__ = ()

    __sub__: ClassVar[Callable[[Any, Any], Any]]  # of Dim, as its bounds are
    _limits: ClassVar[Callable[[Any], tuple[int | None, int | None]]]

    def _not_known(self, *args: object) -> NoReturn:
        raise OptionError(
            f"the size {self} is decided by each run: it can't be a Python number. Loop by rlx.fori_loop(0, n, ...) or "
            "rlx.scan, make arrays by rlx.numpy.zeros and the like, branch by rlx.cond, or make the axis static by "
            "leaving it out of dims="
        )

    __index__ = __int__ = __float__ = __iter__ = _not_known

    def _below(self, other: Any, sign: str, more: int = 0) -> bool:
        """Whether self < other + more."""
        difference = self - (other + more)
        lo, hi = (difference, difference) if isinstance(difference, int) else difference._limits()
        if hi is not None and hi < 0:
            return True
        if lo is not None and lo >= 0:
            return False
        raise OptionError(
            f"whether {self} {sign} {other} depends on the run: give dims= bounds that tell, or decide by rlx.cond or "
            "np.where of values"
        )

    def __lt__(self, other: Any) -> bool:
        return self._below(other, "<")

    def __ge__(self, other: Any) -> bool:
        return not self._below(other, ">=")

    def __gt__(self, other: Any) -> bool:
        return not self._below(other, ">", 1)

    def __le__(self, other: Any) -> bool:
        return self._below(other, "<=", 1)

    def _number(self, name: str, *inputs: Any) -> Any:
        """The ufunc of that name on graph values; NotImplemented for what is no number."""
        if NUMBERS and all(isinstance(x, int | float | np.generic | np.ndarray | Undecided) for x in inputs):
            return NUMBERS[0](name, inputs)
        return NotImplemented

    def __truediv__(self, other: Any) -> Any:
        return self._number("true_divide", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._number("true_divide", other, self)

    def __pow__(self, other: Any) -> Any:
        return self._number("power", self, other)

    def __rpow__(self, other: Any) -> Any:
        return self._number("power", other, self)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs or not NUMBERS:
            return NotImplemented
        return NUMBERS[0](ufunc.__name__, inputs)
