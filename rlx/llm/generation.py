"""One text that a language model writes, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from rlx.errors import BusyError
from rlx.llm.choosing import Chooser
from rlx.llm.stats import Stats
from rlx.llm.stopping import Stopper
from rlx.models.chat.prompt import Answer, Prompt

if TYPE_CHECKING:
    from rlx.llm.model import LanguageModel

__all__ = ["Generation"]


class Generation(Iterator[str]):
    """Pieces of text, computed as they are asked for; `"".join(generation)` is the whole.

    `ids` are the new tokens so far, `finish_reason` is None until it has ended: then "stop" (by an end token or a stop
    string, or the form of the answer is complete), "length" (of `max_tokens`, or the context is full) or "cancelled".
    `text` and `stats` are those so far; `seed` is that of the draws.
    """

    def __init__(
        self,
        llm: LanguageModel,
        prompt: Sequence[int],
        most: int,
        stopper: Stopper,
        ends: frozenset[int],
        choose: Chooser,
    ) -> None:
        self.ids: list[int] = []
        self.finish_reason: str | None = None
        self.stats = Stats(prompt_tokens=len(prompt))
        self._llm, self._prompt, self._most, self._choose = llm, list(prompt), most, choose
        self._stopper, self._ends = stopper, ends
        self._decoder = llm.text_decoder()
        self.seed = choose.sampling.seed
        self._said: list[str] = []
        self._begun = perf_counter()

    def __repr__(self) -> str:
        how = self.finish_reason or 'goes on: "".join(it) is its text'
        return f"<Generation of {len(self.ids)} token{'s' * (len(self.ids) != 1)} so far, {how}>"

    def __next__(self) -> str:
        while self.finish_reason is None:
            with self._llm.alone():
                piece = self._step() if self.finish_reason is None else ""  # another thread may have ended it
            if piece:
                self._said.append(piece)
                return piece
        raise StopIteration

    @property
    def text(self) -> str:
        """The pieces so far, joined."""
        return "".join(self._said)

    def said(self, prompt: Prompt) -> Answer | None:
        """It as the answer to a prompt; None where its text is not that of its tokens (a stop string cut it short)."""
        ids = self.ids[:-1] if self.ids and self.ids[-1] in self._ends else self.ids
        whole = self._llm.text_decoder().decode(ids) == self.text
        return Answer(prompt, self.text, tuple(ids)) if whole else None

    def cancel(self) -> None:
        """Ends it before the next token."""
        if self.finish_reason is None:
            self.finish_reason = "cancelled"

    def _step(self) -> str:
        """The text that one more token gives, "" where that is none yet."""
        llm, begun = self._llm, perf_counter()
        if not self.ids:
            cached = llm.begin(self, self._prompt)
            token = self._choose(self._prompt[cached:])
            now = perf_counter()
            self.stats = Stats(len(self._prompt), cached, 1, now - begun, now - self._begun)
        else:
            if llm.generation is not self:
                raise BusyError("this generation can't go on: the model has begun another one since")
            token = self._choose(self.ids[-1:])
            s, took = self.stats, perf_counter() - begun
            self.stats = Stats(
                s.prompt_tokens, s.cached_tokens, len(self.ids) + 1, s.prompt_seconds, s.first_token_seconds,
                s.decode_seconds + took,
            )  # fmt: skip
        self.ids.append(token)
        llm.stats = self.stats
        if token in self._ends:
            return self._finished("stop")
        piece = self._stopper.push(self._decoder.push(token))
        if self._stopper.found is not None:
            self.finish_reason = "stop"
        elif self._choose.ended:
            return piece + self._finished("stop")
        elif len(self.ids) >= self._most:
            return piece + self._finished("length")
        return piece

    def _finished(self, reason: str) -> str:
        """The rest of the text, once no token follows."""
        self.finish_reason = reason
        rest = self._stopper.push(self._decoder.finish())
        if self._stopper.found is not None:
            self.finish_reason = "stop"
            return rest
        return rest + self._stopper.finish()
