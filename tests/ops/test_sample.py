"""Sampling at computed places against ONNX Runtime and the onnx package's reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx_reference import onnx_reference
from ops_oracle import check, ort, values

from rlx.errors import OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, TensorType
from rlx.ops.sample import AffineGrid, DeformConv, GridSample
from rlx.testing.interpret import interpret, make_node


def places(*shape: int) -> Array:
    return (np.random.default_rng(0).random(shape) * 3 - 1.5).astype(np.float32)


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_grid_sample(mode: str, padding: str, corners: bool) -> None:
    """Images and volumes, places beyond every border; axes of one element too."""
    op = GridSample(mode, padding, corners)
    attributes: dict[str, Any] = {"mode": mode, "padding_mode": padding, "align_corners": corners}
    x, grid = values((2, 3, 5, 4)), places(2, 3, 5, 2)
    (y,) = check(op, x, grid)
    np.testing.assert_allclose(y, ort("GridSample", x, grid, **attributes)[0], rtol=3e-5, atol=3e-5)
    check(op, x[:, :, :1, :1], grid, static=(0,))
    if mode != "cubic":
        x, grid = values((2, 3, 3, 5, 4)), places(2, 3, 2, 5, 3)
        (y,) = check(op, x, grid, static=(0, 1))
        np.testing.assert_allclose(y, ort("GridSample", x, grid, **attributes)[0], rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_wild_places_read_nothing_outside(mode: str, padding: str) -> None:
    """Huge, infinite and NaN places are safe (the interpreter fails on a load out of bounds)."""
    grid = np.array([1e30, -1e30, np.inf, -np.inf, np.nan, 0], np.float32).reshape(1, 1, 3, 2)
    x = values((1, 1, 3, 3))
    interpret(make_node(GridSample(mode, padding), (x.shape, x.dtype), (grid.shape, grid.dtype)), [x, grid])


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", [(4, 5), (4, 5, 3)])
def test_affine_grid(size: tuple[int, ...], corners: bool) -> None:
    """Two and three dimensions."""
    r = len(size)
    theta = values((2, r, r + 1))
    (y,) = check(AffineGrid(size, corners), theta, static=(0,))
    expected = onnx_reference("AffineGrid", theta, np.array([2, 1, *size]), align_corners=int(corners))[0]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "groups, offset_groups, strides, dilations, pads",
    [
        (1, 1, (1, 1), (1, 1), (0, 0, 0, 0)),
        (2, 2, (2, 1), (1, 2), (1, 1, 0, 2)),
        (2, 1, (1, 1), (1, 1), (1, 1, 1, 1)),
    ],
)
def test_deform_conv(groups: int, offset_groups: int, strides: Any, dilations: Any, pads: Any) -> None:
    """Groups of channels and of offsets, with and without bias and mask."""
    x, w = values((1, 4, 4, 5)), values((2, 4 // groups, 3, 2))
    space = [
        (n + pads[d] + pads[d + 2] - dilations[d] * (k - 1) - 1) // strides[d] + 1
        for d, (n, k) in enumerate(((4, 3), (5, 2)))
    ]
    offset = values((1, offset_groups * 12, *space), seed=4) * np.float32(1.5)
    bias, mask = values((2,)), values((1, offset_groups * 6, *space))
    for arrays in ((x, w, offset), (x, w, offset, bias), (x, w, offset, bias, mask)):
        op = DeformConv(strides, dilations, pads, groups, offset_groups)
        (y,) = check(op, *arrays, static=tuple(range(5)))
        attributes = {"strides": strides, "dilations": dilations, "pads": pads, "group": groups}
        expected = onnx_reference("DeformConv", *arrays, offset_group=offset_groups, **attributes)[0]
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_errors() -> None:
    """Modes, ranks and channels that do not fit."""
    x, grid = TensorType((2, 3, 5, 4), DTYPES["f32"]), TensorType((2, 3, 5, 2), DTYPES["f32"])
    with pytest.raises(OptionError, match="mode"):
        GridSample("bilinear").infer(x, grid)
    with pytest.raises(ShapeError, match="place"):
        GridSample().infer(x, TensorType((2, 3, 5, 3), DTYPES["f32"]))
    with pytest.raises(ShapeError, match="axis 2"):
        AffineGrid((3, 3)).infer(TensorType((2, 2, 2), DTYPES["f32"]))
    with pytest.raises(ShapeError, match="offset"):
        DeformConv().infer(x, TensorType((6, 3, 1, 1), DTYPES["f32"]), TensorType((2, 3, 5, 4), DTYPES["f32"]))
