"""Several texts at a time: each is what it is alone, beginnings are shared, and a full context is as was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_decoders import write_gguf

import rlx
from rlx.errors import BusyError, OptionError
from rlx.llm import stepping
from rlx.llm.model import LanguageModel
from rlx.llm.slots import shared

RNG = np.random.default_rng(4)
PROMPTS = [[1, *RNG.integers(4, 96, n).tolist()] for n in (70, 3, 40, 1, 33, 100, 8)]
CASES = json.loads((Path(__file__).parents[1] / "decoders" / "configs.json").read_text())


@pytest.fixture(scope="module")
def three(path: Path) -> LanguageModel:
    """Three slots, in runs of at most 32 tokens."""
    return rlx.load_llm(path, device="cpu", prefill=32, slots=3)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 5, "top_p": 0.9}])
def test_each_text_is_what_it_is_alone(options: dict[str, Any], llm: LanguageModel, three: LanguageModel) -> None:
    """Of more prompts than slots, some of which begin alike, at different positions."""
    prompts = [*PROMPTS, PROMPTS[0], [*PROMPTS[0][:50], 9, 9]]
    together = three.generate_many(prompts, 25, ignore_eos=True, **options)
    pieces = ["" for _ in prompts]
    for number, piece in together:
        pieces[number] += piece
    for prompt, text, made in zip(prompts, pieces, together.generations, strict=True):
        alone = llm.generate(prompt, 25, ignore_eos=True, **options)
        assert "".join(alone) == text == made.text
        assert alone.ids == made.ids
        assert made.finish_reason == "length"
        assert made.stats.generated_tokens == 25
    assert three.generate_many(prompts, 25, ignore_eos=True, **options).texts() == pieces


@pytest.mark.parametrize("kv_dtype", ["f16", "q8_0"])
@pytest.mark.parametrize("precision, kind", [("f32", "F32"), ("f32", "Q4_1"), ("q8", "Q8_0"), ("q8", "Q4_1")])
def test_bits_do_not_depend_on_the_others(precision: str, kind: str, kv_dtype: str, tmp_path: Path) -> None:
    """Logits of a sequence beside others, a part of which was copied, are those that it has alone."""
    case = CASES["llama"]
    config = {**case["config"], "head_dim": 32}
    shapes = {
        n: [4 * s[0] if "q_proj" in n or "k_proj" in n or "v_proj" in n else s[0], *s[1:]]
        for n, s in case["shapes"].items()
    }
    shapes = {n: [s[0], 4 * s[1]] if "o_proj" in n else s for n, s in shapes.items()}
    file = write_gguf(tmp_path / "m.gguf", config, shapes, kind)
    options: dict[str, Any] = {"device": "cpu", "precision": precision, "kv_dtype": kv_dtype, "prefill": 16}
    one, many = (rlx.load_llm(file, slots=n, **options).slots for n in (1, 4))
    first = many.seat(None, PROMPTS[0])[0]
    many.run({first: PROMPTS[0][:16]}, [], None)
    many.run({first: PROMPTS[0][16:24]}, [], None)
    other = many.seat(None, PROMPTS[5], [first])[0]
    fork, cached = many.seat(None, [*PROMPTS[0][:20], *[7] * 9], [first, other])
    assert cached == 20
    parts = {first: PROMPTS[0][24:40], other: PROMPTS[5][:3], fork: [7]}
    places = [(slot, len(part) - 1) for slot, part in parts.items()]
    logits = many.run(parts, places, "logits")
    texts = (PROMPTS[0][:40], PROMPTS[5][:3], [*PROMPTS[0][:20], 7])
    for text, row in zip(texts, logits, strict=True):
        one.forget()
        for start in range(0, len(text), 5):
            part = text[start : start + 5]
            (alone,) = one.run({0: part}, [(0, len(part) - 1)], "logits")
        np.testing.assert_array_equal(row, alone)


def test_what_prompts_have_in_common_is_computed_once(three: LanguageModel) -> None:
    three.reset()
    prompt = PROMPTS[5]
    together = three.generate_many([prompt], 4, n=3, temperature=1.5, seed=7, ignore_eos=True)
    together.texts()
    cached = sorted(made.stats.cached_tokens for made in together.generations)
    assert cached == [0, 96, 96]  # in runs of 32, and the last few tokens are not waited for
    assert len(prompt) == 101
    assert [made.seed for made in together.generations] == [7, 8, 9]
    assert len({tuple(made.ids) for made in together.generations}) == 3
    alone = three.generate(prompt, 4, temperature=1.5, seed=8, ignore_eos=True)
    list(alone)
    assert alone.ids == together.generations[1].ids


def test_conversations_keep_slots_of_their_own(three: LanguageModel, llm: LanguageModel) -> None:
    """Three generations go on in turns, a fourth takes the slot of the one that was begun first."""
    three.reset()
    some = [three.generate(prompt, 6, ignore_eos=True) for prompt in PROMPTS[:3]]
    for _ in range(6):
        for made in some:
            next(made)
    for made, prompt in zip(some, PROMPTS, strict=False):
        alone = llm.generate(prompt, 6, ignore_eos=True)
        list(alone)
        assert made.ids == alone.ids
    going = [three.generate(prompt, 6, ignore_eos=True) for prompt in PROMPTS[:4]]
    for made in going:
        next(made)
    with pytest.raises(BusyError, match="begun another"):
        next(going[0])
    assert len(list(going[1])) == 5
    again = three.generate(PROMPTS[2] + [5, 6], 1)
    list(again)
    assert again.stats.cached_tokens >= len(PROMPTS[2])


def test_slots_that_are_nearly_full(three: LanguageModel, llm: LanguageModel) -> None:
    """A long prompt goes through beside a text at the end of the context, in parts that leave that room."""
    three.reset()
    long = (PROMPTS[0] * 9)[: three.context - 4]
    idle = three.generate(long[::-1], 5, ignore_eos=True)
    list(idle)
    pair = three.generate_many([long, PROMPTS[5]], 5, ignore_eos=True)
    pair.texts()
    for made, prompt in zip(pair.generations, (long, PROMPTS[5]), strict=True):
        alone = llm.generate(prompt, 5, ignore_eos=True)
        list(alone)
        assert made.ids == alone.ids
    again = three.generate(long[::-1], 1, ignore_eos=True)
    list(again)
    assert again.ids == idle.ids[:1]


def test_a_full_context(llm: LanguageModel) -> None:
    """An error, or the beginning of the prompt is left out, or the older half of the text, as often as it is full."""
    long = [1, *RNG.integers(4, 96, 400).tolist()]
    with pytest.raises(OptionError, match=r'401 tokens has no room .*overflow="truncate"'):
        llm.generate(long)
    cut = llm.generate(long, 20, ignore_eos=True, overflow="truncate")
    list(cut)
    assert cut.prompt == [1, *long[-(llm.context - 1 - 20) :]]
    assert len(cut.ids) == 20
    filled = llm.generate(long, ignore_eos=True, overflow="truncate")
    list(filled)
    assert filled.finish_reason == "length"
    assert len(filled.prompt) + len(filled.ids) == llm.context + 1
    on = llm.generate(PROMPTS[0], 500, ignore_eos=True, overflow="shift")
    list(on)
    assert len(on.ids) == 500
    everything = PROMPTS[0] + on.ids
    # the first token after the context was full follows BOS and the newer half
    half = (llm.context - 1) // 2
    anew = llm.generate([1, *everything[: llm.context + 1][-half:]], 1, ignore_eos=True)
    list(anew)
    assert anew.ids == everything[llm.context + 1 : llm.context + 2]
    with pytest.raises(OptionError, match="overflow='roll': expected error, truncate, shift"):
        llm.generate(long, overflow="roll")


def test_a_run_that_fails_leaves_the_slots_as_they_were(three: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    made = three.generate(PROMPTS[0], 10, ignore_eos=True)
    first = [next(made) for _ in range(4)]
    run = three.model.run

    def interrupted(*given: Any, **options: Any) -> Any:
        run(*given, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(three.model, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(made)
    monkeypatch.undo()
    rest = list(made)
    assert first + rest == list(three.generate(PROMPTS[0], 10, ignore_eos=True))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda m: m.generate_many("hello"), "expected several prompts"),
        (lambda m: m.generate_many([]), "expected several prompts"),
        (lambda m: m.generate_many(["a"], seed="x"), "seed: expected an int, got 'x'"),
        (lambda m: m.generate_many(["a"], n=0), "n=0: expected a number >= 1"),
        (lambda m: m.generate_many(["a", [96]]), "96 is no token"),
    ],
)
def test_wrong_calls(llm: LanguageModel, call: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call(llm)


def test_slots_are_limited(path: Path) -> None:
    for slots in (0, 33, True):
        with pytest.raises(OptionError, match=f"slots={slots}: expected 1 to 32"):
            rlx.load_llm(path, slots=slots)


def test_shared_beginnings() -> None:
    for one, other, count in (([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 4], [1, 2, 3], 2), ([3], [4], 0)):
        assert shared(one, other) == count


def test_a_text_beside_another_that_would_write_over_it(path: Path) -> None:
    """A long prompt begins while a text stands near the end of the context, which goes on as alone."""
    two, one = (rlx.load_llm(path, device="cpu", prefill=32, context=64, slots=n) for n in (2, 1))
    prompt, other = PROMPTS[1], PROMPTS[0][:40]
    made = two.generate(prompt, 60, ignore_eos=True)
    pieces = [next(made) for _ in range(55)]
    beside = "".join(two.generate(other, 5, ignore_eos=True))
    assert "".join([*pieces, *made]) == "".join(one.generate(prompt, 60, ignore_eos=True))
    assert beside == "".join(one.generate(other, 5, ignore_eos=True))


def test_an_interrupt_after_a_run_is_as_one_within(three: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the run computed is computed again: no token is in a text twice."""
    prompts = PROMPTS[:3]
    whole = three.generate_many(prompts, 12, ignore_eos=True).texts()
    together = three.generate_many(prompts, 12, ignore_eos=True)
    pieces = [next(together) for _ in range(7)]
    run = stepping._run

    def interrupted(*args: Any) -> Any:
        run(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stepping, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pieces += together
    pieces += together
    assert ["".join(piece for n, piece in pieces if n == at) for at in range(3)] == whole
