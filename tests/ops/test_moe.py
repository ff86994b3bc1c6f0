"""Mixtures of experts: the layer is what its definition says, on every path of its kernel, and bad ones are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import DTypeError, ExecutionError, OptionError, ShapeError

HIDDEN, INNER, EXPERTS = 40, 24, 6


def weights(rng: Any) -> dict[str, Any]:
    shapes = {
        "router": (HIDDEN, EXPERTS),
        "gate": (EXPERTS, HIDDEN, INNER),
        "up": (EXPERTS, HIDDEN, INNER),
        "down": (EXPERTS, INNER, HIDDEN),
    }
    return {name: rng.standard_normal(shape, dtype=np.float32) / 5 for name, shape in shapes.items()}


def expected(x: Any, w: dict[str, Any], top_k: int, normalize: bool) -> Any:
    """Token by token."""
    out = np.zeros_like(x)
    for token, row in enumerate(x):
        logits = row @ w["router"]
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
        best = np.argsort(-scores, kind="stable")[:top_k]
        share = scores[best] / (scores[best].sum() if normalize else 1)
        for part, expert in zip(share, best, strict=True):
            gate, up = row @ w["gate"][expert], row @ w["up"][expert]
            out[token] += part * ((gate / (1 + np.exp(-gate)) * up) @ w["down"][expert])
    return out


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_a_layer_is_the_weighted_sum_of_what_its_experts_give(normalize: bool, transposed: bool) -> None:
    rng = np.random.default_rng(3)
    w = weights(rng)
    g = rlx.Graph("moe")
    x = g.input("x", (rlx.Dim("tokens", 1, 300), HIDDEN))
    turn = {n: a.swapaxes(1, 2) if transposed and a.ndim == 3 else a for n, a in w.items()}
    params = [g.param(name, data=np.ascontiguousarray(array)) for name, array in turn.items()]
    g.output(rlx.moe(x, *params, top_k=2, normalize=normalize, transposed=transposed), name="y")
    model = rlx.compile(g, device="cpu")
    assert "host" not in model.explain("dispatch")
    for tokens in (1, 3, 300):  # rows of their own; some together; more than a block of them
        data = rng.standard_normal((tokens, HIDDEN), dtype=np.float32)
        assert np.allclose(model(x=data)["y"], expected(data, w, 2, normalize), rtol=1e-4, atol=1e-5)


def test_a_row_has_the_same_bits_whoever_its_neighbours_are() -> None:
    rng = np.random.default_rng(4)
    w = weights(rng)
    data = rng.standard_normal((200, HIDDEN), dtype=np.float32)
    results = []
    for size, threads in ((rlx.Dim("tokens", 1, 200), 1), (200, 2)):
        g = rlx.Graph("moe")
        params = [g.param(name, data=array) for name, array in w.items()]
        g.output(rlx.moe(g.input("x", (size, HIDDEN)), *params, top_k=3), name="y")
        model = rlx.compile(g, device="cpu", threads=threads)
        results.append(model(x=data)["y"])
        if threads == 1:
            assert np.array_equal(model(x=data[7:8])["y"][0], results[0][7])
            assert np.array_equal(model(x=data[:50])["y"], results[0][:50])
    assert np.array_equal(*results)


def test_experts_outside_stop_the_run() -> None:
    g = rlx.Graph("grouped")
    x, experts = g.input("x", (3, 4)), g.input("experts", (3,), "i32")
    g.output(rlx.grouped_matmul(x, g.param("w", data=np.ones((2, 4, 5), np.float32)), experts), name="y")
    rows = np.ones((3, 4), np.float32)
    model = rlx.compile(g, device="cpu")
    assert np.array_equal(model(x=rows, experts=np.int32([0, -1, 1]))["y"], np.full((3, 5), 4, np.float32))
    for bad in (2, -3):
        with pytest.raises(ExecutionError, match=str(bad)):
            model(x=rows, experts=np.int32([0, bad, 1]))
        with pytest.raises(ExecutionError, match=str(bad)):
            run_graph(g, {"x": rows, "experts": np.int32([0, bad, 1])})


def test_what_does_not_fit_is_refused() -> None:
    g = rlx.Graph("bad")
    x, w = g.input("x", (3, 4)), g.param("w", (2, 4, 5))
    with pytest.raises(ShapeError, match="contracted"):
        rlx.grouped_matmul(x, w, g.input("a", (3,), "i32"), transposed=True)
    with pytest.raises(ShapeError, match="one row"):
        rlx.grouped_matmul(x, w, g.input("b", (3, 1), "i32"))
    with pytest.raises(ShapeError, match="axis 0"):
        rlx.grouped_matmul(x, w, g.input("c", (4,), "i32"))
    with pytest.raises(ShapeError, match="rank 3"):
        rlx.grouped_matmul(x, g.param("v", (4, 5)), g.input("d", (3,), "i32"))
    with pytest.raises(DTypeError, match="indices"):
        rlx.grouped_matmul(x, w, g.input("e", (3,)))
    router, down = g.param("router", (4, 2)), g.param("down", (2, 5, 4))
    for top_k in (0, 3, 1.0):
        with pytest.raises(OptionError, match="top_k"):
            rlx.moe(x, router, w, None, down, top_k=top_k)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="activation"):
        rlx.moe(x, router, w, None, down, top_k=1, activation="swish")  # type: ignore[arg-type]
