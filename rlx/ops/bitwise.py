"""Bitwise logic and shifts of integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import OptionError
from rlx.ir.graph import Array, TensorType
from rlx.ops.base import register
from rlx.ops.elementwise import Binary, Unary

__all__ = ["BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"]


@register
class BitwiseAnd(Binary):
    """The bits set in both a and b. (ONNX BitwiseAnd-18)"""

    kinds, fn, array = "iu", "and", np.bitwise_and


@register
class BitwiseOr(Binary):
    """The bits set in a or b. (ONNX BitwiseOr-18)"""

    kinds, fn, array = "iu", "or", np.bitwise_or


@register
class BitwiseXor(Binary):
    """The bits set in one of a and b. (ONNX BitwiseXor-18)"""

    kinds, fn, array = "iu", "xor", np.bitwise_xor


@register
class BitwiseNot(Unary):
    """The bits not set in x. (ONNX BitwiseNot-18)"""

    kinds, fn, array = "iu", "not", np.invert


@register
class BitShift(Binary):
    """a shifted by b bits, to the left or (`right`) to the right; a shift by the width or more gives 0. (ONNX BitShift)

    Both are unsigned integers.
    """

    kinds = "u"

    right: bool = False

    def infer(self, a: TensorType, b: TensorType) -> TensorType:
        if not isinstance(self.right, bool):
            raise OptionError(f"bit_shift: right must be True or False, got {self.right!r}")
        return super().infer(a, b)

    def array(self, a: Array, b: Array) -> Array:
        bits = 8 * a.dtype.itemsize
        amount = np.minimum(b, b.dtype.type(bits - 1))
        return np.where(b < bits, np.right_shift(a, amount) if self.right else np.left_shift(a, amount), 0)

    def scalar(self, k: Any, a: Any, b: Any) -> Any:
        bits = a.dtype.bits
        moved = k.call("shr" if self.right else "shl", a, k.min(b, bits - 1))
        return k.select(b < bits, moved, 0)
