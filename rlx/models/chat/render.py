"""Chat templates, rendered in a process of their own (`child.py`), which is started when first needed."""

from __future__ import annotations

import atexit
import json
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

from rlx.errors import DeviceUnavailable, ModelFormatError, OptionError
from rlx.forks import restart_in_child
from rlx.install import install_extra
from rlx.models.chat import child

__all__ = ["render"]

MAX_TEMPLATE = 1 << 20  # characters of a template
MAX_REQUEST = 64 << 20  # bytes of messages and tools
LONGEST = 60.0  # seconds that may pass until an answer, also on a machine that is busy
PASSED_ON = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")  # of the environment: what Python starts by, and the time
_PIECE = 1 << 16


class _Renderer:
    """The process and its two pipes; one template at a time."""

    def __init__(self) -> None:
        folders = {str(Path(found.origin).parents[1]) for found in map(find_spec, ("jinja2", "markupsafe")) if
                   found is not None and found.origin is not None}  # fmt: skip
        if not folders or not sys.executable:
            raise DeviceUnavailable(f"a chat template needs the library jinja2: {install_extra('llm')}")
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", child.__file__, *folders], cwd="/",
            env={name: os.environ[name] for name in PASSED_ON if name in os.environ},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        pipes = (self.process.stdin, self.process.stdout)
        self.given, self.taken = (pipe.fileno() for pipe in pipes if pipe is not None)
        os.set_blocking(self.given, False)

    def ask(self, request: bytes) -> bytes | None:
        """The answer; None where the process ended first, or LONGEST passed."""
        deadline = time.monotonic() + LONGEST
        try:
            self._write(struct.pack("<I", len(request)) + request, deadline)
            head = self._read(4, deadline)
            return None if head is None else self._read(int.from_bytes(head, "little"), deadline)
        except OSError:
            return None

    def _write(self, data: bytes, deadline: float) -> None:
        left = memoryview(data)
        while left:
            _wait(self.given, select.POLLOUT, deadline)
            left = left[os.write(self.given, left[:_PIECE]) :]

    def _read(self, count: int, deadline: float) -> bytes | None:
        if count > child.ANSWER * 2:
            return None
        parts = bytearray()
        while len(parts) < count:
            _wait(self.taken, select.POLLIN, deadline)
            piece = os.read(self.taken, min(_PIECE, count - len(parts)))
            if not piece:
                return None
            parts += piece
        return bytes(parts)

    def end(self) -> int:
        """Ends the process; what it ended by: 0 by itself, minus the number of a signal."""
        try:
            code = self.process.wait(0.2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        return code


def _wait(pipe: int, event: int, deadline: float) -> None:
    """Waits until a pipe can be read or written; `select` can't for files of high numbers."""
    poll = select.poll()
    poll.register(pipe, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
        raise TimeoutError


def render(template: str, variables: Mapping[str, Any], where: str = "the chat template") -> str:
    """The text that a chat template (jinja2) makes of variables; `where` begins the messages of errors.

    A template may take `child.SECONDS` of processor time and `child.BYTES` of memory. Raises `ModelFormatError` for one
    that is malformed, refuses the messages or goes beyond that; `OptionError` for variables that are no JSON.
    """
    if len(template) > MAX_TEMPLATE:
        raise ModelFormatError(f"{where}: {len(template)} characters are more than the limit of {MAX_TEMPLATE}")
    try:
        request = json.dumps({"template": template, "variables": dict(variables)}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"{where}: messages and tools must be made of what JSON has: {error}") from None
    if len(request) > MAX_REQUEST:
        raise OptionError(f"{where}: messages and tools of {len(request)} bytes: at most {MAX_REQUEST} are taken")
    answer = json.loads(_WORKER.ask(request, where))
    if "error" in answer:
        raise ModelFormatError(f"{where}: {answer['error']}")
    text: str = answer["text"]
    return text


class _Worker:
    """The one process that renders all templates, started anew where it ended and in the child of a fork."""

    def __init__(self) -> None:
        self._running: _Renderer | None = None
        self._restart()
        restart_in_child(self._restart)
        atexit.register(self._close)

    def ask(self, request: bytes, where: str) -> bytes:
        with self._lock:
            for attempt in range(2):
                if self._running is None:
                    self._running = _Renderer()
                data = self._running.ask(request)
                if data is not None:
                    return data
                code, self._running = self._running.end(), None
                # One that had nothing to do ends by itself; what is asked in this moment is asked again.
                if code != 0 or attempt:
                    break
        raise ModelFormatError(
            f"{where}: takes more than {child.SECONDS:g} s of processor time or {child.BYTES >> 20} MiB of memory"
        )

    def _restart(self) -> None:
        """A child of a fork has a lock of its own, and leaves the process to its parent."""
        self._lock = Lock()
        self._parents, self._running = self._running, None

    def _close(self) -> None:
        if self._running is not None:
            self._running.process.kill()


_WORKER = _Worker()
