"""What a case of cliffs.py is: for an op, a function that makes nets of it, and the values of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

Array = NDArray[Any]
Value = int | float | str | bool
MICROSOFT, ML = "com.microsoft", "ai.onnx.ml"
DTYPES: Mapping[str, Any] = {
    "f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "i8": np.int8, "u8": np.uint8,
    "i16": np.int16, "i32": np.int32, "i64": np.int64, "u32": np.uint32, "u64": np.uint64, "bool": np.bool_,
}  # fmt: skip
FLOATS = ("f32", "f64", "f16", "bf16")
NUMBERS = ("f32", "f64", "f16", "i32", "i64", "u8", "i8")
SIZES = tuple(1 << e for e in (16, 8, 10, 12, 14, 18, 20, 22))
AXES = ("last", "first", "middle", "all")
MOVED = ("f32", "f64", "f16", "u8", "i64", "bool")
CHANNELS = (16, 1, 2, 3, 4, 8, 32, 64, 128, 512)
SMALLER = tuple(1 << e for e in (14, 8, 10, 12, 16, 18))


@dataclass(frozen=True)
class Fixed:
    """An operand that the file holds."""

    value: Array


Operand = Array | Fixed | None


@dataclass
class Net:
    """A model of one node or few: `inputs` by name, `constants`, and the names of its outputs.

    `work` is what a run should take time for; 0: the elements of inputs and outputs. `other` computes the same with
    NumPy or SciPy.
    """

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: dict[str, Array] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    work: float = 0
    other: Callable[[], Any] | None = None

    def add(
        self, op: str, *operands: Operand | str, outputs: int = 1, domain: str = "", **attributes: Any
    ) -> list[str]:
        """One more node, whose outputs are those of the net."""
        names = []
        for operand in operands:
            name = f"x{len(self.inputs) + len(self.constants)}"
            if isinstance(operand, str):
                name = operand
            elif operand is None:
                name = ""
            elif isinstance(operand, Fixed):
                self.constants[name] = operand.value
            else:
                self.inputs[name] = operand
            names.append(name)
        self.outputs = [f"y{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, names, self.outputs, domain=domain, **attributes))
        return self.outputs

    def model(self, opset: int) -> bytes:
        """The file."""
        given = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in self.inputs.items()
        ]
        made = [onnx.ValueInfoProto(name=name) for name in self.outputs]
        held = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = helper.make_graph(self.nodes, "net", given, made, held)
        domains = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1), helper.make_opsetid(ML, 3)]
        file: bytes = helper.make_model(graph, opset_imports=domains, ir_version=10).SerializeToString()
        return file


def net(op: str, *operands: Operand | str, work: float = 0, **attributes: Any) -> Net:
    """A net of one node."""
    made = Net(work=work)
    made.add(op, *operands, **attributes)
    return made


class Pick:
    """One value of each parameter, and random operands; with `odd`, shapes are random ones of about the given size."""

    def __init__(self, op: str, values: Mapping[str, Value], seed: int, odd: bool = False) -> None:
        self.op, self.values, self.odd = op, values, odd
        self.rng = np.random.default_rng(seed)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    def shape(self, rank: int, size: int | None = None) -> tuple[int, ...]:
        """Sizes of so many axes, alike (the first one may be larger), with `size` elements in all."""
        bits = int(self.size if size is None else size).bit_length() - 1
        if self.odd:
            cuts = np.sort(self.rng.uniform(0, bits, rank - 1))
            return tuple(max(1, round(2.0**e)) for e in np.diff([0, *cuts, bits]))
        rest = [bits // rank] * (rank - 1)
        return tuple(1 << e for e in (bits - sum(rest), *rest))

    def array(self, *shape: int, dtype: str | None = None, low: float = -2, high: float = 2) -> Array:
        """Uniform values; of integers, from small ones on."""
        kind = DTYPES[dtype or str(self.values.get("dtype", "f32"))]
        if kind is np.bool_:
            return np.asarray(self.rng.random(shape) < 0.5)
        if np.issubdtype(kind, np.integer):
            least = 0 if np.issubdtype(kind, np.unsignedinteger) else -100
            return np.asarray(self.rng.integers(least, 100, shape), kind)
        return np.asarray(self.rng.uniform(low, high, shape), np.float32).astype(kind)

    def below(self, limit: int, *shape: int) -> Array:
        """Indices below a limit."""
        return self.rng.integers(0, limit, shape)

    def weights(self, *shape: int, **what: Any) -> Fixed:
        """Random values that the file holds."""
        return Fixed(self.array(*shape, **what))


@dataclass(frozen=True)
class Case:
    """The nets of one op."""

    op: str
    make: Callable[[Pick], Net]
    choices: Mapping[str, tuple[Value, ...]]
    opset: int

    @property
    def usual(self) -> dict[str, Value]:
        """The first value of each parameter."""
        return {name: values[0] for name, values in self.choices.items()}

    def points(self, seed: int, random: int) -> Iterator[tuple[dict[str, Value], bool]]:
        """The usual values, each other value of each parameter, and so many random ones (True: with random shapes)."""
        yield self.usual, False
        for name, values in self.choices.items():
            for value in values[1:]:
                yield {**self.usual, name: value}, False
        rng = np.random.default_rng([seed, *self.op.encode()])
        for _ in range(random):
            yield {name: values[rng.integers(len(values))] for name, values in self.choices.items()}, True


CASES: dict[str, Case] = {}
Make = Callable[[Pick], Net]


def cases(*ops: str, opset: int = 21, **choices: Sequence[Value]) -> Callable[[Make], Make]:
    """Registers what makes nets of these ops, and the values of its parameters, the usual one first."""

    def register(make: Make) -> Make:
        for op in ops:
            CASES[op] = Case(op, make, {name: tuple(values) for name, values in choices.items()}, opset)
        return make

    return register


def ints(*values: int) -> Fixed:
    """A vector of i64 that the file holds."""
    return Fixed(np.array(values, np.int64))


def scalar(value: float, dtype: str = "f32") -> Fixed:
    """One number that the file holds."""
    return Fixed(np.array(value, DTYPES[dtype]))


def along(p: Pick, low: float = -2, high: float = 2) -> tuple[Array, int]:
    """An operand of three axes, and one of its axes, which has `row` elements (0: as many as the others)."""
    n, m, k = p.shape(3)
    axis = {"last": 2, "first": 0, "middle": 1}.get(p.axis, 2)
    if p.values.get("row"):
        outer = max(1, p.size // p.row)
        shape = [(p.row, outer, 1), (outer, p.row, 1), (outer, 1, p.row)][axis]
        return p.array(*shape, low=low, high=high), axis
    return p.array(n, m, k, low=low, high=high), axis


def image(p: Pick, rank: int = 2, channels: int | None = None) -> tuple[int, ...]:
    """The shape of one image with `channels` channels and about `size` elements."""
    c = p.channels if channels is None else channels
    return (1, c, *p.shape(rank, max(1, p.size // c)))
