"""Attention that an exporter wrote as two matrix products around a softmax becomes one op."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.shape import Size, exact_div
from rlx.ops.attention import Attention
from rlx.ops.contract import MatMul
from rlx.ops.elementwise import Add, Cast, Div, IsNan, Mul, Neg, Not, Sub, Where
from rlx.ops.layout import Expand, Reshape, Transpose
from rlx.ops.normalize import Softmax
from rlx.passes.patterns import either_way, made_by, uniform
from rlx.passes.rewrite import Site, rewrite
from rlx.records import dataclass, field

__all__ = ["raise_attention"]

MASKED = -1e4  # scores replaced by this or less are masked: their weights round to zero
# What stands for a finite masking value: added to a score it absorbs it, so a row without keys stays an even mean.
FINITE_MASK = -(2.0**126)


@dataclass(frozen=True)
class _Addend:
    """A term of the bias: `value` times `factor`, or where the bool `value` is false (or true) a number."""

    value: Value
    factor: float = 1.0
    fill: float | None = None
    fill_where: bool = False


@dataclass
class _Scores:
    """scale * q k^T + the addends, read off the input of a softmax."""

    product: Node
    scale: float
    addends: list[_Addend] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)


def raise_attention(graph: Graph) -> Graph:
    """matmul(softmax(matmul(q, k^T) * scale + mask), v) becomes attention, where nothing else reads the weights.

    Factors and masks may come in any order, on q, k or the scores; a mask may be added or chosen by `where`.
    """
    return rewrite(graph, lambda site: _raised(site) if isinstance(site.op, MatMul) else None)


def _raised(site: Site) -> Value | None:
    weights, v = site.inputs
    nodes: list[Node] = []
    mended = _mended(site, weights, nodes)
    softmax = _softmax(site, weights, nodes) if mended is None else _softmax(site, mended, nodes, readers=2)
    if softmax is None or v.rank not in (3, 4) or v.rank != weights.rank:
        return None
    scores = _scores(site, _uncast(site, softmax.inputs[0], nodes), 1.0)
    if scores is None:
        return None
    q, kt = scores.product.inputs
    q, on_q = _unscaled(q, nodes)
    kt, on_k = _unscaled(kt, nodes)
    scale = scores.scale * on_q * on_k
    k, on_rows = _unscaled(_last_two_swapped(site, kt), nodes)
    scale = scale * on_rows
    if q.rank != v.rank or k.rank != v.rank or not v.dtype.is_float or q.dtype is not v.dtype:
        return None
    bias = _bias(site, scores.addends, DTYPES["f64" if q.dtype.bits == 64 else "f32"])
    k, v = _ungrouped(k, v, nodes)
    if not _heads_fit(q, k, v):
        return None
    site.merged.extend((*scores.nodes, scores.product, softmax, *nodes))
    return _attention(site, q, k, v, bias, Attention(scale=scale, empty_row="nan" if mended is None else "zero"))


def _attention(site: Site, q: Value, k: Value, v: Value, bias: Value | None, op: Attention) -> Value:
    """The node; tensors of rank 3 are those of one head."""
    if q.rank == 3:
        q, k, v = (_with_head(site, t) for t in (q, k, v))
        bias = _with_head(site, bias) if bias is not None and bias.rank == 3 else bias
    out = site.add(op, q, k, v, *(() if bias is None else (bias,)))
    wanted = site.node.outputs[0].shape
    return out if out.shape == wanted else site.add(Reshape(wanted), out)


def _with_head(site: Site, x: Value) -> Value:
    return site.add(Reshape((x.shape[0], 1, *x.shape[1:])), x)


# ---- from the weights down to the product


def _single(site: Site, value: Value, *ops: type[Any]) -> Node | None:
    """The node that makes the value, if it is one of these ops and nothing else reads the value."""
    return made_by(value, *ops) if site.uses[value] == 1 else None


def _mended(site: Site, weights: Value, nodes: list[Node]) -> Value | None:
    """The w of where(isnan(w), 0, w), which exporters write so that a row without keys gives zeros."""
    where = _single(site, weights, Where)
    test = made_by(where.inputs[0], IsNan) if where else None
    if where is None or test is None or uniform(where.inputs[1]) != 0 or test.inputs[0] is not where.inputs[2]:
        return None
    nodes.extend((where, test))
    return where.inputs[2]


def _softmax(site: Site, value: Value, nodes: list[Node], readers: int = 1) -> Node | None:
    """The softmax over the last axis that makes the value, which so many nodes read; perhaps cast afterwards."""
    if site.uses[value] != readers:
        return None
    inner = _uncast(site, value, nodes, readers)
    softmax = made_by(value, Softmax) if inner is value else _single(site, inner, Softmax)
    axis: Any = softmax and softmax.op.axis  # type: ignore[attr-defined]
    return softmax if softmax is not None and axis % value.rank == value.rank - 1 else None


def _uncast(site: Site, value: Value, nodes: list[Node], readers: int = 1) -> Value:
    """The value before a cast between floating-point types: attention computes in f32 anyway."""
    cast = made_by(value, Cast)
    if (
        cast is None
        or site.uses[value] != readers
        or not (cast.inputs[0].dtype.is_float and value.dtype.is_float and value.dtype.bits <= 32)
    ):
        return value
    nodes.append(cast)
    return cast.inputs[0]


def _scores(site: Site, value: Value, factor: float) -> _Scores | None:
    """Reads the scores; `factor` is what they are multiplied with further up."""
    node = _single(site, value, MatMul, Mul, Div, Add, Sub, Where, Cast)
    if node is None:
        return None
    if isinstance(node.op, MatMul):
        return _Scores(node, factor)
    for inner, times, addend in _readings(node, factor):
        if inner.shape != value.shape:
            continue
        found = _scores(site, inner, factor * times)
        if found is not None:
            found.nodes.append(node)
            found.addends.extend([] if addend is None else [addend])
            return found
    return None


def _readings(node: Node, factor: float) -> Iterator[tuple[Value, float, _Addend | None]]:
    """(inner value, its factor, what is added) for each way to read the node."""
    a, b = node.inputs[0], node.inputs[-1]
    match node.op:
        case Mul() | Div():
            number = uniform(b)
            if number and math.isfinite(number):
                yield a, number if isinstance(node.op, Mul) else 1 / number, None
        case Add():
            for inner, other in either_way(node):
                yield inner, 1.0, _Addend(other, factor)
        case Cast():
            if a.dtype.is_float and b.dtype.bits <= 32:
                yield a, 1.0, None
        case Sub():
            yield a, 1.0, _Addend(b, -factor)
        case Where():
            cond, a, b = node.inputs
            for inner, other, where in ((a, b, False), (b, a, True)):
                fill = uniform(other)
                if fill is not None and fill <= MASKED and factor > 0:
                    yield (
                        inner,
                        1.0,
                        _Addend(cond, fill=-math.inf if fill == -math.inf else FINITE_MASK, fill_where=where),
                    )


# ---- operands


def _unscaled(value: Value, nodes: list[Node]) -> tuple[Value, float]:
    """The operand before multiplications by numbers, and their product."""
    scale = 1.0
    while (node := made_by(value, Mul, Div)) is not None:
        number = uniform(node.inputs[1])
        if not number or not math.isfinite(number):
            break
        scale = scale * number if isinstance(node.op, Mul) else scale / number
        nodes.append(node)
        value = node.inputs[0]
    return value, scale


def _last_two_swapped(site: Site, kt: Value) -> Value:
    order = (*range(kt.rank - 2), kt.rank - 1, kt.rank - 2)
    node = made_by(kt, Transpose)
    if node is not None and node.op == Transpose(order):
        return node.inputs[0]
    return site.add(Transpose(order), kt)


def _ungrouped(k: Value, v: Value, nodes: list[Node]) -> tuple[Value, Value]:
    """k and v before their heads were repeated, if both were, each head in a row."""
    plain_k, plain_v = _repeated(k), _repeated(v)
    if plain_k is None or plain_v is None or plain_k.shape[1] != plain_v.shape[1]:
        return k, v
    for value in (k, v):
        assert value.node is not None
        nodes.append(value.node)
    return plain_k, plain_v


def _repeated(value: Value) -> Value | None:
    """x [B, H, L, D] where the value is that with each head n times in a row, through [B, H, 1, L, D] and expand."""
    joined = made_by(value, Reshape)
    spread = made_by(joined.inputs[0], Expand) if joined else None
    apart = made_by(spread.inputs[0], Reshape) if spread else None
    if spread is None or apart is None or value.rank != 4:
        return None
    x, wide = apart.inputs[0], spread.outputs[0].shape
    if x.rank != 4 or len(wide) != 5 or apart.outputs[0].shape != (*x.shape[:2], 1, *x.shape[2:]):
        return None
    fits = (*wide[:2], *wide[3:]) == x.shape and value.shape == (wide[0], wide[1] * wide[2], *wide[3:])
    return x if fits else None


def _heads_fit(q: Value, k: Value, v: Value) -> bool:
    """Whether the batches are the same and the heads of q are a multiple of those of k and v."""

    def heads(x: Value) -> Size:
        return x.shape[1] if x.rank == 4 else 1

    return (
        q.shape[0] == k.shape[0] == v.shape[0]
        and heads(k) == heads(v)
        and exact_div(heads(q), heads(k)) is not None
        and q.shape[-1] == k.shape[-1]
    )


def _bias(site: Site, addends: list[_Addend], dtype: DType) -> Value | None:
    total: Value | None = None
    for addend in addends:
        value = _term(site, addend, dtype)
        total = value if total is None else site.add(Add(), total, value)
    return total


def _term(site: Site, addend: _Addend, dtype: DType) -> Value:
    value = addend.value
    if addend.fill is not None:
        zero, fill = (site.graph.constant(x, dtype=dtype) for x in (0.0, addend.fill))
        turned = made_by(value, Not)
        if turned is not None:
            value = turned.inputs[0]
        masked_where_true = addend.fill_where is not (turned is not None)
        return site.add(Where(), value, fill, zero) if masked_where_true else site.add(Where(), value, zero, fill)
    if value.dtype is not dtype:
        value = site.add(Cast(dtype), value)
    if addend.factor == 1:
        return value
    if addend.factor == -1:
        return site.add(Neg(), value)
    return site.add(Mul(), value, site.scalar(addend.factor, value))
