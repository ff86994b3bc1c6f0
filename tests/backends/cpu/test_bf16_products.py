"""Products of f32 whose operands are rounded to 16 bits: how exact they are on several machines, and their bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from targets import cpu, machine, pretend

import rlx
from rlx.backends.codegen.arguments import Routine, text_of
from rlx.backends.cpu.gemm.panels.q8_codes import CODES
from rlx.backends.cpu.kernels.attention import attention, pack_kv, strategies
from rlx.backends.cpu.kernels.conv import product as product_module
from rlx.compiler import legal_graph, lower_graph
from rlx.errors import DTypeError, OptionError
from rlx.ir.casting import narrowed
from rlx.ir.dtype import DTYPES
from rlx.ir.encoding import encoding_named
from rlx.ir.graph import Array
from rlx.ir.shape import Size
from rlx.ops.encoded import Dequantize
from rlx.options import CompileOptions

pytestmark = pytest.mark.needs("avx2")
MACHINES = [
    pytest.param(64, "tiles", id="amx", marks=pytest.mark.needs("amx_f32", "bf16")),
    pytest.param(64, "pairs", id="avx512_bf16", marks=pytest.mark.needs("bf16")),
    pytest.param(64, "fma", id="avx512", marks=pytest.mark.needs("avx512")),
    pytest.param(32, "fma", id="avx2"),
]
PRECISIONS = pytest.mark.parametrize("precision", ["bf16", "f16"])
LEAST = 2.0**-126  # what is smaller may count as zero
Feeds = dict[str, Array]


def on(monkeypatch: pytest.MonkeyPatch, vector_bytes: int, by: str) -> None:
    """Code is made for such a machine from here on."""
    features = machine().features.replace("+avx512bf16", "-avx512bf16" if by == "fma" else "+avx512bf16")
    tiles = by == "tiles"
    pretend(monkeypatch, vector_bytes=vector_bytes, features=features, tiles=tiles, float_tiles=tiles)


def graph(k: int, n: int, rows: Size) -> rlx.Graph:
    """x @ w, of rows that may be open."""
    g = rlx.Graph("product")
    g.output(g.input("x", (rows, k)) @ g.param("w", (k, n)), "y")
    return g


def product(k: int, n: int, rows: Size, precision: str = "bf16", **options: Any) -> rlx.CompiledGraph:
    return rlx.compile(graph(k, n, rows), device="cpu", precision=precision, cache=False, **options)


def numbers(*shape: int, seed: int = 0) -> Array:
    """Of many sizes from row to row."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 4, (*shape[:-1], 1))).astype(np.float32)


def assert_close(y: Array, x: Array, w: Array, precision: str = "bf16") -> None:
    """Within the bound of `gemm/panels/bf16.py` of the product of the rounded operands in f64."""
    a, b = (narrowed(t, precision).astype(np.float64) for t in (x, w))
    k, sizes = x.shape[-1], np.abs(a) @ np.abs(b)
    small = k * LEAST * (1 + np.abs(a).max(initial=0) + np.abs(b).max(initial=0))
    assert (np.abs(y - a @ b) <= (k + 8) * 2.0**-24 * sizes + small).all()


def agree(g: rlx.Graph, feeds: Feeds, precision: str, within: float, params: Feeds | None = None) -> None:
    """The CPU, interp and the reference differ by so much of the largest result, and f32 by more."""
    results = {}
    for device, asked in (("cpu", precision), ("interp", precision), ("reference", precision), ("cpu", "f32")):
        model = rlx.compile(g, device=device, precision=asked, cache=False)
        model.set_params(params or {})
        results[device, asked] = model.run(feeds)
    for number, want in enumerate(results["reference", precision]):
        size = np.abs(want).max()
        for device in ("cpu", "interp"):
            assert np.abs(results[device, precision][number] - want).max() <= within * size, device
        assert np.abs(results["cpu", "f32"][number] - want).max() > 8 * 2.0**-24 * size


# ---- matrix products


