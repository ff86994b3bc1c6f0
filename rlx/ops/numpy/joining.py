"""NumPy's functions that join several arrays or take one apart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy

from rlx import ops
from rlx.errors import ShapeError
from rlx.ir.shape import Size, broadcast, exact_div
from rlx.ops.base import axis_of
from rlx.ops.numpy.registry import of
from rlx.ops.numpy.shaping import atleast_1d, atleast_2d, ravel
from rlx.ops.numpy.types import cast, lift, several, unite, value_of, whole

np: Any = numpy  # its types are of arrays, here its functions take graph values


def _parts(what: str, arrays: Sequence[Any], dtype: Any) -> list[Any]:
    if not isinstance(arrays, list | tuple):
        arrays = list(arrays)
    return unite(what, arrays) if dtype is None else [cast(x, dtype) for x in lift(what, arrays)]


@of(np.concatenate, np.concat)
def concatenate(arrays: Any, /, axis: int | None = 0, out: None = None, *, dtype: Any = None) -> Any:
    """Arrays joined along an axis; without one, flat."""
    parts = _parts("np.concatenate", arrays, dtype)
    if axis is None:
        parts, axis = [ravel(p) for p in parts], 0
    return ops.concat(*parts, axis=axis_of(axis, parts[0].rank, "np.concatenate"))


@of(np.stack)
def stack(arrays: Any, axis: int = 0, out: None = None, *, dtype: Any = None) -> Any:
    """Arrays of one shape joined along a new axis."""
    parts = _parts("np.stack", arrays, dtype)
    at = axis_of(axis, parts[0].rank + 1, "np.stack")
    return ops.concat(*(ops.unsqueeze(p, axes=(at,)) for p in parts), axis=at)


@of(np.hstack)
def hstack(tup: Any, *, dtype: Any = None) -> Any:
    """Joined along the second axis, vectors along their only one."""
    parts = [atleast_1d(p) for p in _parts("np.hstack", tup, dtype)]
    return concatenate(parts, axis=0 if parts[0].rank == 1 else 1)


@of(np.vstack)
def vstack(tup: Any, *, dtype: Any = None) -> Any:
    """Joined along the first axis, vectors as rows."""
    return concatenate([atleast_2d(p) for p in _parts("np.vstack", tup, dtype)], axis=0)


@of(np.column_stack)
def column_stack(tup: Any) -> Any:
    """Joined along the second axis, vectors as columns."""
    parts = _parts("np.column_stack", tup, None)
    return concatenate([p if p.rank > 1 else ops.unsqueeze(p, axes=(1,)) for p in parts], axis=1)


@of(np.append)
def append(arr: Any, values: Any, axis: int | None = None) -> Any:
    """One after the other along an axis; without one, flat."""
    return concatenate([arr, values], axis=axis)


@of(np.split)
def split(ary: Any, indices_or_sections: Any, axis: int = 0) -> Any:
    """Parts along an axis: that many equal ones, or cut at these places."""
    x = value_of("np.split", ary)
    at = axis_of(axis, x.rank, "np.split")
    n = x.shape[at]
    sizes: list[Size]
    if isinstance(indices_or_sections, int | np.integer):
        part = exact_div(n, int(indices_or_sections))
        if part is None:
            raise ShapeError(f"np.split: axis {axis} of {x!r} does not divide into {indices_or_sections} equal parts")
        sizes = [part] * int(indices_or_sections)
    else:
        cuts = [0, *(whole("np.split: place", i) for i in several("np.split", indices_or_sections))]
        if isinstance(n, int):
            cuts = [min(max(c + n if c < 0 else c, 0), n) for c in cuts]
        sizes = [max(b - a, 0) for a, b in pairwise(cuts)]
        sizes.append(n - cuts[-1])
    made = ops.split(x, axis=at, sizes=tuple(sizes))
    return list(made) if isinstance(made, tuple) else [made]


@of(np.array_split)
def array_split(ary: Any, indices_or_sections: Any, axis: int = 0) -> Any:
    """As `split`, with parts that may differ by one."""
    n = np.shape(ary)[axis]
    if isinstance(indices_or_sections, int | np.integer) and isinstance(n, int):
        each, more = divmod(n, int(indices_or_sections))
        cuts = np.cumsum([each + (i < more) for i in range(int(indices_or_sections))])[:-1]
        return split(ary, cuts, axis)
    return split(ary, indices_or_sections, axis)


@of(np.broadcast_arrays)
def broadcast_arrays(*args: Any) -> Any:
    """All repeated to their common shape."""
    values = lift("np.broadcast_arrays", args)
    shape = broadcast(*(v.shape for v in values), why="np.broadcast_arrays")
    return tuple(ops.expand(v, shape=shape) for v in values)


@of(np.meshgrid)
def meshgrid(*xi: Any, indexing: str = "xy", sparse: bool = False, copy: bool = True) -> Any:
    """Vectors as the coordinates of a grid: x first and rows of y ("xy"), or in order ("ij")."""
    values = lift("np.meshgrid", xi)
    rank = len(values)
    places = list(range(rank))
    if indexing == "xy" and rank > 1:
        places[0], places[1] = 1, 0
    thin = [
        ops.reshape(v, shape=tuple(v.shape[0] if d == place else 1 for d in range(rank)))
        for v, place in zip(values, places, strict=True)
    ]
    return list(thin) if sparse else list(broadcast_arrays(*thin))
