"""Prompts that a chat template made, and how one goes on from an answer whose tokens are known."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.records import dataclass

__all__ = ["Answer", "Prompt"]


@dataclass(frozen=True)
class Prompt:
    """A prompt: what the template wrote, with the signs of `Guard` around what users wrote, and its tokens."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What a model said after a prompt: the text, and the tokens that it chose, without the end of the turn.

    These need not be the tokens that the tokenizer makes of the text: a conversation that goes on keeps the model's
    own, whose keys and values are in the cache.
    """

    prompt: Prompt
    text: str
    ids: Sequence[int]
