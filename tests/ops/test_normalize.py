"""Normalisations: references against ONNX and f64; lowered code against the references."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from rlx.errors import DTypeError, ShapeError
from rlx.ir.shape import Dim
from rlx.ops.normalize import BatchNorm, LayerNorm, LogSoftmax, RmsNorm, Softmax
from rlx.testing.interpret import check_op, make_node

RNG = np.random.default_rng(5)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return (RNG.standard_normal(shape) * 2 + 1).astype(dtype)


def run_onnx(op_type: str, *inputs: np.ndarray, **attributes: Any) -> np.ndarray:
    names = [f"x{i}" for i in range(len(inputs))]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in zip(names, inputs, strict=True)]
    node = helper.make_node(op_type, names, ["y"], **attributes)
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", onnx.defs.onnx_opset_version())])
    return np.asarray(ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))[0])


@pytest.mark.parametrize("cls", [Softmax, LogSoftmax])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 1, 1), (3, 0, 2), (7, 1, 13)])
def test_softmax(cls: Any, axis: int, shape: tuple[int, ...]) -> None:
    """Against ONNX along every axis, and exactly normalised."""
    x = normal(*shape) * 4  # ONNX's own evaluator takes logarithms of sums, which lose digits below 1e-38
    (y,) = check_op(cls(axis), x)
    if x.size:
        np.testing.assert_allclose(y, run_onnx(cls.__name__, x, axis=axis), rtol=1e-5, atol=1e-6)
        total = (y if cls is Softmax else np.exp(y)).sum(axis=axis)
        np.testing.assert_allclose(total, np.ones_like(total), rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_softmax_types(dtype: Any) -> None:
    for op in (Softmax(), LogSoftmax()):
        check_op(op, normal(3, 11, dtype=dtype))


def test_softmax_specials() -> None:
    """Large elements do not overflow; -inf masks; a fully masked row, NaN and +inf give NaN."""
    x = np.array([[1e4, 1e4, -1e4], [-np.inf, 0, 1], [-np.inf] * 3, [np.nan, 0, 1], [np.inf, 0, 1]], np.float32)
    (y,) = check_op(Softmax(), x)
    np.testing.assert_allclose(y[0], [0.5, 0.5, 0])
    assert y[1, 0] == 0
    assert np.isnan(y[2:]).any(axis=1).all()
    check_op(LogSoftmax(), x)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_norm(axis: int, with_bias: bool) -> None:
    """Over one or more trailing axes, against ONNX."""
    x = normal(2, 3, 5)
    tail = x.shape[axis:]
    parameters = [normal(*tail), normal(*tail)][: 1 + with_bias]
    (y,) = check_op(LayerNorm(axis, 1e-3), x, *parameters)
    expected = run_onnx("LayerNormalization", x, *parameters, axis=axis, epsilon=1e-3)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_layer_norm_parameters_broadcast() -> None:
    x = normal(4, 3, 5)
    check_op(LayerNorm(1), x, normal(5), normal(3, 1))
    check_op(LayerNorm(1), x, normal(), normal(1))
    check_op(RmsNorm(1), x, normal(3, 1))


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_norm_types(dtype: Any) -> None:
    x, scale, bias = normal(3, 7, dtype=dtype), normal(7, dtype=dtype), normal(7, dtype=dtype)
    check_op(LayerNorm(), x, scale, bias)
    check_op(RmsNorm(), x, scale)
    check_op(BatchNorm(), x, scale, bias, bias, np.abs(scale))


def test_layer_norm_of_a_large_mean() -> None:
    """The variance is taken around the mean: no cancellation when the mean dwarfs the spread."""
    x = (1e4 + RNG.standard_normal((2, 64))).astype(np.float32)
    (y,) = check_op(LayerNorm(), x, np.ones(64, np.float32), rtol=1e-3)
    wide = x.astype(np.float64)
    exact = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y, exact, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_rms_norm(axis: int) -> None:
    x = normal(2, 3, 5)
    scale = normal(*x.shape[axis:])
    (y,) = check_op(RmsNorm(axis, 1e-6), x, scale)
    wide, axes = x.astype(np.float64), tuple(range(axis % 3, 3))
    exact = wide / np.sqrt((wide * wide).mean(axis=axes, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(y, exact, rtol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 5), (1, 3, 4, 2), (0, 3, 2)])
def test_batch_norm(shape: tuple[int, ...]) -> None:
    x, scale, bias, mean, var = normal(*shape), normal(3), normal(3), normal(3), np.abs(normal(3))
    (y,) = check_op(BatchNorm(1e-4), x, scale, bias, mean, var)
    if x.size:
        expected = run_onnx("BatchNormalization", x, scale, bias, mean, var, epsilon=1e-4)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_batch_norm_of_f16_with_f32_parameters() -> None:
    check_op(BatchNorm(), normal(2, 3, 4, dtype=np.float16), normal(3), normal(3), normal(3), np.abs(normal(3)))


def test_symbolic_normalisations() -> None:
    n, m = Dim("n", 1, 8), Dim("m", 1, 8)
    x, extents = normal(3, 4, 5), {"n": 3, "m": 5}
    check_op(Softmax(2), x, shapes=[(n, 4, m)], extents=extents)
    check_op(LayerNorm(1), x, normal(4, 5), shapes=[(n, 4, m), (4, m)], extents=extents)
    check_op(RmsNorm(2), x, normal(5), shapes=[(n, 4, m), (m,)], extents=extents)
    check_op(BatchNorm(), x, *[np.abs(normal(4))] * 4, shapes=[(n, 4, m)] + [(4,)] * 4, extents=extents)


def test_errors() -> None:
    with pytest.raises(ShapeError, match="softmax: axis 2 is outside"):
        make_node(Softmax(2), ((2, 3), "f32"))
    with pytest.raises(DTypeError, match="softmax"):
        make_node(Softmax(), ((2, 3), "i32"))
    with pytest.raises(ShapeError, match=r"scale f32\[4\]"):
        make_node(LayerNorm(), ((2, 3), "f32"), ((4,), "f32"))
    with pytest.raises(ShapeError, match="bias"):
        make_node(LayerNorm(), ((2, 3), "f32"), ((3,), "f32"), ((2, 3), "f32"))
    with pytest.raises(DTypeError, match="differ in element type"):
        make_node(RmsNorm(), ((2, 3), "f32"), ((3,), "f16"))
    with pytest.raises(ShapeError, match="size of var"):
        make_node(BatchNorm(), ((2, 3), "f32"), *[((3,), "f32")] * 3, ((4,), "f32"))
    with pytest.raises(ShapeError, match=r"\[N, C"):
        make_node(BatchNorm(), ((3,), "f32"), *[((3,), "f32")] * 4)
