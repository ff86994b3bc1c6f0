"""Products of f32 by tile registers: the error, odd shapes, what tiles can't do, and bits that depend on K only."""

import ctypes
import functools
import subprocess
import sys

import numpy as np
import pytest
from targets import machine
from test_gemm import Guarded

import rlx
from rlx.backends.codegen.arguments import text_of
from rlx.backends.cpu.gemm.kernel import block_routine
from rlx.backends.cpu.gemm.tile import tile_of
from rlx.backends.cpu.jit.compile import compile_object
from rlx.backends.cpu.jit.load import load_object
from rlx.backends.cpu.schedule.matmul import PRODUCT_BLOCK, by_tiles, tile_chunking, tile_room
from rlx.backends.cpu.target import TileTimes
from rlx.ir.dtype import DTYPES

pytestmark = pytest.mark.needs("amx_f32")
ULP = 2.0**-24
SIZES = (1, 15, 16, 17, 31, 32, 33, 47, 64, 65, 100, 129)


@functools.cache
def routine():
    made = block_routine(tile_of(DTYPES["f32"], machine()))
    library = load_object(compile_object(text_of(made), optimize=False))
    return library, ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 11)(library.address(made.symbol))


def pack(b):
    (k, n), panels = b.shape, -(-b.shape[1] // 16)
    padded = np.zeros((k, 16 * panels), np.float32)
    padded[:, :n] = b
    return np.ascontiguousarray(padded.reshape(k, panels, 16).swapaxes(0, 1))


def multiply(a, b, out=None, *, most=0):
    """A @ B by the block routine: with tiles, or by fma with blocks of `most` steps."""
    (m, k), n = a.shape, b.shape[1]
    c = np.full((m, n), 7, np.float32) if out is None else out
    panels = pack(b)
    room = np.full(tile_room(m, k) + 64, 255, np.uint8)  # of nans
    at = room.ctypes.data + -room.ctypes.data % 64
    places = a.ctypes.data, a.strides[0] // 4, panels.ctypes.data, 16 * k, c.ctypes.data, c.strides[0] // 4
    routine()[1](*places, m, n, k, most, 0 if most else at)
    return c


def random(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_product(c, a, b, factor=8):
    """An error of a few 2^-24 sum |a| |b|, where no order of that sum overflows."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    exact, total = x @ y, np.abs(x) @ np.abs(y)
    bound = factor * ULP * total + 2.0**-149 * a.shape[1]
    finite = total < np.finfo(np.float32).max
    assert (np.abs(c - exact)[finite] <= bound[finite]).all()


@pytest.mark.parametrize("k", [1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 97, 129, 767, 768, 769, 800, 1600])
def test_odd_shapes(k):
    for m in SIZES:
        for n in SIZES:
            a, b = random((m, k)), random((k, n), 1)
            assert_product(multiply(a, b), a, b)


def test_no_steps_of_k_are_zeros():
    assert (multiply(random((40, 0)), random((0, 50))) == 0).all()


@pytest.mark.parametrize("k", [300, 3072])
def test_numbers_of_one_sign_and_of_all_magnitudes(k):
    """Parts that are cut off rather than rounded leave out a little of each product, all of one sign."""
    rng = np.random.default_rng(2)
    for a, b in (
        (abs(random((70, k))), abs(random((k, 90), 1))),
        (np.full((70, k), 1 + 2.0**-8 - 2.0**-23, np.float32), np.full((k, 90), 2 - 2.0**-23, np.float32)),
        (random((70, k)) * 2 ** rng.uniform(-30, 30, (70, k)), random((k, 90), 1) * 2 ** rng.uniform(-30, 30, (k, 90))),
        (random((70, k)) * 2.0**60, random((k, 90), 1) * 2.0**-60),
    ):
        x, y = a.astype(np.float32), b.astype(np.float32)
        # sums of one sign are rounded at every step, by fma as well
        assert_product(multiply(x, y), x, y, factor=8 + k / 16)


@pytest.mark.parametrize("k", [64, 900])
def test_results_that_are_nearly_denormals(k):
    """Numbers that are large enough for three parts each, but whose products are not: an error of K 2^-123 at most."""
    for left in range(-62, -30, 4):
        for right in range(-62, -30, 4):
            a, b = random((40, k)) * np.float32(2.0**left), random((k, 50), 1) * np.float32(2.0**right)
            x, y = a.astype(np.float64), b.astype(np.float64)
            bound = 8 * ULP * (abs(x) @ abs(y)) + k * 2.0**-123
            assert (abs(multiply(a, b) - x @ y) <= bound).all()


SPECIAL = [np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e30, 1e-30, 1e-38, 1e-45, -0.0]


@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("where", ["element", "row", "all", "mixed"])
@pytest.mark.parametrize("side", ["a", "b", "both"])
def test_what_tiles_cannot_do(side, where, value):
    """Infinities, nans, numbers that round to infinity and that are too small for three parts."""
    value = np.float32(value)
    for m, n, k in ((40, 50, 70), (33, 16, 800), (16, 130, 96)):
        a, b = random((m, k)), random((k, n), 1)
        for x in [a] if side == "a" else [b.T] if side == "b" else [a, b.T]:
            if where == "element":
                x[5, 3] = value
            elif where == "row":
                x[5] *= np.sign(value) if abs(value) > 1e38 else value
                x[9] = value
            elif where == "all":
                x *= np.sign(value) if abs(value) > 1e38 else value
            else:
                x[np.random.default_rng(3).random(x.shape) < 0.01] = value
        with np.errstate(all="ignore"):
            c, fma = multiply(a, b), multiply(a, b, most=PRODUCT_BLOCK)
            assert_product(c, a, b)
        # sums of huge numbers overflow in one order and not in another
        same = np.isfinite(fma) == np.isfinite(c)
        assert same.all() or abs(value) > 1e38
        np.testing.assert_array_equal(np.where(np.isfinite(fma), 0, fma)[same], np.where(np.isfinite(c), 0, c)[same])


def test_sums_done_anew_are_those_of_fma_and_the_others_stay():
    a, b = random((70, 100)), random((100, 90), 1)
    plain = multiply(a, b)
    a[3] *= np.float32(1e-36)
    a[65, 7], b[50, 33] = np.inf, np.nan
    c, fma = multiply(a, b), multiply(a, b, most=PRODUCT_BLOCK)
    anew = np.zeros(c.shape, bool)
    anew[[3, 65]], anew[:, 33] = True, True
    np.testing.assert_array_equal(c, np.where(anew, fma, plain))


@pytest.mark.parametrize("k", [64, 65, 500, 1600, 1601])
def test_bits_of_an_element_depend_on_k_only(k):
    """The same rows and columns among others, or alone."""
    a, b = random((150, k)), random((k, 160), 1)
    a[17, 3], b[9, 70] = np.inf, np.nan
    a[100] *= np.float32(1e-36)
    a[8, :40] *= np.float32(1e-36)  # all that there is of a block of k, of the last one, and some of one
    a[9, 800:] *= np.float32(1e-36)
    b[:, 18] *= np.float32(1e-36)
    b[:800, 33] *= np.float32(1e-36)
    b[832:, 34] *= np.float32(1e-36)
    b[:, 50], a[21] = 0, 0
    whole = multiply(a, b)
    pieces = [(0, 1, 0, 16), (5, 30, 16, 160), (96, 150, 64, 112), (100, 133, 48, 80), (16, 18, 0, 160)]
    pieces += [(7, 7 + m, 16 - n % 16, 16 - n % 16 + n) for m in (8, 15, 16, 17, 31, 32, 33) for n in (16, 48, 64, 96)]
    for m0, m1, n0, n1 in pieces:
        np.testing.assert_array_equal(multiply(a[m0:m1], np.ascontiguousarray(b[:, n0:n1])), whole[m0:m1, n0:n1])


@pytest.mark.parametrize("at_end", [True, False])
def test_nothing_outside_is_touched(at_end):
    """A and C border on pages that fault; gaps between rows of C stay as they are."""
    few = [(1, 1, 1), (16, 32, 32), (16, 32, 64), (16, 64, 64), (7, 100, 96), (9, 48, 65), (32, 17, 96), (31, 33, 79)]
    for m, n, k in (*few, (31, 33, 47), (48, 70, 801), (64, 64, 64), (39, 64, 64), (99, 32, 40)):
        a, b = random((m, k)), random((k, n), 1)
        guarded = Guarded(a, at_end).array
        assert_product(multiply(guarded, b, Guarded(np.full((m, n), 7, np.float32), at_end).array), a, b)
        frame = np.full((m, n + 20), 7, np.float32)
        assert_product(multiply(a, b, frame[:, 9 : 9 + n]), a, b)
        assert (frame[:, :9] == 7).all()
        assert (frame[:, 9 + n :] == 7).all()


def test_rows_with_gaps():
    wide, b = random((50, 200)), random((90, 40), 1)
    assert_product(multiply(wide[:, 13:103], b), wide[:, 13:103], b)


@pytest.mark.parametrize(
    "shape",
    [
        (128, 768, 768),
        (24, 32, 64),
        (49, 160, 960),
        (196, 96, 576),
        (1000, 384, 1536),
        (197, 50, 70),
        (128, 50257, 768),
    ],
)
@pytest.mark.parametrize("threads", [1, 2, 3, 4, 5, 16, 64])
def test_chunks_cover_everything(shape, threads):
    m, n, k = shape
    for batch in (1, 3):
        cut = tile_chunking(TileTimes(), m, n, k, batch, threads)
        assert cut.chunks == batch * -(-m // cut.row_chunk) * -(-n // (16 * cut.panel_chunk))
        assert cut.copy_bytes >= tile_room(cut.row_chunk, k)
        assert cut.panel_chunk % 2 == 0


def product(k=96, n=80):
    rows = rlx.Dim("rows", 0, 400)
    g = rlx.Graph("product")
    x, w = g.input("x", (rows, k)), g.param("w", (k, n))
    g.output(rlx.relu(x @ w + g.param("b", (n,))), name="y")
    return g


def test_a_graph_whose_rows_are_now_few_and_now_many():
    """Both routines, chosen by the number of rows, and the same bits for any number of threads."""
    w, b = random((96, 80)), random(80, 1)
    runs = [rlx.compile(product(), device="cpu", threads=t) for t in (1, 2, 3, 7)]
    for run in runs:
        run.set_params({"w": w, "b": b})
    chosen = set()
    for m in (0, 1, 5, 31, 33, 64, 102, 103, 127, 128, 129, 399, 2):
        x = random((m, 96), m)
        first, *others = (run.run({"x": x})[0] for run in runs)
        np.testing.assert_allclose(first, np.maximum(x.astype(np.float64) @ w + b, 0), atol=2e-5)
        for y in others:
            np.testing.assert_array_equal(y, first)
        chosen.add(by_tiles(m, 80, 96))
    assert chosen == {True, False}


def test_a_process_without_leave_computes_by_fma(tmp_path):
    """Compiled code that a process with tiles has stored is not for one without, and the other way round."""
    code = (
        "import sys, numpy as np, rlx\nfrom rlx.backends.cpu.jit import cpuid\n"
        "if sys.argv[2] == 'refused': cpuid.request = lambda: -1\n"
        "g = rlx.Graph('p')\nx, w = g.input('x', (64, 300)), g.param('w', (300, 160))\ng.output(x @ w, name='y')\n"
        "rng = np.random.default_rng(0)\na, b = (rng.normal(size=s).astype('f4') for s in ((64, 300), (300, 160)))\n"
        "m = rlx.compile(g, device='cpu', cache_dir=sys.argv[1])\nm.set_param('w', b)\ny = m.run({'x': a})[0]\n"
        "assert abs(y - a.astype(float) @ b).max() < 1e-4\nprint(y.tobytes().hex())\n"
    )

    def bits(how):
        run = [sys.executable, "-c", code, str(tmp_path), how]
        return subprocess.run(run, check=True, capture_output=True, text=True, timeout=120).stdout

    asked, refused = bits("asked"), bits("refused")
    assert asked != refused
    assert (bits("asked"), bits("refused")) == (asked, refused)
