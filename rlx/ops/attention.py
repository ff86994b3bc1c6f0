"""Scaled dot-product attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from rlx.errors import ExecutionError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import Size, broadcast, exact_div, numel, same, unify
from rlx.ops.base import Op, Work, check_kind, check_same_dtype, register, tensor_bytes, widened
from rlx.ops.contract import MatMul
from rlx.ops.elementwise import Add, And, Cast, Equal, IsNan, Less, LessEqual, Mul, Sub, Where
from rlx.ops.index import Gather, check_indices
from rlx.ops.layout import Expand, Iota, Reshape, SizeOf, Transpose
from rlx.ops.normalize import Softmax
from rlx.ops.reduction import ReduceMax

F32 = DTYPES["f32"]
STEPS: dict[str, type[Op]] = {"add": Add, "mul": Mul, "where": Where}
T = TypeVar("T")


@register
class Attention(Op):
    """softmax(scale * q k^T, after steps) v, with fewer key heads than query heads if their numbers divide.

    q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv] -> [B, H, Lq, Dv]; query head h reads key head h * Hkv // H.
    `scale` None means 1 / sqrt(D). The `steps` are what happens to the scaled scores, in order, with the inputs after
    v: "add" and "mul" take one (floats), "where" takes two: where the first (bool) is false, the second is the score.
    They broadcast to [B, H, Lq, Lk]. Without steps each further input is added, so a bias of -inf masks. `causal`: key
    j is seen by query i only when j <= i + Lk - Lq. `counted`: the last input (i32 or i64, one number [], or [B]) says
    how many keys there are, the first of the Lk that there is room for; it stands for Lk in `causal`. One outside of
    0..Lk stops the run with `ExecutionError`.

    A row whose scores are all -inf sees no key. It gives NaN, or with empty_row="zero" zeros; with "mended" the weights
    of every row in which they are NaN (of one that sees no key, or has a score of NaN or +inf) are zeros. Where Lk is 0
    the sums are empty: zeros. The weights are divided by their sum after v is summed with them, so v within
    +-(the largest float / Lk) can't overflow. (ONNX Attention-24, jax.nn.dot_product_attention)
    """

    scale: float | None = None
    causal: bool = False
    empty_row: str = "nan"
    counted: bool = False
    steps: tuple[str, ...] = ()

    def split(self, more: Sequence[T]) -> tuple[list[tuple[str, tuple[T, ...]]], T | None]:
        """The steps with their operands, and the count of keys, among the inputs after q, k and v.

        Raises `ShapeError` for too many or few.
        """
        room = len(more) - self.counted
        steps = self.steps or ("add",) * room
        if room < 0 or room != sum(1 + (step == "where") for step in steps):
            wanted = f", those of {', '.join(self.steps)}" * bool(self.steps) + ", the count of keys" * self.counted
            raise ShapeError(f"attention: expected q, k, v{wanted}; got {3 + len(more)} inputs")
        rest = iter(more)
        found = [(step, tuple(next(rest) for _ in range(1 + (step == "where")))) for step in steps]
        return found, next(rest, None)

    def infer(self, q: TensorType, k: TensorType, v: TensorType, *more: TensorType) -> TensorType:
        for step in self.steps:
            if step not in STEPS:
                raise OptionError(f"attention: a step is one of {', '.join(STEPS)}, got {step!r}")
        steps, count = self.split(more)
        if self.empty_row not in ("nan", "zero", "mended"):
            raise OptionError(f'attention: empty_row is "nan", "zero" or "mended", got {self.empty_row!r}')
        check_kind(self, q, "f")
        check_same_dtype(self, q, k, v)
        if not q.rank == k.rank == v.rank == 4:
            raise ShapeError(f"attention: expected q, k, v of rank 4, [B, heads, length, depth]; got {q}, {k}, {v}")
        for a, b, axis, what in ((q, k, 0, "batch"), (q, v, 0, "batch"), (k, v, 1, "key heads"), (k, v, 2, "keys")):
            unify(a.shape[axis], b.shape[axis], f"attention: the {what} of {a} and {b}")
        unify(q.shape[3], k.shape[3], f"attention: the depth of q {q} and k {k}")
        if exact_div(q.shape[1], k.shape[1]) is None:
            raise ShapeError(f"attention: the {q.shape[1]} heads of q are no multiple of the {k.shape[1]} of k")
        if self.scale is None and not isinstance(q.shape[3], int):
            raise ShapeError(f"attention: give `scale` where the depth of q {q} is not a number")
        scores = (*q.shape[:3], k.shape[2])
        for step, operands in steps:
            for number, x in enumerate(operands):
                is_mask = step == "where" and number == 0
                what = "mask" if is_mask else "bias" if step == "add" else f"operand of {step!r}"
                check_kind(self, x, "b" if is_mask else "f", what)
                wide = broadcast(x.shape, scores, why=f"attention: the {what} {x} over the scores")
                if len(wide) != 4 or any(same(a, b) is False for a, b in zip(wide, scores, strict=True)):
                    raise ShapeError(f"attention: the {what} {x} does not broadcast to {scores}")
        if count is not None:
            check_indices(count, "attention")
            if count.rank > 1 or (count.rank == 1 and same(count.shape[0], q.shape[0]) is False):
                raise ShapeError(f"attention: the count of keys is one number or [{q.shape[0]}] of them, got {count}")
        return TensorType((*q.shape[:3], v.shape[3]), q.dtype)

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
        steps, count = self.split(more)
        x, y, z = widened(q), widened(k), widened(v)
        keys = np.full(len(q), k.shape[2]) if count is None else np.broadcast_to(count, len(q))
        if ((keys < 0) | (keys > k.shape[2])).any():
            raise ExecutionError(f"attention: the count of keys {keys.tolist()} is not within 0..{k.shape[2]}")
        keys = keys[:, None, None, None]
        there = np.arange(k.shape[2]) < keys
        y, z = (np.where(np.swapaxes(there, 2, 3), t, np.zeros((), t.dtype)) for t in (y, z))
        groups = q.shape[1] // k.shape[1]
        y, z = np.repeat(y, groups, axis=1), np.repeat(z, groups, axis=1)
        scores = np.asarray(self.factor(q.shape[3]), x.dtype) * np.matmul(x, np.swapaxes(y, 2, 3))
        for step, operands in steps:
            last = operands[-1].astype(x.dtype)
            match step:
                case "add":
                    scores = scores + last
                case "mul":
                    scores = scores * last
                case "where":
                    scores = np.where(operands[0], scores, last)
        if self.causal:
            there = there & (np.arange(k.shape[2]) <= np.arange(q.shape[2])[:, None] + keys - q.shape[2])
        scores = np.where(there, scores, np.asarray(-np.inf, x.dtype))
        peak = np.max(scores, axis=3, keepdims=True, initial=-np.inf)
        e = np.exp(scores - peak)
        total = np.sum(e, axis=3, keepdims=True)
        if self.empty_row == "mended":
            e, total = np.where(np.isnan(total), 0, e), np.where(np.isnan(total), 1, total)
        y = np.matmul(e, z) / total
        empty = (peak == -np.inf) & (self.empty_row == "zero") | (keys == 0)
        return np.where(empty, np.zeros((), y.dtype), y).astype(q.dtype)

    def lower(self, k: Any, q: Any, key: Any, v: Any, *more: Any) -> Any:
        count: Any
        steps, count = self.split(more)
        wide = k.widen(q(0, 0, 0, 0)).dtype

        def score(value: Any, *i: Any) -> Any:
            for step, operands in steps:
                last: Any = operands[-1]
                x = k.cast(last.broadcast(*i), wide)
                match step:
                    case "add":
                        value = value + x
                    case "mul":
                        value = value * x
                    case "where":
                        mask: Any = operands[0]
                        value = k.select(mask.broadcast(*i), value, x)
            return value

        def counted(b: Any) -> Any:
            return k.checked_start(count(b) if count.rank else count(), key.shape[2], 0)

        return k.attention(
            q,
            key,
            v,
            score if steps else None,
            scale=self.factor(q.shape[3]),
            causal=self.causal,
            empty_row=self.empty_row,
            count=None if count is None else counted,
        )

    def decompose(self, g: Graph, q: Value, k: Value, v: Value, *more: Value) -> Value:
        steps, count = self.split(more)
        out_type, keys = q.dtype, k.shape[2]
        narrow = out_type.bits < 32
        if narrow:
            q, k, v = (g.add(Cast(F32), t)[0] for t in (q, k, v))
        zero, lowest = (g.constant(x, dtype=q.dtype) for x in (0.0, -math.inf))
        there = None
        if count is not None:
            count = _checked_count(g, count, keys)
            there = _keys_before(g, keys, count)
            # What lies beyond is no number to compute with.
            (rows,) = g.add(Reshape((*there.shape[:2], keys, 1)), there)
            v = g.add(Where(), rows, v, zero)[0]
        k, v = _repeat_heads(g, k, q.shape[1]), _repeat_heads(g, v, q.shape[1])
        (kt,) = g.add(Transpose((0, 1, 3, 2)), k)
        (products,) = g.add(MatMul(), q, kt)
        (scores,) = g.add(Mul(), products, g.constant(self.factor(q.shape[3]), dtype=q.dtype))
        for step, (*mask, last) in steps:
            x = last if last.dtype is q.dtype else g.add(Cast(q.dtype), last)[0]
            scores = g.add(STEPS[step](), *mask, scores, x)[0]
        if self.causal and count is None:
            (scores,) = g.add(Where(), _causal_mask(g, q.shape[2], keys), scores, lowest)
        elif there is not None:
            seen = _keys_before(g, keys, count, q.shape[2]) if self.causal else there
            (scores,) = g.add(Where(), g.add(And(), there, seen)[0] if self.causal else there, scores, lowest)
        empty = None
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
        (y,) = g.add(MatMul(), weights, v)
        if empty is not None:
            (y,) = g.add(Where(), empty, zero, y)
        return g.add(Cast(out_type), y)[0] if narrow else y


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


def _checked_count(g: Graph, count: Value, keys: Size) -> Value:
    """The count of keys as i64, looked up in 0..keys: where it is not within them the run stops."""
    (all_counts,) = g.add(Iota(keys + 1))
    (count,) = g.add(Cast(DTYPES["i64"]), count)
    low = g.constant(-1 - np.iinfo(np.int64).max)
    (bad,) = g.add(Less(), count, g.constant(0, dtype=count.dtype))  # an index may be negative, a count may not
    (count,) = g.add(Where(), bad, low, count)
    return g.add(Gather(0), all_counts, count)[0]


def _keys_before(g: Graph, keys: Size, count: Value | None, rows: Size | None = None) -> Value:
    """bool [B or 1, 1, rows or 1, keys]: j < count; of causal rows j <= i + count - rows."""
    assert count is not None
    (end,) = g.add(Reshape((*(count.shape or (1,)), 1, 1, 1)), count)
    if rows is not None:
        (i,) = g.add(Iota(rows, 1))
        (i,) = g.add(Reshape((1, 1, rows, 1)), i)
        (end,) = g.add(Add(), end, g.add(Sub(), i, g.add(SizeOf(rows))[0])[0])
    return g.add(Less(), g.add(Iota(keys))[0], end)[0]


def _causal_mask(g: Graph, rows: Size, keys: Size) -> Value:
    """bool [rows, keys]: j <= i + keys - rows."""
    (i,) = g.add(Iota(rows))
    (i,) = g.add(Reshape((rows, 1)), i)
    (offset,) = g.add(SizeOf(keys - rows))
    (last,) = g.add(Add(), i, offset)
    (j,) = g.add(Iota(keys))
    return g.add(LessEqual(), j, last)[0]
