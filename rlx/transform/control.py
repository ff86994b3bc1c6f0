"""Derivatives of control flow: branches, loops over rows, and (forwards) loops that data end.

Backwards, a branch is computed again where its gradient is. A scan keeps what a round can't be taken back without, and
what takes long to compute again: the carries before each round, and the results of products and scalar functions. All
else that its gradient needs is computed again, round by round from the end. What is kept comes out of a second scan,
which the pass `join_scans` finds to be the first one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.shape import symbols
from rlx.ops.base import apply
from rlx.ops.contract import MatMul
from rlx.ops.control import If, Scan, While
from rlx.ops.gradients.attach import is_smooth, reshaped, zeros
from rlx.ops.gradients.engine import CONTROL, open_frame, pull, push, replay
from rlx.ops.layout import Transpose
from rlx.trace.control import cond, scan, while_loop

Tangents = Sequence[Value | None]


# of which ops a scan keeps the results for its gradient, where that reads them
KEPT = frozenset(("attention", "conv", "conv_transpose", "einsum", "gemm", "grouped_matmul", "matmul"))
KEPT |= {"cos", "erf", "exp", "log", "normal_cdf", "pow", "rsqrt", "sigmoid", "sin", "sqrt", "tanh"}


def inlined(
    region: Graph, inputs: Sequence[Value], kept: Mapping[Value, Value] | None = None
) -> tuple[list[Value], list[Node], dict[Value, Value]]:
    """The results of a region on these values, in the open graph, the nodes that this takes, and what values became.

    Values of the region that are `kept` are not computed.
    """
    frame = open_frame()
    values: dict[Value, Value] = dict(zip(region.inputs, inputs, strict=True))
    for const in region.constants:
        values[const] = frame.array(const.data)
    nodes = replay(region.nodes, values, kept=kept)
    return [values[o.value] for o in region.outputs], nodes, values


def _own(values: Sequence[Value]) -> list[Value]:
    """The values as ones of the open graph."""
    frame = open_frame()
    return [frame.own(v) for v in values]


def _pulled(
    region: Graph,
    inputs: Sequence[Value],
    cotangents: Tangents,
    wanted: Sequence[int],
    kept: Mapping[Value, Value] | None = None,
) -> list[Value]:
    """The cotangents of the inputs `wanted` of a region, zeros where nothing depends on one."""
    from rlx.ops import identity

    inputs = [identity(v) for v in inputs]
    results, nodes, _ = inlined(region, inputs, kept)
    seeds: dict[Value, Value] = {}
    for value, ct in zip(results, cotangents, strict=True):
        if ct is not None and is_smooth(value):
            seeds[value] = seeds[value] + ct if value in seeds else ct
    asked = [inputs[i] for i in wanted]
    return [zeros(v) if ct is None else ct for v, ct in zip(asked, pull(nodes, seeds, asked), strict=True)]


def _pushed(region: Graph, inputs: Sequence[Value], tangents: dict[int, Value]) -> tuple[list[Value], list[Value]]:
    """The results of a region, and the tangents of those that are floats, zeros where nothing depends on one."""
    from rlx.ops import identity

    inputs = [identity(v) for v in inputs]
    results, nodes, _ = inlined(region, inputs)
    known = {inputs[i]: t for i, t in tangents.items()}
    push(nodes, known)
    return results, [known[v] if v in known else zeros(v) for v in results if is_smooth(v)]


def _spread(places: Sequence[int], values: Sequence[Value], count: int) -> list[Value | None]:
    made: list[Value | None] = [None] * count
    for place, value in zip(places, values, strict=True):
        made[place] = value
    return made


class _If:
    """The condition chooses between derivatives as it does between the branches."""

    def vjp(self, node: Node, cotangents: Tangents, flags: Sequence[bool]) -> Tangents:
        pred, *captured = _own(node.inputs)
        wanted = [i for i, flag in enumerate(flags[1:]) if flag]
        given = [ct for ct in cotangents if ct is not None]

        def side(region: Graph) -> Any:
            def pulled(*values: Any) -> Any:
                inputs, cts = values[: len(captured)], iter(values[len(captured) :])
                filled = [None if ct is None else next(cts) for ct in cotangents]
                return tuple(_pulled(region, inputs, filled, wanted))

            return pulled

        made = cond(pred, side(node.regions[0]), side(node.regions[1]), *captured, *given)
        return _spread([i + 1 for i in wanted], made, len(node.inputs))

    def jvp(self, node: Node, tangents: Tangents) -> Tangents:
        pred, *captured = _own(node.inputs)
        places = [i for i, t in enumerate(tangents[1:]) if t is not None]
        given = [t for t in tangents[1:] if t is not None]

        def side(region: Graph) -> Any:
            def pushed(*values: Any) -> Any:
                inputs, ts = values[: len(captured)], values[len(captured) :]
                return tuple(_pushed(region, inputs, dict(zip(places, ts, strict=True)))[1])

            return pushed

        made = cond(pred, side(node.regions[0]), side(node.regions[1]), *captured, *given)
        return _spread([i for i, v in enumerate(node.outputs) if is_smooth(v)], made, len(node.outputs))


def _rounds(node: Node) -> tuple[list[Value], list[Value], list[Value]]:
    """The carries, scanned inputs and captured values of a scan."""
    op: Any = node.op
    values = _own(node.inputs)
    return values[: op.carries], values[op.carries : op.carries + op.scanned], values[op.carries + op.scanned :]


def _factors(ct: Value) -> tuple[Value, Value] | None:
    """x and y of a cotangent that is x^T y, where all rounds' rows of both take less room than their products.

    A weight's gradient is then one product over the rows of all rounds, instead of a sum that each round adds to.
    """
    if ct.node is None or not isinstance(ct.node.op, MatMul) or ct.rank != 2:
        return None
    left, right = ct.node.inputs
    turned = left.node
    if turned is None or not isinstance(turned.op, Transpose) or turned.op.perm != (1, 0) or right.rank != 2:
        return None
    x = turned.inputs[0]
    sizes = (*x.shape, right.shape[1])
    if not all(isinstance(size, int) for size in sizes):
        return None
    rows, m, n = sizes
    return (x, right) if rows * (m + n) < m * n else None


def _worth_keeping(node: Node) -> list[Value]:
    """The values of a scan's body that differ from round to round and take long to compute, of sizes known before."""
    op: Any = node.op
    body = node.regions[0]
    varies = set(body.inputs[: op.carries + op.scanned])
    known = {s.name for v in body.inputs for size in v.shape for s in symbols(size)}
    found: list[Value] = []
    for inner in body.nodes:
        if varies.isdisjoint(inner.inputs):
            continue
        varies.update(inner.outputs)
        fixed = all(s.name in known for v in inner.outputs for size in v.shape for s in symbols(size))
        if inner.op.op_name in KEPT and fixed and all(is_smooth(v) for v in inner.outputs):
            found += inner.outputs
    return found


