"""What a model file says of itself beside its graph and weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlx.boundary import bounded
from rlx.disk import MAGIC, is_artifact, path_of, read_regular
from rlx.errors import ModelFormatError
from rlx.importers.formats import is_onnx
from rlx.importers.objects import Held, model_bytes
from rlx.install import instead_of

__all__ = ["metadata"]


@bounded("metadata", ModelFormatError)
def metadata(model: str | os.PathLike[str] | Held) -> dict[str, Any]:
    """What a model file says of itself, by key: names of classes, letters, a chat template, who made it.

    Texts of an ONNX file (its path, bytes, open file or ModelProto; `metadata_props`) and of a safetensors file; of a
    GGUF file, of several the first, also numbers, bools and lists. Only headers are read; {} where there is none.
    Raises `ModelFormatError` for other files.
    """
    if not isinstance(model, str | os.PathLike):
        from rlx.importers.onnx.model import read_model

        return dict(read_model(model_bytes(model, call="metadata")).metadata)
    text = path_of(model, "metadata")
    ending = Path(text).suffix.lower()
    try:
        head = read_regular(Path(text), len(MAGIC))
    except OSError as error:
        raise ModelFormatError(f"{text}: can't be read: {error.strerror or error}{instead_of(text)}") from None
    if is_artifact(head) or ending == ".rlx":
        raise ModelFormatError(f"{text}: has no metadata: give the model file that it was made from")
    if head.startswith(b"GGUF"):
        from rlx.importers.gguf import GgufArray, read_gguf

        found = read_gguf(text).metadata
        return {key: value.values() if isinstance(value, GgufArray) else value for key, value in found.items()}
    if ending == ".safetensors":
        from rlx.importers.safetensors import read_safetensors

        return dict(read_safetensors(text).metadata)
    if ending != ".onnx" and not is_onnx(head):
        raise ModelFormatError(f"{text}: is no model that is known: expected .onnx, .gguf or .safetensors")
    from rlx.importers.onnx.model import read_model

    return dict(read_model(text).metadata)
