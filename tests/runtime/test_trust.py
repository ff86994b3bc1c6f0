"""Whose files are trusted: where machine code is loaded from, which files may be named, and whose the cache is."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import struct
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import rlx
from rlx import disk
from rlx.backends.codegen.object_cache import ObjectCache
from rlx.backends.cpu.jit import load as loader
from rlx.backends.cpu.runtime.schema import SCHEMA
from rlx.cli.inputs import read_array
from rlx.cli.main import cli
from rlx.disk import open_regular, read_kept, write_kept
from rlx.errors import ModelFormatError, OptionError
from rlx.runtime import container
from rlx.runtime.cache import finish_writing
from rlx.runtime.weight_files import read_weights
from rlx.table_writer import write_tables
from rlx.tables import Schema, read_tables

ROOT = Path(__file__).parents[2]
X = np.ones((2, 4), np.float32)
posix = pytest.mark.skipif(os.name != "posix", reason="owners, links and pipes")


def graph() -> rlx.Graph:
    g = rlx.Graph("small")
    g.output(rlx.tanh(g.input("x", (2, 4)) @ g.param("w", data=np.eye(4, dtype=np.float32))), "y")
    return g


@pytest.fixture(scope="module")
def model() -> rlx.CompiledGraph:
    return rlx.compile(graph(), device="cpu")


# ---- where code is loaded from


@pytest.fixture
def no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading stored machine code fails the test."""

    def refuse(*_: object) -> None:
        raise AssertionError("machine code of the file was loaded")

    monkeypatch.setattr(loader, "load_stored", refuse)


@pytest.mark.parametrize("name", ["x.onnx", "x.rlx", "x.gguf", "x", "x.rlxart.onnx", "x.rlxar"])
@pytest.mark.parametrize("portable", [False, True])
def test_an_artifact_needs_its_ending(
    name: str, portable: bool, model: rlx.CompiledGraph, tmp_path: Path, no_code: None
) -> None:
    """Whatever a file is called that is no artifact by its name: its code isn't run, and the error says what to do."""
    path = tmp_path / name
    model.save(path, portable=portable)
    what = (
        r"portable artifact.*\.rlxart.*load_artifact.*portable_only"
        if portable
        else r"machine code.*\.rlxart.*code=True"
    )
    for load in (rlx.load, rlx.Session(device="cpu").load, lambda p: rlx.Buckets(p, {"n": [1]})):
        with pytest.raises(ModelFormatError, match=what):
            load(path)


@pytest.mark.parametrize("name", ["x.rlxart", "X.RLXART", "x.onnx", "x"])
def test_who_says_so_loads_it(name: str, model: rlx.CompiledGraph, tmp_path: Path) -> None:
    """By the ending in any case, by load_artifact, or by allow_code."""
    path = tmp_path / name
    model.save(path)
    want = model.run([X])[0].tobytes()
    made = [rlx.load_artifact(path), rlx.load(path, allow_code=True), rlx.load_artifact(path, portable_only=True)]
    made += [rlx.load(path)] if name.lower().endswith(".rlxart") else []
    for each in made:
        assert each.run([X])[0].tobytes() == want


def test_portable_only_leaves_code_alone(model: rlx.CompiledGraph, tmp_path: Path, no_code: None) -> None:
    """Also of an artifact for this very machine; one whose weights are only packed can't be compiled."""
    path = tmp_path / "m.rlxart"
    model.save(path)
    assert rlx.load(path, portable_only=True, device="reference").run([X])[0].shape == (2, 4)
    g = rlx.Graph("open")
    g.output(g.input("x", (2, 4)) @ g.param("w", (4, 40)), "y")
    packed = rlx.compile(g, device="cpu")
    packed.set_param("w", np.ones((4, 40), np.float32))
    packed.run([X])
    packed.save(path)
    with pytest.raises(ModelFormatError, match=r"portable_only leaves its code alone.*'w'"):
        rlx.load(path, portable_only=True)


