"""Attention over caches on the CPU: narrow and encoded ones, windows, positions, rings, sinks and soft caps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx
from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.reference import run_graph
from rlx.ir.dtype import DTYPES
from rlx.ir.encoding import encoding_named
from rlx.ir.graph import Array, Graph
from rlx.kernels.fuse import fuse
from rlx.kernels.lowering import Attention as Anchor
from rlx.ops.layout import SizeOf
from rlx.testing.guarded import GuardedRun

NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
ERROR = {"f32": 4e-6, "f16": 2e-3, "bf16": 2e-2}  # of results of that type

FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": True, "window": 5},
    {"window": 3},
    {"sinks": True},
    {"cap": True},
    {"placed": True, "counted": True, "causal": True},
    {"placed": True, "counted": True, "causal": True, "window": 7, "sinks": True, "empty_row": "zero"},
    {"counted": True, "ring": True, "causal": True, "window": 20},
    {"counted": True, "ring": True, "causal": True, "sinks": True, "empty_row": "mended"},
    {"counted": True, "causal": True, "window": 40, "cap": True},
]
SIZES = [  # batch, heads, key heads, rows, keys, depth, value depth
    (2, 4, 2, 1, 50, 32, 32),
    (2, 4, 1, 1, 37, 33, 17),
    (1, 8, 2, 1, 150, 64, 48),
    (2, 4, 2, 3, 70, 16, 8),
    (1, 2, 2, 7, 300, 24, 24),
    (2, 2, 2, 40, 90, 8, 16),
]


def case(sizes: tuple[int, ...], kv: str, query: str, features: Mapping[str, Any]) -> tuple[Graph, dict[str, Array]]:
    """A graph of one attention, and what it is given."""
    batch, heads, own, rows, keys, depth, value_depth = sizes
    rng, g, given = np.random.default_rng(3), Graph("attention"), dict(features)
    operands = [g.input("q", (batch, heads, rows, depth), query)]
    operands += [g.input(n, (batch, own, keys, d), kv) for n, d in (("k", depth), ("v", value_depth))]
    arrays: dict[str, Array] = {v.name: rng.standard_normal(v.shape).astype(v.dtype.numpy) for v in g.inputs}
    if given.pop("cap", False):
        operands.append(g.input("cap", ()))
        arrays["cap"], given["steps"] = np.asarray(2.5, np.float32), ("softcap",)
    if given.get("sinks"):
        operands.append(g.input("sinks", (heads,)))
        arrays["sinks"] = rng.standard_normal(heads).astype(np.float32)
    if given.get("placed"):
        operands.append(g.input("first", (batch,), "i64"))
        arrays["first"] = rng.integers(0, keys + 3, batch)
    if given.get("counted"):
        operands.append(g.input("count", (batch,), "i32"))
        arrays["count"] = rng.integers(0, (3 * keys if given.get("ring") else keys) + 1, batch).astype(np.int32)
    g.output(rlx.attention(*operands, **given), "y")
    return g, arrays


def ran(g: Graph, arrays: Mapping[str, Array]) -> Array:
    """The result of its own kernel, between pages that can't be touched, for two orders of chunks."""
    backend = CpuBackend()
    program = backend.layout(fuse(g, backend))
    assert any(isinstance(k.anchor, Anchor) for k in program.run), "the attention has no kernel of its own"
    run = GuardedRun(program, backend.emit_kernel)
    got = run(arrays, None, workers=2)["y"]
    again = run(arrays, None, workers=3, at_end=False, reverse=True)["y"]
    assert got.tobytes() == again.tobytes(), "the order of chunks or the worker changed bits"
    return got


@pytest.mark.sample(30)
@pytest.mark.parametrize("kv, query", [("f32", "f32"), ("f16", "f32"), ("bf16", "f16"), ("f16", "bf16")])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_every_feature(features: dict[str, Any], sizes: tuple[int, ...], kv: str, query: str) -> None:
    g, arrays = case(sizes, kv, query, features)
    want = run_graph(g, arrays)["y"]
    got = ran(g, arrays)
    error = ERROR[query]
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=error, atol=error)


