"""Random attention blocks: passes change nothing but roundings, whatever is masked, filled, scaled, infinite or NaN."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from attention_blocks import Block, attention_block
from onnx.reference import ReferenceEvaluator
from pass_checks import TOLERANCE, ops

import rlx
from rlx.backends.reference import run_graph
from rlx.importers.onnx import load
from rlx.ir.graph import Array, Graph
from rlx.ir.verify import verify
from rlx.passes import run_passes

CASES = 50  # blocks of one test


def assert_close(found: Array, wanted: Array, tolerance: float, block: Block) -> None:
    """Sums of values are as exact as the largest of them allows."""
    values = np.abs(block.inputs["v"].astype(np.float64))
    largest = max(values[np.isfinite(values)], default=0.0)
    x, y = found.astype(np.float64), wanted.astype(np.float64)
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * max(largest, 1e-3))


def optimised(block: Block, graph: Graph) -> Graph:
    """The graph after all passes: attention where every number is in one type, unless no product is left of it."""
    after = run_passes(graph)
    verify(after)
    names = ops(after)
    assert "softmax" not in names or names.count("matmul") < 2 or block.rounds, "not raised"
    assert "attention" not in names or not block.rounds, "raised though it rounds on the way"
    return after


@pytest.mark.sample(4)
@pytest.mark.parametrize("part", range(100))
def test_passes_on_against_passes_off(part: int) -> None:
    for seed in range(part * CASES, (part + 1) * CASES):
        block = attention_block(seed)
        graph = load(block.model)
        (wanted,) = run_graph(graph, block.inputs).values()
        (found,) = run_graph(optimised(block, graph), block.inputs).values()
        try:
            assert_close(found, wanted, TOLERANCE[block.dtype], block)
        except AssertionError as error:
            error.add_note(f"block {seed}")
            raise


@pytest.mark.sample(2)
@pytest.mark.parametrize("part", range(20))
def test_against_the_reference_evaluator_of_onnx(part: int) -> None:
    """In f64, passes on and off."""
    for seed in range(part * CASES, (part + 1) * CASES):
        block = attention_block(seed, "f64")
        graph = load(block.model)
        with np.errstate(all="ignore"):
            (wanted,) = ReferenceEvaluator(onnx.load_from_string(block.model)).run(None, block.inputs)
        for each in (graph, optimised(block, graph)):
            (found,) = run_graph(each, block.inputs).values()
            try:
                assert_close(found, wanted, TOLERANCE["f64"], block)
            except AssertionError as error:
                error.add_note(f"block {seed}, {'file' if each is graph else 'passes'}")
                raise


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(150))
def test_the_cpu_gives_what_the_file_says(seed: int) -> None:
    block = attention_block(seed)
    graph = load(block.model)
    (wanted,) = run_graph(graph, block.inputs).values()
    (found,) = rlx.compile(graph, device="cpu", threads=1).run(block.inputs)
    assert_close(found, wanted, TOLERANCE[block.dtype], block)
