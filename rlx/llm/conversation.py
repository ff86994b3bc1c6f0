"""A conversation with a language model: what was said, and what comes next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlx.errors import OptionError
from rlx.llm.generation import Generation
from rlx.llm.model import LanguageModel

__all__ = ["Conversation"]


class Conversation:
    """Messages that a user and a model say in turns, after what the model is told first (`system`).

    `options` are those of `LanguageModel.chat`, for the next answers; `last` is the last answer. Where the context has
    no room left, the oldest turns (a message and its answer) are left out; `dropped` is how many so far.
    """

    def __init__(self, llm: LanguageModel, system: str | None = None, **options: Any) -> None:
        self.llm, self.system, self.options = llm, system, options
        self.turns: list[dict[str, str]] = []
        self.last: Generation | None = None
        self.dropped = 0

    @property
    def _first(self) -> list[dict[str, str]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    @property
    def messages(self) -> list[dict[str, str]]:
        """All of it, as `LanguageModel.chat` takes it."""
        return [*self._first, *self.turns]

    def say(self, text: str) -> Iterator[str]:
        """The answer to a message, in pieces; both are part of the conversation once there is some of it."""
        asked = {"role": "user", "content": text}
        oldest = self._without_room(asked)
        made = self.llm.chat([*self._first, *self.turns[oldest:], asked], **self.options)
        del self.turns[:oldest]
        self.dropped += oldest // 2
        self.last = made
        try:
            yield from made
        finally:
            if made.ids:
                self.turns += [asked, {"role": "assistant", "content": made.text}]

    def _without_room(self, asked: dict[str, str]) -> int:
        """How many of the oldest messages the context has no room for, beside the others and an answer."""
        context, most = self.llm.context, self.options.get("max_tokens")
        room = context - min(most or context // 4, context // 2)
        encode = self.llm.tokenizer.encode_chat
        count = 0
        while count < len(self.turns) and len(encode([*self._first, *self.turns[count:], asked])) > room:
            count += 2
        return count

    def stop(self) -> None:
        """Ends the answer before its next token; what was said of it stays."""
        if self.last is not None:
            self.last.cancel()

    def undo(self) -> str | None:
        """Takes back the last message and its answer; gives the message, None where there is none."""
        if not self.turns:
            return None
        asked, _ = self.turns[-2:]
        del self.turns[-2:]
        return asked["content"]

    def resume(self, messages: Any) -> None:
        """Goes on with what `messages` of another gave. Raises `OptionError`."""
        turns = [dict(m) for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
        fits = len(turns) > 0 and len(turns) == len(messages)
        first = turns[:1] if turns and turns[0].get("role") == "system" else []
        rest = turns[len(first) :]
        roles = ["user", "assistant"] * (len(rest) // 2)
        if not fits or [m.get("role") for m in rest] != roles or not all(type(m.get("content")) is str for m in turns):
            raise OptionError("expected a list of messages, one of the system or none, then of user and assistant")
        self.system, self.turns = first[0]["content"] if first else None, rest

    def clear(self) -> None:
        """Forgets what was said."""
        self.turns.clear()
