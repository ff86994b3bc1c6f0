"""GPT-2. (Radford et al. 2019)"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rlx.ir.graph import Array, Value
from rlx.models.blocks import Blocks, Names
from rlx.models.config import Config
from rlx.models.families.base import Family
from rlx.models.source import Source

__all__ = ["Gpt2"]


class Gpt2(Family):
    """Layer norms, a table of positions, and one matrix for queries, keys and values.

    Matrices of its safetensors lie [in, out].
    """

    gguf = ("gpt2",)
    config = ("gpt2",)
    names: ClassVar[Names] = {
        "token_embd": ("token_embd", "wte"),
        "position_embd": ("position_embd", "wpe"),
        "output_norm": ("output_norm", "ln_f"),
        "output": ("output", "lm_head"),
        "attn_norm": ("blk.{}.attn_norm", "h.{}.ln_1"),
        "attn_qkv": ("blk.{}.attn_qkv", "h.{}.attn.c_attn"),
        "attn_output": ("blk.{}.attn_output", "h.{}.attn.c_proj"),
        "ffn_norm": ("blk.{}.ffn_norm", "h.{}.ln_2"),
        "ffn_up": ("blk.{}.ffn_up", "h.{}.mlp.c_fc"),
        "ffn_down": ("blk.{}.ffn_down", "h.{}.mlp.c_proj"),
    }
    activation = "gelu_tanh"
    epsilon = 1e-5

    def configure(self, config: Config, source: Source, context: int) -> Config:
        return config

    def stored_in_gguf(self, name: str, config: Config) -> Callable[[Array], Array] | None:
        matrix = name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
        return (lambda matrix: matrix.T) if matrix else None  # a bias stays itself

    def embed(self, b: Blocks, ids: Value) -> Value:
        return b.embedding(ids) + b.embedding(b.positions, "position_embd", b.config.context)

    def norm(self, b: Blocks, x: Value, name: str, layer: int | None) -> Value:
        return b.layer_norm(x, name, layer)

    def attention(self, b: Blocks, x: Value, layer: int) -> Value:
        c = b.config
        both = self.linear(b, x, "attn_qkv", layer, 3 * c.hidden)
        q, k, v = (b.heads(part, c.heads) for part in b.parts(both, (c.hidden,) * 3))
        return self.linear(b, b.attention(q, k, v, layer), "attn_output", layer, c.hidden)

    def mlp(self, b: Blocks, x: Value, layer: int) -> Value:
        up = self.act(b, self.linear(b, x, "ffn_up", layer, b.config.ffn))
        return self.linear(b, up, "ffn_down", layer, b.config.hidden)

    def linear(self, b: Blocks, x: Value, name: str, layer: int, width: int) -> Value:
        """A product with a matrix [width, in], or of safetensors [in, width], and a bias."""
        return b.linear(x, name, layer, width, turned=not b.source.gguf)
