"""Pipelines of scikit-learn, exported by skl2onnx: their answers are scikit-learn's own, and labels are exact.

`python tools/sklearn_models.py` wrote models and answers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.reference import run_graph
from rlx.importers.onnx import load

FOLDER = Path(__file__).parent / "sklearn"
NAMES = sorted(path.stem for path in FOLDER.glob("*.onnx"))


def array(facts: dict[str, Any]) -> np.ndarray:
    dtype = object if facts["dtype"] == "string" else facts["dtype"]
    return np.array(facts["values"], dtype).reshape(facts["shape"])


def agree(got: np.ndarray, expected: np.ndarray) -> None:
    """Labels are equal; floats differ by what f32 explains where scikit-learn computes in f64."""
    assert got.shape == expected.shape
    if expected.dtype.kind in "Oiu":
        assert got.tolist() == expected.tolist()
    else:
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def test_there_are_pipelines_of_text_and_tables() -> None:
    """At least 25, and 15 of them take strings."""
    takes = [
        any(i["dtype"] == "string" for i in json.loads((FOLDER / f"{n}.json").read_text())["inputs"].values())
        for n in NAMES
    ]
    assert len(NAMES) >= 25
    assert sum(takes) >= 15


@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_answers_as_scikit_learn_does(name: str) -> None:
    """On the CPU and on the reference, all rows at once; on the CPU each row alone too, by one compiled graph."""
    facts = json.loads((FOLDER / f"{name}.json").read_text())
    given = {n: array(a) for n, a in facts["inputs"].items()}
    expected = {n: array(a) for n, a in facts["outputs"].items()}
    graph = load(FOLDER / f"{name}.onnx")
    model = rlx.compile(graph, device="cpu", threads=1)
    for found in (model(given), run_graph(graph, given)):
        for output, answer in expected.items():
            agree(found[output], answer)
    for row in range(0, 24, 5):
        alone = model({n: a[row : row + 1] for n, a in given.items()})
        for output, answer in expected.items():
            agree(alone[output], answer[row : row + 1])
