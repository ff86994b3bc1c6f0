"""Compares a device with the reference: tolerances by dtype and op, one comparison for any graph, batches of cases.

compare(graph, {"x": x}, device="cpu")                  # AssertionError says which output differs where
check(cases_of("softmax", 7, 33), device="cpu")         # every case of an op in one compiled graph
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.backends.reference import run_graph
from rlx.ir.dtype import DTYPES, DType, dtype_of
from rlx.ir.encoding import encoding_named
from rlx.ir.graph import Array, Graph, Value
from rlx.ir.shape import Shape, Size, evaluate
from rlx.ops.base import Op
from rlx.ops.layout import Transpose
from rlx.records import dataclass, field
from rlx.runtime.session import compile

__all__ = [
    "ALL",
    "FLOATS",
    "INTEGERS",
    "Batch",
    "Case",
    "Cases",
    "Make",
    "Operand",
    "Tolerance",
    "case",
    "check",
    "compare",
    "compare_arrays",
    "compare_results",
    "tolerance",
    "tolerances",
]


@dataclass(frozen=True)
class Tolerance:
    """|got - expected| <= absolute + relative * |expected|; NaN agrees with NaN, an infinity with itself."""

    relative: float
    absolute: float


BY_DTYPE = {
    "f64": Tolerance(1e-13, 1e-14),
    "f32": Tolerance(1e-6, 1e-7),
    "f16": Tolerance(1e-3, 1e-6),  # one unit in the last place, where f32 results straddle a rounding boundary
    "bf16": Tolerance(8e-3, 1e-6),
}

FLOATS = ("f32", "f64", "f16", "bf16")
INTEGERS = ("i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64")
ALL = (*FLOATS, *INTEGERS, "bool")

# Nothing is rounded, or IEEE 754 says how: the bits are those of the reference.
EXACT = frozenset((
    "abs", "add", "again", "and",
    "arg_max", "arg_min", "as_shape", "bit_cast", "bit_shift", "bitwise_and", "bitwise_not",
    "bitwise_or", "bitwise_xor", "cast", "ceil", "center_crop_pad", "clip", "compress", "concat", "depth_to_space",
    "div", "equal",
    "expand", "eye_like", "floor", "from_pairs", "full",
    "gather", "gather_elements", "gather_nd", "global_max_pool", "greater",
    "greater_equal", "hardmax", "identity", "imaginary_part", "iota", "is_inf", "is_nan", "less", "less_equal",
    "make_complex", "max_pool",
    "max_unpool", "maximum", "minimum", "mul", "neg", "ngram_counts", "non_zero",
    "not", "not_equal", "one_hot", "or", "pad", "pairs",
    "real_part", "reciprocal", "reduce_max", "reduce_min", "relabel", "relu", "reshape", "resize_nearest",
    "reverse_sequence",
    "round", "scatter_elements", "scatter_nd", "search_sorted", "shrink",
    "sign", "size_of", "slice", "space_to_depth", "split",
    "sqrt", "squeeze",
    "stop_gradient", "sub", "thresholded_relu", "tile", "top_k", "transpose", "tree_ensemble", "trilu", "unique",
    "unique_places", "unsqueeze", "where", "whole_conv", "within", "xor",
))  # fmt: skip

# Sums of many terms, cancellation, or a chain of approximations: how many times the dtype's tolerance.
FACTOR = {
    "attention": 20,
    "average_pool": 10,
    "batch_norm": 10,
    "conv": 40,
    "conv_transpose": 40,
    "cum_prod": 20,
    "cum_sum": 40,
    "deform_conv": 40,
    "det": 40,
    "dft": 160,  # errors go with the norm of the row: every element sums all of it
    "dft_at_run": 160,
    "einsum": 40,
    "elu": 4,
    "gelu": 8,
    "gemm": 40,
    "global_average_pool": 10,
    "global_lp_pool": 20,
    "group_norm": 40,
    "grouped_matmul": 40,
    "gru": 160,
    "hard_swish": 4,
    "instance_norm": 40,
    "interpolate": 10,
    "interpolate_axis": 10,
    "layer_norm": 40,
    "log_mel_spectrogram": 40,
    "log_softmax": 20,
    "lp_pool": 20,
    "lrn": 10,
    "lstm": 160,
    "matmul": 40,
    "pair_distances": 40,
    "mean_variance_normalization": 40,
    "mish": 10,
    "pow": 20,
    "prefix": 40,
    "recurrence": 160,  # the rounding of a step goes into the next
    "reduce_l1": 20,
    "reduce_l2": 20,
    "reduce_log_sum": 20,
    "reduce_log_sum_exp": 10,
    "reduce_mean": 20,
    "reduce_prod": 20,
    "reduce_sum": 20,
    "reduce_sum_square": 20,
    "rms_norm": 20,
    "rnn": 160,
    "selu": 4,
    "softmax": 10,
    "softplus": 4,
    "stft": 40,
    "welch_peaks": 40,
}


def tolerance(dtype: object, op: str | None = None) -> Tolerance:
    """The tolerance for elements of `dtype` that an op computed; without an op, for a chain of any ops."""
    name = dtype_of(dtype).name
    if op in EXACT or name not in BY_DTYPE:
        return Tolerance(0, 0)
    base = BY_DTYPE[name]
    if name in ("f16", "bf16"):  # computed in f32 and rounded once an op; decompositions round more often
        cancels = op is None or op in FACTOR
        return Tolerance(base.relative * (8 if op is None else 2), base.relative * 4 if cancels else base.absolute)
    factor = 1000 if op is None else FACTOR.get(op, 2)
    return Tolerance(base.relative * factor, base.absolute * factor)


def compare_arrays(what: str, got: Any, expected: Array, allowed: Tolerance) -> None:
    """AssertionError naming `what` and the first bad element unless type, shape and elements agree."""
    got = np.asarray(got)
    assert got.dtype == expected.dtype, f"{what}: got {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: got shape {got.shape}, expected {expected.shape}"
    if got.dtype.kind == "c":
        got, expected = (np.stack([x.real, x.imag], -1) for x in (got, expected))
    with np.errstate(all="ignore"):
        if dtype_of(got.dtype).is_float and got.dtype != np.float64:
            wide_got, wide = got.astype(np.float64), expected.astype(np.float64)
        else:
            wide_got, wide = got, expected
        bad = np.not_equal(wide_got, wide)
        if dtype_of(got.dtype).is_float:
            close = np.abs(wide_got - wide) <= allowed.absolute + allowed.relative * np.abs(wide)
            bad &= ~(close & np.isfinite(wide)) & ~(np.isnan(wide_got) & np.isnan(wide))
    if bad.any():
        at = tuple(int(i[0]) for i in np.nonzero(bad)) if bad.ndim else ()
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.size} elements differ; at {list(at)} got {got[at]!r}, "
            f"expected {expected[at]!r} (relative {allowed.relative:.0e}, absolute {allowed.absolute:.0e})"
        )


def compare(
    graph: Graph,
    inputs: Mapping[str, Array],
    params: Mapping[str, Array] | None = None,
    device: str = "cpu",
    *,
    allowed: Mapping[str, Tolerance] | None = None,
    **options: Any,
) -> None:
    """Compiles the graph, runs it once on the device and on the reference, and compares every output.

    `allowed` has tolerances by output name (default: `tolerances(graph)`). AssertionError lists what differs.
    """
    model = compile(graph, device=device, **options)
    if params:
        model.set_params(params)
    expected = run_graph(graph, inputs, params)
    compare_results(expected, model(dict(inputs)), allowed or tolerances(graph))


def tolerances(graph: Graph) -> dict[str, Tolerance]:
    """For every output of a float type the tolerance of the coarsest float type that its graph computes in."""
    floats = {v.dtype for v in graph.values() if v.dtype.is_float}
    coarsest = max((tolerance(d) for d in floats), key=lambda t: t.relative, default=Tolerance(0, 0))
    return {o.name: coarsest if o.value.dtype.is_float else Tolerance(0, 0) for o in graph.outputs}


def compare_results(
    expected: Mapping[str, Array], got: Mapping[str, Any], allowed: Mapping[str, Tolerance], names: Any = None
) -> None:
    """Compares outputs by name; one AssertionError for all that differ."""
    wrong = []
    for name, array in expected.items():
        try:
            compare_arrays(
                str((names or {}).get(name, name)), got[name], array, allowed.get(name) or tolerance(array.dtype)
            )
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, f"{len(wrong)} of {len(expected)} outputs differ:\n" + "\n".join(wrong[:20])


# ---- batches of cases


@dataclass(frozen=True)
class Operand:
    """An input of a case. `values`: "normal", "any" (NaN, infinities, denormals, all integers), "positive", "unit"
    (0 to 255 / 256), "nonzero", "whole" (small whole numbers), "ties" (few distinct ones) or "index" (-limit to
    limit - 1).
    `data` are the elements themselves, where random ones would not do; a `param` is one whatever the case says, as is
    what has an `encoding`: it is stored in blocks.
    """

    shape: Shape
    dtype: str = "f32"
    values: str = "normal"
    limit: Size = 1
    data: tuple[float, ...] | None = None
    param: bool = False
    encoding: str | None = None


@dataclass(frozen=True)
class Case:
    """One application of an op. `turned`: operands come through a transposition; `leaf`: "input" or "param"."""

    op: Op
    operands: tuple[Operand, ...]
    turned: bool = False
    leaf: str = "input"

    def __str__(self) -> str:
        shown = ", ".join(f"{o.dtype}{_stored(o)}{list(o.shape)} {o.values}" for o in self.operands)
        return f"{self.op}({shown}){' turned' if self.turned else ''}{' params' if self.leaf == 'param' else ''}"


def _stored(operand: Operand) -> str:
    return "" if operand.encoding is None else f"@{operand.encoding}"


Fill = Callable[[np.random.Generator, tuple[int, ...], Operand, int], Array]
Cases = Iterator[Case]
Make = Callable[[str, Size, Size], Cases]  # the name of an op and two sizes -> its cases


def case(op: Op, *operands: Operand, turned: bool = False, leaf: str = "input") -> Case:
    """A case of these operands."""
    return Case(op, operands, turned, leaf)


@dataclass
class Batch:
    """A graph with all cases side by side: every output of every case is an output `c<case>.<number>`."""

    cases: Sequence[Case]
    graph: Graph = field(default_factory=lambda: Graph("cases"))
    leaves: dict[str, tuple[str, Operand, bool]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    allowed: dict[str, Tolerance] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, case in enumerate(self.cases):
            operands = [self._leaf(f"c{number}.x{i}", case, o) for i, o in enumerate(case.operands)]
            for i, value in enumerate(self.graph.add(case.op, *operands)):
                name = f"c{number}.{i}"
                self.graph.output(value, name)
                self.labels[name] = f"{name} {case}"
                self.allowed[name] = tolerance(value.dtype, case.op.op_name)

    def _leaf(self, name: str, case: Case, operand: Operand) -> Value:
        turned = case.turned and len(operand.shape) > 1
        shape = tuple(reversed(operand.shape)) if turned else operand.shape
        leaf = "param" if operand.param or operand.encoding else case.leaf
        if leaf == "input":
            value = self.graph.input(name, shape, operand.dtype)
        else:
            value = self.graph.param(name, shape, operand.dtype, encoding=operand.encoding)
        self.leaves[name] = (leaf, operand, turned)
        return self.graph.add(Transpose(), value)[0] if turned else value

    def arrays(
        self, seed: int = 0, extents: Mapping[str, int] | None = None, fill: Fill | None = None
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Inputs and params by name for extents of the dims; equal seeds give equal arrays.

        `fill` makes the elements of an operand (default: `values`).
        """
        made: dict[str, dict[str, Array]] = {"input": {}, "param": {}}
        for name, (leaf, operand, turned) in self.leaves.items():
            shape = tuple(evaluate(s, extents or {}) for s in operand.shape)
            rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
            array = (fill or values)(rng, shape, operand, evaluate(operand.limit, extents or {}))
            array = np.ascontiguousarray(array.T) if turned else array
            made[leaf][name] = array if operand.encoding is None else _encoded(array, operand.encoding)
        return made["input"], made["param"]


