"""Nearest resizing against ONNX Runtime, for every coordinate mode and rounding."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from ops_oracle import check, ort, values

import rlx
from rlx.errors import OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Array, TensorType
from rlx.ir.shape import Dim
from rlx.kernels.expr import Apply, Cast, walk
from rlx.kernels.lowering import lower_node
from rlx.ops.resize import COORDINATES, ROUNDINGS, ResizeNearest
from rlx.testing.interpret import check_op, make_node

MODES = list(product(COORDINATES, ROUNDINGS))


@pytest.mark.parametrize("coordinate, rounding", MODES)
@pytest.mark.parametrize("sizes", [(2, 3, 10, 6), (2, 3, 5, 3), (2, 3, 2, 9), (2, 3, 1, 1), (2, 3, 7, 4)])
def test_sizes_match_onnx_runtime(sizes: tuple[int, ...], coordinate: str, rounding: str) -> None:
    """Whole and fractional factors, up and down, from the sizes alone.

    half_pixel_symmetric is then half_pixel by definition; ONNX Runtime rounds it off the exact place.
    """
    x = values((2, 3, 5, 3))
    like = "half_pixel" if coordinate == "half_pixel_symmetric" else coordinate
    modes = {"coordinate_transformation_mode": like, "nearest_mode": rounding, "mode": "nearest"}
    (expected,) = ort("Resize", x, None, None, np.array(sizes, np.int64), **modes)
    (y,) = check(ResizeNearest(sizes, (), coordinate, rounding), x)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("coordinate, rounding", MODES)
@pytest.mark.parametrize("scale", [2.0, 3.0, 1.0, 0.5, 0.6, 1.3, 2.7])
def test_scales_match_onnx_runtime(scale: float, coordinate: str, rounding: str) -> None:
    """A scale that is given is used as it is, although the sizes round it."""
    x = values((1, 1, 6, 5))
    scales = np.array([1, 1, scale, 1], np.float32)
    modes = {"coordinate_transformation_mode": coordinate, "nearest_mode": rounding, "mode": "nearest"}
    (expected,) = ort("Resize", x, None, scales, **modes)
    (y,) = check(ResizeNearest(expected.shape, tuple(map(float, scales)), coordinate, rounding), x)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
    "coordinate, rounding",
    [("asymmetric", "floor"), ("half_pixel", "round_prefer_floor"), ("half_pixel", "round_prefer_ceil")],
)
@pytest.mark.parametrize("factor", [1, 2, 3, 7])
def test_whole_factors_take_integer_arithmetic(factor: int, coordinate: str, rounding: str) -> None:
    """Symbolic sizes with a whole factor give i // factor, the same elements as the general formula."""
    h = Dim("h")
    op = ResizeNearest((1, factor * h), (1.0, float(factor)), coordinate, rounding)
    (y,) = check_op(op, values((1, 5)), shapes=[(1, h)], extents={"h": 5})
    np.testing.assert_array_equal(y, np.repeat(values((1, 5)), factor, axis=1))
    lowered = lower_node(make_node(op, ((1, h), "f32")))
    assert lowered is not None
    expressions = list(walk(lowered.outputs[0][0].expr))
    assert not any(isinstance(e, Cast) for e in expressions)
    assert {e.fn for e in expressions if isinstance(e, Apply)} <= {"floordiv"}


@pytest.mark.parametrize("coordinate, rounding", MODES)
def test_symbolic_sizes(coordinate: str, rounding: str) -> None:
    """Sizes that are known at the run only, for each formula."""
    n, m = Dim("n"), Dim("m", 0)
    op = ResizeNearest((m, 2 * n), (), coordinate, rounding)
    for extents in ({"n": 5, "m": 8}, {"n": 3, "m": 1}, {"n": 1, "m": 0}):
        check_op(op, values((extents["n"],) * 2), shapes=[(n, n)], extents=extents)


def test_errors() -> None:
    """Unknown modes, wrong counts, factors that are not positive, and nothing to take."""
    x = TensorType((2, 3), DTYPES["f32"])
    with pytest.raises(OptionError, match="coordinate"):
        ResizeNearest((2, 3), (), "tf_crop_and_resize").infer(x)
    with pytest.raises(OptionError, match="rounding"):
        ResizeNearest((2, 3), (), "half_pixel", "nearest").infer(x)
    with pytest.raises(OptionError, match="positive"):
        ResizeNearest((2, 3), (1.0, 0.0)).infer(x)
    for op in (ResizeNearest((2,)), ResizeNearest((2, 3), (1.0,)), ResizeNearest((2, -1))):
        with pytest.raises(ShapeError, match="resize_nearest"):
            op.infer(x)
    with pytest.raises(ShapeError, match="no elements"):
        ResizeNearest((2, 3)).infer(TensorType((2, 0), DTYPES["f32"]))


SIZES = 128


