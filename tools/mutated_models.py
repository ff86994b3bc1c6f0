"""Model files with changes: GGUF, safetensors, their index, config.json, and what says how vectors are pooled."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from small_decoders import write_folder, write_gguf
from small_encoders import write_gguf as write_encoder

from rlx.models.loading import load

ROOT = Path(__file__).parents[1]
DECODERS = ("llama-llama3", "gemma3", "phi3-longrope", "gpt2", "mixtral", "qwen3-moe")
ENCODERS = ("bert", "nomic", "modernbert")
SAID = {
    "modules.json": [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ],
    "1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False},
    "sentence_bert_config.json": {"max_seq_length": 32},
    "config_sentence_transformers.json": {"prompts": {"query": "q: "}, "default_prompt_name": "query"},
}
Mutate = Callable[[Any, random.Random], Any]
Flip = Callable[[bytes, random.Random], bytes]


@cache
def files_of(name: str, gguf: bool) -> dict[str, bytes]:
    """The files of a small model."""
    encodes = name in ENCODERS
    case = json.loads((ROOT / "tests" / ("encoders" if encodes else "decoders") / "configs.json").read_text())[name]
    with tempfile.TemporaryDirectory() as folder:
        if gguf:
            write = write_encoder if encodes else write_gguf
            return {"m.gguf": write(Path(folder) / "m.gguf", case["config"], case["shapes"]).read_bytes()}
        write_folder(Path(folder), case["config"], case["shapes"])
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def attempt(rng: random.Random, folder: Path, mutate: Mutate, flip: Flip) -> None:
    """Changes something of a model, and makes its graph; all weights are looked at."""
    name = rng.choice([*DECODERS, *ENCODERS])
    gguf = rng.random() < 0.5
    files = dict(files_of(name, gguf))
    if not gguf and name in ENCODERS:
        files |= {file: json.dumps(value).encode() for file, value in SAID.items()}
    for _ in range(rng.randrange(1, 3)):
        own = rng.choice(list(files))
        files[own] = changed(own, files[own], rng, mutate, flip)
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        path.unlink()
    for file, data in files.items():
        (folder / file).write_bytes(data)
    graph = load(folder / "m.gguf" if gguf else folder, dims={"context": 48})
    for param in graph.params:
        np.asarray(param.data).reshape(-1)[-1:].copy()


def changed(name: str, data: bytes, rng: random.Random, mutate: Mutate, flip: Flip) -> bytes:
    """Another content of a file; of one with weights mostly another header."""
    if name.endswith(".json"):
        return flip(data, rng) if rng.random() < 0.2 else other_json(data, rng, mutate)
    if name.endswith(".safetensors"):
        size = int.from_bytes(data[:8], "little")
        if rng.random() < 0.3:
            return flip(data[: 8 + size], rng) + data[8 + size :]
        text = other_json(data[8 : 8 + size], rng, mutate)
        length = len(text) if rng.random() < 0.9 else rng.choice((0, 1, len(text) - 1, 1 << 40, (1 << 64) - 1))
        return length.to_bytes(8, "little") + text + data[8 + size :]
    size = min(len(data), 6000) if rng.random() < 0.8 else len(data)
    return flip(data[:size], rng) + data[size:]


def other_json(data: bytes, rng: random.Random, mutate: Mutate) -> bytes:
    """Changed in one place; as it is where it is no JSON any more."""
    try:
        return json.dumps(mutate(json.loads(data), rng)).encode("utf-8", "surrogatepass")
    except ValueError:
        return data


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.exit(0)
