"""Batch norms and scales of channels go into the weights before them, as expressions over params."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pass_checks import N, arrays_for, checked, node_of, ops, sources

import rlx.ops as o
from rlx.backends.reference import run_graph
from rlx.ir.graph import Array, Graph, Value
from rlx.passes import run_passes
from rlx.passes.dce import dce
from rlx.passes.fold_batch_norm import fold_batch_norm

RNG = np.random.default_rng(0)
C = 6


def values(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def batch_norm(g: Graph, x: Value, channels: int = C) -> Value:
    names = {name: g.param(name, data=values(channels)) for name in ("scale", "bias", "mean")}
    var = g.param("var", data=np.abs(values(channels)) + 0.1)
    return o.batch_norm(x, *names.values(), var, epsilon=1e-3)


def image(g: Graph) -> Value:
    return g.input("x", (N, 4, 7, 7))


ANCHORS: list[tuple[str, Callable[[Graph], Value], str]] = [
    ("conv", lambda g: o.conv(image(g), g.param("w", data=values(C, 4, 3, 3)), strides=(2, 2)), "conv"),
    (
        "conv, bias",
        lambda g: o.conv(image(g), g.param("w", data=values(C, 4, 1, 1)), g.param("b", data=values(C))),
        "conv",
    ),
    ("conv, groups", lambda g: o.conv(image(g), g.param("w", data=values(C, 2, 3, 3)), groups=2), "conv"),
    ("conv_transpose", lambda g: o.conv_transpose(image(g), g.param("w", data=values(4, C, 2, 2))), "conv_transpose"),
    (
        "conv_transpose, groups",
        lambda g: o.conv_transpose(
            image(g), g.param("w", data=values(4, 3, 2, 2)), g.param("b", data=values(C)), groups=2
        ),
        "conv_transpose",
    ),
    ("matmul", lambda g: g.input("x", (N, 5)) @ g.param("w", data=values(5, C)), "matmul"),
    ("gemm", lambda g: o.gemm(g.input("x", (N, 5)), g.param("w", data=values(C, 5)), trans_b=True, alpha=0.5), "gemm"),
    (
        "gemm, c",
        lambda g: o.gemm(g.input("x", (N, 5)), g.param("w", data=values(5, C)), g.param("b", data=values(C)), beta=2.0),
        "gemm",
    ),
]


@pytest.mark.parametrize("build, name", [a[1:] for a in ANCHORS], ids=[a[0] for a in ANCHORS])
def test_batch_norm_after(build: Callable[[Graph], Value], name: str) -> None:
    g = Graph()
    g.output(o.relu(batch_norm(g, build(g))), "y")
    after = checked(g, fold_batch_norm, dce)
    assert "batch_norm" not in ops(after)
    assert ops(after).count(name) == 1
    assert sources(after) == sources(g)


@pytest.mark.parametrize("build, name", [a[1:] for a in ANCHORS], ids=[a[0] for a in ANCHORS])
def test_params_keep_their_names_and_can_be_set(build: Callable[[Graph], Value], name: str) -> None:
    g = Graph()
    g.output(batch_norm(g, build(g)), "y")
    after = run_passes(g)
    inputs, _ = arrays_for(g)
    new = {v.name: np.abs(values(*v.data.shape)) + 0.1 for v in g.params if v.data is not None}
    y = run_graph(after, inputs, new)["y"]
    np.testing.assert_allclose(y, run_graph(g, inputs, new)["y"], rtol=1e-4, atol=1e-4)


SHAPES = [(1,), (), (C, 1, 1), (1, C, 1, 1), (1, 1, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", ["mul", "add", "sub", "div"])
@pytest.mark.parametrize("bias", [False, True])
def test_number_for_each_channel(op: str, shape: tuple[int, ...], bias: bool) -> None:
    g = Graph()
    b = [g.param("b", data=values(C))] if bias else []
    x = o.conv(image(g), g.param("w", data=values(C, 4, 3, 3)), *b)
    g.output(getattr(o, op)(x, g.param("p", data=values(*shape) + 3)), "y")
    after = checked(g, fold_batch_norm, dce)
    assert after.outputs[0].value.node.op.op_name == "conv"


def test_chain_of_them_is_one_convolution() -> None:
    """The way of PaddlePaddle: a bias [1, C, 1, 1], then a learnt scale and shift of one number each."""
    g = Graph()
    x = o.conv(image(g), g.param("w", data=values(C, 4, 3, 3))) + g.param("b", data=values(1, C, 1, 1))
    g.output(o.relu(g.param("s", data=values(1)) * x + g.param("t", data=values(1))), "y")
    after = checked(g, run_passes)
    conv = node_of(after, "conv")
    assert after.outputs[0].value.node.inputs[0] is conv.outputs[0]
    assert len(conv.inputs) == 3


def test_weights_that_are_constants_are_folded_to_one() -> None:
    g = Graph()
    x = o.conv(image(g), g.constant(values(C, 4, 3, 3)))
    g.output(x * g.constant(values(1, C, 1, 1)) + g.constant(values(1)), "y")
    after = checked(g, run_passes)
    assert ops(after) == ["conv"]
    assert len(after.constants) == 2


KEPT: list[tuple[str, Callable[[Graph, Value], Value]]] = [
    ("by position", lambda g, x: x * g.param("p", data=values(1, 1, 5, 5))),
    ("by run", lambda g, x: x * g.input("p", (C, 1, 1))),
    ("subtracted from", lambda g, x: g.param("p", data=values(1)) - x),
    ("divides", lambda g, x: g.param("p", data=values(1)) / x),
    ("of larger rank", lambda g, x: x * g.param("p", data=values(1, 1, C, 1, 1))),
    ("another convolution", lambda g, x: x + o.relu(x)),
]


@pytest.mark.parametrize("build", [k[1] for k in KEPT], ids=[k[0] for k in KEPT])
def test_kept(build: Callable[[Graph, Value], Value]) -> None:
    g = Graph()
    x = o.conv(image(g), g.param("w", data=values(C, 4, 3, 3)))
    g.output(build(g, x), "y")
    assert ops(checked(g, fold_batch_norm)) == ops(g)


def test_convolution_that_others_read_is_not_doubled() -> None:
    g = Graph()
    x = o.conv(image(g), g.param("w", data=values(C, 4, 3, 3)))
    g.output(batch_norm(g, x), "y")
    g.output(x, "z")
    assert ops(checked(g, fold_batch_norm)) == ["conv", "batch_norm"]


def test_batch_norm_by_itself_and_after_stored_integers_stays() -> None:
    g = Graph()
    w = o.dequantize(g.param("w", data=np.ones((C, 4, 3, 3), np.int8)), g.param("s", data=values()))
    g.output(batch_norm(g, o.conv(image(g), w)), "y")
    assert ops(checked(g, fold_batch_norm)) == ["dequantize", "conv", "batch_norm"]


@pytest.mark.parametrize("divisor", [1e-37, 1e-39, 3e38])
def test_divisors_that_have_no_inverse_divide_the_weights(divisor: float) -> None:
    """1 / 1e-39 is infinite in f32, and 1 / 3e38 no normal number; the quotients here are neither."""
    g = Graph()
    x = o.conv(image(g), g.param("w", data=values(C, 4, 3, 3) * np.float32(divisor * 0.002)))
    g.output(x / g.param("p", data=np.full((C, 1, 1), divisor, np.float32)), "y")
    after = fold_batch_norm(g)
    assert after.outputs[0].value.node.op.op_name == "conv"
    inputs, _ = arrays_for(g)
    wanted, found = (run_graph(graph, inputs)["y"] for graph in (g, after))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)


def test_a_variance_of_zero_without_an_epsilon_stays_in_its_own_node() -> None:
    """Its factor is infinite, and an infinite factor of a weight of 0 would be NaN."""
    g = Graph()
    x = o.conv(image(g), g.param("w", data=np.zeros((C, 4, 3, 3), np.float32)))
    one, zero = np.ones(C, np.float32), np.zeros(C, np.float32)
    params = [g.param(n, data=a) for n, a in (("scale", one), ("bias", zero), ("mean", -one), ("var", zero))]
    g.output(o.batch_norm(x, *params, epsilon=0.0), "y")
    after = checked(g, fold_batch_norm)
    assert ops(after) == ["conv", "batch_norm"]


def test_a_negative_variance_gives_nan_in_its_channel() -> None:
    g = Graph()
    y = batch_norm(g, o.conv(image(g), g.param("w", data=values(C, 4, 3, 3))))
    next(p for p in g.params if p.name == "var").data[2] = -1
    g.output(y, "y")
    after = checked(g, fold_batch_norm)
    assert after.outputs[0].value.node.op.op_name == "conv"
    nan = np.isnan(run_graph(after, arrays_for(g)[0])["y"])
    assert nan[:, 2].all()
    assert not np.delete(nan, 2, 1).any()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [None, 4.0])
def test_constants_that_are_there_to_round_are_not_added_up(bias: bool, scale: float | None) -> None:
    """x + 1.5 * 2^23 - 1.5 * 2^23 is the nearest integer, or with a factor the nearest quarter."""
    g = Graph()
    x = o.conv(image(g), g.param("w", data=values(C, 4, 3, 3)), *([g.param("b", data=values(C))] if bias else []))
    x = x if scale is None else x * scale
    magic = np.full((C, 1, 1), 1.5 * 2**23, np.float32)
    x = x + g.constant(magic) - 1.5 * 2.0**23
    g.output(x if scale is None else x / scale, "y")
    inputs, _ = arrays_for(g)
    wanted, found = (run_graph(graph, inputs)["y"] for graph in (g, run_passes(g)))
    assert (wanted * (scale or 1) == np.rint(wanted * (scale or 1))).all()
    np.testing.assert_allclose(found, wanted, atol=1.01 / (scale or 1))
    assert (found * (scale or 1) == np.rint(found * (scale or 1))).all()


@pytest.mark.parametrize("factor", [0.25, -0.5])
def test_constants_that_round_before_a_factor(factor: float) -> None:
    """(x + 1.5 * 2^23) * f - 1.5 * 2^23 * f is the nearest integer, times f."""
    g = Graph()
    magic = 1.5 * 2.0**23
    x = o.conv(image(g), g.param("w", data=values(C, 4, 3, 3)))
    g.output((x + magic) * factor - magic * factor, "y")
    inputs, _ = arrays_for(g)
    found = run_graph(run_passes(g), inputs)["y"] / factor
    assert (found == np.rint(found)).all()


def test_a_long_sum_is_not_looked_at_for_long() -> None:
    """Terms that are sums of themselves: 2^200 paths; what is not folded stays right."""
    g = Graph()
    shift = g.param("t", data=values(C, 1, 1) * np.float32(2.0**-100))
    for _ in range(100):
        shift = shift + shift
    x = o.conv(image(g), g.param("w", data=values(C, 4, 3, 3)))
    for _ in range(100):
        x = x + shift
    g.output(x, "y")
    after = fold_batch_norm(g)
    inputs, _ = arrays_for(g)
    wanted, found = (run_graph(graph, inputs)["y"] for graph in (g, after))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)
