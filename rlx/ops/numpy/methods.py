"""The operators and methods of graph values that are NumPy's, and what a method of ndarray can't be here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.errors import OptionError
from rlx.ir.value import register_methods
from rlx.ops.numpy import elementwise, joining, linear, reductions, shaping  # noqa: F401  # np's functions are theirs
from rlx.ops.numpy.indexing import At, getitem
from rlx.ops.numpy.registry import FUNCTIONS, array_function, array_ufunc
from rlx.ops.numpy.standard import namespace

# the operators in a traced function: by NumPy's rules for element types
OPERATORS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.true_divide, "floor_div": np.floor_divide,
    "mod": np.remainder, "pow": np.power, "matmul": np.matmul, "neg": np.negative, "abs": np.absolute,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "less": np.less,
    "less_equal": np.less_equal, "greater": np.greater, "greater_equal": np.greater_equal, "equal": np.equal,
    "not_equal": np.not_equal, "left_shift": np.left_shift, "right_shift": np.right_shift,
}  # fmt: skip

METHODS = {
    "sum": np.sum, "prod": np.prod, "mean": np.mean, "max": np.max, "min": np.min, "any": np.any, "all": np.all,
    "argmax": np.argmax, "argmin": np.argmin, "var": np.var, "std": np.std, "cumsum": np.cumsum,
    "cumprod": np.cumprod, "argsort": np.argsort, "round": np.round, "clip": np.clip, "dot": np.dot, "take": np.take,
    "repeat": np.repeat, "ravel": np.ravel, "flatten": np.ravel, "swapaxes": np.swapaxes, "diagonal": np.diagonal,
    "trace": np.trace, "copy": np.copy, "conj": np.conjugate, "conjugate": np.conjugate, "real": np.real,
    "imag": np.imag,
}  # fmt: skip


def _with_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction that takes `axes=` too, as ops do."""

    def method(x: Any, axis: Any = None, *args: Any, axes: Any = None, **kwargs: Any) -> Any:
        if axes is not None and axis is not None:
            raise OptionError(f"{function.__name__}: axis={axis!r} and axes={axes!r} mean the same: give one")
        return function(x, axis if axes is None else axes, *args, **kwargs)

    method.__name__, method.__doc__ = function.__name__, function.__doc__
    return method


def _variadic(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose sizes or axes come one by one or as a tuple: `x.reshape(2, 3)`, `x.reshape((2, 3))`."""

    def method(x: Any, *given: Any, **kwargs: Any) -> Any:
        whole = given[0] if len(given) == 1 and (given[0] is None or isinstance(given[0], tuple | list)) else given
        return function(x, *([whole] if given else []), **kwargs)

    method.__name__, method.__doc__ = function.__name__, function.__doc__
    return method


def _refused(name: str, why: str) -> Callable[..., Any]:
    def method(x: Any, *args: Any, **kwargs: Any) -> Any:
        raise OptionError(f"graph values have no method {name!r}: {why}")

    return method


IN_PLACE = "they never change: x = x.at[key].set(v) gives a changed one, np.sort(x) a sorted one"

register_methods(
    {f"np.{name}": FUNCTIONS[ufunc] for name, ufunc in OPERATORS.items()}
    | {name: FUNCTIONS[OPERATORS[name]] for name in ("left_shift", "right_shift")}
    | {name: FUNCTIONS[function] for name, function in METHODS.items()}
    | {name: _with_axes(FUNCTIONS[METHODS[name]]) for name in ("sum", "prod", "mean", "max", "min", "any", "all")}
    | {"squeeze": _with_axes(FUNCTIONS[np.squeeze]), "getitem": getitem}
    | {"at": At}
    | {"reshape": _variadic(shaping.reshape), "transpose": _variadic(shaping.transpose)}
    | {"astype": elementwise.astype, "matrix_transpose": shaping.matrix_transpose}
    | {"array_namespace": namespace, "array_ufunc": array_ufunc, "array_function": array_function}
    | {name: _refused(name, IN_PLACE) for name in ("fill", "put", "itemset", "sort", "resize", "partition")}
    | {"nonzero": _refused("nonzero", "the number of results depends on the data: rlx.non_zero takes its count")}
)
