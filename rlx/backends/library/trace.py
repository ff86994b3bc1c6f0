"""A graph at known extents as a function of arrays of a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.backends.library.arrays import Arrays
from rlx.backends.library.native import LAYOUT
from rlx.backends.library.scalars import lacking, run_lowered
from rlx.errors import ExecutionError, RlxError
from rlx.ir.dtype import DTYPES
from rlx.ir.extents import check_shape
from rlx.ir.graph import Array, Graph, Node, Value
from rlx.ir.shape import evaluate
from rlx.kernels.lowering import lower_node
from rlx.ops.control import If, Scan, While

__all__ = ["Trace", "runs", "why_not"]

I64 = DTYPES["i64"]
KINDS = {"index": "index out of range", "division": "integer division by zero"}


def why_not(lib: Arrays, node: Node) -> str | None:
    """Why a library can't run a node as it is; None when it can."""
    for value in (*node.inputs, *node.outputs):
        if value.dtype.name not in lib.types:
            return f"the library has no {value.dtype}"
    if node.regions:
        if not isinstance(node.op, If | While | Scan):
            return "the library has no loop that data give a number of rows"
        bad = [n.op.op_name for region in node.regions for n in region.nodes if not runs(lib, n)]
        return f"a region has {', '.join(bad)}" if bad else None
    if node.op.op_name in LAYOUT or node.op.op_name in lib.native:
        why = lib.refuses(node)
        if why is None:
            return None
    lowered = lower_node(node)
    return "its op has no lowering" if lowered is None else lacking(lib, lowered)


def runs(lib: Arrays, node: Node) -> bool:
    """Whether it runs in any way: as it is, decomposed, or on the host."""
    op: Any = node.op
    return why_not(lib, node) is None or op.decompose is not None or (hasattr(op, "reference") and not node.regions)


