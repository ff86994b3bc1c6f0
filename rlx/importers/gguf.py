"""GGUF files: metadata and tensor infos, read by position; no weight byte is touched until an array is asked for.

No graph is made here: `rlx.models.decoder` does that. Versions 2 and 3, little-endian.
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from rlx.errors import ModelFormatError
from rlx.importers.sources import FileSource
from rlx.ir.dtype import DTYPES
from rlx.ir.encodings import ENCODINGS
from rlx.ir.mapped import give_back
from rlx.records import dataclass, field

__all__ = ["GGML_TYPES", "GgmlType", "GgufArray", "GgufFile", "GgufTensor", "read_gguf", "read_gguf_parts"]

# Limits. Each is far above what real files hold and low enough that a hostile one can't exhaust memory or time.
MAX_METADATA = 1 << 16  # key-value pairs
MAX_TENSORS = 1 << 18  # tensor infos
MAX_KEY_BYTES = 65_535  # one metadata key (the format's own limit)
MAX_NAME_BYTES = 1 << 10  # one tensor name (the format says 64; some writers don't care)
MAX_STRING_BYTES = 64 << 20  # one metadata string
MAX_ARRAY_ITEMS = 1 << 26  # items of one metadata array
MAX_ARRAY_DEPTH = 2  # arrays in arrays
MAX_HEADER_BYTES = 1 << 30  # all that comes before the tensors' bytes
MAX_DIMS = 8  # rank of a tensor (ggml has 4)
MAX_TENSOR_BYTES = 1 << 48  # one tensor; keeps every size and offset inside int64
MAX_ALIGNMENT = 1 << 20  # general.alignment
MAX_PARTS = 1 << 10  # files of a model that is split


@dataclass(frozen=True)
class GgmlType:
    """How tensor elements are stored: `block` elements in `block_bytes` bytes."""

    name: str
    block: int
    block_bytes: int


def _types() -> dict[int, GgmlType]:
    numbers = """
        0 f32, 1 f16, 2 q4_0, 3 q4_1, 6 q5_0, 7 q5_1, 8 q8_0, 9 q8_1, 10 q2_k, 11 q3_k, 12 q4_k, 13 q5_k, 14 q6_k,
        15 q8_k, 16 iq2_xxs, 17 iq2_xs, 18 iq3_xxs, 19 iq1_s, 20 iq4_nl, 21 iq3_s, 22 iq2_s, 23 iq4_xs, 24 i8, 25 i16,
        26 i32, 27 i64, 28 f64, 29 iq1_m, 30 bf16, 34 tq1_0, 35 tq2_0, 39 mxfp4, 40 nvfp4
    """
    found = {}
    for number, name in (entry.split() for entry in numbers.split(",")):
        encoding = ENCODINGS.get(name)
        block, size = (1, DTYPES[name].itemsize) if encoding is None else (encoding.block, encoding.block_bytes)
        found[int(number)] = GgmlType(name, block, size)
    return found


GGML_TYPES: dict[int, GgmlType] = _types()

# Metadata value types: struct format of the fixed-size ones.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_WINDOW = 1 << 20


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: `shape` outermost axis first (the file has it the other way round), bytes at `offset` of the file."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufArray:
    """A metadata array whose items are read when asked for: a vocabulary has some 10^5 strings."""

    file: FileSource = field(repr=False)
    item_type: int
    count: int
    start: int
    end: int

    def values(self) -> list[Any]:
        """The items as Python values (strings as str)."""
        data = self.file.view()[self.start : self.end]
        found: list[Any]
        if self.item_type == _STRING:
            found = _strings(data.tobytes(), self.count)
            give_back([data])
            return found
        if self.item_type in _SCALARS:
            found = np.frombuffer(data, "<" + _SCALARS[self.item_type]).tolist()
            return found
        cursor = _Cursor(self.file, self.start, self.end, mapped=True)
        return [cursor.value(self.item_type, "array item", 1) for _ in range(self.count)]

    def __len__(self) -> int:
        return self.count


def _strings(data: bytes, count: int) -> list[str]:
    """Strings that lie one after another, each after its length; that they fit was seen when the header was read."""
    found: list[str] = []
    append, at, unpack = found.append, 0, struct.Struct("<Q").unpack_from
    for _ in range(count):
        start = at + 8
        at = start + unpack(data, at)[0]
        # Vocabularies hold byte sequences that are no UTF-8 by themselves.
        append(str(data[start:at], "utf-8", "surrogateescape"))
    return found


@dataclass(frozen=True)
class GgufFile:
    """A file's header: `metadata` by key (arrays as `GgufArray`), `tensors` by name in file order.

    `pairs` says which bytes of the file hold a key of `metadata` with its value.
    """

    path: str
    version: int
    alignment: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    source: FileSource = field(repr=False)
    pairs: dict[str, tuple[int, int]] = field(repr=False, default_factory=dict)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes of a tensor, a read-only view of the mapped file. Raises `ModelFormatError`."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFormatError(f"{self.path}: there is no tensor {name!r}")
        return self.source.view()[tensor.offset : tensor.offset + tensor.nbytes]


class _Cursor:
    """Reads little-endian values one after another, through a window over the file."""

    def __init__(self, source: FileSource, start: int, end: int, *, mapped: bool = False) -> None:
        self.source, self.at, self.end, self.mapped = source, start, end, mapped
        self.name = source.name
        self.buffer, self.base = b"", start

    def fail(self, what: str, problem: str) -> NoReturn:
        raise ModelFormatError(f"{self.name}: {what} at byte {self.at}: {problem}")

    def take(self, count: int, what: str) -> bytes:
        """The next bytes; the caller has bounded `count`."""
        if self.at + count > self.end:
            self.fail(what, f"{count} bytes wanted, {self.end - self.at} left: the file is truncated, or no GGUF file")
        start = self.at - self.base
        if start < 0 or start + count > len(self.buffer):
            size = max(count, min(_WINDOW, self.end - self.at))
            # The mapping also serves a file that is closed for reading.
            if self.mapped:
                self.buffer = self.source.view()[self.at : self.at + size].tobytes()
            else:
                self.buffer = self.source.read(self.at, size)
            self.base, start = self.at, 0
        self.at += count
        return self.buffer[start : start + count]

    def number(self, code: str, what: str) -> Any:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))
        return value

    def count(self, limit: int, what: str) -> int:
        """A 64-bit count or length, at most `limit`."""
        value: int = self.number("Q", what)
        if value > limit:
            self.fail(what, f"{value} is more than the limit of {limit}")
        return value

    def text(self, limit: int, what: str) -> str:
        data = self.take(self.count(limit, f"length of {what}"), what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(what, f"is not UTF-8: {error}")

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        """A metadata value of a type."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            # Vocabularies hold byte sequences that are no UTF-8 by themselves.
            data = self.take(self.count(MAX_STRING_BYTES, f"length of {what}"), what)
            return data.decode("utf-8", errors="surrogateescape")
        if kind == _ARRAY:
            return self.array(what, depth)
        return self.fail(what, f"unknown value type {kind}; known are 0 to 12")

    def array(self, what: str, depth: int) -> GgufArray:
        if depth >= MAX_ARRAY_DEPTH:
            self.fail(what, f"arrays are nested deeper than {MAX_ARRAY_DEPTH}")
        item: int = self.number("I", what)
        count = self.count(MAX_ARRAY_ITEMS, f"length of {what}")
        start = self.at
        if item in _SCALARS:
            self.skip(count * struct.calcsize("<" + _SCALARS[item]), what)
        elif item == _STRING:
            self.skip_strings(count, what)
        else:
            if count > MAX_METADATA:
                self.fail(what, f"{count} inner arrays are more than the limit of {MAX_METADATA}")
            for _ in range(count):
                self.value(item, what, depth + 1)
        return GgufArray(self.source, item, count, start, self.at)

    def skip(self, count: int, what: str) -> None:
        if count > self.end - self.at:
            self.fail(what, f"{count} bytes wanted, {self.end - self.at} left: the file is truncated")
        self.at += count

    def skip_strings(self, count: int, what: str) -> None:
        """Steps over strings; this loop is most of the time that a header takes."""
        if count > (self.end - self.at) // 8:
            self.fail(what, f"{count} strings can't be in {self.end - self.at} bytes")
        unpack, done = struct.Struct("<Q").unpack_from, 0
        while done < count:
            self.take(8, what)
            self.at -= 8
            buffer, base = self.buffer, self.base
            at, last = self.at - base, len(self.buffer) - 8
            while done < count and at <= last:
                (length,) = unpack(buffer, at)
                if length > MAX_STRING_BYTES:
                    self.at = base + at
                    self.fail(what, f"a string of {length} bytes is more than the limit of {MAX_STRING_BYTES}")
                at += 8 + length
                done += 1
            self.at = base + at
            if self.at > self.end:
                self.fail(what, "the file is truncated")


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Reads the header of a GGUF file: metadata and tensor infos, checked against each other and the file's size.

    Raises `ModelFormatError` naming file, part and byte for a file that is missing, malformed, truncated, big-endian or
    beyond the limits of this module. Touches no tensor byte.
    """
    source = FileSource(os.fsdecode(os.fspath(path)))
    try:
        return _header(source)
    finally:
        source.close()


def _header(source: FileSource) -> GgufFile:
    cursor = _Cursor(source, 0, min(source.size, MAX_HEADER_BYTES))
    if source.size < 24 or cursor.take(4, "magic") != b"GGUF":
        raise ModelFormatError(f"{source.name}: is no GGUF file: it doesn't begin with 'GGUF' and a header")
    version: int = cursor.number("I", "version")
    if version & 0xFFFF == 0 and version:
        raise ModelFormatError(f"{source.name}: is big-endian; convert it to little-endian, which rlx reads")
    if version not in (2, 3):
        raise ModelFormatError(f"{source.name}: GGUF version {version}: expected 2 or 3; convert the model again")
    tensors = cursor.count(MAX_TENSORS, "number of tensors")
    pairs = cursor.count(MAX_METADATA, "number of metadata pairs")
    metadata: dict[str, Any] = {}
    spans: dict[str, tuple[int, int]] = {}
    for _ in range(pairs):
        begin = cursor.at
        key = cursor.text(MAX_KEY_BYTES, "metadata key")
        if key in metadata:
            cursor.fail(f"metadata key {key!r}", "is given twice")
        metadata[key] = cursor.value(cursor.number("I", f"type of {key!r}"), f"metadata {key!r}")
        spans[key] = begin, cursor.at
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        cursor.fail("general.alignment", f"{alignment!r} is no power of two up to {MAX_ALIGNMENT}")
    infos = [_info(cursor) for _ in range(tensors)]
    start = -(-cursor.at // alignment) * alignment
    placed = dict(_placed(cursor, infos, start, alignment))
    return GgufFile(source.name, version, alignment, metadata, placed, source, spans)


def _info(cursor: _Cursor) -> tuple[str, tuple[int, ...], GgmlType, int, int]:
    """(name, shape, type, offset from the start of the data, bytes) of a tensor."""
    name = cursor.text(MAX_NAME_BYTES, "tensor name")
    what = f"tensor {name!r}"
    rank: int = cursor.number("I", what)
    if rank > MAX_DIMS:
        cursor.fail(what, f"rank {rank} is more than the limit of {MAX_DIMS}")
    sizes: tuple[int, ...] = struct.unpack(f"<{rank}Q", cursor.take(8 * rank, what))
    number: int = cursor.number("I", what)
    offset: int = cursor.number("Q", what)
    kind = GGML_TYPES.get(number)
    if kind is None:
        cursor.fail(what, f"type {number} is unknown; known are {', '.join(map(str, GGML_TYPES))}")
    count = math.prod(sizes)
    if sizes and sizes[0] % kind.block:
        cursor.fail(what, f"rows of {sizes[0]} elements are not whole blocks of {kind.block} ({kind.name})")
    if not sizes and kind.block != 1:
        cursor.fail(what, f"a scalar can't be stored as {kind.name}")
    nbytes = count // kind.block * kind.block_bytes
    extent = math.prod(size for size in sizes if size) // kind.block * kind.block_bytes
    if extent > MAX_TENSOR_BYTES:
        cursor.fail(what, f"{extent} bytes are more than the limit of {MAX_TENSOR_BYTES}")
    return name, sizes[::-1], kind, offset, nbytes


def _placed(
    cursor: _Cursor, infos: list[tuple[str, tuple[int, ...], GgmlType, int, int]], start: int, alignment: int
) -> Iterator[tuple[str, GgufTensor]]:
    """The tensors at their places; none may lie outside the file, overlap another or have the name of another."""
    size, names = cursor.source.size, set()
    for name, shape, kind, offset, nbytes in infos:
        what = f"tensor {name!r}"
        if name in names:
            cursor.fail(what, "is defined twice")
        names.add(name)
        if offset % alignment:
            cursor.fail(what, f"its offset {offset} is not a multiple of the alignment {alignment}")
        if start + offset + nbytes > size:
            cursor.fail(what, f"its {nbytes} bytes at {start + offset} pass the end of the file ({size} bytes)")
        yield name, GgufTensor(name, shape, kind, start + offset, nbytes)
    end, before = 0, ""
    for name, _, _, offset, nbytes in sorted(infos, key=lambda info: (info[3], info[4])):
        if nbytes and offset < end:
            cursor.fail(f"tensor {name!r}", f"overlaps tensor {before!r}")
        if nbytes:
            end, before = offset + nbytes, name


_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def read_gguf_parts(path: str | os.PathLike[str]) -> list[GgufFile]:
    """The headers of all files of a model; one given by its first part (NAME-00001-of-00003.gguf) has several.

    Raises `ModelFormatError` where a part is missing or not of this model.
    """
    first = read_gguf(path)
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MAX_PARTS:
        raise ModelFormatError(f"{first.path}: split.count {count!r}: expected a number up to {MAX_PARTS}")
    if count <= 1:
        return [first]
    name = _PART.fullmatch(Path(path).name)
    if name is None or int(name[2]) != 1 or int(name[3]) != count:
        raise ModelFormatError(
            f"{first.path}: is one of {count} parts: expected the first, with a name that ends in "
            f"-00001-of-{count:05}.gguf"
        )
    parts = [first]
    for number in range(2, count + 1):
        parts.append(read_gguf(Path(path).with_name(f"{name[1]}-{number:05}-of-{count:05}.gguf")))
    names = [n for part in parts for n in part.tensors]
    if len(set(names)) != len(names):
        raise ModelFormatError(f"{first.path}: two of its {count} parts hold a tensor of one name")
    return parts
