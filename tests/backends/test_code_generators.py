"""Programs on every code generator against the reference: loops over parts of bytes and blocks, states, sizes of 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.encoding import encoding_named
from rlx.ir.graph import Array, Graph, Value
from rlx.ir.shape import Dim, evaluate
from rlx.kernels.affine import is_linear, linear_size_expr
from rlx.kernels.expr import SizeOf, walk
from rlx.kernels.loops.evaluate import Evaluator
from rlx.ops import control, elementwise, index, layout
from rlx.ops.scatter import ScatterNd
from rlx.ops.select import Arange

DEVICES = ("cpu", "interp")
NARROW = ("i4", "u4", "f4e2m1", "i2", "f8e4m3")


def elements(dtype: str, *shape: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    if DTYPES[dtype].bits < 8:
        return rng.integers(0, 1 << DTYPES[dtype].bits, shape).astype(np.uint8).view(DTYPES[dtype].numpy)
    return rng.integers(-9, 9, shape).astype(DTYPES[dtype].numpy)


def same(got: Any, want: Array, what: str = "") -> None:
    got = np.asarray(got)
    assert (got.dtype, got.shape) == (want.dtype, want.shape), what
    assert got.tobytes() == want.tobytes(), f"{what}: got {got}, expected {want}"


def agree(g: Graph, device: str, *feeds: dict[str, Array]) -> None:
    """Outputs and states after each run, bit by bit."""
    model, reference = rlx.compile(g, device=device), rlx.compile(g, device="reference")
    for feed in feeds:
        got, want = model(feed), reference(feed)
        for name in want:
            same(got[name], np.asarray(want[name]), name)
        for name in reference.states:
            same(model.states[name].read(), reference.states[name].read(), f"state {name}")


def body(carry: Value, row: Value, make: Callable[[Graph, Value, Value], tuple[Value, Value]]) -> Graph:
    g = Graph("body")
    results = make(g, g.input("c", carry.shape, carry.dtype), g.input("r", row.shape[1:], row.dtype))
    for number, value in enumerate(results):
        g.output(value, f"o{number}")
    return g


# ---- loops


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(7,), (7, 1), (5, 3)])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", NARROW)
def test_rows_that_begin_within_a_byte(dtype: str, reverse: bool, shape: tuple[int, ...], device: str) -> None:
    """A loop reads rows of packed params, the last one and all of them."""
    g = Graph("rows")
    w = g.param("w", shape, dtype, data=elements(dtype, *shape))
    x = g.input("x", shape[1:], dtype)
    region = body(x, w, lambda h, c, r: (r, c))
    for number, value in enumerate(g.add(control.Scan(1, 1, reverse=(0,) if reverse else ()), x, w, regions=(region,))):
        g.output(value, f"y{number}")
    agree(g, device, {"x": elements(dtype, *shape[1:], seed=1)})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("encoding", ["q8_0", "q4_0"])
def test_rows_within_a_block(encoding: str, device: str) -> None:
    """A loop reads single elements of an encoded param."""
    g = Graph("elements")
    data = encoding_named(encoding).encode(np.arange(96, dtype=np.float32))
    w, x = g.param("w", (96,), "f32", encoding=encoding, data=data), g.input("x", ())
    region = body(x, w, lambda h, c, r: (h.add(elementwise.Maximum(), c, r)[0], r))
    last, rows = g.add(control.Scan(1, 1), x, w, regions=(region,))
    g.output(last, "last")
    g.output(rows, "rows")
    agree(g, device, {"x": np.float32(5)})


def test_sizes_linear_in_a_symbol() -> None:
    """What isn't linear is computed from sizes that are, to the same number."""
    n, r, q = Dim("n", 1, None), Dim("r", 0, None), Dim("q", 0, None)
    for size in (r, n * r + 3, (r * 3 + 1) // 2, r - 2 * (r // 2), n * (r // n) + r, r * q, r * r * 5 + (n * n) // 3):
        expr = linear_size_expr(size, {"r", "q"})
        assert all(is_linear(x.size, {"r", "q"}) for x in walk(expr) if isinstance(x, SizeOf))
        for extents in ({"n": 3, "r": 7, "q": 2}, {"n": 1, "r": 0, "q": 5}):
            assert Evaluator({}, extents).over(expr, (), ()) == evaluate(size, extents), str(size)


# ---- sizes of 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["f32", "i8", "i4"])
def test_no_index_is_divided_by_a_size_of_0(dtype: str, device: str) -> None:
    """What is padded has no elements, whose places are counted modulo the size."""
    g = Graph("zero")
    n = Dim("n", 0, 9)
    x = g.input("x", (n, n), dtype)
    y = g.add(layout.Pad((0, 1, 2, 0), 1, "constant"), g.add(layout.Tile((2, 2)), x)[0])[0]
    g.output(y, "y")
    g.output(g.add(layout.Concat(0), y.reshape(-1), g.constant(elements(dtype, 3)))[0], "both")
    agree(g, device, *({"x": elements(dtype, size, size)} for size in (2, 0, 1)))


# ---- states


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["f32", *NARROW])
def test_host_calls_and_states(dtype: str, device: str) -> None:
    """Operands as they are at each run; a host call's result is the new state, and an output shows the old one."""
    g = Graph("calls")
    x, s, at = g.input("x", (3,), dtype), g.state("s", (3,), dtype), g.constant(np.array([[2], [0], [1]]))
    new = g.add(ScatterNd(), s, at, x)[0]
    for name, value in (("old", s), ("new", new), ("row", g.add(index.Gather(0), s, g.constant(np.array([1, -1])))[0])):
        g.output(value, name)
    g.update(s, new)
    agree(g, device, *({"x": elements(dtype, 3, seed=seed)} for seed in range(3)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["f32", *NARROW])
def test_a_state_becomes_what_prepare_made(dtype: str, device: str) -> None:
    """Of which `prepare` makes more."""
    g = Graph("prepared")
    w, s, at = (
        g.param("w", (3,), dtype, data=elements(dtype, 3)),
        g.state("s", (3,), dtype),
        g.constant([[2], [0], [1]]),
    )
    once = g.add(ScatterNd(), w, at, w)[0]
    g.output(g.add(ScatterNd(), once, at, once)[0], "twice")
    g.output(s, "old")
    g.update(s, once)
    agree(g, device, {}, {})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["f32", "i4"])
