"""NumPy's products of vectors, matrices and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from rlx import ops
from rlx.errors import OptionError, ShapeError
from rlx.ir.graph import Value
from rlx.ir.shape import numel
from rlx.ops.numpy.creation import eye
from rlx.ops.numpy.reductions import axes_of
from rlx.ops.numpy.registry import of, refuse
from rlx.ops.numpy.types import cast, unite, value_of

np: Any = numpy  # its types are of arrays, here its functions take graph values


@of(np.einsum)
def einsum(subscripts: Any, *operands: Any, optimize: Any = False) -> Any:
    """The sum of products that the subscripts state."""
    if not isinstance(subscripts, str):
        raise OptionError("np.einsum of graph values takes subscripts as text, such as 'ij,jk->ik'")
    return ops.einsum(*unite("np.einsum", operands), equation=subscripts)


@of(np.tensordot)
def tensordot(a: Any, b: Any, axes: int | Sequence[Any] = 2) -> Any:
    """The sum of products over axes: the last `axes` of a with the first of b, or lists of axes of both."""
    x, y = unite("np.tensordot", (a, b))
    if isinstance(axes, int | np.integer):
        left, right = tuple(range(x.rank - int(axes), x.rank)), tuple(range(int(axes)))
    else:
        left, right = axes_of(axes[0], x.rank), axes_of(axes[1], y.rank)
    free_x = [d for d in range(x.rank) if d not in left]
    free_y = [d for d in range(y.rank) if d not in right]
    rows, inner = numel([x.shape[d] for d in free_x]), numel([x.shape[d] for d in left])
    columns = numel([y.shape[d] for d in free_y])
    flat_x = ops.reshape(ops.transpose(x, perm=(*free_x, *left)), shape=(rows, inner))
    flat_y = ops.reshape(ops.transpose(y, perm=(*right, *free_y)), shape=(inner, columns))
    shape = (*(x.shape[d] for d in free_x), *(y.shape[d] for d in free_y))
    return ops.reshape(np.matmul(flat_x, flat_y), shape=shape)


@of(np.dot)
def dot(a: Any, b: Any, out: None = None) -> Any:
    """The product of numbers, vectors and matrices."""
    if np.ndim(a) == 0 or np.ndim(b) == 0:
        return np.multiply(a, b)
    return np.matmul(a, b) if np.ndim(b) <= 2 else tensordot(a, b, ((-1,), (-2,)))


@of(np.vdot)
def vdot(a: Any, b: Any, /) -> Any:
    """The product of two arrays as vectors."""
    return np.matmul(np.conj(np.ravel(a)), np.ravel(b))


@of(np.inner)
def inner(a: Any, b: Any, /) -> Any:
    """The sum of products over the last axes."""
    if np.ndim(a) == 0 or np.ndim(b) == 0:
        return np.multiply(a, b)
    return tensordot(a, b, ((-1,), (-1,)))


@of(np.outer)
def outer(a: Any, b: Any, out: None = None) -> Any:
    """Every element of one times every element of the other."""
    return np.multiply(np.reshape(a, (-1, 1)), np.reshape(b, (1, -1)))


@of(np.cross)
def cross(a: Any, b: Any, axis: int = -1) -> Any:
    """The product of vectors of three numbers that is at right angles to both."""
    x, y = (np.moveaxis(v, axis, -1) for v in unite("np.cross", (a, b)))
    if x.shape[-1] != 3 or y.shape[-1] != 3:
        raise ShapeError(f"np.cross: expected vectors of 3 numbers, got {x.shape} and {y.shape}")
    first, second = np.roll(x, -1, -1) * np.roll(y, 1, -1), np.roll(x, 1, -1) * np.roll(y, -1, -1)
    return np.moveaxis(first - second, -1, axis)


@of(np.diag)
def diag(v: Any, k: int = 0) -> Any:
    """The diagonal of a matrix, or the matrix of a diagonal."""
    x = value_of("np.diag", v)
    if x.rank == 2:
        return np.diagonal(x, k)
    wide = np.pad(x, (max(k, 0), max(-k, 0)))
    size = x.shape[0] + abs(k)
    return np.where(
        eye(size, k=k, dtype=np.bool_), wide[None, :] if k >= 0 else wide[:, None], np.zeros((), x.dtype.numpy)
    )


def _triangle(m: Any, k: int, upper: bool) -> Any:
    return ops.trilu(value_of("np.tril", m), np.int64(k), upper=upper)


@of(np.tril)
def tril(m: Any, k: int = 0) -> Any:
    """The lower triangle, zeros elsewhere."""
    return _triangle(m, k, False)


@of(np.triu)
def triu(m: Any, k: int = 0) -> Any:
    """The upper triangle, zeros elsewhere."""
    return _triangle(m, k, True)


@of(np.linalg.norm)
def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    """The length of vectors (all elements, or along an axis), of order 2, 1, inf, -inf or 0; Frobenius' of matrices."""
    v: Value = value_of("np.linalg.norm", x)
    if v.dtype.kind == "c":
        v = np.abs(v)
    elif not v.dtype.is_float:
        v = cast(v, "f64")
    axes = axes_of(axis, v.rank)
    if (len(axes) == 2 and ord not in (None, "fro")) or (len(axes) > 2 and ord is not None):
        raise OptionError(
            f"np.linalg.norm: ord={ord!r} over {len(axes)} axes: only Frobenius' norm of matrices is there"
        )
    if ord in (None, 2, "fro"):
        return ops.reduce_l2(v, axes=axes, keepdims=keepdims)
    if ord == 1:
        return ops.reduce_l1(v, axes=axes, keepdims=keepdims)
    if ord in (np.inf, -np.inf):
        extremum: Any = np.max if ord > 0 else np.min
        return extremum(np.abs(v), axis=axes, keepdims=keepdims)
    if ord == 0:
        return np.sum(cast(np.not_equal(v, 0), v.dtype), axis=axes, keepdims=keepdims)
    raise OptionError(f"np.linalg.norm: ord={ord!r}: expected None, 2, 1, inf, -inf, 0 or 'fro'")


@of(np.linalg.det)
def det(a: Any) -> Any:
    """The determinant of square matrices."""
    return ops.det(value_of("np.linalg.det", a))


refuse(
    "rlx has no solver: compute it outside the function and pass the result in",
    np.linalg.inv, np.linalg.solve, np.linalg.svd, np.linalg.eigh, np.linalg.eig, np.linalg.cholesky, np.linalg.qr,
    np.linalg.pinv, np.linalg.lstsq,
)  # fmt: skip
