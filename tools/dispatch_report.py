"""docs/backends.md from the code: how every op runs on every device that is here.

`python tools/dispatch_report.py` writes it; columns of devices that are absent stay as they are. It takes a second, and
needs jax and mlx for theirs: pip install "rlx[xla,mlx]".
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from rlx.backends import BACKENDS, backend_named
from rlx.backends.base import Backend
from rlx.errors import UnsupportedOp
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, Node, TensorType
from rlx.ir.shape import Dim
from rlx.ops.base import OPS
from rlx.ops.control import Control, If, Scan, While
from rlx.ops.dynamic import Loop
from rlx.ops.elementwise import Identity
from rlx.options import CompileOptions
from rlx.passes.legalise import legalise
from rlx.testing.cases import cases_of, covered
from rlx.testing.oracle import Batch

__all__ = ["DEVICES", "DOCUMENT", "column", "read", "write"]

DOCUMENT = Path(__file__).parents[1] / "docs" / "backends.md"
DEVICES = tuple(name for name in BACKENDS if name != "reference")  # which runs everything, slowly
SIZES = (7, 9)

HEAD = """# Ops on each device

How every op runs on every device, over the test cases of all its element types and attributes. Written by
`python tools/dispatch_report.py`. (To add a device: [adding-a-backend.md](adding-a-backend.md).)

- **native**: by code of the device's own (cpu), or by functions of its library (xla, mlx).
- **decomposed**: as smaller ops.
- **host**: by NumPy, between two pieces of device code: a sync point.
- **unsupported**: a compile that names the device is refused, with every such node listed.

Where element types or attributes differ, the rarer way is in brackets with the types that take it. The `reference`
device runs every op with its NumPy definition.

The library devices give fresh [`rlx.Array`s](arrays.md#arrays-on-a-device): they have no arena, plan, `run_views`,
`run_slots`, `clone` or per-kernel profile
(`OptionError`, and `model.capabilities` says so before). They compile a function for each set of extents, keep the last
32, and log each compile and its reason on the logger "rlx". Sizes that data decide are refused. An index outside its
axis and an integer division by zero raise `ExecutionError`, as everywhere, though the libraries would go on silently.

xla (the extra `xla`) reads and writes 0 for denormal numbers, contracts `a * b + c`, and divides by constants
and by what it broadcasts through the reciprocal: the last digit of a quotient may differ, and what is sampled at
a computed place by as much of the place. Both libraries add up in orders of their own. Within that every case of every
op agrees with the reference: `python -m pytest --full tests/backends/test_library.py` (22 core-minutes).
`model.compilation.executable.stablehlo({"n": 5})` is its program as text. mlx (the extra `mlx`) has f64 on its
CPU only, and computes some functions of f64 in single precision: those run on the host.
"""


def region(name: str, *shapes: tuple[int, ...], results: int, dtype: str = "f32") -> Graph:
    """A region that gives its first inputs back."""
    graph = Graph(name)
    values = [graph.input(f"a{i}", shape, dtype if i == 0 else "f32") for i, shape in enumerate(shapes)]
    for i in range(results):
        graph.output(graph.add(Identity(), values[i])[0], f"r{i}")
    return graph


def control_graph(name: str) -> Graph:
    """A graph with one node of an op with regions."""
    graph = Graph(name)
    flag, x, rows = graph.input("flag", (), "bool"), graph.input("x", (3,)), graph.input("rows", (4, 3))
    cond = region("cond", (), (3,), results=1, dtype="bool")
    body = region("body", (), (3,), results=2, dtype="bool")
    match OPS[name]:
        case cls if cls is If:
            regions = [region("then", (3,), results=1), region("otherwise", (3,), results=1)]
            made = graph.add(If(), flag, x, regions=regions)
        case cls if cls is While:
            made = graph.add(While(2), flag, x, regions=[cond, body])
        case cls if cls is Loop:
            made = graph.add(Loop(1, Dim("count", 0, 8)), flag, x, regions=[cond, body])
        case cls if cls is Scan:
            made = graph.add(Scan(1, 1), x, rows, regions=[region("step", (3,), (3,), results=2)])
        case _:
            raise AssertionError(f"add a graph for {name}")
    for i, value in enumerate(made):
        graph.output(value, f"y{i}")
    return graph


def graphs(name: str) -> Iterator[tuple[str, Graph]]:
    """(element types, graph of one node) for each case of an op."""
    if not covered(name):
        yield "", control_graph(name)
        return
    for case in cases_of(name, *SIZES):
        if not case.turned:
            graph = Batch([case]).graph
            types = {v.dtype.name for v in graph.values() if isinstance(v.type, TensorType)}
            yield "/".join(t for t in DTYPES if t in types), graph


def way(backend: Backend, graph: Graph) -> str:
    """How the (last) node of a graph runs: "native", "decomposed", "host" or "unsupported"."""
    node: Node = graph.nodes[-1]
    try:
        legal, dispatch = legalise(graph, backend.claims)
        if hasattr(backend, "build"):
            backend.build(legal, CompileOptions())
    except UnsupportedOp:
        return "unsupported"
    return next(d.how for d in dispatch if d.op == node.op.op_name)


def column(device: str) -> dict[str, str]:
    """op -> how it runs on the device."""
    backend = backend_named(device)
    found = {}
    for name in sorted(n for n in OPS if covered(n) or issubclass(OPS[n], Control)):
        ways: dict[str, list[str]] = defaultdict(list)
        for types, graph in graphs(name):
            ways[way(backend, graph)].append(types)
        if not ways:  # an op that only importers bring in, without cases so far
            continue
        usual = max(ways, key=lambda how: len(ways[how]))
        rare = [f"{how}: {_types(ways, how)}" for how in sorted(ways) if how != usual]
        found[name] = usual + (f" ({'; '.join(rare)})" if rare else "")
    return found


def _types(ways: dict[str, list[str]], how: str) -> str:
    """The types that go this way only, or a remark that attributes decide."""
    others = {types for other, found in ways.items() if other != how for types in found}
    own = list(dict.fromkeys(types for types in ways[how] if types not in others))
    return ", ".join(own) if len(own) == len(set(ways[how])) else "by attributes or shapes"


def read() -> dict[str, dict[str, str]]:
    """device -> op -> how, as the document says."""
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")] if DOCUMENT.exists() else []
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    if not rows:
        return {}
    return {device: {row[0]: row[i] for row in rows[1:]} for i, device in enumerate(rows[0]) if i}


def write() -> None:
    """Writes the document."""
    columns = read()
    for device in DEVICES:
        found = backend_named(device).available()
        if found.present:
            columns[device] = column(device)
        else:
            print(f"{device} is kept as it was: {found.reason}")
    devices = [d for d in DEVICES if d in columns]
    ops = sorted({op for device in devices for op in columns[device]})
    lines = [f"| op | {' | '.join(devices)} |", f"|---|{'---|' * len(devices)}"]
    lines += [f"| `{op}` | {' | '.join(columns[d].get(op, '') for d in devices)} |" for op in ops]
    counts = []
    for device in devices:
        usual = [how.partition(" ")[0] for how in columns[device].values()]
        each = ", ".join(f"{usual.count(h)} {h}" for h in ("native", "decomposed", "host", "unsupported") if h in usual)
        counts.append(f"- {device}: {each}")
    DOCUMENT.write_text("\n".join([HEAD, *counts, "", *lines, ""]))


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()  # it takes no arguments but --help
    write()
