"""Products with weights of f16 and bf16, which panels keep as they are: results have the bits of the same in f32."""

from __future__ import annotations

import numpy as np
import pytest
from targets import pretend

import rlx
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array

DTYPE = pytest.mark.parametrize("dtype", ["f16", "bf16"])
pytestmark = pytest.mark.needs("avx2")


@pytest.fixture(autouse=True)
def without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tile registers add parts of f32 up in another order than those of bf16, which are one part."""
    pretend(monkeypatch, float_tiles=False)


def product(dtype: str, k: int, n: int, *, cast: bool = True, param: bool = True) -> rlx.CompiledGraph:
    """x @ w with w of that type: of an x in f32 and `cast`, or of one of the same type; w is a param or an input."""
    g = rlx.Graph("narrow")
    x = g.input("x", (rlx.Dim("m", 1, 300), k), "f32" if cast else dtype)
    w = g.param("w", (k, n), dtype) if param else g.input("w", (k, n), dtype)
    g.output(rlx.cast(x @ (rlx.cast(w, "f32") if cast else w), "f32"), name="y")
    return rlx.compile(g, device="cpu", threads=2)


def how(model: rlx.CompiledGraph) -> str:
    (kernel,) = (k for k in model._executable.shared.program.run if k.anchor is not None)  # type: ignore[attr-defined]
    return str(kernel.how)


def weights(dtype: str, k: int, n: int) -> Array:
    """Numbers of all sizes that the type has, denormal ones and its largest among them."""
    rng = np.random.default_rng(k)
    w = rng.standard_normal((k, n)) * 10.0 ** rng.integers(-7, 3, (k, n))
    w[::5, ::7] = 0
    w[-1, -1] = 6e4
    return w.astype(DTYPES[dtype].numpy)


@DTYPE
@pytest.mark.parametrize("k, n", [(1, 1), (7, 16), (64, 33), (130, 257), (385, 48)])
def test_products_have_the_bits_of_f32(dtype: str, k: int, n: int) -> None:
    """Of open numbers of rows, at the ends of panels and of blocks of k."""
    model, plain = product(dtype, k, n), product("f32", k, n)
    w = weights(dtype, k, n)
    assert how(model) == f"matmul.panels+{dtype}"
    model.set_params({"w": w})
    plain.set_params({"w": w.astype(np.float32)})
    for rows in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 40, 300):
        x = np.random.default_rng(rows).standard_normal((rows, k), dtype=np.float32)
        assert np.array_equal(model({"x": x})["y"], plain({"x": x})["y"]), rows


@DTYPE
@pytest.mark.parametrize("param", [True, False])
def test_both_operands_may_be_narrow(dtype: str, param: bool) -> None:
    model = product(dtype, 96, 50, cast=False, param=param)
    w = np.clip(weights(dtype, 96, 50).astype(np.float32), -100, 100).astype(DTYPES[dtype].numpy)
    if param:
        assert how(model) == f"matmul.panels+{dtype}"
        model.set_params({"w": w})
    x = np.random.default_rng(0).standard_normal((9, 96)).astype(w.dtype)
    exact = x.astype(float) @ w.astype(float)
    error = np.abs(model({"x": x} if param else {"x": x, "w": w})["y"] - exact)
    allowed = 100 * 2.0**-24 * (np.abs(x.astype(float)) @ np.abs(w.astype(float)))
    assert np.all(error <= allowed + np.abs(exact) * (2.0**-8 if dtype == "bf16" else 2.0**-11))


@DTYPE
def test_what_is_not_finite_stays_so(dtype: str) -> None:
    model, w = product(dtype, 8, 20), np.ones((8, 20), DTYPES[dtype].numpy)
    w[3, 4], w[2, 7], w[1, 19] = np.nan, np.inf, -np.inf
    model.set_params({"w": w})
    y = model({"x": np.ones((2, 8), np.float32)})["y"]
    assert np.isnan(y[:, 4]).all()
    assert (y[:, 7] == np.inf).all()
    assert (y[:, 19] == -np.inf).all()
    assert np.isfinite(np.delete(y, [4, 7, 19], axis=1)).all()


@DTYPE
def test_weights_take_their_own_width(dtype: str) -> None:
    """Two bytes an element, of whole panels."""
    assert product(dtype, 512, 256).needs.prepared == 2 * 512 * 256
    assert product(dtype, 512, 250).needs.prepared == 2 * 512 * 256
