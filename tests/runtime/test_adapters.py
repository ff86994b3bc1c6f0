"""LoRA adapters: equal to merged weights, several at once or by row, changed without compiling."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import DTypeError, NameNotFound, OptionError, ShapeError

Array = np.ndarray[Any, Any]
SIZES = {"up": (32, 48), "down": (48, 32)}


def numbers(*shape: int, seed: int = 0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) / 4).astype(np.float32)


WEIGHTS = {name: numbers(*shape, seed=n) for n, (name, shape) in enumerate(SIZES.items())}


def network(batch: Any = 3, weights: Mapping[str, Array] = WEIGHTS) -> Any:
    """Two products, the second with a weight that is stored transposed."""
    g = rlx.Graph("network")
    x = g.input("x", (batch, 5, 32))
    up = g.param("up", data=weights["up"])
    down = g.param("down", data=np.ascontiguousarray(weights["down"].T))
    g.output(rlx.matmul(rlx.tanh(rlx.matmul(x, up)), rlx.transpose(down, (1, 0))), "y")
    return g


def adapter(seed: int, rank: int = 4, names: tuple[str, ...] = ("up", "down")) -> dict[str, Array]:
    made = {}
    for n, name in enumerate(names):
        inputs, outputs = SIZES[name]
        made[f"{name}.lora_a"] = numbers(rank, inputs, seed=seed + n)
        made[f"{name}.lora_b"] = numbers(outputs, rank, seed=seed + n + 50)
    return made


def merged(*parts: tuple[dict[str, Array], float]) -> dict[str, Array]:
    """The weights with adapters added in."""
    made = {name: w.copy() for name, w in WEIGHTS.items()}
    for weights, scale in parts:
        for name, total in made.items():
            if f"{name}.lora_a" in weights:
                total += scale * (weights[f"{name}.lora_b"] @ weights[f"{name}.lora_a"]).T
    return made


def run_merged(x: Array, *parts: tuple[dict[str, Array], float]) -> Array:
    return rlx.compile(network(len(x), merged(*parts)), device="cpu").run({"x": x})[0]


def close(a: Array, b: Array) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


X = numbers(3, 5, 32, seed=9)


def test_an_adapter_equals_the_merged_weights() -> None:
    model = rlx.compile(rlx.lora(network(), rank=8, slots=2), device="cpu")
    plain = rlx.compile(network(), device="cpu").run({"x": X})[0]
    close(model.run({"x": X})[0], plain)
    one, two = adapter(10), adapter(20, rank=8, names=("down",))
    model.adapters.put("one", one, 0.5)
    close(model.run({"x": X})[0], run_merged(X, (one, 0.5)))
    model.adapters.put("two", two)
    close(model.run({"x": X})[0], run_merged(X, (one, 0.5), (two, 1.0)))
    model.set_adapter("two", 2.0, only=True)
    close(model.run({"x": X})[0], run_merged(X, (two, 2.0)))
    assert dict(model.adapters) == {"one": 0.0, "two": 2.0}
    model.set_adapter(None)
    close(model.run({"x": X})[0], plain)


@pytest.mark.parametrize("batch", [4, rlx.Dim("batch", 1, 8)], ids=["static", "dynamic"])
def test_three_adapters_in_one_batch(batch: Any) -> None:
    model = rlx.compile(rlx.lora(network(batch), rank=4, slots=3, rows="x"), device="cpu")
    weights = {name: adapter(seed) for name, seed in (("one", 10), ("two", 20), ("three", 30))}
    for name, parts in weights.items():
        model.adapters.put(name, parts)
    x = numbers(4, 5, 32, seed=9)
    order = ["two", None, "three", "one"]
    (y,) = model.run({"x": x, "adapter": model.adapters.rows(order)})
    for row, name in enumerate(order):
        parts = () if name is None else ((weights[name], 1.0),)
        close(y[row : row + 1], run_merged(x[row : row + 1], *parts))


def test_what_one_adapter_overflows_is_nothing_to_other_rows() -> None:
    model = rlx.compile(rlx.lora(network(), rank=4, slots=2, rows="x"), device="cpu")
    wild = adapter(10)
    wild["up.lora_a"][...] = np.inf
    model.adapters.put("wild", wild)
    plain = rlx.compile(network(), device="cpu").run({"x": X})[0]
    (y,) = model.run({"x": X, "adapter": model.adapters.rows([None, "wild", None])})
    close(y[[0, 2]], plain[[0, 2]])
    assert not np.isfinite(y[1]).any()


def test_changing_scales_neither_compiles_nor_binds_nor_packs() -> None:
    model = rlx.compile(rlx.lora(network(), rank=4, slots=2), device="cpu")
    program = model.compilation.program
    assert program is not None
    assert not [k for k in program.run if k.strategy is not None and k.strategy.packs]
    model.adapters.put("one", adapter(10))
    model.run({"x": X})
    executable: Any = model._executable
    bound, code = executable.bound, executable.shared.addresses
    packed = {b: executable.shared.memory[b].tobytes() for b in program.buffers("prepared")}
    model.set_adapter("one", 0.25)
    model.run({"x": X})
    assert executable.bound is bound
    assert packed == {b: executable.shared.memory[b].tobytes() for b in packed}
    model.adapters.put("two", adapter(20))
    close(model.run({"x": X})[0], run_merged(X, (adapter(10), 0.25), (adapter(20), 1.0)))
    assert model._executable.shared.addresses is code  # type: ignore[attr-defined]
    assert packed != {b: model._executable.shared.memory[b].tobytes() for b in packed}  # type: ignore[attr-defined]


@pytest.mark.parametrize("portable", [False, True])
def test_adapters_are_saved(portable: bool, tmp_path: Path) -> None:
    """Weights, names, slots and scales; slots that are free stay so, and more can be put."""
    model = rlx.compile(rlx.lora(network(4), rank=4, slots=3, rows="x"), device="cpu")
    weights = {name: adapter(seed) for name, seed in (("one", 10), ("two", 20), ("three", 30))}
    for name, parts in weights.items():
        model.adapters.put(name, parts)
    model.adapters.remove("two")
    model.set_adapter("three", 0.5)
    x = numbers(4, 5, 32, seed=9)
    given = {"x": x, "adapter": model.adapters.rows(["one", None, "three", "one"])}
    want = model.run(given)[0]
    model.save(tmp_path / "adapters.rlxart", portable=portable)
    again = rlx.load(tmp_path / "adapters.rlxart", device="cpu")
    assert dict(again.adapters) == {"one": 1.0, "three": 0.5}
    np.testing.assert_array_equal(again.run(given)[0], want)
    again.adapters.put("four", adapter(40))
    (y,) = again.run({"x": x, "adapter": again.adapters.rows(["four", "one", "three", None])})
    close(y[:1], run_merged(x[:1], (adapter(40), 1.0)))
    close(y[2:3], run_merged(x[2:3], (weights["three"], 0.5)))
    again.save(tmp_path / "again.rlxart", portable=portable)
    assert dict(rlx.load(tmp_path / "again.rlxart", device="cpu").adapters) == {"one": 1.0, "three": 0.5, "four": 1.0}


def test_what_lay_in_a_slot_before_is_gone() -> None:
    """An adapter in the slot of a removed one, for fewer params than that had."""
    model = rlx.compile(rlx.lora(network(), rank=4), device="cpu")
    model.adapters.put("one", adapter(10))
    model.adapters.remove("one")
    two = adapter(20, rank=2, names=("down",))
    model.adapters.put("two", two)
    close(model.run({"x": X})[0], run_merged(X, (two, 1.0)))
    fresh = model.clone(fresh=True)
    fresh.adapters.put("three", adapter(30, names=("up",)))
    close(fresh.run({"x": X})[0], run_merged(X, (adapter(30, names=("up",)), 1.0)))
    close(model.run({"x": X})[0], run_merged(X, (two, 1.0)))


def test_rows_are_those_of_adapters_alone() -> None:
    """A row in a batch of several adapters has the bits of that row with its adapter alone."""
    model = rlx.compile(rlx.lora(network(rlx.Dim("batch", 1, 8)), rank=4, slots=3, rows="x"), device="cpu")
    for name, seed in (("one", 10), ("two", 20), ("three", 30)):
        model.adapters.put(name, adapter(seed))
    order = ["three", "one", None, "two", "one"]
    x = numbers(5, 5, 32, seed=9)
    (y,) = model.run({"x": x, "adapter": model.adapters.rows(order)})
    for row, name in enumerate(order):
        alone = model.run({"x": x[row : row + 1], "adapter": model.adapters.rows([name])})[0]
        np.testing.assert_array_equal(y[row : row + 1], alone)


def test_clones_have_adapters_of_their_own() -> None:
    model = rlx.compile(rlx.lora(network(), rank=4), device="cpu")
    one = adapter(10)
    model.adapters.put("one", one)
    clone, fresh = model.clone(), model.clone(fresh=True)
    clone.set_adapter("one", 0.5)
    close(model.run({"x": X})[0], run_merged(X, (one, 1.0)))
    close(clone.run({"x": X})[0], run_merged(X, (one, 0.5)))
    close(fresh.run({"x": X})[0], run_merged(X))
    assert list(fresh.adapters) == []


def test_adapters_come_from_a_registry(tmp_path: Path) -> None:
    one = adapter(10)
    np.savez(tmp_path / "one.npz", **{f"base.{k.replace('.lora_', '.lora.')}.weight": v for k, v in one.items()})
    registry = rlx.WeightRegistry()
    names = {f"base.{{}}.lora.{letter}.weight": f"one/{{}}.lora_{letter}" for letter in "ab"}
    registry.load(tmp_path / "one.npz", names, kind="adapter")
    assert {w.kind for w in registry.values()} == {"adapter"}
    model = rlx.compile(rlx.lora(network(), rank=4), device="cpu")
    model.adapters.put("one", registry, prefix="one/")
    close(model.run({"x": X})[0], run_merged(X, (one, 1.0)))


def test_gemm_with_alpha_and_a_transposed_weight() -> None:
    def linear(w: Array) -> Any:
        g = rlx.Graph()
        g.output(rlx.gemm(g.input("x", (5, 32)), g.param("up", data=w), alpha=0.5, trans_b=True), "y")
        return g

    one = adapter(10, names=("up",))
    model = rlx.compile(rlx.lora(linear(np.ascontiguousarray(WEIGHTS["up"].T)), rank=4), device="cpu")
    model.adapters.put("one", one)
    whole = np.ascontiguousarray(merged((one, 1.0))["up"].T)
    close(model.run({"x": X[0]})[0], rlx.compile(linear(whole), device="cpu").run({"x": X[0]})[0])


def test_the_estimate_counts_room_for_adapters() -> None:
    plain = rlx.estimate(network(), device="cpu")
    roomy = rlx.estimate(rlx.lora(network(), rank=8, slots=4), device="cpu")
    room = 4 * 8 * (32 + 48) * 2 * 4 + 4 * 8 * 4
    added = roomy.weight_bytes - plain.weight_bytes + roomy.state_bytes - plain.state_bytes
    assert room <= added <= room + 16 * 4 * 8 * (32 + 48) + 64 * 8  # packed panels have 16 columns at least


def test_misuse_is_told_and_changes_nothing() -> None:
    with pytest.raises(NameNotFound, match="there are those with 'up', 'down'"):
        rlx.lora(network(), rank=4, targets="across")
    with pytest.raises(OptionError, match="rank=0"):
        rlx.lora(network(), rank=0)
    with pytest.raises(NameNotFound, match="rows='z'"):
        rlx.lora(network(), rank=4, rows="z")
    with pytest.raises(OptionError, match="already"):
        rlx.lora(rlx.lora(network(), rank=4), rank=4)
    with pytest.raises(OptionError, match=r"rlx\.lora"):
        rlx.compile(network(), device="cpu").set_adapter("one")
    model = rlx.compile(rlx.lora(network(), rank=4), device="cpu")
    good = adapter(10)
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        (adapter(10, rank=5), ShapeError, "r up to 4"),
        ({**good, "up.lora_a": good["up.lora_a"].T}, ShapeError, r"A \[r, 32\]"),
        ({**good, "up.lora_b": good["up.lora_b"].astype(np.float64)}, DTypeError, "is f32"),
        ({"up.lora_a": good["up.lora_a"]}, NameNotFound, "needs both"),
        ({"left.lora_a": good["up.lora_a"]}, NameNotFound, "no 'left.lora_a'"),
        ({}, NameNotFound, "no weights"),
        ({**good, "up.lora_b": good["up.lora_b"] * np.inf}, OptionError, "up.lora_b has NaN or inf"),
    ]
    for weights, error, message in bad:
        with pytest.raises(error, match=message):
            model.adapters.put("one", weights)
    with pytest.raises(OptionError, match="finite"):
        model.adapters.put("one", good, float("nan"))
    close(model.run({"x": X})[0], run_merged(X))
    model.adapters.put("one", good)
    with pytest.raises(OptionError, match="all 1 slots"):
        model.adapters.put("two", good)
    with pytest.raises(NameNotFound, match="there are 'one'"):
        model.set_adapter("two")
    model.adapters.remove("one")
    close(model.run({"x": X})[0], run_merged(X))
    model.adapters.put("two", good)