@PRECISIONS
@pytest.mark.parametrize("vector_bytes, by", MACHINES)
def test_products(vector_bytes: int, by: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd depths too, which end with half a pair, several blocks of k, and columns at the ends of panels."""
    on(monkeypatch, vector_bytes, by)
    way = "matmul.bf16_pairs" if by != "fma" and precision == "bf16" else f"matmul.panels+{precision}"
    for k, n in ((1, 1), (2, 16), (7, 33), (64, 47), (129, 100), (601, 18), (1030, 290)):
        model, w = product(k, n, rlx.Dim("m", 1, 300), precision), numbers(k, n, seed=1)
        assert f" {way} " in model.explain("kernels")
        model.set_params({"w": w})
        for m in (1, 2, 3, 4, 7, 8, 13, 29, 150):
            x = numbers(m, k)
            assert_close(model.run({"x": x})[0], x, w, precision)


@pytest.mark.parametrize("vector_bytes, by", MACHINES)
def test_a_row_has_its_bits_with_any_rows_and_threads(
    vector_bytes: int, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, vector_bytes, by)
    k, n = 1027, 590
    w, x = numbers(k, n, seed=1), numbers(150, k)
    (want,) = _with(product(k, n, 150, threads=2), w).run({"x": x})
    for threads in (1, 2, 3):
        model = _with(product(k, n, rlx.Dim("m", 1, 150), threads=threads), w)
        for start, count in (*((3 * m, m) for m in range(1, 15)), (40, 33), (0, 150)):
            (y,) = model.run({"x": x[start : start + count]})
            assert np.array_equal(y, want[start : start + count])


def _with(model: rlx.CompiledGraph, w: Array) -> rlx.CompiledGraph:
    model.set_params({"w": w})
    return model


@PRECISIONS
@pytest.mark.parametrize("vector_bytes, by", MACHINES)
def test_what_is_not_finite(vector_bytes: int, by: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN, infinities, and what becomes one when it is rounded; each touches its own row or column."""
    on(monkeypatch, vector_bytes, by)
    x, w = numbers(9, 45), numbers(45, 20, seed=1)
    plain = _with(product(45, 20, 9, precision), w).run({"x": x})[0]
    x[0, 3], x[1, 44], x[2, 0], x[3, 7] = np.nan, np.inf, -np.inf, np.finfo(np.float32).max
    w[5, 1], w[44, 2] = np.nan, np.inf
    model = _with(product(45, 20, 9, precision), w)
    y = model.run({"x": x})[0]
    with np.errstate(invalid="ignore", over="ignore"):
        want = narrowed(x, precision).astype(np.float64) @ narrowed(w, precision).astype(np.float64)
    assert np.isnan(y[0]).all()
    assert np.isnan(y[:, 1]).all()
    assert np.array_equal(np.isnan(y), np.isnan(want))
    assert np.array_equal(y[np.isinf(want)], want[np.isinf(want)])
    rest = np.delete(np.arange(20), [1, 2])
    assert np.array_equal(y[4:, rest], plain[4:, rest])


def test_small_numbers_may_be_zeros() -> None:
    """Denormals, in operands and in sums: off by what the bound says, never more, and numbers above are exact."""
    k, n = 40, 18
    x, w = np.full((6, k), 2.0**-80, np.float32), np.full((k, n), 2.0**-44, np.float32)
    x[1], x[2], x[3], x[4] = 2.0**-82, 2.0**-130, 2.0**-149, 0
    x[5] = 2.0**-82 * (1 - 2 * (np.arange(k) % 2))
    model = product(k, n, 6)
    model.set_params({"w": w})
    y = model.run({"x": x})[0]
    assert_close(y, x, w)
    assert (y[0] > 0).all()
    w[:] = 2.0**120
    model.set_params({"w": w})
    assert_close(model.run({"x": x})[0], x, w)


@PRECISIONS
@pytest.mark.parametrize("vector_bytes, by", MACHINES)
def test_no_elements(vector_bytes: int, by: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, vector_bytes, by)
    for m, k, n in ((0, 5, 3), (4, 0, 3), (4, 5, 0)):
        g = rlx.Graph("none")
        g.output(g.input("x", (m, k)) @ g.input("w", (k, n)) + 1.0, "y")
        y = rlx.compile(g, device="cpu", precision=precision).run(
            [np.ones((m, k), np.float32), np.ones((k, n), np.float32)]
        )
        assert np.array_equal(y[0], np.ones((m, n), np.float32))


@PRECISIONS
def test_where_operands_lie(precision: str) -> None:
    """In batches, columns, slices and products of their own, with one that is known before, or none."""
    g = rlx.Graph("operands")
    m = rlx.Dim("m", 1, 40)
    x, y = g.input("x", (3, m, 70)), g.input("y", (3, 33, 70))
    w = g.param("w", (70, 21))
    g.output(x @ rlx.transpose(y, perm=(0, 2, 1)), "batched")
    g.output(rlx.transpose(x, perm=(1, 0, 2)) @ w, "turned")
    g.output(rlx.slice(x, starts=(0, 0, 3), sizes=(3, m, 21), steps=(1, 1, 1)) @ rlx.transpose(w, perm=(1, 0)), "part")
    g.output(rlx.transpose(w, perm=(1, 0)) @ rlx.transpose(y, perm=(0, 2, 1)), "left")
    g.output(rlx.gemm(w, w, trans_a=True, alpha=0.5), "fixed")
    g.output(rlx.relu(rlx.relu(x) @ w) @ rlx.transpose(w, perm=(1, 0)), "chained")
    g.output(rlx.einsum(x, y, equation="bmk,bnk->nbm"), "einsum")
    rng, sizes = np.random.default_rng(0), {"x": (3, 13, 70), "y": (3, 33, 70), "w": (70, 21)}
    arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in sizes.items()}
    agree(g, {n: arrays[n] for n in "xy"}, precision, 2e-6, {"w": arrays["w"]})


