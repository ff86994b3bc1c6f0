"""Tokenisers from the metadata of GGUF files, which is hostile input.

Kinds (`tokenizer.ggml.model`): llama (SentencePiece's BPE, by scores), gpt2 (byte-level BPE), gemma4 (BPE on text with
▁ for spaces), bert (WordPiece), t5 (SentencePiece's unigram model).
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from rlx.errors import ModelFormatError
from rlx.importers.gguf import GgufArray
from rlx.models.tokenizer.library import tokenizers, translated
from rlx.models.tokenizer.merges import merges_of_scores
from rlx.models.tokenizer.pieces import SPACE, Pieces, Texts, byte_level, spaced, word_pieces
from rlx.models.tokenizer.splits import Variant, variant_of
from rlx.models.tokenizer.tokenizer import Ends, Templates, Tokenizer
from rlx.records import dataclass

__all__ = ["tokenizer_of_metadata"]

MAX_TOKENS = 1 << 22
MAX_MERGES = 1 << 23
MAX_TOKEN_CHARS = 1 << 16
WORD_CHARS = 100  # longer words are unknown to WordPiece
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
PREFIX = "tokenizer.ggml."

# Control tokens that end a turn or a text by their name, for files that name only one in eos_token_id.
# (the list of llama.cpp, which reads them so too)
_ENDS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>", "<｜end▁of▁sentence｜>",
))  # fmt: skip


_NO_TEXT = re.compile("[\ud800-\udfff]")  # what was no UTF-8 in the file


class _Metadata:
    """Checked access to the metadata; `where` begins each error."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata, self.where = metadata, where

    def fail(self, problem: str) -> NoReturn:
        raise ModelFormatError(f"{self.where}: {problem}")

    def array(self, key: str, kind: tuple[type, ...], limit: int) -> list[Any] | None:
        found = self.metadata.get(PREFIX + key)
        if found is None:
            return None
        if not isinstance(found, GgufArray | list | tuple):
            self.fail(f"{PREFIX}{key}: expected an array, got {type(found).__name__}")
        if len(found) > limit:
            self.fail(f"{PREFIX}{key}: {len(found)} items are more than the limit of {limit}")
        values = found.values() if isinstance(found, GgufArray) else list(found)
        if not set(map(type, values)) <= set(kind):
            self.fail(f"{PREFIX}{key}: its items are of another type than expected")
        return values

    def text(self, key: str) -> str | None:
        value = self.metadata.get(PREFIX + key)
        if value is not None and not isinstance(value, str):
            self.fail(f"{PREFIX}{key}: expected a string, got {type(value).__name__}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(PREFIX + key, default)
        if not isinstance(value, bool):
            self.fail(f"{PREFIX}{key}: expected true or false, got {value!r:.40}")
        return value

    def token(self, key: str, count: int, default: int | None = None) -> int | None:
        """The number of a token, None where there is none; -1 and the like mean none too."""
        value = self.metadata.get(f"{PREFIX}{key}_token_id")
        if value is None:
            return default if default is not None and default < count else None
        if type(value) is not int:
            self.fail(f"{PREFIX}{key}_token_id: expected a number, got {value!r:.40}")
        if value in (-1, 0xFFFFFFFF):
            return None
        if not 0 <= value < count:
            self.fail(f"{PREFIX}{key}_token_id is {value}: expected a token from 0 to {count - 1}")
        return value


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens with their types and scores; those of `known` may be given to the library: valid text, and not empty."""

    tokens: list[str]
    types: list[int]
    scores: list[float]
    known: list[int]
    odd: list[int]  # the few, of all tokens, that are of another type than NORMAL

    def of_type(self, *types: int) -> list[int]:
        """The known ones of these types, in order."""
        if NORMAL in types:
            return [i for i in self.known if self.types[i] in types]
        found = [i for i in self.odd if self.types[i] in types]
        return found if len(self.known) == len(self.tokens) else sorted(set(found).intersection(self.known))


@dataclass(frozen=True)
class _Built:
    """A tokenizer of the library, the bytes of its tokens, whether a text's first space is dropped.

    `plain` is one for texts without special tokens, where `library` could find these as pieces of words.
    """

    library: Any
    piece: Callable[[str], bytes]
    strip: bool
    plain: Any = None


@dataclass(frozen=True)
class _Kind:
    """What the kinds differ in.

    `build` makes the tokenizer of the library; `defaults` are the special tokens of a file that doesn't say.
    """

    build: Callable[[_Metadata, _Vocabulary], _Built]
    defaults: Mapping[str, int]
    bos: bool
    eos: bool


def tokenizer_of_metadata(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer that the metadata of a GGUF file describes; `where` names the file.

    Raises `ModelFormatError` for metadata that is malformed or of a kind that is not known.
    """
    read = _Metadata(metadata, where)
    name = read.text("model")
    if name is None:
        read.fail(f"has no {PREFIX}model: it holds no tokenizer")
    kind = _KINDS.get(name)
    if kind is None:
        read.fail(f"{PREFIX}model is {name!r}: rlx knows {', '.join(_KINDS)}")
    vocabulary = _vocabulary(read)
    with translated(where):
        built = kind.build(read, vocabulary)
        _add_tokens(built.library, vocabulary)
        if built.plain is not None:
            _add_tokens(built.plain, vocabulary, special=False)
    special = frozenset(i for i in vocabulary.odd if vocabulary.types[i] in (UNKNOWN, CONTROL))
    plain = frozenset(i for i in vocabulary.odd if vocabulary.types[i] == USER)
    pieces = Pieces(Texts(vocabulary.tokens), plain, special, built.piece, built.strip)
    return Tokenizer(built.library, pieces, _ends(read, vocabulary, kind), _templates(read), where, plain=built.plain)


def _vocabulary(read: _Metadata) -> _Vocabulary:
    tokens = read.array("tokens", (str,), MAX_TOKENS)
    if not tokens:
        read.fail(f"has no {PREFIX}tokens")
    count = len(tokens)
    types = read.array("token_type", (int,), MAX_TOKENS) or [NORMAL] * count
    scored = read.array("scores", (int, float), MAX_TOKENS)
    scores = scored or [0.0] * count
    for key, values in ("token_type", types), ("scores", scores):
        if len(values) < count:
            read.fail(f"{PREFIX}{key} has {len(values)} items for {count} tokens")
    if scored and not all(map(math.isfinite, scored)):
        read.fail(f"{PREFIX}scores has a score that is no number")
    if max(map(len, tokens)) > MAX_TOKEN_CHARS:
        read.fail(f"{PREFIX}tokens has a token of more than {MAX_TOKEN_CHARS} characters")
    broken = _NO_TEXT.search("".join(tokens)) is not None
    known = [i for i, token in enumerate(tokens) if token and not (broken and _NO_TEXT.search(token))]
    if len({tokens[i] for i in known}) != len(known):
        seen: dict[str, int] = {}
        for i in known:
            if seen.setdefault(tokens[i], i) != i:
                read.fail(f"{PREFIX}tokens: {seen[tokens[i]]} and {i} are both {tokens[i]!r:.60}")
    odd = [i for i, kind in enumerate(types[:count]) if kind != NORMAL]
    return _Vocabulary(tokens, types, scores, known, odd)


def _add_tokens(library: Any, vocabulary: _Vocabulary, *, special: bool = True) -> None:
    """The tokens that are found before words are cut: those of control in texts where they may be, others always."""
    added = tokenizers().AddedToken
    texts = vocabulary.tokens
    if special:
        library.add_special_tokens(
            [added(texts[i], special=True, normalized=False) for i in vocabulary.of_type(UNKNOWN, CONTROL)]
        )
    library.add_tokens([added(texts[i], special=False, normalized=False) for i in vocabulary.of_type(USER)])


# ---- the kinds


def _byte_level(read: _Metadata, vocabulary: _Vocabulary) -> _Built:
    name = read.text("pre")
    if name is None:
        warnings.warn(
            f"{read.where}: does not say how words are cut (tokenizer.ggml.pre): 'default' is taken, and tokens may "
            "differ from those that the model was trained on. Convert the model again",
            stacklevel=2,
        )
    return _bpe(read, vocabulary, variant_of(name or "default", read.where))


def _gemma(read: _Metadata, vocabulary: _Vocabulary) -> _Built:
    return _bpe(read, vocabulary, variant_of("gemma4", read.where))


def _bpe(read: _Metadata, vocabulary: _Vocabulary, variant: Variant) -> _Built:
    lib = tokenizers()
    numbers = _numbers(vocabulary)
    model = lib.models.BPE(
        numbers, _merges(read, numbers), ignore_merges=variant.whole, byte_fallback=variant.spaced, fuse_unk=False
    )
    library = lib.Tokenizer(model)
    composed = [lib.normalizers.NFC()] if variant.nfc else []
    library.normalizer = lib.normalizers.Sequence(composed + (_spaces(False) if variant.spaced else []))
    splits = [lib.pre_tokenizers.Split(lib.Regex(pattern), "isolated") for pattern in variant.splits]
    if not variant.spaced:
        splits.append(lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    library.pre_tokenizer = lib.pre_tokenizers.Sequence(splits)
    return _Built(library, spaced if variant.spaced else byte_level, False)


def _numbers(vocabulary: _Vocabulary) -> dict[str, int]:
    return {vocabulary.tokens[i]: i for i in vocabulary.known}


def _merges(read: _Metadata, numbers: Mapping[str, int]) -> list[tuple[str, str]]:
    lines = read.array("merges", (str,), MAX_MERGES)
    if lines is None:
        read.fail(f"has no {PREFIX}merges, without which a vocabulary of this kind can't be used")
    known = {text: text for text in numbers}.get  # one object of each: some 10^5 copies would take 10 MB
    merges = [(known(one), known(other)) for one, _, other in (line.partition(" ") for line in lines)]
    # the library panics at some pairs that make no token
    wrong = next((n for n, (a, b) in enumerate(merges) if a is None or b is None or a + b not in numbers), None)
    if wrong is not None:
        read.fail(f"{PREFIX}merges: {lines[wrong]!r:.80}: its parts, or what they make, are no tokens")
    return merges  # type: ignore[return-value]  # none is None


def _sentence_pieces(read: _Metadata, vocabulary: _Vocabulary) -> _Built:
    lib = tokenizers()
    prefix = read.flag("add_space_prefix", True)
    mergeable = {vocabulary.tokens[i]: i for i in vocabulary.of_type(NORMAL, UNUSED)}
    unknown = read.token("unknown", len(vocabulary.tokens), 0)
    model = lib.models.BPE(
        _numbers(vocabulary),
        merges_of_scores(mergeable, vocabulary.scores, read.where),
        unk_token=None if unknown is None or unknown not in vocabulary.known else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    library = lib.Tokenizer(model)
    library.normalizer = lib.normalizers.Sequence(_spaces(prefix))
    return _Built(library, spaced, prefix)


def _word_pieces(read: _Metadata, vocabulary: _Vocabulary) -> _Built:
    lib = tokenizers()
    # The converter writes what begins a word with ▁, what goes on with one without: the other way round than ##.
    fixed = {UNKNOWN, CONTROL, USER}
    for i in vocabulary.known:
        text = vocabulary.tokens[i]
        if vocabulary.types[i] not in fixed and not (text.startswith("[") and text.endswith("]")):
            vocabulary.tokens[i] = text[1:] if text.startswith(SPACE) else "##" + text
    numbers = _numbers(vocabulary)
    unknown = read.token("unknown", len(vocabulary.tokens), 100)
    if unknown is None or len(numbers) != len(vocabulary.known) or "" in numbers:
        read.fail(f"{PREFIX}tokens: is no vocabulary of WordPiece: two tokens are one, or there is none for [UNK]")
    model = lib.models.WordPiece(numbers, unk_token=vocabulary.tokens[unknown], max_input_chars_per_word=WORD_CHARS)
    library = lib.Tokenizer(model)
    lower = read.flag("normalizer.lowercase", True)
    library.normalizer = lib.normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, lowercase=lower,
        strip_accents=read.flag("normalizer.strip_accents", lower),
    )  # fmt: skip
    library.pre_tokenizer = lib.pre_tokenizers.BertPreTokenizer()
    return _Built(library, word_pieces, True)


def _unigram(read: _Metadata, vocabulary: _Vocabulary) -> _Built:
    lib = tokenizers()
    prefix = read.flag("add_space_prefix", False)
    unknown = read.token("unknown", len(vocabulary.tokens), 2)
    if unknown is None:
        read.fail(f"{PREFIX}unknown_token_id: there is none, and a unigram model needs one")
    steps: list[Any] = []
    charsmap = read.array("precompiled_charsmap", (int,), 1 << 24)
    if charsmap:
        steps.append(lib.normalizers.Precompiled(bytes(b & 0xFF for b in charsmap)))
    if read.flag("remove_extra_whitespaces", False):
        steps += [lib.normalizers.Strip(), lib.normalizers.Replace(lib.Regex(" {2,}"), " ")]
    # No cut at spaces: pieces of some vocabularies hold several words.
    steps += _spaces(prefix)

    def library(kept: set[int]) -> Any:
        # A name with a space is never found in a text, where spaces are ▁.
        names = [text if i in kept else f" {i}" for i, text in enumerate(vocabulary.tokens)]
        made = lib.Tokenizer(lib.models.Unigram(list(zip(names, scores, strict=False)), unknown, False))
        made.normalizer = lib.normalizers.Sequence(steps)
        return made

    scores = [float(score) for score in vocabulary.scores]
    plain = library(set(vocabulary.of_type(NORMAL, USER, UNUSED)))
    return _Built(library(set(vocabulary.known)), spaced, prefix, plain)


def _spaces(prefix: bool) -> list[Any]:
    """The steps that write ▁ for spaces, and one before the text."""
    steps = tokenizers().normalizers
    return [*([steps.Prepend(SPACE)] if prefix else []), steps.Replace(" ", SPACE)]


_KINDS: dict[str, _Kind] = {
    "llama": _Kind(_sentence_pieces, {"bos": 1, "eos": 2, "unknown": 0}, bos=True, eos=False),
    "gpt2": _Kind(_byte_level, {}, bos=False, eos=False),
    "gemma4": _Kind(_gemma, {}, bos=True, eos=False),
    "bert": _Kind(_word_pieces, {"bos": 101, "seperator": 102, "unknown": 100}, bos=True, eos=False),
    "t5": _Kind(_unigram, {"eos": 1, "unknown": 2}, bos=False, eos=True),
}


# ---- what stands around a text


def _ends(read: _Metadata, vocabulary: _Vocabulary, kind: _Kind) -> Ends:
    count = len(vocabulary.tokens)

    def token(key: str, fallback: str = "") -> int | None:
        other = read.token(fallback, count) if fallback else None
        return read.token(key, count, kind.defaults.get(key) if other is None else other)

    name = read.text("pre")
    variant = variant_of(name, read.where) if kind.build is _byte_level and name is not None else Variant(())
    bos, eos = token("bos", "cls"), token("eos")
    begins = bos is not None and read.flag("add_bos_token", kind.bos or variant.bos or variant.ends)
    last = token("seperator", "separator")
    closes = kind.build is _word_pieces or variant.ends
    ends = [eos, *(read.token(key, count) for key in ("eot", "eom"))]
    ends += [i for i in vocabulary.of_type(CONTROL) if vocabulary.tokens[i] in _ENDS]
    suffix: Iterable[int | None] = ()
    if read.flag("add_sep_token", closes):
        suffix = (last if last is not None else eos,)
    elif read.flag("add_eos_token", kind.eos):
        suffix = (eos,)
    return Ends(
        bos=bos,
        unknown=token("unknown"),
        eos=tuple(dict.fromkeys(i for i in ends if i is not None)),
        prefix=(bos,) if begins and bos is not None else (),
        suffix=tuple(i for i in suffix if i is not None),
    )


def _templates(read: _Metadata) -> Templates:
    """The chat templates: one, and others by name."""
    key = "tokenizer.chat_template"
    found = {"default": read.metadata.get(key)}
    found |= {k[len(key) + 1 :]: v for k, v in read.metadata.items() if k.startswith(key + ".")}
    return Templates({name: text for name, text in found.items() if isinstance(text, str)})
