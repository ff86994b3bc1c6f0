"""What all library devices share, on those that are here: every op, control flow, states, errors and refusals."""

from __future__ import annotations

import logging
import math
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import dispatch_report
import numpy as np
import pytest

import rlx
from rlx.backends import BACKENDS, backend_named
from rlx.backends.library import executable
from rlx.backends.reference import run_graph
from rlx.errors import DeviceUnavailable, ExecutionError, OptionError, UnsupportedOp
from rlx.estimate.calibrate import known_overhead
from rlx.estimate.graph import estimate_graph
from rlx.ir.dtype import DTYPES, dtype_of
from rlx.ir.graph import Array, Graph, TensorType, Value
from rlx.ir.shape import Dim
from rlx.ops import control, elementwise, index, normalize, select
from rlx.ops.base import OPS, Op
from rlx.options import CompileOptions
from rlx.testing.cases import covered, fixed_cases, symbolic_cases
from rlx.testing.oracle import Batch, Case, Tolerance, compare_results

DEVICES = ("xla", "mlx")
NAMES = [name for name in sorted(OPS) if covered(name)]
QUICK = 12  # cases of an op without --full: XLA takes 20 to 80 ms to compile one
TOGETHER = 24  # cases of one graph


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """The name of each library device; skips, saying why, where it is absent."""
    name: str = request.param
    found = backend_named(name).available()
    if not found.present:
        pytest.skip(f"{found.reason}: {found.remedy}")
    return name


# ---- every op

# What libraries may differ in from the reference beyond the tolerance of an op: each has a cause and its bound.
UNIT = {"f64": 2.0**-53}  # of one rounding; half types are computed in f32
LEAST = {"f32": 2.0**-126, "bf16": 2.0**-126, "f64": 2.0**-1022}  # XLA flushes smaller results to 0
SUMS: dict[str, Callable[[Any, Array], Any]] = {  # of the magnitudes of what a result adds up
    "col2im": lambda op, x: math.prod(op.kernel) * x,
    "dft": lambda op, x: x.sum(axis=(op.axis, -1)),
    "reduce_sum": lambda op, x: x.sum(axis=op.axes),
}
PLACES = frozenset(("grid_sample", "interpolate_axis", "roi_align"))


def adapted(device: str, case: Case, dtype: str, allowed: Tolerance, arrays: list[Array]) -> Tolerance:
    """The tolerance of a device for a result of a case of these arrays.

    Libraries add up terms, which may cancel, in orders of their own: 4 roundings of the sum of their magnitudes. XLA
    divides by what it broadcasts by way of the reciprocal, 3 roundings in all, and contracts products and sums (FMA):
    where places in x are computed, up to as much of the place, times how much x changes there.
    """
    if not DTYPES[dtype].is_float:
        return allowed
    name, unit = case.op.op_name, UNIT.get(dtype, 2.0**-24)
    relative, absolute = allowed.relative, allowed.absolute
    if name in SUMS and arrays[0].size:
        magnitudes = np.abs(arrays[0].astype(np.float64))
        absolute = max(absolute, 4 * unit * float(np.max(SUMS[name](case.op, magnitudes))))
    if device == "xla":
        absolute = max(absolute, LEAST.get(dtype, 0))
        if name == "div" and dtype in ("f32", "f64"):
            relative = 3 * unit
        if name in PLACES and arrays[0].size and len(arrays) > 1:  # else they are known before the run
            x = arrays[0].astype(np.float64)
            absolute += 3 * unit * max(x.ndim - 2, 1) * max(x.shape) * float(x.max() - x.min())
    return Tolerance(relative, absolute)


def flushed(array: Array) -> Array:
    """The array with 0 for denormals, as XLA reads f32, f64 and bf16 (f16 is computed in f32)."""
    dtype = dtype_of(array.dtype)
    if not dtype.is_float or dtype.name == "f16":
        return array
    least = np.finfo(np.float64 if dtype.name == "f64" else np.float32).tiny
    with np.errstate(all="ignore"):
        wide = array.astype(np.float64)
        return np.where(np.abs(wide) < least, np.copysign(0, wide), wide).astype(array.dtype)


