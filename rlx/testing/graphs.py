"""Random graphs for comparing a device with the reference: many ops, shared values, fixed and symbolic sizes.

Values stay well conditioned. Each carries a bound on its magnitude and whether it is exact, that is free of rounding:
only exact values reach ops that jump (comparisons, casts to integers, argmax), so that devices may round differently.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from rlx.ir.dtype import DTYPES, DType
from rlx.ir.graph import Array, Graph, Value
from rlx.ir.shape import Dim, Shape, Size, bounds, evaluate, numel, same, upper
from rlx.ops import activation, contract, elementwise, index, layout, normalize, reduction
from rlx.ops.base import Op
from rlx.records import dataclass

__all__ = ["MakeInputs", "random_graph"]

MakeInputs = Callable[[int], dict[str, Array]]

F32, F64, BOOL, I32, I64 = (DTYPES[name] for name in ("f32", "f64", "bool", "i32", "i64"))
MAX_ELEMENTS = 4096
MAX_RANK = 4
MAX_MAGNITUDE = 8.0


def random_graph(
    seed: int,
    nodes: int = 12,
    *,
    symbolic: bool = True,
    dtypes: Sequence[str] = ("f32", "f64", "i32", "i64", "bool"),
    sizes: Sequence[int] = (1, 2, 3, 4, 5, 7),
) -> tuple[Graph, MakeInputs]:
    """A graph of about `nodes` nodes and a function from a seed to its inputs, of new extents where sizes are symbolic.

    Equal arguments give equal graphs. `dtypes` are those of leaves and casts (f16 and bf16 are possible), `sizes` those
    of fixed axes of inputs. Params have data. Among the outputs may be inputs, params, constants and views of them, and
    one value under two names.
    """
    builder = _Builder(random.Random(seed), symbolic, [DTYPES[name] for name in dtypes], sizes)
    for _ in range(200 * nodes):  # steps that don't fit the values they draw add nothing
        if len(builder.graph.nodes) >= nodes:
            break
        builder.step()
    builder.choose_outputs()
    return builder.graph, builder.make_inputs


@dataclass(frozen=True)
class _Fact:
    bound: float
    exact: bool


class _Builder:
    def __init__(self, rng: random.Random, symbolic: bool, dtypes: Sequence[DType], sizes: Sequence[int]) -> None:
        self.rng = rng
        self.sizes = sizes
        self.graph = Graph("random")
        self.facts: dict[Value, _Fact] = {}
        self.dtypes = dtypes
        self.dims: list[Dim] = []
        if symbolic:
            self.dims = [Dim("n", 1, rng.randint(2, 7)), Dim("m", 2, 8, multiple=2), Dim("batch size", 1, 3)]
        for i in range(rng.randint(1, 3)):
            value = self.graph.input(f"x{i}", self._shape(), rng.choice(list(dtypes)) if i else self._float())
            self._know(value, 2.0, exact=True)
        for i in range(rng.randint(0, 2)):
            self._param(f"w{i}", [rng.randint(1, 6) for _ in range(rng.randint(0, 3))])
        if rng.random() < 0.5:
            self._constant([round(rng.uniform(-2, 2), 2) for _ in range(rng.choice([1, 3, 20]))], self._float(), 2.0)

    # ---- leaves

    def _shape(self) -> Shape:
        rank = self.rng.choice([0, 1, 2, 2, 3, 3, 4])
        sizes: list[Size] = [*self.sizes, *self.dims, *self.dims]
        shape = tuple(self.rng.choice(sizes) for _ in range(rank))
        return shape if self.small(shape) else shape[:1]

    def _float(self) -> DType:
        return self.rng.choice([d for d in self.dtypes if d.is_float])

    def _know(self, value: Value, bound: float, *, exact: bool) -> Value:
        self.facts[value] = _Fact(bound, exact)
        return value

    def _param(self, name: str, shape: Sequence[int], dtype: DType | None = None) -> Value:
        dtype = dtype or self._float()
        data = np.random.default_rng(self.rng.getrandbits(32)).uniform(-1, 1, shape).astype(dtype.numpy)
        return self._know(self.graph.param(name, shape, dtype, data=data), 1.0, exact=True)

    def _constant(self, value: object, dtype: DType, bound: float) -> Value:
        return self._know(self.graph.constant(value, dtype), bound, exact=True)

    def make_inputs(self, seed: int) -> dict[str, Array]:
        """Inputs of random extents within the bounds of the dims."""
        rng = np.random.default_rng(seed)
        extents = {}
        for symbol in (d.symbol for d in self.dims):
            assert symbol is not None
            assert symbol.hi is not None
            least = -(-symbol.lo // symbol.multiple)
            extents[symbol.name] = symbol.multiple * int(rng.integers(least, symbol.hi // symbol.multiple + 1))
        made = {}
        for value in self.graph.inputs:
            shape = [evaluate(s, extents) for s in value.shape]
            low, high = (0, 2) if value.dtype.kind in "bu" else (-2, 3)
            array = rng.uniform(-2, 2, shape) if value.dtype.is_float else rng.integers(low, high, shape)
            made[value.name] = np.asarray(array).astype(value.dtype.numpy)
        return made

    # ---- steps

    def step(self) -> None:
        """Adds the nodes of one random step, or nothing where it does not fit."""
        self.rng.choice(_STEPS)(self)

    def pick(self, fits: Callable[[Value], bool]) -> Value | None:
        """A value that fits; later ones more often, so that graphs are deep as well as wide."""
        values = [v for v in self.facts if fits(v)]
        return values[max(self.rng.randrange(len(values)), self.rng.randrange(len(values)))] if values else None

    def float_value(self, least_rank: int = 0) -> Value | None:
        return self.pick(lambda v: v.dtype.is_float and v.rank >= least_rank)

    def add(self, op: Op, *inputs: Value, bound: float | None = None, exact: bool = False) -> Value:
        """Adds a node of one output; a magnitude out of hand is squashed, integers included never get there."""
        (value,) = self.graph.add(op, *inputs)
        facts = [self.facts[v] for v in inputs]
        known = max((f.bound for f in facts), default=1.0) if bound is None else bound
        self._know(value, known, exact=exact and all(f.exact for f in facts))
        if known > MAX_MAGNITUDE and value.dtype.is_float:
            return self.add(elementwise.Tanh(), value, bound=1.0)
        return value

    def small(self, shape: Shape) -> bool:
        count = upper(numel(shape))
        return len(shape) <= MAX_RANK and count is not None and count <= MAX_ELEMENTS

    def axis(self, x: Value) -> int:
        return self.rng.randrange(x.rank)

    def choose_outputs(self) -> None:
        """The values that nobody reads, some others of any kind, and now and then one twice."""
        users = self.graph.users()
        chosen = [v for v in self.facts if v.kind == "node" and v not in users]
        chosen += self.rng.sample(list(self.facts), min(len(self.facts), self.rng.randint(1, 3)))
        if self.rng.random() < 0.2:
            chosen.append(chosen[0])
        for i, value in enumerate(chosen):
            self.graph.output(value, f"y{i}")


def _unary(b: _Builder) -> None:
    x = b.float_value()
    if x is None:
        return
    bound = b.facts[x].bound
    kind = b.rng.choice(["exact", "bounded", "activation", "exp"])
    if kind == "exact":
        op: Op = b.rng.choice([elementwise.Neg(), elementwise.Abs(), elementwise.Identity(), activation.Relu()])
        b.add(op, x, exact=True)
    elif kind == "bounded":
        squashing = [elementwise.Tanh(), elementwise.Sigmoid(), elementwise.Erf(), elementwise.Sin(), elementwise.Cos()]
        b.add(b.rng.choice(squashing), x, bound=1.0)
    elif kind == "activation":
        ops = [
            activation.Gelu(),
            activation.Gelu("tanh"),
            activation.Silu(),
            activation.LeakyRelu(0.1),
            activation.HardSwish(),
        ]
        b.add(b.rng.choice(ops), x, bound=bound + 1)
    elif bound <= 3:
        b.add(elementwise.Exp(), x, bound=float(np.exp(bound)))


def _positive(b: _Builder) -> None:
    x = b.float_value()
    if x is None:
        return
    one = b._constant(1.0, x.dtype, 1.0)
    square = b.add(elementwise.Mul(), x, x, bound=b.facts[x].bound ** 2)
    above = b.add(elementwise.Add(), b.add(elementwise.Abs(), square), one, bound=b.facts[square].bound + 1)
    op: Op = b.rng.choice([elementwise.Sqrt(), elementwise.Rsqrt(), elementwise.Log(), elementwise.Reciprocal()])
    b.add(op, above)


def _broadcasts(a: Shape, b: Shape) -> bool:
    return all(x == 1 or y == 1 or same(x, y) is True for x, y in zip(reversed(a), reversed(b), strict=False))


def _binary(b: _Builder) -> None:
    x = b.pick(lambda v: v.dtype.kind in "fi")
    if x is None:
        return
    shape = x.shape
    y = b.pick(lambda v: v.dtype is x.dtype and _broadcasts(v.shape, shape))
    assert y is not None, "x itself fits"
    longer = max(x.shape, y.shape, key=len)
    if not b.small(tuple(size if size != 1 else 8 for size in longer)):
        return
    p, q = b.facts[x].bound, b.facts[y].bound
    choices: list[tuple[Op, float, bool]] = [
        (elementwise.Add(), p + q, False),
        (elementwise.Sub(), p + q, False),
        (elementwise.Minimum(), max(p, q), True),
        (elementwise.Maximum(), max(p, q), True),
        (elementwise.Mul(), p * q, False),
    ]
    op, bound, exact = b.rng.choice(choices)
    if x.dtype.is_float or bound < 1000:
        b.add(op, x, y, bound=bound, exact=exact or x.dtype.is_integer)


def _divide(b: _Builder) -> None:
    x = b.float_value()
    if x is None:
        return
    divisor = b._constant(b.rng.choice([1.5, -2.0, 3.0]), x.dtype, 3.0)
    b.add(elementwise.Div(), x, divisor, bound=b.facts[x].bound)


def _reduce(b: _Builder) -> None:
    x = b.float_value(1)
    if x is None:
        return
    axes = None if b.rng.random() < 0.2 else tuple(b.rng.sample(range(x.rank), b.rng.randint(1, x.rank)))
    keep = b.rng.random() < 0.5
    count = prod(upper(x.shape[a]) or 1 for a in (range(x.rank) if axes is None else axes))
    bound = b.facts[x].bound
    match b.rng.choice(["sum", "mean", "max", "min", "square", "logsumexp"]):
        case "sum":
            b.add(reduction.ReduceSum(axes, keep), x, bound=bound * count)
        case "mean":
            b.add(reduction.ReduceMean(axes, keep), x)
        case "max":
            b.add(reduction.ReduceMax(axes, keep), x, exact=True)
        case "min":
            b.add(reduction.ReduceMin(axes, keep), x, exact=True)
        case "square":
            b.add(reduction.ReduceSumSquare(axes, keep), x, bound=bound**2 * count)
        case _:
            b.add(reduction.ReduceLogSumExp(axes, keep), x, bound=bound + float(np.log(count)))


def _arg(b: _Builder) -> None:
    x = b.pick(lambda v: v.rank >= 1 and b.facts[v].exact and v.dtype.kind in "fi")
    if x is not None:
        cls = b.rng.choice([reduction.ArgMax, reduction.ArgMin])
        axis = b.axis(x)
        size = upper(x.shape[axis]) or 1
        b.add(cls(axis, b.rng.random() < 0.5, b.rng.random() < 0.3), x, bound=float(size), exact=True)


def _normalize(b: _Builder) -> None:
    x = b.float_value(1)
    if x is None:
        return
    axis = b.axis(x)
    last = x.shape[-1]
    match b.rng.choice(["softmax", "log_softmax", "layer_norm", "rms_norm"]):
        case "softmax":
            b.add(normalize.Softmax(axis), x, bound=1.0)
        case "log_softmax":
            b.add(normalize.LogSoftmax(axis), x, bound=2 * b.facts[x].bound + 5)
        case kind if isinstance(last, int):
            scale = b._param(f"scale{len(b.graph.params)}", [last], x.dtype)
            if kind == "rms_norm":
                b.add(normalize.RmsNorm(-1, 0.1), x, scale, bound=4.0)
            else:
                bias = [b._param(f"bias{len(b.graph.params)}", [last], x.dtype)] if b.rng.random() < 0.7 else []
                b.add(normalize.LayerNorm(-1, 0.1), x, scale, *bias, bound=4.0)


def _matmul(b: _Builder) -> None:
    x = b.float_value(1)
    if x is None:
        return
    depth = x.shape[-1]
    bound = b.facts[x].bound * (upper(depth) or 1)
    if isinstance(depth, int):
        width = b.rng.randint(1, 9)
        if b.small((*x.shape[:-1], width)):
            w = b._param(f"m{len(b.graph.params)}", [depth, width], x.dtype)
            b.add(contract.MatMul(), x, w, bound=bound)
    elif x.rank >= 2:
        perm = (*range(x.rank - 2), x.rank - 1, x.rank - 2)
        if b.small((*x.shape[:-1], x.shape[-2])):
            turned = b.add(layout.Transpose(perm), x, exact=True)
            b.add(contract.MatMul(), x, turned, bound=bound * b.facts[x].bound)


def _transpose(b: _Builder) -> None:
    x = b.pick(lambda v: v.rank >= 2)
    if x is not None:
        b.add(layout.Transpose(tuple(b.rng.sample(range(x.rank), x.rank))), x, exact=True)


def _reshape(b: _Builder) -> None:
    x = b.pick(lambda v: v.rank >= 1)
    if x is None:
        return
    axis = b.axis(x)
    size = x.shape[axis]
    head, tail = x.shape[:axis], x.shape[axis + 1 :]
    match b.rng.choice(["flatten", "merge", "split", "unsqueeze", "squeeze"]):
        case "flatten":
            b.add(layout.Reshape((numel(x.shape),)), x, exact=True)
        case "merge" if tail:
            b.add(layout.Reshape((*head, size * tail[0], *tail[1:])), x, exact=True)
        case "split" if isinstance(size, int) and x.rank < MAX_RANK:
            factor = b.rng.choice([f for f in range(1, size + 1) if size % f == 0])
            b.add(layout.Reshape((*head, factor, size // factor, *tail)), x, exact=True)
        case "unsqueeze" if x.rank < MAX_RANK:
            b.add(layout.Unsqueeze((axis,)), x, exact=True)
        case "squeeze" if size == 1:
            b.add(layout.Squeeze((axis,)), x, exact=True)


def _slice(b: _Builder) -> None:
    x = b.pick(lambda v: v.rank >= 1)
    if x is None:
        return
    starts: list[Size] = []
    sizes: list[Size] = []
    steps: list[int] = []
    for size in x.shape:
        least = bounds(size)[0] or 0
        step = b.rng.choice([1, 1, 2, -1]) if isinstance(size, int) else b.rng.choice([1, 1, -1])
        if isinstance(size, int):
            count = b.rng.randint(1, max(1, -(-size // abs(step))))
            first = b.rng.randint(0, size - (count - 1) * abs(step) - 1)
            starts.append(first if step > 0 else first + (count - 1) * abs(step))
            sizes.append(count)
        elif step < 0:
            starts.append(size - 1)
            sizes.append(size)
        else:
            cut = b.rng.randint(0, max(0, least - 1))
            starts.append(cut)
            sizes.append(size - cut)
        steps.append(step)
    b.add(layout.Slice(tuple(starts), tuple(sizes), tuple(steps)), x, exact=True)


def _pad(b: _Builder) -> None:
    x = b.pick(lambda v: v.rank >= 1 and v.dtype.kind != "b")
    if x is None:
        return
    least = min(bounds(s)[0] or 0 for s in x.shape)
    mode = b.rng.choice(["constant", "edge", "reflect"])
    most = 2 if mode == "constant" else min(2, least - 1)
    pads = tuple(b.rng.randint(0, max(0, most)) for _ in range(2 * x.rank))
    if b.small(tuple(s + 4 for s in x.shape)):
        b.add(layout.Pad(pads, b.rng.choice([0, 1, -2]), mode), x, bound=max(2.0, b.facts[x].bound), exact=True)


def _concat(b: _Builder) -> None:
    x = b.pick(lambda v: v.rank >= 1)
    if x is None:
        return
    axis, shape = b.axis(x), x.shape

    def fits(v: Value) -> bool:
        same_rank = v.dtype is x.dtype and v.rank == len(shape)
        return same_rank and all(d == axis or p == q for d, (p, q) in enumerate(zip(v.shape, shape, strict=True)))

    others = [y for _ in range(b.rng.randint(1, 2)) if (y := b.pick(fits)) is not None]
    total = sum((v.shape[axis] for v in others), start=shape[axis])
    if b.small((*shape[:axis], total, *shape[axis + 1 :])):
        b.add(layout.Concat(axis), x, *others, exact=True)


def _split(b: _Builder) -> None:
    x = b.pick(lambda v: any(isinstance(s, int) and s >= 2 for s in v.shape))
    if x is None:
        return
    axis = b.rng.choice([d for d, s in enumerate(x.shape) if isinstance(s, int) and s >= 2])
    size = x.shape[axis]
    assert isinstance(size, int)
    first = b.rng.randint(1, size - 1)
    for part in b.graph.add(layout.Split(axis, (first, size - first)), x):
        b.facts[part] = b.facts[x]


def _expand(b: _Builder) -> None:
    x = b.pick(lambda v: v.rank < MAX_RANK)
    if x is None:
        return
    sizes: list[Size] = [1, 2, 3, *b.dims]
    shape = (b.rng.choice(sizes), *(b.rng.choice(sizes) if s == 1 else s for s in x.shape))
    if b.small(shape) and _bindable(b, shape):
        b.add(layout.Expand(shape), x, exact=True)


def _bindable(b: _Builder, shape: Shape) -> bool:
    """Whether each dim of the shape can be read off an input."""
    read = {s for v in b.graph.inputs for s in v.shape}
    return all(not isinstance(s, Dim) or s.symbol is None or s in read for s in shape)


def _where(b: _Builder) -> None:
    x = b.pick(lambda v: b.facts[v].exact and v.dtype.kind in "fi")
    if x is None:
        return
    shape = x.shape
    middle = b._constant(b.rng.choice([0, 1]), x.dtype, 1.0)
    cls = b.rng.choice([elementwise.Less, elementwise.GreaterEqual, elementwise.Equal, elementwise.NotEqual])
    cond = b.add(cls(), x, middle, bound=1.0, exact=True)
    if b.rng.random() < 0.3:
        cond = b.add(elementwise.Not(), cond, exact=True)
    y = b.pick(lambda v: v.dtype.kind in "fi" and v.shape == shape)
    assert y is not None, "x itself fits"
    z = b.pick(lambda v: v.dtype is y.dtype and v.rank <= len(shape) and _broadcasts(v.shape, shape))
    if z is not None:
        b.add(elementwise.Where(), cond, y, z, exact=True)


def _cast(b: _Builder) -> None:
    x = b.pick(lambda v: b.facts[v].exact or v.dtype.is_float)
    if x is None:
        return
    to = b.rng.choice([d for d in b.dtypes if b.facts[x].exact or d.is_float])
    wider = x.dtype.is_float and to.is_float and to.bits >= x.dtype.bits
    b.add(elementwise.Cast(to), x, exact=wider or not to.is_float or not x.dtype.is_float)


def _gather(b: _Builder) -> None:
    x = b.pick(lambda v: v.rank >= 1)
    if x is None:
        return
    axis = b.axis(x)
    least = bounds(x.shape[axis])[0] or 0
    shape = b.rng.choice([(), (2,), (2, 2)])
    if least == 0 or not b.small((*x.shape[:axis], *shape, *x.shape[axis + 1 :])):
        return
    picked = [b.rng.randint(-least, least - 1) for _ in range(prod(shape))]
    indices = b.graph.constant(np.array(picked, np.int64).reshape(shape))
    b._know(indices, float(least), exact=True)
    b.add(index.Gather(axis), x, indices, bound=b.facts[x].bound, exact=True)


_STEPS: tuple[Callable[[_Builder], None], ...] = (
    _unary,
    _unary,
    _positive,
    _binary,
    _binary,
    _binary,
    _divide,
    _reduce,
    _arg,
    _normalize,
    _matmul,
    _transpose,
    _reshape,
    _slice,
    _pad,
    _concat,
    _split,
    _expand,
    _where,
    _cast,
    _gather,
)
