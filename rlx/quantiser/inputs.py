"""Inputs to calibrate and compare with: files, folders of them, arrays, or a function that gives them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.errors import OptionError, no_such
from rlx.ir.graph import Array
from rlx.progress import report
from rlx.runtime.archives import npy_array, open_archive, read_npy

__all__ = ["Inputs", "sets_of"]

Given = str | os.PathLike[str] | Mapping[str, Any] | Iterable[Mapping[str, Any]] | Callable[[], Iterable[Any]]
MAX_FILES = 1 << 16
ENDINGS = (".npz", ".npy")


class Inputs:
    """Sets of arrays by the names of a model's inputs, read anew for each use; `count` of them, where that is known."""

    def __init__(self, make: Callable[[], Iterable[Mapping[str, Array]]], count: int | None = None) -> None:
        self.make = make
        self.count = count

    def __iter__(self) -> Iterator[Mapping[str, Array]]:
        empty = True
        for one in self.make():
            if not isinstance(one, Mapping):
                raise OptionError(
                    f"inputs=: expected mappings from names of inputs to arrays, got {type(one).__name__}"
                )
            empty = False
            yield one
        if empty:
            raise OptionError("inputs=: expected at least one set of inputs, got none")

    def told(self, stage: str) -> Iterator[Mapping[str, Array]]:
        """The sets; how many are used is reported as progress of a stage."""
        for number, one in enumerate(self, 1):
            yield one
            report(stage, number / (self.count or number + 1), f"set {number}")


def sets_of(given: Given, names: Sequence[str]) -> Inputs:
    """What a user gives as `inputs=`, for a model with inputs of these names.

    An npz file has the arrays of one set by name, an npy file the only input; a folder has files of these, taken in the
    order of their names. A function is called for each use. Raises `OptionError`.
    """
    if isinstance(given, str | os.PathLike):
        path = Path(given)
        files = _files(path)
        return Inputs(lambda: (_of_file(file, names) for file in files), len(files))
    if isinstance(given, Mapping):
        one = _checked(given, names, "inputs=")
        return Inputs(lambda: [one], 1)
    if callable(given):
        make = given
        return Inputs(lambda: (_checked(one, names, "inputs=") for one in make()))
    if isinstance(given, Iterable):
        kept = [_checked(one, names, "inputs=") for one in given]
        return Inputs(lambda: kept, len(kept))
    raise OptionError(f"inputs=: expected a path, arrays by name, a list of these or a function, got {given!r:.60}")


def _files(path: Path) -> list[Path]:
    if not os.path.isdir(path):
        if path.suffix.lower() not in ENDINGS:
            raise OptionError(f"{path}: expected a folder, an .npz or an .npy file of inputs")
        return [path]
    found = sorted(p for p in path.iterdir() if p.suffix.lower() in ENDINGS)
    if not found or len(found) > MAX_FILES:
        raise OptionError(f"{path}: has {len(found)} .npz and .npy files: expected 1 to {MAX_FILES}")
    return found


def _of_file(path: Path, names: Sequence[str]) -> Mapping[str, Array]:
    if path.suffix.lower() == ".npy":
        if len(names) != 1:
            raise OptionError(f"{path}: is a single array, the model has inputs {', '.join(names)}: give an .npz file")
        return {names[0]: read_npy(path)}
    with open_archive(path, "is not a whole .npz file of numbers") as bundle:
        entries = {entry.removesuffix(".npy"): entry for entry in bundle.namelist()}
        missing = next((name for name in names if name not in entries), None)
        if missing is not None:
            raise no_such("array", missing, entries, "; each input needs one", call=str(path))
        return {name: npy_array(bundle, entries[name]) for name in names}


def _checked(given: Any, names: Sequence[str], what: str) -> Mapping[str, Array]:
    if not isinstance(given, Mapping):
        raise OptionError(f"{what} expected arrays by the names of inputs, got {type(given).__name__}")
    for name in given:
        if name not in names:
            raise no_such("input", name, names)
    missing = next((name for name in names if name not in given), None)
    if missing is not None:
        raise OptionError(f"{what} there is no array for input {missing!r}")
    return dict(given)