@PRECISIONS
@pytest.mark.parametrize("turned", [False, True])
def test_few_rows_of_operands_that_a_run_brings(turned: bool, precision: str) -> None:
    """The large one is read once, where it lies, and rounded in registers; so is a large first one with few columns."""
    for m, k, n in ((1, 70, 300), (8, 129, 65), (12, 33, 64), (400, 70, 1), (90, 64, 5)):
        g = rlx.Graph("few")
        a, b = g.input("a", (k, m) if turned else (m, k)), g.input("b", (n, k) if turned else (k, n))
        y = rlx.transpose(a, perm=(1, 0)) @ rlx.transpose(b, perm=(1, 0)) if turned else a @ b
        g.output(y + 0.5, "y")
        rng = np.random.default_rng(m)
        feeds = {
            "a": rng.standard_normal(a.shape).astype(np.float32),
            "b": rng.standard_normal(b.shape).astype(np.float32),
        }
        agree(g, feeds, precision, 2e-6)


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("along", [True, False])
def test_rows_of_operands_that_a_run_brings_have_their_bits_in_any_number(along: bool) -> None:
    """Few rows read the large operand where it lies, more pack it; of depths that end within blocks and lines."""
    for k, n in ((2, 16), (70, 33), (258, 300), (1030, 64)):

        def made(rows: Size, k: int = k, n: int = n) -> rlx.CompiledGraph:
            g = rlx.Graph("few")
            b = g.input("b", (k, n) if along else (n, k))
            g.output(g.input("a", (rows, k)) @ (b if along else b.T) + 0.5, "y")
            return rlx.compile(g, device="cpu", precision="bf16", cache=False)

        models = [made(rlx.Dim("m", 1, 200)), made(rlx.Dim("m", 1, 12)), made(40)]
        assert all(" matmul.bf16_thin " in model.explain("kernels") for model in models[:2])
        a, b = numbers(40, k), numbers(k, n, seed=1)
        feeds = {"b": b if along else np.ascontiguousarray(b.T)}
        (want,) = models[2].run({"a": a, **feeds})
        for model in models[:2]:
            for rows in (1, 2, 3, 5, 12, *([13, 40] if model is models[0] else [])):
                assert np.array_equal(model.run({"a": a[:rows], **feeds})[0], want[:rows])


@pytest.mark.needs("bf16")
def test_what_computes_few_rows() -> None:
    """An odd depth of a number of rows that a run brings is packed: there are no whole pairs to read where they lie."""
    many = rlx.Dim("m", 1, 90)
    for rows, k, way in ((3, 70, "thin"), (3, 71, "thin"), (many, 70, "thin"), (many, 71, "pairs")):
        g = rlx.Graph("few")
        g.output(g.input("a", (rows, k)) @ g.input("b", (k, 90)), "y")
        assert f" matmul.bf16_{way} " in rlx.compile(g, device="cpu", precision="bf16").explain("kernels")


@PRECISIONS
def test_depths_that_a_run_brings(precision: str) -> None:
    m, n = rlx.Dim("m", 1, 90), rlx.Dim("n", 1, 200)
    g = rlx.Graph("open")
    a, b = g.input("a", (m, n)), g.input("b", (n, 5))
    g.output(a @ b, "y")
    g.output(rlx.transpose(a, perm=(1, 0)) @ a, "z")
    for rows, depth in ((1, 1), (3, 7), (20, 33), (77, 190)):
        rng = np.random.default_rng(depth)
        feeds = {"a": rng.standard_normal((rows, depth)), "b": rng.standard_normal((depth, 5))}
        agree(g, {k: v.astype(np.float32) for k, v in feeds.items()}, precision, 4e-6)


@PRECISIONS
def test_vectors(precision: str) -> None:
    g = rlx.Graph("vectors")
    a, b, c = g.input("a", (77,)), g.input("b", (77,)), g.input("c", (5, 77))
    for name, y in (("dot", a @ b), ("columns", c @ b), ("rows", a @ rlx.transpose(c, perm=(1, 0)))):
        g.output(y, name)
    rng, sizes = np.random.default_rng(0), {"a": (77,), "b": (77,), "c": (5, 77)}
    agree(g, {n: rng.standard_normal(s).astype(np.float32) for n, s in sizes.items()}, precision, 4e-6)


