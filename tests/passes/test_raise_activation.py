"""Activation functions are recognised by their formulas, in whatever order their arithmetic was written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import pytest
from pass_checks import N, checked, ops, sources

import rlx.ops as o
from rlx.backends.reference import run_graph
from rlx.importers.onnx import load
from rlx.ir.graph import Graph, Value
from rlx.passes import run_passes
from rlx.passes.dce import dce
from rlx.passes.raising.raise_activation import raise_activation

ROOT2 = math.sqrt(2)
TANH = math.sqrt(2 / math.pi)


def cube(x: Value) -> Value:
    return x * (x * x)


FORMS: list[tuple[str, Callable[[Value], Value], str, dict[str, Any]]] = [
    ("x * (0.5 * (1 + erf))", lambda x: x * (0.5 * (o.erf(x / ROOT2) + 1.0)), "gelu", {"approximate": "none"}),
    ("(x * 0.5) * (1 + erf)", lambda x: (x * 0.5) * (1.0 + o.erf(x * (1 / ROOT2))), "gelu", {}),
    ("(x * (1 + erf)) * 0.5", lambda x: x * (o.erf(x / ROOT2) + 1.0) * 0.5, "gelu", {}),
    ("x * (1 + erf) / 2", lambda x: (1.0 + o.erf(x / ROOT2)) * x / 2.0, "gelu", {}),
    ("tanh", lambda x: 0.5 * x * (1.0 + o.tanh(TANH * (x + 0.044715 * cube(x)))), "gelu", {"approximate": "tanh"}),
    ("tanh, pow", lambda x: x * (0.5 * (o.tanh((o.pow(x, 3.0) * 0.044715 + x) * TANH) + 1.0)), "gelu", {}),
    ("tanh, factored", lambda x: 0.5 * x * (1.0 + o.tanh(x * 0.79788456 * (1.0 + 0.044715 * x * x))), "gelu", {}),
    ("x * sigmoid", lambda x: x * o.sigmoid(x), "silu", {}),
    ("x * sigmoid(1 * x)", lambda x: o.sigmoid(x * 1.0) * x, "silu", {}),
    ("x / (1 + exp(-x))", lambda x: x / (1.0 + o.exp(-x)), "silu", {}),
    ("1 / (1 + exp(-x))", lambda x: 1.0 / (1.0 + o.exp(-x)), "sigmoid", {}),
    ("x * clip(x + 3) / 6", lambda x: x * o.clip(x + 3.0, 0.0, 6.0) / 6.0, "hard_swish", {}),
    ("x * (clip(x + 3) / 6)", lambda x: x * (o.clip(x + 3.0, 0.0, 6.0) / 6.0), "hard_swish", {}),
    ("x * hard sigmoid", lambda x: o.hard_sigmoid(x, alpha=0.1666666716337204, beta=0.5) * x, "hard_swish", {}),
    ("x * min(relu(x + 3), 6) / 6", lambda x: x * o.minimum(o.relu(x + 3.0), 6.0) * (1 / 6), "hard_swish", {}),
    ("clip(x + 3) / 6", lambda x: o.clip(x + 3.0, 0.0, 6.0) / 6.0, "hard_sigmoid", {"beta": 0.5}),
    ("clip(0.2 x + 0.4)", lambda x: o.clip(x * 0.2 + 0.4, 0.0, 1.0), "hard_sigmoid", {"alpha": 0.2, "beta": 0.4}),
    ("x * tanh(softplus)", lambda x: x * o.tanh(o.softplus(x)), "mish", {}),
    ("x * tanh(log(1 + exp))", lambda x: x * o.tanh(o.log(o.exp(x) + 1.0)), "mish", {}),
    ("log(1 + exp)", lambda x: o.log(1.0 + o.exp(x)), "softplus", {}),
    ("x / (1 + |x|)", lambda x: x / (1.0 + o.abs(x)), "softsign", {}),
    ("max(x, x * 0.2)", lambda x: o.maximum(x, x * 0.2), "leaky_relu", {"alpha": 0.2}),
    ("where(x > 0)", lambda x: o.where(o.greater_equal(x, 0.0), x, x * 0.1), "leaky_relu", {"alpha": 0.1}),
    ("where(x < 0)", lambda x: o.where(o.less(x, 0.0), x * -0.1, x), "leaky_relu", {"alpha": -0.1}),
    ("x * (1 / (1 + exp(-x)))", lambda x: x * (1.0 / (o.exp(-x) + 1.0)), "silu", {}),
    ("x * min(max(x + 3, 0), 6) / 6", lambda x: x * o.minimum(o.maximum(x + 3.0, 0.0), 6.0) / 6.0, "hard_swish", {}),
    ("(x / 6) * clip(x + 3)", lambda x: (x / 6.0) * o.clip(3.0 + x, 0.0, 6.0), "hard_swish", {}),
    ("clip(x / 6 + 1/2)", lambda x: o.clip(x / 6.0 + 0.5, 0.0, 1.0), "hard_sigmoid", {"alpha": 1 / 6, "beta": 0.5}),
    ("elu of ONNX", lambda x: o.where(o.less(x, 0.0), 1.5 * (o.exp(x) - 1.0), x), "elu", {"alpha": 1.5}),
    ("elu", lambda x: o.where(o.greater_equal(x, 0.0), x, (o.exp(o.minimum(x, 0.0)) - 1.0) * 0.5), "elu", {}),
]


@pytest.mark.parametrize("form, name, attributes", [f[1:] for f in FORMS], ids=[f[0] for f in FORMS])
def test_form(form: Callable[[Value], Value], name: str, attributes: dict[str, Any]) -> None:
    g = Graph()
    g.output(form(g.input("x", (N, 8)) + g.input("bias", (8,))), "y")
    after = checked(g, raise_activation, dce)
    assert ops(after) == ["add", name]
    found = after.nodes[1].op.attributes()
    assert {key: found[key] for key in attributes} == pytest.approx(attributes, abs=1e-6)
    assert sources(after) == sources(g)


@pytest.mark.parametrize("form, name", [f[1:3] for f in FORMS], ids=[f[0] for f in FORMS])
def test_form_survives_the_other_passes(form: Callable[[Value], Value], name: str) -> None:
    """Also where numbers stand before and after the function, which chains of scalars could be merged with."""
    g = Graph()
    x = g.input("x", (N, 8)) * 1.5
    g.output(form(x) * 0.7 + 0.1, "y")
    assert [op for op in ops(checked(g, run_passes)) if op not in ("mul", "add")] == [name]


OTHERS: list[tuple[str, Callable[[Value], Value]]] = [
    ("quick gelu", lambda x: x * o.sigmoid(x * 1.702)),
    ("elu that is 0 of -0", lambda x: o.where(o.greater(x, 0.0), x, o.exp(o.minimum(x, 0.0)) - 1.0)),
    ("relu + elu", lambda x: o.relu(x) + (o.exp(o.minimum(x, 0.0)) - 1.0) * 0.5),
    ("gelu with another root", lambda x: x * (0.5 * (o.erf(x / 1.4) + 1.0))),
    ("gelu of another value", lambda x: x * (0.5 * (o.erf((x + 1.0) / ROOT2) + 1.0))),
    ("tanh with another cube", lambda x: 0.5 * x * (1.0 + o.tanh(TANH * (x + 0.0447 * cube(x))))),
    ("hard swish with another limit", lambda x: x * o.clip(x + 3.0, 0.0, 5.0) / 6.0),
    ("positive part, 0 for NaN", lambda x: o.where(o.greater(x, 0.0), x, 0.0)),
    ("identity", lambda x: o.maximum(x, x * 1.0)),
    ("square", lambda x: x * x),
    ("positive part and a little", lambda x: o.relu(x) + 1e-6),
    ("positive part, at least a little", lambda x: o.maximum(x, 1e-7) * 1.0),
    ("sigmoid for a logarithm", lambda x: o.clip(o.sigmoid(x), 1e-7, 1 - 1e-7)),
    ("relu with a limit", lambda x: o.minimum(o.relu(x), 65504.0)),
    ("relu with a limit beyond the values sampled", lambda x: o.minimum(o.relu(x), 1e4) * 1.0),
    ("limited sign", lambda x: o.clip(o.sign(x), 0.0, 1.0)),
    ("a ramp far away", lambda x: o.clip((x - 32768.0) / 32768.0, 0.0, 1.0)),
    ("a ramp that cancels", lambda x: o.clip(x - 3e5, 0.0, 3.0) / 3.0),
    ("what is above a limit", lambda x: x - o.minimum(x, 2e4)),
    ("a limit inside atanh", lambda x: o.atanh(o.clip(o.tanh(x), -0.999999, 0.999999))),
    ("a threshold near 0", lambda x: o.where(o.greater(x, 1e-3), x, x * 0.1)),
    ("a slope that turns the sign of 0", lambda x: o.where(o.greater(x, 0.0), x, x * -0.1)),
    ("silu and nothing", lambda x: x * o.sigmoid(x + x * 0.0)),
    ("silu, rounded", lambda x: ((x + 1e6) - 1e6) * o.sigmoid(x)),
    ("silu that vanishes between", lambda x: (x * 1e-30 * 1e30) * o.sigmoid(x)),
    ("silu with x / x", lambda x: (x * x / x) * o.sigmoid(x)),
    ("mish with a limit", lambda x: x * o.tanh(o.minimum(o.softplus(x), 2e4))),
    ("gelu with a limit", lambda x: x * (0.5 * (o.minimum(o.erf(x / ROOT2), 0.99999) + 1.0))),
    ("infinite numbers", lambda x: o.clip(x / float("inf") - float("inf"), 0.0, 1.0)),
    ("sigmoid for a logarithm, by where", lambda x: o.where(o.less(o.sigmoid(x), 1e-7), 1e-7, o.sigmoid(x))),
]


@pytest.mark.parametrize("form", [f[1] for f in OTHERS], ids=[f[0] for f in OTHERS])
def test_other_functions_stay(form: Callable[[Value], Value]) -> None:
    g = Graph()
    g.output(form(g.input("x", (N, 8))), "y")
    after = checked(g, raise_activation)
    assert ops(after) == ops(g)


def test_function_of_two_values_stays() -> None:
    g = Graph()
    x, y = g.input("x", (N, 8)), g.input("y", (N, 8))
    g.output(x * o.sigmoid(y), "z")
    assert ops(checked(g, raise_activation)) == ["sigmoid", "mul"]


def test_inner_values_that_others_read_stay() -> None:
    g = Graph()
    x = g.input("x", (N, 8))
    s = o.sigmoid(x)
    g.output(x * s, "y")
    g.output(s, "gate")
    assert ops(checked(g, raise_activation, dce)) == ["sigmoid", "silu"]


ULP = {"f32": 2.0**-23, "f16": 2.0**-10, "f64": 2.0**-52}


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16"])
def test_numbers_are_those_of_the_function_but_for_two_units_in_the_last_place(dtype: str) -> None:
    def gelu(root: float, half: float = 0.5) -> list[str]:
        g = Graph()
        x = g.input("x", (4,), dtype)
        g.output(x * (half * (o.erf(x / root) + 1.0)), "y")
        return ops(checked(g, raise_activation, dce))

    assert gelu(ROOT2) == gelu(ROOT2 * (1 + ULP[dtype])) == ["gelu"]
    assert gelu(ROOT2 * (1 + 4 * ULP[dtype])) == ["div", "erf", "add", "mul", "mul"]
    assert gelu(ROOT2, 0.5 + ULP[dtype] / 2) == ["div", "erf", "add", "mul", "mul"], "every type has a half"


def test_overflow_of_a_step_is_not_that_of_the_function() -> None:
    """In f16 exp(x) is infinite from 11.1 on, and x * 6 from 10917 on; the functions are not."""
    points = np.array([12, 100, 11000, 60000, np.inf], np.float16)
    for form in (lambda x: o.log(o.exp(x) + 1.0), lambda x: x * o.clip(x + 3.0, 0.0, 6.0) / 6.0):
        g = Graph()
        g.output(form(g.input("x", (5,), "f16")), "y")
        assert run_graph(g, {"x": points})["y"][3] == np.inf
        np.testing.assert_array_equal(run_graph(raise_activation(g), {"x": points})["y"], points)


BODIES: list[tuple[str, dict[str, float | str], str]] = [
    ("Relu", {}, "relu"),
    ("LeakyRelu", {"alpha": 0.02}, "leaky_relu"),
    ("Elu", {"alpha": 1.25}, "elu"),
    ("HardSigmoid", {"alpha": 0.2, "beta": 0.5}, "hard_sigmoid"),
    ("HardSwish", {}, "hard_swish"),
    ("Softplus", {}, "softplus"),
    ("Softsign", {}, "softsign"),
    ("Mish", {}, "mish"),
    ("Swish", {"alpha": 1.0}, "silu"),
    ("Gelu", {"approximate": "none"}, "gelu"),
    ("Gelu", {"approximate": "tanh"}, "gelu"),
]


@pytest.mark.parametrize("element", [onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16], ids=["f32", "f16"])
@pytest.mark.parametrize("op_type, attributes, name", BODIES)
def test_function_bodies_of_onnx(op_type: str, attributes: dict[str, float | str], name: str, element: int) -> None:
    """What ONNX says that an op is, written out, becomes the op again."""
    make = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node(op_type, ["x"], ["y"], **attributes)
    graph = onnx.helper.make_graph([node], "one", [make("x", element, [8])], [make("y", element, [8])])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 24)], ir_version=10)
    body = onnx.inliner.inline_selected_functions(model, [("", op_type)], inline_schema_functions=True)
    assert len(body.graph.node) > 1
    assert ops(checked(load(body.SerializeToString()), run_passes)) == [name]
