"""Random graphs compute on the CPU what they do on the reference, by every way of running them."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx.backends.reference import run_graph
from rlx.ir.graph import Array, Graph
from rlx.testing.graphs import MakeInputs, random_graph
from rlx.testing.oracle import compare_results, tolerances

PLAIN = ("f32", "f64", "i32", "i64", "bool")


def made(seed: int) -> tuple[Graph, MakeInputs]:
    """Every third graph has 16-bit floats; every other one axes that are longer than a vector."""
    dtypes = (*PLAIN, "f16", "bf16") if seed % 3 == 0 else PLAIN
    sizes = (1, 2, 3, 4, 5, 7) if seed % 2 else (1, 2, 3, 8, 9, 17, 33)
    return random_graph(seed, 15, dtypes=dtypes, sizes=sizes)


@pytest.mark.sample(20)
@pytest.mark.parametrize("seed", range(2000))
def test_like_the_reference(seed: int) -> None:
    """Each graph at two sets of extents, with fresh results, views, `out=` and in a clone."""
    check_graph(*made(seed))


def check_graph(graph: Graph, make_inputs: MakeInputs) -> None:
    model = rlx.compile(graph, device="cpu")
    for seed in (1, 2):
        inputs = make_inputs(seed)
        expected = run_graph(graph, inputs)
        results = dict(model(inputs))
        compare_results(expected, results, tolerances(graph))
        names = list(results)
        same(names, results, model.run_views(inputs))
        same(names, results, model.clone().run(inputs))
        out = {name: np.empty_like(array) for name, array in results.items()}
        model.run(inputs, out=out)
        same(names, results, out.values())
        last = names[-1]
        np.testing.assert_array_equal(model.run(inputs, outputs=[last])[0], results[last])


def same(names: list[str], results: dict[str, Array], others: object) -> None:
    """Another way of running gives the same bits."""
    for name, other in zip(names, others, strict=True):  # type: ignore[call-overload]
        assert results[name].tobytes() == np.ascontiguousarray(other).tobytes(), name
