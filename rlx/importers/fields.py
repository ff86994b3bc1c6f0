"""Checked look-ups in the metadata of a model file; every message names the file and the key."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rlx.errors import ModelFormatError
from rlx.importers.gguf import GgufArray

__all__ = ["Fields", "sliding_windows"]


class Fields:
    """The values that `get` gives for keys, None for those that are not there. Raises `ModelFormatError`."""

    def __init__(self, path: str, get: Callable[[str], Any]) -> None:
        self.path, self.get = path, get

    def number(self, *keys: str, default: int | None = None) -> int:
        """The first of the keys that is there, a natural number."""
        return int(self._first(keys, default, _is_natural, "a number >= 0"))

    def real(self, *keys: str, default: float | None = None) -> float:
        """The first of the keys that is there, a finite number."""
        return float(self._first(keys, default, _is_finite, "a finite number"))

    def text(self, *keys: str, default: str | None = None) -> str:
        """The first of the keys that is there, a text."""
        return str(self._first(keys, default, lambda value: isinstance(value, str), "a text"))

    def flag(self, *keys: str, default: bool) -> bool:
        """The first of the keys that is there, true or false."""
        return bool(self._first(keys, default, lambda value: isinstance(value, bool), "true or false"))

    def _first(self, keys: Sequence[str], default: Any, fits: Callable[[Any], bool], wanted: str) -> Any:
        """The value of the first key that is there, or the default; raises where there is none that fits."""
        for key in keys:
            value = self.get(key)
            if value is not None:
                if not fits(value):
                    raise ModelFormatError(f"{self.path}: {key} is {value!r:.40}: expected {wanted}")
                return value
        if default is None:
            raise ModelFormatError(f"{self.path}: {keys[0]} is missing: what the model computes depends on it")
        return default

    def per_layer(self, key: str, layers: int, default: int) -> list[int]:
        """A number for each layer, from a number or a list of them."""
        value = self.get(key)
        if isinstance(value, GgufArray):
            value = value.values()
        if isinstance(value, list):
            if len(value) != layers or not all(type(v) in (int, bool) and v >= 0 for v in value):
                raise ModelFormatError(f"{self.path}: {key}: expected {layers} numbers >= 0, one a layer")
            return [int(v) for v in value]
        return [self.number(key, default=default)] * layers


def _is_natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 40


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) <= 1e30


def sliding_windows(window: int, pattern: Any, count: int, default: int | None) -> list[int | None]:
    """The sliding window of each layer; the last of each `pattern` layers sees everything, or a list says which do."""
    if isinstance(pattern, GgufArray):
        pattern = pattern.values()
    if not window:
        return [None] * count
    if isinstance(pattern, list):
        return [window if i < len(pattern) and pattern[i] else None for i in range(count)]
    every = pattern if type(pattern) is int else default
    if every is None or every <= 0:
        return [window] * count
    return [None if (i + 1) % every == 0 else window for i in range(count)]
