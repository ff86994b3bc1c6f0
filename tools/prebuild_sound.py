"""Layers of nets for speech and sound, whose code comes with rlx: see prebuild.py.

They run over frames, of which only a run knows how many there are: convolutions along that axis, also dilated and by
channel, norms over channels, gates, attention by heads, and products and convolutions of bytes that a run rounds its
operands to. A `time` of another net is the same code: no size is in the text of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import rlx
from rlx.ir.dtype import DTYPES
from rlx.ir.value import Value
from rlx.ops.quant import ConvInteger, DynamicQuantizeLinear, MatMulInteger
from rlx.ops.recurrent import Recurrence

__all__ = ["sounds"]

Make = Callable[[rlx.Graph], None]
CHANNELS = 192

AFTER: dict[str, Callable[[Value], Value]] = {  # what follows a convolution and its bias
    "nothing": lambda x: x,
    "relu": rlx.relu,
    "leaky_relu": lambda x: rlx.leaky_relu(x, alpha=0.1),
    "gelu": rlx.gelu,
    "tanh": rlx.tanh,
}
BATCHES = (1, rlx.Dim("batch", 1, 64))


def frames() -> rlx.Dim:
    """The number of frames of a signal."""
    return rlx.Dim("time", 1, 4096)


def line(g: rlx.Graph, x: Value, name: str, outputs: int, kernel: int, dilation: int = 1, groups: int = 1) -> Value:
    """A convolution along time that keeps its length, with a bias."""
    pads = (dilation * (kernel // 2),) * 2
    w = g.param(f"{name}.w", (outputs, x.shape[1] // groups, kernel))
    b = g.param(f"{name}.b", (outputs,))
    made: Value = rlx.conv(x, w, b, pads=pads, dilations=(dilation,), groups=groups)
    return made


def rows(x: Value) -> Value:
    """Channels last."""
    made: Value = rlx.transpose(x, (0, 2, 1))
    return made


def residual_block(g: rlx.Graph, batch: Any, kernel: int, dilation: int, slope: float) -> None:
    """Activations before two convolutions of a generator of waves, sums of blocks behind them."""
    y = x = rlx.leaky_relu(line(g, g.input("x", (batch, 80, frames())), "in", 128, 7), alpha=slope)
    sums = []
    for number in range(3):
        for step, wide in enumerate((1, dilation)):
            h = line(g, rlx.leaky_relu(y, alpha=slope), f"c{number}.{step}", 128, kernel, wide)
            y = y + h
        sums.append(y)
        y = x
    g.output(line(g, rlx.leaky_relu((sums[0] + sums[1] + sums[2]) / 3, alpha=slope), "out", 1, 7))


def stretched(g: rlx.Graph, batch: Any, kernel: int, stride: int) -> None:
    """A transposed convolution between others."""
    x = rlx.leaky_relu(line(g, g.input("x", (batch, 80, frames())), "in", 128, 7), alpha=0.1)
    w, b = g.param("w", (128, 64, kernel)), g.param("b", (64,))
    x = rlx.conv_transpose(x, w, b, strides=(stride,), pads=((kernel - stride) // 2,) * 2)
    y = x + line(g, rlx.leaky_relu(x, alpha=0.1), "c", 64, 3)
    g.output(rlx.tanh(line(g, rlx.leaky_relu(y), "out", 1, 7)))


def masked(g: rlx.Graph, batch: Any, kernel: int, after: str) -> None:
    """Two convolutions whose operands are 0 beyond the end of each sequence, a residual and a norm of channels."""
    x, mask = g.input("x", (batch, CHANNELS, frames())), g.input("mask", (batch, 1, frames()))
    x = line(g, x, "in", CHANNELS, 1)
    h = AFTER[after](line(g, x * mask, "up", 4 * CHANNELS, kernel))
    y = x + line(g, h * mask, "down", CHANNELS, kernel) * mask
    for number in range(2):
        y = rows(rlx.layer_norm(rows(y), g.param(f"s{number}", (CHANNELS,)), g.param(f"b{number}", (CHANNELS,))))
        y = y + line(g, rlx.relu(line(g, y, f"a{number}", CHANNELS, 1)), f"o{number}", CHANNELS, 1)
    g.output(line(g, y * mask, "out", 2 * CHANNELS, 1) * mask)


def gated(g: rlx.Graph, batch: Any, kernel: int) -> None:
    """A convolution, tanh of one half times sigmoid of the other, and what is added to two sums."""
    x, mask = g.input("x", (batch, CHANNELS // 2, frames())), g.input("mask", (batch, 1, frames()))
    x, total = line(g, x, "in", CHANNELS, 1) * mask, None
    for number in range(3):
        h = line(g, x, f"c{number}", 2 * CHANNELS, kernel)
        a, b = rlx.split(h, axis=1, sizes=(CHANNELS, CHANNELS))
        h = line(g, rlx.tanh(a) * rlx.sigmoid(b), f"r{number}", 2 * CHANNELS, 1)
        a, b = rlx.split(h, axis=1, sizes=(CHANNELS, CHANNELS))
        x, total = (x + a) * mask, b if total is None else total + b
    assert total is not None
    a, b = rlx.split(line(g, x, "last", 2 * CHANNELS, kernel), axis=1, sizes=(CHANNELS, CHANNELS))
    total = (total + line(g, rlx.tanh(a) * rlx.sigmoid(b), "sum", CHANNELS, 1)) * mask
    mean = line(g, total, "out", CHANNELS // 2, 1) * mask
    g.output((g.input("y", (batch, CHANNELS // 2, frames())) - mean) * mask)


def by_channel(g: rlx.Graph, batch: Any, kernel: int, dilation: int, form: str) -> None:
    """A convolution of each channel, a norm over channels and products in rows, with a residual."""
    x = g.input("x", (batch, CHANNELS, frames()))
    x = line(g, x, "in", CHANNELS, 1)
    for number in range(2):
        h = rows(line(g, x, f"dw{number}", CHANNELS, kernel, dilation, CHANNELS))
        h = rlx.layer_norm(h, g.param(f"s{number}", (CHANNELS,)), g.param(f"b{number}", (CHANNELS,)))
        if form == "rounded":
            h = bytes_product(g, h, f"u{number}", 2 * CHANNELS, rlx.gelu)
            h = bytes_product(g, h, f"v{number}", CHANNELS, AFTER["nothing"])
            x = x + rows(g.param(f"gamma{number}", (CHANNELS,)) * h)
        else:
            h = line(g, rlx.gelu(rows(h)), f"pw{number}", CHANNELS, 1)
            norm = rlx.layer_norm(rows(h), g.param(f"t{number}", (CHANNELS,)), g.param(f"c{number}", (CHANNELS,)))
            x = x + rlx.gelu(rows(norm))
    y = rlx.layer_norm(rows(x), g.param("s", (CHANNELS,)), g.param("b", (CHANNELS,)))
    g.output(rlx.matmul(y, g.param("w", (CHANNELS, 80))))


def small(g: rlx.Graph, x: Value) -> tuple[Value, Value, Value]:
    """Bytes that a run rounds an operand to, their scale and zero."""
    made = g.add(DynamicQuantizeLinear(), x)
    return made[0], made[1], made[2]


def bytes_product(
    g: rlx.Graph, x: Value, name: str, n: int, after: Callable[[Value], Value], dtype: str = "i8", each: bool = False
) -> Value:
    """A product with weights of bytes, a bias, and what follows; `each`: columns have scales and zeros of their own."""
    q, scale, zero = small(g, x)
    w = g.param(f"{name}.q", (x.shape[-1], n), dtype)
    own = g.param(f"{name}.zero", (n,), dtype) if each else g.constant(np.array(0, DTYPES[dtype].numpy))
    (sums,) = g.add(MatMulInteger(), q, w, zero, own)
    factor = g.param(f"{name}.scale", (n,)) if each else g.constant(np.float32(0.0123))
    bias, sums = g.param(f"{name}.b", (n,)), rlx.cast(sums, "f32") * (scale * factor)
    # Both orders are usual, and the words of a kernel have the same. The type of the weights makes no difference.
    return after(sums + bias if dtype == "u8" else bias + sums)


def encoder(g: rlx.Graph, heads: int, dtype: str, form: str) -> None:
    """A layer of attention and products of rounded bytes, norms behind residuals."""
    width, each = 64 * heads, form == "each"
    x, time = g.input("x", (1, frames(), width)), frames()

    def product(x: Value, name: str, n: int, after: Callable[[Value], Value]) -> Value:
        return bytes_product(g, x, name, n, after, dtype, each)

    def norm(x: Value, name: str) -> Value:
        made: Value = rlx.layer_norm(x, g.param(f"{name}.s", (width,)), g.param(f"{name}.t", (width,)))
        return made

    def apart(x: Value) -> Value:
        made: Value = rlx.transpose(rlx.reshape(x, (1, time, heads, 64)), (0, 2, 1, 3))
        return made

    if form == "joined":
        joined = product(x, "qkv", 3 * width, lambda y: y)
        q, k, v = (apart(part) for part in rlx.split(joined, axis=2, sizes=(width,) * 3))
    else:
        q, k, v = (apart(product(x, name, width, lambda y: y)) for name in "qkv")
    scores = rlx.matmul(q, rlx.transpose(k, (0, 1, 3, 2))) / 8
    scores = scores + g.input("mask", (1, 1, 1, time)) if form == "each" else scores
    h = rlx.reshape(rlx.transpose(rlx.matmul(rlx.softmax(scores), v), (0, 2, 1, 3)), (1, time, width))
    x = norm(product(h, "out", width, lambda y: x + y), "first")
    h = product(x, "up", 4 * width, rlx.gelu)
    g.output(norm(product(h, "down", width, lambda y: x + y), "second"))


def bytes_line(g: rlx.Graph, kernel: int, dilation: int) -> None:
    """Convolutions along time of bytes that a run rounds to, a norm over time before them, a residual behind them."""
    x = g.input("x", (1, 256, frames()))
    x = line(g, x, "in", 256, 1)
    y = x
    for number in range(2):
        h = rlx.layer_norm(y, g.constant(np.ones((1,), np.float32)))
        style = g.input(f"style{number}", (1, 512, 1))
        a, b = rlx.split(style, axis=1, sizes=(256, 256))
        h = rlx.leaky_relu((a + 1) * h + b, alpha=0.2)
        q, step, zero = small(g, h)
        w = g.param(f"w{number}", (256, 256, kernel), "u8")
        own = g.constant(np.array(117, np.uint8))
        pads = (dilation * (kernel // 2),) * 2
        (sums,) = g.add(ConvInteger(pads=pads, dilations=(dilation,)), q, w, zero, own)
        sums = sums + g.param(f"b{number}", (1, 256, 1), "i32")
        y = rlx.cast(sums, "f32") * (step * g.constant(np.float32(0.0123)))
    y = y + x
    g.output((y + rlx.transpose(g.input("r", (1, frames(), 256)), (0, 2, 1))) / float(np.sqrt(np.float32(2))))


def cell(g: rlx.Graph, direction: str, dtype: str) -> None:
    """A recurrent layer over all frames, of weights of bytes and rounded states too."""
    count, size = 2 if direction == "bidirectional" else 1, 256
    x, n = g.input("x", (frames(), 1, size)), 4 * size
    if dtype == "f32":
        w, r = g.param("w", (count, n, size)), g.param("r", (count, n, size))
        made = rlx.lstm(x, w, r, g.param("b", (count, 2 * n)), optional=("bias",), direction=direction)
        for value in made:
            g.output(value)
        return
    inputs = bytes_product(g, rlx.reshape(x, (frames(), size)), "w", count * n, AFTER["nothing"], dtype, each=True)
    nought = g.constant(np.zeros((count, 1, size), np.float32))
    given = {
        "scale": g.param("scale", (count, n)),
        "zero": g.param("zero", (count, n), "i8"),
        "bias": g.param("bias", (count, n)),
        "initial_h": nought,
        "initial_c": nought,
    }
    if dtype == "i8":
        del given["zero"]
    op = Recurrence(tuple(given), "lstm", direction, round_state=True)
    for value in g.add(
        op, rlx.reshape(inputs, (frames(), 1, count * n)), g.param("r", (count, n, size), "i8"), *given.values()
    ):
        g.output(value)


def sounds() -> Iterator[Make]:
    """All of them."""

    def of(function: Callable[..., None], *given: Any) -> Make:
        return lambda g: function(g, *given)

    for batch in BATCHES:
        for kernel in (3, 5, 7, 11):
            yield of(residual_block, batch, kernel, 3, 0.1)
        for kernel, stride in ((16, 8), (8, 4), (4, 2)):
            yield of(stretched, batch, kernel, stride)
        for kernel in (1, 3, 9):
            for after in ("relu", "gelu"):
                yield of(masked, batch, kernel, after)
        for kernel in (3, 5):
            yield of(gated, batch, kernel)
        for kernel, dilation in ((3, 1), (3, 3), (3, 9), (5, 1), (7, 1), (7, 2), (7, 4), (7, 8)):
            for form in ("plain", "rounded") if batch == 1 else ("plain",):
                yield of(by_channel, batch, kernel, dilation, form)
    for dtype in ("i8", "u8"):
        for form in ("joined", "each", "plain"):
            yield of(encoder, 2, dtype, form)
    for kernel, dilation in ((1, 1), (3, 1), (3, 3), (5, 1), (7, 1), (11, 1)):
        yield of(bytes_line, kernel, dilation)
    for direction in ("forward", "bidirectional"):
        for dtype in ("f32", "i8", "u8"):
            yield of(cell, direction, dtype)
