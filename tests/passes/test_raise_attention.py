"""Softmax attention between two matrix products, with its scale and masks, becomes one op."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from pass_checks import B, N, arrays_for, assert_same_results, checked, node_of, ops, sources

import rlx.ops as o
from rlx.backends.reference import run_graph
from rlx.ir.graph import Graph, Value
from rlx.ops.layout import Iota
from rlx.passes import run_passes
from rlx.passes.dce import dce
from rlx.passes.layout import layout
from rlx.passes.raise_attention import raise_attention

H, D = 3, 8


def projected(g: Graph, name: str, heads: int = H) -> Value:
    """[B, heads, N, D] as it comes from a projection [B, N, heads * D]."""
    x = g.input(name, (B, N, heads * D))
    return o.transpose(o.reshape(x, (B, N, heads, D)), (0, 2, 1, 3))


def qkv(g: Graph) -> tuple[Value, Value, Value]:
    return projected(g, "q"), projected(g, "k"), projected(g, "v")


def swapped(k: Value) -> Value:
    return o.transpose(k, (0, 1, 3, 2))


def mask(g: Graph) -> Value:
    """bool [B, 1, 1, N], true where a key may be seen."""
    return o.reshape(o.greater(g.input("seen", (B, N), "i64"), 0), (B, 1, 1, N))


Form = Callable[[Graph, Value, Value, Value], Value]
FORMS: list[tuple[str, Form, float]] = [
    ("no scale", lambda g, q, k, v: o.softmax(q @ swapped(k)) @ v, 1.0),
    ("scores * s", lambda g, q, k, v: o.softmax(q @ swapped(k) * 0.25) @ v, 0.25),
    ("scores / s", lambda g, q, k, v: o.softmax(q @ swapped(k) / 3.0, axis=3) @ v, 1 / 3),
    ("s on q", lambda g, q, k, v: o.softmax((q * 0.25) @ swapped(k)) @ v, 0.25),
    ("s on both", lambda g, q, k, v: o.softmax((q * 0.42) @ swapped(k * 0.5)) @ v, 0.21),
    ("s after the transpose", lambda g, q, k, v: o.softmax(q @ (swapped(k) * 0.5)) @ v, 0.5),
    ("mask added", lambda g, q, k, v: o.softmax(q @ swapped(k) * 0.25 + g.input("m", (B, 1, 1, N))) @ v, 0.25),
    ("mask on the left", lambda g, q, k, v: o.softmax(g.input("m", (N, N)) + q @ swapped(k)) @ v, 1.0),
    ("mask, then scale", lambda g, q, k, v: o.softmax((q @ swapped(k) + g.input("m", (N, N))) * 0.5) @ v, 0.5),
    (
        "two masks",
        lambda g, q, k, v: o.softmax(q @ swapped(k) + g.input("m", (N, N)) - g.input("p", (H, 1, N))) @ v,
        1.0,
    ),
]


@pytest.mark.parametrize("form, scale", [f[1:] for f in FORMS], ids=[f[0] for f in FORMS])
def test_form(form: Form, scale: float) -> None:
    g = Graph()
    out = form(g, *qkv(g))
    g.output(o.reshape(o.transpose(out, (0, 2, 1, 3)), (B, N, H * D)), "y")
    after = checked(g, raise_attention, layout, dce)
    op = node_of(after, "attention").op
    assert op.scale == pytest.approx(scale)
    assert op.empty_row == "nan"
    assert not {"softmax", "matmul"} & set(ops(after))
    assert len(node_of(after, "attention").inputs) == (4 if "m" in [v.name for v in g.inputs] else 3)
    assert sources(after) >= {s for n in g.nodes if n.op.op_name in ("softmax", "matmul", "mul") for s in n.provenance}


@pytest.mark.parametrize("fill", [-math.inf, -3.4028234663852886e38, -1e9, -1e4])
@pytest.mark.parametrize("turned", [False, True])
def test_mask_chosen_by_where(fill: float, turned: bool) -> None:
    """A row without keys gives what it gave: NaN for -inf, the mean of all values for a finite number."""
    g = Graph()
    q, k, v = qkv(g)
    scores, seen = q @ swapped(k) * 0.25, mask(g)
    chosen = o.where(o.not_(seen), fill, scores) if turned else o.where(seen, scores, fill)
    g.output(o.softmax(chosen) @ v, "y")
    after = checked(g, raise_attention, dce)
    assert ops(after).count("where") == 1
    assert node_of(after, "attention").inputs[3].shape == (B, 1, 1, N)
    inputs, _ = arrays_for(g)
    inputs["seen"][0] = 0
    assert_same_results(g, after, inputs)
    assert np.isnan(run_graph(after, inputs)["y"][0]).all() == (fill == -math.inf)


def test_fill_that_does_not_mask_stays() -> None:
    g = Graph()
    q, k, v = qkv(g)
    g.output(o.softmax(o.where(mask(g), q @ swapped(k), -5.0)) @ v, "y")
    assert "attention" not in ops(checked(g, raise_attention))


def test_row_without_keys_gives_zeros_where_nan_was_replaced() -> None:
    g = Graph()
    q, k, v = qkv(g)
    bias = o.where(mask(g), g.constant(0.0), g.constant(-math.inf))
    weights = o.softmax((q * 0.42) @ swapped(k * 0.42) + bias)
    g.output(o.where(o.is_nan(weights), 0.0, weights) @ v, "y")
    after = checked(g, raise_attention, dce)
    assert node_of(after, "attention").op.empty_row == "zero"
    assert "is_nan" not in ops(after)
    inputs, _ = arrays_for(g)
    inputs["seen"][1] = 0
    assert_same_results(g, after, inputs)
    assert not run_graph(after, inputs)["y"][1].any()


def test_causal_mask_from_ranges_is_a_bias() -> None:
    g = Graph()
    q, k, v = qkv(g)
    (i,) = g.add(Iota(N))
    seen = o.less_equal(o.reshape(i, (1, N)), o.reshape(i, (N, 1)))
    g.output(o.softmax(o.where(seen, q @ swapped(k), -math.inf)) @ v, "y")
    after = checked(g, run_passes)
    assert "attention" in ops(after)
    assert node_of(after, "attention").inputs[3].shape == (N, N)


def test_one_head_of_rank_3() -> None:
    g = Graph()
    q, k, v = (g.input(name, (B, N, D)) for name in "qkv")
    g.output(o.softmax(q @ o.transpose(k, (0, 2, 1)) * 0.5 + g.input("m", (B, 1, N))) @ v, "y")
    after = checked(g, run_passes)
    assert [op for op in ops(after) if op != "reshape"] == ["attention"]


def test_repeated_key_heads_are_not_repeated() -> None:
    g = Graph()
    q = projected(g, "q", 6)

    def repeated(name: str) -> Value:
        x = o.expand(o.reshape(projected(g, name, 2), (B, 2, 1, N, D)), (B, 2, 3, N, D))
        return o.reshape(x, (B, 6, N, D))

    g.output(o.softmax(q @ swapped(repeated("k"))) @ repeated("v"), "y")
    after = checked(g, raise_attention, dce)
    assert "expand" not in ops(after)
    assert node_of(after, "attention").inputs[1].shape == (B, 2, N, D)


def test_keys_whose_heads_went_through_the_batch() -> None:
    """The way of PyTorch's exporter: [B * H, N, D] in between."""
    g = Graph()
    q, k, v = qkv(g)
    kt = o.reshape(o.transpose(o.reshape(k, (B * H, N, D)), (0, 2, 1)), (B, H, D, N))
    g.output(o.softmax(q @ kt) @ v, "y")
    after = checked(g, run_passes)
    assert ops(after).count("transpose") == 3
    assert node_of(after, "attention").inputs[1].node.op.perm == (0, 2, 1, 3)


