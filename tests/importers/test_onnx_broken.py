"""Files that can't be run: one message names the thing and what is wrong, before any weight is read."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import rlx
from rlx.errors import ModelFormatError, RlxError, UnsupportedOp
from rlx.importers.onnx import load, preflight


def model(*nodes: onnx.NodeProto, initializers: tuple[TensorProto, ...] = (), **domains: int) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        initializers,
    )
    opsets = [helper.make_opsetid(name.replace("_", "."), v) for name, v in domains.items()]
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), *opsets], ir_version=8)


node = helper.make_node
BROKEN = {
    "cycle": (model(node("Add", ["x", "b"], ["a"]), node("Relu", ["a"], ["b"]), node("Relu", ["a"], ["y"])), "a cycle"),
    "own output": (model(node("Add", ["x", "y"], ["y"])), "a cycle"),
    "undefined": (model(node("MatMul", ["x", "w"], ["y"])), "reads 'w', which no input, initializer or node"),
    "two makers": (model(node("Relu", ["x"], ["y"]), node("Neg", ["x"], ["y"])), "makes 'y' a second time"),
    "twice of one": (model(node("Split", ["x"], ["y", "y"], axis=1)), "makes 'y' a second time"),
    "no output": (model(node("Relu", ["x"], ["z"])), "nothing makes the output 'y'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_graph_is_refused_by_name(name: str) -> None:
    made, message = BROKEN[name]
    for read in (load, preflight):
        with pytest.raises(ModelFormatError, match=message):
            read(made.SerializeToString())


def test_two_inputs_of_one_name() -> None:
    made = model(node("Relu", ["x"], ["y"]))
    made.graph.input.append(made.graph.input[0])
    with pytest.raises(ModelFormatError, match="two inputs of the name 'x'"):
        load(made.SerializeToString())


def test_what_onnxruntime_optimised_for_a_machine_says_so() -> None:
    made = model(node("MaxPool", ["x"], ["y"], domain="com.microsoft.nchwc"), com_microsoft_nchwc=1)
    with pytest.raises(UnsupportedOp, match="ONNX Runtime made of the model for one machine"):
        load(made.SerializeToString())


def weight(name: str, **entries: str) -> TensorProto:
    made = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[4, 4], data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        made.external_data.add(key=key, value=value)
    return made


def test_all_external_data_that_lacks_is_listed_at_once(tmp_path: Path) -> None:
    """By `load` and by `preflight`, with the nodes that are not supported; what nothing reads may lack."""
    (tmp_path / "short.bin").write_bytes(bytes(20))
    (tmp_path / "whole.bin").write_bytes(bytes(64))
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.bin").symlink_to("/etc/hostname")
    reasons = {
        "short": "needs 64 bytes at 0 of external data 'short.bin', which is 20 bytes long",
        "missing": "external data 'missing' is missing",
        "folder": "is a folder",
        "link": "outside the model's folder",
    }
    files = {"short": "short.bin", "missing": "missing", "folder": "folder", "link": "link.bin", "fine": "whole.bin"}
    weights = tuple(weight(name, location=file) for name, file in files.items())
    names = ["x", *files]
    nodes = [node("MatMul", [f"a{i}" if i else "x", name], [f"a{i + 1}"]) for i, name in enumerate(files)]
    path = tmp_path / "model.onnx"
    made = model(
        *nodes, node("Relu", [f"a{len(files)}"], ["y"]), initializers=(*weights, weight("unused", location="gone"))
    )
    onnx.save(made, path)
    report = preflight(path)
    assert not report.ok
    assert {m.name for m in report.missing} == set(reasons), names
    with pytest.raises(ModelFormatError) as caught:
        rlx.load(path, device="cpu")
    for name, reason in reasons.items():
        assert reason in next(m.reason for m in report.missing if m.name == name)
        assert f"tensor {name!r}" in str(caught.value)
        assert reason in str(caught.value)
    made.graph.node[-1].op_type = "Frobnicate"
    onnx.save(made, path)
    with pytest.raises(UnsupportedOp, match=r"(?s)Frobnicate.*Weights \('missing'\)"):
        rlx.load(path, device="cpu")


@pytest.mark.parametrize("location", ["../up.bin", "/etc/hostname", "a\0b", "", "C:\\x"])
def test_no_path_outside_the_folder(location: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model(node("MatMul", ["x", "w"], ["y"]), initializers=(weight("w", location=location),)), path)
    with pytest.raises(ModelFormatError, match="must be a path inside the model's folder"):
        preflight(path)


@pytest.mark.parametrize("opset", [-1, 0, 5, 99])
def test_opsets_that_are_not_known(opset: int) -> None:
    made = model(node("Relu", ["x"], ["y"]))
    made.opset_import[0].version = opset
    with pytest.raises(UnsupportedOp, match=f"opset {opset} is outside 7 to"):
        load(made.SerializeToString())


@pytest.mark.parametrize(
    "attributes",
    [{"perm": list(range(100_000))}, {"perm": [0, 0]}, {"perm": [2**62, 1]}, {"perm": "last"}, {"axis": 1}],
)
def test_attributes_that_make_no_sense(attributes: dict[str, object]) -> None:
    with pytest.raises(RlxError, match="Transpose"):
        load(model(node("Transpose", ["x"], ["y"], **attributes)).SerializeToString())


def test_element_types_that_are_not_supported_are_listed_at_once() -> None:
    kinds = (TensorProto.FLOAT6E2M3, TensorProto.FLOAT6E3M2)
    casts = [node("Cast", ["x"], [f"a{i}"], to=kind) for i, kind in enumerate(kinds)]
    backs = [node("Cast", [f"a{i}"], [f"b{i}"], to=1) for i in range(len(kinds))]
    made = model(*casts, *backs, node("Sum", [f"b{i}" for i in range(len(kinds))], ["y"]))
    with pytest.raises(UnsupportedOp, match=r"(?s)2 nodes.*FLOAT6E2M3.*FLOAT6E3M2"):
        load(made.SerializeToString())
