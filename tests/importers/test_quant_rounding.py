"""Quantisation rounds as ONNX says: the quotient in f32, to the nearest, of two to the even one; then it saturates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import rlx
from rlx.backends.reference import run_graph
from rlx.importers.onnx import load

RNG = np.random.default_rng(11)
TYPES = {"i8": np.int8, "u8": np.uint8, "i16": np.int16, "u16": np.uint16}
SCALES = (1.0, 0.5, 2.0, 0.1, 0.003921569, 0.0173, 3.7e-5)


def model(nodes: list[Any], x: np.ndarray, output: int, **initializers: np.ndarray) -> bytes:
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, x.shape)],
        [helper.make_tensor_value_info("y", output, None)],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in initializers.items()],
    )
    opsets = [helper.make_opsetid("", 21)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def on_both(source: bytes, x: np.ndarray, expected: np.ndarray) -> None:
    graph = load(source)
    for found in (run_graph(graph, {"x": x})["y"], rlx.compile(graph, device="cpu", threads=1)(x)["y"]):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def saturated(steps: np.ndarray, dtype: Any) -> np.ndarray:
    info = np.iinfo(dtype)
    return np.clip(steps, info.min, info.max).astype(dtype)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("scale", SCALES)
def test_quantize_linear(name: str, scale: float) -> None:
    """Ties, both sides of each, ends of the range, beyond it, infinities, and 20,000 random numbers."""
    dtype, step = TYPES[name], np.float32(scale)
    info = np.iinfo(dtype)
    ties = (np.arange(info.min, info.max, max(1, (info.max - info.min) // 3000)) + 0.5).astype(np.float32) * step
    near = [np.nextafter(ties, np.float32(way)) for way in (-np.inf, np.inf)]
    random = RNG.uniform(1.2 * info.min - 9, 1.2 * info.max, 20_000).astype(np.float32) * step
    x = np.concatenate([ties, *near, random, np.array([np.inf, -np.inf, 0, -0.0, 3e38, 1e-45], np.float32)])
    for zero in (0, int(info.min) + 7):
        node = helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["y"])
        source = model([node], x, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), scale=step, zero=dtype(zero))
        with np.errstate(all="ignore"):
            expected = saturated(np.rint(x / step).astype(np.float64) + zero, dtype)
        on_both(source, x, expected)


@pytest.mark.parametrize("name", ["i8", "u8"])
def test_dequantize_linear(name: str) -> None:
    """(x - zero) * scale, rounded once."""
    info = np.iinfo(TYPES[name])
    x = np.arange(info.min, info.max + 1).astype(TYPES[name])
    for scale in SCALES:
        step, zero = np.float32(scale), TYPES[name](info.min + 3)
        node = helper.make_node("DequantizeLinear", ["x", "scale", "zero"], ["y"])
        source = model([node], x, TensorProto.FLOAT, scale=step, zero=zero)
        on_both(source, x, (x.astype(np.int32) - int(zero)).astype(np.float32) * step)


@pytest.mark.parametrize("left", ["i8", "u8"])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_products_are_requantised_as_the_specification_says(left: str, rows: int) -> None:
    """Sums are exact; times scales that are powers of two, ties go to the even step; then they saturate."""
    dtype = TYPES[left]
    info = np.iinfo(dtype)
    x = RNG.integers(info.min, info.max, (rows, 32), endpoint=True).astype(dtype)
    w = RNG.integers(-128, 127, (32, 24), endpoint=True).astype(np.int8)
    for out_scale in (2.0, 64.0, 512.0):
        given = {
            "xs": np.float32(0.5), "xz": dtype(info.min + 5), "w": w, "ws": np.float32(0.25), "wz": np.int8(3),
            "ys": np.float32(out_scale), "yz": dtype(info.min + 100),
        }  # fmt: skip
        node = helper.make_node("QLinearMatMul", ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"], ["y"])
        source = model([node], x, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), **given)
        total = (x.astype(np.int64) - int(given["xz"])) @ (w.astype(np.int64) - 3)
        steps = np.rint(total * (0.5 * 0.25 / out_scale)) + int(given["yz"])
        on_both(source, x, saturated(steps, dtype))


def test_dynamic_quantisation() -> None:
    """The range takes in 0; the zero point is rounded to even too, and ties of elements are."""
    for low, high in ((0.0, 255.0), (-127.5, 127.5), (-1.0, 254.0), (10.0, 510.0), (-510.0, -10.0)):
        x = np.concatenate([np.linspace(low, high, 1021), [low, high]]).astype(np.float32)
        graph = helper.make_graph(
            [helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "scale", "zero"])],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
            [helper.make_tensor_value_info("y", TensorProto.UINT8, x.shape)],
        )
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        least, most = np.float32(min(low, 0)), np.float32(max(high, 0))
        scale = np.float32((most - least) / np.float32(255))
        zero = np.rint(np.clip(-least / scale, 0, 255))
        on_both(made.SerializeToString(), x, saturated(np.rint(x / scale).astype(np.float64) + zero, np.uint8))
