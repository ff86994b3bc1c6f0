"""Compares a device with the reference between the ops that round, such as the quantisations of a net in 8 bits.

An error of one part in a million turns 2.4999999 into 2.5000001, and that into another whole number. So the outputs of
a quantised net may be far from the reference's without a fault. Between two roundings nothing is magnified: each
stretch starts from what the reference rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np

from rlx.backends.reference import run_graph
from rlx.ir.extents import bind_extents
from rlx.ir.graph import Array, Graph, Node, Value
from rlx.ops.base import Op
from rlx.passes.dims import apply_dims
from rlx.passes.legalise import legalise
from rlx.passes.rewrite import copy_leaves, copy_node
from rlx.runtime.session import compile
from rlx.testing.nodewise import STANDARD, Comparison, allowed_for, compare, largest
from rlx.testing.oracle import Tolerance

__all__ = ["compare_between_roundings", "compare_rounded", "range_of", "rounds"]

# Element by element these go up or down by steps with their first operand.
ROUNDING = frozenset({
    "cast", "ceil", "equal", "floor", "greater", "greater_equal", "less", "less_equal", "not_equal", "quantize",
    "round", "sign",
})  # fmt: skip

# Round in one of their parts, which are looked at in their place.
WHOLE = frozenset({"dynamic_quantize_linear"})


def compare_between_roundings(
    graph: Graph, inputs: Mapping[str, Array], device: str, given: Mapping[str, Tolerance] = STANDARD
) -> list[Comparison]:
    """What each rounding op gives, and the outputs, where all that an op reads of earlier roundings is the reference's.

    The device computes every stretch as it does within the whole, with its fusions. A rounded element agrees where it
    lies between the results for the operand less and plus what a chain of ops is allowed. Empty where no rounding could
    go either way so: then none explains why outputs differ.
    """
    fixed = apply_dims(graph, bind_extents(graph, {name: np.shape(array) for name, array in inputs.items()}))
    fixed, _ = legalise(fixed, lambda node: "rounds in a part" if node.op.op_name in WHOLE else None)
    rounding = [node for node in fixed.nodes if rounds(node)]
    if not rounding:
        return []
    walk = _Ranges(fixed, rounding, inputs, given)
    expected = run_graph(fixed, inputs, trace=walk.see)
    if not walk.open:
        return []

    cut, values = copy_leaves(fixed)
    cut.guards.extend(fixed.guards)
    for node in fixed.nodes:
        values.update(zip(node.outputs, copy_node(cut, node, [values[v] for v in node.inputs]), strict=True))
        if node in walk.ranges:
            (value,) = node.outputs
            cut.output(values[value], f"rounded {len(cut.outputs)}")
            values[value] = cut.input(f"as rounded {len(cut.outputs)}", value.shape, value.dtype)
    for output in fixed.outputs:
        cut.output(values[output.value], output.name)
    starts = dict(zip((v.name for v in cut.inputs[len(fixed.inputs) :]), walk.rounded, strict=True))
    got = map(np.asarray, compile(cut, device=device).run({**inputs, **starts}))

    found = [compare_rounded(node, next(got), *walk.ranges[node]) for node in walk.ranges]
    for name, array in expected.items():
        found.append(compare(name, "", next(got), array, allowed_for(array.dtype, None, given), largest(array)))
    return found


def rounds(node: Node) -> bool:
    """Whether a node makes steps of a float that a run computes."""
    operand = node.inputs[0] if node.inputs else None
    if node.op.op_name not in ROUNDING or operand is None or operand.kind not in ("input", "node", "state"):
        return False
    return operand.dtype.is_float and (node.op.op_name != "cast" or not node.outputs[0].dtype.is_float)


class _Ranges:
    """Follows a run of the reference; keeps what was rounded, and the least and the largest that it might have been."""

    def __init__(
        self, graph: Graph, rounding: list[Node], inputs: Mapping[str, Array], given: Mapping[str, Tolerance]
    ) -> None:
        self.wanted = set(rounding)
        self.read = {v for node in rounding for v in node.inputs}
        self.given = given
        self.values: dict[Value, Array] = {v: np.asarray(inputs[v.name]) for v in graph.inputs}
        self.values |= {v: v.data for v in (*graph.constants, *graph.params, *graph.states) if v.data is not None}
        self.rounded: list[Array] = []
        self.ranges: dict[Node, tuple[Array, Array]] = {}
        self.open = False  # whether an element might have been rounded to another value

    def see(self, node: Node, results: tuple[Array, ...]) -> None:
        """Takes a node's results."""
        self.values.update((v, a) for v, a in zip(node.outputs, results, strict=True) if v in self.read)
        if node not in self.wanted:
            return
        operands = [self.values[v] for v in node.inputs if v in self.values]
        if len(operands) < len(node.inputs):
            return  # a state without an initial value
        self.rounded.append(results[0])
        least, most = self.ranges[node] = range_of(node, operands, self.given)
        self.open |= bool((least < most).any())


def range_of(node: Node, operands: Sequence[Array], given: Mapping[str, Tolerance]) -> tuple[Array, Array]:
    """The least and the most that a rounding op gives for its operand less and plus what a chain of ops is allowed."""
    x, *others = operands
    assert isinstance(node.op, Op)
    allowed = allowed_for(x.dtype, None, given)
    with np.errstate(all="ignore"):
        off = allowed.absolute * largest(x) + allowed.relative * np.abs(x)
        off = np.where(np.isfinite(x), off, 0)  # an infinity less an infinity would be NaN
        low, high = ((x + end).astype(x.dtype) for end in (-off, off))
        # equality, and a cast to bools, are alike on both sides of a single point
        point = others[0] if node.op.op_name in ("equal", "not_equal") else np.zeros((), x.dtype)
        among = np.minimum(np.maximum(point, low), high)
        found = [node.op.reference(operand, *others) for operand in (low, among, high)]
    return reduce(np.minimum, found), reduce(np.maximum, found)


def compare_rounded(node: Node, got: Array, least: Array, most: Array) -> Comparison:
    (value,) = node.outputs
    name = value.name or (node.provenance[0] if node.provenance else "?")
    with np.errstate(invalid="ignore"):
        wrong = int((~((got >= least) & (got <= most)) & ~((got != got) & (least != least))).sum())
    note = f"{wrong} of {got.size} elements are beyond what a rounding explains" if wrong else ""
    return Comparison(name, node.op.op_name, float(wrong), wrong / max(got.size, 1), 2.0 if wrong else 0.0, note)
