"""Which part of a package imports which, as a table of its folders, and the circles of its modules.

`python tools/import_table.py [rlx.backends.cpu]` prints them for a package; imports in functions count too.
"""

from __future__ import annotations

import argparse
import ast
import gc
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


@cache
def modules(package: str = "rlx") -> dict[str, Path]:
    """The modules of a package by name."""
    folder = ROOT / package.replace(".", "/")
    named = {p.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): p for p in sorted(folder.rglob("*.py"))}
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


@cache
def trees() -> dict[str, ast.Module]:
    """The syntax of every module of rlx: millions of objects, which the garbage collector is told to leave alone."""
    gc.collect()
    gc.disable()
    try:
        return {name: ast.parse(path.read_text()) for name, path in modules().items()}
    finally:
        gc.freeze()
        gc.enable()


@dataclass(frozen=True)
class Import:
    """One import of a module: its line, and whether it runs when the module is imported, or is for types only."""

    module: str
    line: int
    at_start: bool
    for_types: bool


def imports(tree: ast.Module, module: str, *, is_package: bool, known: Collection[str]) -> Iterator[Import]:
    """Every import of a module, relative and lazy ones too; `from a import b` gives a.b where that is known."""
    base = module.split(".") if is_package else module.split(".")[:-1]

    def below(node: ast.AST, at_start: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, at_start, for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = base[: len(base) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{origin}.{alias.name}"
                yield Import(full if full in known else origin, node.lineno, at_start, for_types)
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for parts, typed in ((node.body, True), (node.orelse, for_types)):
                for part in parts:
                    yield from below(part, at_start, typed)
        else:
            inner = at_start and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for inside in ast.iter_child_nodes(node):
                if isinstance(inside, ast.stmt | ast.excepthandler | ast.match_case):
                    yield from below(inside, inner, for_types)

    yield from below(tree, True, False)


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    """The imports of a module of rlx."""
    is_package = modules()[module].name == "__init__.py"
    return tuple(imports(trees()[module], module, is_package=is_package, known=modules()))


def graph_of(package: str) -> dict[str, set[str]]:
    """Each module of a package with those of the package that it imports, for more than its types."""
    found = modules(package)
    return {
        name: {i.module for i in imports_of(name) if not i.for_types and i.module in found} - {name} for name in found
    }


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
    found, graph = modules(package), graph_of(package)

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
