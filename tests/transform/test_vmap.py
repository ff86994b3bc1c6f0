"""`vmap`: every op with a rule against a loop over the slices, axes, trees, and what runs as a loop."""

from __future__ import annotations

import logging
from itertools import product
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import CompileError, ExecutionError, NameNotFound, OptionError, ShapeError
from rlx.ir.frames import Frame
from rlx.ir.graph import Graph
from rlx.ops import OPS
from rlx.ops.base import apply
from rlx.testing.cases import cases_of, covered
from rlx.testing.derivatives import differences
from rlx.testing.oracle import Case, values
from rlx.trace.tree import leaves_of

RNG = np.random.default_rng(3)
X, W = RNG.standard_normal((3, 4)), RNG.standard_normal((4, 5))
NAMES = [n for n in sorted(OPS) if covered(n) and OPS[n].batch is not None]
SIZE = 2


def chosen(name: str) -> list[Case]:
    """One element type each, and no values that a product of them would lose."""
    plain = [c for c in cases_of(name, 3, 4) if c.leaf == "input" and not c.turned]
    floats = [c for c in plain if {o.dtype for o in c.operands} <= {"f32", "i64", "bool", "i32"}]
    return [c for c in floats if all(o.values != "any" and o.data is None and not o.encoding for o in c.operands)][:40]


def check(case: Case, batched: tuple[bool, ...]) -> None:
    """The op under vmap, over these of its operands, and slice by slice."""
    g = Graph("vmap")
    shapes = [(SIZE, *o.shape) if b else o.shape for o, b in zip(case.operands, batched, strict=True)]
    leaves = [g.input(f"x{i}", s, o.dtype) for i, (s, o) in enumerate(zip(shapes, case.operands, strict=True))]
    with Frame(g, kept=True):
        made = rlx.vmap(lambda *x: apply(case.op, *x), in_axes=tuple(0 if b else None for b in batched))(*leaves)
    for k, value in enumerate(made if isinstance(made, tuple) else (made,)):
        g.output(value, f"y{k}")
    arrays = {
        f"x{i}": values(RNG, s, o, int(o.limit))  # type: ignore[arg-type]
        for i, (s, o) in enumerate(zip(shapes, case.operands, strict=True))
    }
    found = run_graph(g, arrays)
    for row in range(SIZE):
        own = [a[row] if b else a for a, b in zip(arrays.values(), batched, strict=True)]
        expected = case.op.reference(*own)
        for k, array in enumerate(expected if isinstance(expected, tuple) else (expected,)):
            np.testing.assert_allclose(found[f"y{k}"][row], array, rtol=2e-5, atol=1e-5, err_msg=str(case))


@pytest.mark.parametrize("name", NAMES)
def test_ops_over_slices(name: str) -> None:
    """Each operand with and without the axis."""
    count = 0
    for case in chosen(name):
        for batched in product((True, False), repeat=len(case.operands)):
            if any(batched):
                check(case, batched)
                count += 1
    assert count or not chosen(name)


def test_updates_in_each_slice() -> None:
    """The rows, what they are written to, or both differ by slice, at one place or at one for each."""
    base, rows, places = RNG.standard_normal((3, 6, 2)), RNG.standard_normal((3, 2, 2)), np.array([0, 3, 1])
    for axes in product((0, None), repeat=3):
        if axes == (None, None, None):
            continue
        given = [a if axis == 0 else a[0] for a, axis in zip((base, rows, places), axes, strict=True)]
        found = rlx.vmap(lambda b, r, n: rlx.ops.dynamic_update_slice(b, r, n, axis=0), in_axes=axes)(*given)
        for k in range(3):
            b, r, n = (a[k] if axis == 0 else a for a, axis in zip(given, axes, strict=True))
            wanted = b.copy()
            wanted[n : n + 2] = r
            np.testing.assert_array_equal(found[k], wanted)


def test_composites_are_written_out() -> None:
    """An op that decomposes needs no rule."""
    q = RNG.standard_normal((2, 1, 2, 3, 4)).astype(np.float32)
    f = rlx.jit(lambda q: rlx.attention(q, q, q))
    assert np.allclose(rlx.vmap(lambda q: rlx.attention(q, q, q))(q)[1], f(q[1]), atol=1e-6)


