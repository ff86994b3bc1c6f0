"""Weights that several kernels read in one form are made into it once: by counts, bytes and results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.reference import run_graph
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, Value
from rlx.kernels.program import Program
from rlx.ops.layout import Full
from rlx.ops.quant import ConvInteger
from rlx.ops.recurrent import Gru, Lstm
from rlx.testing.oracle import compare_results, tolerances

Read = Callable[[Graph, Value, Value], Value]


def layer(op: Any) -> Read:
    """A recurrent layer whose two weights are cut out of one."""
    gates = 4 if isinstance(op, Lstm) else 3
    return lambda g, x, w: g.add(op, x, w[:, : gates * 16], w[:, gates * 16 :])[0]


READS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Read]] = {  # shapes of x and w
    "matmul": ((4, 48), (48, 40), lambda g, x, w: x @ w),
    "transposed": ((4, 48), (40, 48), lambda g, x, w: x @ w.transpose(1, 0)),
    "a product before it": ((4, 48), (48, 40), lambda g, x, w: x @ (w * 0.5 + 1)),
    "a chain of two": ((4, 48), (48, 40), lambda g, x, w: x @ rlx.softmax(w)),
    "batches": ((2, 4, 48), (2, 48, 40), lambda g, x, w: x @ w),
    "part of it": ((4, 48), (96, 40), lambda g, x, w: x @ w[48:]),
    "direct convolution": ((1, 3, 9, 9), (8, 3, 5, 5), lambda g, x, w: rlx.conv(x, w)),
    "winograd": ((1, 32, 12, 12), (32, 32, 3, 3), lambda g, x, w: rlx.conv(x, w, pads=(1, 1, 1, 1))),
    "depthwise": ((1, 16, 9, 9), (16, 1, 3, 3), lambda g, x, w: rlx.conv(x, w, groups=16)),
    "lstm": ((6, 2, 16), (1, 128, 16), layer(Lstm())),
    "gru": ((6, 2, 16), (1, 96, 16), layer(Gru())),
}


def several(count: int, name: str) -> Graph:
    """A graph that reads its weight so many times, each time for another x."""
    x_shape, w_shape, read = READS[name]
    rng = np.random.default_rng(0)
    g = Graph(name)
    w = g.param("w", w_shape, data=rng.standard_normal(w_shape).astype(np.float32))
    for n in range(count):
        g.output(rlx.relu(read(g, g.input(f"x{n}", x_shape), w)), f"y{n}")
    return g


def inputs_of(g: Graph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {v.name: rng.standard_normal([int(s) for s in v.shape]).astype(np.float32) for v in g.inputs}


def program_of(model: rlx.CompiledGraph) -> Program:
    program = model.compilation.program
    assert program is not None
    return program


@pytest.mark.parametrize("name", READS)
def test_one_weight_read_by_many_is_made_once(name: str) -> None:
    """The same kernels and bytes as for one reader, all results as the reference has them, also for new values."""
    one, many = (rlx.compile(several(count, name), device="cpu", threads=1) for count in (1, 5))
    assert [len(program_of(m).prepare) for m in (one, many)] == [len(program_of(one).prepare)] * 2
    assert program_of(one).prepare
    assert one.needs is not None
    assert many.needs is not None
    assert many.needs.prepared == one.needs.prepared > 0
    graph = several(5, name)
    for value in (graph.params[0].data, np.full([int(s) for s in graph.params[0].shape], 0.25, np.float32)):
        graph.params[0].data = value
        many.set_param("w", value)
        inputs = inputs_of(graph)
        compare_results(run_graph(graph, inputs), dict(many(inputs)), tolerances(graph))


def test_weights_of_bytes_and_blocks_are_packed_once() -> None:
    """As those of f32: an i8 convolution's, and products' with blocks of q8_0."""

    def graph(count: int) -> Graph:
        g = Graph("bytes")
        w = g.param("w", (32, 16, 1, 1), "i8")
        blocks = g.param("blocks", (64, 64), encoding="q8_0")
        for n in range(count):
            g.output(g.add(ConvInteger(), g.input(f"x{n}", (1, 16, 8, 8), "u8"), w)[0], f"y{n}")
            g.output(g.input(f"z{n}", (3, 64)) @ blocks.T, f"p{n}")
        return g

    one, many = (rlx.compile(graph(count), device="cpu", threads=1) for count in (1, 4))
    assert len(program_of(many).prepare) == len(program_of(one).prepare) > 1
    assert one.needs is not None
    assert many.needs is not None
    assert many.needs.prepared == one.needs.prepared


def test_unequal_forms_stay_apart() -> None:
    """Another weight, another scale, another part, another order of axes: each is made."""
    g = Graph("apart")
    x, w, v = g.input("x", (4, 32)), g.param("w", (32, 64)), g.param("v", (32, 64))
    rng = np.random.default_rng(0)
    for b in (w, v, w * 2, w * 3, w[:, 32:], w[:, :32], w[:, :32].T, w[::2].reshape(32, 32), rlx.concat(w, v, axis=1)):
        g.output(x @ b, f"y{len(g.outputs)}")
    model = rlx.compile(g, device="cpu", threads=1)
    packs = [k for k in program_of(model).prepare if k.name == "pack b"]
    assert len(packs) == len(g.outputs)
    values = {name: rng.standard_normal((32, 64)).astype(np.float32) for name in "wv"}
    for param in g.params:
        param.data = values[param.name]
    model.set_params(values)
    inputs = inputs_of(g)
    compare_results(run_graph(g, inputs), dict(model(inputs)), tolerances(g))


@pytest.mark.parametrize("rows", [(48, 48), (48, 20)])
def test_an_operand_of_a_run_is_packed_once_for_products_of_any_rows(rows: tuple[int, int]) -> None:
    g = Graph("run")
    a, b, w = g.input("a", (rows[0], 32)), g.input("b", (rows[1], 32)), g.input("w", (32, 64))
    g.output(a @ rlx.tanh(w), "x")
    g.output(b @ rlx.tanh(w), "y")
    g.output(b @ rlx.sin(w), "z")
    model = rlx.compile(g, device="cpu", threads=1)
    assert len([k for k in program_of(model).run if k.name == "pack b"]) == 2
    inputs = inputs_of(g)
    compare_results(run_graph(g, inputs), dict(model(inputs)), tolerances(g))


def test_an_operand_is_packed_again_in_a_loop_and_after_it_has_changed() -> None:
    g = Graph("loop")
    a, w = g.input("a", (48, 64)), g.input("w", (64, 64))

    def body(w: Value, _: Value) -> tuple[Value, Value]:
        made = a @ w
        return w + made[:1], b_of(a) @ w

    def b_of(a: Value) -> Value:
        return rlx.sin(a)

    last, rows = rlx.scan(body, w, None, length=3)
    for name, value in (("last", last), ("rows", rows), ("after", a @ last), ("also", b_of(a) @ last)):
        g.output(value, name)
    model = rlx.compile(g, device="cpu", threads=1)
    assert len([k for k in program_of(model).run if k.name == "pack b"]) == 2
    inputs = {"a": np.ones((48, 64), "f") / 64, "w": np.eye(64, dtype="f") / 8}
    compare_results(run_graph(g, inputs), dict(model(inputs)), tolerances(g))


@pytest.mark.parametrize("times", [1, 2])
def test_what_a_run_writes_over_is_made_by_the_run(times: int) -> None:
    """Zeros that only one kernel reads, and puts its sums into: kept between runs, they would be copied in each."""
    g = Graph("sums")
    places, x = g.input("places", (40, 1), "i64"), g.input("x", (40, 64))
    zeros = g.add(Full((100, 64), 0, DTYPES["f32"]))[0]
    for n in range(times):
        g.output(rlx.scatter_nd(zeros, places, x * (n + 1), reduction="add"), f"y{n}")
    model = rlx.compile(g, device="cpu")
    size = 4 * 100 * 64
    assert model.needs.prepared == (size if times == 2 else 0)
    arrays = {"places": np.arange(40)[:, None] // 2 * 3, "x": np.ones((40, 64), np.float32)}
    for _ in range(2):
        for n, made in enumerate(model(arrays).values()):
            want = np.zeros((100, 64), np.float32)
            want[:60:3] = 2 * (n + 1)
            assert np.array_equal(made, want)
