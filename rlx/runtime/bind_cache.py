"""Key-value caches that a graph takes in and gives back longer become states of a fixed capacity.

A decoder as exporters write it has inputs `past` [.., P, ..] and outputs `present` = concat(past, new), fed back by the
caller. Here each pair becomes one state with room for `capacity` positions, of which a second state says how many are
filled; a run writes its new rows behind them and attention reads those that are there. Every size P + S becomes the
capacity, so that the sizes of a step are always the same: nothing is bound anew, nothing is copied or allocated. That
this changes no result is proved like padding is (`rlx.kernels.independence`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlx import ops
from rlx.boundary import bounded
from rlx.errors import CompileError, OptionError, RlxError, ShapeError, no_such
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.encoding import Encoding
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.shape import Dim, Size, exact_div, same, substitute, symbols
from rlx.ir.value import stored_as
from rlx.kernels.independence import has_dim, mixing
from rlx.ops.attention import Attention
from rlx.ops.elementwise import Add, Cast, Identity, Mul
from rlx.ops.encoded import Encode
from rlx.ops.index import Gather
from rlx.ops.layout import Concat, Iota, SizeOf, Slice
from rlx.ops.update import DynamicUpdateSlice
from rlx.passes import run_passes
from rlx.passes.dce import dce
from rlx.passes.dims import apply_dims, with_dims
from rlx.passes.rewrite import Site, rewrite
from rlx.units import int_or_same

__all__ = ["bind_cache"]


@bounded("bind_cache", CompileError)
def bind_cache(
    graph: Graph,
    capacity: int | None = None,
    pairs: Mapping[str, str] | None = None,
    *,
    dims: Mapping[str, Any] | None = None,
    length: str = "length",
    kv_dtype: str | None = None,
) -> Graph:
    """The graph with its caches as states: of each pair the input `past` becomes a state, the output `present` goes.

    `pairs` maps inputs to outputs that are concat(input, new rows) along the axis that grows, or that have the type of
    the input, as a cache with rows put in place (TensorScatter) or the vector of a recurrent model; None finds all that
    are concatenated or put in place. Of caches that grow, a run appends its rows at the position that the state
    `length` (i64) tells, and adds their number to it; beyond `capacity` it raises `ExecutionError` and writes nothing.
    Other inputs with an entry for every position, such as an attention mask, get `capacity` entries, of which those of
    unfilled positions do not count. `dims` fixes or bounds dims first: all of a cache but the axis that grows must be
    fixed. `kv_dtype` is what caches that grow are stored in instead of their own type: a type of floats ("f16"), or a
    block format ("q8_0", "q4_0") where the last axis is whole blocks; new rows are rounded as they are written. Raises
    `NameNotFound`, `ShapeError`, and `OptionError` where a pair is none or something other than attention mixes
    positions.
    """
    if not isinstance(graph, Graph):
        raise OptionError(f"bind_cache takes a Graph, got {type(graph).__name__}")
    named = pairs is None or isinstance(pairs, Mapping)
    if not named or not all(isinstance(n, str) for pair in (pairs or {}).items() for n in pair):
        raise OptionError(f"bind_cache: pairs={pairs!r}: expected a mapping of inputs to outputs, or None")
    stored = None if kv_dtype is None else _stored_as(kv_dtype)
    graph = apply_dims(graph, dims)
    names = _found(graph) if pairs is None else dict(pairs)
    kept = {past: present for past, present in names.items() if _same_type(graph, past, present)}
    graph = _as_states(graph, kept)
    grown = {past: present for past, present in names.items() if past not in kept}
    if not grown:
        return graph
    capacity = int_or_same(capacity)
    if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
        raise OptionError(
            f"bind_cache: capacity={capacity!r}: expected an int >= 1 for {next(iter(grown))!r}, which grows"
        )
    found = _pairs(graph, grown)
    positions = f"{found[0].old.shape[found[0].axis]} + {found[0].new.shape[found[0].axis]}"
    rows = [s.hi or capacity for s in symbols(found[0].new.shape[found[0].axis])]
    graph = _within(graph, found, capacity)
    found = _pairs(graph, grown)
    graph, total = _with_total(graph, found, capacity, min([capacity, *rows]))
    graph = run_passes(graph)
    work = _Bound(graph, _pairs(graph, grown), total, capacity, length, stored, positions)
    return with_dims(work.run(), {total: capacity})


def _found(graph: Graph) -> dict[str, str]:
    """The pairs that a graph shows: outputs that are an input with rows behind it, or with rows put in place."""
    found: dict[str, str] = {}
    for output in graph.outputs:
        node = _grower(output.value)
        if node is not None:
            past = node.inputs[0].name
            if past in found:
                raise OptionError(f"bind_cache: the input {past!r} grows to more than one output; name the pairs")
            found[past] = output.name
    if not found:
        raise OptionError(f"bind_cache: no output of {graph.name!r} is concat(input, new rows); name the pairs")
    return found


def _stored_as(name: str) -> tuple[DType, Encoding | None]:
    """What a cache is stored in. Raises `OptionError`."""
    try:
        dtype, encoding = stored_as(name)
    except RlxError:
        dtype, encoding = DTYPES["bool"], None
    if not dtype.is_float or (encoding is not None and not encoding.written):
        raise OptionError(f"bind_cache: kv_dtype={name!r}: expected a type of floats, as 'f16', or 'q8_0' or 'q4_0'")
    return dtype, encoding


def _same_type(graph: Graph, past: str, present: str) -> bool:
    """Whether the output is the input's next value as it is. Raises `NameNotFound`."""
    inputs, outputs = {v.name: v for v in graph.inputs}, {o.name: o.value for o in graph.outputs}
    for name, known, what in ((past, inputs, "input"), (present, outputs, "output")):
        if name not in known:
            raise no_such(what, name, known, call="bind_cache")
    return inputs[past].type == outputs[present].type


