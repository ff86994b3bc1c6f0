"""`rlx embed`: the vectors of texts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

from rlx.cli.language.options import running_options
from rlx.cli.options import TargetType, json_option, model_argument
from rlx.cli.show import loading, print_json, working
from rlx.disk import saving
from rlx.llm.embedder import load_embedder

__all__ = ["embed"]


@click.command(
    help="Print the vectors that MODEL makes of TEXTS.\n\nA JSON array a line, for each of TEXTS or each line of stdin."
)
@model_argument
@click.argument("texts", nargs=-1)
@click.option("--output", "-o", type=TargetType(), help="Write them as .npy (f32 [texts, dimensions]).")
@click.option("--prompt", help="What stands before each text: a name that the model's files know, or a text.")
@click.option("--truncate", is_flag=True, help="Cut texts that are too long for the model.")
@click.option("--context", type=click.IntRange(min=1), help="Tokens of a text at most. Default: what the files say.")
@running_options
@json_option
def embed(
    model: Path,
    texts: tuple[str, ...],
    output: Path | None,
    prompt: str | None,
    truncate: bool,
    as_json: bool,
    **options: Any,
) -> None:
    given = list(texts) or [line.rstrip("\n") for line in sys.stdin]
    with loading(f"loading {model.name}") as told:
        chosen = {name: value for name, value in options.items() if value is not None}
        embedder = load_embedder(model, progress=told, **chosen)
    with working("embedding"):
        vectors = embedder.embed(given, prompt=prompt, truncate=truncate)
    if output is not None:
        with saving(output, "--output") as file:
            np.save(file, vectors)
    if as_json:
        shown = {"output": str(output)} if output is not None else {"embeddings": vectors.tolist()}
        print_json({"device": embedder.model.device, "dimensions": embedder.dimensions, "texts": len(given), **shown})
    elif output is not None:
        click.echo(f"{output}: {len(given)} texts, {embedder.dimensions} dimensions", err=True)
    else:
        for vector in vectors.tolist():
            click.echo(json.dumps(vector))
