"""`rlx run`: one run, and what came out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

import rlx
from rlx.backends import backend_named
from rlx.cli.inputs import Inputs, gather_inputs, read_array, with_hint
from rlx.cli.options import InputSpec, compile_options, dims_of, input_options, json_option, model_argument
from rlx.cli.show import loading, print_json, working
from rlx.errors import OptionError, RlxError
from rlx.ir.graph import Array
from rlx.progress import Watcher
from rlx.records import replace
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.policy import policy_of

__all__ = ["load_model", "run", "run_once"]

SHOWN = 6  # elements of an output that are printed


@click.command(help="Run MODEL once, on given or random inputs; print the outputs.")
@model_argument
@input_options
@compile_options
@click.option(
    "--output-dir", type=click.Path(path_type=Path, file_okay=False), help="Write each output there as NAME.npy."
)
@click.option("--replay", type=click.Path(path_type=Path), help="Run what was recorded there, and compare to the bit.")
@json_option
def run(
    model: Path,
    inputs: tuple[tuple[str, InputSpec], ...],
    seed: int,
    output_dir: Path | None,
    replay: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    compiled = load_model(model, options)
    if replay is not None:
        replay_runs(compiled, replay, as_json)
        return
    given = gather_inputs(compiled.compilation.source, inputs, seed)
    if output_dir is not None:
        output_dir.mkdir(parents=True, exist_ok=True)  # before a run that may take long
    outputs = run_once(compiled, given)
    files = {} if output_dir is None else write_outputs(outputs, output_dir)
    described = [describe(name, array) for name, array in outputs.items()]
    if as_json:
        rows = [{**row, **({"file": files[row["name"]]} if files else {})} for row in described]
        print_json({"device": compiled.device, "assumed": given.notes, "extents": given.extents, "outputs": rows})
        return
    for note in given.notes:
        click.echo(f"assumed   {note}")
    for row in described:
        click.echo(line_of(row) + (f"  -> {files[row['name']]}" if files else ""))


def replay_runs(compiled: CompiledGraph, path: Path, as_json: bool) -> None:
    """Runs a recording; exit status 1 where an output differs."""
    with working("running"):
        found = rlx.replay(compiled, path)
    if as_json:
        print_json({"ok": found.ok, "runs": found.runs, "differing": found.differing})
    else:
        click.echo(f"{found.runs} runs replayed, {len(found.differing)} outputs differ")
    if not found.ok:
        run, name = found.differing[0]
        raise click.ClickException(f"output {name!r} of run {run} differs from the recording")


def load_model(
    path: Path, options: dict[str, Any], needs: Mapping[str, str] | None = None, watcher: Watcher | None = None
) -> CompiledGraph:
    """`rlx.load` with the options of `compile_options`, on a device that has each capability that a flag needs.

    `needs` names the flag of each; `watcher` is told of progress in the place of a bar. Raises `OptionError` where the
    device that is named lacks one.
    """
    dims = dims_of(options["dims"]) or None
    values = {n: read_array(given, "--value") if isinstance(given, Path) else given for n, given in options["values"]}
    if needs and options["device"] == "auto":
        policy = policy_of(None)
        options = {**options, "policy": replace(policy, needs=(*policy.needs, *needs))}
    for need, flag in (needs or {}).items() if options["device"] != "auto" else ():
        if need not in backend_named(options["device"]).capabilities:
            device = options["device"]
            raise OptionError(
                f"{flag}: device {device!r} does not offer {need!r}; `rlx devices` lists what each offers"
            )
    with loading(f"compiling {path.name}") as told:
        return rlx.load(path, **{**options, "dims": dims, "values": values or None, "progress": watcher or told})


def run_once(compiled: CompiledGraph, inputs: Inputs) -> dict[str, Array]:
    """The outputs by name, fresh arrays."""
    try:
        with working("running"):
            return {name: np.asarray(array) for name, array in compiled._named_tensors(inputs.arrays).items()}
    except RlxError as error:
        raise with_hint(error, inputs) from None


def write_outputs(outputs: dict[str, Array], folder: Path) -> dict[str, str]:
    """Writes NAME.npy for each output; characters that file names lack become `_`."""
    files: dict[str, str] = {}
    for name, array in outputs.items():
        path = folder / ("".join(c if c.isalnum() or c in "._-" else "_" for c in name) + ".npy")
        if str(path) in files.values():
            raise OptionError(f"--output-dir: two outputs would be written to {path}; read them from Python instead")
        np.save(path, array)
        files[name] = str(path)
    return files


def describe(name: str, array: Array) -> dict[str, Any]:
    """Shape, dtype, min, mean, max (of the finite elements) and the first elements of an output, as JSON values."""
    flat = array.reshape(-1)
    facts: dict[str, Any] = {"name": name, "shape": list(array.shape), "dtype": str(array.dtype)}
    if array.dtype.kind == "c":
        return {**facts, "first": [str(v) for v in flat[:SHOWN]]}
    numbers = flat.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    facts |= {k: float(getattr(finite, k)()) if finite.size else None for k in ("min", "mean", "max")}
    facts["not_finite"] = int(flat.size - finite.size)
    first = (v.item() if array.dtype.kind in "biu" else float(v) for v in flat[:SHOWN])
    return {**facts, "first": [v if np.isfinite(v) else str(v) for v in first]}


def line_of(row: dict[str, Any]) -> str:
    """One output as a line of text."""
    facts = "".join(f"{k} {row[k]:.6g} " for k in ("min", "mean", "max") if row.get(k) is not None)
    odd = f"not finite {row['not_finite']} " if row.get("not_finite") else ""
    values = ", ".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in row["first"])
    more = ", ..." if np.prod(row["shape"], dtype=np.int64) > SHOWN else ""
    return f"{row['name']}: {row['dtype']}{row['shape']} {facts}{odd} [{values}{more}]"
