"""Tensors of files of weights: their types, and their bytes where they lie in the mapped file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from rlx.ir.dtype import DTYPES, dtype_of, unpack
from rlx.ir.encodings import ENCODINGS
from rlx.ir.graph import Array, TensorType
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.importers.gguf import GgufFile
    from rlx.importers.safetensors import SafetensorsFile

__all__ = ["Stored", "gguf_tensors", "safetensors_tensors"]


@dataclass(frozen=True)
class Stored:
    """One tensor of a file. `read` gives elements, or blocks (u8) of the `encoding`, which may be an unknown one."""

    type: TensorType
    encoding: str | None
    read: Callable[[], Array]


def safetensors_tensors(files: Iterable[SafetensorsFile]) -> Iterator[tuple[str, Stored]]:
    """Those of safetensors files by name."""
    for file in files:
        for name, tensor in file.tensors.items():
            type = TensorType(tensor.shape, tensor.dtype)
            whole = tensor.dtype.bits >= 8
            yield name, Stored(type, None, partial(file.array, name) if whole else partial(_nibbles, file, name, type))


def _nibbles(file: SafetensorsFile, name: str, type: TensorType) -> Array:
    """4-bit elements, one to a byte; the file has two, the first in the low bits."""
    return unpack(file.array(name).reshape(-1), type.dtype, file.tensors[name].shape)


def gguf_tensors(files: Iterable[GgufFile]) -> Iterator[tuple[str, Stored]]:
    """Those of the parts of a GGUF model by name; elements that are no blocks have the type of the file."""
    for file in files:
        for name, tensor in file.tensors.items():
            if tensor.type.block > 1:
                type = TensorType(tensor.shape, DTYPES["f32"], ENCODINGS.get(tensor.type.name))
                yield name, Stored(type, tensor.type.name, partial(file.raw, name))
            else:
                type = TensorType(tensor.shape, dtype_of(tensor.type.name))
                yield name, Stored(type, None, partial(_gguf_elements, file, name, type))


def _gguf_elements(file: GgufFile, name: str, type: TensorType) -> Array:
    return file.raw(name).view(type.dtype.numpy).reshape(file.tensors[name].shape)
