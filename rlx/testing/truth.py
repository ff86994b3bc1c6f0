"""A model evaluated in float64, beside which the results of runtimes can be judged.

truth = in_f64(graph)                                   # the same graph, every float of 16 or 32 bits one of 64
found = errors_of(run_f64(truth, {"x": x}), {"rlx": ..., "onnxruntime": ...})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import numpy as np

from rlx.backends.reference import run_graph
from rlx.errors import DTypeError, RlxError
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Array, Graph, Node, TensorType, Value
from rlx.ir.shape import evaluate
from rlx.ops import random
from rlx.ops.base import Op
from rlx.ops.elementwise import Cast
from rlx.ops.misc import BitCast
from rlx.passes.rewrite import copy_leaves, finish
from rlx.records import dataclass, field, replace

__all__ = ["ErrorOf", "Truth", "errors_of", "in_f64", "run_f64"]

F64 = DTYPES["f64"]
NARROW = frozenset(DTYPES[name] for name in ("f32", "f16", "bf16"))


@dataclass(eq=False)
class Truth:
    """The graph in float64, and the nodes that could not be retyped: these compute as in the file."""

    graph: Graph
    kept: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ErrorOf:
    """How far an output of a runtime is from the one in float64.

    `largest` is the largest |difference|, `relative` the norm of the differences over that of the true elements, and
    `correlation` Pearson's, nan where all elements are equal.
    """

    output: str
    runtime: str
    largest: float
    relative: float
    correlation: float

    def __str__(self) -> str:
        return (
            f"{self.output} {self.runtime}: largest error {self.largest:.3g}, relative {self.relative:.3g}, "
            f"correlation {self.correlation:.9f}"
        )


def in_f64(graph: Graph) -> Truth:
    """The graph with floats of 64 bits for those of 32 and 16, in every leaf, attribute and region.

    Casts among these do nothing then; integers, and what is rounded to them or to 8-bit floats, stay as the file has
    them. Random numbers and views of bits are made in their own type.
    """
    truth = Truth(graph)
    truth.graph = _widened(graph, truth.kept)
    return truth


def _wide(type: TensorType) -> TensorType:
    return TensorType(type.shape, F64) if type.dtype in NARROW else type


def _widened(graph: Graph, kept: list[str]) -> Graph:
    new, values = copy_leaves(graph, _wide)
    for old, made in values.items():
        if made.data is None or old.dtype not in NARROW:
            continue
        if old.type.encoding is not None:
            shape = tuple(evaluate(size, {}) for size in old.shape)
            made.data = old.type.encoding.decode(made.data, shape)
        made.data = np.asarray(made.data).astype(np.float64)
    for node in graph.nodes:
        outputs = _placed(new, node, [values[v] for v in node.inputs], kept)
        for old, made in zip(node.outputs, outputs, strict=True):
            made.name = made.name or old.name
            values[old] = made
    return finish(graph, new, values)


def _placed(new: Graph, node: Node, inputs: list[Value], kept: list[str]) -> list[Value]:
    """The node in float64 or, where its op refuses that, as it is between casts."""
    op = node.op
    assert isinstance(op, Op)
    outputs: tuple[Value, ...] | None = None
    regions = tuple(_widened(region, kept) for region in node.regions)
    if not isinstance(op, BitCast) and type(op).__module__ != random.__name__:
        marks = len(new.nodes), len(new.guards)
        changed = {n: F64 for n, a in op.attributes().items() if isinstance(a, DType) and a in NARROW}
        try:
            wide: Any = replace(op, **changed) if changed else op  # type: ignore[type-var]
            outputs = new.add(wide, *inputs, provenance=node.provenance, regions=regions)
        except DTypeError:
            del new.nodes[marks[0] :], new.guards[marks[1] :]
    if outputs is None:
        kept.append(node.label)
        narrow = [_cast(new, v, old.dtype, node) for v, old in zip(inputs, node.inputs, strict=True)]
        outputs = new.add(op, *narrow, provenance=node.provenance, regions=node.regions)
    return [_cast(new, v, _wide(old.type).dtype, node) for v, old in zip(outputs, node.outputs, strict=True)]


def _cast(graph: Graph, value: Value, to: DType, node: Node) -> Value:
    return value if value.dtype is to else graph.add(Cast(to), value, provenance=node.provenance)[0]


def run_f64(
    truth: Truth, inputs: Mapping[str, Array], done: Callable[[int], None] = lambda n: None
) -> dict[str, Array]:
    """The outputs of such a graph, by the reference; `done` is told how many nodes have run."""
    number = count(1)
    names = {v.name: v.dtype.numpy for v in truth.graph.inputs}
    given = {n: np.asarray(a).astype(np.float64) if names[n] == np.float64 else a for n, a in inputs.items()}
    return run_graph(truth.graph, given, trace=lambda node, results: done(next(number)))


def errors_of(truth: Mapping[str, Array], found: Mapping[str, Mapping[str, Any]]) -> list[ErrorOf]:
    """The errors of each output of floats, for each runtime by its name; outputs that one has not are left out."""
    errors = []
    for output, exact in truth.items():
        if exact.dtype != np.float64:
            continue
        for runtime, outputs in found.items():
            if output in outputs:
                errors.append(_error(output, runtime, np.asarray(outputs[output]), exact))
    return errors


def _error(output: str, runtime: str, got: Array, exact: Array) -> ErrorOf:
    if got.shape != exact.shape:
        raise RlxError(f"output {output!r} of {runtime} has shape {got.shape}, in float64 it has {exact.shape}")
    a, b = got.astype(np.float64).reshape(-1), exact.reshape(-1)
    with np.errstate(all="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))  # infinities too
        difference = np.where(same, 0.0, a - b)
        norm = float(np.linalg.norm(b))
        off = float(np.linalg.norm(difference))
        x, y = a - a.mean() if a.size else a, b - b.mean() if b.size else b
        scale = float(np.linalg.norm(x) * np.linalg.norm(y))
        correlation = float(x @ y) / scale if scale else float("nan")
    largest = float(np.abs(difference).max(initial=0.0))
    return ErrorOf(output, runtime, largest, off / norm if norm else off, correlation)
