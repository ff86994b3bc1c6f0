"""Matrix products: numerics over odd shapes, memory bounds by guard pages, and bits that depend on nothing but K."""

import ctypes
import functools
import mmap
from dataclasses import dataclass

import numpy as np
import pytest
from targets import machine

from rlx.backends.codegen.arguments import text_of
from rlx.backends.cpu.gemm.chunk import ProductArguments
from rlx.backends.cpu.gemm.kernel import block_routine, gemm_kernel, micro_kernel
from rlx.backends.cpu.gemm.panels.plain import pack_b
from rlx.backends.cpu.gemm.tile import SCALARS, tile_of
from rlx.backends.cpu.jit import compile as jit
from rlx.backends.cpu.jit.compile import compile_object
from rlx.backends.cpu.jit.load import load_object
from rlx.backends.cpu.llvm import math as vmath
from rlx.backends.cpu.llvm.builder import Module, size_of, vec
from rlx.backends.cpu.schedule.matmul import Chunking, chunking, k_block
from rlx.backends.cpu.target import Rates
from rlx.ir import dtype as rlx_dtype

DTYPES = {"f32": np.float32, "f64": np.float64}
TOLERANCE = {"f32": 2e-6, "f64": 4e-15}
SIGNATURE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)

RATES = Rates()


@dataclass
class Code:
    """A loaded kernel."""

    library: object
    call: object

    def run(self, words, chunks, worker=0):
        for chunk in range(chunks):
            self.call(words.ctypes.data, chunk, 0, worker)


def load(module, name):
    library = load_object(compile_object(module.text(), optimize=False))
    return Code(library, SIGNATURE(library.address(name)))


