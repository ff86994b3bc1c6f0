"""Real ONNX files: they import whole and give what onnxruntime gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from rlx.backends.reference import run_graph
from rlx.demo import fetch as fetch_models
from rlx.importers.onnx import load, preflight
from rlx.ir.verify import verify

pytestmark = pytest.mark.models

LISTED = {name: entry for name, entry in fetch_models.entries().items() if entry.relative_path.suffix == ".onnx"}

# extents that fit a file where its dims alone do not say which do
EXTENTS: dict[str, dict[str, int]] = {
    "ppocrv4-det": {"p2o.DynamicDimension.1": 64, "p2o.DynamicDimension.2": 96},
    "ppocrv4-rec": {"x.2": 48, "p2o.DynamicDimension.1": 64},
    "ppocrv4-cls": {"x.2": 48, "x.3": 64},
    "ppocrv5-det": {"d1": 64, "d2": 96},
    "ppocrv5-rec": {"d1": 72},
    "wakeword-mel": {"samples": 4000},
    "silero-vad": {"batch": 1, "sequence": 512},
    "silero-vad-ifless": {"batch": 1, "sequence": 512},
}
INPUTS = {"sr": 16000}
# onnxruntime's sums of u8 by i8 products saturate on CPUs without VNNI, and its optimiser reorders roundings to 8 bits
WIDER = {"text2tashkeel": 0.05}
SHAPES = {
    "minilm-int8": ["f32[batch, sequence, 384]"],
    "magika": ["f32[unk__214, 214]"],
    "ppocrv5-rec": ["f32[d0, max(1, floordiv(floordiv(d1 + 1, 2) + 1, 4)), 18385]"],
    "orientation": ["f32[`DynamicDimension.0`, 4]"],
    "wakeword-mel": ["f32[batch_size, 1, floordiv(samples + 128, 160) - 3, 32]"],
    "wakeword-embedding": ["f32[unk__314, 1, 1, 96]"],
    "pulsevad-2k": ["f32[batch, 2]"],
    "pulsevad-81k": ["f32[batch, 2]"],
}


def _inputs(name: str, graph: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    extents = EXTENTS.get(name, {})
    arrays = {}
    for value in graph.inputs:
        if value.name in INPUTS:
            arrays[value.name] = np.array(INPUTS[value.name], value.dtype.numpy)
            continue
        shape = [s if isinstance(s, int) else extents.get(s.symbol.name, 2) for s in value.shape]
        if value.dtype.is_float:
            arrays[value.name] = rng.standard_normal(shape).astype(value.dtype.numpy)
        else:
            high = 2 if "mask" in value.name or "type" in value.name else 50
            arrays[value.name] = rng.integers(0, high, shape).astype(value.dtype.numpy)
    return arrays


@pytest.mark.sample(13)
@pytest.mark.parametrize("name", LISTED)
def test_files_give_what_onnxruntime_gives(name: str, model_path: Callable[[str], Path]) -> None:
    """Imported with all sizes dynamic and run on the reference device at small extents; shapes, dtypes and values."""
    path = model_path(name)
    graph = load(path)
    verify(graph)
    assert preflight(path).ok
    inputs = _inputs(name, graph)
    got = run_graph(graph, inputs)
    options = onnxruntime.SessionOptions()
    if "int8" in name:  # bit for bit the file; the optimiser's own result differs by several quanta
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    peer = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    for (output, value), want in zip(got.items(), peer.run(None, inputs), strict=True):
        assert (value.shape, value.dtype) == (want.shape, want.dtype), output
        scale = float(np.abs(want).max())
        assert float(np.abs(value - want).max()) <= WIDER.get(name, 5e-5) * max(1.0, scale), output


@pytest.mark.parametrize("name", SHAPES)
def test_output_shapes_stay_symbolic(name: str, model_path: Callable[[str], Path]) -> None:
    """The shapes of outputs are expressions of the inputs' dims."""
    assert [str(o.value.type) for o in load(model_path(name)).outputs] == SHAPES[name]
