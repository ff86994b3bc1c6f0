"""com.microsoft: what onnxruntime's optimiser, quantiser and exporters emit, other than attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.importers.onnx.mapping import MICROSOFT, Mapped, NodeContext, UnsupportedError, onnx_op
from rlx.importers.onnx.mappings.quant import nothing_of_nothing, recurrent_attributes, zero_points
from rlx.importers.onnx.mappings.window import conv_attributes, window_attributes
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ir.shape import Size, ceildiv, numel
from rlx.ops import activation
from rlx.ops.base import Op
from rlx.ops.bitwise import BitShift, BitwiseAnd
from rlx.ops.contract import Gemm, MatMul, PairDistances
from rlx.ops.conv import Conv
from rlx.ops.elementwise import Add, Clip, Less, Mul, Reciprocal, Sigmoid, Sqrt, Sub, Tanh, Where
from rlx.ops.encoded import Dequantize
from rlx.ops.index import Gather
from rlx.ops.layout import Concat, Expand, Full, Iota, Slice, Split
from rlx.ops.normalize import LayerNorm, RmsNorm, Softmax
from rlx.ops.pool import AveragePool, GlobalAveragePool
from rlx.ops.quant import DynamicQuantizeLinear, MatMulInteger, Quantize
from rlx.ops.recurrent import Recurrence
from rlx.ops.reduction import ReduceMax, ReduceMean, ReduceSum

F32, I8, I32, U8 = (DTYPES[name] for name in ("f32", "i8", "i32", "u8"))


def _plus(ctx: NodeContext, x: Value, i: int) -> Value:
    """x plus optional input i."""
    return ctx.add(Add(), x, ctx.value(i)) if ctx.has(i) else x


# ---- contraction and activations


@onnx_op("CDist", domain=MICROSOFT)
def _distances(ctx: NodeContext) -> Mapped:
    """The distance of each row of a [N, K] from each row of b [M, K] -> [N, M], as exporters of scikit-learn write it.

    From differences, not from products as in onnxruntime: the distance of equal rows is 0.
    """
    metric = ctx.text("metric", "sqeuclidean")
    if metric not in ("euclidean", "sqeuclidean"):
        ctx.fail(f"metric={metric!r} is not supported")
    a, b = ctx.value(0), ctx.value(1)
    return ctx.add(PairDistances(metric == "euclidean"), a, b)


@onnx_op("FusedMatMul", domain=MICROSOFT)
@onnx_op("TransposeMatMul", domain=MICROSOFT)
def _fused_matmul(ctx: NodeContext) -> Mapped:
    a, b = ctx.value(0), ctx.value(1)
    a, b = (_batch_behind(ctx, x) if ctx.flag(flag) else x for x, flag in ((a, "transBatchA"), (b, "transBatchB")))
    a, b = (_turned(ctx, x) if ctx.flag(flag) else x for x, flag in ((a, "transA"), (b, "transB")))
    y, alpha = ctx.add(MatMul(), a, b), ctx.real("alpha", 1.0)
    return y if alpha == 1 else ctx.add(Mul(), y, ctx.constant(alpha, y.dtype))


def _batch_behind(ctx: NodeContext, x: Value) -> Value:
    """[d1 .., d0, dN] of x [d0, d1 .., dN]."""
    return x if x.rank < 3 else ctx.transpose(x, *range(1, x.rank - 1), 0, x.rank - 1)


def _turned(ctx: NodeContext, x: Value) -> Value:
    return x if x.rank < 2 else ctx.transpose(x, *range(x.rank - 2), x.rank - 1, x.rank - 2)


@onnx_op("Gelu", domain=MICROSOFT)
def _gelu(ctx: NodeContext) -> Mapped:
    return ctx.add(activation.Gelu("none"), ctx.value())


@onnx_op("FastGelu", domain=MICROSOFT)
def _fast_gelu(ctx: NodeContext) -> Mapped:
    return ctx.add(activation.Gelu("tanh"), _plus(ctx, ctx.value(), 1))


@onnx_op("BiasGelu", domain=MICROSOFT)
def _bias_gelu(ctx: NodeContext) -> Mapped:
    return ctx.add(activation.Gelu("none"), _plus(ctx, ctx.value(), 1))


@onnx_op("QuickGelu", domain=MICROSOFT)
def _quick_gelu(ctx: NodeContext) -> Mapped:
    x, alpha = ctx.value(), ctx.real("alpha", 1.702)
    return ctx.add(Mul(), x, ctx.add(Sigmoid(), ctx.add(Mul(), x, ctx.constant(alpha, x.dtype))))


@onnx_op("BiasSplitGelu", domain=MICROSOFT)
def _bias_split_gelu(ctx: NodeContext) -> Mapped:
    x = _plus(ctx, ctx.value(), 1)
    half = x.shape[2] // 2
    starts: tuple[Any, ...] = (0, 0, 0), (0, 0, half)
    left, right = (ctx.add(Slice(at, (*x.shape[:2], half), (1, 1, 1)), x) for at in starts)
    return ctx.add(Mul(), left, ctx.add(activation.Gelu("none"), right))


@onnx_op("BiasSoftmax", domain=MICROSOFT)
def _bias_softmax(ctx: NodeContext) -> Mapped:
    axis = ctx.integer("axis", 1)
    ctx.ignore("is_inner_broadcast")
    x = _plus(ctx, ctx.value(), 1)
    if axis not in (-1, x.rank - 1):
        ctx.fail(f"axis={axis} is not supported, only the last")
    return ctx.add(Softmax(-1), x)


_ACTIVATIONS = ("Relu", "Tanh", "Sigmoid", "LeakyRelu", "Clip", "HardSigmoid")


def _activated(ctx: NodeContext, x: Value) -> Value:
    """x after the attributes `activation` and `activation_params`."""
    name, given = ctx.text("activation", ""), ctx.floats("activation_params", ())
    match name:
        case "":
            return x
        case "Relu":
            return ctx.add(activation.Relu(), x)
        case "Tanh":
            return ctx.add(Tanh(), x)
        case "Sigmoid":
            return ctx.add(Sigmoid(), x)
        case "LeakyRelu":
            return ctx.add(activation.LeakyRelu(*given[:1]), x)
        case "Clip":
            return ctx.add(Clip(*given[:2]), x)
        case "HardSigmoid":
            return ctx.add(activation.HardSigmoid(*given[:2]), x)
    raise UnsupportedError(f"activation={name!r} is not one of {', '.join(_ACTIVATIONS)}")


@onnx_op("FusedConv", domain=MICROSOFT)
def _fused_conv(ctx: NodeContext) -> Mapped:
    x, w = ctx.value(0), ctx.value(1)
    bias = [ctx.value(2)] if ctx.has(2) else []
    y = ctx.add(Conv(*conv_attributes(ctx, x, w)), x, w, *bias)
    return _activated(ctx, _plus(ctx, y, 3))


_OF_GEMM: dict[str, tuple[type[Op], tuple[float, ...]]] = {  # with the usual alpha and beta of those that have them
    "Elu": (activation.Elu, (1.0,)),
    "HardSigmoid": (activation.HardSigmoid, (0.2, 0.5)),
    "LeakyRelu": (activation.LeakyRelu, (0.01,)),
    "Relu": (activation.Relu, ()),
    "Sigmoid": (Sigmoid, ()),
    "Softplus": (activation.Softplus, ()),
    "Softsign": (activation.Softsign, ()),
    "Tanh": (Tanh, ()),
    "ThresholdedRelu": (activation.ThresholdedRelu, (1.0,)),
}


@onnx_op("FusedGemm", domain=MICROSOFT)
def _fused_gemm(ctx: NodeContext) -> Mapped:
    name = ctx.text("activation", "")
    if name not in _OF_GEMM:
        ctx.fail(f"activation={name!r} is not one of {', '.join(_OF_GEMM)}")
    made, usual = _OF_GEMM[name]
    own = [ctx.real(f"activation_{n}", u) for n, u in zip(("alpha", "beta"), usual, strict=False)]
    gemm = Gemm(ctx.real("alpha", 1.0), ctx.real("beta", 1.0), ctx.flag("transA"), ctx.flag("transB"))
    return ctx.add(made(*own), ctx.add(gemm, *ctx.values()))


@onnx_op("NhwcConv", domain=MICROSOFT)
def _nhwc_conv(ctx: NodeContext) -> Mapped:
    """x [N, H, W, C], w [O, H, W, C / groups]."""
    x, w = (_channels_first(ctx, ctx.value(i)) for i in (0, 1))
    bias = [ctx.value(2)] if ctx.has(2) else []
    return _channels_last(ctx, ctx.add(Conv(*conv_attributes(ctx, x, w)), x, w, *bias))


def _channels_first(ctx: NodeContext, x: Value) -> Value:
    return ctx.transpose(x, 0, x.rank - 1, *range(1, x.rank - 1))


def _channels_last(ctx: NodeContext, x: Value) -> Value:
    return ctx.transpose(x, 0, *range(2, x.rank), 1)


# ---- normalisation


@onnx_op("SimplifiedLayerNormalization")  # onnxruntime writes it in the domain of ONNX
def _simplified(ctx: NodeContext) -> tuple[Mapped, ...]:
    ctx.require("stash_type", 1)
    x, axis, epsilon = ctx.value(), ctx.integer("axis", -1), ctx.real("epsilon", 1e-5)
    y = ctx.add(RmsNorm(axis, epsilon), x, ctx.value(1))
    return y, _inverse_root(ctx, x, axis, epsilon) if ctx.wants(1) else None


def _inverse_root(ctx: NodeContext, x: Value, axis: int, epsilon: float) -> Value:
    wide, axes = ctx.cast(x, F32), tuple(range(axis % x.rank, x.rank))
    mean = ctx.add(ReduceMean(axes, True), ctx.add(Mul(), wide, wide))
    return ctx.add(Reciprocal(), ctx.add(Sqrt(), ctx.add(Add(), mean, ctx.constant(epsilon, F32))))


@onnx_op("SkipLayerNormalization", domain=MICROSOFT)
def _skip_layer_norm(ctx: NodeContext) -> tuple[Mapped, ...]:
    """x + skip (+ bias), normalised; output 3 is that sum."""
    total = _plus(ctx, ctx.add(Add(), ctx.value(0), ctx.value(1)), 4)
    beta = [ctx.value(3)] if ctx.has(3) else []
    return ctx.add(LayerNorm(-1, ctx.real("epsilon", 1e-12)), total, ctx.value(2), *beta), None, None, total


@onnx_op("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def _skip_simplified(ctx: NodeContext) -> tuple[Mapped, ...]:
    total = _plus(ctx, ctx.add(Add(), ctx.value(0), ctx.value(1)), 3)
    return ctx.add(RmsNorm(-1, ctx.real("epsilon", 1e-12)), total, ctx.value(2)), None, None, total


@onnx_op("EmbedLayerNormalization", domain=MICROSOFT)
def _embed(ctx: NodeContext) -> tuple[Mapped, ...]:
    """Word, position and segment embeddings, summed and normalised; then how long each mask is."""
    ids = ctx.value(0)
    total = ctx.add(Gather(0), ctx.value(2), ids)
    batch, length = ids.shape
    if ctx.has(8):
        places = ctx.add(Gather(0), ctx.value(3), ctx.value(8))
    else:
        table = ctx.value(3)
        places = ctx.add(Slice((0, 0), (length, table.shape[1]), (1, 1)), table)
    total = ctx.add(Add(), total, places)
    if ctx.has(1) and ctx.has(4):
        total = ctx.add(Add(), total, ctx.add(Gather(0), ctx.value(4), ctx.value(1)))
    y = ctx.add(LayerNorm(-1, ctx.real("epsilon", 1e-12)), total, ctx.value(5), ctx.value(6))
    ctx.ignore("mask_index_type")
    lengths = None
    if ctx.wants(1):
        if ctx.has(7):
            lengths = ctx.add(ReduceSum((1,), False), ctx.value(7))
        else:
            lengths = ctx.add(Full((batch,), 0, I32))  # as onnxruntime has it
    return y, lengths, total


# ---- quantised


@onnx_op("MatMulNBits", domain=MICROSOFT)
def _matmul_nbits(ctx: NodeContext) -> Mapped:
    """x @ w^T with w [N, K] in blocks along K of 4 or 8 bits, dequantised as a tensor of its own."""
    n, k = ctx.integer("N"), ctx.integer("K")
    bits, block = ctx.integer("bits", 4), ctx.integer("block_size")
    ctx.ignore("accuracy_level", "weight_prepacked")
    if bits not in (4, 8) or block < 1 or n < 1 or k < 1:
        ctx.fail(f"bits={bits}, block_size={block}, N={n}, K={k} is not supported")
    if ctx.has(4):
        ctx.fail("g_idx is not supported")
    x, scales = ctx.value(0), ctx.value(2)
    blocks = ceildiv(k, block)
    assert isinstance(blocks, int)
    packed = ctx.reshape(ctx.value(1), n, blocks * (block * bits // 8))
    quants = _unpacked(ctx, packed) if bits == 4 else packed
    scales = ctx.reshape(scales, n * blocks)
    zeros = _zeros(ctx, n, blocks, bits)
    if zeros.dtype.is_float:
        part = ctx.reshape(ctx.cast(quants, F32), n, blocks, block)
        part = ctx.add(Sub(), part, ctx.reshape(ctx.cast(zeros, F32), n, blocks, 1))
        w = ctx.add(Mul(), part, ctx.reshape(ctx.cast(scales, F32), n, blocks, 1))
        w = ctx.reshape(w, n, blocks * block)
    else:
        w = ctx.add(Dequantize(1, block, F32), quants, ctx.reshape(scales, n, blocks), ctx.reshape(zeros, n, blocks))
    if blocks * block != k:
        w = ctx.add(Slice((0, 0), (n, k), (1, 1)), w)
    y = ctx.add(MatMul(), x, ctx.cast(ctx.transpose(w, 1, 0), x.dtype))
    return _plus(ctx, y, 5)


def _unpacked(ctx: NodeContext, packed: Value) -> Value:
    """[.., n] bytes as [.., 2 n] 4-bit numbers, the low half first: an expression of the bytes that products read."""
    number = np.arange(int(packed.shape[-1]) * 2)
    byte = ctx.add(Gather(packed.rank - 1), packed, ctx.constant(number // 2, DTYPES["i64"]))
    halves = ctx.add(BitShift(True), byte, ctx.constant((number % 2 * 4).astype(np.uint8), U8))
    return ctx.add(BitwiseAnd(), halves, ctx.constant(15, U8))


def _zeros(ctx: NodeContext, n: int, blocks: int, bits: int) -> Value:
    """Zero points [N, blocks]: given (packed like the weights, or floats), or half of the range."""
    if not ctx.has(3):
        return ctx.constant(np.full(n * blocks, 1 << bits - 1), U8)
    zeros = ctx.value(3)
    if zeros.dtype.is_float or bits == 8:
        return zeros
    row = (blocks + 1) // 2
    both = _unpacked(ctx, ctx.reshape(zeros, n, row))
    return both if blocks == 2 * row else ctx.add(Slice((0, 0), (n, blocks), (1, 1)), both)


def _scaled(ctx: NodeContext, sums: Value, a_scale: Value, b_scale: Value) -> Value:
    return ctx.add(Mul(), ctx.cast(sums, F32), ctx.add(Mul(), ctx.reshape(a_scale), b_scale))


@onnx_op("DynamicQuantizeMatMul", domain=MICROSOFT)
def _dynamic_quantize_matmul(ctx: NodeContext) -> Mapped:
    """x quantised on the fly, times quantised weights."""
    b = ctx.value(1)
    a, a_scale, a_zero = ctx.add_all(DynamicQuantizeLinear(), ctx.value(0))
    zero = [ctx.value(3)] if ctx.has(3) else []
    sums = ctx.add(MatMulInteger(), a, b, a_zero, *(_one_axis(ctx, z) for z in zero))
    return _plus(ctx, _scaled(ctx, sums, a_scale, ctx.value(2)), 4)


def _one_axis(ctx: NodeContext, zero: Value) -> Value:
    return ctx.reshape(zero) if numel(zero.shape) == 1 else zero


@onnx_op("MatMulIntegerToFloat", domain=MICROSOFT)
def _matmul_integer_to_float(ctx: NodeContext) -> Mapped:
    a, b = ctx.value(0), ctx.value(1)
    zeros = zero_points(ctx, (4, 0), (5, 1))
    sums = ctx.add(MatMulInteger(), a, b, *(_one_axis(ctx, z) for z in zeros))
    return _plus(ctx, _scaled(ctx, sums, ctx.value(2), ctx.value(3)), 6)


def _dequantized(ctx: NodeContext, at: int) -> Value:
    """Inputs at (data), at + 1 (scale), at + 2 (zero point) as f32; scale and zero are one number or one a channel."""
    x, scale = ctx.value(at), ctx.value(at + 1)
    one = numel(scale.shape) == 1
    operands = [x, ctx.reshape(scale) if one else scale]
    if ctx.has(at + 2):
        operands.append(ctx.reshape(ctx.value(at + 2)) if one else ctx.value(at + 2))
    return ctx.add(Dequantize(None if one else 1, 0, F32), *operands)


def _quantized(ctx: NodeContext, x: Value, at: int, like: int = 0) -> Value:
    """x quantised with inputs at (scale) and at + 1 (zero point)."""
    zero = [ctx.reshape(ctx.value(at + 1))] if ctx.has(at + 1) else []
    to = zero[0].dtype if zero else ctx.type(like).dtype
    return ctx.add(Quantize(None, 0, to), x, ctx.reshape(ctx.value(at)), *zero)


def _q_binary(op: type[Op]) -> Any:
    def handler(ctx: NodeContext) -> Mapped:
        return _quantized(ctx, ctx.add(op(), _dequantized(ctx, 0), _dequantized(ctx, 3)), 6)

    return handler


onnx_op("QLinearAdd", domain=MICROSOFT)(_q_binary(Add))
onnx_op("QLinearMul", domain=MICROSOFT)(_q_binary(Mul))


@onnx_op("QGemm", domain=MICROSOFT)
def _q_gemm(ctx: NodeContext) -> Mapped:
    """The exact sums in i32 with the bias, scaled; rounded to 8 bits only where the result has a scale."""
    a, b = (_turned(ctx, ctx.value(i)) if ctx.flag(f) else ctx.value(i) for i, f in ((0, "transA"), (3, "transB")))
    zeros = [ctx.reshape(ctx.value(i)) if numel(ctx.type(i).shape) == 1 else ctx.value(i) for i in (2, 5)]
    sums = ctx.add(MatMulInteger(), a, b, *zeros)
    sums = ctx.add(Add(), sums, ctx.value(6)) if ctx.has(6) else sums
    scale = ctx.add(Mul(), ctx.reshape(ctx.value(1)), ctx.value(4))
    alpha = ctx.real("alpha", 1.0)
    scale = scale if alpha == 1 else ctx.add(Mul(), scale, ctx.constant(alpha, F32))
    y = ctx.add(Mul(), ctx.cast(sums, F32), scale)
    return _quantized(ctx, y, 7) if ctx.has(7) else y


@onnx_op("QLinearSigmoid", domain=MICROSOFT)
def _q_sigmoid(ctx: NodeContext) -> Mapped:
    return _quantized(ctx, ctx.add(Sigmoid(), _dequantized(ctx, 0)), 3)


@onnx_op("QLinearLeakyRelu", domain=MICROSOFT)
def _q_leaky_relu(ctx: NodeContext) -> Mapped:
    return _quantized(ctx, ctx.add(activation.LeakyRelu(ctx.real("alpha", 0.01)), _dequantized(ctx, 0)), 3)


@onnx_op("QLinearSoftmax", domain=MICROSOFT)
def _q_softmax(ctx: NodeContext) -> Mapped:
    if ctx.integer("opset", 13) < 13:
        ctx.fail("the softmax of opsets below 13 is not supported")
    return _quantized(ctx, ctx.add(Softmax(ctx.integer("axis", -1)), _dequantized(ctx, 0)), 3)


@onnx_op("QLinearGlobalAveragePool", domain=MICROSOFT)
def _q_global_average_pool(ctx: NodeContext) -> Mapped:
    x = _dequantized(ctx, 0)
    last = ctx.flag("channels_last")
    y = ctx.add(GlobalAveragePool(), _channels_first(ctx, x) if last else x)
    return _quantized(ctx, _channels_last(ctx, y) if last else y, 3)


@onnx_op("QLinearAveragePool", domain=MICROSOFT)
def _q_average_pool(ctx: NodeContext) -> Mapped:
    x, last = _dequantized(ctx, 0), ctx.flag("channels_last")
    x = _channels_first(ctx, x) if last else x
    window = window_attributes(ctx, x, 10_000)
    y = ctx.add(AveragePool(*window, ctx.flag("ceil_mode"), ctx.flag("count_include_pad")), x)
    return _quantized(ctx, _channels_last(ctx, y) if last else y, 3)


@onnx_op("QLinearReduceMean", static=(5,), domain=MICROSOFT)
def _q_reduce_mean(ctx: NodeContext) -> Mapped:
    axes = ctx.ints("axes", ()) or None
    return _quantized(ctx, ctx.add(ReduceMean(axes, ctx.flag("keepdims", 1)), _dequantized(ctx, 0)), 3)


@onnx_op("QLinearConcat", domain=MICROSOFT)
def _q_concat(ctx: NodeContext) -> Mapped:
    """Inputs: scale and zero of the result, then data, scale and zero of each part."""
    parts = [_dequantized(ctx, i) for i in range(2, len(ctx.node.inputs), 3)]
    return _quantized(ctx, ctx.add(Concat(ctx.integer("axis")), *parts), 0, 2)


@onnx_op("QuantizeLinear", domain=MICROSOFT)
def _quantize(ctx: NodeContext) -> Mapped:
    if numel(ctx.type(1).shape) == 1:
        return _quantized(ctx, ctx.value(), 1)
    operands = [ctx.value(i) for i in range(3) if ctx.has(i)]
    to = operands[2].dtype if len(operands) > 2 else U8
    return ctx.add(Quantize(ctx.integer("axis", 1), 0, to), *operands)


@onnx_op("DequantizeLinear", domain=MICROSOFT)
def _dequantize(ctx: NodeContext) -> Mapped:
    operands = [ctx.value(i) for i in range(3) if ctx.has(i)]
    one = numel(operands[1].shape) == 1
    axis = ctx.integer("axis", 1)
    if one:
        operands[1:] = [ctx.reshape(v) for v in operands[1:]]
    return ctx.add(Dequantize(None if one else axis, 0, operands[1].dtype), *operands)


@onnx_op("DynamicQuantizeLSTM", static=(9,), domain=MICROSOFT)
def _dynamic_quantize_lstm(ctx: NodeContext) -> tuple[Mapped, ...]:
    """An LSTM whose weights w [D, I, 4 H] and r [D, H, 4 H] are quantised; x and h are quantised on the fly."""
    x, w, r = (ctx.value(i) for i in range(3))
    if not x.rank == w.rank == r.rank == 3:
        raise ShapeError(f"DynamicQuantizeLSTM: expected x, W and R of three axes, got {x.type}, {w.type}, {r.type}")
    (d, size, n), (steps, batch, _) = w.shape, x.shape
    w_scale, w_zero, r_scale, r_zero = (_of_gates(ctx, i, d, n) for i in (8, 9, 10, 11))
    lengths = ctx.cast(ctx.value(4), I32) if ctx.has(4) else None
    q, scale, zero = ctx.add_all(DynamicQuantizeLinear(), x if lengths is None else _within(ctx, x, lengths))
    columns = ctx.reshape(ctx.transpose(w, 1, 0, 2), size, d * n)
    operands = [ctx.reshape(q, steps * batch, size), columns, zero]
    if not _is_nought(ctx, 9):
        operands.append(ctx.reshape(w_zero, d * n))
    sums = ctx.cast(ctx.add(MatMulInteger(), *operands), F32)
    factor = ctx.add(Mul(), ctx.reshape(w_scale, d * n), scale)
    inputs = ctx.reshape(ctx.add(Mul(), sums, factor), steps, batch, d * n)
    if r.dtype is not r_zero.dtype:
        raise DTypeError(f"DynamicQuantizeLSTM: expected R and its zero point of one type, got {r.type}, {r_zero.type}")
    given: dict[str, Value] = {"scale": r_scale}
    if r.dtype is not I8 or not _is_nought(ctx, 11):
        r, given["zero"] = _signed(ctx, r), _signed(ctx, r_zero)
    if ctx.has(3):
        given["bias"] = ctx.add(Add(), *ctx.add_all(Split(1, (n, n)), ctx.value(3)))
    if lengths is not None:
        given["lengths"] = lengths
    given |= {k: ctx.value(i) for i, k in enumerate(("initial_h", "initial_c", "peepholes"), 5) if ctx.has(i)}
    ctx.ignore("hidden_size")
    direction, attributes = ctx.text("direction", "forward"), recurrent_attributes(ctx)
    forget = ctx.flag("input_forget")
    op = Recurrence(tuple(given), "lstm", direction, *attributes, input_forget=forget, round_state=True)
    made = ctx.add_all(op, inputs, ctx.transpose(r, 0, 2, 1), *given.values())
    return nothing_of_nothing(ctx, made, given)


def _within(ctx: NodeContext, x: Value, lengths: Value) -> Value:
    """x [T, B, I] with 0 after the end of the longest sequence: ONNX Runtime takes no range of what lies there."""
    reached = ctx.add(Less(), ctx.add(Iota(x.shape[0], dtype=I32)), ctx.add(ReduceMax((0,), False), lengths))
    return ctx.add(Where(), ctx.reshape(reached, x.shape[0], 1, 1), x, ctx.constant(0, x.dtype))


def _of_gates(ctx: NodeContext, at: int, d: Size, n: Size) -> Value:
    """A parameter of each direction, [D] or [D, 4 H], as [D, 4 H]."""
    v = ctx.value(at)
    if v.rank not in (1, 2):
        raise ShapeError(f"DynamicQuantizeLSTM: expected input {at} of shape [D] or [D, 4 H], got {v.type}")
    return v if v.rank == 2 else ctx.add(Expand((d, n)), ctx.reshape(v, d, 1))


def _signed(ctx: NodeContext, v: Value) -> Value:
    """Bytes as i8; those of u8 less 128."""
    return v if v.dtype is I8 else ctx.cast(ctx.add(Sub(), ctx.cast(v, I32), ctx.constant(128, I32)), I8)


def _is_nought(ctx: NodeContext, at: int) -> bool:
    known = ctx.known(at)
    return known is not None and not np.any(known.array())
