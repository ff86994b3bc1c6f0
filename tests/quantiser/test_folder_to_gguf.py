"""Folders with safetensors become GGUF files that compute the same: the families' logits are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_decoders import TOKENS, ids_of, write_folder, write_gguf

import rlx
from rlx.errors import ModelFormatError
from rlx.importers.gguf import read_gguf
from rlx.models.decoder import build_decoder

DECODERS = Path(__file__).parents[1] / "decoders"
CASES: dict[str, dict[str, Any]] = json.loads((DECODERS / "configs.json").read_text())
REFUSED = "gemma2-scalar"
MIXTURES = [name for name, case in CASES.items() if "moe" in name or "mixtral" in name]
SHOWN = [0, 5, 31, TOKENS - 1]  # the places whose logits are stored


def logits_of(path: Path, ids: Any) -> Any:
    """Logits [batch, places, vocab] of one run."""
    batch, count = ids.shape
    model = rlx.compile(build_decoder(path, batch=batch, context=200).graph, device="cpu")
    wanted = np.array([b * count + p for b in range(batch) for p in SHOWN])
    given = {"ids": ids, "counts": np.full(batch, count), "wanted": wanted}
    (logits,) = model.run(given, outputs=["logits"])
    return np.asarray(logits).reshape(batch, len(SHOWN), -1)


@pytest.mark.parametrize("name", ["llama-llama3", "gemma3", "gpt2"])
def test_the_logits_stay(name: str, tmp_path: Path) -> None:
    """Names, order of rows, norms, matrices, positions and factors; the other families are below."""
    case = CASES[name]
    folder = write_folder(tmp_path / "m", case["config"], case["shapes"])
    made = rlx.quantize(folder, tmp_path / "m.gguf", "f32")
    assert made.written == (tmp_path / "m.gguf").stat().st_size
    ids = ids_of(case["config"]["vocab_size"])
    expected = np.load(DECODERS / "logits.npz")[name]
    np.testing.assert_allclose(logits_of(tmp_path / "m.gguf", ids), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in CASES if name not in (REFUSED, *MIXTURES)])
def test_metadata_is_that_of_the_converter(name: str, tmp_path: Path) -> None:
    """What llama.cpp's own package writes for these models is there, with equal values; so are all tensors."""
    case = CASES[name]
    rlx.quantize(write_folder(tmp_path / "m", case["config"], case["shapes"]), tmp_path / "m.gguf", "f32")
    ours = read_gguf(tmp_path / "m.gguf")
    theirs = read_gguf(write_gguf(tmp_path / "t.gguf", case["config"], case["shapes"]))
    for key, value in theirs.metadata.items():
        if key.startswith(("tokenizer.", "general.")) and key != "general.architecture":
            continue
        wanted = value if isinstance(value, str) else pytest.approx(value, rel=1e-6)
        assert ours.metadata[key] == wanted, key
    assert ours.tensors.keys() == theirs.tensors.keys()
    for tensor in theirs.tensors:
        a, b = (f.raw(tensor).view(np.float32) for f in (ours, theirs))
        np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=tensor)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_refused(name: str, tmp_path: Path) -> None:
    """A GGUF file has the experts of a layer in one tensor; nothing joins them yet."""
    folder = write_folder(tmp_path / "m", CASES[name]["config"], CASES[name]["shapes"])
    with pytest.raises(ModelFormatError, match="mixture of experts"):
        rlx.quantize(folder, tmp_path / "m.gguf", "q8_0")
    assert not (tmp_path / "m.gguf").exists()


def test_what_metadata_can_not_say_is_refused(tmp_path: Path) -> None:
    """Gemma's scale follows from its sizes in GGUF files; another one has no key."""
    case = CASES[REFUSED]
    with pytest.raises(ModelFormatError, match="its scale can't be said"):
        rlx.quantize(write_folder(tmp_path / "m", case["config"], case["shapes"]), tmp_path / "m.gguf", "q8_0")
    assert not (tmp_path / "m.gguf").exists()
