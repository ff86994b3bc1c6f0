"""NumPy's names for functions made by `rlx.jit`: `import rlx.numpy as rnp`.

Functions of arrays are NumPy's own, which work on graph values too (`rnp.exp is np.exp`). Those that make arrays
(zeros, ones, full, empty, arange, linspace, eye, identity, array, asarray) also take sizes that a run decides, such as
`x.shape[0]` of a dynamic axis, and graph values in lists.
"""

from __future__ import annotations

from typing import Any

import numpy as _np

from rlx.ops.numpy.creation import CREATION as _CREATION


def __getattr__(name: str) -> Any:
    if name in _CREATION:
        return _CREATION[name]
    try:
        return getattr(_np, name)
    except AttributeError:
        raise AttributeError(f"neither rlx nor NumPy has a function {name!r}") from None


def __dir__() -> list[str]:
    return sorted(name for name in dir(_np) if not name.startswith("_"))
