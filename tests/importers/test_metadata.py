"""What model files say of themselves: of each format, whole and damaged, and of what is no model file."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import rlx
from rlx.errors import ModelFormatError, OptionError, RlxError

TEXTS = {"character": "a\nb\nü", "names": "{0: 'cat'}", "": "empty"}


def proto() -> Any:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    model = helper.make_model(helper.make_graph([helper.make_node("Tanh", ["x"], ["y"])], "g", [x], [y]))
    for key, value in TEXTS.items():
        model.metadata_props.add(key=key, value=value)
    return model


def test_onnx(tmp_path: Path) -> None:
    """By its path under any name, as bytes, open, and as a ModelProto; a file may have none."""
    data = proto().SerializeToString()
    for name in ("model.onnx", "model.bin"):
        (tmp_path / name).write_bytes(data)
        assert rlx.metadata(tmp_path / name) == TEXTS
        assert rlx.metadata(str(tmp_path / name)) == TEXTS
    assert all(rlx.metadata(form) == TEXTS for form in (data, bytearray(data), io.BytesIO(data), proto()))
    assert rlx.metadata(rlx.demo.path("digits")) == {
        e.key: e.value for e in onnx.load(rlx.demo.path("digits")).metadata_props
    }


def test_safetensors(tmp_path: Path) -> None:
    for notes in ({}, {"__metadata__": {"format": "pt"}}):
        header = json.dumps({**notes, "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        path = tmp_path / "m.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
        assert rlx.metadata(path) == notes.get("__metadata__", {})


def test_gguf(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("a name")
    writer.add_uint32("llama.context_length", 64)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "ü"])
    writer.add_array("scores", [0.5, -1.0])
    writer.add_tensor("w", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = rlx.metadata(path)
    assert found["general.name"] == "a name"
    assert (found["llama.context_length"], found["tokenizer.ggml.add_bos_token"]) == (64, True)
    assert (found["tokenizer.ggml.tokens"], found["scores"]) == (["<s>", "ü"], [0.5, -1.0])
    assert json.dumps(found)
    data = path.read_bytes()
    for length in (4, 20, 60):
        path.write_bytes(data[:length])
        with pytest.raises(ModelFormatError):
            rlx.metadata(path)


def test_what_has_none(tmp_path: Path) -> None:
    model = rlx.load(rlx.demo.path("digits"), dims={"batch": 1}, device="cpu")
    model.save(tmp_path / "m.rlxart")
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "broken.onnx").write_bytes(proto().SerializeToString()[:40])
    wrong: dict[Any, str] = {
        tmp_path / "m.rlxart": "the model file that it was made from",
        tmp_path / "text.txt": "no model that is known",
        tmp_path / "broken.onnx": "broken.onnx",
        tmp_path / "missing.onnx": "can't be read",
        tmp_path: "can't be read",
        "https://example.com/m.onnx": "download it first",
    }
    for source, word in wrong.items():
        with pytest.raises(ModelFormatError, match=word):
            rlx.metadata(source)
    for given in (3, None, len, rlx.Graph("g")):
        with pytest.raises(OptionError, match="metadata takes"):
            rlx.metadata(given)  # type: ignore[arg-type]
    with pytest.raises(RlxError):
        rlx.metadata(b"")
