"""Pooling: the maximum or mean of windows, or of whole feature maps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.dtype import DTYPES, DType, dtype_of
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import Size, ceildiv, evaluate, max_size, min_size, numel
from rlx.ops.base import Op, Work, check_kind, register, tensor_bytes, widened
from rlx.ops.conv import check_window, per_axis, window_count

__all__ = ["AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool", "lowest"]


class _Pool(Op):
    """What windows share: where they lie, and which of their taps fall on the input."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[Size, ...]
    dilations: tuple[int, ...]
    ceil_mode: bool

    def axes(self) -> list[tuple[int, int, int, Size, Size]]:
        """(kernel, stride, dilation, begin pad, end pad) of each spatial axis."""
        n = len(self.kernel)
        strides = per_axis(self.strides, n, 1, f"{self.op_name} strides")
        dilations = per_axis(self.dilations, n, 1, f"{self.op_name} dilations")
        pads = per_axis(self.pads, 2 * n, 0, f"{self.op_name} pads")
        return list(zip(self.kernel, strides, dilations, pads[:n], pads[n:], strict=True))

    def _pooled(self, x: TensorType) -> TensorType:
        if x.rank != len(self.kernel) + 2 or not self.kernel:
            raise ShapeError(f"{self.op_name}: kernel {self.kernel} needs x [N, C, spatial..] of rank >= 3, got {x}")
        axes = self.axes()
        check_window(
            self.op_name, kernel=self.kernel, strides=tuple(a[1] for a in axes), dilations=tuple(a[2] for a in axes)
        )
        for kernel, _, dilation, *pads in axes:
            if any(isinstance(pad, int) and not 0 <= pad <= dilation * (kernel - 1) for pad in pads):
                raise ShapeError(
                    f"{self.op_name}: pads {self.pads} must be >= 0 and smaller than the window of {self.kernel}"
                )
        return TensorType(
            (*x.shape[:2], *(_windows(n, *axis, self.ceil_mode) for n, axis in zip(x.shape[2:], axes, strict=True))),
            x.dtype,
        )

    def _taps(self, k: Any, x: Any, space: tuple[Any, ...], taps: tuple[Any, ...]) -> tuple[list[Any], Any]:
        """The indices into x of one tap of a window, and whether they are inside (None: they always are)."""
        at = []
        tests = []
        for i, t, n, axis in zip(space, taps, x.shape[2:], self.axes(), strict=True):
            _, stride, dilation, begin, end = axis
            place = i * stride + t * dilation - begin
            at.append(place)
            if begin != 0:
                tests.append(place >= 0)
            if end != 0 or _overhangs(n, *axis, self.ceil_mode):
                tests.append(place < k.size(n))
        return at, k.all(*tests)

    def _sliding(self, x: Array) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...], Array]]:
        """For each tap: the tap, the box of windows for which it falls on x, and the elements of x there."""
        axes = self.axes()
        counts = self._pooled(TensorType(x.shape, dtype_of(x.dtype))).shape[2:]
        for tap in np.ndindex(self.kernel):
            box = []
            source = []
            for t, count, n, (_, stride, dilation, begin, _) in zip(tap, counts, x.shape[2:], axes, strict=True):
                shift = t * dilation - evaluate(begin, {})
                first = max(0, -(shift // stride))
                last = min(evaluate(count, {}), (n - 1 - shift) // stride + 1)
                last = max(first, last)
                box.append(slice(first, last))
                source.append(
                    slice(first * stride + shift, max(0, (last - 1) * stride + shift + 1), stride)
                    if last > first
                    else slice(0)
                )
            yield tap, (slice(None), slice(None), *box), x[(slice(None), slice(None), *source)]


def _windows(n: Size, kernel: int, stride: int, dilation: int, begin: Size, end: Size, ceil_mode: bool) -> Size:
    """How many windows an axis of n has; in ceil mode also one that starts inside but ends beyond the padding.

    An axis that is shorter than the window, but by less than a stride, has one of its elements: ONNX's shape inference
    and ONNX Runtime round a negative quotient towards zero.
    """
    overhanging = window_count(n, kernel, stride, dilation, begin + end + stride - 1, "pooling")
    if ceil_mode:
        return min_size(overhanging, ceildiv(n + begin, stride))
    inside = (n + begin + end - dilation * (kernel - 1) - 1) // stride + 1
    return max_size(inside, min_size(overhanging, 1))


def _overhangs(n: Size, kernel: int, stride: int, dilation: int, begin: Size, end: Size, ceil_mode: bool) -> bool:
    """Whether there may be a window that ends beyond the padding."""
    inside = (n + begin + end - dilation * (kernel - 1) - 1) // stride + 1
    return _windows(n, kernel, stride, dilation, begin, end, ceil_mode) != inside


def lowest(dtype: DType) -> float | int:
    """The number that every other of a type is at least as large as."""
    return -math.inf if dtype.is_float else int(np.iinfo(dtype.numpy).min)


@register
class MaxPool(_Pool):
    """The maximum of each window of x [N, C, spatial..]; padding never wins. (ONNX MaxPool-22)

    `pads` are begins and then ends. With `with_indices` a second output (i64) has the flat row-major index into x of
    the first maximum. NaN counts as the maximum.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...] = ()
    pads: tuple[Size, ...] = ()
    dilations: tuple[int, ...] = ()
    ceil_mode: bool = False
    with_indices: bool = False

    def infer(self, x: TensorType) -> TensorType | tuple[TensorType, TensorType]:
        check_kind(self, x, "fiu")
        out = self._pooled(x)
        return (out, TensorType(out.shape, DTYPES["i64"])) if self.with_indices else out

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(math.prod(self.kernel), *x)

    def reference(self, x: Array) -> Array | tuple[Array, Array]:
        shape = self._pooled(TensorType(x.shape, dtype_of(x.dtype))).shape
        best = np.full([evaluate(s, {}) for s in shape], lowest(dtype_of(x.dtype)), x.dtype)
        where = np.full(best.shape, np.iinfo(np.int64).max)
        flat = np.arange(x.size).reshape(x.shape)
        for (_, box, values), (_, _, places) in zip(self._sliding(x), self._sliding(flat), strict=True):
            old = best[box]
            unset = where[box] == np.iinfo(np.int64).max
            better = (values > old) | (np.isnan(values) & ~np.isnan(old)) | unset
            best[box] = np.where(better, values, old)
            where[box] = np.where(better, places, where[box])
        return (best, where) if self.with_indices else best

    def lower(self, k: Any, x: Any) -> Any:
        is_float = x.dtype.is_float

        def tap(i: tuple[Any, ...], taps: tuple[Any, ...]) -> tuple[Any, list[Any], Any]:
            at, inside = self._taps(k, x, i[2:], taps)
            value = k.widen(x(*i[:2], *at, where=inside))
            return (value if inside is None else k.select(inside, value, lowest(x.dtype))), at, inside

        def largest(*i: Any) -> Any:
            return k.reduce("max", self.kernel, lambda *taps: tap(i, taps)[0])

        def index(*i: Any) -> Any:
            peak = largest(*i)

            def candidate(*taps: Any) -> Any:
                value, at, inside = tap(i, taps)
                flat = i[0]
                for e, n in zip((i[1], *at), x.shape[1:], strict=True):
                    flat = flat * n + e
                hit = k.equal(value, peak)
                if is_float:
                    hit = hit | k.call("isnan", value, dtype=DTYPES["bool"])
                found = hit if inside is None else hit & inside
                return k.select(found, flat, k.const(np.iinfo(np.int64).max, DTYPES["i64"]))

            return k.reduce("min", self.kernel, candidate)

        return k.map(largest, index) if self.with_indices else k.map(largest)


@register
class AveragePool(_Pool):
    """The mean of each window of x [N, C, spatial..], over its elements inside x only or with the padding too
    (`count_include_pad`; what ceil mode adds beyond the padding never counts). (ONNX AveragePool-22)
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...] = ()
    pads: tuple[Size, ...] = ()
    dilations: tuple[int, ...] = ()
    ceil_mode: bool = False
    count_include_pad: bool = False

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "f")
        return self._pooled(x)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(math.prod(self.kernel) + 1, *x)

    def reference(self, x: Array) -> Array:
        shape = [evaluate(s, {}) for s in self._pooled(TensorType(x.shape, dtype_of(x.dtype))).shape]
        total = np.zeros(shape, widened(x[:0]).dtype)
        for _, box, values in self._sliding(x):
            total[box] += values
        count = np.ones((1,) * x.ndim, total.dtype)
        for d, (n, out, (kernel, stride, dilation, begin, end)) in enumerate(
            zip(x.shape[2:], shape[2:], self.axes(), strict=True)
        ):
            low, high = (-evaluate(begin, {}), n + evaluate(end, {})) if self.count_include_pad else (0, n)
            at = np.arange(out)[:, None] * stride + np.arange(kernel) * dilation - evaluate(begin, {})
            counted = ((at >= low) & (at < high)).sum(axis=1)
            count = count * counted.reshape([-1 if d + 2 == axis else 1 for axis in range(x.ndim)]).astype(total.dtype)
        return (total / count).astype(x.dtype)

    def lower(self, k: Any, x: Any) -> Any:
        def element(*i: Any) -> Any:
            def tap(*taps: Any) -> Any:
                at, inside = self._taps(k, x, i[2:], taps)
                return k.widen(x(*i[:2], *at, where=inside))

            total = k.reduce("add", self.kernel, tap)
            return total / k.cast(self._count(k, x, i[2:]), total.dtype)

        return k.map(element)

    def _count(self, k: Any, x: Any, space: tuple[Any, ...]) -> Any:
        """How many taps of a window count, as an i64 expression."""
        total = k.size(1)
        for i, n, axis in zip(space, x.shape[2:], self.axes(), strict=True):
            kernel, stride, dilation, begin, end = axis
            first, last = k.size(0), k.size(kernel)
            if not self.count_include_pad and begin != 0:
                first = k.max((k.size(begin + dilation - 1) - i * stride) // k.size(dilation), 0)
            if _overhangs(n, *axis, self.ceil_mode) or (not self.count_include_pad and end != 0):
                limit = n + end if self.count_include_pad else n
                last = k.min((k.size(limit + begin + dilation - 1) - i * stride) // k.size(dilation), kernel)
            total = total * (last - first)
        return total


class _GlobalPool(Op):
    """Pooling of every channel of x [N, C, spatial..] to one element; the spatial axes keep size 1."""

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "f")
        if x.rank < 3:
            raise ShapeError(f"{self.op_name}: expected x [N, C, spatial..] of rank >= 3, got {x}")
        return TensorType((*x.shape[:2], *(1,) * (x.rank - 2)), x.dtype)

    def work(self, *x: TensorType) -> Work:
        return Work(numel(x[0].shape), tensor_bytes(x[0]), tensor_bytes(self.infer(x[0])))


@register
class GlobalAveragePool(_GlobalPool):
    """The mean of each channel of x [N, C, spatial..] as [N, C, 1..]. (ONNX GlobalAveragePool-22)"""

    def reference(self, x: Array) -> Array:
        axes = tuple(range(2, x.ndim))
        total = widened(x).sum(axis=axes, keepdims=True)
        return np.asarray(total / total.dtype.type(math.prod(x.shape[2:])), x.dtype)

    def lower(self, k: Any, x: Any) -> Any:
        space = x.shape[2:]

        def element(*i: Any) -> Any:
            total = k.reduce("add", space, lambda *at: k.widen(x(*i[:2], *at)))
            return total / k.cast(k.size(numel(space)), total.dtype)

        return k.map(element)


@register
class GlobalMaxPool(_GlobalPool):
    """The maximum of each channel of x [N, C, spatial..] as [N, C, 1..]. (ONNX GlobalMaxPool-22)"""

    def reference(self, x: Array) -> Array:
        axes = tuple(range(2, x.ndim))
        return np.asarray(x.max(axis=axes, keepdims=True, initial=x.dtype.type(-math.inf)))

    def lower(self, k: Any, x: Any) -> Any:
        return k.map(lambda *i: k.reduce("max", x.shape[2:], lambda *at: k.widen(x(*i[:2], *at))))
