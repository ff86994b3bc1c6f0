"""What `CompileOptions.trap` looks for, and the error that tells of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.errors import NanTrapped
from rlx.ir.dtype import DType
from rlx.ir.encoding import Encoding
from rlx.ir.value import Array

__all__ = ["Reading", "bad_elements", "is_trappable", "trapped"]

Reading = tuple[str, int, int]  # an operand: its name, and how many of its elements are NaN and infinite


def is_trappable(dtype: DType, encoding: Encoding | None = None) -> bool:
    """Whether elements of this type can be NaN or infinite."""
    return encoding is None and dtype.kind in "fc"


def bad_elements(array: Array) -> tuple[int, int]:
    """How many elements are NaN, and how many infinite."""
    return int(np.isnan(array).sum()), int(np.isinf(array).sum())


def trapped(
    label: str, kernel: str, result: str, array: Array, before: Sequence[Reading], trap: str
) -> NanTrapped | None:
    """The error for a result that is not finite, else None. `trap`: "nan", or "inf" for both."""
    nans, infinite = bad_elements(array)
    if not nans and not (infinite and trap == "inf"):
        return None
    bad = [(name, n, i) for name, n, i in before if n or i]
    culprit = not any(n or trap == "inf" for _, n, _ in bad)
    said = "; ".join(f"{name} has {n} NaN and {i} infinite" for name, n, i in bad)
    if not bad:
        why = "all that it reads is finite: it is the culprit"
    elif culprit:
        why = f"it reads no NaN ({said}): it is the culprit"
    else:
        why = f"it propagates what it reads: {said}"
    what = f"{nans} NaN and {infinite} infinite of {array.size} elements"
    return NanTrapped(
        f"node {label}: {what} in the result {result} of kernel {kernel!r}; {why}",
        kernel=kernel,
        label=label,
        culprit=culprit,
        operands=[name for name, n, i in bad if n or trap == "inf"],
    )
