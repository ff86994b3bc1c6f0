"""What `load` makes of a file: leaves, names, dims, the meaning of an op in each opset, and complete errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import (
    DTypeError,
    ExecutionError,
    ModelFormatError,
    OptionError,
    RlxError,
    ShapeError,
    UnsupportedOp,
)
from rlx.importers.onnx import load, preflight
from rlx.importers.onnx.importer import MissingNode
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim
from rlx.ir.verify import verify

F32, I64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def tensor(name: str, shape: Sequence[int | str | None] | None, elem: int = F32) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem, shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[str],
    weights: dict[str, np.ndarray] | None = None,
    opset: int = 17,
    ir_version: int = 8,
    domains: dict[str, int] | None = None,
) -> bytes:
    graph = helper.make_graph(
        nodes,
        "g",
        inputs,
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in {"": opset, **(domains or {})}.items()]
    made: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=ir_version).SerializeToString()
    return made


def node(op: str, inputs: str, outputs: str = "y", **attributes: Any) -> onnx.NodeProto:
    """Names are given with spaces between; "-" is an absent input."""
    names = ["" if name == "-" else name for name in inputs.split()]
    return helper.make_node(op, names, outputs.split(), **attributes)


def one(op: str, x: np.ndarray, opset: int, *more: np.ndarray, outputs: str = "y", **attributes: Any) -> bytes:
    """A model of one op with x as its input and initializers for the others."""
    weights = {f"w{i}": array for i, array in enumerate(more)}
    elem = helper.np_dtype_to_tensor_dtype(x.dtype)
    nodes = [node(op, " ".join(["x", *weights]), outputs, **attributes)]
    return model(nodes, [tensor("x", x.shape, elem)], outputs.split(), weights, opset)


X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
I = np.array  # short for shape inputs


@pytest.mark.parametrize(
    "op, opset, more, attributes",
    [
        ("Softmax", 7, [], {}),
        ("Softmax", 11, [], {"axis": 0}),
        ("Softmax", 12, [], {"axis": -1}),
        ("Softmax", 13, [], {"axis": 1}),
        ("LogSoftmax", 11, [], {"axis": 1}),
        ("LogSoftmax", 13, [], {}),
        ("Squeeze", 11, [], {"axes": [0]}),
        ("Squeeze", 13, [I([0])], {}),
        ("Unsqueeze", 7, [], {"axes": [0, 2]}),
        ("Unsqueeze", 13, [I([-1])], {}),
        ("ReduceSum", 11, [], {"axes": [1], "keepdims": 0}),
        ("ReduceSum", 13, [I([-1])], {}),
        ("ReduceSum", 13, [I([], np.int64)], {"noop_with_empty_axes": 1}),
        ("ReduceMean", 13, [], {"axes": [0, 2]}),
        ("ReduceMean", 18, [I([1])], {"keepdims": 0}),
        ("ReduceMax", 7, [], {}),
        ("Clip", 7, [], {"min": -0.5, "max": 0.5}),
        ("Clip", 7, [], {"max": 0.1}),
        ("Clip", 11, [np.float32(-0.5), np.float32(0.25)], {}),
        ("Clip", 13, [np.float32(0.2)], {}),
        ("Slice", 7, [], {"axes": [1, 2], "starts": [0, -3], "ends": [2, 1000]}),
        ("Slice", 10, [I([0, 3]), I([2, -1000]), I([1, 2]), I([1, -2])], {}),
        ("Slice", 13, [I([-2]), I([2**63 - 1]), I([-1])], {}),
        ("Pad", 7, [], {"pads": [0, 1, 2, 0, 0, 1], "value": 2.5}),
        ("Pad", 11, [I([0, 1, 2, 0, 0, 1]), np.float32(1.5)], {}),
        ("Pad", 13, [I([0, 1, 0, 0, 1, 2])], {"mode": "reflect"}),
        ("Pad", 18, [I([1, 2]), np.float32(0), I([-1])], {"mode": "edge"}),
        ("Split", 7, [], {"axis": 2, "split": [1, 3]}),
        ("Split", 11, [], {"axis": 2}),
        ("Split", 13, [I([3, 1])], {"axis": 2}),
        ("Split", 18, [], {"axis": 1, "num_outputs": 2}),
        ("Upsample", 7, [], {"scales": [1.0, 2.0, 1.5]}),
        ("Upsample", 9, [I([1, 1, 2], np.float32)], {}),
        ("Dropout", 7, [], {"ratio": 0.7}),
        ("Dropout", 12, [np.float32(0.7)], {}),
        ("Dropout", 13, [np.float32(0.7), np.array(False)], {"seed": 3}),
        ("Flatten", 7, [], {"axis": 2}),
        ("Flatten", 13, [], {"axis": -1}),
        ("Reshape", 7, [I([0, -1])], {}),
        ("Reshape", 14, [I([4, 0, -1])], {}),
        ("Tile", 7, [I([1, 2, 3])], {}),
        ("Expand", 8, [I([5, 1, 3, 1])], {}),
        ("Cast", 7, [], {"to": TensorProto.INT32}),
        ("ArgMax", 7, [], {"axis": 1}),
        ("ArgMax", 13, [], {"axis": -1, "keepdims": 0, "select_last_index": 1}),
        ("Gemm", 7, [np.ones((4, 5), np.float32), np.ones(5, np.float32)], {"alpha": 0.5, "beta": 2.0}),
        ("Gelu", 20, [], {"approximate": "tanh"}),
        ("LayerNormalization", 17, [np.ones(4, np.float32)], {"epsilon": 0.1}),
        ("Shape", 13, [], {}),
        ("Shape", 15, [], {"start": 1, "end": -1}),
        ("Size", 13, [], {}),
        ("Mean", 8, [np.ones((3, 4), np.float32)], {}),
        ("Pow", 7, [np.float32(2)], {}),
    ],
)
def test_ops_mean_what_their_opset_says(
    op: str, opset: int, more: list[np.ndarray], attributes: dict[str, Any]
) -> None:
    """Attributes that became inputs, changed defaults and axes: outputs equal those of others."""
    x = X[0] if op == "Gemm" else X[:1] if op == "Squeeze" else X
    outputs = "y z" if op == "Split" else "y"
    source = one(op, x, opset, *(np.asarray(m) for m in more), outputs=outputs, **attributes)
    graph = load(source)
    verify(graph)
    got = run_graph(graph, {"x": x})
    expected = [x] if op == "Dropout" else _expected(op, source, x)
    for (name, value), want in zip(got.items(), expected, strict=True):
        assert (value.shape, value.dtype) == (np.shape(want), want.dtype), name
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-6)


def _expected(op: str, source: bytes, x: np.ndarray) -> list[np.ndarray]:
    if op == "Upsample":  # not in the reference: nearest, asymmetric, floor
        proto = onnx.load_from_string(source)
        node = proto.graph.node[0]
        scales = node.attribute[0].floats if node.attribute else numpy_helper.to_array(proto.graph.initializer[0])
        for axis, scale in enumerate(scales):
            places = np.floor(np.arange(int(x.shape[axis] * scale)) / scale).astype(int)
            x = np.take(x, places, axis)
        return [x]
    if op in ("Softmax", "LogSoftmax"):  # ONNX's reference takes those before opset 13 like the later ones
        return list(onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, {"x": x}))
    return list(ReferenceEvaluator(onnx.load_from_string(source)).run(None, {"x": x}))


# ---- leaves and names


def _leaves() -> bytes:
    weights = {
        "w": np.ones((3, 3), np.float32),
        "epsilon": np.array([0.5], np.float32),
        "table": np.arange(2048, dtype=np.int64),
        "index": np.array([0, 1]),
        "unused": np.ones(5, np.float32),
    }
    nodes = [
        node("MatMul", "x w", "a", name="first"),
        node("Add", "a epsilon", "b"),
        node("Gather", "b index", "c", axis=1),
        node("Gather", "table index", "d"),
        node("Identity", "c", "out"),
    ]
    return model(nodes, [tensor("x", (2, 3))], ["out", "d"], weights)


def test_initializers_become_params_or_constants() -> None:
    """Weights are params with data; single numbers and short integer tensors are constants; unused ones are gone."""
    graph = load(_leaves())
    assert {p.name: str(p.type) for p in graph.params} == {"w": "f32[3, 3]", "table": "i64[2048]"}
    assert sorted(c.name for c in graph.constants) == ["epsilon", "index"]
    assert all(p.data is not None for p in graph.params)


def test_names_are_kept() -> None:
    """Values have the names of their tensors, outputs theirs (through Identity too); nodes say where they are from."""
    graph = load(_leaves())
    assert [i.name for i in graph.inputs] == ["x"]
    assert [o.name for o in graph.outputs] == ["out", "d"]
    assert [n.outputs[0].name for n in graph.nodes] == ["a", "b", "c", "d"]
    assert [n.provenance for n in graph.nodes] == [("first",), ("Add:b",), ("Gather:c",), ("Gather:d",)]


@pytest.mark.parametrize("ir_version, kinds", [(3, {"w"}), (8, {"w", "epsilon"})])
def test_an_initializer_that_is_an_input_is_a_param(ir_version: int, kinds: set[str]) -> None:
    """From IR 4 on an initializer listed as input can be overridden, a single number too; before it means nothing."""
    weights = {"w": np.ones(3, np.float32), "epsilon": np.array(0.5, np.float32)}
    inputs = [tensor("x", (3,)), tensor("w", (3,)), tensor("epsilon", ())]
    nodes = [node("Mul", "x w", "a"), node("Add", "a epsilon")]
    graph = load(model(nodes, inputs, ["y"], weights, ir_version=ir_version))
    assert [i.name for i in graph.inputs] == ["x"]
    assert {p.name for p in graph.params} == kinds


def test_scales_of_several_numbers_are_read_at_import() -> None:
    """A float initializer that gives a size is a constant, not a param that could be changed later without effect."""
    weights = {"roi": np.empty(0, np.float32), "scales": np.array([1, 1, 2, 2], np.float32)}
    nodes = [node("Resize", "x roi scales", mode="nearest", coordinate_transformation_mode="asymmetric")]
    graph = load(model(nodes, [tensor("x", (1, 1, "h", "w"))], ["y"], weights))
    assert not graph.params
    assert str(graph.outputs[0].value.type) == "f32[1, 1, 2*h, 2*w]"


def test_unsupported_leaves_and_dead_nodes_do_no_harm() -> None:
    """What no output depends on is not imported, so it can't fail."""
    nodes = [node("NonZero", "x", "dead"), node("Relu", "x")]
    graph = load(model(nodes, [tensor("x", (2,))], ["y"]))
    assert [n.op.op_name for n in graph.nodes] == ["relu"]


