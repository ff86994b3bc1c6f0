"""ONNX sequences and optionals: lists of tensors known one by one at import."""

from __future__ import annotations

from rlx.errors import ShapeError
from rlx.importers.onnx.loop_carries import concatenated
from rlx.importers.onnx.mapping import TAINTED, Appending, Link, ListOf, Mapped, NodeContext, StackOf, onnx_op
from rlx.importers.onnx.mappings.control import scope_of
from rlx.importers.onnx.symbolic import LIMIT, static_array
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Value
from rlx.ir.shape import Size
from rlx.ops.base import axis_of
from rlx.ops.index import Gather
from rlx.ops.layout import Concat, Full, Split, Squeeze, Unsqueeze

BOOL = DTYPES["bool"]


def _link(ctx: NodeContext, i: int) -> Link:
    return Link(scope_of(ctx), ctx.name(i))


def _items(ctx: NodeContext, i: int = 0) -> list[Value]:
    scope = scope_of(ctx)
    return [scope.item(item) for item in ctx.sequence(i).items]


def _rows(ctx: NodeContext, found: StackOf) -> Value:
    return scope_of(ctx).item(found.rows)


@onnx_op("SequenceEmpty", since=11)
def _empty(ctx: NodeContext) -> Mapped:
    ctx.ignore("dtype")
    return ListOf(())


@onnx_op("SequenceConstruct", since=11)
def _construct(ctx: NodeContext) -> Mapped:
    return ListOf(tuple(_link(ctx, i) for i in range(len(ctx.node.inputs))))


@onnx_op("SequenceInsert", since=11)
def _insert(ctx: NodeContext) -> Mapped:
    found = ctx.sequenced()
    if isinstance(found, StackOf | Appending) and ctx.has(2):
        ctx.fail("a position in a sequence whose length depends on the run is not supported")
    if isinstance(found, Appending):
        return Appending((*found.items, _link(ctx, 1)))
    if isinstance(found, StackOf):
        return StackOf(ctx.add(Concat(0), _rows(ctx, found), ctx.add(Unsqueeze((0,)), ctx.value(1))))
    items = list(ctx.sequence().items)
    at = _position(ctx, 2, len(items) + 1) if ctx.has(2) else len(items)
    items.insert(at, _link(ctx, 1))
    return ListOf(tuple(items))


@onnx_op("SequenceErase", since=11)
def _erase(ctx: NodeContext) -> Mapped:
    items = list(ctx.sequence().items)
    del items[_position(ctx, 1, len(items)) if ctx.has(1) else -1]
    return ListOf(tuple(items))


@onnx_op("SequenceAt", since=11)
def _at(ctx: NodeContext) -> Mapped:
    found = ctx.sequenced()
    if isinstance(found, StackOf):
        return ctx.add(Gather(0), _rows(ctx, found), ctx.reshape(ctx.value(1)))
    items = ctx.sequence().items
    return items[_position(ctx, 1, len(items))]


def _position(ctx: NodeContext, i: int, count: int) -> int:
    (at,) = ctx.ints_of(i, "the position")
    if not -count <= at < count:
        raise ShapeError(f"{ctx.node.op_type}: position {at} is outside a sequence of {count}")
    return at % count


@onnx_op("SequenceLength", since=11)
def _length(ctx: NodeContext) -> Mapped:
    found = ctx.sequenced()
    if isinstance(found, StackOf):
        return static_array(found.rows.shape[0])
    return static_array(len(ctx.sequence().items))


