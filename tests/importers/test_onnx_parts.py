"""Sizes of inputs that have one name in a file: one dim where the graph needs them to be equal, else each its own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import ExecutionError, OptionError, ShapeError
from rlx.importers.onnx import importer, load
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim, symbols

F32, I64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
SIZES = (2, 5, 11, 23, 47)  # no one is the sum, half or third of others


def _model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[Any, ...]],
    outputs: list[str],
    weights: dict[str, np.ndarray] | None = None,
    elems: dict[str, int] | None = None,
) -> bytes:
    made: bytes = helper.make_model(
        helper.make_graph(
            nodes,
            "g",
            [
                helper.make_tensor_value_info(name, (elems or {}).get(name, F32), shape)
                for name, shape in inputs.items()
            ],
            [helper.make_empty_tensor_value_info(name) for name in outputs],
            [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    ).SerializeToString()
    return made


def _node(op: str, inputs: str, outputs: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), **attributes)


class _Random:
    """A random graph on inputs [N, 3] and [N, N], every size of which has one name; values are [rows, 3]."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.nodes: list[onnx.NodeProto] = []
        self.names = (f"v{i}" for i in count())
        self.inputs: dict[str, tuple[Any, ...]] = {f"x{i}": ("N", 3) for i in range(int(rng.integers(2, 5)))}
        self.values = list(self.inputs)
        if rng.random() < 0.3:
            self.inputs["square"] = ("N", "N")
        self.weights = {"one": np.array([1]), "zero": np.array([0]), "three": np.array([3]), "axes": np.array([0])}
        self.weights |= {"w": rng.standard_normal((3, 3)).astype(np.float32), "flat": np.array([-1])}

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = next(self.names)
        self.nodes.append(helper.make_node(op, inputs, [name], **attributes))
        return name

    def pick(self) -> str:
        return str(self.rng.choice(self.values))

    def rows(self, x: str) -> str:
        """The number of rows of x, i64 [1], as exporters compute it."""
        return self.add("Gather", self.add("Shape", x), "zero", axis=0)

    def step(self) -> str:
        kinds: list[Callable[[], str]] = [
            lambda: self.add(str(self.rng.choice(["Relu", "Neg", "Sigmoid", "Softmax"])), self.pick()),
            lambda: self.add("MatMul", self.pick(), "w"),
            lambda: self.add("ReduceMean", self.pick(), axes=[0], keepdims=1),
            lambda: self.add(str(self.rng.choice(["Add", "Mul"])), self.pick(), self.pick()),
            lambda: self.add("Add", self.pick(), self.add("ReduceMean", self.pick(), axes=[0], keepdims=1)),
            lambda: self.add("Concat", self.pick(), self.pick(), axis=0),
            self.product,
            lambda: self.add("Reshape", self.pick(), self.add("Concat", self.rows(self.pick()), "three", axis=0)),
            lambda: self.add("Reshape", self.add("Reshape", self.pick(), "flat"), self.like()),
            lambda: self.add("Expand", self.pick(), self.add("Concat", self.rows(self.pick()), "three", axis=0)),
            lambda: self.add("MatMul", "square", self.pick()) if "square" in self.inputs else self.pick(),
        ]
        return kinds[int(self.rng.integers(len(kinds)))]()

    def product(self) -> str:
        """softmax(x y^T) z, whose rows are those of x."""
        scores = self.add("MatMul", self.pick(), self.add("Transpose", self.pick(), perm=[1, 0]))
        return self.add("MatMul", self.add("Softmax", scores), self.pick())

    def like(self) -> str:
        return self.add("Concat", "flat", "three", axis=0)

    def model(self) -> bytes:
        for _ in range(int(self.rng.integers(2, 7))):
            self.values.append(self.step())
        ends = list(dict.fromkeys(v for v in self.values if v not in self.inputs))
        ends = ends or [self.add("Relu", self.values[0])]
        return _model(self.nodes, self.inputs, ends, self.weights)


