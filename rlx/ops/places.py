"""The first halves of ops whose data decide a size: what they find, in a tensor of the largest size, and how much.

Their second halves make the number a size (`Extent`) and cut the tensor. What lies beyond the number is not defined.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import Size, numel
from rlx.ops.base import Op, Work, register, tensor_bytes
from rlx.ops.dynamic import Extent
from rlx.ops.index import Gather
from rlx.ops.layout import Reshape, Slice
from rlx.ops.select import Compress, NonMaxSuppression, NonZero

__all__ = ["NonMaxPlaces", "NonZeroPlaces"]

I64 = DTYPES["i64"]


def _counted(g: Graph, op: Op, inputs: tuple[Value, ...], count: Size, axis: int) -> Value:
    """The places that an op finds, cut to their number, which becomes the size `count`."""
    places, found = g.add(op, *inputs)
    g.add(Extent(count, places.shape[axis]), found)
    sizes = [count if d == axis else size for d, size in enumerate(places.shape)]
    return g.add(Slice((0,) * places.rank, tuple(sizes), (1,) * places.rank), places)[0]


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


NonZero.decompose = _non_zero
Compress.decompose = _compress
NonMaxSuppression.decompose = _non_max
