"""Convolutions against ONNX Runtime and against a direct sum, with fixed and symbolic sizes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ops_oracle import check, ort, values

import rlx
from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, TensorType
from rlx.ir.shape import Dim
from rlx.ops.conv import Conv, ConvTranspose
from rlx.testing.interpret import check_op, make_node

F32 = DTYPES["f32"]


def f32(*shape: Any) -> TensorType:
    return TensorType(shape, F32)


CONVS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 7, 6), (5, 3, 3, 3), {}),
    ((1, 3, 7, 6), (2, 3, 3, 2), {"pads": (1, 0, 2, 1)}),
    ((1, 2, 9, 7), (3, 2, 3, 3), {"strides": (2, 3), "pads": (1, 1, 1, 1)}),
    ((1, 2, 9, 7), (3, 2, 2, 3), {"dilations": (3, 2), "pads": (0, 2, 1, 2)}),
    ((2, 4, 5, 5), (6, 2, 3, 3), {"groups": 2}),
    ((1, 4, 5, 5), (8, 1, 3, 3), {"groups": 4, "pads": (1, 1, 1, 1)}),
    ((1, 3, 1, 1), (2, 3, 1, 1), {}),
    ((2, 3, 11), (4, 3, 5), {"strides": (2,), "pads": (2, 2)}),
    ((1, 2, 4, 3, 5), (3, 2, 2, 2, 2), {"strides": (1, 1, 2)}),
    ((1, 2, 3, 3), (2, 2, 3, 3), {}),
]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape, weight, attributes", CONVS)
def test_conv_matches_onnx_runtime(
    shape: tuple[int, ...], weight: tuple[int, ...], attributes: dict[str, Any], with_bias: bool
) -> None:
    """Strides, dilations, uneven pads and groups in 1, 2 and 3 dimensions."""
    inputs = [values(shape), values(weight, seed=1), *([values((weight[0],), seed=2)] if with_bias else [])]
    (y,) = check(Conv(**attributes), *inputs, static=(1, 2))
    onnx_names = {("group" if name == "groups" else name): v for name, v in attributes.items()}
    np.testing.assert_allclose(y, ort("Conv", *inputs, **onnx_names)[0], rtol=1e-4, atol=1e-5)


def test_conv_of_other_types_and_sizes() -> None:
    """16-bit floats sum in f32, integers are exact; empty batches and windows that just do not fit give nothing."""
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64, np.int32, np.int8):
        check(Conv(pads=(1, 1)), values((1, 2, 5), dtype), values((3, 2, 3), dtype), values((3,), dtype), static=(1, 2))
    assert check(Conv(), values((0, 2, 5)), values((3, 2, 3)), static=(1,))[0].shape == (0, 3, 3)
    assert check(Conv(), values((1, 2, 2)), values((3, 2, 3)), static=(1,))[0].shape == (1, 3, 0)
    assert check(Conv(), values((1, 0, 4)), values((3, 0, 3)), static=(1,))[0].shape == (1, 3, 2)
    check(Conv(pads=(-1, 2)), values((1, 2, 5)), values((3, 2, 3)), static=(1,))
    p = Dim("p", 0, 4)
    check_op(Conv(pads=(p, p)), values((1, 2, 5)), values((3, 2, 3)), extents={"p": 2})


def test_conv_sizes_are_symbolic() -> None:
    """The usual window sizes keep simple expressions, and one that may not fit is guarded."""
    h = Dim("h")
    same = make_node(Conv(pads=(1, 1)), ((1, 2, h), "f32"), ((3, 2, 3), "f32"))
    assert same.outputs[0].shape == (1, 3, h)
    assert not same.outputs[0].graph.guards
    halved = make_node(Conv(strides=(2,), pads=(1, 1)), ((1, 2, 2 * h), "f32"), ((3, 2, 3), "f32"))
    assert halved.outputs[0].shape == (1, 3, h)
    valid = make_node(Conv(), ((1, 2, h), "f32"), ((3, 2, 3), "f32"))
    assert valid.outputs[0].shape == (1, 3, h - 2)
    assert len(valid.outputs[0].graph.guards) == 1


def test_conv_errors() -> None:
    """Shapes, types and attributes that do not fit are named."""
    x, w = f32(1, 4, 5, 5), f32(6, 4, 3, 3)
    for op, inputs, message in [
        (Conv(), (x, f32(6, 3, 3, 3)), "channels"),
        (Conv(groups=4), (x, f32(6, 1, 3, 3)), "4 groups"),
        (Conv(), (x, f32(6, 4, 3)), "same rank"),
        (Conv(), (f32(4, 5), f32(6, 4)), "spatial"),
        (Conv(), (x, w, f32(5)), "bias"),
        (Conv(), (x, w, f32(6, 1)), "bias"),
        (Conv(), (f32(1, 4, 1, 1), w), "larger than the padded axis"),
        (Conv(strides=(1,)), (x, w), "expected 2 entries"),
    ]:
        with pytest.raises(ShapeError, match=message):
            op.infer(*inputs)
    with pytest.raises(DTypeError, match="differ"):
        Conv().infer(x, TensorType(w.shape, DTYPES["f16"]))
    with pytest.raises(OptionError, match="at least 1"):
        Conv(strides=(0, 1)).infer(x, w)


TRANSPOSED: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 4, 5), (3, 2, 2, 2), {"strides": (2, 2)}),
    ((1, 3, 4, 5), (3, 2, 3, 3), {"strides": (2, 2), "pads": (1, 1, 1, 1), "output_padding": (1, 1)}),
    ((1, 3, 4, 5), (3, 2, 3, 3), {}),
    ((1, 3, 4, 5), (3, 2, 3, 3), {"pads": (1, 1, 1, 1)}),
    ((1, 3, 4, 5), (3, 2, 4, 4), {"strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ((1, 3, 4, 5), (3, 2, 2, 3), {"strides": (3, 2), "pads": (0, 1, 1, 0), "output_padding": (2, 1)}),
    ((1, 4, 3, 3), (4, 3, 3, 2), {"strides": (2, 1), "groups": 2, "pads": (0, 1, 1, 0)}),
    ((1, 2, 3, 4), (2, 2, 3, 2), {"dilations": (2, 3)}),
    ((1, 2, 3, 4), (2, 2, 3, 2), {"strides": (2, 2), "dilations": (2, 3), "pads": (1, 0, 2, 1)}),
    ((1, 2, 6), (2, 3, 1), {"strides": (2,), "output_padding": (1,)}),
    ((1, 2, 3), (2, 3, 5), {"strides": (2,), "pads": (4, 3)}),
    ((1, 2, 4), (2, 3, 2), {"pads": (2, 2)}),
    (
        (1, 2, 5, 4),
        (2, 3, 3, 2),
        {"strides": (4, 6), "dilations": (2, 4), "pads": (1, 3, 2, 5), "output_padding": (3, 4)},
    ),
    ((1, 2, 9), (2, 3, 4), {"strides": (3,), "dilations": (2,), "pads": (6, 5)}),
    ((1, 2, 2, 3, 2), (2, 1, 2, 2, 3), {"strides": (2, 2, 3)}),
]


MORE_GROUPS = ((2, 6, 7, 9), (6, 2, 3, 3), {"groups": 3, "strides": (2, 1), "dilations": (1, 2), "pads": (1, 0, 0, 2)})


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape, weight, attributes", [*TRANSPOSED, MORE_GROUPS])
def test_conv_transpose_matches_onnx_runtime(
    shape: tuple[int, ...], weight: tuple[int, ...], attributes: dict[str, Any], with_bias: bool
) -> None:
    """The sum over taps and its decomposition into convolutions of the phases; also where padding shows the bias."""
    groups = attributes.get("groups", 1)
    bias = [values((weight[1] * groups,), seed=2)] if with_bias else []
    inputs = [values(shape), values(weight, seed=1), *bias]
    (y,) = check(ConvTranspose(**attributes), *inputs, static=(1, 2))
    onnx_names = {("group" if name == "groups" else name): v for name, v in attributes.items()}
    np.testing.assert_allclose(y, ort("ConvTranspose", *inputs, **onnx_names)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape, weight, attributes", [*TRANSPOSED, MORE_GROUPS])
def test_what_is_not_finite_reaches_only_what_has_a_tap_of_it(
    shape: tuple[int, ...], weight: tuple[int, ...], attributes: dict[str, Any]
) -> None:
    """No element of the input is multiplied by a zero that fills the kernel up."""
    op, x, w = ConvTranspose(**attributes), values(shape), values(weight, seed=1)
    g = Graph("transposed")
    g.output(g.add(op, g.input("x", shape), g.param("w", weight))[0], "y")
    model = rlx.compile(g, device="cpu")
    model.set_params({"w": w})
    for bad in (np.nan, np.inf):
        for place in (0, x.size // 2, x.size - 1):
            spoilt = x.copy()
            spoilt.flat[place] = bad
            with np.errstate(all="ignore"):
                want = op.reference(spoilt, w)
            np.testing.assert_allclose(model.run([spoilt])[0], want, rtol=1e-4, atol=1e-5)


def test_conv_transpose_of_other_types_and_sizes() -> None:
    """16-bit floats and integers, and an empty batch."""
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64, np.int32):
        inputs = values((1, 2, 5), dtype), values((2, 3, 3), dtype), values((3,), dtype)
        check(ConvTranspose(strides=(2,)), *inputs, static=(1, 2))
    assert check(ConvTranspose(), values((0, 2, 5)), values((2, 3, 3)), static=(1,))[0].shape == (0, 3, 7)


def test_a_kernel_of_the_stride_becomes_a_pointwise_convolution() -> None:
    """No tap overlaps: a 1x1 convolution to 4 times the channels, with no pads and no crop after it."""
    node = make_node(ConvTranspose(strides=(2, 2)), ((1, 3, Dim("h"), 5), "f32"), ((3, 2, 2, 2), "f32"))
    graph = node.outputs[0].graph
    assert isinstance(node.op, ConvTranspose)
    before = len(graph.nodes)
    node.op.decompose(graph, *node.inputs)
    made = graph.nodes[before:]
    (conv,) = [n for n in made if n.op.op_name == "conv"]
    assert conv.inputs[1].shape == (8, 3, 1, 1)
    assert conv.op == Conv(pads=(0, 0, 0, 0))
    assert not [n for n in made if n.op.op_name in ("slice", "pad")]


def test_conv_transpose_errors() -> None:
    """Shapes and attributes that do not fit are named."""
    x, w = f32(1, 4, 5), f32(4, 3, 3)
    for op, inputs, message in [
        (ConvTranspose(), (x, f32(3, 3, 3)), "channels"),
        (ConvTranspose(groups=3), (x, w), "3 groups"),
        (ConvTranspose(), (x, w, f32(4)), "bias"),
        (ConvTranspose(pads=(5, 5)), (x, w), "cut off"),
        (ConvTranspose(), (x, f32(4, 3, Dim("k"))), "known sizes"),
    ]:
        with pytest.raises(ShapeError, match=message):
            op.infer(*inputs)
    with pytest.raises(OptionError, match="negative"):
        ConvTranspose(output_padding=(-1,)).infer(x, w)


def test_work_counts_multiplications_and_additions() -> None:
    """Two operations a tap, channel and output element; for the transpose a tap, channel and input element."""
    x, w = f32(2, 4, 5, 6), f32(8, 2, 3, 3)
    assert Conv(groups=2, pads=(1, 1, 1, 1)).work(x, w).flops == 2 * (2 * 8 * 5 * 6) * (2 * 9)
    assert ConvTranspose(strides=(2, 2)).work(x, f32(4, 3, 2, 2)).flops == 2 * (2 * 4 * 5 * 6) * (3 * 4)
