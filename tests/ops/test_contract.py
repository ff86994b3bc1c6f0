"""Matrix products and dequantisation: references against NumPy and ONNX; lowered and decomposed code against them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import Dim
from rlx.kernels.lowering import Contract, lower_node
from rlx.ops.base import product
from rlx.ops.contract import Gemm, MatMul
from rlx.ops.encoded import Dequantize
from rlx.testing.interpret import check_op, make_node

RNG = np.random.default_rng(6)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    if np.dtype(dtype).kind in "iu":
        return RNG.integers(0, 20, shape).astype(dtype)
    return RNG.standard_normal(shape).astype(dtype)


SHAPES = [
    ((2, 3), (3, 5)),
    ((1, 1), (1, 1)),
    ((1, 3), (3, 1)),
    ((0, 3), (3, 2)),
    ((2, 0), (0, 3)),
    ((3,), (3,)),
    ((3,), (3, 4)),
    ((2, 3), (3,)),
    ((5, 2, 3), (3,)),
    ((3,), (5, 3, 2)),
    ((7, 2, 3), (7, 3, 4)),
    ((7, 2, 3), (3, 4)),
    ((2, 3), (7, 3, 4)),
    ((2, 1, 2, 3), (5, 3, 4)),
    ((1, 2, 3), (4, 3, 1)),
]


@pytest.mark.parametrize("a, b", SHAPES)
def test_matmul_shapes(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """All combinations of ranks that numpy.matmul takes."""
    x, y = normal(*a), normal(*b)
    (z,) = check_op(MatMul(), x, y)
    np.testing.assert_allclose(z, np.matmul(x.astype(np.float64), y.astype(np.float64)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.int32, np.int64, np.uint8])
def test_matmul_types(dtype: Any) -> None:
    """Integers wrap, 16-bit floats accumulate in f32."""
    check_op(MatMul(), normal(3, 17, dtype=dtype), normal(17, 5, dtype=dtype))


def test_matmul_of_matrices_is_an_anchor() -> None:
    """Rank 2 and up goes to the matrix product kernel with its sizes."""
    n = Dim("n", 1, 9)
    lowered = lower_node(make_node(MatMul(), ((n, 2, 3), "f32"), ((3, 5), "f32")))
    assert lowered is not None
    assert isinstance(lowered.anchor, Contract)
    assert (lowered.anchor.m, lowered.anchor.n, lowered.anchor.k) == (2, 5, 3)


def test_matmul_symbolic() -> None:
    n, k = Dim("n", 1, 9), Dim("k", 1, 9)
    check_op(MatMul(), normal(4, 2, 3), normal(3, 5), shapes=[(n, 2, k), (k, 5)], extents={"n": 4, "k": 3})
    check_op(MatMul(), normal(4, 2, 3), normal(4, 3, 5), shapes=[(n, 2, k), (n, k, 5)], extents={"n": 4, "k": 3})
    check_op(MatMul(), normal(3), normal(4, 3, 5), shapes=[(k,), (n, k, 5)], extents={"n": 4, "k": 3})


def test_matmul_work() -> None:
    """Two operations for each of the m * n * k products."""
    node = make_node(MatMul(), ((7, 2, 3), "f32"), ((3, 5), "f32"))
    work = MatMul().work(*(v.type for v in node.inputs))
    assert (work.flops, work.read, work.written) == (7 * 2 * 3 * 5 * 2, (42 + 15) * 4, 70 * 4)


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("c", [None, (), (1,), (5,), (3, 1), (1, 5), (3, 5)])
@pytest.mark.parametrize("alpha, beta", [(1.0, 1.0), (0.5, 2.0), (1.0, 0.0)])
def test_gemm(trans_a: bool, trans_b: bool, c: tuple[int, ...] | None, alpha: float, beta: float) -> None:
    a, b = normal(3, 4), normal(4, 5)
    arrays = [np.ascontiguousarray(a.T) if trans_a else a, np.ascontiguousarray(b.T) if trans_b else b]
    exact = alpha * (a.astype(np.float64) @ b)
    if c is not None:
        arrays.append(normal(*c))
        exact = exact + beta * arrays[2]
    (y,) = check_op(Gemm(alpha, beta, trans_a, trans_b), *arrays)
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)


def test_gemm_types_and_symbols() -> None:
    n = Dim("n", 1, 9)
    check_op(Gemm(2, 3), normal(3, 4, dtype=np.int32), normal(4, 5, dtype=np.int32), normal(5, dtype=np.int32))
    check_op(Gemm(), normal(3, 4, dtype=np.float16), normal(4, 5, dtype=np.float16))
    extents = {"n": 6}
    check_op(Gemm(trans_b=True), normal(6, 4), normal(5, 4), normal(5), shapes=[(n, 4), (5, 4), (5,)], extents=extents)


def test_matrix_errors() -> None:
    with pytest.raises(ShapeError, match="contracted axes: 3 and 4 differ"):
        make_node(MatMul(), ((2, 3), "f32"), ((4, 5), "f32"))
    with pytest.raises(ShapeError, match="leading axes: 2 and 3 differ"):
        make_node(MatMul(), ((2, 4, 3), "f32"), ((3, 3, 5), "f32"))
    with pytest.raises(ShapeError, match="rank 1 or more"):
        make_node(MatMul(), ((), "f32"), ((4, 5), "f32"))
    with pytest.raises(DTypeError, match="differ in element type"):
        make_node(MatMul(), ((2, 3), "f32"), ((3, 5), "f16"))
    with pytest.raises(ShapeError, match="two matrices"):
        make_node(Gemm(), ((2, 3, 4), "f32"), ((4, 5), "f32"))
    with pytest.raises(ShapeError, match="gemm: c"):
        make_node(Gemm(), ((1, 3), "f32"), ((3, 5), "f32"), ((2, 5), "f32"))
    with pytest.raises(OptionError, match="whole numbers"):
        make_node(Gemm(alpha=0.5), ((2, 3), "i32"), ((3, 5), "i32"))


# ---- dequantisation


def run_onnx_dequantize(*inputs: np.ndarray, **attributes: Any) -> np.ndarray:
    names = [f"x{i}" for i in range(len(inputs))]
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(names, inputs, strict=True)
    ]
    node = helper.make_node("DequantizeLinear", names, ["y"], **attributes)
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", onnx.defs.onnx_opset_version())])
    return np.asarray(ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))[0])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16])
@pytest.mark.parametrize("with_zero", [False, True])
@pytest.mark.parametrize(
    "axis, block, shape", [(None, 0, ()), (0, 0, (3,)), (-1, 0, (6,)), (1, 2, (3, 3)), (0, 3, (1, 6))]
)
def test_dequantize(dtype: Any, with_zero: bool, axis: int | None, block: int, shape: tuple[int, ...]) -> None:
    """One scale, one for each index of an axis, or one a block; against ONNX."""
    data, scale = RNG.integers(0, 100, (3, 6)).astype(dtype), RNG.uniform(0.1, 1, shape).astype(np.float32)
    inputs = [data, scale] + ([RNG.integers(0, 100, shape).astype(dtype)] if with_zero else [])
    (y,) = check_op(Dequantize(axis, block), *inputs)
    options = {"axis": axis, "block_size": block} if axis is not None else {}
    np.testing.assert_allclose(y, run_onnx_dequantize(*inputs, **options), rtol=1e-6)


def test_dequantize_partial_blocks_and_types() -> None:
    """The last block may be short; 4-bit data, f16 scales, bf16 results, scales of one element."""
    data = RNG.integers(-8, 8, (5, 7)).astype(ml_dtypes.int4)
    check_op(Dequantize(1, 3, DTYPES["bf16"]), data, normal(5, 3, dtype=np.float16), np.ones((5, 3), ml_dtypes.int4))
    check_op(Dequantize(), data, normal(1), np.ones(1, ml_dtypes.int4))
    check_op(Dequantize(), normal(4, dtype=ml_dtypes.float8_e4m3fn), np.float32(0.5))
    n = Dim("n", 1, 40)
    check_op(Dequantize(0, 4), data, normal(2, 7), shapes=[(n, 7), ((n + 3) // 4, 7)], extents={"n": 5})


def test_dequantize_errors() -> None:
    with pytest.raises(DTypeError, match="data of integers"):
        make_node(Dequantize(), ((3,), "f32"), ((), "f32"))
    with pytest.raises(DTypeError, match="must be floating-point"):
        make_node(Dequantize(), ((3,), "i8"), ((), "i8"))
    with pytest.raises(ShapeError, match="dequantize: scale"):
        make_node(Dequantize(0), ((3,), "i8"), ((4,), "f32"))
    with pytest.raises(ShapeError, match="expected scale of shape"):
        make_node(Dequantize(0, 2), ((3, 4), "i8"), ((2,), "f32"))
    with pytest.raises(DTypeError, match="zero like data"):
        make_node(Dequantize(0), ((3,), "i8"), ((3,), "f32"), ((3,), "u8"))
    with pytest.raises(OptionError, match="block"):
        make_node(Dequantize(None, 2), ((3,), "i8"), ((), "f32"))


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
@pytest.mark.parametrize("reach", [1, 11, 60])
def test_products_of_integers_wrap(dtype: str, reach: int) -> None:
    """The reference's, made in f64 where that is exact, have the low bits of the sums in exact integers."""
    info = np.iinfo(dtype)
    low, high = max(info.min, -(1 << reach)), min(info.max, 1 << reach)
    for a, b in (*SHAPES, ((3, 300), (300, 2))):
        x, y = (RNG.integers(low, high, shape, dtype, endpoint=True) for shape in (a, b))
        exact = np.matmul(x.astype(object), y.astype(object)) % (1 << 8 * info.dtype.itemsize)
        got = product(x, y)
        assert got.dtype == x.dtype
        assert np.array_equal(got.astype(object) % (1 << 8 * info.dtype.itemsize), exact)
