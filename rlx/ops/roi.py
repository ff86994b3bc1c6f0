"""Pooling of regions of interest."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from rlx.errors import DTypeError, ExecutionError, OptionError, ShapeError
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import max_size, unify
from rlx.ops.base import Op, Work, check_kind, check_same_dtype, register, tensor_bytes, widened

__all__ = ["MaxRoiPool", "RoiAlign", "RoiAlignAdaptive"]


FAR = 2.0**40  # a place beyond every image


def _check_regions(op: Op, x: TensorType, rois: TensorType, columns: int, out: tuple[int, ...]) -> None:
    check_kind(op, x, "f")
    check_same_dtype(op, x, rois)
    if x.rank != 4 or rois.rank != 2:
        raise ShapeError(f"{op.op_name}: expected x [N, C, H, W] and regions [R, {columns}], got {x} and {rois}")
    if len(out) != 2 or any(n < 1 for n in out):
        raise OptionError(f"{op.op_name}: expected a size of two positive numbers, got {out}")
    unify(rois.shape[1], columns, f"{op.op_name}: the last axis of the regions {rois}")
    for d in (2, 3):
        unify(max_size(x.shape[d], 1), x.shape[d], f"{op.op_name}: axis {d} of {x} has no elements")


class _RoiAlign(Op):
    """What the two forms share; see `RoiAlign`."""

    places = 2
    size: tuple[int, int]
    scale: float
    mode: str
    half_pixel: bool

    def infer(self, x: TensorType, rois: TensorType, batch: TensorType) -> TensorType:
        _check_regions(self, x, rois, 4, self.size)
        if batch.rank != 1 or not batch.dtype.is_integer or batch.dtype.bits < 32:
            raise DTypeError(f"{self.op_name}: expected i64 batch indices [R], got {batch}")
        unify(batch.shape[0], rois.shape[0], f"{self.op_name}: the batch indices {batch} and regions {rois}")
        if self.mode not in ("avg", "max"):
            raise OptionError(f"{self.op_name}: mode {self.mode!r} is not avg or max")
        return TensorType((rois.shape[0], x.shape[1], *self.size), x.dtype)

    def _box(self, start: Any, end: Any, count: int, larger: Callable[[Any, float], Any]) -> tuple[Any, Any]:
        """Start and size of the bins of a region along one axis."""
        shift = 0.5 if self.half_pixel else 0.0
        low = start * self.scale - shift
        length = (end * self.scale - shift) - low
        return low, (length if self.half_pixel else larger(length, 1.0)) / count

    def _samples(self, starts: Array, step: Any, n: int) -> tuple[Any, Array]:
        """How many samples each bin has along an axis of n, and the numbers [bins, ..] of those that may be near it.

        Those of adaptive sampling lie more than half an element apart.
        """
        each = np.nan_to_num(np.ceil(step)).clip(0, 2.0**62)
        i, near = np.arange(min(int(each), 2 * (n + 2) + 8)), np.zeros_like(starts)
        if each > len(i):
            near = np.nan_to_num(np.floor((-1 - starts) / (step / each)) - 2).clip(0, each - len(i))
        return each, near + i.astype(starts.dtype)

    def reference(self, x: Array, rois: Array, batch: Array) -> Array:
        wide, boxes = widened(x), widened(rois)
        kind = wide.dtype.type
        if batch.size and not (batch.min() >= 0 and batch.max() < x.shape[0]):
            raise ExecutionError(f"{self.op_name}: a batch index of {batch.tolist()} is outside {x.shape[0]}")
        out = np.zeros((len(rois), x.shape[1], *self.size), wide.dtype)
        for n, (x1, y1, x2, y2) in enumerate(boxes):
            axes: list[Array] = []
            samples = kind(1)
            for a, b, count, size in ((y1, y2, self.size[0], x.shape[2]), (x1, x2, self.size[1], x.shape[3])):
                low, step = self._box(a, b, count, np.maximum)
                starts = np.arange(count).astype(wide.dtype)[:, None] * kind(step) + kind(low)
                each, i = self._samples(starts, kind(step), size)
                axes.append(starts + (i + kind(0.5)) * kind(step) / kind(max(each, 1)))
                samples *= kind(each)
            out[n] = self._pooled(wide[batch[n]], axes[0], axes[1], samples)
        return out.astype(x.dtype)

    def _pooled(self, image: Array, ys: Array, xs: Array, samples: Any) -> Array:
        """[C, out..] from the places [out, ..] along each axis of those of a bin's samples that are near the image."""
        (rows, columns), (h, w) = (ys.shape, xs.shape), image.shape[1:]
        if 0 in (rows[1], columns[1]):  # a region turned inside out has no samples
            return np.zeros((image.shape[0], rows[0], columns[0]), image.dtype)
        y, z = ys.reshape(-1, 1), xs.reshape(1, -1)
        inside = (y >= -1) & (y <= h) & (z >= -1) & (z <= w)
        corners = [_corners(p, n) for p, n in ((y, h), (z, w))]
        terms = []
        for (iy, wy), (ix, wx) in product(*corners):
            terms.append(np.where(inside, image[:, iy, ix] * (wy * wx), 0).astype(image.dtype))
        values = sum(terms[1:], terms[0]) if self.mode == "avg" else np.max(terms, axis=0)
        bins = values.reshape(len(image), *rows, *columns)
        return np.asarray(bins.sum(axis=(2, 4)) / samples if self.mode == "avg" else bins.max(axis=(2, 4)))


