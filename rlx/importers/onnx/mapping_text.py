"""Ops on strings, and n-grams of strings or integers."""

from __future__ import annotations

import numpy as np

from rlx.importers.onnx.mapping import MICROSOFT, Mapped, NodeContext, onnx_op
from rlx.ir.dtype import DTYPES
from rlx.ops.strings import NgramWeights, RegexFullMatch, StringConcat, StringNormalizer, StringSplit, Tokenizer

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
    places = ctx.ints("ngram_indexes")
    weights = ctx.floats("weights", ()) or (1.0,) * len(places)
    pool = ctx.texts("pool_strings") if x.dtype is STRING else ctx.ints("pool_int64s")
    op = NgramWeights(
        ctx.ints("ngram_counts"),
        max(places, default=-1) + 1,
        ctx.text("mode"),
        ctx.integer("min_gram_length"),
        ctx.integer("max_gram_length"),
        ctx.integer("max_skip_count"),
    )
    tables = (np.array(pool, x.dtype.numpy), np.array(places, np.int64), np.array(weights, np.float32))
    return ctx.add(op, x, *map(ctx.graph.constant, tables))
