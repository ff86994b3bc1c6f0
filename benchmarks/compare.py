"""rlx side by side with ONNX Runtime, in one interleaved run of one process.

Each workload is timed in slots that take turns: rlx, ONNX Runtime, rlx, ... A slot starts with a pause, in which the
worker threads of the other runtime stop spinning, and one call that is not counted; then it calls for a while and each
call is timed. rlx is called by `run_slots` (outputs are views, valid until the next run), ONNX Runtime by
`InferenceSession.run` (fresh arrays): the fastest ordinary call of each. The tiny graph also shows `run` of rlx, which
makes fresh arrays. Both get the same number of threads and the same inputs, and their outputs are compared.

usage: python benchmarks/compare.py [--models DIR] [--only WORD] [--threads N] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

import rlx
from rlx.backends import backend_named
from rlx.demo import DIGITS, Digits

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import fetch_models  # noqa: E402

PAUSE = 0.04  # seconds before a slot
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Workload:
    """A model file, its inputs by name, and the call of rlx: "run_slots" or "run"."""

    name: str
    path: Callable[[], Path]
    inputs: Callable[[], Arrays]
    call: str = "run_slots"


@dataclass
class Row:
    """What was measured of one workload, in seconds; `ratio` is how many times as long ONNX Runtime took (medians)."""

    name: str
    rlx: list[float] = field(default_factory=list)
    ort: list[float] = field(default_factory=list)
    compile_s: float = 0.0
    ort_load_s: float = 0.0
    error: float = 0.0  # largest difference of an output over its largest magnitude
    failure: str = ""

    def summary(self) -> dict[str, Any]:
        """The row as JSON values."""
        if self.failure:
            return {"name": self.name, "failure": self.failure}
        facts: dict[str, Any] = {"name": self.name}
        for who, taken in (("rlx", self.rlx), ("ort", self.ort)):
            facts[who] = {"median": quantile(taken, 0.5), "p25": quantile(taken, 0.25), "calls": len(taken)}
        facts["ratio"] = facts["ort"]["median"] / facts["rlx"]["median"]
        return {**facts, "compile_s": self.compile_s, "ort_load_s": self.ort_load_s, "error": self.error}


def quantile(taken: list[float], q: float) -> float:
    """A quantile of call times."""
    return float(np.quantile(taken, q))


def workloads(models: Path, scratch: Path) -> list[Workload]:
    """What is measured; inputs are random where values do not matter."""
    rng = np.random.default_rng(0)

    def real(name: str) -> Callable[[], Path]:
        return lambda: fetch_models.fetch(models, [name])[name]

    def floats(name: str, *shape: int) -> Callable[[], Arrays]:
        return lambda: {name: rng.standard_normal(shape, dtype=np.float32)}

    def tokens(length: int) -> Callable[[], Arrays]:
        shape = (1, length)
        return lambda: {
            "input_ids": rng.integers(1000, 30000, shape),
            "attention_mask": np.ones(shape, np.int64),
            "token_type_ids": np.zeros(shape, np.int64),
        }

    def content() -> Arrays:
        return {"bytes": rng.integers(0, 256, (1, 2048)).astype(np.int32)}

    def tiny() -> Path:
        return write_tiny(scratch / "tiny.onnx")

    return [
        Workload("MiniLM int8 1x16", real("minilm-int8"), tokens(16)),
        Workload("MiniLM int8 1x128", real("minilm-int8"), tokens(128)),
        Workload("Magika", real("magika"), content),
        Workload("PP-OCRv4 recogniser 48x320", real("ppocrv4-rec"), floats("x", 1, 3, 48, 320)),
        Workload("PP-OCRv4 detector 640x640", real("ppocrv4-det"), floats("x", 1, 3, 640, 640)),
        Workload("PulseVAD 2.1k", real("pulsevad-2k"), floats("log_mel", 1, 64, 21)),
        Workload("digits 1", lambda: DIGITS, lambda: {"image": Digits.load().images[:1]}),
        Workload("digits 360", lambda: DIGITS, lambda: {"image": Digits.load().images}),
        Workload("tiny graph, run_slots", tiny, floats("x", 8)),
        Workload("tiny graph, run", tiny, floats("x", 8), call="run"),
    ]


def write_tiny(path: Path) -> Path:
    """relu(x) of 8 numbers: what a call costs."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [8])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "tiny", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, path)
    return path


