"""Arrays at the boundary: whatever carries the declared elements is taken as it is; nothing is converted silently."""

from __future__ import annotations

import array
import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx
from rlx.errors import DTypeError, NameNotFound, OptionError, RlxError, ShapeError

DEVICES = ["cpu", "reference"]


def doubled(dtype: str, shape: tuple[Any, ...] = (2, 3), device: str = "cpu") -> rlx.CompiledGraph:
    """x + x, or for bool: not x."""
    g = rlx.Graph("doubled")
    x = g.input("x", shape, dtype)
    g.output(rlx.not_(x) if dtype == "bool" else x + x, name="y")
    return rlx.compile(g, device=device)


class Dlpack:
    """Carries an array by DLPack only."""

    def __init__(self, inner: np.ndarray[Any, Any]) -> None:
        self.inner = inner

    def __dlpack__(self, **options: Any) -> Any:
        return self.inner.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.inner.__dlpack_device__()


class ByArray:
    """Carries an array by __array__, and refuses DLPack as arrays on other devices do."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("not on this device")

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return np.float32([[1, 2, 3], [4, 5, 6]])


class Elsewhere:
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("not on this device")

    def __dlpack_device__(self) -> Any:
        return (2, 0)


X = np.arange(1, 7, dtype=np.float32).reshape(2, 3)


def read_only() -> np.ndarray[Any, Any]:
    x = X.copy()
    x.flags.writeable = False
    return x


LAYOUTS: dict[str, Any] = {
    "plain": X.copy,
    "fortran": lambda: np.asfortranarray(X),
    "transposed": lambda: np.ascontiguousarray(X.T).T,
    "strided": lambda: np.repeat(np.repeat(X, 2, 0), 2, 1)[::2, ::2],
    "backwards": lambda: X[::-1, ::-1].copy()[::-1, ::-1],
    "misaligned": lambda: np.frombuffer(b"." + X.tobytes(), np.uint8)[1:].view(np.float32).reshape(2, 3),
    "read-only": read_only,
    "broadcast": lambda: np.broadcast_to(X[:1], (2, 3)),
    "subclass": lambda: X.view(type("Sub", (np.ndarray,), {})),
    "dlpack": lambda: Dlpack(X.copy()),
    "__array__": ByArray,
    "memoryview": lambda: memoryview(X.copy()),
    "strided memoryview": lambda: memoryview(np.repeat(X, 2, 0))[::2],
    "ctypes": lambda: (ctypes.c_float * 3 * 2)((1, 2, 3), (4, 5, 6)),
    "list": X.tolist,
    "tuples": lambda: ((1.0, 2.0, 3.0), [4.0, 5.0, 6.0]),
    "list of arrays": lambda: [X[0], X[1]],
    "ints for floats": lambda: [[1, 2, 3], [4, 5, 6]],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_same_and_is_only_read(layout: str, device: str) -> None:
    model = doubled("f32", device=device)
    x = LAYOUTS[layout]()
    before = np.broadcast_to(X[:1], (2, 3)) if layout == "broadcast" else X
    for _ in range(2):
        np.testing.assert_array_equal(model.run([x])[0], 2 * before)
        np.testing.assert_array_equal(model.run_slots(x)[0], 2 * before)
    held = np.array(x.inner if isinstance(x, Dlpack) else x)
    np.testing.assert_array_equal(held, before)


def test_inputs_are_read_during_the_call_only() -> None:
    """After a call nothing refers to the caller's memory: it can be freed, and what it then holds does not matter."""
    model = doubled("f32")
    for layout in ("plain", "fortran", "misaligned"):
        x = np.array(LAYOUTS[layout]())
        view = model.run_slots(x)[0]
        x[...] = 100
        np.testing.assert_array_equal(view, 2 * np.array(LAYOUTS[layout]()))
        memory = bytearray(X.tobytes())
        model.run_slots(memoryview(memory).cast("f", (2, 3)))
        memory.extend(b"more")  # BufferError if a view of it were still held