@pytest.mark.sample(25)
@pytest.mark.parametrize("seed", range(1000))
def test_a_random_graph_runs_where_its_nodes_allow_it(seed: int) -> None:
    """Sizes of one name that differ run exactly where ONNX's reference does, with its results; equal ones always do."""
    rng = np.random.default_rng(seed)
    made = _Random(rng)
    source = made.model()
    theirs = ReferenceEvaluator(onnx.load_from_string(source))
    sizes = iter([*rng.permutation(SIZES).tolist(), 7, 9])
    unequal = {name: [next(sizes) if s == "N" else s for s in shape] for name, shape in made.inputs.items()}
    equal = {name: [6 if s == "N" else s for s in shape] for name, shape in made.inputs.items()}
    for shapes in (equal, unequal):
        x = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        try:
            wanted = theirs.run(None, x)
        except (ValueError, TypeError):  # of shapes
            with pytest.raises((ShapeError, ExecutionError)):
                run_graph(load(source), x)
            continue
        graph = load(source)
        _close(list(run_graph(graph, x).values()), wanted)
        if seed % 10 == 0:
            _close(rlx.compile(graph, device="cpu").run(x), wanted)


def _close(got: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, 2e-4, 1e-4)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_an_expand_that_changes_nothing_is_still_checked(device: str) -> None:
    """x [M, 3] expanded to [N, 3] is x, but only where M = N: it becomes no node, and the run checks it."""
    nodes = [_node("Shape", "b", "s"), _node("Expand", "a s", "y")]
    source = _model(nodes, {"a": ("M", 3), "b": ("N", 3)}, ["y"])
    found = rlx.compile(load(source), device=device)
    a, b = np.ones((6, 3), np.float32), np.ones((4, 3), np.float32)
    assert found.run([a, a])[0].shape == (6, 3)
    with pytest.raises(ExecutionError, match=r"'Expand:y'.*M is 6 and N is 4"):
        found.run([a, b])


def _dims(graph: Graph) -> list[str]:
    return sorted({s.name for v in graph.inputs for size in v.shape for s in symbols(size)})


def _graph(nodes: list[onnx.NodeProto], inputs: dict[str, tuple[Any, ...]], **more: Any) -> Graph:
    return load(_model(nodes, inputs, [nodes[-1].output[0]], **more))


def test_names_of_parts() -> None:
    """The first keeps the name; others have the input's, with the axis where the input has the name twice."""
    nodes = [_node("Relu", x, f"{x}1") for x in "abc"] + [_node("Shape", "d"), _node("Add", "b1 c1", "z")]
    found = load(_model(nodes, {"a": ("N",), "b": ("N",), "c": ("N",), "d": ("N", "N")}, ["a1", "z", "y"]))
    assert [v.shape for v in found.inputs] == [
        (Dim("N"),),
        (Dim("N (b)"),),
        (Dim("N (b)"),),
        (Dim("N (d.0)"), Dim("N (d.1)")),
    ]
    other = load(
        _model([_node("Relu", "a", "z"), _node("Relu", "b")], {"a": ("N", "N (b)"), "b": ("N", 2)}, ["y", "z"])
    )
    assert _dims(other) == ["N", "N (b)", "N (b)'"]


def test_layers_that_one_mask_ties_have_one_length() -> None:
    """Caches of layers are not named together by any node: their lengths are equal as each fits the mask."""
    nodes, presents = [], []
    for i in range(3):
        nodes += [_node("Concat", f"past{i} x", f"now{i}", axis=0), _node("Add", f"now{i} mask", f"y{i}")]
        presents.append(f"y{i}")
    pasts = {f"past{i}": ("P", 2) for i in range(3)}
    graph = load(_model(nodes, {"x": ("S", 2), **pasts, "mask": ("T", 1)}, presents))
    assert _dims(graph) == ["P", "S", "T"]
    assert [(str(g.lhs), str(g.rhs)) for g in graph.guards] == [("P + S", "T")]
    alone = load(
        _model([n for n in nodes if n.op_type == "Concat"], {"x": ("S", 2), **pasts}, ["now0", "now1", "now2"])
    )
    assert _dims(alone) == ["P", "P (past1)", "P (past2)", "S"]


def test_positions_that_data_choose_keep_the_name_whole() -> None:
    """Positions that count along one input are looked up in another: no shape says so."""
    graph = _graph([_node("Gather", "b at")], {"a": ("N",), "b": ("N", 2), "at": (4,)}, elems={"at": I64})
    assert _dims(graph) == ["N"]
    graph = _graph([_node("Gather", "b at")], {"a": ("N",), "b": ("N", 2)}, weights={"at": np.array([0, 1])})
    assert _dims(graph) == ["N", "N (b)"]


