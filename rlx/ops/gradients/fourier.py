"""Rule of the Fourier transform of a length that only a run tells: the transform back, times the length.

Transforms of known lengths decompose into products.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlx import ops
from rlx.ir.graph import Value
from rlx.ops.base import apply
from rlx.ops.gradients.attach import cast, linear, reshaped, size_as, wide
from rlx.ops.gradients.batching import batch
from rlx.ops.gradients.layout import box
from rlx.ops.layout import Iota, Pad
from rlx.ops.signal import Dft, DftAtRun


@linear("each", DftAtRun)
def _dft(op: DftAtRun, inputs: Any, cotangents: Any, i: int) -> Value:
    """With F the matrix of the transform, F^H / n is its inverse; a real signal has the real part of the result."""
    x, ct = inputs[0], wide(cotangents[0])
    axis, length, used, out, _ = op.geometry(x.type)
    n = size_as(length, ct)
    if op.inverse and op.onesided:
        back = apply(Dft(length, axis, onesided=True), ct)
        count = back.shape[axis]
        k = reshaped(apply(Iota(count)), (count, *[1] * (x.rank - 1 - axis)))
        once = ops.equal(k, 0) | ops.equal(k * 2, ops.size_of(size=length))  # the others stand for two
        back = back * ((2 - cast(once, ct.dtype)) / n)
    else:
        if out != length:  # frequencies that onesided left out
            ends = [length - out if d == axis else 0 for d in range(x.rank)]
            ct = apply(Pad((*[0] * x.rank, *ends)), ct)
        back = apply(Dft(length, axis, inverse=not op.inverse), ct)
        back = back / n if op.inverse else back * n
    sizes = (*(used if d == axis else size for d, size in enumerate(x.shape[:-1])), x.shape[-1])
    cut = box(back, [0] * x.rank, sizes)
    if used != x.shape[axis]:
        ends = [x.shape[axis] - used if d == axis else 0 for d in range(x.rank)]
        cut = apply(Pad((*[0] * x.rank, *ends)), cut)
    return cast(cut, x.dtype)


@batch(DftAtRun)
def _rows(op: DftAtRun, inputs: Any, batched: Any) -> Any:
    return apply(replace(op, axis=op.axis % (inputs[0].rank - 1) + 1), inputs[0])
