"""Scatters with every reduction against ONNX Runtime."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from ops_oracle import check, ort, values

from rlx.errors import ExecutionError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import TensorType
from rlx.ops.scatter import REDUCTIONS, ScatterElements, ScatterNd


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("axis, shape", [(0, (4, 3)), (1, (5, 2)), (1, (5, 6)), (-1, (2, 1)), (0, (0, 3))])
def test_scatter_elements(axis: int, shape: tuple[int, ...], reduction: str) -> None:
    """Negative and repeated positions; of repeated ones the last wins without a reduction."""
    x, updates = values((5, 3)), values(shape, seed=1)
    n = x.shape[axis]
    indices = np.random.default_rng(0).integers(-n, n, shape)
    (y,) = check(ScatterElements(axis, reduction), x, indices, updates)
    expected = ort("ScatterElements", x, indices, updates, axis=axis, reduction=reduction, opset=18)[0]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("depth, shape", [(1, (4, 1)), (2, (2, 3, 2)), (3, (6, 3)), (2, (2,))])
def test_scatter_nd(depth: int, shape: tuple[int, ...], reduction: str) -> None:
    """Tuples of one position up to the full rank, elements and slices."""
    x, rng = values((5, 4, 3)), np.random.default_rng(0)
    indices = np.stack([rng.integers(-n, n, shape[:-1]) for n in x.shape[:depth]], -1)
    updates = values((*shape[:-1], *x.shape[depth:]), seed=1)
    (y,) = check(ScatterNd(reduction), x, indices, updates, static=(1,))
    expected = ort("ScatterND", x, indices, updates, reduction=reduction, opset=18)[0]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_other_types() -> None:
    """bool without reduction; bf16 adds in f32; integers wrap."""
    i = np.array([1, 1, 1])
    assert check(ScatterElements(), np.zeros(3, bool), i, np.array([False, False, True]))[0][1]
    narrow = np.array([0, 256, 0], ml_dtypes.bfloat16)
    assert check(ScatterElements(0, "add"), narrow, i, np.ones(3, narrow.dtype))[0][1] == 260  # 259 rounded once
    assert check(ScatterElements(0, "add"), np.full(3, 127, np.int8), i, np.ones(3, np.int8))[0][1] == -126


def test_errors() -> None:
    """Positions outside stop the run; shapes and names are checked."""
    x = values((3, 2))
    with pytest.raises(ExecutionError, match="3"):
        ScatterElements().reference(x, np.array([[3, 0]]), x[:1])
    with pytest.raises(ExecutionError, match="-4"):
        ScatterNd().reference(x, np.array([[-4]]), x[:1])
    f, i = TensorType((3, 2), DTYPES["f32"]), TensorType((3, 2), DTYPES["i64"])
    with pytest.raises(OptionError, match="sub"):
        ScatterElements(0, "sub").infer(f, i, f)
    with pytest.raises(ShapeError, match="exceeds"):
        ScatterElements(0).infer(f, TensorType((3, 3), DTYPES["i64"]), TensorType((3, 3), DTYPES["f32"]))
    with pytest.raises(ShapeError, match="known size"):
        ScatterNd().infer(f, TensorType((3, 3), DTYPES["i64"]), f)
    with pytest.raises(ShapeError, match="updates of rank 1"):
        ScatterNd().infer(f, i, f)
