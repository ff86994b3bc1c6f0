"""Every op on the CPU against its reference, and what happens at the edges: errors, empty tensors, odd outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from device_suite import check_deciding_op

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import ExecutionError, RlxError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, Graph, TensorType
from rlx.ir.shape import Dim
from rlx.ops import contract, elementwise, encoded, index, layout, normalize, quant, reduction
from rlx.ops.base import OPS, Op
from rlx.ops.select import Produced
from rlx.testing.cases import covered, fixed_cases, symbolic_cases
from rlx.testing.oracle import Case, Operand, case, check, compare

NAMES = [name for name in sorted(OPS) if covered(name)]
DECIDING = [name for name in NAMES if issubclass(OPS[name], Produced)]  # their data decide a size
RUN = [name for name in NAMES if name not in DECIDING]
MOST_CASES = 30  # of an op in a quick run
Some = Callable[[Sequence[Case], int], list[Case]]  # as in tests/conftest.py


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", RUN)
def test_op(name: str, some: Some) -> None:
    """All dtypes, odd and zero sizes, broadcasts, transposed operands, params and special values."""
    assert check(some(fixed_cases(name), MOST_CASES)) > 0


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", RUN)
def test_op_of_symbolic_sizes(name: str, some: Some) -> None:
    """One compile serves all extents within the bounds, zero among them where the op takes it."""
    for (dims, *cases), extents in symbolic_cases(name):
        assert check([dims, *some(cases, MOST_CASES)], extents=extents) > 0


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("name", DECIDING)
def test_op_whose_data_decide_a_size(name: str, device: str, some: Some) -> None:
    """Each case gives what the op's `reference` gives, and stops where that does."""
    check_deciding_op(device, name, some, 15)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
def test_extrema_with_a_constant_nan(dtype: str) -> None:
    """NaN wins, on either side and as a limit."""
    kind = DTYPES[dtype].numpy
    nan, numbers = np.array(np.nan, kind), np.array([1, np.nan, -1, np.inf, -np.inf, *range(14)], kind)
    g = Graph("extrema")
    x = g.input("x", numbers.shape, dtype)
    for number, op in enumerate((rlx.minimum, rlx.maximum)):
        g.output(op(x, g.constant(nan)), f"right{number}")
        g.output(op(g.constant(nan), x), f"left{number}")
    g.output(rlx.clip(x, float("nan"), 2.0), "low")
    g.output(rlx.clip(x, 0.0, float("nan")), "high")
    assert all(np.isnan(y.astype(np.float32)).all() for y in rlx.compile(g, device="cpu").run([numbers]))


LARGE = {
    "add": [case(elementwise.Add(), Operand((3, 70_001)), Operand((70_001,)))],
    "exp of a transposed": [case(elementwise.Exp(), Operand((1111, 130)), turned=True)],
    "cast": [
        case(elementwise.Cast(DTYPES["bf16"]), Operand((300_007,))),
        case(elementwise.Cast(DTYPES["i8"]), Operand((400_009,))),
    ],
    "softmax": [case(normalize.Softmax(), Operand((515, 1027))), case(normalize.Softmax(0), Operand((515, 1027)))],
    "layer_norm": [
        case(normalize.LayerNorm(-1, 0.1), Operand((700, 515)), Operand((515,)), Operand((515,))),
    ],
    "sum": [case(reduction.ReduceSum((axis,)), Operand((777, 401), "f64")) for axis in (0, 1)],
    "arg_max": [case(reduction.ArgMax(axis), Operand((401, 777), "i16", "ties")) for axis in (0, 1)],
    "concat": [case(layout.Concat(1), Operand((301, 500)), Operand((301, 503)))],
    "transpose": [case(layout.Transpose((2, 0, 1)), Operand((61, 67, 71)))],
    "gather": [case(index.Gather(1), Operand((33, 1000)), Operand((5000,), "i64", "index", 1000))],
    "matmul": [case(contract.MatMul(), Operand((130, 200), "f64"), Operand((200, 530), "f64"))],
}