# ---- dims


def _two_inputs() -> bytes:
    inputs = [tensor("x", ("batch", 3, None, "w")), tensor("m", ("batch", 3, 1, 1))]
    return model([node("Add", "x m")], inputs, ["y"])


def shapes(graph: Graph) -> list[str]:
    return [str(i.type) for i in graph.inputs]


@pytest.mark.parametrize(
    "dims, expected",
    [
        (None, ["f32[batch, 3, `x.2`, w]", "f32[batch, 3, 1, 1]"]),
        ({"batch": 4}, ["f32[4, 3, `x.2`, w]", "f32[4, 3, 1, 1]"]),
        ({"x.2": 7, "w": (1, 9)}, ["f32[batch, 3, 7, w]", "f32[batch, 3, 1, 1]"]),
        ({"x": (2, 3, (32, 960), None)}, ["f32[2, 3, `x.2`, w]", "f32[2, 3, 1, 1]"]),
        ({"x": [2, (1, 8), 5, 6], "batch": 2}, ["f32[2, 3, 5, 6]", "f32[2, 3, 1, 1]"]),
        ({"w": Dim("width", 8, 64, multiple=8)}, ["f32[batch, 3, `x.2`, width]", "f32[batch, 3, 1, 1]"]),
        ({"m": {0: "other"}}, ["f32[batch, 3, `x.2`, w]", "f32[other, 3, 1, 1]"]),
        ({"m": {0: "other"}, "other": 4}, ["f32[batch, 3, `x.2`, w]", "f32[4, 3, 1, 1]"]),
        ({"m": ("other", 3, 1, None), "batch": 4}, ["f32[4, 3, `x.2`, w]", "f32[other, 3, 1, 1]"]),
        ({"m": {0: 4, 1: 3, 2: None}}, ["f32[batch, 3, `x.2`, w]", "f32[4, 3, 1, 1]"]),
        ({"m": {0: (1, 9)}}, ["f32[batch, 3, `x.2`, w]", "f32[`m.0`, 3, 1, 1]"]),
        ({"x": {2: "w"}}, ["f32[batch, 3, w, w]", "f32[batch, 3, 1, 1]"]),
    ],
)
def test_dims_fix_and_bound_sizes(dims: Any, expected: list[str]) -> None:
    """By dim name, by the name made for an unnamed size, and by input; equal names are one dim in all inputs."""
    assert shapes(load(_two_inputs(), dims=dims)) == expected


