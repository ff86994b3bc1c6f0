"""Whatever is sampled, the answer has its form; forms that are malformed or too large are refused."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent / "tokenizer"))  # the tokenisers that those tests train

from sampled import Model

from rlx.errors import OptionError
from rlx.models import constraint
from rlx.models.constraint import Constraint, Constraints
from rlx.models.sampling import Row, Sampler, Sampling
from rlx.models.tokenizer import Tokenizer, load

pytest.importorskip("tokenizers")
pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"enum": ["x", "ü\n"]},
        "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}


@cache
def tokenizer() -> Tokenizer:
    from trained import metadata

    return load(metadata("byte_level"))


@cache
def forms(vocab: int | None = None) -> Constraints:
    return Constraints(tokenizer(), vocab=vocab)


@cache
def sampling_model() -> Model:
    return Model(Sampler(1600, rows=1, masked=True, history=0, biases=0))


def answer(form: Constraint, seed: int) -> str:
    """An answer sampled from random logits, in the graph, by the form's masks."""
    model, rng, ids = sampling_model(), np.random.default_rng(seed), []
    for step in range(400):
        logits = rng.standard_normal((1, 1600)).astype(np.float32)
        logits[0, list(tokenizer().eos_ids)] += 3
        row = Row(Sampling(seed=seed), step=step, mask=form.mask())
        (token,) = model.run(logits, [row])["token"].tolist()
        form.accept(token)
        if token in tokenizer().eos_ids:
            break
        ids.append(token)
        if form.stopped:
            break
    assert form.complete
    return tokenizer().decode(ids)


@pytest.mark.parametrize("seed", range(6))
def test_json_fits_its_schema(seed: int) -> None:
    for whitespace in (False, True):
        found = json.loads(answer(forms(1600).json_schema(SCHEMA, whitespace=whitespace), seed))
        assert list(found) == ["a", "b", "c"]
        assert type(found["a"]) is int
        assert 0 <= found["a"] <= 99
        assert found["b"] in ("x", "ü\n")
        assert all(type(x) is bool for x in found["c"])


@pytest.mark.parametrize("seed", range(6))
def test_texts_have_their_form(seed: int) -> None:
    make = forms(1600)
    assert re.fullmatch(r"[a-c]{2,5}-[0-9]{1,4}", answer(make.regex(r"[a-c]{2,5}-[0-9]{1,4}"), seed))
    assert re.fullmatch(r"yes|no( [0-9]{1,3})?", answer(make.grammar('root ::= "yes" | "no" (" " [0-9]{1,3})?'), seed))
    assert re.fullmatch(r"(ab)+", answer(make.grammar("start: /(ab){1,30}/"), seed))
    assert answer(make.choice(['a"b', "ü", "\n"]), seed) in ('a"b', "ü", "\n")


def allowed(form: Constraint, vocab: int) -> set[int]:
    bits = np.unpackbits(form.mask().view(np.uint8), bitorder="little")
    assert not bits[vocab:].any()
    return set(np.nonzero(bits)[0].tolist())


def test_masks_hold_exactly_what_may_come() -> None:
    form, mine = forms().regex("ab|ac"), tokenizer()
    may = {
        i
        for i in range(len(mine))
        if mine.token_bytes(i) and any(w.startswith(mine.token_bytes(i)) for w in (b"ab", b"ac"))
    }
    assert allowed(form, len(mine)) == may
    # places of logits beyond the tokens may never come
    assert allowed(forms(1600).regex("ab|ac"), len(mine)) == may


def test_states_go_on_by_themselves() -> None:
    form = forms().regex("ab|ac")
    (a,), (b,), (c,) = (tokenizer().encode(x) for x in "abc")
    form.accept(a)
    other = form.copy()
    form.accept(b)
    assert (form.complete, other.complete) == (True, False)
    other.accept(c)
    assert other.complete


def test_a_token_that_may_not_come_changes_nothing() -> None:
    form = forms().regex("ab")
    before = form.mask()
    for bad in (-1, 10**9, tokenizer().encode("b")[0], tokenizer().eos_ids[0]):
        with pytest.raises(OptionError, match=r"regex: token -?\d+ may not come here"):
            form.accept(bad)
    np.testing.assert_array_equal(form.mask(), before)
    for token in tokenizer().encode("ab"):
        form.accept(token)
    assert form.complete


def test_forced_tokens() -> None:
    form = forms().json_schema(SCHEMA)
    assert tokenizer().decode(form.forced()).startswith('{"a')


@pytest.mark.parametrize(
    "kind, given, message",
    [
        ("json_schema", {"type": "nosuch"}, "Invalid type"),
        ("json_schema", "{", "is no JSON"),
        ("json_schema", {"x": object()}, "is no JSON"),
        ("json_schema", False, "expected an object"),
        ("json_schema", "[1]", "expected an object"),
        ("json_schema", {"$ref": "http://x"}, "json_schema: "),
        ("json_schema", {"type": "string", "pattern": "(?=a)"}, "look-around"),
        ("json_schema", {"type": "string", "description": "x" * (1 << 20)}, "more than the limit"),
        ("regex", "(a", "unclosed group"),
        ("regex", 3, "expected a str, got int"),
        ("grammar", "root ::= nosuch", "nosuch"),
        ("grammar", "start: %%%", "grammar: "),
        ("choice", [], "expected a list of texts"),
        ("choice", "ab", "expected a list of texts"),
    ],
)
def test_bad_forms_are_one_clear_error(kind: str, given: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        getattr(forms(), kind)(given).mask()


def test_forms_that_are_too_much_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint, "FUEL", 100)
    with pytest.raises(OptionError, match="too big"):
        Constraints(tokenizer()).regex("|".join(f"{i:x}" * 9 for i in range(500))).mask()


def test_any_json() -> None:
    assert forms().json_schema(True).mask().any()
    assert forms().json_schema({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "null"}}}).mask().any()


def test_what_constraints_need() -> None:
    with pytest.raises(OptionError, match="expected at least 1501"):
        Constraints(tokenizer(), vocab=5)
