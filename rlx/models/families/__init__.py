"""The families of decoders, by the names of their architectures in files.

A new one is a class in a file here, and its name in the list.
"""

from __future__ import annotations

from rlx.errors import ModelFormatError
from rlx.models.families.base import Family
from rlx.models.families.gemma import Gemma2, Gemma3
from rlx.models.families.gpt2 import Gpt2
from rlx.models.families.granite import Granite
from rlx.models.families.llama import Llama
from rlx.models.families.olmo2 import Olmo2
from rlx.models.families.phi3 import Phi3
from rlx.models.families.qwen import Qwen2, Qwen3
from rlx.models.source import Source

__all__ = ["FAMILIES", "family_of"]

FAMILIES: tuple[Family, ...] = (
    Llama(), Qwen2(), Qwen3(), Gemma2(), Gemma3(), Gpt2(), Phi3(), Granite(), Olmo2(),
)  # fmt: skip


def family_of(source: Source) -> Family:
    """The family that computes a model. Raises `ModelFormatError`, which lists those that are known."""
    names = {name: family for family in FAMILIES for name in (family.gguf if source.gguf else family.config)}
    found = names.get(source.architecture)
    if found is None:
        raise ModelFormatError(
            f"{source.path}: rlx can't run the architecture {source.architecture!r}; known are {', '.join(names)}"
        )
    if source.facts.number("experts", 0):
        raise ModelFormatError(f"{source.path}: rlx can't run mixtures of experts of {source.architecture!r} yet")
    return found
