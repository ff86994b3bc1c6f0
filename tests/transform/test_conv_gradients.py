"""Gradients of convolutions by their weights: one convolution or a product for each tap, and weights under vmap."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.ops.gradients import products

RNG = np.random.default_rng(11)
CASES = [
    # x, w, strides, dilations, pads, groups
    ((2, 3, 7), (4, 3, 3), (1,), (1,), (1, 1), 1),
    ((2, 4, 9), (6, 2, 2), (2,), (3,), (0, 1), 2),
    ((3, 5, 6, 5), (5, 1, 3, 2), (2, 1), (1, 2), (1, 0, 2, 1), 5),
    ((1, 2, 12, 12), (3, 2, 5, 3), (3, 2), (1, 1), (0, 0, 0, 0), 1),
    ((2, 2, 4, 5, 4), (4, 1, 2, 2, 3), (1, 2, 1), (2, 1, 1), (1, 0, 0, 0, 1, 1), 2),
    ((2, 20, 11, 11), (3, 20, 3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 1),
]


def slope(case: Any, given: Any, device: str) -> Any:
    _, _, strides, dilations, pads, groups = case

    def loss(w: Any, x: Any, c: Any) -> Any:
        y = ops.conv(x, w, strides=strides, dilations=dilations, pads=pads, groups=groups)
        return rlx.reduce_sum(ops.sin(y) * c, keepdims=False)

    return rlx.jit(lambda w, x, c, u: (rlx.grad(loss)(w, x, c), rlx.hvp(loss, (w, x, c), (u, x, c))), device=device)(
        *given
    )


def arrays(case: Any) -> Any:
    x, w = (RNG.standard_normal(s) for s in case[:2])
    y = rlx.jit(lambda x, w: ops.conv(x, w, strides=case[2], dilations=case[3], pads=case[4], groups=case[5]))(x, w)
    return w, x, RNG.standard_normal(y.shape), RNG.standard_normal(w.shape)


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_ways_agree(case: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """First and second derivatives, however the gradient is written."""
    given = arrays(case)
    monkeypatch.setattr(products, "_is_convolution", lambda *_: False)
    by_taps = slope(case, given, device)
    monkeypatch.setattr(products, "_is_convolution", lambda *_: True)
    for a, b in zip(by_taps, slope(case, given, device), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sizes", ["known", "open"])
@pytest.mark.parametrize("case", [
    *CASES,
    ((2, 3, 9, 8), (4, 3, 3, 3), (1, 1), (1, 1), (-1, 1, 1, -2), 1),
    ((2, 3, 9, 8), (4, 3, 2, 3), (1, 1), (1, 1), (4, 0, 3, 5), 1),
    ((2, 3, 10, 8), (4, 3, 2, 2), (3, 3), (1, 1), (1, 0, 0, 0), 1),
    ((1, 2, 1, 1), (2, 2, 1, 1), (5, 5), (1, 1), (2, 2, 0, 0), 1),
    ((1, 2, 3, 3), (2, 2, 1, 1), (7, 7), (1, 1), (3, 3, 0, 0), 1),
], ids=str)  # fmt: skip
def test_gradients_of_images_are_the_transposed_convolution(case: Any, sizes: str) -> None:
    """<c, conv(u)> = <gradient for c, u>, with any pads, whatever windows do not reach."""
    x, w = (RNG.standard_normal(s) for s in case[:2])

    def moved(u: Any, w: Any) -> Any:
        return ops.conv(u, w, strides=case[2], dilations=case[3], pads=case[4], groups=case[5])

    y = rlx.jit(moved, device="cpu")(x, w)
    c = RNG.standard_normal(y.shape)
    open_sizes = {"u": ("n", None, *(f"s{d}" for d in range(x.ndim - 2)))} if sizes == "open" else {}
    slope = rlx.grad(lambda u, w, c: rlx.reduce_sum(moved(u, w) * c, keepdims=False))
    if sizes == "open":
        slope = rlx.grad(lambda u, w: rlx.reduce_sum(ops.sin(moved(u, w)), keepdims=False))
        c = np.cos(y)
    found = rlx.jit(slope, dims=open_sizes, device="cpu")(x, w, *([] if sizes == "open" else [c]))
    assert found.shape == x.shape
    u = RNG.standard_normal(x.shape)
    np.testing.assert_allclose(np.vdot(found, u), np.vdot(c, rlx.jit(moved, device="cpu")(u, w)), rtol=1e-9)


def test_one_convolution_for_a_weight() -> None:
    """The gradient of a weight of nine taps has no nine products, as far as all sizes are known."""
    x, w = np.zeros((2, 3, 8, 8), "f"), np.zeros((4, 3, 3, 3), "f")

    def loss(w: Any, x: Any) -> Any:
        return rlx.reduce_sum(ops.tanh(ops.conv(x, w)), keepdims=False)

    known = str(rlx.jit(rlx.grad(loss)).lower(w, x))
    assert known.count("matmul(") == 0
    assert known.count("conv(") == 2
    any_batch = str(rlx.jit(rlx.grad(loss), dims={"x": ("n", None, None, None)}).lower(w, x))
    assert any_batch.count("matmul(") == 9


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("shared", [True, False])
def test_gradients_of_each_image(groups: int, shared: bool, caplog: pytest.LogCaptureFixture) -> None:
    """vmap of a gradient is one program without a loop, whether the weight is shared or each image has its own."""
    x, w, b = (
        RNG.standard_normal((3, 2, 4, 6)),
        RNG.standard_normal((3, 4, 4 // groups, 3)),
        RNG.standard_normal((3, 4)),
    )
    w, b = (w[0], b[0]) if shared else (w, b)

    def loss(w: Any, b: Any, x: Any) -> Any:
        return rlx.reduce_sum(ops.sin(ops.conv(x, w, b, pads=(1, 1), groups=groups)), keepdims=False)

    axes = (None, None, 0) if shared else (0, 0, 0)
    with caplog.at_level(logging.WARNING, "rlx"):
        found = rlx.vmap(rlx.grad(loss, (0, 1, 2)), axes)(w, b, x)
    assert "runs as a loop" not in caplog.text
    for i in range(3):
        own = rlx.grad(loss, (0, 1, 2))(*((w, b) if shared else (w[i], b[i])), x[i])
        for a, e in zip(found, own, strict=True):
            np.testing.assert_allclose(a[i], e, rtol=1e-10, atol=1e-10)
