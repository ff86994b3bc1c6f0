"""Ops that read elements at positions given by data; a position outside its axis stops the run."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from rlx.errors import DTypeError, ExecutionError, ShapeError
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import Size, max_size, min_size, numel, unify
from rlx.ops.base import Op, Work, axis_of, register, tensor_bytes

__all__ = ["Gather", "GatherElements", "GatherND", "check_indices", "wrapped_indices"]


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
