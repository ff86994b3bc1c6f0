"""Inputs of a model file that decide ranks: how they are declared, and what of their values a graph is made for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlx.ir.dtype import DType
from rlx.ir.shape import Shape
from rlx.ir.value import Array
from rlx.records import dataclass

__all__ = ["MOST_ELEMENTS", "Formal", "Given", "Items", "Values", "values_text"]

MOST_ELEMENTS = 1024  # of an input that decides ranks


@dataclass(frozen=True)
class Formal:
    """An input as a file declares it: `kind` is "tensor", or nests as "sequence(tensor)", "optional(sequence(tensor))".

    `shape` (None: its rank isn't known) and `dtype` are those of the tensor, or of each in a sequence.
    """

    name: str
    kind: str
    shape: Shape | None
    dtype: DType


@dataclass(frozen=True)
class Items:
    """How many tensors a sequence or optional is in a run, by the rank of each; `ranks` None: an absent optional."""

    ranks: tuple[int, ...] | None


Given = Array | Items  # the elements of a tensor, which a graph then has as a constant, or what a sequence holds
Values = Mapping[str, Given]


def values_text(values: Values) -> str | None:
    """The values as text, equal for equal ones only; None where that can't be told."""
    parts: list[tuple[str, object]] = []
    for name, value in sorted(values.items()):
        if isinstance(value, Items):
            parts.append((name, value.ranks))
            continue
        array = np.asarray(value)
        if array.dtype.hasobject or array.size > MOST_ELEMENTS:
            return None
        parts.append((name, (array.dtype.str, array.shape, array.tobytes())))
    return repr(parts)
