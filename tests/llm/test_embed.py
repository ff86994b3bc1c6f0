"""Embedders: vectors of texts, whatever goes through beside them, and `rlx embed`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from small_decoders import write_folder
from small_encoders import write_gguf

import rlx
from rlx.cli.main import cli
from rlx.errors import ClosedError, ModelFormatError, OptionError
from rlx.llm.embedder import Embedder

CASE = json.loads((Path(__file__).parents[1] / "encoders" / "configs.json").read_text())["bert"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("embed") / "small.gguf", CASE["config"], CASE["shapes"])


@pytest.fixture(scope="module")
def embedder(file: Path) -> Embedder:
    return rlx.load_embedder(file, device="cpu")


TEXTS = ["a", "a b c d e f g", "", "x y", "b " * 40, "c d", "! ?"]


def test_a_text_has_its_vector_whatever_is_beside_it(file: Path, embedder: Embedder) -> None:
    """Bits are equal alone, in other orders and in other groups."""
    together = embedder.embed(TEXTS)
    assert together.shape == (len(TEXTS), embedder.dimensions) == (7, 32)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, rtol=1e-6)
    np.testing.assert_array_equal(embedder.embed(TEXTS[::-1])[::-1], together)
    small = rlx.load_embedder(file, device="cpu", batch=2)
    np.testing.assert_array_equal(small.embed(TEXTS), together)
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_array_equal(embedder.embed(text), vector)
    assert embedder.embed([]).shape == (0, 32)


def test_tokens_and_prompts(embedder: Embedder) -> None:
    ids = embedder.tokenizer.encode("a b", ends=True)
    assert (ids[0], ids[-1]) == (2, 3)  # CLS and SEP
    np.testing.assert_array_equal(embedder.embed([ids])[0], embedder.embed("a b"))
    np.testing.assert_array_equal(embedder.embed("b", prompt="a "), embedder.embed("a b"))
    embedder.prompts["query"] = "a "
    np.testing.assert_array_equal(embedder.embed("b", prompt="query"), embedder.embed("a b"))
    del embedder.prompts["query"]


def test_long_texts_are_refused_or_cut(embedder: Embedder) -> None:
    long = "a " * 100
    with pytest.raises(OptionError, match=r"text 1 has 102 tokens, and the model takes 64: .* truncate=True"):
        embedder.embed(["a", long])
    cut = embedder.tokenizer.encode(long, ends=True, most=64)
    assert len(cut) == 64
    assert (cut[0], cut[-1]) == (2, 3)
    np.testing.assert_array_equal(embedder.embed(long, truncate=True), embedder.embed([cut])[0])


@pytest.mark.parametrize(
    "texts, message",
    [
        (3, "expected a text or several, got int"),
        (b"x", "got bytes"),
        ([3], "text 0: expected a text or a list of tokens, got int"),
        (["a", [2, 96]], "text 1: 96 is no token: expected a text, or numbers of 0 to 95"),
        ([[]], "text 0 has no tokens"),
    ],
)
def test_wrong_calls(embedder: Embedder, texts: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        embedder.embed(texts)


def test_what_embeds_and_what_writes_are_told_apart(file: Path, path: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"embeds texts and writes none: rlx\.load_embedder takes it"):
        rlx.load_llm(file)
    with pytest.raises(ModelFormatError, match="can't embed texts with 'llama'; known are bert, nomic-bert"):
        rlx.load_embedder(path)
    with pytest.raises(OptionError, match="has no 'kv_dtype'; it has context, batch, pooling, normalised"):
        rlx.load(file, dims={"kv_dtype": "f16"})
    folder = write_folder(tmp_path / "m", CASE["config"], CASE["shapes"])
    with rlx.load_embedder(folder, device="cpu", pooling="cls", normalised=True, context=9) as other:
        assert other.context == 9
        assert np.linalg.norm(other.embed([[5, 6]])) == pytest.approx(1)
        with pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
            other.embed("a")
    with pytest.raises(ClosedError):
        other.embed([[5, 6]])


def test_the_command(file: Path, embedder: Embedder, tmp_path: Path) -> None:
    wanted = embedder.embed(["a b", "c"])
    asked = ["embed", str(file), "--device", "cpu"]
    done = CliRunner().invoke(cli, [*asked, "a b", "c"])
    assert done.exit_code == 0, done.output
    np.testing.assert_array_equal(np.array([json.loads(line) for line in done.stdout.splitlines()], np.float32), wanted)
    out = tmp_path / "v.npy"
    done = CliRunner().invoke(cli, [*asked, "-o", str(out)], input="a b\nc\n")
    assert done.exit_code == 0, done.output
    np.testing.assert_array_equal(np.load(out), wanted)
    found = json.loads(CliRunner().invoke(cli, [*asked, "--json", "a b"]).stdout)
    assert (found["texts"], found["dimensions"]) == (1, 32)
    np.testing.assert_array_equal(np.array(found["embeddings"], np.float32), wanted[:1])
    assert "truncate" in CliRunner().invoke(cli, [*asked, "a " * 99]).stderr
    assert CliRunner().invoke(cli, [*asked, "--truncate", "a " * 99]).exit_code == 0
