"""A text goes on in another process as if nothing had happened, and bytes that are damaged change nothing."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import BusyError, ModelFormatError, OptionError, RlxError
from rlx.llm.model import LanguageModel
from rlx.llm.snapshot import DIGEST, MAGIC

PROMPT = [1, *np.random.default_rng(9).integers(4, 96, 60).tolist()]
DRAWN: dict[str, Any] = {"temperature": 1.3, "seed": 11, "repetition_penalty": 1.1, "ignore_eos": True}

ELSEWHERE = """
import sys, pathlib, json, rlx
model, file, context, kv_dtype = sys.argv[1:]
llm = rlx.load_llm(model, device="cpu", prefill=32, context=int(context), kv_dtype=kv_dtype)
made = llm.restore(pathlib.Path(file).read_bytes())
list(made)
print(json.dumps([made.ids, made.text, made.finish_reason]))
"""


@pytest.mark.parametrize("kv_dtype, context", [("f32", 256), ("f16", 200)])
@pytest.mark.parametrize("options", [{"ignore_eos": True}, DRAWN])
def test_another_process_goes_on(
    kv_dtype: str, context: int, options: dict[str, Any], path: Path, tmp_path: Path
) -> None:
    llm = rlx.load_llm(path, device="cpu", prefill=32, kv_dtype=kv_dtype)
    made = llm.generate(PROMPT, 40, **options)
    for _ in range(15):
        next(made)
    file = tmp_path / "text"
    file.write_bytes(llm.snapshot(made))
    list(made)
    command = [sys.executable, "-c", ELSEWHERE, str(path), str(file), str(context), kv_dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(done.stdout) == [made.ids, made.text, "length"]


def test_a_beginning_is_kept(path: Path) -> None:
    """The cache of a prompt that was computed before, and stop strings and forms that go on."""
    llm, other = (rlx.load_llm(path, device="cpu", prefill=32, slots=n) for n in (1, 2))
    made = llm.generate(PROMPT, 1, ignore_eos=True)
    list(made)
    again = other.restore(llm.snapshot(made))
    assert (again.ids, again.finish_reason, list(again)) == (made.ids, "length", [])
    more = other.generate([*PROMPT, 5], 3, ignore_eos=True)
    list(more)
    assert more.stats.cached_tokens == len(PROMPT)
    form = llm.constraints.regex("[0-9]{4}-[0-9]{2}")
    text = llm.generate("x", 20, constraint=form, temperature=1.0, seed=1)
    begun = next(text)
    with pytest.raises(OptionError, match="give constraint="):
        llm.restore(llm.snapshot(text))
    resumed = other.restore(llm.snapshot(text), constraint=form)
    assert resumed.text == begun
    assert "".join(resumed) == "".join(text)


def test_refusals(path: Path, talking: Path, llm: LanguageModel) -> None:
    made = llm.generate(PROMPT, 9, ignore_eos=True)
    with pytest.raises(OptionError, match="has not begun"):
        llm.snapshot(made)
    next(made)
    data = llm.snapshot(made)
    next(llm.generate([5], 2, ignore_eos=True))
    with pytest.raises(BusyError, match="begun another"):
        llm.snapshot(made)
    with pytest.raises(OptionError, match="of another model"):
        rlx.load_llm(talking, device="cpu").restore(data)
    with pytest.raises(OptionError, match="another form: load the model with the kv_dtype="):
        rlx.load_llm(path, device="cpu", kv_dtype="bf16").restore(data)
    with pytest.raises(OptionError, match="61 tokens have no room in a context of 50"):
        rlx.load_llm(path, device="cpu", context=50).restore(data)
    for wrong in (b"", b"RLX", data[:-1], data[:60] + b"x" + data[61:]):
        with pytest.raises(ModelFormatError, match=r"no snapshot|damaged"):
            llm.restore(wrong)
    with pytest.raises(ModelFormatError, match=r"of format '1', and this rlx reads format 2: .* give the text so far"):
        llm.restore(b"RLXTEXT1" + data[8:])


def test_a_smaller_context_ends_the_text(path: Path) -> None:
    """As `generate` ends it there: with the last token that has room."""
    llm = rlx.load_llm(path, device="cpu", prefill=32)
    made = llm.generate(PROMPT, 60, ignore_eos=True)
    next(made)
    data = llm.snapshot(made)
    list(made)
    small = rlx.load_llm(path, device="cpu", prefill=32, context=80)
    again = small.restore(data)
    list(again)
    ended = small.snapshot(again)
    whole = small.generate(PROMPT, 60, ignore_eos=True)
    list(whole)
    assert again.ids == whole.ids == made.ids[: len(whole.ids)]
    assert (again.finish_reason, len(whole.ids)) == ("length", 80 - len(PROMPT) + 1)
    full = small.restore(ended)
    assert (list(full), full.ids, full.finish_reason) == ([], whole.ids, "length")


def signed(header: Any, body: bytes) -> bytes:
    import hashlib

    text = json.dumps(header).encode()
    data = MAGIC + len(text).to_bytes(8, "little") + text + body
    return data + hashlib.sha256(data).digest()


def test_hostile_headers(llm: LanguageModel) -> None:
    """Whatever a signed header says, it is restored or one of our errors says why not, and texts go on as before."""
    made = llm.generate(PROMPT, 9, **DRAWN)
    next(made)
    data = llm.snapshot(made)
    size = int.from_bytes(data[8:16], "little")
    header, body = json.loads(data[16 : 16 + size]), data[16 + size : -DIGEST]
    with pytest.raises(ModelFormatError, match="too long"):
        llm.restore(signed(header, body + b"0"))
    with pytest.raises(ModelFormatError, match="too short"):
        llm.restore(signed(header, body[:-1]))
    rng, odd = random.Random(3), [None, -1, 1 << 70, 0.5, "x", [], {}, [[]], [-1], [96], True, {"a": 1}, float("nan")]
    for _ in range(400):
        changed = json.loads(json.dumps(header))
        inside = rng.choice([changed, changed["limits"], changed["sampling"]])
        key = rng.choice(list(inside))
        if rng.random() < 0.2:
            del inside[key]
        else:
            inside[key] = rng.choice(odd)
        with suppress(RlxError):
            list(llm.restore(signed(changed, body)))
    again = llm.restore(data)
    list(again)
    assert len(again.ids) == 9


def test_a_context_that_is_too_short_for_the_rest_ends_it(path: Path, llm: LanguageModel) -> None:
    made = llm.generate(PROMPT, 50, ignore_eos=True)
    for _ in range(9):
        next(made)
    short = rlx.load_llm(path, device="cpu", prefill=32, context=80)
    again = short.restore(llm.snapshot(made))
    list(again)
    assert again.finish_reason == "length"
    list(made)
    assert len(again.ids) == 80 - len(PROMPT) + 1
    assert again.ids == made.ids[: len(again.ids)]


def test_limits_of_a_header_that_no_text_has(llm: LanguageModel) -> None:
    """More tokens than the context has room for, and a cache that is not that of the text."""
    made = llm.generate(PROMPT, 9, ignore_eos=True)
    next(made)
    data = llm.snapshot(made)
    size = int.from_bytes(data[8:16], "little")
    header, body = json.loads(data[16 : 16 + size]), data[16 + size : -DIGEST]
    again = llm.restore(signed({**header, "limits": {**header["limits"], "most": 10**9}}, body))
    list(again)
    assert (again.finish_reason, len(again.ids)) == ("length", llm.context - len(PROMPT) + 1)
    for wrong in ({"prompt": [1]}, {"pending": [1, 2]}, {"limits": {**header["limits"], "shifts": True, "fixed": 300}}):
        with pytest.raises(ModelFormatError, match="is not the text"):
            llm.restore(signed({**header, **wrong}, body))