class _Scan:
    """Rows of tangents go along; cotangents go back through the carries before each round, which are kept for it."""

    def _kept(self, node: Node) -> tuple[tuple[Value, ...], dict[Value, Value]]:
        """Each carry before each round, stacked, and so the values of the body that are kept."""
        op: Any = node.op
        carries, rows, captured = _rounds(node)
        wanted = _worth_keeping(node)
        if not carries and not wanted:
            return (), {}

        def body(carry: Any, row: Any) -> Any:
            results, _, values = inlined(node.regions[0], [*carry, *(row or ()), *_own(captured)])
            return tuple(results[: op.carries]), (carry, tuple(values[v] for v in wanted))

        length = None if rows else op.length
        _, (before, kept) = scan(body, tuple(carries), tuple(rows) or None, length=length, reverse=op.reverse)
        return tuple(before), dict(zip(wanted, kept, strict=True))

    def vjp(self, node: Node, cotangents: Tangents, flags: Sequence[bool]) -> Tangents:
        op: Any = node.op
        carries, rows, captured = _rounds(node)
        before, kept = self._kept(node)
        first, moved, fixed = op.carries, [], []
        for i, flag in enumerate(flags):
            if flag and i >= first + op.scanned:
                fixed.append(i)
            elif flag and i >= first:
                moved.append(i)
        smooth = [i for i, v in enumerate(carries) if is_smooth(v)]
        start = [zeros(carries[i]) if cotangents[i] is None else cotangents[i] for i in smooth]
        stacked = [(k, ct) for k, ct in enumerate(cotangents[first:]) if ct is not None]
        late: list[int] = []  # of `fixed`, by position: products of what all rounds have, after the loop
        may_be_late: list[int] = []

        def body(carry: Any, row: Any) -> Any:
            of_carries, sums = carry
            values, own_rows, of_rows, own_kept = row
            given: list[Value | None] = [None] * len(cotangents)
            for i, ct in zip(smooth, of_carries, strict=True):
                given[i] = ct
            for (k, _), ct in zip(stacked, of_rows, strict=True):
                given[first + k] = ct
            inputs = [*values, *own_rows, *_own(captured)]
            there = dict(zip(kept, own_kept, strict=True))
            found = _pulled(node.regions[0], inputs, given, [*smooth, *moved, *fixed], there)
            n, m = len(smooth), len(smooth) + len(moved)
            of_fixed = dict(enumerate(found[m:]))
            may_be_late[:] = [k for k, ct in of_fixed.items() if _factors(ct) is not None]
            pairs = tuple(_factors(of_fixed.pop(k)) for k in late)
            added = tuple(a + b for a, b in zip(sums, of_fixed.values(), strict=True))
            return (tuple(found[:n]), added), (tuple(found[n:m]), pairs)

        rows_in = (before, tuple(rows), tuple(ct for _, ct in stacked), tuple(kept.values()))
        length = op.length if not (before or rows or stacked) else None

        def rounds() -> Any:
            totals = tuple(zeros(node.inputs[i]) for k, i in enumerate(fixed) if k not in late)
            return scan(body, (tuple(start), totals), rows_in, length=length, reverse=not op.reverse)

        (last, sums), (made, pairs) = rounds()
        if may_be_late:
            late += may_be_late
            (last, sums), (made, pairs) = rounds()
        of_fixed = list(sums)
        for k, (left, right) in zip(late, pairs, strict=True):
            x, y = (reshaped(v, (v.shape[0] * v.shape[1], v.shape[2])) for v in (left, right))
            of_fixed.insert(k, apply(MatMul(), apply(Transpose((1, 0)), x), y))
        return _spread([*smooth, *moved, *fixed], [*last, *made, *of_fixed], len(node.inputs))

    def jvp(self, node: Node, tangents: Tangents) -> Tangents:
        op: Any = node.op
        carries, rows, captured = _rounds(node)
        first = op.carries
        smooth = [i for i, v in enumerate(carries) if is_smooth(v)]
        start = []
        for i in smooth:
            t = tangents[i]
            start.append(zeros(carries[i]) if t is None else t)
        moved = [i for i in range(first, first + op.scanned) if tangents[i] is not None]
        fixed = [i for i in range(first + op.scanned, len(node.inputs)) if tangents[i] is not None]

        def body(carry: Any, row: Any) -> Any:
            values, ts = carry
            own_rows, row_ts = row if row is not None else ((), ())
            known = dict(zip([*smooth, *moved], [*ts, *row_ts], strict=True))
            for i in fixed:
                t = tangents[i]
                assert t is not None
                known[i] = open_frame().own(t)
            results, made = _pushed(node.regions[0], [*values, *own_rows, *_own(captured)], known)
            return (tuple(results[:first]), tuple(made[: len(smooth)])), tuple(made[len(smooth) :])

        rows_in = (tuple(rows), tuple(tangents[i] for i in moved)) if rows else None
        init = (tuple(carries), tuple(start))
        (_, last), stacked = scan(body, init, rows_in, length=op.length, reverse=op.reverse)
        places = [*smooth, *(i for i in range(first, len(node.outputs)) if is_smooth(node.outputs[i]))]
        return _spread(places, [*last, *stacked], len(node.outputs))


class _While:
    """Tangents are carried along; how often it runs has none."""

    def jvp(self, node: Node, tangents: Tangents) -> Tangents:
        op: Any = node.op
        values = _own(node.inputs)
        carries, captured = values[: op.carries], values[op.carries :]
        smooth = [i for i, v in enumerate(carries) if is_smooth(v)]
        start = []
        for i in smooth:
            t = tangents[i]
            start.append(zeros(carries[i]) if t is None else t)
        asked, region = node.regions

        def again(carry: Any) -> Any:
            return inlined(asked, [*carry[0], *_own(captured)])[0][0]

        def body(carry: Any) -> Any:
            known = dict(zip(smooth, carry[1], strict=True))
            for i in range(op.carries, len(node.inputs)):
                t = tangents[i]
                if t is not None:
                    known[i] = open_frame().own(t)
            results, made = _pushed(region, [*carry[0], *_own(captured)], known)
            return tuple(results), tuple(made)

        _, last = while_loop(again, body, (tuple(carries), tuple(start)))
        return _spread(smooth, last, len(node.outputs))


CONTROL.update({If: _If(), Scan: _Scan(), While: _While()})
