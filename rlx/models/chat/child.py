"""Renders chat templates in a process of its own, whose time and memory the system limits; `render.py` starts it.

jinja2's sandbox keeps a template from files and from Python's inside, not from `'x' * 10**9` or loops in loops: so this
process may take SECONDS of processor time a template and BYTES more memory than at its start; the kernel sees to both.

usage: python -I -S child.py FOLDER_OF_JINJA2 ...    requests and answers as JSON, each after 4 bytes of its length
"""

from __future__ import annotations

import contextlib
import json
import resource
import select
import signal
import struct
import sys
from typing import Any

SECONDS = 2.0  # of processor time for a template
BYTES = 256 << 20  # of memory for a template and what it makes
ANSWER = 64 << 20  # bytes of a text that is made
IDLE = 60.0  # seconds without a request until this process ends
KEPT = 16  # templates that are compiled


def environment() -> Any:
    """jinja2 as model files expect it: blocks leave no lines, `break` works, JSON keeps its characters."""
    import datetime

    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import SandboxedEnvironment

    class Generation(Extension):  # type: ignore[misc, unused-ignore]
        """{% generation %} marks what the model wrote, for training; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def to_json(x: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, **options)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.datetime.now().strftime(pattern)

    # Lists may grow: what a template changes is a copy that nobody else has.
    made = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False, extensions=[Generation, loopcontrols],
        cache_size=0,
    )  # fmt: skip
    made.filters["tojson"] = to_json
    made.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return made


def answer(made: Any, compiled: dict[str, Any], request: dict[str, Any]) -> dict[str, str]:
    """The text of a template, or what went wrong."""
    source = request["template"]
    try:
        if source not in compiled:
            if len(compiled) >= KEPT:
                del compiled[next(iter(compiled))]
            compiled[source] = made.from_string(source)
        text = compiled[source].render(request["variables"])
    except MemoryError:
        return {"error": f"it takes more than {BYTES >> 20} MiB"}
    except Exception as error:  # noqa: BLE001 - templates raise what they like
        line = getattr(error, "lineno", None)
        return {"error": f"{type(error).__name__}: {str(error)[:500]}" + (f" (line {line})" if line else "")}
    if len(text) > ANSWER // 4:
        return {"error": f"it gives {len(text)} characters, more than {ANSWER // 4}"}
    return {"text": text}


def limit_memory() -> None:
    """No more memory than now and BYTES, no files written, no processes."""
    try:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        now = 1 << 30
    for kind, most in ("RLIMIT_AS", now + BYTES), ("RLIMIT_FSIZE", 0), ("RLIMIT_CORE", 0):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, kind), (most, most))


def main() -> None:
    sys.path += sys.argv[1:]
    made = environment()
    compiled: dict[str, Any] = {}
    given, taken = sys.stdin.buffer, sys.stdout.buffer
    limit_memory()
    while select.select([given], [], [], IDLE)[0]:
        head = given.read(4)
        if len(head) < 4:
            return
        try:
            reply = answer(made, compiled, read(given, *struct.unpack("<I", head)))
            data = json.dumps(reply).encode()
        except MemoryError:
            data = json.dumps({"error": f"it takes more than {BYTES >> 20} MiB"}).encode()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        taken.write(struct.pack("<I", len(data)) + data)
        taken.flush()


def read(given: Any, count: int) -> dict[str, Any]:
    """A request; from here on its time is counted: SIGPROF ends the process."""
    data = given.read(count)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    request: dict[str, Any] = json.loads(data)
    return request


if __name__ == "__main__":
    main()
