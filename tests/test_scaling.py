"""Compiling takes work in proportion to the number of nodes, counted in calls of functions."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

import rlx
from rlx.backends import backend_named
from rlx.compiler import stages_of
from rlx.plan.plan import make_plan, schedule

Build = Callable[[rlx.Graph, int], None]


def chain(g: rlx.Graph, n: int) -> None:
    """One after another, all fused."""
    x, y = g.input("x", (64,)), g.input("y", (64,))
    for _ in range(n):
        x = x + y
    g.output(x)


def wide(g: rlx.Graph, n: int) -> None:
    """Many side by side, then a tree."""
    x = g.input("x", (64,))
    level = [rlx.exp(x * float(i)) for i in range(n // 3)]
    while len(level) > 1:
        level = [a + b for a, b in zip(level[::2], level[1::2], strict=False)] + level[len(level) & ~1 :]
    g.output(level[0])


def random(g: rlx.Graph, n: int) -> None:
    """Each reads some of the last twenty."""
    rng = np.random.default_rng(5)
    values = [g.input("x", (64,))]
    for i in range(n):
        a, b = (values[-1 - int(rng.integers(min(len(values), 20)))] for _ in range(2))
        values.append(rlx.tanh(a) if i % 3 else a + b)
    for value in values[-8:]:
        g.output(value)


def unrolled(g: rlx.Graph, n: int) -> None:
    """A recurrent cell, step after step."""
    w = g.constant(np.eye(16, dtype=np.float32))
    x = h = g.input("x", (1, 16))
    for _ in range(n // 3):
        h = rlx.tanh(rlx.matmul(h, w) + x)
    g.output(h)


def calls_of(build: Build, n: int) -> int:
    """How many functions are called from a graph of so many nodes to its program and the plan of its memory."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    graph = rlx.Graph("scaling")
    build(graph, n)
    sys.setprofile(note)
    try:
        made = stages_of(graph, backend_named("cpu"), rlx.CompileOptions())
        assert made.program is not None
        make_plan(schedule(made.program), {}, search="off")
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("build", [chain, wide, random, unrolled])
def test_work_grows_with_the_nodes(build: Build) -> None:
    """Four times the nodes take about four times the calls."""
    calls_of(build, 9)  # imports
    few, many = (calls_of(build, n) for n in (90, 360))
    assert many < 5 * few, (few, many)
