"""The static IO and sync profile of a forward pass: what moves, how often the device is asked, and where it waits.

Everything is counted from the kernels before anything runs. A launch is a kernel of the program; without fusion, a node
that the planner makes no view of. A sync point is a kernel that the device runs on the host, or one that makes it wait;
the wait at the end of a run is none.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rlx.backends import backend_named, choose_backend
from rlx.backends.base import Backend
from rlx.boundary import bounded
from rlx.cost.lowered import Lowered, extents_at, lower, lowered_from, needed, results_of, rounds_of
from rlx.errors import CompileError, ModelFormatError, OptionError, no_such
from rlx.ir.graph import OPERATORS, Graph
from rlx.kernels.program import Buffer, Kernel, Program
from rlx.kernels.work import kernel_work
from rlx.records import dataclass

__all__ = ["IoProfile", "KernelIo", "profile", "profile_of"]


@dataclass(frozen=True)
class KernelIo:
    """A kernel: bytes of device memory read and written and flops of a launch, and whether the device waits for it.

    `times`: how often it is launched, more than once in loops.
    """

    kind: str
    name: str
    nodes: str
    read_bytes: int
    written_bytes: int
    flops: int
    sync: bool
    times: int = 1

    @property
    def intensity(self) -> float:
        """Flops a byte; 0 where nothing is moved."""
        moved = self.read_bytes + self.written_bytes
        return self.flops / moved if moved else 0.0


@dataclass(frozen=True)
class IoProfile:
    """A forward pass of a graph on a device at some extents; sizes in bytes.

    `before` are the kernels without fusion; `waits` the branches and loops at which the device asks for a value.
    `h2d_bytes` and `d2h_bytes` are what is copied between the host and the device for one `run` (for views: with
    `views=True`): inputs from NumPy's arrays, only the outputs asked for, and what sync points move. `results` says
    what is assumed of the outputs: they "are copied out", "are views", or "stay on the device".
    """

    graph: str
    device: str
    at: dict[str, int]
    outputs: tuple[str, ...]
    kernels: tuple[KernelIo, ...]
    before: tuple[KernelIo, ...]
    h2d_bytes: int
    d2h_bytes: int
    waits: int = 0
    results: str = "are copied out"

    @property
    def launches(self) -> int:
        return sum(k.times for k in self.kernels)

    @property
    def launches_before(self) -> int:
        return sum(k.times for k in self.before)

    @property
    def syncs(self) -> int:
        """Points at which the device waits for the host."""
        return sum(k.sync * k.times for k in self.kernels) + self.waits

    @property
    def read_bytes(self) -> int:
        return sum(k.read_bytes * k.times for k in self.kernels)

    @property
    def written_bytes(self) -> int:
        return sum(k.written_bytes * k.times for k in self.kernels)

    @property
    def read_bytes_before(self) -> int:
        return sum(k.read_bytes * k.times for k in self.before)

    @property
    def written_bytes_before(self) -> int:
        return sum(k.written_bytes * k.times for k in self.before)

    @property
    def flops(self) -> int:
        return sum(k.flops * k.times for k in self.kernels)

    @property
    def intensity(self) -> float:
        """Flops a byte of device memory moved."""
        moved = self.read_bytes + self.written_bytes
        return self.flops / moved if moved else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All fields and totals as JSON values."""
        totals = [
            "launches", "launches_before", "syncs", "read_bytes", "written_bytes", "read_bytes_before",
            "written_bytes_before", "flops", "intensity",
        ]  # fmt: skip
        return {**asdict(self), "totals": {name: getattr(self, name) for name in totals}}

    def to_json(self) -> str:
        """A JSON text that `from_json` reads back."""
        return json.dumps(self.to_dict(), indent=1)

    @staticmethod
    def from_json(text: str) -> IoProfile:
        """The profile of a JSON text. Raises `ModelFormatError` for another text."""
        try:
            facts = json.loads(text)
            facts.pop("totals")
            kernels, before = (tuple(KernelIo(**k) for k in facts.pop(name)) for name in ("kernels", "before"))
            return IoProfile(**{**facts, "outputs": tuple(facts["outputs"])}, kernels=kernels, before=before)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelFormatError(f"this is no profile that IoProfile.to_json wrote: {error}") from None

    def __str__(self) -> str:
        at = ", ".join(f"{name}={n}" for name, n in self.at.items())
        rows = [("kernel", "kind", "read", "written", "flops", "flops/B", "")]
        rows += [
            (
                k.nodes or k.name,
                k.kind,
                f"{k.read_bytes:,}",
                f"{k.written_bytes:,}",
                f"{k.flops:,}",
                f"{k.intensity:.2f}",
                " ".join(part for part in ("sync" if k.sync else "", f"x {k.times}" if k.times > 1 else "") if part),
            )
            for k in self.kernels
        ]
        lines = [f"profile of {self.graph!r} on {self.device}{f' at {at}' if at else ''}", *_columns(rows)]
        lines.append(
            f"launches  {self.launches:,} (without fusion {self.launches_before:,}), sync points {self.syncs:,}"
        )
        for what, now, was in (
            ("read", self.read_bytes, self.read_bytes_before),
            ("written", self.written_bytes, self.written_bytes_before),
        ):
            lines.append(f"{what:9} {now:,} B (without fusion {was:,} B)")
        lines.append(
            f"copied    {self.h2d_bytes:,} B to the device, {self.d2h_bytes:,} B from it: results {self.results}"
        )
        lines.append(f"flops     {self.flops:,}, {self.intensity:.2f} a byte")
        return "\n".join(lines)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [min(40, max(len(row[i]) for row in rows)) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell[:width].ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


@bounded("profile", CompileError)
def profile(
    model: Any,
    device: str | Backend = "auto",
    *,
    outputs: Collection[str] | None = None,
    at: Mapping[str, int] | None = None,
    sync_ops: Collection[str] | None = None,
    views: bool = False,
    unified: bool | None = None,
    fetched: bool = False,
) -> IoProfile:
    """Counts a forward pass of a Graph on a device, or of a CompiledGraph on its own, without running it.

    `outputs` are those asked for (default: all): only what they need is counted. `at` gives extents of dims (default:
    their upper bounds). `sync_ops` names the ops at which the device waits, in place of the device's own list; for one
    that passes or the device take apart it waits at the kernel that makes the result. `views` counts a `run_views`
    rather than a `run`. `unified` says whether device and host share their memory (default: as the device says).
    Results of a device with memory of its own stay there; `fetched` counts copies of them to the host. Raises
    `NameNotFound`, `ShapeError`, `OptionError`, and what lowering raises.
    """
    if isinstance(model, Graph):
        backend = _backend(device)
        lowered = lower(model, backend)
    elif hasattr(model, "compilation"):
        backend = backend_named(model.device)
        if device not in ("auto", model.device, backend):
            raise OptionError(f"device={device!r}: the model is compiled for {model.device!r}; profile its graph")
        made = model.compilation
        lowered = lowered_from(made.source, made.legal, made.dispatch, backend, made.program)
    else:
        raise OptionError(f"profile takes a Graph or a compiled graph, got {type(model).__name__}")
    shared = backend.unified if unified is None else unified
    return profile_of(
        lowered,
        backend.name,
        shared,
        backend.merges,
        outputs=outputs,
        at=at,
        sync_ops=sync_ops,
        views=views,
        fetched=fetched,
    )


def _backend(device: str | Backend) -> Backend:
    return device if isinstance(device, Backend) else choose_backend(device)


def profile_of(
    lowered: Lowered,
    device: str,
    unified: bool,
    merges: bool,
    *,
    outputs: Collection[str] | None = None,
    at: Mapping[str, int] | None = None,
    sync_ops: Collection[str] | None = None,
    views: bool = False,
    fetched: bool = False,
) -> IoProfile:
    """The profile of a graph that is lowered already; arguments as for `profile`.

    `merges`: whether the device makes one kernel of several nodes; else its kernels are those before fusion.
    """
    unmerged = lowered.unmerged
    program = lowered.program if merges else unmerged
    names = tuple(name for name, _ in program.outputs)
    for name in outputs or ():
        if name not in names:
            raise no_such("output", name, names, call="outputs")
    wanted = names if outputs is None else tuple(name for name in names if name in outputs)
    extents = extents_at(lowered.graph, at)

    for op in sync_ops or ():
        if op not in OPERATORS:
            raise no_such("op", op, OPERATORS, call="sync_ops")
    waits: list[object] = [] if sync_ops is None else results_of(lowered.legal, set(sync_ops), (program, unmerged))

    def syncs(kernel: Kernel) -> bool:
        if sync_ops is None:
            return lowered.syncs(kernel)
        return any(node.op.op_name in sync_ops or any(node.op is op for op in waits) for node in kernel.nodes)

    kernels = needed(program, wanted)
    sizes = dict(extents)
    rounds = rounds_of(program, sizes)
    apart = rounds_of(unmerged, sizes)
    before = tuple(_counted(g, sizes, any(map(syncs, g)), apart[g[0]]) for g in _by_node(unmerged, wanted))
    asked = [k for k in program.run if k.mark is not None and k.mark.part in ("if", "while") and syncs(k)]
    waiting = {k: rounds[k] for k in kernels if syncs(k)}
    stays = not unified and not fetched
    shown = 0 if stays or (unified and views) else sum(b.nbytes(sizes) for n, b in program.outputs if n in wanted)
    h2d, d2h = (0, 0) if unified else _transfers(program, kernels, wanted, sizes, waiting)
    return IoProfile(
        lowered.graph.name,
        device,
        extents,
        wanted,
        tuple(_counted([k], sizes, syncs(k), rounds[k]) for k in kernels) if merges else before,
        before,
        h2d,
        d2h + shown,
        sum(rounds[k] for k in asked),
        "stay on the device" if stays else "are views" if unified and views else "are copied out",
    )


def _by_node(program: Program, outputs: Collection[str]) -> list[list[Kernel]]:
    """The kernels of an unfused program that belong together: a node with several outputs is one launch."""
    groups: dict[object, list[Kernel]] = {}
    for kernel in needed(program, outputs):
        key: object = kernel.nodes[0] if kernel.nodes else kernel
        groups.setdefault(key, []).append(kernel)
    return list(groups.values())


def _counted(kernels: Sequence[Kernel], extents: dict[str, int], sync: bool, times: int) -> KernelIo:
    """Kernels as one launch: an operand that several of them read is read once."""
    works = [kernel_work(k, extents) for k in kernels]
    first = kernels[0]
    read = works[0].read
    if len(kernels) > 1:
        roots = {b.base: b.base.nbytes(extents) for k in kernels for b in k.reads()}
        read = min(sum(w.read for w in works), sum(roots.values()))
    return KernelIo(
        first.how,
        first.name,
        "" if first.label == first.name else first.label,
        read,
        sum(w.written for w in works),
        sum(w.flops for w in works),
        sync,
        times,
    )


def _transfers(
    program: Program,
    kernels: Sequence[Kernel],
    outputs: Collection[str],
    extents: dict[str, int],
    syncs: Mapping[Kernel, int],
) -> tuple[int, int]:
    """Bytes to and from a device with memory of its own, but for results."""
    read = {b.base for k in kernels for b in k.reads()} | {b.base for n, b in program.outputs if n in outputs}
    given = sum(b.nbytes(extents) for b in program.inputs if b in read)

    def moved(buffers: Collection[Buffer]) -> int:
        return sum(b.nbytes(extents) for b in dict.fromkeys(buffers))

    to_host = sum(n * moved(k.reads()) for k, n in syncs.items())
    to_device = sum(n * moved(k.writes()) for k, n in syncs.items())
    return given + to_device, to_host
