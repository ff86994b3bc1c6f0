"""DLPack for memory of the device: capsules made and read by the layout of dlpack.h.

DLTensor                  data, device (type, number), ndim, dtype (code, bits, lanes), shape, strides, byte_offset
DLManagedTensor           DLTensor, context, deleter
DLManagedTensorVersioned  version (major, minor), context, deleter, flags, DLTensor
"""

from __future__ import annotations

import ctypes
import math
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

from rlx.backends.codegen.walked import Held
from rlx.backends.dlpack import CODES
from rlx.ir.dtype import DTYPES, DType

__all__ = ["DEVICE_TYPE", "capsule_over", "read_capsule"]

DEVICE_TYPE = 2  # kDLCUDA
KINDS = {"i": 0, "u": 1, "f": 2, "b": 6, "c": 5}  # DLDataTypeCode


class DLTensor(Structure):
    _fields_ = (
        ("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32), ("code", c_uint8),
        ("bits", c_uint8), ("lanes", c_uint16), ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )  # fmt: skip


DELETER = ctypes.CFUNCTYPE(None, c_void_p)


class Managed(Structure):
    _fields_ = (("tensor", DLTensor), ("context", c_void_p), ("deleter", DELETER))


class Versioned(Structure):
    _fields_ = (
        ("major", c_uint32), ("minor", c_uint32), ("context", c_void_p), ("deleter", DELETER), ("flags", c_uint64),
        ("tensor", DLTensor),
    )  # fmt: skip


_api = ctypes.pythonapi
_api.PyCapsule_New.restype, _api.PyCapsule_New.argtypes = ctypes.py_object, [c_void_p, c_char_p, c_void_p]
_api.PyCapsule_GetName.restype, _api.PyCapsule_GetName.argtypes = c_char_p, [ctypes.py_object]
_api.PyCapsule_GetPointer.restype = c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, c_char_p]
_api.PyCapsule_IsValid.argtypes = [c_void_p, c_char_p]
_destroyer = ctypes.CFUNCTYPE(None, c_void_p)
_pointer_in = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(("PyCapsule_GetPointer", _api))
_valid = ctypes.PYFUNCTYPE(ctypes.c_int, c_void_p, c_char_p)(("PyCapsule_IsValid", _api))

_kept: dict[int, Any] = {}  # by address: what a capsule's consumer has not let go of yet


def _let_go(address: int) -> None:
    _kept.pop(address, None)


_deleter = DELETER(_let_go)


def _unused(capsule: int) -> None:
    """A capsule that nobody has consumed is gone: a consumer would have renamed it."""
    for name in (b"dltensor", b"dltensor_versioned"):
        if _valid(capsule, name):
            _let_go(_pointer_in(capsule, name) or 0)


_destructor = _destroyer(_unused)


def capsule_over(held: Held, number: int, version: Any) -> Any:
    """A capsule over compact elements, which lives as long as its consumer needs it."""
    rank = len(held.shape)
    shape = (c_int64 * max(rank, 1))(*held.shape)
    strides = (c_int64 * max(rank, 1))(*(math.prod(held.shape[d + 1 :]) for d in range(rank)))
    code = CODES.get(held.dtype.name, KINDS[held.dtype.kind])
    empty = 0 in held.shape
    tensor = DLTensor(
        None if empty else held.address, DEVICE_TYPE, number, rank, code, held.dtype.numpy.itemsize * 8, 1, shape,
        strides, 0,
    )  # fmt: skip
    versioned = version is not None and version[0] >= 1
    made: Any = Versioned(1, 0, None, _deleter, 0, tensor) if versioned else Managed(tensor, None, _deleter)
    address = ctypes.addressof(made)
    _kept[address] = (made, held, shape, strides)
    name = b"dltensor_versioned" if versioned else b"dltensor"
    return _api.PyCapsule_New(address, name, ctypes.cast(_destructor, c_void_p))


def read_capsule(capsule: Any) -> tuple[int, DType | None, tuple[int, ...], bool]:
    """The address, the element type (None: rlx has no such), the shape, and whether the elements are compact."""
    name = _api.PyCapsule_GetName(capsule)
    if name not in (b"dltensor", b"dltensor_versioned"):
        raise BufferError(f"a DLPack capsule is named dltensor or dltensor_versioned, this one {name!r}")
    at = _api.PyCapsule_GetPointer(capsule, name)
    tensor = (Versioned if name == b"dltensor_versioned" else Managed).from_address(at).tensor
    shape = tuple(tensor.shape[d] for d in range(tensor.ndim))
    compact = True
    if tensor.strides:
        wanted = 1
        for d in range(tensor.ndim - 1, -1, -1):
            compact = compact and (shape[d] == 1 or tensor.strides[d] == wanted)
            wanted *= shape[d]
    return (tensor.data or 0) + tensor.byte_offset, _dtype(tensor), shape, compact or 0 in shape


def _dtype(tensor: Any) -> DType | None:
    if tensor.lanes != 1:
        return None
    for dtype in DTYPES.values():
        code = CODES.get(dtype.name, KINDS.get(dtype.kind))
        if dtype.bits >= 8 and (code, dtype.numpy.itemsize * 8) == (tensor.code, tensor.bits):
            return dtype
    return None
