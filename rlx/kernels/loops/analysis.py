"""The loops of a kernel before code is emitted: indices made linear, loops merged, and how the work is cut up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod

from rlx.ir.shape import Shape, Size, size_product
from rlx.kernels.affine import Affine, affine, linear_index
from rlx.kernels.analysis import PRICES
from rlx.kernels.expr import (
    I64,
    Acc,
    Apply,
    Expr,
    Load,
    Reduce,
    Var,
    children,
    const,
    size_expr,
    substitute_vars,
    transform,
    walk,
)
from rlx.kernels.program import Store
from rlx.records import replace

__all__ = [
    "RESULT",
    "flatten",
    "free_vars",
    "is_costly",
    "linear_load",
    "merge_loops",
    "merge_reduces",
    "rename_reduces",
    "total_weight",
    "unroll",
    "weight",
]

UNROLLED = 16  # elements of a reduction that is written out
RESULT = frozenset((Var("acc"),))  # what an anchor's result depends on: it is never computed ahead
COSTLY = 8  # the price from which a function takes longer than storing its result and loading it again


def flatten(store: Store) -> tuple[Shape, Expr, Expr]:
    """The loop extents, the linear store index and the expression, with loads at one linear index each."""

    expr = transform(store.expr, linear_load)
    target = _as_expr(linear_index([transform(i, linear_load) for i in store.index], store.buffer.shape))
    return store.extents, target, expr


def linear_load(x: Expr) -> Expr | None:
    """A load at one linear index."""
    if not isinstance(x, Load):
        return None
    return replace(x, indices=(_as_expr(linear_index(x.indices, x.source.shape)),))


def _as_expr(a: Affine) -> Expr:
    total: Expr = size_expr(a.constant)
    for term in sorted(a.coefs, key=_term_order):
        total = total + term * size_expr(a.coefs[term])
    return total


def _term_order(term: Expr) -> tuple[bool, str]:
    return (not isinstance(term, Var), term.name if isinstance(term, Var) else "")


def free_vars(e: Expr, memo: dict[Expr, frozenset[Var]]) -> frozenset[Var]:
    """Loop variables that the expression depends on."""
    found = memo.get(e)
    if found is None:
        if isinstance(e, Var):
            found = frozenset((e,))
        elif isinstance(e, Acc):
            found = RESULT
        else:
            found = frozenset().union(*(free_vars(c, memo) for c in children(e)))
            if isinstance(e, Reduce):
                found -= frozenset(e.vars)
        memo[e] = found
    return found


def _linear_forms(exprs: Sequence[Expr], target: Expr) -> list[Affine]:
    return [affine(target)] + [affine(x.indices[0]) for e in (*exprs, target) for x in walk(e) if isinstance(x, Load)]


def _vars_outside_indices(exprs: Sequence[Expr]) -> set[Var]:
    """Variables used other than linearly in an index: they can't be merged with a neighbour."""
    found: set[Var] = set()
    seen: set[Expr] = set()
    stack = list(exprs)
    while stack:
        x = stack.pop()
        if x in seen:
            continue
        seen.add(x)
        if isinstance(x, Var):
            found.add(x)
        elif isinstance(x, Load):
            stack.extend(t for t in affine(x.indices[0]).coefs if not isinstance(t, Var))
            if x.where is not None:
                stack.append(x.where)
        else:
            stack.extend(children(x))
    return found


def merge_loops(
    names: list[Var], sizes: list[Size], exprs: list[Expr], target: Expr
) -> tuple[list[Var], list[Size], list[Expr], Expr]:
    """Drops loops of one turn and merges neighbours that every index walks through as one."""
    gone = {v: const(0, I64) for v, s in zip(names, sizes, strict=True) if s == 1}
    if gone:
        exprs, target = [substitute_vars(e, dict(gone)) for e in exprs], substitute_vars(target, dict(gone))
        pairs = [(v, s) for v, s in zip(names, sizes, strict=True) if v not in gone]
        names, sizes = [v for v, _ in pairs], [s for _, s in pairs]
    d = 0
    while d + 1 < len(names):
        outer, inner, size = names[d], names[d + 1], sizes[d + 1]
        forms = _linear_forms(exprs, target)
        fixed = _vars_outside_indices([*exprs, *(t for a in forms[:1] for t in a.coefs if not isinstance(t, Var))])
        joined = all(a.coefs.get(outer, 0) == a.coefs.get(inner, 0) * size for a in forms)
        if joined and outer not in fixed and inner not in fixed:
            exprs = [substitute_vars(e, {outer: const(0, I64)}) for e in exprs]
            target = substitute_vars(target, {outer: const(0, I64)})
            sizes[d + 1] = sizes[d] * size
            del names[d], sizes[d]
            d = max(d - 1, 0)
        else:
            d += 1
    return names, sizes, exprs, target


