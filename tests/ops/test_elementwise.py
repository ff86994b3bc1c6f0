"""Elementwise ops: references against ONNX, NumPy and f64 formulas; lowered code against the references."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import rlx.ops as ops
from rlx.errors import DTypeError, ExecutionError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim
from rlx.ops import OPS
from rlx.ops.activation import Celu, Gelu, PRelu, Relu, Selu
from rlx.ops.base import Op
from rlx.ops.elementwise import (
    Abs,
    Add,
    Binary,
    Cast,
    Clip,
    Compare,
    Div,
    Exp,
    IsInf,
    IsNan,
    Maximum,
    Mod,
    Neg,
    Pow,
    Sign,
    Unary,
    Where,
)
from rlx.testing.interpret import check_op, interpret, make_node

SPECIAL = np.array(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        -0.5,
        1.5,
        2.5,
        -2.5,
        3.7,
        -3.7,
        1e-6,
        -1e-6,
        20.0,
        -20.0,
        90.0,
        -110.0,
        np.inf,
        -np.inf,
    ],
    np.float32,
)
WITH_NAN = np.append(SPECIAL, np.float32(np.nan))

FLOAT_UNARY: dict[str, tuple[type[Op], Any]] = {
    name: (cls, cls()) for name, cls in sorted(OPS.items()) if issubclass(cls, Unary) and "f" in cls.kinds
}
# (ONNX operator, its attributes, its domain version is the newest)
ONNX_UNARY: dict[str, tuple[str, dict[str, Any]]] = {
    "abs": ("Abs", {}),
    "ceil": ("Ceil", {}),
    "celu": ("Celu", {"alpha": 1.0}),
    "cos": ("Cos", {}),
    "elu": ("Elu", {"alpha": 1.0}),
    "erf": ("Erf", {}),
    "exp": ("Exp", {}),
    "floor": ("Floor", {}),
    "gelu": ("Gelu", {}),
    "hard_sigmoid": ("HardSigmoid", {}),
    "hard_swish": ("HardSwish", {}),
    "leaky_relu": ("LeakyRelu", {}),
    "log": ("Log", {}),
    "mish": ("Mish", {}),
    "neg": ("Neg", {}),
    "reciprocal": ("Reciprocal", {}),
    "relu": ("Relu", {}),
    "round": ("Round", {}),
    "selu": ("Selu", {}),
    "sigmoid": ("Sigmoid", {}),
    "sign": ("Sign", {}),
    "sin": ("Sin", {}),
    "softplus": ("Softplus", {}),
    "softsign": ("Softsign", {}),
    "sqrt": ("Sqrt", {}),
    "tanh": ("Tanh", {}),
    "thresholded_relu": ("ThresholdedRelu", {}),
}


def run_onnx(op_type: str, inputs: list[np.ndarray], out: int, **attributes: Any) -> np.ndarray:
    """One ONNX operator through onnx's reference evaluator."""
    names = [f"x{i}" for i in range(len(inputs))]
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(names, inputs, strict=True)
    ]
    node = helper.make_node(op_type, names, ["y"], **attributes)
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("y", out, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", onnx.defs.onnx_opset_version())])
    with np.errstate(all="ignore"):
        (y,) = ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))
    return np.asarray(y)


@pytest.mark.parametrize("name", FLOAT_UNARY)
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
def test_unary_code_equals_its_reference(name: str, dtype: str) -> None:
    """Every one-input op, lowered, gives what its NumPy reference gives: at specials, in every float type."""
    _, op = FLOAT_UNARY[name]
    x = WITH_NAN.astype(DTYPES[dtype].numpy)
    if name == "mish" or name == "silu":
        x = x[x != -np.inf]  # -inf * 0: the composition decides
    check_op(op, x.reshape(x.size, 1))


@pytest.mark.parametrize("name", ONNX_UNARY)
def test_unary_references_are_those_of_onnx(name: str) -> None:
    """The references agree with onnx's own evaluator."""
    op_type, attributes = ONNX_UNARY[name]
    x = np.concatenate([np.linspace(-9, 9, 47, dtype=np.float32), [np.float32(0.5), np.float32(-1.5)]])
    with np.errstate(all="ignore"):
        got = OPS[name]().reference(x)
    np.testing.assert_allclose(got, run_onnx(op_type, [x], TensorProto.FLOAT, **attributes), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 0, 2), (2, 3, 5)])
