"""If, While, Loop and Scan as phases of the one native run, against the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import ExecutionError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, Value
from rlx.ir.shape import Dim, Size
from rlx.ops.control import If, Scan, While
from rlx.ops.dynamic import AsShape, Loop
from rlx.ops.elementwise import Cast
from rlx.ops.index import Gather
from rlx.ops.select import NonZero
from rlx.runtime.compiled import CompiledGraph

N = Dim("n", 0, 300)
VECTOR, SCALAR, COUNT = ((N,), "f32"), ((), "f32"), ((), "i64")
Declared = tuple[tuple[Size, ...], str]


def region(declared: Sequence[Declared], body: Callable[..., Sequence[Value]], name: str = "region") -> Graph:
    """A closed graph with inputs of these types and the results that `body(graph, *inputs)` gives."""
    g = Graph(name)
    for i, value in enumerate(body(g, *(g.input(f"a{i}", shape, dtype) for i, (shape, dtype) in enumerate(declared)))):
        g.output(value, f"r{i}")
    return g


def check(g: Graph, *feeds: dict[str, Any], threads: int = 1) -> CompiledGraph:
    """Compiles once and compares every run with the reference, by `run` and by `run_slots`."""
    model = rlx.compile(g, device="cpu", threads=threads)
    for feed in feeds:
        expected = run_graph(g, feed)
        slots = model.run_slots(*(feed[v.name] for v in g.inputs))
        for got in ([np.array(a) for a in slots], model.run(feed)):
            for name, a in zip(expected, got, strict=True):
                assert a.shape == expected[name].shape, name
                np.testing.assert_allclose(a, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
    return model


def vector(n: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def branching() -> Graph:
    g = Graph("branching")
    c, x, i = g.input("c", (), "bool"), g.input("x", (N,)), g.input("i", (), "i64")
    y = rlx.exp(x) * 2
    types: list[Declared] = [VECTOR, COUNT]
    then = region(types, lambda h, a, i: [h.add(Gather(0), a, i)[0], a])
    other = region(types, lambda h, a, i: [rlx.reduce_sum(a, axes=(0,), keepdims=False), rlx.tanh(a) - 1])
    first, second = g.add(If(), c, y, i, regions=[then, other], provenance=["branch"])
    g.output(first + 1, "first")
    g.output(second, "second")
    return g


@pytest.mark.parametrize("threads", [1, 2])
def test_the_branch_not_taken_costs_nothing(threads: int) -> None:
    """Its kernels do not run at all: it would fail, and a profile has no time for them."""
    x = vector(7)
    feeds = [{"c": np.array(c), "x": x, "i": np.array(3)} for c in (True, False, False, True)]
    model = check(branching(), *feeds, threads=threads)
    program = model.compilation.program
    assert program is not None
    parts = [k.mark.part if k.mark else "" for k in program.run]
    then = range(parts.index("if") + 1, parts.index("else"))
    other = range(parts.index("else") + 1, parts.index("end"))
    for feed in feeds[:2]:
        times = [seconds for _, _, seconds in model.profile(feed, 3)]
        ran, left = (then, other) if feed["c"] else (other, then)
        assert all(times[n] > 0 for n in ran)
        assert all(times[n] == 0 for n in left)
    bad = {"c": np.array(True), "x": x, "i": np.array(9)}
    with pytest.raises(ExecutionError, match=r"index out of range.*9"):
        model.run(bad)
    model.run(bad | {"c": np.array(False)})


def test_branches_share_a_place_in_the_arena() -> None:
    """Two branches with large buffers of their own take as much memory as one."""

    def build(branches: int) -> Graph:
        g = Graph("wide")
        c, x = g.input("c", (), "bool"), g.input("x", (64, 64))

        def heavy(h: Graph, a: Value) -> list[Value]:
            return [(a @ a) @ (a @ a)]

        def light(h: Graph, a: Value) -> list[Value]:
            return [a + 1]

        regions = [region([((64, 64), "f32")], heavy), region([((64, 64), "f32")], heavy if branches == 2 else light)]
        g.output(g.add(If(), c, x, regions=regions)[0], "y")
        return g

    one, two = (rlx.compile(build(n), device="cpu").plan for n in (1, 2))
    assert one is not None
    assert two is not None
    assert two.arena <= one.arena + 64


def counting(limit_is: str = "input") -> Graph:
    """i, x, y, z = i + 1, 2 x + i, z, y + x[0]: carries updated in place, swapped, and by what others were before."""
    g = Graph("counting")
    x, k = g.input("x", (N,)), g.input("k", (), "i64")
    zero, half = g.constant(0, dtype="i64"), g.constant(0.5)
    types: list[Declared] = [COUNT, VECTOR, SCALAR, SCALAR, COUNT, SCALAR]
    cond = region(types, lambda h, i, x, y, z, k, half: [i < k])
    body = region(
        types,
        lambda h, i, x, y, z, k, half: [
            i + 1,
            x * half + h.add(Cast(DTYPES["f32"]), i)[0],
            z,
            y + rlx.reduce_sum(x, axes=(0,), keepdims=False),
        ],
    )
    outputs = g.add(While(4), zero, x, half, g.constant(2.0), k, half, regions=[cond, body])
    for name, value in zip("ixyz", outputs, strict=True):
        g.output(value, name)
    return g


@pytest.mark.parametrize("threads", [1, 2])
def test_carries_of_a_while(threads: int) -> None:
    trips = [0, 1, 2, 3, 17]
    check(counting(), *({"x": vector(n), "k": np.array(k)} for n in (5, 300) for k in trips), threads=threads)


def test_trips_cost_phases_and_no_memory() -> None:
    """The plan knows no trip count; the walker passes the body's phases once a round."""
    model = rlx.compile(counting(), device="cpu", threads=1)
    sizes = []
    for trips in (1, 1000):
        model.run({"x": vector(300), "k": np.array(trips)})
        assert model.plan is not None
        sizes.append((model.plan.arena, len(model.arena)))
    assert sizes[0] == sizes[1]
    program = model.compilation.program
    assert program is not None
    assert len(program.run) < 30


