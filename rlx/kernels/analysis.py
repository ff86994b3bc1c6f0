"""What fusion asks of expressions and nodes: what they cost, what they read, and whether `prepare` can make them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlx.ir.graph import Graph, Node, Value, count_readers
from rlx.ir.shape import Dim, numel, symbols, upper
from rlx.kernels.expr import Apply, Cast, Check, Expr, Load, Reduce, Select, loads, walk
from rlx.kernels.lowering import out_vars
from rlx.records import dataclass, field

__all__ = ["PRICES", "Fusing", "cost", "is_identity", "is_static", "size_of", "static_values", "uses"]

# what scalar functions take on vectors of a processor, in additions; all others take one
PRICES = {"exp": 10, "log": 10, "tanh": 12, "erf": 12, "sigmoid": 12, "sin": 14, "cos": 14, "pow": 24, "div": 4}
PRICES |= {"normal_cdf": 12, "sqrt": 4, "floordiv": 8, "mod": 8, "idiv": 8, "irem": 8, "fmod": 12}


@dataclass(frozen=True)
class Fusing:
    """By what a device wants values stored or computed again; the defaults suit vectors of a processor.

    `again`: the price, in additions, up to which an element is computed again at each use rather than stored.
    `largest`: distinct sub-expressions that the expression of a kernel may have. `growth`: bytes that `prepare` may
    make out of fewer. `prices`: those of scalar functions that take longer than an addition; `decode`: that of an
    element of an encoded value.
    """

    again: int = 6
    largest: int = 128
    growth: int = 64 * 1024
    prices: Mapping[str, int] = field(default_factory=lambda: PRICES)
    decode: int = 20


def cost(expr: Expr, fusing: Fusing) -> int:
    """The price of one element beyond loading it: 0 for pure layout and constants."""
    total = 0
    indices: set[Expr] = set()
    for x in walk(expr):
        if isinstance(x, Load):
            for i in (*x.indices, *((x.where,) if x.where is not None else ())):
                indices.update(walk(i))
    for x in walk(expr):
        if x in indices:
            continue
        match x:
            case Apply(fn=fn):
                total += fusing.prices.get(fn, 1)
            case Cast() | Select() | Check():
                total += 1
            case Load(source=source) if source.type.encoding is not None:
                total += fusing.decode
            case Reduce(extents=extents):
                total += min(upper(numel(extents)) or 1000, 1000)
    return total + sum(isinstance(x, Load | Check) for x in indices)


def size_of(expr: Expr) -> int:
    """The distinct sub-expressions of an expression."""
    return sum(1 for _ in walk(expr))


def is_identity(load: Load) -> bool:
    """Whether the element loaded is the one at the out vars (an axis of size 1 has only one)."""
    vars = out_vars(len(load.indices))
    return all(i == v or size == 1 for i, v, size in zip(load.indices, vars, load.source.shape, strict=True))


def uses(expr: Expr, source: Value) -> bool:
    """Whether the expression loads elements of the value."""
    return any(x.source is source for x in loads(expr))


def static_values(graph: Graph) -> set[Value]:
    """Values that depend on params and constants only and have static shapes: `prepare` can make them."""
    found = {*graph.params, *graph.constants}
    for node in graph.nodes:
        if is_static(node, found):
            found.update(node.outputs)
    return found - _overwritten(graph, found)


def _overwritten(graph: Graph, static: set[Value]) -> set[Value]:
    """Tensors made of no operand (zeros, a range) that their only reader writes its result into, outside of loops.

    A run makes them: that costs less than keeping them and copying them first.
    """
    made = {node.outputs[0] for node in graph.nodes if not node.inputs and len(node.outputs) == 1}
    readers, found = count_readers(graph), set[Value]()
    for node in graph.nodes:
        place = getattr(node.op, "overwrites", None)
        if place is not None and node.outputs[0] not in static:
            target = node.inputs[place]
            if target in made and readers[target] == 1:
                found.add(target)
    return found


def is_static(node: Node, known: Collection[Value]) -> bool:
    """Whether `prepare` can run the node, given the values that it can make."""
    fixed = all(not any(True for _ in symbols(s)) for v in node.outputs for s in v.shape)
    sized = any(not isinstance(a, int) and _symbolic(a) for a in vars(node.op).values())
    return not node.regions and fixed and not sized and all(v in known for v in node.inputs)


def _symbolic(attribute: object) -> bool:
    if isinstance(attribute, tuple):
        return any(_symbolic(a) for a in attribute)
    return isinstance(attribute, Dim)
