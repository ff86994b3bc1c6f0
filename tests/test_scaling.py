"""Compiling takes work in proportion to the number of nodes, counted in calls of functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx.backends import backend_named
from rlx.code_times import noted
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


def counted(work: Callable[[rlx.Graph], object], build: Build, n: int) -> int:
    """How many functions the work on a graph of so many nodes calls."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    graph = rlx.Graph("scaling")
    build(graph, n)
    sys.setprofile(note)
    try:
        work(graph)
    finally:
        sys.setprofile(None)
    return count


def calls_of(build: Build, n: int) -> int:
    """How many functions are called from a graph of so many nodes to its program and the plan of its memory."""

    def plan(graph: rlx.Graph) -> None:
        made = stages_of(graph, backend_named("cpu"), rlx.CompileOptions())
        assert made.program is not None
        make_plan(schedule(made.program), {}, search="off")

    return counted(plan, build, n)


def compile_calls(build: Build, n: int, folder: Path) -> int:
    """How many functions a compile calls, with an empty cache."""
    cache = folder / f"{build.__name__}-{n}"
    return counted(lambda graph: rlx.compile(graph, device="cpu", threads=2, cache_dir=cache), build, n)


@pytest.mark.parametrize("build", [chain, wide, random, unrolled])
def test_work_grows_with_the_nodes(build: Build) -> None:
    """Four times the nodes take about four times the calls."""
    calls_of(build, 9)  # imports
    few, many = (calls_of(build, n) for n in (90, 360))
    assert many < 5 * few, (few, many)


def joined(g: rlx.Graph, n: int) -> None:
    """One node of many inputs."""
    g.output(rlx.concat(*(g.input(f"x{i}", (1, 8)) for i in range(n)), axis=0))


def parted(g: rlx.Graph, n: int) -> None:
    """One node of many outputs."""
    for part in rlx.split(g.input("x", (n, 8)), axis=0, sizes=(1,) * n):
        g.output(part)


@pytest.mark.parametrize("build", [joined, parted])
def test_a_whole_compile_grows_with_the_operands_and_results_of_a_node(build: Build, tmp_path: Path) -> None:
    """Four times the inputs or outputs take about four times the calls, to the program that can run."""
    compile_calls(build, 9, tmp_path)  # imports
    few, many = (compile_calls(build, n, tmp_path) for n in (120, 480))
    assert many < 4.2 * few


def layered(g: rlx.Graph, n: int) -> None:
    """Equal layers of ten nodes: a product, an activation, a residual and a norm, and a step that looks far back."""
    x = first = g.input("x", (8, 32))
    for i in range(n // 10):
        h = rlx.matmul(x, g.param(f"w{i}", (32, 32))) + g.param(f"b{i}", (32,))
        h = rlx.tanh(h * 0.5) + x
        h = rlx.softmax(rlx.transpose(rlx.reshape(h, (4, 64)), (1, 0)))
        x = rlx.reshape(h, (8, 32)) + first
    g.output(x)


@pytest.mark.parametrize("sizes", [(500, 1000), pytest.param((1000, 4000), marks=pytest.mark.slow)])
def test_a_whole_compile_grows_with_the_layers_of_a_net(sizes: tuple[int, int], tmp_path: Path) -> None:
    """To the program that can run, with an empty cache: so many times the layers take about so many times the calls."""
    compile_calls(layered, 20, tmp_path)  # imports
    few, many = (compile_calls(layered, n, tmp_path) for n in sizes)
    assert many < 1.15 * few * sizes[1] / sizes[0], (few, many)


def test_code_does_not_grow_with_the_layers_of_a_net(tmp_path: Path) -> None:
    """Equal layers have equal code: neither more text is made nor more compiled."""
    counts = []
    for layers in (50, 400):
        graph = rlx.Graph("layers")
        layered(graph, layers)
        with noted() as times:
            rlx.compile(graph, device="cpu", threads=2, cache_dir=tmp_path / str(layers))
        counts.append(len(times.emitted))
    assert counts[0] == counts[1]