def test_the_options_are_checked(model: rlx.CompiledGraph, tmp_path: Path) -> None:
    path = tmp_path / "m.rlxart"
    model.save(path)
    with pytest.raises(OptionError, match="contradict"):
        rlx.load(path, allow_code=True, portable_only=True)
    with pytest.raises(OptionError, match="allow_code='yes': expected True or False"):
        rlx.load(path, allow_code="yes")
    (tmp_path / "no.rlxart").write_bytes(b"hello, this is no artifact")
    with pytest.raises(ModelFormatError):
        rlx.load_artifact(tmp_path / "no.rlxart")
    assert isinstance(rlx.load(ROOT / "rlx/demo/digits.onnx", portable_only=True, cache=False), rlx.CompiledGraph)


def test_code_is_a_matter_of_files() -> None:
    for option in ("allow_code", "portable_only"):
        with pytest.raises(OptionError, match=r"for files"):
            rlx.load(rlx.Graph("empty"), **{option: True})


def test_an_older_format_is_refused_with_a_hint(model: rlx.CompiledGraph, tmp_path: Path) -> None:
    """Nothing of it is read: what follows the version here is nonsense."""
    path = tmp_path / "m.rlxart"
    path.write_bytes(container.MAGIC + struct.pack("<I", 3) + b"\xff" * 5000)
    with pytest.raises(
        ModelFormatError, match=f"format 3, this rlx reads format {container.FORMAT}: save the model again"
    ):
        rlx.load(path)


