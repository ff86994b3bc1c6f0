"""The families of language models, by the names of their architectures in files.

A new one is a class in a file here, and its name in the list.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from rlx.errors import ModelFormatError
from rlx.models.families.base import Family
from rlx.models.families.bert import Bert, ModernBert, NomicBert, Roberta
from rlx.models.families.gemma import Gemma2, Gemma3
from rlx.models.families.gpt2 import Gpt2
from rlx.models.families.granite import Granite
from rlx.models.families.llama import Llama
from rlx.models.families.mixture import Mixtral, Qwen2Moe, Qwen3Moe
from rlx.models.families.olmo2 import Olmo2
from rlx.models.families.phi3 import Phi3
from rlx.models.families.qwen import Qwen2, Qwen3
from rlx.models.source import Source

__all__ = ["ENCODERS", "FAMILIES", "encoder_of", "family_of", "is_encoder"]

F = TypeVar("F", bound=Family)

FAMILIES: tuple[Family, ...] = (
    Llama(), Qwen2(), Qwen3(), Gemma2(), Gemma3(), Gpt2(), Phi3(), Granite(), Olmo2(), Mixtral(), Qwen2Moe(),
    Qwen3Moe(),
)  # fmt: skip
ENCODERS: tuple[Bert, ...] = (Bert(), Roberta(), NomicBert(), ModernBert())


def _named(families: Iterable[F], source: Source) -> dict[str, F]:
    """The families by the names that a file of that format gives them."""
    return {name: family for family in families for name in (family.gguf if source.gguf else family.config)}


def is_encoder(source: Source) -> bool:
    """Whether it gives embeddings of whole texts and writes none."""
    return source.architecture in _named(ENCODERS, source)


def encoder_of(source: Source) -> Bert:
    """The family that embeds texts. Raises `ModelFormatError`, which lists those that are known."""
    names = _named(ENCODERS, source)
    if source.architecture not in names:
        raise ModelFormatError(
            f"{source.path}: rlx can't embed texts with {source.architecture!r}; known are {', '.join(names)}"
        )
    return names[source.architecture]


def family_of(source: Source) -> Family:
    """The family that computes a decoder. Raises `ModelFormatError`, which lists those that are known."""
    if is_encoder(source):
        raise ModelFormatError(
            f"{source.path}: {source.architecture!r} embeds texts and writes none: rlx.load_embedder takes it"
        )
    experts = source.facts.number("experts", 0) > 0
    found = _named((f for f in FAMILIES if f.mixture == experts), source).get(source.architecture)
    if found is not None:
        return found
    known = _named(FAMILIES, source)
    if source.architecture in known:
        what = "mixtures of experts of" if experts else "without experts"
        raise ModelFormatError(f"{source.path}: rlx can't run {what} {source.architecture!r}")
    raise ModelFormatError(
        f"{source.path}: rlx can't run the architecture {source.architecture!r}; known are {', '.join(known)}"
    )
