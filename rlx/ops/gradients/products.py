"""Rules of matrix products and convolutions."""

from __future__ import annotations

from itertools import product
from typing import Any

from rlx.errors import UnsupportedOp
from rlx.ir.graph import Value
from rlx.ir.shape import Size
from rlx.ops.base import Op, apply
from rlx.ops.contract import MatMul
from rlx.ops.conv import Conv, ConvTranspose
from rlx.ops.elementwise import Add
from rlx.ops.gradients.attach import jvp, linear, reshaped, summed_to, transpose, vjp
from rlx.ops.layout import Concat, Pad, Reshape, Slice, Transpose
from rlx.ops.reduction import ReduceSum


def swapped(x: Value) -> Value:
    """The last two axes exchanged."""
    return apply(Transpose((*range(x.rank - 2), x.rank - 1, x.rank - 2)), x)  # type: ignore[no-any-return]


@linear("each", MatMul)
def _matmul(op: Op, inputs: Any, cotangents: Any, i: int) -> Value:
    """ct b^T and a^T ct, with vectors as matrices of one row or column."""
    a, b = inputs
    ct = cotangents[0]
    if b.rank == 1:
        ct = reshaped(ct, (*ct.shape, 1))
    if a.rank == 1:
        ct = reshaped(ct, (*ct.shape[: ct.rank - 1], 1, ct.shape[-1]))
    if i == 0:
        other = reshaped(b, (b.shape[0], 1)) if b.rank == 1 else b
        shape = (1, a.shape[0]) if a.rank == 1 else a.shape
        made = apply(MatMul(), ct, swapped(other))
    else:
        other = reshaped(a, (1, a.shape[0])) if a.rank == 1 else a
        shape = (b.shape[0], 1) if b.rank == 1 else b.shape
        if b.rank == 2 and other.rank > 2 and ct.rank == other.rank:
            rows = [
                reshaped(v, (_count(v.shape[:-1]), v.shape[-1])) for v in (other, ct)
            ]  # one product, no sum of many
            made = apply(MatMul(), swapped(rows[0]), rows[1])
        else:
            made = apply(MatMul(), swapped(other), ct)
    return reshaped(summed_to(made, shape), inputs[i].shape)


def _count(sizes: tuple[Size, ...]) -> Size:
    total: Size = 1
    for size in sizes:
        total = total * size
    return total


@jvp(Conv)
def _conv_jvp(op: Conv, inputs: Any, outputs: Any, tangents: Any) -> Any:
    x, w, *_ = inputs
    t, u, *bias = tangents
    terms = ([] if t is None else [apply(op, t, w)]) + ([] if u is None else [apply(op, x, u)])
    if bias and bias[0] is not None:
        terms.append(reshaped(bias[0], (bias[0].shape[0], *[1] * (x.rank - 2))))
    total = terms[0]
    for term in terms[1:]:
        total = apply(Add(), total, term)
    return total


@vjp(Conv)
def _conv_vjp(op: Conv, inputs: Any, outputs: Any, cotangents: Any) -> Any:
    return tuple(_conv_transpose(op, inputs, cotangents, i) for i in range(len(inputs)))


@transpose(Conv)
def _conv_transpose(op: Conv, inputs: Any, cotangents: Any, i: int) -> Value:
    ct = cotangents[0]
    if i == 2:
        return apply(ReduceSum((0, *range(2, ct.rank)), False), ct)  # type: ignore[no-any-return]
    return _conv_data(op, inputs, ct) if i == 0 else _conv_weight(op, inputs, ct)


def _conv_data(op: Conv, inputs: Any, ct: Value) -> Value:
    """A transposed convolution, and the border that the padding took or windows did not reach.

    The convolution itself leaves the border out where it can: making it takes half as long again for small images.
    """
    x, w = inputs[:2]
    strides, dilations, pads = op.window(x.rank)
    n = x.rank - 2
    if not all(isinstance(size, int) for size in w.shape):
        raise UnsupportedOp("conv: the gradient of an image needs a weight of known sizes")
    steps = zip(strides, ct.shape[2:], dilations, w.shape[2:], strict=True)
    reach = [s * (size - 1) + d * (k - 1) + 1 for s, size, d, k in steps]
    begins: list[Size] = [0 - pad for pad in pads[:n]]
    ends = [size + pad - full for size, pad, full in zip(x.shape[2:], pads[:n], reach, strict=True)]
    cut = [pad for pad in pads[:n] if isinstance(pad, int) and pad >= 0]
    cut += [max(0 - end, 0) for end in ends if isinstance(end, int)]
    if len(cut) == 2 * n and all(
        isinstance(r, int) and r > low + high for r, low, high in zip(reach, cut[:n], cut[n:], strict=True)
    ):
        begins, ends = [0] * n, [end + gone for end, gone in zip(ends, cut[n:], strict=True)]
    else:
        cut = [0] * (2 * n)
    made = apply(ConvTranspose(strides, dilations, tuple(cut), groups=op.groups), ct, w)
    if any(pad != 0 for pad in (*begins, *ends)):
        made = apply(Pad((0, 0, *begins, 0, 0, *ends)), made)
    return reshaped(made, x.shape)


