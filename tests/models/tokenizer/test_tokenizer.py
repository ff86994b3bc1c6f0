"""Tokenisers give the tokens of the library `tokenizers`, of SentencePiece's rules and of llama.cpp's test vectors."""

from __future__ import annotations

import json
import random
import struct
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from trained import KINDS, corpus, metadata, random_text, save, trained

from rlx.errors import DeviceUnavailable, ModelFormatError, OptionError
from rlx.importers.gguf import GgufArray, read_gguf
from rlx.models.tokenizer import Tokenizer, load, merges
from rlx.models.tokenizer.splits import VARIANTS

KEY = "tokenizer.ggml."
# Where llama.cpp's vocabularies are: models/ggml-vocab-*.gguf with .inp and .out, of llama-cpp-python's source
VOCABULARIES = Path(__file__).parents[3] / "models" / "llama-cpp-vocabularies"


def texts(count: int, seed: int = 1) -> list[str]:
    rng = random.Random(seed)
    return [random_text(rng) for _ in range(count)]


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> Path:
    return save(trained(kind), tmp_path)


def test_a_folder_gives_the_tokens_of_the_library(folder: Path, kind: str, request: pytest.FixtureRequest) -> None:
    """With --full 10,000 texts a kind; what stands around a text is put there once."""
    mine, library = load(folder), trained(kind)
    for text in texts(10_000 if request.config.option.full else 1500):
        bare = library.encode(text, add_special_tokens=False).ids
        assert mine.encode(text, True) == bare
        whole = library.encode(text).ids
        framed = mine.encode(text, True, ends=True)
        if framed != whole:  # the text itself begins or ends with BOS or EOS
            at = len(whole) - len(framed)
            assert at > 0
            assert whole[1 : 1 + len(framed)] == framed or whole[: len(framed)] == framed or whole[1:-1] == framed
        assert mine.decode(whole) == library.decode(whole)


def test_what_users_write_is_never_a_special_token(folder: Path, kind: str) -> None:
    mine = load(folder)
    kept_out = mine.special_ids - {trained(kind).token_to_id("[UNK]" if kind == "word_pieces" else "<unk>")}
    for text in [*texts(500), "<s>", "<|im_end|>", "a<|im_end|>b</s>", "[CLS][SEP]"]:
        ids = mine.encode(text)
        assert kept_out.isdisjoint(ids)
        if kind == "byte_level":
            assert mine.decode(ids) == text


def test_streams_give_the_text_in_whole_characters(folder: Path) -> None:
    mine = load(folder)
    for text in texts(300):
        ids = mine.encode(text, True)
        decoder = mine.decoder()
        parts = [*map(decoder.push, ids), decoder.finish()]
        assert "".join(parts) == mine.decode(ids)


def test_a_character_comes_out_when_its_last_byte_does(tmp_path: Path) -> None:
    mine = load(save(trained("byte_level"), tmp_path))
    ids = [mine.token_id(c) for c in "ðŁĮ¸"]  # the bytes of a flower, each a token
    assert None not in ids
    decoder = mine.decoder()
    assert [decoder.push(i) for i in ids if i is not None] == ["", "", "", "🌸"]
    assert decoder.push(ids[0] or 0) == ""
    assert decoder.finish() == "\ufffd"  # a part of a character is not dropped
    assert mine.decode([ids[0] or 0, ids[1] or 0, *mine.encode("x")]) == "\ufffdx"


def test_metadata_gives_the_tokens_of_tokenizer_json(kind: str, tmp_path: Path) -> None:
    of_folder, of_metadata = load(save(trained(kind), tmp_path)), load(metadata(kind))
    assert len(of_folder) == len(of_metadata)
    for text in texts(600):
        if kind == "unigram":  # tokenizer.json has NFKC, puts no ▁ before a space, and cuts what looks special
            text = "".join(c for c in text if c.isascii() and not c.isspace() and c != "<")
        for special in (False, True):
            assert of_folder.encode(text, special) == of_metadata.encode(text, special), text
        ids = of_folder.encode(text, True)
        assert of_folder.decode(ids) == of_metadata.decode(ids)


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if not variant.spaced])
def test_every_way_to_cut_words_keeps_the_text(name: str) -> None:
    """Expressions are of the syntax that the library has, and what they cut is the whole text."""
    mine = load({**metadata("byte_level"), KEY + "pre": name})
    for text in texts(60, seed=4):
        expected = unicodedata.normalize("NFC", text) if VARIANTS[name].nfc else text
        assert mine.decode(mine.encode(text)) == expected


