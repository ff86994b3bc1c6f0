"""Layer norm and RMS norm in the forms that exporters write."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pass_checks import B, N, checked, node_of, ops, sources

import rlx.ops as o
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, Value
from rlx.passes import run_passes
from rlx.passes.algebra import algebra
from rlx.passes.cse import cse
from rlx.passes.dce import dce
from rlx.passes.layout import layout
from rlx.passes.raising.raise_norm import raise_norm
from rlx.passes.raising.raise_softmax import raise_softmax

EPS = 1e-5


def mean(x: Value) -> Value:
    return o.reduce_mean(x, (-1,), True)


def square(x: Value) -> Value:
    return o.pow(x, 2.0)


def centred(x: Value) -> Value:
    return x - mean(x)


def by_sums(x: Value) -> Value:
    """The way of JAX: sums times 1/n, E[x^2] - E[x]^2, everything expanded."""
    n = 1 / 8
    m = o.reduce_sum(x, (2,), False) * n
    variance = o.maximum(0.0, o.reduce_sum(x * x, (2,), False) * n - m * m)
    spread = o.expand(o.reshape(variance, (B, N, 1)), (B, N, 1)) + EPS
    return (x - o.expand(o.reshape(m, (B, N, 1)), (B, N, 8))) * o.reciprocal(o.sqrt(spread))


LAYER_NORMS: list[tuple[str, Callable[[Value], Value]]] = [
    ("pow, div by sqrt", lambda x: centred(x) / o.sqrt(mean(square(centred(x))) + EPS)),
    ("square by mul", lambda x: centred(x) / o.sqrt(EPS + mean(centred(x) * centred(x)))),
    ("times rsqrt", lambda x: o.rsqrt(mean(square(centred(x))) + EPS) * centred(x)),
    ("times reciprocal", lambda x: centred(x) * (1.0 / o.sqrt(mean(square(centred(x))) + EPS))),
    ("power -0.5", lambda x: centred(x) * o.pow(mean(square(centred(x))) + EPS, -0.5)),
    ("sum of squares", lambda x: centred(x) / o.sqrt(o.reduce_sum_square(centred(x), (2,), True) / 8.0 + EPS)),
    ("by sums", by_sums),
]


@pytest.mark.parametrize("form", [f[1] for f in LAYER_NORMS], ids=[f[0] for f in LAYER_NORMS])
def test_layer_norm(form: Callable[[Value], Value]) -> None:
    g = Graph()
    x = g.input("x", (B, N, 8))
    g.output(form(x) * g.param("w", (8,)) + g.param("b", (8,)), "y")
    after = checked(g, layout, algebra, cse, dce, raise_norm, dce)
    assert ops(after) == ["layer_norm"]
    op = after.nodes[0].op
    assert (op.axis, op.epsilon) == (2, pytest.approx(EPS))
    assert [v.name for v in after.nodes[0].inputs] == ["x", "w", "b"]
    assert len(sources(after)) >= 7


def test_parameters_with_leading_ones_and_without_bias() -> None:
    g = Graph()
    x = g.input("x", (B, N, 8))
    g.output(g.param("w", (1, 1, 8)) * (centred(x) / o.sqrt(mean(square(centred(x))) + EPS)), "y")
    assert ops(checked(g, run_passes)) == ["reshape", "layer_norm"]


def test_two_trailing_axes() -> None:
    g = Graph()
    x = g.input("x", (B, N, 4, 8))
    c = x - o.reduce_mean(x, (2, 3), True)
    g.output(c / o.sqrt(o.reduce_mean(c * c, (-2, -1), True) + EPS) * g.param("w", (4, 8)), "y")
    after = checked(g, run_passes)
    assert ops(after) == ["layer_norm"]
    assert after.nodes[0].op.axis == 2


@pytest.mark.parametrize("nested", [False, True])
def test_written_like_a_batch_norm(nested: bool) -> None:
    """tf.nn.batch_normalization: x * f + (bias - mean * f) with f = scale / sqrt(variance)."""
    g = Graph()
    x, w, b = g.input("x", (B, N, 8)), g.param("w", (8,)), g.param("b", (8,))
    factor = o.rsqrt(mean(square(centred(x))) + EPS) * w
    g.output(centred(x) * factor + b if nested else x * factor + (b - mean(x) * factor), "y")
    assert ops(checked(g, run_passes)) == ["layer_norm"]


def test_rms_norm() -> None:
    g = Graph()
    x = g.input("x", (B, N, 8))
    g.output(g.param("w", (8,)) * (x * o.rsqrt(mean(square(x)) + EPS)) + g.param("b", (8,)), "y")
    after = checked(g, run_passes)
    assert ops(after) == ["rms_norm", "add"]
    assert node_of(after, "rms_norm").op.epsilon == pytest.approx(EPS)


def test_norm_that_is_read_twice_keeps_its_scale_outside() -> None:
    g = Graph()
    x = g.input("x", (B, N, 8))
    y = centred(x) / o.sqrt(mean(square(centred(x))) + EPS)
    g.output(y * g.param("w", (8,)), "scaled")
    g.output(y, "plain")
    assert ops(checked(g, run_passes)) == ["layer_norm", "mul"]


def test_scale_that_differs_by_row_stays_outside() -> None:
    g = Graph()
    x = g.input("x", (B, N, 8))
    g.output(centred(x) / o.sqrt(mean(square(centred(x))) + EPS) * g.input("w", (B, 1, 8)), "y")
    assert ops(checked(g, run_passes)) == ["layer_norm", "mul"]


OTHERS: list[tuple[str, Callable[[Value], Value]]] = [
    ("leading axis", lambda x: (x - o.reduce_mean(x, (0,))) / o.sqrt(o.reduce_mean(square(x), (0,)) + EPS)),
    ("variance about another mean", lambda x: centred(x) / o.sqrt(mean(square(x)) + EPS)),
    ("sum for mean", lambda x: centred(x) / o.sqrt(o.reduce_sum(square(centred(x)), (2,), True) + EPS)),
    ("sum over n - 1", lambda x: centred(x) / o.sqrt(o.reduce_sum(square(centred(x)), (2,), True) / 7.0 + EPS)),
    ("nearly 1/n", lambda x: centred(x) / o.sqrt(o.reduce_sum(square(centred(x)), (2,), True) * 0.12500007 + EPS)),
    ("twice the mean", lambda x: centred(x) / o.sqrt(mean(square(centred(x))) * 2.0 + EPS)),
    ("of another value", lambda x: centred(x) / o.sqrt(mean(square(centred(x * 2.0))) + EPS)),
]


@pytest.mark.parametrize("form", [f[1] for f in OTHERS], ids=[f[0] for f in OTHERS])
def test_what_is_no_norm_stays(form: Callable[[Value], Value]) -> None:
    g = Graph()
    g.output(form(g.input("x", (3, 8, 8))), "y")
    assert not {"layer_norm", "rms_norm"} & set(ops(checked(g, run_passes)))


def test_roots_of_other_rows_are_no_norm() -> None:
    """A reshape that hands each row the mean of another one."""
    g = Graph()
    x = g.input("x", (3, 4, 8))
    means = o.reshape(o.rsqrt(mean(square(x)) + EPS), (4, 3, 1))
    g.output(o.transpose(x, (1, 0, 2)) * means, "y")
    assert not {"layer_norm", "rms_norm"} & set(ops(checked(g, run_passes)))


@pytest.mark.parametrize("axis", [0, 2])
def test_softmax(axis: int) -> None:
    g = Graph()
    x = g.input("x", (3, 4, 5))
    e = o.exp(x - o.reduce_max(x, (axis,), True))
    g.output(e / o.reduce_sum(e, (axis,), True), "y")
    after = checked(g, raise_softmax, dce)
    assert ops(after) == ["softmax"]
    assert after.nodes[0].op.axis == axis
    assert sources(after) == sources(g)


def test_exponentials_over_the_sum_of_another_axis_stay() -> None:
    g = Graph()
    x = g.input("x", (4, 4))
    e = o.exp(x - o.reduce_max(x, (0,), True))
    g.output(e / o.reduce_sum(e, (1,), True), "y")
    assert "softmax" not in ops(checked(g, raise_softmax))


@pytest.mark.parametrize("dtype, raised", [("f16", False), ("bf16", True), ("f64", True)])
def test_types(dtype: str, raised: bool) -> None:
    """Squares and sums of f16 overflow where those of f32 don't: a file that computes so gives what it gives."""
    g = Graph()
    x = g.input("x", (B, N, 8), dtype)
    y = centred(x) / o.sqrt(mean(square(centred(x))) + EPS)
    g.output(y * g.constant(np.ones(8, DTYPES[dtype].numpy)), "y")
    e = o.exp(x - o.reduce_max(x, (2,), True))
    g.output(e / o.reduce_sum(e, (2,), True), "z")
    assert ("layer_norm" in ops(run_passes(g))) == raised
    found = set(ops(checked(g, raise_norm, raise_softmax, dce)))
    assert ("layer_norm" in found, "softmax" in found) == (raised, raised)


def test_products_of_shared_factors_take_no_time() -> None:
    """Each way to read a product is looked at once, not once for each path to it: 2^200 here."""
    g = Graph()
    y = g.input("x", (2, 8))
    for _ in range(200):
        y = y * y
    g.output(y, "y")
    assert ops(raise_norm(g)) == ops(g)
