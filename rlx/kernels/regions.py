"""Regions in fusion: their kernels become part of the one run, between marks that say where it goes on.

A value that a region captures is in memory, or free to inline, before the region starts; what is put in memory inside a
region is forgotten at its end, since another branch, or a loop without rounds, would not have written it. Results of
branches and rows of a loop are written where they are wanted; a carry is updated in place where nothing reads the old
one any more, else copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlx.ir.graph import Graph, Node, TensorType, Value
from rlx.ir.shape import Dim, Guard, Size, Symbol, max_size, numel, symbols
from rlx.kernels.analysis import cost, is_static
from rlx.kernels.expr import Load, loads, size_expr
from rlx.kernels.lowering import out_vars
from rlx.kernels.narrow import is_narrow
from rlx.kernels.program import Buffer, Extents, Flow, Kernel, Mark
from rlx.ops.control import If, Scan, While
from rlx.ops.dynamic import AsShape, Loop
from rlx.ops.select import Produced
from rlx.records import dataclass

if TYPE_CHECKING:
    from rlx.kernels.fuse import Fuser

__all__ = ["place_extents", "place_guards", "place_regions"]


def place_regions(fuser: Fuser, node: Node) -> None:
    """Emits the kernels of an If or a loop; its outputs are arena buffers."""
    op = node.op
    match op:
        case If():
            _place_if(fuser, node)
        case While(carries=carries):
            _place_loop(fuser, node, _Shape(node.regions[1], carries, 0, None, False, node.regions[0]))
        case Loop(carries=carries):
            _place_loop(fuser, node, _Shape(node.regions[1], carries, 0, None, False, node.regions[0]))
        case Scan(carries=carries, scanned=scanned, reverse=reverse):
            length = op.length if not scanned else node.inputs[carries].shape[0]
            _place_loop(fuser, node, _Shape(node.regions[0], carries, scanned, length, reverse, None))
        case _:
            raise AssertionError(f"{node.label}: no kernels for these regions")


# ---- what regions use of the outside


def _settle(fuser: Fuser, values: Iterable[Value]) -> None:
    """Puts into memory what is not free to compute wherever it is used."""
    for value in dict.fromkeys(values):
        if value in fuser.buffers or value in fuser.static:
            continue
        if value in fuser.virtual and value not in fuser.pending and cost(fuser.virtual[value], fuser.fusing) == 0:
            _settle(fuser, (load.source for load in loads(fuser.virtual[value])))
        else:
            fuser.materialise(value)


@contextmanager
def _inside(fuser: Fuser) -> Iterator[None]:
    """Forgets at the end what the region has put into the arena, and the sizes that it has learned."""
    buffers, copies = dict(fuser.buffers), dict(fuser.copies)
    known, waiting = set(fuser.known), list(fuser.waiting)
    yield
    kept = {v: b for v, b in fuser.buffers.items() if v in buffers or b.base.kind != "arena"}
    fuser.buffers, fuser.copies, fuser.known, fuser.waiting = kept, copies, known, waiting


def _enter(
    fuser: Fuser, region: Graph, given: Sequence[Value], rows: Mapping[int, Buffer] | None = None
) -> list[Value]:
    """Places the nodes of a region over the values given for its inputs; the values of its results.

    Results whose numbers are in `rows` are written there by what makes them, wherever else they are read.
    """
    values = dict(zip(region.inputs, given, strict=True))
    for constant in region.constants:
        values[constant] = constant
        fuser.add_constant(constant)
    fuser.static.update(region.constants)
    place_guards(fuser, region.guards)
    nodes = []
    for node in region.nodes:
        copy = Node(node.op, tuple(values[v] for v in node.inputs), (), node.provenance, node.regions)
        copy.outputs = tuple(Value(v.graph, v.type, "node", v.name, copy, v.index) for v in node.outputs)
        values.update(zip(node.outputs, copy.outputs, strict=True))
        nodes.append(copy)
        if is_static(copy, fuser.static):
            fuser.static.update(copy.outputs)
    results = [values[o.value] for o in region.outputs]
    for used in (*(set(node.inputs) for node in nodes), set(results)):
        for value in used:
            fuser.users[value] = fuser.users.get(value, 0) + 1
    made = {v for node in nodes if not node.regions for v in node.outputs}
    for number, row in (rows or {}).items():
        if results[number] in made and not is_narrow(row.dtype):
            fuser.homes.setdefault(results[number], row)
    for node in nodes:
        fuser.place(node)
    return results


def _mark(fuser: Fuser, node: Node, flow: Flow, part: str, test: Buffer | None = None) -> None:
    fuser.program.run.append(Kernel(flow.name, nodes=(node,), mark=Mark(flow, part, test)))


def _write(fuser: Fuser, value: Value, target: Buffer, *, own: bool) -> None:
    """Writes the value to the buffer. `own`: nobody else needs it elsewhere, so it may live there."""
    fresh = value not in fuser.buffers and own and fuser.users[value] == 1 and value not in fuser.static
    if not fresh and fuser.materialise(value) is target:
        return
    fuser.program.run.append(fuser.kernel_into(value, target))
    if fresh:
        fuser.buffers[value] = target


# ---- If


def _place_if(fuser: Fuser, node: Node) -> None:
    _settle(fuser, node.inputs)
    flow = Flow(fuser.unique("if"))
    test = fuser.materialise(node.inputs[0])
    results = [fuser.new_buffer(value) for value in node.outputs]
    learned = []
    for part, region in zip(("if", "else"), node.regions, strict=True):
        _mark(fuser, node, flow, part, test if part == "if" else None)
        with _inside(fuser):
            for value, target in zip(_enter(fuser, region, node.inputs[1:]), results, strict=True):
                _write(fuser, value, target, own=value not in node.inputs)
            learned.append(fuser.known)
    _mark(fuser, node, flow, "end")
    fuser.known |= _made_by(fuser, node) & learned[0] & learned[1]
    _check_waiting(fuser, node)


# ---- loops


@dataclass(frozen=True)
class _Shape:
    """What the three loop ops have in common."""

    body: Graph
    carries: int
    scanned: int
    trips: Size | None
    reverse: bool
    cond: Graph | None


def _place_loop(fuser: Fuser, node: Node, loop: _Shape) -> None:
    name = fuser.unique("round")
    round_ = Dim(name, 0, None)
    fuser.rounds.add(name)
    count = node.op.count if isinstance(node.op, Loop) else None
    symbol = count.symbol if isinstance(count, Dim) else None
    open_sizes, whole = _open_sizes(fuser, node.outputs[loop.carries :])
    flow = Flow(name, round_.symbol, loop.trips, symbol, whole)
    carries, rest = node.inputs[: loop.carries], node.inputs[loop.carries :]
    _settle(fuser, rest)
    of_rows = set(node.outputs[loop.carries :])  # which may begin within a byte
    held = [fuser.new_buffer(v, wide=v in of_rows and is_narrow(v.dtype)) for v in node.outputs]
    for value, target in zip(carries, held, strict=False):
        _write(fuser, value, target, own=node.inputs.count(value) == 1)
    current = [
        _held_value(fuser, value, target) for value, target in zip(node.outputs, held[: loop.carries], strict=False)
    ]
    at: Size = round_
    if loop.reverse:
        assert loop.trips is not None
        at = loop.trips - 1 - round_
    rows = [_row_of(fuser, value, at) for value in rest[: loop.scanned]]
    captured = rest[loop.scanned :]
    # a loop in a loop leaves what the round before has decided, which its own is compared with
    fresh = [symbol for symbol in open_sizes if symbol not in fuser.stacked]
    if fresh:  # the least that they can be where there is no round
        least = tuple((symbol, symbol.lo) for symbol in fresh)
        fuser.program.run.append(Kernel("rows", nodes=(node,), extents=Extents(least)))
    _mark(fuser, node, flow, "loop")
    if loop.cond is not None:
        with _inside(fuser):
            (go_on,) = _enter(fuser, loop.cond, [*current, *captured])
            _mark(fuser, node, flow, "while", fuser.materialise(go_on))
    fuser.stacked.update(fresh)
    with _inside(fuser):
        places = {n: _row(fuser, held[n], at) for n in range(loop.carries, len(held))}
        results = _enter(fuser, loop.body, [*current, *rows, *captured], places)
        outside = {*current, *rows, *captured}
        for number, place in places.items():
            _write(fuser, results[number], place, own=results[number] not in outside)
        _update(fuser, results[: loop.carries], current, held)
    fuser.stacked.difference_update(fresh)
    _mark(fuser, node, flow, "next")
    _mark(fuser, node, flow, "end")
    if symbol is not None and symbol.name not in fuser.known:
        fuser.program.run.append(Kernel(name, nodes=(node,), extents=Extents(((symbol, flow),))))
        _learn(fuser, symbol, None)
    _check_waiting(fuser, node)


def _open_sizes(fuser: Fuser, rows: Sequence[Value]) -> tuple[list[Symbol], tuple[Symbol, ...]]:
    """What the rounds decide of the sizes of rows; and of that what is a whole size, so that it can't change."""
    sizes = [size for value in rows for size in value.shape[1:] if isinstance(size, Dim)]
    found = {s for size in sizes for s in symbols(size) if s.name not in fuser.known}
    ordered = sorted(found, key=lambda s: s.name)
    return ordered, tuple(s for s in ordered if any(size.symbol == s for size in sizes))