def test_bpe_on_text_with_spaces_written_out() -> None:
    """gemma4: merges on text in which ▁ stands for spaces; bytes for what the vocabulary lacks."""
    found = {**metadata("sentence_pieces"), KEY + "model": "gemma4"}
    found[KEY + "merges"] = [" ".join(p) for p in json.loads(trained("sentence_pieces").to_str())["model"]["merges"]]
    mine, other = load(found), load({**metadata("sentence_pieces"), KEY + "add_space_prefix": False})
    for text in texts(200, seed=5):
        if "▁" not in text:
            assert mine.decode(mine.encode(text)) == text
        if "\n" not in text:
            assert mine.encode(text) == other.encode(text)


def test_special_tokens_of_metadata_keep_their_numbers(kind: str) -> None:
    """Those of a unigram vocabulary must not be found as pieces of words, and be found where they may."""
    mine = load(metadata(kind))
    bos, text = (2, "[CLS]") if kind == "word_pieces" else (1, "<s>")
    assert mine.encode(text, True) == [bos]
    assert mine.encode(f"a{text}{text}", True)[-2:] == [bos, bos]
    plain = mine.encode(text)
    assert bos not in plain
    assert set(plain) <= set(range(len(mine)))
    if kind in ("byte_level", "sentence_pieces"):
        assert mine.decode(plain) == text


def test_scores_merge_as_sentence_piece_does(request: pytest.FixtureRequest) -> None:
    """The best neighbours first, the leftmost of equals; here by looking at all of them again each time."""
    found = metadata("sentence_pieces")
    mine = load(found)
    number = {text: i for i, text in enumerate(found[KEY + "tokens"])}
    scores, types = found[KEY + "scores"], found[KEY + "token_type"]

    def by_definition(text: str) -> list[str]:
        parts = list(("▁" + text).replace(" ", "▁")) if text else []
        while True:
            pairs = [(-scores[number[a + b]], k) for k, (a, b) in enumerate(pairwise(parts))
                     if a + b in number and types[number[a + b]] == 1]  # fmt: skip
            if not pairs:
                return parts
            k = min(pairs)[1]
            parts[k : k + 2] = [parts[k] + parts[k + 1]]

    for text in texts(2000 if request.config.option.full else 300):
        if text.isascii() and "<" not in text:
            expected = []
            for part in by_definition(text):
                expected += [number[part]] if part in number else [number[f"<0x{b:02X}>"] for b in part.encode()]
            assert mine.encode(text) == expected


