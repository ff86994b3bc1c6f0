"""The parts of a tokenizer.json: those that could fill memory or never end are refused; what decoders mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from rlx.errors import ModelFormatError, OptionError
from rlx.models.tokenizer.pieces import SPACE, byte_level, spaced, utf8, word_pieces
from rlx.models.tokenizer.splits import VARIANTS

__all__ = ["check_recipe", "piece_of"]

MAX_STEPS = 64  # parts in sequences
MAX_PATTERN = 1 << 14  # characters of a regular expression
MAX_GROWTH = 64  # by how much replacements may lengthen a text, all together
_KNOWN = frozenset(pattern for variant in VARIANTS.values() for pattern in variant.splits)


def _steps(recipe: Any) -> Iterator[dict[str, Any]]:
    """The parts of a recipe, sequences in sequences taken apart."""
    if isinstance(recipe, dict):
        inner = next((v for k, v in recipe.items() if isinstance(v, list) and recipe.get("type") == "Sequence"), None)
        if inner is None:
            yield recipe
        else:
            for part in inner:
                yield from _steps(part)


def check_recipe(recipe: Any, where: str) -> None:
    """Refuses what an attacker could fill memory or time with. Raises `ModelFormatError`."""
    steps = list(_steps(recipe))
    if len(steps) > MAX_STEPS:
        raise ModelFormatError(f"{where}: {len(steps)} steps are more than the limit of {MAX_STEPS}")
    growth = 1
    for step in steps:
        pattern = step.get("pattern")
        if isinstance(pattern, dict):
            check_pattern(str(pattern.get("Regex", "")), where)
        if step.get("type") == "Replace":
            least = len(pattern.get("String", "")) if isinstance(pattern, dict) else 0
            growth *= max(1, -(-len(str(step.get("content", ""))) // max(1, least)))
        if step.get("type") == "Prepend":
            growth *= max(1, len(str(step.get("prepend", ""))))
        if growth > MAX_GROWTH:
            raise ModelFormatError(f"{where}: its steps make a text {growth} times longer: at most {MAX_GROWTH} times")


_CLASS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_REPEAT = re.compile(r"[*+]|\{\d*,\}")


def check_pattern(pattern: str, where: str) -> None:
    """Refuses an expression whose time may double with each character: a repetition without end within another."""
    if pattern in _KNOWN:
        return
    if len(pattern) > MAX_PATTERN:
        raise ModelFormatError(f"{where}: an expression of {len(pattern)} characters: at most {MAX_PATTERN} are taken")
    inner = [False]  # of the groups that are open: whether something in them repeats without end
    bare = _CLASS.sub("x", pattern)
    for at, char in enumerate(bare):
        if char == "(":
            inner.append(False)
        elif char == ")" and len(inner) > 1:
            repeats = inner.pop()
            outer = _REPEAT.match(bare, at + 1) is not None
            if repeats and outer:
                raise ModelFormatError(f"{where}: {pattern!r:.100} repeats a repetition: its time may have no bound")
            inner[-1] |= repeats or outer
        elif _REPEAT.match(bare, at):
            inner[-1] = True


# ---- decoders


def piece_of(decoder: Any, where: str) -> tuple[Callable[[str], bytes], bool]:
    """The bytes of a token as the decoder has them, and whether the first space of a text is dropped.

    A decoder that is not known gives a function that refuses to decode: `OptionError`.
    """
    steps = list(_steps(decoder))
    types = [step.get("type") for step in steps]
    first = steps[0] if steps else {}
    if not steps:
        return (lambda token: utf8(" " + token)), True
    if types == ["ByteLevel"]:
        return byte_level, False
    if types == ["WordPiece"] and first.get("prefix") == "##":
        return word_pieces, True
    if types == ["Metaspace"] and first.get("replacement") == SPACE:
        return (lambda token: utf8(token.replace(SPACE, " "))), first.get("prepend_scheme") != "never"
    spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    rest = [step for step in steps if step.get("type") not in ("ByteFallback", "Fuse")]
    if rest in ([spaces], [spaces, strip]):
        piece = spaced if "ByteFallback" in types else (lambda token: utf8(token.replace(SPACE, " ")))
        return piece, strip in rest

    def refused(token: str) -> bytes:
        raise OptionError(f"{where}: rlx can't decode by its decoder, {' + '.join(map(str, types))}")

    return refused, False
