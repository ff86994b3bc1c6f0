"""Small encoders in GGUF files, by the names and keys of llama.cpp's own package; small_decoders.py writes folders."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from small_decoders import weight

LETTERS = list(map(chr, range(33, 125)))
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"\u2581{c}" for c in LETTERS)]  # 96 tokens, words of a character


def write_gguf(path: Path, config: dict[str, Any], shapes: dict[str, list[int]], pooling: str = "MEAN") -> Path:
    """A model as llama.cpp's converter writes it, in F32."""
    import gguf

    family = {"xlm-roberta": "bert", "nomic_bert": "nomic-bert"}.get(config["model_type"], config["model_type"])
    layers, first = int(config["num_hidden_layers"]), 2 if config["model_type"] == "xlm-roberta" else 0
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(layers)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_context_length(config["max_position_embeddings"] - first)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType[pooling])
    if family == "nomic-bert":
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("bert")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, 3, 3, 3, *[1] * len(LETTERS)])
    writer.add_token_type_count(config["type_vocab_size"])
    for name, number in (("pad", 0), ("unk", 1), ("bos", 2), ("sep", 3)):
        getattr(writer, f"add_{name}_token_id")(number)
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


def _arrays(shapes: dict[str, list[int]], first: int) -> dict[str, Any]:
    """The tensors by the names that the converter knows: q, k and v of Nomic's are one, and the pooler is left out."""
    found = {n: weight(n, tuple(shape)) for n, shape in sorted(shapes.items()) if not n.startswith("pooler.")}
    if first:
        found["embeddings.position_embeddings.weight"] = found["embeddings.position_embeddings.weight"][first:]
    fused = dict[str, Any]()
    for name, array in found.items():
        if ".self_attn.o_proj" in name or ".mlp." in name or "_layernorm" in name:
            for new, old in NOMIC.items():
                name = name.replace(new, old)
            fused["encoder." + name] = array
        elif ".self_attn." not in name:
            fused[
                name.replace("embeddings.LayerNorm", "emb_ln") if "layers.0.mlp.up_proj.weight" in found else name
            ] = array
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
