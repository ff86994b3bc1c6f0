"""The tensors of a file of weights, by name: safetensors, npz, GGUF and ONNX."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlx.errors import DTypeError, ModelFormatError, NameNotFound, OptionError
from rlx.importers.stored import Stored, gguf_tensors, safetensors_tensors
from rlx.ir.dtype import DType, dtype_of
from rlx.ir.graph import Array, TensorType
from rlx.runtime.archives import npy_array, npy_header, open_archive

__all__ = ["Stored", "chosen_names", "read_weights"]


def read_weights(path: Path) -> dict[str, Stored]:
    """All tensors by name; their bytes stay in the file. Raises `ModelFormatError`."""
    reader = next((r for ending, r in _READERS.items() if path.name.lower().endswith(ending)), None)
    if reader is None:
        raise ModelFormatError(f"{path}: not a file of weights; known are {', '.join(_READERS)}")
    return dict(reader(path))


def chosen_names(names: Mapping[str, object], patterns: Mapping[str, str] | None, path: Path) -> dict[str, str]:
    """Tensor of the file -> name to give it. In a pattern `{}` stands for any text, and is put in for `{}` in turn.

    Of several patterns that match, the first counts. Raises `NameNotFound` for a pattern that matches nothing,
    `OptionError` for two tensors of one name.
    """
    if patterns is None:
        return {name: name for name in names}
    found: dict[str, str] = {}
    for pattern, target in patterns.items():
        holes = pattern.count("{}")
        if target.count("{}") > holes:
            raise OptionError(f"names: {target!r} has more {{}} than {pattern!r}")
        rule = re.compile("(.+?)".join(map(re.escape, pattern.split("{}"))), re.DOTALL)
        matches = [(name, m.groups()) for name in names if (m := rule.fullmatch(name))]
        if not matches:
            some = ", ".join(map(repr, list(names)[:8])) or "none"
            raise NameNotFound(f"{path}: no tensor matches {pattern!r}; there are {some}{', …' * (len(names) > 8)}")
        for name, parts in matches:
            texts = [*parts[: target.count("{}")], ""]
            found.setdefault(name, "".join(a + b for a, b in zip(target.split("{}"), texts, strict=True)))
    taken: dict[str, str] = {}
    for name, target in found.items():
        if target in taken:
            raise OptionError(f"names: {taken[target]!r} and {name!r} would both be {target!r}")
        taken[target] = name
    return found


def _safetensors(path: Path) -> Iterator[tuple[str, Stored]]:
    from rlx.importers.safetensors import read_safetensors, read_safetensors_index

    return safetensors_tensors(read_safetensors_index(path) if path.suffix == ".json" else [read_safetensors(path)])


def _gguf(path: Path) -> Iterator[tuple[str, Stored]]:
    from rlx.importers.gguf import read_gguf_parts

    return gguf_tensors(read_gguf_parts(path))


def _onnx(path: Path) -> Iterator[tuple[str, Stored]]:
    from rlx.importers.onnx.mapping import element_dtype
    from rlx.importers.onnx.model import read_model

    for name, ref in read_model(path).graph.initializers.items():
        type = TensorType(ref.dims, element_dtype(ref.elem_type))
        yield name, Stored(type, None, partial(ref.array, aligned=False))


def _npz(path: Path) -> Iterator[tuple[str, Stored]]:
    with open_archive(path, "is no npz file") as bundle:
        for entry in bundle.namelist():
            if entry.endswith(".npy"):
                shape, dtype = npy_header(bundle, entry)
                type = TensorType(shape, _known(path, entry, dtype))
                yield entry.removesuffix(".npy"), Stored(type, None, partial(_npz_array, path, entry))


def _known(path: Path, entry: str, dtype: np.dtype[Any]) -> DType:
    try:
        return dtype_of(dtype)
    except DTypeError as error:
        raise ModelFormatError(f"{path}: {entry}: {error}") from None


def _npz_array(path: Path, entry: str) -> Array:
    with open_archive(path, "is no npz file") as bundle:
        return npy_array(bundle, entry)


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Stored]]]] = {
    ".safetensors": _safetensors,
    ".index.json": _safetensors,
    ".gguf": _gguf,
    ".onnx": _onnx,
    ".npz": _npz,
}
