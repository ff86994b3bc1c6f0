"""Mutated ONNX files: whatever the bytes, the answer is a graph or an error of rlx, soon and in little memory.

A mutation is made from a number: `mutated(seed)` gives the same bytes each time, so a failure is repeated by its seed.
"""

from __future__ import annotations

import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

import onnx
import onnx_node_tests
import pytest

from rlx.errors import RlxError
from rlx.importers.onnx import load, preflight

SECONDS = 10
MEMORY = 4 << 30  # address space on top of what the process has
REAL = (
    "pulsevad-2k",
    "pulsevad-2k-int8",
    "surfaces-neighbors",
    "surfaces-validity",
    "surfaces-boosting",
    "pulsevad-81k",
    "basic-pitch",
    "atspm",
)
PAST = (9017346, 120036879)  # seeds that failed once
INTERESTING = (0, 1, 2, 127, 128, 255, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


@cache
def _synthetic() -> list[bytes]:
    """The models of ONNX's node tests: all ops, subgraphs, functions, sequences, every element type."""
    return [case.model.SerializeToString() for case in onnx_node_tests.cases() if case.model.ByteSize() < 20_000]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _bytes(data: bytearray, rng: random.Random, other: bytes) -> bytearray:
    """One change that knows nothing of the format but its varints."""
    at = rng.randrange(max(len(data), 1))
    match rng.randrange(7):
        case 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        case 1:
            data[at : at + 1] = bytes([data[at] ^ 1 << rng.randrange(8)]) if data else b""
        case 2:
            del data[at:]
        case 3:
            del data[at : at + rng.randrange(1, 40)]
        case 4:
            data[at:at] = _varint(rng.choice(INTERESTING))
        case 5:
            start = rng.randrange(max(len(other), 1))
            data[at:at] = other[start : start + rng.randrange(1, 200)]
        case _:
            data[at:at] = data[at : at + rng.randrange(1, 200)] * rng.randrange(1, 20)
    return data


def _fields(source: bytes, rng: random.Random) -> bytes:
    """One change of a field, so that the file still parses: names, sizes, types, attributes, order."""
    model = onnx.load_from_string(source)
    nodes = list(model.graph.node)
    names = [n for node in nodes for n in (*node.input, *node.output)] or ["x"]
    node = rng.choice(nodes) if nodes else model.graph.node.add(op_type="Relu")
    match rng.randrange(9):
        case 0 if node.input:
            node.input[rng.randrange(len(node.input))] = rng.choice([*names, ""])
        case 1 if node.output:
            node.output[rng.randrange(len(node.output))] = rng.choice([*names, ""])
        case 2 if node.attribute:
            attribute = rng.choice(list(node.attribute))
            attribute.i = rng.choice((-1, 3, 1 << 40, -(1 << 62)))
            for i in range(len(attribute.ints)):
                attribute.ints[i] = rng.choice((-7, 0, 5, 1 << 33))
            attribute.s = rng.choice((b"", b"\xff\xfe", b"linear"))
        case 3 if model.graph.initializer:
            tensor = rng.choice(list(model.graph.initializer))
            tensor.dims[:] = [rng.choice((0, 1, 3, 1 << 20, 1 << 40, -2)) for _ in range(rng.randrange(4))]
        case 4 if model.graph.input:
            shape = rng.choice(list(model.graph.input)).type.tensor_type
            shape.elem_type = rng.randrange(30)
        case 5 if model.graph.input:
            for dim in rng.choice(list(model.graph.input)).type.tensor_type.shape.dim:
                dim.dim_value = rng.choice((-1, 0, 1, 7, 1 << 31, 1 << 60))
        case 6:
            node.op_type = rng.choice(nodes).op_type if nodes else "Loop"
            node.domain = rng.choice(("", "com.microsoft", "ai.onnx.ml", "x"))
        case 7:
            model.opset_import[0].version = rng.choice((0, 6, 7, 11, 13, 18, 23, 28, 1 << 40))
        case _:
            copy = model.graph.node.add()
            copy.CopyFrom(node)
            if copy.output:
                copy.output[0] = f"again{rng.random()}"
    changed: bytes = model.SerializeToString()
    return changed


def mutated(seed: int, real: tuple[bytes, ...]) -> bytes:
    """The file of that number: a real or synthetic model after one to four changes."""
    rng = random.Random(seed)
    source = rng.choice(real) if real and rng.random() < 0.3 else rng.choice(_synthetic())
    if rng.random() < 0.5:
        for _ in range(rng.randrange(1, 4)):
            try:
                source = _fields(source, rng)
            except (ValueError, TypeError):  # the onnx package can't hold such a value
                continue
        return source
    data = bytearray(source)
    for _ in range(rng.randrange(1, 5)):
        data = _bytes(data, rng, rng.choice(_synthetic()))
    return bytes(data)


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """`TimeoutError` after so much processor time (or far more of the clock), `MemoryError` beyond the limit."""

    def late(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError

    old = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, old[1]))
    before = [signal.signal(number, late) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(20 * seconds)  # a wait that takes no time of the processor; a busy machine is no hang
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for number, handler in zip((signal.SIGPROF, signal.SIGALRM), before, strict=True):
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, old)


def _failure(seed: int, real: tuple[bytes, ...]) -> str | None:
    source = mutated(seed, real)
    for what in (preflight, load):
        try:
            with _limited(SECONDS):
                what(source)
        except RlxError:
            continue
        except Exception as error:  # noqa: BLE001 - whatever else comes is the failure looked for
            return f"seed {seed}, {what.__name__}: {type(error).__name__}: {error}"
    return None


@pytest.fixture(scope="module")
def real(model_path: Callable[[str], Path]) -> tuple[bytes, ...]:
    return tuple(model_path(name).read_bytes() for name in REAL)


def _check(seeds: range | tuple[int, ...], real: tuple[bytes, ...]) -> None:
    failures = [f for f in (_failure(seed, real) for seed in seeds) if f]
    assert not failures, "\n".join(failures[:20])


@pytest.mark.models
def test_mutated_files_give_a_graph_or_an_error(real: tuple[bytes, ...], request: pytest.FixtureRequest) -> None:
    """500 files, others every day (or by --seed), and all that failed once."""
    start = int(request.config.getoption("--seed")) * 1000
    _check(range(start, start + 500), real)
    _check(PAST, real)


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.parametrize("part", range(100))
def test_many_mutated_files_give_a_graph_or_an_error(
    part: int, real: tuple[bytes, ...], request: pytest.FixtureRequest
) -> None:
    """200,000 files, in parts of 2,000."""
    start = int(request.config.getoption("--seed")) * 1_000_000 + part * 2000
    _check(range(start, start + 2000), real)
