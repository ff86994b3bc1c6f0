"""Convolutions and products of dequantised 8-bit tensors become those of the integers, exact sums that are scaled.

Proved from s (a - p) t (b - q) = s t (a - p)(b - q): the sums are exact, since only so many products are added as i32
holds, and are more accurate than those of floats. It takes what ONNX's quantisation takes of scales, that they are
positive and their products normal f32. A result that is quantised again is within one quantum of that of floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.shape import numel
from rlx.ops.activation import Relu
from rlx.ops.contract import Gemm, MatMul
from rlx.ops.conv import Conv
from rlx.ops.elementwise import Add, Cast, Clip, Div, Maximum, Minimum, Mul
from rlx.ops.encoded import Dequantize
from rlx.ops.layout import Reshape, Transpose
from rlx.ops.quant import ConvInteger, MatMulInteger, Quantize, Requantize
from rlx.passes.match.patterns import Statics, is_sized, made_by
from rlx.passes.rewrite import Site, rewrite
from rlx.records import dataclass

__all__ = ["raise_integer"]


def raise_integer(graph: Graph) -> Graph:
    """conv(dequantize(x), dequantize(w)) and products like it become scale * conv_integer(x, w), x and w as they are.

    Products whose operands are rounded to 16 bits are among them: in whole numbers they are exact.
    What is quantised after that, past a bias, relu and clips, is requantised from the sums at once.
    """
    statics = Statics()
    return rewrite(graph, lambda site: _raised(site, statics))


def _raised(site: Site, statics: Statics) -> Value | None:
    match site.op:
        case Conv(exact=False):
            return _conv(site, statics)
        case MatMul(activations="" | "bf16" | "f16") if type(site.op) is MatMul:
            return _matmul(site, statics)
        case Gemm(activations="" | "bf16" | "f16"):
            return _gemm(site, statics)
        case Quantize():
            return _requantised(site, statics)
    return None


@dataclass
class _Bytes:
    """A dequantised value: its integers, their scale and zero point, and the axis that these have numbers along."""

    node: Node
    data: Value
    scale: Value
    zero: Value
    axis: int | None


def _bytes(site: Site, value: Value) -> _Bytes | None:
    node = made_by(value, Dequantize)
    if node is None:
        return None
    op: Any = node.op
    data, scale, *zero = node.inputs
    if data.dtype.name not in ("u8", "i8") or op.block or op.to.name != "f32" or scale.dtype.name != "f32":
        return None
    if data.type.encoding is not None:
        return None
    axis = None if op.axis is None or numel(scale.shape) == 1 else op.axis % data.rank
    shift = zero[0] if zero else site.graph.constant(np.zeros((), data.dtype.numpy))
    return _Bytes(node, data, _flat(site, scale), _flat(site, shift), axis)


def _flat(site: Site, p: Value) -> Value:
    """A parameter of one element as a scalar."""
    return site.add(Reshape(()), p) if p.rank and numel(p.shape) == 1 else p


def _operands(site: Site, statics: Statics, axis: int) -> tuple[_Bytes, _Bytes] | None:
    """Both operands, where the right one is a weight with numbers along no axis but that of the outputs."""
    x, w = (_bytes(site, v) for v in site.inputs[:2])
    if x is None or w is None or x.axis is not None or w.axis not in (None, axis % w.data.rank):
        return None
    if not all(v in statics for v in (w.data, w.scale, w.zero)):
        return None
    terms = numel([n for d, n in enumerate(w.data.shape) if d != axis % w.data.rank])
    fits = isinstance(terms, int) and terms * _largest(x) * _largest(w) < 1 << 31
    return (x, w) if fits else None


def _largest(p: _Bytes) -> int:
    """The largest magnitude of an integer less its zero point."""
    if p.zero.kind != "const" or p.zero.data is None:
        return 255
    info, zeros = np.iinfo(p.data.dtype.numpy), p.zero.data.astype(np.int64)
    return int(max(abs(zeros - info.min).max(initial=0), abs(info.max - zeros).max(initial=0)))


def _conv(site: Site, statics: Statics) -> Value | None:
    found = _operands(site, statics, 0)
    if found is None:
        return None
    x, w = found
    op: Any = site.op
    whole = ConvInteger(op.strides, op.dilations, op.pads, op.groups)
    total = site.add(whole, x.data, w.data, x.zero, w.zero)
    return _scaled(site, total, x, w, site.inputs[2:], (1,) * (x.data.rank - 2))


def _matmul(site: Site, statics: Statics) -> Value | None:
    found = _operands(site, statics, -1)
    if found is None or any(v.rank < 2 for v in site.inputs) or site.inputs[1].rank != 2:
        return None
    x, w = found
    return _scaled(site, site.add(MatMulInteger(), x.data, w.data, x.zero, w.zero), x, w, (), ())


def _gemm(site: Site, statics: Statics) -> Value | None:
    op: Any = site.op
    found = _operands(site, statics, 0 if op.trans_b else 1)
    if found is None or op.trans_a or op.alpha != 1.0 or (op.beta != 1.0 and len(site.inputs) > 2):
        return None
    x, w = found
    weight = site.add(Transpose((1, 0)), w.data) if op.trans_b else w.data
    return _scaled(site, site.add(MatMulInteger(), x.data, weight, x.zero, w.zero), x, w, site.inputs[2:], ())


def _scaled(
    site: Site, total: Value, x: _Bytes, w: _Bytes, bias: Sequence[Value], tail: tuple[int, ...]
) -> Value | None:
    """The sums as floats, times the scales, plus the bias; `tail` are axes after that of the outputs."""
    scale = _column(site, site.add(Mul(), _spread(site, x.scale, w.scale), w.scale), tail)
    result = site.add(Mul(), site.add(Cast(DTYPES["f32"]), total), scale)
    for b in bias:
        result = site.add(Add(), result, _column(site, b, tail))
    return result


def _spread(site: Site, p: Value, like: Value) -> Value:
    """A constant as many times as `like` has elements: arithmetic on them is then the same code for every constant."""
    if p.kind != "const" or p.data is None or p.data.size != 1 or not is_sized(like):
        return p
    return site.graph.constant(np.full(like.shape, p.data.item(), p.data.dtype))


def _column(site: Site, p: Value, tail: tuple[int, ...]) -> Value:
    return site.add(Reshape((*p.shape, *tail)), p) if p.rank == 1 and tail else p


def _requantised(site: Site, statics: Statics) -> Value | None:
    op: Any = site.op
    if op.axis is not None or op.block or op.to.name not in ("u8", "i8"):
        return None
    value, scale, *given = site.inputs
    zero = given[0] if given else site.graph.constant(np.zeros((), op.to.numpy))
    scale, zero = _flat(site, scale), _flat(site, zero)
    if scale.dtype.name != "f32" or scale.rank or zero.rank:
        return None
    ends: list[tuple[type[Any], float]] = []
    nodes: list[Node] = []
    while (node := made_by(value, Relu, Clip)) is not None and site.uses[value] == 1:
        limits: Any = node.op
        if isinstance(limits, Relu):
            ends.append((Maximum, 0.0))
        else:
            ends += [(which, n) for which, n in ((Minimum, limits.hi), (Maximum, limits.lo)) if n is not None]
        if not _is_range(ends):
            return None
        nodes.append(node)
        value = node.inputs[0]
    found = _linear(site, value, statics)
    if found is None:
        return None
    total, multiplier, shift, made = found
    site.merged.extend((*made, *nodes[::-1]))
    shifts = () if shift is None else (site.add(Div(), shift, _spread(site, scale, shift)),)
    multiplier = site.add(Div(), multiplier, _spread(site, scale, multiplier))
    result = site.add(Requantize(op.to), total, multiplier, zero, *shifts)
    for limit, number in reversed(ends):  # rounding and saturating keep the order of numbers
        bound = site.add(Quantize(to=op.to), site.graph.constant(np.float32(number)), scale, zero)
        result = site.add(limit(), result, bound)
    return result


def _is_range(ends: Sequence[tuple[type[Any], float]]) -> bool:
    """Whether the limits are numbers, none of those below greater than one above: their order means nothing then."""
    lows, highs = ([n for which, n in ends if which is kind] for kind in (Maximum, Minimum))
    finite = all(np.isfinite(n) for _, n in ends)
    return finite and max(lows, default=-np.inf) <= min(highs, default=np.inf)


def _linear(site: Site, value: Value, statics: Statics) -> tuple[Value, Value, Value | None, list[Node]] | None:
    """(sums, multiplier, shift, nodes) of a value that is sums * multiplier + shift and has no other reader."""
    nodes: list[Node] = []
    shift = None
    add = made_by(value, Add)
    if add is not None:
        value, shift = add.inputs if add.inputs[1] in statics else add.inputs[::-1]
        if shift not in statics or site.uses[add.outputs[0]] != 1:
            return None
        nodes.append(add)
    scaled = made_by(value, Mul)
    wide = made_by(scaled.inputs[0], Cast) if scaled else None
    total = wide.inputs[0] if wide else None
    if scaled is None or wide is None or total is None or site.uses[value] > 1:
        return None
    if made_by(total, ConvInteger, MatMulInteger) is None or scaled.inputs[1] not in statics:
        return None
    if shift is not None and len(shift.shape) > len(value.shape):
        return None
    return total, scaled.inputs[1], shift, [wide, scaled, *nodes]
