"""Control flow runs on the reference device, prints, and refuses regions that don't fit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rlx.backends.reference import run_graph
from rlx.errors import DTypeError, ExecutionError, ShapeError
from rlx.ir.fingerprint import graphs_equal
from rlx.ir.graph import Array, Graph, Value
from rlx.ir.shape import Dim, Size
from rlx.ir.text import constants_table, parse_graph, print_graph
from rlx.ir.verify import verify
from rlx.ops.control import If, Scan, While
from rlx.ops.elementwise import Add, Cast, Less, Mul, Neg
from rlx.ops.index import Gather
from rlx.ops.reduction import ReduceSum

N = Dim("n", 0, 9)


def region(name: str, values: list[tuple[tuple[Size, ...], str]], body: Callable[..., list[Value]]) -> Graph:
    """A closed graph with these inputs, whose body gives its results."""
    g = Graph(name)
    made = body(g, *(g.input(f"a{i}", shape, dtype) for i, (shape, dtype) in enumerate(values)))
    for i, value in enumerate(made):
        g.output(value, f"r{i}")
    return g


def run(graph: Graph, **inputs: Array) -> dict[str, Array]:
    """Runs a graph that verifies and survives its text form."""
    verify(graph)
    back = parse_graph(print_graph(graph), constants_table(graph))
    assert graphs_equal(graph, back)
    return run_graph(back, inputs)


def test_if_runs_one_branch() -> None:
    """Only the chosen branch runs: the other would index out of range."""
    g = Graph()
    cond, x, i = g.input("cond", (), "bool"), g.input("x", (N,)), g.input("i", (), "i64")
    types: list[tuple[tuple[Size, ...], str]] = [((N,), "f32"), ((), "i64")]
    then = region("then", types, lambda h, x, i: [h.add(Gather(0), x, i)[0]])
    other = region("other", types, lambda h, x, i: [h.add(ReduceSum(None, False), x)[0]])
    g.output(g.add(If(), cond, x, i, regions=[then, other])[0], "y")
    x_ = np.array([1, 2, 4], np.float32)
    assert run(g, cond=np.array(True), x=x_, i=np.array(1))["y"] == 2
    assert run(g, cond=np.array(False), x=x_, i=np.array(7))["y"] == 7
    with pytest.raises(ExecutionError, match=r"node if .*node gather"):
        run(g, cond=np.array(True), x=x_, i=np.array(7))


def double_until(limit: float) -> Graph:
    """while x < limit: x, count = x + x, count + 1"""
    g = Graph()
    x, count, most = g.input("x", ()), g.constant(0), g.constant(limit)
    types: list[tuple[tuple[Size, ...], str]] = [((), "f32"), ((), "i64"), ((), "f32")]
    cond = region("cond", types, lambda h, x, _, most: [h.add(Less(), x, most)[0]])
    body = region("body", types, lambda h, x, c, _: [h.add(Add(), x, x)[0], h.add(Add(), c, h.constant(1))[0]])
    for name, value in zip(("x", "count"), g.add(While(2), x, count, most, regions=[cond, body]), strict=True):
        g.output(value, name)
    return g


@pytest.mark.parametrize("start, rounds", [(100.0, 0), (99.0, 1), (1.0, 7), (0.5, 8)])
def test_while_depends_on_data(start: float, rounds: int) -> None:
    """The number of rounds, none included, is decided by the data."""
    got = run(double_until(100.0), x=np.array(start, np.float32))
    assert got["count"] == rounds
    assert got["x"] == np.float32(start * 2**rounds)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_scan_stacks_rows(reverse: bool, length: int) -> None:
    """A running sum scaled by a captured value: last carry, and each partial sum at the place of its row."""
    g = Graph()
    start, rows, scale = g.input("start", (2,)), g.input("rows", (N, 2)), g.input("scale", ())
    types: list[tuple[tuple[Size, ...], str]] = [((2,), "f32"), ((2,), "f32"), ((), "f32")]

    def step(h: Graph, total: Value, row: Value, scale: Value) -> list[Value]:
        (total,) = h.add(Add(), total, row)
        return [total, h.add(Mul(), total, scale)[0]]

    last, sums = g.add(Scan(1, 1, reverse=reverse), start, rows, scale, regions=[region("body", types, step)])
    g.output(last, "last")
    g.output(sums, "sums")
    data = np.arange(2 * length, dtype=np.float32).reshape(length, 2)
    got = run(g, start=np.ones(2, np.float32), rows=data, scale=np.array(3, np.float32))
    ordered = data[::-1] if reverse else data
    partial = 3 * (1 + np.cumsum(ordered, axis=0))
    np.testing.assert_array_equal(got["last"], 1 + data.sum(axis=0))
    np.testing.assert_array_equal(got["sums"], partial[::-1] if reverse else partial)


def test_scan_of_a_given_length() -> None:
    """Without scanned inputs the attribute says how often, also as a symbolic size."""
    g = Graph()
    x = g.input("x", (N,), "i64")
    (start,) = g.add(ReduceSum(None, False), x)
    body = region("body", [((), "i64")], lambda h, i: [h.add(Add(), i, h.constant(1))[0], i])
    last, rows = g.add(Scan(1, 0, length=N + 1), start, regions=[body])
    g.output(last, "last")
    g.output(rows, "rows")
    got = run(g, x=np.array([5, 5]))
    assert got["last"] == 13
    assert got["rows"].tolist() == [10, 11, 12]


def test_trace_sees_the_nodes_of_regions() -> None:
    """Each round of a loop is traced, innermost nodes first."""
    seen: list[str] = []
    run_graph(double_until(3.0), {"x": np.array(1, np.float32)}, trace=lambda node, _: seen.append(node.op.op_name))
    assert seen == ["less", "add", "add", "less", "add", "add", "less", "while"]


def _same(h: Graph, *values: Value) -> list[Value]:
    return list(values)


def _flag(h: Graph, *values: Value) -> list[Value]:
    return [h.constant(True)]


X = ((3,), "f32")


@pytest.mark.parametrize(
    "build, kind, message",
    [
        (lambda g, x: (If(), [g.constant(1.0), x], []), ShapeError, "if: takes 2 regions, 0 given"),
        (
            lambda g, x: (If(), [g.constant(1.0)], [region("a", [], _same), region("b", [], _same)]),
            DTypeError,
            r"if: the condition: expected bool\[\], got f32\[\]",
        ),
        (
            lambda g, x: (If(), [g.constant([True])], [region("a", [], _same), region("b", [], _same)]),
            ShapeError,
            r"expected bool\[\], got bool\[1\]",
        ),
        (
            lambda g, x: (If(), [g.constant(True), x], [region("a", [X], _same), region("b", [], _same)]),
            ShapeError,
            r"region 'b' takes \(\), it would be given \(f32\[3\]\)",
        ),
        (
            lambda g, x: (If(), [g.constant(True), x], [region("a", [X], _same), region("b", [X], _flag)]),
            ShapeError,
            "the branches give",
        ),
        (
            lambda g, x: (While(1), [x], [region("c", [X], _same), region("b", [X], _same)]),
            DTypeError,
            "while: the condition",
        ),
        (
            lambda g, x: (While(1), [x], [region("c", [X], _flag), region("b", [X], _flag)]),
            ShapeError,
            "while: the body gives",
        ),
        (lambda g, x: (While(3), [x], []), ShapeError, "takes 3 or more inputs, 1 given"),
        (lambda g, x: (Scan(0, 1), [g.constant(1.0)], [region("b", [], _same)]), ShapeError, "needs an axis"),
        (lambda g, x: (Scan(1, 0), [x], [region("b", [X], _same)]), ShapeError, "'length' is needed"),
        (lambda g, x: (Scan(1, 0, -1), [x], [region("b", [X], _same)]), ShapeError, "can't be negative"),
        (lambda g, x: (Scan(1, 0, 2), [x], [region("b", [X], _flag)]), ShapeError, "scan: the body gives"),
        (
            lambda g, x: (Scan(0, 1, 4), [x], [region("b", [((), "f32")], _same)]),
            ShapeError,
            "lengths of the scanned inputs: 4 and 3 differ",
        ),
    ],
)
def test_regions_that_do_not_fit(build: Callable[..., tuple], kind: type[Exception], message: str) -> None:
    """Each mistake is an error that says what was expected and what came."""
    g = Graph()
    op, values, regions = build(g, g.input("x", (3,)))
    with pytest.raises(kind, match=message):
        g.add(op, *values, regions=regions)


def test_types_need_regions() -> None:
    """`infer` on types alone says what to use; the cost of the node itself is what it reads."""
    g = Graph()
    x = g.input("x", (3,))
    with pytest.raises(ShapeError, match="follow from the regions"):
        If().infer(x.type)
    assert If().work(x.type).read == 12
    assert g.add(Cast(x.dtype), g.add(Neg(), x)[0])[0].type == x.type
