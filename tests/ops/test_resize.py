"""Nearest resizing against ONNX Runtime, for every coordinate mode and rounding."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from ops_oracle import check, ort, values

from rlx.errors import OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import TensorType
from rlx.ir.shape import Dim
from rlx.kernels.expr import Apply, Cast, walk
from rlx.kernels.lowering import lower_node
from rlx.ops.resize import COORDINATES, ROUNDINGS, ResizeNearest
from rlx.testing.interpret import check_op, make_node

MODES = list(product(COORDINATES, ROUNDINGS))


@pytest.mark.parametrize("coordinate, rounding", MODES)
@pytest.mark.parametrize("sizes", [(2, 3, 10, 6), (2, 3, 5, 3), (2, 3, 2, 9), (2, 3, 1, 1), (2, 3, 7, 4)])
def test_sizes_match_onnx_runtime(sizes: tuple[int, ...], coordinate: str, rounding: str) -> None:
    """Whole and fractional factors, up and down, from the sizes alone.

    half_pixel_symmetric is then half_pixel by definition; ONNX Runtime rounds it off the exact place.
    """
    x = values((2, 3, 5, 3))
    like = "half_pixel" if coordinate == "half_pixel_symmetric" else coordinate
    modes = {"coordinate_transformation_mode": like, "nearest_mode": rounding, "mode": "nearest"}
    (expected,) = ort("Resize", x, None, None, np.array(sizes, np.int64), **modes)
    (y,) = check(ResizeNearest(sizes, (), coordinate, rounding), x)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("coordinate, rounding", MODES)
@pytest.mark.parametrize("scale", [2.0, 3.0, 1.0, 0.5, 0.6, 1.3, 2.7])
def test_scales_match_onnx_runtime(scale: float, coordinate: str, rounding: str) -> None:
    """A scale that is given is used as it is, although the sizes round it."""
    x = values((1, 1, 6, 5))
    scales = np.array([1, 1, scale, 1], np.float32)
    modes = {"coordinate_transformation_mode": coordinate, "nearest_mode": rounding, "mode": "nearest"}
    (expected,) = ort("Resize", x, None, scales, **modes)
    (y,) = check(ResizeNearest(expected.shape, tuple(map(float, scales)), coordinate, rounding), x)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
    "coordinate, rounding",
    [("asymmetric", "floor"), ("half_pixel", "round_prefer_floor"), ("half_pixel", "round_prefer_ceil")],
)
@pytest.mark.parametrize("factor", [1, 2, 3, 7])
def test_whole_factors_take_integer_arithmetic(factor: int, coordinate: str, rounding: str) -> None:
    """Symbolic sizes with a whole factor give i // factor, the same elements as the general formula."""
    h = Dim("h")
    op = ResizeNearest((1, factor * h), (1.0, float(factor)), coordinate, rounding)
    (y,) = check_op(op, values((1, 5)), shapes=[(1, h)], extents={"h": 5})
    np.testing.assert_array_equal(y, np.repeat(values((1, 5)), factor, axis=1))
    lowered = lower_node(make_node(op, ((1, h), "f32")))
    assert lowered is not None
    expressions = list(walk(lowered.outputs[0][0].expr))
    assert not any(isinstance(e, Cast) for e in expressions)
    assert {e.fn for e in expressions if isinstance(e, Apply)} <= {"floordiv"}


@pytest.mark.parametrize("coordinate, rounding", MODES)
def test_symbolic_sizes(coordinate: str, rounding: str) -> None:
    """Sizes that are known at the run only, for each formula."""
    n, m = Dim("n"), Dim("m", 0)
    op = ResizeNearest((m, 2 * n), (), coordinate, rounding)
    for extents in ({"n": 5, "m": 8}, {"n": 3, "m": 1}, {"n": 1, "m": 0}):
        check_op(op, values((extents["n"],) * 2), shapes=[(n, n)], extents=extents)


def test_errors() -> None:
    """Unknown modes, wrong counts, factors that are not positive, and nothing to take."""
    x = TensorType((2, 3), DTYPES["f32"])
    with pytest.raises(OptionError, match="coordinate"):
        ResizeNearest((2, 3), (), "tf_crop_and_resize").infer(x)
    with pytest.raises(OptionError, match="rounding"):
        ResizeNearest((2, 3), (), "half_pixel", "nearest").infer(x)
    with pytest.raises(OptionError, match="positive"):
        ResizeNearest((2, 3), (1.0, 0.0)).infer(x)
    for op in (ResizeNearest((2,)), ResizeNearest((2, 3), (1.0,)), ResizeNearest((2, -1))):
        with pytest.raises(ShapeError, match="resize_nearest"):
            op.infer(x)
    with pytest.raises(ShapeError, match="no elements"):
        ResizeNearest((2, 3)).infer(TensorType((2, 0), DTYPES["f32"]))


@pytest.mark.parametrize("shape, rounding", [((1, 1, 7, 8), "round_prefer_floor"), ((1, 1, 10, 10), "floor")])
def test_places_between_elements_are_those_of_the_onnx_reference(shape: tuple[int, ...], rounding: str) -> None:
    """Exactly between two elements, or on one, half_pixel_symmetric depends on the last bit; ONNX Runtime differs."""
    x, scales = values(shape), np.array([1, 1, 0.6, 0.4], np.float32)
    modes = {"coordinate_transformation_mode": "half_pixel_symmetric", "nearest_mode": rounding, "mode": "nearest"}
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], **modes)
    (expected,) = ReferenceEvaluator(node).run(None, {"x": x, "scales": scales})
    (y,) = check(ResizeNearest(expected.shape, tuple(map(float, scales)), "half_pixel_symmetric", rounding), x)
    np.testing.assert_array_equal(y, expected)
