"""The one-way dependencies between the parts of rlx, read from its imports (those inside functions too)."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from import_table import circles, graph_of, imports, imports_of, modules, trees

from rlx.backends import BACKENDS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rlx"

EXCHANGE = {"backends.array", "backends.dlpack"}  # arrays as the runtime and devices hand them to one another
COMPILER_PARTS = {"ir", "ops", "passes", "kernels", "plan", "backends", "backends.base", "backends.granted"} | EXCHANGE
COMPILER_PARTS |= {"backends.strings", "backends.timing", "backends.memory"}

# part -> the parts that it may import, besides itself and ANYONE
ANYONE = {
    "arithmetic", "boundary", "errors", "forks", "lazy_imports", "options", "disk", "records", "tables", "table_writer",
    "units", "html", "install", "progress", "code_times", "heap", "machine",
}  # fmt: skip
ALLOWED: dict[str, set[str]] = {
    "arithmetic": set(),
    "boundary": set(),
    "errors": set(),
    "options": {"ir"},
    "disk": set(),
    "forks": set(),
    "lazy_imports": set(),
    "records": set(),
    "tables": set(),
    "table_writer": set(),
    "units": set(),
    "html": set(),
    "install": set(),
    "progress": set(),
    "code_times": set(),
    "heap": set(),
    "machine": set(),
    "ir": set(),
    "ops": {"ir"},
    "passes": {"ir", "ops"},
    "kernels": {"ir", "ops"},
    "plan": {"ir", "kernels"},
    "backends.array": {"ir"},
    "backends.dlpack": {"ir"},
    "backends.timing": set(),
    "backends.memory": set(),
    "backends.base": {"ir", "ops", "kernels", "plan", "backends.array", "backends.timing", "backends.memory"},
    "backends.states": {"backends.base"},
    "backends.granted": set(),
    "backends.strings": {"ir", "kernels", "backends.base", "backends.timing"},
    "backends.codegen": {"ir", "ops", "kernels", "plan", "backends.array", "backends.base", "backends.states"}
    | {"backends.timing"},
    "importers": {"ir", "ops"},
    "compiler": COMPILER_PARTS,
    "cost": COMPILER_PARTS | {"compiler"},
    "estimate": COMPILER_PARTS | {"compiler", "importers", "models"},
    "runtime": COMPILER_PARTS | {"compiler", "cost", "importers", "estimate"},
    "models": {"ir", "ops", "passes", "numpy", "importers"},
    "llm": {"ir", "models", "runtime", "estimate", "cost"},
    "trace": {"ir", "ops", "runtime"},
    "transform": {"ir", "ops", "passes", "trace"},
    "dynamo": {"runtime"},
    "quantiser": {"ir", "ops", "importers", "runtime", "models", "rlx", "backends.granted"},
    "numpy": {"ops"},
    "rlx": COMPILER_PARTS
    | {
        "compiler",
        "cost",
        "forks",
        "importers",
        "estimate",
        "runtime",
        "trace",
        "transform",
        "numpy",
        "quantiser",
    },  # rlx/__init__.py
    "demo": {"ir", "runtime", "rlx"},
    "__main__": {"cli"},
    "cli": COMPILER_PARTS
    | {"compiler", "cost", "importers", "estimate", "runtime", "testing", "rlx", "demo", "llm", "quantiser"},
}
A_BACKEND = {
    "ir", "ops", "kernels", "plan", "backends.base", "backends.states", "backends.granted", "backends.codegen",
    "backends.timing", "backends.memory", "backends.library",
} | EXCHANGE  # fmt: skip
# What differentiates is above what it can be asked of: loaded where it is asked for, in a function, and listed here.
UPWARDS = {("estimate", "rlx.transform.functions"), ("importers", "rlx.transform.functions")}
BASE_PARTS = {"boundary", "errors", "ir", "disk", "lazy_imports", "records", "units"}  # below `options`


def part_of(module: str) -> str:
    """The part that a dotted module name belongs to: rlx.ir.graph -> ir, rlx.backends.cpu.emit -> backends.cpu."""
    names = module.split(".")
    if len(names) == 1:
        return "rlx"
    if names[1] == "backends" and len(names) > 2:
        return f"backends.{names[2]}"
    return names[1]


def may_import(part: str) -> set[str] | None:
    """The parts that a part may import, or None when the table does not know it."""
    if part == "testing":  # for authors of backends: may look into every one, and nobody but cli needs it
        return parts() - {"cli", "demo"}
    if part == "backends":  # the registry knows every backend
        return {other for other in parts() if other.startswith("backends.")} | A_BACKEND | ANYONE
    if part.startswith("backends.") and part not in ALLOWED:
        return A_BACKEND | ANYONE
    if part not in ALLOWED:
        return None
    return ALLOWED[part] | (
        {"arithmetic", "boundary", "errors", "install", "lazy_imports", "records", "units"}
        if part in BASE_PARTS
        else ANYONE
    )


def parts() -> set[str]:
    return {part_of(name) for name in modules()}


@cache
def nodes(module: str) -> list[ast.AST]:
    return list(ast.walk(trees()[module]))


def rlx_imports(module: str) -> list[tuple[int, str]]:
    """The lines and names of what a module imports of rlx, but for `UPWARDS`."""
    own = [i for i in imports_of(module) if i.module.split(".")[0] == "rlx"]
    return [(i.line, i.module) for i in own if i.at_start or (part_of(module), i.module) not in UPWARDS]


@pytest.mark.parametrize(
    "source, expected",
    [
        ("import rlx.ir.graph", "rlx.ir.graph"),
        ("from rlx.ir import graph", "rlx.ir.graph"),
        ("from rlx.ir.graph import Graph", "rlx.ir.graph"),
        ("from . import emit", "rlx.plan"),
        ("from .. import ir", "rlx.ir"),
        ("from ..ir.graph import Graph", "rlx.ir.graph"),
        ("def f():\n    def g():\n        from rlx import ir", "rlx.ir"),
        ("class A:\n    import rlx.ir", "rlx.ir"),
    ],
)
def test_imports_are_found(source: str, expected: str) -> None:
    """The reader behind this file's tests sees absolute, relative and lazy imports."""
    known = {"rlx", "rlx.ir", "rlx.ir.graph", "rlx.plan", "rlx.plan.pack"}
    found = imports(ast.parse(source), "rlx.plan.pack", is_package=False, known=known)
    assert [i.module for i in found] == [expected]


