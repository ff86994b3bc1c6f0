"""`rlx perplexity`: how well a language model foresees a text."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from rlx.cli.language.options import loaded, loading_options
from rlx.cli.options import json_option, model_argument
from rlx.cli.show import loading, print_json
from rlx.disk import read_regular
from rlx.errors import OptionError

__all__ = ["perplexity"]


@click.command(
    help="""Print how well MODEL foresees the text in FILE.

    That is the perplexity: the lower, the better. A FILE of - is stdin.
    """
)
@model_argument
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--stride", type=click.IntRange(min=1), help="From window to window of the context. Default: a context.")
@loading_options
@json_option
def perplexity(model: Path, file: Path, stride: int | None, as_json: bool, **options: Any) -> None:
    try:
        text = sys.stdin.read() if str(file) == "-" else read_regular(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"{file}: is not UTF-8: {error}") from None
    except OSError as error:
        raise OptionError(f"{file}: {error.strerror}; a FILE of - is read from stdin") from None
    llm = loaded(model, options)
    ids = llm.tokenize(text)
    begun = time.perf_counter()
    with loading(f"reading {file.name}") as told:
        found = llm.perplexity(ids, stride=stride, progress=told)
    seconds = time.perf_counter() - begun
    if as_json:
        given = {
            "device": llm.model.device,
            "tokens": len(ids),
            "context": llm.context,
            "stride": stride or llm.context,
        }
        print_json({**given, "perplexity": found, "seconds": seconds})
    else:
        click.echo(f"perplexity {found:.4f} of {len(ids):,} tokens, {len(ids) / seconds:,.0f} a second")
