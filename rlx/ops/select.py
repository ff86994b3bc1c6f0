"""Ops that sort, and ops whose data decide how many elements they give.

A size that a node produces is its attribute `count`: a `Dim` of the caller, whose upper bound limits the result (see
`produced`); a run that gives more stops with `ExecutionError`. All run as host calls on devices without a kernel for
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from rlx.errors import DTypeError, ExecutionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import Dim, Size, max_size, numel, symbols, unify, upper
from rlx.ops.base import Op, Work, axis_of, check_kind, check_same_dtype, register, tensor_bytes, widened
from rlx.ops.mask import check_scalar

__all__ = ["Arange", "Compress", "NonMaxSuppression", "NonZero", "Produced", "TopK", "Unique", "produced"]

I64 = DTYPES["i64"]


def produced(name: str, *sizes: Size) -> Dim:
    """A dim for a size that a node produces: from 0 to the largest value of the product of `sizes`."""
    return Dim(name, 0, upper(numel(sizes)))


class Produced(Op):
    """Base of the ops whose data decide a size; `count` names it in the types."""

    count: Size

    def at(self, extents: Mapping[str, int]) -> Op:
        """The op with every size an int; `count`, not known yet, is left out of account."""
        unknown = {s.name: 0 for s in symbols(self.count)} if isinstance(self.count, Dim) else {}
        return super().at(unknown | dict(extents))

    def most(self, *x: TensorType) -> Size | None:
        """The largest that `count` can be on inputs of these types; None where only the data tell."""
        return None

    def work(self, *x: TensorType) -> Work:
        out = self.infer_types(x)
        read, written = (sum((tensor_bytes(t) for t in types), start=0) for types in (x, out))
        return Work(sum((numel(t.shape) for t in x), start=0), read, written)


@register
class TopK(Op):
    """The k largest (or smallest) elements along `axis` and their i64 indices, best first. (ONNX TopK-24)

    Of equal elements the one with the lower index comes first; NaN counts as the largest.
    """

    k: Size
    axis: int = -1
    largest: bool = True

    def infer(self, x: TensorType) -> tuple[TensorType, TensorType]:
        check_kind(self, x, "fiu")
        axis = axis_of(self.axis, x.rank, self.op_name)
        unify(max_size(self.k, 0), self.k, f"top_k: k {self.k} is negative")
        unify(max_size(self.k, x.shape[axis]), x.shape[axis], f"top_k: k {self.k} exceeds axis {axis} of {x}")
        shape = (*x.shape[:axis], self.k, *x.shape[axis + 1 :])
        return TensorType(shape, x.dtype), TensorType(shape, I64)

    def work(self, *x: TensorType) -> Work:
        values, places = self.infer_types(x)
        return Work(4 * numel(x[0].shape), tensor_bytes(x[0]), tensor_bytes(values) + tensor_bytes(places))

    def reference(self, x: Array) -> tuple[Array, Array]:
        axis = self.axis % x.ndim
        keys = widened(x)
        if self.largest:  # the last of the stable ascending order of the mirror image
            places = x.shape[axis] - 1 - np.flip(np.argsort(np.flip(keys, axis), axis=axis, kind="stable"), axis)
        else:
            places = np.argsort(keys, axis=axis, kind="stable")
        places = np.take(places, np.arange(self.k), axis=axis)  # type: ignore[arg-type]
        return np.take_along_axis(x, places, axis=axis), places.astype(np.int64)


@register
class NonZero(Produced):
    """The indices of the elements that are not 0, in row-major order: i64 [rank, count]. (ONNX NonZero-13)

    A scalar counts as one axis of one element.
    """

    count: Size

    def infer(self, x: TensorType) -> TensorType:
        return TensorType((max(x.rank, 1), self.count), I64)

    def most(self, *x: TensorType) -> Size | None:
        return numel(x[0].shape)

    def reference(self, x: Array) -> Array:
        return np.stack(np.nonzero(np.atleast_1d(x))).astype(np.int64)


@register
class Compress(Produced):
    """The slices along `axis` (None: the elements in row-major order) where the condition holds. (ONNX Compress-11)

    `condition` is bool of one axis and may be shorter than what it chooses from, not longer.
    """

    strings: ClassVar[str] = "moved"
    count: Size
    axis: int | None = None

    def infer(self, x: TensorType, condition: TensorType) -> TensorType:
        check_kind(self, condition, "b", "condition")
        if condition.rank != 1:
            raise ShapeError(f"compress: expected a condition of one axis, got {condition}")
        axis = None if self.axis is None else axis_of(self.axis, x.rank, self.op_name)
        size = numel(x.shape) if axis is None else x.shape[axis]
        unify(max_size(size, condition.shape[0]), size, f"compress: the condition {condition} is longer than {size}")
        if axis is None:
            return TensorType((self.count,), x.dtype)
        return TensorType((*x.shape[:axis], self.count, *x.shape[axis + 1 :]), x.dtype)

    def most(self, *x: TensorType) -> Size | None:
        return x[1].shape[0]

    def reference(self, x: Array, condition: Array) -> Array:
        return np.take(x, np.flatnonzero(condition), axis=self.axis)


@register
class Unique(Produced):
    """The distinct elements, or slices along `axis`, in ascending order or (`sorted` False) of first appearance.

    Outputs: them [.., count, ..], then i64: the index of the first of each [count], for each element which it is, and
    how many there are of each [count]. Equal NaNs count as one in the former. (ONNX Unique-11, numpy.unique)
    """

    strings: ClassVar[str] = "read"
    count: Size
    axis: int | None = None
    sorted: bool = True

    def infer(self, x: TensorType) -> tuple[TensorType, TensorType, TensorType, TensorType]:
        check_kind(self, x, "fiubs")
        axis = None if self.axis is None else axis_of(self.axis, x.rank, self.op_name)
        shape = (self.count,) if axis is None else (*x.shape[:axis], self.count, *x.shape[axis + 1 :])
        size = numel(x.shape) if axis is None else x.shape[axis]
        each = TensorType((self.count,), I64)
        return TensorType(shape, x.dtype), each, TensorType((size,), I64), each

    def most(self, *x: TensorType) -> Size | None:
        return numel(x[0].shape) if self.axis is None else x[0].shape[self.axis]

    def reference(self, x: Array) -> tuple[Array, Array, Array, Array]:
        found = np.unique(widened(x), True, True, True, axis=self.axis)
        values, first, inverse, counts = found[0], found[1], found[2].reshape(-1), found[3]
        if not self.sorted:
            order = np.argsort(first, kind="stable")
            values = np.take(values, order, axis=0 if self.axis is None else self.axis)
            inverse = np.argsort(order)[inverse] if order.size else inverse
            first, counts = first[order], counts[order]
        return values.astype(x.dtype), *(a.astype(np.int64) for a in (first, inverse, counts))  # type: ignore[return-value]


def range_count(start: float, limit: float, delta: float) -> int:
    """ceil((limit - start) / delta) or 0: exact for integers, in f64 for floats, as NumPy and ONNX Runtime count.

    For numbers that f32 holds that is exact too. `ExecutionError` where one isn't finite, or the delta is 0.
    """
    if isinstance(start, int) and isinstance(limit, int) and isinstance(delta, int) and delta:
        return max(0, -((start - limit) // delta))
    steps = (limit - start) / delta if delta else math.nan
    if not all(map(math.isfinite, (start, limit, delta, steps))):
        raise ExecutionError(
            f"arange: from {start} to {limit} by {delta} has no count: expected numbers, and no 0 as delta"
        )
    return max(0, math.ceil(steps))


@register
class Arange(Produced):
    """[start, start + delta, ...] up to but without `limit`, all three one number of one type. (ONNX Range-11)

    How many that are is `range_count` of them. `Iota` is the op where the count is known. An `ExecutionError` for a
    delta of 0 and for numbers that aren't finite.
    """

    count: Size

    def infer(self, start: TensorType, limit: TensorType, delta: TensorType) -> TensorType:
        check_kind(self, start, "fiu")
        check_same_dtype(self, start, limit, delta)
        for what, t in (("start", start), ("limit", limit), ("delta", delta)):
            check_scalar(self, what, t)
        return TensorType((self.count,), start.dtype)

    def reference(self, start: Array, limit: Array, delta: Array) -> Array:
        a, b, step = (widened(v).reshape(()) for v in (start, limit, delta))
        n = range_count(a.item(), b.item(), step.item())
        return np.asarray(a + np.arange(n).astype(a.dtype) * step).astype(start.dtype)


@register
class NonMaxSuppression(Produced):
    """Boxes with the best scores that overlap no better one much: i64 [count, 3] of (batch, class, box).

    boxes f32 [B, N, 4] are (y1, x1, y2, x2) of opposite corners or, with `center`, (x, y, width, height); scores f32
    [B, C, N]. For each class, in order of score, at most `limit` (one i64, default 0: none) boxes with a score above
    `score_threshold` (default -inf) are taken, without those whose intersection over union with one taken before is
    above `iou_threshold` (default 0). (ONNX NonMaxSuppression-11)
    """

    count: Size
    center: bool = False

    def infer(
        self,
        boxes: TensorType,
        scores: TensorType,
        limit: TensorType | None = None,
        iou_threshold: TensorType | None = None,
        score_threshold: TensorType | None = None,
    ) -> TensorType:
        if boxes.rank != 3 or scores.rank != 3:
            raise ShapeError(
                f"non_max_suppression: expected boxes [B, N, 4] and scores [B, C, N], got {boxes}, {scores}"
            )
        for t in (boxes, scores):
            check_kind(self, t, "f")
        unify(boxes.shape[2], 4, f"non_max_suppression: the last axis of the boxes {boxes}")
        unify(boxes.shape[0], scores.shape[0], f"non_max_suppression: axis 0 of {boxes} and {scores}")
        unify(boxes.shape[1], scores.shape[2], f"non_max_suppression: the number of boxes of {boxes} and {scores}")
        given = {"limit": limit, "iou_threshold": iou_threshold, "score_threshold": score_threshold}
        for what, number in given.items():
            if number is not None:
                check_scalar(self, what, number)
                if number.dtype.is_float == (what == "limit"):
                    raise DTypeError(f"non_max_suppression: {what} has the wrong type: {number}")
        return TensorType((self.count, 3), I64)

    def most(self, *x: TensorType) -> Size | None:
        return numel(x[1].shape)

    def reference(
        self,
        boxes: Array,
        scores: Array,
        limit: Array | None = None,
        iou_threshold: Array | None = None,
        score_threshold: Array | None = None,
    ) -> Array:
        most = 0 if limit is None else int(limit.item())
        overlap = np.float32(0 if iou_threshold is None else iou_threshold.item())
        least = np.float32(-np.inf if score_threshold is None else score_threshold.item())
        if not 0 <= overlap <= 1:
            raise ExecutionError(f"non_max_suppression: iou_threshold must be in 0..1, got {overlap}")
        corners = self._corners(widened(boxes))
        taken: list[tuple[int, int, int]] = []
        for b, c in np.ndindex(scores.shape[:2]):
            row = widened(scores[b, c])
            order = [n for n in np.argsort(-row, kind="stable").tolist() if row[n] > least]
            chosen: list[int] = []
            for n in order:
                if len(chosen) >= most:
                    break
                if not _overlaps(corners[b, n], corners[b, chosen], overlap):
                    chosen.append(n)
            taken += [(b, c, n) for n in chosen]
        return np.array(taken, np.int64).reshape(-1, 3)

    def _corners(self, boxes: Array) -> Array:
        """(low y, low x, high y, high x) of each box."""
        if self.center:
            x, y, w, h = np.moveaxis(boxes, -1, 0)
            return np.stack([y - h / 2, x - w / 2, y + h / 2, x + w / 2], axis=-1)
        return np.concatenate(
            [np.minimum(boxes[..., :2], boxes[..., 2:]), np.maximum(boxes[..., :2], boxes[..., 2:])], -1
        )


def _overlaps(box: Array, others: Array, threshold: np.float32) -> bool:
    """Whether the intersection of the box with one of the others is above that part of their union."""
    if not len(others):
        return False
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    common = np.where((sides > 0).all(axis=1), sides[:, 0] * sides[:, 1], 0)
    areas = _area(others) + _area(box[None])
    return bool(np.any((common > 0) & (common > threshold * (areas - common))))


def _area(boxes: Array) -> Array:
    sides: Sequence[Any] = (boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1])
    return np.asarray(sides[0] * sides[1])