def _as_states(graph: Graph, pairs: Mapping[str, str]) -> Graph:
    """The graph with these inputs as states, whose new values are the outputs."""
    if not pairs:
        return graph
    new = rewrite(graph, lambda site: None)
    for past, present in pairs.items():
        value = next(v for v in new.inputs if v.name == past)
        if any(isinstance(s, Dim) for s in value.shape):
            raise ShapeError(f"bind_cache: {past!r} is {value.type}: fix its dims, as dims={{...: 1}}")
        new.inputs.remove(value)
        value.kind = "state"
        new.states.append(value)
        new.updates[past] = next(o.value for o in new.outputs if o.name == present)
    new.outputs = [o for o in new.outputs if o.name not in pairs.values()]
    return new


@dataclass(frozen=True)
class _Pair:
    """An input and the output that it grows to, by name; `node` is the concat that does so."""

    past: str
    present: str
    node: Node

    @property
    def axis(self) -> int:
        op = self.node.op
        assert isinstance(op, Concat)
        return op.axis % self.node.inputs[0].rank

    @property
    def old(self) -> Value:
        return self.node.inputs[0]

    @property
    def new(self) -> Value:
        return self.node.inputs[1]


def _grower(value: Value) -> Node | None:
    """The node that makes the value of an input by putting rows behind it, or in their place."""
    while value.node is not None and isinstance(value.node.op, Identity):
        value = value.node.inputs[0]
    node = value.node
    if node is None or node.inputs[:1] == () or node.inputs[0].kind != "input":
        return None
    grows = isinstance(node.op, Concat) and len(node.inputs) == 2
    return node if grows or isinstance(node.op, DynamicUpdateSlice) else None


def _pairs(graph: Graph, names: Mapping[str, str]) -> list[_Pair]:
    """The concats of caches that grow."""
    outputs = {o.name: o.value for o in graph.outputs}
    found = []
    for past, present in names.items():
        node = _grower(outputs[present])
        if node is None or not isinstance(node.op, Concat) or node.inputs[0].name != past:
            raise OptionError(
                f"bind_cache: the output {present!r} is neither concat({past!r}, new rows) nor of its type"
            )
        found.append(_Pair(past, present, node))
    return found


