"""One run of a language model for several generations."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from rlx.errors import ExecutionError

if TYPE_CHECKING:
    from rlx.llm.generation import Generation
    from rlx.llm.slots import Slots

__all__ = ["step"]


def step(slots: Slots, generations: Sequence[Generation]) -> list[str]:
    """Computes the next part of each prompt, or the next token; gives the text that each goes on by, "" for none."""
    begun = perf_counter()
    for made in generations:
        made.make_room()
    most = slots.room(made.slot for made in generations)
    parts = {made.slot: made.pending[:most] for made in generations}
    whole = [made for made in generations if len(made.pending) <= most]
    wanted = [(made.slot, len(parts[made.slot]) - 1) for made in whole]
    if not whole:
        tokens = []
        slots.run(parts, [], None)
    elif all(made.choose.plain for made in whole):
        tokens = slots.run(parts, wanted, "token").tolist()
    else:
        history = slots.sampler.history
        rows = [made.choose.row((*slots.filled[made.slot], *parts[made.slot])[-history:]) for made in whole]
        tokens = slots.run(parts, wanted, "sampled", rows).tolist()
    took = perf_counter() - begun
    chosen = dict(zip((made.slot for made in whole), tokens, strict=True))
    if any(token < 0 for token in tokens):
        raise ExecutionError("no token can follow: the logits are not finite, or all tokens are forbidden")
    return [made.took(len(parts[made.slot]), chosen.get(made.slot), took) for made in generations]
