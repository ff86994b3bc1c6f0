"""Pooling by p-norms, and its inverse by recorded places."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlx.errors import DTypeError, ExecutionError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES, dtype_of
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import Size, evaluate, unify
from rlx.ops.base import Op, Work, check_kind, register, tensor_bytes, widened
from rlx.ops.pool import _GlobalPool, _Pool

__all__ = ["GlobalLpPool", "LpPool", "MaxUnpool"]


def _check_p(op: Op, p: int) -> None:
    if p < 1:
        raise OptionError(f"{op.op_name}: p must be at least 1, got {p}")


def _power(x: Array, p: int) -> Array:
    return np.abs(x) if p == 1 else x * x if p == 2 else np.power(np.abs(x), x.dtype.type(p))


def _root(x: Array, p: int) -> Array:
    return x if p == 1 else np.sqrt(x) if p == 2 else np.power(x, x.dtype.type(1 / p))


def _scalar_power(k: Any, x: Any, p: int) -> Any:
    return x * x if p == 2 else k.call("abs", x) if p == 1 else k.call("pow", k.call("abs", x), p)


def _scalar_root(k: Any, x: Any, p: int) -> Any:
    return x if p == 1 else k.call("sqrt", x) if p == 2 else k.call("pow", x, 1 / p)


@register
class LpPool(_Pool):
    """The p-norm of each window of x [N, C, spatial..]; `pads` are begins and then ends. (ONNX LpPool-22)"""

    kernel: tuple[int, ...]
    strides: tuple[int, ...] = ()
    pads: tuple[Size, ...] = ()
    dilations: tuple[int, ...] = ()
    ceil_mode: bool = False
    p: int = 2

    def infer(self, x: TensorType) -> TensorType:
        check_kind(self, x, "f")
        _check_p(self, self.p)
        return self._pooled(x)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(2 * math.prod(self.kernel) + 1, *x)

    def reference(self, x: Array) -> Array:
        shape = [evaluate(s, {}) for s in self._pooled(TensorType(x.shape, dtype_of(x.dtype))).shape]
        total = np.zeros(shape, widened(x[:0]).dtype)
        for _, box, values in self._sliding(x):
            total[box] += _power(widened(values), self.p)
        return _root(total, self.p).astype(x.dtype)

    def lower(self, k: Any, x: Any) -> Any:
        def element(*i: Any) -> Any:
            def tap(*taps: Any) -> Any:
                at, inside = self._taps(k, x, i[2:], taps)
                return _scalar_power(k, k.widen(x(*i[:2], *at, where=inside)), self.p)

            return _scalar_root(k, k.reduce("add", self.kernel, tap), self.p)

        return k.map(element)


@register
class GlobalLpPool(_GlobalPool):
    """The p-norm of each channel of x [N, C, spatial..] as [N, C, 1..]. (ONNX GlobalLpPool-22)"""

    p: int = 2

    def infer(self, x: TensorType) -> TensorType:
        _check_p(self, self.p)
        return super().infer(x)

    def reference(self, x: Array) -> Array:
        total = _power(widened(x), self.p).sum(axis=tuple(range(2, x.ndim)), keepdims=True)
        return np.asarray(_root(total, self.p), x.dtype)

    def lower(self, k: Any, x: Any) -> Any:
        def element(*i: Any) -> Any:
            total = k.reduce("add", x.shape[2:], lambda *at: _scalar_power(k, k.widen(x(*i[:2], *at)), self.p))
            return _scalar_root(k, total, self.p)

        return k.map(element)


@register
class MaxUnpool(Op):
    """Zeros with each element of x [N, C, spatial..] put at its flat index into the result. (ONNX MaxUnpool-22)

    `indices` (i64, the shape of x) are those of `MaxPool`; of equal ones the last wins, one outside stops the run.
    `sizes` are the spatial sizes of the result. With `pooled` the indices are into a tensor whose spatial sizes are
    those instead, as when the result is larger than what was pooled.
    """

    sizes: tuple[Size, ...]
    pooled: tuple[Size, ...] | None = None

    def infer(self, x: TensorType, indices: TensorType) -> TensorType:
        if x.rank < 3 or len(self.sizes) != x.rank - 2 or len(self.pooled or self.sizes) != x.rank - 2:
            raise ShapeError(
                f"max_unpool: expected x [N, C, spatial..] and a size for each axis, got {x}, {self.sizes}"
            )
        if any(isinstance(s, int) and s < 0 for s in self.pooled or ()):
            raise ShapeError(f"max_unpool: the sizes of what was pooled must be >= 0, got {self.pooled}")
        if indices.dtype is not DTYPES["i64"] or indices.rank != x.rank:
            raise DTypeError(f"max_unpool: expected i64 indices of the shape of {x}, got {indices}")
        for d, (a, b) in enumerate(zip(x.shape, indices.shape, strict=True)):
            unify(a, b, f"max_unpool: axis {d} of {x} and of the indices {indices}")
        return TensorType((*x.shape[:2], *self.sizes), x.dtype)

    def work(self, *x: TensorType) -> Work:
        (out,) = self.infer_types(x)
        return Work(0, tensor_bytes(x[0]) + tensor_bytes(x[1]), tensor_bytes(out))

    def reference(self, x: Array, indices: Array) -> Array:
        shape = (*x.shape[:2], *(evaluate(s, {}) for s in self.sizes))
        source = shape if self.pooled is None else (*x.shape[:2], *(evaluate(s, {}) for s in self.pooled))
        if indices.size and not (indices.min() >= 0 and indices.max() < math.prod(source)):
            raise ExecutionError(f"max_unpool: an index is outside a tensor of shape {source}")
        at = np.unravel_index(indices.ravel(), source)
        if any((a >= n).any() for a, n in zip(at, shape, strict=True)):
            raise ExecutionError(f"max_unpool: an index is outside the result of shape {shape}")
        out = np.zeros(shape, x.dtype)
        out[at] = x.ravel()
        return out
