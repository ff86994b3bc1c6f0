"""Experts at run time: any choice of resident ones gives the same bits, less memory, and counts of what was fetched."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fresh_process import in_fresh_process

import rlx
from rlx.errors import BusyError, MemoryDeficit, OptionError, ShapeError
from rlx.estimate.resident import resident_bytes
from rlx.runtime import writing

HIDDEN, INNER, EXPERTS = 32, 48, 8
PANELS = 4 * (2 * HIDDEN * INNER + INNER * HIDDEN)  # bytes of an expert's: INNER and HIDDEN are whole panels
SOME = np.arange(EXPERTS) % 3 == 0


def tensors(hidden: int = HIDDEN, inner: int = INNER, layers: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"gate": (EXPERTS, hidden, inner), "up": (EXPERTS, hidden, inner), "down": (EXPERTS, inner, hidden)}
    made = {}
    for layer in range(layers):
        made |= {f"{name}{layer}": rng.standard_normal(s, dtype=np.float32) / 6 for name, s in shapes.items()}
        made[f"router{layer}"] = rng.standard_normal((hidden, EXPERTS), dtype=np.float32)
    return made


def graph(hidden: int = HIDDEN, inner: int = INNER, layers: int = 2, top_k: int = 2) -> Any:
    g = rlx.Graph("model")
    y = g.input("x", (rlx.Dim("tokens", 1, 64), hidden))
    for n in range(layers):
        router = g.param(f"router{n}", (hidden, EXPERTS))
        gate, up = (g.param(f"{name}{n}", (EXPERTS, hidden, inner)) for name in ("gate", "up"))
        down = g.param(f"down{n}", (EXPERTS, inner, hidden))
        y = y + rlx.moe(y, router, gate, up, down, top_k=top_k, name=f"layer{n}")
    g.output(y, "y")
    return g


def in_file(path: Path, arrays: dict[str, Any]) -> Path:
    header, data = {}, b""
    for name, array in arrays.items():
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64 + 56)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def mapped(path: Path, **sizes: int) -> Any:
    """The model with its weights in a file."""
    registry = rlx.WeightRegistry()
    registry.load(in_file(path, tensors(**sizes)))
    return rlx.compile(graph(**sizes), device="cpu", registry=registry)


def held(**options: Any) -> Any:
    """The model with weights of the caller's."""
    model = rlx.compile(graph(), device="cpu", **options)
    model.set_params(tensors())
    return model


def rows(count: int, seed: int = 0, hidden: int = HIDDEN) -> Any:
    return np.random.default_rng(seed).standard_normal((count, hidden), dtype=np.float32)


