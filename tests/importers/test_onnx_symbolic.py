"""Shape arithmetic in a file is carried out at import, for every extent at once, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import ExecutionError, ModelFormatError, UnsupportedOp
from rlx.importers.onnx import load
from rlx.importers.onnx.symbolic import NotStaticError, Static, arithmetic, cast, compare, rounded, static_array
from rlx.ir.casting import ends
from rlx.ir.dtype import DTYPES
from rlx.ir.shape import Dim
from rlx.ir.verify import verify

F32 = DTYPES["f32"]
N = Dim("n")


def build(
    text: str,
    consts: dict[str, Any] | None = None,
    shape: Sequence[int | str] = ("b", "s", 8),
    opset: int = 17,
    attributes: dict[str, dict[str, Any]] | None = None,
) -> bytes:
    """A model from lines `output = Op input input`; the last line is its output. Attributes go by output name."""
    nodes = []
    for line in text.strip().splitlines():
        output, call = (part.strip() for part in line.split("="))
        op, *inputs = call.split()
        made = [i if i != "-" else "" for i in inputs]
        nodes.append(helper.make_node(op, made, [output], **(attributes or {}).get(output, {})))
    weights = [numpy_helper.from_array(np.asarray(value), name) for name, value in (consts or {}).items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    out = helper.make_empty_tensor_value_info(nodes[-1].output[0])
    graph = helper.make_graph(nodes, "g", [x], [out], weights)
    opsets = [helper.make_opsetid("", opset)]
    made_bytes: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return made_bytes


# name -> lines, constants, attributes, shape of x in the run
PATTERNS: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]], tuple[int, ...]]] = {
    "heads": (
        """
        shape = Shape x
        b = Gather shape zero
        s = Gather shape one
        b1 = Unsqueeze b axis
        s1 = Unsqueeze s axis
        to = Concat b1 s1 heads depth
        y = Reshape x to
        """,
        {"zero": 0, "one": 1, "axis": [0], "heads": [2], "depth": [-1]},
        {"to": {"axis": 0}},
        (3, 5, 8),
    ),
    "merge": (
        """
        shape = Shape x
        front = Slice shape start end
        rows = ReduceProd front
        cols = Slice shape end last
        to = Concat rows cols
        y = Reshape x to
        """,
        {"start": [0], "end": [2], "last": [9]},
        {"to": {"axis": 0}, "rows": {"axes": [0]}},
        (3, 5, 8),
    ),
    "expand": (  # torch.expand(-1, n, ...) as PyTorch exports it
        """
        shape = Shape x
        s = Slice shape zero one
        to = Concat s minus minus
        count = Shape to
        ones = ConstantOfShape count
        replaced = Mul ones minus
        keep = Equal to replaced
        full = Where keep ones to
        small = Unsqueeze x zero
        y = Expand small fullest
        """.replace("fullest", "full"),
        {"zero": [0], "one": [1], "minus": [-1]},
        {"to": {"axis": 0}, "ones": {"value": numpy_helper.from_array(np.array([1]))}},
        (3, 5, 8),
    ),
    "half": (
        """
        shape = Shape x
        n = Gather shape one
        half = Div n two
        half1 = Unsqueeze half zero
        y = Slice x zero half1 one1
        """,
        {"one": 1, "two": 2, "zero": [0], "one1": [1]},
        {},
        (3, 5, 8),
    ),
    "position": (
        """
        shape = Shape x
        n = Gather shape one
        at = Range zero n one
        f = Cast at
        col = Unsqueeze f axis
        y = Mul x col
        """,
        {"one": 1, "zero": 0, "axis": [1]},
        {"f": {"to": TensorProto.FLOAT}},
        (3, 5, 8),
    ),
    "zeros": (
        """
        shape = Shape x
        z = ConstantOfShape shape
        y = Add x z
        """,
        {},
        {"z": {"value": numpy_helper.from_array(np.array([2.5], np.float32))}},
        (3, 5, 8),
    ),
    "mean": (  # a size as data
        """
        shape = Shape x
        n = Gather shape one
        f = Cast n
        y = Div x f
        """,
        {"one": 1},
        {"f": {"to": TensorProto.FLOAT}},
        (3, 5, 8),
    ),
    "shape": ("y = Shape x", {}, {}, (3, 5, 8)),
    "scaled": (  # a scale of sizes as floats, the way Paddle and PyTorch export interpolate
        """
        image = Unsqueeze x zero
        shape = Shape image
        spatial = Slice shape two four
        f = Cast spatial
        scaled = Mul f factor
        whole = Floor scaled
        back = Cast whole
        front = Slice shape zero two
        sizes = Concat front back
        y = Resize image - - sizes
        """,
        {"zero": [0], "two": [2], "four": [4], "factor": np.array([2.0, 0.5], np.float32)},
        {
            "f": {"to": TensorProto.FLOAT},
            "back": {"to": TensorProto.INT64},
            "sizes": {"axis": 0},
            "y": {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
        },
        (3, 5, 8),
    ),
    "pad": (  # to the next multiple of 4: s is at least 1, so (4 - s % 4) % 4 is decided by arithmetic alone
        """
        shape = Shape x
        s = Slice shape one two
        rest = Mod s four
        lack = Sub four rest
        more = Mod lack four
        pads = Concat zero zero zero zero more zero
        y = Pad x pads
        """,
        {"zero": [0], "one": [1], "two": [2], "four": [4]},
        {"pads": {"axis": 0}},
        (3, 5, 8),
    ),
    "tail": (  # the last element: from a size
        """
        shape = Shape x
        n = Slice shape one two
        m = Sub n one
        y = Slice x m n one
        """,
        {"one": [1], "two": [2]},
        {},
        (3, 5, 8),
    ),
    "split": (
        """
        shape = Shape x
        n = Slice shape one two
        both = Concat one n
        m = ReduceMax both
        rep = Concat one one m
        y = Tile x rep
        """,
        {"one": [1], "two": [2]},
        {"both": {"axis": 0}, "rep": {"axis": 0}, "m": {"axes": [0]}},
        (2, 3, 8),
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_of_exporters_hold_for_every_extent(name: str) -> None:
    """One import of a graph that computes shapes gives what onnxruntime gives, at three extents."""
    text, consts, attributes, shape = PATTERNS[name]
    source = build(text, consts, attributes=attributes)
    graph = load(source)
    verify(graph)
    peer = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    for shift in (0, 1, 4):
        x = np.random.default_rng(shift).standard_normal((shape[0] + shift, shape[1] + shift, 8)).astype(np.float32)
        (got,) = run_graph(graph, {"x": x}).values()
        (want,) = peer.run(None, {"x": x})
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("name, ops", [("heads", ["reshape"]), ("merge", ["reshape"]), ("tail", ["slice"])])
def test_shape_subgraphs_are_gone(name: str, ops: list[str]) -> None:
    """Only the op that uses the sizes is left, and no constants."""
    text, consts, attributes, _ = PATTERNS[name]
    graph = load(build(text, consts, attributes=attributes))
    assert [n.op.op_name for n in graph.nodes] == ops
    assert not graph.constants


@pytest.mark.parametrize(
    "shape, to, expected",
    [
        (("b", "s", 8), [0, 0, 2, 4], "f32[b, s, 2, 4]"),
        (("b", "s", 8), [-1, 8], "f32[b*s, 8]"),
        (("b", "s", 8), [0, -1], "f32[b, 8*s]"),
        (("b", 6, 8), [0, 2, -1, 4], "f32[b, 2, 6, 4]"),
        (("b", "s", 8), [-1, 16], "f32[floordiv(b*s, 2), 16]"),
    ],
)
def test_reshape_resolves_zero_and_minus_one(shape: tuple[int | str, ...], to: list[int], expected: str) -> None:
    """Quotients of sizes are exact where that can be proved, else a floor division with a guard."""
    graph = load(build("y = Reshape x to", {"to": to}, shape))
    assert str(graph.outputs[0].value.type) == expected
    assert bool(graph.guards) == ("floordiv" in expected)


@pytest.mark.parametrize(
    "start, end, step, expected",
    [
        (1, 2**63 - 1, 1, "s - 1"),
        (0, -1, 1, "s - 1"),
        (0, 2**31 - 1, 2, "floordiv(s + 1, 2)"),
        (-1, -(2**63), -1, "s"),
        (0, 3, 1, "min(3, s)"),
        (-2, 2**31 - 1, 1, "min(2, s)"),
    ],
)
def test_slices_of_dynamic_axes(start: int, end: int, step: int, expected: str) -> None:
    """Ends beyond the axis, from its end and backwards become exact sizes."""
    consts = {"start": [start], "end": [end], "axis": [1], "step": [step]}
    graph = load(build("y = Slice x start end axis step", consts))
    assert str(graph.outputs[0].value.shape[1]) == expected


def test_bounds_decide_what_is_open_without_them() -> None:
    """A start that may be negative is refused with the way out; bounding the dim is that way."""
    text = """
        shape = Shape x
        n = Slice shape one two
        m = Sub n three
        y = Slice x m n one
        """
    source = build(text, {"one": [1], "two": [2], "three": [3]})
    with pytest.raises(UnsupportedOp, match="the start is s - 3, which may be negative or not; bound its dims"):
        load(source)
    graph = load(source, dims={"s": (3, 64)})
    assert str(graph.outputs[0].value.type) == "f32[b, 3, 8]"


@pytest.mark.parametrize("op", ["Reshape", "Expand", "Tile", "Pad", "ConstantOfShape"])
def test_shapes_of_another_rank_are_refused(op: str) -> None:
    """A shape that is data, and no vector, is the reason, with the tensor's name."""
    first = "" if op == "ConstantOfShape" else "x"
    source = build(f"flat = ReduceSum x\nto = Cast flat\ny = {op} {first} to", attributes={"to": {"to": 7}})
    with pytest.raises(UnsupportedOp, match="'to', has an unknown number of elements"):
        load(source)


