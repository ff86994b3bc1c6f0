"""Reductions: references against NumPy, f64 and ONNX; lowered code against the references."""

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
from rlx.ops import OPS
from rlx.ops.base import Op
from rlx.ops.reduction import (
    ArgMax,
    ArgMin,
    ReduceLogSumExp,
    ReduceMax,
    ReduceMean,
    ReduceMin,
    ReduceProd,
    ReduceSum,
    Reduction,
)
from rlx.testing.interpret import check_op, make_node

REDUCTIONS: list[Any] = [cls for cls in OPS.values() if issubclass(cls, Reduction)]
AXES = [None, (), (0,), (-1,), (0, 2), (-2, 0), (0, 1, 2)]
FORMULAS: dict[str, Any] = {
    "ReduceSum": np.sum,
    "ReduceMean": np.mean,
    "ReduceMax": np.max,
    "ReduceMin": np.min,
    "ReduceProd": np.prod,
    "ReduceL1": lambda x, **o: np.sum(np.abs(x), **o),
    "ReduceL2": lambda x, **o: np.sqrt(np.sum(x * x, **o)),
    "ReduceSumSquare": lambda x, **o: np.sum(x * x, **o),
    "ReduceLogSum": lambda x, **o: np.log(np.sum(x, **o)),
    "ReduceLogSumExp": lambda x, **o: np.log(np.sum(np.exp(x), **o)),
}


@pytest.mark.parametrize("cls", REDUCTIONS)
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("keepdims", [False, True])
def test_reductions_of_floats(cls: Any, axes: tuple[int, ...] | None, keepdims: bool) -> None:
    """Code, reference and an f64 formula agree for every choice of axes."""
    x = np.random.default_rng(1).uniform(0.1, 2, (2, 3, 5)).astype(np.float32)
    (y,) = check_op(cls(axes, keepdims), x)
    exact = FORMULAS[cls.__name__](x.astype(np.float64), axis=axes, keepdims=keepdims)
    np.testing.assert_allclose(y, exact, rtol=1e-5)


@pytest.mark.parametrize("cls", REDUCTIONS)
@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.int32, np.int64, np.uint8])
def test_reductions_by_type(cls: Any, dtype: Any) -> None:
    """Each element type: 16-bit floats accumulate in f32, integers wrap or are refused."""
    x = np.random.default_rng(2).uniform(0, 9, (4, 7)).astype(dtype)
    if cls.kinds == "f" and np.dtype(dtype).kind in "iu":
        with pytest.raises(DTypeError, match="floating-point"):
            make_node(cls(), (x.shape, dtype))
    else:
        check_op(cls((1,)), x)


@pytest.mark.parametrize("cls", REDUCTIONS)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), ()])
def test_reductions_over_nothing(cls: Any, shape: tuple[int, ...]) -> None:
    """Empty reductions give the neutral element, empty results are empty, scalars reduce to themselves."""
    check_op(cls(), np.ones(shape, np.float32))
    if shape:
        check_op(cls((0,), False), np.ones(shape, np.float32))


def test_neutral_elements() -> None:
    empty, none = np.zeros((0,), np.float32), np.zeros((0,), np.int8)
    assert ReduceMax().reference(empty)[0] == -np.inf
    assert ReduceMin().reference(empty)[0] == np.inf
    assert ReduceMax().reference(none)[0] == -128
    assert ReduceSum().reference(empty)[0] == 0
    assert ReduceProd().reference(none)[0] == 1
    assert np.isnan(ReduceMean().reference(empty)[0])
    check_op(ReduceMax(), none)
    check_op(ReduceMean(), none)


@pytest.mark.parametrize("cls", REDUCTIONS)
def test_nan_and_infinities_in_reductions(cls: Any) -> None:
    x = np.array([[1, np.nan, 3], [1, np.inf, 2], [-np.inf, -np.inf, -np.inf], [np.inf, -np.inf, 0]], np.float32)
    check_op(cls((1,)), x)


def test_logsumexp_is_stable() -> None:
    """Large elements do not overflow, and a row of -inf gives -inf."""
    x = np.array([[1000, 1000], [-1000, -1001], [-np.inf, -np.inf], [np.inf, 0]], np.float32)
    (y,) = check_op(ReduceLogSumExp((1,), False), x)
    np.testing.assert_allclose(y, [1000 + np.log(2), -1000 + np.log1p(np.exp(-1)), -np.inf, np.inf], rtol=1e-6)


