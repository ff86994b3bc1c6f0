"""Arrays at the boundary: what users hand in becomes NumPy arrays of the declared type, not copied where possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.arithmetic import usual_arithmetic
from rlx.backends import backend_named
from rlx.backends.base import TensorSpec
from rlx.boundary import bounded
from rlx.errors import DTypeError, OptionError, ShapeError, StaleView, no_such
from rlx.ir.dtype import dtype_of
from rlx.ir.graph import Array, refuse_masked
from rlx.ir.shape import Dim, Size
from rlx.ir.strings import as_strings

__all__ = [
    "Views",
    "on_device",
    "padded",
    "read_array",
    "row_of",
    "share_memory",
    "snapshot",
    "to_array",
    "to_device",
    "to_target",
    "with_kept",
]

Adopt = Callable[[Any], Any]  # `Executable.adopt`


def to_array(spec: TensorSpec, value: Any, what: str, adopt: Adopt | None = None) -> Any:
    """The value as an array of the spec's element type and rank; contiguity is the device's business.

    Takes NumPy arrays, DLPack, the buffer protocol, and Python numbers and lists that fit. Element types are never
    converted silently, except those of Python numbers. What `adopt`, that of an executable, knows as an array of its
    device stays there; all else is a NumPy array. Raises `DTypeError` and `ShapeError`.
    """
    if spec.dtype.kind == "s":
        refuse_masked(what, value)
        array = as_strings(value, what)
    else:
        array = value if type(value) is np.ndarray else _as_array(spec, value, what, adopt)
    if array.dtype != spec.dtype.numpy:
        raise DTypeError(f"{what}: expected elements of type {spec.dtype}, got {array.dtype}; convert the array first")
    shape = array.shape
    if shape != spec.shape:
        fits = len(shape) == len(spec.shape) and all(map(_fits, spec.shape, shape))
        if not fits:
            raise ShapeError(f"{what}: expected shape ({', '.join(map(str, spec.shape))}), got {shape}")
    return array


def _fits(size: Size, extent: int) -> bool:
    return size == extent or isinstance(size, Dim)  # the extents of dims are checked when they are bound


def _as_array(spec: TensorSpec, value: Any, what: str, adopt: Adopt | None) -> Any:
    refuse_masked(what, value)
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    own = None if adopt is None else adopt(value)
    if own is not None:
        return own
    if isinstance(value, bool | int | float | complex | list | tuple):
        return _from_python(spec, value, what)
    array = read_array(value, what)
    if array.dtype == object and array.ndim == 0:
        raise DTypeError(f"{what}: expected elements of type {spec.dtype}, got {type(value).__name__}, no array")
    return array


def read_array(value: Any, what: str) -> Array:
    """What DLPack, the buffer protocol or `__array__` shows."""
    if hasattr(value, "__dlpack__"):
        from rlx.backends.dlpack import read_dlpack

        try:
            return read_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            if not hasattr(value, "__array__"):  # which also carries what DLPack or NumPy's reader can't
                raise DTypeError(f"{what}: the array can't be read through DLPack: {error}") from None
    try:
        return np.asarray(memoryview(value))
    except (BufferError, TypeError):
        pass  # no buffer, or none of its memory
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DTypeError(f"{what}: {type(value).__name__} can't be read as an array: {error}") from None
    return array


@bounded("to_device", DTypeError)
def to_device(array: Any, device: str) -> Any:
    """An array in the memory of a device, which runs there take as it is: an `rlx.Array`, or on the CPU NumPy's.

    Takes NumPy arrays, anything with DLPack and buffers, of any element type of rlx; what lies there already isn't
    copied. Raises `OptionError` for an unknown device, `DeviceUnavailable`, and `DTypeError` for what is no array.
    """
    space = backend_named(device).space
    own = None if space is None else space.local(array)
    if own is not None:
        return own
    refuse_masked("to_device", array)
    if isinstance(array, bool | int | float | complex | list | tuple):
        raise DTypeError(f"to_device: expected an array, got {type(array).__name__}: np.asarray makes one of it")
    read = np.asarray(array) if isinstance(array, np.ndarray | np.generic) else read_array(array, "to_device")
    dtype = dtype_of(read.dtype)
    if read.dtype != dtype.numpy:
        raise DTypeError(f"to_device: expected elements of type {dtype}, got {read.dtype}; convert the array first")
    if space is None:
        return read
    with space.session():
        return space.array(space.put(read))


@usual_arithmetic()
def _from_python(spec: TensorSpec, value: Any, what: str) -> Array:
    from rlx.ir.casting import cast, rounds_twice

    kinds = {"f": "biuf", "c": "biufc"}.get(spec.dtype.kind, "biu")
    try:
        exact = np.asarray(value)
        if exact.size == 0 or exact.dtype.kind in kinds:
            with np.errstate(over="ignore", invalid="ignore"):
                array = cast(exact, spec.dtype) if rounds_twice(spec.dtype) else exact.astype(spec.dtype.numpy)
            exactly = spec.dtype.kind not in "iub" or np.array_equal(array, exact)
            if exactly and not _overflows(array, exact):
                return array
    except (ValueError, TypeError, OverflowError) as error:
        raise DTypeError(f"{what}: can't make {spec.dtype} elements of it: {error}") from None
    raise DTypeError(f"{what}: the numbers given don't fit elements of type {spec.dtype}")


def _overflows(array: Array, exact: Array) -> bool:
    return bool((np.isfinite(exact) & ~np.isfinite(array)).any())


def on_device(value: Any) -> bool:
    """Whether it is an `rlx.Array`."""
    from rlx.backends.array import Array as DeviceArray

    return isinstance(value, DeviceArray)


def padded(array: Any, shape: tuple[int, ...]) -> Any:
    """A copy where the array is, with zeros after the elements of each axis, up to a shape."""
    if on_device(array):
        with array.space.session():
            return array.space.array(array.space.padded(array.held, shape))
    wide = np.zeros(shape, array.dtype)
    wide[tuple(map(slice, array.shape))] = array
    return wide


def snapshot(array: Any) -> Any:
    """A copy where the array is: in the host's memory, or on its device."""
    return np.array(array, order="C") if isinstance(array, np.ndarray) else array.copy()


