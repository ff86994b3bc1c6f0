"""The weight registry: weights held once, shared by graphs, loaded by name, and converted only when asked."""

from __future__ import annotations

import gc
import json
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from fresh_process import in_fresh_process

import rlx
from rlx.errors import DTypeError, ModelFormatError, NameNotFound, OptionError, ShapeError
from rlx.estimate.resident import resident_bytes
from rlx.ir.encoding import encoding_named

Array = np.ndarray[Any, Any]


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def projection(rows: Any = 4, inner: int = 64, columns: int = 48, **param: Any) -> Any:
    g = rlx.Graph("projection")
    x = g.input("x", (rows, inner))
    w = g.param("w", (inner, columns), **param)
    g.output(rlx.matmul(x, w), "y")
    return g


def prepared(model: Any) -> list[Array]:
    """The packed weights of a compiled graph."""
    shared = model._executable.shared
    return [a for b, a in shared.memory.items() if b.kind == "prepared"]


def save_safetensors(path: Path, tensors: dict[str, Array]) -> None:
    codes = {"float32": "F32", "float16": "F16", "int32": "I32"}
    header, data = {}, b""
    for name, array in tensors.items():
        start = len(data)
        data += array.tobytes()
        header[name] = {"dtype": codes[array.dtype.name], "shape": array.shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64 + 56)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


# ---- sharing


def test_sessions_over_one_registry_share_the_packed_weights() -> None:
    registry = rlx.WeightRegistry()
    w, x = numbers(64, 48), numbers(4, 64, seed=1)
    registry.add("w", w)
    one = rlx.Session(device="cpu", registry=registry).compile(projection())
    two = rlx.Session(device="cpu", registry=registry).compile(projection(rlx.Dim("rows", 1, 9)))
    results = [m.run({"x": x})[0] for m in (one, two)]
    np.testing.assert_allclose(results[0], x @ w, rtol=1e-4, atol=1e-4)
    assert np.array_equal(results[0], results[1])
    assert prepared(one), "the weight is packed, or this shows nothing"
    assert all(a is b for a, b in zip(prepared(one), prepared(two), strict=True))
    assert registry["w"].references == 2
    assert registry.nbytes == w.nbytes


def test_set_param_of_one_graph_leaves_the_other_and_the_registry() -> None:
    registry = rlx.WeightRegistry()
    w, x = numbers(64, 48), numbers(4, 64, seed=1)
    registry.add("w", w)
    one, two = (rlx.compile(projection(), device="cpu", registry=registry) for _ in range(2))
    before = [m.run({"x": x})[0] for m in (one, two)]
    one.set_param("w", 2 * w)
    np.testing.assert_allclose(one.run({"x": x})[0], 2 * before[0], rtol=1e-5)
    assert np.array_equal(two.run({"x": x})[0], before[1])
    assert np.array_equal(registry["w"].array, w)
    one.set_param("w", registry["w"].array)  # back: it finds what the other has
    assert np.array_equal(one.run({"x": x})[0], before[0])
    assert all(a is b for a, b in zip(prepared(one), prepared(two), strict=True))


def test_graphs_with_values_of_their_own_share_equal_ones() -> None:
    registry = rlx.WeightRegistry()
    w, other = numbers(64, 48), numbers(64, 48, seed=3)
    x = numbers(4, 64, seed=1)
    graphs = [projection(data=w), projection(data=w.copy()), projection(data=other)]
    models = [rlx.compile(g, device="cpu", registry=registry) for g in graphs]
    results = [m.run({"x": x})[0] for m in models]
    assert np.array_equal(results[0], results[1])
    np.testing.assert_allclose(results[2], x @ other, rtol=1e-4, atol=1e-4)
    assert prepared(models[0])[0] is prepared(models[1])[0] is not prepared(models[2])[0]
    assert len(registry) == 2
    assert registry.nbytes == 2 * w.nbytes


