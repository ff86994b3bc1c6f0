"""What a family of decoders is: its names, and how a layer computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from rlx import ops
from rlx.errors import ModelFormatError
from rlx.ir.graph import Array, Value
from rlx.models.blocks import Blocks, Names
from rlx.models.config import Config
from rlx.models.rope import config_rope, gguf_rope
from rlx.models.source import Source
from rlx.records import replace

__all__ = ["ACTIVATIONS", "COMMON", "Family"]

COMMON: Names = {
    "token_embd": ("token_embd", "embed_tokens"),
    "output_norm": ("output_norm", "norm"),
    "output": ("output", "lm_head"),
    "attn_norm": ("blk.{}.attn_norm", "layers.{}.input_layernorm"),
    "attn_q": ("blk.{}.attn_q", "layers.{}.self_attn.q_proj"),
    "attn_k": ("blk.{}.attn_k", "layers.{}.self_attn.k_proj"),
    "attn_v": ("blk.{}.attn_v", "layers.{}.self_attn.v_proj"),
    "attn_output": ("blk.{}.attn_output", "layers.{}.self_attn.o_proj"),
    "ffn_norm": ("blk.{}.ffn_norm", "layers.{}.post_attention_layernorm"),
    "ffn_gate": ("blk.{}.ffn_gate", "layers.{}.mlp.gate_proj"),
    "ffn_up": ("blk.{}.ffn_up", "layers.{}.mlp.up_proj"),
    "ffn_down": ("blk.{}.ffn_down", "layers.{}.mlp.down_proj"),
}

ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "silu": ops.silu,
    "gelu": ops.gelu,
    "gelu_tanh": partial(ops.gelu, approximate="tanh"),
}
SPELLED = {
    "swish": "silu", "swiglu": "silu", "geglu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip


class Family:
    """Models of layers x + attention(norm(x)), then x + mlp(norm(x)), with RMS norms and rotary positions.

    A family gives what is its own. `gguf` and `config` are the names of its architecture in files. `interleaved`: its
    GGUF files have the rows of q and k in an order in which rotary positions turn pairs (2j, 2j + 1), as llama.cpp's
    converter makes it; safetensors always turn pairs (j, j + dim / 2).
    """

    gguf: ClassVar[tuple[str, ...]] = ()
    config: ClassVar[tuple[str, ...]] = ()
    names: ClassVar[Names] = COMMON
    interleaved: ClassVar[bool] = False
    mixture: ClassVar[bool] = False  # whether its MLPs are of experts
    activation: ClassVar[str] = "silu"
    rope_base: ClassVar[float] = 10000.0  # where the file has none
    epsilon: ClassVar[float] = 1e-6
    every: ClassVar[int | None] = None  # of so many layers the last has no window, where the file gives no list

    def configure(self, config: Config, source: Source, context: int) -> Config:
        """The configuration with what is the family's own, for a cache of `context` tokens.

        Raises `ModelFormatError`.
        """
        facts = source.facts
        dim = facts.number("rope_dim", config.head_dim)
        base = facts.real("rope_base", self.rope_base)
        if source.gguf:
            found = {
                name: source.array(f"{name}.weight")
                for name in ("rope_freqs", "rope_factors_long", "rope_factors_short")
            }
            factors = {name: array for name, array in found.items() if array is not None}
            rope = gguf_rope(facts.fields, dim, base, context, factors)
        else:
            rope = config_rope(facts.fields, dim, base, context)
        return replace(config, rope=rope)

    def act(self, b: Blocks, x: Value) -> Value:
        """The activation that the file names, else the family's."""
        keys = ("hidden_activation",) if b.source.gguf else ("hidden_activation", "hidden_act", "activation_function")
        name = b.source.facts.fields.text(*keys, default=self.activation)
        made: Value = ACTIVATIONS[activation_named(SPELLED.get(name, name), b.source)](x)
        return made

    def stored_in_gguf(self, name: str, config: Config) -> Callable[[Array], Array] | None:
        """What becomes of a tensor of a folder on its way into a GGUF file, None where it stays; `name` is ours."""
        if not self.interleaved or name not in ("attn_q", "attn_k"):
            return None
        heads = config.heads if name == "attn_q" else config.kv_heads

        def in_pairs(rows: Array) -> Array:
            parts = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
            return parts.swapaxes(1, 2).reshape(rows.shape)

        return in_pairs

    # ---- the parts of a decoder

    def embed(self, b: Blocks, ids: Value) -> Value:
        """x of token ids [batch, tokens]."""
        x = b.embedding(ids)
        return x if b.config.embedding_scale == 1 else x * b.constant(b.config.embedding_scale)

    def norm(self, b: Blocks, x: Value, name: str, layer: int | None) -> Value:
        """The norm that the family has."""
        return b.rms_norm(x, name, layer)

    def layer(self, b: Blocks, x: Value, layer: int) -> Value:
        """One layer."""
        x = self.add(b, x, self.attention(b, self.norm(b, x, "attn_norm", layer), layer))
        return self.add(b, x, self.mlp(b, self.norm(b, x, "ffn_norm", layer), layer))

    def add(self, b: Blocks, x: Value, more: Value) -> Value:
        """The residual sum."""
        return x + (more if b.config.residual_scale == 1 else more * b.constant(b.config.residual_scale))

    def heads(self, b: Blocks, x: Value, layer: int) -> tuple[Value, Value, Value]:
        """Queries, keys and values as heads, before they are turned."""
        c = b.config
        counts = {"attn_q": c.heads, "attn_k": c.kv_heads, "attn_v": c.kv_heads}
        q, k, v = (b.heads(b.linear(x, name, layer, n * c.head_dim), n) for name, n in counts.items())
        return q, k, v

    def attention(self, b: Blocks, x: Value, layer: int) -> Value:
        """Attention of x to all before, and the projection of its heads."""
        c = b.config
        q, k, v = self.heads(b, x, layer)
        rope = c.window_rope if c.windows[layer] is not None and c.window_rope is not None else c.rope
        y = b.attention(b.rotate(q, rope), b.rotate(k, rope), v, layer)
        return b.linear(y, "attn_output", layer, c.hidden)

    def mlp(self, b: Blocks, x: Value, layer: int) -> Value:
        """down(act(gate(x)) * up(x))."""
        c = b.config
        gate, up = (b.linear(x, name, layer, c.ffn) for name in ("ffn_gate", "ffn_up"))
        return b.linear(self.act(b, gate) * up, "ffn_down", layer, c.hidden)

    def logits(self, b: Blocks, x: Value) -> Value:
        """[rows, hidden], normed -> [rows, vocab]; without a head of its own by the table of the embedding."""
        c = b.config
        tied = not b.source.gguf and b.source.facts.fields.flag(
            "tie_word_embeddings", default=not b.has("output.weight")
        )
        own = b.has("output.weight") and not tied
        y = b.linear(x, "output" if own else "token_embd", None, c.vocab)
        y = y if c.logit_scale == 1 else y / b.constant(c.logit_scale)
        return y if not c.final_cap else b.constant(c.final_cap) * ops.tanh(y / b.constant(c.final_cap))


def activation_named(name: str, source: Source) -> str:
    """The name, if it is known; else `ModelFormatError`."""
    if name not in ACTIVATIONS:
        raise ModelFormatError(f"{source.path}: activation {name!r} is not known; known are {', '.join(ACTIVATIONS)}")
    return name
