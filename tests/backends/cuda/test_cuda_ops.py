"""Every op on the device against the reference, and random graphs."""

from __future__ import annotations

import pytest
from device_suite import (
    DECIDING,
    RUN,
    Some,
    check_deciding_op,
    check_op,
    check_random_graph,
    check_symbolic_op,
)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", RUN)
def test_op(name: str, some: Some) -> None:
    check_op("cuda", name, some)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", RUN)
def test_op_of_symbolic_sizes(name: str, some: Some) -> None:
    check_symbolic_op("cuda", name, some)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", DECIDING)
def test_op_whose_data_decide_a_size(name: str, some: Some) -> None:
    check_deciding_op("cuda", name, some)


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(600))
def test_random_graphs(seed: int) -> None:
    check_random_graph("cuda", seed)
