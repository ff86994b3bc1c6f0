"""Mutates the node tests of the package onnx and tries each file: load, compile, run on the CPU and on the reference.

`python tools/fuzz_onnx.py --files 200000 --processes 16`: every file ends in results, the same on both devices, or in
an error of `rlx.errors`. What else happens is printed with the file's number: another exception, a crash, more than
`--seconds`, other numbers. `--only NUMBER` makes that file again and lets its exception through.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import cache
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx_node_tests import arrays, cases

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import MemoryDeficit, RlxError
from rlx.importers.onnx import load

MEMORY = 6 << 30  # bytes that a process may map beyond what it has at its start
NUMBERS = (
    -(1 << 63),
    -(1 << 31),
    -129,
    -3,
    -2,
    -1,
    0,
    1,
    2,
    3,
    7,
    8,
    17,
    100,
    1 << 16,
    1 << 31,
    1 << 40,
    (1 << 63) - 1,
)
FLOATS = (0.0, -0.0, 0.5, -1.0, 2.0, 1e-30, 1e30, float("inf"), float("nan"))
RANDOM = frozenset((
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
))  # fmt: skip
TOLERANCE = {"float16": 2e-2, "bfloat16": 8e-2}  # of the largest element; else 1e-3


class Warned(logging.Handler):
    """Notes that rlx warned of a kernel that is predicted to take very long."""

    said = False

    def emit(self, record: logging.LogRecord) -> None:
        self.said |= "turns its loops" in record.msg


WARNED = Warned()


@cache
def seeds() -> list[Any]:
    """The node tests whose inputs are arrays."""
    return [c for c in cases() if all(isinstance(a, np.ndarray | np.generic) for a in arrays(c.data_sets[0][0]))]


def mutate_node(rng: random.Random, graph: onnx.GraphProto) -> None:
    """Changes an attribute, an input's name or the type of one node."""
    node = rng.choice(graph.node)
    kind = rng.randrange(6)
    if kind < 3 and node.attribute:
        attribute = rng.choice(node.attribute)
        if attribute.ints:
            attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(NUMBERS)
        elif attribute.HasField("i"):
            attribute.i = rng.choice(NUMBERS)
        elif attribute.HasField("f"):
            attribute.f = rng.choice(FLOATS)
        elif attribute.HasField("s"):
            attribute.s = rng.choice((b"", b"SAME_UPPER", b"linear", b"\xff", attribute.s[:-1]))
        elif attribute.HasField("g"):
            mutate_graph(rng, attribute.g)
        elif rng.random() < 0.5:
            node.attribute.remove(attribute)
    elif kind == 3 and node.input:
        names = [*(i for n in graph.node for i in n.input), *(o for n in graph.node for o in n.output), "", "none"]
        node.input[rng.randrange(len(node.input))] = rng.choice(names)
    elif kind == 4:
        node.op_type = rng.choice(rng.choice(seeds()).model.graph.node).op_type
    elif node.attribute:
        node.attribute[0].name = rng.choice([*(a.name for a in node.attribute), "axis", "axes", "none"])


def mutate_value(rng: random.Random, value: onnx.ValueInfoProto) -> None:
    """Changes an element type, a size or a rank that the file states."""
    tensor = value.type.tensor_type
    if rng.random() < 0.3:
        tensor.elem_type = rng.randrange(25)
    elif tensor.shape.dim and rng.random() < 0.7:
        dim = rng.choice(tensor.shape.dim)
        if rng.random() < 0.5:
            dim.dim_param = rng.choice(("n", "m", "n + m", ""))
        else:
            dim.dim_value = rng.choice(NUMBERS)
    else:
        tensor.shape.dim.add().dim_value = rng.choice(NUMBERS)


def mutate_graph(rng: random.Random, graph: onnx.GraphProto) -> None:
    """Changes one thing of a graph."""
    kind = rng.randrange(8)
    if kind < 5 and graph.node:
        mutate_node(rng, graph)
    elif kind == 5 and graph.input:
        mutate_value(rng, rng.choice(graph.input))
    elif kind == 6 and graph.output:
        mutate_value(rng, rng.choice(graph.output))
    elif graph.initializer:
        tensor = rng.choice(graph.initializer)
        tensor.dims[:] = [rng.choice(NUMBERS) for _ in range(rng.randrange(4))]


def mutate_feed(rng: random.Random, feed: dict[str, Any]) -> None:
    """Changes an input's elements, shape or type."""
    name = rng.choice(sorted(feed))
    array = np.array(feed[name])
    kind = rng.randrange(4)
    with np.errstate(all="ignore"):
        if kind == 0 and array.size and array.dtype.kind in "fiu":
            array.flat[rng.randrange(array.size)] = np.asarray(rng.choice((*NUMBERS[4:12], 0.5))).astype(array.dtype)
        elif kind == 1 and array.ndim:
            array = np.repeat(array, rng.choice((0, 2, 3)), rng.randrange(array.ndim))
        elif kind == 2:
            array = array[None] if rng.random() < 0.5 or not array.ndim else array[0] if len(array) else array
        elif array.dtype.kind in "fiub":
            array = array.astype(rng.choice((np.float32, np.int64, np.uint8, np.float16, np.bool_)))
    feed[name] = array


