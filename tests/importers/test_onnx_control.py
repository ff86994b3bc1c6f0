"""If, Loop, Scan, functions and sizes that data decide, against onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import ExecutionError, ModelFormatError, OptionError, ShapeError, UnsupportedOp
from rlx.importers.onnx import load, preflight
from rlx.ir.graph import Graph
from rlx.ir.shape import upper
from rlx.ir.verify import verify

F32, I64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def info(name: str, shape: Sequence[int | str] | None = None, elem: int = F32) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem, shape)


def nodes_of(text: str, **graphs: dict[str, Any]) -> list[onnx.NodeProto]:
    """One node a line, "a b = Op x y"; attributes by the name of the first output."""
    made = []
    for line in text.strip().splitlines():
        left, _, right = line.partition("=")
        op, *inputs = right.split()
        outputs = left.split()
        attributes = graphs.get(outputs[0], {})
        made.append(helper.make_node(op, ["" if i == "-" else i for i in inputs], outputs, **attributes))
    return made


def subgraph(text: str, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]) -> Any:
    return helper.make_graph(nodes_of(text), "sub", inputs, outputs)


def source(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[str],
    weights: dict[str, Any] | None = None,
    functions: Sequence[onnx.FunctionProto] = (),
) -> bytes:
    inits = [numpy_helper.from_array(np.asarray(a), n) for n, a in (weights or {}).items()]
    empty = [helper.make_empty_tensor_value_info(n) for n in outputs]
    graph = helper.make_graph(nodes, "g", inputs, empty, inits)
    opsets = [helper.make_opsetid("", 17), *(helper.make_opsetid(f.domain, 1) for f in functions)]
    made: bytes = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=9).SerializeToString()
    return made


def same(model: bytes, feed: dict[str, np.ndarray]) -> Graph:
    """The graph, which verifies and gives what onnxruntime gives."""
    graph = load(model)
    verify(graph)
    peer = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feed)
    for got, want in zip(run_graph(graph, feed).values(), peer, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    return graph


X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


# ---- If


def _branches(then: str, other: str, **weights: Any) -> bytes:
    graphs = {"then_branch": subgraph(then, [], [info("t")]), "else_branch": subgraph(other, [], [info("e")])}
    nodes = nodes_of("y = If flag", y=graphs)
    return source(nodes, [info("flag", (), BOOL), info("x", ("n", 4))], ["y"], weights)


@pytest.mark.parametrize("flag", [True, False])
def test_both_branches_of_a_runtime_condition(flag: bool) -> None:
    """The branch is chosen in the run; what it uses of the outside is an input of its region."""
    model = _branches("a = Mul x w\nt = Relu a", "e = Neg x", w=np.arange(4, dtype=np.float32))
    graph = same(model, {"flag": np.array(flag), "x": X})
    (node,) = graph.nodes
    assert [v.name for v in node.inputs] == ["flag", "x", "w"]
    assert all(not region.params for region in node.regions)


def test_the_branch_not_taken_does_not_run() -> None:
    """An index out of range there stops no run."""
    graph = load(_branches("t = Gather x far", "e = Gather x near", far=np.array([99]), near=np.array([0])))
    assert run_graph(graph, {"flag": np.array(False), "x": X})["y"].shape == (1, 4)
    with pytest.raises(ExecutionError):
        run_graph(graph, {"flag": np.array(True), "x": X})


def test_a_known_condition_leaves_one_branch() -> None:
    """The other one may even hold ops that are not supported."""
    then = subgraph("t = Relu x", [], [info("t")])
    other = subgraph("e = ImageDecoder x", [], [info("e")])
    nodes = nodes_of("y = If flag", y={"then_branch": then, "else_branch": other})
    graph = load(source(nodes, [info("x", (2,))], ["y"], {"flag": np.array(True)}))
    assert [n.op.op_name for n in graph.nodes] == ["relu"]


@pytest.mark.parametrize("flag", [True, False])
def test_branches_of_other_sizes_give_a_dim_of_the_run(flag: bool) -> None:
    """Its bounds are those of both; the output has its true shape."""
    model = _branches("t = Identity x", "e = Slice x s e1 s", s=[0], e1=[2])
    feed = {"flag": np.array(flag), "x": X}
    graph = same(model, feed)
    size = graph.outputs[0].value.shape[0]
    assert str(size) == "`y.size`"
    assert preflight(model).dynamic["y.size"] == ("made by If:y",)


def test_branches_of_other_ranks_take_the_squeezed_one_with_a_guard() -> None:
    """As exporters write the squeezing of an axis that may be 1; a run where it is not stops."""
    then = subgraph("t = Squeeze x zero", [], [info("t")])
    other = subgraph("e = Identity x", [], [info("e")])
    text = "shape = Shape x\nn = Gather shape zero\nflag = Equal n one\ny = If flag"
    nodes = nodes_of(text, y={"then_branch": then, "else_branch": other})
    model = source(nodes, [info("x", ("n", 4))], ["y"], {"zero": [0], "one": [1]})
    graph = same(model, {"x": X[:1]})
    with pytest.raises(ExecutionError, match="the then_branch, for equal sizes, was compiled; dims="):
        run_graph(graph, {"x": X})
    assert any("then_branch" in note for note in preflight(model).notes)


# ---- Loop


def _loop(body: str, rows: int, trip: Any, first: Any, weights: dict[str, Any], condition: str = "go") -> bytes:
    inputs = [info("i", (), I64), info("go_in", (), BOOL), info("c", (3, 4))]
    outputs = [info(condition, (), BOOL), info("c_out", (3, 4)), *(info(f"row{k}") for k in range(rows))]
    graph = subgraph(body, inputs, outputs)
    names = " ".join(["y", *(f"z{k}" for k in range(rows))])
    nodes = nodes_of(f"{names} = Loop trip first x", y={"body": graph})
    given = [info("x", (3, 4))]
    known = dict(weights)
    for name, value, elem in (("trip", trip, I64), ("first", first, BOOL)):
        if value is None:
            given.append(info(name, (), elem))
        else:
            known[name] = np.asarray(value)
    return source(nodes, given, names.split(), known)


COUNTED = "go = Identity go_in\nf = Cast i\nc_out = Add c f\nrow0 = Mul c w"


def _counted(trip: Any) -> bytes:
    model = onnx.load_from_string(_loop(COUNTED, 1, trip, True, {"w": np.float32(2)}))
    model.graph.node[0].attribute[0].g.node[1].attribute.append(helper.make_attribute("to", F32))
    made: bytes = model.SerializeToString()
    return made


@pytest.mark.parametrize("trip", [0, 1, 5])
def test_a_known_count_is_a_scan(trip: int) -> None:
    """Carries and rows of a loop without a condition of its own."""
    graph = same(_counted(trip), {"x": X})
    assert "scan" in [n.op.op_name for n in graph.nodes]


@pytest.mark.parametrize("trip", [0, 1, 7])
def test_a_runtime_count_gives_as_many_rows(trip: int) -> None:
    """One graph for all counts; the rows have the size of the run."""
    feed = {"x": X, "trip": np.array(trip)}
    graph = same(_counted(None), feed)
    assert str(graph.outputs[1].value.type) == "f32[`y.count`, 3, 4]"


@pytest.mark.parametrize("rows", [0, 1])
def test_a_condition_of_its_own_is_a_native_loop(rows: int) -> None:
    """Rounds stop when the condition fails, or at the count."""
    body = "c_out = Mul c two\ns = ReduceSum c_out\na = Abs s\nf = Squeeze a\ngo = Less f limit"
    body += "\nrow0 = Identity c" if rows else ""
    for trip in (2, 100):
        model = _loop(body, rows, trip, True, {"two": np.float32(2), "limit": np.float32(100)})
        graph = same(model, {"x": X})
        assert graph.nodes[-1].op.op_name == ("loop" if rows else "while")


def attributed(graph: onnx.GraphProto, op: str, **attributes: Any) -> onnx.GraphProto:
    for node in graph.node:
        if node.op_type == op:
            node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    return graph


def agree(graph: Graph, model: bytes, feeds: Sequence[dict[str, np.ndarray]]) -> None:
    """The reference and one compile for the CPU give what onnxruntime gives, for each of the inputs."""
    verify(graph)
    compiled = rlx.compile(graph, device="cpu", threads=1)
    peer = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    for feed in feeds:
        for got in (list(run_graph(graph, feed).values()), compiled.run(feed)):
            for a, b in zip(got, peer.run(None, feed), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, strict=True)


def test_a_carry_that_grows_is_written_out_when_the_count_is_known() -> None:
    """Each round has its own shapes, and nothing of the loop is left."""
    inputs = [info("i", (), I64), info("go_in", (), BOOL), info("c")]
    body = subgraph("go = Identity go_in\nc_out = Concat c x", inputs, [info("go", (), BOOL), info("c_out")])
    nodes = nodes_of("y = Loop trip first x", y={"body": attributed(body, "Concat", axis=0)})
    graph = same(source(nodes, [info("x", (3, 4))], ["y"], {"trip": np.array(3), "first": np.array(True)}), {"x": X})
    assert {n.op.op_name for n in graph.nodes} == {"concat"}


def test_a_carry_that_grows_by_as_much_each_round() -> None:
    """Its room follows from the number of rounds, which the run decides; the body reads what there is of it."""
    inputs = [info("i", (), I64), info("go_in", (), BOOL), info("c", ("k", 3))]
    outputs = [info("go", (), BOOL), info("c_out", ("m", 3)), info("total", (1, 1))]
    body = subgraph("go = Identity go_in\nc_out = Concat c x\ntotal = ReduceSum c_out", inputs, outputs)
    nodes = nodes_of("y totals = Loop n - c0", y={"body": attributed(body, "Concat", axis=0)})
    model = source(nodes, [info("n", (), I64), info("c0", ("a", 3)), info("x", ("b", 3))], ["y", "totals"])
    rows = np.random.default_rng(0).random((9, 3), np.float32)
    feeds = [
        {"n": np.array(n), "c0": rows[:a], "x": rows[:b]} for n, a, b in ((3, 1, 1), (0, 2, 1), (20, 1, 2), (70, 4, 3))
    ]
    graph = load(model)
    assert [str(o.value.type) for o in graph.outputs] == ["f32[`y.size0`, 3]", "f32[`y.count`, 1, 1]"]
    agree(graph, model, feeds)


def growing_until() -> bytes:
    """Appends a column until the sum reaches a limit."""
    inputs = [info("i", (), I64), info("go_in", (), BOOL), info("c", ("b", "k"))]
    body = subgraph(
        "out = Concat c t\ns = ReduceSum out\ngo = Less s limit", inputs, [info("go", (), BOOL), info("out")]
    )
    attributed(attributed(body, "Concat", axis=1), "ReduceSum", keepdims=0)
    given = [info("first", (), BOOL), info("c0", ("b", "a")), info("t", ("b", 1)), info("limit", ())]
    return source(nodes_of("y = Loop - first c0", y={"body": body}), given, ["y"])


def test_a_carry_that_grows_until_the_data_say_stop() -> None:
    """Its room is what `dims` give its final size, else a usual one, which is noted; a run that needs more stops."""
    model = growing_until()

    def feed(first: bool, b: int, a: int, limit: float) -> dict[str, np.ndarray]:
        c0, t = np.ones((b, a), np.float32), np.ones((b, 1), np.float32)
        return {"first": np.array(first), "c0": c0, "t": t, "limit": np.array(limit, np.float32)}

    agree(load(model), model, [feed(True, 2, 1, 9), feed(False, 2, 1, 9), feed(True, 1, 3, 40)])
    report = preflight(model)
    assert any("'y.size1'" in note and "1024" in note for note in report.notes)
    assert report.supported == {"Loop": 1, "Concat": 1, "ReduceSum": 1, "Less": 1}
    bounded = load(model, dims={"y.size1": (0, 8)})
    agree(bounded, model, [feed(True, 2, 1, 9)])
    with pytest.raises(ExecutionError, match="node 'Loop:y': the carry 'out' has room for"):
        rlx.compile(bounded, device="cpu").run(feed(True, 1, 3, 40))


def test_a_carry_whose_size_the_data_decide() -> None:
    inputs = [info("i", (), I64), info("go_in", (), BOOL), info("c", ("k",))]
    text = "mean = ReduceMean c\nkept = Greater c mean\nout = Compress c kept\nm = Size out\ngo = Greater m one"
    body = subgraph(text, inputs, [info("go", (), BOOL), info("out")])
    nodes = nodes_of("y = Loop n - c0", y={"body": body})
    model = source(nodes, [info("n", (), I64), info("c0", ("a",))], ["y"], {"one": np.array(1)})
    numbers = np.random.default_rng(0).random(50, np.float32)
    agree(load(model), model, [{"n": np.array(n), "c0": numbers[:a]} for n, a in ((3, 10), (9, 50), (0, 4))])


@pytest.mark.parametrize("how", [{"axis": 1, "new_axis": 1}, {"axis": -1}, {"axis": 0}], ids=str)
def test_a_sequence_that_a_loop_of_the_run_appends_to(how: dict[str, int]) -> None:
    """As scripted models write lists: its tensors are stacked rows, which are joined and taken out after the loop."""
    lists = [helper.make_tensor_sequence_value_info(name, F32, None) for name in ("s", "s_out")]
    inputs = [info("i", (), I64), info("go_in", (), BOOL), lists[0]]
    text = "go = Identity go_in\nf = Cast i\ny = Add x f\ns_out = SequenceInsert s y"
    body = attributed(subgraph(text, inputs, [info("go", (), BOOL), lists[1]]), "Cast", to=F32)
    after = (
        "s0 = SequenceEmpty\nl = Loop n - s0\ny = ConcatFromSequence l\nm = SequenceLength l\nlast = SequenceAt l minus"
    )
    model = source(
        nodes_of(after, l={"body": body}, y=how),
        [info("n", (), I64), info("x", ("a", 3))],
        ["y", "m", "last"],
        {"minus": np.array(-1)},
    )
    rows = np.random.default_rng(0).random((3, 3), np.float32)
    agree(load(model), model, [{"n": np.array(n), "x": rows[:a]} for n, a in ((3, 1), (1, 2), (40, 3))])


def test_a_sequence_of_tensors_whose_size_the_rounds_decide_is_refused() -> None:
    """They can't be stacked: what a round appends would be read at another round's size."""
    lists = [helper.make_tensor_sequence_value_info(name, F32, None) for name in ("s", "s_out")]
    inputs = [info("i", (), I64), info("go_in", (), BOOL), lists[0]]
    text = "go = Identity go_in\nat = Unsqueeze i nought\ny = Slice x nought at\ns_out = SequenceInsert s y"
    body = subgraph(text, inputs, [info("go", (), BOOL), lists[1]])
    nodes = nodes_of("s0 = SequenceEmpty\nl = Loop n - s0\ny = ConcatFromSequence l", l={"body": body}, y={"axis": 0})
    model = source(nodes, [info("n", (), I64), info("x", ("a", 3))], ["y"], {"nought": np.array([0])})
    with pytest.raises(UnsupportedOp, match="may be another in each round"):
        load(model)


@pytest.mark.parametrize("parts", ["full", "one"])
def test_parts_of_one_along_an_axis_of_the_run_are_a_sequence(parts: str) -> None:
    """As exporters write a loop over rows: a run's number of ones, or the number 1."""
    text = "shape = Shape x\nfull = ConstantOfShape shape\ns = SplitToSequence x SPLIT\na = SequenceAt s minus"
    nodes = nodes_of(text.replace("SPLIT", parts), full={"value": numpy_helper.from_array(np.array([1]))})
    model = source(nodes, [info("x", ("n",))], ["a"], {"minus": np.array(-1), "one": np.array(1)})
    x = np.random.default_rng(0).random(9, np.float32)
    agree(load(model), model, [{"x": x[:n]} for n in (1, 4, 9)])


