"""NumPy indexing of graph values: `x[key]`, and `x.at[key].set(v)` in the place of `x[key] = v`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from rlx import ops
from rlx.boundary import bounded_class
from rlx.errors import CompileError, DTypeError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ir.shape import Dim, Size, bounds, ceildiv, max_size, min_size, numel
from rlx.ops.layout import Iota
from rlx.ops.numpy.shaping import indexes
from rlx.ops.numpy.types import cast, is_number, lift, value_of
from rlx.records import dataclass

np: Any = numpy  # its types are of arrays, here its functions take graph values

__all__ = ["At", "getitem"]


@dataclass(frozen=True)
class _Range:
    """A slice of an axis: `size` elements from `start` on, `step` apart; `kept`: the axis stays (it is no int)."""

    start: Size
    size: Size
    step: int
    kept: bool = True


@dataclass(frozen=True)
class _New:
    """A new axis of size 1."""


Entry = _Range | _New | Value


def getitem(x: Value, key: Any) -> Value:
    """`x[key]` as in NumPy: ints, slices, None, `...`, integer arrays and values, and masks that are known.

    Raises `IndexError` beyond a static size, `ShapeError` for too many indices, `OptionError` for masks that are graph
    values, whose result would have a size that depends on the data. An index that a run decides and that lies outside
    stops the run with `ExecutionError`.
    """
    entries = _entries(x, key)
    ranges = [e for e in entries if not isinstance(e, _New)]
    y = _sliced(x, ranges)
    if any(isinstance(e, Value) for e in ranges):
        return _gathered(y, entries)
    dropped = tuple(d for d, e in enumerate(ranges) if isinstance(e, _Range) and not e.kept)
    if dropped:
        y = ops.squeeze(y, axes=dropped)
    return _with_new(y, [e for e in entries if not (isinstance(e, _Range) and not e.kept)])


def _with_new(y: Value, kept: list[Entry]) -> Value:
    added = tuple(d for d, e in enumerate(kept) if isinstance(e, _New))
    return ops.unsqueeze(y, axes=added) if added else y


def _entries(x: Value, key: Any) -> list[Entry]:
    """One entry for each axis of x and for each new one, in order."""
    keys: list[Any] = []
    for k in key if isinstance(key, tuple) else (key,):
        keys += _unmasked(x, k)
    used = sum(k is not None and k is not Ellipsis for k in keys)
    if used > x.rank:
        raise ShapeError(f"too many indices: {x!r} has {x.rank} axes, {used} given")
    at = [i for i, k in enumerate(keys) if k is Ellipsis]
    if len(at) > 1:
        raise OptionError("an index can have one ellipsis ('...') only")
    where = at[0] if at else len(keys)
    keys[where : where + 1] = [slice(None)] * (x.rank - used)
    found: list[Entry] = []
    axis = 0
    arrays = any(not isinstance(k, slice) and k is not None and np.ndim(k) > 0 for k in keys)
    for k in keys:
        if k is None:
            found.append(_New())
            continue
        found.append(_entry(x, axis, k, arrays))
        axis += 1
    return found


def _unmasked(x: Value, k: Any) -> list[Any]:
    """A mask that is known as the indices it stands for; lists as arrays."""
    if isinstance(k, list):
        k = np.asarray(k) if not any(isinstance(v, Value | Dim) for v in k) else np.stack(lift("index", k))
    if isinstance(k, Value) and k.dtype is DTYPES["bool"]:
        raise OptionError(
            f"{x!r} by a mask that is a graph value: how many elements it has depends on the data; use "
            "np.where(mask, x, other), or rlx.compress, which takes a count"
        )
    if isinstance(k, bool | np.bool_):
        raise OptionError(f"{k} is no index: use np.where or rlx.cond")
    if isinstance(k, np.ndarray) and k.dtype == np.bool_:
        return list(np.nonzero(k))
    return [k]


def _entry(x: Value, axis: int, k: Any, arrays: bool) -> Entry:
    extent = x.shape[axis]
    if isinstance(k, slice):
        return _range(k, extent, axis, x)
    if isinstance(k, int | np.integer | Dim):
        start = _place(k if isinstance(k, Dim) else int(k), extent, axis, x)
        return (
            value_of("index", start if isinstance(start, Dim) else np.int64(start))
            if arrays
            else _Range(start, 1, 1, False)
        )
    if isinstance(k, np.ndarray) and k.dtype.kind in "iu" and isinstance(extent, int) and k.size:
        beyond = k[(k < -extent) | (k >= extent)]
        if beyond.size:
            raise OutOfBounds(f"index {beyond[0]} is out of bounds for axis {axis} of {x!r}")
    if not isinstance(k, Value | np.ndarray):
        raise OptionError(
            f"axis {axis} of {x!r}: {k!r} is no index: expected ints, slices, None, '...' or integer arrays"
        )
    if k.size == 0 if isinstance(k, np.ndarray) else False:
        k = k.astype(np.int64)
    return indexes(value_of("index", k))


def _place(k: Size, extent: Size, axis: int, x: Value) -> Size:
    if isinstance(k, int) and isinstance(extent, int) and not -extent <= k < extent:
        raise OutOfBounds(f"index {k} is out of bounds for axis {axis} of {x!r}")
    return extent + k if isinstance(k, int) and k < 0 else k


def _range(k: slice, extent: Size, axis: int, x: Value) -> _Range:
    if any(isinstance(part, Value) for part in (k.start, k.stop, k.step)):
        raise OptionError(
            f"axis {axis} of {x!r}: the bounds of a slice give its size, so they can't be graph values: for n elements "
            "from i on use x[i + np.arange(n)]"
        )
    if not isinstance(extent, Dim) and not any(isinstance(p, Dim) for p in (k.start, k.stop)):
        rows = range(extent)[k]
        return _Range(rows.start if len(rows) else 0, len(rows), rows.step)
    step = 1 if k.step is None else int(k.step)
    if step == 0:
        raise ShapeError(f"axis {axis} of {x!r}: the step of a slice is 0")
    low, high = (0, extent) if step > 0 else (-1, extent - 1)

    def clamped(bound: Any, otherwise: Size) -> Size:
        if bound is None:
            return otherwise
        at: Size = bound if isinstance(bound, Dim) else int(bound)
        lo = bounds(at)[0]
        if lo is None or lo < 0:
            at = extent + at if isinstance(at, int) else at
        return max_size(min_size(at, high), low)

    start, stop = clamped(k.start, low if step > 0 else high), clamped(k.stop, high if step > 0 else low)
    count = ceildiv(stop - start, step) if step > 0 else ceildiv(start - stop, -step)
    return _Range(start, max_size(count, 0), step)


def _sliced(x: Value, ranges: list[Any]) -> Value:
    whole = [_Range(0, n, 1) for n in x.shape]
    found = [r if isinstance(r, _Range) else all_of for r, all_of in zip(ranges, whole, strict=True)]
    if all(r.start == 0 and r.size == n and r.step == 1 for r, n in zip(found, x.shape, strict=True)):
        return x
    starts, sizes, steps = zip(*((r.start, r.size, r.step) for r in found), strict=True)
    made: Value = ops.slice(x, starts=starts, sizes=sizes, steps=steps)
    return made


def _gathered(y: Value, entries: list[Entry]) -> Value:
    """y with its axes that have arrays as entries chosen by them; where the result's axes go is NumPy's rule."""
    axes = [e for e in entries if not isinstance(e, _New)]
    dropped = tuple(d for d, e in enumerate(axes) if isinstance(e, _Range) and not e.kept)
    if dropped:  # no arrays but scalars then: ints are arrays otherwise
        y = ops.squeeze(y, axes=dropped)
        entries = [e for e in entries if not (isinstance(e, _Range) and not e.kept)]
        axes = [e for e in entries if not isinstance(e, _New)]
    chosen = [(d, e) for d, e in enumerate(axes) if isinstance(e, Value)]
    rank = max(e.rank for _, e in chosen)
    places = [i for i, e in enumerate(entries) if isinstance(e, Value)]
    if len(chosen) == 1 or rank == 0:
        for d, index in reversed(chosen):
            y = ops.gather(y, index, axis=d)
    else:
        others = [d for d, e in enumerate(axes) if not isinstance(e, Value)]
        tuples = [ops.unsqueeze(v, axes=(rank,)) for v in np.broadcast_arrays(*(cast(e, "i64") for _, e in chosen))]
        y = ops.transpose(y, perm=(*(d for d, _ in chosen), *others))
        y = ops.gather_nd(y, ops.concat(*tuples, axis=rank))  # [arrays' shape.., others..]
        adjacent = places[-1] - places[0] + 1 == len(places)
        before = sum(isinstance(e, _Range) for e in entries[: places[0]]) if adjacent else 0
        order = list(range(rank, y.rank))
        y = ops.transpose(y, perm=(*order[:before], *range(rank), *order[before:]))
        if not adjacent:
            rest = [e for e in entries if not isinstance(e, Value)]
            return _with_new(y, [*[_Range(0, 1, 1)] * rank, *rest])
    kept: list[Entry] = []
    for i, e in enumerate(entries):
        if not isinstance(e, Value):
            kept.append(e)
        elif i == places[0]:
            kept += [_Range(0, 1, 1)] * rank
    return _with_new(y, kept)


# ---- changes


class At:
    """`x.at`: names elements of x by a key, as in `x.at[key].set(v)`; x itself stays as it is."""

    def __init__(self, x: Value) -> None:
        self._x = x

    def __getitem__(self, key: Any) -> Place:
        return Place(self._x, key)


class OutOfBounds(ShapeError, IndexError):
    """An index that an axis does not have."""


@bounded_class(CompileError)
class Place:
    """Elements of a graph value, for changes that give a new one. An index outside stops the run, as in NumPy.

    Where a key names an element twice, `set` keeps the last value and the others combine all. A mask that is a graph
    value takes numbers, or arrays that broadcast with x.
    """

    def __init__(self, x: Value, key: Any) -> None:
        self._x = x
        self._key = key

    def get(self) -> Value:
        """The elements: `x[key]`."""
        return getitem(self._x, self._key)

    def set(self, values: Any) -> Any:
        """x with the elements replaced."""
        return self._changed("none", lambda old, new: new, values)

    def add(self, values: Any) -> Any:
        """x with values added to the elements."""
        return self._changed("add", ops.add, values)

    def subtract(self, values: Any) -> Any:
        """x with values taken off the elements."""
        return self._changed("add", ops.add, np.negative(values))

    def multiply(self, values: Any) -> Any:
        """x with the elements multiplied by values."""
        return self._changed("mul", ops.mul, values)

    def min(self, values: Any) -> Any:
        """x with the smaller of elements and values."""
        return self._changed("min", ops.minimum, values)

    def max(self, values: Any) -> Any:
        """x with the larger of elements and values."""
        return self._changed("max", ops.maximum, values)

    def apply(self, function: Callable[[Any], Any]) -> Any:
        """x with `function` of the elements in their place."""
        return self.set(function(self.get()))

    def _changed(self, reduction: str, combine: Callable[..., Any], values: Any) -> Any:
        x, key = self._x, self._key
        new = _like(x, values)
        if isinstance(key, Value) and key.dtype is DTYPES["bool"]:
            mask = ops.unsqueeze(key, axes=tuple(range(key.rank, x.rank))) if key.rank < x.rank else key
            return np.where(mask, combine(x, new), x)
        row = _row(x, _entries(x, key)) if reduction == "none" else None
        if row is not None:
            axis, start, count = row
            sizes = (*x.shape[:axis], count, *x.shape[axis + 1 :])
            kept = (
                new
                if _keeps(x, key, axis)
                else ops.unsqueeze(np.broadcast_to(new, (*x.shape[:axis], *x.shape[axis + 1 :])), axes=(axis,))
            )
            return ops.dynamic_update_slice(x, np.broadcast_to(kept, sizes), start, axis=axis)
        count = numel(x.shape)
        (numbers,) = x.graph.add(Iota(count))
        places = getitem(ops.reshape(numbers, shape=x.shape), key)
        spread = ops.reshape(np.broadcast_to(new, places.shape), shape=(numel(places.shape),))
        flat, at = ops.reshape(x, shape=(count,)), ops.reshape(places, shape=(numel(places.shape),))
        made = ops.scatter_elements(flat, at, spread, axis=0, reduction=reduction)
        return ops.reshape(made, shape=x.shape)


def _like(x: Value, values: Any) -> Value:
    """Values in the type of x. `DTypeError` where that would be another kind of number."""
    if is_number(values) and not isinstance(values, Value | Dim) and x.dtype.kind in "iu" and values != int(values):
        raise DTypeError(f"at: {values!r} does not fit the elements of {x!r}: cast x first")
    new = value_of("at", values)
    if new.dtype is x.dtype or new.weak or np.can_cast(new.dtype.numpy, x.dtype.numpy, "same_kind"):
        return cast(new, x.dtype)
    raise DTypeError(f"at: values {new.type} for the elements of {x!r}: cast one of them")


def _keeps(x: Value, key: Any, axis: int) -> bool:
    entry = [e for e in _entries(x, key) if not isinstance(e, _New)][axis]
    return isinstance(entry, _Range) and entry.kept


def _row(x: Value, entries: list[Entry]) -> tuple[int, Any, Size] | None:
    """(axis, start, count) where a key names whole rows next to each other of one axis."""
    if any(isinstance(e, _New) for e in entries):
        return None
    parts = [
        (d, e)
        for d, e in enumerate(entries)
        if not (isinstance(e, _Range) and e.kept and e.start == 0 and e.step == 1 and e.size == x.shape[d])
    ]
    if len(parts) != 1:
        return None
    ((axis, entry),) = parts
    if isinstance(entry, Value):
        if entry.rank:
            return None
        return axis, np.where(np.less(entry, 0), entry + x.shape[axis], entry), 1
    assert isinstance(entry, _Range)
    return (
        (axis, np.int64(entry.start) if isinstance(entry.start, int) else entry.start, entry.size)
        if entry.step == 1
        else None
    )
