"""NumPy's functions that make arrays, like others or, in `rlx.numpy`, of sizes that a run decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from rlx import ops
from rlx.boundary import bounded
from rlx.errors import CompileError, OptionError
from rlx.ir.dtype import dtype_of
from rlx.ir.graph import Value
from rlx.ir.shape import Dim, Shape, Size, ceildiv, max_size
from rlx.ops.layout import Full
from rlx.ops.numpy.registry import of
from rlx.ops.numpy.types import cast, several, value_of, whole

np: Any = numpy  # its types are of arrays, here its functions take graph values

__all__ = ["CREATION", "arange", "array", "empty", "eye", "full", "identity", "linspace", "ones", "zeros"]


def _dtype(dtype: Any, default: Any = np.float64) -> Any:
    return {None: default, float: np.float64, int: np.int64, bool: np.bool_}.get(dtype, dtype)


def _shape(shape: Any) -> Shape:
    return tuple(s if isinstance(s, Dim) else whole("shape", s) for s in several("shape", shape))


def _is_static(*sizes: Any) -> bool:
    return not any(isinstance(s, Dim | Value) for s in sizes)


# ---- sizes may be Dims: `rlx.numpy.zeros((x.shape[0], 3))`


def full(shape: Any, fill_value: Any, dtype: Any = None) -> Any:
    """An array with every element `fill_value`, a number or a graph value. (numpy.full)"""
    sizes = _shape(shape)
    if isinstance(fill_value, Value):
        return ops.expand(fill_value if dtype is None else cast(fill_value, _dtype(dtype)), shape=sizes)
    if _is_static(*sizes):
        return np.full(sizes, fill_value, None if dtype is None else dtype_of(_dtype(dtype)).numpy)
    wanted = dtype_of(_dtype(dtype, np.asarray(fill_value).dtype))
    return ops.full(shape=sizes, value=np.asarray(fill_value).item(), dtype=wanted)


def zeros(shape: Any, dtype: Any = None) -> Any:
    """Zeros; f64 unless a type is given. (numpy.zeros)"""
    return full(shape, 0, _dtype(dtype))


def ones(shape: Any, dtype: Any = None) -> Any:
    """Ones; f64 unless a type is given. (numpy.ones)"""
    return full(shape, 1, _dtype(dtype))


def empty(shape: Any, dtype: Any = None) -> Any:
    """Zeros: there is no memory without values here. (numpy.empty)"""
    return zeros(shape, dtype)


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> Any:
    """start, start + step, ... below stop; the bounds may be sizes of the run. (numpy.arange)"""
    if stop is None:
        start, stop = 0, start
    if any(isinstance(v, Value) for v in (start, stop, step)):
        raise OptionError(
            "arange: its bounds give its size, so they can't be graph values: rlx.ops.arange takes a count"
        )
    if _is_static(start, stop):
        return np.arange(start, stop, step, None if dtype is None else dtype_of(_dtype(dtype)).numpy)
    if not isinstance(step, int) or step == 0:
        raise OptionError(f"arange: step={step!r}: expected an int other than 0 beside sizes of the run")
    count: Size = ceildiv(stop - start, step) if step > 0 else ceildiv(start - stop, -step)
    made = ops.iota(size=max_size(count, 0), start=start, step=step)
    return made if dtype is None else cast(made, _dtype(dtype))


def linspace(start: Any, stop: Any, num: Any = 50, endpoint: bool = True, dtype: Any = None) -> Any:
    """`num` numbers from start to stop, evenly apart. (numpy.linspace)"""
    if _is_static(start, stop, num):
        return np.linspace(start, stop, num, endpoint, dtype=None if dtype is None else dtype_of(_dtype(dtype)).numpy)
    steps = max_size(num - 1 if endpoint else num, 1)
    at = cast(value_of("linspace", arange(num)), "f64") / steps
    made = start + at * (stop - start)
    return made if dtype is None else cast(made, _dtype(dtype))


def eye(N: Any, M: Any = None, k: int = 0, dtype: Any = None) -> Any:
    """Ones on the k-th diagonal, zeros elsewhere. (numpy.eye)"""
    columns = N if M is None else M
    if _is_static(N, columns):
        return np.eye(N, columns, k, dtype_of(_dtype(dtype)).numpy)
    row, column = (value_of("eye", arange(n)) for n in (N, columns))
    here = ops.equal(ops.unsqueeze(row, axes=(1,)) + k, ops.unsqueeze(column, axes=(0,)))
    return cast(here, _dtype(dtype))


def identity(n: Any, dtype: Any = None) -> Any:
    """The identity matrix. (numpy.identity)"""
    return eye(n, dtype=dtype)


def array(object: Any, dtype: Any = None) -> Any:
    """Numbers, arrays and graph values, in lists of any depth, as one array. (numpy.array)"""
    if not _has_values(object):
        return np.asarray(object, None if dtype is None else dtype_of(_dtype(dtype)).numpy)
    if isinstance(object, list | tuple):
        made = np.stack([array(part) if isinstance(part, list | tuple) else part for part in object])
    else:
        made = value_of("array", object)
    return made if dtype is None else cast(made, _dtype(dtype))


def _has_values(object: Any) -> bool:
    if isinstance(object, list | tuple):
        return any(_has_values(part) for part in object)
    return isinstance(object, Value | Dim)


_MADE: dict[str, Callable[..., Any]] = {
    "arange": arange, "array": array, "asarray": array, "empty": empty, "eye": eye, "full": full, "identity": identity,
    "linspace": linspace, "ones": ones, "zeros": zeros,
}  # fmt: skip
CREATION = {name: bounded(name, CompileError)(function) for name, function in _MADE.items()}


# ---- like another array


def _like(a: Any, fill_value: Any, dtype: Any, shape: Any) -> Any:
    x = value_of("np.full_like", a)
    wanted = x.dtype if dtype is None else dtype_of(_dtype(dtype))
    sizes = x.shape if shape is None else _shape(shape)
    if isinstance(fill_value, Value):
        return ops.expand(cast(fill_value, wanted), shape=sizes)
    value = np.asarray(fill_value).astype(wanted.numpy)
    if value.ndim:
        return ops.expand(value_of("np.full_like", value), shape=sizes)
    return x.graph.add(Full(sizes, value.item(), wanted))[0]


@of(np.full_like)
def full_like(
    a: Any, fill_value: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None
) -> Any:
    """An array of the shape and type of another, with every element `fill_value`."""
    return _like(a, fill_value, dtype, shape)


@of(np.zeros_like)
def zeros_like(a: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None) -> Any:
    """Zeros of the shape and type of another array."""
    return _like(a, 0, dtype, shape)


@of(np.ones_like)
def ones_like(a: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None) -> Any:
    """Ones of the shape and type of another array."""
    return _like(a, 1, dtype, shape)


@of(np.empty_like)
def empty_like(prototype: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None) -> Any:
    """Zeros of the shape and type of another array."""
    return _like(prototype, 0, dtype, shape)