@PRECISIONS
@pytest.mark.parametrize("weight", ["f16", "bf16", "q8_0", "q4_k"])
def test_weights_of_other_types(weight: str, precision: str) -> None:
    """What is stored is decoded, then rounded."""
    k, n = 256, 40
    g, rng = rlx.Graph("weights"), np.random.default_rng(3)
    w = rng.standard_normal((n, k)).astype(np.float32)
    if weight in ("f16", "bf16"):
        param = rlx.cast(g.param("w", (n, k), weight, data=w.astype(DTYPES[weight].numpy)), "f32")
    else:
        param = g.param("w", (n, k), encoding=weight, data=encoding_named(weight).encode(w))
    g.output(g.input("x", (rlx.Dim("m", 1, 90), k)) @ param.T, "y")
    agree(g, {"x": numbers(70, k)}, precision, 1e-6)


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("encoding", sorted(CODES))
def test_encoded_weights_stay_so(encoding: str) -> None:
    """Of any number of rows, decoded to pairs in registers or memory, with the same bits; they take what blocks do."""
    k, n = 1280, 33
    w = np.random.default_rng(1).standard_normal((n, k)).astype(np.float32)
    found = encoding_named(encoding)
    data = found.encode(w)
    g = rlx.Graph("encoded")
    g.output(g.input("x", (rlx.Dim("m", 1, 90), k)) @ g.param("w", (n, k), encoding=encoding, data=data).T, "y")
    model = rlx.compile(g, device="cpu", precision="bf16", cache=False)
    assert f" matmul.bf16_pairs+{encoding} " in model.explain("kernels")
    assert 0.8 * found.block_bytes <= model.needs.prepared * found.block / (48 * k) <= found.block_bytes
    x = numbers(60, k)
    y = model.run({"x": x})[0]
    assert_close(y, x, np.asarray(found.decode(data, (n, k)), np.float32).T)
    for start, count in ((0, 1), (1, 2), (3, 3), (6, 4), (10, 5), (2, 30)):
        assert np.array_equal(model.run({"x": x[start : start + count]})[0], y[start : start + count])


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("dtype", ["i8", "u4"])
def test_bytes_with_scales_by_blocks_stay_so(dtype: str) -> None:
    """Those of MatMulNBits, and of DequantizeLinear by blocks."""
    k, n, rng = 160, 40, np.random.default_rng(0)
    q = rng.integers(0, 16, (k, n)).astype(DTYPES[dtype].numpy)
    scale = (rng.random((k // 32, n)) + 0.01).astype(np.float32)
    g = rlx.Graph("bytes")
    leaves = [g.param("w", (k, n), dtype=dtype, data=q), g.param("s", scale.shape, data=scale)]
    g.output(g.input("x", (rlx.Dim("m", 1, 90), k)) @ g.add(Dequantize(0, 32), *leaves)[0], "y")
    model = rlx.compile(g, device="cpu", precision="bf16", cache=False)
    assert f" matmul.bf16_pairs+{dtype}_scaled " in model.explain("kernels")
    x = numbers(50, k)
    y = model.run({"x": x})[0]
    assert_close(y, x, q.astype(np.float32) * np.repeat(scale, 32, axis=0))
    assert np.array_equal(model.run({"x": x[3:5]})[0], y[3:5])


def test_rows_are_rounded_once_for_all_that_read_them() -> None:
    g = rlx.Graph("shared")
    x, other = g.input("x", (30, 64)), g.input("other", (30, 64))
    for number, a in enumerate((x, x, x, other)):
        g.output(a @ g.param(f"w{number}", (64, 40 + number)), f"y{number}")
    model = rlx.compile(g, device="cpu", precision="bf16", cache=False)
    if "matmul.bf16_pairs" in model.explain("kernels"):
        assert model.explain("kernels").count("matmul.round_pairs") == 2


@PRECISIONS
def test_weights_take_two_bytes_an_element(precision: str) -> None:
    """In whole panels and pairs; the estimate says so before."""
    for k, n in ((512, 250), (511, 256)):
        model = product(k, n, 8, precision)
        assert model.needs.prepared <= 2 * 512 * 256
        estimate = rlx.estimate(graph(k, n, 8), device="cpu", precision=precision)
        assert 2 * k * n <= estimate.weight_bytes == model.needs.prepared


@pytest.mark.needs("bf16")
def test_it_says_what_computes_it() -> None:
    model = product(64, 48, 5)
    assert 'activations="bf16"' in model.explain("passes")
    assert " matmul.bf16_pairs " in model.explain("kernels")


def test_an_artifact_has_them(tmp_path: Path) -> None:
    w, x = numbers(64, 48, seed=1), numbers(5, 64)
    model = _with(product(64, 48, 5), w)
    want = model.run({"x": x})[0]
    model.save(tmp_path / "model.rlxart")
    assert np.array_equal(rlx.load_artifact(tmp_path / "model.rlxart").run({"x": x})[0], want)


# ---- other products


ATTENTION: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "some rows": ((2, 4, 20, 32), (2, 4, 33, 32), {}),
    "an even depth": ((1, 3, 50, 22), (1, 3, 50, 22), {"causal": True}),
    "many keys": ((1, 2, 40, 64), (1, 2, 1001, 64), {"causal": True}),
    "a window": ((1, 2, 300, 32), (1, 2, 900, 32), {"causal": True, "window": 70}),
    "one row of an odd depth": ((2, 4, 1, 31), (2, 4, 33, 31), {"causal": True}),
    "shared heads": ((1, 8, 21, 16), (1, 2, 40, 16), {"causal": True}),
    "one key": ((1, 2, 9, 32), (1, 2, 1, 32), {}),
}
HALF_A_STEP = 2.0**-8  # by which weights may be off that are rounded to bf16


def rounds_weights(by: str, precision: str, rows: int, depth: int) -> bool:
    """Whether weights of values are rounded, as both operands of products in pairs are."""
    return precision == "bf16" and rows > 4 and (depth % 2 == 0 if by == "pairs" else depth % 32 == 0 and by == "tiles")


@PRECISIONS
@pytest.mark.parametrize("vector_bytes, by", MACHINES)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, vector_bytes: int, by: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values are rounded; of more than a few rows, where products are of pairs, weights too."""
    on(monkeypatch, vector_bytes, by)
    q, k, options = ATTENTION[name]
    g, values = rlx.Graph("attention"), (*k[:3], k[3] + 3)
    g.output(rlx.attention(g.input("q", q), g.input("k", k), g.input("v", values), **options), "y")
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("q", q), ("k", k), ("v", values))}
    agree(g, feeds, precision, HALF_A_STEP if rounds_weights(by, precision, q[2], q[3]) else 4e-6)


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_attention_of_open_sizes(heads: tuple[int, int]) -> None:
    """Rows, keys and a mask that a run brings; the bits of more than a few rows depend on neither threads nor rows."""
    rows, keys = rlx.Dim("rows", 1, 300), rlx.Dim("keys", 1, 500)
    g, rng = rlx.Graph("attention"), np.random.default_rng(0)
    q, k, v = (
        g.input(n, (1, h, s, 32)) for n, h, s in (("q", heads[0], rows), ("k", heads[1], keys), ("v", heads[1], keys))
    )
    g.output(rlx.attention(q, k, v, g.input("bias", (1, 1, rows, keys))), "y")
    models = [rlx.compile(g, device="cpu", precision="bf16", threads=t, cache=False) for t in (1, 2)]
    for m, n in ((1, 1), (3, 40), (5, 1), (20, 33), (64, 64), (290, 471)):
        sizes = {"q": (1, heads[0], m, 32), "k": (1, heads[1], n, 32), "v": (1, heads[1], n, 32), "bias": (1, 1, m, n)}
        feeds = {name: rng.standard_normal(s).astype(np.float32) for name, s in sizes.items()}
        feeds["bias"][feeds["bias"] > 1] = -np.inf
        feeds["bias"][..., 0] = 0
        want = rlx.compile(g, device="reference", precision="bf16").run(feeds)[0]
        (y,), (z,) = (model.run(feeds) for model in models)
        assert np.array_equal(y, z)
        assert np.abs(y - want).max() <= HALF_A_STEP * np.abs(want).max()
        if m > 10:
            part = {**feeds, "q": feeds["q"][:, :, 4:11], "bias": feeds["bias"][:, :, 4:11]}
            assert np.array_equal(models[1].run(part)[0], y[:, :, 4:11])


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_attention_in_whole_steps_of_tile_registers(heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The panels that tiles would read, with zeros after the last keys, multiplied by vectors: the same bits."""
    g, rng = rlx.Graph("attention"), np.random.default_rng(0)
    q, k, v = (g.input(n, (1, heads[n != "q"], 45, 64)) for n in "qkv")
    g.output(rlx.attention(q, k, v, causal=True), "y")
    feeds = {n: rng.standard_normal((1, heads[n != "q"], 45, 64)).astype(np.float32) for n in "qkv"}
    (want,) = rlx.compile(g, device="cpu", precision="bf16", cache=False).run(feeds)
    for module in (attention, pack_kv, strategies):
        monkeypatch.setattr(module, "pair_unit", lambda anchor, target: 16)
    (y,) = rlx.compile(g, device="cpu", precision="bf16", cache=False).run(feeds)
    assert np.array_equal(y, want)


@pytest.mark.needs("bf16")
def test_attention_of_what_is_not_finite() -> None:
    """Each stays in the rows, or the column, that see it."""
    g, rng = rlx.Graph("attention"), np.random.default_rng(0)
    g.output(rlx.attention(*(g.input(n, (1, 1, 20, 32)) for n in "qkv"), causal=True), "y")
    model = rlx.compile(g, device="cpu", precision="bf16")
    feeds = {n: rng.standard_normal((1, 1, 20, 32)).astype(np.float32) for n in "qkv"}
    plain = model.run(feeds)[0]
    feeds["q"][0, 0, 3, 7] = feeds["k"][0, 0, 15, 0] = feeds["v"][0, 0, 12, 5] = np.nan
    y = model.run(feeds)[0][0, 0]
    bad = np.zeros_like(y, bool)
    bad[3] = bad[15:] = bad[12:, 5] = True
    assert np.isnan(y[bad]).all()
    whole = ~bad
    whole[:, 5] = False  # a weight of 0 times NaN is NaN too
    assert np.array_equal(y[whole], plain[0, 0][whole])


@PRECISIONS
@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_attention_on_caches(dtype: str, precision: str) -> None:
    """Of a count of keys, which are stored in their own type."""
    g, rng, rows = rlx.Graph("cache"), np.random.default_rng(0), rlx.Dim("rows", 1, 8)
    shape, keys = (1, 2, 64, 32), rng.standard_normal((1, 2, 64, 32)).astype(np.float32)
    if dtype == "q8_0":
        leaves = [g.param(n, shape, encoding=dtype, data=encoding_named(dtype).encode(keys)) for n in "kv"]
    else:
        leaves = [g.param(n, shape, dtype, data=keys.astype(dtype.replace("f", "float"))) for n in "kv"]
    q = g.input("q", (1, 4, rows, 32))
    g.output(rlx.attention(q, *leaves, g.input("count", (), "i64"), counted=True, causal=True), "y")
    for count in (1, 4, 8):
        feeds = {"q": rng.standard_normal((1, 4, count, 32)).astype(np.float32), "count": np.int64(50)}
        agree(g, feeds, precision, 1e-6)


@PRECISIONS
def test_attention_in_small_ops(precision: str) -> None:
    """What becomes attention rounds no weights, as the products would have: off by half a step of the type."""
    g = rlx.Graph("raised")
    q, k, v = (g.input(name, (1, 4, 17, 16)) for name in "qkv")
    g.output(rlx.softmax(q @ rlx.transpose(k, perm=(0, 1, 3, 2)) * 0.25) @ v, "y")
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((1, 4, 17, 16)).astype(np.float32) for name in "qkv"}
    model = rlx.compile(g, device="cpu", precision=precision)
    assert " attention." in model.explain("kernels")
    agree(g, feeds, precision, 2.0**-8 if precision == "bf16" else 2.0**-11)


CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "3x3": ((2, 8, 14, 13), (24, 8, 3, 3), {"pads": (1, 1, 1, 1)}),
    "3x3 by strides": ((2, 64, 15, 14), (40, 64, 3, 3), {"pads": (1, 1, 0, 1), "strides": (2, 2)}),
    "3x3 of many channels": ((1, 288, 7, 7), (272, 288, 3, 3), {"pads": (1, 1, 1, 1)}),
    "3x3 by transforms": ((1, 64, 9, 9), (64, 64, 3, 3), {"pads": (1, 1, 1, 1)}),
    "3x3 apart": ((1, 32, 17, 19), (24, 32, 3, 3), {"dilations": (2, 3), "pads": (2, 3, 2, 3)}),
    "7x7 of colours": ((2, 3, 30, 31), (33, 3, 7, 7), {"pads": (3, 3, 3, 3), "strides": (2, 2)}),
    "5x1 of an odd depth": ((1, 7, 12, 9), (17, 7, 5, 1), {}),
    "of a grey picture": ((1, 1, 30, 31), (33, 1, 7, 7), {}),
    "to few outputs": ((2, 16, 20, 20), (3, 16, 3, 3), {}),
    "1x1": ((2, 64, 28, 28), (96, 64, 1, 1), {}),
    "1x1 of few pixels": ((1, 63, 7, 7), (33, 63, 1, 1), {}),
    "1x1 by strides": ((2, 64, 28, 28), (96, 64, 1, 1), {"strides": (2, 2)}),
    "1x1 of an odd depth by strides": ((2, 33, 9, 11), (20, 33, 1, 1), {"strides": (2, 3)}),
    "depthwise": ((2, 32, 14, 13), (32, 1, 3, 3), {"pads": (1, 1, 1, 1), "groups": 32}),
    "groups": ((2, 32, 14, 13), (48, 8, 3, 3), {"groups": 4}),
    "groups of an odd depth": ((1, 28, 14, 13), (48, 7, 3, 3), {"groups": 4}),
    "1x1 in groups": ((2, 32, 9, 9), (48, 16, 1, 1), {"groups": 2}),
    "one axis": ((2, 16, 50), (24, 16, 5), {}),
    "1x1 of one axis": ((2, 16, 50), (24, 16, 1), {}),
    "three axes": ((2, 6, 5, 9, 8), (24, 6, 3, 3, 3), {"pads": (1, 1, 1, 1, 1, 1)}),
    "three axes of one image": ((1, 1, 6, 9, 8), (24, 1, 3, 3, 3), {}),
    "1x1 of three axes": ((2, 16, 5, 6, 7), (24, 16, 1, 1, 1), {}),
    "1x1 to few outputs": ((2, 16, 30, 30), (2, 16, 1, 1), {}),
    "no pixels": ((0, 16, 9, 9), (24, 16, 3, 3), {}),
}


