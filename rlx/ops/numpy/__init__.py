"""NumPy's functions, operators and methods on graph values, each in terms of ops.

`np.exp(x)`, `np.sum(x, axis=0)`, `np.concatenate([x, y])` and so on come here through NumPy's own protocols
(`__array_ufunc__`, `__array_function__`). In a function that is being traced, element types follow NumPy's rules; in a
graph built by hand they are never changed. A new function is one `@of(np.name)` in the file of its family.
"""

from rlx.ops.numpy import (  # noqa: F401  # each registers its functions
    complex,
    creation,
    elementwise,
    fft,
    indexing,
    joining,
    linear,
    methods,
    numeric,
    reductions,
    shaping,
    standard,
)
from rlx.ops.numpy.registry import FUNCTIONS, of

__all__ = ["FUNCTIONS", "of"]
