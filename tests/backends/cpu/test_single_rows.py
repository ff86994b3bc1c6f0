"""Matrices of one row each with the same weights are one product: what batches of decoders compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx

ENDINGS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "plain": lambda x, w, r, s: x @ w,
    "epilogue": lambda x, w, r, s: rlx.gelu(x @ w) * s + r,
    "transposed": lambda x, w, r, s: rlx.transpose(x @ w + r, (1, 0, 2)),
    "columns first": lambda x, w, r, s: rlx.transpose(x @ w, (2, 0, 1)),
    "softmax": lambda x, w, r, s: rlx.softmax(x @ w + r, axis=-1),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("batch", [1, 2, 8, 40, rlx.Dim("B", 1, 50)], ids=str)
def test_rows_of_a_batch(batch: Any, ending: str) -> None:
    g = rlx.Graph("rows")
    x, r, s = g.input("x", (batch, 1, 64)), g.input("r", (batch, 1, 96)), g.input("s", (batch, 1, 1))
    rng = np.random.default_rng(0)
    w = g.param("w", data=rng.standard_normal((64, 96), dtype=np.float32))
    g.output(ENDINGS[ending](x, w, r, s), name="y")
    model, reference = rlx.compile(g, device="cpu"), rlx.compile(g, device="reference")
    products = [k.anchor for k in model._executable.shared.program.run if k.kind == "contract"]  # type: ignore[attr-defined]
    assert [p.m for p in products] == [batch]
    for n in (1, 3, 50) if isinstance(batch, rlx.Dim) else (batch,):
        shapes = {"x": (n, 1, 64), "r": (n, 1, 96), "s": (n, 1, 1)}
        given = {i.name: rng.standard_normal(shapes[i.name], dtype=np.float32) for i in model.inputs}
        np.testing.assert_allclose(model.run(given)[0], reference.run(given)[0], rtol=1e-4, atol=1e-4)
