"""The measurement of a device's overhead in a fresh process: how its resident set grows over three small graphs."""

from __future__ import annotations

import json
from importlib import import_module

from rlx.estimate.resident import address_bytes, peak_bytes, resident_bytes

__all__ = ["main"]

LOADED = ("rlx.importers.onnx", "rlx.runtime.session")  # what loading a file takes besides the compiler
REPEATED = 192  # nodes of the graph that repeats two kernels
DISTINCT = 24  # stages of the graph whose kernels all differ


def main(device: str) -> None:
    """Prints the overhead of a device as JSON: the fields of `Overhead`, in bytes."""
    start, mapped = resident_bytes(), address_bytes()
    import tempfile

    import numpy as np

    from rlx.backends import choose_backend
    from rlx.backends.base import CodeGenerator, CodeSizes
    from rlx.compiler import Compilation, compile_graph
    from rlx.ir.graph import Graph
    from rlx.kernels.program import Program
    from rlx.ops.activation import Relu
    from rlx.options import CompileOptions

    for name in LOADED:
        import_module(name)

    def repeated(count: int) -> Graph:
        g = Graph("repeated")
        x = g.input("x", (4, 16))
        for i in range(count // 2):
            x = g.add(Relu(), x @ g.param(f"w{i}", (16, 16), data=np.ones((16, 16), np.float32)))[0]
        g.output(x, "y")
        return g

    def distinct(count: int) -> Graph:
        g = Graph("distinct")
        x = g.input("x", (4, 16))
        for i in range(count):
            for n in range(i + 1):
                x = x * 0.5 if n % 2 else g.add(Relu(), x)[0]
            x = x @ g.param(f"w{i}", (16, 16), data=np.ones((16, 16), np.float32))
        g.output(x, "y")
        return g

    def run(graph: Graph, folder: str) -> tuple[Compilation, int, int]:
        options = CompileOptions(cache_dir=folder)
        backend = choose_backend(device)
        found: list[CodeSizes] = []

        def weigh(source: Graph, legal: Graph, program: Program | None) -> None:
            if isinstance(backend, CodeGenerator) and program is not None:
                found.append(backend.code_sizes(program, options))

        made = compile_graph(graph, backend, options, weigh)
        made.executable.wrap = lambda results: results
        made.executable.run([np.ones((4, 16), np.float32)], [None], [0])
        return made, sum(s.text + s.words for s in found), sum(s.functions for s in found)

    kept = []
    choose_backend(device)
    ready, loaded = resident_bytes(), address_bytes()
    with tempfile.TemporaryDirectory() as folder:
        kept.append(run(repeated(2), folder)[0])
        fixed, compiling = peak_bytes() - start, peak_bytes() - ready
        address, address_compiling = address_bytes() - mapped, address_bytes() - loaded
        before = resident_bytes()
        first, text, _ = run(repeated(REPEATED), folder)
        per_node = max(0, resident_bytes() - before - text) // len(first.source.nodes)
        before = resident_bytes()
        second, text, functions = run(distinct(DISTINCT), folder)
        nodes = len(second.source.nodes)
        # The peak: what the compiler frees stays with the process.
        per_function = max(0, peak_bytes() - before - text - nodes * per_node) // max(1, functions)
    kept += [first, second]
    found = {
        "fixed": fixed,
        "per_node": per_node,
        "per_function": per_function,
        "compiling": compiling,
        "address": address,
        "address_compiling": address_compiling,
    }
    print(json.dumps(found))  # noqa: T201
