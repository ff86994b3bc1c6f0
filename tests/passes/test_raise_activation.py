"""Activation functions are recognised by their values, in whatever order their arithmetic was written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from pass_checks import N, checked, ops, sources

import rlx.ops as o
from rlx.ir.graph import Graph, Value
from rlx.passes import run_passes
from rlx.passes.dce import dce
from rlx.passes.raise_activation import raise_activation

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
    ("elu", lambda x: o.where(o.greater(x, 0.0), x, (o.exp(o.minimum(x, 0.0)) - 1.0) * 0.5), "elu", {"alpha": 0.5}),
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


def test_doubles_need_exact_constants() -> None:
    def gelu(root: float) -> list[str]:
        g = Graph()
        x = g.input("x", (4,), "f64")
        g.output(x * (0.5 * (o.erf(x / root) + 1.0)), "y")
        return ops(checked(g, raise_activation, dce))

    assert gelu(ROOT2) == ["gelu"]
    assert gelu(1.41421354) == ["div", "erf", "add", "mul", "mul"]
