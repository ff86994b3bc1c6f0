"""Texts that a language model writes: the right tokens, where they end, what the cache keeps, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import BusyError, ClosedError, MemoryDeficit, ModelFormatError, OptionError
from rlx.llm.model import LanguageModel
from rlx.llm.options import GenerationKeywords
from rlx.llm.stopping import Stopper
from rlx.models.decoder import build_decoder
from rlx.progress import Progress


@pytest.fixture(scope="session")
def reference(path: Path) -> Any:
    """Logits [tokens, vocab] of tokens, computed by the reference device in one run."""
    model = rlx.compile(build_decoder(path).graph, device="reference")

    def logits(ids: list[int]) -> Any:
        found = []
        for start in range(0, len(ids), 32):
            model.states["length"].write(np.zeros(1, np.int64))
            wanted = np.arange(start, min(start + 32, len(ids)))
            given = {"ids": np.array([ids]), "counts": np.array([len(ids)]), "wanted": wanted}
            found.append(model.run(given, outputs=["logits"])[0])
        return np.concatenate(found)

    return logits


PROMPT = [1, *np.random.default_rng(3).integers(4, 96, 70).tolist()]


def test_greedy_tokens_are_those_of_the_largest_logits(llm: LanguageModel, reference: Any) -> None:
    """Of a prompt in three runs and 30 single tokens, each is the one that the reference computes anew from all."""
    made = llm.generate(PROMPT, 30, ignore_eos=True)
    list(made)
    assert made.finish_reason == "length"
    assert len(made.ids) == 30
    logits = reference(PROMPT + made.ids)[len(PROMPT) - 1 : -1]
    assert made.ids == logits.argmax(axis=1).tolist()


def test_a_prompt_that_goes_on_from_the_last_computes_only_what_is_new(llm: LanguageModel) -> None:
    first = llm.generate(PROMPT, 12, ignore_eos=True)
    list(first)
    assert first.stats.cached_tokens < len(PROMPT) == first.stats.prompt_tokens
    again = llm.generate(PROMPT + first.ids + [9], 5, ignore_eos=True)
    list(again)
    assert again.stats.cached_tokens == len(PROMPT) + 11  # the last token was written, not read
    llm.reset()
    anew = llm.generate(PROMPT + first.ids + [9], 5, ignore_eos=True)
    list(anew)
    assert anew.stats.cached_tokens == 0
    assert anew.ids == again.ids


def test_texts_are_those_of_the_tokens(llm: LanguageModel) -> None:
    """Pieces, joined, are the text of the ids; BOS comes before a prompt once."""
    made = llm.generate("hello", 20, ignore_eos=True)
    text = "".join(made)
    assert text == llm.tokenizer.decoder(continued=True).decode(made.ids)
    assert llm.tokenize("hello")[0] == 1
    assert llm.tokenize("hello").count(1) == 1
    assert made.stats.generated_tokens == 20
    assert made.stats.tokens_per_second > 0
    assert "20 new tokens" in str(llm.stats)


def test_it_ends_at_stop_strings_and_end_tokens(llm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = "".join(llm.generate("hello", 20, ignore_eos=True))
    stop = whole[5:7]
    made = llm.generate("hello", 20, stop=["nothing like it", stop], ignore_eos=True)
    assert "".join(made) == whole[: whole.index(stop)]
    assert made.finish_reason == "stop"
    ids = llm.generate("hello", 20, ignore_eos=True)
    list(ids)
    ends = llm.generate("hello", 20)
    ends.limits = dataclasses.replace(ends.limits, ends=frozenset({ids.ids[4]}))
    list(ends)
    assert ends.ids == ids.ids[: ids.ids.index(ids.ids[4]) + 1]
    assert ends.finish_reason == "stop"


def test_type_checkers_and_help_know_every_option(llm: LanguageModel) -> None:
    with pytest.raises(OptionError) as caught:
        llm.generate(PROMPT, nothing=1)  # type: ignore[call-arg]
    known = str(caught.value).rpartition("known are max_tokens, ")[2].split(", ")
    assert list(GenerationKeywords.__annotations__) == known
    assert all(f"`{name}`" in str(LanguageModel.generate.__doc__) for name in known if not name.startswith("dry"))


def test_what_a_generation_is_prints(llm: LanguageModel) -> None:
    made = llm.generate(PROMPT, 1)
    assert repr(made) == '<Generation of 0 tokens so far, goes on: "".join(it) is its text>'
    list(made)
    assert repr(made) == "<Generation of 1 token so far, length>"
    assert "; 1 new token, " in str(made.stats)


def test_the_context_is_never_passed(llm: LanguageModel) -> None:
    """Without a limit a text fills the context; a prompt as long as that gives one token, a longer one an error."""
    made = llm.generate(PROMPT, ignore_eos=True)
    list(made)
    assert made.finish_reason == "length"
    assert len(made.ids) == llm.context - len(PROMPT) + 1
    full = llm.generate((PROMPT * 4)[: llm.context], ignore_eos=True)
    list(full)
    assert len(full.ids) == 1
    with pytest.raises(OptionError, match=r"257 tokens has no room in a context of 256"):
        llm.generate([5] * 257)


def test_one_generation_has_the_cache_at_a_time(llm: LanguageModel) -> None:
    first, second = (llm.generate(PROMPT, 8, ignore_eos=True) for _ in range(2))
    next(first)
    next(second)
    with pytest.raises(BusyError, match="begun another"):
        list(first)
    second.cancel()
    assert list(second) == []
    assert second.finish_reason == "cancelled"


def test_scores_are_log_probabilities(llm: LanguageModel, reference: Any) -> None:
    logits = reference(PROMPT).astype(np.float64)
    every = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    wanted = every[np.arange(len(PROMPT) - 1), PROMPT[1:]]
    score = llm.score(PROMPT)
    np.testing.assert_allclose(score.logprobs, wanted, atol=1e-4)
    assert score.perplexity == pytest.approx(np.exp(-wanted.mean()), rel=1e-4) == llm.perplexity(PROMPT)


def test_windows_count_every_token_once(llm: LanguageModel) -> None:
    """Of a long text the tokens of a window have those before them that it holds, and none counts twice."""
    ids, context, done = PROMPT * 8, llm.context, list[Progress]()
    for stride in (256, 100, 7 * 32):
        found, at = list[float](), 0
        while len(found) < len(ids) - 1:
            window = ids[at : at + context + 1]
            scores = [*llm.score(window[:-1]).logprobs, last_of(llm, window)]
            found += scores[len(found) - at :]
            at += stride
        done.clear()
        made = llm.perplexity(ids, stride=stride, progress=done.append)
        assert made == pytest.approx(np.exp(-np.mean(found)), rel=1e-6)
        assert {e.stage for e in done[:-1]} == {"tokens"}
        assert [e.fraction for e in done] == sorted(e.fraction for e in done)
        assert (done[0].fraction, str(done[-1])) == (0, "done 100%")
    assert llm.perplexity(ids) == llm.perplexity(ids, stride=256)
    with pytest.raises(OptionError, match="stride=257: expected 1 to the 256 tokens"):
        llm.perplexity(ids, stride=257)
    for few, said in ((ids[:1], "has 1 token; expected 2 or more"), ([], "has 0 tokens; expected 2")):
        with pytest.raises(OptionError, match=said):
            llm.perplexity(few)


def last_of(llm: LanguageModel, window: list[int]) -> float:
    """ln of the probability of the last token of a window of one more token than the context has room for."""
    with llm.alone():
        slot, _ = llm.begin(None, [])
        logits = llm.extend(slot, window[:-1], "logits")[-1].astype(np.float64)
    return float(logits[window[-1]] - np.log(np.exp(logits - logits.max()).sum()) - logits.max())


def test_a_step_takes_no_memory(llm: LanguageModel) -> None:
    """The arena does not grow from token to token, and states stay where they are."""
    made = llm.generate(PROMPT, 60, ignore_eos=True)
    next(made)
    arena = llm.model.arena
    before = (len(arena), memoryview(arena).obj)
    list(made)
    after = llm.model.arena
    assert len(after) == before[0]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda m: m.generate([]), "has no tokens"),
        (lambda m: m.generate([96]), "96 is no token"),
        (lambda m: m.generate([True]), "True is no token"),
        (lambda m: m.generate(["hello"]), "'hello' is no token: expected a text, or numbers of 0 to 95"),
        (lambda m: m.generate(b"x"), "got bytes"),
        (lambda m: m.generate([5], 0), "max_tokens=0"),
        (lambda m: m.generate([5], stop=[""]), "stop="),
        (lambda m: m.generate([5], stop=3), "stop=3: expected a text or several"),
        (lambda m: m.chat("hello"), "expected a list of messages, such as .*; got str"),
        (lambda m: m.chat({"role": "user", "content": "hello"}), "expected a list of messages, such as .*; got dict"),
        (lambda m: m.chat([]), "there are no messages"),
        (lambda m: m.chat(["hello"]), "one is 'hello'"),
        (lambda m: m.chat([{"content": "hello"}]), "expected messages such as .*; one is {'content': 'hello'}"),
        (lambda m: m.chat([{"role": "user"}]), "this message has no 'content': {'role': 'user'}; expected "),
        (lambda m: m.score([5] * 300), "no room"),
    ],
)
def test_wrong_calls_are_refused(llm: LanguageModel, call: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call(llm)


def test_loading_is_refused_with_reasons(path: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="kv_dtype='q3': expected f32, f16, bf16"):
        rlx.load_llm(path, kv_dtype="q3")
    with pytest.raises(OptionError, match="context=0"):
        rlx.load_llm(path, context=0)
    with pytest.raises(OptionError, match="has no 'batches'"):
        rlx.load(path, dims={"batches": 2})
    with pytest.raises(MemoryDeficit, match="It fits with no context"):
        rlx.load_llm(path, context=200, budget="10kB")
    with pytest.raises(ModelFormatError, match="can't be read"):
        rlx.load_llm(tmp_path / "none.gguf")
    with pytest.raises(ModelFormatError, match=r"digits\.onnx: load_llm takes a GGUF file, or a folder"):
        rlx.load_llm(Path(rlx.__file__).parent / "demo" / "digits.onnx")
    with pytest.raises(OptionError, match=r"load_llm takes the path of a file, got bytes$"):
        rlx.load_llm(path.read_bytes())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"unknown option 'n_ctx': context= of rlx\.load_llm"):
        rlx.load_llm(path, n_ctx=128)
    with pytest.raises(OptionError, match=r"unknown option 'context': context= is for rlx\.load_llm"):
        rlx.load(path, context=128)


def test_the_largest_context_that_fits_is_told(path: Path) -> None:
    """To the token: also below the tokens of a run, where the arena shrinks with it, and for stored code."""
    short = rlx.estimate(path, context=100, device="cpu").own.peak_bytes  # code is of other sizes on other processors
    for asked, budget, most in ((190_000, 60_000_000, None), (150, short, 100), (150, short - 1, 99)):
        for cached in (False, True):
            options: dict[str, Any] = {"budget": budget, "device": "cpu", "cache": cached}
            if cached:
                rlx.load_llm(path, context=asked, device="cpu")
            with pytest.raises(MemoryDeficit, match=r"context=\d+ is the largest that fits") as caught:
                rlx.load_llm(path, context=asked, **options)
            largest = int(str(caught.value).rpartition("context=")[2].split()[0])
            assert most in (None, largest)
            assert rlx.load_llm(path, context=largest, **options).context == largest
            with pytest.raises(MemoryDeficit):
                rlx.load_llm(path, context=largest + 1, **options)


def test_a_deficit_speaks_of_what_load_llm_takes(path: Path) -> None:
    """Not of the dims of the program below, which have other names."""
    with pytest.raises(MemoryDeficit, match="Lower context= or prefill=, take a narrower kv_dtype=") as caught:
        rlx.load_llm(path, context=200_000, budget="60MB", device="cpu")
    text = str(caught.value)
    assert "prefill 1, the lowest" in text
    assert "dims" not in text
    assert "tokens 1" not in text
    assert "rows" not in text
    assert [r.action for r in caught.value.remedies] == ["prefill 1, the lowest"]


def test_a_closed_model_says_so(path: Path) -> None:
    with rlx.load_llm(path, device="cpu", context=32) as model:
        begun = model.generate("hello", 3, ignore_eos=True)
        next(begun)
    model.close()  # again: nothing happens
    for call in (lambda: next(begun), lambda: next(model.generate("x", 1)), lambda: model.score("hello"), model.reset):
        with pytest.raises(ClosedError, match="the language model is closed: load it again"):
            call()
    assert model.model.closed


def test_a_model_at_work_in_another_thread_is_not_closed(path: Path) -> None:
    model = rlx.load_llm(path, device="cpu", context=32)
    with model.alone(), pytest.raises(BusyError, match="at work in another thread"):
        model.close()
    assert not model.model.closed
    model.close()


def test_stop_strings_that_overlap_pieces() -> None:
    """Whatever the pieces are, what comes out is the text before the first stop."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(rng.choice(list("ab"), 30))
        stops = ["".join(rng.choice(list("ab"), n)) for n in rng.integers(2, 8, 2)]
        cuts = [0, *sorted(rng.integers(0, 30, 6).tolist()), 30]
        stopper = Stopper(stops)
        out = "".join(stopper.push(text[a:b]) for a, b in itertools.pairwise(cuts)) + stopper.finish()
        places = [at for at in map(text.find, stops) if at >= 0]
        assert out == (text[: min(places)] if places else text)


