"""Code that comes with rlx: it is found by its text, is used where it is, and gives the same bits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import prebuild
import pytest
from targets import cpu

import rlx
from rlx.backends.codegen.arguments import text_key
from rlx.backends.cpu.jit import compile as jit
from rlx.backends.cpu.jit import cpuid, prebuilt
from rlx.backends.cpu.jit.load import loads_itself, runtime_objects

pytestmark = pytest.mark.skipif(not loads_itself(), reason="only our own loader takes such code")


def layers(graph: rlx.Graph, width: int = 80, epsilon: float = 1e-5, slope: float = 0.1) -> None:
    """A convolution, a product, a norm and a softmax."""
    x = rlx.relu(rlx.conv(graph.input("x", (1, 3, 12, 12)), graph.param("w", data=numbers(8, 3, 3, 3))))
    y = rlx.matmul(rlx.reshape(x, (8, 100)), graph.param("v", data=numbers(100, width)))
    y = rlx.layer_norm(rlx.leaky_relu(y, alpha=slope), graph.param("s", data=numbers(width)), epsilon=epsilon)
    graph.output(rlx.softmax(y))


def numbers(*shape: int) -> Any:
    """Random ones, the same for a shape."""
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The code of `layers` for the plainest level that this machine has, in a folder of its own."""
    level = prebuilt.levels_of(jit.host().features, cpuid.vendor())[-1]
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(prebuild, "graphs", lambda: [made()])
    monkeypatch.setattr(cpu(), "_target", level.target)
    monkeypatch.setattr(jit, "loaded", {})  # nothing is known from earlier tests
    prebuilt.archives_of.cache_clear()
    items = prebuild.texts(level)
    objects = dict(prebuild.compiled((level, key, item)) for key, item in items.items())
    level.path.write_bytes(prebuilt.archive_bytes(objects, "a test"))
    yield level.path
    prebuilt.archives_of.cache_clear()


def made() -> rlx.Graph:
    """The graph of `layers`."""
    graph = rlx.Graph("layers")
    layers(graph)
    return graph


def compiled_functions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what LLVM compiles from here on."""
    names: list[str] = []
    together = jit.compile_together

    def noted(kernels: Any, **more: Any) -> bytes:
        names.extend(item[0] for item, _ in kernels)
        return together(kernels, **more)

    monkeypatch.setattr(jit, "compile_together", noted)
    return names


def result(folder: Path) -> Any:
    """What the graph gives, compiled with an empty cache."""
    (y,) = rlx.compile(made(), device="cpu", cache_dir=folder).run([np.ones((1, 3, 12, 12), np.float32)])
    return y


def test_what_came_with_rlx_is_not_compiled(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM makes nothing, and nothing of it is put into the cache."""
    names = compiled_functions(monkeypatch)
    result(tmp_path / "cache")
    assert not names
    assert not list((tmp_path / "cache").rglob("*.o"))


def test_other_sizes_and_numbers_find_the_same_code(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths, what a norm adds, slopes: words, so code of one net is that of others."""
    names = compiled_functions(monkeypatch)
    graph = rlx.Graph("other")
    layers(graph, 192, 1e-12, 0.03)
    rlx.compile(graph, device="cpu", cache=False).run([np.ones((1, 3, 12, 12), np.float32)])
    assert not names


def test_results_have_the_same_bits(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code made for all processors of a level, and code made for this one."""
    found = result(tmp_path / "a")
    os.remove(archive)
    prebuilt.archives_of.cache_clear()
    monkeypatch.setattr(jit, "loaded", {})
    names = compiled_functions(monkeypatch)
    own = result(tmp_path / "b")
    assert names
    np.testing.assert_array_equal(found.view(np.int32), own.view(np.int32))


@pytest.mark.parametrize("damage", ["cut", "name", "head", "nothing", "end", "objects"])
def test_a_damaged_archive_is_not_used(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """All is compiled then."""
    data = archive.read_bytes()
    start = prebuilt.Archive(archive).start
    changed = {
        "cut": data[:20],
        "name": b"x" + data[1:],
        "head": data[:14] + b"}" + data[15:],
        "nothing": b"",
        "end": data[:-1],
        "objects": data[:start] + bytes(byte ^ 255 for byte in data[start:]),
    }
    archive.write_bytes(changed[damage])
    names = compiled_functions(monkeypatch)
    result(tmp_path / "cache")
    assert names


def test_another_file_in_the_place_of_an_archive_is_not_read(archive: Path) -> None:
    """A process that has read the head of one, while the next version of rlx is installed."""
    (known,) = prebuilt.archives_of(jit.host().features, cpuid.vendor())
    key = next(iter(known.places))
    assert known.find(key)
    whole = archive.read_bytes()
    os.remove(archive)
    assert known.find(key) is None
    archive.write_bytes(whole)
    assert known.find(key) is None
    assert prebuilt.Archive(archive).find(key)


def test_levels_ask_for_no_more_than_the_machine_has() -> None:
    """Code of a level may use all of its features."""
    here = {name[1:] for name in jit.host().features.split(",") if name.startswith("+")}
    for level in prebuilt.levels_of(jit.host().features, cpuid.vendor()):
        assert level.features <= here
    assert prebuilt.levels_of("+sse2,-avx2", "") == []
    wide = ",".join(f"+{name}" for name in prebuilt.LEVELS[1].features)
    assert [level.name for level in prebuilt.levels_of(wide, "GenuineIntel")] == ["avx512-vnni", "avx512", "avx2"]
    assert [level.name for level in prebuilt.levels_of(wide, "AuthenticAMD")] == ["avx512-vnni", "avx2"]


def test_code_of_runs_comes_with_rlx_too(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The object of runtime code is looked for by its text."""
    text = "define i64 @answer() {\n  ret i64 42\n}\n"
    obj = jit.compile_object(text, optimize=True)
    archive.write_bytes(prebuilt.archive_bytes({text_key("answer", text, True): obj}, "a test"))
    prebuilt.archives_of.cache_clear()
    monkeypatch.setattr(jit, "compile_object", lambda *a, **k: pytest.fail("it is compiled"))
    try:
        assert jit.runtime_object("answer", lambda: text)
    finally:
        runtime_objects.pop("answer", None)
