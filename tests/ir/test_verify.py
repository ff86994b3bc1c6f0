"""The verifier finds each way in which a graph can be wrong and names the node."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rlx.errors import CompileError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, Output, TensorType, Value
from rlx.ir.shape import Dim
from rlx.ir.verify import verify
from rlx.ops.control import If
from rlx.ops.elementwise import Add, Neg, Tanh

F32 = DTYPES["f32"]


def make() -> Graph:
    """Two nodes, a state with its update, a param, a constant and an If."""
    n, m = Dim("n", 1, 8), Dim("m", 1, 8)
    g = Graph("main")
    x, y = g.input("x", (n, 2)), g.input("y", (m, 2))
    p = g.param("p", (2,), data=np.ones(2, np.float32))
    s = g.state("s", (2,))
    cond = g.constant(True)
    (a,) = g.add(Neg(), x, provenance=["first"])
    (b,) = g.add(Add(), a, y, provenance=["second"])
    (c,) = g.add(Add(), b, p, provenance=["third"])
    branches = []
    for op in (Neg(), Tanh()):
        region = Graph("branch")
        region.output(region.add(op, region.input("v", c.shape), provenance=["inner"])[0], "r")
        branches.append(region)
    (d,) = g.add(If(), cond, c, provenance=["branching"], regions=branches)
    g.update(s, s)
    g.output(d, "d")
    g.output(a, "a")
    return g


def test_a_good_graph_passes() -> None:
    """The graph that the cases below break is valid."""
    verify(make())


def _leaf(g: Graph, kind: str = "input", name: str = "new") -> Value:
    return Value(g, TensorType((2,), F32), kind, name)


BREAKS: list[tuple[Callable[[Graph], object], str]] = [
    (lambda g: g.nodes.reverse(), "not defined before this node"),
    (lambda g: g.nodes.pop(0), "add 'second': input 0 .* not defined before"),
    (lambda g: g.nodes.append(g.nodes[0]), "neg 'first': output 0.*defined twice"),
    (lambda g: setattr(g.nodes[0], "op", If()), "node if 'first'"),
    (lambda g: setattr(g.nodes[0], "inputs", (make().inputs[0],)), "neg 'first': input 0 .*another graph"),
    (lambda g: setattr(g.nodes[0], "inputs", ()), "neg 'first': .*1 inputs, 0 given"),
    (lambda g: setattr(g.nodes[0], "outputs", ()), "neg 'first': gives .* recorded as nothing"),
    (lambda g: setattr(g.nodes[0].outputs[0], "type", TensorType((2,), F32)), "neg 'first': gives"),
    (lambda g: setattr(g.nodes[0].outputs[0], "node", g.nodes[1]), "neg 'first': .*point back"),
    (lambda g: setattr(g.nodes[0].outputs[0], "index", 1), "neg 'first': .*point back"),
    (lambda g: g.guards.clear(), "add 'second': the guard n == m is not recorded"),
    (lambda g: g.inputs.append(_leaf(g, name="x")), "two leaves are named 'x'"),
    (lambda g: g.inputs.append(g.inputs[0]), "listed twice"),
    (lambda g: g.inputs.append(_leaf(g, "param")), "listed as a leaf of kind input"),
    (lambda g: g.params.append(_leaf(g, "param", "")), "has no name"),
    (lambda g: g.constants.append(_leaf(g, "const")), "has no data"),
    (lambda g: setattr(g.params[0], "data", np.ones(3, np.float32)), "param 'p': expected shape"),
    (lambda g: setattr(g.params[0], "data", np.ones(2)), "param 'p': expected elements of type f32"),
    (lambda g: g.outputs.append(Output("d", g.inputs[0])), "two outputs are named 'd'"),
    (lambda g: g.outputs.append(Output("", g.inputs[0])), "has no name"),
    (lambda g: g.outputs.append(Output("z", _leaf(g))), "output 'z' .* not define"),
    (lambda g: g.updates.update(q=g.inputs[0]), "update of 'q', which is not a state"),
    (lambda g: g.updates.update(s=g.inputs[0]), "update of 's' is f32"),
    (lambda g: g.updates.update(s=_leaf(g)), "update of 's' is .* not define"),
    (lambda g: g.input("z", (Dim("n", 1, 9),)), "the dim 'n' is declared as"),
    (lambda g: g.nodes[3].regions[0].param("w", (1,)), "if 'branching': region 'branch' has params"),
    (lambda g: g.nodes[3].regions[1].nodes.clear(), "if 'branching': .*'branch': output 'r'"),
    (lambda g: setattr(g.nodes[3].regions[0].nodes[0], "inputs", (g.inputs[0],)), "if 'branching': .*neg 'inner'"),
    (lambda g: g.nodes[3].regions[0].outputs.clear(), "if 'branching': if: the branches give"),
]


@pytest.mark.parametrize("damage, message", BREAKS, ids=[m for _, m in BREAKS])
def test_each_fault_is_named(damage: Callable[[Graph], object], message: str) -> None:
    """One fault each: a CompileError that names the place."""
    graph = make()
    damage(graph)
    with pytest.raises(CompileError, match=message):
        verify(graph)
