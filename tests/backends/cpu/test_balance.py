"""Work for many threads: cut finer, in equal shares, with the same bits, from one artifact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from targets import machine

import rlx
from rlx.backends.cpu.jit.compile import host
from rlx.backends.cpu.runtime.executable import CpuExecutable
from rlx.backends.cpu.schedule.arguments import FEW_THREADS, THREADS
from rlx.backends.cpu.schedule.balance import shares
from rlx.backends.cpu.schedule.conv import ConvSchedule
from rlx.backends.cpu.schedule.depthwise import DepthwiseSchedule
from rlx.backends.cpu.schedule.matmul import chunking, tile_room
from rlx.backends.cpu.target import Rates

RNG = np.random.default_rng(11)

RATES = Rates()


def normal(*shape: int) -> np.ndarray[Any, np.dtype[Any]]:
    return RNG.standard_normal(shape, np.float32)


@pytest.mark.parametrize("threads", [5, 8, 12, 64])
@pytest.mark.parametrize("rows, panels, copies", [(196, 4, 1), (16, 16, 1), (1, 32, 1), (7, 3, 2), (1000, 1, 1)])
def test_threads_are_done_together(rows: int, panels: int, copies: int, threads: int) -> None:
    """Of work without costs of its own for each chunk no thread gets more than a chunk above an equal share."""
    most_rows, least_panels = 50, 2

    def cost(rows: int, panels: int) -> float:
        return rows * panels * 1e-3

    row_chunk, panel_chunk = shares(
        rows, panels, threads, cost, copies=copies, most_rows=most_rows, least_panels=least_panels
    )
    assert 1 <= row_chunk <= most_rows
    assert min(least_panels, panels) <= panel_chunk <= panels
    count = copies * -(-rows // row_chunk) * -(-panels // panel_chunk)
    longest = -(-count // threads) * row_chunk * panel_chunk
    widest = max(-(-panels // n) for n in range(1, max(panels // least_panels, 1) + 1))
    assert longest <= copies * rows * panels / threads + max(row_chunk * panel_chunk, widest)


def test_chunks_that_cost_little_are_not_split() -> None:
    assert shares(8, 8, 64, lambda rows, panels: rows * panels * 1e-9) == (8, 8)


def test_few_threads_have_one_cut() -> None:
    """What a machine of few cores gains from equal shares is not changed; more threads get more chunks."""
    cuts = [chunking(RATES, 128, 384, 1536, 1, 4, threads) for threads in range(1, FEW_THREADS + 1)]
    assert len(set(cuts)) == 1
    assert chunking(RATES, 128, 384, 1536, 1, 4, 16).chunks % 16 == 0


def images() -> rlx.Graph:
    """Convolutions by each of the ways, and nests, of an image with open height."""
    g = rlx.Graph("images")
    x = g.input("x", (1, 3, rlx.Dim("h", 16, 64, 2), 30))
    first = rlx.relu(rlx.conv(x, g.param("w0", data=normal(32, 3, 3, 3)), strides=(2, 1), pads=(1, 1, 1, 1)))
    wide = rlx.relu(rlx.conv(first, g.param("w1", data=normal(96, 32, 3, 3)), pads=(1, 1, 1, 1)))
    deep = rlx.relu(rlx.conv(wide, g.param("w2", data=normal(96, 1, 3, 3)), pads=(1, 1, 1, 1), groups=96))
    flat = rlx.conv(deep, g.param("w3", data=normal(200, 96, 1, 1)))
    thin = rlx.conv(flat, g.param("w4", data=normal(24, 200, 1, 1)), strides=(2, 2))
    g.output(rlx.softmax(thin), "y")
    g.output(rlx.reduce_sum(flat, axes=(1,)), "z")
    return g


def encoder() -> rlx.Graph:
    """Products, attention and norms of open length."""
    g = rlx.Graph("encoder")
    s = rlx.Dim("s", 4, 128)
    x = g.input("x", (s, 192))
    q, k, v = (
        rlx.transpose(rlx.reshape(x @ g.param(n, data=normal(192, 192) / 14), (1, s, 4, 48)), (0, 2, 1, 3))
        for n in "qkv"
    )
    mixed = rlx.reshape(rlx.transpose(rlx.attention(q, k, v), (0, 2, 1, 3)), (s, 192))
    h = rlx.layer_norm(x + mixed, g.param("s", data=normal(192)), g.param("b", data=normal(192)))
    g.output(rlx.gelu(h @ g.param("up", data=normal(192, 768))) @ g.param("down", data=normal(768, 192)), "y")
    return g


def small_bytes() -> rlx.Graph:
    """Products of bytes by all ways."""
    from rlx.ops.quant import ConvInteger

    g = rlx.Graph("bytes")
    x = g.input("x", (1, 64, rlx.Dim("h", 8, 40), 20), dtype="u8")
    for name, shape, op in (
        ("a", (128, 64, 1, 1), ConvInteger()),
        ("b", (48, 64, 3, 3), ConvInteger(pads=(1, 1, 1, 1))),
        ("c", (64, 1, 3, 3), ConvInteger(pads=(1, 1, 1, 1), groups=64)),
    ):
        w = RNG.integers(-128, 128, shape).astype(np.int8)
        g.output(g.add(op, x, g.param(name, dtype="i8", shape=shape, data=w))[0], name)
    return g


def chunks_of(model: rlx.CompiledGraph) -> list[int]:
    executable: Any = model._executable
    assert isinstance(executable, CpuExecutable)
    assert executable.bound is not None
    return [count for _, _, count in executable.bound.binding.rows]


GRAPHS: dict[str, tuple[Callable[[], rlx.Graph], tuple[int, ...]]] = {
    "images": (images, (3, 40, 30)),
    "encoder": (encoder, (90, 192)),
    "bytes": (small_bytes, (64, 33, 20)),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_one_artifact_for_any_number_of_threads(name: str, tmp_path: Path) -> None:
    """Saved with 2 threads and loaded with more or fewer: cut as if compiled for so many, and with the same bits."""
    make, shape = GRAPHS[name]
    graph = make()
    leaf = graph.inputs[0]
    full = (1, *shape) if len(shape) < leaf.type.rank else shape
    values = normal(*full) if leaf.dtype.is_float else RNG.integers(0, 256, full).astype(np.uint8)
    model = rlx.compile(graph, device="cpu", threads=2)
    wanted = model.run({"x": values})
    model.save(tmp_path / "a.rlxart")
    seen = [chunks_of(model)]
    for threads in (1, 5, 8, 23):
        loaded = rlx.load(tmp_path / "a.rlxart", threads=threads)
        for got, other in zip(loaded.run({"x": values}), wanted, strict=True):
            assert got.tobytes() == other.tobytes()
        seen.append(chunks_of(loaded))
    loaded.save(tmp_path / "b.rlxart")
    again = rlx.load(tmp_path / "b.rlxart", threads=2)
    assert again.run({"x": values})[0].tobytes() == wanted[0].tobytes()
    assert chunks_of(again) == seen[0]
    assert seen[0] == seen[1] or host().tiles  # products by tile registers are cut for any number of threads
    direct = rlx.compile(graph, device="cpu", threads=8)
    direct.run({"x": values})
    assert chunks_of(direct) == seen[3]
    assert max(sum(s) for s in seen[3:]) > sum(seen[0])  # more chunks


@pytest.mark.parametrize("outputs", [160, 320, 512, 960, 1000, 2048])
@pytest.mark.parametrize("pixels", [49, 196, 784])
@pytest.mark.parametrize("gathers", [False, True])
def test_products_by_tiles_are_cut_into_what_the_code_computes(outputs: int, pixels: int, gathers: bool) -> None:
    cut = ConvSchedule(outputs, 512, pixels, 1, 4, 16, 6, None if gathers else 512, True, RATES, True)({THREADS: 2})
    panels, blocks = -(-outputs // 16), -(-pixels // cut.row_chunk)
    assert cut.chunks == blocks * -(-panels // cut.panel_chunk)
    if cut.steps == 0:
        assert cut.scratch >= cut.copy + tile_room(min(cut.part, pixels), 512)
        assert pixels - (blocks - 1) * cut.row_chunk > cut.row_chunk - 4  # none has much less to do
        assert cut.row_chunk - (-(-cut.row_chunk // cut.part) - 1) * cut.part > cut.part - 4


@pytest.mark.parametrize("outputs", [160, 320, 512, 960, 1000, 2048])
@pytest.mark.parametrize("pixels", [49, 196, 784])
def test_products_of_windows_are_cut_into_an_even_number_of_chunks(outputs: int, pixels: int) -> None:
    cut = ConvSchedule(outputs, 512, pixels, 1, 4, 16, 6, 512, True, RATES)({THREADS: 2})
    assert cut.chunks % 2 == 0
    panels, blocks = -(-outputs // 16), -(-pixels // cut.row_chunk)
    parts = cut.chunks // blocks  # each takes an even share of the panels, which the code computes from their number
    assert parts * blocks == cut.chunks
    assert -(-panels // parts) <= cut.panel_chunk


@pytest.mark.parametrize("rows", [3, 14])
@pytest.mark.parametrize("pixels, depth", [(400, 1152), (784, 512), (1600, 512), (3136, 144), (3136, 16), (1600, 64)])
@pytest.mark.parametrize("gathers", [False, True])
def test_two_threads_have_halves_of_the_image(pixels: int, depth: int, rows: int, gathers: bool) -> None:
    """Where an odd number of blocks would do as well."""
    cut = ConvSchedule(24, depth, pixels, 1, 4, 16, rows, None if gathers else depth, True, RATES)({THREADS: 2})
    blocks = -(-pixels // cut.row_chunk)
    assert blocks == 1 or blocks % 2 == 0


@pytest.mark.parametrize("height", [7, 14, 20, 28, 56, 112])
@pytest.mark.parametrize("channels", [8, 96, 100, 384, 960])
def test_depthwise_chunks_cover_rows_and_channels(height: int, channels: int) -> None:
    cut = DepthwiseSchedule((2, channels, height, height), 9, 8, RATES)({THREADS: 2})
    assert cut.rows * (cut.strips - 1) < height <= cut.rows * cut.strips
    assert cut.block * (cut.blocks - 1) < channels <= cut.block * cut.blocks
    assert cut.chunks == 2 * cut.strips * cut.blocks


def test_faster_machines_have_fewer_chunks() -> None:
    """Chunks take about as long on each: their number depends on nothing of a machine but its rates."""
    fast = Rates(flops=4 * RATES.flops, read=4 * RATES.read, copy=4 * RATES.copy, taps=4 * RATES.taps)
    assert chunking(fast, 512, 512, 512, 1, 4).chunks < chunking(RATES, 512, 512, 512, 1, 4).chunks
    conv = [ConvSchedule(256, 512, 4096, 1, 4, 16, 6, 512, True, r)({THREADS: 2}).chunks for r in (RATES, fast)]
    depthwise = [DepthwiseSchedule((1, 512, 56, 56), 9, 8, r)({THREADS: 2}).chunks for r in (RATES, fast)]
    assert conv[0] > conv[1]
    assert depthwise[0] > depthwise[1]


def test_rates_are_those_of_the_target() -> None:
    """Of equal targets one object; what multiplies bytes is faster with VNNI, and still faster with tile registers."""
    plain, dots = (machine(features=f, vector_bytes=64, tiles=False) for f in ("", "+avx512vnni,+avx512vl"))
    tiles = machine(features=dots.features, vector_bytes=64, tiles=True)
    assert machine(features="", vector_bytes=64, tiles=False).rates is plain.rates
    assert plain.rates.byte_products < dots.rates.byte_products < tiles.rates.byte_products
    assert plain.rates.flops == tiles.rates.flops