def merge_reduces(expr: Expr) -> Expr:
    """Merges the loops of each reduction in the same way."""

    def visit(x: Expr) -> Expr | None:
        if not isinstance(x, Reduce) or x.kind.startswith("arg"):
            return None
        names, sizes, (body,), _ = merge_loops(list(x.vars), list(x.extents), [x.body], const(0, I64))
        return replace(x, vars=tuple(names), extents=tuple(sizes), body=body)

    return transform(expr, visit)


def unroll(expr: Expr, last: Var, depends: Callable[[Expr], frozenset[Var]]) -> Expr:
    """Small reductions inside the loop over `last` written out, so that each of their addresses is found once a row."""

    def visit(x: Expr) -> Expr | None:
        if not isinstance(x, Reduce) or x.kind.startswith("arg") or last not in depends(x):
            return None
        extents = [s for s in x.extents if isinstance(s, int)]
        if len(extents) < len(x.extents) or not 0 < prod(extents) <= UNROLLED:
            return None
        if any(isinstance(y, Reduce) for y in walk(x.body)):
            return None
        total: Expr | None = None
        for point in product(*(range(n) for n in extents)):
            at: dict[Var, Expr] = {v: const(p, I64) for v, p in zip(x.vars, point, strict=True)}
            body = substitute_vars(x.body, at)
            total = body if total is None else Apply(x.kind, (body, total), x.dtype)
        return total

    return transform(expr, visit)


def is_costly(e: Expr) -> bool:
    """Whether the expression calls a function that is better not called anew at each use."""
    return any(isinstance(x, Apply) and PRICES.get(x.fn, 1) >= COSTLY for x in walk(e))


def weight(expr: Expr, shared: Sequence[Reduce] = ()) -> Size:
    """Rough cost of one element in simple operations; some 10 of them take a nanosecond in vectors.

    The reductions in `shared` cost nothing here. Linear arithmetic of indices is not counted.
    """
    total: Size = 1
    seen: set[Expr] = set()
    stack = [expr]
    while stack:
        x = stack.pop()
        if x in seen:
            continue
        seen.add(x)
        match x:
            case Reduce(extents=extents, body=body):
                if x not in shared:
                    total = total + size_product(extents) * weight(body, shared)
            case Load(indices=indices, where=where):
                total = total + 1
                stack.extend(t for i in indices for t in affine(i).coefs if not isinstance(t, Var))
                stack.extend(() if where is None else (where,))
            case _:
                total = total + (PRICES.get(x.fn, 1) if isinstance(x, Apply) else 0)
                stack.extend(children(x))
    return total


def total_weight(shared: Sequence[Reduce]) -> Size:
    """The cost of reductions that are computed once each, though some are part of others."""
    total: Size = 0
    for x in shared:
        total = total + weight(x, [y for y in shared if y != x])
    return total


def rename_reduces(expr: Expr) -> Expr:
    """Reduction variables numbered in order, so that equal kernels have equal text."""
    names: dict[Var, Expr] = {}
    for x in walk(expr):
        if isinstance(x, Reduce):
            for v in x.vars:
                names.setdefault(v, Var(f"r{len(names)}"))

    def visit(x: Expr) -> Expr | None:
        if isinstance(x, Var):
            return names.get(x)
        if isinstance(x, Reduce):
            return replace(x, vars=tuple(names.get(v, v) for v in x.vars))  # type: ignore[misc]
        return None

    return transform(expr, visit)
