"""What runs read is told with their time: weights once, keys and values by position, experts as far as chosen."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from small_decoders import write_folder

import rlx
from rlx.backends import backend_named
from rlx.cost import kept
from rlx.cost.ceilings import guess_of
from rlx.llm.model import LanguageModel

CONFIGS = json.loads((Path(__file__).parents[1] / "decoders" / "configs.json").read_text())


def test_runs_read_weights_and_cache(llm: LanguageModel) -> None:
    """All weights but the table of the embedding; panels are padded to whole vectors."""
    config, shapes = CONFIGS["llama"]["config"], CONFIGS["llama"]["shapes"]
    reading = llm.slots.reading
    assert reading is not None
    whole = sum(4 * math.prod(shape) for name, shape in shapes.items() if "embed_tokens" not in name)
    assert whole <= reading.weights <= 1.5 * whole
    heads = config["num_key_value_heads"] * config["head_dim"]
    assert reading.at(5) - reading.at(4) == 2 * config["num_hidden_layers"] * heads * 4
    made = llm.generate([1, 40, 41, 42], 6, ignore_eos=True)
    list(made)
    assert made.stats.decode_bytes == sum(reading.at(5 + n) for n in range(5))
    assert made.stats.bytes_per_second == made.stats.decode_bytes / made.stats.decode_seconds
    assert "/s read)" in str(made.stats)


def test_the_share_is_of_what_was_calibrated(llm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    list(llm.generate([1, 40, 41, 42], 6, ignore_eos=True))
    monkeypatch.setattr(kept, "kept_ceilings", lambda device, threads: None)
    assert llm.bandwidth_share is None
    known, reading = guess_of(backend_named("cpu"), 1), llm.slots.reading
    assert reading is not None
    monkeypatch.setattr(kept, "kept_ceilings", lambda device, threads: known)
    assert llm.bandwidth_share == llm.stats.bytes_per_second / known.bytes_rate(reading.weights)
    list(llm.generate([1, 40, 41, 42], 1, ignore_eos=True))
    assert llm.bandwidth_share is None  # nothing was timed


def test_of_experts_those_that_are_chosen_count(tmp_path: Path) -> None:
    case, read = CONFIGS["mixtral"], []
    for chosen in (1, 2, 4):
        path = write_folder(tmp_path / str(chosen), {**case["config"], "num_experts_per_tok": chosen}, case["shapes"])
        with rlx.load_llm(path, device="cpu", context=64) as llm:
            assert llm.slots.reading is not None
            read.append(llm.slots.reading.weights)
    one, two, all_ = read
    experts = sum(4 * math.prod(shape) for name, shape in case["shapes"].items() if ".experts." in name)
    assert two - one == (all_ - two) // 2
    assert experts / 4 <= two - one <= experts


def test_a_device_that_does_not_tell_gives_no_rate(path: Path) -> None:
    with rlx.load_llm(path, device="reference", context=32) as llm:
        list(llm.generate([1, 40], 3, ignore_eos=True))
        assert (llm.slots.reading, llm.stats.bytes_per_second, llm.bandwidth_share) == (None, 0.0, None)
        assert "read" not in str(llm.stats)


def test_a_table_that_is_the_head_too_counts(tmp_path: Path) -> None:
    """Where the head isn't packed, its products and the look-up of tokens read the same table."""
    case, read = CONFIGS["llama"], []
    for tied in (False, True):
        shapes = {name: shape for name, shape in case["shapes"].items() if not (tied and name == "lm_head.weight")}
        path = write_folder(tmp_path / str(tied), {**case["config"], "tie_word_embeddings": tied}, shapes)
        with rlx.load_llm(path, device="cpu", context=64, packing="none") as llm:
            assert llm.slots.reading is not None
            read.append(llm.slots.reading.weights)
    assert read[0] == read[1]