def test_bounds_reach_the_symbols() -> None:
    """A pair becomes the bounds of the dim; without one it is 1 or more."""
    found = load(_two_inputs(), dims={"x": (None, 3, (32, 960), None)}).dims()
    assert (found["x.2"].lo, found["x.2"].hi) == (32, 960)
    assert (found["w"].lo, found["w"].hi) == (1, None)


@pytest.mark.parametrize(
    "dims, error, message",
    [
        (
            {"bach": 4},
            OptionError,
            r"unknown dim 'bach' \(did you mean 'batch'\?\); dims: 'batch', 'w', 'x.2'; inputs: 'x'",
        ),
        ({"x": (2, 4, None, None)}, ShapeError, "fixes this size to 3"),
        ({"x": (2, (4, 8), None, None)}, ShapeError, "fixes this size to 3"),
        ({"x": (2, 3)}, ShapeError, "has 2 sizes, the input has 4"),
        ({"x": 5}, OptionError, "one entry for each axis"),
        ({"m": {4: "other"}}, OptionError, "4 is no axis of the input of shape"),
        ({"m": {True: "other"}}, OptionError, "True is no axis"),
        ({"m": {0: ""}}, OptionError, "empty name"),
        ({"m": {0: 2.5}}, OptionError, "expected another name, an int"),
        ({"m": {1: "other"}}, ShapeError, "fixes this size to 3"),
        ({"m": {1: 4}}, ShapeError, "fixes this size to 3"),
        ({"m": ("other", 3)}, ShapeError, "has 2 sizes, the input has 4"),
        ({"batch": (4, 2)}, OptionError, "expected an int"),
        ({"batch": -1}, OptionError, "expected an int"),
        ({3: 4}, OptionError, "unknown dim 3;"),
        ({"batch": 2, "x": (3, 3, None, None)}, OptionError, "'batch' is 3 here and 2 elsewhere"),
    ],
)
def test_wrong_dims_are_named(dims: Any, error: type[Exception], message: str) -> None:
    """Unknown names list the known ones; contradictions name both sides."""
    with pytest.raises(error, match=message):
        load(_two_inputs(), dims=dims)


