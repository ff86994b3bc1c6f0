"""packing="none": products that read weights where they lie have the bits of those that packed them, and no copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from targets import cpu, pretend

import rlx
from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.cpu.gemm.panels.q8_codes import CODES
from rlx.compiler import legal_graph, lower_graph
from rlx.errors import OptionError
from rlx.ir.dtype import DTYPES
from rlx.ir.encoding import encoding_named
from rlx.ir.graph import Array
from rlx.ops.experts import GroupedMatMul
from rlx.options import CompileOptions
from rlx.testing.guarded import GuardedRun

pytestmark = pytest.mark.needs("avx2")
K, N = 512, 90
ROWS = (1, 2, 5, 13, 70)
BLOCKS = sorted(
    {*CODES} & {e.name for e in map(encoding_named, ("q8_0", "q4_0", "q4_1", "q5_0", "q4_k", "q5_k", "q6_k"))}
)


def product(weights: str, k: int = K, n: int = N) -> rlx.Graph:
    """relu(x @ w + 1) of weights of a type: "f32 turned" are stored [K, N], the others [N, K]."""
    g, rng = rlx.Graph("product"), np.random.default_rng(1)
    x, w = g.input("x", (rlx.Dim("rows", 1, 80), k)), rng.standard_normal((n, k)).astype(np.float32)
    kind, _, turned = weights.partition(" ")
    if kind in DTYPES:
        data = w.astype(DTYPES[kind].numpy)
        param = g.param("w", data=np.ascontiguousarray(data.T) if turned else data)
        param = param if kind == "f32" else rlx.cast(param, "f32")
        y = x @ (param if turned else param.T)
    else:
        y = x @ g.param("w", (n, k), encoding=kind, data=encoding_named(kind).encode(w)).T
    g.output(rlx.relu(y + 1.0), "y")
    return g


def both(g: rlx.Graph, **options: Any) -> tuple[rlx.CompiledGraph, rlx.CompiledGraph]:
    fast, none = (rlx.compile(g, device="cpu", packing=p, cache=False, **options) for p in ("fast", "none"))
    return fast, none


def rows(count: int, k: int = K) -> Array:
    return np.random.default_rng(count).standard_normal((count, k)).astype(np.float32)


@pytest.mark.parametrize("vector_bytes", [pytest.param(64, marks=pytest.mark.needs("avx512")), 32])
@pytest.mark.parametrize("precision", ["f32", "q8"])
@pytest.mark.parametrize("weights", ["f32", "f32 turned", "f16", "bf16 turned", *BLOCKS, "mxfp4", "iq4_nl", "q2_k"])
def test_the_bits_of_packed_weights(
    weights: str, precision: str, vector_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, vector_bytes=vector_bytes)
    fast, none = both(product(weights), precision=precision)
    assert " matmul.in_place" in none.explain("kernels")
    assert none.needs.prepared == 0 < fast.needs.prepared
    for count in ROWS:
        x = rows(count)
        assert np.array_equal(none.run({"x": x})[0], fast.run({"x": x})[0])


@pytest.mark.parametrize("stored", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("rounded", ["f16", "bf16", "f32", "f64"])
def test_weights_that_a_cast_rounds_or_widens(stored: str, rounded: str) -> None:
    """What is read in place is what the cast gives: to the type of the sums, and of no more bits than that."""
    g, rng = rlx.Graph("cast"), np.random.default_rng(2)
    k, n = 67, 40  # small enough that a copy is no error
    x = g.input("x", (5, k), rounded)
    w = g.param("w", (k, n), stored, data=rng.standard_normal((k, n)).astype(DTYPES[stored].numpy))
    g.output(x @ rlx.cast(w, rounded), "y")
    fast, none = both(g)
    data = rng.standard_normal((5, k)).astype(DTYPES[rounded].numpy)
    assert np.array_equal(none.run([data])[0], fast.run([data])[0])
    reads_there = stored == rounded or (rounded == "f32" and stored != "f64")
    assert (" matmul.in_place" in none.explain("kernels")) == reads_there


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("weights", BLOCKS)
def test_the_bits_of_packed_weights_in_bf16(weights: str) -> None:
    fast, none = both(product(weights), precision="bf16")
    for count in ROWS:
        assert np.array_equal(none.run({"x": rows(count)})[0], fast.run({"x": rows(count)})[0])


@pytest.mark.parametrize("weights", ["q8_1", "q8_k", "tq1_0"])
def test_blocks_whose_panels_have_other_bytes(weights: str) -> None:
    """They are decoded as they are packed; with activations of 8 bits that is another way to the same products."""
    for precision in ("f32", "q8"):
        fast, none = both(product(weights), precision=precision)
        y, want = (model.run({"x": rows(9)})[0] for model in (none, fast))
        assert np.abs(y - want).max() <= 1e-5 * np.abs(want).max()
        assert none.needs.prepared == 0


@pytest.mark.parametrize("k, n", [(32, 1), (32, 16), (96, 65), (4128, 33)])
@pytest.mark.parametrize("weights", ["f32", "f32 turned", "q8_0", "q4_0"])
def test_sizes(weights: str, k: int, n: int) -> None:
    """Fewer columns than a panel, more than are packed at a time, and several blocks of k."""
    fast, none = both(product(weights, k, n), threads=2)
    for count in (1, 3, 80):
        assert np.array_equal(none.run({"x": rows(count, k)})[0], fast.run({"x": rows(count, k)})[0])


@pytest.mark.parametrize("precision", ["f32", "q8"])
@pytest.mark.parametrize("weights", ["f32", "f16", "q4_k", "q6_k"])
def test_nothing_beside_the_weights_is_touched(weights: str, precision: str) -> None:
    """Between guard pages, for any number of workers."""
    g = product(weights, 256, 67)
    (w,) = g.params
    assert w.data is not None
    legal = legal_graph(g, cpu(), precision)[1]
    program = lower_graph(legal, cpu(), CompileOptions(precision=precision, packing="none"))  # type: ignore[arg-type]
    run = GuardedRun(program, CpuBackend().emit_kernel)
    for count in (1, 7, 60):
        feeds = {"x": rows(count, 256), "w": w.data}
        got = run(feeds, workers=2, threads=1, extents={"rows": count})["y"]
        again = run(feeds, workers=3, threads=16, extents={"rows": count}, at_end=False, reverse=True)
        assert np.array_equal(got, again["y"])


def test_parts_and_batches() -> None:
    """A part of a param, one that two products read, and rows in batches."""
    g, rng = rlx.Graph("parts"), np.random.default_rng(0)
    w = g.param("w", data=rng.standard_normal((64, 80)).astype(np.float32))
    x = g.input("x", (3, 5, 64))
    g.output(x @ rlx.slice(w, starts=(0, 16), sizes=(64, 40), steps=(1, 1)), "part")
    g.output((x @ w) @ w.T, "twice")
    fast, none = both(g)
    feeds = {"x": rng.standard_normal((3, 5, 64)).astype(np.float32)}
    for y, want in zip(none.run(feeds), fast.run(feeds), strict=True):
        assert np.array_equal(y, want)
    assert none.needs.prepared == 0


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64"])
def test_declared_types(dtype: str) -> None:
    g, rng = rlx.Graph("declared"), np.random.default_rng(0)
    x, w = g.input("x", (7, 96), dtype), g.param("w", data=rng.standard_normal((96, 50)).astype(DTYPES[dtype].numpy))
    g.output(rlx.relu(x @ w), "y")
    fast, none = both(g)
    feeds = {"x": rng.standard_normal((7, 96)).astype(DTYPES[dtype].numpy)}
    assert np.array_equal(none.run(feeds)[0], fast.run(feeds)[0])
    assert none.needs.prepared == 0


def test_weights_that_are_set_again() -> None:
    """There is nothing to pack anew: the next run reads the new ones."""
    g = rlx.Graph("set")
    g.output(g.input("x", (4, 64)) @ g.param("w", (64, 48)), "y")
    model = rlx.compile(g, device="cpu", packing="none")
    for seed in (0, 1):
        w = np.random.default_rng(seed).standard_normal((64, 48)).astype(np.float32)
        model.set_params({"w": w})
        assert np.allclose(model.run({"x": rows(4, 64)})[0], rows(4, 64) @ w, atol=1e-4)


def test_a_file_is_mapped_and_not_copied(tmp_path: Path) -> None:
    """The estimate counts its pages and no copy; an artifact keeps the choice and the bits."""
    g = product("q4_0", 2048, 1024)
    estimates = [rlx.estimate(g, device="cpu", packing=p) for p in ("fast", "none")]
    nbytes = 2048 * 1024 // 32 * 18
    assert estimates[0].packed_weight_bytes >= nbytes > 0 == estimates[1].packed_weight_bytes
    fast, none = both(g)
    want = fast.run({"x": rows(3, 2048)})[0]
    none.save(tmp_path / "m.rlxart")
    loaded = rlx.load(tmp_path / "m.rlxart")
    assert np.array_equal(loaded.run({"x": rows(3, 2048)})[0], want)
    assert loaded.needs.prepared == 0


def test_what_can_not_be_read_in_place_is_refused() -> None:
    """With the node, the bytes of the copy, and what to do."""
    conv = rlx.Graph("conv")
    conv.output(rlx.conv(conv.input("x", (1, 64, 9, 9)), conv.param("w", (64, 64, 3, 3))), "y")
    experts = rlx.Graph("experts")
    leaves = experts.input("x", (4, 64)), experts.param("w", (8, 64, 64)), experts.input("e", (4,), "i64")
    experts.output(experts.add(GroupedMatMul(), *leaves)[0], "y")
    for g in (conv, experts):
        with pytest.raises(OptionError, match=r"packing='none': .* keeps \d+ bytes made of its weights .*'fast'"):
            rlx.compile(g, device="cpu", packing="none")


@pytest.mark.needs("bf16")
def test_weights_of_floats_are_refused_in_bf16() -> None:
    with pytest.raises(OptionError, match="packing='none'"):
        rlx.compile(product("f32", 512, 512), device="cpu", precision="bf16", packing="none")
