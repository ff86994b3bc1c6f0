"""Quantisation and products of quantised tensors, in exact integer arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES, DType, dtype_of
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import Shape, Size, broadcast, ceildiv, numel, same, unify
from rlx.ops.base import Op, Work, axis_of, check_kind, product, register
from rlx.ops.bytewise import ByteConv, ByteMatMul, centred, check_number, is_nought
from rlx.ops.contract import MatMul, WideningMatMul
from rlx.ops.conv import Conv, Convolving
from rlx.ops.elementwise import Add, Cast, Div, Equal, Maximum, Minimum, Mul, Neg, Round, Sub, Where
from rlx.ops.layout import Reshape, Unsqueeze
from rlx.ops.reduction import ReduceMax, ReduceMin

__all__ = [
    "ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul", "Quantize", "Requantize",
    "limits",
]  # fmt: skip

F32, I16, I32, U8 = DTYPES["f32"], DTYPES["i16"], DTYPES["i32"], DTYPES["u8"]
LARGEST = {"f8e4m3": 448.0, "f8e5m2": 57344.0, "f8e4m3fnuz": 240.0, "f8e5m2fnuz": 57344.0, "f4e2m1": 6.0}
TARGETS = tuple(DTYPES[n] for n in ("u2", "i2", "u4", "i4", "u8", "i8", "u16", "i16", *LARGEST))


def limits(dtype: DType) -> tuple[float, float]:
    """The least and the largest (finite) value."""
    if dtype.is_float:
        return -LARGEST[dtype.name], LARGEST[dtype.name]
    return (
        (-(2.0 ** (dtype.bits - 1)), 2.0 ** (dtype.bits - 1) - 1) if dtype.kind == "i" else (0.0, 2.0**dtype.bits - 1)
    )


def _check_target(op: Op, to: DType, zero: TensorType | None) -> None:
    if to not in TARGETS:
        raise DTypeError(f"{op.op_name}: can't quantise to {to}; expected one of {', '.join(map(str, TARGETS))}")
    if zero is not None and zero.dtype is not to:
        raise DTypeError(f"{op.op_name}: expected a zero point of the result's type {to}, got {zero}")


def _saturated(value: Array, zero: Array | None, to: DType, saturate: bool = True) -> Array:
    """Rounds (for integers, halves to even), adds the zero point, and saturates."""
    if not to.is_float:
        value = np.rint(value)
    if zero is not None:
        value = value + zero.astype(np.float32)
    if saturate or not to.is_float:
        low, high = limits(to)
        value = np.clip(value, np.float32(low), np.float32(high))
    if not to.is_float:
        value = np.nan_to_num(value)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(value).astype(to.numpy)


def _scalar_saturated(k: Any, value: Any, zero: Any, to: DType, saturate: bool = True) -> Any:
    if not to.is_float:
        value = k.call("round", value)
    if zero is not None:
        value = value + k.cast(zero, "f32")
    if saturate or not to.is_float:
        low, high = limits(to)
        value = k.max(k.min(value, high), low)
    return value


@register
class Quantize(Op):
    """x / scale rounded (integers: halves to even) plus zero, saturated to the type `to`. (ONNX QuantizeLinear-24)

    Computed in f32. With axis None, `scale` and `zero` hold one number; with an axis, [size of the axis]; with a
    `block` > 0 too, the shape of x with that axis divided by `block` (rounded up). `saturate` False lets what exceeds
    an 8-bit float become NaN or infinite.
    """

    axis: int | None = None
    block: int = 0
    to: DType = U8
    saturate: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", dtype_of(self.to))

    def infer(self, x: TensorType, scale: TensorType, zero: TensorType | None = None) -> TensorType:
        check_kind(self, x, "fi")
        check_kind(self, scale, "f", "scale")
        _check_target(self, self.to, zero)
        if self.block < 0 or (self.block and self.axis is None):
            raise OptionError(f"quantize: block {self.block} needs to be 0, or positive with an axis")
        expected = self._parameter_shape(x.shape, scale.rank)
        for what, t in (("scale", scale), ("zero", zero)):
            if t is None:
                continue
            if t.rank != len(expected):
                raise ShapeError(f"quantize: expected {what} of shape {expected} for {x}, got {t}")
            for size, own in zip(expected, t.shape, strict=True):
                unify(size, own, f"quantize: {what} {t} for {x} with axis {self.axis}, block {self.block}")
        return TensorType(x.shape, self.to)

    def _parameter_shape(self, shape: Shape, rank: int) -> Shape:
        if self.axis is None:
            return (1,) * min(rank, max(len(shape), 1))
        axis = axis_of(self.axis, len(shape), self.op_name)
        if not self.block:
            return (shape[axis],)
        return tuple(ceildiv(n, self.block) if d == axis else n for d, n in enumerate(shape))

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(5, *x)

    def reference(self, x: Array, scale: Array, zero: Array | None = None) -> Array:
        value = x.astype(np.float32) / self._spread(scale.astype(np.float32), x)
        return _saturated(value, None if zero is None else self._spread(zero, x), self.to, self.saturate)

    def _spread(self, p: Array, x: Array) -> Array:
        if self.axis is None:
            return p.reshape(())
        axis = self.axis % x.ndim
        if not self.block:
            return p.reshape([-1 if d == axis else 1 for d in range(x.ndim)])
        return np.take(np.repeat(p, self.block, axis), np.arange(x.shape[axis]), axis)

    def lower(self, k: Any, x: Any, scale: Any, zero: Any = None) -> Any:
        def element(*i: Any) -> Any:
            def parameter(p: Any) -> Any:
                if self.axis is None:
                    return p(*[0] * p.rank)
                axis = self.axis % x.rank
                return p(*i[:axis], i[axis] // self.block, *i[axis + 1 :]) if self.block else p(i[axis])

            value = k.cast(x(*i), "f32") / k.cast(parameter(scale), "f32")
            return _scalar_saturated(k, value, None if zero is None else parameter(zero), self.to, self.saturate)

        return k.map(element)


@register
class Requantize(Op):
    """An i32 sum times an f32 multiplier, plus shift, rounded (halves to even), plus zero, saturated to `to`.

    Multiplier, zero and shift (f32) broadcast to x. (the last step of ONNX QLinearMatMul and QLinearConv)
    """

    to: DType = U8

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", dtype_of(self.to))

    def infer(
        self, x: TensorType, multiplier: TensorType, zero: TensorType | None = None, shift: TensorType | None = None
    ) -> TensorType:
        _check_target(self, self.to, zero)
        if x.dtype is not I32 or multiplier.dtype is not F32 or (shift is not None and shift.dtype is not F32):
            raise DTypeError(f"requantize: expected i32 sums and f32 factors, got {x}, {multiplier}, {shift}")
        for t in (multiplier, zero, shift):
            if t is not None:
                wide = broadcast(x.shape, t.shape, why=f"requantize: {t} over {x}")
                if len(wide) != x.rank or any(same(a, b) is False for a, b in zip(wide, x.shape, strict=True)):
                    raise ShapeError(f"requantize: {t} does not broadcast to {x}")
        return TensorType(x.shape, self.to)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(5, *x)

    def reference(self, x: Array, multiplier: Array, zero: Array | None = None, shift: Array | None = None) -> Array:
        value = x.astype(np.float32) * multiplier
        return _saturated(value if shift is None else value + shift, zero, self.to)

    def lower(self, k: Any, x: Any, multiplier: Any, zero: Any = None, shift: Any = None) -> Any:
        def element(*i: Any) -> Any:
            value = k.cast(x(*i), "f32") * multiplier.broadcast(*i)
            if shift is not None:
                value = value + shift.broadcast(*i)
            return _scalar_saturated(k, value, None if zero is None else zero.broadcast(*i), self.to)

        return k.map(element)


@register
class DynamicQuantizeLinear(Op):
    """f32 to u8 with the scale and zero point that just cover 0 and all of x. (ONNX DynamicQuantizeLinear-11)

    Outputs: the u8 tensor, its f32 scale and its u8 zero point. A NaN in x makes the scale NaN, an infinity makes it
    infinite; elements whose quotient is NaN are 0, and so is such a zero point.
    """

    def infer(self, x: TensorType) -> tuple[TensorType, TensorType, TensorType]:
        if x.dtype is not F32:
            raise DTypeError(f"dynamic_quantize_linear: expected f32, got {x}; cast it first")
        return TensorType(x.shape, U8), TensorType((), F32), TensorType((), U8)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(7, *x)

    def reference(self, x: Array) -> tuple[Array, Array, Array]:
        low, high = np.float32(x.min(initial=0)), np.float32(x.max(initial=0))
        scale = np.float32(1) if low == high else (high - low) / np.float32(255)
        zero = np.nan_to_num(np.rint(np.clip(-low / scale, 0, 255))).astype(np.uint8)
        return _saturated(x / scale, zero, U8), np.asarray(scale), np.asarray(zero)

    def decompose(self, g: Graph, x: Value) -> tuple[Value, Value, Value]:
        low, high = x, x
        if x.rank > 1:  # first along rows, by several threads
            low, high = g.add(ReduceMin((-1,), False), low)[0], g.add(ReduceMax((-1,), False), high)[0]
        nought = g.constant(np.float32(0))
        (low,) = g.add(Minimum(), g.add(ReduceMin(None, False), low)[0], nought)
        (high,) = g.add(Maximum(), g.add(ReduceMax(None, False), high)[0], nought)
        (range_,) = g.add(Div(), g.add(Sub(), high, low)[0], g.constant(np.float32(255)))
        (scale,) = g.add(Where(), g.add(Equal(), low, high)[0], g.constant(np.float32(1)), range_)
        (shift,) = g.add(Div(), g.add(Neg(), low)[0], scale)
        (shift,) = g.add(Maximum(), g.add(Minimum(), shift, g.constant(np.float32(255)))[0], nought)
        (zero,) = g.add(Cast(U8), g.add(Round(), shift)[0])
        return g.add(Quantize(to=U8), x, scale, zero)[0], scale, zero


# ---- integer products


def _check_integers(op: Op, **operands: TensorType) -> None:
    for what, t in operands.items():
        if t.dtype not in (DTYPES["u8"], DTYPES["i8"]):
            raise DTypeError(f"{op.op_name}: expected u8 or i8 as {what}, got {t}")


def _check_zero(op: Op, what: str, zero: TensorType | None, like: TensorType) -> None:
    if zero is not None and zero.dtype is not like.dtype:
        raise DTypeError(f"{op.op_name}: the zero point {zero} of {what} must have the type of {like}")


def _check_along(op: Op, what: str, p: TensorType, t: TensorType, axis: int) -> None:
    """Checks that a parameter of the matrices t is one number, or has one for each row (axis -2) or column (-1)."""
    if t.rank < 2:
        check_number(op, what, p, t.rank)
        return
    why = f"{op.op_name}: expected one {what}, or one for each {'row' if axis == -2 else 'column'} of {t}, got {p}"
    if p.rank == 1 and p.shape[0] != 1:
        unify(p.shape[0], t.shape[axis], why)
        return
    if p.rank > t.rank:
        raise ShapeError(why)
    for d in range(-p.rank, 0):
        if p.shape[d] != 1:
            unify(p.shape[d], 1 if d == -3 - axis else t.shape[d], why)


def _check_channels(op: Op, what: str, p: TensorType, w: TensorType) -> None:
    """Checks that a parameter of the weight w is one number, or has one for each output channel."""
    why = f"{op.op_name}: expected one {what}, or one for each output channel of {w}, got {p}"
    if p.rank > 1:
        raise ShapeError(why)
    if p.shape not in ((), (1,)):
        unify(p.shape[0], w.shape[0], why)


def _row_parameter(g: Graph, p: Value) -> Value:
    """A scale or zero point of the left operand of a product: a vector has one for each row."""
    return g.add(Unsqueeze((-1,)), p)[0] if p.rank == 1 and p.shape[0] != 1 else p


def _row_array(p: Array) -> Array:
    return p[:, None] if p.ndim == 1 and p.size != 1 else p


@register
class MatMulInteger(Op):
    """(a - a_zero) @ (b - b_zero) of u8 or i8 in i32. (ONNX MatMulInteger-10)

    a_zero is one number, [m] or [.., m, 1]; b_zero one number, [n] or [.., 1, n].
    """

    op_name = "matmul_integer"

    def infer(
        self, a: TensorType, b: TensorType, a_zero: TensorType | None = None, b_zero: TensorType | None = None
    ) -> TensorType:
        _check_integers(self, a=a, b=b)
        for what, t, zero, axis in (("a", a, a_zero, -2), ("b", b, b_zero, -1)):
            _check_zero(self, what, zero, t)
            if zero is not None:
                _check_along(self, f"zero point of {what}", zero, t, axis)
        return MatMul().infer(TensorType(a.shape, I32), TensorType(b.shape, I32))

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(2 * x[0].shape[-1], *x)

    def reference(self, a: Array, b: Array, a_zero: Array | None = None, b_zero: Array | None = None) -> Array:
        x, y = a.astype(np.int32), b.astype(np.int32)
        if a_zero is not None:
            x = x - _row_array(a_zero).astype(np.int32)
        if b_zero is not None:
            y = y - b_zero.astype(np.int32)
        return product(x, y)

    def decompose(
        self, g: Graph, a: Value, b: Value, a_zero: Value | None = None, b_zero: Value | None = None
    ) -> Value:
        if b.dtype.name != "i8" or not is_nought(b_zero):
            b = centred(g, b, b_zero, I16)
        if a.rank > 1 and b.rank == 2 and (a_zero is None or numel(a_zero.shape) == 1):
            shift = () if a_zero is None or is_nought(a_zero) else (a_zero,)
            return g.add(ByteMatMul(), a, b, *shift)[0]
        x = centred(g, a, None if a_zero is None else _row_parameter(g, a_zero), I16)
        return g.add(WideningMatMul(), x, b)[0]


@register
class ConvInteger(Convolving):
    """Convolution of (x - x_zero) with (w - w_zero) of u8 or i8 in i32; x_zero is padded. (ONNX ConvInteger-10)

    x_zero is one number, w_zero one or [O]; the attributes are those of `Conv`.
    """

    @property
    def _conv(self) -> Conv:
        return Conv(self.strides, self.dilations, self.pads, self.groups)

    def infer(
        self, x: TensorType, w: TensorType, x_zero: TensorType | None = None, w_zero: TensorType | None = None
    ) -> TensorType:
        _check_integers(self, x=x, w=w)
        _check_zero(self, "x", x_zero, x)
        _check_zero(self, "w", w_zero, w)
        if x_zero is not None:
            check_number(self, "zero point of x", x_zero, 1)
        if w_zero is not None:
            _check_channels(self, "zero point of w", w_zero, w)
        return self._conv.infer(TensorType(x.shape, I32), TensorType(w.shape, I32))

    def reference(self, x: Array, w: Array, x_zero: Array | None = None, w_zero: Array | None = None) -> Array:
        a, b = x.astype(np.int32), w.astype(np.int32)
        if x_zero is not None:
            a = a - x_zero.astype(np.int32).reshape(())
        if w_zero is not None:
            b = b - w_zero.astype(np.int32).reshape(-1, *(1,) * (w.ndim - 1))
        return self._conv.reference(a, b)

    def decompose(
        self, g: Graph, x: Value, w: Value, x_zero: Value | None = None, w_zero: Value | None = None
    ) -> Value:
        if w.dtype.name != "i8" or not is_nought(w_zero):
            w = centred(g, w, None if w_zero is None else _per_channel(g, w_zero, w.rank, 0), I16)
        shift = () if x_zero is None or is_nought(x_zero) else (x_zero,)
        return g.add(ByteConv(self.strides, self.dilations, self.pads, self.groups), x, w, *shift)[0]


def _per_channel(g: Graph, p: Value, rank: int, axis: int) -> Value:
    """A vector along one axis of a tensor of that rank."""
    if p.rank == 0 or p.shape == (1,):
        return p
    return g.add(Unsqueeze(tuple(d for d in range(rank) if d != axis)), p)[0]


def _multiplier(g: Graph, left: Value, right: Value, out: Value) -> Value:
    (product,) = g.add(Mul(), left, right)
    return g.add(Div(), product, out)[0]


def _check_scales(op: Op, *scales: TensorType) -> None:
    for t in scales:
        if t.dtype is not F32:
            raise DTypeError(f"{op.op_name}: expected f32 scales, got {t}; cast them first")


@register
class QLinearMatMul(Op):
    """The product of quantised a and b, quantised: i32 sums, requantised by a_scale b_scale / y_scale.

    Scales (f32) and zero points of a are one number, [m] or [.., m, 1], of b one, [n] or [.., 1, n], of y those that
    broadcast to the result. (ONNX QLinearMatMul-21)
    """

    op_name = "qlinear_matmul"

    def infer(
        self,
        a: TensorType,
        a_scale: TensorType,
        a_zero: TensorType,
        b: TensorType,
        b_scale: TensorType,
        b_zero: TensorType,
        y_scale: TensorType,
        y_zero: TensorType,
    ) -> TensorType:
        _check_scales(self, a_scale, b_scale, y_scale)
        _check_target(self, y_zero.dtype, y_zero)
        y = TensorType(MatMulInteger().infer(a, b, a_zero, b_zero).shape, y_zero.dtype)
        for what, p, t, axis in (
            ("scale of a", a_scale, a, -2), ("scale of b", b_scale, b, -1),
            ("scale of y", y_scale, y, -2), ("zero point of y", y_zero, y, -2),
        ):  # fmt: skip
            if min(a.rank, b.rank) < 2:
                check_number(self, what, p, y.rank)
            else:
                _check_along(self, what, p, t, axis)
        return y

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(2 * x[0].shape[-1] + 5, *x)

    def reference(
        self, a: Array, a_scale: Array, a_zero: Array, b: Array, b_scale: Array, b_zero: Array, y_scale: Array,
        y_zero: Array,
    ) -> Array:  # fmt: skip
        total = MatMulInteger().reference(a, b, a_zero, b_zero)
        multiplier = _row_array(a_scale) * b_scale / _row_array(y_scale)
        value = (total.astype(np.float32) * multiplier).reshape(total.shape)
        return _saturated(value, _row_array(y_zero), dtype_of(y_zero.dtype)).reshape(total.shape)

    def decompose(
        self, g: Graph, a: Value, a_scale: Value, a_zero: Value, b: Value, b_scale: Value, b_zero: Value,
        y_scale: Value, y_zero: Value,
    ) -> Value:  # fmt: skip
        (total,) = g.add(MatMulInteger(), a, b, a_zero, b_zero)
        multiplier = _multiplier(g, _row_parameter(g, a_scale), b_scale, _row_parameter(g, y_scale))
        zero = _row_parameter(g, y_zero)
        if total.rank == 0:
            multiplier, zero = (g.add(Reshape(()), p)[0] for p in (multiplier, zero))
        return g.add(Requantize(y_zero.dtype), total, multiplier, zero)[0]


@register
class QLinearConv(Op):
    """The convolution of quantised x and w, quantised: i32 sums, requantised by x_scale w_scale / y_scale.

    w_scale (f32) and w_zero are one number or [O], those of x and y one; the bias is i32 [O] in units of x_scale
    w_scale. The attributes are those of `Conv`. (ONNX QLinearConv-10)
    """

    op_name = "qlinear_conv"

    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    pads: tuple[Size, ...] = ()
    groups: int = 1

    @property
    def _conv(self) -> ConvInteger:
        return ConvInteger(self.strides, self.dilations, self.pads, self.groups)

    def infer(
        self,
        x: TensorType,
        x_scale: TensorType,
        x_zero: TensorType,
        w: TensorType,
        w_scale: TensorType,
        w_zero: TensorType,
        y_scale: TensorType,
        y_zero: TensorType,
        bias: TensorType | None = None,
    ) -> TensorType:
        _check_scales(self, x_scale, w_scale, y_scale)
        _check_target(self, y_zero.dtype, y_zero)
        for what, p in (("scale of x", x_scale), ("scale of y", y_scale), ("zero point of y", y_zero)):
            check_number(self, what, p, 1)
        _check_channels(self, "scale of w", w_scale, w)
        if bias is not None:
            if bias.dtype is not I32 or bias.rank != 1:
                raise DTypeError(f"qlinear_conv: expected an i32 bias of one axis, got {bias}")
            unify(bias.shape[0], w.shape[0], f"qlinear_conv: the bias {bias} and axis 0 of the weight {w}")
        return TensorType(self._conv.infer(x, w, x_zero, w_zero).shape, y_zero.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(2 * numel(x[3].shape[1:]) + 5, *x)

    def reference(
        self, x: Array, x_scale: Array, x_zero: Array, w: Array, w_scale: Array, w_zero: Array, y_scale: Array,
        y_zero: Array, bias: Array | None = None,
    ) -> Array:  # fmt: skip
        total = self._conv.reference(x, w, x_zero, w_zero)
        column = (-1,) + (1,) * (x.ndim - 2)
        if bias is not None:
            total = total + bias.reshape(column)
        multiplier = (x_scale.reshape(()) * w_scale / y_scale.reshape(())).reshape(column)
        return _saturated(total.astype(np.float32) * multiplier, y_zero.reshape(()), dtype_of(y_zero.dtype))

    def decompose(
        self, g: Graph, x: Value, x_scale: Value, x_zero: Value, w: Value, w_scale: Value, w_zero: Value,
        y_scale: Value, y_zero: Value, bias: Value | None = None,
    ) -> Value:  # fmt: skip
        (total,) = g.add(self._conv, x, w, x_zero, w_zero)
        if bias is not None:
            (total,) = g.add(Add(), total, _per_channel(g, bias, x.rank - 1, 0))
        multiplier = _multiplier(g, x_scale, w_scale, y_scale)
        return g.add(Requantize(y_zero.dtype), total, _per_channel(g, multiplier, x.rank - 1, 0), y_zero)[0]
