"""Layer and root-mean-square norms that an exporter wrote as means, differences and roots become one op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.shape import Size, broadcast, collect_guards, numel
from rlx.ops.activation import Relu
from rlx.ops.elementwise import Add, Clip, Div, Mul, Pow, Reciprocal, Rsqrt, Sqrt, Sub
from rlx.ops.layout import Expand, Reshape
from rlx.ops.normalize import LayerNorm, RmsNorm
from rlx.ops.reduction import ReduceMean, ReduceSum, ReduceSumSquare, axes_of, reduced_shape
from rlx.passes.patterns import either_way, made_by, uniform
from rlx.passes.rewrite import Site, rewrite

__all__ = ["raise_norm"]

Nodes = list[Node]


@dataclass
class _Mean:
    """The mean of x over its axes from `axis` on."""

    x: Value
    axis: int


def raise_norm(graph: Graph) -> Graph:
    """Raises normalisations, then takes the products and sums that follow in as scale and bias."""
    graph = rewrite(graph, _normalised)
    for op in (Mul, Add):
        graph = rewrite(graph, lambda site, op=op: _with_parameter(site) if isinstance(site.op, op) else None)  # type: ignore[misc]
    return graph


# ---- the normalisation itself


def _normalised(site: Site) -> Value | None:
    root = Node(site.op, site.inputs)
    for x, spread, nodes in _quotients(root):
        found = _norm_of(x, spread, nodes)
        if found is not None:
            op, source = found
            site.merged.extend(nodes)
            return site.add(op, source, site.scalar(1, source))
    return None


def _quotients(root: Node) -> Iterator[tuple[Value, Value, Nodes]]:
    """(x, s, nodes) for each way to read the node as x / sqrt(s)."""
    if isinstance(root.op, Div):
        node = _seen_through(root.inputs[1], nodes := [], Sqrt)
        if node is not None:
            yield root.inputs[0], node.inputs[0], nodes
    elif isinstance(root.op, Mul):
        for x, factor in either_way(root):
            node = _seen_through(factor, nodes := [], Rsqrt, Reciprocal)
            if node is not None and isinstance(node.op, Reciprocal):
                node = _seen_through(node.inputs[0], nodes, Sqrt)
            if node is not None:
                yield x, node.inputs[0], nodes


def _norm_of(x: Value, spread: Value, nodes: Nodes) -> tuple[Any, Value] | None:
    """The op and its input when `spread` is the variance (or mean square) of x plus a number."""
    node = _seen_through(spread, nodes, Add)
    if node is None:
        return None
    for variance, other in either_way(node):
        epsilon = uniform(other)
        if epsilon is None or not x.dtype.is_float:
            continue
        centred = _difference(x, nodes)
        if centred is not None and _is_variance(variance, x, centred, nodes):
            return LayerNorm(centred.axis, epsilon), centred.x
        square = _mean(variance, nodes, _square_of)
        if square is not None and square.x is x:
            return RmsNorm(square.axis, epsilon), x
    return None


def _difference(value: Value, nodes: Nodes) -> _Mean | None:
    """The mean and x where the value is x - mean(x)."""
    node = made_by(value, Sub)
    if node is None:
        return None
    mean = _mean(node.inputs[1], nodes)
    if mean is None or mean.x is not node.inputs[0]:
        return None
    nodes.append(node)
    return mean


def _is_variance(value: Value, difference: Value, centred: _Mean, nodes: Nodes) -> bool:
    """Whether the value is mean((x - mean)^2) or mean(x^2) - mean^2, perhaps limited to what is not negative."""
    limited = _seen_through(value, nodes, Relu, Clip)
    if limited is not None and (isinstance(limited.op, Relu) or limited.op == Clip(0.0)):
        value = limited.inputs[0]
    square = _mean(value, nodes, _square_of)
    if square is not None:
        other = None if square.x is difference else _difference(square.x, nodes)
        return square.axis == centred.axis and (square.x is difference or (other is not None and other.x is centred.x))
    node = _seen_through(value, nodes, Sub)
    if node is None:
        return False
    square = _mean(node.inputs[0], nodes, _square_of)
    base = _square_of(node.inputs[1], nodes)
    mean = None if base is None else _mean(base, nodes)
    return square == mean == centred


def _mean(value: Value, nodes: Nodes, of: Callable[[Value, Nodes], Value | None] | None = None) -> _Mean | None:
    """What the value is the mean of over trailing axes, kept with size 1; `of` looks further into what is averaged."""
    scale, mine, shape = 1.0, [], value.shape
    while (node := made_by(value, Expand, Reshape, Mul, Div, ReduceMean, ReduceSum, ReduceSumSquare)) is not None:
        mine.append(node)
        if isinstance(node.op, Mul | Div):
            number = uniform(node.inputs[1])
            if number is None or not number:
                return None
            scale = scale * number if isinstance(node.op, Mul) else scale / number
        elif isinstance(node.op, ReduceMean | ReduceSum | ReduceSumSquare):
            break
        if isinstance(node.op, Expand):
            shape = node.inputs[0].shape
        value = node.inputs[0]
    if node is None or isinstance(node.op, ReduceSumSquare) is not (of is _square_of and _is_sum_square(node)):
        return None
    op: Any = node.op
    x = node.inputs[0]
    axes = axes_of(op.axes, x.rank, op.op_name)
    count: Size = 1 if isinstance(op, ReduceMean) else numel([x.shape[d] for d in axes])
    trailing = bool(axes) and axes == tuple(range(axes[0], x.rank)) and shape == reduced_shape(x.shape, axes, True)
    if not trailing or not isinstance(count, int) or abs(scale * count - 1) > 1e-6:
        return None
    if of is not None and not _is_sum_square(node):
        inner = of(x, mine)
        if inner is None:
            return None
        x = inner
    nodes.extend(mine)
    return _Mean(x, axes[0])


def _is_sum_square(node: Node) -> bool:
    return isinstance(node.op, ReduceSumSquare)


def _square_of(value: Value, nodes: Nodes) -> Value | None:
    node = _seen_through(value, nodes, Mul, Pow)
    if node is None or (isinstance(node.op, Mul) and node.inputs[0] is not node.inputs[1]):
        return None
    return node.inputs[0] if isinstance(node.op, Mul) or uniform(node.inputs[1]) == 2 else None


def _seen_through(value: Value, nodes: Nodes, *ops: type[Any]) -> Node | None:
    """The node of one of these ops that makes the value, broadcasts and reshapes in between left aside."""
    mine = []
    while (node := made_by(value, Expand, Reshape)) is not None:
        mine.append(node)
        value = node.inputs[0]
    node = made_by(value, *ops)
    if node is not None:
        nodes.extend((*mine, node))
    return node


# ---- scale and bias


def _with_parameter(site: Site) -> Value | None:
    """norm(x) * p or norm(x) + p as one op, where p broadcasts to the axes that are normalised."""
    for value, parameter in either_way(Node(site.op, site.inputs)):
        node = made_by(value, LayerNorm, RmsNorm)
        if node is None or site.uses[value] > 1:
            continue
        op: Any = node.op
        x, scale, *bias = node.inputs
        is_scale = isinstance(site.op, Mul)
        if bias or (is_scale and uniform(scale) != 1) or (not is_scale and isinstance(op, RmsNorm)):
            continue
        p = _trailing(site, parameter, x, op.axis % x.rank)
        if p is not None:
            site.merged.append(node)
            return site.add(op, x, p) if is_scale else site.add(op, x, scale, p)
    return None


def _trailing(site: Site, p: Value, x: Value, axis: int) -> Value | None:
    """The parameter without the leading axes of size 1, if it then broadcasts to the axes of x from `axis` on."""
    own = x.rank - axis
    lead = max(0, p.rank - own)
    if p.dtype is not x.dtype or any(size != 1 for size in p.shape[:lead]):
        return None
    shape = p.shape[lead:]
    if any(size not in (1, full) for size, full in zip(reversed(shape), reversed(x.shape), strict=False)):
        return None
    return site.add(Reshape(shape), p) if lead else p
