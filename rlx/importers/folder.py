"""Models as folders: safetensors files with the config.json of transformers beside them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rlx.errors import ModelFormatError
from rlx.importers.safetensors import SafetensorsFile, read_safetensors, read_safetensors_index
from rlx.importers.sources import read_file

__all__ = ["read_folder", "read_json", "weights_of"]

MAX_CONFIG_BYTES = 16 << 20


def read_folder(path: str | os.PathLike[str]) -> tuple[list[SafetensorsFile], Path, dict[str, Any]]:
    """The headers of a model's weights, the path of its config.json, and what that says.

    `path` is the folder, a safetensors file in it, or the index of several. Raises `ModelFormatError`.
    """
    path = weights_of(path)
    files = read_safetensors_index(path) if path.suffix == ".json" else [read_safetensors(path)]
    config = path.parent / "config.json"
    if not os.path.exists(config):
        raise ModelFormatError(
            f"{path}: config.json is not beside it: what a safetensors model computes depends on that; put it there "
            "(WeightRegistry.load reads weights alone)"
        )
    return files, config, read_json(config)


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file. Raises `ModelFormatError`."""
    try:
        fields = json.loads(read_file(path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelFormatError):
            raise
        raise ModelFormatError(f"{path}: is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ModelFormatError(f"{path}: expected a JSON object, got {type(fields).__name__}")
    return fields


def weights_of(path: str | os.PathLike[str]) -> Path:
    """The index or the file of a folder with safetensors; what is no folder, as it is. Raises `ModelFormatError`."""
    path = Path(path)
    if not os.path.isdir(path):  # methods of `Path` may raise
        return path
    names = "model.safetensors.index.json", "model.safetensors"
    found = next((path / name for name in names if os.path.exists(path / name)), None)
    if found is None:
        raise ModelFormatError(
            f"{path}: read as a safetensors model, but {' or '.join(names)} is not to be found there"
        )
    return found