def recurrent(reverse: bool) -> Graph:
    """A recurrent net over rows: a carry, a captured weight (packed once), rows read and written where they lie."""
    g = Graph("recurrent")
    x = g.input("x", (N, 8))
    w = g.param("w", (8, 8), data=np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32) / 4)
    start = g.constant(np.zeros((1, 8), np.float32))

    def body(h: Graph, s: Value, row: Value, w: Value) -> list[Value]:
        new = rlx.tanh(s @ w + row)
        return [new, rlx.reshape(new, (8,)), rlx.exp(row)]

    rows: list[Declared] = [((1, 8), "f32"), ((8,), "f32"), ((8, 8), "f32")]
    made = g.add(Scan(1, 1, reverse=reverse), start, x, w, regions=[region(rows, body)])
    for i, value in enumerate(made):
        g.output(value, f"y{i}")
    return g


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("reverse", [False, True])
def test_scan_over_rows(reverse: bool, threads: int) -> None:
    feeds = [{"x": np.random.default_rng(n).standard_normal((n, 8)).astype(np.float32)} for n in (0, 1, 2, 31, 0, 5)]
    model = check(recurrent(reverse), *feeds, threads=threads)
    program = model.compilation.program
    assert program is not None
    assert [k.how for k in program.prepare] == ["matmul.pack"]


