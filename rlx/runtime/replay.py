"""Recording what runs were given and gave, and replaying it: for reports of faults, and after a change."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.base import TensorSpec
from rlx.boundary import bounded, bounded_class
from rlx.disk import path_of, saving, target_of
from rlx.errors import ExecutionError, ModelFormatError, OptionError
from rlx.ir.graph import Array
from rlx.records import dataclass
from rlx.runtime.archives import check_stored, npy_array, open_archive
from rlx.runtime.arrays import snapshot

if TYPE_CHECKING:
    from rlx.runtime.compiled import CompiledGraph

__all__ = ["Recorder", "Replay", "record", "replay"]


@dataclass(frozen=True)
class Replay:
    """How replayed outputs compare: `differing` names (run, output) that are not equal to the bit."""

    runs: int
    differing: tuple[tuple[int, str], ...]

    @property
    def ok(self) -> bool:
        """Whether every output of every run is equal to the bit."""
        return not self.differing


@bounded_class(ExecutionError)
class Recorder:
    """Runs a model and keeps copies of what goes in and comes out."""

    def __init__(self, model: CompiledGraph) -> None:
        self.model = model
        self.arrays: dict[str, Array] = {}
        self.runs = 0

    def run(self, inputs: Mapping[str, Any] | Sequence[Any], *more: Any) -> list[Any]:
        """As `CompiledGraph.run`; a run that raises is not kept."""
        if more:
            from rlx.runtime.misuse import one_set_of_inputs

            raise one_set_of_inputs(more)
        given = [snapshot(a) for a in self.model._admit(self.model._given(inputs))]
        made = self.model._tensors(given)
        for kind, specs, arrays in (("in", self.model.inputs, given), ("out", self.model.outputs, made)):
            for spec, array in zip(specs, arrays, strict=True):
                self.arrays[f"{self.runs}/{kind}/{spec.name}"] = _plain(np.asarray(array)).copy()
        self.runs += 1
        return self.model._grouped(made)


@contextmanager
def record(model: CompiledGraph, path: str | os.PathLike[str]) -> Iterator[Recorder]:
    """Gives a `Recorder`; what it ran is written to `path` (npz) at the end, also when the block raises.

    Raises `OptionError` for what is no path, or where it can't be written.
    """
    target_of(path, "record")
    recorder = Recorder(model)
    try:
        yield recorder
    finally:
        with saving(path, "record") as file:
            np.savez(file, **recorder.arrays)  # type: ignore[arg-type]


@bounded("replay", ExecutionError)
def replay(model: CompiledGraph, path: str | os.PathLike[str]) -> Replay:
    """Runs the model on recorded inputs, in order, and compares the outputs to the bit.

    States are those of the model: start as the recording did. Raises `ModelFormatError` for another kind of
    file, `OptionError` for one without runs or of a model with other inputs or outputs.
    """
    name = path_of(path, "replay")
    with open_archive(name, "not a recording, which `CompiledGraph.record` writes, or not whole") as bundle:
        for entry in bundle.namelist():
            check_stored(bundle, entry)
        arrays = {entry.removesuffix(".npy"): npy_array(bundle, entry) for entry in bundle.namelist()}
    numbers = [n for key in arrays if (n := key.partition("/")[0]).isdecimal() and len(n) <= 9]
    count = 1 + max(map(int, numbers), default=-1)
    if not count:
        raise OptionError(f"{name}: no runs are recorded there")
    differing = []
    for run in range(count):
        keys = {f"{run}/{kind}/{s.name}" for kind, specs in _specs(model) for s in specs}
        if missing := sorted(keys - arrays.keys()):
            raise OptionError(f"{name}: recorded of another model: there is no {missing[0]!r}")
        given = [_typed(name, arrays[f"{run}/in/{s.name}"], s) for s in model.inputs]
        for spec, got in zip(model.outputs, model._tensors(given), strict=True):
            want = arrays[f"{run}/out/{spec.name}"]
            if got.shape != want.shape or np.asarray(got).tobytes() != want.tobytes():
                differing.append((run, spec.name))
    return Replay(count, tuple(differing))


def _specs(model: CompiledGraph) -> tuple[tuple[str, Sequence[Any]], ...]:
    return ("in", model.inputs), ("out", model.outputs)


def _typed(path: str, array: Array, spec: TensorSpec) -> Array:
    """An array as `_plain` wrote it."""
    try:
        return array.view(spec.dtype.numpy)
    except (TypeError, ValueError) as error:
        raise ModelFormatError(f"{path}: {spec.name!r} has elements of {array.dtype}, not {spec.dtype}") from error


def _plain(array: Array) -> Array:
    """The array as a type that NumPy files have: others as unsigned integers of their size."""
    return array if array.dtype.kind in "biufc" and array.dtype.isbuiltin == 1 else array.view(f"u{array.itemsize}")