@PRECISIONS
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, precision: str) -> None:
    """Those by transforms within the error of these, the others within that of their sums."""
    x, w, options = CONVOLUTIONS[name]
    g, rng = rlx.Graph("conv"), np.random.default_rng(0)
    g.output(rlx.relu(rlx.conv(g.input("x", x), g.param("w", w), **options) + 0.5), "y")
    arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("x", x), ("w", w))}
    if 0 in x:
        model = _with(rlx.compile(g, device="cpu", precision=precision), arrays["w"])
        assert model.run({"x": arrays["x"]})[0].shape[0] == 0
        return
    agree(g, {"x": arrays["x"]}, precision, 5e-6 if "transforms" in name else 2e-6, {"w": arrays["w"]})


PAIRS = ("3x3 by strides", "3x3 of many channels", "3x3 apart", "7x7 of colours", "1x1 by strides", "1x1 in groups")


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("name", PAIRS)
def test_convolutions_by_pairs(name: str) -> None:
    """What is not finite reaches the windows that see it, and a pixel's bits depend on its window only."""
    (_, channels, *space), w_shape, options = CONVOLUTIONS[name]
    dims = [rlx.Dim("b", 1, 3), channels, *(rlx.Dim(f"s{d}", 1, 64) for d in range(len(space)))]
    g, rng = rlx.Graph("conv"), np.random.default_rng(0)
    g.output(rlx.conv(g.input("x", dims), g.param("w", w_shape), **options), "y")
    w = rng.standard_normal(w_shape).astype(np.float32)
    models = [_with(rlx.compile(g, device="cpu", precision="bf16", threads=t, cache=False), w) for t in (1, 2)]
    assert "+bf16_pairs " in models[0].explain("kernels")
    x = rng.standard_normal((3, channels, *space)).astype(np.float32)
    want = models[0].run({"x": x})[0]
    for first, count in ((0, 3), (1, 1), (2, 1)):
        y = models[1].run({"x": x[first : first + count]})[0]
        assert np.array_equal(y, want[first : first + count])
    x[1, 2, 5, 4], x[2, 0, 0, 0] = np.nan, np.inf
    spoiled = models[1].run({"x": x})[0]
    seen = rlx.compile(g, device="reference", cache=False)
    bad = ~np.isfinite(_with(seen, np.ones_like(w)).run({"x": x})[0])
    assert np.array_equal(~np.isfinite(spoiled), bad)
    assert np.array_equal(spoiled[~bad], want[~bad])


