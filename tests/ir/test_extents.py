"""Extents are read off the shapes of leaves, and what does not fit is an error that names the dim."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.errors import ExecutionError, NameNotFound, ShapeError
from rlx.ir.extents import bind_extents, bind_result, check_guards
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim, Guard, Size, evaluate

N, M = Dim("n", 1, 64), Dim("m", 8, 32, multiple=8)


def graph(*shapes: Sequence[Size]) -> Graph:
    g = Graph()
    for i, shape in enumerate(shapes):
        g.input(f"x{i}", shape)
    return g


@given(st.integers(1, 64), st.sampled_from([8, 16, 24, 32]))
def test_symbols_are_read_and_expressions_checked(n: int, m: int) -> None:
    """Any extents within the bounds come back from the shapes that they give."""
    g = graph((N, M), (N * M + 1, 3), (M // 3, N))
    extents = {"n": n, "m": m}
    shapes = {v.name: [evaluate(s, extents) for s in v.shape] for v in g.inputs}
    assert bind_extents(g, shapes) == extents
    wrong = shapes | {"x1": [n * m + 2, 3]}
    with pytest.raises(ShapeError, match=r"input 'x1': expected \(m\*n \+ 1, 3\) where m = .*, got"):
        bind_extents(g, wrong)


def test_a_linear_size_tells_its_symbol() -> None:
    """2 n + 1 = 7 gives n = 3; a remainder is an error, not a wrong extent."""
    g = graph((N * 2 + 1,), (N * 2 + 1,))
    assert bind_extents(g, {"x0": (7,), "x1": (7,)}) == {"n": 3}
    with pytest.raises(ShapeError):
        bind_extents(g, {"x0": (7,), "x1": (8,)})


@pytest.mark.parametrize(
    "shapes, kind, message",
    [
        ({"x0": (65, 8)}, ExecutionError, "input 'x0': the dim 'n' is 65, outside its bounds 1..64"),
        ({"x0": (0, 8)}, ExecutionError, "the dim 'n' is 0, outside"),
        ({"x0": (3, 12)}, ExecutionError, "the dim 'm' is 12, not a multiple of 8"),
        ({"x0": (3, 8), "x1": (4, 3)}, ShapeError, r"input 'x1': expected \(n, 3\) where n = 3, got \(4, 3\)"),
        ({"x0": (3, 8), "x1": (3, 4)}, ShapeError, "input 'x1': expected"),
        ({"x0": (3,)}, ShapeError, r"input 'x0': expected \(n, m\) \(rank 2\), got \(3,\)"),
        ({"y": (3,)}, NameNotFound, "no leaf 'y'; there are 'x0', 'x1'"),
    ],
)
def test_what_does_not_fit(shapes: dict[str, tuple[int, ...]], kind: type[Exception], message: str) -> None:
    """Each error names the leaf, the dim and the bound."""
    with pytest.raises(kind, match=message):
        bind_extents(graph((N, M), (N, 3)), shapes)


def test_guards() -> None:
    """A guard that fails says why; one whose dims are not known yet waits."""
    g = graph((N, M))
    late = Guard(Dim("found"), N, "late")
    g.guards = [Guard(N * 8, M, "matmul: the depths"), late]
    assert check_guards(g, {"n": 2, "m": 16}) == [late]
    with pytest.raises(ExecutionError, match="matmul: the depths: 8\\*n is 8 and m is 16"):
        check_guards(g, {"n": 1, "m": 16})


def test_results_bind_data_dependent_dims() -> None:
    """A result tells the dims that only data decide; beyond the bound is an error."""
    found = Dim("found", 0, 5)
    extents = {"n": 3}
    bind_result("node nonzero", (found, N), (4, 3), extents)
    assert extents == {"n": 3, "found": 4}
    with pytest.raises(ShapeError, match="found = 4"):
        bind_result("node nonzero", (found, N), (2, 3), extents)
    with pytest.raises(ExecutionError, match=r"node nonzero: the dim 'found' is 6, outside its bounds 0\.\.5"):
        bind_result("node nonzero", (found,), (6,), {})
