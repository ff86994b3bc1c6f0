"""What code the compiler makes, as hashes: a change that should change none, such as moving files, is compared by it.

python tools/kernel_hashes.py TARGET MODEL.onnx ... > before     one line a function of a model's program
python tools/kernel_hashes.py TARGET --cases > before            the same for a graph of all test cases of each op

TARGET is avx2, avx512 or amx: code is made for it, and neither compiled nor run, on any x86-64 machine. A line is the
model, the kernel's number and name, the hash of its IR, and, for 1, 2 and 8 threads, the
number of its chunks and the hash of its arguments and scratch bytes.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.cpu.schedule.arguments import (
    THREADS,
    Argument,
    Computed,
    Extents,
    KernelCode,
    Link,
    Pointer,
    Routine,
    text_of,
)
from rlx.backends.cpu.target import Target
from rlx.compiler import stages_of
from rlx.errors import RlxError
from rlx.importers.onnx import load
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim, evaluate
from rlx.ops.base import OPS
from rlx.options import CompileOptions
from rlx.plan.order import usual_extents
from rlx.testing.cases import cases_of, covered
from rlx.testing.oracle import Batch

VECTORS = "+sse,+sse2,+sse4.2,+avx,+avx2,+fma,+f16c"
WIDE = f"{VECTORS},+avx512f,+avx512bw,+avx512dq,+avx512vl"
TARGETS = {  # features, bytes of a vector, tile registers
    "avx2": (VECTORS, 32, False),
    "avx512": (f"{WIDE},+avx512vnni", 64, False),
    "amx": (f"{WIDE},+avx512vnni,+amx-tile,+amx-bf16,+amx-int8", 64, True),
}
THREAD_COUNTS = (1, 2, 8)
SIZES = ((7, 9), (16, 33))


def target_named(name: str) -> Target:
    """A target, whatever this machine is."""
    features, vector_bytes, tiles = TARGETS[name]
    return Target(name, features, "x86_64-unknown-linux-gnu", vector_bytes, 1, tiles, tiles)


@functools.cache
def hashed(ir: str) -> str:
    """The hash of code, whatever it is named, its values and labels too, and wherever it loads its arguments."""
    lines: list[str] = []
    names: dict[str, str] = {}
    places: dict[str, str] = {"%words": "0"}
    numbers = itertools.count()

    def name_of(found: re.Match[str]) -> str:
        if found[0] not in names:
            names[found[0]] = f"%v{next(numbers)}"
        return names[found[0]]

    for line in re.sub(r"k_[0-9a-f]{20}", "k_", ir).split("\n"):
        if line.startswith("define"):
            names, places, numbers = {}, {"%words": "0"}, itertools.count()
        if found := re.fullmatch(r"  (%v\d+) = getelementptr inbounds i64, ptr %words, i64 (\d+)", line):
            places[found[1]] = found[2]
            continue
        if (found := re.fullmatch(r"  (%v\d+) = load (\w+), ptr (%\w+), align 8", line)) and found[3] in places:
            names[found[1]] = f"%word{places[found[3]]}{found[2]}"
            continue
        lines.append(re.sub(r"%[a-z]+\d+\b", name_of, re.sub(r"^(\w+):", r"%\1:", line)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:20]


def lines_of(graph: Graph, name: str, backend: CpuBackend) -> Iterator[str]:
    """A line for each function of a program."""
    try:
        program = stages_of(graph, backend, CompileOptions(device="cpu")).program
    except RlxError as error:
        yield f"{name} {type(error).__name__}"
        return
    assert program is not None
    extents = usual_extents(program)
    for entry, kernels in (("prepare", program.prepare), ("run", program.run)):
        for number, kernel in enumerate(kernels):
            if kernel.host is not None or kernel.extents is not None:
                yield f"{name} {entry} {number} {kernel.name} host"
                continue
            for code in backend.emit_kernel(kernel):
                runs = (described(code, {**extents, THREADS: count}) for count in THREAD_COUNTS)
                yield f"{name} {entry} {number} {kernel.name} {hashed(code.ir)} {' '.join(runs)}"


def described(code: KernelCode, extents: Extents) -> str:
    text = "\n".join(word_text(word, extents) for word in code.words)
    scratch = code.scratch_bytes(extents)
    return f"{code.chunks(extents)}:{hashlib.sha256(f'{text} {scratch}'.encode()).hexdigest()[:12]}"


def word_text(word: Argument, extents: Extents) -> str:
    """An argument at these extents."""
    match word:
        case Pointer():
            return f"{word.buffer.name}+{evaluate(word.offset, extents)}"
        case Computed():
            return str(word.fn(extents))
        case Routine():
            return hashed(text_of(word))
        case Link():
            return word.what
        case int() | Dim():
            return str(evaluate(word, extents))
    return type(word).__name__


def graphs_of_cases() -> Iterator[tuple[str, Graph]]:
    """For each op the graphs of its test cases, at fixed sizes and at open ones."""
    for name in sorted(OPS):
        if covered(name):
            for sizes in (*SIZES, (Dim("n", 1, 64), Dim("m", 1, 64))):
                yield f"{name} {sizes[0]}x{sizes[1]}", Batch(cases_of(name, *sizes)).graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--cases", action="store_true", help="test cases of all ops too")
    arguments = parser.parse_args()
    backend = CpuBackend(target_named(arguments.target))
    graphs = [(path.stem, load(path)) for path in arguments.models]
    for name, graph in (*graphs, *(graphs_of_cases() if arguments.cases else ())):
        for line in lines_of(graph, name, backend):
            sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
