"""Writes tests/decoders/converted.json: what llama.cpp's own converter makes of the small decoders and encoders.

So `write_gguf` of tools/small_decoders.py, with which tests write GGUF files, can't share a mistake with their reader.
Run it where torch, transformers and safetensors are installed, with a checkout of llama.cpp, such as the one in
llama-cpp-python's source: `python tools/converted_files.py LLAMA_CPP [FOLDER]`. FOLDER gets the files themselves.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from small_decoders import write_folder, write_safetensors
from small_encoders import as_published

TESTS = Path(__file__).parents[1] / "tests"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel", "phi3": "Phi3ForCausalLM", "granite": "GraniteForCausalLM",
    "mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM",
    "olmo2": "Olmo2ForCausalLM", "bert": "BertModel", "xlm-roberta": "XLMRobertaModel", "nomic_bert": "NomicBertModel",
    "modernbert": "ModernBertModel",
}  # fmt: skip

PUBLISHED = {  # what the converter wants to be sure of
    "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "prenorm": False, "causal": False,
    "n_positions": 8192, "max_trained_positions": 2048, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
}  # fmt: skip


def convert(folder: Path, config: dict[str, Any], shapes: dict[str, Any], to: Path) -> None:
    """A GGUF file of a folder, in f32, without a vocabulary: that is the matter of other tests."""
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class  # type: ignore[import-not-found]
    from gguf import LlamaFileType

    more = {"architectures": [ARCHITECTURES[config["model_type"]]], "n_ctx": config.get("n_positions")}
    if config["model_type"] == "nomic_bert":
        config, arrays = as_published(config, shapes)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, **more, **PUBLISHED}))
        write_safetensors(folder / "model.safetensors", arrays, "F32")
    else:
        write_folder(folder, {**config, **more}, shapes)
    kind = "WordPiece" if config["model_type"] == "nomic_bert" else "BPE"
    vocab = {f"t{n}": n for n in range(config["vocab_size"])}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": kind, "vocab": vocab}, "added_tokens": []}))
    for file in folder.glob("*.safetensors"):  # as libraries write them, who want to be told of what
        size = int.from_bytes(file.read_bytes()[:8], "little")
        header, rest = json.loads(file.read_bytes()[8 : 8 + size]), file.read_bytes()[8 + size :]
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + rest)
    made = get_model_class(get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT))
    plain = type(made.__name__, (made,), {"set_vocab": lambda self: None, "model_arch": made.model_arch})
    with torch.inference_mode():
        plain(folder, LlamaFileType.ALL_F32, to).write()


def digest(array: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def contents(path: Path) -> dict[str, Any]:
    """The keys that say what the model is, and of each tensor its shape and the beginning of its SHA-256."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    facts = {n: f.contents() for n, f in reader.fields.items() if not n.startswith(("GGUF.", "general.", "tokenizer."))}
    tensors = {t.name: [list(map(int, reversed(t.shape))), digest(t.data)] for t in reader.tensors}
    return {"facts": facts, "tensors": tensors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", type=Path, help="the folder of llama.cpp")
    parser.add_argument("folder", type=Path, nargs="?", help="where the files are kept")
    given = parser.parse_args()
    sys.path[1:1] = [str(given.llama_cpp), str(given.llama_cpp / "gguf-py")]
    for kind in ("decoders", "encoders"):
        found = {}
        for name, case in json.loads((TESTS / kind / "configs.json").read_text()).items():
            with tempfile.TemporaryDirectory() as work:
                path = (given.folder or Path(work)) / f"{kind}-{name}.gguf"
                convert(Path(work) / "m", case["config"], case["shapes"], path)
                found[name] = contents(path)
        lines = [f"{json.dumps(name)}: {json.dumps(one, sort_keys=True)}" for name, one in found.items()]
        (TESTS / kind / "converted.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(f"{kind}: {', '.join(found)}")


if __name__ == "__main__":
    main()