def test_sequences_are_lists_known_at_import() -> None:
    """Nothing of them is left in the graph."""
    text = "s = SplitToSequence x\na = SequenceAt s one\nb = SequenceInsert s x\nn = SequenceLength b\ny = Mul a a"
    graph = same(source(nodes_of(text), [info("x", (3, 4))], ["y", "n"], {"one": np.array(1)}), {"x": X})
    assert {n.op.op_name for n in graph.nodes} <= {"split", "mul"}


@pytest.mark.parametrize("keepdims", [0, 1])
def test_slices_along_an_axis_of_the_run_are_a_sequence(keepdims: int) -> None:
    text = "s = SplitToSequence x\na = SequenceAt s minus\nb = SequenceInsert s a\nn = SequenceLength b"
    nodes = nodes_of(
        f"{text}\ny = ConcatFromSequence b",
        s={"axis": 1, "keepdims": keepdims},
        y={"axis": 1, "new_axis": 1 - keepdims},
    )
    model = source(nodes, [info("x", (2, "n", 3))], ["a", "n", "y"], {"minus": np.array(-1)})
    x = np.random.default_rng(0).random((2, 9, 3), np.float32)
    agree(load(model), model, [{"x": x[:, :n]} for n in (1, 4, 9)])


def test_nodes_in_any_order() -> None:
    """Some converters put a node behind those that read what it makes, in branches too; a cycle is refused."""
    then = subgraph("t = Add u u\nu = Exp late", [], [info("t")])
    nodes = nodes_of("y = If flag\nlate = Relu x\nz = Mul y late", y={"then_branch": then, "else_branch": then})
    model = source([nodes[2], nodes[0], nodes[1]], [info("x", (3, 4)), info("flag", (), BOOL)], ["z"])
    (got,) = run_graph(load(model), {"x": X, "flag": np.array(True)}).values()
    np.testing.assert_allclose(got, 2 * np.exp(np.maximum(X, 0)) * np.maximum(X, 0), rtol=1e-6)
    with pytest.raises(ModelFormatError, match="the nodes are in a cycle"):
        load(source(nodes_of("a = Add x b\nb = Relu a"), [info("x", (3, 4))], ["a"]))