@pytest.mark.parametrize("name", LARGE)
def test_work_that_is_split(name: str) -> None:
    """Sizes that are cut into many chunks, for several threads."""
    check(LARGE[name], threads=3)


# ---- combinations that once went wrong


def test_reduction_of_gathered_elements() -> None:
    """A search fused with a gather along the axis that runs over the lanes of vectors."""
    graph = Graph("gathered")
    x = graph.input("x", (5, 6, Dim("n", 1, 9)))
    picked = graph.add(index.Gather(2), x, graph.constant(np.arange(19) % 3 - 1))[0]
    graph.output(graph.add(reduction.ArgMin(1), picked)[0], "y")
    compare(graph, {"x": np.random.default_rng(0).standard_normal((5, 6, 4)).astype(np.float32)})


def test_product_with_an_expanded_param() -> None:
    """An operand made of params alone, but of a size that is known only in a run."""
    graph = Graph("expanded")
    n = Dim("n", 1, 9)
    x, w = graph.input("x", (n, 5, 3)), graph.param("w", (3, 4), data=np.ones((3, 4), np.float32))
    graph.output(x @ graph.add(layout.Expand((n, 3, 4)), w)[0], "y")
    compare(graph, {"x": np.ones((7, 5, 3), np.float32)})


# ---- element types that kernels read as bytes


@pytest.mark.parametrize("to", ["f8e4m3", "f8e5m2", "f8e4m3fnuz", "f8e5m2fnuz"])
def test_eight_bit_floats_need_no_host_calls(to: str) -> None:
    """Kernels give and take 8-bit floats, between views and outputs."""
    graph = Graph("narrow")
    n = Dim("n", 0, 9)
    x, scale = graph.input("x", (3, n)), graph.constant(np.array(0.5, np.float32))
    q = graph.add(quant.Quantize(to=DTYPES[to]), x + x, scale)[0]
    graph.output(q, "q")
    graph.output(graph.add(layout.Transpose(), q)[0], "turned")
    graph.output(graph.add(encoded.Dequantize(), q.reshape(n, 3), scale)[0] * 2.0, "back")
    model = rlx.compile(graph, device="cpu")
    assert "host" not in model.explain("dispatch").splitlines()[0]
    for size in (5, 0):
        given = {"x": np.random.default_rng(size).standard_normal((3, size)).astype(np.float32)}
        for name, expected in run_graph(graph, given).items():
            got = model(given)[name]
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32), err_msg=name)


@pytest.mark.parametrize("name", ["f8e4m3", "f8e8m0", "f4e2m1", "i4", "u2"])
def test_narrow_inputs_and_params(name: str) -> None:
    """They are copied byte for byte to outputs, and read by kernels."""
    graph, dtype = Graph("leaves"), DTYPES[name]
    data = (np.arange(12) % 7).astype(dtype.numpy)
    q, w, scale = graph.input("q", (3, 4), dtype), graph.param("w", (12,), dtype, data=data), graph.input("s", ())
    for i, value in enumerate((q, q.reshape(12), w, *(graph.add(encoded.Dequantize(), v, scale)[0] for v in (q, w)))):
        graph.output(value, f"y{i}")
    given = {"q": data[::-1].reshape(3, 4), "s": np.array(2, np.float32)}
    got = rlx.compile(graph, device="cpu")(given)
    for key, array in run_graph(graph, given, {"w": data}).items():
        assert got[key].dtype == array.dtype
        np.testing.assert_array_equal(got[key].astype(np.float32), array.astype(np.float32), err_msg=key)


