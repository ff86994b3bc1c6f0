"""`rlx.vmap`: a function over rows made one over arrays, by the rules of the ops that it adds to the graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar

from rlx.boundary import bounded
from rlx.errors import CompileError, NameNotFound, OptionError, ShapeError
from rlx.ir.graph import Graph, Node, TensorType, Value
from rlx.ir.shape import Size, unify
from rlx.ops.base import Op, apply
from rlx.ops.gradients.attach import reshaped, size_as, spread, summed_to, zeros
from rlx.ops.gradients.batching import moved
from rlx.ops.gradients.complex import of_parts
from rlx.ops.gradients.engine import GROUPS, Group, dependent, open_frame, taken_out, units
from rlx.ops.reduction import ReduceSum
from rlx.passes.rewrite import made_symbols, taken_symbols
from rlx.records import dataclass
from rlx.trace.control import scan, value_of
from rlx.trace.tree import fill, leaves_of, ordered
from rlx.transform.batched_control import BATCHED, is_guarded
from rlx.transform.control import inlined
from rlx.transform.functions import transformed
from rlx.units import as_int

__all__ = ["pmean", "psum", "vmap"]

_LOG = logging.getLogger("rlx")
_NAMES: ContextVar[tuple[str, ...]] = ContextVar("names", default=())  # of the axes of the vmaps around


@dataclass(frozen=True)
class _AxisSum(Op):
    """x summed over the slices of a `vmap` whose axis has this name; only there while that traces its function."""

    op_name: ClassVar[str] = "axis_sum"
    arity: ClassVar[tuple[int, int | None]] = (1, 1)
    linear: ClassVar[str] = "each"
    name: str

    def infer(self, x: TensorType) -> TensorType:
        return x

    def transpose(self, inputs: Any, cotangents: Any, i: int) -> Any:
        """Each slice's x is in the sum of every slice."""
        return apply(self, cotangents[0])

    def batch(self, inputs: Any, batched: Any) -> Any:
        """Over slices of another axis."""
        return apply(self, inputs[0])


def _sums(node: Node, name: str | None) -> bool:
    """Whether a node, or one in its regions, sums over the axis of that name."""
    if isinstance(node.op, _AxisSum):
        return node.op.name == name
    return any(_sums(inner, name) for region in node.regions for inner in region.nodes)


@bounded("psum", CompileError)
def psum(x: Any, axis_name: str) -> Any:
    """The sum of x over the slices of the `vmap` around whose `axis_name` this is, the same in all. (jax.lax.psum)

    x is a tree of arrays. Differentiated within the vmap, the sum of all slices' results is what counts, as in JAX.
    """
    return _over_slices("psum", x, axis_name, lambda v: apply(_AxisSum(axis_name), v))


@bounded("pmean", CompileError)
def pmean(x: Any, axis_name: str) -> Any:
    """The mean of x over the slices of the `vmap` around whose `axis_name` this is: see `psum`. (jax.lax.pmean)"""

    def mean(v: Value) -> Any:
        return apply(_AxisSum(axis_name), v) / apply(_AxisSum(axis_name), zeros(v) + 1)

    return _over_slices("pmean", x, axis_name, mean)


def _over_slices(what: str, x: Any, name: str, function: Callable[[Value], Any]) -> Any:
    if name not in _NAMES.get():
        known = ", ".join(map(repr, _NAMES.get())) or "none"
        raise NameNotFound(f"{what}: no vmap around has axis_name={name!r}; there is {known}")
    frame = open_frame()
    return fill(x, [function(value_of(frame, leaf, path)) for path, leaf in leaves_of(x, what)])


