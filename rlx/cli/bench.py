"""`rlx bench`: how long a run takes, and where the time goes."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from rlx.backends.timing import KernelTime
from rlx.cli.inputs import gather_inputs, with_hint
from rlx.cli.load import crowd, crowd_rows, scaling_rows, thread_scaling
from rlx.cli.options import (
    CountsType,
    InputSpec,
    SecondsRange,
    compile_options,
    input_options,
    json_option,
    model_argument,
)
from rlx.cli.run import load_model
from rlx.cli.show import (
    Timing,
    disturbed_lines,
    fastest,
    measure,
    measured_text,
    print_json,
    residual_lines,
    table,
    working,
)
from rlx.errors import RlxError
from rlx.runtime.compiled import CompiledGraph
from rlx.units import bytes_text, seconds_text

__all__ = ["bench", "kernel_rows", "needs_json"]


@click.command(
    help="""Time runs of MODEL on given or random inputs.

    By `run_slots`, which gives views, and by `run`, which makes fresh arrays.

    Clones share the worker threads of the process: `--threads 1` gives each run the processor that it is called on.
    """
)
@model_argument
@input_options
@compile_options
@click.option("--seconds", type=SecondsRange(min=0.01), default=2.0, show_default=True, help="To measure for.")
@click.option("--kernels", is_flag=True, help="Also time every kernel.")
@click.option(
    "--clones", type=CountsType(), help="Also run these numbers of clones at once, as in 1,2,4, a Python thread each."
)
@click.option(
    "--scaling", type=CountsType(), help="Also compile for these numbers of threads, as in 1,2,4, and time in turns."
)
@json_option
def bench(
    model: Path,
    inputs: tuple[tuple[str, InputSpec], ...],
    seed: int,
    seconds: float,
    kernels: bool,
    clones: tuple[int, ...] | None,
    scaling: tuple[int, ...] | None,
    as_json: bool,
    **options: Any,
) -> None:
    start = time.perf_counter()
    needs = {**({"profile": "--kernels"} if kernels else {}), **({"clone": "--clones"} if clones else {})}
    compiled = load_model(model, options, needs)
    compile_seconds = time.perf_counter() - start
    given = gather_inputs(compiled.compilation.source, inputs, seed)
    arrays = list(given.arrays.values())
    try:
        call = fastest(compiled)
        start = time.perf_counter()
        call(*arrays)
        first = time.perf_counter() - start
    except RlxError as error:
        raise with_hint(error, given) from None
    with working("measuring", still=True):
        slots = measure(lambda: call(*arrays), seconds) if "slots" in compiled.capabilities else None
        fresh = measure(lambda: compiled.run(arrays), seconds / 2)
        rows = compiled.profile(arrays) if kernels else []
        crowds = [crowd(compiled, arrays, n, seconds) for n in clones or ()]
        grown = thread_scaling(lambda n: load_model(model, options | {"threads": n}), arrays, scaling or (), seconds)
    memory, kept = needs_json(compiled), compiled.memory
    if as_json:
        print_json(
            {
                "device": compiled.device,
                "assumed": given.notes,
                "predicted": None if kept is None else kept.to_dict(),
                "compile_s": compile_seconds,
                "first_run_s": first,
                "run_slots": None if slots is None else asdict(slots),
                "run": asdict(fresh),
                "memory": memory,
                "clones": [asdict(c) for c in crowds],
                "scaling": [asdict(s) for s in grown],
                "kernels": [row.to_dict() for row in rows],
            }
        )
        return
    for note in given.notes:
        click.echo(f"assumed   {note}")
    click.echo(f"compile   {seconds_text(compile_seconds)}, first run {seconds_text(first)}")
    if slots is not None:
        click.echo(f"run_slots {timing_line(slots)}")
    click.echo(f"run       {timing_line(fresh)}")
    if memory:
        click.echo("memory    " + ", ".join(f"{name} {bytes_text(n)}" for name, n in memory.items()))
    for line in residual_lines(kept):
        click.echo(line)
    for lines in (crowd_rows(crowds), scaling_rows(grown)):
        if len(lines) > 1:
            click.echo()
            click.echo(table(lines, right=range(6)))
    if rows:
        click.echo()
        click.echo(table(kernel_rows(rows), right=(0, 1)))
        for line in disturbed_lines([row.disturbed for row in rows]):
            click.echo(line)


def timing_line(t: Timing) -> str:
    """A timing as text."""
    return (
        f"median {seconds_text(t.median)}, p10 {seconds_text(t.p10)}, p90 {seconds_text(t.p90)}, "
        f"p99 {seconds_text(t.p99)}, min {seconds_text(t.min)} ({t.samples * t.calls} runs)"
    )


def needs_json(compiled: CompiledGraph) -> dict[str, int | None]:
    """Bytes of params, packed weights, constants and arena; empty for a device without a program."""
    needs = compiled.needs
    if needs is None:
        return {}
    return {"params": needs.params, "packed": needs.prepared, "constants": needs.constants, "arena": needs.arena}


def kernel_rows(rows: list[KernelTime]) -> list[tuple[str, str, str, str]]:
    """A table of kernels, slowest first: time, share, kind, name."""
    total = sum(s for *_, s in rows) or 1.0
    ordered = sorted(rows, key=lambda row: -row[2])
    return [
        ("time", "share", "kind", "kernel"),
        *((measured_text(r[2], r.disturbed), f"{r[2] / total:.1%}", r[0], r[1]) for r in ordered),
    ]
