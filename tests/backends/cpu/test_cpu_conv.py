"""Convolution kernels against the reference in float64, every buffer between pages that can't be touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
from targets import machine

import rlx
from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.cpu.kernels.conv import implicit_gemm, winograd
from rlx.backends.cpu.kernels.conv.winograd_forms import FORMS, transforms
from rlx.backends.cpu.schedule.arguments import THREADS
from rlx.backends.cpu.schedule.conv import conv_by_tiles
from rlx.backends.cpu.schedule.winograd import WinogradSchedule
from rlx.backends.cpu.target import Rates, Target
from rlx.backends.reference import run_graph
from rlx.ir.graph import Array, Graph, Value
from rlx.ir.shape import Dim, Size, evaluate
from rlx.kernels.fuse import fuse
from rlx.kernels.lowering import Contract
from rlx.kernels.lowering import Conv as Anchor
from rlx.kernels.program import Kernel
from rlx.ops import conv, conv_transpose, expand, hard_swish, max_pool, relu, reshape, transpose
from rlx.ops.layout import Expand, Slice
from rlx.testing.guarded import GuardedRun

Post = Callable[[Graph, Value], Value]


def conv_graph(
    x: Sequence[Size],
    w: Sequence[int],
    post: Post | None = None,
    *,
    bias: bool = True,
    dtype: str = "f32",
    **attributes: Any,
) -> Graph:
    g = Graph("conv")
    operands = [g.input("x", x, dtype), g.param("w", w, dtype)]
    if bias:
        operands.append(g.param("b", w[:1], dtype))
    y = conv(*operands, **attributes)
    g.output(post(g, y) if post else y, "y")
    return g


def arrays_of(g: Graph, extents: Mapping[str, int]) -> dict[str, Array]:
    rng = np.random.default_rng(5)
    leaves = (*g.inputs, *g.params)
    return {v.name: rng.standard_normal([evaluate(s, extents) for s in v.shape]).astype(v.dtype.numpy) for v in leaves}


def compiled(g: Graph) -> GuardedRun:
    backend = CpuBackend()
    program = backend.layout(fuse(g, backend))
    assert any(isinstance(k.anchor, Anchor | Contract) for k in program.run), "the convolution has no kernel of its own"
    return GuardedRun(program, backend.emit_kernel)


def widened_result(g: Graph, arrays: Mapping[str, Array]) -> Array:
    """The reference in float64 (kernels sum in another order than the reference in float32)."""
    wide = Graph("wide")
    made: dict[Value, Value] = {}
    for v in g.inputs:
        made[v] = wide.input(v.name, v.shape, "f64" if v.dtype.is_float else v.dtype)
    for v in g.params:
        made[v] = wide.param(v.name, v.shape, "f64" if v.dtype.is_float else v.dtype)
    for v in g.constants:
        assert v.data is not None
        made[v] = wide.constant(v.data.astype(np.float64))
    for node in g.nodes:
        made.update(zip(node.outputs, wide.add(node.op, *(made[v] for v in node.inputs)), strict=True))
    wide.output(made[g.outputs[0].value], "y")
    params = {v.name: arrays[v.name].astype(np.float64) for v in g.params}
    return run_graph(wide, {v.name: arrays[v.name].astype(np.float64) for v in g.inputs}, params)["y"]


def check(
    g: Graph, extents: Mapping[str, int] | None = None, run: GuardedRun | None = None, tolerance: float = 3e-6
) -> Array:
    sizes = dict(extents or {})
    arrays = arrays_of(g, sizes)
    run = run or compiled(g)
    got = run(arrays, sizes, workers=2)["y"]
    want = widened_result(g, arrays)
    assert got.shape == want.shape
    tolerance = 1e-12 if got.dtype == np.float64 else tolerance
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(float(np.max(np.abs(want), initial=0)), 1))
    again = run(arrays, sizes, workers=3, at_end=False, reverse=True)["y"]
    assert np.array_equal(got, again), "the order of chunks or the worker changed bits"
    return got


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize(
    "x, w, attributes",
    [
        ((1, 3, 8, 8), (4, 3, 3, 3), {"pads": (1, 1, 1, 1)}),
        ((2, 5, 9, 7), (7, 5, 3, 3), {"pads": (1, 0, 2, 1), "strides": (2, 2)}),
        ((2, 8, 14, 14), (32, 8, 1, 1), {}),
        ((2, 4, 13, 11), (6, 2, 3, 2), {"groups": 2, "dilations": (2, 1), "pads": (2, 1, 2, 0), "strides": (1, 3)}),
        ((1, 3, 33, 31), (13, 3, 7, 7), {"pads": (3, 3, 3, 3), "strides": (2, 2)}),
        ((1, 64, 17, 17), (250, 64, 3, 3), {"pads": (1, 1, 1, 1)}),  # several blocks of rows and of pixels
        ((1, 1024, 5, 5), (40, 1024, 1, 1), {}),  # weights whose rows would collide in the cache
        ((1, 3, 32, 32), (5, 3, 16, 16), {"strides": (16, 16)}),
        ((1, 4, 5, 5), (4, 4, 1, 1), {"pads": (-1, 0, 0, -1)}),
        ((1, 3, 1, 1), (5, 3, 3, 3), {"pads": (1, 1, 1, 1)}),
        ((1, 3, 20), (5, 3, 4), {"pads": (1, 2)}),
        ((2, 16, 7, 7), (37, 16, 3, 3), {"pads": (1, 1, 1, 1)}),  # one pixel more than whole panels
        ((1, 128, 5, 10), (26, 64, 1, 1), {"groups": 2}),  # two
        ((1, 131, 1, 35), (13, 131, 1, 1), {}),  # three
        ((1, 16, 14, 14), (300, 16, 3, 3), {"pads": (1, 1, 1, 1)}),  # four
        ((2, 4, 300), (6, 2, 5), {"pads": (4, 4), "dilations": (2,), "strides": (2,), "groups": 2}),
    ],
)
def test_windows(x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any], dtype: str) -> None:
    check(conv_graph(x, w, dtype=dtype, **attributes))


@pytest.mark.parametrize("outputs", [1, 2, 3, 5, 6, 7, 12, 13])
def test_rows_at_every_tile_edge(outputs: int) -> None:
    check(conv_graph((1, 4, 6, 6), (outputs, 4, 3, 3), pads=(1, 1, 1, 1)))


@pytest.mark.sample(12)
@pytest.mark.parametrize("width", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 50])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_pixels_at_every_panel_edge(width: int, stride: int) -> None:
    check(conv_graph((1, 3, 3, width), (5, 3, 3, 3), pads=(1, 1, 1, 1), strides=(1, stride)))


@pytest.mark.sample(8)
@pytest.mark.parametrize("outputs", [8, 9, 16, 24, 33])
@pytest.mark.parametrize("width", [1, 2, 5, 6, 7, 8, 9, 11, 13])
def test_windows_read_in_rows_at_every_tile_edge(width: int, outputs: int) -> None:
    """Of images as they are and of padded ones, tiles going on from row to row and from image to image."""
    check(conv_graph((3, 3, 4, width + 2), (outputs, 3, 3, 3), relu_of))
    check(conv_graph((3, 2, 3, width), (outputs, 2, 3, 3), pads=(1, 1, 1, 1)))


@pytest.mark.parametrize(
    "x, w, attributes",
    [
        ((1, 150, 5, 6), (20, 150, 3, 3), {"strides": (2, 2), "pads": (1, 1, 1, 1)}),  # steps of a part of a row
        ((2, 20, 9, 9), (20, 20, 5, 5), {"pads": (2, 2, 2, 2)}),  # three rows, and two
        ((1, 130, 7, 4), (70, 130, 3, 1), {"dilations": (2, 1)}),
        ((40, 3, 5, 5), (16, 3, 3, 3), {"pads": (1, 1, 1, 1)}),  # several images a chunk
        ((1, 64, 40, 40), (32, 64, 5, 5), {"pads": (2, 2, 2, 2)}),  # several chunks of rows of an image
        ((1, 100, 9, 9), (200, 100, 5, 5), {"strides": (3, 2), "pads": (0, 3, 4, 1)}),  # and of panels
    ],
)
def test_windows_read_in_rows(x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any]) -> None:
    for post in (relu_of, residual):
        check(conv_graph(x, w, post, **attributes))


@pytest.mark.sample(6)
@pytest.mark.parametrize("width", [2, 4, 14, 16, 18])
@pytest.mark.parametrize("channels", [3, 8, 20])
def test_an_image_that_becomes_a_row_is_pooled_along_its_channels(width: int, channels: int) -> None:
    """Rows of a few pixels hold no vector; those of 7, 8 and 9 pixels are next to where that changes."""

    def pooled(g: Graph, y: Value) -> Value:
        made: Value = reshape(max_pool(y, kernel=(2, 2), strides=(2, 2)), (3, channels * (width // 2) * 2))
        return made

    check(conv_graph((3, 5, 4, width), (channels, 5, 3, 3), pooled, pads=(1, 1, 1, 1)))


@pytest.mark.sample(10)
@pytest.mark.parametrize("height, width", [(1, 1), (3, 2), (5, 7), (9, 8), (9, 17), (14, 14), (28, 28), (3, 67)])
@pytest.mark.parametrize("kernel, stride", [(1, 2), (3, 1), (3, 2), (5, 1), (5, 2), (3, 3)])
def test_depthwise(height: int, width: int, kernel: int, stride: int) -> None:
    half = kernel // 2
    for pads in ((half,) * 4, (half, 0, half + 1, 2 * half)):
        if width + pads[1] + pads[3] >= kernel and height + pads[0] + pads[2] >= kernel:
            g = conv_graph((2, 3, height, width), (6, 1, kernel, kernel), groups=3, strides=(stride,) * 2, pads=pads)
            check(g)


@pytest.mark.sample(8)
@pytest.mark.parametrize("channels", [2, 3, 4])
@pytest.mark.parametrize(
    "x, w, attributes",
    [
        ((2, 9, 14), (24, 3, 3), {"strides": (2, 2), "pads": (1, 1, 1, 1)}),
        ((1, 3, 2), (16, 3, 3), {"pads": (1, 1, 1, 1)}),
        ((1, 20, 23), (7, 7, 7), {"strides": (2, 2), "pads": (3, 3, 3, 3)}),
        ((3, 11, 9), (33, 2, 2), {"strides": (2, 2)}),
        ((1, 12, 13), (40, 3, 5), {"pads": (0, -1, 2, -2), "dilations": (2, 1)}),
        ((2, 50), (16, 5), {"strides": (3,), "pads": (2, 1)}),
    ],
)
def test_few_planes(channels: int, x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any]) -> None:
    """Images whose channels are not together are brought together by the kernel itself."""
    check(conv_graph((x[0], channels, *x[1:]), (w[0], channels, *w[1:]), relu_of, **attributes))


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("channels", [8, 9, 16, 19, 31, 32])
@pytest.mark.parametrize(
    "size, kernel, attributes",
    [
        ((7, 7), (3, 3), {"pads": (1, 1, 1, 1), "strides": (2, 2)}),
        ((9, 16), (2, 5), {"pads": (0, 3, 1, 0), "strides": (1, 3)}),
        ((5, 17), (3, 2), {"dilations": (2, 1), "strides": (1, 2)}),
        ((3, 47), (3, 3), {"pads": (2, 2, 2, 2), "strides": (2, 2)}),
        ((40,), (4,), {"pads": (3, 0), "strides": (3,)}),
        ((6, 9), (3, 3), {"pads": (1, -2, 1, 1), "strides": (2, 1)}),
    ],
)
def test_planes_of_groups(
    channels: int, size: tuple[int, ...], kernel: tuple[int, ...], attributes: dict[str, Any], dtype: str
) -> None:
    """Chunks turn the planes of a group, in squares that overlap: the bits are those of an image that is turned."""
    g = conv_graph((2, 3 * channels, *size), (60, channels, *kernel), relu_of, dtype=dtype, groups=3, **attributes)
    run = compiled(g)
    lanes = machine().vector_bytes // (4 if dtype == "f32" else 8)
    turned = channels > implicit_gemm.UNROLLED * lanes  # more squares than a loop's body has
    assert ("channels last" in [k.name for k in run.program.run]) == turned
    got = check(g, run=run)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(implicit_gemm, "turns_planes", lambda *_: False)
        whole = compiled(g)
    assert "channels last" in [k.name for k in whole.program.run]
    assert got.tobytes() == check(g, run=whole).tobytes()


@pytest.mark.sample(8)
@pytest.mark.parametrize("channels, groups", [(1, 1), (3, 1), (16, 1), (21, 1), (3, 5), (16, 2)])
@pytest.mark.parametrize(
    "size, kernel, attributes",
    [
        ((9, 40), (3, 3), {"dilations": (2, 2), "pads": (2, 2, 2, 2)}),
        ((20, 17), (3, 2), {"dilations": (7, 5), "pads": (7, 0, 3, 9)}),
        ((30, 31), (3, 3), {"dilations": (12, 12), "pads": (12, 12, 12, 12), "strides": (2, 3)}),
        ((12, 35), (2, 4), {"dilations": (3, 3), "strides": (2, 2)}),
        ((26, 5), (3, 3), {"dilations": (11, 1), "pads": (11, 1, 11, 1)}),  # rows that no window of a chunk sees
        ((70,), (5,), {"dilations": (4,), "pads": (8, 8), "strides": (3,)}),
    ],
)
def test_windows_with_gaps(
    channels: int, groups: int, size: tuple[int, ...], kernel: tuple[int, ...], attributes: dict[str, Any]
) -> None:
    """Columns that are apart are copied next to each other, in vectors that may reach over the next pixels."""
    check(conv_graph((2, channels * groups, *size), (8 * groups, channels, *kernel), groups=groups, **attributes))


@pytest.mark.sample(16)
@pytest.mark.parametrize("pixels", [1, 5, 6, 7, 13, 49, 150])
@pytest.mark.parametrize("outputs", [8, 15, 16, 24, 40, 48, 56, 64, 80])
@pytest.mark.parametrize("channels", [16, 27, 390])
def test_epilogues_in_registers(pixels: int, outputs: int, channels: int) -> None:
    """Tiles of whole panels finish in registers, what is left over and products of many steps in memory."""
    check(conv_graph((1, channels, pixels, 1), (outputs, channels, 1, 1), residual))


@pytest.mark.sample(8)
@pytest.mark.parametrize("channels", [2, 7, 12, 20])
@pytest.mark.parametrize("height, width", [(1, 1), (3, 2), (6, 7), (9, 17)])
@pytest.mark.parametrize(
    "kernel, strides, dilations",
    [((3, 3), (1, 1), (1, 1)), ((3, 3), (2, 2), (1, 1)), ((3, 2), (1, 2), (2, 3)), ((5, 5), (2, 1), (1, 1))],
)
def test_depthwise_in_vectors(
    channels: int,
    height: int,
    width: int,
    kernel: tuple[int, int],
    strides: tuple[int, int],
    dilations: tuple[int, int],
) -> None:
    """Blocks of pixels that overlap, rows and columns at the borders, and a last vector of channels that overlaps."""
    pads = tuple(k // 2 * d + more for more in (0, 1) for k, d in zip(kernel, dilations, strict=True))
    w = (channels, 1, *kernel)
    g = conv_graph(
        (2, channels, height, width), w, residual, groups=channels, strides=strides, dilations=dilations, pads=pads
    )
    check(g)


@pytest.mark.parametrize("kernel, stride", [(3, 1), (3, 2), (5, 1)])
@pytest.mark.parametrize("width", [3, 7, 14])
def test_depthwise_rows_have_the_same_bits_in_any_pair(width: int, kernel: int, stride: int) -> None:
    """Without its first rows an image gives the same results below, though other rows are summed together."""
    rng = np.random.default_rng(2)
    arrays = {"w": rng.standard_normal((20, 1, kernel, kernel), np.float32), "b": np.ones(20, np.float32)}
    x = rng.standard_normal((1, 20, 15, width), np.float32)
    found = []
    for image in (x, x[:, :, stride:]):
        half = (kernel // 2,) * 4
        g = conv_graph(image.shape, (20, 1, kernel, kernel), groups=20, strides=(stride, stride), pads=half)
        found.append(compiled(g)({**arrays, "x": np.ascontiguousarray(image)})["y"])
    border = -(-(kernel // 2) // stride)
    np.testing.assert_array_equal(found[0][:, :, border + 1 :], found[1][:, :, border:])


@pytest.mark.parametrize(
    "x, w, attributes",
    [
        ((2, 3, 19, 23), (3, 1, 3, 3), {"dilations": (2, 3), "pads": (2, 3, 2, 3)}),
        ((2, 3, 19, 23), (3, 1, 3, 3), {"dilations": (1, 2), "strides": (3, 2), "pads": (0, 0, 1, 1)}),
        ((2, 3, 9, 23), (3, 1, 3, 3), {"pads": (-1, -1, 0, -2)}),
        ((2, 3, 63), (3, 1, 15), {"pads": (7, 7)}),
        ((1, 20, 7, 7), (20, 1, 7, 7), {}),  # a single pixel
        ((1, 20, 3, 3), (20, 1, 3, 3), {}),
        ((1, 3, 300, 200), (3, 1, 5, 5), {"pads": (2, 2, 2, 2)}),  # several strips of rows
        ((1, 3, 12, 12), (3, 1, 9, 9), {"pads": (4, 4, 4, 4)}),  # too many taps for registers
    ],
)
def test_depthwise_windows(x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any]) -> None:
    check(conv_graph(x, w, relu_of, groups=w[0], **attributes))


@pytest.mark.parametrize(
    "x, w, attributes",
    [
        ((2, 6, 100, 1), (7, 6, 5, 1), {}),
        ((1, 6, 77, 1), (8, 3, 3, 1), {"pads": (2, 0, 1, 0), "strides": (2, 1), "groups": 2}),
        ((2, 3, 45, 1), (3, 1, 5, 1), {"pads": (2, 0, 2, 0), "groups": 3}),
        ((2, 3, 45, 1), (3, 1, 5, 1), {"pads": (2, 0, 2, 0), "groups": 3, "strides": (2, 1)}),
        ((1, 3, 20, 1), (5, 3, 3, 3), {"pads": (1, 1, 1, 1)}),  # not a single column with its padding
        ((1, 3, 20, 1), (5, 3, 3, 1), {"pads": (1, 0, 1, 2)}),
        ((1, 3, 1, 1), (3, 1, 3, 1), {"pads": (1, 0, 2, 0), "groups": 3}),
    ],
)
def test_images_of_one_column(x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any]) -> None:
    check(conv_graph(x, w, relu_of, **attributes))


@pytest.mark.sample(6)
@pytest.mark.parametrize("outputs", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "x, w, attributes",
    [
        ((2, 5, 6, 9), (5, 3, 3), {"pads": (1, 1, 1, 1)}),  # a rest of a vector in each piece of a window
        ((1, 8, 7, 11), (8, 5, 5), {"pads": (2, 2, 2, 2), "strides": (2, 1)}),
        ((1, 1, 1, 700), (1, 1, 256), {"strides": (1, 2)}),
        ((3, 1, 40), (1, 41), {"pads": (4, 7)}),
        ((2, 4, 5, 3), (4, 3, 2), {"dilations": (2, 1)}),
        ((40, 3, 3, 3), (3, 3, 3), {}),  # one pixel an image
        ((1, 9, 50, 60), (9, 3, 3), {"pads": (1, 1, 1, 1)}),  # several parts and chunks
    ],
)
def test_few_outputs(outputs: int, x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any]) -> None:
    """Dot products of windows where they lie, sums in planes, epilogues along the pixels."""
    for post in (None, scaled, residual) if len(w) == 3 else (None, relu_of):
        check(conv_graph(x, (outputs, *w), post, **attributes))


@pytest.mark.sample(8)
@pytest.mark.parametrize("pixels", [1, 3, 7, 8, 9, 17])
@pytest.mark.parametrize("outputs", [1, 2, 4])
def test_few_outputs_at_every_edge(pixels: int, outputs: int) -> None:
    """A pixel's bits do not depend on the pixels computed with it."""
    g = conv_graph((1, 3, 20), (outputs, 3, 4), relu_of)
    arrays = arrays_of(g, {})
    whole = compiled(g)(arrays, {}, workers=1)["y"]
    arrays["x"] = arrays["x"][:, :, : pixels + 3].copy()
    part = compiled(conv_graph((1, 3, pixels + 3), (outputs, 3, 4), relu_of))(arrays, {}, workers=1)["y"]
    assert np.array_equal(part, whole[:, :, :pixels])


