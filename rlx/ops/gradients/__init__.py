"""How ops are differentiated: rules, attached to the classes of the ops by family, and what applies them.

Loaded when something is differentiated for the first time. `attach` has what rules are written with. Convolutions are
in `products`, `windows` has pools only; recurrent layers are in `rlx.transform.recurrent`, attention in
`rlx.transform.attention`, control flow is in
`rlx.transform.control`. An op that is in none of these files is differentiated by its `decompose`, or not at all.
"""

from __future__ import annotations

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
    "norms",
    "products",
    "quantised",
    "reductions",
    "regions",
    "resampling",
    "sampling",
    "windows",
]
