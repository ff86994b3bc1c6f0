"""ONNX's own node tests on the reference device: with sizes as the file has them, and with all of them dynamic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import onnx
import onnx_node_tests
import pytest

import rlx
from rlx.errors import ExecutionError, RlxError, ShapeError, UnsupportedOp

CASES = {case.name: case for case in onnx_node_tests.cases()}


@pytest.mark.sample(150)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", onnx_node_tests.DEVICES)
def test_a_case_gives_the_expected_outputs_or_is_skipped_for_a_listed_reason(device: str, name: str) -> None:
    """Shapes, dtypes and values are those that ONNX ships; no input is made a constant."""
    found = onnx_node_tests.outcome(CASES[name], device)
    assert found.result in ("pass", "skip"), f"{found.name}: {found.reason}"


def _run_dynamic(model: onnx.ModelProto, given: Sequence[Any]) -> list[Any]:
    source, feed = onnx_node_tests.settled(model, given, False)
    made = onnx.load_from_string(source)
    for info in made.graph.input:
        for d, size in enumerate(info.type.tensor_type.shape.dim):
            if size.dim_value > 1:  # a size of 1 may broadcast, which is told at import
                size.dim_param = f"{info.name}_{d}"
    return list(rlx.load(made.SerializeToString(), device="reference").run(feed))


@pytest.mark.sample(200)
@pytest.mark.parametrize("name", CASES)
def test_dynamic_sizes_give_the_same_or_are_refused(name: str) -> None:
    """With every size of the inputs dynamic a case gives the same outputs, or can't be imported: never others."""
    case = CASES[name]
    if onnx_node_tests.outcome(case, "reference").result != "pass":
        pytest.skip("not supported with fixed sizes either")
    try:
        onnx_node_tests.compare(case, _run_dynamic)
    except (UnsupportedOp, ShapeError) as error:
        pytest.skip(f"refused: {error}")
    except ExecutionError as error:
        if "in this run" not in str(error):  # sizes taken for equal at import, which the run checks
            raise
        pytest.skip(f"refused by a guard: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("device", onnx_node_tests.DEVICES)
def test_nearly_all_cases_pass_as_they_come(device: str) -> None:
    """At least 98 % of those whose types are numeric, 98 % of all too, and no case fails."""
    found = onnx_node_tests.outcomes(device)
    counts = Counter(o.result for o in found if o.numeric)
    assert not [o.name for o in found if o.result == "fail"]
    assert counts["pass"] >= 0.98 * sum(counts.values()), counts
    assert sum(o.result == "pass" for o in found) >= 0.98 * len(found)


@pytest.mark.slow
def test_most_cases_run_with_dynamic_sizes() -> None:
    """The suite does not shrink unnoticed."""
    passed = 0
    for case in onnx_node_tests.cases():
        try:
            onnx_node_tests.compare(case, _run_dynamic)
            passed += 1
        except (AssertionError, RlxError):
            continue
    assert passed >= 1400


@pytest.mark.slow
def test_every_reason_to_skip_is_needed() -> None:
    """A pattern that no case matches any more has to go."""
    for device in onnx_node_tests.DEVICES:
        skipped = {o.reason for o in onnx_node_tests.outcomes(device)}
        assert {reason for _, reason in onnx_node_tests.DIFFERENT} <= skipped
