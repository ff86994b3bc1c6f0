"""Where the new value of a state is made: over the old one if nothing reads that later, else through a copy.

Programs run on the interpreter in a planned arena, and on the CPU, and must give what the reference gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fusion_targets import Everything

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import ExecutionError
from rlx.ir.graph import Array, Graph, Value
from rlx.kernels.fuse import fuse
from rlx.kernels.program import Program
from rlx.passes import run_passes
from rlx.plan.order import reorder
from rlx.plan.plan import make_plan
from rlx.plan.prove import prove
from rlx.testing.program import run_program

Build = Callable[[Graph, Value, Value], None]  # given a state s [4, 6] and an input x [4, 6]


def elementwise(g: Graph, s: Value, x: Value) -> None:
    g.update(s, s * 0.5 + x)


def old_and_new(g: Graph, s: Value, x: Value) -> None:
    new = s + x
    g.update(s, new)
    g.output(s, name="before")
    g.output(s * 2.0, name="twice")
    g.output(new, name="after")
    g.output(new.sum(), name="total")


def reader_after(g: Graph, s: Value, x: Value) -> None:
    """A reader of the old value that is declared after the update, of a view of it too."""
    g.update(s, rlx.tanh(x))
    g.output(s.reshape(24) * 3.0, name="late")
    g.output(rlx.slice(s, starts=(1, 0), sizes=(1, 6), steps=(1, 1)), name="row")


def both_at_once(g: Graph, s: Value, x: Value) -> None:
    new = rlx.exp(x) + 1.0
    g.update(s, new)
    g.output(s * new.sum(axes=1, keepdims=True), name="y")


def shifted(g: Graph, s: Value, x: Value) -> None:
    kept = rlx.slice(s, starts=(1, 0), sizes=(3, 6), steps=(1, 1))
    g.update(s, rlx.concat(kept, rlx.slice(x, starts=(0, 0), sizes=(1, 6), steps=(1, 1)), axis=0))


def transposed(g: Graph, s: Value, x: Value) -> None:
    turned = s.reshape(6, 4).transpose(1, 0)
    g.update(s, turned + x)


def normalised(g: Graph, s: Value, x: Value) -> None:
    g.update(s, rlx.softmax(s + x, axis=1))


def product(g: Graph, s: Value, x: Value) -> None:
    g.update(s, x @ g.constant(np.eye(6, dtype=np.float32)[::-1] * 2) + 1.0)


def product_of_it(g: Graph, s: Value, x: Value) -> None:
    g.update(s, s @ g.constant(np.eye(6, dtype=np.float32)[::-1]) + x)


def plain_input(g: Graph, s: Value, x: Value) -> None:
    g.update(s, x)
    g.output(s, name="before")


def unchanged(g: Graph, s: Value, x: Value) -> None:
    g.update(s, s)
    g.output(s + x, name="y")


def never_updated(g: Graph, s: Value, x: Value) -> None:
    g.output(s + x, name="y")


def exchanged(g: Graph, s: Value, x: Value) -> None:
    other = g.state("other", (4, 6))
    g.update(s, other)
    g.update(other, s)
    g.output(s - other + x, name="y")


def crossed(g: Graph, s: Value, x: Value) -> None:
    """Each update reads the other's old value."""
    other = g.state("other", (4, 6))
    g.update(s, other + x)
    g.update(other, s * 2.0 + 1.0)


def one_for_two(g: Graph, s: Value, x: Value) -> None:
    other = g.state("other", (4, 6))
    new = s + rlx.exp(x) + other
    g.update(s, new)
    g.update(other, new)


def moments(g: Graph, s: Value, x: Value) -> None:
    """As an optimiser: a weight from two moments."""
    v, w = g.state("v", (4, 6)), g.state("w", (4, 6))
    m1 = s * 0.9 + x * 0.1
    v1 = v * 0.99 + x * x * 0.01
    g.update(s, m1)
    g.update(v, v1)
    g.update(w, w - m1 / (rlx.sqrt(v1) + 0.1))
    g.output(w.sum(), name="before")


def row(g: Graph, s: Value, x: Value) -> None:
    one = rlx.slice(x, starts=(0, 0), sizes=(1, 6), steps=(1, 1))
    new = rlx.dynamic_update_slice(s, rlx.tanh(one), g.constant(2), axis=0)
    g.update(s, new)
    g.output(new.sum(axes=0), name="total")
    g.output(s, name="before")


def two_rows(g: Graph, s: Value, x: Value) -> None:
    """Rows in two steps, with what lies between them asked for."""
    one = rlx.slice(x, starts=(0, 0), sizes=(1, 6), steps=(1, 1))
    first = rlx.dynamic_update_slice(s, one, g.constant(0), axis=0)
    g.output(first * 2.0, name="between")
    g.output(first, name="first")
    g.update(s, rlx.dynamic_update_slice(first, one + 1.0, g.constant(3), axis=0))


def row_of_itself(g: Graph, s: Value, x: Value) -> None:
    last = rlx.slice(s, starts=(2, 0), sizes=(2, 6), steps=(1, 1)) + 1.0
    g.update(s, rlx.dynamic_update_slice(s, last, g.constant(1), axis=0))


