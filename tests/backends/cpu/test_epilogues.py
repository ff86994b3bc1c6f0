"""Products and convolutions of random shapes, types and operands with random work on their sums.

Each is compared with the reference, and its bits with 1, 2 and 5 threads are equal.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.reference import run_graph
from rlx.ir.dtype import DTYPES
from rlx.ir.encoding import encoding_named
from rlx.ir.graph import Array, Graph, Value
from rlx.ir.shape import Dim, Shape, evaluate
from rlx.ops import activation, contract, elementwise, layout
from rlx.ops.base import Op
from rlx.ops.conv import Conv

SIZES = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 33, 64, 65, 100, 129)
WITHIN = {"f64": 1e-11, "f32": 2e-4, "f16": 2e-2, "bf16": 0.15}  # by the coarsest type, absolute and relative
UNARY: Sequence[Op] = (
    activation.Gelu(), activation.Gelu("tanh"), activation.Silu(), activation.Relu(), activation.LeakyRelu(0.1),
    activation.HardSwish(), elementwise.Tanh(), elementwise.Sigmoid(), elementwise.Neg(),
)  # fmt: skip


class Built:
    """A random graph with its inputs; sizes of the first operand's rows may be decided by the run."""

    def __init__(self, seed: int) -> None:
        self.draw, self.rng = random.Random(seed), np.random.default_rng(seed)
        self.graph, self.inputs = Graph("epilogue"), dict[str, Array]()
        self.dtype = DTYPES[self.draw.choice(["f32", "f32", "f32", "f64", "f16", "bf16"])]
        self.rows = self.draw.choice(SIZES)
        self.value, self.channels = self.product() if self.draw.random() < 0.75 else self.convolution()
        for number in range(self.draw.randint(0, 5)):
            if self.value.dtype.is_float:
                self.step(number)
        self.graph.output(self.value, "y")

    def leaf(self, name: str, shape: Shape, dtype: Any, param: bool = False, scale: float = 1.0) -> Value:
        sizes = [evaluate(n, {"rows": self.rows}) for n in shape]
        data = np.asarray(self.rng.standard_normal(sizes) * scale).astype(dtype.numpy)
        if param:
            return self.graph.param(name, sizes, dtype, data=data)
        self.inputs[name] = data
        return self.graph.input(name, shape, dtype)

    def turned(self, name: str, shape: Shape, turn: bool, param: bool, scale: float) -> Value:
        """An operand, perhaps the transpose of a leaf."""
        if not turn:
            return self.leaf(name, shape, self.dtype, param, scale)
        x = self.leaf(name, (*shape[:-2], shape[-1], shape[-2]), self.dtype, param, scale)
        return self.graph.add(layout.Transpose((*range(x.rank - 2), x.rank - 1, x.rank - 2)), x)[0]

    def product(self) -> tuple[Value, int | None]:
        draw = self.draw
        rows = Dim("rows", 0, 200) if draw.random() < 0.3 else self.rows
        depth, columns = draw.choice((*SIZES, 0)), draw.choice(SIZES)
        batch: Shape = draw.choice([(), (), (2,), (3, 2), (1,)])
        if draw.random() < 0.2:
            self.dtype, depth = DTYPES["f32"], draw.choice([32, 64, 96, 256])
            encoding, data = draw.choice(["q8_0", "q4_0"]), self.rng.standard_normal((columns, depth)) / depth**0.5
            stored = encoding_named(encoding).encode(data.astype(np.float32))
            w = self.graph.param("w", (columns, depth), "f32", encoding=encoding, data=stored)
            w = self.graph.add(layout.Transpose((1, 0)), w)[0]
        else:
            shape = (*draw.choice([(), batch, (1,)]), depth, columns)
            w = self.turned("w", shape, draw.random() < 0.3, draw.random() < 0.7, max(depth, 1) ** -0.5)
        a = self.turned("a", (*batch, rows, depth), draw.random() < 0.25, False, 1.0)
        y = self.graph.add(contract.MatMul(), a, w)[0]
        return y, y.rank - 1

    def convolution(self) -> tuple[Value, int | None]:
        draw = self.draw
        channels, made, groups = draw.choice([1, 2, 3, 4, 8, 16, 17]), draw.choice([1, 2, 3, 8, 16, 17, 32]), 1
        if draw.random() < 0.3:
            groups, made = channels, channels * draw.choice([1, 2])
        window = draw.choice([(1, 1), (3, 3), (1, 3), (5, 5), (2, 2)])
        image = (draw.choice([5, 6, 7, 9, 16]), draw.choice([5, 6, 7, 9, 17]))
        stride, pad, dilation = draw.choice([1, 1, 2]), draw.choice([0, 1, 2]), draw.choice([1, 1, 2])
        if any((k - 1) * dilation + 1 > n + 2 * pad for k, n in zip(window, image, strict=True)):
            dilation = 1
        x = self.leaf("a", (draw.choice([1, 2]), channels, *image), self.dtype)
        shape = (made, channels // groups, *window)
        w = self.leaf("w", shape, self.dtype, draw.random() < 0.85, float(np.prod(shape[1:])) ** -0.5)
        op = Conv((stride, stride), (dilation, dilation), (pad,) * 4, groups)
        return self.graph.add(op, x, w)[0], 1

    def step(self, number: int) -> None:
        """One more operation on the value."""
        g, draw, x = self.graph, self.draw, self.value
        match draw.choice(["bias", "rows", "residual", "unary", "unary", "cast", "transpose", "scale", "flat", "show"]):
            case "bias" if self.channels is not None:
                shape = [n if d == self.channels else 1 for d, n in enumerate(x.shape)]
                if all(isinstance(n, int) for n in shape):
                    b = self.leaf(f"b{number}", (shape[self.channels],), x.dtype, draw.random() < 0.6)
                    self.value = g.add(elementwise.Add(), x, b.reshape(*shape[self.channels :]))[0]
            case "rows" if x.rank > 1:
                by = self.leaf(f"s{number}", (*x.shape[:-1], 1), x.dtype)
                self.value = g.add(elementwise.Mul(), x, by)[0]
            case "residual":
                both = [x, self.leaf(f"r{number}", x.shape, x.dtype)]
                draw.shuffle(both)
                self.value = g.add(elementwise.Add(), *both)[0]
            case "unary":
                self.value = g.add(draw.choice(UNARY), x)[0]
            case "cast":
                to = DTYPES[draw.choice(["f16", "f64", "f32", "bf16", "i32"])]
                self.value = g.add(elementwise.Cast(to), x)[0]
            case "transpose":
                perm = draw.sample(range(x.rank), x.rank)
                self.value = g.add(layout.Transpose(tuple(perm)), x)[0]
                self.channels = None if self.channels is None else perm.index(self.channels)
            case "scale":
                self.value = g.add(elementwise.Mul(), x, g.constant(np.asarray(0.37).astype(x.dtype.numpy)))[0]
            case "flat":
                self.value, self.channels = x.reshape(-1), None
            case "show":
                g.output(x, f"y{number}")


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(300))
def test_random_epilogue(seed: int) -> None:
    built = Built(seed)
    graph, inputs = built.graph, built.inputs
    wanted = run_graph(graph, inputs)
    within = max(WITHIN[v.dtype.name] for v in graph.values() if v.dtype.is_float)
    if any(p.type.encoding is not None for p in graph.params):
        within = max(within, 2e-3)
    first: dict[str, bytes] = {}
    for threads in (1, 2, 5):
        model = rlx.compile(graph, device="cpu", threads=threads)
        for _ in range(2):
            got = {name: np.asarray(array) for name, array in model(inputs).items()}
            bits = {name: array.tobytes() for name, array in got.items()}
            first = first or bits
            assert bits == first, f"other bits with {threads} threads, or in the second run"
    for name, want in wanted.items():
        assert (got[name].dtype, got[name].shape) == (want.dtype, want.shape), name
        step = 0 if want.dtype.kind != "i" else 1  # a sum beside a whole number
        np.testing.assert_allclose(
            got[name].astype(np.float64), want.astype(np.float64), within, within + step, err_msg=f"{name} of\n{graph}"
        )