def measure(work: Workload, threads: int, rounds: int, slot: float) -> Row:
    """Compiles for both runtimes, compares their outputs, and times them in turn."""
    row = Row(work.name)
    path, inputs = work.path(), dict(work.inputs())

    start = time.perf_counter()
    model = rlx.load(path, device="cpu", threads=threads)
    arrays = [inputs[spec.name] for spec in model.inputs]
    got = [a.copy() for a in model.run_slots(*arrays)]
    row.compile_s = time.perf_counter() - start

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
    start = time.perf_counter()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [spec.name for spec in model.outputs]
    expected = session.run(names, inputs)
    row.ort_load_s = time.perf_counter() - start

    row.error = max(difference(a, b) for a, b in zip(got, expected, strict=True))
    ours: Callable[[], object] = lambda: model.run(arrays)  # noqa: E731
    if work.call == "run_slots":
        run_slots = model.run_slots
        ours = lambda: run_slots(*arrays)  # noqa: E731
    theirs = lambda: session.run(names, inputs)  # noqa: E731
    for _ in range(rounds):
        row.rlx += time_slot(ours, slot)
        row.ort += time_slot(theirs, slot)
    return row


def time_slot(call: Callable[[], object], seconds: float) -> list[float]:
    """Seconds of each call in one slot; at least 5 calls."""
    time.sleep(PAUSE)
    call()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return taken


def difference(got: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest difference over the largest magnitude; infinite where shapes or NaNs differ."""
    if got.shape != expected.shape or not np.array_equal(np.isnan(got), np.isnan(expected)):
        return float("inf")
    wide, wide_expected = np.nan_to_num(got.astype(np.float64)), np.nan_to_num(expected.astype(np.float64))
    return float(np.abs(wide - wide_expected).max(initial=0) / (np.abs(wide_expected).max(initial=0) or 1))


def time_text(seconds: float) -> str:
    """Seconds as ms, or us below one."""
    return f"{1e3 * seconds:.3f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.2f} us"


TITLES = " ".join(f"{title:>12}" for title in ("rlx median", "p25", "ort median", "p25"))
HEAD = f"{'workload':28} {TITLES} {'ort/rlx':>8} {'error':>8} {'compile':>9}"


def line_of(facts: dict[str, Any]) -> str:
    """One row of the table."""
    if "failure" in facts:
        return f"{facts['name']:28} failed: {facts['failure']}"
    times = [time_text(facts[who][what]) for who in ("rlx", "ort") for what in ("median", "p25")]
    cells = " ".join(f"{text:>12}" for text in times)
    return f"{facts['name']:28} {cells} {facts['ratio']:8.2f} {facts['error']:8.1e} {facts['compile_s']:7.2f} s"


def main() -> int:
    """Prints the table row by row; exit status 1 if a workload failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="folder of the real models")
    parser.add_argument("--only", default="", help="only workloads with this word in their name")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=10, help="slots of each runtime")
    parser.add_argument("--slot", type=float, default=0.15, help="seconds of a slot")
    parser.add_argument("--json", type=Path, help="also write everything there")
    args = parser.parse_args()

    machine = {
        "device": backend_named("cpu").available().reason,
        "python": platform.python_version(),
        "rlx": rlx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "threads": args.threads,
    }
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(HEAD)
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for work in workloads(args.models, Path(scratch)):
            if args.only.lower() not in work.name.lower():
                continue
            try:
                row = measure(work, args.threads, args.rounds, args.slot)
            except Exception as error:  # noqa: BLE001 - one that fails must not hide the others
                row = Row(work.name, failure=f"{type(error).__name__}: {error}")
            results.append(row.summary())
            print(line_of(results[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "rows": results}, indent=1) + "\n")
    return int(any("failure" in facts for facts in results))


if __name__ == "__main__":
    sys.exit(main())
