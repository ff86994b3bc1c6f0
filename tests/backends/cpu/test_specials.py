"""Kernels of whole nodes on the CPU: ties, NaN, odd strides, repeated and hostile indices, threads, memory in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.kernels.registry import SPECIALS
from rlx.backends.reference import run_graph
from rlx.errors import ExecutionError
from rlx.ir.dtype import DTYPES, dtype_of
from rlx.ir.graph import Array, Graph
from rlx.ir.shape import Dim
from rlx.ops.base import OPS, Op
from rlx.ops.elementwise import Neg
from rlx.ops.pool_more import MaxUnpool
from rlx.ops.roi import MaxRoiPool, RoiAlignAdaptive
from rlx.ops.scatter import ScatterElements, ScatterNd
from rlx.ops.select import Compress, NonMaxSuppression, NonZero, TopK, produced
from rlx.testing.oracle import Case, Operand, Tolerance, case, check, compare

NUMBERS = ("f32", "f64", "f16", "bf16", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64")


def graph_of(op: Op, arrays: Sequence[Array], name: str = "culprit") -> tuple[Graph, dict[str, Array]]:
    """A graph of the node, and its inputs by name."""
    graph = Graph("one")
    values = [graph.input(f"x{i}", a.shape, dtype_of(a.dtype)) for i, a in enumerate(arrays)]
    for number, value in enumerate(graph.add(op, *values, name=name)):
        graph.output(value, f"y{number}")
    return graph, {f"x{i}": a for i, a in enumerate(arrays)}


def assert_exact(op: Op, *arrays: Array, threads: int = 1) -> None:
    """The node alone gives the very bits of the reference (NaNs are alike)."""
    graph, feed = graph_of(op, arrays)
    model = rlx.compile(graph, device="cpu", threads=threads)
    assert "special" in model.explain("fuse")
    got = model(feed)
    for name, expected in run_graph(graph, feed).items():
        np.testing.assert_array_equal(got[name].astype(expected.dtype), expected, err_msg=f"{op} {name}")
        assert got[name].dtype == expected.dtype


def test_nothing_with_a_kernel_is_a_host_call() -> None:
    """Each name is that of an op, which no device function falls back on NumPy for."""
    assert set(SPECIALS) <= set(OPS)


# ---- top_k


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_top_k_of_each_type(dtype: str) -> None:
    """Insertion and radix sort, both directions, along both axes, with ties, NaN, infinities and extreme integers."""
    cases: list[Case] = []
    for k, largest, values in product((1, 7, 33, 40), (False, True), ("any", "ties")):
        cases.append(case(TopK(k, -1, largest), Operand((3, 67), dtype, values)))
        cases.append(case(TopK(k, 1, largest), Operand((2, 40, 5), dtype, values)))
    assert check(cases) == 2 * len(cases)


@pytest.mark.parametrize("k", [0, 1, 32, 33, 5000])
def test_top_k_of_long_rows(k: int) -> None:
    """Rows that are sorted already, the wrong way round, all the same, or in one bucket of the selection."""
    rng = np.random.default_rng(k)
    rows = np.stack([
        np.arange(5000.0),
        -np.arange(5000.0),
        np.zeros(5000),
        1 + rng.random(5000) * 1e-4,
        rng.standard_normal(5000),
        np.where(rng.random(5000) < 0.3, np.nan, 0.0),
    ])  # fmt: skip
    for largest in (False, True):
        assert_exact(TopK(k, -1, largest), rows.astype(np.float32), threads=3)
        assert_exact(TopK(k, 0, largest), rows.T.copy())


def test_top_k_of_a_size_that_the_run_tells() -> None:
    """k, the length and the number of rows from the inputs: one compile for insertion and sort."""
    graph, n, k = Graph("sizes"), Dim("n", 1, 200), Dim("k", 0, 100)
    x, like = graph.input("x", (n, n + k)), graph.input("like", (k,))
    for i, value in enumerate(graph.add(TopK(k), x)):
        graph.output(value, f"y{i}")
    graph.output(like, "z")
    for rows, best in ((3, 0), (5, 2), (40, 32), (7, 33), (50, 100)):
        x_data = np.random.default_rng(rows).integers(0, 9, (rows, rows + best)).astype(np.float32)
        compare(graph, {"x": x_data, "like": np.zeros(best, np.float32)})


# ---- scatter


@pytest.mark.sample(8)
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_scatter_elements_of_each_type(dtype: str, reduction: str) -> None:
    """Every axis; places that repeat, more updates than places, and indices smaller than x away from the axis."""
    values = "normal" if reduction in ("add", "mul") else "any"
    shapes = [((40,), (90,), 0), ((3, 7, 5), (3, 20, 5), 1), ((4, 6, 5), (2, 9, 3), 1), ((9, 8), (30, 8), 0)]
    shapes += [((5, 3), (4, 11), 1), ((2, 3), (0, 3), 0), ((6, 130), (5, 130), -2)]
    cases = [
        case(
            ScatterElements(axis, reduction),
            Operand(x, dtype, values),
            Operand(at, "i64", "index", x[axis]),
            Operand(at, dtype, values),
        )
        for x, at, axis in shapes
    ]
    assert check(cases) == len(cases)


@pytest.mark.sample(1)
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_scatter_nd_of_each_depth(reduction: str) -> None:
    """Slices and single elements, repeated places, indices of each type, an empty list."""
    cases = [
        case(
            ScatterNd(reduction),
            Operand((5, 4, 70), dtype),
            Operand((*many, depth), index, "index", 4),
            Operand((*many, *(5, 4, 70)[depth:]), dtype),
        )
        for depth, many, dtype, index in product(
            (1, 2, 3), ((11,), (3, 2), (0,)), ("f32", "bf16", "i64"), ("i32", "u64")
        )
    ]
    assert check(cases) == len(cases)


@pytest.mark.parametrize("dtype", ["bool", "c64", "f8e4m3", "i4"])
def test_scatter_moves_any_type(dtype: str) -> None:
    """Without a reduction elements are only moved."""
    numpy = DTYPES[dtype].numpy
    x, updates = np.zeros((6, 4), numpy), (np.arange(12).reshape(3, 4) % 2).astype(numpy)
    at = np.array([[5], [0], [5]])
    graph, feed = graph_of(ScatterNd(), (x, at, updates))
    got = rlx.compile(graph, device="cpu")(feed)["y0"]
    np.testing.assert_array_equal(got.astype(np.complex64), ScatterNd().reference(x, at, updates).astype(np.complex64))


def test_scatter_is_the_same_for_any_number_of_threads() -> None:
    """Large enough for many chunks; sums in the order of the updates, so equal to the last bit."""
    rng = np.random.default_rng(5)
    x, updates = rng.standard_normal((500, 300)).astype(np.float32), rng.standard_normal((900, 300)).astype(np.float32)
    at = rng.integers(-500, 500, (900, 1))
    for threads in (1, 4):
        assert_exact(ScatterNd("add"), x, at, updates, threads=threads)
        assert_exact(ScatterElements(0, "add"), x, np.broadcast_to(at, updates.shape), updates, threads=threads)
        assert_exact(ScatterElements(1, "mul"), x, rng.integers(0, 300, (500, 700)), np.full((500, 700), 2, np.float32))


def test_scatter_in_place() -> None:
    """Memory that nobody reads any more is written into; what is still read is copied."""
    rng = np.random.default_rng(1)
    x, at, updates = (
        rng.standard_normal((300, 8)).astype(np.float32),
        np.array([[3], [299]]),
        np.ones((2, 8), np.float32),
    )
    for kept in (False, True):
        graph = Graph("cache")
        leaves = [graph.input("x", x.shape), graph.input("at", at.shape, "i64"), graph.input("updates", updates.shape)]
        before = graph.add(Neg(), leaves[0])[0]
        graph.output(graph.add(ScatterNd("add"), before, *leaves[1:])[0], "y")
        if kept:
            graph.output(before, "before")
        model = rlx.compile(graph, device="cpu")
        assert (model.plan.in_place > 0) is not kept
        feed = {"x": x, "at": at, "updates": updates}
        for _ in range(2):
            got, out = model(feed), {"y": np.empty_like(x)}
            model.run(feed, out=out)
            for name, expected in run_graph(graph, feed).items():
                np.testing.assert_array_equal(got[name], expected)
            np.testing.assert_array_equal(out["y"], got["y"])


# ---- regions and places


def boxes(seed: int, count: int, extent: float) -> Array:
    """Regions inside, across and outside of an image, some turned inside out."""
    return np.random.default_rng(seed).uniform(-extent / 2, 1.5 * extent, (count, 4)).astype(np.float32)


@pytest.mark.parametrize("half_pixel", [True, False])
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_roi_align_of_any_region(mode: str, half_pixel: bool) -> None:
    """Bins of many samples and of none, samples outside of the image; the same for any number of threads."""
    rng = np.random.default_rng(2)
    images = rng.standard_normal((2, 3, 11, 17)).astype(np.float32)
    rois = np.concatenate([boxes(3, 20, 17), [[2, 2, 2, 2], [-60, -70, 90, 80], [0, 0, 16, 10]]]).astype(np.float32)
    batch = rng.integers(0, 2, len(rois))
    op = RoiAlignAdaptive((4, 3), 0.9, mode, half_pixel)
    for threads in (1, 3):
        graph, feed = graph_of(op, (images, rois, batch))
        compare(graph, feed, threads=threads, allowed={"y0": Tolerance(1e-5, 1e-5)})


def test_regions_that_make_no_sense_end() -> None:
    """NaN, infinite and astronomically large regions cost no more than others."""
    images = np.ones((1, 2, 9, 9), np.float32)
    wild = [np.nan, np.inf, -np.inf, 3e38, -3e38, 1e20]
    rois = np.array(list(product(wild, repeat=2)), np.float32)
    rois = np.concatenate([np.concatenate([rois, rois[::-1]], 1), np.concatenate([rois, rois], 1)])
    for op in (RoiAlignAdaptive((2, 2)), RoiAlignAdaptive((2, 2), 1.0, "max", False)):
        graph, feed = graph_of(op, (images, rois, np.zeros(len(rois), np.int64)))
        assert rlx.compile(graph, device="cpu")(feed)["y0"].shape == (len(rois), 2, 2, 2)
    pooled = np.concatenate([np.zeros((len(rois), 1), np.float32), rois], 1)
    graph, feed = graph_of(MaxRoiPool((2, 2)), (images, pooled))
    assert np.isin(rlx.compile(graph, device="cpu")(feed)["y0"], (0, 1)).all()


def test_max_roi_pool_of_any_region() -> None:
    """Overlapping, empty and outside bins, NaN in an image, halves that are rounded away from zero."""
    rng = np.random.default_rng(4)
    images = rng.standard_normal((2, 3, 11, 17)).astype(np.float32)
    images[0, 1, 4, 4] = np.nan
    rois = np.concatenate([boxes(5, 20, 17), [[0.5, 1.5, 2.5, 3.5], [-0.5, -0.5, 20, 20]]]).astype(np.float32)
    rois = np.concatenate([rng.integers(0, 2, (len(rois), 1)).astype(np.float32), rois], 1)
    for size, scale in (((3, 2), 1.0), ((7, 7), 0.5), ((1, 1), 2.0)):
        assert_exact(MaxRoiPool(size, scale), images, rois, threads=2)


def test_max_unpool_in_a_larger_tensor() -> None:
    """Places are those of the tensor that was pooled; of equal ones the last wins."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)
    assert_exact(MaxUnpool((9, 8), (6, 7)), x, rng.integers(0, 2 * 3 * 6 * 7, x.shape))
    assert_exact(MaxUnpool((9, 8)), x, rng.integers(0, 40, x.shape))


