"""Forms of ops that exporters of different years write, against ONNX Runtime at several sizes from one compile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import rlx
from rlx.errors import ExecutionError, RlxError, UnsupportedOp
from rlx.importers.onnx import load
from rlx.ir.dtype import DTYPES

Array = np.ndarray[Any, Any]


def built(opset: int, inputs: str, body: str, outputs: str = "y") -> onnx.ModelProto:
    """A model in ONNX's own text form; outputs without types."""
    ir = 3 if opset < 9 else 8
    typed = ", ".join(f"float {name}" for name in outputs.split())
    text = f'<ir_version: {ir}, opset_import: ["": {opset}]> g ({inputs}) => ({typed}) {{ {body} }}'
    made = onnx.parser.parse_model(text)
    for output in made.graph.output:
        output.ClearField("type")
    return made


def compared(made: onnx.ModelProto, path: Path, cases: list[dict[str, Array]]) -> None:
    """The same shapes, element types and values, within 1e-5 and 1e-4 of the largest."""
    path.write_bytes(made.SerializeToString())
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    model = rlx.load(path, device="cpu", threads=1)
    for inputs in cases:
        shapes = [a.shape for a in inputs.values()]
        for got, want in zip(model.run(inputs), session.run(None, inputs), strict=True):
            assert (got.shape, got.dtype) == (want.shape, want.dtype), shapes
            np.testing.assert_allclose(got, want, 1e-4, 1e-5 + 1e-4 * np.abs(want).max(initial=0), err_msg=str(shapes))


