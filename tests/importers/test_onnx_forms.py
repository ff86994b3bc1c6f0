"""Forms of ops that exporters of different years write, against ONNX Runtime at several sizes from one compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import rlx

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
