"""Rules for gradients: of every op, for every case of attributes that the oracle has, in f64 against differences."""

from __future__ import annotations

import pytest

import rlx.transform.functions  # noqa: F401 - attaches the rules
from rlx.ir.shape import Dim
from rlx.ops import OPS
from rlx.testing.cases import cases_of, covered
from rlx.testing.derivatives import check_derivatives, differentiable, pulled
from rlx.testing.oracle import Tolerance, compare

# Sizes that data decide, an op whose gradient is not its slope, and one that computes in f32.
LEFT_OUT = {"arange", "compress", "dequantize", "stop_gradient", "unique"}
NAMES = [n for n in sorted(OPS) if covered(n) and n not in LEFT_OUT and differentiable(cases_of(n, 3, 4))]
SYMBOLIC = (
    "add", "average_pool", "concat", "conv", "cum_sum", "expand", "gather", "gemm", "group_norm", "layer_norm",
    "matmul", "max_pool", "mul", "pad", "reduce_max", "reduce_mean", "reduce_prod", "reshape", "slice",
    "softmax", "transpose",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_are_those_of_differences(name: str) -> None:
    """Forwards, backwards and finite differences agree, for every op that takes floats and gives floats."""
    cases = [c for c in cases_of(name, 3, 4) if getattr(c.op, "reduction", "add") in ("add", "none")]
    assert check_derivatives(cases)


@pytest.mark.parametrize("name", SYMBOLIC)
def test_derivatives_hold_for_all_sizes(name: str) -> None:
    """One graph over dims, at several extents."""
    n, m = Dim("n", 2, 64), Dim("m", 2, 64)
    cases = [c for c in cases_of(name, n, m) if {"n", "m"} <= _dims(c)]
    assert check_derivatives(cases[:12], [{"n": 4, "m": 6}, {"n": 5, "m": 4}])


@pytest.mark.parametrize("name", NAMES)
def test_gradient_graphs_run_on_the_cpu(name: str) -> None:
    """Backward graphs compiled natively give what the reference gives."""
    cases = [c for c in cases_of(name, 3, 4) if getattr(c.op, "reduction", "add") in ("add", "none")]
    graph, given = pulled(differentiable(cases)[:4])
    assert graph.outputs
    compare(graph, given, device="cpu", allowed=dict.fromkeys([o.name for o in graph.outputs], Tolerance(1e-7, 1e-8)))


def _dims(case: object) -> set[str]:
    from rlx.ir.shape import symbols

    return {s.name for o in case.operands for size in o.shape for s in symbols(size)}  # type: ignore[attr-defined]
