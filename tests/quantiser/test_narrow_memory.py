"""Weights that `rlx.quantize` made narrow stay narrow in memory, and the estimate says so before they are loaded."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from fresh_process import in_fresh_process
from onnx import helper, numpy_helper

import rlx

MIB = 1 << 20
SIDE, LAYERS = 2048, 8  # 32 million elements


def layers(path: Path, side: int, count: int) -> Path:
    """relu(... relu(x w0) ...) in f32."""
    rng = np.random.default_rng(0)
    first = rng.standard_normal((side, side)).astype(np.float32) / np.float32(side**0.5)
    nodes = []
    for n in range(count):
        nodes.append(helper.make_node("MatMul", [f"h{n}", f"w{n}"], [f"m{n}"]))
        nodes.append(helper.make_node("Relu", [f"m{n}"], [f"h{n + 1}"]))
    leaves = [helper.make_tensor_value_info(name, 1, ["n", side]) for name in ("h0", f"h{count}")]
    stored = [numpy_helper.from_array(np.roll(first, n, axis=1), f"w{n}") for n in range(count)]
    graph = helper.make_graph(nodes, "g", leaves[:1], leaves[1:], stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def private_bytes() -> int:
    """The resident memory of this process that is no file's."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def measure(small: str, path: str, rows: int) -> list[int]:
    """Bytes that the process grew by when the model was loaded and run, and what was estimated before."""
    rlx.load(small, device="cpu", threads=1, cache=False)(h0=np.ones((rows, 64), np.float32))  # brings the compiler
    found = rlx.estimate(path, device="cpu", threads=1, dims={"n": rows})
    gc.collect()
    before = private_bytes()
    model = rlx.load(path, device="cpu", threads=1, dims={"n": rows}, cache=False)
    model(h0=np.ones((rows, SIDE), np.float32))
    gc.collect()
    return [private_bytes() - before, found.weight_bytes + found.activation_bytes]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_narrow_floats_take_two_bytes_an_element(kind: str, rows: int, tmp_path: Path) -> None:
    """Resident memory is what the estimate said before loading, within 2 % or 16 MiB."""
    rlx.quantize(layers(tmp_path / "big.onnx", SIDE, LAYERS), tmp_path / "narrow.onnx", kind)
    small = layers(tmp_path / "small.onnx", 64, 2)
    rlx.quantize(small, tmp_path / "small-narrow.onnx", kind)
    real, predicted = in_fresh_process(
        measure, str(tmp_path / "small-narrow.onnx"), str(tmp_path / "narrow.onnx"), rows
    )
    elements = SIDE * SIDE * LAYERS
    assert 2 * elements <= predicted <= 2 * elements + MIB
    assert abs(real - predicted) <= max(predicted // 50, 16 * MIB)
