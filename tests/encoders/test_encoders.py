"""Encoders compute what transformers does (tools/encoder_vectors.py wrote what is expected), from both formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from converted_files import contents
from encoder_vectors import COUNTS, SHOWN, ids_of
from small_decoders import write_folder, write_safetensors
from small_encoders import as_published, write_gguf

import rlx
from rlx.errors import ModelFormatError, OptionError
from rlx.models.encoder import build_encoder

HERE = Path(__file__).parent
CASES: dict[str, dict[str, Any]] = json.loads((HERE / "configs.json").read_text())
IDS = ids_of(96)


@pytest.fixture
def expected() -> Any:
    return np.load(HERE / "vectors.npz")


def hidden_of(path: Path, device: str) -> Any:
    """The vectors of the tokens whose values are stored."""
    model = rlx.compile(build_encoder(path).graph, device=device)
    (hidden,) = model.run({"ids": IDS, "counts": np.array(COUNTS)}, outputs=["hidden"])
    return np.asarray(hidden)[:, list(SHOWN)]


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_folders_give_the_vectors_of_transformers(name: str, device: str, tmp_path: Path, expected: Any) -> None:
    folder = write_folder(tmp_path / "m", CASES[name]["config"], CASES[name]["shapes"])
    np.testing.assert_allclose(hidden_of(folder, device), expected[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_gguf_files_mean_the_same(name: str, tmp_path: Path, expected: Any) -> None:
    path = write_gguf(tmp_path / "m.gguf", CASES[name]["config"], CASES[name]["shapes"])
    np.testing.assert_allclose(hidden_of(path, "cpu"), expected[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_gguf_files_are_written_as_by_llama_cpp(name: str, tmp_path: Path) -> None:
    """Names, shapes and bytes of tensors, and keys, are what its own converter made (tools/converted_files.py)."""
    wanted = json.loads((HERE / "converted.json").read_text())[name]
    made = contents(write_gguf(tmp_path / "m.gguf", CASES[name]["config"], CASES[name]["shapes"]))
    assert made["tensors"] == wanted["tensors"]
    both = made["facts"].keys() & wanted["facts"].keys()
    assert len(both) >= 6
    if name == "nomic":  # the converter takes sizes as transformers knows them, and so those of the published model
        both = {"nomic-bert.attention.causal", "nomic-bert.rope.freq_base"}
    assert {key: made["facts"][key] for key in both} == {key: wanted["facts"][key] for key in both}


PATTERN = "modern-bert.attention.sliding_window_pattern"


@pytest.mark.parametrize("told", [{PATTERN: 2}, {PATTERN: [False, True, False, True]}, {PATTERN: 1}, {PATTERN: 0}])
def test_windows_and_activation_of_modernbert(told: dict[str, Any], tmp_path: Path) -> None:
    """A GGUF file gives the layers that see all as a number, of which the first, or as a list."""
    pattern = told[PATTERN]
    near = pattern if isinstance(pattern, list) else [pattern == 0 or n % pattern != 0 for n in range(4)]
    case = CASES["modernbert"]
    kinds = ["sliding_attention" if n else "full_attention" for n in near]
    config = {**case["config"], "hidden_activation": "silu", "layer_types": kinds}
    folder = write_folder(tmp_path / "m", config, case["shapes"])
    path = write_gguf(tmp_path / "m.gguf", config, case["shapes"], facts=told)
    windows = build_encoder(path).config.windows
    assert windows == tuple(7 if n else None for n in near) == build_encoder(folder).config.windows
    np.testing.assert_array_equal(hidden_of(path, "cpu"), hidden_of(folder, "cpu"))
    plain = write_gguf(tmp_path / "p.gguf", case["config"], case["shapes"], facts=told)
    assert not np.allclose(hidden_of(path, "cpu"), hidden_of(plain, "cpu"), atol=1e-3)


def test_a_modernbert_file_embeds_texts(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", CASES["modernbert"]["config"], CASES["modernbert"]["shapes"], "CLS")
    embedder = rlx.load_embedder(path, device="cpu")
    ids = embedder.tokenizer.encode("abc", ends=True)
    assert ids == [2, 95, 4 + ord("c") - 33, 3]  # CLS, a merged pair, SEP once
    with pytest.raises(ModelFormatError, match="expected a list of 4"):
        build_encoder(
            write_gguf(tmp_path / "p.gguf", CASES["modernbert"]["config"], CASES["modernbert"]["shapes"],
                       facts={PATTERN: [True]})
        )  # fmt: skip
    (vector,) = np.asarray(embedder.embed(["abc"]))
    model = rlx.compile(build_encoder(path).graph, device="reference")
    (wanted,) = model.run({"ids": np.array([ids]), "counts": np.array([4])}, outputs=["embedding"])
    np.testing.assert_allclose(vector, np.asarray(wanted)[0], atol=1e-5)


def test_names_that_a_model_was_published_with(tmp_path: Path, expected: Any) -> None:
    config, arrays = as_published(CASES["nomic"]["config"], CASES["nomic"]["shapes"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model.safetensors", arrays, "F32")
    np.testing.assert_allclose(hidden_of(tmp_path, "cpu"), expected["nomic"], atol=1e-5, rtol=1e-5)
    assert build_encoder(tmp_path).config.context == 64  # the positions that it was trained for


def by_hand(hidden: Any, count: int, kind: str) -> Any:
    """One text's vector from those of its tokens, in f64."""
    x = hidden[:count].astype(np.float64)
    weights = np.arange(1, count + 1)[:, None]
    return {
        "mean": x.mean(axis=0),
        "cls": x[0],
        "last": x[-1],
        "max": x.max(axis=0),
        "mean_sqrt": x.sum(axis=0) / np.sqrt(count),
        "weighted_mean": (x * weights).sum(axis=0) / weights.sum(),
    }[kind]


