"""Gemma 2 and 3. (arXiv 2408.00118, 2503.19786)"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from rlx.importers.fields import Fields
from rlx.ir.graph import Array, Value
from rlx.models.blocks import Blocks, Names
from rlx.models.config import Config
from rlx.models.families.base import COMMON, Family
from rlx.models.rope import config_rope, gguf_rope
from rlx.models.source import Source
from rlx.records import replace

__all__ = ["Gemma2", "Gemma3"]

NORMS = {
    "post_attention_norm": ("blk.{}.post_attention_norm", "layers.{}.post_attention_layernorm"),
    "ffn_norm": ("blk.{}.ffn_norm", "layers.{}.pre_feedforward_layernorm"),
    "post_ffw_norm": ("blk.{}.post_ffw_norm", "layers.{}.post_feedforward_layernorm"),
}


KINDS = (("full_attention", 1e6), ("sliding_attention", 1e4))  # of layers, and the bases of their positions


class Gemma2(Family):
    """Norms before and after both parts of a layer, by 1 + w; capped scores and logits; every other layer a window."""

    gguf = ("gemma2",)
    config: ClassVar[tuple[str, ...]] = ("gemma2",)
    names: ClassVar[Names] = {**COMMON, **NORMS}
    activation = "gelu_tanh"
    every = 2
    caps = (50.0, 30.0)  # of scores and logits, where a file has none
    widest = 46  # layers of the model whose scores are divided by the root of hidden / heads; GGUF files don't say it

    def configure(self, config: Config, source: Source, context: int) -> Config:
        facts, heads = source.facts, config.hidden // config.heads
        scalar = facts.real("query_scalar", float(heads if config.layers == self.widest else config.head_dim))
        return replace(
            super().configure(config, source, context),
            scale=1 / math.sqrt(scalar) if scalar > 0 else None,
            attention_cap=facts.real("attention_cap", self.caps[0]),
            final_cap=facts.real("final_cap", self.caps[1]),
            embedding_scale=math.sqrt(config.hidden),
        )

    def stored_in_gguf(self, name: str, config: Config) -> Callable[[Array], Array] | None:
        return (lambda scale: scale + np.float32(1)) if name.endswith("norm") else None

    def norm(self, b: Blocks, x: Value, name: str, layer: int | None) -> Value:
        # converters to GGUF have added the 1
        return b.rms_norm(x, name, layer, 0.0 if b.source.gguf else 1.0)

    def layer(self, b: Blocks, x: Value, layer: int) -> Value:
        y = self.attention(b, self.norm(b, x, "attn_norm", layer), layer)
        x = x + self.norm(b, y, "post_attention_norm", layer)
        y = self.mlp(b, self.norm(b, x, "ffn_norm", layer), layer)
        return x + self.norm(b, y, "post_ffw_norm", layer)


class Gemma3(Gemma2):
    """As Gemma 2 without caps, with norms of each head of queries and keys.

    Layers with a window have rotary positions of their own base, 10000.
    """

    gguf = ("gemma3",)
    config = ("gemma3", "gemma3_text")
    names: ClassVar[Names] = {
        **COMMON,
        **NORMS,
        "attn_q_norm": ("blk.{}.attn_q_norm", "layers.{}.self_attn.q_norm"),
        "attn_k_norm": ("blk.{}.attn_k_norm", "layers.{}.self_attn.k_norm"),
    }
    every = 6
    rope_base = 1e6
    caps = (0.0, 0.0)
    widest = 62

    def configure(self, config: Config, source: Source, context: int) -> Config:
        fields, plain, near = source.facts.fields, Fields(source.path, lambda key: None), 10000.0
        made = super().configure(config, source, context)
        if source.gguf:
            base = fields.real("rope.freq_base_swa", default=near)
            return replace(made, window_rope=gguf_rope(plain, config.head_dim, base, context, {}))
        given = fields.get("rope_parameters")
        if isinstance(given, dict) and "sliding_attention" in given:
            far, own = (config_rope(fields, config.head_dim, b, context, kind) for kind, b in KINDS)
            return replace(made, rope=far, window_rope=own)
        base = fields.real("rope_local_base_freq", default=near)
        return replace(made, window_rope=config_rope(plain, config.head_dim, base, context))

    def heads(self, b: Blocks, x: Value, layer: int) -> tuple[Value, Value, Value]:
        q, k, v = super().heads(b, x, layer)
        return self.norm(b, q, "attn_q_norm", layer), self.norm(b, k, "attn_k_norm", layer), v
