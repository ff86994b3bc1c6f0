"""The weight registry: named weights that several compiled graphs share, held once."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import numpy as np

from rlx.boundary import bounded_class
from rlx.disk import path_of
from rlx.errors import CompileError, DTypeError, NameNotFound, OptionError, ShapeError
from rlx.forks import restart_in_child
from rlx.ir.casting import cast
from rlx.ir.dtype import DTYPES, DType, dtype_of
from rlx.ir.encodings import ENCODINGS
from rlx.ir.graph import Array, Graph, TensorType, Value, refuse_masked
from rlx.ir.mapped import place_of, same_memory, to_own_pages
from rlx.passes.rewrite import rewrite
from rlx.runtime.convert import convert as converted
from rlx.runtime.weight_files import Stored, chosen_names, read_weights

__all__ = ["Holding", "Kind", "Weight", "WeightRegistry"]

P = ParamSpec("P")
R = TypeVar("R")
Kind = Literal["base", "adapter"]
_NO_NAMES = 1024  # bytes: below that, or if it is one number spread out, a weight is not worth finding its equal for


def _alone(method: Callable[P, R]) -> Callable[P, R]:
    """Lets one thread at a time into the registry."""

    @functools.wraps(method)
    def locked(*args: P.args, **named: P.kwargs) -> R:
        registry: Any = args[0]
        with registry._lock:
            return method(*args, **named)

    return locked


class Holding:
    """What one compiled graph, with its clones, holds of a registry."""


class Weight:
    """One weight of a registry: read-only.

    `array` has its elements, or u8 blocks where it has an `encoding`. `kind` is "base" or "adapter"; `tied_to` names
    the weight whose memory it shares; `note` says what conversion was made when it came in.
    """

    def __init__(self, name: str, type: TensorType, array: Array, kind: Kind, encoding: str | None, note: str) -> None:
        self.name, self.type, self.kind, self.encoding, self.note = name, type, kind, encoding, note
        self.array = array
        self.tied_to: str | None = None
        self.pinned = False
        self._users: weakref.WeakSet[Holding] = weakref.WeakSet()

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return tuple(int(s) for s in self.type.shape if isinstance(s, int))

    @property
    def dtype(self) -> DType:
        """The element type; of an encoded weight, what it decodes to."""
        return self.type.dtype

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return self.array.nbytes

    @property
    def mapped(self) -> bool:
        """Whether it lies in a mapped file: the system can drop its pages and read them again."""
        return place_of(self.array) is not None

    @property
    def references(self) -> int:
        """How many compiled graphs (clones counted with their original) that are not closed use it."""
        return len(self._users)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.array, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        stored = f"@{self.encoding}" if self.encoding else ""
        tied = f", tied to {self.tied_to!r}" if self.tied_to else ""
        return f"<Weight {self.name!r}: {self.dtype}{stored}{list(self.shape)}, {self.kind}{tied}>"


@bounded_class(CompileError)
class WeightRegistry(Mapping[str, Weight]):
    """Weights by name, each held once however many compiled graphs use it.

    Given to a `Session` or `compile`, it provides the params that have no value by their names, and takes in those that
    have one: equal ones, of whatever graph, become one. Nobody can write to a weight that is in it.
    """

    def __init__(self) -> None:
        self._weights: dict[str, Weight] = {}
        self._by_memory: dict[tuple[object, ...], str] = {}  # same memory or same contents -> a name
        self._restart()
        restart_in_child(self._restart)

    def _restart(self) -> None:
        # held while anything comes in or goes: graphs are compiled in several threads, and none but one after a fork
        self._lock = threading.RLock()

    def __getitem__(self, name: str) -> Weight:
        if not isinstance(name, str) or name not in self._weights:
            some = ", ".join(map(repr, list(self._weights)[:8])) or "none"
            raise NameNotFound(f"the registry has no weight {name!r}; it has {some}{', …' * (len(self) > 8)}")
        return self._weights[name]

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __repr__(self) -> str:
        return f"<WeightRegistry of {len(self)} weights, {self.nbytes:,} B, {self.mapped_bytes:,} B of them in files>"

    # ---- what comes in

    @_alone
    def add(
        self,
        name: str,
        array: Any,
        *,
        shape: Sequence[int] | None = None,
        dtype: object = None,
        encoding: str | None = None,
        kind: Kind = "base",
        convert: bool = False,
    ) -> Weight:
        """Takes in an array; it is copied unless it is a read-only view of a mapped file.

        `shape` and `dtype` are checked, or say what raw bytes (u8) are; `convert` lets the elements be widened to
        `dtype` or encoded as `encoding`, which `note` of the weight then tells. Raises `ShapeError` where the length is
        not shape x type, `DTypeError` for another type, `OptionError` for a name that is taken.
        """
        what = f"weight {name!r}"
        refuse_masked(what, array)
        given = np.asarray(array)
        if encoding is not None and encoding not in ENCODINGS:
            raise OptionError(f"{what}: unknown encoding {encoding!r}; known are {', '.join(sorted(ENCODINGS))}")
        element = dtype_of(dtype) if dtype is not None else F32 if encoding is not None else dtype_of(given.dtype)
        sizes = given.shape if shape is None else tuple(shape)
        type = TensorType(sizes, element, None if encoding is None else ENCODINGS[encoding])
        note = ""
        if given.dtype == np.uint8 and shape is not None and (encoding is not None or element is not U8):
            if given.nbytes != type.nbytes():
                raise ShapeError(f"{what}: {type} is stored in {type.nbytes()} bytes, got {given.nbytes}")
            given = np.ascontiguousarray(given).reshape(-1)
            given = given if encoding is not None else given.view(element.numpy).reshape(sizes)
        elif convert:
            given, note = converted(given, type, what)
        elif given.dtype != element.numpy or encoding is not None:
            raise DTypeError(f"{what}: expected {type}, got {given.dtype}; convert=True widens or encodes")
        if encoding is None and given.shape != sizes:
            raise ShapeError(f"{what}: expected shape {sizes}, got {given.shape}")
        return self._put(name, type, given, kind, encoding, note)

    @_alone
    def tie(self, name: str, to: str) -> Weight:
        """Makes `name` another name of the weight `to`: the same memory, counted once."""
        target = self[to]
        made = self._put(name, target.type, target.array, target.kind, target.encoding, "")
        made.tied_to = target.tied_to or to
        return made

    @_alone
    def load(
        self,
        path: str | os.PathLike[str],
        names: Mapping[str, str] | None = None,
        *,
        transpose: str | Collection[str] = (),
        dtype: object = None,
        encoding: str | None = None,
        kind: Kind = "base",
    ) -> list[Weight]:
        """Takes in the tensors of a safetensors (also its index), npz, GGUF or ONNX file; they stay in it if possible.

        `names` maps patterns of the file's names to names here, where `{}` stands for any text: only what one matches
        is taken. `transpose` are names here, or patterns with `*`, whose last two axes are swapped. `dtype` and
        `encoding` convert floating ones, and only those; without, all stay as they are, blocks included. Raises
        `ModelFormatError`, `NameNotFound` for a pattern that matches nothing, and what `add` does; then nothing is
        taken in.
        """
        path = Path(path_of(path, "registry.load"))
        stored = read_weights(path)
        chosen = chosen_names(stored, names, path)
        swapped = [transpose] if isinstance(transpose, str) else list(transpose)
        for pattern in swapped:
            if not fnmatch.filter(chosen.values(), pattern):
                raise NameNotFound(f"transpose: no weight taken from {path} matches {pattern!r}")
        to = None if dtype is None and encoding is None else _floats(dtype, encoding)
        for name in chosen.values():
            self._check_free(name)
        made: list[Weight] = []
        try:
            for source, name in chosen.items():
                swap = any(fnmatch.fnmatchcase(name, pattern) for pattern in swapped)
                made.append(self._take(name, stored[source], swap, to, kind))
        except Exception:
            for weight in made:
                self._drop(weight.name)
            raise
        return made

    def _take(self, name: str, stored: Stored, swap: bool, to: TensorType | None, kind: Kind) -> Weight:
        what = f"weight {name!r}"
        array, type, encoding, note = stored.read(), stored.type, stored.encoding, ""
        if swap:
            if encoding is not None or len(type.shape) < 2:
                raise OptionError(f"{what}: {encoding or f'rank {len(type.shape)}'} can't be transposed")
            array = array.swapaxes(-1, -2)
            type = TensorType(array.shape, type.dtype)
        if to is not None and type.dtype.is_float:
            wanted = TensorType(type.shape, to.dtype, to.encoding)
            if to.encoding is None and encoding is None and array.dtype != to.dtype.numpy:
                note = f"converted {type.dtype} to {to.dtype}"  # the caller named the type: narrowing is meant too
                array = cast(array, to.dtype)
            else:
                array, note = converted(array, wanted, what, encoding)
            type, encoding = wanted, None if wanted.encoding is None else wanted.encoding.name
        return self._put(name, type, array, kind, encoding, note)

    def _put(self, name: str, type: TensorType, array: Array, kind: Kind, encoding: str | None, note: str) -> Weight:
        self._check_free(name)
        if kind not in get_args(Kind):
            raise OptionError(f"weight {name!r}: kind={kind!r}: expected 'base' or 'adapter'")
        # Kernels read aligned memory in place; what a file has misaligned they can't.
        ready = array if same_memory(array) is not None and array.flags.aligned else to_own_pages(array)
        made = self._weights[name] = Weight(name, type, ready, kind, encoding, note)
        return made

    def _check_free(self, name: str) -> None:
        if not isinstance(name, str) or not name or name in self._weights:
            raise OptionError(f"the name {name!r} is empty or taken in the registry; release it first")

    # ---- what is held

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; memory that several share counts once."""
        return sum({same_memory(w.array): w.nbytes for w in self.values()}.values())

    @property
    def mapped_bytes(self) -> int:
        """Those of `nbytes` that lie in mapped files."""
        return sum({same_memory(w.array): w.nbytes for w in self.values() if w.mapped}.values())

    def pin(self, name: str, pinned: bool = True) -> None:
        """Keeps a weight from `prune`, or no longer."""
        self[name].pinned = pinned

    @_alone
    def release(self, name: str) -> None:
        """Drops a weight. Raises `OptionError` while it is pinned or a compiled graph uses it."""
        weight = self[name]
        if weight.pinned or weight.references:
            why = "pinned" if weight.pinned else f"used by {weight.references} compiled graphs: close them"
            raise OptionError(f"weight {name!r} can't be released: it is {why}")
        self._drop(name)

    @_alone
    def prune(self) -> int:
        """Drops every weight that is not pinned and that no compiled graph uses; the bytes that went."""
        before = self.nbytes
        for weight in list(self.values()):
            if not weight.pinned and not weight.references:
                self._drop(weight.name)
        return before - self.nbytes

    def _drop(self, name: str) -> None:
        del self._weights[name]
        self._by_memory = {key: other for key, other in self._by_memory.items() if other != name}

    # ---- what compiled graphs take

    @_alone
    def fill(self, graph: Graph, names: Mapping[str, str] | None = None) -> tuple[Graph, Holding]:
        """The graph with its params' values in this registry, and what holds them there as long as it lives.

        A param without value gets the weight of its name, or of the one that `names` gives for it; one of `names` is
        replaced. Others are taken in. Raises `DTypeError` or `ShapeError` for a weight that is not of the param's type.
        """
        if not isinstance(graph, Graph) or not isinstance(names, Mapping | None):
            raise OptionError(
                f"registry.fill takes a Graph and a mapping of names, got {graph!r:.40} and {names!r:.40}"
            )
        holding = Holding()
        chosen = dict(names or {})
        for name in chosen:
            if not any(p.name == name for p in graph.params):
                raise NameNotFound(f"registry: graph {graph.name!r} has no param {name!r}")
        new = rewrite(graph, lambda site: None)
        for param in new.params:
            if param.name in chosen or (param.data is None and param.name in self._weights):
                weight = self[chosen.get(param.name, param.name)]
                _check_type(weight, param)
            elif param.data is not None and param.data.nbytes >= _NO_NAMES and any(param.data.strides):
                weight = self._equal(param)
            else:
                continue
            param.data = weight.array
            weight._users.add(holding)
        return new, holding

    def _equal(self, param: Value) -> Weight:
        """The weight that has the value of the param; it is taken in if there is none yet."""
        data = param.data
        assert data is not None
        key: tuple[object, ...] = (str(param.type), same_memory(data) or _digest(data))
        name = self._by_memory.get(key)
        if name is None:
            name = param.name
            if name in self._weights:
                name = f"{name}@{hashlib.blake2b(repr(key).encode(), digest_size=4).hexdigest()}"
            encoding = None if param.type.encoding is None else param.type.encoding.name
            self._put(name, param.type, data, "base", encoding, "")
            self._by_memory[key] = name
        return self._weights[name]


