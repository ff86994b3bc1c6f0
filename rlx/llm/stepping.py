"""One run of a language model for several generations."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from rlx.errors import ExecutionError
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.llm.generation import Generation
    from rlx.llm.slots import Slots

__all__ = ["step"]


@dataclass(frozen=True)
class Part:
    """What a run computes for a generation: pending tokens and guesses; `whole`: of what follows these it is asked."""

    made: Generation
    tokens: list[int]
    guesses: list[int]
    whole: bool

    @property
    def wanted(self) -> list[tuple[int, int]]:
        """The places after which a token is chosen."""
        last = len(self.tokens) - 1
        return [(self.made.slot, last + n) for n in range(len(self.guesses) + 1)] if self.whole else []


def step(slots: Slots, generations: Sequence[Generation]) -> list[str]:
    """Computes the next part of each prompt, or the next tokens; gives the text that each goes on by, "" for none."""
    begun = perf_counter()
    for made in generations:
        made.make_room()
    most, rows = slots.room(made.slot for made in generations), slots.rows - len(generations)
    parts = []
    for made in generations:
        tokens = made.pending[:most]
        whole = len(tokens) == len(made.pending)
        guesses = made.guess(min(most - len(tokens), rows)) if whole else []
        rows -= len(guesses)
        parts.append(Part(made, tokens, guesses, whole))
    lengths = [len(slots.filled[made.slot]) for made in generations]
    try:
        chosen, logprobs = _run(slots, parts)
    except BaseException:
        for part, length in zip(parts, lengths, strict=True):
            slots.cut(part.made.slot, length)  # what it was to compute is pending still
        raise
    seconds = perf_counter() - begun
    texts = []
    for part, length in zip(parts, lengths, strict=True):
        own = [chosen.pop(0) for _ in part.wanted]
        probable = [logprobs.pop(0) for _ in part.wanted] if logprobs else []
        text, kept = part.made.took(len(part.tokens), part.guesses, own, seconds, probable)
        if kept < len(part.guesses):
            slots.cut(part.made.slot, length + len(part.tokens) + kept)
        texts.append(text)
    return texts


def _run(slots: Slots, parts: Sequence[Part]) -> tuple[list[int], list[float]]:
    """The tokens that follow at the wanted places of all parts, and where one asks for them their log-probabilities."""
    given = {part.made.slot: part.tokens + part.guesses for part in parts}
    wanted = [place for part in parts for place in part.wanted]
    if not wanted:
        slots.run(given, [], None)
        return [], []
    if all(part.made.choose.plain for part in parts if part.whole):
        return slots.run(given, wanted, "token").tolist(), []
    rows = []
    for part in parts:
        if part.whole:
            text = slots.filled[part.made.slot][-slots.sampler.history :] + part.tokens
            rows += part.made.choose.rows(text, part.guesses, slots.sampler.history)
    asked = any(part.made.logprobs is not None for part in parts if part.whole)
    found, *more = (a.tolist() for a in slots.run_for(given, wanted, ["sampled", "logprob"][: 1 + asked], rows))
    for part in parts:
        if part.whole and found[wanted.index(part.wanted[0])] < 0:
            raise ExecutionError("no token can follow: the logits are not finite, or all tokens are forbidden")
    return found, more[0] if more else []
