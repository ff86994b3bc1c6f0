"""A graph on several devices: parts that each run whole on one of them, and the copies between the parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NoReturn

import numpy as np

from rlx.backends import backend_named
from rlx.backends.base import Executable, Turns
from rlx.compiler import Compilation, compile_graph
from rlx.cost.ceilings import Ceilings
from rlx.errors import OptionError, RlxError, ShapeError, UnsupportedOp
from rlx.estimate.admit import Admission
from rlx.ir.extents import bind_extents, check_out
from rlx.ir.graph import Array, Graph, Node, Value
from rlx.ir.shape import evaluate
from rlx.options import CompileOptions
from rlx.passes import run_passes
from rlx.passes.legalise import Dispatch, legalise
from rlx.records import dataclass, replace

__all__ = ["Part", "compile_split", "copy_seconds", "partition", "would_split"]


@dataclass(frozen=True)
class Part:
    """A maximal run of nodes on one device, as a graph; `takes` are the values that other parts made, by name."""

    device: str
    graph: Graph
    takes: tuple[str, ...]

    def copied_bytes(self, extents: Mapping[str, int]) -> int | None:
        """Bytes that come from other parts; None where data decide a size."""
        total = 0
        for value in self.graph.inputs:
            if value.name in self.takes:
                try:
                    total += value.dtype.nbytes(prod(evaluate(s, extents) for s in value.shape))
                except (KeyError, RlxError):
                    return None
        return total


def would_split(graph: Graph, devices: Sequence[str]) -> bool:
    """Whether each node runs on one of the devices at least, so that a split would run the graph."""
    try:
        partition(graph, devices)
    except RlxError:
        return False
    return True


def partition(graph: Graph, devices: Sequence[str]) -> list[Part]:
    """Cuts a graph into maximal runs of nodes, in order; of the devices that can run one, the first is taken.

    Raises `UnsupportedOp` where no device can run a node, and for states whose shape is not fixed. States are kept on
    the host: a part takes those that it reads as inputs, and gives new values as outputs.
    """
    for state in graph.states:
        if any(not isinstance(s, int) for s in state.shape):
            raise UnsupportedOp(f"state {state.name!r} has dims: {graph.name!r} can't be split over devices")
    graph = run_passes(graph)
    runs: list[tuple[list[str], list[Node]]] = []
    for node in graph.nodes:
        able = [name for name in devices if _supports(name, node)]
        if not able:
            raise UnsupportedOp(f"no device can run {node.op.op_name} {node.label!r}: it can't be split")
        both = [name for name in runs[-1][0] if name in able] if runs else []
        if both:
            runs[-1] = (both, [*runs[-1][1], node])
        else:
            runs.append((able, [node]))
    return _parts(graph, [(able[0], nodes) for able, nodes in runs])


def _supports(device: str, node: Node) -> bool:
    backend = backend_named(device)
    alone = Graph("node")
    inputs = [
        alone.constant(v.data) if v.kind == "const" else alone.input(f"x{i}", v.shape, v.dtype)
        for i, v in enumerate(node.inputs)
    ]
    for value in alone.add(node.op, *inputs, regions=node.regions):
        alone.output(value)
    try:
        legal, _ = legalise(alone, backend.claims)
        backend.check(legal)
    except UnsupportedOp:
        return False
    return True


def _parts(graph: Graph, runs: Sequence[tuple[str, list[Node]]]) -> list[Part]:
    """A graph for each run of nodes; values that cross are outputs of one and inputs of others."""
    made_in = {v: i for i, (_, nodes) in enumerate(runs) for node in nodes for v in node.outputs}
    users: dict[Value, set[int]] = {}
    for i, (_, nodes) in enumerate(runs):
        for node in nodes:
            for v in node.inputs:
                users.setdefault(v, set()).add(i)
    names = {v: f"value {number}" for number, v in enumerate(made_in)}
    shown = {o.value for o in graph.outputs} | set(graph.updates.values())
    parts = []
    for i, (device, nodes) in enumerate(runs):
        part = Graph(f"{graph.name}.{i}")
        known: dict[Value, Value] = {}
        takes: list[str] = []
        for v in dict.fromkeys(v for node in nodes for v in node.inputs):
            if made_in.get(v, -1) == i:
                continue
            if v in made_in:
                known[v] = part.input(names[v], v.shape, v.dtype)
                takes.append(names[v])
            else:
                known[v] = _leaf(part, v)
        for node in nodes:
            made = part.add(node.op, *(known[v] for v in node.inputs), provenance=node.provenance, regions=node.regions)
            known.update(zip(node.outputs, made, strict=True))
        for v, where in made_in.items():
            if where == i and (v in shown or users.get(v, set()) - {i}):
                part.output(known[v], names[v])
        parts.append(Part(device, part, tuple(takes)))
    return parts


def _leaf(part: Graph, v: Value) -> Value:
    if v.kind in ("input", "state"):
        return part.input(v.name, v.shape, v.dtype)
    if v.kind == "const":
        return part.constant(v.data, name=v.name)
    copy = Value(part, v.type, "param", v.name)
    copy.data = v.data
    part.params.append(copy)
    return copy


def copy_seconds(parts: Sequence[Part], extents: Mapping[str, int], ceilings: Mapping[str, Ceilings]) -> float:
    """Seconds of the copies between parts, through the host; those whose size data decide are left out."""
    total = 0.0
    for part in parts:
        moved, c = part.copied_bytes(extents) or 0, ceilings[part.device]
        total += 2 * moved / c.bytes_rate(2 * moved) if c.unified else 2 * moved / c.transfer
    return total


def compile_split(graph: Graph, parts: Sequence[Part], options: CompileOptions) -> Compilation:
    """Compiles each part on its device, if its memory is there; a `budget=` is for all of them together.

    Raises `MemoryDeficit`, naming the part.
    """
    made, left = [], options
    for part in parts:
        backend = backend_named(part.device)
        admission = Admission(backend, left)
        made.append(compile_graph(part.graph, backend, left, admission))
        if left.budget_bytes is not None:  # the parts before are there to stay
            left = replace(left, budget=max(0, left.budget_bytes - admission.taken))
    dispatch = [
        Dispatch(d.node, d.op, d.how, f"on {p.device}" + (f": {d.why}" if d.why else ""))
        for p, c in zip(parts, made, strict=True)
        for d in c.dispatch
    ]
    executable = SplitExecutable(graph, parts, [c.executable for c in made])
    return Compilation(graph, graph, graph, dispatch, None, executable)


class SplitExecutable(Executable[Array]):
    """Runs the parts one after the other; what crosses goes through the host."""

    capabilities = frozenset({"out", "dynamic"})

    def __init__(self, graph: Graph, parts: Sequence[Part], executables: Sequence[Executable[Any]]) -> None:
        self.graph = graph
        self.parts = parts
        self.executables = executables
        self.last: list[Array] | None = None
        self.turns = Turns()
        optimised = run_passes(graph)
        made = [v for node in optimised.nodes for v in node.outputs]
        names = {v: f"value {number}" for number, v in enumerate(made)}
        self.shown = [names.get(o.value, o.value.name) for o in optimised.outputs]
        self.updates = {name: names.get(v, v.name) for name, v in optimised.updates.items()}
        self.states: dict[str, Array] = {}
        for s in optimised.states:
            fresh = np.zeros([evaluate(n, {}) for n in s.shape], s.dtype.numpy)
            self.states[s.name] = fresh if s.data is None else np.array(s.data)
        self.held = {v.name: v.data for v in (*optimised.params, *optimised.constants) if v.data is not None}
        for executable in executables:
            executable.admit = list
            executable.wrap = tuple

    def set_params(self, arrays: Mapping[str, Array]) -> None:
        with self.turns.taken(self.waits):
            self.held.update({name: np.array(a) for name, a in arrays.items()})
            for part, executable in zip(self.parts, self.executables, strict=True):
                own = {p.name: arrays[p.name] for p in part.graph.params if p.name in arrays}
                if own:
                    executable.set_params(own)

    @property
    def results(self) -> Sequence[Array] | None:
        return self.last

    def run(self, inputs: Sequence[Array], out: Sequence[Array | None], wanted: Sequence[int]) -> list[Array]:
        with self.turns.taken(self.waits):
            values: dict[str, Array] = dict(self.states)
            values |= {v.name: a for v, a in zip(self.graph.inputs, inputs, strict=True)}
            shapes = {v.name: values[v.name].shape for v in self.graph.inputs}
            check_out(self.graph, bind_extents(self.graph, shapes), out)
            for part, executable in zip(self.parts, self.executables, strict=True):
                count = len(part.graph.outputs)
                made = executable.run([values[v.name] for v in part.graph.inputs], [None] * count, range(count))
                values.update({o.name: np.asarray(a) for o, a in zip(part.graph.outputs, made, strict=True)})
            every = {**self.held, **values}
            last = [np.array(every[name]) for name in self.shown]
            self.states |= {name: np.array(every[new]) for name, new in self.updates.items()}
        for output, target, array in zip(self.graph.outputs, out, last, strict=True):
            if target is not None and target.shape != array.shape:
                raise ShapeError(f"out for {output.name!r}: this run needs shape {array.shape}, got {target.shape}")
        for i, target in enumerate(out):
            if target is not None:
                target[...] = last[i]
        self.last = last
        return [last[i].copy() if (t := out[i]) is None else t for i in wanted]

    @property
    def slots(self) -> Callable[..., Any]:
        def refuse(*arrays: Any) -> NoReturn:
            raise OptionError("a graph on several devices doesn't offer run_views and run_slots: use run")

        return refuse
