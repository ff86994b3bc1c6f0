"""ONNX models with narrower weights and with 8-bit products: what is written, in rlx and in onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import rlx
from rlx.errors import NameNotFound, OptionError, RlxError
from rlx.ir.encodings import ENCODINGS
from rlx.progress import Progress
from rlx.quantiser.ranges import Grid, Seen, grid_of

F = TensorProto.FLOAT


def tensor(name: str, array: Any) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(array, np.float32), name)


def saved(
    path: Path,
    nodes: list[Any],
    inputs: dict[str, Any],
    outputs: list[str] | dict[str, Any],
    tensors: list[Any],
    opset: int = 17,
) -> Path:
    ins = [helper.make_tensor_value_info(n, F, s) for n, s in inputs.items()]
    shapes = outputs if isinstance(outputs, dict) else dict.fromkeys(outputs)
    outs = [helper.make_tensor_value_info(n, F, s) for n, s in shapes.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "g", ins, outs, tensors), opset_imports=[helper.make_opsetid("", opset)]
    )
    model.ir_version = 8
    onnx.save(model, path)
    return path


def small_net(path: Path, opset: int = 17) -> Path:
    """Conv, BatchNormalization, Relu; a residual block of two convolutions, one grouped; pooling and Gemm."""
    rng = np.random.default_rng(0)

    def w(*shape: int) -> Any:
        return rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))

    tensors = [
        tensor("w1", w(16, 3, 3, 3)), tensor("w2", w(16, 16, 3, 3)), tensor("b2", 0.1 * w(16, 1)[:, 0]),
        tensor("w3", w(16, 1, 3, 3)), tensor("b3", 0.1 * w(16, 1)[:, 0]),
        tensor("wg", w(10, 16)), tensor("bg", w(10, 1)[:, 0]),
        *(tensor(name, np.abs(w(16, 1)[:, 0]) + 0.5) for name in "shmv"),
    ]  # fmt: skip
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w1"], ["c1"], name="first", pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c1", "s", "h", "m", "v"], ["n1"]),
        node("Relu", ["n1"], ["r1"]),
        node("Conv", ["r1", "w2", "b2"], ["c2"], name="second", pads=[1, 1, 1, 1]),
        node("Relu", ["c2"], ["r2"]),
        node("Conv", ["r2", "w3", "b3"], ["c3"], name="third", pads=[1, 1, 1, 1], group=16),
        node("Add", ["c3", "r1"], ["a"]),
        node("MaxPool", ["a"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        node("GlobalAveragePool", ["p"], ["g"]),
        node("Flatten", ["g"], ["f"]),
        node("Gemm", ["f", "wg", "bg"], ["y"], name="head", transB=1),
    ]
    return saved(path, nodes, {"x": ["n", 3, 12, 12]}, {"y": ["n", 10]}, tensors, opset)


def pictures(count: int = 4, seed: int = 1) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [{"x": rng.standard_normal((2, 3, 12, 12)).astype(np.float32)} for _ in range(count)]


def by_onnxruntime(path: Path, given: dict[str, Any]) -> Any:
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, given)[0]


def relative(a: Any, b: Any) -> float:
    return float(np.linalg.norm(np.asarray(a) - b) / np.linalg.norm(a))


# ---- weights alone


@pytest.mark.parametrize("kind, most", [("f16", 1e-3), ("bf16", 1e-2), ("int8", 0.02), ("q8_0", 0.02), ("q4_0", 0.2)])
def test_weights_become_narrower(kind: str, most: float, tmp_path: Path) -> None:
    """The outputs stay near, in rlx and onnxruntime alike; the report says how near, and the file is valid."""
    source = small_net(tmp_path / "in.onnx")
    made = rlx.quantize(source, tmp_path / "out.onnx", kind, inputs=pictures())
    onnx.checker.check_model(onnx.load(tmp_path / "out.onnx"))
    given = pictures(1, 7)[0]
    before = rlx.load(source)(given)["y"]
    after = rlx.load(tmp_path / "out.onnx")(given)["y"]
    assert relative(before, after) < most
    assert made.outputs[0].rms < most
    assert made.bytes_after < made.bytes_before
    assert relative(by_onnxruntime(tmp_path / "out.onnx", given), after) < 1e-4


def matrices(path: Path, *, as_constant: bool = False) -> Path:
    """MatMul, Gemm in both orders with a bias, and an embedding."""
    rng = np.random.default_rng(0)
    arrays = {
        n: rng.standard_normal(s) for n, s in {"a": (96, 64), "b": (64, 64), "c": (32, 64), "table": (70, 64)}.items()
    }
    node = helper.make_node
    nodes = [node("Constant", [], [n], value=tensor(n, a)) for n, a in arrays.items()] if as_constant else []
    tensors = [] if as_constant else [tensor(n, a) for n, a in arrays.items()]
    nodes += [
        node("MatMul", ["x", "a"], ["m"]),
        node("Gemm", ["m", "b", "bias"], ["g"], transB=0),
        node("Gemm", ["g", "c"], ["y"], transB=1),
        node("Gather", ["table", "ids"], ["e"]),
        node("ReduceSum", ["e"], ["z"]),
    ]
    ids = numpy_helper.from_array(np.array([3, 4], np.int64), "ids")
    return saved(path, nodes, {"x": [5, 96]}, ["y", "z"], [*tensors, tensor("bias", rng.standard_normal(64)), ids])


@pytest.mark.parametrize("as_constant", [False, True])
def test_blocks_are_those_of_the_encoders(as_constant: bool, tmp_path: Path) -> None:
    """MatMulNBits holds the numbers and scales of q4_0 and q8_0, whatever way the matrix lies in the file."""
    source = matrices(tmp_path / "in.onnx", as_constant=as_constant)
    x = np.random.default_rng(2).standard_normal((5, 96)).astype(np.float32)
    given = {t.name: numpy_helper.to_array(t) for t in onnx.load(matrices(tmp_path / "plain.onnx")).graph.initializer}
    for kind in ("q8_0", "q4_0"):
        made = rlx.quantize(source, tmp_path / "out.onnx", kind)
        assert {t.name: t.after for t in made.tensors if t.name != "bias"} == {
            "a": kind, "b": kind, "c": kind, "table": "f32",
        }  # fmt: skip
        encoding = ENCODINGS[kind]

        def rounded(w: Any, encoding: Any = encoding) -> Any:
            return encoding.decode(encoding.encode(w), w.shape)

        a, b, c = rounded(given["a"].T.copy()).T, rounded(given["b"].T.copy()).T, rounded(given["c"])
        expected = ((x.astype(np.float64) @ a) @ b + given["bias"]) @ c.T
        for result in (rlx.load(tmp_path / "out.onnx")({"x": x})["y"], by_onnxruntime(tmp_path / "out.onnx", {"x": x})):
            np.testing.assert_allclose(result, expected, rtol=2e-4, atol=2e-3)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.parametrize("more", [{"alpha": 0.5}, {"beta": 0.5}, {"transA": 1}])
def test_a_gemm_that_is_more_than_a_product_keeps_what_it_does(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    """MatMulNBits has neither factors nor a turned first operand: such a Gemm stays, and reads bytes."""
    rng = np.random.default_rng(3)
    tensors = [tensor("w", rng.standard_normal((64, 64))), tensor("b", 9 * rng.standard_normal(64))]
    source = saved(tmp_path / "in.onnx", [helper.make_node("Gemm", ["x", "w", "b"], ["y"], **more)], {"x": [64, 64]},
                   ["y"], tensors)  # fmt: skip
    made = rlx.quantize(source, tmp_path / "out.onnx", kind)
    assert [t.after for t in made.tensors if t.name == "w"] == ["int8"]
    given = {"x": rng.standard_normal((64, 64)).astype(np.float32)}
    before, after = rlx.load(source)(given)["y"], rlx.load(tmp_path / "out.onnx")(given)["y"]
    assert relative(before, after) < 0.02
    assert relative(by_onnxruntime(tmp_path / "out.onnx", given), after) < 1e-4


def test_a_stack_of_matrices_has_a_scale_for_each_result(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    w = rng.standard_normal((3, 40, 24)) * np.logspace(0, 4, 24)  # columns of very different sizes
    source = saved(tmp_path / "in.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [3, 5, 40]}, ["y"],
                   [tensor("w", w)])  # fmt: skip
    rlx.quantize(source, tmp_path / "out.onnx", "int8")
    given = {"x": rng.standard_normal((3, 5, 40)).astype(np.float32)}
    before, after = rlx.load(source)(given)["y"], rlx.load(tmp_path / "out.onnx")(given)["y"]
    assert all(relative(before[..., column], after[..., column]) < 0.02 for column in range(24))


def test_bf16_needs_its_opset(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="of opset 13 and later, it has 12: take f16"):
        rlx.quantize(small_net(tmp_path / "in.onnx", 12), tmp_path / "out.onnx", "bf16")
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"imatrix": "i.gguf"}, "imatrix= is for block formats"),
        ({"save_imatrix": "i.gguf"}, "save_imatrix= is for block formats"),
        ({"output": "f16"}, "output= is for language models"),
        ({"type": "int8", "activations": "u8", "tensors": {"w1": "f16"}}, "rounds products and nothing else"),
        ({"type": "int8", "activations": "u8", "embeddings": "f16"}, "rounds products and nothing else"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        rlx.quantize(small_net(tmp_path / "in.onnx"), tmp_path / "out.onnx", inputs=pictures(), **options)


def test_a_vector_of_a_product_stays(tmp_path: Path) -> None:
    """It has no axis of results, whatever a pattern asks for."""
    source = saved(tmp_path / "in.onnx", [helper.make_node("MatMul", ["x", "v"], ["y"])], {"x": [3, 32]}, ["y"],
                   [tensor("v", np.ones(32))])  # fmt: skip
    for kind in ("int8", "q8_0"):
        made = rlx.quantize(source, tmp_path / "out.onnx", tensors={"v": kind})
        assert [t.after for t in made.tensors] == ["f32"]


def test_int8_has_a_scale_for_each_result(tmp_path: Path) -> None:
    """No element is farther from its number than half a step, and -128 is not used."""
    source = matrices(tmp_path / "in.onnx")
    rlx.quantize(source, tmp_path / "out.onnx", "int8")
    found = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "out.onnx").graph.initializer}
    given = {t.name: numpy_helper.to_array(t) for t in onnx.load(source).graph.initializer}
    for name, axis in (("a", 1), ("b", 1), ("c", 0)):
        q, scale = found[f"{name}.i8"], found[f"{name}.scale"]
        assert q.dtype == np.int8
        assert q.min() >= -127
        assert scale.shape == (given[name].shape[axis],)
        column = scale.reshape((1, -1) if axis else (-1, 1))
        inside = np.abs(q) < 127
        assert (np.abs(q * column - given[name]) <= 0.5001 * column)[inside].all()
        assert name not in found


def test_embeddings_by_wish(tmp_path: Path) -> None:
    """Tables stay in f32 unless asked for; patterns choose and keep."""
    source = matrices(tmp_path / "in.onnx")
    made = rlx.quantize(source, tmp_path / "o.onnx", "int8", embeddings="int8", keep=["c"], tensors={"b": "f16"})
    assert {t.name: t.after for t in made.tensors} == {
        "a": "int8",
        "b": "f16",
        "c": "f32",
        "table": "int8",
        "bias": "f32",
    }
    old, new = (rlx.load(p)({"x": np.ones((5, 96), np.float32)}) for p in (source, tmp_path / "o.onnx"))
    assert relative(old["z"], new["z"]) < 0.05


def test_weights_of_external_data_come_along(tmp_path: Path) -> None:
    """What is not rounded is taken into the new file, which stands for itself."""
    folder = tmp_path / "m"
    folder.mkdir()
    matrices(tmp_path / "plain.onnx")
    options = {"save_as_external_data": True, "location": "w.bin", "size_threshold": 0}
    onnx.save(onnx.load(tmp_path / "plain.onnx"), folder / "in.onnx", **options)
    rlx.quantize(folder / "in.onnx", tmp_path / "o.onnx", "int8", keep=["a"])
    x = np.ones((5, 96), np.float32)
    before, after = (rlx.load(p)({"x": x})["y"] for p in (tmp_path / "plain.onnx", tmp_path / "o.onnx"))
    assert relative(before, after) < 0.02


def test_values_that_inner_graphs_read_stay(tmp_path: Path) -> None:
    """A weight that an If reads too, and a rounded value: both still have their names and their elements."""
    rng = np.random.default_rng(0)
    node = helper.make_node
    branch = helper.make_graph(
        [node("MatMul", ["r", "w"], ["inner"])], "b", [], [helper.make_tensor_value_info("inner", F, None)]
    )
    other = helper.make_graph(
        [node("Identity", ["r"], ["same"])], "o", [], [helper.make_tensor_value_info("same", F, None)]
    )
    flag = numpy_helper.from_array(np.array(True), "flag")
    nodes = [
        node("MatMul", ["x", "w"], ["m"]),
        node("Relu", ["m"], ["r"]),
        node("MatMul", ["r", "w"], ["p"]),
        node("If", ["flag"], ["q"], then_branch=branch, else_branch=other),
        node("Add", ["p", "q"], ["y"]),
    ]
    tensors = [tensor("w", rng.standard_normal((48, 48)) / 7), flag]
    source = saved(tmp_path / "in.onnx", nodes, {"x": [4, 48]}, ["y"], tensors)
    x = {"x": rng.standard_normal((4, 48)).astype(np.float32)}
    before = rlx.load(source)(x)["y"]
    for options in ({"type": "int8"}, {"type": "q8_0"}, {"type": "int8", "activations": "u8", "inputs": x}):
        rlx.quantize(source, tmp_path / "o.onnx", **options)  # type: ignore[arg-type]
        after = rlx.load(tmp_path / "o.onnx")(x)["y"]
        assert relative(before, after) < 0.03
        assert relative(by_onnxruntime(tmp_path / "o.onnx", x), after) < 0.02


# ---- weights and activations


@pytest.mark.parametrize("opset", [11, 12, 13, 17])
@pytest.mark.parametrize("kind", ["u8", "i8"])
def test_static_int8(opset: int, kind: str, tmp_path: Path) -> None:
    """The network is made of 8-bit products, near the one of floats; below opset 13 by Microsoft's ops."""
    source = small_net(tmp_path / "in.onnx", opset)
    made = rlx.quantize(source, tmp_path / "o.onnx", "int8", activations=kind, inputs=pictures())
    model = onnx.load(tmp_path / "o.onnx")
    ops = [(n.op_type, n.domain) for n in model.graph.node]
    assert ("BatchNormalization", "") not in ops
    assert ("DequantizeLinear", "" if opset >= 13 else "com.microsoft") in ops
    assert (("Relu", "") in ops) == (kind == "i8")  # a grid of u8 from 0 on cuts off what Relu does
    given = pictures(1, 9)[0]
    before, after = (rlx.load(p)(given)["y"] for p in (source, tmp_path / "o.onnx"))
    assert relative(before, after) < (0.04 if kind == "u8" else 0.06)
    assert made.outputs[0].cosine > 0.998
    assert relative(by_onnxruntime(tmp_path / "o.onnx", given), after) < 0.02
    loaded = rlx.load(tmp_path / "o.onnx")
    assert loaded.explain("passes").count("conv_integer") == 3
    assert {t.name for t in made.tensors} >= {"w2", "w3", "wg"}


