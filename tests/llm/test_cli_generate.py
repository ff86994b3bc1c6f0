"""`rlx generate`: the text of Python's `generate`, as JSON too, and wrong usage."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from small_decoders import write_gguf

from rlx.cli.language.chat import chat
from rlx.cli.language.generate import generate
from rlx.cli.language.options import FORMS
from rlx.cli.main import cli
from rlx.llm.model import LanguageModel
from rlx.llm.options import GenerationKeywords
from rlx.models.constraint import Constraints


def test_it_prints_the_text(path: Path, llm: LanguageModel) -> None:
    wanted = "".join(llm.generate("hello", 12))
    asked = ["generate", str(path), "hello", "-n", "12", "--device", "cpu"]
    plain = CliRunner().invoke(cli, asked)
    assert plain.exit_code == 0
    assert plain.stdout == wanted + "\n"
    assert "prompt tokens" in plain.stderr
    guessed = CliRunner().invoke(cli, [*asked, "--speculate", "4", "--draft", str(path)])
    assert guessed.stdout == wanted + "\n"
    found = json.loads(CliRunner().invoke(cli, [*asked, "--json"]).stdout)
    assert found["text"] == wanted
    assert len(found["ids"]) == found["generated_tokens"] == 12
    assert found["prompt_tokens"] == len(llm.tokenize("hello"))


def test_draws_and_standard_input(path: Path) -> None:
    asked = ["generate", str(path), "-", "-n", "8", "--temperature", "1.5", "--seed", "4", "--device", "cpu"]
    first, again = (CliRunner().invoke(cli, asked, input="hello").stdout for _ in range(2))
    assert first == again
    assert first.strip()


def test_everything_that_a_text_can_be_told_is_an_option() -> None:
    """Of both commands; a form has an option of its own for each way to say it, and only --json shows logprobs."""
    forms = {name for name in vars(Constraints) if not name.startswith("_")}
    assert set(FORMS) == forms
    wanted = (set(GenerationKeywords.__annotations__) - {"constraint"}) | forms
    for command, missing in ((generate, set()), (chat, {"logprobs"})):
        assert wanted - {param.name for param in command.params} == missing


def test_options_reach_the_text(path: Path, llm: LanguageModel) -> None:
    asked = ["generate", str(path), "hello", "-n", "8", "--device", "cpu", "--json"]
    told: list[tuple[list[str], dict[str, Any]]] = [
        (["--temperature", "1.5", "--seed", "0"], {"temperature": 1.5, "seed": 0}),
        (
            ["--temperature", "1", "--typical-p", "0.4", "--seed", "5"],
            {"temperature": 1.0, "typical_p": 0.4, "seed": 5},
        ),
        (
            ["--frequency-penalty", "5", "--presence-penalty", "-2"],
            {"frequency_penalty": 5.0, "presence_penalty": -2.0},
        ),
        (["--dry-multiplier", "9", "--dry-breakers", "3"], {"dry_multiplier": 9.0, "dry_breakers": [3]}),
        (["--logit-bias", "17=50", "--logit-bias", "3=-inf"], {"logit_bias": {17: 50.0, 3: -math.inf}}),
        (["--ignore-eos", "--logprobs", "--overflow", "shift"], {"ignore_eos": True, "logprobs": True}),
    ]
    for more, keywords in told:
        found = json.loads(CliRunner().invoke(cli, [*asked, *more]).stdout)
        made = llm.generate("hello", 8, **keywords)
        "".join(made)
        assert found["ids"] == made.ids, more
        assert found["logprobs"] == (None if made.logprobs is None else pytest.approx(made.logprobs))
        assert found["seed"] == made.seed or "seed" not in keywords


def test_forms(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    grammar = tmp_path / "g.gbnf"
    grammar.write_text('root ::= "yes" | "no"')
    schema = tmp_path / "s.json"
    schema.write_text('{"enum": [7, 8]}')
    for more, texts in (
        (["--choice", "red", "--choice", "blue"], ("red", "blue")),
        (["--regex", "a{3}"], ("aaa",)),
        (["--grammar", str(grammar)], ("yes", "no")),
        (["--json-schema", str(schema)], ("7", "8")),
        (["--json-schema", ' {"const": 5}'], ("5",)),
    ):
        done = CliRunner().invoke(cli, ["generate", str(path), "x", "-n", "9", "--device", "cpu", *more])
        assert done.exit_code == 0, done.output
        assert done.stdout.strip() in texts


def test_wrong_usage(path: Path, tmp_path: Path) -> None:
    for asked, status, text in (
        ([str(path), "x", "--system", "be kind"], 2, "--system goes with --chat"),
        ([str(path), "x", "--top-k", "3"], 1, "no effect without a temperature"),
        ([str(path), "x", "--chat"], 1, "chat template"),
        ([str(path), "x", "--choice", "a", "--regex", "b"], 2, "an answer has one form"),
        ([str(path), "x", "--grammar", str(tmp_path / "none")], 2, "can't be read"),
        ([str(path), "x", "--logit-bias", "a=3"], 2, "expected TOKEN=NUMBER"),
        ([str(path), "x", "--logprobs"], 2, "--logprobs goes with --json"),
        ([str(tmp_path / "none.gguf"), "x"], 1, "can't be read"),
    ):
        done = CliRunner().invoke(cli, ["generate", *asked])
        assert done.exit_code == status, done.output
        assert text in done.stderr


def test_a_model_with_a_chat_template_gets_a_hint(path: Path, tmp_path: Path) -> None:
    """On stderr, where the prompt was taken as the beginning of a text; not with --chat, nor for a plain model."""
    case = json.loads((Path(__file__).parents[1] / "decoders" / "configs.json").read_text())["llama"]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    asking = write_gguf(tmp_path / "asking.gguf", case["config"], case["shapes"], chat_template=template)
    for file, more, hinted in ((asking, [], True), (asking, ["--chat"], False), (path, [], False)):
        done = CliRunner().invoke(cli, ["generate", str(file), "hello", "-n", "2", "--device", "cpu", *more])
        assert done.exit_code == 0, done.output
        assert ("with --chat it answers PROMPT" in done.stderr) == hinted
        assert "hint" not in done.stdout


def test_perplexity(path: Path, llm: LanguageModel, tmp_path: Path) -> None:
    text = "hello world, " * 40
    file = tmp_path / "text"
    file.write_text(text)
    asked = ["perplexity", str(path), "--device", "cpu"]
    plain = CliRunner().invoke(cli, [*asked, str(file), "--stride", "99"])
    assert plain.exit_code == 0, plain.output
    assert plain.stdout.startswith(f"perplexity {llm.perplexity(text, stride=99):.4f} of {len(llm.tokenize(text)):,} ")
    found = json.loads(CliRunner().invoke(cli, [*asked, "-", "--json"], input=text).stdout)
    assert found["perplexity"] == pytest.approx(llm.perplexity(text))
    file.write_bytes(b"\xff")
    assert "is not UTF-8" in CliRunner().invoke(cli, [*asked, str(file)]).stderr
    device = CliRunner().invoke(cli, [*asked, "/dev/null"])
    assert "/dev/null: is a device; expected a file; a FILE of - is read from stdin" in device.stderr
    short = CliRunner().invoke(cli, [*asked, "-"], input="")
    assert (short.exit_code, short.stdout) == (1, "")
    assert "expected 2 or more" in short.stderr