def test_convolutions_that_tile_registers_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are gathered for them where they have whole steps of k, and multiplied by vectors else."""
    on(monkeypatch, 64, "tiles")
    for channels, k, stride, name, tiles in (
        (64, 3, 1, "im2col", True),
        (6, 3, 1, "implicit_gemm", False),
        (64, 1, 2, "im2col", True),
        (24, 1, 2, "im2col", False),
    ):
        g = rlx.Graph("conv")
        x, w = g.input("x", (1, channels, 9, 9)), g.param("w", (300, channels, k, k))
        g.output(rlx.conv(x, w, strides=(stride, stride)), "y")
        legal = legal_graph(g, cpu(), "bf16")[1]
        (made,) = (
            kernel
            for kernel in lower_graph(legal, cpu(), CompileOptions(precision="bf16")).run
            if kernel.anchor is not None
        )
        assert made.strategy is not None
        assert made.strategy.name == f"conv.{name}+bf16_pairs"
        (code,) = cpu().emit_kernel(made)
        routines = "".join(text_of(word) for word in code.words if isinstance(word, Routine))
        assert ("tdpbf16ps" in routines) == tiles


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("name", ["3x3 by strides", "3x3 of many channels", "3x3 apart", "1x1 by strides"])
def test_windows_that_are_gathered_for_tile_registers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows and panels that tiles would be given, multiplied by vectors, which take the same arguments."""
    monkeypatch.setattr(product_module, "in_tiles", lambda geo, target: geo.depth % 16 == 0)
    x, w, options = CONVOLUTIONS[name]
    g, rng = rlx.Graph("conv"), np.random.default_rng(0)
    g.output(rlx.relu(rlx.conv(g.input("x", x), g.param("w", w), **options) + 0.5), "y")
    arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("x", x), ("w", w))}
    model = rlx.compile(g, device="cpu", precision="bf16", cache=False)
    assert " conv.im2col+bf16_pairs " in model.explain("kernels")
    agree(g, {"x": arrays["x"]}, "bf16", 2e-6, {"w": arrays["w"]})