def _encoded(array: Array, encoding: str) -> Array:
    """The blocks of elements that the encoding can hold beside each other: finite ones that are not huge."""
    return encoding_named(encoding).encode(np.clip(np.nan_to_num(array.astype(np.float32)), -100, 100))


def check(
    cases: Iterable[Case], device: str = "cpu", extents: Sequence[Mapping[str, int]] = ({},), **options: Any
) -> int:
    """Compares all cases in one compiled graph, at each of the extents; the number of outputs compared."""
    batch = Batch(list(cases))
    model = compile(batch.graph, device=device, **options)
    for seed, sizes in enumerate(extents):
        inputs, params = batch.arrays(seed, sizes)
        if params:
            model.set_params(params)
        expected = run_graph(batch.graph, inputs, params)
        try:
            compare_results(expected, model(inputs), batch.allowed, batch.labels)
        except AssertionError as error:
            raise AssertionError(f"at {dict(sizes)}: {error}") from None
    return len(batch.labels) * len(extents)


SPECIAL_FLOATS = (np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, -1.0, 1e-40, -1e-40, 5e-324, 3.4e38, -0.5, 2.5, 88.0, -104.0)


def values(rng: np.random.Generator, shape: tuple[int, ...], operand: Operand, limit: int = 1) -> Array:
    """Random elements of a kind that `Operand.values` names."""
    dtype = DTYPES[operand.dtype]
    kind = operand.values
    if operand.data is not None:
        return np.array(operand.data).astype(dtype.numpy).reshape(shape)
    if kind == "index":
        return np.asarray(rng.integers(-limit if dtype.kind == "i" else 0, max(limit, 1), shape)).astype(dtype.numpy)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if dtype.kind == "c":
        pairs = values(rng, (*shape, 2), Operand((), f"f{dtype.bits // 2}", kind))
        return np.ascontiguousarray(pairs).view(dtype.numpy)[..., 0]
    if dtype.is_integer:
        return _integers(rng, shape, dtype, kind)
    made = np.asarray(rng.standard_normal(shape))
    match kind:
        case "any":
            picked = rng.choice(np.array(SPECIAL_FLOATS), shape)
            made = np.where(rng.random(shape) < 0.4, picked, made * 10)
        case "positive":
            made = np.abs(made) + 0.1
        case "unit":
            made = np.minimum(rng.random(shape), 255 / 256)  # no type rounds it to 1
        case "nonzero":
            made = np.where(np.abs(made) < 0.1, 1.5, made)
        case "whole" | "ties":
            made = rng.integers(0 if kind == "whole" else -2, 100 if kind == "whole" else 3, shape).astype(np.float64)
    with np.errstate(all="ignore"):
        return np.asarray(made).astype(dtype.numpy)


def _integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, kind: str) -> Array:
    info = np.iinfo(dtype.numpy)
    signed = dtype.kind == "i"
    match kind:
        case "any":
            made = rng.integers(info.min, info.max, shape, dtype.numpy, endpoint=True)
            edges = np.array([info.min, info.max, 0, 1, info.max // 2 + 1], dtype.numpy)
            made = np.where(rng.random(shape) < 0.4, rng.choice(edges, shape), made)
        case "nonzero":
            made = rng.integers(1, 10, shape)
            made = np.where(rng.random(shape) < 0.5, -made, made) if signed else made
        case "ties":
            made = rng.integers(-2 if signed else 0, 3, shape)
        case "positive" | "unit" | "whole":
            made = rng.integers(0, 7, shape)
        case _:
            made = rng.integers(-9 if signed else 0, 10, shape)
    return np.asarray(made).astype(dtype.numpy)
