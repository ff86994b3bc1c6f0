"""Convolutions in three spatial axes, which are computed of planes, and of 16-bit floats, which are summed in f32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.ir.dtype import DTYPES
from rlx.ops.conv import Conv

CASES: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((1, 3, 4, 5, 6), (8, 3, 3, 3, 3), {"pads": (1,) * 6}),
    ((2, 8, 5, 9, 7), (8, 4, 3, 2, 3), {"pads": (1, 0, 1, 0, 1, 1), "groups": 2, "strides": (2, 1, 2)}),
    ((2, 8, 5, 9, 7), (8, 1, 3, 3, 3), {"pads": (1,) * 6, "groups": 8}),
    ((1, 16, 3, 8, 8), (16, 16, 1, 1, 1), {}),
    ((2, 16, 8, 8, 8), (32, 16, 3, 3, 3), {"pads": (2, 1, 1, 2, 1, 1), "dilations": (2, 1, 1)}),
    ((1, 1, 1, 1, 1), (1, 1, 3, 3, 3), {"pads": (1,) * 6}),
    ((0, 2, 3, 3, 3), (4, 2, 2, 2, 2), {}),
    ((1, 2, 7, 1, 9), (3, 2, 7, 1, 4), {"strides": (1, 1, 3)}),
    # one channel, or windows of one plane, which are read where they lie
    ((1, 1, 6, 7, 9), (16, 1, 3, 3, 3), {"pads": (1,) * 6}),
    ((1, 1, 9, 5, 40), (8, 1, 2, 3, 3), {"pads": (2, 1, 1, 0, 1, 1), "strides": (3, 1, 1), "dilations": (2, 1, 1)}),
    ((1, 1, 9, 6, 6), (20, 1, 4, 3, 3), {"strides": (2, 2, 1)}),
    ((3, 1, 6, 7, 9), (16, 1, 3, 3, 3), {"pads": (1, 1, 1, 0, 1, 1)}),
    ((1, 1, 6, 7, 9), (1, 1, 3, 3, 3), {"pads": (1,) * 6}),
    ((1, 20, 5, 6, 7), (16, 20, 1, 3, 3), {"pads": (2, 1, 1, 1, 1, 1), "strides": (2, 1, 1)}),
    ((1, 8, 5, 6, 7), (8, 2, 1, 1, 3), {"groups": 4, "strides": (2, 1, 1)}),
]


def model(x: tuple[Any, ...], w: tuple[int, ...], dtype: str, device: str, **attributes: Any) -> rlx.CompiledGraph:
    g = rlx.Graph("conv")
    (y,) = g.add(Conv(**attributes), g.input("x", x, dtype=dtype), g.param("w", w, dtype=dtype))
    g.output(rlx.relu(y), "y")
    return rlx.compile(g, device=device)


def values(x: tuple[int, ...], w: tuple[int, ...], dtype: str) -> tuple[Any, Any]:
    rng, kind = np.random.default_rng(0), DTYPES[dtype].numpy
    scale = np.sqrt(max(np.prod(w[1:]), 1))
    return rng.standard_normal(x).astype(kind), (rng.standard_normal(w) / scale).astype(kind)


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("x, w, attributes", CASES)
def test_three_axes(x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any], dtype: str) -> None:
    """As the reference has it, with known sizes and open ones, which give the same bits."""
    data, weights = values(x, w, dtype)
    want, fixed, opened = (
        model(shape, w, dtype, device, **attributes)
        for shape, device in (
            (x, "reference"),
            (x, "cpu"),
            ((rlx.Dim("n", 0, 4), x[1], rlx.Dim("d", 1, 9), *x[3:]), "cpu"),
        )
    )
    for one in (want, fixed, opened):
        one.set_params({"w": weights})
    assert any(k.how.startswith("conv.") for k in fixed.compilation.program.run) or 0 in x
    found = fixed.run({"x": data})[0]
    wide = want.run({"x": data})[0].astype(np.float64)
    tolerance = {"f16": 2**-10, "bf16": 2**-7}.get(dtype, 1e-5) * max(1.0, np.abs(wide).max(initial=0))
    np.testing.assert_allclose(found.astype(np.float64), wide, rtol=0, atol=tolerance)
    np.testing.assert_array_equal(opened.run({"x": data})[0].view(np.uint8), found.view(np.uint8))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize(
    "x, w, attributes, strategy",
    [
        ((1, 16, 20, 20), (32, 16, 3, 3), {"pads": (1,) * 4}, "conv.winograd_f4x4_3x3"),
        ((1, 16, 20, 20), (32, 16, 3, 3), {"strides": (2, 2)}, "conv.implicit_gemm"),
        ((1, 16, 20, 20), (16, 1, 3, 3), {"pads": (1,) * 4, "groups": 16}, "conv.depthwise"),
        ((2, 3, 20, 20), (8, 3, 5, 5), {"strides": (2, 2)}, "conv.implicit_gemm"),
        ((2, 32, 9, 9), (40, 32, 1, 1), {}, "conv.in_image"),
        ((2, 3, 30), (8, 3, 5), {"strides": (2,)}, "conv.implicit_gemm"),
    ],
)
def test_16_bit_floats(
    x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any], strategy: str, dtype: str
) -> None:
    """By the strategies of f32, rounded once at the end."""
    data, weights = values(x, w, dtype)
    ours = model(x, w, dtype, "cpu", **attributes)
    ours.set_params({"w": weights})
    assert strategy in [k.how for k in ours.compilation.program.run]
    wide = model(x, w, "f64", "reference", **attributes)
    wide.set_params({"w": weights.astype(np.float64)})
    exact = wide.run({"x": data.astype(np.float64)})[0]
    found = ours.run({"x": data})[0].astype(np.float64)
    half = {"f16": 2**-11, "bf16": 2**-8}[dtype]  # of a unit in the last place
    assert np.all(np.abs(found - exact) <= 1.01 * half * np.abs(exact) + 1e-5)


@pytest.mark.parametrize(
    "x, w, attributes",
    [
        ((1, 16, 20, 20), (16, 1, 13, 13), {"pads": (6,) * 4}),
        ((2, 17, 31, 15), (17, 1, 31, 5), {"pads": (3, 2, 9, 2), "strides": (2, 1)}),
        ((1, 3, 5, 300), (3, 1, 3, 131), {"pads": (1, 4, 1, 60), "strides": (1, 2), "dilations": (1, 2)}),
        ((2, 32, 400), (32, 1, 300), {"pads": (299, 0)}),
        ((1, 8, 12, 12), (8, 1, 12, 12), {}),
    ],
)
def test_depthwise_windows_of_many_taps(x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any]) -> None:
    """They are loops over the rows of a window, and over parts of long rows."""
    data, weights = values(x, w, "f32")
    want, found = (model(x, w, "f32", device, groups=x[1], **attributes) for device in ("reference", "cpu"))
    assert "conv.depthwise" in [k.how for k in found.compilation.program.run]
    for one in (want, found):
        one.set_params({"w": weights})
    np.testing.assert_allclose(found.run({"x": data})[0], want.run({"x": data})[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16"])
@pytest.mark.parametrize(
    "x, w, groups",
    [
        ((2, 12, 23, 25), (9, 12, 1, 1), 1),
        ((1, 24, 32, 16), (24, 8, 1, 1), 3),
        ((3, 40, 30, 20), (34, 20, 1, 1), 2),
        ((1, 128, 8, 8, 8), (20, 128, 1, 1, 1), 1),
        ((2, 16, 530), (64, 4, 1), 4),
        ((1, 3, 20, 30), (5, 3, 1, 1), 1),
    ],
)
def test_single_pixels_of_planes_are_products(x: tuple[int, ...], w: tuple[int, ...], groups: int, dtype: str) -> None:
    """With a residual in planes and a bias; convolutions of open sizes have their bits."""

    def graph(shape: tuple[Any, ...]) -> rlx.Graph:
        g = rlx.Graph("pointwise")
        operands = g.input("x", shape, dtype=dtype), g.param("w", w, dtype=dtype), g.param("b", w[:1], dtype=dtype)
        (y,) = g.add(Conv(groups=groups), *operands)
        g.output(rlx.relu(y + g.input("rest", y.shape, dtype=dtype)), "y")
        return g

    data, weights = values(x, w, dtype)
    weights.flat[0] = 1e-40  # a denormal of f32
    rest, bias = values((x[0], w[0], *x[2:]), w[:1], dtype)
    opened = (rlx.Dim("n", 0, 4), x[1], rlx.Dim("size", 1, 1000), *x[3:])
    models = [rlx.compile(graph(x), device="reference")]
    models += [rlx.compile(graph(s), device="cpu", threads=t, cache=False) for s, t in ((x, 1), (x, 3), (opened, 2))]
    for one in models:
        one.set_params({"w": weights, "b": bias})
    assert [k.how.partition(".")[0] for k in models[1].compilation.program.run][-1] == "matmul"
    want, *found = (one.run({"x": data, "rest": rest})[0] for one in models)
    tolerance = {"f16": 2**-9}.get(dtype, 1e-5) * max(1.0, float(np.abs(want).max()))
    np.testing.assert_allclose(found[0].astype(np.float64), want.astype(np.float64), rtol=0, atol=tolerance)
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_single_pixels_beside_other_layouts_stay_convolutions() -> None:
    """With channels together, few pixels or many channels, steps or pads."""
    for made in (
        lambda x: rlx.conv(rlx.transpose(x, (0, 3, 1, 2)), weight(x, 30), pads=(0,) * 4),
        lambda x: rlx.conv(x, weight(x, 40), strides=(2, 1)),
        lambda x: rlx.conv(x, x.graph.param("w", (3, 40, 1, 1))),
        lambda x: rlx.conv(x, weight(x, 40), pads=(1, 1, 0, 0)),
        lambda x: rlx.conv(x[:, :, :5, :5], weight(x, 40)),
        lambda x: rlx.conv(rlx.reshape(x, (1, 400, 4, 30)), weight(x, 400)),
        lambda x: rlx.conv(rlx.reshape(x, (1, 400, 120)), x.graph.param("w", (16, 400, 1))),
    ):
        g = rlx.Graph("others")
        g.output(made(g.input("x", (1, 40, 40, 30))), "y")
        assert "conv." in rlx.compile(g, device="cpu", cache=False).explain("kernels")


def weight(x: Any, channels: int) -> Any:
    return x.graph.param("w", (16, channels, 1, 1))
