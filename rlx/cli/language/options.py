"""What the commands of language models share: how one is loaded, and how tokens are drawn."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from rlx.backends import BACKENDS
from rlx.cli.options import budget_option
from rlx.cli.show import loading
from rlx.llm.loading import KV_DTYPES, load_llm
from rlx.llm.model import LanguageModel
from rlx.options import PRECISIONS

__all__ = ["drawn_options", "loaded", "loading_options", "of_draws", "running_options"]

F = TypeVar("F", bound=Callable[..., Any])

DRAWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "speculate")


def drawn_options(command: F) -> F:
    """--temperature and its kin, --speculate and --draft."""
    for decorate in reversed(
        (
            click.option("--temperature", type=click.FloatRange(min=0), help="Of draws. Default: 0, the likeliest."),
            click.option("--top-k", type=click.IntRange(min=0), help="With --temperature: of the likeliest so many."),
            click.option("--top-p", type=click.FloatRange(0, 1), help="With it: of the fewest that have this share."),
            click.option("--min-p", type=click.FloatRange(0, 1), help="With it: of those with this part of the best."),
            click.option(
                "--repetition-penalty", type=click.FloatRange(min=1e-6), help="Divides logits of the last 64 tokens."
            ),
            click.option(
                "--seed", type=click.IntRange(min=0), help="Of draws: equal seeds give equal texts. Default: chance."
            ),
            click.option(
                "--speculate", type=click.IntRange(0, 16), help="Guess so many tokens ahead: the same text, sooner."
            ),
            click.option(
                "--draft",
                type=click.Path(path_type=Path),
                help="A smaller model with the same tokens, for --speculate.",
            ),
        )
    ):
        command = decorate(command)
    return command


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


def of_draws(options: dict[str, Any]) -> dict[str, Any]:
    """Takes what was given of `drawn_options` out of a command's options."""
    found = {name: options.pop(name, None) for name in DRAWN}
    return {name: value for name, value in found.items() if value is not None}


def loaded(model: Path, options: Mapping[str, Any]) -> LanguageModel:
    """The model, as those options of `loading_options` say that were given."""
    given = {name: value for name, value in options.items() if value is not None}
    given["lora"] = [_scaled(text) for text in given.pop("lora", ())] or None
    with loading(f"loading {model.name}") as told:
        return load_llm(model, progress=told, **given)
