"""Reductions: along their own loop in vectors, or one accumulator for each lane of the loop outside."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from rlx.backends.cpu import scalar
from rlx.backends.cpu.builder import constant, vec
from rlx.ir.dtype import DType
from rlx.kernels.affine import affine
from rlx.kernels.expr import I64, Load, Reduce, Var, const, substitute_vars, walk

if TYPE_CHECKING:
    from rlx.backends.cpu.emitter import Emitter, Scope, Value

__all__ = ["emit", "is_short"]

SHORT = 16  # elements below which a reduction is not worth vectors of its own
UNROLL = 4  # independent accumulators of a vector reduction


def emit(emitter: Emitter, e: Reduce, scope: Scope) -> Value:
    if e.kind.startswith("arg"):
        return _reduce_arg(emitter, e, scope)
    per_lane = scope.width > 1 and scope.vec in emitter.depends(e)
    if per_lane:
        return _reduce_loop(emitter, e, scope, scope.width), scope.width
    outside = scope if scope.width == 1 else scope.inner({}, 1, None)
    if e.vars and _side_by_side(emitter, e):
        return _reduce_row(emitter, e, outside), 1
    return _reduce_loop(emitter, e, outside, 1), 1


def _side_by_side(emitter: Emitter, e: Reduce) -> bool:
    """Whether the loads of the body are next to each other (or the same) along the last reduction variable."""
    last = e.vars[-1]
    steps = []
    for x in walk(e.body):
        if isinstance(x, Load):
            form = affine(x.indices[0])
            opaque = any(last in emitter.depends(t) for t in form.coefs if not isinstance(t, Var))
            steps.append(2 if opaque else form.coefs.get(last, 0))
    return e.body.dtype.bits >= 8 and all(s in (0, 1) for s in steps) and any(s == 1 for s in steps)


def _neutral(e: Reduce) -> int | float:
    match e.kind:
        case "add" | "or":
            return 0
        case "mul":
            return 1
        case "and":
            return 1 if e.dtype.kind == "b" else -1
    return scalar.extreme(e.kind, e.dtype)


def _combine(emitter: Emitter, kind: str, a: str, b: str, dtype: DType, w: int) -> str:
    return scalar.apply(emitter.f, kind, [a, b], dtype, w)


def _start(e: Reduce, w: int) -> tuple[str, str]:
    ty = vec(scalar.llvm_type(e.dtype), w)
    neutral = _neutral(e)
    return ty, constant(float(neutral) if e.dtype.is_float else int(neutral), ty)


def _reduce_loop(emitter: Emitter, e: Reduce, scope: Scope, w: int) -> str:
    """Loops over the reduction with an accumulator a lane of the scope."""
    ty, start = _start(e, w)
    small = [s for s in e.extents if isinstance(s, int)]
    if len(small) == len(e.extents) and prod(small) <= 16:
        return _unrolled(emitter, e, scope, w, start, [int(s) for s in small])
    emitter.hoist(e.body, frozenset(e.vars), scope)

    def nest(depth: int, at: Scope, acc: str) -> str:
        if depth == len(e.vars):
            return _combine(emitter, e.kind, acc, emitter.spread(emitter.value(e.body, at), e.dtype, w), e.dtype, w)
        var = e.vars[depth]

        def turn(i: str, carried: list[str]) -> list[str]:
            inside = at.inner({var: i})
            if depth + 1 < len(e.vars):
                emitter.hoist(e.body, frozenset(e.vars[depth + 1 :]), inside)
            return [nest(depth + 1, inside, carried[0])]

        return emitter.f.loop(0, emitter.size(e.extents[depth]), 1, [(ty, acc)], turn)[0]

    return nest(0, scope, start)


def _unrolled(emitter: Emitter, e: Reduce, scope: Scope, w: int, acc: str, extents: list[int]) -> str:
    for point in range(prod(extents)):
        at, rest = {}, point
        for var, n in zip(reversed(e.vars), reversed(extents), strict=True):
            at[var] = const(rest % n, I64)
            rest //= n
        body = substitute_vars(e.body, dict(at))
        emitter.preload([body], [])
        acc = _combine(emitter, e.kind, acc, emitter.spread(emitter.value(body, scope), e.dtype, w), e.dtype, w)
    return acc


def _reduce_row(emitter: Emitter, e: Reduce, scope: Scope) -> str:
    """Vectors along the last reduction variable; `UNROLL` accumulators, then a scalar tail."""
    f, w, last = emitter.f, emitter.lanes, e.vars[-1]
    ty, start = _start(e, w)
    sty, sstart = _start(e, 1)
    emitter.hoist(e.body, frozenset(e.vars), scope)
    n = emitter.size(e.extents[-1])
    block = w * UNROLL
    whole = f.sub(n, f.rem(n, block, "i64"), "i64")
    single = f.sub(n, f.rem(n, w, "i64"), "i64")

    def run(at: Scope, accs: list[str]) -> list[str]:
        def step(i: str, carried: list[str]) -> list[str]:
            out = []
            for u, acc in enumerate(carried):
                inside = at.inner({last: f.add(i, u * w, "i64") if u else i}, w, last)
                body = emitter.spread(emitter.value(e.body, inside), e.dtype, w)
                out.append(_combine(emitter, e.kind, acc, body, e.dtype, w))
            return out

        vectors, tail = accs[:-1], accs[-1]
        vectors = f.loop(0, whole, block, [(ty, a) for a in vectors], step)
        vectors[:1] = f.loop(whole, single, w, [(ty, vectors[0])], step)

        def one(i: str, carried: list[str]) -> list[str]:
            inside = at.inner({last: i}, 1, None)
            return [_combine(emitter, e.kind, carried[0], emitter.value(e.body, inside)[0], e.dtype, 1)]

        return [*vectors, *f.loop(single, n, 1, [(sty, tail)], one)]

    def nest(depth: int, at: Scope, accs: list[str]) -> list[str]:
        if depth == len(e.vars) - 1:
            return run(at, accs)

        def turn(i: str, carried: list[str]) -> list[str]:
            inside = at.inner({e.vars[depth]: i})
            emitter.hoist(e.body, frozenset(e.vars[depth + 1 :]), inside)
            return nest(depth + 1, inside, carried)

        typed = [(ty, a) for a in accs[:-1]] + [(sty, accs[-1])]
        return f.loop(0, emitter.size(e.extents[depth]), 1, typed, turn)

    *vectors, tail = nest(0, scope, [start] * UNROLL + [sstart])
    while len(vectors) > 1:
        half = len(vectors) // 2
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [_combine(emitter, e.kind, a, b, e.dtype, w) for a, b in pairs]
    lanes = vectors[0]
    width = w
    while width > 1:
        width //= 2
        low = f.shuffle(lanes, None, list(range(width))) if width > 1 else f.extract(lanes, 0)
        high = f.shuffle(lanes, None, list(range(width, 2 * width))) if width > 1 else f.extract(lanes, 1)
        lanes = _combine(emitter, e.kind, low, high, e.dtype, width)
    return _combine(emitter, e.kind, lanes, tail, e.dtype, 1)


def _reduce_arg(emitter: Emitter, e: Reduce, scope: Scope) -> Value:
    """Index of the extremum; a NaN wins, and of equals the first (or `last`) does."""
    f, body = emitter.f, e.body
    w = scope.width if scope.width > 1 and scope.vec in emitter.depends(e) else 1
    at = scope if w > 1 or scope.width == 1 else scope.inner({}, 1, None)
    ty, ity = vec(scalar.llvm_type(body.dtype), w), vec("i64", w)
    emitter.hoist(body, frozenset(e.vars), at)
    better = {"argmax": "ge" if e.last else "gt", "argmin": "le" if e.last else "lt"}[e.kind]
    unsigned = body.dtype.kind in "ub"
    first = constant(scalar.zero(scalar.llvm_type(body.dtype)), ty)

    def turn(i: str, carried: list[str]) -> list[str]:
        best, where = carried
        x = emitter.spread(emitter.value(body, at.inner({e.vars[0]: i})), body.dtype, w)
        take = f.cmp("u" + better if unsigned else better, x, best, ty)
        if body.dtype.is_float:
            nan = f.cmp("uno", x, x, ty)
            had = f.cmp("uno", best, best, ty)
            keep = constant(0, vec("i1", w)) if e.last else had
            take = f.or_(take, f.and_(nan, f.xor(keep, 1, vec("i1", w)), vec("i1", w)), vec("i1", w))
        start = f.cmp("eq", i, 0, "i64")
        take = f.or_(take, f.splat(start, w, "i1"), vec("i1", w))
        return [f.select(take, x, best, ty), f.select(take, f.splat(i, w, "i64"), where, ity)]

    result = f.loop(0, emitter.size(e.extents[0]), 1, [(ty, first), (ity, constant(0, ity))], turn)
    return result[1], w


def is_short(x: Reduce) -> bool:
    """Whether vectors along the reduction would be mostly tail, as in the window of a pool."""
    return not x.extents or (isinstance(x.extents[-1], int) and x.extents[-1] < SHORT)
