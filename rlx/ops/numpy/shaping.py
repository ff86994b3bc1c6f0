"""NumPy's functions that move, repeat or rename axes and elements of one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from rlx import ops
from rlx.errors import OptionError, ShapeError
from rlx.ir.graph import Value
from rlx.ir.shape import Dim, Size, exact_div, numel
from rlx.ops.base import axis_of
from rlx.ops.numpy.reductions import axes_of
from rlx.ops.numpy.registry import of
from rlx.ops.numpy.types import several, value_of, whole

np: Any = numpy  # its types are of arrays, here its functions take graph values

Axes = int | Sequence[int] | None


@of(np.shape)
def shape(a: Any) -> Any:
    """The sizes: ints, and Dims where they are dynamic."""
    return value_of("np.shape", a).shape


@of(np.ndim)
def ndim(a: Any) -> Any:
    """The number of axes."""
    return value_of("np.ndim", a).rank


@of(np.size)
def size(a: Any, axis: int | None = None) -> Any:
    """The number of elements, or the size of an axis."""
    x = value_of("np.size", a)
    return numel(x.shape) if axis is None else x.shape[axis]


@of(np.reshape)
def reshape(a: Any, /, shape: Any = None, order: str = "C", *, copy: Any = None) -> Any:
    """The same elements in row-major order under another shape, of which one size may be -1."""
    if order != "C":
        raise OptionError(f"np.reshape: order={order!r}: only the row-major order 'C' is there; transpose first")
    x = value_of("np.reshape", a)
    given = several("reshape", shape)
    sizes: list[Size] = [s if isinstance(s, Dim) else whole("reshape: size", s) for s in given]
    if sizes.count(-1) > 1:
        raise ShapeError(f"reshape: {given}: only one size can be -1")
    if -1 in sizes:
        at = sizes.index(-1)
        rest = numel([s for d, s in enumerate(sizes) if d != at])
        found = exact_div(numel(x.shape), rest)
        if found is None:
            raise ShapeError(f"reshape: the {numel(x.shape)} elements of {x!r} don't divide into {rest}")
        sizes[at] = found
    return ops.reshape(x, shape=tuple(sizes))


@of(np.ravel)
def ravel(a: Any, order: str = "C") -> Any:
    """All elements in one axis."""
    return reshape(a, (-1,) if numel(value_of("np.ravel", a).shape) != 0 else (0,), order)


@of(np.transpose)
def transpose(a: Any, axes: Sequence[int] | None = None) -> Any:
    """The axes in another order; without `axes` reversed."""
    x = value_of("np.transpose", a)
    return ops.transpose(
        x, perm=None if axes is None else tuple(whole("np.transpose: axis", d) for d in several("np.transpose", axes))
    )


@of(np.permute_dims)
def permute_dims(a: Any, axes: Sequence[int] | None = None) -> Any:
    """As `transpose`."""
    return transpose(a, axes)


@of(np.swapaxes)
def swapaxes(a: Any, axis1: int, axis2: int) -> Any:
    """Two axes exchanged."""
    x = value_of("np.swapaxes", a)
    order = list(range(x.rank))
    i, j = axis_of(axis1, x.rank, "np.swapaxes"), axis_of(axis2, x.rank, "np.swapaxes")
    order[i], order[j] = j, i
    return ops.transpose(x, perm=tuple(order))


@of(np.matrix_transpose)
def matrix_transpose(x: Any, /) -> Any:
    """The last two axes exchanged."""
    return swapaxes(x, -1, -2)


@of(np.moveaxis)
def moveaxis(a: Any, source: int | Sequence[int], destination: int | Sequence[int]) -> Any:
    """Axes moved to other places, the rest in order."""
    x = value_of("np.moveaxis", a)
    origins, goals = axes_of(source, x.rank), axes_of(destination, x.rank)
    if len(origins) != len(goals):
        raise ShapeError(f"np.moveaxis: {len(origins)} axes to {len(goals)} places")
    order = [d for d in range(x.rank) if d not in origins]
    for goal, origin in sorted(zip(goals, origins, strict=True)):
        order.insert(goal, origin)
    return ops.transpose(x, perm=tuple(order))


@of(np.expand_dims)
def expand_dims(a: Any, axis: int | Sequence[int]) -> Any:
    """Axes of size 1 inserted."""
    axes = tuple(whole("np.expand_dims: axis", d) for d in several("np.expand_dims", axis))
    return ops.unsqueeze(value_of("np.expand_dims", a), axes=axes)


@of(np.squeeze)
def squeeze(a: Any, axis: Axes = None) -> Any:
    """Axes of size 1 removed: those given, or all that are known to be 1."""
    axes = None if axis is None else tuple(whole("np.squeeze: axis", d) for d in several("np.squeeze", axis))
    return ops.squeeze(value_of("np.squeeze", a), axes=axes)


@of(np.atleast_1d)
def atleast_1d(*arys: Any) -> Any:
    """With one axis or more."""
    return _at_least(1, arys)


@of(np.atleast_2d)
def atleast_2d(*arys: Any) -> Any:
    """With two axes or more, new ones first."""
    return _at_least(2, arys)


def _at_least(rank: int, arys: Sequence[Any]) -> Any:
    made = [reshape(a, (*(1,) * max(0, rank - np.ndim(a)), *np.shape(a))) for a in arys]
    return made[0] if len(made) == 1 else tuple(made)


@of(np.broadcast_to)
def broadcast_to(array: Any, shape: Any) -> Any:
    """Repeated to a shape by NumPy's rules."""
    x = value_of("np.broadcast_to", array)
    wanted = (shape,) if isinstance(shape, int | Dim) else tuple(shape)
    made = ops.expand(x, shape=wanted)
    if made.shape != wanted:
        raise ShapeError(f"np.broadcast_to: {x!r} can't be repeated to {wanted}")
    return made


