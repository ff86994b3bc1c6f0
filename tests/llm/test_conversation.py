"""Conversations: the cache keeps the model's own tokens, and a user can stop, take back and go on."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import rlx
from rlx.cli.main import cli
from rlx.errors import OptionError
from rlx.llm.conversation import Conversation
from rlx.llm.model import LanguageModel
from rlx.models.chat.prompt import Answer

pytest.importorskip("jinja2")


@pytest.fixture(scope="session")
def talker(talking: Path) -> LanguageModel:
    return rlx.load_llm(talking, device="cpu", prefill=32)


def said(text: str, answer: str, more: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": text},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": more},
    ]


def test_the_next_turn_computes_only_what_is_new(talker: LanguageModel) -> None:
    made = talker.chat([{"role": "user", "content": "hello"}], 12)
    answer = "".join(made)
    assert answer == made.text
    more = talker.chat(said("hello", answer, "and?"), 4)
    list(more)
    kept = made.ids[:-1] if made.ids[-1] in talker.tokenizer.eos_ids else made.ids
    new = len(talker.tokenizer.encode("</s>[u]and?</s>[a]", True))
    assert more.stats.prompt_tokens == made.stats.prompt_tokens + len(kept) + new
    assert more.stats.cached_tokens >= made.stats.prompt_tokens + len(kept) - 1


def test_tokens_that_the_tokenizer_would_not_make_are_kept(talker: LanguageModel) -> None:
    """An answer whose tokens are not those of its text: the prompt of the next turn has the model's own."""
    tokenizer = talker.tokenizer
    prompt = tokenizer.prompt([{"role": "user", "content": "hi"}])
    odd = [3, 3, *tokenizer.encode("a</s>")]  # any tokens
    later = tokenizer.prompt(said("hi", "  a</s>", "so"), after=Answer(prompt, "  a</s>", odd))
    assert list(later.ids)[: len(prompt.ids) + len(odd)] == [*prompt.ids, *odd]
    assert list(later.ids[len(prompt.ids) + len(odd) :]) == tokenizer.encode("</s>[u]so</s>[a]", True)
    for changed in ("b", "  a"):  # another answer than what was said
        other = tokenizer.prompt(said("hi", changed, "so"), after=Answer(prompt, "  a</s>", odd))
        assert list(other.ids) == tokenizer.encode_chat(said("hi", changed, "so"))


def test_an_answer_that_a_stop_string_cut_is_not_kept(talker: LanguageModel) -> None:
    made = talker.chat([{"role": "user", "content": "hello"}], 12, ignore_eos=True)
    whole = "".join(made)
    prompt = talker.tokenizer.prompt([{"role": "user", "content": "hello"}])
    assert made.said(prompt) is not None
    cut = talker.chat([{"role": "user", "content": "hello"}], 12, ignore_eos=True, stop=whole[4:6])
    assert whole.startswith("".join(cut))
    assert cut.said(prompt) is None


