"""Quantisation and integer products against ONNX Runtime (bit for bit) and the onnx package's reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx_reference import onnx_reference
from ops_oracle import check, ort, values

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, TensorType
from rlx.ops.base import apply
from rlx.ops.bytewise import ByteConv, ByteMatMul
from rlx.ops.encoded import Dequantize
from rlx.ops.quant import (
    ConvInteger,
    DynamicQuantizeLinear,
    MatMulInteger,
    QLinearConv,
    QLinearMatMul,
    Quantize,
    Requantize,
)

RNG = np.random.default_rng(0)


def u8(*shape: int) -> Array:
    return RNG.integers(0, 256, shape).astype(np.uint8)


def i8(*shape: int) -> Array:
    """Small enough that ONNX Runtime's 16-bit partial sums on processors without VNNI do not saturate."""
    return RNG.integers(-60, 61, shape).astype(np.int8)


def f32(value: Any) -> Array:
    return np.asarray(value, np.float32)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16])
def test_quantize_to_integers(dtype: Any) -> None:
    """One scale, one for each column, one for each block; halves to even, saturation."""
    x = (values((4, 6)) * 100).astype(np.float32)
    x[0, :4] = [2.5, 3.5, -1e9, 1e9]
    zero = RNG.integers(0, 9, (4, 6)).astype(dtype)
    scale = np.abs(values((4, 6))) + np.float32(0.1)
    for op, s, z, attributes in (
        (Quantize(to=dtype), f32(1), np.asarray(zero[0, 0]), {}),
        (Quantize(to=dtype), f32([0.5]), zero[0, :1], {}),
        (Quantize(1, to=dtype), scale[0], zero[0], {"axis": 1}),
        (Quantize(0, to=dtype), scale[:, 0], zero[:, 0], {"axis": 0}),
        (Quantize(1, 2, to=dtype), scale[:, :3], zero[:, :3], {"axis": 1, "block_size": 2}),
    ):
        (y,) = check(op, x, s, z, static=(1, 2))
        np.testing.assert_array_equal(y, ort("QuantizeLinear", x, s, z, **attributes)[0])
    check(Quantize(1, 4, to=dtype), x, scale[:, :2], zero[:, :2])  # the last block is not full
    np.testing.assert_array_equal(check(Quantize(), x, f32(2))[0], ort("QuantizeLinear", x, f32(2))[0])


