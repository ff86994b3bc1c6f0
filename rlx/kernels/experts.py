"""The mixture-of-experts layers of a program: which experts there are, and where their weights lie."""

from __future__ import annotations

from rlx.ir.shape import Size
from rlx.kernels.program import Buffer
from rlx.records import dataclass

__all__ = ["ExpertLayer", "ExpertWeight"]


@dataclass(eq=False)
class ExpertWeight:
    """One weight of a layer, [experts, K, N] (`transposed`: [experts, N, K]).

    `source` is what it is made of and `panels` [experts, ...] what kernels read; `table` has two addresses for each
    expert: of its panels, 0 where it has none, and of its matrix in `source`.
    """

    name: str
    source: Buffer
    panels: Buffer
    table: Buffer
    transposed: bool
    routine: str  # which packs; "" for encoded weights, whose panels are their blocks


@dataclass(eq=False)
class ExpertLayer:
    """The products that go by the same numbers of experts: `rows` of them, `top_k` for each token.

    `block` is what a run keeps of its routing: see `rlx.backends.cpu.kernels.grouped_matmul`.
    """

    name: str
    experts: int
    top_k: int
    rows: Size
    block: Buffer
    weights: list[ExpertWeight]