def test_a_conversation_is_taken_back_and_goes_on(talker: LanguageModel) -> None:
    talk = Conversation(talker, "be kind", max_tokens=6, ignore_eos=True)
    first = "".join(talk.say("hello"))
    pieces = talk.say("more")
    next(pieces)
    talk.stop()
    assert list(pieces) == []
    assert talk.last is not None
    assert talk.last.finish_reason == "cancelled"
    roles = [m["role"] for m in talk.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert talk.undo() == "more"
    assert talk.messages[-1] == {"role": "assistant", "content": first}
    other = Conversation(talker)
    other.resume(talk.messages)
    assert other.messages == talk.messages
    talk.clear()
    assert talk.undo() is None
    assert talk.messages == [{"role": "system", "content": "be kind"}]
    several: list[Any] = [{}, [], [3], [{"role": "user", "content": "x"}], [{"role": "user"}, {"role": "assistant"}]]
    for wrong in several:
        with pytest.raises(OptionError, match="expected a list of messages"):
            other.resume(wrong)


def test_the_command_through_a_pipe(talking: Path, talker: LanguageModel, tmp_path: Path) -> None:
    """Each line is a message; commands work too, and a fault gives status 1 at the end."""
    asked = ["chat", str(talking), "-n", "6", "--device", "cpu"]
    talk = Conversation(talker, max_tokens=6)
    wanted = "".join("".join(talk.say(text)) + "\n" for text in ("hello", "two\nlines", "/x"))
    file = tmp_path / "talk.json"
    done = CliRunner().invoke(cli, asked, input=f"hello\ntwo\\\nlines\n//x\n/save {file}\n")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == wanted
    assert json.loads(file.read_text()) == talk.messages
    block = CliRunner().invoke(
        cli, asked, input=f'/load {file}\n/undo\n/undo\n"""\ntwo\nlines\n"""\n/retry\n/exit\nno\n'
    )
    assert block.exit_code == 0
    assert block.stdout == 2 * f"{talk.turns[3]['content']}\n"
    lines = "/sistem\n/set temperature hot\n/undo\n/load nothing.json\n/set x 1\n"
    wrong = CliRunner().invoke(cli, asked, input=lines)
    assert wrong.exit_code == 1
    for text in (
        "did you mean /system?",
        "hot: expected a number",
        "nothing was said",
        "nothing.json",
        "no option 'x'",
    ):
        assert text in wrong.stderr


def test_commands_tell(talking: Path) -> None:
    lines = "/system be kind\n/system\n/set temperature 0.5\n/set seed 3\n/set seed\n/set\n/stats\n"
    lines += "/set ignore_eos true\nhello\n/history\n/stats\n/help\n"
    done = CliRunner().invoke(cli, ["chat", str(talking), "-n", "3", "--device", "cpu"], input=lines)
    assert done.exit_code == 0, done.output
    out = done.stdout
    assert "be kind\n" in out
    assert "temperature 0.5\n" in out
    assert "seed" not in out.partition("hello")[0]
    assert "user: hello\n" in out
    assert "context 0 of 256" in out
    assert "3 tokens" in out
    assert "/save FILE" in out


class Terminal:
    """`rlx chat` on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.own, other = pty.openpty()
        command = [sys.executable, "-c", "from rlx.cli.main import main; main()", "chat", *arguments]
        self.process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, start_new_session=True)
        os.close(other)
        self.seen = ""

    def until(self, text: str, seconds: float = 120) -> str:
        """What it shows up to a text, which comes."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, self.seen
            if select.select([self.own], [], [], 1)[0]:
                self.seen += os.read(self.own, 4096).decode(errors="replace")
        shown, _, self.seen = self.seen.partition(text)
        return shown

    def type(self, text: str) -> None:
        os.write(self.own, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close_input(self, seconds: float = 120) -> int:
        """Its exit status after Ctrl-D; what it still writes is read, or it would wait for room on the terminal."""
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < end, self.seen
            self.type("\x04")  # again, as one that comes before the prompt is not the end of the input
            while select.select([self.own], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.own, 4096).decode(errors="replace")
                except OSError:  # the other end is closed
                    break
        return self.process.wait()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_on_a_terminal_ctrl_c_stops_the_answer_not_the_program(talking: Path) -> None:
    seen = Terminal(str(talking), "--device", "cpu", "--context", "200000", "--threads", "1")
    try:
        seen.until("/help lists commands")
        seen.until("> ")
        seen.type("/set ignore_eos true\n")
        seen.until("> ")
        seen.type("hello\n")
        seen.until("hello")
        time.sleep(0.5)  # it writes
        seen.interrupt()
        assert "/s, first after" in seen.until("cancelled")
        seen.until("> ")
        seen.type("half a line")
        seen.until("half a line")
        time.sleep(0.5)  # it waits for more
        seen.interrupt()
        seen.until("> ")
        seen.type("/history\n")
        assert "half" not in seen.until("assistant: ")
        assert seen.close_input() == 0
    finally:
        seen.process.kill()
        os.close(seen.own)


def test_the_oldest_turns_are_left_out_where_there_is_no_room(talker: LanguageModel) -> None:
    talk = Conversation(talker, "be kind", max_tokens=20, ignore_eos=True)
    for n in range(12):
        "".join(talk.say(f"message {n}"))
    assert talk.dropped > 0
    assert talk.messages[0] == {"role": "system", "content": "be kind"}
    assert talk.messages[-2] == {"role": "user", "content": "message 11"}
    assert len(talk.turns) == 2 * (12 - talk.dropped)
    before, talk.options["top_k"] = list(talk.turns), 3
    del talk.options["max_tokens"]  # an answer of any length: a quarter of the context is left for it
    with pytest.raises(OptionError, match="no effect without a temperature"):
        "".join(talk.say("a longer message " * 6))
    assert talk.turns == before
