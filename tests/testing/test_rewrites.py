"""The comparison of what the passes made with the graph as imported: every wrong pass is found and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlx
from rlx import passes
from rlx.backends.reference import run_graph
from rlx.ir.graph import Array, Graph, Output
from rlx.ops.activation import Relu
from rlx.ops.elementwise import Add, Clip, Exp, Neg, Round, Sign, Tanh
from rlx.passes.dims import apply_dims
from rlx.passes.rewrite import Site, copy_leaves, rewrite
from rlx.testing.graphs import random_graph
from rlx.testing.rewrites import compare_passes, compare_rewritten, first_wrong_pass

Pass = Callable[[Graph], Graph]
PLACES = [*range(0, len(passes.PASSES) + 1, 3), len(passes.PASSES)]


def network() -> Graph:
    """Rows of clip(tanh(x)), a step, a sum; the results of ops that passes merge, and of ops that they leave alone."""
    g = Graph("network")
    x = g.input("x", (rlx.Dim("n", 1, 16), 8))
    clipped = g.add(Clip(-0.5, 0.5), g.add(Tanh(), x)[0])[0]
    step = g.add(Sign(), x)[0]
    g.output(rlx.softmax(g.add(Relu(), clipped)[0] @ rlx.transpose(x, perm=(1, 0))), "soft")
    g.output(g.add(Add(), step, clipped)[0], "sum")
    g.output(x, "same")
    return g


def some_inputs() -> dict[str, Array]:
    return {"x": np.random.default_rng(1).standard_normal((8, 8), dtype=np.float32)}


def replacing(kind: type, by: Callable[[Site], Any]) -> Pass:
    return lambda graph: rewrite(graph, lambda site: by(site) if isinstance(site.op, kind) else None)


def another_output(graph: Graph) -> Graph:
    new = rewrite(graph, lambda site: None)
    first, second, *rest = new.outputs
    new.outputs = [first, Output(second.name, new.inputs[0]), *rest]
    return new


def without_history(graph: Graph) -> Graph:
    """A graph that does not say what it was made from, with another slope."""
    new = replacing(Tanh, lambda site: site.add(Neg(), site.add(Tanh(), *site.inputs)))(graph)
    new.became = None
    return new


WRONG: dict[str, Pass] = {
    "drops a limit": replacing(Clip, lambda site: site.inputs[0]),
    "another constant": replacing(Clip, lambda site: site.add(Clip(-0.4, 0.4), site.inputs[0])),
    "a step made a slope": replacing(Sign, lambda site: site.add(Clip(-1, 1), site.inputs[0] * 3.0)),
    "a constant": replacing(Tanh, lambda site: site.scalar(0.0, site.inputs[0]) + site.inputs[0] * 0.0),
    "an operand for a result": replacing(Relu, lambda site: site.inputs[0]),
    "another output": another_output,
    "a graph without history": without_history,
}  # fmt: skip


@pytest.mark.sample(16)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("place", PLACES)
def test_a_wrong_pass_is_found_and_named(wrong: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it stands among the passes, if it changes a result there; the reference device never has it."""
    graph, inputs = network(), some_inputs()
    expected = run_graph(graph, inputs)
    before = graph
    for _, one in passes.PASSES[:place]:
        before = one(before)
    after = WRONG[wrong](before)
    changed = run_graph(after, inputs)
    same = all(np.allclose(changed[name], a, 1e-3, 1e-3) for name, a in expected.items())

    monkeypatch.setattr(passes, "PASSES", (*passes.PASSES[:place], (wrong, WRONG[wrong]), *passes.PASSES[place:]))
    found = first_wrong_pass(graph, inputs)
    assert all(c.ok for c in compare_passes(graph, inputs)) is (found is None)
    if same:
        assert found is None or found.name == wrong
    else:
        assert found is not None
        assert found.name == wrong
        assert f"the pass {wrong!r} changes the result of" in str(found)
    reference = rlx.compile(graph, device="reference")(inputs)
    for name, array in expected.items():
        np.testing.assert_array_equal(reference[name], array)


