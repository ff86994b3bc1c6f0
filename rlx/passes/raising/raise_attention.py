"""Attention that an exporter wrote as two matrix products around a softmax becomes one op.

Proved by structure: every node between the product and the softmax becomes a step of the op, in its order and with its
operands, so masks, fills, infinities and NaN keep the meaning that the file gives them, whatever their numbers are.
Only roundings change: factors of q, of k and of the product are one factor of the product, a quotient is a product with
the inverse, and the sum of the weights divides their product with v. Such factors lie within 2^-32..2^32 (as does their
product), so this is seen only where products of q and k, or sums of v, come near the ends of the type's range. A file
that rounds on the way, to 16 bits or otherwise, keeps its nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.shape import Size, exact_div
from rlx.ops.attention import Attention
from rlx.ops.contract import MatMul
from rlx.ops.elementwise import Add, Div, IsNan, Mul, Neg, Not, Sub, Where
from rlx.ops.layout import Expand, Reshape, Transpose
from rlx.ops.normalize import Softmax
from rlx.passes.match.patterns import either_way, made_by, uniform
from rlx.passes.rewrite import Site, rewrite
from rlx.records import dataclass, field, replace

__all__ = ["raise_attention"]

LARGEST_FACTOR = 2.0**32  # and its inverse is the smallest
MOST_STEPS = 32


@dataclass(frozen=True)
class _Step:
    """A step of the op: its name and its operand, and of "where" the mask that is true where it keeps the score."""

    name: str
    operand: Value
    mask: Value | None = None


@dataclass
class _Scores:
    """What a softmax reads: scale * q k^T, and then the steps."""

    product: Node
    scale: float = 1.0
    steps: list[_Step] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    def append(self, step: _Step) -> None:
        number = uniform(step.operand) if step.name == "mul" and not self.steps else None
        if number is not None and _is_factor(number) and _is_factor(self.scale * number):
            self.scale *= number
        else:
            self.steps.append(step)


def raise_attention(graph: Graph) -> Graph:
    """matmul(softmax(matmul(q, k^T) * scale + mask), v) becomes attention, where nothing else reads the weights.

    Factors and masks may come in any order, on q, k or the scores; a mask may be added or chosen by `where`.
    """
    return rewrite(graph, lambda site: _raised(site) if type(site.op) is MatMul else None)


def _raised(site: Site) -> Value | None:
    weights, v = site.inputs
    if v.rank not in (3, 4) or v.rank != weights.rank or v.dtype.name not in ("f32", "f64"):
        return None
    nodes: list[Node] = []
    mended = _mended(site, weights, nodes)
    softmax = _softmax(site, weights, 1) if mended is None else _softmax(site, mended, 2)
    scores = None if softmax is None else _scores(site, softmax.inputs[0])
    if softmax is None or scores is None:
        return None
    rounded: Any = scores.product.op.activations  # type: ignore[attr-defined]
    if rounded != site.op.activations or rounded == "q8":  # type: ignore[attr-defined]
        return None
    q, kt = scores.product.inputs
    q, on_q = _unscaled(q, nodes)
    kt, on_k = _unscaled(kt, nodes)
    k, on_rows = _unscaled(_last_two_swapped(site, kt), nodes)
    scale = scores.scale * on_q * on_k * on_rows
    if q.rank != v.rank or k.rank != v.rank or q.dtype is not v.dtype or not _is_factor(scale):
        return None
    k, v = _ungrouped(k, v, nodes)
    if not _heads_fit(q, k, v):
        return None
    site.merged.extend((*scores.nodes, scores.product, softmax, *nodes))
    op = Attention(scale=scale, empty_row="nan" if mended is None else "mended", activations=rounded)
    return _attention(site, op, q, k, v, scores.steps)


def _attention(site: Site, op: Attention, q: Value, k: Value, v: Value, steps: list[_Step]) -> Value:
    """The node; tensors of rank 3 are those of one head."""
    operands = [x for step in steps for x in (step.mask, step.operand) if x is not None]
    if q.rank == 3:
        q, k, v = (_with_head(site, t) for t in (q, k, v))
        operands = [_with_head(site, x) if x.rank == 3 else x for x in operands]
    out = site.add(replace(op, steps=tuple(step.name for step in steps)), q, k, v, *operands)
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


def _softmax(site: Site, value: Value, readers: int) -> Node | None:
    """The softmax over the last axis that makes the value, which so many nodes read."""
    softmax = made_by(value, Softmax) if site.uses[value] == readers else None
    axis: Any = softmax and softmax.op.axis  # type: ignore[attr-defined]
    return softmax if softmax is not None and axis % value.rank == value.rank - 1 else None


def _scores(site: Site, value: Value, depth: int = 0) -> _Scores | None:
    """Reads the scores."""
    node = _single(site, value, MatMul, Mul, Div, Add, Sub, Where)
    if node is None or depth > MOST_STEPS:
        return None
    if isinstance(node.op, MatMul):
        return _Scores(node)
    for inner, step in _readings(site, node):
        found = _scores(site, inner, depth + 1) if inner.shape == value.shape else None
        if found is not None:
            found.append(step)
            found.nodes.append(node)
            return found
    return None


def _readings(site: Site, node: Node) -> Iterator[tuple[Value, _Step]]:
    """(inner value, what is done to it) for each way to read the node."""
    match node.op:
        case Mul() | Add():
            name = "mul" if isinstance(node.op, Mul) else "add"
            for inner, other in either_way(node):
                yield inner, _Step(name, other)
        case Div():
            a, b = node.inputs
            number = uniform(b)
            if number is not None and _is_factor(number):
                yield a, _Step("mul", site.scalar(1 / number, b))
        case Sub():
            a, b = node.inputs
            yield a, _Step("add", site.add(Neg(), b))
        case Where():
            cond, a, b = node.inputs
            yield a, _Step("where", b, cond)
            turned = made_by(cond, Not)
            yield b, _Step("where", a, site.add(Not(), cond) if turned is None else turned.inputs[0])


def _is_factor(number: float) -> bool:
    return 1 / LARGEST_FACTOR <= abs(number) <= LARGEST_FACTOR


# ---- operands


def _unscaled(value: Value, nodes: list[Node]) -> tuple[Value, float]:
    """The operand before multiplications by numbers, and their product."""
    scale = 1.0
    while (node := made_by(value, Mul, Div)) is not None:
        number = uniform(node.inputs[1])
        if number is None or not _is_factor(number):
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
