"""Evaluates scalar expressions with NumPy over grids of loop indices, strictly.

Beyond giving the values, it fails (AssertionError) where a code generator may do anything: a load out of bounds,
operands of mixed types, arithmetic in 16-bit floats, or an integer division that is not guarded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.errors import ExecutionError
from rlx.ir.casting import cast
from rlx.ir.dtype import DType, dtype_of
from rlx.ir.graph import Array
from rlx.ir.shape import evaluate
from rlx.kernels.expr import Acc, Apply, Cast, Check, Const, Expr, Load, Reduce, Select, SizeOf, Var
from rlx.records import dataclass

__all__ = ["Evaluator"]

Env = dict[Var, Array]
COMPARISONS: dict[str, Any] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "isnan": np.isnan,
    "isinf": np.isinf,
}


def _sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1 / (1 + e), e / (1 + e)))


def _erf(x: Array) -> Array:
    return np.asarray([math.erf(v) for v in x.ravel().tolist()], x.dtype).reshape(x.shape)


def _normal_cdf(x: Array) -> Array:
    return np.asarray([math.erfc(-v * math.sqrt(0.5)) / 2 for v in x.ravel().tolist()], x.dtype).reshape(x.shape)


FLOAT_ONLY: dict[str, Any] = {
    "div": np.true_divide,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "erf": _erf,
    "normal_cdf": _normal_cdf,
    "sigmoid": _sigmoid,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "trunc": np.trunc,
    "pow": np.power,
    "fmod": np.fmod,
}


def _truncated(a: Array, b: Array) -> Array:
    assert (b != 0).all(), "idiv by 0: use k.checked_divisor"
    if a.dtype.kind == "i":
        assert not ((b == -1) & (a == np.iinfo(a.dtype).min)).any(), "idiv overflows"
    return np.asarray((a - np.fmod(a, b)) // b)


def _remainder(a: Array, b: Array) -> Array:
    assert (b != 0).all(), "irem by 0: use k.checked_divisor"
    if a.dtype.kind == "i":
        assert not ((b == -1) & (a == np.iinfo(a.dtype).min)).any(), "irem overflows"
    return np.asarray(np.fmod(a, b))


def _floor_divided(fn: Any) -> Callable[[Array, Array], Array]:
    def apply(a: Array, b: Array) -> Array:
        assert (b > 0).all(), "floordiv and mod need a divisor > 0"
        return np.asarray(fn(a, b))

    return apply


def _shifted(fn: Any) -> Callable[[Array, Array], Array]:
    def apply(a: Array, b: Array) -> Array:
        assert ((b >= 0) & (b < 8 * a.dtype.itemsize)).all(), "shift by more than the width"
        return np.asarray(fn(a, b))

    return apply


INTEGER_ONLY: dict[str, Any] = {
    "idiv": _truncated,
    "irem": _remainder,
    "floordiv": _floor_divided(np.floor_divide),
    "mod": _floor_divided(np.mod),
    "shl": _shifted(np.left_shift),
    "shr": _shifted(np.right_shift),
}
NUMERIC: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
}
LOGIC: dict[str, Any] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}


@dataclass
class Evaluator:
    """Evaluates expressions over a grid of loop indices: a value is an array with one axis for each loop.

    `arrays` are the sources of loads, `extents` the sizes, `acc` the results of the anchor over the grid. Raises
    `ExecutionError`, which starts with the kind and the value shown, for a `Check` that fails.
    """

    arrays: Mapping[Any, Array]
    extents: Mapping[str, int]
    acc: Array | None = None

    def over(
        self, e: Expr, shape: Sequence[int], variables: Sequence[Var], start: Sequence[int] | None = None
    ) -> Array:
        """The expression at every point of a box; `variables` are its loop indices, which begin at `start` (or 0)."""
        rank = len(shape)
        env = {v: _axis(n, d, rank) for d, (v, n) in enumerate(zip(variables, shape, strict=True))}
        if start is not None:
            env = {v: index + at for (v, index), at in zip(env.items(), start, strict=True)}
        if 0 in shape:
            return np.empty(shape, e.dtype.numpy)
        return np.array(np.broadcast_to(self.value(e, env, rank, {}), shape))

    def value(self, e: Expr, env: Env, rank: int, memo: dict[Expr, Array]) -> Array:
        if e not in memo:
            result = np.asarray(self._value(e, env, rank, memo))
            assert result.dtype == e.dtype.numpy, f"{e}: declared {e.dtype}, computed {result.dtype}"
            assert result.ndim == rank
            memo[e] = result
        return memo[e]

    def _value(self, e: Expr, env: Env, rank: int, memo: dict[Expr, Array]) -> Any:
        def sub(x: Expr) -> Array:
            return self.value(x, env, rank, memo)

        match e:
            case Const(value=value, dtype=dtype):
                return np.full((1,) * rank, value, dtype.numpy)
            case Var():
                assert e in env, f"{e.name} is not bound here"
                return env[e]
            case SizeOf(size=size):
                return np.full((1,) * rank, evaluate(size, self.extents), np.int64)
            case Acc():
                assert self.acc is not None, "Acc outside of an epilogue"
                return self.acc
            case Load():
                return self._load(e, [sub(i) for i in e.indices], None if e.where is None else sub(e.where), rank)
            case Apply(fn=fn, args=args, dtype=dtype):
                return _apply(fn, [sub(a) for a in args], dtype)
            case Select(cond=cond, a=a, b=b):
                assert cond.dtype.kind == "b", f"select by {cond.dtype}"
                assert a.dtype is b.dtype, f"select of {a.dtype}, {b.dtype}"
                return np.where(sub(cond), sub(a), sub(b))
            case Cast(value=x, dtype=dtype):
                return cast(sub(x), dtype)
            case Check(ok=ok, value=x, kind=kind, shown=shown):
                good = sub(ok)
                if not good.all():
                    bad = np.broadcast_to(sub(shown), np.broadcast_shapes(good.shape, sub(shown).shape))
                    first = bad[np.broadcast_to(~good, bad.shape)][0]
                    raise ExecutionError(f"{kind}: {first}")
                return sub(x)
            case Reduce():
                return self._reduce(e, env, rank)
        raise AssertionError(f"unknown expression {e}")

    def _load(self, e: Load, indices: list[Array], where: Array | None, rank: int) -> Array:
        source = self.arrays[e.source]
        assert source.dtype == e.dtype.numpy, f"{e.source!r} holds {source.dtype}, loaded as {e.dtype}"
        assert len(indices) == source.ndim
        shape = np.broadcast_shapes(*(i.shape for i in indices), *(() if where is None else (where.shape,)))
        inside: Any = True if where is None else where
        for axis, (i, n) in enumerate(zip(indices, source.shape, strict=True)):
            assert i.dtype == np.int64, f"index of axis {axis} is {i.dtype}"
            wrong = inside & ((i < 0) | (i >= n))
            assert not np.any(wrong), f"load of {e.source!r} out of bounds on axis {axis} (size {n})"
        if where is None:
            return np.asarray(source[tuple(indices)]) if indices else source.reshape((1,) * rank)
        if source.size == 0 or not where.any():
            return np.zeros(shape, source.dtype)
        safe = tuple(np.where(where, i, 0) for i in indices)
        return np.where(where, source[safe], np.zeros((), source.dtype))

    def _reduce(self, e: Reduce, env: Env, rank: int) -> Array:
        extents = [evaluate(n, self.extents) for n in e.extents]
        inner = rank + len(extents)
        axes = tuple(range(rank, inner))
        if 0 in extents:
            return _empty_reduction(e, rank)
        wider: Env = {v: a.reshape(a.shape + (1,) * len(extents)) for v, a in env.items()}
        for axis, v, n in zip(axes, e.vars, extents, strict=True):
            assert v not in wider, f"{v.name} is bound twice"
            wider[v] = _axis(n, axis, inner)
        body = self.value(e.body, wider, inner, {})
        body = np.broadcast_to(body, (*body.shape[:rank], *extents))
        if e.kind in ("argmax", "argmin"):
            return _arg(e, body)
        fn: Any = {
            "add": np.add,
            "mul": np.multiply,
            "max": np.maximum,
            "min": np.minimum,
            "and": np.logical_and,
            "or": np.logical_or,
        }[e.kind]
        _check_arithmetic(e.kind, [body])
        extra = {"dtype": body.dtype} if e.kind in ("add", "mul") else {}
        return np.asarray(fn.reduce(body, axis=axes, **extra))


def _axis(n: int, axis: int, rank: int) -> Array:
    return np.arange(n, dtype=np.int64).reshape([n if d == axis else 1 for d in range(rank)])


def _check_arithmetic(fn: str, args: Sequence[Array]) -> None:
    for a in args:
        narrow = dtype_of(a.dtype).is_float and dtype_of(a.dtype).bits < 32
        assert not narrow, f"{fn} on {a.dtype}: use k.widen before arithmetic"


def _apply(fn: str, args: list[Array], dtype: DType) -> Any:
    if fn == "bitcast":
        return args[0].view(dtype.numpy)  # of one width, whatever the strides
    assert len({a.dtype for a in args}) == 1, f"{fn} of {', '.join(str(a.dtype) for a in args)}"
    _check_arithmetic(fn, args)
    kind = args[0].dtype.kind
    if fn in COMPARISONS:
        return COMPARISONS[fn](*args)
    if fn in FLOAT_ONLY:
        assert kind == "f", f"{fn} of {args[0].dtype}"
        return FLOAT_ONLY[fn](*args)
    if fn in INTEGER_ONLY:
        assert kind in "iu", f"{fn} of {args[0].dtype}"
        return INTEGER_ONLY[fn](*args)
    if fn in NUMERIC:
        assert kind in "fiu", f"{fn} of {args[0].dtype}"
        return NUMERIC[fn](*args)
    assert fn in LOGIC, f"unknown scalar function {fn}"
    assert kind in "iub", f"{fn} of {args[0].dtype}"
    return LOGIC[fn](*args)


def _empty_reduction(e: Reduce, rank: int) -> Array:
    assert not e.kind.startswith("arg"), f"{e.kind} over no elements"
    kind, dtype = e.dtype.kind, e.dtype.numpy
    if e.kind in ("max", "min"):
        lowest: Any = -np.inf if kind == "f" else np.iinfo(dtype).min
        highest: Any = np.inf if kind == "f" else np.iinfo(dtype).max
        return np.full((1,) * rank, lowest if e.kind == "max" else highest, dtype)
    return np.full((1,) * rank, {"add": 0, "or": 0, "mul": 1, "and": 1}[e.kind], dtype)


def _arg(e: Reduce, body: Array) -> Array:
    _check_arithmetic(e.kind, [body])
    assert len(e.vars) == 1
    fn = np.argmax if e.kind == "argmax" else np.argmin
    if e.last:
        return np.asarray(body.shape[-1] - 1 - fn(body[..., ::-1], axis=-1), np.int64)
    return np.asarray(fn(body, axis=-1), np.int64)
