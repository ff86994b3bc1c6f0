"""Derivatives of ops against finite differences, in f64: for the author of an op, as `oracle` is for its values.

check_derivatives(cases_of("softmax", 3, 4))            # forwards, backwards and differences agree

With cotangents c and tangents t of the operands x, three numbers are the same up to rounding:
<c, (f(x + h t) - f(x - h t)) / 2h>, <c, jvp(t)> and <vjp(c), t>.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from rlx.backends.reference import run_graph
from rlx.errors import RlxError
from rlx.ir.dtype import DTYPES
from rlx.ir.frames import Frame
from rlx.ir.graph import Array, Graph, Value
from rlx.ir.shape import evaluate
from rlx.ops.base import apply
from rlx.ops.gradients.attach import is_real
from rlx.ops.gradients.engine import replay
from rlx.testing.oracle import Batch, Case, Operand, values
from rlx.trace.jit import jit
from rlx.transform.functions import jvp, vjp

__all__ = ["check_derivatives", "differences", "differentiable", "in_f64", "pulled"]

STEPS = (1e-6, 1e-8)  # of differences; the second where a corner is near
SHALLOW = {"any": "normal", "ties": "normal", "whole": "normal"}  # values with no corner nearby
DOMAINS = dict.fromkeys(("log", "sqrt", "rsqrt", "pow", "acosh"), "positive")
DOMAINS |= dict.fromkeys(("asin", "acos", "atanh"), "unit")


def in_f64(case: Case) -> Case:
    """The case with its floats in f64, and values that have derivatives."""
    domain = DOMAINS.get(case.op.op_name)
    operands = tuple(
        replace(o, dtype="f64", values=domain or SHALLOW.get(o.values, o.values)) if DTYPES[o.dtype].is_float else o
        for o in case.operands
    )
    changed = {
        f.name: DTYPES["f64"]
        for f in fields(case.op)  # type: ignore[arg-type]
        if getattr(case.op, f.name) is DTYPES["f32"]
    }
    return replace(case, op=replace(case.op, **changed) if changed else case.op, operands=operands)  # type: ignore[type-var]


def differentiable(cases: Iterable[Case]) -> list[Case]:
    """The cases, each once in f64, that have floats of 32 or 64 bits on both sides."""
    chosen = []
    for case in cases:
        kinds = {o.dtype for o in case.operands if DTYPES[o.dtype].is_float}
        plain = all(o.encoding is None and o.data is None for o in case.operands)
        if not kinds or not kinds <= {"f32", "f64"} or not plain:
            continue
        made = in_f64(case)
        try:
            batch = Batch([made])
        except RlxError:
            continue
        if any(o.value.dtype.name == "f64" for o in batch.graph.outputs):
            chosen.append(made)
    return list(dict.fromkeys(chosen))


class _Checked:
    """The graph of one case: its results, tangents and cotangents."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.graph = Graph("derivative")
        leaves = [self.graph.input(f"x{i}", o.shape, o.dtype) for i, o in enumerate(case.operands)]
        self.smooth = [i for i, v in enumerate(leaves) if is_real(v)]
        given = [leaves[i] for i in self.smooth]

        def function(*chosen: Value) -> tuple[Value, ...]:
            inputs = list(leaves)
            for i, v in zip(self.smooth, chosen, strict=True):
                inputs[i] = v
            made = apply(case.op, *inputs)
            return tuple(v for v in (made if isinstance(made, tuple) else (made,)) if is_real(v))

        with Frame(self.graph, kept=True):
            outputs, pullback = vjp(function, *given)
            tangents = [self.graph.input(f"t{i}", v.shape, v.dtype) for i, v in zip(self.smooth, given, strict=True)]
            cotangents = [self.graph.input(f"c{k}", v.shape, v.dtype) for k, v in enumerate(outputs)]
            pulled = pullback(tuple(cotangents))
            _, pushed = jvp(function, tuple(given), tuple(tangents))
        self.count = len(outputs)
        for title, made in (("y", outputs), ("pulled", pulled), ("pushed", pushed)):
            for k, value in enumerate(made):
                self.graph.output(value, f"{title}{k}")

    def arrays(self, seed: int, extents: Mapping[str, int]) -> dict[str, Array]:
        rng = np.random.default_rng(seed)
        made: dict[str, Array] = {}
        for value in self.graph.inputs:
            shape = tuple(evaluate(s, extents) for s in value.shape)
            operand = self.case.operands[int(value.name[1:])] if value.name[0] == "x" else Operand(shape, "f64")
            array = values(rng, shape, operand, evaluate(operand.limit, extents))
            made[value.name] = 1 + array if self.case.op.op_name == "acosh" and value.name[0] == "x" else array
        return made

    def check(self, seed: int, extents: Mapping[str, int]) -> None:
        given = self.arrays(seed, extents)
        outputs = run_graph(self.graph, given)
        pushed = sum(_dot(given[f"c{k}"], outputs[f"pushed{k}"]) for k in range(self.count))
        pulled = sum(_dot(outputs[f"pulled{k}"], given[f"t{i}"]) for k, i in enumerate(self.smooth))
        assert abs(pushed - pulled) <= 1e-9 * (1 + abs(pushed)), f"{self.case}: jvp gives {pushed}, vjp {pulled}"
        slopes = [self._slope(given, step) for step in STEPS]
        close = any(abs(pushed - slope) <= 2e-5 * (1 + abs(slope)) for slope in slopes)
        assert close, f"{self.case}: differences give {slopes}, jvp {pushed}"

    def _slope(self, given: dict[str, Array], step: float) -> float:
        ends = []
        for sign in (1, -1):
            moved = {f"x{i}": given[f"x{i}"] + sign * step * given[f"t{i}"] for i in self.smooth}
            ends.append(run_graph(self.graph, given | moved))
        total = 0.0
        for k in range(self.count):
            high, low = ends[0][f"y{k}"], ends[1][f"y{k}"]
            slope = np.subtract(high, low, where=high != low, out=np.zeros_like(high)) / (2 * step)  # 0 of infinities
            total += _dot(given[f"c{k}"], slope)
        return total


