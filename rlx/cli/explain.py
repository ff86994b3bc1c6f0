"""`rlx explain` and `rlx plan`: what the compiler decided."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from rlx.cli.bench import needs_json
from rlx.cli.inputs import gather_inputs
from rlx.cli.options import InputSpec, TargetType, compile_options, dims_of, input_options, json_option, model_argument
from rlx.cli.run import load_model
from rlx.cli.show import on_terminal, print_json, working
from rlx.disk import saving
from rlx.errors import OptionError
from rlx.plan.pack import Search
from rlx.plan.plan import MemoryPlan, bound_extents, make_plan
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.explain import STAGES

__all__ = ["explain", "plan"]


class SearchType(click.ParamType[Any]):
    """off, auto, or a number of visits, which may be written 1e9."""

    name = "off|auto|visits"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Search:
        if value in ("off", "auto") or isinstance(value, int):
            return value  # type: ignore[no-any-return]
        try:
            visits = float(value)
        except ValueError:
            visits = -1.0
        if not visits.is_integer() or visits < 0:
            self.fail(f"{value!r}: expected off, auto or a number of visits such as 1e9", param, ctx)
        return int(visits)


@click.command(
    help="""Print where every buffer of MODEL lies in the arena.

    At the upper bounds of its dims; where one is unbounded, at the sizes of the inputs given or assumed.
    """
)
@model_argument
@input_options
@compile_options
@click.option("--html", type=TargetType(), help="Also draw a map with facts on hover.")
@click.option("--svg", type=TargetType(), help="Also draw a map of the arena there.")
@click.option(
    "--search", type=SearchType(), default="auto", help="Exact search: off, auto, or visits such as 1e9 (10 s)."
)
@json_option
def plan(
    model: Path,
    inputs: tuple[tuple[str, InputSpec], ...],
    seed: int,
    html: Path | None,
    svg: Path | None,
    search: Search,
    as_json: bool,
    **options: Any,
) -> None:
    compiled = load_model(model, {**options, "search": "off"}, {"arena": "rlx plan"})
    notes: list[str] = []
    with working("planning" if search in ("off", "auto") else f"searching for the least arena, {search:.0e} visits"):
        found = None if inputs or search != "off" else compiled.plan
        if found is None:
            found, notes = plan_at(compiled, inputs, seed, search)
    found.verify()
    maps = {path: text for path, text in ((svg, found.to_svg), (html, found.to_html)) if path is not None}
    for path, text in maps.items():
        with saving(path, "plan") as file:
            file.write(text().encode())
    if as_json:
        print_json({"device": compiled.device, "assumed": notes, **json.loads(found.to_json())})
        return
    for note in notes:
        click.echo(f"assumed   {note}")
    columns = shutil.get_terminal_size().columns if on_terminal(sys.stdout) else None  # a file has room for whole names
    click.echo(found.to_text(columns))
    for path in maps:
        click.echo(f"map          {path}")


def plan_at(
    compiled: CompiledGraph, inputs: tuple[tuple[str, InputSpec], ...], seed: int, search: Search
) -> tuple[MemoryPlan, list[str]]:
    """The plan at the bounds, or at the sizes of the inputs, and what was assumed of these."""
    program = compiled.compilation.program
    assert program is not None  # the device has an arena
    bounds = None if inputs else bound_extents(program)
    if bounds is not None:
        return make_plan(program, bounds, search=search), []
    given = gather_inputs(compiled.compilation.source, inputs, seed)
    return make_plan(program, given.extents, search=search), given.sizes


@click.command(help="Print what was decided for MODEL, or a stage of the compiler.")
@model_argument
@compile_options
@click.option("--stage", type=click.Choice(STAGES), default="summary", show_default=True)
@click.option("--why", is_flag=True, help="With --stage kernels: why other strategies were not taken.")
@click.option("--compile-time", is_flag=True, help="Compile with an empty cache and print what takes how long.")
@click.option("--preflight", is_flag=True, help="Only say whether the file can be imported, and what it needs.")
@json_option
def explain(
    model: Path, stage: str, why: bool, compile_time: bool, preflight: bool, as_json: bool, **options: Any
) -> None:
    if compile_time:
        from rlx.cli.compile_time import compile_time as measured

        found = measured(model, options)
        print_json(found) if as_json else click.echo(found["text"])
        return
    if preflight:
        from rlx.importers.onnx import preflight as look
        from rlx.runtime.session import kind_of

        _, kind = kind_of(model)
        if kind != ".onnx":
            raise OptionError(f"{model}: --preflight looks into ONNX files; this is the {kind} form of rlx itself")
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
    text = compiled.explain(stage, why=why)
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
