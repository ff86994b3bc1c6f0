"""Reductions over axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import Shape, Size, max_size, numel, unify
from rlx.ops.base import Op, Work, axis_of, check_kind, register, tensor_bytes, widened
from rlx.records import dataclass

I64 = DTYPES["i64"]
Each = Callable[..., Any]  # each(kind, fn): the reduction of fn(element) over the axes


def axes_of(axes: tuple[int, ...] | None, rank: int, op: str) -> tuple[int, ...]:
    """Axes in ascending order, 0 <= axis < rank; None means all. `ShapeError` for one outside or named twice."""
    if axes is None:
        return tuple(range(rank))
    found = sorted(axis_of(axis, rank, op) for axis in axes)
    if len(set(found)) != len(found):
        raise ShapeError(f"{op}: an axis is named twice in {axes} for a tensor of rank {rank}")
    return tuple(found)


def reduced_shape(shape: Shape, axes: tuple[int, ...], keepdims: bool) -> Shape:
    """The shape without `axes`, or with size 1 there."""
    return tuple(1 if d in axes else size for d, size in enumerate(shape) if keepdims or d not in axes)


def full_index(i: tuple[Any, ...], r: tuple[Any, ...], axes: tuple[int, ...], rank: int, keepdims: bool) -> list[Any]:
    """The index into the input for output index `i` and reduction index `r`."""
    outer = iter([index for d, index in enumerate(i) if d not in axes] if keepdims else i)
    inner = iter(r)
    return [next(inner) if d in axes else next(outer) for d in range(rank)]


@dataclass(frozen=True)
class Reduction(Op):
    """Base of reductions: `array` reduces a NumPy array, `scalar` builds the element from reductions over the axes.

    `axes` None means all axes, () none. 16-bit floats accumulate in f32.
    """

    kinds: ClassVar[str] = "fiu"
    flops: ClassVar[int] = 1
    array: ClassVar[Callable[..., Any]]  # (x, axis=, keepdims=) -> array
    scalar: ClassVar[Callable[..., Any]]  # (k, each, count) -> expression

    axes: tuple[int, ...] | None = None
    keepdims: bool = True

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, self.kinds)
        return TensorType(reduced_shape(x.shape, axes_of(self.axes, x.rank, self.op_name), self.keepdims), x.dtype)

    def work(self, *x: TensorType) -> Work:
        (out,) = self.infer_types(x)
        return Work(self.flops * numel(x[0].shape), tensor_bytes(x[0]), tensor_bytes(out))

    def reference(self, x: Array) -> Array:
        axes = axes_of(self.axes, x.ndim, self.op_name)
        return np.asarray(self.array(widened(x), axis=axes, keepdims=self.keepdims)).astype(x.dtype)

    def lower(self, k: Any, x: Any) -> Any:
        axes = axes_of(self.axes, x.rank, self.op_name)
        extents = [x.shape[d] for d in axes]

        def element(*i: Any) -> Any:
            def at(*r: Any) -> Any:
                return k.widen(x(*full_index(i, r, axes, x.rank, self.keepdims)))

            def each(kind: str, fn: Callable[[Any], Any] = lambda v: v) -> Any:
                return k.reduce(kind, extents, lambda *r: fn(at(*r))) if axes else fn(at())

            return self.scalar(k, each, numel(extents))

        return k.map(element)


def _limits(dtype: Any) -> tuple[Any, Any]:
    """The neutral elements of max and min."""
    return (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)


@register
class ReduceSum(Reduction):
    """The sum; integers wrap; 0 over no elements. (ONNX ReduceSum)"""

    def array(self, x: Array, **over: Any) -> Any:
        return np.sum(x, dtype=x.dtype, **over)

    def scalar(self, k: Any, each: Each, count: Size) -> Any:
        return each("add")


@register
class ReduceProd(Reduction):
    """The product; integers wrap; 1 over no elements. (ONNX ReduceProd)"""

    def array(self, x: Array, **over: Any) -> Any:
        return np.prod(x, dtype=x.dtype, **over)

    def scalar(self, k: Any, each: Each, count: Size) -> Any:
        return each("mul")


@register
class ReduceMax(Reduction):
    """The largest element, NaN if there is one; over no elements the least value of the type. (ONNX ReduceMax)"""

    def array(self, x: Array, **over: Any) -> Any:
        return np.max(x, initial=_limits(x.dtype)[0], **over)

    def scalar(self, k: Any, each: Each, count: Size) -> Any:
        return each("max")


@register
class ReduceMin(Reduction):
    """The smallest element, NaN if there is one; over no elements the greatest value of the type. (ONNX ReduceMin)"""

    def array(self, x: Array, **over: Any) -> Any:
        return np.min(x, initial=_limits(x.dtype)[1], **over)

    def scalar(self, k: Any, each: Each, count: Size) -> Any:
        return each("min")


@register
class ReduceMean(Reduction):
    """The mean; of integers their 64-bit sum divided with truncation. Over no elements NaN or 0. (ONNX ReduceMean)"""

    def array(self, x: Array, **over: Any) -> Any:
        if x.dtype.kind == "f":
            with np.errstate(invalid="ignore"):  # 0 / 0 is the NaN that is meant
                return np.sum(x, dtype=x.dtype, **over) / np.asarray(_count(x, **over), x.dtype)
        total = np.sum(x, dtype=np.uint64 if x.dtype.kind == "u" else np.int64, **over)
        count = np.asarray(max(_count(x, **over), 1), total.dtype)
        return (total - np.fmod(total, count)) // count

    def scalar(self, k: Any, each: Each, count: Size) -> Any:
        x = each("add")
        if x.dtype.is_float:
            return x / k.cast(k.size(count), x.dtype)
        wide = DTYPES["u64" if x.dtype.kind == "u" else "i64"]
        total = each("add", lambda v: k.cast(v, wide))
        return k.call("idiv", total, k.cast(k.size(max_size(count, 1)), wide))


def _count(x: Array, axis: tuple[int, ...], keepdims: bool) -> int:
    return int(np.prod([x.shape[d] for d in axis], dtype=np.int64))


@register
class ReduceL1(Reduction):
    """The sum of magnitudes. (ONNX ReduceL1)"""

    flops = 2

    def array(self, x: Array, **over: Any) -> Any:
        return np.sum(np.abs(x), dtype=x.dtype, **over)

    def scalar(self, k: Any, each: Each, count: Size) -> Any:
        return each("add", lambda v: v if v.dtype.kind == "u" else k.call("abs", v))


@register
class ReduceSumSquare(Reduction):
    """The sum of squares; integers wrap. (ONNX ReduceSumSquare)"""

    flops = 2

    def array(self, x: Array, **over: Any) -> Any:
        return np.sum(x * x, dtype=x.dtype, **over)

    def scalar(self, k: Any, each: Each, count: Size) -> Any:
        return each("add", lambda v: v * v)


@register
class ReduceL2(Reduction):
    """The square root of the sum of squares, of floats. (ONNX ReduceL2)"""

    kinds, flops = "f", 2

    def array(self, x: Array, **over: Any) -> Any:
        return np.sqrt(np.sum(x * x, dtype=x.dtype, **over))

    def scalar(self, k: Any, each: Each, count: Size) -> Any:
        return k.call("sqrt", each("add", lambda v: v * v))


@register
class ReduceLogSum(Reduction):
    """The logarithm of the sum, of floats. (ONNX ReduceLogSum)"""

    kinds = "f"

    def array(self, x: Array, **over: Any) -> Any:
        return np.log(np.sum(x, dtype=x.dtype, **over))

    def scalar(self, k: Any, each: Each, count: Size) -> Any:
        return k.call("log", each("add"))


@register
class ReduceLogSumExp(Reduction):
    """The logarithm of the sum of exponentials, of floats, without overflow. (ONNX ReduceLogSumExp)"""

    kinds, flops = "f", 13

    def array(self, x: Array, axis: tuple[int, ...], keepdims: bool) -> Any:
        peak = np.max(x, axis=axis, keepdims=True, initial=-np.inf)
        peak = np.where(np.isinf(peak), 0, peak).astype(x.dtype)
        total = np.log(np.sum(np.exp(x - peak), axis=axis, keepdims=True)) + peak
        return total if keepdims else np.squeeze(total, axis)

    def scalar(self, k: Any, each: Each, count: Size) -> Any:
        peak = each("max")
        peak = k.select(k.call("isinf", peak, dtype=DTYPES["bool"]), 0, peak)
        return k.call("log", each("add", lambda v: k.call("exp", v - peak))) + peak


@dataclass(frozen=True)
class Arg(Op):
    """Base of the two searches for an extremum; see `ArgMax`."""

    kind: ClassVar[str]

    axis: int = 0
    keepdims: bool = True
    last: bool = False

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "fiu")
        axis = axis_of(self.axis, x.rank, self.op_name)
        size = x.shape[axis]
        unify(max_size(size, 1), size, f"{self.op_name}: axis {self.axis} of {x} has no elements to choose from")
        return TensorType(reduced_shape(x.shape, (axis,), self.keepdims), I64)

    def work(self, *x: TensorType) -> Work:
        (out,) = self.infer_types(x)
        return Work(numel(x[0].shape), tensor_bytes(x[0]), tensor_bytes(out))

    def reference(self, x: Array) -> Array:
        search: Any = np.argmax if self.kind == "argmax" else np.argmin
        x, axis = widened(x), self.axis % x.ndim
        if not self.last:
            return np.asarray(search(x, axis=axis, keepdims=self.keepdims), np.int64)
        flipped = search(np.flip(x, axis), axis=axis, keepdims=self.keepdims)
        return np.asarray(x.shape[axis] - 1 - flipped, np.int64)

    def lower(self, k: Any, x: Any) -> Any:
        axis = self.axis % x.rank

        def element(*i: Any) -> Any:
            def at(r: Any) -> Any:
                return k.widen(x(*full_index(i, (r,), (axis,), x.rank, self.keepdims)))

            return k.reduce(self.kind, (x.shape[axis],), at, last=self.last)

        return k.map(element)


@register
class ArgMax(Arg):
    """The i64 index along `axis` of the largest element (NaN, if any): the first, or the `last`. (ONNX ArgMax)"""

    kind = "argmax"


@register
class ArgMin(Arg):
    """The i64 index along `axis` of the smallest element (NaN, if any): the first, or the `last`. (ONNX ArgMin)"""

    kind = "argmin"