def test_every_part_is_in_the_table() -> None:
    """A new part of the package has to say what it depends on before anything may land in it."""
    unknown = sorted(part for part in parts() if may_import(part) is None)
    assert not unknown, f"add to ALLOWED in tests/test_structure.py what may be imported by: {unknown}"


def test_dependencies_point_one_way() -> None:
    """No module imports a part that the table keeps from it."""
    wrong = []
    for module, path in modules().items():
        own = part_of(module)
        allowed = may_import(own) or set()
        wrong += [
            f"{path.relative_to(ROOT)}:{line}: {own} may not import {name}"
            for line, name in rlx_imports(module)
            if part_of(name) not in allowed | {own}
        ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_parts_have_no_cycle() -> None:
    """The parts can be put in an order in which each imports only earlier ones."""
    graph: dict[str, set[str]] = {part: set() for part in parts()}
    for module in modules():
        graph[part_of(module)] |= {part_of(name) for _, name in rlx_imports(module)} - {part_of(module)}
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"import cycle between parts: {' <- '.join(error.args[1])}", pytrace=False)


def test_only_required_dependencies_are_imported_at_start() -> None:
    """What rlx imports outside functions is the standard library or a required dependency of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in project["dependencies"]}
    allowed = required | set(sys.stdlib_module_names) | {"rlx"}
    wrong = [
        f"{path.relative_to(ROOT)}:{i.line}: {i.module}"
        for module, path in modules().items()
        for i in imports_of(module)
        if i.at_start and i.module.split(".")[0] not in allowed
    ]
    assert not wrong, f"not in [project.dependencies]: {wrong}"


def decides_by_name(found: Iterable[ast.AST]) -> Iterator[int]:
    """Lines on which the name of a device is compared with, is the key of a table, or is one of two results."""
    for node in found:
        match node:
            case ast.Compare():
                places = [node.left, *node.comparators]
            case ast.Dict():
                places = [key for key in node.keys if key is not None]
            case ast.IfExp():
                places = [node.body, node.orelse]
            case ast.MatchValue():
                places = [node.value]
            case ast.Return(value=ast.expr() as value):
                places = [value]
            case _:
                continue
        elements = (x for p in places for x in (p.elts if isinstance(p, ast.Tuple | ast.List | ast.Set) else [p]))
        if any(isinstance(x, ast.Constant) and x.value in BACKENDS for x in elements):
            yield node.lineno


@pytest.mark.parametrize(
    "source",
    [
        "a = name == 'cpu'", "a = name in ('cpu', 'xla')", "a = {'cpu': 1}", "a = 'cpu' if b else name",
        "def f():\n    return 'cpu'", "match a:\n    case 'cpu':\n        pass",
    ],
)  # fmt: skip
def test_decisions_by_name_are_found(source: str) -> None:
    assert list(decides_by_name(ast.walk(ast.parse(source))))
    assert not list(decides_by_name(ast.walk(ast.parse("def f(device='cpu'):\n    'cpu'\n    g(device='cpu')"))))


def test_nothing_is_decided_by_the_name_of_a_device() -> None:
    """What differs between devices is declared by each in its backend; their names are known to the registry alone."""
    # the registry; control groups of Linux and devices of the libraries, which have a "cpu" of their own
    known = {PACKAGE / "backends" / name for name in ("__init__.py", "granted.py")}
    own = [PACKAGE / "backends" / name for name in ("xla", "mlx")]
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for module, path in modules().items()
        if path not in known and not any(folder in path.parents for folder in own)
        for line in decides_by_name(nodes(module))
    ]
    assert not wrong, f"let backends/base.py ask the backend: {wrong}"


def test_what_subclasses_must_write_is_abstract() -> None:
    """A class that lacks what its subclasses must write derives from `ABC`: it can't be made."""
    classes = [(modules()[m], x) for m in modules() for x in nodes(m) if isinstance(x, ast.ClassDef)]
    named = {node.name: node for _, node in classes}

    def refuses(node: ast.ClassDef) -> bool:
        bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
        return "ABC" in bases or any(refuses(named[base]) for base in bases & named.keys() - {node.name})

    wrong = []
    for path, node in classes:
        methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
        abstract = any("abstractmethod" in map(ast.unparse, method.decorator_list) for method in methods)
        raises = any(isinstance(x, ast.Raise) and "NotImplementedError" in ast.unparse(x) for x in ast.walk(node))
        if raises or (abstract and not refuses(node)):
            wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}")
    assert not wrong


