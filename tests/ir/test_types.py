"""Element types and encodings."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES, dtype_of
from rlx.ir.encoding import encoding_named
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim
from rlx.ir.value import TensorType


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_types_are_found_by_every_spelling(name: str) -> None:
    """Name, NumPy dtype, scalar type and pickling all lead to the one object."""
    dtype = DTYPES[name]
    assert dtype_of(name) is dtype_of(dtype) is dtype_of(dtype.numpy) is dtype
    if name != "string":  # whose scalars are str
        assert dtype_of(dtype.numpy.type) is dtype
    assert pickle.loads(pickle.dumps(dtype)) is dtype
    assert dtype.nbytes(3) == (3 * dtype.bits + 7) // 8
    if dtype.bits >= 8 and name != "string":  # which is stored as a number
        assert dtype.itemsize == dtype.numpy.itemsize


@pytest.mark.parametrize("spec", ["f7", None, object, "O", "U3", np.datetime64])
def test_unknown_types_are_refused(spec: object) -> None:
    """What is no element type is a DTypeError that lists them; None is not f64."""
    with pytest.raises(DTypeError, match="unknown element type"):
        dtype_of(spec)


def test_packed_types_have_no_itemsize() -> None:
    """4-bit elements are counted with nbytes."""
    with pytest.raises(DTypeError, match="packed"):
        _ = DTYPES["i4"].itemsize


def test_encoding_errors() -> None:
    """Sizes that don't fit, and unknown names."""
    q8 = encoding_named("q8_0")
    with pytest.raises(ShapeError, match="multiple of the block of 32"):
        q8.nbytes((2, 33))
    with pytest.raises(ShapeError, match="needs 34 bytes, 35 given"):
        q8.decode(np.zeros(35, np.uint8), (32,))
    with pytest.raises(OptionError, match="known are"):
        encoding_named("q9")


def test_tensor_types_are_checked() -> None:
    """Names, lists and NumPy's ints are taken for what they mean; what is no type is refused when it is made."""
    made = TensorType([np.int64(2), Dim("n", 0, 4), 32], "f16", "q8_0")  # type: ignore[list-item]
    assert made == TensorType((2, Dim("n", 0, 4), 32), DTYPES["f16"], encoding_named("q8_0"))
    assert all(type(size) in (int, Dim) for size in made.shape)
    for shape in ((2, -1), (2.0,), (True,), ("n",), 3, None, "23"):
        with pytest.raises(ShapeError, match=r"a shape is|a size is|can't be negative"):
            TensorType(shape, DTYPES["f32"])  # type: ignore[arg-type]
    for dtype in (None, "f7", 32):
        with pytest.raises(DTypeError, match="unknown element type"):
            TensorType((2,), dtype)
    with pytest.raises(OptionError, match="unknown encoding"):
        TensorType((32,), DTYPES["f32"], "q9")


def test_leaves_say_which_of_them_is_wrong() -> None:
    """The message of a bad shape or element type names the leaf."""
    g = Graph()
    for declare in (g.input, g.param, g.state):
        with pytest.raises(ShapeError, match=rf"{declare.__name__} 'x': a size can't be negative"):
            declare("x", (2, -1))
        with pytest.raises(DTypeError, match=rf"{declare.__name__} 'x': unknown element type"):
            declare("x", (2,), "f7")


@pytest.mark.parametrize("dtype", ["bf16", "f32", "f64"])
def test_integers_beyond_64_bits_are_constants_of_floats(dtype: str) -> None:
    g = Graph("g")
    assert g.constant([2**70], dtype).data == [2.0**70]
    with pytest.raises(DTypeError, match="does not fit"):
        g.constant([2**2000], dtype)


@pytest.mark.parametrize(
    "value, dtype", [([1.5], "i8"), (np.array([300]), "i8"), ([9], "i4"), (float("nan"), "i32"), (np.array([-1]), "u8")]
)
def test_constants_of_integers_are_exact(value: object, dtype: str) -> None:
    g = Graph("g")
    with pytest.raises(DTypeError, match=r"does not fit|NaN"):
        g.constant(value, dtype)
    assert g.constant(np.array([-3.0, 7.0]), "i4").data.tolist() == [-3, 7]
