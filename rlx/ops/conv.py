"""Convolution and transposed convolution over any number of spatial axes."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import Any, ClassVar

import numpy as np

from rlx.errors import OptionError, ShapeError
from rlx.ir.casting import narrowed
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import Size, evaluate, exact_div, max_size, numel, unify
from rlx.ops.base import Op, Work, check_activations, check_kind, check_same_dtype, product, register, widened
from rlx.ops.layout import Concat, Expand, Pad, Reshape, Slice, Transpose
from rlx.records import dataclass, replace

__all__ = ["Conv", "ConvTranspose", "Convolving", "WholeConv", "check_window", "per_axis", "window_count"]


def per_axis(values: tuple[Any, ...], count: int, default: int, what: str) -> tuple[Any, ...]:
    """An attribute with one entry for each of `count` axes; () stands for the default in each."""
    if not values:
        return (default,) * count
    if len(values) != count:
        raise ShapeError(f"{what}: expected {count} entries, got {values}")
    return values


def check_window(op: str, **attributes: tuple[int, ...]) -> None:
    """Raises `OptionError` unless every entry of the attributes (kernel, strides, dilations) is at least 1."""
    for name, values in attributes.items():
        if any(v < 1 for v in values):
            raise OptionError(f"{op}: {name} {values} must be at least 1")


def window_count(size: Size, kernel: Size, stride: int, dilation: int, padding: Size, why: str) -> Size:
    """How many windows fit in an axis of `size` with `padding` elements added in total.

    A guard, or `ShapeError`, where the axis may be too small for any.
    """
    reach = size + padding - dilation * (kernel - 1) - 1
    count = reach // stride + 1
    unify(max_size(count, 0), count, f"{why}: the window of {kernel} by {dilation} is larger than the padded axis")
    return count


def _check_operands(op: Op, x: TensorType, w: TensorType, b: TensorType | None) -> None:
    check_kind(op, x, "fiu")
    check_same_dtype(op, x, *(t for t in (w, b) if t is not None))
    if x.rank < 3 or w.rank != x.rank:
        raise ShapeError(f"{op.op_name}: expected x [N, C, spatial..] and a weight of the same rank, got {x} and {w}")
    if b is not None and b.rank != 1:
        raise ShapeError(f"{op.op_name}: expected a bias of one axis, got {b}")


def _ints(sizes: Sequence[Size]) -> tuple[int, ...]:
    return tuple(evaluate(size, {}) for size in sizes)


def _padded(x: Array, pads: tuple[int, ...]) -> Array:
    """x with zeros added on its spatial axes, or elements cut off where a pad is negative."""
    n = len(pads) // 2
    added = [(0, 0), (0, 0), *((max(0, b), max(0, e)) for b, e in zip(pads[:n], pads[n:], strict=True))]
    full = np.pad(x, added)
    kept = [slice(max(0, -b), s - max(0, -e)) for b, e, s in zip(pads[:n], pads[n:], full.shape[2:], strict=True)]
    return full[:, :, *kept]


def _windows(x: Array, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Array:
    """[N, C, spatial..] -> [N, C, kernel.., out..], the elements under each tap of each window."""
    n = len(kernel)
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    counts = [max(0, (size - r) // s + 1) for size, r, s in zip(x.shape[2:], reach, strides, strict=True)]
    if 0 in counts:
        return np.zeros((*x.shape[:2], *kernel, *counts), x.dtype)
    views = np.lib.stride_tricks.sliding_window_view(x, reach, axis=tuple(range(2, n + 2)))
    views = views[:, :, *(slice(None, None, s) for s in strides), *(slice(None, None, d) for d in dilations)]
    return views.transpose(0, 1, *range(n + 2, 2 * n + 2), *range(2, n + 2))


def _biased(out: Array, b: Array | None) -> Array:
    return out if b is None else out + widened(b).reshape(-1, *(1,) * (out.ndim - 2))


@dataclass(frozen=True)
class Convolving(Op):
    """Base of convolutions: `pads` are the begins, then the ends of the axes; (): strides and dilations 1, pads 0."""

    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    pads: tuple[Size, ...] = ()
    groups: int = 1

    def window(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Size, ...]]:
        """Strides, dilations and pads, with an entry for each axis, of an image of that rank."""
        n = rank - 2
        return (
            per_axis(self.strides, n, 1, "conv strides"),
            per_axis(self.dilations, n, 1, "conv dilations"),
            per_axis(self.pads, 2 * n, 0, "conv pads"),
        )

    def work(self, *x: TensorType) -> Work:
        return self.elementwise_work(2 * numel(x[1].shape[1:]), *x)


@register
class Conv(Convolving):
    """Convolution of x [N, C, spatial..] with w [O, C/groups, kernel..] and b [O]. (ONNX Conv-22)

    `pads` are the begins and then the ends of the spatial axes; (): strides and dilations 1, pads 0. Zeros are padded;
    f16 and bf16 accumulate in f32. `activations` "bf16" or "f16": x and w, of f32, are rounded to that type first.
    """

    activations: str = ""
    exact: ClassVar[bool] = False

    def infer(self, x: TensorType, w: TensorType, b: TensorType | None = None) -> TensorType:
        _check_operands(self, x, w, b)
        check_activations(self, self.activations, x)
        strides, dilations, pads = self.window(x.rank)
        check_window("conv", strides=strides, dilations=dilations, groups=(self.groups,))
        if exact_div(w.shape[0], self.groups) is None:
            raise ShapeError(f"conv: the weight {w} can't be split into {self.groups} groups of output channels")
        unify(x.shape[1], w.shape[1] * self.groups, f"conv: channels of {x} and {self.groups} x axis 1 of {w}")
        if b is not None:
            unify(b.shape[0], w.shape[0], f"conv: the bias {b} and axis 0 of the weight {w}")
        n = x.rank - 2
        space = tuple(
            window_count(
                x.shape[d + 2], w.shape[d + 2], strides[d], dilations[d], pads[d] + pads[d + n], f"conv of {x}"
            )
            for d in range(n)
        )
        return TensorType((x.shape[0], w.shape[0], *space), x.dtype)

    def reference(self, x: Array, w: Array, b: Array | None = None) -> Array:
        strides, dilations, pads = self.window(x.ndim)
        (image, w), groups, n = (narrowed(widened(t), self.activations) for t in (x, w)), self.groups, x.ndim - 2
        columns = _windows(_padded(image, _ints(pads)), w.shape[2:], strides, dilations)
        space, depth = columns.shape[n + 2 :], prod(w.shape[1:])
        columns = columns.reshape(x.shape[0], groups, depth, prod(space))
        out = product(w.reshape(groups, w.shape[0] // groups, depth), columns).reshape(x.shape[0], w.shape[0], *space)
        return _biased(out, b).astype(x.dtype)

    def lower(self, k: Any, x: Any, w: Any, b: Any = None) -> Any:
        strides, dilations, pads = self.window(x.rank)
        return k.conv(
            x, w, b, strides=strides, dilations=dilations, pads=pads, groups=self.groups, exact=self.exact,
            activations=self.activations,
        )  # fmt: skip


@register
class WholeConv(Conv):
    """A convolution of whole numbers in f32, of which every sum is below 2**24 in size: exact, in any order.

    So convolutions of 8-bit integers run on devices that are fastest in f32. Inputs and attributes: see `Conv`.
    """

    exact: ClassVar[bool] = True


@register
class ConvTranspose(Op):
    """Transposed convolution of x [N, C, spatial..] with w [C, O/groups, kernel..] and b [O]. (ONNX ConvTranspose-22)

    Each input element adds its multiple of the kernel to the output at stride steps; `pads` are then cut off the begins
    and ends, and `output_padding` elements added at the ends (with whatever falls on them). `activations`: as in
    `Conv`.
    """

    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    output_padding: tuple[int, ...] = ()
    groups: int = 1
    activations: str = ""

    def _window(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        n = rank - 2
        return (
            per_axis(self.strides, n, 1, "conv_transpose strides"),
            per_axis(self.dilations, n, 1, "conv_transpose dilations"),
            per_axis(self.pads, 2 * n, 0, "conv_transpose pads"),
            per_axis(self.output_padding, n, 0, "conv_transpose output_padding"),
        )

    def infer(self, x: TensorType, w: TensorType, b: TensorType | None = None) -> TensorType:
        _check_operands(self, x, w, b)
        check_activations(self, self.activations, x)
        strides, dilations, pads, extra = self._window(x.rank)
        check_window("conv_transpose", strides=strides, dilations=dilations, groups=(self.groups,))
        if any(p < 0 for p in (*pads, *extra)):
            raise OptionError(f"conv_transpose: pads {pads} and output_padding {extra} can't be negative")
        if not all(isinstance(size, int) for size in w.shape):
            raise ShapeError(f"conv_transpose: expected a weight of known sizes, got {w}")
        if exact_div(w.shape[0], self.groups) is None:
            raise ShapeError(f"conv_transpose: the weight {w} can't be split into {self.groups} groups of channels")
        unify(x.shape[1], w.shape[0], f"conv_transpose: channels of {x} and axis 0 of the weight {w}")
        channels = w.shape[1] * self.groups
        if b is not None:
            unify(b.shape[0], channels, f"conv_transpose: the bias {b} and the {channels} output channels")
        n = x.rank - 2
        space = []
        for d in range(n):
            full = strides[d] * (x.shape[d + 2] - 1) + dilations[d] * (w.shape[d + 2] - 1) + 1
            size = full + extra[d] - pads[d] - pads[d + n]
            unify(
                max_size(size, 0), size, f"conv_transpose: the pads {pads} cut off more than there is on axis {d + 2}"
            )
            space.append(size)
        return TensorType((x.shape[0], channels, *space), x.dtype)

    def work(self, *x: TensorType) -> Work:
        moved = self.elementwise_work(0, *x)
        return Work(2 * numel(x[0].shape) * numel(x[1].shape[1:]), moved.read, moved.written)

    def reference(self, x: Array, w: Array, b: Array | None = None) -> Array:
        strides, dilations, pads, extra = self._window(x.ndim)
        image, w = (narrowed(widened(t), self.activations) for t in (x, w))
        groups, space, channels = self.groups, x.shape[2:], w.shape[1] * self.groups
        reach = [s * (i - 1) + 1 for s, i in zip(strides, space, strict=True)]
        full = [r + d * (t - 1) + e for r, d, t, e in zip(reach, dilations, w.shape[2:], extra, strict=True)]
        out = np.zeros((x.shape[0], channels, *full), w.dtype)
        columns = image.reshape(x.shape[0], groups, x.shape[1] // groups, prod(space))
        taps = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
        for tap in np.ndindex(w.shape[2:]):
            part = product(taps[:, :, :, *tap].swapaxes(1, 2), columns)
            steps = zip(tap, dilations, reach, strides, strict=True)
            box = tuple(slice(t * d, t * d + r, s) for t, d, r, s in steps)
            out[:, :, *box] += part.reshape(x.shape[0], channels, *space)
        n = len(full)
        kept = [slice(begin, size - end) for begin, end, size in zip(pads[:n], pads[n:], full, strict=True)]
        return _biased(out[:, :, *kept], b).astype(x.dtype)

    def decompose(self, g: Graph, x: Value, w: Value, b: Value | None = None) -> Value:
        """Convolutions that make the output phases as channels, and a shuffle that interleaves them.

        Output element q (before the crop) gets x[i] w[t] for q = i * stride + t * dilation. With q = m * stride + r,
        each phase r is an ordinary convolution over m with those taps t that lead to it. One convolution makes
        all phases that have as many taps at the same places, in groups each phase has its own: no zeros are inserted
        into x or w, which would be multiplied in vain, and by what is not finite.
        """
        strides, dilations, pads, extra = self._window(x.rank)
        n = x.rank - 2
        (out,) = self.infer_types([v.type for v in (x, w, b) if v is not None])
        kernel = [evaluate(size, {}) for size in w.shape[2:]]
        together = self.groups == 1  # else a phase's channels would lie between those of others
        runs = [_phase_runs(*axis, together) for axis in zip(kernel, strides, dilations, strict=True)]
        firsts = [pads[d] // s for d, s in enumerate(strides)]  # rows m that the crop keeps, and how many
        more = [(dilations[d] * (k - 1) + extra[d] - pads[d + n]) // strides[d] for d, k in enumerate(kernel)]
        rows = tuple(x.shape[d + 2] + more[d] - firsts[d] for d in range(n))

        def made(chosen: tuple[_Phases, ...]) -> Value:
            """The phases of one run of each axis, as [N, phases.., O, m..]."""
            counts = tuple(run.phases for run in chosen)
            shape = (x.shape[0], *counts, w.shape[1] * self.groups, *rows)
            if any(run.taps == 0 for run in chosen):
                return _biases(g, b, shape, x, n)
            begins = [run.first + (run.taps - 1) * run.step - firsts[d] for d, run in enumerate(chosen)]
            ends = [more[d] - run.first for d, run in enumerate(chosen)]
            steps = tuple(run.step for run in chosen)
            conv = Conv((), () if set(steps) == {1} else steps, (*begins, *ends), self.groups, self.activations)
            bias = () if b is None else (_repeated(g, b, prod(counts)),)
            y = g.add(conv, x, _phase_weights(g, w, chosen, self.groups), *bias)[0]
            return y if prod(strides) == 1 else g.add(Reshape(shape), y)[0]

        def joined(chosen: tuple[_Phases, ...]) -> Value:
            axis = len(chosen)
            if axis == n:
                return made(chosen)
            parts = [joined((*chosen, run)) for run in runs[axis]]
            return parts[0] if len(parts) == 1 else g.add(Concat(1 + axis), *parts)[0]

        y = _interleaved(g, joined(()), strides)
        starts = [pads[d] - s * firsts[d] for d, s in enumerate(strides)]
        if not any(starts) and y.shape == out.shape:
            return y
        return g.add(Slice((0, 0, *starts), out.shape, (1,) * x.rank), y)[0]


@dataclass(frozen=True)
class _Phases:
    """Neighbouring output phases of an axis whose sums have the same `taps`: x[m - first - j * step] for each j.

    These are the taps t = number + j * apart of the kernel, `number` going from `start` on for one phase after another.
    """

    phases: int
    taps: int
    first: int
    step: int
    start: int
    apart: int


def _phase_runs(kernel: int, stride: int, dilation: int, together: bool) -> list[_Phases]:
    """All phases of an axis, in order; `together`: one run has all those that it can."""
    common = gcd(stride, dilation)
    apart, step, runs = stride // common, dilation // common, list[_Phases]()
    for phase in range(stride):
        start = next((t for t in range(apart) if t * dilation % stride == phase), kernel)
        taps = max(-(-(kernel - start) // apart), 0)
        first = (start * dilation - phase) // stride if taps else 0
        last = runs[-1] if runs else None
        follows = last is not None and (taps == 0 or start == last.start + last.phases)
        if together and last is not None and follows and (last.taps, last.first) == (taps, first):
            runs[-1] = replace(last, phases=last.phases + 1)
        else:
            runs.append(_Phases(1, taps, first, step, start, apart))
    return runs


def _biases(g: Graph, b: Value | None, shape: tuple[Size, ...], x: Value, n: int) -> Value:
    """Phases that no tap leads to: the bias alone."""
    if b is None:
        return g.add(Expand(shape), g.constant(0, x.dtype))[0]
    apart = g.add(Reshape((*(1,) * (1 + n), shape[1 + n], *(1,) * n)), b)[0]
    return g.add(Expand(shape), apart)[0]


def _phase_weights(g: Graph, w: Value, runs: tuple[_Phases, ...], groups: int) -> Value:
    """w [C, O/g, kernel..] as the weight [g * phases * O/g, C/g, taps..] of a convolution that gives these phases."""
    n = len(runs)
    c, o, *kernel = w.shape
    sizes = [-(-evaluate(size, {}) // run.apart) for size, run in zip(kernel, runs, strict=True)]
    missing = [u * run.apart - size for u, size, run in zip(sizes, kernel, runs, strict=True)]
    if any(m != 0 for m in missing):
        w = g.add(Pad((0,) * (n + 2) + (0, 0, *missing)), w)[0]
    split: list[Size] = []
    kept: list[Size] = []
    starts: list[Size] = []
    steps: list[int] = []
    for u, run in zip(sizes, runs, strict=True):
        split += [u, run.apart]
        kept += [run.taps, run.phases]
        starts += [run.taps - 1, run.start]
        steps += [-1, 1]
    shape = (groups, c // groups, o)
    apart = g.add(Reshape((*shape, *split)), w)[0]
    if split != kept or any(run.taps > 1 for run in runs):
        apart = g.add(Slice((0, 0, 0, *starts), (*shape, *kept), (1, 1, 1, *steps)), apart)[0]
    order = (0, *range(4, 4 + 2 * n, 2), 2, 1, *range(3, 3 + 2 * n, 2))
    moved = g.add(Transpose(order), apart)[0]
    phases, taps = prod(run.phases for run in runs), (run.taps for run in runs)
    return g.add(Reshape((groups * o * phases, c // groups, *taps)), moved)[0]


def _repeated(g: Graph, b: Value, times: int) -> Value:
    if times == 1:
        return b
    rows = g.add(Expand((times, *b.shape)), b)[0]
    return g.add(Reshape((b.shape[0] * times,)), rows)[0]


def _interleaved(g: Graph, y: Value, strides: tuple[int, ...]) -> Value:
    """[N, phases.., O, m..] -> [N, O, (m * stride)..] (pixel shuffle); what has one phase is [N, O, m..] already.

    The channels of a phase are next to each other: where images have their channels last, they are moved together.
    """
    n = len(strides)
    if prod(strides) == 1:
        return y
    channels, *space = y.shape[1 + n :]
    order = [0, 1 + n]
    for d in range(n):
        order += [2 + n + d, 1 + d]
    moved = g.add(Transpose(tuple(order)), y)[0]
    return g.add(Reshape((y.shape[0], channels, *(m * s for m, s in zip(space, strides, strict=True)))), moved)[0]
