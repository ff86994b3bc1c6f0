"""Resizing by the nearest element."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import Size, evaluate, exact_div, max_size, min_size, unify
from rlx.ops.base import Op, Work, register, tensor_bytes

__all__ = ["ResizeNearest"]

COORDINATES = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric")
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


@register
class ResizeNearest(Op):
    """x resized to `sizes` (one for each axis) by taking the nearest element. (ONNX Resize-19, mode "nearest")

    `scales` are the factors where the source gives them (None, or () for all: the ratio of the sizes). `coordinate`
    maps an index of the result to a place in x, `rounding` that place to an index. Places are computed in f32.
    """

    sizes: tuple[Size, ...]
    scales: tuple[float | None, ...] = ()
    coordinate: str = "half_pixel"
    rounding: str = "round_prefer_floor"

    def infer(self, x: TensorType) -> TensorType:
        if self.coordinate not in COORDINATES:
            raise OptionError(f"resize_nearest: coordinate {self.coordinate!r} is not one of {', '.join(COORDINATES)}")
        if self.rounding not in ROUNDINGS:
            raise OptionError(f"resize_nearest: rounding {self.rounding!r} is not one of {', '.join(ROUNDINGS)}")
        if len(self.sizes) != x.rank or len(self.scales) not in (0, x.rank):
            raise ShapeError(
                f"resize_nearest: sizes {self.sizes} and scales {self.scales} need one entry for each axis of {x}"
            )
        if any(scale is not None and not scale > 0 for scale in self.scales):
            raise OptionError(f"resize_nearest: scales {self.scales} must be positive")
        for d, (n, m) in enumerate(zip(x.shape, self.sizes, strict=True)):
            unify(max_size(m, 0), m, f"resize_nearest: size {m} of axis {d} is negative")
            unify(max_size(n, min_size(m, 1)), n, f"resize_nearest: axis {d} of {x} has no elements to take")
        return TensorType(self.sizes, x.dtype)

    def work(self, *x: TensorType) -> Work:
        out = tensor_bytes(self.infer(*x))
        return Work(0, out, out)

    def _scale(self, axis: int) -> float | None:
        return self.scales[axis] if self.scales else None

    def reference(self, x: Array) -> Array:
        for d, m in enumerate(self.sizes):
            x = np.take(x, self._positions(d, x.shape[d], evaluate(m, {})), axis=d)
        return x

    def _positions(self, axis: int, n: int, m: int) -> Array:
        f32 = np.float32
        given = self._scale(axis)
        scale = f32(given) if given is not None else f32(m) / f32(max(n, 1))
        i = np.arange(m).astype(f32)
        half = f32(0.5)
        place = (i + half) / scale - half
        match self.coordinate:
            case "asymmetric":
                place = i / scale
            case "align_corners":
                place = i * f32(n - 1) / f32(max(m - 1, 1))
            case "pytorch_half_pixel" if m <= 1:
                place = i * f32(0)
            case "half_pixel_symmetric" if given is not None:  # else the adjustment is 1
                adjustment = f32(m) / (scale * f32(n))
                place = f32(n) / f32(2) * (f32(1) - adjustment) + place
        match self.rounding:
            case "round_prefer_floor":
                place = np.ceil(place - half)
            case "round_prefer_ceil":
                place = np.floor(place + half)
            case "floor":
                place = np.floor(place)
            case "ceil":
                place = np.ceil(place)
        return np.asarray(place.clip(0, max(n - 1, 0)), np.int64)

    def lower(self, k: Any, x: Any) -> Any:
        return k.map(lambda *i: x(*(self._position(k, d, e, x.shape[d], self.sizes[d]) for d, e in enumerate(i))))

    def _position(self, k: Any, axis: int, i: Any, n: Size, m: Size) -> Any:
        """The index into axis `axis` (of n elements) of x for index i of m; integers only for a whole factor."""
        given = self._scale(axis)
        if m == n and given in (None, 1.0):
            return i
        factor = exact_div(m, n)
        whole = isinstance(factor, int) and factor > 0 and given in (None, float(factor))
        if whole and self._floors():
            return i // k.size(factor)

        def number(value: float | Size) -> Any:
            if isinstance(value, int | float):
                return k.const(float(value), DTYPES["f32"])
            return k.cast(k.size(value), DTYPES["f32"])

        scale = number(given) if given is not None else number(m) / number(n)
        last, out_last = number(n - 1), number(max_size(m - 1, 1))
        place = self._place(k, axis, k.cast(i, DTYPES["f32"]), number(n), number(m), scale, last, out_last)
        match self.rounding:
            case "round_prefer_floor":
                place = k.call("ceil", place - 0.5)
            case "round_prefer_ceil":
                place = k.call("floor", place + 0.5)
            case _:
                place = k.call(self.rounding, place)
        return k.max(k.min(k.cast(place, DTYPES["i64"]), k.size(n - 1)), 0)

    def _floors(self) -> bool:
        """Whether a whole factor f takes element i // f for index i."""
        if self.coordinate == "asymmetric":
            return self.rounding == "floor"
        return self.coordinate != "align_corners" and self.rounding.startswith("round")

    def _place(self, k: Any, axis: int, i: Any, n: Any, m: Any, scale: Any, last: Any, out_last: Any) -> Any:
        """The place in x, in f32; `last` and `out_last` are the last indices of x and (at least 1) of the result."""
        half_pixel = (i + 0.5) / scale - 0.5
        match self.coordinate:
            case "asymmetric":
                return i / scale
            case "align_corners":
                return i * last / out_last
            case "pytorch_half_pixel":
                return k.select(m > 1.0, half_pixel, 0.0)
            case "half_pixel_symmetric" if self._scale(axis) is not None:
                return n / 2.0 * (1.0 - m / (scale * n)) + half_pixel
        return half_pixel