# ---- functions


def _function(name: str, text: str, attributes: Sequence[str] = (), **given: Any) -> onnx.FunctionProto:
    nodes = nodes_of(text)
    for node in nodes:
        for attribute, ref in given.get(node.output[0], {}).items():
            made = helper.make_attribute(attribute, 1.0)
            made.ClearField("f")
            made.ref_attr_name = ref
            node.attribute.append(made)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["a", "b"], ["r"], nodes, opsets, list(attributes))


def _call(op: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, ["" if n == "-" else n for n in inputs.split()], [output], domain="own", **attributes)


def test_functions_are_inlined_with_their_attributes() -> None:
    """Attributes by reference reach the nodes of the body; provenance names the call."""
    leaky = _function("Leak", "s = Add a b\nr = LeakyRelu s", ["slope"], r={"alpha": "slope"})
    nodes = [_call("Leak", "x x", "m", slope=0.25), _call("Leak", "m x", "y", slope=0.5)]
    graph = same(source(nodes, [info("x", (3, 4))], ["y"], functions=[leaky]), {"x": X})
    assert [n.provenance[0] for n in graph.nodes][:2] == ["Leak:m/Add:s", "Leak:m/LeakyRelu:r"]


def test_functions_may_leave_out_inputs_and_call_others() -> None:
    """An absent input is absent in the body; a node of a body may be a call."""
    inner = _function("Limit", "r = Clip a b")
    outer = _function("Twice", "t = Add a a")
    outer.node.append(_call("Limit", "t b", "r"))
    feed = {"x": X}
    nodes = [_call("Twice", "x", "y")]
    same(source(nodes, [info("x", (3, 4))], ["y"], functions=[inner, outer]), feed)
    nodes = [_call("Twice", "x low", "y")]
    same(source(nodes, [info("x", (3, 4))], ["y"], {"low": np.float32(0.5)}, [inner, outer]), feed)


