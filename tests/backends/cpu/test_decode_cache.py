"""Attention that copies its cache on the way: the bits of copies and attention one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.cpu.kernels.attention import decode_cache
from rlx.ir.graph import Array, Graph, Value
from rlx.ir.shape import Dim, Size, evaluate
from rlx.kernels.fuse import fuse
from rlx.kernels.program import Kernel, Program
from rlx.kernels.work import kernel_work
from rlx.ops import attention, concat, relu, transpose
from rlx.testing.guarded import GuardedRun

Sizes = tuple[Size, int, int, Size, Size, Size, int, int]  # batch, heads, key heads, rows, old and new keys, depths


def step(sizes: Sizes, *, rows_first: bool = False, mask: bool = False, **attributes: Any) -> Graph:
    """A step of decoding: keys and values as outputs, old ones and then new ones that are computed."""
    batch, heads, key_heads, rows, old, new, depth, value_depth = sizes
    g = Graph("step")

    def cache(name: str, width: int) -> Value:
        shape = (batch, old, key_heads, width) if rows_first else (batch, key_heads, old, width)
        fresh = (batch, new, key_heads, width) if rows_first else (batch, key_heads, new, width)
        whole = concat(g.input(f"old {name}", shape), relu(g.input(f"new {name}", fresh)), axis=1 if rows_first else 2)
        g.output(whole, name)
        return transpose(whole, (0, 2, 1, 3)) if rows_first else whole

    q, k, v = g.input("q", (batch, heads, rows, depth)), cache("k", depth), cache("v", value_depth)
    bias = [g.input("mask", (batch, 1, 1, old + new))] if mask else []
    g.output(attention(q, k, v, *bias, **attributes), "y")
    return g


def laid_out(g: Graph) -> Program:
    backend = CpuBackend()
    return backend.layout(fuse(g, backend))


def apart(g: Graph, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The same program, in which copies are kernels of their own."""
    with monkeypatch.context() as patch:
        patch.setattr(decode_cache, "join", lambda _: None)
        return laid_out(g)


def joined(program: Program) -> list[Kernel]:
    return [
        k
        for k in program.run
        if k.anchor is not None and not (k.strategy is not None and k.strategy.packs) and len(k.stores) > 1
    ]


def arrays_of(g: Graph, extents: Mapping[str, int]) -> dict[str, Array]:
    rng = np.random.default_rng(3)
    return {v.name: rng.standard_normal([evaluate(s, extents) for s in v.shape]).astype(np.float32) for v in g.inputs}


def check(g: Graph, monkeypatch: pytest.MonkeyPatch, extents: Mapping[str, int] | None = None, count: int = 1) -> None:
    program, emit = laid_out(g), CpuBackend().emit_kernel
    assert len(joined(program)) == count
    arrays = arrays_of(g, extents or {})
    want = GuardedRun(apart(g, monkeypatch), emit)(arrays, extents)
    run = GuardedRun(program, emit)
    for threads, options in ((1, {}), (2, {"at_end": False, "reverse": True}), (16, {"at_end": False})):
        got = run(arrays, extents, workers=3, threads=threads, **options)
        for name, array in want.items():
            assert np.array_equal(got[name], array, equal_nan=True), f"{name} with {threads} threads"


