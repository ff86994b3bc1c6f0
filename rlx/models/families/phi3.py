"""Phi-3 and Phi-4 mini. (arXiv 2404.14219)"""

from __future__ import annotations

from typing import ClassVar

from rlx.ir.graph import Value
from rlx.models.blocks import Blocks, Names
from rlx.models.families.base import COMMON, Family

__all__ = ["Phi3"]


class Phi3(Family):
    """As Llama, with one matrix for queries, keys and values and one for gate and up, and stretched positions."""

    gguf = ("phi3",)
    config = ("phi3",)
    names: ClassVar[Names] = {
        **COMMON,
        "attn_qkv": ("blk.{}.attn_qkv", "layers.{}.self_attn.qkv_proj"),
        "ffn_up": ("blk.{}.ffn_up", "layers.{}.mlp.gate_up_proj"),
    }
    epsilon = 1e-5

    def heads(self, b: Blocks, x: Value, layer: int) -> tuple[Value, Value, Value]:
        return b.fused_heads(x, layer)

    def mlp(self, b: Blocks, x: Value, layer: int) -> Value:
        c = b.config
        gate, up = b.parts(b.linear(x, "ffn_up", layer, 2 * c.ffn), (c.ffn, c.ffn))
        return b.linear(self.act(b, gate) * up, "ffn_down", layer, c.hidden)