def test_axes_and_trees() -> None:
    """An axis for each argument or leaf, shared ones, and one for the result; nested; keyword arguments."""
    assert np.allclose(rlx.vmap(lambda c, w: np.tanh(c @ w), (1, None))(X.T, W), np.tanh(X @ W))
    assert np.allclose(rlx.vmap(lambda c: c * 2, 1, 1)(X), X * 2)
    assert np.allclose(rlx.vmap(lambda p: p["a"] * p["b"], ({"a": 0, "b": None},))({"a": X, "b": X[0]}), X * X[0])
    outer = rlx.vmap(lambda a: rlx.vmap(lambda b: np.sum(a * b))(W.T))(X)
    assert np.allclose(outer, X @ W)
    same = rlx.vmap(lambda x: (x, W), out_axes=(0, None))(X)
    assert same[1].shape == W.shape
    with pytest.raises(ShapeError, match="in axis 0 and those before it"):
        rlx.vmap(lambda a, b: (a, b))(X, W)
    with pytest.raises(OptionError, match="every argument is shared"):
        rlx.vmap(lambda a: a, None)(X)
    with pytest.raises(OptionError, match="out_axes is None for a result that differs"):
        rlx.vmap(lambda a: a, out_axes=None)(X)
    for place in (X.ndim, -X.ndim - 1):
        with pytest.raises(ShapeError, match=f"out_axes={place}: the result has the axes 0 to {X.ndim - 1}"):
            rlx.vmap(lambda a: a, out_axes=place)(X)


def test_gradients_of_slices() -> None:
    """grad of vmap, vmap of grad, and open sizes."""

    def f(r: Any) -> Any:
        return np.sum(rlx.softmax(np.tanh(r @ W)) ** 2)

    rows = np.stack([rlx.grad(f)(r) for r in X])
    assert np.allclose(rlx.vmap(rlx.grad(f))(X), rows)
    assert np.allclose(rlx.grad(lambda x: np.sum(rlx.vmap(f)(x)))(X), rows)
    g = rlx.jit(rlx.vmap(rlx.grad(f)), dims={"r": ("n", None)})
    assert np.allclose(g(X), rows)
    assert np.allclose(g(X[:1]), rows[:1])
    assert len(g.traces) == 1


@rlx.register
class Flipped(rlx.Op):
    """x backwards along its last axis, by an op that nothing else is known about."""

    def infer(self, x: Any) -> Any:
        return x

    def reference(self, x: Any) -> Any:
        return x[..., ::-1].copy()


def test_what_has_no_rule_is_a_loop_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Slice by slice."""
    x = RNG.standard_normal((5, 3))
    with caplog.at_level(logging.WARNING, "rlx"):
        made = rlx.vmap(lambda m: apply(Flipped(), m) * m)(x)
    assert "flipped" in caplog.text
    assert "has no batch rule" in caplog.text
    assert np.allclose(made, x[:, ::-1] * x)


SQUARE = RNG.standard_normal((3, 3))


def total(x: Any) -> Any:
    return rlx.reduce_sum(x, keepdims=False)


def inner_scan(x: Any) -> Any:
    def step(c: Any, r: Any) -> Any:
        chosen = rlx.cond(r[0] + c[0] > 0, lambda: c * r, lambda: c - r)
        return chosen, rlx.scan(lambda d, q: (d * q, d), r[1], c)[1]

    return rlx.scan(step, x, SQUARE)


def checkpointed(x: Any) -> Any:
    step = rlx.checkpoint(lambda c: np.tanh(c @ SQUARE))
    return total(rlx.scan(lambda c, r: (step(c) * r, c), x, SQUARE)[0])


CONTROL: dict[str, Any] = {
    "scan": lambda x: rlx.scan(lambda c, r: (np.sin(c @ SQUARE) * r + x, c * r), x * 0.5, x),
    "scan of what is shared": lambda x: rlx.scan(lambda c, r: (c + 1.0, (c * r, total(x))), 0.0, SQUARE),
    "branches for all": lambda x: rlx.cond(total(SQUARE) > 0, lambda: x * 2, lambda: x * x),
    "branches for each": lambda x: rlx.cond(x[0] > 0, lambda: (x * 2, SQUARE), lambda: (np.exp(x), SQUARE * x)),
    "while for each": lambda x: rlx.while_loop(
        lambda c: total(c[0] * c[0]) < 100, lambda c: (c[0] * 1.5 + 0.1, c[1] + 1), (x, 0)
    ),
    "while for all": lambda x: rlx.while_loop(lambda c: c[1] < 4, lambda c: (c[0] * 1.5 + x, c[1] + 1), (SQUARE[0], 0)),
    "counted": lambda x: rlx.fori_loop(0, 4, lambda i, c: np.tanh(c @ SQUARE) + i, x),
    "one in another": inner_scan,
    "gradient": rlx.grad(lambda x: total(rlx.scan(lambda c, r: (np.sin(c) * r + x, c * r), x * 0.5, SQUARE)[1])),
    "gradient of branches": rlx.grad(lambda x: total(rlx.cond(x[0] > 0, lambda: x**3, lambda: np.exp(x)))),
    "gradient of a checkpoint": rlx.grad(checkpointed),
}


@pytest.mark.parametrize("name", CONTROL)
def test_control_flow(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each slice has what it has by itself, and nothing runs slice by slice."""
    f, x = CONTROL[name], RNG.standard_normal((5, 3))
    with caplog.at_level(logging.WARNING, "rlx"):
        made = [v for _, v in leaves_of(rlx.vmap(f)(x), "")]
    assert "no batch rule" not in caplog.text
    run = rlx.jit(f)
    for i, row in enumerate(x):
        for found, (_, wanted) in zip(made, leaves_of(run(row), ""), strict=True):
            np.testing.assert_allclose(found[i], wanted, rtol=1e-12)


