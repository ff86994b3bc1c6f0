"""MoE offload sizing: hand-worked placements, edges, and a peak that never passes the budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.errors import MemoryDeficit, OptionError
from rlx.estimate.experts import ExpertTotals, expert_bytes, place_experts
from rlx.estimate.memory import MemoryEstimate
from rlx.ir.dtype import dtype_of


def base(experts: ExpertTotals, dense: int = 100, activations: int = 20) -> MemoryEstimate:
    return MemoryEstimate(
        "moe", "cpu", weight_bytes=dense + experts.nbytes, activation_bytes=activations, experts=experts
    )


def test_bytes_of_one_expert() -> None:
    """gate, up and down of 4 x 6 elements: 72 elements."""
    assert expert_bytes(4, 6, dtype_of("f16")) == 144
    assert expert_bytes(4, 6, dtype_of("i4")) == 36
    assert expert_bytes(0, 6, dtype_of("f32")) == 0


def test_hand_worked() -> None:
    """2 layers of 8 experts of 10 B; 120 B are no experts; of 200 B, 10 % are kept free: 60 B, 3 experts a layer."""
    totals = ExpertTotals.uniform(2, 8, 10)
    plan = base(totals).offload(200, reserve=0.1)
    assert plan.reserve_bytes == 20
    assert plan.base_bytes == 120
    assert plan.resident == (3, 3)
    assert (plan.all_resident_bytes, plan.resident_bytes, plan.offloaded_bytes) == (160, 60, 100)
    assert plan.peak_bytes == 180
    assert base(totals).offload(200, reserve=0.1, cap=1).resident == (1, 1)
    assert base(totals).offload(200, reserve=0.1, cap=0).peak_bytes == 120
    assert base(totals).offload(10_000).resident == (8, 8)
    assert base(totals).offload(120).resident == (0, 0)


def test_reserve_is_rounded_down() -> None:
    assert base(ExpertTotals.uniform(1, 1, 1)).offload(125, reserve=0.01).reserve_bytes == 1


def test_layers_with_budgets_of_their_own() -> None:
    totals = ExpertTotals((4, 2), (10, 20))
    plan = base(totals).offload(300, layer_budgets=[25, 500])
    assert plan.resident == (2, 2)
    assert plan.resident_per_layer == 2
    with pytest.raises(MemoryDeficit, match="resident experts"):
        base(totals).offload(170, layer_budgets=[40, 40])
    with pytest.raises(OptionError, match="expected 2 budgets"):
        base(totals).offload(300, layer_budgets=[1])


def test_not_even_none_fits() -> None:
    with pytest.raises(MemoryDeficit) as caught:
        base(ExpertTotals.uniform(2, 8, 10)).offload(119)
    assert caught.value.missing_bytes == 1
    with pytest.raises(MemoryDeficit):
        base(ExpertTotals.uniform(2, 8, 10)).offload(120, reserve=0.5)


def test_nothing_gives_nothing() -> None:
    for totals in (ExpertTotals.uniform(0, 8, 10), ExpertTotals.uniform(2, 0, 10), ExpertTotals.uniform(2, 8, 0)):
        plan = base(totals).offload(1000)
        assert plan.resident_bytes == plan.all_resident_bytes == plan.resident_per_layer == 0


def test_bad_arguments() -> None:
    totals = ExpertTotals.uniform(2, 8, 10)
    for reserve in (1, -0.1, True, float("nan")):
        with pytest.raises(OptionError, match="reserve"):
            base(totals).offload(1000, reserve=reserve)
    for cap in (-1, True):
        with pytest.raises(OptionError, match="cap"):
            base(totals).offload(1000, cap=cap)
    with pytest.raises(OptionError, match="less than the 160 B of its experts"):
        place_experts(MemoryEstimate("m", "cpu", weight_bytes=159), totals, budget=1000)
    with pytest.raises(OptionError, match="no experts"):
        MemoryEstimate("m", "cpu").offload(1000)


@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 1000)), max_size=6),
    st.integers(0, 5000),
    st.integers(0, 100_000),
    st.floats(0, 1, exclude_max=True),
    st.none() | st.integers(0, 70),
)
def test_peak_with_offload_is_within_the_budget(
    layers: list[tuple[int, int]], dense: int, budget: int, reserve: float, cap: int | None
) -> None:
    """Placed or refused; and one more expert a layer would pass budget - reserve, where the cap allows it."""
    totals = ExpertTotals(tuple(n for n, _ in layers), tuple(size for _, size in layers))
    made = base(totals, dense)
    try:
        plan = made.offload(budget, reserve=reserve, cap=cap)
    except MemoryDeficit:
        assert dense + 20 + int(reserve * budget) + 1 > budget
        return
    assert plan.peak_bytes + plan.reserve_bytes <= budget
    more = [min(n, cap if cap is not None else n) for n, _ in layers]
    if any(a < b for a, b in zip(plan.resident, more, strict=True)):
        one_each = sum(size for _, size in layers)
        level = max(plan.resident)
        assert dense + 20 + (level + 1) * one_each > budget - plan.reserve_bytes or one_each == 0
