"""Index arithmetic as linear forms: constant + sum of size * term, a term being a loop variable or any other index."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import reduce

from rlx.ir.shape import (
    Atom,
    Dim,
    Extremum,
    FloorDiv,
    Shape,
    Size,
    Symbol,
    bounds,
    dim_of_terms,
    max_size,
    symbols,
)
from rlx.kernels.expr import I64, Apply, Expr, Load, SizeOf, Var, as_size, const, size_expr, transform, walk
from rlx.records import dataclass, field

__all__ = [
    "Affine",
    "affine",
    "computable",
    "index_expr",
    "is_linear",
    "linear_index",
    "linear_size_expr",
    "row_major",
]


@dataclass(frozen=True)
class Affine:
    """constant + sum(coefs[term] * term)."""

    constant: Size = 0
    coefs: dict[Expr, Size] = field(default_factory=dict)

    def plus(self, other: Affine, scale: Size = 1) -> Affine:
        """self + scale * other."""
        coefs = dict(self.coefs)
        for term, coef in other.coefs.items():
            total = coefs.get(term, 0) + scale * coef
            if total == 0:
                coefs.pop(term, None)
            else:
                coefs[term] = total
        return Affine(self.constant + scale * other.constant, coefs)

    @property
    def is_linear(self) -> bool:
        """Whether every term is a loop variable."""
        return all(isinstance(t, Var) for t in self.coefs)


def affine(e: Expr) -> Affine:
    """The linear form of an index expression; what is not linear in loop variables becomes a term of its own."""
    found: Affine | None = e.__dict__.get("_affine")  # kept with the expression: the same ones come again and again
    if found is None:
        found = e.__dict__["_affine"] = _affine(e)
    return found


def _affine(e: Expr) -> Affine:
    size = as_size(e)
    if size is not None:
        return Affine(size)
    if isinstance(e, Apply):
        if e.fn == "add":
            return affine(e.args[0]).plus(affine(e.args[1]))
        if e.fn == "sub":
            return affine(e.args[0]).plus(affine(e.args[1]), -1)
        if e.fn == "mul":
            for a, b in (e.args, e.args[::-1]):
                scale = as_size(b)
                if scale is not None:
                    return Affine().plus(affine(a), scale)
    return Affine(0, {e: 1})


def row_major(shape: Sequence[Size]) -> tuple[Size, ...]:
    """Strides (in elements) of a compact row-major tensor."""
    strides: list[Size] = []
    total: Size = 1
    for size in reversed(shape):
        strides.append(total)
        total = size * total
    return tuple(reversed(strides))


def linear_index(indices: Sequence[Expr], shape: Shape, strides: Sequence[Size] | None = None) -> Affine:
    """The element offset of `indices` into a tensor of `shape` (compact, unless strides are given)."""
    total = Affine()
    for i, stride in zip(indices, strides or row_major(shape), strict=True):
        total = total.plus(affine(i), stride)
    return total


def has_division(e: Expr) -> bool:
    """Whether an index of some load in the expression needs // or %."""
    return any(
        isinstance(x, Apply) and x.fn in ("floordiv", "mod")
        for load in walk(e)
        if isinstance(load, Load)
        for i in load.indices
        for x in walk(i)
    )


def index_expr(a: Affine) -> Expr:
    """A linear form as an index expression."""
    total: Expr = size_expr(a.constant)
    for term, coef in a.coefs.items():
        total = total + term * size_expr(coef)
    return total


# ---- sizes as the words of a run can hold them


def computable(expr: Expr, rounds: Collection[str]) -> Expr:
    """The expression over sizes that are linear in the numbers of rounds, as the words of a loop must be, and
    divided by none that may be 0: there are no elements then, but an index may be computed before one is needed.
    """

    def moving(x: Expr) -> Expr | None:
        if isinstance(x, SizeOf) and any(s.name in rounds for s in symbols(x.size)):
            return linear_size_expr(x.size, rounds)
        return None

    def place(x: Expr) -> Expr | None:
        match x:
            case SizeOf(size=size) if not is_linear(size, rounds):
                return linear_size_expr(size, rounds)
            case Apply(fn="floordiv" | "mod" as fn, args=(a, b)):
                by = size_expr(max_size(b.size, 1)) if isinstance(b, SizeOf) and (bounds(b.size)[0] or 0) < 1 else b
                of = transform(a, moving) if rounds else a
                return None if of is a and by is b else Apply(fn, (of, by), x.dtype)
        return None

    return transform(expr, place)


def is_linear(size: Size, names: Collection[str]) -> bool:
    """Whether the size is a sum of terms in each of which at most one of these symbols is a factor."""
    for mono, _ in size.terms if isinstance(size, Dim) else ():
        moving = [a for a in mono if any(s.name in names for s in symbols(dim_of_terms([((a,), 1)])))]
        if len(moving) > 1 or not all(isinstance(a, Symbol) for a in moving):
            return False
    return True


def linear_size_expr(size: Size, names: Collection[str]) -> Expr:
    """A size as an i64 expression over sizes that are linear in these symbols; the rest is computed by code."""
    if is_linear(size, names):
        return SizeOf(size, folds=False) if isinstance(size, Dim) else size_expr(size)
    assert isinstance(size, Dim)
    terms = [(dim_of_terms([term]), term) for term in size.terms]
    linear = sum((whole for whole, _ in terms if is_linear(whole, names)), start=0)
    parts = [] if linear == 0 else [linear_size_expr(linear, names)]
    for whole, (mono, factor) in terms:
        if not is_linear(whole, names):
            factors = [_atom_expr(atom, names) for atom in mono] + [const(factor, I64)] * (factor != 1)
            parts.append(_joined("mul", factors))
    return _joined("add", parts)


def _atom_expr(atom: Atom, names: Collection[str]) -> Expr:
    match atom:
        case FloorDiv(num=num, den=den):
            return _joined("floordiv", [linear_size_expr(num, names), linear_size_expr(den, names)])
        case Extremum(kind=kind, args=args):
            return _joined(kind, [linear_size_expr(arg, names) for arg in args])
        case Symbol():
            return linear_size_expr(dim_of_terms([((atom,), 1)]), names)


def _joined(fn: str, args: Sequence[Expr]) -> Expr:
    return reduce(lambda a, b: Apply(fn, (a, b), I64), args)
