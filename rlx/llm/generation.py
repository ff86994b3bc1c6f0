"""One text that a language model writes, piece by piece."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from rlx.errors import BusyError, ModelFormatError
from rlx.llm.awaited import awaited
from rlx.llm.choosing import Chooser
from rlx.llm.speculation import Drafter, Lookup, Paying
from rlx.llm.stats import Stats
from rlx.llm.stepping import step
from rlx.llm.stopping import Stopper
from rlx.models.chat.prompt import Answer, Prompt
from rlx.models.sampling import Row
from rlx.records import dataclass, replace

if TYPE_CHECKING:
    from rlx.llm.model import LanguageModel

__all__ = ["Generation", "Limits"]


@dataclass(frozen=True)
class Limits:
    """What ends a text: `most` new tokens, end tokens, stop strings.

    `shifts`: a full context is no end, its older half is left out; but for the first `fixed` tokens. `guesses`: so many
    tokens may be guessed ahead.
    """

    most: int
    ends: frozenset[int] = frozenset()
    stops: Sequence[str] = ()
    shifts: bool = False
    fixed: int = 0
    guesses: int = 0


class Generation(Iterator[str]):
    """Pieces of text, computed as they are asked for; `"".join(generation)` is the whole.

    `ids` are the new tokens so far, `finish_reason` is None until it has ended: then "stop" (by an end token or a stop
    string, or the form of the answer is complete), "length" (of `max_tokens`, or the context is full) or "cancelled".
    `text` and `stats` are those so far; `seed` is that of the draws. `logprobs`, where they were asked for, are ln of
    the probability of each of `ids` by the model's own logits, before temperature, penalties and forms.
    """

    def __init__(
        self,
        llm: LanguageModel,
        prompt: Sequence[int],
        limits: Limits,
        choose: Chooser,
        drafter: Drafter | None = None,
        adapter: Sequence[str] | None = None,
        logprobs: bool = False,
    ) -> None:
        self.ids: list[int] = []
        self.finish_reason: str | None = None
        self.stats = Stats(prompt_tokens=len(prompt))
        self.prompt, self.limits, self.choose = list(prompt), limits, choose
        self.logprobs: list[float] | None = [] if logprobs else None
        self.adapter = adapter  # the LoRA adapters that it is computed with, None for all
        self.slot = -1  # the cache's slot that it has, once it has begun
        self.pending: list[int] = []  # the tokens that are to be computed next
        self.seed = choose.sampling.seed
        self._llm, self._stopper, self._decoder = llm, Stopper(limits.stops), llm.text_decoder()
        self._said: list[str] = []
        self._drafter: Drafter = Lookup() if drafter is None else drafter
        self._paying = Paying()
        self._begun = perf_counter()

    def __repr__(self) -> str:
        how = self.finish_reason or 'goes on: "".join(it) is its text'
        return f"<Generation of {len(self.ids)} token{'s' * (len(self.ids) != 1)} so far, {how}>"

    def __next__(self) -> str:
        while self.finish_reason is None:
            with self._llm.alone():
                piece = self._next()
            if piece:
                return piece
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[str]:
        """The pieces for `async for`, each computed in a thread; giving up cancels it."""
        return awaited(self, self.cancel)

    def _next(self) -> str:
        if self.finish_reason is not None:  # another thread may have ended it
            return ""
        if self.slot < 0:
            self.begin(*self._llm.begin(self, self.prompt))
        self.check_slot()
        (piece,) = step(self._llm.slots, [self])
        return piece

    @property
    def text(self) -> str:
        """The pieces so far, joined."""
        return "".join(self._said)

    def said(self, prompt: Prompt) -> Answer | None:
        """It as the answer to a prompt; None where its text is not that of its tokens (a stop string cut it short)."""
        ids = self.ids[:-1] if self.ids and self.ids[-1] in self.limits.ends else self.ids
        whole = self._llm.text_decoder().decode(ids) == self.text
        return Answer(prompt, self.text, tuple(ids)) if whole else None

    def cancel(self) -> None:
        """Ends it before the next token."""
        if self.finish_reason is None:
            self.finish_reason = "cancelled"

    # ---- for who runs it

    def begin(self, slot: int, cached: int) -> None:
        """It has a slot, in which so many tokens of its prompt are."""
        self.slot, self.pending = slot, self.prompt[cached:]
        self.stats = replace(self.stats, cached_tokens=cached)

    def check_slot(self) -> None:
        """Raises `BusyError` where another one has its slot."""
        if self._llm.slots.owner(self.slot) is not self:
            raise BusyError("this generation can't go on: the model has begun another one since")

    def make_room(self) -> None:
        """Where the context is full, computes it anew without the older half of what is not fixed."""
        slots, fixed = self._llm.slots, self.limits.fixed
        tokens = slots.filled[self.slot] + self.pending
        if self.limits.shifts and len(tokens) > slots.capacity:
            kept = slots.cut(self.slot, fixed)
            self.pending = tokens[kept:fixed] + tokens[fixed:][-max((slots.capacity - fixed) // 2, 1) :]

    def guess(self, room: int) -> list[int]:
        """Guesses of the tokens that follow the pending ones, where these may pay; at most `room`."""
        most = min(self.limits.guesses, room, self.limits.most - len(self.ids) - 1)
        if most <= 0 or not self.ids or not self._paying.now:
            return []
        text = self._llm.slots.filled[self.slot] + self.pending
        history = self._llm.slots.sampler.history

        def row(guesses: Sequence[int]) -> Row | None:
            if self.choose.plain:
                return None
            return Row(self.choose.sampling, [*text, *guesses][-history:], self.choose.step + len(guesses))

        return self.choose.allowed(self._drafter(text, most, row, self.slot))

    def took(
        self,
        count: int,
        guesses: Sequence[int],
        tokens: Sequence[int],
        seconds: float,
        logprobs: Sequence[float] = (),
    ) -> tuple[str, int]:
        """So many pending tokens and guesses were computed, and these tokens chosen after the last and each guess.

        `logprobs` are those of these tokens, where this text or another of the run asks for them. Gives the text that
        it goes on by, and how many guesses were right.
        """
        del self.pending[:count]
        s = self.stats
        if not tokens:
            self.stats = replace(s, prompt_seconds=s.prompt_seconds + seconds)
            return "", 0
        if self.ids:
            slots = self._llm.slots
            read = 0 if slots.reading is None else slots.reading.at(len(slots.filled[self.slot]))
            s = replace(s, decode_seconds=s.decode_seconds + seconds, decode_bytes=s.decode_bytes + read)
        else:
            now = perf_counter() - self._begun
            s = replace(s, prompt_seconds=s.prompt_seconds + seconds, first_token_seconds=now)
        text, right, decoding = "", 0, bool(self.ids)
        for n, token in enumerate(tokens):
            text += self._accept(token)
            if self.logprobs is not None:
                self.logprobs.append(logprobs[n])
            if n == len(guesses) or token != guesses[n] or self.finish_reason is not None:
                break
            right += 1
        if decoding:
            self._paying.ran(len(guesses), right + 1, seconds)
        s = replace(s, guessed_tokens=s.guessed_tokens + len(guesses), right_tokens=s.right_tokens + right)
        self.stats = self._llm.stats = replace(s, generated_tokens=len(self.ids))
        return text, right

    def _accept(self, token: int) -> str:
        """A token is chosen; gives the text that it adds."""
        self.choose.accept(token)
        self.ids.append(token)
        self.pending = [token]
        piece = self._piece(token)
        self._said.append(piece)
        return piece

    def replay(self, ids: Sequence[int], reason: str | None) -> None:
        """Tokens that were chosen before are its own, and why it ended. Raises `ModelFormatError`."""
        for token in ids:
            if self.finish_reason is not None:
                raise ModelFormatError("restore: tokens follow the end of the text")
            self._accept(token)
        if self.finish_reason is None and reason == "cancelled":
            self.finish_reason = reason
        self.stats = replace(self.stats, generated_tokens=len(ids))

    def _piece(self, token: int) -> str:
        if token in self.limits.ends:
            return self._finished("stop")
        piece = self._stopper.push(self._decoder.push(token))
        if self._stopper.found is not None:
            self.finish_reason = "stop"
        elif self.choose.ended:
            return piece + self._finished("stop")
        elif len(self.ids) >= self.limits.most:
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