DTYPES = ["f64", "f32", "f16", "bf16", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "bool"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_type_comes_out_as_declared(dtype: str, device: str) -> None:
    model = doubled(dtype, device=device)
    numpy = model.inputs[0].dtype.numpy
    x = np.array([[1, 0, 1], [0, 1, 1]]).astype(numpy)
    want = ~x if dtype == "bool" else x + x
    for value in (x, x[:, ::-1].copy()[:, ::-1], x.tolist() if dtype != "bf16" else x):
        got = model.run([value])[0]
        assert got.dtype == numpy
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(model.run_slots(value)[0], want)


def test_bytes_and_typed_arrays() -> None:
    model = doubled("u8", (4,))
    for x in (b"\x01\x02\x03\x04", bytearray(b"\x01\x02\x03\x04"), memoryview(b"\x01\x02\x03\x04"), [1, 2, 3, 4]):
        np.testing.assert_array_equal(model.run([x])[0], [2, 4, 6, 8])
        np.testing.assert_array_equal(model.run_slots(x)[0], [2, 4, 6, 8])
    np.testing.assert_array_equal(doubled("f64", (2,)).run([array.array("d", [1, 2])])[0], [2, 4])
    np.testing.assert_array_equal(doubled("i64", ()).run([7])[0], 14)
    np.testing.assert_array_equal(doubled("f32", ()).run([np.float32(7)])[0], 14)
    np.testing.assert_array_equal(doubled("bf16", ()).run([ml_dtypes.bfloat16(7)])[0], ml_dtypes.bfloat16(14))
    np.testing.assert_array_equal(doubled("u64", ()).run([2**63 - 1])[0], np.uint64(2**64 - 2))


REFUSED: dict[str, tuple[str, Any, type[Exception], str]] = {
    "other width": ("f32", X.astype(np.float64), DTypeError, "expected elements of type f32, got float64"),
    "other kind, same width": ("f32", X.astype(np.int32), DTypeError, "got int32"),
    "signedness": ("i32", X.astype(np.uint32), DTypeError, "got uint32"),
    "byte order": ("f32", X.astype(">f4"), DTypeError, "got >f4"),
    "bits of a bf16": ("bf16", X.astype(np.uint16), DTypeError, "got uint16"),
    "f16 for bf16": ("bf16", X.astype(np.float16), DTypeError, "got float16"),
    "bytes for bool": ("bool", np.ones((2, 3), np.uint8), DTypeError, "got uint8"),
    "a fraction": ("i32", [[1, 2, 3], [4, 5, 6.5]], DTypeError, "don't fit elements of type i32"),
    "floats for ints": ("i32", X.tolist(), DTypeError, "don't fit"),
    "too large for i8": ("i8", [[1, 2, 3], [4, 5, 128]], DTypeError, "don't fit"),
    "too large for i32": ("i32", [[1, 2, 3], [4, 5, 2**31]], DTypeError, "don't fit"),
    "too large for any": ("i64", [[1, 2, 3], [4, 5, 2**100]], DTypeError, "x"),
    "too large for f32": ("f32", [[1, 2, 3], [4, 5, 1e300]], DTypeError, "don't fit"),
    "huge int for f32": ("f32", [[1, 2, 3], [4, 5, 2**100]], DTypeError, "don't fit"),
    "negative for u8": ("u8", [[1, 2, 3], [4, 5, -1]], DTypeError, "don't fit"),
    "2 for bool": ("bool", [[1, 0, 1], [0, 1, 2]], DTypeError, "don't fit"),
    "complex": ("f32", [[1, 2, 3], [4, 5, 1j]], DTypeError, "don't fit"),
    "ragged": ("f32", [[1, 2, 3], [4, 5]], DTypeError, "can't make f32 elements"),
    "text": ("f32", "hello", DTypeError, "expected elements of type f32"),
    "a list of text": ("f32", [["a", "b", "c"]], DTypeError, "don't fit elements of type f32"),
    "nothing": ("f32", None, DTypeError, "expected elements of type f32"),
    "an object": ("f32", object(), DTypeError, "expected elements of type f32"),
    "a dict": ("f32", {}, DTypeError, "expected elements of type f32"),
    "on another device": ("f32", Elsewhere(), DTypeError, "can't be read through DLPack"),
    "rank": ("f32", X.reshape(-1), ShapeError, r"expected shape \(2, 3\), got \(6,\)"),
    "shape": ("f32", X.T, ShapeError, r"expected shape \(2, 3\), got \(3, 2\)"),
    "a scalar": ("f32", 1.0, ShapeError, r"got \(\)"),
    "empty": ("f32", [], ShapeError, r"got \(0,\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case: str) -> None:
    dtype, value, error, text = REFUSED[case]
    model = doubled(dtype)
    good = np.zeros((2, 3), model.inputs[0].dtype.numpy)
    want = model.run([good])[0]
    for call in (lambda: model.run({"x": value}), lambda: model.run_slots(value), lambda: model.run_views([value])):
        with pytest.raises(error, match=f"input 'x'.*{text}" if text != "x" else "input 'x'") as caught:
            call()
        assert isinstance(caught.value, RlxError)
        np.testing.assert_array_equal(model.run([good])[0], want)


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda m: m.run({"z": X}), NameNotFound, "no input 'z'; there are 'x'"),
        (lambda m: m.run({"x": X, "z": X}), NameNotFound, "no input 'z'"),
        (lambda m: m.run({}), NameNotFound, "'x' is missing"),
        (lambda m: m.run([]), ShapeError, "expected 1 inputs"),
        (lambda m: m.run([X, X]), ShapeError, "expected 1 inputs"),
        (lambda m: m.run(X), ShapeError, "by name in a mapping, or by position in a list; got ndarray"),
        (lambda m: m.run_slots(), ShapeError, "expected 1 inputs"),
        (lambda m: m.run_slots(X, X), ShapeError, "expected 1 inputs"),
        (lambda m: m(X, X), ShapeError, "expected at most 1 inputs"),
        (lambda m: m(X, x=X), OptionError, "'x' is given by position and by name"),
        (lambda m: m(z=X), NameNotFound, "no input 'z'"),
        (lambda m: m(X)["z"], NameNotFound, "no output 'z'; there are 'y'"),
        (lambda m: m.run([X], outputs=["z"]), NameNotFound, "no output 'z'"),
    ],
)
def test_bad_calls(call: Any, error: type[Exception], text: str) -> None:
    model = doubled("f32")
    with pytest.raises(error, match=text):
        call(model)
    np.testing.assert_array_equal(model.run([X])[0], 2 * X)
