"""Resizing by the nearest element."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np

from rlx.errors import OptionError, ShapeError
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import Size, evaluate, exact_div, max_size, min_size, unify
from rlx.ops.base import Op, Work, register, tensor_bytes

__all__ = ["COORDINATES", "ROUNDINGS", "ResizeNearest", "place", "place_ratio", "rounded", "rounded_ratio"]

COORDINATES = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric")
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def place_ratio(coordinate: str, i: Any, n: Size, m: Size) -> tuple[Any, Any]:
    """The place in an axis of n elements of index i of m, exactly: a whole number over another that is positive."""
    match coordinate:
        case "asymmetric":
            return i * n, max_size(m, 1)
        case "align_corners":
            return i * (n - 1), max_size(m - 1, 1)
    num = (i * 2 + 1) * n - m
    if coordinate == "pytorch_half_pixel":  # one element lies at 0
        num = num * min_size(m - 1, 1)
    return num, max_size(m * 2, 1)


def rounded_ratio(num: Any, den: Any, rounding: str) -> Any:
    """num / den rounded to a whole number by whole numbers only."""
    match rounding:
        case "floor":
            return num // den
        case "ceil":
            return (num + (den - 1)) // den
        case "round_prefer_floor":
            return (num * 2 + (den - 1)) // (den * 2)
    return (num * 2 + den) // (den * 2)


def place(coordinate: str, i: Any, n: Size, m: Size, scale: Any, number: Callable[[Size], Any]) -> Any:
    """The place of index i for a factor that is given, in floats; `number` makes one of a size.

    The only quotient is exact wherever the place is whole or half a number, and so is then all that follows.
    """
    match coordinate:
        case "asymmetric":
            return i / scale
        case "half_pixel_symmetric":  # n / 2 * (1 - m / (scale * n)) + (i + 0.5) / scale - 0.5
            return (i * 2.0 + 1.0 - number(m)) / (scale * 2.0) + number(n - 1) * 0.5
        case "pytorch_half_pixel":
            return ((i + 0.5) / scale - 0.5) * number(min_size(m - 1, 1))
    return (i + 0.5) / scale - 0.5


def rounded(floor: Any, part: Any, rounding: str, number: Callable[[Any], Any]) -> Any:
    """floor + part, 0 <= part < 1, rounded to a whole number; `number` makes 0 or 1 of a condition."""
    match rounding:
        case "floor":
            return floor
        case "ceil":
            return floor + number(part > 0)
        case "round_prefer_floor":
            return floor + number(part > 0.5)
    return floor + number(part >= 0.5)


@register
class ResizeNearest(Op):
    """x resized to `sizes` (one for each axis) by taking the nearest element. (ONNX Resize-19, mode "nearest")

    `coordinate` maps an index of the result to a place in x, `rounding` that place to an index. `scales` are the
    factors where the source gives them (None, or () for all: the ratio of the sizes). Places that follow from sizes
    alone are fractions, and rounded exactly: ONNX Runtime and the onnx package's reference round the ratio of the sizes
    to f32 first, and take another element for some pairs of sizes. With a factor that is given the place is computed
    in f32 as in ONNX Runtime (half_pixel_symmetric with one quotient, so that it is symmetric), and then rounded
    exactly: the factor 0.6 is what f32 makes of it.
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
        if any(scale is not None and not 0 < scale < inf for scale in self.scales):
            raise OptionError(f"resize_nearest: scales {self.scales} must be positive numbers")
        for d, (n, m) in enumerate(zip(x.shape, self.sizes, strict=True)):
            unify(max_size(m, 0), m, f"resize_nearest: size {m} of axis {d} is negative")
            unify(max_size(n, min_size(m, 1)), n, f"resize_nearest: axis {d} of {x} has no elements to take")
        return TensorType(self.sizes, x.dtype)

    def work(self, *x: TensorType) -> Work:
        out = tensor_bytes(self.infer(*x))
        return Work(0, out, out)

    def _given(self, axis: int) -> float | None:
        """The factor that an axis has its places from; None where they follow from the sizes."""
        return self.scales[axis] if self.scales and self.coordinate != "align_corners" else None

    def reference(self, x: Array) -> Array:
        for d, m in enumerate(self.sizes):
            x = np.take(x, self._positions(d, x.shape[d], evaluate(m, {})), axis=d)
        return x

    def _positions(self, axis: int, n: int, m: int) -> Array:
        i, given = np.arange(m), self._given(axis)
        if given is None:
            at = rounded_ratio(*place_ratio(self.coordinate, i, n, m), self.rounding)
        else:
            f32 = np.float32
            with np.errstate(all="ignore"):
                p = place(self.coordinate, i.astype(f32), n, m, f32(given), f32)
                floor = np.floor(p)
                at = np.nan_to_num(rounded(floor, p - floor, self.rounding, np.int64))
        return np.asarray(at.clip(0, max(n - 1, 0)), np.int64)

    def lower(self, k: Any, x: Any) -> Any:
        return k.map(lambda *i: x(*(self._position(k, d, e, x.shape[d], self.sizes[d]) for d, e in enumerate(i))))

    def _position(self, k: Any, axis: int, i: Any, n: Size, m: Size) -> Any:
        """The index into axis `axis` (of n elements) of x for index i of m."""
        given = self._given(axis)
        if m == n and given in (None, 1.0):
            return i
        factor = exact_div(m, n)
        whole = isinstance(factor, int) and factor > 0 and given in (None, float(factor))
        if whole and self._floors():
            return i // k.size(factor)
        if given is None:
            at = rounded_ratio(*place_ratio(self.coordinate, i, n, m), self.rounding)
        else:

            def number(size: Size) -> Any:
                return k.cast(k.size(size), "f32")

            p = place(self.coordinate, k.cast(i, "f32"), n, m, k.const(given, "f32"), number)
            floor = k.call("floor", p)
            at = k.cast(rounded(floor, p - floor, self.rounding, lambda ok: k.cast(ok, "f32")), "i64")
        return k.max(k.min(at, k.size(n - 1)), 0)

    def _floors(self) -> bool:
        """Whether a whole factor f takes element i // f for index i."""
        if self.coordinate == "asymmetric":
            return self.rounding == "floor"
        return self.coordinate != "align_corners" and self.rounding.startswith("round")
