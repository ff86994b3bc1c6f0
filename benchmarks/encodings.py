"""Products with weights in the formats that files have, of few rows and many, against what the machine gives.

python benchmarks/encodings.py [--formats q8_0,q4_k] [--precision q8] [--threads 1,2] [--ggml FOLDER] [--onnxruntime]

For each format and number of threads, all in turn in one process: the bytes of weights that one row reads a second, as
a share of a loop that only reads; the time of 2, 4 and 8 rows by that of one; the operations a second of 128 and 512
rows, as a share of the instruction's peak, and by the rate of f32. With peers, how many times as fast one row and
many rows are. f16 and bf16 are multiplied in f32 unless the precision is bf16. `below` names what misses its goal:
one row 0.90 of the loop (f16, bf16, q8_0) or 0.85; 2 rows 1.15, 4 rows 1.3, 8 rows 1.3 or the time at 70 % of the peak
if that is more; many rows 1.2 times as fast as the best peer, f16 and bf16 0.95 of f32 (with bf16 1.5).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import ggml
from peaks import CHAINS, Peaks, best

import rlx
from rlx.ir.dtype import DTYPES
from rlx.ir.encoding import encoding_named

FORMATS = "f16,bf16,q8_0,q4_0,q4_1,q5_0,q4_k,q5_k,q6_k,mxfp4,iq4_nl,q3_k,q2_k"
NARROW = ("f16", "bf16")
FEW, MANY, K, COLUMNS = (1, 2, 4, 8), (128, 512), 4096, 4096
GOALS = {2: 1.15, 4: 1.3, 8: 1.3}
STEPS = 2_000_000  # of a loop that measures a peak
RNG = np.random.default_rng(0)
Run = Callable[[], object]


@dataclass
class Row:
    """What was measured of a format: seconds, medians by rows, and of the peers by their names."""

    format: str
    threads: int
    precision: str
    nbytes: int
    columns: int
    read: float  # bytes a second
    peak: float  # operations a second
    few: dict[int, float]
    many: dict[int, float]
    f32: dict[int, float]
    peers: dict[str, dict[int, float]] = field(default_factory=dict)

    @property
    def share(self) -> float:
        return self.nbytes / self.few[1] / self.read

    def misses(self) -> list[str]:
        """The goals that it misses, with what was reached."""
        found = []
        if self.share < (0.9 if self.format in (*NARROW, "q8_0") else 0.85):
            found.append(f"one row {self.share:.2f}")
        for rows, goal in GOALS.items():
            most = goal * self.few[1]
            if rows == 8:
                most = max(most, 2 * rows * K * self.columns / (0.7 * self.peak))
            if self.few[rows] > most:
                found.append(f"{rows} rows {self.few[rows] / self.few[1]:.2f}, not {most / self.few[1]:.2f}")
        for rows, seconds in self.many.items():
            quickest = min((times[rows] for times in self.peers.values()), default=np.inf)
            if quickest < 1.2 * seconds:
                found.append(f"{rows} rows {quickest / seconds:.2f} of a peer")
            least = 1.5 if self.precision == "bf16" else 0.95
            if self.format in NARROW and self.f32[rows] < least * seconds:
                found.append(f"{rows} rows {self.f32[rows] / seconds:.2f} of f32")
        return found

    def __str__(self) -> str:
        few = " ".join(f"{self.few[rows] / self.few[1]:5.2f}" for rows in FEW[1:])
        rates = [2 * rows * K * COLUMNS / seconds for rows, seconds in self.many.items()]
        many = " ".join(
            f"{rate / 1e9:6.0f} ({rate / self.peak:4.0%}, {self.f32[rows] / self.many[rows]:4.2f}x)"
            for rows, rate in zip(self.many, rates, strict=True)
        )
        peers = "".join(
            f" | {name} " + " ".join(f"{times[rows] / {**self.few, **self.many}[rows]:.2f}" for rows in times)
            for name, times in self.peers.items()
        )
        below = f"  below: {'; '.join(self.misses())}" if self.misses() else ""
        gbs = f"{self.nbytes / self.few[1] / 1e9:5.1f} of {self.read / 1e9:5.1f} GB/s {self.share:4.0%}"
        return f"{self.format:7s} {self.threads} {gbs} | {few} | {many}{peers}{below}"


def weights(kind: str, columns: int) -> Any:
    """The bytes or elements of [columns, K] in a format: 16 rows again and again."""
    values = RNG.standard_normal((16, K)).astype(np.float32)
    if kind in (*NARROW, "f32"):
        return np.resize(values.astype(DTYPES[kind].numpy), (columns, K))
    encoding = encoding_named(kind)
    rows = np.asarray(encoding.encode(values)).view(np.uint8).ravel()
    return np.resize(rows, encoding.nbytes((columns, K)))


def ours(kind: str, data: Any, columns: int, precision: Any, threads: int) -> rlx.CompiledGraph:
    """x @ w.T of any number of rows."""
    g = rlx.Graph("product")
    x = g.input("x", (rlx.Dim("rows", 1, max(MANY)), K))
    if kind in (*NARROW, "f32"):
        w = rlx.cast(g.param("w", (columns, K), dtype=kind, data=data), "f32")
    else:
        w = g.param("w", (columns, K), encoding=kind, data=data)
    g.output(x @ w.T, "y")
    return rlx.compile(g, device="cpu", precision=precision, threads=threads, cache=False)


def onnx_product(kind: str, columns: int, threads: int) -> Any:
    """A session of onnxruntime with MatMulNBits of 8 or 4 bits in blocks of 32, which rounds activations to bytes."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    bits = {"q8_0": 8, "q4_0": 4}[kind]
    blob = RNG.integers(0, 256, (columns, K // 32, 32 * bits // 8)).astype(np.uint8)
    scales = RNG.uniform(0.01, 0.02, (columns, K // 32)).astype(np.float32)
    held = [numpy_helper.from_array(blob, "b"), numpy_helper.from_array(scales, "s")]
    names: dict[str, Any] = {"K": K, "N": columns, "bits": bits, "block_size": 32, "accuracy_level": 4}
    node = helper.make_node("MatMulNBits", ["x", "b", "s"], ["y"], domain="com.microsoft", **names)
    ends = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", size]) for n, size in (("x", K), ("y", columns))
    ]
    graph = helper.make_graph([node], "product", ends[:1], ends[1:], held)
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    model = helper.make_model(graph, opset_imports=sets, ir_version=10).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def in_turn(runs: dict[Any, Run], rounds: int) -> dict[Any, float]:
    """The median seconds of each, one call after another; the first of each round is not counted."""
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            run()
            for _ in range(2):
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


class Machine:
    """What it gives to so many threads: bytes read a second, and operations by the type that they are in."""

    def __init__(self, threads: int) -> None:
        self.threads, self.peaks = threads, Peaks()
        self.memory = np.ones(1 << 27, np.float32)
        self.start = self.memory.ctypes.data + (-self.memory.ctypes.data) % 64

    def read(self) -> None:
        """Reads all of a large part of memory."""
        best(self.peaks.read, [(self.start + i * self.part, self.steps) for i in range(self.threads)], 1)

    @property
    def steps(self) -> int:
        return int(self.memory.nbytes - 64) // self.threads // (CHAINS * self.peaks.width * 4)

    @property
    def part(self) -> int:
        return self.steps * CHAINS * self.peaks.width * 4

    def peak(self, kind: str) -> float:
        loop, count = self.peaks.products.get(kind, self.peaks.products["f32"])
        seconds = best(loop, [(self.start, STEPS)] * self.threads, 5)
        return self.threads * STEPS * CHAINS * self.peaks.width * count / seconds


def measured(kind: str, machine: Machine, arguments: argparse.Namespace) -> Row:
    """One format: few rows of weights far beyond caches, many of fewer columns."""
    precision, threads = arguments.precision, machine.threads
    if kind in NARROW and precision == "q8":
        precision = "f32"
    bits = DTYPES[kind].bits if kind in NARROW else 8 * encoding_named(kind).block_bytes / encoding_named(kind).block
    columns = int(arguments.megabytes * 8e6 / bits / K) // 64 * 64
    large, small = weights(kind, columns), weights(kind, COLUMNS)
    rows = {n: RNG.standard_normal((n, K)).astype(np.float32) for n in (*FEW, *MANY)}
    long, short = (ours(kind, data, n, precision, threads) for data, n in ((large, columns), (small, COLUMNS)))
    wide = ours("f32", weights("f32", COLUMNS), COLUMNS, "f32", threads)
    peers: dict[str, dict[int, Run]] = {}
    made = []
    if arguments.ggml and kind in ggml.TYPES:
        library = ggml.load(arguments.ggml)
        for n in (1, *MANY):
            data, size = (large, columns) if n == 1 else (small, COLUMNS)
            product = ggml.GgmlProduct(library, kind, (n, K, size), data, threads)
            made.append(product)
            peers.setdefault(f"ggml ({product.how})", {})[n] = partial(product, rows[n])
    if arguments.onnxruntime and kind in ("q8_0", "q4_0"):
        sessions = onnx_product(kind, columns, threads), onnx_product(kind, COLUMNS, threads)
        for n in (1, *MANY):
            session = sessions[n in MANY]
            peers.setdefault("onnxruntime", {})[n] = partial(session.run, None, {"x": rows[n]})
    few: dict[Any, Run] = {"read": machine.read}
    few |= {n: partial(long.run_slots, rows[n]) for n in FEW}
    few |= {(name, 1): runs[1] for name, runs in peers.items()}
    many: dict[Any, Run] = {n: partial(short.run_slots, rows[n]) for n in MANY}
    many |= {("f32", n): partial(wide.run_slots, rows[n]) for n in MANY}
    many |= {(name, n): runs[n] for name, runs in peers.items() for n in MANY}
    times, others = in_turn(few, arguments.rounds), in_turn(many, max(arguments.rounds // 2, 2))
    for product in made:
        product.close()
    return Row(
        kind,
        threads,
        precision,
        large.nbytes,
        columns,
        machine.part * threads / times["read"],
        machine.peak({"q8": "i8", "bf16": "bf16"}.get(precision, "f32")),
        {n: times[n] for n in FEW},
        {n: others[n] for n in MANY},
        {n: others["f32", n] for n in MANY},
        {name: {1: times[name, 1], **{n: others[name, n] for n in MANY}} for name in peers},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--precision", default="q8", choices=["f32", "q8", "bf16"])
    parser.add_argument("--threads", default="1,2", help="numbers of threads")
    parser.add_argument("--megabytes", type=float, default=100, help="of weights that few rows read")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--ggml", help="the folder of ggml's libraries, built for this machine")
    parser.add_argument("--onnxruntime", action="store_true", help="MatMulNBits beside q8_0 and q4_0")
    parser.add_argument("--json", type=Path, help="where the rows go too")
    arguments = parser.parse_args()
    print(f"format  t one row, share of read      | rows {FEW[1:]} by one | Gop/s of {MANY} (of peak, by f32) | peers")
    found = []
    for threads in map(int, arguments.threads.split(",")):
        machine = Machine(threads)
        for kind in arguments.formats.split(","):
            found.append(measured(kind, machine, arguments))
            print(found[-1], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in found], indent=1))


if __name__ == "__main__":
    main()