def test_weights_of_one_file_are_shared_without_a_registry_too(tmp_path: Path) -> None:
    from rlx.importers.safetensors import read_safetensors

    w, x = numbers(64, 48), numbers(4, 64, seed=1)
    save_safetensors(tmp_path / "w.safetensors", {"w": w})
    arrays = [read_safetensors(tmp_path / "w.safetensors").array("w") for _ in range(2)]
    models = [rlx.compile(projection(data=a), device="cpu") for a in arrays]
    for model in models:
        np.testing.assert_allclose(model.run({"x": x})[0], x @ w, rtol=1e-4, atol=1e-4)
    assert prepared(models[0])[0] is prepared(models[1])[0]


def test_references_end_with_the_last_clone() -> None:
    registry = rlx.WeightRegistry()
    registry.add("w", numbers(64, 48))
    model = rlx.compile(projection(), device="cpu", registry=registry)
    clone = model.clone()
    assert registry["w"].references == 1
    with pytest.raises(OptionError, match="used by 1 compiled"):
        registry.release("w")
    model.close()
    assert registry["w"].references == 1
    clone.close()
    assert registry["w"].references == 0
    registry.pin("w")
    assert registry.prune() == 0
    registry.pin("w", False)
    assert registry.prune() == 64 * 48 * 4
    assert "w" not in registry


def test_params_take_weights_of_other_names_and_types_are_checked() -> None:
    registry = rlx.WeightRegistry()
    registry.add("layer.weight", numbers(64, 48))
    registry.add("short", numbers(63, 48))
    registry.add("half", numbers(64, 48).astype(np.float16))
    x = numbers(4, 64, seed=1)
    model = rlx.compile(projection(), device="cpu", registry=registry, weights={"w": "layer.weight"})
    np.testing.assert_allclose(model.run({"x": x})[0], x @ registry["layer.weight"].array, rtol=1e-4, atol=1e-4)
    for weights, error, message in (
        ({"w": "short"}, ShapeError, r"\(63, 48\)"),
        ({"w": "half"}, DTypeError, "is f16"),
        ({"w": "nothing"}, NameNotFound, "no weight 'nothing'"),
        ({"v": "half"}, NameNotFound, "no param 'v'"),
    ):
        with pytest.raises(error, match=message):
            rlx.compile(projection(), device="cpu", registry=registry, weights=weights)
    with pytest.raises(OptionError, match="give registry="):
        rlx.compile(projection(), device="cpu", weights={"w": "half"})


def test_tied_weights_count_once() -> None:
    registry = rlx.WeightRegistry()
    registry.add("embedding", numbers(32, 8))
    tied = registry.tie("head", "embedding")
    assert tied.array is registry["embedding"].array
    assert tied.tied_to == "embedding"
    assert registry.nbytes == 32 * 8 * 4


def test_weights_are_read_only_and_copied() -> None:
    registry = rlx.WeightRegistry()
    source = numbers(4, 4)
    kept = registry.add("w", source).array
    source[0, 0] = 99
    assert kept[0, 0] != 99
    with pytest.raises(ValueError, match="read-only"):
        kept[0, 0] = 1


