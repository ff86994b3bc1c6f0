"""Windows over images: pools, convolutions, sampling."""

from __future__ import annotations

from math import prod

import numpy as np

from cliff_cases.base import (
    CASES,
    CHANNELS,
    MICROSOFT,
    SIZES,
    SMALLER,
    Case,
    Fixed,
    Net,
    Pick,
    cases,
    image,
    ints,
    net,
    scalar,
)

WINDOWS = (3, 1, 2, 5, 8, 13, 24)


@cases(
    "MaxPool",
    size=SIZES,
    window=WINDOWS,
    stride=[1, 2, 3],
    channels=CHANNELS,
    rank=[2, 1, 3],
    dtype=["f32", "f64", "f16", "u8", "i8"],
    dilation=[1, 2],
    ceil=[0, 1],
)
@cases(
    "AveragePool",
    size=SIZES,
    window=WINDOWS,
    stride=[1, 2, 3],
    channels=CHANNELS,
    rank=[2, 1, 3],
    dtype=["f32", "f64", "f16"],
    dilation=[1, 2],
    ceil=[0, 1],
)
@cases(
    "LpPool",
    size=SIZES,
    window=WINDOWS,
    stride=[1, 2, 3],
    channels=CHANNELS,
    rank=[2, 1, 3],
    dilation=[1, 2],
    ceil=[0, 1],
)
def pool(p: Pick) -> Net:
    reach = (p.window - 1) * p.dilation + 1
    shape = (1, p.channels, *(max(reach, d) for d in p.shape(p.rank, max(1, p.size // p.channels))))
    pads = [(p.window - 1) // 2] * (2 * p.rank)
    ones = [1] * p.rank
    return net(
        p.op,
        p.array(*shape),
        kernel_shape=[p.window] * p.rank,
        strides=[p.stride * o for o in ones],
        pads=pads,
        dilations=[p.dilation * o for o in ones],
        ceil_mode=p.ceil,
    )


@cases(
    "Conv",
    "FusedConv",
    size=(1 << 16, 1 << 12, 1 << 14, 1 << 18, 1 << 20),
    window=(3, 1, 2, 5, 7, 11, 17),
    stride=[1, 2],
    channels=CHANNELS,
    out=[16, 1, 3, 8, 64, 256],
    group=["1", "all", "4"],
    rank=[2, 1, 3],
    dilation=[1, 2],
    dtype=["f32", "f64", "f16"],
)
@cases(
    "ConvTranspose",
    size=(1 << 14, 1 << 10, 1 << 12, 1 << 16),
    window=(3, 1, 2, 4, 5, 8),
    stride=[2, 1, 4],
    channels=CHANNELS,
    out=[16, 1, 3, 64],
    group=["1", "all"],
    rank=[2, 1, 3],
    dilation=[1, 2],
    dtype=["f32", "f16"],
)
def conv(p: Pick) -> Net:
    group = {"1": 1, "all": p.channels, "4": 4 if p.channels % 4 == 0 else 1}[p.group]
    out = p.channels if group == p.channels else max(group, p.out // group * group)
    reach = (p.window - 1) * p.dilation + 1
    shape = (1, p.channels, *(max(reach, d) for d in p.shape(p.rank, max(1, p.size // p.channels))))
    turned = p.op == "ConvTranspose"
    weights = (
        p.weights(p.channels, out // group, *[p.window] * p.rank)
        if turned
        else p.weights(out, p.channels // group, *[p.window] * p.rank)
    )
    steps = 1 if turned else p.stride**p.rank
    domain = {"domain": MICROSOFT, "activation": "Relu"} if p.op == "FusedConv" else {}
    return net(
        p.op,
        p.array(*shape),
        weights,
        p.weights(out),
        work=prod(shape[2:]) * weights.value.size / steps,
        group=group,
        strides=[p.stride] * p.rank,
        pads=[(reach - 1) // 2] * (2 * p.rank),
        dilations=[p.dilation] * p.rank,
        kernel_shape=[p.window] * p.rank,
        **domain,
    )


@cases(
    "ConvInteger",
    "QLinearConv",
    size=(1 << 16, 1 << 12, 1 << 14, 1 << 18),
    window=(3, 1, 5, 9),
    channels=CHANNELS[:1] + CHANNELS[3:9],
    out=[16, 3, 64],
    group=["1", "all"],
)
def conv_bytes(p: Pick) -> Net:
    group = p.channels if p.group == "all" else 1
    out = p.channels if group > 1 else p.out
    x, w = p.array(*image(p), dtype="u8"), p.weights(out, p.channels // group, p.window, p.window, dtype="i8")
    attributes = {"group": group, "pads": [p.window // 2] * 4, "work": x.size * w.value.size / p.channels}
    if p.op == "ConvInteger":
        return net(p.op, x, w, scalar(50, "u8"), **attributes)
    scales = [scalar(0.1), scalar(50, "u8"), w, scalar(0.1), scalar(0, "i8"), scalar(30), scalar(100, "u8")]
    return net(p.op, x, *scales, **attributes)


@cases("DeformConv", opset=22, size=SMALLER, channels=[16, 4, 64], window=[3, 1, 5])
def deform(p: Pick) -> Net:
    shape, taps = image(p), p.window**2
    offsets = p.array(1, 2 * taps, *shape[2:], low=-1, high=1)
    return net(
        p.op,
        p.array(*shape),
        p.weights(16, p.channels, p.window, p.window),
        offsets,
        pads=[p.window // 2] * 4,
        work=prod(shape) * taps,
    )


@cases("Col2Im", size=SIZES[:-1], window=[3, 1, 2, 5], channels=[16, 1, 64])
def col2im(p: Pick) -> Net:
    n, m = (d + p.window for d in p.shape(2, max(4, p.size // p.channels // p.window**2)))
    columns = (n - p.window + 1) * (m - p.window + 1)
    return net(p.op, p.array(1, p.channels * p.window**2, columns), ints(n, m), ints(p.window, p.window))


@cases("MaxUnpool", size=SIZES, channels=[16, 1, 64])
def unpool(p: Pick) -> Net:
    n, c, h, w = image(p)
    places = (2 * np.arange(h)[:, None] * 2 * w + 2 * np.arange(w)).astype(np.int64)
    places = places + (4 * h * w * np.arange(c))[None, :, None, None]
    return net(p.op, p.array(n, c, h, w), places, kernel_shape=[2, 2], strides=[2, 2])


@cases(
    "Resize",
    "Upsample",
    size=SIZES[:-1],
    scale=[2, 0.5, 1.5, 4, 0.3],
    mode=["linear", "nearest", "cubic"],
    place=["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"],
    channels=[4, 1, 3, 64],
    dtype=["f32", "u8", "i8"],
    antialias=[0, 1],
)
def resize(p: Pick) -> Net:
    x, scales = p.array(*image(p)), Fixed(np.array([1, 1, p.scale, p.scale], np.float32))
    if p.op == "Upsample":
        return net(p.op, x, scales, mode=p.mode)
    return net(p.op, x, None, scales, mode=p.mode, coordinate_transformation_mode=p.place, antialias=p.antialias)


CASES["Upsample"] = Case(
    "Upsample", resize, {"size": SIZES[:-1], "scale": (2, 4), "mode": ("linear", "nearest"), "channels": (4, 1, 3)}, 9
)


@cases(
    "GridSample",
    opset=20,
    size=SIZES[:-1],
    mode=["linear", "nearest", "cubic"],
    padding=["zeros", "border", "reflection"],
    corners=[0, 1],
    channels=[4, 1, 3, 16, 64],
    rank=[2, 3],
    dtype=["f32", "f64"],
)
def grid_sample(p: Pick) -> Net:
    shape = image(p, p.rank)
    return net(
        p.op,
        p.array(*shape),
        p.array(1, *shape[2:], p.rank, low=-1.1, high=1.1),
        mode=p.mode,
        padding_mode=p.padding,
        align_corners=p.corners,
    )


@cases("AffineGrid", opset=20, size=SIZES[:-1], rank=[2, 3], corners=[0, 1])
def affine_grid(p: Pick) -> Net:
    return net(p.op, p.array(1, p.rank, p.rank + 1), ints(1, 1, *p.shape(p.rank)), align_corners=p.corners)


@cases("RoiAlign", "MaxRoiPool", size=SIZES[:-2], boxes=[16, 1, 100], out=[7, 1, 14], channels=[16, 1, 64])
def roi(p: Pick) -> Net:
    n, c, h, w = image(p)
    low, high = p.rng.uniform(0, 0.5, (p.boxes, 2)), p.rng.uniform(0.5, 1, (p.boxes, 2))
    rows = (np.concatenate([low, high], 1) * [w, h, w, h]).astype(np.float32)
    x = p.array(n, c, h, w)
    if p.op == "RoiAlign":
        return net(
            p.op,
            x,
            rows,
            np.zeros(p.boxes, np.int64),
            output_height=p.out,
            output_width=p.out,
            work=p.boxes * p.out**2 * c,
        )
    return net(p.op, x, np.concatenate([np.zeros((p.boxes, 1), np.float32), rows], 1), pooled_shape=[p.out, p.out])


@cases("NonMaxSuppression", size=(1024, 64, 256, 4096, 16384), classes=[1, 8], most=[100, 10, 1000])
def suppression(p: Pick) -> Net:
    corners = p.rng.uniform(0, 100, (1, p.size, 2))
    rows = np.concatenate([corners, corners + p.rng.uniform(1, 30, (1, p.size, 2))], 2).astype(np.float32)
    return net(
        p.op, rows, p.array(1, p.classes, p.size, low=0, high=1), scalar(p.most, "i64"), scalar(0.5), scalar(0.3)
    )
