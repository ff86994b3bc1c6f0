"""Which reader a model's tokenizer is read by."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlx.errors import ModelFormatError
from rlx.heap import give_back_heap
from rlx.importers.gguf import GgufFile, read_gguf
from rlx.models.tokenizer.gguf import tokenizer_of_metadata
from rlx.models.tokenizer.tokenizer import Tokenizer
from rlx.progress import seldom_collected

__all__ = ["load"]


def load(source: str | os.PathLike[str] | GgufFile | Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a model: a GGUF file (path, header or its metadata), or a folder with tokenizer.json.

    Raises `ModelFormatError` for files that are malformed or of a kind that is not known, `DeviceUnavailable` where the
    library `tokenizers` is missing.
    """
    with seldom_collected:  # some 10^5 pairs and texts, none of which is garbage
        made = _loaded(source)
    give_back_heap()  # what the library was given: as much again as it keeps
    return made


def _loaded(source: str | os.PathLike[str] | GgufFile | Mapping[str, Any]) -> Tokenizer:
    if isinstance(source, GgufFile):
        return tokenizer_of_metadata(source.metadata, source.path)
    if isinstance(source, Mapping):
        return tokenizer_of_metadata(source, "the metadata")
    path = Path(source)
    if os.path.isdir(path):
        from rlx.models.tokenizer.folder import tokenizer_of_folder

        return tokenizer_of_folder(path)
    if not os.path.exists(path):
        raise ModelFormatError(f"{path}: there is no such file or folder")
    header = read_gguf(path)
    return tokenizer_of_metadata(header.metadata, header.path)