class _Batched:
    """The nodes of a function over rows, applied to arrays: `values` has the arrays that rows stand for."""

    def __init__(self, size: Size, values: dict[Value, Value], name: str | None = None) -> None:
        self.size = size
        self.values = values
        self.name = name  # of the axis, which sums over it go by
        self.shared: dict[Value, Value] = {}  # what depends on rows, and is the same for all of them

    def taken(self, start: int) -> list[Node]:
        """Takes the nodes from `start` on that rows or sums over them reach out of the open graph.

        Those of functions with a rule of their own are taken all or none; so are what decides a size and what takes it.
        """
        graph, own, known = open_frame().graph, set[int](), [*self.values, *self.shared]
        sizes = made_symbols(graph)
        groups = [{id(node) for node in group.nodes} for group in GROUPS.get(graph, [])]

        def meant(node: Node) -> bool:
            return id(node) in own or _sums(node, self.name)

        while True:
            found = dependent(graph.nodes[start:], known, meant)
            reached, decided = {id(node) for node in found}, {s for node in found for s in sizes[node]}
            more = set().union(*(nodes for nodes in groups if nodes & reached))
            if decided:
                more |= {id(n) for n in graph.nodes[start:] if not decided.isdisjoint(taken_symbols(n))}
            if more <= own:
                return taken_out(graph, start, known, meant)
            own |= more

    def add(self, nodes: Sequence[Node]) -> None:
        for unit in units(nodes):
            start = len(open_frame().graph.nodes)
            for node in unit.nodes if isinstance(unit, Group) else [unit]:
                self._node(node)
            if isinstance(unit, Group):
                self._group(unit, start)

    def _node(self, node: Node) -> None:
        batched = [v in self.values for v in node.inputs]
        inputs = [self.whole(v) for v in node.inputs]
        if isinstance(node.op, _AxisSum) and node.op.name == self.name:
            self.shared[node.outputs[0]] = self._sum(inputs[0], batched[0])
            return
        if not any(batched) and not any(_sums(inner, self.name) for r in node.regions for inner in r.nodes):
            made = open_frame().graph.add(node.op, *inputs, regions=node.regions)
            self.shared.update(zip(node.outputs, made, strict=True))
            return
        outputs = self._applied(node, inputs, batched)
        self.values.update(zip(node.outputs, outputs, strict=True))

    def whole(self, value: Value) -> Value:
        """The array that a value stands for, which has the axis only if it differs between the rows."""
        return self.values.get(value, self.shared.get(value, value))

    def _sum(self, x: Value, batched: bool) -> Value:
        """x [B, ..] summed over the rows, or as often as there are rows."""
        if batched:
            return of_parts(lambda v: apply(ReduceSum((0,), False), v), x)
        return of_parts(lambda v: v * size_as(self.size, v), x)

    def _applied(self, node: Node, inputs: list[Value], batched: list[bool]) -> Sequence[Value]:
        op: Any = node.op
        if op.batch is not None:
            made = op.batch(inputs, batched)
            if made is not NotImplemented:
                return made if isinstance(made, tuple) else (made,)
        if type(op) in BATCHED and (_sums(node, self.name) or not is_guarded(node, batched)):
            return BATCHED[type(op)](node, inputs, batched, self.full, self._inlined)  # type: ignore[no-any-return]
        if not node.regions and (op.formula is not None or op.decompose is not None):
            return self._written_out(node, inputs, batched)
        _LOG.warning("vmap: %s has no batch rule for this: it runs as a loop over the rows", node.label)
        return self._loop(node, inputs, batched)

    def _written_out(self, node: Node, inputs: list[Value], batched: list[bool]) -> Sequence[Value]:
        op: Any = node.op
        graph = open_frame().graph
        start = len(graph.nodes)
        rows = [Value(graph, _row(v), "input", "") if b else v for v, b in zip(inputs, batched, strict=True)]
        made = op.formula(*rows) if op.formula is not None else op.decompose(graph, *rows)
        roots = {row: v for row, v, b in zip(rows, inputs, batched, strict=True) if b}
        inner = _Batched(self.size, dict(roots), self.name)
        inner.add(inner.taken(start))
        return [inner.result(v) for v in (made if isinstance(made, tuple) else (made,))]

    def _inlined(self, region: Graph, inputs: Sequence[Value], batched: Sequence[bool]) -> list[tuple[Value, bool]]:
        """The results of a region on arrays where `batched`, and whether each has the axis."""
        graph = open_frame().graph
        start = len(graph.nodes)
        rows = [Value(graph, _row(v), "input", "") if b else v for v, b in zip(inputs, batched, strict=True)]
        results, *_ = inlined(region, rows)
        inner = _Batched(self.size, {row: v for row, v, b in zip(rows, inputs, batched, strict=True) if b}, self.name)
        inner.add(inner.taken(start))
        return [(inner.whole(v), v in inner.values) for v in results]

    def _loop(self, node: Node, inputs: list[Value], batched: list[bool]) -> Sequence[Value]:
        def body(carry: Any, rows: Any) -> Any:
            frame, own = open_frame(), iter(rows)
            given = [next(own) if b else frame.own(v) for v, b in zip(inputs, batched, strict=True)]
            return carry, tuple(frame.graph.add(node.op, *given, regions=node.regions))

        made: Sequence[Value] = scan(body, (), tuple(v for v, b in zip(inputs, batched, strict=True) if b))[1]
        return made

    def _group(self, group: Group, start: int) -> None:
        """A rule of a function's own counts for its rows as well."""
        graph = open_frame().graph
        inputs = tuple(self.whole(v) for v in group.inputs)
        outputs = tuple(self.result(v) for v in group.outputs)
        self.values.update(zip(group.outputs, outputs, strict=True))
        nodes = graph.nodes[start:]
        made = Group(nodes, inputs, outputs, group.name)
        flags = [v in self.values for v in group.inputs]

        def mapped(rule: Any, back: bool) -> Any:
            def call(
                _: Group, own: Sequence[Value], results: Sequence[Value], given: Sequence[Value | None]
            ) -> list[Value | None]:
                inner_graph = open_frame().graph
                first = len(inner_graph.nodes)
                known: dict[Value, Value] = {}

                def row(value: Value | None, batched: bool = True) -> Value | None:
                    if value is None or not batched:
                        return value
                    made = Value(inner_graph, _row(value), "input", "")
                    known[made] = value
                    return made

                rows = [row(v, b) for v, b in zip(own, flags, strict=True)]
                wide = (
                    given
                    if back
                    else [v if v is None or b else self.full(v) for v, b in zip(given, flags, strict=True)]
                )
                found = rule(group, rows, [row(v) for v in results], [row(v) for v in wide])
                inner = _Batched(self.size, {**self.values, **known}, self.name)  # a rule may read what is around it
                inner.shared = dict(self.shared)
                inner.add(inner.taken(first))
                totals = [None if v is None else inner.result(v) for v in found]
                return _unspread(totals, flags, own) if back else totals

            return call

        made.vjp = None if group.vjp is None else mapped(group.vjp, True)
        made.jvp = None if group.jvp is None else mapped(group.jvp, False)
        GROUPS.setdefault(graph, []).append(made)

    def full(self, value: Value) -> Value:
        """A value that is the same for all rows, with the axis in front."""
        return spread(reshaped(value, (1, *value.shape)), (self.size, *value.shape))

    def result(self, value: Value) -> Value:
        """What a value of the rows is for all of them."""
        return self.values[value] if value in self.values else self.full(self.whole(value))


