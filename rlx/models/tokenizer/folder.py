"""Tokenisers from folders with tokenizer.json, which is hostile input, and the small files beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rlx.errors import ModelFormatError
from rlx.importers.sources import read_file
from rlx.models.tokenizer.library import tokenizers, translated
from rlx.models.tokenizer.pieces import Pieces, Texts
from rlx.models.tokenizer.recipe import check_recipe, piece_of
from rlx.models.tokenizer.tokenizer import Ends, Templates, Tokenizer

__all__ = ["tokenizer_of_folder"]

MAX_JSON_BYTES = 256 << 20  # tokenizer.json
MAX_SMALL_BYTES = 16 << 20  # each other file
MAX_TOKENS = 1 << 22
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokenizer_of_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a folder as Hugging Face's libraries write it.

    Raises `ModelFormatError` for one without tokenizer.json, and for files that are malformed or beyond the limits.
    """
    path = folder / "tokenizer.json"
    if not os.path.isfile(path):
        other = folder / "tokenizer.model"
        way = ": make it of tokenizer.model by AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        raise ModelFormatError(f"{folder}: there is no tokenizer.json{way if os.path.isfile(other) else ''}")
    where = str(path)
    with translated(where):
        library = _read(path, where)
        pieces = _pieces(library, where)
    config = _json(folder / "tokenizer_config.json")
    names = _special_names(folder, config)
    with translated(where):
        ends = _ends(folder, library, names)
    return Tokenizer(library, pieces, ends, Templates(_templates(folder, config), names), where)


def _read(path: Path, where: str) -> Any:
    data = read_file(path, MAX_JSON_BYTES)
    _check_model(data, where)
    library = tokenizers().Tokenizer.from_buffer(data)
    # Lengths are the caller's matter, and equal texts give equal tokens.
    library.no_truncation()
    library.no_padding()
    if getattr(library.model, "dropout", None):
        library.model.dropout = None
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        check_recipe(_recipe(library, part), f"{where}: {part}")
    return library


def _check_model(data: bytes, where: str) -> None:
    """Refuses merges that lack the prefix of words' further parts.

    The library cuts so many bytes off their second part, whatever is there; a cut within a character ends the process.
    """
    try:
        found = json.loads(data.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{where}: is no JSON: {error}") from None
    model = found.get("model") if isinstance(found, dict) else None
    prefix = model.get("continuing_subword_prefix") if isinstance(model, dict) else None
    merges = model.get("merges") if isinstance(model, dict) else None
    if not prefix or not isinstance(prefix, str) or not isinstance(merges, list):
        return
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not str(parts[1]).startswith(prefix):
            raise ModelFormatError(f"{where}: the merge {str(merge)[:80]!r} lacks the prefix {prefix[:40]!r}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of a key that is there twice, readers take the first, the last or both."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _recipe(library: Any, part: str) -> Any:
    """How the library writes a part of a tokenizer: dicts, lists, strings and numbers."""
    found = getattr(library, part)
    return None if found is None else json.loads(found.__getstate__())


def _pieces(library: Any, where: str) -> Pieces:
    vocabulary: dict[str, int] = library.get_vocab(with_added_tokens=True)
    added = library.get_added_tokens_decoder()
    most = max([*vocabulary.values(), *added], default=-1)
    if not 0 <= most < MAX_TOKENS:
        raise ModelFormatError(f"{where}: a token has the number {most}: expected 0 to {MAX_TOKENS - 1}")
    tokens = [""] * (most + 1)
    for text, number in vocabulary.items():
        tokens[number] = text
    for number, token in added.items():
        tokens[number] = token.content
    special = frozenset(number for number, token in added.items() if token.special)
    piece, strip = piece_of(_recipe(library, "decoder"), where)
    return Pieces(Texts(tokens), frozenset(added) - special, special, piece, strip)


def _ends(folder: Path, library: Any, names: dict[str, str]) -> Ends:
    number = {name: library.token_to_id(text) for name, text in names.items()}
    eos = [number.get("eos_token")]
    for file in ("generation_config.json", "config.json"):
        given = _json(folder / file).get("eos_token_id")
        eos += given if isinstance(given, list) else [given]
    count = library.get_vocab_size(with_added_tokens=True)
    prefix, suffix = _around(library)
    bos = number.get("bos_token")
    if bos is None:
        bos = prefix[0] if prefix else number.get("cls_token")
    return Ends(
        bos=bos,
        unknown=_unknown(library, number.get("unk_token")),
        eos=tuple(dict.fromkeys(i for i in eos if type(i) is int and 0 <= i < count)),
        prefix=prefix,
        suffix=suffix,
    )


def _unknown(library: Any, given: int | None) -> int | None:
    """The token for what the vocabulary has none for; a unigram model tells it only by the use of it."""
    text = getattr(library.model, "unk_token", None)
    if text is not None:
        found: int | None = library.model.token_to_id(text)
        return found
    added = library.get_added_tokens_decoder()
    last = library.encode("\U0001242b", add_special_tokens=False).ids[-1:]  # a sign of cuneiform
    return last[0] if last and last[0] in added and added[last[0]].special else given


def _around(library: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that the tokenizer puts before and after a text."""
    bare = library.encode("a", add_special_tokens=False).ids
    whole = library.encode("a", add_special_tokens=True).ids
    more = len(whole) - len(bare)
    at = next((k for k in range(more + 1) if whole[k : k + len(bare)] == bare), more)
    return tuple(whole[:at]), tuple(whole[at + len(bare) :])


def _special_names(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The texts of BOS, EOS and so on by name; files give a text, or a dict with it."""
    found = {}
    for source in (_json(folder / "special_tokens_map.json"), config):
        for name in _NAMES:
            given = source.get(name)
            text = given.get("content") if isinstance(given, dict) else given
            if isinstance(text, str):
                found[name] = text
    return found


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The chat templates by name, of a file of their own or of tokenizer_config.json."""
    given = config.get("chat_template")
    if given is None:
        given = _json(folder / "chat_template.json").get("chat_template")
    entries = given if isinstance(given, list) else [{"name": "default", "template": given}]
    found = {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
    own = folder / "chat_template.jinja"
    more = folder / "additional_chat_templates"
    files = [("default", own), *((path.stem, path) for path in sorted(more.glob("*.jinja")))]
    return found | {name: _text(path) for name, path in files if os.path.isfile(path)}


def _text(path: Path) -> str:
    try:
        return read_file(path, MAX_SMALL_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{path}: is not UTF-8: {error}") from None


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file."""
    if not os.path.isfile(path):
        return {}
    try:
        found = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ModelFormatError(f"{path}: expected an object, got {type(found).__name__}")
    return found
