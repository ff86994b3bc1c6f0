"""Layer and root-mean-square norms that an exporter wrote as means, differences and roots become one op.

Proved by structure: the nodes are the formula of the op over the same elements, epsilon under the root; a sum is a mean
only where its factor is 1/n as the element type has it. What changes is rounding: mean(x^2) - mean(x)^2 is computed as
mean((x - mean)^2), and x f - mean f as (x - mean) f, which lose less and overflow later. Files of f16 keep their nodes,
since their squares overflow where those of the op, which computes in f32, don't.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlx.ir.casting import held
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.shape import Shape, numel
from rlx.ops.activation import Relu
from rlx.ops.elementwise import Add, Clip, Div, Mul, Pow, Reciprocal, Rsqrt, Sqrt, Sub
from rlx.ops.layout import Expand, Reshape
from rlx.ops.normalize import LayerNorm, RmsNorm
from rlx.ops.reduction import ReduceMean, ReduceSum, ReduceSumSquare, axes_of
from rlx.passes.match.patterns import either_way, made_by, uniform
from rlx.passes.rewrite import Site, rewrite
from rlx.records import dataclass

__all__ = ["raise_norm"]

RAISED = ("f64", "f32", "bf16")
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
    for quotient in _quotients(root):
        found = _norm_of(quotient)
        if found is not None and quotient.factor.shape == _kept(found[1]):
            return _made(site, quotient, *found)
    return _written_out(site, root) if isinstance(root.op, Add) else None


@dataclass
class _Quotient:
    """x * scale / sqrt(spread), written as x / factor or x * factor (* scale)."""

    x: Value
    factor: Value
    spread: Value
    nodes: Nodes
    scale: Value | None = None


def _made(site: Site, q: _Quotient, op: LayerNorm | RmsNorm, mean: _Mean, bias: Value | None = None) -> Value | None:
    x = mean.x
    scale = site.scalar(1, x) if q.scale is None else _trailing(site, q.scale, x, mean.axis)
    offset = None if bias is None else _trailing(site, bias, x, mean.axis)
    if scale is None or (offset is None) is not (bias is None):
        return None
    site.merged.extend(q.nodes)
    return site.add(op, x, scale, *(() if offset is None else (offset,)))


def _quotients(root: Node) -> Iterator[_Quotient]:
    """The ways to read the node as a quotient by a root."""
    if isinstance(root.op, Div):
        nodes: Nodes = []
        factor = _unexpanded(root.inputs[1], nodes)
        node = _reshaped(factor, nodes, Sqrt)
        if node is not None:
            yield _Quotient(root.inputs[0], factor, node.inputs[0], nodes)
    elif isinstance(root.op, Mul):
        for x, other in either_way(root):
            yield from _scaled_inverse_roots(x, other)


def _scaled_inverse_roots(x: Value, other: Value) -> Iterator[_Quotient]:
    """The ways to read `other` as 1 / sqrt(s), or as a scale times that."""
    product = made_by(other, Mul)
    if product is not None:
        for inverse, scale in either_way(product):
            for found in _inverse_root(x, inverse):
                yield _Quotient(x, found.factor, found.spread, [product, *found.nodes], scale)
    yield from _inverse_root(x, other)


def _inverse_root(x: Value, other: Value) -> Iterator[_Quotient]:
    nodes: Nodes = []
    factor = _unexpanded(other, nodes)
    node = _reshaped(factor, nodes, Rsqrt, Reciprocal)
    if node is not None and isinstance(node.op, Reciprocal):
        node = _reshaped(node.inputs[0], nodes, Sqrt)
    if node is not None:
        yield _Quotient(x, factor, node.inputs[0], nodes)


def _written_out(site: Site, root: Node) -> Value | None:
    """x * f + (bias - mean * f), f = scale / sqrt(variance): the way of tf.nn.batch_normalization."""
    if site.node.outputs[0].dtype.name not in RAISED:
        return None
    for value, offset in either_way(root):
        product, difference = made_by(value, Mul), made_by(offset, Sub)
        shift = made_by(difference.inputs[1], Mul) if difference else None
        if product is None or difference is None or shift is None:
            continue
        for x, f in either_way(product):
            for average, again in either_way(shift):
                subtracted = _unexpanded(average, nodes := [product, difference, shift])
                mean = _mean(subtracted, nodes) if again is f else None
                if mean is None or mean.x is not x or subtracted.shape != _kept(mean):
                    continue
                for q in _scaled_inverse_roots(x, f):
                    q.nodes.extend(nodes)
                    spread = _plus_number(q.spread, q.nodes)
                    if spread is None or q.factor.shape != _kept(mean):
                        continue
                    variance, epsilon = spread
                    if _is_variance(variance, None, mean, q.nodes):
                        return _made(site, q, LayerNorm(mean.axis, epsilon), mean, difference.inputs[0])
    return None


def _norm_of(q: _Quotient) -> tuple[LayerNorm | RmsNorm, _Mean] | None:
    """The op and what it normalises when the spread is the variance (or mean square) of x plus a number."""
    spread = _plus_number(q.spread, q.nodes)
    if spread is None or q.x.dtype.name not in RAISED:
        return None
    variance, epsilon = spread
    centred = _difference(q.x, q.nodes)
    if centred is not None and _is_variance(variance, q.x, centred, q.nodes):
        return LayerNorm(centred.axis, epsilon), centred
    square = _mean_square(variance, q.nodes)
    return None if square is None or square.x is not q.x else (RmsNorm(square.axis, epsilon), square)


def _plus_number(value: Value, nodes: Nodes) -> tuple[Value, float] | None:
    node = _reshaped(value, nodes, Add)
    for inner, other in () if node is None else either_way(node):
        number = uniform(other)
        if number is not None and uniform(inner) is None:
            return inner, number
    return None


def _difference(value: Value, nodes: Nodes) -> _Mean | None:
    """The mean where the value is x - mean(x)."""
    node = made_by(value, Sub)
    if node is None:
        return None
    subtracted = _unexpanded(node.inputs[1], mine := [node])
    mean = _mean(subtracted, mine)
    if mean is None or mean.x is not node.inputs[0] or subtracted.shape != _kept(mean):
        return None
    nodes.extend(mine)
    return mean


def _is_variance(value: Value, difference: Value | None, centred: _Mean, nodes: Nodes) -> bool:
    """Whether the value is mean((x - mean)^2) or mean(x^2) - mean^2, perhaps limited to what is not negative."""
    limited = _reshaped(value, nodes, Relu, Clip)
    if limited is not None and (isinstance(limited.op, Relu) or limited.op == Clip(0.0)):
        value = limited.inputs[0]
    square = _mean_square(value, nodes)
    if square is not None:
        return square.axis == centred.axis and (square.x is difference or _difference(square.x, nodes) == centred)
    node = _reshaped(value, nodes, Sub)
    squared = None if node is None else _square_of(node.inputs[1], nodes)
    if node is None or squared is None:
        return False
    return _mean_square(node.inputs[0], nodes) == _mean(squared, nodes) == centred


def _mean(value: Value, nodes: Nodes) -> _Mean | None:
    return _averaged(value, nodes, ReduceMean, ReduceSum)


def _mean_square(value: Value, nodes: Nodes) -> _Mean | None:
    """The mean whose x is what is squared before it is averaged."""
    found = _averaged(value, nodes, ReduceSumSquare)
    if found is not None:
        return found
    found = _averaged(value, nodes, ReduceMean, ReduceSum)
    base = None if found is None else _square_of(found.x, nodes)
    return None if found is None or base is None else _Mean(base, found.axis)


def _averaged(value: Value, nodes: Nodes, *reductions: type[Any]) -> _Mean | None:
    """What the value is the mean of over trailing axes: a mean, or a sum times the inverse of the count."""
    scale, mine, count = None, [], numel(value.shape)
    while (node := made_by(value, Reshape, Mul, Div)) is not None:
        mine.append(node)
        value = node.inputs[0]
        if not isinstance(node.op, Reshape):
            number = uniform(node.inputs[1])
            if not number or scale is not None:
                return None
            scale = number if isinstance(node.op, Mul) else 1 / number
    node = made_by(value, *reductions)
    if node is None or numel(value.shape) != count:
        return None
    op: Any = node.op
    x = node.inputs[0]
    axes = axes_of(op.axes, x.rank, op.op_name)
    if not axes or axes != tuple(range(axes[0], x.rank)):
        return None
    terms = numel(x.shape[axes[0] :])
    if scale is None:
        averaged = isinstance(op, ReduceMean) or terms == 1
    else:
        averaged = not isinstance(op, ReduceMean) and isinstance(terms, int) and _is_inverse(scale, terms, x)
    if not averaged:
        return None
    nodes.extend((*mine, node))
    return _Mean(x, axes[0])


def _is_inverse(scale: float, count: int, x: Value) -> bool:
    """Whether the factor is 1 / count as the element type of x has it."""
    return count > 0 and bool(held(scale, x.dtype) == held(1 / count, x.dtype))


def _square_of(value: Value, nodes: Nodes) -> Value | None:
    node = _reshaped(value, nodes, Mul, Pow)
    if node is None or (isinstance(node.op, Mul) and node.inputs[0] is not node.inputs[1]):
        return None
    return node.inputs[0] if isinstance(node.op, Mul) or uniform(node.inputs[1]) == 2 else None


def _kept(mean: _Mean) -> Shape:
    """The shape of the mean that broadcasts to x."""
    return (*mean.x.shape[: mean.axis], *(1,) * (mean.x.rank - mean.axis))


def _unexpanded(value: Value, nodes: Nodes) -> Value:
    while (node := made_by(value, Expand)) is not None:
        nodes.append(node)
        value = node.inputs[0]
    return value


def _reshaped(value: Value, nodes: Nodes, *ops: type[Any]) -> Node | None:
    """The node of one of these ops that makes the value, reshapes in between left aside."""
    mine = []
    while (node := made_by(value, Reshape)) is not None:
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
