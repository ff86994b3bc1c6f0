"""Where rlx is slow: every ONNX op over sizes, ranks, dtypes and attributes, beside onnxruntime, NumPy or SciPy.

The points of an op (folder cliff_cases) are its usual values, each other value of each parameter, and random ones. Each
is timed on one thread beside onnxruntime, or NumPy or SciPy where it has no kernel or they are faster, in turn.
Printed are ratios (the peer's time over ours) below 0.8; jumps, where time per unit of work is more than 3 times
that at the neighbouring value of a parameter; what rlx refused; and the slowest compiles. The order of the points
depends on the seed only: each op's first point, then each op's second, until the time is up.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from cliff_cases import CASES, NUMPY, SCIPY, Array, Net, Pick, Value
from peers import calls, error_of

RATIO, JUMP = 0.8, 3.0
GROWN = 1.15  # times a ratio before from which on a point counts as mended
LEAST = 20e-6  # seconds: below, a run's fixed costs hide what its work takes
LIMIT = 60.0  # seconds that one point may take, compiling included
RANDOM = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial")
Row = dict[str, Any]

# Why the slow ops of the table are slow, where that is known.
F64 = "f64, by longer polynomials and quotients"
COPIED = "a run's fixed costs, or results below 512 KiB: those are copied from the arena"
SHORT_ROWS = "rows that are shorter than a vector, or end within one"
EXP = "e^x within 1 ulp and down to subnormal results, some instructions more than theirs"
REASONS = {
    **dict.fromkeys(("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cosh", "Sinh"), F64),
    **dict.fromkeys(("Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Slice", "Split"), COPIED),
    **dict.fromkeys(("AveragePool", "MaxPool"), SHORT_ROWS),
    **dict.fromkeys(("Ceil", "Cos", "Log", "Reciprocal", "Sqrt"), "bf16, of 256 elements: a run's fixed costs"),
    **dict.fromkeys(("And", "Or", "Xor"), "a byte is compared with 0 and made 0 or 1 again"),
    **dict.fromkeys(("LessOrEqual", "ReduceMax", "ReduceMin"), "as fast as L2 and L3 are read, which NaN and -0 cost"),
    **dict.fromkeys(("Concat", "Upsample", "Transpose", "RotaryEmbedding"), COPIED),
    **dict.fromkeys(("Exp", "LogSoftmax", "Sigmoid", "Softmax"), EXP),
    "AffineGrid": "in three dimensions: the last axis has three elements, too few for vectors",
    "ArrayFeatureExtractor": "columns at any places: element by element, where a step of two was known",
    "CastLike": "f32 to i64: NaN and what is beyond i64 is defined; theirs is not",
    "Col2Im": "sums of windows, which are few elements a row",
    **dict.fromkeys(("Conv", "FusedConv"), "few channels, whose columns with gaps between them are copied one by one"),
    "ConstantOfShape": "a result whose size the data decide is copied from the arena",
    "ConvTranspose": "results are put between each other by a copy; of few outputs that is most of the time",
    "CumProd": "along an axis that is not the last: a column at a time",
    "CumSum": "along an axis that is not the last: a column at a time",
    "Div": "i64: there is no instruction for vectors, and f64 does not hold them",
    "DeformConv": "an image of 8 columns is half a vector wide",
    "DynamicQuantizeLinear": "the smallest and the largest element in two passes over x",
    "DynamicQuantizeLSTM": "functions are f64, rounded once",
    "EyeLike": "as fast as memory is cleared",
    "Hardmax": "a row is read for its largest element, then written",
    "MaxUnpool": "results are cleared, then written one by one",
    "MaxRoiPool": "bins of few elements: their ends and a test for NaN for each",
    "NonMaxSuppression": "classes one after the other, each sorted whole",
    "OneHotEncoder": "a comparison for each category",
    "Pad": "each element tests its index on every axis that is padded",
    "QLinearConcat": "each element is scaled anew, one part after the other",
    "QLinearConv": "few channels: each row of a window ends in a vector that is not full",
    "QLinearSigmoid": "computed in f32; onnxruntime looks up one of 256 results",
    "Resize": "every other byte, one by one",
    "SpaceToDepth": "results are read from places far apart, an element each",
    "Tile": "repeated rows of few elements: a division for each",
    "TreeEnsembleClassifier": "few rows: trees are walked row by row",
    "TopK": "rows in the worst order, each better than all before it; half of a row and more is sorted whole",
    "Unique": "a sort by bytes, where onnxruntime keeps few values in a tree",
}
PAGE = """# Where rlx is slow

