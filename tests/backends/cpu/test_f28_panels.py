"""Shortened panels: what they hold, that products have the bits of plain ones, and which products take them."""

import functools

import numpy as np
import pytest
from targets import machine

import rlx
from rlx.backends.codegen.arguments import text_of
from rlx.backends.cpu.gemm.kernel import block_routine, gemm_kernel
from rlx.backends.cpu.gemm.panels import f28
from rlx.backends.cpu.gemm.panels.plain import pack_b
from rlx.backends.cpu.gemm.tile import tile_of
from rlx.backends.cpu.jit.compile import compile_object
from rlx.backends.cpu.jit.load import load_object
from rlx.backends.cpu.schedule.matmul import chunking, in_pairs
from rlx.backends.cpu.target import Rates
from rlx.ir.dtype import DTYPES
from rlx.records import replace
from tests.backends.cpu.test_gemm import Guarded, load, multiply, product_words, random

WIDTHS = [pytest.param(bytes, marks=pytest.mark.needs(name)) for bytes, name in ((32, "avx2"), (64, "avx512"))]
pytestmark = pytest.mark.needs("avx2")


@functools.cache
def codes(vector_bytes):
    """The packing, the product and the address of its block."""
    tile = tile_of(DTYPES["f32"], machine(vector_bytes=vector_bytes), format=f28.F28_PANELS)
    routine = block_routine(tile)
    library = load_object(compile_object(text_of(routine), optimize=False))
    product = load(gemm_kernel(tile), "rlx_gemm")
    return load(pack_b(tile, then=f28.SHORTENING), "rlx_pack_b"), product, library, library.address(routine.symbol)


