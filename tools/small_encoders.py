"""Small encoders in GGUF files, by the names and keys of llama.cpp's own package; small_decoders.py writes folders."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from small_decoders import weight, write_told

LETTERS = list(map(chr, range(33, 125)))
FAMILIES = {"xlm-roberta": "bert", "nomic_bert": "nomic-bert", "modernbert": "modern-bert"}
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"\u2581{c}" for c in LETTERS)]  # 96 tokens, words of a character


def write_gguf(
    path: Path,
    config: dict[str, Any],
    shapes: dict[str, list[int]],
    pooling: str = "MEAN",
    facts: dict[str, Any] | None = None,
) -> Path:
    """A model as llama.cpp's converter writes it, in F32; `facts` are keys and values beside those."""
    import gguf

    family = FAMILIES.get(config["model_type"], config["model_type"])
    layers, first = int(config["num_hidden_layers"]), 2 if config["model_type"] == "xlm-roberta" else 0
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(layers)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_context_length(config["max_position_embeddings"] - first)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if family == "modern-bert":
        _write_modern(writer, config)
    else:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        _write_words(writer, config)
    write_told(writer, facts or {})
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType[pooling])
    if family == "nomic-bert":
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    number = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(number, layers)
    for name, array in _arrays(shapes, first).items():
        own = names.get_name(name, (".weight", ".bias"))
        assert own is not None, name
        writer.add_tensor(own, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_words(writer: Any, config: dict[str, Any]) -> None:
    """A WordPiece vocabulary."""
    writer.add_tokenizer_model("bert")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, 3, 3, 3, *[1] * len(LETTERS)])
    writer.add_token_type_count(config["type_vocab_size"])
    for name, number in (("pad", 0), ("unk", 1), ("bos", 2), ("sep", 3)):
        getattr(writer, f"add_{name}_token_id")(number)


def _write_modern(writer: Any, config: dict[str, Any]) -> None:
    """What only files of ModernBERT say, which have a vocabulary of bytes."""
    writer.add_layer_norm_rms_eps(config["norm_eps"])  # the key that the converter takes for `norm_eps`
    writer.add_sliding_window(config["local_attention"])
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_string("modern-bert.hidden_activation", config["hidden_activation"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("modern-bert")
    writer.add_token_list(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS[:-1], "ab"])
    writer.add_token_types([3, 3, 3, 3, *[1] * len(LETTERS)])
    writer.add_token_merges(["a b"])
    for name, number in (("pad", 0), ("unk", 1), ("bos", 2), ("eos", 3)):
        getattr(writer, f"add_{name}_token_id")(number)
    for name in ("bos", "eos", "sep"):
        getattr(writer, f"add_add_{name}_token")(True)


def _arrays(shapes: dict[str, list[int]], first: int) -> dict[str, Any]:
    """The tensors by the names that the converter knows: q, k and v of Nomic's are one, and the pooler is left out."""
    found = {n: weight(n, tuple(shape)) for n, shape in sorted(shapes.items()) if not n.startswith("pooler.")}
    if first:
        found["embeddings.position_embeddings.weight"] = found["embeddings.position_embeddings.weight"][first:]
    if "layers.0.self_attn.q_proj.weight" not in found:
        return found
    fused = dict[str, Any]()
    for name, array in found.items():
        if ".self_attn.o_proj" in name or ".mlp." in name or "_layernorm" in name:
            for new, old in NOMIC.items():
                name = name.replace(new, old)
            fused["encoder." + name] = array
        elif ".self_attn." not in name:
            fused[name.replace("embeddings.LayerNorm", "emb_ln")] = array
        elif "q_proj" in name:
            parts = [found[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            fused["encoder." + name.replace("self_attn.q_proj", "attn.Wqkv")] = np.concatenate(parts)
    return fused


NOMIC = {  # names of transformers' own: those of the model's files
    "self_attn.o_proj": "attn.out_proj", "mlp.gate_proj": "mlp.fc12", "mlp.up_proj": "mlp.fc11",
    "mlp.down_proj": "mlp.fc2", "post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2",
}  # fmt: skip


def as_published(config: dict[str, Any], shapes: dict[str, list[int]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Nomic's model with the names and fields of its published files, and its arrays."""
    own = {
        "model_type": "nomic_bert", "n_layer": config["num_hidden_layers"], "n_embd": config["hidden_size"],
        "n_head": config["num_attention_heads"], "n_inner": config["intermediate_size"], "n_positions": 128,
        "max_trained_positions": config["max_position_embeddings"], "activation_function": "swiglu",
        "layer_norm_epsilon": config["layer_norm_eps"], "rotary_emb_base": 1000, "vocab_size": config["vocab_size"],
    }  # fmt: skip
    return own, _arrays(shapes, 0)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
