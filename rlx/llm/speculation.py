"""Tokens that are guessed ahead and checked in one run of the model, which costs little more than one for one token.

A guess counts as far as the model chooses the same tokens, with the draws of those places: so a text is the one that is
written without guesses, token by token. Two ways to guess: what followed the last tokens where they stood before, and a
smaller model that draws by the same numbers. Guesses are left out while they don't pay, by what runs were seen to take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from rlx.errors import BusyError
from rlx.llm.slots import shared
from rlx.models.sampling import Row

if TYPE_CHECKING:
    from rlx.llm.model import LanguageModel

__all__ = ["Drafter", "Lookup", "Paying", "SmallModel"]

WORDS = (4, 3, 2)  # tokens that must have stood there before, the longest first
FEW, PAUSE, LONGEST_PAUSE = 4, 8, 128  # runs that are looked at first; runs without guesses after those that didn't pay
WEIGHT = 0.2  # of the last run in running means

RowOf = Callable[[Sequence[int]], Row | None]  # how the token after some guesses is drawn; None: the likeliest


class Drafter(Protocol):
    """Guesses at most so many tokens that follow a text."""

    def __call__(self, text: Sequence[int], most: int, row: RowOf, slot: int) -> list[int]: ...


class Lookup:
    """What followed the last tokens where they stood last."""

    def __init__(self) -> None:
        self._seen: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}  # words: the place behind them
        self._before: dict[int, int | None] = {}  # of the last words: the place behind them before

    def __call__(self, text: Sequence[int], most: int, row: RowOf, slot: int) -> list[int]:
        self._read(text)
        place = next((self._before[n] for n in WORDS if self._before.get(n) is not None), None)
        return [] if place is None else list(text[place : place + most])

    def _read(self, text: Sequence[int]) -> None:
        if shared(text, self._seen) < len(self._seen):  # another text, or one that was cut
            self._seen, self._places = [], {}
        for end in range(len(self._seen) + 1, len(text) + 1):
            for n in WORDS:
                words = tuple(text[max(end - n, 0) : end])
                self._before[n] = self._places.get(words) if len(words) == n else None
                self._places[words] = end
        self._seen = list(text)


class SmallModel:
    """The same text in the cache of a smaller model with the same tokens, which goes on with it.

    It takes the slot from a generation of that model; while that is at work in another thread, it guesses nothing.
    """

    def __init__(self, draft: LanguageModel) -> None:
        self.draft = draft

    def __call__(self, text: Sequence[int], most: int, row: RowOf, slot: int) -> list[int]:
        if len(text) + most > self.draft.context:
            return []
        try:
            with self.draft.alone():
                return self._guesses(text, most, row, slot % self.draft.slots.count)
        except BusyError:
            return []

    def _guesses(self, text: Sequence[int], most: int, row: RowOf, slot: int) -> list[int]:
        slots, found = self.draft.slots, list[int]()
        slots.take(slot)
        slots.cut(slot, shared(slots.filled[slot], text[:-1]))
        pending = list(text[len(slots.filled[slot]) :])
        while len(found) < most:
            room = slots.room([slot])
            part, pending = pending[:room], pending[room:]
            if pending:
                slots.run({slot: part}, [], None)
                continue
            place, drawn = [(slot, len(part) - 1)], row(found)
            if drawn is None:
                token = int(slots.run({slot: part}, place, "token")[0])
            else:
                token = int(slots.run({slot: part}, place, "sampled", [drawn])[0])
            if token < 0:
                break
            found.append(token)
            pending = [token]
        return found


class Paying:
    """Whether guesses pay: running means of the tokens and seconds of runs with and without them."""

    def __init__(self) -> None:
        self._plain = self._guessed = 0.0  # seconds of a run
        self._tokens = 0.0  # of a run with guesses
        self._tried = self._left = 0  # such runs; runs until the next one
        self._pause = PAUSE

    @property
    def now(self) -> bool:
        """Whether the next run shall have guesses."""
        if not self._plain or self._left > 0:
            return False  # how long a run without them takes must be known first
        if self._tried < FEW or self._tokens * self._plain > self._guessed:
            return True
        self._left, self._tried = self._pause, 0
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return False

    def ran(self, guessed: int, tokens: int, seconds: float) -> None:
        """A run with so many guesses gave so many tokens; `seconds` are those of it and of the guessing."""
        if guessed:
            first = not self._tried
            self._guessed = seconds if first else _mean(self._guessed, seconds)
            self._tokens = tokens if first else _mean(self._tokens, tokens)
            self._tried += 1
        else:
            self._plain = _mean(self._plain, seconds) if self._plain else seconds
            self._left = max(self._left - 1, 0)


def _mean(old: float, new: float) -> float:
    return old + WEIGHT * (new - old)