def test_functions_that_call_themselves_are_refused() -> None:
    """Recursion, and calls that multiply without end, are named instead of followed."""
    again = _function("Again", "t = Relu a")
    again.node.append(_call("Again", "t t", "r"))
    with pytest.raises(UnsupportedOp, match="call each other deeper"):
        load(source([_call("Again", "x x", "y")], [info("x", (2,))], ["y"], functions=[again]))
    doubling = []
    for n in range(24):
        f = _function(f"F{n}", "t = Relu a" if n == 0 else "t = Identity a")
        f.node.extend([_call(f"F{n - 1}", "t t", "u"), _call(f"F{n - 1}", "u u", "r")] if n else nodes_of("r = Abs t"))
        doubling.append(f)
    with pytest.raises(ModelFormatError, match="make more than the limit of"):
        load(source([_call("F23", "x x", "y")], [info("x", (2,))], ["y"], functions=doubling))


# ---- sizes that data decide


@pytest.mark.parametrize("count", [0, 2, 5])
def test_the_size_of_non_zero_goes_on_to_what_follows(count: int) -> None:
    """A dim named after the tensor, with the bound that its input gives; what depends on it has it too."""
    x = np.zeros(6, np.float32)
    x[:count] = 1
    text = "at = NonZero x\nrow = Squeeze at zero\ng = Gather x row\ny = Exp g\nn = Shape g"
    model = source(nodes_of(text), [info("x", (6,))], ["y", "n"], {"zero": [0]})
    graph = same(model, {"x": x})
    assert str(graph.outputs[0].value.type) == "f32[`at.count`]"
    assert graph.dims()["at.count"].hi == 6
    with pytest.raises(OptionError, match=r"'at\.count'"):
        load(model, dims={"wrong": 3})
    tight = load(model, dims={"at.count": (0, 3)})
    if count > 3:
        with pytest.raises(ExecutionError, match="outside its bounds"):
            run_graph(tight, {"x": x})


