"""How the vectors of a text's tokens become one of the text, as the model's files say."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlx import numpy as rnp
from rlx import ops
from rlx.errors import ModelFormatError, OptionError
from rlx.importers.sources import read_file
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.models.source import Source
from rlx.records import dataclass, field

__all__ = ["POOLINGS", "Pooling", "pooled", "pooling_of"]

POOLINGS = ("mean", "cls", "last", "max", "mean_sqrt", "weighted_mean")
MAX_BYTES = 1 << 20  # of a JSON file
GGUF_KINDS = ("none", "mean", "cls", "last", "rank")  # by their numbers
CONFIG_KINDS = {  # of sentence-transformers
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
OTHER_NAMES = {"lasttoken": "last", "weightedmean": "weighted_mean", "mean_sqrt_len_tokens": "mean_sqrt"}


@dataclass(frozen=True)
class Pooling:
    """`kind` is one of POOLINGS; `normalised`: vectors have the length 1.

    `longest`: tokens of a text that the model was trained for, None where files don't say. `prompts`: texts that stand
    before others, by name, and the name of the one that stands where none is given.
    """

    kind: str = "mean"
    normalised: bool = True
    longest: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    prompt: str | None = None


def pooling_of(source: Source) -> Pooling:
    """What the files say.

    GGUF files have a number for the kind and don't say whether vectors are normalised: they are, as in llama.cpp's
    programs. Folders have the files of sentence-transformers; without them it is the mean, as in that library.
    Raises `ModelFormatError` for what is not known.
    """
    if source.gguf:
        number = source.facts.fields.number("pooling_type", default=1)
        kind = GGUF_KINDS[number] if number < len(GGUF_KINDS) else str(number)
        if kind == "none":
            kind = "mean"
        if kind not in POOLINGS:
            raise ModelFormatError(f"{source.path}: pooling_type {kind} is not known; known are mean, cls and last")
        return Pooling(kind)
    folder = Path(source.path).parent
    told = _object(folder / "config_sentence_transformers.json")
    prompts, default = told.get("prompts") or {}, told.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(t, str) for t in prompts.values()):
        raise ModelFormatError(f"{folder}: config_sentence_transformers.json: prompts: expected texts by name")
    if default is not None and not (isinstance(default, str) and default in prompts):
        raise ModelFormatError(f"{folder}: config_sentence_transformers.json: there is no prompt {default!r:.60}")
    longest = _object(folder / "sentence_bert_config.json").get("max_seq_length")
    kind, normalised = _modules(folder)
    return Pooling(kind, normalised, longest if type(longest) is int and longest > 0 else None, prompts, default)


def _modules(folder: Path) -> tuple[str, bool]:
    """The kind of pooling, and whether vectors are normalised, of modules.json."""
    modules = _json(folder / "modules.json")
    if modules is None:
        return "mean", False
    kind, normalised = "mean", False
    for module in modules if isinstance(modules, list) else [modules]:
        given = module if isinstance(module, dict) else {}
        name = str(given.get("type")).rpartition(".")[2]
        if name == "Normalize":
            normalised = True
        elif name == "Pooling":
            path = given.get("path")
            if not isinstance(path, str) or "/" in path or "\\" in path or path in ("", ".", ".."):
                raise ModelFormatError(f"{folder}: modules.json: Pooling: {path!r:.60} is no name of a folder")
            kind = _kind(folder / path / "config.json")
        elif name != "Transformer":
            raise ModelFormatError(
                f"{folder}: modules.json: {name!r:.60} is not known; known are Transformer, Pooling and Normalize"
            )
    return kind, normalised


def _kind(path: Path) -> str:
    config = _object(path)
    kinds = [kind for key, kind in CONFIG_KINDS.items() if config.get(key)]
    if "pooling_mode" in config and not kinds:
        given = str(config["pooling_mode"])
        kinds = [OTHER_NAMES.get(given, given)]
    if len(kinds) != 1 or kinds[0] not in POOLINGS:
        raise ModelFormatError(f"{path}: expected one kind of pooling of {', '.join(POOLINGS)}; got {kinds or 'none'}")
    if config.get("include_prompt", True) is not True:
        raise ModelFormatError(f"{path}: include_prompt=false, which leaves prompts out of the pooling, is not known")
    return kinds[0]


def _json(path: Path) -> Any:
    """What a small JSON file holds, None where there is none."""
    if not os.path.isfile(path):
        return None
    try:
        return json.loads(read_file(path, MAX_BYTES).decode())
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: is no JSON: {error}") from None


def _object(path: Path) -> dict[str, Any]:
    found = _json(path)
    if found is not None and not isinstance(found, dict):
        raise ModelFormatError(f"{path}: expected an object, got {type(found).__name__}")
    return found or {}


def pooled(x: Value, counts: Value, places: Value, kind: str, normalised: bool) -> Value:
    """[batch, tokens, hidden] and how many tokens count of each text [batch] (i64) -> [batch, hidden].

    `places` are 0, 1, ... (i64 [tokens]). Raises `OptionError`.
    """
    if kind not in POOLINGS:
        raise OptionError(f"pooling={kind!r}: expected {', '.join(POOLINGS)}")
    count = counts[:, None]
    place = places[None, :]
    if kind in ("cls", "last"):
        counted = rnp.equal(place, count * np.int64(0) if kind == "cls" else count - np.int64(1))
    else:
        counted = rnp.less(place, count)
    counted = counted[:, :, None]
    if kind == "max":
        y = rnp.max(rnp.where(counted, x, np.float32(-np.inf)), axis=1)
    else:
        weighted = x * _float(place + np.int64(1))[:, :, None] if kind == "weighted_mean" else x
        y = rnp.sum(rnp.where(counted, weighted, np.float32(0)), axis=1)
        n = _float(count)
        match kind:
            case "mean":
                y = y / n
            case "mean_sqrt":
                y = y / rnp.sqrt(n)
            case "weighted_mean":
                y = y / (n * (n + np.float32(1)) * np.float32(0.5))
    if normalised:
        y = y / rnp.maximum(rnp.sqrt(rnp.sum(y * y, axis=1, keepdims=True)), np.float32(1e-12))
    made: Value = y
    return made


def _float(x: Value) -> Value:
    made: Value = ops.cast(x, to=DTYPES["f32"])
    return made
