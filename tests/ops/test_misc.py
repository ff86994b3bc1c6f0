"""BitCast and Det by their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from rlx.backends.reference import run_graph
from rlx.errors import DTypeError
from rlx.ir.graph import Graph
from rlx.ops.misc import BitCast, Det


def test_bit_cast_keeps_the_bits() -> None:
    """There and back is the identity, and a type of another width is refused."""
    g = Graph()
    x = g.input("x", (2, 3))
    (bits,) = g.add(BitCast("i32"), x)
    g.output(bits, "bits")
    g.output(g.add(BitCast("f32"), bits)[0], "back")
    value = np.array([[1.0, -0.0, np.inf], [2.5, -3.0, 1e-40]], np.float32)
    made = run_graph(g, {"x": value})
    np.testing.assert_array_equal(made["bits"], value.view(np.int32))
    np.testing.assert_array_equal(made["back"], value)
    with pytest.raises(DTypeError, match="of 32 bits, i64 of 64"):
        g.add(BitCast("i64"), x)


def test_det_of_a_batch() -> None:
    """The product of the eigenvalues, matrix by matrix."""
    g = Graph()
    g.output(g.add(Det(), g.input("x", (4, 3, 3)))[0], "y")
    x = np.random.default_rng(0).standard_normal((4, 3, 3)).astype(np.float32)
    want = np.prod(np.linalg.eigvals(x.astype(np.float64)), axis=-1).real
    np.testing.assert_allclose(run_graph(g, {"x": x})["y"], want, rtol=1e-4)
