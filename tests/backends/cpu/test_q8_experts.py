"""Products of rounded rows by groups, with encoded experts: how exact they are on several machines, and their bits."""

from __future__ import annotations

import numpy as np
import pytest
from targets import machine

import rlx
from rlx.backends.cpu.gemm.panels.q8_codes import CODES
from rlx.backends.cpu.runtime.residency import Residency
from rlx.ir.casting import rounded_q8
from rlx.ir.encoding import encoding_named
from rlx.ir.graph import Array
from rlx.passes.precision import apply_precision
from tests.backends.cpu.test_block_panels import weights
from tests.backends.cpu.test_q8_products import MACHINES, activations, on

pytestmark = pytest.mark.needs("avx2")
EXPERTS, MOST = 3, 90
NOT_WHOLE = {"q8_1", "q8_k"}  # whose panels leave sums out: rows are rounded by loops


def graph(encoding: str, n: int, k: int, top: int = 0) -> rlx.Graph:
    """Rows times the matrices of their experts; with `top`, so many results of each row."""
    g, m = rlx.Graph("experts"), rlx.Dim("m", 1, MOST)
    w = g.param("w", (EXPERTS, n, k), encoding=encoding)
    x = g.input("x", (m, 1, k) if top else (m, k))
    g.output(rlx.grouped_matmul(x, w, g.input("numbers", (m, top) if top else (m,), "i64"), transposed=True), "y")
    return g


def compiled(encoding: str, n: int, k: int, top: int = 0, **options: object) -> tuple[rlx.CompiledGraph, Array]:
    """The model with weights, and these decoded, [experts, n, k]."""
    stored, w = weights(encoding, EXPERTS * n, k)
    model = rlx.compile(graph(encoding, n, k, top), device="cpu", precision="q8", cache=False, **options)
    model.set_params({"w": stored})
    return model, w.reshape(EXPERTS, n, k)


def assert_close(y: Array, x: Array, w: Array, numbers: Array) -> None:
    """Close to the products of the rounded rows in f64, within what sums in f32 are off."""
    rounded, chosen = rounded_q8(x).astype(np.float64), w[numbers].astype(np.float64)
    exact, size = (np.einsum("mk,mnk->mn", a, b) for a, b in ((rounded, chosen), (np.abs(rounded), np.abs(chosen))))
    assert (np.abs(y - exact) <= (x.shape[1] / 8 + 10) * 2.0**-24 * (size + 1e-30)).all()


@pytest.mark.parametrize("vector_bytes, dots", MACHINES)
@pytest.mark.parametrize("encoding", CODES)
def test_products(encoding: str, vector_bytes: int, dots: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of groups of any number of rows, one and several blocks, and columns at the ends of panels."""
    on(monkeypatch, vector_bytes, dots)
    block = encoding_named(encoding).block
    for n, k in ((1, block), (47, 3 * block)):
        model, w = compiled(encoding, n, k)
        assert ("matmul.round_rows" in model.explain("kernels")) == (encoding not in NOT_WHOLE)
        for m in (1, 2, 5, 9, MOST):
            x, numbers = activations(m, k), np.random.default_rng(m).integers(-EXPERTS, EXPERTS, m)
            assert_close(model.run({"x": x, "numbers": numbers})[0], x, w, numbers)


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize("encoding", ["q8_0", "q4_k", "q6_k"])
def test_a_row_has_its_bits_with_any_rows_and_threads(encoding: str, top: int) -> None:
    n, k = 590, 512  # an odd number of panels
    x = activations(MOST, k).reshape((MOST, 1, k) if top else (MOST, k))
    numbers = np.random.default_rng(0).integers(0, EXPERTS, (MOST, top) if top else MOST)
    model, _ = compiled(encoding, n, k, top, threads=2)
    (want,) = model.run({"x": x, "numbers": numbers})
    for threads in (1, 2, 3):
        other, _ = compiled(encoding, n, k, top, threads=threads)
        for start, count in (*((3 * m, m) for m in range(1, 10)), (40, 33), (0, MOST)):
            (y,) = other.run({"x": x[start : start + count], "numbers": numbers[start : start + count]})
            np.testing.assert_array_equal(y, want[start : start + count])


@pytest.mark.parametrize("encoding", CODES)
def test_experts_that_are_not_resident_give_the_same_bits(encoding: str) -> None:
    """Their matrices are made of the panels again, bit for bit."""
    n, k = 37, 2 * encoding_named(encoding).block
    model, _ = compiled(encoding, n, k)
    inputs = {"x": activations(20, k), "numbers": np.arange(20) % EXPERTS}
    (want,) = model.run(inputs)
    for mask in ((True, False, True), (False, False, False), None, (False, True, False)):
        model.set_resident_experts(mask if mask is None else np.array(mask))
        np.testing.assert_array_equal(model.run(inputs)[0], want)


@pytest.mark.parametrize("encoding", sorted(set(CODES) - NOT_WHOLE))
def test_panels_hold_all_bits_of_the_blocks(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of patterns that no encoder writes."""
    n, size, seen = 21, encoding_named(encoding).block_bytes, []
    stored = np.random.default_rng(0).integers(0, 256, EXPERTS * n * 2 * size).astype(np.uint8)
    unpacked = Residency._unpacked
    monkeypatch.setattr(Residency, "_unpacked", lambda *given: seen.append(unpacked(*given)) or seen[-1])
    model, _ = compiled(encoding, n, 2 * encoding_named(encoding).block)
    model.set_params({"w": stored})
    model.set_resident_experts(np.ones(EXPERTS, np.bool_))
    model.run({"x": activations(1, 2 * encoding_named(encoding).block), "numbers": np.zeros(1, np.int64)})
    model.set_resident_experts(np.zeros(EXPERTS, np.bool_))
    np.testing.assert_array_equal(np.concatenate(seen), stored)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["i8", "q4_0"])