def shortened(b, vector_bytes):
    """The panels of B[1, K, N], with a guard behind them."""
    (_, k, n), size = b.shape, 4
    panels = -(-n // 16)
    out = Guarded(np.full(f28.elements(k, n), np.nan, np.float32), at_end=True).array
    words = [
        b.ctypes.data,
        b.strides[1] // size,
        b.strides[2] // size,
        0,
        out.ctypes.data,
        0,
        k,
        n,
        1,
        f28.TOGETHER,
    ]
    codes(vector_bytes)[0].run(np.array(words), -(-panels // f28.TOGETHER))
    return out


def short_product(a, b, vector_bytes):
    (_, m, k), n = a.shape, b.shape[2]
    c = Guarded(np.full((1, m, n), np.nan, np.float32), at_end=True).array
    cut = in_pairs(chunking(Rates(), m, n, k, 1, 4), m, n, 1)
    panels = shortened(b, vector_bytes)
    cut, places = replace(cut, copy_bytes=0), {"a": a.ctypes.data, "b": panels.ctypes.data, "c": c.ctypes.data}
    words = product_words(codes(vector_bytes)[3], cut, None, lda=a.strides[1] // 4, ldc=n, m=m, n=n, k=k, **places)
    codes(vector_bytes)[1].run(np.array(words), cut.chunks)
    return c


def weights(kind, k, n):
    b = random((1, k, n), "f32", 1)
    rng = np.random.default_rng(2)
    few = rng.random(b.shape) < 0.01
    match kind:
        case "zeros":
            b[few] = 0
        case "all zero":
            b[...] = 0
        case "large":
            b[few] *= 1e6
        case "tiny":
            b *= np.float32(2.0**-140)
        case "special":
            b[few] = rng.choice(np.array([np.inf, -np.inf, np.nan, 1e-42, -0.0, 3e38], np.float32), few.sum())
        case "even":
            b = np.exp2(rng.integers(-8, 8, b.shape)).astype(np.float32) * np.sign(b)
        case "wide":
            b = np.exp2(rng.integers(-120, 120, b.shape)).astype(np.float32)
    return b


KINDS = ["normal", "zeros", "all zero", "large", "tiny", "special", "even", "wide"]


@pytest.mark.parametrize("vector_bytes", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_plain_panels(kind, vector_bytes):
    sizes = ((1, 100, 264), (2, 16, 8), (3, 130, 512), (4, 65, 520), (1, 1, 1024), (4, 257, 136), (2, 33, 16))
    rows = range(5, f28.most_rows(machine(vector_bytes=vector_bytes), f28.LARGE) + 1)
    for m, n, k in (*sizes, *((m, 40 + m, 144) for m in rows)):
        a, b = random((1, m, k), "f32"), weights(kind, k, n)
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(short_product(a, b, vector_bytes), multiply(a, b))


@pytest.mark.parametrize("vector_bytes", WIDTHS)
def test_columns_and_strides(vector_bytes):
    """Weights that lie transposed, or with gaps; rows of A among others."""
    a, b = random((1, 3, 90), "f32")[:, :, 10:82], random((1, 50, 72), "f32", 1).swapaxes(1, 2)
    np.testing.assert_array_equal(short_product(a, b, vector_bytes), multiply(a, b))
    loose = random((1, 144, 150), "f32", 2)[:, ::2, ::3]
    np.testing.assert_array_equal(short_product(a, loose, vector_bytes), multiply(a, loose))


@pytest.mark.parametrize("vector_bytes", WIDTHS)
def test_normal_weights_are_short(vector_bytes):
    """The bytes before the steps say which eights are kept whole: hardly any, all of wide ones, and those of a zero."""
    k, n = 768, 64

    def kept(b):
        panels = shortened(b, vector_bytes)
        starts = panels[: 2 * -(-b.shape[2] // 16)].view(np.int64)
        flags = np.array([panels.view(np.uint8)[p + 64 : p + 64 + k // 8] for p in starts])
        assert (flags <= 1).all()
        whole = flags.sum(1) * 64 + 448 * (k // 8) + 64 + 128
        assert (np.diff(starts) == whole[:-1]).all()
        return flags

    assert kept(weights("normal", k, n)).mean() < 0.05
    assert kept(weights("even", k, n)).sum() == 0
    assert kept(weights("wide", k, n)).all()
    b = weights("even", k, n)
    b[0, 17, 20] = 0  # step 17 is of the third eight
    assert kept(b).sum() == 1
    assert kept(b)[1, 2] == 1
    assert kept(b[:, :, :57]).sum() == 1, "padding is no reason to keep anything whole"


def network(rows, k=1024, n=2560):
    g = rlx.Graph("products")
    x = g.input("x", (rows, k))
    g.output((x @ g.param("w", (k, n))) + g.param("b", (n,)), name="y")
    return g


MOST = f28.most_rows(machine(), 10 << 20)


@pytest.mark.parametrize(
    "rows, k, n, short",
    [
        (1, 1024, 2560, True),
        (MOST, 1024, 2560, True),
        (MOST + 1, 1024, 2560, False),
        (1, 1023, 2560, False),
        (1, 512, 2560, False),
        (rlx.Dim("rows", 1, MOST), 1024, 2560, True),
        (rlx.Dim("rows", 1, MOST + 1), 1024, 2560, False),
    ],
)
def test_which_products_take_them(rows, k, n, short):
    """Few rows, whole eights of k, and 8 MiB of weights in the model; new params are packed anew."""
    model = rlx.compile(network(rows, k, n), device="cpu")
    rng = np.random.default_rng(0)
    for count in (1, 3) if not isinstance(rows, int) else (rows,):
        w, b = rng.normal(size=(k, n)).astype(np.float32), rng.normal(size=n).astype(np.float32)
        model.set_params({"w": w, "b": b})
        x = rng.normal(size=(count, k)).astype(np.float32)
        np.testing.assert_allclose(model.run({"x": x})[0], x.astype(np.float64) @ w + b, atol=2e-3)
    panels = next(b for b in model._executable.shared.program.buffers("prepared"))
    assert (len(panels.shape) == 1) == short


@pytest.mark.parametrize("batch", [2, 5, rlx.Dim("batch", 1, 9)])
@pytest.mark.parametrize("rows", [1, MOST])
def test_weights_that_several_matrices_share(batch, rows):
    """Each has results of its own, in all of its columns."""
    k, n = 1024, 2568
    g = rlx.Graph("products")
    g.output(g.input("x", (batch, rows, k)) @ g.param("w", (k, n)), name="y")
    rng = np.random.default_rng(0)
    w = rng.normal(size=(k, n)).astype(np.float32)
    together = rows if rows > 1 else getattr(batch, "hi", batch)  # matrices of one row are one product
    short = f28.unsuited(together, n, k, machine()) is None
    for threads in (1, 2, 16):
        model = rlx.compile(g, device="cpu", threads=threads)
        model.set_params({"w": w})
        assert ("matmul.panels+f28" in {kernel.how for kernel in model._executable.shared.program.run}) == short
        for count in (1, 3) if not isinstance(batch, int) else (batch,):
            x = rng.normal(size=(count, rows, k)).astype(np.float32)
            np.testing.assert_allclose(model.run({"x": x})[0], x.astype(np.float64) @ w, atol=2e-3)
