"""Files that somebody changed: what comes of one is a clean error or a right load, and nothing else happens.

100,000 mutations in all; a quick run makes a part of them.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import resource
import signal
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.runtime import image
from rlx.cost import kept
from rlx.disk import read_kept, write_kept
from rlx.errors import ModelFormatError, RlxError
from rlx.runtime import container
from rlx.runtime.restore import restore
from rlx.tables import read_tables

QUICK = 100  # a quick run makes one in so many
MOST_MEMORY = 600 << 20  # bytes that a kind of file may add to what the process takes at most
ODD: list[Any] = [
    *(None, True, -1, 0, 1, 3, 7, 1 << 31, 1 << 63, 1 << 70, -(1 << 63), 0.5, 1e308, float("nan"), "", "x", "f32"),
    *("/dev/zero", "/dev/fd/3", "/proc/self/mem", "../m.rlxart", "pipe", "link", "a" * 5000, "\0", "9" * 5000),
    *([], {}, [[]], [3], {"path": 3}, {"path": "/dev/zero", "sha256": ""}, {"path": "pipe", "identity": [0, 0, 0, 0]}),
    *({"path": "pipe", "sha256": "0" * 64}, {"path": "link", "sha256": "0" * 64}, [-1, 0, "f32", [1 << 40]]),
]
WORDS = ("-1", "99999999999", "f64", "i8", "[", "(", "none")
Change = Callable[[random.Random, bytes], bytes]
Take = Callable[[Path], object]


def changed_bytes(pick: random.Random, data: bytes) -> bytes:
    """One to four changes: bits, bytes, whole numbers, parts left out, put in, moved or cut off."""
    made = bytearray(data)
    for _ in range(pick.choice((1, 1, 1, 2, 4))):
        at, size = pick.randrange(len(made) + 1), pick.choice((1, 2, 4, 8, pick.randrange(1, 400)))
        match pick.randrange(8):
            case 0 if at < len(made):
                made[at] ^= 1 << pick.randrange(8)
            case 1:
                made[at : at + size] = pick.randbytes(size)
            case 2:
                value = pick.choice((0, 1, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1))
                made[at : at + 8] = struct.pack("<Q", value)
            case 3:
                del made[at : at + size]
            case 4:
                made[at:at] = pick.randbytes(size)
            case 5:
                start = pick.randrange(len(made) + 1)
                made[at : at + size] = made[start : start + size]
            case 6:
                made[at : at + size] = bytes(size)
            case 7:
                del made[at:]
    return bytes(made)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place (holder, key) in lists and dicts."""
    found: list[tuple[Any, Any]] = []
    parts = [value]
    while parts:
        part = parts.pop()
        keys = list(part) if isinstance(part, dict) else range(len(part))
        for key in keys:
            found.append((part, key))
            if isinstance(part[key], list | dict):
                parts.append(part[key])
    return found


def changed_json(pick: random.Random, value: Any) -> Any:
    """One to three values left out, doubled, exchanged, or something else."""
    made = copy.deepcopy(value)
    for _ in range(pick.choice((1, 1, 2, 3))):
        found = places(made)
        if not found:
            break
        holder, key = pick.choice(found)
        match pick.randrange(4):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[key]))
            case 2:
                other, at = pick.choice(found)
                holder[key] = copy.deepcopy(other[at])
            case _ if isinstance(holder[key], int) and pick.random() < 0.5:
                holder[key] += pick.choice((-1, 1, 64, -64, 1 << 20))
            case _:
                holder[key] = copy.deepcopy(pick.choice(ODD))
    return made


