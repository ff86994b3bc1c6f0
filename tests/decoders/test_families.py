"""Families of decoders compute what transformers does (tools/decoder_logits.py wrote what is expected)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from converted_files import contents
from small_decoders import TOKENS, ids_of, write_folder, write_gguf

import rlx
from rlx.errors import OptionError
from rlx.models.decoder import build_decoder

HERE = Path(__file__).parent
CASES: dict[str, dict[str, Any]] = json.loads((HERE / "configs.json").read_text())
CONVERTED: dict[str, dict[str, Any]] = json.loads((HERE / "converted.json").read_text())
SHOWN = [0, 5, 31, TOKENS - 1]  # the places whose logits are stored


@pytest.fixture
def expected() -> Any:
    return np.load(HERE / "logits.npz")


def model_of(folder: Path, batch: int, device: str = "cpu", **options: Any) -> rlx.CompiledGraph:
    return rlx.compile(build_decoder(folder, batch=batch, context=200, **options).graph, device=device)


def logits_of(model: rlx.CompiledGraph, ids: Any, steps: list[int]) -> Any:
    """Logits [batch, tokens, vocab] of the stored places, with the tokens of each run given; from position 0 on."""
    batch, at = len(ids), 0
    model.states["length"].write(np.zeros(batch, np.int64))
    found: list[Any] = [[] for _ in range(batch)]
    for count in steps:
        own = [p - at for p in SHOWN if at <= p < at + count]
        wanted = np.array([b * count + p for b in range(batch) for p in own] or [0])
        given = {"ids": ids[:, at : at + count], "counts": np.full(batch, count), "wanted": wanted}
        (logits,) = model.run(given, outputs=["logits"])
        for b in range(batch):
            found[b] += list(np.asarray(logits)[b * len(own) : (b + 1) * len(own)])
        at += count
    return np.array(found)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, expected: Any) -> None:
    """Two sequences, in one run and token by token; windows of 16 and stretched positions are passed."""
    case = CASES[name]
    ids = ids_of(case["config"]["vocab_size"])
    model = model_of(write_folder(tmp_path / "m", case["config"], case["shapes"]), len(ids))
    for steps in ([TOKENS], [3, 1, 60, *[1] * 6, TOKENS - 70]):
        np.testing.assert_allclose(logits_of(model, ids, steps), expected[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama-llama3", "gemma2", "gpt2"])
def test_the_reference_device_computes_the_same(name: str, tmp_path: Path, expected: Any) -> None:
    """The graph means it without any pass or kernel."""
    case = CASES[name]
    ids = ids_of(case["config"]["vocab_size"])
    model = model_of(write_folder(tmp_path / "m", case["config"], case["shapes"]), len(ids), "reference")
    np.testing.assert_allclose(logits_of(model, ids, [100, 60]), expected[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_weights_and_caches_of_16_bits_stay_so(dtype: Any, tmp_path: Path) -> None:
    """Params have the type of the file and states the one asked for, and results are what the reference computes."""
    case, kind = CASES["qwen3"], "f16" if dtype is np.float16 else "bf16"
    folder = write_folder(tmp_path / "m", case["config"], case["shapes"], dtype)
    graph = build_decoder(folder, kv_dtype=kind).graph
    assert {str(p.dtype) for p in graph.params} == {kind}
    assert {str(s.dtype) for s in graph.states if s.name != "length"} == {kind}
    ids = ids_of(96)[:1]
    made, wanted = (logits_of(model_of(folder, 1, d, kv_dtype=kind), ids, [TOKENS]) for d in ("cpu", "reference"))
    np.testing.assert_allclose(made, wanted, atol=2e-2, rtol=2e-2)


# GGUF files say nothing of the window of Mistral, of the factor of scores of Gemma, and of weights of experts that are
# not made to sum up to 1
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"mistral", "gemma2-scalar", "qwen3-moe"}))
def test_gguf_files_mean_the_same(name: str, tmp_path: Path, expected: Any) -> None:
    """A file with the tensors and keys of llama.cpp's converter gives the logits of the folder."""
    case = CASES[name]
    path = write_gguf(tmp_path / "m.gguf", case["config"], case["shapes"], facts=CONVERTED[name]["facts"])
    ids = ids_of(case["config"]["vocab_size"])
    made = logits_of(model_of(path, len(ids), "reference"), ids, [TOKENS])
    np.testing.assert_allclose(made, expected[name], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", CASES)
def test_gguf_files_are_written_as_by_llama_cpp(name: str, tmp_path: Path) -> None:
    """Names, shapes and bytes of tensors, and keys, are what its own converter made (tools/converted_files.py)."""
    made, wanted = (
        contents(write_gguf(tmp_path / "m.gguf", CASES[name]["config"], CASES[name]["shapes"])),
        CONVERTED[name],
    )
    for tensors in (made["tensors"], wanted["tensors"]):
        for found in tensors.values():
            found[0] = [n for n in found[0] if n > 1]  # of a router's one row older ones leave out an axis
    assert made["tensors"] == wanted["tensors"]
    both = made["facts"].keys() & wanted["facts"].keys()
    assert {key: made["facts"][key] for key in both} == {key: wanted["facts"][key] for key in both}
    assert {"block_count", "embedding_length", "attention.head_count"} <= {key.partition(".")[2] for key in both}


@pytest.mark.parametrize(
    "name, kind",
    [
        ("llama", "Q8_0"),
        ("llama", "Q4_1"),
        ("llama", "Q5_0"),
        ("llama", "BF16"),
        ("mixtral", "Q8_0"),
        ("mixtral", "Q4_0"),
    ],
)
def test_blocks_are_computed_with_as_they_are_stored(name: str, kind: str, tmp_path: Path) -> None:
    """Logits are those of the numbers that the blocks stand for, and params keep the bytes of the file."""
    case, ids = CASES[name], ids_of(96)
    path = write_gguf(tmp_path / "m.gguf", case["config"], case["shapes"], kind)
    graph = build_decoder(path).graph
    stored = {p.type.encoding.name if p.type.encoding else str(p.dtype) for p in graph.params}
    assert stored == {kind.lower(), "f32"}
    made, wanted = (logits_of(model_of(path, 2, device), ids, [100, 1, 1, 58]) for device in ("cpu", "reference"))
    np.testing.assert_allclose(made, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_caches_in_blocks(kind: str, tmp_path: Path) -> None:
    """Keys and values are stored in blocks, and results are what the reference computes with those."""
    case, ids = CASES["gemma3"], ids_of(96)[:1]
    config = {**case["config"], "head_dim": 32}
    shapes = {n: _with_heads_of(32, n, list(s)) for n, s in case["shapes"].items()}
    folder = write_folder(tmp_path / "m", config, shapes)
    states = [s for s in build_decoder(folder, kv_dtype=kind).graph.states if s.name != "length"]
    assert {s.type.encoding.name for s in states if s.type.encoding} == {kind}
    made, wanted = (logits_of(model_of(folder, 1, d, kv_dtype=kind), ids, [100, 1, 59]) for d in ("cpu", "reference"))
    np.testing.assert_allclose(made, wanted, atol=0.1, rtol=0.1)
    with pytest.raises(OptionError, match="heads of 8 elements are not whole blocks"):
        build_decoder(write_folder(tmp_path / "n", case["config"], case["shapes"]), kv_dtype=kind)


def _with_heads_of(size: int, name: str, shape: list[int]) -> list[int]:
    """The shape of a tensor of Gemma 3 whose heads have `size` elements and not 8."""
    own = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "q_norm": 0, "k_norm": 0}
    axis = next((axis for part, axis in own.items() if part in name), None)
    return shape if axis is None else [n * size // 8 if d == axis else n for d, n in enumerate(shape)]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_sequences_of_a_batch_go_on_by_themselves(name: str, tmp_path: Path) -> None:
    """Sequences at different positions, each with a number of tokens of its own, have the bits that they have alone."""
    case, ids = CASES[name], ids_of(96)
    folder = write_folder(tmp_path / "m", case["config"], case["shapes"])
    both, alone = model_of(folder, 2), model_of(folder, 1)
    steps = [(20, 7), (1, 30), (4, 4), (1, 1), (40, 0)]  # tokens of each sequence that count, in each run
    at, together = [0, 0], [[], []]  # type: ignore[var-annotated]
    for counts in steps:
        most = max(counts)
        given = np.zeros((2, most), np.int64)
        for b, n in enumerate(counts):
            given[b, :n] = ids[b, at[b] : at[b] + n]
            at[b] += n
        wanted = [b * most + max(n, 1) - 1 for b, n in enumerate(counts)]
        (logits,) = both.run({"ids": given, "counts": counts, "wanted": wanted}, outputs=["logits"])
        for b, n in enumerate(counts):
            together[b] += [logits[b]] if n else []
    assert both.states["length"].read().tolist() == at
    for b in range(2):
        alone.states["length"].write(np.zeros(1, np.int64))
        start = 0
        for n, expected in zip([c[b] for c in steps if c[b]], together[b], strict=True):
            given = {"ids": ids[b : b + 1, start : start + n], "counts": [n], "wanted": [n - 1]}
            (logits,) = alone.run(given, outputs=["logits"])
            np.testing.assert_array_equal(logits[0], expected)
            start += n
