"""Looking values up in the plan of a compiled graph: the place that is given has the value's bytes after a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlx
from rlx.backends.reference import run_graph
from rlx.demo import DIGITS
from rlx.errors import NameNotFound
from rlx.ir.graph import Array, Graph, Node, Value
from rlx.ops.elementwise import Exp
from rlx.plan.arena import Slot
from rlx.runtime.compiled import CompiledGraph
from rlx.testing.graphs import random_graph


def values_of(graph: Graph, inputs: dict[str, Array]) -> dict[Value, Array]:
    found: dict[Value, Array] = {}

    def see(node: Node, results: tuple[Array, ...]) -> None:
        found.update(zip(node.outputs, results, strict=True))

    run_graph(graph, inputs, trace=see)
    return found


def held(model: CompiledGraph, slot: Slot, like: Array) -> Array:
    """What the arena holds there."""
    return np.frombuffer(model.arena, np.uint8, slot.nbytes, slot.offset).view(like.dtype).reshape(like.shape)


def network() -> tuple[Graph, dict[str, Value]]:
    """Unnamed and named values, views, a fused one, one that a pass replaces, a weight's, several outputs."""
    g = Graph("places")
    x, w = g.input("x", (rlx.Dim("n", 1, 8), 16)), g.param("w", data=np.eye(16, dtype=np.float32))
    made = {"exp": rlx.exp(x)}
    made["soft"] = rlx.softmax(made["exp"] @ w)
    made["view"] = rlx.reshape(made["soft"], shape=(rlx.Dim("n", 1, 8) * 4, 4))
    made["view"].name = "by four"
    made["again"] = rlx.softmax(made["view"])
    made["fused"] = made["again"] * 2.0
    made["static"] = rlx.exp(w)
    made["last"] = rlx.softmax(made["fused"] + 1.0) @ rlx.slice(
        made["static"], starts=(0, 0), sizes=(4, 16), steps=(1, 1)
    )
    g.output(made["soft"], "probabilities")
    g.output(made["last"], "last")
    g.output(x, "same")
    return g, made


@pytest.mark.parametrize("dims", [None, {"n": 5}, {"n": (2, 6)}])
def test_a_place_has_the_value(dims: dict[str, object] | None) -> None:
    """By value, by the name of a value, and by the name of an output, whatever dims are given; views too."""
    g, made = network()
    inputs = {"x": np.random.default_rng(0).standard_normal((5, 16), dtype=np.float32)}
    expected = {**values_of(g, inputs), g.inputs[0]: inputs["x"]}
    model = rlx.compile(g, device="cpu", dims=dims, reuse=False)
    model.run_views(inputs)
    assert model.plan is model.plan
    plan = model.plan
    assert plan is not None
    for key, value in {
        made["soft"]: made["soft"], made["view"]: made["view"], "by four": made["view"],
        "probabilities": made["soft"], "last": made["last"], made["last"]: made["last"],
            "same": g.inputs[0],
    }.items():  # fmt: skip
        array = expected[value]
        slot = plan[key]
        room = held(model, Slot(slot.offset, array.nbytes, slot.root), array)
        np.testing.assert_allclose(room, array, 1e-5, 1e-6, err_msg=str(key))
    assert plan[made["view"]].root is plan[made["soft"]].root
    for row in plan.table():
        assert plan[row.name].nbytes == row.nbytes


def test_what_has_no_place_says_why() -> None:
    g, made = network()
    model = rlx.compile(g, device="cpu")
    plan = model.plan
    assert plan is not None
    _, others = network()
    for key, why in {
        made["fused"]: "the value of mul has no memory: each element is computed where it is read, inside of",
        g.inputs[0]: r"'x' \(input\) has no place",
        made["static"]: r"\(prepared\) has no place",
        "w": r"'w' \(param\) has no place",
        others["soft"]: "is no value of the graph that was compiled",
        "nothing": "no buffer or value 'nothing'",
    }.items():
        with pytest.raises(NameNotFound, match=why):
            plan[key]


def test_what_a_pass_replaced_and_names_that_are_not_unique() -> None:
    g = Graph("replaced")
    x = g.input("x", (4, 8))
    top = g.add(Exp(), x)[0]
    total = rlx.reduce_sum(top, axes=(1,), keepdims=True)
    first, second = g.add(Exp(), x @ rlx.transpose(x, perm=(1, 0)), name="twin")[0], g.add(Exp(), x * 2, name="twin")[0]
    g.output(rlx.div(top, total), "soft")
    g.output(rlx.softmax(first), "a")
    g.output(rlx.softmax(second), "b")
    plan = rlx.compile(g, device="cpu").plan
    assert plan is not None
    with pytest.raises(NameNotFound, match="2 values are named 'twin'"):
        plan["twin"]


def test_places_of_a_stored_model(tmp_path: Path) -> None:
    """An artifact's plan finds the same places, by the values of its graph and by name."""
    g, made = network()
    model = rlx.compile(g, device="cpu")
    model.save(tmp_path / "m.rlxart")
    stored = rlx.load(tmp_path / "m.rlxart")
    assert stored.plan is not None
    assert model.plan is not None
    source = stored.compilation.source
    for name in ("soft", "view", "last"):
        number = next(i for i, v in enumerate(g.values()) if v is made[name])
        value = list(source.values())[number]
        found, known = stored.plan[value], model.plan[made[name]]
        assert (found.offset, found.nbytes) == (known.offset, known.nbytes)
    assert stored.plan["by four"].offset == model.plan["by four"].offset


def test_a_registry_changes_no_places_and_keeps_no_graph(tmp_path: Path) -> None:
    """Values of a graph that is compiled with a registry are found; that of a file that is loaded with one goes."""
    g, made = network()
    plan = rlx.compile(g, device="cpu", registry=rlx.WeightRegistry()).plan
    known = rlx.compile(g, device="cpu").plan
    assert plan is not None
    assert known is not None
    assert plan[made["soft"]].offset == known[made["soft"]].offset
    session = rlx.Session(device="cpu", registry=rlx.WeightRegistry(), cache=False)
    first, second = session.load(DIGITS, dims={"batch": 2}), session.load(DIGITS, dims={"batch": 2})
    for model in (first, second):
        source = model.compilation.source
        assert source.became is None
        assert model.plan is not None
        (last,) = source.outputs
        assert model.plan[last.value] == model.plan["probabilities"]


@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 20))
def test_places_in_random_graphs(seed: int, nodes: int) -> None:
    """Every value that has a place has its bytes there, where no two buffers share memory; the others say why not."""
    graph, make_inputs = random_graph(seed, nodes)
    inputs = make_inputs(seed)
    expected = values_of(graph, inputs)
    model = rlx.compile(graph, device="cpu", reuse=False)
    if not model.outputs:
        return
    model.run_views(inputs)
    plan = model.plan
    assert plan is not None
    said: list[str] = []
    for value, array in expected.items():
        if value.graph is not graph:
            continue
        try:
            slot = plan[value]
        except NameNotFound as error:
            said.append(str(error))
            continue
        assert slot.nbytes >= array.nbytes
        if len(array.shape) < 3:  # images may have their channels last
            room = held(model, Slot(slot.offset, array.nbytes, slot.root), array)
            if array.dtype.kind == "f":
                np.testing.assert_allclose(room.astype(np.float64), array.astype(np.float64), 1e-3, 1e-3)
    assert all("has no" in text or "never in memory" in text for text in said)
