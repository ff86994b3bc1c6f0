"""A token drawn out of what top-k, top-p, min-p and typical-p leave of a distribution; `sampling.py` defines them.

The largest logits are sorted, and decide nearly always. Where they don't (a filter leaves more tokens than those, or
the draw falls beyond them), all logits are sorted, in a branch that otherwise doesn't run. Each row takes the token of
its own case, so that its bits don't depend on other rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx import numpy as rnp
from rlx import ops
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, Value
from rlx.ops.control import If
from rlx.records import dataclass

__all__ = ["Filters", "draw"]

ZERO, ONE, FAR = np.float32(0), np.float32(1), np.float32(np.inf)
I32 = DTYPES["i32"]


@dataclass(frozen=True)
class Filters:
    """The options of each row, f32 [rows, 1]."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    typical_p: Any


def draw(graph: Graph, logits: Value, filters: Filters, u: Value, candidates: int) -> Value:
    """Tokens i32 [rows, 1] out of logits f32 [rows, vocab], by `u` f32 [rows, 1] in [0, 1)."""
    vocab = int(logits.shape[1])
    most = rnp.max(logits, axis=1, keepdims=True)
    heat = rnp.where(filters.temperature > ZERO, filters.temperature, ONE)
    scaled = (logits - most) / heat
    total = rnp.sum(rnp.exp(scaled), axis=1, keepdims=True)
    token, sure = _among(scaled, total, filters, u, candidates)
    if candidates < vocab:
        token = _where_unsure(graph, token, sure, scaled, total, filters, u)
    good = rnp.less(rnp.abs(most), FAR)  # not so for NaN
    drawn: Value = rnp.where(good, token, np.int32(-1))
    return drawn


def _where_unsure(
    graph: Graph, token: Value, sure: Value, scaled: Value, total: Value, filters: Filters, u: Value
) -> Value:
    """The token where it is sure, else that of all logits, which are sorted if any row needs it."""
    f = filters
    given = [token, sure, scaled, total, u, f.temperature, f.top_k, f.top_p, f.min_p, f.typical_p]
    whole, kept = Graph("whole"), Graph("kept")
    inside, other = ([g.input(f"in{i}", v.shape, v.dtype) for i, v in enumerate(given)] for g in (whole, kept))
    found, _ = _among(inside[2], inside[3], Filters(*inside[5:]), inside[4], int(scaled.shape[1]))
    whole.output(rnp.where(inside[1], inside[0], found), "token")
    kept.output(other[0], "token")
    unsure = rnp.any(rnp.logical_not(sure))
    return graph.add(If(), unsure, *given, regions=[whole, kept])[0]


def _among(scaled: Value, total: Value, filters: Filters, u: Value, count: int) -> tuple[Value, Value]:
    """The token among the `count` largest, i32 [rows, 1], and whether no other could have been it, bool [rows, 1]."""
    everything = count == scaled.shape[1]
    values, tokens = ops.top_k(scaled, k=count)
    place = np.arange(count, dtype=np.float32)
    by_k = rnp.logical_and(filters.top_k > ZERO, filters.top_k <= np.float32(count))
    weight = rnp.where(rnp.logical_or(rnp.equal(filters.top_k, ZERO), place < filters.top_k), rnp.exp(values), ZERO)
    running = rnp.cumsum(weight, axis=1)
    reached = running[:, -1:]
    mass = rnp.where(by_k, reached, total)  # of what top-k leaves
    goal = filters.top_p * mass
    kept = rnp.logical_or(rnp.logical_or(filters.top_p >= ONE, running - weight < goal), rnp.less(place, ONE))
    weight = rnp.where(rnp.logical_and(kept, weight >= filters.min_p), weight, ZERO)
    # No other is left where top-k or top-p ends among these, or min-p before the last; a top-k that ends further on
    # leaves a mass that is not known here.
    cut = rnp.logical_and(filters.top_p < ONE, reached >= goal)
    bounded = rnp.logical_or(rnp.logical_or(by_k, cut), rnp.exp(values[:, -1:]) < filters.min_p)
    bounded = rnp.logical_and(bounded, filters.top_k <= np.float32(count))
    free = rnp.logical_not(rnp.logical_or(filters.top_p < ONE, filters.min_p > ZERO))
    free = rnp.logical_and(free, rnp.equal(filters.top_k, ZERO))
    typical = filters.typical_p < ONE
    weight = rnp.where(typical, _typical(values, weight, filters.typical_p, count), weight)
    running = rnp.cumsum(weight, axis=1)
    last = running[:, -1:]
    all_of_it = rnp.logical_and(free, rnp.logical_not(typical))
    passed = u * rnp.where(all_of_it, total, last)
    index = rnp.sum((running <= passed).astype(np.int32), axis=1, keepdims=True)
    highest = rnp.max((weight > ZERO).astype(np.int32) * np.arange(count, dtype=np.int32), axis=1, keepdims=True)
    greedy = rnp.equal(filters.temperature, ZERO)
    index = rnp.where(greedy, np.int32(0), rnp.minimum(index, highest))
    token = ops.cast(ops.gather_elements(tokens, index, axis=1), to=I32)
    if everything:
        return token, rnp.equal(index, index)
    sure = rnp.logical_or(bounded, rnp.logical_and(all_of_it, passed < last))
    return token, rnp.logical_or(greedy, sure)


def _typical(values: Value, weight: Value, typical_p: Value, count: int) -> Value:
    """The weights with those set to 0 whose -log p is further from the entropy than the fewest that reach typical_p."""
    mass = rnp.sum(weight, axis=1, keepdims=True)
    there = weight > ZERO
    log_p = rnp.where(there, values, ZERO) - rnp.log(mass)
    entropy = -rnp.sum(weight * log_p, axis=1, keepdims=True) / mass
    distance = rnp.where(there, rnp.abs(-log_p - entropy), FAR)
    near, places = ops.top_k(distance, k=count, largest=False)
    sorted_weight = ops.gather_elements(weight, places, axis=1)
    before = rnp.cumsum(sorted_weight, axis=1) - sorted_weight
    needed = rnp.where(before < typical_p * mass, near, -FAR)
    # The nearest is always kept.
    limit = rnp.maximum(rnp.max(rnp.where(rnp.less(near, FAR), needed, -FAR), axis=1, keepdims=True), near[:, :1])
    near_ones: Value = rnp.where(distance <= limit, weight, ZERO)
    return near_ones
