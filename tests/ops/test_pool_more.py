"""Pooling by norms and its inverse against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
from ops_oracle import check, ort, values

from rlx.errors import DTypeError, ExecutionError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import TensorType
from rlx.ops.pool_more import GlobalLpPool, LpPool, MaxUnpool

X = values((2, 3, 6, 5))


@pytest.mark.parametrize("p", [1, 2, 3])
def test_lp_pools(p: int) -> None:
    """Pads, strides, dilations and ceil mode for norms with and without a short form."""
    (y,) = check(LpPool((3, 2), (2, 1), (1, 0, 0, 1), p=p), X)
    expected = ort("LpPool", X, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 0, 1], p=p)[0]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    (y,) = check(LpPool((2, 2), (2, 2), (), (2, 1), True, p), X)
    expected = ort("LpPool", X, kernel_shape=[2, 2], strides=[2, 2], dilations=[2, 1], ceil_mode=1, p=p)[0]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    (y,) = check(GlobalLpPool(p), X)
    np.testing.assert_allclose(y, ort("GlobalLpPool", X, p=p, opset=12)[0], rtol=1e-5)


def test_max_unpool() -> None:
    """Undoes max pooling; into a larger result by way of the pooled sizes (the standard's own example)."""
    x = values((2, 3, 4, 6))
    y, places = ort("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2], outputs=2)
    (back,) = check(MaxUnpool((4, 6)), y, places)
    np.testing.assert_array_equal(back, ort("MaxUnpool", y, places, kernel_shape=[2, 2], strides=[2, 2])[0])
    ones = np.array([[[[1, 2], [3, 4]]]], np.float32)
    (large,) = check(MaxUnpool((5, 5), (4, 4)), ones, np.array([[[[5, 7], [13, 15]]]]), static=(0, 1))
    assert {(int(i), int(j)): large[0, 0, i, j] for i, j in np.argwhere(large[0, 0])} == {
        (1, 1): 1, (1, 3): 2, (3, 1): 3, (3, 3): 4
    }  # fmt: skip


def test_errors() -> None:
    """Places outside stop the run; p and the type of places are checked."""
    x = np.ones((1, 1, 1, 1), np.float32)
    for sizes, pooled in (((2, 2), None), ((1, 2), (3, 3))):
        with pytest.raises(ExecutionError, match="outside"):
            MaxUnpool(sizes, pooled).reference(x, np.array([[[[4]]]]))
    t = TensorType((1, 1, 2, 2), DTYPES["f32"])
    with pytest.raises(OptionError, match="p must be"):
        LpPool((2, 2), p=0).infer(t)
    with pytest.raises(DTypeError, match="i64"):
        MaxUnpool((2, 2)).infer(t, t)
    with pytest.raises(ShapeError, match="must be >= 0"):
        MaxUnpool((2, 2), (-2, -2)).infer(t, TensorType(t.shape, DTYPES["i64"]))
