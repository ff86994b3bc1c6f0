"""The safetensors header reader: arrays are those written, and each malformed header is one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx.errors import ModelFormatError
from rlx.importers.safetensors import read_safetensors, read_safetensors_index


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    data = np.arange(6, dtype="<f4").tobytes() + np.arange(3, dtype="<i8").tobytes()
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry("I64", [3], 24, 48),
        "a": entry("F32", [2, 3], 0, 24),
        "none": entry("F16", [0, 4], 48, 48),
    }
    found = read_safetensors(write(tmp_path / "m.safetensors", header, data))
    assert found.metadata == {"format": "pt"}
    assert {n: (t.shape, t.dtype.name, t.nbytes) for n, t in found.tensors.items()} == {
        "b": ((3,), "i64", 24),
        "a": ((2, 3), "f32", 24),
        "none": ((0, 4), "f16", 0),
    }
    assert found.array("a").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found.array("b").tolist() == [0, 1, 2]
    assert not found.array("a").flags.writeable
    with pytest.raises(ModelFormatError, match="no tensor 'c'"):
        found.array("c")


A = entry("F32", [1], 0, 4)
MALFORMED: dict[str, tuple[Any, bytes, str]] = {
    "no JSON": (b"{", b"", "no JSON"),
    "deep": (b"[" * 100_000, b"", "no JSON"),
    "no object": (b"[]", b"", "expected a JSON object"),
    "name twice": (b'{"a": 1, "a": 2}', b"", "given twice"),
    "no entry": ({"a": 1}, b"", "expected dtype"),
    "a list as dtype": ({"a": {**A, "dtype": ["F32"]}}, b"\0" * 4, "unknown dtype"),
    "dtype": ({"a": {**A, "dtype": "F7"}}, b"\0" * 4, "unknown dtype 'F7'"),
    "negative": ({"a": {**A, "shape": [-1]}}, b"\0" * 4, "sizes >= 0"),
    "bool size": ({"a": {**A, "shape": [True]}}, b"\0" * 4, "sizes >= 0"),
    "rank": ({"a": {**A, "shape": [1] * 33}}, b"\0" * 4, "at most 32"),
    "descending": ({"a": {**A, "data_offsets": [4, 0]}}, b"\0" * 4, "ascending"),
    "span": ({"a": {**A, "data_offsets": [0, 8]}}, b"\0" * 8, "needs 4 bytes"),
    "huge": ({"a": entry("F32", [1 << 40, 1 << 40], 0, 4)}, b"\0" * 4, "more than the limit"),
    "overlap": ({"a": A, "b": entry("U8", [2], 2, 4)}, b"\0" * 4, "overlaps"),
    "hole": ({"a": entry("F32", [1], 4, 8)}, b"\0" * 8, "to no tensor"),
    "rest": ({"a": A}, b"\0" * 5, "the file at"),
    "truncated": ({"a": A}, b"\0" * 3, "the file at"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", "mapping of texts"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(tmp_path: Path, case: str) -> None:
    header, data, message = MALFORMED[case]
    with pytest.raises(ModelFormatError, match=message):
        read_safetensors(write(tmp_path / "m.safetensors", header, data))


def test_header_length_is_bounded_by_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="a header of 18446744073709551615 bytes"):
        read_safetensors(write(tmp_path / "m.safetensors", {}, length=2**64 - 1))
    (tmp_path / "m.safetensors").write_bytes(b"abc")
    with pytest.raises(ModelFormatError, match="truncated"):
        read_safetensors(tmp_path / "m.safetensors")


def test_index_names_the_files(tmp_path: Path) -> None:
    write(tmp_path / "1.safetensors", {"a": A}, b"\0" * 4)
    write(tmp_path / "2.safetensors", {"b": A}, b"\0" * 4)
    index = tmp_path / "model.safetensors.index.json"

    def of(places: dict[str, str]) -> list[list[str]]:
        index.write_text(json.dumps({"weight_map": places}))
        return [list(f.tensors) for f in read_safetensors_index(index)]

    assert of({"a": "1.safetensors", "b": "2.safetensors"}) == [["a"], ["b"]]
    with pytest.raises(ModelFormatError, match=r"'c' is not in 1\.safetensors"):
        of({"c": "1.safetensors"})
    with pytest.raises(ModelFormatError, match="must be a path inside"):
        of({"a": "../1.safetensors"})
