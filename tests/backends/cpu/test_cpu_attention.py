"""Attention kernels against float64, every buffer between pages that can't be touched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.cpu.kernels.attention import strategies as attention_module
from rlx.backends.cpu.schedule.base import FEW_ROWS
from rlx.backends.reference import run_graph
from rlx.errors import ExecutionError
from rlx.ir.graph import Array, Graph
from rlx.ir.shape import Dim, Size, evaluate
from rlx.kernels.fuse import fuse
from rlx.kernels.lowering import Attention as Anchor
from rlx.ops import attention, greater, relu, reshape, transpose
from rlx.testing.guarded import GuardedRun

Sizes = tuple[int, int, int, int, int, int, int]  # batch, heads, key heads, rows, keys, depth, value depth


def attention_graph(sizes: tuple[Size, ...], mask: tuple[Size, ...] | None = None, **attributes: Any) -> Graph:
    batch, heads, key_heads, rows, keys, depth, value_depth = sizes
    g = Graph("attention")
    operands = [
        g.input("q", (batch, heads, rows, depth)),
        g.input("k", (batch, key_heads, keys, depth)),
        g.input("v", (batch, key_heads, keys, value_depth)),
    ]
    if mask is not None:
        operands.append(g.input("mask", mask))
    g.output(attention(*operands, **attributes), "y")
    return g


def arrays_of(g: Graph, extents: Mapping[str, int]) -> dict[str, Array]:
    rng = np.random.default_rng(3)
    return {v.name: rng.standard_normal([evaluate(s, extents) for s in v.shape]).astype(np.float32) for v in g.inputs}


def expected(
    arrays: Mapping[str, Array], causal: bool = False, empty_row: str = "nan", scale: float | None = None
) -> Array:
    """softmax(scale q k^T + mask) v in float64, from its definition."""
    q, k, v = (arrays[n].astype(np.float64) for n in "qkv")
    repeat = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, repeat, 1), np.repeat(v, repeat, 1)
    scores = q @ k.swapaxes(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    if "mask" in arrays:
        scores = scores + arrays["mask"].astype(np.float64)
    rows, keys = scores.shape[2:]
    if causal:
        scores = np.where(np.arange(keys) <= np.arange(rows)[:, None] + keys - rows, scores, -np.inf)
    with np.errstate(invalid="ignore"):
        top = scores.max(3, keepdims=True, initial=-np.inf)
        e = np.exp(scores - top)
        y = e @ v / e.sum(3, keepdims=True)
    return np.where(top == -np.inf, 0.0 if empty_row == "zero" or keys == 0 else np.nan, y)


def compiled(g: Graph) -> GuardedRun:
    backend = CpuBackend()
    program = backend.layout(fuse(g, backend))
    assert any(isinstance(k.anchor, Anchor) for k in program.run), "the attention has no kernel of its own"
    return GuardedRun(program, backend.emit_kernel)


def check(run: GuardedRun, arrays: Mapping[str, Array], want: Array, extents: Mapping[str, int] | None = None) -> Array:
    got = run(arrays, extents, workers=2)["y"]
    np.testing.assert_allclose(got, want, rtol=0, atol=4e-6)
    again = run(arrays, extents, workers=3, at_end=False, reverse=True)["y"]
    assert np.array_equal(got, again, equal_nan=True), "the order of chunks or the worker changed bits"
    return got


SIZES = [
    (1, 2, 2, 7, 9, 8, 8),
    (2, 4, 2, 33, 50, 32, 32),
    (2, 2, 2, 5, 16, 16, 16),
    (1, 2, 2, 130, 131, 20, 24),
    (1, 1, 1, 150, 450, 16, 17),
    (1, 3, 1, 20, 11, 5, 3),  # fewer keys than rows: causal rows that see none
    (1, 2, 2, 70, 30, 20, 18),  # the same for all rows that are computed at a time
    (1, 1, 1, 1, 17, 5, 3),
    (1, 4, 1, 3, 40, 64, 70),
    (1, 2, 1, 4, 4, 33, 17),
    (1, 6, 2, 2, 1, 1, 1),
    (1, 1, 1, 6, 0, 4, 4),
    (1, 1, 1, 2, 0, 4, 4),
    (1, 1, 1, 0, 4, 4, 4),
]


@pytest.mark.sample(20)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("empty_row", ["nan", "zero"])
@pytest.mark.parametrize("causal", [False, True])
def test_sizes(sizes: Sizes, causal: bool, empty_row: str) -> None:
    g = attention_graph(sizes, causal=causal, empty_row=empty_row)
    arrays = arrays_of(g, {})
    check(compiled(g), arrays, expected(arrays, causal, empty_row))


@pytest.mark.sample(32)
@pytest.mark.parametrize("keys", [1, 7, 8, 15, 16, 17, 31, 33])
@pytest.mark.parametrize("depth", [1, 7, 8, 9, 16, 17])
@pytest.mark.parametrize("rows", [2, 11])
def test_every_edge(rows: int, keys: int, depth: int) -> None:
    g = attention_graph((1, 1, 1, rows, keys, depth, depth))
    arrays = arrays_of(g, {})
    check(compiled(g), arrays, expected(arrays))


@pytest.mark.sample(10)
@pytest.mark.parametrize("sizes, rows", [
    ((1, 12, 4, 1, 131, 64, 64), 3),
    ((2, 32, 8, 1, 300, 128, 32), 4),
    ((1, 8, 1, 1, 70, 24, 17), 2),  # four chunks are left
    ((1, 32, 1, 1, 40, 8, 8), 8),
    ((1, 14, 2, 1, 33, 16, 16), 1),
    ((1, 8, 2, 2, 33, 16, 16), 2),
])  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [(1, 1, 1, 1), (2, 8, 1, 1)])
def test_heads_that_share_keys_are_rows_of_one(
    sizes: Sizes, rows: int, causal: bool, mask: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each has one row: the same bits as one by one, and the same results in memory."""
    batch, heads, _, _, keys, _, width = sizes
    shape = (min(batch, mask[0]), heads if mask[1] > 1 else 1, 1, keys)
    g = attention_graph(sizes, shape, causal=causal)
    y = g.outputs.pop().value
    g.output(transpose(relu(y + g.input("r", (batch, heads, 1, width))), (0, 2, 1, 3)), "y")
    run = compiled(g)
    (kernel,) = (k for k in run.program.run if isinstance(k.anchor, Anchor))
    assert kernel.anchor.q_shape[2] == rows
    arrays = arrays_of(g, {})
    with monkeypatch.context() as patch:
        patch.setattr(attention_module, "heads_as_rows", lambda kernel: kernel)
        apart = compiled(g)
    want = expected({n: arrays[n] for n in ("q", "k", "v", "mask")}, causal)
    got = check(run, arrays, np.maximum(want + arrays["r"], 0).transpose(0, 2, 1, 3))
    assert np.array_equal(got, apart(arrays)["y"])


