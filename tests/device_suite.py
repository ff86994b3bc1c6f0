"""What every device that compiles kernels is asked: all ops and random graphs, against the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import ExecutionError
from rlx.ops.base import OPS
from rlx.ops.select import Produced
from rlx.testing.cases import covered, fixed_cases, symbolic_cases
from rlx.testing.graphs import random_graph
from rlx.testing.oracle import Batch, Case, Tolerance, check, compare_arrays, compare_results, tolerances

NAMES = [name for name in sorted(OPS) if covered(name)]
DECIDING = [name for name in NAMES if issubclass(OPS[name], Produced)]  # their data decide a size
RUN = [name for name in NAMES if name not in DECIDING]
MOST_CASES = 25  # of an op in a quick run
Some = Callable[[Sequence[Case], int], list[Case]]  # as in tests/conftest.py


def parts(cases: Sequence[Case]) -> list[list[Case]]:
    """The cases of several graphs, since messages of a failure show the cases of one."""
    return [list(cases[n : n + MOST_CASES]) for n in range(0, max(len(cases), 1), MOST_CASES)]


def check_op(device: str, name: str, some: Some) -> None:
    """All dtypes, odd and zero sizes, broadcasts, transposed operands, params and special values."""
    for part in parts(some(fixed_cases(name), MOST_CASES)):
        assert check(part, device=device) > 0


def check_symbolic_op(device: str, name: str, some: Some) -> None:
    """One compile serves all extents within the bounds."""
    for (dims, *cases), extents in symbolic_cases(name):
        for part in parts(some(cases, MOST_CASES)):
            assert check([dims, *part], device=device, extents=extents) > 0


def check_deciding_op(device: str, name: str, some: Some, most: int = 5) -> None:
    """Each case gives what the op's `reference` gives, and stops where that does."""
    for one in some(fixed_cases(name), most):  # each compiled by itself
        batch = Batch([one])
        inputs, params = batch.arrays()
        model = rlx.compile(batch.graph, device=device)
        model.set_params(params)
        arrays = [a.T if one.turned else a for a in (*inputs.values(), *params.values())]
        try:
            made: Any = one.op.reference(*arrays)
        except ExecutionError as error:
            with pytest.raises(ExecutionError, match=str(error) if device == "reference" else None):
                model(inputs)
            continue
        results = made if isinstance(made, tuple) else (made,)
        for got, expected in zip(model(inputs).values(), results, strict=True):
            compare_arrays(str(one), np.asarray(got), expected, Tolerance(0, 0))


def check_random_graph(device: str, seed: int) -> None:
    """Graphs of many ops, with one plan and a chain of buffers that lie over each other, at two sets of extents."""
    graph, make_inputs = random_graph(seed, 15)
    model = rlx.compile(graph, device=device, debug=seed % 2 == 0)
    for extents in (1, 2):
        inputs = make_inputs(extents)
        expected = run_graph(graph, inputs)
        compare_results(expected, model(inputs), tolerances(graph))
