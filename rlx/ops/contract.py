"""Matrix products."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir.casting import NARROWED, narrowed, rounded_q8
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import broadcast, numel, same, unify
from rlx.ops.base import (
    Op,
    Work,
    check_activations,
    check_kind,
    check_same_dtype,
    product,
    register,
    tensor_bytes,
    widened,
)
from rlx.ops.elementwise import Add, Mul, Sqrt, Sub
from rlx.ops.layout import Transpose, Unsqueeze
from rlx.ops.reduction import ReduceSum


def _check_activations(op: Op, activations: str, a: TensorType, b: TensorType) -> None:
    """Raises an error where an op's attribute `activations` is unknown, or not for these operands."""
    check_activations(op, activations, a, b, known=("q8", *NARROWED))
    if activations and (a.rank < 2 or b.rank < 2):
        raise DTypeError(f"{op.op_name}: activations={activations!r} takes matrices, got {a} and {b}")


def _operands(activations: str, a: Array, b: Array) -> tuple[Array, Array]:
    """What a product multiplies of matrices, rows of a with columns of b."""
    if activations == "q8":
        return rounded_q8(a), b
    return narrowed(a, activations), narrowed(b, activations)


@register
class MatMul(Op):
    """Matrix product with the rules of numpy.matmul; f16 and bf16 accumulate in f32, integers wrap. (ONNX MatMul)

    a [..., m, k], b [..., k, n] -> [..., m, n]; leading axes broadcast; a vector loses its axis in the result.
    `activations` "q8": a, of f32, is rounded to 8 bits in blocks along k (`rlx.ir.casting`) first; "bf16" and "f16":
    a and b, of f32, are rounded to that type. Sums stay f32.
    """

    op_name: ClassVar[str] = "matmul"
    activations: str = ""

    def infer(self, a: TensorType, b: TensorType) -> TensorType:
        check_kind(self, a, "fiu")
        check_same_dtype(self, a, b)
        _check_activations(self, self.activations, a, b)
        if a.rank == 0 or b.rank == 0:
            raise ShapeError(f"matmul: expected tensors of rank 1 or more, got {a} and {b}; use mul for scalars")
        unify(a.shape[-1], b.shape[max(b.rank - 2, 0)], f"matmul of {a} and {b}: the contracted axes")
        batch = broadcast(a.shape[:-2], b.shape[:-2], why=f"matmul of {a} and {b}: the leading axes")
        rows, columns = a.shape[-2:-1], b.shape[-1:] if b.rank > 1 else ()
        return TensorType((*batch, *rows, *columns), a.dtype)

    def work(self, *x: TensorType) -> Work:
        (out,) = self.infer_types(x)
        flops = numel(out.shape) * x[0].shape[-1] * 2
        return Work(flops, tensor_bytes(x[0]) + tensor_bytes(x[1]), tensor_bytes(out))

    def reference(self, a: Array, b: Array) -> Array:
        return product(*_operands(self.activations, widened(a), widened(b))).astype(a.dtype)

    def lower(self, k: Any, a: Any, b: Any) -> Any:
        depth = a.shape[-1]

        def left(*i: Any) -> Any:  # (batch..., m, k)
            return a(*_batch(a, i[:-2]), *i[-2:])

        def right(*i: Any) -> Any:  # (batch..., k, n)
            return b(*_batch(b, i[:-2]), *i[-2:])

        if a.rank > 1 and b.rank > 1:
            return k.contract(a.shape[-2], b.shape[-1], depth, left, right, self.activations)

        sums = k.widen(k.const(0, k.out[0].dtype)).dtype

        def element(*i: Any) -> Any:
            def product(r: Any) -> Any:
                x = a(r) if a.rank == 1 else left(*i, r)
                y = b(r) if b.rank == 1 else right(*i[:-1], r, i[-1])
                return k.cast(x, sums) * k.cast(y, sums)

            return k.reduce("add", (depth,), product)

        return k.map(element)


def _batch(x: Any, i: tuple[Any, ...]) -> list[Any]:
    """Indices of the leading axes of an operand whose own leading shape broadcasts to that of the output."""
    own = x.shape[:-2]
    return [0 if size == 1 else index for size, index in zip(own, i[len(i) - len(own) :], strict=True)]


@register
class WideningMatMul(MatMul):
    """Matrix product of i16 a with i16 or i8 b in i32, with the rules of numpy.matmul; sums wrap.

    a [..., m, k], b [..., k, n] -> [..., m, n]; leading axes broadcast; a vector loses its axis in the result.
    """

    op_name: ClassVar[str] = "widening_matmul"

    def infer(self, a: TensorType, b: TensorType) -> TensorType:
        if a.dtype.name != "i16" or b.dtype.name not in ("i16", "i8"):
            raise DTypeError(f"widening_matmul: expected i16 and i16 or i8 matrices, got {a} and {b}; cast them first")
        return TensorType(super().infer(a, TensorType(b.shape, a.dtype)).shape, DTYPES["i32"])

    def reference(self, a: Array, b: Array) -> Array:
        return product(a.astype(np.int32), b.astype(np.int32))