def test_narrow_type_within_an_expression() -> None:
    """An op whose scalar code only passes through an 8-bit float."""
    graph = Graph("within")
    graph.output(rlx.cpu_test_rounded(graph.input("x", (9,))) + 1.0, "y")
    model = rlx.compile(graph, device="cpu")
    x = np.linspace(-3, 3, 9, dtype=np.float32)
    np.testing.assert_array_equal(model.run([x])[0], x.astype(DTYPES["f8e4m3"].numpy).astype(np.float32) + 1)


@rlx.register
class CpuTestRounded(Op):
    """x rounded to an 8-bit float."""

    def infer(self, x: TensorType) -> TensorType:
        return x

    def reference(self, x: Array) -> Array:
        return x.astype(DTYPES["f8e4m3"].numpy).astype(x.dtype)

    def lower(self, k: Any, x: Any) -> Any:
        return k.map(lambda *i: k.cast(x(*i), "f8e4m3"))


# ---- errors stop the run, not the process


def graph_of(op: Op, *types: tuple[tuple[Any, ...], str], name: str = "bad") -> Graph:
    graph = Graph("one")
    values = [graph.input(f"x{i}", shape, dtype) for i, (shape, dtype) in enumerate(types)]
    for number, value in enumerate(graph.add(op, *values, name=name)):
        graph.output(value, f"y{number}")
    return graph


def ints(*values: int, dtype: Any = np.int64) -> Array:
    return np.array(values, dtype)


STOPS: dict[str, tuple[Op, list[Array], list[Array], str]] = {
    "division by zero": (elementwise.Div(), [ints(1, 2, 3), ints(1, 0, 2)], [ints(4, 6, 9), ints(2, 3, -3)], "zero"),
    "remainder by zero": (
        elementwise.Mod(),
        [np.arange(40, dtype=np.int8), np.where(np.arange(40) == 37, 0, 3).astype(np.int8)],
        [np.arange(40, dtype=np.int8), np.full(40, 7, np.int8)],
        "zero",
    ),
    "unsigned division by zero": (
        elementwise.Div(),
        [ints(1, dtype=np.uint16), ints(0, dtype=np.uint16)],
        [ints(9, dtype=np.uint16), ints(4, dtype=np.uint16)],
        "zero",
    ),
    "index too large": (index.Gather(0), [np.ones((3, 5)), ints(0, 3)], [np.eye(3, 5), ints(-1, 2)], "3"),
    "index too small": (index.Gather(0), [np.ones((3, 5)), ints(-4, 0)], [np.eye(3, 5), ints(-3, 2)], "-4"),
    "index in a vector": (
        index.GatherElements(0),
        [np.ones((3, 40)), np.where(np.arange(40) == 21, 7, 0)[None]],
        [np.ones((3, 40)), np.full((1, 40), -1)],
        "7",
    ),
    "index of a tuple": (index.GatherND(), [np.ones((3, 5)), ints(1, 5)], [np.eye(3, 5), ints(1, 1)], "5"),
}


@pytest.mark.parametrize("what", STOPS)
def test_execution_error(what: str) -> None:
    """The error names the node and the value; the model, views and clones of it work afterwards."""
    op, bad, good, shown = STOPS[what]
    graph = graph_of(op, *((a.shape, a.dtype.name) for a in bad), name="culprit")
    model = rlx.compile(graph, device="cpu")
    for _ in range(2):
        with pytest.raises(ExecutionError, match="culprit") as raised:
            model.run(bad)
        assert shown in str(raised.value)
        expected = run_graph(graph, dict(zip(("x0", "x1"), good, strict=True)))["y0"]
        for run in (model.run, model.run_views, model.clone().run):
            np.testing.assert_array_equal(run(good)[0], expected)
    with pytest.raises(ExecutionError, match="culprit"):
        run_graph(graph, dict(zip(("x0", "x1"), bad, strict=True)))


