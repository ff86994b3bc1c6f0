"""Each chunk of a kernel writes its own part of the results: alone, from any memory, what it writes among all.

Threads run chunks in any order and at once. One that leaves other results anywhere than all of them together do spoils
those of another chunk, whichever comes last; and none but loop nests, which write each result once, may write a byte
that another one writes, be it the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from rlx import Dim, Graph, attention, conv, gelu, relu, softmax, transpose
from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.cpu.schedule import base as schedule
from rlx.backends.cpu.schedule.arguments import KernelCode, Part
from rlx.backends.cpu.schedule.base import Grid
from rlx.compiler import lower_graph
from rlx.ir.extents import bind_extents
from rlx.ir.graph import Array
from rlx.ir.shape import Size, evaluate
from rlx.kernels.program import Buffer, Kernel
from rlx.ops.base import OPS
from rlx.ops.quant import ConvInteger, MatMulInteger
from rlx.ops.select import Produced
from rlx.passes import run_passes
from rlx.passes.legalise import legalise
from rlx.testing.cases import covered, fixed_cases
from rlx.testing.guarded import GuardedRun
from rlx.testing.oracle import Batch, Case

THREADS = (1, 2, 3, 5, 8, 16)
MOST_BYTES = 50_000_000  # that are written to look at the chunks of a kernel
NAMES = [name for name in sorted(OPS) if covered(name) and not issubclass(OPS[name], Produced)]


class Alone:
    """Runs the chunks of a kernel in order, and then each of them alone, from two contents of the results' memory."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)
        self.checked = 0

    def __call__(
        self, kernel: Kernel, code: KernelCode, run: Callable[[int], None], memory: Mapping[Buffer, Array], count: int
    ) -> None:
        results = {root: memory[root] for root in {b.base for b in kernel.writes()} if root in memory}
        operands = {b.base for b in kernel.reads()}
        starts = []
        for root, array in results.items():
            fill = self.rng.integers(0, 256, array.size).astype(np.uint8)
            starts.append((array.copy(),) * 2 if root in operands else (fill, ~fill))
        for chunk in range(count):
            run(chunk)
        if count < 2 or 2 * count * sum(array.size for array in results.values()) > MOST_BYTES:
            return
        wanted = [array.copy() for array in results.values()]
        owned = [np.zeros(array.size, np.bool_) for array in results.values()]
        stores_once = isinstance(code.chunks, Part) and isinstance(getattr(code.chunks.cut, "fn", None), Grid)
        for chunk in range(count):
            touched = [np.zeros(array.size, np.bool_) for array in results.values()]
            for turn in (0, 1):
                for array, start in zip(results.values(), starts, strict=True):
                    array[:] = start[turn]
                run(chunk)
                for array, start, want, mine in zip(results.values(), starts, wanted, touched, strict=True):
                    changed = array != start[turn]
                    mine |= changed
                    what = f"{kernel.name} [{kernel.how}]: chunk {chunk} of {count}"
                    assert np.array_equal(array[changed], want[changed]), f"{what} writes what is not left by all"
            for mine, others in zip(touched, owned, strict=True):
                assert stores_once or not (mine & others).any(), f"{what} writes what another one writes"
                others |= mine
        for array, want in zip(results.values(), wanted, strict=True):
            array[:] = want
        self.checked += count


def check(
    graph: Graph,
    arrays: Mapping[str, Array],
    extents: Mapping[str, int] | None = None,
    many: Sequence[int] = THREADS,
) -> int:
    """All kernels of a graph, cut as for some numbers of threads; the number of chunks that were looked at."""
    backend = CpuBackend()
    legal, _ = legalise(run_passes(graph), backend.claims)
    run, alone = GuardedRun(lower_graph(legal, backend), backend.emit_kernel), Alone()
    for threads in many:
        run(arrays, extents, threads=threads, runner=alone)
    return alone.checked


def arrays_of(g: Graph, extents: Mapping[str, int]) -> dict[str, Array]:
    rng = np.random.default_rng(5)
    made: dict[str, Array] = {}
    for v in (*g.inputs, *g.params):
        shape = [evaluate(s, extents) for s in v.shape]
        values = rng.standard_normal(shape) if v.dtype.is_float else rng.integers(0, 100, shape)
        made[v.name] = values.astype(v.dtype.numpy)
    return made


def image(
    x: tuple[Size, ...], w: tuple[int, ...], *, dtype: str = "f32", rest: bool = False, **attributes: Any
) -> Graph:
    """A convolution with its channels last, where kernels finish results in place."""
    g = Graph("image")
    y = conv(g.input("x", x, dtype), g.param("w", w, dtype), g.param("b", w[:1], dtype), **attributes)
    y = y + g.input("r", y.shape, dtype) if rest else y
    g.output(transpose(relu(y), (0, 2, 3, 1)), "y")
    return g