@of(np.flip)
def flip(m: Any, axis: Axes = None) -> Any:
    """Axes from their end to their beginning."""
    x = value_of("np.flip", m)
    axes = axes_of(axis, x.rank)
    return x[tuple(slice(None, None, -1) if d in axes else slice(None) for d in range(x.rank))]


@of(np.fliplr)
def fliplr(m: Any) -> Any:
    """The second axis from its end."""
    return flip(m, 1)


@of(np.flipud)
def flipud(m: Any) -> Any:
    """The first axis from its end."""
    return flip(m, 0)


@of(np.rot90)
def rot90(m: Any, k: int = 1, axes: tuple[int, int] = (0, 1)) -> Any:
    """Turned by k quarters in the plane of two axes."""
    if k % 4 == 0:
        return value_of("np.rot90", m)
    if k % 4 == 2:
        return flip(m, axes)
    return swapaxes(flip(m, axes[1]), *axes) if k % 4 == 1 else flip(swapaxes(m, *axes), axes[1])


@of(np.roll)
def roll(a: Any, shift: int | Sequence[int], axis: Axes = None) -> Any:
    """Moved along axes, what leaves at the end coming in at the beginning."""
    x = value_of("np.roll", a)
    if axis is None:
        return reshape(roll(ravel(x), shift, 0), x.shape)
    axes = axes_of(axis, x.rank)
    shifts = (shift,) * len(axes) if isinstance(shift, int | np.integer) else several("np.roll", shift)
    if len(shifts) != len(axes):
        raise ShapeError(f"np.roll: {len(shifts)} shifts for {len(axes)} axes")
    for d, by in zip(axes, shifts, strict=True):
        n = x.shape[d]
        if n == 0:
            continue
        front = -whole("np.roll: shift", by) % n
        x = ops.concat(_cut(x, d, front, n - front), _cut(x, d, 0, front), axis=d)
    return x


def _cut(x: Value, axis: int, start: Size, count: Size) -> Value:
    starts: list[Size] = [0] * x.rank
    sizes = list(x.shape)
    starts[axis], sizes[axis] = start, count
    made: Value = ops.slice(x, starts=tuple(starts), sizes=tuple(sizes), steps=(1,) * x.rank)
    return made