def _distances() -> bytes:
    """Dot products of the rows of two inputs whose numbers of rows have one name, and the sum of the first rows."""
    nodes = [node("Transpose", "b", "t", perm=[1, 0]), node("MatMul", "a t", "y")]
    return model(nodes, [tensor("a", ("N", 3)), tensor("b", ("N", 3))], ["y"])


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize(
    "own", [None, {"b": {0: "N2"}}, {"b": {0: 4}}, {"b": {0: (1, 9)}}, {"N": (1, 8)}, {"N (b)": 4}]
)
def test_one_name_for_two_sizes(device: str, own: Any, tmp_path: Path) -> None:
    """They run as they are, and with `dims` for the one or both; each has its own entry in the cache."""
    path = tmp_path / "distances.onnx"
    path.write_bytes(_distances())
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((n, 3), dtype=np.float32) for n in (6, 4))
    found = rlx.load(path, device=device, dims=own)
    np.testing.assert_allclose(found.run([a, b])[0], a @ b.T, 1e-5, 1e-6)
    if own is None:
        assert found.inputs[1].shape == (Dim("N (b)"), 3)
        assert rlx.load(path, device=device, dims={"N": 4}).inputs[0].shape == (4, 3)
    with pytest.raises((ShapeError, ExecutionError)):
        rlx.load(path, device=device, dims={"N": (1, 5)}).run([b, a])  # said of the name, said of both


