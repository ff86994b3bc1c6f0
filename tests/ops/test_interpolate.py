"""Linear and cubic resizing against ONNX Runtime and the onnx package's reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx_reference import onnx_reference
from ops_oracle import check, ort, values

from rlx.errors import OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import TensorType
from rlx.ir.shape import Dim
from rlx.ops.interpolate import ALL_COORDINATES, Interpolate
from rlx.ops.resize import COORDINATES
from rlx.testing.interpret import check_op

X = values((1, 2, 5, 4))
TARGETS = (
    ((1, 2, 10, 6), None), ((1, 2, 3, 2), None), ((1, 2, 1, 1), None),
    ((1, 2, 7, 5), (1.0, 1.0, 1.5, 1.3)), ((1, 2, 3, 2), (1.0, 1.0, 0.6, 0.7)),
)  # fmt: skip


@pytest.mark.sample(20)
@pytest.mark.parametrize("sizes, scales", TARGETS)
@pytest.mark.parametrize("coordinate", COORDINATES)
@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_every_coordinate_mode(mode: str, coordinate: str, sizes: Any, scales: Any) -> None:
    """From sizes or scales, up and down, with and without the elements beyond the border, and with antialiasing."""
    given = (X, None, np.array(scales, np.float32)) if scales else (X, None, None, np.array(sizes))
    for outside, antialias in ((0, 0), (1, 0), (0, 1), (1, 1)):
        if outside and mode == "linear":
            continue
        op = Interpolate(
            sizes, scales or (), mode, coordinate, exclude_outside=bool(outside), antialias=bool(antialias)
        )
        (y,) = check(op, X, static=(0,))
        attributes: dict[str, Any] = {
            "mode": mode, "coordinate_transformation_mode": coordinate, "exclude_outside": outside,
            "antialias": antialias,
        }  # fmt: skip
        # the package's reference has the size before rounding as the last place of align_corners, ONNX Runtime has no
        # exact half_pixel_symmetric
        run = onnx_reference if coordinate == "half_pixel_symmetric" else ort
        np.testing.assert_allclose(y, run("Resize", *given, **attributes)[0], rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
def test_crop_and_resize(mode: str) -> None:
    """A region that reaches beyond x gives the extrapolation value there."""
    roi = (0, 0, 0.1, -0.2, 1, 1, 0.7, 1.3)
    op = Interpolate((1, 2, 7, 6), (), mode, "tf_crop_and_resize", roi=roi, extrapolation=9.0)
    (y,) = check(op, X, static=(0,))
    attributes: dict[str, Any] = {"mode": mode, "extrapolation_value": 9.0}
    attributes["coordinate_transformation_mode"] = "tf_crop_and_resize"
    given = (X, np.array(roi, np.float32), None, np.array((1, 2, 7, 6)))
    np.testing.assert_allclose(y, onnx_reference("Resize", *given, **attributes)[0], rtol=3e-5, atol=3e-5)
    assert (y == 9).any()


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("coordinate", ALL_COORDINATES)
@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
def test_symbolic_sizes(mode: str, coordinate: str, antialias: bool) -> None:
    """Factors that are known at the run only."""
    h, m = Dim("h"), Dim("m", 0)
    for n, size in ((6, 12), (13, 4), (1, 3), (5, 1), (3, 0)):
        op = Interpolate((1, m), (), mode, coordinate, antialias=antialias)
        check_op(op, values((1, n)), shapes=[(1, h)], extents={"h": n, "m": size})


def test_other_types() -> None:
    """f16 by f32, f64 in f64, and whole numbers of integers are not lost to rounding."""
    check(Interpolate((7, 5)), values((4, 3), np.float16))
    check(Interpolate((7, 5)), values((4, 3), np.float64))
    x = (np.arange(20).reshape(5, 4) * 12).astype(np.uint8)
    (y,) = check(Interpolate((10, 6)), x)
    assert y[0, 2] == 14  # ONNX Runtime gives 13: the exact value less a rounding error, truncated


def test_weights_of_f64_are_f64() -> None:
    """Cubic weights for places that f32 holds exactly, against their polynomial in Python's floats."""
    x, a = values((6,), np.float64), -0.7
    (y,) = check(Interpolate((12,), (), "cubic", cubic=a), x, static=(0,))

    def weight(d: float) -> float:
        return ((a + 2) * d - (a + 3)) * d * d + 1 if d <= 1 else ((d - 5) * d + 8) * d * a - 4 * a

    for i, got in enumerate(y):
        place = i / 2 - 0.25
        first = int(np.floor(place))
        taps = range(first - 1, first + 3)
        assert got == pytest.approx(
            sum(weight(abs(t - place)) * x[min(max(t, 0), 5)] for t in taps), rel=1e-13, abs=1e-14
        )


def test_errors() -> None:
    """Unknown modes, wrong counts, scales that are not positive, nothing to take."""
    x = TensorType((2, 3), DTYPES["f32"])
    with pytest.raises(OptionError, match="mode"):
        Interpolate((2, 3), (), "bilinear").infer(x)
    with pytest.raises(OptionError, match="positive"):
        Interpolate((2, 4), (1.0, 0.0)).infer(x)
    with pytest.raises(ShapeError, match="each axis"):
        Interpolate((2,)).infer(x)
    with pytest.raises(ShapeError, match="no elements"):
        Interpolate((2, 3)).infer(TensorType((2, 0), DTYPES["f32"]))