def _within(graph: Graph, pairs: list[_Pair], capacity: int) -> Graph:
    """The graph with sizes simplified by what holds within the capacity: min(1024, past + rows) is past + rows.

    For that, no more than one half each are taken for what is there and what comes; the algebra is the same for others.
    """
    half = max(capacity // 2, 1)
    values: dict[str, Size] = {}
    for pair in pairs:
        for size in (pair.old.shape[pair.axis], pair.new.shape[pair.axis]):
            for s in symbols(size):
                values[s.name] = Dim(s.name, min(s.lo, half), min(s.hi or half, half), s.multiple)
    return with_dims(graph, values) if values else graph


def _with_total(graph: Graph, pairs: list[_Pair], capacity: int, most: int) -> tuple[Graph, str]:
    """The graph in terms of the positions that there are after a run, not of those before; the name of that dim.

    A run brings `most` new rows at most.
    """
    total = "total"
    while total in graph.dims():
        total += "_"
    values: dict[str, Size] = {}
    every = Dim(total, capacity, capacity)
    rows = pairs[0].new.shape[pairs[0].axis]
    bounded = rows
    if isinstance(rows, Dim):
        symbol = rows.symbol
        if symbol is None:
            raise ShapeError(f"bind_cache: the number of new rows, {rows}, is no dim of its own: fix it with dims=")
        bounded = Dim(symbol.name, symbol.lo, most, symbol.multiple)
        values[symbol.name] = bounded
    for pair in pairs:
        before = pair.old.shape[pair.axis]
        grown = before.symbol if isinstance(before, Dim) else None
        if grown is None:
            raise ShapeError(f"bind_cache: the input {pair.past!r} has {before} positions: leave that dim open")
        if same(pair.new.shape[pair.axis], rows) is not True:
            raise ShapeError(
                f"bind_cache: {pair.past!r} grows by {pair.new.shape[pair.axis]}, others by {rows} positions"
            )
        fixed = [s for d, s in enumerate(pair.old.shape) if d != pair.axis]
        if any(isinstance(s, Dim) for s in fixed):
            raise ShapeError(f"bind_cache: {pair.past!r} is {pair.old.type}: fix its other dims, as dims={{...: 1}}")
        values[grown.name] = every - bounded
    for guard in graph.guards:  # other names for the same number, such as the length of a mask
        for one, other in ((guard.lhs, guard.rhs), (guard.rhs, guard.lhs)):
            name = one.symbol.name if isinstance(one, Dim) and one.symbol is not None else None
            if name is not None and name not in values and any(s.name in values for s in symbols(other)):
                values[name] = substitute(other, values)
    return with_dims(graph, values), total


@dataclass
class _Bound:
    """One rewriting; `total` names the dim of all positions."""

    graph: Graph
    pairs: list[_Pair]
    total: str
    capacity: int
    length: str
    stored: tuple[DType, Encoding | None] | None  # what caches are stored in, None: as they come
    positions: str  # how the number of all positions is written in names of the graph
    position: Value | None = None  # how many positions were filled before the run, and after it
    end: Value | None = None
    trusted: list[Node] = field(default_factory=list)
    updates: dict[_Pair, tuple[Value, Value]] = field(default_factory=dict)

    def run(self) -> Graph:
        taken = {v.name for v in (*self.graph.inputs, *self.graph.params, *self.graph.states)}
        if self.length in taken:
            raise OptionError(f"bind_cache: the name {self.length!r} is taken in the graph: give length= another one")
        new = rewrite(self.graph, self.rule)
        presents = {pair.present for pair in self.pairs}
        new.outputs = [o for o in new.outputs if o.name not in presents]
        pasts = {pair.past for pair in self.pairs}
        used = {v for node in new.nodes for v in node.inputs} | {o.value for o in new.outputs}
        for value in new.inputs:
            if value.name in pasts and value in used:
                raise OptionError(f"bind_cache: the input {value.name!r} is read by more than its concat")
        new.inputs = [v for v in new.inputs if v.name not in pasts]
        full = {self.total: self.capacity}  # equalities that hold there are limits, such as the length of a table
        new.guards = [g for g in new.guards if substitute(g.lhs, full) != substitute(g.rhs, full)]
        why = mixing(new, self.total, self.trusted)
        if why is not None:
            hint = self.hint(new)
            raise OptionError(
                f"bind_cache: what is done to positions outside of attention must keep them apart: {why}{hint}"
            )
        for pair, (state, value) in self.updates.items():
            state.name = pair.past  # free now
            new.update(state, value)
        assert self.position is not None
        assert self.end is not None
        new.update(self.position, self.end)
        return dce(new)

    def hint(self, graph: Graph) -> str:
        """What to say of an input whose size may be the number of all positions, as that of a mask is."""
        rows = {s.name for pair in self.pairs for s in symbols(pair.new.shape[pair.axis])}
        for value in graph.inputs:
            for axis, size in enumerate(value.shape):
                if isinstance(size, Dim) and size.symbol is not None and size.symbol.name not in rows:
                    return (
                        f"; if axis {axis} of the input {value.name!r} has an entry for each position, load the file "
                        f"with dims={{{value.name!r}: {{{axis}: {self.positions!r}}}}}"
                    )
        return ""

    # ---- nodes

    def rule(self, site: Site) -> Value | None:
        op = site.op
        pair = next((p for p in self.pairs if p.node is site.node), None)
        if pair is not None:
            return self.appended(site, pair)
        match op:
            case SizeOf(size=size) if has_dim(size, self.total):
                return self.number(site, size)
            case Iota(start=Dim() as start) if has_dim(start, self.total):
                first = self.number(site, start)
                count = site.add(replace(op, start=0))
                return site.add(Add(), count, first if op.dtype is first.dtype else site.add(Cast(op.dtype), first))
            case Slice(starts=starts) if any(has_dim(s, self.total) for s in starts):
                return self.sliced(site, op)
            case Attention() if has_dim(site.inputs[1].shape[2], self.total) and not op.counted:
                self.filled(site)
                assert self.end is not None
                return site.add(replace(op, counted=True), *site.inputs, self.end)
        return None

    def filled(self, site: Site) -> Value:
        """How many positions are filled before the run."""
        if self.position is None:
            pair = self.pairs[0]
            self.position = site.graph.state(self.length, (), "i64")
            self.end = site.add(Add(), self.position, site.add(SizeOf(pair.new.shape[pair.axis])))
        return self.position

    def appended(self, site: Site, pair: _Pair) -> Value:
        """The state with the new rows in their place."""
        at = self.filled(site)
        made = site.node.outputs[0]
        dtype, encoding = self.stored if self.stored is not None and made.dtype.is_float else (made.dtype, None)
        state = site.graph.state(f"{pair.past}.state", made.shape, dtype, encoding=encoding)
        rows = site.inputs[1]
        if encoding is not None:
            rows = site.add(Encode(encoding.name), rows)
        elif dtype is not made.dtype:
            rows = site.add(Cast(dtype), rows)
        value: Value = ops.dynamic_update_slice(state, rows, at, axis=pair.axis)
        self.trusted.append(_maker(value))
        self.updates[pair] = state, value
        return value if value.type == made.type else site.add(Cast(made.dtype), value)

    def number(self, site: Site, size: Size) -> Value:
        """A size with a multiple of the total in it, as the number that it is in a run."""
        self.filled(site)
        assert self.end is not None
        rest = substitute(size, {self.total: 0})
        times = exact_div(size - rest, _symbol_of(size, self.total))
        if not isinstance(times, int):
            raise OptionError(f"bind_cache: {site.node.label} computes with {size}, which is not linear in it")
        value = self.end
        if times != 1:
            value = site.add(Mul(), value, site.graph.constant(np.int64(times)))
        return value if rest == 0 else site.add(Add(), value, site.add(SizeOf(rest)))

    def sliced(self, site: Site, op: Slice) -> Value:
        """Entries that begin at a position: taken by their numbers."""
        (x,) = site.inputs
        moving = [d for d, start in enumerate(op.starts) if has_dim(start, self.total)]
        starts = tuple(0 if d in moving else s for d, s in enumerate(op.starts))
        sizes = tuple(x.shape[d] if d in moving else s for d, s in enumerate(op.sizes))
        steps = tuple(1 if d in moving else s for d, s in enumerate(op.steps))
        if sizes != x.shape or any(s != 1 for s in steps):
            x = site.add(Slice(starts, sizes, steps), x)
        for d in moving:
            places = site.add(Iota(op.sizes[d], 0, op.steps[d]))
            x = site.add(Gather(d), x, site.add(Add(), places, self.number(site, op.starts[d])))
            self.trusted.append(_maker(x))
        return x


def _maker(value: Value) -> Node:
    assert value.node is not None
    return value.node


def _symbol_of(size: Size, name: str) -> Dim:
    symbol = next(s for s in symbols(size) if s.name == name)
    return Dim(symbol.name, symbol.lo, symbol.hi, symbol.multiple)
