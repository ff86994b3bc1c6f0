"""What a decoder's graph is made for where nothing else is asked for, and how it samples."""

from __future__ import annotations

from rlx.ir.shape import Size
from rlx.models.sampling import Sampler

__all__ = [
    "ADAPTER_INPUTS",
    "CONTEXT",
    "KV_DTYPES",
    "MOVED",
    "PREFILL",
    "SPARE",
    "WANTED",
    "WHOLE",
    "cache_rows",
    "sampler_of",
]

CONTEXT, PREFILL = 4096, 512  # tokens of the cache, and of a run
KV_DTYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
WHOLE, MOVED = "cache", "window"  # how names of states of keys and values begin: of all positions, or of a window's
SPARE = 32  # positions before a window that its cache keeps, so that a text can go back by as many
WANTED = 32  # rows of logits of one run, for one sequence
# The inputs that say which LoRA adapter each sequence has, and each wanted row, by the inputs that have these axes.
ADAPTER_INPUTS = {"ids": "adapter", "wanted": "adapter.wanted"}


def sampler_of(vocab: int, rows: Size = 1) -> Sampler:
    """How a decoder's graph samples, where it was asked to."""
    return Sampler(vocab, rows=rows, masked=True)


def cache_rows(window: int | None, capacity: int, prefill: int, rings: bool) -> int:
    """Positions that the cache of a layer has room for: all, or with `rings` those that its window can still see.

    These are window - 1 before the tokens of a run, SPARE more, and `prefill` for its tokens. When the room is full,
    `rlx.llm.slots` moves the last positions to its beginning: so keys lie in their order, as in a cache of them all.
    """
    rows = capacity if window is None or not rings else window - 1 + SPARE + prefill
    return min(rows, capacity)
