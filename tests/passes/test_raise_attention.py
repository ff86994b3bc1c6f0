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
from rlx.ir.shape import Dim, Size
from rlx.ops.layout import Iota
from rlx.passes import run_passes
from rlx.passes.dce import dce
from rlx.passes.layout import layout
from rlx.passes.raising.raise_attention import raise_attention

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
FORMS: list[tuple[str, Form, float, tuple[str, ...]]] = [
    ("no scale", lambda g, q, k, v: o.softmax(q @ swapped(k)) @ v, 1.0, ()),
    ("scores * s", lambda g, q, k, v: o.softmax(q @ swapped(k) * 0.25) @ v, 0.25, ()),
    ("scores / s", lambda g, q, k, v: o.softmax(q @ swapped(k) / 3.0, axis=3) @ v, 1 / 3, ()),
    ("s on q", lambda g, q, k, v: o.softmax((q * 0.25) @ swapped(k)) @ v, 0.25, ()),
    ("s on both", lambda g, q, k, v: o.softmax((q * 0.42) @ swapped(k * 0.5)) @ v, 0.21, ()),
    ("s after the transpose", lambda g, q, k, v: o.softmax(q @ (swapped(k) * 0.5)) @ v, 0.5, ()),
    ("mask added", lambda g, q, k, v: o.softmax(q @ swapped(k) * 0.25 + m(g, B, 1, 1, N)) @ v, 0.25, ("add",)),
    ("mask on the left", lambda g, q, k, v: o.softmax(m(g, N, N) + q @ swapped(k)) @ v, 1.0, ("add",)),
    ("mask, then scale", lambda g, q, k, v: o.softmax((q @ swapped(k) + m(g, N, N)) * 0.5) @ v, 1.0, ("add", "mul")),
    (
        "two masks",
        lambda g, q, k, v: o.softmax(q @ swapped(k) + m(g, N, N) - g.input("p", (H, 1, N))) @ v,
        1.0,
        ("add", "add"),
    ),
    ("s of each head", lambda g, q, k, v: o.softmax(q @ swapped(k) * m(g, H, 1, 1) * 0.5) @ v, 1.0, ("mul", "mul")),
    ("s that is too large to move", lambda g, q, k, v: o.softmax((q @ swapped(k)) * 1e12) @ v, 1.0, ("mul",)),
]


def m(g: Graph, *shape: Size) -> Value:
    return g.input("m", shape)


@pytest.mark.parametrize("form, scale, steps", [f[1:] for f in FORMS], ids=[f[0] for f in FORMS])
def test_form(form: Form, scale: float, steps: tuple[str, ...]) -> None:
    g = Graph()
    out = form(g, *qkv(g))
    g.output(o.reshape(o.transpose(out, (0, 2, 1, 3)), (B, N, H * D)), "y")
    after = checked(g, raise_attention, layout, dce)
    op = node_of(after, "attention").op
    assert op.scale == pytest.approx(scale)
    assert (op.empty_row, op.steps) == ("nan", steps)
    assert not {"softmax", "matmul"} & set(ops(after))
    assert len(node_of(after, "attention").inputs) == 3 + len(steps)
    assert sources(after) >= {s for n in g.nodes if n.op.op_name in ("softmax", "matmul", "mul") for s in n.provenance}


@pytest.mark.parametrize("fill", [-math.inf, -3.4028234663852886e38, -1e9, -1e4, -5.0, 0.0, 30.0])
@pytest.mark.parametrize("turned", [False, True])
def test_mask_chosen_by_where(fill: float, turned: bool) -> None:
    """A row without keys gives what it gave: NaN for -inf, the mean of all values for a finite number."""
    g = Graph()
    q, k, v = qkv(g)
    scores, seen = q @ swapped(k) * 0.25, mask(g)
    chosen = o.where(o.not_(seen), fill, scores) if turned else o.where(seen, scores, fill)
    g.output(o.softmax(chosen) @ v, "y")
    after = checked(g, raise_attention, dce)
    assert not {"where", "not"} & set(ops(after))
    assert node_of(after, "attention").op.steps == ("where",)
    assert node_of(after, "attention").inputs[3].shape == (B, 1, 1, N)
    inputs, _ = arrays_for(g)
    inputs["seen"][0] = 0
    assert_same_results(g, after, inputs)
    assert np.isnan(run_graph(after, inputs)["y"][0]).all() == (fill == -math.inf)


