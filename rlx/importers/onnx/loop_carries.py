"""What a loop carries from round to round: tensors of one shape, tensors that change in size, and lists.

A tensor that changes in size lies in the front of a buffer that is as large as it may become, with its sizes beside it.
A list to which each round appends is the rows that the loop stacks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from rlx.importers.onnx.mapping import Appending, ListOf, Mapped, NodeContext, StackOf, UnsupportedError
from rlx.importers.onnx.region import Region
from rlx.importers.onnx.scope import Scope
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, TensorType, Value
from rlx.ir.shape import Dim, Guard, Size, bounds, max_size, numel, same, symbols
from rlx.ops.base import Op
from rlx.ops.dynamic import AsShape, Extent
from rlx.ops.elementwise import Less, Where
from rlx.ops.layout import Concat, Pad, Reshape, SizeOf, Slice, Transpose, Unsqueeze
from rlx.ops.update import DynamicUpdateSlice

__all__ = [
    "Carry",
    "ChangingError",
    "GrowingCarry",
    "ListCarry",
    "TensorCarry",
    "carried",
    "concatenated",
    "steady_rows",
    "with_shape",
]

I64 = DTYPES["i64"]


class ChangingError(Exception):
    """A carry has another type after a round than before; `axes` are those that differ, if only sizes do."""

    def __init__(self, message: str, axes: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.axes = frozenset(axes)


def with_shape(graph: Graph, x: Value, shape: Sequence[Size], label: str) -> Value:
    """x under sizes that the run takes from it or checks."""
    return x if x.shape == tuple(shape) else graph.add(AsShape(tuple(shape)), x, provenance=(label,))[0]


class Carry(ABC):
    """One carry: `initial` are its values before the loop, in the graph around it."""

    initial: tuple[Value, ...] = ()

    @abstractmethod
    def enter(self, region: Region, formal: Sequence[Value]) -> Mapped:
        """What the body sees, given the region's inputs for the values."""

    @abstractmethod
    def leave(self, child: Scope, name: str) -> tuple[Value, ...]:
        """The values after a round; `name` is the body's output. Raises `ChangingError`."""

    def rows(self) -> list[Value]:
        """What the round just left adds to results that are stacked."""
        return []

    @abstractmethod
    def after(self, final: Sequence[Value], rows: Sequence[Value]) -> Mapped:
        """What the loop gives, from the last values and the stacked rows."""


class TensorCarry(Carry):
    """A tensor of one shape."""

    def __init__(self, ctx: NodeContext, i: int, outside: set[str]) -> None:
        self.label, self.outside = ctx.label, outside
        self.initial = (ctx.value(i),)

    def enter(self, region: Region, formal: Sequence[Value]) -> Mapped:
        return formal[0]

    def leave(self, child: Scope, name: str) -> tuple[Value, ...]:
        (before,) = self.initial
        return (carried(child.region.graph, child.value(name), before.type, name, self.label, self.outside),)

    def after(self, final: Sequence[Value], rows: Sequence[Value]) -> Mapped:
        return final[0]


