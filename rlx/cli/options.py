"""Options that several commands share, and the texts of dims and inputs that they parse."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from rlx.backends import BACKENDS
from rlx.disk import target_of
from rlx.errors import OptionError
from rlx.ir.dtype import DTYPES
from rlx.options import parse_bytes
from rlx.records import dataclass

__all__ = [
    "CountsType",
    "Filled",
    "InputSpec",
    "ModelType",
    "SecondsRange",
    "SizeType",
    "TargetType",
    "ToleranceType",
    "ValueType",
    "budget_option",
    "compile_options",
    "dims_of",
    "input_options",
    "json_option",
    "model_argument",
]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Filled:
    """An input of that shape whose elements are all the same number; () for a scalar."""

    shape: tuple[int, ...]
    value: bool | int | float


PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
InputSpec = Path | Filled | tuple[int, ...]
DimSpec = int | tuple[int, int] | dict[int, int | tuple[int, int] | str]


class TargetType(click.ParamType[Path]):
    """A file to be written: that it can be is seen before the work whose result it takes."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        try:
            return Path(target_of(value, self.name))
        except OptionError as error:
            self.fail(str(error), param, ctx)


class DimType(click.ParamType[Any]):
    """NAME=SIZE, NAME=LOWEST:HIGHEST, or INPUT[AXIS]= one of these or another name.

    Gives (name, int or pair), or (input, {axis: int, pair or name}).
    """

    name = "name=size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, DimSpec]:
        if isinstance(value, tuple):
            return value
        name, equals, text = value.rpartition("=")
        sizes = text.split(":")
        found = re.fullmatch(r"(.+)\[([0-9]{1,4})\]", name, re.DOTALL)
        if found is not None:
            own: Any = text if text and not text[0].isdigit() else self.convert(f"size={text}", param, ctx)[1]
            return found[1], {int(found[2]): own}
        if not (name and equals and len(sizes) <= 2 and all(s.isascii() and s.isdigit() for s in sizes)):
            self.fail(f"{value!r}: expected NAME=SIZE or NAME=LOWEST:HIGHEST, such as batch=4 or seq=1:512", param, ctx)
        numbers = [int(s) for s in sizes]
        if len(numbers) == 1:
            return name, numbers[0]
        if numbers[0] > numbers[1]:
            self.fail(f"{value!r}: the lowest size is above the highest", param, ctx)
        return name, (numbers[0], numbers[1])


class InputType(click.ParamType[Any]):
    """NAME=FILE.npy, NAME=PICTURE.png, NAME=4x1x8x8 or NAME=4x1x8x8:1; gives (name, path, shape or filled shape).

    FILE.npz alone has arrays by the names of inputs, and gives ("", path).
    """

    name = "name=file|shape[:value]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, InputSpec]:
        if isinstance(value, tuple):
            return value
        name, equals, text = value.partition("=")
        if name and equals and Path(text).suffix.lower() in (".npy", *PICTURES):
            return name, Path(text)
        if value.endswith(".npz") and not equals:
            return "", Path(value)
        if text.lower().endswith(".npz"):
            self.fail(f"{value!r}: an npz has arrays by the names of inputs: give --input {text}", param, ctx)
        shape_text, colon, number_text = text.partition(":")
        sizes = [] if shape_text == "scalar" else shape_text.split("x")
        number = _number(number_text) if colon else None
        if not (name and all(s.isascii() and s.isdigit() for s in sizes)) or (colon and number is None):
            forms = "NAME=FILE.npy, NAME=PICTURE.png, FILE.npz, NAME=SHAPE or NAME=SHAPE:VALUE"
            self.fail(f"{value!r}: expected {forms}, such as x=x.npy, x=4x1x8x8, x=4x16:1 or x=scalar:0.5", param, ctx)
        shape = tuple(int(s) for s in sizes)
        return name, shape if number is None else Filled(shape, number)


class ValueType(click.ParamType[Any]):
    """NAME=NUMBERS as in JSON, or NAME=FILE.npy; gives (name, path or numbers)."""

    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        if isinstance(value, tuple):
            return value
        name, equals, text = value.partition("=")
        if name and equals and text.lower().endswith(".npy"):
            return name, Path(text)
        try:
            numbers = json.loads(text)
        except (ValueError, RecursionError):
            numbers = None
        if not name or numbers is None or isinstance(numbers, str | dict):
            self.fail(f"{value!r}: expected NAME=NUMBERS or NAME=FILE.npy, such as axes=[1,2] or flag=true", param, ctx)
        return name, numbers


