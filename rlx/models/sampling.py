"""Sampling as part of the graph: from logits to tokens, with options that each run gives anew.

    sampler = Sampler(vocab=32000)
    found = sampler.add(graph, logits)  # logits [rows, vocab]; declares the inputs sampling.*
    graph.output(found.token, "token")
    model.run({..., **sampler.feeds([Row(Sampling(temperature=0.7, top_p=0.9, seed=1), step=0)])})

For each row, in this order:

1. `logit_bias` is added. Of a token that is c > 0 times among the last ones, a logit above 0 is divided by
   `repetition_penalty`, one below is multiplied by it; then c * `frequency_penalty` + `presence_penalty` is taken off.
   Of a token that would go on with a repetition of n >= `dry_allowed_length` tokens (the last n are somewhere among the
   last ones too, with it after them), `dry_multiplier` * `dry_base` ** (n - `dry_allowed_length`) is taken off; a
   repetition doesn't reach over `dry_breakers`. ("Don't repeat yourself", text-generation-webui#5677)
   Tokens that the mask forbids get -inf. With `temperature` 0 the largest is taken, the first of equals.
2. Logits are divided by `temperature` and sorted, the lower token first of equals. p is their softmax over what is
   left: `top_k` leaves so many; `top_p` the fewest whose p together reach it; `min_p` those with p >= min_p * the
   largest p; `typical_p` those whose -log p is nearest to the entropy (of what is left, with p anew), the fewest that
   reach it.
3. The first token at which the running sum of p passes u is drawn; u is uniform in [0, 1): Threefry of `seed` and
   `step`.

A row's token depends on that row alone, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.errors import OptionError
from rlx.ir.graph import Graph, Value
from rlx.records import dataclass, field
from rlx.units import as_int, as_number

__all__ = ["NUMBERS", "Number", "Row", "Sampled", "Sampler", "Sampling"]

Array = NDArray[Any]
COLUMNS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_reach",
)  # fmt: skip
MAX_TOP_K = 1 << 24  # whole numbers that f32 holds


@dataclass(frozen=True)
class Number:
    """A number of `Sampling`: from `low` to `high`, a whole one where these are ints, and what it does."""

    low: float
    high: float
    what: str


NUMBERS: Mapping[str, Number] = {
    "temperature": Number(0.0, math.inf, "Of draws; 0 takes the likeliest token, larger ones make the odds more even."),
    "top_k": Number(0, MAX_TOP_K, "With a temperature: draw of the likeliest so many; 0 for all."),
    "top_p": Number(0.0, 1.0, "With a temperature: of the fewest likeliest that have this share."),
    "min_p": Number(0.0, 1.0, "With a temperature: of those at least this part as likely as the likeliest."),
    "typical_p": Number(0.0, 1.0, "With a temperature: of the fewest most typical that have this share."),
    "repetition_penalty": Number(1e-6, math.inf, "Makes the last 64 tokens less likely: divides their logits."),
    "frequency_penalty": Number(-1e6, 1e6, "Is taken off a logit for each time that its token is among the last 64."),
    "presence_penalty": Number(-1e6, 1e6, "Is taken off the logits of the last 64 tokens."),
    "dry_multiplier": Number(0.0, 1e6, "Above 0 makes tokens less likely that would go on with a repetition (DRY)."),
    "dry_base": Number(1.0, 1e6, "Of DRY: how much more for each token that the repetition is longer."),
    "dry_allowed_length": Number(1, MAX_TOP_K, "Of DRY: shorter repetitions are let be."),
    "seed": Number(0, (1 << 64) - 1, "Of draws: equal seeds give equal texts; by chance where none is given."),
}


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; what is not given changes nothing. The module says what each does.

    `seed`: equal seeds and steps give equal tokens of equal logits. `logit_bias`: what is added, by token; -inf
    forbids.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_breakers: Sequence[int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises `OptionError` for a value that is not allowed."""
        for name, number in NUMBERS.items():
            low, high = number.low, number.high
            whole, given = isinstance(low, int), getattr(self, name)
            value = as_int(given) if whole else as_number(given)
            if value is None:
                raise OptionError(f"{name}: expected {'an int' if whole else 'a number'}, got {given!r:.60}")
            if not low <= value <= high or value == math.inf:
                raise OptionError(f"{name}={value}: expected {low:g} to {high:g}")
            object.__setattr__(self, name, value)
        if not isinstance(self.dry_breakers, Sequence) or not all(type(t) is int for t in self.dry_breakers):
            raise OptionError(f"dry_breakers: expected tokens, got {self.dry_breakers!r:.60}")
        if not isinstance(self.logit_bias, Mapping):
            raise OptionError(f"logit_bias: expected numbers by token, got {self.logit_bias!r:.60}")
        for token, bias in self.logit_bias.items():
            if type(token) is not int or not isinstance(bias, int | float) or math.isnan(bias) or bias == math.inf:
                raise OptionError(f"logit_bias: expected numbers by token, got {token!r:.60}: {bias!r:.60}")


