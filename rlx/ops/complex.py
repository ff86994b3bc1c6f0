"""Complex numbers and their parts. Arithmetic on them is that of their parts (`rlx.ops.numpy.complex`)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import unify
from rlx.ops.base import Op, Work, check_kind, check_same_dtype, register
from rlx.ops.elementwise import Cast, NotEqual, Or
from rlx.ops.layout import Concat, Expand, Reshape, Slice, Unsqueeze

__all__ = [
    "FromPairs",
    "ImaginaryPart",
    "MakeComplex",
    "Pairs",
    "PartOf",
    "RealPart",
    "as_type",
    "complex_of",
    "part_of",
]


def part_of(dtype: DType) -> DType:
    """The type of the parts of a complex type."""
    return DTYPES[f"f{dtype.bits // 2}"]


def complex_of(dtype: DType) -> DType:
    """The complex type whose parts have this type, f32 or f64."""
    return DTYPES[f"c{2 * dtype.bits}"]


class _Moved(Op):
    """Base of ops that do no arithmetic."""

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(0, *x)


@register
class Pairs(_Moved):
    """Complex numbers [..] as pairs of real and imaginary part [.., 2]."""

    view: ClassVar[bool] = True

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "c")
        return TensorType((*x.shape, 2), part_of(x.dtype))

    def reference(self, x: Array) -> Array:
        return np.ascontiguousarray(x).reshape(-1).view(x.real.dtype).reshape(*x.shape, 2)


@register
class FromPairs(_Moved):
    """Pairs of real and imaginary part [.., 2] of f32 or f64 as complex numbers [..]."""

    view: ClassVar[bool] = True

    def infer(self, x: TensorType) -> TensorType:
        check_real(self, x)
        if x.rank < 1:
            raise ShapeError(f"from_pairs: expected pairs [.., 2], got {x}")
        unify(x.shape[-1], 2, f"from_pairs: expected pairs [.., 2], got {x}")
        return TensorType(x.shape[:-1], complex_of(x.dtype))

    def reference(self, x: Array) -> Array:
        to = np.result_type(x.dtype, np.complex64)
        return np.ascontiguousarray(x).reshape(-1).view(to).reshape(x.shape[:-1])


def check_real(op: Op, x: TensorType) -> None:
    """Raises `DTypeError` unless elements can be parts of complex numbers."""
    check_kind(op, x, "f")
    if x.dtype.bits < 32:
        check_same_dtype(op, TensorType(x.shape, DTYPES["f32"]), x)


class PartOf(_Moved):
    """Base of the two parts of complex numbers."""

    number: ClassVar[int]

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "c")
        return TensorType(x.shape, part_of(x.dtype))

    def reference(self, x: Array) -> Array:
        return Pairs().reference(x)[..., self.number].copy()

    def decompose(self, g: Graph, x: Value) -> Value:
        return self.of_pairs(g, g.add(Pairs(), x)[0])

    def of_pairs(self, g: Graph, pairs: Value) -> Value:
        """The part of numbers that are given as pairs."""
        rank, shape = pairs.rank, pairs.shape[:-1]
        starts = (*(0,) * (rank - 1), self.number)
        (column,) = g.add(Slice(starts, (*shape, 1), (1,) * rank), pairs)
        return g.add(Reshape(shape), column)[0]


@register
class RealPart(PartOf):
    """The real parts of complex numbers. (numpy.real)"""

    number = 0


@register
class ImaginaryPart(PartOf):
    """The imaginary parts of complex numbers. (numpy.imag)"""

    number = 1


@register
class MakeComplex(_Moved):
    """Complex numbers of real and imaginary parts of one shape, f32 or f64. (jax.lax.complex)"""

    def infer(self, real: TensorType, imaginary: TensorType) -> TensorType:
        check_real(self, real)
        check_same_dtype(self, real, imaginary)
        if real.rank != imaginary.rank:
            raise ShapeError(f"make_complex: the parts {real} and {imaginary} differ in shape")
        for a, b in zip(real.shape, imaginary.shape, strict=True):
            unify(a, b, f"make_complex: the parts {real} and {imaginary}")
        return TensorType(real.shape, complex_of(real.dtype))

    def reference(self, real: Array, imaginary: Array) -> Array:
        return FromPairs().reference(np.stack([real, imaginary], -1))

    def decompose(self, g: Graph, real: Value, imaginary: Value) -> Value:
        columns = [g.add(Unsqueeze((-1,)), part)[0] for part in (real, imaginary)]
        (pairs,) = g.add(Concat(-1), *columns)
        return g.add(FromPairs(), pairs)[0]


def as_type(x: Value, to: DType) -> Value:
    """x in an element type of which either is complex, as NumPy converts: the imaginary part of a real one is 0."""
    g = x.graph
    if x.dtype.kind != "c":
        (real,) = g.add(Cast(part_of(to)), x)
        zeros = g.add(Expand(real.shape), g.constant(0, dtype=part_of(to)))[0]
        return g.add(MakeComplex(), real, zeros)[0]
    parts = [g.add(op(), x)[0] for op in (RealPart, ImaginaryPart)]
    if to.kind == "c":
        return g.add(MakeComplex(), *(g.add(Cast(part_of(to)), part)[0] for part in parts))[0]
    if to.kind == "b":
        zero = g.constant(0, dtype=part_of(x.dtype))
        return g.add(Or(), *(g.add(NotEqual(), part, zero)[0] for part in parts))[0]
    return g.add(Cast(to), parts[0])[0]
