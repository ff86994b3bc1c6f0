"""A model in float64: what is retyped, what is kept, and which of two results it says is nearer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

import rlx
from rlx.backends.reference import run_graph
from rlx.cli.main import cli
from rlx.ir.encoding import encoding_named
from rlx.ops.control import Scan
from rlx.testing.truth import errors_of, in_f64, run_f64

RNG = np.random.default_rng(3)


def test_sums_are_those_of_float64() -> None:
    """Of numbers whose sum f32 loses: 2^24 ones after one, and back; weights and attributes are widened exactly."""
    g = rlx.Graph()
    x = g.input("x", (3,))
    w = g.param("w", (3,), data=np.array([1, 1e8, -1e8], np.float32))
    g.output(rlx.ops.reduce_sum(rlx.cast(rlx.cast(x * w, "f16"), "f32"), (0,), False), "y")
    given = {"x": np.ones(3, np.float32) * np.float32(0.1)}
    exact = run_f64(in_f64(g), given)
    assert exact["y"] == np.float64(np.float32(0.1))  # without the rounding to f16, which is none of the model's
    assert run_graph(g, given)["y"] != exact["y"]


def test_what_rounds_to_integers_stays() -> None:
    """The steps of a quantised model are those of its file."""
    g = rlx.Graph()
    x = g.input("x", (4,))
    g.output(rlx.cast(rlx.cast(x, "i8"), "f32"), "y")
    exact = run_f64(in_f64(g), {"x": np.array([1.4, -2.6, 300, 0], np.float32)})
    assert exact["y"].tolist() == [1, -2, 127, 0]


def test_loops_and_encoded_weights_are_widened() -> None:
    """Carries of regions, and blocks decoded to f64; the truth differs from f32 by its rounding only."""
    g = rlx.Graph()
    x = g.input("x", (4, 2, 32))
    blocks = encoding_named("q8_0").encode(RNG.normal(size=(5, 32)).astype(np.float32))
    w = g.param("w", (5, 32), data=blocks, encoding="q8_0")
    body = rlx.Graph("body")
    carry, row = body.input("c", (2, 5)), body.input("row", (2, 5))
    body.output(rlx.tanh(carry * np.float32(0.3) + row), "next")
    start = g.constant(np.ones((2, 5), np.float32))
    (last,) = g.add(Scan(1, 1), start, x @ rlx.transpose(w), regions=[body])
    g.output(last, "y")
    given = {"x": RNG.normal(size=(4, 2, 32)).astype(np.float32)}
    truth = in_f64(g)
    assert not truth.kept
    exact, got = run_f64(truth, given)["y"], run_graph(g, given)["y"]
    assert exact.dtype == np.float64
    assert 0 < np.abs(exact - got).max() < 1e-4


def test_random_numbers_and_bits_are_made_as_they_were() -> None:
    """They are functions of bits: those of f64 would be others."""
    g = rlx.Graph()
    x = g.input("x", (4,))
    g.output(rlx.cast(rlx.ops.bit_cast(x, "i32"), "f32") * x, "y")
    truth = in_f64(g)
    given = {"x": np.array([1, 2, 3, 4], np.float32)}
    assert len(truth.kept) == 1
    assert run_f64(truth, given)["y"].tolist() == (given["x"].view(np.int32).astype(np.float64) * given["x"]).tolist()


def test_errors_say_which_is_nearer() -> None:
    exact = {"y": np.array([1.0, 2, 3, np.inf]), "n": np.array([1])}
    near, far = np.array([1, 2, 3.001, np.inf], np.float32), np.array([3, 2, 1, np.inf], np.float32)
    one, two = errors_of(exact, {"near": {"y": near, "n": [1]}, "far": {"y": far}})
    assert (one.runtime, two.runtime) == ("near", "far")
    assert one.largest == pytest.approx(0.001, rel=1e-3)
    assert two.largest == 2
    finite = errors_of({"y": np.array([1.0, 2, 3])}, {"a": {"y": np.array([3.0, 2, 1])}})
    assert finite[0].correlation == pytest.approx(-1)


def save_mlp(path: Path) -> None:
    sizes = {"a": (64, 48), "b": (48, 6)}
    weights = [numpy_helper.from_array(RNG.normal(size=s).astype(np.float32), n) for n, s in sizes.items()]
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("MatMul", ["t", "b"], ["y"]),
        helper.make_node("ArgMax", ["y"], ["best"], axis=1, keepdims=0),
    ]
    outputs = [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 6]),
        helper.make_tensor_value_info("best", TensorProto.INT64, ["n"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])
    graph = helper.make_graph(nodes, "mlp", [x], outputs, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)


def test_the_command_tells_both_runtimes(tmp_path: Path) -> None:
    """As text and as JSON; integers are no matter of rounding."""
    path = tmp_path / "mlp.onnx"
    save_mlp(path)
    shown = CliRunner().invoke(cli, ["verify", str(path), "--f64", "--device", "cpu"])
    assert shown.exit_code == 0, shown.output
    assert "y rlx on cpu: largest error" in shown.output
    assert "y onnxruntime: largest error" in shown.output
    made = CliRunner().invoke(cli, ["verify", str(path), "--f64", "--device", "cpu", "--json"])
    facts = json.loads(made.stdout)
    assert [e["runtime"] for e in facts["errors"]] == ["rlx on cpu", "onnxruntime"]
    assert all(0 < e["relative"] < 1e-5 and e["correlation"] > 0.999999 for e in facts["errors"])