@of(np.repeat)
def repeat(a: Any, repeats: int, axis: int | None = None) -> Any:
    """Each element that many times in a row."""
    if not isinstance(repeats, int | np.integer | Dim):
        raise OptionError(f"np.repeat: repeats={repeats!r}: expected one number; for several use np.take of indices")
    x = ravel(a) if axis is None else value_of("np.repeat", a)
    at = axis_of(0 if axis is None else axis, x.rank, "np.repeat")
    wide = ops.unsqueeze(x, axes=(at + 1,))
    wide = ops.expand(wide, shape=(*x.shape[: at + 1], repeats, *x.shape[at + 1 :]))
    return ops.reshape(wide, shape=(*x.shape[:at], x.shape[at] * repeats, *x.shape[at + 1 :]))


@of(np.tile)
def tile(A: Any, reps: Any) -> Any:
    """The whole that many times along each axis."""
    x = value_of("np.tile", A)
    times = list(several("np.tile", reps))
    times = [*(1,) * (x.rank - len(times)), *times]
    x = ops.reshape(x, shape=(*(1,) * (len(times) - x.rank), *x.shape))
    return ops.tile(x, repeats=tuple(t if isinstance(t, Dim) else whole("np.tile: reps", t) for t in times))


PAD_MODES = {"constant": "constant", "edge": "edge", "reflect": "reflect", "wrap": "wrap"}


@of(np.pad)
def pad(array: Any, pad_width: Any, mode: str = "constant", *, constant_values: Any = 0) -> Any:
    """Elements added at both ends of axes: pairs (before, after) for each, one pair for all, or one number."""
    x = value_of("np.pad", array)
    if mode not in PAD_MODES or not isinstance(constant_values, int | float):
        raise OptionError(f"np.pad: mode={mode!r}, constant_values={constant_values!r}: expected one of {[*PAD_MODES]}")
    widths = np.broadcast_to(np.asarray(pad_width), (x.rank, 2)).tolist()
    pads = (*(before for before, _ in widths), *(after for _, after in widths))
    return ops.pad(x, pads=pads, mode=mode, value=constant_values)


@of(np.take)
def take(a: Any, indices: Any, axis: int | None = None, out: None = None, mode: str = "raise") -> Any:
    """Slices along an axis (without one: of the flat array) at integer indices; modes "raise", "clip" and "wrap"."""
    x = ravel(a) if axis is None else value_of("np.take", a)
    at = 0 if axis is None else axis_of(axis, x.rank, "np.take")
    index, n = value_of("np.take", indices), x.shape[at]
    if mode == "clip":
        index = np.clip(index, 0, n - 1)
    elif mode == "wrap":
        index = np.remainder(index, n)
    elif mode != "raise":
        raise OptionError(f"np.take: mode={mode!r}: expected 'raise', 'clip' or 'wrap'")
    return ops.gather(x, indexes(index), axis=at)


@of(np.take_along_axis)
def take_along_axis(arr: Any, indices: Any, axis: int | None = -1) -> Any:
    """Elements at indices along an axis; elsewhere the places are equal."""
    x = ravel(arr) if axis is None else value_of("np.take_along_axis", arr)
    return ops.gather_elements(x, indexes(value_of("np.take_along_axis", indices)), axis=-1 if axis is None else axis)


def indexes(index: Value) -> Value:
    """Integers in a type that ops take as indices."""
    if not index.dtype.is_integer:
        raise OptionError(f"an index has integer elements, got {index.type}; cast it, or use np.where for masks")
    if index.dtype.bits >= 32:
        return index
    made: Value = ops.cast(index, to="i64")
    return made


@of(np.diagonal)
def diagonal(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    """The diagonals of the matrices that two axes make, in a last axis."""
    x = np.moveaxis(value_of("np.diagonal", a), (axis1, axis2), (-2, -1))
    rows, columns = x.shape[-2:]
    if not isinstance(rows, int) or not isinstance(columns, int):
        raise ShapeError(f"np.diagonal: the axes {axis1} and {axis2} of {a!r} must have static sizes")
    count = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    row, column = max(-offset, 0), max(offset, 0)
    square = x[..., row : row + count, column : column + count]
    return ops.einsum(square, equation="...ii->...i")


@of(np.trace)
def trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None) -> Any:
    """The sum of a diagonal."""
    return np.sum(diagonal(a, offset, axis1, axis2), axis=-1, dtype=dtype)


@of(np.copy)
def copy(a: Any, order: str = "K", subok: bool = False) -> Any:
    """The same values: graph values never change."""
    return value_of("np.copy", a)
