"""`vmap` of control flow: loops over arrays of carries, and branches that some of the slices take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlx import ops
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, Node, Value
from rlx.ops.control import If, Scan, While
from rlx.ops.elementwise import Div, Mod
from rlx.ops.gradients.attach import cast, reshaped
from rlx.ops.gradients.batching import moved
from rlx.ops.gradients.engine import open_frame
from rlx.ops.index import Gather, GatherElements, GatherND
from rlx.ops.scatter import ScatterElements, ScatterNd
from rlx.trace.control import cond, scan, while_loop

__all__ = ["BATCHED", "is_guarded"]

Values = Sequence[Value]
Flags = Sequence[bool]
# Applies a region to values in the open graph, those that are flagged being arrays of rows: all results as such arrays,
# or as they are where nothing of the rows is in them.
Inlined = Callable[[Graph, Values, Flags], list[tuple[Value, bool]]]


def _reached(region: Graph, flags: Flags) -> list[bool]:
    """Which results of a region depend on the flagged inputs."""
    known = {v for v, flag in zip(region.inputs, flags, strict=True) if flag}
    for node in region.nodes:
        if any(v in known for v in node.inputs):
            known.update(node.outputs)
    return [o.value in known for o in region.outputs]


def _settled(flags: Flags, region: Graph, carries: int) -> list[bool]:
    """The flags, with the carries that depend on flagged ones after some rounds flagged too."""
    now = list(flags)
    while True:
        after = [a or b for a, b in zip(now, _reached(region, now)[:carries], strict=False)]
        if after == now[:carries]:
            return now
        now[:carries] = after


def _own(values: Values) -> list[Value]:
    frame = open_frame()
    return [frame.own(v) for v in values]


def _chosen(where: Value, a: Value, b: Value) -> Value:
    """Rows of a where the bool of the row holds, else of b."""
    return ops.where(reshaped(where, (where.shape[0], *[1] * (a.rank - 1))), a, b)  # type: ignore[no-any-return]


def is_guarded(node: Node, batched: Flags) -> bool:
    """Whether slices differ in whether they take a branch or go on with a loop in which a node may stop the run."""
    if isinstance(node.op, If):
        return batched[0] and _may_stop(node)
    if not isinstance(node.op, While) or not any(map(_may_stop, node.regions[1].nodes)):
        return False
    return _reached(node.regions[0], _settled(batched, node.regions[1], node.op.carries))[0]


def _may_stop(node: Node) -> bool:
    """Whether data decide that a node fails, or never ends."""
    op, unknown = node.op, [v.kind != "const" for v in node.inputs]
    divides = isinstance(op, Div | Mod) and not node.outputs[0].dtype.is_float and unknown[1]
    indexes = isinstance(op, Gather | GatherElements | GatherND | ScatterElements | ScatterNd) and unknown[1]
    return isinstance(op, While) or divides or indexes or any(_may_stop(n) for r in node.regions for n in r.nodes)


def _if(node: Node, inputs: Values, batched: Flags, full: Any, inlined: Inlined) -> list[Value]:
    """One condition for all slices chooses; with one for each, both branches are computed and each takes its own."""
    pred, captured = inputs[0], inputs[1:]

    def side(region: Graph) -> Any:
        def run() -> tuple[Value, ...]:
            return tuple(v if b else full(v) for v, b in inlined(region, _own(captured), batched[1:]))

        return run

    if not batched[0]:
        return list(cond(pred, side(node.regions[0]), side(node.regions[1])))
    return [_chosen(pred, a, b) for a, b in zip(side(node.regions[0])(), side(node.regions[1])(), strict=True)]


def _scan(node: Node, inputs: Values, batched: Flags, full: Any, inlined: Inlined) -> list[Value]:
    """One loop, whose carries and rows are those of all slices."""
    op: Any = node.op
    n, (region,) = op.carries, node.regions
    flags = _settled(batched, region, n)
    start = [v if b or not flag else full(v) for v, b, flag in zip(inputs[:n], batched, flags, strict=False)]
    rows = [moved(v, 0, 1) if b else v for v, b in zip(inputs[n : n + op.scanned], batched[n:], strict=False)]
    captured = inputs[n + op.scanned :]
    stacked: list[bool] = []

    def body(carry: Any, row: Any) -> Any:
        made = inlined(region, [*carry, *(row or ()), *_own(captured)], flags)
        stacked[:] = [b for _, b in made[n:]]
        after = [full(v) if flag and not b else v for (v, b), flag in zip(made[:n], flags, strict=False)]
        return tuple(after), tuple(v for v, _ in made[n:])

    last, made = scan(body, tuple(start), tuple(rows) or None, length=op.length, reverse=op.reverse)
    whole = [v if flag else full(v) for v, flag in zip(last, flags, strict=False)]
    return [*whole, *(moved(v, 1, 0) if b else full(v) for v, b in zip(made, stacked, strict=True))]


def _while(node: Node, inputs: Values, batched: Flags, full: Any, inlined: Inlined) -> list[Value]:
    """One loop until no slice goes on; what a slice has stays as it is when its own condition has failed."""
    op: Any = node.op
    n, (asked, region) = op.carries, node.regions
    flags = _settled(batched, region, n)
    apart = _reached(asked, flags)[0]
    if apart:
        flags = [True] * n + list(flags[n:])
    start = [v if b or not flag else full(v) for v, b, flag in zip(inputs[:n], batched, flags, strict=False)]
    captured = inputs[n:]

    def goes_on(carry: Any) -> Value:
        on, each = inlined(asked, [*carry, *_own(captured)], flags)[0]
        return full(on) if apart and not each else on  # a sum over the slices is one for all of them

    def again(carry: Any) -> Any:
        on = goes_on(carry)
        return ops.reduce_max(cast(on, DTYPES["i32"]), keepdims=False) > 0 if apart else on

    def body(carry: Any) -> Any:
        made = inlined(region, [*carry, *_own(captured)], flags)
        after = [full(v) if flag and not b else v for (v, b), flag in zip(made, flags, strict=False)]
        if apart:
            on = goes_on(carry)
            after = [_chosen(on, new, old) for new, old in zip(after, carry, strict=True)]
        return tuple(after)

    last = while_loop(again, body, tuple(start))
    return [v if flag else full(v) for v, flag in zip(last, flags, strict=False)]


BATCHED: dict[type, Any] = {If: _if, Scan: _scan, While: _while}
