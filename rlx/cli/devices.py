"""`rlx devices`: what can be used here, and how to get the rest."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import click

from rlx.backends import BACKENDS, backend_named, choose_backend
from rlx.cli.options import json_option
from rlx.cli.show import bytes_text, print_json, table

__all__ = ["devices"]


@click.command()
@json_option
def devices(as_json: bool) -> None:
    """List the devices: what is there, what is missing and how to get it."""
    rows = [device(name) for name in BACKENDS]
    auto = choose_backend("auto").name
    if as_json:
        print_json({"auto": auto, "cores": os.cpu_count(), "devices": rows})
        return
    lines = [("device", "", "free memory", "total", "what")]
    for row in rows:
        state = "yes" if row["present"] else "no"
        what = " ".join(part for part in (row["reason"], row["remedy"]) if part)
        memory = row["memory"]
        lines.append((row["name"], state, bytes_text(memory["free"]), bytes_text(memory["total"]), what))
    click.echo(table(lines, right=(2, 3)))
    click.echo(f"auto is {auto!r}")


def device(name: str) -> dict[str, Any]:
    """What is known of a device, as JSON values."""
    backend = backend_named(name)
    return {"name": name, **asdict(backend.available()), "memory": asdict(backend.memory())}
