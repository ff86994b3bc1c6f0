"""ONNX control flow: If, Loop and Scan as ops with closed regions, or written out where that is all that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlx.errors import ShapeError
from rlx.importers.onnx.dynamic import known_items, sizes_of
from rlx.importers.onnx.loop_carries import (
    Carry,
    ChangingError,
    GrowingCarry,
    ListCarry,
    TensorCarry,
    carried,
    steady_rows,
    with_shape,
)
from rlx.importers.onnx.mapping import TAINTED, Link, ListOf, Mapped, NodeContext, UnsupportedError, onnx_op
from rlx.importers.onnx.model import GraphProto
from rlx.importers.onnx.region import Region
from rlx.importers.onnx.scope import Scope
from rlx.importers.onnx.symbolic import static_array
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, TensorType, Value
from rlx.ir.shape import Dim, Guard, Shape, Size, bounds, max_size, never_positive, symbols
from rlx.ops.base import axis_of
from rlx.ops.control import If, Scan, While
from rlx.ops.dynamic import Loop
from rlx.ops.elementwise import Add, And, Equal, Less, Maximum
from rlx.ops.layout import Concat, Iota, Reshape, Slice, Transpose, Unsqueeze
from rlx.ops.select import Arange

I64, BOOL = DTYPES["i64"], DTYPES["bool"]
USUAL_ROOM = 1024  # of a carry along an axis where it grows, if nothing bounds it
MOST_WRITTEN_OUT = 64  # rounds of a loop whose carries change in size


def scope_of(ctx: NodeContext) -> Scope:
    assert isinstance(ctx.tensors, Scope)
    return ctx.tensors


def _open(scope: Scope, label: str, part: str) -> Region:
    return Region(Graph(f"{label}.{part}"), scope.region)


def _names(graph: GraphProto) -> list[str]:
    return [o.name for o in graph.outputs]


def _scalar(ctx: NodeContext, x: Value) -> Value:
    return ctx.reshape(x)


class Attempt:
    """What has been imported so far, to return to where a way to import a node fails."""

    def __init__(self, scope: Scope, label: str) -> None:
        self.scope, self.prefix = scope, f"{scope.prefix}{label}/"
        self.state = scope.run.result.snapshot()
        self.names = set(scope.run.names)
        self.sizes = len(scope.graph.nodes), len(scope.graph.guards)

    @property
    def misfits(self) -> bool:
        """Whether shapes contradict each other in what was imported since."""
        return bool(len(self.scope.run.result.misfits) > self.state[3])

    def undo(self) -> None:
        """Takes back nodes, names and weights that were made since; what the next attempt needs it makes again."""
        run, graph = self.scope.run, self.scope.graph
        run.result.restore(self.state)
        run.names = set(self.names)
        run.leaves = {name for name in run.leaves if not name.startswith(self.prefix)}
        params = self.scope.region.root.graph.params
        params[:] = [p for p in params if not p.name.startswith(self.prefix)]
        nodes, guards = self.sizes
        gone = {id(node) for node in graph.nodes[nodes:]}
        del graph.nodes[nodes:], graph.guards[guards:]
        for scope in run.scopes:
            if scope.region is self.scope.region:
                scope.forget(gone)


# ---- If


@onnx_op("If")
def _if(ctx: NodeContext) -> tuple[Mapped, ...]:
    """A known condition leaves one branch, which becomes part of the graph around it."""
    scope = scope_of(ctx)
    graphs = [ctx.subgraph("then_branch"), ctx.subgraph("else_branch")]
    known = ctx.known()
    if known is not None and known.concrete:
        chosen = graphs[0 if known.item() else 1]
        child = scope.subgraph(chosen, scope.region, ctx.label, {})
        return tuple(Link(child, name) for name in _names(chosen))
    cond = _scalar(ctx, ctx.value())
    if any(len(graph.outputs) != len(ctx.node.outputs) for graph in graphs):
        ctx.fail(f"its branches give {[len(g.outputs) for g in graphs]} outputs, the node has {len(ctx.node.outputs)}")
    attempt = Attempt(scope, ctx.label)
    regions = [_open(scope, ctx.label, part) for part in ("then", "else")]
    children = [scope.subgraph(g, r, ctx.label, {}) for g, r in zip(graphs, regions, strict=True)]
    deciders = scope.deciders(ctx.name(0))
    if deciders and attempt.misfits:  # the branch that is not taken need not make sense
        attempt.undo()
        ctx.undecided(0, "shapes in a branch contradict each other, and which is taken depends on run-time data")
    if any(child.is_tainted(n) for child, g in zip(children, graphs, strict=True) for n in _names(g)):
        return (TAINTED,) * len(ctx.node.outputs)
    results = [[_flat(child, n) for n in _names(g)] for child, g in zip(children, graphs, strict=True)]
    lengths = [[length for _, length in branch] for branch in results]
    ranks = [[v.rank for values, _ in branch for v in values] for branch in results]
    if lengths[0] != lengths[1]:
        ctx.undecided(0, "the sequences that its branches give differ in length")
    if ranks[0] != ranks[1] and deciders:
        attempt.undo()
        ctx.undecided(0, "its branches differ in rank, and which is taken depends on run-time data")
    decided = _decided(ctx, cond, ranks)
    if decided is not None:
        attempt.undo()
        ctx.graph.guards.append(decided)
        must = f"{decided.lhs} equal to {decided.rhs}"
        ctx.note(f"takes its then_branch in every run, which must have {must}: its branches differ in rank")
        child = scope.subgraph(graphs[0], scope.region, ctx.label, {})
        return tuple(Link(child, name) for name in _names(graphs[0]))
    sides = [[v for values, _ in branch for v in values] for branch in results]
    for i, (a, b) in enumerate(zip(*sides, strict=True)):
        shape = _common(ctx, a.type, b.type)
        for side, region in zip(sides, regions, strict=True):
            region.graph.output(with_shape(region.graph, side[i], shape, ctx.label), f"out{i}")
    captured = list(dict.fromkeys(v for region in regions for v in region.captured()))
    closed = [region.close((), captured) for region in regions]
    made = list(ctx.graph.add(If(), cond, *captured, provenance=(ctx.label,), regions=closed))
    outputs: list[Mapped] = []
    for length in lengths[0]:
        items = [made.pop(0) for _ in range(1 if length == TENSOR else max(length, 0))]
        outputs.append(items[0] if length == TENSOR else ListOf(tuple(items), length == ABSENT))
    return tuple(outputs)


def _decided(ctx: NodeContext, cond: Value, ranks: list[list[int]]) -> Guard | None:
    """The first branch's condition where the branches differ in rank and it is that two sizes are equal.

    As exporters write the squeezing of an axis that may be 1: only one rank fits what follows. The equality becomes a
    guard of every run.
    """
    if cond.node is not None and isinstance(cond.node.op, Reshape):
        (cond,) = cond.node.inputs
    if ranks[0] == ranks[1] or cond.node is None or not isinstance(cond.node.op, Equal):
        return None
    sides = [known_items(v) for v in cond.node.inputs]
    if any(len(items) != 1 for items in sides):
        return None
    (a,), (b,) = sides
    if a is None or b is None:
        return None
    names = sorted({symbol.name for size in (a, b) for symbol in symbols(size)})
    fixed = ", ".join(f"{name!r}: ..." for name in names)
    return Guard(
        a,
        b,
        f"node {ctx.label!r}: its branches differ in rank, so the then_branch, for equal sizes, was compiled; "
        f"dims={{{fixed}}} with numbers that differ chooses the other",
    )


TENSOR, ABSENT = -1, -2  # in the place of the length of a sequence


def _flat(scope: Scope, name: str) -> tuple[list[Value], int]:
    """The tensors that an output is, and the length of the sequence."""
    found = scope.sequence(name)
    if found is not None and not isinstance(found, ListOf):
        raise UnsupportedError(f"the length of the sequence {name!r} depends on the run")
    if found is None:
        return [scope.value(name)], TENSOR
    return [scope.item(i) for i in found.items], ABSENT if found.absent else len(found.items)


def _common(ctx: NodeContext, a: TensorType, b: TensorType) -> Shape:
    """The shape of an output: where the branches differ in a size, a dim that the run decides."""
    if a.dtype is not b.dtype or a.rank != b.rank:
        ctx.fail(f"its branches give {a} and {b}; they must agree in element type and rank")
    return tuple(x if x == y else _either(ctx, x, y) for x, y in zip(a.shape, b.shape, strict=True))


def _either(ctx: NodeContext, *sizes: Size) -> Size:
    lows, highs = zip(*(bounds(s) for s in sizes), strict=True)
    high = None if None in highs else max(highs)
    return ctx.fresh("size", min(low or 0 for low in lows), high)


# ---- Loop


@onnx_op("Loop")
def _loop(ctx: NodeContext) -> tuple[Mapped, ...]:
    scope, body = scope_of(ctx), ctx.subgraph("body")
    carries = len(ctx.node.inputs) - 2
    if len(body.inputs) != carries + 2 or len(body.outputs) < carries + 1:
        given = f"{len(body.inputs)} inputs and {len(body.outputs)} outputs"
        raise ShapeError(f"loop: the body has {given}, which does not fit {carries} carries")
    first = ctx.known(1) if ctx.has(1) else static_array(True, BOOL)
    runs = bool(first.item()) if first is not None and first.concrete else None
    lists = any(scope.sequence(name) is not None for name in ctx.node.inputs[2:])
    changes, attempt = False, Attempt(scope_of(ctx), ctx.label)
    if runs is not None and not lists and ctx.has(0):
        try:
            made = _counted(ctx, body, runs)
            if made is not None:
                return made
        except ChangingError:
            changes = True
        attempt.undo()
    trip = ctx.known(0) if ctx.has(0) else None
    if trip is not None and trip.concrete and runs is not None and (lists or changes):
        rounds = int(trip.item()) if runs else 0  # type: ignore[arg-type]
        written = _written_out(ctx, body, rounds) if rounds <= MOST_WRITTEN_OUT else None
        if written is not None:
            return written
        attempt.undo()
    try:
        return _conditional(ctx, body)
    except UnsupportedError as error:
        if error.inputs or (trip is not None and trip.concrete and runs is not None) or not ctx.has(0):
            raise
        attempt.undo()  # written out it may be possible, once the number of rounds is known
        asked = [scope.deciders(ctx.name(i)) for i, known in ((0, trip), (1, runs)) if known is None]
        raise UnsupportedError(str(error), [n for names in asked for n in names] if all(asked) else []) from error


def _trip(ctx: NodeContext) -> Size | None:
    """The number of rounds where it is known as a size."""
    known = ctx.known(0)
    if known is None:
        return None
    size = known.sizes()[0]
    return max(size, 0) if isinstance(size, int) else size


def _counted(ctx: NodeContext, body: GraphProto, runs: bool) -> tuple[Mapped, ...] | None:
    """The loop as a scan over the number of the round; None where the body decides when to stop."""
    scope = scope_of(ctx)
    initial = [ctx.value(i) for i in range(2, len(ctx.node.inputs))]
    region, outside = _open(scope, ctx.label, "body"), set(scope.run.names)
    names = [i.name for i in body.inputs]
    formal = [region.input(name, v.type) for name, v in zip(names[2:], initial, strict=True)]
    number = region.input(names[0] or "round", TensorType((), I64))
    bound: dict[str, Mapped] = dict(zip(names[2:], formal, strict=True))
    bound |= {names[0]: number, names[1]: static_array(True, BOOL)}
    child = scope.subgraph(body, region, ctx.label, bound)
    outputs = _names(body)
    if any(child.is_tainted(name) for name in outputs):
        return (TAINTED,) * len(ctx.node.outputs)
    goes_on = child.known(outputs[0])
    if goes_on is None or not goes_on.concrete or not goes_on.item():
        return None
    rows = _results(child, region, outputs[1:], initial, ctx.label, outside)
    steady = steady_rows(ctx, region, rows, outside)
    length = _trip(ctx) if runs else 0
    if length is None:
        length = ctx.fresh("count", 0, None)
        zero, one = (scope.graph.constant(n, dtype=I64) for n in (0, 1))
        rounds = ctx.add(Arange(length), zero, _scalar(ctx, ctx.value(0)), one)
    else:
        rounds = ctx.add(Iota(length))
    captured = region.captured()
    closed = region.close([*formal, *steady, number], captured)
    begin = [*initial, *(ctx.constant(-1, I64) for _ in steady)]
    made = ctx.graph.add(Scan(len(begin), 1), *begin, rounds, *captured, provenance=(ctx.label,), regions=[closed])
    return (*made[: len(initial)], *made[len(begin) :])


def _results(
    child: Scope,
    region: Region,
    names: Sequence[str],
    initial: Sequence[Value],
    label: str,
    outside: set[str] | None = None,
) -> list[tuple[str, Value]]:
    """Makes the carries of a body its outputs, in the types that they had before; gives the rows."""
    values = [(name, child.value(name)) for name in names]
    for i, ((name, value), before) in enumerate(zip(values, initial, strict=False)):
        region.graph.output(carried(region.graph, value, before.type, name, label, outside), f"out{i}")
    return values[len(initial) :]


def _conditional(ctx: NodeContext, body: GraphProto) -> tuple[Mapped, ...]:
    """The loop with its condition; carries that change in size in buffers as large as they can become.

    The first attempts find out which do, and by how much: where every round adds as much, the number of rounds gives
    the room that is needed; else it is for the user to say.
    """
    attempt = Attempt(scope_of(ctx), ctx.label)
    rooms: dict[int, dict[int, Size | None]] = {}  # by carry and axis; None: not known yet
    while True:
        carries = [_carry(ctx, i, attempt.names, rooms.get(i, {})) for i in range(len(ctx.node.inputs) - 2)]
        try:
            outputs = _loop_of(ctx, body, carries)
        except _CarryError as error:
            if not error.axes or error.axes <= rooms.get(error.carry, {}).keys():
                raise UnsupportedError(str(error)) from error
            rooms.setdefault(error.carry, {}).update(dict.fromkeys(error.axes))
            attempt.undo()
            continue
        if TAINTED in outputs or not any(None in of.values() for of in rooms.values()):
            return outputs
        attempt.undo()
        trips = None if _limit(ctx) is None else _most_rounds(ctx)
        for i, carry in enumerate(carries):
            if isinstance(carry, GrowingCarry):
                rooms[i].update(_rooms(ctx, carry, trips, attempt.names))
        attempt = Attempt(scope_of(ctx), ctx.label)


def _carry(ctx: NodeContext, i: int, outside: set[str], rooms: Mapping[int, Size | None]) -> Carry:
    if scope_of(ctx).sequence(ctx.node.inputs[i + 2]) is not None:
        return ListCarry(ctx, i + 2, outside)
    if not rooms:
        return TensorCarry(ctx, i + 2, outside)
    return GrowingCarry(
        ctx, i + 2, outside, {axis: Dim("room") if room is None else room for axis, room in rooms.items()}
    )


def _rooms(ctx: NodeContext, carry: GrowingCarry, trips: Size | None, outside: set[str]) -> dict[int, Size]:
    """The largest sizes of a carry along the axes where it changes, in so many rounds."""
    found: dict[int, Size] = {}
    for axis, grown in carry.grown.items():
        before = carry.type.shape[axis]
        if never_positive(grown):
            found[axis] = before
            continue
        if trips is not None and all(symbol.name in outside for symbol in symbols(grown)):
            found[axis] = max_size(before, before + grown * trips)
            continue
        final = carry.final[axis]
        most = bounds(final)[1]
        if most is None:
            most = USUAL_ROOM
            (name,) = (symbol.name for symbol in symbols(final))
            ctx.note(f"carries a tensor of size {name!r} without a bound: it has room for {most}; dims give it another")
        found[axis] = max_size(before, most)
    return found


def _most_rounds(ctx: NodeContext) -> Size:
    trip = _trip(ctx)
    if trip is not None:
        return max_size(trip, 0)
    rounds = ctx.add(Maximum(), ctx.cast(_scalar(ctx, ctx.value(0)), I64), ctx.constant(0, I64))
    return sizes_of(ctx.graph, rounds, "the number", lambda n: ctx.fresh("rounds", 0, None), ctx.label)[0]


class _CarryError(ChangingError):
    carry = 0


def _loop_of(ctx: NodeContext, body: GraphProto, carries: Sequence[Carry]) -> tuple[Mapped, ...]:
    """The loop with its condition, and the number of the round, before the carries."""
    scope = scope_of(ctx)
    graph, names, outputs = scope.graph, [i.name for i in body.inputs], _names(body)
    start = _scalar(ctx, ctx.value(1)) if ctx.has(1) else graph.constant(True)
    initial = [graph.constant(0, dtype=I64), start, *(v for carry in carries for v in carry.initial)]
    limit = _limit(ctx)
    region, asked = _open(scope, ctx.label, "body"), _open(scope, ctx.label, "cond")
    outside = set(scope.run.names)
    number, before, *rest = formal = [region.input("carry", v.type) for v in initial]
    bound: dict[str, Mapped] = {names[0]: number, names[1]: before}
    for name, carry in zip(names[2:], carries, strict=True):
        own, rest = rest[: len(carry.initial)], rest[len(carry.initial) :]
        bound[name] = carry.enter(region, own)
    child = scope.subgraph(body, region, ctx.label, bound)
    if any(child.is_tainted(name) for name in outputs):
        return (TAINTED,) * len(ctx.node.outputs)
    inner = region.graph
    (after,) = inner.add(Add(), number, inner.constant(1, dtype=I64), provenance=(ctx.label,))
    holds = child.value(outputs[0])
    results = [after, holds if holds.rank == 0 else inner.add(Reshape(()), holds)[0]]
    for i, (carry, name) in enumerate(zip(carries, outputs[1:], strict=False)):
        try:
            results += carry.leave(child, name)
        except ChangingError as error:
            raised = _CarryError(str(error), error.axes)
            raised.carry = i
            raise raised from error
    for i, value in enumerate(results):
        inner.output(value, f"out{i}")
    stacked = [(name, child.value(name)) for name in outputs[1 + len(carries) :]]
    appended = [carry.rows() for carry in carries]
    formal += steady_rows(ctx, region, stacked, outside)
    for i, value in enumerate(v for rows in appended for v in rows):
        inner.output(value, f"appended{i}")
    before_first = [graph.constant(-1, I64) for _ in formal[len(initial) :]]
    initial += before_first
    asking = [asked.input("carry", v.type) for v in formal]
    goes_on = asking[1]
    if limit is not None:
        (below,) = asked.graph.add(Less(), asking[0], asked.pull(limit))
        (goes_on,) = asked.graph.add(And(), goes_on, below)
    asked.graph.output(goes_on, "goes_on")
    captured = list(dict.fromkeys((*region.captured(), *asked.captured())))
    closed = [asked.close(asking, captured), region.close(formal, captured)]
    op: Loop | While = While(len(initial))
    if stacked or any(appended):
        op = Loop(len(initial), ctx.fresh("count", 0, _trip(ctx) if ctx.has(0) else None))
    made = list(graph.add(op, *initial, *captured, provenance=(ctx.label,), regions=closed))
    del made[:2]
    finals = [[made.pop(0) for _ in carry.initial] for carry in carries]
    del made[: len(before_first)]
    outs = [made.pop(0) for _ in stacked]
    ends = [[made.pop(0) for _ in rows] for rows in appended]
    return (*(c.after(final, end) for c, final, end in zip(carries, finals, ends, strict=True)), *outs)


def _limit(ctx: NodeContext) -> Value | None:
    """The largest number of rounds; None where there is none (exporters write the largest i64)."""
    known = ctx.known(0) if ctx.has(0) else None
    if not ctx.has(0) or (known is not None and known.concrete and known.ints()[0] >= 2**62):
        return None
    return _scalar(ctx, ctx.value(0))


def _written_out(ctx: NodeContext, body: GraphProto, rounds: int) -> tuple[Mapped, ...] | None:
    """The loop as that many copies of its body; None where its condition depends on the run."""
    scope, names, outputs = scope_of(ctx), [i.name for i in body.inputs], _names(body)
    carries: list[Mapped] = [Link(scope, name) for name in ctx.node.inputs[2:]]
    rows: list[list[Value]] = [[] for _ in outputs[1 + len(carries) :]]
    for number in range(rounds):
        bound: dict[str, Mapped] = dict(zip(names[2:], carries, strict=True))
        bound |= {names[0]: static_array(number), names[1]: static_array(True, BOOL)}
        child = scope.subgraph(body, scope.region, f"{ctx.label}[{number}]", bound)
        if any(child.is_tainted(name) for name in outputs):
            return (TAINTED,) * len(ctx.node.outputs)
        goes_on = child.known(outputs[0])
        if goes_on is None or not goes_on.concrete:
            return None
        carries = [Link(child, name) for name in outputs[1 : 1 + len(carries)]]
        for row, name in zip(rows, outputs[1 + len(carries) :], strict=True):
            row.append(ctx.add(Unsqueeze((0,)), child.value(name)))
        if not goes_on.item():
            break
    if any(not row for row in rows):
        return None
    return (*carries, *(row[0] if len(row) == 1 else ctx.add(Concat(0), *row) for row in rows))


# ---- Scan


def _scan_counts(ctx: NodeContext, inputs: int, results: int) -> tuple[int, int, int]:
    """How many of the inputs are scanned, how many are carried, and how many results are stacked."""
    scanned = ctx.integer("num_scan_inputs")
    carries = inputs - scanned
    if not 0 <= carries <= inputs or carries > results:
        raise ShapeError(f"scan: {inputs} inputs and {results} results for {scanned} scanned inputs")
    return scanned, carries, results - carries


@onnx_op("Scan", since=8, until=8)
def _scan_8(ctx: NodeContext) -> tuple[Mapped, ...]:
    """Over a batch too: a scan of scans."""
    scope, body = scope_of(ctx), ctx.subgraph("body")
    if ctx.has(0):
        ctx.fail("sequence_lens is not supported")
    inputs = [ctx.value(i) for i in range(1, len(ctx.node.inputs))]
    scanned, carries, _ = _scan_counts(ctx, len(inputs), len(body.outputs))
    directions = ctx.ints("directions", (0,) * scanned)
    batch = _open(scope, ctx.label, "batch")
    rows = [batch.input(f"in{i}", TensorType(v.shape[1:], v.dtype)) for i, v in enumerate(inputs)]
    within = Scope(scope.run, batch, scope.opsets, scope, scope.prefix, scope.attributes)
    turned = [_turned(batch.graph, x, 0, d) for x, d in zip(rows[carries:], directions, strict=True)]
    made = _scan(ctx, within, body, rows[:carries], turned)
    if made is None:
        return (TAINTED,) * len(ctx.node.outputs)
    for i, value in enumerate(made):
        batch.graph.output(value, f"out{i}")
    captured = batch.captured()
    closed = batch.close(rows, captured)
    return scope.graph.add(Scan(0, len(rows)), *inputs, *captured, provenance=(ctx.label,), regions=[closed])


@onnx_op("Scan", since=9)
def _scan_9(ctx: NodeContext) -> tuple[Mapped, ...]:
    scope, body = scope_of(ctx), ctx.subgraph("body")
    inputs = [ctx.value(i) for i in range(len(ctx.node.inputs))]
    scanned, carries, stacked = _scan_counts(ctx, len(inputs), len(body.outputs))
    axes, directions = ctx.ints("scan_input_axes", (0,) * scanned), ctx.ints("scan_input_directions", (0,) * scanned)
    sequences = [
        _turned(scope.graph, x, axis_of(a, x.rank, "scan"), d)
        for x, a, d in zip(inputs[carries:], axes, directions, strict=True)
    ]
    made = _scan(ctx, scope, body, inputs[:carries], sequences)
    if made is None:
        return (TAINTED,) * len(ctx.node.outputs)
    axes = ctx.ints("scan_output_axes", (0,) * stacked)
    directions = ctx.ints("scan_output_directions", (0,) * stacked)
    rows = []
    for x, axis, direction in zip(made[carries:], axes, directions, strict=True):
        at = axis_of(axis, x.rank, "scan")
        x = _turned(scope.graph, x, 0, direction)
        perm = list(range(1, x.rank))
        perm.insert(at, 0)
        rows.append(ctx.transpose(x, *perm))
    return (*made[:carries], *rows)


def _turned(graph: Graph, x: Value, axis: int, backwards: int) -> Value:
    """x with `axis` first, and from its end if `backwards`."""
    if axis:
        (x,) = graph.add(Transpose((axis, *(d for d in range(x.rank) if d != axis))), x)
    if backwards:
        starts, steps = (x.shape[0] - 1, *(0,) * (x.rank - 1)), (-1, *(1,) * (x.rank - 1))
        (x,) = graph.add(Slice(starts, x.shape, steps), x)
    return x


def _scan(
    ctx: NodeContext, scope: Scope, body: GraphProto, initial: Sequence[Value], sequences: Sequence[Value]
) -> tuple[Value, ...] | None:
    """Adds the scan over the first axes to the scope's graph; None where nodes of the body are missing."""
    names, outputs = [i.name for i in body.inputs], _names(body)
    if len(names) != len(initial) + len(sequences):
        raise ShapeError(f"scan: the body has {len(names)} inputs, the node {len(initial) + len(sequences)}")
    region, outside = _open(scope, ctx.label, "body"), set(scope.run.names)
    types = [v.type for v in initial] + [TensorType(v.shape[1:], v.dtype) for v in sequences]
    formal = [region.input(name, t) for name, t in zip(names, types, strict=True)]
    child = scope.subgraph(body, region, ctx.label, dict(zip(names, formal, strict=True)))
    if any(child.is_tainted(name) for name in outputs):
        return None
    try:
        rows = _results(child, region, outputs, initial, ctx.label)
    except ChangingError as error:
        raise UnsupportedError(str(error)) from error
    steady = steady_rows(ctx, region, rows, outside)
    captured = region.captured()
    closed = region.close([*formal[: len(initial)], *steady, *formal[len(initial) :]], captured)
    begin = [*initial, *(scope.graph.constant(-1, I64) for _ in steady)]
    op = Scan(len(begin), len(sequences))
    made = scope.graph.add(op, *begin, *sequences, *captured, provenance=(ctx.label,), regions=[closed])
    return (*made[: len(initial)], *made[len(begin) :])
