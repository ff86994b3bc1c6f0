"""What a decoder's graph is made for where nothing else is asked for, and how it samples."""

from __future__ import annotations

from rlx.ir.shape import Size
from rlx.models.sampling import Sampler

__all__ = ["CONTEXT", "KV_DTYPES", "PREFILL", "WANTED", "sampler_of"]

CONTEXT, PREFILL = 4096, 512  # tokens of the cache, and of a run
KV_DTYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
WANTED = 32  # rows of logits of one run, for one sequence


def sampler_of(vocab: int, rows: Size = 1) -> Sampler:
    """How a decoder's graph samples, where it was asked to."""
    return Sampler(vocab, rows=rows, masked=True)
