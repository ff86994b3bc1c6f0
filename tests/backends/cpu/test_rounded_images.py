"""Images between convolutions of bf16 are stored rounded: the bits of those that are rounded as they are read."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from targets import cpu, pretend

import rlx
from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.cpu.jit.compile import compile_object
from rlx.backends.cpu.jit.load import load_object
from rlx.backends.cpu.kernels.conv import fused_depthwise, pointwise
from rlx.backends.cpu.kernels.conv import strategies as conv_strategies
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Function, Module, vec
from rlx.compiler import legal_graph, lower_graph
from rlx.ir.casting import narrowed
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array
from rlx.ir.shape import Size
from rlx.kernels.program import Program
from rlx.options import CompileOptions
from rlx.testing.guarded import GuardedRun

BF16 = DTYPES["bf16"]
pairs = pytest.mark.needs("bf16")


def block(
    shape: tuple[Size, ...], wide: int, kernel: int = 3, stride: int = 1, first: int = 1, residual: bool = False
) -> rlx.Graph:
    """An inverted residual: to many channels by windows of `first` pixels, depthwise, and to few."""
    g, rng = rlx.Graph("block"), np.random.default_rng(3)
    own = int(shape[1])

    def param(name: str, *sizes: int) -> Any:
        return g.param(name, data=rng.standard_normal(sizes, np.float32))

    x = g.input("x", shape)
    inner = x if residual else rlx.clip(rlx.conv(x, param("w", own, own, 1, 1)), lo=-2.0, hi=2.0)
    apart = {"strides": (2, 2), "pads": (first // 2,) * 4} if first > 1 else {}
    y = rlx.clip(rlx.conv(inner, param("w0", wide, own, first, first), param("b0", wide), **apart), lo=0.0, hi=6.0)
    around = (kernel // 2,) * 4
    y = rlx.conv(
        y, param("w1", wide, 1, kernel, kernel), param("b1", wide), groups=wide, pads=around, strides=(stride,) * 2
    )
    y = rlx.conv(rlx.clip(y, lo=0.0, hi=6.0), param("w2", own, wide, 1, 1))
    g.output(y + x if residual else y, "y")
    return g


def laid_out(g: rlx.Graph) -> Program:
    legal = legal_graph(g, cpu(), "bf16")[1]
    return lower_graph(legal, cpu(), CompileOptions(precision="bf16"))


def result(program: Program, x: Array) -> Array:
    run = GuardedRun(program, CpuBackend().emit_kernel)
    got = run({"x": x}, workers=2, threads=1)["y"]
    assert np.array_equal(got, run({"x": x}, workers=3, threads=16, at_end=False, reverse=True)["y"])
    return np.asarray(got)


def images(program: Program) -> list[Any]:
    """The types of what convolutions store."""
    return [s.buffer.dtype.name for k in program.run if k.kind in ("conv", "contract") for s in k.stores]


BLOCKS = {
    "products": ((1, 32, 6, 7), 64, 3, 1),
    "in the image": ((2, 16, 33, 31), 48, 3, 1),
    "odd channels": ((1, 20, 33, 17), 80, 5, 1),
    "strides": ((1, 24, 25, 27), 144, 3, 2),
    "no whole panel": ((1, 8, 30, 29), 40, 3, 2),
    "one pixel": ((1, 32, 1, 1), 32, 3, 1),
    "of windows": ((2, 3, 37, 41), 32, 3, 1, 3),
    "a residual": ((1, 32, 24, 23), 96, 3, 1, 1, True),
}


@pairs
@pytest.mark.parametrize("name", BLOCKS)
def test_the_bits_of_images_that_are_not_rounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored rounded, made row by row, or stored as f32 and rounded by what reads them."""
    monkeypatch.setattr(fused_depthwise, "LEAST_BYTES", 0)
    g = block(*BLOCKS[name])
    shape = BLOCKS[name][0]
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    x[0, 0, 0, 0] = 2.0**-130  # counts as zero
    ring = laid_out(g)
    monkeypatch.setattr(fused_depthwise, "MOST_DEPTH", 0)
    apart = laid_out(g)
    monkeypatch.setattr(pointwise, "LEAST_IN_IMAGE", 1 << 30)
    products = laid_out(g)
    monkeypatch.setattr(conv_strategies, "reads_rounded", lambda kernel, target: False)
    wide = laid_out(g)
    assert "bf16" in images(apart)
    assert "bf16" not in images(wide)
    want = result(wide, x)
    for program in (ring, apart, products):
        assert np.array_equal(result(program, x), want)
    reference = rlx.compile(g, device="reference", precision="bf16").run({"x": x})[0]
    assert np.abs(want - reference).max() <= 4e-3 * np.abs(reference).max()


