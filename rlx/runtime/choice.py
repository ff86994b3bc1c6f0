"""The choice of a device: every device priced for a graph, and why one was taken. Nothing is compiled for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Unpack

from rlx.backends import BACKENDS, backend_named
from rlx.backends.base import Backend, CodeGenerator
from rlx.backends.memory import DeviceMemory
from rlx.boundary import bounded
from rlx.cost.ceilings import Ceilings
from rlx.cost.kept import ceilings_of
from rlx.cost.lowered import Lowered, extents_at, lower
from rlx.cost.model import PACE, Prediction, predict_lowered
from rlx.cost.pace import Pace
from rlx.errors import CompileError, DeviceUnavailable, OptionError, RlxError, UnsupportedOp
from rlx.estimate.calibrate import Overhead, known_overhead, overhead_of
from rlx.estimate.graph import estimate_library, lowered_of
from rlx.estimate.memory import MemoryEstimate
from rlx.estimate.system import COMPILED
from rlx.ir.extents import of_parts
from rlx.ir.graph import Graph
from rlx.ir.shape import usual_size
from rlx.options import CompileOptions, Options
from rlx.passes.dims import apply_dims
from rlx.passes.precision import apply_precision
from rlx.records import dataclass
from rlx.runtime.policy import DevicePolicy, policy_of
from rlx.units import bytes_text, seconds_text

__all__ = ["Candidate", "Decision", "Device", "Turn", "choose", "devices", "devices_for", "usual_extents"]

TIE = 1.5  # predictions that differ by less than their errors are a tie, but not beyond this


@dataclass(frozen=True)
class Device:
    """A device that rlx knows: whether it is there (`reason`, `remedy`: how to get it), its memory and capabilities."""

    name: str
    present: bool
    reason: str
    remedy: str
    memory: DeviceMemory
    capabilities: frozenset[str]


@dataclass(frozen=True)
class Candidate:
    """A device and a graph. `obstacle` says why it can't be chosen ("": it can); times in seconds, sizes in bytes.

    `seconds` (None: not priced) lies between `low` and `high` in nine of ten runs; `cost` adds a share of the compile;
    `peak_bytes` is what the model takes at its peak, at the bounds of its dims, as `rlx.estimate` adds it up and
    `budget=` counts it: weights as runs need them, activations, inputs, outputs, states, code. `device_bytes` is what
    the device brings into this process by itself, 0 once something was compiled for it. `bounded` names the parts of
    both of which only an upper bound or a guess is known. `guessed`: by ceilings that nobody measured; `pace`: how much
    slower than when it was calibrated; `measured`: of real runs, where the policy asked for them; `results`: what
    `transfers` takes outputs to do, as in `IoProfile`.
    """

    device: str
    obstacle: str
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    cost: float | None = None
    overhead: float | None = None
    transfers: float | None = None
    compile: float | None = None
    guessed: bool = False
    error: float = 0.0
    peak_bytes: int | None = None
    budget_bytes: int | None = None
    device_bytes: int = 0
    bounded: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()
    measured: float | None = None
    pace: Pace = PACE
    results: str = ""

    @property
    def fits(self) -> bool | None:
        """Whether the graph fits into the memory allowed; None where that isn't known."""
        if self.peak_bytes is None or self.budget_bytes is None:
            return None
        return self.peak_bytes <= self.budget_bytes

    @property
    def grows_bytes(self) -> int | None:
        """What the memory of this process grows by at the peak; None where the model's isn't known."""
        return None if self.peak_bytes is None else self.peak_bytes + self.device_bytes

    @property
    def deficit_bytes(self) -> int:
        return 0 if self.fits is not False else (self.peak_bytes or 0) - (self.budget_bytes or 0)


@dataclass(frozen=True)
class Turn:
    """From this extent of a dim on (the others as they were) another device is cheapest."""

    dim: str
    extent: int
    device: str


HEAD = ("device", "per run", "from", "to", "known by", "compile", "copies", "memory", "fits", "why not")  # as _cells
FIGURES = {"per run", "from", "to", "compile", "copies", "memory"}


