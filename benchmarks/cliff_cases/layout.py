"""Ops that move elements."""

from __future__ import annotations

from math import prod

import numpy as np

from cliff_cases.base import DTYPES, MICROSOFT, MOVED, SIZES, Fixed, Net, Pick, along, cases, ints, net, scalar


@cases(
    "Concat",
    "com.microsoft.QLinearConcat",
    size=SIZES,
    parts=[4, 2, 16, 64, 256],
    axis=["first", "last", "middle"],
    dtype=MOVED,
)
def concat(p: Pick) -> Net:
    n, m, k = p.shape(3, max(1, p.size // p.parts))
    axis = ("first", "middle", "last").index(p.axis)
    if p.op == "Concat":
        return net(p.op, *(p.array(n, m, k) for _ in range(p.parts)), axis=axis)
    operands = [o for _ in range(p.parts) for o in (p.array(n, m, k, dtype="u8"), scalar(0.1), scalar(50, "u8"))]
    return net("QLinearConcat", scalar(0.2), scalar(60, "u8"), *operands, axis=axis, domain=MICROSOFT)


@cases("Split", size=SIZES, parts=[4, 2, 16, 64, 256], axis=["first", "last", "middle"], dtype=MOVED)
def split(p: Pick) -> Net:
    axis = ("first", "middle", "last").index(p.axis)
    shape = list(p.shape(3, max(1, p.size // p.parts)))
    shape[axis] *= p.parts
    return net(p.op, p.array(*shape), axis=axis, num_outputs=p.parts, outputs=p.parts)


@cases("SplitToSequence", "ConcatFromSequence", size=SIZES, parts=[4, 2, 16], axis=[0, 1])
def sequence(p: Pick) -> Net:
    n, m = p.shape(2)
    made = Net()
    if p.op == "ConcatFromSequence":
        parts = made.add("SequenceConstruct", *(p.array(max(1, n // p.parts), m) for _ in range(p.parts)))
        made.add("ConcatFromSequence", *parts, axis=p.axis)
        return made
    parts = made.add(
        "SplitToSequence",
        p.array(*((n * p.parts, m) if p.axis == 0 else (n, m * p.parts))),
        ints(*[(n, m)[p.axis]] * p.parts),
        axis=p.axis,
    )
    made.add("SequenceAt", *parts, scalar(1, "i64"))
    return made


@cases("Slice", size=SIZES, axis=["last", "first", "middle"], step=[1, 2, 3, -1, -2], dtype=MOVED)
def slices(p: Pick) -> Net:
    x, axis = along(p)
    ends = (1, x.shape[axis]) if p.step > 0 else (x.shape[axis], -x.shape[axis] - 1)
    return net(p.op, x, ints(ends[0]), ints(ends[1]), ints(axis), ints(p.step))


@cases("Pad", size=SIZES, mode=["constant", "edge", "reflect", "wrap"], rank=[3, 1, 2, 4], width=[1, 3], dtype=MOVED)
def pad(p: Pick) -> Net:
    shape = tuple(max(d, 4) for d in p.shape(p.rank))
    return net(p.op, p.array(*shape), ints(*[p.width] * (2 * p.rank)), mode=p.mode)


ORDERS = ("021", "10", "102", "210", "120", "201", "0213", "0231", "0312", "3210", "1032", "02413", "543210")


@cases("Transpose", size=SIZES, order=ORDERS, dtype=MOVED)
def transpose(p: Pick) -> Net:
    return net(p.op, p.array(*p.shape(len(p.order))), perm=[int(c) for c in p.order])


@cases("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Shape", "Size", size=SIZES, dtype=MOVED)
def reshape(p: Pick) -> Net:
    n, m = p.shape(2)
    x = p.array(n, 1, m)
    extra = {"Reshape": [ints(m, n)], "Squeeze": [ints(1)], "Unsqueeze": [ints(0)]}.get(p.op, [])
    return net(p.op, x, *extra)


@cases("Expand", size=SIZES, shapes=["row", "column", "scalar"], dtype=MOVED)
def expand(p: Pick) -> Net:
    n, m = p.shape(2)
    shape = {"row": (1, m), "column": (n, 1), "scalar": (1, 1)}[p.shapes]
    return net(p.op, p.array(*shape), ints(n, m))


@cases("Tile", size=SIZES, repeats=[2, 1, 3, 8, 64], axis=["last", "first", "middle", "all"], dtype=MOVED)
def tile(p: Pick) -> Net:
    axis, counts = ("first", "middle", "last", "all").index(p.axis), [1, 1, 1]
    which = range(3) if axis == 3 else [axis]
    for i in which:
        counts[i] = p.repeats
    return net(p.op, p.array(*p.shape(3, max(1, p.size // prod(counts)))), ints(*counts))


@cases("DepthToSpace", "SpaceToDepth", size=SIZES, block=[2, 3, 4, 8], channels=[1, 3, 16], dtype=["f32", "f64", "u8"])
def blocks(p: Pick) -> Net:
    c, b = p.channels, p.block
    h, w = p.shape(2, max(1, p.size // (c * b * b)))
    return net(p.op, p.array(1, *((c * b * b, h, w) if p.op == "DepthToSpace" else (c, h * b, w * b))), blocksize=b)


@cases("ReverseSequence", size=SIZES, time=[0, 1], dtype=MOVED)
def reverse_sequence(p: Pick) -> Net:
    x = p.array(*p.shape(3))
    return net(
        p.op, x, p.below(x.shape[p.time] + 1, x.shape[1 - p.time]).clip(1), time_axis=p.time, batch_axis=1 - p.time
    )


@cases("CenterCropPad", size=SIZES, grow=[1, 0])
def crop_pad(p: Pick) -> Net:
    n, m = p.shape(2)
    return net(p.op, p.array(n, m), ints(n + 6, m + 6) if p.grow else ints(max(1, n - 6), max(1, m - 6)))


@cases("Trilu", size=SIZES, upper=[0, 1], dtype=MOVED)
def trilu(p: Pick) -> Net:
    return net(p.op, p.array(*p.shape(2)), upper=p.upper)


@cases("EyeLike", size=SIZES, dtype=["f32", "i64"])
def eye(p: Pick) -> Net:
    return net(p.op, p.array(*p.shape(2)))


@cases("Range", size=SIZES, dtype=["f32", "i64", "f64"])
def ranges(p: Pick) -> Net:
    return net(p.op, *(np.array(v, DTYPES[p.dtype]) for v in (0, p.size, 1)), work=p.size)


@cases("ConstantOfShape", size=SIZES)
def constant_of_shape(p: Pick) -> Net:
    return net(p.op, np.array([p.size], np.int64), work=p.size)


@cases("OneHot", size=SIZES, depth=[64, 2, 1000], axis=[-1, 0], dtype=["f32", "i64"])
def one_hot(p: Pick) -> Net:
    values = Fixed(np.array([0, 1], DTYPES[p.dtype]))
    return net(p.op, p.below(p.depth, max(1, p.size // p.depth)), ints(p.depth), values, axis=p.axis)
