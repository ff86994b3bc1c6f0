"""Writes tests/decoders/logits.npz and configs.json: what transformers (torch) computes for small random decoders.

Run it where torch and transformers are installed: `python tools/decoder_logits.py`. Weights follow from their names, so
that the tests make the same ones (`weight` of tools/small_decoders.py).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from small_decoders import TOKENS, ids_of, weight

FOLDER = Path(__file__).parents[1] / "tests" / "decoders"

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0],
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": 16, "head_dim": 8}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"sliding_window": 16, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "gemma2-scalar": ("Gemma2", {"sliding_window": 16, "head_dim": 8, "query_pre_attn_scalar": 12}),
    "gemma3": ("Gemma3Text", {"sliding_window": 16, "head_dim": 8, "num_hidden_layers": 7, "query_pre_attn_scalar": 8}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "phi3": ("Phi3", {"tie_word_embeddings": False}),
    "phi3-longrope": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 8}),
    "qwen3-moe-sums": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 24,
                                    "head_dim": 8, "norm_topk_prob": True}),
    "qwen2-moe": ("Qwen2Moe", {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                               "shared_expert_intermediate_size": 40}),
    "olmo2": ("Olmo2", {}),
}  # fmt: skip


def published(shapes: dict[str, list[int]], family: str) -> dict[str, list[int]]:
    """The shapes by the names of the files, in which each expert has matrices of its own."""
    layer, names = ("block_sparse_moe", "w1 w3 w2") if family == "Mixtral" else ("mlp", "gate_proj up_proj down_proj")
    found = {}
    for name, shape in shapes.items():
        before, _, part = name.partition(".mlp.")
        if part == "gate.weight":
            found[f"{before}.{layer}.gate.weight"] = shape
        elif part.startswith("experts."):
            for expert in range(shape[0]):
                gate, up, down = (f"{before}.{layer}.experts.{expert}.{own}.weight" for own in names.split())
                if part == "experts.down_proj":
                    found[down] = shape[1:]
                else:
                    found |= {gate: [shape[1] // 2, shape[2]], up: [shape[1] // 2, shape[2]]}
        else:
            found[name] = shape
    return found


def stacked(name: str, shape: list[int], family: str) -> Any:
    """A tensor of transformers' model, made of those of the files."""
    part = name.partition(".mlp.")[2]
    if family not in ("Mixtral", "Qwen2Moe", "Qwen3Moe") or not part:
        return weight(name, tuple(shape))
    own = list(published({name: shape}, family).items())
    parts = [weight(n, tuple(s)) for n, s in own]
    if not part.startswith("experts."):
        return parts[0]
    if part == "experts.down_proj":
        return np.stack(parts)
    return np.stack([np.concatenate(pair) for pair in zip(parts[::2], parts[1::2], strict=True)])


def main(only: list[str]) -> None:
    """Computes them all, or those named, which are put beside the others that are there."""
    import torch
    import transformers

    torch.set_num_threads(1)
    configs, results = {}, {}
    if only:
        configs = json.loads((FOLDER / "configs.json").read_text())
        results = dict(np.load(FOLDER / "logits.npz"))
    for name in only or CASES:
        family, changes = CASES[name]
        sizes = {"vocab_size": 96} if family == "GPT2" else SIZES
        config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
        kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family.removesuffix('Text')}ForCausalLM"
        model = getattr(transformers, kind)._from_config(config, attn_implementation="eager").eval()  # has the caps
        tied = config.tie_word_embeddings
        shapes = {n: list(p.shape) for n, p in model.state_dict().items() if not (tied and n == "lm_head.weight")}
        with torch.no_grad():
            state = {n: torch.from_numpy(stacked(n, shape, family)) for n, shape in shapes.items()}
            model.load_state_dict(state, strict=False)
            ids = torch.from_numpy(ids_of(config.vocab_size))
            logits = model(ids, use_cache=False).logits.numpy()
        fields = {k: v for k, v in config.to_diff_dict().items() if v is not None and k != "transformers_version"}
        if "Mix" in family or "Moe" in family:
            shapes = published(shapes, family)
        configs[name] = {"config": fields, "shapes": shapes}
        results[name] = logits[:, [0, 5, 31, TOKENS - 1]]
        print(name, results[name].shape, float(np.abs(results[name]).max()))
    (FOLDER / "configs.json").write_text(json.dumps(configs, separators=(",", ":")) + "\n")
    np.savez_compressed(FOLDER / "logits.npz", **results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="of the cases; default: all")
    main(parser.parse_args().cases)
