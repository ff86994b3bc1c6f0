"""com.microsoft attention: Attention, QAttention, MultiHeadAttention, GroupQueryAttention, RotaryEmbedding."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.importers.onnx.mapping import MICROSOFT, Mapped, NodeContext, onnx_op
from rlx.importers.onnx.mappings.attention import attend, joined, mask_bias, split_heads, visible, with_past
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ir.shape import Size, exact_div, max_size, same
from rlx.ops.contract import MatMul
from rlx.ops.elementwise import Add, And, Equal, Greater, Less, Maximum, Minimum, Mul, Sub, Where
from rlx.ops.index import GatherElements
from rlx.ops.layout import Concat, Expand, Iota, SizeOf, Split
from rlx.ops.quant import MatMulInteger
from rlx.ops.rotary import RotaryEmbedding

F32, I64 = DTYPES["f32"], DTYPES["i64"]


# ---- masks


def _padding(ctx: NodeContext, i: int, batch: Size, keys: Size, lowest: float) -> list[Value]:
    """Optional mask i: lengths [B], or ones where a key counts, [B, keys] or [B, queries, keys]; as a bias."""
    if not ctx.has(i):
        return []
    mask = ctx.value(i)
    if mask.rank == 1:
        if same(mask.shape[0], batch) is False:
            ctx.fail(f"a mask {mask.type} of ends and starts is not supported")
        ends = ctx.reshape(ctx.cast(mask, I64), batch, 1, 1, 1)
        kept = ctx.add(Less(), ctx.add(Iota(keys)), ends)
    elif mask.rank == 2:
        kept = ctx.add(Greater(), ctx.reshape(mask, mask.shape[0], 1, 1, mask.shape[1]), ctx.constant(0, mask.dtype))
    elif mask.rank == 3:
        kept = ctx.add(Greater(), ctx.reshape(mask, mask.shape[0], 1, *mask.shape[1:]), ctx.constant(0, mask.dtype))
    else:
        ctx.fail(f"a mask {mask.type} is not supported")
    return [mask_bias(ctx, kept, F32, lowest)]


def _causal(ctx: NodeContext, queries: Size, keys: Size, lowest: float) -> Value:
    """Later keys masked; the last query sees all keys."""
    offset = ctx.add(SizeOf(keys - queries)) if same(keys, queries) is not True else None
    return mask_bias(ctx, visible(ctx, queries, keys, offset, right=0), F32, lowest)


def _scale(ctx: NodeContext) -> float | None:
    scale = ctx.real("scale", 0.0)
    return scale or None


# ---- attention with the projection in front


@onnx_op("Attention", domain=MICROSOFT)
def _attention(ctx: NodeContext) -> tuple[Mapped, ...]:
    qkv = ctx.add(MatMul(), ctx.value(0), ctx.value(1))
    qkv = ctx.add(Add(), qkv, ctx.value(2)) if ctx.has(2) else qkv
    return _projected(ctx, qkv, mask=3, past=4, bias=5)


@onnx_op("QAttention", domain=MICROSOFT)
def _q_attention(ctx: NodeContext) -> tuple[Mapped, ...]:
    zeros = [ctx.reshape(ctx.value(6)) if ctx.has(6) else ctx.constant(0, ctx.type(0).dtype)]
    if ctx.has(7):
        zero = ctx.value(7)
        zeros.append(ctx.reshape(zero) if same(zero.shape[0] if zero.rank else 1, 1) else zero)
    sums = ctx.add(MatMulInteger(), ctx.value(0), ctx.value(1), *zeros)
    scale = ctx.add(Mul(), ctx.reshape(ctx.value(3)), ctx.value(4))
    qkv = ctx.add(Add(), ctx.add(Mul(), ctx.cast(sums, F32), scale), ctx.value(2))
    return _projected(ctx, qkv, mask=5, past=8, bias=-1)


def _projected(ctx: NodeContext, qkv: Value, mask: int, past: int, bias: int) -> tuple[Mapped, ...]:
    """qkv [B, S, Hq + Hk + Hv] -> [B, S, Hv], and the cache [2, B, heads, T, D]."""
    if ctx.flag("do_rotary") or ctx.flag("past_present_share_buffer"):
        ctx.fail("do_rotary and past_present_share_buffer are not supported")
    ctx.ignore("rotary_embedding_dim")
    heads, lowest = ctx.integer("num_heads"), ctx.real("mask_filter_value", -10000.0)
    sizes: Sequence[Size] = ctx.ints("qkv_hidden_sizes", ())
    third = exact_div(qkv.shape[2], 3)
    if not sizes:
        if third is None:
            ctx.fail(f"the projection {qkv.type} is not three of one size")
        sizes = (third,) * 3
    q, k, v = (split_heads(ctx, part, heads) for part in ctx.add_all(Split(2, tuple(sizes)), qkv))
    if ctx.has(past):
        before = ctx.add_all(Split(0, (1, 1)), ctx.value(past))
        k, v = (with_past(ctx, ctx.reshape(p, *p.shape[1:]), x) for p, x in zip(before, (k, v), strict=True))
    biases = _padding(ctx, mask, q.shape[0], k.shape[2], lowest)
    if ctx.flag("unidirectional"):
        biases.append(_causal(ctx, q.shape[2], k.shape[2], lowest))
    if bias >= 0 and ctx.has(bias):
        biases.append(ctx.value(bias))
    biases = [ctx.cast(b, q.dtype) for b in biases]
    y, _ = attend(ctx, q, k, v, biases, scale=_scale(ctx))
    present = None
    if ctx.wants(1):
        present = ctx.add(Concat(0), *(ctx.reshape(x, 1, *x.shape) for x in (k, v)))
    return joined(ctx, y), present


# ---- attention of given q, k and v


@onnx_op("MultiHeadAttention", domain=MICROSOFT)
def _multi_head(ctx: NodeContext) -> tuple[Mapped, ...]:
    heads, lowest = ctx.integer("num_heads"), ctx.real("mask_filter_value", -10000.0)
    q, k, v = _heads_of(ctx, heads)
    k, v = with_past(ctx, ctx.optional(6), k), with_past(ctx, ctx.optional(7), v)
    if any(ctx.has(i) for i in (8, 9)):
        ctx.fail("a shared cache (past_sequence_length, cache_indirection) is not supported")
    biases = _padding(ctx, 4, q.shape[0], k.shape[2], lowest)
    if ctx.has(5):
        biases.append(ctx.value(5))
    if ctx.flag("unidirectional"):
        biases.append(_causal(ctx, q.shape[2], k.shape[2], lowest))
    biases = [ctx.cast(b, q.dtype) for b in biases]
    stage = 0 if ctx.wants(3) else None
    y, scores = attend(ctx, q, k, v, biases, scale=_scale(ctx), scores_at=stage)
    return joined(ctx, y), k, v, scores


def _heads_of(ctx: NodeContext, heads: int) -> list[Value]:
    """q, k, v [B, H, L, D] from whatever form they come in, biases added."""
    q = ctx.value(0)
    biases: Sequence[Value | None] = (None, None, None)
    if q.rank == 5:  # [B, S, H, 3, D]
        if ctx.has(3):
            ctx.fail("a bias of packed q, k and v is not supported")
        return [ctx.transpose(part, 0, 2, 1, 3) for part in _unpacked(ctx, q, 3)]
    if ctx.has(3):
        bias = ctx.value(3)
        width = q.shape[2]
        rest = bias.shape[0] - width * 2
        biases = ctx.add_all(Split(0, (width, width, rest)), bias)
    k = ctx.value(1)
    if k.rank == 5:  # [B, L, H, 2, D]
        parts = [ctx.transpose(part, 0, 2, 1, 3) for part in _unpacked(ctx, k, 2)]
        return [_headed(ctx, q, biases[0], heads), *parts]
    v = ctx.value(2)
    return [_headed(ctx, x, b, heads) for x, b in zip((q, k, v), biases, strict=True)]


def _headed(ctx: NodeContext, x: Value, bias: Value | None, heads: int) -> Value:
    if x.rank == 4:
        return x
    return split_heads(ctx, x if bias is None else ctx.add(Add(), x, bias), heads)


def _unpacked(ctx: NodeContext, x: Value, count: int) -> list[Value]:
    batch, length, heads, _, depth = x.shape
    return [ctx.reshape(part, batch, length, heads, depth) for part in ctx.add_all(Split(3, (1,) * count), x)]


# ---- grouped queries with a cache


@onnx_op("GroupQueryAttention", static=(6,), domain=MICROSOFT)
def _group_query(ctx: NodeContext) -> tuple[Mapped, ...]:
    heads, own = ctx.integer("num_heads"), ctx.integer("kv_num_heads")
    if any(ctx.has(i) for i in (12, 13)):
        ctx.fail("quantised caches are not supported")
    ctx.require("k_quant_type", "NONE")
    ctx.require("v_quant_type", "NONE")
    ctx.require("qk_output", 0)
    ctx.ignore("kv_cache_bit_width")
    q, k, v = _grouped(ctx, heads, own)
    batch, length = q.shape[0], q.shape[2]
    (total,) = ctx.sizes(6, "the total length")
    ends = ctx.add(Add(), ctx.cast(ctx.value(5), I64), ctx.constant(1, I64))  # keys of each batch entry
    ends = ctx.reshape(ends, batch, 1)
    new = ctx.add(SizeOf(length))
    zero = ctx.constant(0, I64)
    first = ctx.add(Equal(), ctx.add(SizeOf(total)), new)
    before = ctx.add(Where(), first, zero, ctx.add(Sub(), ends, new))  # how many come from the cache, [B, 1]
    if ctx.flag("do_rotary"):
        places = ctx.optional(9)
        if places is None:
            places = ctx.add(Add(), ctx.reshape(ctx.add(Iota(length)), 1, length), before)
        turn = RotaryEmbedding(ctx.flag("rotary_interleaved"))
        q, k = (ctx.add(turn, x, ctx.value(7), ctx.value(8), places) for x in (q, k))
    else:
        ctx.ignore("rotary_interleaved")
    k, v = _cached(ctx, ctx.optional(3), k, before, total), _cached(ctx, ctx.optional(4), v, before, total)
    keys = k.shape[2]
    offset = ctx.reshape(before, batch, 1, 1, 1)
    window = ctx.integer("local_window_size", -1)
    seen = visible(ctx, length, keys, offset, window - 1 if window > 0 else -1, 0)
    if batch != 1 and length != 1:  # of a prompt that is padded, the queries behind its end see the keys before it
        inside = ctx.add(Less(), ctx.add(Iota(keys)), ctx.reshape(ends, batch, 1, 1, 1))
        seen = ctx.add(And(), seen, inside)
    biases = [mask_bias(ctx, seen, q.dtype)]
    if ctx.has(10):
        biases.append(ctx.cast(ctx.value(10), q.dtype))
    sink = ctx.optional(11)
    if ctx.integer("smooth_softmax", 0) > 0 and sink is None:
        sink = ctx.add(Expand((heads,)), ctx.constant(0, q.dtype))
    seen_k, seen_v = k, v
    if sink is not None:
        seen_k, seen_v, biases = _with_sink(ctx, k, v, biases, ctx.cast(sink, q.dtype))
    y, _ = attend(ctx, q, seen_k, seen_v, biases, scale=_scale(ctx), softcap=ctx.real("softcap", 0.0))
    return joined(ctx, y), k, v


def _with_sink(
    ctx: NodeContext, k: Value, v: Value, biases: Sequence[Value], sink: Value
) -> tuple[Value, Value, list[Value]]:
    """One more key, which scores `sink` [heads] whatever the query is, and whose value is 0."""

    def longer(x: Value, axis: int) -> Value:
        shape = [*x.shape[:axis], 1, *x.shape[axis + 1 :]]
        return ctx.add(Concat(axis), x, ctx.add(Expand(tuple(shape)), ctx.constant(0, x.dtype)))

    sink = ctx.reshape(sink, 1, sink.shape[0], 1, 1)
    none = ctx.add(Expand((1, sink.shape[1], 1, k.shape[2])), ctx.constant(0, sink.dtype))
    return longer(k, 2), longer(v, 2), [*(longer(b, 3) for b in biases), ctx.add(Concat(3), none, sink)]


def _grouped(ctx: NodeContext, heads: int, own: int) -> list[Value]:
    """q [B, heads, S, D], k and v [B, own, S, D] from three inputs or one."""
    if ctx.has(1):
        return [split_heads(ctx, ctx.value(i), n) for i, n in enumerate((heads, own, own))]
    packed = ctx.value(0)
    each = exact_div(packed.shape[2], heads + 2 * own)
    if each is None:
        ctx.fail(f"the packed q, k and v {packed.type} can't be split into {heads} + 2 * {own} heads")
    parts = ctx.add_all(Split(2, (each * heads, each * own, each * own)), packed)
    return [split_heads(ctx, part, n) for part, n in zip(parts, (heads, own, own), strict=True)]


def _cached(ctx: NodeContext, past: Value | None, new: Value, before: Value, total: Size) -> Value:
    """[B, H, total or more, D]: for each batch entry `before` rows of the cache, then the new ones."""
    batch, heads, length, depth = new.shape
    held: Size = 0 if past is None else past.shape[2]
    whole = with_past(ctx, past, new)
    if past is None and same(total, length):
        return new
    keys = max_size(held, total)
    t = ctx.reshape(ctx.add(Iota(keys)), 1, keys)
    one = ctx.constant(1, I64)
    at = ctx.add(Sub(), t, before)
    at = ctx.add(Minimum(), ctx.add(Maximum(), at, ctx.constant(0, I64)), ctx.add(Sub(), ctx.add(SizeOf(length)), one))
    last = ctx.add(Sub(), ctx.add(SizeOf(whole.shape[2])), one)
    place = ctx.add(Where(), ctx.add(Less(), t, before), t, ctx.add(Add(), at, ctx.add(SizeOf(held))))
    place = ctx.reshape(ctx.add(Minimum(), place, last), batch, 1, keys, 1)
    made = ctx.add(GatherElements(2), whole, ctx.add(Expand((batch, heads, keys, depth)), place))
    if batch == 1:
        return made
    filled = ctx.add(Less(), t, ctx.add(Add(), before, ctx.add(SizeOf(length))))  # shorter ones end in zeros
    return ctx.add(Where(), ctx.reshape(filled, batch, 1, keys, 1), made, ctx.constant(0, made.dtype))


@onnx_op("RotaryEmbedding", domain=MICROSOFT)
def _rotary(ctx: NodeContext) -> Mapped:
    x, places, cos, sin = (ctx.value(i) for i in range(4))
    ctx.ignore("scale", "is_packed_batching")
    heads, dim = ctx.integer("num_heads", 0), ctx.integer("rotary_embedding_dim", 0)
    length = x.shape[2] if x.rank == 4 else x.shape[1]
    if x.rank == 3 and not heads:
        each = exact_div(x.shape[2], cos.shape[1] * 2)
        if not isinstance(each, int):
            ctx.fail(f"the number of heads of {x.type} is not known")
        heads = each
    if places.rank == 1:  # where the first one is
        places = ctx.add(Add(), ctx.reshape(places, 1, 1), ctx.reshape(ctx.add(Iota(length)), 1, length))
    return ctx.add(RotaryEmbedding(ctx.flag("interleaved"), heads if x.rank == 3 else 0, dim), x, cos, sin, places)
