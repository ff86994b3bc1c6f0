"""Attention as one kernel: tiles of keys that end early, masks, heads that share keys, all in f32 and in 16 bits."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx.ops.attention import Attention

CASES = {  # attributes; batch, heads, heads of keys, rows, keys, depth, depth of values; shapes of biases
    "plain": (Attention(), (1, 2, 2, 40, 70, 32, 32), ()),
    "deep": (Attention(), (2, 1, 1, 33, 65, 128, 120), ()),
    "grouped": (Attention(), (1, 4, 2, 9, 130, 16, 24), ()),
    "causal": (Attention(None, True), (1, 2, 1, 70, 90, 16, 16), ()),
    "early": (Attention(None, True, "zero"), (1, 1, 1, 40, 20, 16, 16), ()),
    "window": (Attention(None, True, window=30), (1, 1, 1, 80, 150, 16, 16), ()),
    "bias": (Attention(0.4), (2, 2, 2, 20, 40, 8, 8), ((2, 1, 1, 40),)),
    "softcap": (Attention(steps=("softcap", "add")), (1, 2, 2, 17, 19, 40, 40), ((1, 1), (17, 19))),
}
CLOSE = {"f32": 3e-6, "bf16": 1.5e-2, "f16": 2e-3}


@pytest.mark.sample(9)
@pytest.mark.parametrize("precision", CLOSE)
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, precision: str) -> None:
    op, (batch, heads, own, rows, keys, depth, width), biases = CASES[name]
    rng = np.random.default_rng(len(name))
    shapes = ((batch, heads, rows, depth), (batch, own, keys, depth), (batch, own, keys, width), *biases)
    g = rlx.Graph("attention")
    leaves = [g.input(f"x{n}", shape) for n, shape in enumerate(shapes)]
    (y,) = g.add(op, *leaves)
    g.output(rlx.transpose(y, (0, 2, 1, 3)), "y")
    inputs = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    model = rlx.compile(g, device="cuda", precision=precision)
    assert [k.kind for k in model._executable.program.run].count("attention") == 1
    (got,) = model.run(inputs)
    (expected,) = rlx.compile(g, device="reference").run(inputs)
    assert np.abs(got.numpy() - expected).max() <= CLOSE[precision] * np.abs(expected).max()


def test_special_values() -> None:
    """NaN and infinities of keys, and rows that see nothing, give what the reference gives."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 3, 20, 16)).astype(np.float32) for _ in range(3))
    k[0, 0, 3, 2], k[0, 1, 4, 1] = np.nan, np.inf
    bias = np.zeros((20, 20), np.float32)
    bias[5] = -np.inf
    for empty in ("nan", "zero", "mended"):
        g = rlx.Graph("special")
        leaves = [g.input(f"x{n}", a.shape) for n, a in enumerate((q, k, v, bias))]
        g.output(g.add(Attention(None, False, empty), *leaves)[0], "y")
        (got,) = rlx.compile(g, device="cuda").run([q, k, v, bias])
        (expected,) = rlx.compile(g, device="reference").run([q, k, v, bias])
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-6)