@onnx_op("SplitToSequence", since=11, static=(1,))
def _split(ctx: NodeContext) -> Mapped:
    x = ctx.value()
    axis = axis_of(ctx.integer("axis", 0), x.rank, "SplitToSequence")
    keepdims = ctx.flag("keepdims", 1)
    n = x.shape[axis]
    many = not isinstance(n, int) or n > LIMIT
    if many and (not ctx.has(1) or _all_one(ctx, 1)):
        if ctx.has(1) and ctx.type(1).rank and isinstance(n, int) and ctx.type(1).shape[0] != n:
            ctx.fail(f"{ctx.type(1).shape[0]} parts of size 1 are not the axis of size {n}")
        rows = ctx.transpose(x, axis, *(d for d in range(x.rank) if d != axis))
        return StackOf(ctx.add(Unsqueeze((axis + 1,)), rows) if keepdims or ctx.has(1) else rows)
    if not isinstance(n, int):
        ctx.fail(f"the axis of size {n} gives a number of parts that depends on the run; fix it with dims")
    if not ctx.has(1):
        parts: list[Size] = [1] * n
    elif ctx.type(1).rank == 0:
        (each,) = ctx.ints_of(1, "the size of parts")
        count = -(-n // max(each, 1))
        if count > LIMIT:
            ctx.fail(f"the axis of size {n} gives {count} parts, more than {LIMIT}")
        parts = [min(each, n - i * each) for i in range(count)]
    else:
        parts = ctx.sizes(1, "the sizes of parts")
    made = ctx.add_all(Split(axis, tuple(parts)), x) if parts else ()
    if not ctx.has(1) and not keepdims:
        made = tuple(ctx.add(Squeeze((axis,)), part) for part in made)
    return ListOf(tuple(made))


def _all_one(ctx: NodeContext, i: int) -> bool:
    """Whether an input is known to be 1 everywhere, though its size may not be."""
    known = ctx.known(i)
    if known is not None:
        return known.concrete and bool((known.array() == 1).all())
    node = ctx.value(i).node
    return node is not None and isinstance(node.op, Full) and node.op.value == 1


@onnx_op("ConcatFromSequence", since=11)
def _concat(ctx: NodeContext) -> Mapped:
    found, new = ctx.sequenced(), ctx.flag("new_axis")
    if isinstance(found, StackOf):
        at = axis_of(ctx.integer("axis"), found.rows.rank - (not new), "ConcatFromSequence")
        return concatenated(ctx, _rows(ctx, found), at, new)
    items, axis = _items(ctx), ctx.integer("axis")
    if not items:
        ctx.fail("the sequence is empty")
    if ctx.flag("new_axis"):
        at = axis_of(axis, items[0].rank + 1, "ConcatFromSequence")
        items, axis = [ctx.add(Unsqueeze((at,)), item) for item in items], at
    return items[0] if len(items) == 1 else ctx.add(Concat(axis), *items)


@onnx_op("SequenceMap", since=17)
def _map(ctx: NodeContext) -> tuple[Mapped, ...]:
    """The body once for each item."""
    scope, body = scope_of(ctx), ctx.subgraph("body")
    count = len(ctx.sequence().items)
    columns: list[list[Link]] = [[] for _ in body.outputs]
    for n in range(count):
        bound: dict[str, Mapped] = {}
        for i, info in enumerate(body.inputs):
            items = None if scope.sequence(ctx.name(i)) is None else ctx.sequence(i)
            if items is not None and len(items.items) != count:
                ctx.fail(f"its sequences have {count} and {len(items.items)} items")
            bound[info.name] = _link(ctx, i) if items is None else items.items[n]
        child = scope.subgraph(body, scope.region, f"{ctx.label}[{n}]", bound)
        if any(child.is_tainted(o.name) for o in body.outputs):
            return (TAINTED,) * len(ctx.node.outputs)
        for column, output in zip(columns, body.outputs, strict=True):
            column.append(Link(child, output.name))
    return tuple(ListOf(tuple(column)) for column in columns)


# ---- optionals: lists of no or one item; a sequence in an optional is that sequence


@onnx_op("Optional", since=15)
def _optional(ctx: NodeContext) -> Mapped:
    ctx.ignore("type")
    return _link(ctx, 0) if ctx.has(0) else ListOf((), absent=True)


@onnx_op("OptionalHasElement", since=15)
def _has_element(ctx: NodeContext) -> Mapped:
    if not ctx.has(0):
        return static_array(False, BOOL)
    items = scope_of(ctx).sequence(ctx.name(0))
    return static_array(not isinstance(items, ListOf) or not items.absent, BOOL)


@onnx_op("OptionalGetElement", since=15)
def _get_element(ctx: NodeContext) -> Mapped:
    items = scope_of(ctx).sequence(ctx.name(0))
    if isinstance(items, ListOf) and items.absent:
        ctx.fail("the optional is empty")
    return _link(ctx, 0)
