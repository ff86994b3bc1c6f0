"""`cond`, `while_loop`, `fori_loop` and `scan` over Python functions run as the same loops of Python do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import rlx
from rlx.errors import DTypeError, OptionError, ShapeError

X = np.arange(24, dtype=np.float32).reshape(4, 6) / 10
W = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32) / 4


class Pair(NamedTuple):
    h: Any
    c: Any


def branches(x: Any, limit: Any) -> Any:
    """Trees out, captured values in, and a number where the other branch has an array."""
    twice = x * 2
    return rlx.cond(
        x.sum() > limit, lambda a: {"y": a @ W + twice, "n": 1}, lambda a: {"y": a - limit, "n": a[0, 0]}, x
    )


def recurrence(x: Any) -> Any:
    """A cell over the rows of x: a named tuple as carry, a closed-over weight, the outputs stacked."""

    def cell(state: Pair, row: Any) -> tuple[Pair, Any]:
        h = np.tanh(row + state.h @ W)
        c = state.c * 0.5 + h
        return Pair(h, c), {"h": h, "peak": c.max()}

    return rlx.scan(cell, Pair(np.zeros(6, np.float32), x[0] * 0), x)


def newton(x: Any) -> Any:
    """The square roots of x, by as many steps as they need."""

    def step(c: Any) -> Any:
        y, _, n = c
        new = (y + x / y) / 2
        return new, np.max(np.abs(new - y)), n + 1

    return rlx.while_loop(lambda c: (c[1] > 1e-6) & (c[2] < 50), step, (x, 1.0, 0))


def nested(x: Any, n: Any) -> Any:
    """A loop in a branch in a loop, whose innermost body reads values of every level."""

    def outer(i: Any, total: Any) -> Any:
        row = x[i]
        return rlx.cond(
            i % 2 == 0,
            lambda t: rlx.fori_loop(0, n, lambda j, u: u + row * j + total * 0, t),
            lambda t: t - i,
            total,
        )

    return rlx.fori_loop(0, x.shape[0], outer, x[0] * 0)


def expected_nested(x: Any, n: int) -> Any:
    total = x[0] * 0
    for i in range(len(x)):
        total = total + x[i] * sum(range(n)) if i % 2 == 0 else total - i
    return total


@pytest.mark.parametrize("device", ["cpu", "interp", "reference"])
def test_cond(device: str) -> None:
    f = rlx.jit(branches, device=device)
    for limit in (0.0, 100.0):
        got = f(X, limit)
        y = X @ W + X * 2 if X.sum() > limit else X - np.float32(limit)
        np.testing.assert_allclose(got["y"], y, rtol=1e-5)
        assert np.asarray(got["n"]) == (1 if X.sum() > limit else X[0, 0])
        assert got["n"].dtype == np.float32
    assert len(f.traces) == 1


@pytest.mark.parametrize("device", ["cpu", "interp", "reference"])
def test_scan(device: str) -> None:
    (h, c), rows = rlx.jit(recurrence, device=device)(X)
    want_h = want_c = np.zeros(6, np.float32)
    for t, row in enumerate(X):
        want_h = np.tanh(row + want_h @ W)
        want_c = want_c * np.float32(0.5) + want_h
        np.testing.assert_allclose(rows["h"][t], want_h, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(rows["peak"][t], want_c.max(), rtol=1e-5)
    np.testing.assert_allclose(h, want_h, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(c, want_c, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "interp", "reference"])
def test_while_loop(device: str) -> None:
    """Started by Python numbers, which take the types that the body gives them."""
    x = X + 1
    roots, error, steps = rlx.jit(newton, device=device)(x)
    np.testing.assert_allclose(roots, np.sqrt(x), rtol=1e-6)
    assert error.dtype == np.float32
    assert steps.dtype == np.int64
    assert 2 < np.asarray(steps) < 12


@pytest.mark.parametrize("device", ["cpu", "interp", "reference"])
def test_nested_loops_and_bounds_of_the_run(device: str) -> None:
    """Bounds that are values or dynamic sizes; captured values from two levels up."""
    f = rlx.jit(nested, dims={"x": ("rows", None)}, device=device)
    for rows, n in ((4, 3), (1, 0), (3, 5)):
        np.testing.assert_allclose(f(X[:rows], n), expected_nested(X[:rows], n), rtol=1e-5, atol=1e-5)
    assert len(f.traces) == 1


def test_scan_forms() -> None:
    """Backwards, by length alone, without carries, over several sequences, over none; and numbers as carries."""

    def f(x: Any) -> Any:
        back = rlx.scan(lambda c, row: (c + row, c), x[0] * 0, x, reverse=True)
        count = rlx.scan(lambda c, _: (c + 2, c * 1.0), 1, length=3)
        mapped = rlx.scan(lambda _, xs: (None, xs["a"] * xs["b"].sum()), None, {"a": x[:, 0], "b": x})
        return back, count, mapped

    (last, sums), (number, numbers), (nothing, mapped) = rlx.jit(f, device="reference")(X)
    np.testing.assert_allclose(last, X.sum(0), rtol=1e-6)
    np.testing.assert_allclose(sums, np.cumsum(X[::-1], axis=0)[::-1] - X, rtol=1e-5, atol=1e-6)
    assert (number, numbers.tolist()) == (7, [1, 3, 5])
    assert nothing is None
    np.testing.assert_allclose(mapped, X[:, 0] * X.sum(1), rtol=1e-6)
    assert rlx.jit(lambda x: rlx.fori_loop(3, 3, lambda i, c: c + x, x), device="cpu")(X).tolist() == X.tolist()


def test_a_known_condition_takes_its_branch() -> None:
    """As does Python; the other function isn't called."""
    f = rlx.jit(lambda x: rlx.cond(x.shape[0] > 3, lambda: x + 1, lambda: 1 / 0), device="reference")
    np.testing.assert_array_equal(f(X), X + 1)


