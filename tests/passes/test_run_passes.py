"""All passes in their order: random graphs, regions and real models keep their results, and models shrink as meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pass_checks import N, assert_same_results, checked, node_of, ops

import rlx.ops as o
from rlx.backends.reference import run_graph
from rlx.importers.onnx import load
from rlx.ir.graph import Array, Graph
from rlx.ir.shape import Dim
from rlx.ir.verify import verify
from rlx.ops.control import If
from rlx.passes import PASSES, run_passes
from rlx.testing.graphs import random_graph


@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 30))
def test_random_graphs_keep_their_results_after_each_pass(seed: int, nodes: int) -> None:
    graph, make_inputs = random_graph(seed, nodes)
    inputs = make_inputs(seed)
    before = graph
    for name, one in PASSES:
        graph = one(graph)
        try:
            verify(graph)
            assert_same_results(before, graph, inputs)
        except Exception as error:
            error.add_note(f"after {name}")
            raise


@given(seed=st.integers(0, 2**32))
def test_passes_leave_nothing_for_a_second_run(seed: int) -> None:
    once = run_passes(random_graph(seed, 20)[0])
    assert len(run_passes(once).nodes) == len(once.nodes)


def test_names_are_those_of_the_functions() -> None:
    assert all(name == one.__name__ for name, one in PASSES)
    names = [name for name, _ in PASSES]
    assert names.index("raise_encoding") < names.index("fold")
    assert names.index("raise_activation") < names.index("algebra")


def test_regions_are_passed_through_too() -> None:
    def branch(factor: float) -> Graph:
        region = Graph(f"times {factor}")
        x = region.input("x", (N,))
        region.output(x * 1.0 * o.sigmoid(x) * factor, "y")
        return region

    g = Graph()
    cond, x = g.input("cond", (), "bool"), g.input("x", (N,))
    g.output(g.add(If(), cond, x, regions=[branch(2.0), branch(3.0)])[0], "y")
    after = checked(g, run_passes)
    assert [ops(region) for region in node_of(after, "if").regions] == [["silu", "mul"], ["silu", "mul"]]


def test_states_and_their_updates_stay() -> None:
    g = Graph()
    cache = g.state("cache", (4, 3))
    g.update(cache, o.concat(o.slice(cache, (1, 0), (3, 3), (1, 1)), g.input("x", (1, 3)) * 1.0, axis=0))
    g.output(cache - 0.0, "y")
    after = checked(g, run_passes)
    assert ops(after) == ["slice", "concat"]
    states: dict[str, Array] = {}
    run_graph(after, {"x": np.ones((1, 3), np.float32)}, states=states)
    assert states["cache"].sum() == 3


# ---- real models

ModelPath = Callable[[str], Path]
SIZES = {"minilm-int8": (2, 7), "ppocrv4-rec": (1, 48, 80), "ppocrv4-det": (1, 64, 96), "ppocrv5-rec": (1, 80)}
SIZES |= {"ppocrv5-det": (1, 64, 96), "ppocrv4-cls": (2, 48, 64), "basic-pitch": (1,), "wakeword-embedding": (2,)}
SIZES |= {"orientation": (1,), "pulsevad-81k": (3,)}


def inputs_for(graph: Graph, sizes: tuple[int, ...]) -> dict[str, Array]:
    """Inputs of the model when its free dims, in order of appearance, have these sizes."""
    rng, left = np.random.default_rng(0), iter(sizes)
    known: dict[Dim, int] = {}
    inputs = {}
    for value in graph.inputs:
        for size in value.shape:
            if isinstance(size, Dim) and size not in known:
                known[size] = next(left)
        shape = [known[size] if isinstance(size, Dim) else size for size in value.shape]
        if value.dtype.is_float:
            inputs[value.name] = rng.standard_normal(shape).astype(value.dtype.numpy)
        else:
            inputs[value.name] = rng.integers(0, 2, shape).astype(value.dtype.numpy)
    return inputs


@pytest.mark.models
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SIZES)
def test_real_models_give_what_onnxruntime_gives(name: str, model_path: ModelPath) -> None:
    path = model_path(name)
    graph = load(path)
    inputs = inputs_for(graph, SIZES[name])
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    wanted = session.run([x.name for x in session.get_outputs()], inputs)
    optimised = run_passes(graph)
    verify(optimised)
    found = run_graph(optimised, inputs)
    for output, value in zip(session.get_outputs(), wanted, strict=True):
        np.testing.assert_allclose(found[output.name], value, rtol=0, atol=1e-5 + 1e-4 * np.abs(value).max())


@pytest.mark.models
def test_minilm_is_raised(model_path: ModelPath) -> None:
    after = run_passes(load(model_path("minilm-int8")))
    count = Counter(ops(after))
    assert (count["attention"], count["layer_norm"], count["gelu"]) == (6, 13, 6)
    assert (count["dequantize"], count["matmul"], count["gather"]) == (38, 36, 3)
    assert not count.keys() & {"softmax", "is_nan", "erf", "mul", "div", "squeeze", "unsqueeze"}
    for node in after.nodes:
        if node.op.op_name == "attention":
            assert node.op.empty_row == "mended"
            assert node.op.scale == pytest.approx(32**-0.5)
    views = {"reshape", "dequantize", "transpose"}
    assert sum(n for name, n in count.items() if name not in views) < 130


@pytest.mark.models
@pytest.mark.parametrize(
    "name, raised",
    [
        ("ppocrv4-rec", {"hard_swish": 28, "silu": 7, "layer_norm": 5, "attention": 2, "conv": 38}),
        ("ppocrv4-det", {"hard_swish": 24, "conv": 62, "conv_transpose": 2}),
        ("ppocrv4-cls", {"hard_swish": 18, "conv": 53}),
        ("ppocrv5-rec", {"hard_swish": 28, "silu": 7, "layer_norm": 5, "attention": 2, "conv": 38}),
        ("orientation", {"hard_swish": 28, "conv": 32}),
        ("magika", {"gelu": 2, "softmax": 1}),
    ],
)
def test_vision_and_text_models_are_raised(name: str, raised: dict[str, int], model_path: ModelPath) -> None:
    count = Counter(ops(run_passes(load(model_path(name)))))
    assert {op: count[op] for op in raised} == raised
    assert not count.keys() & {"batch_norm", "erf", "tanh", "pow", "div", "exp"}
