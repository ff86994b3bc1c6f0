"""Loading: by ending or by content, and one clear error for everything that is not a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import rlx
from rlx.errors import ModelFormatError, OptionError, RlxError, ShapeError, UnsupportedOp


def model_bytes(op: str = "Tanh", domain: str = "") -> bytes:
    """y = op(x + w), with x of [batch, 3]."""
    nodes = [
        helper.make_node("Add", ["x", "w"], ["h"], name="plus"),
        helper.make_node(op, ["h"], ["y"], name="last", domain=domain),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])
    weights = [numpy_helper.from_array(np.float32([1, 2, 3]), "w")]
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    made: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return made


X = np.float32([[0, 0, 0], [1, -2, -3]])
WANT = np.tanh(X + np.float32([1, 2, 3]))


@pytest.mark.parametrize("name", ["model.onnx", "MODEL.ONNX", "model", "model.bin"])
def test_a_model_is_known_by_ending_or_content(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(model_bytes())
    for source in (path, str(path)):
        model = rlx.load(source, device="cpu")
        np.testing.assert_allclose(model.run({"x": X})[0], WANT, rtol=1e-5)
    fixed = rlx.load(path, device="cpu", dims={"batch": 2})
    assert fixed.inputs[0].shape == (2, 3)
    bounded = rlx.Session(dims={"x": ((1, 4), 3)}).load(path, device="cpu")
    assert bounded.plan is not None
    np.testing.assert_allclose(bounded.run([X])[0], WANT, rtol=1e-5)


def test_text_files(tmp_path: Path) -> None:
    g = rlx.Graph("text")
    g.output(rlx.tanh(g.input("x", (rlx.Dim("n", 1, 9), 3)) + g.constant(np.float32([1, 2, 3]))), name="y")
    path = tmp_path / "model.rlx"
    path.write_text(str(g))
    np.testing.assert_allclose(rlx.load(path, device="cpu", dims={"n": 2}).run([X])[0], WANT, rtol=1e-5)


def write(content: bytes) -> Callable[[Path], None]:
    return lambda path: (path.write_bytes(content), None)[1]


CASES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "missing": ("m.onnx", lambda path: None, "can't be read: No such file"),
    "missing, no ending": ("m", lambda path: None, "can't be read: No such file"),
    "a folder": ("m.onnx", lambda path: path.mkdir(), "model.safetensors is not to be found there"),
    "empty": ("m.onnx", write(b""), "empty"),
    "empty, no ending": ("m", write(b""), "neither its ending nor its contents"),
    "GGUF, no ending": ("m", write(b"GGUF\3\0\0\0"), "no GGUF file"),
    "weights of safetensors": ("m.safetensors", write(b"\2\0\0\0\0\0\0\0{}"), "config.json is not beside it"),
    "PyTorch": ("m.pt", write(b"PK\3\4"), "by torch.onnx.export"),
    "TensorFlow": ("m.TFLITE", write(b"\x1c\0\0\0TFL3"), "by tf2onnx"),
    "another runtime": ("m.engine", write(b"ftrt"), "load the ONNX file it came of"),
    "text": ("m.onnx", write(b"hello world, this is no model"), "is it an ONNX model, whole"),
    "a picture": ("m.png", write(b"\x89PNG\r\n\x1a\n" + bytes(100)), "neither its ending nor its contents"),
    "not text": ("m.rlx", write(b"\xff\xfe\x00"), "is not text"),
    "other text": ("m.rlx", write(b"hello"), "expected 'graph'"),
    "zeros": ("m.onnx", write(bytes(1000)), "m.onnx"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_model(case: str, tmp_path: Path) -> None:
    name, prepare, text = CASES[case]
    prepare(tmp_path / name)
    with pytest.raises(ModelFormatError, match=text) as caught:
        rlx.load(tmp_path / name, device="cpu")
    assert str(tmp_path / name) in str(caught.value)


def test_truncated_models(tmp_path: Path) -> None:
    """Cut anywhere, a model is an RlxError or (where the cut leaves a whole model) a model; never a crash."""
    whole = model_bytes()
    path = tmp_path / "m.onnx"
    for size in range(0, len(whole), 3):
        path.write_bytes(whole[:size])
        check_load(path)


def test_random_bytes(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    rng = np.random.default_rng(pytestconfig.option.seed)
    whole = np.frombuffer(model_bytes(), np.uint8)
    path = tmp_path / "m.onnx"
    for _ in range(150):
        path.write_bytes(rng.bytes(int(rng.integers(1, 400))))
        check_load(path)
        damaged = whole.copy()
        damaged[rng.integers(0, len(whole), 3)] = rng.integers(0, 256, 3)
        path.write_bytes(damaged.tobytes())
        check_load(path)


def check_load(path: Path) -> None:
    with suppress(RlxError):
        rlx.load(path, device="reference")


def test_bad_arguments(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(model_bytes())
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (5, {}, OptionError, "load takes the path, bytes or open file of a model.* got int"),
        (None, {}, OptionError, "got NoneType"),
        (path, {"thread": 1}, OptionError, "unknown option 'thread'"),
        (path, {"device": "tpu"}, OptionError, "unknown device 'tpu'"),
        (path, {"dims": {"seq": 1}}, OptionError, "unknown dim 'seq'; dims: 'batch'"),
        (path, {"dims": {"x": (2, 4)}}, ShapeError, "the file fixes this size to 3"),
    ]
    for source, options, error, text in cases:
        with pytest.raises(error, match=text):
            rlx.load(source, **options)


def test_unsupported_ops_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(model_bytes("Frobnicate", "my.domain"))
    with pytest.raises(UnsupportedOp, match=r"my\.domain\.Frobnicate.*'last'") as caught:
        rlx.load(path)
    assert [(n.name, n.op) for n in caught.value.nodes] == [("last", "Frobnicate")]
