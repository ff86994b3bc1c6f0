"""Running sums and products, in blocks of blocks too."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from ops_oracle import check, ort, values

from rlx.errors import OptionError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import TensorType
from rlx.ir.shape import Dim
from rlx.ops.cumulative import CumProd, CumSum, Prefix
from rlx.testing.interpret import check_op


@pytest.mark.parametrize("exclusive, reverse", list(product([False, True], repeat=2)))
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_cumsum_matches_onnx_runtime(axis: int, exclusive: bool, reverse: bool) -> None:
    """Every form on every axis; the middle one takes more than one block."""
    x = values((3, 130, 2))
    (y,) = check(CumSum(axis, exclusive, reverse), x)
    expected = ort("CumSum", x, np.array(axis), exclusive=int(exclusive), reverse=int(reverse))[0]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    check(CumProd(axis, exclusive, reverse), (x * 0.1 + 1).astype(np.float32))


def test_integers_wrap_and_narrow_floats_accumulate_in_f32() -> None:
    """Integers are exact; 16-bit floats are rounded once."""
    for dtype in (np.int8, np.int64, np.uint32, np.float16):
        check(CumSum(1), values((2, 200), dtype))
    ones = np.ones(3000, np.float16)
    assert check(CumSum(), ones)[0][-1] == 3000


@pytest.mark.parametrize("hi", [64, 5000, None])
def test_sizes_that_are_known_at_the_run_only(hi: int | None) -> None:
    """One to three levels of blocks, as the bound asks, give the same."""
    n = Dim("n", 0, hi)
    for size in (0, 1, 64) + ((65, 4200) if hi != 64 else ()):
        check_op(CumSum(reverse=True), values((size,)), shapes=[(n,)], extents={"n": size}, rtol=1e-3)


def test_nan_does_not_spread_backwards() -> None:
    """What comes after an element has no part in its sum."""
    (y,) = check(CumSum(), np.array([1, np.nan, 2, np.inf], np.float32))
    assert y[0] == 1
    assert np.isnan(y[1:]).all()


def test_errors() -> None:
    """An unknown kind."""
    with pytest.raises(OptionError, match="kind"):
        Prefix(0, "max").infer(TensorType((3,), DTYPES["f32"]))