def check(device: str, cases: list[Case], sizes: list[dict[str, int]]) -> None:
    """Compares all cases with the reference at each of the sizes; AssertionError for all that differ."""
    wrong = []
    for first in range(0, len(cases), TOGETHER):
        part = cases[first : first + TOGETHER]
        batch = Batch(part if first == 0 or sizes == [{}] else [cases[0], *part])  # the first has every dim
        model = rlx.compile(batch.graph, device=device)
        for seed, extents in enumerate(sizes):
            try:
                compare_batch(device, batch, model, seed, extents)
            except AssertionError as error:
                wrong.append(f"at {extents}: {error}")
    assert not wrong, "\n".join(wrong)


def compare_batch(device: str, batch: Batch, model: Any, seed: int, extents: dict[str, int]) -> None:
    """Compares one run of the cases of a batch with the reference."""
    inputs, params = batch.arrays(seed, extents)
    if device == "xla":
        inputs, params = ({n: flushed(a) for n, a in arrays.items()} for arrays in (inputs, params))
    if params:
        model.set_params(params)
    given = inputs | params
    allowed = {}
    for output in batch.graph.outputs:
        number = int(output.name[1:].partition(".")[0])
        case, names = batch.cases[number], [n for n in batch.leaves if n.startswith(f"c{number}.")]
        arrays = [given[n].T if batch.leaves[n][2] else given[n] for n in names]
        allowed[output.name] = adapted(device, case, output.value.dtype.name, batch.allowed[output.name], arrays)
    compare_results(run_graph(batch.graph, inputs, params), model(inputs), allowed, batch.labels)


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", NAMES)
def test_library_op(name: str, device: str, request: pytest.FixtureRequest) -> None:
    """Cases of all dtypes, sizes and attributes; without --full some of them, chosen by the seed."""
    cases = fixed_cases(name)
    assert cases, f"add cases of {name} to rlx.testing"
    if issubclass(OPS[name], select.Produced):
        with pytest.raises(UnsupportedOp, match="data decide"):
            check(device, cases, [{}])
        return
    if not request.config.option.full:
        cases = random.Random(f"{request.config.option.seed} {name}").sample(cases, min(QUICK, len(cases)))
    check(device, cases, [{}])


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", NAMES)
def test_library_op_of_symbolic_sizes(name: str, device: str, request: pytest.FixtureRequest) -> None:
    """A graph with dims, run at extents one after the other."""
    if issubclass(OPS[name], select.Produced):
        return
    full = request.config.option.full
    for cases, extents in symbolic_cases(name):
        picked = (
            cases if full else random.Random(f"{request.config.option.seed} {name}").sample(cases, min(6, len(cases)))
        )
        both = picked if cases[0] in picked else [cases[0], *picked]
        check(device, both, list(extents) if full else list(extents)[-2:])


@pytest.mark.parametrize("name", dispatch_report.DEVICES)
def test_dispatch_report_is_current(name: str) -> None:
    """docs/backends.md says how each op runs; `python tools/dispatch_report.py` writes it anew."""
    found = backend_named(name).available()
    if not found.present:
        pytest.skip(f"{found.reason}: {found.remedy}")
    written, now = dispatch_report.read().get(name, {}), dispatch_report.column(name)
    changed = {op: how for op, how in now.items() if written.get(op) != how}
    assert not changed, "run `python tools/dispatch_report.py`"
    assert not set(written) - set(now)


# ---- dims: one function for each set of extents


def dynamic_graph() -> Graph:
    graph = Graph("dynamic")
    x = graph.input("x", (Dim("n", 0, 50), 4))
    graph.output(normalize_rows(graph, x) * 2.0, "y")
    return graph


def normalize_rows(graph: Graph, x: Value) -> Value:
    return graph.add(normalize.Softmax(-1), x)[0]


