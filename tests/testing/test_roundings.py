"""What rounding explains in models that round within, and what it doesn't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.ir.graph import Graph, Output, Value
from rlx.ops.elementwise import Cast, Equal, Floor, NotEqual, Round, Sigmoid
from rlx.passes.rewrite import copy_leaves
from rlx.testing import roundings
from rlx.testing.nodewise import compare_nodes, compare_outputs
from rlx.testing.roundings import ROUNDING, compare_between_roundings

QUARTERS = np.arange(-8, 9, dtype=np.float32) / 4
STEPS: dict[str, Callable[[Value], Value]] = {  # each has a step where its operand is 0.5
    "round": lambda x: rlx.round(x + 0.0),
    "floor": lambda x: rlx.floor(x + 0.5),
    "ceil": lambda x: rlx.ceil(x - 0.5),
    "cast": lambda x: rlx.cast(rlx.cast(x * 2, to="i32"), to="f32"),
    "sign": lambda x: rlx.sign(x - 0.5),
    "greater_equal": lambda x: rlx.where(x >= 0.5, x, -x),
    "greater": lambda x: rlx.where(x > 0.5, x, -x),
    "less_equal": lambda x: rlx.where(x <= 0.5, x, -x),
    "less": lambda x: rlx.where(x < 0.5, x, -x),
    "quantize": lambda x: rlx.cast(rlx.ops.quantize(x, x.graph.constant(np.float32(1)), to="i8"), to="f32"),
}


def stepped(step: str) -> Graph:
    """An op that makes steps between a sigmoid and what magnifies the difference of a step."""
    g = rlx.Graph("steps")
    x = g.input("x", (17,))
    g.output(rlx.exp(STEPS[step](rlx.sigmoid(x)) * 3), name="y")
    return g


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("off", [-1e-6, 1e-6])
def test_a_step_taken_to_the_other_side_is_rounding(step: str, off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that every node is allowed, at an operand beside a step, are explained."""
    assert step in ROUNDING
    graph = stepped(step)
    exact = Sigmoid.reference
    monkeypatch.setattr(Sigmoid, "reference", lambda self, x: exact(self, x) * np.float32(1 + off))
    given = {"x": QUARTERS}
    assert all(c.ok for c in compare_nodes(graph, given, "cpu"))
    found = compare_between_roundings(graph, given, "cpu")
    assert len(found) >= 2
    assert all(c.ok for c in found)


