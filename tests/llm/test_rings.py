"""Layers with a window keep what it sees: the same logits and texts as with all positions, in less memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_decoders import TOKENS, ids_of, write_folder, write_gguf

import rlx
from rlx.errors import OptionError
from rlx.llm.model import LanguageModel

DECODERS = Path(__file__).parents[1] / "decoders"
CASES: dict[str, dict[str, Any]] = json.loads((DECODERS / "configs.json").read_text())
SHOWN = [0, 5, 31, TOKENS - 1]
WINDOW, PREFILL = 16, 8
ROWS = WINDOW - 1 + 32 + PREFILL  # of a layer with a window


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = CASES["gemma3"]
    return write_gguf(tmp_path_factory.mktemp("rings") / "gemma.gguf", case["config"], case["shapes"])


def load(path: Path, prefill: int = PREFILL, **options: Any) -> LanguageModel:
    return rlx.load_llm(path, device="cpu", **{"context": 200, "prefill": prefill, **options})


def rows_of(llm: LanguageModel) -> list[int]:
    return [int(s.spec.shape[2]) for n, s in llm.model.states.items() if ".k." in n]


@pytest.mark.parametrize("case", ["mistral", "gemma2", "gemma3"])
@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
def test_logits_are_those_of_transformers(case: str, kv_dtype: str, tmp_path: Path) -> None:
    """Of 160 tokens, past the window and past what its cache has room for; Mistral has windows in all layers."""
    expected = np.load(DECODERS / "logits.npz")[case]
    folder = write_folder(tmp_path / "m", CASES[case]["config"], CASES[case]["shapes"])
    llm, whole = load(folder, kv_dtype=kv_dtype), load(folder, 200, kv_dtype=kv_dtype)
    assert set(rows_of(llm)) == ({ROWS} if case == "mistral" else {ROWS, 200})
    assert set(rows_of(whole)) == {200}
    assert (llm.context, whole.context) == (200, 200)
    for ids, wanted in zip(ids_of(CASES[case]["config"]["vocab_size"]).tolist(), expected, strict=True):
        for one in (llm, whole):
            one.reset()
        found = np.asarray(llm.extend(llm.begin(None, ids)[0], ids, "logits"))
        other = np.asarray(whole.extend(whole.begin(None, ids)[0], ids, "logits"))
        np.testing.assert_allclose(found, other, atol=1e-5, rtol=1e-5)
        if kv_dtype == "f32":
            np.testing.assert_allclose(found[SHOWN], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16"])
def test_texts_are_those_of_the_whole_cache(path: Path, kv_dtype: str) -> None:
    llm, whole = load(path, kv_dtype=kv_dtype, slots=3), load(path, 200, kv_dtype=kv_dtype)
    prompts = [[1, *range(5, 5 + n)] for n in (3, 40, 70)]
    texts = [whole.generate(p, 90, ignore_eos=True, temperature=0.9, seed=4) for p in prompts]
    wanted = ["".join(text) for text in texts]
    together = llm.generate_many(prompts, 90, ignore_eos=True, temperature=0.9, seed=4)
    list(together)
    assert [made.text for made in together.generations] == wanted
    assert max(llm.slots.starts) > 0
    guessed = load(path, kv_dtype=kv_dtype).generate([5, 6, 5, 6, 5], 150, ignore_eos=True, speculate=8)
    assert "".join(guessed) == "".join(whole.generate([5, 6, 5, 6, 5], 150, ignore_eos=True))


def test_a_text_that_a_window_lost_is_computed_anew(path: Path) -> None:
    """Going back a little is free; further back than the cache begins, all is computed anew."""
    llm, whole = load(path), load(path, 200)
    ids = ids_of(96)[0][:150].tolist()
    wanted = whole.generate([*ids[:100], 9], 5, ignore_eos=True)
    list(wanted)
    for kept, cached in ((145, 145), (100, 0)):
        llm.reset()
        llm.extend(llm.begin(None, ids)[0], ids, "token")
        made = llm.generate([*ids[:kept], 9], 5, ignore_eos=True)
        list(made)
        assert made.stats.cached_tokens == cached
    assert made.ids == wanted.ids


def test_a_full_context_goes_on(path: Path) -> None:
    """What is left out is left out, with or without the whole cache."""
    texts = [
        "".join(load(path, prefill, context=90).generate([1, 5, 6], 200, ignore_eos=True, overflow="shift"))
        for prefill in (PREFILL, 90)
    ]
    assert texts[0] == texts[1]


def test_snapshots_have_what_windows_see(path: Path) -> None:
    llm = load(path)
    made = llm.generate([1, *range(5, 45)], 120, ignore_eos=True, temperature=0.8, seed=2)
    for _ in range(70):
        next(made)
    data, whole = llm.snapshot(made), load(path, 200)
    early = llm.generate([1, 5], 150, ignore_eos=True)
    next(early)
    small = llm.snapshot(early)
    rest = list(load(path).restore(data))
    assert rest == list(load(path, context=180).restore(data))
    with pytest.raises(OptionError, match="another form"):
        whole.restore(data)
    text = whole.generate([1, *range(5, 45)], 120, ignore_eos=True, temperature=0.8, seed=2)
    assert "".join(text).endswith("".join(rest))
    assert list(whole.restore(small)) == list(early)


def test_an_interrupted_move_leaves_a_text_that_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(path)
    wanted = "".join(load(path, 200).generate([1, 5, 6], 100, ignore_eos=True))
    made = llm.generate([1, 5, 6], 100, ignore_eos=True)
    real, calls = type(llm.model.states["length"]).write_rows, []

    def failing(state: Any, index: Any, array: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(state, index, array)

    monkeypatch.setattr(type(llm.model.states["length"]), "write_rows", failing)
    with pytest.raises(KeyboardInterrupt):
        list(made)
    list(made)
    assert made.text == wanted


def test_the_estimate_knows(path: Path) -> None:
    llm = load(path, context=150, slots=2)
    found = rlx.estimate(path, "cpu", context=150, prefill=PREFILL, batch=2, overhead=0)
    states = llm.model.states
    assert found.state_bytes == sum(np.asarray(s.read()).nbytes for s in states.values())
    assert found.axes["context"].at(90).state_bytes == sum(
        np.asarray(s.read()).nbytes for s in load(path, context=90, slots=2).model.states.values()
    )
