"""`rlx cache`: what is kept on disk from earlier compiles, its bytes, and how to have less of it."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import click

from rlx.cli.options import json_option
from rlx.cli.show import print_json, table
from rlx.disk import LIMIT, cache_folder, evict, keep_limit, kept_limit, parts_of_limit
from rlx.options import parse_bytes
from rlx.units import bytes_text

__all__ = ["cache"]

WHAT = {
    "artifacts": "whole models with their packed weights, for the next load of their files",
    "objects": "machine code of single kernels",
    "models": "example models that rlx fetch brought",
    "": "measurements of this machine",
}  # by the folder inside the cache


@click.group(help="Show what earlier compiles left on disk, or delete it.", invoke_without_command=True)
@json_option
@click.pass_context
def cache(context: click.Context, as_json: bool) -> None:
    if context.invoked_subcommand is not None:
        return
    folder, limit = cache_folder(), kept_limit()
    found = {name or "measurements": (*totals(folder / name), what) for name, what in WHAT.items()}
    if as_json:
        parts = {name: {"files": count, "bytes": size} for name, (count, size, _) in found.items()}
        print_json({"folder": str(folder), "limit": limit, "parts": parts})
        return
    lines = [("part", "files", "size", "what")]
    lines += [(name, str(count), bytes_text(size), what) for name, (count, size, what) in found.items()]
    click.echo(str(folder))
    click.echo(table(lines, right=(1, 2)))
    own = "rlx cache limit 1GiB sets one" if limit is None else f"{bytes_text(limit)}, set by rlx cache limit"
    most = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts_of_limit().items())
    click.echo(f"limit: {own}; at most {most}, the least recently used go first")


@cache.command(help="Delete what is kept; measurements stay unless --all.")
@click.option("--older-than", type=click.FloatRange(min=0), default=0.0, help="Only what was unused for so many days.")
@click.option("--all", "everything", is_flag=True, help="Measurements of this machine too.")
def clear(older_than: float, everything: bool) -> None:
    before = time.time() - older_than * 86400
    count = size = 0
    for name in WHAT if everything else [name for name in WHAT if name]:
        for path in files(cache_folder() / name):
            with suppress(OSError):  # another process deleted it, or it is not ours
                status = path.stat()
                if status.st_mtime <= before:
                    path.unlink()
                    count, size = count + 1, size + status.st_size
    click.echo(f"deleted {count} files, {bytes_text(size)}")


@cache.command(
    help="Keep at most SIZE in future, such as 2GiB, and delete what is above it; `none`: the usual limits. Without "
    "SIZE: print the limit."
)
@click.argument("size", required=False)
def limit(size: str | None) -> None:
    if size is not None:
        keep_limit(None if size.lower() == "none" else parse_bytes(size, "SIZE"))
        for name, most in parts_of_limit().items():
            evict(files(cache_folder() / name), most, most)
    kept = kept_limit()
    own = "the usual limits" if kept is None else f"at most {bytes_text(kept)}"
    parts = ", ".join(f"{name} {bytes_text(most)}" for name, most in parts_of_limit().items())
    click.echo(f"{own}: {parts}")


def files(folder: Path) -> list[Path]:
    """The files of a folder but what `rlx cache limit` set, none where it is not there."""
    with suppress(OSError):
        found = folder.glob("*/*") if folder.name == "models" else folder.iterdir()  # these lie in a folder each
        return [path for path in found if path.is_file() and path.name != LIMIT]
    return []


def totals(folder: Path) -> tuple[int, int]:
    """How many files a folder has, and their bytes."""
    sizes = []
    for path in files(folder):
        with suppress(OSError):
            sizes.append(path.stat().st_size)
    return len(sizes), sum(sizes)
