"""Compares the graph that the passes make with the graph as imported, and finds the pass that changed a result.

The nodes that a pass made are computed from the imported graph's values of what they read. So errors don't add up from
one to the next, and the tolerance is that of a short chain of ops. A value that was rounded (to an integer, or by
quantizing) agrees if it lies between the results for its operand minus and plus that tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlx import passes
from rlx.backends.reference import bind_leaves, run_graph, run_node
from rlx.errors import RlxError
from rlx.ir.extents import bind_result
from rlx.ir.graph import Array, Graph, Node, Value
from rlx.passes.rewrite import inside_regions, track_values
from rlx.records import dataclass
from rlx.testing.nodewise import STANDARD, Comparison, allowed_for, compare, largest
from rlx.testing.oracle import Tolerance
from rlx.testing.roundings import compare_rounded, range_of, rounds

__all__ = ["WrongPass", "compare_passes", "compare_rewritten", "first_wrong_pass"]


@dataclass(frozen=True)
class WrongPass:
    """The first pass after which a value is another than in the imported graph, and the first such value."""

    name: str
    where: str  # "", or "in a branch or loop"
    found: Comparison

    def __str__(self) -> str:
        return f"the pass {self.name!r}{self.where and f' {self.where}'} changes the result of {self.found}"


def compare_passes(
    graph: Graph, inputs: Mapping[str, Array], given: Mapping[str, Tolerance] = STANDARD
) -> list[Comparison]:
    """Compares every value that the passes, also those inside of regions, compute in another way; in graph order."""
    return compare_rewritten(graph, _after(graph, 2 * len(passes.PASSES)), inputs, given)


def first_wrong_pass(
    graph: Graph, inputs: Mapping[str, Array], given: Mapping[str, Tolerance] = STANDARD
) -> WrongPass | None:
    """The first pass after which a value differs, found by bisection; None where all values agree."""

    def wrong(count: int) -> Comparison | None:
        found = compare_rewritten(graph, _after(graph, count), inputs, given)
        return next((c for c in found if not c.ok), None)

    whole = len(passes.PASSES)
    low, high = 0, 2 * whole  # after `low` all agree, after `high` (the last of which is `high - 1`) not
    found = wrong(high)
    if found is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        result = wrong(middle)
        if result is None:
            low = middle
        else:
            high, found = middle, result
    name, _ = passes.PASSES[(high - 1) % whole]
    return WrongPass(name, "in a branch or loop" if high > whole else "", found)


def _after(graph: Graph, count: int) -> Graph:
    """The graph after so many steps of `run_passes`: the passes, then those inside of regions."""
    track_values(graph)
    whole = len(passes.PASSES)
    for _, one in passes.PASSES[:count]:
        graph = one(graph)
    return _inside(graph, count - whole) if count > whole else graph


def _inside(graph: Graph, count: int) -> Graph:
    """The graph with so many passes in its regions, and in theirs."""

    def within(region: Graph) -> Graph:
        for _, one in passes.PASSES[:count]:
            region = one(region)
        return _inside(region, count)

    return inside_regions(graph, within)


def compare_rewritten(
    graph: Graph, rewritten: Graph, inputs: Mapping[str, Array], given: Mapping[str, Tolerance] = STANDARD
) -> list[Comparison]:
    """Every value of the graph that is made in another way in the rewritten one, in the order of the graph."""
    pairs = _Pairs(graph, rewritten)
    values, extents = bind_leaves(graph, inputs)
    wanted = pairs.wanted()

    def see(node: Node, results: tuple[Array, ...]) -> None:
        if node.outputs[0].graph is not graph:
            return
        for value, result in zip(node.outputs, results, strict=True):
            bind_result(node.label, value.shape, result.shape, extents)
            if value in wanted:
                values[value] = result

    run_graph(graph, inputs, trace=see)
    values |= {c: c.data for c in graph.constants if c.data is not None}
    leaves, _ = bind_leaves(rewritten, inputs)
    got = _Rewritten(pairs, values, leaves, extents)
    return [_compared(old, got.value(new), values, given) for old, new in pairs.claims]


class _Pairs:
    """Which values of a graph stand for which of the rewritten one, and which of those are made in another way."""

    def __init__(self, graph: Graph, rewritten: Graph) -> None:
        self.graph = graph
        became = rewritten.became or {}
        self.new = {v: became[v] for v in graph.values() if v in became}
        self.old: dict[Value, Value] = {}  # of a value of the rewritten graph one that it stands for
        self.kept: set[Node] = set()  # nodes of the rewritten graph that are as they were
        for node in graph.nodes:
            copy = self._copy(node)
            if copy is not None and copy not in self.kept:
                self.kept.add(copy)
                self.old.update(zip(copy.outputs, node.outputs, strict=True))
        self.claims = [
            (v, self.new[v]) for node in graph.nodes for v in node.outputs if v in self.new and not self._is_kept(v)
        ]
        for old, new in self.claims:
            self.old.setdefault(new, old)
        ends = dict(zip((o.value for o in graph.outputs), (o.value for o in rewritten.outputs), strict=True))
        ends |= {v: rewritten.updates[name] for name, v in graph.updates.items()}
        self.claims += [(v, new) for v, new in ends.items() if v.kind == "node" and self.new.get(v) is not new]

    def _copy(self, node: Node) -> Node | None:
        """The node of the rewritten graph that is the same op on the same values."""
        first = self.new.get(node.outputs[0])
        copy = None if first is None else first.node
        if copy is None or node.regions or copy.regions or copy.op.op_name != node.op.op_name:
            return None
        same = copy.op.attributes() == node.op.attributes()
        for old, new in ((node.inputs, copy.inputs), (node.outputs, copy.outputs)):
            same = same and len(old) == len(new) and all(self.new.get(v) is w for v, w in zip(old, new, strict=True))
        return copy if same else None

    def _is_kept(self, value: Value) -> bool:
        return self.old.get(self.new[value]) is value

    def wanted(self) -> set[Value]:
        """The values of the graph that comparisons need."""
        found = {v for v, _ in self.claims}
        found.update(v for old in list(found) if old.node is not None and rounds(old.node) for v in old.node.inputs)
        found.update(self.old[new] for _, new in self.claims if new.node in self.kept)
        seen: set[Node] = set()
        waiting = [new.node for _, new in self.claims if new.node is not None and new.node not in self.kept]
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                found.update(self.old[v] for v in node.inputs if v in self.old)
                waiting += [v.node for v in node.inputs if v.node is not None and v not in self.old]
        return found


class _Rewritten:
    """Values of the rewritten graph, computed from what the graph gives before them."""

    def __init__(
        self, pairs: _Pairs, values: dict[Value, Array], leaves: dict[Value, Array], extents: dict[str, int]
    ) -> None:
        self.pairs, self.values, self.extents = pairs, values, extents
        self.made: dict[Value, Array | RlxError] = dict(leaves)

    def value(self, value: Value) -> Array | RlxError:
        """What the rewritten graph gives for it, or why it gives nothing."""
        if value.node in self.pairs.kept:
            return self.values[self.pairs.old[value]]
        if value.data is not None and value not in self.made:
            return value.data
        waiting = [value]
        while waiting:  # chains of any length
            node = waiting[-1].node
            if waiting[-1] in self.made or node is None:
                waiting.pop()
                continue
            missing = [v for v in node.inputs if self._before(v) is None]
            if missing:
                waiting.extend(missing)
            else:
                self._run(node)
        return self.made[value]

    def _before(self, value: Value) -> Array | RlxError | None:
        """The value as an operand, None where it has to be computed first."""
        if value in self.pairs.old:
            return self.values[self.pairs.old[value]]
        return self.made.get(value, value.data)

    def _run(self, node: Node) -> None:
        operands = [self._before(v) for v in node.inputs]
        failed = next((o for o in operands if isinstance(o, RlxError)), None)
        try:
            if failed is not None:
                raise failed
            with np.errstate(all="ignore"):
                results: Sequence[Array | RlxError] = run_node(node, operands, self.extents)  # type: ignore[arg-type]
        except RlxError as error:
            results = [error] * len(node.outputs)
        self.made.update(zip(node.outputs, results, strict=True))


def _compared(
    value: Value, got: Array | RlxError, values: Mapping[Value, Array], given: Mapping[str, Tolerance]
) -> Comparison:
    node, expected = value.node, values[value]
    assert node is not None
    name = value.name or (node.provenance[0] if node.provenance else "?")
    if isinstance(got, RlxError):
        return Comparison(name, node.op.op_name, np.inf, np.inf, np.inf, f"it can't be computed: {got}")
    if rounds(node) and got.shape == expected.shape and got.dtype == expected.dtype:
        return compare_rounded(node, got, *range_of(node, [values[v] for v in node.inputs], given))
    allowed = allowed_for(expected.dtype, None, given)
    return compare(name, node.op.op_name, got, expected, allowed, largest(expected))
