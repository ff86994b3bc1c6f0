"""A language model that has been loaded: it continues texts, and says how probable they are."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np

from rlx.boundary import bounded_class
from rlx.errors import BusyError, ClosedError, ExecutionError, OptionError
from rlx.ir.graph import Array
from rlx.llm.choosing import Chooser
from rlx.llm.generation import Generation, Limits
from rlx.llm.options import GenerationKeywords, options_of
from rlx.llm.scoring import Score, logprobs_of, perplexity_of
from rlx.llm.slots import Slots
from rlx.llm.speculation import SmallModel
from rlx.llm.stats import Stats
from rlx.llm.together import Together
from rlx.models.sizes import sampler_of
from rlx.models.tokenizer.numbers import token_numbers
from rlx.progress import Watcher, reporting
from rlx.runtime.compiled import CompiledGraph
from rlx.units import as_int

if TYPE_CHECKING:
    from rlx.models.chat.prompt import Answer, Prompt
    from rlx.models.constraint import Constraint, Constraints
    from rlx.models.tokenizer import Tokenizer

__all__ = ["LanguageModel"]

MESSAGES = "[{'role': 'user', 'content': 'hello'}]"  # as the shortest conversation is written


@bounded_class(ExecutionError)
class LanguageModel:
    """What `rlx.load_llm` gives; `model` is the compiled graph below it, `stats` are those of the last generation.

    The cache has `slots`, each for one text: a generation that is begun takes one that nobody goes on with, or where
    there is none that of another generation. Threads don't wait for one another: the second gets a `BusyError`. A
    prompt that begins like a text in the cache computes only what is new. It is a context manager that closes at the
    end of the block.
    """

    def __init__(self, model: CompiledGraph, path: Path, context: Callable[[], int]) -> None:
        self.model, self.path = model, path
        self.stats = Stats()
        self.vocab = int(next(spec.shape[1] for spec in model.outputs if spec.name == "logits"))
        self.slots = Slots(model, sampler_of(self.vocab), context)
        self.context = self.slots.capacity
        self.draft: LanguageModel | None = None
        self.drafter: SmallModel | None = None
        self._lock = threading.Lock()
        self._talk: tuple[Prompt, Generation] | None = None  # the last chat

    def __repr__(self) -> str:
        return f"<LanguageModel {self.path.name!r} on {self.model.device!r}, context of {self.context:,} tokens>"

    def with_draft(self, draft: LanguageModel) -> None:
        """Has another model guess ahead; it is closed with this one. Raises `OptionError` for one with other tokens."""
        if draft.vocab != self.vocab or draft.tokenizer.texts != self.tokenizer.texts:
            raise OptionError(f"draft: {draft.path.name} has other tokens than {self.path.name}")
        self.draft, self.drafter = draft, SmallModel(draft)

    # ---- text and tokens

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model's files. Raises `ModelFormatError` where they have none that is known."""
        from rlx.models.tokenizer import load

        return load(self.path)

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """The tokens of a text, with what the model expects before it (BOS).

        `special`: text that looks like a special token is one.
        """
        tokenizer = self.tokenizer
        ids = tokenizer.encode(text, special)
        if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            ids = [tokenizer.bos_id, *ids]
        return ids

    def text_decoder(self) -> Any:
        """What turns tokens that come one by one into text."""
        return self.tokenizer.decoder(continued=True)

    # ---- writing

    def generate(
        self, prompt: str | Sequence[int], max_tokens: int | None = None, **options: Unpack[GenerationKeywords]
    ) -> Generation:
        """The text that follows a prompt (a text, or tokens), as an iterator of pieces.

        At most `max_tokens` tokens (None: as many as the context has room for). Options: `stop` (texts before which it
        ends), `ignore_eos` (go on after the token that ends an answer), `constraint` (a form, of `constraints`),
        `overflow` (what a full context is: "error" for the prompt and the end of the text, "truncate" leaves out the
        beginning of a prompt, "shift" too, and then the older half of the text, as often as the context is full),
        `speculate` (so many tokens may be guessed ahead, by the draft model if there is one: the text is the same),
        `adapter` (the one LoRA adapter of `lora=` that it is computed with, None for none; without it: all), `logprobs`
        (the generation has those of its tokens), and how tokens are drawn: `temperature` (0, the default: the
        likeliest), `top_k`, `top_p`, `min_p`, `typical_p`, `repetition_penalty`, `frequency_penalty`,
        `presence_penalty`, `logit_bias`, `seed`. Raises `OptionError` for a prompt that is empty, has no room in the
        context or holds what is no token, `NameNotFound` for an adapter that the model was not loaded with.
        """
        return self._generation(self._ids(prompt), max_tokens, options)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> Generation:
        """The answer to a conversation, a list of {"role": ..., "content": ...}, by the model's own chat template.

        Options are those of `generate`. A conversation that goes on from the last answer computes what is new only:
        the answer's tokens are kept as the model chose them.
        """
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
            raise OptionError(f"chat: expected a list of messages, such as {MESSAGES}; got {type(messages).__name__}")
        if not messages:
            raise OptionError(f"chat: there are no messages; expected a list such as {MESSAGES}")
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message:
                raise OptionError(f"chat: expected messages such as {MESSAGES}; one is {message!r:.80}")
            if "content" not in message and not message.get("tool_calls"):
                raise OptionError(f"chat: this message has no 'content': {message!r:.80}; expected {MESSAGES}")
        prompt = self.tokenizer.prompt(messages, after=self._answer())
        made = self._generation(self._ids(prompt.ids), max_tokens, options)
        self._talk = prompt, made
        return made

    def _answer(self) -> Answer | None:
        """What was said in the last chat, if it is known as tokens."""
        return None if self._talk is None else self._talk[1].said(self._talk[0])

    def generate_many(
        self,
        prompts: Sequence[str | Sequence[int]],
        max_tokens: int | None = None,
        *,
        n: int = 1,
        **options: Unpack[GenerationKeywords],
    ) -> Together:
        """The texts that follow several prompts, `n` for each, as an iterator of (number of the text, piece).

        They are written at the same time, as many as the model was loaded with `slots=` for; each is what `generate`
        gives for its prompt alone, to the bit. Text k of a prompt has the seed `seed` + k. Raises `OptionError`.
        """
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence) or not prompts:
            raise OptionError(f"generate_many: expected several prompts, got {prompts!r:.60}")
        if type(n) is not int or n < 1:
            raise OptionError(f"n={n!r}: expected a number >= 1")
        options_of(options)  # before one of them is used
        seed = options.get("seed")
        seeds: list[int | None] = [None if seed is None else seed + k for k in range(n)]
        every = [self._ids(prompt) for prompt in prompts]
        made = [self._generation(ids, max_tokens, {**options, "seed": own}) for ids in every for own in seeds]
        return Together(self, made)

    async def agenerate(
        self, prompt: str | Sequence[int], max_tokens: int | None = None, **options: Unpack[GenerationKeywords]
    ) -> Generation:
        """As `generate`, for `async for piece in await llm.agenerate(...)`: a thread of the event loop's computes.

        A task that is cancelled ends the text.
        """
        import asyncio  # slow to import

        return await asyncio.to_thread(self.generate, prompt, max_tokens, **options)

    async def achat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> Generation:
        """As `chat`, for `async for`; see `agenerate`."""
        import asyncio

        return await asyncio.to_thread(self.chat, messages, max_tokens, **options)

    def snapshot(self, generation: Generation) -> bytes:
        """A text as far as it is written, with its part of the cache; `restore` goes on with it, to the bit.

        Raises `OptionError` for one that has not begun, `BusyError` where another one has its slot.
        """
        from rlx.llm.snapshot import snapshot_of  # slow to import

        with self.alone():
            return snapshot_of(self, generation)

    def restore(self, data: bytes, *, constraint: Constraint | None = None) -> Generation:
        """The generation of a snapshot, also of another process; its `text` so far is there.

        The model must be the same, and `kv_dtype`; `context` need not. `constraint` is given anew where it had one.
        Raises `ModelFormatError` for bytes that are damaged, and `OptionError`.
        """
        from rlx.llm.snapshot import restored

        with self.alone():
            return restored(self, data, constraint)

    def _generation(self, ids: list[int], max_tokens: int | None, options: Mapping[str, Any]) -> Generation:
        chosen = options_of(options)
        self.slots.sampler.check(chosen.sampling)
        self.model.adapters.rows(chosen.adapter or ())  # raises for one that is not there
        asked = as_int(max_tokens)
        if max_tokens is not None and (asked is None or asked < 1):
            raise OptionError(f"max_tokens={max_tokens!r}: expected a number >= 1")
        fixed = int(ids[:1] == [self.tokenizer.bos_id]) if chosen.overflow != "error" else 0
        if len(ids) > self.context:
            if chosen.overflow == "error":
                raise OptionError(
                    f"a prompt of {len(ids):,} tokens has no room in a context of {self.context:,}: load the model "
                    'with a larger context=, or leave out its beginning by overflow="truncate"'
                )
            free = min(asked or self.context // 4, self.context // 2)
            ids = [*ids[:fixed], *ids[len(ids) - max(self.context - fixed - free, 1) :]]
        room = self.context - len(ids) + 1  # the last token that is written is not read
        shifts = chosen.overflow == "shift" and self.context > 2 + fixed
        most = (asked or sys.maxsize) if shifts else min(room, asked or room)
        ends = frozenset() if chosen.ignore_eos else frozenset(self.tokenizer.eos_ids)
        constraint = None if chosen.constraint is None else chosen.constraint.copy()  # the next text begins anew
        limits = Limits(most, ends, chosen.stop, shifts, fixed, chosen.speculate)
        choose = Chooser(chosen.sampling, constraint, told=chosen.logprobs)
        return Generation(self, ids, limits, choose, self.drafter, chosen.adapter, chosen.logprobs)

    @cached_property
    def constraints(self) -> Constraints:
        """Makes forms that an answer must have, for `generate(constraint=...)`.

        They are made of JSON schemas, regular expressions and grammars. Raises `DeviceUnavailable` where the library
        `llguidance` is missing.
        """
        from rlx.models.constraint import Constraints

        return Constraints(self.tokenizer, vocab=self.vocab)

    # ---- probabilities

    def score(self, text: str | Sequence[int]) -> Score:
        """How probable each token of a text (or of tokens) is after those before it. Raises `OptionError`."""
        ids = self._ids(text)
        if len(ids) > self.context:
            raise OptionError(f"score: {len(ids):,} tokens have no room in a context of {self.context:,}")
        return Score(tuple(ids), tuple(logprobs_of(self, ids)))

    def perplexity(
        self,
        text: str | Sequence[int],
        *,
        stride: int | None = None,
        progress: Watcher | None = None,
    ) -> float:
        """exp of the mean of -log-probability over the tokens of a text, in windows of the context.

        A window begins `stride` tokens after the one before (None: where that ends), and of each only those tokens
        count that the one before did not reach: with a shorter stride they have more before them, and it takes longer.
        `progress` is called with `rlx.progress.Progress`; its stage is "tokens". Raises `OptionError`, also for
        a text of fewer than 2 tokens.
        """
        with reporting(progress, {"tokens": 1.0}):
            return perplexity_of(self, self._numbers(text), self.context if stride is None else stride)

    @property
    def bandwidth_share(self) -> float | None:
        """The part of the memory's bandwidth that the last generation's new tokens read with.

        None before there are two, and where this machine has not been calibrated (`rlx calibrate`) or the device does
        not say what it reads. What counts as 1 is the rate at which a sum of two large vectors moves bytes.
        """
        from rlx.cost.kept import kept_ceilings  # slow to import

        reading, rate = self.slots.reading, self.stats.bytes_per_second
        made = kept_ceilings(self.model.device, self.model._options.threads) if reading is not None and rate else None
        return None if made is None or reading is None else rate / made.bytes_rate(reading.weights)

    # ---- adapters

    @property
    def adapters(self) -> Mapping[str, float]:
        """The scales of the LoRA adapters that the model was loaded with, by name."""
        return dict(self.model.adapters)

    def set_adapter(self, name: str | None, scale: float = 1.0, *, only: bool = False) -> None:
        """Sets the scale of an adapter, 0 for off; with `only`, that of all others to 0. None: of all.

        Texts in the cache are forgotten, as they were read with the scales before. Raises `NameNotFound`.
        """
        with self.alone():
            self.model.set_adapter(name, scale, only=only)
            self.slots.forget()

    # ---- the cache

    def reset(self) -> None:
        """Forgets the texts in the cache."""
        with self.alone():
            self.slots.forget()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """What is done within has the cache to itself. Raises `BusyError` where another thread is in such a part."""
        if not self._lock.acquire(blocking=False):
            raise BusyError("the language model is at work in another thread: there is one cache, so load one for each")
        try:
            if self.model.closed:
                raise ClosedError("the language model is closed: load it again")
            yield
        finally:
            self._lock.release()

    def close(self) -> None:
        """Gives back weights, cache and arena; later generations and scores raise `ClosedError`.

        Closing again does nothing. Raises `BusyError` while another thread computes a token.
        """
        if self.model.closed:
            return
        with self.alone():
            self.model.close()
            if self.draft is not None:
                self.draft.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(self, generation: Generation | None, prompt: Sequence[int]) -> tuple[int, int]:
        """Gives a generation (or None) a slot of the cache, and how many tokens of its prompt are there already.

        These are never all: the last token is computed anew.
        """
        return self.slots.seat(generation, prompt, adapter=None if generation is None else generation.adapter)

    def extend(self, slot: int, ids: Sequence[int], output: str) -> Array:
        """An output [tokens, ...] after each of these tokens, which follow those in the slot."""
        size = min(self.slots.rows, self.slots.prefill)
        parts = (ids[start : start + size] for start in range(0, len(ids), size))
        found = [self.slots.run({slot: part}, [(slot, at) for at in range(len(part))], output) for part in parts]
        return np.concatenate(found)

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        """The tokens of a prompt, checked: one at least."""
        ids = self._numbers(prompt)
        if not ids:
            raise OptionError("prompt: it has no tokens; a model without a BOS token needs a text to go on from")
        return ids

    def _numbers(self, text: str | Sequence[int]) -> list[int]:
        """The tokens of a text, checked."""
        return self.tokenize(text) if isinstance(text, str) else token_numbers(text, self.vocab, "prompt")
