"""NumPy indexing and the further operators of graph values, each in terms of ops."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ops.base import OPS, functional

__all__ = ["floor_div", "getitem", "logical"]


def floor_div(a: Any, b: Any) -> Any:
    """The largest integer not above a / b, element by element, in the type of the operands. (numpy.floor_divide)"""
    value = a if isinstance(a, Value) else b
    kind = value.dtype.numpy.kind
    if kind == "u":
        return functional(OPS["div"])(a, b)
    if kind == "i":  # div drops the fraction: one less where there was one and the signs differ
        zero = value.dtype.numpy.type(0)
        differ = functional(OPS["less"])(functional(OPS["bitwise_xor"])(a, b), zero)
        broken = functional(OPS["not_equal"])(functional(OPS["mod"])(a, b), zero)
        less = functional(OPS["cast"])(functional(OPS["and"])(broken, differ), to=value.dtype)
        return functional(OPS["sub"])(functional(OPS["div"])(a, b), less)
    return functional(OPS["floor"])(functional(OPS["div"])(a, b))


def logical(name: str, *values: Any) -> Any:
    """`and`, `or`, `xor`, `not`: of truths for bool values, bit by bit for integers."""
    first = next(v for v in values if isinstance(v, Value))
    return functional(OPS[name if first.dtype is DTYPES["bool"] else f"bitwise_{name}"])(*values)


def getitem(x: Value, key: Any) -> Value:
    """`x[key]` as in NumPy for ints, slices, None, `...` and at most one integer array or value.

    Raises `IndexError` beyond a static size, `ShapeError` for too many indices or a slice of an axis of dynamic size
    that needs its size, `OptionError` for other kinds of index.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    used = sum(k is not None and k is not Ellipsis for k in keys)
    if used > x.rank:
        raise ShapeError(f"too many indices: {x!r} has {x.rank} axes, {used} given")
    at = [i for i, k in enumerate(keys) if k is Ellipsis]
    if len(at) > 1:
        raise OptionError("an index can have one ellipsis ('...') only")
    where = at[0] if at else len(keys)
    keys[where : where + 1] = [slice(None)] * (x.rank - used)
    return _select(x, keys)


def _select(x: Value, keys: list[Any]) -> Value:
    starts: list[Any] = []
    sizes: list[Any] = []
    steps: list[int] = []
    dropped: list[int] = []
    added: list[int] = []
    arrays: list[tuple[int, Any]] = []
    rank = 0  # axes of the result so far
    for k in keys:
        if k is None:
            added.append(rank)
            rank += 1
            continue
        axis, extent = len(starts), x.shape[len(starts)]
        if isinstance(k, slice):
            start, size, step = _slice(k, extent, axis, x)
        elif isinstance(k, int | np.integer) and not isinstance(k, bool):
            start, size, step = _place(int(k), extent, axis, x), 1, 1
            dropped.append(axis)
        else:
            index = k if isinstance(k, Value) else np.asarray(k)
            kind = index.dtype.numpy.kind if isinstance(index, Value) else index.dtype.kind
            if kind not in "iu":
                raise OptionError(
                    f"axis {axis} of {x!r}: an index of kind {kind!r}; use integers, or rlx.where for masks"
                )
            arrays.append((rank, index))
            start, size, step = 0, extent, 1
        starts.append(start)
        sizes.append(size)
        steps.append(step)
        rank += not (dropped and dropped[-1] == axis)
    if len(arrays) > 1 or (arrays and dropped):
        raise OptionError("one integer array a subscript, and no ints beside it: use rlx.gather_nd for more")
    whole = not dropped and all(isinstance(k, slice) is False or k == slice(None) for k in keys)
    y = x if whole else functional(OPS["slice"])(x, tuple(starts), tuple(sizes), tuple(steps))
    if dropped:
        y = functional(OPS["squeeze"])(y, tuple(dropped))
    if added:
        y = functional(OPS["unsqueeze"])(y, tuple(added))
    for axis, index in arrays:
        y = functional(OPS["gather"])(y, index, axis=axis)
    assert isinstance(y, Value)
    return y


def _place(k: int, extent: Any, axis: int, x: Value) -> Any:
    if isinstance(extent, int) and not -extent <= k < extent:
        raise IndexError(f"index {k} is out of bounds for axis {axis} of {x!r}")
    return extent + k if k < 0 else k


def _slice(k: slice, extent: Any, axis: int, x: Value) -> tuple[Any, Any, int]:
    if any(isinstance(part, Value) for part in (k.start, k.stop, k.step)):
        raise OptionError(f"axis {axis} of {x!r}: the bounds of a slice are ints, not graph values; use rlx.gather")
    if k == slice(None):
        return 0, extent, 1
    if isinstance(extent, int):
        rows = range(extent)[k]
        return (rows.start if len(rows) else 0), len(rows), rows.step
    start = 0 if k.start is None else k.start
    if k.step in (None, 1) and start >= 0 and k.stop is None:
        return start, extent - start, 1
    if k.step in (None, 1) and start >= 0 and k.stop >= start:
        return start, k.stop - start, 1
    raise ShapeError(f"axis {axis} of {x!r}: {k} depends on the size {extent}; use bounds counted from the front")
