"""The graph of a language model's files, as `rlx.load` asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from rlx.errors import OptionError
from rlx.ir.graph import Graph
from rlx.models.decoder import build_decoder
from rlx.models.encoder import build_encoder
from rlx.models.families import is_encoder
from rlx.models.source import open_source

__all__ = ["load"]

DECODERS = ("context", "batch", "prefill", "kv_dtype", "sampling", "lora", "rings")  # the dims of each kind
ENCODERS = ("context", "batch", "pooling", "normalised")


def load(
    path: str | os.PathLike[str],
    *,
    dims: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
    admit: Callable[[str, int], None] = lambda model, nbytes: None,
) -> Graph:
    """The graph of a decoder or an encoder: `dims` are the keywords of `build_decoder` or `build_encoder`.

    Raises `ModelFormatError`, and `OptionError` for other dims and for values.
    """
    if values:
        raise OptionError(f"{path}: values= is for ONNX files: no input of a language model decides ranks")
    source, given = open_source(path), dict(dims or {})
    encodes = is_encoder(source)
    known = ENCODERS if encodes else DECODERS
    for name in given:
        if name not in known:
            raise OptionError(f"dims: this language model has no {name!r}; it has {', '.join(known)}")
    return build_encoder(source, **given).graph if encodes else build_decoder(source, **given).graph