def test_model_files_share_weights_by_the_session(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    w, x = numbers(64, 48), numbers(4, 64, seed=1)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", 1, (4, 64))],
        [helper.make_tensor_value_info("y", 1, (4, 48))],
        initializer=[onnx.numpy_helper.from_array(w, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "m.onnx")
    registry = rlx.WeightRegistry()
    sessions = [rlx.Session(device="cpu", registry=registry) for _ in range(2)]
    models = [s.load(tmp_path / "m.onnx") for s in sessions]
    results = [m.run({"x": x})[0] for m in models]
    np.testing.assert_allclose(results[0], x @ w, rtol=1e-4, atol=1e-4)
    assert np.array_equal(results[0], results[1])
    assert prepared(models[0])[0] is prepared(models[1])[0]
    assert list(registry) == ["w"]
    assert registry["w"].references == 2


def test_threads_that_compile_over_one_registry_share_it() -> None:
    registry = rlx.WeightRegistry()
    w = numbers(64, 48)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(rlx.compile, projection(data=w.copy()), device="cpu", registry=registry) for _ in range(8)]
        models = [job.result() for job in jobs]
    assert list(registry) == ["w"]
    assert registry["w"].references == len(models)


def test_the_estimate_counts_what_a_registry_holds_apart() -> None:
    registry = rlx.WeightRegistry()
    registry.add("w", numbers(64, 48))
    alone, shared = (rlx.estimate(projection(), device="cpu", weights=held) for held in (None, registry))
    assert shared.held_weight_bytes == 64 * 48 * 4
    assert shared.own.peak_bytes < alone.own.peak_bytes


def test_set_param_takes_weights_of_a_registry() -> None:
    x = numbers(4, 64, seed=1)
    registry = rlx.WeightRegistry()
    registry.add("w", numbers(64, 64))
    registry.add("q", numbers(64, 64), encoding="q8_0", convert=True)
    model = rlx.compile(projection(columns=64), device="cpu")
    assert model.set_param("w", registry["w"]) == {}
    np.testing.assert_allclose(model.run({"x": x})[0], x @ registry["w"].array, rtol=1e-4, atol=1e-4)
    with pytest.raises(DTypeError, match="got uint8"):
        model.set_param("w", registry["q"])
    assert model.set_param("w", registry["q"], convert=True) == {"w": "decoded q8_0 to f32"}
    decoded = encoding_named("q8_0").decode(registry["q"].array, (64, 64))
    np.testing.assert_allclose(model.run({"x": x})[0], x @ decoded, rtol=1e-4, atol=1e-4)


# ---- what comes in


def test_length_must_be_shape_times_type() -> None:
    registry = rlx.WeightRegistry()
    values = numbers(2, 64)
    blocks = encoding_named("q8_0").encode(values)
    with pytest.raises(ShapeError, match="stored in 136 bytes, got 135"):
        registry.add("w", blocks[:-1], shape=(2, 64), encoding="q8_0")
    with pytest.raises(ShapeError, match="stored in 512 bytes, got 508"):
        registry.add("w", values.view(np.uint8).reshape(-1)[:-4], shape=(2, 64), dtype="f32")
    assert registry.add("w", blocks, shape=(2, 64), encoding="q8_0").nbytes == 136
    raw = registry.add("v", values.view(np.uint8).reshape(-1), shape=(2, 64), dtype="f32")
    assert np.array_equal(raw.array, values)
    with pytest.raises(OptionError, match="taken"):
        registry.add("v", values)


def test_conversion_is_asked_for_and_told() -> None:
    registry = rlx.WeightRegistry()
    half = numbers(2, 64).astype(np.float16)
    with pytest.raises(DTypeError, match="convert=True"):
        registry.add("w", half, dtype="f32")
    assert registry.add("w", half, dtype="f32", convert=True).note == "widened f16 to f32"
    assert registry.add("q", half, encoding="q8_0", convert=True).note == "encoded f16 as q8_0"
    with pytest.raises(DTypeError, match="can lose precision"):
        registry.add("v", numbers(2, 2), dtype="f16", convert=True)


def test_set_param_widens_or_encodes_when_asked() -> None:
    w, x = numbers(64, 48), numbers(4, 64, seed=1)
    model = rlx.compile(projection(), device="cpu")
    with pytest.raises(DTypeError):
        model.set_param("w", w.astype(np.float16))
    assert model.set_param("w", w.astype(np.float16), convert=True) == {"w": "widened f16 to f32"}
    np.testing.assert_allclose(
        model.run({"x": x})[0], x @ w.astype(np.float16).astype(np.float32), rtol=1e-4, atol=1e-4
    )
    assert model.set_param("w", w, convert=True) == {}
    with pytest.raises(DTypeError, match="can lose precision"):
        model.set_param("w", w.astype(np.float64), convert=True)
    coded = rlx.compile(projection(columns=64, encoding="q8_0"), device="cpu")
    with pytest.raises(ShapeError, match="convert=True"):
        coded.set_param("w", numbers(64, 64))
    assert coded.set_param("w", numbers(64, 64), convert=True) == {"w": "encoded f32 as q8_0"}
    by_convert = coded.run({"x": x})[0]
    coded.set_param("w", encoding_named("q8_0").encode(numbers(64, 64)))
    assert np.array_equal(coded.run({"x": x})[0], by_convert)


# ---- files


def test_safetensors_by_pattern_with_transposes(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensors = {"model.0.w": numbers(8, 16), "model.1.w": numbers(8, 16, seed=1), "steps": np.arange(4, dtype=np.int32)}
    save_safetensors(path, tensors)
    registry = rlx.WeightRegistry()
    made = registry.load(path, {"model.{}.w": "layer{}/weight"}, transpose="layer1/*")
    assert [w.name for w in made] == list(registry) == ["layer0/weight", "layer1/weight"]
    assert registry["layer0/weight"].mapped
    assert not registry["layer1/weight"].mapped
    assert np.array_equal(registry["layer1/weight"].array, tensors["model.1.w"].T)
    with pytest.raises(NameNotFound, match="no tensor matches 'modle"):
        registry.load(path, {"modle.{}": "{}"})
    with pytest.raises(NameNotFound, match="no weight taken"):
        registry.load(path, {"steps": "steps"}, transpose="w")
    with pytest.raises(OptionError, match="taken"):
        registry.load(path, {"model.{}.w": "layer{}/weight"})
    with pytest.raises(OptionError, match="would both be 'one'"):
        registry.load(path, {"model.{}.w": "one"})
    assert len(registry) == 2
    half = rlx.WeightRegistry()
    half.load(path, dtype="f16")
    assert half["model.0.w"].note == "converted f32 to f16"
    assert half["steps"].dtype.name == "i32"


def test_npz_and_onnx_by_name(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    w = numbers(8, 16)
    np.savez_compressed(tmp_path / "m.npz", **{"a/w": w, "b": np.arange(3)})
    registry = rlx.WeightRegistry()
    registry.load(tmp_path / "m.npz", {"a/{}": "npz.{}"})
    assert np.array_equal(registry["npz.w"].array, w)
    tensor = onnx.numpy_helper.from_array(w, "fc.weight")
    graph = onnx.helper.make_graph([], "g", [], [], initializer=[tensor])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "m.onnx")
    registry.load(tmp_path / "m.onnx", transpose="fc.*")
    assert np.array_equal(registry["fc.weight"].array, w.T)
    np.savez(tmp_path / "big.npz", w=w.astype(">f4"))
    other = rlx.WeightRegistry()
    other.load(tmp_path / "big.npz")
    assert np.array_equal(other["w"].array, w)
    assert other["w"].array.dtype.isnative
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 no more")
    with pytest.raises(ModelFormatError, match="no npz file"):
        registry.load(tmp_path / "bad.npz")
    with pytest.raises(ModelFormatError, match="not a file of weights"):
        registry.load(tmp_path / "m.bin")


def gguf(path: Path, tensors: dict[str, tuple[int, tuple[int, ...], bytes]]) -> None:
    """A GGUF file of (ggml type, shape, bytes) by name."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 0)
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        head += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *shape[::-1]) + struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)


def test_gguf_keeps_blocks_and_decodes_when_asked(tmp_path: Path) -> None:
    w, x = numbers(64, 64), numbers(4, 64, seed=1)
    q8 = encoding_named("q8_0")
    blocks = q8.encode(w)
    gguf(tmp_path / "m.gguf", {"w": (8, (64, 64), blocks.tobytes()), "norm": (0, (64,), w[0].tobytes())})
    registry = rlx.WeightRegistry()
    registry.load(tmp_path / "m.gguf")
    weight = registry["w"]
    assert (weight.encoding, weight.shape, weight.nbytes, weight.mapped) == ("q8_0", (64, 64), blocks.nbytes, True)
    assert np.array_equal(registry["norm"].array, w[0])
    model = rlx.compile(projection(columns=64, encoding="q8_0"), device="cpu", registry=registry)
    np.testing.assert_allclose(model.run({"x": x})[0], x @ q8.decode(blocks, (64, 64)), rtol=1e-4, atol=1e-4)
    with pytest.raises(DTypeError, match="dtype='f32'"):
        rlx.compile(projection(columns=64), device="cpu", registry=registry)
    plain = rlx.WeightRegistry()
    plain.load(tmp_path / "m.gguf", {"w": "w"}, dtype="f32")
    assert plain["w"].note == "decoded q8_0 to f32"
    assert np.array_equal(plain["w"].array, q8.decode(blocks, (64, 64)))


def measure_models() -> list[int]:
    """What three more models over one registry grow the resident set by, and the bytes of its weights."""
    n = 2048
    registry = rlx.WeightRegistry()
    for i in range(2):
        registry.add(f"w{i}", np.full((n, n), 1e-3, np.float32))

    def model() -> rlx.CompiledGraph:
        g = rlx.Graph()
        x = g.input("x", (1, n))
        for i in range(2):
            x = rlx.matmul(x, g.param(f"w{i}", (n, n)))
        g.output(x)
        made = rlx.Session(device="cpu", threads=1, cache=False, registry=registry).compile(g)
        made.run({"x": np.ones((1, n), np.float32)})
        return made

    models = [model()]
    before = resident_bytes()
    models += [model() for _ in range(3)]
    return [resident_bytes() - before, registry.nbytes]


def test_more_sessions_over_one_registry_take_no_more_weights() -> None:
    grown, weights = in_fresh_process(measure_models)
    assert weights == 2 * 2048 * 2048 * 4
    assert grown < weights / 4, "three more models over 32 MiB of weights take arenas and code only"


def test_packed_weights_go_with_the_last_graph() -> None:
    from rlx.backends.cpu.runtime import packed_weights

    registry = rlx.WeightRegistry()
    registry.add("w", numbers(64, 40))
    models = [rlx.compile(projection(columns=40), device="cpu", registry=registry) for _ in range(2)]
    for model in models:
        model.run({"x": numbers(4, 64)})
    key = models[0]._executable.shared.keys[
        next(b for b in models[0]._executable.shared.memory if b.kind == "prepared")
    ]
    models[0].close()
    assert packed_weights.find(key) is not None
    models[1].close()
    gc.collect()
    assert packed_weights.find(key) is None


# ---- equal weights of one file


def save_onnx(path: Path, weights: dict[str, Array], *, shift: int = 0) -> None:
    """x times each of the weights [64, 320]; `shift` bytes in the name of the file's producer move them all."""
    nodes = [onnx.helper.make_node("MatMul", ["x", name], [f"y_{name}"]) for name in weights]
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [4, 64])
    outs = [onnx.helper.make_tensor_value_info(f"y_{name}", onnx.TensorProto.FLOAT, [4, 320]) for name in weights]
    stored = [onnx.numpy_helper.from_array(w, name) for name, w in weights.items()]
    graph = onnx.helper.make_graph(nodes, "g", [x], outs, stored)
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="p" * shift), path)