# ---- inside the CPU backend

CPU = "rlx.backends.cpu"
# part -> the parts that it may import: what makes code is above what describes it, and a run needs no code generator
CPU_PARTS: dict[str, set[str]] = {
    "target": set(),
    "schedule": {"target"},
    "llvm": set(),
    "jit": {"llvm", "target"},
    "native": {"jit"},
    "strategy": {"schedule", "target"},
    "loops": {"llvm", "native", "schedule"},
    "gemm": {"llvm", "loops", "schedule", "strategy", "target"},
    "kernels": {"gemm", "llvm", "loops", "native", "schedule", "strategy", "target"},
    "select": {"kernels", "strategy"},
    "runtime": {"jit", "native", "schedule"},
    "build": {"jit", "runtime", "schedule"},
    "backend": {
        "build", "gemm", "jit", "kernels", "llvm", "loops", "native", "runtime", "schedule", "select",
        "strategy", "target",
    },
}  # fmt: skip
CODE_GENERATORS = {f"{CPU}.jit.compile", f"{CPU}.jit.workers", f"{CPU}.jit.elf"}
# families of strategies that use another's: a product of bytes is a convolution of one pixel
ACROSS = {("matmul", "conv")}
CIRCLES = [{"jit.compile", "jit.cpuid", "jit.load"}, {"runtime.executable", "runtime.image", "runtime.save_image"}]
# What is longer than the rules below allow. These lists only shrink.
LARGE_FOLDERS = {
    "rlx": 22, "rlx/backends/cpu/kernels/conv": 22, "rlx/importers/onnx/mappings": 21, "rlx/kernels": 21,
    "rlx/ops": 43, "rlx/runtime": 33,
}  # fmt: skip
LONG_FILES = {
    "rlx/backends/cpu/llvm/builder.py": 650,
    "rlx/backends/cpu/native/pool_ir.py": 708,
    "rlx/importers/onnx/model.py": 614, "rlx/ir/shape.py": 666,
    "rlx/ops/elementwise.py": 602, "rlx/ops/layout.py": 608, "rlx/testing/cases.py": 618,
}  # fmt: skip
LONG_FUNCTIONS = 27  # of more than 60 lines