def test_branches_keep_what_they_need_whole() -> None:
    """A sum in one branch, and a condition that compares two sizes: the graph is as with one name."""
    then = helper.make_graph([_node("Add", "a b", "t")], "then", [], [helper.make_empty_tensor_value_info("t")])
    other = helper.make_graph([_node("Relu", "a", "e")], "else", [], [helper.make_empty_tensor_value_info("e")])
    branch = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    inputs = {"a": ("N",), "b": ("N",), "c": ()}
    assert _dims(_graph([branch], inputs, elems={"c": BOOL})) == ["N"]
    compared = [
        _node("Shape", "a", "p"),
        _node("Shape", "b", "q"),
        _node("Equal", "p q", "r"),
        _node("Squeeze", "r", "c"),
    ]
    del inputs["c"]
    taken = helper.make_graph([_node("Neg", "a", "t")], "then", [], [helper.make_empty_tensor_value_info("t")])
    branch = helper.make_node("If", ["c"], ["y"], then_branch=taken, else_branch=other)
    found = _graph([*compared, branch], inputs)
    assert _dims(found) == ["N"]
    assert [n.op.op_name for n in found.nodes] == ["neg"]


def test_options_by_the_old_name_are_for_all_parts() -> None:
    source = _model([_node("Relu", "a", "z"), _node("Neg", "b")], {"a": ("N",), "b": ("N",)}, ["z", "y"])
    bounded = load(source, dims={"N": (1, 9), "N (b)": (2, 4)})
    assert [v.shape for v in bounded.inputs] == [(Dim("N", 1, 9),), (Dim("N (b)", 2, 4),)]
    assert [v.shape for v in load(source, dims={"N": 4}).inputs] == [(4,), (4,)]
    assert [v.shape for v in load(source, dims={"N": 3, "N (b)": 4}).inputs] == [(3,), (4,)]
    for wrong in ({"N (c)": 4}, {"N": 4, "N (c)": 4}):
        with pytest.raises(OptionError, match=r"unknown dim 'N \(c\)'"):
            load(source, dims=wrong)
    whole = _model([_node("Add", "a b")], {"a": ("N",), "b": ("N",)}, ["y"])
    with pytest.raises(OptionError, match=r"unknown dim 'N \(b\)'"):
        load(whole, dims={"N": 4, "N (b)": 4})
    graph = load(source)
    later = rlx.compile(graph, device="cpu", dims={"N": (1, 8)})
    assert [s.shape for s in later.inputs] == [(Dim("N", 1, 8),), (Dim("N (b)", 1, 8),)]
    small, large = (rlx.profile(graph, device="cpu", at={"N": n}) for n in (10, 1000))
    assert large.written_bytes == 100 * small.written_bytes
    buckets = rlx.Buckets(load(source, dims={"N": (1, 8)}), {"N": [4, 8]}, device="cpu")
    assert buckets.inputs[1].shape == (Dim("N", 1, 8),)  # a rung is a range of one size


def test_a_name_that_stands_once_takes_one_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files without a repeated name are imported once; those whose names are one at the first node, once and a bit."""
    walked: list[int] = []
    once = importer._imported

    def counted(*args: Any) -> Any:
        walked.append(0)
        return once(*args)

    monkeypatch.setattr(importer, "_imported", counted)
    load(_model([_node("Relu", "a")], {"a": ("N", 3)}, ["y"]))
    assert len(walked) == 1
    nodes = [_node("Add", "a b", "v0"), *(_node("Relu", f"v{i}", f"v{i + 1}") for i in range(50))]
    seen: list[str] = []
    handler = importer.Scope._node
    monkeypatch.setattr(importer.Scope, "_node", lambda scope, node: (seen.append(node.op_type), handler(scope, node)))
    load(_model(nodes, {"a": ("N",), "b": ("N",)}, ["v50"]))
    assert (len(walked), seen.count("Add"), seen.count("Relu")) == (3, 2, 50)


def test_a_file_with_very_many_places_keeps_its_names() -> None:
    """What is looked at is bounded: 400 inputs have a dim each, 600 one."""
    for count_, dims in ((400, 400), (600, 1)):
        nodes = [_node("Relu", f"x{i}", f"y{i}") for i in range(count_)]
        graph = load(_model(nodes, {f"x{i}": ("N",) for i in range(count_)}, [f"y{i}" for i in range(count_)]))
        assert len(graph.dims()) == dims
