"""Tensors of an ONNX file: what they are is known at once, their bytes are touched only by `TensorRef.array`."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from rlx.errors import ModelFormatError
from rlx.importers.onnx.wire import MAX_TENSOR_BYTES, FieldSpan, decode_varints
from rlx.importers.sources import FileSource, Folder, MemorySource

__all__ = [
    "ELEMENT_TYPES",
    "STRING",
    "ElementType",
    "External",
    "Inline",
    "Source",
    "Sparse",
    "TensorRef",
    "Typed",
    "text_of",
]

Source = FileSource | MemorySource

STRING = 8


@dataclass(frozen=True, slots=True)
class ElementType:
    """One TensorProto.DataType: name, bits an element takes in `raw_data`, NumPy type, and its typed field."""

    name: str
    bits: int
    carrier: Any  # NumPy's type, or the name of one in ml_dtypes
    field: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's type; ml_dtypes, slow to import, is imported for its types only."""
        carrier = self.carrier
        if isinstance(carrier, str):
            import ml_dtypes

            carrier = getattr(ml_dtypes, carrier)
        found: np.dtype[Any] = np.dtype(carrier)
        return found


def text_of(data: bytes | str) -> str:
    """A string of a file; bytes that are no UTF-8 are written as escapes, so that different ones stay different."""
    return data.decode(errors="backslashreplace") if isinstance(data, bytes) else str(data)


def _element(name: str, bits: int, dtype: Any, field: str = "int32_data") -> ElementType:
    return ElementType(name, bits, dtype, field)


ELEMENT_TYPES: dict[int, ElementType] = {
    1: _element("FLOAT", 32, np.float32, "float_data"),
    2: _element("UINT8", 8, np.uint8),
    3: _element("INT8", 8, np.int8),
    4: _element("UINT16", 16, np.uint16),
    5: _element("INT16", 16, np.int16),
    6: _element("INT32", 32, np.int32),
    7: _element("INT64", 64, np.int64, "int64_data"),
    STRING: _element("STRING", 0, np.dtypes.StringDType(), "string_data"),
    9: _element("BOOL", 8, np.bool_),
    10: _element("FLOAT16", 16, np.float16),
    11: _element("DOUBLE", 64, np.float64, "double_data"),
    12: _element("UINT32", 32, np.uint32, "uint64_data"),
    13: _element("UINT64", 64, np.uint64, "uint64_data"),
    14: _element("COMPLEX64", 64, np.complex64, "float_data"),
    15: _element("COMPLEX128", 128, np.complex128, "double_data"),
    16: _element("BFLOAT16", 16, "bfloat16"),
    17: _element("FLOAT8E4M3FN", 8, "float8_e4m3fn"),
    18: _element("FLOAT8E4M3FNUZ", 8, "float8_e4m3fnuz"),
    19: _element("FLOAT8E5M2", 8, "float8_e5m2"),
    20: _element("FLOAT8E5M2FNUZ", 8, "float8_e5m2fnuz"),
    21: _element("UINT4", 4, "uint4"),
    22: _element("INT4", 4, "int4"),
    23: _element("FLOAT4E2M1", 4, "float4_e2m1fn"),
    24: _element("FLOAT8E8M0", 8, "float8_e8m0fnu"),
    25: _element("UINT2", 2, "uint2"),
    26: _element("INT2", 2, "int2"),
    27: _element("FLOAT6E2M3", 6, "float6_e2m3fn"),
    28: _element("FLOAT6E3M2", 6, "float6_e3m2fn"),
}


@dataclass(frozen=True, slots=True)
class Inline:
    """`raw_data`: `length` bytes at `offset` of the model's source."""

    source: Source
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Typed:
    """A typed field such as `float_data`, or no data at all when `spans` is empty."""

    source: Source
    field: str
    spans: tuple[FieldSpan, ...]


