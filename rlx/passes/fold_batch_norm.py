"""Scales and shifts of a convolution's channels by params go into its weight and bias, as expressions for `prepare`.

Proved by structure for finite factors: a sum of products times a factor is the sum of products with the factor in their
weights, but for roundings of the size of those of the sum. A factor that is NaN (of a negative variance) gives NaN in
its channel as before; where an infinite one is multiplied with a weight of 0, NaN may stand for an infinity. So a
variance is not divided by without an epsilon > 0, and what divides a channel divides its weights. A constant and one
that takes it off again are not added up: they may be there to round.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.ir.graph import Array, Graph, Node, Value
from rlx.ir.shape import Size
from rlx.ops.contract import Gemm, MatMul
from rlx.ops.conv import Conv, ConvTranspose
from rlx.ops.elementwise import Add, Cast, Div, Mul, Neg, Rsqrt, Sub
from rlx.ops.encoded import Dequantize
from rlx.ops.layout import Expand, Reshape
from rlx.ops.normalize import BatchNorm
from rlx.passes.match.patterns import Statics, either_way, made_by
from rlx.passes.rewrite import Site, rewrite
from rlx.records import dataclass

__all__ = ["fold_batch_norm"]

MOST_TERMS = 64


@dataclass
class _Affine:
    """x * scale + shift of each channel (`by` Div: x / scale); None stands for 1 and 0. Each is [C] or one number."""

    x: Value
    scale: Value | None
    shift: Value | None
    by: Mul | Div = Mul()


def fold_batch_norm(graph: Graph) -> Graph:
    """Folds batch norm, and products and sums with one number a channel, into the convolution before.

    Matrix products take a batch norm only. The weight must be a param or constant (or computed from such) in f32 or
    f64, and nothing else may read the convolution's result. Nothing is computed here: params can still be set.
    """
    statics = Statics()
    return rewrite(graph, lambda site: _folded(site, statics))


def _folded(site: Site, statics: Statics) -> Value | None:
    affine = _affine(site, statics)
    if affine is None or site.uses[affine.x] != 1:
        return None
    anchor = made_by(affine.x, Conv, ConvTranspose, MatMul, Gemm)
    if anchor is None or not _weight_fits(anchor, statics):
        return None
    if isinstance(anchor.op, MatMul | Gemm) and anchor.op.activations:  # the weights would be 8 bits no more
        return None
    if isinstance(anchor.op, MatMul | Gemm) and not isinstance(site.op, BatchNorm):
        return None
    if affine.shift is not None and len(anchor.inputs) > 2 and _rounds(anchor.inputs[2], affine.shift):
        return None
    site.merged.append(anchor)
    if isinstance(anchor.op, Conv | ConvTranspose):
        return _convolution(site, anchor, affine)
    return _product(site, anchor, affine)


def _weight_fits(anchor: Node, statics: Statics) -> bool:
    w = anchor.inputs[1]
    plain = w.type.encoding is None and made_by(w, Dequantize) is None and w.dtype.name in ("f32", "f64")
    rank = {Conv: w.rank, ConvTranspose: w.rank}.get(type(anchor.op), 2)
    return plain and w.rank == rank and all(v in statics for v in anchor.inputs[1:])


def _rounds(bias: Value, shift: Value) -> bool:
    """Whether a constant of the sum is taken off again, or nearly so: x + 2^23 - 2^23 is an integer.

    So it is taken to be where there are too many terms to look at.
    """
    before, after = _constants(bias), _constants(shift)
    if before is None or after is None:
        return True
    with np.errstate(all="ignore"):
        return any(bool((np.abs(x + y) < np.abs(x) / 256).all()) for x in before for y in after)


def _constants(value: Value) -> list[Array] | None:
    """The constants among the terms of a sum, times what they are multiplied with; None for very many terms."""
    found: list[Array] = []
    rest: list[tuple[Value, Array]] = [(value, np.ones(1))]
    for _ in range(MOST_TERMS):
        if not rest:
            return found
        x, factor = rest.pop()
        node = made_by(x, Add, Neg, Mul, Div)
        if node is None:
            number = _number(x)
            found.extend([] if number is None else [factor * number])
        elif isinstance(node.op, Mul | Div):
            by = _number(node.inputs[1])
            if by is not None:
                with np.errstate(all="ignore"):
                    rest.append((node.inputs[0], factor * by if isinstance(node.op, Mul) else factor / by))
        else:
            rest.extend((y, -factor if isinstance(node.op, Neg) else factor) for y in node.inputs)
    return None


def _number(value: Value) -> Array | None:
    """A constant, one number or one for each channel, in f64."""
    while (node := made_by(value, Expand, Reshape)) is not None:
        value = node.inputs[0]
    return None if value.kind != "const" or value.data is None else value.data.reshape(-1).astype(np.float64)


# ---- what is done to the channels


def _affine(site: Site, statics: Statics) -> _Affine | None:
    if isinstance(site.op, BatchNorm):
        return _batch_norm(site, statics)
    if not isinstance(site.op, Add | Sub | Mul | Div):
        return None
    for x, other in either_way(Node(site.op, site.inputs)):
        if other in statics and made_by(x, Conv, ConvTranspose) is not None and other.dtype is x.dtype:
            p = _per_channel(site, other, x)
            if p is None or (isinstance(site.op, Sub | Div) and x is not site.inputs[0]):
                return None
            match site.op:
                case Mul():
                    return _Affine(x, p, None)
                case Div():
                    return _Affine(x, p, None, Div())
                case Add():
                    return _Affine(x, None, p)
                case Sub():
                    return _Affine(x, None, site.add(Neg(), p))
    return None


def _batch_norm(site: Site, statics: Statics) -> _Affine | None:
    x, *params = site.inputs
    op: Any = site.op
    if any(p not in statics for p in params) or not op.epsilon > 0:
        return None
    scale, bias, mean, var = (p if p.dtype is x.dtype else site.add(Cast(x.dtype), p) for p in params)
    spread = site.add(Add(), var, site.scalar(op.epsilon, var))
    factor = site.add(Mul(), scale, site.add(Rsqrt(), spread))
    return _Affine(x, factor, site.add(Sub(), bias, site.add(Mul(), mean, factor)))


def _per_channel(site: Site, p: Value, x: Value) -> Value | None:
    """p as [C] or [1] where it broadcasts along every axis of x but the channels."""
    if p.rank > x.rank:
        return None
    sizes = [*(1,) * (x.rank - p.rank), *p.shape]
    if sizes[1] not in (1, x.shape[1]) or any(size != 1 for d, size in enumerate(sizes) if d != 1):
        return None
    flat = (sizes[1],)
    return p if p.shape == flat else site.add(Reshape(flat), p)


# ---- new operands


def _convolution(site: Site, anchor: Node, affine: _Affine) -> Value:
    x, w, *rest = anchor.inputs
    op: Any = anchor.op
    channels = affine.x.shape[1]
    bias = rest[0] if rest else None
    if affine.scale is not None:
        w = site.add(affine.by, w, _along_weight(site, affine.scale, w, op))
        bias = None if bias is None else site.add(affine.by, bias, affine.scale)
    bias = _shifted(site, bias, affine.shift, channels)
    return site.add(op, x, w, *(() if bias is None else (bias,)))


def _along_weight(site: Site, scale: Value, w: Value, op: Any) -> Value:
    """The scale [C] in the shape that broadcasts over the output channels of the weight."""
    if scale.shape == (1,):
        return scale
    spatial = (1,) * (w.rank - 2)
    if isinstance(op, Conv):
        return site.add(Reshape((w.shape[0], 1, *spatial)), scale)
    if op.groups == 1:
        return site.add(Reshape((1, w.shape[1], *spatial)), scale)
    inputs = w.shape[0] // op.groups  # weight [groups * inputs, C / groups, ..]: each group has its own scales
    apart = site.add(Reshape((op.groups, 1, w.shape[1])), scale)
    wide = site.add(Expand((op.groups, inputs, w.shape[1])), apart)
    return site.add(Reshape((w.shape[0], w.shape[1], *spatial)), wide)


def _shifted(site: Site, bias: Value | None, shift: Value | None, channels: Size) -> Value | None:
    if shift is None:
        return bias
    if bias is not None:
        return site.add(Add(), bias, shift)
    return shift if shift.shape == (channels,) else site.add(Expand((channels,)), shift)


def _product(site: Site, anchor: Node, affine: _Affine) -> Value | None:
    """A matrix product of rank 2 whose columns are the channels."""
    if affine.x.rank != 2 or affine.scale is None or affine.shift is None:
        return None
    x, w, *rest = anchor.inputs
    op: Any = anchor.op
    by_row = isinstance(op, Gemm) and op.trans_b
    scale = site.add(Reshape((w.shape[0], 1)), affine.scale) if by_row else affine.scale
    product = site.add(Mul(), w, scale)
    shift = affine.shift
    if isinstance(op, MatMul):
        return site.add(Add(), site.add(op, x, product), shift)
    if rest and op.beta != 0:
        c = site.add(Mul(), rest[0], affine.scale)
        c = c if op.beta == 1 else site.add(Mul(), c, site.scalar(op.beta, c))
        shift = site.add(Add(), c, shift)
    return site.add(Gemm(op.alpha, 1.0, op.trans_a, op.trans_b), x, product, shift)
