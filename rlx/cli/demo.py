"""`rlx demo`: a small network read by rlx, from its needs to its answers."""

from __future__ import annotations

import time
from dataclasses import asdict

import click
import numpy as np

from rlx.backends import BACKENDS, choose_backend
from rlx.backends.timing import KernelTime
from rlx.cli.bench import kernel_rows, needs_json
from rlx.cli.options import json_option
from rlx.cli.show import Timing, disturbed_lines, fastest, measure, print_json, table, working
from rlx.demo import Digits, load_digits_model, read, side_by_side
from rlx.ir.graph import Array
from rlx.ir.shape import upper
from rlx.runtime.compiled import CompiledGraph
from rlx.units import bytes_text, seconds_text

__all__ = ["demo"]

LEAST_ACCURACY = 0.95
ACROSS = 4  # images in a line


@click.command(
    help="""Compile a small network and read handwritten digits with it.

    Exit status 1 if fewer than 95 % of the digits are read right.
    """
)
@click.option("--device", type=click.Choice(["auto", *BACKENDS]), default="auto", show_default=True)
@json_option
def demo(device: str, as_json: bool) -> None:
    digits = Digits.load()
    start = time.perf_counter()
    with working("compiling the network"):
        model = load_digits_model(device, most=len(digits.images))
    compile_seconds = time.perf_counter() - start
    free = choose_backend(model.device).memory().free
    if not as_json:
        say_needs(model, free, compile_seconds)
    answers = read(model, digits.images)
    accuracy = float((answers == digits.labels).mean())
    if not as_json:
        say_answers(digits, answers, accuracy)
    with working("measuring", still=True):
        call = fastest(model)
        one = measure(lambda: call(digits.images[:1]), 0.3)
        whole = measure(lambda: call(digits.images), 0.5)
        kernels = model.profile([digits.images]) if "profile" in model.capabilities else []
    if as_json:
        facts = {"device": model.device, "accuracy": accuracy, "images": len(answers), "compile_s": compile_seconds}
        facts |= {"memory": needs_json(model), "free_memory": free}
        facts |= {"one": asdict(one), "whole": asdict(whole)}
        facts["kernels"] = [row.to_dict() for row in kernels]
        print_json(facts)
    else:
        say_times(one, whole, len(answers), kernels)
    if accuracy < LEAST_ACCURACY:
        raise click.ClickException(f"only {accuracy:.1%} of the digits were read right, {LEAST_ACCURACY:.0%} expected")


def say_needs(model: CompiledGraph, free: int | None, compile_seconds: float) -> None:
    """The network, what it takes and whether there is room."""
    click.echo(f"network   {model.inputs[0]} -> {model.outputs[0]}, device {model.device!r}")
    needs, plan = model.needs, model.plan
    if needs is not None:
        fits = "free memory unknown"
        if free is not None:
            fits = f"{bytes_text(free)} free: it {'fits' if needs.total <= free else 'does not fit'}"
        click.echo(f"needs     {bytes_text(needs.total)} ({fits})")
        parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in needs_json(model).items())
        click.echo(f"          {parts}")
    if plan is not None:
        saved = f"{bytes_text(plan.saved)} saved by sharing"
        click.echo(f"arena     {bytes_text(plan.arena)}, lower bound {bytes_text(plan.lower_bound)}, {saved}")
    click.echo(f"compiled  in {seconds_text(compile_seconds)}, for every batch up to {upper(model.inputs[0].shape[0])}")


def say_answers(digits: Digits, answers: Array, accuracy: float) -> None:
    """Some of the images with the answers, and those read wrong."""
    right = np.flatnonzero(answers == digits.labels)
    wrong = np.flatnonzero(answers != digits.labels)
    different = np.unique(digits.labels[right], return_index=True)[1]
    for title, chosen in (("some of them", right[sorted(different)[:ACROSS]]), ("read wrong", wrong[:ACROSS])):
        if not len(chosen):
            continue
        captions = [f"read {answers[i]}, is {digits.labels[i]}" for i in chosen]
        click.echo(f"\n{title}:\n{side_by_side([digits.images[i, 0] for i in chosen], captions)}")
    click.echo(f"\naccuracy  {accuracy:.1%}: {len(right)} of {len(answers)} digits that it was not trained on")


def say_times(one: Timing, whole: Timing, images: int, kernels: list[KernelTime]) -> None:
    """Latency, and where the time of the whole set goes."""
    click.echo(f"time      {seconds_text(one.median)} for one image, {seconds_text(whole.median)} for all {images}")
    if kernels:
        click.echo(f"\nwhere the time for {images} images goes:\n{table(kernel_rows(kernels), right=(0, 1))}")
        for line in disturbed_lines([row.disturbed for row in kernels]):
            click.echo(line)
