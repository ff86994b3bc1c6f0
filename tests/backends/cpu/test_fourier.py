"""Fourier transforms on the CPU: every kind of length and layout against f64, errors, threads, numbers out of range."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import ShapeError
from rlx.ir.dtype import DTYPES, dtype_of
from rlx.ir.graph import Array, Graph
from rlx.ir.shape import Dim
from rlx.ops.fourier.plan import FftPlan, is_smooth, radices, unit_roots
from rlx.ops.signal import Dft

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 16, 17, 31, 32, 48, 63, 64, 67, 77, 96, 97, 121, 128, 135, 143, 160)
LONG = (1000, 1024, 1920, 2048, 2187, 2401, 1009, 3125, 4096, 4099, 2 * 1009, 65536, 65537)
LAYOUTS = (((3,), ()), ((1,), ()), ((19,), ()), ((2,), (3,)), ((2,), (21,)))  # what is before and after the axis
ERROR = {np.float32: 5e-7, np.float64: 1e-15}  # of all results together, in parts of their length
Some = Callable[[Sequence[tuple[Dft, tuple[int, ...]]], int], list[tuple[Dft, tuple[int, ...]]]]


def kinds(n: int) -> Iterator[tuple[Dft, int, int]]:
    """Transforms of length n, the elements of their operands, and their parts."""
    for inverse in (False, True):
        yield Dft(None, -2, inverse), n, 2
        yield Dft(None, -2, inverse), n, 1
        yield Dft(n, -2, inverse), n + 3, 2
        yield Dft(n, -2, inverse), max(n - 2, 1), 2
        yield Dft(n, -2, inverse), max(n // 2, 1), 1
    for have in (n, n + 5, max(n - 1, 1)):
        yield Dft(n, -2, False, True), have, 1
    for have in (n // 2 + 1, n // 2 + 3, max(n // 2 - 1, 1)):
        yield Dft(n, -2, True, True), have, 2
    yield Dft(n, -2, True, True), n // 2 + 1, 1


def cases_of(n: int) -> list[tuple[Dft, tuple[int, ...]]]:
    made = []
    for op, have, parts in kinds(n):
        for before, after in LAYOUTS if n < 1000 else LAYOUTS[:1]:
            axis = -2 - len(after)
            made.append((Dft(op.length, axis, op.inverse, op.onesided), (*before, have, *after, parts)))
    return made


def transformed(op: Dft, x: Array, threads: int = 1) -> Array:
    graph = Graph("transform")
    graph.output(graph.add(op, graph.input("x", x.shape, dtype_of(x.dtype)))[0], "y")
    model = rlx.compile(graph, device="cpu", threads=threads, cache=False)
    assert "special" in model.explain("fuse")
    return np.asarray(model.run([x])[0])


def error_of(y: Array, op: Dft, x: Array) -> float:
    expected = op.reference(x.astype(np.float64))
    assert y.shape == expected.shape
    return float(np.linalg.norm(y - expected) / max(float(np.linalg.norm(expected)), 1e-30))


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", LENGTHS + LONG)
def test_lengths(n: int, dtype: type[np.float32] | type[np.float64], some: Some) -> None:
    """Real and complex, one half of the spectrum and back, cut off and filled up, along each axis."""
    rng = np.random.default_rng(n)
    for op, shape in some(cases_of(n), 6):
        x = rng.standard_normal(shape).astype(dtype)
        y = transformed(op, x)
        assert y.dtype == dtype
        passes = 1 if is_smooth(n) else 2  # of other lengths a transform there and one back
        assert error_of(y, op, x) < passes * ERROR[dtype], (op, shape)


@pytest.mark.parametrize("shape", [(40, 400, 2), (33, 12, 2), (3, 97, 5, 2), (1, 4096, 2), (64, 30, 33, 2)])
def test_threads_change_no_bit(shape: tuple[int, ...]) -> None:
    """Results are the same for any number of threads, and of a row by itself or among others."""
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    op = Dft(None, 1)
    one = transformed(op, x)
    np.testing.assert_array_equal(one, transformed(op, x, threads=4))
    np.testing.assert_array_equal(one[:1], transformed(op, x[:1]))


@pytest.mark.parametrize("length", [12, 128])
def test_sizes_that_the_run_tells(length: int) -> None:
    """Rows, columns and elements along the axis by one compile; results have the bits of fixed sizes."""
    graph = Graph("open")
    x = graph.input("x", (Dim("rows", 0, 50), Dim("have", 1, 300), Dim("columns", 1, 40), 2))
    graph.output(graph.add(Dft(length, 1), x)[0], "y")
    model = rlx.compile(graph, device="cpu", cache=False)
    rng = np.random.default_rng(0)
    for rows, have, columns in ((3, length, 1), (1, length + 9, 20), (5, length - 3, 3), (0, 4, 4), (2, 1, 9)):
        given = rng.standard_normal((rows, have, columns, 2)).astype(np.float32)
        (got,) = model.run([given])
        expected = run_graph(graph, {"x": given})["y"]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n", [8, 100, 128, 97])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e-45])
def test_numbers_out_of_range_stay_in_their_row(n: int, value: float) -> None:
    """What one row holds reaches none of the others, and what is not finite shows in its own."""
    x = np.random.default_rng(2).standard_normal((19, n, 2)).astype(np.float32)
    clean = transformed(Dft(), x)
    x[4, n // 3, 1] = value
    y = transformed(Dft(), x)
    others = np.arange(19) != 4
    np.testing.assert_array_equal(y[others], clean[others])
    assert np.isfinite(y[4]).all() == (value == 1e-45)


def test_no_length() -> None:
    """A transform of no elements is refused when the graph is made."""
    graph = Graph("empty")
    with pytest.raises(ShapeError, match="positive"):
        graph.add(Dft(), graph.input("x", (3, 0, 2)))


def test_a_long_length_that_the_run_tells() -> None:
    """No matrix of the transform is made: that of 30,011 elements would take 14 GB."""
    graph = Graph("long")
    x = graph.input("x", (Dim("n", 2, 1 << 20), 2))
    graph.output(graph.add(Dft(), x)[0], "y")
    model = rlx.compile(graph, device="cpu", cache=False)
    rng = np.random.default_rng(0)
    for n in (2, 30_011, 65_536):
        given = rng.standard_normal((n, 2)).astype(np.float32)
        assert error_of(np.asarray(model.run([given])[0]), Dft(), given) < 1e-6


def test_factors() -> None:
    """Roots are those of f64, radices multiply to the length, and each length has a plan."""
    for n in (1, 2, 3, 7, 8, 12, 1000, 1 << 20):
        steps = np.arange(0, 3 * n, max(n // 50, 1))
        turn = 8 * np.arctan(np.longdouble(1)) * (steps % n) / n
        w = unit_roots(steps, n)
        error = np.hypot(w.real - np.cos(turn), w.imag + np.sin(turn))
        assert error.max() < 1.6e-16
    for n in range(1, 300):
        found = radices(n)
        assert (found is not None) == is_smooth(n)
        assert found is None or np.prod(found, initial=1) == n
        plan = FftPlan(n, False, 1)
        assert is_smooth(plan.size)
        assert plan.values.size == plan.total


def test_16_bit_floats_are_transformed_as_f32() -> None:
    """They have no code of their own."""
    x = np.random.default_rng(3).standard_normal((2, 30, 2)).astype(np.float16)
    assert error_of(transformed(Dft(), x), Dft(), x) < 1e-3
    assert DTYPES["f16"].numpy == transformed(Dft(), x).dtype