def test_any_result_of_a_node_updates_a_state(dtype: str, device: str) -> None:
    """Also the second one."""
    g = Graph("second")
    go, x, s = g.input("go", (), "bool"), g.input("x", (3,), dtype), g.state("s", (3,), dtype)
    regions = []
    for number in range(2):
        region = Graph(f"branch{number}")
        inside = [region.input(name, (3,), dtype) for name in "ab"]
        region.output(inside[number], "o")
        region.output(inside[1 - number], "p")
        regions.append(region)
    first, second = g.add(control.If(), go, s, x, regions=tuple(regions))
    g.output(first, "y")
    g.update(s, second)
    agree(g, device, *({"go": np.array(flag), "x": elements(dtype, 3, seed=flag)} for flag in (True, False, True)))


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_that_starts_again_updates_states_once(device: str) -> None:
    """It finds that it needs more room after it has updated one."""
    g = Graph("again")
    x, s = g.input("x", (), "i64"), g.state("s", (), "i64")
    new = g.add(elementwise.Add(), s, x)[0]
    g.update(s, new)
    zero, one = (g.constant(np.array(n)) for n in (0, 1))
    g.output(g.add(Arange(Dim("k", 0, None)), zero, new, one)[0], "k")
    agree(g, device, *({"x": np.array(n)} for n in (3, 40, 100, 1000)))
    model, total = rlx.compile(g, device=device), 0
    for n in (3, 3, 40, 100, 1000):
        total += n
        assert model.run_slots(np.array(n))[0].shape == (total,)
        assert np.asarray(model.states["s"].read()) == total


@pytest.mark.parametrize("device", ["reference", *DEVICES])
def test_an_array_to_write_into_that_does_not_fit(device: str) -> None:
    """It is refused before a state is updated."""
    g = Graph("out")
    n = Dim("n", 0, 9)
    x, s = g.input("x", (n,)), g.state("s", ())
    new = g.add(elementwise.Add(), s, g.constant(np.float32(1)))[0]
    g.update(s, new)
    g.output(g.add(elementwise.Add(), x, new)[0], "y")
    model = rlx.compile(g, device=device)
    for wrong in ((3,), (2, 1), ()):
        with pytest.raises(ShapeError, match="'y'"):
            model.run({"x": np.ones(2, np.float32)}, out={"y": np.zeros(wrong, np.float32)})
    assert np.asarray(model.states["s"].read()) == 0
    same(model(x=np.ones(2, np.float32))["y"], run_graph(g, {"x": np.ones(2, np.float32)})["y"])
