"""The ONNX reader gives what `onnx` gives on every storage form, and on hostile bytes fails with one kind of error."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from rlx.errors import ModelFormatError
from rlx.importers.onnx import wire
from rlx.importers.onnx.model import Attribute, GraphProto, ModelFile, NodeProto, TensorRef, ValueInfo, read_model
from rlx.importers.onnx.wire import Message, Reader
from rlx.importers.sources import FileSource

NUMERIC = sorted(set(TensorProto.DataType.values()) - {TensorProto.UNDEFINED, TensorProto.STRING})
FORMATS = ["path", "bytes", "memoryview"]


def _values(elem_type: int, shape: tuple[int, ...]) -> np.ndarray:
    """Every kind of bit pattern of the type, as an array of its NumPy dtype."""
    dtype = helper.tensor_dtype_to_np_dtype(elem_type)
    rng = np.random.default_rng(elem_type)
    size = int(np.prod(shape))
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    if dtype.kind == "c":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    if elem_type in (TensorProto.FLOAT, TensorProto.DOUBLE):
        return rng.standard_normal(shape).astype(dtype)
    bits = {21: 4, 22: 4, 23: 4, 25: 2, 26: 2, 27: 6, 28: 6}.get(elem_type, 8)
    raw = rng.integers(0, 1 << bits, size * dtype.itemsize, dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def _model(*initializers: TensorProto, nodes: tuple[onnx.NodeProto, ...] = ()) -> onnx.ModelProto:
    graph = helper.make_graph(list(nodes), "g", [], [], list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _read(model: onnx.ModelProto | bytes, form: str = "bytes", folder: Path | None = None) -> ModelFile:
    data = model if isinstance(model, bytes) else model.SerializeToString()
    if form == "path":
        assert folder is not None
        (folder / "model.onnx").write_bytes(data)
        return read_model(folder / "model.onnx")
    return read_model(data if form == "bytes" else memoryview(bytearray(data)))


def _same(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.tobytes() == expected.tobytes()


def _typed(elem_type: int, values: np.ndarray) -> TensorProto:
    """The tensor in its typed field, by the rules of onnx.proto."""
    tensor = TensorProto(name="w", data_type=elem_type, dims=values.shape)
    flat = values.reshape(-1)
    if elem_type in (TensorProto.COMPLEX64, TensorProto.FLOAT):
        tensor.float_data.extend(flat.view(np.float32).tolist())
    elif elem_type in (TensorProto.COMPLEX128, TensorProto.DOUBLE):
        tensor.double_data.extend(flat.view(np.float64).tolist())
    elif elem_type in (TensorProto.UINT32, TensorProto.UINT64):
        tensor.uint64_data.extend(flat.tolist())
    elif elem_type == TensorProto.INT64:
        tensor.int64_data.extend(flat.tolist())
    elif elem_type in (27, 28):
        tensor.int32_data.extend(flat.view(np.uint8).tolist())
    elif values.dtype.kind in "iu" and elem_type < 16:
        tensor.int32_data.extend(flat.tolist())
    else:
        raw = np.frombuffer(numpy_helper.from_array(values).raw_data, np.uint8)
        tensor.int32_data.extend(raw.view(f"u{2 if flat.itemsize == 2 else 1}").tolist())
    return tensor


# --- tensors: every type in every storage form ------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("elem_type", NUMERIC)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (7,)])
def test_raw_data(elem_type: int, shape: tuple[int, ...], form: str, tmp_path: Path) -> None:
    tensor = numpy_helper.from_array(_values(elem_type, shape), "w")
    assert tensor.data_type == elem_type
    ref = _read(_model(tensor), form, tmp_path).graph.initializers["w"]
    _same(ref.array(), numpy_helper.to_array(tensor))
    _same(ref.array(aligned=False), numpy_helper.to_array(tensor))
    assert (ref.dims, ref.elem_type, ref.nbytes) == (shape, elem_type, len(tensor.raw_data))
    assert not ref.array().flags.writeable


@pytest.mark.parametrize("elem_type", NUMERIC)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (301,)])
def test_typed_fields(elem_type: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = _typed(elem_type, _values(elem_type, shape))
    ref = _read(_model(tensor), "path", tmp_path).graph.initializers["w"]
    _same(ref.array(), numpy_helper.to_array(tensor))
    assert not ref.zero_copy


@pytest.mark.parametrize("elem_type", [TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT8, TensorProto.COMPLEX128])
def test_typed_fields_unpacked(elem_type: int) -> None:
    """A writer need not pack repeated scalars; onnx reads our hand-made encoding the same way."""
    tensor = _typed(elem_type, _values(elem_type, (3, 5)))
    field = next(f for f in tensor.ListFields() if f[0].name.endswith("_data"))
    data = TensorProto(name="w", data_type=elem_type, dims=(3, 5)).SerializeToString()
    for value in field[1]:
        payload = (
            _varint(int(value) % (1 << 64))
            if field[0].name.startswith("int")
            else np.array(value, "<f4" if field[0].name == "float_data" else "<f8").tobytes()
        )
        kind = {"float_data": 5, "double_data": 1}.get(field[0].name, 0)
        data += bytes([field[0].number << 3 | kind]) + payload
    assert TensorProto.FromString(data) == tensor
    _same(_read(_wrap(data)).graph.initializers["w"].array(), numpy_helper.to_array(tensor))


def test_strings() -> None:
    tensor = TensorProto(name="w", data_type=8, dims=(2, 2), string_data=[b"a", b"", "é".encode(), b"\xff\x00"])
    ref = _read(_model(tensor)).graph.initializers["w"]
    assert ref.array().tolist() == [["a", ""], ["é", "\\xff\0"]]  # no UTF-8: written as an escape
    assert ref.nbytes == 5


@pytest.mark.parametrize("elem_type", NUMERIC)
def test_external_data(elem_type: int, tmp_path: Path) -> None:
    values = _values(elem_type, (5, 3))
    tensor = numpy_helper.from_array(values, "w")
    raw = tensor.raw_data
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.bin").write_bytes(b"x" * 64 + raw + b"tail")
    _point(tensor, "sub/w.bin", 64, len(raw))
    ref = _read(_model(tensor), "path", tmp_path).graph.initializers["w"]
    _same(ref.array(), values)
    assert ref.nbytes == len(raw)


def test_external_data_without_length_runs_to_the_end_of_the_file(tmp_path: Path) -> None:
    tensor = numpy_helper.from_array(np.arange(4, dtype=np.float32), "w")
    (tmp_path / "w.bin").write_bytes(b"1234" + tensor.raw_data)
    _point(tensor, "w.bin", 4, None)
    _same(_read(_model(tensor), "path", tmp_path).graph.initializers["w"].array(), np.arange(4, dtype=np.float32))


def test_aligned_raw_data_is_a_view_and_misaligned_a_copy_unless_asked(tmp_path: Path) -> None:
    """Two models differing in one byte of padding: at most one of them is aligned."""
    seen = set()
    for padding in range(4):
        tensor = numpy_helper.from_array(np.arange(1000, dtype=np.float32), "w" + "x" * padding)
        ref = next(iter(_read(_model(tensor), "path", tmp_path).graph.initializers.values()))
        array, view = ref.array(), ref.array(aligned=False)
        assert array.flags.aligned
        assert np.shares_memory(view, ref.array(aligned=False))
        assert np.shares_memory(array, view) == ref.zero_copy == view.flags.aligned
        _same(view, np.arange(1000, dtype=np.float32))
        seen.add(ref.zero_copy)
    assert seen == {True, False}


def test_arrays_outlive_the_model(tmp_path: Path) -> None:
    tensor = numpy_helper.from_array(np.arange(1000, dtype=np.uint8), "w")
    array = _read(_model(tensor), "path", tmp_path).graph.initializers["w"].array()
    os.unlink(tmp_path / "model.onnx")
    _same(array, np.arange(1000, dtype=np.uint8))


def test_a_file_replaced_after_the_header_was_read_is_refused(tmp_path: Path) -> None:
    model = _read(_model(numpy_helper.from_array(np.zeros(9, np.uint8), "w")), "path", tmp_path)
    (tmp_path / "new").write_bytes((tmp_path / "model.onnx").read_bytes())
    os.replace(tmp_path / "new", tmp_path / "model.onnx")
    with pytest.raises(ModelFormatError, match="changed since"):
        model.graph.initializers["w"].array()


def test_tensor_bytes_are_not_read_with_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [numpy_helper.from_array(np.zeros(1 << 20, np.uint8), f"w{i}") for i in range(8)]
    (tmp_path / "m.onnx").write_bytes(_model(*weights).SerializeToString())
    read: list[int] = []
    original = FileSource.read

    def counted(self: FileSource, offset: int, size: int) -> bytes:
        read.append(size)
        return original(self, offset, size)

    monkeypatch.setattr(FileSource, "read", counted)
    model = read_model(tmp_path / "m.onnx")
    assert [t.nbytes for t in model.graph.initializers.values()] == [1 << 20] * 8
    assert sum(read) < 256 << 10


# --- the graph: every field against onnx ------------------------------------------------------------------------------


def _rich_model() -> onnx.ModelProto:
    """Subgraphs, functions, every attribute type, value types of every kind, metadata."""
    constant = numpy_helper.from_array(np.arange(6, dtype=np.int32).reshape(2, 3), "c")
    info = helper.make_tensor_value_info
    then = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["t"])], "then", [], [info("t", 1, None)], [constant], "doc"
    )
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["e"])], "else", [], [info("e", 1, ["N"])])
    attributes: dict[str, Any] = {
        "an_int": -(1 << 63),
        "zero": 0,
        "a_float": 1.5,
        "text": "tëxt",
        "raw": b"\xff\x00",
        "ints": [0, -1, 1 << 62, 300],
        "many_ints": list(range(-500, 500)),
        "floats": [0.5, float("inf"), -0.0],
        "strings": [b"a", b"", b"bc"],
        "tensor": constant,
        "tensors": [constant, constant],
        "graphs": [then, other],
        "type": helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, ["a", 2, None])),
        "types": [helper.make_tensor_type_proto(7, []), helper.make_tensor_type_proto(10, None)],
    }
    custom = helper.make_node("Custom", ["x", "", "y"], ["z", ""], "n1", domain="my.domain", **attributes)
    custom.attribute.append(helper.make_attribute("empty", [], attr_type=AttributeProto.INTS))
    branch = helper.make_node("If", ["cond"], ["r"], "n2", doc_string="d", then_branch=then, else_branch=other)
    nodes = [
        custom,
        branch,
        helper.make_node("Relu", ["r"], ["q"], domain="ai.onnx"),
        helper.make_node("F", ["q"], ["o"]),
    ]
    nodes[-1].domain, nodes[-1].overload = "local", "v2"
    sequence = helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, ["b"]))
    inputs = [
        info("x", 1, ["batch", 3, None, "?"]),
        info("y", 16, []),
        info("cond", 9, None),
        helper.make_value_info("s", sequence),
        helper.make_value_info("os", helper.make_optional_type_proto(sequence)),
        helper.make_value_info("m", helper.make_map_type_proto(7, helper.make_tensor_type_proto(1, None))),
        helper.make_sparse_tensor_value_info("sp", 1, [4, 5]),
        onnx.ValueInfoProto(name="untyped"),
    ]
    inputs[0].type.tensor_type.shape.dim.add().dim_value = -1
    graph = helper.make_graph(
        nodes, "main", inputs, [info("o", 1, None)], [constant], value_info=[info("q", 1, [1, "k"])]
    )
    relu = helper.make_node("Selu", ["a"], ["b"])
    alpha = relu.attribute.add()
    alpha.name, alpha.ref_attr_name, alpha.type = "alpha", "alpha", AttributeProto.FLOAT
    function = helper.make_function(
        "local",
        "F",
        ["a"],
        ["b"],
        [relu],
        [helper.make_opsetid("", 21)],
        ["alpha"],
        [helper.make_attribute("beta", 2)],
        overload="v2",
        value_info=[info("b", 1, ["n"])],
    )
    model = helper.make_model(graph, functions=[function], producer_name="me", producer_version="1.2", ir_version=10)
    del model.opset_import[:]
    model.opset_import.extend([helper.make_opsetid("", 21), helper.make_opsetid("my.domain", 3)])
    helper.set_model_props(model, {"author": "somebody", "empty": ""})
    return model


def _check_tensor(got: object, expected: TensorProto) -> None:
    assert isinstance(got, TensorRef)
    assert (got.name, got.dims, got.elem_type) == (expected.name, tuple(expected.dims), expected.data_type)
    _same(got.array(), numpy_helper.to_array(expected))


def _type_of(proto: onnx.TypeProto) -> tuple[str, int, tuple[int | str | None, ...] | None]:
    kind = proto.WhichOneof("value")
    if kind is None:
        return "unknown", 0, None
    inner = getattr(proto, kind)
    if kind in ("sequence_type", "optional_type"):
        name, elem_type, shape = _type_of(inner.elem_type)
        return f"{kind[:-5]}({name})", elem_type, shape
    if kind == "map_type":
        return "map", 0, None
    if not inner.HasField("shape"):
        return kind[:-5], inner.elem_type, None
    sizes = []
    for dim in inner.shape.dim:
        value = getattr(dim, dim.WhichOneof("value")) if dim.WhichOneof("value") else None
        sizes.append(None if value in ("?", -1) else value)
    return kind[:-5], inner.elem_type, tuple(sizes)


def _check_info(got: object, name: str, proto: onnx.TypeProto) -> None:
    assert isinstance(got, ValueInfo)
    assert (got.name, (got.kind, got.elem_type, got.shape)) == (name, _type_of(proto))


def _check_attribute(got: Attribute, expected: AttributeProto) -> None:
    assert (got.name, got.ref) == (expected.name, expected.ref_attr_name)
    assert got.kind == AttributeProto.AttributeType.Name(expected.type)
    if got.ref:
        assert got.value is None
        return
    value, ours = helper.get_attribute_value(expected), cast(Any, got.value)
    items = list(zip(ours, value, strict=True)) if got.kind.endswith("S") else [(ours, value)]
    for mine, theirs in items:
        if isinstance(theirs, TensorProto):
            _check_tensor(mine, theirs)
        elif isinstance(theirs, onnx.GraphProto):
            assert isinstance(mine, GraphProto)
            _check_graph(mine, theirs)
        elif isinstance(theirs, onnx.TypeProto):
            _check_info(mine, "", theirs)
        else:
            assert type(mine) is type(theirs)
            assert mine == theirs


def _check_nodes(got: tuple[NodeProto, ...], expected: list[onnx.NodeProto]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        domain = "" if theirs.domain == "ai.onnx" else theirs.domain
        assert (mine.name, mine.op_type, mine.domain) == (theirs.name, theirs.op_type, domain)
        assert (mine.inputs, mine.outputs, mine.overload) == (
            tuple(theirs.input),
            tuple(theirs.output),
            theirs.overload,
        )
        assert list(mine.attributes) == [attribute.name for attribute in theirs.attribute]
        for attribute in theirs.attribute:
            _check_attribute(mine.attributes[attribute.name], attribute)


def _check_graph(got: GraphProto, expected: onnx.GraphProto) -> None:
    assert got.name == expected.name
    _check_nodes(got.nodes, list(expected.node))
    assert list(got.initializers) == [tensor.name for tensor in expected.initializer]
    for tensor in expected.initializer:
        _check_tensor(got.initializers[tensor.name], tensor)
    assert list(got.value_infos) == [info.name for info in expected.value_info]
    pairs = [
        (got.inputs, expected.input),
        (got.outputs, expected.output),
        (got.value_infos.values(), expected.value_info),
    ]
    for mine, theirs in pairs:
        for a, b in zip(mine, theirs, strict=True):
            _check_info(a, b.name, b.type)


@pytest.mark.parametrize("form", FORMATS)
def test_every_field_of_a_rich_model(form: str, tmp_path: Path) -> None:
    expected = _rich_model()
    model = _read(expected, form, tmp_path)
    assert (model.ir_version, model.producer, model.producer_version) == (10, "me", "1.2")
    assert model.opsets == {"": 21, "my.domain": 3}
    assert model.metadata == {"author": "somebody", "empty": ""}
    _check_graph(model.graph, expected.graph)
    (function,) = model.functions.values()
    theirs = expected.functions[0]
    assert list(model.functions) == [("local", "F", "v2")]
    assert (function.inputs, function.outputs, function.attributes) == (("a",), ("b",), ("alpha",))
    assert function.opsets == {"": 21}
    _check_nodes(function.nodes, list(theirs.node))
    _check_attribute(function.attribute_defaults["beta"], theirs.attribute_proto[0])
    _check_info(function.value_infos["b"], "b", theirs.value_info[0].type)


def test_a_graph_larger_than_the_window() -> None:
    """Fields that lie across the edges of the blocks in which the file is read."""
    rng = random.Random(0)
    nodes = [
        helper.make_node("Op", [f"v{i}" * rng.randrange(1, 40)], [f"v{i + 1}"], f"n{i}", k=[rng.randrange(1 << 40)] * 9)
        for i in range(3000)
    ]
    weights = [numpy_helper.from_array(np.full(rng.randrange(9000), i % 251, np.uint8), f"w{i}") for i in range(300)]
    expected = _model(*weights, nodes=tuple(nodes))
    expected.graph.node[7].attribute[0].ints.extend(range(200_000))
    _check_graph(_read(expected).graph, expected.graph)


def test_absent_zero_values_of_proto3_writers_and_absent_attribute_types() -> None:
    node = helper.make_node("Op", [], ["y"])
    node.attribute.add(name="i", type=AttributeProto.INT)
    node.attribute.add(name="f", type=AttributeProto.FLOAT)
    node.attribute.add(name="s", type=AttributeProto.STRING)
    node.attribute.add(name="untyped", ints=[4, 5])
    attributes = _read(_model(nodes=(node,))).graph.nodes[0].attributes
    assert [a.value for a in attributes.values()] == [0, 0.0, b"", (4, 5)]
    assert attributes["untyped"].kind == "INTS"


def test_unknown_fields_are_stepped_over() -> None:
    model = _model(numpy_helper.from_array(np.ones(3, np.float32), "w"))
    extra = _varint(1000 << 3 | 2) + b"\x03abc" + _varint(1001 << 3) + b"\x05" + _varint(1002 << 3 | 5) + b"1234"
    assert list(_read(extra + model.SerializeToString() + extra).graph.initializers) == ["w"]


# --- hostile files ----------------------------------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out + bytes([value]))


def _field(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _wrap(tensor: bytes) -> bytes:
    """A model whose one initializer is these bytes."""
    return _field(7, _field(5, tensor))


def _point(tensor: TensorProto, location: str, offset: int | None, length: int | None) -> None:
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))


def _read_everything(data: bytes) -> bool:
    """Whether the model and all its weights can be read; anything but ModelFormatError goes through."""
    try:
        for tensor in read_model(data).graph.initializers.values():
            tensor.array()
    except ModelFormatError as error:
        if not str(error).startswith("<bytes>: "):
            raise AssertionError(f"does not name the file: {error}") from error
        return False
    return True


def test_truncation_at_every_byte_is_an_error_where_onnx_fails_too() -> None:
    data = _rich_model().SerializeToString()
    for cut in range(len(data)):
        if not _read_everything(data[:cut]):
            continue
        assert onnx.ModelProto.FromString(data[:cut]).HasField("graph")


def test_truncated_file_on_disk(tmp_path: Path) -> None:
    data = _model(numpy_helper.from_array(np.zeros(10_000, np.uint8), "w")).SerializeToString()
    (tmp_path / "m.onnx").write_bytes(data[:5000])
    with pytest.raises(ModelFormatError, match=r"m\.onnx: ModelProto\.graph at byte \d+: its \d+ bytes run past"):
        read_model(tmp_path / "m.onnx")


def test_random_mutations_parse_or_raise_model_format_error() -> None:
    rng = random.Random(20)
    tensors = [_typed(t, _values(t, (3,))) for t in NUMERIC]
    for i, tensor in enumerate(tensors):
        tensor.name = f"w{i}"
    rich = _rich_model()
    rich.graph.initializer.extend(tensors)
    seeds = [rich.SerializeToString(), _model(numpy_helper.from_array(np.ones(3, np.int16), "w")).SerializeToString()]
    parsed = 0
    for _ in range(3000):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randrange(1, 4)):
            position = rng.randrange(len(data))
            if rng.random() < 0.5:
                data[position] = rng.choice((0, 127, 128, 255, rng.randrange(256)))
            elif rng.random() < 0.5:
                del data[position : position + rng.randrange(1, 5)]
            else:
                data[position:position] = rng.randbytes(rng.randrange(1, 12))
        parsed += _read_everything(bytes(data))
    assert 0 < parsed < 3000


def test_random_bytes() -> None:
    rng = random.Random(5)
    for size in (1, 2, 10, 100, 10_000) * 20:
        assert not _read_everything(rng.randbytes(size))


def test_things_that_are_no_model_file(tmp_path: Path) -> None:
    (tmp_path / "empty.onnx").touch()
    (tmp_path / "lfs.onnx").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    os.mkfifo(tmp_path / "fifo.onnx")
    (tmp_path / "text.onnx").write_text("hello, this is text")
    cases = {
        tmp_path / "missing.onnx": "can't be opened: No such file",
        tmp_path: "is a folder",
        tmp_path / "empty.onnx": "is empty",
        tmp_path / "lfs.onnx": "git lfs pull",
        tmp_path / "fifo.onnx": "is a pipe; expected a file",
        tmp_path / "text.onnx": "is it an ONNX model",
        tmp_path / "nul\0.onnx": "is no path",
    }
    for path, message in cases.items():
        with pytest.raises(ModelFormatError, match=message):
            read_model(path)
    with pytest.raises(ModelFormatError, match="is empty"):
        read_model(b"")
    with pytest.raises(TypeError, match="a model is a path or bytes, got int"):
        read_model(3)  # type: ignore[arg-type]


def _edit(change: Callable[[TensorProto], object]) -> bytes:
    tensor = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(2, 3), "w")
    change(tensor)
    return bytes(_model(tensor).SerializeToString())


def _set(**fields: object) -> Callable[[TensorProto], object]:
    def change(tensor: TensorProto) -> None:
        for name, value in fields.items():
            tensor.ClearField(name)
            if isinstance(value, (list, tuple)):
                getattr(tensor, name).extend(value)
            else:
                setattr(tensor, name, value)

    return change


def _attribute(**fields: object) -> bytes:
    node = helper.make_node("Op", [], ["y"], "n")
    node.attribute.add(**fields)
    return bytes(_model(nodes=(node,)).SerializeToString())


BAD_MODELS = {
    "length beyond the file": (b"\x3a\xff\xff\xff\xff\x0f", "its 4294967295 bytes run past"),
    "length of 2**63": (b"\x3a" + _varint(1 << 63), "its 9223372036854775808 bytes run past"),
    "varint of 11 bytes": (b"\x08" + b"\x80" * 10 + b"\x01", "longer than 64 bits"),
    "varint of 65 bits": (b"\x08" + b"\x80" * 9 + b"\x02", "longer than 64 bits"),
    "varint cut off": (b"\x08\x80", "ends inside it"),
    "field number 0": (b"\x02\x01a", "0 is no field number"),
    "tag of 33 bits": (_varint(1 << 33) + b"\x01", "is no field number"),
    "a group": (b"\x0b\x0c", "wire type 3"),
    "known field of another wire type": (b"\x38\x01", "ModelProto.graph at byte 0: stored as varint"),
    "no graph": (b"\x08\x0a", "holds no graph"),
    "two graphs": (_field(7, b"") * 2, "a second graph"),
    "name that is not UTF-8": (_field(7, _field(2, b"\xff")), "is not UTF-8"),
    "long name": (_field(7, _field(2, b"a" * (wire.MAX_NAME_BYTES + 1))), "more than the limit of 65536"),
    "inner message longer than outer": (
        _field(7, b"\x0a\x05\x22\x01a"),
        "GraphProto.node at byte 2: its 5 bytes run past",
    ),
    "node without op": (_field(7, _field(1, _field(3, b"n"))), "node 'n' has none"),
    "initializer without a name": (_edit(_set(name="")), "initializer at byte .*: has no name"),
    "initializers of one name": (
        _model(*[numpy_helper.from_array(np.ones(1, np.float32), "w")] * 2).SerializeToString(),
        "'w' is defined twice",
    ),
    "negative dim": (_edit(_set(dims=[-2, -3])), r"tensor 'w': dims \[-2, -3\] has a negative size"),
    "overflowing dims": (_edit(_set(dims=[1 << 32, 1 << 32])), "more than the limit of"),
    "overflow hidden by a zero": (_edit(_set(dims=[0, 1 << 62], raw_data=b"")), "more than the limit of"),
    "too many dims": (_edit(_set(dims=[1] * 33, raw_data=b"1234")), "more than the limit of 32 dims"),
    "very many dims": (_edit(_set(dims=[1] * 100_000)), "more than the limit of 320"),
    "too little raw data": (_edit(_set(raw_data=b"1234567")), "FLOAT need 24 bytes, got 7"),
    "too much raw data": (_edit(_set(raw_data=b"1" * 25)), "FLOAT need 24 bytes, got 25"),
    "unknown type": (_edit(_set(data_type=99)), "element type 99 is unknown"),
    "no type": (_edit(_set(data_type=0)), "element type 0 is unknown"),
    "raw strings": (_edit(_set(data_type=8)), "strings must be in string_data"),
    "data twice": (_edit(_set(float_data=[1.0] * 6)), "has data in more than one place"),
    "field of another type": (_edit(_set(raw_data=b"", int64_data=[1] * 6)), "int64_data can't hold FLOAT"),
    "no data": (_edit(lambda t: t.ClearField("raw_data")), "need 6 values in float_data, got 0"),
    "too few values": (_edit(_set(raw_data=b"", float_data=[1.0])), "need 6 values in float_data, got 1"),
    "too few integers": (
        _edit(_set(raw_data=b"", data_type=7, int64_data=[-1])),
        "need 6 values in int64_data, got 1",
    ),
    "huge dims on few integers": (
        _edit(_set(raw_data=b"", dims=[1 << 40], data_type=7, int64_data=[1])),
        "need 1099511627776 values in int64_data, got at most 1",
    ),
    "too many integers": (_edit(_set(raw_data=b"", data_type=7, int64_data=[1] * 7)), "more than 6 values"),
    "value too wide": (_edit(_set(raw_data=b"", data_type=3, int32_data=[256] * 6)), "does not fit in 8 bits"),
    "value too low": (_edit(_set(raw_data=b"", data_type=5, int32_data=[-32769] * 6)), "does not fit in 16 bits"),
    "bool that is 2": (_edit(_set(data_type=9, raw_data=b"\2" * 6)), "neither 0 nor 1"),
    "number of strings": (_edit(_set(data_type=8, raw_data=b"", string_data=[b"a"])), "need 6 values in string_data"),
    "segment": (_wrap(_field(3, b"")), "segments are not part of any ONNX release"),
    "external data of a model in memory": (_edit(lambda t: _point(t, "w.bin", 0, 24)), "given as bytes"),
    "external length": (_edit(lambda t: _point(t, "w.bin", 0, 23)), "need 24 bytes, got 23"),
    "external offset": (_edit(lambda t: _point(t, "w.bin", -1, 24)), "offset '-1' of tensor 'w' is no byte count"),
    "external offset too long": (_edit(lambda t: _point(t, "w.bin", 10**19, 24)), "is no byte count"),
    "attribute with two values": (
        _attribute(name="a", type=2, i=1, ints=[1]),
        "is of type INT and has a value in 'ints'",
    ),
    "attribute without value": (_attribute(name="a", type=4), "type TENSOR has no value"),
    "attribute of unknown type": (_attribute(name="a", type=0), "no type that is known"),
    "attribute without name": (_attribute(type=2, i=1), "attribute of node 'n' at byte .*: has no name"),
    "opset twice": (_field(8, b"\x10\x01") + _field(8, b"\x10\x02") + _field(7, b""), "given versions 1 and 2"),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_malformed_models_are_refused_by_name(case: str) -> None:
    data, message = BAD_MODELS[case]
    with pytest.raises(ModelFormatError, match=message):
        [tensor.array() for tensor in read_model(data).graph.initializers.values()]


@pytest.mark.parametrize("flat", [True, False])
def test_sparse_initializers_are_made_dense(flat: bool) -> None:
    """Indices of the flat tensor, or along each axis; also as the value of a Constant."""
    dense = np.zeros((3, 4), np.float32)
    dense[[0, 2, 2], [1, 0, 3]] = [5, -6, 7]
    places = np.flatnonzero(dense) if flat else np.argwhere(dense)
    model = _model()
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(dense[dense != 0], "w"), numpy_helper.from_array(places), dense.shape
    )
    model.graph.sparse_initializer.append(sparse)
    model.graph.node.append(helper.make_node("Constant", [], ["c"], sparse_value=sparse))
    graph = _read(model).graph
    assert np.array_equal(graph.initializers["w"].array(), dense)
    (constant,) = (node for node in graph.nodes if node.op_type == "Constant")
    assert np.array_equal(constant.attributes["sparse_value"].value.array(), dense)


@pytest.mark.parametrize(
    "dims, places, message",
    [
        ((3, 4), [12], "an index lies outside dims"),
        ((3, 4), [-1], "an index lies outside dims"),
        ((3, 4), [[0, 4]], "an index lies outside dims"),
        ((3, 4), [[0, 1, 2]], "expected indices"),
        ((3, 4), [0, 1], "expected indices"),
        ((1 << 20, 1 << 10), [0], "the limit is 64 MiB and 64 times"),
    ],
)
def test_bad_sparse_initializers_are_refused_by_name(dims: tuple[int, ...], places: Any, message: str) -> None:
    model = _model()
    values, at = numpy_helper.from_array(np.ones(1, np.float32), "sparse_w"), np.array(places, np.int64)
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, numpy_helper.from_array(at), dims))
    with pytest.raises(ModelFormatError, match="'sparse_w'.*" + message):
        _read(model).graph.initializers["sparse_w"].array()


def _nested(depth: int) -> bytes:
    graph = b""
    for _ in range(depth):
        attribute = _field(1, b"g") + _field(6, graph) + b"\xa0\x01\x05"
        graph = _field(1, _field(4, b"If") + _field(5, attribute))
    return _field(7, graph)


def test_nesting_depth_is_bounded() -> None:
    assert len(read_model(_nested(wire.MAX_DEPTH)).graph.nodes) == 1
    for depth in (wire.MAX_DEPTH + 1, 2000):
        with pytest.raises(ModelFormatError, match="nested deeper than 32"):
            read_model(_nested(depth))
    kind = b""
    for _ in range(2000):
        kind = _field(4, _field(1, kind))
    with pytest.raises(ModelFormatError, match="types are nested deeper than 32"):
        read_model(_field(7, _field(11, _field(2, kind))))


def test_number_of_fields_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FIELDS", 1000)
    with pytest.raises(ModelFormatError, match="more than the limit of 1000 fields"):
        read_model(_field(7, _field(2, b"") * 1001))
    monkeypatch.setattr(wire, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(ModelFormatError, match="more than the limit of 1000 bytes"):
        read_model(_field(7, _field(2, b"a" * 501) * 2))


@pytest.mark.parametrize(
    "location",
    [
        "../secret",
        "a/../../secret",
        "/etc/passwd",
        "C:\\secret",
        "c:secret",
        "..\\secret",
        "\\\\host\\share",
        "",
        "a\0b",
    ],
)
def test_external_paths_out_of_the_folder_are_refused_at_once(location: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(24))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.onnx").write_bytes(_edit(lambda t: _point(t, location, 0, 24)))
    with pytest.raises(ModelFormatError, match=r"tensor 'w': external data location .* must be a path inside"):
        read_model(tmp_path / "model" / "model.onnx")


def test_external_links_and_files_that_do_not_fit(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "dir").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(bytes(24))
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to(tmp_path)
    (folder / "short").write_bytes(bytes(23))
    (folder / "long").write_bytes(bytes(25))
    (folder / "inside").symlink_to(folder / "long")
    for location, length, message in [
        ("link", 24, "outside the model's folder"),
        ("up/secret", 24, "outside the model's folder"),
        ("missing", 24, "is missing in"),
        ("dir", 24, "is a folder"),
        ("short", 24, "needs 24 bytes at 0 of external data 'short', which is 23 bytes long"),
        ("long", None, "which is 25 bytes long"),
    ]:
        (folder / "model.onnx").write_bytes(_edit(partial(_point, location=location, offset=0, length=length)))
        tensor = read_model(folder / "model.onnx").graph.initializers["w"]
        with pytest.raises(ModelFormatError, match=message):
            tensor.array()
    (folder / "model.onnx").write_bytes(_edit(lambda t: _point(t, "inside", 1, 24)))
    _same(read_model(folder / "model.onnx").graph.initializers["w"].array(), np.zeros((2, 3), np.float32))


def test_a_cache_of_links_into_one_store_is_read(tmp_path: Path) -> None:
    """Download caches keep model and data as links into one folder: data beside the model's own target is inside."""
    store, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    store.mkdir()
    snapshot.mkdir()
    (store / "1").write_bytes(_edit(lambda t: _point(t, "w.bin", 0, 24)))
    (store / "2").write_bytes(np.arange(6, dtype=np.float32).tobytes())
    (snapshot / "model.onnx").symlink_to(store / "1")
    (snapshot / "w.bin").symlink_to(store / "2")
    got = read_model(snapshot / "model.onnx").graph.initializers["w"].array()
    _same(got, np.arange(6, dtype=np.float32).reshape(2, 3))


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_varints_decode_in_bulk_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_CHUNK", 64)
    rng = random.Random(1)
    values = [rng.getrandbits(rng.randrange(1, 65)) for _ in range(500)]
    data = np.frombuffer(b"".join(map(_varint, values)), np.uint8)
    out = np.zeros(500, np.uint64)
    assert wire.decode_varints(data, out) == 500
    assert out.tolist() == values
    assert wire.decode_varints(data, out[:499]) is None
    assert wire.decode_varints(np.frombuffer(b"\x80" * 70, np.uint8), out) is None
    assert wire.decode_varints(np.frombuffer(b"\x80" * 9 + b"\x02", np.uint8), out) is None


def test_last_value_of_a_repeated_scalar_wins() -> None:
    class Bytes:
        name, size = "b", 6

        def read(self, offset: int, size: int) -> bytes:
            return b"\x08\x01\x08\xac\x02\x08"[offset : offset + size]

        def view(self) -> np.ndarray:
            raise AssertionError

    message = Message("M", n=("varint*", 1))
    assert Reader(Bytes()).scan(0, 5, message) == [(1, 0, 0, 5, 300)]
    with pytest.raises(ModelFormatError, match="b: a field of M at byte"):
        Reader(Bytes()).scan(0, 6, message)


def test_dtypes_are_those_of_ml_dtypes() -> None:
    ref = _read(_model(numpy_helper.from_array(_values(TensorProto.BFLOAT16, (2,)), "w"))).graph.initializers["w"]
    assert ref.dtype == ref.array().dtype == np.dtype(ml_dtypes.bfloat16)
