"""The composed functions against NumPy, at the tails and where cancellation would hurt."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ops_oracle import check

from rlx.ops import trigonometry
from rlx.ops.base import Op

OPS = [getattr(trigonometry, name)() for name in trigonometry.__all__ if name[0].isupper()]
SPECIAL = [
    -1e20,
    -50,
    -2.5,
    -1.0,
    -0.999,
    -1e-5,
    -1e-20,
    0,
    1e-6,
    0.9999,
    1,
    1.0001,
    3,
    80,
    700,
    np.inf,
    -np.inf,
    np.nan,
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.op_name)
def test_matches_numpy(op: Op, dtype: Any) -> None:
    """Over the whole line, NaN where NumPy has NaN."""
    with np.errstate(over="ignore"):
        x = np.array([*SPECIAL, *np.linspace(-6, 6, 241)]).astype(dtype)
    check(op, x.clip(-50, 50) if op.op_name == "tan" else x)


@pytest.mark.parametrize(
    "op", [o for o in OPS if o.op_name not in ("acos", "acosh", "cosh")], ids=lambda op: op.op_name
)
def test_small_arguments_keep_their_relative_accuracy(op: Op) -> None:
    """Odd functions are x to first order: the relative error there stays that of the type."""
    from rlx.testing.interpret import interpret, make_node

    x = np.geomspace(1e-30, 0.5, 200).astype(np.float32)
    (y,) = interpret(make_node(op, (x.shape, x.dtype)), [x])
    np.testing.assert_allclose(y, op.reference(x.astype(np.float64)), rtol=1e-6)
