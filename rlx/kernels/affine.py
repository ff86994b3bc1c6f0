"""Index arithmetic as linear forms: constant + sum of size * term, a term being a loop variable or any other index."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.shape import Shape, Size, size_product
from rlx.kernels.expr import Apply, Expr, Load, Var, as_size, size_expr, walk
from rlx.records import dataclass, field

__all__ = ["Affine", "affine", "index_expr", "linear_index", "row_major"]


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
    return tuple(size_product(shape[d + 1 :]) for d in range(len(shape)))


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
