"""Whether a library computes products of f32 in f32, as `precision` has it."""

from __future__ import annotations

import numpy as np

from rlx.backends.library.arrays import Arrays
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph
from rlx.kernels.lowering import Conv as ConvAnchor
from rlx.kernels.lowering import lower_node
from rlx.ops.conv import Conv

__all__ = ["multiplies_f32"]


def multiplies_f32(lib: Arrays) -> bool:
    """Whether products of f32 are multiplied and accumulated in f32, which settings of a library may keep it from.

    What 1 is multiplied with has to come out to the last bit, and a sum to the bits that f32 has for it in any order.
    The sizes are those for which GPUs use their fast units.
    """
    n = 256
    bits = np.random.default_rng(0).integers(0, 1 << 23, (n, n), np.uint32) | np.uint32(0x3F800000)
    any_, ones, one_each = bits.view(np.float32), np.ones((n, n), np.float32), np.eye(n, dtype=np.float32)
    near = ones + np.float32(2.0**-14)  # sums of up to 256 of them are exact in f32
    graph = Graph("f32")
    graph.add(Conv(), graph.input("x", (1, n, 16, 16)), graph.input("w", (n, n, 1, 1)))
    lowered = lower_node(graph.nodes[0])
    assert lowered is not None
    assert isinstance(lowered.anchor, ConvAnchor)
    for w, x in ((any_, one_each), (one_each, any_), (near, ones), (ones, near)):
        with lib.session():
            left, right = lib.put(w), lib.put(x)
            made = [lib.matmul(left, right, DTYPES["f32"])]
            made.append(lib.conv(right.reshape((1, n, 16, 16)), left.reshape((n, n, 1, 1)), lowered.anchor))
            found = [lib.fetch(y).reshape(n, n) for y in made if y is not None]
        if not all(np.array_equal(y, w.astype(np.float64) @ x) for y in found):
            return False
    return True
