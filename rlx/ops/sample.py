"""Sampling of images at computed places."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from rlx.errors import OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import Size, evaluate, exact_div, max_size, numel, unify
from rlx.ops.base import Op, Work, check_kind, check_same_dtype, register, widened
from rlx.ops.conv import check_window, per_axis, window_count
from rlx.ops.elementwise import Cast
from rlx.ops.interpolate import cubic_weight
from rlx.ops.layout import Reshape

__all__ = ["AffineGrid", "DeformConv", "DeformSample", "GridSample"]

TAPS = {"nearest": (0,), "linear": (0, 1), "cubic": (-1, 0, 1, 2)}
PADDINGS = ("zeros", "border", "reflection")
CUBIC = -0.75


@register
class GridSample(Op):
    """x [N, C, in..] sampled at grid [N, out.., r]: [N, C, out..]. (ONNX GridSample-22, torch grid_sample)

    The last axis of the grid holds a place (last axis of x first) in -1..1, the centres (`align_corners`) or the
    outer edges of the border elements. `mode` is "linear", "nearest" (halves to even) or "cubic"; `padding` says what
    lies outside x: "zeros", the "border" element, or the "reflection". A place that is NaN, or infinite without a
    border, gives NaN; in "nearest" NaN counts as the first element.
    """

    mode: str = "linear"
    padding: str = "zeros"
    align_corners: bool = False

    def infer(self, x: TensorType, grid: TensorType) -> TensorType:
        check_kind(self, x, "f")
        check_kind(self, grid, "f", "grid")
        if self.mode not in TAPS or self.padding not in PADDINGS:
            raise OptionError(
                f"grid_sample: expected a mode of {', '.join(TAPS)} and a padding of {', '.join(PADDINGS)}, got "
                f"{self.mode!r}, {self.padding!r}"
            )
        if x.rank < 3 or grid.rank != x.rank:
            raise ShapeError(f"grid_sample: expected x [N, C, in..] and a grid [N, out.., r] of its rank: {x}, {grid}")
        unify(grid.shape[-1], x.rank - 2, f"grid_sample: the last axis of the grid {grid} is a place in {x}")
        unify(x.shape[0], grid.shape[0], f"grid_sample: the batch of {x} and of the grid {grid}")
        for d, size in enumerate(x.shape[2:], 2):
            unify(max_size(size, 1), size, f"grid_sample: axis {d} of {x} has no elements")
        return TensorType((*x.shape[:2], *grid.shape[1:-1]), x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work((10 + 2 * len(TAPS[self.mode])) * len(TAPS[self.mode]) ** (x[0].rank - 2), *x)

    # ---- NumPy

    def reference(self, x: Array, grid: Array) -> Array:
        wide = widened(x)
        sizes = x.shape[2:]
        places = [self._place(np.asarray(widened(grid)[..., -1 - d], wide.dtype), n) for d, n in enumerate(sizes)]
        total = np.zeros((x.shape[0], x.shape[1], *grid.shape[1:-1]), wide.dtype)
        batch = np.arange(x.shape[0]).reshape(-1, *(1,) * (grid.ndim - 2))
        for taps in product(TAPS[self.mode], repeat=len(sizes)):
            weight: Any = np.ones((), wide.dtype)
            at: list[Any] = [batch]
            inside: Any = True
            for tap, p, n in zip(taps, places, sizes, strict=True):
                index, w, ok = self._tap(tap, p, n)
                at.append(index)
                weight, inside = weight * w, inside & ok
            values = np.moveaxis(wide, 1, -1)[tuple(at)]
            total += np.moveaxis(np.where(inside[..., None], values, 0) * weight[..., None], -1, 1)
        return total.astype(x.dtype)

    def _place(self, g: Array, n: int) -> Array:
        kind = g.dtype.type
        p = (
            (g + kind(1)) / kind(2) * kind(n - 1)
            if self.align_corners
            else ((g + kind(1)) * kind(n) - kind(1)) / kind(2)
        )
        p = np.rint(p) if self.mode == "nearest" else p
        if self.mode == "cubic" or self.padding == "zeros":
            return np.asarray(p)
        return p.clip(0, n - 1) if self.padding == "border" else self._reflected(p, n)

    def _reflected(self, p: Array, n: int) -> Array:
        low, length = (0.0, n - 1) if self.align_corners else (-0.5, n)
        if length == 0:
            return np.zeros_like(p)
        distance = np.abs(p - low)
        rest = distance - np.floor(distance / (2 * length)) * (2 * length)
        return np.asarray(np.where(rest > length, 2 * length - rest, rest) + low).astype(p.dtype)

    def _tap(self, tap: int, p: Array, n: int) -> tuple[Array, Any, Any]:
        """Index into an axis, weight, and whether the index is meant."""
        at = np.floor(p) + p.dtype.type(tap)
        distance = np.abs(at - p)
        weight: Any = 1
        if self.mode != "nearest":
            weight = 1 - distance if self.mode == "linear" else cubic_weight(distance, CUBIC, np.where)
        if self.mode == "cubic" and self.padding == "reflection":
            at = self._reflected(at, n)
        at = np.nan_to_num(at)
        inside = (at >= 0) & (at <= n - 1) if self.padding == "zeros" else np.ones_like(at, bool)
        return at.clip(0, n - 1).astype(np.int64), weight, inside

    # ---- scalar code

    def lower(self, k: Any, x: Any, grid: Any) -> Any:
        sizes = x.shape[2:]

        def element(b: Any, c: Any, *out: Any) -> Any:
            places = [self._scalar_place(k, x, grid(b, *out, len(sizes) - 1 - d), n) for d, n in enumerate(sizes)]
            taps = [
                [self._scalar_tap(k, tap, p, n) for tap in TAPS[self.mode]] for p, n in zip(places, sizes, strict=True)
            ]
            terms = []
            for chosen in product(*taps):
                inside = k.all(*(ok for _, _, ok in chosen if ok is not None))
                value = k.widen(x(b, c, *(at for at, _, _ in chosen), where=inside))
                for _, weight, _ in chosen:
                    value = value if weight is None else value * weight
                terms.append(value)
            return sum(terms[1:], terms[0])

        return k.map(element)

    def _scalar_place(self, k: Any, x: Any, g: Any, n: Size) -> Any:
        wide = k.widen(x(*[0] * x.rank)).dtype
        g, size = k.cast(k.widen(g), wide), k.cast(k.size(n), wide)
        p = (g + 1) / 2 * (size - 1) if self.align_corners else ((g + 1) * size - 1) / 2
        p = k.call("round", p) if self.mode == "nearest" else p
        if self.mode == "cubic" or self.padding == "zeros":
            return p
        return k.max(k.min(p, size - 1), 0) if self.padding == "border" else self._scalar_reflected(k, p, size)

    def _scalar_reflected(self, k: Any, p: Any, size: Any) -> Any:
        low, length = (0.0, size - 1) if self.align_corners else (-0.5, size)
        distance = k.call("abs", p - low)
        rest = distance - k.call("floor", distance / (2 * length)) * (2 * length)
        folded = k.select(rest > length, 2 * length - rest, rest) + low
        return k.select(k.equal(length, 0), 0, folded)

    def _scalar_tap(self, k: Any, tap: int, p: Any, n: Size) -> tuple[Any, Any, Any]:
        at = k.call("floor", p) + tap if self.mode != "nearest" else p
        weight = None
        if self.mode != "nearest":
            distance = k.call("abs", at - p)
            weight = 1 - distance if self.mode == "linear" else cubic_weight(distance, CUBIC, k.select)
        if self.mode == "cubic" and self.padding == "reflection":
            at = self._scalar_reflected(k, at, k.cast(k.size(n), p.dtype))
        index = k.cast(at, "i64")
        if self.padding == "zeros":
            return index, weight, (index >= 0) & (index < k.size(n))
        return k.max(k.min(index, k.size(n - 1)), 0), weight, None


@register
class AffineGrid(Op):
    """The grid [N, *size, r] for `GridSample` that theta [N, r, r + 1] maps a regular one of `size` to.

    (ONNX AffineGrid-20, torch affine_grid) Places are in -1..1, at the centres of the border elements if
    `align_corners`, else half an element inside.
    """

    size: tuple[Size, ...]
    align_corners: bool = False

    def infer(self, theta: TensorType) -> TensorType:
        check_kind(self, theta, "f")
        r = len(self.size)
        if theta.rank != 3:
            raise ShapeError(f"affine_grid: expected theta [N, {r}, {r + 1}], got {theta}")
        for d, want in ((1, r), (2, r + 1)):
            unify(theta.shape[d], want, f"affine_grid: axis {d} of theta {theta} for the size {self.size}")
        return TensorType((theta.shape[0], *self.size, r), theta.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(2 * len(self.size) + 2, *x)

    def reference(self, theta: Array) -> Array:
        wide, sizes = widened(theta), [evaluate(n, {}) for n in self.size]
        kind = wide.dtype.type
        axes = []
        for n in sizes:
            i = np.arange(n).astype(wide.dtype)
            axes.append(i * kind(2) / kind(max(n - 1, 1)) - 1 if self.align_corners else (i * 2 + 1) / kind(n) - 1)
        places = [*reversed(np.meshgrid(*axes, indexing="ij")), np.ones(sizes, wide.dtype)]
        return np.asarray(np.einsum("nij,...j->n...i", wide, np.stack(places, -1))).astype(theta.dtype)

    def lower(self, k: Any, theta: Any) -> Any:
        r = len(self.size)

        def element(n: Any, *i: Any) -> Any:
            row = i[-1]
            total = k.widen(theta(n, row, r))
            for d, (at, size) in enumerate(zip(i[:-1], self.size, strict=True)):
                at = k.cast(at, total.dtype)
                extent = k.cast(k.size(size), total.dtype)
                if self.align_corners:
                    place = at * 2 / k.cast(k.size(max_size(size - 1, 1)), total.dtype) - 1
                else:
                    place = (at * 2 + 1) / extent - 1
                total = total + k.widen(theta(n, row, r - 1 - d)) * place
            return total

        return k.map(element)


@register
class DeformConv(Op):
    """Convolution whose taps are moved by offsets and scaled by a mask. (ONNX DeformConv-22, torchvision deform_conv2d)

    x [N, C, H, W], w [O, C / groups, kh, kw], offset [N, offset_groups kh kw 2, oh, ow] (row, then column, of each
    tap), bias [O], mask [N, offset_groups kh kw, oh, ow]. Values between elements are linear, zeros outside x; an
    offset that is NaN or infinite gives NaN. `pads` are begins and then ends.
    """

    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    groups: int = 1
    offset_groups: int = 1

    def _window(self) -> tuple[Any, Any, Any]:
        return (
            per_axis(self.strides, 2, 1, "deform_conv strides"),
            per_axis(self.dilations, 2, 1, "deform_conv dilations"),
            per_axis(self.pads, 4, 0, "deform_conv pads"),
        )

    def infer(
        self,
        x: TensorType,
        w: TensorType,
        offset: TensorType,
        bias: TensorType | None = None,
        mask: TensorType | None = None,
    ) -> TensorType:
        check_kind(self, x, "f")
        check_same_dtype(self, x, w, offset, *(t for t in (bias, mask) if t is not None))
        if x.rank != 4 or w.rank != 4 or offset.rank != 4 or (mask is not None and mask.rank != 4):
            raise ShapeError(
                f"deform_conv: expected x, w, offset and mask of four axes, got {x}, {w}, {offset}, {mask}"
            )
        if not all(isinstance(n, int) for n in w.shape):
            raise ShapeError(f"deform_conv: expected a weight of known sizes, got {w}")
        strides, dilations, pads = self._window()
        check_window(
            "deform_conv",
            strides=strides,
            dilations=dilations,
            groups=(self.groups,),
            offset_groups=(self.offset_groups,),
        )
        if (
            exact_div(w.shape[0], self.groups) is None
            or exact_div(w.shape[1] * self.groups, self.offset_groups) is None
        ):
            raise ShapeError(f"deform_conv: the channels of {w} can't be split into {self.groups} groups or by offsets")
        unify(x.shape[1], w.shape[1] * self.groups, f"deform_conv: channels of {x} and {self.groups} x axis 1 of {w}")
        space = tuple(
            window_count(x.shape[d + 2], w.shape[d + 2], strides[d], dilations[d], pads[d] + pads[d + 2], "deform_conv")
            for d in range(2)
        )
        taps = self.offset_groups * numel(w.shape[2:])
        for what, t, channels in (("offset", offset, 2 * taps), ("mask", mask, taps)):
            if t is not None:
                for want, got in zip((x.shape[0], channels, *space), t.shape, strict=True):
                    unify(want, got, f"deform_conv: {what} {t} for {x} and {w}")
        if bias is not None:
            unify(numel(bias.shape), w.shape[0], f"deform_conv: the bias {bias} and axis 0 of the weight {w}")
        return TensorType((x.shape[0], w.shape[0], *space), x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(12 * numel(x[1].shape[1:]), *x)

    def reference(
        self, x: Array, w: Array, offset: Array, bias: Array | None = None, mask: Array | None = None
    ) -> Array:
        (n, channels), (kh, kw), (oh, ow) = x.shape[:2], w.shape[2:], offset.shape[2:]
        columns = DeformSample((kh, kw), *self._window(), self.offset_groups).reference(x, offset, mask)
        g = self.groups
        out = np.einsum(
            "ngckl,gock->ngol",
            columns.reshape(n, g, channels // g, kh * kw, oh * ow),
            widened(w).reshape(g, w.shape[0] // g, channels // g, kh * kw),
        ).reshape(n, w.shape[0], oh, ow)
        return np.asarray(out if bias is None else out + widened(bias).reshape(-1, 1, 1)).astype(x.dtype)

    def decompose(
        self, g: Graph, x: Value, w: Value, offset: Value, bias: Value | None = None, mask: Value | None = None
    ) -> Value:
        """The samples of all taps as columns, their product with the weights of each group, and the bias."""
        sample = DeformSample(tuple(map(int, w.shape[2:])), *self._window(), self.offset_groups)
        (columns,) = g.add(sample, x, offset, *(() if mask is None else (mask,)))
        batch, outputs, depth, space = x.shape[0], w.shape[0], numel(w.shape[1:]), offset.shape[2:]
        (columns,) = g.add(Reshape((batch, self.groups, depth, numel(space))), columns)
        (weights,) = g.add(Reshape((self.groups, outputs // self.groups, depth)), g.add(Cast(columns.dtype), w)[0])
        (made,) = g.add(Reshape((batch, outputs, *space)), weights @ columns)
        if bias is not None:
            made = made + g.add(Reshape((outputs, 1, 1)), g.add(Cast(columns.dtype), bias)[0])[0]
        return g.add(Cast(x.dtype), made)[0]


@register
class DeformSample(Op):
    """What the taps of a `DeformConv` see: x [N, C, H, W] to [N, offset_groups, C / offset_groups, kh, kw, oh, ow].

    Inputs: x, offset, and a mask or none, as there. f16 and bf16 give f32.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    offset_groups: int = 1

    def infer(self, x: TensorType, offset: TensorType, mask: TensorType | None = None) -> TensorType:
        channels = exact_div(x.shape[1], self.offset_groups)
        if channels is None:
            raise ShapeError(f"deform_sample: the channels of {x} can't be split into {self.offset_groups} groups")
        wide = DTYPES["f32"] if x.dtype.bits < 32 else x.dtype
        return TensorType((x.shape[0], self.offset_groups, channels, *self.kernel, *offset.shape[2:]), wide)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(12, *x)

    def reference(self, x: Array, offset: Array, mask: Array | None = None) -> Array:
        strides, dilations, pads, og = self.strides, self.dilations, self.pads, self.offset_groups
        wide, (n, channels, h, width), (kh, kw) = widened(x), x.shape, self.kernel
        oh, ow = offset.shape[2:]
        moved = widened(offset).reshape(n, og, kh, kw, 2, oh, ow)
        columns = np.zeros((n, og, channels // og, kh, kw, oh, ow), wide.dtype)
        image = wide.reshape(n, og, channels // og, h, width)
        batch, group = np.arange(n).reshape(-1, 1, 1, 1), np.arange(og).reshape(1, -1, 1, 1)
        for i, j in np.ndindex(kh, kw):
            rows, cols = (
                np.arange(m) * strides[d] + (i, j)[d] * dilations[d] - pads[d] for d, m in enumerate((oh, ow))
            )
            y = moved[:, :, i, j, 0] + rows.astype(wide.dtype)[:, None]
            z = moved[:, :, i, j, 1] + cols.astype(wide.dtype)
            total = np.zeros((n, og, oh, ow, channels // og), wide.dtype)
            for dy, dz in product((0, 1), repeat=2):
                at_y, at_z = np.floor(y) + dy, np.floor(z) + dz
                weight = (1 - np.abs(at_y - y)) * (1 - np.abs(at_z - z))
                at_y, at_z = np.nan_to_num(at_y), np.nan_to_num(at_z)
                inside = (at_y >= 0) & (at_y < h) & (at_z >= 0) & (at_z < width)
                rows, cols = (np.where(inside, a, 0).astype(np.int64) for a in (at_y, at_z))
                values = np.where(inside[..., None], image[batch, group, :, rows, cols], 0)
                total += values * weight[..., None]
            if mask is not None:
                total *= widened(mask).reshape(n, og, kh, kw, oh, ow)[:, :, i, j, ..., None]
            columns[:, :, :, i, j] = np.moveaxis(total, -1, 2)
        return columns

    def lower(self, k: Any, x: Any, offset: Any, mask: Any = None) -> Any:
        (kh, kw), each = self.kernel, x.shape[1] // self.offset_groups

        def element(n: Any, group: Any, c: Any, i: Any, j: Any, *out: Any) -> Any:
            tap, channel = (group * kh + i) * kw + j, group * each + c
            places = []
            for d, t in enumerate((i, j)):
                moved = k.widen(offset(n, tap * 2 + d, *out))
                base = k.size(-self.pads[d]) + out[d] * self.strides[d] + t * self.dilations[d]
                places.append(k.cast(base, moved.dtype) + moved)
            value = _bilinear(k, lambda *at, where: k.widen(x(n, channel, *at, where=where)), places, x.shape[2:])
            return value if mask is None else value * k.widen(mask(n, tap, *out))

        return k.map(element)


def _bilinear(k: Any, load: Callable[..., Any], places: list[Any], sizes: tuple[Size, ...]) -> Any:
    """The value between the elements around a place, zeros outside."""
    floors = [k.call("floor", p) for p in places]
    total = None
    for taps in product((0, 1), repeat=len(places)):
        corners = [f + t for f, t in zip(floors, taps, strict=True)]
        at = [k.cast(c, "i64") for c in corners]
        inside = k.all(*(test for a, n in zip(at, sizes, strict=True) for test in (a >= 0, a < k.size(n))))
        value = load(*at, where=inside)
        for c, p in zip(corners, places, strict=True):
            value = value * (1 - k.call("abs", c - p))
        total = value if total is None else total + value
    return total