def test_nested_regions() -> None:
    """A scan whose body holds a scan (over the row's elements), an If and a While, each capturing from outside."""
    m = Dim("m", 0, 40)
    g = Graph("nested")
    x, k, limit = g.input("x", (N, m)), g.input("k", (), "i64"), g.input("limit", ())

    def inner(h: Graph, total: Value, element: Value, scale: Value) -> list[Value]:
        new = total + element * scale
        return [new, new * 2]

    def halve(h: Graph, s: Value, n: Value, k: Value, limit: Value) -> list[Value]:
        types: list[Declared] = [SCALAR, COUNT, COUNT, SCALAR]
        cond = region(types, lambda h, s, n, k, limit: [n < k])
        body = region(types, lambda h, s, n, k, limit: [s * 0.5 + limit, n + 1])
        return [h.add(While(2), s, n, k, limit, regions=[cond, body])[0]]

    def outer(h: Graph, s: Value, n: Value, row: Value, k: Value, limit: Value) -> list[Value]:
        scan = region([SCALAR, SCALAR, SCALAR], inner)
        total, prefix = h.add(Scan(1, 1), h.constant(0.0), row, limit, regions=[scan])
        types: list[Declared] = [SCALAR, COUNT, COUNT, SCALAR]
        both = [region(types, halve), region(types, lambda h, s, n, k, limit: [s - 1])]
        (new,) = h.add(If(), total < limit, total + s, n * 0, k, limit, regions=both)
        return [new, n + 1, prefix, new]

    types: list[Declared] = [SCALAR, COUNT, ((m,), "f32"), COUNT, SCALAR]
    made = g.add(
        Scan(2, 1), g.constant(1.0), g.constant(0, dtype="i64"), x, k, limit, regions=[region(types, outer, "outer")]
    )
    for i, value in enumerate(made):
        g.output(value, f"y{i}")
    feeds = [
        {
            "x": np.random.default_rng(n).standard_normal((n, w)).astype(np.float32),
            "k": np.array(k),
            "limit": np.float32(1),
        }
        for n, w, k in ((3, 5, 2), (0, 4, 1), (7, 0, 0), (40, 40, 3))
    ]
    check(g, *feeds)


def collecting(bound: int | None) -> Graph:
    """Rows for as long as x < limit: how many is known only at the end."""
    g = Graph("collecting")
    x, limit = g.input("x", ()), g.input("limit", ())
    cond = region([SCALAR, SCALAR], lambda h, x, limit: [x < limit])
    body = region([SCALAR, SCALAR], lambda h, x, limit: [x + x, rlx.reshape(x, (1,)), x * 3])
    last, rows, more = g.add(Loop(1, Dim("count", 0, bound)), x, limit, regions=[cond, body], provenance=["collect"])
    g.output(last, "last")
    g.output(rows, "rows")
    g.output(more + 1, "more")
    return g


def test_a_loop_decides_how_many_rows_there_are() -> None:
    x = np.float32(1)
    feeds = [{"x": x, "limit": np.float32(limit)} for limit in (0, 1.5, 100, 7, 0, 2**15)]
    check(collecting(16), *feeds)


def test_too_many_rows_stop_the_run_before_they_are_written() -> None:
    model = rlx.compile(collecting(4), device="cpu")
    with pytest.raises(ExecutionError, match=r"'count' is 5, outside its bounds 0\.\.4"):
        model.run({"x": np.float32(1), "limit": np.float32(1000)})
    assert len(model.run({"x": np.float32(1), "limit": np.float32(16)})[1]) == 4


def test_room_grows_where_nothing_bounds_a_size() -> None:
    """128 rounds need more room than a first run has: it starts again, by `run` and by `run_slots`."""
    for call in ("run", "run_slots"):
        model = rlx.compile(collecting(None), device="cpu")
        for limit in (3.0, 1e38, 5.0):
            given = [np.float32(1e-38 if limit > 1e30 else 1), np.float32(limit)]
            expected = run_graph(model.compilation.source, dict(zip(("x", "limit"), given, strict=True)))
            got = model.run(given) if call == "run" else model.run_slots(*given)
            for a, b in zip(got, expected.values(), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6)


