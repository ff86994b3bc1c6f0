"""Sampling in the graph draws what its definition draws, and in the right proportions."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from sampled import Model, changed, expected, left

from rlx.errors import OptionError, ShapeError
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim
from rlx.models.sampling import Row, Sampler, Sampling

Array = np.ndarray[Any, Any]
NEAR = 1e-5  # nearer than this to a limit, f32 and f64 may decide otherwise

SETTINGS = [
    Sampling(),
    Sampling(temperature=0),
    Sampling(temperature=0.3),
    Sampling(temperature=5.0),
    Sampling(top_k=1),
    Sampling(top_k=7),
    Sampling(top_k=500),
    Sampling(top_p=0.0),
    Sampling(top_p=0.5),
    Sampling(top_p=0.999, temperature=4.0),
    Sampling(min_p=0.05),
    Sampling(min_p=1.0),
    Sampling(min_p=1e-6, temperature=3.0),
    Sampling(typical_p=0.5),
    Sampling(typical_p=0.0),
    Sampling(typical_p=0.9, temperature=3.0),
    Sampling(top_k=40, top_p=0.9, min_p=0.01, typical_p=0.9, temperature=0.8),
    Sampling(repetition_penalty=1.5, frequency_penalty=0.4, presence_penalty=0.7),
    Sampling(repetition_penalty=0.5, frequency_penalty=-0.4, temperature=0),
    Sampling(dry_multiplier=0.8, dry_allowed_length=1),
    Sampling(dry_multiplier=5.0, temperature=0, presence_penalty=0.1),
    Sampling(dry_multiplier=1.0, dry_base=3.0, dry_allowed_length=2, dry_breakers=(1,), temperature=0),
    Sampling(logit_bias={0: 3.0, 5: -np.inf, 6: -100.0}),
    Sampling(logit_bias={3: 50.0}, temperature=0),
]


def logits_of(rng: np.random.Generator, rows: int, vocab: int) -> Array:
    return (rng.standard_normal((rows, vocab)) * rng.choice([0.1, 2, 8], (rows, 1))).astype(np.float32)


def mask_of(rng: np.random.Generator, vocab: int) -> Array:
    bits = rng.random(-(-vocab // 32) * 32) < rng.choice([0.02, 0.5])
    bits[rng.integers(vocab)] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def history_of(rng: np.random.Generator, vocab: int) -> list[int]:
    """Up to 9 tokens, of few different ones, or the same ones again."""
    part = rng.integers(0, min(vocab, rng.choice([3, 12])), rng.integers(10)).tolist()
    return (part[:3] * 3 if rng.random() < 0.5 else part)[-int(rng.integers(1, 10)) :]


@pytest.mark.parametrize(
    "vocab, candidates", [(1, 16), (2, 1), (31, 16), (32, 99), (33, 1), (257, 16), (1009, 16), (1009, 9999)]
)
def test_tokens_are_those_of_the_definition(vocab: int, candidates: int) -> None:
    """Every setting in one batch, each with its own history, mask, seed and step."""
    rng = np.random.default_rng(vocab * 7 + candidates)
    settings = [s for s in SETTINGS if all(token < vocab for token in s.logit_bias)]
    sampler = Sampler(vocab, rows=len(settings), history=9, masked=True, candidates=candidates)
    model = Model(sampler)
    checked = 0
    for step in range(12):
        logits = logits_of(rng, len(settings), vocab)
        rows = [
            Row(
                Sampling(**{**{f: getattr(s, f) for f in s.__dataclass_fields__}, "seed": int(rng.integers(1 << 63))}),
                history_of(rng, vocab),
                step,
                mask_of(rng, vocab) if rng.random() < 0.5 else None,
            )
            for s in settings
        ]
        tokens = model.run(logits, rows)["token"]
        for row, given, token in zip(rows, logits, tokens, strict=True):
            wanted, margin = expected(given, row)
            if margin > NEAR:
                checked += 1
                assert token == wanted, row
    assert checked > 6 * len(settings)


def test_few_candidates_give_the_tokens_of_many() -> None:
    """Sorting only the largest logits is an optimisation: tokens are the same, to the bit of u."""
    rng, count = np.random.default_rng(5), 400
    logits, found = logits_of(rng, count, 999), []
    limits = [(1.0, 0), (0.8, 0), (0.5, 200), (0.3, 70)]  # top_p, top_k
    rows = [Row(Sampling(temperature=2.0, top_p=p, top_k=k, seed=i)) for i, (p, k) in enumerate(limits * (count // 4))]
    for n in (8, 64, 999):
        found.append((n, Model(Sampler(999, rows=count, candidates=n)).run(logits, rows)["token"]))
    # sums of other lengths round otherwise: a draw that falls on a limit may differ
    for _, tokens in found[1:]:
        assert (tokens != found[0][1]).sum() <= 1


@cache
def proportions(vocab: int, count: int) -> Model:
    return Model(Sampler(vocab, rows=count, history=4, candidates=6))


@pytest.mark.parametrize("sampling", [s for s in SETTINGS if s.temperature > 0])
def test_tokens_come_in_proportion(sampling: Sampling) -> None:
    """Chi-squared over 20,000 draws of one row of logits; five sigma."""
    vocab, count = 23, 20_000
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal(vocab) * 1.5).astype(np.float32)
    history = [1, 1, 2, 9]
    fields = {f: getattr(sampling, f) for f in sampling.__dataclass_fields__}
    rows = [Row(Sampling(**{**fields, "seed": 77}), history, step) for step in range(count)]
    tokens = proportions(vocab, count).run(np.tile(logits, (count, 1)), rows)["token"]
    p, margin = left(changed(logits, rows[0]), rows[0])
    assert margin > NEAR
    drawn = np.bincount(tokens, minlength=vocab)
    assert not drawn[p == 0].any()
    used = p > 0
    chi = ((drawn[used] - count * p[used]) ** 2 / (count * p[used])).sum()
    freedom = used.sum() - 1
    assert chi <= freedom + 5 * np.sqrt(2 * freedom) + 1e-9 or (p[used] * count < 1).any()


def test_seeds_give_draws_that_are_independent() -> None:
    """Pairs of draws of neighbouring seeds, and of neighbouring steps, are as if drawn apart."""
    vocab, count = 4, 20_000
    sampler = Sampler(vocab, rows=count)
    model = Model(sampler)
    logits = np.zeros((count, vocab), np.float32)
    for rows in (
        [Row(Sampling(seed=i)) for i in range(count)],
        [Row(Sampling(seed=1 << 63), step=i) for i in range(count)],
    ):
        tokens = model.run(logits, rows)["token"]
        pairs = np.bincount(tokens[:-1] * vocab + tokens[1:], minlength=vocab * vocab)
        mean = (count - 1) / vocab**2
        assert ((pairs - mean) ** 2 / mean).sum() < 15 + 5 * np.sqrt(30)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_does_not_depend_on_others(threads: int) -> None:
    """Its token and logprob are the same bits alone and in any batch, also where others need all logits sorted."""
    rng, vocab = np.random.default_rng(11), 3001
    logits = logits_of(rng, 8, vocab)
    rows = [Row(s, [3, 4, 3], step, None) for step, s in enumerate(SETTINGS[2:10])]
    alone = Sampler(vocab, rows=1, candidates=64)
    single = Model(alone)
    one = [single.run(x[None], [r]) for x, r in zip(logits, rows, strict=True)]
    one = [(int(f["token"][0]), float(f["logprob"][0])) for f in one]
    together = Sampler(vocab, rows=Dim("rows", 1, 8), candidates=64)
    many = Model(together, device="cpu", threads=threads)
    for trial in range(6):
        chosen = rng.permutation(8)[: trial % 8 + 1]
        found = many.run(logits[chosen], [rows[i] for i in chosen])
        got = list(zip(found["token"].tolist(), map(float, found["logprob"]), strict=True))
        assert got == [one[i] for i in chosen]


@pytest.mark.parametrize("device", ["reference", "interp"])
def test_devices_agree(device: str) -> None:
    rng, vocab = np.random.default_rng(12), 150
    settings = [s for s in SETTINGS if s.temperature != 5.0]
    sampler = Sampler(vocab, rows=len(settings), masked=True, history=5, candidates=20, logprobs=2)
    logits = logits_of(rng, len(settings), vocab)
    rows = [Row(s, [1, 2, 2], 3, mask_of(rng, vocab)) for s in settings]
    found, here = (Model(sampler, device=d).run(logits, rows) for d in (device, "cpu"))
    np.testing.assert_array_equal(found["token"], here["token"])
    np.testing.assert_allclose(found["logprob"], here["logprob"], atol=1e-5)
    np.testing.assert_array_equal(found["top_tokens"], here["top_tokens"])


@pytest.mark.parametrize("dtype", ["f32", "f16", "f64"])
def test_log_probabilities(dtype: str) -> None:
    """Of the logits as they came in, whatever the options are."""
    rng, vocab = np.random.default_rng(2), 77
    sampler = Sampler(vocab, rows=3, logprobs=5)
    logits = logits_of(rng, 3, vocab).astype({"f32": np.float32, "f16": np.float16, "f64": np.float64}[dtype])
    rows = [Row(Sampling(temperature=0.1)), Row(Sampling(logit_bias={7: 99.0})), Row(Sampling(top_k=2), [1, 2])]
    found = Model(sampler, dtype).run(logits, rows)
    wide = logits.astype(np.float64)
    truth = wide - np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1, keepdims=True)) - wide.max(1, keepdims=True)
    np.testing.assert_allclose(found["logprob"], truth[range(3), found["token"]], atol=3e-6)
    assert found["token"][1] == 7
    best = np.argsort(-wide, axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal(found["top_tokens"], best)
    np.testing.assert_allclose(found["top_logprobs"], np.take_along_axis(truth, best, 1), atol=3e-6)


@pytest.mark.parametrize("setting", [0, 1, 16])
def test_no_token_and_ties(setting: int) -> None:
    sampler = Sampler(40, rows=4, masked=True, candidates=8)
    model = Model(sampler)
    logits = np.zeros((4, 40), np.float32)
    logits[1] = -np.inf
    logits[2, 3] = np.nan
    none, two = np.zeros(2, np.uint32), np.array([1 << 9 | 1 << 20, 0], np.uint32)
    rows = [Row(SETTINGS[setting], mask=m) for m in (none, None, None, two)]
    found = model.run(logits, rows)["token"]
    assert found[:3].tolist() == [-1, -1, -1]
    assert found[3] in ((9,) if setting == 1 else (9, 20))


def test_options_change_without_a_compile() -> None:
    sampler = Sampler(50, rows=1)
    model = Model(sampler)
    logits = np.linspace(0, 1, 50, dtype=np.float32)[None]
    tokens = {int(model.run(logits, [Row(s, [1])])["token"][0]) for s in SETTINGS}
    assert len(tokens) > 1


def test_parts_that_are_not_asked_for_are_not_there() -> None:
    plain = Sampler(50, history=0, biases=0)
    assert set(plain.inputs()) == {"options", "key"}
    with pytest.raises(OptionError, match="made without a mask"):
        plain.feeds([Row(mask=np.zeros(2, np.uint32))])
    with pytest.raises(OptionError, match="made without penalties"):
        plain.feeds([Row(Sampling(presence_penalty=1.0), [1])])
    with pytest.raises(OptionError, match=r"Sampler\(biases=1\)"):
        plain.feeds([Row(Sampling(logit_bias={1: 1.0}))])
    plain.feeds([Row(Sampling(), [1])])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -1.0}, "temperature=-1.0: expected 0 to inf"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": "1"}, "expected a number, got '1'"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 1.5}, "expected an int"),
        ({"top_k": True}, "expected an int"),
        ({"top_p": 1.1}, "top_p=1.1: expected 0 to 1"),
        ({"min_p": -0.1}, "min_p"),
        ({"typical_p": 2}, "typical_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"seed": 1 << 64}, "seed"),
        ({"dry_allowed_length": 0}, "dry_allowed_length=0"),
        ({"dry_breakers": ("a",)}, "dry_breakers"),
        ({"seed": -1}, "seed"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Sampling(**options)


def test_rows_and_shapes_are_checked() -> None:
    sampler = Sampler(50)
    with pytest.raises(OptionError, match="there is no token 50"):
        sampler.feeds([Row(Sampling(), [50])])
    with pytest.raises(OptionError, match="there is no token -1"):
        sampler.feeds([Row(Sampling(logit_bias={-1: 1.0}))])
    with pytest.raises(OptionError, match="the mask has 1 words of 32 bits: expected 2"):
        Sampler(50, masked=True).feeds([Row(mask=np.zeros(1, np.uint32))])
    graph = Graph("x")
    with pytest.raises(ShapeError, match=r"expected logits \[rows, 50\]"):
        sampler.add(graph, graph.input("logits", (1, 51), "f32"))
    for bad in ({"vocab": 0}, {"vocab": 5, "history": -1}, {"vocab": 5, "logprobs": 6}, {"vocab": 5, "candidates": 0}):
        with pytest.raises(OptionError, match="Sampler"):
            Sampler(**bad)
