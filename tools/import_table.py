"""Which part of a package imports which, as a table of its folders, and the circles of its modules.

`python tools/import_table.py [rlx.backends.cpu]` prints them for a package; imports in functions count too.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def modules(package: str) -> dict[str, Path]:
    """The modules of a package by name."""
    folder = ROOT / package.replace(".", "/")
    named = {p.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): p for p in folder.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


def imports(path: Path, known: set[str]) -> Iterator[str]:
    """The modules of `known` that a file imports anywhere, not those under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    typing = {
        id(n)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for n in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                if inner in known:
                    yield inner
                elif node.module in known:
                    yield node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in known)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The sets of modules that import each other (strongly connected, of more than one)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(v: str) -> None:
        index[v] = low[v] = len(index)
        stack.append(v)
        for w in sorted(graph[v]):
            if w not in index:
                visit(w)
                low[v] = min(low[v], low[w])
            elif w in stack:
                low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            part = stack[stack.index(v) :]
            del stack[stack.index(v) :]
            if len(part) > 1:
                found.append(sorted(part))

    for v in sorted(graph):
        if v not in index:
            visit(v)
    return found


def listed(pairs: Collection[str], most: int = 9) -> str:
    """The first of some names, and how many are left."""
    more = f", {len(pairs) - most} more" if len(pairs) > most else ""
    return ", ".join(sorted(pairs)[:most]) + more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="?", default="rlx.backends.cpu")
    package = parser.parse_args().package
    found = modules(package)
    graph = {name: set(imports(path, set(found))) - {name} for name, path in found.items()}

    def part(name: str) -> str:
        rest = name.removeprefix(package).lstrip(".").split(".")
        return rest[0] if len(rest) > 1 or found[name].name == "__init__.py" else f"{rest[0]}.py"

    table: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, targets in graph.items():
        for target in targets:
            if part(name) != part(target):
                table[part(name)][part(target)].append(f"{name.rpartition('.')[2]}→{target.rpartition('.')[2]}")
    for row, columns in sorted(table.items()):
        cells = (f"{column} ({listed(pairs)})" for column, pairs in sorted(columns.items()))
        print(f"{row}: {'; '.join(cells)}")
    for circle in circles(graph):
        print("circle:", ", ".join(n.removeprefix(f"{package}.") for n in circle))


if __name__ == "__main__":
    main()