Written by `python benchmarks/cliffs.py --read ROWS --before ROWS --page docs/cliffs.md` from sweeps of {minutes:g}
minutes (seed {seed}) with nothing else on the machine ({machine}). One thread, medians of slots in turn; ratios are the
peer's time over ours. The usual point of an op has mostly {sizes} elements, the others differ from it in one parameter,
or are random. A single point may be off: measure a row again before trusting it.

What had been the worst rows and was mended: Range and whatever else has a size that data decide (native code compares
the number with the size of the run before, and the host is asked only where it differs); LabelEncoder; DeformConv (a
product of what its taps see); Upsample and Resize, GridSample, RotaryEmbedding, DepthToSpace, AffineGrid (elements
that are repeated, exchanged or put between each other are shuffled, and channels share the places at which they are
sampled); convolutions whose results are planes, worst where a plane is a multiple of 4 KiB, those in groups and of
f16 (by transforms, and as products where windows are single pixels), in three axes, and with gaps; ConvTranspose;
ArgMax; DynamicQuantizeLSTM; copies and elementwise ops of 0.5 MiB and more (results are written where the caller gets
them). Then: Unique, TfIdfVectorizer and LabelEncoder with sparse keys had no native code; Multinomial drew by a
logarithm for each class and draw; rows that are shorter than a vector were reduced one by one (now in vectors across
rows); TopK made a histogram of every row; integers were divided one by one (now by floats, exactly); matrix x vector
of a run's operands waited for one chain of fma in L2 and L3; an image that several convolutions read, as the phases of
a ConvTranspose do, was copied for each; loads of padding far outside of an image, which load nothing, went to pages
that are not mapped (LRN, Pad); convolutions of single pixels in small groups were brought into another layout. Then:
rows that are only copied went vector by vector (Tile, Reshape, Flatten and the like: the C library copies long ones);
each element of a triangle, or beside one that is padded, compared its indices (rows are split where the test changes).

## Other values than onnxruntime's

- ReduceProd and Pow of integers: a product beyond the type wraps, as in NumPy and the onnx package's reference;
  onnxruntime computes in f64 and gives the largest integer. The specification says nothing.
- MaxRoiPool: bins are cut in whole numbers; onnxruntime's size of a bin is an f32, and a bin may reach an element
  further (one box of 100 in the sweep).
- DynamicQuantizeLSTM: the state is rounded to 8 bits in each step. A function that differs in its last bit, as
  onnxruntime's approximations do, moves a state by a whole step now and then. Ours are f64, rounded once.
  DynamicQuantizeMatMul gives the same numbers.
- Resize of i8 with antialias: onnxruntime gives nothing below 0; ours are the onnx package's reference's within 1.
- TopK with sorted = 0: the order is free; ours are sorted.

"""


def onnxruntime_run(model: bytes, inputs: Mapping[str, Array]) -> Callable[[], Any]:
    """A call of onnxruntime on one thread; raises what it raises for models that it can't run."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = 1, 1, 4
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, inputs)


