"""Products of 8-bit integers are exact: all signs at the ends of their ranges, odd sizes, zero points, open sizes.

With each kind of instructions that this machine has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from targets import machine

import rlx
from rlx.backends.cpu.gemm.panels import int8_layout as int8_panels
from rlx.backends.cpu.gemm.requantise import _not_stored
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array
from rlx.kernels.expr import Acc, Apply, Cast, const
from rlx.ops.quant import ConvInteger, DynamicQuantizeLinear, MatMulInteger, QLinearConv, QLinearMatMul
from rlx.runtime.compiled import CompiledGraph

KINDS = [
    pytest.param(int8_panels.Instructions(8, dots=False, tiles=False), id="avx2", marks=pytest.mark.needs("avx2")),
    pytest.param(int8_panels.Instructions(8, dots=True, tiles=False), id="vnni", marks=pytest.mark.needs("vnni")),
    pytest.param(
        int8_panels.Instructions(16, dots=True, tiles=False), id="avx512", marks=pytest.mark.needs("avx512", "vnni")
    ),
    pytest.param(
        int8_panels.Instructions(16, dots=True, tiles=True), id="amx", marks=pytest.mark.needs("avx512", "vnni", "amx")
    ),
]

ENDS = {"u8": np.array([0, 255], np.uint8), "i8": np.array([-128, 127], np.int8)}


@pytest.fixture(params=KINDS, autouse=True)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_panels, "instructions", lambda _: request.param)


def compiled(op: Any, given: list[Array], params: tuple[int, ...] = (), dims: dict[int, Any] | None = None) -> Any:
    """The op on the CPU as native code; the inputs numbered in `params` are weights."""
    g = rlx.Graph("int8")
    values = []
    for number, a in enumerate(given):
        shape = (dims or {}).get(number, a.shape)
        leaf = g.param if number in params else g.input
        values.append(leaf(f"x{number}", shape, dtype=a.dtype.name))
    for number, value in enumerate(g.add(op, *values)):
        g.output(value, name=f"y{number}")
    model = rlx.compile(g, device="cpu")
    assert " host " not in model.explain("fuse")
    if params:
        model.set_params({f"x{n}": given[n] for n in params})
    return model


def run(model: CompiledGraph, given: list[Array], params: tuple[int, ...] = ()) -> list[Array]:
    return model.run({f"x{n}": a for n, a in enumerate(given) if n not in params})


@pytest.mark.parametrize("right", ENDS)
@pytest.mark.parametrize("left", ENDS)
def test_ends_of_the_ranges(left: str, right: str) -> None:
    """Pairs whose sum is beyond 16 bits, in all combinations, and every tail of K, N and M."""
    rng = np.random.default_rng(5)
    for m, k, n in ((1, 2, 1), (1, 385, 70), (2, 7, 16), (5, 64, 17), (7, 33, 31), (13, 800, 33)):
        a, b = rng.choice(ENDS[left], (m, k)), rng.choice(ENDS[right], (k, n))
        given = [a, b]
        model = compiled(MatMulInteger(), given, (1,))
        assert "matmul.int8" in model.explain("kernels") or not int8_panels.available(machine())
        wanted = a.astype(np.int64) @ b.astype(np.int64)
        assert np.array_equal(run(model, given, (1,))[0], wanted)
        full = [np.full_like(a, ENDS[left][-1]), b]
        assert np.array_equal(run(model, full, (1,))[0], full[0].astype(np.int64) @ b.astype(np.int64))


@pytest.mark.parametrize("right", ENDS)
@pytest.mark.parametrize("left", ENDS)
def test_zero_points(left: str, right: str) -> None:
    """One number or one a row and a column, at the ends too; any size from one compile."""
    rng = np.random.default_rng(6)
    m_dim = rlx.Dim("m", 1, 40)
    for m, k, n in ((3, 9, 5), (16, 40, 33)):
        for rows, columns in (((), ()), ((m,), (n,))):
            given: list[Array] = [
                rng.choice(ENDS[left], (m, k)), rng.choice(ENDS[right], (k, n)),
                rng.choice(ENDS[left], rows), rng.choice(ENDS[right], columns),
            ]  # fmt: skip
            given = [np.asarray(a) for a in given]
            dims = {0: (m_dim, k)} | ({2: (m_dim,)} if rows else {})
            model = compiled(MatMulInteger(), given, (1, 3), dims)
            assert np.array_equal(run(model, given, (1, 3))[0], MatMulInteger().reference(*given))
            fewer = [given[0][:2], given[1], given[2][:2] if rows else given[2], given[3]]
            assert np.array_equal(run(model, fewer, (1, 3))[0], MatMulInteger().reference(*fewer))


def test_scales_of_channels() -> None:
    """A requantised product, its scale by column, is that of the reference to the last bit."""
    rng = np.random.default_rng(7)
    a, b = rng.integers(0, 256, (6, 37)).astype(np.uint8), rng.integers(-128, 128, (37, 19)).astype(np.int8)
    scales = [rng.uniform(0.01, 0.02, s).astype(np.float32) for s in ((), (19,), ())]
    given = [a, scales[0], np.uint8(3), b, scales[1], np.zeros(19, np.int8), scales[2] * 200, np.uint8(128)]
    given = [np.asarray(x) for x in given]
    model = compiled(QLinearMatMul(), given, (3, 4, 5))
    assert np.array_equal(run(model, given, (3, 4, 5))[0], QLinearMatMul().reference(*given))


@pytest.mark.parametrize("columns", [5, 16, 33, 48, 80])
def test_tiles_of_all_heights(columns: int) -> None:
    """Any number of rows, by tiles of one panel and of two, whole and in part: as sums, and as bytes."""
    rng = np.random.default_rng(16)
    rows = rlx.Dim("m", 1, 40)
    a, b = rng.integers(0, 256, (40, 24)).astype(np.uint8), rng.integers(-128, 128, (24, columns)).astype(np.int8)
    scales = [rng.uniform(0.01, 0.02, s).astype(np.float32) for s in ((), (columns,), ())]
    sums, wanted = compiled(MatMulInteger(), [a, b], (1,), {0: (rows, 24)}), a.astype(np.int64) @ b.astype(np.int64)
    given = [a, scales[0], np.uint8(3), b, scales[1], np.zeros(columns, np.int8), scales[2] * 200, np.uint8(128)]
    given = [np.asarray(x) for x in given]
    scaled = compiled(QLinearMatMul(), given, (3, 4, 5), {0: (rows, 24)})
    wanted_bytes = QLinearMatMul().reference(*given)
    for count in (*range(1, 20), 40):
        assert np.array_equal(run(sums, [a[:count], b], (1,))[0], wanted[:count])
        assert np.array_equal(run(scaled, [a[:count], *given[1:]], (3, 4, 5))[0], wanted_bytes[:count])


def test_quantised_on_the_fly() -> None:
    """The range covers 0 and all of x, for one row, many, and none but zeros."""
    rng = np.random.default_rng(8)
    for x in (rng.standard_normal((3, 70)), rng.uniform(1, 2, (1, 5)), np.zeros((2, 3)), rng.uniform(-2, -1, (4,))):
        given = [np.asarray(x, np.float32)]
        model = compiled(DynamicQuantizeLinear(), given)
        for got, wanted in zip(run(model, given), DynamicQuantizeLinear().reference(*given), strict=True):
            assert np.array_equal(got, wanted)


@pytest.mark.parametrize("right", ENDS)
@pytest.mark.parametrize("left", ENDS)
def test_convolutions(left: str, right: str) -> None:
    """More products than f32 can add up exactly, kernels that a transform would round, groups, strides, zero points."""
    rng = np.random.default_rng(9)
    for x, w, op in (
        ((1, 70, 9, 8), (33, 70, 3, 3), ConvInteger(pads=(1, 1, 1, 1))),
        ((1, 600, 3, 5), (17, 600, 1, 1), ConvInteger()),
        ((2, 8, 7, 9), (8, 1, 3, 3), ConvInteger((2, 1), (1, 2), (0, 1, 1, 2), 8)),
        ((2, 5, 30), (7, 5, 4), ConvInteger((3,))),
    ):
        for zeros in (False, True):
            given = [rng.choice(ENDS[left], x), np.full(w, ENDS[right][-1])]
            given[1][1:] = rng.choice(ENDS[right], (w[0] - 1, *w[1:]))
            if zeros:
                given += [np.asarray(ENDS[left][0]), rng.choice(ENDS[right], w[0])]
            params = tuple(n for n in (1, 3) if n < len(given))
            assert np.array_equal(run(compiled(op, given, params), given, params)[0], op.reference(*given))


def test_requantised_convolution() -> None:
    """Bias, scales by channel and the zero point of the result, to the last bit; any size from one compile."""
    rng = np.random.default_rng(10)
    x, w = (
        rng.integers(0, 256, (1, 16, 9, 11)).astype(np.uint8),
        rng.integers(-128, 128, (24, 16, 3, 3)).astype(np.int8),
    )
    scales = [rng.uniform(0.01, 0.02, s).astype(np.float32) for s in ((), (24,))]
    bias = rng.integers(-9999, 9999, 24).astype(np.int32)
    given = [
        np.asarray(a)
        for a in (x, scales[0], np.uint8(7), w, scales[1], np.zeros(24, np.int8), np.float32(1.5), np.uint8(131), bias)
    ]
    op = QLinearConv(pads=(1, 1, 1, 1))
    model = compiled(op, given, (3, 4, 5, 8), {0: (1, 16, rlx.Dim("h", 3, 20), rlx.Dim("w", 3, 20))})
    for h, wide in ((9, 11), (3, 4)):
        part = [np.ascontiguousarray(x[:, :, :h, :wide]), *given[1:]]
        assert np.array_equal(run(model, part, (3, 4, 5, 8))[0], op.reference(*part))


def test_products_of_every_shape() -> None:
    """Weights that must be split in many parts, rows that are not next to each other, batches; requantised or not."""
    rng = np.random.default_rng(11)
    for shape, k, n in (((2, 3, 5), 24, 40), ((1, 4, 2, 3), 9, 16), ((7,), 1300, 24), ((1,), 16, 8)):
        a, b = rng.integers(0, 256, (*shape, k)).astype(np.uint8), rng.choice(ENDS["u8"], (k, n))
        scales = [rng.uniform(0.01, 0.02, s).astype(np.float32) for s in ((), (n,))]
        zeros = [np.asarray(17, np.uint8), rng.integers(0, 256, n).astype(np.uint8)]
        plain = [a, b, *zeros]
        assert np.array_equal(
            run(compiled(MatMulInteger(), plain, (1, 3)), plain, (1, 3))[0], MatMulInteger().reference(*plain)
        )
        given: list[Array] = [np.asarray(x) for x in (a, scales[0], zeros[0], b, scales[1], zeros[1])]
        given += [np.asarray(30.0 * k**0.5, np.float32), np.asarray(3, np.int8)]
        params = (1, 2, 3, 4, 5, 6, 7)
        model = compiled(QLinearMatMul(), given, params)
        assert np.array_equal(run(model, given, params)[0], QLinearMatMul().reference(*given))


def test_more_rows_than_a_tile() -> None:
    """Rows, columns and k beyond and below whole tiles; sums, and results that are limited."""
    rng = np.random.default_rng(12)
    for m, k, n in ((16, 8, 16), (17, 64, 33), (31, 72, 47), (32, 130, 32), (33, 24, 24), (49, 200, 65), (64, 1, 7)):
        for left in ENDS.values():
            for right in ENDS.values():
                a, b = rng.choice(left, (m, k)), rng.choice(right, (k, n))
                zeros = [np.asarray(left[0]), rng.choice(right, n)]
                for given in ([a, b], [a, b, *zeros]):
                    params = tuple(range(1, len(given)))
                    wanted = MatMulInteger().reference(*given)
                    assert np.array_equal(run(compiled(MatMulInteger(), given, params), given, params)[0], wanted)
        scales = [rng.uniform(0.01, 0.02, s).astype(np.float32) for s in ((), (n,))]
        for left, low in ((np.uint8, 0), (np.int8, -128)):
            a, b = rng.integers(low, low + 256, (m, k)).astype(left), rng.integers(-128, 128, (k, n)).astype(np.int8)
            given = [a, scales[0], left(3), b, scales[1], np.zeros(n, np.int8), np.float32(0.7 * k**0.5), left(9)]
            given = [np.asarray(x) for x in given]
            model = compiled(QLinearMatMul(), given, (3, 4, 5))
            assert np.array_equal(run(model, given, (3, 4, 5))[0], QLinearMatMul().reference(*given))


def test_any_number_of_rows_from_one_compile() -> None:
    """Whatever they are cut into; a scale beyond what 32 bits hold saturates."""
    rng = np.random.default_rng(13)
    k, n = 76, 40
    b, scales = rng.integers(-128, 128, (k, n)).astype(np.int8), rng.uniform(0.01, 0.02, n).astype(np.float32)
    scales[3], scales[5] = 3e12, 1e-30
    a = rng.integers(0, 256, (300, k)).astype(np.uint8)
    quantised = [b, scales, np.zeros(n, np.int8), np.float32(0.9), np.uint8(120)]
    given = [np.asarray(x) for x in (a, np.float32(0.1), np.uint8(3), *quantised)]
    model = compiled(QLinearMatMul(), given, (3, 4, 5), {0: (rlx.Dim("m", 1, 400), k)})
    for m in (1, 3, 15, 16, 48, 70, 300):
        some = [a[:m], *given[1:]]
        assert np.array_equal(run(model, some, (3, 4, 5))[0], QLinearMatMul().reference(*some))


@pytest.mark.sample(3)
@pytest.mark.parametrize("channels", [16, 24, 32, 40, 48, 60, 64, 100, 144])
def test_depthwise_convolutions(channels: int, some: Callable[[Sequence[Any], int], list[Any]]) -> None:
    """Channels beyond and below whole vectors, windows of more than four rows, borders, strides; sums and bytes."""
    rng = np.random.default_rng(14)
    windows = (
        ((3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
        ((5, 2), (2, 2), (1, 2), (2, 0, 1, 1)),
        ((1, 7), (1, 3), (1, 1), (0, 3, 0, 3)),
    )
    for (size, strides, dilations, pads), left in some(list(product(windows, ENDS.values())), 2):
        w_shape, op = (channels, 1, *size), (strides, dilations, pads, channels)
        x, w = rng.choice(left, (2, channels, 9, 11)), rng.choice(ENDS["i8"], w_shape)
        for given in ([x, w], [x, w, np.asarray(left[0]), rng.choice(ENDS["i8"], channels)]):
            params = tuple(range(1, len(given)))
            params = tuple(n for n in params if n != 2)
            plain = ConvInteger(*op)
            for held in (params, ()):  # also weights that each run is given
                made = run(compiled(plain, given, held), given, held)[0]
                assert np.array_equal(made, plain.reference(*given))
        scales = [rng.uniform(0.01, 0.02, s).astype(np.float32) for s in ((), (channels,))]
        bias = rng.integers(-9999, 9999, channels).astype(np.int32)
        quantised = [w, scales[1], np.zeros(channels, np.int8), np.float32(0.9), left.dtype.type(100), bias]
        given = [np.asarray(a) for a in (x, scales[0], left.dtype.type(7), *quantised)]
        rounded, params = QLinearConv(*op), (3, 4, 5, 8)
        assert np.array_equal(run(compiled(rounded, given, params), given, params)[0], rounded.reference(*given))


@pytest.mark.parametrize("low, high, kept", [(0.0, 255.0, True), (0.0, 300.0, False), (-128.0, 127.0, False)])
def test_only_numbers_within_the_type_stay_floats(low: float, high: float, kept: bool) -> None:
    """u8(x) read as a float is x where x is whole and within 0 .. 255."""
    f32, u8 = DTYPES["f32"], DTYPES["u8"]
    whole = Apply("round", (Acc(f32),), f32)
    limited = Apply("max", (Apply("min", (whole, const(high, f32)), f32), const(low, f32)), f32)
    assert _not_stored(Cast(Cast(limited, u8), f32)) == (limited if kept else None)
