"""Ops that move elements between channels, windows and space."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from rlx.errors import OptionError, ShapeError
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import Size, evaluate, exact_div, max_size, unify
from rlx.ops.base import Op, Work, axis_of, check_kind, register, widened
from rlx.ops.conv import check_window, per_axis, window_count
from rlx.ops.layout import Pad, Reshape, Transpose

__all__ = ["CenterCropPad", "Col2Im", "DepthToSpace", "SpaceToDepth"]


def _check_block(op: Op, x: TensorType, block: int) -> None:
    if x.rank != 4:
        raise ShapeError(f"{op.op_name}: expected x [N, C, H, W], got {x}")
    if block < 1:
        raise OptionError(f"{op.op_name}: block must be at least 1, got {block}")


def _divided(op: Op, x: TensorType, axis: int, by: int) -> Size:
    part = x.shape[axis] // by
    unify(part * by, x.shape[axis], f"{op.op_name}: axis {axis} of {x} must be a multiple of {by}")
    return part


@register
class DepthToSpace(Op):
    """Moves blocks of channels to space: [N, C, H, W] -> [N, C / block^2, H block, W block]. (ONNX DepthToSpace-13)

    `mode` "DCR": channels are (row in block, column in block, channel); "CRD": (channel, row, column).
    """

    block: int
    mode: str = "DCR"

    def infer(self, x: TensorType) -> TensorType:
        _check_block(self, x, self.block)
        if self.mode not in ("DCR", "CRD"):
            raise OptionError(f"depth_to_space: mode {self.mode!r} is not DCR or CRD")
        n, _, h, w = x.shape
        return TensorType((n, _divided(self, x, 1, self.block**2), h * self.block, w * self.block), x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(0, *x)

    def _steps(self, shape: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[int, ...], tuple[Any, ...]]:
        n, c, h, w = shape
        b = self.block
        c = c // (b * b)
        split = (n, b, b, c, h, w) if self.mode == "DCR" else (n, c, b, b, h, w)
        perm = (0, 3, 4, 1, 5, 2) if self.mode == "DCR" else (0, 1, 4, 2, 5, 3)
        return split, perm, (n, c, h * b, w * b)

    def reference(self, x: Array) -> Array:
        split, perm, shape = self._steps(x.shape)
        return x.reshape(split).transpose(perm).reshape(shape)

    def decompose(self, g: Graph, x: Value) -> Value:
        split, perm, shape = self._steps(x.shape)
        (y,) = g.add(Reshape(split), x)
        (y,) = g.add(Transpose(perm), y)
        return g.add(Reshape(shape), y)[0]


@register
class SpaceToDepth(Op):
    """Moves blocks of space to channels (row in block, column in block, channel), the inverse of DepthToSpace "DCR".

    [N, C, H, W] -> [N, C block^2, H / block, W / block]. (ONNX SpaceToDepth-13)
    """

    block: int

    def infer(self, x: TensorType) -> TensorType:
        _check_block(self, x, self.block)
        b = self.block
        return TensorType(
            (x.shape[0], x.shape[1] * b * b, _divided(self, x, 2, b), _divided(self, x, 3, b)),
            x.dtype,
        )

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(0, *x)

    def _steps(self, shape: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[int, ...], tuple[Any, ...]]:
        n, c, h, w = shape
        b = self.block
        h, w = h // b, w // b
        return (n, c, h, b, w, b), (0, 3, 5, 1, 2, 4), (n, c * b * b, h, w)

    def reference(self, x: Array) -> Array:
        split, perm, shape = self._steps(x.shape)
        return x.reshape(split).transpose(perm).reshape(shape)

    def decompose(self, g: Graph, x: Value) -> Value:
        split, perm, shape = self._steps(x.shape)
        (y,) = g.add(Reshape(split), x)
        (y,) = g.add(Transpose(perm), y)
        return g.add(Reshape(shape), y)[0]


@register
class CenterCropPad(Op):
    """Crops or pads with zeros around the centre so that `axes` (None: all) get `sizes`. (ONNX CenterCropPad-18)

    An odd element is cut off or added at the end.
    """

    sizes: tuple[Size, ...]
    axes: tuple[int, ...] | None = None

    def _targets(self, rank: int) -> dict[int, Size]:
        axes = range(rank) if self.axes is None else [axis_of(a, rank, "center_crop_pad") for a in self.axes]
        if len(axes) != len(self.sizes) or len(set(axes)) != len(axes):
            raise ShapeError(f"center_crop_pad: axes {self.axes} and sizes {self.sizes} must be one to one")
        return dict(zip(axes, self.sizes, strict=True))

    def infer(self, x: TensorType) -> TensorType:
        targets = self._targets(x.rank)
        for size in self.sizes:
            unify(max_size(size, 0), size, f"center_crop_pad: the size {size} is negative")
        return TensorType(tuple(targets.get(d, n) for d, n in enumerate(x.shape)), x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(0, *x)

    def _pads(self, shape: tuple[Size, ...]) -> tuple[Size, ...]:
        """Begins and ends for `Pad`; negative ones crop."""
        begins: list[Size] = []
        ends: list[Size] = []
        targets = self._targets(len(shape))
        for d, n in enumerate(shape):
            grown = targets.get(d, n) - n
            begin = max_size(grown, 0) // 2 - max_size(-grown, 0) // 2
            begins.append(begin)
            ends.append(grown - begin)
        return (*begins, *ends)

    def reference(self, x: Array) -> Array:
        return Pad(self._pads(x.shape)).reference(x)

    def decompose(self, g: Graph, x: Value) -> Value:
        return g.add(Pad(self._pads(x.shape)), x)[0]


@register
class Col2Im(Op):
    """Adds up columns [N, C * prod(kernel), windows] into an image [N, C, image..], the adjoint of window extraction.

    (ONNX Col2Im-18) `pads` are begins and then ends.
    """

    image: tuple[Size, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()

    op_name = "col2im"

    def _axes(self) -> list[tuple[int, int, int, int, int]]:
        """(kernel, stride, dilation, begin pad, end pad) of each axis."""
        n = len(self.kernel)
        strides = per_axis(self.strides, n, 1, "col2im strides")
        dilations = per_axis(self.dilations, n, 1, "col2im dilations")
        pads = per_axis(self.pads, 2 * n, 0, "col2im pads")
        return list(zip(self.kernel, strides, dilations, pads[:n], pads[n:], strict=True))

    def _counts(self) -> list[Size]:
        return [
            window_count(n, kernel, stride, dilation, begin + end, "col2im")
            for n, (kernel, stride, dilation, begin, end) in zip(self.image, self._axes(), strict=True)
        ]

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "fiu")
        if x.rank != 3 or len(self.image) != len(self.kernel) or not self.kernel:
            raise ShapeError(
                f"col2im: expected x [N, C * kernel, windows] and an entry for each axis of the image in image "
                f"{self.image} and kernel {self.kernel}, got {x}"
            )
        axes = self._axes()
        check_window(
            "col2im", kernel=self.kernel, strides=tuple(a[1] for a in axes), dilations=tuple(a[2] for a in axes)
        )
        channels = exact_div(x.shape[1], prod(self.kernel))
        if channels is None:
            raise ShapeError(f"col2im: axis 1 of {x} must be a multiple of the {prod(self.kernel)} taps of the kernel")
        windows: Size = 1
        for count in self._counts():
            windows = windows * count
        unify(x.shape[2], windows, f"col2im: axis 2 of {x} and the number of windows")
        return TensorType((x.shape[0], channels, *self.image), x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(prod(self.kernel), *x)

    def reference(self, x: Array) -> Array:
        axes, counts = self._axes(), [evaluate(c, {}) for c in self._counts()]
        image = [evaluate(s, {}) + a[3] + a[4] for s, a in zip(self.image, axes, strict=True)]
        columns = widened(x).reshape(x.shape[0], -1, *self.kernel, *counts)
        full = np.zeros((*columns.shape[:2], *image), columns.dtype)
        for tap in np.ndindex(self.kernel):
            places = [
                slice(t * a[2], t * a[2] + (n - 1) * a[1] + 1, a[1]) for t, n, a in zip(tap, counts, axes, strict=True)
            ]
            full[:, :, *places] += columns[:, :, *tap]
        kept = [slice(a[3], size - a[4]) for size, a in zip(image, axes, strict=True)]
        return full[:, :, *kept].astype(x.dtype)

    def lower(self, k: Any, x: Any) -> Any:
        axes, counts = self._axes(), self._counts()

        def element(n: Any, c: Any, *space: Any) -> Any:
            def tap(*taps: Any) -> Any:
                row, column = c, k.size(0)
                tests = []
                for i, t, count, (kernel, stride, dilation, begin, _) in zip(space, taps, counts, axes, strict=True):
                    at = i + begin - t * dilation
                    window = at // stride
                    tests += [at >= 0, window < k.size(count), *([k.equal(at % stride, 0)] if stride > 1 else [])]
                    row, column = row * kernel + t, column * k.size(count) + window
                return k.widen(x(n, row, column, where=k.all(*tests)))

            return k.reduce("add", self.kernel, tap)

        return k.map(element)