def test_the_command_line_is_the_same(
    model: rlx.CompiledGraph, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An artifact under another name: one line and exit status 1, and the two flags."""
    path = tmp_path / "m.onnx"
    model.save(path)

    def status(*args: str) -> int:
        with pytest.raises(SystemExit) as exited:
            cli([*args, str(path)])
        return int(exited.value.code or 0)

    for command in ("run", "bench", "verify", "explain", "profile"):
        assert status(command) == 1
        assert "allow_code" in capfd.readouterr().err
    assert status("run", "--allow-code") == 0
    assert status("run", "--portable-only") == 0


# ---- tables


def test_no_pickle_anywhere() -> None:
    """No module of the package can read a pickle, marshalled code, or a text as code."""
    calls = re.compile(r"\bimport (pickle|marshal|shelve)|(?<![.\w])(eval|exec)\(|allow_pickle=True|\bload_module\b")
    found = {p.relative_to(ROOT).as_posix(): calls.findall(p.read_text()) for p in (ROOT / "rlx").rglob("*.py")}
    made = {path for path, calls in found.items() if calls}
    assert made == {"rlx/records.py"}, "compiles an `__init__` from the fields of a class of ours"


def test_the_schema_is_that_of_the_classes() -> None:
    """Each record lists fields of its class; what it leaves out has a default, and a simple field has its type."""
    of_functions = {
        "Array",
        "Dim",
        "DType",
        "Encoding",
        "Graph",
        "Node",
        "ByThreads",
        "TensorType",
        "Once",
        "Part",
    }
    simple = {"int": "int", "str": "str", "bool": "bool", "float": "float", "Size": "Size", "Shape": "Shape"}
    for name, fields in SCHEMA.records.items():
        if name in of_functions:
            continue
        cls = getattr(import_module(SCHEMA.modules[name]), name)
        rows: dict[str, Any] = cls._record_rows
        assert list(fields) == [field for field in rows if field in fields], name
        annotations = {k: v for base in reversed(cls.__mro__) for k, v in getattr(base, "__annotations__", {}).items()}
        for field in rows:
            if field not in fields:
                assert hasattr(cls, field), f"{name}.{field} is not stored and has no default"
            elif fields[field] in simple:
                known = {simple[fields[field]], "tuple[Size, ...]"}
                assert annotations[field] in known, f"{name}.{field}"


TOY = Schema("rlx.kernels.program\n    Flow name:str round:Flow|none trips:(int)\n", {})


def toy(head: object, refs: list[int]) -> bytes:
    text = json.dumps(head).encode()
    return struct.pack("<II", len(text), len(refs)) + text + np.array(refs, "<u4").tobytes()


@pytest.mark.parametrize(
    "head,refs",
    [
        ({"scalars": ["a", None], "kinds": [["(int)", 1], ["Flow", 1]]}, [0, 0, 3, 2]),  # refers to itself
        ({"scalars": ["a", None], "kinds": [["(int)", 1], ["Flow", 1]]}, [0, 1, 1, 2]),  # none for a name
        ({"scalars": ["a", None], "kinds": [["(int)", 1], ["Flow", 1]]}, [1, 0, 0, 1, 2]),  # a text among the ints
        ({"scalars": ["a", None], "kinds": [["Flow", 1 << 40]]}, [0, 1, 1]),
        ({"scalars": ["a", None], "kinds": [["(int)", 1], ["Flow", 1]]}, [1 << 31, 0, 1, 2]),
        ({"scalars": ["a", None], "kinds": [["os.system", 1]]}, [0]),
        ({"scalars": [["a"]], "kinds": []}, []),
        ({"scalars": [1 << 64], "kinds": []}, []),
        ({"scalars": ["a", None], "kinds": [["(int)", 1], ["Flow", 1]]}, [0, 0, 1, 2, 0]),
        ({"kinds": []}, []),
        ([], []),
    ],
)
def test_tables_are_not_believed(head: object, refs: list[int]) -> None:
    with pytest.raises(ModelFormatError):
        read_tables(toy(head, refs), "Flow", TOY, {})


def test_tables_give_what_was_written() -> None:
    from rlx.kernels.program import Flow

    inner = Flow("in", None, (1, -5, 1 << 63))  # type: ignore[arg-type]
    outer = Flow("out", inner, ())  # type: ignore[arg-type]
    data = write_tables(outer, "Flow", TOY, lambda thing: None)
    found, end = read_tables(data + b"more", "Flow", TOY, {})
    assert (found.name, found.trips, found.round.name, found.round.trips) == ("out", (), "in", (1, -5, 1 << 63))
    assert end == len(data)
    with pytest.raises(OptionError, match="can't be stored"):
        write_tables(Flow("x", None, (1.5,)), "Flow", TOY, lambda thing: None)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="64 bits"):
        write_tables(Flow("x", None, (1 << 64,)), "Flow", TOY, lambda thing: None)  # type: ignore[arg-type]


# ---- files that a file names


def onnx_model(folder: Path) -> Path:
    nodes = [helper.make_node("Gather", ["table", "i"], ["y"])]
    table = numpy_helper.from_array(np.arange(90_000, dtype=np.float32).reshape(-1, 3), "table")
    i = helper.make_tensor_value_info("i", TensorProto.INT64, ["n"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])
    made = helper.make_graph(nodes, "g", [i], [y], [table])
    path = folder / "model.onnx"
    for pad in range(4):  # until the table lies where floats can be read
        proto = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        proto.producer_name = "x" * (4 + pad)
        path.write_bytes(proto.SerializeToString())
        if path.read_bytes().index(np.arange(90_000, dtype=np.float32).tobytes()) % 4 == 0:
            break
    return path


def with_file(data: bytes, record: dict[str, Any]) -> bytes:
    """An artifact that names another file."""
    length = struct.unpack_from("<I", data, 12)[0]
    header = json.loads(data[container.HEAD.size :][:length])
    _, first = container._layout([size for _, size, _ in header["sections"]], length)
    starts, _ = container._layout([size for _, size, _ in header["sections"]], length)
    bodies = [data[at : at + row[1]] for at, row in zip(starts, header["sections"], strict=True)]
    header["files"] = [record]
    text = json.dumps(header).encode()
    starts, start = container._layout([len(body) for body in bodies], len(text))
    made = bytearray(start) + data[first:]
    head = container.HEAD.pack(container.MAGIC, container.FORMAT, len(text), container.sha256(text).digest()) + text
    for at, body in zip([0, *starts], [head, *bodies], strict=True):
        made[at : at + len(body)] = body
    return bytes(made)


@posix
@pytest.mark.parametrize("portable", [False, True])
def test_files_that_an_artifact_may_not_name(portable: bool, tmp_path: Path) -> None:
    """Devices, pipes, descriptors, what lies outside, links that lead there, and what is no path: at once, an error."""
    model = rlx.load(onnx_model(tmp_path), device="cpu", cache=False)
    path = tmp_path / "in" / "m.rlxart"
    path.parent.mkdir()
    model.save(path, portable=portable)
    data = path.read_bytes()
    os.mkfifo(path.parent / "pipe")
    (path.parent / "link").symlink_to("/etc/passwd")
    (path.parent / "up").symlink_to(tmp_path)
    (path.parent / "folder").mkdir()
    fd = os.open(path, os.O_RDONLY)
    names: list[Any] = ["/dev/zero", "pipe", f"/dev/fd/{fd}", f"/proc/self/fd/{fd}", "../model.onnx", "link"]
    names += ["up/model.onnx", "folder", "", "a\0b", fd, fd + 0.5, True, None, ["pipe"], str(tmp_path / "model.onnx")]
    for name in names:
        for told in ({"sha256": "0" * 64}, {"identity": [0, 0, 0, 0]}):
            path.write_bytes(with_file(data, {"path": name, **told}))
            with pytest.raises(ModelFormatError):
                rlx.load(path)
    os.fstat(fd)  # is still open
    os.close(fd)


def test_external_weights_lie_beside_the_artifact(tmp_path: Path) -> None:
    """The pair can be moved; an artifact elsewhere can't name the file."""
    (tmp_path / "a").mkdir()
    (tmp_path / "elsewhere").mkdir()
    model = rlx.load(onnx_model(tmp_path / "a"), device="cpu", cache=False)
    with pytest.raises(OptionError, match="not in the folder of the artifact"):
        model.save(tmp_path / "elsewhere" / "m.rlxart", external=True)
    model.save(tmp_path / "a" / "m.rlxart", external=True)
    (tmp_path / "a").rename(tmp_path / "b")
    i = [np.arange(5)]
    for portable_only in (False, True):
        again = rlx.load(tmp_path / "b" / "m.rlxart", device="cpu", portable_only=portable_only)
        assert again.run(i)[0].tobytes() == model.run(i)[0].tobytes()


def test_weights_of_an_artifact_fit_its_graph(model: rlx.CompiledGraph, tmp_path: Path) -> None:
    """A weight of another shape or type than the graph says would be read beyond its end."""
    path = tmp_path / "m.rlxart"
    model.save(path, portable=True)
    data = path.read_bytes()
    for old, new in ((b"[4, 4]]", b"[2, 8]]"), (b'"f32", [4, 4]', b'"i32", [4, 4]'), (b"[4, 4]]", b"[16]]  ")):
        length = struct.unpack_from("<I", data, 12)[0]
        text = data[container.HEAD.size :][:length].replace(old, new)
        assert (len(text), text.count(new)) == (length, 1)
        head = container.HEAD.pack(container.MAGIC, container.FORMAT, length, container.sha256(text).digest())
        path.write_bytes(head + text + data[len(head) + length :])
        with pytest.raises(ModelFormatError, match="'w'"):
            rlx.load(path)


# ---- the cache


def cached(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A model, its cache, and the entry there."""
    path, folder = onnx_model(tmp_path), tmp_path / "cache"
    rlx.load(path, device="cpu", cache_dir=folder)
    finish_writing()
    (entry,) = (folder / "artifacts").iterdir()
    return path, folder, entry


def is_hit(model: rlx.CompiledGraph) -> bool:
    return type(model.compilation).__name__ == "StoredCompilation"


@posix
def test_the_cache_is_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders 0700, files 0600, also where the mask of the process would leave more; one that can be read is closed."""
    before = os.umask(0)
    try:
        path, folder, entry = cached(tmp_path)
        write_kept(tmp_path / "kept" / "a.json", ["k"], 7)
        objects = ObjectCache(tmp_path / "objects")
        objects.put("k", b"body")
    finally:
        os.umask(before)
    for each in (folder, entry.parent, tmp_path / "kept", tmp_path / "objects"):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
    for each in (entry, tmp_path / "kept" / "a.json", objects.path("k")):
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
    entry.parent.chmod(0o755)
    rlx.load(path, device="cpu", cache_dir=folder, dims={"n": 3}).close()
    assert stat.S_IMODE(entry.parent.stat().st_mode) == 0o700


@posix
@pytest.mark.parametrize("what", ["another's file", "another's folder", "open file", "open folder"])
def test_what_others_may_have_written_is_not_loaded(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, no_code: None
) -> None:
    """Entries, objects and measurements that another user has or can write to are not read, with a warning each.

    Nor is anything written to such a folder: it would stay open, or make what is in it look like this user's.
    """
    path, folder, entry = cached(tmp_path)
    kept, objects = tmp_path / "kept" / "a.json", ObjectCache(tmp_path / "objects")
    write_kept(kept, ["k"], 7)
    objects.put("k", b"body")
    old, files = kept.read_bytes(), (entry, kept, objects.path("k"))
    of_folder, of_another = "folder" in what, "another" in what
    places = [file.parent if of_folder else file for file in files]
    for place in places:
        place.chmod((0o700 if of_folder else 0o600) | (0 if of_another else 0o020))
    if of_another:
        real = disk.check_own

        def check(status: os.stat_result, path: Any) -> None:
            is_place = any(os.path.samestat(status, os.lstat(place)) for place in places if place.exists())
            real(SimpleNamespace(st_uid=1234, st_mode=status.st_mode) if is_place else status, path)

        monkeypatch.setattr(disk, "check_own", check)
    with caplog.at_level(logging.WARNING, "rlx"):
        assert objects.get("k") is None
        assert read_kept(kept, ["k"]) is None
        assert not is_hit(rlx.load(path, device="cpu", cache_dir=folder))
        if of_folder:
            assert not objects.put("k", b"new")
            write_kept(kept, ["k"], 8)
            assert not is_hit(rlx.load(path, device="cpu", cache_dir=folder))
        finish_writing()
    said = [record.getMessage() for record in caplog.records]
    why = "belongs to user 1234, not to" if of_another else "can be written to by other users"
    for place in places:
        assert any(why in line and str(place) in line for line in said), (place, said)
    if of_folder:  # still as it was, to be seen and deleted by the user
        assert kept.read_bytes() == old
        assert all(stat.S_IMODE(place.stat().st_mode) == (0o700 if of_another else 0o720) for place in places)


@posix
@pytest.mark.parametrize("make", ["pipe", "link", "device", "folder"])
def test_what_is_no_file_is_not_followed(make: str, tmp_path: Path, no_code: None) -> None:
    """A pipe would hang, a link lead to another's file: neither is opened, and an entry takes its place."""
    path, folder, entry = cached(tmp_path)
    kept, objects = tmp_path / "kept.json", ObjectCache(tmp_path / "objects")
    write_kept(kept, ["k"], 7)
    objects.put("k", b"body")
    for file in (entry, kept, objects.path("k")):
        target = file.with_name(file.name + ".real")
        file.rename(target)
        {
            "pipe": lambda f=file: os.mkfifo(f),
            "link": lambda f=file, t=target: f.symlink_to(t),
            "device": lambda f=file: f.symlink_to("/dev/zero"),
            "folder": lambda f=file: f.mkdir(),
        }[make]()
    assert not is_hit(rlx.load(path, device="cpu", cache_dir=folder))
    finish_writing()
    assert read_kept(kept, ["k"]) is None
    assert objects.get("k") is None
    if make != "folder":
        write_kept(kept, ["k"], 8)
        assert objects.put("k", b"new")
        assert (read_kept(kept, ["k"]), objects.get("k")) == (8, b"new")
        assert entry.is_file()
        assert not entry.is_symlink()


@posix
@pytest.mark.parametrize("own", [False, True])
def test_regular_files_only(own: bool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(OSError, match=r"expected a file"):
            open_regular(path, own=own)


# ---- other files


def test_files_are_opened_in_one_way() -> None:
    """By `open_regular`, which checks what it has opened; else only files of the system and of the package."""
    opened = r"(?<![\w.])(?<!def )open\((?!open_regular\()", r"\.open\(\"", r"\b(?:np\.load|np\.memmap|os\.open)\("
    calls = re.compile("|".join((*opened, r"\.read_(?:bytes|text)\(")))
    found = {p.relative_to(ROOT).as_posix(): calls.findall(p.read_text()) for p in (ROOT / "rlx").rglob("*.py")}
    of_system = ("estimate/resident", "estimate/system", "backends/memory", "backends/granted", "cli/compile_time")
    jit = ("backends/cpu/jit/cpuid", "backends/cpu/jit/compile", "backends/cpu/jit/prebuilt")
    of_packages = (*jit, "backends/cuda/text/kernels", "demo/__init__", "demo/fetch")
    allowed = {f"rlx/{name}.py" for name in (*of_system, *of_packages, "disk", "models/chat/child")}
    assert {path for path, calls in found.items() if calls} == allowed


@pytest.mark.parametrize("shape,dtype", [((1 << 40,), "f4"), ((1 << 33, 1 << 33), "f8"), ((5,), "f4"), ((-1,), "f4")])
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_an_array_file_is_as_long_as_it_says(
    shape: tuple[int, ...], dtype: str, version: tuple[int, int], tmp_path: Path
) -> None:
    """A header that promises more than the file has is refused before memory is taken, as .npy and in archives."""
    import tracemalloc

    header = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode()
    length = len(header).to_bytes(2 if version == (1, 0) else 4, "little")
    data = b"\x93NUMPY" + bytes(version) + length + header + bytes(16)
    (tmp_path / "a.npy").write_bytes(data)
    packed = archive(tmp_path / "a.npz", lambda bundle: bundle.writestr("w.npy", data))
    tracemalloc.start()
    with pytest.raises(OptionError, match=r"a\.npy"):
        read_array(tmp_path / "a.npy")
    with pytest.raises(ModelFormatError, match="'w"):
        read_weights(packed)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_a_compressed_recording_is_refused(tmp_path: Path) -> None:
    import zipfile

    g = rlx.Graph("double")
    g.output(g.input("x", (1 << 20,)) * 2.0, "y")
    model = rlx.compile(g, device="reference")
    with model.record(tmp_path / "plain.npz") as recorded:
        recorded.run([np.zeros(1 << 20, np.float32)])
    rlx.replay(model, tmp_path / "plain.npz")
    with (
        zipfile.ZipFile(tmp_path / "plain.npz") as plain,
        zipfile.ZipFile(tmp_path / "small.npz", "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for name in plain.namelist():
            small.writestr(name, plain.read(name))
    with pytest.raises(ModelFormatError, match="compressed"):
        rlx.replay(model, tmp_path / "small.npz")


def archive(path: Path, make: Callable[[Any], None]) -> Path:
    import zipfile

    with zipfile.ZipFile(path, "w") as bundle:
        make(bundle)
    return path


def test_states_that_would_take_much_more_than_their_file(tmp_path: Path) -> None:
    """A compressed entry of 64 MiB of zeros is refused before a byte of it is made."""
    import tracemalloc
    import zipfile

    g = rlx.Graph("counter")
    total = g.state("total", (1, 8))
    g.update(total, total + g.input("x", (1, 8)))
    g.output(total, "y")
    model = rlx.compile(g, device="reference")
    rows = {"version": 1, "graph": "counter", "states": {"total": {"dtype": "f32", "shape": [1, 1 << 24]}}}

    def make(bundle: zipfile.ZipFile) -> None:
        bundle.writestr("states.json", json.dumps(rows))
        bundle.writestr("0.bin", bytes(64 << 20), zipfile.ZIP_DEFLATED)

    model.states.save(tmp_path / "good")
    with zipfile.ZipFile(tmp_path / "good") as bundle:
        header = next(name for name in bundle.namelist() if not name.endswith(".bin"))
        rows["version"] = json.loads(bundle.read(header))["version"]
    path = archive(tmp_path / "bomb", lambda b: (b.writestr(header, json.dumps(rows)), make(b))[0])
    tracemalloc.start()
    with pytest.raises(ModelFormatError):
        model.states.load(path)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