DATA = {
    "reshape": ("y = Reshape x to", [(2, 6), (-1, 3), (0, 2, -1), (4, 3, 1)]),
    "expand": ("r = Reshape x rows\ny = Expand r to", [(2, 3, 4), (1, 3, 4), (5, 1, 4)]),
    "tile": ("y = Tile x to", [(2, 1), (1, 3), (0, 2)]),
    "fill": ("y = ConstantOfShape to", [(2, 3), (0,), (4,)]),
    "pad": ("y = Pad x to", [(0, 1, 2, 0), (0, 0, 0, 0)]),
    "slice": ("y = Slice x to ends", [(0, 1), (-1, 0), (7, -9)]),
}


@pytest.mark.parametrize("name", DATA)
def test_shapes_that_are_run_time_data(name: str) -> None:
    """Run-time values of shapes, repeats, pads and starts; one graph a rank."""
    text, values = DATA[name]
    for value in values:
        to = np.array(value)
        model = source(
            nodes_of(text),
            [info("x", (3, 4)), info("to", to.shape, I64)],
            ["y"],
            {"rows": [1, 3, 4], "ends": [3, 1 << 40]},
        )
        kept = onnx.load_from_string(model)
        if "x" not in {i for node in kept.graph.node for i in node.input}:
            del kept.graph.input[0]
            same(kept.SerializeToString(), {"to": to})
            continue
        same(model, {"x": X, "to": to})