def _held_value(fuser: Fuser, like: Value, buffer: Buffer) -> Value:
    """A value for the carry of the present round."""
    value = Value(like.graph, like.type, "node", like.name)
    fuser.buffers[value] = buffer
    return value


def _row_of(fuser: Fuser, sequence: Value, at: Size) -> Value:
    """A row of a scanned input, read where it lies."""
    value = Value(sequence.graph, TensorType(sequence.shape[1:], sequence.dtype), "node", sequence.name)
    fuser.virtual[value] = Load(sequence, (size_expr(at), *out_vars(value.rank)), value.dtype)
    return value


def _row(fuser: Fuser, stacked: Buffer, at: Size) -> Buffer:
    """The place of this round's row in a stacked result."""
    shape = stacked.shape[1:]
    offset = at * numel(shape) * (1 if stacked.wide else stacked.dtype.itemsize)
    name = fuser.unique(stacked.name)
    return Buffer(name, "arena", shape, stacked.dtype, root=stacked, offset=offset, wide=stacked.wide)


def _update(fuser: Fuser, results: Sequence[Value], current: Sequence[Value], held: Sequence[Buffer]) -> None:
    """Makes the results the carries of the next round, reading every old one before it is overwritten."""
    waiting: list[tuple[Kernel, Buffer]] = []
    for value, old, target in zip(results, current, held, strict=False):
        if value is old:
            continue
        if fuser.users[value] > 1 or value in fuser.static:
            fuser.materialise(value)
        made = Buffer(fuser.unique(target.name), "arena", target.shape, target.dtype)
        waiting.append((fuser.kernel_into(value, made), target))
    late = []
    while waiting:
        others = [{b.base for kernel, _ in waiting if kernel is not own for b in kernel.reads()} for own, _ in waiting]
        number = next((n for n, (k, t) in enumerate(waiting) if t not in others[n] and _in_place(k, t)), None)
        kernel, target = waiting.pop(number or 0)
        if number is not None:
            kernel = kernel.retarget(target)
        else:
            late.append(fuser.copy_kernel(kernel.writes()[0].base, target))
        fuser.program.run.append(kernel)
    fuser.program.run.extend(late)