def test_one_name_for_two_sizes_of_one_input() -> None:
    source = model([node("Relu", "x")], [tensor("x", ("N", "N"))], ["y"])
    x = np.ones((6, 4), np.float32)
    for dims in (None, {"x": {1: "N2"}}):
        assert rlx.compile(load(source, dims=dims), device="cpu").run([x])[0].shape == (6, 4)
    assert load(source).inputs[0].shape == (Dim("N"), Dim("N (x.1)"))
    whole = rlx.compile(load(source, dims={"x": {1: "N"}}), device="cpu")  # the user says that they are one
    with pytest.raises(ShapeError, match=r"dims=\{'x': \{1: 'N2'\}\} gives this one a name of its own"):
        whole.run([x])


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_sizes_that_are_parted_are_still_checked(device: str) -> None:
    """Where a node needs them to be equal, a run in which they are not is an error that names it."""
    source = model([node("Add", "a b")], [tensor("a", ("N",)), tensor("b", ("N",))], ["y"])
    found = rlx.compile(load(source, dims={"b": {0: "M"}}), device=device)
    assert found.run([np.ones(4, np.float32)] * 2)[0].tolist() == [2.0] * 4
    with pytest.raises(ExecutionError, match=r"'Add:y'.*N is 6 and M is 4"):
        found.run([np.ones(6, np.float32), np.ones(4, np.float32)])


def test_the_sizes_of_graphs_are_not_parted() -> None:
    g = Graph("g")
    g.output(g.input("x", (Dim("n"),)), "y")
    with pytest.raises(OptionError, match="by axis a size of a model file"):
        rlx.compile(g, device="cpu", dims={"x": {0: "m"}})


def test_unknown_rank_asks_for_dims() -> None:
    """Without a rank the input is named, and giving its shape is enough."""
    source = model([node("Relu", "x")], [tensor("x", None)], ["y"])
    with pytest.raises(ShapeError, match="rank of input 'x'"):
        load(source)
    assert shapes(load(source, dims={"x": (2, (1, 8))})) == ["f32[2, `x.1`]"]


def test_sizes_that_contradict_each_other_are_a_shape_error() -> None:
    """Dims that make the graph impossible are reported with the node."""
    source = model([node("Add", "x w")], [tensor("x", ("n",))], ["y"], {"w": np.ones(3, np.float32)})
    with pytest.raises(ShapeError, match="Add:y"):
        load(source, dims={"n": 4})


# ---- errors


def _broken() -> bytes:
    body = helper.make_graph([node("ImageDecoder", "w", "h")], "body", [], [tensor("h", None)])
    nodes = [
        node("FancyOp", "x", "a", domain="com.example", name="fancy"),
        node("Relu", "a", "b"),
        node("Resize", "x - scales", "c", mode="area", name="resize"),
        node("If", "flag", "d", then_branch=body, else_branch=body, name="branch"),
        node("Unsqueeze", "x axes", "e", name="unsqueeze"),
        node("Add", "b c", "y"),
        node("Sigmoid", "x", "z", wrong=1, name="sigmoid"),
    ]
    inputs = [tensor("x", (1, 1, 2, 2)), tensor("flag", (), BOOL), tensor("axes", (2,), I64), tensor("w", (1,))]
    weights = {"scales": np.ones(4, np.float32)}
    return model(nodes, inputs, ["y", "d", "e", "z"], weights, domains={"com.example": 1})


def test_all_missing_nodes_are_in_one_error() -> None:
    """Unknown domains and ops, also in subgraphs, attribute values, unknown attributes and ranks from data: at once."""
    with pytest.raises(UnsupportedOp) as caught:
        load(_broken())
    found = {n.name: n.reason for n in caught.value.nodes}
    assert "domain 'com.example'" in found["fancy"]
    assert "mode='area'" in found["resize"]
    assert "came with opset 20" in found["branch/ImageDecoder:h"]
    assert "'axes', must be known at import" in found["unsqueeze"]
    assert "'wrong' is not known" in found["sigmoid"]
    assert len(caught.value.nodes) == 6  # the ImageDecoder is in both branches
    assert all(word in str(caught.value) for word in ("FancyOp x1", "ImageDecoder x2", "'fancy'"))