def test_the_wrong_passes_change_a_result_at_the_start() -> None:
    """What the test above calls wrong is so: each changes the results of the graph as imported."""
    graph, inputs = network(), some_inputs()
    expected = run_graph(graph, inputs)
    for name, wrong in WRONG.items():
        found = run_graph(wrong(graph), inputs)
        assert not all(np.allclose(found[n], a, 1e-3, 1e-3) for n, a in expected.items()), name


def test_a_wrong_pass_in_a_branch_or_a_loop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions are passed through the passes by themselves; the node that holds one is named."""
    x = np.linspace(-1, 1, 8, dtype=np.float32)

    def inner(c: Any) -> Any:
        return rlx.cond(c.sum() > 0, lambda: np.tanh(c), lambda: -np.tanh(c))

    loop = rlx.jit(lambda x: rlx.fori_loop(0, 2, lambda i, c: inner(c) + i, x), device="cpu").lower(x)
    assert all(c.ok for c in compare_passes(loop, {"x": x}))
    wrong = replacing(Tanh, lambda site: site.inputs[0])
    monkeypatch.setattr(passes, "PASSES", (*passes.PASSES[:9], ("tanh away", wrong), *passes.PASSES[9:]))
    found = first_wrong_pass(loop, {"x": x})
    assert found is not None
    assert (found.name, found.where) == ("tanh away", "in a branch or loop")


def test_a_pass_that_makes_what_can_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the rewritten part is the difference, and the pass is named."""

    class Fails(Exp):
        def reference(self, x: Array) -> Array:
            raise ValueError("no such thing")

    wrong = replacing(Tanh, lambda site: site.add(Fails(), *site.inputs))
    monkeypatch.setattr(passes, "PASSES", (*passes.PASSES, ("fails", wrong)))
    found = first_wrong_pass(network(), some_inputs())
    assert found is not None
    assert found.name == "fails"
    assert "it can't be computed" in str(found)
    assert "no such thing" in str(found)


def test_a_step_beside_its_edge_is_no_difference() -> None:
    """A rounded value agrees where an error within the tolerance of its operand explains it, and not beyond."""
    g = Graph("steps")
    g.output(g.add(Round(), g.input("x", (2,)) * 1.5)[0], "y")
    inputs = {"x": np.array([1.0, 3.2], np.float32)}  # 1.5 lies on an edge, 4.8 does not

    def off(factor: float) -> Graph:
        return replacing(Round, lambda site: site.add(Round(), site.inputs[0] * factor))(g)

    assert all(c.ok for c in compare_rewritten(g, off(1 + 1e-5), inputs))
    found = compare_rewritten(g, off(1.3), inputs)
    assert [c.ok for c in found] == [False]


def test_values_of_graphs_with_fixed_dims_are_followed() -> None:
    """Also where the graph was made from another one."""
    fixed = apply_dims(network(), {"n": 8})
    found = compare_passes(fixed, some_inputs())
    assert found
    assert all(c.ok for c in found)


def test_only_what_was_rewritten_is_compared() -> None:
    """A copy of the graph has nothing to compare; a changed node one value."""
    graph = network()
    assert compare_rewritten(graph, rewrite(graph, lambda site: None), some_inputs()) == []
    doubled = replacing(Tanh, lambda site: site.add(Neg(), site.add(Neg(), site.add(Tanh(), *site.inputs))))(graph)
    assert [(c.op, c.ok) for c in compare_rewritten(graph, doubled, some_inputs())] == [("tanh", True)]
    new, _ = copy_leaves(graph)
    assert new.became is None


@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 30))
def test_right_passes_are_never_blamed(seed: int, nodes: int) -> None:
    """Random graphs, their states and regions among them."""
    graph, make_inputs = random_graph(seed, nodes)
    bad = [c for c in compare_passes(graph, make_inputs(seed)) if not c.ok]
    assert not bad