def exact_positions(
    coordinate: str, rounding: str, n: int, m: int, factor: Fraction | None = None
) -> tuple[Array, Array]:
    """The elements that ONNX's formulas take, in fractions; and how far each place is from where another is taken."""
    i = np.arange(m)
    f = Fraction(m, n) if factor is None else factor
    a, b = f.numerator, f.denominator
    match coordinate:
        case "asymmetric":
            num, den = i * b, a
        case "align_corners":
            num, den = i * (n - 1), max(m - 1, 1)
        case "half_pixel_symmetric":  # n / 2 - m / (2 f) + (i + 0.5) / f - 0.5
            num, den = (n - 1) * a + (2 * i + 1 - m) * b, 2 * a
        case _:
            num, den = (2 * i + 1) * b - a, 2 * a
            if coordinate == "pytorch_half_pixel" and m == 1:
                num = num * 0
    whole, rest = num // den, num % den
    up = {"floor": rest < 0, "ceil": rest > 0, "round_prefer_floor": 2 * rest > den}.get(rounding, 2 * rest >= den)
    tie = rest / den if rounding in ("floor", "ceil") else abs(rest / den - 0.5)
    return (whole + up).clip(0, n - 1), np.minimum(tie, 1 - tie)


@cache
def resizer(coordinate: str, rounding: str, device: str) -> Any:
    """A graph that resizes [n] to [m] for any sizes."""
    g = rlx.Graph("resize")
    x, like = g.input("x", (Dim("n", 1),), "u8"), g.input("like", (Dim("m", 1),), "u8")
    g.output(g.add(ResizeNearest((like.shape[0],), (), coordinate, rounding), x)[0], name="y")
    g.output(like + like, name="other")
    return rlx.compile(g, device=device)


@pytest.mark.sample(2)
@pytest.mark.parametrize("block", range(16))
@pytest.mark.parametrize("coordinate, rounding", MODES)
def test_all_pairs_of_sizes_are_decided_exactly(coordinate: str, rounding: str, block: int) -> None:
    """Each pair of sizes up to 128 gives the elements of exact arithmetic, on the CPU and on the reference.

    So does ONNX Runtime, wherever the place isn't one where f32 decides.
    """
    cpu = resizer(coordinate, rounding, "cpu")
    runtime = ort_resizer(coordinate, rounding)
    for n in range(1 + block, SIZES + 1, 16):
        x = np.arange(n, dtype=np.uint8)
        for m in range(1, SIZES + 1):
            want, distance = exact_positions(coordinate, rounding, n, m)
            assert np.array_equal(ResizeNearest((m,), (), coordinate, rounding).reference(x), want), (n, m)
            got = cpu({"x": x, "like": np.zeros(m, np.uint8)})["y"]
            assert np.array_equal(got, want), (n, m)
            (theirs,) = runtime.run(None, {"x": x, "sizes": np.array([m])})
            assert ((theirs == want) | (distance < 1e-4)).all(), (n, m)


@cache
def ort_resizer(coordinate: str, rounding: str) -> Any:
    modes = {"coordinate_transformation_mode": coordinate, "nearest_mode": rounding, "mode": "nearest"}
    if coordinate == "half_pixel_symmetric":  # which is half_pixel where sizes are given
        modes["coordinate_transformation_mode"] = "half_pixel"
    node = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], **modes)
    u8, i64 = onnx.TensorProto.UINT8, onnx.TensorProto.INT64
    given = [helper.make_tensor_value_info("x", u8, ["n"]), helper.make_tensor_value_info("sizes", i64, [1])]
    graph = helper.make_graph([node], "g", given, [helper.make_tensor_value_info("y", u8, ["m"])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "n, m, modes", [(20, 6, MODES), (14, 8, MODES), (2**20 + 1, 3, MODES), (2**24 + 3, 2**24 + 7, MODES[1:5:3])]
)
def test_fixed_sizes_on_the_cpu(n: int, m: int, modes: list[tuple[str, str]]) -> None:
    """Also beyond what f32 can count."""
    for coordinate, rounding in modes:
        check_fixed(n, m, coordinate, rounding)


def check_fixed(n: int, m: int, coordinate: str, rounding: str) -> None:
    wanted = exact_positions(coordinate, rounding, n, m)[0]
    x = (np.arange(n) % 251).astype(np.uint8)
    g = rlx.Graph("resize")
    g.output(g.add(ResizeNearest((m,), (), coordinate, rounding), g.input("x", (n,), "u8"))[0], name="y")
    np.testing.assert_array_equal(rlx.compile(g, device="cpu")(x=x)["y"], x[wanted])


@pytest.mark.sample(30)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("coordinate", COORDINATES)
@pytest.mark.parametrize("factor", [Fraction(3, 2), Fraction(5, 4), Fraction(3, 4), Fraction(7, 8), Fraction(11, 2)])
def test_factors_that_f32_holds_are_decided_exactly(factor: Fraction, coordinate: str, rounding: str) -> None:
    """half_pixel_symmetric by ONNX's formula has three roundings, of which each may cross a tie."""
    for n in range(1, 64):
        m = int(n * factor)
        if m:
            x = np.arange(n, dtype=np.uint8)
            op = ResizeNearest((m,), (float(factor),), coordinate, rounding)
            want = exact_positions(coordinate, rounding, n, m, factor)[0]
            np.testing.assert_array_equal(op.reference(x), want)
            if n in (7, 20, 33):
                check(op, x)
