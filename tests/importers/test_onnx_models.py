"""Real ONNX files: supported ones import whole and give what onnxruntime gives; the others say all they lack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fetch_models
import numpy as np
import onnx
import onnxruntime
import pytest

from rlx.backends.reference import run_graph
from rlx.errors import UnsupportedOp
from rlx.importers.onnx import load, preflight
from rlx.ir.verify import verify

pytestmark = pytest.mark.models

LISTED = {name: entry for name, entry in fetch_models.entries().items() if entry.relative_path.suffix == ".onnx"}
SUPPORTED = [name for name, entry in LISTED.items() if entry.supported]
UNSUPPORTED = [name for name, entry in LISTED.items() if not entry.supported]

# extents that fit a file where its dims alone do not say which do
EXTENTS: dict[str, dict[str, int]] = {
    "ppocrv4-det": {"p2o.DynamicDimension.1": 64, "p2o.DynamicDimension.2": 96},
    "ppocrv4-rec": {"x.2": 48, "p2o.DynamicDimension.1": 64},
    "ppocrv4-cls": {"x.2": 48, "x.3": 64},
    "ppocrv5-det": {"d1": 64, "d2": 96},
    "ppocrv5-rec": {"d1": 72},
    "wakeword-mel": {"samples": 4000},
}
SHAPES = {
    "minilm-int8": ["f32[batch, sequence, 384]"],
    "magika": ["f32[unk__214, 214]"],
    "ppocrv5-rec": ["f32[d0, floordiv(floordiv(d1 + 1, 2) + 1, 4), 18385]"],
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
        shape = [s if isinstance(s, int) else extents.get(s.symbol.name, 2) for s in value.shape]
        if value.dtype.is_float:
            arrays[value.name] = rng.standard_normal(shape).astype(value.dtype.numpy)
        else:
            high = 2 if "mask" in value.name or "type" in value.name else 256
            arrays[value.name] = rng.integers(0, high, shape).astype(value.dtype.numpy)
    return arrays


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_files_give_what_onnxruntime_gives(name: str, model_path: Callable[[str], Path]) -> None:
    """Imported with all sizes dynamic and run on the reference device at small extents; shapes, dtypes and values."""
    path = model_path(name)
    graph = load(path)
    verify(graph)
    assert preflight(path).ok
    inputs = _inputs(name, graph)
    got = run_graph(graph, inputs)
    peer = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for (output, value), want in zip(got.items(), peer.run(None, inputs), strict=True):
        assert (value.shape, value.dtype) == (want.shape, want.dtype), output
        scale = float(np.abs(want).max())
        assert float(np.abs(value - want).max()) <= 5e-5 * max(1.0, scale), output


@pytest.mark.parametrize("name", SHAPES)
def test_output_shapes_stay_symbolic(name: str, model_path: Callable[[str], Path]) -> None:
    """The shapes of outputs are expressions of the inputs' dims."""
    assert [str(o.value.type) for o in load(model_path(name)).outputs] == SHAPES[name]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_files_name_all_that_is_missing(name: str, model_path: Callable[[str], Path]) -> None:
    """Every node of an op that is not supported is in the one error, and preflight lists the same."""
    path = model_path(name)
    with pytest.raises(UnsupportedOp) as caught:
        load(path)
    report = preflight(path)
    assert caught.value.nodes == report.missing
    mapped = set(report.supported)
    used = {(n.op_type, n.name) for n in onnx.load(path).graph.node if n.op_type not in mapped}
    named = {(n.op, n.name if not n.name.startswith(f"{n.op}:") else "") for n in caught.value.nodes}
    assert used <= named
