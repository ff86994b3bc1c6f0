"""A compiled graph on the CPU: the arena, the binding to the extents of a run, and the calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.base import Image, Joins
from rlx.backends.codegen.binding import Views, as_array, grows, room_for, settable
from rlx.backends.cpu.native.entry import Entry, InputSpec, Patch, make_entry, patch_table, selected_entry
from rlx.backends.cpu.native.runner import RunBlock, phase_table
from rlx.backends.cpu.native.runner_ir import BUSY, HOLDS, INPUT_COUNT, JOB, RELEASE_GIL
from rlx.backends.cpu.runtime.binding import Binding, Bound, aligned_bytes
from rlx.backends.cpu.runtime.concurrent_phases import jobs
from rlx.backends.cpu.runtime.moe import ExpertCalls
from rlx.backends.cpu.runtime.results import DIRECT, LARGE, ResultMemory, is_movable
from rlx.backends.cpu.runtime.shared import Shared, timeline
from rlx.backends.cpu.runtime.states import StateCalls, StateMemory
from rlx.boundary import bounded
from rlx.errors import ExecutionError, OptionError, ShapeError
from rlx.ir.extents import bind_extents, check_guards
from rlx.ir.graph import Array, Graph
from rlx.ir.shape import Dim, Size, evaluate
from rlx.kernels.program import Buffer, Kernel, Program
from rlx.lazy_imports import log
from rlx.plan.arena import MemoryPlan, Schedule, size_of
from rlx.records import cached_property

if TYPE_CHECKING:
    from rlx.backends.cpu.runtime.selected_outputs import Selection
    from rlx.backends.timing import KernelTime

__all__ = ["CpuExecutable"]

Shapes = tuple[tuple[int, ...], ...]

KEPT_BINDINGS = 128  # a binding is some 20 kB; a model that alternates between this many shapes never binds again
POISON = 0xFF  # every byte of the arena before a run in debug mode: floats are NaN


class CpuExecutable(StateCalls, ExpertCalls):
    """The run of one clone. Whoever changes or runs it holds the state block meanwhile."""

    capabilities = frozenset({"arena", "slots", "clone", "out", "profile", "dynamic", "states", "save", "experts"})

    program: Program

    def __init__(
        self,
        shared: Shared,
        known: Schedule | None = None,
        plan: MemoryPlan | None = None,
        states: StateMemory | None = None,
        captured: int = 0,
    ) -> None:
        self.shared = shared
        self.states = StateMemory(shared.program) if states is None else states
        self.captured = captured
        self.is_watched = shared.options.debug or shared.options.trap != "off"  # then runs don't go the fastest way
        self.program = shared.program
        self.room: dict[str, int] = {}  # for sizes that data decide and nothing bounds: the most so far
        self.schedule = timeline(shared.program) if known is None else known
        self.fits_all = self.schedule.bounds is not None  # one plan, at the bounds, serves every run
        if plan is None and self.schedule.bounds is not None:
            plan = self.make_plan(self.schedule.bounds)
        self.plan = self.bounds_plan = plan
        self.memory = aligned_bytes(0)
        self.scratch = aligned_bytes(0)
        self.dims: dict[str, int] = {}  # extents that no input's shape tells
        self.kept: dict[Shapes, Bound] = {}  # by last use
        self.shapes: Shapes | None = None  # what the entry is bound to
        self.bound: Bound | None = None
        self.written: tuple[Array | None, ...] = ()  # results of the last run with `out` or some outputs only
        sizes = [buffer.bound() for _, buffer in self.program.outputs]
        self.varies = None in sizes or any(isinstance(s, Dim) for _, b in self.program.outputs for s in b.shape)
        self.result_bytes = sum(size or 0 for size in sizes)  # of the last run, at first of the largest
        self.fresh = ResultMemory()
        self.block = RunBlock(threads=shared.threads)
        self.words = self.block.words.data  # faster to read than the array
        self.every = tuple(range(len(self.program.outputs)))
        self.slots_entry: Any = make_entry(self.block, self.input_specs(), [], self.fallback, self.on_error, False)
        self.run_selected = selected_entry(self.entry)
        self.known_free = self.free  # the inputs that the entry knows of
        self.forget()
        shared.enter(self)

    # ---- the protocol

    @property
    def slots(self) -> Callable[..., Any]:
        checked = self.is_watched or self.may_start_again  # without the native check
        return (lambda *arrays: self.fallback(arrays)) if checked else self.slots_entry

    @property
    def arena(self) -> Array:
        shown = self.memory.view()
        shown.flags.writeable = False
        return shown

    @property
    def results(self) -> tuple[Array | None, ...] | None:
        """Outputs of the last run, None before the first. Raises `ExecutionError` when it failed."""
        if self.bound is None:
            return None
        if self.block.status:
            raise ExecutionError("the last run failed: it has no outputs")
        value = self.block.value
        if value == 0:
            return self.made(self.bound)
        return next((s.shown for s in self.bound.selected.values() if s == value), self.written)

    def set_params(self, arrays: Mapping[str, Array]) -> None:
        if not arrays:
            return
        with self.held():
            self.forget()  # first: what was bound is of the params before, also where this is interrupted
            self.shared = self.shared.parted(self)
            self.shared.set_params(arrays)

    def raw_param(self, name: str) -> Array | None:
        found = next((b for b in self.shared.params if b.name == name), None)
        if found is not None and found.is_packed:
            return self.shared.contents(found)
        return None if found is None else self.shared.params[found]

    def pack(self) -> None:
        if self.shared.prepared or all(b in self.shared.params for b in self.program.params):
            self.shared.update()

    def image(self, source: Graph) -> Image:
        from rlx.backends.cpu.runtime.save_image import image_of

        return image_of(self, source)

    def clone(self, fresh: bool = False) -> CpuExecutable:
        if fresh:
            return CpuExecutable(self.shared, self.schedule, self.bounds_plan)
        with self.held():
            calls = self.experts.calls if self.program.experts else 0
            made = CpuExecutable(self.shared, self.schedule, self.bounds_plan, self.states.copy(), calls)
        made.dims.update(self.dims)
        return made

    def trim(self) -> None:
        with self.held():
            nothing = aligned_bytes(0)
            self.forget()
            self.entry.set_result(None)
            self.bound, self.written = None, ()
            self.fresh.clear()
            self.memory = self.scratch = nothing
            self.room = {}
            if not self.fits_all:
                self.plan = None

    def dispose(self) -> None:
        self.trim()
        self.shared.leave(self)

    def run(self, inputs: Sequence[Array], out: Sequence[Array | None], wanted: Sequence[int]) -> list[Array]:
        from rlx.backends.cpu.runtime.general_run import run

        return run(self, inputs, out, wanted)

    def run_fresh(
        self, inputs: Sequence[Any], wanted: tuple[int, ...] | None = None, out: Sequence[Any] | None = None
    ) -> list[Array] | None:
        words = self.words
        if self.states.memory or self.is_watched or (self.waits and words[BUSY]):
            return None  # who has to wait holds the block while results are copied: nobody comes in between
        if self.result_bytes >= LARGE:
            from rlx.backends.cpu.runtime.general_run import run_direct

            made = run_direct(self, inputs, out) if wanted is None else None
            if made is not None or self.result_bytes >= DIRECT:
                return made
        holds = words[HOLDS] + 1
        if wanted is None and out is None:
            made = [a.copy() for a in tuple.__iter__(self.slots_entry(*inputs))]  # of views, without their own __iter__
            if self.varies:
                self.result_bytes = sum(a.nbytes for a in made)
            return made if words[HOLDS] == holds else None
        asked = self.every if wanted is None else wanted
        targets = () if out is None else out
        selected = None if (bound := self.bound) is None else bound.selected.get(asked)
        found = None if selected is None else self.run_selected(selected, *inputs, *targets)
        if found is None:
            from rlx.backends.cpu.runtime.general_run import rebound

            selected = rebound(self, inputs, asked, targets, selected)
            holds = words[HOLDS] + 1
            found = None if selected is None else self.run_selected(selected, *inputs, *targets)
        if found is None:
            return None
        if out is None:
            made = [a.copy() for a in found]
        elif found is True:
            return list(out) if wanted is None else [out[number] for number in wanted]
        else:
            made = [a.copy() if (t := out[n]) is None else t for n, a in zip(asked, found, strict=False)]
        return made if words[HOLDS] == holds else None

    @property
    def joins(self) -> Joins | None:
        if self.bound is None or self.shared.threads == 1:
            return None
        from rlx.backends.cpu.runtime.profile import joins

        return joins(self.bound)

    @property
    def profiled(self) -> Sequence[Kernel]:
        return [phase.kernel for phase in self.shared.run.phases]

    def profile(self, inputs: Sequence[Array], repeat: int) -> list[KernelTime]:
        from rlx.backends.cpu.runtime.profile import profile

        return profile(self, inputs, repeat)

    @cached_property
    def selection(self) -> Selection:
        """Which phases outputs take."""
        from rlx.backends.cpu.runtime.selected_outputs import Selection

        return Selection(self.program, self.profiled)

    @cached_property
    def settable(self) -> frozenset[str]:
        """The dims that `set_extent` takes."""
        return settable(self.shared.graph, self.program)

    def set_extent(self, dim: str, extent: int | None) -> None:
        if dim not in self.settable:
            raise OptionError(f"set_extent: the dim {dim!r} is decided by the data of each run")
        with self.held():
            self.dims.pop(dim, None)
            if extent is not None:
                self.dims[dim] = extent
            self.forget()

    # ---- binding

    def make_plan(self, extents: Mapping[str, int], spread: Mapping[str, Size] | None = None) -> MemoryPlan:
        from rlx.plan.plan import make_plan

        options = self.shared.options
        return make_plan(
            self.schedule,
            extents,
            alignment=options.alignment,
            reuse=options.reuse,
            search=options.search,
            spread=spread,
        )

    def forget(self) -> None:
        """Closes the entry and drops all bindings: the next call binds anew. For a change of params or memory."""
        self.close()
        self.kept.clear()

    def close(self) -> None:
        """Makes the native check of every call fail, so that it comes to `fallback`."""
        self.shapes = None
        self.entry.close()
        self.block.words[INPUT_COUNT] = len(self.entry.records)  # without inputs too

    @property
    def free(self) -> list[int]:
        """The numbers of the inputs that each call gives; the others are kept between runs."""
        return [number for number, b in enumerate(self.program.inputs) if b not in self.states.memory]

    def bind(self, inputs: Sequence[Array]) -> Bound:
        """Binds the run and the entry to the shapes of these inputs, if they are not bound to them already."""
        shapes = tuple(a.shape for a in inputs)
        if shapes == self.shapes:
            assert self.bound is not None
            return self.bound
        self.close()  # should something below fail
        if self.known_free != self.free:  # inputs are kept that were not, or no longer
            self.entry.set_inputs(self.input_specs())
            self.known_free = self.free
            self.close()
        bound = self.kept.pop(shapes, None)
        if bound is None:
            with self.restoring():
                bound = self.make_bound(shapes)
        self.kept[shapes] = bound
        if len(self.kept) > KEPT_BINDINGS:
            del self.kept[next(iter(self.kept))]
        for root in self.states.roots():
            bound.binding.point(root, self.address(root))
        self.block.use(bound.table)
        bound.binding.block = self.block
        self.block.words[RELEASE_GIL] = bound.releases
        start = int(self.memory.ctypes.data)
        self.entry.update(patches=bound.given, guard=(start, start + self.memory.nbytes))
        self.open(bound, shapes)
        self.entry.set_result(bound.results[self.states.parity[0]])
        self.bound, self.plan, self.shapes = bound, bound.plan, shapes
        return bound

    def open(self, bound: Bound, shapes: Shapes) -> None:
        """Has the entry take inputs of these shapes; not where only `fallback` can run, which keeps states."""
        free = self.free
        if self.may_start_again:
            return
        if bound.records is None:
            self.entry.update(shapes={index: shapes[number] for index, number in enumerate(free)})
            bound.records = self.entry.records.copy()
        else:
            self.entry.records[:] = bound.records
        self.block.words[INPUT_COUNT] = len(free)

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Memory, plan and room are as before after an error inside: a run that can't be takes nothing from others."""
        before = self.plan, self.memory, self.scratch, self.room
        try:
            yield
        except BaseException:
            if before[1] is not self.memory or before[2] is not self.scratch or before[0] is not self.plan:
                self.kept.clear()
            self.plan, self.memory, self.scratch, self.room = before
            raise

    def make_bound(self, shapes: Shapes) -> Bound:
        inputs = self.program.inputs
        names = [b.name for b in inputs]
        extents = {**self.dims, **bind_extents(self.shared.graph, dict(zip(names, shapes, strict=True)))}
        unset = [name for name in self.settable if name not in extents]
        if unset:
            raise ShapeError(f"the extent of dim {unset[0]!r} is not known: give it to set_extent")
        check_guards(self.shared.graph, extents)
        self.shared.update()
        room = room_for(self.program, extents, self.room)
        if self.program.experts:
            self.experts.bind(self.shared, {**extents, **room})
        self.make_room({**extents, **room}, {name: Dim(name, 0, most) for name, most in room.items()})
        assert self.plan is not None
        scratch = int(self.scratch.ctypes.data)
        keep = (tuple(self.shared.params.values()), self.memory, self.scratch)
        binding = Binding(
            self.shared.run, extents, self.address, scratch, Views(self.array), keep, room=room, dims=self.program.dims
        )
        releases = bool(self.shared.run.rounds) or binding.is_long()
        found = jobs(binding.table, self.shared.spans_of(self.plan), binding.rows)
        bound = Bound(binding, self.plan, phase_table(binding.rows), found, releases, [], (), ())
        self.show(bound)
        binding.changing = lambda: self.leave_out(bound)
        binding.resized = lambda: self.resize(bound, shapes)
        if self.states.feeds:
            results = (bound.results[0], bound.results[1])
            phase, bound.feeds = self.states.phase(binding, results, self.address)
            bound.table = phase_table([*binding.rows, phase])
        for job in found:
            bound.table[job.first, JOB] = job.words.ctypes.data
        return bound

    def show(self, bound: Bound) -> None:
        """Fills in the patches of the inputs and the arrays of the outputs, at the present extents."""
        extents = bound.binding.extents
        bound.patches = bound.binding.patches(self.program.inputs)
        bound.given = patch_table(self.entry_patches(bound))
        sets = [self.output_arrays(parity, extents) for parity in range(2 if self.states.feeds else 1)]
        bound.arrays, bound.results = tuple(sets), tuple(map(self.wrap, sets))
        if bound.feeds is not None:
            bound.feeds[1:3] = [id(result) for result in bound.results]

    def entry_patches(self, bound: Bound) -> list[Patch]:
        """The patches of the inputs that each call gives, by their place among them."""
        place = {number: index for index, number in enumerate(self.free)}
        return [(place[number], word, shift) for number, word, shift in bound.patches if number in place]

    def output_arrays(self, parity: int, extents: Mapping[str, int]) -> tuple[Array, ...]:
        """The outputs after a run that leaves the parity so."""
        arrays = []
        for number, (_, buffer) in enumerate(self.program.outputs):
            fed = self.states.output(number, parity, extents)
            if fed is None and not self.is_consistent(buffer, extents):
                fed = np.empty((0,) * len(buffer.shape), buffer.dtype.numpy)
            made = self.array(buffer, extents) if fed is None else fed
            made.flags.writeable = False
            arrays.append(made)
        return tuple(arrays)

    def is_consistent(self, buffer: Buffer, extents: Mapping[str, int]) -> bool:
        """Whether the shape of an output makes sense; it may not before all sizes that data decide are known."""
        if not self.program.made:
            return True
        whole = all(evaluate(size, extents) >= 0 for size in (*buffer.shape, *buffer.base.shape))
        offset = evaluate(buffer.offset, extents)
        return whole and 0 <= offset <= buffer.base.nbytes(dict(extents)) - buffer.nbytes(dict(extents))

    def made(self, bound: Bound) -> tuple[Array, ...]:
        """The outputs of the last run on this binding."""
        return bound.arrays[self.states.parity[0]]

    @property
    def grows(self) -> bool:
        """Whether a run may find that it needs more room."""
        return grows(self.program)

    @property
    def may_start_again(self) -> bool:
        """Whether a run may find that it needs more room when it has updated states, which then must be as before."""
        return bool(self.program.states) and self.grows

    def leave_out(self, bound: Bound) -> None:
        """Called in a run before sizes that data decide change: no run is to meet words of which some have changed."""
        self.close()
        self.kept = {shapes: other for shapes, other in self.kept.items() if other is not bound}

    def resize(self, bound: Bound, shapes: Shapes) -> None:
        """Called in a run when sizes that data decide have changed."""
        need = bound.binding.scratch_bytes() * self.shared.threads
        if need > self.scratch.nbytes:
            scratch = aligned_bytes(need)
            bound.binding.keep = (bound.binding.keep, scratch)
            self.kept.clear()
            self.scratch = scratch
        bound.binding.rescratch(int(self.scratch.ctypes.data))
        self.show(bound)
        self.entry.update(patches=bound.given)
        self.entry.set_result(bound.results[self.states.parity[0]])
        self.kept[shapes] = bound
        self.shapes = shapes
        self.open(bound, shapes)

    def make_room(self, extents: Mapping[str, int], spread: Mapping[str, Size]) -> None:
        """A plan that these extents fit into, and memory for it. What changes address makes bindings void.

        `spread`: the sizes that data decide, within the room for them; no size within it takes more than planned.
        """
        need = self.shared.run.scratch_bytes(extents) * self.shared.threads
        plan, memory, scratch = self.plan, self.memory, self.scratch
        if plan is None or not (self.fits_all or self.fits(plan, extents, spread)):
            plan = self.make_plan(extents, spread)
        if plan.arena > memory.nbytes:
            self.reserve(extents, plan.arena - memory.nbytes)
            if memory.nbytes:
                log.info("%s: the arena grows to %d bytes at %s", self.program.name, plan.arena, dict(extents))
            # A plan for the largest sizes gives each buffer a place of that size, of which a run uses the beginning.
            sparse = plan is self.bounds_plan and len(extents) > 0
            memory = aligned_bytes(plan.arena, max(64, plan.alignment), sparse=sparse)
        if need > scratch.nbytes:
            scratch = aligned_bytes(need)
        if plan is not self.plan or memory is not self.memory or scratch is not self.scratch:  # nothing fails any more
            self.kept.clear()
            self.plan, self.memory, self.scratch = plan, memory, scratch

    def fits(self, plan: MemoryPlan, extents: Mapping[str, int], spread: Mapping[str, Size]) -> bool:
        """Whether every buffer is within its place in the plan."""
        pairs = zip(plan.intervals, plan.held, strict=True)
        sized = ((size_of(b, extents, False, spread=spread), place.size) for place, held in pairs for b in held)
        return all(size <= room for size, room in sized)

    def address(self, root: Buffer) -> int:
        """The address of a root buffer; that of an input is patched in by each run."""
        held = self.states.address(root)
        if held is not None:
            return held
        if root.kind == "input":
            return 0
        if root.kind == "table":
            return self.experts.address(root)
        if root.kind != "arena":
            return self.shared.address(root)
        assert self.plan is not None
        return int(self.memory.ctypes.data) + self.plan.offsets[root]

    def array(self, buffer: Buffer, extents: Mapping[str, int]) -> Array:
        """A buffer that is not an input as an array over its memory."""
        if buffer.base.kind == "state":
            offset = evaluate(buffer.offset, extents)
            return as_array(self.states.current(buffer.base), buffer, offset, extents)
        if buffer.base.kind != "arena":
            return self.shared.contents(buffer)
        assert self.plan is not None
        return as_array(self.memory, buffer, self.plan.address(buffer, extents), extents)

    def is_movable(self, buffer: Buffer) -> bool:
        """Whether a run can write an output elsewhere than in the arena."""
        return is_movable(buffer, self.program.outputs, self.host_buffers())

    def host_buffers(self) -> set[Buffer]:
        """The root buffers that host calls of the run use."""
        calls = [p.kernel for p in self.shared.run.phases if p.code is None]
        return {b.base for k in calls for b in (*k.operands, *k.results)}

    # ---- calls

    def input_specs(self) -> list[InputSpec]:
        """What the native entry takes: the inputs that are not kept."""
        specs = []
        for b in (self.program.inputs[number] for number in self.free):
            # Buffers have no format for the other types: "c" of one or two bytes is one that no buffer comes with.
            kind = b.dtype.kind if b.dtype.native else "c"
            specs.append(InputSpec(kind, b.dtype.numpy.itemsize, (-1,), None if b.dtype.native else b.dtype.numpy))
        return specs

    @property
    def entry(self) -> Entry:
        return self.slots_entry.__self__  # type: ignore[no-any-return]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Takes the state block; when another thread has it, waits if calls do so here, or raises `BusyError`."""
        self.block.acquire(self.waits)
        try:
            yield
        finally:
            self.block.release()

    def compact(self, arrays: Sequence[Array]) -> list[Array]:
        """The arrays as kernels read them: contiguous, aligned, and not in the arena."""
        start = int(self.memory.ctypes.data)
        stop = start + self.memory.nbytes
        ready = []
        for array in arrays:
            made = np.require(array, requirements=["C", "A"])
            first = int(made.ctypes.data)
            ready.append(made.copy() if first < stop and start < first + made.nbytes else made)
        return ready

    @bounded("run_slots", ExecutionError)
    def fallback(self, arrays: tuple[Any, ...]) -> Any:
        """The native check found something else than last time, or another thread: bind to it, or say what is wrong."""
        return self.served(self.run_anew, arrays)

    def run_anew(self, arrays: tuple[Any, ...]) -> Any:  # binds to them
        admitted = self.admit(arrays)
        with self.held():
            ready = self.compact(admitted)
            bound = self.execute(self.bind(ready), ready)
            return bound.results[self.states.parity[0]]

    def execute(self, bound: Bound, ready: Sequence[Array]) -> Bound:
        """One run on arrays that the run is bound to; the caller holds the block. Returns what it was bound to last."""
        before = {b: self.states.memory[b].copy() for b in self.program.states} if self.may_start_again else {}
        while True:
            if self.shared.options.debug:
                self.memory.fill(POISON)
            try:
                for number, word, shift in bound.patches:
                    ctypes.c_int64.from_address(word).value = ready[number].ctypes.data + shift
                status = self.go(bound, ready)
            finally:
                for root in self.program.inputs:  # a value that was given for a kept input counts for this run only
                    if root in self.states.memory:
                        bound.binding.point(root, self.address(root))
            if not status:
                if bound.fresh:
                    bound.fresh = False
                    self.settle(bound.binding.extents)
                return bound
            overrun = bound.binding.overrun(self.block, status)
            name, more = overrun.name, max(overrun.value, 2 * bound.binding.room[overrun.name])
            for root, held in before.items():
                self.states.memory[root][...] = held
            self.forget()
            with self.restoring():
                self.room = {**self.room, name: more}
                bound = self.bind(ready)
            log.info("%s: room for %s = %d", self.program.name, name, more)

    def go(self, bound: Bound, ready: Sequence[Array]) -> int:
        """Runs the block; the status."""
        trap = self.shared.options.trap
        if trap == "off":
            return self.block.run_acquired()
        from rlx.backends.cpu.runtime.nan_trap import stepped

        given = dict(zip(self.program.inputs, ready, strict=True))
        return stepped(self.block, bound.binding, self.array, given, trap)

    def on_error(self, status: int) -> Entry:
        """Asked by the entry of a failed run: the entry itself has `fallback` run it again, with more room."""
        assert self.bound is not None
        self.bound.binding.overrun(self.block, status)
        return self.entry
