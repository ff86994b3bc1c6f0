"""Guesses change how long a text takes, never the text; and they are left out while they don't pay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_decoders

import rlx
from rlx.errors import BusyError, OptionError
from rlx.llm.model import LanguageModel
from rlx.llm.speculation import FEW, PAUSE, Lookup, Paying

RNG = np.random.default_rng(6)
PROMPT = [1, *(RNG.integers(4, 96, 12).tolist() * 3)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.2, "seed": 3, "repetition_penalty": 1.2},
    {"temperature": 0.7, "seed": 3, "top_k": 3},
    {"stop": ["q"]},
]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses are made in every run."""
    monkeypatch.setattr(Paying, "now", property(lambda self: True))


@pytest.fixture(scope="module")
def drafted(path: Path) -> LanguageModel:
    """The small model with itself as the draft model."""
    return rlx.load_llm(path, device="cpu", prefill=32, slots=2, draft=path)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("options", OPTIONS)
def test_the_text_is_the_same(options: dict[str, Any], llm: LanguageModel, drafted: LanguageModel) -> None:
    plain = llm.generate(PROMPT, 60, ignore_eos=True, **options)
    text = "".join(plain)
    for model, guesses in ((llm, 1), (llm, 8), (drafted, 4)):
        made = model.generate(PROMPT, 60, ignore_eos=True, speculate=guesses, **options)
        assert "".join(made) == text
        assert (made.ids, made.finish_reason) == (plain.ids, plain.finish_reason)
        assert made.stats.generated_tokens == len(plain.ids)
        assert 0 <= made.stats.right_tokens <= made.stats.guessed_tokens
    assert made.stats.guessed_tokens > 0
    assert "stop" in options or made.stats.acceptance == 1  # draws of the same model by the same numbers
    assert f"{made.stats.right_tokens} of {made.stats.guessed_tokens} guesses right" in str(made.stats)


@pytest.mark.usefixtures("always")
def test_what_was_guessed_wrongly_is_not_in_the_cache(llm: LanguageModel) -> None:
    """A text that loops has right guesses, a random one wrong ones; the next prompt goes on from what was chosen."""
    made = llm.generate(PROMPT, 30, ignore_eos=True, logit_bias={40: 60.0, 41: 60.0}, speculate=8)
    list(made)
    assert made.stats.right_tokens > 0
    other = llm.generate(PROMPT, 30, ignore_eos=True, speculate=8)
    list(other)
    assert other.stats.right_tokens < other.stats.guessed_tokens
    assert llm.slots.filled[0] == PROMPT + other.ids[:-1]
    again = llm.generate(PROMPT + other.ids, 9, ignore_eos=True)
    list(again)
    llm.reset()
    anew = llm.generate(PROMPT + other.ids, 9, ignore_eos=True)
    list(anew)
    assert again.ids == anew.ids


@pytest.mark.usefixtures("always")
def test_several_texts_and_forms(llm: LanguageModel, drafted: LanguageModel) -> None:
    pytest.importorskip("llguidance")
    prompts, options = [PROMPT, PROMPT[:9], PROMPT[5:]], {"temperature": 1.0, "seed": 2, "ignore_eos": True}
    plain = [llm.generate(p, 20, **options) for p in prompts]  # type: ignore[arg-type]
    texts = ["".join(made) for made in plain]
    assert drafted.generate_many(prompts, 20, speculate=3, **options).texts() == texts  # type: ignore[arg-type]
    for model in (llm, drafted):
        form = model.constraints.regex("([0-9]{2}-){4}[0-9]{2}")
        wanted = "".join(model.generate("hello", 40, constraint=form, temperature=1.0, seed=3))
        made = model.generate("hello", 40, constraint=form, temperature=1.0, seed=3, speculate=6)
        assert "".join(made) == wanted
        assert made.finish_reason == "stop"


