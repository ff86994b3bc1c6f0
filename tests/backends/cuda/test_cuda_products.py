"""Products of 16 bits by wgmma and the copy engine; without a Hopper device the stand-in follows its layouts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from device_suite import Some, check_op, check_random_graph
from host_driver import HostDriver

import rlx
from rlx.backends.cuda import backend
from rlx.backends.cuda.device import driver as drivers
from rlx.backends.cuda.text import products, wgmma
from rlx.backends.cuda.text.wgmma import TILES, Tile
from rlx.ir.graph import Array, Value
from rlx.ops.conv import Conv

TYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
CLOSE = {"bf16": 6e-3, "f16": 1e-3}  # of the largest element: results are rounded to the type


@pytest.fixture(autouse=True)
def hopper(device: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of compute capability 9.0, or what stands for one."""
    if isinstance(device, HostDriver):
        monkeypatch.setattr(device, "capability", (9, 0))
    elif drivers.driver().capability != (9, 0):
        pytest.skip("the device is no Hopper")


def normal(shape: tuple[int, ...], dtype: str) -> Array:
    rng = np.random.default_rng(sum(shape))
    return rng.standard_normal(shape).astype(TYPES.get(dtype, np.float32))


def listing(model: rlx.CompiledGraph) -> str:
    """The text of all kernels."""
    return "\n".join(model._executable.listing.values())