@pytest.mark.parametrize("device", ["reference", "cpu", "interp"])
def test_sizes_that_the_data_of_slices_decide(device: str) -> None:
    """What takes such a size comes after what decides it; slices of other sizes than the first are refused."""

    def loss(x: Any) -> Any:
        made = rlx.ops.arange(x[0], x[0] + x[1], x[0] * 0 + 1, count=rlx.Dim("some", 0, 16))
        return rlx.ops.reduce_sum(made * made, keepdims=False)

    sums, gradients = (rlx.jit(rlx.vmap(f), device=device) for f in (loss, rlx.grad(loss)))
    for counts in ((3, 3), (3, 5), (4, 4), (5, 4), (0, 2), (0, 0), (2, 2)):
        x = np.array([[1.5, counts[0]], [2.5, counts[1]]], np.float32)
        if counts[0] != counts[1]:
            for run in (sums, gradients):
                with pytest.raises(ExecutionError, match="rows that are stacked, also those that the slices of a vmap"):
                    run(x)
            continue
        rows = x[:, :1] + np.arange(counts[0])
        np.testing.assert_allclose(np.asarray(sums(x)), (rows**2).sum(1), rtol=1e-6)
        np.testing.assert_allclose(np.asarray(gradients(x))[:, 0], 2 * rows.sum(1), rtol=1e-6)


@pytest.mark.parametrize("device", ["reference", "cpu", "interp"])
def test_rows_of_a_loop_have_one_size(device: str) -> None:
    """Rows of other sizes than those of the round before are refused, and the next run is right."""

    def body(carry: Any, row: Any) -> Any:
        return carry, rlx.ops.arange(row * 0, row, row * 0 + 1, count=rlx.Dim("some", 0, 16))

    run = rlx.jit(lambda x: rlx.scan(body, x[0], x)[1], device=device)
    for counts in ((2, 2, 2), (2, 2, 3), (4, 4, 4), (4, 0, 4), (1, 1, 1)):
        x = np.array(counts, np.float32)
        if len(set(counts)) > 1:
            with pytest.raises(ExecutionError, match="have one size: pad them to one"):
                run(x)
        else:
            assert np.array_equal(np.asarray(run(x)), np.tile(np.arange(counts[0], dtype=np.float32), (3, 1)))


@pytest.mark.parametrize("device", ["reference", "cpu", "interp"])
@pytest.mark.parametrize("kind", ["steps", "first", "both"])
def test_rows_of_one_size_from_parts_of_many(device: str, kind: str) -> None:
    """What rounds decide may change where the rows that are made of it have the same size."""

    def counted(n: Any) -> Any:
        return rlx.ops.arange(n * 0, n, n * 0 + 1, count=rlx.Dim("some", 0, 16))

    def row(n: Any) -> Any:
        if kind == "steps":
            return counted(n)[::2]
        if kind == "first":
            return counted(n)[:2]
        other = rlx.ops.arange(n * 0, 5 - n, n * 0 + 1, count=rlx.Dim("rest", 0, 16))
        return rlx.ops.concat(counted(n), other, axis=0)

    run = rlx.jit(lambda x: rlx.scan(lambda carry, n: (carry, row(n)), x[0], x)[1], device=device)
    want = {"steps": [[0, 2], [0, 2]], "first": [[0, 1], [0, 1]], "both": [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]}[kind]
    assert np.array_equal(np.asarray(run(np.array([3, 4], np.float32))), want)


