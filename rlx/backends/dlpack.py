"""DLPack with the element types that NumPy's reader and writer lack: bf16 and 8-bit floats.

NumPy exchanges everything else without a copy, and keeps the owner of the memory alive. For these types the tensor in
the capsule is passed as one of unsigned integers, and its type is put right in its header: `DLDataType` of dlpack.h,
which lies 20 bytes behind the start of the `DLTensor`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from rlx.boundary import bounded
from rlx.errors import DTypeError
from rlx.ir.dtype import DTYPES, dtype_of
from rlx.ir.graph import Array, refuse_masked

__all__ = ["DLPackArray", "read_dlpack", "to_dlpack"]

UNSIGNED = 1  # kDLUInt
CODES = {"bf16": 4, "f8e4m3": 10, "f8e4m3fnuz": 11, "f8e5m2": 12, "f8e5m2fnuz": 13, "f8e8m0": 14}  # DLDataTypeCode
DEVICES = {2: "cuda", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm", 14: "oneapi", 15: "webgpu", 16: "hexagon"}
HOST = (1, 3, 11, 13)  # kDLCPU, and memory of devices that the CPU can read
NAMES = {b"dltensor": 0, b"dltensor_versioned": 32}  # of a capsule -> where its DLTensor starts
TYPE_AT = 20

_name = ctypes.pythonapi.PyCapsule_GetName
_name.restype, _name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _type_of(capsule: Any) -> Any:
    """The bytes of the capsule's element type: code, bits, lanes (two bytes)."""
    name = _name(capsule)
    if name not in NAMES:
        raise BufferError(f"a DLPack capsule is named dltensor or dltensor_versioned, this one {name!r}")
    return (ctypes.c_uint8 * 4).from_address(_pointer(capsule, name) + NAMES[name] + TYPE_AT)


class DLPackArray:
    """What `to_dlpack` gives: the array as any consumer of DLPack takes it. Memory lives as long as they need it."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        code = CODES.get(dtype_of(self.array.dtype).name)
        if code is None:
            return self.array.__dlpack__(**options)
        bits = self.array.view(f"u{self.array.itemsize}")
        capsule = bits.__dlpack__(**options)
        _type_of(capsule)[0] = code
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


@bounded("to_dlpack", DTypeError)
def to_dlpack(array: Any) -> DLPackArray:
    """A NumPy array of any element type of rlx for `torch.from_dlpack` and others; nothing is copied.

    NumPy arrays can be given to them as they are, unless their type is bf16 or a float of 8 bits. Views in the arena
    are read-only: a consumer that does not know of that (before DLPack 1.0) gets a `BufferError`. Raises `DTypeError`
    for types of 2 and 4 bits, which NumPy keeps in a byte each.
    """
    refuse_masked("to_dlpack", array)
    try:
        made = np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DTypeError(f"to_dlpack: {type(array).__name__} can't be read as an array: {error}") from None
    dtype = dtype_of(made.dtype)
    if dtype.bits < 8:
        raise DTypeError(f"to_dlpack: elements of type {dtype} can't be shared: cast them to 8 bits")
    return DLPackArray(made)


class _Unsigned:
    """A producer whose elements are declared as unsigned integers of the same width."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self.capsule, self.device = capsule, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def read_dlpack(value: Any) -> Array:
    """The memory of a producer of DLPack as an array, not copied; it can be written if the producer says so.

    Raises `BufferError` for memory that is not the host's, and what the producer raises.
    """
    device, number = (int(n) for n in value.__dlpack_device__()) if hasattr(value, "__dlpack_device__") else (1, 0)
    if device not in HOST:
        raise BufferError(f"it is on {DEVICES.get(device, f'device type {device}')}:{number}: copy it to the CPU first")
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError):  # an element type that NumPy does not read (RuntimeError before 2.5)
        capsule = _capsule(value)
        held = _type_of(capsule)
        known = {(code, DTYPES[name].bits): DTYPES[name] for name, code in CODES.items()}
        dtype = known.get((held[0], held[1]))
        if dtype is None or held[2] != 1:
            raise
        held[0] = UNSIGNED
        return np.from_dlpack(_Unsigned(capsule, (device, number))).view(dtype.numpy)


def _capsule(value: Any) -> Any:
    try:
        return value.__dlpack__(max_version=(1, 0))
    except TypeError:  # from before versions
        return value.__dlpack__()