@pytest.fixture(params=[0, 1 << 40], ids=["streaming", "through caches"], autouse=True)
def streaming(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_cache, "LARGE", request.param)


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 12, 12, 1, 511, 1, 64, 64),
        (2, 4, 4, 1, 16, 1, 16, 16),
        (1, 12, 4, 1, 131, 1, 64, 64),
        (2, 8, 1, 2, 70, 2, 128, 32),
        (1, 4, 2, 3, 40, 1, 8, 7),
        (1, 4, 2, 4, 1, 300, 33, 65),
        (1, 5, 5, 1, 0, 3, 16, 16),
        (1, 4, 4, 1, 5000, 1, 1, 3),
        (1, 4, 4, 1, 9, 1, 600, 4097),
        (0, 4, 4, 1, 9, 1, 16, 16),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_the_bits_of_several_kernels(sizes: Sizes, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check(step(sizes, causal=causal), monkeypatch)


@pytest.mark.parametrize("sizes", [(1, 12, 4, 1, 131, 1, 64, 64), (2, 4, 4, 2, 30, 2, 24, 17)])
def test_heads_side_by_side(sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    check(step(sizes, rows_first=True, mask=True), monkeypatch)


@pytest.mark.sample(4)
@pytest.mark.parametrize("old", [0, 1, 63, 64, 200])
def test_sizes_told_by_the_inputs(old: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (Dim("batch", 1, 4), 4, 2, 1, Dim("old", 0, 200), 1, 64, 64)
    check(step(sizes, mask=True), monkeypatch, {"batch": 2, "old": old})


@pytest.mark.sample(8)
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 40])
@pytest.mark.parametrize("old", [0, 70])
def test_rows_told_by_the_inputs(rows: int, old: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few or many, in one program."""
    fresh = Dim("rows", 1, 64)
    sizes = (1, 6, 2, fresh, Dim("old", 0, 200), fresh, 64, 32)
    check(step(sizes, mask=True, causal=True), monkeypatch, {"rows": rows, "old": old})


def test_keys_that_the_old_ones_go_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch entry has a number of keys of its own; all rows are copied."""
    g = step((3, 4, 4, 1, 90, 6, 32, 32))
    y = g.outputs.pop()
    node = next(n for n in g.nodes if n.outputs[0] is y.value)
    g.nodes.remove(node)
    count = g.input("count", (3,), "i64")
    g.output(attention(*node.inputs, count, counted=True), "y")
    program, emit = laid_out(g), CpuBackend().emit_kernel
    assert len(joined(program)) == 1
    arrays = {**arrays_of(g, {}), "count": np.array([0, 33, 96])}
    want = GuardedRun(apart(g, monkeypatch), emit)(arrays)
    got = GuardedRun(program, emit)(arrays, workers=2)
    assert all(np.array_equal(got[name], array, equal_nan=True) for name, array in want.items())


def test_a_cache_that_others_read_before_is_copied_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    g = step((1, 4, 4, 1, 20, 1, 16, 16))
    k = g.outputs[0].value
    scores = g.nodes.pop()
    bias = transpose(relu(k), (0, 1, 3, 2))[:, :, :1, :]
    g.outputs.pop()
    g.output(attention(*scores.inputs, bias), "y")
    program = laid_out(g)
    made, outputs = {store.buffer for kernel in joined(program) for store in kernel.stores}, dict(program.outputs)
    assert outputs["v"] in made
    assert outputs["k"] not in made
    arrays, emit = arrays_of(g, {}), CpuBackend().emit_kernel
    want, got = GuardedRun(apart(g, monkeypatch), emit)(arrays), GuardedRun(program, emit)(arrays, workers=2)
    assert all(np.array_equal(got[name], array) for name, array in want.items())


def test_keys_that_are_values_too(monkeypatch: pytest.MonkeyPatch) -> None:
    g = Graph("step")
    cache = concat(g.input("old", (1, 4, 20, 16)), relu(g.input("new", (1, 4, 1, 16))), axis=2)
    g.output(cache, "cache")
    g.output(attention(g.input("q", (1, 4, 1, 16)), cache, cache), "y")
    check(g, monkeypatch, count=0)


def test_two_that_share_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    g = step((1, 4, 4, 1, 20, 1, 16, 16))
    k, v, y = (output.value for output in g.outputs)
    g.output(attention(y, k, v), "z")
    check(g, monkeypatch)


def test_what_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old rows are read once, and the cache is not read at all."""
    g = step((1, 4, 4, 1, 511, 1, 64, 64))
    work = kernel_work(joined(laid_out(g))[0], {})
    row = 4 * 4 * 64
    assert work.read == row * (2 * 512 + 1)
    assert work.written == row * (2 * 512 + 1)
    fresh = Dim("rows", 1, 64)
    either = joined(laid_out(step((1, 4, 4, fresh, 511, fresh, 64, 64))))[0]
    assert kernel_work(either, {"rows": 1}).read == row * (2 * 512 + 1)


@pytest.mark.parametrize("fresh", [1, Dim("rows", 1, 8)])
def test_as_a_model(fresh: Size, tmp_path: Path) -> None:
    """Into the caller's arrays, with a look for NaN, stored, and some outputs only: as if nothing were joined."""
    g = step((1, 4, 2, fresh, 40, fresh, 32, 32))
    arrays = arrays_of(g, {"rows": 1})
    model = rlx.compile(g, device="cpu", threads=2)
    watched = rlx.compile(g, device="cpu", threads=2, trap="nan")
    k = np.concatenate([arrays["old k"], np.maximum(arrays["new k"], 0)], 2)
    raw = np.empty(k.size + 1, np.float32)
    for into in (np.empty_like(k), raw[1:].reshape(k.shape)):
        got = model.run(arrays, out=[into, None, None])
        assert got[0] is into
        assert np.array_equal(into, k)
    model.save(tmp_path / "model.rlxart")
    for other in (watched, rlx.load(tmp_path / "model.rlxart")):
        assert all(np.array_equal(a, b) for a, b in zip(other.run(arrays), got, strict=True))
    assert np.array_equal(model.run(arrays, outputs=["k"])[0], k)