@pytest.mark.parametrize("shift", range(4))
def test_equal_weights_of_a_file_are_packed_once(tmp_path: Path, shift: int) -> None:
    """Wherever they lie in it, aligned or not; each can still be set, and then parts from the others."""
    w, x = numbers(64, 320), numbers(4, 64, seed=1)
    middle = w.copy()
    middle[32, 160] += 1
    save_onnx(tmp_path / "m.onnx", {"a": w, "b": middle, "c": w, "d": w}, shift=shift)
    model = rlx.load(tmp_path / "m.onnx", device="cpu", threads=1, cache=False)
    expected = [x @ w, x @ middle, x @ w, x @ w]
    for got, want in zip(model.run([x]), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert len({a.ctypes.data for a in prepared(model)}) == 2
    model.set_param("c", 2 * w)
    for got, want in zip(model.run([x]), [x @ w, x @ middle, 2 * x @ w, x @ w], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert len({a.ctypes.data for a in prepared(model)}) == 3


@pytest.mark.parametrize("shift", range(4))
def test_weights_of_one_file_are_packed_once_for_all_sessions(tmp_path: Path, shift: int) -> None:
    """Also where the file has them unaligned, so that they are copied out of it."""
    save_onnx(tmp_path / "m.onnx", {"a": numbers(64, 320)}, shift=shift)
    models = [rlx.Session(device="cpu", cache=False).load(tmp_path / "m.onnx") for _ in range(3)]
    for model in models:
        model.run([numbers(4, 64)])
    assert len({a.ctypes.data for model in models for a in prepared(model)}) == 1