@PRECISIONS
def test_convolutions_of_open_sizes(precision: str) -> None:
    """Beside other readers of the image, from sum to sum."""
    g, rng = rlx.Graph("conv"), np.random.default_rng(0)
    x = g.input("x", (rlx.Dim("b", 1, 4), 16, rlx.Dim("h", 1, 40), rlx.Dim("w", 1, 40)))
    y = rlx.relu(rlx.conv(x, g.param("w", (24, 16, 1, 1))) + 0.5)
    g.output(rlx.conv(y + rlx.relu(y - 1.0), g.param("v", (16, 24, 1, 1))) + x, "y")
    params = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("w", (24, 16, 1, 1)), ("v", (16, 24, 1, 1)))}
    for sizes in ((1, 16, 1, 1), (2, 16, 13, 7), (3, 16, 40, 40)):
        agree(g, {"x": rng.standard_normal(sizes).astype(np.float32)}, precision, 2e-3, params)


@pytest.mark.needs("bf16")
def test_single_pixels_are_products_of_pairs() -> None:
    """Many are read in words of pairs, as windows of several pixels are, but for those that transforms in f32 make
    faster."""
    for w, size, name in (
        ((64, 64, 1, 1), 20, "matmul.bf16_pairs"),
        ((64, 64, 1, 1), 30, "conv.in_image+bf16_pairs"),
        ((64, 64, 3, 3), 30, "conv.winograd_f4x4_3x3"),
        ((64, 64, 5, 5), 30, "conv.implicit_gemm+bf16_pairs"),
        ((1200, 64, 3, 3), 30, "conv.implicit_gemm+bf16_pairs"),
    ):
        g = rlx.Graph("conv")
        g.output(rlx.conv(rlx.relu(g.input("x", (1, 64, size, size))), g.param("w", w)), "y")
        model = rlx.compile(g, device="cpu", precision="bf16")
        assert f" {name} " in model.explain("kernels")


