"""Names of sizes that are expressions of others: read as such where that is certain, and otherwise names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import rlx
from rlx.errors import ShapeError
from rlx.importers.onnx import load
from rlx.importers.size_names import expressed
from rlx.ir.shape import Dim

KNOWN: dict[str, Any] = {"past": Dim("past", 0), "seq": Dim("seq"), "heads": 4, "s0": Dim("s0", 2)}


@pytest.mark.parametrize(
    "name, want",
    [
        ("past + seq", "past + seq"),
        ("seq+past", "past + seq"),
        ("past + 1", "past + 1"),
        ("2*s0", "2*s0"),
        ("s0 - 1", "s0 - 1"),
        ("s0//2", "floordiv(s0, 2)"),
        ("(past + seq) * heads", "4*past + 4*seq"),
        ("heads + 1", "5"),
        (" past + seq ", "past + seq"),
    ],
)
def test_expressions(name: str, want: str) -> None:
    assert str(expressed(name, KNOWN)) == want


@pytest.mark.parametrize(
    "name",
    [
        "past", "unknown + seq", "past.0 + seq", "past - seq", "past / seq", "seq // past", "seq % 2", "max(past, seq)",
        "past + 1.5", "past + True", "past +", "batch-size", "+seq", "seq ** 2", "past + seq" * 50, "(" * 150 + "+",
        "__import__('os') + seq", "seq + '1'", "[seq] + [past]", "\0 + seq", "s0 - 3", "",
    ],
)  # fmt: skip
def test_other_names_stay_names(name: str) -> None:
    assert expressed(name, KNOWN) is None


def grown(folder: Path, size: str = "past + seq") -> Path:
    """z = concat(p, x) and y = z + m, whose second axis has that name."""
    inputs = [("x", ["batch", "seq"]), ("p", ["batch", "past"]), ("m", ["batch", size])]
    nodes = [helper.make_node("Concat", ["p", "x"], ["z"], axis=1), helper.make_node("Add", ["m", "z"], ["y"])]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("y", "z")]
    graph = helper.make_graph(nodes, "grown", infos, outputs)
    path = folder / "grown.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def test_an_input_has_the_size_that_its_name_says(tmp_path: Path) -> None:
    path = grown(tmp_path)
    graph = load(path, dims={"past": (0, 8)})
    assert [str(v.type) for v in graph.inputs] == ["f32[batch, seq]", "f32[batch, past]", "f32[batch, past + seq]"]
    model = rlx.load(path, device="cpu", dims={"past": (0, 8), "batch": 2})
    x = np.ones((2, 3), np.float32)
    model.run({"x": x, "p": x[:, :0], "m": x})
    assert model.compilation.leaves.guards == []
    with pytest.raises(ShapeError, match="where past = 3, seq = 3, got"):
        model.run({"x": x, "p": x, "m": x})


def test_what_dims_says_comes_first(tmp_path: Path) -> None:
    """A name that is given a size, or an axis that is given a name of its own, is no expression."""
    path = grown(tmp_path)
    assert str(load(path, dims={"past": 4, "seq": 2}).inputs[2].type) == "f32[batch, 6]"
    assert str(load(path, dims={"past + seq": (3, 7)}).inputs[2].type) == "f32[batch, `past + seq`]"
    assert str(load(path, dims={"m": {1: "mask"}}).inputs[2].type) == "f32[batch, mask]"
    other = grown(tmp_path, "mask")
    said = load(other, dims={"m": {1: "past + seq"}, "batch": 2})
    assert [str(v.type) for v in said.inputs] == ["f32[2, seq]", "f32[2, past]", "f32[2, past + seq]"]
    assert not said.guards
    assert str(load(grown(tmp_path, "past - seq")).inputs[2].type) == "f32[batch, `past - seq`]"
