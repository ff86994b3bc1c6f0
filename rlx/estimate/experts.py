"""Mixture-of-experts offload: how many experts of each layer stay in memory for a budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlx.errors import MemoryDeficit, OptionError
from rlx.ir.dtype import DType
from rlx.options import parse_bytes
from rlx.records import dataclass
from rlx.units import int_or_same

__all__ = ["ExpertPlan", "ExpertTotals", "expert_bytes", "place_experts"]


def expert_bytes(hidden: int, intermediate: int, dtype: DType, matrices: int = 3) -> int:
    """Bytes of one expert: gate, up and down, each hidden x intermediate elements of `dtype`."""
    return matrices * dtype.nbytes(hidden * intermediate)


@dataclass(frozen=True)
class ExpertTotals:
    """The experts of a model: by MoE layer, how many there are and the bytes of one (gate + up + down at run time)."""

    experts: tuple[int, ...]
    expert_bytes: tuple[int, ...]

    @staticmethod
    def uniform(layers: int, experts: int, nbytes: int) -> ExpertTotals:
        """`layers` layers of `experts` experts of `nbytes` bytes each."""
        if min(layers, experts, nbytes) < 0:
            raise OptionError(f"layers {layers}, experts {experts}, bytes {nbytes}: expected numbers >= 0")
        return ExpertTotals((experts,) * layers, (nbytes,) * layers)

    @property
    def layers(self) -> int:
        """MoE layers."""
        return len(self.experts)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts."""
        return sum(n * size for n, size in zip(self.experts, self.expert_bytes, strict=True))

    def __str__(self) -> str:
        def span(numbers: Sequence[int]) -> str:
            low, high = min(numbers, default=0), max(numbers, default=0)
            return f"{low:,}" if low == high else f"{low:,} to {high:,}"

        return f"{span(self.experts)} of {span(self.expert_bytes)} B in each of {self.layers} layers"

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"layers": self.layers, "experts": list(self.experts), "expert_bytes": list(self.expert_bytes)}


class Base(Protocol):
    """What is needed of an estimate with all experts in memory."""

    @property
    def model(self) -> str: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def peaks(self) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class ExpertPlan:
    """A placement: `resident` experts by layer. All sizes are bytes; `peak_bytes` is never above `budget_bytes`."""

    totals: ExpertTotals
    budget_bytes: int
    reserve_bytes: int
    base_bytes: int  # everything that is no expert
    resident: tuple[int, ...]

    @property
    def resident_per_layer(self) -> int:
        """The fewest resident experts of any layer."""
        return min(self.resident, default=0)

    @property
    def all_resident_bytes(self) -> int:
        """Bytes of all experts."""
        return self.totals.nbytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of the resident experts."""
        return sum(n * size for n, size in zip(self.resident, self.totals.expert_bytes, strict=True))

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the experts that are not resident."""
        return self.all_resident_bytes - self.resident_bytes

    @property
    def peak_bytes(self) -> int:
        """The peak with the others offloaded."""
        return self.base_bytes + self.resident_bytes

    def masks(self, tokens: Iterable[Sequence[int]] | None = None) -> list[NDArray[np.bool_]]:
        """What `set_resident_experts` takes: for each layer a bool an expert, true for as many as are resident.

        With `tokens`, how many went to each expert of each layer (as `take_expert_stats` counts), those that most went
        to; without, the first ones. Raises `OptionError` where that is not a number for every expert.
        """
        counts = (
            [np.asarray(row) for row in tokens] if tokens is not None else [np.zeros(n) for n in self.totals.experts]
        )
        if [row.shape for row in counts] != [(n,) for n in self.totals.experts]:
            raise OptionError(
                f"masks: expected a number for each of {self.totals.experts} experts by layer, got arrays of "
                f"{[row.shape for row in counts]}"
            )
        made = [np.zeros(n, np.bool_) for n in self.totals.experts]
        for mask, row, most in zip(made, counts, self.resident, strict=True):
            mask[np.argsort(-row, kind="stable")[:most]] = True
        return made


def place_experts(
    base: Base,
    totals: ExpertTotals,
    *,
    budget: int | str,
    reserve: float = 0.0,
    cap: int | None = None,
    layer_budgets: Iterable[int | str] | None = None,
) -> ExpertPlan:
    """How many experts of each layer can be resident in budget - reserve - everything that is no expert.

    `base` is the estimate with all experts in memory, `reserve` the fraction of the budget that is kept free, in
    [0, 1); `cap` the most experts a layer may keep. Every layer gets the same number, or with `layer_budgets` (bytes
    for the experts of each layer) as many as its own budget holds. Raises `MemoryDeficit` if not even 0 experts fit, or
    the layers' budgets together are not there; `OptionError` for bad arguments.
    """
    allowed = parse_bytes(budget)
    if isinstance(reserve, bool) or not isinstance(reserve, int | float) or not 0 <= reserve < 1:
        raise OptionError(f"reserve={reserve!r}: expected a fraction in [0, 1)")
    cap = int_or_same(cap)
    if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int) or cap < 0):
        raise OptionError(f"cap={cap!r}: expected a number of experts >= 0, or None")
    if base.weight_bytes < totals.nbytes:
        raise OptionError(
            f"{base.model}: its weights are {base.weight_bytes:,} B, less than the {totals.nbytes:,} B of its experts: "
            "the estimate must be one with all experts in memory"
        )
    numerator, denominator = float(reserve).as_integer_ratio()
    kept_free = allowed * numerator // denominator
    peaks = dict(base.peaks)
    dense = max(peaks.pop("compiling", 0), *(peak - totals.nbytes for peak in peaks.values()))  # no expert is compiled
    room = allowed - kept_free - dense
    if room < 0:
        raise _deficit(base, allowed, kept_free, dense, 0)
    if layer_budgets is None:
        one_each = sum(totals.expert_bytes)
        most = [room // one_each if one_each else 0] * totals.layers
    else:
        budgets = [parse_bytes(b) for b in layer_budgets]
        if len(budgets) != totals.layers:
            raise OptionError(f"layer_budgets: expected {totals.layers} budgets, one a MoE layer, got {len(budgets)}")
        most = [b // size if size else 0 for b, size in zip(budgets, totals.expert_bytes, strict=True)]
    limit = max(totals.experts, default=0) if cap is None else cap
    resident = tuple(min(n, limit, have) for n, have in zip(most, totals.experts, strict=True))
    plan = ExpertPlan(totals, allowed, kept_free, dense, resident)
    if plan.resident_bytes > room:
        raise _deficit(base, allowed, kept_free, dense, plan.resident_bytes)
    return plan


def _deficit(base: Base, budget: int, reserve: int, dense: int, experts: int) -> MemoryDeficit:
    need = dense + experts + reserve
    return MemoryDeficit(
        f"{base.model!r}: {dense:,} B that are no experts, {experts:,} B of resident experts and a reserve of "
        f"{reserve:,} B are {need - budget:,} B more than the budget of {budget:,} B; raise the budget, lower the "
        "reserve or shorten the context",
        budget_bytes=budget,
        peak_bytes=need,
        parts={"not experts": dense, "resident experts": experts, "reserve": reserve},
    )
