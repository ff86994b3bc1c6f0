"""What the memory of a language model depends on, read from GGUF metadata or a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlx.errors import ModelFormatError
from rlx.importers.fields import Fields, sliding_windows
from rlx.records import dataclass

__all__ = ["Architecture", "Layer", "from_config", "from_gguf"]

MAX_LAYERS = 1 << 12
ENCODERS = frozenset(
    {"bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "nomic-bert", "jina-bert-v2", "deberta-v2", "electra"}
)
RECURRENT = frozenset({"mamba", "mamba2", "rwkv", "rwkv6", "rwkv7", "falcon_mamba", "recurrent_gemma", "jamba"})


@dataclass(frozen=True)
class Layer:
    """One layer: KV elements a token (keys and values of all KV heads), sliding window if any, widths."""

    kv_elements: int
    window: int | None
    heads_width: int  # query heads x head size
    ffn: int  # intermediate width that a token passes through, of all its experts together


@dataclass(frozen=True)
class Architecture:
    """A decoder (or, with `causal` False, an encoder without a KV cache)."""

    family: str
    hidden: int
    vocab: int
    context: int | None  # longest that it was made for
    causal: bool
    layers: tuple[Layer, ...]

    def kv_elements_per_token(self) -> int:
        """Elements that one more token adds while no window is full."""
        return sum(layer.kv_elements for layer in self.layers) if self.causal else 0

    def kv_elements(self, context: int) -> int:
        """Elements of the cache of one sequence of `context` tokens; a window layer keeps its window only."""
        if not self.causal:
            return 0
        return sum(layer.kv_elements * min(context, layer.window or context) for layer in self.layers)


def _layer_count(path: str, count: int) -> int:
    if not 1 <= count <= MAX_LAYERS:
        raise ModelFormatError(f"{path}: {count} layers: expected 1 to {MAX_LAYERS}")
    return count


def _refuse_recurrent(path: str, family: str) -> None:
    if family in RECURRENT:
        raise ModelFormatError(f"{path}: {family!r} keeps a recurrent state, which the estimate does not know yet")


def from_gguf(path: str, metadata: Mapping[str, Any], vocab: int) -> Architecture:
    """The architecture of a GGUF file; `vocab` is the number of rows of its embedding. Raises `ModelFormatError`."""
    family = metadata.get("general.architecture")
    if not isinstance(family, str) or not family:
        raise ModelFormatError(f"{path}: general.architecture is missing: not the file of a whole model")
    _refuse_recurrent(path, family)
    f = Fields(path, lambda key: metadata.get(f"{family}.{key}"))
    count = _layer_count(path, f.number("block_count"))
    hidden = f.number("embedding_length")
    heads = f.per_layer("attention.head_count", count, 0)
    kv_heads = heads
    if f.get("attention.head_count_kv") is not None:
        kv_heads = f.per_layer("attention.head_count_kv", count, 0)
    size = hidden // max(1, max(heads))
    key = f.number("attention.key_length", default=size)
    value = f.number("attention.value_length", default=size)
    rank = f.number("attention.kv_lora_rank", default=0)
    rope = f.number("rope.dimension_count", default=0)
    windows = sliding_windows(
        f.number("attention.sliding_window", default=0),
        f.get("attention.sliding_window_pattern"),
        count,
        default=GGUF_PATTERNS.get(family),
    )
    ffn = f.per_layer("feed_forward_length", count, 0)
    used = f.number("expert_used_count", default=0)
    if used:
        own = f.number("expert_feed_forward_length", default=max(ffn))
        shared = f.number("expert_shared_count", default=0)
        dense = f.number("leading_dense_block_count", default=0)
        beside = f.number("expert_shared_feed_forward_length", default=0) if not shared else 0
        ffn = [ffn[i] if i < dense else own * (used + shared) + beside for i in range(count)]
    layers = tuple(
        # Multi-head latent attention keeps one compressed vector and one rotated key for all heads.
        Layer(rank + rope if rank else n * (key + value), window, h * max(key, value), width)
        for h, n, window, width in zip(heads, kv_heads, windows, ffn, strict=True)
    )
    context = f.number("context_length", default=0) or None
    return Architecture(family, hidden, vocab, context, family not in ENCODERS, layers)


# One layer in that many sees everything, the others a window: families whose files don't say which.
GGUF_PATTERNS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "cohere2": 4}
CONFIG_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4}


def from_config(path: str, config: Mapping[str, Any]) -> Architecture:
    """The architecture of a config.json of a transformers model. Raises `ModelFormatError`."""
    inner = config.get("text_config")
    if isinstance(inner, dict):
        config = {**config, **inner}
    family = config.get("model_type")
    if not isinstance(family, str):
        raise ModelFormatError(f"{path}: model_type is missing: not the configuration of a model")
    _refuse_recurrent(path, family)
    f = Fields(path, config.get)
    count = _layer_count(path, f.number("num_hidden_layers", "n_layer", "n_layers"))
    hidden = f.number("hidden_size", "n_embd", "d_model", "dim")
    heads = f.number("num_attention_heads", "n_head", "n_heads")
    kv_heads = f.number("num_key_value_heads", "num_kv_heads", default=heads)
    size = f.number("head_dim", default=hidden // max(1, heads))
    kv = kv_heads * 2 * size
    rank = f.number("kv_lora_rank", default=0)
    if rank:
        kv = rank + f.number("qk_rope_head_dim", default=0)
    window = f.number("sliding_window", default=0) if config.get("use_sliding_window", True) else 0
    kinds = config.get("layer_types")
    pattern = config.get("sliding_window_pattern")
    if isinstance(kinds, list):
        pattern = [kind == "sliding_attention" for kind in kinds]
    windows = sliding_windows(window, pattern, count, CONFIG_PATTERNS.get(family))
    ffn = f.number("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", default=4 * hidden)
    used = f.number("num_experts_per_tok", "num_experts_per_token", default=0)
    own = f.number("moe_intermediate_size", "expert_ffn_hidden_size", default=ffn)
    shared = f.number("n_shared_experts", default=0)
    beside = f.number("shared_expert_intermediate_size", default=0)  # of a shared expert of another width
    dense = f.number("first_k_dense_replace", default=0)
    widths = [ffn if not used or i < dense else own * (used + shared) + beside for i in range(count)]
    layers = tuple(Layer(kv, w, heads * size, width) for w, width in zip(windows, widths, strict=True))
    context = f.number("max_position_embeddings", "n_positions", default=0) or None
    causal = family not in ENCODERS or config.get("is_decoder") is True
    return Architecture(family, hidden, f.number("vocab_size"), context, causal, layers)
