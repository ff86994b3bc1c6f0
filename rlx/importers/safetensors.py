"""safetensors files: the header, and arrays as views of the mapped file. (https://github.com/huggingface/safetensors)

A header is 8 bytes of length and that many bytes of JSON: name -> {dtype, shape, data_offsets}.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, TypeGuard

from numpy.typing import NDArray

from rlx.errors import ModelFormatError
from rlx.importers.sources import FileSource, check_location, read_file
from rlx.ir.dtype import DTYPES, DType
from rlx.records import dataclass, field

__all__ = ["CODES", "SafetensorsFile", "StoredTensor", "read_safetensors", "read_safetensors_index"]

# Limits, each far above what real files hold.
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
MAX_TENSORS = 1 << 20
MAX_DIMS = 32  # rank of a tensor
MAX_TENSOR_BYTES = 1 << 48  # one tensor; keeps every size and offset inside int64
MAX_INDEX_BYTES = 100_000_000  # the JSON index of a model in several files
MAX_PARTS = 1 << 12  # files of a model

_DTYPES = {
    "F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16", "F8_E4M3": "f8e4m3", "F8_E5M2": "f8e5m2", "I64": "i64",
    "I32": "i32", "I16": "i16", "I8": "i8", "U64": "u64", "U32": "u32", "U16": "u16", "U8": "u8", "BOOL": "bool",
    "C64": "c64", "F4": "f4e2m1", "F8_E4M3FNUZ": "f8e4m3fnuz", "F8_E5M2FNUZ": "f8e5m2fnuz", "F8_E8M0": "f8e8m0",
}  # fmt: skip
CODES = {name: code for code, name in _DTYPES.items()}  # our type -> its name in a file


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: `nbytes` bytes at `offset` of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SafetensorsFile:
    """A file's header: `tensors` by name, and the free `metadata`."""

    path: str
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    source: FileSource = field(repr=False)

    def array(self, name: str) -> NDArray[Any]:
        """A tensor as a read-only view of the mapped file, misaligned where the file has it so.

        4-bit elements come as u8, two to a byte. Raises `ModelFormatError` for an unknown name.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFormatError(f"{self.path}: there is no tensor {name!r}")
        raw = self.source.view()[tensor.offset : tensor.offset + tensor.nbytes]
        if tensor.dtype.bits < 8:
            return raw
        return raw.view(tensor.dtype.numpy).reshape(tensor.shape)


def read_safetensors(path: str | os.PathLike[str]) -> SafetensorsFile:
    """Reads the header of a safetensors file and checks it against the file's size; touches no tensor byte.

    Raises `ModelFormatError` for a file that is missing, malformed, truncated, has bytes that no tensor owns or two do,
    or is beyond the limits of this module.
    """
    source = FileSource(os.fsdecode(os.fspath(path)))
    try:
        if source.size < 8:
            raise ModelFormatError(f"{source.name}: {source.size} bytes are no safetensors file: it is truncated")
        length = int.from_bytes(source.read(0, 8), "little")
        most = min(MAX_HEADER_BYTES, source.size - 8)
        if length > most:
            raise ModelFormatError(
                f"{source.name}: a header of {length} bytes: expected at most {most}; "
                "it is truncated, or no safetensors file"
            )
        header = _json_object(source.read(8, length), source.name)
    finally:
        source.close()
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(v, str) for v in notes.values()):
        raise ModelFormatError(f"{source.name}: __metadata__: expected a mapping of texts")
    if len(header) > MAX_TENSORS:
        raise ModelFormatError(f"{source.name}: {len(header)} tensors are more than the limit of {MAX_TENSORS}")
    start = 8 + length
    tensors = {name: _tensor(source.name, name, info, start) for name, info in header.items()}
    at = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != at:
            how = "overlaps another" if tensor.offset < at else f"leaves bytes from {at} to no tensor"
            raise ModelFormatError(f"{source.name}: tensor {tensor.name!r} at byte {tensor.offset} {how}")
        at += tensor.nbytes
    if at != source.size:
        raise ModelFormatError(f"{source.name}: its tensors end at byte {at}, the file at {source.size}")
    return SafetensorsFile(source.name, tensors, notes, source)


def _json_object(data: bytes, name: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ModelFormatError(f"{name}: a name is given twice")
        return found

    try:
        header = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{name}: its header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise ModelFormatError(f"{name}: its header: expected a JSON object, got {type(header).__name__}")
    return header


def _tensor(path: str, name: str, info: Any, start: int) -> StoredTensor:
    def fail(problem: str) -> ModelFormatError:
        return ModelFormatError(f"{path}: tensor {name!r}: {problem}")

    if not isinstance(info, dict):
        raise fail("expected dtype, shape and data_offsets")
    code, shape, span = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    if not isinstance(code, str) or code not in _DTYPES:
        raise fail(f"unknown dtype {code!r}; known are {', '.join(_DTYPES)}")
    if not _naturals(shape) or len(shape) > MAX_DIMS:
        raise fail(f"shape {shape!r}: expected at most {MAX_DIMS} sizes >= 0")
    if not _naturals(span) or len(span) != 2 or span[0] > span[1]:
        raise fail(f"data_offsets {span!r}: expected two ascending offsets")
    dtype = DTYPES[_DTYPES[code]]
    extent = dtype.nbytes(math.prod(size for size in shape if size))
    if extent > MAX_TENSOR_BYTES:
        raise fail(f"{extent} bytes are more than the limit of {MAX_TENSOR_BYTES}")
    nbytes = dtype.nbytes(math.prod(shape))
    if span[1] - span[0] != nbytes:
        raise fail(f"{code}{shape} needs {nbytes} bytes, its data_offsets hold {span[1] - span[0]}")
    return StoredTensor(name, tuple(shape), dtype, start + span[0], nbytes)


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def read_safetensors_index(path: str | os.PathLike[str]) -> list[SafetensorsFile]:
    """The headers of the files that a `model.safetensors.index.json` names; every tensor must be where it says.

    Raises `ModelFormatError`, also for a file outside the index's folder.
    """
    path = Path(path)
    index = _json_object(read_file(path, MAX_INDEX_BYTES), str(path))
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise ModelFormatError(f"{path}: expected weight_map, a mapping from tensors to files")
    names = list(dict.fromkeys(places.values()))
    if len(names) > MAX_PARTS:
        raise ModelFormatError(f"{path}: {len(names)} files are more than the limit of {MAX_PARTS}")
    files = {}
    for name in names:
        check_location(name, str(path))
        files[name] = read_safetensors(path.parent / name)
    for tensor, name in places.items():
        if tensor not in files[name].tensors:
            raise ModelFormatError(f"{path}: tensor {tensor!r} is not in {name}, where weight_map has it")
    return list(files.values())