def _corners(p: Array, n: int) -> list[tuple[Array, Array]]:
    """The two elements next to a place, and how much each counts."""
    p = np.nan_to_num(p).clip(0, n - 1)
    low = np.floor(p).astype(np.int64)
    part = (p - low).astype(p.dtype)
    return [(low, 1 - part), (np.minimum(low + 1, n - 1), part)]


@register
class RoiAlign(_RoiAlign):
    """Regions of x [N, C, H, W] pooled to `size` from bilinear samples: [R, C, *size]. (ONNX RoiAlign-22)

    rois [R, 4] are (x1, y1, x2, y2), times `scale`, less half an element if `half_pixel`; batch i64 [R] says in which
    image. A bin is the "avg" of `samples` x `samples` values between elements, or the "max" of the weighted elements
    that they are made of. A sample more than an element beyond the image, or whose place is NaN, is 0. Without
    `half_pixel` a region is at least 1 x 1. `RoiAlignAdaptive` has as many samples as
    a bin has elements.
    """

    size: tuple[int, int] = (1, 1)
    scale: float = 1.0
    mode: str = "avg"
    half_pixel: bool = True
    samples: int = 1

    def infer(self, x: TensorType, rois: TensorType, batch: TensorType) -> TensorType:
        if self.samples < 1:
            raise OptionError(f"roi_align: samples must be at least 1, got {self.samples}")
        return super().infer(x, rois, batch)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(20 * self.samples**2, *x)

    def _samples(self, starts: Array, step: Any, n: int) -> tuple[Any, Array]:
        return self.samples, np.arange(self.samples).astype(starts.dtype)

    def lower(self, k: Any, x: Any, rois: Any, batch: Any) -> Any:
        h, w = x.shape[2:]

        def element(r: Any, c: Any, *out: Any) -> Any:
            image = k.checked_index(batch(r), x.shape[0])

            def sample(*s: Any) -> Any:
                axes, inside = [], []
                for d, (n, i, j) in enumerate(zip((h, w), out, s, strict=True)):
                    start, end = (k.widen(rois(r, column)) for column in (1 - d, 3 - d))
                    low, step = self._box(start, end, self.size[d], k.max)
                    at = low + k.cast(i, low.dtype) * step + (k.cast(j, low.dtype) + 0.5) * step / self.samples
                    extent = k.cast(k.size(n), low.dtype)
                    inside += [at >= -1, at <= extent]
                    axes.append(_scalar_corners(k, at, n))
                met = k.all(*inside)
                terms = [
                    k.widen(x(image, c, iy, ix, where=met)) * wy * wx
                    for (iy, wy), (ix, wx) in product(axes[0], axes[1])
                ]
                value = terms[0]
                for term in terms[1:]:
                    value = value + term if self.mode == "avg" else k.max(value, term)
                return k.select(met, value, 0)

            if self.mode == "max":
                return k.reduce("max", (self.samples, self.samples), sample)
            return k.reduce("add", (self.samples, self.samples), sample) / (self.samples**2)

        return k.map(element)


