"""Ops that choose by position: triangles, diagonals, one-hot rows, reversed sequences."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import DTypeError, ExecutionError, OptionError, ShapeError
from rlx.ir.casting import cast
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import Size, evaluate, max_size, unify
from rlx.ops.base import Op, Work, axis_of, check_kind, register, widened

__all__ = ["EyeLike", "Hardmax", "OneHot", "ReverseSequence", "Shrink", "Trilu"]


def check_scalar(op: Op, what: str, t: TensorType) -> None:
    """Raises `ShapeError` unless the tensor has one element for certain."""
    if any(size != 1 for size in t.shape):
        raise ShapeError(f"{op.op_name}: expected one element as {what}, got {t}")


@register
class Trilu(Op):
    """The upper (or lower) triangle of the last two axes, zeros elsewhere, from the k-th diagonal on. (ONNX Trilu-14)

    `k` is one i64 (default 0): above the main diagonal where positive.
    """

    upper: bool = True

    def infer(self, x: TensorType, k: TensorType | None = None) -> TensorType:
        if x.rank < 2:
            raise ShapeError(f"trilu: expected a tensor of rank 2 or more, got {x}")
        if k is not None:
            check_scalar(self, "k", k)
            if k.dtype is not DTYPES["i64"]:
                raise DTypeError(f"trilu: expected k as i64, got {k}; cast it first")
        return TensorType(x.shape, x.dtype)

    def reference(self, x: Array, k: Array | None = None) -> Array:
        from_diagonal = np.arange(x.shape[-1]) - np.arange(x.shape[-2])[:, None]
        shift = 0 if k is None else k.item()
        return np.where(from_diagonal >= shift if self.upper else from_diagonal <= shift, x, np.zeros((), x.dtype))

    def lower(self, k: Any, x: Any, shift: Any = None) -> Any:
        def element(*i: Any) -> Any:
            distance = i[-1] - i[-2]
            limit = k.size(0) if shift is None else shift(*[0] * shift.rank)
            return x(*i, where=distance >= limit if self.upper else distance <= limit)

        return k.map(element)


@register
class EyeLike(Op):
    """Ones on the k-th diagonal and zeros elsewhere, with the shape of the matrix x. (ONNX EyeLike-22)

    `dtype` None: that of x.
    """

    k: int = 0
    dtype: DType | None = None

    def infer(self, x: TensorType) -> TensorType:
        if x.rank != 2:
            raise ShapeError(f"eye_like: expected a matrix, got {x}")
        out = TensorType(x.shape, self.dtype or x.dtype)
        check_kind(self, out, "fiub", "result")
        return out

    def reference(self, x: Array) -> Array:
        dtype = x.dtype if self.dtype is None else self.dtype.numpy
        return np.eye(x.shape[0], x.shape[1], self.k).astype(dtype)

    def lower(self, k: Any, x: Any) -> Any:
        return k.map(lambda i, j: k.equal(j - i, self.k))


@register
class OneHot(Op):
    """For each index a row of `depth` elements along `axis`: values[1] at the index, values[0] elsewhere. (ONNX OneHot)

    Indices are numbers (truncated to integers), negative ones count from the end; one outside -depth..depth-1 gives
    values[0] everywhere.
    """

    depth: Size
    axis: int = -1

    def infer(self, indices: TensorType, values: TensorType) -> TensorType:
        check_kind(self, indices, "fiu", "indices")
        axis = axis_of(self.axis, indices.rank + 1, "one_hot")
        if values.rank != 1:
            raise ShapeError(f"one_hot: expected values [off, on], got {values}")
        unify(values.shape[0], 2, f"one_hot: the values {values} are [off, on]")
        unify(max_size(self.depth, 0), self.depth, f"one_hot: the depth {self.depth} is negative")
        return TensorType((*indices.shape[:axis], self.depth, *indices.shape[axis:]), values.dtype)

    def reference(self, indices: Array, values: Array) -> Array:
        depth, axis = evaluate(self.depth, {}), self.axis % (indices.ndim + 1)
        at = np.expand_dims(cast(indices, DTYPES["i64"]), axis)
        places = np.arange(depth).reshape([-1 if d == axis else 1 for d in range(at.ndim)])
        return np.asarray(np.where(np.where(at < 0, at + depth, at) == places, values[1], values[0]))

    def lower(self, k: Any, indices: Any, values: Any) -> Any:
        axis = self.axis % (indices.rank + 1)

        def element(*i: Any) -> Any:
            at = k.cast(indices(*i[:axis], *i[axis + 1 :]), "i64")
            at = k.select(at < 0, at + k.size(self.depth), at)
            return k.select(k.equal(at, i[axis]), values(1), values(0))

        return k.map(element)


@register
class Hardmax(Op):
    """1 at the first largest element along `axis`, 0 elsewhere. (ONNX Hardmax-13)"""

    axis: int = -1

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "f")
        axis_of(self.axis, x.rank, self.op_name)
        return TensorType(x.shape, x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(2, *x)

    def reference(self, x: Array) -> Array:
        if not x.size:
            return x
        places = np.arange(x.shape[self.axis]).reshape([-1 if d == self.axis % x.ndim else 1 for d in range(x.ndim)])
        return np.asarray(np.argmax(widened(x), axis=self.axis, keepdims=True) == places).astype(x.dtype)

    def lower(self, k: Any, x: Any) -> Any:
        axis = self.axis % x.rank

        def element(*i: Any) -> Any:
            n = (x.shape[axis],)
            peak = k.reduce("argmax", n, lambda j: k.widen(x(*i[:axis], j, *i[axis + 1 :])))
            return k.equal(peak, i[axis])

        return k.map(element)


@register
class Shrink(Op):
    """x + bias below -lambd, x - bias above lambd, else 0. (ONNX Shrink-9)"""

    lambd: float = 0.5
    bias: float = 0.0

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "fiu")
        if x.dtype.is_integer and not (float(self.lambd).is_integer() and float(self.bias).is_integer()):
            raise OptionError(f"shrink: lambd {self.lambd} and bias {self.bias} must be whole numbers for {x.dtype}")
        return TensorType(x.shape, x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(4, *x)

    def reference(self, x: Array) -> Array:
        wide = widened(x)
        lambd, bias = (np.asarray(v).astype(wide.dtype) for v in (self.lambd, self.bias))
        low = (wide < 0 - lambd) if wide.dtype.kind != "u" else np.zeros(x.shape, bool)
        return np.where(low, wide + bias, np.where(wide > lambd, wide - bias, 0)).astype(x.dtype)

    def lower(self, k: Any, x: Any) -> Any:
        def element(*i: Any) -> Any:
            value = k.widen(x(*i))
            lambd, bias = (k.const(v, value.dtype) for v in (self.lambd, self.bias))
            shrunk = k.select(value > lambd, value - bias, 0)
            return shrunk if value.dtype.kind == "u" else k.select(value < -lambd, value + bias, shrunk)

        return k.map(element)


@register
class ReverseSequence(Op):
    """The first lengths[b] elements along `time_axis` of each batch entry b in reverse, the rest as they are.

    `lengths` is i64 [size of `batch_axis`]; one below 0 or above the axis stops the run. (ONNX ReverseSequence-10)
    """

    batch_axis: int = 1
    time_axis: int = 0

    def infer(self, x: TensorType, lengths: TensorType) -> TensorType:
        batch, time = axis_of(self.batch_axis, x.rank, self.op_name), axis_of(self.time_axis, x.rank, self.op_name)
        if batch == time:
            raise OptionError(f"reverse_sequence: batch_axis and time_axis are both {batch}")
        if lengths.rank != 1 or lengths.dtype not in (DTYPES["i64"], DTYPES["i32"]):
            raise DTypeError(f"reverse_sequence: expected lengths as i64 of one axis, got {lengths}")
        unify(x.shape[batch], lengths.shape[0], f"reverse_sequence: axis {batch} of {x} and the lengths {lengths}")
        return TensorType(x.shape, x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(0, *x)

    def reference(self, x: Array, lengths: Array) -> Array:
        rows = np.moveaxis(x, (self.batch_axis, self.time_axis), (0, 1))
        out = rows.copy()
        for b, n in enumerate(lengths.tolist()):
            if not 0 <= n <= rows.shape[1]:
                raise ExecutionError(f"reverse_sequence: the length {n} is outside an axis of {rows.shape[1]}")
            out[b, :n] = rows[b, :n][::-1]
        return np.ascontiguousarray(np.moveaxis(out, (0, 1), (self.batch_axis, self.time_axis)))

    def lower(self, k: Any, x: Any, lengths: Any) -> Any:
        batch, time = self.batch_axis % x.rank, self.time_axis % x.rank

        def element(*i: Any) -> Any:
            n, t = k.checked_start(lengths(i[batch]), x.shape[time], 0), i[time]
            return x(*i[:time], k.select(t < n, n - 1 - t, t), *i[time + 1 :])

        return k.map(element)