class GrowingCarry(Carry):
    """A tensor whose sizes along the axes of `rooms` change, up to those sizes."""

    def __init__(self, ctx: NodeContext, i: int, outside: set[str], rooms: Mapping[int, Size]) -> None:
        scope, output = ctx.tensors, ctx.node.outputs[i - 2] if i - 2 < len(ctx.node.outputs) else ""
        assert isinstance(scope, Scope)
        x = ctx.value(i)
        self.ctx, self.outside = ctx, outside
        self.type = x.type
        self.rooms = dict(rooms)
        self.final = {d: scope.run.fresh(f"{output or ctx.label}.size{d}", 0, None, ctx.label) for d in rooms}
        self.grown: dict[int, Size] = {}  # by how much a round changes a size
        sizes = [ctx.add(SizeOf(x.shape[axis])) for axis in self.rooms]
        self.initial = (_padded(ctx.graph, x, self.rooms, ctx.label), *sizes)

    def enter(self, region: Region, formal: Sequence[Value]) -> Mapped:
        self.buffer, *lengths = formal
        self.sizes = {axis: self.ctx.fresh("carried", 0, None) for axis in self.rooms}
        return _front(region.graph, self.buffer, lengths, self.sizes, self.rooms, self.ctx.label)

    def leave(self, child: Scope, name: str) -> tuple[Value, ...]:
        graph, label, value = child.region.graph, self.ctx.label, child.value(name)
        shape = [value.shape[d] if d in self.rooms and d < value.rank else n for d, n in enumerate(self.type.shape)]
        value = carried(graph, value, TensorType(tuple(shape), self.type.dtype), name, label, self.outside)
        for axis, room in self.rooms.items():
            self.grown[axis] = value.shape[axis] - self.sizes[axis]
            why = f"node {label!r}: the carry {name!r} has room for {room} along axis {axis}"
            graph.guards.append(Guard(max_size(value.shape[axis], room), room, why))
        sizes = [graph.add(SizeOf(value.shape[axis]), provenance=(label,))[0] for axis in self.rooms]
        if len(self.rooms) > 1:
            return _padded(graph, value, self.rooms, label), *sizes
        (axis,) = self.rooms
        update = DynamicUpdateSlice(axis), self.buffer, value, graph.constant(0, I64)
        return graph.add(*update, provenance=(label,))[0], *sizes

    def after(self, final: Sequence[Value], rows: Sequence[Value]) -> Mapped:
        return _front(self.ctx.graph, final[0], final[1:], self.final, self.rooms, self.ctx.label)


class ListCarry(Carry):
    """A sequence to which every round appends as many tensors, of the same shapes."""

    def __init__(self, ctx: NodeContext, i: int, outside: set[str]) -> None:
        scope = ctx.tensors
        assert isinstance(scope, Scope)
        found = scope.sequence(ctx.name(i))
        self.ctx, self.outside = ctx, outside
        self.first = [scope.item(item) for item in found.items] if isinstance(found, ListOf) else []
        self.before = found.rows if isinstance(found, StackOf) else None
        if isinstance(found, Appending):
            raise UnsupportedError("a loop in a loop appends to the same sequence")

    def enter(self, region: Region, formal: Sequence[Value]) -> Mapped:
        return Appending(())

    def leave(self, child: Scope, name: str) -> tuple[Value, ...]:
        found = child.sequence(name)
        if not isinstance(found, Appending):
            raise UnsupportedError(f"the sequence {name!r} is not the one that it carries with tensors appended")
        self.appended = [child.item(item) for item in found.items]
        for item in self.appended:
            if any(symbol.name not in self.outside for size in item.shape for symbol in symbols(size)):
                raise UnsupportedError(
                    f"a round appends {item.type} to the sequence {name!r}, whose size may be another in each round; "
                    "tensors of a sequence whose length the run decides must be of one shape"
                )
        return ()

    def rows(self) -> list[Value]:
        return self.appended

    def after(self, final: Sequence[Value], rows: Sequence[Value]) -> Mapped:
        ctx, stacked = self.ctx, list(rows)
        if len({(v.type.dtype, v.shape[1:]) for v in rows} | {(v.type.dtype, v.shape) for v in self.first}) > 1:
            raise UnsupportedError("the tensors of a sequence whose length the run decides must be of one shape")
        if len(stacked) > 1:  # a round appends several
            n, *rest = stacked[0].shape
            together = ctx.add(Concat(1), *(ctx.add(Unsqueeze((1,)), row) for row in stacked))
            stacked = [ctx.reshape(together, n * len(rows), *rest)]
        parts = [ctx.add(Unsqueeze((0,)), item) for item in self.first] + stacked
        if self.before is not None:
            parts.insert(0, self.before)
        if not parts:
            return ListOf(())
        return StackOf(parts[0] if len(parts) == 1 else ctx.add(Concat(0), *parts))


