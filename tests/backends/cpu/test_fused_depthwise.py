"""Depthwise convolutions that make their image themselves: the bits of two kernels, without the image in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.cpu.kernels.conv import fused_depthwise
from rlx.backends.cpu.schedule.arguments import THREADS
from rlx.backends.cpu.schedule.fused_depthwise import FusedDepthwiseSchedule
from rlx.backends.cpu.target import Rates
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim, Size
from rlx.kernels.fuse import fuse
from rlx.kernels.program import Kernel, Program
from rlx.kernels.work import kernel_work
from rlx.ops import clip, conv, hard_swish
from rlx.testing.guarded import GuardedRun

OUTPUTS = 48


@pytest.fixture(autouse=True)
def small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_depthwise, "LEAST_BYTES", 0)


def block(shape: tuple[Size, ...], kernel: int, first: int = 1, outputs: int = OUTPUTS, **attributes: Any) -> Graph:
    """A product, or windows of `first` rows two pixels apart, and a depthwise convolution of its result."""
    g, rng = Graph("block"), np.random.default_rng(3)

    def param(name: str, *sizes: int) -> Any:
        return g.param(name, data=rng.standard_normal(sizes, np.float32))

    x = g.input("x", shape)
    weights, apart = param("w0", outputs, int(shape[1]), first, first), {"strides": (2, 2), "pads": (1, 0, 1, 2)}
    image = conv(x, weights, param("b0", outputs), **(apart if first > 1 else {}))
    image = clip(image, lo=-1.0, hi=6.0)
    y = conv(image, param("w1", outputs, 1, kernel, kernel), param("b1", outputs), groups=outputs, **attributes)
    g.output(hard_swish(y), "y")
    return g


def laid_out(g: Graph) -> Program:
    backend = CpuBackend()
    return backend.layout(fuse(g, backend))


def joined(program: Program) -> list[Kernel]:
    return [k for k in program.run if k.before is not None]


def read_twice(g: Graph) -> Graph:
    g.output(g.nodes[1].outputs[0].sum(), "sum")
    return g


UNJOINED: dict[str, Graph] = {
    "an element of its image is a sum of more than 48 products": block((1, 49, 5, 7), 3),
    "the size of its image is known at the run only": block((1, 5, Dim("n", 3, 9), 7), 3),
    "its image has other readers": read_twice(block((1, 5, 5, 7), 3)),
    "its channels are no whole panels": block((1, 5, 5, 7), 3, outputs=24),
}


@pytest.mark.parametrize("why", UNJOINED)
def test_why_it_stays_alone(why: str) -> None:
    (kernel,) = [k for k in laid_out(UNJOINED[why]).run if k.how == "conv.depthwise"]
    assert kernel.refused[-1] == ("conv.fused_depthwise", why)


def test_why_a_small_image_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (kernel,) = [k for k in laid_out(block((1, 5, 5, 7), 3)).run if k.how == "conv.depthwise"]
    assert kernel.refused[-1][1] == "its image is so small that it stays in a cache"


def result(program: Program, x: Any, threads: int = 1) -> Any:
    run = GuardedRun(program, CpuBackend().emit_kernel)
    got = run({"x": x}, workers=2, threads=threads)["y"]
    again = run({"x": x}, workers=3, threads=threads, at_end=False, reverse=True)["y"]
    assert np.array_equal(got, again), "the order of chunks or the worker changed bits"
    return got


@pytest.mark.sample(12)
@pytest.mark.parametrize("height, width", [(1, 1), (5, 7), (9, 8), (3, 67), (23, 9)])
@pytest.mark.parametrize("kernel, stride, dilation", [(3, 1, 1), (3, 2, 1), (5, 1, 1), (5, 2, 1), (3, 1, 2), (2, 3, 1)])
def test_the_bits_of_two_kernels(
    height: int, width: int, kernel: int, stride: int, dilation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any height, at every end of a tile, of the ring and of a strip, in chunks for few threads and for many."""
    reach = (kernel - 1) * dilation + 1
    pads = (reach // 2, reach // 2, reach - reach // 2, reach)
    g = block((2, 5, height, width), kernel, pads=pads, strides=(stride,) * 2, dilations=(dilation,) * 2)
    x = np.random.default_rng(1).standard_normal((2, 5, height, width), np.float32)
    ring = laid_out(g)
    monkeypatch.setattr(fused_depthwise, "MOST_DEPTH", 0)
    apart = laid_out(g)
    assert (len(joined(ring)), len(joined(apart))) == (1, 0)
    want = result(apart, x)
    assert np.array_equal(result(ring, x), want)
    assert np.array_equal(result(ring, x, threads=16), want)


@pytest.mark.sample(8)
@pytest.mark.parametrize("height, width", [(2, 3), (9, 7), (17, 33)])
@pytest.mark.parametrize("planes, first", [(3, 3), (4, 2), (2, 3)])
@pytest.mark.parametrize("kernel, stride", [(3, 1), (3, 2)])
def test_windows_of_planes(
    height: int, width: int, planes: int, first: int, kernel: int, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image is made from copied rows of the planes, whose windows lie partly outside of them."""
    g = block((2, planes, height, width), kernel, first, pads=(1, 1, 1, 1), strides=(stride,) * 2)
    x = np.random.default_rng(1).standard_normal((2, planes, height, width), np.float32)
    ring = laid_out(g)
    monkeypatch.setattr(fused_depthwise, "MOST_DEPTH", 0)
    apart = laid_out(g)
    assert (len(joined(ring)), len(joined(apart))) == (1, 0)
    assert np.array_equal(result(ring, x), result(apart, x))


def test_the_image_is_not_in_memory() -> None:
    program = laid_out(block((1, 5, 12, 10), 3, pads=(1, 1, 1, 1)))
    (kernel,) = joined(program)
    assert kernel.before is not None
    (image,) = kernel.before.writes()
    assert image not in program.touched()
    work, parts = kernel_work(kernel, {}), (2 * 120 * OUTPUTS * 5, 2 * 120 * OUTPUTS * 9)
    assert work.products == sum(parts)
    assert work.written == 4 * 120 * OUTPUTS
    assert "before:" in str(program)


def test_what_others_read_is_in_memory() -> None:
    """An image that is an output or is read again is not made row by row, nor one of open size."""
    twice, seen = block((1, 5, 12, 10), 3, pads=(1, 1, 1, 1)), block((1, 5, 12, 10), 3, pads=(1, 1, 1, 1))
    for g in (twice, seen):
        image = next(n for n in g.nodes if n.op.op_name == "clip").outputs[0]
        g.output(image if g is seen else rlx.reduce_sum(image, axes=(2,)), "z")
        assert not joined(laid_out(g))
    assert not joined(laid_out(block((1, 5, rlx.Dim("h", 3, 64), 10), 3, pads=(1, 1, 1, 1))))


@pytest.mark.parametrize("batch, together", [(3, 1), (1, 1), (1, 2)])
@pytest.mark.parametrize("threads", [1, 4, 16])
@pytest.mark.parametrize("height, width, stride", [(112, 112, 2), (56, 56, 1), (7, 7, 1), (1, 640, 1), (640, 3, 2)])
def test_chunks_cover_all(height: int, width: int, stride: int, threads: int, batch: int, together: int) -> None:
    out = (-(-height // stride), -(-width // stride))
    made = FusedDepthwiseSchedule((batch, 144, height, width, *out), 24, 9, 3, stride, 4, together, Rates())(
        {THREADS: threads}
    )
    assert made.chunks == batch * made.strips * made.blocks
    assert out[0] == 1 or batch * made.strips % 2 == 0  # two threads have halves of the image
    assert (made.strips - 1) * made.rows < out[0] <= made.strips * made.rows
    assert (made.blocks - 1) * made.block < 144 <= made.blocks * made.block
    assert made.scratch == 4 * 4 * width * made.block


def test_one_artifact_for_any_number_of_threads(tmp_path: Path) -> None:
    g = block((1, 5, 40, 33), 3, pads=(1, 1, 1, 1))
    x = np.random.default_rng(1).standard_normal((1, 5, 40, 33), np.float32)
    model = rlx.compile(g, device="cpu", threads=2)
    want = model.run({"x": x})[0]
    model.save(tmp_path / "a.rlxart")
    for threads in (1, 3, 9):
        assert np.array_equal(rlx.load(tmp_path / "a.rlxart", threads=threads).run({"x": x})[0], want)
