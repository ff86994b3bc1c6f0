"""`rlx.fake_quantize`: rounding as quantisation does it, through which gradients go as if it were not there."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx import ops
from rlx.boundary import bounded
from rlx.errors import CompileError
from rlx.ir.dtype import dtype_of
from rlx.ops.encoded import Dequantize
from rlx.ops.gradients.attach import cast, wide
from rlx.ops.gradients.quantised import spread_parameter
from rlx.ops.quant import limits
from rlx.transform.rules import custom_jvp

__all__ = ["fake_quantize"]


@bounded("fake_quantize", CompileError)
def fake_quantize(
    x: Any, scale: Any, zero: Any = None, *, to: object = "i8", axis: int | None = None, block: int = 0
) -> Any:
    """What `dequantize` makes of `quantize` of x, for training with quantisation in mind: floats like x.

    `scale` (a number is an f32), `zero`, `axis` and `block` are those of `rlx.ops.quantize`, `to` the integers. The
    gradient goes straight through where x lies within what these hold, and is 0 beyond
    (torch.fake_quantize_per_tensor_affine); scale and zero count as constants.
    """
    dtype = dtype_of(to)
    scale = np.float32(scale) if type(scale) in (int, float) else scale
    given = (scale,) if zero is None else (scale, zero)

    def rounded(x: Any, *given: Any) -> Any:
        whole = ops.quantize(x, *given, to=dtype, axis=axis, block=block)
        return ops.dequantize(whole, *given, to=x.dtype, axis=axis, block=block)

    def rule(primals: Any, tangents: Any) -> Any:
        x, scale, *zero = primals
        v = wide(x)
        kind = Dequantize(axis, block, v.dtype)
        number = ops.round(v / spread_parameter(kind, cast(scale, v.dtype), v))
        for z in zero:
            number = number + spread_parameter(kind, ops.cast(z, v.dtype), v)
        low, high = limits(dtype)
        return straight(*primals), ops.where((number >= low) & (number <= high), tangents[0], 0.0)

    straight = custom_jvp(rounded)
    straight.defjvp(rule)
    return straight(x, *given)
