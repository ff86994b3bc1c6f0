"""Writes tests/encoders/vectors.npz and configs.json: what transformers (torch) computes for small random encoders.

Run it where torch and transformers are installed: `python tools/encoder_vectors.py`. Weights follow from their names,
so that the tests make the same ones (`weight` of tools/small_decoders.py).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from small_decoders import weight

FOLDER = Path(__file__).parents[1] / "tests" / "encoders"
COUNTS = (40, 17)  # tokens of each text
SHOWN = (0, 5, 16)  # those whose vectors are stored

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
LATE = {"bos_token_id": None, "eos_token_id": None, "cls_token_id": None, "sep_token_id": None}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "xlm-roberta": ("XLMRoberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "nomic": ("NomicBert", {}),
    "modernbert": ("ModernBert", {"local_attention": 12, "num_hidden_layers": 4, **LATE}),
    "modernbert-bias": ("ModernBert", {"attention_bias": True, "mlp_bias": True, "norm_bias": True, **LATE}),
}


def ids_of(vocab: int) -> Any:
    """Two texts [2, 40] (i64), the second padded."""
    return np.random.default_rng(8).integers(2, vocab, (len(COUNTS), max(COUNTS)))


def main() -> None:
    """Computes them all."""
    import torch
    import transformers

    torch.set_num_threads(1)
    configs, results = {}, {}
    for name, (family, changes) in CASES.items():
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
        model = getattr(transformers, f"{family}Model")._from_config(config, attn_implementation="eager").eval()
        shapes = {n: list(p.shape) for n, p in model.state_dict().items()}
        with torch.no_grad():
            state = {n: torch.from_numpy(weight(n, tuple(shape))) for n, shape in shapes.items()}
            model.load_state_dict(state, strict=False)
            ids = torch.from_numpy(ids_of(config.vocab_size))
            mask = torch.arange(max(COUNTS))[None] < torch.tensor(COUNTS)[:, None]
            hidden = model(ids, attention_mask=mask.long()).last_hidden_state.numpy()
        fields = {k: v for k, v in config.to_diff_dict().items() if v is not None and k != "transformers_version"}
        configs[name] = {"config": fields, "shapes": shapes}
        results[name] = hidden[:, list(SHOWN)]
        print(name, results[name].shape, float(np.abs(results[name]).max()))
    (FOLDER / "configs.json").write_text(json.dumps(configs, separators=(",", ":")) + "\n")
    np.savez_compressed(FOLDER / "vectors.npz", **results)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