def test_rows_are_rounded_for_any_narrow_experts(kind: str, transposed: bool) -> None:
    """Bytes times a scale, and blocks that do not lie along the depth: by loops, as the definition says."""
    n, k, m = 64, 96, rlx.Dim("m", 1, MOST)
    shape = (EXPERTS, n, k) if transposed else (EXPERTS, k, n)
    g, rng = rlx.Graph("experts"), np.random.default_rng(0)
    if kind == "i8":
        q = rng.integers(-128, 128, shape).astype(np.int8)
        value, decoded = rlx.cast(g.param("w", data=q), "f32") * 0.25, q.astype(np.float32) / 4
    else:
        stored, flat = weights(kind, EXPERTS * shape[1], shape[2])
        value, decoded = g.param("w", shape, encoding=kind, data=stored), flat.reshape(shape)
    x, numbers = activations(30, k), rng.integers(0, EXPERTS, 30)
    y = rlx.grouped_matmul(g.input("x", (m, k)), value, g.input("numbers", (m,), "i64"), transposed=transposed)
    g.output(y, "y")
    w = decoded if transposed else decoded.swapaxes(1, 2)
    results = []
    for device in ("cpu", "reference"):
        model = rlx.compile(g, device=device, precision="q8", cache=False)
        results.append(model.run({"x": x, "numbers": numbers})[0])
        assert_close(results[-1], x, w, numbers)
        if machine().vector_bytes and device == "cpu":
            np.testing.assert_array_equal(model.run({"x": x[7:8], "numbers": numbers[7:8]})[0], results[0][7:8])


def test_two_products_of_the_same_rows_round_them_once() -> None:
    g, m = rlx.Graph("gated"), rlx.Dim("m", 1, MOST)
    x, numbers = g.input("x", (m, 64)), g.input("numbers", (m,), "i64")
    params = [g.param(name, (EXPERTS, 32, 64), encoding="q8_0") for name in ("gate", "up")]
    gate, up = (rlx.grouped_matmul(x, w, numbers, transposed=True) for w in params)
    g.output(gate * up, "y")
    model = rlx.compile(g, device="cpu", precision="q8", cache=False)
    assert model.explain("kernels").count("matmul.round_rows") == 1
    assert len(model.expert_layers) == 1


def test_precision_is_written_into_products_with_narrow_experts() -> None:
    for dtype, count in (("i8", 1), ("f32", 0)):
        g = rlx.Graph("experts")
        w = g.param("w", (EXPERTS, 64, 32), dtype)
        value = w if dtype == "f32" else rlx.cast(w, "f32")
        g.output(rlx.grouped_matmul(g.input("x", (4, 32)), value, g.input("e", (4,), "i32"), transposed=True), "y")
        assert str(apply_precision(g, "q8")).count('activations="q8"') == count
