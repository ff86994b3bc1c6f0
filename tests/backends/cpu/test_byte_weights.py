"""Products of f32 with weights of bytes that have scales: as exact as others, by whatever they are computed."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx.ir.graph import Array
from rlx.ops import cast
from rlx.ops.encoded import Dequantize

ENDS = {"u8": (0, 255), "i8": (-128, 127)}


def compiled(
    w: Array, scale: Array, zero: Array | None, n: int, k: int, batch: tuple[int, ...] = ()
) -> rlx.CompiledGraph:
    g = rlx.Graph("weights")
    x = g.input("x", (*batch, rlx.Dim("m", 1, 400), k))
    leaves = [g.param("w", (k, n), dtype=w.dtype.name), g.param("scale", scale.shape)]
    given = {"w": w, "scale": scale}
    if zero is not None:
        leaves.append(g.param("zero", zero.shape, dtype=w.dtype.name))
        given["zero"] = zero
    (weights,) = g.add(Dequantize(1 if scale.ndim else None), *leaves)
    bias = g.param("bias", (n,))
    g.output(x @ weights + bias, name="y")
    model = rlx.compile(g, device="cpu")
    model.set_params({**given, "bias": np.linspace(-1, 1, n, dtype=np.float32)})
    return model


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("columns", [False, True])
def test_error(kind: str, zeros: bool, columns: bool) -> None:
    """Below that of f32 sums for few rows and many, with zero points, at the ends of the range and of tiles."""
    rng = np.random.default_rng(3)
    low, high = ENDS[kind]
    for k, n in ((64, 32), (100, 47), (385, 210)):
        w = rng.integers(low, high + 1, (k, n)).astype(kind.replace("u", "uint").replace("i8", "int8"))
        w[:, 0], w[:, -1] = low, high
        scale = rng.uniform(1e-3, 1, n if columns else ()).astype(np.float32)
        zero = np.asarray(rng.integers(low, high + 1, scale.shape), w.dtype) if zeros else None
        model = compiled(w, scale, zero, n, k)
        exact = (w.astype(float) - (0 if zero is None else zero.astype(float))) * scale.astype(float)
        for m in (1, 3, 8, 16, 17, 24, 33, 130):
            x = (rng.standard_normal((m, k)) * 10.0 ** rng.integers(-3, 4, (m, 1))).astype(np.float32)
            found, bias = model.run({"x": x})[0], np.linspace(-1, 1, n, dtype=np.float32)
            most = np.abs(x.astype(float)) @ np.abs(exact) + np.abs(bias)
            assert np.all(np.abs(found - (x.astype(float) @ exact + bias)) <= (k + 10) * 2.0**-24 * most)


def test_what_is_not_finite() -> None:
    """A row with an infinity or a nan has them in its results, and no other row."""
    rng = np.random.default_rng(4)
    w, scale = rng.integers(1, 128, (96, 64)).astype(np.int8), rng.uniform(0.1, 1, 64).astype(np.float32)
    model = compiled(w, scale, None, 64, 96)
    x = rng.standard_normal((40, 96)).astype(np.float32)
    x[3, 5], x[20, 7], x[39, 0] = np.inf, np.nan, -np.inf
    y = model.run({"x": x})[0]
    assert np.all(y[3] == np.inf)
    assert np.all(np.isnan(y[20]))
    assert np.all(y[39] == -np.inf)
    assert np.all(np.isfinite(np.delete(y, (3, 20, 39), 0)))


def test_tiny_rows() -> None:
    """Rows of denormals are not taken for zeros."""
    rng = np.random.default_rng(5)
    w, scale = rng.integers(-128, 128, (96, 64)).astype(np.int8), rng.uniform(0.5, 1, 64).astype(np.float32)
    x = (rng.standard_normal((40, 96)) * 1e-38).astype(np.float32)
    x[1] *= np.float32(1e30)
    g = rlx.Graph("plain")
    a, b, s = g.input("x", (40, 96)), g.param("w", (96, 64), dtype="i8"), g.param("scale", (64,))
    g.output(a @ g.add(Dequantize(1), b, s)[0], name="y")
    plain = rlx.compile(g, device="cpu")
    plain.set_params({"w": w, "scale": scale})
    wanted = x.astype(float) @ (w * scale.astype(float))
    most = np.abs(x.astype(float)) @ np.abs(w * scale.astype(float))
    found = plain.run({"x": x})[0]
    assert np.all(np.abs(found - wanted) <= 110 * 2.0**-24 * most + 96 * 128 * 2.0**-149)


@pytest.mark.parametrize("zeros", [False, True])
def test_panels_hold_bytes(zeros: bool) -> None:
    """A byte a weight, two where a zero point is taken off, in products of one row."""
    g = rlx.Graph("row")
    leaves = [g.param("w", (96, 64), dtype="u8"), g.param("scale", (64,))]
    leaves += [g.param("zero", (64,), dtype="u8")] if zeros else []
    g.output(g.input("x", (1, 96)) @ g.add(Dequantize(1), *leaves)[0], name="y")
    model = rlx.compile(g, device="cpu")
    (panels,) = model._executable.shared.program.buffers("prepared")  # type: ignore[attr-defined]
    assert panels.nbytes({}) == (2 if zeros else 1) * 96 * 64


@pytest.mark.parametrize("m", [1, 40, 130])
def test_zero_points_of_another_type(m: int) -> None:
    """Differences of u8 and i8 have 9 bits."""
    g = rlx.Graph("mixed")
    w, zero = g.param("w", (200, 100), dtype="u8"), g.param("zero", (100,), dtype="i8")
    g.output(g.input("x", (m, 200)) @ (cast(w, "f32") - cast(zero, "f32")), name="y")
    rng = np.random.default_rng(6)
    given = {"w": rng.integers(0, 256, (200, 100), np.uint8), "zero": rng.integers(-128, 128, 100, np.int8)}
    x = rng.standard_normal((m, 200)).astype(np.float32)
    model = rlx.compile(g, device="cpu")
    model.set_params(given)
    exact = given["w"].astype(float) - given["zero"]
    wrong = np.abs(model.run({"x": x})[0] - x.astype(float) @ exact)
    assert np.all(wrong <= 210 * 2.0**-24 * (np.abs(x) @ np.abs(exact)))
