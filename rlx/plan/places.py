"""Finds the buffer that holds a value of the graph as it was given, after passes and fusion have changed the graph."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.errors import NameNotFound, OptionError
from rlx.ir.graph import Graph, Value
from rlx.kernels.fuse import Fuser, Target
from rlx.kernels.program import Buffer

__all__ = ["Places"]


class Places:
    """The buffers of the values of a graph. Fuses the legal graph again, which gives buffers the same names."""

    def __init__(self, source: Graph, legal: Graph, target: Target) -> None:
        self.source, self.became = source, legal.became or {}
        fuser = Fuser(legal, target, True)
        self.program = fuser.run()
        self.buffers = fuser.buffers

    def find(self, value: Value | str) -> Buffer | None:
        """The buffer of a value, or of the output or value of that name; None if there is no such name.

        Raises `NameNotFound` for a value that has no memory; the message says why.
        """
        if isinstance(value, str):
            outputs = dict(self.program.outputs)
            if value in outputs:
                return outputs[value]
            named = [v for v in self.source.values() if v.name == value]
            if len(named) > 1:
                raise NameNotFound(f"{len(named)} values are named {value!r}: look up the one that is meant itself")
            return self.of(named[0]) if named else None
        if not isinstance(value, Value):
            raise OptionError(f"the plan has places of graph values and of names, got {value!r:.40}")
        return self.of(value)

    def of(self, value: Value) -> Buffer:
        """The buffer of a value."""
        new = self.became.get(value)
        if new is None:
            raise NameNotFound(self.why_missing(value))
        if new in self.buffers:
            return self.buffers[new]
        makers = [k.label for k in (*self.program.prepare, *self.program.run) if new.node in k.nodes]
        inside = f", inside of {', '.join(map(repr, dict.fromkeys(makers)))}" if makers else ""
        raise NameNotFound(f"{_shown(value)} has no memory: each element is computed where it is read{inside}")

    def why_missing(self, value: Value) -> str:
        """Why the legal graph has no such value."""
        if value.graph in _regions(self.source):
            return f"{_shown(value)} is inside of a branch or loop: plan.table() has the buffers of these by name"
        if value.graph is self.source or any(v.graph is value.graph for v in self.became):
            return f"{_shown(value)} has no memory: a pass replaced what it was a part of, see explain('passes')"
        return f"{_shown(value)} is no value of the graph that was compiled"


def _shown(value: Value) -> str:
    node = value.node
    if value.name or node is None:
        return f"value {value.name!r}"
    return f"the value of {node.label if node.provenance else node.op.op_name}"


def _regions(graph: Graph) -> Iterator[Graph]:
    for node in graph.nodes:
        for region in node.regions:
            yield region
            yield from _regions(region)