def row_of_a_result(g: Graph, s: Value, x: Value) -> None:
    one = rlx.slice(x, starts=(0, 0), sizes=(1, 6), steps=(1, 1))
    g.update(s, rlx.dynamic_update_slice(s * 0.5, one, g.constant(1), axis=0))


def scattered(g: Graph, s: Value, x: Value) -> None:
    one = rlx.slice(x, starts=(0, 0), sizes=(1, 6), steps=(1, 1))
    new = rlx.scatter_nd(s, g.constant(np.array([[2]])), one)
    g.update(s, new)
    g.output(new * 2.0, name="y")
    g.output(s, name="before")


IN_PLACE: list[Build] = [elementwise, old_and_new, reader_after, product, never_updated, unchanged, moments]
IN_PLACE += [crossed, row, two_rows, row_of_itself, row_of_a_result, scattered]
COPIED: dict[Build, set[str]] = {
    both_at_once: {"s"},
    shifted: {"s"},
    transposed: {"s"},
    normalised: {"s"},
    product_of_it: {"s"},
    exchanged: {"s", "other"},
    plain_input: set(),  # copied, but from where the input lies
    one_for_two: set(),  # one of the two from the other
}


def graph_of(build: Build) -> Graph:
    g = Graph(build.__name__)
    s, x = g.state("s", (4, 6), initial=np.arange(24, dtype=np.float32).reshape(4, 6)), g.input("x", (4, 6))
    build(g, s, x)
    return g


def program_of(model: rlx.CompiledGraph) -> Program:
    program = model.compilation.program
    assert program is not None
    return program


@pytest.mark.parametrize("build", [*IN_PLACE, *COPIED], ids=lambda b: b.__name__)
def test_runs_follow_each_other_as_in_the_reference(build: Build) -> None:
    """On the CPU, and kernel by kernel on the interpreter, which finds memory that is read after it is overwritten."""
    g = graph_of(build)
    model, program = rlx.compile(g, device="cpu"), fuse(run_passes(g), Everything())
    plan = make_plan(program, {})
    prove(program, plan)
    assert set(program.copied) == set(program_of(model).copied) == COPIED.get(build, set())
    assert all(program.updates[name].base is root for name, root in _roots(program).items() if name in g.updates)
    states: dict[str, Array] = {}
    ours = {v.name: v.data if v.data is not None else np.zeros((4, 6), np.float32) for v in g.states}
    rng = np.random.default_rng(1)
    for _ in range(3):
        x = rng.standard_normal((4, 6)).astype(np.float32)
        want = run_graph(g, {"x": x}, states=states)
        interpreted = run_program(program, {"x": x}, states=ours, plan=plan)
        ours |= {name: interpreted[name] for name in g.updates}
        for name, got in zip(want, model.run([x]), strict=True):
            np.testing.assert_allclose(got, want[name], rtol=1e-5, atol=1e-5, err_msg=name)
            np.testing.assert_allclose(interpreted[name], want[name], rtol=1e-5, atol=1e-5, err_msg=name)
        for name in g.updates:
            np.testing.assert_allclose(ours[name], states[name], rtol=1e-5, atol=1e-5, err_msg=name)


def _roots(program: Program) -> dict[str, Any]:
    return {b.name: b for b in program.states}


def test_a_row_update_writes_its_rows_only() -> None:
    program = program_of(rlx.compile(graph_of(row), device="cpu"))
    (write,) = [k for k in program.run if any(b.base.kind == "state" for b in k.writes())]
    assert write.bytes_written({}) == 6 * 4  # of 4 * 6 * 4
    assert not any(b.base.kind == "state" for b in write.reads())


def test_nothing_is_written_where_the_rows_do_not_fit() -> None:
    g = Graph("rows")
    s, at = g.state("s", (2, 4, 3), initial=np.full((2, 4, 3), 7, np.float32)), g.input("at", (2,), "i64")
    new = rlx.dynamic_update_slice(s, g.constant(np.zeros((2, 2, 3), np.float32)), at, axis=1)
    g.update(s, new)
    g.output(new, name="y")
    model = rlx.compile(g, device="cpu")
    for bad in ([0, 3], [-1, 0]):
        with pytest.raises(ExecutionError, match="dynamic_update_slice"):
            model.run([np.array(bad)])
    want = np.full((2, 4, 3), 7, np.float32)
    want[0, 2:4], want[1, 1:3] = 0, 0
    np.testing.assert_array_equal(model.run([np.array([2, 1])])[0], want)


def test_another_order_of_kernels_keeps_readers_before_updates() -> None:
    for build in (old_and_new, moments, two_rows):
        program = program_of(rlx.compile(graph_of(build), device="cpu"))
        moved = reorder(program, {})
        for one in (program, moved):
            spots = {b: n for n, k in enumerate(one.run) for b in k.writes() if b.base.kind == "state"}
            for number, kernel in enumerate(one.run):
                for state in (b for b in kernel.reads() if b in program.states):
                    assert all(number <= n for b, n in spots.items() if b.base is state)