def test_slices_of_as_many_axes_as_the_run_has_starts() -> None:
    """Starts cut out of a vector by a run-time place: one, or beyond its end none, which leaves the tensor whole."""
    text = "j = Add i one\nk = Add j one\ns = Slice at i j\ne = Slice at j k\ny = Slice x s e"
    model = source(
        nodes_of(text),
        [info("x", (5, 4)), info("at", (4,), I64), info("i", (1,), I64)],
        ["s", "y"],
        {"one": np.array([1])},
    )
    x = np.random.default_rng(1).standard_normal((5, 4)).astype(np.float32)
    feeds = [{"x": x, "at": np.array([0, 2, 3, 5]), "i": np.array([i])} for i in (0, 1, 2, 7)]
    graph = load(model)
    assert upper(graph.outputs[0].value.shape[0]) == 1
    agree(graph, model, feeds)


def test_an_operand_of_no_or_one_element_is_stretched() -> None:
    """Against a larger size only one element fits; a run that has none stops, as it does in onnxruntime."""
    text = "j = Add i one\nc = Slice v i j\ny = Div x c"
    inputs = [info("x", (3, 4)), info("v", (4,)), info("i", (1,), I64)]
    model = source(nodes_of(text), inputs, ["y"], {"one": np.array([1])})
    v = np.arange(1, 5, dtype=np.float32)
    graph = load(model)
    agree(graph, model, [{"x": X, "v": v, "i": np.array([i])} for i in (0, 3)])
    with pytest.raises(ExecutionError, match="reshape"):
        rlx.compile(graph, device="cpu").run({"x": X, "v": v, "i": np.array([4])})


