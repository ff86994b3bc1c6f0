"""The search for the node at which a device departs from the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.ir.graph import Graph, Output
from rlx.ops.activation import Relu
from rlx.ops.elementwise import Sigmoid, Tanh
from rlx.testing import nodewise
from rlx.testing.nodewise import allowed_for, compare, compare_nodes, compare_outputs, first_bad_value
from rlx.testing.oracle import BY_DTYPE, Tolerance, tolerance


def chain() -> Graph:
    """tanh, matmul, relu, sigmoid, add over f32[n, 8]."""
    g = rlx.Graph("chain")
    x = g.input("x", (rlx.Dim("n", 1, 16), 8))
    w = g.param("w", data=np.random.default_rng(0).standard_normal((8, 8), dtype=np.float32))
    hidden = rlx.relu(rlx.tanh(x) @ w)
    g.output(rlx.sigmoid(hidden) + x, name="y")
    return g


def some_inputs() -> dict[str, Any]:
    return {"x": np.random.default_rng(1).standard_normal((3, 8), dtype=np.float32)}


def test_the_documented_tolerances_are_those_of_the_code() -> None:
    """The table in docs/debugging.md, row by row."""
    page = (Path(__file__).parents[2] / "docs" / "debugging.md").read_text()
    for name in BY_DTYPE:
        one, outputs = tolerance(name, "exp"), allowed_for(name, None, {})
        numbers = " | ".join(f"{n:.3g}" for n in (one.relative, one.absolute, outputs.relative, outputs.absolute))
        assert f"| {name} | {numbers} |" in page


def test_all_nodes_agree() -> None:
    """On a sound device every node agrees, each is compared once, and progress ends at their number."""
    counts: list[int] = []
    found = compare_nodes(chain(), some_inputs(), "cpu", done=counts.append)
    assert [c.op for c in found] == ["tanh", "matmul", "relu", "sigmoid", "add"]
    assert all(c.ok for c in found)
    assert counts[-1] == 5
    assert all(c.ok for c in compare_outputs(rlx.compile(chain(), device="cpu"), some_inputs()))


def test_a_wrong_op_is_found_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes start from the reference's values: only the wrong op differs, not what follows; batches change nothing."""
    monkeypatch.setattr(Relu, "reference", lambda self, x: np.maximum(x, np.float32(0.001)))
    for most in (1, 2, 100):
        monkeypatch.setattr(nodewise, "MOST_NODES", most)
        assert [c.op for c in compare_nodes(chain(), some_inputs(), "cpu") if not c.ok] == ["relu"]


def test_a_region_is_a_chain_of_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a branch or a loop computes may be off by as much as a chain of ops may, not as a single one."""
    x = np.linspace(0.1, 1, 8, dtype=np.float32)
    loop = rlx.jit(lambda x: rlx.fori_loop(0, 3, lambda i, c: np.tanh(c), x), device="cpu").lower(x)
    branch = rlx.jit(lambda x: rlx.cond(x.sum() > 0, lambda: np.tanh(x), lambda: -x), device="cpu").lower(x)
    alone = rlx.jit(lambda x: -np.tanh(x), device="cpu").lower(x)
    exact = Tanh.reference
    monkeypatch.setattr(Tanh, "reference", lambda self, x: exact(self, x) * np.float32(1 + 3e-5))
    assert [c.op for c in compare_nodes(alone, {"x": x}, "cpu") if not c.ok] == ["tanh"]
    for graph in (loop, branch):
        assert any(node.regions for node in graph.nodes)
        assert all(c.ok for c in compare_nodes(graph, {"x": x}, "cpu"))


def test_a_fault_of_fusion_is_found_by_halving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nodes are right by themselves and wrong together, the first value that differs in the whole is named."""
    graph = chain()
    compile = nodewise.compile

    def miscompile(g: Graph, **options: Any) -> Any:
        """Takes tanh for sigmoid in graphs with more than two nodes, as a bug of a pass might."""
        if len(g.nodes) <= 2:
            return compile(g, **options)
        new, values = nodewise.copy_leaves(g)
        for node in g.nodes:
            op = Tanh() if isinstance(node.op, Sigmoid) else node.op
            made = new.add(op, *(values[v] for v in node.inputs))
            values.update(zip(node.outputs, made, strict=True))
        new.outputs = [Output(o.name, values[o.value]) for o in g.outputs]
        return compile(new, **options)

    monkeypatch.setattr(nodewise, "compile", miscompile)
    found = first_bad_value(graph, some_inputs(), "cpu")
    assert found is not None
    assert found.op == "sigmoid"
    monkeypatch.setattr(nodewise, "compile", compile)
    assert first_bad_value(graph, some_inputs(), "cpu") is None


@pytest.mark.parametrize(
    "got, expected, ok",
    [
        ([1.0, 2.0], [1.0, 2.0 + 1e-7], True),
        ([1.0, 2.0], [1.0, 2.1], False),
        ([np.nan, np.inf], [np.nan, np.inf], True),
        ([np.nan, 1.0], [1.0, 1.0], False),
        ([np.inf, 1.0], [-np.inf, 1.0], False),
        ([1.0, 1.0], [1.0, np.inf], False),
    ],
)
def test_compare_floats(got: list[float], expected: list[float], ok: bool) -> None:
    """Rounding is allowed, NaN and infinities have to match."""
    a, b = np.array(got, np.float32), np.array(expected, np.float32)
    assert compare("v", "op", a, b, Tolerance(1e-6, 1e-6), 1.0).ok is ok


def test_compare_whole_numbers_and_types() -> None:
    """Integers are exact; another shape or dtype is a difference."""
    ints = np.array([1, 2])
    assert compare("v", "op", ints, ints, Tolerance(0, 0), 0).ok
    assert "1 of 2 elements" in compare("v", "op", ints, np.array([1, 3]), Tolerance(0, 0), 0).note
    assert not compare("v", "op", ints, np.array([[1, 2]]), Tolerance(0, 0), 0).ok
    assert not compare("v", "op", ints, ints.astype(np.int32), Tolerance(0, 0), 0).ok
