"""ONNX ops that the standard defines by others: losses, gates, caches, convolution and attention with a state."""

from __future__ import annotations

from rlx.importers.onnx.mapping import Mapped, NodeContext, onnx_op
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ops.activation import Silu
from rlx.ops.base import axis_of
from rlx.ops.conv import Conv
from rlx.ops.elementwise import Add, Div, Equal, Mod, Mul, Neg, Sigmoid, Where
from rlx.ops.index import Gather, GatherElements
from rlx.ops.layout import Concat, Expand, Iota, Pad, Reshape, SizeOf, Slice, Unsqueeze
from rlx.ops.normalize import LogSoftmax
from rlx.ops.reduction import ReduceMean, ReduceSum
from rlx.ops.scatter import ScatterNd

I64 = DTYPES["i64"]


@onnx_op("NegativeLogLikelihoodLoss", since=12)
def _nll_loss(ctx: NodeContext) -> Mapped:
    return _loss(ctx, ctx.value(0))


@onnx_op("SoftmaxCrossEntropyLoss", since=12)
def _cross_entropy(ctx: NodeContext) -> tuple[Mapped, ...]:
    scores = ctx.value(0)
    log_prob = ctx.add(LogSoftmax(1), scores)
    return _loss(ctx, log_prob), log_prob


def _loss(ctx: NodeContext, log_prob: Value) -> Value:
    """-weight[target] * log_prob[target], reduced; log_prob [N, C, d..], target [N, d..]."""
    reduction = ctx.text("reduction", "mean")
    if reduction not in ("mean", "sum", "none"):
        ctx.fail(f"reduction={reduction!r} is not supported")
    target = ctx.cast(ctx.value(1), I64)
    weight = ctx.optional(2)
    kept = None
    if ctx.given("ignore_index"):
        ignored = ctx.add(Equal(), target, ctx.constant(ctx.integer("ignore_index"), I64))
        zero = ctx.constant(0, I64)
        target = ctx.add(Where(), ignored, zero, target)
        one, nothing = (ctx.constant(n, log_prob.dtype) for n in (1, 0))
        kept = ctx.add(Where(), ignored, nothing, one)
    picked = ctx.add(GatherElements(1), log_prob, ctx.add(Unsqueeze((1,)), target))
    loss = ctx.add(Neg(), ctx.reshape(picked, *target.shape))
    factor = None if weight is None else ctx.add(Gather(0), weight, target)
    if kept is not None:
        factor = kept if factor is None else ctx.add(Mul(), factor, kept)
    if factor is not None:
        loss = ctx.add(Mul(), loss, factor)
    if reduction == "none":
        return loss
    if reduction == "sum" or factor is None:
        return ctx.add((ReduceSum if reduction == "sum" else ReduceMean)(None, False), loss)
    return ctx.add(Div(), ctx.add(ReduceSum(None, False), loss), ctx.add(ReduceSum(None, False), factor))


@onnx_op("SwiGLU", since=28)
def _swiglu(ctx: NodeContext) -> Mapped:
    a, b, alpha = ctx.value(0), ctx.value(1), ctx.real("alpha", 1.0)
    if alpha == 1:
        return ctx.add(Mul(), ctx.add(Silu(), a), b)
    gate = ctx.add(Sigmoid(), ctx.add(Mul(), a, ctx.constant(alpha, a.dtype)))
    return ctx.add(Mul(), ctx.add(Mul(), a, gate), b)


@onnx_op("TensorScatter", since=24)
def _tensor_scatter(ctx: NodeContext) -> Mapped:
    """Writes update along one axis from a place for each batch entry on: a KV cache's growth."""
    cache, update = ctx.value(0), ctx.value(1)
    mode = ctx.text("mode", "linear")
    if mode not in ("linear", "circular"):
        ctx.fail(f"mode={mode!r} is not supported")
    axis = axis_of(ctx.integer("axis", -2), cache.rank, "TensorScatter")
    if axis == 0:
        ctx.fail("axis=0 is the batch")
    batch, count = update.shape[0], update.shape[axis]
    at = ctx.add(Reshape((1, count)), ctx.add(Iota(count)))
    if ctx.has(2):
        at = ctx.add(Add(), at, ctx.reshape(ctx.cast(ctx.value(2), I64), batch, 1))
    else:
        at = ctx.add(Expand((batch, count)), at)
    if mode == "circular":
        at = ctx.add(Mod(), at, ctx.add(SizeOf(cache.shape[axis])))
    rows = ctx.add(Expand((batch, count)), ctx.add(Reshape((batch, 1)), ctx.add(Iota(batch))))
    places = ctx.add(Concat(2), ctx.add(Unsqueeze((2,)), rows), ctx.add(Unsqueeze((2,)), at))
    first = [0, axis, *(d for d in range(1, cache.rank) if d != axis)]
    back = [first.index(d) for d in range(cache.rank)]
    made = ctx.add(ScatterNd(), ctx.transpose(cache, *first), places, ctx.transpose(update, *first))
    return ctx.transpose(made, *back)


@onnx_op("CausalConvWithState", since=27)
def _causal_conv(ctx: NodeContext) -> tuple[Mapped, ...]:
    """A depthwise convolution of what came before and x; the last k - 1 columns are the new state."""
    x, w = ctx.value(0), ctx.value(1)
    channels, (k,) = x.shape[1], w.shape[2:]
    activation = ctx.text("activation", "none")
    if activation not in ("none", "silu", "swish"):
        ctx.fail(f"activation={activation!r} is not supported")
    if not isinstance(k, int) or not isinstance(channels, int):
        ctx.fail("the channels and the length of the kernel must be known")
    past = ctx.optional(3)
    whole = ctx.add(Pad((0, 0, k - 1, 0, 0, 0)), x) if past is None else ctx.add(Concat(2), past, x)
    bias = [ctx.value(2)] if ctx.has(2) else []
    y = ctx.add(Conv((1,), (1,), (0, 0), channels), whole, w, *bias)
    y = y if activation == "none" else ctx.add(Silu(), y)
    n, _, length = whole.shape
    present = ctx.add(Slice((0, 0, length - (k - 1)), (n, channels, k - 1), (1, 1, 1)), whole)
    return y, present
