"""Qwen 2 and 3. (arXiv 2407.10671, 2505.09388)"""

from __future__ import annotations

from typing import ClassVar

from rlx.ir.graph import Value
from rlx.models.blocks import Blocks, Names
from rlx.models.families.base import COMMON, Family

__all__ = ["Qwen2", "Qwen3"]


class Qwen2(Family):
    """As Llama, with biases of queries, keys and values."""

    gguf = ("qwen2",)
    config = ("qwen2",)


class Qwen3(Family):
    """As Llama, with a norm of each head of queries and keys."""

    gguf: ClassVar[tuple[str, ...]] = ("qwen3",)
    config: ClassVar[tuple[str, ...]] = ("qwen3",)
    names: ClassVar[Names] = {
        **COMMON,
        "attn_q_norm": ("blk.{}.attn_q_norm", "layers.{}.self_attn.q_norm"),
        "attn_k_norm": ("blk.{}.attn_k_norm", "layers.{}.self_attn.k_norm"),
    }

    def heads(self, b: Blocks, x: Value, layer: int) -> tuple[Value, Value, Value]:
        q, k, v = super().heads(b, x, layer)
        return self.norm(b, q, "attn_q_norm", layer), self.norm(b, k, "attn_k_norm", layer), v