@pytest.mark.sample(8)
@pytest.mark.parametrize("mask", [(1, 1, 1, 21), (2, 4, 9, 21), (9, 21), (2, 1, 1, 1), (4, 9, 1)])
@pytest.mark.parametrize("empty_row", ["nan", "zero"])
@pytest.mark.parametrize("rows", [3, 9])
def test_masks(rows: int, mask: tuple[int, ...], empty_row: str) -> None:
    """Scores are masked with -inf; a row without keys is what `empty_row` says, whatever the values are."""
    shape = tuple(rows if size == 9 else size for size in mask)
    g = attention_graph((2, 4, 2, rows, 21, 8, 8), shape, empty_row=empty_row, scale=0.7)
    arrays = arrays_of(g, {})
    arrays["mask"][arrays["mask"] > 0.4] = -np.inf
    check(compiled(g), arrays, expected(arrays, empty_row=empty_row, scale=0.7))
    arrays["mask"][...] = -np.inf
    check(compiled(g), arrays, expected(arrays, empty_row=empty_row))


@pytest.mark.parametrize("keys", [1, 8, 13, 33])
def test_a_bias_that_is_one_number(keys: int) -> None:
    g = attention_graph((1, 2, 2, 9, keys, 8, 8))
    g.outputs.clear()
    g.output(attention(*g.inputs, g.constant(np.full((1, 1, 1, 1), 0.5, np.float32))), "y")
    g.nodes.pop(0)
    arrays = arrays_of(g, {})
    check(compiled(g), arrays, expected(arrays))


