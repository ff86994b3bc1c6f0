"""Reductions, running sums and normalisations."""

from __future__ import annotations

import numpy as np

from cliff_cases.base import (
    AXES,
    CHANNELS,
    MICROSOFT,
    SIZES,
    SMALLER,
    Net,
    Pick,
    along,
    cases,
    image,
    ints,
    net,
    scalar,
)

ROWS = (0, 1, 2, 8, 64, 256, 1024, 4096, 16384, 65536)


@cases(
    "ReduceMax",
    "ReduceMin",
    "ReduceSum",
    "ReduceProd",
    size=SIZES,
    axis=AXES,
    row=ROWS,
    dtype=["f32", "f64", "i32", "i64"],
)
@cases(
    "ReduceMean",
    "ReduceL1",
    "ReduceL2",
    "ReduceSumSquare",
    size=SIZES,
    axis=AXES,
    row=ROWS,
    dtype=["f32", "f64", "i32"],
)
@cases("ReduceLogSum", "ReduceLogSumExp", size=SIZES, axis=AXES, row=ROWS, dtype=["f32", "f64"])
def reduce(p: Pick) -> Net:
    x, axis = along(p, 0.5, 1.5)
    return net(p.op, x, None if p.axis == "all" else ints(axis), keepdims=0)


@cases("ArgMax", "ArgMin", size=SIZES, axis=AXES[:3], row=ROWS, dtype=["f32", "f64", "i32", "u8"])
def arg_reduce(p: Pick) -> Net:
    x, axis = along(p)
    return net(p.op, x, axis=axis)


@cases("Softmax", "LogSoftmax", "Hardmax", size=SIZES, axis=AXES[:3], row=ROWS, dtype=["f32", "f64", "f16"])
@cases("LpNormalization", size=SIZES, axis=AXES[:3], row=ROWS, dtype=["f32", "f64"])
def normalise(p: Pick) -> Net:
    x, axis = along(p)
    return net(p.op, x, axis=axis)


@cases(
    "CumSum", size=SIZES, axis=AXES[:3], row=ROWS, dtype=["f32", "f64", "i32", "i64"], reverse=[0, 1], exclusive=[0, 1]
)
@cases("CumProd", opset=26, size=SIZES, axis=AXES[:3], row=ROWS, dtype=["f32", "f64"], reverse=[0, 1], exclusive=[0, 1])
def running(p: Pick) -> Net:
    x, axis = along(p, 0.9, 1.1)
    return net(p.op, x, scalar(axis, "i64"), reverse=p.reverse, exclusive=p.exclusive)


@cases(
    "LayerNormalization",
    "RMSNormalization",
    "SimplifiedLayerNormalization",
    opset=23,
    size=SIZES,
    row=(256, *ROWS[2:5], *ROWS[6:]),
    dtype=["f32", "f64", "f16"],
)
def layer_norm(p: Pick) -> Net:
    scales = [p.weights(p.row), p.weights(p.row)][: 2 if p.op == "LayerNormalization" else 1]
    return net(p.op, p.array(max(1, p.size // p.row), p.row), *scales, axis=-1)


@cases(
    "InstanceNormalization",
    "BatchNormalization",
    "GroupNormalization",
    "LRN",
    size=SIZES,
    channels=CHANNELS,
    rank=[2, 1, 3],
    dtype=["f32", "f64", "f16"],
)
def channel_norm(p: Pick) -> Net:
    x, c = p.array(*image(p, p.rank)), p.channels
    if p.op == "LRN":
        return net(p.op, x, size=5)
    scales = [p.weights(c), p.weights(c)]
    if p.op == "BatchNormalization":
        scales += [p.weights(c), p.weights(c, low=0.5)]
    return net(p.op, x, *scales, **({"num_groups": max(1, c // 4)} if p.op == "GroupNormalization" else {}))


@cases(
    "MeanVarianceNormalization",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "GlobalLpPool",
    size=SIZES,
    channels=CHANNELS,
    dtype=["f32"],
)
def whole_image(p: Pick) -> Net:
    return net(p.op, p.array(*image(p)))


@cases(
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
    size=SIZES,
    row=(256, 64, 1024, 4096),
    dtype=["f32", "f16"],
)
def skip_norm(p: Pick) -> Net:
    shape = (1, max(1, p.size // p.row), p.row)
    beta = [p.weights(p.row)] if p.op == "SkipLayerNormalization" else []
    return net(p.op, p.array(*shape), p.array(*shape), p.weights(p.row), *beta, domain=MICROSOFT)


@cases("EmbedLayerNormalization", size=SMALLER, row=(256, 64, 1024))
def embed_norm(p: Pick) -> Net:
    rows = max(1, p.size // p.row)
    ids = p.below(1000, 1, rows).astype(np.int32)
    tables = [p.weights(1000, p.row), p.weights(rows, p.row), p.weights(2, p.row), p.weights(p.row), p.weights(p.row)]
    return net(p.op, ids, ids % 2, *tables, outputs=2, domain=MICROSOFT)


@cases("BiasGelu", "FastGelu", "QuickGelu", "BiasSoftmax", "com.microsoft.Gelu", size=SIZES, row=(256, 64, 1024))
def microsoft_unary(p: Pick) -> Net:
    x = p.array(max(1, p.size // p.row), p.row)
    if p.op == "BiasSoftmax":
        return net(p.op, x, p.array(*x.shape), domain=MICROSOFT, axis=1, is_inner_broadcast=0)
    bias = [p.weights(p.row)] if p.op in ("BiasGelu", "FastGelu") else []
    return net(p.op.removeprefix("com.microsoft."), x, *bias, domain=MICROSOFT)
