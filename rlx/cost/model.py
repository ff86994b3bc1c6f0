"""The cost model: what each kernel takes on a device, from what it does and what the device can do.

A kernel takes the larger of its arithmetic and its traffic, and a launch; a run adds its own overhead, waits for the
host and transfers; compiling is spread over the calls that are expected.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from rlx.backends import BACKENDS, backend_named
from rlx.cost.ceilings import Ceilings
from rlx.cost.io_profile import IoProfile, profile_of
from rlx.cost.lowered import Lowered, lower, needed, rounds_of
from rlx.cost.pace import Pace
from rlx.ir.graph import Graph, Node
from rlx.kernels.affine import linear_index
from rlx.kernels.expr import Reduce, loads, walk
from rlx.kernels.lowering import Attention, Contract, Conv, out_vars
from rlx.kernels.program import Kernel, Store
from rlx.kernels.work import GROUPED, LOOP, SCATTERED, Work, kernel_work, recurrence
from rlx.records import dataclass
from rlx.units import seconds_text

__all__ = ["KernelCost", "Prediction", "kind_of", "predict", "predict_lowered", "price_kernel"]

SPREAD = 1.645  # standard deviations: nine of ten runs are expected within
PACE = Pace()
NEAR = 1 << 18  # bytes that a kernel touches without leaving the caches of a core
ROUNDED = {"": 1, "q8": 4, "bf16": 2, "f16": 2}  # times as fast as products of f32 are those of rounded operands, about
CALLS = 1000  # expected of a compiled graph unless said otherwise


@dataclass(frozen=True)
class KernelCost:
    """A kernel in all rounds of its loops: predicted seconds, and the times of arithmetic and traffic behind them.

    `plain` are the seconds of one launch before the correction of its kind, which goes by them and by `sizes`, and at
    the speed at which the device was calibrated.
    """

    kind: str
    name: str
    nodes: str
    seconds: float
    compute: float
    traffic: float
    read_bytes: int
    written_bytes: int
    flops: int
    plain: float = 0.0
    sizes: tuple[int, ...] = ()

    @property
    def bound(self) -> str:
        """ "compute", "traffic", or "launch" where both are shorter than the launch itself."""
        if max(self.compute, self.traffic) < self.seconds / 2:
            return "launch"
        return "compute" if self.compute >= self.traffic else "traffic"


@dataclass(frozen=True)
class Prediction:
    """A run of a graph on a device, in seconds; `low` and `high` hold nine of ten runs."""

    graph: str
    device: str
    at: dict[str, int]
    kernels: tuple[KernelCost, ...]
    overhead: float  # of the run itself
    syncs: float
    transfers: float
    compile: float
    expected_calls: int
    error: float
    guessed: bool
    pace: Pace = PACE
    results: str = "are copied out"  # what is assumed of the outputs; see `IoProfile`

    @property
    def seconds(self) -> float:
        """The time of a run."""
        return sum(k.seconds for k in self.kernels) + self.overhead + self.syncs + self.transfers

    @property
    def low(self) -> float:
        return self.seconds * math.exp(-SPREAD * self.error)

    @property
    def high(self) -> float:
        return self.seconds * math.exp(SPREAD * self.error)

    @property
    def cost(self) -> float:
        """The time of a run with its share of the compile."""
        return self.seconds + self.compile / self.expected_calls

    def to_dict(self) -> dict[str, Any]:
        """Fields and totals as JSON values."""
        kernels = [{**asdict(k), "bound": k.bound} for k in self.kernels]
        totals = {name: getattr(self, name) for name in ("seconds", "low", "high", "cost")}
        return {**asdict(self), "kernels": kernels, **totals}

    def _repr_html_(self) -> str:
        from rlx import html

        at = ", ".join(f"{name} = {n}" for name, n in self.at.items())
        pairs = {
            "graph": self.graph,
            "device": self.device,
            "sizes": at,
            "per run": f"{seconds_text(self.seconds)}, nine of ten between {seconds_text(self.low)} and "
            f"{seconds_text(self.high)}",
            "known by": "a guess: run rlx calibrate" if self.guessed else "the calibration of the device",
            "not in kernels": seconds_text(self.overhead + self.syncs + self.transfers),
            "compile": seconds_text(self.compile),
        }
        rows = [(k.nodes or k.name, k.kind, seconds_text(k.seconds), k.bound, f"{k.flops:,}") for k in self.kernels]
        table = html.table(rows, ("kernel", "kind", "predicted", "bound by", "flops"), right=(2, 4))
        return html.fragment(html.facts(pairs) + table)

    def __str__(self) -> str:
        how = "a guess" if self.guessed else "calibrated"
        at = ", ".join(f"{name}={n}" for name, n in self.at.items())
        lines = [f"{self.graph!r} on {self.device}{f' at {at}' if at else ''}, {how}"]
        for k in self.kernels:
            lines.append(f"  {seconds_text(k.seconds):>8}  {k.bound:8} {k.kind:12} {k.nodes or k.name}")
        around = seconds_text(self.overhead + self.syncs + self.transfers)
        lines.append(f"  {around:>8}  overhead, waits and transfers: results {self.results}")
        if self.pace != PACE:
            lines.append(f"at present {self.pace}")
        lines.append(
            f"a run takes {seconds_text(self.seconds)} ({seconds_text(self.low)} .. {seconds_text(self.high)})"
        )
        return "\n".join(lines)


def predict(
    graph: Graph,
    ceilings: Ceilings,
    at: Mapping[str, int] | None = None,
    *,
    outputs: Collection[str] | None = None,
    expected_calls: int = CALLS,
    pace: Pace = PACE,
    fetched: bool = False,
) -> Prediction:
    """What a run of the graph takes on a device with these ceilings, which need not be here.

    `at` gives extents of dims (default: their upper bounds); `outputs` those asked for; `pace` how much slower the
    device is than when it was calibrated (default: as it was; `ceilings.present_pace()`: as it is now); `fetched`
    counts copies of the results to the host, from a device with memory of its own, where they stay otherwise.
    Raises what `rlx.profile` does.
    """
    backend = backend_named(ceilings.device) if ceilings.device in BACKENDS else None
    present = backend is not None and backend.available().present
    return predict_lowered(
        lower(graph, backend if present else None), ceilings, at, outputs, expected_calls, pace, fetched
    )


def predict_lowered(
    lowered: Lowered,
    ceilings: Ceilings,
    at: Mapping[str, int] | None = None,
    outputs: Collection[str] | None = None,
    expected_calls: int = CALLS,
    pace: Pace = PACE,
    fetched: bool = False,
) -> Prediction:
    """The prediction for a graph that is lowered already."""
    device, unified, merges = ceilings.device, ceilings.unified, ceilings.merges
    moved = profile_of(lowered, device, unified, merges, outputs=outputs, at=at, fetched=fetched)
    program = lowered.program if ceilings.merges else lowered.unmerged
    kernels = needed(program, moved.outputs)
    sizes = dict(moved.at)
    rounds = rounds_of(program, sizes)
    works = [kernel_work(k, sizes) for k in kernels]
    distance = float(sum(w.read + w.written for w in works))
    costs = tuple(
        _kernel_cost(k, w, ceilings, sizes, distance, rounds[k], pace) for k, w in zip(kernels, works, strict=True)
    )
    return Prediction(
        lowered.graph.name,
        ceilings.device,
        moved.at,
        costs,
        overhead=pace.host * (ceilings.run + ceilings.output * max(0, len(moved.outputs) - 1)),
        syncs=pace.host * moved.syncs * ceilings.sync,
        transfers=pace.memory * _transfers(lowered, moved, ceilings),
        compile=pace.host * (ceilings.compile + ceilings.compile_kernel * len({(k.kind, k.name) for k in kernels})),
        expected_calls=expected_calls,
        error=ceilings.error,
        guessed=ceilings.guessed,
        pace=pace,
        results=moved.results,
    )


def price_kernel(kernel: Kernel, ceilings: Ceilings, extents: dict[str, int]) -> KernelCost:
    """One kernel at these extents, once, by itself."""
    work = kernel_work(kernel, extents)
    return _kernel_cost(kernel, work, ceilings, extents, float(work.read + work.written), 1, PACE)


def _transfers(lowered: Lowered, moved: IoProfile, ceilings: Ceilings) -> float:
    if ceilings.unified:
        wanted = (b for name, b in lowered.program.outputs if name in moved.outputs)
        return sum(ceilings.copy_seconds(b.nbytes(moved.at)) for b in wanted)
    return (moved.h2d_bytes + moved.d2h_bytes) / ceilings.transfer


def kind_of(kernel: Kernel) -> str:
    """The kind of kernel that corrections are kept by: what it is, and how it walks over memory."""
    node = kernel.host or kernel.special
    if node is not None:
        return f"{kernel.kind} {node.op.op_name}"
    if kernel.strategy is not None:
        kind = kernel.strategy.measured_as
        return _conv_kind(kernel, kind) if isinstance(kernel.anchor, Conv) else kind
    kind = kernel.kind
    if kind in ("row", "reduce") and _across(kernel):
        return f"{kind} across"
    return kind


def _conv_kind(kernel: Kernel, kind: str) -> str:
    store = kernel.stores[0]
    last = store.index[-1] == out_vars(len(store.extents))[1] or all(s == 1 for s in store.extents[2:])
    kind = kind if last else f"{kind} to planes"  # the channels of a pixel do not lie together
    return f"{kind} plus planes" if _plus_planes(store) else kind


def _plus_planes(store: Store) -> bool:
    """Whether elements are added (or whatever) to those of a convolution whose channels do not lie together."""
    channel = out_vars(len(store.extents))[1]
    for x in loads(store.expr):
        coefs = linear_index(x.indices, x.source.shape).coefs
        if len(coefs) > 1 and coefs.get(channel, 0) != 1:
            return True
    return False


def _across(kernel: Kernel) -> bool:
    """Whether what a reduction sums up in its innermost loop does not lie together."""
    for store in kernel.stores:
        for x in walk(store.expr):
            if isinstance(x, Reduce) and x.vars:
                steps = [linear_index(y.indices, y.source.shape).coefs.get(x.vars[-1], 0) for y in loads(x.body)]
                return bool(steps) and not any(step in (0, 1) for step in steps)
    return False


def _kernel_cost(
    kernel: Kernel, work: Work, ceilings: Ceilings, extents: dict[str, int], distance: float, rounds: int, pace: Pace
) -> KernelCost:
    """Weights come from as far as the whole run reaches, everything else from what the kernel before has left near."""
    kind = kind_of(kernel)
    if not work.shape and 2 * work.calls.get(SCATTERED, 0) > work.calls.get(LOOP, 0):
        kind += " of scattered elements"
    own = work.read + work.written
    weights = min(work.read, sum(b.nbytes(extents) for b in kernel.reads() if b.base.kind in ("param", "prepared")))
    passes = 1 if ceilings.merges or kernel.anchor is not None else work.parts
    traffic = passes * (own - weights) / ceilings.bytes_rate(own) + weights / ceilings.bytes_rate(distance)
    compute = _compute(kernel, work, ceilings, extents)
    plain = max(compute, traffic)
    seconds = plain * ceilings.correction(kind, plain, work.sizes)
    moving = min(1.0, traffic / plain) if own > NEAR and plain else 0.0
    slower = ceilings.kernel_pace(pace, work.products / seconds if seconds else 0.0, moving)
    seconds *= slower
    calls = ceilings.launch * (1 if ceilings.merges else work.parts)
    if kernel.host is not None:
        calls += ceilings.host
    seconds += pace.host * calls
    nodes = "" if kernel.label == kernel.name else kernel.label
    return KernelCost(
        kind, kernel.name, nodes, rounds * seconds, rounds * slower * compute,
        rounds * slower * traffic, rounds * work.read,
        rounds * work.written, rounds * work.flops, plain, work.sizes,
    )  # fmt: skip


def _compute(kernel: Kernel, work: Work, c: Ceilings, extents: dict[str, int]) -> float:
    """Seconds of arithmetic."""
    anchored = bool(work.shape)  # then loading and storing what goes with results is part of the products
    lanes = max([1.0, *(s.buffer.dtype.nbytes(1) / 4 for s in kernel.stores if s.buffer.dtype.is_float)])  # f32 in each
    counted = {fn: n for fn, n in work.calls.items() if not (anchored and fn in (LOOP, SCATTERED))}
    calls = c.vector_seconds(lanes * sum(n * c.function_cost(fn) for fn, n in counted.items()))
    if not anchored:
        node = kernel.host or kernel.special
        return calls if node is None else _node_compute(node, work, c, extents)
    dtype = kernel.stores[0].buffer.dtype.name
    match kernel.anchor:
        case Contract():
            _, m, k, n = work.shape
            rate = c.product_rate(m, k, n, dtype) * ROUNDED[kernel.anchor.activations]
        case Conv():
            _, outputs, pixels, depth, groups = work.shape
            rate = c.product_rate(pixels, depth, max(1, outputs // groups), dtype)
        case Attention():
            _, _, rows, keys, depth, _ = work.shape
            rate = c.product_rate(rows, depth, keys, dtype)
            calls += c.vector_seconds(math.prod(work.shape[:4]) * c.function_cost("exp"))
        case _:
            raise AssertionError(kernel)
    return work.products / rate + calls


def _node_compute(node: Node, work: Work, c: Ceilings, extents: dict[str, int]) -> float:
    """Seconds of a node that is run as a whole: a recurrent one goes step by step, each a product of few rows."""
    if not work.sizes:
        return work.flops / c.vector
    if node.op.op_name == GROUPED:
        _, rows, k, n = work.sizes
        return work.flops / c.product_rate(rows, k, n, node.outputs[0].dtype.name)
    steps, batch, hidden, gates = recurrence(node, extents)
    return steps * c.step + work.flops / c.product_rate(batch, hidden, gates)