class Trace:
    """One pass over a graph that calls the functions of a library.

    `checks` collects what may stop a run; `error` is an i64 [2] of the library: 0, or the number (from 1) of the check
    that failed, and the bad element. `failures` collects what host calls raise.
    """

    def __init__(
        self,
        lib: Arrays,
        extents: Mapping[str, int],
        checks: list[tuple[str, str]],
        failures: list[RlxError],
        error: Any = None,
    ) -> None:
        self.lib = lib
        self.extents = extents
        self.checks = checks
        self.failures = failures
        self.error = lib.put(np.zeros(2, np.int64)) if error is None else error
        self.label = ""

    def run(self, graph: Graph, leaves: Mapping[Value, Any]) -> dict[Value, Any]:
        """Every value of the graph."""
        values = dict(leaves) | {c: self.lib.put(c.data) for c in graph.constants if c.data is not None}
        for node in graph.nodes:
            self.label = node.label
            results = self.node(node, [values[v] for v in node.inputs])
            for value, result in zip(node.outputs, results, strict=True):
                check_shape(f"node {node.label}", value.shape, result.shape, self.extents)
            values.update(zip(node.outputs, results, strict=True))
        return values

    def node(self, node: Node, x: list[Any]) -> tuple[Any, ...]:
        shapes = [tuple(evaluate(s, self.extents) for s in v.shape) for v in node.outputs]
        if node.regions:
            return tuple(self.control(node, x, shapes))
        made = self.fixed_node(self.fixed(node, x), x)
        assert [tuple(m.shape) for m in made] == shapes, f"{node.label}: {[m.shape for m in made]} for {shapes}"
        return made

    def fixed(self, node: Node, x: Sequence[Any]) -> Node:
        """The node in a graph of its own whose sizes are all ints; constants stay constants."""
        op: Any = node.op
        graph = Graph("fixed")
        inputs = []
        for number, (value, array) in enumerate(zip(node.inputs, x, strict=True)):
            if value.kind == "const":
                inputs.append(graph.constant(value.data))
            else:
                inputs.append(graph.input(f"x{number}", tuple(array.shape), value.dtype))
        graph.add(op.at(self.extents), *inputs)
        return graph.nodes[0]

    def fixed_node(self, node: Node, x: list[Any]) -> tuple[Any, ...]:
        lib, op = self.lib, node.op
        shapes = [tuple(evaluate(s, {}) for s in v.shape) for v in node.outputs]
        if why_not(lib, node) is not None:
            return self.elsewhere(node, x, shapes)
        if all(0 in shape for shape in shapes):
            return tuple(lib.zeros(s, v.dtype) for s, v in zip(shapes, node.outputs, strict=True))
        native = lib.native.get(op.op_name) or LAYOUT.get(op.op_name)
        if native is not None and lib.refuses(node) is None:
            made = native(lib, node, self.check, *x)
            return made if isinstance(made, tuple) else (made,)
        lowered = lower_node(node)
        assert lowered is not None
        return run_lowered(lib, lowered, dict(zip(node.inputs, x, strict=True)), shapes, self.check)

    def elsewhere(self, node: Node, x: list[Any], shapes: Sequence[tuple[int, ...]]) -> tuple[Any, ...]:
        """A node that the library can't run: decomposed, or called on the host."""
        op: Any = node.op
        if op.decompose is not None:
            scratch = Graph("parts")
            stand_ins = [
                scratch.constant(v.data) if v.kind == "const" else scratch.input(f"x{i}", v.shape, v.dtype)
                for i, v in enumerate(node.inputs)
            ]
            made = op.decompose(scratch, *stand_ins)
            label = self.label
            values = self.run(scratch, dict(zip(stand_ins, x, strict=True)))
            self.label = label
            return tuple(values[v] for v in (made if isinstance(made, tuple) else (made,)))
        types = [(shape, v.dtype) for shape, v in zip(shapes, node.outputs, strict=True)]
        label = self.label

        def call(*arrays: Array) -> list[Array]:
            try:
                with np.errstate(all="ignore"):
                    made = op.reference(*arrays)
            except RlxError as error:
                self.failures.append(ExecutionError(f"node {label}: {error}"))
                return [np.zeros(shape, dtype.numpy) for shape, dtype in types]
            results = made if isinstance(made, tuple) else (made,)
            return [np.asarray(r, t.numpy).reshape(s) for r, (s, t) in zip(results, types, strict=True)]

        return tuple(self.lib.host(call, types, x))

    def check(self, ok: Any, shown: Any, kind: str) -> None:
        """Makes the run fail where ok is false, with the element of `shown` there."""
        lib, xp = self.lib, self.lib.xp
        shape = np.broadcast_shapes(ok.shape, shown.shape)
        if 0 in shape:
            return
        self.checks.append((self.label, KINDS[kind]))
        bad = xp.logical_not(xp.broadcast_to(ok, shape)).reshape(-1)
        first = lib.cast(xp.argmax(lib.cast(bad, DTYPES["i32"])), I64).reshape(1)
        value = lib.take(xp.broadcast_to(shown, shape).reshape(-1), first, 0)
        number = lib.const(len(self.checks), I64, 1)
        found = xp.concatenate([number, lib.cast(value, I64)], axis=0)
        fails = xp.any(bad) & (self.error[0] == lib.const(0, I64, 0))
        self.error = xp.where(fails, found, self.error)

    # ---- regions

    def region(self, graph: Graph, x: Sequence[Any], error: Any) -> tuple[list[Any], Any]:
        """The results of a region, and the error after it."""
        inner = Trace(self.lib, self.extents, self.checks, self.failures, error)
        values = inner.run(graph, dict(zip(graph.inputs, x, strict=True)))
        return [values[o.value] for o in graph.outputs], inner.error

    def control(self, node: Node, x: list[Any], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        lib, op, regions = self.lib, node.op, node.regions

        def flat(graph: Graph) -> Any:
            """The region as a function of (arguments..., error) that gives (results..., error)."""

            def call(given: Sequence[Any]) -> list[Any]:
                results, error = self.region(graph, given[:-1], given[-1])
                return [*results, error]

            return call

        match op:
            case If():
                *made, self.error = lib.cond(x[0], flat(regions[0]), flat(regions[1]), [*x[1:], self.error])
                return made
            case While(carries=n):
                captured = x[n:]

                def test(state: Sequence[Any]) -> Any:
                    (go,), error = self.region(regions[0], [*state[:-1], *captured], state[-1])
                    return go & (error[0] == lib.const(0, I64, 0))

                def body(state: Sequence[Any]) -> list[Any]:
                    return flat(regions[1])([*state[:-1], *captured, state[-1]])  # type: ignore[no-any-return]

                *made, self.error = lib.loop(test, body, [*x[:n], self.error])
                return made
            case Scan(carries=n, scanned=m):
                return self.scan(op, regions[0], x[:n], x[n : n + m], x[n + m :], node.outputs, shapes)
        raise AssertionError(f"no function for {op.op_name}")

    def scan(
        self,
        op: Scan,
        body: Graph,
        carries: list[Any],
        sequences: list[Any],
        captured: list[Any],
        outputs: Sequence[Value],
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Any]:
        """A loop over a counter that writes row i of the stacked results in round i."""
        lib, n = self.lib, len(carries)
        length = sequences[0].shape[0] if sequences else evaluate(op.length or 0, self.extents)
        stacked = [lib.zeros(s, v.dtype) for s, v in zip(shapes[n:], outputs[n:], strict=True)]
        if not length:
            return [*carries, *stacked]

        def turn(state: Sequence[Any]) -> list[Any]:
            i = state[0]
            at = lib.const(length - 1, I64, 0) - i if op.reverse else i
            rows = [lib.take(s, at.reshape(1), 0).reshape(s.shape[1:]) for s in sequences]
            results, error = self.region(body, [*state[1 : n + 1], *rows, *captured], state[-1])
            kept = [lib.set_row(old, row, at) for row, old in zip(results[n:], state[n + 1 : -1], strict=True)]
            return [i + lib.const(1, I64, 0), *results[:n], *kept, error]

        def test(state: Sequence[Any]) -> Any:
            return state[0] < lib.const(length, I64, 0)

        _, *made, self.error = lib.loop(test, turn, [lib.const(0, I64, 0), *carries, *stacked, self.error], length)
        return made
