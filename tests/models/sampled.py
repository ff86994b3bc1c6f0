"""What sampling is, in NumPy and f64, one row at a time; and graphs that sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import rlx
from rlx.ir.graph import Graph
from rlx.models.sampling import Row, Sampler
from rlx.ops.random import threefry

Array = np.ndarray[Any, Any]


def changed(logits: Array, row: Row) -> Array:
    """f64 logits after biases, penalties and the mask."""
    s, out = row.sampling, logits.astype(np.float64)
    for token, bias in s.logit_bias.items():
        out[token] += bias
    for token in set(row.history):
        out[token] = out[token] / s.repetition_penalty if out[token] > 0 else out[token] * s.repetition_penalty
        out[token] -= list(row.history).count(token) * s.frequency_penalty + s.presence_penalty
    for token, penalty in repetitions(row).items():
        out[token] -= penalty
    if row.mask is not None:
        bits = np.unpackbits(row.mask.view(np.uint8), bitorder="little")[: len(out)]
        out[bits == 0] = -np.inf
    return out


def repetitions(row: Row) -> dict[int, float]:
    """What is taken off of tokens that go on with a repetition."""
    s, past = row.sampling, list(row.history)
    found: dict[int, float] = {}
    for at in range(len(past)):  # past[at] is the token that came after an earlier occurrence
        n = 0
        while n < at and past[at - 1 - n] == past[len(past) - 1 - n] and past[len(past) - 1 - n] not in s.dry_breakers:
            n += 1
        if s.dry_multiplier and n >= s.dry_allowed_length:
            penalty = s.dry_multiplier * s.dry_base ** (n - s.dry_allowed_length)
            found[past[at]] = max(found.get(past[at], 0), penalty)
    return found


def left(logits: Array, row: Row) -> tuple[Array, float]:
    """Probabilities after all filters, and how near a filter's limit was to changing its mind."""
    s, scaled = row.sampling, (logits - logits.max()) / row.sampling.temperature
    order, margin = np.argsort(-scaled, kind="stable"), np.inf
    p = np.exp(scaled[order])
    if s.top_k:
        p[s.top_k :] = 0
    p /= p.sum()
    keep = np.ones(len(p), bool)
    if s.top_p < 1:
        before = np.cumsum(p) - p
        margin = min(margin, np.abs(before[1:] - s.top_p).min(initial=1))
        keep &= before < s.top_p
    keep[0] = True
    keep &= p >= s.min_p * p[0]
    if s.min_p:
        margin = min(margin, np.abs(p - s.min_p * p[0])[1:].min(initial=1) / p[0])
    p = np.where(keep, p, 0) / p[keep].sum()
    if s.typical_p < 1:
        there = p > 0
        distance = np.full(len(p), np.inf)
        distance[there] = np.abs(-np.log(p[there]) + (p[there] * np.log(p[there])).sum())
        nearest = np.argsort(distance, kind="stable")
        before = np.cumsum(p[nearest]) - p[nearest]
        margin = min(margin, np.abs(before[1:] - s.typical_p).min(initial=1))
        limit = distance[nearest][: max(1, int((before < s.typical_p)[: there.sum()].sum()))].max()
        gaps = np.abs(distance[there] - limit)
        margin = min(margin, gaps[gaps > 0].min(initial=1))
        p = np.where(distance <= limit, p, 0)
        p /= p.sum()
    out = np.zeros(len(p))
    out[order] = p
    return out, float(margin)


def uniform(row: Row) -> float:
    seed = row.sampling.seed
    a, _ = threefry((seed & 0xFFFFFFFF, seed >> 32), np.uint32(row.step), np.uint32(0))
    return float(int(a) >> 8) * 2.0**-24


def expected(logits: Array, row: Row) -> tuple[int, float]:
    """The token, and how near another was."""
    logits = changed(logits, row)
    if not np.isfinite(logits.max()):
        return -1, np.inf
    if row.sampling.temperature == 0:
        ranked = np.sort(logits)[::-1]
        return int(np.argmax(logits)), float(ranked[0] - ranked[1]) if len(ranked) > 1 and ranked[0] > ranked[
            1
        ] else 1.0
    p, margin = left(logits, row)
    order = np.argsort(-logits, kind="stable")
    running = np.cumsum(p[order])
    u = uniform(row)
    margin = min(margin, float(np.abs(running - u).min(initial=1)))
    return int(order[min(int((running <= u).sum()), int(np.nonzero(p[order])[0].max()))]), margin


class Model:
    """A compiled graph of nothing but a sampler; `run` gives its results by name."""

    def __init__(self, sampler: Sampler, dtype: str = "f32", **options: Any) -> None:
        graph = Graph("sampling")
        found = sampler.add(graph, graph.input("logits", (sampler.rows, sampler.vocab), dtype))
        given = {"token": found.token, "logprob": found.logprob}
        if found.top_tokens is not None and found.top_logprobs is not None:
            given |= {"top_tokens": found.top_tokens, "top_logprobs": found.top_logprobs}
        for name, value in given.items():
            graph.output(value, name)
        self.sampler, self.names = sampler, list(given)
        self.compiled = rlx.compile(graph, **(options or {"device": "cpu", "threads": 1}))

    def run(self, logits: Array, rows: Sequence[Row]) -> dict[str, Array]:
        found = self.compiled.run({"logits": logits, **self.sampler.feeds(rows)})
        return dict(zip(self.names, map(np.asarray, found), strict=True))
