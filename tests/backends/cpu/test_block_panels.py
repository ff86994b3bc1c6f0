"""Panels of encoded blocks: how exact products are, in any number of rows, and which products take them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from targets import machine, pretend

import rlx
from rlx.backends.codegen.arguments import text_of
from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.kernel import gemm_kernel
from rlx.backends.cpu.gemm.panels import block_formats
from rlx.backends.cpu.gemm.panels import blocks as block_panels
from rlx.backends.cpu.gemm.panels.q8_codes import CODES as Q8_CODES
from rlx.backends.cpu.gemm.tile import tile_of
from rlx.backends.cpu.jit.compile import compile_object
from rlx.backends.cpu.jit.load import load_object
from rlx.backends.cpu.schedule.matmul import Chunking, tile_room
from rlx.ir.dtype import DTYPES
from rlx.ir.encoding import encoding_named
from rlx.ir.graph import Array
from rlx.ir.shape import Size
from rlx.kernels.encoded import bytes_of, decoded, encoded_element
from rlx.kernels.expr import Load
from rlx.kernels.lowering import out_vars
from rlx.kernels.program import Buffer
from tests.backends.cpu.test_gemm import Code, Guarded, load, product_words

WIDTHS = [pytest.param(bytes, marks=pytest.mark.needs(name)) for bytes, name in ((32, "avx2"), (64, "avx512"))]
FORMATS = {format.name: format for format in block_panels.ENCODED}
ENCODINGS = pytest.mark.parametrize("encoding", block_formats.CODES)
pytestmark = pytest.mark.needs("avx2")


def weights(encoding: str, n: int, k: int, seed: int = 0) -> tuple[Array, Array]:
    """Stored bytes of [N, K] and what they decode to: scales of many sizes, some zero, and the ends of the range."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((n, k)) * 10.0 ** rng.integers(-3, 3, (n, 1))
    w[rng.random((n, k)) < 0.01] = 0
    w[:: n // 3 + 1] = 0
    w[-1, ::3] = 1e4
    coded = encoding_named(encoding)
    stored = coded.encode(w.astype(np.float32))
    return stored, coded.decode(stored, (n, k))


def allowed(x: Array, w: Array) -> Array:
    """The error of sums in f32 of the products of [M, K] and [N, K]."""
    return (x.shape[1] + 10) * 2.0**-24 * (np.abs(x.astype(float)) @ np.abs(w.T.astype(float))) + 1e-30


def compiled(encoding: str, n: int, k: int, rows: Size, threads: int = 2) -> rlx.CompiledGraph:
    g = rlx.Graph("blocks")
    w, bias = g.param("w", (n, k), encoding=encoding), g.param("bias", (n,))
    g.output(g.input("x", (rows, k)) @ w.T + bias, name="y")
    return rlx.compile(g, device="cpu", threads=threads)


def strategy(model: rlx.CompiledGraph) -> str:
    (kernel,) = (k for k in model._executable.shared.program.run if k.anchor is not None)  # type: ignore[attr-defined]
    return kernel.how


@ENCODINGS
def test_products(encoding: str) -> None:
    """Of open numbers of rows, with odd numbers of blocks, and columns at the ends of panels."""
    for n, k in ((16, 32), (64, 96), (47, 160), (130, 352), (257, 768), (1, 64)):
        stored, w = weights(encoding, n, k)
        model, bias = compiled(encoding, n, k, rlx.Dim("m", 1, 400)), np.linspace(-1, 1, n, dtype=np.float32)
        model.set_params({"w": stored, "bias": bias})
        assert strategy(model) == f"matmul.panels+{encoding}"
        rng = np.random.default_rng(1)
        for m in (*range(1, 10), *range(11, 17), 24, 39, 40, 130, 400):
            x = (rng.standard_normal((m, k)) * 10.0 ** rng.integers(-3, 4, (m, 1))).astype(np.float32)
            wrong = np.abs(model.run({"x": x})[0] - (x.astype(float) @ w.T.astype(float) + bias))
            assert np.all(wrong <= allowed(x, w) + 2.0**-23 * (np.abs(bias) + 1)), (n, k, m)


OTHERS = pytest.mark.parametrize("encoding", sorted(set(FORMATS) - set(block_formats.CODES)))


@pytest.mark.sample(6)
@pytest.mark.parametrize("vector_bytes", WIDTHS)
@OTHERS
def test_products_of_decoded_weights(encoding: str, vector_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encodings that tile registers don't read, of any number of rows; they take what the encoding takes, or less."""
    pretend(monkeypatch, vector_bytes=vector_bytes, tiles=False, float_tiles=False)
    block = encoding_named(encoding).block
    for n, k in ((1, block), (47, 3 * block), (130, 7 * block)):
        stored, w = weights(encoding, n, k)
        model, bias = compiled(encoding, n, k, rlx.Dim("m", 1, 70)), np.linspace(-1, 1, n, dtype=np.float32)
        model.set_params({"w": stored, "bias": bias})
        assert strategy(model) == f"matmul.panels+{encoding}"
        read = Q8_CODES[encoding].nbytes if encoding in Q8_CODES else encoding_named(encoding).block_bytes
        assert model.needs.prepared == -(-n // 16) * 16 * k // block * read
        x = np.random.default_rng(n).standard_normal((70, k), dtype=np.float32)
        x[4:] *= 10.0 ** np.random.default_rng(0).integers(-3, 4, (66, 1))
        (want,) = model.run({"x": x})
        wrong = np.abs(want - (x.astype(float) @ w.T.astype(float) + bias))
        assert np.all(wrong <= allowed(x, w) + 2.0**-23 * (np.abs(bias) + 1)), (n, k)
        for m in (1, 2, 3, 4, 5, 13):
            np.testing.assert_array_equal(model.run({"x": x[:m]})[0], want[:m])


@pytest.mark.parametrize("encoding", ["q4_1", "q4_k", "q6_k", "nvfp4", "q8_k"])
def test_weights_are_those_that_the_encoding_decodes_to(encoding: str) -> None:
    """Bit for bit: a row with a single one takes a column of weights out."""
    n, k = 40, encoding_named(encoding).block * 2
    stored, w = weights(encoding, n, k)
    model = compiled(encoding, n, k, rlx.Dim("m", 1, 600))
    model.set_params({"w": stored, "bias": np.zeros(n, np.float32)})
    ones = np.eye(k, dtype=np.float32)
    for rows in (1, 4, k):
        np.testing.assert_array_equal(model.run({"x": ones[k - rows :]})[0], w.T[k - rows :])


@functools.cache
def code(encoding: str, vector_bytes: int) -> tuple[Code, object, int]:
    """The product, and the library and address of its block."""
    tile = tile_of(DTYPES["f32"], machine(vector_bytes=vector_bytes), format=FORMATS[encoding])
    routine = gemm.block_routine(tile)
    library = load_object(compile_object(text_of(routine), optimize=False))
    return load(gemm_kernel(tile), "rlx_gemm"), library, library.address(routine.symbol)


@ENCODINGS
@pytest.mark.parametrize(
    "way, vector_bytes",
    [
        *(pytest.param("registers", *p.values, marks=p.marks) for p in WIDTHS),
        pytest.param("tiles", 64, marks=pytest.mark.needs("avx512", "amx_f32")),
    ],
)
def test_nothing_else_is_touched(encoding: str, vector_bytes: int, way: str) -> None:
    """Decoded in registers or multiplied by tiles: the results, with guards around what is read and written."""
    size = encoding_named(encoding).block_bytes
    kernel, _, address = code(encoding, vector_bytes)
    for m, n, k in ((1, 16, 32), (3, 50, 96), (4, 65, 160), (17, 33, 256), (29, 100, 288), (65, 17, 1056)):
        stored, w = weights(encoding, n, k, m)
        panels = np.zeros((-(-n // 16), 16, k // 32, size), np.uint8)
        panels.reshape(-1, k // 32, size)[:n] = stored.reshape(n, k // 32, size)
        b = Guarded(np.ascontiguousarray(panels.transpose(0, 2, 3, 1)), at_end=True).array
        x = Guarded(np.random.default_rng(0).standard_normal((1, m, k)).astype(np.float32), at_end=True).array
        c = Guarded(np.full((1, m, n), np.nan, np.float32), at_end=True).array
        room = Guarded(np.zeros(tile_room(m, k), np.uint8), at_end=True).array
        tiles = way == "tiles"
        cut = Chunking(m, -(-n // 16), 1, room.nbytes if tiles else 0, 0, 0 if tiles else 128)
        places = {"a": x.ctypes.data, "b": b.ctypes.data, "c": c.ctypes.data}
        words = product_words(address, cut, room, lda=k, ldc=n, m=m, n=n, k=k, **places)
        kernel.run(np.array(words), 1)
        assert np.all(np.abs(c[0] - x[0].astype(float) @ w.T.astype(float)) <= allowed(x[0], w))


@ENCODINGS
def test_bits(encoding: str) -> None:
    """Those of a row don't depend on others, but that tiles compute many, nor on threads."""
    n, k, tiles = 300, 768, machine().float_tiles
    few = block_formats.CODES[encoding].tiles_from if tiles else 131
    counts = (*range(1, 21), 33, 130)
    stored, _ = weights(encoding, n, k)
    x = np.random.default_rng(0).standard_normal((130, k)).astype(np.float32)
    found = []
    for threads in (1, 2, 16):
        model = compiled(encoding, n, k, rlx.Dim("m", 1, 130), threads)
        model.set_params({"w": stored, "bias": np.zeros(n, np.float32)})
        found.append([model.run({"x": x[:m]})[0] for m in counts])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            np.testing.assert_array_equal(one, other)
    by_fma = [y for y in found[0] if len(y) < few]
    for some in (by_fma, found[0][len(by_fma) :]):
        for y in some:
            np.testing.assert_array_equal(y, some[-1][: len(y)])


@ENCODINGS
def test_what_is_not_finite(encoding: str) -> None:
    """A row with an infinity or a nan has it in its results, and no other row; rows of denormals are no zeros."""
    n, k = 64, 96
    stored, w = weights(encoding, n, k)
    model = compiled(encoding, n, k, rlx.Dim("m", 1, 400))
    model.set_params({"w": stored, "bias": np.zeros(n, np.float32)})
    for m in (4, 24, 200):
        x = np.random.default_rng(0).standard_normal((m, k)).astype(np.float32)
        x[1, 5], x[3, 0] = np.nan, np.inf
        x[2] *= np.float32(1e-38)
        y = model.run({"x": x})[0]
        assert np.all(np.isnan(y[1]))
        assert not np.any(np.isfinite(y[3]))
        assert np.all(np.isfinite(np.delete(y, (1, 3), 0)))
        assert np.all(np.abs(y[2] - x[2].astype(float) @ w.T.astype(float)) <= allowed(x[2:3], w) + 1e-40)


@ENCODINGS
def test_panels_take_what_is_stored(encoding: str) -> None:
    """And the stored blocks are not kept beside them, nor is anything decoded; for any rows, fast and shared."""
    for packing in ("fast", "shared"):
        for rows in (1, 128, rlx.Dim("rows", 1, 400)):
            g = rlx.Graph("blocks")
            g.output(g.input("x", (rows, 256)) @ g.param("w", (512, 256), encoding=encoding).T, name="y")
            model = rlx.compile(g, device="cpu", packing=packing)
            stored, _ = weights(encoding, 512, 256)
            model.set_params({"w": stored})
            shared = model._executable.shared  # type: ignore[attr-defined]
            (panels,) = shared.program.buffers("prepared")
            assert panels.nbytes({}) == stored.nbytes
            model.run({"x": np.zeros((1 if not isinstance(rows, int) else rows, 256), np.float32)})
            assert not shared.params


@ENCODINGS
def test_new_weights(encoding: str) -> None:
    """Are packed anew."""
    n, k = 40, 64
    model, x = compiled(encoding, n, k, 2), np.ones((2, k), np.float32)
    for seed in (1, 2):
        stored, w = weights(encoding, n, k, seed)
        model.set_params({"w": stored, "bias": np.zeros(n, np.float32)})
        assert np.all(np.abs(model.run({"x": x})[0] - w.astype(float).sum(1)) <= allowed(x, w))


@ENCODINGS
def test_which_products_take_them(encoding: str) -> None:
    """Those whose blocks lie along k, all of them or whole rows and blocks of them; others are decoded."""
    stored, w = weights(encoding, 96, 96)
    x = np.random.default_rng(0).standard_normal((3, 96)).astype(np.float32)

    def check(pick: object, blocks: bool) -> None:
        g = rlx.Graph("blocks")
        matrix = pick(g.param("w", (96, 96), encoding=encoding))  # type: ignore[operator]
        g.output(g.input("x", (3, matrix.shape[0])) @ matrix, name="y")
        model = rlx.compile(g, device="cpu")
        model.set_params({"w": stored})
        assert strategy(model) == (f"matmul.panels+{encoding}" if blocks else "matmul.panels")
        used = pick(w).T  # type: ignore[operator]
        own = x[:, : used.shape[1]]
        wrong = np.abs(model.run({"x": own})[0] - own.astype(float) @ used.T.astype(float))
        assert np.all(wrong <= allowed(own, used))

    check(lambda m: m.T, True)
    check(lambda m: m[5:70].T, True)
    check(lambda m: m[:, 32:].T, True)
    check(lambda m: m[::2].T, True)
    check(lambda m: m, False)
    check(lambda m: m[:, 16:80].T, False)
    check(lambda m: m[:, :48].T, False)


def test_heads_of_a_batch() -> None:
    """Matrices of one row each are one product; those of more read the same panels."""
    stored, w = weights("q8_0", 100, 64)
    for shape in ((5, 1, 64), (3, 4, 64), (2, 3, 20, 64)):
        g = rlx.Graph("blocks")
        g.output(g.input("x", shape) @ g.param("w", (100, 64), encoding="q8_0").T, name="y")
        model = rlx.compile(g, device="cpu")
        model.set_params({"w": stored})
        assert strategy(model) == "matmul.panels+q8_0"
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        flat = x.reshape(-1, 64)
        wrong = np.abs(model.run({"x": x})[0].reshape(-1, 100) - flat.astype(float) @ w.T.astype(float))
        assert np.all(wrong <= allowed(flat, w))


@ENCODINGS
def test_elements_are_recognised(encoding: str) -> None:
    """Expressions of decoded elements, and nothing else."""
    code = encoding_named(encoding)
    buffer = Buffer("w", "param", (8, 64), DTYPES["f32"], code)
    stored = bytes_of(buffer)
    i, j = out_vars(2)
    element = decoded(Load(buffer, (j, i), buffer.dtype), stored, code)
    assert encoded_element(element) == (stored, code, j * 64 + i)
    assert encoded_element(element * 2) is None
    assert encoded_element(Load(Buffer("x", "param", (8,), buffer.dtype), (i,), buffer.dtype)) is None


def test_machines_without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode as before."""
    monkeypatch.setattr(block_panels, "has_code", lambda _: False)
    stored, w = weights("q8_0", 40, 64)
    model = compiled("q8_0", 40, 64, 2)
    model.set_params({"w": stored, "bias": np.zeros(40, np.float32)})
    x = np.ones((2, 64), np.float32)
    assert strategy(model) == "matmul.panels"
    assert np.all(np.abs(model.run({"x": x})[0] - w.astype(float).sum(1)) <= allowed(x, w))


@ENCODINGS
def test_without_tile_registers(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows by fma, in bands."""
    pretend(monkeypatch, float_tiles=False)
    n, k = 130, 1024
    stored, w = weights(encoding, n, k)
    model = compiled(encoding, n, k, rlx.Dim("m", 1, 400))
    model.set_params({"w": stored, "bias": np.zeros(n, np.float32)})
    for m in (5, 6, 7, 12, 13, 25, 130, 400):
        x = np.random.default_rng(0).standard_normal((m, k)).astype(np.float32)
        assert np.all(np.abs(model.run({"x": x})[0] - x.astype(float) @ w.T.astype(float)) <= allowed(x, w))
