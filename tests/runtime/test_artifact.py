"""Artifacts and the cache of whole artifacts: equal bits, no compiler on load, and nothing but errors for damage."""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
import pickle
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import rlx
from rlx.backends.cpu.jit import cpuid
from rlx.errors import ModelFormatError, OptionError
from rlx.importers.onnx import load as load_onnx
from rlx.ir.encoding import encoding_named
from rlx.ir.fingerprint import graphs_equal
from rlx.runtime import artifact, cache, container, restore, writing

RNG = np.random.default_rng(3)


def normal(*shape: int) -> np.ndarray[Any, np.dtype[Any]]:
    return RNG.standard_normal(shape, np.float32)


def mlp() -> rlx.Graph:
    g = rlx.Graph("mlp")
    x = g.input("x", (rlx.Dim("n", 1, 64), 40))
    h = rlx.tanh(x @ g.param("w", data=normal(40, 70)) + g.param("b", data=normal(70)))
    g.output(rlx.softmax(h @ g.constant(normal(70, 9))), "y")
    return g


def attention() -> rlx.Graph:
    g = rlx.Graph("attention")
    x = g.input("x", (2, 3, rlx.Dim("s", 1, 32), 48))
    q, k, v = (rlx.softmax(x @ g.param(n, data=normal(48, 48))) for n in "qkv")
    g.output(rlx.attention(q, k, v), "y")
    return g


def convs() -> rlx.Graph:
    g = rlx.Graph("convs")
    x = g.input("x", (1, 8, rlx.Dim("h", 8, 40), 24))
    h = rlx.relu(rlx.conv(x, g.param("w3", data=normal(16, 8, 3, 3)), pads=(1, 1, 1, 1)))
    h = rlx.conv(h, g.param("d", data=normal(16, 1, 3, 3)), groups=16)
    g.output(rlx.conv(h, g.param("w1", data=normal(6, 16, 1, 1))), "y")
    return g


def lookup() -> rlx.Graph:
    g = rlx.Graph("lookup")
    i = g.input("i", (rlx.Dim("n"),), "i64")  # unbounded: planned at the run
    rows = rlx.gather(g.param("table", data=normal(50, 12)), i)
    g.output(rlx.reduce_sum(rows, axes=(1,)), "y")
    g.output(rlx.cast(rows, "i32"), "z")
    return g


def sorting() -> rlx.Graph:
    g = rlx.Graph("sorting")
    x = g.input("x", (4, 30))
    values, places = rlx.top_k(x, k=7)
    g.output(values, "y")
    g.output(places, "z")
    return g


def counter() -> rlx.Graph:
    """Two states, one with an initial value."""
    g = rlx.Graph("counter")
    x = g.input("x", (1, 8))
    total = g.state("total", (1, 8), initial=normal(1, 8))
    rows = g.state("rows", (5, 8))
    g.update(total, total + x)
    g.update(rows, rows * 0.5 + x)
    g.output(total * 2.0, "y")
    g.output(rows, "z")
    return g


def chosen() -> rlx.Graph:
    """Sizes that data decide: the rows where a mask is true."""
    g = rlx.Graph("chosen")
    x = g.input("x", (12, 6))
    count = rlx.Dim("count", 0, 12)
    rows = rlx.non_zero(rlx.greater(rlx.reduce_sum(x, axes=(1,)), g.constant(0.0)), count=count)
    g.output(rlx.tanh(rlx.gather(x, rlx.reshape(rows, (2 * count,)))) * 2.0, "y")
    return g


def branching() -> rlx.Graph:
    """An If, and a loop whose rounds the data decide."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    g (float[4, 6] x, int64[5] i) => (y, z) {
      a = ReduceSum <keepdims = 0> (x)  zero = Constant <value_float = 0.0> ()  one = Constant <value_float = 1.0> ()
      c = Greater (a, zero)
      y = If (c) <then_branch = t () => (float[4, 6] p) { p = Add (x, one) },
                  else_branch = e () => (float[4, 6] q) { q = Tanh (x) }>
      n = ReduceMax <keepdims = 0> (i)  yes = Constant <value = bool {1}> ()
      z = Loop (n, yes, x) <body = b (int64 k, bool go, float[4, 6] v) => (bool on, float[4, 6] w) {
        on = Identity (go)  half = Constant <value_float = 0.5> ()  w = Mul (v, half) }>
    }""")
    return load_onnx(model.SerializeToString())


