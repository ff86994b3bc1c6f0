"""States as users see them: what lives between the runs of a compiled graph.

A state is declared in the graph, or is an input that was bound. Each clone has its own.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.base import TensorSpec
from rlx.boundary import bounded_class
from rlx.disk import path_of, saving
from rlx.errors import DTypeError, ExecutionError, ModelFormatError, NameNotFound, OptionError, ShapeError, no_such
from rlx.ir.dtype import DTYPES
from rlx.ir.extents import bind_extents
from rlx.ir.graph import Array
from rlx.ir.shape import evaluate
from rlx.runtime.archives import check_shape, open_archive, read_stored
from rlx.runtime.arrays import to_array

if TYPE_CHECKING:
    from rlx.runtime.compiled import CompiledGraph

__all__ = ["State", "States"]

HEADER = "rlx-states.json"  # the entry of a file of states that says what the others are
VERSION = 1


@bounded_class(ExecutionError)
class State:
    """One state: `spec` has its name, shape and element type."""

    def __init__(self, model: CompiledGraph, spec: TensorSpec) -> None:
        self._model = model
        self.spec = spec

    def __repr__(self) -> str:
        return f"<State {self.spec}>"

    def read(self) -> Any:
        """A copy of the value now: a NumPy array, or an `rlx.Array` on a device; the elements, if it is encoded."""
        held, encoding = self._held(), self.spec.encoding
        return held if encoding is None else encoding.decode(np.asarray(held), _sizes(self.spec))

    def _held(self) -> Any:
        """What is stored: bytes, if it is encoded."""
        return self._model._executable.read_state(self.spec.name)

    def write(self, array: Any) -> None:
        """Sets the value. An encoded one takes elements, which are encoded, or its stored bytes (u8, 1-D).

        Raises `DTypeError` or `ShapeError`, and then changes nothing.
        """
        self._model._executable.write_state(self.spec.name, self._check(array))

    def read_rows(self, index: tuple[int | slice, ...]) -> Array:
        """A copy of a part of what is stored: `index` is of all axes but the last, whose elements stay together.

        Of an encoded state that part is bytes (u8). The last axis must then be of whole blocks, else `ShapeError`.
        """
        shape, dtype = self.stored
        found: list[Array] = []

        def copy(held: Array) -> None:
            found.append(held.view(dtype).reshape(shape)[index].copy())

        if not self._model._executable.in_state(self.spec.name, copy):
            copy(np.asarray(self._held()))
        return found[0]

    def write_rows(self, index: tuple[int | slice, ...], array: Array) -> None:
        """Sets a part of what is stored, to an array as `read_rows` gives. Raises `DTypeError` or `ShapeError`."""
        shape, dtype = self.stored
        part = np.broadcast_to(np.empty((), dtype), shape)[index]
        if array.dtype != dtype:
            raise DTypeError(f"state {self.spec.name!r} is stored as {dtype}, got {array.dtype}")
        if array.shape != part.shape:
            raise ShapeError(f"state {self.spec.name!r}: this part has shape {part.shape}, got {array.shape}")

        def put(held: Array) -> None:
            held.view(dtype).reshape(shape)[index] = array

        if not self._model._executable.in_state(self.spec.name, put):
            whole = np.array(self._held())
            put(whole)
            self.write(whole)

    @property
    def stored(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and type of what is stored: of blocks the last axis has the bytes of a row. Raises `ShapeError`."""
        spec, sizes = self.spec, _sizes(self.spec)
        if spec.encoding is None:
            return tuple(sizes), np.dtype(spec.dtype.numpy)
        rows = math.prod(sizes[:-1])
        if not sizes or not rows or sizes[-1] % spec.encoding.block:
            raise ShapeError(f"state {spec.name!r}: its rows are not whole blocks of {spec.encoding.name}")
        return (*sizes[:-1], (spec.bytes or 0) // rows), np.dtype(np.uint8)

    def _check(self, array: Any) -> Any:
        """The value as an array of the state's type. Raises `DTypeError` or `ShapeError`."""
        name, encoding = self.spec.name, self.spec.encoding
        if encoding is not None and getattr(array, "dtype", None) == np.uint8:
            stored = np.asarray(array)
            if stored.shape != (self.spec.bytes,):
                raise ShapeError(f"state {name!r}: it is stored in {self.spec.bytes} bytes, got {stored.shape}")
            return stored
        given = to_array(self.spec, array, f"state {name!r}", self._model._executable.adopt)
        have = self.spec.shape if encoding is not None else self._held().shape
        if encoding is not None and given.shape == have:
            return encoding.encode(np.asarray(given))
        if given.shape != have:
            raise ShapeError(f"state {name!r}: its shape is {have}, got {given.shape}")
        return given

    def reset(self) -> None:
        """Sets the value back to what the graph declares, or to what the input was bound to."""
        self._model._executable.write_state(self.spec.name, None)

    def feed(self, output: str | int | None) -> None:
        """Makes an output (by name or position) the state's value after each run that succeeds; None ends that.

        The two change places in memory; nothing is copied, unless the output is a part of another result, is shown
        twice, or is used by a host call. Raises `ShapeError` or `DTypeError` unless it has the state's type,
        `OptionError` where the graph itself updates the state or the output feeds another one.
        """
        model, name = self._model, self.spec.name
        if output is None:
            model._executable.feed_state(name, None)
            return
        (number,) = model._positions([output])
        made = model.outputs[number]
        if made.dtype is not self.spec.dtype:
            raise DTypeError(f"state {name!r} is {self.spec.dtype}: output {made.name!r} ({made}) can't be fed to it")
        if self.spec.encoding is not None:
            raise DTypeError(f"state {name!r} is stored as {self.spec.encoding.name}: an output can't be fed to it")
        have = model._executable.read_state(name).shape
        if made.shape not in (self.spec.shape, have):
            raise ShapeError(f"state {name!r} has shape {have}: output {made} can't be fed to it")
        if name in model._compilation.source.updates:
            raise OptionError(f"state {name!r} is updated by the graph: an output can't be fed to it as well")
        other = next((s for s, n in model._executable.feeds.items() if n == number and s != name), None)
        if other is not None:
            raise OptionError(f"output {made.name!r} is fed to {other!r} already; give it a second output of its own")
        model._executable.feed_state(name, number)


@bounded_class(ExecutionError)
class States(Mapping[str, State]):
    """The states of a compiled graph by name: declared ones, and inputs that are bound."""

    def __init__(self, model: CompiledGraph, declared: tuple[TensorSpec, ...]) -> None:
        self._model = model
        self._declared = {spec.name: State(model, spec) for spec in declared}

    def _bound(self) -> dict[str, State]:
        kept = self._model._executable.bound_inputs
        return {spec.name: State(self._model, spec) for spec in self._model.inputs if spec.name in kept}

    def __getitem__(self, name: str) -> State:
        known = self._declared | self._bound()
        if not isinstance(name, str) or name not in known:
            raise no_such("state", name, known, "; bind makes one of an input")
        return known[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._declared
        yield from self._bound()

    def __len__(self) -> int:
        return len(self._declared) + len(self._bound())

    def __repr__(self) -> str:
        return f"<States: {', '.join(str(state.spec) for state in self.values()) or 'none'}>"

    def bind(self, name: str, array: Any) -> None:
        """Keeps an input between runs, from this value on (copied); later runs may leave it out. None ends that.

        A value that a run is given counts for that run only. Raises `NameNotFound`, `DTypeError`, `ShapeError`, or
        `ExecutionError` for an extent outside of its dim's bounds.
        """
        spec = next((s for s in self._model.inputs if isinstance(name, str) and s.name == name), None)
        if spec is None:
            raise no_such("input", name, (s.name for s in self._model.inputs))
        if array is None:
            self._model._executable.keep_input(name, None)
            return
        given = to_array(spec, array, f"input {name!r}", self._model._executable.adopt)
        if isinstance(given, np.ndarray):
            given = np.ascontiguousarray(given).reshape(given.shape)
        bind_extents(self._model._compilation.source, {name: given.shape})
        self._model._executable.keep_input(name, given)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the values of all states to one file (a zip archive); an older file is replaced when it is whole.

        Raises `OptionError` where it can't be written.
        """
        arrays = {name: np.asarray(state._held()) for name, state in self.items()}
        kinds = {n: "u8" if self[n].spec.encoding is not None else str(self[n].spec.dtype) for n in arrays}
        entries = {n: {"dtype": kinds[n], "shape": list(a.shape)} for n, a in arrays.items()}
        header = json.dumps({"version": VERSION, "graph": self._model._compilation.source.name, "states": entries})
        import zipfile  # slow to import

        with saving(path, "states.save") as file, zipfile.ZipFile(file, "w") as bundle:
            bundle.writestr(HEADER, header)
            for number, array in enumerate(arrays.values()):
                bundle.writestr(f"{number}.bin", array.tobytes())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Sets all states from a file that `save` wrote; inputs that were bound there are bound here too.

        Everything is checked first: `ModelFormatError` for a file that is damaged or not one of states, `NameNotFound`,
        `DTypeError` or `ShapeError` for one that does not fit, and then nothing is changed.
        """
        entries = _read(path_of(path, "states.load"))
        specs = {s.name: s for s in (*(state.spec for state in self._declared.values()), *self._model.inputs)}
        missing = [name for name in self if name not in entries]
        if missing:
            raise NameNotFound(
                f"{path}: it has no state {missing[0]!r}, only {', '.join(map(repr, entries)) or 'none'}"
            )
        for name, array in entries.items():
            if name not in specs:
                raise NameNotFound(f"{path}: its state {name!r} is neither a state nor an input of this graph")
            if specs[name].encoding is None:
                to_array(specs[name], array, f"{path}: state {name!r}")
            if name in self._declared:
                self._declared[name]._check(array)
            else:
                bind_extents(self._model._compilation.source, {name: array.shape})
        for name in sorted(entries, key=self._declared.__contains__):  # inputs take memory, which there may not be
            if name in self._declared:
                self._declared[name].write(entries[name])
            else:
                self.bind(name, entries[name])


def _sizes(spec: TensorSpec) -> list[int]:
    return [evaluate(size, {}) for size in spec.shape]


def _read(path: str | os.PathLike[str]) -> dict[str, Array]:
    with open_archive(path, "is not a whole file of states") as bundle:
        header = json.loads(read_stored(bundle, HEADER))
        if header["version"] != VERSION:
            raise ModelFormatError(f"{path}: states of version {header['version']}; this rlx reads {VERSION}")
        found = {}
        for number, (name, entry) in enumerate(header["states"].items()):
            dtype, shape, kept = DTYPES[entry["dtype"]].numpy, entry["shape"], f"{number}.bin"
            check_shape(f"state {name!r}", shape)
            size, need = bundle.getinfo(kept).file_size, math.prod(shape) * dtype.itemsize
            if size != need:
                raise ValueError(f"state {name!r} of shape {shape} takes {need} bytes, its entry has {size}")
            found[name] = np.frombuffer(read_stored(bundle, kept), dtype).reshape(shape)
        return found
