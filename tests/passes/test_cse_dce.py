"""Equal nodes and constants become one; what nothing needs goes, except leaves and what makes a dim."""

from __future__ import annotations

import numpy as np
from pass_checks import checked, ops, sources

import rlx.ops as o
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim, Guard
from rlx.ops.layout import Full
from rlx.passes.cse import cse
from rlx.passes.dce import dce


def test_equal_nodes_merge_with_all_their_sources() -> None:
    g = Graph()
    x, y = g.input("x", (4,)), g.input("y", (4,))
    g.output(o.exp(x + y) * o.exp(y + x), "z")
    after = checked(g, cse, dce)
    assert ops(after) == ["add", "exp", "mul"]
    assert after.nodes[0].provenance == ("n0", "n2")
    assert sources(after) == sources(g)


def test_equal_constants_merge_but_not_across_types_or_signs_of_zero() -> None:
    g = Graph()
    x = g.input("x", (2,))
    for i, c in enumerate([[0.0, 1.0], [0.0, 1.0], [-0.0, 1.0]]):
        g.output(o.div(x, g.constant(c)), f"y{i}")
    after = checked(g, cse, dce)
    assert len(after.constants) == 2
    assert ops(after) == ["div", "div"]


def test_attributes_that_only_compare_equal_are_different() -> None:
    g = Graph()
    x = g.input("x", (2,))
    for value in (0.0, -0.0):
        (zero,) = g.add(Full((2,), value, DTYPES["f32"]))
        g.output(o.div(x, zero), f"y{value}")
    assert ops(checked(g, cse, dce)) == ["full", "div", "full", "div"]


def test_order_of_operands_counts_where_it_matters() -> None:
    g = Graph()
    x, y = g.input("x", (2,)), g.input("y", (2,))
    g.output(x - y, "a")
    g.output(y - x, "b")
    assert ops(checked(g, cse)) == ["sub", "sub"]


def test_unused_nodes_and_constants_go_and_leaves_stay() -> None:
    g = Graph()
    x = g.input("x", (2,))
    g.input("unused", (2,))
    g.param("w", data=np.ones(2, np.float32))
    s = g.state("s", (2,))
    o.exp(x) * 3.0
    g.update(s, s + x)
    g.output(x, "y")
    after = checked(g, dce)
    assert ops(after) == ["add"]
    assert after.constants == []


def test_node_stays_for_the_dim_that_it_makes() -> None:
    g = Graph()
    count = Dim("count", 0, 6)
    o.reshape(g.input("x", (6,)), (count,))  # stands for an op whose result's size depends on data
    g.output(g.add(Full((count,), 1.0, DTYPES["f32"]))[0], "ones")
    assert ops(dce(g)) == ["reshape", "full"]


def test_guard_over_a_dim_that_is_gone_goes_too() -> None:
    g = Graph()
    x = g.input("x", (Dim("n"),))
    lost = Dim("lost")
    o.reshape(x, (lost,))
    g.guards.append(Guard(Dim("n"), 3, "kept"))
    g.output(x + 1.0, "y")
    after = dce(g)
    assert [guard.why for guard in after.guards] == ["kept"]
    assert any("lost" in str(guard) for guard in g.guards)


def test_large_constants_are_compared_where_their_ends_are_equal() -> None:
    """They are too large to be hashed: equal ones are one, of others that differ in the middle both stay."""
    first = np.arange(1 << 19, dtype=np.float32)
    other = first.copy()
    other[1 << 18] += 1
    g = Graph("large")
    x = g.input("x", (1 << 19,))
    for data in (first, other, first.copy(), other.copy()):
        g.output(x * g.constant(data), f"y{len(g.outputs)}")
    assert len(dce(cse(g)).constants) == 2
    assert len(cse(g).nodes) == 2
