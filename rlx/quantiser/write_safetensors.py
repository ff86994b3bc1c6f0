"""safetensors files, written tensor by tensor. (https://github.com/huggingface/safetensors)"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

from rlx.errors import OptionError
from rlx.importers.safetensors import CODES
from rlx.ir.graph import Array
from rlx.quantiser.rules import stored_bytes

__all__ = ["write_safetensors"]


def write_safetensors(
    file: BinaryIO,
    metadata: Mapping[str, str],
    tensors: Mapping[str, tuple[tuple[int, ...], str]],
    parts: Iterable[Iterable[Array]],
) -> int:
    """Writes a whole file; `tensors` are shapes and types by name, `parts` their bytes in the same order.

    Returns the bytes written. Raises `OptionError` for a type that safetensors can't hold.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (shape, kind) in tensors.items():
        if kind not in CODES:
            raise OptionError(f"tensor {name!r}: a safetensors file can't hold {kind}; write to a .gguf file")
        size = stored_bytes(kind, shape)
        header[name] = {"dtype": CODES[kind], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    size = 8 + len(text)
    for data in parts:
        for part in data:
            size += file.write(part.data)
    return size
