"""Texts that are given as the numbers of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import OptionError

__all__ = ["token_numbers"]


def token_numbers(given: Any, vocab: int, what: str) -> list[int]:
    """The numbers of a list or an array of rank 1, each of which has to be a whole number from 0 to `vocab` - 1.

    Raises `OptionError` for anything else; its text begins with `what`, which names it.
    """
    listed = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    if not listed and not (isinstance(given, np.ndarray) and given.ndim == 1):
        raise OptionError(f"{what}: expected a text or a list of tokens, got {type(given).__name__}")
    for number in given:
        if not isinstance(number, int | np.integer) or isinstance(number, bool) or not 0 <= number < vocab:
            raise OptionError(f"{what}: {number!r:.60} is no token: expected a text, or numbers of 0 to {vocab - 1}")
    return [int(number) for number in given]
