"""Rotary embedding against the onnx package's reference."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnx_reference import onnx_reference
from ops_oracle import check, values

from rlx.errors import ExecutionError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import TensorType
from rlx.ops.rotary import RotaryEmbedding


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [0, 4])
def test_matches_onnx(dim: int, interleaved: bool) -> None:
    """Both layouts, the whole head or a part, with positions or tables given for each of them."""
    half, x = (dim or 8) // 2, values((2, 3, 5, 8))
    cos, sin = values((11, half)), values((11, half), seed=1)
    at = np.random.default_rng(0).integers(0, 11, (2, 5))
    attributes = {"interleaved": int(interleaved), "rotary_embedding_dim": dim}
    flat = x.swapaxes(1, 2).reshape(2, 5, 24)
    for arrays, heads in (((x, cos, sin, at), 0), ((x, cos[at], sin[at]), 0), ((flat, cos, sin, at), 3)):
        (y,) = check(RotaryEmbedding(interleaved, heads, dim), *arrays, static=(0, 1, 2))
        expected = onnx_reference("RotaryEmbedding", *arrays, num_heads=heads, **attributes)[0]
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_one_row_of_positions_serves_the_batch() -> None:
    """[1, S] broadcasts; bf16 is computed in f32."""
    x, cos = values((2, 3, 5, 8)).astype(ml_dtypes.bfloat16), values((11, 4)).astype(ml_dtypes.bfloat16)
    check(RotaryEmbedding(), x, cos, cos, np.arange(5)[None], static=(0, 1, 2, 3))


def test_errors() -> None:
    """Odd parts, missing heads, tables of the wrong width, positions outside."""
    x, table = TensorType((2, 3, 5, 8), DTYPES["f32"]), TensorType((2, 5, 4), DTYPES["f32"])
    with pytest.raises(OptionError, match="even"):
        RotaryEmbedding(dim=3).infer(x, table, table)
    with pytest.raises(ShapeError, match="half of 6"):
        RotaryEmbedding(dim=6).infer(x, table, table)
    with pytest.raises(ShapeError, match="heads"):
        RotaryEmbedding().infer(TensorType((2, 5, 24), DTYPES["f32"]), table, table)
    with pytest.raises(ExecutionError, match="11"):
        RotaryEmbedding().reference(values((1, 1, 1, 8)), values((11, 4)), values((11, 4)), np.array([[11]]))