def of_arrays(op: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions of NumPy and, where it is installed, SciPy that compute an op."""
    if op in NUMPY:
        yield "numpy", NUMPY[op]
    if op in SCIPY and importlib.util.find_spec("scipy"):
        yield "scipy", getattr(importlib.import_module("scipy.special"), SCIPY[op])


def peers_of(op: str, made: Net, model: bytes, row: Row) -> dict[str, Callable[[], Any]]:
    """Calls of those that compute the same; why onnxruntime does not is noted in the row."""
    found: dict[str, Callable[[], Any]] = {}
    try:
        run = onnxruntime_run(model, made.inputs)
        run()
        found["onnxruntime"] = run
    except Exception as error:  # noqa: BLE001 - it says in many ways that it has no kernel
        row["no_onnxruntime"] = str(error)[:200]
    for name, function in () if found else of_arrays(op):
        call = partial(function, *made.inputs.values())
        try:
            call()
        except TypeError:  # of a type that it does not know
            continue
        found[name] = call
    if made.other is not None:
        found["numpy"] = made.other
    return found


def measure(op: str, values: Mapping[str, Value], seed: int, odd: bool, folder: Path) -> Row:
    """The row of one point; `folder` is for its file and the compiled code."""
    import rlx

    row: Row = {"op": op, "values": dict(values), "odd": odd}
    case = CASES[op]
    made = case.make(Pick(op, values, seed, odd))
    path, inputs = folder / "net.onnx", list(made.inputs.values())
    path.write_bytes(made.model(case.opset))
    others = peers_of(op, made, path.read_bytes(), row)
    begin = time.perf_counter()
    try:
        compiled = rlx.load(path, device="cpu", threads=1, cache_dir=folder / "cache")
        got = list(compiled.run(inputs))
    except rlx.errors.RlxError as error:
        return {**row, "refused": str(error)[:200], "peer": next(iter(others), None)}
    row["compile_s"] = time.perf_counter() - begin
    row["work"] = made.work or sum(np.size(a) for a in [*inputs, *got])
    if "onnxruntime" in others and op not in RANDOM:
        row["error"] = error_of(got, others["onnxruntime"]())
    runs = {"rlx": lambda: compiled.run(inputs), **others}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    while len(taken["rlx"]) < 3 or (len(taken["rlx"]) < 9 and time.perf_counter() - begin < 1):
        for name, run in runs.items():
            taken[name].append(min(calls(run, 0.004, 1)))
    row["ours"] = statistics.median(taken["rlx"])
    if others:
        row["peer"] = min(others, key=lambda name: statistics.median(taken[name]))
        row["theirs"] = statistics.median(taken[row["peer"]])
        row["ratio"] = statistics.median(b / a for a, b in zip(taken["rlx"], taken[row["peer"]], strict=True))
    return row


def work(pipe: Connection, folder: Path) -> None:
    """A process that measures the points it is sent."""
    while True:
        try:
            op, values, seed, odd = pipe.recv()
        except EOFError:
            return
        try:
            row = measure(op, values, seed, odd, folder)
        except Exception as error:  # noqa: BLE001 - one point that fails must not hide the others
            row = {"op": op, "values": values, "odd": odd, "failed": f"{type(error).__name__}: {error}"[:200]}
        pipe.send(row)


class Worker:
    """That process; another one where a point takes too long or ends it."""

    def __init__(self, folder: Path) -> None:
        self.process: Any = None
        self.folder = folder

    def row(self, point: tuple[str, dict[str, Value], int, bool]) -> Row:
        """What it measured of a point."""
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=work, args=(theirs, self.folder), daemon=True)
            self.process.start()
            theirs.close()
        self.pipe.send(point)
        why = f"no answer after {LIMIT:.0f} s"
        if self.pipe.poll(LIMIT):
            try:
                row: Row = self.pipe.recv()
                return row
            except EOFError:
                why = "the process ended"
        self.end()
        return {"op": point[0], "values": point[1], "odd": point[3], "failed": why}

    def end(self) -> None:
        """Ends it."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def order(ops: Sequence[str], seed: int, random: int) -> Iterator[tuple[str, dict[str, Value], int, bool]]:
    """The points of a sweep: the first of each op, the second of each op, and so on."""
    rng = np.random.default_rng(seed)
    waiting = {}
    for op in ops:
        usual, *rest = CASES[op].points(seed, random)
        rng.shuffle(rest)
        waiting[op] = [usual, *rest]
    while waiting:
        for op in list(waiting):
            values, odd = waiting[op].pop(0)
            yield op, values, seed, odd
            if not waiting[op]:
                del waiting[op]


def sweep(ops: Sequence[str], seed: int, random: int, minutes: float) -> list[Row]:
    """The rows of as many points as can be measured in that time."""
    rows: list[Row] = []
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker(Path(folder))
        try:
            for point in order(ops, seed, random):
                if time.monotonic() > end:
                    print(f"{len(rows)} points; the time is up", file=sys.stderr)
                    break
                rows.append(worker.row(point))
                if len(rows) % 100 == 0:
                    print(f"{len(rows)} points", file=sys.stderr, flush=True)
        finally:
            worker.end()
    return rows


def jumps(rows: Sequence[Row]) -> list[Row]:
    """Where time per unit of work grows by more than `JUMP` from one value of a parameter to the next, the worst first.

    Numbers are compared with the next smaller one, words with the usual one. `peers` is what it grows by with the peer.
    """
    at = {(row["op"], tuple(row["values"].items())): row for row in rows if "ours" in row and not row["odd"]}
    found = []
    for op in dict.fromkeys(row["op"] for row in rows):
        usual = CASES[op].usual
        for name, values in CASES[op].choices.items():
            numbers = sorted(set(values)) if all(isinstance(v, int | float) for v in values) else []
            pairs = list(pairwise(numbers)) if numbers else [(values[0], v) for v in values[1:]]
            for before, after in pairs:
                low, high = (at.get((op, tuple({**usual, name: v}.items()))) for v in (before, after))
                if low is None or high is None or high["ours"] < LEAST:
                    continue
                grown = high["ours"] / max(low["ours"], LEAST / 4) * low["work"] / high["work"]
                if grown > JUMP:
                    both = "theirs" in low and "theirs" in high
                    peers = high["theirs"] / low["theirs"] * low["work"] / high["work"] if both else None
                    found.append(
                        {**high, "name": name, "before": before, "after": after, "grown": grown, "peers": peers}
                    )
    return sorted(found, key=lambda row: -row["grown"] / (row["peers"] or 1))


def said(row: Row) -> str:
    """The values of a point that are not the usual ones."""
    usual = CASES[row["op"]].usual
    shown = row["values"] if row["odd"] else {k: v for k, v in row["values"].items() if v != usual[k]}
    return ", ".join(f"{k} {v}" for k, v in shown.items()) or "usual"


def milliseconds(seconds: float) -> str:
    """Three digits."""
    return f"{1e3 * seconds:.3g}"


def table(rows: Sequence[Row]) -> str:
    """Ratios below `RATIO`, the worst point of each op first, as Markdown."""
    slow = sorted((row for row in rows if row.get("ratio", 1) < RATIO), key=lambda row: row["ratio"])
    counts = {op: sum(row["op"] == op for row in slow) for op in {row["op"] for row in slow}}
    all_of = {op: sum(row["op"] == op and "ratio" in row for row in rows) for op in counts}
    out = ["| op | slower at | worst at | ours, ms | peer, ms | peer | ratio | why |", "|---" * 8 + "|"]
    for op in dict.fromkeys(row["op"] for row in slow):
        row = next(r for r in slow if r["op"] == op)
        why = REASONS.get(op.rpartition(".")[2], "not looked into")
        cells = [
            op,
            f"{counts[op]} of {all_of[op]} points",
            said(row),
            *map(milliseconds, (row["ours"], row["theirs"])),
        ]
        out.append(f"| {' | '.join(cells)} | {row['peer']} | {row['ratio']:.2f} | {why} |")
    return "\n".join(out)


def point(row: Row) -> str:
    """What tells a point from others."""
    return json.dumps([row["op"], sorted(row["values"].items()), row["odd"]])


def joined(earlier: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """The rows of an earlier sweep, those of points that were measured again in the place of theirs."""
    again = {point(row) for row in rows}
    return [*(row for row in earlier if point(row) not in again), *rows]


def compared(earlier: Sequence[Row], rows: Sequence[Row]) -> str:
    """The worst point of each op that was slow and is not, or is less so, as Markdown."""
    now = {point(row): row for row in rows}
    found: dict[str, tuple[Row, Row]] = {}
    for row in sorted((r for r in earlier if r.get("ratio", 1) < RATIO), key=lambda r: r["ratio"]):
        after = now.get(point(row), {})
        if after.get("ratio", 0) > GROWN * row["ratio"]:
            found.setdefault(row["op"], (row, after))
    out = ["| op | point | ours, ms | ratio | ours before, ms | ratio before |", "|---" * 6 + "|"]
    for op, (before, after) in found.items():
        times = (
            milliseconds(after["ours"]),
            f"{after['ratio']:.2f}",
            milliseconds(before["ours"]),
            f"{before['ratio']:.2f}",
        )
        out.append(f"| {op} | {said(after)} | {' | '.join(times)} |")
    return "\n".join(out)


def slow_and_jumping(rows: Sequence[Row]) -> str:
    """Ratios below `RATIO` and jumps above `JUMP`, as Markdown."""
    timed = [row for row in rows if "ratio" in row]
    slow = [row for row in timed if row["ratio"] < RATIO]
    out = [f"{len(rows)} points of {len({row['op'] for row in rows})} ops, {len(timed)} beside a peer,"]
    out.append(f"{len(slow)} of them below {RATIO}.")
    if timed:
        out.append(f"Geometric mean of the ratios {statistics.geometric_mean(row['ratio'] for row in timed):.2f}.")
    out += ["", f"## Ratios below {RATIO}", "", table(rows), "", f"## Jumps above {JUMP:g}", ""]
    out += ["| op | parameter | from | to | ours, times | peer, times |", "|---" * 6 + "|"]
    for row in jumps(rows):
        peers = f"{row['peers']:.1f}" if row["peers"] else "-"
        out.append(f"| {row['op']} | {row['name']} | {row['before']} | {row['after']} | {row['grown']:.1f} | {peers} |")
    return "\n".join(out)


def report(rows: Sequence[Row]) -> str:
    """All that is found, as Markdown."""
    out = [slow_and_jumping(rows)]
    for key, title in (("refused", "Refused by rlx"), ("failed", "Failed")):
        hit = [row for row in rows if key in row and (key == "failed" or row.get("peer"))]
        if hit:
            out += ["", f"## {title}", "", *(f"- {row['op']} ({said(row)}): {row[key]}" for row in hit)]
    wrong = sorted((row for row in rows if row.get("error", 0) > 0.02), key=lambda row: -row["error"])
    if wrong:
        out += [
            "",
            "Other results than onnxruntime's",
            "",
            *(f"- {r['op']} ({said(r)}): {r['error']:.1e}" for r in wrong),
        ]
    slowest = sorted((row for row in rows if row.get("compile_s", 0) > 1), key=lambda row: -row["compile_s"])[:20]
    if slowest:
        out += ["", "## Slowest from file to first answer", ""]
        out += [f"- {row['op']} ({said(row)}): {row['compile_s']:.1f} s" for row in slowest]
    return "\n".join(out)


def rlx_machine() -> str:
    """The name of the processor."""
    from rlx.backends.cpu.jit import cpuid

    return cpuid.name() or "unknown"


def main() -> int:
    """Prints the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only these ops (a,b); a word with * at its end: all that begin so")
    parser.add_argument("--minutes", type=float, default=120, help="no point is begun after that time (at most 120)")
    parser.add_argument("--seed", type=int, default=0, help="of operands, random points and their order")
    parser.add_argument("--random", type=int, default=12, help="random points of each op")
    parser.add_argument("--json", type=Path, help="also write all rows there")
    parser.add_argument("--page", type=Path, help="write what is slow and what jumps there, as a page of the docs")
    parser.add_argument("--read", type=Path, help="report the rows of such a file, measuring nothing")
    parser.add_argument(
        "--before", type=Path, help="such a file of an earlier sweep, of which points stay and are compared"
    )
    args = parser.parse_args()
    if not 0 < args.minutes <= 120:
        parser.error(f"--minutes {args.minutes}: expected more than 0, at most 120")
    words = [word for word in args.only.split(",") if word]
    unknown = [w for w in words if not any(matches(op, w) for op in CASES)]
    if unknown:
        parser.error(f"--only: no op {', '.join(unknown)}; there are {', '.join(sorted(CASES))}")
    os.environ["OMP_NUM_THREADS"] = "1"  # of NumPy's products; the workers read it
    ops = [op for op in CASES if not words or any(matches(op, w) for w in words)]
    rows = json.loads(args.read.read_text()) if args.read else sweep(ops, args.seed, args.random, args.minutes)
    earlier = json.loads(args.before.read_text()) if args.before else []
    again, rows = rows, joined(earlier, rows)
    if args.json:
        args.json.write_text(json.dumps(rows) + "\n")
    if args.page:
        machine = rlx_machine()
        head = PAGE.format(minutes=args.minutes, seed=args.seed, sizes=2**16, machine=machine)
        mended = f"## Before and after\n\n{compared(earlier, again)}\n\n" if earlier else ""
        args.page.write_text((head + slow_and_jumping(rows) + "\n\n" + mended).rstrip() + "\n")
    print(report(rows))
    return 0


def matches(op: str, word: str) -> bool:
    """Whether a word of --only names the op."""
    return op.startswith(word[:-1]) if word.endswith("*") else op == word


if __name__ == "__main__":
    sys.exit(main())
