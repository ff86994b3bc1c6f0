"""com.microsoft: mixtures of experts."""

from __future__ import annotations

from rlx.importers.onnx.mapping import MICROSOFT, Mapped, NodeContext, UnsupportedError, onnx_op
from rlx.ir.graph import Value
from rlx.ir.shape import numel
from rlx.ops import activation
from rlx.ops.elementwise import Add, Clip, Div, Mul, Sigmoid
from rlx.ops.experts import GroupedMatMul
from rlx.ops.index import Gather
from rlx.ops.layout import Slice, Unsqueeze
from rlx.ops.normalize import Softmax
from rlx.ops.reduction import ReduceSum
from rlx.ops.select import TopK

__all__: list[str] = []

# onnxruntime computes gelu by tanh here
PLAIN = {"relu": activation.Relu(), "gelu": activation.Gelu("tanh"), "silu": activation.Silu(), "identity": None}


@onnx_op("MoE", domain=MICROSOFT)
def _moe(ctx: NodeContext) -> Mapped:
    x, logits = ctx.value(0), ctx.value(1)
    ctx.require("use_sparse_mixer", 0)
    ctx.require("swiglu_limit_after_activation", 0)
    rows = x if x.rank == 2 else ctx.reshape(x, numel(x.shape[:-1]), x.shape[-1])
    weights, experts = ctx.add_all(TopK(ctx.integer("k", 1)), ctx.add(Softmax(-1), logits))
    if ctx.flag("normalize_routing_weights"):
        weights = ctx.add(Div(), weights, ctx.add(ReduceSum((-1,)), weights))

    def product(y: Value, at: int) -> Value:
        """By the weights of input `at`, plus the bias of the one after it."""
        made = ctx.add(GroupedMatMul(transposed=True), y, ctx.value(at), experts)
        return ctx.add(Add(), made, ctx.add(Gather(0), ctx.value(at + 1), experts)) if ctx.has(at + 1) else made

    tokens = ctx.add(Unsqueeze((1,)), rows)
    hidden = _activated(ctx, product(tokens, 2), product(tokens, 6) if ctx.has(6) else None)
    parts = ctx.add(Mul(), product(hidden, 4), ctx.add(Unsqueeze((2,)), weights))
    y = ctx.add(ReduceSum((1,), keepdims=False), parts)
    return y if x.rank == 2 else ctx.reshape(y, *x.shape)


def _activated(ctx: NodeContext, gate: Value, up: Value | None) -> Value:
    """What `activation_type` and the attributes of SwiGLU make of the first products."""
    name, fusion = ctx.text("activation_type", "relu"), ctx.integer("swiglu_fusion", 0)
    alpha, beta = ctx.real("activation_alpha", 1.0), ctx.real("activation_beta", 0.0)
    limit = ctx.real("swiglu_limit", float("inf"))
    if name in PLAIN:
        op = PLAIN[name]
        y = gate if op is None else ctx.add(op, gate)
        return y if up is None else ctx.add(Mul(), y, up)
    if name != "swiglu":
        raise UnsupportedError(f"activation_type={name!r} is not one of {', '.join(PLAIN)}, swiglu")
    if fusion:
        gate, up = _halves(ctx, gate, interleaved=fusion == 1)
    if up is None:
        ctx.fail("swiglu_fusion=0 needs the weights fc3")
    if limit != float("inf"):
        gate, up = ctx.add(Clip(None, limit), gate), ctx.add(Clip(-limit, limit), up)
    scaled = ctx.add(Mul(), gate, ctx.constant(alpha, gate.dtype))
    linear = up if beta == 0 else ctx.add(Add(), up, ctx.constant(beta, up.dtype))
    return ctx.add(Mul(), ctx.add(Mul(), gate, ctx.add(Sigmoid(), scaled)), linear)


def _halves(ctx: NodeContext, both: Value, *, interleaved: bool) -> tuple[Value, Value]:
    """Gate and up, which lie side by side or in turns along the last axis."""
    *outer, columns = both.shape
    half = columns // 2
    step, second = (2, 1) if interleaved else (1, half)
    first, other = (ctx.add(Slice((0, 0, start), (*outer, half), (1, 1, step)), both) for start in (0, second))
    return first, other
