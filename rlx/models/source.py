"""A language model's files: what they say of it, under one set of keys for both formats, and their tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlx.errors import ModelFormatError
from rlx.importers.fields import Fields
from rlx.importers.folder import read_folder
from rlx.importers.gguf import GgufArray, read_gguf_parts
from rlx.importers.stored import Stored, gguf_tensors, safetensors_tensors
from rlx.ir.graph import Array
from rlx.records import dataclass

__all__ = ["Facts", "Source", "open_source"]

# our key: its name in GGUF (after the name of the architecture), and its names in a config.json
KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "layers": (("block_count",), ("num_hidden_layers", "n_layer")),
    "hidden": (("embedding_length",), ("hidden_size", "n_embd")),
    "heads": (("attention.head_count",), ("num_attention_heads", "n_head")),
    "kv_heads": (("attention.head_count_kv",), ("num_key_value_heads",)),
    "head_dim": (("attention.key_length",), ("head_dim",)),
    "value_dim": (("attention.value_length",), ("head_dim",)),
    "ffn": (("feed_forward_length",), ("intermediate_size", "n_inner")),
    "context": (("context_length",), ("max_position_embeddings", "n_positions")),
    "epsilon": (
        ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
        ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps"),
    ),
    "window": (("attention.sliding_window",), ("sliding_window",)),
    "experts": (("expert_count",), ("num_local_experts", "num_experts", "n_routed_experts")),
    "experts_used": (("expert_used_count",), ("num_experts_per_tok",)),
    "expert_ffn": (("expert_feed_forward_length",), ("moe_intermediate_size",)),
    "shared_ffn": (("expert_shared_feed_forward_length",), ("shared_expert_intermediate_size",)),
    "attention_scale": (("attention.scale",), ("attention_multiplier",)),
    "attention_cap": (("attn_logit_softcapping",), ("attn_logit_softcapping",)),
    "final_cap": (("final_logit_softcapping",), ("final_logit_softcapping",)),
    "embedding_scale": (("embedding_scale",), ("embedding_multiplier",)),
    "residual_scale": (("residual_scale",), ("residual_multiplier",)),
    "logit_scale": (("logit_scale",), ("logits_scaling",)),
    "rope_dim": (("rope.dimension_count",), ()),
    "rope_base": (("rope.freq_base",), ("rope_theta", "rotary_emb_base")),
    "query_scalar": ((), ("query_pre_attn_scalar",)),
}


@dataclass(frozen=True)
class Facts:
    """Look-ups by our keys; the messages name the file's own. Raises `ModelFormatError`."""

    fields: Fields
    gguf: bool

    def _names(self, key: str) -> tuple[str, ...]:
        return KEYS[key][0 if self.gguf else 1]

    def number(self, key: str, default: int | None = None) -> int:
        """A natural number."""
        names = self._names(key)
        return self.fields.number(*names, default=default) if names or default is None else default

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        names = self._names(key)
        return self.fields.real(*names, default=default) if names or default is None else default


@dataclass(frozen=True)
class Source:
    """A model's files: `architecture` as they call it, and `tensors` by the names that they have there.

    `metadata` are the keys of a GGUF file, or the fields of a config.json. `decoded`: blocks that no kernel reads are
    decoded into params; else these params have no values: an estimate needs none.
    """

    path: str
    gguf: bool
    architecture: str
    facts: Facts
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    decoded: bool = True

    def array(self, name: str) -> Array | None:
        """A small tensor in f32, None where there is none of that name."""
        stored = self.tensors.get(name)
        if stored is None:
            return None
        if stored.encoding is not None:
            raise ModelFormatError(f"{self.path}: tensor {name!r}: expected floats, got {stored.encoding}")
        return np.asarray(stored.read(), np.float32)


def open_source(path: str | os.PathLike[str]) -> Source:
    """Reads the headers of a GGUF model (its first part), or of a folder with safetensors and config.json.

    Raises `ModelFormatError`.
    """
    path = Path(path)
    if os.path.isdir(path) or path.name.endswith((".safetensors", ".index.json")):
        return _of_folder(path)
    return _of_gguf(path)


def _of_gguf(path: Path) -> Source:
    parts = read_gguf_parts(path)
    metadata = parts[0].metadata
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or not name:
        raise ModelFormatError(f"{path}: general.architecture is missing: not the file of a whole model")

    def get(key: str) -> Any:
        value = metadata.get(f"{name}.{key}")
        return value.values() if isinstance(value, GgufArray) else value

    return _source(str(path), True, name, get, metadata, dict(gguf_tensors(parts)))


def _of_folder(path: Path) -> Source:
    files, config, fields = read_folder(path)
    inner = fields.get("text_config")
    fields = {**fields, **inner} if isinstance(inner, dict) else fields
    name = fields.get("model_type")
    if not isinstance(name, str):
        raise ModelFormatError(f"{config}: model_type is missing: not the configuration of a model")
    if fields.get("quantization_config") is not None:
        raise ModelFormatError(f"{config}: quantization_config is not known; known are f32, f16 and bf16, and GGUF")
    return _source(str(config), False, name, fields.get, fields, dict(safetensors_tensors(files)))


def _source(
    path: str,
    gguf: bool,
    name: str,
    get: Callable[[str], Any],
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Stored],
) -> Source:
    return Source(path, gguf, name, Facts(Fields(path, get), gguf), metadata, tensors)
