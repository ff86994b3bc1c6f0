"""How fusion writes states: which may be updated in place, in which order of nodes, and where a new value is made.

An update is written over the old value when every reader of that comes before it: readers get an edge to the node that
makes the new value, and nodes are sorted by these edges. A state whose edges would close a circle (something reads both
its old and its new value) is updated through a copy instead. A chain of ops that each replace a part of the one before
(`lower_in_place`) has several versions of the state, which all lie in its memory one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from rlx.errors import CompileError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.shape import Shape, symbols
from rlx.kernels.accesses import anchor_expressions
from rlx.kernels.encoded import encoded_stores, rows_of_bytes
from rlx.kernels.expr import Check, Expr, Load, Var, loads, substitute_vars, transform, walk
from rlx.kernels.lowering import Written, lower_in_place, out_vars
from rlx.kernels.narrow import as_bytes, is_narrow, on_bytes, opaque_type
from rlx.kernels.program import Buffer, Kernel, Program, Store
from rlx.records import dataclass, replace

__all__ = ["StateWrites", "Version", "kernel_name", "last_readers", "order_states"]


class StateWrites:
    """The half of the fuser that writes states; `rlx.kernels.fuse` is the other one and explains the attributes."""

    graph: Graph
    target: Any
    program: Program
    buffers: dict[Value, Buffer]
    virtual: dict[Value, Expr]
    pending: dict[Value, Any]
    nodes_of: dict[Value, tuple[Node, ...]]
    static: set[Value]
    versions: dict[Value, Version]  # the values that are written over a state
    last: dict[Value, int]  # the number of the last node that reads a value
    fresh: Any
    in_arena: Any
    append: Any
    users: Any
    encodes: dict[Value, Node]
    materialise: Any
    emit_pending: Any
    on_buffers: Any
    bytes_of: Any
    store_of: Any
    resolve: Any
    unique: Any

    def settle(self, version: Version, number: int) -> None:
        """Copies whatever lies in, or would be computed from, the old value of a state and is read later."""
        root = self.buffers[version.state]
        for value in dict.fromkeys([*self.virtual, *self.pending, *self.buffers]):
            if self.last.get(value, -1) <= number or not self.reads_memory(value, root):
                continue
            copy = self.in_arena(value)
            if value is not version.before:  # which the node at hand may read in place
                self.virtual.pop(value, None)
                self.buffers[value] = copy

    def reads_memory(self, value: Value, root: Buffer) -> bool:
        """Whether the value is a view of the memory, or waits to be computed from it."""
        if value in self.buffers:
            return self.buffers[value].base is root
        parts: list[Expr | None] = [self.virtual.get(value)]
        if value in self.pending:
            pending = self.pending[value]
            parts = [pending.expr, *anchor_expressions(pending.anchor)]
        found = (load.source for part in parts if part is not None for load in loads(part))
        return any(source in self.buffers and self.buffers[source].base is root for source in found)

    def place_part(self, node: Node) -> bool:
        """An op that replaces a part of a state: only that part is written, where the state lies."""
        (result,) = node.outputs[:1]
        version = self.versions.get(result)
        if version is None:  # another one of its results is written over a state
            return False
        made = lower_in_place(node, self.fresh) if node.inputs[0] is version.before else None
        if made is not None and result.type.encoding is not None:
            self.place_blocks(node, made)
            return True
        if made is None or not self.is_computable(made.expr):
            return False
        expr, absorbed = self.resolve(made.expr, node, made.extents)
        target = self.state_view(result)
        index = tuple(self.on_buffers(self.checked_ahead(i, made.extents, node)) for i in made.index)
        kernel = Kernel("", (self.store_of(target, made.extents, index, self.on_buffers(expr)),))
        if not kernel.may_overwrite(target.base):  # the rows are made of others of the state
            rows = self.in_arena(node.inputs[1])
            row = on_bytes(Load(rows, out_vars(node.inputs[1].rank), rows.dtype), self.bytes_of)
            kernel.stores = (self.store_of(target, made.extents, index, row),)
            absorbed = []
        kernel.nodes = tuple(dict.fromkeys([*absorbed, node]))
        kernel.name = kernel_name(kernel.nodes)
        self.program.run.append(kernel)
        self.buffers[result] = target
        return True

    def is_computable(self, expr: Expr) -> bool:
        """Whether the target has all types in it, or is given bytes for them."""
        known = all(self.target.accepts_dtype(x.dtype) or as_bytes(x.dtype) for x in walk(expr))
        return known and opaque_type(expr) is None

    def place_blocks(self, node: Node, made: Written) -> None:
        """Encoded rows that replace others of a state: encoded where they belong, or copied block by block."""
        result, rows = node.outputs[0], node.inputs[1]
        target = self.state_view(result)
        at = tuple(self.on_buffers(self.checked_ahead(i, made.extents, node)) for i in made.index)

        def place(*row: Expr) -> tuple[Expr, ...]:
            return at[:-1]

        encode = self.encodes.get(rows) if self.users[rows] == 1 else None
        if encode is not None:
            source = self.buffers[encode.inputs[0]]
            stores = encoded_stores(source, encode.op, target, place)
        else:
            stored = rows_of_bytes(self.materialise(rows))
            vars = out_vars(len(stored.shape))
            value = Load(stored, vars, stored.dtype)
            stores = (Store(rows_of_bytes(target), stored.shape, (*at[:-1], vars[-1]), value),)
        nodes = (node,) if encode is None else (encode, node)
        self.program.run.append(Kernel(kernel_name(nodes), stores, nodes=nodes))
        self.encodes.pop(rows, None)
        self.buffers[result] = target

    def place_encoded(self, node: Node) -> None:
        """A node whose result is encoded: rows that a state may take as blocks are made where it has them."""
        result = node.outputs[0]
        if getattr(node.op, "lower_stored", None) is None:
            encoding = result.type.encoding
            raise CompileError(
                f"{node.label}: what it gives is stored as {encoding and encoding.name}: it can only be written over a "
                "state of which nothing reads the old value afterwards"
            )
        self.materialise(node.inputs[0])
        self.encodes[result] = node
        if self.buffers[node.inputs[0]].base.kind == "state" or result in self.versions:
            self.materialise(result)

    def emit_encoded(self, value: Value) -> Buffer:
        """Makes an encoded value in memory of its own."""
        node = self.encodes.pop(value)
        kind = "prepared" if value in self.static else "arena"
        name = self.unique(value.name or "t")
        buffer = self.buffers[value] = Buffer(name, kind, value.shape, value.dtype, value.type.encoding)
        stores = encoded_stores(self.buffers[node.inputs[0]], node.op, buffer, lambda *row: row)
        self.append(Kernel(kernel_name((node,)), stores, nodes=(node,)), value in self.static)
        return buffer

    def computed_ahead(self, expr: Expr, extents: Shape, node: Node, name: str) -> Load:
        """The load of an expression that a kernel before computes, over those of the axes that it depends on."""
        used = {v for v in walk(expr) if isinstance(v, Var)}
        over = [(v, size) for v, size in zip(out_vars(len(extents)), extents, strict=True) if v in used]
        old, sizes = tuple(v for v, _ in over), tuple(size for _, size in over)
        static = node.outputs[0] in self.static
        buffer = Buffer(self.unique(name), "prepared" if static else "arena", sizes, expr.dtype)
        new = out_vars(len(old))
        made = substitute_vars(self.on_buffers(expr), dict(zip(old, new, strict=True)))
        self.append(Kernel(kernel_name((node,)), (Store(buffer, sizes, new, made),), nodes=(node,)), static)
        return Load(buffer, old, expr.dtype)

    def checked_ahead(self, index: Expr, extents: Shape, node: Node) -> Expr:
        """The index with what it tests computed by a kernel before: nothing is written where a test fails."""

        def place(x: Expr) -> Expr | None:
            if not isinstance(x, Check):
                return None
            return self.computed_ahead(x, extents, node, f"{node.outputs[0].name or 'state'}.start")

        return transform(index, place)

    def write_whole(self, value: Value) -> None:
        """The new value of a state, placed just now, in the state's memory: where it is made, or by a copy."""
        if value in self.static:  # others of `prepare` may read it: it is copied at the end
            del self.versions[value]
            return
        root = self.buffers[self.versions[value].state]
        made = self.buffers.get(value)
        if made is not None:
            maker = self.program.run[-1] if self.program.run else None
            if maker is not None and made in maker.writes() and made.kind == "arena" and maker.may_overwrite(root):
                made.kind, made.root, made.wide = root.kind, root, root.wide
                return
        elif value in self.pending:
            pending = self.pending[value]
            if value not in self.static and not self.reads_memory(value, root):
                del self.pending[value]
                self.emit_pending(value, pending, self.state_view(value))
                return
        elif not is_narrow(value.dtype):
            target, nodes = self.state_view(value), self.nodes_of.get(value, ())
            expr = self.on_buffers(self.virtual[value])
            kernel = Kernel(
                kernel_name(nodes), (self.store_of(target, value.shape, out_vars(value.rank), expr),), nodes=nodes
            )
            if kernel.may_overwrite(root):
                self.program.run.append(kernel)
                del self.virtual[value]
                self.buffers[value] = target
                return
        self.copy_state(self.versions[value].state, value, self.materialise(value))

    def copy_state(self, state: Value, value: Value, source: Buffer) -> None:
        """Copies the new value into the state's memory."""
        target = self.state_view(value, state)
        self.append_copy(source, target)
        if source.base.kind == "arena":
            self.program.copied[state.name] = source
        if value in self.versions:
            self.virtual.pop(value, None)
            self.buffers[value] = target

    def finish_states(self) -> None:
        """Copies the values that no kernel has written in place; all are at hand before the first is overwritten."""
        waiting = []
        for state in self.graph.states:
            new = self.graph.updates.get(state.name)
            if new is None:
                continue
            if new is state:
                self.program.updates[state.name] = self.buffers[state]
                continue
            if new in self.versions and self.versions[new].state is state:
                self.program.updates[state.name] = self.buffers[new]
            else:
                held = self.buffers.get(new)
                ready = held is not None and (held.base.kind != "state" or new in self.versions)
                waiting.append((state, new, self.materialise(new) if ready else self.in_arena(new)))
        for state, new, source in waiting:
            self.copy_state(state, new, source)
            self.program.updates[state.name] = self.program.run[-1].writes()[0]

    def state_view(self, value: Value, state: Value | None = None) -> Buffer:
        """The memory of the state under the name of its new value."""
        root = self.buffers[self.versions[value].state if state is None else state]
        name = self.unique(value.name or f"{root.name}.new")
        return Buffer(name, root.kind, root.shape, root.dtype, root.encoding, root=root, wide=root.wide)

    def append_copy(self, source: Buffer, target: Buffer) -> None:
        """A kernel that copies one buffer to another of the same type."""
        self.program.run.append(self.copy_kernel(source, target))

    def copy_kernel(self, source: Buffer, target: Buffer) -> Kernel:
        """A copy of elements, blocks as they are; of bits where the target has no such elements."""
        if source.encoding is not None and source.encoding is target.encoding:
            return self.copy_kernel(rows_of_bytes(source), rows_of_bytes(target))
        dtype, vars = target.dtype, out_vars(len(target.shape))
        if is_narrow(dtype):
            if source.wide == target.wide:
                return self.copy_kernel(self.bytes_of(source), self.bytes_of(target))
            element = on_bytes(Load(source, vars, dtype), self.bytes_of)
            return Kernel("copy", (self.store_of(target, target.shape, vars, element),))
        if not self.target.accepts_dtype(dtype):
            words = max(dtype.bits // 64, 1)  # that an element has
            dtype = DTYPES[f"u{8 * dtype.numpy.itemsize // words}"]
            source, target = (
                replace(b, dtype=dtype, shape=b.shape if words == 1 else (*b.shape, words), data=None, root=b.base)
                for b in (source, target)
            )
            vars = out_vars(len(target.shape))
        return Kernel("copy", (Store(target, target.shape, vars, Load(source, vars, dtype)),))


def kernel_name(nodes: tuple[Node, ...]) -> str:
    """The name of a kernel: the ops of its nodes."""
    ops = [n.op.op_name for n in nodes]
    return "+".join(ops[:4]) + (f"+{len(ops) - 4}" if len(ops) > 4 else "") or "copy"


# ---- the order of nodes


@dataclass(frozen=True)
class Version:
    """A value that is written over the one before it in the memory of `state`."""

    state: Value
    before: Value


def order_states(graph: Graph) -> tuple[list[Node], dict[Value, Version]]:
    """The nodes in an order in which states can be updated in place, and the values that are written over a state."""
    readers = graph.users()
    edges: dict[Node, set[Node]] = {}  # node -> those that must come before it, beside those that it reads
    versions: dict[Value, Version] = {}
    order = graph.nodes
    for state in graph.states:
        chain = _chain(graph, state, versions)
        more = {node: set(before) for node, before in edges.items()}
        for version, old in chain.items():
            maker = version.node
            assert maker is not None
            more.setdefault(maker, set()).update(n for n in readers.get(old, ()) if n is not maker)
        found = _sorted(graph.nodes, more) if chain else None
        if found is not None:
            order, edges = found, more
            versions |= {version: Version(state, old) for version, old in chain.items()}
    return order, versions


def _chain(graph: Graph, state: Value, taken: Mapping[Value, Version]) -> dict[Value, Value]:
    """The new value of a state and the parts that it is made of: each with the version that it is written over."""
    new = graph.updates.get(state.name)
    found: list[Value] = []
    while new is not None and new.node is not None and new not in taken:
        found.append(new)
        old = new.node.inputs[0] if new.node.inputs else None
        if old is None or getattr(new.node.op, "lower_in_place", None) is None:
            break
        if old is state:
            return dict(zip(reversed(found), (state, *reversed(found)), strict=False))
        new = old
    return {found[0]: state} if found else {}


def _sorted(nodes: Sequence[Node], edges: Mapping[Node, set[Node]]) -> list[Node] | None:
    """The nodes with those that they need first, otherwise in their order; None where that goes round in a circle."""
    place = {node: number for number, node in enumerate(nodes)}
    makers = _dim_makers(nodes)
    after: list[list[int]] = [[] for _ in nodes]
    waiting = [0] * len(nodes)
    for number, node in enumerate(nodes):
        needed = {place[v.node] for v in node.inputs if v.node is not None}
        needed |= {place[earlier] for earlier in edges.get(node, ())}
        if makers:
            needed |= {makers[name] for name in Graph(nodes=[node]).dims() if makers.get(name, number) != number}
        waiting[number] = len(needed)
        for earlier in needed:
            after[earlier].append(number)
    ready = [number for number, count in enumerate(waiting) if not count]
    heapify(ready)
    made = []
    while ready:
        number = heappop(ready)
        made.append(nodes[number])
        for later in after[number]:
            waiting[later] -= 1
            if not waiting[later]:
                heappush(ready, later)
    return made if len(made) == len(nodes) else None


def _dim_makers(nodes: Sequence[Node]) -> dict[str, int]:
    """The node whose data decide a dim, by the dim's name: the first that has it, where no leaf does."""
    found: dict[str, int] = {}
    leaves = {v for node in nodes for v in node.inputs if v.node is None}
    known = {s.name for v in leaves for size in v.shape for s in symbols(size)}
    for number, node in enumerate(nodes):
        for name in {s.name for v in node.outputs for size in v.shape for s in symbols(size)} - known:
            found.setdefault(name, number)
    return found


def last_readers(graph: Graph, order: Sequence[Node]) -> dict[Value, int]:
    """For each value the number of the last node that reads it, beyond all where it is an output or an update."""
    found = {value: number for number, node in enumerate(order) for value in node.inputs}
    kept = [o.value for o in graph.outputs]
    kept += [v for name, v in graph.updates.items() if v.name != name or v.kind != "state"]
    return found | dict.fromkeys(kept, len(order))