F32, U8 = DTYPES["f32"], DTYPES["u8"]


def _floats(dtype: object, encoding: str | None) -> TensorType:
    """What floating tensors of a file become."""
    if encoding is not None and encoding not in ENCODINGS:
        raise OptionError(f"unknown encoding {encoding!r}; known are {', '.join(sorted(ENCODINGS))}")
    element = F32 if dtype is None else dtype_of(dtype)
    if not element.is_float:
        raise OptionError(f"dtype={element}: floating weights of a file are converted to a floating type only")
    return TensorType((), element, None if encoding is None else ENCODINGS[encoding])


def _digest(data: Array) -> str:
    return hashlib.blake2b(np.ascontiguousarray(data).view(np.uint8).reshape(-1).data, digest_size=16).hexdigest()


def _check_type(weight: Weight, param: Value) -> None:
    want = param.type
    stored = None if want.encoding is None else want.encoding.name
    if weight.encoding != stored or (stored is None and weight.dtype is not want.dtype):
        have = f"{weight.dtype}{f'@{weight.encoding}' if weight.encoding else ''}"
        raise DTypeError(
            f"param {param.name!r} is {want}, the weight {weight.name!r} of the registry is {have}: load it with "
            f"dtype={want.dtype.name!r} or encoding={stored!r}"
        )
    if weight.shape != tuple(want.shape):
        raise ShapeError(f"param {param.name!r} is {want}, the weight {weight.name!r} has shape {weight.shape}")
