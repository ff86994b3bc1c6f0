"""Writes docs/json.md, the fields of what commands print with --json, anew: python tools/json_fields.py"""

from __future__ import annotations

import argparse
import ast
import inspect
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

from rlx.cli.schema import VERSION, outputs, parts

Field = tuple[str, ast.expr, str]  # name, type, meaning
PAGE = Path(__file__).parents[1] / "docs" / "json.md"
HEAD = """# JSON fields

Every command takes `--json` and prints one object; this page lists its fields. It is made of the types in
`rlx/cli/schema` by `python tools/json_fields.py`, and tests compare what each command prints with them.

- `schema` is the version of this page, now **{version}**. A version may get more fields, so leave those that you don't
  know alone; where a field goes, or means something else, the number grows.
- Sizes are bytes and times are seconds, unless a field says something else. Numbers that JSON lacks are the texts
  "nan", "inf" and "-inf".
- Messages and progress go to stderr. Where a command fails before it has something to print, stdout is empty; the exit
  status says whether it failed: `rlx estimate --budget` and `rlx verify` print their object and have status 1 as well.

```sh
rlx run rlx/demo/digits.onnx --input image=1x1x8x8 --json
rlx estimate rlx/demo/digits.onnx --dims batch=1:8 --budget 1GiB --json
```
"""


def fields_of(module: ModuleType) -> dict[str, tuple[str, list[str], list[Field]]]:
    """By class: what it is, the classes that it extends, and (name, type, meaning) of its own fields."""
    source = inspect.getsource(module)
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        rows = []
        for item in node.body:
            if isinstance(item, ast.AnnAssign):
                _, _, comment = lines[item.lineno - 1].partition("  # ")
                rows.append((ast.unparse(item.target), item.annotation, comment))
        bases = [ast.unparse(base) for base in node.bases if ast.unparse(base) != "TypedDict"]
        found[node.name] = (ast.get_docstring(node) or "", bases, rows)
    return found


WORDS = {"str": "text", "Path": "text", "float": "number", "Number": "number", "Extents": "sizes by dim"}


def words(kind: ast.expr, known: Collection[str]) -> str:
    """A type in words; other objects are links."""
    match kind:
        case ast.Name(id=name):
            return f"[{name}](#{name.lower()})" if name in known else WORDS.get(name, name)
        case ast.Constant(value=value):
            return "null" if value is None else f'"{value}"' if isinstance(value, str) else str(value)
        case ast.BinOp(left=first, right=second):
            return f"{words(first, known)} or {words(second, known)}"
        case ast.Subscript(value=ast.Name(id="NotRequired"), slice=inner):
            return f"{words(inner, known)} (may be left out)"
        case ast.Subscript(value=ast.Name(id="list"), slice=inner):
            return f"list of {words(inner, known)}"
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[_, inner])):
            return f"by name: {words(inner, known)}"
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=parts)):
            return f"[{', '.join(words(part, known) for part in parts)}]"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=parts)):
            return " or ".join(words(part, known) for part in parts)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            return words(inner, known)
    raise ValueError(ast.unparse(kind))


def table(rows: list[Field], known: Collection[str]) -> str:
    lines = ["| field | type | meaning |", "|---|---|---|"]
    lines += [f"| `{name}` | {words(kind, known)} | {meaning} |" for name, kind, meaning in rows]
    return "\n".join(lines)


def page() -> str:
    """The page."""
    of_outputs, of_parts = fields_of(outputs), fields_of(parts)
    known = of_parts.keys()
    every = {**of_parts, **of_outputs}

    def rows(name: str) -> list[Field]:
        _, bases, own = every[name]
        inherited = [row for base in bases for row in rows(base)]
        first = [row for row in inherited if row[0] == "schema"]
        return [*first, *own, *(row for row in inherited if row[0] != "schema")]

    text = [HEAD.format(version=VERSION), "## Commands\n"]
    for command, kinds in outputs.OUTPUTS.items():
        for kind in kinds:
            title = every[kind.__name__][0].strip(".")
            assert command in title
            text.append(f"### {title}\n\n{table(rows(kind.__name__), known)}\n")
    text.append("## Objects\n")
    for name, (meaning, _, _) in of_parts.items():
        text.append(f"### {name}\n\n{meaning}\n\n{table(rows(name), known)}\n")
    return "\n".join(text)


def main() -> None:
    """Writes the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
