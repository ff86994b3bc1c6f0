"""Small decoders with caches as optimum and torch.onnx write them, for tests/decoders: graphs without their weights.

`python tools/export_decoders.py` makes a virtual environment with the versions below, exports Llama, GPT-2 and Qwen2 of
two layers there (optimum's `text-generation-with-past`, and Llama by torch.onnx's dynamo exporter), and writes the
files without the weights, which `filled` makes of their names.
"""

from __future__ import annotations

import argparse
import gzip
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from small_decoders import weight

VERSIONS = (  # optimum-onnx takes transformers below 4.58
    "optimum-onnx==0.1.0", "optimum==2.1.0", "transformers==4.57.6", "torch==2.13.0", "onnx==1.23.2",
    "onnxruntime==1.32.0", "onnxscript==0.7.2",
)  # fmt: skip
FOLDER = Path(__file__).parents[1] / "tests" / "decoders" / "exported"
FAMILIES = ("gpt2", "llama", "qwen2", "llama-dynamo", "llama-dynamo-masked")
SMALL = 256  # elements: smaller tensors stay in the files

EXPORT = """
import sys, warnings
import torch
from optimum.exporters.onnx import onnx_export_from_model
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, LlamaConfig, Qwen2Config

warnings.filterwarnings("ignore")
sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128)
configs = {
    "llama": LlamaConfig(**sizes),
    "qwen2": Qwen2Config(**sizes),
    "gpt2": GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2),
}
torch.manual_seed(0)
models = {name: AutoModelForCausalLM.from_config(config).eval() for name, config in configs.items()}
for name, model in models.items():
    onnx_export_from_model(model, f"{sys.argv[1]}/{name}", task="text-generation-with-past", do_validation=False)


class Flat(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, k0, v0, k1, v1, input_ids, position_ids, attention_mask=None):
        cache = DynamicCache.from_legacy_cache(((k0, v0), (k1, v1)))
        out = self.model(input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask,
                         past_key_values=cache, use_cache=True)
        return (out.logits, *(t for pair in out.past_key_values.to_legacy_cache() for t in pair))


pasts, presents = ([f"{kind}.{i}.{t}" for i in (0, 1) for t in ("key", "value")] for kind in ("past", "present"))
caches = tuple(torch.randn(1, 2, 5, 16) for _ in range(4))
ids = {
    "input_ids": torch.ones(1, 3, dtype=torch.int64),
    "position_ids": torch.arange(5, 8)[None],
    "attention_mask": torch.ones(1, 8, dtype=torch.int64),
}
for name, count in (("llama-dynamo", 2), ("llama-dynamo-masked", 3)):
    torch.onnx.export(
        Flat(models["llama"]),
        (*caches, *list(ids.values())[:count]),
        dynamo=True,
        dynamic_shapes=({2: torch.export.Dim.DYNAMIC},) * 4 + ({1: torch.export.Dim.DYNAMIC},) * count,
        input_names=[*pasts, *list(ids)[:count]],
        output_names=["logits", *presents],
    ).save(f"{sys.argv[1]}/{name}.onnx")
"""


def filled(path: Path) -> bytes:
    """The bytes of an ONNX model whose weights were left out: each is made of its name."""
    model: Any = onnx.load_from_string(gzip.decompress(path.read_bytes()))
    for tensor in model.graph.initializer:
        if not _kept(tensor):
            array = weight(tensor.name, tuple(tensor.dims))
            tensor.raw_data = array.tobytes()
    return bytes(model.SerializeToString())


def _kept(tensor: Any) -> bool:
    """Whether a tensor stays in the file; the others are floats."""
    return int(np.prod(tensor.dims)) < SMALL or tensor.data_type != 1


def stripped(data: bytes) -> bytes:
    """A model without its weights, its metadata and the documentation of its nodes, compressed."""
    model: Any = onnx.load_from_string(data)
    for tensor in model.graph.initializer:
        if not _kept(tensor):
            tensor.ClearField("raw_data")
            tensor.ClearField("float_data")
    for entry in (*model.graph.node, *model.graph.initializer, *model.graph.value_info, model, model.graph):
        for name in ("metadata_props", "doc_string"):
            if name in entry.DESCRIPTOR.fields_by_name:
                entry.ClearField(name)
    del model.graph.value_info[:]
    return gzip.compress(model.SerializeToString(), mtime=0)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--venv", type=Path, help="the virtual environment to use; without it one is made")
    options.add_argument("--to", type=Path, default=FOLDER, help="the folder to write to")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as made:
        place = asked.venv or Path(made, "venv")
        python = str(place / "bin" / "python")
        if asked.venv is None:
            venv.create(place, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "-q", *VERSIONS], check=True)
        subprocess.run([python, "-c", EXPORT, made], check=True)
        asked.to.mkdir(exist_ok=True)
        for name in FAMILIES:
            file = Path(made, name, "model.onnx")
            data = (file if file.exists() else Path(made, f"{name}.onnx")).read_bytes()
            (asked.to / f"{name}.onnx.gz").write_bytes(stripped(data))
            sys.stdout.write(f"{name}: {(asked.to / f'{name}.onnx.gz').stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