def test_weights_cast_to_half_in_between() -> None:
    g = Graph()
    q, k, v = (g.input(name, (B, H, N, D), "f16") for name in "qkv")
    weights = o.softmax(o.cast(q @ swapped(k), "f32") * 0.25)
    g.output(o.cast(weights, "f16") @ v, "y")
    assert "attention" in ops(checked(g, raise_attention, dce))


def test_keys_of_one_batch_for_all_stay() -> None:
    g = Graph()
    q, v = projected(g, "q"), projected(g, "v")
    k = g.param("k", (1, H, D, 7))
    g.output(o.softmax(q @ k) @ g.param("w", (1, H, 7, D)) + v, "y")
    assert "attention" not in ops(checked(g, raise_attention))


@pytest.mark.parametrize("which", ["scores", "weights"])
def test_what_others_read_is_not_computed_twice(which: str) -> None:
    g = Graph()
    q, k, v = qkv(g)
    scores = q @ swapped(k)
    weights = o.softmax(scores)
    g.output(weights @ v, "y")
    g.output({"scores": scores, "weights": weights}[which], "also")
    assert "attention" not in ops(checked(g, raise_attention))


def test_softmax_over_another_axis_stays() -> None:
    g = Graph()
    q, k, v = qkv(g)
    g.output(o.softmax(q @ swapped(k), axis=2) @ v, "y")
    assert "attention" not in ops(checked(g, raise_attention))


def test_doubles_keep_a_mask_of_doubles() -> None:
    g = Graph()
    q, k, v = (g.input(name, (B, H, N, D), "f64") for name in "qkv")
    g.output(o.softmax(q @ swapped(k) + g.input("m", (N, N), "f64")) @ v, "y")
    after = checked(g, raise_attention, dce)
    assert node_of(after, "attention").inputs[3].dtype.name == "f64"
