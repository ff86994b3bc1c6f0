"""Element types: name, width in bits, kind, and the NumPy type that carries them; narrow elements as bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import DTypeError
from rlx.records import cached_property, dataclass

__all__ = ["DTYPES", "DType", "dtype_of", "pack", "unpack"]


@dataclass(frozen=True, eq=False)
class DType:
    """An element type.

    `bits` is the width of a stored element; `kind` is "f" (floating), "i" (signed), "u" (unsigned), "b" (bool), "c"
    (complex) or "s" (string); `numpy` is the array type that carries it in Python. Types of 2 and 4 bits are stored
    four and two to a byte, although the NumPy type spends a byte on each element. A string is stored as its number in
    the dictionary of a run (`rlx/ir/strings.py`).
    """

    name: str
    bits: int
    kind: str
    carrier: type[np.generic] | str | np.dtypes.StringDType  # NumPy's type, or the name of one in ml_dtypes

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return dtype_of, (self.name,)

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        """The array type that carries it; ml_dtypes, slow to import, is imported for its types only."""
        if not isinstance(self.carrier, str):
            return np.dtype(self.carrier)
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, self.carrier))
        return found

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def is_integer(self) -> bool:
        return self.kind in "iu"

    @property
    def itemsize(self) -> int:
        """Bytes of one element; raises `DTypeError` for types of less than a byte."""
        if self.bits % 8:
            raise DTypeError(f"{self.name} has {self.bits} bits: elements are packed, count bytes with nbytes()")
        return self.bits // 8

    def nbytes(self, elements: int) -> int:
        """Bytes that `elements` packed elements take."""
        return (elements * self.bits + 7) // 8

    @property
    def native(self) -> bool:
        """Whether the buffer protocol carries it (bf16, 8-bit floats and narrower types travel as bit views)."""
        return isinstance(self.carrier, type)


def _table() -> dict[str, DType]:
    rows: list[tuple[str, int, str, Any]] = [
        ("f64", 64, "f", np.float64),
        ("f32", 32, "f", np.float32),
        ("f16", 16, "f", np.float16),
        ("bf16", 16, "f", "bfloat16"),
        ("f8e4m3", 8, "f", "float8_e4m3fn"),
        ("f8e5m2", 8, "f", "float8_e5m2"),
        ("f8e4m3fnuz", 8, "f", "float8_e4m3fnuz"),
        ("f8e5m2fnuz", 8, "f", "float8_e5m2fnuz"),
        ("f8e8m0", 8, "f", "float8_e8m0fnu"),
        ("f4e2m1", 4, "f", "float4_e2m1fn"),
        ("i2", 2, "i", "int2"),
        ("u2", 2, "u", "uint2"),
        ("i4", 4, "i", "int4"),
        ("u4", 4, "u", "uint4"),
        ("i8", 8, "i", np.int8),
        ("u8", 8, "u", np.uint8),
        ("i16", 16, "i", np.int16),
        ("u16", 16, "u", np.uint16),
        ("i32", 32, "i", np.int32),
        ("u32", 32, "u", np.uint32),
        ("i64", 64, "i", np.int64),
        ("u64", 64, "u", np.uint64),
        ("bool", 8, "b", np.bool_),
        ("c64", 64, "c", np.complex64),
        ("c128", 128, "c", np.complex128),
        ("string", 32, "s", np.dtypes.StringDType()),
    ]
    return {name: DType(name, bits, kind, np_type) for name, bits, kind, np_type in rows}


DTYPES: dict[str, DType] = _table()
_BY_NUMPY: dict[np.dtype[Any], DType] = {dtype.numpy: dtype for dtype in DTYPES.values() if dtype.native}


def dtype_of(spec: object) -> DType:
    """The `DType` for a `DType`, its name ("f32"), or a NumPy dtype or scalar type; `DTypeError` if there is none."""
    if isinstance(spec, DType):
        return spec
    if isinstance(spec, str) and spec in DTYPES:
        return DTYPES[spec]
    try:
        found = None if spec is None else _of_numpy(spec)
    except (TypeError, ValueError):
        found = None
    if found is None:
        raise DTypeError(f"unknown element type {spec!r}: expected one of {', '.join(DTYPES)} or their NumPy types")
    return found


def _of_numpy(spec: object) -> DType | None:
    """The type that NumPy's type is the carrier of; `TypeError` for what names none."""
    try:
        dtype = np.dtype(spec)  # type: ignore[call-overload]
    except TypeError:
        if not isinstance(spec, str):
            raise
        import ml_dtypes  # noqa: F401  # NumPy knows the names of its types from then on

        dtype = np.dtype(spec)
    if dtype.kind == "T":
        return DTYPES["string"] if dtype == DTYPES["string"].numpy else None
    dtype = dtype.newbyteorder("=")
    if dtype not in _BY_NUMPY and dtype.type.__module__ == "ml_dtypes":
        _BY_NUMPY.update({other.numpy: other for other in DTYPES.values()})
    return _BY_NUMPY.get(dtype)


# ---- elements of 2 and 4 bits, four and two a byte, the first in the lowest bits, as DLPack and ONNX have them


def pack(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes (u8) of such elements, which NumPy holds in a byte each; what the last byte has left over is 0."""
    bits = dtype_of(array.dtype).bits
    assert bits in (2, 4)
    parts, single = 8 // bits, np.ascontiguousarray(array).reshape(-1).view(np.uint8) & (1 << bits) - 1
    if len(single) % parts:
        single = np.append(single, np.zeros(-len(single) % parts, np.uint8))
    packed = single[::parts].copy()
    for part in range(1, parts):
        packed |= single[part::parts] << part * bits
    return packed


def unpack(packed: np.ndarray[Any, Any], dtype: DType, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """The elements in such bytes, a byte each."""
    bits, parts, count = dtype.bits, 8 // dtype.bits, math.prod(shape)
    single = np.empty(parts * len(packed), np.uint8)
    for part in range(parts):
        single[part::parts] = packed >> part * bits & (1 << bits) - 1
    return single[:count].view(dtype.numpy).reshape(shape)
