"""GGUF files, version 3, written tensor by tensor. (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO

from rlx.errors import OptionError
from rlx.importers.gguf import GGML_TYPES, GgufFile
from rlx.ir.graph import Array
from rlx.quantiser.rules import stored_bytes
from rlx.records import dataclass

__all__ = ["FILE_TYPES", "Typed", "copied_pairs", "pair", "write_gguf"]

ALIGNMENT = 32
_NUMBERS = {kind.name: number for number, kind in GGML_TYPES.items()}
FILE_TYPES = {  # general.file_type, as llama.cpp numbers them
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k": 12, "q3_k_m": 12,
    "q4_k": 14, "q4_k_m": 15, "q5_k": 16, "q5_k_m": 17, "q6_k": 18, "iq4_nl": 25, "iq4_xs": 30, "bf16": 32,
    "tq1_0": 36, "tq2_0": 37, "mxfp4": 38,
}  # fmt: skip
_FORMATS = {"u32": (4, "<I"), "i32": (5, "<i"), "f32": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q")}
_TEXT, _LIST = 8, 9


@dataclass(frozen=True)
class Typed:
    """A value of the metadata: `kind` is u32, i32, f32, bool, u64 or text; a list of values is an array."""

    kind: str
    value: Any


def copied_pairs(file: GgufFile, without: Iterable[str] = ()) -> list[bytes]:
    """The metadata of a file as it is written there, without those keys."""
    gone, view = set(without), file.source.view()
    return [view[a:b].tobytes() for key, (a, b) in file.pairs.items() if key not in gone]


def pair(key: str, value: Typed) -> bytes:
    """A key with its value as GGUF writes it."""
    if not isinstance(value.value, list | tuple):
        return _text(key) + struct.pack("<I", _number_of(value.kind)) + _item(value.kind, value.value)
    head = struct.pack("<IIQ", _LIST, _number_of(value.kind), len(value.value))
    return _text(key) + head + b"".join(_item(value.kind, item) for item in value.value)


def _number_of(kind: str) -> int:
    return _TEXT if kind == "text" else _FORMATS[kind][0]


def _item(kind: str, item: Any) -> bytes:
    return _text(item) if kind == "text" else struct.pack(_FORMATS[kind][1], item)


def _text(text: str) -> bytes:
    data = text.encode("utf-8", errors="surrogateescape")
    return struct.pack("<Q", len(data)) + data


def write_gguf(
    file: BinaryIO,
    pairs: Sequence[bytes],
    tensors: Mapping[str, tuple[tuple[int, ...], str]],
    parts: Iterable[Iterable[Array]],
) -> int:
    """Writes a whole file; `tensors` are shapes and types by name, `parts` their bytes in the same order.

    Returns the bytes written. Raises `OptionError` for a type that GGUF has no number for.
    """
    infos, at = [], 0
    for name, (shape, kind) in tensors.items():
        if kind not in _NUMBERS:
            raise OptionError(f"tensor {name!r}: a GGUF file can't hold {kind}; it can {', '.join(_NUMBERS)}")
        head = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], _NUMBERS[kind], at)
        infos.append(_text(name) + head)
        at = _aligned(at + stored_bytes(kind, shape))
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(pairs)) + b"".join((*pairs, *infos))
    file.write(header)
    size = _pad(file, len(header))
    for (name, (shape, kind)), data in zip(tensors.items(), parts, strict=True):
        wrote = 0
        for part in data:
            wrote += file.write(part.data)
        if wrote != stored_bytes(kind, shape):
            raise AssertionError(f"{name}: {wrote} bytes of {kind} {shape}")
        size = _pad(file, size + wrote)
    return size


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pad(file: BinaryIO, size: int) -> int:
    file.write(bytes(_aligned(size) - size))
    return _aligned(size)