def test_quantize_to_few_bits() -> None:
    """Saturation at the ends of i4 and u4, of i2 and u2."""
    x = f32([-100, -3, 2.5, 3.5, 100])
    assert check(Quantize(to=DTYPES["u4"]), x, f32(1))[0].tolist() == [0, 0, 2, 4, 15]
    assert check(Quantize(to=DTYPES["i4"]), x, f32(1))[0].tolist() == [-8, -3, 2, 4, 7]
    assert check(Quantize(to=DTYPES["u2"]), x, f32(1))[0].tolist() == [0, 0, 2, 3, 3]
    assert check(Quantize(to=DTYPES["i2"]), x, f32(1))[0].tolist() == [-2, -2, 1, 1, 1]
    assert check(Quantize(to=DTYPES["f4e2m1"]), x, f32(1))[0].astype(np.float32).tolist() == [-6, -3, 2, 4, 6]


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("name", ["f8e4m3", "f8e5m2", "f8e4m3fnuz", "f8e5m2fnuz"])
def test_quantize_to_eight_bit_floats(name: str, saturate: bool) -> None:
    """Beyond the largest value: that value, or NaN or infinity."""
    x = f32([0, 0.1, -0.3, 1, 100, 449, 500, 1e6, -1e6, np.inf, np.nan])
    zero = np.zeros((), DTYPES[name].numpy)
    (y,) = check(Quantize(to=DTYPES[name], saturate=saturate), x, f32(2), zero)
    expected = onnx_reference("QuantizeLinear", x, f32(2), zero, saturate=int(saturate))[0]
    np.testing.assert_array_equal(y.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("x", [values((4, 6)), values((4, 6)) + 9, values((4, 6)) - 9, values((4, 6)) * 0, values(())])
def test_dynamic_quantize_linear(x: Array) -> None:
    """0 is always in the range; all zeros have scale 1."""
    x = f32(x)
    for got, want in zip(check(DynamicQuantizeLinear(), x), ort("DynamicQuantizeLinear", x, outputs=3), strict=True):
        np.testing.assert_array_equal(got, want)


def test_matmul_integer() -> None:
    """Zero points for all, for each row, for each column, and batches."""
    a, b = u8(2, 3, 5), i8(5, 4)
    every = (0, 1, 2, 3)
    np.testing.assert_array_equal(check(MatMulInteger(), a, b)[0], ort("MatMulInteger", a, b)[0])
    given = (a, b, np.array(12, np.uint8), i8(4))
    np.testing.assert_array_equal(check(MatMulInteger(), *given, static=every)[0], ort("MatMulInteger", *given)[0])
    rows = u8(3)
    (y,) = check(MatMulInteger(), a, b, rows, static=every)
    np.testing.assert_array_equal(y, np.matmul(a.astype(np.int32) - rows[:, None], b.astype(np.int32)))


def test_conv_integer() -> None:
    """Pads hold the zero point of x; zero points of w for all or for each channel."""
    x, w = u8(2, 4, 6, 5), i8(6, 2, 3, 2)
    op = ConvInteger((2, 1), (), (1, 0, 2, 1), 2)
    attributes: dict[str, Any] = {"strides": [2, 1], "pads": [1, 0, 2, 1], "group": 2}
    for zeros in ((), (np.array(100, np.uint8),), (np.array(100, np.uint8), np.array(3, np.int8))):
        (y,) = check(op, x, w, *zeros, static=(0, 1, 2, 3))
        np.testing.assert_array_equal(y, ort("ConvInteger", x, w, *zeros, **attributes)[0])
    check(op, x, w, np.array(100, np.uint8), i8(6), static=(0, 1, 2, 3))


def test_qlinear_matmul() -> None:
    """Parameters for all, for each column, and for each row and column."""
    a, one, zero = u8(2, 3, 5), f32(0.01), np.array(100, np.uint8)
    plain = (a, one, zero, u8(2, 5, 4), f32(0.02), np.array(128, np.uint8), f32(0.05), np.array(120, np.uint8))
    np.testing.assert_array_equal(check(QLinearMatMul(), *plain)[0], ort("QLinearMatMul", *plain)[0])
    columns = (a, one, zero, i8(5, 4), f32([0.02, 0.01, 0.03, 0.05]), i8(4) * 0, f32(0.05), np.array(120, np.uint8))
    (y,) = check(QLinearMatMul(), *columns, static=tuple(range(8)))
    np.testing.assert_array_equal(y, ort("QLinearMatMul", *columns)[0])
    rows = (a[0], f32([0.01, 0.02, 0.01]), u8(3), *columns[3:6], f32([0.05, 0.1, 0.02]), u8(3))
    check(QLinearMatMul(), *rows, static=tuple(range(8)))


@pytest.mark.parametrize("biased", [False, True])
def test_qlinear_conv(biased: bool) -> None:
    """A scale for each output channel, strides, uneven pads, groups and an i32 bias."""
    bias = (RNG.integers(-1000, 1000, 6).astype(np.int32),) if biased else ()
    scales = f32([0.01, 0.02, 0.03, 0.01, 0.005, 0.1])
    given = (
        u8(2, 4, 6, 5), f32(0.02), np.array(100, np.uint8), i8(6, 2, 3, 2), scales, i8(6) * 0, f32(0.3),
        np.array(120, np.uint8), *bias,
    )  # fmt: skip
    (y,) = check(QLinearConv((2, 1), (), (1, 0, 2, 1), 2), *given, static=tuple(range(9)))
    expected = ort("QLinearConv", *given, strides=[2, 1], pads=[1, 0, 2, 1], group=2)[0]
    np.testing.assert_array_equal(y, expected)


def test_errors() -> None:
    """Targets, blocks, zero points and shapes that do not fit."""
    x, s = TensorType((4, 6), DTYPES["f32"]), TensorType((), DTYPES["f32"])
    with pytest.raises(DTypeError, match="quantise to i32"):
        Quantize(to=DTYPES["i32"]).infer(x, s)
    with pytest.raises(DTypeError, match="zero point"):
        Quantize().infer(x, s, TensorType((), DTYPES["i8"]))
    with pytest.raises(OptionError, match="block"):
        Quantize(None, 2).infer(x, s)
    with pytest.raises(ShapeError, match="scale"):
        Quantize(1).infer(x, TensorType((5,), DTYPES["f32"]))
    with pytest.raises(ShapeError, match="broadcast"):
        Requantize().infer(TensorType((3,), DTYPES["i32"]), TensorType((2, 3), DTYPES["f32"]))
    with pytest.raises(DTypeError, match="u8 or i8"):
        MatMulInteger().infer(x, x)


ROWS, VECTOR, BATCH, COLUMNS = u8(3, 5), u8(5), u8(2, 3, 5), u8(5, 4)
IMAGE, KERNEL, SUMS = u8(1, 2, 5, 5), u8(3, 2, 3, 3), RNG.integers(-999, 999, (3, 4)).astype(np.int32)
SCALE, ZERO, BIAS = f32(0.25), np.uint8(7), np.zeros(3, np.int32)
PARAMETERS: dict[str, tuple[Any, tuple[Any, ...], tuple[int, ...]]] = {  # op, operands, which of them are parameters
    "quantize": (Quantize(), (f32(values((3, 4))), SCALE, ZERO), (1, 2)),
    "quantize a number": (Quantize(), (f32(2.5), SCALE, ZERO), (1, 2)),
    "quantize without a zero point": (Quantize(), (f32(values((3, 4))), SCALE), (1,)),
    "quantize along an axis": (Quantize(1), (f32(values((3, 4))), f32([1, 2, 3, 4]), u8(4)), (1, 2)),
    "quantize blocks": (Quantize(1, 2), (f32(values((3, 4))), np.ones((3, 2), np.float32), u8(3, 2)), (1, 2)),
    "dequantize": (Dequantize(), (ROWS, SCALE, ZERO), (1, 2)),
    "dequantize a number": (Dequantize(), (ZERO, SCALE, ZERO), (1, 2)),
    "dequantize without a zero point": (Dequantize(), (ROWS, SCALE), (1,)),
    "dequantize along an axis": (Dequantize(0), (ROWS, f32([1, 2, 3]), u8(3)), (1, 2)),
    "dequantize blocks": (Dequantize(0, 3), (ROWS, np.ones((1, 5), np.float32), u8(1, 5)), (1, 2)),
    "requantize": (Requantize(), (SUMS, SCALE, ZERO, SCALE), (1, 2, 3)),
    "matmul_integer": (MatMulInteger(), (ROWS, COLUMNS, ZERO, ZERO), (2, 3)),
    "matmul_integer of a batch": (MatMulInteger(), (BATCH, COLUMNS, ZERO, ZERO), (2, 3)),
    "matmul_integer of a vector": (MatMulInteger(), (VECTOR, COLUMNS, ZERO, ZERO), (2, 3)),
    "matmul_integer by a vector": (MatMulInteger(), (BATCH, VECTOR, ZERO, ZERO), (2, 3)),
    "matmul_integer of vectors": (MatMulInteger(), (VECTOR, VECTOR, ZERO, ZERO), (2, 3)),
    "conv_integer": (ConvInteger(), (IMAGE, KERNEL, ZERO, ZERO), (2, 3)),
    "byte_matmul": (ByteMatMul(), (ROWS, i8(5, 4), ZERO), (2,)),
    "byte_conv": (ByteConv(), (IMAGE, i8(3, 2, 3, 3), ZERO), (2,)),
    "qlinear_conv": (
        QLinearConv(), (IMAGE, SCALE, ZERO, KERNEL, SCALE, ZERO, f32(100), ZERO, BIAS), (1, 2, 4, 5, 6, 7, 8),
    ),
} | {
    f"qlinear_matmul {what}": (
        QLinearMatMul(), (a, SCALE, ZERO, b, SCALE, ZERO, f32(100), ZERO), (1, 2, 4, 5, 6, 7),
    ) for what, a, b in (
        ("of matrices", ROWS, COLUMNS), ("of a batch", BATCH, COLUMNS), ("of a vector", VECTOR, COLUMNS),
        ("by a vector", BATCH, VECTOR), ("of vectors", VECTOR, VECTOR),
    )
}  # fmt: skip
SHAPES = [
    (), (0,), (1,), (2,), (3,), (4,), (5,), (1, 1), (3, 1), (1, 4), (3, 4), (3, 5), (5, 1), (5, 4), (1, 5), (3, 2),
    (1, 1, 1), (2, 1, 1), (2, 3, 1), (1, 3, 1), (2, 1, 4), (2, 2, 1), (3, 1, 1, 1), (1, 3, 1, 1), (1, 1, 1, 1),
    (1,) * 8, (1,) * 63, (1,) * 64, (3, *(1,) * 62), (*(1,) * 62, 4),
]  # fmt: skip


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", PARAMETERS)
def test_scales_and_zero_points_of_any_shape(name: str) -> None:
    """Each parameter of a quantised op, of each shape, is refused where the op is added, or it runs and is right."""
    op, operands, at = PARAMETERS[name]
    runs: list[tuple[Any, list[Array]]] = []
    g = rlx.Graph("parameters")
    inputs: dict[str, Array] = {}
    taken = dict.fromkeys(at, 0)
    for which in at:
        for shape in SHAPES:
            own = np.asarray(operands[which])
            made = RNG.integers(1, 9, shape) if own.dtype.kind in "iu" else RNG.integers(1, 9, shape) / 4
            arrays = [np.asarray(x) for x in operands]
            arrays[which] = np.asarray(made, own.dtype)
            names = [f"{which} {shape} {i}" for i in range(len(arrays))]
            try:
                op.infer_types([TensorType(a.shape, a.dtype) for a in arrays])
            except (ShapeError, DTypeError):
                continue
            taken[which] += 1
            inputs |= dict(zip(names, arrays, strict=True))
            x = [g.input(n, a.shape, a.dtype) for n, a in zip(names, arrays, strict=True)]
            g.output(apply(op, *x), f"{which} {shape}")
            runs.append((f"{which} {shape}", arrays))
    assert all(taken.values()), taken
    got = rlx.compile(g, device="cpu")(inputs)
    expected = run_graph(g, inputs)
    for output, arrays in runs:
        want = op.reference(*arrays)
        assert want.shape == got[output].shape == expected[output].shape, (output, want.shape)
        np.testing.assert_array_equal(got[output], want, err_msg=output)