def test_error_in_prepare() -> None:
    """A zero divisor among the params stops the first run; with other params the model works."""
    graph = Graph("prepare")
    w, x = graph.param("w", (4,), "i32"), graph.input("x", (4,), "i32")
    graph.output(x + graph.add(elementwise.Div(), graph.constant(ints(8, 8, 8, 8, dtype=np.int32)), w)[0], "y")
    model = rlx.compile(graph, device="cpu")
    model.set_params({"w": ints(1, 2, 0, 4, dtype=np.int32)})
    with pytest.raises(ExecutionError, match="zero"):
        model.run([np.zeros(4, np.int32)])
    model.set_params({"w": ints(1, 2, 4, 8, dtype=np.int32)})
    np.testing.assert_array_equal(model.run([np.zeros(4, np.int32)])[0], [8, 4, 2, 1])


def test_failed_guard_and_extent_beyond_its_bound() -> None:
    """Sizes that can't be are refused before anything runs; the model works at others."""
    graph = Graph("guards")
    x, y = graph.input("x", (Dim("n", 0, 8), 3)), graph.input("y", (Dim("m", 0, 8), 3))
    graph.output(x + y, "z")
    model = rlx.compile(graph, device="cpu")
    for n, m in ((2, 3), (9, 9)):
        with pytest.raises(RlxError) as raised:
            model.run([np.ones((n, 3), np.float32), np.ones((m, 3), np.float32)])
        assert any(word in str(raised.value) for word in ("'n'", "'m'", "n", "m"))
        np.testing.assert_array_equal(model.run([np.ones((4, 3), np.float32)] * 2)[0], np.full((4, 3), 2))


# ---- shapes without elements, without axes, without kernels


def test_no_elements_at_all() -> None:
    """Empty tensors pass through every kind of kernel, and through `out=`, views and rows."""
    graph = Graph("empty")
    x = graph.input("x", (Dim("n", 0, 4), 6))
    w = graph.param("w", (6, 3), data=np.ones((6, 3), np.float32))
    h = rlx.softmax(x @ w)
    graph.output(h, "h")
    graph.output(h.sum(0), "total")
    graph.output(graph.add(layout.Transpose(), x)[0], "t")
    model = rlx.compile(graph, device="cpu")
    for n in (0, 3, 0):
        given = np.ones((n, 6), np.float32)
        out = [np.empty((n, 3), np.float32), np.empty(3, np.float32), np.empty((6, n), np.float32)]
        model.run([given], out=out)
        for got in (out, model.run([given]), model.run_views([given])):
            assert [a.shape for a in got] == [(n, 3), (3,), (6, n)]
            np.testing.assert_allclose(got[1], np.full(3, n / 3, np.float32))


def test_graph_of_scalars() -> None:
    """Tensors without axes work as inputs, params, constants and outputs."""
    graph = Graph("scalars")
    x, w = graph.input("x", ()), graph.param("w", (), data=np.array(3, np.float32))
    graph.output(x * w + 1.0, "y")
    graph.output(x, "x2")
    model = rlx.compile(graph, device="cpu")
    y, x2 = model.run([np.float32(2)])
    assert (y.shape, float(y), float(x2)) == ((), 7.0, 2.0)


def test_graph_without_kernels() -> None:
    """A graph that only hands its leaves on, and one without inputs or outputs."""
    graph = Graph("leaves")
    graph.output(graph.input("x", (3,)), "y")
    assert rlx.compile(graph, device="cpu").run([np.arange(3, dtype=np.float32)])[0].tolist() == [0, 1, 2]
    constant = Graph("constant")
    constant.output(constant.constant(np.arange(4)), "c")
    assert rlx.compile(constant, device="cpu").run([])[0].tolist() == [0, 1, 2, 3]
    nothing = Graph("nothing")
    assert rlx.compile(nothing, device="cpu").run([]) == []


# ---- outputs that are not results of a kernel