def test_a_factor_that_is_not_exact_is_not_guessed() -> None:
    """0.1 as a float is no size factor: whether floor(10 * 0.1) is 1 depends on rounding, so the run computes it."""
    text, consts, attributes, _ = PATTERNS["scaled"]
    source = build(text, {**consts, "factor": np.array([0.1, 1.0], np.float32)}, attributes=attributes)
    graph = load(source)
    made = [symbol for name, symbol in graph.dims().items() if name.startswith("y.size")]
    assert made
    assert all((symbol.lo, symbol.hi) == (0, None) for symbol in made)
    graph = load(source, dims={"s": 30})  # with a number there is a float to round
    assert graph.outputs[0].value.shape[2] == 3


def test_constants_of_large_shapes_are_not_folded() -> None:
    """Folding never makes a tensor of more than 1024 elements."""
    graph = load(build("z = ConstantOfShape to\ny = Add x z", {"to": [4, 5, 600, 8]}))
    assert all(c.data is None or c.data.size <= 1024 for c in graph.constants)
    assert [n.op.op_name for n in graph.nodes] == ["full", "add"]


# ---- the arithmetic itself


def floats(*items: Any) -> Static:
    return static_array(list(items), F32)


def sizes(*items: Any) -> Static:
    return static_array(list(items))


