"""Each kernel of a compiled graph: what was predicted, what a run took, and how much of the roofline it reached."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rlx.backends import backend_named
from rlx.backends.timing import KernelTime
from rlx.cost.ceilings import Ceilings
from rlx.cost.io_profile import IoProfile, profile_of
from rlx.cost.kept import ceilings_of, refine
from rlx.cost.lowered import lowered_from, needed
from rlx.cost.model import Prediction, predict_lowered
from rlx.errors import OptionError
from rlx.ir.graph import Array
from rlx.kernels.program import Kernel
from rlx.records import dataclass
from rlx.runtime.compiled import CompiledGraph

__all__ = ["KernelRow", "Rooflines", "learn", "rooflines"]


@dataclass(frozen=True)
class KernelRow:
    """A kernel: predicted and measured seconds (None where the device can't tell) and the shortest that its flops and
    bytes allow at the device's ceilings; `plain` and `sizes` as in `KernelCost`, `spread` and `disturbed` as in
    `CompiledGraph.profile`."""

    kind: str
    name: str
    predicted: float
    measured: float | None
    least: float
    bound: str
    bytes: int
    flops: int
    plain: float = 0.0
    sizes: tuple[int, ...] = ()
    spread: float = 0.0
    disturbed: bool = False

    @property
    def fraction(self) -> float | None:
        """Part of the roofline that the run reached; None where it was not measured."""
        return None if not self.measured else self.least / self.measured


@dataclass(frozen=True)
class Rooflines:
    """All kernels of a run at some extents, with the IO profile, the prediction and the ceilings behind them."""

    rows: tuple[KernelRow, ...]
    io: IoProfile
    prediction: Prediction
    ceilings: Ceilings
    timed: tuple[KernelTime, ...] = ()  # as `CompiledGraph.profile` gives it, in the order of a run

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        rows = [{**asdict(r), "fraction": r.fraction} for r in self.rows]
        facts = self.prediction.to_dict()
        names = ("seconds", "low", "high", "overhead", "syncs", "transfers", "compile", "guessed")
        totals = {name: facts[name] for name in names}
        return {"device": self.io.device, "kernels": rows, "io": self.io.to_dict(), "prediction": totals}


def rooflines(
    model: CompiledGraph,
    inputs: Sequence[Array] | None = None,
    *,
    at: Mapping[str, int] | None = None,
    threads: int | None = None,
    repeat: int = 20,
    calibrate: bool = True,
) -> Rooflines:
    """The kernels of a compiled graph; with `inputs` (at the extents `at`) they are timed as well."""
    backend = backend_named(model.device)
    made = model.compilation
    lowered = lowered_from(made.source, made.legal, made.dispatch, backend, made.program)
    ceilings = ceilings_of(model.device, threads, measure=calibrate)
    prediction = predict_lowered(lowered, ceilings, at, pace=ceilings.present_pace())
    io = profile_of(lowered, model.device, backend.unified, backend.merges, at=at)
    times: list[list[KernelTime]] = [[]] * len(prediction.kernels)
    timed: list[KernelTime] = []
    if inputs is not None and "profile" in model.capabilities and made.program is not None:
        timed = model.profile(inputs, repeat)
        total: dict[Kernel, list[KernelTime]] = {}
        for kernel, row in zip(made.executable.profiled, timed, strict=True):
            total.setdefault(kernel, []).append(row)
        if len(total) == len(made.program.run):  # a stored program is read apart from its code: the order is the same
            taken = dict(zip(made.program.run, total.values(), strict=True))
            times = [taken[kernel] for kernel in needed(made.program, None)]
    rows = []
    for k, timed_rows in zip(prediction.kernels, times, strict=True):
        moved = k.read_bytes + k.written_bytes
        made_row = KernelRow(
            k.kind, k.nodes or k.name, k.seconds, sum(t[2] for t in timed_rows) if timed_rows else None,
            _least(k.flops, moved, ceilings), k.bound, moved, k.flops, k.plain, k.sizes,
            sum(t.spread for t in timed_rows), any(t.disturbed for t in timed_rows),
        )  # fmt: skip
        rows.append(made_row)
    return Rooflines(tuple(rows), io, prediction, ceilings, tuple(timed))


def _least(flops: int, moved: int, c: Ceilings) -> float:
    return max(flops / c.flops, moved / c.bytes_rate(moved))


def learn(found: Rooflines) -> Ceilings:
    """Refines the device's calibration by the measured kernels (bounded), and keeps it. Needs a calibrated device."""
    if found.ceilings.guessed:
        raise OptionError(f"device {found.io.device!r} is not calibrated: run `rlx calibrate` first")
    points: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    launch = found.ceilings.launch * found.prediction.pace.host
    for row in found.rows:
        own = row.predicted - launch
        if row.measured and own > 0:
            ratio = max(row.measured - launch, row.measured / 4) / own
            points[row.kind].append((row.plain, *row.sizes, ratio))
    return refine(found.ceilings, points)
