"""Indices and sorting."""

from __future__ import annotations

from math import prod

import numpy as np

from cliff_cases.base import AXES, DTYPES, MOVED, SIZES, Array, Net, Pick, along, cases, ints, net


@cases("Gather", size=SIZES, row=[64, 1, 4, 1024], table=[1000, 10, 100000], axis=[0, 1], dtype=MOVED)
def gather(p: Pick) -> Net:
    rows = min(p.table, max(1, (1 << 22) // p.row))
    shape = (rows, p.row) if p.axis == 0 else (p.row, rows)
    return net(p.op, p.array(*shape), p.below(rows, max(1, p.size // p.row)), axis=p.axis, work=p.size)


@cases("GatherElements", "ScatterElements", size=SIZES, axis=AXES[:3], dtype=MOVED)
def elements(p: Pick) -> Net:
    x, axis = along(p)
    order = np.argsort(p.rng.random(x.shape), axis)
    return net(p.op, x, order, *([p.array(*x.shape)] if p.op == "ScatterElements" else []), axis=axis)


@cases("GatherND", "ScatterND", size=SIZES, row=[64, 1, 4, 1024], depth=[1, 2], dtype=MOVED)
def gather_nd(p: Pick) -> Net:
    count = max(1, p.size // p.row)
    lead = p.shape(p.depth, max(2, count))
    places = np.stack(np.unravel_index(p.rng.permutation(prod(lead))[:count], lead), -1)
    return net(p.op, p.array(*lead, p.row), places, *([p.array(len(places), p.row)] if p.op == "ScatterND" else []))


@cases("TensorScatter", opset=24, size=SIZES, row=[64, 8])
def tensor_scatter(p: Pick) -> Net:
    rows = max(2, p.size // p.row)
    return net(p.op, p.array(1, rows, p.row), p.array(1, 1, p.row), np.zeros(1, np.int64))


@cases("Compress", "NonZero", size=SIZES, share=[0.5, 0.01, 0.99], rank=[2, 1, 3], dtype=["f32", "u8", "i64"])
def chosen(p: Pick) -> Net:
    shape = p.shape(p.rank)
    mask = p.rng.random(shape) < p.share
    return (
        net(p.op, p.array(*shape), mask.reshape(-1)) if p.op == "Compress" else net(p.op, mask.astype(DTYPES[p.dtype]))
    )


VALUES = ("random", "equal", "few", "sorted", "reverse")


def filled(p: Pick, *shape: int) -> Array:
    """Values as sorting meets them."""
    x = p.array(*shape)
    match p.order:
        case "equal":
            return np.zeros_like(x)
        case "few":
            return p.below(4, *shape).astype(x.dtype)
        case "sorted":
            return np.sort(x, axis=-1)
        case "reverse":
            return np.ascontiguousarray(np.sort(x, axis=-1)[..., ::-1])
    return x


@cases(
    "TopK",
    size=SIZES,
    k=[8, 1, 64, 1024],
    row=[0, 64, 1024],
    order=VALUES,
    axis=[-1, 0],
    largest=[1, 0],
    sort=[1, 0],
    dtype=["f32", "f64", "i64", "i32"],
)
def top_k(p: Pick) -> Net:
    row = max(p.k, p.row or p.size)
    shape = (max(1, p.size // row), row)
    return net(
        p.op,
        filled(p, *(shape if p.axis else shape[::-1])),
        ints(p.k),
        axis=p.axis,
        largest=p.largest,
        sorted=p.sort,
        outputs=2,
    )


@cases(
    "Unique",
    size=SIZES[:-1],
    order=("few", *[v for v in VALUES if v != "few"]),
    sort=[1, 0],
    axis=["none", "0", "1"],
    dtype=["f32", "i64", "f64", "i8"],
)
def unique(p: Pick) -> Net:
    x = filled(p, p.size) if p.axis == "none" else filled(p, *p.shape(2))
    return net(p.op, x, sorted=p.sort, outputs=4, **({} if p.axis == "none" else {"axis": int(p.axis)}))
