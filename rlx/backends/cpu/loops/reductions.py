"""Reductions: along their own loop in vectors, or one accumulator for each lane of the loop outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Function, constant, vec
from rlx.backends.cpu.loops.looks import TURNS, is_long, look_if, looking_loop
from rlx.ir.dtype import DType
from rlx.ir.shape import size_product
from rlx.kernels.affine import affine
from rlx.kernels.expr import I64, Load, Reduce, Var, const, substitute_vars, walk

if TYPE_CHECKING:
    from rlx.backends.cpu.loops.emitter import Emitter, Scope, Value

__all__ = ["emit", "is_short", "side_by_side"]

SHORT = 8  # elements below which a reduction gets no vectors; no more than lanes, so that the order of sums is the same
UNROLL = 4  # independent accumulators of a vector reduction
BLOCK = 512  # turns after which the accumulators of a float sum are added to the total
SOME = 1024  # turns between looks, of loops that hold others of unknown length

Turn = Callable[[str, list[str]], list[str]]


def emit(emitter: Emitter, e: Reduce, scope: Scope) -> Value:
    """The value of a reduction in a scope."""
    if e.kind.startswith("arg"):
        return _reduce_arg(emitter, e, scope)
    per_lane = scope.width > 1 and scope.vec in emitter.depends(e)
    if per_lane:
        return _reduce_loop(emitter, e, scope, scope.width), scope.width
    outside = scope if scope.width == 1 else scope.inner({}, 1, None)
    if e.vars and side_by_side(emitter, e):
        return _reduce_row(emitter, e, outside), 1
    return _reduce_loop(emitter, e, outside, 1), 1


def side_by_side(emitter: Emitter, e: Reduce) -> bool:
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
    return convert.extreme(e.kind, e.dtype)


def _loop(
    f: Function, e: Reduce, depth: int, end: str, step: int, carried: Sequence[tuple[str, str]], turn: Turn
) -> list[str]:
    """The loop over the variable `depth`, which carries accumulators.

    Float sums restart every `BLOCK` turns: long ones keep their precision.
    """
    long = is_long(size_product(e.extents))
    inner = size_product(e.extents[depth + 1 :])
    turns = max(TURNS // max(inner, 1), 1) if isinstance(inner, int) else SOME
    if e.kind != "add" or not e.dtype.is_float:
        return looking_loop(f, 0, end, step, carried, turn, turns) if long else f.loop(0, end, step, carried, turn)
    blocks = 1 << max(turns // BLOCK, 1).bit_length() - 1

    def block(i: str, totals: list[str]) -> list[str]:
        if long:
            due = f.cmp("eq", f.and_(i, blocks * BLOCK * step - 1, "i64"), 0, "i64")
            look_if(f, f.and_(due, f.cmp("ne", i, 0, "i64"), "i1"))
        fresh = [(ty, constant(0.0, ty)) for ty, _ in carried]
        parts = f.loop(i, f.min(f.add(i, BLOCK * step, "i64"), end, "i64"), step, fresh, turn)
        return [f.add(total, part, ty) for total, part, (ty, _) in zip(totals, parts, carried, strict=True)]

    return f.loop(0, end, BLOCK * step, carried, block)


def _combine(emitter: Emitter, kind: str, acc: str, x: str, dtype: DType, w: int) -> str:
    """Takes x into the accumulator: in this order, the test for NaN is not part of the chain of dependences."""
    return convert.apply(emitter.f, kind, [x, acc], dtype, w)


def _start(e: Reduce, w: int) -> tuple[str, str]:
    ty = vec(convert.llvm_type(e.dtype), w)
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

        return _loop(emitter.f, e, depth, emitter.size(e.extents[depth]), 1, [(ty, acc)], turn)[0]

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


def _rest(e: Reduce, w: int) -> int | None:
    """The elements left over by vectors of `w`, None where a scalar loop takes them.

    That is where the size is not known or too small for vectors, and for float sums: their order depends on it.
    """
    n = e.extents[-1]
    ordered = e.dtype.is_float and e.kind in ("add", "mul")
    return n % w if isinstance(n, int) and n >= w and not ordered else None


def _reduce_row(emitter: Emitter, e: Reduce, scope: Scope) -> str:
    """Vectors along the last reduction variable; `UNROLL` accumulators, then the rest."""
    f, w, last = emitter.f, emitter.lanes, e.vars[-1]
    ty, start = _start(e, w)
    sty, sstart = _start(e, 1)
    kept = emitter.kept.get(e)
    emitter.hoist(e.body, frozenset(e.vars), scope)
    if kept is not None:
        emitter.hoist(kept[1], frozenset(e.vars), scope)
    n = emitter.size(e.extents[-1])
    block = w * UNROLL
    whole = f.sub(n, f.rem(n, block, "i64"), "i64")
    single = f.sub(n, f.rem(n, w, "i64"), "i64")

    rest = _rest(e, w)

    def element(inside: Scope) -> str:
        body = emitter.spread(emitter.value(e.body, inside), e.dtype, inside.width)
        if kept is not None:
            emitter.store(kept[1], emitter.lanes_of(kept[0], inside), inside)
        return body

    def run(at: Scope, accs: list[str]) -> list[str]:
        def step(i: str, carried: list[str]) -> list[str]:
            out = []
            for u, acc in enumerate(carried):
                inside = at.inner({last: f.add(i, u * w, "i64") if u else i}, w, last)
                out.append(_combine(emitter, e.kind, acc, element(inside), e.dtype, w))
            return out

        vectors, tail = accs[:-1], accs[-1]
        vectors = _loop(f, e, len(e.vars) - 1, whole, block, [(ty, a) for a in vectors], step)
        vectors[:1] = f.loop(whole, single, w, [(ty, vectors[0])], step)
        if rest is not None:
            if rest:  # the last vector again, without the lanes that are counted already
                body = element(at.inner({last: f.sub(n, w, "i64")}, w, last))
                fresh = constant([int(j >= w - rest) for j in range(w)], vec("i1", w))
                body = f.select(fresh, body, start, ty)
                vectors[1] = _combine(emitter, e.kind, vectors[1], body, e.dtype, w)
            return [*vectors, tail]

        def one(i: str, carried: list[str]) -> list[str]:
            return [_combine(emitter, e.kind, carried[0], element(at.inner({last: i}, 1, None)), e.dtype, 1)]

        return [*vectors, *f.loop(single, n, 1, [(sty, tail)], one)]

    def nest(depth: int, at: Scope, accs: list[str]) -> list[str]:
        if depth == len(e.vars) - 1:
            return run(at, accs)

        def turn(i: str, carried: list[str]) -> list[str]:
            inside = at.inner({e.vars[depth]: i})
            emitter.hoist(e.body, frozenset(e.vars[depth + 1 :]), inside)
            return nest(depth + 1, inside, carried)

        typed = [(ty, a) for a in accs[:-1]] + [(sty, accs[-1])]
        return _loop(f, e, depth, emitter.size(e.extents[depth]), 1, typed, turn)

    *vectors, tail = nest(0, scope, [start] * UNROLL + [sstart])
    total = _one_of(emitter, e, vectors, w)
    return total if rest is not None else _combine(emitter, e.kind, total, tail, e.dtype, 1)


def _one_of(emitter: Emitter, e: Reduce, vectors: list[str], width: int) -> str:
    """All lanes of vectors combined, halves with halves: the vectors, then the lanes of the last one."""
    f = emitter.f
    while len(vectors) > 1:
        half = len(vectors) // 2
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [_combine(emitter, e.kind, a, b, e.dtype, width) for a, b in pairs]
    (lanes,) = vectors
    while width > 1:
        width //= 2
        low = f.shuffle(lanes, None, list(range(width))) if width > 1 else f.extract(lanes, 0)
        high = f.shuffle(lanes, None, list(range(width, 2 * width))) if width > 1 else f.extract(lanes, 1)
        lanes = _combine(emitter, e.kind, low, high, e.dtype, width)
    return lanes


def _reduce_arg(emitter: Emitter, e: Reduce, scope: Scope) -> Value:
    """Index of the extremum; a NaN wins, and of equals the first (or `last`) does."""
    f, body, var = emitter.f, e.body, e.vars[0]
    w = scope.width if scope.width > 1 and scope.vec in emitter.depends(e) else 1
    at = scope if w > 1 or scope.width == 1 else scope.inner({}, 1, None)
    sty = convert.llvm_type(body.dtype)
    ty, ity = vec(sty, w), vec("i64", w)
    emitter.hoist(body, frozenset(e.vars), at)

    def turn(i: str, carried: list[str]) -> list[str]:
        x = emitter.spread(emitter.value(body, at.inner({var: i})), body.dtype, w)
        take = f.or_(_beats(f, e, x, carried[0], ty), f.splat(f.cmp("eq", i, 0, "i64"), w, "i1"), vec("i1", w))
        return [f.select(take, x, carried[0], ty), f.select(take, f.splat(i, w, "i64"), carried[1], ity)]

    begin, best, where = "0", constant(convert.zero(sty), ty), constant(0, ity)
    if w == 1 and side_by_side(emitter, e):
        begin, best, where = _arg_vectors(emitter, e, at)
    end, carried = emitter.size(e.extents[0]), [(ty, best), (ity, where)]
    if is_long(e.extents[0]):
        return looking_loop(f, begin, end, 1, carried, turn)[1], w
    return f.loop(begin, end, 1, carried, turn)[1], w


def _beats(f: Function, e: Reduce, x: str, best: str, ty: str) -> str:
    """Whether x, which comes after `best`, takes its place."""
    more = ("g" if e.kind == "argmax" else "l") + ("e" if e.last else "t")
    if not e.body.dtype.is_float:
        return f.cmp("u" + more if e.body.dtype.kind in "ub" else more, x, best, ty)
    if e.last:
        return f.or_(f.cmp("o" + more, x, best, ty), f.cmp("uno", x, x, ty))
    return f.and_(f.cmp("u" + more, x, best, ty), f.cmp("ord", best, best, ty))


def _arg_vectors(emitter: Emitter, e: Reduce, at: Scope) -> tuple[str, str, str]:
    """The part of the row that fills vectors: (its length, the extremum, its index). Vectors are counted in 32 bits."""
    f, var, count, w = emitter.f, e.vars[0], e.extents[0], emitter.lanes
    known = count if isinstance(count, int) else 1 << 31
    w = min(w, 1 << max(known.bit_length() - 1, 0))
    sty = convert.llvm_type(e.body.dtype)
    extreme = convert.extreme(e.kind[3:], e.body.dtype)
    start = float(extreme) if e.body.dtype.is_float else int(extreme)
    n = emitter.size(e.extents[0])
    block = w * UNROLL
    length = f.sub(n, f.rem(n, block, "i64"), "i64")
    ty, ity = vec(sty, w), vec("i32", w)

    def step(i: str, carried: list[str]) -> list[str]:
        number = f.splat(f.cast("trunc", f.lshr(i, w.bit_length() - 1, "i64"), "i32"), w, "i32")
        out = []
        for u in range(len(carried) // 2):
            best, where = carried[2 * u], carried[2 * u + 1]
            inside = at.inner({var: f.add(i, u * w, "i64") if u else i}, w, var)
            x = emitter.spread(emitter.value(e.body, inside), e.body.dtype, w)
            take = _beats(f, e, x, best, ty)
            out += [f.select(take, x, best, ty), f.select(take, f.add(number, u, ity), where, ity)]
        return out

    firsts = [text for u in range(UNROLL) for text in ((ty, constant(start, ty)), (ity, constant(u, ity)))]
    whole = looking_loop if is_long(e.extents[0]) else Function.loop
    found = whole(f, 0, length, block, firsts, step)
    begun, length = length, f.sub(n, f.rem(n, w, "i64"), "i64")  # what fills no block goes vector by vector
    found[:2] = f.loop(begun, length, w, [(ty, found[0]), (ity, found[1])], step)
    if known < block:
        found = found[:2]
    pairs, kind = [], "i32" if known < 1 << 31 else "i64"
    for best, number in zip(found[::2], found[1::2], strict=True):
        wide = number if kind == "i32" else f.cast("zext", number, "i64")
        index = f.mul(wide, constant(w, vec(kind, w)), vec(kind, w))
        pairs.append((best, f.add(index, f.iota(w, kind), vec(kind, w))))
    while len(pairs) > 1:
        half = len(pairs) // 2
        pairs = [_further(f, e, a, b, w) for a, b in zip(pairs[:half], pairs[half:], strict=True)]
    best, index = pairs[0]
    while w > 1:
        w //= 2
        low, high = list(range(w)), list(range(w, 2 * w))
        halves = [
            (f.shuffle(best, None, part), f.shuffle(index, None, part))
            if w > 1
            else (f.extract(best, part[0]), f.extract(index, part[0]))
            for part in (low, high)
        ]
        best, index = _further(f, e, halves[0], halves[1], w)
    return length, best, index if kind == "i64" else f.cast("zext", index, "i64")


def _further(f: Function, e: Reduce, a: tuple[str, str], b: tuple[str, str], w: int) -> tuple[str, str]:
    """The better of two (value, index) pairs, whose order in the row is not known."""
    dtype = e.body.dtype
    ty, ity, bit = vec(convert.llvm_type(dtype), w), f.type_of(a[1]), vec("i1", w)
    more = "gt" if e.kind == "argmax" else "lt"
    take = f.cmp("u" + more if dtype.kind in "ub" else more, b[0], a[0], ty)
    tie = f.cmp("eq", a[0], b[0], ty)
    if dtype.is_float:
        nan_a, nan_b = f.cmp("uno", a[0], a[0], ty), f.cmp("uno", b[0], b[0], ty)
        take = f.or_(take, f.and_(nan_b, f.xor(nan_a, 1, bit), bit), bit)
        tie = f.or_(tie, f.and_(nan_a, nan_b, bit), bit)
    take = f.or_(take, f.and_(tie, f.cmp("gt" if e.last else "lt", b[1], a[1], ity), bit), bit)
    return f.select(take, b[0], a[0], ty), f.select(take, b[1], a[1], ity)


def is_short(x: Reduce, lanes: int) -> bool:
    """Whether a vector along the reduction would not be full, as in the window of a pool."""
    return not x.extents or (isinstance(x.extents[-1], int) and x.extents[-1] < max(SHORT, lanes))
