"""`rlx verify`: a device against the reference, and the first node that differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from rlx.backends import backend_named
from rlx.cli.inputs import Inputs, gather_inputs, with_hint
from rlx.cli.options import InputSpec, ToleranceType, compile_options, input_options, json_option, model_argument
from rlx.cli.run import load_model
from rlx.cli.show import print_json, progress, working
from rlx.errors import RlxError
from rlx.runtime.compiled import CompiledGraph
from rlx.testing.nodewise import Comparison, allowed_for, compare_nodes, compare_outputs, first_bad_value
from rlx.testing.oracle import Tolerance
from rlx.testing.rewrites import compare_passes, first_wrong_pass
from rlx.testing.roundings import compare_between_roundings
from rlx.testing.truth import errors_of, in_f64, run_f64

__all__ = ["verify"]


@click.command(
    help="""Compare MODEL on a device with the reference.

    The reference runs it as the file says. Its outputs, then what the passes rewrote, then every node for itself. Exit
    status 1 names the first pass or node that changes a result by more than rounding explains. Where only outputs
    differ, of a quantised model say, what lies between its roundings is compared.

    With --f64 the model is evaluated in float64 instead, and the errors of the device's outputs are told beside those
    of onnxruntime where that is installed.
    """
)
@model_argument
@input_options
@compile_options
@click.option(
    "--tolerance",
    "tolerances",
    type=ToleranceType(),
    multiple=True,
    help="For results of a type: f32=1e-4 (relative and absolute) or f32=1e-4:1e-6. Default: by type and op.",
)
@click.option("--f64", is_flag=True, help="Tell how far outputs are from those of the model evaluated in float64.")
@json_option
def verify(
    model: Path,
    inputs: tuple[tuple[str, InputSpec], ...],
    seed: int,
    tolerances: tuple[tuple[str, float, float], ...],
    f64: bool,
    as_json: bool,
    **options: Any,
) -> None:
    allowed = {name: Tolerance(relative, absolute) for name, relative, absolute in tolerances}
    compiled = load_model(model, options)
    graph = compiled.compilation.source
    given = gather_inputs(graph, inputs, seed)
    if f64:
        tell_truth(model, compiled, given, as_json)
        return
    try:
        with progress("comparing the outputs", len(graph.nodes)) as done:
            outputs = compare_outputs(compiled, given.arrays, allowed, done)
        rewritten: list[Comparison] = []
        if any(backend_named(name).rewrites for name in compiled.device.split("+")):
            with progress("comparing what the passes rewrote", len(graph.nodes)) as done:
                rewritten = compare_passes(graph, given.arrays, allowed, done)
        wrong = None
        if not all(r.ok for r in rewritten):
            with working("looking for the pass that changed a result"):
                wrong = first_wrong_pass(graph, given.arrays, allowed)
        with progress("comparing the nodes", len(graph.nodes)) as done:
            nodes = compare_nodes(graph, given.arrays, compiled.device, given=allowed, done=done)
        culprit = wrong.found if wrong else next((n for n in nodes if not n.ok), None)
        stretches: list[Comparison] = []
        if culprit is None and not all(o.ok for o in outputs):
            with working("comparing what lies between roundings"):
                stretches = compare_between_roundings(graph, given.arrays, compiled.device, allowed)
            culprit = next((s for s in stretches if not s.ok), None)
            if not stretches:
                with working("looking for the first value that differs"):
                    culprit = first_bad_value(graph, given.arrays, compiled.device, allowed)
    except RlxError as error:
        raise with_hint(error, given) from None
    ok = culprit is None and (bool(stretches) or all(o.ok for o in outputs))
    if as_json:
        facts = {"ok": ok, "device": compiled.device, "assumed": given.notes}
        facts["wrong_pass"] = {"name": wrong.name, "where": wrong.where} if wrong else None
        facts["first_bad"] = asdict(culprit) if culprit else None
        facts["tolerances"] = {name: asdict(one) for name, one in used(compiled, allowed).items()}
        facts["outputs"] = [asdict(o) for o in outputs]
        facts["rewritten"] = [asdict(r) for r in rewritten]
        facts["nodes"] = [asdict(n) for n in nodes]
        facts["between_roundings"] = [asdict(s) for s in stretches]
        print_json(facts)
    else:
        tell_terms(given, used(compiled, allowed))
        report(outputs, rewritten, nodes, stretches)
    if wrong is not None:
        raise click.ClickException(f"device {compiled.device!r} differs from the reference: {wrong}")
    if not ok:
        where = str(culprit) if culprit else f"output {next(o for o in outputs if not o.ok)}"
        raise click.ClickException(f"device {compiled.device!r} differs from the reference, first at {where}")


def tell_terms(given: Inputs, tolerances: Mapping[str, Tolerance]) -> None:
    """What was assumed, and what differences are allowed."""
    for note in given.notes:
        click.echo(f"assumed   {note}")
    for name, one in tolerances.items():
        click.echo(f"tolerance {name}: relative {one.relative:.2g}, absolute {one.absolute:.2g} for outputs")


def tell_truth(path: Path, compiled: CompiledGraph, given: Inputs, as_json: bool) -> None:
    """The errors of the outputs against the model in float64."""
    found: dict[str, Mapping[str, Any]] = {}
    try:
        found[f"rlx on {compiled.device}"] = compiled._named_tensors(given.arrays)
        peer = onnxruntime_outputs(path, given.arrays)
        if not isinstance(peer, str):
            found["onnxruntime"] = peer
        truth = in_f64(compiled.compilation.source)
        with progress("evaluating in float64", len(truth.graph.nodes)) as done:
            exact = run_f64(truth, given.arrays, done)
        errors = errors_of(exact, found)
    except RlxError as error:
        raise with_hint(error, given) from None
    missing = peer if isinstance(peer, str) else ""
    if as_json:
        facts = {"device": compiled.device, "assumed": given.notes, "errors": [asdict(e) for e in errors]}
        print_json({**facts, "kept": truth.kept, "onnxruntime": missing or "compared"})
        return
    tell_terms(given, {})
    for one in errors:
        click.echo(f"output    {one}")
    if not errors:
        click.echo("no output is made of floats: there is nothing to be rounded")
    if truth.kept:
        click.echo(f"kept      {len(truth.kept)} nodes in the file's own types, first {truth.kept[0]}")
    if missing:
        click.echo(f"onnxruntime is left out: {missing}")


def onnxruntime_outputs(path: Path, inputs: Mapping[str, Any]) -> dict[str, Any] | str:
    """The tensors that onnxruntime gives, by name, or why there are none."""
    if path.suffix.lower() != ".onnx":
        return "it runs .onnx files only"
    try:
        import onnxruntime
    except ImportError:
        return "it is not installed"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        asked = {i.name for i in session.get_inputs()}
        feed = {n: a.astype(object) if a.dtype.kind == "T" else a for n, a in inputs.items() if n in asked}
        made = session.run(None, feed)
        names = [o.name for o in session.get_outputs()]
    except Exception as error:  # noqa: BLE001  # its errors have no common class
        return f"{type(error).__name__}: {str(error).strip():.200}"
    return {name: a for name, a in zip(names, made, strict=True) if isinstance(a, np.ndarray)}


def used(model: CompiledGraph, given: Mapping[str, Tolerance]) -> dict[str, Tolerance]:
    """The tolerances of the outputs by element type; those of nodes are narrower, by op."""
    return {spec.dtype.name: allowed_for(spec.dtype, None, given) for spec in model.outputs}


def report(
    outputs: list[Comparison], rewritten: list[Comparison], nodes: list[Comparison], stretches: list[Comparison]
) -> None:
    """The outputs, what passes rewrote, the nodes and those that differ, and what lies between roundings."""
    for output in outputs:
        click.echo(f"output    {output}")
    if rewritten:
        good = sum(r.ok for r in rewritten)
        click.echo(f"passes    {good} of {len(rewritten)} results that they rewrote agree, each from the reference's")
    bad = [n for n in nodes if not n.ok]
    worst = max(nodes, key=lambda n: n.share, default=None)
    click.echo(f"nodes     {len(nodes) - len(bad)} of {len(nodes)} results agree, each from the reference's inputs")
    if worst is not None and not bad and worst.share:
        click.echo(f"closest   {worst}")
    for node in bad[:10]:
        click.echo(f"differs   {node}")
    if len(bad) > 10:
        click.echo(f"          and {len(bad) - 10} more")
    if stretches:
        good = sum(s.ok for s in stretches)
        click.echo(f"rounding  {good} of {len(stretches)} results agree, each from what the reference rounded before")
        if good == len(stretches):
            click.echo("          outputs differ since values beside a step were rounded to its other side")
