"""Random numbers: counter-based, so that an element depends on the seed and its place alone, on every device.

The bits are those of Threefry-2x32 with 20 rounds (Salmon et al. 2011): the key is the 64-bit `seed`, the counter the
row-major index of the element. Equal seeds give equal numbers at every run; the optional input `step` (one integer),
added to the upper half of the counter, gives others, for instance a state that counts the runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import Shape, Size, evaluate, max_size, numel, unify
from rlx.ops.base import Op, Work, check_kind, register, tensor_bytes, widened
from rlx.ops.cumulative import CumSum
from rlx.ops.elementwise import Cast, Equal, Exp, Minimum, Mul, Sub, Where
from rlx.ops.index import SearchSorted
from rlx.ops.layout import SizeOf, Slice
from rlx.ops.mask import check_scalar
from rlx.ops.reduction import ReduceMax

__all__ = ["Bernoulli", "Multinomial", "RandomNormal", "RandomUniform", "threefry", "threefry_rounds"]

U32, F32, F64 = DTYPES["u32"], DTYPES["f32"], DTYPES["f64"]
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def threefry(key: tuple[int, int], low: Array, high: Array) -> tuple[Array, Array]:
    """The two u32 words of Threefry-2x32-20 for a key of two words and counters (low, high) of u32."""
    first, second = (np.uint32(k) for k in key)
    a, b = threefry_rounds(first, second, np.atleast_1d(low), np.atleast_1d(high))
    return a.reshape(np.shape(low)), b.reshape(np.shape(low))


def threefry_rounds(first: Any, second: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """The same of keys and counters that are arrays or graph values of u32, each element by itself."""
    keys = [first, second, first ^ second ^ np.uint32(PARITY)]
    a, b = low + keys[0], high + keys[1]
    for group in range(5):
        for r in ROTATIONS[group % 2]:
            a = a + b
            b = ((b << np.uint32(r)) | (b >> np.uint32(32 - r))) ^ a
        a, b = a + keys[(group + 1) % 3], b + keys[(group + 2) % 3] + np.uint32(group + 1)
    return a, b


def _key(seed: int) -> tuple[int, int]:
    return seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF


def _bits(seed: int, shape: Sequence[int], step: Array | None) -> tuple[Array, Array]:
    at = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    add = 0 if step is None else int(step.item()) & 0xFFFFFFFF
    low, high = at.astype(np.uint32), ((at >> np.uint64(32)) + np.uint64(add)).astype(np.uint32)
    return threefry(_key(seed), low, high)


def _scalar_bits(k: Any, seed: int, i: Sequence[Any], shape: Shape, step: Any) -> tuple[Any, Any]:
    at = k.size(0)
    for index, n in zip(i, shape, strict=True):
        at = at * k.size(n) + index
    low, high = k.cast(at, U32), k.cast(k.call("shr", at, 32), U32)
    if step is not None:
        high = high + k.cast(step(*[0] * step.rank), U32)
    first, second = _key(seed)
    keys = [k.const(w, U32) for w in (first, second, first ^ second ^ PARITY)]
    a, b = low + keys[0], high + keys[1]
    for group in range(5):
        for r in ROTATIONS[group % 2]:
            a = a + b
            b = (k.call("shl", b, r) | k.call("shr", b, 32 - r)) ^ a
        a, b = a + keys[(group + 1) % 3], b + keys[(group + 2) % 3] + k.const(group + 1, U32)
    return a, b


def _unit(bits: tuple[Array, Array], dtype: Any) -> Array:
    """0 <= u < 1 with the precision of f32 or f64."""
    if dtype == np.float64:
        return (bits[0] >> np.uint32(5)) * 2.0**-27 + (bits[1] >> np.uint32(6)) * 2.0**-53
    return (bits[0] >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def _scalar_unit(k: Any, bits: tuple[Any, Any], dtype: DType) -> Any:
    if dtype is F64:
        return k.cast(k.call("shr", bits[0], 5), F64) * 2.0**-27 + k.cast(k.call("shr", bits[1], 6), F64) * 2.0**-53
    return k.cast(k.call("shr", bits[0], 8), F32) * 2.0**-24


class _Random(Op):
    """Base of the sources of random tensors."""

    shape: Shape
    dtype: DType
    seed: int

    def infer(self, step: TensorType | None = None) -> TensorType:
        out = TensorType(self.shape, self.dtype)
        check_kind(self, out, "f", "result")
        if step is not None:
            check_scalar(self, "step", step)
            check_kind(self, step, "iu", "step")
        for size in self.shape:
            unify(max_size(size, 0), size, f"{self.op_name}: the shape {self.shape} has a negative size")
        return out

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(80, *x)

    def _arithmetic(self) -> DType:
        return F64 if self.dtype is F64 else F32


@register
class RandomUniform(_Random):
    """Numbers spread evenly over low <= x < high. (ONNX RandomUniform-22; the numbers are our own)

    An optional input `step` gives others at each value; see the module.
    """

    shape: Shape
    low: float = 0.0
    high: float = 1.0
    dtype: DType = F32
    seed: int = 0

    def reference(self, step: Array | None = None) -> Array:
        kind = self._arithmetic().numpy.type
        u = _unit(_bits(self.seed, [evaluate(n, {}) for n in self.shape], step), kind)
        return np.asarray(u * kind(self.high - self.low) + kind(self.low)).astype(self.dtype.numpy)

    def lower(self, k: Any, step: Any = None) -> Any:
        def element(*i: Any) -> Any:
            u = _scalar_unit(k, _scalar_bits(k, self.seed, i, self.shape, step), self._arithmetic())
            return u * (self.high - self.low) + self.low

        return k.map(element)


@register
class RandomNormal(_Random):
    """Normally distributed numbers (Box and Muller 1958). (ONNX RandomNormal-22; the numbers are our own)

    An optional input `step` gives others at each value; see the module.
    """

    shape: Shape
    mean: float = 0.0
    scale: float = 1.0
    dtype: DType = F32
    seed: int = 0

    def reference(self, step: Array | None = None) -> Array:
        kind = self._arithmetic().numpy.type
        a, b = _bits(self.seed, [evaluate(n, {}) for n in self.shape], step)
        radius = np.sqrt(kind(-2) * np.log(((a >> np.uint32(8)).astype(kind) + kind(1)) * kind(2.0**-24)))
        turn = (b >> np.uint32(8)).astype(kind) * kind(2 * math.pi * 2.0**-24)
        return np.asarray(radius * np.cos(turn) * kind(self.scale) + kind(self.mean)).astype(self.dtype.numpy)

    def lower(self, k: Any, step: Any = None) -> Any:
        dtype = self._arithmetic()

        def element(*i: Any) -> Any:
            a, b = (k.cast(k.call("shr", w, 8), dtype) for w in _scalar_bits(k, self.seed, i, self.shape, step))
            radius = k.call("sqrt", -2 * k.call("log", (a + 1) * 2.0**-24))
            return radius * k.call("cos", b * (2 * math.pi * 2.0**-24)) * self.scale + self.mean

        return k.map(element)


@register
class Bernoulli(Op):
    """1 with the probability that each element of x states, else 0. (ONNX Bernoulli-22; the draws are our own)

    `dtype` None: the type of x. An optional input `step` gives others at each value; see the module.
    """

    dtype: DType | None = None
    seed: int = 0

    def infer(self, x: TensorType, step: TensorType | None = None) -> TensorType:
        check_kind(self, x, "f")
        if step is not None:
            check_scalar(self, "step", step)
        return TensorType(x.shape, self.dtype or x.dtype)

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(80, *x)

    def reference(self, x: Array, step: Array | None = None) -> Array:
        wide = widened(x)
        u = _unit(_bits(self.seed, x.shape, step), wide.dtype)
        return np.asarray(u < wide).astype(x.dtype if self.dtype is None else self.dtype.numpy)

    def lower(self, k: Any, x: Any, step: Any = None) -> Any:
        def element(*i: Any) -> Any:
            p = k.widen(x(*i))
            return _scalar_unit(k, _scalar_bits(k, self.seed, i, x.shape, step), p.dtype) < p

        return k.map(element)


@register
class Multinomial(Op):
    """`samples` draws for each row of x [B, C] of unnormalised log-probabilities: classes [B, samples].

    (ONNX Multinomial-22; the draws are our own) The class at which the running sum of the probabilities, in f64, passes
    a random part of their total. `dtype` is i32 or i64. An optional input `step` gives others at each value; see the
    module.
    """

    samples: Size = 1
    dtype: DType = DTYPES["i32"]
    seed: int = 0

    def infer(self, x: TensorType, step: TensorType | None = None) -> TensorType:
        check_kind(self, x, "f")
        if x.rank != 2:
            raise ShapeError(f"multinomial: expected x [B, C], got {x}")
        if self.dtype not in (DTYPES["i32"], DTYPES["i64"]):
            raise DTypeError(f"multinomial: the result is i32 or i64, not {self.dtype}")
        if step is not None:
            check_scalar(self, "step", step)
        unify(max_size(x.shape[1], 1), x.shape[1], f"multinomial: {x} has no classes")
        return TensorType((x.shape[0], self.samples), self.dtype)

    def work(self, *x: TensorType) -> Work:
        read = sum((tensor_bytes(t) for t in x), start=0)
        return Work(20 * numel(x[0].shape) + 120 * self.samples, read, tensor_bytes(self.infer(*x)))

    def reference(self, x: Array, step: Array | None = None) -> Array:
        wide = x.astype(np.float64)
        best = np.max(wide, axis=1, keepdims=True)
        sums = np.cumsum(np.where(wide == best, 1, np.exp(wide - best)), axis=1)
        u = _unit(_bits(self.seed, (len(x), evaluate(self.samples, {})), step), np.float64)
        found = SearchSorted().reference(sums, u * sums[:, -1:])
        return np.asarray(np.minimum(found, x.shape[1] - 1)).astype(self.dtype.numpy)

    def decompose(self, g: Graph, x: Value, *step: Value) -> Value:
        rows, classes = x.shape
        (wide,) = g.add(Cast(F64), x)
        (best,) = g.add(ReduceMax((1,), True), wide)
        (weights,) = g.add(Exp(), g.add(Sub(), wide, best)[0])
        (first,) = g.add(Equal(), wide, best)  # of infinite ones too
        (weights,) = g.add(Where(), first, g.constant(1.0, dtype=F64), weights)
        (sums,) = g.add(CumSum(1), weights)
        (total,) = g.add(Slice((0, classes - 1), (rows, 1), (1, 1)), sums)
        (u,) = g.add(RandomUniform((rows, self.samples), dtype=F64, seed=self.seed), *step)
        (found,) = g.add(SearchSorted(), sums, g.add(Mul(), u, total)[0])
        (last,) = g.add(SizeOf(classes - 1))
        return g.add(Cast(self.dtype), g.add(Minimum(), found, last)[0])[0]
