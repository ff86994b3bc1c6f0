"""The commands within `rlx chat`, such as /clear, and its status line."""

from __future__ import annotations

import json
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

import click

from rlx.cli.show import visible
from rlx.disk import read_regular
from rlx.errors import OptionError
from rlx.llm.conversation import Conversation
from rlx.llm.options import NUMBERS
from rlx.runtime.memory import Resident
from rlx.units import bytes_text

__all__ = ["COMMANDS", "run_command", "status"]


def run_command(talk: Conversation, line: str) -> str | None:
    """Does what a line such as "/system Be brief." says; gives a message to say next. Raises `OptionError`."""
    name, _, rest = line.strip().partition(" ")
    if name.startswith("//"):
        return line.strip()[1:]
    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, 1)
        raise OptionError(f"{name}: no such command{f'; did you mean {close[0]}?' if close else ''}; /help lists them")
    return COMMANDS[name][2](talk, rest.strip())


def status(talk: Conversation) -> str:
    """What the last answer took, how full the context is, and the memory of the process."""
    made = talk.last
    if made is None:
        return f"context 0 of {talk.llm.context:,}, {bytes_text(Resident.read().now)}"
    s = made.stats
    used = s.prompt_tokens + s.generated_tokens
    parts = [
        f"{s.generated_tokens} token{'s' * (s.generated_tokens != 1)}, {s.tokens_per_second:,.1f}/s",
        f"first after {s.first_token_seconds:.2f} s",
        f"context {used:,} of {talk.llm.context:,}",
        bytes_text(Resident.read().now),
    ]
    share = talk.llm.bandwidth_share
    if share is not None:
        parts.append(f"{100 * share:.0f} % of the bandwidth")
    if talk.dropped:
        parts.append(f"{talk.dropped} oldest turn{'s' * (talk.dropped != 1)} left out")
    return ", ".join(parts + ([made.finish_reason] if made.finish_reason in ("length", "cancelled") else []))


def _help(talk: Conversation, rest: str) -> None:
    width = max(len(f"{name} {what}") for name, (what, _, _) in COMMANDS.items())
    for name, (what, does, _) in COMMANDS.items():
        click.echo(f"{f'{name} {what}':{width}}  {does}")
    click.echo('A line that ends in \\ goes on in the next; lines of """ begin and end a longer message; // is one /.')


def _clear(talk: Conversation, rest: str) -> None:
    talk.clear()


def _system(talk: Conversation, rest: str) -> None:
    if not rest:
        click.echo("(none)" if talk.system is None else visible(talk.system))
        return
    talk.system = rest
    talk.clear()


def _undo(talk: Conversation, rest: str) -> None:
    if talk.undo() is None:
        raise OptionError("/undo: nothing was said yet")


def _retry(talk: Conversation, rest: str) -> str:
    asked = talk.undo()
    if asked is None:
        raise OptionError("/retry: nothing was said yet")
    return asked


def _history(talk: Conversation, rest: str) -> None:
    for message in talk.messages:
        click.echo(f"{message['role']}: {visible(message['content'])}")


def _set(talk: Conversation, rest: str) -> None:
    name, _, value = rest.partition(" ")
    known = ("max_tokens", "ignore_eos", *NUMBERS)
    if not name:
        for key, given in talk.options.items():
            click.echo(f"{key} {given}")
        return
    if name not in known:
        raise OptionError(f"/set: no option {name!r}; there are {', '.join(known)}")
    if not value.strip():
        talk.options.pop(name, None)
        return
    try:
        number = json.loads(value)
    except ValueError:
        number = None
    flag = name == "ignore_eos"
    if not isinstance(number, int | float) or isinstance(number, bool) != flag:
        raise OptionError(f"/set {name} {value.strip()}: expected {'true or false' if flag else 'a number'}")
    talk.options[name] = number


def _stats(talk: Conversation, rest: str) -> None:
    click.echo(str(talk.llm.stats))
    click.echo(status(talk))


def _save(talk: Conversation, rest: str) -> None:
    if not rest:
        raise OptionError("/save: expected the name of a file")
    Path(rest).write_text(json.dumps(talk.messages, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _load(talk: Conversation, rest: str) -> None:
    try:
        found = json.loads(read_regular(rest))
    except ValueError as error:
        raise OptionError(f"/load: {rest} is no JSON: {error}") from None
    talk.resume(found)


def _exit(talk: Conversation, rest: str) -> None:
    raise EOFError


Action = Callable[[Conversation, str], str | None]
COMMANDS: dict[str, tuple[str, str, Action]] = {  # name: its argument, what it does, how
    "/help": ("", "what can be said here", _help),
    "/clear": ("", "forget what was said", _clear),
    "/system": ("[TEXT]", "what the model is told first; begins anew", _system),
    "/undo": ("", "take back the last message and its answer", _undo),
    "/retry": ("", "another answer to the last message", _retry),
    "/history": ("", "all that was said", _history),
    "/set": ("[NAME [VALUE]]", "how answers are drawn, such as temperature 0.7; without a value: the default", _set),
    "/stats": ("", "what the last answer took", _stats),
    "/save": ("FILE", "write the conversation as JSON", _save),
    "/load": ("FILE", "go on with a conversation that was saved", _load),
    "/exit": ("", "end the program, as Ctrl-D does", _exit),
}