@pytest.mark.parametrize("step", STEPS)
def test_the_outputs_are_then_far_off(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases above are some: a part in a million more or less makes an output another one."""
    model = rlx.compile(stepped(step), device="cpu")
    exact = Sigmoid.reference
    agree = []
    for off in (-1e-6, 1e-6):
        monkeypatch.setattr(Sigmoid, "reference", lambda self, x, off=off: exact(self, x) * np.float32(1 + off))
        agree.append(all(c.ok for c in compare_outputs(model, {"x": QUARTERS})))
    assert not all(agree)


def test_a_fault_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device rounds down instead, values far from a step differ, and the rounding is named."""
    graph = stepped("round")
    compile = roundings.compile

    def miscompile(g: Graph, **options: Any) -> Any:
        new, values = copy_leaves(g)
        for node in g.nodes:
            op = Floor() if isinstance(node.op, Round) else node.op
            values.update(zip(node.outputs, new.add(op, *(values[v] for v in node.inputs)), strict=True))
        new.outputs = [Output(o.name, values[o.value]) for o in g.outputs]
        return compile(new, **options)

    monkeypatch.setattr(roundings, "compile", miscompile)
    bad = [c for c in compare_between_roundings(graph, {"x": QUARTERS}, "cpu") if not c.ok]
    assert [c.op for c in bad] == ["round"]
    assert "beyond what a rounding explains" in bad[0].note


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("op", [Equal(), NotEqual(), Cast("bool")], ids=lambda op: op.op_name)
def test_a_single_point_that_differs_from_both_its_sides(op: Any, dtype: str) -> None:
    """Elements that are equal, and some that differ, agree although those a little less and more give the same."""
    g = rlx.Graph("points")
    x, other = g.input("x", (5,), dtype), g.input("other", (3, 1), dtype)
    g.output(g.add(op, *((x, other) if op.op_name != "cast" else (x,)))[0], name="y")
    given = {"x": np.array([0, 0.5, -np.inf, np.nan, 3]), "other": np.array([[0.5], [-np.inf], [0]])}
    found = compare_between_roundings(g, {k: a.astype(x.dtype.numpy) for k, a in given.items()}, "cpu")
    assert [c.op for c in found] == [op.op_name, ""]
    assert all(c.ok for c in found)


def test_infinities_are_rounded_to_themselves() -> None:
    g = rlx.Graph("infinite")
    x = g.input("x", (4,))
    g.output(rlx.floor(x), name="y")
    found = compare_between_roundings(g, {"x": np.array([np.inf, -np.inf, 1, np.nan], "f4")}, "cpu")
    assert [c.op for c in found] == ["floor", ""]
    assert all(c.ok for c in found)


def test_stretches_start_from_what_the_reference_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong stretch is found alone: what follows its rounding starts anew."""
    g = rlx.Graph("two")
    x = g.input("x", (17,))
    g.output(rlx.exp(rlx.round(rlx.sigmoid(rlx.floor(x * 1.1)) * 3)), name="y")
    exact = Sigmoid.reference
    monkeypatch.setattr(Sigmoid, "reference", lambda self, x: exact(self, x) + np.float32(0.2))
    found = compare_between_roundings(g, {"x": QUARTERS}, "cpu")
    assert [c.op or c.name for c in found] == ["floor", "round", "y"]
    assert [c.ok for c in found] == [True, False, True]


def test_nothing_rounds() -> None:
    """Casts of integers and what constants give make no step of a float that a run computes."""
    g = rlx.Graph("smooth")
    n, x = g.input("n", (4,), "i64"), g.input("x", (4,))
    scale = rlx.round(g.constant(np.float32(2.6)))
    g.output(rlx.tanh(x) * scale + rlx.cast(n, to="f32"), name="y")
    assert compare_between_roundings(g, {"n": np.arange(4), "x": QUARTERS[:4]}, "cpu") == []


@pytest.mark.parametrize("step", STEPS)
def test_roundings_far_from_a_step_explain_nothing(step: str) -> None:
    """A device's outputs then differ for another reason, be the stretches right one by one."""
    assert compare_between_roundings(stepped(step), {"x": QUARTERS + np.float32(1 / 8)}, "cpu") == []


def test_dims_and_rounded_outputs() -> None:
    """Of a graph with dims, where what is rounded is an output itself, and NaN among it."""
    g = rlx.Graph("dims")
    x = g.input("x", (rlx.Dim("n", 1, 100), 3))
    level = rlx.round(rlx.sigmoid(x) * 10)
    g.output(level, name="level")
    g.output(level * x, name="y")
    rows = np.random.default_rng(0).standard_normal((7, 3), dtype=np.float32)
    rows[2, 1] = np.nan
    found = compare_between_roundings(g, {"x": rows}, "cpu")
    assert [c.op or c.name for c in found] == ["round", "level", "y"]
    assert all(c.ok for c in found)


def test_dynamic_quantisation_rounds_in_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements beside a step of 8 bits go to the other side, which explains an output; a fault is not explained."""
    g = rlx.Graph("dynamic")
    x = g.input("x", (101,))
    q, scale, _ = rlx.ops.dynamic_quantize_linear(rlx.sigmoid(x))
    g.output(rlx.exp(rlx.cast(q, to="f32") * scale * 90), name="y")
    beside = (np.arange(100) + 0.5) / 255
    given = {"x": np.append(np.log(beside / (1 - beside)), 40).astype(np.float32)}
    exact = Sigmoid.reference
    model = rlx.compile(g, device="cpu")
    agree = []
    for off in (-1e-6, 1e-6):

        def shifted(self: Sigmoid, x: Any, off: float = off) -> Any:
            made = exact(self, x)
            return np.where(made < 0.9, made * np.float32(1 + off), made)  # the range stays

        monkeypatch.setattr(Sigmoid, "reference", shifted)
        agree.append(all(c.ok for c in compare_outputs(model, given)))
        found = compare_between_roundings(g, given, "cpu")
        assert {c.op for c in found} >= {"quantize", "round", ""}
        assert all(c.ok for c in found)
    assert not all(agree)
    monkeypatch.setattr(Sigmoid, "reference", lambda self, x: exact(self, x) * np.float32(0.99))
    assert not all(c.ok for c in compare_between_roundings(g, given, "cpu"))
