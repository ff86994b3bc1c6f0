"""The fast paths of loop nests at the sizes where they begin and end: tiles, shared exponentials, searches, windows."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.cpu.loops.nest import COPIED, COPIED_BYTES, emit_nest
from rlx.backends.cpu.schedule.arguments import THREADS
from rlx.backends.reference import run_graph
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, Graph
from rlx.kernels.expr import Load, Reduce
from rlx.kernels.fuse import fuse
from rlx.kernels.lowering import out_vars
from rlx.kernels.program import Buffer, Store
from rlx.ops.layout import Full, Iota
from rlx.ops.reduction import ArgMax, ArgMin
from rlx.testing.oracle import compare


def values(*shape: int, dtype: str = "float32") -> Array:
    return (np.random.default_rng(5).standard_normal(shape) * 9).astype(dtype)


@pytest.mark.parametrize("shape", [(7, 9), (8, 8), (9, 17), (16, 8), (23, 64), (130, 33)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "bool"])
def test_transpose_in_tiles(shape: tuple[int, int], dtype: str) -> None:
    """Tiles cover any size; loads that are not turned may be part of the same loop."""
    graph = Graph("turned")
    x = graph.input("x", shape, dtype)
    graph.output(rlx.transpose(x, (1, 0)), "y")
    if dtype.startswith("float"):
        row = graph.input("row", shape[:1], dtype)
        graph.output(rlx.transpose(x * x, (1, 0)) + row, "z")
    inputs = {"x": values(*shape, dtype=dtype), "row": values(shape[0], dtype=dtype)}
    compare(graph, {name: inputs[name] for name in (v.name for v in graph.inputs)})


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_a_constant_column(dtype: str) -> None:
    """A constant is stored lane by lane where the rows of the result are far apart."""
    graph = Graph("ones")
    x = graph.input("x", (rlx.Dim("n"), 3), dtype)
    ones = graph.add(Full((x.shape[0], 1), 1, x.dtype))[0]
    graph.output(rlx.concat(ones, x, axis=1), "y")
    compare(graph, {"x": values(37, 3, dtype=dtype)})


@pytest.mark.parametrize("n", [5, 8, 13, 37, 64, 100])
def test_softmax_beside_an_operand_that_the_output_may_lie_on(n: int) -> None:
    """Exponentials are kept in the output only where no other operand of the row can have its memory."""
    graph = Graph("kept")
    x, y = graph.input("x", (6, n)), graph.input("y", (6, n))
    scores, other = x @ graph.input("w", (n, n)), rlx.tanh(y) @ graph.input("v", (n, n))
    graph.output(rlx.softmax(scores) + other, "sum")
    graph.output(rlx.softmax(other * 0.01) * 3.0, "scaled")
    small = {name: values(*s) / 30 for name, s in {"x": (6, n), "y": (6, n), "w": (n, n), "v": (n, n)}.items()}
    compare(graph, small)


@pytest.mark.parametrize("n", [31, 32, 33, 64, 77])
@pytest.mark.parametrize("special", ["ties", "nan", "infinite"])
def test_search_along_rows(n: int, special: str) -> None:
    """The first of equals is found wherever it lies among the lanes; a NaN wins; rows may be all -inf."""
    x = np.round(values(40, n) / 9)
    if special == "nan":
        x[np.arange(40), (np.arange(40) * 7) % n] = np.nan
        x[::3, n - 1] = np.nan
    elif special == "infinite":
        x[::2], x[1::2] = -np.inf, np.inf
    graph = Graph("search")
    value = graph.input("x", x.shape)
    graph.output(rlx.arg_max(value, axis=-1), "most")
    graph.output(rlx.arg_min(value, axis=-1), "least")
    compare(graph, {"x": x})


@pytest.mark.parametrize("width", [8, 9, 17, 30, 41])
@pytest.mark.parametrize("stride", [1, 2])
def test_windows_over_padding(width: int, stride: int) -> None:
    """Windows inside the input take a path without tests; those over the padding at either side another."""
    graph = Graph("windows")
    x = graph.input("x", (2, 3, 7, width))
    graph.output(rlx.max_pool(x, kernel=(3, 3), strides=(stride, stride), pads=(1, 1, 1, 1)), "y")
    compare(graph, {"x": values(2, 3, 7, width)})


def test_a_checked_constant_index_into_an_open_axis() -> None:
    """The test of the index holds nowhere in an interior of the row, so nothing may rely on it there."""
    g = rlx.Graph()
    x = g.input("x", (7, 5, rlx.Dim("n", 1, 8)))
    g.output(rlx.gather(x, g.constant(np.array(0)), axis=2), "y")
    model = rlx.compile(g, device="cpu")
    for n in (1, 3, 8):
        data = np.random.default_rng(n).standard_normal((7, 5, n), dtype=np.float32)
        np.testing.assert_array_equal(model.run([data])[0], data[:, :, 0])


def test_tests_of_wrapping_integers_are_kept() -> None:
    """A path without tests is for indices only: arithmetic of i64 that wraps has no interior."""
    for factor, offset in ((1, 2**63 - 1), (1, -(2**63)), (2**62, 0), (2**63 - 1, 5)):
        g = rlx.Graph()
        x = g.input("x", (rlx.Dim("n", 1, 4000),))
        (number,) = g.add(Iota(x.shape[0]))
        scaled = number * g.constant(np.int64(factor)) + g.constant(np.int64(offset))
        g.output(rlx.where(rlx.greater_equal(scaled, g.constant(np.int64(0))), x, -x), "y")
        compare(g, {"x": np.ones(1999, np.float32)})
    g = rlx.Graph()
    g.output(g.input("x", (5,), "i64") ** g.constant(np.int64(-(2**63))), "y")
    compare(g, {"x": np.array([-3, -1, 1, 2, 3])})


def test_tiles_take_operands_of_either_axis() -> None:
    """A transpose with element-wise work on both axes, as a layer norm over a middle axis leaves it."""
    g = rlx.Graph()
    x, rows, columns = g.input("x", (2, 40, 24)), g.input("r", (2, 1, 24)), g.input("c", (1, 40, 1))
    g.output(rlx.transpose((x - rows) * columns, perm=(0, 2, 1)), "y")
    rng = np.random.default_rng(0)
    a, r, c = (rng.standard_normal(s, dtype=np.float32) for s in ((2, 40, 24), (2, 1, 24), (1, 40, 1)))
    np.testing.assert_allclose(rlx.compile(g, device="cpu").run([a, r, c])[0], ((a - r) * c).transpose(0, 2, 1))


def test_long_sums_keep_their_precision() -> None:
    """Sums of millions of equal f32 numbers, along the last axis and along the first."""
    for shape, axes in (((3_000_000,), (0,)), ((2**18 + 3, 2), (0,))):
        g = rlx.Graph()
        g.output(rlx.reduce_sum(g.input("x", shape), axes=axes, keepdims=False), "y")
        data = np.full(shape, 0.1, np.float32)
        exact = data.astype(np.float64).sum(axis=axes)
        np.testing.assert_allclose(rlx.compile(g, device="cpu").run([data])[0], exact, rtol=2e-5)


@pytest.mark.parametrize(
    "shape", [(120, 40), (3, 50, 16), (2, 20, 7, 9), (1, 30, 70), (4, 100, 1), (2, 0, 20), (2, 30, 0)]
)
def test_norms_and_softmax_along_columns(shape: tuple[int, ...]) -> None:
    """An axis that is not the last: the elements of a column share its sums."""
    axis = len(shape) - 2 if len(shape) < 4 else 1
    graph = Graph("columns")
    x, scale = graph.input("x", shape), graph.input("scale", (shape[axis], *(1 for _ in shape[axis + 1 :])))
    centred = x - rlx.mean(x, axis, keepdims=True)
    graph.output(centred / rlx.sqrt(rlx.mean(centred * centred, axis, keepdims=True) + 1e-5) * scale, "norm")
    graph.output(rlx.softmax(x, axis), "softmax")
    compare(graph, {"x": values(*shape), "scale": values(*scale.shape)})


def test_sums_of_columns_are_computed_once() -> None:
    """And not once an element: the cost that work is cut by tells."""
    rows, columns = 500, 64
    x = Buffer("x", "input", (rows, columns), DTYPES["f32"])
    i, j, r = out_vars(3)
    total = Reduce("add", (r,), (rows,), Load(x, (r, j), x.dtype), x.dtype)
    out = Buffer("y", "output", (rows, columns), x.dtype)
    made = emit_nest(Store(out, (rows, columns), (i, j), Load(x, (i, j), x.dtype) * total), 8)
    assert made.chunks({THREADS: 2}) <= 4  # of 16 million additions they would be 40


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "bool", "int64"])
@pytest.mark.parametrize("width", [1, 3, 8, 31, 40])
def test_elements_that_are_repeated(width: int, dtype: str) -> None:
    """By factors that divide a vector and others; in whole rows, and from places that are no multiple of the factor."""
    for factor in (2, 3, 4, 5, 16, 32):
        graph = Graph("repeated")
        x = graph.input("x", (2, 3, width), dtype)
        y = rlx.resize_nearest(x, sizes=(2, 6, width * factor), coordinate="asymmetric", rounding="floor")
        graph.output(y, "y")
        graph.output(y[:, :, 1:], "part")
        graph.output(rlx.tile(x, (1, 1, factor)), "tiled")
        compare(graph, {"x": values(2, 3, width, dtype=dtype)})


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "heads, width, rotated", [(2, 8, 0), (1, 32, 0), (3, 64, 32), (2, 128, 0), (2, 20, 12), (1, 34, 0)]
)
def test_pairs_that_are_exchanged(heads: int, width: int, rotated: int, interleaved: bool) -> None:
    """Neighbours and halves, of head sizes that are and are not multiples of a vector; behind them all is as it was."""
    graph = Graph("rotary")
    half = (rotated or width) // 2
    shapes = {"x": (2, heads, 5, width), "cos": (2, 5, half), "sin": (2, 5, half)}
    given = [graph.input(name, shape) for name, shape in shapes.items()]
    graph.output(rlx.rotary_embedding(*given, interleaved=interleaved, dim=rotated), "y")
    compare(graph, {name: values(*shape) for name, shape in shapes.items()})


@pytest.mark.parametrize("channels", [1, 2, 5])
@pytest.mark.parametrize("height, width", [(3, 5), (4, 16), (7, 33)])
def test_channels_share_the_places_at_which_they_are_sampled(channels: int, height: int, width: int) -> None:
    """Each vector of places serves all channels; with few of them, short rows, images of one pixel and NaN."""
    for size in ((1, 1), (6, 9)):
        graph = Graph("sampled")
        x, grid = graph.input("x", (2, channels, *size)), graph.input("grid", (2, height, width, 2))
        graph.output(rlx.grid_sample(x, grid), "y")
        places = np.random.default_rng(1).uniform(-1.3, 1.3, (2, height, width, 2)).astype(np.float32)
        places[0, 0, 0] = np.nan
        compare(graph, {"x": values(2, channels, *size), "grid": places})


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "bool"])
@pytest.mark.parametrize("block", [2, 3, 4, 8])
def test_planes_that_are_put_between_each_other(block: int, dtype: str) -> None:
    """Vectors of the planes are shuffled into rows of the image, of every width; with padding and an operand beside."""
    for width in (1, 5, 16, 33, 64):
        graph = Graph("shuffled")
        x = graph.input("x", (2, 3 * block * block, 3, width), dtype)
        y = rlx.depth_to_space(x, block=block)
        graph.output(y, "y")
        graph.output(rlx.space_to_depth(y, block=block), "back")
        graph.output(rlx.pad(y, (0, 0, 1, 2, 0, 0, 0, 3)), "padded")
        given = {"x": values(2, 3 * block * block, 3, width, dtype=dtype)}
        if dtype == "float32":
            other = graph.input("other", (3 * width * block, 1, width * block), dtype)
            graph.output(y + other[: 3 * block, 0], "sum")
            given["other"] = values(3 * width * block, 1, width * block)
        compare(graph, given)


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "bool", "int64"])
@pytest.mark.parametrize("width", [1, 3, 8, 15, 16, 17, 31, 40, 70, 130])
def test_one_value_outside_of_the_tests(width: int, dtype: str) -> None:
    """Triangles and borders: rows that are all outside, all inside, or change within a vector; with work besides."""
    graph = Graph("triangles")
    x = graph.input("x", (2, 21, width), dtype)
    for k in (-30, -3, 0, 2, width):
        for upper in (False, True):
            graph.output(rlx.ops.trilu(x, graph.constant(np.array(k)), upper=upper), f"triangle{k}{upper}")
    graph.output(rlx.pad(x, (1, 0, 3, 0, 2, 1)), "padded")
    graph.output(rlx.pad(x, (0, 0, width, 0, 0, 2 * width)), "far")
    graph.output(rlx.pad(x, (0, -2, 1, 0, 1, -1 if width > 1 else 0)), "cropped")
    if dtype.startswith("float"):
        places = graph.add(Iota(width))[0]
        graph.output(rlx.where(places < 5, rlx.exp(x), x * 2.0 + 1.0), "either")
        graph.output(rlx.where((places >= 2) & (places < 19), x, rlx.sqrt(x * x)) - x, "between")
    data = values(2, 21, width, dtype=dtype)
    if dtype.startswith("float"):
        data[0, 3, 0], data[1, 5, -1] = np.nan, np.inf
    compare(graph, {"x": data})


def test_one_value_outside_in_chunks_of_columns() -> None:
    """A last chunk of fewer columns than a vector has."""
    graph = Graph("chunks")
    x = graph.input("x", (3, 400_005))
    graph.output(rlx.pad(x, (0, 200_003, 1, 130_000)), "padded")
    graph.output(rlx.pad(x[:, :7], (0, 128 * 1024 - 4, 0, 0)), "late")
    data = values(3, 400_005)
    for threads in (1, 2, 3):
        padded, late = rlx.compile(graph, device="cpu", threads=threads, cache=False).run([data])
        assert np.array_equal(padded, np.pad(data, ((0, 1), (200_003, 130_000))))
        assert np.array_equal(late, np.pad(data[:, :7], ((0, 0), (128 * 1024 - 4, 0))))


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16", "i8", "bool", "c64"])
@pytest.mark.parametrize("more", [0, 1, 77])
def test_long_rows_are_copied_whole(dtype: str, more: int) -> None:
    """From any place to any place, by several threads; NaN stay what they are, bit by bit."""
    element = DTYPES[dtype]
    least = COPIED if element.itemsize > 1 else COPIED_BYTES
    count, rng = least // element.itemsize + more, np.random.default_rng(more)
    graph = Graph("copies")
    x, y = graph.input("x", (3, count), dtype), graph.input("y", (3, count + 5), dtype)
    graph.output(rlx.concat(x, y[:, 2:], x, axis=1), "joined")
    graph.output(rlx.expand(y[1:2, 3:], (4, count + 2)), "repeated")

    def some(columns: int) -> Array:
        data = rng.integers(0, 2 if dtype == "bool" else 256, (3, columns * element.itemsize), np.uint8)
        return data.view(element.numpy)

    a, b = some(count), some(count + 5)
    want = [np.concatenate([a, b[:, 2:], a], 1), np.repeat(b[1:2, 3:], 4, 0)]
    for threads in (1, 3):
        model = rlx.compile(graph, device="cpu", threads=threads, cache=False)
        assert [z.tobytes() for z in model.run([a, b])] == [z.tobytes() for z in want]
    made = fuse(graph, backend := CpuBackend())
    assert all("llvm.memcpy" in code.ir for k in backend.layout(made).run for code in backend.emit_kernel(k))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "uint8", "int64"])
@pytest.mark.parametrize("n", [1, 7, 8, 9, 15, 16, 17, 31, 32, 50, 64, 100, 200])
def test_places_of_extrema_in_rows_of_every_length(n: int, dtype: str) -> None:
    """By blocks of vectors, single ones and the rest; equal elements and NaN in any of them."""
    x = np.random.default_rng(n).integers(0, 4, (9, n)).astype(dtype)
    if dtype.startswith("float"):
        x[3, n // 2] = x[4, -1] = x[5, 0] = np.nan
    x[6] = 3
    for last in (False, True):
        graph = Graph("places")
        given = graph.input("x", x.shape, dtype)
        graph.output(graph.add(ArgMax(-1, False, last), given)[0], "most")
        graph.output(graph.add(ArgMin(-1, False, last), given)[0], "least")
        compare(graph, {"x": x})


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 15, 16, 17])
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16"])
def test_rows_shorter_than_a_vector(count: int, dtype: str) -> None:
    """Vectors across rows give what is defined, and the bits of a compile for any length of rows."""
    rng = np.random.default_rng(count)
    x = rng.standard_normal((37, count)).astype(DTYPES[dtype].numpy)
    x[rng.random(x.shape) < 0.05] = np.inf
    x[rng.random(x.shape) < 0.05] = np.nan
    made = []
    for length in (count, rlx.Dim("n", 1, 100)):
        g = rlx.Graph("rows")
        value = g.input("x", (rlx.Dim("rows", 1, 100), length), dtype)
        results = [rlx.softmax(value), rlx.log_softmax(value), rlx.hardmax(value), rlx.arg_max(value, axis=-1)]
        results += [
            rlx.reduce_sum(value, axes=(1,)),
            rlx.reduce_max(value, axes=(1,)),
            value - rlx.reduce_min(value, axes=(1,)),
        ]
        for number, result in enumerate(results):
            g.output(result, name=f"y{number}")
        expected = run_graph(g, {"x": x})
        with np.errstate(invalid="ignore"):
            got = rlx.compile(g, device="cpu").run([x])
        for name, own in zip(expected, got, strict=True):
            np.testing.assert_allclose(own, expected[name], rtol=2e-3 if dtype == "f16" else 1e-5, atol=1e-6)
        made.append([own.tobytes() for own in got])
    assert made[0] == made[1]


@pytest.mark.parametrize("dtype", ["i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"])
def test_integer_quotients_in_vectors(dtype: str) -> None:
    """All pairs of bytes; of wider types the ends, what lies near products, and random ones."""
    kind = DTYPES[dtype].numpy
    limits, rng = np.iinfo(kind), np.random.default_rng(3)
    if limits.bits == 8:
        every = np.arange(int(limits.min), int(limits.max) + 1)
        a, b = (v.reshape(-1).astype(kind) for v in np.meshgrid(every, every[every != 0]))
    else:
        ends = [limits.min, limits.min + 1, limits.max, limits.max - 1, 1, 2, 3, 7]
        some = np.concatenate([np.array(ends, kind), rng.integers(limits.min, limits.max, 200, kind, endpoint=True)])
        some = np.concatenate([some, (some >> (limits.bits // 2)).astype(kind)])
        a, b = (v.reshape(-1) for v in np.meshgrid(some, some[some != 0]))
        with np.errstate(over="ignore"):
            a = np.concatenate([a, (a // b * b).astype(kind), (a // b * b - 1).astype(kind)])
        b = np.tile(b, 3)
    graph = Graph("quotients")
    x, y = (graph.input(name, (len(a),), dtype) for name in "ab")
    for number, result in enumerate((rlx.div(x, y), rlx.mod(x, y), rlx.mod(x, y, fmod=True))):
        graph.output(result, f"y{number}")
    compare(graph, {"a": a, "b": b})
