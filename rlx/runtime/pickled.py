"""How a compiled graph travels to another process: pickle, joblib, multiprocessing, Ray.

A model of an unchanged file travels as the path of that file and its options, and comes back from the cache there. Any
other travels as an artifact, with its graph and weights. States, bound inputs and feeds travel as they are. A pickle
holds strings, numbers, bytes, and tuples and dicts of those; the two functions at the end load it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.disk import read_regular
from rlx.errors import ModelFormatError
from rlx.ir.mapped import identity_of
from rlx.options import CompileOptions
from rlx.records import names_of
from rlx.runtime.container import ENDING

if TYPE_CHECKING:
    from rlx.runtime.compiled import CompiledGraph

__all__ = ["from_artifact", "from_file", "reduced"]

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


def reduced(model: CompiledGraph) -> Reduced:
    """What `__reduce__` gives: a function of this module and its arguments."""
    kept = (_states(model), dict(model._executable.feeds))
    if model._origin is not None and not model._changed and not model.adapters.table():
        path, identity, asked = model._origin
        options = _given(asked)
        if options is not None:
            return from_file, (path, tuple(identity), options, *kept)
    return from_artifact, (_artifact(model), _given(model._options.with_options({"dims": None})), model.device, *kept)


def _given(options: CompileOptions) -> dict[str, Any] | None:
    """The options that differ from their defaults, as builtin types; None where dims have others."""
    default = CompileOptions()
    given = {name: getattr(options, name) for name in names_of(options)}
    given = {name: value for name, value in given.items() if value != getattr(default, name)}
    if "cache_dir" in given:
        given["cache_dir"] = os.fsdecode(given["cache_dir"])
    try:
        return {name: _builtin(value) for name, value in given.items()}
    except TypeError:
        return None


def _builtin(value: Any) -> Any:
    """A value of dicts, lists, strings and numbers as such; raises `TypeError` for others, as a Dim is."""
    if isinstance(value, Mapping):
        return {_builtin(key): _builtin(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(_builtin, value))
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"{value!r} is no builtin")


def _states(model: CompiledGraph) -> bytes | None:
    if "states" not in model.capabilities or not len(model.states):
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "states")
        model.states.save(path)
        return read_regular(path)


def _artifact(model: CompiledGraph) -> bytes:
    """A portable artifact, or with the code of this machine where only packed weights are left of some params."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"model{ENDING}")
        lost = any(
            spec.name not in model._unset and model._executable.raw_param(spec.name) is None for spec in model.params
        )
        model.save(path, portable=not (lost and "save" in model.capabilities))
        return read_regular(path)


def from_file(
    path: str, identity: tuple[int, ...], options: dict[str, Any], states: bytes | None, feeds: dict[str, int]
) -> CompiledGraph:
    """The model of a file that is as it was; raises `ModelFormatError` for one that has changed or is not there."""
    from rlx.runtime.session import load

    try:
        now = tuple(identity_of(os.stat(path)))
    except OSError as error:
        raise ModelFormatError(f"{path}: the pickle is of a model of this file: {error.strerror}") from None
    if now != identity:
        raise ModelFormatError(f"{path}: has changed since the model in the pickle was loaded from it: pickle it anew")
    return _as_it_was(load(path, **options), states, feeds)


def from_artifact(
    data: bytes, options: dict[str, Any], device: str, states: bytes | None, feeds: dict[str, int]
) -> CompiledGraph:
    """The model of an artifact that the pickle holds."""
    from rlx.runtime.session import load_artifact

    with tempfile.TemporaryDirectory() as folder:  # what is mapped stays when its name is gone
        path = Path(folder, f"model{ENDING}")
        path.write_bytes(data)
        return _as_it_was(load_artifact(path, **{**options, "device": device}), states, feeds)


def _as_it_was(model: CompiledGraph, states: bytes | None, feeds: dict[str, int]) -> CompiledGraph:
    if states is not None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "states")
            path.write_bytes(states)
            model.states.load(path)
    for name, number in feeds.items():
        model.states[name].feed(number)
    return model
