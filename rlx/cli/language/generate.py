"""`rlx generate`: the text that a language model writes after a prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from rlx.cli.language.options import for_model, loaded, loading_options, taken, writing_options
from rlx.cli.options import json_option, model_argument
from rlx.cli.show import print_json, visible
from rlx.llm.generation import Generation
from rlx.llm.model import LanguageModel

__all__ = ["generate"]


@click.command(help="Print what the language model MODEL writes after PROMPT. A PROMPT of - is read from stdin.")
@model_argument
@click.argument("prompt")
@click.option("--max-tokens", "-n", type=click.IntRange(min=1), default=128, show_default=True, help="At most so many.")
@writing_options
@click.option("--logprobs", is_flag=True, help="With --json: ln of the probability of each new token.")
@click.option("--chat", is_flag=True, help="PROMPT is what a user says, in the model's chat template.")
@click.option("--system", help="With --chat: what the model is told first.")
@loading_options
@json_option
def generate(
    model: Path,
    prompt: str,
    max_tokens: int,
    logprobs: bool,
    chat: bool,
    system: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    if system is not None and not chat:
        raise click.UsageError("--system goes with --chat")
    if logprobs and not as_json:
        raise click.UsageError("--logprobs goes with --json")
    text = sys.stdin.read() if prompt == "-" else prompt
    given = taken(options)
    llm = loaded(model, options)
    told = {**for_model(llm, given), "logprobs": logprobs}
    if chat:
        first = [] if system is None else [{"role": "system", "content": system}]
        made = llm.chat([*first, {"role": "user", "content": text}], max_tokens, **told)
    else:
        made = llm.generate(text, max_tokens, **told)
    if as_json:
        print_json(described(llm, "".join(made), made))
        return
    for piece in made:
        click.echo(visible(piece), nl=False)
    click.echo()
    click.echo(str(made.stats), err=True)
    if not chat and "default" in llm.tokenizer.chat_templates:
        click.echo("hint: this model has a chat template: with --chat it answers PROMPT as what a user says", err=True)


def described(llm: LanguageModel, text: str, made: Generation) -> dict[str, Any]:
    """What --json prints."""
    stats = made.stats
    rates = ("prompt_tokens_per_second", "tokens_per_second", "bytes_per_second")
    return {
        "device": llm.model.device,
        "text": text,
        "ids": made.ids,
        "logprobs": made.logprobs,
        "finish_reason": made.finish_reason,
        "seed": made.seed,
        **vars(stats),
        **{name: getattr(stats, name) for name in rates},
        "bandwidth_share": llm.bandwidth_share,
    }
