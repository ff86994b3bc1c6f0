"""Pooling of regions against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
from ops_oracle import check, ort, values

from rlx.errors import DTypeError, ExecutionError, OptionError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import TensorType
from rlx.ops.roi import MaxRoiPool, RoiAlign, RoiAlignAdaptive

X = values((2, 3, 9, 7))
ROIS = np.array([[0, 0, 6, 8], [1.5, 2.2, 5.7, 7.9], [-3, -2, 20, 4]], np.float32)
BATCH = np.array([0, 1, 1])


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("half_pixel", [False, True])
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("samples", [0, 1, 2, 3])
def test_roi_align(samples: int, mode: str, half_pixel: bool, scale: float) -> None:
    """Regions inside and beyond the image, with a fixed number of samples or one that follows the region."""
    shared = ((2, 3), scale, mode, half_pixel)
    op = RoiAlign(*shared, samples) if samples else RoiAlignAdaptive(*shared)
    (y,) = check(op, X, ROIS, BATCH, static=(1,))
    expected = ort(
        "RoiAlign", X, ROIS, BATCH, opset=16, output_height=2, output_width=3, mode=mode, spatial_scale=scale,
        sampling_ratio=samples, coordinate_transformation_mode="half_pixel" if half_pixel else "output_half_pixel",
    )[0]  # fmt: skip
    np.testing.assert_allclose(y, expected, rtol=3e-5, atol=3e-5)


def test_a_region_inside_out_has_no_samples() -> None:
    """Adaptive sampling gives 0 there (ONNX Runtime fails)."""
    rois = np.array([[5, 1, 2, 6]], np.float32)
    assert not check(RoiAlignAdaptive((2, 2)), X, rois, BATCH[:1])[0].any()


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_max_roi_pool(scale: float) -> None:
    """Bins that overlap, and bins outside the image, which give 0."""
    rois = np.concatenate([BATCH[:, None], ROIS], axis=1).astype(np.float32)
    (y,) = check(MaxRoiPool((2, 3), scale), X, rois, static=(1,))
    expected = ort("MaxRoiPool", X, rois, opset=21, pooled_shape=[2, 3], spatial_scale=scale)[0]
    np.testing.assert_array_equal(y, expected)


def test_bins_are_cut_in_whole_numbers() -> None:
    """Bins of every length from 1 to 64 elements; ends that are whole numbers are not moved by a rounding error."""
    image = np.arange(64, dtype=np.float32).reshape(1, 1, 1, 64)
    lengths = np.arange(1, 65)
    rois = np.zeros((64, 5), np.float32)
    rois[:, 3] = lengths - 1
    for count in (3, 6, 7, 11, 13, 49):
        (y,) = check(MaxRoiPool((1, count)), image, rois, static=(0, 1))
        want = [[-(-(i + 1) * n // count) - 1 for i in range(count)] for n in lengths.tolist()]
        np.testing.assert_array_equal(y[:, 0, 0], want)


def test_errors() -> None:
    """Images that do not exist stop the run; sizes, modes and types are checked."""
    with pytest.raises(ExecutionError, match="outside"):
        RoiAlign().reference(X, ROIS, np.array([0, 2, 0]))
    with pytest.raises(ExecutionError, match="outside"):
        MaxRoiPool((1, 1)).reference(X, np.array([[2, 0, 0, 1, 1]], np.float32))
    x, rois, i = (
        TensorType((2, 3, 9, 7), DTYPES["f32"]),
        TensorType((3, 4), DTYPES["f32"]),
        TensorType((3,), DTYPES["i64"]),
    )
    with pytest.raises(OptionError, match="samples"):
        RoiAlign(samples=0).infer(x, rois, i)
    with pytest.raises(OptionError, match="mode"):
        RoiAlign(mode="mean").infer(x, rois, i)
    with pytest.raises(DTypeError, match="batch indices"):
        RoiAlign().infer(x, rois, TensorType((3,), DTYPES["f32"]))
