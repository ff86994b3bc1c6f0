"""The GGUF header reader: what it reads is what was written, and no malformed file gets further than an error."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.errors import ModelFormatError
from rlx.importers.gguf import GGML_TYPES, GgufArray, read_gguf, read_gguf_parts

U32, STRING, ARRAY = 4, 8, 9


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: str, sizes: Sequence[int], kind: int, offset: int) -> bytes:
    """A tensor info; `sizes` as in the file, innermost first."""
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def header(
    pairs: Sequence[bytes] = (), infos: Sequence[bytes] = (), *, version: int = 3, counts: tuple[int, int] | None = None
) -> bytes:
    tensors, metadata = counts or (len(infos), len(pairs))
    return b"GGUF" + struct.pack("<IQQ", version, tensors, metadata) + b"".join([*pairs, *infos])


def write(path: Path, head: bytes, data: bytes = b"", alignment: int = 32) -> Path:
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + data)
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    strings = struct.pack("<IQ", STRING, 3) + text("a") + text("") + text(b"\xff\xfe")
    pairs = [
        pair("general.architecture", STRING, text("llama")),
        pair("n", U32, struct.pack("<I", 7)),
        pair("f", 6, struct.pack("<f", 0.5)),
        pair("flag", 7, b"\1"),
        pair("tokens", ARRAY, strings),
        pair("numbers", ARRAY, struct.pack("<IQ3i", 5, 3, -1, 0, 2)),
    ]
    infos = [info("a", (3, 2), 0, 0), info("q", (64, 2), 2, 32)]
    data = np.arange(6, dtype="<f4").tobytes() + b"\0" * 8 + bytes(range(72))
    found = read_gguf(write(tmp_path / "m.gguf", header(pairs, infos), data))
    assert (found.version, found.alignment) == (3, 32)
    assert [found.metadata[k] for k in ("general.architecture", "n", "f", "flag")] == ["llama", 7, 0.5, True]
    assert isinstance(found.metadata["tokens"], GgufArray)
    assert found.metadata["tokens"].values() == ["a", "", "\udcff\udcfe"]
    assert found.metadata["numbers"].values() == [-1, 0, 2]
    a, q = found.tensors.values()
    assert (a.shape, a.type.name, a.nbytes) == ((2, 3), "f32", 24)
    assert (q.shape, q.type.name, q.nbytes) == ((2, 64), "q4_0", 72)
    assert found.raw("a").view("<f4").tolist() == [0, 1, 2, 3, 4, 5]
    assert found.raw("q").tolist() == list(range(72))
    with pytest.raises(ModelFormatError, match="no tensor 'b'"):
        found.raw("b")


def test_long_string_arrays_cross_the_read_window(tmp_path: Path) -> None:
    words = [f"token {i:06} " * (1 + i % 5) for i in range(40_000)]
    array = struct.pack("<IQ", STRING, len(words)) + b"".join(map(text, words))
    pairs = [pair("tokens", ARRAY, array), pair("after", U32, struct.pack("<I", 9))]
    found = read_gguf(write(tmp_path / "m.gguf", header(pairs)))
    assert found.metadata["after"] == 9
    assert found.metadata["tokens"].values() == words


def test_block_formats_have_the_sizes_of_ggml() -> None:
    """Bytes a weight of well known formats: 4.5, 8.5, 4.5 (q4_k), 6.5625 (q6_k) and 4.25 bits (mxfp4)."""
    bits = {t.name: 8 * t.block_bytes / t.block for t in GGML_TYPES.values()}
    assert (bits["q4_0"], bits["q8_0"], bits["q4_k"], bits["q6_k"], bits["mxfp4"]) == (4.5, 8.5, 4.5, 6.5625, 4.25)
    assert (bits["f16"], bits["bf16"], bits["f64"]) == (16, 16, 64)


def nested(depth: int) -> bytes:
    return struct.pack("<IQ", U32, 0) if depth == 0 else struct.pack("<IQ", ARRAY, 1) + nested(depth - 1)


MALFORMED: dict[str, tuple[Callable[[], bytes], str]] = {
    "no magic": (lambda: b"NOPE" + header()[4:], "no GGUF file"),
    "version 1": (lambda: header(version=1), "version 1: expected 2 or 3"),
    "big-endian": (lambda: header(version=3 << 24), "big-endian"),
    "many tensors": (lambda: header(counts=(1 << 40, 0)), "more than the limit"),
    "many pairs": (lambda: header(counts=(0, 1 << 63)), "more than the limit"),
    "missing pairs": (lambda: header([pair("k", U32, b"\0" * 4)], counts=(0, 99)), "given twice|truncated"),
    "long key": (lambda: header([struct.pack("<Q", 1 << 50)]), "more than the limit"),
    "key twice": (lambda: header([pair("n", U32, b"\0" * 4)] * 2), "given twice"),
    "unknown value type": (lambda: header([pair("n", 99, b"")]), "unknown value type 99"),
    "long array": (lambda: header([pair("n", ARRAY, struct.pack("<IQ", U32, 1 << 60))]), "more than the limit"),
    "array past the end": (lambda: header([pair("n", ARRAY, struct.pack("<IQ", U32, 1 << 20))]), "truncated"),
    "strings past the end": (lambda: header([pair("n", ARRAY, struct.pack("<IQ", STRING, 1 << 20))]), "can't be in"),
    "long string in array": (
        lambda: header([pair("n", ARRAY, struct.pack("<IQQ", STRING, 1, 1 << 62) + b"\0" * 64)]),
        "more than the limit",
    ),
    "deep array": (lambda: header([pair("n", ARRAY, nested(3))]), "nested deeper"),
    "alignment": (lambda: header([pair("general.alignment", U32, struct.pack("<I", 24))]), "no power of two"),
    "rank": (lambda: header(infos=[info("a", (1,) * 9, 0, 0)]), "rank 9"),
    "tensor type": (lambda: header(infos=[info("a", (4,), 5, 0)]), "type 5 is unknown"),
    "half a block": (lambda: header(infos=[info("a", (33,), 8, 0)]), "whole blocks of 32"),
    "huge": (lambda: header(infos=[info("a", (1 << 40, 1 << 40), 0, 0)]), "more than the limit"),
    "huge and empty": (lambda: header(infos=[info("a", (0, 1 << 62), 0, 0)]), "more than the limit"),
    "past the end": (lambda: header(infos=[info("a", (4,), 0, 64)]), "pass the end"),
    "misaligned": (lambda: header(infos=[info("a", (1,), 0, 4)]), "multiple of the alignment"),
    "name twice": (lambda: header(infos=[info("a", (1,), 0, 0), info("a", (1,), 0, 32)]), "defined twice"),
    "overlap": (lambda: header(infos=[info("a", (16,), 0, 0), info("b", (1,), 0, 32)]), "overlaps tensor 'a'"),
    "name no UTF-8": (lambda: header(infos=[info(b"\xff".decode("latin1"), (1,), 0, 0)[:8] + b"\xff" * 40]), "UTF-8"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(tmp_path: Path, case: str) -> None:
    make, message = MALFORMED[case]
    path = write(tmp_path / "m.gguf", make(), b"\0" * 64)
    with pytest.raises(ModelFormatError, match=message):
        read_gguf(path)


def test_missing_and_short_files(tmp_path: Path) -> None:
    (tmp_path / "short.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFormatError, match="no GGUF file"):
        read_gguf(tmp_path / "short.gguf")
    with pytest.raises(ModelFormatError, match="can't be opened"):
        read_gguf(tmp_path / "none.gguf")


GOOD = header([pair("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("ab") + text("c"))], [info("a", (8,), 0, 0)])


@settings(deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.booleans())
def test_any_changed_byte_or_cut_gives_a_header_or_the_one_error(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, cut: bool
) -> None:
    data = GOOD[:at] if cut else GOOD[:at] + bytes([byte]) + GOOD[at + 1 :]
    path = write(tmp_path_factory.getbasetemp() / "fuzz.gguf", data, b"\0" * 32)
    with suppress(ModelFormatError):
        read_gguf(path)


def test_parts_are_read_together(tmp_path: Path) -> None:
    def part(number: int, name: str) -> Path:
        pairs: list[Any] = [pair("split.count", U32, struct.pack("<I", 2))]
        path = tmp_path / f"m-{number:05}-of-00002.gguf"
        return write(path, header(pairs, [info(name, (4,), 0, 0)]), b"\0" * 32)

    first = part(1, "a")
    with pytest.raises(ModelFormatError, match="can't be opened"):
        read_gguf_parts(first)
    second = part(2, "b")
    assert [list(p.tensors) for p in read_gguf_parts(first)] == [["a"], ["b"]]
    with pytest.raises(ModelFormatError, match="expected the first"):
        read_gguf_parts(second)
    part(2, "a")
    with pytest.raises(ModelFormatError, match="of one name"):
        read_gguf_parts(first)
