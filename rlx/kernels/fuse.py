"""Fusion: a graph becomes a program of kernels.

Nodes are lowered to scalar expressions in order. A value stays *virtual* (an expression that users inline) as long as
that costs nothing twice; it becomes a buffer when an anchor, several users or an output need it in memory. Results of
anchors (contract, conv, attention) wait as *pending* so that element-wise users become their epilogue.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count
from typing import Protocol

from rlx.ir.dtype import DType
from rlx.ir.encoding import Encoding
from rlx.ir.graph import Graph, Node, Value, count_readers
from rlx.ir.shape import Guard, Shape, Size, Symbol, numel, symbols
from rlx.kernels.accesses import with_anchor_expressions
from rlx.kernels.affine import Affine, computable, has_division, linear_index, row_major
from rlx.kernels.analysis import Fusing, cost, is_identity, size_of, static_values, uses
from rlx.kernels.attention_operands import place_attention, without_widening
from rlx.kernels.encoded import bytes_of, decoded
from rlx.kernels.expr import (
    Cast,
    Expr,
    Load,
    Reduce,
    Select,
    const,
    guarded,
    loads,
    substitute_vars,
    transform,
    walk,
)
from rlx.kernels.lowering import Anchor, Attention, Contract, Conv, Lowered, Piece, lower_node, out_vars
from rlx.kernels.narrow import as_bytes, byte_store, has_bytes, is_narrow, on_bytes, unknown_dtype
from rlx.kernels.program import Buffer, Kernel, Program, Store
from rlx.kernels.regions import place_extents, place_guards, place_regions
from rlx.kernels.state_writes import StateWrites, kernel_name, last_readers, order_states
from rlx.records import dataclass, replace

__all__ = ["Fuser", "Target", "fuse"]


class Target(Protocol):
    """What fusion asks of a code-generating backend."""

    @property
    def fusing(self) -> Fusing:
        """By what it wants values stored or computed again."""

    def accepts_dtype(self, dtype: DType) -> bool:
        """Whether its code computes in that type (else a node that needs it is a host call)."""

    def accepts_special(self, node: Node) -> bool:
        """Whether it has a kernel of its own for the node, which then is not lowered."""

    def encoded_operands(self, node: Node) -> Collection[int]:
        """The operands that this kernel also takes as stored blocks; others that are encoded are decoded before it."""

    def accepts_anchor(self, anchor: Anchor, node: Node) -> bool:
        """Whether it has a kernel for the anchor (else the generic expression is used)."""

    def accepts_operand(self, anchor: Anchor, role: str, shape: Shape, index: Affine) -> bool:
        """Whether an operand ("a", "x", "q", "k", "v") may be read in place at these linear indices."""

    def accepts_blocks(self, anchor: Anchor, role: str, encoding: Encoding) -> bool:
        """Whether such an operand may be read as stored blocks; else it is decoded before."""


def fuse(graph: Graph, target: Target, *, merge: bool = True) -> Program:
    """Graph -> Program; every node must have a `lower` that the target runs, or is run as a host call.

    Without `merge` each node that is no view has kernels of its own, one for each of its outputs.
    """
    return Fuser(graph, target, merge).run()


@dataclass
class _Pending:
    """An anchor kernel not emitted yet: operands, epilogue so far, and the order of axes that it is stored in."""

    anchor: Anchor
    expr: Expr
    shape: Shape
    order: tuple[int, ...]
    nodes: tuple[Node, ...]


class Fuser(StateWrites):
    """What is known while a graph is fused, and the program so far."""

    def __init__(self, graph: Graph, target: Target, merge: bool) -> None:
        self.graph = graph
        self.target = target
        self.fusing = target.fusing
        self.merge = merge
        self.program = Program(graph.name, dims=graph.dims(), guards=list(graph.guards))
        self.buffers: dict[Value, Buffer] = {}
        self.copies: dict[Value, Buffer] = {}  # in the arena, of values that are not
        self.stored: dict[Value, Buffer] = {}  # the bytes of encoded values
        self.has_bytes = has_bytes(graph)
        self.bytes: dict[Buffer, Buffer] = {}  # those of buffers whose elements no device computes in
        self.encodes: dict[Value, Node] = {}  # encoded values that are not made yet, by the nodes that encode
        self.elements: dict[Value, Value] = {}  # encoded values -> what holds their elements one by one
        self.virtual: dict[Value, Expr] = {}
        self.pending: dict[Value, _Pending] = {}
        self.nodes_of: dict[Value, tuple[Node, ...]] = {}  # what a virtual value's expression stands for
        self.users = count_readers(graph)
        self.static = static_values(graph)
        self.order, self.versions = order_states(graph)
        self.last = last_readers(graph, self.order)
        self.homes: dict[Value, Buffer] = {}  # of results of a round: the rows in which they are made
        self.fresh = count()
        self.names: dict[str, int] = {}
        self.known = {s.name for v in graph.inputs for size in v.shape for s in symbols(size)}  # sizes, by now
        self.rounds: set[str] = set()  # the numbers of rounds, as sizes
        self.stacked: set[Symbol] = set()  # sizes of the rows of loops around
        self.waiting: list[Guard] = []  # equalities of sizes that are not all known yet

    def run(self) -> Program:
        for kind, values, where in (
            ("input", self.graph.inputs, self.program.inputs),
            ("param", self.graph.params, self.program.params),
            ("state", self.graph.states, self.program.states),
            ("const", self.graph.constants, self.program.constants),
        ):
            for value in values:
                self.add_leaf(kind, value, where)
        place_guards(self, self.graph.guards, checked=True)
        for number, node in enumerate(self.order):
            written = [v for v in node.outputs if v in self.versions]
            for value in written:
                self.settle(self.versions[value], number)
            if not (written and self.place_part(node)):
                self.place(node)
                for value in written:
                    self.write_whole(value)
        for output in self.graph.outputs:
            self.program.outputs.append((output.name, self.shown(output.value)))
        self.finish_states()
        return self.program

    def add_leaf(self, kind: str, value: Value, where: list[Buffer]) -> None:
        name = self.unique(value.name or f"c{len(self.program.constants)}")
        buffer = Buffer(name, kind, value.shape, value.dtype, value.type.encoding, value.data)
        buffer.wide = is_narrow(value.dtype) and kind in ("input", "state")
        where.append(buffer)
        self.buffers[value] = buffer

    def add_constant(self, value: Value) -> None:
        """A constant of a region, which may be met more than once."""
        if value not in self.buffers:
            self.add_leaf("const", value, self.program.constants)

    # ---- one node

    def place(self, node: Node) -> None:
        if node.regions:
            place_regions(self, node)
        else:
            self.place_plain(node)
            place_extents(self, node)
        for value in () if self.merge else node.outputs:
            self.materialise(value)
            self.virtual.pop(value, None)

    def place_plain(self, node: Node) -> None:
        if self.target.accepts_special(node):
            self.special(node)
            return
        if getattr(node.op, "view", False) and self.place_view(node):
            return
        if node.outputs[0].type.encoding is not None:
            self.place_encoded(node)
            return
        lowered = lower_node(node, self.fresh)
        refused = [d for d in lowered.dtypes() if not self.target.accepts_dtype(d)] if lowered else []
        self.has_bytes |= bool(refused)  # which an expression may have without a value of it
        if lowered is None or (refused and unknown_dtype(lowered, self.target.accepts_dtype) is not None):
            self.host_call(node)
        elif not (lowered.anchor and self.place_anchor(node, lowered, lowered.anchor)):
            self.place_map(node, lowered)

    def place_view(self, node: Node) -> bool:
        """An op that keeps the row-major order of elements: a view, unless its operand stays virtual for free."""
        source, result = node.inputs[0], node.outputs[0]
        if source.type.encoding is not None:
            return False
        if source in self.virtual and source not in self.buffers:
            lowered = lower_node(node, self.fresh)
            if lowered is not None:
                expr = self.inline(lowered.outputs[0][0].expr, source)
                if not has_division(expr):
                    return False
        buffer = self.materialise(source)
        self.buffers[result] = Buffer(
            self.unique(result.name or buffer.name), buffer.kind, result.shape, result.dtype, None, buffer.data,
            buffer.base, buffer.offset, wide=buffer.wide,
        )  # fmt: skip
        return True

    def place_map(self, node: Node, lowered: Lowered) -> None:
        for result, pieces in zip(node.outputs, lowered.outputs, strict=True):
            if lowered.anchor is not None:
                assert lowered.generic is not None
                pieces = (replace(pieces[0], expr=lowered.generic),)
            done, nodes = [], [node]
            merged = False
            for piece in pieces:
                whole = len(pieces) == 1 and len(node.outputs) == 1
                merged = whole and self.extend_pending(node, result, piece)
                if merged:
                    break
                expr, absorbed = self.resolve(piece.expr, node, piece.extents)
                done.append(replace(piece, expr=expr))
                nodes.extend(absorbed)
            if merged:
                continue
            self.nodes_of[result] = tuple(dict.fromkeys(nodes))
            if len(done) == 1:
                self.virtual[result] = done[0].expr
            else:
                self.emit_pieces(result, done)

    def special(self, node: Node) -> None:
        """A node that the target has a kernel for, on operands in memory."""
        encoded = self.target.encoded_operands(node)
        inputs = (v if n in encoded else self.decoded(v) for n, v in enumerate(node.inputs))
        operands = tuple(map(self.materialise, inputs))
        results = tuple(map(self.new_buffer, node.outputs))
        kernel = Kernel(node.op.op_name, special=node, operands=operands, results=results, nodes=(node,))
        self.append(kernel, node.outputs[0] in self.static)

    def host_call(self, node: Node) -> None:
        inputs = tuple(map(self.for_host, node.inputs))
        outputs = tuple(self.new_buffer(v) for v in node.outputs)
        name = getattr(node.op, "title", node.op.op_name)
        kernel = Kernel(name, host=node, operands=inputs, results=outputs, nodes=(node,))
        self.append(kernel, node.outputs[0] in self.static)

    def for_host(self, value: Value) -> Buffer:
        """A buffer that lies still: not an input, whose place each run tells, nor a row of one of several rounds."""
        buffer = self.materialise(self.decoded(value))
        if buffer.base.kind == "input":
            return self.in_arena(value)
        if all(s.name not in self.rounds for s in symbols(buffer.offset)):
            return buffer
        copy = Buffer(self.unique(buffer.name), "arena", buffer.shape, buffer.dtype, wide=buffer.wide)
        self.program.run.append(self.copy_kernel(buffer, copy))
        return copy

    # ---- anchors

    def place_anchor(self, node: Node, lowered: Lowered, anchor: Anchor) -> bool:
        if not self.target.accepts_anchor(anchor, node):
            return False
        absorbed: list[Node] = []
        match anchor:
            case Contract(a=a, b=b):
                new_a, new_b = (self.operand(anchor, role, x, absorbed) for role, x in (("a", a), ("b", b)))
                if new_a is None or new_b is None:
                    return False
                anchor = self.with_zero(replace(anchor, a=new_a, b=new_b), node, absorbed)
            case Conv(x=x, w=w):
                new_x, new_w = (self.operand(anchor, role, e, absorbed) for role, e in (("x", x), ("w", w)))
                if new_x is None or new_w is None:
                    return False
                anchor = self.with_zero(replace(anchor, x=new_x, w=new_w), node, absorbed)
            case Attention():
                placed = place_attention(self, anchor, node, absorbed)
                if placed is None:
                    return False
                anchor = placed
        result = node.outputs[0]
        epilogue, more = self.resolve(lowered.outputs[0][0].expr, node, result.shape)
        nodes = tuple(dict.fromkeys([*absorbed, *more, node]))
        self.pending[result] = _Pending(anchor, epilogue, result.shape, tuple(range(result.rank)), nodes)
        return True

    def with_zero(self, anchor: Contract | Conv, node: Node, absorbed: list[Node]) -> Anchor:
        """The anchor with the virtual sources of its zero point settled."""
        if anchor.zero is None:
            return anchor
        zero, more = self.resolve(anchor.zero, node, ())
        absorbed.extend(more)
        return replace(anchor, zero=zero)

    def operand(self, anchor: Anchor, role: str, expr: Expr, absorbed: list[Node]) -> Expr | None:
        """The operand read in place (through layout ops where the target can), its source in memory otherwise."""
        if isinstance(expr, Cast):  # what is rounded as it is read
            inner = self.operand(anchor, role, expr.value, absorbed)
            return None if inner is None else replace(expr, value=inner)
        while isinstance(expr, Load) and expr.source in self.virtual:
            inlined = without_widening(anchor, role, self.inline(expr, expr.source))
            is_weight = role in ("b", "w") and expr.source in self.static
            in_place = isinstance(inlined, Load) and self.readable(anchor, role, inlined)
            if not (in_place or is_weight):
                break
            absorbed.extend(self.nodes_of.get(expr.source, ()))
            if is_weight and not isinstance(inlined, Load):
                return inlined
            expr = inlined
        if not isinstance(expr, Load):
            return None
        if role not in ("b", "w") and not self.reads_blocks(anchor, role, expr.source):
            expr = replace(expr, source=self.decoded(expr.source))
        source = expr.source
        if source not in self.static or role not in ("b", "w"):
            self.materialise(source)
            if not self.readable(anchor, role, expr):
                return None
        return expr

    def reads_blocks(self, anchor: Anchor, role: str, source: Value) -> bool:
        """Whether the target reads that operand as it is stored, where it is encoded."""
        encoding = source.type.encoding
        return encoding is None or self.target.accepts_blocks(anchor, role, encoding)

    def readable(self, anchor: Anchor, role: str, load: Load) -> bool:
        if load.where is not None or not self.reads_blocks(anchor, role, load.source):
            return False
        index = linear_index(load.indices, load.source.shape)
        return index.is_linear and self.target.accepts_operand(anchor, role, load.source.shape, index)

    def extend_pending(self, node: Node, result: Value, piece: Piece) -> bool:
        """Makes an element-wise (or axis-permuting) node the epilogue of the anchor that it alone reads."""
        for source in dict.fromkeys(node.inputs) if not is_narrow(result.dtype) else ():
            pending = self.pending.get(source)
            if pending is None or self.users[source] > 1 or (source in self.static and result not in self.static):
                continue
            order = self.permuted(piece.expr, source, pending)
            if order is not None:
                self.take_over(source, result, replace(pending, order=order, nodes=(*pending.nodes, node)))
                return True
            if result.shape == source.shape and not any(isinstance(x, Reduce) for x in walk(piece.expr)):
                identity = all(
                    load.where is None and is_identity(load) for load in loads(piece.expr) if load.source is source
                )
                if identity and pending.order == tuple(range(source.rank)):
                    expr = _replace_loads(piece.expr, source, pending.expr)
                    others, absorbed = self.resolve(expr, node, result.shape)
                    merged = (*pending.nodes, *absorbed, node)
                    self.take_over(source, result, replace(pending, expr=others, nodes=merged))
                    return True
        return False

    def permuted(self, expr: Expr, source: Value, pending: _Pending) -> tuple[int, ...] | None:
        """The storage order when the node only permutes axes of an attention result and keeps the last one last."""
        if not isinstance(pending.anchor, Attention) or not isinstance(expr, Load) or expr.where is not None:
            return None
        vars = out_vars(source.rank)
        if expr.source is not source or set(expr.indices) != set(vars) or expr.indices[-1] != vars[-1]:
            return None
        perm = [expr.indices.index(v) for v in vars]  # output axis d is source axis perm[d]
        return tuple(pending.order[p] for p in perm)

    def take_over(self, source: Value, result: Value, pending: _Pending) -> None:
        del self.pending[source]
        self.pending[result] = pending

    # ---- inlining

    def resolve(self, expr: Expr, node: Node, space: Shape) -> tuple[Expr, list[Node]]:
        """Inlines the virtual sources that should be; the others become buffers. Also the nodes taken in."""
        absorbed: list[Node] = []
        settled: set[Value] = set()
        while True:
            source = next((x.source for x in loads(expr) if x.source not in settled), None)
            if source is None:
                return expr, absorbed
            settled.add(source)
            if source not in self.virtual:
                if source not in self.buffers:
                    self.materialise(source)
            elif self.worth_inlining(source, expr, node, space):
                expr = self.inline(expr, source)
                absorbed.extend(self.nodes_of.get(source, ()))
            else:
                self.materialise(source)

    def worth_inlining(self, source: Value, expr: Expr, node: Node, space: Shape) -> bool:
        body = self.virtual[source]
        price = cost(body, self.fusing)
        if price == 0:
            return True
        if source in self.buffers:
            return False
        if source in self.static and node.outputs[0] not in self.static:
            return self.grows(source, body)
        sites = [x for x in loads(expr) if x.source is source]
        reduced = any(isinstance(x, Reduce) for x in walk(body))
        if reduced or price > self.fusing.again:
            once = self.users[source] == 1 and source.shape == space and all(map(is_identity, sites))
            if not once and not (not reduced and self.read_once(source, sites, expr, space)):
                return False
            if any(isinstance(x, Reduce) and uses(x, source) for x in walk(expr)):
                return False
        return size_of(body) + size_of(expr) <= self.fusing.largest

    def read_once(self, source: Value, sites: list[Load], expr: Expr, space: Shape) -> bool:
        """Whether each element of the source is computed at most once: one user, one place, no broadcast."""
        return self.users[source] == 1 and len(sites) == 1 and numel(source.shape) == numel(space)

    def grows(self, source: Value, body: Expr) -> bool:
        """Whether `prepare` would make more bytes out of fewer: then the expression stays where it is used."""
        made = source.type.nbytes() or 0
        given = sum(v.type.nbytes() or 0 for v in {x.source for x in loads(body)})
        return made > max(given, self.fusing.growth)

    def inline(self, expr: Expr, source: Value) -> Expr:
        body = self.virtual[source]
        vars = out_vars(source.rank)

        def place(x: Expr) -> Expr | None:
            if not isinstance(x, Load) or x.source is not source:
                return None
            made = substitute_vars(body, dict(zip(vars, x.indices, strict=True)))
            if x.where is None:
                return made
            return Select(x.where, guarded(made, x.where), const(0, made.dtype))

        return transform(expr, place)

    # ---- emission

    def materialise(self, value: Value) -> Buffer:
        """The buffer of the value, made (and its kernel emitted) if there is none yet."""
        if value in self.buffers:
            return self.buffers[value]
        if value in self.pending:
            return self.emit_pending(value, self.pending.pop(value))
        if value in self.encodes:
            return self.emit_encoded(value)
        expr = self.virtual[value]
        view = self.as_view(value, expr)
        if view is not None:
            self.buffers[value] = view
            return view
        return self.emit_pieces(value, [Piece(expr, value.shape, (0,) * value.rank)])

    def decoded(self, value: Value) -> Value:
        """The value, or where it is encoded one with its elements in memory: for kernels that read these, not bytes."""
        if value.type.encoding is None:
            return value
        if value not in self.elements:
            made = self.elements[value] = Value(value.graph, value.type.decoded, "node", value.name)
            if value in self.static:
                self.static.add(made)
            self.virtual[made] = Load(value, out_vars(value.rank), value.dtype)
            self.materialise(made)
        return self.elements[value]

    def in_arena(self, value: Value) -> Buffer:
        """The value's buffer, or a copy of it where that is not the arena's: an input, a weight, or a view of one."""
        if value in self.copies:
            return self.copies[value]
        buffer = self.materialise(value)
        if buffer.base.kind == "arena":
            return buffer
        copy = Buffer(self.unique(value.name or buffer.name), "arena", value.shape, value.dtype, buffer.encoding)
        self.program.run.append(self.kernel_into(value, copy))
        self.copies[value] = copy
        return copy

    def shown(self, value: Value) -> Buffer:
        """The buffer of an output: in the arena, narrow elements a byte each."""
        if value.type.encoding is not None:
            made = Buffer(self.unique(value.name or "t"), "arena", value.shape, value.dtype)
            self.program.run.append(self.kernel_into(value, made))
            return made
        if not is_narrow(value.dtype):
            return self.in_arena(value)
        copy = Buffer(self.unique(value.name or "t"), "arena", value.shape, value.dtype, wide=True)
        source = self.copies.get(value) or self.materialise(value)  # a state may hold its new value by now
        self.append_copy(source, copy)
        return copy

    def as_view(self, value: Value, expr: Expr) -> Buffer | None:
        """The value as a view when its elements already lie somewhere one after the other."""
        if not isinstance(expr, Load) or expr.where is not None or expr.source.type.encoding is not None:
            return None
        index = linear_index(expr.indices, expr.source.shape)
        vars, strides = out_vars(value.rank), row_major(value.shape)
        wanted = {v: s for v, s, size in zip(vars, strides, value.shape, strict=True) if size != 1 and s != 0}
        have = {t: c for t, c in index.coefs.items() if t not in vars or value.shape[vars.index(t)] != 1}
        if have != wanted or numel(value.shape) == 0:
            return None
        if value.dtype.bits % 8 and index.constant != 0:
            return None
        root = self.materialise(expr.source)
        name = self.unique(value.name or root.name)
        offset: Size = root.offset + (index.constant * value.dtype.itemsize if index.constant != 0 else 0)
        return Buffer(name, root.kind, value.shape, value.dtype, None, None, root.base, offset, wide=root.wide)

    def emit_pieces(self, value: Value, pieces: list[Piece]) -> Buffer:
        buffer = self.place_for(value)
        self.append(self.pieces_kernel(value, pieces, buffer), value in self.static)
        return buffer

    def pieces_kernel(self, value: Value, pieces: list[Piece], buffer: Buffer) -> Kernel:
        vars = out_vars(value.rank)
        stores = []
        if is_narrow(buffer.dtype) and not buffer.wide and len(pieces) > 1:
            between = Buffer(self.unique(buffer.name), buffer.kind, value.shape, value.dtype, wide=True)
            self.append(self.pieces_kernel(value, pieces, between), buffer.kind == "prepared")
            return self.copy_kernel(between, buffer)
        for piece in pieces:
            at = tuple(v + o for v, o in zip(vars, piece.offset, strict=True))
            stores.append(self.store_of(buffer, piece.extents, at, self.on_buffers(piece.expr)))
        nodes = self.nodes_of.get(value, ())
        return Kernel(kernel_name(nodes), tuple(stores), nodes=nodes)

    def emit_pending(self, value: Value, p: _Pending, into: Buffer | None = None) -> Buffer:
        buffer = self.place_for(value) if into is None else into
        self.buffers[value] = buffer
        self.append(self.pending_kernel(p, buffer), value in self.static)
        return buffer

    def pending_kernel(self, p: _Pending, buffer: Buffer) -> Kernel:
        vars = out_vars(len(p.shape))
        at = tuple(vars[axis] for axis in p.order)
        anchor = with_anchor_expressions(p.anchor, self.on_buffers)
        store = self.store_of(buffer, p.shape, at, self.on_buffers(p.expr))
        return Kernel(kernel_name(p.nodes), (store,), anchor, nodes=tuple(dict.fromkeys(p.nodes)))

    def kernel_into(self, value: Value, buffer: Buffer) -> Kernel:
        """The kernel that writes the value to this buffer: its own if it has none yet, else a copy."""
        if value not in self.buffers and value in self.pending:
            return self.pending_kernel(self.pending.pop(value), buffer)
        if value not in self.buffers and value in self.virtual:
            return self.pieces_kernel(value, [Piece(self.virtual[value], value.shape, (0,) * value.rank)], buffer)
        source = self.materialise(value)
        if source.encoding is buffer.encoding:
            return self.copy_kernel(source, buffer)
        element = Load(value, out_vars(value.rank), value.dtype)
        return self.pieces_kernel(value, [Piece(element, value.shape, (0,) * value.rank)], buffer)

    def on_buffers(self, expr: Expr) -> Expr:
        """The expression with loads of values turned into loads of buffers: of the bytes of encoded ones."""

        def place(x: Expr) -> Expr | None:
            if not isinstance(x, Load) or not isinstance(x.source, Value):
                return None
            buffer = self.materialise(x.source)
            if buffer.encoding is None:
                return replace(x, source=buffer)
            if x.source not in self.stored:
                self.stored[x.source] = bytes_of(buffer)
            return decoded(x, self.stored[x.source], buffer.encoding)

        made = transform(expr, place)
        return computable(on_bytes(made, self.bytes_of) if self.has_bytes else made, self.rounds)

    def bytes_of(self, buffer: Buffer) -> Buffer:
        """The bytes of a buffer whose elements no device computes in."""
        if buffer not in self.bytes:
            self.bytes[buffer] = buffer.bytes
        return self.bytes[buffer]

    def store_of(self, buffer: Buffer, extents: Shape, at: tuple[Expr, ...], expr: Expr) -> Store:
        """The store of an expression over buffers."""
        if as_bytes(buffer.dtype):
            store = byte_store(self.bytes_of(buffer), buffer, extents, at, expr)
            return replace(store, expr=computable(store.expr, self.rounds))
        return Store(buffer, extents, at, expr)

    def new_buffer(self, value: Value, wide: bool = False) -> Buffer:
        kind = "prepared" if value in self.static else "arena"
        buffer = Buffer(self.unique(value.name or "t"), kind, value.shape, value.dtype, wide=wide)
        self.buffers[value] = buffer
        return buffer

    def place_for(self, value: Value) -> Buffer:
        """The row that the value is a result for, else a new buffer."""
        home = self.homes.get(value)
        if home is None or value in self.static:
            return self.new_buffer(value)
        self.buffers[value] = home
        return home

    def append(self, kernel: Kernel, static: bool) -> None:
        (self.program.prepare if static else self.program.run).append(kernel)

    def unique(self, name: str) -> str:
        made, number = name, self.names.get(name, 0)
        while made in self.names:
            number += 1
            made = f"{name}.{number}"
        self.names[name] = number
        self.names[made] = self.names.get(made, 0)
        return made


def _replace_loads(expr: Expr, source: Value, by: Expr) -> Expr:
    return transform(expr, lambda x: by if isinstance(x, Load) and x.source is source else None)