@pytest.mark.parametrize("kind", ["mean", "cls", "last", "max", "mean_sqrt", "weighted_mean"])
@pytest.mark.parametrize("normalised", [False, True])
def test_pooling(kind: str, normalised: bool, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", CASES["bert"]["config"], CASES["bert"]["shapes"])
    for device in ("cpu", "reference"):
        model = rlx.compile(build_encoder(folder, pooling=kind, normalised=normalised).graph, device=device)
        made, hidden = model.run({"ids": IDS, "counts": np.array(COUNTS)}, outputs=["embedding", "hidden"])
        for row, tokens, count in zip(made, np.asarray(hidden), COUNTS, strict=True):
            wanted = by_hand(tokens, count, kind)
            wanted = wanted / np.linalg.norm(wanted) if normalised else wanted
            np.testing.assert_allclose(row, wanted, atol=1e-5, rtol=1e-5)


def told(folder: Path, pooling: Any, modules: Any = None, **files: Any) -> Path:
    """Files of sentence-transformers beside a model."""
    names = ["Transformer", "Pooling"] if modules is None else modules
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    listed = [{"path": paths.get(n, n), "type": f"sentence_transformers.models.{n}"} for n in names]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_what_the_files_say_counts(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", CASES["bert"]["config"], CASES["bert"]["shapes"])
    plain = build_encoder(folder).pooling
    assert (plain.kind, plain.normalised, plain.longest) == ("mean", False, 64)
    told(
        folder, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        ["Transformer", "Pooling", "Normalize"], sentence_bert_config={"max_seq_length": 20},
        config_sentence_transformers={"prompts": {"query": "q: "}, "default_prompt_name": "query"},
    )  # fmt: skip
    said = build_encoder(folder).pooling
    assert (said.kind, said.normalised, said.longest, said.prompt) == ("cls", True, 20, "query")
    assert build_encoder(folder, context=30).pooling.longest == 30
    told(folder, {"pooling_mode": "lasttoken"})
    assert build_encoder(folder).pooling.kind == "last"
    path = write_gguf(tmp_path / "m.gguf", CASES["bert"]["config"], CASES["bert"]["shapes"], "CLS")
    assert (build_encoder(path).pooling.kind, build_encoder(path).pooling.normalised) == ("cls", True)


def test_refusals(tmp_path: Path) -> None:
    case = CASES["bert"]
    folder = write_folder(tmp_path / "m", case["config"], case["shapes"])
    for pooling, modules, message in (
        ({}, None, "expected one kind of pooling"),
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, None, "expected one kind of pooling"),
        ({"pooling_mode": ["lasttoken"]}, None, "expected one kind of pooling"),
        ({"pooling_mode_cls_token": True, "include_prompt": False}, None, "include_prompt"),
        ({"pooling_mode_cls_token": True}, ["Transformer", "Pooling", "Dense"], "'Dense' is not known"),
        ([], None, "expected an object"),
    ):
        told(folder, pooling, modules)
        with pytest.raises(ModelFormatError, match=message):
            build_encoder(folder)
    (folder / "modules.json").write_text('[{"type": "x.Pooling", "path": "../1_Pooling"}]')
    with pytest.raises(ModelFormatError, match="is no name of a folder"):
        build_encoder(folder)
    (folder / "modules.json").write_text(json.dumps([{"type": "x.Pooling", "path": 5000 * "a"}]))  # no system has it
    with pytest.raises(ModelFormatError):
        build_encoder(folder)
    (folder / "modules.json").unlink()
    for default in ("doc", ["query"]):
        said = {"prompts": {"query": "q: "}, "default_prompt_name": default}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
        with pytest.raises(ModelFormatError, match="there is no prompt"):
            build_encoder(folder)
    (folder / "config_sentence_transformers.json").unlink()
    with pytest.raises(OptionError, match="has positions for 64 tokens"):
        build_encoder(folder, context=65)
    with pytest.raises(OptionError, match="pooling='sum'"):
        build_encoder(folder, pooling="sum")
    shapes = {**case["shapes"], "classifier.weight": [2, 32]}
    with pytest.raises(ModelFormatError, match=r"has no tensors classifier\.weight"):
        build_encoder(write_folder(tmp_path / "c", case["config"], shapes))
    path = write_gguf(tmp_path / "m.gguf", case["config"], case["shapes"], "RANK")
    with pytest.raises(ModelFormatError, match="pooling_type rank is not known"):
        build_encoder(path)
