"""Ops that choose by position against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops_oracle import check, ort, sym, values

from rlx.errors import DTypeError, ExecutionError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import TensorType
from rlx.ops.mask import EyeLike, Hardmax, OneHot, ReverseSequence, Shrink, Trilu
from rlx.testing.interpret import interpret, make_node


@pytest.mark.parametrize("upper", [True, False])
@pytest.mark.parametrize("k", [None, 2, -2, 9, -9])
def test_trilu(upper: bool, k: int | None) -> None:
    """Both triangles of batches of matrices, from any diagonal."""
    x = values((2, 4, 5))
    given = [] if k is None else [np.array(k)]
    np.testing.assert_array_equal(check(Trilu(upper), x, *given)[0], ort("Trilu", x, *given, upper=int(upper))[0])


@pytest.mark.parametrize("k", [-2, 0, 1, 7])
def test_eye_like(k: int) -> None:
    """Any diagonal, also outside; the type of x or another."""
    x = values((4, 6))
    np.testing.assert_array_equal(check(EyeLike(k), x)[0], ort("EyeLike", x, k=k)[0])
    assert check(EyeLike(k, DTYPES["i32"]), x)[0].dtype == np.int32


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.float32])
def test_one_hot(axis: int, dtype: Any) -> None:
    """Negative indices count from the end, those outside give no hot element; depth may be a symbol."""
    i, on_off = np.array([[0, -1, 3], [5, -4, 2]]).astype(dtype), np.array([2.0, 5.0], np.float32)
    (y,) = check(OneHot(4, axis), i, on_off, static=(1,), symbolic=OneHot(sym(3) + 1, axis))
    np.testing.assert_array_equal(y, ort("OneHot", i.astype(np.int64), np.array(4), on_off, axis=axis)[0])


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_hardmax(axis: int) -> None:
    """The first of equal elements is chosen."""
    x = values((3, 4, 5), np.int32).astype(np.float32)
    np.testing.assert_array_equal(check(Hardmax(axis), x)[0], ort("Hardmax", x, axis=axis)[0])


def test_shrink() -> None:
    """Floats and integers of either sign."""
    for x, lambd, bias in ((values((30,)), 0.4, 0.2), (values((30,), np.int32), 3.0, 1.0)):
        (y,) = check(Shrink(lambd, bias), x)
        np.testing.assert_allclose(y, ort("Shrink", x, lambd=lambd, bias=bias)[0], rtol=1e-6)
    np.testing.assert_array_equal(check(Shrink(3.0, 1.0), np.arange(6, dtype=np.uint8))[0], [0, 0, 0, 0, 3, 4])
    with pytest.raises(OptionError, match="whole"):
        Shrink(0.5).infer(TensorType((2,), DTYPES["i32"]))


@pytest.mark.parametrize("batch, time, lengths", [(1, 0, (3, 0, 1, 2)), (0, 1, (4, 1, 2))])
def test_reverse_sequence(batch: int, time: int, lengths: tuple[int, ...]) -> None:
    """Each sequence by its own length, none and the whole included."""
    x, n = values((3, 4, 5)), np.array(lengths)
    (y,) = check(ReverseSequence(batch, time), x, n, static=(0, 1))
    np.testing.assert_array_equal(y, ort("ReverseSequence", x, n, batch_axis=batch, time_axis=time)[0])


def test_a_length_beyond_the_axis_stops_the_run() -> None:
    """In the reference and in the lowered form."""
    op, x, n = ReverseSequence(0, 1), values((2, 3)), np.array([1, 4])
    with pytest.raises(ExecutionError, match="4"):
        op.reference(x, n)
    with pytest.raises(ExecutionError, match="index"):
        interpret(make_node(op, (x.shape, x.dtype), (n.shape, n.dtype)), [x, n])


def test_errors() -> None:
    """Ranks, types and axes that do not fit."""
    x = TensorType((3, 4), DTYPES["f32"])
    with pytest.raises(ShapeError, match="rank"):
        Trilu().infer(TensorType((3,), DTYPES["f32"]))
    with pytest.raises(DTypeError, match="i64"):
        Trilu().infer(x, TensorType((), DTYPES["i32"]))
    with pytest.raises(ShapeError, match="matrix"):
        EyeLike().infer(TensorType((3,), DTYPES["f32"]))
    with pytest.raises(ShapeError, match="off, on"):
        OneHot(3).infer(TensorType((2,), DTYPES["i64"]), TensorType((3,), DTYPES["f32"]))
    with pytest.raises(OptionError, match="both"):
        ReverseSequence(1, 1).infer(x, TensorType((4,), DTYPES["i64"]))