# ---- sizes that data decide


@pytest.mark.parametrize("center", [False, True])
def test_non_max_suppression_of_many_boxes(center: bool) -> None:
    """Crowded, equal, empty and NaN boxes, tied and NaN scores, with and without limits: what the reference takes."""
    rng = np.random.default_rng(8)
    boxes = rng.random((2, 150, 4)).astype(np.float32)
    boxes[:, :20] = boxes[:, 20:40]
    boxes[:, 50:53, 1] = [np.nan, np.inf, -np.inf]
    boxes[:, 60:70, 2:] = boxes[:, 60:70, :2]
    scores = np.round(rng.random((2, 3, 150)), 2).astype(np.float32)
    scores[0, 0, 5:9] = [np.nan, np.inf, -np.inf, -0.0]
    graph = Graph("boxes")
    leaves = [graph.input("boxes", (2, Dim("n", 0, 200), 4)), graph.input("scores", (2, 3, Dim("n", 0, 200)))]
    limits = [graph.input("limit", (), "i64"), graph.input("iou", ()), graph.input("least", ())]
    op = NonMaxSuppression(produced("count", 6, Dim("n", 0, 200)), center)
    graph.output(graph.add(op, *leaves, *limits, provenance=["culprit"])[0], "y")
    model = rlx.compile(graph, device="cpu")
    assert "non_max_places" in model.explain("fuse")
    for n, limit, iou, least in (
        (150, 200, 0.3, -np.inf),
        (150, 7, 0.0, 0.5),
        (41, 200, 1.0, 0.9),
        (0, 5, 0.5, 0.0),
        (9, 0, 0.5, 0),
    ):
        feed = {"boxes": boxes[:, :n], "scores": scores[..., :n], "limit": np.array(limit)}
        feed |= {"iou": np.array(iou, np.float32), "least": np.array(least, np.float32)}
        with np.errstate(all="ignore"):
            expected = run_graph(graph, feed)["y"]
        np.testing.assert_array_equal(model(feed)["y"], expected)
    with pytest.raises(ExecutionError, match="culprit"):
        model(feed | {"iou": np.array(1.5, np.float32)})


