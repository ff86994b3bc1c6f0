"""Several texts that a language model writes at the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING

from rlx.llm.awaited import awaited
from rlx.llm.generation import Generation
from rlx.llm.slots import FORK, shared
from rlx.llm.stepping import step

if TYPE_CHECKING:
    from rlx.llm.model import LanguageModel

__all__ = ["Together"]


class Together(Iterator[tuple[int, str]]):
    """Pieces of several texts as they come: (number of the text, piece); `generations` are the texts.

    As many go on at a time as the cache has slots, the others wait. What prompts begin with in common is computed once.
    """

    def __init__(self, llm: LanguageModel, generations: Sequence[Generation]) -> None:
        self.generations = tuple(generations)
        self._llm, self._ready = llm, deque[tuple[int, str]]()
        self._numbers = {id(made): number for number, made in enumerate(self.generations)}

    def __repr__(self) -> str:
        done = sum(made.finish_reason is not None for made in self.generations)
        return f"<Together: {len(self.generations)} texts, {done} finished>"

    def __next__(self) -> tuple[int, str]:
        while not self._ready:
            with self._llm.alone():
                going = self._seated()
                if not going:
                    raise StopIteration
                for made, piece in zip(going, step(self._llm.slots, going), strict=True):
                    if piece:
                        self._ready.append((self._numbers[id(made)], piece))
        return self._ready.popleft()

    def __aiter__(self) -> AsyncIterator[tuple[int, str]]:
        """The pieces for `async for`, computed in a thread; giving up cancels all texts."""
        return awaited(self, self.cancel)

    def texts(self) -> list[str]:
        """Writes all of them to their ends."""
        for _ in self:
            pass
        return [made.text for made in self.generations]

    def cancel(self) -> None:
        """Ends all of them before their next tokens."""
        for made in self.generations:
            made.cancel()

    def _seated(self) -> list[Generation]:
        """Those that go on now: waiting ones get the slots that are free."""
        llm = self._llm
        going = [made for made in self.generations if made.finish_reason is None and made.slot >= 0]
        for made in going:
            made.check_slot()
        for made in self.generations:
            if len(going) >= llm.slots.count:
                break
            if made.finish_reason is None and made.slot < 0 and not self._better_later(made, going):
                made.begin(*llm.slots.seat(made, made.prompt, [other.slot for other in going], made.adapter))
                going.append(made)
        return going

    def _better_later(self, made: Generation, going: Sequence[Generation]) -> bool:
        """Whether the beginning of its prompt is being computed for another one, of which it can be copied then."""
        slots = self._llm.slots
        there = max(slots.begins_like(slot, made.prompt, made.adapter) for slot in range(slots.count))
        return any(
            not other.ids and other.adapter == made.adapter and shared(other.prompt, made.prompt) >= there + FORK
            for other in going
        )