@pytest.mark.parametrize("kv", ["f16", "bf16"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_narrow_keys_give_the_bits_of_the_same_numbers_in_f32(sizes: tuple[int, ...], kv: str) -> None:
    features = {"counted": True, "causal": True}
    g, arrays = case(sizes, kv, "f32", features)
    wide, _ = case(sizes, "f32", "f32", features)
    same = {n: a.astype(np.float32) if n in "kv" else a for n, a in arrays.items()}
    assert np.array_equal(ran(g, arrays), ran(wide, same), equal_nan=True)


def test_hostile_numbers_of_narrow_keys() -> None:
    """NaN, infinities and denormal numbers of f16 are those of f32."""
    g, arrays = case((1, 4, 1, 1, 20, 16, 16), "f16", "f32", {})
    k, v = arrays["k"], arrays["v"]
    k[0, 0, :3, 0] = 1e-7, -6e-8, 0.0
    v[0, 0, 5, :4] = np.nan, np.inf, -np.inf, 6e-8
    np.testing.assert_allclose(ran(g, arrays), run_graph(g, arrays)["y"], rtol=4e-6, atol=4e-6)


def decoder(kv: str, capacity: int, depth: int = 64, heads: int = 8, own: int = 2, rows: Any = 1) -> Graph:
    """A step of a decoder with keys and values as states of that type or encoding."""
    g = Graph("step")
    dtype = "f32" if kv in ("q8_0", "q4_0") else kv
    encoding = kv if kv in ("q8_0", "q4_0") else None
    q, row = g.input("q", (1, heads, rows, depth)), g.input("row", (1, own, rows, depth))
    at = g.input("at", (), "i64")
    states = [g.state(name, (1, own, capacity, depth), dtype, encoding=encoding) for name in ("k", "v")]
    new = []
    for number, state in enumerate(states):
        made = row * (number + 1.0)
        made = rlx.encode(made, encoding=encoding) if encoding else rlx.cast(made, to=dtype)
        new.append(rlx.dynamic_update_slice(state, made, at, axis=2))
        g.update(state, new[-1])
    count = at + g.add(SizeOf(rows))[0]
    g.output(rlx.attention(q, *new, count, counted=True, causal=True), "y")
    return g


@pytest.mark.parametrize("kv", ["f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("device", ["interp", "cpu"])
def test_a_decoder_with_narrow_caches(kv: str, device: str) -> None:
    """Step by step against the reference; states hold the same numbers."""
    g, rng = decoder(kv, 40), np.random.default_rng(1)
    model, oracle = rlx.compile(g, device=device), rlx.compile(g, device="reference")
    for step in range(12):
        given = {n: rng.standard_normal((1, h, 1, 64)).astype(np.float32) for n, h in (("q", 8), ("row", 2))}
        given["at"] = np.array(step)
        np.testing.assert_allclose(model.run(given)[0], oracle.run(given)[0], rtol=2e-5, atol=2e-6)
    for name in "kv":
        np.testing.assert_array_equal(np.asarray(model.states[name].read()), np.asarray(oracle.states[name].read()))


@pytest.mark.parametrize("kv", ["q8_0", "q4_0"])
def test_encoded_caches_take_prompts_of_any_length(kv: str) -> None:
    """Few and many rows read the blocks; the numbers of rows are known at the run."""
    g, rng = decoder(kv, 70, depth=32, rows=rlx.Dim("rows", 1, 64)), np.random.default_rng(1)
    model, oracle = rlx.compile(g, device="cpu"), rlx.compile(g, device="reference")
    at = 0
    for rows in (1, 33, 4, 5, 20):
        given = {n: rng.standard_normal((1, h, rows, 32)).astype(np.float32) for n, h in (("q", 8), ("row", 2))}
        given["at"] = np.array(at)
        np.testing.assert_allclose(model.run(given)[0], oracle.run(given)[0], rtol=2e-5, atol=4e-6)
        at += rows


@pytest.mark.parametrize("kv", ["f32", "f16", "q8_0"])
def test_a_row_has_the_bits_of_a_step_in_a_prompt_too(kv: str) -> None:
    """Step by step, all at once, and with the number of rows known at the run only."""
    rng = np.random.default_rng(4)
    whole = {n: rng.standard_normal((1, h, 37, 64)).astype(np.float32) for n, h in (("q", 8), ("row", 2))}
    step = rlx.compile(decoder(kv, 50), device="cpu")
    parts = [step.run({n: a[:, :, i : i + 1] for n, a in whole.items()} | {"at": np.array(i)})[0] for i in range(37)]
    want = np.concatenate(parts, axis=2)
    for rows in (37, rlx.Dim("rows", 1, 40)):
        prompt = rlx.compile(decoder(kv, 50, rows=rows), device="cpu")
        assert np.array_equal(prompt.run({**whole, "at": np.array(0)})[0], want)


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("kv", ["f32", "f16", "q8_0"])
def test_the_arena_of_a_run_does_not_depend_on_the_capacity(kv: str, rows: int) -> None:
    """And a narrow cache is counted at the width that it is stored in."""
    small, large = (rlx.compile(decoder(kv, capacity, rows=rows), device="cpu") for capacity in (64, 4096))
    assert small.plan.arena == large.plan.arena
    encoding = encoding_named(kv) if kv == "q8_0" else None
    size = encoding.nbytes((2, 4096, 64)) if encoding else 2 * 4096 * 64 * DTYPES[kv].itemsize
    assert rlx.estimate(decoder(kv, 4096), device="cpu").state_bytes == 2 * size
    assert large.states["k"].spec.bytes == size


@pytest.mark.parametrize("kv", ["f32", "q8_0"])
@pytest.mark.parametrize("device", ["reference", "interp", "cpu"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_ring_gives_what_a_whole_cache_gives(kv: str, device: str, rows: int) -> None:
    """A window of 6 over a ring of 6 + rows - 1 places, round and round, each sequence at a place of its own."""
    window, depth, batch = 6, 32, 2
    room, steps = window + rows - 1, 8

    def build(ring: bool) -> rlx.CompiledGraph:
        g = Graph("ring" if ring else "whole")
        q, row = g.input("q", (batch, 4, rows, depth)), g.input("row", (batch, 2, rows, depth))
        at = g.input("at", (batch,), "i64")
        cache = g.state("kv", (batch, 2, room if ring else 64, depth), encoding=None if kv == "f32" else kv)
        new = rlx.dynamic_update_slice(
            cache, row if kv == "f32" else rlx.encode(row, encoding=kv), at, axis=2, ring=ring
        )
        g.update(cache, new)
        options = {"causal": True, "window": window, "counted": True, "ring": ring}
        g.output(rlx.attention(q, new, new, at + rows, **options), "y")
        return rlx.compile(g, device=device if ring else "reference")

    small, whole, rng = build(True), build(False), np.random.default_rng(6)
    starts = np.array([0, 5])
    whole.states["kv"].write(rng.standard_normal((batch, 2, 64, depth)).astype(np.float32))
    held = np.asarray(whole.states["kv"].read())
    first = np.zeros((batch, 2, room, depth), np.float32)
    for b, start in enumerate(starts):
        for p in range(max(start - room, 0), start):
            first[b, :, p % room] = held[b, :, p]
    small.states["kv"].write(first)
    for step in range(steps):
        given = {n: rng.standard_normal((batch, h, rows, depth)).astype(np.float32) for n, h in (("q", 4), ("row", 2))}
        given["at"] = starts + step * rows
        np.testing.assert_allclose(small.run(given)[0], whole.run(given)[0], rtol=2e-5, atol=4e-6)


def test_explain_says_what_is_written_of_a_state_in_blocks() -> None:
    text = rlx.compile(decoder("q8_0", 40), device="cpu").explain("plan")
    assert "state    k: f32@q8_0[1, 2, 40, 64], updated in place, 136 B written per run" in text


def test_a_cast_of_a_whole_cache_is_read_through() -> None:
    """A graph that widens its cache itself has no copy of it in the arena."""
    g = Graph("cast")
    q, keys = g.input("q", (1, 8, 1, 64)), g.state("keys", (1, 2, 1000, 64), "f16")
    wide = rlx.cast(keys, to="f32")
    g.output(rlx.attention(q, wide, wide), "y")
    g.update(keys, keys)
    model = rlx.compile(g, device="cpu")
    assert model.plan.arena < 1000 * 64
    held = np.random.default_rng(0).standard_normal((1, 2, 1000, 64)).astype(np.float16)
    x = np.random.default_rng(1).standard_normal((1, 8, 1, 64)).astype(np.float32)
    model.states["keys"].write(held)
    want = run_graph(g, {"q": x}, states={"keys": held})["y"]
    np.testing.assert_allclose(model.run({"q": x})[0], want, rtol=2e-5, atol=2e-6)