def inputs_of(model: rlx.CompiledGraph, extent: int) -> dict[str, Any]:
    def array(spec: Any) -> Any:
        shape = [s if isinstance(s, int) else extent for s in spec.shape]
        return normal(*shape) if spec.dtype.is_float else np.arange(np.prod(shape)).reshape(shape).astype(np.int64) % 50

    return {spec.name: array(spec) for spec in model.inputs}


def assert_same(a: list[Any], b: list[Any]) -> None:
    for left, right in zip(a, b, strict=True):
        assert left.tobytes() == right.tobytes()


@pytest.mark.parametrize("make", [mlp, attention, convs, lookup, sorting, counter, chosen, branching])
@pytest.mark.parametrize("portable", [False, True])
def test_save_and_load_give_equal_bits(make: Callable[[], rlx.Graph], portable: bool, tmp_path: Path) -> None:
    """An artifact runs as the model that it was made of at several extents, and so do its clones and its own copy."""
    model = rlx.compile(make(), device="cpu")
    model.save(tmp_path / "a.rlxart", portable=portable)
    loaded = rlx.load(tmp_path / "a.rlxart", threads=1)
    loaded.save(tmp_path / "b.rlxart", portable=portable)
    again = rlx.load(tmp_path / "b.rlxart")
    assert (loaded.inputs, loaded.outputs, loaded.params) == (model.inputs, model.outputs, model.params)
    for extent in (16, 9, 30):
        feed = inputs_of(model, extent)
        want = model.run(feed)
        for other in (loaded.clone(), loaded, again):
            assert_same(want, other.run(feed))
    assert loaded.explain("fuse") == model.explain("fuse")
    assert str(loaded.plan) == str(model.plan)


