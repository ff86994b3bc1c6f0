"""Scalar code of ops evaluated over whole arrays: each loop index is an axis, each load a view or a gather."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.backends.library.arrays import Arrays, neutral, table
from rlx.ir.casting import cast, ends
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Array, Value
from rlx.ir.shape import evaluate
from rlx.kernels.expr import I64, Acc, Apply, Cast, Check, Const, Expr, Load, Reduce, Select, SizeOf, Var, walk
from rlx.kernels.lowering import Anchor, Contract, Conv, Lowered, out_vars

__all__ = ["Checker", "lacking", "run_lowered"]

F32, U32 = DTYPES["f32"], DTYPES["u32"]
Fixed = tuple[Var | None, Array]  # values along a loop index, or one value
NUMPY = table(
    np,
    floordiv=np.floor_divide,
    identity=lambda x: x,
    mod=np.mod,
    trunc=np.trunc,
    where=np.where,
    xor=np.bitwise_xor,
    **{"not": np.invert},
)
Checker = Callable[[Any, Any, str], None]  # (ok, shown, kind): makes the run fail where ok is false


def lacking(lib: Arrays, lowered: Lowered) -> str | None:
    """Why a library can't evaluate the code of a node; None when it can."""
    if lowered.anchor is not None and (lowered.generic is None or not isinstance(lowered.anchor, Contract | Conv)):
        return "the library has no function for it"
    if any(len(pieces) != 1 for pieces in lowered.outputs):
        return "its result is put together from pieces"
    exprs = [piece.expr for pieces in lowered.outputs for piece in pieces]
    for e in (x for expr in exprs for x in walk(expr)):
        if e.dtype.name not in lib.types:
            return f"the library has no {e.dtype}"
        if isinstance(e, Apply):
            why = lib.lacks(e.fn, e.args[0].dtype)
            if why is not None:
                return why
    return None


def run_lowered(
    lib: Arrays, lowered: Lowered, arrays: Mapping[Value, Any], shapes: Sequence[tuple[int, ...]], check: Checker
) -> tuple[Any, ...]:
    """The outputs of a node whose sizes are all ints."""
    acc = None
    if lowered.anchor is not None:
        sums = next(x.dtype for x in walk(lowered.outputs[0][0].expr) if isinstance(x, Acc))
        acc = _anchored(lib, lowered.anchor, arrays, shapes[0], check, sums)
    made = []
    for (piece,), shape in zip(lowered.outputs, shapes, strict=True):
        expr = piece.expr if lowered.anchor is None or acc is not None else lowered.generic
        assert expr is not None
        made.append(_Grid(lib, arrays, check, shape, out_vars(len(shape)), acc).whole(expr))
    return tuple(made)


def _anchored(
    lib: Arrays,
    anchor: Anchor,
    arrays: Mapping[Value, Any],
    shape: tuple[int, ...],
    check: Checker,
    sums: DType,
) -> Any | None:
    """The result of the library's function for the anchor, in the accumulator's type; None where it has none."""
    match anchor:
        case Contract() if anchor.activations == "q8":
            return None
        case Contract(m=m, n=n, k=k, a=a, b=b):
            loops = (*out_vars(len(shape)), Var("k"))
            depth = evaluate(k, {})
            rows, columns = [*shape[:-2], evaluate(m, {}), 1, depth], [*shape[:-2], 1, evaluate(n, {}), depth]
            x = _Grid(lib, arrays, check, rows, loops).value(_cast(a, sums))
            y = _Grid(lib, arrays, check, columns, loops).value(_cast(b, sums))
            x = lib.xp.broadcast_to(x, (*x.shape[:-3], *rows[-3:]))
            y = lib.xp.broadcast_to(y, (*y.shape[:-3], *columns[-3:]))
            x = x.reshape((*x.shape[:-3], *rows[-3::2]))
            y = lib.xp.swapaxes(y.reshape((*y.shape[:-3], *columns[-2:])), -1, -2)
            while len(y.shape) > 2 and y.shape[0] == 1:
                y = y.reshape(y.shape[1:])
            return lib.xp.broadcast_to(lib.matmul(x, y, sums), shape)
        case Conv(x=e, w=f, x_shape=x_shape, w_shape=w_shape):
            left, right = (
                _Grid(lib, arrays, check, grid, out_vars(len(grid))).whole(_cast(expr, sums))
                for expr, grid in ((e, [evaluate(s, {}) for s in x_shape]), (f, [evaluate(s, {}) for s in w_shape]))
            )
            return lib.conv(left, right, anchor)
    raise AssertionError(f"no function for {anchor}")


def _cast(e: Expr, target: DType) -> Expr:
    return e if e.dtype is target else Cast(e, target)


