"""Elements of blocks computed by NumPy: what `Encoding.of_block` asks of `k`, on arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.ir.dtype import DType, dtype_of

__all__ = ["Arrays"]


class Arrays:
    """Casts, bits, shifts and choices of arrays."""

    @staticmethod
    def cast(x: Any, dtype: DType | str) -> Any:
        return x.astype((dtype_of(dtype) if isinstance(dtype, str) else dtype).numpy)

    @staticmethod
    def bitcast(x: Any, dtype: DType) -> Any:
        return np.ascontiguousarray(x).view(dtype.numpy)

    @staticmethod
    def call(fn: str, a: Any, b: Any) -> Any:
        return {"shl": np.left_shift, "shr": np.right_shift, "min": np.minimum, "max": np.maximum}[fn](a, b)

    @staticmethod
    def select(condition: Any, yes: Any, no: Any) -> Any:
        return np.where(condition, yes, no)

    @staticmethod
    def const(value: int, dtype: DType) -> Any:
        return np.full((1, 1), value, dtype.numpy)
