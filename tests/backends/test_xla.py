"""What is particular to the XLA device."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx.backends import backend_named
from rlx.backends.xla.backend import XlaExecutable
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim

FOUND = backend_named("xla").available()
pytestmark = pytest.mark.skipif(not FOUND.present, reason=f"{FOUND.reason}: {FOUND.remedy}")


def test_stablehlo_text() -> None:
    """The text has a module for the extents asked for, in the types of the graph; 64 bits stay 64 bits."""
    graph = Graph("text")
    x, w = graph.input("x", (Dim("n", 1, 9), 3), "f64"), graph.param("w", (3, 2), "f64")
    graph.output(x @ w, "y")
    executable = rlx.compile(graph, device="xla").compilation.executable
    assert isinstance(executable, XlaExecutable)
    text = executable.stablehlo({"n": 5})
    assert "stablehlo.dot_general" in text
    assert "tensor<5x3xf64>" in text


def test_64_bits_do_not_leak() -> None:
    """A run in 64-bit types leaves jax's own setting as it was."""
    import jax

    graph = Graph("wide")
    graph.output(graph.input("x", (2,), "i64") + graph.constant(2**40, "i64"), "y")
    before = jax.config.jax_enable_x64
    (got,) = rlx.compile(graph, device="xla").run([np.array([1, 2])])
    assert got.numpy().tolist() == [2**40 + 1, 2**40 + 2]
    assert jax.config.jax_enable_x64 == before