@pytest.mark.parametrize("shape", [(2, 1, 1, 0), (1, 1, 1, 0), (2, 1, 9, 0), (2, 2, 1, 1)])
@pytest.mark.parametrize("keys", [7, 8, 9, 16, 17])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_that_are_computed_are_not_stored(shape: tuple[int, ...], keys: int, causal: bool) -> None:
    """Also those that all rows share, which each block of rows computes once."""
    g = Graph("attention")
    q, k, v = (g.input(n, (2, 2, size, 10)) for n, size in (("q", 9), ("k", keys), ("v", keys)))
    keep = g.input("mask", tuple(size or keys for size in shape))
    g.output(attention(q, k, v, (1.0 - keep) * -20.0, causal=causal), "y")
    run = compiled(g)
    arrays = arrays_of(g, {})
    arrays["mask"] = (arrays["mask"] > 0).astype(np.float32)
    want = expected({**arrays, "mask": (1 - arrays["mask"]) * -20}, causal)
    check(run, arrays, want)
    assert all(len(b.shape) < 4 or b.shape[-2:] != (9, keys) for b in run.program.buffers("arena"))


def test_large_scores_do_not_overflow() -> None:
    g = attention_graph((1, 1, 1, 8, 20, 16, 4))
    arrays = arrays_of(g, {})
    arrays["q"] *= 1000
    got = compiled(g)(arrays)["y"]
    assert np.isfinite(got).all()
    assert np.max(np.abs(got - expected(arrays))) < 1e-3


def test_nan_reaches_the_rows_that_see_it() -> None:
    g = attention_graph((1, 1, 1, 12, 12, 8, 8), causal=True)
    arrays = arrays_of(g, {})
    arrays["k"][0, 0, 6, 2] = np.nan
    got = compiled(g)(arrays)["y"][0, 0]
    assert np.isfinite(got[:6]).all()
    assert np.isnan(got[6:]).all()


@pytest.mark.parametrize("rows", [2, 19])
def test_operands_and_results_in_other_layouts(rows: int) -> None:
    """Heads side by side in memory are read and written in place: no transposes are left."""
    g = Graph("attention")
    q, k, v = (
        transpose(reshape(g.input(n, (2, size, 24)), (2, size, 3, 8)), (0, 2, 1, 3))
        for n, size in (("q", rows), ("k", 21), ("v", 21))
    )
    y = transpose(attention(q, k, v), (0, 2, 1, 3))
    g.output(reshape(y, (2, rows, 24)), "y")
    run = compiled(g)
    assert {k.kind for k in run.program.run} == {"attention"}
    arrays = arrays_of(g, {})
    heads = {n: a.reshape(2, -1, 3, 8).transpose(0, 2, 1, 3) for n, a in arrays.items()}
    check(run, arrays, expected(heads).transpose(0, 2, 1, 3).reshape(2, rows, 24))