def test_unary_shapes(shape: tuple[int, ...]) -> None:
    """Scalars, empty tensors and odd sizes."""
    check_op(Exp(), np.random.default_rng(0).standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("op", [Neg(), Abs(), Sign(), Clip(-3, 4), Relu()])
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_unary_integers(op: Op, dtype: Any) -> None:
    """Integers wrap as in NumPy, also at the least value."""
    check_op(op, np.array([np.iinfo(dtype).min, -5, -1, 0, 1, 7, np.iinfo(dtype).max], dtype))


@pytest.mark.parametrize("op", [Abs(), Sign(), Clip(2, 200)])
def test_unary_unsigned(op: Op) -> None:
    check_op(op, np.array([0, 1, 2, 127, 128, 255], np.uint8))


def test_small_differences_survive() -> None:
    """elu, selu, celu and softplus keep their relative accuracy where exp(x) - 1 or 1 + exp(x) would lose it."""
    x = -np.logspace(-7, 0.5, 40).astype(np.float32)
    for name, exact in {
        "elu": np.expm1(x.astype(np.float64)),
        "softplus": np.log1p(np.exp(x.astype(np.float64))),
    }.items():
        (got,) = interpret(make_node(OPS[name](), (x.shape, "f32")), [x])
        np.testing.assert_allclose(got, exact, rtol=1e-6)
    tail = np.linspace(-80, -20, 13, dtype=np.float32)
    (got,) = interpret(make_node(OPS["softplus"](), (tail.shape, "f32")), [tail])
    np.testing.assert_allclose(got, np.exp(tail.astype(np.float64)), rtol=1e-5)


def test_activation_options() -> None:
    x = np.linspace(-4, 4, 29, dtype=np.float32)
    (y,) = check_op(Gelu("tanh"), x)
    np.testing.assert_allclose(y, run_onnx("Gelu", [x], TensorProto.FLOAT, approximate="tanh"), rtol=1e-5, atol=1e-6)
    (y,) = check_op(Celu(2.5), x)
    np.testing.assert_allclose(y, run_onnx("Celu", [x], TensorProto.FLOAT, alpha=2.5), rtol=1e-5, atol=1e-6)
    check_op(Selu(0.7, 3.0), x)
    with pytest.raises(OptionError, match="approximate"):
        Gelu("erf").infer(make_node(Exp(), ((3,), "f32")).inputs[0].type)
    with pytest.raises(OptionError, match="alpha > 0"):
        make_node(Celu(0.0), ((3,), "f32"))


def test_prelu() -> None:
    """The slope broadcasts to x, never the other way."""
    x = np.arange(-6, 6, dtype=np.float32).reshape(2, 3, 2)
    slope = np.array([0.1, 0.2, 0.3], np.float32).reshape(3, 1)
    (y,) = check_op(PRelu(), x, slope)
    np.testing.assert_allclose(y, run_onnx("PRelu", [x, slope], TensorProto.FLOAT))
    with pytest.raises(ShapeError, match="slope"):
        make_node(PRelu(), ((3, 1), "f32"), ((3, 2), "f32"))


def test_questions() -> None:
    for positive in (False, True):
        for negative in (False, True):
            (y,) = check_op(IsInf(negative, positive), WITH_NAN)
            expected = (positive & np.isposinf(WITH_NAN)) | (negative & np.isneginf(WITH_NAN))
            np.testing.assert_array_equal(y, expected)
    (y,) = check_op(IsNan(), WITH_NAN.astype(ml_dtypes.bfloat16))
    assert y.sum() == 1


# ---- two inputs

BINARY = sorted(name for name, cls in OPS.items() if issubclass(cls, Binary))
PAIRS = [((3, 1), (1, 5)), ((), (4,)), ((2, 3), (3,)), ((0,), (1,)), ((7, 1, 2), (3, 1)), ((5,), (5,))]


def operands(name: str, dtype: Any, shapes: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(len(name))
    made = [rng.integers(-9, 10, size=s) for s in shapes]
    if dtype is np.bool_:
        return [a > 0 for a in made]
    if name in ("div", "mod"):
        made[1] = np.where(made[1] == 0, 3, made[1])
    if np.dtype(dtype).kind == "u":
        made = [np.abs(a) for a in made]
    scale = 0.75 if np.dtype(dtype).kind not in "iu" else 1
    return [np.asarray(a * scale).astype(dtype) for a in made]


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("shapes", PAIRS)
def test_binary_code_equals_its_reference(name: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Every two-input op, for each kind of element it takes, over broadcast shapes."""
    kinds = OPS[name].kinds  # type: ignore[attr-defined]
    for kind, dtypes in {
        "f": [np.float32, np.float16, ml_dtypes.bfloat16],
        "i": [np.int8, np.int64],
        "u": [np.uint8],
        "b": [np.bool_],
    }.items():
        for dtype in dtypes if kind in kinds else []:
            check_op(OPS[name](), *operands(name, dtype, shapes))


@pytest.mark.parametrize("name", ["minimum", "maximum", "add", "less", "equal", "not_equal", "greater_equal"])
def test_binary_specials(name: str) -> None:
    """NaN and infinities against each other."""
    check_op(OPS[name](), WITH_NAN[:, None], WITH_NAN[None, :])


def test_comparisons_give_bool() -> None:
    assert all(
        make_node(cls(), ((2,), "f32"), ((2,), "f32")).outputs[0].dtype.name == "bool"
        for cls in OPS.values()
        if issubclass(cls, Compare)
    )


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint16])
def test_integer_division(dtype: Any) -> None:
    """Truncates toward zero like C; the least value by -1 wraps; zero stops the run, in code and reference."""
    info = np.iinfo(dtype)
    values = np.array([info.min, info.min + 1, 0, 1, 2, 7, info.max], dtype)
    if info.min < 0:
        values = np.append(values, np.array([-1, -2, -7], dtype))
    divisors = values[values != 0]
    (y,) = check_op(Div(), values[:, None], divisors[None, :])
    for a, row in zip(values.tolist(), y.tolist(), strict=True):
        for b, q in zip(divisors.tolist(), row, strict=True):
            exact = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
            assert q == np.array(exact).astype(dtype), (a, b)
    for op in (Div(), Mod(), Mod(fmod=True)):
        check_op(op, values[:, None], divisors[None, :])
        zero = np.zeros(1, dtype)
        with pytest.raises(ExecutionError, match="division"):
            interpret(make_node(op, (values.shape, dtype), ((1,), dtype)), [values, zero])
        with pytest.raises(ExecutionError, match="division"):
            op.reference(values, zero)


@pytest.mark.parametrize("divisor", [1, 3, -1, -4, 0])
def test_integer_division_by_a_constant(divisor: int) -> None:
    """A constant divisor takes a shorter way through `lower`."""
    for cls in (Div, Mod):
        graph = Graph()
        x = graph.input("x", (5,), "i32")
        graph.add(cls(), x, graph.constant(divisor, dtype="i32"))
        array = np.array([-(2**31), -7, 0, 5, 2**31 - 1], np.int32)
        arrays = [array, np.array(divisor, np.int32)]
        if divisor == 0:
            with pytest.raises(ExecutionError):
                interpret(graph.nodes[0], arrays)
        else:
            np.testing.assert_array_equal(interpret(graph.nodes[0], arrays)[0], cls().reference(*arrays))


def test_float_remainder() -> None:
    """Both remainders of floats, including infinities and quotients that round to the next integer."""
    a = np.array([5.5, -5.5, 0.3, -0.3, 1e6, 7.0, np.inf, np.nan, 0.0, 6.0], np.float32)
    b = np.array([0.1, -0.1, 2.0, -2.0, 3.0, np.inf, 0.7, np.nan, 0.0], np.float32)
    for fmod in (False, True):
        check_op(Mod(fmod), a[:, None], b[None, b != np.inf], rtol=1e-6)
        check_op(Mod(fmod), a[:, None].astype(np.float64), b[None, b != np.inf].astype(np.float64))
    (got,) = interpret(make_node(Mod(True), ((2,), "f32"), ((2,), "f32")), [a[:2], np.full(2, np.inf, np.float32)])
    np.testing.assert_array_equal(got, a[:2])


def test_power() -> None:
    """Floats like NumPy; mixed exponent types; integers wrap, and negative exponents truncate."""
    x = np.array([-3.0, -0.5, 0.0, 0.5, 2.0, 7.0], np.float32)
    check_op(Pow(), x[:, None], np.array([-2.0, 0.0, 0.5, 3.0], np.float32))
    check_op(Pow(), x[:, None], np.array([-2, 0, 1, 3], np.int64))
    check_op(Pow(), np.array([1, 2, 3], np.int32), np.array([4.0, 5.0, 0.5], np.float32))
    i = np.array([-3, -2, -1, 0, 1, 2, 3, 10], np.int64)
    (y,) = check_op(Pow(), i[:, None], np.array([0, 1, 2, 13, 40, 63], np.int64))
    assert int(y[6, 4]) % 2**64 == 3**40 % 2**64
    check_op(Pow(), i[1:6, None], np.array([64, 65, 200], np.int64))
    (y,) = check_op(Pow(), i[:, None], np.array([-1, -2, -3], np.int64))
    np.testing.assert_array_equal(y[2], [-1, 1, -1])
    check_op(Pow(), np.array([[2, 3, 255]], np.uint8), np.array([[0], [3], [9]], np.uint8))


@pytest.mark.parametrize("exponent", [-1, 0, 1, 2, 3, 5, 0.5])
@pytest.mark.parametrize("dtype", ["f32", "i32"])
def test_power_with_a_constant_exponent(exponent: float, dtype: str) -> None:
    graph = Graph()
    x = graph.input("x", (4,), dtype)
    array = np.array([1, 2, 3, 9], DTYPES[dtype].numpy)
    value = graph.constant(exponent, dtype="f32" if exponent == 0.5 else dtype)
    graph.add(Pow(), x, value)
    assert value.data is not None
    expected = Pow().reference(array, value.data)
    np.testing.assert_allclose(interpret(graph.nodes[0], [array, value.data])[0], expected, rtol=1e-6)


def test_where() -> None:
    """Three-way broadcast; the branch not taken may be NaN."""
    cond = np.array([[True], [False]])
    check_op(Where(), cond, np.float32(1.5), np.array([np.nan, 2, 3], np.float32))
    check_op(Where(), cond[0], np.arange(3, dtype=np.int8), np.arange(6, dtype=np.int8).reshape(2, 3))
    check_op(Where(), cond, np.ones((2, 3), ml_dtypes.bfloat16), np.zeros((1, 3), ml_dtypes.bfloat16))


@pytest.mark.parametrize("to", ["f64", "f32", "f16", "bf16", "i8", "u8", "i32", "i64", "bool", "i4", "u2", "f8e5m2"])
@pytest.mark.parametrize("source", ["f32", "f16", "bf16", "i8", "i64", "u8", "bool"])
def test_cast(source: str, to: str) -> None:
    """Floats truncate, to bool tests for nonzero; values in range."""
    x = np.array([0, 1, 2.75, 5.5, 7.0, 0.25], np.float32).astype(DTYPES[source].numpy)
    check_op(Cast(DTYPES[to]), x)


def test_cast_of_negative_and_wrapping_values() -> None:
    (y,) = check_op(Cast(DTYPES["i32"]), np.array([-2.75, -0.5, np.float32(2**30)], np.float32))
    np.testing.assert_array_equal(y, [-2, 0, 2**30])
    check_op(Cast(DTYPES["u8"]), np.array([-1, 256, 300], np.int32))


def test_clip() -> None:
    """NaN passes; either bound may be missing; bounds of integers must be values of the type."""
    for op in (Clip(-1, 2), Clip(lo=0.5), Clip(hi=0.5), Clip(), Clip(3, 1)):
        check_op(op, WITH_NAN)
    check_op(Clip(0, 6), WITH_NAN.astype(np.float16))
    with pytest.raises(OptionError, match="bound"):
        make_node(Clip(-5, 3), ((2,), "u8"))
    with pytest.raises(OptionError, match="bound"):
        make_node(Clip(0.5), ((2,), "i32"))


# ---- types


def test_symbolic_shapes() -> None:
    """Types with symbols, substituted, are those of the results."""
    n, m = Dim("n", 1, 8), Dim("m", 1, 8)
    a, b = np.ones((3, 1, 5), np.float32), np.ones((4, 1), np.float32)
    check_op(Add(), a, b, shapes=[(n, 1, m), (4, 1)], extents={"n": 3, "m": 5})
    check_op(Where(), a > 0, b, a, shapes=[(n, 1, m), (4, 1), (n, 1, m)], extents={"n": 3, "m": 5})
    check_op(Relu(), a, shapes=[(n, 1, m)], extents={"n": 3, "m": 5})


def test_type_errors() -> None:
    """The message names the op and what came."""
    with pytest.raises(DTypeError, match=r"exp: expected floating-point elements as input, got i32\[3\]"):
        make_node(Exp(), ((3,), "i32"))
    with pytest.raises(DTypeError, match=r"add: the inputs differ in element type"):
        make_node(Add(), ((3,), "i32"), ((3,), "f32"))
    with pytest.raises(ShapeError, match="3 and 4 differ"):
        make_node(Add(), ((3,), "f32"), ((4,), "f32"))
    with pytest.raises(DTypeError, match="condition"):
        make_node(Where(), ((3,), "f32"), ((3,), "f32"), ((3,), "f32"))
    with pytest.raises(DTypeError, match="maximum"):
        make_node(Maximum(), ((3,), "bool"), ((3,), "bool"))
    with pytest.raises(DTypeError, match="neg"):
        make_node(Neg(), ((3,), "i4"))
    with pytest.raises(ShapeError, match="takes 2 inputs, 1 given"):
        make_node(Add(), ((3,), "f32"))


# ---- functions and operators of values


def test_functions_and_operators() -> None:
    """Numbers take the type of the tensor beside them; keywords of Python have an underscore."""
    graph = Graph()
    x, c, i = graph.input("x", (2, 3)), graph.input("c", (3,), "bool"), graph.input("i", (3,), "i64")
    y = 2 * x + 1 - x / 3
    assert y.type == x.type
    assert (-x).type == (x**2).type == (2**x).type == x.type
    assert (x < 0).dtype.name == "bool"
    assert (x @ x.transpose(1, 0)).shape == (2, 2)
    assert x.sum(0).shape == (3,)
    assert x.mean().shape == ()
    assert x.max((0, 1), keepdims=True).shape == (1, 1)
    assert x.reshape(3, 2).shape == x.reshape((3, 2)).shape == (3, 2)
    assert x.transpose().shape == (3, 2)
    assert (i + 1).dtype.name == "i64"
    assert ops.where(c, 1.0, x).dtype.name == "f32"
    assert ops.where(c, x, 0).dtype.name == "f32"
    assert ops.not_(c).dtype.name == ops.and_(c, True).dtype.name == "bool"
    assert ops.cast(x, to="f16").dtype.name == ops.cast(x, np.float16).dtype.name == "f16"
    assert ops.clip(x, 0, 6).node.op == Clip(0, 6)
    assert ops.layer_norm(x, np.ones(3, np.float32), None, axis=1).shape == (2, 3)
    with pytest.raises(DTypeError, match=r"0\.5 does not fit the element type i64"):
        i + 0.5
    for given in ({"axis": 0}, {"axes": 0}, {"axis": (0,)}, {"axes": [0]}):
        assert ops.reduce_sum(x, **given).shape == ops.unsqueeze(x[0], **given).shape == (1, 3)
    with pytest.raises(OptionError, match="axis=0 and axes=1 mean the same"):
        ops.reduce_sum(x, axis=0, axes=1)
    with pytest.raises(OptionError, match="no attribute 'axes'"):
        ops.softmax(x, axes=1)
    with pytest.raises(AttributeError, match="no op 'frobnicate'"):
        ops.frobnicate(x)
    with pytest.raises(OptionError, match="at least one input"):
        ops.add(1, 2)


def test_every_op_has_a_function_and_a_docstring() -> None:
    for name, cls in OPS.items():
        function = getattr(ops, name)
        assert callable(function)
        assert (function.__doc__ or "").strip()
        assert math.isfinite(cls.arity[0])