@pairs
def test_what_is_made_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_depthwise, "LEAST_BYTES", 0)
    for name in ("in the image", "of windows", "strides"):
        assert [k.how for k in laid_out(block(*BLOCKS[name])).run].count("conv.fused_depthwise") == 1, name


@pytest.mark.needs("avx512")
def test_a_declared_image_of_bf16_is_made_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to its type, in a ring of f32."""
    monkeypatch.setattr(fused_depthwise, "LEAST_BYTES", 0)
    g, rng = rlx.Graph("declared"), np.random.default_rng(0)
    x = g.input("x", (1, 16, 12, 13), "bf16")
    w = [
        g.param(n, data=rng.standard_normal(s).astype(BF16.numpy))
        for n, s in (("w", (48, 16, 1, 1)), ("v", (48, 1, 3, 3)))
    ]
    g.output(rlx.conv(rlx.relu(rlx.conv(x, w[0])), w[1], groups=48, pads=(1, 1, 1, 1)), "y")
    feeds = {"x": rng.standard_normal((1, 16, 12, 13)).astype(BF16.numpy)}
    ring = rlx.compile(g, device="cpu", cache=False)
    monkeypatch.setattr(fused_depthwise, "MOST_DEPTH", 0)
    apart = rlx.compile(g, device="cpu", cache=False)
    assert " conv.fused_depthwise " in ring.explain("kernels")
    assert " conv.depthwise " in apart.explain("kernels")
    assert np.array_equal(ring.run(feeds)[0], apart.run(feeds)[0])


@pairs
def test_which_images_are_rounded() -> None:
    """Those that nothing else reads, whose channels are a whole number of pairs; not results and residuals."""

    def stored(channels: int, *, seen: bool = False, added: bool = False) -> list[str]:
        g = rlx.Graph("chain")
        x = g.input("x", (1, 16, 9, 9))
        y = rlx.relu(rlx.conv(x, g.param("w", (channels, 16, 3, 3))))
        g.output(rlx.conv(y, g.param("v", (16, channels, 5, 5))), "z")
        if seen:
            g.output(y, "y")
        if added:
            g.output(rlx.sum(y), "s")
        return images(laid_out(g))

    assert stored(24) == ["bf16", "f32"]
    assert stored(25) == ["f32", "f32"]
    assert stored(24, seen=True) == ["f32", "f32"]
    assert stored(24, added=True) == ["f32", "f32"]


@pairs
def test_arena_of_rounded_images() -> None:
    """Two images of 32 channels, of which one is rounded: half of it is in memory."""

    def arena(precision: str) -> int:
        g = rlx.Graph("chain")
        y = rlx.relu(rlx.conv(g.input("x", (1, 64, 40, 40)), g.param("w", (128, 64, 1, 1))))
        g.output(rlx.conv(y, g.param("v", (32, 128, 5, 5)), strides=(5, 5)), "y")
        return int(rlx.compile(g, device="cpu", precision=precision, cache=False).plan.arena)

    assert arena("f32") - arena("bf16") >= 1600 * 128 * 2 - 1600 * 64 * 2


@pairs
def test_what_is_not_finite() -> None:
    """Each stays in the windows that see it."""
    g = block((1, 16, 20, 20), 32)
    model = rlx.compile(g, device="cpu", precision="bf16", cache=False)
    x = np.random.default_rng(0).standard_normal((1, 16, 20, 20)).astype(np.float32)
    plain = model.run({"x": x})[0]
    x[0, 3, 10, 11] = np.nan
    y = model.run({"x": x})[0]
    seen = np.zeros(y.shape, bool)
    seen[:, :, 9:12, 10:13] = True
    assert np.isnan(y[seen]).all()
    assert np.array_equal(y[~seen], plain[~seen])


@pairs
def test_open_sizes_have_the_bits_of_fixed_ones() -> None:
    x = np.random.default_rng(0).standard_normal((2, 24, 33, 40)).astype(np.float32)
    sizes = (rlx.Dim("b", 1, 4), 24, rlx.Dim("h", 1, 64), rlx.Dim("w", 1, 64))
    models = [rlx.compile(block(s, 96), device="cpu", precision="bf16", cache=False) for s in (x.shape, sizes)]
    fixed, open_ = (model.run({"x": x})[0] for model in models)
    assert np.array_equal(fixed, open_)


@pytest.mark.parametrize("vector_bytes", [pytest.param(64, marks=pytest.mark.needs("avx512")), 32])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_depthwise_of_stored_16_bits(dtype: str, vector_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of 16 bits are read where they lie, and summed in f32."""
    pretend(monkeypatch, vector_bytes=vector_bytes)
    for channels, kernel, options in (
        (32, 3, {}),
        (33, 5, {"strides": (2, 2)}),
        (8, 3, {"dilations": (2, 2)}),
        (16, 12, {"pads": (6, 6, 5, 5)}),
    ):
        g, rng = rlx.Graph("depthwise"), np.random.default_rng(0)
        x = g.input("x", (2, channels, 25, 26), dtype)
        w = g.param("w", data=rng.standard_normal((channels, 1, kernel, kernel)).astype(DTYPES[dtype].numpy))
        g.output(rlx.conv(rlx.relu(x), w, groups=channels, **options), "y")
        feeds = {"x": rng.standard_normal((2, channels, 25, 26)).astype(DTYPES[dtype].numpy)}
        model = rlx.compile(g, device="cpu", cache=False)
        assert " conv.depthwise " in model.explain("kernels")
        y, want = (
            np.asarray(m.run(feeds)[0], np.float32) for m in (model, rlx.compile(g, device="reference", cache=False))
        )
        assert np.abs(y - want).max() <= 2.0 ** (-8 if dtype == "bf16" else -11) * np.abs(want).max()


