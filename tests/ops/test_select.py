"""Top-k and the ops whose data decide a size, against ONNX Runtime."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from ops_oracle import check, ort

from rlx.backends.reference import run_graph
from rlx.errors import DTypeError, ExecutionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, Graph, TensorType
from rlx.ir.shape import Dim
from rlx.ops.base import Op
from rlx.ops.elementwise import Neg
from rlx.ops.select import Arange, Compress, NonMaxSuppression, NonZero, TopK, Unique, produced, range_count
from rlx.testing.interpret import check_op

COUNT = Dim("count", 0)
RNG = np.random.default_rng(0)
X = RNG.integers(0, 3, (4, 5)).astype(np.float32)


def agree(op: Op, expected: list[Array], count: int, *arrays: Array) -> None:
    """The results of the op, whose produced size is `count`, are the expected ones."""
    for got, want in zip(check_op(op, *arrays, extents={"count": count}), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_top_k(k: int, axis: int, largest: bool) -> None:
    """Many equal elements: the lower index comes first."""
    x = RNG.integers(0, 5, (4, 7, 3)).astype(np.float32)
    y = check(TopK(k, axis, largest), x, static=(0,))
    if k:
        for got, want in zip(y, ort("TopK", x, np.array([k]), axis=axis, largest=int(largest), outputs=2), strict=True):
            np.testing.assert_array_equal(got, want)


def test_top_k_of_extreme_values() -> None:
    """Unsigned and least integers do not wrap; NaN is the largest."""
    assert check(TopK(2), np.array([0, 200, 3, 255], np.uint8))[1].tolist() == [3, 1]
    assert check(TopK(2), np.array([-128, 5, 127], np.int8))[1].tolist() == [2, 1]
    x = np.array([1, np.nan, np.inf, -np.inf], np.float32)
    assert check(TopK(4), x)[1].tolist() == [1, 2, 0, 3]
    assert check(TopK(4, -1, False), x)[1].tolist() == [3, 0, 2, 1]


def test_non_zero() -> None:
    """Row-major order; a scalar counts as one axis."""
    (expected,) = ort("NonZero", X)
    agree(NonZero(COUNT), [expected], expected.shape[1], X)
    agree(NonZero(COUNT), [np.array([[0]])], 1, np.array(2.0))


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_compress(axis: int | None) -> None:
    """A condition shorter than the axis, or than the elements."""
    keep = np.array([True, False, True, True])
    (expected,) = ort("Compress", X, keep, **({} if axis is None else {"axis": axis}))
    agree(Compress(COUNT, axis), [expected], 3, X, keep)


@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_unique(axis: int | None, order: bool) -> None:
    """Elements and slices, sorted or by first appearance, with all four results."""
    x = RNG.integers(0, 2, (6, 3, 2)).astype(np.float32)
    expected = ort("Unique", x, outputs=4, sorted=int(order), **({} if axis is None else {"axis": axis}))
    agree(Unique(COUNT, axis, order), expected, len(expected[1]), x)


def test_ranges_of_floats_are_counted_exactly() -> None:
    """By the op and at import, as ONNX Runtime counts: the numbers are what f32 holds."""
    rng = np.random.default_rng(0)
    drawn = rng.uniform(-10, 10, (300, 3)).round(2) + np.array([0, 0, 0.005])
    for numbers in [(-7.0, -1.6, 0.1), (7.9, -8.6, -1.5), (-9.0, 2.3, 2.26), *drawn]:
        start, limit, delta = (np.float32(v) for v in numbers)
        exact = (Fraction(float(limit)) - Fraction(float(start))) / Fraction(float(delta))
        want = max(0, math.ceil(exact))
        assert range_count(float(start), float(limit), float(delta)) == want
        assert len(Arange(COUNT).reference(*map(np.array, (start, limit, delta)))) == want
    for start, limit, delta in [(0, 10, 1 / 3), (0, 3, 0.3), (0, 1, 1 / 7), *rng.uniform(-10, 10, (300, 3))]:
        assert range_count(float(start), float(limit), float(delta)) == len(np.arange(start, limit, delta))
    assert range_count(0, 2**62 + 1, 2**61) == 3
    assert range_count(2**62 + 1, 0, -(2**61)) == 3
    for wrong in ((0.0, np.nan, 1.0), (0.0, np.inf, 1.0), (0.0, 1.0, np.nan), (0.0, 1.0, 0.0)):
        with pytest.raises(ExecutionError, match="count"):
            range_count(*wrong)


@pytest.mark.parametrize("numbers", [(0, 10, 3), (10, 0, -3), (0, -1, 1), (2.5, 7.0, 0.5), (0, 9, 3)])
def test_arange(numbers: tuple[float, float, float]) -> None:
    """Up, down, none; the limit is left out."""
    given = [np.array(v, np.int64 if isinstance(numbers[0], int) else np.float32) for v in numbers]
    (expected,) = ort("Range", *given)
    agree(Arange(COUNT), [expected], len(expected), *given)
    with pytest.raises(ExecutionError, match="delta"):
        Arange(COUNT).reference(given[0], given[1], given[2] * 0)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("limit, iou, least", [(5, 0.3, 0.1), (100, 0.05, 0.5), (3, 0.9, -1.0), (0, 0.5, 0.0)])
def test_non_max_suppression(limit: int, iou: float, least: float, center: bool) -> None:
    """Corners in any order or centres, limits and thresholds, several classes and images."""
    boxes, scores = RNG.random((2, 30, 4)).astype(np.float32), RNG.random((2, 3, 30)).astype(np.float32)
    given = [np.array([limit]), np.array([iou], np.float32), np.array([least], np.float32)]
    (expected,) = ort("NonMaxSuppression", boxes, scores, *given, center_point_box=int(center))
    agree(NonMaxSuppression(COUNT, center), [expected], len(expected), boxes, scores, *given)


def test_a_graph_carries_a_produced_size() -> None:
    """Later nodes use the dim; its upper bound comes from the input, and one that is too low stops the run."""
    assert produced("m", Dim("n", 1, 8), 3) == Dim("m", 0, 24)
    for most in (6, 3):
        g = Graph()
        x = g.input("x", (6,))
        keep = g.input("keep", (6,), "bool")
        (kept,) = g.add(Compress(Dim("m", 0, most), 0), x, keep)
        g.output(g.add(Neg(), kept)[0], "y")
        arrays = {"x": np.arange(6, dtype=np.float32), "keep": np.array([1, 0, 1, 1, 0, 1], bool)}
        if most == 6:
            np.testing.assert_array_equal(run_graph(g, arrays)["y"], [0, -2, -3, -5])
        else:
            with pytest.raises(ExecutionError, match="bounds"):
                run_graph(g, arrays)


def test_errors() -> None:
    """k beyond the axis, conditions of the wrong type or length, boxes of the wrong shape."""
    x = TensorType((4, 5), DTYPES["f32"])
    with pytest.raises(ShapeError, match="exceeds"):
        TopK(6).infer(x)
    with pytest.raises(DTypeError, match="condition"):
        Compress(COUNT).infer(x, TensorType((3,), DTYPES["i64"]))
    with pytest.raises(ShapeError, match="longer"):
        Compress(COUNT, 0).infer(x, TensorType((5,), DTYPES["bool"]))
    with pytest.raises(ShapeError, match="boxes"):
        NonMaxSuppression(COUNT).infer(x, x)
