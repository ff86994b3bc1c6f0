"""`rlx.vmap`: a function over rows made one over arrays, by the rules of the ops that it adds to the graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from rlx.boundary import bounded
from rlx.errors import CompileError, OptionError, ShapeError
from rlx.ir.graph import Node, TensorType, Value
from rlx.ir.shape import Size, unify
from rlx.ops.gradients.attach import reshaped, spread, summed_to
from rlx.ops.gradients.batching import moved
from rlx.ops.gradients.engine import GROUPS, Group, open_frame, taken_out, units
from rlx.trace.control import scan, value_of
from rlx.trace.tree import fill, leaves_of, ordered
from rlx.transform.functions import transformed

__all__ = ["vmap"]

_LOG = logging.getLogger("rlx")


class _Batched:
    """The nodes of a function over rows, applied to arrays: `values` has the arrays that rows stand for."""

    def __init__(self, size: Size, values: dict[Value, Value]) -> None:
        self.size = size
        self.values = values

    def add(self, nodes: Sequence[Node]) -> None:
        for unit in units(nodes):
            start = len(open_frame().graph.nodes)
            for node in unit.nodes if isinstance(unit, Group) else [unit]:
                self._node(node)
            if isinstance(unit, Group):
                self._group(unit, start)

    def _node(self, node: Node) -> None:
        batched = [v in self.values for v in node.inputs]
        if not any(batched):  # of a group, for the part of it that no row reaches
            made = open_frame().graph.add(node.op, *node.inputs, regions=node.regions)
            self.values.update((v, self.full(new)) for v, new in zip(node.outputs, made, strict=True))
            return
        outputs = self._applied(node, [self.values.get(v, v) for v in node.inputs], batched)
        self.values.update(zip(node.outputs, outputs, strict=True))

    def _applied(self, node: Node, inputs: list[Value], batched: list[bool]) -> Sequence[Value]:
        op: Any = node.op
        if op.batch is not None:
            made = op.batch(inputs, batched)
            if made is not NotImplemented:
                return made if isinstance(made, tuple) else (made,)
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
        inner = _Batched(self.size, dict(roots))
        inner.add(taken_out(graph, start, roots))
        return [inner.result(v) for v in (made if isinstance(made, tuple) else (made,))]

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
        nodes = graph.nodes[start:]
        if not nodes:
            return
        inputs = tuple(self.values.get(v, v) for v in group.inputs)
        outputs = tuple(self.values[v] for v in group.outputs)
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
                inner = _Batched(self.size, known)
                inner.add(taken_out(inner_graph, first, list(known)))
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
        return self.values[value] if value in self.values else self.full(value)


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
    if axes is None or isinstance(axes, int):
        return [axes for _ in leaves_of(tree, "")]
    if isinstance(axes, dict) and isinstance(tree, dict) and set(axes) == set(tree):
        return [axis for key in ordered(tree) for axis in _axes(what, axes[key], tree[key])]
    if isinstance(axes, tuple | list) and isinstance(tree, tuple | list) and len(axes) == len(tree):
        return [axis for a, t in zip(axes, tree, strict=True) for axis in _axes(what, a, t)]
    raise OptionError(
        f"vmap: {what} {axes!r} does not fit: one axis or None for all, or a tree of them like the arguments"
    )


@bounded("vmap", CompileError)
def vmap(function: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., Any]:
    """The function applied to each slice of its arguments along an axis, all at once. (jax.vmap)

    `in_axes` says for each argument (or for all) along which axis: an int, None for what all slices share, or a tree of
    these; keyword arguments go along their first axis. `out_axes` is where the axis is in each result. What a function
    adds to the graph is replaced by ops on whole arrays; an op without a rule runs as a loop over the slices, and a
    warning says so. `ShapeError` for arguments whose axes differ in size.
    """

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
        result = function(*fill(args, rows[:count]), **fill(kwargs, rows[count:]))
        outputs = [value_of(frame, leaf, path) for path, leaf in leaves_of(result, "result")]
        work = _Batched(size, values)
        work.add(taken_out(graph, start, list(values)))
        places = _axes("out_axes", out_axes, result)
        made = []
        for value, place in zip(outputs, places, strict=True):
            if place is None and value in work.values:
                raise OptionError("vmap: out_axes is None for a result that differs between the slices")
            whole = value if place is None else work.result(value)
            made.append(whole if place is None else moved(whole, 0, place % whole.rank))
        return fill(result, made)

    return transformed("vmap", function, call)
