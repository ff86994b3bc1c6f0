"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Stopper"]


class Stopper:
    """Passes a text on up to the first of the stop strings; what may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.found: str | None = None
        self._held = ""

    def push(self, piece: str) -> str:
        """What may be shown, of the text so far, after another piece."""
        if self.found is not None:
            return ""
        text = self._held + piece
        places = [(at, -len(stop), stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if places:
            at, _, self.found = min(places)
            self._held = ""
            return text[:at]
        keep = max((self._overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What is held back, once there is no more text."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """The longest end of the text that `stop` begins with."""
        most = min(len(text), len(stop) - 1)
        return next((n for n in range(most, 0, -1) if stop.startswith(text[len(text) - n :])), 0)
