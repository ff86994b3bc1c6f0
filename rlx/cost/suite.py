"""The graphs that a calibration times: each kind of kernel, small and large."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rlx.ir.dtype import dtype_of
from rlx.ir.graph import Array, Graph, Value
from rlx.ir.shape import Dim
from rlx.ops.base import OPS

__all__ = [
    "dense",
    "functions",
    "heavy",
    "links",
    "recurrent",
    "resident_product",
    "resident_stream",
    "stream",
    "tiny",
    "trials",
]

Shapes = Sequence[tuple[int, ...]]


def dense(weights: Array) -> Graph:
    """x [m, k] times weights [k, n] of the same type, for any m."""
    g = Graph("dense")
    dtype = dtype_of(weights.dtype)
    w = g.param("w", weights.shape, dtype, data=weights)
    g.output(g.input("x", (Dim("m"), weights.shape[0]), dtype) @ w, "z")
    return g


def stream() -> Graph:
    """x + y over vectors of any length."""
    g = Graph("stream")
    n = Dim("n")
    g.output(g.input("x", (n,)) + g.input("y", (n,)), "z")
    return g


def resident_product(x: Array, y: Array) -> Graph:
    """The largest element of a product of two params: nothing is copied from the host, and one number to it."""
    g = Graph("resident product")
    product = g.param("x", x.shape, data=x) @ g.param("y", y.shape, data=y)
    largest: Any = OPS["reduce_max"]
    g.output(g.add(largest(axes=(0, 1), keepdims=False), product)[0], "z")
    return g


def resident_stream(x: Array, y: Array) -> Graph:
    """The largest element of a sum of two vectors that are params."""
    g = Graph("resident stream")
    total = g.param("x", x.shape, data=x) + g.param("y", y.shape, data=y)
    largest: Any = OPS["reduce_max"]
    g.output(g.add(largest(axes=(0,), keepdims=False), total)[0], "z")
    return g


def functions(names: Sequence[str]) -> Graph:
    """Each scalar function of its own over a vector in (0, 1)."""
    g = Graph("functions")
    x, y = (g.input(name, (Dim("n"),)) for name in "xy")
    for name in names:
        op: Any = OPS[name]()
        given = (x, y) if name in ("add", "div", "pow") else (x,)
        g.output(g.add(op, *given)[0], name)
    return g


def tiny(outputs: int = 1) -> Graph:
    """Sixteen sums for each output: what remains is the run itself."""
    g = Graph("tiny")
    x = g.input("x", (16,))
    for i in range(outputs):
        g.output(x + float(i + 1), f"y{i}")
    return g


def links(count: int) -> Graph:
    """Half as many times a small sum of rows and what needs all of it: what remains is starting so many kernels."""
    g = Graph("links")
    x = g.input("x", (16, 16))
    total: Any = OPS["reduce_sum"]
    for _ in range(count // 2):
        x = x + g.add(total(axes=(0, 1), keepdims=True), x)[0]
    g.output(x, "y")
    return g


def heavy(count: int) -> Graph:
    """So many hyperbolic tangents of each element of a vector of any length."""
    g = Graph("heavy")
    x = g.input("x", (Dim("n"),))
    for _ in range(count):
        x = g.add(OPS["tanh"](), x)[0]
    g.output(x, "y")
    return g


class _Trial:
    """A graph over random inputs and weights."""

    def __init__(self, name: str) -> None:
        self.graph = Graph(name)
        self.rng = np.random.default_rng(0)
        self.inputs: list[Array] = []

    def input(self, *shape: int) -> Value:
        self.inputs.append(self.rng.standard_normal(shape, np.float32))
        return self.graph.input(f"x{len(self.inputs)}", shape)

    def weight(self, *shape: int) -> Value:
        return self.graph.param(f"w{len(self.graph.params)}", shape, data=self.rng.standard_normal(shape, np.float32))

    def op(self, name: str, *given: Value, **attributes: Any) -> Value:
        return self.graph.add(OPS[name](**attributes), *given)[0]

    def out(self, value: Value) -> None:
        self.graph.output(value, f"y{len(self.graph.outputs)}")


Trial = Callable[[_Trial], None]


def _convolution(
    c: int, o: int, size: int, kernel: int, stride: int = 1, groups: int = 1, planes: bool = False, skip: bool = False
) -> Trial:
    """With `planes` its result leaves the graph, else the device may keep it in a layout of its own; `skip` adds x."""

    def make(t: _Trial) -> None:
        pad = kernel // 2
        w = t.weight(o, c // groups, kernel, kernel)
        x = t.input(1, c, size, size)
        y = t.op("conv", x, w, t.weight(o), strides=(stride,) * 2, pads=(pad,) * 4, groups=groups)
        y = t.op("relu", y) + x if skip else t.op("relu", y)
        t.out(y if planes else t.op("reduce_mean", y, axes=(2, 3), keepdims=False))

    return make


def _line(c: int, o: int, length: int, taps: int, lines: int = 0) -> Trial:
    """A window along one axis; `lines`: along the first of two, the second of so many."""

    def make(t: _Trial) -> None:
        second = (1,) if lines else ()
        shape = (length, lines) if lines else (length,)
        ones = (1,) * len(shape)
        pads = (taps // 2, *(0 for _ in second)) * 2
        y = t.op("conv", t.input(1, c, *shape), t.weight(o, c, taps, *second), strides=ones, pads=pads)
        t.out(t.op("reduce_mean", y, axes=(2, 3)[: len(shape)], keepdims=False))

    return make


def _bytes(c: int, o: int, size: int, window: int, stride: int = 1) -> Trial:
    """A quantised image: a product of its pixels, a window of each channel and a product again."""

    def make(t: _Trial) -> None:
        number = t.graph.constant
        scale, middle, zero = number(np.float32(0.02)), number(np.uint8(128)), number(np.int8(0))

        def conv(x: Value, *shape: int, **attributes: Any) -> Value:
            w = number(t.rng.integers(-64, 64, shape, np.int8))
            scales = number(t.rng.uniform(0.001, 0.01, shape[0]).astype(np.float32))
            return t.op("qlinear_conv", x, scale, middle, w, scales, zero, scale, middle, **attributes)

        x = t.op("quantize", t.input(1, c, size, size), scale, middle)
        y = conv(conv(x, o, c, 1, 1), o, 1, window, window, strides=(stride,) * 2, pads=(window // 2,) * 4, groups=o)
        y = t.op("dequantize", conv(y, c, o, 1, 1), scale, middle)
        t.out(t.op("reduce_mean", y, axes=(2, 3), keepdims=False))

    return make


def _residual(c: int, size: int) -> Trial:
    """A convolution of pixels whose input is added to its result, as the device keeps both."""

    def make(t: _Trial) -> None:
        x = t.input(1, c, size, size)
        for _ in range(2):
            y = t.op("conv", x, t.weight(c, 1, 3, 3), pads=(1, 1, 1, 1), groups=c)
            x = t.op("relu", t.op("conv", y, t.weight(c, c, 1, 1), t.weight(c))) + x
        t.out(x)

    return make


def _attention(heads: int, rows: int, keys: int, depth: int) -> Trial:
    def make(t: _Trial) -> None:
        q, k, v = t.input(1, heads, rows, depth), t.input(1, heads, keys, depth), t.input(1, heads, keys, depth)
        t.out(t.op("attention", q, k, v, scale=0.1, causal=False))

    return make


def _rows(rows: int, columns: int) -> Trial:
    def make(t: _Trial) -> None:
        x = t.input(rows, columns)
        t.out(t.op("softmax", x, axis=-1))
        t.out(t.op("layer_norm", x, t.weight(columns), t.weight(columns), axis=-1))
        t.out(t.op("reduce_sum", x, axes=(-1,), keepdims=False))
        t.out(t.op("reduce_max", x, axes=(0,), keepdims=False))

    return make


def _maps(rows: int, columns: int) -> Trial:
    def make(t: _Trial) -> None:
        x, y = t.input(rows, columns), t.input(rows, columns)
        t.out(x * y + 1.0)
        t.out(t.op("gelu", x))
        t.out(t.op("relu", x + t.weight(columns)))
        t.out(t.op("sigmoid", x) * y + t.op("exp", y * 0.5) - x)
        t.out(t.op("transpose", y, perm=(1, 0)))
        t.out(t.op("concat", x, y, axis=1))

    return make


def _dense(m: int, k: int, n: int) -> Trial:
    def make(t: _Trial) -> None:
        t.out(t.op("relu", t.input(m, k) @ t.weight(k, n) + t.weight(n)))

    return make


def _byte_weights(m: int, k: int, n: int) -> Trial:
    """A product with weights of bytes that have a scale for each column."""

    def make(t: _Trial) -> None:
        weights = t.graph.constant(t.rng.integers(-127, 128, (k, n), np.int8))
        t.out(t.op("relu", t.input(m, k) @ t.op("dequantize", weights, t.weight(n), axis=1)))

    return make


def _recurrent(steps: int, size: int, hidden: int) -> Trial:
    def make(t: _Trial) -> None:
        x = t.input(steps, 1, size)
        t.out(t.op("lstm", x, t.weight(1, 4 * hidden, size), t.weight(1, 4 * hidden, hidden)))
        t.out(t.op("gru", x, t.weight(1, 3 * hidden, size), t.weight(1, 3 * hidden, hidden)))

    return make


def recurrent(steps: int) -> tuple[Graph, list[Array]]:
    """A small LSTM of so many steps, and its input."""
    t = _Trial("steps")
    t.out(t.op("lstm", t.input(steps, 1, 8), t.weight(1, 32, 8), t.weight(1, 32, 8)))
    return t.graph, t.inputs


def trials(quick: bool) -> Iterator[tuple[Graph, list[Array]]]:
    """Graphs and their inputs; `quick`: fewer, for a device that takes long to compile."""
    made: dict[str, list[Trial]] = {
        "rows": [_rows(*s) for s in ((4, 24), (6, 240), (600, 24), (96, 200), (256, 768))],
        "recurrent": [_recurrent(*s) for s in ((6, 24, 24), (40, 24, 24), (20, 64, 96), (48, 128, 128))],
        "maps": [_maps(*s) for s in ((2, 24), (8, 140), (96, 200), (512, 700))],
        "pointwise": [
            _convolution(*s, 1)
            for s in ((12, 20, 12), (24, 40, 20), (16, 24, 40), (80, 80, 14), (96, 96, 20), (200, 80, 7), (32, 48, 160))
        ],
        "conv": [
            _convolution(*s)
            for s in (
                (3, 16, 96, 3, 1), (3, 32, 24, 3, 1), (3, 16, 96, 3, 2), (16, 24, 40, 3, 2), (48, 48, 12, 3, 2),
                (8, 16, 14, 3, 2), (3, 32, 48, 7, 2), (16, 24, 200, 3, 2),
            )
        ],
        "depthwise": [
            _convolution(c, c, n, 3, 1, c)
            for c, n in ((24, 12), (80, 14), (16, 40), (48, 28), (96, 56), (240, 10))
        ]
        + [_convolution(c, c, n, 5, 1, c) for c, n in ((128, 14), (256, 7))]
        + [_convolution(c, c, n, 3, 2, c) for c, n in ((32, 56), (128, 14))]
        + [_convolution(32, 32, 160, 3, 1, 32)],
        "attention": [
            _attention(*s)
            for s in ((2, 10, 10, 32), (8, 12, 12, 64), (2, 60, 60, 64), (4, 128, 128, 32), (8, 192, 192, 64))
        ],
        "planes": [
            *(_convolution(*s, 1, planes=True) for s in ((12, 20, 12), (24, 32, 60))),
            *(_convolution(c, c, n, 1, planes=True, skip=True) for c, n in ((24, 14), (80, 20), (32, 48))),
            *(_convolution(*s, planes=True) for s in ((3, 16, 40, 3, 1), (16, 24, 14, 3, 2))),
            *(_convolution(c, c, n, 3, 1, c, planes=True) for c, n in ((24, 12), (64, 40))),
            *(_convolution(*s, 3, planes=True) for s in ((16, 16, 16), (32, 48, 40))),
        ],
        "winograd": [_convolution(*s, 3) for s in ((8, 8, 40), (16, 16, 16), (24, 48, 24), (64, 64, 28), (16, 16, 99))],
        "lines": [
            _line(*s)
            for s in (
                (16, 24, 60, 3), (24, 24, 60, 3, 32), (96, 96, 12, 3), (64, 64, 100, 5), (48, 48, 24, 3, 20),
                (128, 128, 400, 3), (256, 256, 256, 5),
            )
        ],
        "residual": [_residual(*s) for s in ((24, 10), (48, 20), (96, 14), (32, 72))],
        "step": [_attention(*s) for s in ((4, 1, 48, 32), (8, 1, 512, 64))],
        "dense": [
            _dense(*s)
            for s in ((1, 96, 80), (24, 200, 120), (7, 400, 400), (300, 48, 350), (96, 384, 384), (200, 768, 256))
        ],
    }  # fmt: skip
    if not quick:
        made["bytes"] = [_bytes(*s) for s in ((16, 40, 12, 3), (24, 96, 40, 3), (32, 160, 28, 5), (96, 240, 14, 3, 2))]
        made["byte weights"] = [
            _byte_weights(*s) for s in ((1, 200, 240), (8, 400, 400), (96, 384, 384), (128, 768, 768))
        ]
    groups = {name: group[len(group) // 2 :: 2] if quick else group for name, group in made.items()}
    # The largest, the smallest, then the others: if time is up early, what takes long is known, not what takes nothing.
    groups = {name: [*group[-1:0:-1][:1], group[0], *group[-2:0:-1]] for name, group in groups.items()}
    for turn in range(max(map(len, groups.values()))):  # one of each kind before the second of any
        for name, group in groups.items():
            if turn < len(group):
                t = _Trial(name)
                group[turn](t)
                yield t.graph, t.inputs
