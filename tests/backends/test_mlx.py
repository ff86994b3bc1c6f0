"""What is particular to the MLX device."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx.backends import backend_named
from rlx.ir.graph import Graph
from rlx.ops import elementwise

FOUND = backend_named("mlx").available()
pytestmark = pytest.mark.skipif(not FOUND.present, reason=f"{FOUND.reason}: {FOUND.remedy}")


def test_f64_functions_that_mlx_rounds_run_on_the_host() -> None:
    """MLX computes sin of f64 to three digits: the dispatch report says so, and the result has all digits."""
    graph = Graph("wide")
    graph.output(graph.add(elementwise.Sin(), graph.input("x", (100,), "f64"))[0] * 2.0, "y")
    model = rlx.compile(graph, device="mlx")
    x = np.linspace(-9, 9, 100)
    np.testing.assert_allclose(model.run([x])[0], 2 * np.sin(x), rtol=1e-14, atol=1e-15)
    report = model.explain("dispatch")
    assert "host" in report
    assert "sin" in report


def test_erf_near_zero() -> None:
    """MLX's own has four correct digits there."""
    graph = Graph("erf")
    graph.output(graph.add(elementwise.Erf(), graph.input("x", (5,)))[0], "y")
    got = rlx.compile(graph, device="mlx").run([np.array([1e-6, -1e-3, 0.02, 0.4999, 0.5], np.float32)])[0]
    expected = [1.1283791e-06, -1.1283788e-03, 2.2564575e-02, 5.2041211e-01, 5.2049988e-01]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_launches_are_those_of_nodes() -> None:
    """MLX makes no kernel of several nodes: its profile counts what runs there, not what fusion would make."""
    graph = Graph("chain")
    graph.output(rlx.tanh(rlx.exp(graph.input("x", (8,)))) + 1.0, "y")
    profile = rlx.profile(graph, "mlx")
    assert (profile.launches, profile.launches_before) == (3, 3)
    assert profile.kernels == profile.before
    assert rlx.profile(graph, "cpu").launches == 1
    assert len(rlx.profile(graph, "cpu").before) == 3
