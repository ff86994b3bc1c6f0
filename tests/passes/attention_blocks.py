"""Random attention blocks, as ONNX files: how exporters write them, and how they don't.

Operands and factors are multiples of powers of two, so scores are exact in whatever order factors are applied, and no
block adds two numbers, which `algebra` may add up: what a pass makes of a block gives the same scores as the file, to
the last bit, however large a masking number swallows them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]
TYPES = {"f64": (np.float64, TensorProto.DOUBLE), "f32": (np.float32, TensorProto.FLOAT)}
TYPES["f16"] = (np.float16, TensorProto.FLOAT16)
FILLS = (-np.inf, -1e4, -65504.0, float(np.finfo(np.float32).min), -1e9, -1.0, 0.0, 3.0, 2e4)


@dataclass
class Block:
    """One block: `model` is the file; `rounds`: to f16 somewhere, or from f64 to f32."""

    dtype: str
    rounds: bool
    inputs: dict[str, Array] = field(default_factory=dict)
    nodes: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    model: bytes = b""


class _Maker:
    def __init__(self, seed: int, dtype: str | None) -> None:
        self.rng = rng = np.random.default_rng(seed)
        chosen = dtype or str(rng.choice(["f32", "f32", "f32", "f32", "f32", "f64", "f16"]))
        self.block = Block(chosen, chosen == "f16")
        self.numpy, self.onnx = TYPES[chosen]
        self.count = 0
        self.added = False  # a number
        self.batch, self.own = int(rng.integers(1, 3)), int(rng.integers(1, 3))
        self.times = int(rng.choice([1, 1, 2, 3]))
        self.rank = 3 if self.times == self.own == 1 and rng.random() < 0.5 else 4
        self.rows, self.keys = (int(rng.choice([1, 2, 3, 5, 8, 17])) for _ in range(2))
        self.depth, self.width = (int(rng.choice([1, 4, 8, 9])) for _ in range(2))
        self.heads = self.own * self.times

    # ---- values

    def maybe(self, chance: float) -> bool:
        return bool(self.rng.random() < chance)

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        self.count += 1
        name = f"t{self.count}"
        self.block.nodes.append(helper.make_node(op, inputs, [name], **attributes))
        return name

    def constant(self, array: Array) -> str:
        self.count += 1
        name = f"c{self.count}"
        self.block.constants.append(numpy_helper.from_array(array, name))
        return name

    def number(self, value: float) -> str:
        shape = (1,) * int(self.rng.integers(0, 3))
        with np.errstate(over="ignore"):
            return self.constant(np.full(shape, value, np.float64).astype(self.numpy))

    def given(self, array: Array, name: str = "") -> str:
        """An input with that value, or a constant."""
        if not name and self.maybe(0.3):
            return self.constant(array)
        name = name or f"x{len(self.block.inputs)}"
        self.block.inputs[name] = array
        return name

    def eighths(self, shape: tuple[int, ...]) -> Array:
        return (self.rng.integers(-12, 13, shape) / 8).astype(self.numpy)

    def power(self, low: int, high: int) -> float:
        return float(2.0 ** self.rng.integers(low, high)) * (-1 if self.maybe(0.05) else 1)

    def fill(self) -> float:
        limit = float(np.finfo(self.numpy).min)
        return float(self.rng.choice([*FILLS, limit]))

    # ---- the block

    def make(self) -> Block:
        q, k, v = self.operands()
        order = [*range(self.rank - 2), self.rank - 1, self.rank - 2]
        kt = self.add("Transpose", k, perm=order)
        if self.maybe(0.25):
            kt = self.add("Mul", kt, self.number(self.power(-3, 3)))
        s = self.add("MatMul", q, kt)
        for _ in range(int(self.rng.integers(0, 6))):
            s = self.step(s)
        w = self.add("Softmax", s, axis=-1)
        if self.maybe(0.35):
            w = self.add("Where", self.add("IsNaN", w), self.number(0.0), w)
        y = self.add("MatMul", w, v)
        self.finish(y)
        return self.block

    def operands(self) -> tuple[str, str, str]:
        lead = (self.batch,) if self.rank == 3 else (self.batch, self.heads)
        own = (self.batch,) if self.rank == 3 else (self.batch, self.own)
        q, k = self.eighths((*lead, self.rows, self.depth)), self.eighths((*own, self.keys, self.depth))
        v = self.rng.standard_normal((*own, self.keys, self.width)).astype(self.numpy)
        for array, chance in ((q, 0.25), (k, 0.2), (v, 0.15)):
            if self.maybe(chance):
                spoilt = self.rng.random(array.shape[:-1]) < 0.15
                array[spoilt, 0] = self.rng.choice([np.nan, np.inf, -np.inf][: 1 if array is v else 3])
        names = [self.given(array, name) for array, name in ((q, "q"), (k, "k"), (v, "v"))]
        for number, (name, chance) in enumerate(zip(names, (0.3, 0.2, 0.0), strict=True)):
            if self.maybe(chance):
                op = "Mul" if self.maybe(0.7) else "Div"
                names[number] = self.add(op, name, self.number(self.power(-4, 4)))
        if self.times > 1:
            names[1], names[2] = self.repeated(names[1], self.depth), self.repeated(names[2], self.width)
        return names[0], names[1], names[2]

    def repeated(self, x: str, depth: int) -> str:
        """Heads repeated in the way of torch's exporter."""
        own = (self.batch, self.own, 1, self.keys, depth)
        wide = (self.batch, self.own, self.times, self.keys, depth)
        x = self.add("Reshape", x, self.constant(np.array(own, np.int64)))
        x = self.add("Expand", x, self.constant(np.array(wide, np.int64)))
        return self.add("Reshape", x, self.constant(np.array((self.batch, self.heads, self.keys, depth), np.int64)))

    def shape(self) -> tuple[int, ...]:
        """A shape that broadcasts to the scores."""
        whole = (self.batch, self.rows, self.keys)
        if self.rank == 4:
            whole = (self.batch, self.heads, self.rows, self.keys)
        kept = tuple(size if self.maybe(0.6) else 1 for size in whole)
        return kept[int(self.rng.integers(0, len(kept) + 1)) :] if self.maybe(0.4) else kept

    def step(self, s: str) -> str:
        match str(self.rng.choice(["mul", "div", "tensor", "add", "mask", "number", "sub", "where", "where", "cast"])):
            case "mul":
                return self.add("Mul", *self.either(s, self.number(self.power(-10, 4))))
            case "div":
                return self.add("Div", s, self.number(self.power(-3, 10)))
            case "tensor":
                factors = (2.0 ** self.rng.integers(-3, 3, self.shape())).astype(self.numpy)
                return self.add("Mul", *self.either(s, self.given(factors)))
            case "add":
                return self.add("Add", *self.either(s, self.given(self.eighths(self.shape()))))
            case "mask":
                with np.errstate(over="ignore"):
                    bias = np.where(self.mask(), 0, self.fill()).astype(self.numpy)
                return self.add("Add", *self.either(s, self.given(bias, f"x{len(self.block.inputs)}")))
            case "number" if not self.added:
                self.added = True
                return self.add("Add", *self.either(s, self.number(float(self.rng.choice([2e4, -1e4, 0.5])))))
            case "sub":
                return self.add("Sub", s, self.given(self.eighths(self.shape())))
            case "where":
                return self.where(s)
            case _:
                return self.cast(s)

    def either(self, a: str, b: str) -> tuple[str, str]:
        return (a, b) if self.maybe(0.6) else (b, a)

    def mask(self) -> Array:
        """Random, causal or padding; some rows see nothing."""
        kind = int(self.rng.integers(0, 4))
        if kind == 0:
            return np.arange(self.keys) <= np.arange(self.rows)[:, None] + int(self.rng.integers(-2, 3))
        if kind == 1:
            lengths = self.rng.integers(0, self.keys + 1, (self.batch, *(1,) * (self.rank - 1)))
            return np.asarray(np.arange(self.keys) < lengths)
        return np.asarray(self.rng.random(self.shape()) < self.rng.choice([0.2, 0.5, 0.9]))

    def where(self, s: str) -> str:
        mask = self.given(np.asarray(self.mask()))
        if self.maybe(0.15):
            with np.errstate(over="ignore"):
                other = self.given((self.eighths(self.shape()) + self.fill()).astype(self.numpy))
        else:
            other = self.number(self.fill())
        if self.maybe(0.2):
            mask = self.add("Not", mask)
        return self.add("Where", mask, *self.either(s, other))

    def cast(self, s: str) -> str:
        """Through another type, now and then."""
        if not self.maybe(0.2):
            return s
        numpy, other = TYPES[str(self.rng.choice(list(TYPES)))]
        self.block.rounds |= np.dtype(numpy).itemsize < np.dtype(self.numpy).itemsize
        return self.add("Cast", self.add("Cast", s, to=other), to=self.onnx)

    def finish(self, y: str) -> None:
        block = self.block
        kinds = {np.dtype(bool): TensorProto.BOOL, np.dtype(self.numpy): self.onnx}
        infos = [helper.make_tensor_value_info(n, kinds[a.dtype], a.shape) for n, a in block.inputs.items()]
        out = helper.make_tensor_value_info(y, self.onnx, None)
        graph = helper.make_graph(block.nodes, "block", infos, [out], block.constants)
        opset = helper.make_opsetid("", 18)
        block.model = helper.make_model(graph, opset_imports=[opset], ir_version=9).SerializeToString()


def attention_block(seed: int, dtype: str | None = None) -> Block:
    """The block of that seed; `dtype` fixes its type."""
    return _Maker(seed, dtype).make()
