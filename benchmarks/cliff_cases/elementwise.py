"""Ops element by element, and numbers of few bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper

from cliff_cases.base import DTYPES, FLOATS, MICROSOFT, NUMBERS, SIZES, Array, Fixed, Net, Pick, cases, net, scalar

UNARY = [
    "Abs",
    "Acos",
    "Asin",
    "Atan",
    "Atanh",
    "Asinh",
    "Ceil",
    "Celu",
    "Cos",
    "Cosh",
    "Elu",
    "Erf",
    "Exp",
    "Floor",
    "Gelu",
    "HardSigmoid",
    "HardSwish",
    "Identity",
    "IsInf",
    "IsNaN",
    "LeakyRelu",
    "Mish",
    "Neg",
    "Relu",
    "Round",
    "Selu",
    "Shrink",
    "Sigmoid",
    "Sign",
    "Sin",
    "Sinh",
    "Softplus",
    "Softsign",
    "Tan",
    "Tanh",
    "ThresholdedRelu",
    "Dropout",
]
BOUNDED = ("Acos", "Asin", "Atanh")


@cases(*UNARY, size=SIZES, dtype=FLOATS)
def unary(p: Pick) -> Net:
    edge = 0.99 if p.op in BOUNDED else 4
    return net(p.op, p.array(p.size, low=-edge, high=edge))


@cases("Swish", opset=24, size=SIZES, dtype=FLOATS)
def swish(p: Pick) -> Net:
    return net(p.op, p.array(p.size))


@cases("Acosh", "Log", "Reciprocal", "Sqrt", size=SIZES, dtype=FLOATS)
def positive(p: Pick) -> Net:
    return net(p.op, p.array(p.size, low=1.1, high=9))


@cases("Not", size=SIZES, dtype=["bool"])
@cases("BitwiseNot", size=SIZES, dtype=["i32", "u8", "i64"])
def flip(p: Pick) -> Net:
    return net(p.op, p.array(p.size))


@cases("Clip", size=SIZES, dtype=NUMBERS)
def clip(p: Pick) -> Net:
    return net(p.op, p.array(p.size), scalar(0, p.dtype), scalar(1, p.dtype))


SHAPES = ("same", "scalar", "row", "column", "outer")


def pair(p: Pick, dtype: str | None = None, **span: float) -> tuple[Array, Array]:
    """Two operands that broadcast."""
    n, m = p.shape(2)
    first = (n, 1) if p.shapes == "outer" else (n, m)
    second = {"same": (n, m), "scalar": (), "row": (m,), "column": (n, 1), "outer": (1, m)}[p.shapes]
    return p.array(*first, dtype=dtype, **span), p.array(*second, dtype=dtype, **span)


@cases("Add", "Sub", "Mul", "Max", "Min", size=SIZES, dtype=NUMBERS, shapes=SHAPES)
@cases("Mean", "Sum", size=SIZES, dtype=["f32", "f64"], shapes=SHAPES)
@cases("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", size=SIZES, dtype=NUMBERS, shapes=SHAPES)
@cases("And", "Or", "Xor", size=SIZES, dtype=["bool"], shapes=SHAPES)
@cases("BitwiseAnd", "BitwiseOr", "BitwiseXor", size=SIZES, dtype=["i32", "u8", "i64"], shapes=SHAPES)
def binary(p: Pick) -> Net:
    return net(p.op, *pair(p))


@cases("Div", "Mod", "Pow", size=SIZES, dtype=["f32", "f64", "i32", "i64"], shapes=SHAPES)
def divide(p: Pick) -> Net:
    a, b = pair(p, low=0.5, high=3)
    small = np.abs(b) % 5 + 1
    attributes = {"fmod": 1} if p.op == "Mod" and p.dtype.startswith("f") else {}
    return net(p.op, a, np.asarray(small, b.dtype), **attributes)


@cases("PRelu", size=SIZES, dtype=["f32", "f64"], shapes=["row", "same", "scalar"])
def prelu(p: Pick) -> Net:
    return net(p.op, *pair(p))


@cases("BitShift", size=SIZES, dtype=["u32", "u8", "u64"], shapes=SHAPES)
def bit_shift(p: Pick) -> Net:
    a, b = pair(p)
    return net(p.op, a, np.asarray(b % 8, b.dtype), direction="LEFT")


@cases("Where", size=SIZES, dtype=NUMBERS, shapes=SHAPES)
def where(p: Pick) -> Net:
    a, b = pair(p)
    return net(p.op, p.array(*np.broadcast_shapes(a.shape, b.shape), dtype="bool"), a, b)


CAST = ("f32", "f16", "bf16", "f64", "i32", "i64", "u8", "i8", "bool")


@cases("Cast", size=SIZES, dtype=CAST, to=["i32", "f32", "f16", "bf16", "f64", "i64", "u8", "bool"])
def cast(p: Pick) -> Net:
    return net(p.op, p.array(p.size), to=helper.np_dtype_to_tensor_dtype(np.dtype(DTYPES[p.to])))


@cases("CastLike", size=SIZES, dtype=CAST, to=["i32", "f32", "f16", "f64", "i64"])
def cast_like(p: Pick) -> Net:
    return net(p.op, p.array(p.size), p.array(1, dtype=p.to))


@cases("QuantizeLinear", "com.microsoft.QuantizeLinear", size=SIZES, axis=["none", "0", "1"], to=["u8", "i8"])
@cases(
    "DequantizeLinear", "com.microsoft.DequantizeLinear", size=SIZES, axis=["none", "0", "1"], to=["u8", "i8", "i32"]
)
def quantise(p: Pick) -> Net:
    n, m = p.shape(2)
    count = {"none": (), "0": (n,), "1": (m,)}[p.axis]
    op, domain = p.op.removeprefix("com.microsoft."), MICROSOFT if "." in p.op else ""
    x = p.array(n, m) if op == "QuantizeLinear" else p.array(n, m, dtype=p.to)
    scales = [p.weights(*count, low=0.01, high=0.1), Fixed(np.zeros(count, DTYPES[p.to]))]
    return net(op, x, *scales, domain=domain, **({} if p.axis == "none" else {"axis": int(p.axis)}))


@cases("DynamicQuantizeLinear", size=SIZES)
def dynamic_quantise(p: Pick) -> Net:
    return net(p.op, p.array(p.size), outputs=3)


@cases("QLinearAdd", "QLinearMul", size=SIZES, shapes=SHAPES[:4], dtype=["u8", "i8"])
def qlinear_binary(p: Pick) -> Net:
    a, b = pair(p)
    way = [scalar(0.1), scalar(20, p.dtype)]
    return net(p.op, a, *way, b, *way, scalar(0.3), scalar(50, p.dtype), domain=MICROSOFT)


@cases("QLinearLeakyRelu", "QLinearSigmoid", "QLinearSoftmax", size=SIZES, dtype=["u8", "i8"])
@cases("QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearReduceMean", size=SIZES, dtype=["u8", "i8"])
def qlinear_unary(p: Pick) -> Net:
    n, m = p.shape(2)
    extra: dict[str, dict[str, Any]] = {
        "QLinearSoftmax": {"opset": 13},
        "QLinearReduceMean": {"axes": [3]},
        "QLinearAveragePool": {"kernel_shape": [3, 3], "pads": [1] * 4},
    }
    x = p.array(1, 4, max(1, n // 4), m)
    scale = 1 / 256 if p.op == "QLinearSoftmax" else 0.05
    return net(
        p.op,
        x,
        scalar(0.05),
        scalar(20, p.dtype),
        scalar(scale),
        scalar(0, p.dtype),
        domain=MICROSOFT,
        **extra.get(p.op, {}),
    )
