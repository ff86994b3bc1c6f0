"""Packed weights that several compiled graphs share: the same kernels over the same weights make the same bytes.

A key is a digest of all that the contents depend on: the memory that a param lies in, which never changes, the code of
the kernels, and the numbers that they are given.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence

import numpy as np

from rlx.backends.codegen.arguments import THREADS, Argument, Computed, Pointer, Routine, Scratch, ScratchStride
from rlx.backends.codegen.table import Phase
from rlx.ir.graph import Array
from rlx.ir.mapped import same_memory
from rlx.ir.shape import Dim, evaluate
from rlx.kernels.program import Buffer

__all__ = ["find", "key_of", "memory_key", "new_key", "offer"]

ALONE = {THREADS: 1}  # what is packed is the same for any number of threads
Keys = Mapping[Buffer, str | None]

_serials = itertools.count()
_made: weakref.WeakValueDictionary[str, Array] = weakref.WeakValueDictionary()


def find(key: str | None) -> Array | None:
    """The memory of an equal packed weight that some graph still has."""
    return None if key is None else _made.get(key)


def offer(key: str | None, memory: Array) -> None:
    """Lets others find this memory, which nobody writes to from now on."""
    if key is not None:
        _made.setdefault(key, memory)


def memory_key(array: Array) -> str | None:
    """The key of a param that lies in memory which never changes, None for any other."""
    place = same_memory(array)
    return None if place is None else _digest(place)


def new_key() -> str:
    """The key of contents that are nobody else's."""
    return _digest(("own", next(_serials)))


def key_of(writers: Sequence[Phase], keys: Keys) -> str | None:
    """The key of what these phases, all that write to a buffer, make of params and buffers with these keys."""
    parts = [_phase_key(phase, keys) for phase in writers]
    return None if None in parts else _digest(parts)


def _phase_key(phase: Phase, keys: Keys) -> str | None:
    if phase.code is None:
        return None
    names: dict[Buffer, str] = {b.base: f"out{n}" for n, b in enumerate(phase.kernel.writes())}
    for buffer in phase.kernel.reads():
        root = buffer.base
        if root in names:
            continue
        data = root.data if root.kind == "const" else None
        key = keys.get(root) if data is None else memory_key(data) or _digest(_bytes(data))
        if key is None:
            return None
        names[root] = key
    words = [_word_key(word, names) for word in phase.code.words]
    if None in words:
        return None
    return _digest((phase.code.symbol, phase.code.optimize, phase.code.chunks(ALONE), words))


def _word_key(word: Argument, names: Mapping[Buffer, str]) -> object:
    match word:
        case Pointer(buffer, offset):
            root = names.get(buffer.base)
            return None if root is None else (root, evaluate(buffer.offset, {}), evaluate(offset, {}))
        case Computed(fn):
            return fn(ALONE)
        case Routine(symbol, ir):
            return symbol, ir
        case Scratch():
            return "scratch"
        case ScratchStride():
            return "stride"
        case int() | Dim():
            return evaluate(word, {})
    return None


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _digest(parts: object) -> str:
    from hashlib import blake2b  # slow to load, and rarely needed

    data = parts if isinstance(parts, memoryview) else repr(parts).encode()
    return blake2b(data, digest_size=20).hexdigest()
