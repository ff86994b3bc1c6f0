"""`rlx devices`: what can be used here, and how to get the rest."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import click

from rlx.backends import BACKENDS, BY_NAME, backend_named
from rlx.cli.options import json_option
from rlx.cli.show import print_json, table
from rlx.cost.kept import kept_ceilings
from rlx.units import bytes_text

__all__ = ["devices"]


@click.command(help="List the devices, and how to get those that are missing.")
@json_option
def devices(as_json: bool) -> None:
    rows = [device(name) for name in BACKENDS]
    auto = [row["name"] for row in rows if row["present"] and row["name"] not in BY_NAME]
    if as_json:
        print_json({"auto": auto, "cores": os.cpu_count(), "devices": rows})
        return
    lines = [("device", "available", "calibrated", "free memory", "total", "what")]
    for row in rows:
        state = "yes" if row["present"] else "no"
        what = ": ".join(part for part in (row["reason"], row["remedy"]) if part)
        memory = row["memory"]
        sizes = bytes_text(memory["free"]), bytes_text(memory["total"])
        lines.append((row["name"], state, "yes" if row["calibrated"] else "no", *sizes, what))
    click.echo(table(lines, right=(3, 4)))
    for row in rows:
        if row["capabilities"]:
            click.echo(f"{row['name']} offers {', '.join(row['capabilities'])}")
    click.echo(f"auto chooses among {', '.join(auto) or 'none'}, by what a graph is predicted to take")


def device(name: str) -> dict[str, Any]:
    """What is known of a device, as JSON values."""
    backend = backend_named(name)
    found = backend.available()
    return {
        "name": name,
        **asdict(found),
        "memory": asdict(backend.memory()),
        "capabilities": sorted(backend.capabilities),
        "calibrated": found.present and kept_ceilings(name) is not None,
    }
