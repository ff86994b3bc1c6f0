"""Which function stands for which of NumPy's, and the two protocols by which NumPy asks for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from rlx.errors import OptionError

__all__ = ["FUNCTIONS", "REFUSED", "array_function", "array_ufunc", "of", "refuse"]

FUNCTIONS: dict[Any, Callable[..., Any]] = {}  # NumPy's function or ufunc -> ours
REFUSED: dict[Any, str] = {}  # NumPy's function -> what to do instead
REDUCTIONS = {
    np.add: np.sum, np.multiply: np.prod, np.maximum: np.max, np.minimum: np.min, np.logical_and: np.all,
    np.logical_or: np.any,
}  # fmt: skip
ACCUMULATIONS = {np.add: np.cumsum, np.multiply: np.cumprod}

F = TypeVar("F", bound=Callable[..., Any])


def of(*functions: Any) -> Callable[[F], F]:
    """Decorator: makes the function stand for these of NumPy's, with the same arguments."""

    def known(ours: F) -> F:
        FUNCTIONS.update(dict.fromkeys(functions, ours))
        return ours

    return known


def refuse(why: str, *functions: Any) -> None:
    """Says what to do instead of these functions of NumPy's."""
    REFUSED.update(dict.fromkeys(functions, why))


def name_of(function: Any) -> str:
    """np.linalg.norm and the like."""
    module = getattr(function, "__module__", "numpy") or "numpy"
    return f"{module.replace('numpy', 'np', 1) if '_' not in module else 'np'}.{function.__name__}"


def array_function(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What `function(*args, **kwargs)` is on graph values. `OptionError` for what there is no counterpart of."""
    name = name_of(function)
    ours = FUNCTIONS.get(function)
    if ours is None:
        way = REFUSED.get(
            function, "docs/functions.md lists what there is; rlx.ops has more, and rlx.jit can be left out"
        )
        raise OptionError(f"{name} has no counterpart for graph values: {way}")
    if kwargs.get("out") is not None:
        raise OptionError(f"{name}: out= would write into an array while the function is traced: use the result")
    given = {key: value for key, value in kwargs.items() if key != "out"}
    try:
        inspect.signature(ours).bind(*args, **given)
    except TypeError as error:
        raise OptionError(f"{name} of graph values: {error}; it takes {inspect.signature(ours)}") from None
    return ours(*args, **given)


def array_ufunc(ufunc: Any, method: str, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call or a method of a ufunc is on graph values. `OptionError` for what there is no counterpart of."""
    if kwargs.get("out") is not None:
        raise OptionError(
            f"np.{ufunc.__name__}: an array that is not traced would be written into, as by `a += x`: write a = a + x"
        )
    given = {key: value for key, value in kwargs.items() if key not in ("out", "casting", "subok", "order")}
    if method == "__call__":
        return array_function(ufunc, inputs, given)
    if method == "reduce" and ufunc in REDUCTIONS:
        axis = given.pop("axis", 0)
        return array_function(REDUCTIONS[ufunc], inputs, {**given, "axis": axis})
    if method == "accumulate" and ufunc in ACCUMULATIONS:
        return array_function(ACCUMULATIONS[ufunc], inputs, {"axis": 0, **given})
    if method == "outer" and not given:
        a, b = inputs
        return ufunc(np.reshape(a, (*np.shape(a), *(1,) * np.ndim(b))), b)
    raise OptionError(f"np.{ufunc.__name__}.{method} has no counterpart for graph values: use the functions of NumPy")
