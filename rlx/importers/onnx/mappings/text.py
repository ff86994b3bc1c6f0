"""Ops on strings, and n-grams of strings or integers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rlx.importers.onnx.mapping import MICROSOFT, Mapped, NodeContext, onnx_op
from rlx.importers.onnx.mappings.ml import place_of
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array
from rlx.ops.elementwise import Less, Mul
from rlx.ops.layout import Full
from rlx.ops.strings import NgramCounts, RegexFullMatch, StringConcat, StringNormalizer, StringSplit, Tokenizer

F32, I64, STRING = DTYPES["f32"], DTYPES["i64"], DTYPES["string"]


@onnx_op("StringNormalizer", since=10)
def _string_normalizer(ctx: NodeContext) -> Mapped:
    ctx.ignore("locale")  # Python's rules for letters are Unicode's, the same in every place
    stopwords = ctx.texts("stopwords", ())
    case, sensitive = ctx.text("case_change_action", "NONE"), ctx.flag("is_case_sensitive")
    count = ctx.fresh("count", 1, None) if stopwords else 0
    return ctx.add(StringNormalizer(count, case, stopwords, sensitive), ctx.value())


@onnx_op("StringConcat", since=20)
def _string_concat(ctx: NodeContext) -> Mapped:
    return ctx.add(StringConcat(), ctx.value(0), ctx.value(1))


@onnx_op("StringSplit", since=20)
def _string_split(ctx: NodeContext) -> tuple[Mapped, ...]:
    most = ctx.integer("maxsplit") if ctx.given("maxsplit") else None
    delimiter = ctx.text("delimiter", "")
    count = ctx.fresh("count", 0, None if most is None else most + 1)
    return ctx.add_all(StringSplit(count, delimiter, most), ctx.value())


@onnx_op("RegexFullMatch", since=20)
def _regex_full_match(ctx: NodeContext) -> Mapped:
    return ctx.add(RegexFullMatch(ctx.text("pattern")), ctx.value())


@onnx_op("Tokenizer", domain=MICROSOFT)
def _tokenizer(ctx: NodeContext) -> Mapped:
    op = Tokenizer(
        ctx.fresh("count", 0, None),
        ctx.text("pad_value"),
        ctx.text("tokenexp", ""),
        ctx.texts("separators", ()),
        ctx.integer("mincharnum"),
        ctx.flag("mark"),
    )
    return ctx.add(op, ctx.value())


@onnx_op("TfIdfVectorizer", since=9)
def _tf_idf(ctx: NodeContext) -> Mapped:
    """x [C] or [N, C] -> f32 [features] or [N, features]."""
    x = ctx.value()
    if not (x.dtype is STRING or x.dtype.is_integer):
        ctx.fail(f"its input is {x.type}: expected strings or integers")
    grams = ctx.ints("ngram_indexes")
    weights = ctx.floats("weights", ()) or (1.0,) * len(grams)
    mode, features = ctx.text("mode"), max(grams, default=-1) + 1
    if mode not in ("TF", "IDF", "TFIDF"):
        ctx.fail(f"mode {mode!r} must be TF, IDF or TFIDF")
    if len(weights) != len(grams) or min(grams, default=0) < 0:
        ctx.fail(f"its {len(grams)} n-grams are of features >= 0 and have weights, got {len(weights)}")
    pool = np.array(ctx.texts("pool_strings") if x.dtype is STRING else ctx.ints("pool_int64s"), x.dtype.numpy)
    items = np.unique(pool)
    tree = _tree(ctx, np.searchsorted(items, pool), ctx.ints("ngram_counts"), grams)
    op = NgramCounts(
        features, ctx.integer("min_gram_length"), ctx.integer("max_gram_length"), ctx.integer("max_skip_count")
    )
    found = place_of(ctx, x, items) if items.size else ctx.add(Full(x.shape, 0, I64))
    counts = ctx.add(op, found, *map(ctx.graph.constant, tree))
    if mode == "IDF":
        counts = ctx.cast(ctx.add(Less(), ctx.constant(0, F32), counts), F32)
    scale = np.zeros(features, np.float32)
    scale[list(grams)] = weights
    return counts if mode == "TF" else ctx.add(Mul(), counts, ctx.graph.constant(scale))


def _tree(ctx: NodeContext, pool: Array, starts: Sequence[int], grams: Sequence[int]) -> tuple[Array, Array, Array]:
    """The n-grams of a pool of numbers as the tables of `NgramCounts`; those of each n begin at `starts`."""
    sizes = [b - a for a, b in pairwise((*starts, len(pool)))]
    if not 0 < len(starts) <= 16 or starts[0] != 0 or any(size < 0 or size % n for n, size in enumerate(sizes, 1)):
        ctx.fail(f"ngram_counts={list(starts)} does not fit a pool of {len(pool)}")
    pool_grams = [
        tuple(pool[at : at + n].tolist())
        for n, (start, size) in enumerate(zip(starts, sizes, strict=True), 1)
        for at in range(start, start + size, n)
    ]
    if len(pool_grams) != len(grams) or len(set(pool_grams)) != len(grams):
        ctx.fail(
            f"its pool has {len(set(pool_grams))} different n-grams in {len(pool_grams)}, for {len(grams)} features"
        )
    found = dict(zip(pool_grams, grams, strict=True))
    ways = {gram[:i] for gram in pool_grams for i in range(1, len(gram) + 1)}
    order = sorted(
        ways, key=lambda way: (len(way), way)
    )  # so that children lie together, in the order of their parents
    numbers = {way: n for n, way in enumerate(order, 1)} | {(): 0}
    parents = np.array([numbers[way[:-1]] for way in order], np.int64)
    first = np.searchsorted(parents, np.arange(len(order) + 2)).astype(np.int64)
    feature = np.array([-1, *(found.get(way, -1) for way in order)], np.int64)
    return first, np.array([way[-1] for way in order], np.int64), feature
