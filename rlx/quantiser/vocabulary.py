"""The tokenizer of a folder as the metadata of a GGUF file, of the two kinds that language models have.

    gpt2    byte-level BPE: tokens, merges and the name of the way in which words are cut
    llama   SentencePiece's BPE: tokens and scores, by which neighbours are joined

What is made is tried on texts; where it gives other tokens than tokenizer.json, it is left out and a remark says so.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rlx.disk import read_regular
from rlx.errors import RlxError
from rlx.models.tokenizer.folder import tokenizer_of_folder
from rlx.models.tokenizer.gguf import tokenizer_of_metadata
from rlx.models.tokenizer.splits import VARIANTS
from rlx.models.tokenizer.tokenizer import Tokenizer
from rlx.quantiser.write_gguf import Typed

__all__ = ["vocabulary_of"]

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
PREFIX = "tokenizer.ggml."
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_TEXTS = (
    "Hello, world!", " two  spaces\tand\n\nlines \n", "It's 12345.67 % of 1,000,000; they'll see: HTTPServer's x2",
    "Grüße, déjà vu; naïve façade", "Привет, мир!", "你好，世界。こんにちは", "안녕하세요", "مرحبا بالعالم",
    "👩‍👩‍👧 🙂 e\u0301",
    "def f(x):\n    return x ** 2  # done\n", "a" * 40, "", " ", "\u2581 \u00a0",
)  # fmt: skip


def vocabulary_of(folder: Path, size: int) -> tuple[dict[str, Typed], list[str]]:
    """The metadata by key, empty where there is none, and remarks. `size`: rows of the embedding."""
    if not (folder / "tokenizer.json").is_file():
        return {}, [f"no tokenizer is written: {folder} has no tokenizer.json"]
    try:
        theirs = tokenizer_of_folder(folder)
        recipe = json.loads(read_regular(folder / "tokenizer.json"))
        made = _metadata(theirs, recipe, size)
        ours = tokenizer_of_metadata({key: value.value for key, value in made.items()}, str(folder))
    except (RlxError, _Unknown) as error:
        return {}, [f"no tokenizer is written: {error}"]
    for text in _TEXTS:
        if ours.encode(text) != theirs.encode(text) or ours.encode(text, ends=True) != theirs.encode(text, ends=True):
            return {}, [f"no tokenizer is written: as GGUF has it, {text!r} would be other tokens"]
    return made, []


class _Unknown(Exception):
    """A kind of tokenizer that is not written."""


def _metadata(theirs: Tokenizer, recipe: dict[str, Any], size: int) -> dict[str, Typed]:
    model = recipe["model"]
    if model.get("type") != "BPE":
        raise _Unknown(f"its tokenizer is of type {model.get('type')}, known is BPE")
    tokens, types = _tokens(theirs, recipe, size)
    made = {PREFIX + "tokens": Typed("text", tokens), PREFIX + "token_type": Typed("i32", types)}
    merges = [m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"]]
    if model.get("byte_fallback"):
        made[PREFIX + "model"] = Typed("text", "llama")
        made[PREFIX + "scores"] = Typed("f32", _scores(tokens, merges))
        made[PREFIX + "add_space_prefix"] = Typed("bool", _prepends(recipe))
    else:
        made[PREFIX + "model"] = Typed("text", "gpt2")
        made[PREFIX + "pre"] = Typed("text", _variant(recipe))
        made[PREFIX + "merges"] = Typed("text", [" ".join(m) for m in merges])
    unknown = theirs.token_id(str(model.get("unk_token"))) if model.get("unk_token") else None
    for key, number in (("bos", theirs.bos_id), ("eos", next(iter(theirs.eos_ids), None)), ("unknown", unknown)):
        if number is not None:
            made[f"{PREFIX}{key}_token_id"] = Typed("u32", number)
    framed = theirs.encode("a", ends=True)
    made[PREFIX + "add_bos_token"] = Typed("bool", theirs.add_bos)
    made[PREFIX + "add_eos_token"] = Typed("bool", framed[-1:] != theirs.encode("a")[-1:])
    for name, text in theirs.template_texts.items():
        made["tokenizer.chat_template" + ("" if name == "default" else f".{name}")] = Typed("text", text)
    return made


def _tokens(theirs: Tokenizer, recipe: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    vocabulary: dict[str, int] = dict(recipe["model"]["vocab"])
    added = {token["id"]: token for token in recipe.get("added_tokens", [])}
    texts = {number: text for text, number in vocabulary.items()} | {n: t["content"] for n, t in added.items()}
    if max(texts, default=0) >= size:
        raise _Unknown(f"token {max(texts)} is beyond the {size} rows of the embedding")
    unknown, fallback = recipe["model"].get("unk_token"), recipe["model"].get("byte_fallback")
    types = []
    for number in range(size):
        text = texts.get(number)
        if text is None:
            types.append(UNUSED)
        elif text == unknown:
            types.append(UNKNOWN)
        elif number in added:
            types.append(CONTROL if added[number].get("special") else USER)
        else:
            types.append(BYTE if fallback and _BYTE.fullmatch(text) else NORMAL)
    return [texts.get(number, f"[PAD{number}]") for number in range(size)], types


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """Scores that join neighbours in the order of the merges."""
    rank: dict[str, int] = {}
    for number, (left, right) in enumerate(merges):
        rank.setdefault(left + right, number)
    return [-float(rank.get(token, 0)) for token in tokens]


def _prepends(recipe: dict[str, Any]) -> bool:
    """Whether ▁ is put before a text."""
    for step in _steps(recipe.get("normalizer"), recipe.get("pre_tokenizer")):
        if step.get("type") == "Prepend":
            return True
        if step.get("type") == "Metaspace":
            return bool(step.get("prepend_scheme", "always") != "never")
    return False


def _variant(recipe: dict[str, Any]) -> str:
    """The name of the way in which words are cut."""
    patterns: list[str] = []
    for step in _steps(recipe.get("pre_tokenizer")):
        match step.get("type"):
            case "Split":
                patterns.append(str(step.get("pattern", {}).get("Regex", "")))
            case "Digits" if step.get("individual_digits"):
                patterns.append(r"\p{N}")
            case "ByteLevel" if step.get("use_regex", True):
                patterns.append(VARIANTS["gpt-2"].splits[0])
            case "ByteLevel":
                pass
            case other:
                raise _Unknown(f"its words are cut by {other}")
    nfc = any(step.get("type") == "NFC" for step in _steps(recipe.get("normalizer")))
    whole = bool(recipe["model"].get("ignore_merges"))
    for name, variant in VARIANTS.items():
        if list(variant.splits) == patterns and (variant.nfc, variant.whole, variant.spaced) == (nfc, whole, False):
            return name
    raise _Unknown("the way in which its words are cut has no name in GGUF files that rlx knows")


def _steps(*recipes: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for recipe in recipes:
        if isinstance(recipe, dict):
            inner = next((v for v in recipe.values() if isinstance(v, list) and recipe.get("type") == "Sequence"), None)
            found += _steps(*inner) if inner is not None else [recipe]
    return found