def _unspread(
    cotangents: Sequence[Value | None], batched: Sequence[bool], inputs: Sequence[Value]
) -> list[Value | None]:
    """Cotangents of inputs that all rows share are added up."""
    return [
        ct if ct is None or b else summed_to(ct, v.shape) for ct, b, v in zip(cotangents, batched, inputs, strict=True)
    ]


def _row(value: Value) -> TensorType:
    return TensorType(value.shape[1:], value.dtype)


def _axes(what: str, axes: Any, tree: Any) -> list[Any]:
    """An axis, or None, for each leaf: `axes` is one for all, or a tree that ends earlier."""
    axis = as_int(axes)
    if axes is None or axis is not None:
        return [axis for _ in leaves_of(tree, "")]
    if isinstance(axes, dict) and isinstance(tree, dict) and set(axes) == set(tree):
        return [axis for key in ordered(tree) for axis in _axes(what, axes[key], tree[key])]
    if isinstance(axes, tuple | list) and isinstance(tree, tuple | list) and len(axes) == len(tree):
        return [axis for a, t in zip(axes, tree, strict=True) for axis in _axes(what, a, t)]
    raise OptionError(
        f"vmap: {what} {axes!r} does not fit: one axis or None for all, or a tree of them like the arguments"
    )


@bounded("vmap", CompileError)
def vmap(
    function: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0, *, axis_name: str | None = None
) -> Callable[..., Any]:
    """The function applied to each slice of its arguments along an axis, all at once. (jax.vmap)

    `in_axes` says for each argument (or for all) along which axis: an int, None for what all slices share, or a tree of
    these; keyword arguments go along their first axis. `out_axes` is where the axis is in each result, None for one
    that is the same for all slices. `psum` and `pmean` with `axis_name` go over the slices. What a function adds to the
    graph is replaced by ops on whole arrays; an op without a rule runs as a loop over the slices, and a
    warning says so. `ShapeError` for arguments whose axes differ in size.
    """
    if axis_name is not None and not isinstance(axis_name, str):
        raise OptionError(f"vmap: axis_name={axis_name!r}: expected a text, such as 'batch', or None")

    def call(*args: Any, **kwargs: Any) -> Any:
        if isinstance(in_axes, tuple | list) and len(in_axes) != len(args):
            raise OptionError(f"vmap: in_axes has {len(in_axes)} entries, the call {len(args)} arguments")
        frame = open_frame()
        axes = [*_axes("in_axes", in_axes, args), *(0 for _ in leaves_of(kwargs, ""))]
        graph = frame.graph
        rows: list[Value] = []
        values: dict[Value, Value] = {}
        size: Size | None = None
        leaves = [*leaves_of(args, "argument"), *leaves_of(kwargs, "argument")]
        for (path, leaf), axis in zip(leaves, axes, strict=True):
            value = value_of(frame, leaf, path)
            if axis is None:
                rows.append(value)
                continue
            if not -value.rank <= axis < value.rank:
                raise ShapeError(f"vmap: {path} is {value.type}: it has no axis {axis}; in_axes=None shares it")
            value = moved(value, axis % value.rank, 0)
            length = value.shape[0]
            size = length if size is None else unify(size, length, f"vmap: {path} in axis {axis} and those before it")
            row = Value(graph, _row(value), "input", "")
            values[row] = value
            rows.append(row)
        if size is None:
            raise OptionError("vmap: every argument is shared (in_axes None): there is no axis to go along")
        count = len(leaves_of(args, ""))
        start = len(graph.nodes)
        token = _NAMES.set((*_NAMES.get(), axis_name) if axis_name is not None else _NAMES.get())
        try:
            result = function(*fill(args, rows[:count]), **fill(kwargs, rows[count:]))
        finally:
            _NAMES.reset(token)
        outputs = [value_of(frame, leaf, path) for path, leaf in leaves_of(result, "result")]
        work = _Batched(size, values, axis_name)
        work.add(work.taken(start))
        places = _axes("out_axes", out_axes, result)
        return fill(result, [_placed(work, value, place) for value, place in zip(outputs, places, strict=True)])

    return transformed("vmap", function, call)


def _placed(work: _Batched, value: Value, place: int | None) -> Value:
    """A result for all slices, their axis at `place`; None: one that is the same for all, without that axis."""
    if place is None:
        if value in work.values:
            raise OptionError("vmap: out_axes is None for a result that differs between the slices")
        return work.whole(value)
    whole = work.result(value)
    if not -whole.rank <= place < whole.rank:
        raise ShapeError(
            f"vmap: out_axes={place}: the result has the axes 0 to {whole.rank - 1} with that of the slices"
        )
    return moved(whole, 0, place % whole.rank)
