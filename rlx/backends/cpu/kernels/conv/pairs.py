"""Convolutions of operands rounded to bf16, as ones of pairs of channels: `gemm/panels/bf16.py` multiplies such pairs.

    word p of a pixel    channels 2 p and 2 p + 1, as bf16          the last one is zero where their number is odd

A word takes the place of an f32, so windows are read and gathered as those of an image of half as many channels.
"""

from __future__ import annotations

from rlx.backends.cpu.gemm import amx_bf16
from rlx.backends.cpu.kernels.conv.weights import FEW_OUTPUTS
from rlx.backends.cpu.kernels.conv.winograd import fastest
from rlx.backends.cpu.kernels.conv.winograd_forms import F4X4, FORMS
from rlx.backends.cpu.target import Target
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import Shape, numel
from rlx.kernels.affine import linear_index, row_major
from rlx.kernels.expr import Cast, Expr, Load, Select, const, guarded, substitute_vars
from rlx.kernels.lowering import Conv, out_vars
from rlx.kernels.prepared import is_static
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.ops.conv import Conv as ConvOp
from rlx.ops.conv import per_axis
from rlx.records import replace

__all__ = ["are_many", "lies_so", "of_pairs", "suits"]

F32, BF16 = DTYPES["f32"], DTYPES["bf16"]
LEAST_TRANSFORMED = 16  # channels and outputs
LEAST_OF_GROUP = 9  # outputs of one group of several; `grouped` has fewer


def suits(op: ConvOp, w: Shape, target: Target) -> bool:
    """Whether a convolution is fastest by pairs, of weights of a shape."""
    return are_many(w, op.groups) and not _is_faster_transformed(op, w, target)


def are_many(w: Shape, groups: int) -> bool:
    """Whether pairs pay: there are several channels, an even number in a group, and more than a few outputs."""
    outputs, channels = w[0] // groups, w[1]
    if not isinstance(outputs, int) or not isinstance(channels, int):
        return False
    if groups == 1:
        return outputs > FEW_OUTPUTS and channels > 1
    return outputs >= LEAST_OF_GROUP and channels % 2 == 0


def _is_faster_transformed(op: ConvOp, w: Shape, target: Target) -> bool:
    """Whether Winograd's F(4x4) takes less time in f32: it makes a quarter of the products, pairs are half of them."""
    outputs, channels, pads = w[0] // op.groups, w[1], per_axis(op.pads, 2 * (len(w) - 2), 0, "conv pads")
    plain = {*op.strides, *op.dilations} <= {1} and all(isinstance(p, int) and p >= 0 for p in pads)
    if not plain or not isinstance(outputs, int) or not isinstance(channels, int):
        return False
    if target.float_tiles and channels % (2 * amx_bf16.STEPS) == 0:  # which tile registers multiply
        return False
    forms = [name for name, form in FORMS.items() if form.r == w[2:]]
    return (
        min(outputs, channels) >= LEAST_TRANSFORMED
        and F4X4 in forms
        and fastest(forms, outputs, channels, target) == F4X4
    )


def of_pairs(kernel: Kernel) -> list[Kernel]:
    """The convolution of words, after the kernel that rounds the image where that isn't stored in pairs already."""
    anchor = kernel.anchor
    assert isinstance(anchor, Conv)
    channels, words = anchor.w_shape[1], (anchor.w_shape[1] + 1) // 2
    image, made = _rounded(kernel, anchor)
    w = _rounded_element(anchor.w)
    if channels % 2 != 0:
        inside = out_vars(2)[1] < channels
        w = Select(inside, guarded(w, inside), const(0.0, BF16))
    x_shape = (anchor.x_shape[0], words * anchor.groups, *anchor.x_shape[2:])
    w_shape = (anchor.w_shape[0], words, *anchor.w_shape[2:])
    return [*made, kernel.with_anchor(replace(anchor, x=image, w=w, x_shape=x_shape, w_shape=w_shape))]


def _rounded_element(e: Expr) -> Expr:
    """An operand as it is rounded once; what is one of these numbers already stays so."""
    match e:
        case Cast(value=Cast(value=value)) if e.dtype is BF16 is value.dtype and e.value.dtype is F32:
            return value
    return e


def _rounded(kernel: Kernel, anchor: Conv) -> tuple[Load, list[Kernel]]:
    """What reads the image in words, with its channels last, and the kernel that makes them."""
    element, shape = _rounded_element(anchor.x), anchor.x_shape
    n, c, *space = out_vars(len(shape))
    channels = (shape[1] + 1) // 2 * 2
    stored = (shape[0], *shape[2:], channels)
    in_words = (*stored[:-1], channels // 2)
    if isinstance(element, Load) and channels == shape[1] and lies_so(element, stored):
        return Load(element.source.view(in_words, F32), (n, *space, c), F32), []
    buffer = Buffer(
        f"{kernel.stores[0].buffer.name}.x", "prepared" if is_static(element, shape) else "arena", stored, BF16
    )
    own = out_vars(len(shape))
    value = substitute_vars(element, dict(zip((n, *space, c), own, strict=True)))
    if channels != shape[1]:
        inside = own[-1] < shape[1]
        value = Select(inside, guarded(value, inside), const(0.0, BF16))
    store = Store(buffer, stored, own, value)
    return Load(buffer.view(in_words, F32), (n, *space, c), F32), [Kernel("round x", (store,), nodes=kernel.nodes)]


def lies_so(e: Load, stored: Shape) -> bool:
    """Whether it reads all of a buffer whose elements lie as those of an image [n, *space, c]."""
    n, c, *space = out_vars(len(stored))
    index, steps = linear_index(e.indices, e.source.shape), row_major(stored)
    places = [(var, step) for var, step, size in zip((n, *space, c), steps, stored, strict=True) if size != 1]
    whole = index.is_linear and index.constant == 0 and numel(e.source.shape) == numel(stored)
    return e.where is None and whole and {v: s for v, s in index.coefs.items() if v in dict(places)} == dict(places)
