"""Convolutions in groups of few and of more outputs, with strides, gaps and pads, in one to three axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.reference import run_graph
from rlx.ops.conv import Conv


def cases(count: int, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)

    def some(low: int, high: int, count: int) -> tuple[int, ...]:
        return tuple(int(x) for x in rng.integers(low, high, count))

    made = []
    for at in range(count):
        rank = (1, 2, 2, 3)[at % 4]
        made.append(
            {
                "groups": int(rng.choice((2, 3, 4, 5, 6, 7, 8, 16, 32))),
                "channels": int(rng.choice((1, 2, 3, 4, 5, 8, 16, 17))),
                "outputs": int(rng.choice((1, 2, 3, 4, 5, 8, 9, 16, 18))),
                "batch": 1 + at % 2,
                "size": some(7, 16, rank),
                "kernel": some(1, 4, rank),
                "window": (some(1, 4, rank), some(1, 4, rank), some(0, 3, 2 * rank)),
                "kind": "f64" if at % 5 == 0 else "f32",
                "after": at % 3 > 0,
            }
        )
    return made


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", cases(150, 3), ids=lambda c: "-".join(map(str, c.values())))
def test_groups_are_right(case: dict[str, Any]) -> None:
    """Close to the reference; the same bits with several threads, and with an open batch."""
    rng = np.random.default_rng(1)
    groups, own, outputs = case["groups"], case["channels"], case["outputs"]
    kind, weights = case["kind"], (groups * outputs, own, *case["kernel"])

    def graph(batch: Any) -> rlx.Graph:
        g = rlx.Graph("groups")
        x = g.input("x", (batch, groups * own, *case["size"]), dtype=kind)
        (y,) = g.add(Conv(*case["window"], groups), x, g.param("w", weights, dtype=kind))
        g.output(rlx.relu(y + g.input("rest", y.shape, dtype=kind)) if case["after"] else y, "y")
        return g

    fixed = graph(case["batch"])
    dtype = np.dtype(kind.replace("f", "float"))
    feed = {v.name: rng.standard_normal(v.shape).astype(dtype) for v in fixed.inputs}
    w = rng.standard_normal(weights).astype(dtype)
    want = next(iter(run_graph(fixed, feed, {"w": w}).values()))
    results = []
    for g, threads in ((fixed, 1), (fixed, 3), (graph(rlx.Dim("n", 1, 4)), 2)):
        model = rlx.compile(g, device="cpu", threads=threads, cache=False)
        model.set_params({"w": w})
        results.append(model.run(feed)[0])
    assert np.allclose(results[0], want, rtol=1e-5, atol=1e-5 * np.prod(weights[1:]))
    assert all(np.array_equal(results[0], x) for x in results[1:])


@pytest.mark.parametrize("size", [(7, 7), (5, 9), (23, 24)])
@pytest.mark.parametrize(
    "groups, own, outputs",
    [(32, 4, 4), (8, 16, 16), (6, 5, 7), (3, 8, 12), (2, 40, 24), (4, 3, 22), (2, 33, 32), (2, 9, 72), (2, 8, 78)],
)
def test_single_pixels_have_the_bits_of_open_sizes(groups: int, own: int, outputs: int, size: tuple[int, int]) -> None:
    """Between planes of known size they are products of few rows, of open size they are not."""

    def model(height: Any) -> rlx.Model:
        g = rlx.Graph("groups")
        x = g.input("x", (2, groups * own, height, size[1]))
        (y,) = g.add(Conv((1, 1), (1, 1), (0, 0, 0, 0), groups), x, g.param("w", (groups * outputs, own, 1, 1)))
        g.output(rlx.relu(y), "y")
        made = rlx.compile(g, device="cpu", threads=2, cache=False)
        made.set_params({"w": w})
        return made

    rng = np.random.default_rng(2)
    w = rng.standard_normal((groups * outputs, own, 1, 1)).astype(np.float32)
    x = rng.standard_normal((2, groups * own, *size)).astype(np.float32)
    products = np.einsum("gok,ngkp->ngop", w.reshape(groups, outputs, own), x.reshape(2, groups, own, -1))
    fixed, opened = (model(height).run([x])[0] for height in (size[0], rlx.Dim("h", 1, 64)))
    assert np.allclose(fixed, np.maximum(products, 0).reshape(fixed.shape), rtol=1e-5, atol=1e-5 * own)
    assert np.array_equal(fixed, opened)


@pytest.mark.parametrize("outputs, channels", [(1, 2), (2, 1), (2, 2), (4, 4)])
def test_other_groups_are_not_read(outputs: int, channels: int) -> None:
    """What is not finite in a group stays in its outputs, of a last pixel too."""
    groups = 6
    g = rlx.Graph("groups")
    x = g.input("x", (1, groups * channels, 5, 5))
    (y,) = g.add(Conv((1, 1), (1, 1), (1, 1, 1, 1), groups), x, g.param("w", (groups * outputs, channels, 3, 3)))
    g.output(y, "y")
    model = rlx.compile(g, device="cpu", cache=False)
    assert "conv.grouped" in model.explain("kernels")
    model.set_params({"w": np.ones((groups * outputs, channels, 3, 3), np.float32)})
    image = np.ones((1, groups, channels, 5, 5), np.float32)
    image[0, 2, 0, 4, 4] = np.nan
    found = np.isnan(model.run([image.reshape(x.shape)])[0]).reshape(groups, outputs, 5, 5)
    expected = np.zeros_like(found)
    expected[2, :, 3:, 3:] = True
    assert np.array_equal(found, expected)
