"""Tangent, hyperbolic functions and the inverses, composed from the scalar functions that every device has."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlx.ops.base import register
from rlx.ops.elementwise import Unary

__all__ = ["Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cosh", "Sinh", "Tan", "scalar_atan", "scalar_log1p"]


def _odd_series(x: Any, coefficients: list[float]) -> Any:
    """c0 x + c1 x^3 + c2 x^5 + ... by Horner's rule."""
    square = x * x
    total: Any = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        total = square * total + c
    return x * total


def scalar_atan(k: Any, x: Any) -> Any:
    """The arc tangent: reduced to |t| <= tan(pi/8) by quotients, then its Taylor series."""
    terms = 22 if x.dtype.bits == 64 else 10  # tan(pi/8)^(2 terms) / (2 terms + 1) is below half an ulp
    a = k.call("abs", x)
    steep, middle = a > math.tan(3 * math.pi / 8), a > math.tan(math.pi / 8)
    t = k.select(steep, -1 / a, k.select(middle, (a - 1) / (a + 1), a))
    quarter = k.const(math.pi / 4, x.dtype)
    base = k.select(steep, k.const(math.pi / 2, x.dtype), k.select(middle, quarter, 0))
    y = base + _odd_series(t, [(-1) ** n / (2 * n + 1) for n in range(terms)])
    return k.select(x < 0, -y, y)


def scalar_log1p(k: Any, x: Any) -> Any:
    """log(1 + x) that stays accurate for small x: the rounding error of 1 + x is put back."""
    w = x + 1
    return k.select(k.equal(w, 1), x, k.call("log", w) - ((w - 1) - x) / w)


def _half_exp(k: Any, a: Any) -> tuple[Any, Any]:
    """exp(a) / 2 and exp(-a) / 2 for a >= 0, by way of exp(a / 2) so that the former overflows no earlier than sinh."""
    root = k.call("exp", 0.5 * a)
    return 0.5 * root * root, 0.5 / root / root


@register
class Tan(Unary):
    """Tangent of radians. (ONNX Tan)"""

    flops, array = 25, np.tan

    def scalar(self, k: Any, x: Any) -> Any:
        return k.call("sin", x) / k.call("cos", x)


@register
class Asin(Unary):
    """Inverse sine in radians, -pi/2..pi/2; NaN outside -1..1. (ONNX Asin)"""

    flops, array = 30, np.arcsin

    def scalar(self, k: Any, x: Any) -> Any:
        return 2 * scalar_atan(k, x / (1 + k.call("sqrt", (1 - x) * (1 + x))))


@register
class Acos(Unary):
    """Inverse cosine in radians, 0..pi; NaN outside -1..1. (ONNX Acos)"""

    flops, array = 30, np.arccos

    def scalar(self, k: Any, x: Any) -> Any:
        return 2 * scalar_atan(k, k.call("sqrt", (1 - x) / (1 + x)))


@register
class Atan(Unary):
    """Inverse tangent in radians, -pi/2..pi/2. (ONNX Atan)"""

    flops, array = 25, np.arctan

    def scalar(self, k: Any, x: Any) -> Any:
        return scalar_atan(k, x)


@register
class Sinh(Unary):
    """Hyperbolic sine. (ONNX Sinh)"""

    flops, array = 30, np.sinh

    def scalar(self, k: Any, x: Any) -> Any:
        a = k.call("abs", x)
        grown, shrunk = _half_exp(k, a)
        large = k.select(x < 0, shrunk - grown, grown - shrunk)
        small = _odd_series(x, [1 / math.factorial(2 * n + 1) for n in range(10 if x.dtype.bits == 64 else 6)])
        return k.select(a < 1, small, large)


@register
class Cosh(Unary):
    """Hyperbolic cosine. (ONNX Cosh)"""

    flops, array = 20, np.cosh

    def scalar(self, k: Any, x: Any) -> Any:
        grown, shrunk = _half_exp(k, k.call("abs", x))
        return grown + shrunk


@register
class Asinh(Unary):
    """Inverse hyperbolic sine. (ONNX Asinh)"""

    flops, array = 30, np.arcsinh

    def scalar(self, k: Any, x: Any) -> Any:
        a = k.call("abs", x)
        square = a * a
        near = scalar_log1p(k, a + square / (1 + k.call("sqrt", 1 + square)))
        y = k.select(a < 1e8, near, k.call("log", a) + math.log(2))
        return k.select(x < 0, -y, y)


@register
class Acosh(Unary):
    """Inverse hyperbolic cosine; NaN below 1. (ONNX Acosh)"""

    flops, array = 30, np.arccosh

    def scalar(self, k: Any, x: Any) -> Any:
        t = x - 1
        near = scalar_log1p(k, t + k.call("sqrt", t) * k.call("sqrt", x + 1))
        return k.select(x > 1e8, k.call("log", x) + math.log(2), near)


@register
class Atanh(Unary):
    """Inverse hyperbolic tangent; infinite at -1 and 1, NaN beyond. (ONNX Atanh)"""

    flops, array = 25, np.arctanh

    def scalar(self, k: Any, x: Any) -> Any:
        a = k.call("abs", x)
        ratio = (a + a) / (1 - a)
        y = 0.5 * k.select(a < 1, scalar_log1p(k, ratio), -k.call("log", 1 - a))
        return k.select(x < 0, -y, y)
