"""Tree ensembles on the CPU against the reference, bit for bit: all tests and aggregates, NaN, any shape of tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.kernels.ops.tree_ensemble import TABLES
from rlx.backends.reference import run_graph
from rlx.errors import ExecutionError
from rlx.ir.dtype import dtype_of
from rlx.ir.graph import Array, Graph
from rlx.ir.shape import Dim
from rlx.ops.ml import AGGREGATES, MODES, TreeEnsemble

Tables = dict[str, Array]


def forest(
    seed: int, dtype: Any, *, modes: tuple[str, ...], trees: int, features: int, targets: int, most: int, depth: int
) -> tuple[Tables, int]:
    """Random trees and the longest way in them; a leaf has up to `most` weights (exactly one where that is 1)."""
    rng = np.random.default_rng(seed)
    rows: list[list[Any]] = []
    weights: dict[int, list[tuple[int, float]]] = {}

    def grow(level: int) -> tuple[int, int]:
        number = len(rows)
        rows.append([0, 0.0, 0, 0, 0, False])
        if level == 0 or rng.random() < 0.15:
            count = 1 if most == 1 else int(rng.integers(0, most + 1))
            weights[number] = [(int(rng.integers(targets)), float(rng.standard_normal())) for _ in range(count)]
            return number, 0
        (yes, a), (no, b) = grow(level - 1), grow(level - 1)
        limit = rng.choice([rng.standard_normal(), 0.0, -0.0, 1.0, np.inf, -np.inf, np.nan], p=[0.7] + [0.05] * 6)
        mode = MODES.index(str(rng.choice(modes)))
        rows[number] = [int(rng.integers(features)), limit, mode, yes, no, bool(rng.random() < 0.4)]
        return number, 1 + max(a, b)

    grown = [grow(int(rng.integers(0, depth + 1))) for _ in range(trees)]
    pairs = [weights.get(n, []) for n in range(len(rows))]
    kinds = (np.int32, dtype, np.uint8, np.int32, np.int32, np.bool_)
    tables = {
        name: np.array([row[i] for row in rows], kind)
        for i, (name, kind) in enumerate(zip(TABLES, kinds, strict=False))
    }
    flat = [p for some in pairs for p in some]
    tables["roots"] = np.array([root for root, _ in grown], np.int32)
    tables["first"] = np.cumsum([0, *map(len, pairs)]).astype(np.int32)
    tables["target"] = np.array([t for t, _ in flat], np.int32)
    tables["weight"] = np.array([w for _, w in flat], dtype)
    return tables, max((d for _, d in grown), default=0)


def rows_of(seed: int, count: int, features: int, dtype: Any) -> Array:
    rng = np.random.default_rng(seed)
    special = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0], (count, features))
    return np.where(rng.random((count, features)) < 0.3, special, rng.standard_normal((count, features))).astype(dtype)


def graph_of(op: TreeEnsemble, tables: Tables, features: int, *, as_inputs: bool = False) -> Graph:
    graph, dtype = Graph("forest"), dtype_of(tables["threshold"].dtype)
    x = graph.input("x", (Dim("rows", 0, 300), features), dtype)
    make = graph.input if as_inputs else None
    values = [
        make(n, tables[n].shape, dtype_of(tables[n].dtype)) if make else graph.constant(tables[n]) for n in TABLES
    ]
    graph.output(graph.add(op, x, *values, name="culprit")[0], "y")
    return graph


FORESTS: dict[str, dict[str, Any]] = {
    "one weight a leaf": {"modes": ("le",), "trees": 21, "features": 5, "targets": 1, "most": 1, "depth": 9},
    "strict tests": {"modes": ("lt", "ge", "gt", "le"), "trees": 8, "features": 3, "targets": 1, "most": 1, "depth": 6},
    "all tests": {"modes": MODES[1:], "trees": 17, "features": 4, "targets": 3, "most": 4, "depth": 7},
    "stumps and leaves": {"modes": ("le", "ne"), "trees": 5, "features": 2, "targets": 2, "most": 1, "depth": 1},
    "leaves alone": {"modes": ("le",), "trees": 3, "features": 1, "targets": 2, "most": 3, "depth": 0},
    "no trees": {"modes": ("le",), "trees": 0, "features": 1, "targets": 2, "most": 1, "depth": 0},
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("name", FORESTS)
def test_every_forest_equals_the_reference(name: str, aggregate: str) -> None:
    """Numbers of rows around the eight that walk together; the bits do not depend on rows or threads."""
    for dtype in (np.float32, np.float64):
        tables, depth = forest(7, dtype, **FORESTS[name])
        features = FORESTS[name]["features"]
        graph = graph_of(TreeEnsemble(FORESTS[name]["targets"], depth, aggregate), tables, features)
        models = [rlx.compile(graph, device="cpu", threads=threads) for threads in (1, 3)]
        assert "pack trees" in models[0].explain("fuse")
        for count in (0, 1, 7, 8, 9, 61, 300):
            x = rows_of(count, count, features, dtype)
            expected = run_graph(graph, {"x": x})["y"]
            for model in models:
                np.testing.assert_array_equal(model({"x": x})["y"], expected, err_msg=f"{count} rows")


def test_tables_that_change_between_runs() -> None:
    """As inputs, the tables are packed in each run."""
    for seed in (1, 2):
        tables, depth = forest(seed, np.float32, **(FORESTS["all tests"] | {"trees": 4, "depth": 3}))
        graph = graph_of(TreeEnsemble(3, depth), tables, 4, as_inputs=True)
        x = rows_of(3, 20, 4, np.float32)
        got = rlx.compile(graph, device="cpu")({"x": x, **tables})["y"]
        np.testing.assert_array_equal(got, run_graph(graph, {"x": x, **tables})["y"])


BROKEN = {
    "yes": 99,
    "no": -1,
    "roots": 1000,
    "target": 1,
    "mode": 7,
    "feature": 5,
    "first": 10**6,
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tables_stop_the_run(name: str) -> None:
    """Nodes, features, weights and targets that do not exist: an error that names the node, whatever the values."""
    tables, depth = forest(3, np.float32, **(FORESTS["one weight a leaf"] | {"trees": 2, "depth": 3}))
    inner = int(np.flatnonzero(tables["mode"])[0])
    tables[name][inner if name in ("yes", "no", "mode", "feature") else -1] = BROKEN[name]
    model = rlx.compile(graph_of(TreeEnsemble(1, depth), tables, 5), device="cpu")
    with pytest.raises(ExecutionError, match=f"culprit: index out of range .value {BROKEN[name]}."):
        model({"x": np.zeros((3, 5), np.float32)})


def test_a_tree_that_leads_back_to_itself_ends() -> None:
    """A walk takes `depth` steps at most, as in the reference."""
    tables, _ = forest(3, np.float32, **(FORESTS["one weight a leaf"] | {"trees": 1, "depth": 3}))
    tables["yes"][:], tables["no"][:] = 0, 0
    graph = graph_of(TreeEnsemble(1, 10), tables, 5)
    x = np.zeros((9, 5), np.float32)
    got = rlx.compile(graph, device="cpu")({"x": x})["y"]
    assert got.shape == (9, 1)
