"""Loading a saved model against compiling it: seconds of fresh processes, and whether the results are the same bits.

For each model one process imports the file with an empty cache, compiles it, runs it once and saves an artifact; others
load that artifact and run it once. Both times are from before `import rlx` to the first result; NumPy and the inputs
are there already. The median of the loads is compared with the median of the compiles. (Goal: below 0.3.)

usage: python benchmarks/artifact.py [--folder DIR] [--only WORDS] [--rounds N] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import compileall
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from workloads import chosen

ROOT = Path(__file__).resolve().parents[1]
GOAL = 0.3
NAMES = ("minilm-b1-s128", "resnet50", "mobilenetv2", "audio-lstm", "silero-vad", "basic-pitch")

MEASURE = """
import hashlib, json, sys, time
import numpy as np
path, feed, saved, options = json.loads(sys.argv[1])
with np.load(feed) as file:
    inputs = [file[name] for name in file.files if name.startswith("in")]
start = time.perf_counter()
import rlx
model = rlx.load(path, **options)
outputs = model.run(inputs)
seconds = time.perf_counter() - start
if saved:
    model.save(saved)
print(json.dumps([seconds, hashlib.sha256(b"".join(a.tobytes() for a in outputs)).hexdigest()]))
"""


def start(path: Path, feed: Path, saved: Path | None, threads: int, cache: Path) -> tuple[float, str]:
    """Seconds from `import rlx` to the first result in a fresh process, and a hash of the results."""
    options = {"device": "cpu", "threads": threads, "cache_dir": str(cache)}
    job = json.dumps([str(path), str(feed), str(saved) if saved else None, options])
    done = subprocess.run([sys.executable, "-c", MEASURE, job], capture_output=True, text=True, check=True, cwd=ROOT)
    seconds, digest = json.loads(done.stdout)
    return seconds, digest


def measure(name: str, folder: Path, rounds: int, threads: int) -> dict[str, Any]:
    """One model: compiled and loaded in turn."""
    path, feed = folder / f"{name}.onnx", folder / f"{name}.npz"
    compiled, loaded, digests = list[float](), list[float](), set[str]()
    with tempfile.TemporaryDirectory() as scratch:
        saved = Path(scratch) / "model.rlxart"
        for number in range(rounds):
            for times, source, target in ((compiled, path, saved), (loaded, saved, None)):
                seconds, digest = start(source, feed, target, threads, Path(scratch) / f"cache{number}")
                times.append(seconds)
                digests.add(digest)
        size = saved.stat().st_size
    pair = statistics.median(compiled), statistics.median(loaded)
    return {
        "name": name, "compile_s": pair[0], "load_s": pair[1], "ratio": pair[1] / pair[0], "bytes": size,
        "equal": len(digests) == 1,
    }  # fmt: skip


def main() -> int:
    """Prints a table; exit status 1 if a ratio is not below the goal or results differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "models" / "benchmark", help="made by workloads.py")
    parser.add_argument("--only", default="", help="only models with one of these words (a,b) in their names")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    names = chosen(parser, args.only, NAMES)
    compileall.compile_dir(ROOT / "rlx", quiet=1)  # as an installer does
    rows = []
    print("| model | import + compile + run, s | load + run, s | ratio | MB | equal bits |\n|---|---|---|---|---|---|")
    for name in names:
        row = measure(name, args.folder, args.rounds, args.threads)
        rows.append(row)
        cells = f"{row['compile_s']:.2f} | {row['load_s']:.3f} | {row['ratio']:.2f} | {row['bytes'] / 1e6:.1f}"
        print(f"| {name} | {cells} | {'yes' if row['equal'] else 'NO'} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["ratio"] >= GOAL or not row["equal"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