def test_the_entry_of_the_cache_is_written_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its writer would keep the weights of all experts for as long."""
    monkeypatch.setattr(writing, "PATIENCE", 600.0)
    model, seen = held(), []
    model._writer = writing.Writer(tmp_path / "entry", lambda: seen.append(model._executable.offloaded_bytes))
    model.set_resident_experts(SOME)
    assert seen == [0]
    assert model._executable.offloaded_bytes > 0


MASKS = [SOME, ~SOME, np.zeros(EXPERTS, np.bool_), [SOME, ~SOME], [[True] * EXPERTS, SOME], None]


@pytest.mark.sample(2)
@pytest.mark.parametrize("early", [True, False], ids=["before packing", "after"])
@pytest.mark.parametrize("file", [True, False], ids=["mapped", "held"])
def test_every_choice_gives_the_same_bits(tmp_path: Path, file: bool, early: bool) -> None:
    data = [rows(n, seed=n) for n in (1, 3, 64)]
    everything = held()
    expected = [everything(x)["y"] for x in data]
    model = mapped(tmp_path / "w.safetensors") if file else held()
    if not early:
        model(data[0])
    for mask in MASKS:
        model.set_resident_experts(mask)
        assert all(np.array_equal(model(x)["y"], y) for x, y in zip(data, expected, strict=True))


def test_params_that_are_set_later_keep_the_choice() -> None:
    model, other = held(), held()
    model.set_resident_experts(SOME)
    model(rows(3))
    new = {name: array + 1 for name, array in tensors().items()}
    for each in (model, other):
        each.set_params({"gate0": new["gate0"], "down1": new["down1"]})
    assert np.array_equal(model(rows(9))["y"], other(rows(9))["y"])
    assert model.take_expert_stats()["layer0"].misses.sum() > 0


def test_memory_falls_by_the_bytes_of_the_others(tmp_path: Path) -> None:
    model = mapped(tmp_path / "w.safetensors")
    model(rows(3))
    before, weight = model.needs.prepared, model.memory.parts["weight"]
    assert [layer.expert_bytes for layer in model.expert_layers] == [PANELS, PANELS]
    model.set_resident_experts([SOME, np.ones(EXPERTS, np.bool_)])
    gone = int((~SOME).sum()) * PANELS
    shared = model._executable.shared
    assert (
        sum(a.nbytes for b, a in shared.memory.items() if b in shared.residency.weights) == 2 * EXPERTS * PANELS - gone
    )
    assert before - model.needs.prepared == gone
    assert weight - model.memory.parts["weight"] == gone
    model.set_resident_experts(None)
    assert model.memory.parts["weight"] == weight
    assert model.needs.prepared == before


def measure_unloading(folder: str) -> int:
    """What the resident set shrinks by, in bytes, when 7 experts of 3 MiB are no longer resident."""
    model = mapped(Path(folder) / "w.safetensors", hidden=512, inner=512, layers=1)
    model(rows(3, hidden=512))
    before = resident_bytes()
    model.set_resident_experts(np.arange(EXPERTS) == 2)
    return before - resident_bytes()


def test_memory_goes_back_to_the_system(tmp_path: Path) -> None:
    gone = 7 * 3 * 512 * 512 * 4
    assert in_fresh_process(measure_unloading, str(tmp_path)) > 0.9 * gone


@pytest.mark.sample(3)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_any_type_and_any_order_of_axes(dtype: Any, transposed: bool) -> None:
    """Columns that are no whole number of panels; weights of the caller, so that panels are turned back."""
    rng = np.random.default_rng(1)
    g = rlx.Graph("grouped")
    experts = g.input("experts", (7,), "i32")
    w = rng.standard_normal((4, 19, 24) if transposed else (4, 24, 19)).astype(dtype)
    x = g.input("x", (7, 24), dtype)
    g.output(rlx.grouped_matmul(x, g.param("w", data=w), experts, transposed=transposed), "y")
    model = rlx.compile(g, device="cpu")
    inputs = {"x": rng.standard_normal((7, 24)).astype(dtype), "experts": np.int32([0, 1, 2, 3, 2, 0, -1])}
    expected = model(inputs)["y"]
    for mask in ([True, False, False, True], [False] * 4, [False, True, True, False], None):
        model.set_resident_experts(mask)
        assert np.array_equal(model(inputs)["y"], expected)


def test_a_layer_in_a_loop_runs_in_each_round() -> None:
    w = tensors(16, 16, 1)
    params = [w["router0"], w["gate0"], None, w["down0"]]
    step = rlx.jit(lambda x: rlx.fori_loop(0, 3, lambda i, c: c + rlx.moe(rlx.tanh(c), *params, top_k=2), x))
    data = rows(5, hidden=16)
    model = step.compile(data)
    model.capture_routing(4)
    (expected,) = model.run([data])
    assert [a.shape for a in model.take_routing()["moe"]] == [(5, 2)] * 3
    assert model.take_expert_stats()["moe"].tokens.sum() == 3 * 5 * 2
    model.set_resident_experts(SOME)
    assert np.array_equal(model.run([data])[0], expected)


def test_what_is_left_out_of_a_run_is_not_counted() -> None:
    w = tensors(16, 16, 1)
    g = rlx.Graph("two")
    x = g.input("x", (5, 16))
    g.output(rlx.moe(x, w["router0"], w["gate0"], w["up0"], w["down0"], top_k=1), "y")
    g.output(rlx.relu(x), "z")
    model = rlx.compile(g, device="cpu")
    for name, count in (("z", 0), ("y", 5)):
        model.run([rows(5, hidden=16)], outputs=[name])
        assert model.take_expert_stats()["moe"].tokens.sum() == count


def test_what_the_caller_gave_is_kept_as_it_was() -> None:
    """f16 weights are f32 in panels: those of experts that are not resident take half as much."""
    g = rlx.Graph("half")
    w = np.random.default_rng(0).standard_normal((4, 16, 32)).astype(np.float16)
    experts = g.input("experts", (6,), "i32")
    g.output(rlx.grouped_matmul(g.input("x", (6, 16), "f16"), g.param("w", data=w), experts), "y")
    model = rlx.compile(g, device="cpu")
    inputs = {"x": rows(6, hidden=16).astype(np.float16), "experts": np.int32([0, 1, 2, 3, 2, 0])}
    expected, before = model(inputs)["y"], model.needs.prepared
    model.set_resident_experts([True, False, False, True])
    assert before - model.needs.prepared == 2 * 16 * 32 * (4 - 2)
    assert np.array_equal(model(inputs)["y"], expected)
    (figures,) = model.take_expert_stats().values()
    assert figures.tokens.tolist() == [4, 2, 4, 2]
    assert figures.hits.tolist() == [2, 1, 1, 2]
    assert figures.misses.tolist() == [0, 1, 1, 0]
    assert figures.fetched_bytes.tolist() == [0, 2 * 16 * 32, 2 * 16 * 32, 0]


def routed(layers: int = 1) -> Any:
    """A layer whose routing is the input: the router is the identity."""
    g = rlx.Graph("routed")
    x = g.input("x", (rlx.Dim("tokens", 1, 64), EXPERTS))
    w = tensors(EXPERTS, 16, layers)
    params = [g.param(name, data=w[f"{name}0"]) for name in ("gate", "up", "down")]
    g.output(rlx.moe(x, np.eye(EXPERTS, dtype=np.float32), *params, top_k=2, name="only"), "y")
    return rlx.compile(g, device="cpu")


def towards(*pairs: tuple[int, int]) -> Any:
    """Rows that go to these experts, best first."""
    data = np.zeros((len(pairs), EXPERTS), np.float32)
    for row, (first, second) in zip(data, pairs, strict=True):
        row[first], row[second] = 2, 1
    return data


def test_counts_are_those_of_the_routing() -> None:
    model = routed()
    model.set_resident_experts(np.arange(EXPERTS) < 3)
    model(towards((0, 1), (0, 5)))
    model(towards((5, 7)))
    figures = model.take_expert_stats()["only"]
    assert figures.tokens.tolist() == [2, 1, 0, 0, 0, 2, 0, 1]
    assert figures.hits.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert figures.misses.tolist() == [0, 0, 0, 0, 0, 2, 0, 1]
    size = 3 * EXPERTS * 16 * 4
    assert figures.fetched_bytes.tolist() == [0, 0, 0, 0, 0, 2 * size, 0, size]
    assert not model.take_expert_stats()["only"].tokens.any()


def test_the_last_runs_are_captured() -> None:
    model = routed()
    model.run([towards((1, 2))])
    model.capture_routing(2)
    assert model.take_routing() == {"only": []}
    for pairs in ([(0, 1)], [(2, 3), (4, 5)], [(7, 6), (1, 0), (2, 1)]):  # of another number of tokens each
        model.run_slots(towards(*pairs))
    found = model.take_routing()["only"]
    assert [a.tolist() for a in found] == [[[2, 3], [4, 5]], [[7, 6], [1, 0], [2, 1]]]
    assert found[0].dtype == np.int64
    assert model.take_routing() == {"only": []}
    model.run([towards((3, 4))])
    assert [a.tolist() for a in model.take_routing()["only"]] == [[[3, 4]]]
    model.capture_routing(None)
    model.run([towards((3, 4))])
    assert model.take_routing() == {"only": []}


def test_clones_have_their_own() -> None:
    model = held()
    model.capture_routing(1)
    model.set_resident_experts(SOME)
    data = rows(5)
    expected = model(data)["y"]
    clone = model.clone()
    model.set_resident_experts(None)
    assert np.array_equal(clone(data)["y"], expected)
    assert np.array_equal(model(data)["y"], expected)
    assert clone.take_expert_stats()["layer0"].misses.any()  # it has kept what the other has changed
    assert model.take_expert_stats()["layer0"].tokens.sum() == 2 * 2 * len(data)
    assert len(clone.take_routing()["layer1"]) == 1
    clone.set_resident_experts(~SOME)
    clone.close()
    assert np.array_equal(model(data)["y"], expected)


def test_an_artifact_counts_and_holds_all_experts(tmp_path: Path) -> None:
    model = mapped(tmp_path / "w.safetensors")
    expected = model(rows(4))["y"]
    model.save(tmp_path / "all.rlxart")
    size = (tmp_path / "all.rlxart").stat().st_size
    model.set_resident_experts(SOME)
    with pytest.raises(OptionError, match="resident"):
        model.save(tmp_path / "some.rlxart")
    again = rlx.load(tmp_path / "all.rlxart", device="cpu")
    again.capture_routing(1)
    assert np.array_equal(again(rows(4))["y"], expected)
    assert again.take_expert_stats()["layer1"].hits.any()
    assert len(again.take_routing()["layer1"]) == 1
    with pytest.raises(OptionError, match="artifact"):
        again.set_resident_experts(SOME)
    again.set_resident_experts(None)
    assert np.array_equal(again(rows(4))["y"], expected)
    assert size < 3 * 2 * EXPERTS * PANELS  # weights are in it once


def test_more_experts_than_fit_are_refused(tmp_path: Path) -> None:
    registry = rlx.WeightRegistry()
    registry.load(in_file(tmp_path / "w.safetensors", tensors()))
    model = rlx.compile(graph(), device="cpu", registry=registry, budget="64MiB")
    model.set_resident_experts(SOME)
    expected = model(rows(3))["y"]
    fits = model.memory.predicted  # at the rows of that run
    tight = rlx.CompileOptions(budget=fits.peak_bytes - fits.overhead_bytes)
    model.memory._admission.options = tight
    with pytest.raises(MemoryDeficit):
        model.set_resident_experts(None)
    model.set_resident_experts([SOME, SOME & ~SOME])
    model.set_resident_experts(SOME)
    assert np.array_equal(model(rows(3))["y"], expected)


def test_bad_arguments_are_named() -> None:
    model = held()
    for bad, error, text in (
        ([True] * 3, ShapeError, "8 experts"),
        ([SOME] * 3, ShapeError, "each of 2 layers"),
        ([SOME, SOME[:4]], ShapeError, "layer1"),
        ([0, 3, 4, 5, 6, 7, 1, 2], OptionError, "bool"),
        (5, OptionError, "mask"),
        ("all", OptionError, "mask"),
    ):
        with pytest.raises(error, match=text):
            model.set_resident_experts(bad)
    for bad in (0, -1, 2.0, True):
        with pytest.raises(OptionError, match="number of runs"):
            model.capture_routing(bad)
    g = rlx.Graph("plain")
    g.output(rlx.relu(g.input("x", (3,))), "y")
    plain = rlx.compile(g, device="cpu")
    for call in (lambda m: m.set_resident_experts(None), lambda m: m.take_routing(), lambda m: m.take_expert_stats()):
        with pytest.raises(OptionError, match="no mixture-of-experts"):
            call(plain)
        with pytest.raises(OptionError, match="capabilities"):
            call(rlx.compile(g, device="reference"))


def test_a_running_graph_is_not_changed() -> None:
    model = held()
    model(rows(2))
    with model._executable.held():
        for call in (lambda: model.set_resident_experts(SOME), lambda: model.capture_routing(1), model.take_routing):
            with pytest.raises(BusyError):
                call()
    assert np.array_equal(model(rows(2))["y"], held()(rows(2))["y"])


def test_an_estimate_says_which_experts_fit(tmp_path: Path) -> None:
    model = mapped(tmp_path / "w.safetensors")
    predicted = model.memory.predicted
    assert predicted.experts.experts == (EXPERTS, EXPERTS)
    assert predicted.experts.expert_bytes == (PANELS, PANELS)
    plan = predicted.offload(predicted.peak_bytes - 7 * PANELS)
    assert plan.resident == (4, 4)
    model.run([rows(64)])
    tokens = [figures.tokens for figures in model.take_expert_stats().values()]
    masks = plan.masks(tokens)
    model.set_resident_experts(masks)
    assert model.memory.predicted.weight_bytes == predicted.weight_bytes - plan.offloaded_bytes
    for mask, count in zip(masks, tokens, strict=True):
        assert mask.sum() == 4
        assert count[mask].min() >= count[~mask].max()
    assert [mask.tolist() for mask in plan.masks()] == [[True] * 4 + [False] * 4] * 2
    with pytest.raises(OptionError, match="each of"):
        plan.masks(tokens[:1])
    assert held().memory.predicted.experts is None  # nothing would be given back
