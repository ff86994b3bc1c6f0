"""Encoders: BERT, RoBERTa, XLM-R, Nomic's and ModernBERT. (arXiv 1810.04805, 1911.02116, 2402.01613, 2412.13663)"""

from __future__ import annotations

from typing import Any, ClassVar

from rlx.errors import ModelFormatError
from rlx.ir.graph import Value
from rlx.models.blocks import Blocks, Names
from rlx.models.config import Config
from rlx.models.families.base import Family
from rlx.models.rope import config_rope, gguf_rope
from rlx.models.source import Source
from rlx.records import replace

__all__ = ["Bert", "ModernBert", "NomicBert", "Roberta"]

EMBEDDING: Names = {
    "token_embd": ("token_embd", "embeddings.word_embeddings"),
    "token_types": ("token_types", "embeddings.token_type_embeddings"),
    "token_embd_norm": ("token_embd_norm", "embeddings.LayerNorm|emb_ln"),
}


class Bert(Family):
    """Learned positions, biases, and a layer norm after each part of a layer; all texts are of token type 0."""

    gguf: ClassVar[tuple[str, ...]] = ("bert",)
    config: ClassVar[tuple[str, ...]] = ("bert",)
    names: ClassVar[Names] = {
        **EMBEDDING,
        "position_embd": ("position_embd", "embeddings.position_embeddings"),
        "attn_q": ("blk.{}.attn_q", "encoder.layer.{}.attention.self.query"),
        "attn_k": ("blk.{}.attn_k", "encoder.layer.{}.attention.self.key"),
        "attn_v": ("blk.{}.attn_v", "encoder.layer.{}.attention.self.value"),
        "attn_output": ("blk.{}.attn_output", "encoder.layer.{}.attention.output.dense"),
        "attn_output_norm": ("blk.{}.attn_output_norm", "encoder.layer.{}.attention.output.LayerNorm"),
        "ffn_up": ("blk.{}.ffn_up", "encoder.layer.{}.intermediate.dense"),
        "ffn_down": ("blk.{}.ffn_down", "encoder.layer.{}.output.dense"),
        "layer_output_norm": ("blk.{}.layer_output_norm", "encoder.layer.{}.output.LayerNorm"),
    }
    activation = "gelu"
    epsilon = 1e-12

    def configure(self, config: Config, source: Source, context: int) -> Config:
        return config

    def first_position(self, source: Source) -> int:
        """The row of the table of positions that the first token gets."""
        return 0

    def embed(self, b: Blocks, ids: Value) -> Value:
        x = b.embedding(ids)
        if b.has("token_types.weight"):
            count = b.rows_of("token_types.weight")
            x = x + b.wide(b.param("token_types.weight", None, (count, b.config.hidden)))[0]
        if "position_embd" in self.names:
            first = self.first_position(b.source)
            places = b.positions + first if first else b.positions
            x = x + b.embedding(places, "position_embd", b.config.context + first)
        return self.norm(b, x, "token_embd_norm", None)

    def norm(self, b: Blocks, x: Value, name: str, layer: int | None) -> Value:
        return b.layer_norm(x, name, layer)

    def layer(self, b: Blocks, x: Value, layer: int) -> Value:
        x = self.norm(b, x + self.attention(b, x, layer), "attn_output_norm", layer)
        return self.norm(b, x + self.mlp(b, x, layer), "layer_output_norm", layer)

    def mlp(self, b: Blocks, x: Value, layer: int) -> Value:
        up = self.act(b, b.linear(x, "ffn_up", layer, b.config.ffn))
        return b.linear(up, "ffn_down", layer, b.config.hidden)

    def last(self, b: Blocks, x: Value) -> Value:
        """What follows the last layer."""
        return x


class Roberta(Bert):
    """As BERT; safetensors count positions from the token that pads on, llama.cpp's converter leaves these rows out."""

    gguf = ()
    config = ("roberta", "xlm-roberta", "camembert")

    def configure(self, config: Config, source: Source, context: int) -> Config:
        return replace(config, context=config.context - self.first_position(source))

    def first_position(self, source: Source) -> int:
        return source.facts.fields.number("pad_token_id", default=1) + 1


