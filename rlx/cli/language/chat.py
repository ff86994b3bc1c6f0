"""`rlx chat`: a conversation with a language model in the terminal, or line by line through pipes."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from rlx.cli.language.chat_commands import COMMANDS, run_command, status
from rlx.cli.language.options import for_model, loaded, loading_options, taken, writing_options
from rlx.cli.options import model_argument
from rlx.cli.show import on_terminal, visible
from rlx.errors import RlxError
from rlx.llm.conversation import Conversation

__all__ = ["chat"]

FENCE = '"""'  # a line of it begins and ends a message of several lines


@click.command(
    help="Talk with the language model MODEL. In a pipe each line of stdin is a message, and answers go to stdout. "
    "Ctrl-C stops an answer, Ctrl-D ends the program; /help lists commands."
)
@model_argument
@click.option("--system", help="What the model is told first.")
@click.option("--max-tokens", "-n", type=click.IntRange(min=1), help="At most so many an answer. Default: what fits.")
@writing_options
@loading_options
def chat(model: Path, system: str | None, max_tokens: int | None, **options: Any) -> None:
    given = taken(options)
    llm = loaded(model, options)
    talk = Conversation(llm, system, max_tokens=max_tokens, **for_model(llm, given))
    person = on_terminal(sys.stdin)
    if person:
        with_line_editing()
        click.echo(f"{llm.path.name} on {llm.model.device}, context of {llm.context:,} tokens; /help lists commands")
    failed = False
    for text in messages(person):
        try:
            said = run_command(talk, text) if text.startswith("/") else text
            if said is not None:
                answer(talk, said, person)
        except (RlxError, OSError) as error:
            click.echo(f"Error: {error}", err=True)
            failed = True
        except KeyboardInterrupt:
            if not person:
                raise
            click.echo()
        except EOFError:
            break
    if failed and not person:
        raise click.exceptions.Exit(1)


def with_line_editing() -> None:
    """Arrow keys edit the line and bring back earlier ones, and Tab completes commands, where Python has readline."""
    try:
        import readline
    except ImportError:
        return
    readline.set_completer_delims("")
    readline.parse_and_bind("tab: complete")
    readline.set_completer(
        lambda text, n: dict(enumerate(c for c in COMMANDS if text[:1] == "/" and c.startswith(text))).get(n)
    )


def messages(person: bool) -> Iterator[str]:
    """What is said, until the end of stdin; Ctrl-C takes back the line that is being written."""
    while True:
        try:
            text = message(person)
        except KeyboardInterrupt:
            if not person:
                raise
            click.echo()
            continue
        except EOFError:
            if person:
                click.echo()
            return
        if text.strip():
            yield text


def message(person: bool) -> str:
    """One message: a line, those that end in a backslash and the next one, or what stands between lines of quotes."""

    def line(mark: str) -> str:
        return input(mark if person else "")

    text = line("> ")
    if text.strip() == FENCE:
        lines: list[str] = []
        while (text := line(". ")).strip() != FENCE:
            lines.append(text)
        return "\n".join(lines)
    while text.endswith("\\"):
        text = text[:-1] + "\n" + line(". ")
    return text


def answer(talk: Conversation, text: str, person: bool) -> None:
    """Prints the answer to a message as it comes, and for a person the status line."""
    with stopped_by_ctrl_c(talk):
        for piece in talk.say(text):
            click.echo(visible(piece), nl=False)
            sys.stdout.flush()
    click.echo()
    if person:
        click.secho(status(talk), dim=True, err=True)


@contextmanager
def stopped_by_ctrl_c(talk: Conversation) -> Iterator[None]:
    """Within, the first Ctrl-C ends the answer before its next token, and a second one interrupts what runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = 0

    def stop(number: int, frame: Any) -> None:
        nonlocal pressed
        pressed += 1
        talk.stop()
        if pressed > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