def differences(f: Callable[..., Any], x: Array, step: float = 1e-6) -> Array:
    """The slope of a function of one array that gives a number, element by element."""
    run, out = jit(f, device="reference"), np.zeros_like(x)
    for i in np.ndindex(x.shape):
        moved = np.zeros_like(x)
        moved[i] = step
        out[i] = (run(x + moved) - run(x - moved)) / (2 * step)
    return out


def _dot(a: Array, b: Any) -> float:
    return float(np.sum(a * b))


def pulled(cases: Iterable[Case]) -> tuple[Graph, dict[str, Array]]:
    """One graph of the cotangents of all cases in f64, and arrays to run it on."""
    graph = Graph("pulled")
    given: dict[str, Array] = {}
    for number, case in enumerate(cases):
        checked = _Checked(case)
        replaced = {v: graph.input(f"c{number}.{v.name}", v.shape, v.dtype) for v in checked.graph.inputs}
        given |= {f"c{number}.{name}": array for name, array in checked.arrays(0, {}).items()}
        with Frame(graph, kept=True) as frame:
            replaced |= {v: frame.array(v.data) for v in checked.graph.constants}
            replay(checked.graph.nodes, replaced)
        for o in checked.graph.outputs:
            if o.name.startswith("pulled"):
                graph.output(replaced[o.value], f"c{number}.{o.name}")
    return graph, given


def check_derivatives(cases: Iterable[Case], extents: Iterable[Mapping[str, int]] = ({},)) -> int:
    """Compares all cases that have derivatives at each of the extents; AssertionError for one that differs.

    The number of comparisons. `UnsupportedOp` where the op has no rule.
    """
    count = 0
    for case in differentiable(cases):
        checked = _Checked(case)
        for seed, sizes in enumerate(extents):
            checked.check(seed, sizes)
            count += 1
    return count
