"""The `rlx` command: its sub-commands, and how errors become exit statuses."""

from __future__ import annotations

import io
import sys
from importlib import import_module
from typing import Any

import click

import rlx
from rlx.boundary import converted
from rlx.errors import ExecutionError, RlxError

__all__ = ["cli", "main"]


COMMANDS = {
    "demo": "demo", "run": "run", "bench": "bench", "estimate": "estimate", "plan": "explain", "explain": "explain",
    "verify": "verify", "profile": "profile", "report": "profile", "devices": "devices", "calibrate": "calibrate",
    "cache": "cache", "fetch": "fetch", "quantize": "quantize",
    "generate": "language.generate", "chat": "language.chat", "embed": "language.embed",
    "perplexity": "language.perplexity",
}  # name -> the module of rlx.cli that has it, imported when it is called: `estimate` needs no compiler  # fmt: skip

ELSEWHERE = {
    "load": "run",
    "infer": "run",
    "info": "explain",
    "show": "explain",
    "benchmark": "bench",
    "trace": "profile",
    "convert": "quantize",
    "download": "fetch",
    "pull": "fetch",
}
INTERRUPTED = 130  # what shells give for a command that Ctrl-C ended: 128 and the number of the signal


class Commands(click.Group):
    """Turns what went wrong into one message on stderr and exit status 1; wrong usage gives 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            close = ELSEWHERE.get(args[0]) or next(iter(get_close_matches(args[0], COMMANDS, 1)), None)
            if close is not None:
                raise click.UsageError(f"{error.message} Did you mean {close!r}?", ctx) from error
            raise

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"rlx.cli.{COMMANDS[cmd_name]}"), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except RlxError as error:
            raise click.ClickException(str(error)) from error
        except MemoryError as error:
            raise click.ClickException(f"out of memory: {error}" if str(error) else "out of memory") from error
        except (BrokenPipeError, click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise click.ClickException(f"{where}{error.strerror or error}") from error
        except Exception as error:
            clear = converted(error, f"rlx {ctx.invoked_subcommand}", ExecutionError)
            if clear is None:
                raise
            raise click.ClickException(str(clear)) from error


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="""Compile models and run them; say first what they need.

    Exit status: 0 when all went well, 1 for a failure (one message on stderr), 2 for wrong usage, 130 after Ctrl-C.
    """,
)
@click.version_option(rlx.__version__, prog_name="rlx")
def cli() -> None:
    pass


def main() -> None:
    """Entry point of the `rlx` script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows `?`
    cli(prog_name="rlx")


if __name__ == "__main__":
    main()
