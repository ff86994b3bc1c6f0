"""Dequantised convolutions and products are computed in integers, and quantised again from their sums at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_checks import node_of, ops, sources

import rlx.ops as o
from rlx.backends.reference import run_graph
from rlx.ir.graph import Array, Graph, Value
from rlx.ir.verify import verify
from rlx.passes import run_passes
from rlx.passes.dce import dce
from rlx.passes.raising.raise_integer import raise_integer

RNG = np.random.default_rng(0)


def whole(dtype: Any, *shape: int) -> Array:
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max + 1, shape).astype(dtype)


def f32(*shape: int) -> Array:
    return RNG.uniform(0.01, 0.02, shape).astype(np.float32)


def quantised(x: Value, dtype: str, scale: float = 1.5) -> Value:
    g = x.graph
    return o.quantize(x, g.constant(np.float32(scale)), g.constant(np.asarray(3, dtype)), to=dtype)


def dequantised(g: Graph, x: Value, zero: int = 7) -> Value:
    return o.dequantize(x, g.constant(np.float32(0.02)), g.constant(np.asarray(zero, x.dtype.numpy)))


def raised(g: Graph, quantum: float = 1.0) -> Graph:
    """The graph after the pass, whose results are those of the source within a quantum."""
    for i, node in enumerate(g.nodes):
        node.provenance = (f"n{i}",)
    after = dce(raise_integer(g))
    verify(after)
    inputs = {v.name: whole(v.dtype.numpy, *v.shape) for v in g.inputs}
    wanted, got = run_graph(g, inputs), run_graph(after, inputs)
    for name, array in wanted.items():
        assert got[name].dtype == array.dtype
        assert np.abs(got[name].astype(np.float64) - array).max() <= quantum
    return after


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", ["u8", "i8"])
def test_convolution(kind: str, per_channel: bool) -> None:
    """With a bias, one scale or one a channel; requantised at once."""
    g = Graph()
    dtype = {"u8": "uint8", "i8": "int8"}[kind]
    x = g.input("x", (2, 4, 6, 5), dtype=kind)
    scale = f32(8) if per_channel else f32()
    zero = np.zeros(scale.shape, np.int8)
    axis = 0 if per_channel else None
    w = o.dequantize(
        g.param("w", data=whole("int8", 8, 2, 3, 3)), g.param("s", data=scale), g.constant(zero), axis=axis
    )
    y = o.conv(dequantised(g, x), w, g.param("b", data=f32(8)), pads=(1, 1, 1, 1), strides=(2, 1), groups=2)
    g.output(quantised(y, dtype), "y")
    after = raised(g)
    assert not {"conv", "dequantize", "quantize", "cast"} & set(ops(after))
    assert node_of(after, "conv_integer").op.groups == 2
    assert sources(after) >= {"n2", "n3"}


@pytest.mark.parametrize("limit", ["relu", "clip"])
def test_limits_are_those_of_the_integers(limit: str) -> None:
    g = Graph()
    x = g.input("x", (1, 3, 4, 4), dtype="u8")
    w = o.dequantize(g.param("w", data=whole("int8", 5, 3, 1, 1)), g.param("s", data=f32()))
    y = o.conv(dequantised(g, x), w)
    g.output(quantised(o.relu(y) if limit == "relu" else o.clip(y, -1.0, 4.0), "int8", 0.1), "y")
    after = raised(g)
    assert {"maximum"} <= set(ops(after)) <= {
        "conv_integer", "requantize", "maximum", "minimum", "mul", "div", "reshape", "quantize",
    }  # fmt: skip


@pytest.mark.parametrize("form", ["matmul", "gemm"])
def test_product(form: str) -> None:
    """By column, with the bias of a Gemm or one that is added."""
    g = Graph()
    x, b = dequantised(g, g.input("x", (5, 6), dtype="i8")), g.param("b", data=f32(7))
    if form == "gemm":
        w = o.dequantize(g.param("w", data=whole("int8", 7, 6)), g.param("s", data=f32(7)), axis=0)
        y = o.gemm(x, w, b, trans_b=True)
    else:
        w = o.dequantize(g.param("w", data=whole("int8", 6, 7)), g.param("s", data=f32(7)), axis=1)
        y = o.matmul(x, w) + b
    g.output(quantised(y, "uint8"), "y")
    after = raised(g)
    assert "requantize" in ops(after)
    assert "quantize" not in ops(after)


def test_float_results_stay() -> None:
    """What is not quantised again is scaled in floats; a sum with two readers is not requantised."""
    g = Graph()
    x = g.input("x", (1, 3, 4, 4), dtype="u8")
    w = o.dequantize(g.param("w", data=whole("int8", 5, 3, 3, 3)), g.param("s", data=f32()))
    y = o.conv(dequantised(g, x), w)
    g.output(y, "y")
    g.output(quantised(y, "uint8"), "q")
    after = raised(g)
    assert {"conv_integer", "cast", "quantize"} <= set(ops(after))
    assert "requantize" not in ops(after)


def refused() -> list[tuple[str, Any]]:
    def by_input_channel(g: Graph, x: Value) -> Value:
        w = o.dequantize(g.param("w", data=whole("int8", 5, 3, 1, 1)), g.param("s", data=f32(3)), axis=1)
        return o.conv(dequantised(g, x), w)

    def scale_by_channel_of_x(g: Graph, x: Value) -> Value:
        w = o.dequantize(g.param("w", data=whole("int8", 5, 3, 1, 1)), g.param("s", data=f32()))
        return o.conv(o.dequantize(x, g.param("t", data=f32(3)), axis=1), w)

    def sixteen_bits(g: Graph, x: Value) -> Value:
        w = o.dequantize(g.param("w", data=whole("int16", 5, 3, 1, 1)), g.param("s", data=f32()))
        return o.conv(dequantised(g, x), w)

    return [(f.__name__, f) for f in (by_input_channel, scale_by_channel_of_x, sixteen_bits)]


@pytest.mark.parametrize("build", [f for _, f in refused()], ids=[n for n, _ in refused()])
def test_what_has_no_single_scale_an_output_stays(build: Any) -> None:
    g = Graph()
    g.output(build(g, g.input("x", (1, 3, 4, 4), dtype="u8")), "y")
    assert "conv" in ops(raised(g, 1e-4))


def test_weights_that_a_run_makes_stay() -> None:
    g = Graph()
    x, w = g.input("x", (1, 3, 4, 4), dtype="u8"), g.input("w", (5, 3, 1, 1), dtype="i8")
    g.output(o.conv(dequantised(g, x), dequantised(g, w)), "y")
    assert "conv" in ops(raised(g, 1e-4))


def test_all_passes_keep_it() -> None:
    """Weights are not folded to floats first."""
    g = Graph()
    x = g.input("x", (1, 16, 4, 4), dtype="u8")
    w = o.dequantize(g.constant(whole("int8", 5, 16, 1, 1)), g.constant(f32()))
    g.output(quantised(o.conv(dequantised(g, x), w), "uint8"), "y")
    assert "conv_integer" in ops(run_passes(g))


def test_sums_that_i32_does_not_hold_stay_in_floats() -> None:
    """33,026 products of bytes can be 2^31 and more."""
    for depth, ops_after in ((33_000, "matmul_integer"), (33_100, "matmul")):
        g = Graph()
        x = dequantised(g, g.input("x", (1, depth), dtype="u8"), zero=0)
        w = dequantised(g, g.constant(np.full((depth, 1), 255, np.uint8)), zero=0)
        g.output(o.matmul(x, w), "y")
        after = dce(raise_integer(g))
        assert ops_after in ops(after)
        inputs = {"x": np.full((1, depth), 255, np.uint8)}
        wanted, found = run_graph(g, inputs)["y"], run_graph(after, inputs)["y"]
        np.testing.assert_allclose(found, wanted, rtol=1e-4)


@pytest.mark.parametrize("limits", [(5.0, 1.0), (None, -1.0), (float("inf"), None), (float("nan"), None)])
def test_limits_that_are_no_range_stay(limits: tuple[float | None, float | None]) -> None:
    g = Graph()
    x = dequantised(g, g.input("x", (2, 4), dtype="u8"))
    w = dequantised(g, g.constant(whole(np.int8, 4, 3)))
    zero = g.constant(np.uint8(3))
    g.output(o.quantize(o.relu(o.clip(o.matmul(x, w), *limits)), g.constant(np.float32(1.5)), zero, to="u8"), "y")
    assert "requantize" not in ops(raised(g))
