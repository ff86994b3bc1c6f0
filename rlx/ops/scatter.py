"""Ops that write elements to positions given by data; a position outside its axis stops the run.

They have no scalar form: an element of the result depends on all positions.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from rlx.errors import OptionError, ShapeError
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import max_size, min_size, numel, unify
from rlx.ops.base import Op, Work, axis_of, check_kind, check_same_dtype, register, tensor_bytes, widened
from rlx.ops.index import check_indices, wrapped_indices

__all__ = ["ScatterElements", "ScatterNd"]

REDUCTIONS: dict[str, Any] = {
    "none": None,
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}


class _Scatter(Op):
    """Base: `reduction` says what becomes of an element and its updates, in row-major order of the updates."""

    strings: ClassVar[str] = "moved"
    overwrites = 0
    places = 1
    reduction: str

    def _check(self, x: TensorType, indices: TensorType, updates: TensorType) -> None:
        if self.reduction not in REDUCTIONS:
            raise OptionError(
                f"{self.op_name}: reduction {self.reduction!r} is not one of {', '.join(map(repr, REDUCTIONS))}"
            )
        check_indices(indices, self.op_name)
        check_same_dtype(self, x, updates)
        if self.reduction != "none":
            check_kind(self, x, "fiu")

    def work(self, *x: TensorType) -> Work:
        updates, indices = tensor_bytes(x[2]), tensor_bytes(x[1])
        flops = 0 if self.reduction == "none" else numel(x[2].shape)
        return Work(flops, tensor_bytes(x[0]) + updates + indices, tensor_bytes(x[0]) + updates)

    def _scattered(self, x: Array, at: tuple[Any, ...], updates: Array) -> Array:
        out = widened(x).copy()
        combine = REDUCTIONS[self.reduction]
        with np.errstate(over="ignore"):
            if combine is None:
                out[at] = updates
            else:
                combine.at(out, at, updates.astype(out.dtype))
        return out.astype(x.dtype)


@register
class ScatterElements(_Scatter):
    """x with updates[i] put at i with i[axis] replaced by indices[i]. (ONNX ScatterElements-18, Scatter)

    `reduction` "add", "mul", "max" or "min" combines with what is there; with "none" the last update of a position
    wins. Updates have the shape of indices, which away from `axis` may be smaller than x, not larger.
    """

    axis: int = 0
    reduction: str = "none"

    def infer(self, x: TensorType, indices: TensorType, updates: TensorType) -> TensorType:
        self._check(x, indices, updates)
        axis = axis_of(self.axis, x.rank, self.op_name)
        if not x.rank == indices.rank == updates.rank:
            raise ShapeError(
                f"scatter_elements: the ranks of {x}, indices {indices} and updates {updates} must be equal"
            )
        for d, (size, count, given) in enumerate(zip(x.shape, indices.shape, updates.shape, strict=True)):
            unify(count, given, f"scatter_elements: axis {d} of the indices {indices} and updates {updates}")
            if d != axis:
                unify(max_size(size, count), size, f"scatter_elements: axis {d} of the indices {indices} exceeds {x}")
        return TensorType(x.shape, x.dtype)

    def reference(self, x: Array, indices: Array, updates: Array) -> Array:
        axis = self.axis % x.ndim
        at: list[Any] = list(np.indices(indices.shape, sparse=True))
        at[axis] = wrapped_indices(indices, x.shape[axis], self.op_name)
        return self._scattered(x, tuple(at), updates)


@register
class ScatterNd(_Scatter):
    """x with slices replaced: updates[i.., ..] goes to x[indices[i.., :], ..]. (ONNX ScatterND-18)

    The last axis of indices [i.., q] holds tuples of q positions; updates are [i.., *x.shape[q:]]. For `reduction` see
    `ScatterElements`.
    """

    reduction: str = "none"

    def infer(self, x: TensorType, indices: TensorType, updates: TensorType) -> TensorType:
        self._check(x, indices, updates)
        depth = indices.shape[-1] if indices.rank else 0
        if not isinstance(depth, int) or not 1 <= depth <= x.rank:
            raise ShapeError(
                f"scatter_nd: the last axis of the indices {indices} must have a known size from 1 to {x.rank}"
            )
        expected = (*indices.shape[:-1], *x.shape[depth:])
        if updates.rank != len(expected):
            raise ShapeError(
                f"scatter_nd: expected updates of rank {len(expected)} for {x} and {indices}, got {updates}"
            )
        for d, (want, got) in enumerate(zip(expected, updates.shape, strict=True)):
            unify(want, got, f"scatter_nd: axis {d} of the updates {updates} for {x} and the indices {indices}")
        for d in range(depth):
            count = min_size(numel(indices.shape[:-1]), 1)
            unify(max_size(x.shape[d], count), x.shape[d], f"scatter_nd: axis {d} of {x} has no elements to replace")
        return TensorType(x.shape, x.dtype)

    def reference(self, x: Array, indices: Array, updates: Array) -> Array:
        at = tuple(wrapped_indices(indices[..., d], x.shape[d], self.op_name) for d in range(indices.shape[-1]))
        return self._scattered(x, at, updates)
