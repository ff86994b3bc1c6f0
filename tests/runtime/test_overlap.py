"""Arrays of the caller that lie in memory of the run: outputs there are refused, inputs there are read as they were."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import OptionError
from rlx.ir.graph import Array
from rlx.ir.shape import Dim

F32 = np.float32


def network(n: int | Dim = 40) -> rlx.CompiledGraph:
    """Several values that share the arena, a state that is updated in place, and results in its parts."""
    g = rlx.Graph("network")
    a, b, s = g.input("a", (n, 8)), g.input("b", (n, 8)), g.state("s", (8,))
    x = rlx.softmax(a * 2.0 + b)
    y = rlx.sum(x * a, axis=1, keepdims=True) + b
    t = rlx.tanh(y @ rlx.transpose(x, (1, 0))) @ a
    for name, value in (("x", x), ("y", y), ("t", t), ("u", t + y), ("half", t[:, :4]), ("was", s * 1.0)):
        g.output(value, name=name)
    g.update(s, s + rlx.sum(t, axis=0) * 0.01)
    return rlx.compile(g, device="cpu", threads=1)


def given(n: int, seed: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((n, 8)).astype(F32) for _ in range(2)]


def writable(memory: memoryview | Array) -> Array:
    """An array over the same memory that can be written, by whatever means."""
    shown = np.frombuffer(memory, np.uint8) if isinstance(memory, memoryview) else memory
    raw = (ctypes.c_uint8 * shown.nbytes).from_address(shown.ctypes.data)
    return np.frombuffer(raw, np.uint8)


def test_the_arena_is_read_only() -> None:
    model = network()
    model.run(given(40, 0))
    assert model.arena.readonly
    shown = np.frombuffer(model.arena, np.uint8)
    with pytest.raises(ValueError, match=r"read-only|WRITEABLE"):
        shown[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        shown.flags.writeable = True
    with pytest.raises(OptionError, match="read-only"):
        model.run(given(40, 0), out={"u": shown[: 40 * 8 * 4].view(F32).reshape(40, 8)})


def test_outputs_in_the_arena_are_refused() -> None:
    """At every place of it, for every output; and results are right afterwards."""
    model = network()
    inputs = given(40, 0)
    model.run_views(inputs)
    arena = writable(model.arena)
    size = 40 * 8 * 4
    for start in range(0, len(arena) - size, size // 2):
        for name in ("x", "y", "t", "u"):
            target = arena[start : start + size].view(F32).reshape(40, 8)
            with pytest.raises(OptionError, match=f"out for '{name}'.*arena of the graph itself"):
                model.run(inputs, out={name: target})
    model.states["s"].reset()
    fresh = network().run(inputs)
    for made, want in zip(model.run(inputs), fresh, strict=True):
        np.testing.assert_array_equal(made, want)


def test_outputs_in_a_state_are_refused() -> None:
    """The views of an output that is fed to a state are its memory."""
    g = rlx.Graph("fed")
    x, s = g.input("x", (64,)), g.state("s", (64,))
    g.output(x + s, name="y")
    g.output(x * s, name="z")
    model = rlx.compile(g, device="cpu")
    model.states["s"].feed("y")
    x_now = np.arange(64, dtype=F32)
    for turn in range(3):  # either memory of the pair
        view = model.run_views([x_now])["y"]
        target = writable(view).view(F32)
        with pytest.raises(OptionError, match=r"out for 'z'.*state 's'"):
            model.run([x_now], out={"z": target})
        np.testing.assert_array_equal(model.states["s"].read(), x_now * (turn + 1))


@pytest.mark.parametrize("n", [40, Dim("n", 1, 64), Dim("n")])
def test_results_may_be_inputs_of_the_next_run(n: int | Dim) -> None:
    """Views of the last run, whole and in part, by every call: as with copies of them."""
    calls: list[Callable[[Any, list[Array]], list[Array]]] = [
        lambda model, x: [np.array(a) for a in model.run_slots(*x)],
        lambda model, x: [np.array(a) for a in model.run_views({"a": x[0], "b": x[1]})],
        lambda model, x: model.run(x),
        lambda model, x: model.run(x, outputs=["t", "u", "was"]),
        lambda model, x: model.run(x, out={"t": np.empty_like(x[0]), "x": np.empty_like(x[0])}),
        lambda model, x: model.submit(x).result(),
    ]
    model, copied = network(n), network(n)
    for names in (("x", "y"), ("u", "u"), ("t", "x"), ("y", "t")):
        for call in calls:
            views = model.run_views(given(40, 1))
            first, second = (views[name] for name in names)
            copies = [np.array(first), np.array(second)]
            copied.run_views(given(40, 1))
            for made, want in zip(call(model, [first, second]), call(copied, copies), strict=True):
                np.testing.assert_array_equal(made, want)


def test_results_may_be_inputs_of_a_larger_run() -> None:
    """The arena moves: what the views show is still there."""
    model, copied = network(Dim("n")), network(Dim("n"))
    views = model.run_views(given(4, 2))
    a = np.tile(np.array(views["t"]), (500, 1))
    copied.run_views(given(4, 2))
    large = np.lib.stride_tricks.as_strided(views["t"], (500, 4, 8), (0, 32, 4)).reshape(2000, 8)
    for made, want in zip(model.run([large, a]), copied.run([a, a]), strict=True):
        np.testing.assert_array_equal(made, want)
    small = model.run_views(given(4, 2))
    copied.run_views(given(4, 2))
    again = [np.array(small["t"]), np.array(small["u"])]
    for made, want in zip(model.run([small["t"], small["u"]]), copied.run(again), strict=True):
        np.testing.assert_array_equal(made, want)


def test_views_of_fed_outputs_may_be_inputs() -> None:
    """They lie where the state is read, while the next value is made in other memory."""

    def build() -> rlx.CompiledGraph:
        g = rlx.Graph("fed")
        x, s = g.input("x", (64,)), g.state("s", (64,))
        g.output(x * 0.5 + s * 0.25 + 1.0, name="y")
        model = rlx.compile(g, device="cpu")
        model.states["s"].feed("y")
        return model

    model, copied = build(), build()
    view, copy = np.ones(64, F32), np.ones(64, F32)
    for _ in range(6):
        view = model.run_slots(view)[0]
        copy = np.array(copied.run_slots(copy)[0])
        np.testing.assert_array_equal(view, copy)


def test_outputs_over_inputs() -> None:
    """`out=` in an array that is an input too, or in part: the input is read before."""
    model, copied = network(), network()
    for shift in (0, 3, 8, 160):
        memory = np.zeros(2 * 320 + 200, F32)
        a, b = memory[:320].reshape(40, 8), memory[320:640].reshape(40, 8)
        a[...], b[...] = given(40, 3)
        want = copied.run([a.copy(), b.copy()])
        target = memory[shift : shift + 320].reshape(40, 8)
        model.run([a, b], out={"t": target})
        np.testing.assert_array_equal(target, want[2])