def packed_elements(k, n, dtype="f32"):
    """Elements of one packed [K, N] matrix."""
    width = 64 // np.dtype(DTYPES[dtype]).itemsize
    return -(-n // width) * width * k


def tile(dtype, vector_bytes=0):
    return tile_of(rlx_dtype.DTYPES[dtype], machine(vector_bytes=vector_bytes or machine().vector_bytes))


def steps(f, number):
    """Where a matrix of a batch begins, by the steps between them: the words behind those of a product."""
    return tuple(f.mul(number, f.load("i64", f.gep(ProductArguments.behind(f), i, "i64"))) for i in range(3))


@functools.cache
def product(dtype, vector_bytes=0):
    return load(gemm_kernel(tile(dtype, vector_bytes), batch_offsets=steps), "rlx_gemm")


@functools.cache
def packer(dtype, vector_bytes=0):
    return load(pack_b(tile(dtype, vector_bytes)), "rlx_pack_b")


@functools.cache
def block(dtype, vector_bytes=0):
    """The address of the block routine."""
    routine = block_routine(tile(dtype, vector_bytes))
    library = load_object(compile_object(text_of(routine), optimize=False))
    return library, library.address(routine.symbol)


def pack(b, dtype, vector_bytes=0, per_chunk=3):
    """Packs B[batch, K, N] of any strides."""
    batch, k, n = b.shape
    size, width = b.itemsize, tile(dtype).width
    panels = -(-n // width)
    out = np.full((batch, panels, k, width), np.nan, b.dtype)
    strides = [s // size for s in b.strides]
    words = [b.ctypes.data, strides[1], strides[2], strides[0], out.ctypes.data, packed_elements(k, n, dtype), k, n]
    words = np.array([*words, batch, per_chunk])
    packer(dtype, vector_bytes).run(words, batch * -(-panels // per_chunk))
    return out


def product_words(block, cut, scratch, **others):
    """The words of a product whose block routine is at `block`; `scratch` is an array, or None."""
    own = {"scratch": 0, "scratch_stride": 0}
    if scratch is not None:
        own = {"scratch": scratch.ctypes.data, "scratch_stride": scratch.nbytes}
    places = {"sums": cut.copy_bytes, "copy": 0 if cut.copy_bytes else -1, "steps": cut.steps}
    chunks = {"row_chunk": cut.row_chunk, "panel_chunk": cut.panel_chunk}
    return ProductArguments.given(block=block, **own, **places, **chunks, **others)


def words_of(a, packed, c, n, cut, scratch, extra=None, b_batch=None, vector_bytes=0):
    """The words of a product of A[batch, M, K] and packed panels; a batch stride of 0 broadcasts."""
    size, (_, m, k) = a.itemsize, a.shape
    batch = [a.strides[0] // size, packed[0].size if b_batch is None else b_batch, c.strides[0] // size]
    operands = {"a": a.ctypes.data, "lda": a.strides[1] // size, "b": packed.ctypes.data}
    results = {"c": c.ctypes.data, "ldc": c.strides[1] // size, "m": m, "n": n, "k": k}
    address = block("f32" if size == 4 else "f64", vector_bytes)[1]
    return np.array([*product_words(address, cut, scratch, **operands, **results), *(extra or batch)])


def multiply(a, b, cut=None, vector_bytes=0, out=None):
    """A[batch, M, K] @ B[batch or 1, K, N]."""
    dtype = "f32" if a.dtype == np.float32 else "f64"
    (batch, m, k), n = a.shape, b.shape[2]
    c = np.full((batch, m, n), np.nan, a.dtype) if out is None else out
    cut = cut or chunking(RATES, m, n, k, batch, size_of(SCALARS[dtype]))
    scratch = np.zeros(cut.copy_bytes + 64, np.uint8)
    packed = pack(b, dtype, vector_bytes)
    b_batch = 0 if len(b) == 1 else None
    words = words_of(a, packed, c, n, cut, scratch, b_batch=b_batch, vector_bytes=vector_bytes)
    product(dtype, vector_bytes).run(words, cut.chunks)
    return c


def random(shape, dtype, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(DTYPES[dtype])


def assert_product(c, a, b, dtype):
    exact = a.astype(np.float64) @ b.astype(np.float64)
    bound = TOLERANCE[dtype] * (np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64) + 1e-30)
    assert c.shape == exact.shape
    assert (np.abs(c - exact) <= bound).all()


@pytest.mark.sample(8)
@pytest.mark.parametrize("k", [0, 1, 2, 7, 33, 257, 400, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_shapes(dtype, k):
    for m in (1, 2, 5, 6, 7, 13, 15, 33, 100):
        for n in (1, 2, 7, 15, 16, 17, 31, 33, 48, 64, 65, 100, 257):
            a, b = random((1, m, k), dtype), random((1, k, n), dtype, 1)
            assert_product(multiply(a, b), a, b, dtype)


@pytest.mark.parametrize("shape", [(0, 5, 4), (5, 0, 4), (0, 0, 0)])
def test_empty(shape):
    m, n, k = shape
    assert chunking(RATES, m, n, k, 1, 4).chunks == 0
    assert multiply(random((1, m, k), "f32"), random((1, k, n), "f32")).shape == (1, m, n)


@pytest.mark.parametrize("vector_bytes", [16, pytest.param(32, marks=pytest.mark.needs("avx2"))])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_vector_widths(dtype, vector_bytes):
    """Tiles for 128-bit vectors run here too; the bits are those of any width."""
    for m, n, k in ((1, 70, 90), (2, 70, 90), (23, 70, 500)):
        a, b = random((1, m, k), dtype), random((1, k, n), dtype, 1)
        c = multiply(a, b, vector_bytes=vector_bytes)
        assert_product(c, a, b, dtype)
        np.testing.assert_array_equal(c, multiply(a, b))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vector_bytes", [16, 32, 64])
def test_tiles_fit_the_registers(dtype, vector_bytes):
    for registers in (16, 32):
        t = tile_of(rlx_dtype.DTYPES[dtype], machine(vector_bytes=vector_bytes), registers)
        vectors = t.width // t.lanes
        tiles = [(rows, t.panels_for(rows) if rows <= 2 else t.panels) for rows in range(1, t.rows + 1)]
        tiles += [(rows, 1) for rows in range(1, t.single_rows + 1)]
        tiles += [(rows, 3) for rows in range(1, t.triple_rows + 1)]
        for rows, panels in tiles:
            held = min(rows, panels * vectors)  # of A or B
            assert rows * panels * vectors + held + 1 <= registers


def test_wide_tiles_print_valid_code():
    """Code for 512-bit vectors, which may not run here, compiles."""
    text = gemm_kernel(tile("f32", 64)).text()
    assert compile_object(text, optimize=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_and_broadcast(dtype):
    a, b = random((5, 19, 40), dtype), random((5, 40, 50), dtype, 1)
    assert_product(multiply(a, b), a, b, dtype)
    assert_product(multiply(a, b[:1]), a, b[:1], dtype)
    same_a = np.broadcast_to(a[:1], a.shape)
    assert_product(multiply(same_a, b), same_a, b, dtype)


def test_strided_operands():
    """Rows of A and C with gaps, B transposed and B with both strides: the gaps of C stay as they are."""
    wide, b = random((1, 30, 90), "f32"), random((1, 40, 50), "f32", 1)
    a = wide[:, :, 13:53]
    frame = np.full((1, 30, 77), 7, np.float32)
    c = multiply(a, np.ascontiguousarray(b.swapaxes(1, 2)).swapaxes(1, 2), out=frame[:, :, 9:59])
    assert_product(c, a, b, "f32")
    assert (frame[:, :, :9] == 7).all()
    assert (frame[:, :, 59:] == 7).all()
    loose = random((1, 80, 150), "f32", 2)[:, ::2, ::3]
    assert_product(multiply(a, loose), a, loose, "f32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["rows", "columns", "neither"])
def test_packing(dtype, order):
    """The layout is [panel][K][width], zero beyond N."""
    b = random((2, 21, 45), dtype)
    if order == "columns":
        b = np.ascontiguousarray(b.swapaxes(1, 2)).swapaxes(1, 2)
    elif order == "neither":
        b = random((2, 42, 135), dtype)[:, ::2, ::3]
    packed, width = pack(b, dtype), tile(dtype).width
    padded = np.zeros((2, 21, -(-45 // width) * width), b.dtype)
    padded[:, :, :45] = b
    np.testing.assert_array_equal(packed, padded.reshape(2, 21, -1, width).swapaxes(1, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [64, 500, 1024])
def test_bits_of_a_row_depend_on_k_only(dtype, k):
    """The same rows alone, among others, in any chunks and with A copied: equal bits."""
    a, b = random((1, 100, k), dtype), random((1, k, 150), dtype, 1)
    whole = multiply(a, b)
    for rows in (1, 2, 3, 4, 5, 6, 7, 11, 13):
        np.testing.assert_array_equal(multiply(a[:, 40 : 40 + rows], b), whole[:, 40 : 40 + rows])
    panels = -(-150 // tile(dtype).width)
    room = 128 * (k_block(k) + 16) * a.itemsize
    for row_chunk, panel_chunk, copy in ((7, 1, 0), (100, 2, 0), (1, 5, 0), (50, 3, room), (100, panels, room)):
        chunks = -(-100 // row_chunk) * -(-panels // panel_chunk)
        cut = Chunking(row_chunk, panel_chunk, chunks, copy, 0)
        np.testing.assert_array_equal(multiply(a, b, cut), whole)


class Guarded:
    """Memory that ends (or starts) exactly at a page without access."""

    def __init__(self, array, at_end):
        libc = ctypes.CDLL(None, use_errno=True)
        page = mmap.PAGESIZE
        pages = -(-array.nbytes // page)
        self.memory = mmap.mmap(-1, (pages + 2) * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        for p in (start, start + (pages + 1) * page):
            assert libc.mprotect(ctypes.c_void_p(p), ctypes.c_size_t(page), 0) == 0
        offset = page + (pages * page - array.nbytes if at_end else 0)
        self.array = np.frombuffer(self.memory, array.dtype, array.size, offset).reshape(array.shape)
        self.array[...] = array


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_outside_a_and_c_is_touched(dtype, at_end):
    """A and C border on pages that fault when read or written."""
    shapes = ((1, 1, 1), (1, 70, 33), (2, 17, 9), (5, 15, 8), (13, 31, 7), (6, 16, 16), (23, 33, 401), (23, 80, 9))
    for m, n, k in shapes:
        a, b = random((1, m, k), dtype), random((1, k, n), dtype, 1)
        guarded_a = Guarded(a, at_end)
        guarded_c = Guarded(np.full((1, m, n), np.nan, a.dtype), at_end)
        assert_product(multiply(guarded_a.array, b, out=guarded_c.array), a, b, dtype)


@pytest.mark.parametrize("to_scratch", [False, True])
def test_epilogue(to_scratch):
    """Bias and tanh over each finished block, in place or from the worker's scratch to C."""
    t = tile("f32")

    def epilogue(f, block):
        bias, c = f.load("ptr", ProductArguments.behind(f)), ProductArguments.loaded(f, "c").c
        ldc = ProductArguments.loaded(f, "ldc").ldc

        def row(i, _):
            def column(j, _):
                left = f.sub(block.at.n1, j)
                mask = f.mask_below(left, t.lanes)
                at = f.add(f.mul(f.sub(i, block.at.r0), block.ldc), f.sub(j, block.at.n0))
                ty = vec("float", t.lanes)
                value = f.masked_load(ty, f.gep(block.c, at, "float"), mask)
                value = f.add(value, f.masked_load(ty, f.gep(bias, j, "float"), mask))
                target = f.gep(c, f.add(f.mul(i, ldc), j), "float")
                f.masked_store(vmath.tanh(f, value, t.lanes, "f32"), target, mask)

            f.loop(block.at.n0, block.at.n1, t.lanes, [], column)

        f.loop(block.at.r0, block.at.r1, 1, [], row)

    code = load(gemm_kernel(t, "rlx_fused", epilogue, to_scratch=to_scratch), "rlx_fused")
    m, n, k, workers = 37, 83, 60, 3
    a, b, bias = random((1, m, k), "f32"), random((1, k, n), "f32", 1), random(n, "f32", 2)
    cut = Chunking(10, 2, 4 * 3, 0, 10 * 2 * 64)
    scratch, c = np.zeros((workers, cut.tile_bytes), np.uint8), np.full((1, m, n), np.nan, np.float32)
    packed = pack(b, "f32")
    words = words_of(a, packed, c, n, cut, scratch[0], [bias.ctypes.data])
    for chunk in range(cut.chunks):
        code.call(words.ctypes.data, chunk, 0, chunk % workers)
    np.testing.assert_allclose(c, np.tanh(a.astype(np.float64) @ b + bias), atol=2e-5)
    assert scratch.any(axis=1).all() == to_scratch


def test_batch_offsets():
    """Two batch axes, B broadcast along the first: offsets come from a callback."""

    def offsets(f, batch):
        return f.mul(batch, 6 * 20), f.mul(f.rem(batch, 3), packed_elements(20, 18)), f.mul(batch, 6 * 18)

    code = load(gemm_kernel(tile("f32"), "rlx_axes", batch_offsets=offsets), "rlx_axes")
    a, b = random((6, 6, 20), "f32"), random((3, 20, 18), "f32", 1)
    c = np.full((6, 6, 18), np.nan, np.float32)
    cut = chunking(RATES, 6, 18, 20, 6, 4)
    packed, scratch = pack(b, "f32"), np.zeros(64, np.uint8)
    code.run(words_of(a, packed, c, 18, cut, scratch), cut.chunks)
    assert_product(c, a, np.concatenate([b, b]), "f32")


CUT = [(1, 384, 384, 1), (16, 384, 384, 1), (128, 1536, 384, 1), (128, 768, 3072, 1), (3136, 64, 576, 1)]


@pytest.mark.parametrize("shape", [*CUT, (100_000, 16, 8, 1), (197, 768, 768, 1), (5, 160, 4096, 3)])
def test_chunks_cover_everything(shape):
    m, n, k, batch = shape
    cut = chunking(RATES, m, n, k, batch, 4)
    panels = -(-n // 16)
    assert cut.chunks == batch * -(-m // cut.row_chunk) * -(-panels // cut.panel_chunk)
    work = 2 * min(m, cut.row_chunk) * min(n, 16 * cut.panel_chunk) * k
    assert work <= 6e7  # less than a millisecond
    assert cut.chunks < 300


@pytest.mark.parametrize("shape", CUT[1:])
def test_two_threads_get_equal_shares(shape):
    m, n, k, batch = shape
    cut = chunking(RATES, m, n, k, batch, 4)
    work = sum(
        min(cut.row_chunk, m - row) * min(16 * cut.panel_chunk, n - column)
        for row in range(0, m, cut.row_chunk)
        for column in range(0, n, 16 * cut.panel_chunk)
    )
    assert work == m * n
    assert cut.chunks >= 4
    assert -(-cut.chunks // 2) * cut.row_chunk * cut.panel_chunk * 16 <= 0.6 * m * n


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, panels", [(5, 2), (8, 2), (12, 2), (14, 2), (5, 3), (9, 3)])
def test_loops_of_512_bit_tiles_keep_their_sums_in_registers(dtype, rows, panels):
    kernel = micro_kernel(tile(dtype, 64), rows, panels)
    code = jit.target_machine().emit_assembly(jit.llvm().parse_assembly(Module([kernel]).text()))
    lines = code.splitlines()
    steps = [i for i, line in enumerate(lines) if "vfmadd" in line]
    stack = [i for i, line in enumerate(lines) if "zmm" in line and ("rsp" in line or "rbp" in line)]
    assert len(steps) == 5 * panels * rows  # four steps a turn, then one
    assert not [i for i in stack if steps[0] <= i <= steps[-1]]


@pytest.mark.parametrize("m", [1, 4, 10, 12, 14, 16])
def test_two_threads_have_equal_shares_of_small_products(m: int) -> None:
    assert chunking(RATES, m, 384, 384, 1, 4, 2).chunks % 2 == 0
    assert chunking(RATES, min(m, 4), 256, 256, 1, 4, 2).chunks == 1  # a join takes longer
