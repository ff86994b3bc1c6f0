"""Ops that compute each output element from the elements at the same place of their inputs (NumPy broadcasting)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from rlx.errors import DTypeError, ExecutionError, OptionError
from rlx.ir.casting import cast
from rlx.ir.dtype import DTYPES, DType, dtype_of
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import broadcast
from rlx.ops.base import Op, Work, check_kind, check_same_dtype, register, widened

F32, F64, BOOL = DTYPES["f32"], DTYPES["f64"], DTYPES["bool"]


def _typed(result: Any, dtype: Any) -> Array:
    return np.asarray(result).astype(dtype, copy=False)


def literal(e: Any) -> int | float | None:
    """The number that a scalar expression is, when it is a constant."""
    value = getattr(e, "value", None)
    return value if isinstance(value, int | float) else None


class Unary(Op):
    """Base of ops of one input that keep its shape and type: `array` on NumPy arrays, `scalar` (or `fn`) in code."""

    kinds: ClassVar[str] = "f"
    fn: ClassVar[str]
    flops: ClassVar[int] = 1
    array: ClassVar[Any]

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, self.kinds)
        return TensorType(x.shape, x.dtype)

    def reference(self, x: Array) -> Array:
        return _typed(self.array(widened(x)), x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(self.flops, *x)

    def lower(self, k: Any, x: Any) -> Any:
        return k.map(lambda *i: self.scalar(k, k.widen(x(*i))))

    def scalar(self, k: Any, x: Any) -> Any:
        return k.call(self.fn, x)


@register
class Neg(Unary):
    """-x; integers wrap. (ONNX Neg)"""

    kinds, fn, array = "fi", "neg", np.negative


@register
class Abs(Unary):
    """|x|; the most negative integer stays as it is. (ONNX Abs)"""

    kinds, fn, array = "fiu", "abs", np.abs

    def scalar(self, k: Any, x: Any) -> Any:
        return x if x.dtype.kind == "u" else k.call("abs", x)


@register
class Sign(Unary):
    """-1, 0 or 1; NaN for NaN. (ONNX Sign)"""

    kinds, fn, array = "fiu", "sign", np.sign

    def scalar(self, k: Any, x: Any) -> Any:
        return k.min(x, 1) if x.dtype.kind == "u" else k.call("sign", x)


@register
class Exp(Unary):
    """e to the power x. (ONNX Exp)"""

    fn, flops, array = "exp", 10, np.exp


@register
class Log(Unary):
    """Natural logarithm. (ONNX Log)"""

    fn, flops, array = "log", 12, np.log


@register
class Sqrt(Unary):
    """Square root. (ONNX Sqrt)"""

    fn, array = "sqrt", np.sqrt


@register
class Rsqrt(Unary):
    """1 / sqrt(x). (jax.lax.rsqrt)"""

    flops = 2

    def array(self, x: Array) -> Array:
        return np.asarray(1 / np.sqrt(x))

    def scalar(self, k: Any, x: Any) -> Any:
        return 1 / k.call("sqrt", x)


@register
class Reciprocal(Unary):
    """1 / x. (ONNX Reciprocal)"""

    def array(self, x: Array) -> Array:
        return np.asarray(1 / x)

    def scalar(self, k: Any, x: Any) -> Any:
        return 1 / x


@register
class Sin(Unary):
    """Sine of radians. (ONNX Sin)"""

    fn, flops, array = "sin", 12, np.sin


@register
class Cos(Unary):
    """Cosine of radians. (ONNX Cos)"""

    fn, flops, array = "cos", 12, np.cos


@register
class Tanh(Unary):
    """Hyperbolic tangent. (ONNX Tanh)"""

    fn, flops, array = "tanh", 12, np.tanh


def erf(x: Array) -> Array:
    """The error function of each element, computed in f64."""
    values = [math.erf(v) for v in np.asarray(x, np.float64).ravel().tolist()]
    return np.array(values, np.float64).reshape(np.shape(x))


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


@register
class Erf(Unary):
    """The error function. (ONNX Erf)"""

    fn, flops, array = "erf", 12, staticmethod(erf)


@register
class Sigmoid(Unary):
    """1 / (1 + exp(-x)). (ONNX Sigmoid)"""

    fn, flops, array = "sigmoid", 12, staticmethod(sigmoid)


@register
class Floor(Unary):
    """The largest whole number not above x. (ONNX Floor)"""

    fn, array = "floor", np.floor


@register
class Ceil(Unary):
    """The smallest whole number not below x. (ONNX Ceil)"""

    fn, array = "ceil", np.ceil


@register
class Round(Unary):
    """The nearest whole number, halves to even. (ONNX Round)"""

    fn, array = "round", np.rint


@register
class Not(Unary):
    """Logical negation of bools. (ONNX Not)"""

    kinds, fn, array = "b", "not", np.logical_not


class Test(Op):
    """Base of questions about each floating-point element, answered in bool."""

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "f")
        return TensorType(x.shape, BOOL)


@register
class IsNan(Test):
    """Whether each element is NaN. (ONNX IsNaN)"""

    def reference(self, x: Array) -> Array:
        return np.asarray(np.isnan(widened(x)))

    def lower(self, k: Any, x: Any) -> Any:
        return k.map(lambda *i: k.call("isnan", k.widen(x(*i)), dtype=BOOL))


@register
class IsInf(Test):
    """Whether each element is an infinity of one of the chosen signs. (ONNX IsInf)"""

    detect_negative: bool = True
    detect_positive: bool = True

    def reference(self, x: Array) -> Array:
        x = widened(x)
        return np.asarray((self.detect_negative & (x == -np.inf)) | (self.detect_positive & (x == np.inf)))

    def lower(self, k: Any, x: Any) -> Any:
        def element(*i: Any) -> Any:
            value = k.widen(x(*i))
            if self.detect_negative and self.detect_positive:
                return k.call("isinf", value, dtype=BOOL)
            if self.detect_negative or self.detect_positive:
                return k.equal(value, math.inf if self.detect_positive else -math.inf)
            return k.const(False, BOOL)

        return k.map(element)


@register
class Identity(Op):
    """x itself. (ONNX Identity)"""

    strings: ClassVar[str] = "moved"

    def infer(self, x: TensorType) -> TensorType:
        return TensorType(x.shape, x.dtype)

    def reference(self, x: Array) -> Array:
        return x

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(0, *x)

    def lower(self, k: Any, x: Any) -> Any:
        return k.map(x)


@register
class Cast(Op):
    """x converted to the element type `to`, by one rule on every device. (ONNX Cast, which leaves some of it open)

    Float to integer: truncated; beyond the type's range its nearer end, NaN 0. Integer to integer: the low bits (two's
    complement). To bool: whether it is not 0, so NaN is true. To float: the nearest value, of two the even one (f8e8m0:
    the upper); f8e5m2 and wider have infinities for what is too large, other 8-bit floats NaN, f4e2m1 its largest.
    """

    to: DType

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", dtype_of(self.to))

    def infer(self, x: TensorType) -> TensorType:
        if self.to.kind == "s":
            raise DTypeError(f"cast: {x} can't be cast to strings: number_to_string writes numbers")
        if (x.dtype.kind == "c") != (self.to.kind == "c"):
            raise DTypeError(f"cast: {x} can't be cast to {self.to}: take the real or imaginary part instead")
        return TensorType(x.shape, self.to)

    def reference(self, x: Array) -> Array:
        return cast(x, self.to)

    def lower(self, k: Any, x: Any) -> Any:
        return k.map(x)


@register
class Clip(Unary):
    """min(max(x, lo), hi), either bound None for no limit; NaN stays NaN. (ONNX Clip)"""

    kinds, flops = "fiu", 2

    lo: float | int | None = None
    hi: float | int | None = None

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, self.kinds)
        for bound in (self.lo, self.hi):
            if bound is not None and x.dtype.is_integer:
                info = np.iinfo(x.dtype.numpy)
                if not math.isfinite(bound) or int(bound) != bound or not info.min <= bound <= info.max:
                    raise OptionError(f"clip: the bound {bound!r} is not a value of {x.dtype}")
        return TensorType(x.shape, x.dtype)

    def array(self, x: Array) -> Array:
        if self.lo is not None:
            x = np.maximum(x, np.asarray(self.lo).astype(x.dtype))
        return x if self.hi is None else np.minimum(x, np.asarray(self.hi).astype(x.dtype))

    def scalar(self, k: Any, x: Any) -> Any:
        if self.lo is not None:
            x = k.max(x, self.lo)
        return x if self.hi is None else k.min(x, self.hi)


# ---- two inputs


class Binary(Op):
    """Base of ops of two inputs of one element type that broadcast; see `Unary`."""

    alike = True
    kinds: ClassVar[str] = "fiu"
    fn: ClassVar[str]
    array: ClassVar[Any]

    def infer(self, a: TensorType, b: TensorType) -> TensorType:
        check_kind(self, a, self.kinds)
        check_same_dtype(self, a, b)
        return TensorType(broadcast(a.shape, b.shape, why=f"{self.op_name} of {a} and {b}"), a.dtype)

    def reference(self, a: Array, b: Array) -> Array:
        return _typed(self.array(widened(a), widened(b)), a.dtype)

    def lower(self, k: Any, a: Any, b: Any) -> Any:
        return k.map(lambda *i: self.scalar(k, k.widen(a.broadcast(*i)), k.widen(b.broadcast(*i))))

    def scalar(self, k: Any, a: Any, b: Any) -> Any:
        return k.call(self.fn, a, b)


@register
class Add(Binary):
    """a + b. (ONNX Add)"""

    fn, array = "add", np.add


@register
class Sub(Binary):
    """a - b. (ONNX Sub)"""

    fn, array = "sub", np.subtract


@register
class Mul(Binary):
    """a * b. (ONNX Mul)"""

    fn, array = "mul", np.multiply


@register
class Minimum(Binary):
    """The smaller of a and b; NaN if either is. (ONNX Min)"""

    fn, array = "min", np.minimum


@register
class Maximum(Binary):
    """The larger of a and b; NaN if either is. (ONNX Max)"""

    fn, array = "max", np.maximum


def _check_divisor(op: Op, a: Array, b: Array) -> None:
    if b.dtype.kind in "iu" and np.size(a) and np.any(b == 0):
        raise ExecutionError(f"{op.op_name}: integer division by zero")


def _divided(k: Any, fn: str, a: Any, d: Any, by_minus_one: Any) -> Any:
    """idiv or irem with a divisor of any value: 0 stops the run, -1 does not overflow."""
    known = literal(d)
    if known is None or known == 0:
        d = k.checked_divisor(d)
    if d.dtype.kind == "u" or known not in (None, 0, -1):
        return k.call(fn, a, d)
    minus = k.equal(d, -1)
    return k.select(minus, by_minus_one, k.call(fn, a, k.select(minus, 1, d) if known is None else d * d))


@register
class Div(Binary):
    """a / b; integers truncate toward zero, and a zero divisor stops the run with `ExecutionError`. (ONNX Div)"""

    def array(self, a: Array, b: Array) -> Array:
        if a.dtype.kind == "f":
            return np.asarray(np.true_divide(a, b))
        _check_divisor(self, a, b)
        with np.errstate(over="ignore"):  # the least integer by -1 wraps
            return np.asarray((a - np.fmod(a, b)) // b)

    def scalar(self, k: Any, a: Any, b: Any) -> Any:
        return a / b if a.dtype.is_float else _divided(k, "idiv", a, b, -a if a.dtype.kind == "i" else a)


@register
class Mod(Binary):
    """Remainder of a / b with the sign of b (Python, np.mod) or, with `fmod`, of a (C).

    Of integers a zero divisor stops the run with `ExecutionError`, and the remainder by -1 is 0. Floats are exact for
    any quotient (with the sign of b: rounded once, where b is added): NaN for a zero divisor or infinite a, a itself
    for an infinite b (b where the signs differ). A zero has the sign of b or, with `fmod`, of a. (ONNX Mod)
    """

    fmod: bool = False

    def array(self, a: Array, b: Array) -> Array:
        _check_divisor(self, a, b)
        return np.asarray(np.fmod(a, b) if self.fmod else np.mod(a, b))

    def scalar(self, k: Any, a: Any, b: Any) -> Any:
        rest = k.call("fmod", a, b) if a.dtype.is_float else _divided(k, "irem", a, b, 0 * a)
        if self.fmod or a.dtype.kind == "u":
            return rest
        none = k.select(b < 0, k.const(-0.0, b.dtype), 0.0) if a.dtype.is_float else rest
        return k.select(k.equal(rest, 0), none, k.select((rest < 0) ^ (b < 0), rest + b, rest))


@register
class Pow(Op):
    """a to the power b, in the type of a; b may have another type.

    Integer powers wrap; of an exponent beyond 63 only the last six bits count for an odd base (an even one has wrapped
    to 0). A negative integer exponent gives 1 / a**-b truncated (0 for a = 0). (ONNX Pow)
    """

    def infer(self, a: TensorType, b: TensorType) -> TensorType:
        check_kind(self, a, "fiu", "base")
        check_kind(self, b, "fiu", "exponent")
        return TensorType(broadcast(a.shape, b.shape, why=f"pow of {a} and {b}"), a.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(20, *x)

    def reference(self, a: Array, b: Array) -> Array:
        x = widened(a)
        if x.dtype.kind == "f":
            return _typed(np.power(x, widened(b).astype(x.dtype)), a.dtype)
        if b.dtype.kind not in "iu":
            return cast(np.power(x.astype(np.float64), b.astype(np.float64)), dtype_of(a.dtype))
        e = b.astype(a.dtype)
        inverse = np.where(x == 1, 1, np.where((e < 0) & (x + 1 == 0), 1 - 2 * (e & 1), 0))
        power = np.power(x, np.where((x & 1) == 1, e & 63, np.maximum(e, 0)))
        return _typed(np.where(e < 0, inverse, power), a.dtype)

    def lower(self, k: Any, a: Any, b: Any) -> Any:
        def element(*i: Any) -> Any:
            x, e = k.widen(a.broadcast(*i)), k.widen(b.broadcast(*i))
            if x.dtype.is_float:
                return _float_power(k, x, k.cast(e, x.dtype))
            if e.dtype.is_float:
                return _near_whole(k, k.call("pow", k.cast(x, F64), k.cast(e, F64)))
            return _integer_power(k, x, k.cast(e, x.dtype))

        return k.map(element)


def _float_power(k: Any, x: Any, e: Any) -> Any:
    simple = {1: lambda: x, 2: lambda: x * x, 3: lambda: x * x * x, -1: lambda: 1 / x}.get(literal(e))  # type: ignore[arg-type]
    return simple() if simple else k.call("pow", x, e)


def _near_whole(k: Any, x: Any) -> Any:
    """x, or the whole number that it is within the error of a power of: what is truncated next must not be less."""
    whole = k.call("round", x)
    near = k.call("abs", x - whole) <= k.call("abs", whole) * 2**-50
    return k.select(near, whole, x)


def _integer_power(k: Any, x: Any, e: Any) -> Any:
    """Square and multiply over six bits of the exponent; beyond them an even base has wrapped to 0."""
    known = literal(e)
    result, square = k.const(1, x.dtype), x
    if known is not None and 0 <= known < 64:
        for bit in range(int(known).bit_length()):
            result = result * square if int(known) >> bit & 1 else result
            square = square * square
        return result
    for bit in range(6):
        odd = k.equal(k.call("and", k.call("shr", e, bit), 1), 1)
        result = k.select(odd, result * square, result)
        square = square * square
    even = k.equal(k.call("and", x, 1), 0)
    result = k.select((e >= 64) & even, 0, result)
    if x.dtype.kind == "u":
        return result
    alternating = k.call("sub", 1, 2 * k.call("and", e, 1))
    inverse = k.select(k.equal(x, -1), alternating, k.cast(k.equal(x, 1), x.dtype))
    return k.select(e < 0, inverse, result)


@register
class And(Binary):
    """Logical and of bools. (ONNX And)"""

    kinds, fn, array = "b", "and", np.logical_and


@register
class Or(Binary):
    """Logical or of bools. (ONNX Or)"""

    kinds, fn, array = "b", "or", np.logical_or


@register
class Xor(Binary):
    """Exclusive or of bools. (ONNX Xor)"""

    kinds, fn, array = "b", "xor", np.logical_xor


class Compare(Binary):
    """Base of comparisons: bool results; all but the two equalities order numbers only. With NaN only != is true."""

    def infer(self, a: TensorType, b: TensorType) -> TensorType:
        return TensorType(super().infer(a, b).shape, BOOL)

    def reference(self, a: Array, b: Array) -> Array:
        return np.asarray(self.array(widened(a), widened(b)))

    def scalar(self, k: Any, a: Any, b: Any) -> Any:
        return k.call(self.fn, a, b, dtype=BOOL)


@register
class Equal(Compare):
    """a == b. (ONNX Equal)"""

    strings: ClassVar[str] = "moved"
    kinds, fn, array = "fiubs", "eq", np.equal


@register
class NotEqual(Compare):
    """a != b. (np.not_equal)"""

    strings: ClassVar[str] = "moved"
    kinds, fn, array = "fiubs", "ne", np.not_equal


@register
class Less(Compare):
    """a < b. (ONNX Less)"""

    fn, array = "lt", np.less


@register
class LessEqual(Compare):
    """a <= b. (ONNX LessOrEqual)"""

    fn, array = "le", np.less_equal


@register
class Greater(Compare):
    """a > b. (ONNX Greater)"""

    fn, array = "gt", np.greater


@register
class GreaterEqual(Compare):
    """a >= b. (ONNX GreaterOrEqual)"""

    fn, array = "ge", np.greater_equal


@register
class Where(Op):
    """a where the bool `cond` is true, else b; the three broadcast. (ONNX Where)"""

    strings: ClassVar[str] = "moved"
    alike = True

    def infer(self, cond: TensorType, a: TensorType, b: TensorType) -> TensorType:
        check_kind(self, cond, "b", "condition")
        check_same_dtype(self, a, b)
        return TensorType(broadcast(cond.shape, a.shape, b.shape, why=f"where of {cond}, {a} and {b}"), a.dtype)

    def reference(self, cond: Array, a: Array, b: Array) -> Array:
        return np.where(cond, a, b)

    def lower(self, k: Any, cond: Any, a: Any, b: Any) -> Any:
        return k.map(lambda *i: k.select(cond.broadcast(*i), a.broadcast(*i), b.broadcast(*i)))
