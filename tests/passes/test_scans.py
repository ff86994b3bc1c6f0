"""Scans that go the same way become one, and lose what nothing needs; their values stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_checks import N, checked, node_of, ops

import rlx
import rlx.ops as o
from rlx.ir.graph import Graph, Value
from rlx.ir.shape import Dim
from rlx.ir.text import parse_graph
from rlx.ir.verify import verify
from rlx.ops.control import Scan
from rlx.ops.layout import Full
from rlx.passes.cse import cse
from rlx.passes.dce import dce
from rlx.passes.join_scans import join_scans
from rlx.passes.scan_rows import scan_rows

M = Dim("m")


def start() -> tuple[Graph, Value, Value, Value]:
    """A graph with rows [n, 3], a first carry [3] and a weight [3, 3]."""
    g = Graph()
    return g, g.input("rows", (N, 3)), g.input("first", (1, 3)), g.param("w", (3, 3))


def states(carry: Any, rows: Any, w: Any, **more: Any) -> Any:
    """The last state and all states of a recurrence."""

    def body(h: Any, row: Any) -> Any:
        h = o.tanh(h @ w + row)
        return h, h

    return rlx.scan(body, carry, rows, **more)


def before(carry: Any, rows: Any, w: Any, **more: Any) -> Any:
    """Each state before its round, by a body of its own that counts rounds as well."""

    def body(both: Any, row: Any) -> Any:
        h, n = both
        made = o.identity(h) @ w
        return (o.tanh(made + row), n + 1.0), (h, made)

    return rlx.scan(body, (carry, rows[0, 0] * 0.0), rows, **more)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_scans_over_the_same_carries_become_one(turned: bool, reverse: bool) -> None:
    g, rows, first, w = start()
    made = [f(first, rows, w, reverse=reverse) for f in ((before, states) if turned else (states, before))]
    (last, all_states), ((_, rounds), (olds, products)) = reversed(made) if turned else made
    for i, value in enumerate((last, all_states, rounds, olds, products)):
        g.output(value, f"out{i}")
    after = checked(g, cse, join_scans, dce)
    scan = node_of(after, "scan")
    assert scan.op.carries == 2
    assert scan.op.reverse == reverse
    assert ops(scan.regions[0]).count("matmul") == 1


def test_what_a_joined_scan_needs_is_computed_before_it() -> None:
    g, rows, first, w = start()
    g.output(o.exp(states(first, rows, w)[1]), "a")
    scaled = o.sin(rows)  # stands after the first scan and its reader
    kept = rlx.scan(lambda h, both: (o.tanh(h @ w + both[0]), h * both[1]), first, (rows, scaled))
    g.output(kept[1], "b")
    assert ops(checked(g, cse, join_scans)).count("scan") == 1


@pytest.mark.parametrize("different", ["needs the other", "another way", "another start", "another step", "no carries"])
def test_scans_that_differ_stay_apart(different: str) -> None:
    g, rows, first, w = start()
    last, every = states(first, rows, w)
    g.output(every, "a")
    given: dict[str, Any] = {"carry": first, "rows": rows, "w": w}
    if different == "needs the other":
        given["w"] = w * last[0, 0]
    elif different == "another way":
        given["reverse"] = True
    elif different == "another start":
        given["carry"] = first + 1.0
    elif different == "another step":
        given["w"] = w + 1.0
    made = states(**given)[1] if different != "no carries" else rlx.scan(lambda _, r: (None, r * r), None, rows)[1]
    g.output(made, "b")
    assert ops(checked(g, cse, dce, join_scans)).count("scan") == 2


def test_bodies_with_branches_are_compared() -> None:
    g, rows, first, _ = start()

    def body(h: Any, row: Any) -> Any:
        return rlx.cond(row[0] > 0.0, lambda: h + row, lambda: h - row), h

    g.output(rlx.scan(body, first, rows)[1], "out")
    node = g.nodes[-1]
    made = g.add(node.op, *node.inputs, regions=node.regions)  # the same body, as a copy of a node has it
    g.output(made[0], "again")
    joined = checked(g, join_scans, dce)
    assert ops(joined).count("scan") == 1
    assert ops(node_of(joined, "scan").regions[0]).count("if") == 1


def test_a_scan_keeps_what_is_needed_of_it() -> None:
    g, rows, first, w = start()

    def body(carry: Any, row: Any) -> Any:
        h, squares, count = carry
        x, unused = row
        return (o.tanh(h + x), squares + (h @ w) ** 2, count + 1.0), (h, o.exp(unused), count)

    carry = (first, first * 0.0, rows[0, 0])
    (_, _, _), (olds, _, counts) = rlx.scan(body, carry, (rows, o.cos(rows)))
    g.output(olds, "olds")
    g.output(counts, "counts")
    after = checked(g, dce)
    scan = node_of(after, "scan")
    assert (scan.op.carries, scan.op.scanned, len(scan.inputs), len(scan.outputs)) == (2, 1, 3, 4)
    assert "cos" not in ops(after)
    assert "matmul" not in ops(scan.regions[0])


def test_a_scan_without_its_rows_keeps_its_length() -> None:
    g, rows, first, _ = start()
    last, _ = rlx.scan(lambda h, row: (h * 2.0, row + 1.0), first, rows)
    g.output(last, "last")
    scan = node_of(checked(g, dce), "scan")
    assert scan.op.scanned == 0
    assert scan.op.length == N


def test_scans_in_scans_lose_what_nothing_needs() -> None:
    g, rows, first, w = start()

    def outer(h: Any, row: Any) -> Any:
        inner, made = rlx.scan(lambda c, n: (c + row, (c @ w, n)), h, rows)
        return inner, made[1]

    g.output(rlx.scan(outer, first, rows)[1], "rows")
    after = checked(g, dce)
    scan = node_of(after, "scan")
    assert (scan.op.carries, scan.op.length, list(scan.inputs)) == (0, N, [after.inputs[0]])  # as captured


@pytest.mark.parametrize("reverse", [False, True])
def test_rows_that_are_there_already(reverse: bool) -> None:
    g, rows, first, _ = start()

    def body(h: Any, row: Any) -> Any:
        return h + row, (o.exp(h), o.identity(row), o.exp(o.identity(h)), row * 2.0)

    _, made = rlx.scan(body, first, rows, reverse=reverse)
    for i, value in enumerate(made):
        g.output(value, f"out{i}")
    after = checked(g, scan_rows, dce)
    assert len(node_of(after, "scan").outputs) == 3  # the carry, and two of four stacked results
    a, b, c, d = (out.value for out in after.outputs)
    assert a is c
    assert b is after.inputs[0]
    assert d is not a


def test_scans_of_no_rounds() -> None:
    g = Graph()
    rows, first = g.input("rows", (0, 3)), g.input("first", (3,))
    g.output(rlx.scan(lambda h, r: (h + r, h), first, rows)[0], "a")
    g.output(rlx.scan(lambda h, r: (h + r, h * r), first, rows)[1], "b")
    assert ops(checked(g, cse, join_scans, dce)) == ["scan"]
    assert np.array_equal(
        rlx.compile(g, device="cpu")(rows=np.zeros((0, 3), "f"), first=np.ones(3, "f"))["a"], [1, 1, 1]
    )


@pytest.mark.parametrize("size", [M, 4])
def test_a_scan_without_some_of_its_rows_keeps_its_length(size: Any) -> None:
    g = Graph()
    rows, others = g.input("rows", (N, 3)), g.input("others", (size, 3))  # a guard says that they are as many
    for name, read in ("a", 0), ("b", 1):
        made = rlx.scan(lambda h, r, i=read: (h + r[i], h * r[i]), g.input(f"first_{name}", (3,)), (rows, others))[1]
        g.output(o.exp(made), name)
    after = dce(g)
    verify(after)
    assert [out.value.type for out in after.outputs] == [out.value.type for out in g.outputs]
    assert [n.op.scanned for n in after.nodes if isinstance(n.op, Scan)] == [1, 1]


@pytest.mark.parametrize("turned", [False, True])
def test_scans_of_lengths_that_only_a_guard_makes_equal_stay_apart(turned: bool) -> None:
    g, rows, first, _ = start()
    four = g.input("four", (4, 1, 3))

    def longer() -> None:
        g.output(o.exp(rlx.scan(lambda h, r: (h + r[0], h * r[1]), first, (rows, four))[1]), "a")

    def shorter() -> None:
        g.output(o.exp(rlx.scan(lambda h, r: (h + r, h * 2.0), first, rows)[1]), "b")

    for make in (shorter, longer) if turned else (longer, shorter):
        make()
    after = join_scans(cse(g))
    verify(after)
    assert ops(after).count("scan") == 2


@pytest.mark.parametrize("of_first", [False, True])
def test_a_size_that_data_decide_is_known_before_the_joined_scan(of_first: bool) -> None:
    g = Graph()
    rows, first = g.input("rows", (N, 3)), g.input("first", (3,))
    last, made = rlx.scan(lambda h, r: (h + r, h * r), first, rows)
    g.output(made, "a")
    g.output(o.non_zero(last if of_first else first, count=Dim("k", 0, 3)), "places")
    ones = g.add(Full((Dim("k", 0, 3),), 1.0, rows.dtype))[0]  # reads the size alone
    g.output(rlx.scan(lambda h, r: (h + r, h * o.reduce_sum(ones)), first, rows)[1], "b")
    assert ops(checked(g, cse, join_scans)).count("scan") == (2 if of_first else 1)


def test_a_size_that_data_decide_stays_where_it_is_a_number_of_rounds() -> None:
    """No round reads the rows, which go; what decides how many there are stays."""
    g = parse_graph("""graph g {
  dim n = 0..
  input x: f32[4]
  input count: i64[]
  const zero: i64[] = [0]
  const one: i64[] = [1]
  rows: i64[n] = arange(zero, count, one, count=n)
  z: f32[4] = scan(x, rows, carries=1, scanned=1) {
    graph body {
      input v: f32[4]
      input k: i64[]
      w: f32[4] = add(v, v)
      output out0 = w
    }
  }
  output z = z
}
""")
    made = dce(g)
    assert [node.op.op_name for node in made.nodes] == ["arange", "scan"]
    (z,) = rlx.compile(made, device="reference").run([np.ones(4, np.float32), np.array(3)])
    assert np.array_equal(z, np.full(4, 8, np.float32))