def _whole(lib: Arrays, x: Any, source: DType, target: DType) -> Any:
    """Floats as integers by the rule of `rlx.ir.casting`: libraries leave open what is out of range."""
    if source.bits < 32:
        x, source = lib.cast(x, F32), F32
    (low, high), rank = ends(target), len(x.shape)
    above, below = x >= lib.const(float(high + 1), source, rank), x <= lib.const(low, source, rank)
    outside = above | below | lib.functions["isnan"](x)
    made = lib.cast(lib.xp.where(outside, lib.const(0, source, rank), x), target)
    made = lib.xp.where(below, lib.const(low, target, rank), made)
    return lib.xp.where(above, lib.const(high, target, rank), made)


def _rounded(lib: Arrays, x: Any, source: DType, target: DType) -> Any:
    """To a float of fewer than 32 bits, rounded once: libraries go through f32 and round there too.

    f32 rounds to the odd one of two here, and of integers a bit says whether a lower one is 1: neither is in a middle.
    """
    rank = len(x.shape)
    bits = source if source.is_integer else U32

    def number(value: int) -> Any:
        return lib.const(value, bits, rank)

    if source.is_integer:
        of = lib.functions
        for low in range(8, source.bits - 16, 8):  # of numbers beyond 2^(16 + low), of which 24 bits stay
            top = of["shr"](x, number(16 + low))
            large = (top != number(0)) & (top != number(-1 if source.kind == "i" else 0))
            inexact = large & (of["and"](x, number((1 << low) - 1)) != number(0))
            cut = of["shl"](of["shr"](x, number(low)), number(low))
            x = lib.xp.where(inexact, of["or"](cut, number(1 << low)), x)
        return lib.cast(lib.cast(x, F32), target)
    near = lib.cast(x, F32)
    back = lib.cast(near, source)
    raw = lib.bitcast(near, U32)
    odd = (raw - lib.cast(lib.xp.abs(back) > lib.xp.abs(x), U32)) | number(1)
    raw = lib.xp.where((back == x) | lib.functions["isnan"](x), raw, odd)
    return lib.cast(lib.bitcast(raw, F32), target)


