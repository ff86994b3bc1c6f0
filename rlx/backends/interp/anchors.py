"""Products, convolutions and attention in NumPy, from the fields of their anchors alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from rlx.backends.codegen.walked import sizes
from rlx.ir.casting import rounded_q8
from rlx.ir.dtype import DType, dtype_of
from rlx.ir.graph import Array
from rlx.ir.shape import Size, evaluate
from rlx.kernels.expr import Expr, Var
from rlx.kernels.loops.evaluate import Evaluator
from rlx.kernels.lowering import Anchor, Attention, Contract, Conv, accumulator, out_vars

__all__ = ["anchor_result"]


def anchor_result(anchor: Anchor, out: tuple[int, ...], dtype: DType, run: Evaluator) -> Array:
    """What `Acc` stands for, computed from the fields of the anchor alone."""

    def over(e: Expr, shape: Sequence[Size]) -> Array:
        made = run.over(e, sizes(shape, run.extents), out_vars(len(shape)))
        return made.astype(accumulator(dtype_of(made.dtype)).numpy)

    match anchor:
        case Contract(k=depth):
            *batch, row, column = out_vars(len(out))
            n = evaluate(depth, run.extents)
            assert out[-2:] == sizes((anchor.m, anchor.n), run.extents)
            a = run.over(anchor.a, (*out[:-1], n), (*batch, row, Var("k"))).astype(dtype.numpy)
            b = run.over(anchor.b, (*out[:-2], n, out[-1]), (*batch, Var("k"), column)).astype(dtype.numpy)
            if anchor.zero is not None:
                a = a - over(anchor.zero, ()).astype(dtype.numpy)
            return _matmul(rounded_q8(a) if anchor.activations == "q8" else a, b)
        case Conv():
            x, w = over(anchor.x, anchor.x_shape), over(anchor.w, anchor.w_shape)
            if dtype.is_integer:  # of narrower operands
                x, w = x.astype(dtype.numpy), w.astype(dtype.numpy)
            if anchor.zero is not None:
                x = x - over(anchor.zero, ()).astype(dtype.numpy)
            return _conv(anchor, x, w, out, run.extents)
        case Attention():
            q, k, v = over(anchor.q, anchor.q_shape), over(anchor.k, anchor.k_shape), over(anchor.v, anchor.v_shape)
            wide = accumulator(dtype_of(q.dtype)).numpy
            k, v = k.astype(wide), v.astype(wide)
            keys = np.full(len(q), k.shape[2])
            if anchor.count is not None:
                keys = over(anchor.count, anchor.q_shape[:1])
            first = keys - q.shape[2] if anchor.place is None else over(anchor.place, anchor.q_shape[:1])
            sinks = None
            if anchor.sinks is not None:
                sinks = run.over(anchor.sinks, sizes(anchor.q_shape[1:2], run.extents), out_vars(2)[1:]).astype(wide)

            def score(products: Array) -> Array:
                if anchor.score is None:
                    return products
                run.acc = products
                return over(anchor.score, (*anchor.q_shape[:3], anchor.k_shape[2]))

            return _attention(anchor, q, k, v, score, (keys, first, sinks))


def _conv(anchor: Conv, x: Array, w: Array, out: tuple[int, ...], extents: Mapping[str, int]) -> Array:
    """Tap by tap: the elements of the padded x that a tap reads, times its weights, over the channels of a group."""
    pads, rank, groups = sizes(anchor.pads, extents), len(out) - 2, anchor.groups
    if 0 in out or not w.size:
        return np.zeros(out, x.dtype)
    x = _padded(x, list(zip(pads[:rank], pads[rank:], strict=True)))
    result = np.zeros((out[0], groups, out[1] // groups, math.prod(out[2:])), x.dtype)
    for tap in product(*map(range, w.shape[2:])):
        ends = (
            t * d + (n - 1) * s + 1 for t, d, n, s in zip(tap, anchor.dilations, out[2:], anchor.strides, strict=True)
        )
        starts = (t * d for t, d in zip(tap, anchor.dilations, strict=True))
        read: Any = (..., *(slice(*span) for span in zip(starts, ends, anchor.strides, strict=True)))
        window = x[read].reshape(out[0], groups, x.shape[1] // groups, -1)
        there: Any = (..., *tap)
        weights = w[there].reshape(groups, out[1] // groups, -1)
        result += _matmul(weights, window)
    return result.reshape(out)


def _padded(x: Array, pads: Sequence[tuple[int, int]]) -> Array:
    """x with zeros around its last axes; a pad below 0 takes elements away."""
    for axis, (low, high) in enumerate(pads, 2):
        keep = slice(max(-low, 0), max(x.shape[axis] - max(-high, 0), 0))
        x = x[(*[slice(None)] * axis, keep)]
        x = np.pad(x, [(max(low, 0), max(high, 0)) if d == axis else (0, 0) for d in range(x.ndim)])
    return x


def _matmul(a: Array, b: Array) -> Array:
    """The product; whole numbers of 32 bits wrap, and are multiplied as f64 where no sum can round."""
    if a.dtype.kind in "iu" and a.size and b.size:
        largest = int(np.abs(a.astype(np.int64)).max()) * int(np.abs(b.astype(np.int64)).max()) * a.shape[-1]
        if a.dtype.itemsize < 8 and largest < 1 << 53:
            return np.asarray(np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.int64).astype(a.dtype))
    return np.asarray(np.matmul(a, b))


def _attention(
    anchor: Attention,
    q: Array,
    k: Array,
    v: Array,
    score: Callable[[Array], Array],
    more: tuple[Array, Array, Array | None],
) -> Array:
    """`more`: the counts of keys and the positions of the first rows by batch entry, and the sinks by head."""
    heads, rows = q.shape[1:3]
    counts, firsts, sinks = more
    source = np.arange(heads) * k.shape[1] // heads
    result = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
    every = score(np.asarray(anchor.scale, q.dtype) * np.einsum("bhid,bhjd->bhij", q, k[:, source]))
    for b, keys in enumerate(counts.tolist()):
        at = np.arange(max(keys - k.shape[2], 0), keys)  # the positions of the keys that are there
        places = at % max(k.shape[2], 1)
        scores = every[b][:, :, places]
        position = firsts[b] + np.arange(rows)[:, None] * anchor.apart
        if anchor.causal:
            scores = np.where(at <= position, scores, -np.inf).astype(q.dtype)
        if anchor.window is not None:
            scores = np.where(at > position - anchor.window, scores, -np.inf).astype(q.dtype)
        peak = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        if sinks is not None:
            peak = np.maximum(peak, sinks[:, None, None])
        e = np.exp(scores - peak)
        total = e.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks[:, None, None] - peak)
        weights = e / total
        if anchor.empty_row == "mended":
            weights = np.where(np.isnan(weights), 0, weights)
        made = np.einsum("hij,hje->hie", weights, v[b, source][:, places])
        result[b] = np.where(peak == -np.inf, 0, made) if anchor.empty_row == "zero" else made
    return result