def test_known_parts_of_a_shape_stay_known() -> None:
    """Of a shape put together from sizes and data only the data becomes a dim of the run."""
    text = "s = Shape x\nfirst = Slice s zero one\nto = Concat first n minus\ny = Reshape x to"
    nodes = nodes_of(text, to={"axis": 0})
    weights = {"zero": [0], "one": [1], "minus": [-1]}
    model = source(nodes, [info("x", ("b", 12)), info("n", (1,), I64)], ["y"], weights)
    graph = same(model, {"x": np.ones((2, 12), np.float32), "n": np.array([3])})
    assert str(graph.outputs[0].value.shape[0]) == "b"
    with pytest.raises(ExecutionError):
        run_graph(graph, {"x": np.ones((2, 12), np.float32), "n": np.array([5])})


def test_a_guard_that_fails_names_the_node_of_the_file() -> None:
    """At the start of a run, after a size that data decide, and in a branch."""
    then, other = subgraph("y = Add x z", [], [info("y")]), subgraph("w = Identity x", [], [info("w")])
    branches = {"y": {"then_branch": then, "else_branch": other}}
    inputs = [info("x", ["a"]), info("z", ["b"]), info("c", [], BOOL)]
    x, z, yes = np.ones(3, np.float32), np.ones(4, np.float32), np.array(True)
    for text, attributes in [
        ("y = Add x z", {}),
        ("n = NonZero x\nm = NonZero z\ny = Add n m", {}),
        ("y = If c", branches),
    ]:
        model = source(nodes_of(text, **attributes), inputs, ["y"])
        with pytest.raises(ExecutionError, match=r"^node '.*Add:y': add of") as caught:
            rlx.compile(load(model), device="cpu").run({"x": x, "z": z, "c": yes})
        assert "4" in str(caught.value)


