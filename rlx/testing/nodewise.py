"""Finds the node at which a device departs from the reference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count

import numpy as np

from rlx.backends.reference import run_graph
from rlx.ir.dtype import dtype_of
from rlx.ir.extents import bind_extents
from rlx.ir.graph import Array, Graph, Node, Value
from rlx.ir.shape import evaluate
from rlx.passes.dims import apply_dims
from rlx.passes.rewrite import copy_leaves, copy_node
from rlx.records import dataclass, replace
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.session import compile
from rlx.testing.oracle import Tolerance, tolerance

__all__ = ["Comparison", "allowed_for", "compare_nodes", "compare_outputs", "first_bad_value"]

STANDARD: Mapping[str, Tolerance] = {}  # no tolerances given: those of rlx.testing.oracle
MOST_NODES, MOST_BYTES = 100, 1 << 28  # of one batch of nodes: how many, and the bytes of what they read and give

# Large terms may cancel in these, so that the error goes with the magnitude of the inputs.
SUMS = frozenset({
    "attention", "average_pool", "batch_norm", "conv", "conv_transpose", "cum_sum", "gemm", "global_average_pool",
    "layer_norm", "log_softmax", "matmul", "reduce_l1", "reduce_mean", "reduce_sum", "rms_norm",
})  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """One result against the reference: the largest error, that error relative to the largest magnitude involved, and
    the error as a share of what is allowed (above 1: it differs); `note` says what numbers can't.
    """

    name: str
    op: str
    error: float
    relative: float
    share: float
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether rounding explains the difference."""
        return self.share <= 1 and not self.note

    def __str__(self) -> str:
        what = f"{self.op} {self.name!r}" if self.op else repr(self.name)
        share = f"{self.share:.0%} of allowed" if self.share < math.inf else "none allowed"
        return f"{what}: {self.note or f'largest error {self.error:.2g} (relative {self.relative:.1g}, {share})'}"


def compare(name: str, op: str, got: Array, expected: Array, allowed: Tolerance, scale: float) -> Comparison:
    """Compares two arrays; the absolute part of the tolerance is for magnitudes around `scale`."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        note = f"got {got.dtype}{list(got.shape)}, expected {expected.dtype}{list(expected.shape)}"
        return Comparison(name, op, np.inf, np.inf, np.inf, note)
    if not dtype_of(got.dtype).is_float:
        wrong = int((got != expected).sum())
        note = f"{wrong} of {got.size} elements differ" if wrong else ""
        return Comparison(name, op, float(wrong), wrong / max(got.size, 1), 2.0 if wrong else 0.0, note)
    with np.errstate(all="ignore"):
        a, b = got.astype(np.float64), expected.astype(np.float64)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        wild = ~same & ~(np.isfinite(a) & np.isfinite(b))
        error = np.where(same | wild, 0, np.abs(a - b))
        scale = max(scale, 1e-30)
        share = error / (allowed.absolute * scale + allowed.relative * np.where(np.isfinite(b), np.abs(b), 0))
    note = f"{int(wild.sum())} of {got.size} elements are NaN or infinite on one side only" if wild.any() else ""
    top = float(error.max(initial=0))
    worst = float(np.nan_to_num(share, nan=0, posinf=np.inf).max(initial=0))
    return Comparison(name, op, top, top / scale, np.inf if note else worst, note)


def largest(array: Array) -> float:
    """The largest finite magnitude of a float array; 0 for others."""
    if not dtype_of(array.dtype).is_float:
        return 0.0
    magnitudes = np.abs(array.astype(np.float64))
    return float(magnitudes.max(initial=0, where=np.isfinite(magnitudes)))


def compare_outputs(
    model: CompiledGraph,
    inputs: Mapping[str, Array],
    given: Mapping[str, Tolerance] = STANDARD,
    done: Callable[[int], None] = lambda count: None,
) -> list[Comparison]:
    """The outputs of a compiled graph against those of the reference, at the tolerance of a chain of ops.

    `given` has tolerances by the name of an element type, in the place of the standard ones; `done` is told how many
    nodes the reference has computed.
    """
    number = count(1)
    expected = run_graph(model.compilation.source, inputs, trace=lambda node, results: done(next(number)))
    got = {name: np.asarray(array) for name, array in model._named_tensors(dict(inputs)).items()}
    return [
        compare(name, "", got[name], a, allowed_for(a.dtype, None, given), largest(a)) for name, a in expected.items()
    ]


def allowed_for(dtype: object, op: str | None, given: Mapping[str, Tolerance]) -> Tolerance:
    """The tolerance for what an op computed, or (None) a chain of ops: the one given for the type, or the standard."""
    name = dtype_of(dtype).name
    if name in given:
        return given[name]
    return tolerance(dtype, op) if op is not None else loose(tolerance(dtype))


def loose(allowed: Tolerance) -> Tolerance:
    """For a chain of ops: relative to the largest magnitude too, since small elements come of cancelling large ones."""
    return replace(allowed, absolute=max(allowed.absolute, allowed.relative))


def compare_nodes(
    graph: Graph,
    inputs: Mapping[str, Array],
    device: str,
    *,
    given: Mapping[str, Tolerance] = STANDARD,
    done: Callable[[int], None] = lambda count: None,
) -> list[Comparison]:
    """Every result of every node, each node computed by itself on the device from the reference's values.

    Errors therefore don't add up, and the tolerance is that of the node's op, or the one `given` for its element type.
    `done` takes the nodes compared so far.
    """
    fixed = apply_dims(graph, bind_extents(graph, {name: np.shape(array) for name, array in inputs.items()}))
    walk = _Walk(fixed, inputs, device, given, done)
    run_graph(fixed, inputs, trace=walk.see)
    walk.flush()
    return walk.found


class _Walk:
    """Follows a run of the reference; compares its nodes in batches, each in one compiled graph."""

    def __init__(
        self,
        graph: Graph,
        inputs: Mapping[str, Array],
        device: str,
        given: Mapping[str, Tolerance],
        done: Callable[[int], None],
    ) -> None:
        self.graph = graph
        self.device = device
        self.given = given
        self.done = done
        self.values: dict[Value, Array] = {v: np.asarray(inputs[v.name]) for v in graph.inputs}
        self.values |= {v: v.data for v in (*graph.constants, *graph.params, *graph.states) if v.data is not None}
        for state in graph.states:
            zeros = np.zeros(tuple(evaluate(s, {}) for s in state.shape), state.dtype.numpy)
            self.values.setdefault(state, zeros)
        self.readers = Counter(v for node in graph.nodes for v in node.inputs)
        self.waiting: list[Node] = []
        self.nbytes = 0
        self.seen = 0
        self.found: list[Comparison] = []

    def see(self, node: Node, results: tuple[Array, ...]) -> None:
        """Takes a node's results; those of nodes in regions are part of the node that holds the region."""
        if node.outputs[0].graph is not self.graph:
            return
        self.values.update(zip(node.outputs, results, strict=True))
        self.waiting.append(node)
        self.nbytes += sum(a.nbytes for a in results)
        if len(self.waiting) >= MOST_NODES or self.nbytes > MOST_BYTES:
            self.flush()

    def flush(self) -> None:
        """Compares the nodes that wait, and lets go of values that no later node reads."""
        if self.waiting:
            self._compare(self.waiting)
        self.seen += len(self.waiting)
        for value in (v for node in self.waiting for v in node.inputs):
            self.readers[value] -= 1
        self.values = {v: a for v, a in self.values.items() if self.readers[v] > 0}
        self.waiting, self.nbytes = [], 0
        self.done(self.seen)

    def _compare(self, nodes: list[Node]) -> None:
        island = Graph(f"{self.graph.name}-nodes")
        leaves: dict[Value, Value] = {}
        given: dict[str, Array] = {}
        for value in (v for node in nodes for v in node.inputs):
            if value not in leaves:
                leaves[value] = self._leaf(island, value, f"v{len(leaves)}", given)
        for node in nodes:
            made = island.add(
                node.op, *(leaves[v] for v in node.inputs), provenance=node.provenance, regions=node.regions
            )
            for value in made:
                island.output(value, f"r{len(island.outputs)}")
        got = map(np.asarray, compile(island, device=self.device).run(given))
        for node in nodes:
            inputs = node.inputs if node.op.op_name in SUMS else ()
            op = None if node.regions else node.op.op_name  # what a region computes is a chain of ops
            allowed = [allowed_for(v.dtype, op, self.given) for v in node.outputs]
            for value, limit in zip(node.outputs, allowed, strict=True):
                name = value.name or (node.provenance[0] if node.provenance else "?")
                scale = max(1.0, *(largest(self.values[v]) for v in (value, *inputs)))
                result = compare(name, node.op.op_name, next(got), self.values[value], limit, scale)
                self.found.append(result)

    def _leaf(self, island: Graph, value: Value, name: str, given: dict[str, Array]) -> Value:
        if value.kind in ("const", "param"):
            if value.kind == "const":
                return island.constant(value.data, name=value.name)
            return island.param(name, value.shape, value.dtype, data=value.data, encoding=value.type.encoding)
        given[name] = self.values[value]
        return island.input(name, value.shape, value.dtype)


