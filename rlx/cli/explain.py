"""`rlx explain` and `rlx plan`: what the compiler decided."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from rlx.cli.bench import needs_json
from rlx.cli.inputs import gather_inputs
from rlx.cli.options import InputSpec, compile_options, dims_of, input_options, json_option, model_argument
from rlx.cli.run import load_model
from rlx.cli.show import print_json, working
from rlx.errors import OptionError
from rlx.plan.plan import MemoryPlan, make_plan
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.explain import STAGES

__all__ = ["explain", "plan"]


@click.command()
@model_argument
@input_options
@compile_options
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Also draw a map of the arena there.")
@json_option
def plan(
    model: Path,
    inputs: tuple[tuple[str, InputSpec], ...],
    seed: int,
    svg: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Print where every buffer of MODEL lies in the arena.

    At the upper bounds of its dims; where one is unbounded, at the sizes of the inputs given or invented.
    """
    compiled = load_model(model, options)
    notes: list[str] = []
    found = None if inputs else compiled.plan
    if found is None:
        found, notes = plan_at(compiled, inputs, seed)
    found.verify()
    if svg is not None:
        svg.write_text(found.to_svg(), encoding="utf-8")
    if as_json:
        print_json({"device": compiled.device, "invented": notes, **json.loads(found.to_json())})
        return
    for note in notes:
        click.echo(f"invented  {note}")
    click.echo(str(found))
    if svg is not None:
        click.echo(f"map          {svg}")


def plan_at(
    compiled: CompiledGraph, inputs: tuple[tuple[str, InputSpec], ...], seed: int
) -> tuple[MemoryPlan, list[str]]:
    """The plan at the sizes of the inputs, and what was invented of these."""
    program = compiled.compilation.program
    if program is None:
        raise OptionError(f"device {compiled.device!r} plans no memory: choose another one")
    given = gather_inputs(compiled.compilation.source, inputs, seed)
    return make_plan(program, given.extents), given.sizes


@click.command()
@model_argument
@compile_options
@click.option("--stage", type=click.Choice(STAGES), default="summary", show_default=True)
@click.option("--preflight", is_flag=True, help="Only say whether the file can be imported, and what it needs.")
@json_option
def explain(model: Path, stage: str, preflight: bool, as_json: bool, **options: Any) -> None:
    """Print MODEL as it is after a stage of the compiler, or a summary of what was decided."""
    if preflight:
        from rlx.importers.onnx import preflight as look

        with working(f"reading {model.name}"):
            report = look(model, dims=dims_of(options["dims"]) or None)
        if as_json:
            print_json({"ok": report.ok, **asdict(report)})
        else:
            click.echo(str(report))
        if not report.ok:
            standing = len(report.missing) + len(report.misfits)
            raise click.ClickException(f"{model}: {standing} nodes, inputs or shapes can't be imported")
        return
    compiled = load_model(model, options)
    text = compiled.explain(stage)
    decision = compiled.decision if stage == "summary" else None
    if not as_json:
        click.echo(text)
        if decision is not None:
            click.echo(str(decision))
        return
    facts: dict[str, Any] = {"device": compiled.device, "stage": stage, "text": text}
    if stage == "summary":
        facts["inputs"] = [str(spec) for spec in compiled.inputs]
        facts["outputs"] = [str(spec) for spec in compiled.outputs]
        facts["memory"] = needs_json(compiled)
        facts["decision"] = None if decision is None else decision.to_dict()
    if stage == "dispatch":
        facts["nodes"] = [vars(row) for row in compiled.compilation.dispatch]
    print_json(facts)
