"""`vmap`: every op with a rule against a loop over the slices, axes, trees, and what runs as a loop."""

from __future__ import annotations

import logging
from itertools import product
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import OptionError, ShapeError
from rlx.ir.frames import Frame
from rlx.ir.graph import Graph
from rlx.ops import OPS
from rlx.ops.base import apply
from rlx.testing.cases import cases_of, covered
from rlx.testing.oracle import Case, values

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


def test_what_has_no_rule_is_a_loop_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Branches and determinants, slice by slice."""
    x = RNG.standard_normal((5, 3, 3))
    with caplog.at_level(logging.WARNING, "rlx"):
        made = rlx.vmap(lambda m: rlx.cond(m[0, 0] > 0, lambda: rlx.det(m), lambda: np.sum(m)))(x)
    assert "has no batch rule" in caplog.text
    assert np.allclose(made, [np.linalg.det(m) if m[0, 0] > 0 else m.sum() for m in x])