def _conv_weight(op: Conv, inputs: Any, ct: Value) -> Value:
    """One convolution, or for each tap the product of the cotangents with the elements under it."""
    x, w = inputs[:2]
    strides, dilations, pads = op.window(x.rank)
    n = x.rank - 2
    if not all(isinstance(size, int) for size in w.shape[2:]):
        raise UnsupportedOp("conv: the gradient of a weight needs a window of known sizes")
    if any(pad != 0 for pad in pads):
        x = apply(Pad((0, 0, *pads[:n], 0, 0, *pads[n:])), x)
    way = _weight_as_convolution if _is_convolution(op, x, w, ct) else _weight_by_taps
    return way(op, x, w, ct, strides, dilations)


def _is_convolution(op: Conv, x: Value, w: Value, ct: Value) -> bool:
    """Whether the gradient of the weight is better one convolution than a product for each tap.

    Its window has the size of the images. By measurement (docs/performance-notes.md) that pays for windows in groups
    and few channels, and for steps of 1 over images that are not small; of many taps it is the only way.
    """
    sizes = (*x.shape, *w.shape, *ct.shape)
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return False
    taps, pixels = _count(w.shape[2:]), _count(ct.shape[2:])
    if taps == 1 and op.groups == 1:
        return False
    even = all(stride == 1 for stride in op.window(x.rank)[0])
    return op.groups > 1 or taps > 64 or w.shape[1] < 16 or (even and pixels >= 100)


def _weight_as_convolution(
    op: Conv, x: Value, w: Value, ct: Value, strides: tuple[int, ...], dilations: tuple[int, ...]
) -> Value:
    """x with its batch as channels, by windows of all cotangents: strides and dilations change places."""
    n, g = x.rank - 2, op.groups
    batch, _, *space = x.shape
    turned = (1, 0, *range(2, n + 2))
    apart = apply(Transpose((2, 1, 0, *range(3, n + 3))), reshaped(x, (batch, g, w.shape[1], *space)))
    images = reshaped(apart, (w.shape[1], g * batch, *space))
    made = apply(Conv(dilations, strides, groups=g), images, apply(Transpose(turned), ct))
    wanted = (w.shape[1], w.shape[0], *w.shape[2:])
    if made.shape != wanted:  # places that no window of the forward pass reaches
        made = apply(Slice((0,) * (n + 2), wanted, (1,) * (n + 2)), made)
    return apply(Transpose(turned), made)  # type: ignore[no-any-return]


def _weight_by_taps(
    op: Conv, x: Value, w: Value, ct: Value, strides: tuple[int, ...], dilations: tuple[int, ...]
) -> Value:
    """For each tap the product of the cotangents with the elements under it, summed over batch and windows."""
    batch, out, g = ct.shape[0], ct.shape[2:], op.groups
    each = (w.shape[0] // g, w.shape[1])
    rows = reshaped(ct, (batch, g, each[0], _count(out)))
    taps = []
    for tap in product(*(range(k) for k in w.shape[2:])):
        starts = (0, 0, *(k * d for k, d in zip(tap, dilations, strict=True)))
        part = apply(Slice(starts, (*x.shape[:2], *out), (1, 1, *strides)), x)
        part = apply(Reshape((batch, g, each[1], _count(out))), part)
        made = apply(ReduceSum((0,), False), apply(MatMul(), rows, swapped(part)))
        taps.append(reshaped(made, (w.shape[0], w.shape[1], 1)))
    return reshaped(apply(Concat(2), *taps) if len(taps) > 1 else taps[0], w.shape)