@dataclass(frozen=True, slots=True)
class External:
    """Bytes in another file of the model's folder; `length` None: all from `offset` to its end."""

    folder: Folder | None
    location: str
    offset: int
    length: int | None


@dataclass(frozen=True, slots=True)
class Sparse:
    """The elements that are not 0, and where: numbers in the flat tensor [n], or an index along each axis [n, rank]."""

    values: TensorRef
    indices: TensorRef


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor: `name`, `dims`, `elem_type` (TensorProto.DataType) and where its bytes are. (ONNX TensorProto)"""

    name: str
    dims: tuple[int, ...]
    elem_type: int
    storage: Inline | Typed | External | Sparse
    file: str

    @property
    def element(self) -> ElementType:
        """Name, width and NumPy dtype of the elements."""
        return ELEMENT_TYPES[self.elem_type]

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy (or ml_dtypes) dtype of `array()`."""
        return self.element.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed elements (2-, 4- and 6-bit types fill bytes); for strings, bytes of their text."""
        if isinstance(self.storage, Typed) and self.elem_type == STRING:
            return sum(end - start for _, _, start, end, _ in self.storage.spans)
        return (self.size * self.element.bits + 7) // 8

    @property
    def is_copied(self) -> bool:
        """Whether even an `array(aligned=False)` is a copy."""
        return self.element.bits < 8 or isinstance(self.storage, Typed | Sparse)

    @property
    def zero_copy(self) -> bool:
        """Whether `array()` is a view of the mapped file: raw or external bytes at an offset fit for the dtype."""
        if self.element.bits < 8 or isinstance(self.storage, Typed | Sparse):
            return False
        start = self.storage.source.address() if isinstance(self.storage, Inline) else 0
        return (start + self.storage.offset) % self.dtype.alignment == 0

    def array(self, *, aligned: bool = True) -> NDArray[Any]:
        """The elements as a read-only array of shape `dims` and dtype `dtype`.

        Raw and external data is a view of one mapping of the file, not a copy. Protobuf aligns nothing, so where the
        view would be misaligned for its dtype it is copied, unless `aligned=False`. Typed fields, sparse tensors and
        2-, 4- and 6-bit elements (unpacked, one to a byte) are always copies, and so are strings.
        Raises ModelFormatError for data that does not fit `dims`, or an external file that is missing or outside.
        """
        if sys.byteorder != "little":
            raise ModelFormatError(f"{self._owner}: weights can be read on little-endian machines only")
        if isinstance(self.storage, Sparse):
            flat = self._dense(self.storage)
        elif isinstance(self.storage, Typed):
            flat = self._strings(self.storage) if self.elem_type == STRING else self._decode(self.storage)
        else:
            flat = self._elements(self._raw_bytes(self.storage))
        if aligned and not flat.flags.aligned:
            flat = flat.copy()
        flat.flags.writeable = False
        return flat.reshape(self.dims)

    def check(self) -> None:
        """Raise ModelFormatError unless type, sizes and the length of raw data fit together; reads no tensor byte."""
        if self.elem_type not in ELEMENT_TYPES:
            self._fail(f"element type {self.elem_type} is unknown; known are 1 to {max(ELEMENT_TYPES)}")
        for dim in self.dims:
            if dim < 0:
                self._fail(f"dims {list(self.dims)} has a negative size")
        # With zero sizes taken out, so that (0, 2**62) is refused too: strides are computed from the rest.
        extent = math.prod(dim for dim in self.dims if dim) * max(self.element.bits, 8) // 8
        if extent > MAX_TENSOR_BYTES:
            self._fail(f"dims {list(self.dims)} take {extent} bytes, more than the limit of {MAX_TENSOR_BYTES}")
        if isinstance(self.storage, Sparse):
            self._check_sparse(self.storage)
        elif isinstance(self.storage, Typed):
            if self.storage.spans and self.storage.field != self.element.field:
                self._fail(f"{self.storage.field} can't hold {self.element.name}; expected {self.element.field}")
        elif self.elem_type == STRING:
            self._fail("strings must be in string_data")
        elif self.storage.length not in (None, self.nbytes):
            self._fail(
                f"dims {list(self.dims)} of {self.element.name} need {self.nbytes} bytes, got {self.storage.length}"
            )

    def _check_sparse(self, storage: Sparse) -> None:
        """The types and shapes of the parts."""
        values, indices = storage.values, storage.indices
        if self.elem_type == STRING:
            self._fail("it is sparse, and sparse tensors of strings are not supported")
        if indices.elem_type != 7 or values.elem_type != self.elem_type or len(values.dims) != 1:
            self._fail("it is sparse; expected values of one axis and indices of INT64")
        if indices.dims not in (values.dims, (*values.dims, len(self.dims))):
            got = f"{list(indices.dims)} for {values.dims[0]} values"
            self._fail(f"it is sparse; expected indices [n] or [n, {len(self.dims)}], got {got}")

    def _dense(self, storage: Sparse) -> NDArray[Any]:
        at, values = storage.indices.array(), storage.values.array()
        sizes = np.array(self.dims if at.ndim == 2 else (self.size,), np.int64)
        rows = at.reshape(len(at), len(sizes))
        if ((rows < 0) | (rows >= sizes)).any():
            self._fail(f"it is sparse, and an index lies outside dims {list(self.dims)}")
        flat = np.zeros(self.size, self.dtype)
        flat[np.ravel_multi_index(tuple(rows.T), tuple(sizes)) if len(sizes) else np.zeros(len(rows), np.int64)] = (
            values
        )
        return flat

    @property
    def _owner(self) -> str:
        return f"{self.file}: tensor {self.name!r}"

    def _fail(self, problem: str) -> NoReturn:
        raise ModelFormatError(f"{self._owner}: {problem}")

    def lacks(self) -> str:
        """Why external data can't be read, "" where it can or lies in the file; opens no file."""
        try:
            if isinstance(self.storage, External):
                self._external(self.storage)
        except ModelFormatError as error:
            return str(error).removeprefix(f"{self._owner}: ")
        return ""

    def _raw_bytes(self, storage: Inline | External) -> NDArray[np.uint8]:
        if isinstance(storage, Inline):
            return storage.source.view()[storage.offset : storage.offset + storage.length]
        return self._external(storage).view()[storage.offset : storage.offset + self.nbytes]

    def _external(self, storage: External) -> FileSource:
        """The file that holds the data."""
        if storage.folder is None:
            self._fail(
                f"external data {storage.location!r} has no folder, as the model was given as bytes; give its path"
            )
        source = storage.folder.open(storage.location, self._owner)
        length = source.size - storage.offset if storage.length is None else storage.length
        if length != self.nbytes or storage.offset + length > source.size:
            self._fail(
                f"needs {self.nbytes} bytes at {storage.offset} of external data {storage.location!r}, "
                f"which is {source.size} bytes long"
            )
        return source

    def _elements(self, data: NDArray[np.uint8]) -> NDArray[Any]:
        """Bytes of packed elements, as in `raw_data`, as a flat array."""
        bits = self.element.bits
        if bits < 8:
            return _unpack(data, bits, self.size).view(self.dtype)
        if self.dtype == np.bool_ and data.size and int(data.max()) > 1:
            self._fail("a BOOL is neither 0 nor 1")
        return data.view(self.dtype)

    def _decode(self, storage: Typed) -> NDArray[Any]:
        if self.element.field in ("float_data", "double_data"):
            return self._fixed(storage)
        # 2- and 4-bit types are packed into bytes and each byte is an integer; 6-bit ones are one to an integer.
        packed = self.element.bits in (2, 4)
        values = self._varints(storage, self.nbytes if packed else self.size)
        if packed:
            return self._elements(self._narrow(values, 8).astype(np.uint8))
        if self.element.bits == 6:
            return (values.astype(np.uint8) & 63).view(self.dtype)
        if self.dtype == np.bool_:
            return self._elements(self._narrow(values, 8).astype(np.uint8))
        unsigned = np.dtype(f"u{self.dtype.itemsize}")
        return self._narrow(values, self.element.bits).astype(unsigned).view(self.dtype)

    def _fixed(self, storage: Typed) -> NDArray[Any]:
        scalar = np.dtype("<f4" if self.element.field == "float_data" else "<f8")
        record = np.dtype([("tag", "u1"), ("value", scalar)])
        parts: list[NDArray[Any]] = []
        for number, wire, start, end, _ in storage.spans:
            packed = wire == 2
            if (end - start) % (scalar if packed else record).itemsize:
                self._fail(f"{self.element.field} (field {number}) at byte {start} is no whole number of elements")
            data = storage.source.view()[start:end]
            parts.append(data.view(scalar) if packed else data.view(record)["value"])
        expected = self.size * (2 if self.element.name.startswith("COMPLEX") else 1)
        got = sum(part.size for part in parts)
        if got != expected:
            self._fail(f"dims {list(self.dims)} need {expected} values in {self.element.field}, got {got}")
        flat = np.concatenate(parts) if parts else np.empty(0, scalar)
        return flat.view(self.dtype)

    def _varints(self, storage: Typed, expected: int) -> NDArray[np.uint64]:
        available = sum(end - start for _, _, start, end, _ in storage.spans)
        if expected > available:  # each takes a byte or more: refuse before memory is taken for them
            self._fail(
                f"dims {list(self.dims)} need {expected} values in {self.element.field}, got at most {available}"
            )
        values = np.empty(expected, np.uint64)
        count = 0
        for _, wire, start, end, _ in storage.spans:
            data = storage.source.view()[start:end]
            decoded = decode_varints(data, values[count:]) if wire == 2 else _run(data, values[count:])
            if decoded is None:
                self._fail(f"{self.element.field} at byte {start} is malformed or has more than {expected} values")
            count += decoded
        if count != expected:
            self._fail(f"dims {list(self.dims)} need {expected} values in {self.element.field}, got {count}")
        return values

    def _narrow(self, values: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
        """The values, checked to fit in that many bits, signed or not."""
        if bits < 64 and values.size:
            signed = values.view(np.int64)
            low = 0 if self.element.field == "uint64_data" else -(1 << bits - 1)
            if int(signed.min()) < low or int(signed.max()) >= 1 << bits:
                self._fail(f"a value in {self.element.field} does not fit in {bits} bits")
        return values

    def _strings(self, storage: Typed) -> NDArray[Any]:
        if len(storage.spans) != self.size:
            self._fail(f"dims {list(self.dims)} need {self.size} values in string_data, got {len(storage.spans)}")
        data = storage.source.view()
        texts = [text_of(data[start:end].tobytes()) for _, _, start, end, _ in storage.spans]
        return np.array(texts, self.dtype)


def _run(data: NDArray[np.uint8], out: NDArray[np.uint64]) -> int | None:
    """Decode a run of an unpacked field: its one-byte tag before each value."""
    pairs = np.empty(min(2 * out.size, data.size), np.uint64)
    count = decode_varints(data, pairs)
    if count is None or count % 2:
        return None
    out[: count // 2] = pairs[1:count:2]
    return count // 2


def _unpack(data: NDArray[np.uint8], bits: int, size: int) -> NDArray[np.uint8]:
    """Elements of 2, 4 or 6 bits, low bits first, one to a byte."""
    if bits == 6:
        padded = np.zeros((-(-size // 4), 3), np.uint8)
        padded.reshape(-1)[: data.size] = data
        a, b, c = padded[:, 0], padded[:, 1], padded[:, 2]
        columns = [a & 63, a >> 6 | (b & 15) << 2, b >> 4 | (c & 3) << 4, c >> 2]
    else:
        columns = [data >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return np.stack(columns, axis=1).reshape(-1)[:size].astype(np.uint8, copy=False)
