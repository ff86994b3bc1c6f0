"""Memory for large results: what users have dropped is used again, as mapping new pages takes longer than a copy."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from rlx.backends.cpu.runtime.binding import aligned_bytes
from rlx.errors import OptionError
from rlx.ir.graph import Array
from rlx.kernels.program import Buffer

__all__ = ["DIRECT", "LARGE", "WRITTEN_OUT", "ResultMemory", "check_apart", "is_movable", "overlaps"]

DIRECT = 4 << 20  # bytes of results from which on a run writes them where the caller gets them, instead of copying
LARGE = 512 << 10  # from which on the native entry does so too, once there was a run of such shapes
WRITTEN_OUT = 1  # left in the state block's VALUE by a run that wrote into the caller's arrays; any run resets it
Memory = np.ndarray[Any, np.dtype[np.uint8]]
LEAST = 64 << 10  # bytes of a result that is worth it


class ResultMemory:
    """Makes the arrays of results, and keeps the memory of those that are gone: as much as one run needs, the latest.

    An array may go in any thread at any time: memory changes hands by single operations of a dict. (A list of its items
    would be none, as the tuples let Python collect garbage, with arrays in it.)
    """

    def __init__(self) -> None:
        self._most = 0  # bytes that are kept
        self._free: dict[int, Memory] = {}  # by identity, the oldest first

    def keep_for(self, arrays: Iterable[Array]) -> None:
        """From now on runs have such results."""
        self._most = sum(_room(array.nbytes) for array in arrays)

    def like(self, array: Array) -> Array:
        """A fresh array of that shape and type, with any contents."""
        if array.nbytes < LEAST:
            return np.empty_like(array)
        room = _room(array.nbytes)
        memory = self._taken(room)
        if memory is None:
            memory = aligned_bytes(room)
        # views have this array as their base, not the memory: it is gone once all of them are
        own = np.frombuffer(memory.data, np.uint8, array.nbytes)
        weakref.finalize(own, self._take_back, memory).atexit = False
        return own.view(array.dtype).reshape(array.shape)

    @staticmethod
    def twin(array: Array) -> Array:
        """The elements of an array of `like`, which this does not keep from going: its memory may serve a later run."""
        if array.nbytes < LEAST:
            return array
        own: Any = array.base
        return np.frombuffer(own.base.obj, np.uint8, array.nbytes).view(array.dtype).reshape(array.shape)

    def _taken(self, room: int) -> Memory | None:
        for key in list(self._free):
            memory = self._free.get(key)
            if memory is not None and memory.nbytes == room and self._free.pop(key, None) is not None:
                return memory
        return None

    def clear(self) -> None:
        """Gives the kept memory back."""
        self._most = 0
        self._free.clear()

    def _take_back(self, memory: Memory) -> None:
        self._free[id(memory)] = memory
        excess = sum(kept.nbytes for kept in list(self._free.values())) - self._most
        for key in list(self._free):  # of sizes that runs had before, as a rule
            if excess <= 0:
                break
            gone = self._free.pop(key, None)
            excess -= 0 if gone is None else gone.nbytes


def check_apart(
    outputs: Sequence[tuple[str, Buffer]], out: Sequence[Array | None], used: Iterable[tuple[str, Array]]
) -> None:
    """Raises `OptionError` for an array of the caller in memory that the run itself uses, by what it is called."""
    given = [(name, target) for target, (name, _) in zip(out, outputs, strict=True) if target is not None]
    for what, memory in used if given else ():
        for name, target in given:
            if np.may_share_memory(target, memory):
                raise OptionError(
                    f"out for {name!r}: the array lies in the {what} of the graph itself, which the run uses: give "
                    "one of your own"
                )


def is_movable(buffer: Buffer, outputs: Sequence[tuple[str, Buffer]], used_by_host: Collection[Buffer]) -> bool:
    """Whether a run can write an output elsewhere than in the arena: all of a buffer, shown once, no host call's."""
    return buffer.root is None and [b.base for _, b in outputs].count(buffer) == 1 and buffer not in used_by_host


def _room(size: int) -> int:
    """Bytes of memory for a result: up to an eighth more, in which one that grows from run to run stays for a while."""
    step = 1 << max(size.bit_length() - 4, 0)
    return -(-size // step) * step


def overlaps(target: Array, others: Sequence[Array]) -> bool:
    return any(np.may_share_memory(target, other) for other in others)
