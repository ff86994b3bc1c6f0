"""NumPy's ufuncs and functions on complex graph values: those of their real and imaginary parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy

from rlx import ops
from rlx.errors import DTypeError
from rlx.ir.graph import Value
from rlx.ops.numpy.registry import of
from rlx.ops.numpy.types import value_of

np: Any = numpy  # its types are of arrays, here its functions take graph values

__all__ = ["COMPLEX", "computed", "is_complex", "of_parts", "parts", "squared_size"]

Number = tuple[Any, Any]  # real and imaginary parts


def is_complex(x: Any) -> bool:
    """Whether it is a graph value of complex numbers."""
    return isinstance(x, Value) and x.dtype.kind == "c"


def parts(x: Value) -> Number:
    """The real and imaginary parts."""
    return ops.real_part(x), ops.imaginary_part(x)


def squared_size(x: Value) -> Any:
    """The squares of the absolute values."""
    re, im = parts(x)
    return re * re + im * im


def of_parts(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, of whose first operand the parts may be taken apart: sums, and what moves elements."""

    @functools.wraps(function)
    def call(a: Any, *args: Any, **kwargs: Any) -> Any:
        x = value_of(function.__name__, a)
        if not is_complex(x):
            return function(a, *args, **kwargs)
        return ops.make_complex(*(function(part, *args, **kwargs) for part in parts(x)))

    return call


def _product(a: Number, b: Number) -> Number:
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


def _matrix_product(a: Number, b: Number) -> Number:
    (ar, ai), (br, bi) = a, b
    return ops.sub(ops.matmul(ar, br), ops.matmul(ai, bi)), ops.add(ops.matmul(ar, bi), ops.matmul(ai, br))


def _quotient(a: Number, b: Number) -> Number:
    """By the ratio of the divisor's smaller part to the larger one, so that no square overflows. (Smith 1962)"""
    (ar, ai), (br, bi) = a, b
    wide = np.abs(br) >= np.abs(bi)
    large, small = np.where(wide, br, bi), np.where(wide, bi, br)
    none = (large == 0) & (small == 0)
    ratio = np.where(none, 0, small / np.where(none, 1, large))
    scale = 1 / np.where(none, np.abs(br), large + small * ratio)
    return (
        np.where(wide, ar + ai * ratio, ar * ratio + ai) * scale,
        np.where(wide, ai - ar * ratio, ai * ratio - ar) * scale,
    )


def _exp(a: Number) -> Number:
    size = np.exp(a[0])
    imaginary = np.where(a[1] == 0, a[1], np.where(size == 0, 0, size * np.sin(a[1])))
    return np.where(size == 0, 0, size * np.cos(a[1])), imaginary


def _log(a: Number) -> Number:
    return np.log(np.hypot(*a)), np.arctan2(a[1], a[0])


def _sqrt(a: Number) -> Number:
    """With the real part never below 0, and the sign of the imaginary one.

    It is taken of numbers that are scaled by a power of 4, so that no sum overflows and no denormal one is lost. Where
    the imaginary part is infinite both parts are.
    """
    re, im = a
    large = (np.abs(re) >= 1) | (np.abs(im) >= 1)
    scale = np.where(large, 0.125, 2)  # of the root of (|re| + |a|) / 2: a quarter's half, or four halves
    size = np.sqrt(np.abs(re * scale) + np.hypot(re * scale, im * scale)) * np.where(large, 2, 0.5)
    other = np.where(size == 0, 0, np.abs(im) / np.where(size == 0, 1, size) / 2)
    endless = np.isinf(im)
    size, other = np.where(endless, np.abs(im), size), np.where(endless, np.abs(im), other)
    return np.where(re >= 0, size, other), np.copysign(np.where(re >= 0, other, size), im)


