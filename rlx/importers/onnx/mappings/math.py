"""ONNX ops that compute with elements: elementwise, reductions, normalisation, contraction, dequantisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from rlx.importers.onnx.mapping import Mapped, NodeContext, element_dtype, onnx_op
from rlx.importers.onnx.mappings.layout import axes_argument
from rlx.importers.onnx.mappings.loss import training_batch_norm
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ir.shape import bounds, numel, upper
from rlx.ops import activation, elementwise, reduction
from rlx.ops.base import Op, axis_of
from rlx.ops.contract import Gemm, MatMul
from rlx.ops.elementwise import (
    Add,
    Cast,
    Clip,
    Div,
    IsInf,
    Maximum,
    Minimum,
    Mod,
    Mul,
    Pow,
    Reciprocal,
    Sqrt,
    Sub,
)
from rlx.ops.encoded import Dequantize
from rlx.ops.layout import Reshape
from rlx.ops.normalize import BatchNorm, LayerNorm, LogSoftmax, RmsNorm, Softmax
from rlx.ops.reduction import ArgMax, ArgMin, ReduceMean

F32 = DTYPES["f32"]
FLT_MAX = float(np.finfo(np.float32).max)

# ---- elementwise ops that differ in nothing but their names; float attributes carry the same names

_SAME: dict[tuple[str, int], type[Op]] = {
    ("Abs", 6): elementwise.Abs,
    ("Add", 7): elementwise.Add,
    ("And", 7): elementwise.And,
    ("Ceil", 6): elementwise.Ceil,
    ("Celu", 12): activation.Celu,
    ("Cos", 7): elementwise.Cos,
    ("Div", 7): elementwise.Div,
    ("Elu", 6): activation.Elu,
    ("Equal", 7): elementwise.Equal,
    ("Erf", 9): elementwise.Erf,
    ("Exp", 6): elementwise.Exp,
    ("Floor", 6): elementwise.Floor,
    ("Greater", 7): elementwise.Greater,
    ("GreaterOrEqual", 12): elementwise.GreaterEqual,
    ("HardSigmoid", 6): activation.HardSigmoid,
    ("HardSwish", 14): activation.HardSwish,
    ("IsNaN", 9): elementwise.IsNan,
    ("LeakyRelu", 6): activation.LeakyRelu,
    ("Less", 7): elementwise.Less,
    ("LessOrEqual", 12): elementwise.LessEqual,
    ("Log", 6): elementwise.Log,
    ("Mish", 18): activation.Mish,
    ("Mul", 7): elementwise.Mul,
    ("Neg", 6): elementwise.Neg,
    ("Not", 1): elementwise.Not,
    ("Or", 7): elementwise.Or,
    ("PRelu", 7): activation.PRelu,
    ("Reciprocal", 6): elementwise.Reciprocal,
    ("Relu", 6): activation.Relu,
    ("Round", 11): elementwise.Round,
    ("Selu", 6): activation.Selu,
    ("Sigmoid", 6): elementwise.Sigmoid,
    ("Sign", 9): elementwise.Sign,
    ("Sin", 7): elementwise.Sin,
    ("Softplus", 1): activation.Softplus,
    ("Softsign", 1): activation.Softsign,
    ("Sqrt", 6): elementwise.Sqrt,
    ("Sub", 7): elementwise.Sub,
    ("Tanh", 6): elementwise.Tanh,
    ("ThresholdedRelu", 10): activation.ThresholdedRelu,
    ("Xor", 7): elementwise.Xor,
}


def _same(op: type[Op]) -> Any:
    names = [f.name for f in fields(op)]  # type: ignore[arg-type]

    def handler(ctx: NodeContext) -> Mapped:
        attributes = {name: ctx.real(name) for name in names if ctx.given(name)}
        return ctx.add(op(**attributes), *_stretched(ctx, ctx.values()))

    return handler


def _stretched(ctx: NodeContext, values: Sequence[Value]) -> list[Value]:
    """Operands whose size is 0 or 1, as the run decides, as 1 where another has 2 or more: only that fits (a guard)."""
    wide = {axis for v in values for axis in range(-v.rank, 0) if (bounds(v.shape[axis])[0] or 0) > 1}
    made = []
    for v in values:
        narrow = {axis for axis in wide if axis >= -v.rank and v.shape[axis] != 1 and upper(v.shape[axis]) == 1}
        shape = [1 if axis in narrow else v.shape[axis] for axis in range(-v.rank, 0)]
        made.append(ctx.reshape(v, *shape) if narrow else v)
    return made


for (_name, _since), _op in _SAME.items():
    onnx_op(_name, since=_since)(_same(_op))


@onnx_op("Gelu", since=20)
def _gelu(ctx: NodeContext) -> Mapped:
    return ctx.add(activation.Gelu(ctx.text("approximate", "none")), ctx.value())


@onnx_op("Swish", since=24)
def _swish(ctx: NodeContext) -> Mapped:
    alpha = ctx.real("alpha", 1.0)
    x = ctx.value()
    if alpha == 1:
        return ctx.add(activation.Silu(), x)
    return ctx.add(Mul(), x, ctx.add(elementwise.Sigmoid(), ctx.add(Mul(), x, ctx.constant(alpha, x.dtype))))


@onnx_op("IsInf", since=10)
def _is_inf(ctx: NodeContext) -> Mapped:
    return ctx.add(IsInf(ctx.flag("detect_negative", 1), ctx.flag("detect_positive", 1)), ctx.value())


@onnx_op("Pow", since=7)
def _pow(ctx: NodeContext) -> Mapped:
    return ctx.add(Pow(), ctx.value(0), ctx.value(1))


@onnx_op("Mod", since=10)
def _mod(ctx: NodeContext) -> Mapped:
    fmod = ctx.flag("fmod")
    if ctx.type().dtype.is_float and not fmod and ctx.opset < 28:
        ctx.fail(f"fmod=0 of floats is not part of opset {ctx.opset}")
    return ctx.add(Mod(fmod), ctx.value(0), ctx.value(1))


def _folded(ctx: NodeContext, op: Op) -> Value:
    total, *rest = ctx.values()
    for value in rest:
        total = ctx.add(op, total, value)
    return total


@onnx_op("Sum", since=6)
def _sum(ctx: NodeContext) -> Mapped:
    return _folded(ctx, Add())


@onnx_op("Min", since=6)
def _min(ctx: NodeContext) -> Mapped:
    return _folded(ctx, Minimum())


@onnx_op("Max", since=6)
def _max(ctx: NodeContext) -> Mapped:
    return _folded(ctx, Maximum())


@onnx_op("Mean", since=6)
def _mean(ctx: NodeContext) -> Mapped:
    total = _folded(ctx, Add())
    return ctx.add(Div(), total, ctx.constant(len(ctx.node.inputs), total.dtype))


@onnx_op("Clip", since=6, until=10)
def _clip_6(ctx: NodeContext) -> Mapped:
    return ctx.add(Clip(ctx.real("min", -FLT_MAX), ctx.real("max", FLT_MAX)), ctx.value())


@onnx_op("Clip", since=11)
def _clip(ctx: NodeContext) -> Mapped:
    x = ctx.value()
    known = [ctx.known(i) if ctx.has(i) else None for i in (1, 2)]
    if any(k is None and ctx.has(i) for i, k in zip((1, 2), known, strict=True)):  # a limit is run-time data
        for i, op in ((1, Maximum()), (2, Minimum())):
            x = ctx.add(op, x, ctx.value(i)) if ctx.has(i) else x
        return x
    limits = [None if k is None else k.item() for k in known]
    numbers = [v if isinstance(v, int | float) else None for v in limits]
    if numbers != limits:
        ctx.fail(f"the limits {limits} are sizes, not numbers")
    if numbers == [None, None]:
        return x
    return ctx.add(Clip(numbers[0], numbers[1]), x)


# ---- reductions

_REDUCE: dict[str, type[Op]] = {
    "ReduceL1": reduction.ReduceL1,
    "ReduceL2": reduction.ReduceL2,
    "ReduceLogSum": reduction.ReduceLogSum,
    "ReduceLogSumExp": reduction.ReduceLogSumExp,
    "ReduceMax": reduction.ReduceMax,
    "ReduceMean": reduction.ReduceMean,
    "ReduceMin": reduction.ReduceMin,
    "ReduceProd": reduction.ReduceProd,
    "ReduceSum": reduction.ReduceSum,
    "ReduceSumSquare": reduction.ReduceSumSquare,
}

# Of integers: in f64, then back, towards zero. The specification's own function for ReduceL2 has f32, which holds fewer
# integers exactly; sums in the integers' own type would wrap where the result does not.
_THROUGH_F64 = (reduction.ReduceL2, reduction.ReduceLogSum, reduction.ReduceLogSumExp)


def _reduce(op: type[Op], as_input_since: int) -> Any:
    def handler(ctx: NodeContext) -> Mapped:
        axes = axes_argument(ctx, as_input_since)
        keeps_all = ctx.opset >= as_input_since and ctx.flag("noop_with_empty_axes")
        if not axes:
            axes = () if keeps_all else None
        reduce: Any = op(axes=axes, keepdims=ctx.flag("keepdims", 1))  # type: ignore[call-arg]
        x = ctx.value()
        if x.dtype.kind == "b":
            return ctx.add(Cast(x.dtype), ctx.add(reduce, ctx.add(Cast(DTYPES["u8"]), x)))
        if op in _THROUGH_F64 and x.dtype.kind in "iu":
            return ctx.add(Cast(x.dtype), ctx.add(reduce, ctx.add(Cast(DTYPES["f64"]), x)))
        return ctx.add(reduce, x)

    return handler


for _name, _op in _REDUCE.items():
    _since = 13 if _name == "ReduceSum" else 18
    onnx_op(_name, static=(1,))(_reduce(_op, _since))


def _arg(op: type[Op]) -> Any:
    def handler(ctx: NodeContext) -> Mapped:
        last = ctx.opset >= 12 and ctx.flag("select_last_index")
        made = op(axis=ctx.integer("axis", 0), keepdims=ctx.flag("keepdims", 1), last=last)  # type: ignore[call-arg]
        return ctx.add(made, ctx.value())

    return handler


onnx_op("ArgMax")(_arg(ArgMax))
onnx_op("ArgMin")(_arg(ArgMin))


# ---- normalisation


def _softmax(op: type[Op], flattens: bool) -> Any:
    def handler(ctx: NodeContext) -> Mapped:
        x = ctx.value()
        axis = axis_of(ctx.integer("axis", 1 if flattens else -1), x.rank, ctx.node.op_type)
        if not flattens or axis == x.rank - 1:
            return ctx.add(op(axis=axis), x)  # type: ignore[call-arg]
        # before opset 13 all axes from `axis` on are one
        flat = ctx.add(Reshape((*x.shape[:axis], numel(x.shape[axis:]))), x)
        return ctx.add(Reshape(x.shape), ctx.add(op(axis=-1), flat))  # type: ignore[call-arg]

    return handler


for _name, _op in (("Softmax", Softmax), ("LogSoftmax", LogSoftmax)):
    onnx_op(_name, since=1)(_softmax(_op, flattens=True))
    onnx_op(_name, since=13)(_softmax(_op, flattens=False))


@onnx_op("BatchNormalization", since=7)
def _batch_norm(ctx: NodeContext) -> Mapped | tuple[Mapped, ...]:
    if ctx.opset >= 14 and ctx.flag("training_mode"):
        return training_batch_norm(ctx)
    ctx.ignore("momentum")
    if ctx.opset < 9 and not ctx.flag("spatial", 1) and ctx.type().rank > 2:
        ctx.fail("spatial=0 is not supported")
    if any(ctx.wants(i) for i in range(1, 5)):
        ctx.fail("its outputs for training (running mean and variance) are not supported")
    return ctx.add(BatchNorm(ctx.real("epsilon", 1e-5)), *(ctx.value(i) for i in range(5)))


@onnx_op("LayerNormalization", since=17)
def _layer_norm(ctx: NodeContext) -> tuple[Mapped, ...]:
    axis, epsilon = ctx.integer("axis", -1), ctx.real("epsilon", 1e-5)
    ctx.require("stash_type", 1)
    x = ctx.value()
    y = ctx.add(LayerNorm(axis, epsilon), *ctx.values())
    if not ctx.wants(1) and not ctx.wants(2):
        return y, None, None
    wide = x if x.dtype is F32 else ctx.add(Cast(F32), x)
    axes = tuple(range(axis_of(axis, x.rank, "LayerNormalization"), x.rank))
    mean = ctx.add(ReduceMean(axes), wide)
    centred = ctx.add(Sub(), wide, mean)
    variance = ctx.add(ReduceMean(axes), ctx.add(Mul(), centred, centred))
    deviation = ctx.add(Sqrt(), ctx.add(Add(), variance, ctx.constant(epsilon, F32)))
    return y, mean, ctx.add(Reciprocal(), deviation)


@onnx_op("RMSNormalization", since=23)
def _rms_norm(ctx: NodeContext) -> Mapped:
    ctx.require("stash_type", 1)
    return ctx.add(RmsNorm(ctx.integer("axis", -1), ctx.real("epsilon", 1e-5)), ctx.value(0), ctx.value(1))


# ---- contraction


@onnx_op("MatMul")
def _matmul(ctx: NodeContext) -> Mapped:
    return ctx.add(MatMul(), ctx.value(0), ctx.value(1))


@onnx_op("Gemm", since=7)
def _gemm(ctx: NodeContext) -> Mapped:
    op = Gemm(ctx.real("alpha", 1.0), ctx.real("beta", 1.0), ctx.flag("transA"), ctx.flag("transB"))
    return ctx.add(op, *ctx.values())


@onnx_op("DequantizeLinear", since=10)
def _dequantize(ctx: NodeContext) -> Mapped:
    x, scale = ctx.value(0), ctx.value(1)
    axis = ctx.integer("axis", 1) if ctx.opset >= 13 else 1
    block = ctx.integer("block_size", 0) if ctx.opset >= 21 else 0
    to = ctx.integer("output_dtype", 0) if ctx.opset >= 23 else 0
    dtype = element_dtype(to) if to else scale.dtype
    per_tensor = numel(scale.shape) == 1 and not block
    operands = [x, _scalar(ctx, scale) if per_tensor else scale]
    if ctx.has(2):
        zero = ctx.value(2)
        operands.append(_scalar(ctx, zero) if per_tensor else zero)
    return ctx.add(Dequantize(None if per_tensor else axis, block, dtype), *operands)


def _scalar(ctx: NodeContext, x: Value) -> Value:
    return x if x.rank == 0 else ctx.add(Reshape(()), x)
