"""Pools of large windows: split ones give what whole ones do, maxima in bits, means and norms but for rounding."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx.ir.dtype import DTYPES
from rlx.ops.pool import AveragePool, MaxPool
from rlx.ops.pool_more import LpPool
from rlx.passes.split_pools import split_pools


def case(seed: int) -> tuple[rlx.Graph, np.ndarray]:
    """A pool of at least 16 taps, with random steps, pads and sizes, and its input; a third has inf and nan."""
    while True:
        rng = np.random.default_rng(seed)
        rank = int(rng.integers(1, 4))
        kernel = tuple(int(k) for k in rng.integers(1, 14, rank))
        strides, dilations = (tuple(int(k) for k in rng.integers(1, most, rank)) for most in (4, 3))
        reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
        pads = tuple(int(rng.integers(0, r)) for r in (*reach, *reach))
        shape = (1, 2, *(int(max(1, r + rng.integers(-3, 12))) for r in reach))
        dtype = ("f32", "f64", "f16", "i8", "i32")[rng.integers(5)]
        ceil_mode, padded, largest = (bool(b) for b in rng.integers(0, 2, 3))
        op = (
            MaxPool(kernel, strides, pads, dilations, ceil_mode)
            if largest or dtype[0] == "i"
            else LpPool(kernel, strides, pads, dilations, ceil_mode, 1 + seed % 3)
            if seed % 4 > 1
            else AveragePool(kernel, strides, pads, dilations, ceil_mode, padded)
        )
        g = rlx.Graph("pool")
        x = g.input("x", shape, dtype=dtype)
        seed += 1_000_003
        if np.prod(kernel) < 16:
            continue
        try:
            g.output(g.add(op, x)[0], "y")
        except rlx.errors.ShapeError:  # no window fits
            continue
        data = (rng.standard_normal(shape) * 50).astype(DTYPES[dtype].numpy)
        if dtype[0] == "f" and rng.random() < 0.3:
            data.flat[rng.integers(data.size)] = np.nan
            data.flat[rng.integers(data.size)] = np.inf
        return g, data


@pytest.mark.sample(40)
@pytest.mark.parametrize("seed", range(400))
def test_random_pools(seed: int) -> None:
    g, data = case(seed)
    want, found = (rlx.compile(g, device=device, cache=False).run([data])[0] for device in ("reference", "cpu"))
    assert want.dtype == found.dtype
    if any(isinstance(node.op, MaxPool) for node in g.nodes):
        np.testing.assert_array_equal(found, want)
    else:
        coarse = want.dtype == np.float16
        wide = (a.astype(np.float64) for a in (found, want))
        np.testing.assert_allclose(*wide, rtol=2e-3 if coarse else 1e-5, atol=0.05 if coarse else 1e-4)


def test_a_long_maximum_takes_few_steps() -> None:
    """Some log2 of the window, along each axis; open sizes too."""
    g = rlx.Graph("pool")
    x = g.input("x", (1, 3, rlx.Dim("h", 13, 99), 40))
    g.output(g.add(MaxPool((13, 13), (1, 1), (6,) * 4), x)[0], "y")
    pools = [node.op for node in split_pools(g).nodes if isinstance(node.op, MaxPool)]
    assert len(pools) == 8
    assert {sum(k > 1 for k in op.kernel) for op in pools} == {1}
    assert max(max(op.kernel) for op in pools) == 2


def test_places_keep_a_pool_whole() -> None:
    g = rlx.Graph("pool")
    for name, y in zip("yi", g.add(MaxPool((5, 5), with_indices=True), g.input("x", (1, 3, 9, 9))), strict=True):
        g.output(y, name)
    assert len(split_pools(g).nodes) == 1
