"""The form of products and convolutions that tiles compute."""

from __future__ import annotations

from rlx.ir.shape import Size
from rlx.kernels.expr import Expr, Var
from rlx.records import dataclass

__all__ = ["COLUMN", "ROW", "K", "Product"]

ROW, COLUMN, K = Var("row"), Var("column"), Var("k")


@dataclass(frozen=True, eq=False)
class Product:
    """C[batch, m, n] = sum over k of a * b, over the variables of `batch`, ROW, COLUMN and K; `places` says what index
    of the store each of its variables is, `batch` has the names and sizes of the batch axes."""

    batch: tuple[tuple[Var, Size], ...]
    m: Size
    n: Size
    k: Size
    a: Expr
    b: Expr
    places: dict[Var, Expr]
