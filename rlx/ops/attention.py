"""Scaled dot-product attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from rlx.errors import DTypeError, ExecutionError, OptionError, ShapeError
from rlx.ir.casting import narrowed
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import Size, broadcast, exact_div, numel, same, unify
from rlx.ops.base import Op, Work, check_activations, check_kind, register, tensor_bytes, widened
from rlx.ops.contract import MatMul
from rlx.ops.elementwise import Add, And, Cast, Div, Equal, IsNan, Less, LessEqual, Mod, Mul, Sub, Tanh, Where
from rlx.ops.index import Gather, check_indices
from rlx.ops.layout import Concat, Expand, Iota, Reshape, SizeOf, Slice, Transpose
from rlx.ops.normalize import Softmax
from rlx.ops.reduction import ReduceMax

F32, I64 = DTYPES["f32"], DTYPES["i64"]
STEPS: dict[str, int] = {"add": 1, "mul": 1, "where": 2, "softcap": 1}  # with how many operands each has
T = TypeVar("T")


@register
class Attention(Op):
    """softmax(scale * q k^T, after steps) v, with fewer key heads than query heads if their numbers divide.

    q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv] -> [B, H, Lq, Dv]; query head h reads key head h * Hkv // H.
    k and v may be of floats that are narrower than q's, or encoded: they are read as they are, and scores are computed
    in q's type (f32 where that has 16 bits). `scale` None means 1 / sqrt(D). The inputs after v are, in this order:

    - those of the `steps`, which are what happens to the scaled scores s, in order. "add" and "mul" take one (floats);
      "where" takes two: where the first (bool) is false, the second is the score; "softcap" takes one, c: s becomes
      c * tanh(s / c). They broadcast to [B, H, Lq, Lk]. Without steps each such input is added: a bias of -inf masks.
    - with `sinks`, one more score for each head, [H] floats: its weight is a part of the sum, and no value has it.
    - with `placed`, the position of the first query row (i32 or i64, one number [] or [B]); else it is that of the last
      key less Lq - 1.
    - with `counted`, how many keys there are (i32 or i64, [] or [B]), the first of the Lk that there is room for; else
      there are Lk. A count outside of 0..Lk stops the run with `ExecutionError`.

    Query row i of position p, the first row's plus i, sees key j if j <= p or not `causal`, and if j > p - `window` or
    that is None. `ring` (with `counted`, which then has no upper limit): keys lie at their positions modulo Lk, and the
    last Lk of those that are counted are there; operands of steps have one entry for all keys then.

    A row whose scores are all -inf sees no key. It gives NaN, or with empty_row="zero" zeros; with "mended" the weights
    of every row in which they are NaN (of one that sees no key, or has a score of NaN or +inf) are zeros. Where Lk is 0
    the sums are empty: zeros. The weights are divided by their sum after v is summed with them, so v within
    +-(the largest float / Lk) can't overflow.

    `activations` "bf16" or "f16": q (of f32), k and v are rounded to that type first. The weights may be too, before or
    after they are divided by their sum. (ONNX Attention-24, jax.nn.dot_product_attention)
    """

    scale: float | None = None
    causal: bool = False
    empty_row: str = "nan"
    counted: bool = False
    steps: tuple[str, ...] = ()
    window: int | None = None
    sinks: bool = False
    placed: bool = False
    ring: bool = False
    activations: str = ""

    def split(self, more: Sequence[T]) -> Operands[T]:
        """The inputs after q, k and v by what they are. Raises `ShapeError` for too many or few."""
        last = (self.sinks, self.placed, self.counted)
        room = len(more) - sum(last)
        steps = self.steps or ("add",) * room
        if room < 0 or room != sum(STEPS[step] for step in steps):
            names = ("the sinks", "the position of the first row", "the count of keys")
            wanted = f", those of {', '.join(self.steps)}" * bool(self.steps)
            wanted += "".join(f", {name}" for name, there in zip(names, last, strict=True) if there)
            raise ShapeError(f"attention: expected q, k, v{wanted}; got {3 + len(more)} inputs")
        rest = iter(more)
        found = [(step, tuple(next(rest) for _ in range(STEPS[step]))) for step in steps]
        sinks, place, count = (next(rest) if there else None for there in last)
        return Operands(found, sinks, place, count)

    def infer(self, q: TensorType, k: TensorType, v: TensorType, *more: TensorType) -> TensorType:
        for step in self.steps:
            if step not in STEPS:
                raise OptionError(f"attention: a step is one of {', '.join(STEPS)}, got {step!r}")
        given = self.split(more)
        self._check_attributes()
        check_activations(self, self.activations, q)
        check_kind(self, q, "f")
        wide = widest(q.dtype)
        for t in (k, v):
            check_kind(self, t, "f")
            if widest(t.dtype).bits > wide.bits:
                raise DTypeError(f"attention: keys and values may not be wider than q {q}, got {t}; cast one of them")
        self._check_shapes(q, k, v)
        scores = (*q.shape[:3], 1 if self.ring else k.shape[2])
        for step, operands in given.steps:
            for number, x in enumerate(operands):
                is_mask = step == "where" and number == 0
                what = "mask" if is_mask else "bias" if step == "add" else f"operand of {step!r}"
                check_kind(self, x, "b" if is_mask else "f", what)
                wide_shape = broadcast(x.shape, scores, why=f"attention: the {what} {x} over the scores")
                if len(wide_shape) != 4 or any(same(a, b) is False for a, b in zip(wide_shape, scores, strict=True)):
                    raise ShapeError(f"attention: the {what} {x} does not broadcast to {scores}")
        if given.sinks is not None:
            check_kind(self, given.sinks, "f", "sinks")
            if given.sinks.rank != 1:
                raise ShapeError(f"attention: the sinks are [{q.shape[1]}], one for each head, got {given.sinks}")
            unify(given.sinks.shape[0], q.shape[1], f"attention: the sinks {given.sinks} of the heads of {q}")
        for what, number_ in (("position of the first row", given.place), ("count of keys", given.count)):
            if number_ is not None:
                check_indices(number_, "attention")
                if number_.rank > 1 or (number_.rank == 1 and same(number_.shape[0], q.shape[0]) is False):
                    raise ShapeError(f"attention: the {what} is one number or [{q.shape[0]}] of them, got {number_}")
        return TensorType((*q.shape[:3], v.shape[3]), q.dtype)

    def _check_attributes(self) -> None:
        if self.empty_row not in ("nan", "zero", "mended"):
            raise OptionError(f'attention: empty_row is "nan", "zero" or "mended", got {self.empty_row!r}')
        if self.window is not None and self.window < 1:
            raise OptionError(f"attention: a window is 1 or more keys, or None, got {self.window}")
        if self.ring and not self.counted:
            raise OptionError("attention: which keys a ring holds is told by their count: give counted=True")

    def _check_shapes(self, q: TensorType, k: TensorType, v: TensorType) -> None:
        if not q.rank == k.rank == v.rank == 4:
            raise ShapeError(f"attention: expected q, k, v of rank 4, [B, heads, length, depth]; got {q}, {k}, {v}")
        for a, b, axis, what in ((q, k, 0, "batch"), (q, v, 0, "batch"), (k, v, 1, "key heads"), (k, v, 2, "keys")):
            unify(a.shape[axis], b.shape[axis], f"attention: the {what} of {a} and {b}")
        unify(q.shape[3], k.shape[3], f"attention: the depth of q {q} and k {k}")
        if exact_div(q.shape[1], k.shape[1]) is None:
            raise ShapeError(f"attention: the {q.shape[1]} heads of q are no multiple of the {k.shape[1]} of k")
        if self.scale is None and not isinstance(q.shape[3], int):
            raise ShapeError(f"attention: give `scale` where the depth of q {q} is not a number")

    def work(self, *x: TensorType) -> Work:
        (out,) = self.infer_types(x)
        q, k, v = x[:3]
        pairs = numel(q.shape[:3]) * k.shape[2]
        read: Size = 0
        for t in x:
            read = read + tensor_bytes(t)
        return Work(pairs * (q.shape[3] * 2 + v.shape[3] * 2 + 15), read, tensor_bytes(out))

    def factor(self, depth: Size) -> float:
        """The number that scores are multiplied with."""
        if self.scale is not None:
            return self.scale
        assert isinstance(depth, int)
        return 1 / math.sqrt(depth) if depth else 1.0

    def reference(self, q: Array, k: Array, v: Array, *more: Array) -> Array:
        given = self.split(more)
        wide = widened(q).dtype
        x, y, z = (narrowed(t.astype(wide), self.activations) for t in (q, k, v))
        room, rows = k.shape[2], q.shape[2]
        keys = np.broadcast_to(np.asarray(room if given.count is None else given.count, np.int64), len(q))
        if ((keys < 0) | (keys > room) & (not self.ring)).any():
            raise ExecutionError(f"attention: the count of keys {keys.tolist()} is not within 0..{room}")
        keys = keys[:, None, None, None]
        at = np.arange(room)
        if self.ring and room:
            at = keys - 1 - (keys - 1 - at) % room  # the last position that each place was filled for
        there = (at >= 0) & (at < keys)
        y, z = (np.where(np.swapaxes(there, 2, 3), t, np.zeros((), t.dtype)) for t in (y, z))
        groups = q.shape[1] // k.shape[1]
        y, z = np.repeat(y, groups, axis=1), np.repeat(z, groups, axis=1)
        scores = np.asarray(self.factor(q.shape[3]), x.dtype) * np.matmul(x, np.swapaxes(y, 2, 3))
        for step, operands in given.steps:
            last = operands[-1].astype(x.dtype)
            match step:
                case "add":
                    scores = scores + last
                case "mul":
                    scores = scores * last
                case "where":
                    scores = np.where(operands[0], scores, last)
                case "softcap":
                    scores = last * np.tanh(scores / last)
        first = keys - rows if given.place is None else np.asarray(given.place, np.int64).reshape(-1, 1, 1, 1)
        position = first + np.arange(rows)[:, None]
        if self.causal:
            there = there & (at <= position)
        if self.window is not None:
            there = there & (at > position - self.window)
        scores = np.where(there, scores, np.asarray(-np.inf, x.dtype))
        peak = np.max(scores, axis=3, keepdims=True, initial=-np.inf)
        total = np.zeros((), x.dtype)
        if given.sinks is not None:
            sinks = given.sinks.astype(x.dtype)[:, None, None]
            peak = np.maximum(peak, sinks)
            total = np.exp(sinks - peak)
        e = np.exp(scores - peak)
        total = total + np.sum(e, axis=3, keepdims=True)
        if self.empty_row == "mended":
            e, total = np.where(np.isnan(total), 0, e), np.where(np.isnan(total), 1, total)
        y = np.matmul(e, z) / total
        empty = (peak == -np.inf) & (self.empty_row == "zero") | (keys == 0)
        return np.where(empty, np.zeros((), y.dtype), y).astype(q.dtype)

    def lower(self, k: Any, q: Any, key: Any, v: Any, *more: Any) -> Any:
        given: Operands[Any] = self.split(more)
        wide = k.widen(q(0, 0, 0, 0)).dtype

        def score(value: Any, *i: Any) -> Any:
            for step, operands in given.steps:
                x = k.cast(operands[-1].broadcast(*i), wide)
                match step:
                    case "add":
                        value = value + x
                    case "mul":
                        value = value * x
                    case "where":
                        value = k.select(operands[0].broadcast(*i), value, x)
                    case "softcap":
                        value = x * k.call("tanh", value / x)
            return value

        first, sinks = given.place, given.sinks

        def one(numbers: Any, b: Any) -> Any:
            return k.cast(numbers(b) if numbers.rank else numbers(), "i64")

        def counted(b: Any) -> Any:
            count, places = one(given.count, b), key.shape[2]
            return k.checked_start(count, np.iinfo(np.int64).max if self.ring else places, 0)

        return k.attention(
            q,
            key,
            v,
            score if given.steps else None,
            scale=self.factor(q.shape[3]),
            causal=self.causal,
            empty_row=self.empty_row,
            count=None if given.count is None else counted,
            window=self.window,
            sinks=None if sinks is None else lambda h: k.cast(sinks(h), wide),
            place=None if first is None else lambda b: one(first, b),
            ring=self.ring,
            activations=self.activations,
        )

    def decompose(self, g: Graph, q: Value, k: Value, v: Value, *more: Value) -> Value:
        given = self.split(more)
        out_type, keys = q.dtype, k.shape[2]
        wide = widest(out_type)
        q, k, v = (_as(g, t, wide) for t in (q, k, v))
        zero, lowest = (g.constant(x, dtype=wide) for x in (0.0, -math.inf))
        there, seen, count = self._seen(g, q.shape[2], keys, given)
        if there is not None:
            # What lies beyond is no number to compute with.
            (rows,) = g.add(Reshape((*there.shape[:2], keys, 1)), there)
            v = g.add(Where(), rows, v, zero)[0]
        k, v = _repeat_heads(g, k, q.shape[1]), _repeat_heads(g, v, q.shape[1])
        (kt,) = g.add(Transpose((0, 1, 3, 2)), k)
        (products,) = g.add(MatMul(self.activations), q, kt)
        (scores,) = g.add(Mul(), products, g.constant(self.factor(q.shape[3]), dtype=wide))
        for step, (*mask, last) in given.steps:
            scores = _stepped(g, step, scores, mask, _as(g, last, wide))
        for mask_ in (there, seen):
            if mask_ is not None:
                (scores,) = g.add(Where(), mask_, scores, lowest)
        empty = None
        if given.sinks is not None:
            (sink,) = g.add(Reshape((1, q.shape[1], 1, 1)), _as(g, given.sinks, wide))
            (sink,) = g.add(Expand((*q.shape[:3], 1)), sink)
            (scores,) = g.add(Concat(3), scores, sink)
        if self.empty_row == "zero":
            (peak,) = g.add(ReduceMax((3,)), scores)
            (empty,) = g.add(Equal(), peak, lowest)
            (scores,) = g.add(Where(), empty, zero, scores)
        elif count is not None and self.empty_row == "nan":
            (empty,) = g.add(Reshape((*(count.shape or (1,)), 1, 1, 1)), count)
            (empty,) = g.add(Equal(), empty, g.constant(0, dtype=count.dtype))
        (weights,) = g.add(Softmax(-1), scores)
        if self.empty_row == "mended":
            (weights,) = g.add(Where(), g.add(IsNan(), weights)[0], zero, weights)
        if given.sinks is not None:
            (weights,) = g.add(Slice((0, 0, 0, 0), (*q.shape[:3], keys), (1, 1, 1, 1)), weights)
        (y,) = g.add(MatMul(self.activations), weights, v)
        if empty is not None:
            (y,) = g.add(Where(), empty, zero, y)
        return _as(g, y, out_type)

    def _seen(
        self, g: Graph, rows: Size, keys: Size, given: Operands[Value]
    ) -> tuple[Value | None, Value | None, Value | None]:
        """Which keys there are, bool [B or 1, 1, 1, keys], which ones each row sees, [B or 1, 1, rows, keys], and their
        checked count; None: all.
        """
        count, there = given.count, None
        (at,) = g.add(Iota(keys))  # the positions of keys
        if count is not None:
            count = _checked_count(g, count, None if self.ring else keys)
            (end,) = g.add(Reshape((*(count.shape or (1,)), 1, 1, 1)), count)
            if self.ring and keys != 0:
                (last,) = g.add(Sub(), end, g.constant(1, dtype="i64"))
                (back,) = g.add(Sub(), last, at)
                (back,) = g.add(Mod(), back, g.add(SizeOf(keys))[0])
                (at,) = g.add(Sub(), last, back)
                (there,) = g.add(LessEqual(), g.constant(0, dtype="i64"), at)
            else:
                (there,) = g.add(Less(), at, end)
        if not self.causal and self.window is None:
            return there, None, count
        (i,) = g.add(Iota(rows, 1))
        (i,) = g.add(Reshape((1, 1, rows, 1)), i)  # the last key that a row sees, and one
        if given.place is not None:
            (first,) = g.add(Reshape((*(given.place.shape or (1,)), 1, 1, 1)), _as(g, given.place, I64))
            (end,) = g.add(Add(), first, i)
        else:
            (end,) = g.add(Add(), i, end if count is not None else g.add(SizeOf(keys))[0])
            (end,) = g.add(Sub(), end, g.add(SizeOf(rows))[0])
        seen: list[Value] = []
        if self.causal:
            seen += g.add(Less(), at, end)
        if self.window is not None:
            (start,) = g.add(Sub(), end, g.constant(self.window, dtype="i64"))
            seen += g.add(LessEqual(), start, at)
        return there, seen[0] if len(seen) == 1 else g.add(And(), *seen)[0], count


@dataclass(frozen=True)
class Operands(Generic[T]):
    """The inputs of attention after q, k and v: each step with its operands, and what the attributes ask for."""

    steps: list[tuple[str, tuple[T, ...]]]
    sinks: T | None
    place: T | None
    count: T | None


def widest(dtype: DType) -> DType:
    """The type that attention of such queries is computed in."""
    return F32 if dtype.is_float and dtype.bits < 32 else dtype


def _as(g: Graph, x: Value, dtype: DType) -> Value:
    return x if x.dtype is dtype else g.add(Cast(dtype), x)[0]


def _stepped(g: Graph, step: str, scores: Value, mask: Sequence[Value], x: Value) -> Value:
    """The scores after a step."""
    match step:
        case "softcap":
            (capped,) = g.add(Tanh(), g.add(Div(), scores, x)[0])
            return g.add(Mul(), x, capped)[0]
        case "where":
            return g.add(Where(), *mask, scores, x)[0]
    return g.add(Add() if step == "add" else Mul(), scores, x)[0]


def _repeat_heads(g: Graph, x: Value, heads: Size) -> Value:
    """[B, Hkv, L, D] -> [B, heads, L, D], each head repeated."""
    batch, own, length, depth = x.shape
    times = exact_div(heads, own)
    if times == 1:
        return x
    assert times is not None
    (x,) = g.add(Reshape((batch, own, 1, length, depth)), x)
    (x,) = g.add(Expand((batch, own, times, length, depth)), x)
    return g.add(Reshape((batch, heads, length, depth)), x)[0]


def _checked_count(g: Graph, count: Value, most: Size | None) -> Value:
    """The count of keys as i64, looked up in 0..most: where it is not within them the run stops. None: no limit."""
    (count,) = g.add(Cast(I64), count)
    low = g.constant(np.iinfo(np.int64).min)
    (bad,) = g.add(Less(), count, g.constant(0, dtype="i64"))  # an index may be negative, a count may not
    if most is None:
        at = g.add(Where(), bad, low, g.constant(0, dtype="i64"))[0]
        (zero,) = g.add(Gather(0), g.add(Iota(1))[0], at)
        return g.add(Add(), count, zero)[0]
    (count,) = g.add(Where(), bad, low, count)
    return g.add(Gather(0), g.add(Iota(most + 1))[0], count)[0]