@pytest.mark.parametrize("rows", [3, 10])
def test_epilogue(rows: int) -> None:
    g = Graph("attention")
    q, k, v = (g.input(n, (2, 2, size, 12)) for n, size in (("q", rows), ("k", 9), ("v", 9)))
    g.output(relu(attention(q, k, v) * g.input("gain", (2, 1, 12)) + g.input("r", (2, 2, rows, 12))), "y")
    run = compiled(g)
    assert {k.kind for k in run.program.run} == {"attention"}
    arrays = arrays_of(g, {})
    check(run, arrays, np.maximum(expected(arrays) * arrays["gain"] + arrays["r"], 0))


@pytest.mark.parametrize("causal", [False, True])
def test_sizes_known_at_the_run(causal: bool) -> None:
    """One kernel for few rows and for many, with the bits that a compilation for each size gives."""
    rows, keys, batch = Dim("rows", 0, 64), Dim("keys", 0, 600), Dim("batch", 0, 4)
    run = compiled(attention_graph((batch, 4, 2, rows, keys, 8, 8), (batch, 1, 1, keys), causal=causal))
    for n, m, b in ((1, 50, 1), (4, 9, 2), (5, 9, 2), (40, 40, 1), (64, 500, 1), (3, 0, 1), (0, 3, 1), (2, 2, 0)):
        g = attention_graph((b, 4, 2, n, m, 8, 8), (b, 1, 1, m), causal=causal)
        arrays = arrays_of(g, {})
        got = check(run, arrays, expected(arrays, causal), {"rows": n, "keys": m, "batch": b})
        assert np.array_equal(got, compiled(g)(arrays)["y"], equal_nan=True)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Row i has the same bits in products of 30 and of 130 rows, which are cut differently."""
    many = attention_graph((1, 1, 1, 130, 70, 16, 16))
    few = attention_graph((1, 1, 1, 30, 70, 16, 16))
    arrays = arrays_of(many, {})
    got = compiled(many)(arrays)["y"]
    assert np.array_equal(got[:, :, :30], compiled(few)({**arrays, "q": arrays["q"][:, :, :30]})["y"])


@pytest.mark.sample(6)
@pytest.mark.parametrize("per_entry", [False, True], ids=["one count", "counts"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 7, 40])
def test_counted_keys_are_as_that_many(rows: int, causal: bool, per_entry: bool) -> None:
    """Room for 600 keys, of which n are there: as over an axis of n; what lies beyond, be it NaN, is not read.

    A few rows have the same bits; of more rows, an axis of n is packed, and a cache is not.
    """
    room, rng = 600, np.random.default_rng(rows)

    def model(batch: int, keys: Any, counted: bool) -> rlx.CompiledGraph:
        g = rlx.Graph("attention")
        x = [g.input("q", (batch, 4, rows, 24))]
        x += [g.input(n, (batch, 2, keys, d)) for n, d in (("k", 24), ("v", 20))]
        x.append(g.input("bias", (rows, keys)))
        more = [g.input("count", (batch,) if per_entry else (), "i64")] if counted else []
        g.output(rlx.attention(*x, *more, causal=causal, counted=counted), "y")
        return rlx.compile(g, device="cpu", threads=1)

    whole, plain = model(2, room, True), model(1, rlx.Dim("keys", 1, room), False)
    shapes = ((2, 4, rows, 24), (2, 2, room, 24), (2, 2, room, 20), (rows, room))
    for n in (1, 33, 400, 600):
        q, k, v, bias = (rng.standard_normal(s).astype(np.float32) for s in shapes)
        counts = [n, max(n - 5, 1) if per_entry else n]
        for b, m in enumerate(counts):
            k[b, :, m:], v[b, :, m:] = np.nan, np.inf
        (got,) = whole.run([q, k, v, bias, np.array(counts if per_entry else n)])
        for b, m in enumerate(counts):
            entry = slice(b, b + 1)
            (want,) = plain.run([q[entry], k[entry, :, :m], v[entry, :, :m], np.ascontiguousarray(bias[:, :m])])
            np.testing.assert_allclose(got[entry], want, rtol=1e-5, atol=4e-6)
            assert rows > FEW_ROWS or np.array_equal(got[entry], want, equal_nan=True)
    for n in (-1, 601):
        with pytest.raises(ExecutionError, match=f"attention.*{n}"):
            whole.run([q, k, v, bias, np.array([n, 3] if per_entry else n)])


STEPS = [("where",), ("add", "where"), ("where", "mul", "add"), ("where", "where"), ("mul", "add", "add", "where")]


def stepped(
    steps: tuple[str, ...], sizes: Sizes, empty_row: str, computed: bool, seed: int
) -> tuple[Graph, dict[str, Array]]:
    """A graph and its inputs: masks and biases of several shapes, given or computed, with all masked and odd rows."""
    rng = np.random.default_rng(seed)
    batch, heads, _, rows, keys, _, _ = sizes
    shapes = [(batch, 1, 1, keys), (rows, keys), (heads, 1, 1), (batch, heads, rows, keys), (rows, 1), (1, 1, 1, 1)]
    g = attention_graph(sizes)
    g.outputs.clear()
    g.nodes.clear()
    q, k, v = g.inputs
    arrays, more = arrays_of(g, {}), []
    for number, step in enumerate(steps):
        if step == "where":
            at = shapes[rng.integers(5)]
            source = g.input(f"m{number}", at, "f32" if computed else "bool")
            arrays[source.name] = np.asarray(rng.random(at) < 0.5, np.float32 if computed else bool)
            more.append(greater(source, 0.5) if computed else source)
        value = g.input(f"x{number}", shapes[rng.integers(6)])
        arrays[value.name] = rng.standard_normal(value.shape).astype(np.float32)
        if step == "where":
            arrays[value.name][...] = rng.choice([-np.inf, -1e4, np.finfo(np.float32).min, -2.0, 1.0])
        more.append(value * 2.0 if computed else value)
    for name in "qkv":
        spoilt = rng.random(arrays[name].shape[:3]) < 0.04
        arrays[name][spoilt, 0] = rng.choice([np.nan, np.inf, -np.inf], spoilt.sum())
    g.output(attention(q, k, v, *more, steps=steps, empty_row=empty_row, scale=0.7), "y")
    return g, arrays


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("computed", [False, True], ids=["given", "computed"])
@pytest.mark.parametrize("empty_row", ["nan", "zero", "mended"])
@pytest.mark.parametrize("sizes", [(2, 4, 2, 3, 21, 8, 8), (2, 4, 4, 9, 40, 8, 8), (1, 2, 1, 60, 1000, 8, 4)])
@pytest.mark.parametrize("steps", STEPS, ids="-".join)
@pytest.mark.sample(15)
def test_steps(steps: tuple[str, ...], sizes: Sizes, empty_row: str, computed: bool, seed: int) -> None:
    """What happens to scores in the order that is said, NaN and infinities too: as the reference, few rows or many."""
    g, arrays = stepped(steps, sizes, empty_row, computed, seed)
    run = compiled(g)
    with np.errstate(all="ignore"):
        want = run_graph(g, arrays)["y"]
    check(run, arrays, want)
    assert {k.kind for k in run.program.run} <= {"attention", "map"}


@pytest.mark.parametrize("rows", [2, 9])
@pytest.mark.parametrize("keys", [3, 8, 19])
def test_a_row_of_nan_sees_keys(rows: int, keys: int) -> None:
    """Zeros are for rows whose scores are all -inf: NaN among them, which no maximum shows, is not hidden."""
    g = attention_graph((1, 1, 1, rows, keys, 8, 8), (rows, keys), empty_row="zero")
    arrays = arrays_of(g, {})
    arrays["mask"][:2] = -np.inf
    arrays["mask"][1, keys // 2] = np.nan
    got = compiled(g)(arrays)["y"][0, 0]
    assert not got[0].any()
    assert np.isnan(got[1]).all()
    assert np.isfinite(got[2:]).all()
