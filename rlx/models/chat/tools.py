"""Calls of tools out of what a model writes, piece by piece.

Formats, named after who brought them in:

    hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call>                   (Hermes, Qwen 2 and 3)
    llama3    {"name": "f", "parameters": {...}}, as the whole answer; <|python_tag|> may be before it, ; between calls
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...] or [TOOL_CALLS]f[ARGS]{...}
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from rlx.errors import OptionError
from rlx.records import dataclass

__all__ = ["FORMATS", "ToolCall", "ToolCalls", "tool_format"]

MAX_CALL = 1 << 20  # characters of a call; what is longer is text


@dataclass(frozen=True)
class ToolCall:
    """A call: the tool's name and its arguments, a JSON object as text."""

    name: str
    arguments: str


class _JsonEnd:
    """Finds where a JSON object or list ends, as its characters come."""

    def __init__(self) -> None:
        self.depth, self.at, self.string, self.escaped = 0, 0, False, False

    def feed(self, text: str) -> int | None:
        """The place after its end in `text`, which begins with it and grows from call to call."""
        while self.at < len(text):
            char = text[self.at]
            self.at += 1
            if self.escaped:
                self.escaped = False
            elif self.string:
                self.escaped, self.string = char == "\\", char != '"'
            elif char == '"':
                self.string = True
            elif char in "[{":
                self.depth += 1
            elif char in "]}":
                self.depth -= 1
                if self.depth == 0:
                    return self.at
        return None


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(found: Any) -> ToolCall | None:
    """A call as models write it: arguments may be an object, or one that was written as a string."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    given = found.get("arguments", found.get("parameters", {}))
    if isinstance(given, str):
        given = _loads(given)
    return ToolCall(found["name"], json.dumps(given, ensure_ascii=False)) if isinstance(given, dict) else None


class _Format(ABC):
    """How calls are written. `marks` begin one; `take` gets the text from a mark on."""

    marks: tuple[str, ...]
    first_only = False  # whether a call may only be at the very beginning

    @abstractmethod
    def take(self, text: str, *, final: bool) -> tuple[list[ToolCall], int] | None:
        """The calls and how long they are; None: more text may complete them. No calls: it is plain text."""


class _Hermes(_Format):
    marks = ("<tool_call>",)
    close = "</tool_call>"

    def take(self, text: str, *, final: bool) -> tuple[list[ToolCall], int] | None:
        start = len(self.marks[0])
        end = text.find(self.close, start)
        while end >= 0:
            call = _call(_loads(text[start:end]))
            if call is not None:
                return [call], end + len(self.close)
            end = text.find(self.close, end + 1)  # the mark may be part of an argument
        call = _call(_loads(text[start:])) if final else None  # some models leave the last mark out
        return ([call] if call is not None else [], len(text)) if final else None


class _Llama3(_Format):
    marks = ("<|python_tag|>", "{")
    first_only = True

    def take(self, text: str, *, final: bool) -> tuple[list[ToolCall], int] | None:
        calls: list[ToolCall] = []
        at = len(self.marks[0]) if text.startswith(self.marks[0]) else 0
        while True:
            at += len(text[at:]) - len(text[at:].lstrip(" \n;"))
            if at >= len(text):
                return (calls, at) if final else None
            end = _JsonEnd().feed(text[at:]) if text[at] == "{" else 0
            if end is None and not final:
                return None
            call = _call(_loads(text[at : at + end])) if end else None
            if call is None:
                return calls, at if calls else len(text)
            calls.append(call)
            at += end or 0


class _Mistral(_Format):
    marks = ("[TOOL_CALLS]",)
    named = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(?=\{)")

    def take(self, text: str, *, final: bool) -> tuple[list[ToolCall], int] | None:
        start = len(self.marks[0])
        start += len(text[start:]) - len(text[start:].lstrip())
        if text[start : start + 1] == "[":
            end = _JsonEnd().feed(text[start:])
            found = _loads(text[start : start + end]) if end else None
            calls = [_call(entry) for entry in found] if isinstance(found, list) else [None]
        else:
            name = self.named.match(text, start)
            begin = name.end() if name else start
            end = _JsonEnd().feed(text[begin:]) if name else None
            found = _loads(text[begin : begin + end]) if end else None
            calls = [_call({"name": name[1], "arguments": found})] if name else [None]
            start = begin
        if end is None and not final:
            return None
        good = [call for call in calls if call is not None]
        return (good, start + (end or 0)) if end and len(good) == len(calls) else ([], len(text))


FORMATS: dict[str, Callable[[], _Format]] = {"hermes": _Hermes, "llama3": _Llama3, "mistral": _Mistral}


def tool_format(template: str) -> str | None:
    """The format in which a model calls tools, by what its chat template writes; None where it knows no tools."""
    if "<function=" in template or "<arg_key>" in template:  # arguments that are no JSON
        return None
    marks = {"hermes": ("<tool_call>", "arguments"), "mistral": ("[TOOL_CALLS]",), "llama3": ("ipython", "parameters")}
    return next((name for name, needed in marks.items() if all(mark in template for mark in needed)), None)


class ToolCalls:
    """Takes the pieces of an answer and gives text and calls in their order; text is held back no longer than it must.

    What begins like a call and is none comes out as text: nothing is lost.
    """

    def __init__(self, name: str) -> None:
        if name not in FORMATS:
            raise OptionError(f"tool calls: there is no format {name!r}; there are {', '.join(FORMATS)}")
        self._format = FORMATS[name]()
        self._held, self._began, self._tried = "", False, 0

    def push(self, piece: str) -> list[str | ToolCall]:
        """Text and calls that are sure after one more piece."""
        self._held += piece
        return self._out(final=False)

    def finish(self) -> list[str | ToolCall]:
        """What is left at the end of the answer."""
        return self._out(final=True)

    def _out(self, *, final: bool) -> list[str | ToolCall]:
        out: list[str | ToolCall] = []
        while self._held:
            start = self._mark()
            if start:
                self._text(out, self._held[:start])
            if not self._held or self._is_partial(final):
                break
            # A long call is looked at anew each time it has grown by a quarter, or could be at its end.
            closes = self._held.rstrip()[-1:] in ("}", "]", ">")
            if not final and not closes and len(self._held) < self._tried * 1.25:
                break
            self._tried = len(self._held)
            taken = self._format.take(self._held, final=final or len(self._held) > MAX_CALL)
            if taken is None:
                break
            calls, length = taken
            self._tried, self._began = 0, True
            if calls:
                out += calls
                self._held = self._held[length:].lstrip() if final else self._held[length:]
            else:
                self._text(out, self._held[:length])
        return out

    def _text(self, out: list[str | ToolCall], text: str) -> None:
        self._held = self._held[len(text) :]
        self._began |= not text.isspace()
        out.append(text)

    def _mark(self) -> int:
        """Where the next mark, or what may become one, begins in what is held; its length where there is none."""
        if self._format.first_only:
            blank = len(self._held) - len(self._held.lstrip())
            return len(self._held) if self._began else blank
        places = [p for mark in self._format.marks if (p := self._held.find(mark)) >= 0]
        if places:
            return min(places)
        last = range(max(0, len(self._held) - 32), len(self._held))
        return next((i for i in last if self._may_begin(i)), len(self._held))

    def _may_begin(self, at: int) -> bool:
        return any(mark.startswith(self._held[at:]) for mark in self._format.marks)

    def _is_partial(self, final: bool) -> bool:
        """Whether what is held is less than a mark, and may become one."""
        if any(self._held.startswith(mark) for mark in self._format.marks):
            return False
        return self._may_begin(0) and not final