def split_artifact(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of an artifact, and all that follows it."""
    length = struct.unpack_from("<I", data, 12)[0]
    start = container.HEAD.size + length
    return json.loads(data[container.HEAD.size : start]), data[start:]


def whole_artifact(header: Any, sections: list[bytes], arrays: bytes) -> bytes:
    """An artifact with right sums, whatever its header says."""
    text = json.dumps(header).encode()
    starts, first = container._layout([len(body) for body in sections], len(text))
    digest = hashlib.sha256(text).digest()
    made = bytearray(first) + arrays
    head = container.HEAD.pack(container.MAGIC, container.FORMAT, len(text), digest) + text
    made[: len(head)] = head
    for start, body in zip(starts, sections, strict=True):
        made[start : start + len(body)] = body
    return bytes(made)


def parts_of(data: bytes) -> tuple[dict[str, Any], list[bytes], bytes]:
    """Header, sections and arrays."""
    header, _ = split_artifact(data)
    length = struct.unpack_from("<I", data, 12)[0]
    starts, first = container._layout([size for _, size, _ in header["sections"]], length)
    sections = [data[at : at + row[1]] for at, row in zip(starts, header["sections"], strict=True)]
    return header, sections, data[first:]


def changed_header(pick: random.Random, data: bytes) -> bytes:
    """Another header, and the sums as they should be."""
    header, sections, arrays = parts_of(data)
    return whole_artifact(changed_json(pick, header), sections, arrays)


def changed_text(pick: random.Random, data: bytes) -> bytes:
    """Another text of the graph, with words of its own at other places, or other arrays; right sums."""
    header, sections, arrays = parts_of(data)
    names = [row[0] for row in header["sections"]]
    at = names.index("graph")
    if pick.random() < 0.3:
        arrays = changed_bytes(pick, arrays)[: len(arrays)].ljust(len(arrays), b"\0")
        header["arrays_crc32"] = checksum(header, arrays)
    elif pick.random() < 0.5:
        words = sections[at].decode().split(" ")
        for _ in range(pick.choice((1, 1, 2, 3))):
            words[pick.randrange(len(words))] = pick.choice([*words, *WORDS])
        sections[at] = " ".join(words).encode()
    else:
        sections[at] = changed_bytes(pick, sections[at])
    header["sections"][at][1:] = len(sections[at]), zlib.crc32(sections[at])
    return whole_artifact(header, sections, arrays)


def checksum(header: dict[str, Any], arrays: bytes) -> int:
    crc = 0
    for where, start, dtype, shape in header["arrays"]:
        size = int(np.prod(shape)) * rlx.ir.dtype.DTYPES[dtype].numpy.itemsize
        crc = zlib.crc32(arrays[start : start + size], crc) if where == -1 else crc
    return crc


def changed_document(pick: random.Random, data: bytes) -> bytes:
    """A JSON text with other values, or other bytes."""
    if pick.random() < 0.5:
        return changed_bytes(pick, data)
    return json.dumps(changed_json(pick, json.loads(data))).encode()


def small() -> rlx.Graph:
    """Two inputs, a weight and a large constant, a state with a value, and two outputs."""
    g = rlx.Graph("small")
    x = g.input("x", (rlx.Dim("n", 1, 8), 6))
    total = g.state("total", (1, 6), initial=np.arange(6, dtype=np.float32)[None])
    h = rlx.tanh(x @ g.param("w", data=np.eye(6, dtype=np.float32)) + g.constant(np.arange(6, dtype=np.float32)))
    g.update(total, total + rlx.reduce_sum(h, axes=(0,), keepdims=True))
    g.output(h @ g.constant(np.linspace(0, 1, 36).reshape(6, 6).astype(np.float32)), "y")
    g.output(total * 2.0, "z")
    return g


X = np.ones((3, 6), np.float32)


@pytest.fixture(scope="module")
def model() -> rlx.CompiledGraph:
    return rlx.compile(small(), device="cpu", threads=1)


def artifact(model: rlx.CompiledGraph, folder: Path, portable: bool) -> Path:
    path = folder / "m.rlxart"
    model.save(path, portable=portable)
    return path


def portable(model: rlx.CompiledGraph, folder: Path) -> tuple[Path, Take]:
    """With right sums, so that anything may be in it."""

    def take(path: Path) -> object:
        made = rlx.load(path, device="reference", portable_only=True)
        if [(spec.shape[1:], spec.dtype.name) for spec in made.inputs] == [((6,), "f32")]:
            made.run([X])
        return None

    return artifact(model, folder, True), take


def damaged(model: rlx.CompiledGraph, folder: Path) -> tuple[Path, Take]:
    """Damage is found, or was where there is nothing."""
    want = [a.tobytes() for a in rlx.compile(small(), device="reference").run([X])]

    def take(path: Path) -> object:
        made = rlx.load(path, device="reference", portable_only=True)
        assert [a.tobytes() for a in made.run([X])] == want
        return None

    return artifact(model, folder, True), take


def native(model: rlx.CompiledGraph, folder: Path) -> tuple[Path, Take]:
    want = [a.tobytes() for a in model.clone(fresh=True).run([X])]

    def take(path: Path) -> object:
        made = rlx.load(path, device="cpu", threads=1)
        assert [a.tobytes() for a in made.run([X])] == want
        return None

    return artifact(model, folder, False), take


def tables(model: rlx.CompiledGraph, folder: Path) -> tuple[Path, Take]:
    made = model._executable.image(model.compilation.leaves)  # type: ignore[arg-type]
    path = folder / "tables"
    path.write_bytes(made.tables)

    def take(path: Path) -> object:
        makers = image._makers(made.arrays, image.Functions())
        found, _ = read_tables(path.read_bytes(), "Tables", image.SCHEMA, makers)
        assert isinstance(found, image.Tables)
        return None

    return path, take


def entry(model: rlx.CompiledGraph, folder: Path) -> tuple[Path, Take]:
    from rlx.runtime.artifact import store

    path = folder / "entry.rlxart"
    store(model, path, {"key": "entry", "files": []})
    want = [a.tobytes() for a in model.clone(fresh=True).run([X])]

    def take(path: Path) -> object:
        file = container.read_container(path, own=True)
        made = restore(file, rlx.CompileOptions(threads=1), small)
        assert [a.tobytes() for a in made.run([X])] == want
        return None

    return path, take


def states(model: rlx.CompiledGraph, folder: Path) -> tuple[Path, Take]:
    path = folder / "states"
    model.states.save(path)
    target = model.clone(fresh=True)
    return path, target.states.load


def recording(model: rlx.CompiledGraph, folder: Path) -> tuple[Path, Take]:
    path = folder / "recording"
    with model.record(path) as recorder:
        recorder.run([X])
    target = model.clone(fresh=True)
    return path, lambda path: rlx.replay(target, path)


def weights(ending: str) -> Callable[[rlx.CompiledGraph, Path], tuple[Path, Take]]:
    def make(model: rlx.CompiledGraph, folder: Path) -> tuple[Path, Take]:
        path = folder / f"weights{ending}"
        arrays = {"w": np.ones((40, 8), np.float32), "lora": np.arange(12, dtype=np.int64)}
        if ending == ".npz":
            np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
        else:
            rows, body = {}, b""
            for name, array in arrays.items():
                span = [len(body), len(body) + array.nbytes]
                kind = {"f": "F32", "i": "I64"}[array.dtype.kind]
                rows[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": span}
                body += array.tobytes()
            text = json.dumps(rows).encode()
            path.write_bytes(struct.pack("<Q", len(text)) + text + body)

        def take(path: Path) -> object:
            registry = rlx.WeightRegistry()
            for weight in registry.load(path):
                np.asarray(weight.array).sum()
            return None

        return path, take

    return make


def adapter(model: rlx.CompiledGraph, folder: Path) -> tuple[Path, Take]:
    """An adapter's weights from an npz file, put into a graph with room for it."""
    g = rlx.Graph("base")
    g.output(g.input("x", (2, 6)) @ g.param("w", data=np.eye(6, dtype=np.float32)), "y")
    target = rlx.compile(rlx.lora(g, rank=2, slots=1), device="reference")
    path = folder / "adapter.npz"
    np.savez(path, **{"w.lora_a": np.ones((2, 6), np.float32), "w.lora_b": np.ones((6, 2), np.float32)})  # type: ignore[arg-type]

    def take(path: Path) -> object:
        registry = rlx.WeightRegistry()
        registry.load(path)
        target.adapters.put("one", registry)
        return None

    return path, take


def calibration(model: rlx.CompiledGraph, folder: Path) -> tuple[Path, Take]:
    path = folder / "kept.json"
    facts = json.loads(json.dumps(kept.ceilings_of("reference", measure=False).to_dict()))
    write_kept(path, ["key", 1], facts)

    def take(path: Path) -> object:
        found = read_kept(path, ["key", 1])
        try:
            return found and kept.Ceilings.from_dict(found)
        except (
            RlxError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
        ) as error:  # as `kept_ceilings` does
            raise ModelFormatError(str(error)) from error

    return path, take


def config(model: rlx.CompiledGraph, folder: Path) -> tuple[Path, Take]:
    """The config.json beside the weights of a language model."""
    made, _ = weights(".safetensors")(model, folder)
    made.rename(folder / "model.safetensors")
    path = folder / "config.json"
    fields = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 128}
    path.write_text(json.dumps(fields))
    return path, lambda path: rlx.estimate(folder / "model.safetensors", "cpu", context=16, overhead=1)


