"""`rlx estimate`: what a model takes in memory, before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from rlx.backends import BACKENDS
from rlx.cli.options import DimSpec, DimType, budget_option, dims_of, json_option, model_argument
from rlx.cli.show import print_json, working
from rlx.errors import MemoryDeficit, OptionError, ShapeError
from rlx.estimate.api import estimate as estimate_model
from rlx.estimate.language import KV_DTYPES
from rlx.estimate.memory import MemoryEstimate

__all__ = ["estimate"]


@click.command(help="Print what MODEL will take in memory; only its header is read.")
@model_argument
@click.option("--device", type=click.Choice(["auto", *BACKENDS]), default="auto", show_default=True)
@click.option(
    "--dims",
    type=DimType(),
    multiple=True,
    help="Fix a dim (batch=4) or bound it (seq=1:512); others get an assumed size.",
)
@budget_option("; exit status 1 if it takes more.")
@click.option("--context", type=click.IntRange(min=1), help="Tokens of context of a language model.")
@click.option("--batch", type=click.IntRange(min=1), help="Sequences at once of a language model. Default: 1.")
@click.option("--kv-dtype", type=click.Choice(list(KV_DTYPES)), help="Type of the KV cache. Default: f32.")
@click.option("--threads", type=click.IntRange(min=1), help="Default: all that the machine grants.")
@json_option
def estimate(
    model: Path,
    device: str,
    dims: tuple[tuple[str, DimSpec], ...],
    budget: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    given, notes = dims_of(dims), []
    with working(f"reading {model.name}"):
        try:
            found = estimate_model(model, device, dims=given or None, **options)
        except ShapeError:
            assumed = assumed_sizes(model, given)
            if not assumed:
                raise
            notes = [f"{name} = {size}" for name, size in assumed.items()]
            found = estimate_model(model, device, dims={**given, **assumed}, **options)
    for note in notes if not as_json else ():
        click.echo(f"assumed   {note}")
    deficit = None if budget is None else found.deficit(budget)
    if as_json:
        print_json({**found.to_dict(), "assumed": notes, **budget_json(budget, deficit)})
    elif deficit is None:
        click.echo(str(found))
    else:
        click.echo(str(deficit))
    if deficit is not None:
        missing = f"{deficit.missing_bytes:,} B are missing"
        raise click.ClickException(f"{model}: does not fit in {budget}: {missing}")
    if budget is not None and not as_json:
        click.echo("\n".join([f"fits in {budget}", *largest(found, budget)]))


def assumed_sizes(model: Path, dims: Mapping[str, DimSpec]) -> dict[str, int]:
    """A size for each dim of an ONNX file that has no bound, as `rlx plan` assumes it; no weight is read."""
    from rlx.cli.inputs import assume_extents
    from rlx.importers.onnx.importer import import_model
    from rlx.importers.onnx.model import read_model

    if model.suffix.lower() != ".onnx":
        return {}
    graph = import_model(read_model(model), dims=dims or None, weights=False).graph
    free = {name for name, symbol in graph.dims().items() if symbol.hi is None}
    return {name: size for name, size in assume_extents(graph, {}).items() if name in free} if free else {}


def budget_json(budget: str | None, deficit: MemoryDeficit | None) -> dict[str, Any]:
    """What --json adds for a budget."""
    if budget is None:
        return {}
    if deficit is None:
        return {"fits": True, "budget": budget}
    return {
        "fits": False,
        "budget": budget,
        "budget_bytes": deficit.budget_bytes,
        "missing_bytes": deficit.missing_bytes,
        "remedies": [vars(remedy) for remedy in deficit.remedies],
    }


def largest(found: MemoryEstimate, budget: str) -> list[str]:
    """How large batch and context could be."""
    lines = []
    for what, ask in (("batch", found.max_batch), ("context", found.max_context)):
        try:
            lines.append(f"  largest {what} {ask(budget):,}")
        except OptionError:
            continue  # it has no such dim
    return lines
