"""The first halves of ops whose data decide a size: what they find, in a tensor of the largest size, and how much.

Their second halves make the number a size (`Extent`) and cut the tensor. What lies beyond the number is not defined.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import Size, numel
from rlx.ops.base import Op, Work, check_kind, register, tensor_bytes
from rlx.ops.dynamic import Extent
from rlx.ops.elementwise import Abs, Cast, Ceil, Div, Equal, Less, Maximum, Minimum, Not, Or, Where
from rlx.ops.index import Gather
from rlx.ops.layout import Iota, Reshape, Slice, Transpose
from rlx.ops.select import Arange, Compress, NonMaxSuppression, NonZero, Unique

__all__ = ["NonMaxPlaces", "NonZeroPlaces", "UniquePlaces"]

I64 = DTYPES["i64"]
MOST = 1 << 62  # elements: a range of more has no memory anyway


def _counted(g: Graph, op: Op, inputs: tuple[Value, ...], count: Size, axis: int) -> Value:
    """The places that an op finds, cut to their number, which becomes the size `count`."""
    places, found = g.add(op, *inputs)
    g.add(Extent(count, places.shape[axis]), found)
    return _cut(g, places, count, axis)


def _cut(g: Graph, x: Value, count: Size, axis: int = 0) -> Value:
    """The first elements along an axis."""
    sizes = [count if d == axis else size for d, size in enumerate(x.shape)]
    return g.add(Slice((0,) * x.rank, tuple(sizes), (1,) * x.rank), x)[0]


@register
class NonZeroPlaces(Op):
    """The indices of the elements that are not 0, i64 [rank, elements], and their number, i64 []; see `NonZero`."""

    def infer(self, x: TensorType) -> tuple[TensorType, TensorType]:
        return TensorType((max(x.rank, 1), numel(x.shape)), I64), TensorType((), I64)

    def work(self, *x: TensorType) -> Work:
        return Work(numel(x[0].shape), tensor_bytes(x[0]), tensor_bytes(self.infer_types(x)[0]))

    def reference(self, x: Array) -> tuple[Array, Array]:
        found = NonZero(0).reference(x)
        places = np.zeros((len(found), x.size), np.int64)
        places[:, : found.shape[1]] = found
        return places, np.array(found.shape[1])


@register
class NonMaxPlaces(Op):
    """The boxes that `NonMaxSuppression` takes, i64 [all boxes of all classes, 3], and their number, i64 []."""

    center: bool = False

    def infer(
        self,
        boxes: TensorType,
        scores: TensorType,
        limit: TensorType | None = None,
        iou_threshold: TensorType | None = None,
        score_threshold: TensorType | None = None,
    ) -> tuple[TensorType, TensorType]:
        NonMaxSuppression(0, self.center).infer(boxes, scores, limit, iou_threshold, score_threshold)
        return TensorType((numel(scores.shape), 3), I64), TensorType((), I64)

    def work(self, *x: TensorType) -> Work:
        return Work(20 * numel(x[1].shape), tensor_bytes(x[0]) + tensor_bytes(x[1]), 0)

    def reference(self, boxes: Array, scores: Array, *given: Array) -> tuple[Array, Array]:
        found = NonMaxSuppression(0, self.center).reference(boxes, scores, *given)
        places = np.zeros((scores.size, 3), np.int64)
        places[: len(found)] = found
        return places, np.array(len(found))


@register
class UniquePlaces(Op):
    """Which rows of x [N, W] are distinct, in ascending order or (`sorted` False) of first appearance; see `Unique`.

    Outputs, i64: the index of the first of each [N], for each row which it is [N], how many there are of each [N], and
    how many are distinct []. `nans` "equal": a NaN is equal to another; "apart": to none, nor is its row.
    """

    sorted: bool = True
    nans: str = "equal"

    def infer(self, x: TensorType) -> tuple[TensorType, ...]:
        check_kind(self, x, "fiub")
        if x.rank != 2 or self.nans not in ("equal", "apart"):
            raise ShapeError(f"unique_places: expected rows [N, W] and nans equal or apart, got {x}, {self.nans!r}")
        each = TensorType(x.shape[:1], I64)
        return each, each, each, TensorType((), I64)

    def work(self, *x: TensorType) -> Work:
        return Work(20 * numel(x[0].shape), tensor_bytes(x[0]), 3 * tensor_bytes(self.infer_types(x)[0]))

    def reference(self, x: Array) -> tuple[Array, Array, Array, Array]:
        flat = self.nans == "equal" and x.shape[1] == 1
        found = Unique(0, None if flat else 0, self.sorted).reference(x.reshape(-1) if flat else x)
        first, which, counts = (np.zeros(len(x), np.int64) for _ in range(3))
        first[: len(found[1])], which[:], counts[: len(found[3])] = found[1:]
        return first, which, counts, np.array(len(found[1]))


def _non_zero(op: NonZero, g: Graph, x: Value) -> Any:
    return _counted(g, NonZeroPlaces(), (x,), op.count, 1)


def _non_max(op: NonMaxSuppression, g: Graph, *inputs: Value) -> Any:
    return _counted(g, NonMaxPlaces(op.center), inputs, op.count, 0)


def _compress(op: Compress, g: Graph, x: Value, condition: Value) -> Any:
    """The chosen places, and a gather of them."""
    if op.axis is None:
        (x,) = g.add(Reshape((numel(x.shape),)), x)
    places = _counted(g, NonZeroPlaces(), (condition,), op.count, 1)
    (places,) = g.add(Reshape((op.count,)), places)
    return g.add(Gather(op.axis or 0), x, places)[0]


def _unique(op: Unique, g: Graph, x: Value) -> tuple[Value, ...]:
    """The rows that are distinct, and a gather of the first of each."""
    axis = op.axis
    if axis is None:
        axis = 0
        (x,) = g.add(Reshape((numel(x.shape),)), x)
        (rows,) = g.add(Reshape((x.shape[0], 1)), x)
    else:
        axis = axis % x.rank
        order = (axis, *(d for d in range(x.rank) if d != axis))
        (rows,) = g.add(Transpose(order), x) if axis else (x,)
        (rows,) = g.add(Reshape((x.shape[axis], numel(rows.shape[1:]))), rows)
    first, which, counts, found = g.add(UniquePlaces(op.sorted, "equal" if op.axis is None else "apart"), rows)
    g.add(Extent(op.count, first.shape[0]), found)
    first, counts = _cut(g, first, op.count), _cut(g, counts, op.count)
    return g.add(Gather(axis), x, first)[0], first, which, counts


def _arange(op: Arange, g: Graph, start: Value, limit: Value, delta: Value) -> Any:
    """How many steps there are, which becomes a size, and start + i * delta for each."""
    start, limit, delta = (g.add(Reshape(()), v)[0] for v in (start, limit, delta))
    dtype = start.dtype
    steps, wrong, shown = (_whole_steps if dtype.is_integer else _real_steps)(g, start, limit, delta)
    (number,) = g.add(Where(), wrong, g.constant(-1, dtype=I64), steps)
    g.add(Extent(op.count, wanted="a range has a count for numbers and a delta that isn't 0"), number, shown)
    wide = DTYPES["f32"] if dtype.is_float and dtype.bits < 32 else dtype
    (places,) = g.add(Cast(wide), g.add(Iota(op.count))[0])
    first, by = (g.add(Cast(wide), v)[0] for v in (start, delta))
    return g.add(Cast(dtype), first + places * by)[0]


def _whole_steps(g: Graph, start: Value, limit: Value, delta: Value) -> tuple[Value, Value, Value]:
    """How many steps of integers, i64; whether there is no such number, and what the error shows.

    Distances fit u64 where they don't fit i64.
    """
    u64 = DTYPES["u64"]
    wide = u64 if start.dtype is u64 else I64
    start, limit, step = (g.add(Cast(wide), v)[0] for v in (start, limit, delta))
    zero, one, most = (g.constant(n, dtype=d) for n, d in ((0, wide), (1, u64), (MOST, u64)))
    (down,) = g.add(Less(), step, zero)
    low, high = (g.add(Where(), down, *pair)[0] for pair in ((limit, start), (start, limit)))
    (some,) = g.add(Less(), low, high)
    (wrong,) = g.add(Equal(), step, zero)
    (length,) = g.add(Where(), down, zero - step, step)
    (length,) = g.add(Maximum(), g.add(Cast(u64), length)[0], one)
    (reach,) = g.add(Cast(u64), high - low)
    (count,) = g.add(Minimum(), (reach - one) / length + one, most)
    return g.add(Where(), some, g.add(Cast(I64), count)[0], g.constant(0, dtype=I64))[0], wrong, delta


def _real_steps(g: Graph, start: Value, limit: Value, delta: Value) -> tuple[Value, Value, Value]:
    """The same for floats, in f64: a step is wrong where it is 0, and any of them where it isn't finite."""
    f64 = DTYPES["f64"]
    numbers = [g.add(Cast(f64), v)[0] for v in (start, limit, delta)]
    zero, most = (g.constant(n, dtype=f64) for n in (0.0, float(MOST)))
    (steps,) = g.add(Div(), numbers[1] - numbers[0], numbers[2])
    wrong, shown = g.constant(np.False_), numbers[2]
    for number in (steps, *numbers):
        (finite,) = g.add(Less(), g.add(Abs(), number)[0], g.constant(np.inf, dtype=f64))  # so that of a NaN is wrong
        (shown,) = g.add(Where(), finite, shown, number)
        (wrong,) = g.add(Or(), wrong, g.add(Not(), finite)[0])
    (steps,) = g.add(Where(), wrong, zero, steps)
    (steps,) = g.add(Minimum(), g.add(Maximum(), g.add(Ceil(), steps)[0], zero)[0], most)
    return g.add(Cast(I64), steps)[0], wrong, shown


Arange.decompose = _arange
NonZero.decompose = _non_zero
Compress.decompose = _compress
NonMaxSuppression.decompose = _non_max
Unique.decompose = _unique
