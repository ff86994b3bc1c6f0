"""Strings in programs: each is its number in a dictionary, so that kernels and plans know numbers only.

A graph's constants have the first numbers, 0 is the empty string, and what a run brings or makes gets further ones, in
a dictionary of that run alone. Equal strings have one number, so that to move or compare them is to move or compare
their numbers. A run hands the key of its dictionary to its steps on the host as a scalar of i64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from rlx.errors import DTypeError, ExecutionError
from rlx.ir.value import Array

__all__ = ["Dictionary", "Texts", "as_result", "as_strings", "check_text", "dictionary"]

MOST = 2**31 - 1
MOST_TEXT = 2**30  # characters of a run's strings: models are hostile, and strings are in no plan of memory
KEYS = count(1)
_LIVE: WeakValueDictionary[int, Dictionary] = WeakValueDictionary()


class Texts:
    """Strings that keep their numbers: those of a graph's constants, "" first."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(dict.fromkeys(("", *texts)))
        self.numbers: Mapping[str, int] = {text: number for number, text in enumerate(self.texts)}

    def encode(self, array: Array) -> Array:
        """The numbers of strings that are all there, i32."""
        return np.array([self.numbers[text] for text in array.reshape(-1).tolist()], np.int32).reshape(array.shape)


class Dictionary:
    """The strings of one run over those of its graph."""

    def __init__(self, first: Texts) -> None:
        self.first = first
        self.more: list[str] = []
        self.characters = 0
        self.numbers: dict[str, int] = {}
        self.lock = Lock()
        self.key = next(KEYS)
        _LIVE[self.key] = self

    def encode(self, array: Array) -> Array:
        """The number of each string, i32; new ones are added."""
        known, own = self.first.numbers, self.numbers
        found = np.empty(array.size, np.int32)
        with self.lock:
            for place, text in enumerate(array.reshape(-1).tolist()):
                number = known.get(text)
                if number is None:
                    number = own.get(text)
                if number is None:
                    number = len(known) + len(self.more)
                    if number > MOST:
                        raise ExecutionError(f"the run has more than {MOST} different strings")
                    self.characters += len(text)
                    check_text(self.characters, "the run")
                    own[text] = number
                    self.more.append(text)
                found[place] = number
        return found.reshape(array.shape)

    def decode(self, numbers: Array) -> Array:
        """The strings, as an array of NumPy's StringDType."""
        first, more, size = self.first.texts, self.more, len(self.first.texts)
        flat = numbers.reshape(-1).tolist()
        if flat and not 0 <= min(flat) <= max(flat) < size + len(more):
            raise ExecutionError("a number stands for no string of the run")
        texts = [first[n] if n < size else more[n - size] for n in flat]
        return np.array(texts, np.dtypes.StringDType()).reshape(numbers.shape)


def check_text(characters: int, what: str) -> None:
    """Raises `ExecutionError` for more text than a run may have."""
    if characters > MOST_TEXT:
        raise ExecutionError(
            f"{what}: the strings of a run have more than {MOST_TEXT} characters; give it shorter ones"
        )


def dictionary(key: int) -> Dictionary:
    """The dictionary of a run by its key."""
    found = _LIVE.get(key)
    if found is None:
        raise ExecutionError(f"there is no run whose dictionary has the key {key}")
    return found


def as_result(made: Any) -> Array:
    """What an op's reference gives as an array; NumPy shows an array of one string as a str."""
    return np.asarray(made, np.dtypes.StringDType()) if isinstance(made, str) else np.asarray(made)


def as_strings(value: Any, what: str) -> Array:
    """Strings in lists or an array (of NumPy's str, StringDType, or objects that are str) as an array of StringDType.

    Raises `DTypeError` for anything else, also for bytes.
    """
    try:
        array = value if isinstance(value, np.ndarray) else np.array(value, object)
        if array.dtype.kind == "O":
            odd = [x for x in array.reshape(-1) if not isinstance(x, str)]
            if odd:
                raise DTypeError(f"{what}: expected strings (str), got {type(odd[0]).__name__}: {odd[0]!r:.40}")
        elif array.dtype.kind not in "UT":
            raise DTypeError(f"{what}: expected strings, got elements of {array.dtype}; make them str first")
        return array if array.dtype == np.dtypes.StringDType() else array.astype(np.dtypes.StringDType())
    except (TypeError, ValueError) as error:
        raise DTypeError(f"{what}: {error}") from None