def test_filters_are_summed_in_float64() -> None:
    """What a filter of a signal stops is a sum of products that cancel: only its rounding to f32 is lost.

    (A chain of fma in f32 is off by 3e-9 here, vectors of them by 1e-9: a thousandth of the result.)
    """
    taps = np.arange(256)
    window = np.kaiser(256, 10)
    low_pass = window / window.sum()
    signal = np.sin(2 * np.pi * 0.31 * np.arange(2000))
    x, w = signal.astype(np.float32)[None, None], low_pass.astype(np.float32)[None, None]
    got = compiled(conv_graph(x.shape, w.shape, bias=False, strides=(2,)))({"x": x, "w": w}, {}, workers=1)["y"]
    starts = np.arange(got.size)[:, None] * 2
    want = x[0, 0].astype(np.float64)[starts + taps] @ w[0, 0].astype(np.float64)
    assert np.abs(want).max() < 1e-5, "the filter stops the signal"
    assert np.abs(got[0, 0] - want).max() <= 2.0**-24 * np.abs(want).max()


def relu_of(_: Graph, y: Value) -> Value:
    made: Value = relu(y)
    return made


def scaled(g: Graph, y: Value) -> Value:
    shape = (1, y.shape[1], 1, 1)
    made: Value = relu(y * g.param("scale", shape) + g.param("shift", shape))
    return made


