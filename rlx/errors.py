"""Exceptions that rlx raises for its users.

Every class is an `RlxError` and, where a builtin fits, that builtin too. A message names the thing, what was expected,
what came, and the way out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlx.records import dataclass

__all__ = [
    "BusyError",
    "ClosedError",
    "CompileError",
    "DTypeError",
    "DeviceUnavailable",
    "ExecutionError",
    "MemoryDeficit",
    "ModelFormatError",
    "NameNotFound",
    "NanTrapped",
    "OptionError",
    "RlxError",
    "ShapeError",
    "StaleView",
    "UndecidedInputs",
    "UnsupportedNode",
    "UnsupportedOp",
]


class RlxError(Exception):
    """Base of all errors raised by rlx."""


class ShapeError(RlxError, ValueError):
    """A shape, rank or extent does not fit."""


class DTypeError(RlxError, TypeError):
    """An element type does not fit."""


class NameNotFound(RlxError, KeyError):
    """A name is not one of those known here."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


def no_such(what: str, name: object, known: Iterable[str], more: str = "", *, call: str = "") -> NameNotFound:
    """The error for a name that is not one of those known; `more` ends the message, `call` says where it was given."""
    there = ", ".join(map(repr, known)) or "none"
    return NameNotFound(f"{call and f'{call}: '}there is no {what} {name!r}; there are {there}{more}")


class OptionError(RlxError, ValueError):
    """An option or argument has a value that is not allowed."""


def unknown_dim(name: object, dims: Iterable[str], inputs: Iterable[str]) -> OptionError:
    """The error for a name in `dims` that is neither a dim nor an input, with the one that was probably meant."""
    from difflib import get_close_matches

    known, names = list(dims), list(inputs)
    near = get_close_matches(name, [*known, *names], n=1) if isinstance(name, str) else []
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    there = ", ".join(map(repr, known)) or "none"
    more = f"; inputs: {', '.join(map(repr, names))}" if names else ""
    return OptionError(f"dims: unknown dim {name!r}{meant}; dims: {there}{more}")


@dataclass(frozen=True)
class UnsupportedNode:
    """One node that stands in the way: its name, op, and what exactly is not supported."""

    name: str
    op: str
    reason: str


class UnsupportedOp(RlxError):
    """One or more nodes can't be imported or compiled; `nodes` lists every one of them."""

    def __init__(self, message: str, nodes: Sequence[UnsupportedNode] = ()) -> None:
        super().__init__(message)
        self.nodes: tuple[UnsupportedNode, ...] = tuple(nodes)


class UndecidedInputs(UnsupportedOp):
    """The values of `inputs` decide ranks; `signature` has all inputs of the model (`rlx.ir.given.Formal`)."""

    inputs: tuple[str, ...] = ()
    signature: tuple[Any, ...] = ()


class MemoryDeficit(RlxError, MemoryError):
    """The model does not fit in the budget or the memory that is free.

    All sizes are bytes: `missing_bytes` is by how much `peak_bytes` is above `budget_bytes`; `parts` are what the peak
    is made of; `remedies` (of `rlx.estimate.memory.Remedy`) what would help. `estimate` is the `MemoryEstimate` that
    was compared, None where there was none.
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int = 0,
        peak_bytes: int = 0,
        parts: Mapping[str, int] | None = None,
        remedies: Sequence[Any] = (),
        estimate: Any = None,
    ) -> None:
        super().__init__(message)
        self.estimate = estimate
        self.budget_bytes = budget_bytes
        self.peak_bytes = peak_bytes
        self.missing_bytes = max(0, peak_bytes - budget_bytes)
        self.parts = dict(parts or {})
        self.remedies = tuple(remedies)


class ModelFormatError(RlxError, ValueError):
    """A model file is malformed, truncated or breaks a limit."""


class DeviceUnavailable(RlxError):
    """The device is not present or can't be used here; the message says how to get it."""


class BusyError(RlxError):
    """The compiled graph is running in another thread; use `clone()` for one a thread."""


class ClosedError(RlxError):
    """The compiled graph was closed: its memory is given back and it can't run any more."""


class StaleView(RlxError):
    """A view of an output was read after a later run overwrote it."""


class CompileError(RlxError):
    """Compilation failed: an invalid graph, or generated code that may not be loaded."""


class ExecutionError(RlxError):
    """A run stopped: bad index, integer division by zero, failed guard or an extent beyond its bound."""


class NanTrapped(ExecutionError, FloatingPointError):
    """A kernel gave NaN (or an infinity, with `trap="inf"`): see `CompileOptions.trap`.

    `kernel` is its name and `label` that of its source nodes; `culprit` says whether it made them of finite operands,
    else `operands` names those that it has them from.
    """

    def __init__(
        self, message: str, *, kernel: str = "", label: str = "", culprit: bool = False, operands: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.kernel, self.label, self.culprit, self.operands = kernel, label, culprit, tuple(operands)
