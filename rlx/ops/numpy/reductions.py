"""NumPy's reductions, searches, sums along an axis and sorts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from rlx import ops
from rlx.errors import OptionError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ir.shape import Size, numel
from rlx.ops.base import axis_of
from rlx.ops.numpy.complex import is_complex, of_parts, squared_size
from rlx.ops.numpy.registry import of, refuse
from rlx.ops.numpy.types import cast, several, traced, value_of, whole

np: Any = numpy  # its types are of arrays, here its functions take graph values

Axis = int | Sequence[int] | None
BOOL = DTYPES["bool"]


def axes_of(axis: Axis, rank: int) -> tuple[int, ...]:
    """The axes that `axis` (an int, several, or None for all) names, as 0 <= axis < rank."""
    if axis is None:
        return tuple(range(rank))
    return tuple(axis_of(whole("axis", a), rank, "axis") for a in several("axis", axis))


def count_of(x: Value, axis: Axis) -> Size:
    """How many elements are reduced to one."""
    return numel([x.shape[d] for d in axes_of(axis, x.rank)])


def _wide(x: Value, dtype: Any) -> Value:
    """x in the type that sums and products have: in a trace, integers below 64 bits are widened as in NumPy."""
    if dtype is not None:
        return cast(x, dtype)
    if not traced() or x.dtype.kind in "fc" or x.dtype.bits == 64:
        return x
    return cast(x, "u64" if x.dtype.kind == "u" else "i64")


def _float(x: Value) -> Value:
    """x as floats: in a trace, integers become f64 as in NumPy; complex numbers stay."""
    return cast(x, "f64") if traced() and x.dtype.kind not in "fc" else x


def _reduced(op: Any, x: Value, axis: Axis, keepdims: bool) -> Any:
    return op(x, axes=axes_of(axis, x.rank), keepdims=bool(keepdims))


@of(np.sum)
@of_parts
def sum(a: Any, axis: Axis = None, dtype: Any = None, out: None = None, keepdims: bool = False) -> Any:
    """The sum over axes."""
    return _reduced(ops.reduce_sum, _wide(value_of("np.sum", a), dtype), axis, keepdims)


@of(np.prod)
def prod(a: Any, axis: Axis = None, dtype: Any = None, out: None = None, keepdims: bool = False) -> Any:
    """The product over axes."""
    return _reduced(ops.reduce_prod, _wide(value_of("np.prod", a), dtype), axis, keepdims)


@of(np.mean)
@of_parts
def mean(a: Any, axis: Axis = None, dtype: Any = None, out: None = None, keepdims: bool = False) -> Any:
    """The mean over axes."""
    x = value_of("np.mean", a)
    return _reduced(ops.reduce_mean, _float(x) if dtype is None else cast(x, dtype), axis, keepdims)


def _extremum(op: Any, of_bools: Any, a: Any, axis: Axis, keepdims: bool) -> Any:
    x = value_of("np.max", a)
    return of_bools(x, axis, keepdims=keepdims) if x.dtype is BOOL else _reduced(op, x, axis, keepdims)


@of(np.max, np.amax)
def max(a: Any, axis: Axis = None, out: None = None, keepdims: bool = False) -> Any:
    """The largest element over axes."""
    return _extremum(ops.reduce_max, any, a, axis, keepdims)


@of(np.min, np.amin)
def min(a: Any, axis: Axis = None, out: None = None, keepdims: bool = False) -> Any:
    """The smallest element over axes."""
    return _extremum(ops.reduce_min, all, a, axis, keepdims)


@of(np.any)
def any(a: Any, axis: Axis = None, out: None = None, keepdims: bool = False) -> Any:
    """Whether any element is not 0."""
    x = cast(cast(value_of("np.any", a), BOOL), "u8")
    return cast(_reduced(ops.reduce_max, x, axis, keepdims), BOOL)


@of(np.all)
def all(a: Any, axis: Axis = None, out: None = None, keepdims: bool = False) -> Any:
    """Whether all elements are not 0."""
    x = cast(cast(value_of("np.all", a), BOOL), "u8")
    return cast(_reduced(ops.reduce_min, x, axis, keepdims), BOOL)


@of(np.count_nonzero)
def count_nonzero(a: Any, axis: Axis = None, *, keepdims: bool = False) -> Any:
    """How many elements are not 0."""
    x = cast(cast(value_of("np.count_nonzero", a), BOOL), "i64")
    return _reduced(ops.reduce_sum, x, axis, keepdims)


@of(np.ptp)
def ptp(a: Any, axis: Axis = None, out: None = None, keepdims: bool = False) -> Any:
    """The largest minus the smallest element."""
    return max(a, axis, keepdims=keepdims) - min(a, axis, keepdims=keepdims)


@of(np.var)
def var(
    a: Any,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    ddof: int = 0,
    keepdims: bool = False,
    *,
    correction: float | None = None,
) -> Any:
    """The mean squared distance from the mean, with `ddof` (or `correction`) taken off the count."""
    ddof = ddof if correction is None else correction  # type: ignore[assignment]
    x = value_of("np.var", a)
    x = _float(x) if dtype is None else cast(x, dtype)
    away = x - mean(x, axis, keepdims=True)
    squares = squared_size(away) if is_complex(away) else away * away
    return sum(squares, axis, keepdims=keepdims) / (count_of(x, axis) - ddof)


@of(np.std)
def std(
    a: Any,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    ddof: int = 0,
    keepdims: bool = False,
    *,
    correction: float | None = None,
) -> Any:
    """The square root of the variance."""
    return np.sqrt(var(a, axis, dtype, None, ddof, keepdims, correction=correction))


def flat_of(what: str, a: Any, axis: int | None) -> tuple[Value, int]:
    """x and the axis to go along: of a flat one if it is None."""
    x = value_of(what, a)
    if axis is None:
        return ops.reshape(x, shape=(numel(x.shape),)), 0
    return x, axis_of(whole(f"{what}: axis", axis), x.rank, what)


def _arg(op: Any, what: str, a: Any, axis: int | None, keepdims: bool) -> Any:
    x = value_of(what, a)
    flat, at = flat_of(what, cast(x, "u8") if x.dtype is BOOL else x, axis)
    found = op(flat, axis=at, keepdims=keepdims and axis is not None)
    return ops.reshape(found, shape=(1,) * x.rank) if keepdims and axis is None else found


@of(np.argmax)
def argmax(a: Any, axis: int | None = None, out: None = None, *, keepdims: bool = False) -> Any:
    """The i64 index of the (first) largest element; without an axis in the flat array."""
    return _arg(ops.arg_max, "np.argmax", a, axis, keepdims)


@of(np.argmin)
def argmin(a: Any, axis: int | None = None, out: None = None, *, keepdims: bool = False) -> Any:
    """The i64 index of the (first) smallest element; without an axis in the flat array."""
    return _arg(ops.arg_min, "np.argmin", a, axis, keepdims)


@of(np.cumsum)
@of_parts
def cumsum(a: Any, axis: int | None = None, dtype: Any = None, out: None = None) -> Any:
    """The running sum."""
    x, at = flat_of("np.cumsum", a, axis)
    return ops.cum_sum(_wide(x, dtype), axis=at)


@of(np.cumprod)
def cumprod(a: Any, axis: int | None = None, dtype: Any = None, out: None = None) -> Any:
    """The running product."""
    x, at = flat_of("np.cumprod", a, axis)
    return ops.cum_prod(_wide(x, dtype), axis=at)


def _sorted(what: str, a: Any, axis: int | None, largest: bool = False) -> tuple[Value, Value]:
    x, at = flat_of(what, a, axis)
    values, places = ops.top_k(cast(x, "u8") if x.dtype is BOOL else x, k=x.shape[at], axis=at, largest=largest)
    return cast(values, x.dtype), places


def descending(what: str, a: Any, axis: int) -> tuple[Value, Value]:
    """The elements along an axis in descending order, and their places; stable."""
    return _sorted(what, a, axis, largest=True)


@of(np.sort)
def sort(a: Any, axis: int | None = -1, kind: Any = None, order: None = None, *, stable: Any = None) -> Any:
    """The elements along an axis in ascending order, NaN last; stable."""
    return _sorted("np.sort", a, axis)[0]


@of(np.argsort)
def argsort(a: Any, axis: int | None = -1, kind: Any = None, order: None = None, *, stable: Any = None) -> Any:
    """The i64 indices that sort along an axis; stable."""
    return _sorted("np.argsort", a, axis)[1]


@of(np.median)
def median(a: Any, axis: int | None = None, *, keepdims: bool = False) -> Any:
    """The middle element along an axis, or the mean of the two; NaN if there is one."""
    x, at = flat_of("np.median", _float(value_of("np.median", a)), axis)
    ordered, n = sort(x, at), x.shape[at]

    def pick(place: Size) -> Any:
        starts: list[Size] = [0] * x.rank
        sizes = list(x.shape)
        starts[at], sizes[at] = place, 1
        return ops.slice(ordered, starts=tuple(starts), sizes=tuple(sizes), steps=(1,) * x.rank)

    last = pick(n - 1)
    middle = (pick((n - 1) // 2) + pick(n // 2)) / 2
    found = np.where(np.isnan(last), last, middle)
    if axis is None and keepdims:
        return ops.reshape(found, shape=(1,) * np.ndim(a))
    return found if keepdims else ops.squeeze(found, axes=(at,))


@of(np.average)
def average(a: Any, axis: Axis = None, weights: Any = None, *, keepdims: bool = False) -> Any:
    """The mean, or the one weighted by `weights` of the shape of a or of the axis."""
    if weights is None:
        return mean(a, axis, keepdims=keepdims)
    if np.ndim(weights) == 1 and np.ndim(a) > 1 and isinstance(axis, int):
        shape = [1] * np.ndim(a)
        shape[axis] = np.shape(weights)[0]
        weights = np.broadcast_to(np.reshape(weights, shape), np.shape(a))
    return sum(a * weights, axis, keepdims=keepdims) / np.sum(weights, axis=axis, keepdims=keepdims)


def _without_nan(a: Any, instead: float) -> Any:
    return np.where(np.isnan(a), instead, a) if a.dtype.kind in "fc" else a


@of(np.nansum)
def nansum(a: Any, axis: Axis = None, *, keepdims: bool = False) -> Any:
    """The sum of what is not NaN."""
    return sum(_without_nan(a, 0.0), axis, keepdims=keepdims)


@of(np.nanmean)
def nanmean(a: Any, axis: Axis = None, *, keepdims: bool = False) -> Any:
    """The mean of what is not NaN."""
    if a.dtype.kind not in "fc":
        return mean(a, axis, keepdims=keepdims)
    there = cast(ops.not_(np.isnan(a)), a.dtype)
    return nansum(a, axis, keepdims=keepdims) / sum(there, axis, keepdims=keepdims)


@of(np.nanmax)
def nanmax(a: Any, axis: Axis = None, *, keepdims: bool = False) -> Any:
    """The largest of what is not NaN; NaN where all are."""
    return _nan_extremum(max, -np.inf, a, axis, keepdims)


@of(np.nanmin)
def nanmin(a: Any, axis: Axis = None, *, keepdims: bool = False) -> Any:
    """The smallest of what is not NaN; NaN where all are."""
    return _nan_extremum(min, np.inf, a, axis, keepdims)


def _nan_extremum(extremum: Any, neutral: float, a: Any, axis: Axis, keepdims: bool) -> Any:
    found = extremum(_without_nan(a, neutral), axis, keepdims=keepdims)
    return np.where(all(np.isnan(a), axis, keepdims=keepdims), np.nan, found) if a.dtype.is_float else found


@of(np.diff)
def diff(a: Any, n: int = 1, axis: int = -1) -> Any:
    """Differences of neighbours along an axis, n times."""
    if n < 0:
        raise OptionError(f"np.diff: n={n}: expected 0 or more")
    at = axis_of(axis, a.rank, "np.diff")
    for _ in range(n):
        after, before = ((slice(None),) * at + (part,) for part in (slice(1, None), slice(None, -1)))
        a = np.not_equal(a[after], a[before]) if a.dtype is BOOL else a[after] - a[before]
    return a


@of(np.trapezoid)
def trapezoid(y: Any, x: Any = None, dx: float = 1.0, axis: int = -1) -> Any:
    """The integral along an axis by the trapezoidal rule."""
    moved = np.moveaxis(y, axis, -1)
    width = dx if x is None else np.diff(x) if np.ndim(x) == 1 else np.diff(np.moveaxis(x, axis, -1))
    return sum(width * (moved[..., 1:] + moved[..., :-1]) / 2, -1)


refuse("the number of results depends on the data: rlx.unique(x, count=rlx.Dim(...)) bounds it", np.unique)
refuse(
    "the number of results depends on the data: rlx.non_zero(x, count=rlx.Dim(...)) bounds it",
    np.nonzero, np.argwhere, np.flatnonzero, np.extract, np.compress,
)  # fmt: skip