def test_clones_have_loops_of_their_own() -> None:
    model = rlx.compile(counting(), device="cpu", threads=1)
    other = model.clone()
    x = vector(9)
    first = model.run({"x": x, "k": np.array(5)})
    other.run({"x": x + 1, "k": np.array(50)})
    for a, b in zip(first, model.run({"x": x, "k": np.array(5)}), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_failed_round_leaves_nothing_behind() -> None:
    """An index out of range in round 3 of 5; the next run starts at round 0 again."""
    g = Graph("failing")
    x, at = g.input("x", (5, 4)), g.input("at", (5,), "i64")
    body = region([((4,), "f32"), COUNT], lambda h, row, at: [h.add(Gather(0), row, at)[0]])
    g.output(g.add(Scan(0, 2), x, at, regions=[body])[0], "y")
    model = rlx.compile(g, device="cpu")
    x_, good = np.arange(20, dtype=np.float32).reshape(5, 4), np.array([3, 2, 1, 0, 3])
    with pytest.raises(ExecutionError, match="index out of range"):
        model.run({"x": x_, "at": np.array([0, 1, 2, 7, 0])})
    np.testing.assert_array_equal(model.run({"x": x_, "at": good})[0], x_[np.arange(5), good])


def test_host_calls_and_sizes_that_data_decide_in_a_body() -> None:
    """Each round finds another number of elements that are not zero."""
    g = Graph("rounds")
    x = g.input("x", (N, 6))

    def body(h: Graph, total: Value, row: Value) -> list[Value]:
        found = h.add(NonZero(Dim("found", 0, 6)), row)[0]
        count = rlx.reduce_sum(found * 0 + 1, axes=(0, 1), keepdims=False)
        return [total + count, count]

    made = g.add(Scan(1, 1), g.constant(0, dtype="i64"), x, regions=[region([COUNT, ((6,), "f32")], body)])
    for i, value in enumerate(made):
        g.output(value, f"y{i}")
    rows = np.random.default_rng(0).integers(0, 2, (9, 6)).astype(np.float32)
    check(g, {"x": rows}, {"x": rows[:0]}, {"x": np.zeros((3, 6), np.float32)})


def test_branches_of_other_sizes() -> None:
    """The size of the result is that of the branch taken, and what follows runs at it."""
    g = Graph("sizes")
    c, x = g.input("c", (), "bool"), g.input("x", (N,))
    size = Dim("size", 0, 300)
    then = region([VECTOR], lambda h, a: [h.add(AsShape((size,)), a)[0]])
    other = region([VECTOR], lambda h, a: [h.add(AsShape((size,)), h.constant(np.arange(3, dtype=np.float32)))[0]])
    (y,) = g.add(If(), c, x, regions=[then, other])
    g.output(y, "y")
    g.output(rlx.reduce_sum(y * 2, axes=(0,), keepdims=False), "sum")
    check(g, *({"c": np.array(c), "x": vector(n)} for n in (0, 7, 13) for c in (True, False, True)))


def test_plans_of_regions_are_proved_and_shown() -> None:
    model = rlx.compile(recurrent(False), device="cpu")
    assert model.plan is not None
    model.plan.verify()
    assert "loop round" in model.explain("fuse")
    assert "scan" in model.explain("dispatch")


def test_sizes_below_0_in_a_branch_that_is_not_taken() -> None:
    """An `if` runs at extents that one of its branches has no result for, unless that one is chosen."""
    n = Dim("n", 1)
    g = Graph("small")
    c, x = g.input("c", (), "bool"), g.input("x", (1, 1, n, 4))

    def windows(h: Graph, a: Value) -> list[Value]:
        y = rlx.conv(rlx.exp(a), h.constant(np.ones((1, 1, 5, 1), np.float32)))
        return [rlx.conv(y.transpose(0, 1, 3, 2), h.constant(np.ones((1, 1, 1, 2), np.float32))).sum((0, 1, 2, 3))]

    types: list[Declared] = [((1, 1, n, 4), "f32")]
    whole = region(types, lambda h, a: [rlx.exp(a).sum((0, 1, 2, 3))], "whole")
    g.output(g.add(If(), c, x, regions=[region(types, windows, "windows"), whole])[0], "y")

    feeds = [{"c": np.array(wide), "x": np.full((1, 1, k, 4), 0.5, np.float32)} for k, wide in ((3, False), (9, True))]
    model = check(g, *feeds)
    with pytest.raises(ExecutionError, match="the window of 5 by 1 is larger than the padded axis"):
        model.run({**feeds[0], "c": np.array(True)})
    check(g, *reversed(feeds))