@dataclass(frozen=True)
class Decision:
    """Which device runs a graph, and why: each device with its price or its obstacle."""

    graph: str
    device: str
    reason: str
    candidates: tuple[Candidate, ...]
    at: dict[str, int]
    objective: str = "latency"
    turns: tuple[Turn, ...] = ()

    @property
    def chosen(self) -> Candidate:
        """The candidate that was taken."""
        return next(c for c in self.candidates if c.device == self.device)

    def to_dict(self) -> dict[str, Any]:
        """The decision as JSON values."""
        names = ("fits", "deficit_bytes", "grows_bytes")
        rows = [{**asdict(c), **{name: getattr(c, name) for name in names}} for c in self.candidates]
        return {**asdict(self), "candidates": rows}

    def to_table(self) -> str:
        """The decision as a part of a page: a row for each device."""
        from rlx import html

        at = ", ".join(f"{name} = {n}" for name, n in self.at.items())
        lines = [f"<p><b>{html.text(self.device)}</b>: {html.text(self.reason)}</p>"]
        rows = [_cells(c) for c in self.candidates]
        known = [n for n in range(1, len(HEAD)) if any(row[n] for row in rows)]
        if known:
            lines.append(f"<p class=soft>Priced by {self.objective}{html.text(f' at {at}' if at else '')}.</p>")
            shown = [0, *known]
            right = [at for at, n in enumerate(shown) if HEAD[n] in FIGURES]
            chosen = [n for n, c in enumerate(self.candidates) if c.device == self.device]
            cells = [[row[n] for n in shown] for row in rows]
            lines.append(html.table(cells, [HEAD[n] for n in shown], right=right, chosen=chosen))
        for turn in self.turns:
            lines.append(f"<p>From {html.text(turn.dim)} = {turn.extent} on {html.text(turn.device)} is cheapest.</p>")
        return "".join(lines)

    def _repr_html_(self) -> str:
        from rlx import html

        return html.fragment(self.to_table())

    def __str__(self) -> str:
        at = ", ".join(f"{name}={n}" for name, n in self.at.items())
        lines = [f"device   {self.device}: {self.reason}", f"priced   by {self.objective}{f' at {at}' if at else ''}"]
        pace = next((c.pace for c in self.candidates if c.device == self.device), PACE)
        if pace != PACE:
            lines.append(f"present  {pace}")
        for c in self.candidates:
            mark = "*" if c.device == self.device else " "
            lines.append(f"{mark} {c.device:9} {c.obstacle or _priced(c)}")
        lines += [f"from {t.dim} = {t.extent} on {t.device} is cheapest" for t in self.turns]
        return "\n".join(lines)


def _cells(c: Candidate) -> tuple[str, ...]:
    """A row of the table."""
    times = ("" if t is None else seconds_text(t) for t in (c.seconds, c.low, c.high))
    known = "" if c.seconds is None else "a guess" if c.guessed else "calibration"
    compile_time, copies = ("" if t is None else seconds_text(t) for t in (c.compile, c.transfers))
    size = "" if c.peak_bytes is None else f"{bytes_text(c.peak_bytes)}{' at most' if c.bounded else ''}"
    fits = {None: "", True: "yes", False: "no"}[c.fits]
    return (c.device, *times, known, compile_time, copies, size, fits, c.obstacle)


def _priced(c: Candidate) -> str:
    if c.seconds is None or c.low is None or c.high is None:
        return "can run it"
    how = "a guess" if c.guessed else "calibrated"
    parts = [f"{seconds_text(c.seconds)} per run ({seconds_text(c.low)} .. {seconds_text(c.high)}, {how})"]
    parts.append(f"compile {seconds_text(c.compile or 0)}")
    parts.append(f"copies {seconds_text(c.transfers or 0)} (results {c.results})")
    if c.peak_bytes is not None:
        known = f" (at most: {', '.join(c.bounded)})" if c.bounded else ""
        itself = f" and {c.device_bytes:,} B for the device itself" if c.device_bytes else ""
        fits = "" if c.fits is None else ", which fits"
        parts.append(f"needs {c.peak_bytes:,} B{known}{itself}{fits}")
    if c.measured is not None:
        parts.append(f"measured {seconds_text(c.measured)}")
    return ", ".join(parts)