def test_graphs_built_by_hand_have_loops_too() -> None:
    g = rlx.Graph()
    x = g.input("x", (3,))
    g.output(rlx.fori_loop(0, 4, lambda i, c: rlx.tanh(c) + x, x), "y")
    got = rlx.compile(g, device="reference")(x=X[0, :3])["y"]
    y = X[0, :3]
    for _ in range(4):
        y = np.tanh(y) + X[0, :3]
    np.testing.assert_allclose(got, y, rtol=1e-6)
    np.testing.assert_array_equal(x + 1 is not None, True)  # the graph is still open to more


def test_large_arrays_of_loop_bodies_are_there_once() -> None:
    """A closed-over array that several bodies use becomes one param of the graph, not a copy in each region."""
    big = np.ones((600, 600), np.float32)

    def f(x: Any) -> Any:
        y = rlx.fori_loop(0, 2, lambda i, c: c @ big, x @ big)
        return rlx.cond(y.sum() > 0, lambda: y @ big, lambda: y)

    graph = rlx.jit(f).lower(np.ones((1, 600), np.float32))
    assert [p.type.shape for p in graph.params] == [(600, 600)]
    regions = [region for node in graph.nodes for region in node.regions]
    assert regions
    assert all(c.data is not None and c.data.nbytes < 2000 for region in regions for c in region.constants)


def loop(body: Callable[..., Any], init: Any) -> Any:
    return lambda x: rlx.while_loop(lambda c: rlx.less(x.sum(), 0), lambda c: body(x, c), init)


@pytest.mark.parametrize(
    "function, kind, message",
    [
        (
            lambda x: rlx.cond(x > 0, lambda: x, lambda: x),
            OptionError,
            r"must be bool\[\], got bool\[4, 6\]; compare, and",
        ),
        (lambda x: rlx.cond(x.sum(), lambda: x, lambda: x), OptionError, r"must be bool\[\], got f32\[\]"),
        (lambda x: rlx.cond(1.5, lambda: x, lambda: x), OptionError, r"is a bool or a bool\[\] value, got 1\.5"),
        (lambda x: rlx.cond(x.sum() > 0, x, x), OptionError, r"expected two functions.*rlx\.where"),
        (
            lambda x: rlx.cond(x.sum() > 0, lambda: {"a": x}, lambda: {"b": x}),
            OptionError,
            r"result has the keys \['a'\] and \['b'\] from true_fn and false_fn",
        ),
        (
            lambda x: rlx.cond(x.sum() > 0, lambda: (x, x), lambda: (x, x[0])),
            ShapeError,
            r"result\.1 is f32\[4, 6\] from true_fn and f32\[6\] from false_fn",
        ),
        (
            lambda x: rlx.cond(x.sum() > 0, lambda: x, lambda: x.astype("f8")),
            ShapeError,
            r"result is f32\[4, 6\] from true_fn and f64\[4, 6\]",
        ),
        (
            lambda x: rlx.while_loop(
                lambda c: c["i"] < 3, lambda c: {"i": c["i"] + 1, "x": c["x"][:2]}, {"i": 0, "x": x}
            ),
            ShapeError,
            r"while_loop: carry\.x is f32\[4, 6\] before a round and f32\[2, 6\] after it: .*can't change in shape",
        ),
        (
            lambda x: rlx.fori_loop(0, 3, lambda i, c: c.astype("f8"), x),
            ShapeError,
            r"fori_loop: carry is f32\[4, 6\] before a round and f64\[4, 6\] after it: .*astype\('f32'\)",
        ),
        (
            lambda x: rlx.fori_loop(0, 3, lambda i, c: (c, c), x),
            OptionError,
            "carry is an array and a tuple before and after",
        ),
        (
            lambda x: rlx.while_loop(lambda c: c, lambda c: c, x),
            ShapeError,
            r"cond_fun must return one bool\[\], got f32",
        ),
        (lambda x: rlx.fori_loop(0.5, 3, lambda i, c: c, x), OptionError, "bounds are ints, sizes or integer values"),
        (lambda x: rlx.scan(lambda c, r: c, x, x), OptionError, r"f must return \(carry, y\)"),
        (lambda x: rlx.scan(lambda c, r: (c, r), x, x.sum()), ShapeError, "needs an axis to go along"),
        (lambda x: rlx.scan(lambda c, r: (c, r), x), ShapeError, "give length="),
        (
            lambda x: rlx.scan(lambda c, r: (c, r), x, (x, x[:3])),
            ShapeError,
            r"xs\.1 in its first axis: 4 and 3 differ",
        ),
        (lambda x: rlx.fori_loop(0, 2, lambda i, c: "no", x), OptionError, "body: result.0 is a str"),
        (
            lambda x: rlx.fori_loop(0, 2, lambda i, c: c + np.int64(2) ** 40, x.astype("i4")),
            (ShapeError, DTypeError),
            "i64",
        ),
    ],
)
def test_errors_name_the_leaf(function: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        rlx.jit(function).lower(X)


def test_without_a_trace_it_says_where_to_call_it() -> None:
    with pytest.raises(OptionError, match=r"call it inside rlx\.jit"):
        rlx.fori_loop(0, 3, lambda i, c: c, X)
