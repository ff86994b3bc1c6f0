"""Casts, ONNX ops on quantised tensors, and recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlx.importers.onnx.mapping import Mapped, NodeContext, element_dtype, onnx_op
from rlx.importers.onnx.mappings.window import conv_attributes
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Value
from rlx.ir.shape import numel
from rlx.ops.bitwise import BitwiseAnd
from rlx.ops.elementwise import Add, Cast, Clip, Greater, Where
from rlx.ops.misc import BitCast
from rlx.ops.quant import (
    LARGEST,
    ConvInteger,
    DynamicQuantizeLinear,
    MatMulInteger,
    QLinearConv,
    QLinearMatMul,
    Quantize,
)
from rlx.ops.recurrent import Gru, Lstm, Rnn
from rlx.ops.strings import NumberToString, StringToNumber

__all__ = ["cast_target", "nothing_of_nothing", "recurrent_attributes", "zero_points"]

F32, U8 = DTYPES["f32"], DTYPES["u8"]
MODES = ("up", "down", "nearest")


# ---- casts


def cast_target(ctx: NodeContext) -> DType:
    """The element type that a Cast converts to."""
    return element_dtype(ctx.integer("to"))


@onnx_op("Cast")
def _cast(ctx: NodeContext) -> Mapped:
    to = cast_target(ctx)
    return _converted(ctx, ctx.value(), to)


@onnx_op("CastLike", since=15)
def _cast_like(ctx: NodeContext) -> Mapped:
    return _converted(ctx, ctx.value(), ctx.type(1).dtype)


def _converted(ctx: NodeContext, x: Value, to: DType) -> Value:
    """x in element type `to`; 8-bit floats saturate unless the node says otherwise."""
    saturates, mode = ctx.opset < 19 or bool(ctx.flag("saturate", 1)), ctx.text("round_mode", "up")
    if mode not in MODES:
        ctx.fail(f"round_mode={mode!r} is not supported, only {', '.join(MODES)}")
    if x.dtype is to:
        return x
    if to.kind == "s":
        return ctx.add(NumberToString(), x)
    if x.dtype.kind == "s":
        return ctx.add(StringToNumber(to), x)
    if to.name == "f8e8m0":
        x = _power_of_two(ctx, x, saturates, mode)
    elif to.is_float and to.bits == 8 and saturates:
        largest = LARGEST[to.name]
        wide = x if x.dtype.is_float and x.dtype.bits >= 16 else ctx.add(Cast(DTYPES["f32"]), x)
        x = ctx.add(Clip(-largest, largest), wide)
    return ctx.add(Cast(to), x)


def _power_of_two(ctx: NodeContext, x: Value, saturates: bool, mode: str) -> Value:
    """x as f64, rounded to a power of two up or down; what saturates is within those of f8e8m0 then."""
    x = ctx.cast(x, DTYPES["f64"])
    if saturates:
        x = ctx.add(Clip(2.0**-127, 2.0**127), x)
    if mode == "nearest":  # as a cast does
        return x
    bits = ctx.add(BitCast(DTYPES["i64"]), x)
    if mode == "up":
        bits = ctx.add(Add(), bits, ctx.constant((1 << 52) - 1, DTYPES["i64"]))
    return ctx.add(BitCast(DTYPES["f64"]), ctx.add(BitwiseAnd(), bits, ctx.constant(-(1 << 52), DTYPES["i64"])))


# ---- quantised tensors


@onnx_op("QuantizeLinear", since=10)
def _quantize(ctx: NodeContext) -> Mapped:
    x, scale = ctx.value(0), ctx.value(1)
    axis = ctx.integer("axis", 1) if ctx.opset >= 13 else 1
    block = ctx.integer("block_size", 0) if ctx.opset >= 21 else 0
    to = ctx.integer("output_dtype", 0) if ctx.opset >= 21 else 0
    precision = ctx.integer("precision", 0) if ctx.opset >= 23 else 0
    if precision not in (0, 1):
        ctx.fail(f"precision={precision} is not supported, only FLOAT")
    zero = ctx.optional(2)
    dtype = zero.dtype if zero is not None else element_dtype(to) if to else U8
    if to and element_dtype(to) is not dtype:
        ctx.fail(f"output_dtype is {element_dtype(to)}, the zero point {dtype}")
    saturate = ctx.opset < 19 or ctx.flag("saturate", 1)
    per_tensor = numel(scale.shape) == 1 and not block
    operands = [v if not per_tensor else ctx.reshape(v) for v in (scale, zero) if v is not None]
    return ctx.add(Quantize(None if per_tensor else axis, block, dtype, saturate), x, *operands)


@onnx_op("DynamicQuantizeLinear", since=11)
def _dynamic_quantize(ctx: NodeContext) -> tuple[Mapped, ...]:
    return ctx.add_all(DynamicQuantizeLinear(), ctx.value())


def zero_points(ctx: NodeContext, *pairs: tuple[int, int]) -> list[Value]:
    """Optional zero points as inputs in their places: (input with them, input that they are of), one or both."""
    given = [ctx.optional(i) for i, _ in pairs]
    while given and given[-1] is None:
        given.pop()
    return [
        zero if zero is not None else ctx.constant(0, ctx.type(of).dtype)
        for zero, (_, of) in zip(given, pairs, strict=False)
    ]


@onnx_op("MatMulInteger", since=10)
def _matmul_integer(ctx: NodeContext) -> Mapped:
    return ctx.add(MatMulInteger(), ctx.value(0), ctx.value(1), *zero_points(ctx, (2, 0), (3, 1)))


@onnx_op("ConvInteger", since=10)
def _conv_integer(ctx: NodeContext) -> Mapped:
    x, w = ctx.value(0), ctx.value(1)
    return ctx.add(ConvInteger(*conv_attributes(ctx, x, w)), x, w, *zero_points(ctx, (2, 0), (3, 1)))


@onnx_op("QLinearMatMul", since=10)
def _qlinear_matmul(ctx: NodeContext) -> Mapped:
    operands = [ctx.value(i) for i in range(8)]
    for i in (1, 4, 6):
        operands[i] = ctx.cast(operands[i], F32)
    return ctx.add(QLinearMatMul(), *operands)


@onnx_op("QLinearConv", since=10)
def _qlinear_conv(ctx: NodeContext) -> Mapped:
    operands = [ctx.value(i) for i in range(8)]
    bias = [ctx.value(8)] if ctx.has(8) else []
    return ctx.add(QLinearConv(*conv_attributes(ctx, operands[0], operands[3])), *operands, *bias)


# ---- recurrent layers


def recurrent_attributes(
    ctx: NodeContext,
) -> tuple[tuple[str, ...], tuple[float, ...], tuple[float, ...], float, bool]:
    """Activations, their parameters, clip and layout."""
    return (
        ctx.texts("activations", ()),
        ctx.floats("activation_alpha", ()),
        ctx.floats("activation_beta", ()),
        ctx.real("clip", 0.0),
        ctx.opset >= 14 and not ctx.node.domain and ctx.flag("layout"),
    )


def _recurrent(op: Any, names: tuple[str, ...], flag: str | None) -> Any:
    def handler(ctx: NodeContext) -> tuple[Mapped, ...]:
        direction = ctx.text("direction", "forward")
        attributes = recurrent_attributes(ctx)
        own = [ctx.flag(flag)] if flag else []
        r = ctx.value(2)
        hidden = ctx.integer("hidden_size", -1)
        if hidden >= 0 and r.shape[2] != hidden:
            ctx.fail(f"hidden_size={hidden} contradicts the recurrence weights {r.type}")
        given = {name: ctx.value(i) for i, name in enumerate(names, 3) if ctx.has(i)}
        made = op(tuple(given), direction, *attributes, *own)
        outputs = ctx.add_all(made, ctx.value(0), ctx.value(1), r, *given.values())
        return nothing_of_nothing(ctx, outputs, given)

    return handler


def nothing_of_nothing(ctx: NodeContext, made: tuple[Value, ...], given: Mapping[str, Value]) -> tuple[Mapped, ...]:
    """The outputs of a recurrent op where a sequence of length 0 has 0 as its last states.

    So it is in ONNX Runtime; ONNX itself says nothing, and ours is the initial state. `given`: optional inputs by name.
    """
    if "lengths" not in given or not {"initial_h", "initial_c"} & given.keys():
        return made
    every, *last = made
    first_axis = ctx.opset >= 14 and not ctx.node.domain and ctx.flag("layout")
    lengths = given["lengths"]
    batch = lengths.shape[0]
    some = ctx.add(Greater(), lengths, ctx.constant(0, lengths.dtype))
    some = ctx.reshape(some, *((batch, 1, 1) if first_axis else (1, batch, 1)))
    return every, *(ctx.add(Where(), some, state, ctx.constant(0, state.dtype)) for state in last)


_NAMES = ("bias", "lengths", "initial_h", "initial_c", "peepholes")
onnx_op("RNN", since=7)(_recurrent(Rnn, _NAMES[:3], None))
onnx_op("GRU", since=7)(_recurrent(Gru, _NAMES[:3], "linear_before_reset"))
onnx_op("LSTM", since=7)(_recurrent(Lstm, _NAMES, "input_forget"))