def test_draws_follow_the_seed(llm: LanguageModel) -> None:
    """Equal seeds give equal texts, others others; with top_k=1 draws are the likeliest tokens."""
    options: dict[str, Any] = {"temperature": 1.5, "ignore_eos": True}
    first, again, other = (llm.generate(PROMPT, 30, seed=seed, **options) for seed in (1, 1, 2))
    texts = ["".join(made) for made in (first, again, other)]
    assert first.ids == again.ids != other.ids
    assert texts[0] == texts[1]
    by_chance = llm.generate(PROMPT, 5, **options)
    list(by_chance)
    repeated = llm.generate(PROMPT, 5, seed=by_chance.seed, **options)
    list(repeated)
    assert repeated.ids == by_chance.ids
    greedy, narrow = llm.generate(PROMPT, 20, ignore_eos=True), llm.generate(PROMPT, 20, top_k=1, **options)
    list(greedy)
    list(narrow)
    assert greedy.ids == narrow.ids


def test_penalties_and_biases_change_the_likeliest_token(llm: LanguageModel) -> None:
    plain = llm.generate(PROMPT, 1, ignore_eos=True)
    list(plain)
    (likeliest,) = plain.ids
    without = llm.generate(PROMPT, 1, logit_bias={likeliest: -np.inf}, ignore_eos=True)
    list(without)
    assert without.ids != plain.ids
    forced = llm.generate(PROMPT, 12, logit_bias={40: 1000.0}, ignore_eos=True)
    list(forced)
    assert forced.ids == [40] * 12
    varied = llm.generate(PROMPT, 12, logit_bias={40: 100.0}, frequency_penalty=90.0, ignore_eos=True)
    list(varied)
    assert varied.ids[:2] == [40, 40]
    assert set(varied.ids) != {40}