@pytest.mark.parametrize(
    "result, expected",
    [
        (arithmetic("add", sizes(N, 2), sizes(1, 3)), "n + 1, 5"),
        (arithmetic("mul", sizes(N), sizes(2, N)), "2*n, n*n"),
        (arithmetic("div", sizes(2 * N, N, -7), sizes(2, 2, 2)), "n, floordiv(n, 2), -3"),
        (arithmetic("mod", sizes(4 * N, 7), sizes(2, 4)), "0, 3"),
        (arithmetic("max", sizes(N, 3), sizes(1, 5)), "n, 5"),
        (rounded(arithmetic("mul", floats(N), floats(0.5)), "floor"), "floordiv(n, 2)"),
        (rounded(arithmetic("mul", floats(N), floats(0.5)), "ceil"), "floordiv(n + 1, 2)"),
        (cast(arithmetic("div", floats(N), floats(4.0)), DTYPES["i64"]), "floordiv(n, 4)"),
        (arithmetic("mul", arithmetic("div", floats(N), floats(4.0)), floats(8.0)), "2*n"),
        (compare("eq", sizes(N, N, N), sizes(-1, N, 0)), "False, True, False"),
        (compare("ge", sizes(N), sizes(1)), "True"),
        (compare("lt", sizes(N), sizes(1)), "False"),
        (cast(sizes(300, -1), DTYPES["u8"]), "44, 255"),
        (cast(floats(2.75, -2.75), DTYPES["i32"]), "2, -2"),
    ],
)
def test_arithmetic_of_sizes(result: Static, expected: str) -> None:
    """Sums, products and quotients of sizes, through floats too, in their simplest form."""
    assert ", ".join(str(item) for item in result.items.flat) == expected


@pytest.mark.parametrize(
    "name, a, b",
    [
        ("div", sizes(N - 5), sizes(2)),  # truncation or floor: the sign is open
        ("div", sizes(7), sizes(0)),
        ("mul", floats(N), floats(0.1)),
        ("mul", floats(N), floats(float("nan"))),
        ("add", sizes(N), floats(1.0)),
    ],
)
def test_what_can_not_be_told_is_said(name: str, a: Static, b: Static) -> None:
    """Where the result depends on the run or on rounding there is no static result."""
    with pytest.raises(NotStaticError):
        arithmetic(name, a, b)