class Devices(list[Device]):
    """Devices, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        from rlx import html

        rows = []
        for d in self:
            sizes = [bytes_text(n) if d.present else "" for n in (d.memory.free, d.memory.total)]
            how = ": ".join(part for part in (d.reason, d.remedy) if part)
            rows.append((d.name, "yes" if d.present else "no", *sizes, how, ", ".join(sorted(d.capabilities))))
        head = ("device", "available", "free memory", "total", "what", "offers")
        return html.fragment(html.table(rows, head, right=(2, 3), chosen=[n for n, d in enumerate(self) if d.present]))


@bounded("devices", CompileError)
def devices() -> Devices:
    """Every device that rlx knows, available or not."""
    made = Devices()
    for name in BACKENDS:
        backend = backend_named(name)
        found = backend.available()
        memory = backend.memory() if found.present else DeviceMemory(None, None)
        made.append(Device(name, found.present, found.reason, found.remedy, memory, backend.capabilities))
    return made


@bounded("devices_for", CompileError)
def devices_for(graph: Graph, policy: DevicePolicy | str | None = None, **options: Unpack[Options]) -> list[Candidate]:
    """Every device with its price for the graph or the obstacle; arguments as for `choose`."""
    return _Choice(graph, policy_of(policy), **options).candidates()


@bounded("choose", CompileError)
def choose(
    graph: Graph,
    policy: DevicePolicy | str | None = None,
    *,
    at: Mapping[str, int] | None = None,
    calibrate: bool = True,
    **options: Unpack[Options],
) -> Decision:
    """The device for a graph, without compiling it (unless the policy asks for a benchmark).

    `at` gives the extents of dims to price it at (default: the upper bounds; 128 for a dim without one). `calibrate`:
    devices that were never calibrated are now, some seconds each, once on a machine; else guesses are used. Further
    keywords are those of `rlx.compile`: `budget`, `threads`, `dims`; a device that would ignore one is not chosen.
    Raises `DeviceUnavailable` where no device can run the graph, with the obstacle of each.
    """
    return _Choice(graph, policy_of(policy), at=at, calibrate=calibrate, **options).decide()


def usual_extents(graph: Graph, at: Mapping[str, int] | None) -> dict[str, int]:
    """Extents to price a graph at: as given, else the upper bound of a dim, else 128 or what comes next."""
    dims = graph.dims()
    given = of_parts(at or {}, dims)
    for name, symbol in dims.items():
        if name not in given and symbol.hi is None:
            given[name] = usual_size(symbol)
    return extents_at(graph, given)


class _Choice:
    """One choice: lowers the graph for each device and compares."""

    def __init__(
        self,
        graph: Graph,
        policy: DevicePolicy,
        *,
        at: Mapping[str, int] | None = None,
        calibrate: bool = True,
        **options: Unpack[Options],
    ) -> None:
        if not isinstance(graph, Graph):
            raise OptionError(f"choose takes a Graph, got {type(graph).__name__}; rlx.load takes files")
        self.options = CompileOptions().with_options({k: v for k, v in options.items() if k != "device"})
        self.graph = apply_precision(apply_dims(graph, self.options.dims), self.options.precision)
        self.policy = policy
        self.calibrate = calibrate
        self.at = usual_extents(self.graph, at)
        self.lowered: dict[str, Lowered] = {}
        self.paces: dict[str, Pace] = {}

    def candidates(self) -> list[Candidate]:
        return [self.candidate(name) for name in BACKENDS]

    def candidate(self, name: str) -> Candidate:
        """The device with everything that is known of it and the graph."""
        forbidden = self.policy.forbids(name)
        if forbidden:
            return Candidate(name, forbidden)
        backend = backend_named(name)
        found = backend.available()
        if not found.present:
            return Candidate(name, found.why)
        unfit = self.policy.unfit(backend, self.options)
        if unfit:
            return Candidate(name, unfit)
        try:
            lowered = self.lowered[name] = lower(self.graph, backend, self.options)
            backend.check(lowered.legal)
        except UnsupportedOp as error:
            nodes = tuple(f"{n.op} {n.name}: {n.reason}" for n in error.nodes)
            shown = "; ".join(nodes[:3]) + ("; ..." if len(nodes) > 3 else "")
            return Candidate(name, f"{len(nodes)} nodes are not supported: {shown}", unsupported=nodes)
        except RlxError as error:
            return Candidate(name, str(error))
        return self.priced(name, backend, lowered)

    def priced(self, name: str, backend: Backend, lowered: Lowered) -> Candidate:
        """A device that supports the graph."""
        p = self.predicted(name, lowered, self.at, self.calibrate)
        memory = self.memory(lowered, backend)
        peak = None if memory is None else memory.own.peak_bytes
        itself = 0 if memory is None else memory.overhead_bytes
        unsure = {} if memory is None else memory.certainty
        bounded = tuple(part for part, how in unsure.items() if how in ("bounded", "guessed"))
        budget = self.options.budget_bytes
        allowed = budget if budget is not None else backend.room()
        obstacle = ""
        if peak is not None and allowed is not None and peak > allowed and self.options.over_budget == "error":
            obstacle = f"needs {peak:,} B, {peak - allowed:,} B more than the {allowed:,} B allowed"
        return Candidate(
            name, obstacle, p.seconds, p.low, p.high, p.cost, p.overhead, p.transfers, p.compile, p.guessed, p.error,
            peak, allowed, itself, bounded, pace=p.pace, results=p.results,
        )  # fmt: skip

    def predicted(self, name: str, lowered: Lowered, at: Mapping[str, int], calibrate: bool = False) -> Prediction:
        """A run on a device, at one speed of the processor for the whole choice."""
        ceilings = ceilings_of(name, self.options.threads, measure=calibrate)
        return predict_lowered(
            lowered, ceilings, at, expected_calls=self.policy.expected_calls, pace=self.pace(name, ceilings)
        )

    def pace(self, name: str, ceilings: Ceilings) -> Pace:
        if self.policy.pace != "now":
            return PACE
        if name not in self.paces:
            self.paces[name] = ceilings.present_pace()
        return self.paces[name]

    def memory(self, lowered: Lowered, backend: Backend) -> MemoryEstimate | None:
        """What `rlx.estimate` says at the bounds (a dim without one: as priced); None where data decide a size."""
        bounds = {name: s.hi for name, s in lowered.graph.dims().items() if s.hi is not None}
        extents = {**self.at, **bounds}
        overhead = self.overhead(backend.name)
        try:
            if isinstance(backend, CodeGenerator):
                made = lowered_of(lowered.graph, lowered.program, backend, self.options, overhead)
                return made.at_bounds() or made.at(extents)
            return estimate_library(lowered.graph, lowered.legal, backend.name, overhead, self.options, extents)
        except (KeyError, RlxError):
            return None

    def overhead(self, name: str) -> Overhead:
        """What a device takes by itself; measured, once on a machine, where memory decides and measuring is allowed."""
        if self.policy.objective == "memory" and self.calibrate and name not in COMPILED:
            try:
                return overhead_of(name).left(name)
            except DeviceUnavailable:
                pass
        return known_overhead(name).left(name)

    def decide(self) -> Decision:
        found = self.candidates()
        able = [c for c in found if not c.obstacle]
        if not able:
            raise DeviceUnavailable(self.nothing(found))
        if self.policy.benchmark and len(able) > 1:
            from rlx.runtime.bench import measured

            times = measured(self.graph, [c.device for c in able], self.policy.benchmark, self.at, self.options)
            found = [Candidate(**{**_fields(c), "measured": times.get(c.device)}) for c in found]
            able = [c for c in found if not c.obstacle]
        best, reason = self.best(able, found)
        turns = self.turns(able) if not self.policy.benchmark and len(able) > 1 else ()
        return Decision(self.graph.name, best.device, reason, tuple(found), self.at, self.policy.objective, turns)

    def nothing(self, found: list[Candidate]) -> str:
        lines = "".join(f"\n  {c.device}: {c.obstacle}" for c in found)
        unsupported = [c for c in found if c.unsupported]
        hint = ""
        if unsupported:
            from rlx.runtime.split import would_split

            names = [c.device for c in unsupported]
            how = "compile with this policy" if self.policy.split else "policy=DevicePolicy(split=True)"
            hint = f"\nA split would run it: {how}" if would_split(self.graph, names) else (
                "\nA split over these devices would not run it either"
            )  # fmt: skip
        return f"no device can run {self.graph.name!r}:{lines}{hint}"

    def best(self, able: list[Candidate], found: list[Candidate]) -> tuple[Candidate, str]:
        """The candidate that the policy wants, and why."""
        for name in self.policy.prefer:
            taken = next((c for c in able if c.device == name), None)
            if taken is not None:
                before = self.policy.prefer[: self.policy.prefer.index(name)]
                over = [f"{c.device} ({c.obstacle})" for c in found if c.device in before]
                return taken, "preferred" + (f", after {', '.join(over)}" if over else "")
        if len(able) == 1:
            return able[0], "the only one that can run it"
        if all(c.measured is not None for c in able):
            best = min(able, key=lambda c: c.measured or 0.0)
            return best, f"the fastest of {self.policy.benchmark} measured runs each"
        best = min(able, key=self.price)
        tied = next(c for c in able if self.price(c) <= self.price(best) * self.slack(c, best))
        if tied is not best:
            return tied, f"within the error of {best.device}, and simpler"
        return best, f"the lowest predicted {'peak' if self.policy.objective == 'memory' else 'cost'}"

    def slack(self, a: Candidate, b: Candidate) -> float:
        """Up to which ratio two prices are a tie."""
        if self.policy.objective == "memory":
            return TIE if "overhead" in (*a.bounded, *b.bounded) else 1.0
        return min(TIE, math.exp(math.hypot(a.error, b.error)))

    def price(self, c: Candidate) -> float:
        if self.policy.objective == "memory":
            return float(1 << 62 if c.grows_bytes is None else c.grows_bytes)
        cost = c.cost or 0.0
        return cost - (c.overhead or 0.0) if self.policy.objective == "throughput" else cost

    def turns(self, able: list[Candidate]) -> tuple[Turn, ...]:
        """Where along a dim the cheapest device changes, found by bisection between powers of 2."""
        if self.policy.prefer or self.policy.objective == "memory":
            return ()
        made: list[Turn] = []
        for name, symbol in list(self.graph.dims().items())[:2]:
            step, low, high = symbol.multiple, max(symbol.lo, 1), self.at[name]
            places = sorted({min(max(2**i, low), high) // step for i in range(high.bit_length() + 1)} - {0})
            best = [self.cheapest(name, i * step, able) for i in places]
            for before, after, old, new in zip(places, places[1:], best, best[1:], strict=False):
                if old != new:
                    made.append(Turn(name, step * self.turning(name, step, before, after, old, able), new))
        return tuple(made)

    def turning(self, dim: str, step: int, low: int, high: int, old: str, able: list[Candidate]) -> int:
        """The first multiple of `step` in (low, high] at which the device is another."""
        while high - low > 1:
            middle = (low + high) // 2
            if self.cheapest(dim, middle * step, able) == old:
                low = middle
            else:
                high = middle
        return high

    def cheapest(self, dim: str, extent: int, able: list[Candidate]) -> str:
        at = {**self.at, dim: extent}
        found = []
        for c in able:
            p = self.predicted(c.device, self.lowered[c.device], at)
            found.append(Candidate(c.device, "", p.seconds, cost=p.cost, overhead=p.overhead, error=p.error))
        best = min(found, key=self.price)
        return next(c for c in found if self.price(c) <= self.price(best) * self.slack(c, best)).device


def _fields(c: Candidate) -> dict[str, Any]:
    return {name: getattr(c, name) for name in c.__dataclass_fields__}