@pytest.mark.parametrize("opset, word", [(5, "opset 5"), (999, "opset 999")])
def test_opsets_outside_the_range_are_refused(opset: int, word: str) -> None:
    """A version that the table does not cover is not guessed at."""
    with pytest.raises(UnsupportedOp, match=word):
        load(model([node("Relu", "x")], [tensor("x", (2,))], ["y"], opset=opset))


def test_ops_of_older_opsets_are_imported_where_they_have_not_changed() -> None:
    """Not is what it was in opset 1; And is not."""
    flags = [tensor("x", (3,), BOOL)]
    x = np.array([True, False, True])
    (y,) = run_graph(load(model([node("Not", "x")], flags, ["y"], opset=1)), {"x": x}).values()
    np.testing.assert_array_equal(y, ~x)
    with pytest.raises(UnsupportedOp, match="opset 1 is outside 7"):
        load(model([node("And", "x x")], flags, ["y"], opset=1))


@pytest.mark.parametrize("op, opset, word", [("Gelu", 17, "came with opset 20"), ("Upsample", 11, "left ONNX after")])
def test_ops_of_other_opsets_are_refused(op: str, opset: int, word: str) -> None:
    """An op that its opset does not have is an error that says which has it."""
    with pytest.raises(UnsupportedOp, match=word):
        load(one(op, X, opset))


@pytest.mark.parametrize(
    "inputs, word",
    [
        ([tensor("x", (2,), TensorProto.FLOAT6E2M3)], "FLOAT6E2M3"),
        ([helper.make_tensor_sequence_value_info("x", F32, None)], "sequence"),
    ],
)
def test_inputs_of_other_kinds_are_refused(inputs: list[onnx.ValueInfoProto], word: str) -> None:
    """Types without a counterpart and sequences are listed like nodes."""
    with pytest.raises(UnsupportedOp, match=word) as caught:
        load(model([node("Identity", "x")], inputs, ["y"]))
    assert caught.value.nodes[0].op == "Input"


def test_dtypes_that_an_op_does_not_take_are_refused() -> None:
    """A DTypeError of an op becomes the reason of its node, not an error of the first node alone."""
    nodes = [node("Sigmoid", "x", "a"), node("Erf", "x", "b")]
    with pytest.raises(UnsupportedOp) as caught:
        load(model(nodes, [tensor("x", (2,), I64)], ["a", "b"]))
    assert [n.op for n in caught.value.nodes] == ["Sigmoid", "Erf"]
    assert not isinstance(caught.value, DTypeError)


@pytest.mark.parametrize(
    "nodes, word",
    [
        ([node("Relu", "nowhere")], "reads 'nowhere'"),
        ([node("Relu", "x", "y"), node("Abs", "x", "y")], "makes 'y' a second time"),
        ([node("Relu", "x", "z")], "nothing makes the output 'y'"),
    ],
)
def test_broken_graphs_are_format_errors(nodes: list[onnx.NodeProto], word: str) -> None:
    """Missing, doubled and out-of-order tensors are faults of the file."""
    with pytest.raises(ModelFormatError, match=word):
        load(model(nodes, [tensor("x", (2,))], ["y"]))


# ---- preflight


def test_preflight_lists_everything_without_weights() -> None:
    """Counts, missing nodes with domain and opset, dynamic sizes, and weights by element type."""
    report = preflight(_broken())
    assert not report.ok
    assert report.unchecked == 2  # Relu and Add come after missing nodes
    assert report.supported == {"Relu": 1, "Add": 1, "If": 1}
    fancy = next(n for n in report.missing if n.op == "FancyOp")
    assert fancy == MissingNode("fancy", "FancyOp", fancy.reason, "com.example", 1)
    assert report.weight_bytes == 16
    assert "com.example.FancyOp 'fancy' (opset 1)" in str(report)


def test_preflight_of_a_good_model() -> None:
    """The census of a model that can be imported; dims apply."""
    report = preflight(_two_inputs(), dims={"w": 3})
    assert report.ok
    assert (report.nodes, report.supported, report.missing) == (1, {"Add": 1}, ())
    assert report.dynamic == {"batch": ("x[0]", "m[0]"), "x.2": ("x[2]",)}
    leaves = preflight(_leaves())
    assert {name: (c.tensors, c.nbytes) for name, c in leaves.weights.items()} == {
        "FLOAT": (3, 60),
        "INT64": (2, 16400),
    }
    assert "can be imported" in str(leaves)
    inline = node("Constant", "", "c", value=numpy_helper.from_array(np.ones(6, np.float32)))
    assert preflight(model([inline, node("Add", "x c")], [tensor("x", (6,))], ["y"])).weight_bytes == 24


