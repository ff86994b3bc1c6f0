"""NumPy's quantiles, interpolation, searches in sorted arrays, convolutions and polynomials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from rlx import ops
from rlx.errors import OptionError, ShapeError
from rlx.ir.graph import Value
from rlx.ops.base import axis_of
from rlx.ops.numpy.creation import arange
from rlx.ops.numpy.reductions import sort
from rlx.ops.numpy.registry import of
from rlx.ops.numpy.types import cast, unite, value_of

np: Any = numpy  # its types are of arrays, here its functions take graph values


@of(np.quantile)
def quantile(a: Any, q: Any, axis: int | None = None, *, keepdims: bool = False) -> Any:
    """The elements below which a share `q` (a number or several, from 0 to 1) lies, interpolated."""
    shares = np.asarray(q, np.float64)
    if not ((shares >= 0) & (shares <= 1)).all():
        raise OptionError(f"np.quantile: q={q!r}: expected shares from 0 to 1")
    x = value_of("np.quantile", a)
    x = x if x.dtype.is_float and shares.ndim == 0 else cast(x, "f64")
    rank = x.rank
    flat = np.ravel(x) if axis is None else np.moveaxis(x, axis, 0)
    n = flat.shape[0]
    place = shares * (n - 1)
    low = np.floor(place)
    share = cast(value_of("np.quantile", place - low), x.dtype)
    before = np.astype(value_of("np.quantile", low), np.int64)
    after = np.minimum(before + 1, n - 1)
    ordered = sort(flat, 0)
    share = np.reshape(share, (*shares.shape, *(1,) * (flat.rank - 1)))
    lowest = np.take(ordered, before, axis=0)
    found = lowest + (np.take(ordered, after, axis=0) - lowest) * share
    found = np.where(np.any(np.isnan(flat), axis=0), np.nan, found)
    if not keepdims:
        return found
    kept = (1,) * rank if axis is None else tuple(1 if d == axis % rank else n for d, n in enumerate(x.shape))
    return np.reshape(found, (*shares.shape, *kept))


@of(np.percentile)
def percentile(a: Any, q: Any, axis: int | None = None, *, keepdims: bool = False) -> Any:
    """As `quantile`, in parts of 100."""
    return quantile(a, np.asarray(q, np.float64) / 100, axis, keepdims=keepdims)


@of(np.searchsorted)
def searchsorted(a: Any, v: Any, side: str = "left") -> Any:
    """For each v the i64 place in the sorted vector a before which it fits; compares with all of a."""
    if side not in ("left", "right"):
        raise OptionError(f"np.searchsorted: side={side!r}: expected 'left' or 'right'")
    values = np.expand_dims(value_of("np.searchsorted", v), -1)
    return np.count_nonzero(np.less(a, values) if side == "left" else np.less_equal(a, values), axis=-1)


@of(np.interp)
def interp(x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None) -> Any:
    """Values at x of the function that is linear between the points (xp, fp), xp ascending; f64."""
    at, points, values = (cast(value_of("np.interp", v), "f64") for v in (x, xp, fp))
    last = points.shape[0] - 1
    high = np.clip(searchsorted(points, at, "right"), 1, last)
    x0, x1 = np.take(points, high - 1), np.take(points, high)
    y0, y1 = np.take(values, high - 1), np.take(values, high)
    between = y0 + (y1 - y0) / (x1 - x0) * (at - x0)
    below, above = values[0] if left is None else left, values[-1] if right is None else right
    between = np.where(at == points[-1], values[-1], between)
    return np.where(at < points[0], below, np.where(at > points[-1], above, between))


@of(np.convolve)
def convolve(a: Any, v: Any, mode: str = "full") -> Any:
    """The convolution of two vectors: "full", "same" (as long as the longer) or "valid"."""
    x, kernel = unite("np.convolve", (a, v))
    if x.rank != 1 or kernel.rank != 1:
        raise ShapeError(f"np.convolve: expected vectors, got {x!r} and {kernel!r}")
    m = kernel.shape[0]
    if not isinstance(m, int):
        raise ShapeError("np.convolve: the second vector must have a static size")
    if isinstance(x.shape[0], int) and m > x.shape[0]:
        x, kernel, m = kernel, x, x.shape[0]
    before = {"full": m - 1, "same": m // 2, "valid": 0}.get(mode)
    if before is None:
        raise OptionError(f"np.convolve: mode={mode!r}: expected 'full', 'same' or 'valid'")
    after = before if mode != "same" else m - 1 - before
    padded = np.pad(x, (before, after))
    count = padded.shape[0] - m + 1
    places = np.expand_dims(value_of("np.convolve", arange(count)), 1) + np.arange(m)
    return np.matmul(np.take(padded, places), np.flip(kernel))


@of(np.polyval)
def polyval(p: Any, x: Any) -> Any:
    """A polynomial, highest power first, at x."""
    coefficients = p if isinstance(p, Value) else np.asarray(p)
    total = np.zeros_like(x)
    for i in range(len(coefficients)):
        total = total * x + coefficients[i]
    return total


@of(np.select)
def select(condlist: Sequence[Any], choicelist: Sequence[Any], default: Any = 0) -> Any:
    """For each element the choice of the first condition that holds, else `default`."""
    if len(condlist) != len(choicelist):
        raise OptionError(f"np.select: {len(condlist)} conditions for {len(choicelist)} choices")
    found = default
    for condition, choice in zip(reversed(condlist), reversed(choicelist), strict=True):
        found = np.where(condition, choice, found)
    return found


@of(np.isin)
def isin(element: Any, test_elements: Any, *, invert: bool = False) -> Any:
    """Whether each element is among others; compares with all of them."""
    other = np.ravel(value_of("np.isin", test_elements))
    found = np.any(np.equal(np.expand_dims(element, -1), other), axis=-1)
    return np.logical_not(found) if invert else found


@of(np.kron)
def kron(a: Any, b: Any) -> Any:
    """Blocks of b, one for each element of a and multiplied by it."""
    x, y = unite("np.kron", (a, b))
    rank = max(x.rank, y.rank)
    x, y = (np.reshape(v, (*(1,) * (rank - v.rank), *v.shape)) for v in (x, y))
    wide = np.expand_dims(x, tuple(range(1, 2 * rank, 2))) * np.expand_dims(y, tuple(range(0, 2 * rank, 2)))
    return np.reshape(wide, tuple(m * n for m, n in zip(x.shape, y.shape, strict=True)))


@of(np.dstack)
def dstack(tup: Sequence[Any]) -> Any:
    """Joined along the third axis; matrices and vectors get one."""
    parts: list[Value] = [value_of("np.dstack", v) for v in tup]
    deep = [p if p.rank > 2 else np.reshape(p, (*((1,) * (2 - p.rank)), *p.shape, 1)) for p in parts]
    return np.concatenate(deep, axis=2)


@of(np.sinc)
def sinc(x: Any) -> Any:
    """sin(pi x) / (pi x), 1 at 0."""
    turn = np.where(np.equal(x, 0), 1e-20, x) * np.pi
    return np.sin(turn) / turn


@of(np.gradient)
def gradient(f: Any, *, axis: int) -> Any:
    """Half the difference of the neighbours on both sides along an axis; at the ends of one side."""
    x = value_of("np.gradient", f)
    at = axis_of(axis, x.rank, "np.gradient")

    def part(start: int | None, stop: int | None) -> Any:
        return x[(slice(None),) * at + (slice(start, stop),)]

    inner = (part(2, None) - part(None, -2)) / 2
    return ops.concat(part(1, 2) - part(0, 1), inner, part(-1, None) - part(-2, -1), axis=at)
