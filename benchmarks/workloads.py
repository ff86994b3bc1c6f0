"""What the benchmark runs: standard networks, real files from PyPI packages, int8 models; made once into a folder.

Each workload NAME is a file NAME.onnx with static shapes, and NAME.npz with its inputs and the outputs that are
expected: those of PyTorch for the standard networks, of ONNX Runtime without optimisations for the others.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from rlx.demo import DIGITS, Digits
from rlx.demo import fetch as fetch_models

ROOT = Path(__file__).resolve().parents[1]

Arrays = dict[str, NDArray[Any]]

NETS = (
    "minilm-b1-s16", "minilm-b1-s128", "minilm-b8-s128", "bert-b1-s128", "vit-b16", "resnet50", "mobilenetv2",
    "vad-chunk", "audio-lstm", "audio-gru", "gpt2-prefill-128", "gpt2-decode-512", "llama125-prefill-128",
    "llama125-decode-512",
)  # fmt: skip


def noise(name: str, *shape: int) -> Arrays:
    """Normal values with a fixed seed."""
    return {name: np.random.default_rng(0).standard_normal(shape, dtype=np.float32)}


def page(*shape: int) -> Arrays:
    """A white page with dark strokes, as text detectors are given it: pictures of noise have no text at all."""
    rng = np.random.default_rng(0)
    picture = np.ones(shape, np.float32)
    rows, columns = shape[-2:]
    for top in range(8, rows - 24, 40):
        for left in range(8, columns - 12, 14):
            picture[..., top : top + 24, left : left + 10] = rng.random((24, 10)) < 0.5
    return {"x": 2 * picture - 1}


def sentence(batch: int, length: int) -> Arrays:
    """Token ids of an encoder, all of them used."""
    ids = np.random.default_rng(0).integers(1000, 30000, (batch, length))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def silero() -> Arrays:
    """32 ms of noise, the state of the first chunk, and the sample rate."""
    state = np.zeros((2, 1, 128), np.float32)
    return {**noise("input", 1, 576), "state": state, "sr": np.array(16000, np.int64)}


def content() -> Arrays:
    """The bytes of a file, of full length."""
    return {"bytes": np.random.default_rng(0).integers(0, 256, (1, 2048)).astype(np.int32)}


# workload: (name in rlx/demo/models.json, inputs)
REAL: Mapping[str, tuple[str, Callable[[], Arrays]]] = {
    "pulsevad-2k": ("pulsevad-2k", lambda: noise("log_mel", 1, 64, 21)),
    "silero-vad": ("silero-vad", silero),
    "magika": ("magika", content),
    "ppocrv4-det-640": ("ppocrv4-det", lambda: page(1, 3, 640, 640)),
    "ppocrv4-rec-320": ("ppocrv4-rec", lambda: page(1, 3, 48, 320)),
    "wakeword-embedding": ("wakeword-embedding", lambda: noise("input_1", 1, 76, 32, 1)),
    "basic-pitch": ("basic-pitch", lambda: noise("serving_default_input_2:0", 1, 43844, 1)),
    "minilm-int8-s128": ("minilm-int8", lambda: sentence(1, 128)),
}
OWN: Mapping[str, Callable[[], Arrays]] = {
    "digits-b1": lambda: {"image": Digits.load().images[:1]},
    "digits-b360": lambda: {"image": Digits.load().images},
    "tiny": lambda: noise("x", 8),
    "mobilenetv2-int8": lambda: noise("in_0", 1, 3, 224, 224),
}
NAMES = (*NETS, *REAL, *OWN)


def ensure(name: str, folder: Path) -> None:
    """Makes the files of a workload unless they are there, in a process of their own (exporting takes much memory)."""
    if not (folder / f"{name}.npz").exists():
        folder.mkdir(parents=True, exist_ok=True)
        script = "nets.py" if name in NETS else "workloads.py"
        command = [sys.executable, str(ROOT / "benchmarks" / script), str(folder), name]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} can't be made: {done.stderr.strip().splitlines()[-1]}")


def make(name: str, folder: Path) -> None:
    """Writes the files of one workload that is not a standard network."""
    import onnxruntime

    path = folder / f"{name}.onnx"
    inputs = REAL[name][1]() if name in REAL else OWN[name]()
    if name in REAL:
        source = fetch_models.fetch(ROOT / "models", [REAL[name][0]])[REAL[name][0]]
        onnx.save(with_static_inputs(onnx.load(source), inputs), path)
    elif name == "tiny":
        onnx.save(tiny(), path)
    elif name == "mobilenetv2-int8":
        ensure("mobilenetv2", folder)
        quantise(folder / "mobilenetv2.onnx", path, inputs)
    else:
        onnx.save(with_static_inputs(onnx.load(DIGITS), inputs), path)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    outputs = session.run(None, inputs)
    ordered = [inputs[i.name] for i in session.get_inputs()]
    arrays = {f"in_{i}": a for i, a in enumerate(ordered)} | {f"out_{i}": a for i, a in enumerate(outputs)}
    np.savez(folder / f"{name}.npz", **arrays)


def with_static_inputs(model: onnx.ModelProto, inputs: Arrays) -> onnx.ModelProto:
    """The model with the sizes of its inputs as given; those of its outputs are left to be inferred."""
    for value in model.graph.input:
        if value.name in inputs:
            del value.type.tensor_type.shape.dim[:]
            for size in inputs[value.name].shape:
                value.type.tensor_type.shape.dim.add().dim_value = size
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    return model


def tiny() -> onnx.ModelProto:
    """relu(x) of 8 numbers: what a call costs."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [8])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "tiny", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    return model


def quantise(source: Path, target: Path, inputs: Arrays) -> None:
    """Static int8 quantisation by ONNX Runtime: QDQ form, one scale a channel, activations u8."""
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = [inputs]

        def get_next(self) -> Arrays | None:
            return self.left.pop() if self.left else None

    quantization.quantize_static(
        str(source),
        str(target),
        Reader(),
        per_channel=True,
        reduce_range=True,  # 7-bit weights: what ONNX Runtime advises where AVX2 sums pairs of products in 16 bits
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
    )


def chosen(parser: argparse.ArgumentParser, only: str, names: Iterable[str]) -> list[str]:
    """The names with one of the words of `--only a,b` in them; ends in the parser's error where a word is in none."""
    known, words = list(dict.fromkeys(names)), only.split(",")
    strange = [word for word in words if not any(word in name for name in known)]
    if strange:
        parser.error(f"--only: no model has {', '.join(strange)} in its name; there are {', '.join(known)}")
    return [name for name in known if any(word in name for word in words)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+", metavar="name")
    args = parser.parse_args()
    for asked in args.names:
        make(asked, args.folder)