def cpu_imports() -> Iterator[tuple[str, str]]:
    """(module, module that it imports, for more than its types) within the CPU backend."""
    for module, names in graph_of(CPU).items():
        yield from ((module, name) for name in names if CPU not in (module, name))


def cpu_part(module: str) -> str:
    return module.removeprefix(f"{CPU}.").split(".")[0]


def test_parts_of_the_cpu_point_one_way() -> None:
    """Each folder of the CPU backend imports only those that the table names."""
    assert {cpu_part(m) for m in modules() if m.startswith(f"{CPU}.")} == set(CPU_PARTS)
    wrong = {
        f"{module} imports {name}"
        for module, name in cpu_imports()
        if cpu_part(name) not in CPU_PARTS[cpu_part(module)] | {cpu_part(module)}
    }
    assert not wrong, "\n".join(sorted(wrong))
    allowed = {f"{CPU}.runtime.save_image"}  # which compiles what artifacts need
    assert not {m for m, name in cpu_imports() if name in CODE_GENERATORS and cpu_part(m) == "runtime"} - allowed


def test_families_of_strategies_stand_alone() -> None:
    """Ways to compute a convolution know nothing of those to compute attention."""

    def family(module: str) -> str:
        names = module.removeprefix(f"{CPU}.kernels.").split(".")
        return names[0] if module.startswith(f"{CPU}.kernels.") and len(names) > 1 else ""

    pairs = {(family(module), family(name)) for module, name in cpu_imports() if family(module) and family(name)}
    assert {(a, b) for a, b in pairs if a != b} == ACROSS


def test_modules_of_the_cpu_have_no_circle() -> None:
    """But for those that are listed."""
    graph: dict[str, set[str]] = {module: set() for module in modules() if module.startswith(f"{CPU}.")}
    for module, name in cpu_imports():
        graph[module] |= {name} - {module}
    found = [{m.removeprefix(f"{CPU}.") for m in circle} for circle in circles(graph)]
    assert sorted(map(sorted, found)) == sorted(map(sorted, CIRCLES))


def test_folders_files_and_functions_are_short() -> None:
    """At most 20 files a folder, 600 lines a file, and 60 lines a function but for some."""
    lines = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in modules().values()}
    folders = Counter(str(Path(name).parent) for name in lines)
    assert not {f: n for f, n in folders.items() if n > LARGE_FOLDERS.get(f, 20)}
    assert not {name: n for name, n in lines.items() if n > LONG_FILES.get(name, 600)}
    functions = (x for module in modules() for x in nodes(module))
    long = [f for f in functions if isinstance(f, ast.FunctionDef) and (f.end_lineno or 0) - f.lineno >= 60]
    assert len(long) <= LONG_FUNCTIONS


# What multiplies and adds besides for products: sums along windows, transforms, and what is done to sums that tile
# registers have made. This list only shrinks.
OTHER_SUMS = {
    "gemm.amx_blocks", "gemm.amx_f32", "kernels.conv.depthwise", "kernels.conv.grouped",
    "kernels.conv.winograd_forms", "kernels.matmul.thin_types",
}  # fmt: skip
MADE = {"gemm.panels.coded"}  # scale * number - minimum, which is no sum over k
PRODUCTS = ("gemm.", "kernels.conv.", "kernels.matmul.", "kernels.grouped_matmul")


def test_tiles_of_products_are_summed_in_one_place() -> None:
    """Sums of matrix products are kept over k in `gemm.accumulators` alone: nothing else there multiplies and adds."""
    found = {
        module.removeprefix(f"{CPU}.")
        for module in modules()
        if module.removeprefix(f"{CPU}.").startswith(PRODUCTS)
        and any(isinstance(x, ast.Attribute) and x.attr == "fma" for x in nodes(module))
    }
    assert found == OTHER_SUMS | MADE | {"gemm.accumulators"}