def test_a_compile_for_each_extent_is_logged_and_kept(
    device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log says for what and why; a bounded number is kept, the one not used for longest goes first."""
    monkeypatch.setattr(executable, "KEPT", 2)
    graph = dynamic_graph()
    model = rlx.compile(graph, device=device)
    seen = []
    for n in (3, 5, 3, 0, 5):
        caplog.clear()
        x = np.random.default_rng(n).standard_normal((n, 4)).astype(np.float32)
        with caplog.at_level(logging.INFO, "rlx"):
            got = model.run([x])[0]
        np.testing.assert_allclose(got, run_graph(graph, {"x": x})["y"], rtol=1e-5)
        seen.append([r.getMessage() for r in caplog.records if r.name == "rlx"])
    assert [len(lines) for lines in seen] == [1, 1, 0, 1, 1]
    assert "n=3" in seen[0][0]
    assert "first run" in seen[0][0]
    assert "not seen before" in seen[1][0]
    assert "more than 2 sets of extents" in seen[4][0]


def test_extents_are_checked_before_the_run(device: str) -> None:
    """Beyond a bound, and sizes that disagree."""
    model = rlx.compile(dynamic_graph(), device=device)
    with pytest.raises(ExecutionError, match="'n'"):
        model.run([np.ones((51, 4), np.float32)])
    assert model.run([np.ones((2, 4), np.float32)])[0].shape == (2, 4)


# ---- what stops a run


def one(op: Op, *arrays: Array, name: str = "culprit") -> Graph:
    graph = Graph("one")
    values = [graph.input(f"x{i}", a.shape, a.dtype) for i, a in enumerate(arrays)]
    graph.output(graph.add(op, *values, name=name)[0], "y")
    return graph


STOPS: dict[str, tuple[Op, list[Any], list[Any], str]] = {
    "division": (elementwise.Div(), [[1, 2], [1, 0]], [[7, 9], [2, -4]], "zero"),
    "remainder": (elementwise.Mod(), [[1, 2], [0, 5]], [[7, -9], [2, 4]], "zero"),
    "beyond": (index.Gather(0), [[5, 6, 7], [0, 3]], [[5, 6, 7], [-1, 2]], "3"),
    "before": (index.Gather(0), [[5, 6, 7], [-4, 3]], [[5, 6, 7], [-3, 2]], "-4"),
    "elements": (index.GatherElements(0), [[5, 6, 7], [0, 9, 1]], [[5, 6, 7], [0, -2, 1]], "9"),
    "tuple": (index.GatherND(), [[5, 6, 7], [[1], [-7]]], [[5, 6, 7], [[1], [-1]]], "-7"),
}


@pytest.mark.parametrize("what", STOPS)
def test_bad_elements_stop_the_run(device: str, what: str) -> None:
    """Libraries clamp indices and divide by zero silently: here the node and the element are named."""
    op, bad, good, shown = STOPS[what]
    wrong, right = ([np.array(a, np.int64) for a in arrays] for arrays in (bad, good))
    graph = one(op, *wrong)
    model = rlx.compile(graph, device=device)
    for _ in range(2):
        with pytest.raises(ExecutionError, match="culprit") as raised:
            model.run(wrong)
        assert shown in str(raised.value)
        expected = run_graph(graph, {f"x{i}": a for i, a in enumerate(right)})["y"]
        np.testing.assert_array_equal(model.run(right)[0], expected)


# ---- regions


def region(name: str, types: list[TensorType], build: Callable[..., Any]) -> Graph:
    graph = Graph(name)
    made = build(graph, *(graph.input(f"a{i}", t.shape, t.dtype) for i, t in enumerate(types)))
    for i, value in enumerate(made if isinstance(made, tuple) else (made,)):
        graph.output(value, f"r{i}")
    return graph


F = TensorType((3,), DTYPES["f32"])
I = TensorType((), DTYPES["i64"])


def test_branches(device: str) -> None:
    """Each branch, one with an op that is decomposed, and one that stops the run only where it is taken."""
    graph = Graph("if")
    flag, x, i = graph.input("flag", (), "bool"), graph.input("x", (3,)), graph.input("i", (), "i64")
    then = region("then", [F, I], lambda g, a, i: g.add(index.Gather(0), a, i)[0].reshape(1) + a)
    other = region("otherwise", [F, I], lambda g, a, i: g.add(OPS["cum_sum"](0), a)[0])
    graph.output(graph.add(control.If(), flag, x, i, regions=[then, other])[0], "y")
    model = rlx.compile(graph, device=device)
    given = np.arange(3, dtype=np.float32)
    for take in (True, False):
        inputs = {"flag": np.array(take), "x": given, "i": np.array(2)}
        np.testing.assert_allclose(model(inputs)["y"], run_graph(graph, inputs)["y"])
    bad = {"flag": np.array(True), "x": given, "i": np.array(3)}
    with pytest.raises(ExecutionError, match="index out of range: 3"):
        model(bad)
    np.testing.assert_allclose(model(bad | {"flag": np.array(False)})["y"], [0, 1, 3])


def test_loops(device: str) -> None:
    """A while loop whose rounds the data decide, and scans over rows in both directions."""
    graph = Graph("loops")
    count, x, rows = graph.input("count", (), "i64"), graph.input("x", (3,)), graph.input("rows", (Dim("n", 0, 9), 3))
    zero = graph.constant(0, "i64")
    cond = region("cond", [I, F, I], lambda g, i, a, n: g.add(elementwise.Less(), i, n)[0])
    body = region("body", [I, F, I], lambda g, i, a, n: (i + g.constant(1, "i64"), a * 2.0))
    graph.output(graph.add(control.While(2), zero, x, count, regions=[cond, body])[1], "doubled")
    step = region("step", [F, F, F], lambda g, c, row, w: (c + row * w, c * row))
    for reverse in (False, True):
        made = graph.add(control.Scan(1, 1, reverse=reverse), x, rows, x, regions=[step])
        graph.output(made[0], f"last {reverse}")
        graph.output(made[1], f"stacked {reverse}")
    model = rlx.compile(graph, device=device)
    rng = np.random.default_rng(0)
    for n, times in ((4, 3), (0, 0), (7, 1)):
        inputs = {
            "count": np.array(times),
            "x": np.ones(3, np.float32),
            "rows": rng.standard_normal((n, 3)).astype(np.float32),
        }
        for name, array in run_graph(graph, inputs).items():
            np.testing.assert_allclose(model(inputs)[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


# ---- leaves


def test_states_live_between_runs(device: str) -> None:
    """A running sum starts at its initial value and keeps what a failed run did not change."""
    graph = Graph("states")
    x, divisor = graph.input("x", (2,), "i32"), graph.input("d", (), "i32")
    total = graph.state("total", (2,), "i32", initial=np.array([10, 20], np.int32))
    calls = graph.state("calls", (), "i32")
    new = total + graph.add(elementwise.Div(), x, divisor)[0]
    graph.update(total, new)
    graph.update(calls, calls + 1)
    graph.output(new, "sum")
    graph.output(calls, "before")
    model = rlx.compile(graph, device=device)
    x, one_, none = np.array([4, 6], np.int32), np.array(1, np.int32), np.array(0, np.int32)
    assert [np.asarray(a).tolist() for a in model.run([x, one_])] == [[14, 26], 0]
    with pytest.raises(ExecutionError):
        model.run([x, none])
    assert [np.asarray(a).tolist() for a in model.run([x, one_])] == [[18, 32], 1]


def test_arrays_are_the_callers(device: str) -> None:
    """Params are copied, outputs fresh, `out` is filled, rows of the last run can be read."""
    graph = Graph("arrays")
    x, w = graph.input("x", (2, 3)), graph.param("w", (3,))
    graph.output(x * w, "y")
    graph.output(x, "x again")
    graph.output(w, "w itself")
    model = rlx.compile(graph, device=device)
    weights, given = np.array([1, 2, 3], np.float32), np.ones((2, 3), np.float32)
    model.set_param("w", weights)
    weights[...] = 7
    for _ in range(2):
        y, again, own = model.run([given])
        assert y.numpy().tolist() == [[1, 2, 3]] * 2
        assert own.numpy().tolist() == [1, 2, 3]
        for array in (y, again, own):
            array.numpy()[...] = 9
        assert given.tolist() == [[1, 1, 1]] * 2
    out = np.zeros((2, 3), np.float32)
    assert model.run([given], outputs=["y"], out={"y": out})[0] is out
    assert out.tolist() == [[1, 2, 3]] * 2
    np.testing.assert_array_equal(model.read_output_row("y", -1), [1, 2, 3])
    model.set_param("w", np.zeros(3, np.float32))
    assert not np.any(model.run([given])[0])


@rlx.register
class LibraryTestTriangle(Op):
    """Lower triangle of a matrix, in NumPy alone; stops the run at a NaN."""

    def infer(self, x: TensorType) -> TensorType:
        return TensorType(x.shape, x.dtype)

    def reference(self, x: Array) -> Array:
        if np.isnan(x).any():
            raise ExecutionError("there is a NaN")
        return np.tril(x)


def test_op_with_only_a_reference_is_a_host_call(device: str) -> None:
    """It runs between functions of the library, and what it raises reaches the caller."""
    graph = Graph("host")
    x = graph.input("x", (Dim("n", 0, 9), 4))
    graph.output(rlx.library_test_triangle(x * 2.0, name="corner") + 1.0, "y")
    model = rlx.compile(graph, device=device)
    for n in (3, 7, 0):
        given = np.random.default_rng(n).standard_normal((n, 4)).astype(np.float32)
        np.testing.assert_array_equal(model.run([given])[0], np.tril(given * 2) + 1)
    with pytest.raises(ExecutionError, match=r"corner.*there is a NaN"):
        model.run([np.full((2, 4), np.nan, np.float32)])
    assert "host" in model.explain("dispatch")


@pytest.mark.parametrize("dtype", ["f64", "i64", "u64", "f32", "bf16", "bool"])
def test_host_calls_keep_every_bit(device: str, dtype: str) -> None:
    """Elements of 64 bits are not narrowed on the way to the host and back."""
    graph = Graph("bits")
    x = graph.input("x", (2, 2), dtype)
    graph.output(rlx.library_test_triangle(x), "y")
    given = np.array([[1, 0], [2, 3]]).astype(DTYPES[dtype].numpy)
    if DTYPES[dtype].bits == 64:
        given = given / 3 if dtype == "f64" else given + given.dtype.type(2**40 + 1)
    np.testing.assert_array_equal(rlx.compile(graph, device=device).run([given])[0], np.tril(given))


# ---- what is not offered, and what is not there


def test_refusals_are_told_beforehand(device: str) -> None:
    """What the device lacks is missing from `capabilities` and raises the same error, which points there."""
    model = rlx.compile(dynamic_graph(), device=device)
    x = np.ones((2, 4), np.float32)
    lacking: dict[str, Callable[[], object]] = {
        "arena": lambda: model.arena,
        "slots": lambda: model.run_slots(x),
        "clone": model.clone,
        "profile": lambda: model.profile([x]),
    }
    for name, call in lacking.items():
        assert name not in model.capabilities
        with pytest.raises(OptionError, match="capabilities") as raised:
            call()
        assert device in str(raised.value)
    with pytest.raises(OptionError, match="capabilities"):
        model.run_views([x])
    assert model.plan is None


def test_sizes_that_data_decide_are_refused(device: str) -> None:
    """All nodes that make them are named at once."""
    graph = Graph("data")
    x = graph.input("x", (4,))
    for i in range(2):
        graph.output(graph.add(select.NonZero(Dim(f"count{i}", 0, 4)), x, name=f"found{i}")[0], f"y{i}")
    with pytest.raises(UnsupportedOp, match="found0") as raised:
        rlx.compile(graph, device=device)
    assert {n.name for n in raised.value.nodes} == {"found0", "found1"}
    assert "data decide" in str(raised.value)


@pytest.mark.parametrize("name", DEVICES)
def test_absent_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the device says how to get it, and only naming it fails."""
    module = sys.modules[type(backend_named(name)).__module__]

    def nothing(package: str) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(module, "find_spec", nothing)
    found = backend_named(name).available()
    assert not found.present
    assert f"[{name}]" in found.remedy
    with pytest.raises(DeviceUnavailable, match=rf"pip install '.*\[{name}\]'"):
        rlx.compile(dynamic_graph(), device=name)
    assert rlx.compile(dynamic_graph(), policy=rlx.DevicePolicy(only=("cpu", name))).device == "cpu"


def test_plain_import_leaves_the_libraries_alone() -> None:
    """`import rlx`, a compile for the CPU and the list of devices' classes import neither jax nor mlx."""
    code = (
        "import sys, rlx; from rlx.backends import BACKENDS, backend_named; [backend_named(n) for n in BACKENDS];"
        "g = rlx.Graph('g'); g.output(g.input('x', (2,)) + 1.0, 'y');"
        "assert rlx.compile(g, device='cpu').device == 'cpu';"
        "print([m for m in ('jax', 'mlx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert next(iter(BACKENDS)) == "cpu"


def test_its_memory_is_what_the_estimate_says(device: str) -> None:
    """Every value at once, which is marked as a bound: the choice and `rlx.estimate` count alike, at the bounds."""
    graph = dynamic_graph()
    chosen = rlx.choose(graph, rlx.DevicePolicy(only=(device,)), at={"n": 2}, calibrate=False).chosen
    made = estimate_graph(graph, backend_named(device), CompileOptions(), known_overhead(device))
    assert chosen.peak_bytes == made.peak_bytes - made.overhead_bytes
    assert {"activation", "workspace"} <= set(chosen.bounded)


# ---- real models


@pytest.mark.models
@pytest.mark.parametrize("name", ["orientation", "minilm-int8", "magika"])
def test_library_model(name: str, device: str, model_path: Callable[[str], Path]) -> None:
    """PP-LCNet, MiniLM and magika against ONNX Runtime."""
    onnxruntime = pytest.importorskip("onnxruntime")
    rng = np.random.default_rng(0)
    ids = rng.integers(1000, 20000, (2, 12))
    inputs: dict[str, dict[str, Array]] = {
        "orientation": {"x": rng.standard_normal((1, 3, 224, 224)).astype(np.float32)},
        "minilm-int8": {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)},
        "magika": {"bytes": rng.integers(0, 256, (1, 2048)).astype(np.int32)},
    }
    path = str(model_path(name))
    expected = onnxruntime.InferenceSession(path).run(None, inputs[name])
    for got, array in zip(rlx.load(path, device=device).run(inputs[name]), expected, strict=True):
        np.testing.assert_allclose(got, array, rtol=1e-4, atol=1e-4 * np.abs(array).max())


# ---- threads


def test_graphs_run_in_any_thread(device: str) -> None:
    """Compiled in one thread, run in others, by a queue and by turns: states go on from run to run."""
    g = rlx.Graph("count")
    x, count = g.input("x", (Dim("n", 1, 8), 16)), g.state("count", (1,))
    more = count + 1.0
    g.update(count, more)
    g.output((x @ g.param("w", (16, 16), data=np.eye(16, dtype=np.float32))) * more, name="y")
    model = rlx.compile(g, device=device, busy="wait")
    x_now = np.ones((4, 16), np.float32)
    ys = [y for (y,) in model.run_many([[x_now]] * 3)]
    threads = [threading.Thread(target=lambda: ys.extend(model.run([x_now]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    ys += [*model.submit([x_now]).result(60), *model.run([x_now])]
    assert sorted(float(np.asarray(y)[0, 0]) for y in ys) == list(range(1, 10))
