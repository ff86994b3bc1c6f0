"""Ops of no family: bits under another type, determinants."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.dtype import DType, dtype_of
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import unify
from rlx.ops.base import Op, Work, check_kind, register, tensor_bytes, widened

__all__ = ["BitCast", "Det"]


@register
class BitCast(Op):
    """The same bits read as elements of the type `to`, which must be as wide. (ONNX BitCast-26)"""

    to: DType

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", dtype_of(self.to))

    def infer(self, x: TensorType) -> TensorType:
        if x.dtype.bits != self.to.bits:
            raise DTypeError(f"bit_cast: {x} has elements of {x.dtype.bits} bits, {self.to} of {self.to.bits}")
        return TensorType(x.shape, self.to)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(0, *x)

    def reference(self, x: Array) -> Array:
        return np.ascontiguousarray(x).reshape(-1).view(self.to.numpy).reshape(x.shape)

    def lower(self, k: Any, x: Any) -> Any:
        return k.map(lambda *i: k.bitcast(x(*i), self.to))


@register
class Det(Op):
    """The determinant of each square matrix of x [.., m, m]. (ONNX Det-22, numpy.linalg.det)"""

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "f")
        if x.rank < 2:
            raise ShapeError(f"det: expected matrices [.., m, m], got {x}")
        unify(x.shape[-1], x.shape[-2], f"det: the last two axes of {x}")
        return TensorType(x.shape[:-2], x.dtype)

    def work(self, *x: TensorType) -> Work:
        (out,) = self.infer_types(x)
        flops = x[0].shape[-1] * x[0].shape[-1] * x[0].shape[-1]
        for size in x[0].shape[:-2]:
            flops = flops * size
        return Work(flops, tensor_bytes(x[0]), tensor_bytes(out))

    def reference(self, x: Array) -> Array:
        return np.asarray(np.linalg.det(widened(x))).astype(x.dtype)
