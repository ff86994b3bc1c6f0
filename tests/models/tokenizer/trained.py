"""Small tokenisers trained on this project's docs, as tokenizer.json and as the metadata of a GGUF file, and texts."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[3] / "docs"
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
ATOMS = [
    "a", "e", "the ", " ", "  ", "\n", "\t", "1", "42", "0000", "'s", "'LL", "é", "e\u0301", "日本", "한국", "🙂",
    "👨‍👩‍👧", "\u200d", "ﷺ", "<s>", "</s>", "<|im_end|>", "<tool_call>", "[CLS]", "[MASK]", "▁", "Ġ", ".", ",", "!!",
    "foo_bar", "ABC", "\r\n", "\u00a0", "\u3000", "\x00", "ा", "क",
]  # fmt: skip


@cache
def corpus() -> list[str]:
    more = "日本語のテキスト 中文 Ελληνικά русский текст é è ü ñ 🙂 🚀 ﷺ"
    return [(DOCS / name).read_text() for name in ("design.md", "glossary.md", "memory.md", "api.md")] + [more] * 50


def random_text(rng: random.Random) -> str:
    """A text of pieces that tokenisers stumble over, of any characters, or cut out of the corpus."""
    kind = rng.random()
    if kind < 0.6:
        return "".join(rng.choice(ATOMS) for _ in range(rng.randrange(30)))
    if kind < 0.8:
        ranges = [(32, 127), (0xA0, 0x3000), (0x10000, 0x1FFFF)]
        return "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(20)))
    text = rng.choice(corpus())
    start = rng.randrange(len(text))
    return text[start : start + rng.randrange(200)]


def byte_level() -> Any:
    lib = pytest.importorskip("tokenizers")
    made = lib.Tokenizer(lib.models.BPE())
    made.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = lib.decoders.ByteLevel()
    alphabet = lib.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        corpus(),
        lib.trainers.BpeTrainer(
            vocab_size=1500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    made.add_tokens([lib.AddedToken("<tool_call>", normalized=False, special=False)])
    made.post_processor = lib.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def sentence_pieces() -> Any:
    """BPE as converters write SentencePiece's: ▁ for spaces, <0x0A> for bytes."""
    lib = pytest.importorskip("tokenizers")
    steps = lib.normalizers.Sequence([lib.normalizers.Prepend("▁"), lib.normalizers.Replace(" ", "▁")])
    draft = lib.Tokenizer(lib.models.BPE(unk_token="<unk>"))
    draft.normalizer = steps
    draft.pre_tokenizer = lib.pre_tokenizers.Split("▁", "merged_with_next")
    special = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
    draft.train_from_iterator(
        corpus(), lib.trainers.BpeTrainer(vocab_size=1500, special_tokens=special, show_progress=False)
    )
    model = json.loads(draft.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    made = lib.Tokenizer(lib.models.BPE(model["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = steps
    parts = lib.decoders
    made.decoder = parts.Sequence([parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)])
    made.add_special_tokens(SPECIAL)
    return made


def unigram() -> Any:
    lib = pytest.importorskip("tokenizers")
    made = lib.Tokenizer(lib.models.Unigram())
    made.normalizer = lib.normalizers.NFKC()
    made.pre_tokenizer = lib.pre_tokenizers.Metaspace()
    made.decoder = lib.decoders.Metaspace()
    made.train_from_iterator(
        corpus(),
        lib.trainers.UnigramTrainer(vocab_size=1000, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False),
    )
    ends = [("<s>", 1), ("</s>", 2)]
    made.post_processor = lib.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return made


def word_pieces() -> Any:
    lib = pytest.importorskip("tokenizers")
    made = lib.Tokenizer(lib.models.WordPiece(unk_token="[UNK]"))
    made.normalizer = lib.normalizers.BertNormalizer()
    made.pre_tokenizer = lib.pre_tokenizers.BertPreTokenizer()
    made.decoder = lib.decoders.WordPiece(cleanup=False)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    made.train_from_iterator(
        corpus(), lib.trainers.WordPieceTrainer(vocab_size=1000, special_tokens=special, show_progress=False)
    )
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = lib.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return made


KINDS = {"byte_level": byte_level, "sentence_pieces": sentence_pieces, "unigram": unigram, "word_pieces": word_pieces}


@cache
def trained(kind: str) -> Any:
    """The library's tokenizer of a kind."""
    return KINDS[kind]()


def save(library: Any, folder: Path, **files: Any) -> Path:
    """A folder with a tokenizer and other files: name without its ending -> what is in it, as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def metadata(kind: str) -> dict[str, Any]:
    """The metadata that a converter writes for a trained tokenizer (here lists are lists, not `GgufArray`)."""
    library = trained(kind)
    vocabulary = library.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    added = library.get_added_tokens_decoder()
    types = [1 if i not in added else 3 if added[i].special else 4 for i in range(len(tokens))]
    model = json.loads(library.to_str())["model"]
    key = "tokenizer.ggml."
    found: dict[str, Any] = {f"{key}bos_token_id": 1, f"{key}eos_token_id": 2, f"{key}unknown_token_id": 0}
    if kind == "byte_level":
        found |= {f"{key}model": "gpt2", f"{key}pre": "gpt-2", f"{key}add_bos_token": True}
        found[f"{key}merges"] = [" ".join(pair) for pair in model["merges"]]
    elif kind == "sentence_pieces":
        types = [6 if t.startswith("<0x") else k for t, k in zip(tokens, types, strict=True)]
        found |= {f"{key}model": "llama", f"{key}scores": [-float(i) for i in range(len(tokens))]}
        found[f"{key}add_bos_token"] = False
    elif kind == "unigram":
        found |= {f"{key}model": "t5", f"{key}scores": [score for _, score in model["vocab"]]}
        found |= {f"{key}add_bos_token": True, f"{key}add_space_prefix": True}
    else:
        found = {f"{key}model": "bert", f"{key}cls_token_id": 2, f"{key}seperator_token_id": 3}
        found |= {f"{key}unknown_token_id": 1}
        tokens = [t if i in added else t[2:] if t.startswith("##") else "▁" + t for i, t in enumerate(tokens)]
    return found | {f"{key}tokens": tokens, f"{key}token_type": types}
