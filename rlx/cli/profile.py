"""`rlx profile` and `rlx report`: each kernel against its prediction and its roofline."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Any

import click

from rlx.cli.inputs import Inputs, gather_inputs, with_hint
from rlx.cli.options import InputSpec, TargetType, compile_options, input_options, json_option, model_argument
from rlx.cli.run import load_model
from rlx.cli.show import disturbed_lines, measured_text, print_json, residual_lines, table, working
from rlx.disk import saving
from rlx.errors import RlxError
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.report.page import report_json, report_page
from rlx.runtime.report.rooflines import Rooflines, learn, rooflines
from rlx.units import seconds_text

__all__ = ["profile", "report"]

guesses = click.option("--guess", is_flag=True, help="Don't calibrate the device: use guesses if it never was.")


@click.command(
    help="""Print each kernel of MODEL: predicted, measured, roofline.

    With what it moves, the totals of a run, and what they are predicted to take.
    """
)
@model_argument
@input_options
@compile_options
@guesses
@click.option("--learn", "learns", is_flag=True, help="Let these runs correct the calibration of the device.")
@click.option("--trace", type=TargetType(), help="Write the kernels' times for Perfetto.")
@json_option
def profile(
    model: Path,
    inputs: tuple[tuple[str, InputSpec], ...],
    seed: int,
    guess: bool,
    learns: bool,
    trace: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    flag = "--trace" if trace is not None else "--learn" if learns else ""
    compiled = load_model(model, options, {"profile": flag} if flag else {})
    given, found = profiled(compiled, inputs, seed, options["threads"], not guess)
    if learns:
        learn(found)
    if trace is not None:
        compiled.trace(list(given.arrays.values()), trace, repeat=10)
    if as_json:
        memory = None if compiled.memory is None else compiled.memory.to_dict()
        print_json({"assumed": given.notes, "memory": memory, **found.to_dict()})
        return
    for note in given.notes:
        click.echo(f"assumed   {note}")
    rows = [("predicted", "measured", "roofline", "bound", "bytes", "flops", "kind", "kernel")]
    rows += [
        (
            seconds_text(r.predicted),
            measured_text(r.measured, r.disturbed),
            "" if r.fraction is None else f"{r.fraction:.0%}",
            r.bound,
            f"{r.bytes:,}",
            f"{r.flops:,}",
            r.kind,
            r.name,
        )
        for r in found.rows
    ]
    click.echo(table(rows, right=(0, 1, 2, 4, 5)))
    io, p = found.io, found.prediction
    taken = sum(r.measured or 0.0 for r in found.rows)
    click.echo(f"launches  {io.launches:,} (without fusion {io.launches_before:,}), sync points {io.syncs:,}")
    before = io.read_bytes_before + io.written_bytes_before
    click.echo(f"bytes     {io.read_bytes:,} read, {io.written_bytes:,} written (without fusion {before:,} in all)")
    click.echo(f"copies    {io.h2d_bytes:,} B to the device, {io.d2h_bytes:,} B from it: results {io.results}")
    click.echo(f"flops     {io.flops:,}, {io.intensity:.2f} a byte")
    how = "a guess" if p.guessed else "calibrated"
    click.echo(f"predicted {seconds_text(p.seconds)} per run ({seconds_text(p.low)} .. {seconds_text(p.high)}, {how})")
    for line in disturbed_lines([r.disturbed for r in found.rows]):
        click.echo(line)
    if taken:
        click.echo(f"measured  {seconds_text(taken)} in kernels, one after the other")
    if compiled.joins is not None:
        click.echo(f"thread barriers: {compiled.joins}")
    for line in residual_lines(compiled.memory):
        click.echo(line)


def profiled(
    compiled: CompiledGraph, inputs: tuple[tuple[str, InputSpec], ...], seed: int, threads: int | None, calibrate: bool
) -> tuple[Inputs, Rooflines]:
    """The inputs that were used, and the kernels at their extents."""
    given = gather_inputs(compiled.compilation.source, inputs, seed)
    try:
        with working("profiling", still=True):
            arrays = list(given.arrays.values())
            found = rooflines(compiled, arrays, at=given.extents, threads=threads, calibrate=calibrate)
    except RlxError as error:
        raise with_hint(error, given) from None
    return given, found


@click.command(
    help="""Write a page about MODEL: kernels, memory, graph, device.

    It explains itself and needs no other file. With --json the same figures are printed.
    """
)
@model_argument
@input_options
@compile_options
@guesses
@click.option("-o", "--output", type=TargetType(), help="The page.")
@click.option("--open", "opens", is_flag=True, help="Show the page in a browser.")
@json_option
def report(
    model: Path,
    inputs: tuple[tuple[str, InputSpec], ...],
    seed: int,
    guess: bool,
    output: Path | None,
    opens: bool,
    as_json: bool,
    **options: Any,
) -> None:
    if output is None and (opens or not as_json):
        raise click.UsageError("give -o PAGE.html, or --json")
    compiled = load_model(model, options)
    given, found = profiled(compiled, inputs, seed, options["threads"], not guess)
    if output is not None:
        with saving(output, "report") as file:
            file.write(report_page(model.name, compiled, found, given.notes).encode())
    if as_json:
        print_json(report_json(compiled, found, given.notes))
    else:
        click.echo(f"{output}: {len(found.rows)} kernels")
    if opens and output is not None and not webbrowser.open(output.resolve().as_uri()):
        raise click.ClickException(f"no browser was found: open {output} in one")