def _in_place(kernel: Kernel, target: Buffer) -> bool:
    return all(b.base is not target for b in kernel.reads()) or target in kernel.in_place_operands()


# ---- sizes that data decide


def place_guards(fuser: Fuser, guards: Sequence[Guard], *, checked: bool = False) -> None:
    """Equalities that a run checks: now those whose sizes are known (unless that is `checked` when a run is bound)."""
    ready = [g for g in guards if _is_known(fuser, g)]
    fuser.waiting.extend(g for g in guards if g not in ready)
    if ready and not checked:
        fuser.program.run.append(Kernel("guard", extents=Extents(checks=tuple(ready))))


def _is_known(fuser: Fuser, guard: Guard) -> bool:
    return all(s.name in fuser.known for size in (guard.lhs, guard.rhs) for s in symbols(size))


def _check_waiting(fuser: Fuser, node: Node) -> None:
    ready = [g for g in fuser.waiting if _is_known(fuser, g)]
    fuser.waiting = [g for g in fuser.waiting if g not in ready]
    if ready:
        fuser.program.run.append(Kernel("guard", nodes=(node,), extents=Extents(checks=tuple(ready))))


def _made_by(fuser: Fuser, node: Node) -> set[str]:
    return {s.name for v in node.outputs for size in v.shape for s in symbols(size)} - fuser.known


def _learn(fuser: Fuser, symbol: Symbol, most: Size | None) -> None:
    """From here on the size is known; `most` is the largest that it can be, at the sizes of the run."""
    fuser.known.add(symbol.name)
    made = fuser.program.made
    old = made.get(symbol.name)
    made[symbol.name] = most if old is None or most is None else max_size(old, most)


def place_extents(fuser: Fuser, node: Node) -> None:
    """After a node that decides sizes: takes them into what follows."""
    if isinstance(node.op, AsShape):
        _as_shape(fuser, node)
    elif isinstance(node.op, Produced):
        count = node.op.count
        symbol = count.symbol if isinstance(count, Dim) else None
        if symbol is not None and symbol.name not in fuser.known:
            kernel = fuser.program.run[-1]
            assert kernel.nodes == (node,), "a node that decides a size is run as a whole"
            kernel.makes = (symbol,)
            _learn(fuser, symbol, node.op.most(*(v.type for v in node.inputs)))
    _check_waiting(fuser, node)


def _as_shape(fuser: Fuser, node: Node) -> None:
    sizes: list[tuple[Symbol, Size]] = []
    checks = []
    for have, wanted in zip(node.inputs[0].shape, node.outputs[0].shape, strict=True):
        symbol = wanted.symbol if isinstance(wanted, Dim) else None
        if symbol is not None and symbol.name not in fuser.known:
            sizes.append((symbol, have))
            _learn(fuser, symbol, have)
        elif have != wanted:
            checks.append(Guard(wanted, have, f"node {node.label}"))
    if sizes or checks:
        fuser.program.run.append(Kernel("as_shape", nodes=(node,), extents=Extents(tuple(sizes), tuple(checks))))