def test_preflight_reports_inputs_of_unknown_rank() -> None:
    """Where `load` asks for dims, preflight lists the input instead of stopping."""
    report = preflight(model([node("Relu", "x")], [tensor("x", None)], ["y"]))
    assert [(n.op, n.name) for n in report.missing] == [("Input", "x")]


def test_external_data_beyond_two_gigabytes(tmp_path: Path) -> None:
    """A weight of over 2 GiB and one behind it, in a file with holes: mapped, so that only what is read counts."""
    size = (1 << 31) + 4096
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(size)
        file.seek(size)
        file.write(np.arange(3, dtype=np.float32).tobytes())
    tensors = []
    for name, dims, start in (("large", [size // 4], 0), ("behind", [3], size)):
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
        for key, value in {"location": "weights.bin", "offset": start, "length": 4 * dims[0]}.items():
            tensor.external_data.add(key=key, value=str(value))
        tensors.append(tensor)
    nodes = [helper.make_node("Gather", ["large", "at"], ["a"]), helper.make_node("Add", ["a", "behind"], ["y"])]
    at = helper.make_tensor_value_info("at", TensorProto.INT64, [3])
    graph = helper.make_graph(nodes, "g", [at], [helper.make_empty_tensor_value_info("y")], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    loaded = load(tmp_path / "model.onnx")
    found = run_graph(loaded, {"at": np.array([0, 7, size // 4 - 1])})["y"]
    np.testing.assert_array_equal(found, [0, 1, 2])


@pytest.mark.parametrize(
    "shape", [[1, 2, 4, 4], [0, 0, 0, 0], [1 << 40, 1, 1 << 30, 1 << 30], [1, 1, 4], [1, 1, -4, 4]]
)
def test_a_result_of_max_unpool_of_another_shape_is_refused(shape: list[int]) -> None:
    """Images and channels are those of x; the first two sizes were not looked at."""
    x, i = (helper.make_tensor_value_info(n, t, [1, 1, 2, 2]) for n, t in (("x", 1), ("i", 7)))
    size = helper.make_tensor("s", 7, [len(shape)], shape)
    node = helper.make_node("MaxUnpool", ["x", "i", "s"], ["y"], kernel_shape=[2, 2], strides=[2, 2])
    y = helper.make_tensor_value_info("y", 1, None)
    graph = helper.make_graph([node], "g", [x, i], [y], [size])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with pytest.raises(RlxError, match="MaxUnpool"):
        load(model.SerializeToString())


@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("mode", ["up", "down", "nearest"])
def test_casts_to_powers_of_two(mode: str, saturate: int) -> None:
    """By the node's rounding; where it saturates, what is beyond the range is at its ends. NaN stays NaN."""
    steps = {
        "up": [1, 2, 2, 2, 4, 2**-126], "down": [1, 1, 1, 1, 2, 2**-127], "nearest": [1, 1, 2, 2, 4, 2**-126]
    }[mode]  # fmt: skip
    x = np.array([1, 1.4, 1.5, 1.75, 3.5 if mode != "down" else 2.5, 1.5 * 2.0**-127, np.inf, np.nan], np.float32)
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT8E8M0, round_mode=mode, saturate=saturate)
    info = [helper.make_tensor_value_info(*a, [8]) for a in (("x", 1), ("y", TensorProto.FLOAT8E8M0))]
    model = helper.make_model(
        helper.make_graph([node], "g", info[:1], info[1:]), opset_imports=[helper.make_opsetid("", 24)]
    )
    graph = load(model.SerializeToString())
    for got in (run_graph(graph, {"x": x})["y"], rlx.compile(graph, device="cpu")(x=x)["y"]):
        assert np.array_equal(got.astype(np.float32)[:-2], np.array(steps, np.float32))
        assert got.astype(np.float32)[-2] == 2.0**127 or not saturate
        assert np.isnan(got.astype(np.float32)[-2:]).tolist() == [not saturate, True]
