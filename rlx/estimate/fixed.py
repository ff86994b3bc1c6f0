"""Remedies for sizes that the caller fixed: what a model would take with less of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlx.errors import MemoryDeficit, RlxError
from rlx.estimate.memory import Axis, MemoryEstimate, remedy_lines
from rlx.records import replace

__all__ = ["fixed_dims", "with_fixed_axes", "with_smaller_dims"]

Again = Callable[[Mapping[str, Any]], MemoryEstimate]  # the estimate with other `dims`


def fixed_dims(dims: Mapping[str, Any] | None) -> dict[str, int]:
    """The dims of a model to which `dims=` gives one size that could be less."""
    return {name: n for name, n in (dims or {}).items() if isinstance(n, int) and not isinstance(n, bool) and n > 1}


def with_fixed_axes(made: MemoryEstimate, dims: Mapping[str, Any] | None, again: Again) -> MemoryEstimate:
    """An estimate whose remedies also say what less of each fixed dim would save: `again` is asked only then."""
    fixed = fixed_dims(dims)
    if not fixed:
        return made

    def opened() -> dict[str, Axis]:
        axes: dict[str, Axis] = {}
        for name, n in fixed.items():
            try:
                axes |= {key: axis for key, axis in again({**(dims or {}), name: (1, n)}).axes.items() if key == name}
            except RlxError:  # the model is only right at this size
                continue
        return axes

    return replace(made, opened=opened)


def with_smaller_dims(error: MemoryDeficit, again: Callable[[], MemoryEstimate]) -> MemoryDeficit:
    """A deficit of a load with the remedies that an estimate of the same model has."""
    try:
        remedies = again().remedies(error.budget_bytes)
    except RlxError:
        return error
    head = str(error).partition("\nremedies")[0]
    return MemoryDeficit(
        "\n".join([head, *remedy_lines(remedies)]),
        budget_bytes=error.budget_bytes,
        peak_bytes=error.peak_bytes,
        parts=error.parts,
        remedies=remedies,
        estimate=error.estimate,
    )