def test_long_sums_of_16_bit_floats() -> None:
    """2049 ones: f16 arithmetic would stop at 2048."""
    (y,) = check_op(ReduceSum((0,), False), np.ones(2050, np.float16))
    assert y == 2050


def test_mean_of_integers_truncates() -> None:
    """From the 64-bit sum, so that small types do not overflow on the way."""
    x = np.array([[100, 100, 101], [-100, -100, -101]], np.int8)
    (y,) = check_op(ReduceMean((1,), False), x)
    np.testing.assert_array_equal(y, [100, -100])


@pytest.mark.parametrize("cls", [ArgMax, ArgMin])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.uint8])
def test_arg_against_onnx(cls: Any, last: bool, axis: int, dtype: Any) -> None:
    """With many ties; first or last as asked."""
    x = np.random.default_rng(3).integers(0, 3, (4, 5)).astype(dtype)
    for keepdims in (False, True):
        (y,) = check_op(cls(axis, keepdims, last), x)
        np.testing.assert_array_equal(y, run_onnx_arg(cls.__name__, x, axis, keepdims, last))


def run_onnx_arg(op_type: str, x: np.ndarray, axis: int, keepdims: bool, last: bool) -> np.ndarray:
    node = helper.make_node(op_type, ["x"], ["y"], axis=axis, keepdims=int(keepdims), select_last_index=int(last))
    x_info = helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
    graph = helper.make_graph([node], "g", [x_info], [helper.make_tensor_value_info("y", TensorProto.INT64, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", onnx.defs.onnx_opset_version())])
    return np.asarray(ReferenceEvaluator(model).run(None, {"x": x})[0])


@pytest.mark.parametrize("last", [False, True])
def test_arg_with_nan(last: bool) -> None:
    """NaN counts as the extremum."""
    x = np.array([1, np.nan, 5, np.nan, -7], np.float32)
    for cls in (ArgMax, ArgMin):
        (y,) = check_op(cls(0, False, last), x)
        assert y == (3 if last else 1)


def test_symbolic_reductions() -> None:
    n, m = Dim("n", 1, 16), Dim("m", 0, 8)
    x = np.random.default_rng(4).uniform(1, 2, (3, 4, 5)).astype(np.float32)
    for op in (ReduceMean((0, 2), False), ReduceSum(None), ReduceLogSumExp((2,)), ReduceMax((1,), False)):
        check_op(op, x, shapes=[(n, 4, m)], extents={"n": 3, "m": 5})
    check_op(ReduceMean((2,)), x.astype(np.int32), shapes=[(n, 4, m)], extents={"n": 3, "m": 5})
    check_op(ReduceMean((2,)), np.zeros((3, 4, 0), np.int32), shapes=[(n, 4, m)], extents={"n": 3, "m": 0})
    check_op(ArgMax(2), x, shapes=[(n, 4, m)], extents={"n": 3, "m": 5})
    assert str(make_node(ReduceSum((0,), False), ((n, m), "f32")).outputs[0].type) == "f32[m]"


@pytest.mark.parametrize("op", [ReduceSum((2,)), ReduceSum((-3,)), ArgMax(2), ArgMin(-3)])
def test_axis_errors(op: Op) -> None:
    with pytest.raises(ShapeError, match="outside a tensor of rank 2"):
        make_node(op, ((2, 3), "f32"))


def test_other_errors() -> None:
    with pytest.raises(ShapeError, match="named twice"):
        make_node(ReduceSum((0, -2)), ((2, 3), "f32"))
    with pytest.raises(ShapeError, match="no elements"):
        make_node(ArgMax(0), ((0, 3), "f32"))
    with pytest.raises(DTypeError, match="got bool"):
        make_node(ReduceSum(), ((3,), "bool"))
    with pytest.raises(ShapeError, match="outside a tensor of rank 0"):
        make_node(ArgMax(0), ((), "f32"))


def test_work_counts_the_input() -> None:
    """A reduction costs an operation for each element that it reads, not for each that it gives."""
    op = ReduceSum((1,))
    work = op.work(make_node(op, ((10, 100), "f32")).inputs[0].type)
    assert (work.flops, work.read, work.written) == (1000, 4000, 40)