def test_static_int8_of_products_keeps_sums_in_floats(tmp_path: Path) -> None:
    """Of an encoder: products read rounded values; the sum beside them reads the value itself."""
    rng = np.random.default_rng(0)
    node = helper.make_node
    nodes = [
        node("MatMul", ["x", "a"], ["m"]),
        node("Add", ["m", "ba"], ["h"]),
        node("Erf", ["h"], ["e"]),
        node("MatMul", ["e", "b"], ["n"]),
        node("Add", ["n", "x"], ["y"]),
    ]
    tensors = [
        tensor("a", rng.standard_normal((32, 128)) / 6), tensor("b", rng.standard_normal((128, 32)) / 11),
        tensor("ba", rng.standard_normal(128)),
    ]  # fmt: skip
    source = saved(tmp_path / "in.onnx", nodes, {"x": ["n", 32]}, ["y"], tensors)
    sets = [{"x": rng.standard_normal((n, 32)).astype(np.float32)} for n in (3, 8, 1)]
    made = rlx.quantize(source, tmp_path / "o.onnx", "int8", activations="u8", inputs=sets)
    model = onnx.load(tmp_path / "o.onnx")
    last = next(n for n in model.graph.node if n.output[0] == "y")
    assert list(last.input) == ["n", "x"]
    sums = next(n for n in model.graph.node if n.output[0] == "h")
    assert list(sums.input) == ["m", "ba.rounded"]  # with which onnxruntime makes one product of integers of it
    assert made.activations == 2
    assert made.outputs[0].rms < 0.01
    assert rlx.load(tmp_path / "o.onnx").explain("passes").count("matmul_integer") == 2