@dataclass(frozen=True)
class Row:
    """What one row of logits is sampled by: options, the last tokens (for penalties), which draw of its seed it is.

    `mask`: u32 words, or None for all tokens: token t is allowed where bit t % 32 of word t // 32 is set.
    """

    sampling: Sampling = Sampling()
    history: Sequence[int] = ()
    step: int = 0
    mask: Array | None = None


@dataclass(frozen=True)
class Sampled:
    """Of each row: `token` i32 [rows], -1 where no token has a finite largest logit; its `logprob` f32 [rows].

    `top_tokens` i32 and `top_logprobs` f32 [rows, n]: the n likeliest. Log-probabilities are those of the logits as
    they came in, before all options.
    """

    token: Value
    logprob: Value
    top_tokens: Value | None = None
    top_logprobs: Value | None = None


class Sampler:
    """Adds sampling to a graph, and makes the arrays of its inputs.

    `rows`: of logits (an int or a dim). `history`, `biases`: the most last tokens and biased tokens of a row; 0 leaves
    penalties or biases out of the graph. `masked`: whether there is a mask. `logprobs`: how many of the likeliest
    tokens are given out. `candidates`: how many of the largest logits are sorted at first; where options leave more,
    all are.
    """

    def __init__(
        self,
        vocab: int,
        *,
        rows: Any = 1,
        history: int = 64,
        biases: int = 32,
        masked: bool = False,
        logprobs: int = 0,
        candidates: int = 1024,
    ) -> None:
        for name, value, low in (
            ("vocab", vocab, 1), ("history", history, 0), ("biases", biases, 0), ("logprobs", logprobs, 0),
            ("candidates", candidates, 1),
        ):  # fmt: skip
            if type(value) is not int or value < low:
                raise OptionError(f"Sampler: {name}={value!r}: expected an int of at least {low}")
        if logprobs > vocab:
            raise OptionError(f"Sampler: logprobs={logprobs}: there are only {vocab} tokens")
        self.vocab, self.rows, self.history, self.biases = vocab, rows, history, biases
        self.masked, self.logprobs, self.candidates = masked, logprobs, min(candidates, vocab)
        self.words = -(-vocab // 32)

    # ---- in the graph

    def add(self, graph: Graph, logits: Value, prefix: str = "sampling.") -> Sampled:
        """Samples from logits [rows, vocab] of any float type; declares the inputs. Raises `ShapeError`."""
        from rlx.models.sampled import sampled  # a process with a compiled model needs no ops

        return sampled(self, graph, logits, prefix)

    def inputs(self) -> dict[str, tuple[tuple[Any, ...], str]]:
        """Shape and element type of each input, by its name without the prefix."""
        rows = self.rows
        found: dict[str, tuple[tuple[Any, ...], str]] = {
            "options": ((rows, len(COLUMNS)), "f32"),
            "key": ((rows, 3), "u32"),
        }
        if self.history:
            found["history"] = ((rows, self.history), "i32")
        if self.biases:
            found["bias_tokens"] = ((rows, self.biases), "i32")
            found["bias"] = ((rows, self.biases), "f32")
        if self.masked:
            found["mask"] = ((rows, self.words), "u32")
        return found

    # ---- for a run

    def check(self, sampling: Sampling) -> None:
        """Raises `OptionError` for biases that the graph has no room for, or of tokens that there are not."""
        biases = sampling.logit_bias
        wrong = next((token for token in biases if not 0 <= token < self.vocab), None)
        if wrong is not None:
            raise OptionError(f"logit_bias: there is no token {wrong}: expected 0 to {self.vocab - 1}")
        if len(biases) > self.biases:
            raise OptionError(f"logit_bias: {len(biases)} tokens; there is room for {self.biases}")

    def feeds(self, rows: Sequence[Row], prefix: str = "sampling.") -> dict[str, Array]:
        """The arrays of the inputs by name. Raises `OptionError` for rows that don't fit the graph."""
        count = len(rows)
        found: dict[str, Array] = {
            "options": np.array([self._options(r) for r in rows], np.float32).reshape(count, len(COLUMNS)),
            "key": np.array(
                [[r.sampling.seed & 0xFFFFFFFF, r.sampling.seed >> 32, r.step & 0xFFFFFFFF] for r in rows], np.uint32
            ).reshape(count, 3),
        }
        if self.history:
            found["history"] = np.full((count, self.history), -1, np.int32)
        if self.biases:
            found["bias_tokens"] = np.zeros((count, self.biases), np.int32)
            found["bias"] = np.zeros((count, self.biases), np.float32)
        if self.masked:
            found["mask"] = np.full((count, self.words), 0xFFFFFFFF, np.uint32)
        for i, row in enumerate(rows):
            self._fill(found, i, row)
        return {prefix + name: array for name, array in found.items()}

    def _options(self, row: Row) -> list[float]:
        """A row of the input `options`."""
        breakers = set(row.sampling.dry_breakers)
        reach = 0  # how many of the last tokens come after the last breaker
        if row.sampling.dry_multiplier:
            last = list(row.history)[-self.history :] if self.history else []
            reach = next((n for n, token in enumerate(reversed(last)) if token in breakers), len(last))
        return [*(getattr(row.sampling, name) for name in COLUMNS[:-1]), reach]

    def _fill(self, found: Mapping[str, Array], i: int, row: Row) -> None:
        sampling, what = row.sampling, f"sampling: row {i}"
        last = list(row.history)[-self.history :] if self.history else []
        penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        if (penalties != (1.0, 0.0, 0.0) or sampling.dry_multiplier) and not self.history and row.history:
            raise OptionError(f"{what}: the graph was made without penalties: Sampler(history=64)")
        for token in (*last, *sampling.logit_bias):
            if not 0 <= token < self.vocab:
                raise OptionError(f"{what}: there is no token {token}: expected 0 to {self.vocab - 1}")
        if last:
            found["history"][i, : len(last)] = last
        if len(sampling.logit_bias) > self.biases:
            raise OptionError(
                f"{what}: logit_bias has {len(sampling.logit_bias)} tokens, and the graph room for {self.biases}: "
                f"Sampler(biases={len(sampling.logit_bias)})"
            )
        for k, (token, bias) in enumerate(sampling.logit_bias.items()):
            found["bias_tokens"][i, k], found["bias"][i, k] = token, bias
        if row.mask is not None:
            if not self.masked:
                raise OptionError(f"{what}: the graph was made without a mask: Sampler(masked=True)")
            words = np.asarray(row.mask).view(np.uint32).ravel()
            if words.size < self.words:
                raise OptionError(f"{what}: the mask has {words.size} words of 32 bits: expected {self.words}")
            found["mask"][i] = words[: self.words]
