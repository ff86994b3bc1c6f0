"""TreeEnsemble against a walk written out by hand, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from rlx.backends.reference import run_graph
from rlx.errors import ExecutionError, OptionError
from rlx.ir.graph import Graph
from rlx.ops.ml import MODES, TreeEnsemble


def _scores(x: np.ndarray, aggregate: str = "sum", feature: int = 1) -> np.ndarray:
    """Two trees: x[feature] <= 0 ? (x[0] > 1 ? 1 : 2) : 4, and always 8."""
    tables = {
        "feature": np.array([feature, 0, 0, 0, 0, 0], np.int32),
        "threshold": np.array([0, 1, 0, 0, 0, 0], np.float32),
        "mode": np.array([MODES.index("le"), MODES.index("gt"), 0, 0, 0, 0], np.uint8),
        "yes": np.array([1, 2, 0, 0, 0, 0], np.int32),
        "no": np.array([4, 3, 0, 0, 0, 0], np.int32),
        "missing": np.array([True, False, False, False, False, False]),
        "roots": np.array([0, 5], np.int32),
        "first": np.array([0, 0, 0, 1, 2, 3, 4], np.int32),
        "target": np.zeros(4, np.int32),
        "weight": np.array([1, 2, 4, 8], np.float32),
    }
    g = Graph()
    values = [g.constant(a) for a in tables.values()]
    g.output(g.add(TreeEnsemble(1, 2, aggregate), g.input("x", x.shape), *values)[0], "y")
    return run_graph(g, {"x": x})["y"][:, 0]


X = np.array([[2, -1], [0, 0], [0, 3], [2, np.nan]], np.float32)


@pytest.mark.parametrize(
    "aggregate, expected",
    [("sum", [9, 10, 12, 9]), ("average", [4.5, 5, 6, 4.5]), ("min", [1, 2, 4, 1]), ("max", [8, 8, 8, 8])],
)
def test_every_row_takes_its_way(aggregate: str, expected: list[float]) -> None:
    """Comparisons, a missing value that goes to yes, a tree of one leaf, and the aggregates."""
    np.testing.assert_array_equal(_scores(X, aggregate), expected)


def test_features_and_aggregates_are_checked() -> None:
    """A feature that x lacks stops the run; an unknown aggregate is refused at once."""
    with pytest.raises(ExecutionError, match="feature 7 of 2"):
        _scores(X, feature=7)
    with pytest.raises(OptionError, match="median"):
        _scores(X, "median")
