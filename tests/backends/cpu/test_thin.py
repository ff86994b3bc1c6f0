"""Products with few rows or few columns, which stream the other operand: the bits of those by panels, no packing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.kernels.matmul import strategies as matmul
from rlx.backends.cpu.schedule.thin import LEAST, MOST, STRIP
from rlx.ir.dtype import DTYPES

FEW = (1, 2, 3, 4, 5, 8, 9, MOST)
MANY = (LEAST, 17, 31, 100, STRIP + 5)
DEPTH = (1, 3, 4, 16, 21, 128, 137, 300, 512, 1037)
KINDS = ("f32", "f64", "f16", "bf16")


def graph(a: Any, b: Any, kind: str, turned: tuple[bool, bool], after: str) -> rlx.Graph:
    """a @ b of two inputs, either of which may be stored as columns, with something computed of the result."""
    g = rlx.Graph("g")
    x, y = (g.input(name, s, dtype=kind) for name, s in (("a", a), ("b", b)))
    axes = (*range(len(a) - 2), len(a) - 1, len(a) - 2)
    z = (rlx.transpose(x, axes) if turned[0] else x) @ (rlx.transpose(y, axes) if turned[1] else y)
    if after == "bias":
        z = z + g.input("bias", (z.shape[-1],), dtype=kind)
    elif after == "residual":
        z = rlx.relu(z + g.input("rest", z.shape, dtype=kind)) * 2.0
    g.output(z, "z")
    return g


def compiled(g: rlx.Graph, **options: Any) -> rlx.CompiledGraph:
    return rlx.compile(g, device="cpu", cache=False, **options)


def feed_of(g: rlx.Graph, sizes: dict[str, int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    out = {}
    for v in g.inputs:
        shape = [s if isinstance(s, int) else sizes[str(s)] for s in v.shape]
        out[v.name] = rng.standard_normal(shape).astype(v.dtype.numpy)
    return out


def cases(count: int, seed: int) -> list[tuple[Any, ...]]:
    """Sizes (m, n, k, batch), element type, which operands are turned, and what is computed of the result."""
    rng = np.random.default_rng(seed)
    made = []
    for at in range(count):
        few, many, k = (int(rng.choice(x)) for x in (FEW, MANY, DEPTH))
        m, n = (few, many) if at % 2 else (many, few)
        batch = ((), (3,), (2, 3))[int(rng.integers(3))]
        turned = tuple(bool(x) for x in rng.integers(2, size=2))
        after = ("", "bias", "residual")[int(rng.integers(3))]
        made.append((m, n, k, batch, KINDS[at // 2 % 4], turned, after))
    return made


def operands(m: Any, n: Any, k: Any, batch: tuple[Any, ...], turned: tuple[bool, bool]) -> tuple[Any, Any]:
    a, b = ((k, m) if turned[0] else (m, k)), ((n, k) if turned[1] else (k, n))
    return (*batch, *a), (*batch, *b)


@pytest.mark.parametrize("case", cases(160, 5), ids=str)
@pytest.mark.sample(8)
def test_the_bits_are_those_of_panels(case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """And close to float64; the same with open sizes, for few rows and for more, and with several threads."""
    m, n, k, batch, kind, turned, after = case
    rng = np.random.default_rng(7)
    g = graph(*operands(m, n, k, batch, turned), kind, turned, after)
    feed = feed_of(g, {}, rng)
    model = compiled(g, threads=1)
    assert "matmul.thin" in model.explain("kernels")
    got = model.run(feed)[0]
    monkeypatch.setattr(matmul, "MATMUL", matmul.MATMUL[1:])
    by_panels = compiled(g, threads=1)
    assert "matmul.panels" in by_panels.explain("kernels")
    want = by_panels.run(feed)[0]
    assert got.tobytes() == want.tobytes()
    monkeypatch.undo()
    dims = [rlx.Dim(name, 1, most) for name, most in (("m", 2200), ("n", 2200), ("k", max(DEPTH)), ("p", 3))]
    opened = graph(*operands(*dims[:3], (dims[3],) * bool(batch) + batch[1:], turned), kind, turned, after)
    whole = compiled(opened, threads=3, over_budget="allow")
    assert np.array_equal(whole.run(feed)[0], want, equal_nan=True)
    for rows, columns in ((MOST + 1, MOST + 1), (1, LEAST), (90, 3)):
        sizes = {"m": rows, "n": columns, "k": k, "p": batch[0] if batch else 1}
        other = feed_of(opened, sizes, rng)
        fixed = compiled(graph(other["a"].shape, other["b"].shape, kind, turned, after), threads=1)
        assert np.array_equal(whole.run(other)[0], fixed.run(other)[0], equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m, n", [(1, 700), (700, 1), (12, 65), (65, 7)])
def test_values_are_right(m: int, n: int, kind: str) -> None:
    rng = np.random.default_rng(1)
    g = graph((m, 333), (333, n), kind, (False, False), "")
    feed = feed_of(g, {}, rng)
    got = compiled(g).run(feed)[0].astype(np.float64)
    exact = feed["a"].astype(np.float64) @ feed["b"].astype(np.float64)
    step = {"f64": 1e-13, "f32": 1e-5, "f16": 2e-3, "bf16": 1e-2}[kind]
    assert np.allclose(got, exact, rtol=step, atol=20 * step)


def test_nothing_is_packed() -> None:
    """Of two inputs the arena holds no copy, though the second one alone has 4 MB."""
    g = graph((2, 1024), (1024, 1024), "f32", (False, False), "")
    model = compiled(g, threads=1)
    assert model.plan.arena <= 4 * (2 * 1024 + 1024 * 1024 + 2 * 1024) + (64 << 10)
    assert [k.how for k in model.compilation.program.run] == ["matmul.thin"]  # type: ignore[union-attr]


def test_an_operand_that_is_computed_is_copied_first() -> None:
    """The few rows may be anything; a large operand that is no matrix in memory is computed once, then streamed."""
    rng = np.random.default_rng(2)
    for m, n in ((3, 100), (100, 3)):
        g = rlx.Graph("g")
        x, y = g.input("x", (m, 40)), g.input("y", (40, n))
        g.output(rlx.exp(x) @ y, "z")
        feed = feed_of(g, {}, rng)
        model = compiled(g)
        assert "matmul.thin" in model.explain("kernels")
        exact = np.exp(feed["x"].astype(np.float64)) @ feed["y"]
        assert np.allclose(model.run(feed)[0], exact, rtol=1e-5, atol=1e-4)


def test_what_is_not_finite_stays_in_its_row_and_column() -> None:
    x, y = np.ones((2, 50), np.float32), np.ones((50, 100), np.float32)
    x[1, 3], y[7, 55] = np.inf, np.nan
    got = compiled(graph((2, 50), (50, 100), "f32", (False, False), "")).run([x, y])[0]
    assert np.isnan(got[:, 55]).all()
    assert np.isinf(np.delete(got[1], 55)).all()
    assert (np.delete(got[0], 55) == 50).all()
    assert DTYPES["f32"].numpy == got.dtype


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_beside_an_open_number_of_rows(kind: str, turned: bool) -> None:
    """Products of no rows and of rows that a run decides have code of different names in one graph."""
    g, rng = rlx.Graph("g"), np.random.default_rng(0)
    for name, rows in (("none", 0), ("open", rlx.Dim("rows", 0, 5))):
        x = g.input(name, (rows, 97), dtype=kind)
        w = g.input(f"w_{name}", (65, 97) if turned else (97, 65), dtype=kind)
        g.output(x @ (rlx.transpose(w, (1, 0)) if turned else w), f"y_{name}")
    model, plain = compiled(g), rlx.compile(g, device="reference")
    for rows in (0, 3):
        feeds = feed_of(g, {"rows": rows}, rng)
        for got, want in zip(model.run(feeds), plain.run(feeds), strict=True):
            assert got.shape == want.shape
            assert np.allclose(got.astype("f8"), want.astype("f8"), rtol=2e-2, atol=0.2)