@pairs
@pytest.mark.parametrize("w", [1, 2, 8, 16, 64])
def test_rounding_in_registers(w: int) -> None:
    """To the nearest even one, with NaN, infinities and what becomes one; denormals are zeros, for any width."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 4096, np.uint32).view(np.float32)
    x[:8] = [0.0, -0.0, np.nan, np.inf, -np.inf, np.finfo(np.float32).max, 2.0**-126, -(2.0**-130)]
    x[8:16] = (np.arange(8, dtype=np.uint32) * 0x4000 + 0x3F800000).view(np.float32)  # ties
    y = np.zeros(x.shape, np.uint16)
    f = Function("rounding", [("ptr", "x"), ("ptr", "y")])

    def some(i: str, _: list[str]) -> None:
        value = f.load(vec("float", w), f.gep("%x", i, "float"))
        f.store(convert.apply(f, "round_bf16", [value], DTYPES["f32"], w), f.gep("%y", i, "i16"), ty=vec("i16", w))

    f.loop(0, len(x), w, [], some)
    f.ret()
    library = load_object(compile_object(Module([f]).text(), optimize=False))
    ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(library.address(f.name))(x.ctypes.data, y.ctypes.data)
    with np.errstate(over="ignore"):
        want = narrowed(x, "bf16")
    want = np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), want)
    got = y.view(BF16.numpy).astype(np.float32)
    assert np.array_equal(got, want, equal_nan=True)
    assert np.array_equal(np.signbit(got), np.signbit(want))
