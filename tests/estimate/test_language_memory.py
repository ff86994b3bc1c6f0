"""What `rlx.load_llm` takes in memory is what the estimate said before, of the parts of the model and of their sum."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fresh_process import in_fresh_process
from small_decoders import write_folder, write_gguf

import rlx
from rlx.backends.cpu.backend import CpuBackend
from rlx.models.sampling import Row

MIB = 1 << 20
CONFIGS = json.loads((Path(__file__).parents[1] / "decoders" / "configs.json").read_text())


def large(case: str, hidden: int = 1024, ffn: int = 2816, layers: int = 2) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration of the tests with wider layers, and the shapes of its tensors."""
    config, shapes = CONFIGS[case]["config"], CONFIGS[case]["shapes"]
    old_hidden, old_ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    old_kv = config["num_key_value_heads"] * head
    wide = hidden // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * wide
    sizes = {old_hidden: hidden, old_ffn: ffn, old_kv: kv}
    config = {**config, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "head_dim": wide}
    config["max_position_embeddings"] = 4096
    kept = {
        n: s for n, s in shapes.items() if ".layers." not in n or int(n.split(".layers.")[1].split(".")[0]) < layers
    }
    return config, {n: [sizes.get(size, size) for size in shape] for n, shape in kept.items()}


def private_bytes() -> int:
    """The resident memory of this process that is no file's."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def fill(llm: Any) -> None:
    """Runs with as many tokens and rows of logits as there may be, until the cache is full."""
    slots, count = llm.slots, 0
    for _ in range(llm.context // slots.prefill):
        count = min(slots.rows, slots.prefill)
        slots.run({0: [1] * slots.prefill}, [(0, n) for n in range(count)], "sampled", [Row()] * count)
    slots.cut(0, 0)


def measure(small: str, path: str, precision: str, context: int) -> list[int]:
    """Bytes that the process grew by when the model was loaded and its cache filled, and those that were estimated."""
    options: dict[str, Any] = {"device": "cpu", "threads": 1, "precision": precision}
    with rlx.load_llm(small, cache=False, context=64, **options) as llm:  # brings the compiler
        fill(llm)
    found = rlx.estimate(path, context=context, overhead=0, **options)
    gc.collect()
    before = private_bytes()
    model = rlx.load_llm(path, context=context, cache=False, **options)
    fill(model)
    gc.collect()
    return [private_bytes() - before, found.running_peak_bytes - found.mapped_weight_bytes - found.output_bytes]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind, precision", [("Q8_0", "f32"), ("Q8_0", "q8"), ("folder", "f32"), ("odd", "f32")])
def test_a_decoder_takes_what_was_estimated(kind: str, precision: str, tmp_path: Path) -> None:
    """Private memory is what the estimate said before loading, within 2 % or 16 MiB.

    Also of a folder whose tensors lie at odd places: what is packed of them is there, and no copy beside it.
    """
    case = CONFIGS["llama"]
    small = write_gguf(tmp_path / "small.gguf", case["config"], case["shapes"])
    if kind in ("folder", "odd"):
        path = write_folder(tmp_path / "large", *large("llama"), np.float16)
        for file in path.glob("*.safetensors") if kind == "odd" else ():
            size = int.from_bytes(file.read_bytes()[:8], "little") + 1
            data = file.read_bytes()[8:]
            file.write_bytes(size.to_bytes(8, "little") + data[: size - 1] + b" " + data[size - 1 :])
    else:
        path = write_gguf(tmp_path / "large.gguf", *large("llama"), kind)
    real, predicted = in_fresh_process(measure, str(small), str(path), precision, 1024)
    assert abs(real - predicted) <= max(predicted // 50, 16 * MIB), (real, predicted)


def test_layouts_are_those_of_the_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices may store operands in 16 bits then: what is estimated must be what is compiled."""
    seen: list[str] = []
    layout = CpuBackend.layout

    def noted(self: CpuBackend, program: Any, packing: str = "fast", precision: str = "f32") -> Any:
        seen.append(precision)
        return layout(self, program, packing, precision)

    monkeypatch.setattr(CpuBackend, "layout", noted)
    path = write_gguf(tmp_path / "m.gguf", CONFIGS["llama"]["config"], CONFIGS["llama"]["shapes"])
    options: dict[str, Any] = {"device": "cpu", "precision": "bf16"}
    rlx.estimate(path, context=32, overhead=0, **options)
    rlx.load_llm(path, context=32, cache=False, **options).close()
    graph = rlx.Graph("product")
    graph.output(rlx.matmul(graph.input("x", (2, 8)), graph.param("w", (8, 8))))
    rlx.estimate(graph, overhead=0, **options)
    assert len(seen) >= 3
    assert set(seen) == {"bf16"}
