"""How ops are differentiated: rules, attached to the classes of the ops by family, and what applies them.

Loaded when something is differentiated for the first time. `attach` has what rules are written with, `batching` the
rules of `vmap`. Convolutions are in `products`, `windows` has pools only; softmax is in `norms`; recurrent layers are
in `rlx.transform.recurrent`, attention in `rlx.transform.attention`, control flow is in `rlx.transform.control`. An op
that is in none of these files is differentiated by its `decompose`, or not at all.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rlx.ir.graph import Graph
from rlx.ops.gradients import (
    activation,
    batching,
    elementwise,
    fourier,
    index,
    layout,
    norms,
    products,
    quantised,
    reductions,
    regions,
    resampling,
    sampling,
    windows,
)

__all__ = [
    "activation",
    "batching",
    "elementwise",
    "fourier",
    "index",
    "layout",
    "load_rules",
    "norms",
    "products",
    "quantised",
    "reductions",
    "regions",
    "resampling",
    "sampling",
    "windows",
    "with_gradients",
]


def load_rules() -> None:
    """Loads the rules that are written with loops as well; they lie above this part."""
    import_module("rlx.transform.functions")


def with_gradients(graph: Graph, **keywords: Any) -> Graph:
    """`rlx.value_and_grad` of a graph, for parts that lie below it."""
    made: Graph = import_module("rlx.transform.functions").value_and_grad(graph, **keywords)
    return made
