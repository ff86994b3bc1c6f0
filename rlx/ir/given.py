"""Inputs of a model file that decide ranks: how they are declared, and what of their values a graph is made for."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.ir.dtype import DType
from rlx.ir.shape import Shape
from rlx.ir.value import Array
from rlx.records import dataclass

__all__ = ["MOST_ELEMENTS", "Formal", "Given", "Items", "Values"]

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