def test_what_is_kept_reads_floats(tmp_path: Path) -> None:
    """Nodes by name, results by name; a pattern that matches none is refused, and so is a model without products."""
    source = small_net(tmp_path / "in.onnx")
    made = rlx.quantize(source, tmp_path / "o.onnx", "int8", activations="u8", inputs=pictures(), keep=["first", "y"])
    assert {t.name for t in made.tensors} == {"w2", "w3"}
    with pytest.raises(NameNotFound, match="no product 'zz'"):
        rlx.quantize(source, tmp_path / "p.onnx", "int8", activations="u8", inputs=pictures(), keep=["zz"])
    bare = saved(tmp_path / "bare.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": [4]}, ["y"], [])
    with pytest.raises(OptionError, match="nothing to round"):
        rlx.quantize(bare, tmp_path / "p.onnx", "int8", activations="u8", inputs={"x": np.ones(4, np.float32)})
    assert not (tmp_path / "p.onnx").exists()


def test_channels_of_zeros_and_large_biases(tmp_path: Path) -> None:
    """A channel without weights gives its bias, and a bias far beyond the products stays what it is."""
    w = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
    w[1], w[2] = 0, w[2] * 1e-9
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["c"]), helper.make_node("Relu", ["c"], ["y"])]
    bias = np.array([0.5, 3.0, 7.0, -0.25], np.float32)
    source = saved(tmp_path / "in.onnx", nodes, {"x": [1, 3, 8, 8]}, ["y"], [tensor("w", w), tensor("b", bias)])
    given = {"x": np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype(np.float32)}
    rlx.quantize(source, tmp_path / "o.onnx", "int8", activations="u8", inputs=given)
    y = rlx.load(tmp_path / "o.onnx")(given)["y"]
    np.testing.assert_allclose(y[0, 1], 3.0, rtol=1e-5)
    np.testing.assert_allclose(y[0, 2], 7.0, rtol=1e-5)
    np.testing.assert_allclose(by_onnxruntime(tmp_path / "o.onnx", given)[0, 1], 3.0, rtol=1e-5)