def leaves_graph() -> Graph:
    graph = Graph("outputs")
    x = graph.input("x", (2, 6))
    w = graph.param("w", (2, 6), data=np.arange(12, dtype=np.float32).reshape(2, 6))
    c = graph.constant(np.arange(12, dtype=np.float32).reshape(2, 6) * 10)
    h = x + w
    for name, value in (("x", x), ("w", w), ("c", c), ("h", h)):
        graph.output(value, f"{name} itself")
        graph.output(value.reshape(3, 4), f"view of {name}")
        graph.output(graph.add(layout.Slice((1, 0), (1, 6), (1, 1)), value)[0], f"row of {name}")
        graph.output(value, f"{name} again")
    return graph


def test_outputs_that_are_leaves_views_and_repeated() -> None:
    """Inputs, params, constants, their views and doubles are right in run, run_views, out= and read_output_row."""
    graph = leaves_graph()
    model = rlx.compile(graph, device="cpu")
    for seed in range(2):
        x = np.random.default_rng(seed).standard_normal((2, 6)).astype(np.float32)
        kept = x.copy()
        expected = run_graph(graph, {"x": x})
        got = model(x=x)
        views = model.run_views([x])
        for name, array in expected.items():
            np.testing.assert_array_equal(got[name], array, err_msg=name)
            np.testing.assert_array_equal(views[name], array, err_msg=name)
            np.testing.assert_array_equal(model.read_output_row(name, -1), array[-1], err_msg=name)
            assert got[name].flags.writeable
        out = {name: np.zeros_like(array) for name, array in expected.items()}
        model.run([x], out=out)
        for name, array in expected.items():
            np.testing.assert_array_equal(out[name], array, err_msg=f"out= {name}")
        for array in (*got.values(), *out.values()):
            array[...] = -1  # the caller's to change
        np.testing.assert_array_equal(x, kept)
        np.testing.assert_array_equal(model(x=x)["w itself"], expected["w itself"])


# ---- an op of a user's own


@rlx.register
class CpuTestTriangle(Op):
    """Lower triangle of a matrix, in NumPy alone."""

    offset: int = 0

    def infer(self, x: TensorType) -> TensorType:
        return TensorType(x.shape, x.dtype)

    def reference(self, x: Array) -> Array:
        return np.tril(x, self.offset)


def test_op_with_only_a_reference_is_a_host_call() -> None:
    """It runs between kernels, at symbolic sizes, and the dispatch report shows the sync point."""
    graph = Graph("host")
    x = graph.input("x", (Dim("n", 0, 9), 4))
    graph.output(rlx.cpu_test_triangle(x * 2.0, offset=1) + 1.0, "y")
    model = rlx.compile(graph, device="cpu")
    for n in (3, 0, 7):
        given = np.random.default_rng(n).standard_normal((n, 4)).astype(np.float32)
        for run in (model.run, model.run_views, model.clone().run):
            np.testing.assert_array_equal(run([given])[0], np.tril(given * 2, 1) + 1)
    report = model.explain("dispatch")
    assert "host" in report
    assert "cpu_test_triangle" in report
    assert "sync point" in report


def test_host_call_of_a_param_runs_when_params_change() -> None:
    """A host call that depends on params only is part of `prepare`."""
    graph = Graph("host prepare")
    x, w = graph.input("x", (3, 3)), graph.param("w", (3, 3))
    graph.output(x + rlx.cpu_test_triangle(w), "y")
    model = rlx.compile(graph, device="cpu")
    zero = np.zeros((3, 3), np.float32)
    for value in (1, 2):
        model.set_params({"w": np.full((3, 3), value, np.float32)})
        np.testing.assert_array_equal(model.run([zero])[0], np.tril(np.full((3, 3), value)))


def test_every_op_has_cases() -> None:
    """An op added to rlx.ops is compared with its reference, or refused."""
    without = [name for name in NAMES if not fixed_cases(name)]
    assert not without, f"add cases to rlx/testing/cases.py for {without}"
    assert all(inspect.getdoc(OPS[name]) for name in NAMES)
