"""Elements of 4 bits: two a byte in the memory of a device, made and read by kernels; a byte each for users."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import ExecutionError
from rlx.ir.casting import cast
from rlx.ir.dtype import DTYPES, pack, unpack
from rlx.ir.graph import Array, Graph, Value
from rlx.ir.shape import Dim
from rlx.kernels.narrow import is_narrow
from rlx.ops import control, elementwise, encoded, index, layout, quant
from rlx.testing.program import run_program

NARROW = ("i4", "u4", "f4e2m1", "i2", "u2")
CODED = (*NARROW, "f8e4m3", "f8e5m2", "f8e4m3fnuz", "f8e5m2fnuz", "f8e8m0")  # no device computes in them
DEVICES = ("cpu", "interp")
N = Dim("n", 0, 9)


def elements(dtype: str, *shape: int, seed: int = 0) -> Array:
    """Any of its values."""
    made = np.random.default_rng(seed).integers(0, 1 << DTYPES[dtype].bits, shape)
    return made.astype(np.uint8).view(DTYPES[dtype].numpy)


def same(got: Any, want: Array, what: str = "") -> None:
    """Equal types, shapes and bits; -0 is not 0."""
    got = np.asarray(got)
    assert (got.dtype, got.shape) == (want.dtype, want.shape), what
    np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}"), err_msg=what)


def compare(g: Graph, inputs: dict[str, Array], device: str, native: bool = True) -> Any:
    """Every output, bit by bit; `native`: no node may be a host call. Gives the model."""
    model = rlx.compile(g, device=device)
    assert not native or "host" not in model.explain("dispatch").splitlines()[0]
    for _ in range(2):
        results = model(inputs)
        for name, want in run_graph(g, inputs).items():
            same(results[name], want, name)
    return model


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 4), (0, 3)])
def test_packing(dtype: str, shape: tuple[int, ...]) -> None:
    """The first element has the lowest bits of a byte; what the last byte has left over is 0."""
    array = elements(dtype, *shape)
    packed = pack(array)
    assert packed.nbytes == -(-array.size * DTYPES[dtype].bits // 8)
    same(unpack(packed, DTYPES[dtype], shape), array)
    same(pack(np.array([1, -2, -1, 0, 1], DTYPES["i2"].numpy)), np.array([0b00_11_10_01, 1], np.uint8))
    same(pack(np.array([1, -2, 3], DTYPES["i4"].numpy)), np.array([0xE1, 0x03], np.uint8))


# ---- conversions

WIDE = {
    "f32": [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 0.25, 0.2500001, 0.75, 0.7499999, 1.25, 1.75, 2.5, 3.5,
            5.0, 5.000001, 6, 7, 7.99, 8, 15, 15.5, 16, -8, -8.5, -9, -0.3, -1.25, 3e38, -3e38, 448, 464, -464.1, 1,
            57344, 61439, 61440, -61441, 239, 248, 2.0**-127, 1.5 * 2.0**-127, 1.5 * 2.0**127, 2.0**-9, 2.0**-10,
            1.001 * 2**-10, 1.5 * 2.0**-9, 2.0**-16, 1.5 * 2.0**-17, -(2.0**-18), 0.0175, 0.0009, 1.0625, 1.1875],
    "f64": [np.nan, 0.25, 0.25 + 1e-12, 0.75, 0.75 - 1e-12, 5 + 1e-12, -2.5, -3.5 + 1e-13, 1e300, -7.999999999,
            1.0625 + 1e-14, 1.125 + 1e-15, 464 + 1e-9, 1e-300, 1.5 - 2e-16],
    "f16": [0.25, 0.75, 2.5, 3.5, 100, -100, np.nan], "bf16": [0.25, 0.75, 2.5, 3.5, 100, -100, np.nan],
    "i8": range(-128, 128), "u8": range(256), "i32": [-(2**31), 2**31 - 1, -17, 16, 15, 8, 7, -8, -9],
    "i64": [2**63 - 1, -(2**63), 24, -1, 3 << 61, (3 << 61) - 1, (3 << 61) + 1],
    "u64": [2**64 - 1, 5, (3 << 62) - 1], "bool": [False, True],
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("to", CODED)
def test_conversions_to(to: str, device: str) -> None:
    """From every type, by the one rule: truncated and bounded, wrapped, or the nearest with ties to even."""
    g, inputs = Graph("to"), {}
    for name, values in WIDE.items():
        inputs[name] = np.array(list(values), DTYPES[name].numpy)
        g.output(g.add(elementwise.Cast(DTYPES[to]), g.input(name, inputs[name].shape, name))[0], f"y_{name}")
    compare(g, inputs, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", CODED)
def test_conversions_from(dtype: str, device: str) -> None:
    """Each of its values, to every type, those of few bits too."""
    g, count = Graph("from"), 1 << DTYPES[dtype].bits
    x = g.input("x", (count,), dtype)
    for name in (*WIDE, *CODED):
        g.output(g.add(elementwise.Cast(DTYPES[name]), x)[0], name)
    compare(g, {"x": np.arange(count, dtype=np.uint8).view(DTYPES[dtype].numpy)}, device)


# ---- what is done with them

LAYOUTS: dict[str, Callable[[Graph, Value, Value], Value]] = {
    "transpose": lambda g, x, w: g.add(layout.Transpose(), x)[0],
    "reshape": lambda g, x, w: g.add(layout.Transpose(), x)[0].reshape(-1),
    "concat": lambda g, x, w: g.add(layout.Concat(0), x, w, x)[0],
    "slice": lambda g, x, w: g.add(layout.Slice((0, 1), (3, 4), (1, 1)), w)[0],
    "expand": lambda g, x, w: g.add(layout.Expand((3, 5)), g.add(layout.Slice((0, 0), (1, 5), (1, 1)), w)[0])[0],
    "gather": lambda g, x, w: g.add(index.Gather(1), x, g.constant(np.array([4, 0, -1])))[0],
    "where": lambda g, x, w: g.add(elementwise.Where(), g.constant(np.eye(3, 5, dtype=bool)), w, w)[0],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("what", LAYOUTS)
def test_layouts(what: str, dtype: str, device: str) -> None:
    """Results of odd and even counts, in memory between two kernels, from an input and a param."""
    g = Graph("layout")
    x, w = g.input("x", (N, 5), dtype), g.param("w", (3, 5), dtype, data=elements(dtype, 3, 5, seed=1))
    y = LAYOUTS[what](g, x, w)
    g.output(y, "y")
    g.output(g.add(elementwise.Cast(DTYPES["f32"]), y)[0], "wide")
    for n in (0, 1, 4, 9):
        compare(g, {"x": elements(dtype, n, 5)}, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [name for name in CODED if name != "f8e8m0"])
def test_quantised_products(dtype: str, device: str) -> None:
    """Weights of few bits with scales into a product, and its result quantised: kernels all the way."""
    g = Graph("product")
    x = g.input("x", (N, 6))
    w = g.param("w", (6, 5), dtype, data=cast(np.random.default_rng(1).uniform(-9, 9, (6, 5)), DTYPES[dtype]))
    scale = g.constant(np.linspace(0.1, 0.5, 5).astype(np.float32))
    y = x @ g.add(encoded.Dequantize(1), w, scale)[0]
    q = g.add(quant.Quantize(to=DTYPES[dtype]), y, g.constant(np.array(0.75, np.float32)))[0]
    g.output(q, "q")
    g.output(g.add(encoded.Dequantize(), q, g.constant(np.array(2, np.float32)))[0], "back")
    given = {"x": np.round(np.random.default_rng(2).standard_normal((7, 6)) * 2).astype(np.float32) / 4}
    model = rlx.compile(g, device=device)
    assert "host" not in model.explain("dispatch").splitlines()[0]
    for name, want in run_graph(g, given).items():
        got = np.asarray(model(given)[name]).astype(np.float32)
        assert (got != want.astype(np.float32)).mean() < 0.1, name  # where a sum lies between two values
        np.testing.assert_allclose(got, want.astype(np.float32), atol=2.01)


@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_index_stops_the_run(device: str) -> None:
    """Of an odd count: the element beyond the last one is not there, and is not looked up."""
    g = Graph("gather")
    x, i = g.input("x", (3,), "i4"), g.input("i", (N,), "i64")
    g.output(g.add(elementwise.Cast(DTYPES["i4"]), g.add(index.Gather(0), x, i)[0])[0], "y")
    model = compare(g, {"x": elements("i4", 3), "i": np.array([0, -1, 2])}, device)
    with pytest.raises(ExecutionError, match="3"):
        model({"x": elements("i4", 3), "i": np.array([0, 3, 1])})


# ---- leaves, control flow, memory


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", CODED)
def test_leaves_and_outputs(dtype: str, device: str) -> None:
    """Inputs, params and constants as outputs, alone and in views: fresh, by `out=` and after set_params."""
    g = Graph("leaves")
    x, w = g.input("x", (3, 5), dtype), g.param("w", (15,), dtype, data=elements(dtype, 15, seed=3))
    c = g.constant(elements(dtype, 3, 5, seed=4))
    for name, value in (("x", x), ("w", w), ("c", c)):
        g.output(value, name)
        g.output(value.reshape(5, 3), f"view of {name}")
        g.output(value, f"{name} again")
    given = {"x": elements(dtype, 3, 5)}
    model = compare(g, given, device)
    out = {o.name: np.empty([int(str(n)) for n in o.shape], o.dtype.numpy) for o in model.outputs}
    model.run(given, out=out)
    for name, want in run_graph(g, given).items():
        same(out[name], want, name)
    other = elements(dtype, 15, seed=5)
    model.set_params({"w": other})
    same(model(given)["w"], other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", CODED)
def test_control_flow(dtype: str, device: str) -> None:
    """Results of branches, carries, and rows of an odd count that begin within a byte."""
    g = Graph("flow")
    x, go = g.input("x", (4, 3), dtype), g.input("go", (), "bool")

    def body(region: Graph, carry: Value, row: Value) -> tuple[Value, Value]:
        return row, carry

    first = g.add(layout.Slice((0, 0), (1, 3), (1, 1)), x)[0].reshape(3)
    last, rows = _scan(g, body, first, x)
    g.output(last, "last")
    g.output(rows, "rows")
    g.output(g.add(elementwise.Cast(DTYPES["f32"]), rows)[0], "wide")
    g.output(_if(g, go, x, rows), "chosen")
    for flag in (True, False):
        compare(g, {"x": elements(dtype, 4, 3), "go": np.array(flag)}, device)


def _scan(g: Graph, body: Callable[..., tuple[Value, Value]], carry: Value, rows: Value) -> tuple[Value, ...]:
    region = Graph("body")
    inside = region.input("c", carry.shape, carry.dtype), region.input("r", rows.shape[1:], rows.dtype)
    for number, value in enumerate(body(region, *inside)):
        region.output(value, f"o{number}")
    return tuple(g.add(control.Scan(1, 1), carry, rows, regions=(region,)))


def _if(g: Graph, test: Value, *values: Value) -> Value:
    regions = []
    for number in range(2):
        region = Graph(f"branch{number}")
        inside = [region.input(f"v{n}", v.shape, v.dtype) for n, v in enumerate(values)]
        region.output(inside[number], "o")
        regions.append(region)
    return g.add(control.If(), test, *values, regions=tuple(regions))[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", CODED)
def test_states(dtype: str, device: str) -> None:
    """A state that the graph updates, and one that an output is fed to; read and written as users hold them."""
    g = Graph("states")
    x, old = g.input("x", (3,), dtype), g.state("old", (3,), dtype)
    g.output(old, "before")
    g.output(g.add(layout.Concat(0), old, x)[0], "both")
    g.update(old, x)
    model = rlx.compile(g, device=device)
    a, b = elements(dtype, 3), elements(dtype, 3, seed=1)
    same(model(x=a)["before"], np.zeros(3, DTYPES[dtype].numpy))
    same(model(x=b)["both"], np.concatenate([a, b]))
    same(model.states["old"].read(), b)
    model.states["old"].write(a)
    same(model(x=b)["before"], a)
    model.states["old"].reset()
    same(model(x=b)["before"], np.zeros(3, DTYPES[dtype].numpy))


@pytest.mark.parametrize("device", DEVICES)
def test_memory_is_half_a_byte_an_element(device: str) -> None:
    """In the plan of the arena, in params and in the estimate; what users hold is a byte an element."""
    g = Graph("memory")
    x = g.input("x", (1001,))
    w = g.param("w", (1001,), "i4", data=elements("i4", 1001))
    q = g.add(quant.Quantize(to=DTYPES["i4"]), x, g.constant(np.array(0.5, np.float32)))[0]
    y = g.add(layout.Concat(0), q, w)[0]
    g.output(g.add(elementwise.Cast(DTYPES["f32"]), g.add(layout.Transpose(), y.reshape(2, 1001))[0])[0], "y")
    g.output(q, "q")
    model = compare(g, {"x": np.linspace(-3, 3, 1001, dtype=np.float32)}, device)
    program = model.compilation.program
    assert program is not None
    sizes = {b: b.nbytes({}) for b in (*program.params, *model.plan.offsets) if is_narrow(b.dtype)}
    assert {size for b, size in sizes.items() if not b.wide} == {501, 1001}  # w and q, of 1001; and y of 2002 elements
    assert {size for b, size in sizes.items() if b.wide} == {1001, 2002}  # what is shown, and y before it is packed
    assert rlx.estimate(g, device).weight_bytes == 501 + 4  # and the scale
    given = {"x": np.linspace(-3, 3, 1001, dtype=np.float32)}
    made = run_program(program, given, params={"w": elements("i4", 1001)}, plan=model.plan)  # checks every store
    same(made["q"], run_graph(g, given)["q"])


def test_artifacts(tmp_path: Path) -> None:
    """Stored code with 4-bit params, constants and states loads and runs in another model, with other params too."""
    g = Graph("stored")
    x, w = g.input("x", (3, 5), "i4"), g.param("w", (3, 5), "i4", data=elements("i4", 3, 5, seed=1))
    c, s = g.constant(elements("i4", 3, 5, seed=2)), g.state("s", (3, 5), "i4")
    for n, value in enumerate((x, w, c, s)):
        g.output(g.add(elementwise.Cast(DTYPES["f32"]), value)[0], f"y{n}")
        g.output(value, f"z{n}")
    g.update(s, x)
    model = rlx.compile(g, device="cpu")
    given = elements("i4", 3, 5)
    model.save(tmp_path / "m.rlxart")
    loaded = rlx.load(tmp_path / "m.rlxart")
    for _ in range(2):
        for got, want in zip(loaded.run([given]), model.run([given]), strict=True):
            same(got, want)
    other = elements("i4", 3, 5, seed=9)
    loaded.set_params({"w": other})
    same(loaded(given)["z1"], other)
    model.save(tmp_path / "portable.rlxart", portable=True)
    same(rlx.load(tmp_path / "portable.rlxart", device="cpu").run([given])[3], model.run([given])[3])
