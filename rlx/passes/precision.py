"""What `precision` asks for, written into the ops: products whose operands are rounded say so themselves.

It is no rewrite that keeps results, so it isn't one of `PASSES`: every device, the reference too, is given the graph
after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx.ir.casting import NARROWED
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.shape import numel
from rlx.ops.attention import Attention
from rlx.ops.contract import Gemm, MatMul
from rlx.ops.conv import Conv, ConvTranspose
from rlx.ops.einsum import Einsum
from rlx.ops.elementwise import Cast
from rlx.ops.encoded import Dequantize
from rlx.ops.experts import GroupedMatMul
from rlx.ops.layout import Reshape, Transpose, Unsqueeze
from rlx.passes.match.patterns import Statics, made_by
from rlx.passes.rewrite import Site, inside_regions, rewrite
from rlx.records import replace

__all__ = ["apply_precision", "round_ahead"]


def apply_precision(graph: Graph, precision: str) -> Graph:
    """With "bf16" and "f16", all products of two values of f32 round both to that type: of matrices and vectors,
    convolutions, attention and einsum; not those within recurrent cells and of grouped experts.

    With "q8", products of f32 with weights of 8 bits or fewer round their activations to 8 bits.

    Such weights are encoded params, or integers of up to 8 bits (params or constants) that the graph makes floats of.
    Activations that a graph dequantises stay what they are, and so do the products of other ops.
    """
    if precision in NARROWED:
        made = rewrite(rewrite(graph, _in_products), lambda site: _narrowed(site, precision))
        return inside_regions(made, lambda region: apply_precision(region, precision))
    if precision != "q8":
        return graph
    statics = Statics()
    made = rewrite(graph, lambda site: _rounding(site, statics))
    return inside_regions(made, lambda region: apply_precision(region, precision))


def round_ahead(graph: Graph, asked: Callable[[Node], bool | None]) -> Graph:
    """Where a device asks for it, casts round the operands of a product of 16 bits, which then is one of f32.

    Where it says None it knows the precision from its options, and is told of no product.
    """
    rounded: dict[tuple[Value, str], Value] = {}

    def operand(site: Site, x: Value, dtype: str) -> Value:
        if (x, dtype) not in rounded:
            rounded[x, dtype] = site.add(Cast(x.dtype), site.add(Cast(DTYPES[dtype]), x))
        return rounded[x, dtype]

    def rule(site: Site) -> Value | None:
        op: Any = site.op
        if getattr(op, "activations", "") not in NARROWED or (wanted := asked(site.node)) is False:
            return None
        count = 3 if isinstance(op, Attention) else 2
        multiplied, more = site.inputs[:count], site.inputs[count:]
        if wanted:
            multiplied = tuple(operand(site, x, op.activations) for x in multiplied)
        return site.add(replace(op, activations=""), *multiplied, *more)

    return inside_regions(rewrite(graph, rule), lambda region: round_ahead(region, asked))


def _in_products(site: Site) -> Value | None:
    """An einsum of f32 as the matrix products that it is made of."""
    if not isinstance(site.op, Einsum) or len(site.inputs) < 2 or site.inputs[0].dtype.name != "f32":
        return None
    return site.op.decompose(site.graph, *site.inputs)


def _narrowed(site: Site, precision: str) -> Value | None:
    """The product with operands of 16 bits. Those of vectors become products of matrices of one row or column."""
    op: Any = site.op
    if type(op) not in (MatMul, Gemm, Conv, ConvTranspose, Attention) or op.activations:
        return None
    a, b, *more = site.inputs
    if a.dtype.name != "f32":
        return None
    op = replace(op, activations=precision)
    if min(a.rank, b.rank) > 1:
        return site.add(op, a, b, *more)
    out = site.node.outputs[0]
    a = site.add(Unsqueeze((0,)), a) if a.rank == 1 else a
    b = site.add(Unsqueeze((1,)), b) if b.rank == 1 else b
    return site.add(Reshape(out.shape), site.add(op, a, b))


def _rounding(site: Site, statics: Statics) -> Value | None:
    op = site.op
    if type(op) not in (MatMul, Gemm, GroupedMatMul) or op.activations:  # type: ignore[attr-defined]
        return None
    a, b = site.inputs[:2]
    if a.dtype.name != "f32" or a.rank < 2 or b.rank < 2 or b not in statics or not _is_narrow(b):
        return None
    made = a
    while (node := made_by(made, Transpose, Reshape)) is not None:
        made = node.inputs[0]
    if made_by(made, Dequantize) is not None:
        return None
    return site.add(replace(op, activations="q8"), *site.inputs)  # type: ignore[type-var]


def _is_narrow(weight: Value) -> bool:
    """Whether the params and constants of its size, or half of it, that it is computed from are of 8 bits or fewer."""
    size, found = numel(weight.shape), False
    seen: set[Value] = set()
    open_ = [weight]
    while open_:
        value = open_.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.node is not None:
            open_.extend(value.node.inputs)
        elif numel(value.shape) == size or numel(value.shape) * 2 == size:  # two numbers of 4 bits in a byte
            narrow = value.type.encoding is not None or (value.dtype.is_integer and value.dtype.bits <= 8)
            if not narrow:
                return False
            found = True
    return found
