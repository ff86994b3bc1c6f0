"""The fingerprint changes with what a graph computes, and with nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx.ir.fingerprint import fingerprint, graphs_equal
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim, Guard, Size
from rlx.ops.base import Op
from rlx.ops.elementwise import Add, Clip, Exp, Mul, Neg, Tanh


def make(
    *,
    op: Op | None = None,
    size: Size = 4,
    dtype: str = "f32",
    leaf: str = "x",
    name: str = "",
    result: str = "y",
    constant: Any = (1.0, 2.0, 3.0, 4.0),
    swap: bool = False,
    dead: bool = False,
    late: bool = False,
    source: tuple[str, ...] = (),
    initial: float = 0.0,
) -> Graph:
    """y = exp(x) + tanh(x) * c, state s := s + s; with one thing changed."""
    g = Graph(name or "g")
    x = g.input(leaf, (size,), dtype)
    s = g.state("s", (2,), initial=np.full(2, initial, np.float32))
    c = g.constant(np.array(constant), dtype)
    if late:
        (b,) = g.add(Tanh(), x, provenance=source)
        (a,) = g.add(op or Exp(), x, name=name)
    else:
        (a,) = g.add(op or Exp(), x, name=name, provenance=source)
        (b,) = g.add(Tanh(), x)
    if dead:
        g.add(Neg(), a)
        g.constant([7.0])
    (m,) = g.add(Mul(), b, c)
    (y,) = g.add(Add(), *((m, a) if swap else (a, m)))
    g.update(s, g.add(Add(), s, s)[0])
    g.output(y, result)
    return g


@pytest.mark.parametrize(
    "same",
    [{"name": "other"}, {"dead": True}, {"late": True}, {"source": ("node", "7")}, {"initial": 3.0}],
    ids=lambda d: next(iter(d)),
)
def test_what_does_not_count(same: dict[str, Any]) -> None:
    """Names of values, provenance, node order, dead nodes and initial values leave the fingerprint as it is."""
    assert fingerprint(make(**same)) == fingerprint(make())


DIFFERENT: list[dict[str, Any]] = [
    {"op": Neg()},
    {"size": Dim("n", 4, 4)},
    {"dtype": "f64"},
    {"leaf": "z"},
    {"result": "z"},
    {"constant": (1.0, 2.0, 3.0, 4.5)},
    {"constant": (1.0, 2.0, 3.0, -4.0)},
    {"swap": True},
    {"op": Clip(0.0, 1.0)},
    {"op": Clip(0.0, 2.0)},
    {"op": Clip(-0.0, 1.0)},
]


def test_what_counts() -> None:
    """Each change of op, attribute, type, leaf, result, constant or operand order gives another fingerprint."""
    prints = [fingerprint(make(**change)) for change in [{}, *DIFFERENT]]
    assert len(set(prints)) == len(prints)
    assert all(len(p) == 64 for p in prints)


def test_bounds_of_dims_count() -> None:
    """Dims of one name with other bounds or multiples are other graphs."""
    dims = [Dim("n", 1, 8), Dim("n", 1, 9), Dim("n", 2, 8), Dim("n", 1, 8, multiple=2)]
    prints = {fingerprint(make(size=d, constant=[1.0])) for d in dims}
    assert len(prints) == len(dims)


def test_whole_floats_are_their_integers() -> None:
    """An attribute given as 1 or 1.0 is one attribute."""
    assert fingerprint(make(op=Clip(0, 1))) == fingerprint(make(op=Clip(0.0, 1.0)))


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g.nodes.reverse(),
        lambda g: setattr(g.nodes[0], "provenance", ("p",)),
        lambda g: setattr(g, "name", "h"),
        lambda g: g.guards.append(Guard(Dim("k"), 3, "why")),
        lambda g: g.output(g.inputs[0], "z"),
        lambda g: g.updates.clear(),
        lambda g: g.constant([1.0]),
        lambda g: setattr(g.nodes[0], "op", Neg()),
        lambda g: setattr(g.nodes[2], "inputs", g.nodes[2].inputs[::-1]),
        lambda g: g.constants[0].__setattr__("data", np.zeros(4, np.float32)),
    ],
)
def test_graphs_equal_sees_each_part(change: Callable[[Graph], None]) -> None:
    """Equality, which round trips are tested with, fails for a change of any part."""
    changed = make()
    assert graphs_equal(changed, make())
    change(changed)
    assert not graphs_equal(changed, make())
