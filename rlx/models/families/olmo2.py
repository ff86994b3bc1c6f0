"""OLMo 2. (arXiv 2501.00656)"""

from __future__ import annotations

from typing import ClassVar

from rlx.ir.graph import Value
from rlx.models.blocks import Blocks, Names
from rlx.models.families.base import COMMON, Family

__all__ = ["Olmo2"]


class Olmo2(Family):
    """Norms after both parts of a layer and none before, and of all queries and all keys together."""

    gguf = ("olmo2",)
    config = ("olmo2",)
    names: ClassVar[Names] = {
        **{name: own for name, own in COMMON.items() if name not in ("attn_norm", "ffn_norm")},
        "attn_q_norm": ("blk.{}.attn_q_norm", "layers.{}.self_attn.q_norm"),
        "attn_k_norm": ("blk.{}.attn_k_norm", "layers.{}.self_attn.k_norm"),
        "post_attention_norm": ("blk.{}.post_attention_norm", "layers.{}.post_attention_layernorm"),
        "post_ffw_norm": ("blk.{}.post_ffw_norm", "layers.{}.post_feedforward_layernorm"),
    }
    rope_base = 500000.0

    def layer(self, b: Blocks, x: Value, layer: int) -> Value:
        x = x + self.norm(b, self.attention(b, x, layer), "post_attention_norm", layer)
        return x + self.norm(b, self.mlp(b, x, layer), "post_ffw_norm", layer)

    def heads(self, b: Blocks, x: Value, layer: int) -> tuple[Value, Value, Value]:
        c = b.config
        q = self.norm(b, b.linear(x, "attn_q", layer, c.heads * c.head_dim), "attn_q_norm", layer)
        k = self.norm(b, b.linear(x, "attn_k", layer, c.kv_heads * c.head_dim), "attn_k_norm", layer)
        v = b.linear(x, "attn_v", layer, c.kv_heads * c.head_dim)
        return b.heads(q, c.heads), b.heads(k, c.kv_heads), b.heads(v, c.kv_heads)
