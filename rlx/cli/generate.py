"""`rlx generate`: the text that a language model writes after a prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from rlx.backends import BACKENDS
from rlx.cli.options import budget_option, json_option, model_argument
from rlx.cli.show import loading, print_json
from rlx.llm.generation import Generation
from rlx.llm.loading import KV_DTYPES, load_llm
from rlx.llm.model import LanguageModel
from rlx.options import PRECISIONS

__all__ = ["generate"]

DRAWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


@click.command(help="Print what the language model MODEL writes after PROMPT. A PROMPT of - is read from stdin.")
@model_argument
@click.argument("prompt")
@click.option("--max-tokens", "-n", type=click.IntRange(min=1), default=128, show_default=True, help="At most so many.")
@click.option("--stop", multiple=True, help="End before this text; may be repeated.")
@click.option("--temperature", type=click.FloatRange(min=0), help="Of draws. Default: 0, the likeliest token.")
@click.option("--top-k", type=click.IntRange(min=0), help="With --temperature: draw of the likeliest so many tokens.")
@click.option("--top-p", type=click.FloatRange(0, 1), help="With --temperature: of the fewest that have this share.")
@click.option("--min-p", type=click.FloatRange(0, 1), help="With --temperature: of those with this part of the best.")
@click.option("--repetition-penalty", type=click.FloatRange(min=1e-6), help="Divides logits of the last 64 tokens.")
@click.option("--seed", type=click.IntRange(min=0), help="Of draws: equal seeds give equal texts. Default: chance.")
@click.option("--chat", is_flag=True, help="PROMPT is what a user says, in the model's chat template.")
@click.option("--system", help="With --chat: what the model is told first.")
@click.option("--context", type=click.IntRange(min=1), help="Tokens of context. Default: the model's, 4096 at most.")
@click.option(
    "--kv-dtype", type=click.Choice(KV_DTYPES), default="f32", show_default=True, help="What the cache is stored in."
)
@click.option(
    "--precision",
    type=click.Choice(list(PRECISIONS)),
    default="f32",
    show_default=True,
    help="q8: activations are rounded to 8 bits before they are multiplied with weights of 8 bits or fewer; faster.",
)
@click.option("--device", type=click.Choice(["auto", *BACKENDS]), default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="Default: all that the machine grants.")
@budget_option(". Default: what is free.")
@json_option
def generate(
    model: Path,
    prompt: str,
    max_tokens: int,
    stop: tuple[str, ...],
    chat: bool,
    system: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    if system is not None and not chat:
        raise click.UsageError("--system goes with --chat")
    text = sys.stdin.read() if prompt == "-" else prompt
    given = {name: value for name, value in options.items() if value is not None}
    drawn = {name: given.pop(name) for name in DRAWN if name in given}
    with loading(f"loading {model.name}") as told:
        llm = load_llm(model, progress=told, **given)
    if chat:
        first = [] if system is None else [{"role": "system", "content": system}]
        made = llm.chat([*first, {"role": "user", "content": text}], max_tokens, stop=stop, **drawn)
    else:
        made = llm.generate(text, max_tokens, stop=stop, **drawn)
    if as_json:
        print_json(described(llm, "".join(made), made))
        return
    for piece in made:
        click.echo(piece, nl=False)
    click.echo()
    click.echo(str(made.stats), err=True)
    if not chat and "default" in llm.tokenizer.chat_templates:
        click.echo("hint: this model has a chat template: with --chat it answers PROMPT as what a user says", err=True)


def described(llm: LanguageModel, text: str, made: Generation) -> dict[str, Any]:
    """What --json prints."""
    stats = made.stats
    rates = {name: getattr(stats, name) for name in ("prompt_tokens_per_second", "tokens_per_second")}
    return {
        "device": llm.model.device,
        "text": text,
        "ids": made.ids,
        "finish_reason": made.finish_reason,
        "seed": made.seed,
        **vars(stats),
        **rates,
    }
