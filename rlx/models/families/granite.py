"""Granite 3. (IBM, 2024)"""

from __future__ import annotations

from rlx.models.config import Config
from rlx.models.families.base import Family
from rlx.models.source import Source
from rlx.records import replace

__all__ = ["Granite"]


class Granite(Family):
    """As Llama, with factors of the embedding, the scores, what layers add, and the logits."""

    gguf = ("granite",)
    config = ("granite",)
    interleaved = True

    def configure(self, config: Config, source: Source, context: int) -> Config:
        real = source.facts.real
        return replace(
            super().configure(config, source, context),
            scale=real("attention_scale", 0.0) or None,
            embedding_scale=real("embedding_scale", 1.0),
            residual_scale=real("residual_scale", 1.0),
            logit_scale=real("logit_scale", 1.0) or 1.0,
        )