class NomicBert(Bert):
    """Rotary positions, a gated MLP, and one matrix for queries, keys and values."""

    gguf = ("nomic-bert",)
    config = ("nomic_bert",)
    names: ClassVar[Names] = {
        **EMBEDDING,
        "attn_qkv": ("blk.{}.attn_qkv", "encoder.layers.{}.attn.Wqkv"),
        "attn_q": ("blk.{}.attn_q", "layers.{}.self_attn.q_proj"),
        "attn_k": ("blk.{}.attn_k", "layers.{}.self_attn.k_proj"),
        "attn_v": ("blk.{}.attn_v", "layers.{}.self_attn.v_proj"),
        "attn_output": ("blk.{}.attn_output", "encoder.layers.{}.attn.out_proj|layers.{}.self_attn.o_proj"),
        "attn_output_norm": ("blk.{}.attn_output_norm", "encoder.layers.{}.norm1|layers.{}.post_attention_layernorm"),
        "ffn_gate": ("blk.{}.ffn_gate", "encoder.layers.{}.mlp.fc12|layers.{}.mlp.gate_proj"),
        "ffn_up": ("blk.{}.ffn_up", "encoder.layers.{}.mlp.fc11|layers.{}.mlp.up_proj"),
        "ffn_down": ("blk.{}.ffn_down", "encoder.layers.{}.mlp.fc2|layers.{}.mlp.down_proj"),
        "layer_output_norm": ("blk.{}.layer_output_norm", "encoder.layers.{}.norm2|layers.{}.post_mlp_layernorm"),
    }
    activation = "silu"
    rope_base = 1000.0

    def configure(self, config: Config, source: Source, context: int) -> Config:
        trained = source.facts.fields.number("max_trained_positions", default=config.context) or config.context
        return replace(Family.configure(self, config, source, context), context=min(config.context, trained))

    def heads(self, b: Blocks, x: Value, layer: int) -> tuple[Value, Value, Value]:
        return b.fused_heads(x, layer) if b.has("attn_qkv.weight", layer) else super().heads(b, x, layer)

    def mlp(self, b: Blocks, x: Value, layer: int) -> Value:
        return Family.mlp(self, b, x, layer)


class ModernBert(Bert):
    """Norms before each part of a layer, but the first, rotary positions, and layers that see half a window both ways.

    Of three layers the first sees everything; those with a window have rotary positions of their own base.
    """

    gguf = ("modern-bert",)
    config = ("modernbert",)
    names: ClassVar[Names] = {
        "token_embd": ("token_embd", "embeddings.tok_embeddings"),
        "token_embd_norm": ("token_embd_norm", "embeddings.norm"),
        "attn_norm": ("blk.{}.attn_norm", "layers.{}.attn_norm"),
        "attn_qkv": ("blk.{}.attn_qkv", "layers.{}.attn.Wqkv"),
        "attn_output": ("blk.{}.attn_output", "layers.{}.attn.Wo"),
        "ffn_norm": ("blk.{}.ffn_norm", "layers.{}.mlp_norm"),
        "ffn_up": ("blk.{}.ffn_up", "layers.{}.mlp.Wi"),
        "ffn_down": ("blk.{}.ffn_down", "layers.{}.mlp.Wo"),
        "output_norm": ("output_norm", "final_norm"),
    }
    epsilon = 1e-5

    def configure(self, config: Config, source: Source, context: int) -> Config:
        f, dim, far, near = source.facts.fields, config.head_dim, 160000.0, 10000.0  # the published models' bases
        if source.gguf:
            window, pattern = source.facts.number("window", 0), f.get("attention.sliding_window_pattern")
            base = source.facts.real("rope_base", far)
            rope = gguf_rope(f, dim, base, context, {})
            own = gguf_rope(f, dim, f.real("rope.freq_base_swa", default=near), context, {})
        else:
            window = f.number("local_attention", default=128)
            pattern = f.get("layer_types") or f.number("global_attn_every_n_layers", default=3)
            rope = config_rope(f, dim, f.real("global_rope_theta", default=far), context, "full_attention")
            own = config_rope(f, dim, f.real("local_rope_theta", default=near), context, "sliding_attention")
        reach = window // 2 + 1 if window else None  # itself, and so many on each side
        windows = tuple(reach if seen else None for seen in self._near(source, config.layers, pattern))
        return replace(config, windows=windows, rope=rope, window_rope=own)

    def _near(self, source: Source, layers: int, pattern: Any) -> list[bool]:
        """Which layers have a window: as a list says, or all but the first of so many."""
        if isinstance(pattern, list):
            if len(pattern) != layers:
                raise ModelFormatError(f"{source.path}: layers with a window: expected a list of {layers}, one a layer")
            return [one is True or one == "sliding_attention" for one in pattern]
        every = pattern if type(pattern) is int else 3
        return [n % every != 0 if every else True for n in range(layers)]

    def layer(self, b: Blocks, x: Value, layer: int) -> Value:
        normed = self.norm(b, x, "attn_norm", layer) if b.has("attn_norm.weight", layer) else x
        x = x + self.attention(b, normed, layer)
        return x + self.mlp(b, self.norm(b, x, "ffn_norm", layer), layer)

    def heads(self, b: Blocks, x: Value, layer: int) -> tuple[Value, Value, Value]:
        return b.fused_heads(x, layer)

    def mlp(self, b: Blocks, x: Value, layer: int) -> Value:
        c = b.config
        gate, up = b.parts(b.linear(x, "ffn_up", layer, 2 * c.ffn), (c.ffn, c.ffn))
        return b.linear(self.act(b, gate) * up, "ffn_down", layer, c.hidden)

    def last(self, b: Blocks, x: Value) -> Value:
        return self.norm(b, x, "output_norm", None)
