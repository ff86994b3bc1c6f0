"""Values in the memory of a device: what its runs take and give where that memory is not the host's."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Protocol

import numpy as np

from rlx.boundary import bounded_class
from rlx.errors import ExecutionError
from rlx.ir.dtype import dtype_of
from rlx.ir.graph import Array as HostArray

__all__ = ["Array", "MemorySpace", "Tensor"]


class Tensor(Protocol):
    """Elements of one type in the memory of some device: NumPy's arrays on the host, `Array` elsewhere.

    This is all that the runtime asks of what it hands to an executable and gets back. `np.asarray` reads both.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    @property
    def nbytes(self) -> int: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class MemorySpace(ABC):
    """The memory of a device: how what lies there is made, read, copied and shared.

    `device` is the device's name. `held` stands for whatever such memory is held by: an array of a library, an address.
    """

    device: str

    def session(self) -> AbstractContextManager[object]:
        """What all calls are made in."""
        return nullcontext()

    @abstractmethod
    def put(self, array: HostArray) -> Any:
        """The elements of a NumPy array, which may change afterwards."""

    @abstractmethod
    def fetch(self, held: Any) -> HostArray:
        """The elements as a fresh, writable NumPy array."""

    def adopt(self, value: Any) -> Any | None:
        """What another producer made, if it lies in this memory already and not in the host's; else None."""
        return None

    @abstractmethod
    def type_of(self, held: Any) -> np.dtype[Any]:
        """The element type as NumPy or `ml_dtypes` names it."""

    @abstractmethod
    def copy(self, held: Any) -> Any:
        """The same elements in memory of their own."""

    @abstractmethod
    def part(self, held: Any, index: tuple[int | slice, ...]) -> Any:
        """A copy of a part, by an index within each axis; slices have steps of 1 and more."""

    @abstractmethod
    def padded(self, held: Any, shape: tuple[int, ...]) -> Any:
        """A copy with zeros after the elements of each axis, up to a shape."""

    @abstractmethod
    def export(self, held: Any, options: Mapping[str, Any]) -> Any:
        """A DLPack capsule over the memory, by the keywords of `__dlpack__`. Raises `BufferError`."""

    @abstractmethod
    def place(self, held: Any) -> tuple[int, int]:
        """The type and the number of the device, as DLPack counts them."""

    def array(self, held: Any) -> Array:
        """What is held, as users get it; it has a `shape`."""
        return Array(self, held, tuple(held.shape), self.type_of(held))

    def local(self, value: Any) -> Array | None:
        """A value that lies in this memory already, not copied; None for all others."""
        if isinstance(value, Array) and value.space is self:
            return value
        with self.session():
            held = self.adopt(value)
            return None if held is None else self.array(held)


@bounded_class(ExecutionError, but=("__getitem__", "__len__"))  # Python's loops go by their IndexError
class Array:
    """A value in the memory of a device: what runs on it give, and take back without a way through the host.

    `dtype` is NumPy's, or that of `ml_dtypes` for bf16, 8-bit floats and types of fewer bits, as of the arrays
    that the CPU gives. What a run gives has memory of its own: who writes there by way of DLPack changes no weight,
    state or other result. `held` is what the `space` knows it by: an array of the library.
    """

    __slots__ = ("__weakref__", "dtype", "held", "shape", "space")

    def __init__(self, space: MemorySpace, held: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.space = space
        self.held = held
        self.shape = shape
        self.dtype = dtype

    @property
    def device(self) -> str:
        """The name of the device, as `rlx devices` lists it."""
        return self.space.device

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the elements as a NumPy array; one of fewer than 8 bits has a byte there."""
        return self.size * self.dtype.itemsize

    def numpy(self) -> HostArray:
        """The elements as a fresh NumPy array."""
        with self.space.session():
            return self.space.fetch(self.held)

    def copy(self) -> Array:
        """The same elements in memory of their own, on the device."""
        with self.space.session():
            return Array(self.space, self.space.copy(self.held), self.shape, self.dtype)

    def __getitem__(self, index: Any) -> Array:
        """A copy of a part, on the device: by ints, slices with steps of 1 and more, and `...`.

        Raises `IndexError` for an int outside of its axis, `TypeError` for any other index.
        """
        where = _within(index, self.shape)
        shape = tuple(len(range(i.start, i.stop, i.step)) for i in where if isinstance(i, slice))
        with self.space.session():
            return Array(self.space, self.space.part(self.held, where), shape, self.dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without axes has no length")
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> HostArray:
        """For `np.asarray` and NumPy's functions. Raises `ValueError` for `copy=False`: the host has no view of it."""
        if copy is False:
            raise ValueError(f"an array on {self.device!r} is copied to the host: copy=False can't be had")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """The memory for `from_dlpack` of another library, not copied unless that asks for it.

        Raises `BufferError` for types of fewer than 8 bits, which libraries lay out in different ways.
        """
        kind = dtype_of(self.dtype)
        if kind.bits < 8:
            raise BufferError(f"elements of type {kind} can't be shared: cast them to 8 bits, or take .numpy()")
        with self.space.session():
            return self.space.export(self.held, options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.space.place(self.held)

    def __repr__(self) -> str:
        return f"<rlx.Array {dtype_of(self.dtype)}{list(self.shape)} on {self.device!r}>"

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError("arrays on a device are not compared by ==: compare what .numpy() gives, or in a graph")

    __hash__ = object.__hash__

    def __bool__(self) -> NoReturn:
        raise TypeError("an array on a device is neither true nor false: take .numpy() first")

    def __copy__(self) -> Array:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Array:
        return self.copy()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"an rlx.Array has no {name!r}: .numpy() gives a NumPy array, which may")

    def __reduce__(self) -> NoReturn:
        raise TypeError("an array on a device can't be pickled: pickle what .numpy() gives")


def _within(index: Any, shape: tuple[int, ...]) -> tuple[int | slice, ...]:
    """The index with ints from 0 on and slices of known ends, for every axis."""
    given = index if isinstance(index, tuple) else (index,)
    dots = [at for at, item in enumerate(given) if item is Ellipsis]
    if len(dots) > 1 or len(given) - len(dots) > len(shape):
        raise IndexError(f"an array of shape {shape} has no part [{index!r}]")
    at = dots[0] if dots else len(given)
    rest = [slice(None)] * (len(shape) - len(given) + len(dots))
    made: list[int | slice] = []
    for item, size in zip((*given[:at], *rest, *given[at + 1 :]), shape, strict=True):
        if isinstance(item, slice) and (item.step is None or item.step > 0):
            made.append(slice(*item.indices(size)))
        elif isinstance(item, int | np.integer) and not isinstance(item, bool | np.bool):
            if not -size <= item < size:
                raise IndexError(f"index {item} is outside of an axis of {size}")
            made.append(int(item) % size)
        else:
            raise TypeError(f"a part is chosen by ints, slices and ..., got {item!r}: .numpy() takes any index")
    return tuple(made)
