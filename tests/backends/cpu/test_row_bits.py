"""A row of a product in f32 has the same bits for any number of rows that share the call, whatever the weights are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from targets import pretend

import rlx
from rlx.ir.dtype import DTYPES
from rlx.ir.encodings import ENCODINGS
from rlx.ir.graph import Array, Value
from rlx.ops.encoded import Dequantize
from tests.backends.cpu.test_block_panels import WIDTHS, weights

N, K, MOST = 100, 1536, 130
ROWS = (*range(1, 21), 33, MOST)
NATIVE = sorted(name for name, encoding in ENCODINGS.items() if encoding.native)
pytestmark = pytest.mark.needs("avx2")

Make = Callable[[rlx.Graph], Value]  # weights [K, N]


def encoded(name: str) -> Make:
    return lambda g: g.param("w", (N, K), encoding=name, data=weights(name, N, K)[0]).T


def floats(name: str) -> Make:
    data = np.random.default_rng(0).standard_normal((K, N)).astype(DTYPES[name].numpy)
    return lambda g: rlx.cast(g.param("w", (K, N), dtype=name, data=data), "f32")


def scaled(name: str, zeroed: bool) -> Make:
    """Numbers of 8 or 4 bits, with scales by blocks of 32 along k."""
    rng = np.random.default_rng(0)
    top = 16 if name == "u4" else 127
    q = rng.integers(0, top, (K, N)).astype(DTYPES[name].numpy)
    scales = (rng.random((K // 32, N)) + 0.01).astype(np.float32)
    zeros = rng.integers(0, top, (K // 32, N)).astype(DTYPES[name].numpy)

    def make(g: rlx.Graph) -> Value:
        leaves = [g.param("w", q.shape, dtype=name, data=q), g.param("s", scales.shape, data=scales)]
        if zeroed:
            leaves.append(g.param("z", zeros.shape, dtype=name, data=zeros))
        return g.add(Dequantize(0, 32), *leaves)[0]

    return make


KINDS: dict[str, Make] = {
    **{name: encoded(name) for name in NATIVE},
    **{name: floats(name) for name in ("f16", "bf16", "f32")},
    **{f"{name}{'_zero' * z}": scaled(name, z) for name in ("i8", "u8", "u4") for z in (False, True)},
}


def rows_of(k: int) -> Array:
    rng = np.random.default_rng(1)
    return (rng.standard_normal((MOST, k)) * 10.0 ** rng.integers(-3, 4, (MOST, 1))).astype(np.float32)


@pytest.mark.sample(12)
@pytest.mark.parametrize("vector_bytes", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_products(kind: str, vector_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, vector_bytes=vector_bytes, tiles=False, float_tiles=False)
    g = rlx.Graph("rows")
    g.output(g.input("x", (rlx.Dim("m", 1, MOST), K)) @ KINDS[kind](g), name="y")
    model, x = rlx.compile(g, device="cpu", threads=2), rows_of(K)
    (want,) = model.run({"x": x})
    for m in ROWS:
        np.testing.assert_array_equal(model.run({"x": x[:m]})[0], want[:m], str(m))
        np.testing.assert_array_equal(model.run({"x": x[MOST - m :]})[0], want[MOST - m :], str(m))


@pytest.mark.sample(4)
@pytest.mark.parametrize("vector_bytes", WIDTHS)
@pytest.mark.parametrize("encoding", NATIVE)
def test_experts(encoding: str, vector_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of groups of any number of rows."""
    pretend(monkeypatch, vector_bytes=vector_bytes, tiles=False, float_tiles=False)
    g, m = rlx.Graph("experts"), rlx.Dim("m", 1, MOST)
    stored, _ = weights(encoding, 2 * N, K)
    w = g.param("w", (2, N, K), encoding=encoding, data=stored)
    x, numbers = g.input("x", (m, K)), g.input("numbers", (m,), "i64")
    g.output(rlx.grouped_matmul(x, w, numbers, transposed=True), name="y")
    model, rows = rlx.compile(g, device="cpu", threads=2), rows_of(K)
    own = np.arange(MOST) % 5 // 4
    (want,) = model.run({"x": rows, "numbers": own})
    for m in ROWS:
        (got,) = model.run({"x": rows[:m], "numbers": own[:m]})
        np.testing.assert_array_equal(got, want[:m], str(m))
