"""Gathers: what each position reads, negative positions, and the error for positions outside."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ops_oracle import check, ort, values

import rlx
from rlx.errors import DTypeError, ExecutionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import Dim
from rlx.ops.base import Op
from rlx.ops.index import Gather, GatherElements, GatherND
from rlx.testing.interpret import interpret, make_node


def positions(shape: tuple[int, ...], size: int, dtype: Any = np.int64) -> Array:
    return np.random.default_rng(1).integers(-size, size, shape).astype(dtype)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,), (1, 0)])
def test_gather_matches_onnx_runtime(axis: int, shape: tuple[int, ...]) -> None:
    """Indices of every rank on every axis, some of them negative."""
    x = values((5, 7, 3))
    indices = positions(shape, x.shape[axis])
    (y,) = check(Gather(axis), x, indices)
    np.testing.assert_array_equal(y, ort("Gather", x, indices, axis=axis)[0])


@pytest.mark.parametrize("dtype", [np.int8, np.bool_, np.float16, ml_dtypes.bfloat16, np.int64])
def test_gather_of_every_width(dtype: Any) -> None:
    """Elements pass through unchanged whatever their type, and i32 indices work."""
    x = values((5, 3), dtype)
    indices = positions((4,), 5, np.int32)
    np.testing.assert_array_equal(check(Gather(), x, indices)[0], x[indices])


@pytest.mark.parametrize(
    "shape, indices_shape, batch",
    [
        ((5, 7, 3), (4, 1), 0),
        ((5, 7, 3), (4, 2), 0),
        ((5, 7, 3), (3,), 0),
        ((2, 5, 3), (2, 4, 1), 1),
        ((2, 5, 3), (2, 2), 1),
        ((2, 3, 5, 4), (2, 3, 6, 2), 2),
        ((2, 3, 5), (2, 3, 1), 2),
        ((5, 3), (0, 2), 0),
    ],
)
def test_gather_nd_matches_onnx_runtime(shape: tuple[int, ...], indices_shape: tuple[int, ...], batch: int) -> None:
    """Tuples of one index up to the full rank, with batch axes in common."""
    x = values(shape)
    depth = indices_shape[-1]
    columns = [positions(indices_shape[:-1], n) for n in shape[batch : batch + depth]]
    indices = np.stack(columns, axis=-1)
    (y,) = check(GatherND(batch), x, indices, static=(1,))
    np.testing.assert_array_equal(y, ort("GatherND", x, indices, batch_dims=batch)[0])


@pytest.mark.parametrize("axis, shape", [(0, (4, 3)), (1, (5, 6)), (-1, (2, 1)), (0, (0, 3)), (1, (3, 2))])
def test_gather_elements_matches_onnx_runtime(axis: int, shape: tuple[int, ...]) -> None:
    """One position for each element; away from the axis the indices may cover a part."""
    x = values((5, 3))
    indices = positions(shape, x.shape[axis])
    (y,) = check(GatherElements(axis), x, indices)
    np.testing.assert_array_equal(y, ort("GatherElements", x, indices, axis=axis)[0])


@pytest.mark.parametrize("bad", [5, -6])
@pytest.mark.parametrize("op", [Gather(), GatherND(), GatherElements()], ids=lambda op: op.op_name)
def test_positions_outside_stop_the_run(op: Op, bad: int) -> None:
    """The first position beyond either end raises in the reference and in the lowered form."""
    x, indices = values((5, 1)), np.array([[2], [bad]])
    with pytest.raises(ExecutionError, match=str(bad)):
        op.reference(x, indices)
    node = make_node(op, (x.shape, x.dtype), (indices.shape, indices.dtype))
    with pytest.raises(ExecutionError, match=str(bad)):
        interpret(node, [x, indices])


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("factor", [1, 0])
@pytest.mark.parametrize("op", [Gather(), GatherND(), GatherElements()], ids=lambda op: op.op_name)
def test_a_known_element_does_not_hide_a_position_outside(op: Op, factor: int, device: str) -> None:
    """The only element of a constant, or a product with 0, is known without the position; the run still stops."""
    g = rlx.Graph("g")
    indices = g.input("i", (1, 1), "i64")
    g.output(g.add(op, g.constant(np.array([[7]])), indices)[0] * factor, name="y")
    model = rlx.compile(g, device=device)
    assert model.run({"i": np.array([[-1]])})[0].ravel() == [7 * factor]
    for bad in (1, -2, 1 << 40):
        with pytest.raises(ExecutionError, match=str(bad)):
            model.run({"i": np.array([[bad]])})


def test_type_and_shape_errors() -> None:
    """Wrong index types, ranks, batch axes, and gathering from an axis without elements."""
    x, i = TensorType((5, 3), DTYPES["f32"]), TensorType((2, 3), DTYPES["i64"])
    for op in (Gather(), GatherND(), GatherElements()):
        with pytest.raises(DTypeError, match=op.op_name):
            op.infer(x, TensorType((2, 3), DTYPES["f32"]))
    with pytest.raises(ShapeError, match="outside"):
        Gather(2).infer(x, i)
    with pytest.raises(ShapeError, match="no elements"):
        Gather().infer(TensorType((0, 3), DTYPES["f32"]), i)
    assert Gather().infer(TensorType((0, 3), DTYPES["f32"]), TensorType((0,), DTYPES["i64"])).shape == (0, 3)
    with pytest.raises(ShapeError, match="from 1 to 2"):
        GatherND().infer(x, i)
    with pytest.raises(ShapeError, match="known size"):
        GatherND().infer(x, TensorType((2, Dim("q")), DTYPES["i64"]))
    with pytest.raises(ShapeError, match="batch_dims"):
        GatherND(2).infer(x, i)
    with pytest.raises(ShapeError, match="ranks"):
        GatherElements().infer(x, TensorType((2,), DTYPES["i64"]))
    with pytest.raises(ShapeError, match="exceeds"):
        GatherElements().infer(x, TensorType((2, 4), DTYPES["i64"]))


def test_a_possibly_empty_axis_is_guarded() -> None:
    """An axis that may have no elements asks for a check at the start of the run, others do not."""
    for low, guards in ((0, 1), (1, 0)):
        node = make_node(Gather(), ((Dim("n", low), 3), "f32"), ((2,), "i64"))
        assert len(node.outputs[0].graph.guards) == guards