ROWS = {
    "counted": """y = Loop (n, t) <body = b (int64 i, bool c) => (bool go, float[K] o) {
        go = Identity (c)  u = Unsqueeze (i, zero)  m = Add (u, one)  k = Min (m, most)  o = Slice (x, zero, k) }>""",
    "by its condition": """y = Loop (, t) <body = b (int64 i, bool c) => (bool go, float[K] o) {
        u = Unsqueeze (i, zero)  m = Add (u, one)  k = Min (m, most)  s = Squeeze (m)  go = Less (s, n)
        o = Slice (x, zero, k) }>""",
    "scan": """s = Constant <value_int = 0> ()  d = Constant <value_int = 1> ()  r = Range (s, n, d)
      y = Scan <num_scan_inputs = 1, body = b (int64 i) => (float[K] o) {
        u = Unsqueeze (i, zero)  m = Add (u, one)  k = Min (m, most)  o = Slice (x, zero, k) }> (r)""",
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_changing_size_stop_the_run(kind: str) -> None:
    """Rows of one size, which the run decides, are stacked; another size in a later round was once stacked wrongly."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
    g (float[N] x, int64 n, int64[1] most) => (y) {{
      t = Constant <value = bool {{1}}> ()  zero = Constant <value_ints = [0]> ()  one = Constant <value_ints = [1]> ()
      {ROWS[kind]}
    }}""")
    m = rlx.compile(load(model.SerializeToString()), device="cpu", threads=1)
    x, three = np.arange(1, 6, dtype=np.float32), np.array(3)
    same(model.SerializeToString(), {"x": x, "n": three, "most": np.array([1])})
    np.testing.assert_array_equal(m.run({"x": x, "n": three, "most": np.array([1])})[0], np.ones((3, 1)))
    with pytest.raises(ExecutionError, match="its rounds give 'o' other sizes along axis 0"):
        m.run({"x": x, "n": three, "most": np.array([2])})
    np.testing.assert_array_equal(m.run({"x": x, "n": np.array(1), "most": np.array([2])})[0], np.ones((1, 1)))
    if kind != "by its condition":  # no round says the size: it is 0 then, as in onnxruntime, which can't scan nothing
        none = {"x": x, "n": np.array(0), "most": np.array([1])}
        assert m.run(none)[0].shape == (0, 0)
        if kind == "counted":
            same(model.SerializeToString(), none)


@pytest.mark.parametrize("first, last", [(1, 1000), (0, -2)])
def test_carries_that_shrink(first: int, last: int) -> None:
    """A loop that cuts its carry shorter each round has room enough in what it begins with."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
    g (float[N] x) => (a) {{
      t = Constant <value = bool {{1}}> ()  m = Constant <value_int = 100> ()  l = Constant <value_int = 2> ()
      f = Constant <value_ints = [{first}]> ()  e = Constant <value_ints = [{last}]> ()
      a = Loop (m, t, x) <body = b (int64 i, bool c, float[K] v) => (bool go, float[L] w) {{
        w = Slice (v, f, e)  s = Size (w)  go = Greater (s, l) }}>
    }}""").SerializeToString()
    for n in (3, 8, 3000 if last < 0 else 500):
        same(model, {"x": np.arange(n, dtype=np.float32)})


@pytest.mark.parametrize("opset", [8, 11])
@pytest.mark.parametrize("count", [-(1 << 63), -1, 3, 1 << 40, (1 << 63) - 1])
def test_a_hostile_count_of_scanned_inputs_is_refused(count: int, opset: int) -> None:
    """It was multiplied before it was compared with the inputs that there are."""
    a, b = (helper.make_tensor_value_info(name, 1, []) for name in "ab")
    body = helper.make_graph([helper.make_node("Identity", ["a"], ["b"])], "b", [a], [b])
    node = helper.make_node("Scan", ["", "x"] if opset == 8 else ["x"], ["y"], body=body, num_scan_inputs=count)
    x, y = (helper.make_tensor_value_info(name, 1, [2, 3]) for name in "xy")
    model = helper.make_model(
        helper.make_graph([node], "g", [x], [y]), opset_imports=[helper.make_opsetid("", opset)], ir_version=7
    )
    with pytest.raises(ShapeError, match=f"for {count} scanned inputs"):
        load(model.SerializeToString())