def scaled_signal(g: Graph, y: Value) -> Value:
    made: Value = relu(y * g.param("scale", (y.shape[1], 1)))
    return made


def residual(g: Graph, y: Value) -> Value:
    made: Value = relu(y + g.input("r", y.shape))
    return made


def by_column(g: Graph, y: Value) -> Value:
    return y + g.input("r", (y.shape[0], 1, 1, y.shape[3]))


def by_row(g: Graph, y: Value) -> Value:
    return y * g.input("r", (y.shape[2], 1))


def enlarged(_: Graph, y: Value) -> Value:
    """Each pixel four times: the results of a row lie neither in pixels nor in planes."""
    n, c, height, width = y.shape
    each = expand(reshape(y, (n, c, height, 1, width, 1)), (n, c, height, 2, width, 2))
    made: Value = reshape(each, (n, c, 2 * height, 2 * width))
    return made


def positive(g: Graph, y: Value) -> Value:
    return y > 0.5


def gated(_: Graph, y: Value) -> Value:
    made: Value = hard_swish(y)
    return made


@pytest.mark.sample(6)
@pytest.mark.parametrize("post", [scaled, residual, by_column, by_row, lambda g, y: hard_swish(y)])
@pytest.mark.parametrize("groups, w", [(1, (7, 6, 3, 3)), (6, (6, 1, 3, 3)), (2, (4, 3, 1, 1))])
def test_epilogues_are_fused(post: Post, groups: int, w: tuple[int, ...]) -> None:
    g = conv_graph((2, 6, 9, 11), w, post, groups=groups, pads=(w[2] // 2,) * 4)
    run = compiled(g)
    (kind,) = (k.kind for k in run.program.run if k.name != "channels last")
    assert kind == "conv" or (kind == "contract" and groups > 1 and w[2:] == (1, 1))  # a product for each group
    check(g, run=run)


def test_an_epilogue_covers_the_last_pixels() -> None:
    g = conv_graph((2, 16, 7, 7), (12, 16, 3, 3), residual, pads=(1, 1, 1, 1))
    check(g)
    g = conv_graph((1, 128, 7, 7), (12, 128, 1, 1), positive)
    arrays = arrays_of(g, {})
    assert np.mean(compiled(g)(arrays)["y"] != widened_result(g, arrays)) < 0.01


@pytest.mark.parametrize("groups", [1, 3])
def test_an_epilogue_may_change_the_type(groups: int) -> None:
    g = conv_graph((1, 3, 7, 9), (6, 3 // groups, 3, 3), positive, groups=groups, pads=(1, 1, 1, 1))
    arrays = arrays_of(g, {})
    got = compiled(g)(arrays)["y"]
    assert got.dtype == np.bool_
    assert np.mean(got != widened_result(g, arrays)) < 0.01


@pytest.mark.sample(8)
@pytest.mark.parametrize("post", [None, relu_of, scaled, residual, gated])
@pytest.mark.parametrize(
    "x, w, attributes",
    [
        ((1, 300, 17, 9), (352, 300, 1, 1), {}),  # rows and columns of no whole tile
        ((2, 130, 16, 12), (352, 130, 1, 1), {}),
        ((1, 300, 33, 18), (352, 300, 1, 1), {"strides": (2, 2)}),  # windows are gathered
        ((1, 40, 31, 25), (208, 40, 3, 3), {"strides": (2, 2), "pads": (1, 1, 1, 1)}),
        ((1, 24, 23, 25), (211, 24, 3, 3), {"dilations": (2, 2), "pads": (2, 2, 2, 2)}),
        ((1, 512, 16, 16), (480, 256, 1, 1), {"groups": 2}),
        ((1, 900, 4, 25), (208, 900, 1, 1), {}),  # K in two blocks
        ((1, 90, 13, 15), (580, 90, 1, 1), {}),  # few products, of a small depth
        ((1, 160, 7, 7), (330, 160, 1, 1), {}),  # chunks of few pixels
        ((1, 401, 14, 14), (97, 401, 1, 1), {}),
        ((2, 128, 3, 11), (200, 64, 1, 2), {"groups": 2}),
    ],
)
def test_products_by_tile_registers(
    x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any], post: Post | None
) -> None:
    g = conv_graph(x, w, post, **attributes)
    y = g.outputs[0].value.shape
    pixels, outputs = y[0] * prod(y[2:]), w[0] // attributes.get("groups", 1)
    assert conv_by_tiles(pixels, outputs, prod(w[1:]))
    check(g)


def test_pixels_from_few_to_enough_for_tile_registers() -> None:
    n = Dim("n", 1, 40)
    g = conv_graph((n, 320, 5, 5), (300, 320, 1, 1), relu_of)
    run = compiled(g)
    for batch in (1, 6, 7, 13):
        check(g, {"n": batch}, run)


def test_denormal_weights_count_as_zeros() -> None:
    """They would make products a hundred times as slow on many processors."""
    g = conv_graph((1, 20, 6, 5), (32, 20, 3, 3))
    arrays = arrays_of(g, {})
    arrays["w"][5] *= np.float32(1e-39)
    arrays["w"][6, ::2] *= np.float32(1e-39)
    got = compiled(g)(arrays)["y"]
    assert np.array_equal(got[0, 5], np.full((4, 3), arrays["b"][5]))
    arrays["w"][np.abs(arrays["w"]) < 2.0**-126] = 0
    assert np.array_equal(got, compiled(g)(arrays)["y"])


def test_a_padded_input_is_not_multiplied() -> None:
    """Infinities and NaN next to the padding or in unused lanes stay where their windows are."""
    for groups, w in ((1, (2, 2, 3, 3)), (2, (2, 1, 3, 3))):
        g = conv_graph((1, 2, 6, 9), w, groups=groups, pads=(1, 1, 1, 1))
        arrays = arrays_of(g, {})
        arrays["x"][0, :, 0, 0] = np.inf
        arrays["x"][0, :, 5, 8] = np.nan
        got = compiled(g)(arrays)["y"]
        want = run_graph(g, {"x": arrays.pop("x")}, arrays)["y"]
        assert np.array_equal(np.isfinite(got), np.isfinite(want))


@pytest.mark.parametrize("groups", [1, 4])
def test_sizes_known_at_the_run(groups: int) -> None:
    """One kernel for all sizes, with the bits that a compilation for each size gives."""
    n, h, w = Dim("n", 0, 4), Dim("h", 3, 64), Dim("w", 3, 64)
    weight = (8, 4 // groups, 3, 3)
    attributes: dict[str, Any] = {"groups": groups, "pads": (1, 1, 1, 1), "strides": (2, 2)}
    g = conv_graph((n, 4, h, w), weight, residual, **attributes)
    run = compiled(g)
    for sizes in ((1, 3, 3), (2, 9, 16), (3, 40, 33), (0, 5, 5), (1, 64, 64)):
        got = check(g, dict(zip("nhw", sizes, strict=True)), run)
        fixed = conv_graph((sizes[0], 4, *sizes[1:]), weight, residual, **attributes)
        if sizes[0]:
            assert np.array_equal(got, compiled(fixed)(arrays_of(fixed, {}))["y"])


def test_pads_known_at_the_run() -> None:
    before = Dim("before", 0, 4)
    for groups in (1, 3):
        g = conv_graph((1, 3, 10, 10), (3, 3 // groups, 3, 3), groups=groups, pads=(0, before, 0, before))
        g.input("unused", (before,))
        run = compiled(g)
        for size in (1, 2, 4):
            check(g, {"before": size}, run)


def test_weights_that_are_computed_become_a_plain_copy() -> None:
    g = Graph("conv")
    x, w = g.input("x", (1, 4, 6, 6)), g.param("w", (3, 3, 4, 5))
    g.output(conv(x, transpose(w, (3, 2, 0, 1)) * 2.0, pads=(1, 1, 1, 1)), "y")
    check(g)


def test_images_in_other_layouts() -> None:
    """Channels last, a slice of the channels, and rows that repeat one element."""
    w = (5, 3, 3, 3)
    makes: list[Callable[[Graph], Value]] = [
        lambda g: transpose(g.input("x", (2, 6, 7, 3)), (0, 3, 1, 2)),
        lambda g: g.add(Slice((0, 2, 0, 0), (2, 3, 6, 7), (1, 1, 1, 1)), g.input("x", (2, 8, 6, 7)))[0],
        lambda g: g.add(Expand((2, 3, 6, 7)), g.input("x", (2, 3, 6, 1)))[0],
    ]
    for make in makes:
        g = Graph("conv")
        g.output(conv(make(g), g.param("w", w), pads=(1, 1, 1, 1)), "y")
        check(g)


def strategies(run: GuardedRun) -> list[str]:
    return [k.how for k in run.program.run if isinstance(k.anchor, Anchor)]


@pytest.fixture(params=list(FORMS))
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each transform in turn, for every convolution that it can compute."""
    chosen: str = request.param

    def choose(kernel: Kernel, target: Target) -> str:
        return chosen if chosen in winograd.possible(kernel) else ""

    monkeypatch.setattr(winograd, "choose", choose)
    return chosen


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "x, outputs, pads",
    [
        ((1, 16, 8, 8), 16, (1, 1, 1, 1)),
        ((2, 17, 7, 9), 19, (1, 1, 1, 1)),
        ((1, 16, 7, 7), 16, (0, 0, 0, 0)),
        ((1, 16, 1, 1), 16, (3, 3, 3, 3)),
        ((1, 16, 33, 31), 16, (0, 2, 1, 0)),
        ((1, 16, 7, 66), 17, (3, 1, 0, 5)),  # more padding than a window, one row of 17 and of 33 tiles
        ((3, 20, 14, 14), 16, (1, 1, 1, 1)),
        ((1, 16, 40, 67), 64, (1, 1, 1, 1)),  # several blocks of tile rows
        ((1, 256, 9, 10), 130, (1, 1, 1, 1)),  # several blocks of rows of weights, of padded weights
    ],
)
def test_winograd(x: tuple[int, ...], outputs: int, pads: tuple[int, ...], name: str) -> None:
    """Odd sizes and tile edges, within the error that the module states."""
    for post in (None, residual):
        g = conv_graph(x, (outputs, x[1], *FORMS[name].r), post, pads=pads)
        run = compiled(g)
        assert strategies(run) == [name]
        check(g, run=run, tolerance=1e-6 if name == "conv.winograd_f2x2_3x3" else 6e-6)


@pytest.mark.sample(8)
@pytest.mark.parametrize("groups, channels, outputs", [(2, 16, 16), (3, 17, 19), (2, 32, 130), (5, 20, 16)])
def test_winograd_in_groups(groups: int, channels: int, outputs: int, name: str) -> None:
    """Each group reads its channels and weights only, those of a last half panel too; a run may bring the sizes."""
    w = (groups * outputs, channels, *FORMS[name].r)
    for post in (None, residual):
        g = conv_graph((2, groups * channels, 11, 14), w, post, pads=(1, 1, 1, 1), groups=groups)
        run = compiled(g)
        assert strategies(run) == [name]
        check(g, run=run, tolerance=1e-6 if name == "conv.winograd_f2x2_3x3" else 6e-6)
    sizes = Dim("n", 0, 4), groups * channels, Dim("h", 3, 64), 14
    opened = compiled(conv_graph(sizes, w, residual, pads=(1, 1, 1, 1), groups=groups))
    check(g, {"n": 2, "h": 11}, opened, tolerance=6e-6)


def test_winograd_takes_nan_no_further_than_its_tiles(name: str) -> None:
    """Results beyond the tiles that see a NaN, and those of other groups, have the bits that they have without it."""
    form = FORMS[name]
    g = conv_graph((1, 32, 24, 24), (32, 16, *form.r), groups=2, bias=False)
    arrays, run = arrays_of(g, {}), compiled(g)
    assert strategies(run) == [name]
    clean = run(arrays)["y"]
    arrays["x"][0, 3, 9, 10] = np.nan
    found = np.isnan(run(arrays)["y"])
    near = np.zeros(found.shape, bool)
    rows, columns = (
        slice(max(at - r + 1, 0) // m * m, (at // m + 1) * m) for at, r, m in zip((9, 10), form.r, form.m, strict=True)
    )
    near[0, :16, rows, columns] = True
    sees = np.zeros(found.shape, bool)
    sees[0, :16, 9 - form.r[0] + 1 : 10, 10 - form.r[1] + 1 : 11] = True
    assert found[sees].all()
    assert not found[~near].any()
    np.testing.assert_array_equal(run(arrays)["y"][~near], clean[~near])


@pytest.mark.parametrize("length", [8, 9, 10, 11, 12, 33])
def test_winograd_of_signals(length: int, name: str) -> None:
    """Convolutions with one spatial axis, of every rest of a tile, and of more than one tile."""
    if FORMS[name].r[0] == 1:
        g = conv_graph((2, 16, length), (40, 16, FORMS[name].r[1]), scaled_signal, pads=(1, 0))
        run = compiled(g)
        assert strategies(run) == [name]
        check(g, run=run, tolerance=6e-6)


@pytest.mark.sample(8)
@pytest.mark.parametrize("post", [scaled, by_column, by_row])
def test_epilogues_of_winograd(post: Post, name: str) -> None:
    g = conv_graph((2, 16, 13, 11), (18, 16, *FORMS[name].r), post, pads=(1, 1, 1, 1))
    run = compiled(g)
    assert strategies(run) == [name]
    assert [k.kind for k in run.program.run if k.name != "channels last"] == ["conv"]
    check(g, run=run, tolerance=6e-6)


def test_results_of_winograd_that_are_repeated(name: str) -> None:
    g = conv_graph((2, 16, 13, 11), (18, 16, *FORMS[name].r), enlarged, pads=(1, 1, 1, 1))
    run = compiled(g)
    assert strategies(run) == [name]
    check(g, run=run, tolerance=6e-6)


def test_winograd_may_change_the_type(name: str) -> None:
    g = conv_graph((2, 16, 13, 11), (18, 16, *FORMS[name].r), positive, pads=(1, 1, 1, 1))
    arrays = arrays_of(g, {})
    run = compiled(g)
    assert strategies(run) == [name]
    got = run(arrays, workers=2)["y"]
    assert got.dtype == np.bool_
    assert np.mean(got != widened_result(g, arrays)) < 0.001
    assert np.array_equal(got, run(arrays, workers=3, reverse=True, at_end=False)["y"])


def test_winograd_of_sizes_known_at_the_run(name: str) -> None:
    n, h, w = Dim("n", 0, 4), Dim("h", 3, 64), Dim("w", 3, 64)
    g = conv_graph((n, 16, h, w), (16, 16, *FORMS[name].r), residual, pads=(2, 2, 2, 2))
    run = compiled(g)
    assert [how.partition("|")[0] for how in strategies(run)] == [name]  # which may be one of two ways
    for sizes in ((1, 3, 3), (2, 9, 16), (3, 40, 33), (0, 5, 5), (1, 64, 64)):
        check(g, dict(zip("nhw", sizes, strict=True)), run, tolerance=6e-6)


def test_winograd_is_not_for_every_window(name: str) -> None:
    """Strides, dilations, small groups, other windows, f64 and weights that are computed have none."""
    r = FORMS[name].r
    cases: list[tuple[tuple[int, ...], str, dict[str, Any]]] = [
        ((16, 16, *r), "f32", {"strides": (2, 1)}),
        ((16, 16, *r), "f32", {"dilations": (1, 2)}),
        ((16, 16, 3, 9), "f32", {}),
        ((16, 8, *r), "f32", {"groups": 2}),
        ((16, 16, *r), "f64", {}),
        ((16, 16, *r), "f32", {"pads": (-1, 1, 1, 1)}),
    ]
    for w, dtype, attributes in cases:
        assert name not in strategies(compiled(conv_graph((1, 16, 12, 12), w, dtype=dtype, **attributes)))


def test_winograd_is_chosen_where_it_pays() -> None:
    """By the channels alone: were it by the size of the image too, a dynamic compile would have other bits."""
    for channels, outputs, expected in ((64, 64, True), (512, 512, True), (3, 64, False)):
        made = [
            strategies(compiled(conv_graph((1, channels, n, n), (outputs, channels, 3, 3), pads=(1,) * 4)))
            for n in (7, 56)
        ]
        assert made[0] == made[1]
        assert made[0][0].startswith("conv.winograd") == expected


def turned_weights(g: Graph, w: Sequence[int], kind: str) -> Value:
    """Weights of a run: as they come, or turned around as a gradient has them."""
    if kind == "given":
        return g.input("w", w)
    around = (w[1], w[0], *w[2:])
    given = g.input("w", around)
    starts = (0, 0, *(size - 1 for size in w[2:]))
    turned: Value = transpose(g.add(Slice(starts, around, (1, 1, *(-1 for _ in w[2:]))), given)[0], perm=(1, 0, 2, 3))
    return turned


@pytest.mark.parametrize("kind", ["given", "turned"])
@pytest.mark.parametrize("channels, outputs, pads", [(17, 40, (1, 1, 1, 1)), (16, 16, (0, 2, 1, 0))])
def test_winograd_of_weights_of_a_run(channels: int, outputs: int, pads: tuple[int, ...], kind: str, name: str) -> None:
    """They are transformed in each run, wherever they come from."""
    g, w = Graph("computed"), (outputs, channels, *FORMS[name].r)
    g.output(conv(g.input("x", (2, channels, 21, 13)), turned_weights(g, w, kind), pads=pads), "y")
    run = compiled(g)
    assert strategies(run) == ["conv.winograd_weights", name]
    check(g, run=run, tolerance=1e-6 if name == "conv.winograd_f2x2_3x3" else 6e-6)


@pytest.mark.parametrize("window", [(3, 3), (3,), (5,), (7,)], ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["constant", "given"])
def test_bits_of_an_image_depend_neither_on_the_batch_nor_on_what_is_known(
    window: tuple[int, ...], given: bool
) -> None:
    """With weights that are packed, and with weights that each run is given."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((64, 64, *window), np.float32)
    pads = tuple(k // 2 for k in window) * 2

    def graph(n: Size, *sizes: Size) -> Graph:
        g = Graph("image")
        x = g.input("x", (n, 64, *sizes))
        weights = g.input("w", w.shape) if given else g.param("w", w.shape, data=w)
        g.output(conv(x, weights, pads=pads), "y")
        return g

    def result(g: Graph, *arrays: Array) -> Array:
        (made,) = rlx.compile(g, device="cpu", cache=False).run(list(arrays))
        return np.asarray(made)

    for size in (2, 4, 7, 20):
        x = rng.standard_normal((4, 64, *[size] * len(window)), np.float32)
        run = (w,) if given else ()
        either = graph(Dim("n", 1, 8), *[Dim(name, 1, 64) for name in ("h", "w")[: len(window)]])
        want = result(either, x, *run)
        for known in (graph(4, *x.shape[2:]), graph(Dim("n", 1, 8), *x.shape[2:])):
            assert np.array_equal(result(known, x, *run), want)
        assert np.array_equal(result(either, x[1:2], *run)[0], want[1])


@pytest.mark.parametrize("window, tile", [(3, 4), (5, 4), (7, 2)])
def test_one_tile_of_a_line_is_summed_plainly(window: int, tile: int) -> None:
    """By the widest vectors; a compile for sizes that the run decides gives the bits of one for that size."""
    few = tile if machine().vector_bytes == 64 else 0

    def signal(n: Size, length: Size) -> Graph:
        return conv_graph((n, 64, length), (64, 64, window), scaled_signal, pads=(window // 2,) * 2)

    either = compiled(signal(Dim("n", 0, 4), Dim("length", 1, 32)))
    for n, length in ((1, 1), (1, tile), (1, tile + 1), (2, tile // 2), (2, tile), (3, 20), (0, 5)):
        known = compiled(signal(n, length))
        assert strategies(known)[0].startswith("conv.winograd") == (length > few)
        extents = {"n": n, "length": length}
        want = check(signal(n, length), run=known, tolerance=6e-6)
        assert np.array_equal(check(signal(n, length), extents, either, tolerance=6e-6), want)


def test_transforms_are_exact() -> None:
    """In rational numbers the transforms give the sums of products themselves."""
    for m, r in {(m, r) for form in FORMS.values() for m, r in zip(form.m, form.r, strict=True)}:
        a, g, b = transforms(m, r)
        for i in range(m + r - 1):
            for k in range(r):
                for row in range(m):
                    found = sum(a[row][p] * g[p][k] * b[p][i] for p in range(m + r - 1))
                    assert found == (i == row + k)


@pytest.mark.parametrize("channels, outputs, size", [(96, 128, 14), (128, 128, 14), (96, 96, 14), (64, 192, 10)])
@pytest.mark.parametrize("name", ["conv.winograd_f2x2_3x3", "conv.winograd_f4x4_3x3"])
def test_a_convolution_that_takes_long_is_not_one_chunk(channels: int, outputs: int, size: int, name: str) -> None:
    """By tiles, of a small image with large weights: two threads have a half of it each, and all of it is done."""
    form = FORMS[name]
    for threads in (1, 2, 3, 8):
        cut = WinogradSchedule(form.m, form.n, (1, channels, outputs, size, size), 0, Rates())({THREADS: threads})
        panels = -(-outputs // WinogradSchedule.WIDTH)
        assert cut.chunks > 1
        assert cut.chunks == -(-cut.tiles // cut.tile_chunk) * -(-panels // cut.panel_chunk)
        assert threads > 2 or cut.chunks % 2 == 0


@pytest.mark.sample(6)
@pytest.mark.parametrize("outputs", [24, 40, 136, 200])
@pytest.mark.parametrize("channels, size", [(96, 12), (96, 16), (96, 8), (24, 48)])
def test_half_a_panel_at_the_end_is_not_a_chunk_of_its_own(outputs: int, channels: int, size: int) -> None:
    """Its vectors overlap those before them, which are another chunk's then."""
    for form in FORMS.values():
        for threads in (1, 2, 3, 8, 64):
            cut = WinogradSchedule(form.m, form.n, (1, channels, outputs, size, size), 0, Rates())({THREADS: threads})
            assert cut.panel_chunk >= -(-outputs // WinogradSchedule.WIDTH)
    check(conv_graph((1, channels, size, size), (outputs, channels, 3, 3), relu_of, pads=(1, 1, 1, 1)))


def test_an_image_of_params_and_an_open_size_is_made_in_the_run() -> None:
    """`prepare` knows no size of a run: the copy with channels last was made there, and no compile succeeded."""
    n = Dim("n", 1, 4)
    g = Graph("open")
    x = g.param("x", (1, 8, 9, 9))
    made = conv(g.add(Expand((n, 8, 9, 9)), x)[0], g.param("w", (16, 8, 3, 3)))
    g.output(made + g.input("z", (n, 16, 7, 7)), "y")
    for size in (1, 3):
        check(g, {"n": size})


def test_an_image_in_planes_is_turned_once_for_all_that_read_it() -> None:
    """The input of several convolutions, and that of the phases of a transposed one."""
    rng = np.random.default_rng(3)
    kernels = [rng.standard_normal((n, 24, 3, 3)).astype(np.float32) for n in (20, 7)]
    g = Graph("both")
    x = g.input("x", (1, 24, 9, 11))
    for n, w in enumerate(kernels):
        g.output(conv(x, g.constant(w), pads=(1, 1, 1, 1)), f"y{n}")
    image = rng.standard_normal((1, 24, 9, 11)).astype(np.float32)
    model = rlx.compile(g, device="cpu", cache=False)
    assert names_of_run(model).count("channels last") == 1
    for got, w in zip(model.run([image]), kernels, strict=True):
        alone = Graph("one")
        alone.output(conv(alone.input("x", image.shape), alone.constant(w), pads=(1, 1, 1, 1)), "y")
        assert got.tobytes() == rlx.compile(alone, device="cpu", cache=False).run([image])[0].tobytes()
    turned = Graph("transposed")
    w = turned.constant(rng.standard_normal((24, 2, 3, 3)).astype(np.float32))
    turned.output(conv_transpose(turned.input("x", image.shape), w, strides=(2, 2), pads=(1, 1, 1, 1)), "y")
    assert names_of_run(rlx.compile(turned, device="cpu", cache=False)).count("channels last") == 1


def test_an_image_that_changes_between_two_readers_is_turned_twice() -> None:
    rng = np.random.default_rng(4)
    weights = rng.standard_normal((5, 20, 3, 3)).astype(np.float32)
    g = Graph("state")
    old = g.state("s", (1, 20, 8, 8))
    x = g.input("x", (1, 20, 8, 8))
    g.output(conv(old, g.constant(weights)), "before")
    new = old + x
    g.update(old, new)
    g.output(conv(new, g.constant(weights)), "after")
    model = rlx.compile(g, device="cpu", cache=False)
    image = rng.standard_normal((1, 20, 8, 8)).astype(np.float32)
    (_, first), (second, third) = model.run([image]), model.run([image])
    assert first.tobytes() == second.tobytes()
    assert np.allclose(third, 2 * first, rtol=1e-4, atol=1e-4)


def names_of_run(model: rlx.CompiledGraph) -> list[str]:
    return [k.name for k in model.compilation.program.run]  # type: ignore[union-attr]
