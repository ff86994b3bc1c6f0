"""Convolution and product of 8-bit elements as primitives: devices with instructions for it claim them."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import numel, unify
from rlx.ops.base import Op, Work, product, register
from rlx.ops.contract import MatMul, WideningMatMul
from rlx.ops.conv import Conv, Convolving, WholeConv
from rlx.ops.elementwise import Add, Cast, Clip, Sub
from rlx.ops.layout import Reshape, Split

__all__ = ["ByteConv", "ByteMatMul", "centred", "check_number", "is_nought"]

F32, I16, I32 = DTYPES["f32"], DTYPES["i16"], DTYPES["i32"]


def is_nought(zero: Value | None) -> bool:
    """Whether there is nothing to subtract."""
    return zero is None or (zero.kind == "const" and zero.data is not None and not zero.data.any())


def check_number(op: Op, what: str, p: TensorType, rank: int) -> None:
    """Checks that a parameter is one number, of no more axes than the tensor of that rank that it belongs to."""
    if p.rank > max(rank, 1):
        raise ShapeError(f"{op.op_name}: expected one {what}, of at most {max(rank, 1)} axes, got {p}")
    unify(numel(p.shape), 1, f"{op.op_name}: expected one {what}, got {p}")


def centred(g: Graph, x: Value, zero: Value | None, to: DType = I32) -> Value:
    """x - zero in a type that holds every difference."""
    (wide,) = g.add(Cast(to), x)
    if zero is None or is_nought(zero):
        return wide
    (shift,) = g.add(Cast(to), zero)
    if shift.rank == 1 and shift.shape[0] == 1 and x.rank == 0:
        (shift,) = g.add(Reshape(()), shift)
    return g.add(Sub(), wide, shift)[0]


def _check(op: Op, x: TensorType, w: TensorType, zero: TensorType | None) -> None:
    if x.dtype.name not in ("u8", "i8") or w.dtype.name not in ("i8", "i16"):
        raise DTypeError(f"{op.op_name}: expected u8 or i8, and weights of i8 or i16, got {x} and {w}")
    if zero is not None:
        if zero.dtype is not x.dtype:
            raise DTypeError(f"{op.op_name}: the zero point {zero} must have the type of {x}")
        check_number(op, "zero point", zero, x.rank)


def _limited(g: Graph, w: Value) -> Value:
    return w if w.dtype.name == "i8" else g.add(Clip(-255, 255), w)[0]


@register
class ByteMatMul(Op):
    """Product of a - zero [..., m, k] with b [k, n] in i32: a is u8 or i8, b i8, or i16, whose elements are limited to
    -255..255 (a byte less a zero point).

    `zero` is one number of the type of a (none: 0).
    """

    op_name = "byte_matmul"

    def infer(self, a: TensorType, b: TensorType, zero: TensorType | None = None) -> TensorType:
        _check(self, a, b, zero)
        if a.rank < 2 or b.rank != 2:
            raise ShapeError(f"byte_matmul: expected matrices and one matrix of weights, got {a} and {b}")
        return MatMul().infer(TensorType(a.shape, I32), TensorType(b.shape, I32))

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(2 * x[0].shape[-1], *x)

    def reference(self, a: Array, b: Array, zero: Array | None = None) -> Array:
        x = a.astype(np.int32)
        if zero is not None:
            x = x - zero.astype(np.int32).reshape(())
        return product(x, b.astype(np.int32).clip(-255, 255))

    def lower(self, k: Any, a: Any, b: Any, zero: Any = None) -> Any:
        return k.byte_contract(a.shape[-2], b.shape[1], b.shape[0], a, lambda *i: b(*i[-2:]), zero)

    def decompose(self, g: Graph, a: Value, b: Value, zero: Value | None = None) -> Value:
        return g.add(WideningMatMul(), centred(g, a, zero, I16), _limited(g, b))[0]


@register
class ByteConv(Convolving):
    """Convolution of x - zero with w in i32: x is u8 or i8, w i8, or i16, whose elements are limited to -255..255.

    `zero` is one number of the type of x (none: 0). Zeros are padded to x - zero. The attributes are those of `Conv`.
    """

    @property
    def _conv(self) -> Conv:
        return Conv(self.strides, self.dilations, self.pads, self.groups)

    def infer(self, x: TensorType, w: TensorType, zero: TensorType | None = None) -> TensorType:
        _check(self, x, w, zero)
        return self._conv.infer(TensorType(x.shape, I32), TensorType(w.shape, I32))

    def reference(self, x: Array, w: Array, zero: Array | None = None) -> Array:
        a = x.astype(np.int32)
        if zero is not None:
            a = a - zero.astype(np.int32).reshape(())
        return self._conv.reference(a, w.astype(np.int32).clip(-255, 255))

    def lower(self, k: Any, x: Any, w: Any, zero: Any = None) -> Any:
        strides, dilations, pads = self.window(x.rank)
        return k.byte_conv(x, w, zero, strides=strides, dilations=dilations, pads=pads, groups=self.groups)

    def decompose(self, g: Graph, x: Value, w: Value, zero: Value | None = None) -> Value:
        """In f32 where its sums are exact, in pieces of the channels where not all are; else in i32."""
        w = _limited(g, w)
        depth, taps = w.shape[1], numel(w.shape[2:])
        conv = WholeConv(self.strides, self.dilations, self.pads, self.groups)
        most = (128 if x.dtype.name == "i8" and is_nought(zero) else 255) * (128 if w.dtype.name == "i8" else 255)
        channels = 0  # whose products f32 can add up
        if isinstance(taps, int) and isinstance(depth, int) and taps > 0:
            channels = min((2**24 - 1) // (most * taps), depth)
        if not isinstance(depth, int) or channels == 0 or (channels < depth and self.groups > 1):
            return g.add(self._conv, centred(g, x, zero), g.add(Cast(I32), w)[0])[0]
        left, right = centred(g, x, zero, F32), g.add(Cast(F32), w)[0]
        if channels == depth:
            return g.add(Cast(I32), g.add(conv, left, right)[0])[0]
        sizes = tuple(min(channels, depth - at) for at in range(0, depth, channels))
        pieces = zip(g.add(Split(1, sizes), left), g.add(Split(1, sizes), right), strict=True)
        sums = [g.add(Cast(I32), g.add(conv, a, b)[0])[0] for a, b in pieces]
        return reduce(lambda total, part: g.add(Add(), total, part)[0], sums)