def test_bos_comes_once(tmp_path: Path) -> None:
    mine = load(save(trained("byte_level"), tmp_path, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"}))
    assert (mine.bos_id, mine.eos_ids, mine.add_bos) == (1, (2,), True)
    assert mine.encode("hi", ends=True)[0] == 1
    assert mine.encode("<s>hi", True, ends=True) == mine.encode("hi", ends=True)
    assert mine.encode("", ends=True) == [1]
    assert load({**metadata("byte_level"), KEY + "add_bos_token": False}).add_bos is False


def test_several_tokens_end_an_answer(tmp_path: Path) -> None:
    files = {"tokenizer_config": {"eos_token": {"content": "</s>"}}, "generation_config": {"eos_token_id": [3, 2]}}
    assert load(save(trained("byte_level"), tmp_path, **files)).eos_ids == (2, 3)
    assert load(metadata("byte_level")).eos_ids == (2, 3)  # by the name of <|im_end|>
    assert load({**metadata("byte_level"), KEY + "eot_token_id": 9}).eos_ids == (2, 9, 3)


def test_settings_that_change_results_are_taken_off(tmp_path: Path) -> None:
    """Truncation, padding and dropout belong to training."""
    library = trained("byte_level")
    folder = save(library, tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    data["model"]["dropout"] = 0.9
    (folder / "tokenizer.json").write_text(json.dumps(data))
    text = corpus()[0][:500]
    assert load(folder).encode(text, True) == library.encode(text, add_special_tokens=False).ids


def test_continued_text_keeps_its_first_space() -> None:
    mine = load(metadata("sentence_pieces"))
    ids = mine.encode("the memory of a plan")
    assert mine.decode(ids) == "the memory of a plan"
    head, tail = ids[:2], ids[2:]
    assert mine.decode(head) + mine.decode(tail, continued=True) == "the memory of a plan"


def test_special_tokens_are_written_out_where_asked() -> None:
    mine = load(metadata("byte_level"))
    ids = mine.encode("a<|im_end|>", True)
    assert ids[-1] == 3
    assert (mine.decode(ids), mine.decode(ids, special=True)) == ("a", "a<|im_end|>")
    assert (mine.token_bytes(3), mine.token_bytes(3, special=True)) == (b"", b"<|im_end|>")


@pytest.mark.parametrize("bad", [-1, 10**9, 1501])
def test_numbers_that_are_no_tokens_are_refused(bad: int) -> None:
    mine = load(metadata("byte_level"))
    with pytest.raises(OptionError, match="there is no token"):
        mine.decode([bad])


def test_lone_surrogates_and_other_types() -> None:
    mine = load(metadata("byte_level"))
    assert mine.decode(mine.encode("a\ud800b")) == "a\ufffdb"
    with pytest.raises(OptionError, match="expected a str, got bytes"):
        mine.encode(b"a")  # type: ignore[arg-type]


# ---- files that are malformed


def changed(kind: str, **values: Any) -> dict[str, Any]:
    return {**metadata(kind), **{KEY + name: value for name, value in values.items()}}


@pytest.mark.parametrize(
    "kind, values, message",
    [
        ("byte_level", {"model": "rwkv"}, "rlx knows llama, gpt2"),
        ("byte_level", {"model": None}, "holds no tokenizer"),
        ("byte_level", {"model": 3}, "expected a string, got int"),
        ("byte_level", {"pre": "no-such"}, "known are .*llama-bpe"),
        ("byte_level", {"merges": None}, "has no tokenizer.ggml.merges"),
        ("byte_level", {"tokens": list("abc"), "token_type": None, "merges": ["b c"]}, "merges: 'b c': its parts, or"),
        ("byte_level", {"merges": ["no such"]}, "are no tokens"),
        ("byte_level", {"merges": [3]}, "of another type"),
        ("byte_level", {"tokens": []}, "has no tokenizer.ggml.tokens"),
        ("byte_level", {"tokens": "abc"}, "expected an array, got str"),
        ("byte_level", {"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "0 and 2 are both 'a'"),
        ("byte_level", {"tokens": ["a" * (1 << 17)], "token_type": [1]}, "more than 65536 characters"),
        ("byte_level", {"token_type": [1]}, "has 1 items for 1501 tokens"),
        ("byte_level", {"bos_token_id": 99999}, "expected a token from 0 to 1500"),
        ("byte_level", {"bos_token_id": "x"}, "expected a number"),
        ("byte_level", {"add_bos_token": 3}, "expected true or false"),
        ("sentence_pieces", {"scores": [float("nan")] * 1500}, "is no number"),
        ("word_pieces", {"unknown_token_id": -1}, "none for .UNK."),
        ("unigram", {"unknown_token_id": -1}, "a unigram model needs one"),
        ("unigram", {"precompiled_charsmap": [1, 2, 3]}, "library tokenizers refuses it"),
    ],
)  # fmt: skip
def test_bad_metadata_is_one_clear_error(kind: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        load(changed(kind, **values))


def test_tokens_too_long_to_split_are_refused() -> None:
    tokens = ["<unk>", "<s>", "</s>", *("ab" * 30000 + str(i) for i in range(9))]
    values = {"tokens": tokens, "token_type": [1] * 12, "scores": [0.0] * 12}
    with pytest.raises(ModelFormatError, match="too long to be split"):
        load(changed("sentence_pieces", **values))


def test_too_many_pairs_and_special_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merges, "MAX_MERGES", 100)
    with pytest.raises(ModelFormatError, match="more than 100 pairs of tokens make a third"):
        load(metadata("sentence_pieces"))
    tokens = [f"<{i}>" for i in range(70_000)]
    values = {"tokens": tokens, "token_type": [3] * 70_000, "merges": []}
    with pytest.raises(ModelFormatError, match="69999 special tokens: at most 65536"):
        load(changed("byte_level", **values))


def test_tokens_that_are_no_text_can_be_decoded() -> None:
    """Their bytes came as lone surrogates; the library can't hold them, so no text gives them."""
    found = changed("byte_level")
    found[KEY + "tokens"] = [*found[KEY + "tokens"], "\udce6\udc97", ""]
    found[KEY + "token_type"] = [*found[KEY + "token_type"], 1, 1]
    mine = load(found)
    assert mine.token_bytes(1501) == b"\xe6\x97"
    assert mine.token_bytes(1502) == b""
    assert mine.encode("x") == load(changed("byte_level")).encode("x")


def test_a_missing_way_to_cut_words_is_said() -> None:
    found = metadata("byte_level")
    del found[KEY + "pre"]
    with pytest.warns(UserWarning, match="does not say how words are cut"):
        load(found)


@pytest.mark.parametrize(
    "part, recipe, message",
    [
        ("normalizer", {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 99}, "99 times longer"),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"},
                        "content": "aa"}] * 9}, "128 times longer"),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 65}, "65 steps"),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False},
         "repeats a repetition"),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "((?:x|[a)]*)y)*"}, "behavior": "Isolated",
                           "invert": False}, "repeats a repetition"),
        ("pre_tokenizer", {"type": "NoSuch"}, "refuses it"),
    ],
)  # fmt: skip
def test_parts_that_could_fill_memory_or_time_are_refused(
    part: str, recipe: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save(trained("byte_level"), tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text())
    data[part] = recipe
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ModelFormatError, match=message):
        load(folder)