def _scalar_corners(k: Any, p: Any, n: Any) -> list[tuple[Any, Any]]:
    p = k.max(k.min(p, k.cast(k.size(n - 1), p.dtype)), 0)
    floor = k.call("floor", p)
    low = k.max(k.min(k.cast(floor, "i64"), k.size(n - 1)), 0)
    return [(low, 1 - (p - floor)), (k.min(low + 1, k.size(n - 1)), p - floor)]


@register
class RoiAlignAdaptive(_RoiAlign):
    """`RoiAlign` with as many samples along each axis of a bin as it has elements. (ONNX RoiAlign, sampling_ratio 0)"""

    size: tuple[int, int] = (1, 1)
    scale: float = 1.0
    mode: str = "avg"
    half_pixel: bool = True


@register
class MaxRoiPool(Op):
    """The maximum of each bin of each region of x [N, C, H, W]: [R, C, *size]; empty bins give 0. (ONNX MaxRoiPool-22)

    rois [R, 5] are (image, x1, y1, x2, y2), times `scale` rounded to elements, halves away from zero, both ends
    included. Bins are cut in whole numbers: ONNX Runtime's size of a bin is an f32, and its bins may reach an element
    further.
    """

    places = 1
    size: tuple[int, int]
    scale: float = 1.0

    def infer(self, x: TensorType, rois: TensorType) -> TensorType:
        _check_regions(self, x, rois, 5, self.size)
        return TensorType((rois.shape[0], x.shape[1], *self.size), x.dtype)

    def work(self, *x: TensorType) -> Work:
        (out,) = self.infer_types(x)
        return Work(0, tensor_bytes(x[0]) + tensor_bytes(x[1]), tensor_bytes(out))

    def reference(self, x: Array, rois: Array) -> Array:
        wide = widened(x)
        out = np.zeros((len(rois), x.shape[1], *self.size), wide.dtype)
        for r, (image, *box) in enumerate(widened(rois)):
            if not 0 <= image < x.shape[0]:
                raise ExecutionError(f"max_roi_pool: the image {image} is outside a batch of {x.shape[0]}")
            x1, y1, x2, y2 = (_nearest(v * np.float32(self.scale)) for v in box)
            rows = _bins(y1, y2, self.size[0], x.shape[2])
            columns = _bins(x1, x2, self.size[1], x.shape[3])
            for (i, row), (j, column) in product(enumerate(rows), enumerate(columns)):
                part = wide[int(image), :, row, column]
                out[r, :, i, j] = part.max(axis=(1, 2)) if part.size else 0
        return out.astype(x.dtype)


def _nearest(v: Any) -> int:
    """The nearest whole number, halves away from zero; NaN gives 0."""
    return int(np.nan_to_num(np.copysign(np.floor(np.abs(v) + np.float32(0.5)), v)).clip(-FAR, FAR))


def _bins(low: int, high: int, count: int, n: int) -> list[slice]:
    """The elements of each bin of low..high: from floor(i length / count) to ceil((i + 1) length / count)."""
    length = max(high - low + 1, 1)
    ends = [(i * length // count, -(-(i + 1) * length // count)) for i in range(count)]
    return [slice(min(max(a + low, 0), n), min(max(b + low, 0), n)) for a, b in ends]
