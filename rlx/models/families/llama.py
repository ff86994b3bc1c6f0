"""Llama 1 to 3.x, and what is built like it: SmolLM, TinyLlama, Mistral. (arXiv 2302.13971, 2407.21783)"""

from __future__ import annotations

from typing import ClassVar

from rlx.models.families.base import Family

__all__ = ["Llama"]


class Llama(Family):
    """RMS norms, rotary positions, grouped heads, a gated MLP; Mistral has a window too."""

    gguf: ClassVar[tuple[str, ...]] = ("llama",)
    config: ClassVar[tuple[str, ...]] = ("llama", "mistral")
    interleaved = True
