"""Writes docs/reference.md: every public name with its signature, docstring and examples. `make docs` does so too.

usage: python tools/api_reference.py

The examples are those of the other pages, which run as tests: a name is linked to the sections whose snippets use it.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import rlx

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "reference.md"
MOST = 3  # examples linked for a name
HEAD = """# API reference

Made of the docstrings by `make docs`. Below each name are sections with examples of it;
[the API by example](api.md) is the shorter way in. Functions of ops, `rlx.softmax` and the like, are listed at the end.

"""
CLASSES = ["CompiledGraph", "Session", "Graph"]  # of which methods have examples of their own
LESSONS = {"adding-a-backend.md", "adding-a-strategy.md"}  # about what lies inside
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def sections() -> dict[str, str]:
    """The python blocks of the pages by the place that a link leads to, `functions.md#numpy`, in the pages' order."""
    found: dict[str, str] = {}
    for page in sorted(DOCS.glob("*.md")):
        if page in (PAGE, DOCS / "design.md") or page.name in LESSONS:
            continue
        parts = re.split(r"^(#{1,4} .+)$", page.read_text(), flags=re.MULTILINE)
        for heading, body in zip(parts[1::2], parts[2::2], strict=True):
            code = "\n".join(FENCE.findall(body))
            if code:
                title = heading.lstrip("# ")
                slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
                found[f"[{title}]({page.name}#{slug})"] = code
    return found


def users(pattern: str, places: dict[str, str]) -> list[str]:
    """Links to the sections that use what a pattern matches: those with the least code first."""
    return sorted((link for link, code in places.items() if re.search(pattern, code)), key=lambda k: len(places[k]))


def signature(value: Any, name: str) -> str:
    """`name(parameters)` without annotations, which the docstring says in words; the name alone if it has none."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    shown = [p.replace(annotation=p.empty) for p in found.parameters.values() if p.name not in ("self", "cls")]
    text = name + re.sub(r"<[^>]+>", "...", str(found.replace(parameters=shown, return_annotation=found.empty)))
    if len(text) <= 88:  # a line of the page
        return text
    lines = [f"    {re.sub('<[^>]+>', '...', str(p))}," for p in shown]
    if named := [i for i, p in enumerate(shown) if p.kind is p.KEYWORD_ONLY]:
        lines.insert(named[0], "    *,")
    return "\n".join([f"{name}(", *lines, ")"])


def text_of(value: Any) -> str:
    """A docstring as Markdown; indented blocks become code."""
    doc = inspect.getdoc(value) or ""
    lines, inside = [], False
    for line in doc.splitlines():
        indented = line.startswith("    ") or (inside and not line)
        if indented != inside:
            lines.append("```text" if indented else "```")
            inside = indented
        lines.append(line)
    return "\n".join([*lines, *(["```"] if inside else [])])


def without_example() -> list[str]:
    """The public names that no other page shows in code."""
    places = sections()
    modules = [name for name in rlx.__all__ if inspect.ismodule(getattr(rlx, name))]
    return [name for name in rlx.__all__ if name not in modules and not users(rf"\brlx\.{name}\b", places)]


def entry(name: str, value: Any, places: dict[str, str], level: int, pattern: str) -> str:
    """One name: heading, signature, docstring, and where examples are."""
    shown = [f"{'#' * level} `{name}`\n"]
    if callable(value) and not isinstance(value, ModuleType):
        shown.append(f"```text\n{signature(value, name)}\n```\n")
    shown.append(f"{text_of(value)}\n")
    if value is rlx.CompileOptions:
        shown.append(options_table())
    links = users(pattern, places)[:MOST]
    if links:
        shown.append(f"Examples: {', '.join(links)}.\n")
    return "\n".join(shown)


def members(cls: type) -> dict[str, Any]:
    """The public methods and properties of a class that have a docstring, in the order of their names."""
    found = {}
    for name in sorted(dir(cls)):
        value = inspect.getattr_static(cls, name)
        value = getattr(value, "__func__", value)
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)) and value.__doc__:
            found[name] = value
    return found


def options_table() -> str:
    """Each option with its default and the comment that stands behind it."""
    lines = re.findall(r"^    (\w+): .+? = (.+?)  # (.+)$", inspect.getsource(rlx.CompileOptions), re.MULTILINE)
    rows = [f"| `{name}` | `{default}` | {meaning} |" for name, default, meaning in lines]
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows]) + "\n"


def errors_table() -> str:
    rows = ["| class | is a | meaning |", "|---|---|---|"]
    for name in rlx.errors.__all__:
        cls = getattr(rlx.errors, name)
        if issubclass(cls, Exception):
            bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
            rows.append(f"| `rlx.errors.{name}` | {bases} | {(inspect.getdoc(cls) or '').splitlines()[0]} |")
    return "\n".join(rows) + "\n"


def ops_list() -> str:
    """The functions of ops by the family that they are in."""
    families: dict[str, list[str]] = defaultdict(list)
    for name, cls in sorted(rlx.ops.OPS.items()):
        families[cls.__module__.rpartition(".")[2]].append(f"`{name}`")
    rows = [f"| {family} | {', '.join(names)} |" for family, names in sorted(families.items())]
    return "\n".join(["| family | functions |", "|---|---|", *rows]) + "\n"


def page() -> str:
    """The whole page."""
    places = sections()
    parts = [HEAD]
    for name in rlx.__all__:
        value = getattr(rlx, name)
        if inspect.ismodule(value) and name in ("errors", "numpy", "ops"):
            continue  # below, and docs/functions.md
        parts.append(entry(f"rlx.{name}", value, places, 2, rf"\brlx\.{name}\b"))
        if name in CLASSES:
            for method, what in members(value).items():
                parts.append(entry(f"{name}.{method}", what, places, 3, rf"\w\.{method}\b"))
    parts += ["## `rlx.errors`\n", errors_table()]
    calls = "Each is `rlx.NAME(values..., attributes...)`; [ONNX support](onnx-support.md) says which op is which.\n"
    parts += ["## Functions of ops\n", calls]
    parts.append(ops_list())
    return "\n".join(parts)


def main() -> None:
    """Writes the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
