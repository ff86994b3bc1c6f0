"""TfIdfVectorizer over integers: how often each n-gram of a list occurs."""

from __future__ import annotations

import numpy as np

from rlx.importers.onnx.mapping import Mapped, NodeContext, onnx_op
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, Value
from rlx.ir.shape import max_size
from rlx.ops.contract import MatMul
from rlx.ops.elementwise import Add, And, Equal, Greater, Mul
from rlx.ops.layout import Slice
from rlx.ops.reduction import ReduceSum

F32 = DTYPES["f32"]
_LARGEST = 1 << 24  # entries of the matrix that puts counts in their places


@onnx_op("TfIdfVectorizer", since=9)
def _tf_idf(ctx: NodeContext) -> Mapped:
    """x [C] or [N, C] -> f32 [features] or [N, features]."""
    if ctx.given("pool_strings"):
        ctx.fail("n-grams of strings are not supported")
    x, mode = ctx.value(), ctx.text("mode")
    rows = x if x.rank == 2 else ctx.reshape(x, 1, x.shape[0])
    pool, starts, places = ctx.ints("pool_int64s"), ctx.ints("ngram_counts"), ctx.ints("ngram_indexes")
    shortest, longest = ctx.integer("min_gram_length"), ctx.integer("max_gram_length")
    skips, features = ctx.integer("max_skip_count"), max(places, default=-1) + 1
    weights = ctx.floats("weights", ()) or (1.0,) * len(places)
    if mode not in ("TF", "IDF", "TFIDF") or len(weights) != len(places) or min(places, default=0) < 0:
        ctx.fail(f"mode={mode!r} with {len(places)} n-grams and {len(weights)} weights is not supported")
    if not 0 <= skips < 64 or len(starts) > 16 or len(places) * features > _LARGEST:
        ctx.fail(f"max_skip_count={skips}, {len(starts)} lengths and {features} features are beyond the limits")
    total: Value | None = None
    first = 0
    for n, start in enumerate(starts, 1):
        end = starts[n] if n < len(starts) else len(pool)
        grams = np.array(pool[start:end], np.int64)
        if start > end or grams.size % n:
            ctx.fail(f"ngram_counts {starts} do not fit a pool of {len(pool)}")
        grams, spread = grams.reshape(-1, n), np.zeros((grams.size // n, features), np.float32)
        for k, place in enumerate(places[first : first + len(grams)]):
            spread[k, place] = 1
        first += len(grams)
        if not len(grams) or not shortest <= n <= longest:
            continue
        for skip in range(skips + 1 if n > 1 else 1):
            found = ctx.add(MatMul(), _counts(ctx, rows, grams, skip + 1), ctx.graph.constant(spread))
            total = found if total is None else ctx.add(Add(), total, found)
    if total is None or first != len(places):
        ctx.fail(f"there are {first} n-grams of the lengths asked for and {len(places)} places")
    scale = np.zeros(features, np.float32)
    scale[list(places)] = weights
    if mode == "IDF":
        total = ctx.cast(ctx.add(Greater(), total, ctx.constant(0, F32)), F32)
    if mode != "TF":
        total = ctx.add(Mul(), total, ctx.graph.constant(scale))
    return total if x.rank == 2 else ctx.reshape(total, features)


def _counts(ctx: NodeContext, rows: Value, grams: Array, step: int) -> Value:
    """How often each gram occurs in each row with its items `step` apart, f32 [N, grams]."""
    n = grams.shape[1]
    places = max_size(rows.shape[1] - (n - 1) * step, 0)
    hit: Value | None = None
    for j in range(n):
        at = ctx.add(Slice((0, j * step), (rows.shape[0], places), (1, 1)), rows)
        same = ctx.add(Equal(), ctx.reshape(at, *at.shape, 1), ctx.constant(grams[:, j], rows.dtype))
        hit = same if hit is None else ctx.add(And(), hit, same)
    assert hit is not None
    return ctx.add(ReduceSum((1,), False), ctx.cast(hit, F32))