@pytest.mark.parametrize("options", [{}, {"temperature": 1.1, "top_k": 9, "seed": 5}, {"speculate": 4}])
def test_tokens_tell_how_probable_they_are(llm: LanguageModel, options: dict[str, Any]) -> None:
    """By the model's own logits, whatever was done to these; the text is the same as without."""
    prompt = [1, 5, 6, 5, 6, 5]
    made = llm.generate(prompt, 24, ignore_eos=True, logprobs=True, **options)
    text = "".join(made)
    assert text == "".join(llm.generate(prompt, 24, ignore_eos=True, **options))
    assert made.logprobs is not None
    wanted = llm.score([*prompt, *made.ids]).logprobs[len(prompt) - 1 :]
    np.testing.assert_allclose(made.logprobs, wanted, atol=1e-4)
    begun = llm.generate(prompt, 24, ignore_eos=True, logprobs=True, **options)
    next(begun)
    again = llm.restore(llm.snapshot(begun))
    assert "".join([*again]) == text[len(begun.text) :]
    np.testing.assert_array_equal(again.logprobs, made.logprobs)


def test_threads_do_not_mix_their_texts(llm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes while a token is computed gets an error, wherever the other is; that one's text is right."""
    want = list(llm.generate("hello", 5, ignore_eos=True))
    begin, errors = llm.begin, []

    def meanwhile(call: Any) -> None:
        try:
            call()
        except BusyError as error:
            errors.append(error)

    def begun(*given: Any) -> tuple[int, int]:
        same = begin(*given)
        other = llm.generate("world", 5, ignore_eos=True)
        for call in (lambda: next(other), lambda: llm.score("world"), llm.reset):
            thread = threading.Thread(target=meanwhile, args=(call,))
            monkeypatch.setattr(llm, "begin", begin)
            thread.start()
            thread.join()
        return same

    monkeypatch.setattr(llm, "begin", begun)
    assert list(llm.generate("hello", 5, ignore_eos=True)) == want
    assert len(errors) == 3


def test_no_stop_is_none_and_a_number_is_no_prompt(llm: LanguageModel) -> None:
    assert len(llm.generate("hello", 3, stop=None).ids) == 0
    with pytest.raises(OptionError, match="prompt: expected a text or a list of tokens"):
        llm.generate(np.array(3))  # type: ignore[arg-type]


def test_a_form_can_be_given_again(llm: LanguageModel) -> None:
    form = llm.constraints.regex("[ab]{3}")
    texts = ["".join(llm.generate("hello", 9, constraint=form)) for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 3


def test_a_constraint_gives_text_of_its_form(llm: LanguageModel) -> None:
    pytest.importorskip("llguidance")
    made = llm.generate("hello", 40, constraint=llm.constraints.regex("[0-9]{4}-[0-9]{2}"), temperature=1.0, seed=3)
    text = "".join(made)
    assert len(text) == 7
    assert text[4] == "-"
    assert (text[:4] + text[5:]).isdigit()
    assert made.finish_reason == "stop"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top_k": 5}, "top_k: has no effect without a temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"beams": 2}, "unknown option 'beams': known are max_tokens, stop"),
        ({"max_new_tokens": 2}, "unknown option 'max_new_tokens': max_tokens= is the number of new tokens; known are"),
        ({"constraint": "json"}, "constraint='json'"),
        ({"stop": 3}, "stop=3: expected a text"),
        ({"logit_bias": 3}, "logit_bias: expected numbers by token"),
        ({"dry_breakers": 3}, "dry_breakers: expected tokens"),
    ],
)
def test_wrong_options_are_refused(llm: LanguageModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        llm.generate(PROMPT, 2, **options)
