"""The random graphs that devices are compared on are valid, varied and well conditioned."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from rlx.backends.reference import run_graph
from rlx.ir.graph import Array, Graph
from rlx.ir.text import print_graph
from rlx.ir.verify import verify
from rlx.testing.graphs import random_graph


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.sample(15)
def test_random_graphs_run(seed: int) -> None:
    """Each verifies, is a function of its seed, and gives moderate finite values at several extents."""
    graph, make_inputs = random_graph(seed)
    verify(graph)
    assert print_graph(graph) == print_graph(random_graph(seed)[0])
    for extents_seed in range(3):
        inputs = make_inputs(extents_seed)
        for array in run_graph(graph, inputs).values():
            assert np.abs(array.astype(np.float64)).max(initial=0) < 1e4


@pytest.mark.parametrize("seed", range(100, 160))
@pytest.mark.sample(10)
def test_random_graphs_are_well_conditioned(seed: int) -> None:
    """Rounding in f32 instead of f64 moves no output far: a device that rounds differently can be compared."""
    graph, make_inputs = random_graph(seed, dtypes=("f32", "i64", "bool"))
    wide, _ = random_graph(seed, dtypes=("f64", "i64", "bool"))
    inputs = make_inputs(1)
    for value in wide.inputs:
        if value.name not in inputs or inputs[value.name].dtype.kind != value.dtype.kind:
            pytest.fail("the two graphs differ in more than their float type")
    exact = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in inputs.items()}
    params: dict[str, Array] = {p.name: _data(graph, p.name).astype(np.float64) for p in wide.params}
    expected = run_graph(wide, exact, params)
    for name, array in run_graph(graph, inputs).items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-3, atol=1e-4)


def _data(graph: Graph, name: str) -> Array:
    data = graph.find(name).data
    assert data is not None
    return data


def test_random_graphs_are_varied() -> None:
    """A hundred graphs use most ops, symbolic and fixed sizes, and outputs that are leaves or repeated."""
    graphs = [random_graph(seed)[0] for seed in range(100)]
    ops = Counter(node.op.op_name for g in graphs for node in g.nodes)
    assert len(ops) > 40
    kinds = Counter(o.value.kind for g in graphs for o in g.outputs)
    assert {"input", "param", "const", "node"} == set(kinds)
    assert any(len({o.value for o in g.outputs}) < len(g.outputs) for g in graphs)
    assert any(g.dims() for g in graphs)
    assert not any(random_graph(seed, symbolic=False)[0].dims() for seed in range(20))