UNWANTED = [
    "llvmlite",
    "onnx",
    "ml_dtypes",
    "psutil",
    "numpy.random",
    "logging.handlers",
    "subprocess",
    "tempfile",
    "rlx.ops",
    "rlx.passes",
    "rlx.importers",
    "rlx.compiler",
    "rlx.kernels.expr",
    "rlx.kernels.lowering",
    "rlx.kernels.affine",
    "rlx.kernels.fuse",
    "rlx.plan.plan",
    "rlx.plan.liveness",
    "rlx.plan.exact",
    "rlx.plan.search",
    "rlx.plan.render",
    "rlx.plan.page",
    "rlx.estimate.admit",
    "rlx.estimate.graph",
    "rlx.estimate.experts",
    "rlx.runtime.weights",
    "rlx.backends.cpu.backend",
    "rlx.backends.cpu.build",
    "rlx.backends.cpu.jit.elf",
    "rlx.backends.cpu.runtime.save_image",
    "rlx.backends.cpu.jit.compile",
    "rlx.backends.cpu.runtime.prepare",
    "rlx.backends.cpu.runtime.residency",
    "rlx.backends.cpu.llvm.builder",
    "rlx.backends.cpu.loops.emitter",
    "rlx.backends.cpu.gemm.kernel",
    "rlx.backends.cpu.kernels.matmul.product",
    "rlx.backends.cpu.select",
    "rlx.backends.cpu.kernels.conv.product",
    "rlx.backends.cpu.kernels.attention.attention",
    "rlx.kernels.loops.analysis",
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [mlp, attention, convs])
def test_loading_imports_no_compiler(make: Callable[[], rlx.Graph], tmp_path: Path) -> None:
    """A process that loads and runs an artifact has nothing of what compiles, nor modules that are slow to import."""
    model = rlx.compile(make(), device="cpu")
    model.save(tmp_path / "m.rlxart")
    feed = inputs_of(model, 9)
    np.save(tmp_path / "x.npy", feed["x"])
    code = (
        "import sys\nbefore = set(sys.modules)\nimport numpy as np, rlx\n"
        f"m = rlx.load({str(tmp_path / 'm.rlxart')!r}, cache_dir={str(tmp_path / 'empty')!r})\n"
        f"print(m.run([np.load({str(tmp_path / 'x.npy')!r})])[0].tobytes().hex())\n"
        f"print([name for name in {UNWANTED!r} if name in sys.modules and name not in before])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    bits, unwanted = done.stdout.split("\n")[:2]
    assert bits == model.run(feed)[0].tobytes().hex()
    assert unwanted == "[]"


def test_a_hit_reads_little_of_the_package(tmp_path: Path) -> None:
    """What a process imports to answer from the cache is counted: most of its time goes into reading modules."""
    path = onnx_model(tmp_path)
    code = (
        "import json, numpy as np, sys\nbefore = set(sys.modules)\nimport rlx\n"
        f"m = rlx.load({str(path)!r}, device='cpu', dims={{'n': 5}}, cache_dir={str(tmp_path / 'cache')!r})\n"
        "m.run({'i': np.arange(5)})\n"
        "print(*(name for name in set(sys.modules) - before), sep='\\n')\n"
    )
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    read = done.stdout.split()
    files = [Path(str(import_module(name).__file__)) for name in read if name.split(".")[0] == "rlx"]
    assert len(files) <= 77, "77 when this was written"
    assert sum(file.stat().st_size for file in files) <= 629_000, "626 kB when this was written"
    assert "dataclasses" not in read


def test_params_change_after_loading(tmp_path: Path) -> None:
    """set_param packs anew in a loaded model, and the file stays as it is."""
    model = rlx.compile(mlp(), device="cpu")
    model.save(tmp_path / "m.rlxart")
    before = (tmp_path / "m.rlxart").read_bytes()
    loaded = rlx.load(tmp_path / "m.rlxart")
    feed = inputs_of(model, 7)
    loaded.run(feed)
    other = normal(40, 70)
    for each in (model, loaded):
        each.set_param("w", other)
    assert_same(model.run(feed), loaded.run(feed))
    assert (tmp_path / "m.rlxart").read_bytes() == before


def test_params_that_are_not_set_stay_so(tmp_path: Path) -> None:
    """A model may be saved before its weights are there; one whose weights are packed can't be made portable."""
    g = rlx.Graph("open")
    g.output(g.input("x", (3, 20)) @ g.param("w", (20, 33)), "y")
    model = rlx.compile(g, device="cpu")
    model.save(tmp_path / "m.rlxart")
    loaded = rlx.load(tmp_path / "m.rlxart")
    feed, w = inputs_of(model, 0), normal(20, 33)
    with pytest.raises(rlx.errors.NameNotFound, match="'w'"):
        loaded.run(feed)
    for each in (model, loaded):
        each.set_param("w", w)
    assert_same(model.run(feed), loaded.run(feed))
    with pytest.raises(OptionError, match="set_params again"):
        model.save(tmp_path / "p.rlxart", portable=True)
    model.set_param("w", w)
    model.save(tmp_path / "p.rlxart", portable=True)
    assert_same(model.run(feed), rlx.load(tmp_path / "p.rlxart").run(feed))


def test_another_machine_or_version_compiles_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Code for another processor or of another build is not run: the graph is compiled again, with a note."""
    model = rlx.compile(mlp(), device="cpu")
    model.save(tmp_path / "m.rlxart")
    feed = inputs_of(model, 3)
    with caplog.at_level(logging.INFO, "rlx"):
        monkeypatch.setattr(artifact, "build_identity", lambda: "rlx 99")
        assert_same(model.run(feed), rlx.load(tmp_path / "m.rlxart").run(feed))
        assert "compiling it again" in caplog.text
        assert "rlx 99" in caplog.text
        monkeypatch.undo()
        monkeypatch.setattr(cpuid, "identity", lambda: "a processor without anything")
        assert_same(model.run(feed), rlx.load(tmp_path / "m.rlxart").run(feed))
        assert "its code is for another processor with " in caplog.text
        monkeypatch.undo()
        assert rlx.load(tmp_path / "m.rlxart", dims={"n": 3}).inputs[0].shape == (3, 40)
        assert "other dims" in caplog.text
        assert rlx.load(tmp_path / "m.rlxart", device="reference").device == "reference"
    with pytest.raises(ModelFormatError, match="is an artifact of rlx, which is planned already"):
        rlx.estimate(tmp_path / "m.rlxart")
    model = rlx.load(tmp_path / "m.rlxart", device="reference")
    for param in model.params:  # also where values of params were given after compiling
        model.set_param(param.name, normal(*(int(size) for size in param.shape)))  # type: ignore[call-overload]
    model.save(tmp_path / "m.rlxart", portable=True)
    X = [normal(2, *(int(s) for s in model.inputs[0].shape[1:]))]  # type: ignore[call-overload]
    assert_same(rlx.load(tmp_path / "m.rlxart", device="reference").run(X), model.run(X))
    monkeypatch.setattr(container, "FORMAT", container.FORMAT + 1)
    with pytest.raises(
        ModelFormatError,
        match=f"format {container.FORMAT - 1}, this rlx reads format {container.FORMAT}: save the model again",
    ):
        rlx.load(tmp_path / "m.rlxart")
    monkeypatch.setattr(container, "FORMAT", 0)
    with pytest.raises(ModelFormatError, match="upgrade rlx"):
        rlx.load(tmp_path / "m.rlxart")


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("way", ["load", "session", "load_artifact"])
def test_an_option_that_is_given_counts_though_it_is_the_default(way: str, portable: bool, tmp_path: Path) -> None:
    """Without precision= an artifact keeps its own, with precision="f32" it is computed in that."""
    x, w = normal(3, 64), encoding_named("q8_0").encode(normal(32, 64))
    g = rlx.Graph("products")
    g.output(g.input("x", (3, 64)) @ g.param("w", (32, 64), encoding="q8_0", data=w).transpose(1, 0), "y")
    made = {precision: rlx.compile(g, device="cpu", precision=precision) for precision in ("q8", "f32")}
    want = {precision: model.run([x])[0] for precision, model in made.items()}
    assert not np.array_equal(want["q8"], want["f32"])
    made["q8"].save(tmp_path / "m.rlxart", portable=portable)

    def load(**options: Any) -> rlx.CompiledGraph:
        if way == "session":
            return rlx.Session(device="cpu", **options).load(tmp_path / "m.rlxart")
        return getattr(rlx, way)(tmp_path / "m.rlxart", device="cpu", **options)

    for options, precision in (({}, "q8"), ({"precision": "q8"}, "q8"), ({"precision": "f32"}, "f32")):
        np.testing.assert_array_equal(load(**options).run([x])[0], want[precision])


def test_damage_is_an_error(tmp_path: Path) -> None:
    """A file that is cut off or changed at any place is refused."""
    rlx.compile(mlp(), device="cpu").save(tmp_path / "m.rlxart")
    whole = (tmp_path / "m.rlxart").read_bytes()
    bad = tmp_path / "bad.rlxart"
    for size in [*range(8, 60, 7), 100, len(whole) // 2, len(whole) - 1]:
        bad.write_bytes(whole[:size])
        with pytest.raises(ModelFormatError):
            rlx.load(bad)
    header = container.HEAD.size + struct.unpack_from("<I", whole, 12)[0]
    for at in (8, 13, 20, 60, header // 2, header + 100, len(whole) // 3, len(whole) - 2000):
        changed = bytearray(whole)
        changed[at] ^= 0x5A
        bad.write_bytes(changed)
        if bytes(changed).rstrip(b"\0") != whole.rstrip(b"\0") and not _is_padding(whole, at):
            with pytest.raises(ModelFormatError):
                rlx.load(bad)


def _is_padding(whole: bytes, at: int) -> bool:
    return whole[at - 32 : at + 32] == bytes(64)


def hostile(header: dict[str, Any]) -> bytes:
    """A file with a header of somebody's own, with the right checksum."""
    text = json.dumps(header).encode()
    import hashlib

    head = container.HEAD.pack(container.MAGIC, container.FORMAT, len(text), hashlib.sha256(text).digest())
    return (head + text).ljust(4096, b"\0")


@pytest.mark.parametrize(
    "changes",
    [
        {"sections": [["graph", -5, ""]]},
        {"sections": [["graph", 1 << 70, ""]]},
        {"sections": "graph"},
        {"arrays": [[-1, 1 << 40, "f32", [4]]]},
        {"arrays": [[-1, 0, "f32", [1 << 40, 1 << 40]]]},
        {"arrays": [[3, 0, "f32", [1]]]},
        {"arrays": [[-1, 0, "f31", []]]},
        {"arrays": [[-1, 0, "f32", [1] * 65]]},
        {"files": [{"path": "/nonexistent/file", "identity": []}]},
        {"files": [{}]},
        {"facts": 7},
        {"arrays_bytes": 12},
        {"arrays_bytes": None},
        {"facts": {"code": {}}},
        {"facts": {"graph": {"values": {}, "constants": {"a": 9}}}},
    ],
)
def test_headers_are_not_believed(changes: dict[str, Any], tmp_path: Path) -> None:
    """Every size, offset and number of a header is checked, whatever its checksum says."""
    header = {"facts": {}, "sections": [], "arrays": [], "files": [], "arrays_bytes": 0, "arrays_crc32": 0}
    (tmp_path / "m.rlxart").write_bytes(hostile(header | changes))
    with pytest.raises(ModelFormatError):
        rlx.load(tmp_path / "m.rlxart")


def test_weights_may_stay_in_the_model_file(tmp_path: Path) -> None:
    """An external artifact is smaller, and refuses a model file with other contents."""
    path = onnx_model(tmp_path)
    model = rlx.load(path, device="cpu", cache=False)
    model.save(tmp_path / "whole.rlxart")
    model.save(tmp_path / "lean.rlxart", external=True)
    assert (tmp_path / "lean.rlxart").stat().st_size < (tmp_path / "whole.rlxart").stat().st_size - 300_000
    feed = inputs_of(model, 4)
    assert_same(model.run(feed), rlx.load(tmp_path / "lean.rlxart").run(feed))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(ModelFormatError, match=r"model\.onnx.*changed"):
        rlx.load(tmp_path / "lean.rlxart")


def test_what_can_not_be_saved(tmp_path: Path) -> None:
    """Devices without code, folders."""
    model = rlx.compile(mlp(), device="reference")
    with pytest.raises(OptionError, match="portable=True"):
        model.save(tmp_path / "m.rlxart")
    with pytest.raises(OptionError, match="can't be written"):
        model.save(tmp_path, portable=True)
    model.save(tmp_path / "m.rlxart", portable=True)
    assert rlx.load(tmp_path / "m.rlxart", device="reference").device == "reference"
    long = rlx.Graph("long")
    value = long.input("x", (3,))
    for _ in range(2000):
        value = rlx.sigmoid(value)
    long.output(value * long.param("w", data=normal(3)), "y")
    for copied in (pickle.loads(pickle.dumps(long)), copy.deepcopy(long)):
        assert graphs_equal(copied, long)
        assert_same([v.data for v in copied.params], [v.data for v in long.params])


# ---- the cache


def onnx_model(folder: Path, value: float = 1.0) -> Path:
    """y = tanh(table[i] @ w): a table that is used as it lies in the file, and a weight that is packed."""
    nodes = [
        helper.make_node("Gather", ["table", "i"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["p"]),
        helper.make_node("Tanh", ["p"], ["y"]),
    ]
    table = np.full((4000, 24), value, np.float32) * np.arange(24, dtype=np.float32) / 24
    weights = [numpy_helper.from_array(table, "table"), numpy_helper.from_array(normal(24, 40) / 9, "w")]
    i = helper.make_tensor_value_info("i", TensorProto.INT64, ["n"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 40])
    graph = helper.make_graph(nodes, "g", [i], [y], weights)
    path = folder / "model.onnx"
    for pad in range(4):  # until the table lies where floats can be read
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        proto.producer_name = "x" * (4 + pad)
        path.write_bytes(proto.SerializeToString())
        if path.read_bytes().index(table.tobytes()) % 4 == 0:
            break
    return path


def entries(folder: Path) -> list[Path]:
    cache.finish_writing()
    return sorted((folder / "artifacts").glob("*"))


def is_hit(model: rlx.CompiledGraph) -> bool:
    return isinstance(model.compilation, restore.StoredCompilation)


def test_the_second_load_is_from_the_cache(tmp_path: Path) -> None:
    """Equal bits; the stages can still be asked for; other options and other files are other entries."""
    path, kept = onnx_model(tmp_path), tmp_path / "cache"
    first = rlx.load(path, device="cpu", cache_dir=kept)
    second = rlx.load(path, device="cpu", cache_dir=kept, threads=1)
    assert not is_hit(first)
    assert is_hit(second)
    assert entries(kept)[0].stat().st_size < 200_000  # without the table, which stays where it is
    feed = inputs_of(first, 6)
    assert_same(first.run(feed), second.run(feed))
    assert second.explain("fuse") == first.explain("fuse")
    assert second.explain("graph") == first.explain("graph")
    second.save(tmp_path / "m.rlxart")
    assert_same(first.run(feed), rlx.load(tmp_path / "m.rlxart").run(feed))
    assert not is_hit(rlx.load(path, cache_dir=kept, dims={"n": 6}))
    assert is_hit(rlx.load(path, cache_dir=kept, dims={"n": 6}))
    assert not is_hit(rlx.load(path, cache_dir=kept, alignment=128))
    assert not is_hit(rlx.load(path, cache_dir=kept, cache=False))
    onnx_model(tmp_path, 0.25)
    changed = rlx.load(path, cache_dir=kept)
    assert not is_hit(changed)
    assert changed.run(feed)[0].tobytes() != first.run(feed)[0].tobytes()


def test_an_entry_is_written_after_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before; who closes the model waits for it. It holds the weights that the file has, not those set since."""
    monkeypatch.setattr(writing, "PATIENCE", 600.0)
    path, kept, feed = onnx_model(tmp_path), tmp_path / "cache", {"i": np.arange(5)}
    stored: list[int] = []
    store = artifact.store
    monkeypatch.setattr(artifact, "store", lambda *given: stored.append(1) or store(*given))
    model = rlx.load(path, device="cpu", cache_dir=kept)
    time.sleep(3 * writing.LOOK)
    assert not stored
    assert not (kept / "artifacts").exists()
    want = model.run(feed)
    model._writer.finish()  # type: ignore[union-attr]
    assert len(stored) == len(list((kept / "artifacts").iterdir())) == 1
    assert_same(rlx.load(path, device="cpu", cache_dir=kept).run(feed), want)

    with rlx.load(path, device="cpu", cache_dir=kept, alignment=128) as other:
        other.set_params({"w": normal(24, 40)})
        assert other.run(feed)[0].tobytes() != want[0].tobytes()
    assert len(list((kept / "artifacts").iterdir())) == 2
    again = rlx.load(path, device="cpu", cache_dir=kept, alignment=128)
    assert is_hit(again)
    assert_same(again.run(feed), want)


def test_an_entry_is_written_where_nothing_runs(tmp_path: Path) -> None:
    """A process that only loads leaves the entry, and its end is not put off."""
    path, kept = onnx_model(tmp_path), tmp_path / "cache"
    code = f"""
import rlx, time
from rlx.runtime import writing
writing.PATIENCE = 600.0
rlx.load({str(path)!r}, device="cpu", cache_dir={str(kept)!r})
"""
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)
    assert is_hit(rlx.load(path, device="cpu", cache_dir=kept))


@pytest.mark.skipif(os.name != "posix", reason="forks as POSIX has them")
def test_a_child_has_no_entry_to_write(tmp_path: Path) -> None:
    """Forked while the thread looks whether to begin: the child runs and closes the model, the parent writes."""
    path, kept = onnx_model(tmp_path), tmp_path / "cache"
    code = f"""
import os, signal, numpy as np, rlx
from rlx.runtime import writing
writing.PATIENCE = 600.0
model = rlx.load({str(path)!r}, device="cpu", cache_dir={str(kept)!r})
with model._writer.begin._cond:  # as the thread has it then
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        model.run({{"i": np.arange(5)}})
        model.close()
        os._exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert status == 0, status
assert not os.path.exists({str(kept / "artifacts")!r})
"""
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)
    assert is_hit(rlx.load(path, device="cpu", cache_dir=kept))


def test_a_failed_write_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The model runs all the same, and the next load compiles."""
    path, kept, feed = onnx_model(tmp_path), tmp_path / "cache", {"i": np.arange(5)}

    def broken(*given: object) -> int:
        raise ArithmeticError("mine")

    with monkeypatch.context() as failing, caplog.at_level("WARNING", "rlx"):
        failing.setattr(artifact, "store", broken)
        model = rlx.load(path, device="cpu", cache_dir=kept)
        want = model.run(feed)
        cache.finish_writing()
    assert "not written to the cache: ArithmeticError('mine')" in caplog.text
    again = rlx.load(path, device="cpu", cache_dir=kept)
    assert not is_hit(again)
    assert_same(again.run(feed), want)


OLDER: dict[str, tuple[object, str, object]] = {
    "format": (cache, "FORMAT", cache.FORMAT - 1),
    "rlx or Python": (cache, "build_identity", lambda: "rlx 0.0"),
    "sources": (cache, "source_times", lambda: "some time ago"),
    "processor": (cpuid, "identity", lambda: "another processor"),
}


@pytest.mark.parametrize("what", OLDER)
def test_entries_of_another_version_are_made_anew(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not looked at, and stay until the cache needs their room; the next load finds the new one."""
    path, kept = onnx_model(tmp_path), tmp_path / "cache"
    with monkeypatch.context() as older:
        older.setattr(*OLDER[what])
        rlx.load(path, device="cpu", cache_dir=kept)
    (entry,) = entries(kept)
    entry.write_bytes(b"what no version can read")
    model = rlx.load(path, device="cpu", cache_dir=kept)
    assert not is_hit(model)
    assert entry.read_bytes() == b"what no version can read"
    again = rlx.load(path, device="cpu", cache_dir=kept)
    assert is_hit(again)
    feed = {"i": np.arange(5)}
    assert_same(model.run(feed), again.run(feed))


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "weights", "no thread", "swapped", "text"])
def test_damaged_entries_are_replaced(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with an entry, the model loads, and the next load finds a good one."""
    if damage in ("weights", "no thread"):  # whose checksum is computed while the model is made
        monkeypatch.setattr(container, "WORTH_A_THREAD", 1)
    if damage == "no thread":

        def refuse(thread: threading.Thread, start: Any = threading.Thread.start) -> None:
            if thread.name == "rlx checksum":
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)
    path, kept = onnx_model(tmp_path), tmp_path / "cache"
    feed = {"i": np.arange(5)}
    want = rlx.load(path, cache_dir=kept).run(feed)
    (entry,) = entries(kept)
    whole = bytearray(entry.read_bytes())
    if damage == "swapped":
        rlx.load(path, cache_dir=kept, dims={"n": 5})
        other = next(e for e in entries(kept) if e != entry)
        entry.write_bytes(other.read_bytes())
    elif damage == "flipped":
        whole[len(whole) // 2] ^= 1
        whole[-2000] ^= 1
        entry.write_bytes(whole)
    elif damage in ("weights", "no thread"):
        whole[-1] ^= 1  # of the last array
        entry.write_bytes(whole)
    else:
        entry.write_bytes({"empty": b"", "cut": bytes(whole[:-100]), "text": b"hello" * 500}[damage])
    model = rlx.load(path, cache_dir=kept)
    assert not is_hit(model)
    assert_same(want, model.run(feed))
    assert is_hit(rlx.load(path, cache_dir=kept))


def test_the_cache_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used entries go; a model whose weights are too large for the cache is not kept."""
    path, kept = onnx_model(tmp_path), tmp_path / "cache"
    rlx.load(path, cache_dir=kept)
    size = entries(kept)[0].stat().st_size
    monkeypatch.setattr(cache.ArtifactCache.__init__, "__defaults__", (4 * size,))
    for n in range(1, 8):
        rlx.load(path, cache_dir=kept, dims={"n": n})
    assert sum(e.stat().st_size for e in entries(kept)) <= 4 * size
    assert is_hit(rlx.load(path, cache_dir=kept, dims={"n": 7}))
    assert not is_hit(rlx.load(path, cache_dir=kept))
    monkeypatch.setattr(cache.ArtifactCache.__init__, "__defaults__", (1000,))
    count = len(entries(kept))
    rlx.load(path, cache_dir=kept, dims={"n": 20})
    assert len(entries(kept)) == count


def test_what_processes_that_died_left_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was killed while it wrote an entry leaves a temporary file, which goes before newer entries."""
    path, kept = onnx_model(tmp_path), tmp_path / "cache"
    rlx.load(path, cache_dir=kept)
    (entry,) = entries(kept)
    left = entry.with_name(f"{entry.name}.0123456789ab.tmp")
    left.write_bytes(entry.read_bytes())
    os.utime(left, (1, 1))
    monkeypatch.setattr(cache.ArtifactCache.__init__, "__defaults__", (entry.stat().st_size * 5 // 2,))
    rlx.load(path, cache_dir=kept, dims={"n": 7})
    assert len(entries(kept)) == 2
    assert not left.exists()


def test_external_weights_are_watched(tmp_path: Path) -> None:
    """An entry is void when a file beside the model, that its weights came from, has changed."""
    import onnx

    path, kept = onnx_model(tmp_path), tmp_path / "cache"
    proto = onnx.load(path)
    onnx.save(proto, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    feed = {"i": np.arange(5)}
    first = rlx.load(path, cache_dir=kept).run(feed)
    assert is_hit(rlx.load(path, cache_dir=kept))
    blob = bytearray((tmp_path / "weights.bin").read_bytes())
    blob[-400:] = np.full(100, 0.5, np.float32).tobytes()
    (tmp_path / "weights.bin").unlink()
    (tmp_path / "weights.bin").write_bytes(blob)
    again = rlx.load(path, cache_dir=kept)
    assert not is_hit(again)
    assert again.run(feed)[0].tobytes() != first[0].tobytes()


def test_processes_share_the_cache(tmp_path: Path) -> None:
    """Processes that load one model at once all get it, and leave one entry and no temporary file."""
    path, kept = onnx_model(tmp_path), tmp_path / "cache"
    code = (
        "import numpy as np, rlx\n"
        f"m = rlx.load({str(path)!r}, cache_dir={str(kept)!r})\n"
        "print(m.run({'i': np.arange(5)})[0].tobytes().hex())\n"
    )
    jobs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert len({job.communicate(timeout=60)[0] for job in jobs}) == 1
    assert [job.returncode for job in jobs] == [0, 0, 0]
    assert [entry.suffix for entry in entries(kept)] == [".rlxart"]


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that this process may not look into, as a user's home is to a service (and nothing is to root)."""
    folder = tmp_path / "closed"
    folder.mkdir()

    def refuses(call: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, str | os.PathLike) and folder in Path(path).parents:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
            return call(path, *args, **kwargs)

        return refusing

    for name in ("stat", "mkdir", "open"):
        monkeypatch.setattr(os, name, refuses(getattr(os, name)))
    return folder


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_cache_in_a_closed_folder_is_no_error(below: str, closed: Path, tmp_path: Path) -> None:
    model = rlx.load(onnx_model(tmp_path), device="cpu", cache_dir=closed / below)
    assert model.run({"i": np.arange(5)})[0].shape == (5, 40)


def test_a_closed_folder_is_no_model(closed: Path) -> None:
    with pytest.raises(rlx.errors.ModelFormatError, match="closed"):
        rlx.estimate(closed, "cpu", overhead=1)


@pytest.mark.sample(1)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of files")
@pytest.mark.parametrize("why", ["full", "unwritable", "long"])
def test_a_cache_that_can_not_be_written_is_no_error(why: str, tmp_path: Path) -> None:
    """A process that the system lets write no more than 1,000 bytes of a file loads, runs and leaves nothing behind."""
    path, kept = onnx_model(tmp_path), tmp_path / "cache"
    if why == "unwritable":
        kept.write_text("a file where the folder should be")
    elif why == "long":
        kept = tmp_path / ("x" * 300)
    code = (
        "import numpy as np, resource, rlx\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)) if {why == 'full'} else None\n"
        f"m = rlx.load({str(path)!r}, device='cpu', cache_dir={str(kept)!r})\n"
        "print(m.run({'i': np.arange(5)})[0].shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(5, 40)\n", "")
    left = [f for f in kept.rglob("*") if f.is_file()] if why == "full" else []
    assert all(f.suffix == ".o" and f.stat().st_size < 1000 for f in left), "small objects at most, and no pieces"
