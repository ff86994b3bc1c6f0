"""Resizing by interpolation, one axis after the other."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, inf
from typing import Any

import numpy as np

from rlx.errors import OptionError, ShapeError
from rlx.ir.casting import cast
from rlx.ir.dtype import DTYPES, dtype_of
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import Size, evaluate, max_size, min_size, numel, unify
from rlx.ops.base import Op, Work, axis_of, check_kind, register, tensor_bytes
from rlx.ops.elementwise import Cast, Mul
from rlx.ops.resize import COORDINATES, ROUNDINGS, place, place_ratio, rounded, rounded_ratio

__all__ = ["Interpolate", "InterpolateAxis"]

MODES = ("nearest", "linear", "cubic")
NUDGE = 1 + 2.0**-20  # of integers, so that a whole number off by rounding errors is not truncated to the one below
ALL_COORDINATES = (*COORDINATES, "tf_crop_and_resize")


def _check(op: Op, mode: str, coordinate: str, rounding: str) -> None:
    for what, value, allowed in (
        ("mode", mode, MODES),
        ("coordinate", coordinate, ALL_COORDINATES),
        ("rounding", rounding, ROUNDINGS),
    ):
        if value not in allowed:
            raise OptionError(f"{op.op_name}: {what} {value!r} is not one of {', '.join(allowed)}")


def cubic_weight(distance: Any, a: float, where: Callable[..., Any]) -> Any:
    """The weight of an element at a distance >= 0 in cubic convolution (Keys 1981); `where` chooses by a condition."""
    d = distance
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((d - 5) * d + 8) * d * a - 4 * a
    return where(d <= 1, near, where(d < 2, far, 0 * d))


@register
class InterpolateAxis(Op):
    """One axis of x resized to `size` by interpolation between its elements; see `Interpolate`.

    x is f32 or f64. A second input, an f32 scalar, is the scale where the run decides it. `region` is the (start, end)
    of "tf_crop_and_resize", as parts of the axis. A place that is NaN, or infinite, gives NaN (nearest: an element at
    the border). With `antialias` or `exclude_outside` an element of weight 0 isn't read; else each one counts, so that
    an infinity of weight 0 gives NaN.
    """

    axis: int
    size: Size
    scale: float | None = None
    mode: str = "linear"
    coordinate: str = "half_pixel"
    rounding: str = "round_prefer_floor"
    cubic: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    region: tuple[float, float] = (0.0, 1.0)
    extrapolation: float = 0.0

    def infer(self, x: TensorType, decided: TensorType | None = None) -> TensorType:
        axis = axis_of(self.axis, x.rank, self.op_name)
        if decided is not None and (decided != TensorType((), DTYPES["f32"]) or self.scale is not None):
            raise OptionError(f"{self.op_name}: expected one scale, an f32 scalar, got {decided} and {self.scale}")
        if x.dtype not in (DTYPES["f32"], DTYPES["f64"]):
            raise OptionError(f"{self.op_name}: expected f32 or f64, got {x}; cast it first")
        _check(self, self.mode, self.coordinate, self.rounding)
        if self.scale is not None and not 0 < self.scale < inf:
            raise OptionError(f"{self.op_name}: the scale {self.scale} must be a positive number")
        n, m = x.shape[axis], self.size
        unify(max_size(m, 0), m, f"{self.op_name}: size {m} of axis {axis} is negative")
        unify(max_size(n, min_size(m, 1)), n, f"{self.op_name}: axis {axis} of {x} has no elements to take")
        return TensorType((*x.shape[:axis], m, *x.shape[axis + 1 :]), x.dtype)

    def work(self, *x: TensorType) -> Work:
        (out,) = self.infer_types(x)
        taps = self._reach(x[0].shape[self.axis], self.size) * 2
        return Work(numel(out.shape) * taps * 2, tensor_bytes(x[0]), tensor_bytes(out))

    def _reach(self, n: Size, m: Size) -> Size:
        """How many elements on either side of a place may have a weight."""
        side = {"nearest": 1, "linear": 1, "cubic": 2}[self.mode]
        if not self.antialias or self.mode == "nearest":
            return side
        if self.scale is not None:
            return ceil(side / min(self.scale, 1.0))
        return side * (n // max_size(m, 1) + 1)

    def _exact(self, given: bool) -> bool:
        """Whether places follow from the sizes alone, and so are fractions; `given`: the factor is not m / n."""
        return self.coordinate == "align_corners" or not (given or self.coordinate == "tf_crop_and_resize")

    def _place(self, i: Any, n: Size, m: Size, scale: Any, number: Callable[[Any], Any]) -> Any:
        """The place in x of index i of the result, in f32; `number` makes an f32 of a size or a float."""
        if self.coordinate != "tf_crop_and_resize":
            return place(self.coordinate, i, n, m, scale, number)
        start, end = (number(edge) for edge in self.region)
        many = number(min_size(m - 1, 1))  # 0 for one element, which lies in the middle
        middle = (start + end) * number(n - 1) * 0.5
        steps = start * number(n - 1) + i * (end - start) * number(n - 1) / number(max_size(m - 1, 1))
        return steps * many + middle * (number(1) - many)

    def _weight(self, distance: Any, scale: Any, where: Callable[..., Any]) -> Any:
        """The weight of an element at a distance >= 0 of the place (not normalised); `scale` is at most 1."""
        d = distance * scale if self.antialias else distance
        return where(d < 1, 1 - d, 0 * d) if self.mode == "linear" else cubic_weight(d, self.cubic, where)

    @property
    def _normalised(self) -> bool:
        return self.antialias or self.exclude_outside

    # ---- NumPy

    def reference(self, x: Array, decided: Array | None = None) -> Array:
        axis, m = self.axis % x.ndim, evaluate(self.size, {})
        n, f32 = x.shape[axis], np.float32
        given = self.scale if decided is None else decided[()]
        x = np.moveaxis(x, axis, -1)
        with np.errstate(all="ignore"):
            scale = f32(given) if given is not None else f32(m) / f32(max(n, 1))
            first, part, inside = self._places(np.arange(m), n, m, scale, given is not None, x.dtype)
            y = self._summed(x, first, part, min(scale, f32(1)))
        if self.coordinate == "tf_crop_and_resize":
            y = np.where(inside, y, x.dtype.type(self.extrapolation))
        return np.ascontiguousarray(np.moveaxis(y, -1, axis))

    def _places(self, i: Array, n: int, m: int, scale: Any, given: bool, dtype: Any) -> tuple[Array, Array, Array]:
        """The element before each place (the nearest one in that mode), the rest, and whether x reaches there."""
        if self._exact(given):
            num, den = place_ratio(self.coordinate, i, n, m)
            first = rounded_ratio(num, den, self.rounding if self.mode == "nearest" else "floor")
            return first, (num - first * den).astype(dtype) / dtype.type(den), np.ones(m, bool)
        f32, reach = np.float32, evaluate(self._reach(n, m), {})
        p = self._place(i.astype(f32), n, m, scale, f32)
        floor = np.floor(p)
        near = rounded(floor, p - floor, self.rounding, f32) if self.mode == "nearest" else floor
        first = np.nan_to_num(near.clip(f32(-1 - reach), f32(n + reach))).astype(np.int64)
        return first, (p - floor).astype(dtype), (p >= 0) & (p <= f32(n - 1))

    def _summed(self, x: Array, first: Array, part: Array, scale: Any) -> Array:
        n, dtype = x.shape[-1], x.dtype.type
        if not first.size or self.mode == "nearest":
            return np.take(x, first.clip(0, n - 1), axis=-1)
        total, weights = np.zeros((*x.shape[:-1], len(first)), dtype), np.zeros(len(first), dtype)
        reach = evaluate(self._reach(n, len(first)), {})
        for tap in range(1 - reach, reach + 1):
            at = first + tap
            w = self._weight(np.abs(dtype(tap) - part), dtype(scale), np.where)
            if self.exclude_outside:
                w = np.where((at < 0) | (at >= n), 0, w)
            term = np.take(x, at.clip(0, n - 1), axis=-1) * w
            total += np.where(w == 0, 0, term) if self._normalised else term
            weights += w
        return total / weights if self._normalised else total

    # ---- scalar code

    def lower(self, k: Any, x: Any, decided: Any = None) -> Any:
        axis = self.axis % x.rank
        n, m = x.shape[axis], self.size

        def number(value: Size | float) -> Any:
            return k.const(value, "f32") if isinstance(value, float) else k.cast(k.size(value), "f32")

        if decided is not None:
            scale = decided()
        else:
            scale = number(self.scale) if self.scale is not None else number(m) / number(n)
        exact = self._exact(decided is not None or self.scale is not None)

        def element(*i: Any) -> Any:
            if exact:
                num, den = place_ratio(self.coordinate, i[axis], n, m)
                first = rounded_ratio(num, den, self.rounding if self.mode == "nearest" else "floor")
                part = k.cast(num - first * den, x.dtype) / k.cast(k.size(den), x.dtype)
                return self._value(k, x, i, axis, first, part, k.min(scale, 1))
            p = self._place(k.cast(i[axis], "f32"), n, m, scale, number)
            floor = k.call("floor", p)
            part = p - floor
            if self.mode == "nearest":
                floor = rounded(floor, part, self.rounding, lambda ok: k.cast(ok, "f32"))
            reach = self._reach(n, m)
            first = k.cast(k.max(k.min(floor, number(n + reach)), number(-1 - reach)), "i64")
            value = self._value(k, x, i, axis, first, k.cast(part, x.dtype), k.min(scale, 1))
            if self.coordinate != "tf_crop_and_resize":
                return value
            return k.select((p >= 0) & (p <= number(n - 1)), value, k.const(self.extrapolation, x.dtype))

        return k.map(element)

    def _value(self, k: Any, x: Any, i: Any, axis: int, first: Any, part: Any, scale: Any) -> Any:
        n = x.shape[axis]

        def load(at: Any) -> Any:
            return x(*i[:axis], k.max(k.min(at, k.size(n - 1)), 0), *i[axis + 1 :])

        if self.mode == "nearest":
            return load(first)
        reach = self._reach(n, self.size)

        def weight(tap: Any) -> Any:
            w = self._weight(k.call("abs", k.cast(tap, x.dtype) - part), k.cast(scale, x.dtype), k.select)
            if not self.exclude_outside:
                return w
            index = first + tap
            return k.select((index >= 0) & (index < k.size(n)), w, 0)

        def term(tap: Any) -> Any:
            w = weight(tap)
            value = w * load(first + tap)
            return k.select(k.equal(w, 0), 0, value) if self._normalised else value

        def total(fn: Callable[[Any], Any]) -> Any:
            if isinstance(reach, int) and reach <= 2:
                terms = [fn(k.size(tap)) for tap in range(1 - reach, reach + 1)]
                return sum(terms[1:], terms[0])
            return k.reduce("add", (reach * 2,), lambda r: fn(r - k.size(reach - 1)))

        return total(term) / total(weight) if self._normalised else total(term)


@register
class Interpolate(Op):
    """x resized to `sizes` (one for each axis) by interpolation along each axis that changes. (ONNX Resize-19)

    `mode` "linear", "cubic" (convolution with parameter `cubic`) or "nearest" with `rounding` (`ResizeNearest` does
    that faster). `scales` are the factors where the source gives them (None, or () for all: the ratio of the sizes).
    `coordinate` maps an index of the result to a place in x; "tf_crop_and_resize" takes the region `roi` (the starts
    and then the ends, as parts of the axes) and gives `extrapolation` beyond x. `exclude_outside` leaves elements
    beyond the border out instead of repeating the border; `antialias` widens the window when shrinking. Places that
    follow from sizes alone are fractions, as in `ResizeNearest`; those of scales and regions are computed in f32.
    Weights and values are f32 (f64 for f64); integers are truncated.
    """

    sizes: tuple[Size, ...]
    scales: tuple[float | None, ...] = ()
    mode: str = "linear"
    coordinate: str = "half_pixel"
    rounding: str = "round_prefer_floor"
    cubic: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    roi: tuple[float, ...] = ()
    extrapolation: float = 0.0

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "fiu")
        _check(self, self.mode, self.coordinate, self.rounding)
        if len(self.sizes) != x.rank or len(self.scales) not in (0, x.rank) or len(self.roi) not in (0, 2 * x.rank):
            raise ShapeError(
                f"interpolate: sizes {self.sizes}, scales {self.scales} and roi {self.roi} need entries for each axis "
                f"of {x}"
            )
        wide = TensorType(x.shape, self._arithmetic(x))
        for step in self._steps(x.shape):
            wide = step.infer(wide)
        return TensorType(self.sizes, x.dtype)

    def _arithmetic(self, x: Any) -> Any:
        return DTYPES["f64"] if x.dtype is DTYPES["f64"] else DTYPES["f32"]

    def _steps(self, shape: tuple[Size, ...]) -> list[InterpolateAxis]:
        steps = []
        for d, (n, m) in enumerate(zip(shape, self.sizes, strict=True)):
            scale = self.scales[d] if self.scales else None
            region = (self.roi[d], self.roi[d + len(shape)]) if self.roi else (0.0, 1.0)
            crops = self.coordinate == "tf_crop_and_resize" and region != (0.0, 1.0)
            if n != m or scale not in (None, 1.0) or crops:
                steps.append(
                    InterpolateAxis(
                        d, m, scale, self.mode, self.coordinate, self.rounding, self.cubic, self.exclude_outside,
                        self.antialias, region, self.extrapolation,
                    )
                )  # fmt: skip
        return steps

    def work(self, *x: TensorType) -> Work:
        (out,) = self.infer_types(x)
        steps = self._steps(x[0].shape)
        taps = 4 if self.mode == "cubic" else 2
        return Work(numel(out.shape) * len(steps) * taps * 2, tensor_bytes(x[0]), tensor_bytes(out))

    def reference(self, x: Array) -> Array:
        y = x if x.dtype == np.float64 else x.astype(np.float32)
        for step in self._steps(x.shape):
            y = step.reference(y)
        return cast(y if x.dtype.kind not in "iu" else y * np.float32(NUDGE), dtype_of(x.dtype))

    def decompose(self, g: Graph, x: Value) -> Value:
        y = x
        if x.dtype is not self._arithmetic(x):
            (y,) = g.add(Cast(self._arithmetic(x)), x)
        for step in self._steps(x.shape):
            (y,) = g.add(step, y)
        if x.dtype.is_integer:
            (y,) = g.add(Mul(), y, g.constant(NUDGE, dtype=y.dtype))
        return y if y.dtype is x.dtype else g.add(Cast(x.dtype), y)[0]
