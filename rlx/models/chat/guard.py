"""Keeps what users wrote apart from what a template writes, where it looks like a special token."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlx.errors import OptionError

__all__ = ["Guard"]

_SIGNS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # no characters: Unicode leaves them to programs


class Guard:
    """Puts a sign before and after each match of `words` in messages, and finds them in what a template made of these.

    The sign is a code point that `given` doesn't have. Messages without a match are left as they are.
    """

    def __init__(self, words: re.Pattern[str] | None, given: Any) -> None:
        self._words = words
        texts = list(_texts(given))
        free = [sign for sign in _SIGNS if not any(sign in text for text in texts)]
        if not free:
            raise OptionError("chat: the messages have all of U+FDD0 to U+FDEF, which are no characters: leave one out")
        self._sign = free[0]

    def marked(self, given: Any) -> Any:
        """The same with signs around what looks like a special token."""
        if isinstance(given, str):
            return given if self._words is None else self._words.sub(rf"{self._sign}\g<0>{self._sign}", given)
        if isinstance(given, Mapping):
            return {self.marked(key): self.marked(value) for key, value in given.items()}
        return [self.marked(entry) for entry in given] if isinstance(given, list | tuple) else given

    def parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """The parts of a text, and whether a user wrote each (what is between two signs)."""
        for number, part in enumerate(text.split(self._sign)):
            if part:
                yield part, number % 2 == 1


def _texts(given: Any) -> Iterator[str]:
    if isinstance(given, str):
        yield given
    elif isinstance(given, Mapping):
        for key, value in given.items():
            yield from _texts(key)
            yield from _texts(value)
    elif isinstance(given, list | tuple):
        for entry in given:
            yield from _texts(entry)
