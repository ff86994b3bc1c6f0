"""Gradients of attention in blocks of query rows: those of one block, in less memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.transform import attention

RNG = np.random.default_rng(5)
Q, K, V = (RNG.standard_normal(s) for s in ((2, 4, 7, 3), (2, 2, 9, 3), (2, 2, 9, 5)))
BIAS, ROW, MASK = RNG.standard_normal((2, 1, 7, 9)), RNG.standard_normal((4, 1, 1)), RNG.random((7, 9)) > 0.2
SINKS = RNG.standard_normal(4)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": ((), {}),
    "bias": ((BIAS,), {}),
    "causal": ((), {"causal": True}),
    "window": ((ROW,), {"window": 3}),
    "steps": ((MASK, np.float64(-4.0), BIAS, np.float64(2.0)), {"steps": ("where", "mul", "softcap")}),
    "sinks": ((SINKS,), {"sinks": True, "causal": True, "steps": ()}),
    "placed": ((np.int64(1),), {"placed": True, "causal": True, "empty_row": "zero"}),
    "counted": ((np.array([8, 9]),), {"counted": True, "causal": True}),
    "both": ((np.array([1, 2]), np.array([8, 5])), {"counted": True, "placed": True, "window": 4, "empty_row": "zero"}),
}


def slopes(case: str, rows: int, monkeypatch: pytest.MonkeyPatch, device: str = "reference") -> Any:
    more, attributes = CASES[case]
    monkeypatch.setattr(attention, "BLOCK", rows * 2 * 4 * 9 * 8)
    smooth = (0, 1, 2, *(3 + i for i, m in enumerate(more) if np.asarray(m).dtype == np.float64))

    def loss(*x: Any) -> Any:
        return rlx.reduce_sum(ops.sin(ops.attention(*x, **attributes)), keepdims=False)

    return rlx.jit(rlx.grad(loss, smooth), device=device)(Q, K, V, *more)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_blocks_are_as_one(case: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, positions, counts and sinks go with the rows of a block."""
    for a, b in zip(slopes(case, rows, monkeypatch), slopes(case, 7, monkeypatch), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)
        assert np.abs(b).sum() > 0


def test_blocks_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for a, b in zip(slopes("causal", 3, monkeypatch, "cpu"), slopes("causal", 7, monkeypatch), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11)


def test_the_same_value_three_times() -> None:
    """Self-attention: each part of the gradient counts once."""
    x = RNG.standard_normal((1, 1, 4, 4))

    def loss(x: Any) -> Any:
        return rlx.reduce_sum(ops.sin(ops.attention(x, x, x)), keepdims=False)

    found = rlx.grad(loss)(x)
    step = np.zeros_like(x)
    step[0, 0, 1, 2] = 1e-6
    f = rlx.jit(loss)
    assert abs(found[0, 0, 1, 2] - (f(x + step) - f(x - step)) / 2e-6) < 1e-7


def test_no_square_of_the_length_is_kept() -> None:
    """The planned arena of the gradient stays far below one matrix of scores."""
    q = np.zeros((1, 2, 4096, 16), np.float32)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return rlx.reduce_sum(ops.attention(q, k, v, causal=True), keepdims=False)

    model = rlx.jit(rlx.grad(loss, (0, 1, 2)), device="cpu").compile(q, q, q)
    assert model.plan is not None
    scores = 2 * 4096 * 4096 * 4
    assert model.plan.arena < 0.5 * scores
