"""ONNX's Gradient: by the named tensors or at other values, of other gradients, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import ModelFormatError, UnsupportedOp
from rlx.importers.onnx import load
from rlx.importers.onnx.mapping import TRAINING

A, B = np.float32([1.0, -2.0, 3.0]), np.float32([0.5, 4.0, -1.0])


def node(inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    return helper.make_node("Gradient", inputs, outputs, domain=TRAINING, name="slope", **attributes)


def model(nodes: list[Any], outputs: list[str], kinds: tuple[int, ...] = (TensorProto.FLOAT,) * 2) -> bytes:
    """A graph of a and b, [n] each, and what else nodes make of them; y = sum(a a b) among it."""
    first = [
        helper.make_node("Mul", ["a", "a"], ["squares"]),
        helper.make_node("Mul", ["squares", "b"], ["products"]),
        helper.make_node("ReduceSum", ["products"], ["y"], keepdims=0),
    ]
    inputs = [helper.make_tensor_value_info(name, kind, ["n"]) for name, kind in zip("ab", kinds, strict=True)]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph([*first, *nodes], "model", inputs, results)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(TRAINING, 1)]
    return helper.make_model(graph, opset_imports=opsets).SerializeToString()  # type: ignore[no-any-return]


def run(nodes: list[Any], outputs: list[str], device: str = "cpu") -> list[Any]:
    with rlx.load(model(nodes, outputs), device=device) as loaded:
        return list(loaded.run({"a": A, "b": B}))


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_by_inputs_and_by_what_lies_between(device: str) -> None:
    """Of a sum, and of a tensor of several elements, whose sum counts; y need not be an output."""
    nodes = [
        node(["a", "b"], ["da", "db"], xs=["a", "b"], y="y"),
        helper.make_node("Gradient", ["squares", "b"], ["ds"], domain=TRAINING, xs=["squares"], zs=["b"], y="products"),
    ]
    da, db, ds = run(nodes, ["da", "db", "ds"], device)
    np.testing.assert_allclose(da, 2 * A * B)
    np.testing.assert_allclose(db, A * A)
    np.testing.assert_allclose(ds, B)


def test_gradients_of_gradients_and_of_what_does_not_depend() -> None:
    """The second derivative of a Gradient's output; zeros where nothing depends; outputs that are left out."""
    nodes = [
        node(["a", "b"], ["da"], xs=["a", "b"], y="y"),
        helper.make_node("Gradient", ["a", "b"], ["daa", "dab"], domain=TRAINING, xs=["a", "b"], y="da"),
        helper.make_node("Gradient", ["a", "b"], ["", "none"], domain=TRAINING, xs=["a", "b"], y="squares"),
    ]
    daa, dab, none = run(nodes, ["daa", "dab", "none"])
    np.testing.assert_allclose(daa, 2 * B)
    np.testing.assert_allclose(dab, 2 * A)
    np.testing.assert_array_equal(none, np.zeros(3))


def test_at_other_values_than_those_of_the_named_tensors() -> None:
    """The inputs of the node take the place of the tensors that it names, the same one for two as well."""
    nodes = [
        helper.make_node("Neg", ["b"], ["c"]),
        node(["c", "a"], ["dc", "dd"], xs=["a", "b"], y="y"),
        helper.make_node("Gradient", ["c", "c"], ["de"], domain=TRAINING, xs=["a"], zs=["b"], y="y"),
    ]
    dc, dd, de = run(nodes, ["dc", "dd", "de"])
    np.testing.assert_allclose(dc, 2 * -B * A)
    np.testing.assert_allclose(dd, B * B)
    np.testing.assert_allclose(de, 2 * B * B)


@pytest.mark.parametrize(
    "made, message",
    [
        (node(["a"], ["da"], xs=["a", "b"], y="y"), "1 inputs for the 2 tensors that xs and zs name"),
        (node(["y"], ["da"], xs=["a"], y="y"), r"'a' is f32\[n\], what it is to be differentiated at f32\[\]"),
        (node(["a"], ["da", "db"], xs=["a"], y="y"), "2 outputs for the 1 tensors that xs names"),
    ],
)
def test_what_does_not_fit_is_refused(made: Any, message: str) -> None:
    with pytest.raises(UnsupportedOp, match=message):
        run([made], ["da"])


def test_in_a_branch() -> None:
    """Of what is computed there; what is made outside of the branch is refused, not taken for a constant."""

    def branches(y: str, by: str = "a") -> list[Any]:
        result = [helper.make_tensor_value_info("r", TensorProto.FLOAT, None)]
        made = [helper.make_node("Mul", ["a", "c"], ["inside"]), node([by], ["r"], xs=[by], y=y)]
        then = helper.make_graph(made, "then", [], result)
        other = helper.make_graph([helper.make_node("Neg", ["a"], ["r"])], "else", [], result)
        condition = [helper.make_node("Cast", ["y"], ["given"], to=TensorProto.BOOL)]
        doubled = helper.make_node("Add", ["b", "b"], ["c"])
        return [*condition, doubled, helper.make_node("If", ["given"], ["da"], then_branch=then, else_branch=other)]

    message = "y, 'products', is made outside of the subgraph in which the node stands: put it there"
    with pytest.raises(UnsupportedOp, match=message):
        run(branches("products"), ["da"])
    with pytest.raises(UnsupportedOp, match="made outside of the subgraph"):
        run(branches("inside", "b"), ["da"])
    np.testing.assert_array_equal(run(branches("a"), ["da"])[0], np.ones(3))


def test_integers_and_names_that_are_not_there() -> None:
    """Each with the name in it."""
    whole = (TensorProto.INT64,) * 2
    with pytest.raises(UnsupportedOp, match=r"xs names 'a', which is i64\[n\]: only floats have a gradient"):
        rlx.load(model([node(["a"], ["da"], xs=["a"], y="y")], ["da"], whole))
    with pytest.raises(ModelFormatError, match="there is no tensor 'z'"):
        rlx.load(model([node(["a"], ["da"], xs=["a"], y="z")], ["da"]))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("op", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_losses(op: str, weighted: bool, reduction: str) -> None:
    """By the scores [N, C, d], with weights of classes and a class that is left out, against differences in f64."""
    rng = np.random.default_rng(3)
    scores, targets = rng.standard_normal((3, 4, 2)), np.array([[0, 3], [2, 2], [1, 0]])
    attributes = {"reduction": reduction, "ignore_index": 2}
    nodes = [
        helper.make_node(op, ["scores", "targets", *["weights"] * weighted], ["loss"], **attributes),
        helper.make_node("Sin", ["loss"], ["each"]),
        helper.make_node("ReduceSum", ["each"], ["total"], keepdims=0),
    ]
    inputs = [helper.make_tensor_value_info("scores", TensorProto.DOUBLE, ["n", 4, 2])]
    stored = [numpy_helper.from_array(targets, "targets"), numpy_helper.from_array(rng.random(4) + 0.5, "weights")]
    graph = helper.make_graph(nodes, "loss", inputs, [helper.make_tensor_value_info("total", 11, [])], stored)
    loss = load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    slope = rlx.compile(rlx.grad(loss, wrt="scores"), device="cpu").run({"scores": scores})[0]
    for i in np.ndindex(scores.shape):
        step = np.zeros_like(scores)
        step[i] = 1e-6
        ends = [float(run_graph(loss, {"scores": scores + sign * step})["total"]) for sign in (1, -1)]
        assert abs(slope[i] - (ends[0] - ends[1]) / 2e-6) < 1e-7