@PRECISIONS
@pytest.mark.parametrize("outputs, channels", [(3, 8), (8, 1), (8, 8)])
def test_single_pixels_that_are_no_product(outputs: int, channels: int, precision: str) -> None:
    """What is added to rows of the image keeps them from being one; of so few outputs or channels pairs do not pay."""
    g, rng = rlx.Graph("conv"), np.random.default_rng(0)
    y = rlx.conv(g.input("x", (2, channels, 6, 5)), g.param("w", (outputs, channels, 1, 1)))
    g.output(y + g.input("rows", (6, 1)), "y")
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("x", (2, channels, 6, 5)), ("rows", (6, 1)))}
    agree(g, feeds, precision, 2e-6, {"w": rng.standard_normal((outputs, channels, 1, 1)).astype(np.float32)})


@PRECISIONS
def test_transposed_convolutions(precision: str) -> None:
    g, rng = rlx.Graph("conv"), np.random.default_rng(0)
    g.output(rlx.conv_transpose(g.input("x", (2, 8, 14, 13)), g.param("w", (8, 24, 3, 3)), strides=(2, 2)), "y")
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((2, 8, 14, 13), (8, 24, 3, 3)))
    agree(g, {"x": x}, precision, 1e-6, {"w": w})


# ---- what is left alone


@PRECISIONS
def test_the_rest_is_computed_in_its_own_type(precision: str) -> None:
    """Other declared types, sums, and recurrent cells have the bits that they have in f32."""
    g, rng = rlx.Graph("rest"), np.random.default_rng(0)
    x, d, i = g.input("x", (6, 40)), g.input("d", (6, 40), "f64"), g.input("i", (6, 40), "i32")
    g.output(rlx.softmax(x) + rlx.sum(x), "sums")
    g.output(d @ rlx.transpose(d, perm=(1, 0)), "f64")
    g.output(i @ rlx.transpose(i, perm=(1, 0)), "i32")
    w, r = (g.constant(rng.standard_normal((1, 32, n)).astype(np.float32)) for n in (40, 8))
    g.output(rlx.lstm(rlx.reshape(x, shape=(6, 1, 40)), w, r)[0], "cells")
    feeds: Feeds = {
        "x": numbers(6, 40),
        "d": rng.standard_normal((6, 40)),
        "i": rng.integers(-9, 9, (6, 40)).astype(np.int32),
    }
    made, plain = (rlx.compile(g, device="cpu", precision=p).run(feeds) for p in (precision, "f32"))
    assert all(np.array_equal(a, b) for a, b in zip(made, plain, strict=True))


def test_an_attribute_that_is_not_known() -> None:
    g = rlx.Graph("g")
    x = g.input("x", (3, 3))
    with pytest.raises(OptionError, match="expected 'q8', 'bf16', 'f16'"):
        rlx.matmul(x, x, activations="f8")
    with pytest.raises(DTypeError, match="takes f32"):
        rlx.matmul(rlx.cast(x, "f64"), rlx.cast(x, "f64"), activations="bf16")


@PRECISIONS
def test_products_of_whole_numbers_stay_exact(precision: str) -> None:
    """Those that a graph quantises: the pass that finds them finds them with any precision."""
    g, rng = rlx.Graph("whole"), np.random.default_rng(0)
    scale, zero = g.constant(np.float32(0.1)), g.constant(np.uint8(3))
    x = rlx.dequantize(g.input("x", (9, 40), "u8"), scale, zero)
    w = rlx.dequantize(g.param("w", (40, 24), "i8", data=rng.integers(-128, 128, (40, 24)).astype(np.int8)), scale)
    g.output(x @ w, "y")
    feeds = {"x": rng.integers(0, 256, (9, 40)).astype(np.uint8)}
    made, plain = (rlx.compile(g, device="cpu", precision=p).run(feeds)[0] for p in (precision, "f32"))
    assert np.array_equal(made, plain)