# ---- inputs


def test_ways_to_give_inputs(tmp_path: Path) -> None:
    """A folder, a file, arrays, a list and a function give the same bytes."""
    source, sets = small_net(tmp_path / "in.onnx"), pictures(3)
    folder = tmp_path / "inputs"
    folder.mkdir()
    for number, one in enumerate(sets):
        np.savez(folder / f"{number}.npz", allow_pickle=False, **one) if number else np.save(folder / "0.npy", one["x"])

    def drawn() -> Iterator[dict[str, Any]]:
        yield from sets

    made = []
    for given in (folder, sets, drawn, tuple(sets)):
        rlx.quantize(source, tmp_path / "o.onnx", "int8", activations="u8", inputs=given)
        made.append((tmp_path / "o.onnx").read_bytes())
    assert len(set(made)) == 1


def test_inputs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Wrong names, none at all, NaN, files that are none; nothing is written."""
    source = small_net(tmp_path / "in.onnx")
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 no archive")
    np.savez(tmp_path / "other.npz", allow_pickle=False, y=np.ones(3))
    nan = pictures(1)
    nan[0]["x"][0, 0, 0, 0] = np.nan
    (tmp_path / "empty").mkdir()
    cases: list[tuple[Any, str]] = [
        ({"z": np.ones(3)}, "no input 'z'"), ([{}], "no array for input 'x'"), ([], "at least one"),
        (nan, "NaN or infinite"), (tmp_path / "bad.npz", "not a whole .npz"), (tmp_path / "other.npz", "no array 'x'"),
        (tmp_path / "empty", "has 0"),
        (tmp_path / "in.onnx", "expected a folder"), (7, "expected a path"), ([3], "expected arrays by the names"),
    ]  # fmt: skip
    for given, message in cases:
        with pytest.raises(RlxError, match=message):
            rlx.quantize(source, tmp_path / "o.onnx", "int8", activations="u8", inputs=given)
    assert not (tmp_path / "o.onnx").exists()
    for options, message in (
        ({"activations": "u8"}, "needs inputs="), ({"activations": "u4", "inputs": nan}, "expected u8 or i8"),
        ({"imatrix": "i.gguf"}, "block formats"), ({"type": "q4_k"}, "no type 'q4_k'"),
    ):  # fmt: skip
        with pytest.raises(RlxError, match=message):
            rlx.quantize(source, tmp_path / "o.onnx", **{"type": "int8", **options})  # type: ignore[arg-type]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """Cut anywhere, an ONNX file gives one kind of error, or another model that is whole."""
    data = small_net(tmp_path / "in.onnx").read_bytes()
    rng = np.random.default_rng(0)
    cut = tmp_path / "cut.onnx"
    for at in rng.integers(1, len(data), 150):
        cut.write_bytes(data[:at])
        with pytest.raises(RlxError):
            rlx.quantize(cut, tmp_path / "o.onnx", "int8", activations="u8", inputs=pictures(1))
    for _ in range(150):
        bad = bytearray(data)
        for at in rng.integers(0, len(data), 3):
            bad[at] = rng.integers(256)
        cut.write_bytes(bad)
        try:
            rlx.quantize(cut, tmp_path / "o.onnx", "int8")
        except RlxError:
            continue


# ---- ranges


def test_histograms_grow_with_what_comes() -> None:
    """The counts are those of all elements, however the range grew; a value of zeros has none."""
    seen = Seen("x")
    for size in (0.01, 1.0, 300.0):
        seen.add(np.linspace(-size, size / 2, 1001, dtype=np.float32))
    assert seen.counts.sum() + seen.zeros == 3003
    assert (seen.low, seen.high) == (-300.0, 150.0)
    seen = Seen("zeros")
    seen.add(np.zeros(5))
    assert grid_of([seen], "u8", "mse", 99.9) == Grid(np.float32(1), 0, "u8")


@pytest.mark.parametrize("kind", ["u8", "i8"])
def test_ranges_of_each_kind(kind: str) -> None:
    """minmax keeps the outlier, percentile and mse cut it off; mse has the least error of them."""
    rng = np.random.default_rng(0)
    x = np.append(rng.standard_normal(200_000), [60.0]).astype(np.float32)
    seen = Seen("x")
    seen.add(x)
    errors = {}
    for ranges in ("minmax", "percentile", "mse"):
        grid = grid_of([seen], kind, ranges, 99.99)
        errors[ranges] = float(np.square(grid.rounded(x[:-1]) - x[:-1]).mean())
        assert grid.rounded(np.zeros(1)) == 0
    assert errors["percentile"] < errors["minmax"] / 20
    whole = {r: np.square(grid_of([seen], kind, r, 99.99).rounded(x) - x).mean() for r in errors}
    assert whole["mse"] == min(whole.values())
    negative = Seen("n")
    negative.add(-np.abs(x))
    grid = grid_of([negative], "u8", "minmax", 100)
    assert grid.zero == 255


def test_tensors_of_other_files_within_nodes_are_refused(tmp_path: Path) -> None:
    """Their place is told from the folder of the file, which is another one now; sparse tensors stay as they are."""
    value = tensor("v", np.ones((40, 40)))
    (tmp_path / "v.bin").write_bytes(value.raw_data)
    value.ClearField("raw_data")
    value.data_location = TensorProto.EXTERNAL
    value.external_data.add(key="location", value="v.bin")
    nodes = [
        helper.make_node("Constant", [], ["c"], value=value),
        helper.make_node("Add", ["x", "c"], ["s"]),
        helper.make_node("MatMul", ["s", "w"], ["y"]),
    ]
    source = saved(tmp_path / "in.onnx", nodes, {"x": [40, 40]}, ["y"], [tensor("w", np.ones((40, 40)))])
    with pytest.raises(OptionError, match="has a tensor in another file"):
        rlx.quantize(source, tmp_path / "o.onnx", "int8", keep=["c"])
    rlx.quantize(source, tmp_path / "o.onnx", "f16")  # it is taken in
    assert float(rlx.load(tmp_path / "o.onnx")(x=np.ones((40, 40), np.float32))["y"][0, 0]) == 80.0

    sparse = onnx.SparseTensorProto(dims=[64, 64])
    sparse.values.CopyFrom(tensor("w", np.ones(3)))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([1, 2, 70], np.int64), "w_indices"))
    path = saved(tmp_path / "s.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [2, 64]}, ["y"], [])
    model = onnx.load(path)
    model.graph.sparse_initializer.append(sparse)
    onnx.save(model, path)
    made = rlx.quantize(path, tmp_path / "o.onnx", "int8")
    assert not made.tensors
    x = np.arange(128, dtype=np.float32).reshape(2, 64)
    np.testing.assert_array_equal(*(rlx.load(p)(x=x)["y"] for p in (path, tmp_path / "o.onnx")))


def test_progress_names_sets_and_tensors(tmp_path: Path) -> None:
    """Measured ranges, rounded weights, compared outputs; a function whose number of sets is not known tells too."""
    source = small_net(tmp_path / "in.onnx")
    for given in (pictures(), lambda: iter(pictures())):
        events: list[Progress] = []
        options: Any = {"activations": "u8", "inputs": given}
        made = rlx.quantize(source, tmp_path / "o.onnx", "int8", progress=events.append, **options)
        assert list(dict.fromkeys(e.stage for e in events)) == ["inputs", "weights", "outputs", "done"]
        assert [e.fraction for e in events] == sorted(e.fraction for e in events)
        assert {e.item for e in events if e.stage == "weights"} == {t.name for t in made.tensors}
        assert [e.item for e in events if e.stage == "inputs"][1:] == [f"set {n}" for n in range(1, 5)]