@pytest.mark.parametrize("device", ["reference", "cpu", "interp"])
def test_rows_of_loops_in_loops_have_one_size(device: str) -> None:
    """As in a vmap of a vmap, whichever of the loops changes it."""

    def total(x: Any) -> Any:
        made = rlx.ops.arange(x * 0, x, x * 0 + 1, count=rlx.Dim("some", 0, 16))
        return rlx.ops.reduce_sum(made * made, keepdims=False)

    run = rlx.jit(rlx.vmap(rlx.vmap(total)), device=device)
    for counts in (
        [[3, 3], [3, 3]],
        [[3, 3], [3, 2]],
        [[3, 3], [0, 0]],
        [[0, 0], [3, 3]],
        [[2, 1], [2, 2]],
        [[4, 4], [4, 4]],
    ):
        x = np.array(counts, np.float32)
        if len(np.unique(x)) > 1:
            with pytest.raises(ExecutionError, match="have one size: pad them to one"):
                run(x)
        else:
            assert np.array_equal(np.asarray(run(x)), np.full((2, 2), (np.arange(counts[0][0]) ** 2).sum()))


def test_branches_that_their_conditions_guard() -> None:
    """What a slice does not take neither fails nor runs for ever."""
    numbers = np.array([0, 2, 7])
    taken = rlx.vmap(lambda i: rlx.cond(i < 3, lambda: rlx.ops.gather(SQUARE, i, axis=0), lambda: -SQUARE[0]))(numbers)
    assert np.array_equal(taken, [SQUARE[0], SQUARE[2], -SQUARE[0]])
    assert np.array_equal(rlx.vmap(lambda i: rlx.cond(i > 0, lambda: 14 // i, lambda: i))(numbers), [0, 7, 2])
    ends = rlx.vmap(lambda x: rlx.cond(x > 0, lambda: rlx.while_loop(lambda c: c < 10, lambda c: c * 2, x), lambda: x))(
        np.array([1.5, -1.0, 20.0])
    )
    assert np.array_equal(ends, [12, -1, 20])
    sums = rlx.vmap(
        lambda i: rlx.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + rlx.ops.gather(SQUARE[0], c[0], axis=0)), (i, 0.0)
        )[1]
    )(numbers)
    assert np.allclose(sums, [SQUARE[0].sum(), SQUARE[0][2], 0])


@rlx.custom_vjp
def both(a: Any, b: Any) -> Any:
    return a * 2, b * 2


both.defvjp(lambda a, b: ((a * 2, b * 2), None), lambda kept, cts: (100 * cts[0], 10 * cts[1]))


def test_a_rule_of_ones_own_for_slices_and_what_they_share() -> None:
    """One result differs between the slices, one does not."""

    def f(x: Any, w: Any) -> Any:
        first, second = rlx.vmap(lambda r: both(r, w))(x)
        return total(first) + total(second)

    by_x, by_w = rlx.grad(f, (0, 1))(X, X[0])
    assert np.array_equal(by_x, np.full_like(X, 100))
    assert np.array_equal(by_w, np.full_like(X[0], 10 * len(X)))


def scaled(kind: str, c: Any, inner: Any = 1.0) -> Any:
    """v * v * inner, whose derivative is said to be v * c: its rule reads c of the functions around it."""
    if kind == "vjp":
        f = rlx.custom_vjp(lambda v: v * v * inner)
        f.defvjp(lambda v: (v * v * inner, v), lambda v, ct: (ct * v * c,))
        return f
    g = rlx.custom_jvp(lambda v: v * v * inner)
    g.defjvp(lambda v, t: (v[0] * v[0] * inner, t[0] * v[0] * c))
    return g


@pytest.mark.parametrize("kind", ["vjp", "jvp"])
def test_a_rule_reads_the_slices_of_the_vmap_around_it(kind: str) -> None:
    """Slices, what is computed of them, and what all of them share, also of a vmap around that one."""
    x, w = np.arange(1.0, 4.0), np.arange(1.0, 3.0)
    assert np.allclose(rlx.vmap(lambda c, v: rlx.grad(scaled(kind, c))(v))(x, x), x * x)
    assert np.allclose(rlx.grad(lambda v: total(rlx.vmap(lambda c, a: scaled(kind, c)(a))(x, v)))(x), x * x)
    assert np.allclose(rlx.grad(lambda v: total(rlx.vmap(lambda a: scaled(kind, np.exp(a))(a))(v)))(x), x * np.exp(x))
    shared = rlx.vmap(lambda a: scaled(kind, rlx.psum(a, "i") * 2)(a), axis_name="i")
    assert np.allclose(rlx.grad(lambda v: total(shared(v)))(x), x * 2 * x.sum())
    within = rlx.vmap(lambda c: rlx.vmap(rlx.grad(scaled(kind, c)))(x))
    assert np.allclose(within(w), np.outer(w, x))
    outside = rlx.grad(lambda v: total(rlx.vmap(lambda c: rlx.vmap(scaled(kind, c, c))(v))(w)))
    assert np.allclose(outside(x), w.sum() * x)
    if kind == "jvp":
        both = rlx.jvp(lambda v: rlx.vmap(lambda c: rlx.vmap(scaled(kind, c, c))(v))(w), (x,), (x**0,))
        assert np.allclose(both[1], np.outer(w, x))


@pytest.mark.parametrize("kind", ["vjp", "jvp"])
def test_what_a_vmap_leaves_behind_is_refused(kind: str) -> None:
    """A rule that reads slices though its results are the same for all, and slices that are kept: both say why."""
    x, w = np.arange(1.0, 4.0), np.arange(1.0, 3.0)
    shared = rlx.grad(lambda v: total(rlx.vmap(lambda c: rlx.vmap(scaled(kind, c))(v))(w)))
    with pytest.raises(CompileError, match="give what the rule of a custom_vjp or custom_jvp reads to its function as"):
        shared(x)
    kept: list[Any] = []
    for leaked in (lambda a: kept.append(a) or a, lambda a: kept.append(a * 2) or a):  # type: ignore[func-returns-value]
        kept.clear()
        with pytest.raises(CompileError, match=r"of a vmap that is over\? Return what is needed later as a result"):
            rlx.jit(lambda a, f=leaked: (rlx.vmap(f)(a), kept[0] + 1))(x)


def test_names_of_axes_are_texts() -> None:
    for name in (3, [], b"i", ("i",)):
        with pytest.raises(OptionError, match=r"axis_name=.*expected a text"):
            rlx.vmap(lambda x: x, axis_name=name)  # type: ignore[arg-type]
    with pytest.raises(NameNotFound, match="axis_name=3; there is 'i'"):
        rlx.vmap(lambda x: rlx.psum(x, 3), axis_name="i")(X)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="in_axes True does not fit"):
        rlx.vmap(lambda x: x, in_axes=True)(X)