def _power(a: Number, b: Number) -> Number:
    """exp(b log a); 0 to the power 0 is 1, to others 0."""
    zero = (a[0] == 0) & (a[1] == 0)
    made = _exp(_product(_log((np.where(zero, 1, a[0]), a[1])), b))
    one = (b[0] == 0) & (b[1] == 0)
    return np.where(one, 1, np.where(zero, 0, made[0])), np.where(one | zero, 0, made[1])


def _sign(a: Number) -> Number:
    size = np.hypot(*a)
    none = size == 0
    return tuple(np.where(none, 0, part / np.where(none, 1, size)) for part in a)


def _truth(a: Number) -> Any:
    return (a[0] != 0) | (a[1] != 0)


COMPLEX: dict[Any, Callable[..., Any]] = {  # a pair of parts, or an array of reals
    np.add: lambda a, b: (a[0] + b[0], a[1] + b[1]),
    np.subtract: lambda a, b: (a[0] - b[0], a[1] - b[1]),
    np.multiply: _product,
    np.divide: _quotient,
    np.matmul: _matrix_product,
    np.negative: lambda a: (-a[0], -a[1]),
    np.positive: lambda a: a,
    np.conjugate: lambda a: (a[0], -a[1]),
    np.absolute: lambda a: np.hypot(*a),
    np.square: lambda a: _product(a, a),
    np.reciprocal: lambda a: _quotient((np.ones_like(a[0]), np.zeros_like(a[1])), a),
    np.exp: _exp,
    np.log: _log,
    np.sqrt: _sqrt,
    np.power: _power,
    np.sign: _sign,
    np.equal: lambda a, b: (a[0] == b[0]) & (a[1] == b[1]),
    np.not_equal: lambda a, b: (a[0] != b[0]) | (a[1] != b[1]),
    np.isnan: lambda a: np.isnan(a[0]) | np.isnan(a[1]),
    np.isinf: lambda a: np.isinf(a[0]) | np.isinf(a[1]),
    np.isfinite: lambda a: np.isfinite(a[0]) & np.isfinite(a[1]),
    np.logical_not: lambda a: ~_truth(a),
    np.logical_and: lambda a, b: _truth(a) & _truth(b),
    np.logical_or: lambda a, b: _truth(a) | _truth(b),
    np.logical_xor: lambda a, b: _truth(a) ^ _truth(b),
}


def computed(ufunc: Any, values: list[Value]) -> Any:
    """The ufunc of complex values; `DTypeError` for one that there is none of."""
    compute = COMPLEX.get(ufunc)
    if compute is None:
        raise DTypeError(
            f"np.{ufunc.__name__} of complex graph values is not there: take real or imaginary parts first"
        )
    made = compute(*map(parts, values))
    return ops.make_complex(*made) if isinstance(made, tuple) else made


# ---- functions


@of(np.real)
def real(val: Any) -> Any:
    """The real part; of what is real, itself."""
    x = value_of("np.real", val)
    return ops.real_part(x) if is_complex(x) else x


@of(np.imag)
def imag(val: Any) -> Any:
    """The imaginary part; of what is real, zeros."""
    x = value_of("np.imag", val)
    return ops.imaginary_part(x) if is_complex(x) else np.zeros_like(x)


@of(np.angle)
def angle(z: Any, deg: bool = False) -> Any:
    """The angle of numbers with the real axis, in radians or degrees."""
    x = value_of("np.angle", z)
    if is_complex(x):
        made = np.arctan2(ops.imaginary_part(x), ops.real_part(x))
    else:
        made = np.arctan2(np.zeros_like(x), x)
    return np.degrees(made) if deg else made


@of(np.iscomplexobj)
def iscomplexobj(x: Any) -> bool:
    """Whether the element type is complex."""
    return is_complex(value_of("np.iscomplexobj", x))


@of(np.isrealobj)
def isrealobj(x: Any) -> bool:
    """Whether the element type is not complex."""
    return not is_complex(value_of("np.isrealobj", x))
