"""`rlx generate`: the text of Python's `generate`, as JSON too, and wrong usage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from small_decoders import write_gguf

from rlx.cli.main import cli
from rlx.llm.model import LanguageModel


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


def test_wrong_usage(path: Path, tmp_path: Path) -> None:
    for asked, status, text in (
        ([str(path), "x", "--system", "be kind"], 2, "--system goes with --chat"),
        ([str(path), "x", "--top-k", "3"], 1, "no effect without a temperature"),
        ([str(path), "x", "--chat"], 1, "chat template"),
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
