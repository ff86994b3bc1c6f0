"""How ops are differentiated: rules, attached to the classes of the ops by family, and what applies them.

Loaded when something is differentiated for the first time. `attach` has what rules are written with.
"""

from __future__ import annotations

from rlx.ops.gradients import (
    activation,
    batching,
    elementwise,
    index,
    layout,
    norms,
    products,
    reductions,
    resampling,
    windows,
)

__all__ = [
    "activation",
    "batching",
    "elementwise",
    "index",
    "layout",
    "norms",
    "products",
    "reductions",
    "resampling",
    "windows",
]
