"""Moves between channels, windows and space against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops_oracle import check, ort, sym, values

from rlx.errors import OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import TensorType
from rlx.ops.space import CenterCropPad, Col2Im, DepthToSpace, SpaceToDepth
from rlx.testing.interpret import check_op


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_to_space(mode: str) -> None:
    """Both orders of the channels."""
    x = values((2, 12, 3, 5))
    (y,) = check(DepthToSpace(2, mode), x, static=(0,))
    np.testing.assert_array_equal(y, ort("DepthToSpace", x, blocksize=2, mode=mode)[0])


def test_space_to_depth() -> None:
    """The inverse of depth_to_space "DCR"."""
    x = values((2, 3, 6, 4))
    (y,) = check(SpaceToDepth(2), x, static=(0,))
    np.testing.assert_array_equal(y, ort("SpaceToDepth", x, blocksize=2)[0])
    np.testing.assert_array_equal(DepthToSpace(2).reference(y), x)


@pytest.mark.parametrize("sizes", [(3, 9, 3), (8, 4, 2), (5, 7, 4), (5, 8, 0)])
def test_center_crop_pad(sizes: tuple[int, ...]) -> None:
    """Odd and even differences, cropping one axis and padding another; symbols for both sizes."""
    x = values((5, 7, 3))
    (y,) = check_op(CenterCropPad(sizes), x)
    np.testing.assert_array_equal(y, ort("CenterCropPad", x, np.array(sizes))[0])
    extents = {f"s{n}": n for n in range(10)}
    check_op(CenterCropPad(tuple(map(sym, sizes))), x, shapes=[tuple(map(sym, x.shape))], extents=extents)
    (y,) = check(CenterCropPad((8,), (-1,)), x)
    np.testing.assert_array_equal(y, ort("CenterCropPad", x, np.array([8]), axes=[-1])[0])


def test_col2im() -> None:
    """Plain, and with strides, dilations and uneven pads; windows overlap."""
    x = values((1, 5 * 4, 20))
    (y,) = check(Col2Im((5, 6), (2, 2)), x, static=(0,))
    np.testing.assert_allclose(y, ort("Col2Im", x, np.array([5, 6]), np.array([2, 2]))[0], rtol=1e-5, atol=1e-6)
    x = values((2, 3 * 6, 12))
    (y,) = check(Col2Im((7, 5), (2, 3), (2, 1), (1, 2), (0, 1, 1, 1)), x, static=(0,))
    window: dict[str, Any] = {"strides": [2, 1], "dilations": [1, 2], "pads": [0, 1, 1, 1]}
    expected = ort("Col2Im", x, np.array([7, 5]), np.array([2, 3]), **window)[0]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_errors() -> None:
    """Sizes that can't be split, unknown modes, wrong counts."""
    x = TensorType((2, 6, 3, 4), DTYPES["f32"])
    with pytest.raises(ShapeError, match="multiple of 4"):
        DepthToSpace(2).infer(x)
    with pytest.raises(OptionError, match="mode"):
        DepthToSpace(1, "CDR").infer(x)
    with pytest.raises(ShapeError, match="multiple of 2"):
        SpaceToDepth(2).infer(x)
    with pytest.raises(ShapeError, match="one to one"):
        CenterCropPad((3, 4)).infer(x)
    with pytest.raises(ShapeError, match="windows"):
        Col2Im((5, 5), (2, 2)).infer(TensorType((1, 8, 15), DTYPES["f32"]))