def test_open_comparisons_are_not_decided() -> None:
    """n == 3 is neither true nor false at import."""
    with pytest.raises(NotStaticError):
        compare("eq", sizes(N), sizes(3))


def test_numbers_are_rounded_as_the_data_would_be() -> None:
    """0.7 * 10 in f32 is 7, although 0.7 as f32 is below 0.7."""
    product = arithmetic("mul", floats(10.0), floats(float(np.float32(0.7))))
    assert rounded(product, "floor").item() == 7


def test_onnx_is_the_version_of_the_table() -> None:
    """The newest opset of the installed onnx is known to the importer, so that its node tests cover it."""
    from rlx.importers.onnx.mapping import NEWEST_OPSET

    assert onnx.defs.onnx_opset_version() <= NEWEST_OPSET


def test_a_slice_to_a_very_large_end_keeps_the_axis() -> None:
    """10**9, as TensorFlow's exporter writes it, is the end: the size stays what it is, and a guard says so."""
    source = build("y = Slice x starts ends axes", {"starts": [0, 0], "ends": [10**9] * 2, "axes": [0, 2]})
    graph = load(source)
    assert graph.outputs[0].value.shape == graph.inputs[0].shape
    assert any("1000000000" in str(guard.lhs) for guard in graph.guards)
    x = np.arange(24.0, dtype=np.float32).reshape(1, 3, 8)
    np.testing.assert_array_equal(run_graph(graph, {"x": x})["y"], x)


def test_sequences_of_no_elements() -> None:
    """With `dims` that allow it, a size of 0 runs from the same compile as others, and gives what onnxruntime gives."""
    text = """
        h = MatMul x w
        t = Transpose h
        scores = MatMul h t
        p = Softmax scores
        y = MatMul p h
        both = Concat y x
        total = ReduceSum both
        n = Shape x
        z = Add both total
    """
    attributes = {"t": {"perm": [0, 2, 1]}, "both": {"axis": 1}, "total": {"keepdims": 1}}
    model = build(text, {"w": np.eye(8, dtype=np.float32)}, attributes=attributes)
    compiled = rlx.compile(load(model, dims={"b": (0, None), "s": (0, None)}), device="cpu", threads=1)
    peer = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    for shape in ((2, 3, 8), (2, 0, 8), (0, 3, 8), (1, 1, 8)):
        x = np.random.default_rng(0).random(shape, np.float32)
        np.testing.assert_allclose(compiled.run({"x": x})[0], peer.run(None, {"x": x})[0], rtol=1e-5, strict=True)
    with pytest.raises(ExecutionError, match=r"dims=\{'s': \(0, None\)\} allows it"):
        rlx.compile(load(model), device="cpu", threads=1).run({"x": np.zeros((2, 0, 8), np.float32)})


def test_casts_of_sizes_with_every_attribute() -> None:
    """ONNX Runtime writes `saturate` at each Cast of the models that it saves, and newer files `round_mode`."""
    text = "n = Shape x\nf = Cast n\nh = Mul f half\nto = Cast h\ny = Reshape x to"
    cast = {"saturate": 1, "round_mode": "up"}
    attributes = {"f": {"to": TensorProto.FLOAT} | cast, "to": {"to": TensorProto.INT64} | cast}
    model = build(text, {"half": np.array([1, 0.5, 2], np.float32)}, attributes=attributes)
    whole = onnx.load_from_string(model)
    whole.opset_import[0].version = 24
    graph = load(whole.SerializeToString(), dims={"b": 2, "s": 4})
    assert str(graph.outputs[0].value.type) == "f32[2, 2, 16]"


@pytest.mark.parametrize("dtype", [name for name, dtype in DTYPES.items() if dtype.is_integer])
def test_numbers_of_import_fit_their_type_or_are_an_error(dtype: str) -> None:
    """At both ends of every integer type, those of 4 bits too."""
    low, high = ends(DTYPES[dtype])
    assert [int(x) for x in static_array([low, high], DTYPES[dtype]).array()] == [low, high]
    for beyond in (low - 1, high + 1, 1 << 70, -(1 << 70)):
        with pytest.raises(ModelFormatError, match=f"do not fit {dtype}: {beyond}"):
            static_array([beyond], DTYPES[dtype]).array()


def test_a_number_beyond_the_floats_is_an_error() -> None:
    with pytest.raises(ModelFormatError, match="do not fit f32"):
        static_array([10**400], DTYPES["f32"]).array()
