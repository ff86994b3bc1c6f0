"""What a generation can be told."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from rlx.errors import OptionError
from rlx.models.constraint import Constraint
from rlx.models.sampling import NUMBERS, Number, Sampling
from rlx.records import dataclass, field, names_of
from rlx.units import as_int

__all__ = ["MOST_GUESSES", "NUMBERS", "OVERFLOWS", "GenerationKeywords", "Number", "Options", "options_of"]

DRAWN = tuple(name for name in names_of(Sampling) if name != "seed")
MOST_GUESSES = 16
OVERFLOWS = ("error", "truncate", "shift")

ELSEWHERE = {  # what other libraries call it -> what is written here
    "max_new_tokens": "max_tokens= is the number of new tokens",
    "max_length": "max_tokens= is the number of new tokens, without those of the prompt",
    "n_predict": "max_tokens= is the number of new tokens",
    "do_sample": "temperature= above 0 draws tokens",
    "temp": "temperature= says how even the odds of a draw are",
    "repeat_penalty": "repetition_penalty= makes tokens less likely that were there",
    "grammar": "constraint=llm.constraints.grammar(...) gives a text its form",
    "response_format": "constraint=llm.constraints.json_schema(...) gives a text its form",
    "stream": 'pieces of text come one by one, and "".join(...) is the whole',
}


@dataclass(frozen=True)
class Options:
    """`stop`: texts before which it ends. `ignore_eos`: go on after the token that ends an answer.

    `constraint`: the form that the answer has, of `LanguageModel.constraints`. `overflow`: what is done where the
    context is full: "error", "truncate" or "shift". `speculate`: how many tokens may be guessed ahead. `adapter`: names
    of the LoRA adapters that count, none or one; given as that one or None, and all where it is not given. `logprobs`:
    whether the text has those of its tokens. `sampling`: how tokens are drawn; given by its fields (temperature, top_k,
    top_p, min_p, typical_p, repetition_penalty, frequency_penalty, presence_penalty, logit_bias, seed), with
    temperature 0, the likeliest token, where none is given, and a seed of chance.
    """

    stop: Sequence[str] = ()
    ignore_eos: bool = False
    constraint: Constraint | None = None
    overflow: str = "error"
    speculate: int = 0
    adapter: tuple[str, ...] | None = None
    logprobs: bool = False
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))


class GenerationKeywords(TypedDict, total=False):
    """The options of a generation as keywords, for type checkers."""

    stop: str | Sequence[str]
    ignore_eos: bool
    constraint: Constraint | None
    overflow: str
    speculate: int
    adapter: str | None
    logprobs: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_breakers: Sequence[int]
    logit_bias: Mapping[int, float]
    seed: int | None


def options_of(given: Mapping[str, Any]) -> Options:
    """The options of keywords. Raises `OptionError`."""
    own = ("stop", "ignore_eos", "constraint", "overflow", "speculate", "adapter", "logprobs")
    for name in given:
        if name not in (*own, *DRAWN, "seed"):
            meant = f"{ELSEWHERE[name]}; " if name in ELSEWHERE else ""
            known = ("max_tokens", *own, *DRAWN, "seed")
            raise OptionError(f"unknown option {name!r}: {meant}known are {', '.join(known)}")
    stop = given.get("stop")
    stops = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Iterable):
        raise OptionError(f"stop={stop!r:.60}: expected a text or several, none of them empty")
    stops = tuple(stops)
    if not all(isinstance(s, str) and s for s in stops):
        raise OptionError(f"stop={stop!r}: expected a text or several, none of them empty")
    constraint = given.get("constraint")
    if not isinstance(constraint, Constraint | None):
        raise OptionError(f"constraint={constraint!r:.60}: expected what LanguageModel.constraints makes")
    drawn = {name: value for name, value in given.items() if name in DRAWN}
    filtered = drawn.keys() & {"top_k", "top_p", "min_p", "typical_p"}
    if filtered and "temperature" not in drawn:
        raise OptionError(f"{', '.join(sorted(filtered))}: has no effect without a temperature; give temperature=1.0")
    seed = given.get("seed")
    seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
    sampling = Sampling(**{"temperature": 0.0, **drawn}, seed=seed)
    overflow = given.get("overflow", "error")
    if overflow not in OVERFLOWS:
        raise OptionError(f"overflow={overflow!r:.60}: expected {', '.join(OVERFLOWS)}")
    guesses = as_int(given.get("speculate", 0))
    if guesses is None or not 0 <= guesses <= MOST_GUESSES:
        raise OptionError(f"speculate={given['speculate']!r:.60}: expected 0 to {MOST_GUESSES} tokens to guess ahead")
    adapter, logprobs = _adapter(given), given.get("logprobs", False)
    if not isinstance(logprobs, bool):
        raise OptionError(f"logprobs={logprobs!r:.60}: expected True or False")
    ignore = given.get("ignore_eos", False) is True
    return Options(stops, ignore, constraint, overflow, guesses, adapter, logprobs, sampling)


def _adapter(given: Mapping[str, Any]) -> tuple[str, ...] | None:
    if "adapter" not in given:
        return None
    name = given["adapter"]
    if not isinstance(name, str | None):
        raise OptionError(f"adapter={name!r:.60}: expected the name of one, or None")
    return () if name is None else (name,)