def test_sums_over_a_named_axis() -> None:
    """psum and pmean, of trees and numbers, of axes within axes, in loops, and shared results."""
    assert np.allclose(rlx.vmap(lambda x: x - rlx.pmean(x, "i"), axis_name="i")(X), X - X.mean(0))
    sums, own = rlx.vmap(
        lambda x: (rlx.psum({"x": x}, "i"), x * rlx.psum(1.0, "i")), out_axes=(None, 0), axis_name="i"
    )(X)
    assert np.allclose(sums["x"], X.sum(0))
    assert np.allclose(own, 3 * X)
    inner = rlx.vmap(lambda e: e / rlx.psum(rlx.psum(e * e, "c"), "r"), axis_name="c")
    assert np.allclose(rlx.vmap(inner, axis_name="r")(X), X / np.sum(X * X))
    apart = rlx.vmap(rlx.vmap(lambda e: e - rlx.pmean(e, "r")), axis_name="r")(X)
    assert np.allclose(apart, X - X.mean(0))
    looped = rlx.vmap(lambda x: rlx.scan(lambda c, r: (c + rlx.psum(r, "i"), None), 0.0, x)[0], axis_name="i")(X)
    assert np.allclose(looped, np.sum(X))
    ones = np.arange(1.0, 4.0)
    doubled = rlx.vmap(lambda x: rlx.while_loop(lambda c: rlx.psum(c, "i") < 100, lambda c: c * 2, x), axis_name="i")(
        ones
    )
    assert np.allclose(doubled, ones * 32)
    complex_ones = rlx.vmap(lambda x: np.imag(rlx.psum(x * 1j, "i")), axis_name="i")(X)
    assert np.allclose(complex_ones, np.broadcast_to(X.sum(0), X.shape))
    with pytest.raises(NameNotFound, match="psum: no vmap around has axis_name='j'; there is 'i'"):
        rlx.vmap(lambda x: rlx.psum(x, "j"), axis_name="i")(X)
    with pytest.raises(NameNotFound, match="there is none"):
        rlx.jit(lambda x: rlx.pmean(x, "j"))(X)


def test_gradients_of_sums_over_a_named_axis() -> None:
    """From outside by differences; from within each slice's argument counts in the results of all."""

    def f(x: Any) -> Any:
        return total(rlx.vmap(lambda r: total(r * rlx.pmean(r * r, "i")) ** 2, axis_name="i")(x))

    np.testing.assert_allclose(rlx.grad(f)(X), differences(f, X), rtol=1e-6, atol=1e-7)
    within = rlx.vmap(rlx.grad(lambda r: total(rlx.psum(r * r, "i"))), axis_name="i")(X)
    assert np.allclose(within, 2 * X * len(X))
