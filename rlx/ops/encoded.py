"""Ops that read quantised elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES, DType, dtype_of
from rlx.ir.encoding import Part, encoding_named
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import Shape, ceildiv, unify
from rlx.ops.base import Op, Work, axis_of, check_kind, register


@register
class Dequantize(Op):
    """(data - zero) * scale in the type `to`, computed in f32. (ONNX DequantizeLinear)

    `data` holds integers or 8-bit (or smaller) floats, `scale` floats, `zero` (default 0) has the type of data. With
    axis None, `scale` and `zero` hold one number; with an axis, [size of the axis]; with a `block` > 0 too, the shape
    of data with that axis divided by `block` (rounded up): each serves `block` elements along it.
    """

    axis: int | None = None
    block: int = 0
    to: DType = DTYPES["f32"]

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", dtype_of(self.to))

    def infer(self, data: TensorType, scale: TensorType, zero: TensorType | None = None) -> TensorType:
        if not (data.dtype.is_integer or (data.dtype.is_float and data.dtype.bits <= 8)):
            raise DTypeError(f"dequantize: expected data of integers or 8-bit floats, got {data}")
        if not scale.dtype.is_float or not self.to.is_float:
            raise DTypeError(f"dequantize: scale {scale} and the result type {self.to} must be floating-point")
        if self.block < 0 or (self.block and self.axis is None):
            raise OptionError(f"dequantize: block {self.block} needs to be 0, or positive with an axis")
        if zero is not None and (zero.dtype is not data.dtype or zero.rank != scale.rank):
            raise DTypeError(
                f"dequantize: expected zero like data {data} in type and scale {scale} in rank, got {zero}"
            )
        expected = self._parameter_shape(data, scale)
        for what, t in (("scale", scale), ("zero", zero)):
            if t is None:
                continue
            if t.rank != len(expected):
                raise ShapeError(f"dequantize: expected {what} of shape {expected} for data {data}, got {t}")
            for size, own in zip(expected, t.shape, strict=True):
                unify(size, own, f"dequantize: {what} {t} for data {data} with axis {self.axis}, block {self.block}")
        return TensorType(data.shape, self.to)

    def _parameter_shape(self, data: TensorType, scale: TensorType) -> Shape:
        if self.axis is None:
            return (1,) * min(scale.rank, max(data.rank, 1))
        axis = axis_of(self.axis, data.rank, self.op_name)
        if not self.block:
            return (data.shape[axis],)
        return tuple(ceildiv(n, self.block) if d == axis else n for d, n in enumerate(data.shape))

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(3, *x)

    def reference(self, data: Array, scale: Array, zero: Array | None = None) -> Array:
        s = self._spread(scale.astype(np.float32), data)
        value = data.astype(np.float32)
        if zero is not None:
            value = value - self._spread(zero.astype(np.float32), data)
        return np.asarray(value * s).astype(self.to.numpy)

    def _spread(self, p: Array, data: Array) -> Array:
        if self.axis is None:
            return p.reshape(())
        axis = self.axis % data.ndim
        if not self.block:
            return p.reshape([-1 if d == axis else 1 for d in range(data.ndim)])
        return np.take(np.repeat(p, self.block, axis), np.arange(data.shape[axis]), axis)

    def lower(self, k: Any, data: Any, scale: Any, zero: Any = None) -> Any:
        def element(*i: Any) -> Any:
            def parameter(p: Any) -> Any:
                if self.axis is None:
                    return k.cast(p(*[0] * p.rank), "f32")
                axis = self.axis % data.rank
                if not self.block:
                    return k.cast(p(i[axis]), "f32")
                return k.cast(p(*i[:axis], i[axis] // self.block, *i[axis + 1 :]), "f32")

            value = k.cast(data(*i), "f32")
            if zero is not None:
                value = value - parameter(zero)
            return value * parameter(scale)

        return k.map(element)


@register
class Encode(Op):
    """x [.., D] stored in blocks along its last axis, whose elements are f32: quantised and read back.

    `encoding` names a block format that runs can make (q8_0, q4_0), of whose block D is a multiple. What comes out has
    that encoding: a state of it takes such rows by `dynamic_update_slice`, and every op reads their elements.
    (ggml-quants.c, quantize_row_*_ref)
    """

    encoding: str = "q8_0"

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "f")
        encoding = encoding_named(self.encoding)
        if not encoding.written:
            raise OptionError(f"encode: no run makes blocks of {encoding.name}: use q8_0 or q4_0")
        depth = x.shape[-1] if x.rank else 1
        if not isinstance(depth, int) or depth % encoding.block:
            raise ShapeError(f"encode: the last axis of {x} is not a multiple of the block of {encoding.block}")
        return TensorType(x.shape, "f32", encoding)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(6, *x)

    def reference(self, x: Array) -> Array:
        encoding = encoding_named(self.encoding)
        return encoding.decode(encoding.encode(x.astype(np.float32)), x.shape)

    def lower_stored(self, k: Any, element: Callable[[Any], Any]) -> Sequence[Part]:
        """The bytes of a block of the result, of the elements of one of x: see `Encoding.bytes_of_block`."""
        return encoding_named(self.encoding).bytes_of_block(k, lambda n: k.cast(element(n), "f32"))
