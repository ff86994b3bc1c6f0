"""Whether a model may have the memory that it needs, asked before any of it is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rlx.backends.base import CodeGenerator
from rlx.backends.memory import DeviceMemory
from rlx.errors import MemoryDeficit
from rlx.estimate.calibrate import Overhead, known_overhead
from rlx.estimate.memory import MemoryEstimate, deficit_details
from rlx.estimate.stored import SMALL, Device
from rlx.estimate.system import ADDRESS_SPACE, UNKNOWN, Budget, read_figures
from rlx.ir.graph import Graph
from rlx.lazy_imports import log
from rlx.options import CompileOptions
from rlx.records import cached_property, dataclass, names_of, replace
from rlx.units import bytes_text

if TYPE_CHECKING:
    from rlx.compiler import Stages
    from rlx.estimate.graph import Lowered
    from rlx.kernels.program import Program

__all__ = ["WAYS_OUT", "Admission", "CarefulAdmission", "PastAdmission", "admit_compiler", "figures_of", "plenty"]

WAYS_OUT = "Lower the dims' upper bounds, raise budget=, or pass over_budget='allow'"
_NO_COMPILER = "Raise the limit, load an artifact (which brings no compiler), or pass over_budget='allow'"

PLENTY = 1 << 30  # bytes, far more than compiling takes
AGAIN = (
    16 << 20
)  # bytes that compiling may take where the compiler has been used before, as memory it freed is in parts

_admitted: set[str] = set()  # the devices whose compiler was let into this process


class Admission:
    """Compares what a model adds to this process with `budget=`, or with the soft budget and what the system has free.

    What the device takes by itself is left out of a `budget=`, which is the model's own; the soft budget sees it as
    far as it is still to come. Each question raises `MemoryDeficit`, warns, or passes, as `over_budget` says.
    """

    def __init__(self, backend: Device, options: CompileOptions) -> None:
        self.backend, self.options = backend, options
        self.lowered: Lowered | None = None
        self.library: MemoryEstimate | None = None  # at the upper bounds, of a device that manages its memory itself
        self.library_at: Callable[[Mapping[str, int] | None], MemoryEstimate] | None = None
        self.model = ""
        self.taken = 0  # bytes of the model once it is there, of `budget=`

    @cached_property
    def overhead(self) -> Overhead:
        """What the device takes by itself and this process does not have yet."""
        return known_overhead(self.backend.name).left(self.backend.name)

    def __call__(self, graph: Graph, legal: Graph, program: Program | None) -> None:
        """The question before code is made, weights are copied and the arena is there."""
        from rlx.estimate.graph import estimate_library, lowered_of

        self.model = graph.name
        if program is None or not isinstance(self.backend, CodeGenerator):
            name, overhead, options = self.backend.name, self.overhead, self.options

            def at(extents: Mapping[str, int] | None) -> MemoryEstimate:
                return estimate_library(graph, legal, name, overhead, options, extents, known=extents is not None)

            self.library_at = at
            if all(s.hi is not None for s in graph.dims().values()):
                self.library = at(None)
            # A budget is what the model may take at the most. What the system has is compared with what is sure to be
            # taken, the weights: the device frees activations as it likes.
            sure = at({})
            needs = self.library or sure
            self.taken = needs.own.peak_bytes
            weights = MemoryEstimate(graph.name, name, weight_bytes=sure.weight_bytes)
            self.ask(weights if options.budget_bytes is None else needs)
            return
        self.lowered = lowered_of(graph, program, self.backend, self.options, self.overhead)
        needs = self.lowered.at_bounds() or self.lowered.fixed()
        self.taken = needs.running_peak_bytes - needs.overhead_bytes
        self.ask(needs, compiling=True)

    def weights(self, model: str, nbytes: int) -> None:
        """The question before a file is imported: the bytes of weights that must be copied out of it."""
        self.ask(MemoryEstimate(model, self.backend.name, weight_bytes=nbytes))

    def room(self, extents: Mapping[str, int], nbytes: int) -> None:
        """The question before an arena grows by that many bytes for a run at `extents`."""
        if self.options.over_budget == "allow":
            return
        if self.lowered is None:
            if self.library_at is not None and self.library is None and self.options.budget_bytes is not None:
                self.ask(self.library_at(extents))
            return
        if self.options.budget_bytes is None:
            self.ask(MemoryEstimate(self.lowered.graph.name, self.backend.name, activation_bytes=nbytes))
        elif self.lowered.timeline.bounds is None:  # else it was asked for the bounds
            self.ask(self.lowered.at(extents))

    def experts(self, extents: Mapping[str, int] | None, offloaded: int, more: int) -> None:
        """The question before `more` bytes of experts are packed, while `offloaded` bytes of them are not there."""
        if self.options.over_budget == "allow":
            return
        if self.options.budget_bytes is None:
            self.ask(MemoryEstimate(self.model, self.backend.name, weight_bytes=more))
            return
        made = self.predicted(extents)
        if made is not None:
            self.ask(made.without_experts(offloaded - more))

    def snapshots(self, extents: Mapping[str, int] | None, nbytes: int) -> None:
        """The question before a queue of runs holds that many bytes of inputs, beside an arena at `extents`."""
        if self.options.over_budget == "allow":
            return
        if self.options.budget_bytes is None:
            self.ask(MemoryEstimate(self.model, self.backend.name, input_bytes=nbytes))
            return
        made = self.predicted(extents)
        if made is not None:
            counted = self.options.queue is not None
            self.ask(made if counted else replace(made, input_bytes=made.input_bytes + nbytes))

    def predicted(self, extents: Mapping[str, int] | None) -> MemoryEstimate | None:
        """The estimate at the extents of a plan, or of what does not depend on them; None if nothing is known."""
        if self.lowered is None:
            return self.library
        return self.lowered.fixed() if extents is None else self.lowered.at(extents)

    def ask(self, needs: MemoryEstimate, *, compiling: bool = False) -> None:
        """Compares needs with what is allowed; `compiling`: they are those of a graph that is about to be compiled."""
        options = self.options
        if options.over_budget == "allow":
            return
        own = needs.own
        if options.budget_bytes is not None:
            self.settle(own, options.budget_bytes, "by budget=")
            return
        if own.peak_bytes < SMALL and not compiling:
            return
        free = self.backend.memory().free
        budget = Budget.of_process()
        private = replace(own, weight_bytes=own.weight_bytes - own.mapped_weight_bytes)
        mapped = private
        if compiling:
            passing, most = self.overhead.passing, max(self.overhead.compiling, AGAIN)
            more = max(0, needs.compiler_bytes - passing)  # of the graph's own text
            private = replace(private, overhead_bytes=most - passing, compiler_bytes=passing + more)
            mapped = replace(mapped, overhead_bytes=max(self.overhead.address_compiling, AGAIN))
        shared = getattr(self.backend, "unified", True)
        for allowed, why, asked in (
            (budget.soft_room, "by the soft budget of this process", private),
            *(
                (left, f"by {name}", mapped if name == ADDRESS_SPACE else private)
                for name, left in budget.figures.rooms.items()
            ),
            # what is mapped from a file lies in a device's own memory, too
            (free, f"by what the device {self.backend.name!r} has free", private if shared else own),
        ):
            if allowed is not None:
                self.settle(asked, allowed, why)
        if budget.would_exceed(private.peak_bytes) is UNKNOWN and free is None:
            log.warning(
                "%s needs %s: whether that fits is unknown, as the system does not say what is free",
                needs.model,
                bytes_text(needs.peak_bytes),
            )

    def settle(self, needs: MemoryEstimate, allowed: int, why: str, ways_out: str = WAYS_OUT) -> None:
        """Raises or warns if the peak is above what is allowed."""
        peak = needs.peak_bytes
        if peak <= allowed:
            return
        missing = peak - allowed
        which = next(name for name, size in needs.peaks.items() if size == peak)
        head = (
            f"{needs.model!r} needs {peak:,} B while {which}, {missing:,} B more than the {allowed:,} B allowed {why}"
        )
        remedies = needs.remedies(allowed)
        message = f"{head}. {ways_out}\n{deficit_details(needs, needs.parts_at_peak, remedies)}"
        if self.options.over_budget == "warn":
            log.warning(message)
            return
        raise MemoryDeficit(
            message,
            budget_bytes=allowed,
            peak_bytes=peak,
            parts=needs.parts_at_peak,
            remedies=remedies,
            estimate=needs,
        )


def admit_compiler(device: str, options: CompileOptions) -> None:
    """The question before the compiler of a device comes into this process, where a limit might not leave room for it.

    Libraries that don't find the memory to load fail with errors that don't say so.
    """
    if device in _admitted or options.over_budget == "allow":
        return
    overhead = known_overhead(device)
    admission = Admission(NamedDevice(device), options)
    for name, left in read_figures().rooms.items():
        size = overhead.fixed - overhead.compiling  # what a compile takes is asked for once the graph is known
        if name == ADDRESS_SPACE:
            size = overhead.address - overhead.address_compiling
        needs = MemoryEstimate(f"the compiler for {device}", device, overhead_bytes=size)
        admission.settle(needs, left, f"by {name}", _NO_COMPILER)
    _admitted.add(device)


def plenty(options: CompileOptions) -> bool:
    """Whether a model may be compiled on several threads, and before it is known what it takes: memory is not short."""
    if options.over_budget == "allow":
        return True
    budget = Budget.of_process()
    rooms = (budget.soft_room, *budget.figures.rooms.values())
    return options.budget_bytes is None and all(room is not None and room >= PLENTY for room in rooms)


@dataclass(frozen=True)
class NamedDevice:
    """A device that is not loaded yet."""

    name: str

    def memory(self) -> DeviceMemory:
        return DeviceMemory(None, None)


class CarefulAdmission(Admission):
    """The same for code that was stored with the figures of its estimate, and compiles nothing.

    Only for estimates of other extents are the stages of the compiler gone through, by `stages`.
    """

    def __init__(
        self,
        device: Device,
        options: CompileOptions,
        model: str,
        figures: Mapping[str, int],
        stages: Callable[[], Stages],
    ) -> None:
        super().__init__(device, options)
        self.model, self.stages = model, stages
        known = {name: size for name, size in figures.items() if name in names_of(MemoryEstimate)}
        self.stored = MemoryEstimate(model, device.name, **known) if known else None  # type: ignore[arg-type]

    def ask_stored(self) -> None:
        """The question before what is stored is loaded."""
        if self.stored is not None:
            self.ask(self.stored.own)

    @cached_property
    def overhead(self) -> Overhead:
        left = known_overhead(self.backend.name).left(self.backend.name)
        return replace(left, fixed=left.stays, compiling=0, passing=0, opening=0, address_compiling=0)

    def predicted(self, extents: Mapping[str, int] | None) -> MemoryEstimate | None:
        if extents is not None and not extents:
            return self.stored  # no dims: the figures are those of every run
        self._lower()
        return super().predicted(extents)

    def room(self, extents: Mapping[str, int], nbytes: int) -> None:
        if self.options.over_budget == "allow":
            return
        if self.options.budget_bytes is None:
            self.ask(MemoryEstimate(self.model, self.backend.name, activation_bytes=nbytes))
            return
        self._lower()
        super().room(extents, nbytes)

    def _lower(self) -> None:
        from rlx.backends import backend_named
        from rlx.estimate.graph import lowered_of

        backend = backend_named(self.backend.name)
        if self.lowered is None and isinstance(backend, CodeGenerator):
            made = self.stages()
            assert made.program is not None
            self.lowered = lowered_of(made.source, made.program, backend, self.options, self.overhead)


class PastAdmission(Admission):
    """What stays of the question once the graph is closed: the answer, as far as it was known without more work."""

    def __init__(self, asked: Admission, extents: Mapping[str, int] | None) -> None:
        super().__init__(asked.backend, asked.options)
        unknown = isinstance(asked, CarefulAdmission) and asked.lowered is None and extents != {}
        made = None if unknown else asked.predicted(extents)
        self.model, self.overhead = asked.model, asked.overhead
        self.made = None if made is None else replace(made, axes={}, choices=None, opened=None)  # these hold the graph

    def predicted(self, extents: Mapping[str, int] | None) -> MemoryEstimate | None:
        return self.made


def figures_of(admission: Admission) -> dict[str, int]:
    """What is stored of an estimate: its sizes in bytes at the upper bounds, or of what does not depend on them.

    The inputs of a queue are not in them: whoever loads it may ask for another.
    """
    lowered = admission.lowered
    made = admission.library if lowered is None else lowered.at_bounds() or lowered.fixed()
    sizes = {} if made is None else {name: getattr(made, name) for name in names_of(made)}
    found = {name: int(size) for name, size in sizes.items() if name.endswith("_bytes")}
    if "input_bytes" in found:
        found["input_bytes"] //= admission.options.input_sets
    return found