class _Grid:
    """Evaluates expressions over a box of loop indices; a value has an axis for each, of size 1 where constant."""

    def __init__(
        self,
        lib: Arrays,
        arrays: Mapping[Value, Any],
        check: Checker,
        sizes: Sequence[int],
        variables: Sequence[Var],
        acc: Any = None,
    ) -> None:
        self.lib = lib
        self.arrays = arrays
        self.check = check
        self.sizes = list(sizes)
        self.axes = {v: d for d, v in enumerate(variables)}
        self.acc = acc
        self.known: dict[Expr, Fixed | None] = {}
        self.memos: list[dict[Expr, Any]] = [{}]  # one for each reduction that is open

    def whole(self, e: Expr) -> Any:
        """The expression at every point of the box."""
        return self.lib.xp.broadcast_to(self.value(e), tuple(self.sizes))

    def value(self, e: Expr) -> Any:
        for memo in self.memos:
            if e in memo:
                return self.aligned(memo[e])
        made = self.memos[-1][e] = self.compute(e)
        return made

    def aligned(self, x: Any) -> Any:
        """An array of an outer box, with axes for the loops opened since."""
        missing = len(self.sizes) - len(x.shape)
        return x.reshape((*x.shape, *[1] * missing)) if missing else x

    def fixed(self, e: Expr) -> Fixed | None:
        """The values of what depends on one loop index at most, by NumPy: places in x as exact as the reference's."""
        with np.errstate(all="ignore"):
            match e:
                case Const(value=value, dtype=dtype):
                    return None, np.asarray([value]).astype(dtype.numpy)
                case SizeOf(size=size):
                    return None, np.array([evaluate(size, {})])
                case Var():
                    return e, np.arange(self.sizes[self.axes[e]])
                case Apply(fn=fn, args=args) if fn in NUMPY:
                    parts = [self.fixed_once(a) for a in args]
                case Select(cond=cond, a=a, b=b):
                    fn, parts = "where", [self.fixed_once(x) for x in (cond, a, b)]
                case Cast(value=x):
                    fn, parts = "identity", [self.fixed_once(x)]
                case _:
                    return None
            known = [part for part in parts if part is not None]
            loops = {v for v, _ in known if v is not None}
            if len(known) < len(parts) or len(loops) > 1:
                return None
            return next(iter(loops), None), cast(np.asarray(NUMPY[fn](*(x for _, x in known))), e.dtype)

    def fixed_once(self, e: Expr) -> Fixed | None:
        if e not in self.known:
            self.known[e] = self.fixed(e)
        return self.known[e]

    def compute(self, e: Expr) -> Any:
        lib, rank = self.lib, len(self.sizes)
        fixed = self.fixed_once(e)
        if fixed is not None:
            loop, values = fixed
            return lib.put(values.reshape([values.size if loop and d == self.axes[loop] else 1 for d in range(rank)]))
        match e:
            case Acc():
                return self.aligned(self.acc)
            case Load():
                return self.load(e)
            case Apply(fn="bitcast", args=(x,), dtype=dtype):
                return lib.bitcast(self.value(x), dtype)
            case Apply(fn=fn, args=args, dtype=dtype):
                return lib.cast(lib.functions[fn](*map(self.value, args)), dtype)
            case Select(cond=cond, a=a, b=b):
                return lib.xp.where(self.value(cond), self.value(a), self.value(b))
            case Cast(value=x, dtype=dtype) if x.dtype.is_float and dtype.is_integer:
                return _whole(lib, self.value(x), x.dtype, dtype)
            case Cast(value=x, dtype=dtype) if (
                dtype.is_float and dtype.bits < 32 <= x.dtype.bits and x.dtype is not F32
            ):
                return _rounded(lib, self.value(x), x.dtype, dtype)
            case Cast(value=x, dtype=dtype):
                return lib.cast(self.value(x), dtype)
            case Check(ok=ok, value=x, kind=kind, shown=shown):
                self.check(self.value(ok), self.value(shown), kind)
                return self.value(x)
            case Reduce():
                return self.reduce(e)
        raise AssertionError(f"unknown expression {e}")

    def reduce(self, e: Reduce) -> Any:
        for part in walk(e.body):  # what does not change in this loop is computed before it
            if isinstance(part, Reduce) and not any(v in e.vars for v in walk(part)):
                self.value(part)
        rank, extents = len(self.sizes), [evaluate(s, {}) for s in e.extents]
        if 0 in extents:
            return self.lib.const(neutral(e.kind, e.dtype), e.dtype, rank)
        self.sizes += extents
        self.axes |= {v: rank + d for d, v in enumerate(e.vars)}
        self.memos.append({})
        x = self.value(e.body)
        over = (*x.shape[:rank], *extents)
        x = self.lib.xp.broadcast_to(x, over)
        if e.kind in ("argmax", "argmin"):
            (n,) = extents
            found = self.lib.search(e.kind, _flipped(x) if e.last else x, rank)
            x = self.lib.const(n - 1, I64, rank + 1) - found if e.last else found
        else:
            x = self.lib.reduce(e.kind, x, tuple(range(rank, rank + len(extents))))
        self.memos.pop()
        del self.sizes[rank:]
        for v in e.vars:
            del self.axes[v]
        return x.reshape(over[:rank])

    def load(self, e: Load) -> Any:
        x = self.arrays[e.source]
        viewed = self.view(e, x) if e.where is None else None
        if viewed is not None:
            return viewed
        rank = len(self.sizes)
        if 0 in x.shape:
            return self.lib.const(0, e.dtype, rank)
        flat = self.lib.const(0, I64, rank)
        stride = math.prod(x.shape)
        for i, n in zip(e.indices, x.shape, strict=True):
            stride //= n
            flat = flat + self.value(i) * self.lib.const(stride, I64, rank)
        if e.where is None:
            return self.lib.take(x.reshape(-1), flat, 0)
        inside = self.value(e.where)
        zero = self.lib.const(0, e.dtype, rank)
        taken = self.lib.take(x.reshape(-1), self.lib.xp.where(inside, flat, self.lib.const(0, I64, rank)), 0)
        return self.lib.xp.where(inside, taken, zero)

    def view(self, e: Load, x: Any) -> Any | None:
        """The load as a slice and a permutation of axes, where its indices are distinct loop indices or numbers."""
        at: list[Any] = []
        order: list[int] = []
        for i, n in zip(e.indices, x.shape, strict=True):
            if isinstance(i, Const):
                at.append(int(i.value))  # type: ignore[arg-type]
                if not 0 <= at[-1] < n:
                    return None
            elif isinstance(i, Var) and self.axes[i] not in order and self.sizes[self.axes[i]] <= n:
                at.append(slice(self.sizes[self.axes[i]]))
                order.append(self.axes[i])
            else:
                return None
        if at and any(s != slice(n) for s, n in zip(at, x.shape, strict=True)):
            x = x[tuple(at)]
        places = np.argsort(order).tolist()
        if places != list(range(len(order))):
            x = self.lib.xp.transpose(x, places)
        return x.reshape([self.sizes[d] if d in order else 1 for d in range(len(self.sizes))])


def _flipped(x: Any) -> Any:
    """x with its last axis reversed."""
    return x[..., ::-1]