@pytest.mark.sample(9)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("turned", ["", "a", "b"])
def test_each_tile(tile: Tile, turned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, columns and depths that end within a tile; operands that lie along either axis; both types."""
    monkeypatch.setattr(wgmma, "TILES", (tile,))
    dtype = "f16" if turned == "b" else "bf16"
    m, n, k = tile.rows + 8, tile.columns + 72, 200
    g = rlx.Graph("product")
    a = g.input("a", (k, m) if turned == "a" else (m, k), dtype)
    b = g.input("b", (n, k) if turned == "b" else (k, n), dtype)
    x, y = normal(a.shape, dtype), normal(b.shape, dtype)
    g.output(rlx.matmul(a.T if turned == "a" else a, b.T if turned == "b" else b), "c")
    model = rlx.compile(g, device="cuda")
    assert f"wgmma_{dtype}<" in listing(model)
    (c,) = model.run([x, y])
    wide = (x.T if turned == "a" else x).astype(np.float32) @ (y.T if turned == "b" else y).astype(np.float32)
    assert np.abs(c.numpy().astype(np.float32) - wide).max() < CLOSE[dtype] * np.abs(wide).max()


def mlp(rows: rlx.Dim | int, depth: int) -> tuple[rlx.Graph, list[Array]]:
    """Two products with what is before and after them, the second residual; and one whose rows are of two axes."""
    g = rlx.Graph("mlp")
    x = g.input("x", (2, rows, depth))

    def param(name: str, *shape: int) -> Value:
        return g.param(name, shape, data=normal(shape, "f32") / np.float32(shape[0] ** 0.5))

    h = rlx.softmax(x) + x
    up = rlx.gelu(h @ param("up", depth, 136) + param("bias", 136))
    down = up @ param("down", 136, depth) + h
    g.output(down, "down")
    g.output(rlx.softmax(down) @ param("last", depth, 24), "last")
    return g, [normal((2, 37, depth), "f32")]


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_products_of_f32_in_16_bits(precision: str) -> None:
    """Operands are stored in 16 bits by who makes them, weights by `prepare`; the results are the reference's."""
    g, inputs = mlp(rlx.Dim("n", 1, 90), 64)
    model = rlx.compile(g, device="cuda", precision=precision)
    program = model._executable.program
    assert {b.dtype.name for kernel in program.prepare for b in kernel.writes()} == {precision}
    assert listing(model).count(f"wgmma_{precision}<") >= 3
    expected = rlx.compile(g, device="reference", precision="f32").run(inputs)
    for got, wide in zip(model.run(inputs), expected, strict=True):
        assert np.abs(np.asarray(got) - wide).max() < CLOSE[precision] * np.abs(wide).max()


def test_the_same_bits_as_rounding_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored in 16 bits is what the product would have rounded."""
    g, inputs = mlp(37, 64)
    monkeypatch.setattr(products, "wgmma_text", lambda *args: None)
    stored = rlx.compile(g, device="cuda", precision="bf16")
    made = [np.asarray(a) for a in stored.run(inputs)]
    assert any(b.dtype.name == "bf16" for k in stored._executable.program.run for b in k.writes())
    monkeypatch.setattr(backend, "store_narrow", lambda program, precision: None)
    plain = rlx.compile(g, device="cuda", precision="bf16")
    assert not any(b.dtype.name == "bf16" for k in plain._executable.program.run for b in k.writes())
    for a, b in zip(made, plain.run(inputs), strict=True):
        assert (a == np.asarray(b)).all()


def test_an_empty_depth_gives_zeros() -> None:
    g = rlx.Graph("empty")
    a, b = (
        g.input("a", (64, rlx.Dim("k", 0, 128, multiple=64)), "bf16"),
        g.input("b", (rlx.Dim("k", 0, 128, multiple=64), 64), "bf16"),
    )
    g.output(a @ b + 1.0, "c")
    model = rlx.compile(g, device="cuda")
    (c,) = model.run([normal((64, 0), "bf16"), normal((0, 64), "bf16")])
    assert (c.numpy().astype(np.float32) == 1).all()


CONVS = {  # channels, size, channels of the result, taps, strides, pads, dilations
    "pointwise": (24, (9, 7), 40, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1)),
    "strided": (64, (11, 9), 48, (1, 1), (2, 2), (0, 0, 0, 0), (1, 1)),
    "padded": (64, (9, 12), 72, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    "uneven": (128, (13, 8), 64, (3, 2), (2, 1), (0, 1, 2, 0), (1, 2)),
}


@pytest.mark.parametrize("name", CONVS)
def test_convolutions_of_images_with_channels_last(name: str) -> None:
    """Windows are walked by the copy engine; the images before and after have their channels last."""
    channels, size, out, taps, strides, pads, dilations = CONVS[name]
    g = rlx.Graph("conv")
    x = g.input("x", (2, channels, *size))
    w = g.param("w", (out, channels, *taps), data=normal((out, channels, *taps), "f32"))
    bias = g.param("bias", (out,), data=normal((out,), "f32"))
    (y,) = g.add(Conv(strides, dilations, pads), rlx.tanh(x), w, bias)
    g.output(rlx.tanh(y * 0.01) + 1.0, "y")
    model = rlx.compile(g, device="cuda", precision="bf16")
    assert "wgmma_bf16<" in listing(model)
    assert ("tma_windows(" in listing(model)) == (name != "pointwise")
    inputs = [normal((2, channels, *size), "f32")]
    (expected,) = rlx.compile(g, device="reference").run(inputs)
    assert np.abs(np.asarray(model.run(inputs)[0]) - expected).max() < 6e-3


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype, precision", [("f32", "f32"), ("f32", "bf16"), ("bf16", "f32"), ("f16", "f32")])
@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows(rows: int, dtype: str, precision: str, turned: bool) -> None:
    """Either layout of the second operand, columns and depths that end within what a block or a thread has."""
    n, k = 328, 520
    g = rlx.Graph("few")
    x = g.input("x", (rows, k), dtype)
    w = g.param("w", (n, k) if turned else (k, n), dtype, data=normal((n, k) if turned else (k, n), dtype))
    g.output(rlx.tanh(x @ (w.T if turned else w) * 0.02), "y")
    model = rlx.compile(g, device="cuda", precision=precision)
    assert "uint4 four[4]" in listing(model)
    inputs = [normal((rows, k), dtype)]
    (expected,) = rlx.compile(g, device="reference").run(inputs)
    (got,) = model.run(inputs)
    close = 3e-5 if dtype == precision == "f32" else 8e-3
    assert np.abs(got.numpy().astype(np.float32) - np.asarray(expected, np.float32)).max() < close


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_products_of_the_same_rows_are_one(
    capability: tuple[int, int], device: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights side by side; each part has its own bias, and columns that need not fill a tile."""
    if isinstance(device, HostDriver):
        monkeypatch.setattr(device, "capability", capability)
    g = rlx.Graph("parts")
    h = rlx.tanh(g.input("x", (2, 37, 64)))
    for number, n in enumerate((72, 40, 128)):
        w = g.param(f"w{number}", (64, n), data=normal((64, n), "f32") / 8)
        y = h @ w + g.param(f"b{number}", (n,), data=normal((n,), "f32"))
        g.output(rlx.softmax(y) if number else rlx.gelu(y), f"y{number}")
    model = rlx.compile(g, device="cuda", precision="bf16")
    assert [k.kind for k in model._executable.program.run].count("contract") == 1
    inputs = [normal((2, 37, 64), "f32")]
    expected = rlx.compile(g, device="reference").run(inputs)
    for got, wide in zip(model.run(inputs), expected, strict=True):
        assert np.abs(np.asarray(got) - wide).max() < 6e-3 * np.abs(wide).max()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["conv", "einsum", "gemm", "matmul"])
def test_ops(name: str, some: Some) -> None:
    check_op("cuda", name, some)


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(600, 700))
def test_random_graphs(seed: int) -> None:
    check_random_graph("cuda", seed)


def test_products_of_the_same_rows_in_two_types() -> None:
    """One product's result is kept in f32, another one's only in 16 bits: neither is a copy of the other."""
    g = rlx.Graph("two")
    h = rlx.tanh(g.input("x", (37, 64)))
    w = [g.param(f"w{n}", (64, 64), data=normal((64, 64), "f32") * (n + 1) / 8) for n in range(3)]
    g.output(rlx.softmax(h @ w[0]), "wide")
    g.output((h @ w[1]) @ w[2], "narrow")
    model = rlx.compile(g, device="cuda", precision="bf16")
    assert [k.kind for k in model._executable.program.run].count("contract") == 2
    inputs = [normal((37, 64), "f32")]
    expected = rlx.compile(g, device="reference").run(inputs)
    for got, wide in zip(model.run(inputs), expected, strict=True):
        assert np.abs(np.asarray(got) - wide).max() < 2e-2 * np.abs(wide).max()
