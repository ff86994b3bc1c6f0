"""The form of products and convolutions that tiles compute."""

from __future__ import annotations

from rlx.ir.shape import Size
from rlx.kernels.expr import Expr, Var
from rlx.kernels.program import Buffer
from rlx.records import dataclass

__all__ = ["COLUMN", "PLAIN", "ROW", "K", "Product", "Target", "Window"]

ROW, COLUMN, K = Var("row"), Var("column"), Var("k")


@dataclass(frozen=True, eq=False)
class Window:
    """The windows of an image [N, H, W, C] of 16-bit elements, as the rows of a product whose depth is taps, then
    channels. Of strides, dilations and pads (low ones, then high ones) the last is that of W."""

    image: Buffer
    dtype: str
    shape: tuple[Size, int, int, int]
    out: tuple[int, int]
    taps: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    pads: tuple[int, int, int, int]


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
    window: Window | None = None  # what `a` is, if it is one


@dataclass(frozen=True)
class Target:
    """What kernels are printed for.

    `precision`: that of products of f32; `capability`: of the device; `processors`: how many it has; `aligned`:
    whether buffers start at multiples of 16 bytes.
    """

    precision: str = "f32"
    capability: tuple[int, int] = (8, 0)
    processors: int = 132
    aligned: bool = True

    @property
    def hopper(self) -> bool:
        """Whether wgmma and the copy engine may be used, which later devices do not have."""
        return self.capability[0] == 9 and self.aligned


PLAIN = Target()
