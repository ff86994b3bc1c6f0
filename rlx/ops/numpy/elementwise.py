"""NumPy's ufuncs: what each computes of values that have the element types of its loop already."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from rlx import ops
from rlx.errors import OptionError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ops.numpy.complex import computed, is_complex, of_parts
from rlx.ops.numpy.registry import FUNCTIONS, of
from rlx.ops.numpy.types import cast, is_number, resolved, traced, unite, value_of
from rlx.ops.sugar import floor_div

BOOL = DTYPES["bool"]
Compute = Callable[..., Any]


def _bool_or(of_bools: Compute, otherwise: Compute) -> Compute:
    return lambda *x: (of_bools if x[0].dtype is BOOL else otherwise)(*x)


def _ordered(compare: Compute) -> Compute:
    return lambda a, b: compare(cast(a, "u8"), cast(b, "u8")) if a.dtype is BOOL else compare(a, b)


def _whole(rounding: Compute) -> Compute:
    """A rounding: integers stay as they are."""
    return lambda x: rounding(x) if x.dtype.is_float else x


def _truths(combine: Compute) -> Compute:
    return lambda *x: combine(*(cast(v, BOOL) for v in x))


def _trunc(x: Value) -> Any:
    return ops.where(ops.less(x, 0), ops.ceil(x), ops.floor(x))


def _ignoring_nan(choose: Compute) -> Compute:
    def of_floats(a: Value, b: Value) -> Any:
        return ops.where(ops.is_nan(a), b, ops.where(ops.is_nan(b), a, choose(a, b)))

    return lambda a, b: of_floats(a, b) if a.dtype.is_float else choose(a, b)


def _expm1(x: Value) -> Any:
    return ops.mul(ops.tanh(ops.mul(x, 0.5)), ops.add(ops.exp(x), 1))


def _log1p(x: Value) -> Any:
    """Kahan: log(u) * x / (u - 1) with u = 1 + x rounded, whose errors cancel."""
    u = ops.add(x, 1)
    plain = ops.or_(ops.equal(u, 1), ops.is_inf(u))
    return ops.where(plain, x, ops.mul(ops.log(u), ops.div(x, ops.where(plain, 1, ops.sub(u, 1)))))


def _size(x: Value) -> Value:
    """|x|, of which 0 has a derivative by its sign bit, as what is made of it may be smooth there."""
    made: Value = ops.where(_signbit(x), ops.neg(x), x)
    return made


def _arctan2(y: Value, x: Value) -> Any:
    height, width = _size(y), _size(x)
    steep = ops.greater(height, width)  # then by the other quotient: there is no division by 0 beside an axis
    small, big = ops.where(steep, width, height), ops.where(steep, height, width)
    nothing = ops.and_(ops.equal(big, 0), ops.equal(small, 0))  # 0 / 0 counts as 0, also beside -0
    slope = ops.where(nothing, 0, ops.div(small, ops.where(nothing, 1, big)))
    slope = ops.where(ops.and_(ops.is_inf(y), ops.is_inf(x)), 1, slope)
    angle = ops.atan(slope)
    angle = ops.where(steep, ops.sub(math.pi / 2, angle), angle)
    angle = ops.where(_signbit(x), ops.sub(math.pi, angle), angle)
    return ops.where(_signbit(y), ops.neg(angle), angle)


def _hypot(a: Value, b: Value) -> Any:
    wide = ops.greater(ops.abs(a), ops.abs(b))  # either case is right on both sides, so its derivatives are
    big, small = ops.where(wide, a, b), ops.where(wide, b, a)
    ratio = ops.div(small, ops.where(ops.equal(big, 0), 1, big))
    infinite = ops.or_(ops.is_inf(a), ops.is_inf(b))
    return ops.where(infinite, math.inf, ops.mul(ops.abs(big), ops.sqrt(ops.add(ops.mul(ratio, ratio), 1))))


def _logaddexp(a: Value, b: Value) -> Any:
    above = ops.greater(a, b)
    same = ops.and_(ops.equal(a, b), ops.is_inf(a))  # the difference of equal infinities is NaN
    gap = ops.where(same, 0, ops.sub(a, b))
    return ops.add(ops.where(above, a, b), ops.softplus(ops.where(above, ops.neg(gap), gap)))


def _cbrt(x: Value) -> Any:
    return ops.mul(ops.sign(x), ops.pow(ops.abs(x), 1 / 3))


def _bits(x: Value) -> Value:
    made: Value = ops.bit_cast(x, to=DTYPES[f"u{x.dtype.bits}"])
    return made


def _signbit(x: Value) -> Any:
    if not x.dtype.is_float:
        return ops.less(x, 0)
    bits = _bits(x)
    return ops.not_equal(ops.bit_shift(bits, x.dtype.bits - 1, right=True), 0)


def _copysign(x: Value, sign: Value) -> Any:
    size = ops.abs(x)
    return ops.where(_signbit(sign), ops.neg(size), size)


def _shift(right: bool) -> Compute:
    """Of signed integers through their bits: to the right, those of a negative number are filled up with ones."""

    def compute(a: Value, b: Value) -> Any:
        if a.dtype.kind == "u":
            return ops.bit_shift(a, b, right=right)
        amount = _bits(b)
        if not right:
            return ops.bit_cast(ops.bit_shift(_bits(a), amount), to=a.dtype)
        negative = ops.less(a, 0)
        flipped = ops.where(negative, ops.bitwise_not(a), a)
        moved = ops.bit_cast(ops.bit_shift(_bits(flipped), amount, right=True), to=a.dtype)
        return ops.where(negative, ops.bitwise_not(moved), moved)

    return compute


def _heaviside(x: Value, middle: Value) -> Any:
    side = cast(ops.greater(x, 0), x.dtype)
    return ops.where(ops.is_nan(x), x, ops.where(ops.equal(x, 0), middle, side))


UFUNCS: dict[Any, Compute] = {
    np.add: _bool_or(ops.or_, ops.add),
    np.subtract: ops.sub,
    np.multiply: _bool_or(ops.and_, ops.mul),
    np.divide: ops.div,
    np.floor_divide: floor_div,
    np.remainder: ops.mod,
    np.fmod: lambda a, b: ops.mod(a, b, fmod=True),
    np.power: ops.pow,
    np.float_power: ops.pow,
    np.negative: ops.neg,
    np.positive: ops.identity,
    np.absolute: _bool_or(ops.identity, ops.abs),
    np.fabs: ops.abs,
    np.sign: ops.sign,
    np.square: lambda x: ops.mul(x, x),
    np.reciprocal: lambda x: ops.reciprocal(x) if x.dtype.is_float else ops.div(1, x),
    np.exp: ops.exp,
    np.exp2: lambda x: ops.exp(ops.mul(x, math.log(2))),
    np.expm1: _expm1,
    np.log: ops.log,
    np.log2: lambda x: ops.mul(ops.log(x), 1 / math.log(2)),
    np.log10: lambda x: ops.mul(ops.log(x), 1 / math.log(10)),
    np.log1p: _log1p,
    np.logaddexp: _logaddexp,
    np.sqrt: ops.sqrt,
    np.cbrt: _cbrt,
    np.hypot: _hypot,
    np.sin: ops.sin,
    np.cos: ops.cos,
    np.tan: ops.tan,
    np.arcsin: ops.asin,
    np.arccos: ops.acos,
    np.arctan: ops.atan,
    np.arctan2: _arctan2,
    np.sinh: ops.sinh,
    np.cosh: ops.cosh,
    np.tanh: ops.tanh,
    np.arcsinh: ops.asinh,
    np.arccosh: ops.acosh,
    np.arctanh: ops.atanh,
    np.deg2rad: lambda x: ops.mul(x, math.pi / 180),
    np.radians: lambda x: ops.mul(x, math.pi / 180),
    np.rad2deg: lambda x: ops.mul(x, 180 / math.pi),
    np.degrees: lambda x: ops.mul(x, 180 / math.pi),
    np.floor: _whole(ops.floor),
    np.ceil: _whole(ops.ceil),
    np.rint: _whole(ops.round),
    np.trunc: _whole(_trunc),
    np.maximum: _bool_or(ops.or_, ops.maximum),
    np.minimum: _bool_or(ops.and_, ops.minimum),
    np.fmax: _bool_or(ops.or_, _ignoring_nan(ops.maximum)),
    np.fmin: _bool_or(ops.and_, _ignoring_nan(ops.minimum)),
    np.equal: ops.equal,
    np.not_equal: ops.not_equal,
    np.less: _ordered(ops.less),
    np.less_equal: _ordered(ops.less_equal),
    np.greater: _ordered(ops.greater),
    np.greater_equal: _ordered(ops.greater_equal),
    np.logical_and: _truths(ops.and_),
    np.logical_or: _truths(ops.or_),
    np.logical_xor: _truths(ops.xor),
    np.logical_not: _truths(ops.not_),
    np.bitwise_and: _bool_or(ops.and_, ops.bitwise_and),
    np.bitwise_or: _bool_or(ops.or_, ops.bitwise_or),
    np.bitwise_xor: _bool_or(ops.xor, ops.bitwise_xor),
    np.invert: _bool_or(ops.not_, ops.bitwise_not),
    np.left_shift: _shift(False),
    np.right_shift: _shift(True),
    np.isnan: lambda x: ops.is_nan(x) if x.dtype.is_float else ops.not_equal(x, x),
    np.isinf: lambda x: ops.is_inf(x) if x.dtype.is_float else ops.not_equal(x, x),
    np.isfinite: lambda x: ops.not_(ops.or_(ops.is_nan(x), ops.is_inf(x))) if x.dtype.is_float else ops.equal(x, x),
    np.signbit: _signbit,
    np.copysign: _copysign,
    np.heaviside: _heaviside,
    np.conjugate: ops.identity,
    np.matmul: ops.matmul,
}


def ufunc_of(ufunc: Any) -> Compute:
    """The ufunc on graph values, arrays and numbers."""
    compute = UFUNCS[ufunc]

    def call(*inputs: Any, dtype: Any = None) -> Any:
        if dtype is not None:
            inputs = tuple(cast(value_of(f"np.{ufunc.__name__}", x), dtype) for x in inputs)
        values, to = resolved(ufunc, inputs)
        made = computed(ufunc, values) if any(map(is_complex, values)) else compute(*values)
        if not traced():
            return made
        made = cast(made, to)
        made.weak = dtype is None and made.dtype is not BOOL and made.shape == () and all(map(is_number, inputs))
        return made

    call.__name__ = ufunc.__name__
    return call


FUNCTIONS.update({ufunc: ufunc_of(ufunc) for ufunc in UFUNCS})


@of(np.divmod)
def _divmod(a: Any, b: Any) -> Any:
    return np.floor_divide(a, b), np.remainder(a, b)


# ---- functions that are no ufuncs


@of(np.where)
def _where(condition: Any, *choices: Any) -> Any:
    if len(choices) != 2:
        raise OptionError("np.where of a condition alone gives as many indices as hold: rlx.non_zero takes their count")
    a, b = unite("np.where", choices)
    cond = cast(value_of("np.where", condition), BOOL)
    return ops.where(cond, a, b)


@of(np.clip)
def _clip(a: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Any:
    low, high = (a_min if min is None else min), (a_max if max is None else max)
    if low is not None:
        a = np.maximum(a, low)
    return a if high is None else np.minimum(a, high)


@of(np.round, np.around)
def _round(a: Any, decimals: int = 0) -> Any:
    if isinstance(a, Value) and a.dtype.is_integer:
        return a if decimals >= 0 else cast(_round(cast(a, "f64"), decimals), a.dtype)
    if decimals == 0:
        return np.rint(a)
    scale = 10.0**decimals
    return np.rint(a * scale) / scale


@of(np.fix)
def _fix(x: Any) -> Any:
    return np.trunc(x)


@of(np.nan_to_num)
@of_parts
def _nan_to_num(x: Any, copy: bool = True, nan: float = 0.0, posinf: Any = None, neginf: Any = None) -> Any:
    limits = np.finfo(x.dtype.numpy) if x.dtype.is_float else None
    if limits is None:
        return x
    high = float(limits.max) if posinf is None else posinf
    low = float(limits.min) if neginf is None else neginf
    x = np.where(np.isnan(x), nan, x)
    return np.where(x == np.inf, high, np.where(x == -np.inf, low, x))


@of(np.isclose)
def _isclose(a: Any, b: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Any:
    near = np.isfinite(b) & (np.abs(a - b) <= atol + rtol * np.abs(b))
    near = near | (a == b)
    return near | (np.isnan(a) & np.isnan(b)) if equal_nan else near


@of(np.allclose)
def _allclose(a: Any, b: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Any:
    return np.all(_isclose(a, b, rtol, atol, equal_nan))


@of(np.array_equal)
def _array_equal(a1: Any, a2: Any) -> Any:
    if np.shape(a1) != np.shape(a2):
        return False
    return np.all(np.equal(a1, a2))


def astype(x: Any, dtype: Any, copy: bool = True) -> Any:
    """x in an element type: floats to integers truncate, integers wrap. (numpy.ndarray.astype)"""
    if isinstance(dtype, type):
        dtype = {float: np.float64, int: np.int64, bool: np.bool_, complex: np.complex128}.get(dtype, dtype)
    return cast(value_of("astype", x), dtype)


of(np.astype)(astype)