@pytest.mark.usefixtures("always")
def test_texts_in_turns_have_slots_of_their_own_in_both_models(
    llm: LanguageModel, drafted: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model reads each token of a text once, though the texts take turns; a third takes the older's slots."""
    assert drafted.draft is not None
    prompts = [PROMPT, [1, *PROMPT[:0:-1]], PROMPT[7:]]
    wanted = ["".join(llm.generate(p, 24, ignore_eos=True)) for p in prompts]
    drafted.reset()
    drafted.draft.reset()
    read: list[int] = []
    slots, run = drafted.draft.slots, drafted.draft.slots.run

    def counted(parts: Any, *rest: Any) -> Any:
        read.append(sum(map(len, parts.values())))
        return run(parts, *rest)

    monkeypatch.setattr(slots, "run", counted)
    first, second = (drafted.generate(p, 24, ignore_eos=True, speculate=4) for p in prompts[:2])
    texts = ["", ""]
    while first.finish_reason is None or second.finish_reason is None:
        texts[0] += next(first, "")
        texts[1] += next(second, "")
    assert texts == wanted[:2]
    assert (first.stats.acceptance, second.stats.acceptance) == (1, 1)
    assert {len(tokens) > len(PROMPT) for tokens in slots.filled} == {True}
    assert sum(read) <= 2 * (len(PROMPT) + 24)
    assert "".join(drafted.generate(prompts[2], 24, ignore_eos=True, speculate=4)) == wanted[2]


@pytest.mark.usefixtures("always")
def test_a_text_ends_where_it_would(llm: LanguageModel, drafted: LanguageModel) -> None:
    """By the number of tokens, an end token, or a full context, also in the middle of right guesses."""
    for count in (1, 2, 5, 7):
        made = drafted.generate(PROMPT, count, ignore_eos=True, speculate=8)
        list(made)
        assert len(made.ids) == count
    for overflow in ("error", "shift"):
        most = 400 if overflow == "shift" else None
        plain, made = (m.generate(PROMPT, most, ignore_eos=True, overflow=overflow, speculate=s) for m, s in
                       ((llm, 0), (drafted, 8)))  # fmt: skip
        list(plain)
        list(made)
        assert made.ids == plain.ids


def test_look_up() -> None:
    def guess(text: list[int], most: int = 3) -> list[int]:
        return Lookup()(text, most, lambda guesses: None, 0)

    assert guess([1, 2, 3, 4, 5, 1, 2]) == [3, 4, 5]
    assert guess([1, 2, 3, 9, 1, 2, 4, 1, 2]) == [4, 1, 2]  # where it stood last
    assert guess([1, 2, 3, 4, 9, 9, 2, 3, 7, 1, 2, 3]) == [4, 9, 9]  # the longest words first
    assert guess([1, 2, 3]) == guess([]) == guess([5]) == []
    text = RNG.integers(0, 4, 300).tolist()
    growing = Lookup()
    for end in range(300):
        assert growing(text[:end], 5, lambda guesses: None, 0) == guess(text[:end], 5)
    assert growing(text[:100], 5, lambda guesses: None, 0) == guess(text[:100], 5)  # it was cut


def test_guesses_are_left_out_while_they_do_not_pay() -> None:
    paying = Paying()
    assert not paying.now
    paying.ran(0, 1, 1.0)
    for _ in range(FEW):
        assert paying.now
        paying.ran(4, 1, 1.5)  # none was right, and the run took longer
    paused = 0
    for _ in range(PAUSE):
        assert not paying.now
        paying.ran(0, 1, 1.0)
        paused += 1
    for _ in range(50):
        assert paying.now
        paying.ran(4, 3, 1.5)
    assert paused == PAUSE


def test_refusals(path: Path, tmp_path: Path, llm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (-1, 17, True, "x"):
        with pytest.raises(OptionError, match="speculate="):
            llm.generate(PROMPT, speculate=wrong)  # type: ignore[arg-type]
    monkeypatch.setattr(small_decoders, "VOCABULARY", [*small_decoders.VOCABULARY[:-2], "}", "{"])
    case = json.loads((Path(__file__).parents[1] / "decoders" / "configs.json").read_text())["llama"]
    other = small_decoders.write_gguf(tmp_path / "other.gguf", case["config"], case["shapes"])
    with pytest.raises(OptionError, match=r"draft: other\.gguf has other tokens than tiny\.gguf"):
        rlx.load_llm(path, device="cpu", draft=other)


@pytest.mark.usefixtures("always")
def test_a_text_of_the_draft_model_is_not_mixed_with_guesses(path: Path, llm: LanguageModel) -> None:
    """Guesses take its slot, and it says so; while it is at work in another thread there are none."""
    model = rlx.load_llm(path, device="cpu", prefill=32, draft=path)
    assert model.draft is not None
    own = model.draft.generate(PROMPT, 20, ignore_eos=True)
    next(own)
    text = "".join(llm.generate(PROMPT[:9], 20, ignore_eos=True))
    assert "".join(model.generate(PROMPT[:9], 20, ignore_eos=True, speculate=4)) == text
    with pytest.raises(BusyError, match="begun another one since"):
        next(own)
    with model.draft.alone():
        made = model.generate(PROMPT[:9], 20, ignore_eos=True, speculate=4)
        assert "".join(made) == text
    assert made.stats.guessed_tokens == 0