def test_merges_that_would_end_the_process_are_refused(tmp_path: Path) -> None:
    """The library cuts the prefix off by its length, also where it is not there."""
    folder = save(trained("byte_level"), tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["continuing_subword_prefix"] = " "
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ModelFormatError, match="lacks the prefix ' '"):
        load(folder)


def test_a_decoder_that_is_not_known_refuses_to_decode(tmp_path: Path) -> None:
    folder = save(trained("byte_level"), tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["decoder"] = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    mine = load(folder)
    with pytest.raises(OptionError, match="can't decode by its decoder, CTC"):
        mine.decode(mine.encode("a"))


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"there is no tokenizer\.json$"):
        load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelFormatError, match="AutoTokenizer"):
        load(tmp_path)
    with pytest.raises(ModelFormatError, match="no such file"):
        load(tmp_path / "none")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFormatError, match="refuses it"):
        load(tmp_path)


def test_a_missing_library_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DeviceUnavailable, match=r"pip install '.*\[llm\]'"):
        load({KEY + "model": "gpt2", KEY + "tokens": ["a"], KEY + "pre": "gpt-2", KEY + "merges": []})


# ---- GGUF files


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_file(path: Path, found: dict[str, Any]) -> Path:
    """A file of nothing but metadata."""

    def value(x: Any) -> bytes:
        if isinstance(x, bool):
            return struct.pack("<I?", 7, x)
        if isinstance(x, int):
            return struct.pack("<Ii", 5, x)
        if isinstance(x, str):
            return struct.pack("<I", 8) + gguf_string(x)
        kind, pack = {str: (8, gguf_string), int: (5, struct.Struct("<i").pack), float: (6, struct.Struct("<f").pack)}[
            type(x[0])
        ]
        return struct.pack("<IIQ", 9, kind, len(x)) + b"".join(map(pack, x))

    pairs = b"".join(gguf_string(k) + value(v) for k, v in found.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(found)) + pairs)
    return path


def test_a_gguf_file_gives_what_its_metadata_does(kind: str, tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "x.gguf", metadata(kind))
    header = read_gguf(path)
    assert isinstance(header.metadata[KEY + "tokens"], GgufArray)
    for mine in (load(path), load(str(path)), load(header), load(header.metadata)):
        for text in texts(20):
            assert mine.encode(text) == load(metadata(kind)).encode(text)


def pairs_of(path: Path) -> Sequence[tuple[str, list[int]]]:
    """The texts of NAME.gguf.inp with the tokens of NAME.gguf.out."""
    given = Path(f"{path}.inp").read_bytes().decode().removesuffix("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().splitlines()
    return list(zip(given.split("\n__ggml_vocab_test__\n"), [[*map(int, line.split())] for line in lines], strict=True))


FILES = [p for p in sorted(VOCABULARIES.glob("*.gguf")) if Path(f"{p}.inp").exists()]


@pytest.mark.skipif(not FILES, reason=f"{VOCABULARIES} is not there: python tools/fetch_vocabularies.py")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_vectors_of_llama_cpp(path: Path) -> None:
    mine = load(path)
    for text, ids in pairs_of(path):
        assert mine.encode(text) == ids, text
        if mine.encode("A") != mine.encode("a"):  # BERT's are in lower case
            assert mine.decode(ids) == text


def test_tokenizers_say_what_they_are() -> None:
    mine = load(metadata("byte_level"))
    assert isinstance(mine, Tokenizer)
    assert repr(mine) == "Tokenizer('the metadata', 1501 tokens)"
