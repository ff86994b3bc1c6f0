"""The tokenizer that all kinds of files give."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from rlx.errors import ModelFormatError, OptionError
from rlx.models.chat import render, tool_format
from rlx.models.chat.guard import Guard
from rlx.models.chat.prompt import Answer, Prompt
from rlx.models.tokenizer.library import tokenizers, translated
from rlx.models.tokenizer.pieces import Decoder, Pieces
from rlx.records import dataclass, field

__all__ = ["Ends", "Templates", "Tokenizer"]

MAX_TEXT = 1 << 28  # characters of one text
MAX_SPECIAL = 1 << 16  # special tokens; a family with many unused ones has some 6,000


@dataclass(frozen=True)
class Ends:
    """What begins and ends a text: BOS or CLS, the tokens that end an answer, and what `encode(ends=True)` adds.

    `unknown` stands for what the vocabulary has no token for.
    """

    bos: int | None = None
    unknown: int | None = None
    eos: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()


@dataclass(frozen=True)
class Templates:
    """Chat templates by name, and the values that they find in variables: bos_token and the like."""

    texts: Mapping[str, str]
    variables: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """Turns text into tokens and back.

    Special tokens (BOS, ends of turns, roles) are found in a text only where the caller allows it; elsewhere text that
    looks like one is text. May be used by several threads at a time.
    """

    def __init__(
        self, library: Any, pieces: Pieces, ends: Ends, templates: Templates, where: str, *, plain: Any = None
    ) -> None:
        """`library` finds special tokens; `plain`, made of it where it is None, does not."""
        self._pieces, self._ends, self._templates, self._where = pieces, ends, templates, where
        self._special = library
        self._kept_out = pieces.special - {ends.unknown}  # of what text can spell
        if len(self._kept_out) > MAX_SPECIAL:
            raise ModelFormatError(f"{where}: {len(self._kept_out)} special tokens: at most {MAX_SPECIAL} are taken")
        with translated(where):
            self._plain = _without_special(library) if plain is None else plain

    @cached_property
    def _spelt(self) -> re.Pattern[str] | None:
        """What looks like a special token in a text, the longest first."""
        words = sorted(filter(None, (self._pieces.tokens[i] for i in self._kept_out)), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, words))) if words else None

    def __len__(self) -> int:
        """How many tokens there are, from 0 on."""
        return len(self._pieces)

    def __repr__(self) -> str:
        return f"Tokenizer({self._where!r}, {len(self)} tokens)"

    @property
    def texts(self) -> Sequence[str]:
        """How the vocabulary writes each token."""
        return self._pieces.tokens

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, None where the model has none."""
        return self._ends.bos

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer; the first is the file's own EOS."""
        return self._ends.eos

    @property
    def add_bos(self) -> bool:
        """Whether the model expects BOS before a text."""
        return self._ends.bos is not None and self._ends.bos in self._ends.prefix

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that are no text."""
        return self._pieces.special

    def encode(self, text: str, special: bool = False, *, ends: bool = False, most: int | None = None) -> list[int]:
        """The tokens of a text.

        `special`: text that looks like a special token is one (for texts that a chat template made, not for what users
        wrote). `ends`: with what the model expects around a text, such as BOS, EOS, CLS and SEP; BOS is not put before
        a text that begins with it. `most`: the text is cut so that there are at most so many. Raises `OptionError`.
        """
        if not isinstance(text, str):
            raise OptionError(f"encode: expected a str, got {type(text).__name__}")
        if len(text) > MAX_TEXT:
            raise OptionError(f"encode: a text of {len(text)} characters: expected at most {MAX_TEXT}")
        if not text.isascii():
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # lone surrogates are no text
        ids = self._encode(self._special if special else self._plain, text)
        if not special and not self._kept_out.isdisjoint(ids):
            ids = self._apart(text)
        whole = self._framed(ids) if ends else ids
        if most is None or len(whole) <= most:
            return whole
        last = list(self._ends.suffix) if ends else []
        return (whole[: max(most - len(last), 0)] + last)[:most]

    def decode(self, ids: Iterable[int], *, special: bool | Collection[int] = False, continued: bool = False) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD.

        `special`: special tokens (all, or those given) are written out, else they leave nothing. `continued`: the text
        goes on from another, so that a space before it is kept. Raises `OptionError` for a number that is no token.
        """
        return self.decoder(special=special, continued=continued).decode(ids)

    def decoder(self, *, special: bool | Collection[int] = False, continued: bool = False) -> Decoder:
        """A decoder for tokens that come one by one; see `decode`."""
        return Decoder(self._pieces, special=special, continued=continued)

    def token_bytes(self, token: int, *, special: bool | Collection[int] = False) -> bytes:
        """What a token adds to a text, as bytes; nothing for a special one, unless `special`."""
        return self._pieces.bytes_of(token, special=special)

    def token_id(self, text: str) -> int | None:
        """The number of the token that is written so in the vocabulary, None if there is none."""
        found: int | None = self._special.token_to_id(text)
        return found

    @property
    def chat_templates(self) -> tuple[str, ...]:
        """The names of the chat templates; "default" is the one that `chat` takes."""
        return tuple(self._templates.texts)

    @property
    def template_texts(self) -> Mapping[str, str]:
        """The chat templates themselves, by name."""
        return self._templates.texts

    @property
    def tool_format(self) -> str | None:
        """How the model writes calls of tools, for `rlx.models.chat.ToolCalls`; None where it has none."""
        return next(filter(None, map(tool_format, self._templates.texts.values())), None)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt that the model's chat template makes of messages, {"role": ..., "content": ...} each.

        `tools` are those of the OpenAI API. `template` is the name of one, or the text of another. Further `variables`
        go to it (`enable_thinking`). For `encode(..., special=True, ends=True)`; `encode_chat` also keeps what users
        wrote from being special tokens. Raises `ModelFormatError` where there is no template, it refuses the messages,
        or it takes too much time or memory.
        """
        name, text = self._template(template, bool(tools))
        given: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
        given |= {f"{name}_token": self._pieces.tokens[i] for name, i in self._named_ids()} | dict(
            self._templates.variables
        )
        given |= {"messages": [_readable(m) for m in messages], "tools": list(tools) if tools else None}
        given |= {"add_generation_prompt": add_generation_prompt, **variables}
        return render(text, given, f"{self._where}: chat template {name!r}")

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> list[int]:
        """The tokens of a chat, with BOS once; options are those of `chat`.

        Special tokens are those that the template writes: what looks like one in messages and tools stays text.
        """
        return list(self.prompt(messages, tools, **options).ids)

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        after: Answer | None = None,
        **options: Any,
    ) -> Prompt:
        """What `encode_chat` gives, with the template's text; where it goes on from `after`, its tokens are kept.

        It does where the template writes the earlier prompt and the answer as they were: for one that leaves thoughts
        out, or trims what was said, all tokens are made anew.
        """
        guard = Guard(self._spelt, (messages, tools))
        text = self.chat(guard.marked(messages), guard.marked(tools), **options)
        rest, ids = text, list[int]()
        if after is not None and text.startswith(known := after.prompt.text + guard.marked(after.text)):
            rest, ids = text[len(known) :], [*after.prompt.ids, *after.ids]
        for part, written in guard.parts(rest):
            ids += self.encode(part, special=not written)
        return Prompt(text, tuple(self._begun(ids)))

    def _template(self, name: str | None, tools: bool) -> tuple[str, str]:
        """Name and text of the template that is meant."""
        texts = self._templates.texts
        if name is not None and name not in texts and ("{" in name or not texts):
            return "given", name
        wanted = name or ("tool_use" if tools and "tool_use" in texts else "default")
        if wanted not in texts:
            there = ", ".join(map(repr, texts)) or "none"
            raise ModelFormatError(f"{self._where}: there is no chat template {wanted!r}; there are {there}")
        return wanted, texts[wanted]

    def _named_ids(self) -> list[tuple[str, int]]:
        ends = self._ends
        named = (("bos", ends.bos), ("eos", ends.eos[0] if ends.eos else None), ("unk", ends.unknown))
        return [(name, i) for name, i in named if i is not None]

    def _encode(self, library: Any, text: str) -> list[int]:
        with translated(self._where):
            ids: list[int] = library.encode(text, add_special_tokens=False).ids
        return ids

    def _framed(self, ids: list[int]) -> list[int]:
        """The ids with what belongs before and after them."""
        suffix = list(self._ends.suffix)
        after = suffix if ids[len(ids) - len(suffix) :] != suffix else []
        return self._begun(ids + after)

    def _begun(self, ids: list[int]) -> list[int]:
        """The ids with what belongs before them, once."""
        prefix = list(self._ends.prefix)
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def _apart(self, text: str) -> list[int]:
        """The tokens of a text that spells a special one within a word: it is cut there, so that none comes of it."""
        ids: list[int] = []
        places = [0, *(m.start() + 1 for m in self._spelt.finditer(text)), len(text)] if self._spelt else [0, len(text)]
        for start, end in pairwise(places):
            ids += self._encode(self._plain, text[start:end]) if start < end else []
        return [i for i in ids if i not in self._kept_out]


def _without_special(library: Any) -> Any:
    """The same tokenizer, which finds no special tokens; it shares the vocabulary."""
    made = tokenizers().Tokenizer(library.model)
    for part in ("normalizer", "pre_tokenizer"):
        if getattr(library, part) is not None:
            setattr(made, part, getattr(library, part))
    added = library.get_added_tokens_decoder()
    made.add_tokens([added[number] for number in sorted(added)])
    made.encode_special_tokens = True
    return made


def _readable(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: the arguments of calls are objects, where the OpenAI API has them as text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return dict(message)
    return {**message, "tool_calls": [_readable_call(call) for call in calls]}


def _readable_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
