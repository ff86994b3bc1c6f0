"""Small decoders whose weights follow from the names of their tensors, so that every test makes the same."""

from __future__ import annotations

import argparse
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = 160  # of each sequence


def weight(name: str, shape: tuple[int, ...]) -> Any:
    """f32 numbers of a tensor; norms lie about 1."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    about = 1.0 if name.endswith("weight") and ("norm" in name or ".ln_" in name) else 0.0
    return (about + 0.25 * rng.standard_normal(shape)).astype(np.float32)


def ids_of(vocab: int) -> Any:
    """Two sequences of ids (i64)."""
    return np.random.default_rng(7).integers(0, vocab, (2, TOKENS))


def write_folder(folder: Path, config: dict[str, Any], shapes: dict[str, list[int]], dtype: Any = np.float32) -> Path:
    """A model as transformers saves it, in two files with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names, places = sorted(shapes), dict[str, str]()
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        arrays = {n: weight(n, tuple(shapes[n])).astype(dtype) for n in part}
        write_safetensors(
            folder / file, arrays, {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[np.dtype(dtype).name]
        )
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def write_safetensors(path: Path, arrays: dict[str, Any], code: str) -> None:
    """One safetensors file."""
    header, at = {}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that arrays are aligned
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in arrays.values()))


# ---- GGUF, by the names and keys of llama.cpp's own package

OTHER_NAMES = {
    "mistral": "llama",
    "gemma3_text": "gemma3",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
}
VOCABULARY = ["<unk>", "<s>", "</s>", "\u2581", *map(chr, range(33, 125))]  # 96 tokens, of single characters


def write_gguf(
    path: Path,
    config: dict[str, Any],
    shapes: dict[str, list[int]],
    kind: str = "F32",
    chat_template: str = "",
    facts: dict[str, Any] | None = None,
) -> Path:
    """The same model as llama.cpp's converter writes it; matrices are stored as `kind`, such as Q8_0.

    `facts`: keys and values that say what the model is, such as those of converted.json.
    """
    import gguf

    family = OTHER_NAMES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, family)
    layers = int(config["n_layer" if family == "gpt2" else "num_hidden_layers"])
    if facts is None:
        _write_facts(gguf, writer, family, config, layers)
    else:
        write_told(writer, facts)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(VOCABULARY)
    writer.add_token_scores([0.0] * len(VOCABULARY))
    writer.add_token_types([2, 3, 3, *[1] * (len(VOCABULARY) - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    if chat_template:
        writer.add_chat_template(chat_template)
    number = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(number, layers)
    arrays = {n: _as_converted(family, config, n, weight(n, tuple(shape))) for n, shape in sorted(shapes.items())}
    for name, array in _together(arrays).items():
        whole = array.ndim >= 2 and array.shape[-1] % 32 == 0
        stored = gguf.GGMLQuantizationType[kind if whole else "F32"]
        data = gguf.quants.quantize(array, stored)
        own = names.get_name(name, (".weight", ".bias"))
        assert own is not None
        writer.add_tensor(own, data, raw_dtype=stored)
    for name, factors in _rope_factors(config).items():
        writer.add_tensor(name, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_told(writer: Any, facts: dict[str, Any]) -> None:
    """Keys with their values."""
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    for key, value in facts.items():
        getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def _together(arrays: dict[str, Any]) -> dict[str, Any]:
    """The matrices of a layer's experts as one tensor."""
    found: dict[str, Any] = {}
    for name, array in arrays.items():
        one = re.sub(r"experts\.[0-9]+\.", "experts.", name)
        found.setdefault(one, []).append(array) if one != name else found.update({name: array})
    return {n: np.stack(a) if isinstance(a, list) else a for n, a in found.items()}


def _write_facts(gguf: Any, writer: Any, family: str, config: dict[str, Any], layers: int) -> None:
    heads, hidden = (
        config[n] for n in (("n_head", "n_embd") if family == "gpt2" else ("num_attention_heads", "hidden_size"))
    )
    writer.add_block_count(layers)
    writer.add_embedding_length(hidden)
    writer.add_context_length(config.get("max_position_embeddings", config.get("n_positions")))
    writer.add_feed_forward_length(config.get("intermediate_size", 4 * hidden))
    writer.add_head_count(heads)
    if family == "gpt2":
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    dim = config.get("head_dim", hidden // heads)
    writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        stretched = config["max_position_embeddings"] / rope["original_max_position_embeddings"]
        factor = (1 + np.log(stretched) / np.log(rope["original_max_position_embeddings"])) ** 0.5
        writer.add_rope_scaling_attn_factors(float(factor))
    if "original_max_position_embeddings" in rope and rope["rope_type"] != "llama3":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for key, add in (
        ("num_local_experts", writer.add_expert_count),
        ("num_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("sliding_window", writer.add_sliding_window),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("attention_multiplier", writer.add_attention_scale),
        ("logits_scaling", writer.add_logit_scale),
    ):
        if config.get(key) is not None and config["model_type"] != "mistral":
            add(config[key])


def _as_converted(family: str, config: dict[str, Any], name: str, array: Any) -> Any:
    """Rows of queries and keys in pairs, norms of Gemma with 1 added, matrices of GPT-2 turned."""
    if family in ("llama", "granite") and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        parts = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        return np.ascontiguousarray(parts.swapaxes(1, 2).reshape(array.shape))
    if family.startswith("gemma") and name.endswith("norm.weight"):
        return array + np.float32(1)
    if "shared_expert_gate" in name:
        return array.squeeze()
    if family == "gpt2" and ".c_" in name and array.ndim == 2:
        return np.ascontiguousarray(array.T)
    return array


def _rope_factors(config: dict[str, Any]) -> dict[str, Any]:
    """The divisors of rotary positions that a file holds as tensors."""
    rope = config.get("rope_parameters", {})
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{n}.weight": np.array(rope[f"{n}_factor"], np.float32) for n in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    original, found = rope["original_max_position_embeddings"], []
    for exponent in np.arange(0, config["head_dim"], 2) / config["head_dim"]:
        wavelength = 2 * np.pi * rope["rope_theta"] ** exponent
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return {"rope_freqs.weight": np.array(found, np.float32)}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
