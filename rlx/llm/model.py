"""A language model that has been loaded: it continues texts, and says how probable they are."""

from __future__ import annotations

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
from rlx.ir.shape import upper
from rlx.llm.choosing import Chooser
from rlx.llm.generation import Generation
from rlx.llm.options import GenerationKeywords, options_of
from rlx.llm.scoring import Score, logprobs_of, perplexity_of
from rlx.llm.stats import Stats
from rlx.llm.stopping import Stopper
from rlx.models.decoder import sampler_of
from rlx.models.sampling import Row
from rlx.runtime.compiled import CompiledGraph

if TYPE_CHECKING:
    from rlx.models.chat.prompt import Answer, Prompt
    from rlx.models.constraint import Constraints
    from rlx.models.tokenizer import Tokenizer

__all__ = ["LanguageModel"]

MESSAGES = "[{'role': 'user', 'content': 'hello'}]"  # as the shortest conversation is written


@bounded_class(ExecutionError)
class LanguageModel:
    """What `rlx.load_llm` gives; `model` is the compiled graph below it, `stats` are those of the last generation.

    One text at a time: a generation that is begun takes the cache from the one before. Threads don't wait for one
    another: the second gets a `BusyError`. A prompt that begins like the last text computes only what is new. It is a
    context manager that closes at the end of the block.
    """

    def __init__(self, model: CompiledGraph, path: Path) -> None:
        self.model, self.path = model, path
        self.stats = Stats()
        self.generation: Generation | None = None
        sizes = {spec.name: spec.shape for spec in (*model.inputs, *model.outputs)}
        self._prefill = int(upper(sizes["ids"][1]) or 1)
        self._rows = int(upper(sizes["wanted"][0]) or 1)
        self.vocab = int(sizes["logits"][1])
        self.context = int(model.states["cache.k.0"].spec.shape[2])
        self.sampler = sampler_of(self.vocab)
        self._neutral: dict[int, dict[str, Array]] = {}  # inputs of the sampler where nothing is drawn, by rows
        self._lock = threading.Lock()
        self._talk: tuple[Prompt, Generation] | None = None  # the last chat
        self.filled: list[int] = []  # the tokens whose keys and values the cache holds

    def __repr__(self) -> str:
        return f"<LanguageModel {self.path.name!r} on {self.model.device!r}, context of {self.context:,} tokens>"

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
        ends), `ignore_eos` (go on after the token that ends an answer), `constraint` (a form, of `constraints`), and
        how tokens are drawn: `temperature` (0, the default: the likeliest), `top_k`, `top_p`, `min_p`, `typical_p`,
        `repetition_penalty`, `frequency_penalty`, `presence_penalty`, `logit_bias`, `seed`. Raises `OptionError`
        for a prompt that is empty, has no room in the context or holds what is no token.
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

    def _generation(self, ids: list[int], max_tokens: int | None, options: Mapping[str, Any]) -> Generation:
        chosen = options_of(options)
        if len(ids) > self.context:
            raise OptionError(
                f"a prompt of {len(ids):,} tokens has no room in a context of {self.context:,}: load the model with a "
                "larger context="
            )
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise OptionError(f"max_tokens={max_tokens!r}: expected a number >= 1")
        room = self.context - len(ids) + 1  # the last token that is written is not read
        most = room if max_tokens is None else min(room, max_tokens)
        ends = frozenset() if chosen.ignore_eos else frozenset(self.tokenizer.eos_ids)
        constraint = None if chosen.constraint is None else chosen.constraint.copy()  # the next text begins anew
        choose = Chooser(self, chosen.sampling, constraint)
        return Generation(self, ids, most, Stopper(chosen.stop), ends, choose)

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
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> float:
        """exp of the mean of -log-probability over the tokens of a text, in windows of the context.

        A window begins `stride` tokens after the one before (None: where that ends), and of each only those tokens
        count that the one before did not reach: with a shorter stride they have more before them, and it takes longer.
        `progress` is called with how many tokens are done and how many there are. Raises `OptionError`.
        """
        return perplexity_of(self, self._ids(text), self.context if stride is None else stride, progress)

    # ---- the cache

    def reset(self) -> None:
        """Forgets the last text."""
        with self.alone():
            self.begin(None, [])

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
            self.generation, self.filled = None, []
            self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(self, generation: Generation | None, prompt: Sequence[int]) -> int:
        """Makes a generation the one that has the cache; gives how many tokens of its prompt are there already.

        These are never all: the last token is computed anew.
        """
        same = 0
        while same < min(len(self.filled), len(prompt) - 1) and self.filled[same] == prompt[same]:
            same += 1
        self.generation = None
        self.model.states["length"].write(np.full(1, same, np.int64))
        self.generation, self.filled = generation, self.filled[:same]
        return same

    def logits(self, ids: Sequence[int]) -> Array:
        """f32 [tokens, vocab] after each of these tokens, which follow those in the cache."""
        return np.concatenate(
            [
                self._run(part, range(len(part)), "logits")
                for part in (ids[start : start + self._rows] for start in range(0, len(ids), self._rows))
            ]
        )

    def extend(self, ids: Sequence[int], output: str, row: Row | None = None) -> Array:
        """An output for the last of these tokens, which follow those in the cache; sampled as `row` says."""
        for start in range(0, len(ids), self._prefill):
            part = ids[start : start + self._prefill]
            if start + len(part) == len(ids):
                return self._run(part, [len(part) - 1], output, row)
            self._run(part, [0], None)
        raise OptionError("there are no tokens to compute")

    def _run(self, ids: Sequence[int], wanted: Sequence[int], output: str | None, row: Row | None = None) -> Array:
        """One run of the model on tokens; the results of the places `wanted`."""
        given = {"ids": np.array([ids], np.int64), "counts": np.array([len(ids)], np.int64)}
        given["wanted"] = np.array(wanted, np.int64)
        if row is not None:
            given |= self.sampler.feeds([row])
        else:
            if len(wanted) not in self._neutral:
                self._neutral[len(wanted)] = self.sampler.feeds([Row()] * len(wanted))
            given |= self._neutral[len(wanted)]
        try:
            made = self.model.run(given, outputs=[] if output is None else [output])
        except BaseException:
            self.filled, self.generation = [], None  # states may be updated in part
            raise
        self.filled += ids
        return np.asarray(made[0]) if made else np.empty(0)

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        """The tokens of a prompt, checked."""
        if isinstance(prompt, str):
            ids = self.tokenize(prompt)
        elif isinstance(prompt, bytes) or not (isinstance(prompt, Sequence | np.ndarray) and np.ndim(prompt)):
            raise OptionError(f"prompt: expected a text or a list of tokens, got {type(prompt).__name__}")
        else:
            ids = [int(i) if isinstance(i, int | np.integer) and not isinstance(i, bool) else -1 for i in prompt]
        wrong = next((at for at, i in enumerate(ids) if not 0 <= i < self.vocab), None)
        if wrong is not None:
            given = f"{prompt[wrong]!r:.60}"
            raise OptionError(f"prompt: {given} is no token: expected a text, or numbers of 0 to {self.vocab - 1}")
        if not ids:
            raise OptionError("prompt: it has no tokens; a model without a BOS token needs a text to go on from")
        return ids
