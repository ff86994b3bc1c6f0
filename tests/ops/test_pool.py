"""Pooling against ONNX Runtime: windows, padding, ceil mode, indices, and what counts in a mean."""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ops_oracle import check, ort, values

from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import TensorType
from rlx.ir.shape import Dim
from rlx.kernels.expr import Select, walk
from rlx.kernels.lowering import lower_node
from rlx.ops.pool import AveragePool, GlobalAveragePool, GlobalMaxPool, MaxPool
from rlx.ops.pool_more import LpPool
from rlx.testing.interpret import check_op, make_node

WINDOWS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 7, 6), {"kernel": (2, 2), "strides": (2, 2)}),
    ((1, 2, 7, 6), {"kernel": (3, 2)}),
    ((1, 2, 7, 6), {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ((1, 2, 8, 5), {"kernel": (3, 3), "strides": (3, 2), "pads": (0, 1, 2, 0)}),
    ((1, 2, 9, 8), {"kernel": (2, 3), "dilations": (3, 2), "strides": (2, 1), "pads": (1, 1, 0, 2)}),
    ((1, 2, 5, 4), {"kernel": (2, 2), "strides": (3, 3), "pads": (1, 0, 1, 0)}),
    ((2, 1, 11), {"kernel": (4,), "strides": (3,), "pads": (1, 2)}),
    ((1, 2, 4, 5, 3), {"kernel": (2, 2, 2), "strides": (2, 1, 2), "pads": (0, 1, 1, 0, 0, 0)}),
    ((1, 1, 1, 1), {"kernel": (1, 1)}),
]


def onnx_names(attributes: dict[str, Any], ceil: bool, **more: Any) -> dict[str, Any]:
    return (
        {("kernel_shape" if k == "kernel" else k): v for k, v in attributes.items()} | {"ceil_mode": int(ceil)} | more
    )


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("shape, window", WINDOWS)
def test_max_pool_matches_onnx_runtime(shape: tuple[int, ...], window: dict[str, Any], ceil: bool) -> None:
    """Values and flat indices of the maxima."""
    x = values(shape)
    expected, where = ort("MaxPool", x, outputs=2, **onnx_names(window, ceil))
    (y,) = check(MaxPool(**window, ceil_mode=ceil), x)
    np.testing.assert_array_equal(y, expected)
    y, index = check(MaxPool(**window, ceil_mode=ceil, with_indices=True), x)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(index, where)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_max_pool_of_other_types(dtype: Any) -> None:
    """The padding is below every element, and ties (with the padding of u8 too) give the first element's index."""
    x = np.zeros((1, 1, 4, 4), dtype) if dtype == np.uint8 else values((1, 1, 4, 4), dtype)
    y, index = check(MaxPool((3, 3), (2, 2), (1, 1, 1, 1), with_indices=True), x)
    np.testing.assert_array_equal(x.reshape(-1)[index], y)
    assert x[0, 0, 0, 0] <= y[0, 0, 0, 0]
    negative = -np.ones((1, 1, 3), dtype) if np.dtype(dtype).kind != "u" else np.zeros((1, 1, 3), dtype)
    np.testing.assert_array_equal(check(MaxPool((3,), pads=(1, 1)), negative)[0], negative)


def test_max_pool_propagates_nan() -> None:
    """A NaN is the maximum of its window, and its index the first NaN's."""
    x = np.array([[[1, np.nan, 3, np.nan, 0, -np.inf, -np.inf]]], np.float32)
    y, index = check(MaxPool((3,), (2,), (1, 1), with_indices=True), x)
    assert np.isnan(y[0, 0, :3]).all()
    assert index[0, 0].tolist() == [1, 1, 3, 5]


@pytest.mark.parametrize("ceil, include", list(product([False, True], repeat=2)))
@pytest.mark.parametrize("shape, window", WINDOWS)
def test_average_pool_matches_onnx_runtime(
    shape: tuple[int, ...], window: dict[str, Any], ceil: bool, include: bool
) -> None:
    """The padding counts only when asked for, and what ceil mode adds beyond it never does."""
    x = values(shape)
    op = AveragePool(**window, ceil_mode=ceil, count_include_pad=include)
    (y,) = check(op, x)
    (expected,) = ort("AveragePool", x, **onnx_names(window, ceil, count_include_pad=int(include)))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_average_pools_of_other_types(dtype: Any) -> None:
    """16-bit floats sum in f32."""
    x = values((1, 2, 5), dtype)
    check(AveragePool((3,), pads=(1, 1)), x)
    check(GlobalAveragePool(), x)
    check(GlobalMaxPool(), x)


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 1, 1), (2, 2, 3, 1, 2), (0, 2, 3)])
def test_global_pools(shape: tuple[int, ...]) -> None:
    """One element a channel, spatial axes kept."""
    x = values(shape)
    axes = tuple(range(2, x.ndim))
    np.testing.assert_allclose(check(GlobalAveragePool(), x)[0], x.mean(axis=axes, keepdims=True), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(check(GlobalMaxPool(), x)[0], x.max(axis=axes, keepdims=True))


def test_windows_inside_need_no_test() -> None:
    """Without padding, loads have no condition; ceil mode that adds no window adds none."""
    h = Dim("h", 2)
    for op, shape in [
        (MaxPool((2, 2), (2, 2)), (1, 1, h, h)),
        (MaxPool((2, 2), (2, 2), ceil_mode=True), (1, 1, 2 * h, 4)),
        (MaxPool((2, 2), (1, 1), ceil_mode=True), (1, 1, h + 1, h + 1)),
    ]:
        lowered = lower_node(make_node(op, (shape, "f32")))
        assert lowered is not None
        ((piece,),) = lowered.outputs
        assert not any(isinstance(e, Select) for e in walk(piece.expr))


def test_axis_a_little_shorter_than_the_window() -> None:
    """One short by less than a stride has one window, of what there is, as in ONNX Runtime; others have none."""
    x = np.arange(1, 9, dtype=np.float32).reshape(1, 1, 2, 4)
    for op, want in [
        (MaxPool((3, 2), (2, 2)), [6, 8]),
        (AveragePool((3, 2), (2, 2)), [3.5, 5.5]),
        (LpPool((3, 2), (3, 2), p=1), [14, 22]),
    ]:
        np.testing.assert_array_equal(check(op, x)[0], np.reshape(np.float32(want), (1, 1, 1, 2)))
        assert check(op, x[:, :, :0])[0].shape == (1, 1, 0, 2)
    check_op(AveragePool((2, 2), (2, 2)), values((1, 1, 1, 5)), shapes=[(1, 1, Dim("h"), 5)], extents={"h": 1})
    assert check(MaxPool((3, 2), (2, 2)), x[:, :, :1])[0].shape == (1, 1, 0, 2)


def test_pool_of_symbolic_pads_and_empty_batches() -> None:
    """Pads that depend on the run; no batch, no windows."""
    p = Dim("p", 0, 2)
    for op in (
        MaxPool((3,), pads=(p, p)),
        AveragePool((3,), pads=(p, 1)),
        AveragePool((3,), (2,), (p, 1), (), True, True),
    ):
        check_op(op, values((1, 2, 5)), extents={"p": 1})
    assert check(MaxPool((2,)), values((0, 2, 5)))[0].shape == (0, 2, 4)
    assert check(AveragePool((3,)), values((1, 2, 2)))[0].shape == (1, 2, 0)
    assert check(MaxPool((6,), (2,), ceil_mode=True), values((1, 2, 3)))[0].shape == (1, 2, 0)


def test_pool_errors() -> None:
    """Kernels, pads and types that do not fit are named."""
    x = TensorType((1, 2, 5, 5), DTYPES["f32"])
    for op, message in [
        (MaxPool((2,)), "kernel"),
        (MaxPool(()), "kernel"),
        (MaxPool((2, 2), pads=(2, 0, 0, 0)), "smaller than the window"),
        (AveragePool((2, 2), pads=(-1, 0, 0, 0)), "smaller than the window"),
        (AveragePool((7, 7)), "larger than the padded axis"),
        (MaxPool((2, 2), strides=(1,)), "expected 2 entries"),
    ]:
        with pytest.raises(ShapeError, match=message):
            op.infer(x)
    with pytest.raises(OptionError, match="at least 1"):
        MaxPool((2, 0)).infer(x)
    for op in (AveragePool((2, 2)), GlobalAveragePool(), GlobalMaxPool()):
        with pytest.raises(DTypeError, match=op.op_name):
            op.infer(TensorType(x.shape, DTYPES["i32"]))
    with pytest.raises(ShapeError, match="rank >= 3"):
        GlobalMaxPool().infer(TensorType((2, 3), DTYPES["f32"]))