def _number(text: str) -> bool | int | float | None:
    """The number or truth value that a text gives, None if it gives none."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return None


class ToleranceType(click.ParamType[Any]):
    """DTYPE=RELATIVE or DTYPE=RELATIVE:ABSOLUTE; gives (name of the type, relative, absolute)."""

    name = "type=number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        name, _, text = value.partition("=")
        try:
            numbers = [float(part) for part in text.split(":")]
        except ValueError:
            numbers = []
        if name not in DTYPES or len(numbers) not in (1, 2) or not all(0 <= n < math.inf for n in numbers):
            floats = ", ".join(n for n, d in DTYPES.items() if d.is_float)
            self.fail(
                f"{value!r}: expected TYPE=RELATIVE or TYPE=RELATIVE:ABSOLUTE, with a type of {floats}", param, ctx
            )
        return name, numbers[0], numbers[-1]


class SizeType(click.ParamType[str]):
    """Bytes as `rlx.options.parse_bytes` reads them; gives the text."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_bytes(value)
        except OptionError:
            self.fail(f"{value!r}: expected bytes, such as 8GiB, 500MB or 100000", param, ctx)
        return str(value)


class CountsType(click.ParamType[Any]):
    """N,N,...: numbers from 1 to 1024; gives a tuple."""

    name = "n,n,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = value.split(",")
        if not all(p.isascii() and p.isdigit() and 1 <= int(p) <= 1024 for p in parts):
            self.fail(f"{value!r}: expected numbers from 1 to 1024, such as 1,2,4", param, ctx)
        return tuple(int(p) for p in parts)


class SecondsRange(click.FloatRange):
    """A range of seconds, without the NaN that is in every range and the infinity of an open one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value!r}: expected a finite number of seconds", param, ctx)
        return seconds


class ModelType(click.Path):
    """A path, whose reading is left to the importers; or the name of an example, where no file has that name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        name = os.fsdecode(super().convert(value, param, ctx))
        if os.path.basename(name) == name and "." not in name and not os.path.lexists(name):
            from rlx import demo
            from rlx.demo.fetch import entries

            if name in ("digits", *entries()):
                return demo.path(name)
        return Path(name)


def model_argument(command: F) -> F:
    """The MODEL argument."""
    return click.argument("model", metavar="MODEL", type=ModelType())(command)


def json_option(command: F) -> F:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")(command)


def budget_option(otherwise: str) -> Callable[[F], F]:
    """--budget; `otherwise` ends its help."""
    return click.option("--budget", type=SizeType(), help=f"Memory that the model may take, such as 8GiB{otherwise}")


def compile_options(command: F) -> F:
    """What is passed on to `rlx.load`, gathered in `options`: --device, --dims, --threads, --budget and others."""
    for decorate in reversed(
        (
            click.option("--device", type=click.Choice(["auto", *BACKENDS]), default="auto", show_default=True),
            click.option(
                "--dims",
                type=DimType(),
                multiple=True,
                help="Fix a dim of the model (batch=4) or bound it (seq=1:512); by input and axis (ids[1]=16, "
                "ids[1]=other) a size that shares its name with others gets its own; repeatable.",
            ),
            click.option(
                "--value",
                "values",
                type=ValueType(),
                multiple=True,
                help="Make an input of an ONNX file a constant: axes=[1,2], flag=true, or NAME=FILE.npy; repeatable.",
            ),
            click.option("--threads", type=click.IntRange(min=1), help="Default: all that the machine grants."),
            budget_option(". Default: what is free."),
            click.option(
                "--over-budget",
                type=click.Choice(["error", "warn", "allow"]),
                default="error",
                show_default=True,
                help="What to do with a model that does not fit.",
            ),
            click.option(
                "--allow-code", is_flag=True, help="MODEL may be an artifact of any name; its code is trusted."
            ),
            click.option("--portable-only", is_flag=True, help="Of an artifact, take graph and weights, not its code."),
        )
    ):
        command = decorate(command)
    return command


def input_options(command: F) -> F:
    """--input and --seed."""
    given = click.option(
        "--input",
        "inputs",
        type=InputType(),
        multiple=True,
        help="An input as NAME=FILE.npy, or NAME=PICTURE.jpg (in the size that the model takes; floats from 0 to 1); "
        "all of them as FILE.npz; NAME=4x1x8x8 for random data of that shape, or NAME=1x16:1 and "
        "NAME=scalar:0.5 for that value in each element; repeatable.",
    )
    seed = click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of random data.")
    return given(seed(command))


def dims_of(pairs: tuple[tuple[str, DimSpec], ...]) -> dict[str, DimSpec]:
    """The dims by name; a name given twice is wrong usage."""
    dims: dict[str, DimSpec] = {}
    for name, size in pairs:
        known = dims.get(name)
        if isinstance(known, dict) and isinstance(size, dict) and not known.keys() & size.keys():
            known.update(size)
        elif name in dims:
            raise click.UsageError(f"--dims gives {name!r} twice")
        else:
            dims[name] = size
    return dims
