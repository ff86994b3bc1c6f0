"""Llama 1 to 3.x, and what is built like it: SmolLM, TinyLlama, Mistral. (arXiv 2302.13971, 2407.21783)"""

from __future__ import annotations

from rlx.models.families.base import Family

__all__ = ["Llama"]


class Llama(Family):
    """RMS norms, rotary positions, grouped heads, a gated MLP; Mistral has a window too."""

    gguf = ("llama",)
    config = ("llama", "mistral")
    interleaved = True
