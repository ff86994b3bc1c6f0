"""A bounded scanner of the protobuf wire format, over positioned reads.

`Reader.scan` walks one message and gives the spans of the fields that its `Message` names; a payload is read only when
asked for, so tensor bytes are stepped over. Every tag, varint and length is checked against the span that encloses it
before anything is allocated for it. (https://protobuf.dev/programming-guides/encoding)
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from rlx.errors import ModelFormatError

__all__ = [
    "MAX_DEPTH",
    "MAX_DIMS",
    "MAX_FIELDS",
    "MAX_HEADER_BYTES",
    "MAX_LIST_BYTES",
    "MAX_NAME_BYTES",
    "MAX_NODES",
    "MAX_SPARSE_BYTES",
    "MAX_SPARSE_RATIO",
    "MAX_TENSOR_BYTES",
    "MAX_TEXT_BYTES",
    "ByteSource",
    "FieldSpan",
    "Message",
    "Reader",
    "decode_varints",
    "signed64",
]

# Limits. Each is far above what real models hold and low enough that a hostile file can't exhaust memory or the stack.
MAX_DEPTH = 32  # subgraphs or types inside each other (protobuf's own default of 100 messages is 33 subgraphs)
MAX_FIELDS = 4_000_000  # known fields in one file, so also attributes and strings
MAX_NODES = 250_000  # nodes in one file, those of subgraphs and functions too
MAX_HEADER_BYTES = 512 << 20  # strings and attribute lists read from one file, in all
MAX_NAME_BYTES = 64 << 10  # names of values, nodes, ops, domains, files
MAX_TEXT_BYTES = 16 << 20  # metadata values
MAX_LIST_BYTES = 64 << 20  # one string or list attribute
MAX_DIMS = 32  # rank of a tensor
MAX_SPARSE_BYTES = 64 << 20  # what the sparse tensors of a file stand for, beyond so many times what they store:
MAX_SPARSE_RATIO = 64
MAX_TENSOR_BYTES = 1 << 48  # one tensor; keeps every size and offset inside int64

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIRE_NAMES = {_VARINT: "varint", _FIXED64: "64-bit", _BYTES: "length-delimited", _FIXED32: "32-bit"}
_SCALAR_SIZE = {_FIXED64: 8, _FIXED32: 4}
_FIRST_BLOCK, _LAST_BLOCK = 4 << 10, 256 << 10
_LOOKAHEAD = 20  # the longest tag (10 bytes) and length or value (10 bytes)
_CHUNK = 1 << 20
_SHORT = 256  # from here on NumPy decodes faster than a loop

FieldSpan = tuple[int, int, int, int, int]
"""`(number, wire type, start, end, value)` with offsets into the source.

Length-delimited: the payload's span, value 0. Scalars: the span of a run of one field, tags included (a field that
occurs once is a run of one), and the bits of the last value.
"""


class ByteSource(Protocol):
    """Where a model's bytes come from."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def size(self) -> int:
        """Bytes in all."""

    def read(self, offset: int, size: int) -> bytes:
        """Copy of `size` bytes at `offset`; the caller has checked that they exist."""

    def view(self) -> NDArray[np.uint8]:
        """All bytes, read-only and not copied; fails when they are no longer those that were read."""


class Message:
    """The fields of one protobuf message that a reader wants: `kind number` by field name.

    Kinds: `varint`, `fixed32`, `fixed64`, `bytes`; a `*` after a scalar kind allows a repeated field, packed or not.
    """

    _KINDS: Mapping[str, int] = {"varint": _VARINT, "fixed64": _FIXED64, "fixed32": _FIXED32, "bytes": _BYTES}

    def __init__(self, name: str, /, **fields: tuple[str, int]) -> None:
        self.name = name
        self.names = {number: field for field, (_, number) in fields.items()}
        self.tags: dict[int, int] = {}
        for kind, number in fields.values():
            self.tags[number << 3 | self._KINDS[kind.rstrip("*")]] = number
            if kind.endswith("*"):
                self.tags[number << 3 | _BYTES] = number


