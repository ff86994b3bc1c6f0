"""Gradients of graphs: of those that were imported or built by hand."""

from __future__ import annotations

from collections.abc import Sequence

import rlx.ops.gradients  # noqa: F401 - the rules
from rlx.errors import DTypeError, NameNotFound, OptionError, ShapeError
from rlx.ir.frames import Frame
from rlx.ir.graph import Graph, Output, Value
from rlx.ops.base import apply
from rlx.ops.gradients.attach import is_real, zeros
from rlx.ops.gradients.engine import GROUPS, pull, replay
from rlx.ops.misc import Within
from rlx.options import parse_bytes
from rlx.passes.rewrite import copy_leaves, finish
from rlx.transform import attention, control, determinant, recurrent  # noqa: F401 - more rules

__all__ = ["grad_of_graph", "within"]


def within(budget: int | str | None, cotangents: Sequence[Value]) -> list[Value]:
    """Cotangents whose program is to have an arena of at most so many bytes; as they are where there is no budget."""
    if budget is None:
        return list(cotangents)
    allowed = parse_bytes(budget, "budget")
    return [apply(Within(allowed), ct) for ct in cotangents]


def grad_of_graph(
    graph: Graph,
    *,
    keep: bool,
    wrt: str | Sequence[str] | None = None,
    of: str | None = None,
    budget: int | str | None = None,
) -> Graph:
    """The graph with the gradients of a scalar output as outputs `grad_<name>`; `keep`: after those that it has."""
    y = _output(graph, of)
    names = _names(graph, wrt)
    new, values = copy_leaves(graph)
    leaves = [values[graph.find(name)] for name in names]
    with Frame(new, kept=True):
        replay(graph.nodes, values)
        finish(graph, new, values)
        seed = values[y]
        found = pull(list(new.nodes), {seed: zeros(seed) + 1}, leaves)
        made = within(budget, [zeros(v) if ct is None else ct for v, ct in zip(leaves, found, strict=True)])
    if not keep:
        new.outputs = []
    for name, value in zip(names, made, strict=True):
        title = f"grad_{name}"
        if any(o.name == title for o in new.outputs):
            raise OptionError(f"grad: graph {graph.name!r} already has an output {title!r}; rename it")
        new.outputs.append(Output(title, value))
    GROUPS.pop(new, None)
    return new


def _output(graph: Graph, of: str | None) -> Value:
    names = [o.name for o in graph.outputs]
    if of is None and len(names) != 1:
        raise OptionError(f"grad: graph {graph.name!r} has the outputs {', '.join(names)}: choose one by of=")
    found = next((o.value for o in graph.outputs if of in (None, o.name)), None)
    if found is None:
        raise NameNotFound(f"grad: graph {graph.name!r} has no output {of!r}; it has {', '.join(names)}")
    if not is_real(found):
        raise DTypeError(f"grad: the output {of or names[0]!r} is {found.type}, and only floats have derivatives")
    if any(size != 1 for size in found.shape):
        raise ShapeError(
            f"grad: the output {of or names[0]!r} is {found.type}: a gradient is that of one float; add a node that "
            "sums it and make that an output"
        )
    return found


def _names(graph: Graph, wrt: str | Sequence[str] | None) -> list[str]:
    if wrt is None:
        names = [v.name for v in graph.params if is_real(v) and v.type.encoding is None]
        if not names:
            raise OptionError(f"grad: graph {graph.name!r} has no params that are floats: name inputs by wrt=")
        return names
    if not isinstance(wrt, str | Sequence) or not all(isinstance(name, str) for name in wrt):
        raise OptionError(f"grad: wrt={wrt!r:.60}: expected names of inputs and params")
    names = [wrt] if isinstance(wrt, str) else list(wrt)
    for name in names:
        leaf = graph.find(name)
        if not is_real(leaf) or leaf.type.encoding is not None:
            raise DTypeError(
                f"grad: {leaf.kind} {name!r} is {leaf.type}: only plain floats have a gradient; cast or decode it in "
                "the graph and declare the float as the input"
            )
    return names
