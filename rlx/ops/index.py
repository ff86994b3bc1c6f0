"""Ops that read elements at positions given by data; a position outside its axis stops the run."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from rlx.errors import DTypeError, ExecutionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import Size, max_size, min_size, numel, unify, upper
from rlx.ops.base import Op, Work, axis_of, check_kind, check_same_dtype, register, tensor_bytes, widened

__all__ = ["Gather", "GatherElements", "GatherND", "SearchSorted", "check_indices", "wrapped_indices"]

LARGEST_ROW = 48  # bits of the length of a row that no memory has
MOST_HALVES = 20  # steps that are written out


class _Gather(Op):
    """Base: reads one element of x for each element of the result."""

    strings: ClassVar[str] = "moved"
    places = 1

    def work(self, *x: TensorType) -> Work:
        data, indices = x
        (out,) = self.infer_types(x)
        return Work(0, tensor_bytes(TensorType(out.shape, data.dtype)) + tensor_bytes(indices), tensor_bytes(out))


def check_indices(indices: TensorType, op: str) -> None:
    """`DTypeError` unless they are integers of 32 or 64 bits."""
    if not indices.dtype.is_integer or indices.dtype.bits < 32:
        raise DTypeError(f"{op}: indices must be i32, i64, u32 or u64, got {indices}; cast them first")


def check_not_empty(size: Size, count: Size, why: str) -> None:
    """Requires that an axis has elements where `count` of them are read."""
    unify(max_size(size, min_size(count, 1)), size, why)


def wrapped_indices(indices: Array, size: int, op: str) -> Array:
    """Indices with negative ones counted from the end; `ExecutionError` for one outside the axis."""
    i = indices.astype(np.int64)
    outside = (i < -size) | (i >= size)
    if outside.any():
        raise ExecutionError(f"{op}: index {i[outside][0]} is outside an axis of {size}")
    return np.where(i < 0, i + size, i)


@register
class Gather(_Gather):
    """Slices of x along `axis`, chosen by indices [...]: out[.., i.., ..] = x[.., indices[i..], ..]. (ONNX Gather-13)

    Indices are i32 or i64 and may be negative; one outside the axis stops the run with `ExecutionError`.
    """

    axis: int = 0

    def infer(self, x: TensorType, indices: TensorType) -> TensorType:
        check_indices(indices, "gather")
        axis = axis_of(self.axis, x.rank, "gather")
        check_not_empty(x.shape[axis], numel(indices.shape), f"gather: axis {axis} of {x} has no elements to choose")
        return TensorType((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)

    def reference(self, x: Array, indices: Array) -> Array:
        return np.take(x, wrapped_indices(indices, x.shape[self.axis], "gather"), axis=self.axis)

    def lower(self, k: Any, x: Any, indices: Any) -> Any:
        axis = self.axis % x.rank
        end = axis + indices.rank

        def element(*i: Any) -> Any:
            return x(*i[:axis], k.checked_index(indices(*i[axis:end]), x.shape[axis]), *i[end:])

        return k.map(element)


@register
class GatherND(_Gather):
    """Slices of x at the index tuples in the last axis of indices [batch.., .., q]. (ONNX GatherND-13)

    The first `batch_dims` axes are common to both; a tuple of q indices chooses in the next q axes of x.
    """

    op_name = "gather_nd"
    batch_dims: int = 0

    def infer(self, x: TensorType, indices: TensorType) -> TensorType:
        check_indices(indices, "gather_nd")
        batch = self.batch_dims
        if not 0 <= batch < min(x.rank, indices.rank):
            raise ShapeError(f"gather_nd: batch_dims {batch} must be >= 0 and below the ranks of {x} and {indices}")
        depth = indices.shape[-1]
        if not isinstance(depth, int) or not 1 <= depth <= x.rank - batch:
            raise ShapeError(
                f"gather_nd: the last axis of the indices {indices} must have a known size from 1 to {x.rank - batch}"
            )
        common = tuple(
            unify(x.shape[d], indices.shape[d], f"gather_nd: batch axis {d} of {x} and {indices}") for d in range(batch)
        )
        count = numel(indices.shape[:-1])
        for d in range(batch, batch + depth):
            check_not_empty(x.shape[d], count, f"gather_nd: axis {d} of {x} has no elements to choose")
        return TensorType((*common, *indices.shape[batch:-1], *x.shape[batch + depth :]), x.dtype)

    def reference(self, x: Array, indices: Array) -> Array:
        batch, depth = self.batch_dims, indices.shape[-1]
        middle = indices.ndim - 1 - batch
        at = [np.arange(n).reshape([-1] + [1] * (batch - d - 1 + middle)) for d, n in enumerate(x.shape[:batch])]
        at += [wrapped_indices(indices[..., j], x.shape[batch + j], "gather_nd") for j in range(depth)]
        return np.asarray(x[tuple(at)])

    def lower(self, k: Any, x: Any, indices: Any) -> Any:
        batch, depth = self.batch_dims, indices.shape[-1]
        end = indices.rank - 1

        def element(*i: Any) -> Any:
            chosen = [k.checked_index(indices(*i[:end], j), x.shape[batch + j]) for j in range(depth)]
            return x(*i[:batch], *chosen, *i[end:])

        return k.map(element)


@register
class GatherElements(_Gather):
    """out[i] = x[i with i[axis] replaced by indices[i]]; the result has the shape of indices. (ONNX GatherElements-13)

    Away from `axis` the indices may be smaller than x, not larger.
    """

    axis: int = 0

    def infer(self, x: TensorType, indices: TensorType) -> TensorType:
        check_indices(indices, "gather_elements")
        axis = axis_of(self.axis, x.rank, "gather_elements")
        if indices.rank != x.rank:
            raise ShapeError(f"gather_elements: the ranks of {x} and of the indices {indices} must be equal")
        for d, (size, count) in enumerate(zip(x.shape, indices.shape, strict=True)):
            if d != axis:
                unify(max_size(size, count), size, f"gather_elements: axis {d} of the indices {indices} exceeds {x}")
        count = numel(indices.shape)
        check_not_empty(x.shape[axis], count, f"gather_elements: axis {axis} of {x} has no elements to choose")
        return TensorType(indices.shape, x.dtype)

    def reference(self, x: Array, indices: Array) -> Array:
        axis = self.axis % x.ndim
        within = tuple(slice(None) if d == axis else slice(n) for d, n in enumerate(indices.shape))
        return np.take_along_axis(x[within], wrapped_indices(indices, x.shape[axis], "gather_elements"), axis=axis)

    def lower(self, k: Any, x: Any, indices: Any) -> Any:
        axis = self.axis % x.rank

        def element(*i: Any) -> Any:
            return x(*i[:axis], k.checked_index(indices(*i), x.shape[axis]), *i[axis + 1 :])

        return k.map(element)


@register
class SearchSorted(Op):
    """How many elements of each row of a [B, C], which ascend, are no larger than each of v [B, S]: i64 [B, S].

    (numpy.searchsorted, side "right") By halving, or where rows may be very long by counting: of rows that don't ascend
    it is some number.
    """

    def infer(self, a: TensorType, v: TensorType) -> TensorType:
        check_kind(self, a, "fiu")
        check_same_dtype(self, a, v)
        if a.rank != 2 or v.rank != 2:
            raise ShapeError(f"search_sorted: expected rows [B, C] and values [B, S], got {a} and {v}")
        unify(a.shape[0], v.shape[0], f"search_sorted of {a} and {v}: the rows")
        return TensorType(v.shape, DTYPES["i64"])

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(10 * len(_halves(x[0].shape[1])), *x)

    def reference(self, a: Array, v: Array) -> Array:
        found, rows = np.zeros(v.shape, np.int64), np.arange(len(a))[:, None]
        for step in _halves(a.shape[1]):
            to = found + step
            within = to <= a.shape[1]
            passed = within & (widened(a)[rows, np.where(within, to, 1) - 1] <= widened(v))
            found = np.where(passed, to, found)
        return found

    def lower(self, k: Any, a: Any, v: Any) -> Any:
        count, halves = k.size(a.shape[1]), _halves(a.shape[1])

        def counted(b: Any, s: Any) -> Any:
            value = k.widen(v(b, s))
            return k.reduce("add", (a.shape[1],), lambda c: k.cast(k.widen(a(b, c)) <= value, "i64"))

        def element(b: Any, s: Any) -> Any:
            value, found = k.widen(v(b, s)), k.size(0)
            for step in halves:
                to = found + step
                within = to <= count
                passed = within & (k.widen(a(b, to - 1, where=within)) <= value)
                found = k.select(passed, to, found)
            return found

        return k.map(element if len(halves) <= MOST_HALVES else counted)


def _halves(count: Size) -> list[int]:
    """The powers of two up to a size, the largest first."""
    most = upper(count)
    bits = LARGEST_ROW if most is None else most.bit_length()
    return [1 << bit for bit in reversed(range(bits))]