class Reader:
    """Reads fields, strings and numbers of one source through a sliding window."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.name = source.name
        self._buffer = b""
        self._base = 0
        self._block = _FIRST_BLOCK
        self._fields = 0
        self._read_bytes = 0

    def fail(self, field: str, offset: int, problem: str) -> NoReturn:
        """Raise the one kind of error a malformed file gives."""
        raise ModelFormatError(f"{self.name}: {field} at byte {offset}: {problem}")

    def scan(self, start: int, end: int, message: Message) -> list[FieldSpan]:
        """Known fields of the message in bytes `start` to `end`, in file order; others are checked and stepped over."""
        found: list[FieldSpan] = []
        tags = message.tags
        buffer, base, i, stop, safe = self._window(start, end)
        at = i
        try:
            while True:
                if i >= safe:
                    if i >= stop:
                        break
                    self._count(len(found), message, base + i)
                    buffer, base, i, stop, safe = self._window(base + i, end)
                at = i
                tag = buffer[i]
                i += 1
                if tag > 127:
                    tag, i = _varint(buffer, at)
                number = tags.get(tag)
                if number is None:
                    self._check_unknown(tag, base + at, message)
                wire = tag & 7
                run = tag if tag < 128 else -1
                if wire == _BYTES:
                    size = buffer[i]
                    i += 1
                    if size > 127:
                        size, i = _varint(buffer, i - 1)
                    begin = i
                    i += size
                    if i > stop:
                        self._overrun(tag, base + at, size, end, message)
                    if number is not None:
                        found.append((number, _BYTES, base + begin, base + i, 0))
                    continue
                if wire == _VARINT:
                    value = buffer[i]
                    i += 1
                    if value > 127:
                        value, i = _varint(buffer, i - 1)
                    while i < safe and buffer[i] == run:  # a run of one repeated field costs no memory
                        value = buffer[i + 1]
                        i += 2
                        if value > 127:
                            value, i = _varint(buffer, i - 1)
                else:
                    size = _SCALAR_SIZE[wire]
                    i += size
                    while i < safe and buffer[i] == run:
                        i += 1 + size
                    value = int.from_bytes(buffer[i - size : i], "little") if number is not None else 0
                if i > stop:
                    self._overrun(tag, base + at, 0, end, message)
                if number is not None:
                    found.append((number, wire, base + at, base + i, value))
        except IndexError:
            self.fail(f"a field of {message.name}", base + at, f"the file ends inside it (size {self.source.size})")
        except _LongVarint:
            self.fail(f"a field of {message.name}", base + at, "a varint is longer than 64 bits")
        self._fields += len(found)
        self._count(0, message, end)
        return found

    def read(self, start: int, end: int, limit: int, field: str) -> bytes:
        """Copy of the bytes `start` to `end` of a field that may hold at most `limit`."""
        size = end - start
        if size == 0:
            return b""
        if size > limit:
            self.fail(field, start, f"{size} bytes are more than the limit of {limit}")
        self._read_bytes += size
        if self._read_bytes > MAX_HEADER_BYTES:
            self.fail(field, start, f"names and attributes take more than the limit of {MAX_HEADER_BYTES} bytes")
        low = start - self._base
        if low < 0 or low + size > len(self._buffer):
            if size > _LAST_BLOCK:
                return self.source.read(start, size)
            self._load(start, size)
            low = start - self._base
        return self._buffer[low : low + size]

    def text(self, start: int, end: int, field: str, limit: int = MAX_NAME_BYTES) -> str:
        """The UTF-8 string in bytes `start` to `end`."""
        data = self.read(start, end, limit, field)
        try:
            return data.decode()
        except UnicodeDecodeError:
            self.fail(field, start, f"{data[:40]!r} is not UTF-8")

    def ints(self, span: FieldSpan, field: str, limit: int = MAX_LIST_BYTES) -> list[int]:
        """The signed 64-bit integers of one packed field or one run of a repeated varint field."""
        _, wire, start, end, value = span
        if wire != _BYTES and end - start == 2:
            return [value]
        data = self.read(start, end, limit, field)
        skip = 0 if wire == _BYTES else 1
        if len(data) > _SHORT:
            return self._long_ints(data, skip, start, field)
        values: list[int] = []
        i = 0
        try:
            while i < len(data):
                value, i = _varint(data, i + skip)
                values.append(signed64(value))
        except IndexError:
            self.fail(field, start + i, "the packed integers end inside a varint")
        except _LongVarint:
            self.fail(field, start + i, "a varint is longer than 64 bits")
        return values

    def _long_ints(self, data: bytes, skip: int, start: int, field: str) -> list[int]:
        values = np.empty(len(data), np.uint64)
        count = decode_varints(np.frombuffer(data, np.uint8), values)
        if count is None:
            self.fail(field, start, "the packed integers are malformed")
        items: list[int] = values.view(np.int64)[skip : count : 1 + skip].tolist()
        return items

    def all_ints(self, spans: Sequence[FieldSpan], field: str, limit: int = MAX_LIST_BYTES) -> list[int]:
        """The integers of all occurrences of one repeated field."""
        return [value for span in spans for value in self.ints(span, field, limit)]

    def floats(self, span: FieldSpan, field: str, limit: int = MAX_LIST_BYTES) -> list[float]:
        """The 32-bit floats of one packed field or one run of a repeated fixed32 field."""
        _, wire, start, end, _ = span
        data = self.read(start, end, limit, field)
        record = "<f" if wire == _BYTES else "<xf"
        if len(data) % struct.calcsize(record):
            self.fail(field, start, f"{len(data)} bytes of packed floats are no multiple of 4")
        return [value for (value,) in struct.iter_unpack(record, data)]

    def _window(self, start: int, end: int) -> tuple[bytes, int, int, int, int]:
        """Window, its base, and `start`, `end` and the offset up to which a tag and a length surely fit, from there."""
        size = len(self._buffer)
        i = start - self._base
        stop = end - self._base
        if i < 0 or (stop > size and i > size - _LOOKAHEAD):
            self._load(start, min(_LOOKAHEAD, end - start))
            size = len(self._buffer)
            i, stop = 0, end - start
        return self._buffer, self._base, i, stop, stop if stop <= size else size - _LOOKAHEAD + 1

    def _load(self, start: int, size: int) -> None:
        near = 0 <= start - self._base <= len(self._buffer)
        # Reading on doubles the block; a jump (over tensor bytes) starts small again, to read little beyond it.
        self._block = min(self._block * 2, _LAST_BLOCK) if near else _FIRST_BLOCK
        size = min(max(self._block, size), self.source.size - start)
        self._buffer = self.source.read(start, size)
        self._base = start

    def _count(self, pending: int, message: Message, offset: int) -> None:
        if self._fields + pending > MAX_FIELDS:
            self.fail(message.name, offset, f"the file has more than the limit of {MAX_FIELDS} fields")

    def _check_unknown(self, tag: int, offset: int, message: Message) -> None:
        number, wire = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            self.fail(f"a field of {message.name}", offset, f"{number} is no field number")
        kind = _WIRE_NAMES.get(wire)
        if kind is None:
            self.fail(f"field {number} of {message.name}", offset, f"wire type {wire} is not one that ONNX uses")
        if number in message.names:
            self.fail(f"{message.name}.{message.names[number]}", offset, f"stored as {kind}, which it can't be")

    def _overrun(self, tag: int, offset: int, size: int, end: int, message: Message) -> NoReturn:
        field = message.names.get(tag >> 3, f"field {tag >> 3}")
        what = f"its {size} bytes run" if size else "it runs"
        self.fail(f"{message.name}.{field}", offset, f"{what} past the end of the message at byte {end}")


class _LongVarint(Exception):
    """A varint does not fit in 64 bits."""


def _varint(data: bytes, i: int) -> tuple[int, int]:
    """The varint at `i` and the offset after it; IndexError at the end of `data`."""
    value = data[i]
    i += 1
    if value < 128:
        return value, i
    value &= 127
    for shift in (7, 14, 21, 28, 35, 42, 49, 56, 63):
        byte = data[i]
        i += 1
        value |= (byte & 127) << shift
        if byte < 128:
            if value >> 64:
                break
            return value, i
    raise _LongVarint


def signed64(value: int) -> int:
    """The signed integer with the 64 bits of `value`."""
    return value if value < 1 << 63 else value - (1 << 64)


def decode_varints(data: NDArray[np.uint8], out: NDArray[np.uint64]) -> int | None:
    """Decode all varints in `data` into `out`; how many there are, or None when malformed or more than `out` holds."""
    position, count = 0, 0
    while position < data.size:
        chunk = data[position : position + _CHUNK]
        ends = np.flatnonzero(chunk < 128) + 1
        if not ends.size or count + ends.size > out.size:
            return None
        starts = np.concatenate(([0], ends[:-1]))
        if not _decode_chunk(chunk, starts, ends - starts, out[count : count + ends.size]):
            return None
        position += int(ends[-1])
        count += ends.size
    return count


def _decode_chunk(
    chunk: NDArray[np.uint8], starts: NDArray[np.intp], lengths: NDArray[np.intp], out: NDArray[np.uint64]
) -> bool:
    longest = int(lengths.max())
    if longest > 10:
        return False
    out[:] = chunk[starts] & 127
    for k in range(1, longest):
        rows = np.flatnonzero(lengths > k)
        byte = chunk[starts[rows] + k]
        if k == 9 and bool((byte > 1).any()):
            return False
        out[rows] |= (byte & 127).astype(np.uint64) << np.uint64(7 * k)
    return True