def first_bad_value(
    graph: Graph, inputs: Mapping[str, Array], device: str, given: Mapping[str, Tolerance] = STANDARD
) -> Comparison | None:
    """For outputs that differ though every node by itself agrees, as when fusion is at fault: the first node on the
    way to such an output whose result differs when it is computed as part of the whole, found by halving.
    """
    ends = [o.value for o in graph.outputs if o.value.node is not None]
    end = next((v for v in ends if not (_as_output(graph, v, inputs, device, given)).ok), None)
    if end is None:
        return None
    nodes = _ancestors(graph, end)
    low, high = 0, len(nodes) - 1  # nodes[high] is bad
    found = _as_output(graph, end, inputs, device, given)
    while low < high:
        middle = (low + high) // 2
        result = _as_output(graph, nodes[middle].outputs[0], inputs, device, given)
        if result.ok:
            low = middle + 1
        else:
            high, found = middle, result
    return found


def _as_output(
    graph: Graph, value: Value, inputs: Mapping[str, Array], device: str, given: Mapping[str, Tolerance]
) -> Comparison:
    assert value.node is not None
    cut, values = copy_leaves(graph)
    cut.guards.extend(graph.guards)
    for node in _ancestors(graph, value):
        values.update(zip(node.outputs, copy_node(cut, node, [values[v] for v in node.inputs]), strict=True))
    cut.output(values[value], "result")
    expected = run_graph(cut, inputs)["result"]
    got = compile(cut, device=device)(dict(inputs))["result"]
    name = value.name or ", ".join(value.node.provenance[:1]) or "?"
    allowed = allowed_for(expected.dtype, None, given)
    return compare(name, value.node.op.op_name, got, expected, allowed, largest(expected))


def _ancestors(graph: Graph, value: Value) -> list[Node]:
    """The nodes that a value depends on, its own last, in the order of the graph."""
    needed: set[Value] = {value}
    found = []
    for node in reversed(graph.nodes):
        if needed & set(node.outputs):
            needed.update(node.inputs)
            found.append(node)
    return found[::-1]