def file_of(seed: int, number: int) -> tuple[bytes, dict[str, Any], bool]:
    """The bytes of file `number`, arrays for it, and whether an op in it draws random numbers."""
    rng = random.Random(f"{seed} {number}")
    case = rng.choice(seeds())
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    feed = dict(zip((i.name for i in model.graph.input), arrays(case.data_sets[0][0]), strict=False))
    for _ in range(rng.choice((1, 1, 2, 3))):
        mutate_graph(rng, model.graph) if rng.random() < 0.85 or not feed else mutate_feed(rng, feed)
    data = bytearray(model.SerializeToString())
    if rng.random() < 0.15:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.choice((0, 127, 128, 255, rng.randrange(256)))
    return bytes(data), feed, any(n.op_type in RANDOM for n in model.graph.node)


def difference(got: Sequence[Any], expected: Sequence[Any]) -> str | None:
    """Where two runs differ by more than another order of sums explains, or None."""
    if len(got) != len(expected):
        return f"{len(got)} outputs, not {len(expected)}"
    for n, (a, b) in enumerate(zip(map(np.asarray, got), map(np.asarray, expected), strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"output {n}: {a.dtype}{a.shape}, not {b.dtype}{b.shape}"
        x, y = (v.astype(np.complex128 if v.dtype.kind == "c" else np.float64) for v in (a, b))
        scale = float(np.abs(y[np.isfinite(y)]).max(initial=1e-6))
        bound = 1 if a.dtype.kind in "iub" else TOLERANCE.get(a.dtype.name, 1e-3) * scale
        if not np.allclose(x, y, rtol=0, atol=bound, equal_nan=True):
            return f"output {n}: differs by {np.nanmax(np.abs(x - y)):g} of {scale:g}"
    return None


def attempt(seed: int, number: int) -> str:
    """What becomes of one file: "refused", "long" (rlx warns so), "ran", or a line that starts with "FAULT"."""
    data, feed, is_random = file_of(seed, number)
    WARNED.said = False
    try:
        graph = load(data)
        model = rlx.compile(graph, device="cpu", threads=1, budget="2GiB")
    except RlxError:
        return "refused"
    if WARNED.said:
        return "long"
    feed = {k: v for k, v in feed.items() if k in {i.name for i in graph.inputs}}
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refusal = None
        try:
            got = list(model.run(feed))
        except MemoryDeficit:
            return "refused"
        except RlxError as error:
            refusal = str(error)
        try:
            expected = list(run_graph(graph, feed).values())
        except RlxError as error:
            return "refused" if refusal else f"FAULT only the reference refuses: {error}"
    if refusal:
        return f"FAULT only the CPU refuses: {refusal}"
    different = None if is_random else difference(got, expected)
    return f"FAULT {different}" if different else "ran"


def work(seed: int, numbers: range, board: Any, place: int, seconds: int) -> None:
    """Tries files in this process; `board[place]` is the number in hand, so that a crash tells which it was."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    counts: Counter[str] = Counter()
    for number in numbers:
        board[place] = number
        signal.alarm(seconds)
        try:
            result = attempt(seed, number)
        except Exception as error:  # noqa: BLE001 - which class it is, is what is asked
            at = traceback.extract_tb(error.__traceback__)[-1]
            result = f"FAULT {type(error).__name__}: {str(error)[:200]} at {at.filename}:{at.lineno}"
        signal.alarm(0)
        counts[result.split()[0]] += 1
        if result.startswith("FAULT"):
            print(f"{number}: {result}", flush=True)
    print("counts", dict(counts), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=int, default=60, help="a file may take no longer")
    parser.add_argument("--batch", type=int, default=500, help="files a process tries before a fresh one follows it")
    parser.add_argument("--only", type=int, metavar="NUMBER")
    given = parser.parse_args()
    if given.only is not None:
        print(attempt(given.seed, given.only))
        return 0
    logging.getLogger("rlx").addHandler(WARNED)
    logging.getLogger("rlx").propagate = False
    seeds()
    memory = shared_memory.SharedMemory(create=True, size=8 * given.processes)
    board = np.ndarray(given.processes, np.int64, memory.buf)
    left = [range(n, min(n + given.batch, given.files)) for n in range(0, given.files, given.batch)][::-1]
    running: dict[int, tuple[int, range]] = {}
    free = list(range(given.processes))
    start, crashes = time.monotonic(), 0
    while left or running:
        while left and free:
            place, numbers = free.pop(), left.pop()
            if not (pid := os.fork()):
                work(given.seed, numbers, board, place, given.seconds)
                sys.stdout.flush()
                os._exit(0)
            running[pid] = place, numbers
        pid, status = os.wait()
        place, numbers = running.pop(pid)
        free.append(place)
        if status:
            at = int(board[place])
            crashes += 1
            print(f"{at}: FAULT the process ended by status {status}", flush=True)
            if at + 1 < numbers.stop:
                left.append(range(at + 1, numbers.stop))
    print(f"{given.files} files, {crashes} crashes or hangs, {time.monotonic() - start:.0f} s")
    memory.unlink()
    return crashes > 0


if __name__ == "__main__":
    sys.exit(main())
