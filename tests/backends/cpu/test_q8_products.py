"""Products of rounded activations with encoded weights: how exact they are on several machines, and their bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from targets import machine, pretend

import rlx
from rlx.backends.cpu.gemm.panels.q8_codes import CODES
from rlx.ir.casting import quantised, rounded_q8
from rlx.ir.dtype import DTYPES
from rlx.ir.encoding import encoding_named
from rlx.ir.encodings import ENCODINGS
from rlx.ir.graph import Array
from rlx.ir.shape import Size
from rlx.ops.encoded import Dequantize
from tests.backends.cpu.test_block_panels import weights

pytestmark = pytest.mark.needs("avx2")
FEATURES = ("+avx512vnni", "+avxvnni")
MACHINES = [
    pytest.param(64, True, id="avx512_vnni", marks=pytest.mark.needs("avx512", "vnni")),
    pytest.param(64, False, id="avx512", marks=pytest.mark.needs("avx512")),
    pytest.param(32, True, id="avx2_vnni", marks=pytest.mark.needs("vnni")),
    pytest.param(32, False, id="avx2"),
]


def without(features: str) -> str:
    return ",".join(x for x in features.split(",") if x not in FEATURES)


def on(monkeypatch: pytest.MonkeyPatch, vector_bytes: int, dots: bool) -> None:
    """Code is made for such a machine from here on."""
    features = machine().features if dots else without(machine().features)
    pretend(monkeypatch, vector_bytes=vector_bytes, features=features, tiles=False, float_tiles=False)


def activations(m: int, k: int, seed: int = 1) -> Array:
    """Rows [M, K] of many sizes, with whole blocks of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, k)) * 10.0 ** rng.integers(-4, 4, (m, 1))
    x[:, k // 2 : k // 2 + 32] *= rng.integers(0, 2, (m, 1))
    return x.astype(np.float32)


def graph(encoding: str, n: int, k: int, rows: Size) -> rlx.Graph:
    g = rlx.Graph("products")
    w, bias = g.param("w", (n, k), encoding=encoding), g.param("bias", (n,))
    g.output(g.input("x", (rows, k)) @ w.T + bias, name="y")
    return g


def compiled(encoding: str, n: int, k: int, rows: Size, stored: Array, **options: object) -> rlx.CompiledGraph:
    model = rlx.compile(graph(encoding, n, k, rows), device="cpu", precision="q8", cache=False, **options)
    model.set_params({"w": stored, "bias": np.linspace(-1, 1, n, dtype=np.float32)})
    return model


def assert_close(y: Array, x: Array, w: Array, n: int, precision: str = "q8") -> None:
    """Close to the products of the rounded activations (of "f32": of these) in f64, within what sums in f32 are off."""
    rounded = (rounded_q8(x) if precision == "q8" else x).astype(np.float64)
    exact = rounded @ w.T.astype(np.float64) + np.linspace(-1, 1, n)
    allowed = (
        (x.shape[1] / (8 if precision == "q8" else 1) + 10)
        * 2.0**-24
        * (np.abs(rounded) @ np.abs(w.T.astype(np.float64)) + 1)
    )
    assert (np.abs(y - exact) <= allowed).all()


@pytest.mark.parametrize("vector_bytes, dots", MACHINES)
@pytest.mark.parametrize("encoding", CODES)
def test_products(encoding: str, vector_bytes: int, dots: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every height of a band, one and several blocks, and columns at the ends of panels."""
    on(monkeypatch, vector_bytes, dots)
    block = encoding_named(encoding).block
    for n, k in ((1, block), (47, 3 * block)):
        stored, w = weights(encoding, n, k)
        model = compiled(encoding, n, k, rlx.Dim("m", 1, 64), stored)
        assert f"matmul.q8+{encoding}" in model.explain("kernels")
        for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 21):
            x = activations(m, k)
            assert_close(model.run({"x": x})[0], x, w, n)


@pytest.mark.parametrize("encoding", ["q8_0", "q5_0", "q4_k", "q6_k"])
def test_a_row_has_its_bits_with_any_rows_and_threads(encoding: str) -> None:
    n, k = 590, 1024  # an odd number of panels
    stored, _ = weights(encoding, n, k)
    x = activations(150, k)
    whole = compiled(encoding, n, k, rlx.Dim("m", 1, 150), stored, threads=2)
    (want,) = whole.run({"x": x})
    for threads in (1, 2, 3):
        model = compiled(encoding, n, k, rlx.Dim("m", 1, 150), stored, threads=threads)
        for start, count in (*((3 * m, m) for m in range(1, 14)), (40, 33), (0, 150)):
            (y,) = model.run({"x": x[start : start + count]})
            assert np.array_equal(y, want[start : start + count])


ZEROS = [None, 7, "column"]


@pytest.mark.parametrize("vector_bytes, dots", MACHINES)
@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("dtype", ["i8", "u8"])
def test_bytes_with_a_scale_by_column(
    dtype: str, zero: int | str | None, vector_bytes: int, dots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes, of depths that are no whole blocks too; zero points of the model and of the file."""
    on(monkeypatch, vector_bytes, dots)
    rng = np.random.default_rng(0)
    array = np.int8 if dtype == "i8" else np.uint8
    for n, k in ((40, 64), (33, 50), (16, 3)):
        q = rng.integers(0, 256, (k, n)).astype(np.uint8).view(array)
        scale = rng.random(n).astype(np.float32)
        shift = rng.integers(3, 120, n).astype(array) if zero == "column" else np.full(n, zero or 0, array)
        g = rlx.Graph("bytes")
        w, s = g.param("w", (k, n), dtype=dtype, data=q), g.param("s", (n,), data=scale)
        numbers = rlx.cast(w, "f32")
        if zero == "column":
            numbers = numbers - rlx.cast(g.param("z", (n,), dtype=dtype, data=shift), "f32")
        elif zero is not None:
            numbers = numbers - float(shift[0])
        g.output(g.input("x", (rlx.Dim("m", 1, 64), k)) @ (numbers * s) + np.linspace(-1, 1, n, dtype=np.float32), "y")
        model = rlx.compile(g, device="cpu", precision="q8", cache=False)
        assert f"matmul.q8+{dtype}{'' if zero is None else '_zero'} " in model.explain("kernels")
        decoded = (q.astype(np.float32) - shift.astype(np.float32)) * scale
        for m in (1, 2, 7, 20):
            x = activations(m, k)
            assert_close(model.run({"x": x})[0], x, decoded.T, n)


@pytest.mark.parametrize("precision", ["q8", "f32"])
@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("dtype", ["i8", "u8", "u4"])
@pytest.mark.parametrize("vector_bytes, dots", MACHINES)
def test_bytes_with_scales_by_blocks(
    vector_bytes: int, dots: bool, dtype: str, zeroed: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales (and zero points) of 32 or 64 steps of k are multiplied beside; of other steps loops round activations.

    In f32 weights are decoded as products need them; a row has its bits with any rows.
    """
    on(monkeypatch, vector_bytes, dots)
    rng = np.random.default_rng(0)
    array = np.int8 if dtype == "i8" else DTYPES[dtype].numpy
    for n, k, block in ((40, 64, 32), (33, 192, 64), (16, 96, 48), (70, 160, 32)):
        q = rng.integers(0, 256, (k, n)).astype(np.uint8)
        q = q.view(array) if dtype != "u4" else (q & 15).astype(array)
        scale = (rng.random((k // block, n)) + 0.01).astype(np.float32)
        shift = rng.integers(3, 15 if dtype == "u4" else 120, (k // block, n)).astype(array)
        g = rlx.Graph("bytes")
        leaves = [g.param("w", (k, n), dtype=dtype, data=q), g.param("s", scale.shape, data=scale)]
        if zeroed:
            leaves.append(g.param("z", shift.shape, dtype=dtype, data=shift))
        w = g.add(Dequantize(0, block), *leaves)[0]
        g.output(g.input("x", (rlx.Dim("m", 1, 64), k)) @ w + np.linspace(-1, 1, n, dtype=np.float32), "y")
        model = rlx.compile(g, device="cpu", precision=precision, cache=False)
        way = "q8" if precision == "q8" else "panels"
        name = f"matmul.{way}+{dtype}{'_zero' if zeroed else ''}_scaled "
        assert (name in model.explain("kernels")) == (block % 32 == 0)
        less = np.repeat(shift, block, axis=0).astype(np.float32) if zeroed else np.float32(0)
        decoded = (q.astype(np.float32) - less) * np.repeat(scale, block, axis=0)
        x = activations(20, k)
        (want,) = model.run({"x": x})
        assert_close(want, x, decoded.T, n, precision)
        for m in (1, 2, 4, 7):
            assert np.array_equal(model.run({"x": x[:m]})[0], want[:m])


def test_machines_agree_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of whole numbers are the same with each instruction, and what follows them is in one order."""
    stored, _ = weights("q4_k", 70, 512)
    x, found = activations(5, 512), []
    for vector_bytes, dots in ((32, False), (32, True), (64, True)):
        if dots and without(machine().features) == machine().features:
            continue
        if vector_bytes > machine().vector_bytes:
            continue
        with monkeypatch.context() as patch:
            on(patch, vector_bytes, dots)
            found.append(compiled("q4_k", 70, 512, 5, stored).run({"x": x})[0])
    assert all(np.array_equal(y, found[0]) for y in found)


def test_batches_read_each_row_where_it_lies() -> None:
    """Rows in matrices, and rows that lie apart."""
    stored, w = weights("q8_0", 40, 64)
    g = rlx.Graph("batch")
    x = g.input("x", (3, rlx.Dim("m", 1, 9), 128))
    matrix = g.param("w", (40, 64), encoding="q8_0", data=stored).T
    g.output(rlx.slice(x, starts=(0, 0, 32), sizes=(3, x.shape[1], 64), steps=(1, 1, 1)) @ matrix, "part")
    g.output(
        rlx.transpose(rlx.slice(x, starts=(0, 0, 0), sizes=(3, x.shape[1], 64), steps=(1, 1, 1)), perm=(1, 0, 2))
        @ matrix,
        "turned",
    )
    model = rlx.compile(g, device="cpu", precision="q8")
    a = activations(21, 128).reshape(3, 7, 128)
    part, turned = model.run({"x": a})
    for y, rows in ((part, a[:, :, 32:96]), (turned, a[:, :, :64].transpose(1, 0, 2))):
        flat = np.ascontiguousarray(rows).reshape(-1, 64)
        assert_close(y.reshape(-1, 40) + np.linspace(-1, 1, 40, dtype=np.float32), flat, w, 40)


def test_rows_are_rounded_once_for_all_that_read_them() -> None:
    """Products of one input, of one encoding or several, share its rounded rows; others, and other branches, don't."""
    k, rng = 256, np.random.default_rng(0)
    g = rlx.Graph("shared")
    x, other = g.input("x", (3, k)), g.input("other", (3, k))
    for number, (encoding, a) in enumerate((("q8_0", x), ("q4_k", x), ("q8_0", x), ("q6_k", other))):
        stored = encoding_named(encoding).encode(rng.standard_normal((40 + number, k)).astype(np.float32))
        g.output(a @ g.param(f"w{number}", (40 + number, k), encoding=encoding, data=stored).T, f"y{number}")
    model = rlx.compile(g, device="cpu", precision="q8", cache=False)
    assert model.explain("kernels").count("matmul.round_rows") == 2
    feeds = {"x": activations(3, k), "other": activations(3, k, 2)}
    want = rlx.compile(g, device="reference", precision="q8").run(feeds)
    for y, reference in zip(model.run(feeds), want, strict=True):
        assert np.allclose(y, reference, rtol=1e-4, atol=1e-5 * np.abs(reference).max())


@pytest.mark.parametrize("encoding", ["q8_0", "q4_1", "q6_k"])
def test_hostile_activations_and_scales(encoding: str) -> None:
    """Of NaN, infinities and the ends of f32 rows are what the reference gives, and no other row is touched."""
    n, k = 20, 512
    stored, _ = weights(encoding, n, k)
    stored = stored.copy()
    x = activations(9, k)
    want = compiled(encoding, n, k, 9, stored).run({"x": x})[0]
    for row, value in enumerate((np.nan, np.inf, -np.inf, 1e33, 1e-38, 1e-45, 2.0**-100)):
        x[row, 100] = value
    x[5], x[6] = x[5] * 0, x[6] * 0 + np.float32(2.0**-100)
    g = graph(encoding, n, k, 9)
    both = [rlx.compile(g, device=device, precision="q8") for device in ("cpu", "reference")]
    results = []
    for model in both:
        model.set_params({"w": stored, "bias": np.linspace(-1, 1, n, dtype=np.float32)})
        results.append(model.run({"x": x})[0])
    y, reference = results
    assert np.isnan(y[:3]).all()
    assert np.array_equal(np.isfinite(y), np.isfinite(reference))
    assert np.array_equal(y[7:], want[7:])
    for made, given in zip(y[3:7], reference[3:7], strict=True):
        assert np.allclose(made, given, rtol=1e-4, atol=1e-6 * np.abs(given).max())


@pytest.mark.parametrize("encoding", CODES)
def test_any_bytes_are_weights(encoding: str) -> None:
    """Random bytes, as of a damaged file: scales are what they are, the largest too."""
    k = encoding_named(encoding).block * 2
    rng = np.random.default_rng(3)
    stored = rng.integers(0, 256, encoding_named(encoding).nbytes((33, k))).astype(np.uint8)
    w = encoding_named(encoding).decode(stored, (33, k)).astype(np.float64)
    x = activations(3, k)
    with np.errstate(all="ignore"):
        y = compiled(encoding, 33, k, 3, stored).run({"x": x})[0]
        exact = rounded_q8(x).astype(np.float64) @ w.T + np.linspace(-1, 1, 33)
        size = np.abs(rounded_q8(x).astype(np.float64)) @ np.abs(w.T)
    known = (np.abs(w).max(axis=1) < 1e31)[None] & (size < 1e37)  # the numbers of a group times their scale stay finite
    assert (np.abs(y - exact) <= 1e-4 * size + 1e-4)[known].all()


def test_what_has_no_whole_numbers_is_rounded_by_loops() -> None:
    """Encodings that are decoded by arithmetic, and blocks along the other axis."""
    others = [name for name, encoding in ENCODINGS.items() if encoding.native and name not in CODES]
    assert others == ["tq1_0"]
    for encoding, along_n in ((others[0], False), ("q4_0", True), ("q6_k", True)):
        coded = encoding_named(encoding)
        g = rlx.Graph("g")
        w = (np.random.default_rng(0).standard_normal((256, 512))).astype(np.float32)
        param = g.param("w", w.shape, encoding=encoding, data=coded.encode(w))
        g.output(g.input("x", (5, 256 if along_n else 512)) @ (param if along_n else param.T), "y")
        model = rlx.compile(g, device="cpu", precision="q8")
        assert "matmul.q8" not in model.explain("kernels")
        x, decoded = activations(5, 256 if along_n else 512), coded.decode(coded.encode(w), w.shape)
        columns = decoded.T if along_n else decoded
        (y,) = model.run({"x": x})
        assert_close(y + np.linspace(-1, 1, len(columns), dtype=np.float32), x, columns, len(columns))


def test_constants_are_rounded_too() -> None:
    """An operand of one element, which is no memory that a kernel reads."""
    g = rlx.Graph("g")
    w = g.param("w", (1, 3), dtype="i8", data=np.array([[1, -2, 3]], np.int8))
    g.output(g.constant(np.full((1, 1), 2.5, np.float32)) @ rlx.cast(w, "f32"), "y")
    numbers, scales = quantised(np.full((1, 1), 2.5, np.float32))
    want = np.float32(numbers[0, 0, 0]) * scales[0, 0, 0] * np.array([[1, -2, 3]], np.float32)
    for device in ("cpu", "reference", "interp"):
        assert np.array_equal(rlx.compile(g, device=device, precision="q8").run({})[0], want)


def test_an_artifact_has_them(tmp_path: Path) -> None:
    stored, _ = weights("q5_k", 64, 512)
    x = activations(4, 512)
    model = compiled("q5_k", 64, 512, 4, stored)
    want = model.run({"x": x})[0]
    model.save(tmp_path / "model.rlxart")
    loaded = rlx.load_artifact(tmp_path / "model.rlxart")
    assert np.array_equal(loaded.run({"x": x})[0], want)


def test_weights_take_the_bytes_of_their_file() -> None:
    for encoding, code in CODES.items():
        assert code.nbytes <= encoding_named(encoding).block_bytes
