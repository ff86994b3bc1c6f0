"""Sampling as nodes of a graph; sampling.py says what they compute."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlx import numpy as rnp
from rlx import ops
from rlx.errors import ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, Value
from rlx.models.draw import Filters, draw
from rlx.models.penalties import not_repeated, penalised
from rlx.models.sampling import COLUMNS, Sampled, Sampler
from rlx.ops.random import threefry_rounds

__all__ = ["sampled"]


def sampled(sampler: Sampler, graph: Graph, logits: Value, prefix: str) -> Sampled:
    """What `Sampler.add` gives."""
    if logits.rank != 2 or logits.shape[1] != sampler.vocab:
        raise ShapeError(f"Sampler: expected logits [rows, {sampler.vocab}], got {logits.type}")
    given = {name: graph.input(prefix + name, shape, kind) for name, (shape, kind) in sampler.inputs().items()}
    raw = _cast(logits, "f32")
    options = {name: given["options"][:, i : i + 1] for i, name in enumerate(COLUMNS)}
    changed = _changed(sampler, raw, given, options)
    key = given["key"]
    bits, _ = threefry_rounds(key[:, 0], key[:, 1], key[:, 2], key[:, 2] * np.uint32(0))
    u = _cast(bits >> np.uint32(8), "f32") * np.float32(2.0**-24)
    filters = Filters(*(options[name] for name in ("temperature", "top_k", "top_p", "min_p", "typical_p")))
    token = draw(graph, changed, filters, u[:, None], sampler.candidates)
    return _sampled(sampler, raw, token)


def _changed(sampler: Sampler, logits: Value, given: Mapping[str, Value], options: Mapping[str, Value]) -> Value:
    """The logits after biases, penalties and the mask."""
    if sampler.biases:
        logits = ops.scatter_elements(logits, given["bias_tokens"], given["bias"], axis=1, reduction="add")
    if sampler.history:
        logits = penalised(logits, given["history"], options)
        logits = not_repeated(logits, given["history"], options)
    if sampler.masked:
        bits = given["mask"][:, :, None] >> np.arange(32, dtype=np.uint32)
        allowed = rnp.not_equal(bits & np.uint32(1), np.uint32(0))
        allowed = rnp.reshape(allowed, (-1, sampler.words * 32))[:, : sampler.vocab]
        logits = rnp.where(allowed, logits, np.float32(-np.inf))
    return logits


def _sampled(sampler: Sampler, raw: Value, token: Value) -> Sampled:
    most = rnp.max(raw, axis=1, keepdims=True)
    norm = most + rnp.log(rnp.sum(rnp.exp(raw - most), axis=1, keepdims=True))
    logprob = (ops.gather_elements(raw, rnp.maximum(token, np.int32(0)), axis=1) - norm)[:, 0]
    if not sampler.logprobs:
        return Sampled(token[:, 0], logprob)
    values, tokens = ops.top_k(raw, k=sampler.logprobs)
    return Sampled(token[:, 0], logprob, _cast(tokens, "i32"), values - norm)


def _cast(x: Value, dtype: str) -> Value:
    made: Value = ops.cast(x, to=DTYPES[dtype])
    return made
