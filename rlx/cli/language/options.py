"""What the commands of language models share: how one is loaded, and how it writes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from rlx.backends import BACKENDS
from rlx.cli.options import budget_option
from rlx.cli.show import loading
from rlx.disk import read_regular
from rlx.llm.loading import KV_DTYPES, load_llm
from rlx.llm.model import LanguageModel
from rlx.llm.options import MOST_GUESSES, NUMBERS, OVERFLOWS, Number
from rlx.options import PRECISIONS

__all__ = ["for_model", "loaded", "loading_options", "running_options", "taken", "writing_options"]

F = TypeVar("F", bound=Callable[..., Any])

FORMS = ("json_schema", "regex", "grammar", "choice")  # methods of `LanguageModel.constraints`, and options
OTHERS = ("stop", "ignore_eos", "overflow", "speculate", "adapter", "logit_bias", "dry_breakers", *FORMS)


class BiasType(click.ParamType[Any]):
    """TOKEN=NUMBER; gives both."""

    name = "token=number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        token, _, number = value.partition("=")
        try:
            return int(token), float(number)
        except ValueError:
            self.fail(f"{value!r}: expected TOKEN=NUMBER, such as 17=-2.5 or 17=-inf", param, ctx)


class FormType(click.ParamType[str]):
    """A file, whose text it gives, or where that is allowed an object of JSON."""

    name = "file"

    def __init__(self, *, inline: bool) -> None:
        self.inline = inline

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if self.inline and value.lstrip().startswith("{"):
            return str(value)
        try:
            return read_regular(value).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self.fail(f"{value!r}: can't be read: {error}", param, ctx)


def writing_options(command: F) -> F:
    """How a text is written: every option of `LanguageModel.generate` but `max_tokens` and `logprobs`, and --draft."""
    options = [_number_option(name, number) for name, number in NUMBERS.items()]
    options += [
        _option("--logit-bias", "Added to a token's logit; repeatable.", type=BiasType(), multiple=True),
        _option("--dry-breakers", "Of DRY: a token that no repetition reaches over.", type=int, multiple=True),
        _option("--stop", "End before this text; repeatable.", multiple=True),
        _option("--ignore-eos", "Go on after the token that ends an answer.", is_flag=True),
        _option("--overflow", "Where the context is full. Default: error.", type=click.Choice(OVERFLOWS)),
        _option("--json-schema", "The answer is JSON that fits this schema.", type=FormType(inline=True)),
        _option("--regex", "The answer matches this regular expression, as a whole."),
        _option("--grammar", "The answer is of this grammar (GBNF or Lark).", type=FormType(inline=False)),
        _option("--choice", "The answer is one of these texts; repeatable.", multiple=True),
        _option("--adapter", "Of several --lora: this one alone, by its name."),
        _option("--speculate", "Guess so many tokens ahead: the same text.", type=click.IntRange(0, MOST_GUESSES)),
        _option("--draft", "A smaller model with the same tokens, for --speculate.", type=click.Path(path_type=Path)),
    ]
    for decorate in reversed(options):
        command = decorate(command)
    return command


def _option(name: str, what: str, **more: Any) -> Callable[[F], F]:
    return click.option(name, help=what, **more)


def _number_option(name: str, number: Number) -> Callable[[F], F]:
    """The option of a number of `Sampling`."""
    low, high = number.low, number.high
    kind: Any = click.IntRange if isinstance(low, int) else click.FloatRange
    return _option("--" + name.replace("_", "-"), number.what, type=kind(low, None if high == math.inf else high))


def loading_options(command: F) -> F:
    """--context, --kv-dtype, and those of `running_options`."""
    context = click.option(
        "--context", type=click.IntRange(min=1), help="Tokens of context. Default: the model's, 4096 at most."
    )
    kind = click.option(
        "--kv-dtype", type=click.Choice(KV_DTYPES), default="f32", show_default=True, help="The type of the cache."
    )
    lora = click.option(
        "--lora",
        multiple=True,
        metavar="PATH[=SCALE]",
        help="A LoRA adapter, a folder of PEFT or a GGUF file, and what it is multiplied by; repeatable.",
    )
    return context(kind(lora(running_options(command))))


def running_options(command: F) -> F:
    """--precision, --device, --threads and --budget."""
    for decorate in reversed(
        (
            click.option(
                "--precision",
                type=click.Choice(list(PRECISIONS)),
                default="f32",
                show_default=True,
                help="What products multiply. bf16, f16: numbers of 16 bits, so weights take 2 bytes. q8: activations "
                "are rounded to 8 bits for weights of 8 bits or fewer; faster.",
            ),
            click.option("--device", type=click.Choice(["auto", *BACKENDS]), default="auto", show_default=True),
            click.option("--threads", type=click.IntRange(min=1), help="Default: all that the machine grants."),
            budget_option(". Default: what is free."),
        )
    ):
        command = decorate(command)
    return command


def _scaled(text: str) -> tuple[str, float]:
    """Path and scale of an adapter, PATH or PATH=SCALE."""
    path, sign, scale = text.rpartition("=")
    if not sign or os.path.exists(text):
        return text, 1.0
    try:
        return path, float(scale)
    except ValueError:
        raise click.UsageError(f"--lora {text}: expected PATH=SCALE, with a number") from None


def taken(options: dict[str, Any]) -> dict[str, Any]:
    """Takes what was given of `writing_options` out of a command's options. Raises `UsageError` for two forms."""
    found = {name: options.pop(name, None) for name in (*NUMBERS, *OTHERS)}
    given = {name: value for name, value in found.items() if value is not None and value is not False and value != ()}
    forms = [f"--{name.replace('_', '-')}" for name in FORMS if name in given]
    if len(forms) > 1:
        raise click.UsageError(f"{' and '.join(forms)}: an answer has one form")
    return given


def for_model(llm: LanguageModel, given: Mapping[str, Any]) -> dict[str, Any]:
    """What `taken` gave as keywords of `LanguageModel.generate`."""
    found = {name: value for name, value in given.items() if name not in FORMS}
    if "logit_bias" in found:
        found["logit_bias"] = dict(found["logit_bias"])
    for form in given.keys() & set(FORMS):
        found["constraint"] = getattr(llm.constraints, form)(given[form])
    return found


def loaded(model: Path, options: Mapping[str, Any]) -> LanguageModel:
    """The model, as those options of `loading_options` say that were given."""
    given = {name: value for name, value in options.items() if value is not None}
    given["lora"] = [_scaled(text) for text in given.pop("lora", ())] or None
    with loading(f"loading {model.name}") as told:
        return load_llm(model, progress=told, **given)
