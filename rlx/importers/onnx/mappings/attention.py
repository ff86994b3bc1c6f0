"""Attention of ai.onnx: masks, caches, windows, soft caps and scores as compositions around the op `Attention`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlx.importers.onnx.mapping import PREVIEW, Mapped, NodeContext, element_dtype, onnx_op
from rlx.importers.onnx.mappings.control import scope_of
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Graph, Operator, Value
from rlx.ir.shape import Size, exact_div, same
from rlx.ops.attention import Attention
from rlx.ops.contract import MatMul
from rlx.ops.control import Scan
from rlx.ops.elementwise import Add, And, Div, Equal, Exp, Less, LessEqual, Mul, Sub, Tanh, Where
from rlx.ops.layout import Concat, Expand, Full, Iota, Pad, Reshape, SizeOf
from rlx.ops.normalize import Softmax
from rlx.ops.reduction import ReduceMax, ReduceSum

__all__ = ["attend", "joined", "mask_bias", "split_heads", "visible", "with_past"]

F32, I64 = DTYPES["f32"], DTYPES["i64"]


def split_heads(ctx: NodeContext, x: Value, heads: int) -> Value:
    """[B, L, H * D] as [B, H, L, D]."""
    if heads < 1:
        ctx.fail("the number of heads is needed for inputs of rank 3")
    batch, length, width = x.shape
    each = exact_div(width, heads)
    if each is None:
        ctx.fail(f"{x.type} can't be split into {heads} heads")
    return ctx.transpose(ctx.reshape(x, batch, length, heads, each), 0, 2, 1, 3)


def joined(ctx: NodeContext, x: Value) -> Value:
    """[B, H, L, D] as [B, L, H * D]."""
    batch, heads, length, depth = x.shape
    return ctx.reshape(ctx.transpose(x, 0, 2, 1, 3), batch, length, heads * depth)


def with_past(ctx: NodeContext, past: Value | None, x: Value) -> Value:
    """A cache [B, H, P, D] followed by the new [B, H, L, D]."""
    return x if past is None else ctx.add(Concat(2), past, x)


def mask_bias(ctx: NodeContext, mask: Value, dtype: DType, lowest: float = -np.inf) -> Value:
    """A mask as what is added to the scores: a bool one masks where it is false."""
    if mask.dtype.kind != "b":
        return ctx.cast(mask, dtype)
    return ctx.add(Where(), mask, ctx.constant(0, dtype), ctx.constant(lowest, dtype))


def visible(
    ctx: NodeContext, queries: Size, keys: Size, offset: Value | None, left: int = -1, right: int = -1
) -> Value:
    """Whether query i sees key j, [queries, keys]: i + offset - left <= j <= i + offset + right (-1: no such limit).

    `offset` is an i64 scalar, or [B, 1, 1, 1] for one of each batch entry; None is 0.
    """
    j = ctx.add(Iota(keys))
    i = ctx.add(Reshape((queries, 1)), ctx.add(Iota(queries)))
    at = i if offset is None else ctx.add(Add(), i, offset)

    def moved(by: int) -> Value:
        return at if by == 0 else ctx.add(Add(), at, ctx.constant(by, I64))

    limits = []
    if right >= 0:
        limits.append(ctx.add(LessEqual(), j, moved(right)))
    if left >= 0:
        limits.append(ctx.add(LessEqual(), moved(-left), j))
    return limits[0] if len(limits) == 1 else ctx.add(And(), *limits)


def _sum(ctx: NodeContext, biases: Sequence[Value]) -> Value | None:
    total: Value | None = None
    for bias in biases:
        total = bias if total is None else ctx.add(Add(), total, bias)
    return total


def attend(
    ctx: NodeContext,
    q: Value,
    k: Value,
    v: Value,
    biases: Sequence[Value] = (),
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    scores_at: int | None = None,
    empty_row: str = "zero",
    count: Value | None = None,
) -> tuple[Value, Value | None]:
    """Attention of q, k, v [B, heads, L, D], and the scores if wanted.

    `scores_at`: 0 the products, 1 after the soft cap, 2 with the biases, 3 the probabilities. `count` [B] says how many
    keys there are.
    """
    if count is not None and scores_at is not None:
        limit = ctx.reshape(count, count.shape[0], 1, 1, 1)
        there = ctx.add(Less(), ctx.add(Iota(k.shape[2])), limit)
        return attend(ctx, q, k, v, [*biases, mask_bias(ctx, there, q.dtype)], scale=scale, softcap=softcap,
                      scores_at=scores_at, empty_row=empty_row)  # fmt: skip
    bias = _sum(ctx, biases)
    if scores_at is None:
        cap = ctx.constant(softcap, F32) if softcap else None
        steps = ("softcap",) * (cap is not None) + ("add",) * (bias is not None)
        op = Attention(scale=scale, empty_row=empty_row, counted=count is not None, steps=steps)
        return ctx.add(op, *(x for x in (q, k, v, cap, bias, count) if x is not None)), None
    dtype, depth = q.dtype, q.shape[3]
    if scale is None and not isinstance(depth, int):
        ctx.fail("the depth of q must be known where no scale is given")
    factor = scale if scale is not None else 1 / math.sqrt(depth if isinstance(depth, int) else 1)
    q, k, v = (ctx.cast(t, F32) if dtype.bits < 32 else t for t in (q, k, v))
    k, v = (_repeated(ctx, t, q.shape[1]) for t in (k, v))
    products = ctx.add(MatMul(), q, ctx.transpose(k, 0, 1, 3, 2))
    stages = [ctx.add(Mul(), products, ctx.constant(factor, q.dtype))]
    capped = stages[0]
    if softcap:
        cap = ctx.constant(softcap, q.dtype)
        capped = ctx.add(Mul(), ctx.add(Tanh(), ctx.add(Div(), capped, cap)), cap)
    stages.append(capped)
    scores = capped if bias is None else ctx.add(Add(), capped, ctx.cast(bias, q.dtype))
    stages.append(scores)
    lowest = ctx.constant(-np.inf, q.dtype)
    empty = ctx.add(Equal(), ctx.add(ReduceMax((3,), True), scores), lowest)
    zero = ctx.constant(0, q.dtype)
    weights = ctx.add(Softmax(-1), ctx.add(Where(), empty, zero, scores))
    if empty_row == "zero":
        weights = ctx.add(Where(), empty, zero, weights)
    stages.append(weights)
    out = ctx.cast(ctx.add(MatMul(), weights, v), dtype)
    return out, ctx.cast(stages[scores_at], dtype)


def _repeated(ctx: NodeContext, x: Value, heads: Size) -> Value:
    """[B, Hkv, L, D] -> [B, heads, L, D], each head repeated."""
    batch, own, length, depth = x.shape
    times = exact_div(heads, own)
    if times is None:
        ctx.fail(f"{heads} heads of queries are no multiple of {own} of keys")
    if times == 1:
        return x
    wide = ctx.add(Expand((batch, own, times, length, depth)), ctx.reshape(x, batch, own, 1, length, depth))
    return ctx.reshape(wide, batch, heads, length, depth)


@onnx_op("Attention", since=23)
def _attention(ctx: NodeContext) -> tuple[Mapped, ...]:
    """q, k, v [B, H, L, D] or [B, L, H * D]."""
    heads, kv_heads = ctx.integer("q_num_heads", 0), ctx.integer("kv_num_heads", 0)
    flat = ctx.type().rank == 3
    counts = (heads, kv_heads, kv_heads)
    q, k, v = (split_heads(ctx, ctx.value(i), n) if flat else ctx.value(i) for i, n in enumerate(counts))
    precision = ctx.integer("softmax_precision", 1)
    if element_dtype(precision).bits < 32 and q.dtype.bits >= 32:
        ctx.fail(f"softmax_precision={precision} rounds the scores, which is not supported")
    past = ctx.optional(4)
    before = None if past is None else past.shape[2]
    k, v = with_past(ctx, past, k), with_past(ctx, ctx.optional(5), v)
    biases = []
    if ctx.has(3):
        biases.append(_widened(ctx, mask_bias(ctx, ctx.value(3), q.dtype), k.shape[2]))
    lengths = ctx.optional(6)
    offset = None if before is None else ctx.add(SizeOf(before))
    if lengths is not None:
        lengths = ctx.cast(lengths, I64)
        limit = ctx.reshape(lengths, lengths.shape[0], 1, 1, 1)
        offset = ctx.add(Sub(), limit, ctx.add(SizeOf(q.shape[2])))
    left = ctx.integer("left_window_size", -1) if ctx.opset >= 25 else -1
    right = ctx.integer("right_window_size", -1) if ctx.opset >= 25 else -1
    if ctx.flag("is_causal"):
        right = 0
    if left >= 0 or right >= 0:
        seen = visible(ctx, q.shape[2], k.shape[2], offset, left, right)
        biases.append(mask_bias(ctx, seen, q.dtype))
    mode = ctx.integer("qk_matmul_output_mode", 0)
    if mode not in range(4):
        ctx.fail(f"qk_matmul_output_mode={mode} is not known")
    stage = mode if ctx.wants(3) else None
    scale = ctx.real("scale") if ctx.given("scale") else None
    cap = ctx.real("softcap", 0.0)
    y, scores = attend(ctx, q, k, v, biases, scale=scale, softcap=cap, scores_at=stage, count=lengths)
    return joined(ctx, y) if flat else y, k, v, scores


def _widened(ctx: NodeContext, bias: Value, keys: Size) -> Value:
    """A mask that is shorter than the keys masks the rest."""
    own = bias.shape[-1]
    if own == 1 or same(own, keys):
        return bias
    missing = keys - own
    return ctx.add(Pad((0,) * (2 * bias.rank - 1) + (missing,), -np.inf), bias)


# ---- attention as a recurrence


@onnx_op("FlexAttention", domain=PREVIEW)
def _flex_attention(ctx: NodeContext) -> Mapped:
    """Attention whose scores and probabilities go through subgraphs; heads of keys are shared by groups of queries."""
    q, k, v = (ctx.value(i) for i in range(3))
    if any(x.rank != 4 for x in (q, k, v)):
        ctx.fail("its inputs need 4 axes")
    (batch, heads, length, depth), groups = q.shape, k.shape[1]
    each = exact_div(heads, groups)
    if each is None or not isinstance(depth, int):
        ctx.fail(f"{heads} heads of queries can't be shared by {groups} of keys, or the head size {depth} is open")
    usual = 1 if q.dtype.bits < 64 else 11
    dtype = element_dtype(ctx.integer("softmax_precision", usual))
    scale = ctx.constant(ctx.real("scale", 1 / math.sqrt(max(depth, 1))), dtype)
    wide = [ctx.cast(x, dtype) for x in (q, k, v)]
    queries = ctx.reshape(wide[0], batch, groups, each, length, depth)
    keys, values = (ctx.reshape(x, batch, groups, 1, *x.shape[2:]) for x in wide[1:])
    products = ctx.add(MatMul(), queries, ctx.transpose(keys, 0, 1, 2, 4, 3))
    scores = ctx.reshape(ctx.add(Mul(), products, scale), batch, heads, length, k.shape[2])
    scores = _modified(ctx, "score_mod", scores)
    odds = _modified(ctx, "prob_mod", ctx.add(Softmax(-1), scores))
    made = ctx.add(MatMul(), ctx.reshape(odds, batch, groups, each, length, k.shape[2]), values)
    return ctx.cast(ctx.reshape(made, batch, heads, length, v.shape[3]), q.dtype)


def _modified(ctx: NodeContext, name: str, x: Value) -> Value:
    """What the subgraph of that attribute makes of a tensor."""
    if not ctx.given(name):
        return x
    body, scope = ctx.subgraph(name), scope_of(ctx)
    if len(body.inputs) != 1 or len(body.outputs) != 1:
        ctx.fail(f"{name} has {len(body.inputs)} inputs and {len(body.outputs)} outputs; expected one of each")
    child = scope.subgraph(body, scope.region, f"{ctx.label}/{name}", {body.inputs[0].name: x})
    made = child.value(body.outputs[0].name)
    if made.type != x.type:
        ctx.fail(f"{name} makes {made.type} of {x.type}")
    return made


@onnx_op("LinearAttention", since=27)
def _linear_attention(ctx: NodeContext) -> tuple[Mapped, ...]:
    """A scan over time: state = decay * state + k (x) v; the delta rule takes what the state says off v."""
    ctx.ignore("chunk_size")
    heads, own, rule = ctx.integer("q_num_heads"), ctx.integer("kv_num_heads"), ctx.text("update_rule", "gated_delta")
    if rule not in ("linear", "gated", "delta", "gated_delta") or own < 1 or heads % own:
        ctx.fail(f"update_rule={rule!r} with {heads} and {own} heads is not supported")
    dtype = ctx.type().dtype

    def rows(i: int, count: int) -> Value:
        """[B, T, count * D] in f32 as [T, B, count, D]."""
        x = ctx.cast(ctx.value(i), F32)
        batch, length, width = x.shape
        return ctx.transpose(ctx.reshape(x, batch, length, count, width // count), 1, 0, 2, 3)

    q, k, v = rows(0, heads), rows(1, own), rows(2, own)
    batch, d_k, d_v = q.shape[1], k.shape[3], v.shape[3]
    if not isinstance(d_k, int):
        ctx.fail("the size of a head must be known")
    scale = ctx.real("scale", 0.0) or 1 / math.sqrt(d_k)
    shape = (batch, own, d_k, d_v)
    past = ctx.optional(3)
    state = ctx.cast(past, F32) if past is not None else ctx.add(Full(shape, 0.0, F32))
    sequences = [q, k, v]
    if "gated" in rule:
        sequences.append(rows(4, own))
    if "delta" in rule:
        sequences.append(rows(5, 1 if same(ctx.type(5).shape[2], 1) else own))
    body = Graph(f"{ctx.label}.body")
    held = body.input("state", shape, F32)
    row = [body.input(f"in{i}", s.shape[1:], F32) for i, s in enumerate(sequences)]
    new, out = _step(body, rule, held, row, heads // own, scale)
    body.output(new, "state")
    body.output(out, "row")
    final, outs = ctx.graph.add(Scan(1, len(sequences)), state, *sequences, provenance=(ctx.label,), regions=[body])
    length = outs.shape[0]
    y = ctx.reshape(ctx.transpose(outs, 1, 0, 2, 3), batch, length, heads * d_v)
    return ctx.cast(y, dtype), ctx.cast(final, past.dtype if past is not None else dtype)


def _step(g: Graph, rule: str, state: Value, row: list[Value], times: int, scale: float) -> tuple[Value, Value]:
    """The state [B, Hkv, Dk, Dv] after one step, and the output row [B, H, Dv]."""
    q, k, v = row[:3]
    batch, own, d_k, d_v = state.shape

    def do(op: Operator, *x: Value) -> Value:
        return g.add(op, *x)[0]

    column = do(Reshape((batch, own, d_k, 1)), k)
    if "gated" in rule:
        gate = do(Exp(), row[3])
        state = do(Mul(), state, do(Reshape((batch, own, gate.shape[2], 1)), gate))
    if "delta" in rule:
        told = do(ReduceSum((2,), False), do(Mul(), state, column))
        v = do(Mul(), row[-1], do(Sub(), v, told))
    state = do(Add(), state, do(Mul(), column, do(Reshape((batch, own, 1, d_v)), v)))
    asked = do(Reshape((batch, own, times, d_k)), q)
    read = do(MatMul(), asked, state)
    out = do(Mul(), do(Reshape((batch, own * times, d_v)), read), g.constant(scale, dtype="f32"))
    return state, out