def test_non_zero_and_compress_of_each_size() -> None:
    """Nothing, all, NaN, -0 and every rank; one compile for all lengths."""
    graph, n = Graph("found"), Dim("n", 0, 90)
    x, keep = graph.input("x", (n, 3)), graph.input("keep", (n,), "bool")
    graph.output(graph.add(NonZero(produced("found", n, 3)), x)[0], "places")
    graph.output(graph.add(Compress(produced("rows", n), 0), x, keep)[0], "rows")
    graph.output(graph.add(Compress(produced("some", n)), x, keep)[0], "some")
    model = rlx.compile(graph, device="cpu")
    for size, share in ((0, 0.5), (1, 1.0), (50, 0.0), (90, 0.5), (33, 0.9)):
        rng = np.random.default_rng(size)
        x_data = np.where(rng.random((size, 3)) < share, rng.choice([1.0, np.nan, -2.0], (size, 3)), -0.0)
        feed = {"x": x_data.astype(np.float32), "keep": rng.random(size) < share}
        for name, expected in run_graph(graph, feed).items():
            np.testing.assert_array_equal(model(feed)[name], expected, err_msg=f"{name} of {size}")


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


ONE = np.ones((1, 1, 2))
BOX = np.zeros((1, 4), np.float32)
IMAGE = np.ones((2, 1, 3, 3), np.float32)
HOSTILE: dict[str, tuple[Op, list[Array], int]] = {
    "scatter_elements beyond the end": (ScatterElements(1), [np.ones((2, 5)), ints(1, 5)[None], np.ones((1, 2))], 5),
    "scatter_elements before the start": (ScatterElements(0), [np.ones(5), ints(-6), np.ones(1)], -6),
    "scatter_elements far away": (ScatterElements(0, "add"), [np.ones(5), ints(2**62), np.ones(1)], 2**62),
    "scatter_elements lowest": (ScatterElements(0, "max"), [np.ones(5), ints(-(2**63)), np.ones(1)], -(2**63)),
    "scatter_nd in the last axis": (ScatterNd(), [np.ones((3, 4)), ints(1, 4)[None], np.ones(1)], 4),
    "scatter_nd of slices": (ScatterNd("mul"), [np.ones((3, 4)), ints(0, -4)[:, None], np.ones((2, 4))], -4),
    "scatter_nd of 16-bit sums": (
        ScatterNd("add"),
        [np.ones((3, 4), np.float16), ints(0, 2**40)[:, None], np.ones((2, 4), np.float16)],
        2**40,
    ),
    "max_unpool before the start": (MaxUnpool((3,)), [ONE, ints(0, -1)[None, None]], -1),
    "max_unpool beyond the end": (MaxUnpool((3,)), [ONE, ints(3, 0)[None, None]], 3),
    "max_unpool outside of the result": (MaxUnpool((3,), (9,)), [ONE, ints(0, 4)[None, None]], 4),
    "roi_align of no image": (RoiAlignAdaptive((2, 2)), [IMAGE, BOX, ints(2)], 2),
    "max_roi_pool of no image": (MaxRoiPool((2, 2)), [IMAGE, np.array([[-1, 0, 0, 1, 1]], np.float32)], -1),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_index(what: str) -> None:
    """The run stops with an error that names the node and the value, nothing is written there, and the model lives."""
    op, arrays, shown = HOSTILE[what]
    graph, feed = graph_of(op, arrays)
    model = rlx.compile(graph, device="cpu")
    with pytest.raises(ExecutionError, match=f"culprit: index out of range .value {shown}."):
        model(feed)
    with pytest.raises(ExecutionError):
        run_graph(graph, feed)
    last = "x2" if what.startswith("roi_align") else "x1"
    fine: dict[str, Any] = feed | {last: np.zeros_like(feed[last])}
    np.testing.assert_array_equal(model(fine)["y0"], run_graph(graph, fine)["y0"])