@register
class Gemm(Op):
    """alpha * a @ b + beta * c with a or b transposed first on request; c broadcasts to [m, n]. (ONNX Gemm)

    `activations`: as in `matmul`.
    """

    alpha: float = 1.0
    beta: float = 1.0
    trans_a: bool = False
    trans_b: bool = False
    activations: str = ""

    def infer(self, a: TensorType, b: TensorType, c: TensorType | None = None) -> TensorType:
        check_kind(self, a, "fiu")
        check_same_dtype(self, a, b, *([] if c is None else [c]))
        if a.rank != 2 or b.rank != 2:
            raise ShapeError(f"gemm: expected two matrices, got {a} and {b}")
        _check_activations(self, self.activations, a, b)
        if a.dtype.is_integer and (self.alpha != int(self.alpha) or self.beta != int(self.beta)):
            raise OptionError(f"gemm: alpha {self.alpha} and beta {self.beta} must be whole numbers for {a.dtype}")
        m, depth = a.shape[::-1] if self.trans_a else a.shape
        other, n = b.shape[::-1] if self.trans_b else b.shape
        unify(depth, other, f"gemm of {a} and {b}: the contracted axes")
        if c is not None:
            wide = broadcast(c.shape, (m, n), why=f"gemm: c {c} over [{m}, {n}]")
            if c.rank > 2 or same(wide[0], m) is False or same(wide[1], n) is False:
                raise ShapeError(f"gemm: c {c} does not broadcast to [{m}, {n}]")
        return TensorType((m, n), a.dtype)

    def work(self, *x: TensorType) -> Work:
        (out,) = self.infer_types(x)
        depth = x[0].shape[0 if self.trans_a else 1]
        read = tensor_bytes(x[0]) + tensor_bytes(x[1]) + (tensor_bytes(x[2]) if len(x) > 2 else 0)
        return Work(numel(out.shape) * depth * 2, read, tensor_bytes(out))

    def reference(self, a: Array, b: Array, c: Array | None = None) -> Array:
        x, y = widened(a), widened(b)
        x, y = x.T if self.trans_a else x, y.T if self.trans_b else y
        made = product(*_operands(self.activations, x, y)) * np.asarray(self.alpha).astype(x.dtype)
        if c is not None:
            made = made + widened(c) * np.asarray(self.beta).astype(x.dtype)
        return np.asarray(made).astype(a.dtype)

    def decompose(self, g: Graph, a: Value, b: Value, c: Value | None = None) -> Value:
        if self.trans_a:
            (a,) = g.add(Transpose((1, 0)), a)
        if self.trans_b:
            (b,) = g.add(Transpose((1, 0)), b)
        (product,) = g.add(MatMul(self.activations), a, b)
        if self.alpha != 1:
            (product,) = g.add(Mul(), product, g.constant(self.alpha, dtype=a.dtype))
        if c is None or self.beta == 0:
            return product
        if self.beta != 1:
            (c,) = g.add(Mul(), c, g.constant(self.beta, dtype=a.dtype))
        (total,) = g.add(Add(), product, c)
        return total


@register
class PairDistances(Op):
    """How far each row of a [N, K] lies from each row of b [M, K]: [N, M], f32 or f64. (scipy cdist)

    The sum of squared differences or, with `root`, its root. From differences, not products: the distance of equal
    rows is 0.
    """

    root: bool = False

    def infer(self, a: TensorType, b: TensorType) -> TensorType:
        check_kind(self, a, "f")
        check_same_dtype(self, a, b)
        if a.rank != 2 or b.rank != 2:
            raise ShapeError(f"pair_distances: expected two matrices, got {a} and {b}")
        unify(a.shape[1], b.shape[1], f"pair_distances of {a} and {b}: the elements of a row")
        return TensorType((a.shape[0], b.shape[0]), a.dtype)

    def work(self, *x: TensorType) -> Work:
        (out,) = self.infer_types(x)
        flops = numel(out.shape) * x[0].shape[1] * 3
        return Work(flops, tensor_bytes(x[0]) + tensor_bytes(x[1]), tensor_bytes(out))

    def reference(self, a: Array, b: Array) -> Array:
        squares = np.sum((widened(a)[:, None] - widened(b)[None]) ** 2, axis=2)
        return np.asarray(np.sqrt(squares) if self.root else squares).astype(a.dtype)

    def decompose(self, g: Graph, a: Value, b: Value) -> Value:
        (apart,) = g.add(Sub(), g.add(Unsqueeze((1,)), a)[0], g.add(Unsqueeze((0,)), b)[0])
        (squares,) = g.add(ReduceSum((2,), False), g.add(Mul(), apart, apart)[0])
        return g.add(Sqrt(), squares)[0] if self.root else squares
