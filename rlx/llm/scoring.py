"""How probable texts are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlx.errors import OptionError
from rlx.progress import report
from rlx.records import dataclass
from rlx.units import as_int

if TYPE_CHECKING:
    from rlx.llm.model import LanguageModel

__all__ = ["Score", "logprobs_of", "perplexity_of"]

ROWS = 32  # of logits at a time


@dataclass(frozen=True)
class Score:
    """Natural logarithms of the probabilities of tokens after those before them: logprobs[i] is that of ids[i + 1]."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def perplexity(self) -> float:
        """exp of the mean of -log-probability; NaN for a text of one token."""
        return math.exp(-sum(self.logprobs) / len(self.logprobs)) if self.logprobs else math.nan


def logprobs_of(llm: LanguageModel, ids: Sequence[int]) -> list[float]:
    """ln of the probability of each token but the first, after those before it; computed in f64 from the logits."""
    found: list[float] = []
    last = len(ids) - 1  # nothing follows this one
    with llm.alone():
        slot, _ = llm.begin(None, [])
        for start in range(0, last, ROWS):
            part = ids[start : min(start + ROWS, last)]
            logits = llm.extend(slot, part, "logits").astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            chosen = logits[np.arange(len(part)), np.asarray(ids[start + 1 : start + 1 + len(part)])]
            found += (chosen - np.log(np.exp(logits).sum(axis=1))).tolist()
    return found


def perplexity_of(llm: LanguageModel, ids: Sequence[int], stride: int) -> float:
    """What `LanguageModel.perplexity` gives; the last token of a window begins the next, where that follows at once."""
    step = as_int(stride)
    if step is None or not 1 <= step <= llm.context:
        raise OptionError(f"stride={stride!r}: expected 1 to the {llm.context} tokens of the context")
    if len(ids) < 2:
        raise OptionError(
            f"perplexity: the text has {len(ids)} token{'' if len(ids) == 1 else 's'}; expected 2 or more, as a token "
            "is judged by those before it"
        )
    found: list[float] = []
    for start in range(0, len(ids) - 1, step):
        window = ids[start : start + llm.context + 1]
        new = start + len(window) - 1 - len(found)  # those that no window before this one reached
        if new > 0:
            found += logprobs_of(llm, window)[len(window) - 1 - new :]
        report("tokens", len(found) / (len(ids) - 1))
    return Score(tuple(ids), tuple(found)).perplexity
