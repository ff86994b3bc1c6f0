"""Sizes that data decide on the CPU: outputs have their true shapes, and one compile serves them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.codegen import binding
from rlx.backends.reference import run_graph
from rlx.errors import ExecutionError, MemoryDeficit, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, Graph
from rlx.ir.shape import Dim
from rlx.ops.select import Arange, Compress, NonMaxSuppression, NonZero, Unique, produced

N = Dim("n", 0, 400)
KEPT = [0, 1, 2, 7, 31, 97, 400]


def check(g: Graph, feeds: Sequence[dict[str, Any]], threads: int = 1) -> None:
    """Every run of one compiled graph, by both calls, in turn with others."""
    model = rlx.compile(g, device="cpu", threads=threads)
    for feed in feeds:
        expected = run_graph(g, feed)
        views = model.run_slots(*(feed[v.name] for v in g.inputs))
        for got in ([np.array(a) for a in views], model.run(feed)):
            for name, a in zip(expected, got, strict=True):
                assert (a.shape, a.dtype) == (expected[name].shape, expected[name].dtype), name
                np.testing.assert_allclose(a, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def some(n: int, kept: int) -> Array:
    """n numbers, `kept` of them not 0."""
    rng = np.random.default_rng(kept)
    x = rng.standard_normal(n).astype(np.float32)
    x[rng.permutation(n)[kept:]] = 0
    return x


@pytest.mark.parametrize("threads", [1, 2])
def test_what_follows_runs_at_the_true_size(threads: int) -> None:
    """Compressed rows through a product, a softmax and a transposed copy; none, all and a prime number of them."""
    g = Graph("follows")
    x, mask, w = (
        g.input("x", (N, 8)),
        g.input("mask", (N,), "bool"),
        g.param("w", (8, 5), data=some(40, 40).reshape(8, 5)),
    )
    (rows,) = g.add(Compress(produced("count", N), 0), x, mask)
    g.output(rows, "rows")
    g.output(rlx.softmax(rows @ w, axis=0), "soft")
    g.output(rlx.transpose(rows * 2, (1, 0)), "turned")
    feeds = []
    for n in (400, 0, 13, 97):
        for kept in (k for k in KEPT if k <= n):
            feeds.append({"x": some(8 * n, 8 * n).reshape(n, 8), "mask": some(n, kept) != 0})
    check(g, feeds, threads)


def test_unique_range_and_non_zero() -> None:
    g = Graph("kinds")
    x, stop = g.input("x", (N,)), g.input("stop", (), "i64")
    for i, value in enumerate(g.add(Unique(Dim("different", 0, 400)), x)):
        g.output(value, f"unique{i}")
    (at,) = g.add(NonZero(produced("count", N)), x)
    g.output(at * 3, "at")
    (steps,) = g.add(Arange(Dim("steps", 0, 50)), g.constant(0, dtype="i64"), stop, g.constant(2, dtype="i64"))
    g.output(rlx.reduce_sum(steps, axes=(0,), keepdims=True), "sum")
    g.output(steps, "steps")
    check(g, [{"x": np.round(some(n, k)), "stop": np.array(k // 4)} for n, k in ((400, 97), (13, 0), (0, 0), (31, 31))])


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16", "i64", "u64", "i32", "i16", "u8", "i8"])
def test_ranges_by_data(dtype: str) -> None:
    """Up, down, none, steps that don't end at the limit, the ends of the type, and numbers that have no count."""
    g, kind = Graph("range"), DTYPES[dtype]
    given = [g.input(name, (), dtype) for name in ("start", "limit", "delta")]
    g.output(g.add(Arange(Dim("steps", 0, None)), *given, provenance=["steps"])[0], "y")
    model = rlx.compile(g, device="cpu")
    cases: list[tuple[float, ...]] = [(0, 10, 3), (0, 0, 1), (5, 3, 1), (3, 100, 7), (0, 1, 120)]
    if kind.is_float:
        cases += [(-1, -3.5, -0.25), (0.1, 0.3, 0.1), (3, 7, -1)]
    else:
        info = np.iinfo(kind.numpy)
        least, most = int(info.min), int(info.max)
        cases += [(least, most, most // 2), (least, most, most), (most - 1, most, 1), (most, least, 1)]
        if least:
            cases += [(most, least, least), (most, least, -most // 2), (3, 7, -1), (-3, -7, -2)]
    for numbers in cases:
        feed = {v.name: np.array(n, kind.numpy) for v, n in zip(given, numbers, strict=True)}
        (got,), expected = model.run(feed), run_graph(g, feed)["y"]
        assert (got.dtype, got.shape, got.tobytes()) == (expected.dtype, expected.shape, expected.tobytes()), numbers
    wrong = [(0, 3, 0)] + ([(0, np.inf, 1), (np.nan, 1, 1), (0, 1, np.nan)] if kind.is_float else [])
    for numbers in wrong:
        with pytest.raises(ExecutionError, match=r"steps.*range.* got (0|inf|nan)"):
            model.run([np.array(n, kind.numpy) for n in numbers])


def test_the_host_is_asked_only_for_a_size_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a size without a bound and of one with; the runs between are native, also after one that failed."""
    asked: list[str] = []
    sized = binding.Binding._sized_host_call
    monkeypatch.setattr(binding.Binding, "_sized_host_call", lambda *a: (asked.append(a[1].label), sized(*a)))
    g = Graph("same")
    x, stop = g.input("x", (N,)), g.input("stop", (), "i64")
    g.output(g.add(NonZero(produced("count", N)), x, provenance=["places"])[0], "at")
    zero, one = (g.constant(n, dtype="i64") for n in (0, 1))
    g.output(g.add(Arange(Dim("steps", 0, None)), zero, stop, one, provenance=["steps"])[0] * 2, "steps")
    model = rlx.compile(g, device="cpu", threads=1)
    for kept, count, expected in ((7, 3, 2), (7, 3, 0), (5, 3, 1), (5, 4, 1), (5, 4, 0), (5, 0, 1), (0, 0, 1)):
        asked.clear()
        feed = {"x": some(400, kept), "stop": np.array(count)}
        at, steps = model.run(feed)
        assert at.shape == (1, kept)
        np.testing.assert_array_equal(steps, np.arange(count) * 2)
        assert len(asked) == expected, (kept, count, asked)
    for _ in range(2):
        with pytest.raises(MemoryDeficit):
            model.run([some(400, 3), np.array(1 << 62)])
        at, steps = model.run([some(400, 3), np.array(3)])
        assert (at.shape, len(steps)) == ((1, 3), 3)
    assert len(model.run([some(400, 3), np.array(1000)])[1]) == 1000, "more than there is room for"
    assert len(model.run_slots(some(400, 3), np.array(100_000))[1]) == 100_000


def test_non_max_suppression() -> None:
    g = Graph("boxes")
    boxes, scores = g.input("boxes", (1, N, 4)), g.input("scores", (1, 2, N))
    limit, overlap = g.constant(50, dtype="i64"), g.constant(0.4)
    (kept,) = g.add(NonMaxSuppression(Dim("kept", 0, 100)), boxes, scores, limit, overlap)
    g.output(kept, "kept")
    g.output(kept + 1, "next")
    rng = np.random.default_rng(0)
    feeds = []
    for n in (0, 1, 40):
        corner = rng.random((1, n, 2), np.float32)
        sizes = rng.random((1, n, 2), np.float32) / 3
        feeds.append(
            {"boxes": np.concatenate([corner, corner + sizes], -1), "scores": rng.random((1, 2, n), np.float32)}
        )
    check(g, feeds)


def test_a_size_beyond_its_bound_stops_the_run() -> None:
    """Before anything is written: the output of the run before is as it was."""
    g = Graph("bounded")
    x = g.input("x", (N,))
    (at,) = g.add(NonZero(Dim("count", 0, 5)), x, provenance=["where"])
    g.output(at, "at")
    model = rlx.compile(g, device="cpu")
    before = np.array(model.run_slots(some(9, 5))[0])
    with pytest.raises(ExecutionError, match=r"where.*'count' is 7, outside its bounds 0\.\.5"):
        model.run([some(9, 7)])
    np.testing.assert_array_equal(model.run([some(9, 5)])[0], before)


def test_out_takes_arrays_of_the_true_shape() -> None:
    g = Graph("out")
    x = g.input("x", (N,))
    g.output(g.add(NonZero(produced("count", N)), x)[0], "at")
    model = rlx.compile(g, device="cpu")
    target = np.zeros((1, 3), np.int64)
    (got,) = model.run([some(7, 3)], out=[target])
    assert got is target
    np.testing.assert_array_equal(target[0], np.flatnonzero(some(7, 3)))
    with pytest.raises(ShapeError, match=r"this run gave shape \(1, 4\)"):
        model.run([some(7, 4)], out=[target])
