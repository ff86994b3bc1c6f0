"""Extent, AsShape and Loop: sizes that a run decides."""

from __future__ import annotations

import numpy as np
import pytest

from rlx.backends.reference import run_graph
from rlx.errors import ExecutionError
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim
from rlx.ops.dynamic import AsShape, Extent, Loop
from rlx.ops.elementwise import Add, Less, Mul
from rlx.ops.layout import Iota


def test_an_extent_is_a_size_of_what_follows() -> None:
    """A number of the data becomes the size of a tensor; a negative one and one beyond the bound stop the run."""
    n = Dim("n", 0, 5)
    g = Graph()
    g.add(Extent(n), g.input("count", (), "i64"))
    g.output(g.add(Iota(n))[0], "y")
    np.testing.assert_array_equal(run_graph(g, {"count": np.array(3)})["y"], [0, 1, 2])
    for count, message in ((-1, "can't be negative"), (6, "outside its bounds")):
        with pytest.raises(ExecutionError, match=message):
            run_graph(g, {"count": np.array(count)})


def test_as_shape_takes_a_size_and_checks_known_ones() -> None:
    """A new dim is read off the array; a size that is known must be its own."""
    g = Graph()
    x = g.input("x", (Dim("a", 1),))
    g.output(g.add(AsShape((Dim("b", 0, 9),)), x)[0], "y")
    assert str(g.outputs[0].value.type) == "f32[b]"
    assert run_graph(g, {"x": np.ones(4, np.float32)})["y"].shape == (4,)
    h = Graph()
    h.output(h.add(AsShape((3,)), h.input("x", (Dim("a", 1),)))[0], "y")
    with pytest.raises(ExecutionError):
        run_graph(h, {"x": np.ones(4, np.float32)})


@pytest.mark.parametrize("start, rows", [(1.0, [1, 2, 4, 8]), (100.0, [])])
def test_a_loop_stacks_a_row_a_round(start: float, rows: list[float]) -> None:
    """Doubling until 10: the carry at the end, and the carry before each round."""
    cond, body, g = Graph("cond"), Graph("body"), Graph()
    c, limit = cond.input("c", ()), cond.input("limit", ())
    cond.output(cond.add(Less(), c, limit)[0], "go")
    c, limit = body.input("c", ()), body.input("limit", ())
    body.output(body.add(Mul(), c, body.constant(2.0))[0], "c")
    body.output(body.add(Add(), c, body.constant(0.0))[0], "row")
    inputs = g.input("x", ()), g.constant(10.0)
    last, stacked = g.add(Loop(1, Dim("count", 0, 8)), *inputs, regions=[cond, body])
    g.output(last, "last")
    g.output(stacked, "rows")
    made = run_graph(g, {"x": np.array(start, np.float32)})
    np.testing.assert_array_equal(made["rows"], np.array(rows, np.float32))
    assert made["last"] == (16 if rows else start)