SAME = (1, 1, 1, 1)


@pytest.mark.sample(4)
@pytest.mark.parametrize("outputs", [8, 17, 24, 40, 96, 136])
@pytest.mark.parametrize("channels, size", [(96, 12), (24, 28), (17, 9), (160, 7)])
def test_convolutions(channels: int, size: int, outputs: int) -> None:
    checked = 0
    for kernel, pads, strides in ((1, (0,) * 4, (1, 1)), (3, SAME, (1, 1)), (3, SAME, (2, 2)), (5, (2,) * 4, (1, 1))):
        x, w = (1, channels, size, size), (outputs, channels, kernel, kernel)
        g = image(x, w, rest=strides == (1, 1), pads=pads, strides=strides)
        checked += check(g, arrays_of(g, {}))
    assert checked


@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16"])
def test_convolutions_of_other_types(dtype: str) -> None:
    for outputs in (24, 33):
        g = image((2, 40, 13, 13), (outputs, 40, 3, 3), dtype=dtype, pads=SAME)
        assert check(g, arrays_of(g, {}))


@pytest.mark.sample(4)
@pytest.mark.parametrize("channels", [24, 40, 72, 100, 144])
@pytest.mark.parametrize("size, stride", [(7, 1), (14, 1), (15, 2), (40, 1)])
def test_depthwise_convolutions(channels: int, size: int, stride: int) -> None:
    """Alone, and of an image that is made on the way."""
    g = image((1, channels, size, size), (channels, 1, 3, 3), pads=SAME, strides=(stride,) * 2, groups=channels)
    assert check(g, arrays_of(g, {}))
    g = Graph("ringed")
    x = relu(conv(g.input("x", (1, 24, size, size)), g.param("v", (channels, 24, 1, 1))))
    y = conv(x, g.param("w", (channels, 1, 3, 3)), pads=SAME, strides=(stride,) * 2, groups=channels)
    g.output(transpose(relu(y), (0, 2, 3, 1)), "y")
    assert check(g, arrays_of(g, {}))


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("columns, depth", [(200, 128), (48, 384), (1000, 64), (33, 100), (513, 256)])
def test_products(columns: int, depth: int, dtype: str) -> None:
    """With few rows and many, on both sides of each tile."""
    g = Graph("product")
    x = g.input("x", (Dim("m", 1, 400), depth), dtype)
    y = x @ g.param("w", (depth, columns), dtype)
    g.output(gelu(y + g.param("b", (columns,), dtype)), "y")
    sizes = (1, 5, 13, 16, 17, 31, 33, 64, 97, 130)
    assert sum(check(g, arrays_of(g, {"m": m}), {"m": m}) for m in sizes)


@pytest.mark.parametrize("outputs", [24, 40, 100])
def test_bytes(outputs: int) -> None:
    g = Graph("bytes")
    x, rows = g.input("x", (1, 40, 14, 14), "u8"), g.input("rows", (50, 320), "u8")
    made = g.add(ConvInteger(pads=SAME), x, g.param("w", (outputs, 40, 3, 3), "i8"))
    made += g.add(MatMulInteger(), rows, g.param("v", (320, outputs * 8), "i8"))
    made += g.add(ConvInteger(pads=SAME, groups=40), x, g.param("d", (40, 1, 3, 3), "i8"))
    for n, y in enumerate(made):
        g.output(y, f"y{n}")
    assert check(g, arrays_of(g, {}))


@pytest.mark.parametrize("rows, keys, depth", [(1, 33, 64), (5, 40, 17), (33, 33, 32), (70, 130, 64)])
def test_attention(rows: int, keys: int, depth: int) -> None:
    g = Graph("attention")
    shape = (2, 3, rows, depth)
    q, k, v = g.input("q", shape), *(g.input(name, (2, 3, keys, depth)) for name in "kv")
    g.output(softmax(transpose(attention(q, k, v), (0, 2, 1, 3))), "y")
    assert check(g, arrays_of(g, {}))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_op_in_many_chunks(
    name: str, some: Callable[[Sequence[Case], int], list[Case]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case of an op (60 in a quick run), whose loops are cut far finer than it pays off."""
    monkeypatch.setattr(schedule, "LOOP_COST", 150)
    monkeypatch.setattr(schedule, "LEAST_LOOP_COST", 50)
    batch = Batch(some(fixed_cases(name), 60))
    inputs, params = batch.arrays()
    sizes = bind_extents(batch.graph, {k: a.shape for k, a in inputs.items()})
    check(batch.graph, {**inputs, **params}, sizes, (1, 16))