def share_memory(a: Array, b: Array) -> bool:
    """Whether two arrays have an element in common; True where that is too hard to tell."""
    try:
        return np.shares_memory(a, b, max_work=100_000)  # type: ignore[arg-type]  # the stub knows two values only
    except np.exceptions.TooHardError:
        return True


def to_target(spec: TensorSpec, value: Any, what: str) -> Array:
    """The caller's buffer for an output as an array over its memory. Raises `OptionError` unless it can be written."""
    array = value
    if not isinstance(value, np.ndarray):
        from rlx.backends.dlpack import read_dlpack

        try:
            array = read_dlpack(value) if hasattr(value, "__dlpack__") else np.asarray(memoryview(value))
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise OptionError(f"{what}: expected a writable array, {type(value).__name__} is none: {error}") from None
    if not array.flags.writeable:
        raise OptionError(f"{what}: expected a writable array, this {type(value).__name__} is read-only")
    if not array.flags.c_contiguous:
        from rlx.runtime.misuse import refuse_repeats

        refuse_repeats(array, what, type(value).__name__)
    made: Array = to_array(spec, array, what)
    return made


def with_kept(specs: Sequence[TensorSpec], given: Any, kept: Mapping[str, Any]) -> Any:
    """The inputs of a call with those that it leaves out because they are kept; by name, or by position."""
    if isinstance(given, Mapping):
        return {**kept, **given}
    if isinstance(given, list | tuple) and len(given) == len(specs) - len(kept):
        rest = iter(given)
        return [kept[spec.name] if spec.name in kept else next(rest) for spec in specs]
    return given


class Views(tuple[Array, ...]):
    """Read-only arrays in the arena, by position or name, valid until the next run of the graph."""

    names: tuple[str, ...]
    alive: Any

    def __new__(cls, arrays: Sequence[Array], names: Sequence[str], alive: Any = None) -> Views:
        made = super().__new__(cls, arrays)
        made.names = tuple(names)
        made.alive = alive  # None, or a callable that says whether no later run has overwritten them (debug)
        return made

    def _check(self) -> None:
        if self.alive is not None and not self.alive():
            raise StaleView("these views are of an earlier run: its outputs have been overwritten; copy what you keep")

    def __getitem__(self, key: Any) -> Any:
        self._check()
        if isinstance(key, str):
            if key not in self.names:
                raise no_such("output", key, self.names)
            key = self.names.index(key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Array]:
        self._check()
        return super().__iter__()


def row_of(array: Any, row: int | tuple[int, ...], name: str) -> Any:
    """A copy of a row of an output: a number along all axes but the last, or a tuple of indices of the first axes."""
    indices = row if isinstance(row, tuple) else (row,)
    if not all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in indices):
        raise OptionError(f"read_output_row: a row is an int or a tuple of ints, got {row!r}")
    leading = array.shape[:-1]
    count = math.prod(leading)
    if isinstance(row, tuple):
        fits = len(row) <= len(array.shape) and all(-n <= i < n for i, n in zip(row, array.shape, strict=False))
    else:
        fits = bool(array.shape) and -count <= row < count
    if not fits:
        raise ShapeError(f"output {name!r} has shape {array.shape}: there is no row {row}")
    part = array[row if isinstance(row, tuple) else tuple(map(int, np.unravel_index(row % count, leading)))]
    return np.array(part) if isinstance(part, np.ndarray | np.generic) else part