FOLLOWED: list[tuple[str, Callable[[Value, Value, Value], Value]]] = [
    ("a factor that brings it back", lambda s, seen, b: o.where(seen, s, -1e4) * 1e-3),
    ("a bias", lambda s, seen, b: o.where(seen, s, -1e4) + b),
    ("another fill", lambda s, seen, b: o.where(o.greater(b, 0.0), o.where(seen, s, -1e4), -2e4)),
    ("scores below it", lambda s, seen, b: o.where(seen, s * 3e4, -1e4)),
    ("a number that brings it back", lambda s, seen, b: o.where(seen, s, -1e4) + 2e4),
    (
        "two of the least numbers",
        lambda s, seen, b: s + o.where(seen, 0.0, LEAST) + o.where(o.greater(b, 0.0), 0.0, LEAST),
    ),
    ("infinity, then a bias of infinity", lambda s, seen, b: o.where(seen, s, -math.inf) + o.exp(b * 1e3)),
]
LEAST = float(np.finfo(np.float32).min)


@pytest.mark.parametrize("form", [f[1] for f in FOLLOWED], ids=[f[0] for f in FOLLOWED])
@pytest.mark.parametrize("mended", [False, True])
def test_what_follows_a_fill_counts(form: Callable[[Value, Value, Value], Value], mended: bool) -> None:
    """A filled score is a number like others; rows of them, and NaN and infinity in q and k, are what the file says."""
    g = Graph()
    q, k, v = qkv(g)
    weights = o.softmax(form(q @ swapped(k), mask(g), g.input("b", (N, N))))
    g.output((o.where(o.is_nan(weights), 0.0, weights) if mended else weights) @ v, "y")
    after = checked(g, run_passes)
    assert "softmax" not in ops(after)
    inputs, _ = arrays_for(g)
    inputs["seen"][0], inputs["seen"][1] = 0, [1, 0, 1, 0, 0]
    for spoilt in (None, "q", "k"):
        if spoilt:
            inputs[spoilt][:, 1, ::D], inputs[spoilt][:, 2, ::D] = np.nan, np.inf
        with np.errstate(all="ignore"):
            assert_same_results(g, after, inputs)


def test_weights_that_are_nan_are_zeros_where_they_were_replaced() -> None:
    """Of a row without keys, and of one with NaN or infinity in its scores."""
    g = Graph()
    q, k, v = qkv(g)
    bias = o.where(mask(g), g.constant(0.0), g.constant(-math.inf))
    weights = o.softmax((q * 0.42) @ swapped(k * 0.42) + bias)
    g.output(o.where(o.is_nan(weights), 0.0, weights) @ v, "y")
    after = checked(g, raise_attention, dce)
    assert node_of(after, "attention").op.empty_row == "mended"
    assert "is_nan" not in ops(after)
    inputs, _ = arrays_for(g)
    inputs["seen"][0], inputs["seen"][1] = 1, 0
    inputs["q"][0, 1], inputs["q"][0, 2, 3] = np.nan, np.inf
    assert_same_results(g, after, inputs)
    y = run_graph(after, inputs)["y"]
    assert not y[1].any()
    assert not y[0, :, 1].any()
    assert y[0, :, 0].all()


def test_causal_mask_from_ranges_is_a_step() -> None:
    g = Graph()
    q, k, v = qkv(g)
    (i,) = g.add(Iota(N))
    seen = o.less_equal(o.reshape(i, (1, N)), o.reshape(i, (N, 1)))
    g.output(o.softmax(o.where(seen, q @ swapped(k), -math.inf)) @ v, "y")
    after = checked(g, run_passes)
    assert "attention" in ops(after)
    assert node_of(after, "attention").inputs[3].shape == (N, N)  # bool


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


@pytest.mark.parametrize(
    "dtype, inside", [("f16", "f32"), ("bf16", "f32"), ("f16", "f16"), ("f32", "f16"), ("f32", "f64")]
)
def test_a_file_that_rounds_on_the_way_keeps_its_nodes(dtype: str, inside: str) -> None:
    """Scores beyond 65504 are infinite in f16, and what is added to them is rounded there: not so in f32."""
    g = Graph()
    q, k, v = (g.input(name, (B, H, N, D), dtype) for name in "qkv")
    weights = o.softmax(o.cast(q @ swapped(k), inside) * 0.25)
    g.output(o.cast(weights, dtype) @ v, "y")
    assert "attention" not in ops(checked(g, raise_attention, dce))


def test_no_keys_give_empty_sums() -> None:
    keys = Dim("keys", 0)
    g = Graph()
    q, k, v = g.input("q", (B, H, N, D)), g.input("k", (B, H, keys, D)), g.input("v", (B, H, keys, D))
    g.output(o.softmax(q @ swapped(k)) @ v, "y")
    after = run_passes(g)
    assert "attention" in ops(after)
    inputs = {"q": np.ones((2, H, 3, D), np.float32)} | {n: np.ones((2, H, 0, D), np.float32) for n in "kv"}
    assert_same_results(g, after, inputs)
    assert not run_graph(after, inputs)["y"].any()


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