KINDS: dict[str, tuple[Callable[[rlx.CompiledGraph, Path], tuple[Path, Take]], Change, int]] = {
    "portable": (damaged, changed_bytes, 15_000),
    "portable header": (portable, changed_header, 20_000),
    "portable graph": (portable, changed_text, 12_000),
    "native": (native, changed_bytes, 8_000),
    "tables": (tables, changed_bytes, 10_000),
    "cache entry": (entry, changed_bytes, 5_000),
    "states": (states, changed_bytes, 8_000),
    "recording": (recording, changed_bytes, 6_000),
    "npz": (weights(".npz"), changed_bytes, 4_000),
    "safetensors": (weights(".safetensors"), changed_bytes, 4_000),
    "adapter": (adapter, changed_bytes, 3_000),
    "calibration": (calibration, changed_document, 3_000),
    "config": (config, changed_document, 2_000),
}


def test_the_mutations_are_as_many_as_the_page_says() -> None:
    assert sum(count for _, _, count in KINDS.values()) == 100_000


def open_files() -> list[tuple[str, str]]:
    folder = "/proc/self/fd"
    found = []
    for name in os.listdir(folder):
        try:
            found.append((name, os.readlink(f"{folder}/{name}")))
        except OSError:  # that of the listing itself
            continue
    return sorted(found)


