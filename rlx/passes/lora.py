"""LoRA: low-rank additions to chosen weights: params that are set, and scales in a state, without compiling anew.

The rewrite is asked for and adds a term. Where no adapter is on, or none for a row, the term is a sum of products of
zeros with B, which is 0 for every finite B (`adapters.put` takes no other), so the result is the plain product's.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping

import numpy as np

from rlx import ops
from rlx.boundary import bounded
from rlx.errors import CompileError, NameNotFound, OptionError, ShapeError
from rlx.ir.adapters import A_SUFFIX, ALL_ADAPTERS, B_SUFFIX, GAIN
from rlx.ir.graph import Graph, Value
from rlx.ir.shape import Dim, Size, same
from rlx.ops.contract import Gemm, MatMul
from rlx.ops.elementwise import Cast
from rlx.ops.layout import Transpose
from rlx.passes.rewrite import Site, rewrite
from rlx.records import dataclass, field
from rlx.units import with_ints

__all__ = ["lora"]


@bounded("lora", CompileError)
def lora(
    graph: Graph,
    *,
    rank: int,
    slots: int = 1,
    targets: str | Collection[str] = "*",
    rows: str | Mapping[str, str] | None = None,
    index: str = "adapter",
) -> Graph:
    """The graph with room for `slots` adapters of up to `rank` at each matrix product with a param that `targets` name.

    A product y = x @ w becomes y + sum over adapters of scale * (x @ A.T) @ B.T, for A [rank, inputs] and
    B [outputs, rank], both zero at first; `model.adapters` and `model.set_adapter` of the compiled graph fill them and
    set the scales. `targets` are names of params or patterns with `*`: of those that a pattern matches, the ones that
    such products read. With `rows`, the name of an input, each entry of its first axis has an adapter of its own: the
    graph gets an input `index`, i32 [that axis], of slot numbers (-1: none, -2: all). Where products have different
    first axes, `rows` is a mapping: names of inputs with such axes, and what the input of slot numbers of each is
    called. Raises `NameNotFound` for a target that there is no such product for, `OptionError` and `ShapeError`.
    """
    rank, slots = with_ints((rank, slots))
    for what, number in (("rank", rank), ("slots", slots)):
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number < 2**20:
            raise OptionError(f"lora: {what}={number!r}: expected an int from 1 to 2**20 - 1")
    if not isinstance(graph, Graph):
        raise OptionError(f"lora takes a Graph, got {type(graph).__name__}")
    if any(state.name == GAIN for state in graph.states):
        raise OptionError(f"lora: graph {graph.name!r} has adapters already; make room for all of them at once")
    patterns = [targets] if isinstance(targets, str) else list(targets) if isinstance(targets, Collection) else []
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise OptionError(f"lora: targets={targets!r}: expected names of params or patterns")
    chosen = {} if rows is None else dict(rows) if isinstance(rows, Mapping) else {rows: index}
    for own, name in chosen.items():
        if not isinstance(own, str) or not isinstance(name, str):
            raise OptionError(f"lora: rows={rows!r}, index={index!r}: expected names of inputs")
    made = _Lora(graph, rank, slots, patterns, chosen)
    new = rewrite(graph, made.rule)
    for pattern in patterns:
        if not fnmatch.filter(made.done, pattern):
            known = ", ".join(map(repr, dict.fromkeys(made.seen))) or "none"
            raise NameNotFound(f"lora: no matrix product with a param {pattern!r}; there are those with {known}")
    return new


@dataclass
class _Lora:
    graph: Graph
    rank: int
    slots: int
    patterns: list[str]
    rows: Mapping[str, str]  # inputs with the axes of rows: what the input of slot numbers is called
    done: list[str] = field(default_factory=list)  # params that have adapters
    seen: list[str] = field(default_factory=list)  # params that could have
    leaves: dict[str, tuple[Value, Value]] = field(default_factory=dict)
    selection: tuple[Value, Value] | None = None

    def rule(self, site: Site) -> Value | None:
        op = site.op
        if type(op) not in (MatMul, Gemm) or (isinstance(op, Gemm) and op.trans_a):
            return None
        x, weight = site.inputs[:2]
        param = _param_of(weight)
        if param is None or weight.rank != 2 or x.rank < 2 or not x.dtype.is_float:
            return None
        self.seen.append(param.name)
        if not any(fnmatch.fnmatchcase(param.name, pattern) for pattern in self.patterns):
            return None
        shape = weight.shape[::-1] if isinstance(op, Gemm) and op.trans_b else weight.shape
        a, b = self.pair(site, param, shape, x)
        gain, active = self.select(site, x)
        hidden = ops.matmul(x, a)
        # Not a product with 0: what one adapter makes of a row, be it infinite, is nothing to a row without it.
        kept = ops.where(active, hidden * _like(gain, x), site.scalar(0, x))
        delta = ops.matmul(kept, b)
        if isinstance(op, Gemm) and op.alpha != 1:
            delta = delta * site.scalar(op.alpha, x)
        (plain,) = site.graph.add(op, *site.inputs)
        total: Value = plain + delta
        if total.type != site.node.outputs[0].type:
            raise ShapeError(f"lora: {site.node.label}: {total.type} is not {site.node.outputs[0].type}")
        self.done.append(param.name)
        return total

    def pair(self, site: Site, param: Value, shape: tuple[Size, ...], x: Value) -> tuple[Value, Value]:
        """The params A and B of a param: zeros, which take no memory until they are set."""
        if any(isinstance(size, Dim) for size in shape):
            raise ShapeError(f"lora: param {param.name!r} has an open shape ({', '.join(map(str, shape))})")
        if param.name not in self.leaves:
            width = self.slots * self.rank
            sizes = {A_SUFFIX: (shape[0], width), B_SUFFIX: (width, shape[1])}
            zero = np.zeros((), x.dtype.numpy)
            a, b = (
                site.graph.param(param.name + suffix, data=np.broadcast_to(zero, [int(n) for n in size]))
                for suffix, size in sizes.items()
            )
            self.leaves[param.name] = a, b
        return self.leaves[param.name]

    def select(self, site: Site, x: Value) -> tuple[Value, Value]:
        """The gain of each column [slots * rank], and where it counts: the same, or by row with x's axes."""
        graph, width = site.graph, self.slots * self.rank
        if self.selection is None:
            gain = ops.reshape(graph.state(GAIN, (self.slots, self.rank)), (width,))
            self.selection = gain, ops.not_equal(gain, graph.constant(0.0))
        gain, on = self.selection
        if not self.rows:
            return gain, on
        own = graph.constant(np.repeat(np.arange(self.slots, dtype=np.int32), self.rank))
        slots = self.index_of(site, x)
        each = ops.reshape(slots, (slots.shape[0], *[1] * (x.rank - 1)))
        every = ops.equal(each, graph.constant(np.int32(ALL_ADAPTERS)))
        return gain, ops.and_(ops.or_(ops.equal(each, own), every), on)

    def index_of(self, site: Site, x: Value) -> Value:
        """The input of slot numbers for the rows of x."""
        graph = site.graph
        given = {v.name: v for v in graph.inputs}
        sources = {name: given.get(name) for name in self.rows}
        for name, source in sources.items():
            if source is None or source.rank < 1:
                names = ", ".join(map(repr, given))
                raise NameNotFound(f"lora: rows={name!r}: expected an input with a first axis; there are {names}")
            if same(x.shape[0], source.shape[0]) is not True:
                continue
            index = self.rows[name]
            if any(v.name == index for v in self.graph.inputs):
                raise OptionError(f"lora: the graph has an input {index!r} already; give index= another name")
            return given[index] if index in given else graph.input(index, source.shape[:1], "i32")
        axes = ", ".join(f"[{v.shape[0]}] of {name!r}" for name, v in sources.items() if v is not None)
        raise ShapeError(
            f"lora: {site.node.label} multiplies {x.type}, whose first axis is not the {axes}: leave it out of targets"
        )


def _param_of(weight: Value) -> Value | None:
    """The param that a weight is, or the transpose or another type of."""
    while weight.node is not None and isinstance(weight.node.op, Transpose | Cast):
        weight = weight.node.inputs[0]
    return weight if weight.kind == "param" else None


def _like(value: Value, other: Value) -> Value:
    return value if value.dtype is other.dtype else ops.cast(value, other.dtype)
