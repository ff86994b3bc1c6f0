"""`rlx quantize`: a model file with narrower weights, and what that costs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from rlx.cli.options import ModelType, json_option
from rlx.cli.show import loading, on_terminal, print_json
from rlx.quantiser.api import ALL_TYPES
from rlx.quantiser.api import quantize as quantize_file
from rlx.quantiser.ranges import RANGES
from rlx.units import bytes_text

__all__ = ["quantize"]


class RuleType(click.ParamType[Any]):
    """PATTERN=TYPE; gives both."""

    name = "pattern=type"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        pattern, equals, kind = value.rpartition("=")
        if not (pattern and equals and kind):
            self.fail(f"{value!r}: expected PATTERN=TYPE, such as 'blk.*.ffn_down.weight=q6_k'", param, ctx)
        return pattern, kind


@click.command(
    help="""Write the model IN with narrower weights to OUT.

    IN is an ONNX file, a GGUF file, a safetensors file or a folder with such and config.json. The ending of OUT says
    what it becomes: .onnx of ONNX, .gguf or .safetensors of the others. IN is never written to, and OUT appears whole
    or not at all.

    Tensors of one axis, small ones and what is no float stay as they are. With --activations the products of an ONNX
    model are made of 8-bit numbers, whose ranges are found on --inputs. Where --inputs are given, the outputs of both
    models are compared on them.
    """
)
@click.argument("source", metavar="IN", type=ModelType())
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--type",
    "kind",
    type=click.Choice(list(ALL_TYPES)),
    default="q8_0",
    show_default=True,
    metavar="TYPE",
    help=f"Of most weights: {', '.join(ALL_TYPES)}. ONNX files take f16, bf16, int8 (a scale for each result), q8_0 "
    "and q4_0.",
)
@click.option(
    "--tensor",
    "tensors",
    type=RuleType(),
    multiple=True,
    help="The type of tensors by their names, with * and ?; the first that matches counts; repeatable.",
)
@click.option(
    "--keep", multiple=True, metavar="PATTERN", help="Tensors that stay as they are, by name with * and ?; repeatable."
)
@click.option("--embeddings", metavar="TYPE", help="Of the table of tokens. Default: TYPE (ONNX: f16 and bf16 only).")
@click.option("--output", metavar="TYPE", help="Of the head that gives logits. Default: q6_k, or TYPE if that is more.")
@click.option("--imatrix", type=click.Path(path_type=Path), help="Importance of columns, a file of llama.cpp.")
@click.option("--save-imatrix", type=click.Path(path_type=Path), help="Keep the importance that --inputs measured.")
@click.option("--activations", type=click.Choice(["u8", "i8"]), help="With --type int8 of ONNX: round activations too.")
@click.option(
    "--inputs",
    type=click.Path(path_type=Path),
    help="Of ONNX: an .npz by name, an .npy, or a folder of these. Of a GGUF language model: a .txt that it reads to "
    "measure importance.",
)
@click.option(
    "--ranges",
    type=click.Choice(list(RANGES)),
    default="mse",
    show_default=True,
    help="Of activations: all that was seen, most of it, or the part with the least squared error.",
)
@click.option(
    "--percentile",
    type=click.FloatRange(50, 100, min_open=True),
    default=99.99,
    show_default=True,
    help="With --ranges percentile: what stays within at both ends.",
)
@click.option("--per-tensor", is_flag=True, help="With --activations: one scale for all of a matrix.")
@click.option("--threads", type=click.IntRange(min=1), help="Default: all that the machine grants.")
@click.option("--dry-run", is_flag=True, help="Say what would become of each tensor, and the size; write nothing.")
@click.option("--verbose", "-v", is_flag=True, help="Tell the errors of all tensors, not only the largest.")
@json_option
def quantize(
    source: Path,
    target: Path,
    kind: str,
    per_tensor: bool,
    dry_run: bool,
    verbose: bool,
    as_json: bool,
    **options: Any,
) -> None:
    given = {name: value for name, value in options.items() if value not in (None, ())}
    asked: dict[str, Any] = {**given, "per_channel": not per_tensor}
    if not (as_json or dry_run) and on_terminal(sys.stderr):
        planned = quantize_file(source, target, kind, dry_run=True, **asked)
        click.echo(f"about {bytes_text(planned.bytes_after)} of weights will be written", err=True)
    with loading(f"quantizing {source.name}") as told:
        made = quantize_file(source, target, kind, dry_run=dry_run, progress=told, **asked)
    if as_json:
        print_json(asdict(made))
        return
    for line in made.lines(every=verbose):
        click.echo(line)