def _padded(graph: Graph, x: Value, rooms: Mapping[int, Size], label: str) -> Value:
    """x in the front of a buffer."""
    ends = tuple(rooms[d] - size if d in rooms else 0 for d, size in enumerate(x.shape))
    return graph.add(Pad((0,) * x.rank + ends), x, provenance=(label,))[0]


def _front(
    graph: Graph,
    buffer: Value,
    lengths: Sequence[Value],
    sizes: Mapping[int, Size],
    rooms: Mapping[int, Size],
    label: str,
) -> Value:
    """The part of the buffer that is in use; `sizes` become what `lengths` are in the run."""
    for length, (axis, size) in zip(lengths, sizes.items(), strict=True):
        graph.add(Extent(size, rooms[axis]), length, provenance=(label,))
    shape = tuple(sizes.get(d, size) for d, size in enumerate(buffer.shape))
    starts, steps = (0,) * buffer.rank, (1,) * buffer.rank
    return graph.add(Slice(starts, shape, steps), buffer, provenance=(label,))[0]


def carried(
    graph: Graph, value: Value, wanted: TensorType, name: str, label: str, outside: set[str] | None = None
) -> Value:
    """A carry after a round in its type of before, or `ChangingError`; sizes that may be equal are checked in the run.

    `outside` are the dims known around the loop: a size that the body makes is another one.
    """
    message = f"the carry {name!r} changes from {wanted} to {value.type}"
    if value.dtype is not wanted.dtype or value.rank != wanted.rank:
        raise ChangingError(message)
    pairs = list(enumerate(zip(value.shape, wanted.shape, strict=True)))
    changed = {d for d, (a, b) in pairs if same(a, b) is False or (same(a, b) is None and not isinstance(a, Dim))}
    changed |= {d for d, (a, b) in pairs if a != b and isinstance(b, Dim) and same(a - b, 0) is False}
    if outside is not None:
        changed |= {d for d, (a, b) in pairs if a != b and any(s.name not in outside for s in symbols(a))}
    if changed:
        raise ChangingError(message, changed)
    return with_shape(graph, value, wanted.shape, label)


def steady_rows(ctx: NodeContext, region: Region, rows: Sequence[tuple[str, Value]], outside: set[str]) -> list[Value]:
    """Makes the named rows outputs of a body; each size that the body decides must be that of the first round.

    Gives the region's inputs for carries, -1 at first, that remember those sizes; they are outputs before the rows.
    """
    graph, label, inputs = region.graph, ctx.label, []

    def add(op: Op, *values: Value) -> Value:
        return graph.add(op, *values, provenance=(label,))[0]

    results = []
    for name, row in rows:
        shape = list(row.shape)
        for axis, size in enumerate(row.shape):
            if all(symbol.name in outside for symbol in symbols(size)):
                continue
            first, now = region.input("first", TensorType((), I64)), add(SizeOf(size))
            known = add(Where(), add(Less(), first, graph.constant(0, I64)), now, first)
            shape[axis] = ctx.fresh(f"{name}.stacked{axis}", 0, bounds(size)[1])
            add(Extent(shape[axis]), known)
            why = f"node {label!r}: its rounds give {name!r} other sizes along axis {axis}, which can't be stacked"
            graph.guards.append(Guard(size, shape[axis], why))
            graph.output(known, f"{name}.size{axis}")
            inputs.append(first)
        results.append((name, with_shape(graph, row, shape, label)))
    for name, row in results:
        graph.output(row, name)
    return inputs


def concatenated(ctx: NodeContext, rows: Value, axis: int, new_axis: bool) -> Value:
    """The rows [n, ...] of a sequence side by side along an axis, or along a new one."""
    order = list(range(1, rows.rank))
    order.insert(axis, 0)
    turned = rows if axis == 0 else ctx.add(Transpose(tuple(order)), rows)
    if new_axis:
        return turned
    shape = list(turned.shape)
    shape[axis : axis + 2] = [numel(shape[axis : axis + 2])]
    return ctx.add(Reshape(tuple(shape)), turned)
