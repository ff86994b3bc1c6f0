"""The measurement of a device's overhead in fresh processes: how their resident sets grow over small graphs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.estimate.calibrate import Overhead
from rlx.estimate.resident import address_bytes, forget_peak, peak_bytes, resident_bytes

if TYPE_CHECKING:
    from rlx.compiler import Compilation
    from rlx.ir.graph import Graph, Value

__all__ = ["again", "main"]

LOADED = ("rlx.importers.onnx", "rlx.runtime.session")  # what loading a file takes besides the compiler
MANY = 192  # nodes
PRODUCTS = 9  # kinds of kernels that need much of the compiler
ARTIFACT = "tiny.rlxart"


def main(device: str, folder: str) -> None:
    """Prints the overhead of a device as JSON: the fields of `Overhead` but `cached`, in bytes.

    Leaves an artifact in the folder, for `again`, where the device can make one.
    """
    start, mapped = resident_bytes(), address_bytes()
    from rlx.backends import choose_backend
    from rlx.backends.base import CodeGenerator

    for name in LOADED:
        import_module(name)
    backend = choose_backend(device)
    ready, loaded, opening = resident_bytes(), address_bytes(), peak_bytes() - start
    says = isinstance(backend, CodeGenerator)  # what its code takes
    kept, stays, fixed = [], 0, 0
    for graph in (_small(2), *(_kinds() if says else ())):
        forget_peak()  # what bringing the compiler takes in passing is no part of a compile
        made, code, passes = _run(graph, device)
        kept.append(made)
        stays += code
        fixed = max(
            fixed, peak_bytes() - start - stays - passes
        )  # what is counted for each graph's own code is not in it
    settled, compiling = resident_bytes() - start - stays, fixed - (ready - start)
    address, address_compiling = address_bytes() - mapped, address_bytes() - loaded
    before = resident_bytes()
    if not says:
        kept.append(_run(_small(MANY), device)[0])
    found = {
        "fixed": fixed,
        "per_node": max(0, resident_bytes() - before) // MANY,
        "compiling": compiling,
        "passing": min(max(0, fixed - settled), compiling),
        "opening": opening,
        "address": address,
        "address_compiling": address_compiling,
    }
    if "save" in kept[0].executable.capabilities:
        import_module(LOADED[-1]).compile(_small(2), device=device).save(Path(folder) / ARTIFACT)
    print(json.dumps(found))  # noqa: T201


def again(device: str, folder: str) -> None:
    """Prints the field `cached` of the overhead as JSON: what a tiny graph takes that was compiled before."""
    start = resident_bytes()
    path = Path(folder) / ARTIFACT
    if path.exists():
        import numpy as np

        import_module(LOADED[-1]).load(path, device=device).run([np.ones((4, 16), np.float32)])
    print(json.dumps({"cached": peak_bytes() - start}))  # noqa: T201


def _run(graph: Graph, device: str) -> tuple[Compilation, int, int]:
    """Compiles a graph as `rlx.compile` does, and runs it; with what its code takes, and that in passing, in bytes."""
    import numpy as np

    from rlx.backends import choose_backend
    from rlx.backends.base import CodeGenerator
    from rlx.compiler import compile_graph
    from rlx.kernels.program import Program
    from rlx.options import CompileOptions

    options, backend = CompileOptions(), choose_backend(device)
    of_code = [0, 0]

    def weigh(source: Graph, legal: Graph, program: Program | None) -> None:
        if isinstance(backend, CodeGenerator) and program is not None:
            sizes, nodes, counted = backend.code_sizes(program, options), len(source.nodes), Overhead(1)
            source_bytes = counted.source_bytes(sizes, nodes)
            of_code[0] = counted.code_bytes(sizes, nodes) - source_bytes + counted.left_by_text(sizes)
            of_code[1] = source_bytes + counted.passing_text(sizes)  # asking for the sizes begins to compile

    made = compile_graph(graph, backend, options, weigh, early=True)
    made.executable.wrap = lambda results: results
    inputs = [np.ones(v.shape, v.dtype.numpy) for v in graph.inputs]
    made.executable.run(inputs, [None] * len(graph.outputs), list(range(len(graph.outputs))))
    stays, passes = of_code
    return made, stays, passes


def _small(count: int) -> Graph:
    """Two kernels again and again, of so many nodes."""
    from rlx.ir.graph import Graph
    from rlx.ops.activation import Relu

    g = Graph("small")
    x = g.input("x", (4, 16))
    for i in range(count // 2):
        x = g.add(Relu(), x @ _weight(g, f"w{i}", 16, 16))[0]
    g.output(x, "y")
    return g


def _weight(g: Graph, name: str, *shape: int) -> Value:
    import numpy as np

    return g.param(name, shape, data=np.ones(shape, np.float32))


def _kinds() -> Iterator[Graph]:
    """Small graphs with kernels of every kind: what they take of the compiler, others take again.

    Those that need much of it, products and convolutions, are in a graph each, as what compiling one takes in passing
    is gone before the next.
    """
    for number in range(PRODUCTS):
        yield _of_kinds(slice(number, number + 1))
    yield _of_kinds(slice(PRODUCTS, None))


def _of_kinds(chosen: slice) -> Graph:
    """A graph of these kinds, of which products come first."""
    import numpy as np

    from rlx import ops
    from rlx.ir.graph import Graph
    from rlx.ops.quant import ConvInteger, DynamicQuantizeLinear
    from rlx.ops.recurrent import Lstm

    g = Graph("kinds")
    rows, image = g.input("rows", (64, 32)), g.input("image", (1, 16, 16, 16))
    places = g.input("places", (8,), "i64")
    eight = g.param("q", (16, 16, 1, 1), "i8", data=np.ones((16, 16, 1, 1), np.int8))
    products: list[Callable[[], Any]] = [
        lambda: rows @ _weight(g, "w", 32, 48),
        lambda: ops.gather(rows, places) @ rows.transpose(1, 0),
        lambda: ops.attention(*(rows.reshape(1, 2, 64, 16),) * 3),
        lambda: g.add(Lstm(), rows.reshape(8, 8, 32), _weight(g, "l", 1, 64, 32), _weight(g, "r", 1, 64, 16))[0],
        lambda: ops.conv(image, _weight(g, "c3", 16, 16, 3, 3), pads=(1, 1, 1, 1)),
        lambda: ops.conv(image, _weight(g, "c5", 8, 16, 5, 5), strides=(2, 2)),
        lambda: ops.conv(image, _weight(g, "c1", 32, 16, 1, 1)),
        lambda: ops.conv(image, _weight(g, "d", 16, 1, 3, 3), groups=16),
        lambda: g.add(ConvInteger(), g.add(DynamicQuantizeLinear(), image)[0], eight)[0],
    ]
    maps: list[Callable[[], Any]] = [
        lambda: ops.softmax(rows),
        lambda: ops.erf(rows) * ops.tanh(rows) + ops.sigmoid(rows) - ops.exp(rows) / (ops.abs(rows) + 1),
        lambda: ops.sin(rows) + ops.log(ops.abs(rows) + 1) ** 1.5,
        lambda: ops.cast(rows, "f16") * 2,
        lambda: ops.cast(rows * 9, "i64") // 3,
        lambda: ops.cast(rows, "f64").sum(1),
        lambda: rows.mean(0),
        lambda: ops.cum_sum(rows, axis=1),
        lambda: ops.arg_max(rows, axis=1),
        lambda: ops.max_pool(image, (2, 2), strides=(2, 2)),
        lambda: ops.top_k(rows, 4)[0],
        lambda: ops.where(rows > 0, rows, ops.floor(rows)),
        lambda: ops.concat(rows, rows, axis=1)[:, 3:50:2],
    ]
    for number, make in enumerate((*products, *maps)[chosen]):
        g.output(make(), f"y{number}")
    return g