@pytest.fixture
def alarm() -> Iterator[Callable[[int], object]]:
    """Raises `TimeoutError` in this thread after so many seconds."""

    def late(*_: object) -> None:
        raise TimeoutError("hangs")

    before = signal.signal(signal.SIGALRM, late)
    yield signal.alarm
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks at /proc")
@pytest.mark.parametrize("kind", KINDS)
def test_mutations(
    kind: str,
    model: rlx.CompiledGraph,
    tmp_path: Path,
    alarm: Callable[[int], object],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No crash, no hang, no other exception, no gigabytes, no file written, no descriptor opened or closed."""
    assert threading.current_thread() is threading.main_thread()
    make, change, count = KINDS[kind]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, take = make(model, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/etc/passwd")
    whole = path.read_bytes()
    take(path)
    pick = random.Random(f"{request.config.option.seed} {kind}")
    before, files = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, open_files()
    listed = sorted(os.listdir(tmp_path))
    right = 0
    for number in range(count if request.config.option.full else count // QUICK):
        data = change(pick, whole)
        path.write_bytes(data)
        os.chmod(path, 0o600)
        alarm(60)
        try:
            take(path)
            right += 1
        except RlxError:
            pass
        except BaseException as error:
            bad = f"mutation {number} of {kind}"
            raise AssertionError(f"{bad}: {type(error).__name__}: {error}\n{data[:4000]!r}") from error
        alarm(0)
        if number % 100 == 0:
            assert sorted(os.listdir(tmp_path)) == listed
    assert sorted(os.listdir(tmp_path)) == listed
    assert {f for f in open_files() if "rlxart" not in f[1]} == {f for f in files if "rlxart" not in f[1]}
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) << 10 < MOST_MEMORY
    request.node.add_report_section("call", "mutations", f"{kind}: {right} loaded, {number + 1 - right} refused")