def normal(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


# ---- Resize


MODES = [
    'mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"',
    'mode = "linear", coordinate_transformation_mode = "half_pixel"',
    'mode = "linear", coordinate_transformation_mode = "align_corners"',
    'mode = "cubic", coordinate_transformation_mode = "pytorch_half_pixel"',
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [0.37, 0.7, 2.54321])
def test_factors_that_are_no_binary_fractions(mode: str, scale: float, tmp_path: Path) -> None:
    """The size is floor(size * scale) in f32: 10 * 0.7 is 7, though the nearest f32 to 0.7 is less."""
    body = f"s = Constant <value = float[4] {{1.0, 1.0, {scale}, {scale}}}> () y = Resize <{mode}> (x, , s)"
    cases = [{"x": normal(1, 2, h, w)} for h, w in ((10, 20), (3, 30), (17, 100), (7, 9))]
    compared(built(13, "float[1,2,h,w] x", body), tmp_path / "m.onnx", cases)


FACTORS = [1.0009765625, 0.7, 1.1, 2.54321, 0.333333, 1.5, 7 / 3]


@pytest.mark.parametrize("factor", FACTORS)
def test_a_size_by_a_factor_is_the_same_for_fixed_and_symbolic_sizes(factor: float, tmp_path: Path) -> None:
    """floor(size * factor) in f32: 16383 * 1.0009765625 is 16399 there, one more than exactly."""
    body = f"s = Constant <value = float[1] {{{factor}}}> () y = Resize <axes = [0], {MODES[0]}> (x, , s)"
    (tmp_path / "m.onnx").write_bytes(built(18, "uint8[n] x", body).SerializeToString())
    model = rlx.load(tmp_path / "m.onnx", device="cpu")
    for n in (1, 3, 10, 255, 16383, 99999):
        want = int(np.floor(np.float32(n) * np.float32(factor)))
        x = np.zeros(n, np.uint8)
        assert model(x=x)["y"].shape == (want,)
        assert rlx.load(tmp_path / "m.onnx", device="reference", dims={"n": n})(x=x)["y"].shape == (want,)


@pytest.mark.parametrize("factor", [np.nan, -1.0, 0.0])
def test_a_factor_that_is_not_positive_is_an_error(factor: float, tmp_path: Path) -> None:
    """Both at import and in a run, where NaN gave no elements without a word."""
    path = tmp_path / "m.onnx"
    fixed = built(
        18, "float[8] x", f"s = Constant <value = float[1] {{7.0}}> () y = Resize <axes = [0], {MODES[0]}> (x, , s)"
    )
    fixed.graph.node[0].attribute[0].t.CopyFrom(onnx.numpy_helper.from_array(np.array([factor], np.float32)))
    path.write_bytes(fixed.SerializeToString())
    with pytest.raises(RlxError, match=r"factor|scales"):
        rlx.load(path, device="cpu")
    given = built(18, "float[8] x, float[1] s", f"y = Resize <axes = [0], {MODES[0]}> (x, , s)")
    path.write_bytes(given.SerializeToString())
    for device in ("cpu", "reference"):
        with pytest.raises(ExecutionError, match="size"):
            rlx.load(path, device=device)(x=np.zeros(8, np.float32), s=np.array([factor], np.float32))


@pytest.mark.parametrize("mode", MODES)
def test_factors_made_of_two_sizes(mode: str, tmp_path: Path) -> None:
    """As exporters of opset 10 and 11 write the resizing of one image to the size of another."""
    body = f"""
        xs = Shape (x)  ys = Shape (like)
        two = Constant <value = int64[1] {{2}}> ()  four = Constant <value = int64[1] {{4}}> ()
        xw = Slice (xs, two, four)  yw = Slice (ys, two, four)
        xf = Cast <to = 1> (xw)  yf = Cast <to = 1> (yw)
        q = Div (yf, xf)  ones = Constant <value = float[2] {{1.0, 1.0}}> ()
        s = Concat <axis = 0> (ones, q)  none = Constant <value = float[0] {{}}> ()
        y = Resize <{mode}> (x, none, s)
    """
    shapes = [((4, 8), (8, 4)), ((5, 6), (5, 12)), ((3, 7), (9, 2))]
    cases = [{"x": normal(1, 2, *a), "like": normal(1, 1, *b)} for a, b in shapes]
    compared(built(11, "float[1,2,h,w] x, float[1,1,H,W] like", body), tmp_path / "m.onnx", cases)


@pytest.mark.parametrize("mode", MODES)
def test_factors_that_are_an_input(mode: str, tmp_path: Path) -> None:
    factors = [(1, 1, 2, 1.5), (1, 1, 0.37, 0.7), (1, 1, 1, 3.3)]
    cases = [{"x": normal(1, 2, 6, 10), "s": np.array(s, np.float32)} for s in factors]
    compared(built(13, "float[1,2,h,w] x, float[4] s", f"y = Resize <{mode}> (x, , s)"), tmp_path / "m.onnx", cases)


# ---- opsets before 13: what later became inputs are attributes, softmax is over all axes from `axis` on ...

X = "float[b,3,h,8] x"
OLD = [  # opset, inputs, body, outputs
    (7, X, "y = Slice <starts = [1, -5], ends = [3, 100], axes = [1, 3]> (x)", "y"),
    (9, X, "y = Slice <starts = [0, 1], ends = [-1, 9999999]> (x)", "y"),
    (7, X, 'y = Pad <mode = "reflect", pads = [0, 0, 1, 2, 0, 0, 1, 0]> (x)', "y"),
    (10, X, "y = Pad <pads = [0, 0, 1, 2, 0, 1, 0, -1], value = 1.5> (x)", "y"),
    (7, X, "y = Clip <min = -0.5, max = 0.5> (x)", "y"),
    (10, X, "y = Clip <min = -0.25> (x)", "y"),
    (7, X, "d = Dropout <ratio = 0.3> (x) y = Relu (d)", "y"),
    (10, X, "y, m = Dropout <ratio = 0.3> (x)", "y"),
    (7, X, 'y = Upsample <mode = "nearest", scales = [1.0, 1.0, 2.0, 3.0]> (x)', "y"),
    (9, X, 's = Constant <value = float[4] {1.0, 1.0, 2.0, 1.5}> () y = Upsample <mode = "linear"> (x, s)', "y"),
    (10, X, 's = Constant <value = float[4] {1.0, 1.0, 0.6, 2.0}> () y = Resize <mode = "linear"> (x, s)', "y"),
    (10, X, "s = Constant <value = float[4] {1.0, 1.0, 1.3, 2.0}> () y = Resize (x, s)", "y"),
    (9, X, "y, i = TopK <k = 3> (x)", "y"),
    (10, X, "k = Constant <value = int64[1] {2}> () y, i = TopK <axis = 1> (x, k)", "y"),
    (11, X, "k = Constant <value = int64[1] {2}> () y, i = TopK <axis = 1, largest = 0> (x, k)", "y i"),
    (7, X, "a = Unsqueeze <axes = [0, 4]> (x) y = Squeeze <axes = [0]> (a)", "y"),
    (11, X, "y = Unsqueeze <axes = [-1]> (x)", "y"),
    (7, X, "y = ReduceSum <axes = [1, -1], keepdims = 0> (x)", "y"),
    (11, X, "y = ReduceMean <axes = [2]> (x)  z = ReduceL2 <axes = [3]> (x)", "y z"),
    (11, X, "y = ReduceLogSumExp (x)  z = ReduceProd <axes = [1]> (x)", "y z"),
    (7, X, "y = Softmax (x)  z = Softmax <axis = 2> (x)", "y z"),
    (11, X, "y = LogSoftmax <axis = 0> (x)  z = Softmax <axis = -1> (x)", "y z"),
    (7, X, "y = Hardmax <axis = 2> (x)", "y"),
    (11, X, "y, z = Split <axis = 3, split = [3, 5]> (x)  a, b = Split <axis = -1> (x)", "y z a b"),
    (7, X, "y = ArgMax <axis = 3, keepdims = 0> (x)  z = ArgMin <axis = 1> (x)", "y z"),
    (7, X, "c = Cast <to = 7> (x)  f = Cast <to = 1> (c)  y = Flatten <axis = 2> (f)", "y"),
    (7, X, "t = Transpose (x) y = Reshape (t, s) s = Constant <value = int64[2] {8, -1}> ()", "y"),
    (8, "float[b,3] x", ("k = Constant <value = float[3,4] {1,2,3,4,5,6,7,8,9,1,2,3}> () "
     "c = Constant <value = float[4] {1,2,3,4}> () y = Gemm <alpha = 0.5, beta = 2.0> (x, k, c)"), "y"),
    (8, X, "y = MaxPool <kernel_shape = [2, 3], strides = [1, 2], pads = [1, 1, 0, 1]> (x)", "y"),
    (10, X, "y = MaxPool <kernel_shape = [2, 3], strides = [2, 2], ceil_mode = 1> (x)", "y"),
    (7, X, 'y = AveragePool <kernel_shape = [3, 3], auto_pad = "SAME_UPPER", strides = [2, 2]> (x)', "y"),
    (10, X, "y = AveragePool <kernel_shape = [2, 2], count_include_pad = 1, pads = [1, 1, 1, 1]> (x)", "y"),
    (7, X, "y = LRN <size = 3, alpha = 0.1, beta = 0.6, bias = 2.0> (x)", "y"),
    (7, X, "y = LpNormalization <axis = 1, p = 1> (x)", "y"),
    (7, X, ("k = Constant <value = float[3] {1.0, 2.0, 0.5}> () z = Constant <value = float[3] {0.1, -0.2, 0.3}> () "
     "y = BatchNormalization <epsilon = 0.01> (x, k, z, z, k)"), "y"),
    (9, X, ("k = Constant <value = float[3] {1.0, 2.0, 0.5}> () z = Constant <value = float[3] {0.1, -0.2, 0.3}> () "
     "y = InstanceNormalization (x, k, z)"), "y"),
    (9, X, "s = Shape (x) z = ConstantOfShape <value = float[1] {2.5}> (s) y = Add (x, z)", "y"),
    (8, X, ("t = Constant <value = int64[4] {2, 3, 1, 1}> () n = Constant <value = int64[4] {1, 2, 1, 2}> () "
     "o = Constant <value = float[2,1,1,1] {1.0, 2.0}> () a = Tile (x, n)  y = Expand (o, t)"), "a y"),
    (7, X, "s = Sum (x, x, x)  m = Mean (x, s)  a = Max (x, m, s)  y = Min (a, x)", "y"),
    (7, X, "p = Constant <value = float[3,1,1] {0.1, 0.2, 0.3}> () y = PRelu (x, p)", "y"),
    (9, X, "i = Constant <value = int64[2] {-1, 0}> () y = Gather <axis = 3> (x, i)", "y"),
    (11, X, ("i = Constant <value = int64[1,1,1,2] {-1, 0}> () s = Shape (x) e = Constant <value = int64[1] {3}> () "
     "h = Slice (s, z, e) z = Constant <value = int64[1] {0}> () w = Constant <value = int64[1] {2}> () "
     "to = Concat <axis = 0> (h, w) j = Expand (i, to) y = GatherElements <axis = 3> (x, j)"), "y"),
    (9, X, "y = DepthToSpace <blocksize = 2> (t)  t = SpaceToDepth <blocksize = 2> (x)", "y"),
    (11, X, 't = SpaceToDepth <blocksize = 2> (x)  y = DepthToSpace <blocksize = 2, mode = "CRD"> (t)', "y"),
    (8, X, "a = Greater (x, o) o = Constant <value = float {0.1}> () b = Not (a) y = Cast <to = 1> (b)", "y"),
]  # fmt: skip


@pytest.mark.sample(12)
@pytest.mark.parametrize("opset, inputs, body, outputs", OLD, ids=lambda v: str(v)[:40])
def test_forms_of_older_opsets(opset: int, inputs: str, body: str, outputs: str, tmp_path: Path) -> None:
    made = built(opset, inputs, body, outputs)
    nodes = list(made.graph.node)  # some are written after what reads them: in order
    have, ordered = {"x"}, []
    while nodes:
        ready = next(n for n in nodes if set(n.input) <= have)
        nodes.remove(ready)
        ordered.append(ready)
        have.update(ready.output)
    del made.graph.node[:]
    made.graph.node.extend(ordered)
    sizes = [(3,), (1,), (17,)] if inputs != X else [(2, 6, 8), (1, 10, 8), (5, 4, 8)]
    cases = [{"x": normal(s[0], 3, *s[1:])} for s in sizes]
    compared(made, tmp_path / "m.onnx", cases)


@pytest.mark.parametrize("length", [3, 2**31, 2**60])
@pytest.mark.parametrize("opset", [10, 13])
def test_factors_that_are_not_one_for_each_axis_are_refused_at_once(opset: int, length: int) -> None:
    body = "y = Resize (x, s)" if opset == 10 else "y = Resize (x, , s)"
    made = built(opset, f"float[1, 1, 4, 4] x, float[{length}] s", body)
    with pytest.raises(RlxError, match="a vector of 4, one for each axis"):
        load(made.SerializeToString())


# ---- Recurrent layers


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_sequences_of_no_steps(tmp_path: Path, op: str, direction: str) -> None:
    """Their states are 0 in the end, whatever they were at first, as onnxruntime has it."""
    d, gates = 2 if direction == "bidirectional" else 1, {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    weights = {"w": normal(d, gates * 3, 2), "r": normal(d, gates * 3, 3)}
    cell = op == "LSTM"
    body = f'y, yh{", yc" * cell} = {op} <hidden_size = 3, direction = "{direction}"> (x, w, r, , n, h{", c" * cell})'
    states = {name: normal(d, 3, 3) for name in "hc"[: 1 + cell]}
    inputs = f"float[t, 3, 2] x, int32[3] n, {', '.join(f'float[{d}, 3, 3] {name}' for name in states)}"
    made = built(17, inputs, body, "y yh yc"[: 8 if cell else 4])
    made.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in weights.items())
    cases = [{"x": normal(t, 3, 2), "n": np.array(n, np.int32), **states} for t, n in ((4, (4, 0, 2)), (1, (0, 0, 0)))]
    compared(made, tmp_path / "m.onnx", cases)


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_run_time_scales_that_give_no_size(mode: str, device: str, tmp_path: Path) -> None:
    """One error that names the axis and shows the scale; later runs are as before."""
    node = helper.make_node("Resize", ["x", "", "s"], ["y"], mode=mode)
    given = [helper.make_tensor_value_info("x", 1, [1, 1, 4, 4]), helper.make_tensor_value_info("s", 1, [4])]
    graph = helper.make_graph([node], "g", given, [helper.make_empty_tensor_value_info("y")])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    model = rlx.load(path, device=device)
    x = np.ones((1, 1, 4, 4), np.float32)
    for axis in range(4):
        for scale in (0.0, -0.0, -1.0, -np.inf, np.nan, np.inf, 3e38, 1e30, 1e19):
            scales = np.ones(4, np.float32)
            scales[axis] = scale
            shown = re.escape(str(np.float32(scale)))
            with pytest.raises(ExecutionError, match=f"scale of axis {axis} must be above 0 .*, got {shown}"):
                model(x=x, s=scales)
        scales = np.ones(4, np.float32)
        scales[axis] = 2
        assert model(x=x, s=scales)["y"].shape == tuple(n * int(s) for n, s in zip(x.shape, scales, strict=True))


@pytest.mark.parametrize("dtype", ["i32", "i64", "u32", "u64"])
@pytest.mark.parametrize("op", ["ReduceL2", "ReduceLogSum", "ReduceLogSumExp"])
def test_roots_and_logarithms_of_integers(op: str, dtype: str) -> None:
    """In f64, then towards zero: sums do not wrap."""
    kind = DTYPES[dtype].numpy
    x = np.array([[3, 4, 12], [1, 0, 0], [9, 30, 2], [100, 1, 640]], kind)
    if op != "ReduceLogSumExp":
        x = np.concatenate([x, np.array([[2**30] * 3], kind)])
    name = {"i32": "int32", "i64": "int64", "u32": "uint32", "u64": "uint64"}[dtype]
    axes = "axes = Constant <value = int64[1] {1}> ()"
    sums = {
        "ReduceL2": lambda: np.sqrt(np.sum(x.astype(np.float64) ** 2, axis=1)),
        "ReduceLogSum": lambda: np.log(np.sum(x, axis=1, dtype=np.float64)),
        "ReduceLogSumExp": lambda: np.log(np.sum(np.exp(x.astype(np.float64)), axis=1)),
    }
    want = sums[op]().astype(kind)
    for opset, body in ((18, f"{axes} y = {op} (x, axes)"), (13, f"y = {op} <axes = [1], keepdims = 0> (x)")):
        for device in ("cpu", "reference"):
            (got,) = rlx.load(built(opset, f"{name}[n,3] x", body), device=device).run([x])
            assert got.dtype == kind
            assert np.array_equal(got.reshape(-1), want), (opset, device)


def test_a_sequence_of_many_parts() -> None:
    """The axis may be long where the parts are few, and each row is a part where no sizes are given."""
    x = normal(3000, 2)
    few = built(
        13,
        "float[3000,2] x",
        """
        sizes = Constant <value = int64[2] {1000, 2000}> ()  at = Constant <value = int64 {1}> ()
        s = SplitToSequence (x, sizes)  y = SequenceAt (s, at)""",
    )
    assert np.array_equal(rlx.load(few, device="cpu").run([x])[0], x[1000:])
    rows = built(13, "float[3000,2] x, int64 at", "s = SplitToSequence <keepdims = 0> (x)  y = SequenceAt (s, at)")
    assert np.array_equal(rlx.load(rows, device="cpu").run([x, np.int64(2999)])[0], x[2999])
    one = built(
        13, "float[3000,2] x", "k = Constant <value = int64 {2}> ()  s = SplitToSequence (x, k)  y = SequenceAt (s, k)"
    )
    with pytest.raises(UnsupportedOp, match="gives 1500 parts, more than 1024"):
        rlx.load(one, device="cpu")
    ones = "k = Constant <value = int64[3] {1, 1, 1}> ()  s = SplitToSequence (x, k)  y = SequenceAt (s, at)"
    with pytest.raises(UnsupportedOp, match="3 parts of size 1 are not the axis of size 3000"):
        rlx.load(built(13, "float[3000,2] x, int64 at", ones), device="cpu")
