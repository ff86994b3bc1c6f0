"""Random graphs of elements of 8 bits and less on both code generators, bit by bit: odd sizes, views, loops, states."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

import rlx
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, Graph, Value
from rlx.ir.shape import Dim, bounds, evaluate
from rlx.ops import control, elementwise, encoded, index, layout, quant
from rlx.ops.base import Op
from rlx.ops.mask import Trilu
from rlx.ops.scatter import ScatterNd

N, M = Dim("n", 0, 9), Dim("m", 1, 5)


class Built:
    """A graph of values of one type."""

    def __init__(self, seed: int) -> None:
        self.draw, self.rng, self.graph = random.Random(seed), np.random.default_rng(seed), Graph("narrow")
        self.dtype = DTYPES[self.draw.choice(["i4", "u4", "f4e2m1", "i2", "u2", "f8e4m3", "f8e5m2fnuz"])]
        self.values: list[Value] = []
        sizes = [1, 2, 3, 5, 7, N, M, N] if self.draw.random() < 0.6 else [0, 1, 2, 3, 5, 7, 11]
        self.graph.input("sizes", (N, M), "bool")
        for number in range(self.draw.randint(1, 2)):
            shape = tuple(self.draw.choice(sizes) for _ in range(self.draw.choice([0, 1, 1, 2, 2, 3])))
            self.values.append(self.graph.input(f"x{number}", shape, self.dtype))
        for number in range(self.draw.randint(0, 2)):
            data = self.elements(*self.fixed())
            self.values.append(self.graph.param(f"w{number}", data.shape, self.dtype, data=data))
        self.values.append(self.graph.constant(self.elements(*self.fixed())))
        state = self.graph.state("s", self.fixed(), self.dtype)
        self.values.append(state)
        for _ in range(self.draw.randint(2, 9)):
            self.draw.choice(STEPS)(self)
        users = self.graph.users()
        shown = [v for v in self.values if v not in users] + self.draw.sample(self.values, 2)
        for number, value in enumerate(shown):
            self.graph.output(value, f"y{number}")
        self.graph.update(state, self.pick(lambda v: v.shape == state.shape, state))

    def fixed(self) -> tuple[int, ...]:
        return tuple(self.draw.choice([0, 1, 2, 3, 5, 7]) for _ in range(self.draw.choice([0, 1, 2])))

    def elements(self, *shape: int) -> Array:
        return self.rng.integers(0, 1 << self.dtype.bits, shape).astype(np.uint8).view(self.dtype.numpy)

    def inputs(self, seed: int) -> dict[str, Array]:
        rng = np.random.default_rng(seed)
        extents, made = {"n": int(rng.integers(0, 10)), "m": int(rng.integers(1, 6))}, {}
        for value in self.graph.inputs:
            bits = rng.integers(0, 1 << self.dtype.bits, [evaluate(n, extents) for n in value.shape]).astype(np.uint8)
            made[value.name] = bits > 0 if value.dtype.kind == "b" else bits.view(self.dtype.numpy)
        return made

    def pick(self, fits: Callable[[Value], bool], other: Value | None = None) -> Value | None:
        """A value that fits, of later ones more often; `other` where none does."""
        found = [v for v in self.values if fits(v)]
        return found[max(self.draw.randrange(len(found)), self.draw.randrange(len(found)))] if found else other

    def some(self) -> Value:
        """A value with axes, the first of a fixed size above 0."""
        known = self.pick(lambda v: v.rank > 0 and isinstance(v.shape[0], int) and v.shape[0] > 0)
        return self.graph.constant(self.elements(3, 1)) if known is None else known

    def add(self, op: Op, *inputs: Value, regions: tuple[Graph, ...] = ()) -> tuple[Value, ...]:
        made = tuple(self.graph.add(op, *inputs, regions=regions))
        self.values.extend(v for v in made if v.dtype is self.dtype)
        return made

    def inside(self, op: Op, x: Value) -> Value:
        return self.graph.add(op, x)[0]


def _layout(b: Built) -> None:
    x = b.some()
    size = x.shape[0]
    ops: list[Op] = [
        layout.Transpose(tuple(b.draw.sample(range(x.rank), x.rank))), layout.Tile((b.draw.randint(1, 3),) * x.rank),
        layout.Pad(tuple(b.draw.randint(0, 2) for _ in range(2 * x.rank)), 1, "constant"),
        layout.Expand((b.draw.randint(1, 3), *x.shape)), layout.Split(0, (size - size // 2, size // 2)),
        layout.Slice((size - 1, *(0,) * (x.rank - 1)), x.shape, (-1, *(1,) * (x.rank - 1))),
        layout.Slice((size // 2,) + (0,) * (x.rank - 1), (size - size // 2, *x.shape[1:]), (1,) * x.rank),
    ]  # fmt: skip
    b.add(b.draw.choice([*ops, Trilu()] if x.rank > 1 else ops), x)
    b.values.append(b.draw.choice(b.values).reshape(-1))


def _join(b: Built) -> None:
    x = b.some()
    others = [b.pick(lambda v: v.rank == x.rank and v.shape[1:] == x.shape[1:], x) for _ in range(2)]
    b.add(layout.Concat(0), x, *others)


def _cut(b: Built) -> None:
    """A slice of sizes that the run decides."""
    x = b.pick(lambda v: v.rank > 0, b.some())
    starts = tuple(b.draw.randint(0, bounds(n)[0] or 0) for n in x.shape)
    b.add(layout.Slice(starts, tuple(n - at for n, at in zip(x.shape, starts, strict=True)), (1,) * x.rank), x)


def _pick_rows(b: Built) -> None:
    x = b.some()
    at = b.rng.integers(-x.shape[0], x.shape[0], b.draw.choice([(), (1,), (3,), (2, 3)]))
    b.add(index.Gather(0), x, b.graph.constant(at))


def _scatter(b: Built) -> None:
    x = b.some()
    rows = b.pick(lambda v: v.rank == x.rank and v.shape[1:] == x.shape[1:] and isinstance(v.shape[0], int))
    if rows is not None and rows.shape[0] <= x.shape[0]:
        b.add(ScatterNd(), x, b.graph.constant(b.rng.permutation(x.shape[0])[: rows.shape[0]].reshape(-1, 1)), rows)


def _compute(b: Built) -> None:
    x, scale = b.some(), b.graph.constant(np.float32(0.5))
    wide = b.graph.add(encoded.Dequantize(), x, scale)[0]
    b.add(quant.Quantize(to=b.dtype), b.graph.add(elementwise.Add(), wide, wide)[0], scale)
    b.add(elementwise.Where(), b.inside(elementwise.Cast(DTYPES["bool"]), x), x, x)
    to = DTYPES[b.draw.choice(["f32", "i8", "f16", "f64"])]
    b.graph.output(b.inside(elementwise.Cast(to), x), f"c{len(b.graph.outputs)}")


def _branch(b: Built) -> None:
    x = b.some()
    y = b.pick(lambda v: v.shape == x.shape, x)
    regions = []
    for number in range(2):
        region = Graph(f"branch{number}")
        held = [region.input(name, x.shape, b.dtype) for name in "ab"]
        region.output(held[number], "o")
        region.output(held[1 - number], "p")
        regions.append(region)
    test = b.inside(elementwise.Cast(DTYPES["bool"]), b.graph.add(layout.SizeOf(N))[0])
    b.add(control.If(), test, x, y, regions=tuple(regions))


def _loop(b: Built) -> None:
    rows = b.some()
    carry = b.pick(lambda v: v.shape == rows.shape[1:])
    if carry is None:
        return
    region = Graph("body")
    held, row = region.input("c", carry.shape, b.dtype), region.input("r", carry.shape, b.dtype)
    both = [region.add(elementwise.Cast(DTYPES["i8"]), v)[0] for v in (held, row)]
    total = region.add(elementwise.Cast(b.dtype), region.add(elementwise.Add(), *both)[0])[0]
    made = b.draw.choice([(row, held), (held, row), (total, total), (total, row)])
    for name, value in zip(("o", "p"), made, strict=True):
        region.output(value, name)
    b.add(control.Scan(1, 1), carry, rows, regions=(region,))


STEPS = (_layout, _layout, _layout, _join, _cut, _pick_rows, _scatter, _compute, _branch, _loop)


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(300))
def test_random_graph(seed: int) -> None:
    built = Built(seed)
    reference = rlx.compile(built.graph, device="reference")
    models = [rlx.compile(built.graph, device=device) for device in ("cpu", "interp")]
    for number in range(3):
        given = built.inputs(1000 * seed + number)
        wanted = {name: np.asarray(array) for name, array in reference(given).items()}
        for model in models:
            for name, made in model(given).items():
                got, want = np.asarray(made), wanted[name]
                assert (got.dtype, got.shape) == (want.dtype, want.shape), f"{model}: {name}"
                assert got.tobytes() == want.tobytes(), f"{model}: {name} of\n{built.graph}"
            state = np.asarray(model.states["s"].read())
            assert state.tobytes() == reference.states["s"].read().tobytes(), f"{model}: the state"
