"""What the tests of passes share: run passes, verify and compare with the reference after each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.backends.reference import run_graph
from rlx.ir.graph import Array, Graph, Value
from rlx.ir.shape import Dim, evaluate
from rlx.ir.verify import verify

Pass = Callable[[Graph], Graph]
TOLERANCE = {"f64": 1e-9, "f32": 2e-5, "f16": 4e-3, "bf16": 3e-2}
EXTENTS = {"b": 2, "n": 5}
B, N = Dim("b"), Dim("n")


def ops(graph: Graph) -> list[str]:
    """Names of the ops, in order."""
    return [node.op.op_name for node in graph.nodes]


def node_of(graph: Graph, op_name: str) -> Any:
    """The only node of that op."""
    (node,) = [n for n in graph.nodes if n.op.op_name == op_name]
    return node


def sources(graph: Graph) -> set[str]:
    return {source for node in graph.nodes for source in node.provenance}


def labelled(graph: Graph) -> Graph:
    """Gives each node a provenance of its own: n0, n1, ..."""
    for i, node in enumerate(graph.nodes):
        node.provenance = (f"n{i}",)
    return graph


def array_for(value: Value, rng: np.random.Generator) -> Array:
    shape = [evaluate(size, EXTENTS) for size in value.shape]
    if value.dtype.kind == "b":
        return rng.random(shape) < 0.5
    if value.dtype.is_integer:
        return rng.integers(0, 4, shape).astype(value.dtype.numpy)
    return (2 * rng.standard_normal(shape)).astype(value.dtype.numpy)


def arrays_for(graph: Graph, seed: int = 0) -> tuple[dict[str, Array], dict[str, Array]]:
    """Inputs, and values for the params that have none."""
    rng = np.random.default_rng(seed)
    inputs = {v.name: array_for(v, rng) for v in graph.inputs}
    return inputs, {v.name: array_for(v, rng) for v in graph.params if v.data is None}


def assert_same_results(a: Graph, b: Graph, inputs: dict[str, Array], params: dict[str, Array] | None = None) -> None:
    wanted, found = run_graph(a, inputs, params), run_graph(b, inputs, params)
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        if value.dtype.kind in "iubc":
            np.testing.assert_array_equal(found[name], value)
            continue
        tolerance = TOLERANCE[next(o.value.dtype.name for o in a.outputs if o.name == name)]
        x, y = found[name].astype(np.float64), value.astype(np.float64)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=name)


def checked(graph: Graph, *passes: Pass) -> Graph:
    """The graph after the passes; each keeps it valid, its leaves, its results and its sources."""
    verify(graph)
    labelled(graph)
    inputs, params = arrays_for(graph)
    before = graph
    for one in passes:
        text = str(graph)
        after = one(graph)
        assert str(graph) == text, "a pass changed its argument"
        verify(after)
        for kind in ("inputs", "params", "states"):
            assert [(v.name, v.type) for v in getattr(after, kind)] == [(v.name, v.type) for v in getattr(before, kind)]
        assert_same_results(before, after, inputs, params)
        graph = after
    return graph
